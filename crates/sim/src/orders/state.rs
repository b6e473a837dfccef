//! One state, its possible steps, and its checks.

use super::{Bounds, PATIENCE, TERM};
use crate::native::{ClientSetup, Move, Native};
use crate::random::{Dice, RandomHistory, Workload, name};
use crate::world::{Backend, World, name_of};
use nigh_cache::{Config, NotifyLevel, Op, OpReply};
use nigh_lease::LeaseConfig;
use nigh_native::{EXCLUSIVE_DIR_LEASES, UPDATES};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_types::{Access, Name, OpId, Span, Time};
use siphasher::sip128::{Hasher128, SipHasher13};
use std::collections::BTreeSet;
use std::fmt::{self, Write};
use std::hash::Hasher;

/// The directory of the two names.
const DIR: &str = "p";
/// Limit of timers that may pass at the end until all calls have replies.
const MOST_TIMERS: u8 = 40;

/// A call of an application.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Call {
    LookA,
    LookB,
    CreateA,
    UnlinkA,
    RenameAB,
}

impl Call {
    const ALL: [Call; 5] = [Call::LookA, Call::LookB, Call::CreateA, Call::UnlinkA, Call::RenameAB];

    fn is_look(self) -> bool {
        matches!(self, Call::LookA | Call::LookB)
    }
}

/// A possible next step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    Ask(usize, Call),
    Move(Move),
    /// A kernel executes its first queued notification.
    Forget(usize),
    /// Time advances to the next timer.
    Timer,
}

/// A part of the state that is hashed by itself, since most steps change few parts.
#[derive(Clone, Copy, Debug)]
enum StatePart {
    /// A client's cache and kernel,
    Client(usize),
    /// and its session.
    End(usize),
    Tree,
    Leases,
    /// The server's sessions, and frames in transit.
    Connections,
}

impl StatePart {
    const ALL: [StatePart; 7] = [
        StatePart::Client(0),
        StatePart::Client(1),
        StatePart::End(0),
        StatePart::End(1),
        StatePart::Tree,
        StatePart::Leases,
        StatePart::Connections,
    ];

    fn at(self) -> usize {
        match self {
            StatePart::Client(at) => at,
            StatePart::End(at) => 2 + at,
            StatePart::Tree => 4,
            StatePart::Leases => 5,
            StatePart::Connections => 6,
        }
    }
}

/// A call that waits for the lookup of its name.
#[derive(Clone, Debug)]
struct AwaitingLookup {
    at: usize,
    /// The lookup's request.
    op: OpId,
    call: Call,
}

pub(super) struct State {
    bounds: Bounds,
    pub(super) history: RandomHistory<Native>,
    dir: u64,
    /// Number of calls not sent yet.
    calls_left: [u8; 2],
    asked: [u64; 2],
    awaiting_lookup: Vec<AwaitingLookup>,
    restarts: u8,
    late: u8,
    timers: u8,
    /// The hash of each [`StatePart`], if it is known.
    fingerprints: [Option<u128>; StatePart::ALL.len()],
}

impl State {
    /// Returns the initial state: no calls, and nothing in flight.
    pub(super) fn first(bounds: Bounds) -> Result<State, String> {
        let leases = LeaseConfig {
            term: TERM,
            patience: PATIENCE,
            max_penalty: Span::from_millis(500),
            young: if bounds.contention { Span::from_millis(20) } else { Span::ZERO },
            cooldown: Span::from_millis(500),
            ..LeaseConfig::default()
        };
        let native = Native::new(ModelFsConfig::default(), leases, 0);
        native.without_service_time();
        if bounds.late == 0 {
            native.acknowledge_at_once();
        }
        let world = World::over(native);
        let mut history = RandomHistory::begin(world, Workload::default(), Dice::new(0));
        history.world.verbose = false;
        let now = history.world.now;
        history.world.server.edit(|tree| tree.plant_file(now, "p/a", b""));
        history.world.observe();
        for at in 0..2 {
            let alone = bounds.exclusive_leases && at == 1;
            let features =
                if bounds.pushes { UPDATES } else { 0 } | if alone { EXCLUSIVE_DIR_LEASES } else { 0 };
            let end = history.world.server.connect(history.world.now, ClientSetup::near(features));
            let level = if alone { NotifyLevel::NoEpoch } else { NotifyLevel::All };
            history.world.join(Config { level, ..Config::default() }, (), end);
        }
        let dir = history.dirs[DIR];
        let mut state = State {
            bounds,
            history,
            dir,
            calls_left: [0, 0],
            asked: [0, 0],
            awaiting_lookup: Vec::new(),
            restarts: bounds.restarts,
            late: bounds.late,
            timers: 0,
            fingerprints: [None; StatePart::ALL.len()],
        };
        state.look_around()?;
        state.calls_left = bounds.calls;
        state.late = bounds.late;
        for client in &mut state.history.world.clients {
            client.hold_invalidations = bounds.slow_kernels;
        }
        Ok(state)
    }

    fn look_around(&mut self) -> Result<(), String> {
        self.drift()?;
        let mut names = vec![(1, name(DIR))];
        if self.bounds.warm {
            names.extend([(self.dir, name("a")), (self.dir, name("b"))]);
        }
        for at in 0..2 {
            for (dir, name) in &names {
                self.put(at, Op::Lookup { dir: *dir, name: name.clone() }, false);
                self.drift()?;
            }
        }
        Ok(())
    }

    /// Takes the first possible move, until there is none.
    fn drift(&mut self) -> Result<(), String> {
        while let Some(first) = self.history.world.server.moves().first().copied() {
            self.take(Step::Move(first))?;
        }
        Ok(())
    }

    pub(super) fn fork(&self) -> State {
        let mut history = self.history.clone();
        history.world.unshare();
        State { history, awaiting_lookup: self.awaiting_lookup.clone(), ..*self }
    }

    /// Returns all possible steps; none: this is an end.
    pub(super) fn steps(&mut self) -> Vec<Step> {
        let mut steps: Vec<Step> = self.history.world.server.moves().into_iter().map(Step::Move).collect();
        steps.extend((0..2).filter(|at| self.history.world.has_held_notifications(*at)).map(Step::Forget));
        let all_quiet = steps.is_empty();
        let waits = self.waits().is_some();
        for at in 0..2 {
            let calls = Call::ALL.into_iter().filter(|call| self.can_ask(at, *call));
            steps.extend(calls.map(|call| Step::Ask(at, call)));
        }
        let asks_or_moves = !steps.is_empty();
        if self.restarts > 0 && (waits || asks_or_moves) {
            steps.push(Step::Move(Move::Restart));
        }
        let may_be_late = self.late > 0 && asks_or_moves;
        if (all_quiet && waits || may_be_late) && self.history.world.next_timer() < Time::FAR {
            steps.push(Step::Timer);
        }
        steps
    }

    fn can_ask(&self, at: usize, call: Call) -> bool {
        // Symmetry: states where only the second client has sent calls equal those with the clients exchanged.
        let in_turn = at == 0
            || self.bounds.calls[0] != self.bounds.calls[1]
            || self.bounds.exclusive_leases
            || self.asked[0] > 0;
        let world = &self.history.world;
        if self.calls_left[at] == 0 || !in_turn || self.bounds.one_by_one && !world.clients[at].ops.is_empty()
        {
            return false;
        }
        let believed = |of: &str| world.clients[at].kernel.valid_dentry(world.time(at), self.dir, &name(of));
        let nothing_to_ask = match call {
            Call::LookA => believed("a").is_some(),
            Call::LookB => believed("b").is_some(),
            Call::CreateA => believed("a").is_some_and(|found| found.ino.is_some()),
            Call::UnlinkA | Call::RenameAB => believed("a").is_some_and(|found| found.ino.is_none()),
        };
        !nothing_to_ask && (call.is_look() || !self.history.is_busy(at, self.dir))
    }

    /// Takes one step, with its immediate consequences.
    pub(super) fn take(&mut self, step: Step) -> Result<(), String> {
        self.history.world.trace.clear();
        self.drop_fingerprints(step);
        match step {
            Step::Ask(at, call) => {
                self.calls_left[at] -= 1;
                self.ask(at, call);
            }
            Step::Move(Move::Restart) => {
                self.restarts -= 1;
                self.history.world.make(Move::Restart);
            }
            Step::Move(one) => self.history.world.make(one),
            Step::Forget(at) => self.history.world.deliver_first(at),
            Step::Timer => self.pass()?,
        }
        while self.judge()? {}
        self.history.world.server.waits_for_itself().map_or(Ok(()), Err)
    }

    fn drop_fingerprints(&mut self, step: Step) {
        let (client, end) =
            ([StatePart::Client(0), StatePart::Client(1)], [StatePart::End(0), StatePart::End(1)]);
        let changed = match step {
            Step::Ask(at, _) | Step::Forget(at) => vec![client[at], end[at], StatePart::Connections],
            // The client that sent the call shows the change's effect.
            Step::Move(Move::Work(_)) => {
                vec![client[0], client[1], StatePart::Tree, StatePart::Leases, StatePart::Connections]
            }
            Step::Move(Move::Restart) | Step::Timer => StatePart::ALL.to_vec(),
            Step::Move(one) => match (one, one.of(&self.history.world.server)) {
                (Move::Up(_), Some(at)) => {
                    vec![
                        client[0],
                        client[1],
                        end[at],
                        StatePart::Tree,
                        StatePart::Leases,
                        StatePart::Connections,
                    ]
                }
                (Move::Down(_) | Move::Lose(_), Some(at)) => {
                    vec![client[at], end[at], StatePart::Leases, StatePart::Connections]
                }
                _ => StatePart::ALL.to_vec(),
            },
        };
        for part in changed {
            self.fingerprints[part.at()] = None;
        }
    }

    /// Advances time to the next timer.
    fn pass(&mut self) -> Result<(), String> {
        let moves = !self.history.world.server.moves().is_empty();
        let moves = moves || (0..2).any(|at| self.history.world.has_held_notifications(at));
        let calm = self.restarts == self.bounds.restarts && self.late == self.bounds.late;
        if let (false, true, Some(waits)) = (moves, calm, self.waits()) {
            return Err(format!("{waits}, and nothing is on its way"));
        }
        if self.late > 0 && (moves || self.waits().is_none()) {
            self.late -= 1;
        }
        self.timers += 1;
        if self.timers > MOST_TIMERS {
            return Err(format!("{} for ever", self.waits().unwrap_or_default()));
        }
        let next = self.history.world.next_timer();
        self.history.world.pass_until(next);
        Ok(())
    }

    /// Describes a call without a reply.
    fn waits(&self) -> Option<String> {
        let ops = |at: usize| self.history.world.clients[at].ops.values().next().map(|op| (at, op));
        (0..2).find_map(ops).map(|(at, op)| format!("{} waits for {op:?}", name_of(at)))
    }

    /// Checks a state without a next step.
    pub(super) fn end(&self) -> Result<(), String> {
        if let Some(waits) = self.waits() {
            return Err(format!("{waits}, and nothing will ever happen"));
        }
        let untold = (0..2).find(|at| !self.history.world.has_drained_notifications(*at));
        untold.map_or(Ok(()), |at| Err(format!("{}'s kernel never forgets", name_of(at))))
    }

    fn put(&mut self, at: usize, op: Op, locks: bool) -> OpId {
        // Numbers by client, so that they do not tell which client asked first.
        self.asked[at] += 1;
        self.history.world.next_op = (at as u64) << 32 | self.asked[at];
        let locks = if locks { vec![self.dir] } else { Vec::new() };
        self.history.ask_locking(at, op, locks)
    }

    fn ask(&mut self, at: usize, call: Call) {
        let dir = self.dir;
        let (a, b) = (name("a"), name("b"));
        let op = match call {
            Call::LookA => Op::Lookup { dir, name: a },
            Call::LookB => Op::Lookup { dir, name: b },
            Call::CreateA => create(dir, a),
            // A kernel looks up a name before it removes or moves it.
            _ if self.history.world.clients[at].kernel.last_known_ino(dir, &a).is_none() => {
                let op = self.put(at, Op::Lookup { dir, name: a }, true);
                return self.awaiting_lookup.push(AwaitingLookup { at, op, call });
            }
            Call::UnlinkA => Op::Unlink { dir, name: a },
            Call::RenameAB => Op::Rename {
                from: dir,
                name: a,
                to: dir,
                new_name: b,
                no_replace: false,
                exchange: false,
                whiteout: false,
            },
        };
        self.put(at, op, !call.is_look());
    }

    /// Checks replies and kernels; returns whether a waiting call was sent after its lookup.
    fn judge(&mut self) -> Result<bool, String> {
        let answers = self.history.world.replies.iter();
        let answers: Vec<(OpId, OpReply)> = answers.map(|(_, id, _, answer)| (*id, answer.clone())).collect();
        self.history.judge()?;
        let mut more = false;
        for (id, answer) in answers {
            let Some(at) = self.awaiting_lookup.iter().position(|behind| behind.op == id) else { continue };
            let AwaitingLookup { at, call, .. } = self.awaiting_lookup.remove(at);
            if matches!(answer, OpReply::Node(_))
                && self.history.world.clients[at].kernel.last_known_ino(self.dir, &name("a")).is_some()
            {
                self.ask(at, call);
                more = true;
            }
        }
        Ok(more)
    }

    /// Returns the state's hash: equal for equal states, different for different ones.
    pub(super) fn fingerprint(&mut self, text: &mut String) -> u128 {
        for part in StatePart::ALL {
            if self.fingerprints[part.at()].is_none() {
                self.fingerprints[part.at()] = Some(self.fingerprint_part(part, text));
            }
        }
        text.clear();
        self.write_rest(text).expect("a text takes all");
        hash(text)
    }

    fn fingerprint_part(&self, part: StatePart, text: &mut String) -> u128 {
        let (world, native) = (&self.history.world, &self.history.world.server);
        text.clear();
        let written = match part {
            StatePart::Client(at) => world.write_client(at, text),
            StatePart::End(at) => native.write_end(at, text),
            StatePart::Tree => native.edit(|tree| write!(text, "{tree:?}")),
            StatePart::Leases => native.write_leases(text),
            StatePart::Connections => native.write_connections(text),
        };
        written.expect("a text takes all");
        hash(text)
    }

    /// Returns a part whose cached hash is outdated.
    pub(super) fn outdated_fingerprint(&self, text: &mut String) -> Option<String> {
        let changed =
            |part: &StatePart| self.fingerprints[part.at()] != Some(self.fingerprint_part(*part, text));
        StatePart::ALL.into_iter().find(changed).map(|part| format!("{part:?}"))
    }

    fn write_rest(&self, text: &mut String) -> fmt::Result {
        let (left, asked, timers) = (self.calls_left, self.asked, self.timers);
        write!(text, "{:?}{left:?}{asked:?}{:?}", self.fingerprints, self.awaiting_lookup)?;
        write!(text, "{} {} {timers} {:?}", self.restarts, self.late, self.history.world.now)?;
        self.history.write(text)
    }
}

fn create(dir: u64, name: Name) -> Op {
    let access =
        Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
    Op::Create { dir, name, mode: 0o644, umask: 0, exclusive: true, access, append: false }
}

fn hash(text: &str) -> u128 {
    let mut hasher = SipHasher13::new();
    hasher.write(text.as_bytes());
    hasher.finish128().as_u128()
}

/// The possible replies of each request: all inodes of each name since the request.
impl RandomHistory<Native> {
    fn write(&self, text: &mut String) -> fmt::Result {
        for (id, begun) in &self.begun {
            write!(text, "{id:?}")?;
            for ((dir, name), past) in &self.world.past {
                let since = past.iter().rposition(|(tick, _)| tick <= begun).unwrap_or(0);
                let was: BTreeSet<Option<u64>> = past[since..].iter().map(|(_, ino)| *ino).collect();
                if was.len() > 1 {
                    write!(text, "{dir}{name}{was:?}")?;
                }
            }
        }
        self.write_locks(text)
    }
}
