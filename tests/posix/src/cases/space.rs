//! Space: sparse files, SEEK_DATA and SEEK_HOLE, fallocate, statfs.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};

use anyhow::{Result, ensure};

use crate::room::{Room, or_skip, or_skip_invalid, refuses};
use crate::sys;

super::cases! { space::
    sparse, seek_data_hole, seek_beyond_the_end, allocate, allocate_keep_size, punch_hole, zero_range, collapse_range,
    insert_range, bad_modes, blocks_follow_contents, statfs, statfs_changes;
}

const KEEP_SIZE: i32 = libc::FALLOC_FL_KEEP_SIZE;

fn opened(room: &Room, contents: &[u8]) -> Result<fs::File> {
    Ok(OpenOptions::new().read(true).write(true).open(room.file("f", contents)?)?)
}

fn sparse(room: &Room) -> Result<()> {
    let file = opened(room, b"")?;
    file.set_len(1 << 30)?;
    file.write_all_at(b"x", 500 << 20)?;
    file.sync_all()?;
    let meta = fs::metadata(room.at("f"))?;
    ensure!(meta.len() == 1 << 30);
    ensure!(meta.blocks() < 10_000, "{} blocks of 512 bytes for one byte", meta.blocks());
    Ok(())
}

fn seek_data_hole(room: &Room) -> Result<()> {
    let file = opened(room, b"")?;
    file.set_len(4 << 20)?;
    file.write_all_at(&[b'd'; 65_536], 1 << 20)?;
    file.sync_all()?;
    let first = or_skip_invalid(sys::seek(&file, 0, libc::SEEK_DATA), "SEEK_DATA")?;
    if first == 0 {
        return crate::room::skip("holes are not told apart here");
    }
    ensure!(first == 1 << 20, "data at {first}");
    ensure!(sys::seek(&file, 0, libc::SEEK_HOLE)? == 0);
    let hole = sys::seek(&file, 1 << 20, libc::SEEK_HOLE)?;
    ensure!(hole == (1 << 20) + 65_536, "hole at {hole}");
    refuses(sys::seek(&file, 2 << 20, libc::SEEK_DATA), libc::ENXIO)
}

fn seek_beyond_the_end(room: &Room) -> Result<()> {
    let file = opened(room, b"12345")?;
    refuses(sys::seek(&file, 5, libc::SEEK_DATA), libc::ENXIO)?;
    refuses(sys::seek(&file, 5, libc::SEEK_HOLE), libc::ENXIO)?;
    ensure!(sys::seek(&file, 0, libc::SEEK_HOLE)? == 5);
    refuses(sys::seek(&file, -1, libc::SEEK_SET), libc::EINVAL)?;
    refuses(sys::seek(&file, 0, 77), libc::EINVAL)?;
    ensure!(sys::seek(&file, 100, libc::SEEK_END)? == 105);
    Ok(())
}

fn allocate(room: &Room) -> Result<()> {
    let file = opened(room, b"head")?;
    or_skip(sys::fallocate(&file, 0, 0, 1 << 20), "fallocate")?;
    let meta = file.metadata()?;
    ensure!(meta.len() == 1 << 20, "length {}", meta.len());
    ensure!(meta.blocks() >= 2048, "{} blocks", meta.blocks());
    let back = fs::read(room.at("f"))?;
    ensure!(&back[..4] == b"head" && back[4..].iter().all(|&b| b == 0));
    refuses(sys::fallocate(&file, 0, 0, 0), libc::EINVAL)
}

fn allocate_keep_size(room: &Room) -> Result<()> {
    let file = opened(room, b"head")?;
    or_skip(sys::fallocate(&file, KEEP_SIZE, 0, 1 << 20), "fallocate KEEP_SIZE")?;
    ensure!(file.metadata()?.len() == 4 && fs::read(room.at("f"))? == b"head");
    Ok(())
}

fn punch_hole(room: &Room) -> Result<()> {
    let file = opened(room, &[b'p'; 40_960])?;
    ensure!(fs::read(room.at("f"))?.len() == 40_960);
    or_skip(sys::fallocate(&file, libc::FALLOC_FL_PUNCH_HOLE | KEEP_SIZE, 8000, 10_000), "hole punching")?;
    let back = fs::read(room.at("f"))?;
    ensure!(back.len() == 40_960);
    for (i, byte) in back.iter().enumerate() {
        let expected = if (8000..18_000).contains(&i) { 0 } else { b'p' };
        ensure!(*byte == expected, "byte {i} is {byte}");
    }
    Ok(())
}

fn zero_range(room: &Room) -> Result<()> {
    let file = opened(room, &[b'z'; 20_000])?;
    or_skip(sys::fallocate(&file, libc::FALLOC_FL_ZERO_RANGE, 10_000, 20_000), "FALLOC_FL_ZERO_RANGE")?;
    let back = fs::read(room.at("f"))?;
    ensure!(back.len() == 30_000 && back[9999] == b'z' && back[10_000..].iter().all(|&b| b == 0));
    Ok(())
}

fn ranged(room: &Room) -> Result<fs::File> {
    let mut contents = vec![b'1'; 16_384];
    contents.extend([b'2'; 16_384]);
    contents.extend([b'3'; 16_384]);
    opened(room, &contents)
}

fn collapse_range(room: &Room) -> Result<()> {
    let file = ranged(room)?;
    or_skip_invalid(sys::fallocate(&file, libc::FALLOC_FL_COLLAPSE_RANGE, 16_384, 16_384), "COLLAPSE_RANGE")?;
    let back = fs::read(room.at("f"))?;
    ensure!(back.len() == 32_768 && back[16_383] == b'1' && back[16_384] == b'3');
    Ok(())
}

fn insert_range(room: &Room) -> Result<()> {
    let file = ranged(room)?;
    or_skip_invalid(sys::fallocate(&file, libc::FALLOC_FL_INSERT_RANGE, 16_384, 16_384), "INSERT_RANGE")?;
    let back = fs::read(room.at("f"))?;
    ensure!(back.len() == 65_536 && back[16_384] == 0 && back[32_768] == b'2');
    Ok(())
}

fn bad_modes(room: &Room) -> Result<()> {
    let file = opened(room, b"x")?;
    refuses(sys::fallocate(&file, libc::FALLOC_FL_PUNCH_HOLE, 0, 10), libc::EOPNOTSUPP)?;
    refuses(sys::fallocate(&file, 0, -1, 10), libc::EINVAL)?;
    let reader = fs::File::open(room.at("f"))?;
    refuses(sys::fallocate(&reader, 0, 0, 10), libc::EBADF)
}

fn blocks_follow_contents(room: &Room) -> Result<()> {
    let file = opened(room, &[b'b'; 1 << 20])?;
    file.sync_all()?;
    let full = fs::metadata(room.at("f"))?.blocks();
    ensure!(full >= 2000, "{full} blocks for a MiB");
    file.set_len(0)?;
    file.sync_all()?;
    let empty = fs::metadata(room.at("f"))?.blocks();
    ensure!(empty < full, "{empty} blocks for nothing");
    Ok(())
}

fn statfs(room: &Room) -> Result<()> {
    let all = sys::statvfs(&room.path)?;
    ensure!(all.f_blocks > 0 && all.f_bfree <= all.f_blocks && all.f_bavail <= all.f_bfree);
    ensure!(all.f_namemax == 255, "name_max {}", all.f_namemax);
    ensure!(all.f_bsize > 0 && all.f_frsize > 0);
    let path = room.file("f", b"")?;
    let by_file = sys::statvfs(&path)?;
    ensure!(by_file.f_blocks == all.f_blocks && by_file.f_frsize == all.f_frsize);
    Ok(())
}

fn statfs_changes(room: &Room) -> Result<()> {
    let free = |room: &Room| -> Result<u64> {
        let space = sys::statvfs(&room.path)?;
        Ok(space.f_bfree.saturating_mul(space.f_frsize))
    };
    let before = free(room)?;
    let file = opened(room, b"")?;
    or_skip(sys::fallocate(&file, 0, 0, 64 << 20), "fallocate")?;
    file.sync_all()?;
    let within = |seconds, is_so: &dyn Fn(u64) -> bool| -> Result<bool> {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(seconds);
        while !is_so(free(room)?) {
            if std::time::Instant::now() > end {
                return Ok(false);
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        Ok(true)
    };
    if within(5, &|now| now + (32 << 20) < before)? {
        return Ok(());
    }
    // btrfs counts at its commit, which also gives back what earlier cases have removed. fsync(2) does not commit.
    file.set_len(0)?;
    sys::sync();
    let before = free(room)?;
    sys::fallocate(&file, 0, 0, 64 << 20)?;
    file.sync_all()?;
    sys::sync();
    ensure!(
        within(5, &|now| now + (32 << 20) < before)?,
        "64 MiB taken: {before} bytes were free, and {} are",
        free(room)?
    );
    Ok(())
}
