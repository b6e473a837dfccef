//! One writer and many readers, with checks of what each reader sees.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nigh_cache::{Op, OpReply};
use nigh_native::UPDATES;
use nigh_types::{Call, CallId, Cookie, Name, OpId, Reply};
use serde_json::Value;

use super::caching_client::{ExpectedStat, ReadCounts};
use super::changes::{Change, Changes, KINDS};
use super::figures::Times;
use super::stage::{Stage, WRITER, name};
use crate::process;

/// The directory that the writer changes.
const DIRECTORY: &str = "many";
/// After so many changes each reader reads the whole directory.
const READ_ALL: u64 = 200;
/// Limit of bytes that a reader may receive per change: two frames, confirmations, and the reply of a lookup that came
/// before the commit. One entry of a listing takes some 60.
const MOST_BYTES: u64 = 2_000;

/// A series of changes.
pub struct Run {
    pub pace: Option<Duration>,
    pub took: Duration,
    pub times: Times,
    pub by_kind: Vec<Times>,
    /// The server's CPU time per change.
    pub cpu_each: Duration,
    pub looks: ReadCounts,
    /// Bytes that each reader received per change.
    pub bytes_each: u64,
}

/// The stage, the writer and the readers.
pub struct PushBenchmark {
    stage: Stage,
    nigh: PathBuf,
    /// The directory on the server's disk, for comparison.
    path: PathBuf,
    rtt: Duration,
    /// The directory's inode number.
    dir: u64,
    changes: Changes,
    /// Changes pushed to the readers.
    pushed: u64,
}

/// A change in flight, and its start.
type InFlight = (Instant, CallId, Change);

impl PushBenchmark {
    /// Creates a directory of `count` files, and the writer, which has listed it.
    pub fn new(nigh: &Path, dir: &Path, count: u64, rtt: Duration) -> Result<PushBenchmark> {
        let path = dir.join("export").join(DIRECTORY);
        fs::create_dir_all(&path)?;
        for number in 0..count {
            fs::write(path.join(format!("file-{number:06}")), "")?;
        }
        let mut stage = Stage::new(nigh, dir, [DIRECTORY.to_owned()].into_iter(), UPDATES)?;
        stage.crowd.set_round_trip(rtt);
        let many = stage.place(DIRECTORY)?;
        let id = stage.crowd.call(WRITER, Call::List { dir: many.clone() })?;
        let mut files = Vec::new();
        for part in stage.crowd.answer(WRITER, id)?.parts {
            let Ok(Reply::Listed(listed)) = part.result else { continue };
            files.extend(listed.entries.into_iter().map(|(name, entry)| (name, entry.id)));
        }
        // A file that every stage has.
        files.retain(|(name, _)| name.as_bytes() != b"file");
        ensure!(files.len() as u64 == count && count >= 100, "{} files are listed of {count}", files.len());
        let (nigh, dir) = (nigh.to_owned(), many.node.ino);
        let changes = Changes::new(many, files.into_iter());
        Ok(PushBenchmark { stage, nigh, path, rtt, dir, changes, pushed: 0 })
    }

    /// Attaches readers; each looks up the directory, and reads it once.
    pub fn readers_list(&mut self, count: usize) -> Result<()> {
        self.stage.attach_readers(count)?;
        let root = fs::metadata(self.path.parent().context("an export")?)?.ino();
        for number in self.stage.clients.clone() {
            let found = self.answer(number, Op::Lookup { dir: root, name: name(DIRECTORY)? })?;
            ensure!(matches!(found, OpReply::Node(node) if node.id.ino == self.dir), "{found:?}");
        }
        self.read_all()
    }

    pub fn forget_in(&mut self, time: Duration) -> Result<()> {
        for number in self.stage.clients.clone() {
            self.stage.crowd.with_reader(number, |reader, _| reader.invalidation_delay = time)?;
        }
        Ok(())
    }

    /// Returns the reply of a reader's cache.
    fn answer(&mut self, number: usize, op: Op) -> Result<OpReply> {
        let crowd = &mut self.stage.crowd;
        // A cached reply lets no time pass, but other clients must renew their sessions.
        crowd.step(Instant::now())?;
        let id: OpId = crowd.with_reader(number, |reader, now| reader.ask(now, op))?;
        crowd.until("a reader is answered", |crowd| {
            crowd.reader(number).is_some_and(|reader| reader.answers.contains_key(&id))
        })?;
        crowd.with_reader(number, |reader, _| reader.answers.remove(&id))?.context("the answer is there")
    }

    /// All readers read the whole directory; it must equal the disk.
    fn read_all(&mut self) -> Result<()> {
        let mut truth: HashMap<Vec<u8>, (u64, usize)> = HashMap::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            truth.insert(entry.file_name().into_encoded_bytes(), (entry.ino(), WRITER));
        }
        let metadata = fs::symlink_metadata(&self.path)?;
        let (dir, itself) = (self.dir, fact(&metadata));
        for number in self.stage.clients.clone() {
            let mut count = 0;
            for (name, ino) in self.list(number)? {
                count += 1;
                let known = truth.get_mut(&name).filter(|(is, reader)| *is == ino && *reader != number);
                let name = name.escape_ascii();
                known.with_context(|| format!("reader {number} lists {name} as {ino}, or twice"))?.1 = number;
            }
            ensure!(count == truth.len(), "reader {number} lists {count} names of {}", truth.len());
            self.stage.crowd.with_reader(number, |reader, now| reader.look_at(now, dir, itself))?;
        }
        self.settle()
    }

    fn list(&mut self, number: usize) -> Result<Vec<(Vec<u8>, u64)>> {
        /// The kernel's buffer size.
        const SIZE: u32 = 1 << 20;
        let ino = self.dir;
        let opened = self.answer(number, Op::OpenDir { ino })?;
        let OpReply::Opened(opened) = opened else { bail!("opening the directory: {opened:?}") };
        let (fh, mut offset, mut found) = (opened.fh, Cookie(0), Vec::new());
        loop {
            let read = Op::ReadDir { ino, fh, offset, size: SIZE, plus: false };
            let answer = self.answer(number, read)?;
            let OpReply::Page(page) = answer else { bail!("reading the directory: {answer:?}") };
            let Some(last) = page.entries.last() else { break };
            offset = last.next;
            let mut names = page.names.as_slice();
            for entry in &page.entries {
                let (name, rest) = names.split_at(usize::from(entry.name_len));
                names = rest;
                if !matches!(name, b"." | b"..") {
                    found.push((name.to_vec(), entry.ino));
                }
            }
        }
        self.answer(number, Op::ReleaseDir { fh })?;
        Ok(found)
    }

    /// Makes `count` changes, each at its time (`None`: after the reply to the one before). After each reply every
    /// reader reads.
    pub fn run(&mut self, count: u64, pace: Option<Duration>) -> Result<Run> {
        let (mut times, mut by_kind) = (Times::default(), Vec::new());
        by_kind.resize_with(KINDS.len(), Times::default);
        let (cpu, looks, bytes) = (self.stage.server.usage()?.cpu, self.looks(), self.bytes());
        let (mut begun, mut read_all, start) = (0, 0, Instant::now());
        let (mut next, mut under_way) = (start, Vec::<InFlight>::new());
        while begun < count || !under_way.is_empty() {
            for nth in (0..under_way.len()).rev() {
                if self.stage.crowd.clients[WRITER].answers.contains_key(&under_way[nth].1) {
                    let (since, id, change) = under_way.remove(nth);
                    let took = self.finish(since, id, &change)?;
                    times.note(took);
                    let kind = KINDS.iter().position(|kind| *kind == change.kind).context("a kind")?;
                    by_kind[kind].note(took);
                }
            }
            let reads_all = begun >= read_all + READ_ALL;
            if reads_all && under_way.is_empty() {
                self.settle()?;
                self.read_all()?;
                (read_all, next) = (begun, Instant::now());
            }
            let free = pace.is_some_and(|_| Instant::now() >= next) || pace.is_none() && under_way.is_empty();
            if free && !reads_all && begun < count {
                begun += 1;
                next = (next + pace.unwrap_or_default()).max(Instant::now());
                under_way.push(self.begin()?);
                continue;
            }
            let until = if reads_all || pace.is_none() { Instant::now() + self.rtt } else { next };
            self.stage.crowd.step(until)?;
        }
        let took = start.elapsed();
        self.settle()?;
        self.read_all()?;
        let cpu_each = (self.stage.server.usage()?.cpu - cpu).div_f64(count as f64);
        let readers = self.stage.clients.len() as u64;
        self.pushed += if readers > 0 { count } else { 0 };
        let bytes_each = (self.bytes() - bytes) / (count * readers).max(1);
        ensure!(bytes_each < MOST_BYTES, "each reader was sent {bytes_each} bytes for each change");
        let looks = self.looks().since(looks);
        Ok(Run { pace, took, times, by_kind, cpu_each, looks, bytes_each })
    }

    fn begin(&mut self) -> Result<InFlight> {
        let change = self.changes.begin()?;
        let since = Instant::now();
        let id = self.stage.crowd.call(WRITER, change.call.clone())?;
        Ok((since, id, change))
    }

    /// Ends a change. Every reader has acknowledged it before the reply, and now sees the new state.
    fn finish(&mut self, since: Instant, id: CallId, change: &Change) -> Result<Duration> {
        let crowd = &mut self.stage.crowd;
        let answer = crowd.answer(WRITER, id)?;
        let [part] = &answer.parts[..] else { bail!("{} parts of an answer", answer.parts.len()) };
        let reply = part.result.as_ref().map_err(|errno| anyhow!("{}: {errno}", change.kind))?;
        let handle = self.changes.done(change, reply)?;
        if let Some(handle) = handle {
            crowd.call(WRITER, Call::Release { handles: vec![handle] })?;
        }
        for name in &change.names {
            let truth = on_disk(&self.path, name)?;
            for number in self.stage.clients.clone() {
                let left = crowd.with_reader(number, |reader, now| {
                    let left = reader.acknowledged.remove(name);
                    reader.look(now, self.dir, name, truth);
                    left
                })?;
                let left = left.with_context(|| format!("reader {number} was not told of {name}"))?;
                ensure!(answer.at >= left + self.rtt, "{name} was changed before reader {number} let it go");
            }
        }
        Ok(answer.at - since)
    }

    /// Waits until no reader waits, and checks their reads.
    fn settle(&mut self) -> Result<()> {
        let clients = self.stage.clients.clone();
        self.stage.crowd.until("readers are answered", |crowd| {
            clients.clone().all(|number| crowd.reader(number).is_some_and(|reader| reader.is_idle()))
        })?;
        self.stage.check_all_stand()?;
        for number in clients {
            let wrong = self.stage.crowd.reader(number).and_then(|reader| reader.wrong.clone());
            ensure!(wrong.is_none(), "reader {number}: {}", wrong.unwrap_or_default());
        }
        Ok(())
    }

    fn looks(&self) -> ReadCounts {
        let readers = self.stage.clients.clone().filter_map(|number| self.stage.crowd.reader(number));
        readers.fold(ReadCounts::default(), |sum, reader| sum.and(reader.read_counts))
    }

    fn bytes(&self) -> u64 {
        self.stage.clients.clone().map(|number| self.stage.crowd.clients[number].bytes_received).sum()
    }

    /// Returns the server's counters.
    pub fn totals(&self) -> Result<Value> {
        let mut command = Command::new(&self.nigh);
        command.arg("status").arg("--server").arg(&self.stage.server.socket).arg("--json");
        let status: Value = serde_json::from_str(&process::output(&mut command)?)?;
        Ok(status["totals"].clone())
    }

    /// Checks that no reader listed twice, no lease was recalled, and each reader got each change once.
    pub fn check_counts(&self, before: &Value) -> Result<()> {
        let readers = self.stage.clients.len() as u64;
        for number in self.stage.clients.clone() {
            let (member, told) = (&self.stage.crowd.clients[number], self.pushed);
            let reader = self.stage.crowd.reader(number).context("a reader")?;
            let counters = reader.cache.counters();
            let lists = member.calls_of("list");
            ensure!(lists == 1, "reader {number} asked {lists} times for listings");
            ensure!(
                counters.recalled == 0,
                "reader {number} was asked to give back {} times",
                counters.recalled
            );
            ensure!(
                reader.prepared == told,
                "reader {number} heard of {} changes of {told}",
                reader.prepared
            );
            let in_place = counters.updated_in_place;
            ensure!(in_place == told, "reader {number} learned of {in_place} changes of {told}");
        }
        let after = self.totals()?;
        let grown = |key: &str| -> Result<u64> {
            let count = |of: &Value| of[key].as_u64().with_context(|| format!("totals.{key}"));
            Ok(count(&after)? - count(before)?)
        };
        let recalled = grown("recalled")?;
        ensure!(recalled == 0, "the server says that it recalled {recalled} grants");
        let held = grown("held")?;
        ensure!(held == self.pushed * readers, "the server says that it told {held} times");
        println!(
            "  {} changes: {readers} listings in all, 0 recalls, {held} holds; all as on the disk",
            self.pushed
        );
        Ok(())
    }
}

/// Returns what the disk has at a name.
fn on_disk(dir: &Path, name: &Name) -> Result<Option<ExpectedStat>> {
    match fs::symlink_metadata(dir.join(OsStr::from_bytes(name.as_bytes()))) {
        Ok(metadata) => Ok(Some(fact(&metadata))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn fact(of: &fs::Metadata) -> ExpectedStat {
    let nanos = |nanos: i64| u32::try_from(nanos).unwrap_or_default();
    ExpectedStat {
        ino: of.ino(),
        mode: of.mode(),
        size: of.size(),
        nlink: u32::try_from(of.nlink()).unwrap_or(u32::MAX),
        mtime: (of.mtime(), nanos(of.mtime_nsec())),
        ctime: (of.ctime(), nanos(of.ctime_nsec())),
    }
}
