//! Seeded histories: clients do things at random over few names, answers are delayed at random, and after
//! every step no kernel may believe what is not so, and every answer must have been true at some moment
//! between its request and itself (S1 for names and attributes).

mod files;

use crate::world::{World, given_up, name_of, short};
use nigh_cache::{Answer, Config, Level, OnDisconnect, Op};
use nigh_remote::fake::{Fate, Which};
use nigh_remote::tree::TreeConfig;
use nigh_types::{Access, Cookie, Name, OpId, SetAttr, Span, Term};
use std::collections::{BTreeMap, BTreeSet};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const DIRS: [&str; 2] = ["p", "q"];

/// A small generator (splitmix64): the same history for the same seed on every machine.
pub struct Dice(u64);

impl Dice {
    #[must_use]
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(crate) fn pick<'a>(&mut self, from: &'a [&'a str]) -> &'a str {
        let at = usize::try_from(self.below(from.len() as u64)).unwrap_or(0);
        from[at]
    }
}

/// What happens in a history besides changes of names and modes.
#[derive(Clone, Copy)]
struct Kinds {
    /// Data, xattrs and further names of files.
    files: bool,
    /// Grants end by themselves too, soon.
    limited: bool,
    /// Nearly nothing can be kept.
    tiny: bool,
    /// Sessions are lost.
    losses: bool,
}

struct History {
    kinds: Kinds,
    /// Clients without a session.
    lost: BTreeSet<usize>,
    world: World,
    dice: Dice,
    dirs: BTreeMap<&'static str, u64>,
    begun: BTreeMap<OpId, u64>,
    /// Per client: names that its kernel is changing (the kernel lets one thread at a time).
    busy: BTreeMap<(usize, u64), OpId>,
    changing: BTreeMap<OpId, (usize, Vec<u64>)>,
    /// Per client: since when a change is under way whose caller was killed. It may count as not yet made.
    abandoned: BTreeMap<usize, u64>,
    away: BTreeSet<usize>,
}

/// How a history goes.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
    pub clients: u32,
    pub steps: u32,
}

/// Runs one history.
///
/// # Errors
/// What was believed or answered and was not so, with the steps that led there.
pub fn run(plan: Plan) -> Result<(), String> {
    let mut history = History::new(plan);
    for step in 1..=plan.steps {
        history.act();
        history.world.observe();
        history.judge().map_err(|lie| {
            format!("seed {} step {step}: {lie}\n{}", plan.seed, history.world.trace.join("\n"))
        })?;
        let keep = history.world.trace.len().saturating_sub(400);
        history.world.trace.drain(..keep);
    }
    history.end().map_err(|lie| format!("seed {}: {lie}\n{}", plan.seed, history.world.trace.join("\n")))
}

impl History {
    fn new(plan: Plan) -> History {
        let mut dice = Dice::new(plan.seed);
        let bit = |n: u64| plan.seed >> n & 1 == 1;
        let kinds = Kinds { files: bit(0), limited: bit(1), tiny: bit(2), losses: bit(3) };
        let parts = 1 + u32::try_from(dice.below(4)).unwrap_or(0);
        let config = TreeConfig {
            term: if kinds.limited { Term::Limited(Span::from_millis(40)) } else { Term::Session },
            part_entries: parts,
            // What is known of a file's data goes by its number.
            reuse_inos: dice.below(2) == 0 && !kinds.files,
            ..TreeConfig::default()
        };
        let mut world = World::new(config);
        world.wordy = true;
        let now = world.now;
        let dirs: BTreeMap<&'static str, u64> =
            DIRS.iter().map(|dir| (*dir, world.server.edit(|tree| tree.plant_dir(now, dir).ino))).collect();
        for dir in BTreeMap::values(&dirs) {
            for file in NAMES {
                world.past.insert((*dir, name(file)), Vec::new());
            }
        }
        if kinds.files {
            let paths = DIRS.iter().flat_map(|dir| NAMES.iter().map(move |file| format!("{dir}/{file}")));
            world.facts.paths = paths.collect();
        }
        world.observe();
        for _ in 0..plan.clients {
            let level = [Level::All, Level::All, Level::NoEpoch, Level::None][dice.below(4) as usize % 4];
            let budget_bytes = if kinds.tiny { 3_000 } else { 1 << 30 };
            let on_disconnect = match dice.below(8) {
                0 | 1 => OnDisconnect::Fail(Span::from_millis(1 + dice.below(100))),
                2 => OnDisconnect::Stale,
                _ => OnDisconnect::Wait,
            };
            let at = world.connect_with(Config { level, budget_bytes, on_disconnect, ..Config::default() });
            world.clients[at].workers = [64, 64, 2, 1][dice.below(4) as usize % 4];
        }
        let mut history = History {
            kinds,
            lost: BTreeSet::new(),
            world,
            dice,
            dirs,
            begun: BTreeMap::new(),
            busy: BTreeMap::new(),
            changing: BTreeMap::new(),
            abandoned: BTreeMap::new(),
            away: BTreeSet::new(),
        };
        for at in 0..history.world.clients.len() {
            for dir in DIRS {
                let op = Op::Lookup { dir: 1, name: name(dir) };
                history.ask(at, op);
            }
        }
        history.world.observe();
        history
    }

    fn client(&mut self) -> usize {
        let clients = self.world.clients.len() as u64;
        usize::try_from(self.dice.below(clients)).unwrap_or(0)
    }

    fn act(&mut self) {
        if self.kinds.losses && self.dice.below(40) == 0 {
            return self.lose_or_return();
        }
        if self.kinds.limited && self.dice.below(15) == 0 {
            // A request comes before the timer that was due.
            self.world.timers_are_late = true;
            let span = Span::from_millis(1 + self.dice.below(40));
            self.world.advance(span);
            self.ask_something();
            self.world.timers_are_late = false;
            return self.world.advance(Span::ZERO);
        }
        match self.dice.below(100) {
            0..=69 => self.ask_something(),
            70..=79 => self.plan_delays(),
            80..=93 => {
                let span = Span::from_millis(1 + self.dice.below(20));
                self.world.advance(span);
            }
            94 | 95 => {
                // A caller is killed.
                let waiting: Vec<OpId> = self.begun.keys().copied().collect();
                if let Some(op) = waiting.first().copied() {
                    let at = (0..self.world.clients.len()).find(|at| self.world.waits(*at, op));
                    if let Some(at) = at {
                        self.world.interrupt(at, op);
                    }
                }
            }
            96 => {
                let at = self.client();
                match self.dice.below(2) {
                    0 => self.world.clients[at].hold_invalidations = true,
                    _ => self.world.clients[at].drops_slowly = true,
                }
            }
            97 if self.dice.below(20) == 0 => {
                let at = self.client();
                self.world.mount_below(at);
            }
            97 => self.go_or_come(),
            _ => {
                let at = self.client();
                self.world.let_invalidate(at);
                self.world.let_drop(at);
            }
        }
    }

    /// A client is away for longer than its term, or comes back. Its machine may sleep until somewhat later.
    fn go_or_come(&mut self) {
        let at = self.client();
        let control = self.world.clients[at].control.clone();
        if self.away.remove(&at) {
            control.restore(self.dice.below(2) == 0);
        } else if !self.lost.contains(&at) {
            if self.dice.below(4) == 0 {
                let client = &mut self.world.clients[at];
                (client.hold_invalidations, client.asleep) = (true, true);
            }
            control.lapse("by chance");
            self.away.insert(at);
        }
        self.world.settle();
        self.world.observe();
    }

    /// A session is lost, or another takes the place of one that was.
    fn lose_or_return(&mut self) {
        let at = self.client();
        if self.lost.remove(&at) {
            return self.world.reconnect(at);
        }
        self.world.clients[at].control.lose("the link broke");
        self.world.settle();
        self.away.remove(&at);
        self.lost.insert(at);
    }

    fn plan_delays(&mut self) {
        let at = self.client();
        let control = self.world.clients[at].control.clone();
        control.plan_nothing();
        let fate = Fate {
            arrives_after: Span::from_millis(self.dice.below(8)),
            answered_after: Span::from_millis(self.dice.below(8)),
            part_pause: Span::from_millis(self.dice.below(4)),
            ungranted: self.dice.below(8) == 0,
            ..Fate::default()
        };
        if self.dice.below(4) > 0 {
            control.plan(Which::Every, fate);
        }
    }

    fn ask_something(&mut self) {
        let at = self.client();
        let picked = self.dice.pick(&DIRS);
        let dir = self.dirs[picked];
        let file = name(self.dice.pick(&NAMES));
        let access = Access { read: true, write: true, truncate: false, direct: false, sync: false };
        let (op, locks) = match self.dice.below(if self.kinds.files { 24 } else { 12 }) {
            12.. => self.use_file(at, dir, &file),
            0..=4 => (self.lookup_or_believe(at, dir, &file), vec![]),
            5 => {
                let set = SetAttr { mode: Some(0o600 + self.dice.below(8) as u32), ..SetAttr::default() };
                (self.known(at, dir, &file).map(|ino| Op::SetAttr { ino, fh: None, set }), vec![])
            }
            6 => (self.known(at, dir, &file).map(|ino| Op::GetAttr { ino }), vec![]),
            7 | 8 => {
                let op = Op::Create {
                    dir,
                    name: file,
                    mode: 0o644,
                    umask: 0,
                    exclusive: true,
                    access,
                    append: false,
                };
                (Some(op), vec![dir])
            }
            9 => {
                let heard = self.world.clients[at].kernel.last_heard(dir, &file);
                (heard.map(|_| Op::Unlink { dir, name: file }), vec![dir])
            }
            10 if self.world.clients[at].kernel.last_heard(dir, &file).is_none() => return,
            10 => {
                let picked = self.dice.pick(&DIRS);
                let to = self.dirs[picked];
                let new_name = name(self.dice.pick(&NAMES));
                if (dir, &file) == (to, &new_name) {
                    return;
                }
                let op =
                    Op::Rename { from: dir, name: file, to, new_name, no_replace: false, exchange: false };
                (Some(op), vec![dir, to])
            }
            _ => return self.read_directory(at, dir),
        };
        if locks.iter().any(|dir| self.busy.contains_key(&(at, *dir))) {
            return;
        }
        if let Some(op) = op {
            let id = self.ask(at, op);
            if self.world.waits(at, id) && !locks.is_empty() {
                for dir in &locks {
                    self.busy.insert((at, *dir), id);
                }
                self.changing.insert(id, (at, locks));
            }
        }
    }

    /// A kernel that believes something does not ask: what it believes is judged after every step.
    fn lookup_or_believe(&self, at: usize, dir: u64, name: &Name) -> Option<Op> {
        let believed = self.world.clients[at].kernel.name(self.world.now, dir, name);
        believed.is_none().then(|| Op::Lookup { dir, name: name.clone() })
    }

    fn known(&self, at: usize, dir: u64, name: &Name) -> Option<u64> {
        self.world.clients[at].kernel.name(self.world.now, dir, name).and_then(|d| d.ino)
    }

    fn read_directory(&mut self, at: usize, dir: u64) {
        self.ask(at, Op::OpenDir { ino: dir });
    }

    fn ask(&mut self, at: usize, op: Op) -> OpId {
        // One's own change that has not returned may count as not yet made.
        let dir = match &op {
            Op::Lookup { dir, .. } => *dir,
            Op::ReadDir { ino, .. } | Op::OpenDir { ino } => *ino,
            _ => 0,
        };
        let own = self.busy.get(&(at, dir)).and_then(|id| self.begun.get(id));
        let begun = own.copied().unwrap_or(self.world.tick).min(self.world.tick);
        if self.world.clients[at].cache.gauges().pending_operations == 0 {
            self.abandoned.remove(&at);
        }
        let begun = self.abandoned.get(&at).copied().unwrap_or(begun).min(begun);
        let begun = match &op {
            Op::GetXattr { ino, .. } => {
                let own = self.world.changing(at, *ino);
                own.iter().filter_map(|id| self.begun.get(id)).copied().fold(begun, u64::min)
            }
            _ => begun,
        };
        let id = self.world.ask(at, op);
        self.begun.insert(id, begun);
        id
    }

    fn judge(&mut self) -> Result<(), String> {
        self.world.check_kernels()?;
        self.world.check_kept()?;
        self.world.undone.pop().map_or(Ok(()), Err)?;
        for (at, id, op, answer) in std::mem::take(&mut self.world.answers) {
            let begun = self.begun.remove(&id).unwrap_or(self.world.tick);
            if let Some((client, dirs)) = self.changing.remove(&id) {
                for dir in dirs {
                    self.busy.remove(&(client, dir));
                }
            }
            if given_up(&answer) {
                self.abandoned.entry(at).or_insert(begun);
                continue;
            }
            if self.world.early_answers.remove(&id) {
                return Err(format!(
                    "{} is told {} before its kernel has forgotten",
                    name_of(at),
                    short(&answer)
                ));
            }
            if !self.world.stale_answers.remove(&id) {
                self.judge_answer(at, begun, &op, &answer)?;
                self.judge_fact(at, begun, &op, &answer)?;
            }
            if let (Op::OpenDir { ino }, Answer::Opened(opened)) = (&op, &answer) {
                let op =
                    Op::ReadDir { ino: *ino, fh: opened.fh, offset: Cookie(0), size: 1 << 16, plus: true };
                self.ask(at, op);
            }
        }
        Ok(())
    }

    fn judge_answer(&self, at: usize, begun: u64, op: &Op, answer: &Answer) -> Result<(), String> {
        let lie = |what: &str| Err(format!("{} was told {} of {op:?}: {what}", name_of(at), short(answer)));
        match (op, answer) {
            (Op::Lookup { dir, name }, Answer::Node(node))
                if self.world.past.contains_key(&(*dir, name.clone()))
                    && !self.was(*dir, name, begun, Some(node.id.ino)) =>
            {
                return lie("it was never that in the meantime");
            }
            (Op::Lookup { dir, name }, Answer::Missing(_)) if !self.was(*dir, name, begun, None) => {
                return lie("it was there all the time");
            }
            (Op::ReadDir { ino, .. }, Answer::Page(page)) => {
                for file in NAMES {
                    let file = name(file);
                    let listed = listed(page, &file);
                    if !self.was(*ino, &file, begun, listed) {
                        return lie(&format!("{file} was never {listed:?} in the meantime"));
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether a name led to that at some moment since `begun`.
    fn was(&self, dir: u64, name: &Name, begun: u64, what: Option<u64>) -> bool {
        let past = &self.world.past[&(dir, name.clone())];
        let current = past.iter().rposition(|(tick, _)| *tick <= begun).unwrap_or(0);
        past[current..].iter().any(|(_, ino)| *ino == what)
    }

    /// All delays over, everything must have been answered; with a kernel that has no worker left, after the ten seconds that it may take
    /// to forget.
    fn end(&mut self) -> Result<(), String> {
        for at in 0..self.world.clients.len() {
            if self.away.remove(&at) {
                self.world.clients[at].control.restore(at == 0);
            }
            self.world.clients[at].control.plan_nothing();
            self.world.let_invalidate(at);
            self.world.let_drop(at);
            if self.lost.remove(&at) {
                self.world.reconnect(at);
            }
        }
        for _ in 0..250 {
            self.world.advance(Span::from_millis(50));
            self.judge()?;
        }
        if let Some(at) = (0..self.world.clients.len()).find(|at| !self.world.is_told(*at)) {
            return Err(format!("{}'s kernel never forgets", name_of(at)));
        }
        match self.begun.keys().next() {
            None => Ok(()),
            Some(op) => Err(format!("{op:?} is never answered")),
        }
    }
}

fn listed(page: &nigh_cache::Page, wanted: &Name) -> Option<u64> {
    let mut names = page.names.as_slice();
    for entry in &page.entries {
        let (name, rest) = names.split_at(usize::from(entry.name_len));
        names = rest;
        if name == wanted.as_bytes() {
            return Some(entry.ino);
        }
    }
    None
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).expect("a name")
}
