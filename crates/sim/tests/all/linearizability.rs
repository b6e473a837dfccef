//! The linearizability checker accepts histories that some order explains, and refuses the rest. Inputs are
//! hand-written texts in `histories`, and random sequential calls on one tree, whose times are made to overlap.

use std::path::Path;

use nigh_remote::model_fs::ModelFs;
use nigh_sim::history::{
    Call, CallResult, DIRS, File, History, Kind, LAST_SET_TIME, NAMES, ObservedAttrs, Record, RenameMode,
    Slot,
};
use nigh_sim::history::{judge, judge_mounted, parse};
use nigh_sim::random::Dice;
use nigh_types::{
    Access, Call as Asked, Credentials, Errno, Name, NodeId, NodeRef, Reply, Request, SetAttr, SetTime, Time,
    Timestamp, WriteFlags,
};

fn texts(folder: &str) -> Vec<(String, String)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("histories").join(folder);
    let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 5, "the histories are there");
    paths
        .into_iter()
        .map(|path| (path.display().to_string(), std::fs::read_to_string(&path).unwrap()))
        .collect()
}

#[test]
fn linearizable_histories_are_accepted() {
    for (name, text) in texts("explained") {
        let history = parse(&text).unwrap_or_else(|bad| panic!("{name}: {bad}"));
        let report = judge_mounted(&history).unwrap_or_else(|violation| panic!("{name}: {violation}"));
        assert_eq!(report.undecided, 0, "{name}");
    }
}

#[test]
fn non_linearizable_histories_are_refused_at_violating_record() {
    for (name, text) in texts("refused") {
        let at = text.lines().find_map(|line| line.strip_prefix("# at: ")).expect("it says where");
        let history = parse(&text).unwrap_or_else(|bad| panic!("{name}: {bad}"));
        let violation = judge_mounted(&history).expect_err(&name);
        assert_eq!(history.records[violation.record].to_string(), at, "{name}: {violation}");
    }
}

/// Many changes in doubt can take effect in any order, or not at all.
#[test]
fn history_with_too_many_orders_is_undecided() {
    let names: Vec<String> =
        ["a", "b"].iter().flat_map(|dir| (0..4).map(move |n| format!("{dir}{n}"))).collect();
    let mut text = String::new();
    let file = |number: usize| format!("{}@{}", 1000 + number, 10 + number);
    for (number, name) in names.iter().enumerate() {
        let (label, begin) = (1000 + number, 10 * number + 1);
        text += &format!("0.0 {begin} {} create {name} {label} 644 = opened {}\n", begin + 1, file(number));
    }
    for (number, name) in names.iter().enumerate() {
        for other in &names[number + 1..] {
            text += &format!("0.1 200 - exchange {name} {other} = ?\n");
        }
    }
    text += &format!("0.0 300 301 stat a0 = seen {} file 1 644 0 now\n", file(7));
    let report = judge_mounted(&parse(&text).unwrap()).unwrap();
    assert_eq!(report.undecided, 1);
}

#[test]
fn history_text_round_trips() {
    for (name, text) in texts("explained").into_iter().chain(texts("refused")) {
        let history = parse(&text).unwrap();
        assert_eq!(parse(&history.to_string()), Ok(history), "{name}");
    }
    for line in [
        "0.0 1 2 stat a4 = done",
        "0.0 1 2 stat a0",
        "0.0 1 2 stat a0 = seen",
        "kill 1",
        "0.0 1 - stat a0 = done",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

fn seeds(usual: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let first = number("NIGH_SEED").unwrap_or(0);
    first..first + number("NIGH_SEEDS").unwrap_or(usual)
}

/// Sequential replies of one tree are accepted, however much the calls' times overlap.
#[test]
fn sequential_results_of_one_tree_are_accepted() {
    for seed in seeds(60) {
        let mut world = World::new(seed);
        let history = world.history(150, 6_000);
        judge(&history).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
    }
}

/// A false result of one read is refused, if no other call is in flight.
#[test]
fn history_with_one_false_result_is_refused() {
    for seed in seeds(20) {
        let mut world = World::new(seed);
        let history = world.history(80, 0);
        judge(&history).unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        for number in 0..history.records.len() {
            let mut falsified = history.clone();
            let (_, answer) = falsified.records[number].response.as_mut().expect("all is known");
            if !falsify(&mut world.dice, history.records[number].call, answer) {
                continue;
            }
            assert!(judge(&falsified).is_err(), "seed {seed}: {}", falsified.records[number]);
        }
    }
}

/// Falsifies a result; false if the result has no wrong value.
fn falsify(dice: &mut Dice, call: Call, answer: &mut CallResult) -> bool {
    match (call, answer) {
        (_, CallResult::Attributes(seen)) => match dice.below(4) {
            0 => seen.nlink += 1,
            1 if seen.kind == Kind::File => seen.mode ^= 1,
            2 if seen.kind == Kind::File => seen.size += 1,
            _ if seen.kind == Kind::File => seen.mtime = seen.mtime.map_or(Some(1), |_| None),
            _ => seen.nlink = 0,
        },
        (_, CallResult::Value(value)) => *value = value.map_or(Some(1), |value| Some(value + 1)),
        (_, CallResult::Entries(entries)) if entries.is_empty() => entries.push((0, 1)),
        (_, CallResult::Entries(entries)) => drop(entries.pop()),
        (Call::Stat { .. } | Call::Open { .. } | Call::ReadLink { .. }, answer @ CallResult::Failed(_)) => {
            *answer = CallResult::Failed(Errno::IO);
        }
        (Call::Open { .. } | Call::ReadLink { .. }, answer) => *answer = CallResult::Failed(Errno::NOENT),
        _ => return false,
    }
    true
}

fn renaming((from, name): (NodeRef, Name), (to, new_name): (NodeRef, Name), how: RenameMode) -> Asked {
    let (no_replace, exchange, whiteout) = (how == RenameMode::NoReplace, how == RenameMode::Exchange, false);
    Asked::Rename { from, name, to, new_name, no_replace, exchange, whiteout, keep: None }
}

/// One tree with two directories, and its random calls.
struct World {
    tree: ModelFs,
    dice: Dice,
    dirs: Vec<NodeId>,
    files: Vec<(File, NodeId)>,
    serial: u32,
}

impl World {
    fn new(seed: u64) -> World {
        let mut tree = ModelFs::default();
        let dirs = (0..DIRS).map(|dir| tree.plant_dir(Time(LATE), &format!("dir-{dir}"))).collect();
        World { tree, dice: Dice::new(seed), dirs, files: Vec::new(), serial: 0 }
    }

    /// Makes one call per two microseconds; it begins and ends up to `spread` ns earlier and later.
    fn history(&mut self, calls: u64, spread: u64) -> History {
        let mut history = History::default();
        for number in 1..=calls {
            let call = self.call();
            let answer = self.answer(call);
            // Times closer than 1 µs count as overlapping.
            let at = 1_000_000 + number * 2_000;
            let (before, after) = (self.dice.below(spread + 1), self.dice.below(spread + 1));
            let mount = u8::try_from(self.dice.below(3)).unwrap();
            let answer = Some((at + after, answer));
            history.records.push(Record { mount, worker: 0, begin: at - before, response: answer, call });
        }
        history
    }

    fn slot(&mut self) -> Slot {
        Slot(u8::try_from(self.dice.below(u64::from(Slot::COUNT))).unwrap())
    }

    fn call(&mut self) -> Call {
        self.serial += 1;
        let (slot, new, label) = (self.slot(), self.slot(), self.serial);
        let how = [RenameMode::Plain, RenameMode::NoReplace, RenameMode::Exchange]
            [usize::try_from(self.dice.below(3)).unwrap()];
        let new = if new == slot { Slot((new.0 + 1) % Slot::COUNT) } else { new };
        let file = match u64::try_from(self.files.len()).unwrap() {
            0 => return Call::Create { slot, label, mode: 0o644 },
            count => self.files[usize::try_from(self.dice.below(count)).unwrap()].0,
        };
        let value = u64::from(self.serial) + 1000;
        match self.dice.below(24) {
            0 | 1 => Call::Create { slot, label, mode: 0o600 },
            2 => Call::Mkdir { slot, label },
            3 => Call::Symlink { slot, label },
            4 => Call::Link { old: slot, new },
            5 => Call::Unlink { slot },
            6 => Call::Rmdir { slot },
            7 | 8 => Call::Rename { old: slot, new, how },
            9 => Call::Open { slot },
            10..=12 => Call::Stat { slot },
            13 => Call::ReadLink { slot },
            14 => Call::List { dir: slot.dir() },
            15 => Call::Fstat { file },
            16 => Call::Chmod { file, mode: 0o400 + self.serial % 0o200 },
            17 => Call::Truncate { file, size: if value.is_multiple_of(3) { 0 } else { value } },
            18 => Call::Times { file, secs: i64::from(self.serial) },
            19 => Call::SetXattr { file, value },
            20 => Call::GetXattr { file },
            21 => Call::Write { file, word: value },
            22 => Call::RemoveXattr { file },
            _ => Call::Read { file },
        }
    }

    fn ask(&mut self, label: u32, call: Asked) -> Result<Reply, Errno> {
        let credentials = Credentials { uid: 0, gid: label, groups: vec![], privileges: None };
        self.tree.execute(Time(LATE), &Request { credentials, mutation_id: None, call }).remove(0).result
    }

    fn place(&self, slot: Slot) -> (NodeRef, Name) {
        let dir = self.dirs[usize::from(slot.dir())];
        (NodeRef::without_hint(dir), Name::new(format!("n{}", slot.name()).as_bytes()).unwrap())
    }

    fn found(&self, slot: Slot) -> Option<NodeId> {
        self.tree.find(&format!("dir-{}/n{}", slot.dir(), slot.name()))
    }

    fn seen(&self, node: NodeId) -> ObservedAttrs {
        let attr = self.tree.attr(node).expect("a node that is there");
        let kind = match attr.kind() {
            nigh_types::Kind::Directory => Kind::Dir,
            nigh_types::Kind::Symlink => Kind::Symlink,
            _ => Kind::File,
        };
        let (secs, _) = attr.mtime.pair();
        let mtime = Some(secs).filter(|secs| *secs <= LAST_SET_TIME);
        let file = File { label: attr.gid, ino: node.ino };
        ObservedAttrs {
            file,
            kind,
            nlink: attr.nlink.into(),
            mode: attr.mode & 0o7777,
            size: attr.size,
            mtime,
        }
    }

    fn node(&self, file: File) -> NodeRef {
        NodeRef::without_hint(self.files.iter().find(|(known, _)| *known == file).expect("it was opened").1)
    }

    fn answer(&mut self, call: Call) -> CallResult {
        match self.told(call) {
            Ok(answer) => answer,
            Err(errno) => CallResult::Failed(errno),
        }
    }

    /// Returns the result as a kernel would, which checks file types itself.
    fn told(&mut self, call: Call) -> Result<CallResult, Errno> {
        match call {
            Call::Create { slot, label, mode } => {
                let (dir, name) = self.place(slot);
                let access = Access {
                    read: true,
                    write: true,
                    truncate: false,
                    direct: false,
                    sync: false,
                    append: false,
                };
                let asked = Asked::Create { dir, name, mode, umask: 0, exclusive: true, access };
                let Reply::Created { entry, .. } = self.ask(label, asked)? else { panic!("not made") };
                let file = File { label, ino: entry.id.ino };
                self.files.push((file, entry.id));
                return Ok(CallResult::Opened(file));
            }
            Call::Mkdir { slot, label } => {
                let (dir, name) = self.place(slot);
                self.ask(label, Asked::Mkdir { dir, name, mode: 0o755, umask: 0 })?;
            }
            Call::Symlink { slot, label } => {
                let (dir, name) = self.place(slot);
                self.ask(label, Asked::Symlink { dir, name, target: label.to_string().into_bytes() })?;
            }
            Call::Link { old, new } => {
                let node = self.found(old).ok_or(Errno::NOENT)?;
                let (dir, name) = self.place(new);
                self.ask(0, Asked::Link { node: NodeRef::without_hint(node), dir, name })?;
            }
            Call::Unlink { slot } => {
                let (dir, name) = self.place(slot);
                self.ask(0, Asked::Unlink { dir, name, keep: None })?;
            }
            Call::Rmdir { slot } => {
                let (dir, name) = self.place(slot);
                self.ask(0, Asked::Rmdir { dir, name })?;
            }
            Call::Rename { old, new, how } => {
                let ((from, name), (to, new_name)) = (self.place(old), self.place(new));
                self.ask(0, renaming((from, name), (to, new_name), how))?;
            }
            Call::Open { slot } => return self.opened(slot),
            Call::Stat { slot } => {
                let node = self.found(slot).ok_or(Errno::NOENT)?;
                return Ok(CallResult::Attributes(self.seen(node)));
            }
            Call::ReadLink { slot } => {
                let node = self.found(slot).ok_or(Errno::NOENT)?;
                let Reply::Target(target) =
                    self.ask(0, Asked::ReadLink { node: NodeRef::without_hint(node) })?
                else {
                    panic!("not a target")
                };
                return Ok(CallResult::Target(String::from_utf8(target.into()).unwrap().parse().unwrap()));
            }
            Call::List { dir } => {
                let slots = (0..NAMES).map(|name| (name, self.found(Slot::new(dir, name))));
                return Ok(CallResult::Entries(
                    slots.filter_map(|(name, node)| Some((name, node?.ino))).collect(),
                ));
            }
            _ => return self.told_of(call, call.file().expect("the rest go by a descriptor")),
        }
        Ok(CallResult::Done)
    }

    fn opened(&mut self, slot: Slot) -> Result<CallResult, Errno> {
        let node = self.found(slot).ok_or(Errno::NOENT)?;
        let seen = self.seen(node);
        match seen.kind {
            Kind::Dir => Err(Errno::ISDIR),
            Kind::Symlink => Err(Errno::LOOP),
            Kind::File => Ok(CallResult::Opened(seen.file)),
        }
    }

    fn told_of(&mut self, call: Call, file: File) -> Result<CallResult, Errno> {
        let node = self.node(file);
        let set = |set| Asked::SetAttr { node: node.clone(), handle: None, set };
        let xattr = b"user.word".to_vec();
        let asked = match call {
            Call::Fstat { .. } => return Ok(CallResult::Attributes(self.seen(node.node))),
            Call::Chmod { mode, .. } => set(SetAttr { mode: Some(mode), ..SetAttr::default() }),
            Call::Truncate { size, .. } => set(SetAttr { size: Some(size), ..SetAttr::default() }),
            Call::Times { secs, .. } => {
                let mtime = Some(SetTime::At(Timestamp { secs, nanos: 0 }));
                set(SetAttr { mtime, ..SetAttr::default() })
            }
            Call::SetXattr { value, .. } => {
                let value = value.to_string().into_bytes();
                Asked::SetXattr { node, name: xattr, value, flags: 0, kill_sgid: false }
            }
            Call::RemoveXattr { .. } => Asked::RemoveXattr { node, name: xattr },
            Call::GetXattr { .. } => Asked::Xattr { node, name: xattr },
            Call::Write { word, .. } => {
                let (data, flags) = (word.to_le_bytes().to_vec(), WriteFlags::default());
                Asked::Write { node, handle: None, offset: 0, data, flags }
            }
            _ => Asked::Read { node, handle: None, offset: 0, length: 8 },
        };
        match (self.ask(0, asked), call) {
            (Err(Errno::NODATA), Call::GetXattr { .. }) => Ok(CallResult::Value(None)),
            (Err(Errno::NODATA), Call::RemoveXattr { .. }) => Ok(CallResult::Done),
            (Err(errno), _) => Err(errno),
            (Ok(Reply::Value(value)), _) => {
                Ok(CallResult::Value(Some(String::from_utf8(value).unwrap().parse().unwrap())))
            }
            (Ok(Reply::Data(data)), _) => {
                Ok(CallResult::Value(data.first_chunk().map(|word| u64::from_le_bytes(*word))))
            }
            (Ok(_), _) => Ok(CallResult::Done),
        }
    }
}

/// In 2023: later than every time that a call sets.
const LATE: u64 = 1_700_000_000_000_000_000;
