//! The number of messages per operation, counted by an independent relay. (G1 … G6)

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::link::client::Emulator;
use crate::test::mount::{Mount, MountParams};
use crate::test::over::{self, LinkKind, free_port};
use crate::test::world::{As, World};

/// A mount of diod behind a counting relay.
pub struct Counted<'w> {
    pub source: PathBuf,
    pub point: PathBuf,
    pub mount: Mount<'w>,
    pub wire: Emulator,
}

pub fn counted<'w>(world: &'w World, rtt: &str, options: &[&str]) -> Result<Counted<'w>> {
    let ports = [free_port()?, over::diod(world)?];
    let wire = Emulator::of_ninep(&world.xtask(), &world.root, ports, rtt)?;
    let (source, point) = (world.dir("nine", As::Us)?, world.dir("mnt", As::Us)?);
    let mut how = MountParams::new(As::Us);
    how.over = Some((LinkKind::Ninep, Some(ports[0])));
    for option in options {
        how = how.with(option);
    }
    let mount = Mount::new(world, &source, &point, &how)?;
    // The attributes of the root are fetched once.
    there(&point)?;
    Ok(Counted { source, point, mount, wire })
}

/// Message counts, without clunks, for whose replies no call waits.
type Messages = BTreeMap<String, u64>;

impl Counted<'_> {
    /// Returns the messages that an operation caused; clunks are left out, since they come a moment later.
    pub fn cost<T>(&self, what: impl FnOnce() -> Result<T>) -> Result<(Messages, T)> {
        let before = self.wire.messages()?;
        let result = what()?;
        let mut after = self.wire.messages()?;
        for (name, count) in before {
            *after.entry(name).or_default() -= count;
        }
        after.retain(|name, count| *count > 0 && name != "Tclunk");
        Ok((after, result))
    }

    fn costs(&self, expected: &[(&str, u64)], what: impl FnOnce() -> Result<()>) -> Result<()> {
        let (messages, ()) = self.cost(what)?;
        let expected: Messages = expected.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        ensure!(messages == expected, "{messages:?} went over the wire, and not {expected:?}");
        Ok(())
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.point.join(name)
    }
}

fn missing(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => bail!("{}: {other:?}", path.display()),
    }
}

fn there(path: &Path) -> Result<()> {
    fs::symlink_metadata(path).map(drop).with_context(|| path.display().to_string())
}

pub fn missing_names(world: &World) -> Result<()> {
    let counted = counted(
        world,
        "0ms",
        &["--negative-timeout=2s", "--entry-timeout=forever", "--attr-timeout=forever"],
    )?;
    let path = counted.at("none");
    counted.costs(&[("Twalk", 1)], || missing(&path)).context("the first")?;
    counted.costs(&[], || missing(&path)).context("G1: again")?;
    std::thread::sleep(Duration::from_millis(1_200));
    counted.costs(&[], || missing(&path)).context("G1: later, within its time")?;
    std::thread::sleep(Duration::from_millis(1_000));
    counted.costs(&[("Twalk", 1)], || missing(&path)).context("G1: after its time")?;
    counted.costs(&[], || missing(&path)).context("G1: and again")?;
    counted.mount.unmount()
}

pub fn no_time(world: &World) -> Result<()> {
    let counted = counted(
        world,
        "0ms",
        &["--negative-timeout=off", "--entry-timeout=forever", "--attr-timeout=forever"],
    )?;
    let path = counted.at("none");
    for look in 1..=5 {
        counted.costs(&[("Twalk", 1)], || missing(&path)).with_context(|| format!("G2: look {look}"))?;
    }
    fs::create_dir(counted.source.join("dir"))?;
    fs::write(counted.source.join("dir/there"), "x")?;
    let listed = fs::read_dir(counted.at("dir"))?.count();
    ensure!(listed == 1, "{listed} names");
    let path = counted.at("dir/none");
    counted.costs(&[("Twalk", 1)], || missing(&path)).context("G2: a listing does not answer for it")?;
    counted.mount.unmount()
}

/// A creation is visible at once where absence was cached (G3), and so is a removal.
pub fn made_over_missing(world: &World) -> Result<()> {
    let counted = counted(world, "0ms", &["--negative-timeout=forever"])?;
    fs::write(counted.source.join("there"), "x")?;
    type Makes = fn(&Path, &Path) -> std::io::Result<()>;
    let makers: [(&str, Makes); 6] = [
        ("symlink", |path, _| symlink("target", path)),
        ("create", |path, _| fs::File::create_new(path).map(drop)),
        ("open(O_CREAT)", |path, _| fs::OpenOptions::new().append(true).create(true).open(path).map(drop)),
        ("mkdir", |path, _| fs::create_dir(path)),
        ("link", |path, there| fs::hard_link(there, path)),
        ("rename", |path, there| fs::rename(there, path)),
    ];
    for (name, make) in makers {
        let (path, other) = (counted.at(name.split('(').next().unwrap_or(name)), counted.at("there"));
        missing(&path)?;
        missing(&path)?;
        make(&path, &other).with_context(|| name.to_owned())?;
        there(&path).with_context(|| format!("G3: {name} over a missing name"))?;
        let names: Vec<_> = fs::read_dir(&counted.point)?.collect::<Result<_, _>>()?;
        ensure!(names.iter().any(|entry| entry.path() == path), "G3: {name} is not listed");
    }
    missing(&counted.at("there")).context("the source of a rename")?;
    counted.costs(&[], || missing(&counted.at("there"))).context("it is known to be missing")?;
    for name in ["symlink", "create", "link", "rename"] {
        fs::remove_file(counted.at(name))?;
        counted.costs(&[], || missing(&counted.at(name))).with_context(|| format!("{name}, removed"))?;
    }
    fs::remove_dir(counted.at("mkdir"))?;
    counted.costs(&[], || missing(&counted.at("mkdir"))).context("a directory, removed")?;
    counted.mount.unmount()
}

pub fn symlinks(world: &World) -> Result<()> {
    let counted = counted(world, "0ms", &["--entry-timeout=forever", "--attr-timeout=forever"])?;
    for n in 0..10 {
        symlink(format!("target-{n}"), counted.source.join(format!("s{n}")))?;
    }
    let read = || -> Result<()> {
        for n in 0..10 {
            let target = fs::read_link(counted.at(&format!("s{n}")))?;
            ensure!(target.to_str() == Some(&format!("target-{n}")), "{target:?}");
        }
        Ok(())
    };
    counted.costs(&[("Twalk", 10), ("Tgetattr", 10), ("Treadlink", 10)], read).context("the first")?;
    counted.costs(&[], read).context("G4: again")?;
    // The inode number may be reused: the replaced target must not be shown.
    fs::remove_file(counted.at("s3"))?;
    symlink("another", counted.at("s3"))?;
    ensure!(fs::read_link(counted.at("s3"))?.to_str() == Some("another"), "G4: replaced");
    counted.mount.unmount()
}

/// A directory is read in as few messages as their size allows, in whatever order the server has, with each name once.
pub fn large_directory(world: &World) -> Result<()> {
    const NAMES: u64 = 50_000;
    let forever = ["--entry-timeout=forever", "--attr-timeout=forever", "--negative-timeout=forever"];
    let counted = counted(world, "0ms", &forever)?;
    let dir = counted.source.join("large");
    fs::create_dir(&dir)?;
    for n in 0..NAMES {
        fs::File::create(dir.join(format!("file-{n:06}")))?;
    }
    let read = || -> Result<Vec<String>> {
        let entries = fs::read_dir(counted.at("large"))?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    };
    let (messages, mut names) = counted.cost(read)?;
    names.sort();
    let whole = names.len() as u64 == NAMES && names.windows(2).all(|pair| pair[0] < pair[1]);
    ensure!(whole, "{} names", names.len());
    // qid[13] offset[8] type[1] name[s]: 24 bytes and the name; diod's messages have at most 64 KiB.
    let per_message = (65_536 - 24) / (24 + 11);
    let least = (NAMES + 2).div_ceil(per_message);
    let used = messages.get("Treaddir").copied().unwrap_or(0);
    println!(
        "a directory of {NAMES} names: {used} Treaddir, and there cannot be fewer than {least} and one for the end"
    );
    ensure!(used <= least + 1 + least / 50, "G5: {used} Treaddir, {least} at the least");
    counted.costs(&[], || read().map(drop)).context("again")?;
    counted.costs(&[], || missing(&counted.at("large/none"))).context("a name that is not in it")?;
    counted.mount.unmount()
}

/// After a reconnect an open file is walked to again: 16 names per message.
pub fn deep_paths(world: &World) -> Result<()> {
    const DEEP: usize = 64;
    let counted = counted(
        world,
        "0ms",
        &["--entry-timeout=forever", "--attr-timeout=forever", "--negative-timeout=forever"],
    )?;
    let mut below = PathBuf::new();
    for n in 0..DEEP {
        below.push(format!("d{n}"));
    }
    fs::create_dir_all(counted.source.join(&below))?;
    fs::write(counted.source.join(&below).join("file"), "deep")?;
    let (messages, file) = counted.cost(|| {
        Ok(fs::OpenOptions::new().read(true).write(true).open(counted.point.join(&below).join("file"))?)
    })?;
    let walks = messages.get("Twalk").copied().unwrap_or(0);
    ensure!(walks <= DEEP as u64 + 2, "{walks} walks for {DEEP} names that the kernel looks up one by one");
    let before = counted.wire.messages()?;
    counted.wire.cut()?;
    let mut text = String::new();
    std::io::Read::read_to_string(&mut &file, &mut text)?;
    ensure!(text == "deep", "{text:?}");
    let after = counted.wire.messages()?;
    let walks = after["Twalk"] - before["Twalk"];
    println!("{} names to an open file: {walks} Twalk after the connection was cut", DEEP + 1);
    ensure!(walks <= (DEEP as u64 + 1).div_ceil(16) + 2, "G6: {walks} walks");
    drop(file);
    counted.mount.unmount()
}
