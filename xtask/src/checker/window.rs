//! A window: all workers make calls in new directories, then all stop; the checker judges their results together with
//! the final state.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nigh_sim::history::{self, Call, CallResult, History, Kind, Record, Report, Slot};
use rustix::fs::{CWD, Mode, OFlags};

use super::calls;
use super::faults::Faults;
use super::stage::{MOUNTS, Stage, WORKERS};
use super::worker::{BYTES, Calls, MAPPED, NOT_FOLLOWED, Pace, WorkOrder, dir_name, name};
use crate::load::moment;
use crate::root;

/// Number of inode labels per worker and window.
const LABELS: u32 = 10_000;
const FIRST_LABEL: u32 = 1_000_000;
/// Limit of a call's duration, in ns; see `in_time`.
const WITHIN: u64 = 20_000_000_000;

/// The parameters of a window.
pub struct Plan {
    pub number: u32,
    /// Limit of calls per worker.
    pub calls: u32,
    /// After that time no worker begins another call.
    pub time: Duration,
    /// Interval between two changes; `None`: as fast as possible.
    pub change_ms: Option<u64>,
    /// Whether workers store into a shared map; not if mounts lose their open files, since then a load raises SIGBUS.
    pub maps: bool,
    pub limit: Duration,
}

/// The result of a window.
pub struct WindowResult {
    pub history: History,
    pub report: Report,
}

/// Runs a window and checks it. An unexplained history is stored.
pub fn run(stage: &mut Stage<'_>, plan: &Plan, seed: u64, faults: &mut Faults) -> Result<WindowResult> {
    let window = format!("w{}", plan.number);
    tell_first(stage, &format!("make {window}\n"))?;
    let logs = start(stage, plan, &window)?;
    wait(stage, plan.limit, faults).with_context(|| format!("window {}", plan.number))?;
    for worker in stage.workers() {
        worker.tell("look\n")?;
    }
    wait(stage, plan.limit, faults)?;
    let mut history = History::default();
    faults.tell(&mut history);
    for (number, log) in (0..).zip(&logs) {
        take(&mut history, number, &fs::read_to_string(log)?)?;
        fs::remove_file(log)?;
    }
    truth(&mut history, &stage.source.join(&window))?;
    let judged = history::judge_mounted(&history).map_err(|violation| violation.to_string());
    let judged = judged.and_then(|report| in_time(&history, faults).map(|()| report));
    let report = match judged {
        Ok(report) => {
            if report.undecided > 0 {
                let kept = keep(stage, &history, seed, plan.number)?;
                println!("window {}: too many orders; kept as {}", plan.number, kept.display());
            }
            report
        }
        Err(violation) => {
            let kept = keep(stage, &history, seed, plan.number)?;
            bail!("window {}: {violation}  kept as {}", plan.number, kept.display());
        }
    };
    for worker in stage.workers() {
        worker.tell("close\n")?;
    }
    wait(stage, plan.limit, faults)?;
    // The history is complete; any living worker may remove the directory.
    tell_first(stage, &format!("remove {window}\n"))?;
    Ok(WindowResult { history, report })
}

/// Checks that no call waits longer than for a stopped client: until the client is suspect, its lease has expired, and
/// the server has noticed. After an outage the time counts from its end.
fn in_time(history: &History, faults: &Faults) -> Result<(), String> {
    for record in &history.records {
        let Some((end, _)) = record.response else { continue };
        let concerns = |mount: Option<u8>| mount.is_none_or(|mount| mount == record.mount);
        let mended = faults.recoveries.iter().filter(|(mount, at)| concerns(*mount) && *at <= end);
        let since = mended.map(|(_, at)| *at).max().unwrap_or(0).max(record.begin);
        if end.saturating_sub(since) > WITHIN {
            return Err(format!("a call took too long:\n  {record}\n"));
        }
    }
    Ok(())
}

fn start(stage: &mut Stage<'_>, plan: &Plan, window: &str) -> Result<Vec<PathBuf>> {
    let dir = stage.world.in_memory();
    let workers = u64::from(MOUNTS * WORKERS);
    let mut logs = Vec::new();
    for (number, worker) in (0..).zip(stage.workers()) {
        let log = dir.join(format!("calls-{number}"));
        let _ = fs::remove_file(&log);
        let before = (plan.number * u32::try_from(workers)? + u32::try_from(number)?) * LABELS;
        let pace = match plan.change_ms {
            None => Pace::Fast,
            Some(change_ms) => Pace::Turns { change_ms, worker: number, workers },
        };
        let label = FIRST_LABEL + before;
        let calls = Calls { most: plan.calls, time_ms: u64::try_from(plan.time.as_millis())? };
        let bytes = if plan.maps { 1 + BYTES * u8::try_from(number)? } else { 0 };
        let order = WorkOrder { window: window.to_owned(), log: log.clone(), label, calls, pace, bytes };
        worker.calls.clone_from(&log);
        worker.tell(&order.line())?;
        logs.push(log);
    }
    Ok(logs)
}

/// Waits until all workers have completed their orders.
fn wait(stage: &mut Stage<'_>, limit: Duration, faults: &mut Faults) -> Result<()> {
    let start = Instant::now();
    let mut done = vec![false; usize::from(MOUNTS * WORKERS)];
    loop {
        for (done, worker) in done.iter_mut().zip(stage.workers()) {
            *done = *done || worker.is_done()?;
        }
        faults.go_on(stage, start.elapsed())?;
        if done.iter().all(|done| *done) && faults.are_over() {
            return Ok(());
        }
        if start.elapsed() > limit {
            stage.abort();
            bail!("after {limit:?} workers are not done: {done:?}; {}", stage.said());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Gives an order to the first living worker only.
fn tell_first(stage: &mut Stage<'_>, line: &str) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(60);
    let worker = stage.workers().find(|worker| !worker.is_dead()).context("no worker lives")?;
    worker.tell(line)?;
    while !worker.is_done()? {
        ensure!(Instant::now() < end, "{} is not done after a minute", line.trim());
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Parses one worker's log. A call without a result has an unknown outcome.
fn take(history: &mut History, number: u8, text: &str) -> Result<()> {
    let mut begun: Option<&str> = None;
    let (mount, worker) = (number / WORKERS, number % WORKERS);
    let mut lines = String::new();
    let mut write = |begun: &str, end: &str, answer: &str| {
        let (begin, call) = begun.split_once(' ').unwrap_or((begun, ""));
        lines += &format!("{mount}.{worker} {begin} {end} {call} = {answer}\n");
    };
    for line in text.lines() {
        if let Some(next) = line.strip_prefix("> ") {
            if let Some(unknown) = begun.replace(next) {
                write(unknown, "-", "?");
            }
        } else if let (Some(answered), Some(line)) = (begun.take(), line.strip_prefix("= ")) {
            let (end, answer) = line.split_once(' ').context("no answer")?;
            write(answered, end, answer);
        }
    }
    if let Some(unknown) = begun {
        write(unknown, "-", "?");
    }
    history.records.extend(history::parse(&lines)?.records);
    Ok(())
}

/// Adds the final state, read on the export beside all mounts.
fn truth(history: &mut History, dir: &Path) -> Result<()> {
    let mut add = |call, answer| {
        let now = moment();
        let answer = Some((now, answer));
        history.records.push(Record { mount: Record::EXPORT, worker: 0, begin: now, response: answer, call });
    };
    for (call, answer) in calls::cells(&fs::read(dir.join(MAPPED))?) {
        add(call, answer);
    }
    for slot in Slot::all() {
        let path = dir.join(dir_name(slot.dir())).join(name(slot.name()));
        let seen = match rustix::fs::statat(CWD, &path, NOT_FOLLOWED) {
            Ok(stat) => calls::seen(&stat),
            Err(rustix::io::Errno::NOENT) => {
                add(Call::Stat { slot }, CallResult::Failed(nigh_types::Errno::NOENT));
                continue;
            }
            Err(errno) => return Err(errno).with_context(|| path.display().to_string()),
        };
        add(Call::Stat { slot }, CallResult::Attributes(seen));
        if seen.kind == Kind::File {
            let fd = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            let file = seen.file;
            for call in [Call::Read { file }, Call::GetXattr { file }] {
                let way = calls::ReadMode { forced: false, seek: false };
                add(call, calls::of_file(std::os::fd::AsFd::as_fd(&fd), call, way)?);
            }
        }
    }
    Ok(())
}

/// Stores an unexplained history, and all processes' output so far (`NIGH_LOG=nigh=trace` makes it more detailed).
fn keep(stage: &Stage<'_>, history: &History, seed: u64, number: u32) -> Result<PathBuf> {
    let dir = root::target().join("checker").join(format!("seed-{seed}-window-{number}"));
    fs::create_dir_all(&dir)?;
    let path = dir.join("history.txt");
    fs::write(&path, history.to_string())?;
    for entry in fs::read_dir(stage.world.root.join("log"))? {
        let entry = entry?;
        fs::copy(entry.path(), dir.join(format!("log-{}", entry.file_name().display())))?;
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_without_logged_result_has_unknown_outcome() {
        let mut history = History::default();
        let text = "> 10 stat a0\n= 20 error 2\n> 30 unlink a0\n> 40 rmdir a0\n= 50 done\n> 60 list a\n";
        take(&mut history, 3, text).unwrap();
        let expected = "1.1 10 20 stat a0 = error 2\n1.1 30 - unlink a0 = ?\n1.1 40 50 rmdir a0 = done\n\
                        1.1 60 - list a = ?\n";
        assert_eq!(history.to_string(), expected);
    }
}
