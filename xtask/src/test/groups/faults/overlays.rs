//! Overlay filesystems with layers on a mount, as containers have.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use crate::process;
use crate::root;
use crate::test::groups::Test;
use crate::test::groups::filesystems::Disk;
use crate::test::mount::{Mount, MountParams};
use crate::test::over::LinkKind;
use crate::test::world::{As, World};
use crate::wait;

pub const TESTS: &[Test] = &[
    ("faults: an overlay has its layers on a mount", layers),
    ("faults: an overlay has only its lower layer on a mount", lower_layer),
    ("faults: no whiteout is left on a 9P server", refused_over_9p),
];

const LIMIT: Duration = Duration::from_secs(60);

/// Creates and mounts an overlay ($1: upper layer, $2: lower layer, $3: options), changes it, mounts it again, and
/// prints its contents. More than 200 names of a directory are removed, the limit for invalidation one by one.
const CHANGES: &str = r#"
set -u
mkdir -p "$1/upper" "$1/work" "$1/merged" "$2/lower/d/sub" "$2/lower/many" "$2/lower/opaque"
for i in 1 2 3; do echo $i > "$2/lower/d/f$i"; echo $i > "$2/lower/d/sub/g$i"; echo $i > "$2/lower/opaque/h$i"; done
i=0; while [ $i -lt 300 ]; do echo $i > "$2/lower/many/n$i"; i=$((i + 1)); done
open() { mount -t overlay overlay -o "lowerdir=$2/lower,upperdir=$1/upper,workdir=$1/work,$3" "$1/merged" && cd "$1/merged"; }
tell() { find . -printf '%p %y %m %n %s\n' | sort; cat d/new_f2 opaque/new many/n1 y/n252; }
open "$@" || exit 1
rm d/f1; mv d/f2 d/new_f2; mv d/sub d/sub2; cp -r d/f3 d/f4; rm -r opaque; mkdir opaque; echo new > opaque/new
echo more >> many/n1; chmod 700 many/n2; i=3; while [ $i -le 250 ]; do rm many/n$i; i=$((i + 1)); done
mkdir x; mv many/n252 x; mv x y; ln -s n2 many/link; setfattr -n user.a -v b many/n253
tell
cd /; umount "$1/merged"; open "$@" || exit 1
echo again; tell
rm -r d many opaque y; ls -A
cd /; umount "$1/merged"
find "$1/upper" -printf '%P %y %m %n\n' | sort
"#;

fn changes(world: &World, upper: &Path, lower: &Path, options: &str) -> Result<String> {
    let mut shell = Command::new("sh");
    shell.args(["-c", CHANGES, "sh"]).args([upper, lower]).arg(options);
    let ended = world.run(shell, LIMIT)?;
    ensure!(ended.ok(), "{options}: {}", ended.tail(20));
    Ok(ended.said)
}

fn layers(world: &World) -> Result<()> {
    if !root::is_root() {
        println!("SKIPPED: an overlay needs root");
        return Ok(());
    }
    let (source, local) = (world.dir("source", As::Us)?, world.dir("local", As::Us)?);
    let mount = Mount::new(world, &source, &world.dir("mnt", As::Us)?, &MountParams::new(As::Us))?;
    let all =
        ["redirect_dir=off", "redirect_dir=on,metacopy=on", "redirect_dir=nofollow,userxattr", "index=on"];
    for (nth, options) in world.sample.of("faults: options of overlays", &all, 2).into_iter().enumerate() {
        let folder = |dir: &Path| dir.join(format!("overlay{nth}"));
        let (there, here) = (folder(&mount.point), folder(&local));
        let got = changes(world, &there, &there, options).with_context(|| mount.said())?;
        let wanted = changes(world, &here, &here, options)?;
        ensure!(got == wanted, "{options}:\n{got}and on a local disk:\n{wanted}");
    }
    mount.unmount()
}

/// After an epoch increment, an overlay's references to the dentries are stale for good.
fn lower_layer(world: &World) -> Result<()> {
    if !root::is_root() {
        println!("SKIPPED: an overlay needs root");
        return Ok(());
    }
    let (source, local) = (world.dir("source", As::Us)?, world.dir("local", As::Us)?);
    let mount = Mount::new(world, &source, &world.dir("mnt", As::Us)?, &MountParams::new(As::Us))?;
    let dir = |name: &str| -> Result<String> {
        fs::create_dir_all(local.join(name))?;
        Ok(local.join(name).display().to_string())
    };
    fs::create_dir(mount.point.join("lower"))?;
    fs::write(mount.point.join("lower/file"), "below")?;
    let lower = mount.point.join("lower").display().to_string();
    let options = format!("lowerdir={lower},upperdir={},workdir={}", dir("upper")?, dir("work")?);
    let merged = dir("merged")?;
    process::output(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options, &merged]))?;
    let merged = Disk { point: merged.into() };
    let lowered = || Ok(mount.status()?["kernel"]["notifications"] != "all");
    ensure!(wait::holds(LIMIT, lowered)?, "all names may still be dropped at once");
    ensure!(fs::read(merged.point.join("file")).with_context(|| mount.said())? == b"below");
    drop(merged);
    mount.unmount()
}

fn refused_over_9p(world: &World) -> Result<()> {
    let how = MountParams { over: Some((LinkKind::Ninep, None)), ..MountParams::new(As::Us) };
    let mount = Mount::new(world, &world.dir("nine", As::Us)?, &world.dir("mnt", As::Us)?, &how)?;
    let (from, to) = (mount.point.join("a"), mount.point.join("b"));
    fs::write(&from, "a")?;
    let renamed = rustix::fs::renameat_with(CWD, &from, CWD, &to, RenameFlags::WHITEOUT);
    ensure!(renamed == Err(Errno::INVAL), "{renamed:?}");
    ensure!(from.exists() && !to.exists());
    mount.unmount()
}
