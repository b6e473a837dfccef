//! open(2) and its flags.

use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};

use anyhow::{Result, ensure};

use crate::room::{Room, or_skip, or_skip_invalid, refuses};
use crate::sys;

super::cases! { create::
    mode_and_umask, exclusive, truncate, truncate_read_only_fd, append, append_two_fds, append_set_and_cleared,
    missing_directory,
    through_dangling_symlink, directory_for_writing, o_directory, o_nofollow, o_path, tmpfile_linked,
    tmpfile_unlinked, tmpfile_exclusive, direct, sync, write_to_read_only, read_from_write_only,
    read_only_mode_new_file, text_file_busy, open_many, reopen_after_unlink, trailing_slash;
}

fn mode_and_umask(room: &Room) -> Result<()> {
    for (umask, asked, got) in
        [(0o022, 0o666, 0o644), (0o077, 0o777, 0o700), (0, 0o604, 0o604), (0o027, 0o1755, 0o1750)]
    {
        sys::set_umask(umask);
        let path = room.at(format!("f{umask:o}"));
        drop(sys::open(&path, libc::O_CREAT | libc::O_WRONLY, asked)?);
        let mode = fs::metadata(&path)?.permissions().mode() & 0o7777;
        ensure!(mode == got, "file: umask {umask:o}, asked {asked:o}, got {mode:o}");
        let dir = room.at(format!("d{umask:o}"));
        let made = unsafe { libc::mkdir(sys::c(&dir)?.as_ptr(), asked) };
        ensure!(made == 0, "mkdir");
        let mode = fs::metadata(&dir)?.permissions().mode() & 0o7777;
        ensure!(mode == got, "directory: umask {umask:o}, asked {asked:o}, got {mode:o}");
    }
    Ok(())
}

fn exclusive(room: &Room) -> Result<()> {
    let path = room.at("f");
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR;
    refuses(fs::metadata(&path), libc::ENOENT)?;
    drop(sys::open(&path, flags, 0o644)?);
    refuses(sys::open(&path, flags, 0o644), libc::EEXIST)?;
    fs::remove_file(&path)?;
    drop(sys::open(&path, flags, 0o644)?);
    room.dir("d")?;
    refuses(sys::open(&room.at("d"), flags, 0o644), libc::EEXIST)
}

fn truncate(room: &Room) -> Result<()> {
    let path = room.file("f", b"something long")?;
    let fd = sys::open(&path, libc::O_RDWR | libc::O_TRUNC, 0)?;
    ensure!(fs::metadata(&path)?.len() == 0);
    fs::File::from(fd).write_all(b"short")?;
    ensure!(fs::read(&path)? == b"short");
    drop(sys::open(&path, libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC, 0o600)?);
    ensure!(fs::read(&path)?.is_empty());
    Ok(())
}

fn truncate_read_only_fd(room: &Room) -> Result<()> {
    let path = room.file("f", b"contents")?;
    let fd = sys::open(&path, libc::O_RDONLY, 0)?;
    refuses(sys::ftruncate(&fd, 0), libc::EINVAL)?;
    ensure!(fs::read(&path)? == b"contents");
    Ok(())
}

fn append(room: &Room) -> Result<()> {
    let path = room.file("f", b"one")?;
    let mut file = OpenOptions::new().append(true).open(&path)?;
    file.write_all(b"two")?;
    sys::seek(&file, 0, libc::SEEK_SET)?;
    file.write_all(b"three")?;
    ensure!(fs::read(&path)? == b"onetwothree");
    Ok(())
}

fn append_two_fds(room: &Room) -> Result<()> {
    let path = room.file("f", b"")?;
    let mut first = OpenOptions::new().append(true).open(&path)?;
    let mut second = OpenOptions::new().append(true).open(&path)?;
    let mut expected = String::new();
    for i in 0..50 {
        for (file, who) in [(&mut first, 'a'), (&mut second, 'b')] {
            let line = format!("{who}{i}\n");
            file.write_all(line.as_bytes())?;
            expected.push_str(&line);
        }
    }
    ensure!(fs::read_to_string(&path)? == expected, "appends overwrote one another");
    Ok(())
}

/// The flags set by fcntl(2) count, not those at open.
fn append_set_and_cleared(room: &Room) -> Result<()> {
    for opened_so in [true, false] {
        let path = room.file("f", b"contents")?;
        let file = OpenOptions::new().read(true).write(true).append(opened_so).open(&path)?;
        sys::set_flags(&file, 0)?;
        file.write_all_at(b"CON", 0)?;
        ensure!(fs::read(&path)? == b"CONtents", "a write at 0, opened to append: {opened_so}");
        sys::set_flags(&file, libc::O_APPEND)?;
        file.write_all_at(b" and more", 0)?;
        ensure!(fs::read(&path)? == b"CONtents and more", "an append, opened to append: {opened_so}");
    }
    Ok(())
}

fn missing_directory(room: &Room) -> Result<()> {
    refuses(sys::open(&room.at("no/f"), libc::O_CREAT | libc::O_RDWR, 0o644), libc::ENOENT)?;
    room.file("f", b"")?;
    refuses(sys::open(&room.at("f/x"), libc::O_CREAT | libc::O_RDWR, 0o644), libc::ENOTDIR)?;
    refuses(fs::metadata(room.at("f/x")), libc::ENOTDIR)
}

fn through_dangling_symlink(room: &Room) -> Result<()> {
    std::os::unix::fs::symlink("target", room.at("l"))?;
    let exclusive = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY;
    refuses(sys::open(&room.at("l"), exclusive, 0o644), libc::EEXIST)?;
    refuses(sys::open(&room.at("l"), libc::O_RDONLY, 0), libc::ENOENT)?;
    drop(sys::open(&room.at("l"), libc::O_CREAT | libc::O_WRONLY, 0o644)?);
    ensure!(fs::symlink_metadata(room.at("target"))?.is_file());
    Ok(())
}

fn directory_for_writing(room: &Room) -> Result<()> {
    room.dir("d")?;
    refuses(sys::open(&room.at("d"), libc::O_WRONLY, 0), libc::EISDIR)?;
    refuses(sys::open(&room.at("d"), libc::O_RDWR, 0), libc::EISDIR)?;
    refuses(sys::open(&room.at("d"), libc::O_CREAT | libc::O_RDONLY, 0o644), libc::EISDIR)?;
    let mut dir = fs::File::open(room.at("d"))?;
    refuses(dir.read(&mut [0; 10]), libc::EISDIR)
}

fn o_directory(room: &Room) -> Result<()> {
    room.file("f", b"")?;
    refuses(sys::open(&room.at("f"), libc::O_RDONLY | libc::O_DIRECTORY, 0), libc::ENOTDIR)?;
    drop(sys::open(&room.path, libc::O_RDONLY | libc::O_DIRECTORY, 0)?);
    Ok(())
}

fn o_nofollow(room: &Room) -> Result<()> {
    room.file("f", b"")?;
    std::os::unix::fs::symlink("f", room.at("l"))?;
    refuses(sys::open(&room.at("l"), libc::O_RDONLY | libc::O_NOFOLLOW, 0), libc::ELOOP)?;
    drop(sys::open(&room.at("f"), libc::O_RDONLY | libc::O_NOFOLLOW, 0)?);
    Ok(())
}

fn o_path(room: &Room) -> Result<()> {
    let path = room.file("f", b"contents")?;
    let fd = sys::open(&path, libc::O_PATH, 0)?;
    let file = fs::File::from(fd);
    ensure!(file.metadata()?.len() == 8);
    refuses((&file).read(&mut [0; 4]), libc::EBADF)
}

fn tmpfile_linked(room: &Room) -> Result<()> {
    let opened = sys::open(&room.path, libc::O_TMPFILE | libc::O_RDWR, 0o640);
    let mut file = fs::File::from(or_skip(opened, "O_TMPFILE")?);
    file.write_all(b"unnamed until now")?;
    let before = file.metadata()?;
    ensure!(before.nlink() == 0 && before.mode() & 0o7777 == 0o640, "nlink {} before", before.nlink());
    ensure!(fs::read_dir(&room.path)?.count() == 0, "an unnamed file is listed");
    sys::link_fd(&file, &room.at("named"))?;
    let after = fs::metadata(room.at("named"))?;
    ensure!(after.ino() == before.ino() && after.nlink() == 1, "nlink {} after", after.nlink());
    ensure!(fs::read(room.at("named"))? == b"unnamed until now");
    refuses(sys::link_fd(&file, &room.at("named")), libc::EEXIST)
}

fn tmpfile_unlinked(room: &Room) -> Result<()> {
    let opened = sys::open(&room.path, libc::O_TMPFILE | libc::O_RDWR, 0o600);
    let mut file = fs::File::from(or_skip(opened, "O_TMPFILE")?);
    file.write_all(b"gone")?;
    sys::seek(&file, 0, libc::SEEK_SET)?;
    let mut back = String::new();
    file.read_to_string(&mut back)?;
    ensure!(back == "gone");
    drop(file);
    ensure!(fs::read_dir(&room.path)?.count() == 0);
    Ok(())
}

fn tmpfile_exclusive(room: &Room) -> Result<()> {
    let flags = libc::O_TMPFILE | libc::O_RDWR | libc::O_EXCL;
    let file = or_skip(sys::open(&room.path, flags, 0o600), "O_TMPFILE")?;
    refuses(sys::link_fd(&file, &room.at("named")), libc::ENOENT)
}

fn direct(room: &Room) -> Result<()> {
    let path = room.at("f");
    let flags = libc::O_CREAT | libc::O_RDWR | libc::O_DIRECT;
    let file = fs::File::from(or_skip_invalid(sys::open(&path, flags, 0o644), "O_DIRECT")?);
    let mut raw = vec![0_u8; 4 * 4096];
    let skip = raw.as_ptr().align_offset(4096);
    raw[skip..skip + 8192].fill(b'd');
    let wrote = std::os::unix::fs::FileExt::write_at(&file, &raw[skip..skip + 8192], 4096)?;
    ensure!(wrote == 8192, "wrote {wrote}");
    raw[skip..skip + 8192].fill(0);
    let read = std::os::unix::fs::FileExt::read_at(&file, &mut raw[skip..skip + 8192], 4096)?;
    ensure!(read == 8192 && raw[skip..skip + 8192].iter().all(|&b| b == b'd'));
    let plain = fs::read(&path)?;
    ensure!(plain.len() == 12288 && plain[..4096].iter().all(|&b| b == 0) && plain[4096] == b'd');
    let cached = OpenOptions::new().write(true).open(&path)?;
    std::os::unix::fs::FileExt::write_all_at(&cached, &[b'c'; 4096], 4096)?;
    std::os::unix::fs::FileExt::read_at(&file, &mut raw[skip..skip + 4096], 4096)?;
    ensure!(raw[skip..skip + 4096].iter().all(|&b| b == b'c'), "a direct read misses a cached write");
    Ok(())
}

fn sync(room: &Room) -> Result<()> {
    for flag in [libc::O_SYNC, libc::O_DSYNC] {
        let path = room.at(format!("f{flag}"));
        let mut file =
            OpenOptions::new().create(true).truncate(true).write(true).custom_flags(flag).open(&path)?;
        file.write_all(b"durable")?;
        ensure!(fs::read(&path)? == b"durable");
    }
    Ok(())
}

fn write_to_read_only(room: &Room) -> Result<()> {
    let path = room.file("f", b"old")?;
    let mut file = fs::File::open(&path)?;
    refuses(file.write(b"new"), libc::EBADF)?;
    ensure!(fs::read(&path)? == b"old");
    Ok(())
}

fn read_from_write_only(room: &Room) -> Result<()> {
    let path = room.file("f", b"old")?;
    let mut file = OpenOptions::new().write(true).open(&path)?;
    refuses(file.read(&mut [0; 3]), libc::EBADF)
}

fn read_only_mode_new_file(room: &Room) -> Result<()> {
    let path = room.at("f");
    let fd = sys::open(&path, libc::O_CREAT | libc::O_RDWR, 0o444)?;
    fs::File::from(fd).write_all(b"written through the creating descriptor")?;
    ensure!(fs::metadata(&path)?.permissions().mode() & 0o777 == 0o444);
    ensure!(fs::read(&path)?.len() == 39);
    Ok(())
}

fn text_file_busy(room: &Room) -> Result<()> {
    let path = room.at("sleep");
    fs::copy("/bin/sleep", &path)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    let mut child = std::process::Command::new(&path).arg("20").spawn()?;
    let refused = refuses(OpenOptions::new().write(true).open(&path), libc::ETXTBSY);
    child.kill()?;
    child.wait()?;
    refused?;
    drop(OpenOptions::new().write(true).open(&path)?);
    Ok(())
}

fn open_many(room: &Room) -> Result<()> {
    let mut open = Vec::new();
    for i in 0..300 {
        let mut file = fs::File::create_new(room.at(format!("f{i}")))?;
        write!(file, "number {i}")?;
        open.push(file);
    }
    for i in 0..300 {
        ensure!(fs::read_to_string(room.at(format!("f{i}")))? == format!("number {i}"));
    }
    Ok(())
}

fn reopen_after_unlink(room: &Room) -> Result<()> {
    let path = room.file("f", b"first")?;
    let old = fs::File::open(&path)?;
    for i in 0..20 {
        fs::remove_file(&path)?;
        refuses(fs::metadata(&path), libc::ENOENT)?;
        fs::write(&path, format!("new {i}"))?;
        ensure!(fs::read_to_string(&path)? == format!("new {i}"));
    }
    let mut back = String::new();
    (&old).read_to_string(&mut back)?;
    ensure!(back == "first", "the unlinked file reads {back:?}");
    ensure!(old.metadata()?.nlink() == 0);
    Ok(())
}

fn trailing_slash(room: &Room) -> Result<()> {
    room.file("f", b"")?;
    refuses(fs::metadata(room.at("f/")), libc::ENOTDIR)?;
    refuses(sys::open(&room.at("new/"), libc::O_CREAT | libc::O_WRONLY, 0o644), libc::EISDIR)?;
    fs::create_dir(room.at("d/"))?;
    ensure!(fs::metadata(room.at("d/"))?.is_dir());
    Ok(())
}
