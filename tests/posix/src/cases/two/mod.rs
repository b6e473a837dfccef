//! One tree on several mounts (S1): each mount sees an operation's effect from the next operation on.
//!
//! A case first warms every mount, so that each has cached what is about to change. It then makes a change on the
//! first (`Room::at`), and at once checks it on the second (`Room::over`), on the others, and on the first itself. It
//! works in a subdirectory of its own directory, so that the parent's entries are not fetched again only because a
//! sibling changed.

pub mod attributes;
pub mod data;
pub mod names;
pub mod open;
mod snapshot;

use super::cases;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::room::{Room, refuses};
use snapshot::TreeSnapshot;

/// Returns the mounts to check, each with a name; the first mount is last, because it knows its own change.
fn ways(room: &Room) -> Vec<(String, &Path)> {
    let mut ways = vec![("by the second way".to_owned(), room.beside.as_path())];
    for (i, other) in room.others.iter().enumerate() {
        ways.push((format!("by way {}", i + 3), other));
    }
    ways.push(("by the first way itself".to_owned(), &room.path));
    ways
}

/// Reads everything twice on each mount: listings, attributes, contents, targets, xattrs, and these absent names.
fn warm(room: &Room, absent: &[&str]) -> Result<()> {
    for (way, dir) in ways(room) {
        for _ in 0..2 {
            TreeSnapshot::of(dir).with_context(|| format!("warming {way}"))?;
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

/// Checks on each mount that `check` passes, these names are absent, and the whole tree is equal.
fn all_see(room: &Room, absent: &[&str], check: impl Fn(&Path) -> Result<()>) -> Result<()> {
    let ways = ways(room);
    for (way, dir) in &ways {
        check(dir).with_context(|| way.clone())?;
        all_absent(dir, absent).with_context(|| way.clone())?;
    }
    let own = TreeSnapshot::of(&room.path)?;
    for (way, dir) in &ways {
        let tree = TreeSnapshot::of(dir).with_context(|| way.clone())?;
        if let Some(difference) = own.difference(&tree) {
            anyhow::bail!("{way} the tree differs from the first: {difference}");
        }
    }
    Ok(())
}

/// Checks a file's whole contents.
fn reads(dir: &Path, name: &str, expected: &[u8]) -> Result<()> {
    let got = fs::read(dir.join(name)).with_context(|| name.to_owned())?;
    same(&got, expected).with_context(|| name.to_owned())
}

/// Reports where contents differ.
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
