//! Space of removed files.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::root;
use crate::test::groups::Test;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};

pub const TESTS: &[Test] =
    &[("faults: space of removed files is there while two mounts stand", space_after_removal)];

const LIMIT: Duration = Duration::from_secs(20);
const MIB: u64 = 1 << 20;

/// Unmounts when dropped.
struct Mounted<'w>(&'w World, &'w Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let mut umount = Command::new("umount");
        umount.arg("-l").arg(self.1);
        let _ = self.0.run(umount, LIMIT);
    }
}

fn space_after_removal(world: &World) -> Result<()> {
    if !root::is_root() {
        return Ok(());
    }
    let disk = world.dir("disk", As::Us)?;
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=16m", "none"]).arg(&disk);
    ensure!(world.run(mount, LIMIT)?.ok(), "no tmpfs");
    let _disk = Mounted(world, &disk);
    let how = MountParams::new(As::Us);
    let one = Mount::new(world, &disk, &world.dir("one", As::Us)?, &how)?;
    let two = Mount::new(world, &disk, &world.dir("two", As::Us)?, &how)?;
    let at = |name: &str| one.point.join(name);
    let write = |name: &str| -> Result<()> {
        let mut file = File::create(at(name))?;
        for _ in 0..10 {
            file.write_all(&vec![b'x'; 1 << 20]).with_context(|| name.to_owned())?;
        }
        Ok(())
    };
    write("first")?;
    fs::remove_file(at("first"))?;
    write("second")?;
    fs::write(at("small"), "x")?;
    fs::rename(at("small"), at("second"))?;
    let third = File::create(at("third"))?;
    rustix::fs::fallocate(&third, rustix::fs::FallocateFlags::empty(), 0, 10 * MIB).context("fallocate")?;
    drop(third);
    fs::remove_file(at("third"))?;
    write("fourth")?;
    // A file that the other mount has open keeps its space.
    let mut open = OpenOptions::new().read(true).write(true).open(two.point.join("fourth"))?;
    fs::remove_file(at("fourth"))?;
    ensure!(write("fifth").is_err(), "there is space for two");
    ensure!(open.metadata()?.len() == 10 * MIB);
    open.write_all(b"y").context("a file that is open")?;
    drop(open);
    one.unmount()?;
    two.unmount()
}
