//! Names: bytes, lengths, and names that no listing may contain.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;

use anyhow::{Result, ensure};

use crate::room::{Room, refuses};

super::cases! { names::
    not_utf8, longest, too_long, odd_bytes, case_matters, many_lengths, dots, long_path;
}

fn listed(room: &Room) -> Result<BTreeSet<OsString>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(&room.path)? {
        ensure!(names.insert(entry?.file_name()), "a name is listed twice");
    }
    Ok(names)
}

fn not_utf8(room: &Room) -> Result<()> {
    let names: [&[u8]; 4] = [b"\xff\xfe", b"caf\xe9", b"\x80", b"a\xc3"];
    for name in names {
        fs::write(room.at(OsStr::from_bytes(name)), name)?;
    }
    let listed = listed(room)?;
    for name in names {
        ensure!(listed.contains(OsStr::from_bytes(name)), "{} is not listed", name.escape_ascii());
        ensure!(fs::read(room.at(OsStr::from_bytes(name)))? == name);
        fs::rename(room.at(OsStr::from_bytes(name)), room.at("plain"))?;
        fs::remove_file(room.at("plain"))?;
    }
    Ok(())
}

fn longest(room: &Room) -> Result<()> {
    for byte in [b"x".as_slice(), b"\xe9"] {
        let name = byte.repeat(255);
        let path = room.at(OsStr::from_bytes(&name));
        fs::write(&path, b"long")?;
        ensure!(fs::read(&path)? == b"long");
        ensure!(listed(room)?.contains(OsStr::from_bytes(&name)));
        fs::remove_file(&path)?;
        fs::create_dir(&path)?;
        fs::write(path.join(OsStr::from_bytes(&name)), b"")?;
    }
    Ok(())
}

fn too_long(room: &Room) -> Result<()> {
    let path = room.at("x".repeat(256));
    refuses(fs::metadata(&path), libc::ENAMETOOLONG)?;
    refuses(fs::write(&path, b""), libc::ENAMETOOLONG)?;
    refuses(fs::create_dir(&path), libc::ENAMETOOLONG)?;
    room.file("f", b"")?;
    refuses(fs::rename(room.at("f"), &path), libc::ENAMETOOLONG)?;
    refuses(fs::hard_link(room.at("f"), &path), libc::ENAMETOOLONG)?;
    refuses(std::os::unix::fs::symlink("f", &path), libc::ENAMETOOLONG)
}

fn odd_bytes(room: &Room) -> Result<()> {
    let mut expected = BTreeSet::new();
    for byte in 1..=255_u8 {
        if byte == b'/' || byte == b'.' {
            continue;
        }
        let name = OsStr::from_bytes(&[byte]).to_owned();
        fs::write(room.at(&name), [byte])?;
        expected.insert(name);
    }
    for name in ["new\nline", " ", "-rf", "a\\b", "*", "...", "..a", "\u{202e}"] {
        fs::write(room.at(name), name)?;
        expected.insert(name.into());
    }
    ensure!(listed(room)? == expected);
    for name in &expected {
        ensure!(fs::read(room.at(name))? == name.as_bytes());
    }
    Ok(())
}

fn case_matters(room: &Room) -> Result<()> {
    room.file("Name", b"upper")?;
    refuses(fs::metadata(room.at("name")), libc::ENOENT)?;
    room.file("name", b"lower")?;
    ensure!(fs::read(room.at("Name"))? == b"upper" && listed(room)?.len() == 2);
    let (composed, decomposed) = ("\u{e9}", "e\u{301}");
    room.file(composed, b"1")?;
    refuses(fs::metadata(room.at(decomposed)), libc::ENOENT)
}

fn many_lengths(room: &Room) -> Result<()> {
    for length in 1..=255 {
        fs::write(room.at("n".repeat(length)), format!("{length}"))?;
    }
    ensure!(listed(room)?.len() == 255);
    for length in 1..=255 {
        ensure!(fs::read_to_string(room.at("n".repeat(length)))? == format!("{length}"));
    }
    Ok(())
}

fn dots(room: &Room) -> Result<()> {
    room.dir("d")?;
    refuses(fs::create_dir(room.at("d/.")), libc::EEXIST)?;
    refuses(fs::create_dir(room.at("d/..")), libc::EEXIST)?;
    refuses(fs::rename(room.at("d/."), room.at("e")), libc::EBUSY)?;
    ensure!(fs::metadata(room.at("d/../d/./."))?.is_dir());
    Ok(())
}

fn long_path(room: &Room) -> Result<()> {
    let path = room.at(format!("{}x", "./".repeat(2048)));
    refuses(fs::metadata(&path), libc::ENAMETOOLONG)
}
