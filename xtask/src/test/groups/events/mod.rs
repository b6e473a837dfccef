//! Programs that watch by inotify(7) on one mount get events for changes on another mount: the right kinds, in order,
//! and no false events. Mounts use `--host-timeout=forever`, so only recalls can inform them.

mod load;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::restart::{kill_server, signal_server};
use crate::process;
use crate::report::TestReport;
use crate::root;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};
use crate::wait;

/// Interval between two changes of one directory. A directory that is recalled repeatedly within 200 ms of its grants
/// is granted late, and an entry that is created and removed between two listings causes no event.
const PACE: Duration = Duration::from_millis(500);
/// How long no further event may come before the events count as complete.
const QUIET: Duration = Duration::from_millis(1_500);

pub fn run(world: &World, tally: &mut TestReport) {
    if !root::is_root() && process::which("fusermount3").is_none() {
        return tally.not_run("events", "fusermount3 is missing: install the package fuse3");
    }
    if process::which("inotifywait").is_none() {
        return tally.not_run("events", "inotifywait is missing: install the package inotify-tools");
    }
    super::at_once(
        world,
        tally,
        &[
            ("inotifywait sees each kind of change of another mount", each_kind),
            ("own changes are reported once", own),
            ("a file that is watched and not its directory", one_file),
            ("tail -f shows what another mount appends", tail),
            ("a daemon that is killed leaves no process behind", killed),
            ("with --events=off no change is reported, and no worker runs", off),
            ("no event is replayed where an ordinary user may not write, and that is counted", refused),
        ],
    );
    tally.test("changes of mixed kinds in many directories", || load::mixed(world));
    // Last: the next server delays changes until this one's clients are back, also those that were killed.
    tally.test("changes while the server is away are reported when it is back", || gap(world));
}

/// Two mounts of one tree: on `here` a program watches, on `there` changes are made.
pub struct Pair<'w> {
    pub source: PathBuf,
    pub here: Mount<'w>,
    pub there: Mount<'w>,
}

impl<'w> Pair<'w> {
    /// `test` begins the names of its directories.
    pub fn new(world: &'w World, test: &str, dirs: &[String], how: &MountParams) -> Result<Pair<'w>> {
        let source = world.dir(&format!("{test}-source"), how.who)?;
        for dir in dirs {
            fs::create_dir(source.join(dir))?;
            world.give(&source.join(dir), how.who)?;
        }
        let point = |number: u32| world.dir(&format!("{test}-mnt-{number}"), how.who);
        let (here, there) = (point(1)?, point(2)?);
        let how = how.clone().with("--host-timeout=forever");
        let here = Mount::new(world, &source, &here, &how)?;
        let there =
            Mount::new(world, &source, &there, &MountParams::new(As::Us).with("--host-timeout=forever"))?;
        Ok(Pair { source, here, there })
    }

    /// Watches directories, and waits until the mount has noticed.
    pub fn watch(&self, world: &World, paths: &[String]) -> Result<Watcher> {
        let watcher = Watcher::start(world, self.here.how.who, &self.here.point, paths)?;
        let known = wait::holds(Duration::from_secs(20), || {
            let events = &self.here.status()?["events"];
            Ok(events["watched"].as_u64() >= Some(paths.len() as u64) && events["unsettled"] == 0)
        })?;
        ensure!(known, "20 s after a program began to watch the mount does not know");
        Ok(watcher)
    }

    pub fn count(&self, key: &str) -> Result<u64> {
        let status = self.here.status()?;
        status["events"][key].as_u64().with_context(|| format!("nigh status has no number events.{key}"))
    }

    pub fn unmount(self) -> Result<()> {
        self.here.unmount()?;
        self.there.unmount()
    }
}

/// An `inotifywait` for all events.
pub struct Watcher {
    child: Child,
    log: PathBuf,
    root: PathBuf,
}

impl Watcher {
    fn start(world: &World, who: As, root: &Path, paths: &[String]) -> Result<Watcher> {
        let log = world.log();
        let said = world.log();
        let mut command = world.command("inotifywait", who);
        command.args(["--monitor", "--format", "%w|%e|%f"]);
        command.args(paths.iter().map(|path| root.join(path)));
        command.stdin(Stdio::null()).stdout(File::create(&log)?).stderr(File::create(&said)?);
        let child = command.spawn()?;
        let watcher = Watcher { child, log, root: root.to_owned() };
        let watches = || Ok(fs::read_to_string(&said)?.contains("Watches established"));
        let begun = wait::holds(Duration::from_secs(10), watches)?;
        ensure!(begun, "inotifywait does not begin: {}", fs::read_to_string(&said)?);
        Ok(watcher)
    }

    /// Returns the events so far: the watched path below the mount, the kinds, the name in it.
    pub fn seen(&self) -> Result<Vec<(String, String, String)>> {
        let text = String::from_utf8(fs::read(&self.log)?)?;
        let root = format!("{}/", self.root.display());
        let parse = |line: &str| {
            let mut fields = line.strip_prefix(&root)?.split('|');
            let path = fields.next()?.trim_end_matches('/').to_owned();
            Some((path, fields.next()?.to_owned(), fields.next()?.to_owned()))
        };
        text.lines().map(|line| parse(line).with_context(|| format!("inotifywait says {line}"))).collect()
    }

    /// Returns the events, once they are at least `expected` and no more come.
    pub fn all(&self, expected: usize) -> Result<Vec<(String, String, String)>> {
        let mut last = (self.seen()?.len(), Instant::now());
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let seen = self.seen()?;
            if seen.len() != last.0 {
                last = (seen.len(), Instant::now());
            }
            let quiet = last.1.elapsed() > QUIET;
            if seen.len() >= expected && quiet || Instant::now() > end {
                return Ok(seen);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        process::signal(self.child.id(), libc::SIGTERM);
        let _ = process::wait(&mut self.child, Duration::from_secs(2));
    }
}

fn told(lines: &[(&str, &str, &str)]) -> Vec<(String, String, String)> {
    lines.iter().map(|(dir, event, name)| ((*dir).into(), (*event).into(), (*name).into())).collect()
}

fn names(dirs: &[&str]) -> Vec<String> {
    dirs.iter().map(|dir| (*dir).to_owned()).collect()
}

fn each_kind(world: &World) -> Result<()> {
    let dirs = names(&["d", "e"]);
    let pair = Pair::new(world, "each-kind", &dirs, &MountParams::new(As::Us))?;
    let watcher = pair.watch(world, &dirs)?;
    let there = pair.there.point.clone();
    let at = |path: &str| there.join(path);
    type Step<'a> = (&'a str, Box<dyn Fn() -> std::io::Result<()> + 'a>, Vec<(&'a str, &'a str, &'a str)>);
    let steps: Vec<Step<'_>> = vec![
        ("create", Box::new(|| File::create(at("d/n")).map(drop)), vec![("d", "CREATE", "n")]),
        ("write", Box::new(|| append(&at("d/n"))), vec![("d", "MODIFY", "n")]),
        (
            "chmod",
            Box::new(|| fs::set_permissions(at("d/n"), fs::Permissions::from_mode(0o600))),
            vec![("d", "ATTRIB", "n")],
        ),
        ("mkdir", Box::new(|| fs::create_dir(at("d/s"))), vec![("d", "CREATE,ISDIR", "s")]),
        ("symlink", Box::new(|| std::os::unix::fs::symlink("n", at("d/l"))), vec![("d", "CREATE", "l")]),
        ("link", Box::new(|| fs::hard_link(at("d/n"), at("e/h"))), vec![("e", "CREATE", "h")]),
        ("unlink of one of two", Box::new(|| fs::remove_file(at("e/h"))), vec![("e", "DELETE", "h")]),
        (
            "rename",
            Box::new(|| fs::rename(at("d/n"), at("d/m"))),
            vec![("d", "MOVED_FROM", "n"), ("d", "MOVED_TO", "m")],
        ),
        (
            "rename to another directory",
            Box::new(|| fs::rename(at("d/m"), at("e/m"))),
            vec![("d", "MOVED_FROM", "m"), ("e", "MOVED_TO", "m")],
        ),
        (
            "rename of a directory",
            Box::new(|| fs::rename(at("d/s"), at("e/s"))),
            vec![("d", "MOVED_FROM,ISDIR", "s"), ("e", "MOVED_TO,ISDIR", "s")],
        ),
        (
            "rename over another",
            Box::new(|| fs::rename(at("d/l"), at("e/m"))),
            vec![("d", "MOVED_FROM", "l"), ("e", "MOVED_TO", "m")],
        ),
        ("unlink", Box::new(|| fs::remove_file(at("e/m"))), vec![("e", "DELETE", "m")]),
        ("rmdir", Box::new(|| fs::remove_dir(at("e/s"))), vec![("e", "DELETE,ISDIR", "s")]),
    ];
    let mut expected = Vec::new();
    for (what, change, events) in &steps {
        std::thread::sleep(PACE);
        change().with_context(|| (*what).to_owned())?;
        expected.extend(told(events));
        let seen = wait_for(&watcher, &expected)?;
        ensure!(seen == expected, "after {what}: seen {:?}", &seen[seen.len().saturating_sub(4)..]);
    }
    let seen = watcher.all(expected.len())?;
    ensure!(seen == expected, "more was told: {seen:?}");
    ensure!(fs::read_dir(pair.here.point.join("d"))?.count() == 0, "what was replayed is there");
    drop(watcher);
    pair.unmount()
}

fn append(path: &Path) -> std::io::Result<()> {
    File::options().append(true).open(path)?.write_all(b"more")
}

fn wait_for(
    watcher: &Watcher,
    expected: &[(String, String, String)],
) -> Result<Vec<(String, String, String)>> {
    wait::holds(Duration::from_secs(5), || Ok(watcher.seen()?.len() >= expected.len()))?;
    watcher.seen()
}

fn own(world: &World) -> Result<()> {
    let dirs = names(&["d"]);
    let pair = Pair::new(world, "own", &dirs, &MountParams::new(As::Us))?;
    let watcher = pair.watch(world, &dirs)?;
    let mut expected = Vec::new();
    for round in 0..20 {
        // Another mount's change in between causes a listing and a comparison.
        std::thread::sleep(PACE);
        let (own, theirs) = (format!("own-{round}"), format!("theirs-{round}"));
        fs::create_dir(pair.here.point.join("d").join(&own))?;
        fs::create_dir(pair.there.point.join("d").join(&theirs))?;
        expected.extend([own, theirs].map(|name| ("d".to_owned(), "CREATE,ISDIR".to_owned(), name)));
        if round % 2 == 0 {
            std::thread::sleep(PACE);
            fs::remove_dir(pair.here.point.join("d").join(format!("own-{round}")))?;
            expected.push(("d".into(), "DELETE,ISDIR".into(), format!("own-{round}")));
        }
    }
    let mut seen = watcher.all(expected.len())?;
    seen.sort();
    expected.sort();
    ensure!(seen == expected, "told: {seen:?}");
    drop(watcher);
    pair.unmount()
}

fn one_file(world: &World) -> Result<()> {
    let pair = Pair::new(world, "one-file", &names(&["d"]), &MountParams::new(As::Us))?;
    fs::write(pair.there.point.join("d/f"), b"1")?;
    let watcher = pair.watch(world, &names(&["d/f"]))?;
    std::thread::sleep(PACE);
    fs::write(pair.there.point.join("d/g"), b"another")?;
    std::thread::sleep(PACE);
    append(&pair.there.point.join("d/f"))?;
    std::thread::sleep(PACE);
    fs::set_permissions(pair.there.point.join("d/f"), fs::Permissions::from_mode(0o640))?;
    let seen = watcher.all(2)?;
    ensure!(seen == told(&[("d/f", "MODIFY", ""), ("d/f", "ATTRIB", "")]), "told: {seen:?}");
    drop(watcher);
    pair.unmount()
}

fn tail(world: &World) -> Result<()> {
    let pair = Pair::new(world, "tail", &names(&["d"]), &MountParams::new(As::Us))?;
    fs::write(pair.there.point.join("d/log"), b"first\n")?;
    let log = world.log();
    let mut command = world.command("tail", As::Us);
    command.arg("-f").arg(pair.here.point.join("d/log")).stdin(Stdio::null()).stdout(File::create(&log)?);
    let mut child = command.spawn()?;
    let result = (|| {
        for line in 0..4 {
            let text = format!("line {line}\n");
            File::options().append(true).open(pair.there.point.join("d/log"))?.write_all(text.as_bytes())?;
            let shows = || Ok(fs::read_to_string(&log)?.contains(&text));
            ensure!(wait::holds(Duration::from_secs(3), shows)?, "tail -f does not show line {line}");
        }
        Ok(())
    })();
    process::signal(child.id(), libc::SIGTERM);
    process::wait(&mut child, Duration::from_secs(2))?;
    result?;
    pair.unmount()
}

fn gap(world: &World) -> Result<()> {
    let dirs = names(&["d"]);
    let pair = Pair::new(world, "gap", &dirs, &MountParams::new(As::Us))?;
    fs::write(pair.there.point.join("d/goes"), b"")?;
    fs::write(pair.there.point.join("d/moves"), b"")?;
    let watcher = pair.watch(world, &dirs)?;
    let at = |name: &str| pair.source.join("d").join(name);
    // No recall tells of these changes, since the server is stopped: the client finds them by comparison.
    signal_server(world, libc::SIGSTOP)?;
    fs::write(at("comes"), b"")?;
    fs::remove_file(at("goes"))?;
    fs::rename(at("moves"), at("moved"))?;
    std::thread::sleep(PACE);
    ensure!(watcher.seen()?.is_empty(), "told before the server was gone: {:?}", watcher.seen()?);
    kill_server(world)?;
    let mut seen = watcher.all(4)?;
    seen.sort();
    let mut expected = told(&[
        ("d", "CREATE", "comes"),
        ("d", "DELETE", "goes"),
        ("d", "MOVED_FROM", "moves"),
        ("d", "MOVED_TO", "moved"),
    ]);
    expected.sort();
    ensure!(seen == expected, "told: {seen:?}");
    ensure!(pair.count("gaps")? >= 1, "the gap is not counted");
    drop(watcher);
    pair.unmount()
}

/// Returns the replay processes of a mount point.
fn replaying(point: &Path) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = words.split(|byte| *byte == 0).collect();
        if words.get(1) == Some(&&b"replay"[..])
            && words.get(2).is_some_and(|word| *word == point.as_os_str().as_encoded_bytes())
        {
            found.push(pid);
        }
    }
    Ok(found)
}

fn killed(world: &World) -> Result<()> {
    let dirs = names(&["d"]);
    let pair = Pair::new(world, "killed", &dirs, &MountParams::new(As::Us))?;
    let watcher = pair.watch(world, &dirs)?;
    std::thread::sleep(PACE);
    fs::create_dir(pair.there.point.join("d/s"))?;
    ensure!(watcher.all(1)?.len() == 1, "told: {:?}", watcher.seen()?);
    ensure!(replaying(&pair.here.point)?.len() == 1, "no process replays events");
    process::signal(pair.here.daemon(), libc::SIGKILL);
    let ended = wait::holds(Duration::from_secs(5), || Ok(replaying(&pair.here.point)?.is_empty()))?;
    ensure!(ended, "it lives 5 s after its daemon was killed");
    drop(watcher);
    let mut clear = world.command(world.nigh(), As::Us);
    clear.arg("umount").arg(&pair.here.point);
    let cleared = world.run(clear, Duration::from_secs(10))?;
    ensure!(cleared.ok(), "nigh umount: {}", cleared.tail(3));
    pair.there.unmount()
}

fn off(world: &World) -> Result<()> {
    let dirs = names(&["d"]);
    let pair = Pair::new(world, "off", &dirs, &MountParams::new(As::Us).with("--events=off"))?;
    let watcher = Watcher::start(world, As::Us, &pair.here.point, &dirs)?;
    std::thread::sleep(PACE * 4);
    fs::create_dir(pair.there.point.join("d/s"))?;
    ensure!(watcher.all(0)?.is_empty(), "told: {:?}", watcher.seen()?);
    ensure!(pair.here.status()?["events"]["mode"] == "off" && replaying(&pair.here.point)?.is_empty(), "on");
    drop(watcher);
    pair.unmount()
}

fn refused(world: &World) -> Result<()> {
    let Some(who) = world.tester.filter(|who| *who != As::Us && root::is_root()) else { return Ok(()) };
    if process::which("fusermount3").is_none() {
        return Ok(());
    }
    // Both are mounts of the user's own server, which may read there and not write.
    let source = world.dir("refused-source", who)?;
    let open = source.join("open");
    fs::create_dir(source.join("shut"))?;
    fs::create_dir(&open)?;
    world.give(&open, who)?;
    fs::set_permissions(&open, fs::Permissions::from_mode(0o755))?;
    let (here, there) = (world.dir("refused-mnt-1", who)?, world.dir("refused-mnt-2", who)?);
    let how = MountParams::new(who).with("--host-timeout=500ms");
    let here = Mount::new(world, &source, &here, &how)?;
    let there = Mount::new(world, &source, &there, &how)?;
    let pair = Pair { source, here, there };
    let watcher = pair.watch(world, &names(&["open", "shut"]))?;
    std::thread::sleep(PACE);
    fs::write(pair.source.join("shut/x"), b"")?;
    fs::write(pair.source.join("open/x"), b"")?;
    let seen = watcher.all(1)?;
    ensure!(seen == told(&[("open", "CREATE", "x")]), "told: {seen:?}");
    ensure!(pair.count("refused")? >= 1, "no refusal is counted");
    drop(watcher);
    pair.unmount()
}
