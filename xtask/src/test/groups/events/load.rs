//! Many changes of mixed kinds in many directories: `inotifywait` gets one event for each, in the order of its
//! directory, and no others.

use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use nigh_sim::random::Dice;

use super::{PACE, Pair};
use crate::test::mount::MountParams;
use crate::test::world::{As, World};

const DIRECTORIES: usize = 48;
const SEED: u64 = 417;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    File,
    Directory,
    Symlink,
}

/// The expected tree, and the expected events.
struct EventLoad {
    root: PathBuf,
    dirs: Vec<(String, BTreeMap<String, Kind>, Instant)>,
    told: BTreeMap<String, Vec<(String, String)>>,
    dice: Dice,
    made: u64,
}

impl EventLoad {
    fn below(&mut self, most: usize) -> usize {
        usize::try_from(self.dice.below(most.max(1) as u64)).unwrap_or(0)
    }

    /// Returns a directory that was not changed for long enough, and is not `but`.
    fn free(&mut self, but: Option<usize>) -> Option<usize> {
        let now = Instant::now();
        let free: Vec<usize> =
            (0..self.dirs.len()).filter(|at| Some(*at) != but && self.dirs[*at].2 <= now).collect();
        (!free.is_empty()).then(|| free[self.below(free.len())])
    }

    fn note(&mut self, dir: usize, event: &str, kind: Kind, name: &str) {
        let event = if kind == Kind::Directory { format!("{event},ISDIR") } else { event.to_owned() };
        let told = self.told.entry(self.dirs[dir].0.clone()).or_default();
        told.push((event, name.to_owned()));
    }

    fn at(&self, dir: usize, name: &str) -> PathBuf {
        self.root.join(&self.dirs[dir].0).join(name)
    }

    fn pick(&mut self, dir: usize, wanted: impl Fn(Kind) -> bool) -> Option<(String, Kind)> {
        let names: Vec<(String, Kind)> = self.dirs[dir]
            .1
            .iter()
            .filter(|(_, kind)| wanted(**kind))
            .map(|(n, k)| (n.clone(), *k))
            .collect();
        (!names.is_empty()).then(|| names[self.below(names.len())].clone())
    }

    fn new_name(&mut self) -> String {
        self.made += 1;
        format!("n{}", self.made)
    }

    /// Makes one change; `false` if it has no object.
    fn step(&mut self, dir: usize) -> Result<bool> {
        match self.below(10) {
            0..=3 => self.make(dir),
            4 => {
                let Some((name, kind)) = self.pick(dir, |kind| kind == Kind::File) else { return Ok(false) };
                File::options().append(true).open(self.at(dir, &name))?.write_all(b"more")?;
                self.note(dir, "MODIFY", kind, &name);
                Ok(true)
            }
            5 => self.set(dir),
            6 | 7 => {
                let Some((name, kind)) = self.pick(dir, |_| true) else { return Ok(false) };
                let other = if self.below(2) == 0 { self.free(Some(dir)) } else { None };
                let to = other.unwrap_or(dir);
                let new_name = self.new_name();
                fs::rename(self.at(dir, &name), self.at(to, &new_name))?;
                self.dirs[dir].1.remove(&name);
                self.dirs[to].1.insert(new_name.clone(), kind);
                self.note(dir, "MOVED_FROM", kind, &name);
                self.note(to, "MOVED_TO", kind, &new_name);
                self.dirs[to].2 = Instant::now() + PACE;
                Ok(true)
            }
            _ => {
                let Some((name, kind)) = self.pick(dir, |_| true) else { return Ok(false) };
                match kind {
                    Kind::Directory => fs::remove_dir(self.at(dir, &name))?,
                    _ => fs::remove_file(self.at(dir, &name))?,
                }
                self.dirs[dir].1.remove(&name);
                self.note(dir, "DELETE", kind, &name);
                Ok(true)
            }
        }
    }

    fn make(&mut self, dir: usize) -> Result<bool> {
        let name = self.new_name();
        let at = self.at(dir, &name);
        let kind = match self.below(3) {
            0 => Kind::Directory,
            1 => Kind::Symlink,
            _ => Kind::File,
        };
        match kind {
            Kind::Directory => fs::create_dir(at)?,
            Kind::Symlink => std::os::unix::fs::symlink("nowhere", at)?,
            Kind::File => drop(File::create(at)?),
        }
        self.dirs[dir].1.insert(name.clone(), kind);
        self.note(dir, "CREATE", kind, &name);
        Ok(true)
    }

    fn set(&mut self, dir: usize) -> Result<bool> {
        let Some((name, kind)) = self.pick(dir, |kind| kind == Kind::File) else { return Ok(false) };
        let at = self.at(dir, &name);
        if self.below(2) == 0 {
            let mode = fs::metadata(&at)?.permissions().mode() ^ 0o022;
            fs::set_permissions(at, fs::Permissions::from_mode(mode))?;
        } else {
            let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + self.made * 10);
            self.made += 1;
            File::open(at)?.set_times(FileTimes::new().set_accessed(then).set_modified(then))?;
        }
        self.note(dir, "ATTRIB", kind, &name);
        Ok(true)
    }
}

pub fn mixed(world: &World) -> Result<()> {
    let changes = match (world.short, world.hours) {
        (true, _) => 200,
        (_, true) => 10_000,
        _ => 1_000,
    };
    let dirs: Vec<String> = (0..DIRECTORIES).map(|number| format!("d{number}")).collect();
    let pair = Pair::new(world, "mixed", &dirs, &MountParams::new(As::Us))?;
    let watcher = pair.watch(world, &dirs)?;
    std::thread::sleep(PACE);
    let now = Instant::now();
    let mut load = EventLoad {
        root: pair.there.point.clone(),
        dirs: dirs.iter().map(|dir| (dir.clone(), BTreeMap::new(), now)).collect(),
        told: BTreeMap::new(),
        dice: Dice::new(SEED),
        made: 0,
    };
    let mut done = 0;
    while done < changes {
        let Some(dir) = load.free(None) else {
            std::thread::sleep(Duration::from_millis(2));
            continue;
        };
        if load.step(dir).with_context(|| format!("change {done} in {}", load.dirs[dir].0))? {
            done += 1;
            load.dirs[dir].2 = Instant::now() + PACE;
        }
    }
    let took = now.elapsed();
    let expected: usize = load.told.values().map(Vec::len).sum();
    let mut seen: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for (dir, event, name) in watcher.all(expected)? {
        seen.entry(dir).or_default().push((event, name));
    }
    println!("  {changes} changes in {took:.1?}; {}", pair.here.status()?["events"]);
    for (dir, told) in &load.told {
        let empty = Vec::new();
        let seen = seen.get(dir).unwrap_or(&empty);
        let differs = seen.iter().zip(told).position(|(a, b)| a != b).unwrap_or(seen.len().min(told.len()));
        let around = |all: &[(String, String)]| {
            format!("{:?}", &all[differs.saturating_sub(1).min(all.len())..(differs + 3).min(all.len())])
        };
        ensure!(
            seen == told,
            "{dir}, event {differs}: told {} in the place of {}",
            around(seen),
            around(told)
        );
    }
    ensure!(seen.len() == load.told.len(), "told of directories in which nothing happened");
    drop(watcher);
    pair.unmount()
}
