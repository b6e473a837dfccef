//! Seeded histories: clients send random requests on a few names, and replies are delayed at random. After every step
//! no kernel may hold wrong data, and every reply must have been true at some moment between request and reply (S1 for
//! names and attributes).

mod fake;
mod files;
mod small_files;

pub use fake::{Plan, run};

use crate::world::{Backend, World, has_unknown_outcome, name_of, short};
use nigh_cache::{Op, OpReply};
use nigh_remote::fake::FakeServer;
use nigh_types::{Access, Cookie, Name, OpId, SetAttr};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};

/// A file that keeps its name; several clients write parts of it.
const PAGE: &str = "page";
pub(crate) const NAMES: [&str; 4] = ["a", "b", "c", "d"];
pub(crate) const DIRS: [&str; 2] = ["p", "q"];

/// A small random generator (splitmix64): a seed gives one history on every machine.
#[derive(Clone, Debug)]
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

    /// Returns a number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(crate) fn pick<'a>(&mut self, from: &'a [&'a str]) -> &'a str {
        let at = usize::try_from(self.below(from.len() as u64)).unwrap_or(0);
        from[at]
    }
}

/// Events of a history besides changes of names and modes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Workload {
    /// Data, xattrs and hard links of files.
    pub(crate) files: bool,
    /// Grants have short deadlines too.
    pub(crate) limited: bool,
    /// The memory budget is too small to cache anything.
    pub(crate) tiny: bool,
    /// Sessions are lost.
    pub(crate) losses: bool,
    /// All clients map files and store into them.
    pub(crate) maps: bool,
    /// Several clients write parts of one page at the same time.
    pub(crate) partial_writes: bool,
    /// Several clients store into parts of one mapped page at the same time.
    pub(crate) shared_maps: bool,
    /// Clients read small files of one directory in order, and write them.
    pub(crate) small_files: bool,
    /// Changes are pushed, and attributes are requested by inode number and checked.
    pub(crate) pushes: bool,
}

/// A running history: requests and their replies. Clones share their server.
#[derive(Clone)]
pub(crate) struct RandomHistory<B: Backend = FakeServer> {
    pub(crate) workload: Workload,
    /// Clients without a session.
    lost: BTreeSet<usize>,
    pub(crate) world: World<B>,
    pub(crate) dice: Dice,
    pub(crate) dirs: BTreeMap<&'static str, u64>,
    /// Pending requests, and the tick at which each began.
    pub(crate) begun: BTreeMap<OpId, u64>,
    /// Directories that a client's kernel has locked for a pending change (one thread at a time).
    busy: BTreeMap<(usize, u64), OpId>,
    changing: BTreeMap<OpId, (usize, Vec<u64>)>,
    /// For each client, the tick of its first change whose caller was killed and whose outcome is unknown. It may
    /// count as not yet made.
    abandoned: BTreeMap<usize, u64>,
    away: BTreeSet<usize>,
    /// Number of stores so far; each stores a unique byte.
    stored: u8,
    /// Position of each client among the small files.
    next_small: BTreeMap<usize, usize>,
}

impl<B: Backend> RandomHistory<B> {
    /// Begins a history in a world without clients.
    pub(crate) fn begin(mut world: World<B>, workload: Workload, dice: Dice) -> RandomHistory<B> {
        world.verbose = true;
        world.threads = 4;
        let now = world.now;
        let dirs: BTreeMap<&'static str, u64> =
            DIRS.iter().map(|dir| (*dir, world.server.edit(|tree| tree.plant_dir(now, dir).ino))).collect();
        for dir in BTreeMap::values(&dirs) {
            for file in NAMES {
                world.past.insert((*dir, name(file)), Vec::new());
            }
        }
        if workload.files {
            let paths = DIRS.iter().flat_map(|dir| NAMES.iter().map(move |file| format!("{dir}/{file}")));
            world.facts.paths = paths.collect();
        }
        if workload.partial_writes || workload.shared_maps {
            let path = format!("{}/{PAGE}", DIRS[0]);
            world.server.edit(|tree| tree.plant_file(now, &path, b"text"));
            world.facts.paths.push(path);
        }
        if workload.pushes {
            let files = DIRS.iter().flat_map(|dir| NAMES.iter().map(move |file| format!("{dir}/{file}")));
            world.facts.attributes_of = DIRS.iter().map(ToString::to_string).chain(files).collect();
        }
        world.limited = workload.limited;
        let mut history = RandomHistory {
            workload,
            lost: BTreeSet::new(),
            world,
            dice,
            dirs,
            begun: BTreeMap::new(),
            busy: BTreeMap::new(),
            changing: BTreeMap::new(),
            abandoned: BTreeMap::new(),
            away: BTreeSet::new(),
            stored: 0,
            next_small: BTreeMap::new(),
        };
        if workload.small_files {
            history.plant_small_files(now);
        }
        history.world.observe();
        history
    }

    /// All kernels look up the directories.
    pub(crate) fn look_around(&mut self) {
        for at in 0..self.world.clients.len() {
            for dir in DIRS {
                let op = Op::Lookup { dir: 1, name: name(dir) };
                self.ask(at, op);
            }
        }
        self.world.observe();
    }

    pub(crate) fn client(&mut self) -> usize {
        let clients = self.world.clients.len() as u64;
        usize::try_from(self.dice.below(clients)).unwrap_or(0)
    }

    pub(crate) fn ask_something(&mut self) {
        let at = self.client();
        if !self.world.is_awake(at) {
            return;
        }
        let picked = self.dice.pick(&DIRS);
        let dir = self.dirs[picked];
        let file = name(self.dice.pick(&NAMES));
        if self.workload.maps && self.dice.below(3) == 0 {
            if let Some(op) = self.use_map(at) {
                self.ask(at, op);
            }
            return;
        }
        if self.uses_page(at) || self.uses_small_files(at) {
            return;
        }
        if self.workload.pushes && self.dice.below(5) == 0 {
            return self.ask_attributes(at, dir, &file);
        }
        let access =
            Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
        let (op, locks) = match self.dice.below(if self.workload.files { 24 } else { 12 }) {
            12.. => self.use_file(at, dir, &file),
            0..=4 => (self.lookup_unless_cached(at, dir, &file), vec![]),
            5 => {
                let picked = self.dice.below(8) as u32;
                let set_id = if picked > 5 { 0o6000 } else { 0 };
                let set = SetAttr { mode: Some(set_id + 0o610 + picked), ..SetAttr::default() };
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
            9 | 10 if !self.looks_up(at, dir, &file) => return,
            9 => (Some(Op::Unlink { dir, name: file }), vec![dir]),
            10 => {
                let picked = self.dice.pick(&DIRS);
                let to = self.dirs[picked];
                let new_name = name(self.dice.pick(&NAMES));
                if (dir, &file) == (to, &new_name) {
                    return;
                }
                (Some(Op::rename((dir, file), (to, new_name))), vec![dir, to])
            }
            _ => return self.read_directory(at, dir),
        };
        if locks.iter().any(|dir| self.is_busy(at, *dir)) {
            return;
        }
        if let Some(op) = op {
            self.ask_locking(at, op, locks);
        }
    }

    /// Sends a request on the shared page, if the history has one; returns whether it did.
    fn uses_page(&mut self, at: usize) -> bool {
        let op = match self.workload {
            Workload { shared_maps: true, .. } if self.dice.below(2) == 0 => self.store_in_part(at),
            Workload { partial_writes: true, .. } if self.dice.below(2) == 0 => self.write_in_part(at),
            _ => return false,
        };
        if let Some(op) = op {
            self.ask(at, op);
        }
        true
    }

    /// Sends a request on the small files, if the history has some; returns whether it did.
    fn uses_small_files(&mut self, at: usize) -> bool {
        if !self.workload.small_files || self.dice.below(4) == 0 {
            return false;
        }
        if let Some(op) = self.use_small_file(at) {
            self.ask(at, op);
        }
        true
    }

    /// Returns whether a client's kernel has locked a directory for a change.
    pub(crate) fn is_busy(&self, at: usize, dir: u64) -> bool {
        self.busy.contains_key(&(at, dir))
    }

    /// Sends a request for which a kernel locks these directories, which must be free.
    pub(crate) fn ask_locking(&mut self, at: usize, op: Op, locks: Vec<u64>) -> OpId {
        let id = self.ask(at, op);
        if self.world.is_pending(at, id) && !locks.is_empty() {
            for dir in &locks {
                self.busy.insert((at, *dir), id);
            }
            self.changing.insert(id, (at, locks));
        }
        id
    }

    /// Returns a lookup, unless the kernel has a valid dentry: every step checks valid dentries.
    fn lookup_unless_cached(&self, at: usize, dir: u64, name: &Name) -> Option<Op> {
        let believed = self.world.clients[at].kernel.valid_dentry(self.world.time(at), dir, name);
        believed.is_none().then(|| Op::Lookup { dir, name: name.clone() })
    }

    /// Looks a name up, as a kernel does before it removes or moves it. Returns whether it exists, if the reply came
    /// at once.
    fn looks_up(&mut self, at: usize, dir: u64, name: &Name) -> bool {
        if let Some(op) = self.lookup_unless_cached(at, dir, name) {
            let id = self.ask(at, op);
            if self.world.is_pending(at, id) {
                return false;
            }
        }
        self.world.clients[at].kernel.last_known_ino(dir, name).is_some()
    }

    fn known(&self, at: usize, dir: u64, name: &Name) -> Option<u64> {
        self.world.clients[at].kernel.valid_dentry(self.world.time(at), dir, name).and_then(|d| d.ino)
    }

    /// Requests the attributes of a directory, or of a file that the kernel knows in it, unless they are cached.
    fn ask_attributes(&mut self, at: usize, dir: u64, file: &Name) {
        let kernel = &self.world.clients[at].kernel;
        let of = if self.dice.below(2) == 0 { Some(dir) } else { kernel.last_known_ino(dir, file) };
        let believed =
            |ino: u64| kernel.valid_attrs(self.world.time(at)).any(|believed| believed.id.ino == ino);
        if let Some(ino) = of.filter(|ino| !believed(*ino)) {
            self.ask(at, Op::GetAttr { ino });
        }
    }

    fn read_directory(&mut self, at: usize, dir: u64) {
        self.ask(at, Op::OpenDir { ino: dir });
    }

    pub(crate) fn ask(&mut self, at: usize, op: Op) -> OpId {
        // The client's own pending change may count as not yet made.
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
            Op::GetAttr { ino } => {
                let own = self.begun.iter().filter(|(id, _)| self.world.is_pending(at, **id));
                let own = own.map(|(_, begun)| *begun).chain(self.world.flushes_since(at, *ino));
                own.fold(begun, u64::min)
            }
            _ => begun,
        };
        let id = self.world.send_request(at, op);
        self.begun.insert(id, begun);
        id
    }

    /// Writes the locks of pending changes as text, equal for equal states.
    pub(crate) fn write_locks(&self, text: &mut String) -> fmt::Result {
        write!(text, "{:?}{:?}{:?}", self.busy, self.changing, self.abandoned)
    }

    pub(crate) fn judge(&mut self) -> Result<(), String> {
        self.world.check_kernels()?;
        self.world.check_page_caches()?;
        self.world.lost_stores.pop().map_or(Ok(()), Err)?;
        for (at, id, op, answer) in std::mem::take(&mut self.world.replies) {
            let begun = self.begun.remove(&id).unwrap_or(self.world.tick);
            if let Some((client, dirs)) = self.changing.remove(&id) {
                for dir in dirs {
                    self.busy.remove(&(client, dir));
                }
            }
            if has_unknown_outcome(&answer) {
                self.abandoned.entry(at).or_insert(begun);
                continue;
            }
            if self.world.early_replies.remove(&id) {
                return Err(format!(
                    "{} is told {} before its kernel has forgotten",
                    name_of(at),
                    short(&answer)
                ));
            }
            if let OpReply::Page(page) = &answer
                && !are_names(page)
            {
                return Err(format!("{} is shown what is no name: {}", name_of(at), short(&answer)));
            }
            let goes_by = self.world.sizes.remove(&id);
            if !self.world.stale_replies.remove(&id) && self.world.server.is_faithful(at) {
                self.judge_answer(at, begun, &op, &answer)?;
                self.judge_size(at, begun, &op, (&answer, goes_by))?;
                self.judge_fact(at, begun, &op, &answer)?;
            }
            if let (Op::OpenDir { ino }, OpReply::Opened(opened)) = (&op, &answer) {
                let op =
                    Op::ReadDir { ino: *ino, fh: opened.fh, offset: Cookie(0), size: 1 << 16, plus: true };
                self.ask(at, op);
            }
        }
        Ok(())
    }

    fn judge_answer(&self, at: usize, begun: u64, op: &Op, answer: &OpReply) -> Result<(), String> {
        let lie = |what: &str| Err(format!("{} was told {} of {op:?}: {what}", name_of(at), short(answer)));
        match (op, answer) {
            (Op::Lookup { dir, name }, OpReply::Node(node))
                if self.world.past.contains_key(&(*dir, name.clone()))
                    && !self.was(*dir, name, begun, Some(node.id.ino)) =>
            {
                return lie("it was never that in the meantime");
            }
            (Op::Lookup { dir, name }, OpReply::Missing(_)) if !self.was(*dir, name, begun, None) => {
                return lie("it was there all the time");
            }
            (Op::GetAttr { ino }, OpReply::Attr(_, attr, _)) if !self.world.facts.had(*ino, begun, attr) => {
                return lie("it never had these in the meantime");
            }
            (Op::ReadDir { ino, .. }, OpReply::Page(page)) => {
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

    /// Checks the size that the caller of a GETATTR on an open file sees in its kernel afterwards.
    fn judge_size(
        &self,
        at: usize,
        begun: u64,
        op: &Op,
        (answer, goes_by): (&OpReply, Option<u64>),
    ) -> Result<(), String> {
        let (Op::GetAttr { ino }, OpReply::Attr(_, attr, _), Some(bytes)) = (op, answer, goes_by) else {
            return Ok(());
        };
        if attr.nlink == 0 || self.world.facts.had_size(*ino, begun, bytes) {
            return Ok(());
        }
        let told = short(answer);
        Err(format!(
            "{} was told {told} of {op:?}, and reads {bytes} bytes: they were never so many",
            name_of(at)
        ))
    }

    /// Returns whether a name led to this inode at some moment since `begun`.
    fn was(&self, dir: u64, name: &Name, begun: u64, what: Option<u64>) -> bool {
        let past = &self.world.past[&(dir, name.clone())];
        let current = past.iter().rposition(|(tick, _)| *tick <= begun).unwrap_or(0);
        past[current..].iter().any(|(_, ino)| *ino == what)
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

pub(crate) fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).expect("a name")
}

/// Returns whether the kernel would accept the entries' names (`fuse_emit`, `parse_dirfile`); `.` and `..` are in
/// every directory.
fn are_names(page: &nigh_cache::Page) -> bool {
    let mut names = page.names.as_slice();
    page.entries.iter().all(|entry| {
        let (name, rest) = names.split_at(usize::from(entry.name_len));
        names = rest;
        !name.is_empty() && !name.contains(&b'/') && !name.contains(&0)
    })
}
