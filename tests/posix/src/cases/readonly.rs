//! `-o ro`: all reads succeed and all changes fail. The files to read are created on the other mount.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::symlink;

use anyhow::{Result, ensure};

use crate::room::{Room, refuses};
use crate::sys;

super::cases! { read_only:: reading, changing; }

fn filled(room: &Room) -> Result<()> {
    fs::write(room.over("f"), b"contents")?;
    fs::create_dir(room.over("d"))?;
    symlink("f", room.over("l"))?;
    room.comes("what was made beside", || room.at("f").exists() && room.at("d").exists())
}

fn reading(room: &Room) -> Result<()> {
    filled(room)?;
    ensure!(fs::read(room.at("f"))? == b"contents");
    ensure!(fs::read(room.at("l"))? == b"contents");
    ensure!(fs::read_dir(&room.path)?.count() == 3);
    sys::access(&room.at("f"), libc::R_OK)?;
    Ok(())
}

fn changing(room: &Room) -> Result<()> {
    filled(room)?;
    let rofs = libc::EROFS;
    refuses(fs::write(room.at("new"), b""), rofs)?;
    refuses(OpenOptions::new().write(true).open(room.at("f")), rofs)?;
    refuses(fs::create_dir(room.at("e")), rofs)?;
    refuses(fs::remove_file(room.at("f")), rofs)?;
    refuses(fs::remove_dir(room.at("d")), rofs)?;
    refuses(fs::rename(room.at("f"), room.at("g")), rofs)?;
    refuses(fs::hard_link(room.at("f"), room.at("g")), rofs)?;
    refuses(symlink("x", room.at("m")), rofs)?;
    refuses(sys::chmod(&room.at("f"), 0o600), rofs)?;
    refuses(sys::utimens(&room.at("f"), (1, 0), (1, 0)), rofs)?;
    refuses(sys::access(&room.at("f"), libc::W_OK), rofs)?;
    refuses(sys::set_xattr(&room.at("f"), "user.a", b"1", 0), rofs)?;
    ensure!(fs::read(room.over("f"))? == b"contents");
    Ok(())
}
