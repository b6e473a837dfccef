//! One tree by several ways (S1): what an operation did is seen by the next one, by whichever mount.
//!
//! A case warms every way, so that each has in memory what is about to change; changes something by the
//! first (`Room::at`); and at once looks by the second (`Room::over`), by the others, and by the first itself.
//! It works in a directory below its own: what is above stays quiet, so that nothing there is asked again
//! only because its neighbours changed.

pub mod attributes;
pub mod data;
pub mod names;
pub mod open;
mod seen;

use super::cases;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::room::{Room, refuses};
use seen::Tree;

/// The ways to look, each with its name: the first is looked at last, for it may know its own change.
fn ways(room: &Room) -> Vec<(String, &Path)> {
    let mut ways = vec![("by the second way".to_owned(), room.beside.as_path())];
    for (i, other) in room.others.iter().enumerate() {
        ways.push((format!("by way {}", i + 3), other));
    }
    ways.push(("by the first way itself".to_owned(), &room.path));
    ways
}

/// Has everything looked at, twice by each way: listings, attributes, contents, targets, xattrs, and these
/// names, which are not there.
fn warm(room: &Room, absent: &[&str]) -> Result<()> {
    for (way, dir) in ways(room) {
        for _ in 0..2 {
            Tree::of(dir).with_context(|| format!("warming {way}"))?;
            all_absent(dir, absent).with_context(|| format!("warming {way}"))?;
        }
    }
    Ok(())
}

fn all_absent(dir: &Path, absent: &[&str]) -> Result<()> {
    for name in absent {
        refuses(fs::symlink_metadata(dir.join(name)), libc::ENOENT)
            .with_context(|| format!("{name} is there"))?;
    }
    Ok(())
}

/// By each way `check` passes, these names are not there, and the whole tree is the same.
fn all_see(room: &Room, absent: &[&str], check: impl Fn(&Path) -> Result<()>) -> Result<()> {
    let ways = ways(room);
    for (way, dir) in &ways {
        check(dir).with_context(|| way.clone())?;
        all_absent(dir, absent).with_context(|| way.clone())?;
    }
    let own = Tree::of(&room.path)?;
    for (way, dir) in &ways {
        let tree = Tree::of(dir).with_context(|| way.clone())?;
        if let Some(difference) = own.difference(&tree) {
            anyhow::bail!("{way} the tree differs from the first: {difference}");
        }
    }
    Ok(())
}

/// The file's whole contents.
fn reads(dir: &Path, name: &str, expected: &[u8]) -> Result<()> {
    let got = fs::read(dir.join(name)).with_context(|| name.to_owned())?;
    same(&got, expected).with_context(|| name.to_owned())
}

/// Says where contents differ.
fn same(got: &[u8], expected: &[u8]) -> Result<()> {
    let differs = got.iter().zip(expected).position(|(a, b)| a != b);
    let from = differs.unwrap_or(got.len().min(expected.len()));
    let some = |bytes: &[u8]| bytes[from..bytes.len().min(from + 16)].escape_ascii().to_string();
    ensure!(
        got == expected,
        "{} bytes are read, not {}, and from byte {from} on \"{}\", not \"{}\"",
        got.len(),
        expected.len(),
        some(got),
        some(expected)
    );
    Ok(())
}
