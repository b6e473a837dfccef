//! The POSIX table on mounts of every filesystem that a server may have below it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::process;
use crate::report::TestReport;
use crate::root;
use crate::test::mount::{Mount, MountParams, no_orphans};
use crate::test::table::{self, Table};
use crate::test::world::{As, World};

/// A filesystem of its own in a file, or in memory; unmounted when dropped.
pub struct Disk {
    pub point: PathBuf,
}

impl Drop for Disk {
    fn drop(&mut self) {
        let plain = Command::new("umount").arg(&self.point).stderr(Stdio::null()).status();
        if !plain.is_ok_and(|s| s.success()) {
            let _ = Command::new("umount").arg("--lazy").arg(&self.point).stderr(Stdio::null()).status();
        }
    }
}

/// Makes and mounts one.
pub fn disk(world: &World, kind: &str, name: &str) -> Result<Disk> {
    if kind != "tmpfs" {
        return image(world, kind, name, 2 << 30, &[]);
    }
    mounted(world, name, Command::new("mount").args(["-t", "tmpfs", "tmpfs"]))
}

/// One in a file of so many bytes, made with these options.
pub fn image(world: &World, kind: &str, name: &str, bytes: u64, options: &[&str]) -> Result<Disk> {
    let image = world.root.join(format!("{name}.img"));
    fs::File::create(&image)?.set_len(bytes)?;
    let make = process::which(&format!("mkfs.{kind}")).with_context(|| format!("mkfs.{kind} is missing"))?;
    process::output(Command::new(make).arg("-q").args(options).arg(&image))?;
    mounted(world, name, Command::new("mount").args(["-o", "loop"]).arg(&image))
}

fn mounted(world: &World, name: &str, mount: &mut Command) -> Result<Disk> {
    let point = world.root.join("disks").join(name);
    fs::create_dir_all(&point)?;
    process::output(mount.arg(&point))?;
    Ok(Disk { point })
}

/// An overlay over what one disk holds, with its upper directory beside it.
pub fn overlay(world: &World, below: &Path) -> Result<Disk> {
    let point = world.root.join("disks/overlay");
    for dir in [&point, &below.join("lower"), &below.join("upper"), &below.join("scratch")] {
        fs::create_dir_all(dir)?;
    }
    fs::write(below.join("lower/from below"), b"lower")?;
    let dir = |name: &str| below.join(name).display().to_string();
    let options = format!("lowerdir={},upperdir={},workdir={}", dir("lower"), dir("upper"), dir("scratch"));
    process::output(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&point))?;
    Ok(Disk { point })
}

pub fn run(world: &World, tally: &mut TestReport) {
    if !root::is_root() {
        return tally.not_run("filesystems", "needs root");
    }
    let tables = world.sample.of("filesystems", &["ext4", "xfs", "btrfs", "tmpfs", "overlayfs"], 2);
    for kind in ["ext4", "xfs", "btrfs", "tmpfs"] {
        let table = tables.contains(&&kind);
        match disk(world, kind, kind) {
            Ok(disk) => one(world, tally, kind, &disk, table),
            Err(e) => tally.not_run(&format!("filesystems: {kind}"), &format!("{e:#}")),
        }
    }
    let below = disk(world, "ext4", "below-overlay").and_then(|d| overlay(world, &d.point).map(|o| (d, o)));
    match below {
        Ok((_below, top)) => one(world, tally, "overlayfs", &top, tables.contains(&&"overlayfs")),
        Err(e) => tally.not_run("filesystems: overlayfs", &format!("{e:#}")),
    }
    let tests: [super::Test; 3] = [
        ("an export that contains other mounts", nested_in_export),
        ("mounts below the mount stay", mounts_below),
        ("a bind mount of the mount point", bound_elsewhere),
    ];
    for (name, test) in tests {
        tally.test(name, || test(world));
    }
}

fn one(world: &World, tally: &mut TestReport, kind: &str, disk: &Disk, whole: bool) {
    let mut table = if whole { world.table() } else { Table::NAMES };
    if kind == "overlayfs" {
        // Without birth times an inode number that another case reuses at once leads an old file handle to its file.
        table.jobs = 1;
    }
    let source = disk.point.join("source");
    match fs::create_dir(&source) {
        Ok(()) => table::compare(world, tally, kind, &source, &MountParams::new(As::Us), &table),
        Err(e) => tally.fail(kind, &format!("{}: {e}", source.display())),
    }
    if kind == "btrfs" {
        tally.test("btrfs subvolumes", || subvolumes(world, disk));
    }
}

/// A subvolume's root has number 256 like every other's: two of them must not be taken for one.
fn subvolumes(world: &World, disk: &Disk) -> Result<()> {
    for name in ["one", "two"] {
        process::output(Command::new("btrfs").args(["subvolume", "create"]).arg(disk.point.join(name)))?;
        fs::write(disk.point.join(name).join("file"), name)?;
    }
    let point = world.dir("mnt", As::Us)?;
    let mount = Mount::new(world, &disk.point, &point, &MountParams::new(As::Us))?;
    distinct(world, &mount, &["one", "two"])?;
    let verdicts = table::run(world, &point.join("one"), As::Us, &names(world), Some(&mount))?;
    all_pass(&verdicts).context("inside a subvolume").context(mount.said())?;
    mount.unmount()?;
    no_orphans(&disk.point.join("one"))
}

/// The table where the rest of it holds already.
fn names(world: &World) -> Table<'static> {
    if world.short { Table::NAMES } else { Table::EVERYDAY }
}

fn all_pass(verdicts: &table::Verdicts) -> Result<()> {
    let failed = verdicts.iter().filter(|(_, v)| matches!(v, table::Verdict::Failed(_)));
    let failed: Vec<String> = failed.map(|(case, verdict)| format!("{case}: {verdict:?}")).collect();
    ensure!(failed.is_empty(), "{} cases fail: {}", failed.len(), failed[..failed.len().min(5)].join("; "));
    Ok(())
}

/// Each directory's `file` must hold the directory's name, and no two inode numbers be equal.
fn distinct(world: &World, mount: &Mount<'_>, names: &[&str]) -> Result<()> {
    let mut command = world.command("sh", As::Us);
    let list = names.join(" ");
    let text = format!(
        "for d in {list}; do test \"$(cat $d/file)\" = $d; done; stat -c %i . {list} {} | sort | uniq -d",
        names.iter().map(|n| format!("{n}/file")).collect::<Vec<_>>().join(" ")
    );
    command.args(["-euc", &text]).current_dir(&mount.point);
    let ended = mount.run(command, Duration::from_secs(20))?;
    ensure!(ended.ok(), "{}", ended.tail(5));
    ensure!(ended.said.trim().is_empty(), "inode numbers stand for two things: {}", ended.said.trim());
    Ok(())
}

fn nested_in_export(world: &World) -> Result<()> {
    let source = world.dir("source", As::Us)?;
    let mut disks = Vec::new();
    for name in ["one", "two"] {
        fs::create_dir(source.join(name))?;
        process::output(Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(source.join(name)))?;
        disks.push(Disk { point: source.join(name) });
        fs::write(source.join(name).join("file"), name)?;
    }
    let point = world.dir("mnt", As::Us)?;
    let mount = Mount::new(world, &source, &point, &MountParams::new(As::Us))?;
    distinct(world, &mount, &["one", "two"])?;
    let verdicts = table::run(world, &point.join("two"), As::Us, &names(world), Some(&mount))?;
    all_pass(&verdicts).context("inside a nested mount").context(mount.said())?;
    let mut command = world.command("sh", As::Us);
    let across =
        "ln one/file two/linked 2>&1 | grep -q -i 'cross-device'; mv one/file two/moved; cat two/moved";
    command.args(["-euc", across]).current_dir(&point);
    let ended = mount.run(command, Duration::from_secs(20))?;
    ensure!(ended.ok() && ended.said.trim() == "one", "across nested mounts: {}", ended.tail(5));
    mount.unmount()
}

fn mounts_below(world: &World) -> Result<()> {
    let (source, point) = (world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    fs::create_dir_all(source.join("a/b"))?;
    let how = MountParams::new(As::Us).with("--host-timeout=300ms");
    let mount = Mount::new(world, &source, &point, &how)?;
    process::output(Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(point.join("a/b")))?;
    let inner = Disk { point: point.join("a/b") };
    fs::write(inner.point.join("inside"), b"here")?;
    for round in 0..8 {
        fs::write(source.join(format!("a/beside{round}")), b"")?;
        fs::write(source.join(format!("beside{round}")), b"")?;
        fs::write(point.join(format!("through{round}")), b"")?;
        std::thread::sleep(Duration::from_millis(150));
        let mut command = world.command("sh", As::Us);
        command.args(["-euc", "ls -lR . > /dev/null; cat a/b/inside"]).current_dir(&point);
        let ended = mount.run(command, Duration::from_secs(20))?;
        ensure!(
            ended.ok() && ended.said.trim() == "here",
            "round {round}: the mount below was detached: {}",
            ended.tail(3)
        );
    }
    drop(inner);
    mount.unmount()
}

fn bound_elsewhere(world: &World) -> Result<()> {
    let (source, point) = (world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    let elsewhere = world.dir("bound", As::Us)?;
    fs::write(source.join("f"), b"through a bind mount")?;
    let mount = Mount::new(world, &source, &point, &MountParams::new(As::Us).with("-o").with("allow_other"))?;
    process::output(Command::new("mount").arg("--bind").arg(&point).arg(&elsewhere))?;
    let bound = Disk { point: elsewhere.clone() };
    let Some(tester) = world.tester else { bail!("no ordinary user can be made") };
    let mut command = world.command("cat", tester);
    command.arg(elsewhere.join("f"));
    let ended = mount.run(command, Duration::from_secs(10))?;
    ensure!(ended.said == "through a bind mount", "another user through a bind mount: {}", ended.tail(3));
    drop(bound);
    mount.unmount()
}
