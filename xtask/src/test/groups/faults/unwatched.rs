//! Changes on sources without notifications: a read that begins after the staleness bound sees them, even if the new
//! file has the old one's inode number.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::process;
use crate::root;
use crate::test::groups::Test;
use crate::test::groups::filesystems::{disk, overlay};
use crate::test::mount::{Mount, MountParams};
use crate::test::over::LinkKind;
use crate::test::world::{As, World};

pub const TESTS: &[Test] = &[
    ("faults: a symlink replaced on a 9P server is read anew", symlink_over_9p),
    ("faults: a symlink replaced on an overlay is read anew", symlink_on_overlay),
    ("faults: an ACL set beside the mount is seen through an open file", acl_by_descriptor),
];

const LINKS: usize = 8;
/// The staleness bound of these mounts is 1 s.
const LATER: Duration = Duration::from_millis(1_500);

fn symlink_over_9p(world: &World) -> Result<()> {
    // On a filesystem that reuses inode numbers at once, if one is available.
    let disk = root::is_root().then(|| disk(world, "ext4", "nine")).transpose()?;
    let source = disk.as_ref().map_or_else(|| world.dir("nine", As::Us), |disk| Ok(disk.point.clone()))?;
    let how = MountParams { over: Some((LinkKind::Ninep, None)), ..MountParams::new(As::Us) };
    let mount = Mount::new(world, &source, &world.dir("mnt", As::Us)?, &how)?;
    replaced(&source, &mount.point, "links").with_context(|| mount.said())?;
    mount.unmount()
}

fn symlink_on_overlay(world: &World) -> Result<()> {
    if !root::is_root() {
        println!("SKIPPED: an overlay needs root");
        return Ok(());
    }
    let below = disk(world, "ext4", "below-unwatched")?;
    let over = overlay(world, &below.point)?;
    let mount = limited(world, &over.point)?;
    replaced(&over.point, &mount.point, "links").with_context(|| mount.said())?;
    mount.unmount()?;
    // An overlay inside an export whose root is watched and has birth times.
    let mount = limited(world, below.point.parent().context("a folder of disks")?)?;
    replaced(&over.point, &mount.point.join("overlay"), "inside").with_context(|| mount.said())?;
    mount.unmount()
}

fn limited<'w>(world: &'w World, source: &Path) -> Result<Mount<'w>> {
    Mount::new(world, source, &world.dir("mnt", As::Us)?, &MountParams::new(As::Us).with("--host-timeout=1s"))
}

/// Symlinks that were read on the mount are replaced on the source. The first read after the bound follows the new
/// ones.
fn replaced(beside: &Path, mounted: &Path, dir: &str) -> Result<()> {
    let (beside, mounted) = (beside.join(dir), mounted.join(dir));
    fs::create_dir(&beside)?;
    for target in ["one", "two"] {
        fs::write(beside.join(target), target)?;
    }
    let names: Vec<String> = (0..LINKS).map(|n| format!("link-{n}")).collect();
    let make = |target: &str| names.iter().try_for_each(|name| symlink(target, beside.join(name)));
    make("one")?;
    let number = |name: &String| fs::symlink_metadata(beside.join(name)).map(|about| about.ino());
    let before: Vec<u64> = names.iter().map(number).collect::<Result<_, _>>()?;
    sleep(LATER);
    for name in &names {
        ensure!(fs::read_link(mounted.join(name))? == Path::new("one"), "{name} before");
    }
    let mut reused = 0;
    for (name, before) in names.iter().zip(before) {
        fs::remove_file(beside.join(name))?;
        symlink("two", beside.join(name))?;
        reused += usize::from(number(name)? == before);
    }
    sleep(LATER);
    for (n, name) in names.iter().enumerate() {
        // Half of them are followed, half are read.
        let path = mounted.join(name);
        let seen = match n % 2 {
            0 => fs::read_to_string(path)?,
            _ => fs::read_link(path)?.display().to_string(),
        };
        ensure!(seen == "two", "{name} leads to {seen} ({reused} have the number of the old one)");
    }
    println!("{reused} of {LINKS} symlinks got the inode number of the one before");
    Ok(())
}

/// Calls by an open file look up no name, and the kernel caches ACLs without a timeout.
fn acl_by_descriptor(world: &World) -> Result<()> {
    let source = world.dir("source", As::Us)?;
    fs::write(source.join("file"), "text")?;
    let mount = limited(world, &source)?;
    let set = |entry: &str| -> Result<()> {
        process::output(std::process::Command::new("setfacl").args(["-m", entry]).arg(source.join("file")))?;
        Ok(())
    };
    let file = fs::File::open(mount.point.join("file"))?;
    let read = || -> Result<Vec<u8>> {
        let mut value = [0; 256];
        let length = rustix::fs::fgetxattr(&file, "system.posix_acl_access", &mut value)?;
        Ok(value[..length].to_vec())
    };
    set("u:1001:r")?;
    sleep(LATER);
    let first = read()?;
    set("u:1001:rwx")?;
    sleep(LATER);
    ensure!(read()? != first, "an ACL of long ago");
    drop(file);
    mount.unmount()
}
