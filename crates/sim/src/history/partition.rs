//! Partition of a history into changes and reads of objects.

use std::collections::{BTreeMap, BTreeSet};

use nigh_types::Errno;

use super::names::{Act, Names, What};
use super::registers::{Content, Value};
use super::search::Piece;
use super::{Answer, Call, File, History, How, Kind, Label, Record, Seen, Slot};

/// Times closer together than this, in ns, count as overlapping.
const TOGETHER: u64 = 1_000;
/// How long, in ns, a kernel's own link count of a file may stand if no call refreshes it.
const MISCOUNTED: u64 = 1_000_000_000;

/// The objects of a history, each with its changes and reads.
pub struct Pieces {
    pub kinds: Vec<Kind>,
    pub names: Vec<Piece<Act>>,
    pub modes: BTreeMap<File, (Option<u64>, Vec<Piece<Value>>)>,
    pub times: BTreeMap<File, Vec<Piece<Value>>>,
    pub xattrs: BTreeMap<File, Vec<Piece<Value>>>,
    pub contents: BTreeMap<File, Vec<Piece<Content>>>,
    /// Reads on stopped mounts.
    pub left_out: u64,
    /// Calls that failed with ESTALE: their kernel knew the directory under another name and could not move its
    /// dentry, or the name led to another inode at each lookup.
    pub stale: u64,
    pub miscounted: u64,
    /// Calls by lost descriptors.
    pub lost: u64,
    /// Reads that found data of a write still in flight on their own mount, in that mount's page cache.
    pub early: u64,
    /// Changes with an unknown outcome.
    pub unknown: u64,
}

/// A record that is impossible under any order, and the reason.
pub type Wrong = (usize, String);

/// An inode that a call created, or may have created.
struct Maker {
    kind: Kind,
    mode: u32,
    /// Its numbers in [`Pieces::kinds`]; the second one is for a call that was applied twice.
    numbers: Vec<u16>,
    /// The inode number in the creating call's result.
    ino: Option<u64>,
    seen: BTreeSet<u64>,
}

/// # Errors
/// The first record that is impossible under any order.
pub fn divide(history: &History) -> Result<Pieces, Wrong> {
    let mut divider = Divider::new(history)?;
    for number in 0..history.records.len() {
        divider.take(number).map_err(|why| (number, why))?;
    }
    Ok(divider.pieces)
}

struct Divider<'h> {
    history: &'h History,
    makers: BTreeMap<Label, Maker>,
    /// The records of changes, by mount.
    changes: BTreeMap<u8, Vec<usize>>,
    pieces: Pieces,
}

type Taken = Result<(), String>;

impl<'h> Divider<'h> {
    fn new(history: &'h History) -> Result<Divider<'h>, Wrong> {
        let pieces = Pieces {
            kinds: Vec::new(),
            names: Vec::new(),
            modes: BTreeMap::new(),
            times: BTreeMap::new(),
            xattrs: BTreeMap::new(),
            contents: BTreeMap::new(),
            left_out: 0,
            stale: 0,
            miscounted: 0,
            lost: 0,
            early: 0,
            unknown: 0,
        };
        let (makers, changes) = (BTreeMap::new(), BTreeMap::new());
        let mut divider = Divider { history, makers, changes, pieces };
        for (number, record) in history.records.iter().enumerate() {
            if record.call.is_change() {
                divider.changes.entry(record.mount).or_default().push(number);
            }
            divider.make(record).map_err(|why| (number, why))?;
        }
        for (number, record) in history.records.iter().enumerate() {
            divider.sight(record).map_err(|why| (number, why))?;
        }
        Ok(divider)
    }

    /// Registers the inode that a record creates.
    fn make(&mut self, record: &Record) -> Taken {
        let (label, kind, mode) = match record.call {
            Call::Create { label, mode, .. } => (label, Kind::File, mode),
            Call::Mkdir { label, .. } => (label, Kind::Dir, 0),
            Call::Symlink { label, .. } => (label, Kind::Symlink, 0),
            _ => return Ok(()),
        };
        let ino = match record.answer {
            Some((_, Answer::Opened(file))) => Some(file.ino),
            _ => None,
        };
        let mut numbers = Vec::new();
        for _ in 0..=kills_in(self.history, record).count() {
            let number = self.pieces.kinds.len();
            if number >= Names::MOST {
                return Err("too many inodes".to_owned());
            }
            numbers.push(u16::try_from(number).map_err(|_| "too many inodes")?);
            self.pieces.kinds.push(kind);
        }
        let maker = Maker { kind, mode, numbers, ino, seen: ino.into_iter().collect() };
        match self.makers.insert(label, maker) {
            Some(_) => Err(format!("{label} was made by another call already")),
            None => Ok(()),
        }
    }

    /// Registers the observed inode number of a file; an inode has exactly one.
    fn sight(&mut self, record: &Record) -> Taken {
        let (file, kind) = match record.answer {
            Some((_, Answer::Opened(file))) => (file, Kind::File),
            Some((_, Answer::Seen(seen))) => (seen.file, seen.kind),
            _ => return Ok(()),
        };
        let maker = self.makers.get_mut(&file.label).ok_or("an inode that nobody made")?;
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
        let maker = self.makers.get(&file.label).ok_or("an inode that nobody made")?;
        Ok(match (maker.ino, &maker.numbers[..]) {
            (Some(ino), [first, ..]) if ino == file.ino => vec![*first],
            (Some(_), [_, others @ ..]) => others.to_vec(),
            (_, all) => all.to_vec(),
        })
    }

    /// Returns the inodes that a listing's entry may be: those observed under this number, which is reused after an
    /// inode is gone, and those whose number no call observed.
    fn listed(&self, ino: u64) -> Vec<u16> {
        let may = |maker: &&Maker| maker.seen.contains(&ino) || maker.seen.len() < maker.numbers.len();
        self.makers.values().filter(may).flat_map(|maker| maker.numbers.iter().copied()).collect()
    }

    fn take(&mut self, number: usize) -> Taken {
        let record = &self.history.records[number];
        self.doubt(number);
        let Some((end, answer)) = &record.answer else {
            self.pieces.unknown += u64::from(record.call.is_change());
            self.effect(number, u64::MAX, false, 0);
            return Ok(());
        };
        let lost = matches!(answer, Answer::Failed(Errno::IO | Errno::STALE))
            && record.call.file().is_some()
            && self.history.losses.contains(&record.mount);
        if lost {
            self.pieces.lost += 1;
            self.pieces.unknown += u64::from(record.call.is_change());
            self.effect(number, u64::MAX, false, 0);
            return Ok(());
        }
        let looks = !record.call.is_change() || matches!(answer, Answer::Failed(_));
        let stopped = |(mount, from, to): &(u8, u64, u64)| *mount == record.mount && end >= from && end <= to;
        if looks && self.history.stops.iter().any(stopped) {
            self.pieces.left_out += 1;
            return Ok(());
        }
        match answer {
            Answer::Failed(errno) => self.refused(number, *errno),
            Answer::Done if record.call.is_change() => {
                self.effect(number, end.saturating_add(TOGETHER), true, 0);
                Ok(())
            }
            _ => self.look(number, answer),
        }
    }

    /// Adds the possible earlier application of a change that was in flight when a server was killed.
    fn doubt(&mut self, number: usize) {
        let record = &self.history.records[number];
        let kills: Vec<(u64, u64)> = kills_in(self.history, record).collect();
        for (again, (_, to)) in (1..).zip(kills) {
            self.effect(number, to.saturating_add(TOGETHER), false, again);
        }
    }

    /// Adds a change; `again` selects which of its possible inodes a creating call has made.
    fn effect(&mut self, number: usize, ends: u64, must: bool, again: usize) {
        let record = &self.history.records[number];
        let made = |label| self.makers[&label].numbers[again];
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
                self.register(Which::Times, file, number, (ends, must), secs);
            }
            Call::SetXattr { file, value } => {
                self.register(Which::Xattrs, file, number, (ends, must), Value::Set(Some(value)));
            }
            Call::RemoveXattr { file } => {
                self.register(Which::Xattrs, file, number, (ends, must), Value::Set(None));
            }
            Call::Truncate { file, size } => {
                self.content(file, number, (ends, must), Content::Truncate(size))
            }
            Call::Write { file, word } => self.content(file, number, (ends, must), Content::Write(word)),
            _ => {}
        }
        if let Call::Truncate { file, .. } | Call::Write { file, .. } = record.call {
            self.register(Which::Times, file, number, (ends, must), Value::Set(None));
        }
    }

    /// Adds the reads that follow from a successful call's result.
    fn look(&mut self, number: usize, answer: &Answer) -> Taken {
        let record = &self.history.records[number];
        let one_of = What::OneOf;
        match (record.call, answer) {
            (Call::Create { .. }, Answer::Opened(_)) => {
                let end = self.end(number);
                self.effect(number, end, true, 0);
            }
            (Call::Open { slot }, Answer::Opened(file)) => {
                let numbers = self.numbers(*file)?;
                self.is(number, slot, one_of(numbers));
            }
            (Call::Stat { slot }, Answer::Seen(seen)) => {
                let numbers = self.numbers(seen.file)?;
                self.is(number, slot, one_of(numbers));
                self.attributes(number, seen)?;
            }
            (Call::Fstat { file }, Answer::Seen(seen)) if file == seen.file => {
                self.attributes(number, seen)?
            }
            (Call::ReadLink { slot }, Answer::Target(label)) => {
                let maker = self.makers.get(label).ok_or("a target that nobody wrote")?;
                let numbers = maker.numbers.clone();
                self.is(number, slot, one_of(numbers));
            }
            (Call::List { dir }, Answer::Listed(entries)) => self.listing(number, dir, entries)?,
            (Call::GetXattr { file }, Answer::Value(value)) => {
                let end = self.end(number);
                self.register(Which::Xattrs, file, number, (end, true), Value::Is(*value));
            }
            (Call::Read { file }, Answer::Value(Some(word))) if self.is_out(record, file, *word) => {
                self.pieces.early += 1;
            }
            (Call::Read { file }, Answer::Value(value)) => {
                let look = value.map_or(Content::Size(0), Content::Word);
                let end = self.end(number);
                self.content(file, number, (end, true), look);
            }
            (Call::Fsync { .. }, Answer::Done) | (Call::Load { .. }, Answer::Value(_)) => {}
            _ => return Err("no answer to that call".to_owned()),
        }
        Ok(())
    }

    /// Returns whether a write of the read's own mount in flight explains the read: the kernel lets others read the
    /// page that it filled before the server has the data.
    fn is_out(&self, read: &Record, file: File, word: u64) -> bool {
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
        if let Some((end, _)) = &record.answer {
            return *end;
        }
        let who = |record: &Record| (record.mount, record.worker);
        let later = self.history.records.iter().filter(|other| who(other) == who(record));
        later.map(|other| other.begin).filter(|begin| *begin > record.begin).min().unwrap_or(u64::MAX)
    }

    fn listing(&mut self, number: usize, dir: u8, entries: &[(u8, u64)]) -> Taken {
        let mut names = BTreeMap::new();
        for (name, ino) in entries {
            if *name >= super::NAMES {
                return Err("it lists a name that nobody makes".to_owned());
            }
            if names.insert(*name, *ino).is_some() {
                return Err("it lists a name twice".to_owned());
            }
        }
        for name in 0..super::NAMES {
            let what = names.get(&name).map_or(What::Nothing, |ino| What::OneOf(self.listed(*ino)));
            self.is(number, Slot::new(dir, name), what);
        }
        Ok(())
    }

    /// Attributes are separate reads: the kernel may fetch them later than the name.
    fn attributes(&mut self, number: usize, seen: &Seen) -> Taken {
        let end = self.end(number);
        // With two inodes of one label, the checker cannot tell which one had this link count.
        if let [inode] = self.numbers(seen.file)?[..] {
            self.name(number, end, true, Act::Links { inode, count: seen.nlink });
        }
        if seen.kind == Kind::File {
            let (file, ends) = (seen.file, (end, true));
            self.mode(file, number, ends, Value::Is(Some(seen.mode.into())));
            let secs = seen.mtime.map(i64::cast_unsigned);
            self.register(Which::Times, file, number, ends, Value::Is(secs));
            self.content(file, number, ends, Content::Size(seen.size));
        }
        Ok(())
    }

    /// Returns the mounts with a change of the name that may overlap the call, one element per change.
    fn changes_beside(&self, number: usize, slot: Slot) -> Vec<u8> {
        let end_of = |record: &Record| {
            record.answer.as_ref().map_or(u64::MAX, |(end, _)| end.saturating_add(TOGETHER))
        };
        let call = &self.history.records[number];
        let changes = self.history.records.iter().enumerate().filter(|&(other, record)| {
            let failed = matches!(record.answer, Some((_, Answer::Failed(_))));
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
        let call = &self.history.records[number];
        let done = |record: &Record| !matches!(record.answer, Some((_, Answer::Failed(_))));
        let end_of = |record: &Record| record.answer.as_ref().map_or(u64::MAX, |(end, _)| *end);
        let writes = |record: &Record| {
            let beside = record.begin <= end_of(call) && call.begin <= end_of(record);
            beside && matches!(record.call, Call::Write { .. })
        };
        let removes = |(at, record): (usize, &Record)| {
            let slot = match record.call {
                Call::Unlink { slot } | Call::Rename { new: slot, how: How::Plain, .. } => slot,
                _ => return false,
            };
            let lately =
                record.begin <= end_of(call) && call.begin <= end_of(record).saturating_add(MISCOUNTED);
            lately && done(record) && self.changes_beside(at, slot).iter().any(|mount| *mount != call.mount)
        };
        let records = self.history.records.iter().enumerate();
        let own = || records.clone().filter(|(_, record)| record.mount == call.mount);
        own().any(|(_, record)| writes(record)) && own().any(removes)
    }

    /// Adds the reads that follow from a failed call.
    fn refused(&mut self, number: usize, errno: Errno) -> Taken {
        let call = self.history.records[number].call;
        if let (Errno::STALE, Some(slots)) = (errno, call.names()) {
            self.pieces.stale += 1;
            if !slots.iter().any(|slot| self.changes_beside(number, *slot).len() > 1) {
                let end = self.end(number);
                self.name(number, end, true, Act::Any { slots, what: What::Dir });
            }
            return Ok(());
        }
        let (slot, what) = match (call, errno) {
            (
                Call::Create { slot, .. } | Call::Mkdir { slot, .. } | Call::Symlink { slot, .. },
                Errno::EXIST,
            ) => (slot, What::Something),
            (Call::Link { .. }, Errno::NOENT) if self.is_miscounted(number) => {
                self.pieces.miscounted += 1;
                return Ok(());
            }
            (Call::Link { old, .. }, Errno::NOENT) => {
                let end = self.end(number);
                self.name(number, end, true, Act::Gone { old });
                return Ok(());
            }
            (Call::Link { new, .. } | Call::Rename { new, how: How::NoReplace, .. }, Errno::EXIST) => {
                (new, What::Something)
            }
            (Call::Link { old, .. }, Errno::PERM) => (old, What::Dir),
            (Call::Rename { old, new, how: How::Exchange }, Errno::NOENT) => {
                let end = self.end(number);
                self.name(number, end, true, Act::Any { slots: [old, new], what: What::Nothing });
                return Ok(());
            }
            (Call::Rename { old, .. }, Errno::NOENT) => (old, What::Nothing),
            (Call::Rename { new, how: How::Plain, .. }, Errno::ISDIR) => (new, What::Dir),
            (Call::Rename { new, how: How::Plain, .. }, Errno::NOTDIR) => (new, What::NoDir),
            (
                Call::Unlink { slot }
                | Call::Rmdir { slot }
                | Call::Open { slot }
                | Call::Stat { slot }
                | Call::ReadLink { slot },
                Errno::NOENT,
            ) => (slot, What::Nothing),
            (Call::Unlink { slot } | Call::Open { slot }, Errno::ISDIR) => (slot, What::Dir),
            (Call::Rmdir { slot }, Errno::NOTDIR) => (slot, What::NoDir),
            (Call::Open { slot }, Errno::LOOP) => (slot, What::Symlink),
            (Call::ReadLink { slot }, Errno::INVAL) => (slot, What::NoSymlink),
            _ => return Err(format!("{errno} is not what that call says")),
        };
        self.is(number, slot, what);
        Ok(())
    }

    /// Returns the time by which a record has happened.
    fn end(&self, number: usize) -> u64 {
        let end = self.history.records[number].answer.as_ref().map(|(end, _)| *end);
        end.map_or(u64::MAX, |end| end.saturating_add(TOGETHER))
    }

    fn is(&mut self, number: usize, slot: Slot, what: What) {
        let end = self.end(number);
        self.name(number, end, true, Act::Is { slot, what });
    }

    fn name(&mut self, number: usize, ends: u64, must: bool, act: Act) {
        let any_name = Slot::all().collect();
        let slots: Vec<Slot> = match &act {
            Act::Is { slot, .. } => vec![*slot],
            Act::Link { old, .. } | Act::Gone { old } => vec![*old],
            Act::Any { slots, .. } => slots.to_vec(),
            // The names that lead to the inode are not known beforehand.
            Act::Links { .. } => any_name,
            _ => Vec::new(),
        };
        let touches = |call: &Call| call.changes_names().iter().flatten().any(|slot| slots.contains(slot));
        let (opens, begins) = self.moments(number, touches);
        self.pieces.names.push(Piece { opens, begins, ends, must, act, record: number });
    }

    /// Returns from when a record counts as a read, and from when as a change. As a read it counts from the beginning
    /// of overlapping changes of its own mount, because that mount's kernel may hold the state from before them.
    fn moments(&self, number: usize, touches: impl Fn(&Call) -> bool) -> (u64, u64) {
        let record = &self.history.records[number];
        let changes = self.changes.get(&record.mount).into_iter().flatten();
        let out = changes.filter(|other| **other != number).map(|other| &self.history.records[*other]);
        let out = out.filter(|change| {
            let ends = change.answer.as_ref().map_or(u64::MAX, |(end, _)| end.saturating_add(TOGETHER));
            change.begin < record.begin && ends >= record.begin && touches(&change.call)
        });
        (out.map(|change| change.begin).min().unwrap_or(record.begin), record.begin)
    }

    fn mode(&mut self, file: File, number: usize, (ends, must): (u64, bool), act: Value) {
        let (opens, begins) = self.moments(number, |call| call.file() == Some(file));
        let first = self.makers.get(&file.label).map(|maker| maker.mode.into());
        let entry = self.pieces.modes.entry(file).or_insert_with(|| (first, Vec::new()));
        entry.1.push(Piece { opens, begins, ends, must, act, record: number });
    }

    fn register(&mut self, which: Which, file: File, number: usize, (ends, must): (u64, bool), act: Value) {
        let (opens, begins) = self.moments(number, |call| call.file() == Some(file));
        let all = match which {
            Which::Times => &mut self.pieces.times,
            Which::Xattrs => &mut self.pieces.xattrs,
        };
        all.entry(file).or_default().push(Piece { opens, begins, ends, must, act, record: number });
    }

    fn content(&mut self, file: File, number: usize, (ends, must): (u64, bool), act: Content) {
        let (opens, begins) = self.moments(number, |call| call.file() == Some(file));
        let piece = Piece { opens, begins, ends, must, act, record: number };
        self.pieces.contents.entry(file).or_default().push(piece);
    }
}

/// Registers without an initial value.
#[derive(Clone, Copy)]
enum Which {
    /// `None`: set by the server's clock.
    Times,
    Xattrs,
}

/// Returns the kills during a change.
fn kills_in<'h>(history: &'h History, record: &'h Record) -> impl Iterator<Item = (u64, u64)> + 'h {
    let end = record.answer.as_ref().map_or(u64::MAX, |(end, _)| *end);
    let within = move |(from, to): &&(u64, u64)| record.begin <= *to && end >= *from;
    history.kills.iter().filter(within).filter(|_| record.call.is_change()).copied()
}
