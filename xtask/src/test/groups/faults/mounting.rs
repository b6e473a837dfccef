//! Mounting as mount(8), mount.fuse3(8) and fstab(5) do it, and impossible mount points.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::process;
use crate::root;
use crate::test::groups::Test;
use crate::test::mount::{Mount, MountParams, device_of};
use crate::test::over::{self, LinkKind};
use crate::test::world::{As, World};

pub const TESTS: &[Test] = &[
    ("faults: mount.nigh and umount.nigh do as mount(8) wants", helpers),
    ("faults: mount -t fuse.nigh and a line of fstab mount", by_mount_fuse3),
    ("faults: suid and dev are refused to a user", suid_as_user),
    ("faults: mount point inside of its own source is refused", inside),
    ("faults: mount of a server's export below that export is not entered through it", inside_by_socket),
];

const LIMIT: Duration = Duration::from_secs(30);
const GENERIC: &str =
    "rw,users,nofail,_netdev,x-systemd.automount,X-a=b,comment=c,noatime,nodiratime,lazytime,async,defaults";

/// Creates a directory with links to nigh under the names by which mount(8) calls it.
fn links(world: &World) -> Result<PathBuf> {
    let dir = world.dir("sbin", As::Us)?;
    for name in ["mount.nigh", "mount.fuse.nigh", "umount.nigh", "nigh"] {
        symlink(world.nigh(), dir.join(name))?;
    }
    Ok(dir)
}

fn expect(world: &World, command: Command, code: i32) -> Result<String> {
    let shown = format!("{command:?}");
    let ended = world.run(command, LIMIT)?;
    ensure!(
        ended.code() == Some(code),
        "{shown}: exit {:?}, expected {code}: {}",
        ended.code(),
        ended.tail(3)
    );
    Ok(ended.said)
}

fn umounted(world: &World, point: &Path) -> Result<()> {
    let mut command = world.command(world.nigh(), As::Us);
    command.arg("umount").arg(point);
    expect(world, command, 0)?;
    ensure!(device_of(point).is_none(), "still mounted");
    Ok(())
}

fn helpers(world: &World) -> Result<()> {
    let sbin = links(world)?;
    let (source, point) = (world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    fs::write(source.join("file"), b"1")?;
    let text = |path: &Path| path.display().to_string();
    let (from, to) = (text(&source), text(&point));
    // A mount unit sets no HOME.
    let helper = |name: &str, words: &[&str]| {
        let mut command = world.command(sbin.join(name), As::Us);
        command.args(words).env_remove("HOME");
        command
    };
    let options = format!("{GENERIC},ro,cache-size=16M,prefetch=off,on-disconnect=fail,request-timeout=9s");
    for (name, words) in [
        ("mount.nigh", [&from, &to, "-n", "-v", "-o", &options[..]].as_slice()),
        ("mount.fuse.nigh", &[&from, &to, "-s", "-o", "ro,unheard-of", "-t", "fuse.nigh"]),
        // The call of mount.fuse3.
        ("nigh", &[&from, &to, "-o", "ro,dev,suid"]),
    ] {
        expect(world, helper(name, words), 0)?;
        ensure!(fs::read(point.join("file"))? == b"1", "{name}");
        ensure!(fs::write(point.join("new"), b"").is_err(), "{name}: -o ro");
        expect(world, helper("umount.nigh", &[&to, "-n", "-v"]), 0)?;
        ensure!(device_of(&point).is_none(), "{name}: still mounted");
    }
    expect(world, helper("mount.nigh", &[&from, &to, "-f"]), 0)?;
    ensure!(device_of(&point).is_none(), "-f mounts nothing");
    let missing = text(&world.root.join("missing"));
    for (name, words, code) in [
        ("mount.nigh", [&from[..], &to, "-o", "unheard-of"].as_slice(), 1),
        ("mount.nigh", &[&from, &to, "-o", "cache-size=much"], 1),
        ("mount.nigh", &[&from], 1),
        ("mount.nigh", &[&from, &to, "-z"], 1),
        ("mount.nigh", &[&from, &missing], 32),
        ("nigh", &[&missing, &to, "-o", "rw"], 32),
        ("umount.nigh", &[&to], 32),
    ] {
        let said = expect(world, helper(name, words), code)?;
        ensure!(said.trim().lines().count() == 1, "{name} {words:?}: {said}");
        ensure!(device_of(&point).is_none(), "{name} {words:?} mounts");
    }
    Ok(())
}

fn by_mount_fuse3(world: &World) -> Result<()> {
    if !Path::new("/usr/sbin/mount.fuse3").exists() || !root::is_root() {
        println!("SKIPPED: needs root and mount.fuse3");
        return Ok(());
    }
    let sbin = links(world)?;
    let (source, point) = (world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    fs::write(source.join("file"), b"1")?;
    let table = world.root.join("fstab");
    let line = format!("{} {} fuse.nigh {GENERIC},max-dirs=9 0 0\n", source.display(), point.display());
    fs::write(&table, line)?;
    let mut by_type = world.command("mount", As::Us);
    by_type.args(["-t", "fuse.nigh", "-o", "noatime,cache-size=16M"]).arg(&source).arg(&point);
    let mut by_source = world.command("mount", As::Us);
    by_source.args(["-t", "fuse"]).arg(format!("nigh#{}", source.display())).arg(&point);
    let mut by_table = world.command("mount", As::Us);
    by_table.arg("--fstab").arg(&table).arg(&point);
    // mount.fuse3 looks for programs in the usual places only. The mount namespace belongs to this test run.
    let usual = Path::new("/usr/local/bin");
    process::output(Command::new("mount").arg("--bind").arg(&sbin).arg(usual))?;
    let result = [by_type, by_source, by_table].into_iter().try_for_each(|command| {
        expect(world, command, 0)?;
        ensure!(fs::read(point.join("file"))? == b"1", "what was mounted");
        umounted(world, &point)
    });
    process::output(Command::new("umount").arg("--lazy").arg(usual))?;
    result
}

fn suid_as_user(world: &World) -> Result<()> {
    let Some(who @ As::Tester { .. }) = world.tester else {
        println!("SKIPPED: needs root, and an ordinary user");
        return Ok(());
    };
    let (source, point) = (world.dir("source", who)?, world.dir("mnt", who)?);
    for option in ["suid", "dev", "suid,dev"] {
        let mut command = world.command(world.nigh(), who);
        command.arg("mount").arg(&source).arg(&point).args(["-o", option]);
        let said = expect(world, command, 2)?;
        ensure!(said.trim().lines().count() == 1 && said.contains("only root"), "{option}: {said}");
        ensure!(device_of(&point).is_none(), "{option}: mounted");
    }
    Ok(())
}

/// The mount point is in the source by its path, through a symlink, and through a bind mount.
fn inside(world: &World) -> Result<()> {
    let source = world.dir("source", As::Us)?;
    let deep = source.join("deep/in");
    fs::create_dir_all(&deep)?;
    let link = world.root.join("link");
    let _ = fs::remove_file(&link);
    symlink(&source, &link)?;
    let bound = world.dir("bound", As::Us)?;
    process::output(Command::new("mount").arg("--bind").arg(&source).arg(&bound))?;
    let result = (|| {
        for point in [deep.clone(), link.join("deep/in"), bound.join("deep"), source.clone()] {
            let mut command = world.command(world.nigh(), As::Us);
            command.arg("mount").arg(&source).arg(&point);
            let said = expect(world, command, 1)?;
            ensure!(
                said.trim().lines().count() == 1 && said.contains("inside"),
                "{}: {said}",
                point.display()
            );
        }
        ensure!(device_of(&deep).is_none() && device_of(&source).is_none(), "mounted");
        Ok(())
    })();
    process::output(Command::new("umount").arg(&bound))?;
    result
}

/// Only the server can detect that the mount point is in its export. The second mount comes later.
fn inside_by_socket(world: &World) -> Result<()> {
    over::serve(world, As::Us)?;
    let source = world.dir("source", As::Us)?;
    for dir in ["deep/in", "deep/later"] {
        fs::create_dir_all(source.join(dir))?;
    }
    fs::write(source.join("file"), b"1")?;
    let mut how = MountParams::new(As::Us);
    how.over = Some((LinkKind::Local, None));
    let address = PathBuf::from(format!("unix://{}:all/source", over::socket(world, As::Us).display()));
    let outside = world.dir("mnt", As::Us)?;
    let mount = Mount::new(world, &address, &source.join("deep/in"), &how)?;
    let beside = Mount::new(world, &address, &outside, &how)?;
    let look = |mount: &Mount<'_>| -> Result<()> {
        let mut command = world.command("sh", As::Us);
        command.args([
            "-uc",
            "cat file; ls deep >/dev/null; find . >/dev/null; du -s . >/dev/null; stat deep/in 2>&1",
        ]);
        command.env("LC_ALL", "C").current_dir(&mount.point);
        let ended = mount.run(command, LIMIT)?;
        ensure!(ended.said.starts_with('1') && ended.said.contains("Too many levels"), "{}", ended.tail(5));
        Ok(())
    };
    look(&mount)?;
    look(&beside)?;
    let later = Mount::new(world, &address, &source.join("deep/later"), &how)?;
    look(&later)?;
    look(&beside)?;
    later.unmount()?;
    beside.unmount()?;
    mount.unmount()
}
