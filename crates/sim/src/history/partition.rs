//! Partition of a history into changes and reads of objects.

use std::collections::{BTreeMap, BTreeSet};

use nigh_types::Errno;

use super::names::{Act, Expected, Names};
use super::registers::{Content, Value};
use super::search::Operation;
use super::{Call, CallResult, File, History, Kind, Label, ObservedAttrs, Record, RenameMode, Slot};

/// Times closer together than this, in ns, count as overlapping.
const CLOCK_SLACK: u64 = 1_000;
/// How long, in ns, a kernel's own link count of a file may stand if no call refreshes it.
const STALE_NLINK: u64 = 1_000_000_000;

/// The objects of a history, each with its changes and reads.
pub struct Partition {
    pub kinds: Vec<Kind>,
    pub names: Vec<Operation<Act>>,
    pub modes: BTreeMap<File, (Option<u64>, Vec<Operation<Value>>)>,
    pub times: BTreeMap<File, Vec<Operation<Value>>>,
    pub xattrs: BTreeMap<File, Vec<Operation<Value>>>,
    pub contents: BTreeMap<File, Vec<Operation<Content>>>,
    /// Reads on stopped mounts.
    pub ignored: u64,
    /// Calls that failed with ESTALE: their kernel knew the directory under another name and could not move its
    /// dentry, or the name led to another inode at each lookup.
    pub stale: u64,
    pub wrong_nlink: u64,
    /// Calls by lost descriptors.
    pub lost: u64,
    /// Reads that found data of a write still in flight on their own mount, in that mount's page cache.
    pub read_before_reply: u64,
    /// Changes with an unknown outcome.
    pub unknown: u64,
}

/// A record that is impossible under any order, and the reason.
pub type Impossible = (usize, String);

/// An inode that a call created, or may have created.
struct Creator {
    kind: Kind,
    mode: u32,
    /// Its numbers in [`Partition::kinds`]; the second one is for a call that was applied twice.
    numbers: Vec<u16>,
    /// The inode number in the creating call's result.
    ino: Option<u64>,
    seen: BTreeSet<u64>,
}

fn latest_end(record: &Record) -> u64 {
    record.response.as_ref().map_or(u64::MAX, |(end, _)| *end)
}

/// `undercounts`: kernels may have counted one name of a file too few (L4 of docs/linux.md).
///
/// # Errors
/// The first record that is impossible under any order.
pub fn partition(history: &History, undercounts: bool) -> Result<Partition, Impossible> {
    let mut divider = Partitioner::new(history, undercounts)?;
    for number in 0..history.records.len() {
        divider.add_record(number).map_err(|why| (number, why))?;
    }
    Ok(divider.pieces)
}

struct Partitioner<'h> {
    history: &'h History,
    creators: BTreeMap<Label, Creator>,
    /// The records of changes, by mount.
    changes: BTreeMap<u8, Vec<usize>>,
    pieces: Partition,
    undercounts: bool,
}

type Checked = Result<(), String>;

impl<'h> Partitioner<'h> {
    fn new(history: &'h History, undercounts: bool) -> Result<Partitioner<'h>, Impossible> {
        let pieces = Partition {
            kinds: Vec::new(),
            names: Vec::new(),
            modes: BTreeMap::new(),
            times: BTreeMap::new(),
            xattrs: BTreeMap::new(),
            contents: BTreeMap::new(),
            ignored: 0,
            stale: 0,
            wrong_nlink: 0,
            lost: 0,
            read_before_reply: 0,
            unknown: 0,
        };
        let (makers, changes) = (BTreeMap::new(), BTreeMap::new());
        let mut divider = Partitioner { history, creators: makers, changes, pieces, undercounts };
        for (number, record) in history.records.iter().enumerate() {
            if record.call.is_change() {
                divider.changes.entry(record.mount).or_default().push(number);
            }
            divider.add_creator(record).map_err(|why| (number, why))?;
        }
        for (number, record) in history.records.iter().enumerate() {
            divider.observe_ino(record).map_err(|why| (number, why))?;
        }
        Ok(divider)
    }

    /// Registers the inode that a record creates.
    fn add_creator(&mut self, record: &Record) -> Checked {
        let (label, kind, mode) = match record.call {
            Call::Create { label, mode, .. } => (label, Kind::File, mode),
            Call::Mkdir { label, .. } => (label, Kind::Dir, 0),
            Call::Symlink { label, .. } => (label, Kind::Symlink, 0),
            _ => return Ok(()),
        };
        let ino = match record.response {
            Some((_, CallResult::Opened(file))) => Some(file.ino),
            _ => None,
        };
        let mut numbers = Vec::new();
        for _ in 0..=overlapping_kills(self.history, record).count() {
            let number = self.pieces.kinds.len();
            if number >= Names::MOST {
                return Err("too many inodes".to_owned());
            }
            numbers.push(u16::try_from(number).map_err(|_| "too many inodes")?);
            self.pieces.kinds.push(kind);
        }
        let maker = Creator { kind, mode, numbers, ino, seen: ino.into_iter().collect() };
        match self.creators.insert(label, maker) {
            Some(_) => Err(format!("{label} was made by another call already")),
            None => Ok(()),
        }
    }

    /// Registers the observed inode number of a file; an inode has exactly one.
    fn observe_ino(&mut self, record: &Record) -> Checked {
        let (file, kind) = match record.response {
            Some((_, CallResult::Opened(file))) => (file, Kind::File),
            Some((_, CallResult::Attributes(seen))) => (seen.file, seen.kind),
            _ => return Ok(()),
        };
        let maker = self.creators.get_mut(&file.label).ok_or("an inode without a creator")?;
        if maker.kind != kind {
            return Err(format!("{} was made as {:?}", file.label, maker.kind));
        }
        maker.seen.insert(file.ino);
        if maker.seen.len() > maker.numbers.len() {
            return Err(format!("{} has several inodes: {:?}", file.label, maker.seen));
        }
        Ok(())
    }

    /// Returns the inodes that `file` may be.
    fn numbers(&self, file: File) -> Result<Vec<u16>, String> {
        let maker = self.creators.get(&file.label).ok_or("an inode without a creator")?;
        Ok(match (maker.ino, &maker.numbers[..]) {
            (Some(ino), [first, ..]) if ino == file.ino => vec![*first],
            (Some(_), [_, others @ ..]) => others.to_vec(),
            (_, all) => all.to_vec(),
        })
    }

    /// Returns the inodes that a listing's entry may be: those observed under this number, which is reused after an
    /// inode is gone, and those whose number no call observed.
    fn listed(&self, ino: u64) -> Vec<u16> {
        let may = |maker: &&Creator| maker.seen.contains(&ino) || maker.seen.len() < maker.numbers.len();
        self.creators.values().filter(may).flat_map(|maker| maker.numbers.iter().copied()).collect()
    }

    fn add_record(&mut self, number: usize) -> Checked {
        let record = &self.history.records[number];
        self.add_possible_replays(number);
        let Some((end, answer)) = &record.response else {
            self.pieces.unknown += u64::from(record.call.is_change());
            self.effect(number, u64::MAX, false, 0);
            return Ok(());
        };
        let lost = matches!(answer, CallResult::Failed(Errno::IO | Errno::STALE))
            && record.call.file().is_some()
            && self.history.lossy_mounts.contains(&record.mount);
        if lost {
            self.pieces.lost += 1;
            self.pieces.unknown += u64::from(record.call.is_change());
            self.effect(number, u64::MAX, false, 0);
            return Ok(());
        }
        let looks = !record.call.is_change() || matches!(answer, CallResult::Failed(_));
        let stopped = |(mount, from, to): &(u8, u64, u64)| *mount == record.mount && end >= from && end <= to;
        if looks && self.history.stops.iter().any(stopped) {
            self.pieces.ignored += 1;
            return Ok(());
        }
        match answer {
            CallResult::Failed(errno) => self.add_failure(number, *errno),
            CallResult::Done if record.call.is_change() => {
                self.effect(number, end.saturating_add(CLOCK_SLACK), true, 0);
                Ok(())
            }
            _ => self.add_reads(number, answer),
        }
    }

    /// Adds the possible earlier application of a change that was in flight when a server was killed.
    fn add_possible_replays(&mut self, number: usize) {
        let record = &self.history.records[number];
        let kills: Vec<(u64, u64)> = overlapping_kills(self.history, record).collect();
        for (again, (_, to)) in (1..).zip(kills) {
            self.effect(number, to.saturating_add(CLOCK_SLACK), false, again);
        }
    }

    /// Adds a change; `again` selects which of its possible inodes a creating call has made.
    fn effect(&mut self, number: usize, ends: u64, must: bool, again: usize) {
        let record = &self.history.records[number];
        let made = |label| self.creators[&label].numbers[again];
        let names = match record.call {
            Call::Create { slot, label, .. }
            | Call::Mkdir { slot, label }
            | Call::Symlink { slot, label } => Some(Act::Make { slot, inode: made(label) }),
            Call::Link { old, new } => Some(Act::Link { old, new }),
            Call::Unlink { slot } => Some(Act::Unlink { slot }),
            Call::Rmdir { slot } => Some(Act::Rmdir { slot }),
            Call::Rename { old, new, how } => Some(Act::Rename { old, new, how }),
            _ => None,
        };
        if let Some(act) = names {
            self.name(number, ends, must, act);
        }
        match record.call {
            Call::Chmod { file, mode } => {
                self.mode(file, number, (ends, must), Value::Set(Some(mode.into())))
            }
            Call::Times { file, secs } => {
                let secs = Value::Set(Some(secs.cast_unsigned()));
                self.register(RegisterKind::Times, file, number, (ends, must), secs);
            }
            Call::SetXattr { file, value } => {
                self.register(RegisterKind::Xattrs, file, number, (ends, must), Value::Set(Some(value)));
            }
            Call::RemoveXattr { file } => {
                self.register(RegisterKind::Xattrs, file, number, (ends, must), Value::Set(None));
            }
            Call::Truncate { file, size } => {
                self.content(file, number, (ends, must), Content::Truncate(size))
            }
            Call::Write { file, word } => self.content(file, number, (ends, must), Content::Write(word)),
            _ => {}
        }
        if let Call::Truncate { file, .. } | Call::Write { file, .. } = record.call {
            self.register(RegisterKind::Times, file, number, (ends, must), Value::Set(None));
        }
    }

    /// Adds the reads that follow from a successful call's result.
    fn add_reads(&mut self, number: usize, answer: &CallResult) -> Checked {
        let record = &self.history.records[number];
        let one_of = Expected::OneOf;
        match (record.call, answer) {
            (Call::Create { .. }, CallResult::Opened(_)) => {
                let end = self.end(number);
                self.effect(number, end, true, 0);
            }
            (Call::Open { slot }, CallResult::Opened(file)) => {
                let numbers = self.numbers(*file)?;
                self.is(number, slot, one_of(numbers));
            }
            (Call::Stat { slot }, CallResult::Attributes(seen)) => {
                let numbers = self.numbers(seen.file)?;
                self.is(number, slot, one_of(numbers));
                self.attributes(number, seen)?;
            }
            (Call::Fstat { file }, CallResult::Attributes(seen)) if file == seen.file => {
                self.attributes(number, seen)?
            }
            (Call::ReadLink { slot }, CallResult::Target(label)) => {
                let maker = self.creators.get(label).ok_or("a target without a writer")?;
                let numbers = maker.numbers.clone();
                self.is(number, slot, one_of(numbers));
            }
            (Call::List { dir }, CallResult::Entries(entries)) => self.listing(number, dir, entries)?,
            (Call::GetXattr { file }, CallResult::Value(value)) => {
                let end = self.end(number);
                self.register(RegisterKind::Xattrs, file, number, (end, true), Value::Is(*value));
            }
            (Call::Read { file }, CallResult::Value(Some(word)))
                if self.overlaps_own_write(record, file, *word) =>
            {
                self.pieces.read_before_reply += 1;
            }
            (Call::Read { file }, CallResult::Value(value)) => {
                let look = value.map_or(Content::Size(0), Content::Word);
                let end = self.end(number);
                self.content(file, number, (end, true), look);
            }
            (Call::Fsync { .. }, CallResult::Done) | (Call::Load { .. }, CallResult::Value(_)) => {}
            _ => return Err("no answer to that call".to_owned()),
        }
        Ok(())
    }

    /// Returns whether a write of the read's own mount in flight explains the read: the kernel lets others read the
    /// page that it filled before the server has the data.
    fn overlaps_own_write(&self, read: &Record, file: File, word: u64) -> bool {
        let changes = self.changes.get(&read.mount).into_iter().flatten();
        let mut writes =
            changes.filter(|number| self.history.records[**number].call == Call::Write { file, word });
        writes.any(|number| {
            let write = &self.history.records[*number];
            write.begin <= self.over(read) && self.over(write) >= read.begin
        })
    }

    /// Returns when the kernel was done with a call: at the latest when its process, or that process's replacement,
    /// called again.
    fn over(&self, record: &Record) -> u64 {
        if let Some((end, _)) = &record.response {
            return *end;
        }
        let who = |record: &Record| (record.mount, record.worker);
        let later = self.history.records.iter().filter(|other| who(other) == who(record));
        later.map(|other| other.begin).filter(|begin| *begin > record.begin).min().unwrap_or(u64::MAX)
    }

    fn listing(&mut self, number: usize, dir: u8, entries: &[(u8, u64)]) -> Checked {
        let mut names = BTreeMap::new();
        for (name, ino) in entries {
            if *name >= super::NAMES {
                return Err("it lists a name that no call makes".to_owned());
            }
            if names.insert(*name, *ino).is_some() {
                return Err("it lists a name twice".to_owned());
            }
        }
        for name in 0..super::NAMES {
            let what = names.get(&name).map_or(Expected::Absent, |ino| Expected::OneOf(self.listed(*ino)));
            self.is(number, Slot::new(dir, name), what);
        }
        Ok(())
    }

    /// Attributes are separate reads: the kernel may fetch them later than the name.
    fn attributes(&mut self, number: usize, seen: &ObservedAttrs) -> Checked {
        let end = self.end(number);
        // With two inodes of one label, the checker cannot tell which one had this link count.
        if let [inode] = self.numbers(seen.file)?[..] {
            self.name(number, end, true, Act::Links { inode, count: seen.nlink });
        }
        if seen.kind == Kind::File {
            let (file, ends) = (seen.file, (end, true));
            self.mode(file, number, ends, Value::Is(Some(seen.mode.into())));
            let secs = seen.mtime.map(i64::cast_unsigned);
            self.register(RegisterKind::Times, file, number, ends, Value::Is(secs));
            self.content(file, number, ends, Content::Size(seen.size));
        }
        Ok(())
    }

    /// Returns the mounts with a change of the name that may overlap the call, one element per change.
    fn changes_beside(&self, number: usize, slot: Slot) -> Vec<u8> {
        let end_of = |record: &Record| {
            record.response.as_ref().map_or(u64::MAX, |(end, _)| end.saturating_add(CLOCK_SLACK))
        };
        let call = &self.history.records[number];
        let changes = self.history.records.iter().enumerate().filter(|&(other, record)| {
            let failed = matches!(record.response, Some((_, CallResult::Failed(_))));
            other != number && record.call.is_change() && !failed
        });
        let beside =
            changes.filter(|(_, record)| record.begin <= end_of(call) && call.begin <= end_of(record));
        let of_it = |record: &Record| record.call.names().is_some_and(|names| names.contains(&slot));
        beside.filter(|(_, record)| of_it(record)).map(|(_, record)| record.mount).collect()
    }

    /// Whether the kernel of the call's mount may believe that the file has no names (`vfs_link`). It counts names
    /// itself, also for a removal of a name that another mount has moved to another file (`fuse_entry_unlinked`), and
    /// it ignores the server's count while it writes (`FUSE_I_SIZE_UNSTABLE`).
    fn is_miscounted(&self, number: usize) -> bool {
        let mount = self.history.records[number].mount;
        let moved =
            |(at, slot): (usize, Slot)| self.changes_beside(at, slot).iter().any(|other| *other != mount);
        let mut beside = self.own_calls_beside(number);
        beside.any(|record| matches!(record.call, Call::Write { .. }))
            && self.removals_before(number).any(moved)
    }

    /// Whether the kernel of the call's mount may have counted one name too few: it applies another reply with the new
    /// count before it handles the reply to its own removal of one of several names (`fuse_entry_unlinked`).
    fn may_undercount(&self, number: usize) -> bool {
        let links = |end: u64| {
            let done = |record: &Record| !matches!(record.response, Some((_, CallResult::Failed(_))));
            let before = |record: &Record| matches!(record.call, Call::Link { .. }) && record.begin <= end;
            self.history.records.iter().any(|record| before(record) && done(record))
        };
        let may = |(at, _): (usize, Slot)| {
            let end = latest_end(&self.history.records[at]);
            end != u64::MAX && links(end) && self.own_calls_beside(at).next().is_some()
        };
        self.undercounts && self.removals_before(number).any(may)
    }

    /// Returns the other calls of the same mount that may overlap the call.
    fn own_calls_beside(&self, number: usize) -> impl Iterator<Item = &Record> {
        let call = &self.history.records[number];
        let others = self.history.records.iter().enumerate().filter(move |(other, _)| *other != number);
        others.map(|(_, record)| record).filter(move |record| {
            record.mount == call.mount && record.begin <= latest_end(call) && call.begin <= latest_end(record)
        })
    }

    /// Returns the removals of names on the call's mount after which the mount's kernel may not have refreshed its
    /// link count, each with its name.
    fn removals_before(&self, number: usize) -> impl Iterator<Item = (usize, Slot)> {
        let call = &self.history.records[number];
        let end = latest_end(call);
        self.history.records.iter().enumerate().filter_map(move |(at, record)| {
            let slot = match record.call {
                Call::Unlink { slot } | Call::Rename { new: slot, how: RenameMode::Plain, .. } => slot,
                _ => return None,
            };
            let done = !matches!(record.response, Some((_, CallResult::Failed(_))));
            let stale_until = latest_end(record).saturating_add(STALE_NLINK);
            let lately = record.begin <= end && call.begin <= stale_until;
            (record.mount == call.mount && done && lately).then_some((at, slot))
        })
    }

    /// Adds the reads that follow from a failed call.
    fn add_failure(&mut self, number: usize, errno: Errno) -> Checked {
        let call = self.history.records[number].call;
        if let (Errno::STALE, Some(slots)) = (errno, call.names()) {
            self.pieces.stale += 1;
            if !slots.iter().any(|slot| self.changes_beside(number, *slot).len() > 1) {
                let end = self.end(number);
                self.name(number, end, true, Act::Any { slots, what: Expected::Dir });
            }
            return Ok(());
        }
        let (slot, what) = match (call, errno) {
            (
                Call::Create { slot, .. } | Call::Mkdir { slot, .. } | Call::Symlink { slot, .. },
                Errno::EXIST,
            ) => (slot, Expected::Present),
            (Call::Link { .. }, Errno::NOENT) if self.is_miscounted(number) => {
                self.pieces.wrong_nlink += 1;
                return Ok(());
            }
            (Call::Link { old, .. }, Errno::NOENT) => {
                let end = self.end(number);
                let undercounted = self.may_undercount(number);
                self.name(number, end, true, Act::Gone { old, undercounted });
                return Ok(());
            }
            (Call::Link { new, .. } | Call::Rename { new, how: RenameMode::NoReplace, .. }, Errno::EXIST) => {
                (new, Expected::Present)
            }
            (Call::Link { old, .. }, Errno::PERM) => (old, Expected::Dir),
            (Call::Rename { old, new, how: RenameMode::Exchange }, Errno::NOENT) => {
                let end = self.end(number);
                self.name(number, end, true, Act::Any { slots: [old, new], what: Expected::Absent });
                return Ok(());
            }
            (Call::Rename { old, .. }, Errno::NOENT) => (old, Expected::Absent),
            (Call::Rename { new, how: RenameMode::Plain, .. }, Errno::ISDIR) => (new, Expected::Dir),
            (Call::Rename { new, how: RenameMode::Plain, .. }, Errno::NOTDIR) => (new, Expected::NotDir),
            (
                Call::Unlink { slot }
                | Call::Rmdir { slot }
                | Call::Open { slot }
                | Call::Stat { slot }
                | Call::ReadLink { slot },
                Errno::NOENT,
            ) => (slot, Expected::Absent),
            (Call::Unlink { slot } | Call::Open { slot }, Errno::ISDIR) => (slot, Expected::Dir),
            (Call::Rmdir { slot }, Errno::NOTDIR) => (slot, Expected::NotDir),
            (Call::Open { slot }, Errno::LOOP) => (slot, Expected::Symlink),
            (Call::ReadLink { slot }, Errno::INVAL) => (slot, Expected::NotSymlink),
            _ => return Err(format!("{errno} is not what that call says")),
        };
        self.is(number, slot, what);
        Ok(())
    }

    /// Returns the time by which a record has happened.
    fn end(&self, number: usize) -> u64 {
        let end = self.history.records[number].response.as_ref().map(|(end, _)| *end);
        end.map_or(u64::MAX, |end| end.saturating_add(CLOCK_SLACK))
    }

    fn is(&mut self, number: usize, slot: Slot, what: Expected) {
        let end = self.end(number);
        self.name(number, end, true, Act::Is { slot, what });
    }

    fn name(&mut self, number: usize, ends: u64, required: bool, act: Act) {
        let any_name = Slot::all().collect();
        let slots: Vec<Slot> = match &act {
            Act::Is { slot, .. } => vec![*slot],
            Act::Link { old, .. } | Act::Gone { old, .. } => vec![*old],
            Act::Any { slots, .. } => slots.to_vec(),
            // The names that lead to the inode are not known beforehand.
            Act::Links { .. } => any_name,
            _ => Vec::new(),
        };
        let touches = |call: &Call| call.changes_names().iter().flatten().any(|slot| slots.contains(slot));
        let (visible_from, effective_from) = self.moments(number, touches);
        self.pieces.names.push(Operation {
            visible_from,
            effective_from,
            ends,
            required,
            act,
            record: number,
        });
    }

    /// Returns from when a record counts as a read, and from when as a change. As a read it counts from the beginning
    /// of overlapping changes of its own mount, because that mount's kernel may hold the state from before them.
    fn moments(&self, number: usize, touches: impl Fn(&Call) -> bool) -> (u64, u64) {
        let record = &self.history.records[number];
        let changes = self.changes.get(&record.mount).into_iter().flatten();
        let out = changes.filter(|other| **other != number).map(|other| &self.history.records[*other]);
        let out = out.filter(|change| {
            let ends = change.response.as_ref().map_or(u64::MAX, |(end, _)| end.saturating_add(CLOCK_SLACK));
            change.begin < record.begin && ends >= record.begin && touches(&change.call)
        });
        (out.map(|change| change.begin).min().unwrap_or(record.begin), record.begin)
    }

    fn mode(&mut self, file: File, number: usize, (ends, required): (u64, bool), act: Value) {
        let (visible_from, effective_from) = self.moments(number, |call| call.file() == Some(file));
        let first = self.creators.get(&file.label).map(|maker| maker.mode.into());
        let entry = self.pieces.modes.entry(file).or_insert_with(|| (first, Vec::new()));
        entry.1.push(Operation { visible_from, effective_from, ends, required, act, record: number });
    }

    fn register(
        &mut self,
        which: RegisterKind,
        file: File,
        number: usize,
        (ends, required): (u64, bool),
        act: Value,
    ) {
        let (visible_from, effective_from) = self.moments(number, |call| call.file() == Some(file));
        let all = match which {
            RegisterKind::Times => &mut self.pieces.times,
            RegisterKind::Xattrs => &mut self.pieces.xattrs,
        };
        all.entry(file).or_default().push(Operation {
            visible_from,
            effective_from,
            ends,
            required,
            act,
            record: number,
        });
    }

    fn content(&mut self, file: File, number: usize, (ends, required): (u64, bool), act: Content) {
        let (visible_from, effective_from) = self.moments(number, |call| call.file() == Some(file));
        let piece = Operation { visible_from, effective_from, ends, required, act, record: number };
        self.pieces.contents.entry(file).or_default().push(piece);
    }
}

/// Registers without an initial value.
#[derive(Clone, Copy)]
enum RegisterKind {
    /// `None`: set by the server's clock.
    Times,
    Xattrs,
}

/// Returns the kills during a change.
fn overlapping_kills<'h>(history: &'h History, record: &'h Record) -> impl Iterator<Item = (u64, u64)> + 'h {
    let end = record.response.as_ref().map_or(u64::MAX, |(end, _)| *end);
    let within = move |(from, to): &&(u64, u64)| record.begin <= *to && end >= *from;
    history.kills.iter().filter(within).filter(|_| record.call.is_change()).copied()
}
