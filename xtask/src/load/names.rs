//! Workers that use names.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};

use super::{Calls, FIXED, fixed, listing};

/// Creates, renames and removes names in a directory of its own, and checks the directory after each.
pub fn changes(dir: &Path, calls: &mut Calls<'_>) -> Result<()> {
    let dir = dir.join("changed");
    calls.once("mkdir", libc::EEXIST, || fs::create_dir(&dir))?;
    let at = |name: &str| dir.join(name);
    let is = |calls: &mut Calls<'_>, names: &[&str]| -> Result<()> {
        let there = calls.must("list", || listing(&dir))?;
        ensure!(there == names, "there is {there:?} and not {names:?}");
        Ok(())
    };
    for number in 0_u64.. {
        let text = number.to_string();
        let make = || fs::OpenOptions::new().write(true).create_new(true).open(at("made")).map(drop);
        calls.once("create", libc::EEXIST, make)?;
        is(calls, &["made"])?;
        calls.must("write", || fs::write(at("made"), &text))?;
        calls.once("mkdir", libc::EEXIST, || fs::create_dir(at("sub")))?;
        is(calls, &["made", "sub"])?;
        calls.once("rename", libc::ENOENT, || fs::rename(at("made"), at("sub/moved")))?;
        is(calls, &["sub"])?;
        let read = calls.must("read", || fs::read_to_string(at("sub/moved")))?;
        ensure!(read == text, "{read:?} is read and not {text:?}");
        calls.once("link", libc::EEXIST, || fs::hard_link(at("sub/moved"), at("second")))?;
        calls.once("symlink", libc::EEXIST, || std::os::unix::fs::symlink("second", at("third")))?;
        is(calls, &["second", "sub", "third"])?;
        calls.once("unlink", libc::ENOENT, || fs::remove_file(at("sub/moved")))?;
        calls.once("rmdir", libc::ENOENT, || fs::remove_dir(at("sub")))?;
        calls.once("unlink", libc::ENOENT, || fs::remove_file(at("third")))?;
        calls.once("unlink", libc::ENOENT, || fs::remove_file(at("second")))?;
        is(calls, &[])?;
        if !calls.goes_on() {
            break;
        }
    }
    Ok(())
}

/// Lists a directory that never changes, and one in which other workers make changes.
pub fn lists(dir: &Path, calls: &mut Calls<'_>) -> Result<()> {
    let expected: Vec<String> = (0..FIXED).map(fixed).collect();
    while calls.goes_on() {
        let there = calls.must("list", || listing(&dir.join("fixed")))?;
        ensure!(there == expected, "a listing of {FIXED} names has {}", there.len());
        let top = calls.must("list", || listing(dir))?;
        for name in ["fixed", "given", "lock-flock", "lock-range"] {
            ensure!(top.iter().any(|there| there == name), "{name} is not in {top:?}");
        }
    }
    Ok(())
}

/// Looks up existing and absent names.
pub fn looks(dir: &Path, calls: &mut Calls<'_>) -> Result<()> {
    let mut n = 0;
    while calls.goes_on() {
        n = (n + 37) % FIXED;
        let path = dir.join("fixed").join(fixed(n));
        let length = calls.must("stat", || fs::metadata(&path))?.len();
        ensure!(length == 0, "{} has {length} bytes", path.display());
        let missing = calls.make(|| fs::metadata(dir.join("fixed").join(format!("none-{n}"))));
        let errno = missing.err().and_then(|error| error.raw_os_error());
        ensure!(errno == Some(libc::ENOENT), "what is not there is {errno:?}");
    }
    Ok(())
}
