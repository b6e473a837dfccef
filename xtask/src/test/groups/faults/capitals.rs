//! Case-insensitive sources: each spelling of a name leads to one file, whichever spelling was used first.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::process;
use crate::root;
use crate::test::groups::Test;
use crate::test::groups::filesystems::Disk;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};

pub const TESTS: &[Test] = &[
    ("faults: each spelling of a name leads to one file", one_mount),
    ("faults: another mount's change counts for each spelling", two_mounts),
];

/// A case-insensitive NTFS, by `lowntfs-3g`. `None`: it is not available here.
fn ntfs(world: &World) -> Result<Option<Disk>> {
    let Some((make, program)) = process::which("mkfs.ntfs").zip(process::which("lowntfs-3g")) else {
        println!("SKIPPED: there is no mkfs.ntfs or lowntfs-3g");
        return Ok(None);
    };
    if !root::is_root() {
        println!("SKIPPED: a filesystem of one's own needs root");
        return Ok(None);
    }
    let (image, point) = (world.root.join("ntfs.img"), world.root.join("disks/ntfs"));
    fs::File::create(&image)?.set_len(64 << 20)?;
    fs::create_dir_all(&point)?;
    process::output(Command::new(make).args(["-F", "-Q"]).arg(&image))?;
    process::output(Command::new(program).args(["-o", "ignore_case"]).arg(&image).arg(&point))?;
    Ok(Some(Disk { point }))
}

fn how() -> MountParams {
    MountParams::new(As::Us).with("--host-timeout=1h")
}

fn missing(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Returns the names, without those of open removed files that `lowntfs-3g` renames.
fn names(dir: &Path) -> Result<Vec<String>> {
    let names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names: Vec<String> = names.collect::<Result<_>>()?;
    Ok(names.into_iter().filter(|name| !name.starts_with(".ghost-ntfs-3g-")).collect())
}

fn one_mount(world: &World) -> Result<()> {
    let Some(disk) = ntfs(world)? else { return Ok(()) };
    let mount = Mount::new(world, &disk.point, &world.dir("mnt", As::Us)?, &how())?;
    let dir = mount.point.join("dir");
    fs::create_dir(&dir)?;
    let at = |name: &str| -> PathBuf { dir.join(name) };
    // A name that is absent in each spelling, and an empty listing.
    ensure!(missing(&at("file")) && missing(&at("FILE")) && names(&dir)?.is_empty(), "something is there");
    fs::write(at("File"), "one")?;
    for name in ["FILE", "file", "fILE"] {
        ensure!(fs::read_to_string(at(name)).context("after it was made")? == "one", "{name}");
    }
    ensure!(names(&dir)?.len() == 1, "{:?}", names(&dir)?);
    fs::write(at("FILE"), "longer")?;
    ensure!(fs::read_to_string(at("File"))? == "longer" && names(&dir)?.len() == 1, "written by FILE");
    let exists =
        fs::File::create_new(at("fiLE")).is_err_and(|error| error.kind() == ErrorKind::AlreadyExists);
    ensure!(exists, "fiLE is made beside File");
    fs::rename(at("File"), at("Other"))?;
    ensure!(["FILE", "File", "file"].iter().all(|name| missing(&at(name))), "the name before");
    ensure!(fs::read_to_string(at("OTHER"))? == "longer", "OTHER");
    fs::remove_file(at("OTHER"))?;
    ensure!(missing(&at("Other")) && missing(&at("other")) && names(&dir)?.is_empty(), "removed as OTHER");
    // The filesystem knows a file that is not open no more after its removal, nor one that a rename replaces.
    fs::write(at("File"), "")?;
    fs::remove_file(at("FILE")).context("removed while it is not open")?;
    fs::write(at("File"), "")?;
    fs::write(at("Other"), "")?;
    fs::rename(at("FILE"), at("OTHER")).context("replaced while it is not open")?;
    ensure!(missing(&at("File")) && names(&dir)?.len() == 1, "{:?}", names(&dir)?);
    fs::create_dir(at("Sub"))?;
    fs::write(at("SUB/inner"), "in")?;
    ensure!(fs::read_to_string(at("sub/INNER"))? == "in", "a directory by another spelling");
    mount.unmount()
}

fn two_mounts(world: &World) -> Result<()> {
    let Some(disk) = ntfs(world)? else { return Ok(()) };
    let one = Mount::new(world, &disk.point, &world.dir("mnt", As::Us)?, &how())?;
    let two = Mount::new(world, &disk.point, &world.dir("mnt-second", As::Us)?, &how())?;
    let (here, there) = (|name: &str| one.point.join(name), |name: &str| two.point.join(name));
    fs::write(here("File"), "one")?;
    names(&two.point)?;
    ensure!(fs::read_to_string(there("FILE"))? == "one" && missing(&there("Next")), "looked at");
    fs::rename(here("file"), here("NEXT"))?;
    ensure!(missing(&there("FILE")) && missing(&there("File")), "the name before");
    ensure!(fs::read_to_string(there("Next"))? == "one", "the new name");
    fs::write(here("next"), "longer")?;
    ensure!(fs::read_to_string(there("Next"))? == "longer", "written by another spelling");
    fs::remove_file(here("nExt"))?;
    ensure!(missing(&there("Next")) && missing(&there("NEXT")), "removed by another spelling");
    two.unmount()?;
    one.unmount()
}
