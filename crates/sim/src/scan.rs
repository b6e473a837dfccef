//! Scans of a directory in small pieces while another mount changes it: an entry present throughout is returned
//! exactly once (S7).

use crate::native::{ClientSetup, Native};
use crate::random::Dice;
use crate::world::{Backend, World, short};
use nigh_cache::{Config, Fh, Op, OpReply, Page};
use nigh_lease::LeaseConfig;
use nigh_native::{LIST_NAMES, UPDATES};
use nigh_remote::fake::{CallFilter, CallPlan, FakeServer};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_types::{Cookie, Kind, Name, OpId, Span, Time};

const DIR: &str = "d";
/// The client that changes the directory; the others read it.
const WRITER: usize = 1;
const READERS: [usize; 2] = [0, 2];

/// The parameters of a scan.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
    /// Whether both ends of the native protocol run, instead of the fake server.
    pub native: bool,
    /// Entries at the start.
    pub entries: u32,
    /// Changes during the scan: a third each of creations, removals and renames.
    pub changes: u32,
    /// Whether the server pushes changes to readers instead of recalling their leases.
    pub pushes: bool,
    /// Number of bursts of changes, each beside one read. Without pushes each burst costs another listing.
    pub bursts: u32,
}

/// Statistics of scans.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counts {
    pub reads: u64,
    /// Reads that had to wait.
    pub waited: u64,
    pub changes: u64,
    /// Entries present throughout.
    pub stayed: u64,
    /// Scans that continued with another open directory, or on another mount.
    pub moved: u64,
    pub listings: u64,
}

impl Counts {
    pub fn add(&mut self, other: &Counts) {
        self.reads += other.reads;
        self.waited += other.waited;
        self.changes += other.changes;
        self.stayed += other.stayed;
        self.moved += other.moved;
        self.listings += other.listings;
    }
}

/// Runs one scan.
///
/// # Errors
/// A name returned twice, a name present throughout that is missing, or a name that never existed.
pub fn run(plan: Plan) -> Result<Counts, String> {
    let mut dice = Dice::new(plan.seed);
    let parts = 1 + u32::try_from(dice.below(u64::from(plan.entries) / 8)).unwrap_or(0);
    let tree = ModelFsConfig { chunk_entries: parts, ..ModelFsConfig::default() };
    let tell = |lie: String| format!("{plan:?}: {lie}");
    match plan.native {
        true => over_native(plan, tree, dice).scan().map_err(tell),
        false => over_fake(plan, tree, dice).scan().map_err(tell),
    }
}

fn over_fake(plan: Plan, tree: ModelFsConfig, mut dice: Dice) -> Scan<FakeServer> {
    let mut world = World::new(tree);
    world.threads = 4;
    plant(&world, plan.entries);
    for at in 0..3 {
        world.connect_with(config(&mut dice));
        if plan.pushes {
            world.take_pushes(at);
        }
        let mut span = |most: u64| Span(dice.below(most * 1_000_000));
        let (arrives_after, answered_after, part_pause) = (span(8), span(8), span(2));
        // A scan without leases reads the listing of its start to the end.
        let ungranted = dice.below(8) == 0;
        let fate = CallPlan {
            arrives_after,
            answered_after,
            chunk_pause: part_pause,
            ungranted,
            ..CallPlan::default()
        };
        world.clients[at].control.plan(CallFilter::Every, fate);
    }
    Scan::begin(world, plan, dice)
}

fn over_native(plan: Plan, tree: ModelFsConfig, mut dice: Dice) -> Scan<Native> {
    let leases = LeaseConfig { young: Span::from_millis(20), ..LeaseConfig::default() };
    let mut world = World::over(Native::new(tree, leases, plan.seed));
    plant(&world, plan.entries);
    let features = LIST_NAMES | if plan.pushes { UPDATES } else { 0 };
    for _ in 0..3 {
        let latency = (Span(dice.below(5_000_000)), Span(dice.below(5_000_000)));
        let end = world.server.connect(world.now, ClientSetup::far(features, latency));
        world.join(config(&mut dice), (), end);
    }
    world.advance(Span::from_millis(100));
    Scan::begin(world, plan, dice)
}

fn plant<B: Backend>(world: &World<B>, entries: u32) {
    world.server.edit(|tree| {
        for number in 0..entries {
            tree.plant_file(Time(0), &format!("{DIR}/{number}"), b"");
        }
    });
}

/// Some clients have a budget below the directory's size, and some read names only where the listing has not arrived
/// yet.
fn config(dice: &mut Dice) -> Config {
    let budget_bytes = if dice.below(4) == 0 { 20_000 } else { 1 << 30 };
    Config { budget_bytes, names_first: dice.below(3) == 0, ..Config::default() }
}

fn name(number: u32) -> Name {
    Name::new(number.to_string().as_bytes()).expect("it is a name")
}

struct Scan<B: Backend> {
    plan: Plan,
    world: World<B>,
    dice: Dice,
    dir: u64,
    /// Existing names, and for every name that ever existed whether it was changed.
    present: Vec<u32>,
    changed: Vec<bool>,
    /// How often each name was returned.
    seen: Vec<u8>,
    counts: Counts,
}

impl<B: Backend> Scan<B> {
    fn begin(world: World<B>, plan: Plan, dice: Dice) -> Scan<B> {
        let entries = plan.entries as usize;
        let dir = world.server.edit(|tree| tree.find(DIR)).expect("it was planted").ino;
        let (present, changed, seen) = ((0..plan.entries).collect(), vec![false; entries], vec![0; entries]);
        Scan { plan, world, dice, dir, present, changed, seen, counts: Counts::default() }
    }

    fn scan(mut self) -> Result<Counts, String> {
        for at in 0..3 {
            let looked =
                self.answer(at, Op::Lookup { dir: 1, name: Name::new(DIR.as_bytes()).expect("a name") })?;
            if !matches!(looked, OpReply::Node(_)) {
                return Err(format!("the directory is not there: {}", short(&looked)));
            }
        }
        let (mut at, mut offset) = (READERS[0], Cookie(0));
        let mut fh = self.open(at)?;
        loop {
            if self.dice.below(u64::from(self.plan.entries) / 60) == 0 {
                self.answer(at, Op::ReleaseDir { fh })?;
                at = READERS[usize::from(self.dice.below(2) == 0)];
                fh = self.open(at)?;
                self.counts.moved += 1;
            }
            // Cookies are spread evenly over 63 bits.
            let due = (u64::from(self.plan.changes) * (offset.0 >> 31)) >> 32;
            let page = self.read(at, fh, offset, due)?;
            let Some(last) = page.entries.last() else { break };
            self.check_page(&page, offset)?;
            offset = last.next;
        }
        self.check_counts()
    }

    fn open(&mut self, at: usize) -> Result<Fh, String> {
        self.counts.listings += 1;
        match self.answer(at, Op::OpenDir { ino: self.dir })? {
            OpReply::Opened(opened) => Ok(opened.fh),
            other => Err(format!("the directory is not opened: {}", short(&other))),
        }
    }

    /// Reads once, at a random position among the changes that are due. A kernel makes one change per directory at a
    /// time.
    fn read(&mut self, at: usize, fh: Fh, offset: Cookie, due: u64) -> Result<Page, String> {
        let together = u64::from(self.plan.changes / self.plan.bursts.max(1)).max(1);
        let changes = if due >= self.counts.changes + together { together } else { 0 };
        let (size, plus) =
            (176 + 8 * u32::try_from(self.dice.below(40)).unwrap_or(0), self.dice.below(4) == 0);
        let (before, early) = (self.dice.below(changes + 1), self.dice.below(2) == 0);
        let ask = Op::ReadDir { ino: self.dir, fh, offset, size, plus };
        let mut read = None;
        for number in 0..changes {
            let now = number == before;
            if now && early {
                read = Some(self.world.send_request(at, ask.clone()));
            }
            let change = self.change();
            if now && !early {
                read = Some(self.world.send_request(at, ask.clone()));
            }
            let answer = self.await_answer(WRITER, change)?;
            if !matches!(answer, OpReply::Done | OpReply::Node(_)) {
                return Err(format!("a change is answered {}", short(&answer)));
            }
        }
        let read = read.unwrap_or_else(|| self.world.send_request(at, ask));
        self.counts.reads += 1;
        self.counts.waited += u64::from(self.world.is_pending(at, read));
        match self.await_answer(at, read)? {
            OpReply::Page(page) => Ok(page),
            other => Err(format!("a read at {offset:?} is answered {}", short(&other))),
        }
    }

    fn change(&mut self) -> OpId {
        self.counts.changes += 1;
        let dir = self.dir;
        let op = match self.dice.below(3) {
            0 => {
                let name = name(self.add_new());
                Op::Mknod { dir, name, kind: Kind::File, mode: 0o644, umask: 0, rdev: 0 }
            }
            1 => Op::Unlink { dir, name: name(self.take_existing()) },
            _ => {
                let (from, to) = (self.take_existing(), self.add_new());
                let (name, new_name) = (name(from), name(to));
                Op::Rename {
                    from: dir,
                    name,
                    to: dir,
                    new_name,
                    no_replace: false,
                    exchange: false,
                    whiteout: false,
                }
            }
        };
        self.world.send_request(WRITER, op)
    }

    /// Picks an existing name, and removes it from the list.
    fn take_existing(&mut self) -> u32 {
        let at = usize::try_from(self.dice.below(self.present.len() as u64)).unwrap_or(0);
        let number = self.present.swap_remove(at);
        self.changed[number as usize] = true;
        number
    }

    /// Picks a name that has never existed.
    fn add_new(&mut self) -> u32 {
        let number = u32::try_from(self.changed.len()).expect("few are made");
        self.changed.push(true);
        self.seen.push(0);
        self.present.push(number);
        number
    }

    fn answer(&mut self, at: usize, op: Op) -> Result<OpReply, String> {
        let id = self.world.send_request(at, op);
        self.await_answer(at, id)
    }

    fn await_answer(&mut self, at: usize, id: OpId) -> Result<OpReply, String> {
        for _ in 0..100_000 {
            if let Some(found) = self.world.replies.iter().position(|(_, of, ..)| *of == id) {
                self.world.trace.clear();
                return Ok(self.world.replies.swap_remove(found).3);
            }
            self.world.advance(Span(500_000));
        }
        Err(format!("{:?} is never answered", self.world.clients[at].ops.get(&id)))
    }

    /// Checks that cookies strictly increase, and counts how often each name was returned.
    fn check_page(&mut self, page: &Page, offset: Cookie) -> Result<(), String> {
        let (mut names, mut place) = (page.names.as_slice(), offset);
        for entry in &page.entries {
            let (one, rest) = names.split_at(usize::from(entry.name_len));
            names = rest;
            if entry.next <= place {
                return Err(format!("behind {place:?} comes {:?}", entry.next));
            }
            place = entry.next;
            if one == b"." || one == b".." {
                continue;
            }
            let number = std::str::from_utf8(one).ok().and_then(|text| text.parse::<usize>().ok());
            let Some(seen) = number.and_then(|number| self.seen.get_mut(number)) else {
                return Err(format!("{:?} never was", String::from_utf8_lossy(one)));
            };
            *seen += 1;
        }
        Ok(())
    }

    fn check_counts(mut self) -> Result<Counts, String> {
        for (number, (touched, seen)) in self.changed.iter().zip(&self.seen).enumerate() {
            if *seen > 1 || !touched && *seen == 0 {
                return Err(format!("{number} came {seen} times"));
            }
            self.counts.stayed += u64::from(!touched);
        }
        Ok(self.counts)
    }
}
