//! Faults during a window: a schedule, its execution step by step, and its record.

use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nigh_sim::history::History;

use super::stage::{MOUNTS, Stage, WORKERS, asks};
use crate::load::moment;
use crate::process;

/// After this time a stopped mount may return outdated results: its last renewal was 5 s before at most, and its lease
/// ends 13.5 s after the renewal.
const OLD_AFTER: Duration = Duration::from_secs(8);
/// How long after its SIGKILL a server may still execute something.
const DYING: Duration = Duration::from_millis(100);

/// One scheduled step. Mounts and workers are given by number; workers count over all mounts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    Cut(u8),
    Down(u8),
    Up(u8),
    Stop(u8),
    Continue(u8),
    KillServer,
    KillWorker(u8),
}

/// The counted kinds of faults, and how each ends if it does not end at once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    Cut,
    /// For less than a term.
    Down,
    /// For more than a term.
    Away,
    Stop,
    KillServer,
    KillWorker,
}

impl Kind {
    pub const ALL: [(Kind, &'static str); 6] = [
        (Kind::Cut, "cut"),
        (Kind::Down, "down_less_than_a_term"),
        (Kind::Away, "down_more_than_a_term"),
        (Kind::Stop, "client_stopped_past_its_term"),
        (Kind::KillServer, "server_killed"),
        (Kind::KillWorker, "worker_killed"),
    ];
}

/// A fault that occurred.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultRecord {
    pub kind: Kind,
    /// Whether it counts: its mount held grants, and calls were in flight.
    pub counts: bool,
}

/// What a killed worker waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitKind {
    /// Nothing, or not for long.
    Runs,
    /// A reply of its mount's daemon.
    Answer,
    /// A reply of a stopped daemon: the kernel lets no caller go whose request such a process has read.
    Stopped,
    /// A lock in the kernel, such as a directory's, that another call on its mount holds: no signal ends that wait.
    Lock,
}

/// A killed worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Killed {
    pub took: Duration,
    pub wait: WaitKind,
}

/// The faults of one window.
#[derive(Default)]
pub struct Faults {
    /// Latest step first.
    steps: Vec<(Duration, Step)>,
    pub occurred: Vec<FaultRecord>,
    pub killed: Vec<Killed>,
    kills: Vec<(u64, u64)>,
    stops: Vec<(u8, u64, u64)>,
    losses: Vec<u8>,
    /// When mounts, or the server (no mount), could work again.
    pub recoveries: Vec<(Option<u8>, u64)>,
    /// A resumed mount, the time of its stop, and a process that sends it a request, whose end counts as its return.
    probes: Vec<(u8, u64, Child)>,
    /// The mount, the time of its stop, and its daemon.
    stopped: Vec<(u8, u64, u32)>,
    /// Killed workers that have not exited yet.
    dying: Vec<(u8, Instant, WaitKind)>,
    down: Vec<(u8, Instant, bool)>,
}

impl Faults {
    /// Takes steps with their times since the start of work.
    #[must_use]
    pub fn new(mut steps: Vec<(Duration, Step)>) -> Faults {
        steps.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
        let mut faults = Faults::default();
        faults.steps = steps;
        faults
    }

    /// Returns the time of the last step.
    #[must_use]
    pub fn end(&self) -> Duration {
        self.steps.first().map_or(Duration::ZERO, |(at, _)| *at)
    }

    #[must_use]
    pub fn are_over(&self) -> bool {
        self.steps.is_empty() && self.probes.is_empty() && self.dying.is_empty()
    }

    /// Executes the steps that are due.
    pub fn go_on(&mut self, stage: &mut Stage<'_>, elapsed: Duration) -> Result<()> {
        while let Some((at, step)) = self.steps.pop() {
            if at > elapsed {
                self.steps.push((at, step));
                break;
            }
            self.step(stage, step).with_context(|| format!("{step:?}"))?;
        }
        let mut waiting = Vec::new();
        for (mount, since, mut child) in std::mem::take(&mut self.probes) {
            if child.try_wait()?.is_some() {
                let old = since + u64::try_from(OLD_AFTER.as_nanos())?;
                self.stops.push((mount, old, moment()));
            } else {
                waiting.push((mount, since, child));
            }
        }
        self.probes = waiting;
        self.look_at_the_dying(stage)
    }

    fn look_at_the_dying(&mut self, stage: &mut Stage<'_>) -> Result<()> {
        let mut alive = Vec::new();
        for (number, since, held) in std::mem::take(&mut self.dying) {
            if stage.worker(number).is_gone()? {
                self.killed.push(Killed { took: since.elapsed(), wait: held });
            } else {
                alive.push((number, since, held));
            }
        }
        self.dying = alive;
        Ok(())
    }

    fn step(&mut self, stage: &mut Stage<'_>, step: Step) -> Result<()> {
        match step {
            Step::Cut(mount) => {
                self.happens(stage, Kind::Cut, Some(mount));
                stage.seat(mount).link.cut()?;
            }
            Step::Down(mount) => {
                let counts = holds_grants(stage, mount);
                stage.seat(mount).link.down()?;
                self.down.push((mount, Instant::now(), counts));
            }
            Step::Up(mount) => {
                self.recoveries.push((Some(mount), moment()));
                stage.seat(mount).link.up()?;
                let at = self.down.iter().position(|(down, ..)| *down == mount).context("it is up")?;
                let (_, since, counts) = self.down.remove(at);
                let kind =
                    if since.elapsed() > Duration::from_millis(16_500) { Kind::Away } else { Kind::Down };
                self.occurred.push(FaultRecord { kind, counts });
                if kind == Kind::Away {
                    self.losses.push(mount);
                    stage.seat(mount).is_penalised = true;
                }
            }
            Step::Stop(mount) => {
                self.happens(stage, Kind::Stop, Some(mount));
                let daemon = stage.seat(mount).mount.daemon();
                process::signal(daemon, libc::SIGSTOP);
                self.stopped.push((mount, moment(), daemon));
                self.losses.push(mount);
            }
            Step::Continue(mount) => self.go_on_again(stage, mount)?,
            Step::KillServer => {
                self.happens(stage, Kind::KillServer, None);
                let began = moment();
                stage.server.kill()?;
                self.kills.push((began, moment() + u64::try_from(DYING.as_nanos())?));
                self.recoveries.push((None, moment()));
                stage.server.start_again()?;
                // A mount cannot find a file again whose names other mounts have changed since its last lookup.
                self.losses.extend(0..MOUNTS);
                self.recoveries.push((None, moment()));
            }
            Step::KillWorker(number) => self.kill_worker(stage, number)?,
        }
        Ok(())
    }

    fn happens(&mut self, stage: &mut Stage<'_>, kind: Kind, mount: Option<u8>) {
        let mut mounts = (0..MOUNTS).filter(|number| mount.is_none_or(|mount| mount == *number));
        // A stopped mount reports no grants.
        let counts = mounts.any(|mount| !self.is_stopped(mount) && holds_grants(stage, mount));
        self.occurred.push(FaultRecord { kind, counts });
    }

    fn is_stopped(&self, mount: u8) -> bool {
        self.stopped.iter().any(|(stopped, ..)| *stopped == mount)
    }

    fn go_on_again(&mut self, stage: &mut Stage<'_>, mount: u8) -> Result<()> {
        let at =
            self.stopped.iter().position(|(stopped, ..)| *stopped == mount).context("it was not stopped")?;
        let (_, since, _) = self.stopped.remove(at);
        let seat = stage.seat(mount);
        // It may reply before the request below.
        self.recoveries.push((Some(mount), moment()));
        process::signal(seat.mount.daemon(), libc::SIGCONT);
        self.probes.push((mount, since, asks(&seat.mount)?));
        seat.is_penalised = true;
        Ok(())
    }

    fn kill_worker(&mut self, stage: &mut Stage<'_>, number: u8) -> Result<()> {
        let stopped = self.is_stopped(number / WORKERS);
        let worker = stage.worker(number);
        if worker.is_dead() {
            return Ok(());
        }
        let held = match (worker.is_waiting(), worker.awaits_answer()) {
            (false, _) => WaitKind::Runs,
            (true, false) => WaitKind::Lock,
            (true, true) if stopped => WaitKind::Stopped,
            (true, true) => WaitKind::Answer,
        };
        let start = Instant::now();
        worker.kill();
        let limit = if stopped { Duration::ZERO } else { Duration::from_secs(1) };
        while start.elapsed() < limit && !worker.is_gone()? {
            std::thread::sleep(Duration::from_micros(100));
        }
        if worker.is_gone()? {
            self.killed.push(Killed { took: start.elapsed(), wait: held });
        } else {
            let answer = worker.awaits_answer();
            ensure!(stopped || !answer, "a second after SIGKILL it waits for an answer");
            // The lock that it waited for a moment ago may be free by now.
            let held = if answer { WaitKind::Stopped } else { WaitKind::Lock };
            self.dying.push((number, start, held));
        }
        let counts = !matches!(held, WaitKind::Runs);
        self.occurred.push(FaultRecord { kind: Kind::KillWorker, counts });
        Ok(())
    }

    /// Adds to a history what its checker must know.
    pub fn tell(&self, history: &mut History) {
        history.kills.extend(&self.kills);
        history.stops.extend(&self.stops);
        history.lossy_mounts.extend(&self.losses);
    }
}

impl Drop for Faults {
    /// A stopped daemon could not be terminated.
    fn drop(&mut self) {
        self.stopped.iter().for_each(|(_, _, daemon)| process::signal(*daemon, libc::SIGCONT));
    }
}

fn holds_grants(stage: &mut Stage<'_>, mount: u8) -> bool {
    let status = stage.seat(mount).mount.status();
    status.is_ok_and(|status| status["leases"]["read"].as_u64().is_some_and(|held| held > 0))
}
