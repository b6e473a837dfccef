//! User errors: one line that says what happened and how to fix it, exit 1 or 2, nothing mounted, nothing left behind.
//! Also recovery after a killed daemon.

mod links;

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::process::CommandResult;
use crate::report::TestReport;
use crate::root;
use crate::test::clean;
use crate::test::mount::{Mount, MountParams, device_of};
use crate::test::world::{As, PREFIX, World};
use crate::wait;

const LIMIT: Duration = Duration::from_secs(30);

pub fn run(world: &World, tally: &mut TestReport) {
    let tests: &[super::Test] = &[
        ("an export that is a file", export_is_file),
        ("an export that is missing", export_missing),
        ("a mount point that is missing", point_missing),
        ("a mount point that is a file", point_is_file),
        ("a mount point that is busy", point_busy),
        ("no memory for contents", |w| refused_option(w, &["--data-cache", "0"], &[1, 2])),
        ("memory for contents without a unit", |w| refused_option(w, &["--data-cache", "12"], &[1, 2])),
        ("readahead without a unit", |w| refused_option(w, &["--readahead", "1000"], &[1, 2])),
        ("a cache of size 0", |w| refused_option(w, &["--cache-size", "0"], &[1, 2])),
        ("no directories at all", |w| refused_option(w, &["--max-dirs", "0"], &[2])),
        ("directories kept for no time", |w| refused_option(w, &["--dir-timeout", "0s"], &[2])),
        ("a bare number for a time", |w| refused_option(w, &["--host-timeout=5"], &[1, 2])),
        ("a limit of nothing", |w| refused_option(w, &["--request-timeout=0s"], &[2])),
        ("an unknown way to go on", |w| refused_option(w, &["--on-disconnect=hope"], &[2])),
        ("a time with an unknown unit", |w| refused_option(w, &["--host-timeout=5 parsecs"], &[1, 2])),
        ("an unknown option", |w| refused_option(w, &["--no-such-option"], &[2])),
        ("an unknown mount option", |w| refused_option(w, &["-o", "nonsense"], &[1, 2])),
        ("no arguments", no_arguments),
        ("umount of what is not mounted", umount_nothing),
        ("umount while busy", umount_busy),
        ("status of what is not mounted", status_nothing),
        ("a daemon that was killed: mounting again", mount_after_kill),
        ("a daemon that was killed: umount", umount_after_kill),
        ("mount in the background, then umount", background),
        ("these tests, ended by a signal", tests_ended),
    ];
    for (name, test) in tests {
        tally.test(name, || test(world));
    }
    links::run(world, tally);
    match world.tester.filter(|_| root::is_root()) {
        Some(who) => tally.test("a path without permission", || export_forbidden(world, who)),
        None => tally.skip("a path without permission", "needs root to make it"),
    }
}

fn nigh(world: &World, who: As, arguments: &[&str]) -> Result<CommandResult> {
    let mut command = world.command(world.nigh(), who);
    command.args(arguments);
    world.run(command, LIMIT)
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn dirs(world: &World) -> Result<(PathBuf, PathBuf)> {
    Ok((world.dir("source", As::Us)?, world.dir("mnt", As::Us)?))
}

/// Fails with one line that names the cause, with nothing mounted.
pub(super) fn refused(world: &World, who: As, arguments: &[&str], codes: &[i32], names: &str) -> Result<()> {
    let before = mounts_at(arguments)?;
    let ended = nigh(world, who, arguments)?;
    let said = ended.said.trim();
    ensure!(
        ended.code().is_some_and(|c| codes.contains(&c)),
        "exit {:?}, expected {codes:?}: {said}",
        ended.code()
    );
    ensure!(!said.is_empty(), "nothing was said");
    ensure!(said.lines().count() == 1, "more than one line: {said}");
    ensure!(said.contains(names), "the line does not name {names}: {said}");
    ensure!(!said.contains("panicked"), "{said}");
    let after = mounts_at(arguments)?;
    ensure!(after == before, "the mounts changed: {before:?} before, {after:?} after");
    Ok(())
}

/// Mount points among `arguments`, once for each mount; other tests may be mounting elsewhere.
fn mounts_at(arguments: &[&str]) -> Result<Vec<String>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    Ok(points.filter(|point| arguments.contains(point)).map(str::to_owned).collect())
}

fn export_is_file(world: &World) -> Result<()> {
    let (source, point) = dirs(world)?;
    let file = source.join("file");
    fs::write(&file, b"")?;
    refused(world, As::Us, &["mount", &text(&file), &text(&point)], &[1], "file")
}

fn export_missing(world: &World) -> Result<()> {
    let (source, point) = dirs(world)?;
    refused(world, As::Us, &["mount", &text(&source.join("gone")), &text(&point)], &[1], "gone")
}

fn export_forbidden(world: &World, who: As) -> Result<()> {
    let (source, point) = (world.dir("source", As::Us)?, world.dir("mnt", who)?);
    fs::create_dir(source.join("closed"))?;
    let mut close = Command::new("chmod");
    crate::process::output(close.arg("700").arg(source.join("closed")))?;
    refused(world, who, &["mount", &text(&source.join("closed")), &text(&point)], &[1], "closed")
}

fn point_missing(world: &World) -> Result<()> {
    let (source, point) = dirs(world)?;
    refused(world, As::Us, &["mount", &text(&source), &text(&point.join("gone"))], &[1], "gone")
}

fn point_is_file(world: &World) -> Result<()> {
    let (source, point) = dirs(world)?;
    fs::write(point.join("file"), b"")?;
    refused(world, As::Us, &["mount", &text(&source), &text(&point.join("file"))], &[1], "file")
}

fn point_busy(world: &World) -> Result<()> {
    let (source, point) = dirs(world)?;
    let mount = Mount::new(world, &source, &point, &MountParams::new(As::Us))?;
    refused(world, As::Us, &["mount", &text(&source), &text(&point)], &[1], "mnt")?;
    fs::write(point.join("still works"), b"")?;
    mount.unmount()
}

fn refused_option(world: &World, options: &[&str], codes: &[i32]) -> Result<()> {
    let (source, point) = dirs(world)?;
    let (source, point) = (text(&source), text(&point));
    let mut arguments = vec!["mount", &source, &point];
    arguments.extend(options);
    let last = options.last().unwrap_or(&"");
    let names = last.split('=').next().unwrap_or(last);
    refused(world, As::Us, &arguments, codes, names)
}

fn no_arguments(world: &World) -> Result<()> {
    let ended = nigh(world, As::Us, &["mount"])?;
    ensure!(ended.code() == Some(2), "exit {:?}", ended.code());
    Ok(())
}

fn umount_nothing(world: &World) -> Result<()> {
    let (_, point) = dirs(world)?;
    refused(world, As::Us, &["umount", &text(&point)], &[1], "mnt")
}

fn status_nothing(world: &World) -> Result<()> {
    let (_, point) = dirs(world)?;
    refused(world, As::Us, &["status", &text(&point)], &[1], "mnt")
}

fn umount_busy(world: &World) -> Result<()> {
    let (source, point) = dirs(world)?;
    fs::write(source.join("f"), b"")?;
    let mount = Mount::new(world, &source, &point, &MountParams::new(As::Us))?;
    let open = fs::File::open(point.join("f"))?;
    refused(world, As::Us, &["umount", &text(&point)], &[1], "in use")?;
    ensure!(device_of(&point).is_some(), "unmounted although busy");
    drop(open);
    mount.unmount()
}

/// A daemon killed with SIGKILL leaves a mount that returns ENOTCONN.
fn killed(world: &World) -> Result<(PathBuf, PathBuf)> {
    let (source, point) = dirs(world)?;
    fs::write(source.join("f"), b"contents")?;
    let mount = Mount::new(world, &source, &point, &MountParams::new(As::Us))?;
    crate::process::signal(mount.daemon(), libc::SIGKILL);
    wait::holds(Duration::from_secs(5), || Ok(fs::metadata(point.join("f")).is_err()))?;
    // The guard would clean up; this test checks that nigh does.
    std::mem::forget(mount);
    Ok((source, point))
}

fn mount_after_kill(world: &World) -> Result<()> {
    let (source, point) = killed(world)?;
    let mount = Mount::new(world, &source, &point, &MountParams::new(As::Us)).context("mounting again")?;
    ensure!(fs::read(point.join("f")).context("reading from the new mount")? == b"contents");
    mount.unmount()?;
    ensure!(device_of(&point).is_none(), "the dead mount is still below");
    Ok(())
}

fn umount_after_kill(world: &World) -> Result<()> {
    let (_, point) = killed(world)?;
    let ended = nigh(world, As::Us, &["umount", &text(&point)])?;
    ensure!(ended.ok(), "{}", ended.tail(3));
    ensure!(device_of(&point).is_none(), "still mounted");
    ensure!(fs::read_dir(&point)?.next().is_none());
    Ok(())
}

fn background(world: &World) -> Result<()> {
    let (source, point) = dirs(world)?;
    fs::write(source.join("f"), b"contents")?;
    let ended = nigh(world, As::Us, &["mount", &text(&source), &text(&point)])?;
    ensure!(ended.ok(), "{}", ended.tail(3));
    let read = fs::read(point.join("f"));
    let umount = nigh(world, As::Us, &["umount", &text(&point)])?;
    ensure!(read? == b"contents", "`nigh mount` returned before the mount answered");
    if !umount.ok() || device_of(&point).is_some() {
        bail!("nigh umount: {}", umount.tail(3));
    }
    Ok(())
}

/// Tests ended by a signal leave no process, no mount and no directory.
fn tests_ended(world: &World) -> Result<()> {
    let mut command = Command::new(world.xtask());
    command.args(["test", "--no-install", "--groups", "signals", "--nigh"]).arg(world.nigh());
    let log = fs::File::create(world.log())?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
    let mut tests = command.spawn()?;
    let root = std::env::temp_dir().join(format!("{PREFIX}{}", tests.id()));
    // A server and a mount.
    let both = || Ok(clean::running(&root.join("bin/nigh")).len() >= 2);
    if let Err(error) = wait::ready(&mut tests, Duration::from_secs(120), both) {
        crate::process::kill_group(tests.id());
        return Err(error.context("the tests within did not begin"));
    }
    crate::process::signal(tests.id(), libc::SIGTERM);
    let status = crate::process::wait(&mut tests, Duration::from_secs(20))?;
    crate::process::kill_group(tests.id());
    ensure!(
        status.is_some_and(|status| status.code() == Some(128 + libc::SIGTERM)),
        "they ended with {status:?}"
    );
    let left = clean::processes_below(&root);
    ensure!(left.is_empty(), "processes {left:?} are left");
    ensure!(!root.exists(), "{} is left", root.display());
    Ok(())
}
