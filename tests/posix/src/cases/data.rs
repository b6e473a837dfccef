//! Reads return the written data: offsets, truncation, sharing, durability calls.

use std::fs::{self, OpenOptions};
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use anyhow::{Result, ensure};

use crate::room::{Room, or_skip, or_skip_invalid, refuses};
use crate::sys;

super::cases! { data::
    write_read, odd_sizes, beyond_the_end, read_past_the_end, over_4_gib, vectors, truncate_down_up,
    truncate_path, truncate_open_elsewhere, two_descriptors, two_processes, unlinked_stays_readable,
    replaced_stays_readable, fsync, sendfile, copy_range, copy_range_overlap, copy_range_between,
    poll, getflags, unknown_ioctl, fadvise, size_zero_writes, long_file;
}

fn pattern(length: u32, seed: u32) -> Vec<u8> {
    (0..length).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13).to_le_bytes()[0]).collect()
}

fn write_read(room: &Room) -> Result<()> {
    let contents = pattern(100_000, 1);
    let path = room.file("f", &contents)?;
    ensure!(fs::read(&path)? == contents);
    ensure!(fs::metadata(&path)?.len() == 100_000);
    Ok(())
}

fn odd_sizes(room: &Room) -> Result<()> {
    for length in [0, 1, 4095, 4096, 4097, 131_071, 131_072, 131_073, 1_048_575, 1_048_577, 3_000_001] {
        let contents = pattern(length, length);
        let path = room.file("f", &contents)?;
        ensure!(fs::read(&path)? == contents, "{length} bytes");
    }
    Ok(())
}

fn beyond_the_end(room: &Room) -> Result<()> {
    let path = room.file("f", b"start")?;
    let file = OpenOptions::new().write(true).open(&path)?;
    file.write_all_at(b"end", 10_000)?;
    let back = fs::read(&path)?;
    ensure!(back.len() == 10_003 && &back[..5] == b"start" && &back[10_000..] == b"end");
    ensure!(back[5..10_000].iter().all(|&b| b == 0));
    Ok(())
}

fn read_past_the_end(room: &Room) -> Result<()> {
    let file = fs::File::open(room.file("f", b"12345")?)?;
    let mut buffer = [0; 10];
    ensure!(file.read_at(&mut buffer, 3)? == 2);
    ensure!(file.read_at(&mut buffer, 5)? == 0);
    ensure!(file.read_at(&mut buffer, 1 << 40)? == 0);
    Ok(())
}

fn over_4_gib(room: &Room) -> Result<()> {
    let path = room.at("f");
    let file = OpenOptions::new().create_new(true).read(true).write(true).open(&path)?;
    let far = 5_u64 << 30;
    file.write_all_at(b"far away", far)?;
    file.write_all_at(b"at the 4 GiB line", (4 << 30) - 5)?;
    ensure!(fs::metadata(&path)?.len() == far + 8);
    let mut buffer = [0; 8];
    file.read_exact_at(&mut buffer, far)?;
    ensure!(&buffer == b"far away");
    file.read_exact_at(&mut buffer, (4 << 30) - 5)?;
    ensure!(&buffer == b"at the 4");
    ensure!(sys::seek(&file, -3, libc::SEEK_END)? == far + 5);
    Ok(())
}

fn vectors(room: &Room) -> Result<()> {
    let mut file = fs::File::create_new(room.at("f"))?;
    ensure!(file.write_vectored(&[IoSlice::new(b"one "), IoSlice::new(b""), IoSlice::new(b"two")])? == 7);
    let (mut a, mut b) = ([0; 3], [0; 10]);
    let mut file = fs::File::open(room.at("f"))?;
    ensure!(file.read_vectored(&mut [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b)])? == 7);
    ensure!(&a == b"one" && &b[..4] == b" two");
    Ok(())
}

fn truncate_down_up(room: &Room) -> Result<()> {
    let contents = pattern(20_000, 9);
    let path = room.file("f", &contents)?;
    ensure!(fs::read(&path)? == contents);
    let file = OpenOptions::new().read(true).write(true).open(&path)?;
    for cut in [12_345, 4097, 4096, 100, 1, 0] {
        file.set_len(cut)?;
        file.set_len(20_000)?;
        let back = fs::read(&path)?;
        let kept = usize::try_from(cut)?;
        ensure!(back.len() == 20_000 && back[..kept] == contents[..kept], "cut at {cut}");
        ensure!(back[kept..].iter().all(|&b| b == 0), "old bytes show behind {cut}");
    }
    Ok(())
}

fn truncate_path(room: &Room) -> Result<()> {
    let path = room.file("f", b"0123456789")?;
    let at = sys::c(&path)?;
    ensure!(unsafe { libc::truncate(at.as_ptr(), 4) } == 0);
    ensure!(fs::read(&path)? == b"0123");
    ensure!(unsafe { libc::truncate(at.as_ptr(), 6) } == 0);
    ensure!(fs::read(&path)? == b"0123\0\0");
    let dir = room.dir("d")?;
    ensure!(unsafe { libc::truncate(sys::c(&dir)?.as_ptr(), 0) } == -1);
    ensure!(std::io::Error::last_os_error().raw_os_error() == Some(libc::EISDIR));
    refuses(OpenOptions::new().write(true).open(room.at("f"))?.set_len(u64::MAX >> 1), libc::EFBIG)
        .or_else(|e| if fs::metadata(&path)?.len() == u64::MAX >> 1 { Ok(()) } else { Err(e) })
}

fn truncate_open_elsewhere(room: &Room) -> Result<()> {
    let path = room.file("f", &pattern(50_000, 3))?;
    let reader = fs::File::open(&path)?;
    let mut buffer = vec![0; 50_000];
    reader.read_exact_at(&mut buffer, 0)?;
    OpenOptions::new().write(true).open(&path)?.set_len(10)?;
    ensure!(reader.read_at(&mut buffer, 0)? == 10);
    ensure!(reader.metadata()?.len() == 10);
    Ok(())
}

fn two_descriptors(room: &Room) -> Result<()> {
    let path = room.file("f", &[b'-'; 10_000])?;
    let writer = OpenOptions::new().write(true).open(&path)?;
    let reader = fs::File::open(&path)?;
    for i in 0..100_u64 {
        let text = format!("round {i:4}");
        writer.write_all_at(text.as_bytes(), i * 97)?;
        let mut back = [0; 10];
        reader.read_exact_at(&mut back, i * 97)?;
        ensure!(back == text.as_bytes(), "round {i}");
    }
    Ok(())
}

fn two_processes(room: &Room) -> Result<()> {
    let path = room.file("f", b"")?;
    let end = std::time::Duration::from_secs(20);
    for i in 0..20_u32 {
        let contents = pattern(5000 + i, i);
        let (to, text) = (path.clone(), contents.clone());
        let pid = sys::fork(move || fs::write(&to, &text).is_ok())?;
        ensure!(sys::joined(pid, end), "the writing process failed");
        ensure!(fs::read(&path)? == contents, "round {i}");
    }
    Ok(())
}

fn unlinked_stays_readable(room: &Room) -> Result<()> {
    let contents = pattern(300_000, 5);
    let path = room.file("f", &contents)?;
    let file = OpenOptions::new().read(true).write(true).open(&path)?;
    fs::remove_file(&path)?;
    ensure!(fs::read_dir(&room.path)?.count() == 0, "something is listed in its place");
    let mut back = vec![0; 300_000];
    file.read_exact_at(&mut back, 0)?;
    ensure!(back == contents);
    file.write_all_at(b"still writable", 300_000)?;
    ensure!(file.metadata()?.len() == 300_014);
    file.set_len(5)?;
    ensure!(file.read_at(&mut back, 0)? == 5);
    Ok(())
}

fn replaced_stays_readable(room: &Room) -> Result<()> {
    let path = room.file("f", b"the old one")?;
    let old = OpenOptions::new().read(true).write(true).open(&path)?;
    room.file("g", b"the new one, longer")?;
    fs::rename(room.at("g"), &path)?;
    ensure!(fs::read(&path)? == b"the new one, longer");
    let mut back = [0; 11];
    old.read_exact_at(&mut back, 0)?;
    ensure!(&back == b"the old one");
    old.write_all_at(b"XXX", 0)?;
    ensure!(fs::read(&path)? == b"the new one, longer", "a write to the old file reached the new one");
    Ok(())
}

fn fsync(room: &Room) -> Result<()> {
    let mut file = fs::File::create_new(room.at("f"))?;
    file.write_all(b"durable")?;
    file.sync_data()?;
    file.sync_all()?;
    fs::File::open(&room.path)?.sync_all()?;
    fs::File::open(room.at("f"))?.sync_all()?;
    Ok(())
}

fn sendfile(room: &Room) -> Result<()> {
    let contents = pattern(200_000, 8);
    let from = fs::File::open(room.file("f", &contents)?)?;
    let to = fs::File::create_new(room.at("g"))?;
    let mut left = 200_000_u64;
    while left > 0 {
        let count = libc::size_t::try_from(left)?;
        let sent = unsafe { libc::sendfile(to.as_raw_fd(), from.as_raw_fd(), std::ptr::null_mut(), count) };
        ensure!(sent > 0, "{}", std::io::Error::last_os_error());
        left -= u64::try_from(sent)?;
    }
    ensure!(fs::read(room.at("g"))? == contents);
    Ok(())
}

fn copy_range(room: &Room) -> Result<()> {
    let contents = pattern(100_000, 2);
    let path = room.file("f", &contents)?;
    let file = OpenOptions::new().read(true).write(true).open(&path)?;
    let copied = or_skip(sys::copy_range(&file, 1000, &file, 200_000, 50_000), "copy_file_range")?;
    ensure!(copied == 50_000, "copied {copied}");
    let back = fs::read(&path)?;
    ensure!(back.len() == 250_000 && back[200_000..] == contents[1000..51_000]);
    ensure!(sys::copy_range(&file, 250_000, &file, 0, 10)? == 0, "copied from behind the end");
    Ok(())
}

fn copy_range_overlap(room: &Room) -> Result<()> {
    let path = room.file("f", &pattern(10_000, 2))?;
    let file = OpenOptions::new().read(true).write(true).open(&path)?;
    refuses(sys::copy_range(&file, 0, &file, 100, 5000), libc::EINVAL)
}

fn copy_range_between(room: &Room) -> Result<()> {
    let contents = pattern(1_000_000, 4);
    let from = fs::File::open(room.file("f", &contents)?)?;
    let to = fs::File::create_new(room.at("g"))?;
    let mut at = 0_i64;
    while at < 1_000_000 {
        let copied = or_skip(sys::copy_range(&from, at, &to, at, 1_000_000), "copy_file_range")?;
        ensure!(copied > 0);
        at += i64::try_from(copied)?;
    }
    ensure!(fs::read(room.at("g"))? == contents);
    Ok(())
}

fn poll(room: &Room) -> Result<()> {
    let file = fs::File::open(room.file("f", b"x")?)?;
    let mut wanted = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN | libc::POLLOUT, revents: 0 };
    ensure!(unsafe { libc::poll(&raw mut wanted, 1, 1000) } == 1);
    ensure!(wanted.revents & libc::POLLIN != 0, "revents {:x}", wanted.revents);
    Ok(())
}

fn getflags(room: &Room) -> Result<()> {
    let request = 0x8008_6601;
    let file = fs::File::open(room.file("f", b"x")?)?;
    let flags = or_skip_invalid(sys::ioctl_int(&file, request), "FS_IOC_GETFLAGS")?;
    ensure!(flags & 0x10 == 0, "an ordinary file shows as immutable: {flags:x}");
    let dir = fs::File::open(&room.path)?;
    or_skip_invalid(sys::ioctl_int(&dir, request), "FS_IOC_GETFLAGS of a directory")?;
    Ok(())
}

fn unknown_ioctl(room: &Room) -> Result<()> {
    let file = fs::File::open(room.file("f", b"x")?)?;
    refuses(sys::ioctl_int(&file, 0x8008_4e01), libc::ENOTTY)?;
    refuses(sys::ioctl_int(&file, 0x5401), libc::ENOTTY)
}

fn fadvise(room: &Room) -> Result<()> {
    let contents = pattern(100_000, 6);
    let path = room.file("f", &contents)?;
    let mut file = fs::File::open(&path)?;
    for advice in [libc::POSIX_FADV_SEQUENTIAL, libc::POSIX_FADV_WILLNEED, libc::POSIX_FADV_DONTNEED] {
        ensure!(unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, advice) } == 0, "advice {advice}");
    }
    let mut back = Vec::new();
    file.read_to_end(&mut back)?;
    ensure!(back == contents);
    Ok(())
}

fn size_zero_writes(room: &Room) -> Result<()> {
    let mut file = fs::File::create_new(room.at("f"))?;
    ensure!(file.write(b"")? == 0);
    ensure!(file.write_at(b"", 1000)? == 0);
    ensure!(file.metadata()?.len() == 0, "an empty write made the file longer");
    Ok(())
}

fn long_file(room: &Room) -> Result<()> {
    let path = room.at("f");
    let mut file = fs::File::create_new(&path)?;
    for i in 0..16 {
        file.write_all(&pattern(1 << 20, i))?;
    }
    drop(file);
    let mut file = fs::File::open(&path)?;
    for i in 0..16 {
        let mut back = vec![0; 1 << 20];
        file.read_exact(&mut back)?;
        ensure!(back == pattern(1 << 20, i), "MiB {i}");
    }
    Ok(())
}
