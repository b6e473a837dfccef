//! Seeded histories over the native protocol.

use super::clock::Clock;
use super::{ClientSetup, Counts, Native};
use crate::random::{Dice, RandomHistory, Workload};
use crate::world::{Client, World};
use nigh_cache::{Config, NotifyLevel, OnDisconnect};
use nigh_lease::LeaseConfig;
use nigh_native::{EXCLUSIVE_DIR_LEASES, LIST_NAMES, UPDATES};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_types::{OpId, Span, Term, Time};
use std::collections::BTreeMap;

/// The session term.
const TERM: Span = Span::from_millis(1_000);
/// The term of a grant that has one. For open files the client renews terms of a second or less continuously.
const LIMIT: Span = Span::from_millis(1_300);
const PATIENCE: Span = Span::from_millis(100);
/// How long after a fault a client may still be waited for: a silent client becomes suspect, and then its lease
/// expires.
const CALM: Span = Span::from_millis(100 + 1_100 + 300);
/// Ten round trips to the server, of the longest latency.
const IN_TIME: Span = Span::from_millis(10 * 12);

/// The parameters of a history.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
    pub clients: u32,
    pub steps: u32,
    /// Without faults; all clients map files.
    pub calm: bool,
    /// Several clients write parts of one page at the same time.
    pub halves: bool,
    /// Several clients store into maps of one page at the same time.
    pub shared: bool,
}

impl Plan {
    /// The default parameters.
    #[must_use]
    pub fn of(seed: u64) -> Plan {
        let clients = if (seed / 7).is_multiple_of(2) { 2 } else { 3 };
        Plan { seed, clients, steps: 300, calm: false, halves: false, shared: false }
    }

    /// Parameters without faults: a client that is silent for long is an error.
    #[must_use]
    pub fn calm(seed: u64) -> Plan {
        Plan { calm: true, ..Plan::of(seed) }
    }

    /// Parameters with several clients that write parts of one page; half of the seeds are without faults.
    #[must_use]
    pub fn halves(seed: u64) -> Plan {
        Plan { calm: seed.is_multiple_of(2), halves: true, ..Plan::of(seed) }
    }

    /// Parameters with several clients that store into maps of one page; half of the seeds are without faults.
    #[must_use]
    pub fn shared(seed: u64) -> Plan {
        Plan { calm: seed.is_multiple_of(2), shared: true, ..Plan::of(seed) }
    }
}

/// The faults of a history.
#[derive(Clone, Copy)]
struct Faults {
    cuts: bool,
    pauses: bool,
    restarts: bool,
    drift: bool,
    slow_kernels: bool,
}

/// Runs one history and returns its statistics.
///
/// # Errors
/// Wrong data in a kernel or a reply, or a missing reply, with the steps before it.
pub fn run(plan: Plan) -> Result<Counts, String> {
    let (mut history, faults) = begin(plan);
    let tell = |history: &RandomHistory<Native>, step: u32, lie: String| {
        format!("seed {} step {step}: {lie}\n{}", plan.seed, history.world.trace.join("\n"))
    };
    let mut waits = Waits::default();
    for step in 1..=plan.steps {
        waits.note(&mut history);
        act(&mut history, faults);
        history.world.observe();
        history.judge().map_err(|lie| tell(&history, step, lie))?;
        waits.judge(&mut history).map_err(|lie| tell(&history, step, lie))?;
        let keep = history.world.trace.len().saturating_sub(400);
        history.world.trace.drain(..keep);
    }
    end(&mut history).map_err(|lie| tell(&history, plan.steps + 1, lie))?;
    let counters = || history.world.clients.iter().map(|client| client.cache.counters());
    let from_memory = counters().map(|counters| counters.hits).sum();
    let stored = counters().map(|counters| counters.contents_stored).sum();
    Ok(Counts { from_memory, stored, ..history.world.server.with(|net| net.server.counts) })
}

/// Check of reply times while no fault is present.
#[derive(Default)]
struct Waits {
    since: BTreeMap<OpId, Time>,
}

impl Waits {
    /// Notes present faults and pending requests.
    fn note(&mut self, history: &mut RandomHistory<Native>) {
        let now = history.world.now;
        let slow =
            |client: &Client<Native>| client.hold_invalidations || client.invalidates_slowly || client.asleep;
        let slow = history.world.clients.iter().any(slow);
        history.world.server.with(|net| {
            net.now = net.now.max(now);
            net.note_trouble(slow || net.corrupted_client.is_some());
        });
        self.since.retain(|op, _| history.begun.contains_key(op));
        for op in history.begun.keys() {
            self.since.entry(*op).or_insert(now);
        }
    }

    /// Checks that without faults, for as long as a client may be waited for, no client is suspect and all replies
    /// come soon.
    fn judge(&mut self, history: &mut RandomHistory<Native>) -> Result<(), String> {
        self.note(history);
        let now = history.world.now;
        let (calm, alarms) = history
            .world
            .server
            .with(|net| (net.last_fault.after(CALM), std::mem::take(&mut net.server.alarms)));
        if let Some((_, alarm)) = alarms.into_iter().find(|(at, _)| *at > calm) {
            return Err(format!("{alarm}, and nothing is wrong"));
        }
        let late = self.since.iter().find(|(_, since)| now > calm.max(**since).after(IN_TIME));
        late.map_or(Ok(()), |(op, since)| {
            Err(format!("{op:?} has waited for {} ms, and nothing is wrong", now.since(*since).as_millis()))
        })
    }
}

fn begin(plan: Plan) -> (RandomHistory<Native>, Faults) {
    let mut dice = Dice::new(plan.seed);
    let mut lots = Dice::new(plan.seed ^ 0x1075);
    let garbled = lots.below(8) == 0;
    let mut bit = || lots.below(2) == 0;
    // Corrupted frames may write data that no client meant to write.
    let mut kinds = Workload {
        files: bit() && !garbled,
        limited: bit(),
        tiny: bit(),
        losses: false,
        pushes: bit(),
        ..Workload::default()
    };
    kinds.small_files = kinds.files && plan.seed % 3 == 1;
    let mut faults = Faults { cuts: bit(), pauses: bit(), restarts: bit(), drift: bit(), slow_kernels: true };
    if plan.calm {
        kinds = Workload { files: true, maps: true, ..kinds };
        faults = Faults { cuts: false, pauses: false, restarts: false, slow_kernels: false, ..faults };
    }
    if plan.halves {
        kinds = Workload { files: true, partial_writes: true, maps: false, ..kinds };
    }
    if plan.shared {
        kinds = Workload { files: true, shared_maps: true, maps: false, ..kinds };
    }
    let tree = ModelFsConfig {
        chunk_entries: 1 + u32::try_from(dice.below(4)).unwrap_or(0),
        reuse_inos: dice.below(2) == 0 && !kinds.files,
        ..ModelFsConfig::default()
    };
    let leases = LeaseConfig {
        term: TERM,
        patience: PATIENCE,
        max_penalty: Span::from_millis(500),
        // Otherwise everything is contended after two steps, and no client holds a lease.
        young: if bit() { Span::from_millis(20) } else { Span::ZERO },
        cooldown: Span::from_millis(500),
        ..LeaseConfig::default()
    };
    let native = Native::new(tree, leases, plan.seed);
    let mut history = RandomHistory::begin(World::over(native), kinds, dice);
    for at in 0..plan.clients {
        join(&mut history, u64::from(at), faults);
    }
    history.world.advance(Span::from_millis(100));
    history.look_around();
    // Waits for the lookup replies: a client that does not know a directory sends no request on it.
    history.world.advance(Span::from_millis(100));
    history.world.server.with(|net| {
        net.corrupted_client = (garbled && !plan.calm && !plan.halves && !plan.shared).then_some(0)
    });
    (history, faults)
}

fn join(history: &mut RandomHistory<Native>, at: u64, faults: Faults) {
    let RandomHistory { world, dice, .. } = history;
    let level = [NotifyLevel::All, NotifyLevel::All, NotifyLevel::NoEpoch, NotifyLevel::None]
        [dice.below(4) as usize % 4];
    let clock = match faults.drift {
        true => Clock::new(at * 1_000_000_007, dice.below(31)),
        false => Clock::exact(),
    };
    let latency = (Span::from_millis(1 + dice.below(5)), Span::from_millis(1 + dice.below(5)));
    let limited = history.workload.limited;
    let term = if limited { Term::Limited(LIMIT) } else { Term::Session };
    let alone = if level == NotifyLevel::NoEpoch { EXCLUSIVE_DIR_LEASES } else { 0 };
    let features = LIST_NAMES | alone | if history.workload.pushes { UPDATES } else { 0 };
    let end = world.server.connect(world.now, ClientSetup { clock, latency, term, features });
    let budget_bytes = if history.workload.tiny { 3_000 } else { 1 << 30 };
    let on_disconnect = match dice.below(8) {
        // Not before the first replies have arrived.
        0 | 1 => OnDisconnect::Fail(Span::from_millis(40 + dice.below(300))),
        2 => OnDisconnect::Stale,
        _ => OnDisconnect::Wait,
    };
    let (short_cookies, names_first) = (at % 3 == 2, at % 3 == 1);
    let config =
        Config { level, budget_bytes, on_disconnect, short_cookies, names_first, ..Config::default() };
    let at = world.join(config, (), end);
    world.clients[at].workers = [64, 64, 2, 1][dice.below(4) as usize % 4];
}

fn act(history: &mut RandomHistory<Native>, faults: Faults) {
    match history.dice.below(100) {
        0..=64 => history.ask_something(),
        65..=84 => {
            let span = Span::from_millis(1 + history.dice.below(20));
            history.world.advance(span);
        }
        85..=89 => {
            let span = Span::from_millis(20 + history.dice.below(200));
            history.world.advance(span);
        }
        90 => kill_a_caller(history),
        91 if !faults.slow_kernels => {}
        91 => {
            let at = history.client();
            match history.dice.below(2) {
                0 => history.world.clients[at].hold_invalidations = true,
                _ => history.world.clients[at].invalidates_slowly = true,
            }
        }
        92..=94 => {
            let at = history.client();
            if history.world.is_awake(at) {
                history.world.release_notifications(at);
                history.world.end_slow_invalidation(at);
            }
        }
        roll => go_wrong(history, faults, roll),
    }
}

fn kill_a_caller(history: &mut RandomHistory<Native>) {
    let waiting = history.begun.keys().next().copied();
    let waits = |op: OpId| (0..history.world.clients.len()).find(|at| history.world.is_pending(*at, op));
    if let Some((op, at)) = waiting.and_then(|op| Some((op, waits(op)?)))
        && history.world.is_awake(at)
    {
        history.world.interrupt(at, op);
    }
}

fn go_wrong(history: &mut RandomHistory<Native>, faults: Faults, roll: u64) {
    let at = history.client();
    match roll {
        95 | 96 if faults.cuts => {
            let longest = Span(history.dice.below(TERM.0 / 4));
            let down = match history.dice.below(4) {
                0 => Span(history.dice.below(2 * TERM.0)),
                _ => Span::ZERO,
            };
            let now = history.world.now;
            history.world.server.with(|net| {
                net.now = net.now.max(now);
                net.cut(at, longest);
                net.ends[at].down_until = now.after(down);
            });
            history.world.trace.push(format!("the link of {} is cut", crate::world::name_of(at)));
        }
        97 | 98 if faults.pauses => pause_or_wake(history, at),
        99 if faults.restarts && history.dice.below(3) == 0 => {
            let now = history.world.now;
            history.world.server.with(|net| {
                net.now = net.now.max(now);
                net.restart();
            });
            history.world.trace.push("the server is started again".to_owned());
            history.world.settle();
        }
        _ => {
            let span = Span::from_millis(1 + history.dice.below(5));
            history.world.advance(span);
        }
    }
}

fn pause_or_wake(history: &mut RandomHistory<Native>, at: usize) {
    if !history.world.is_awake(at) {
        return wake(history, at);
    }
    history.world.server.with(|net| {
        net.ends[at].paused = true;
        net.server.counts.pauses += 1;
    });
    history.world.clients[at].asleep = true;
    history.world.trace.push(format!("{} is stopped", crate::world::name_of(at)));
    if history.dice.below(2) == 0 {
        let span = Span(history.dice.below(2 * TERM.0));
        history.world.advance(span);
    }
}

/// Resumes a process: it checks the clock before anything else.
fn wake(history: &mut RandomHistory<Native>, at: usize) {
    history.world.server.with(|net| net.ends[at].paused = false);
    history.world.trace.push(format!("{} goes on", crate::world::name_of(at)));
    history.world.pass(at);
    history.world.settle();
    let client = &mut history.world.clients[at];
    client.asleep &= client.cache.is_flushing_all();
}

/// Removes all faults; then every request must get a reply.
fn end(history: &mut RandomHistory<Native>) -> Result<(), String> {
    let now = history.world.now;
    for at in 0..history.world.clients.len() {
        if !history.world.is_awake(at) {
            wake(history, at);
        }
        history.world.server.with(|net| net.ends[at].down_until = now);
        history.world.release_notifications(at);
        history.world.end_slow_invalidation(at);
    }
    let told = |history: &RandomHistory<Native>| {
        (0..history.world.clients.len()).all(|at| history.world.has_drained_notifications(at))
    };
    for round in 0..300 {
        history.world.advance(Span::from_millis(50));
        history.judge()?;
        if round > 50 && history.begun.is_empty() && told(history) {
            break;
        }
    }
    if let Some(at) =
        (0..history.world.clients.len()).find(|at| !history.world.has_drained_notifications(*at))
    {
        return Err(format!("{}'s kernel never forgets", crate::world::name_of(at)));
    }
    let faithful = |at: usize| history.world.server.with(|net| net.corrupted_client != Some(at));
    let all = 0..history.world.clients.len();
    let waits =
        |at: usize| history.world.clients[at].ops.iter().find(|(op, _)| history.begun.contains_key(op));
    match all.into_iter().filter(|at| faithful(*at)).find_map(waits) {
        None => Ok(()),
        Some((op, what)) => Err(format!("{op:?} is never answered: {what:?}")),
    }
}
