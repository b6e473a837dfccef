//! Races as readable text files.
//!
//! A script is a text of steps (`> …`), each followed by the resulting events. Running it prints the whole text again;
//! a test compares the two texts, and a person reviews the difference. For the words of a step see [`Script::step`].

use crate::world::{World, name_of};
use nigh_cache::{Config, Fh, LockSpan, NotifyLevel, OnDisconnect, Op, OpReply};
use nigh_remote::fake::{CallFilter, CallPlan};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_types::{
    Access, Call, Cookie, LeaseScope, LockKind, Name, NodeRef, OpId, Reply, SetAttr, Span, Term, WriteFlags,
};
use std::collections::BTreeMap;
use std::fmt::Write;

/// A script being run.
pub struct Script {
    world: World,
    /// Open directories and files by client and path.
    open: BTreeMap<(usize, String), Fh>,
    /// The inode of each open file.
    inos: BTreeMap<(usize, Fh), u64>,
    last: Option<(usize, OpId)>,
    host_edited: bool,
}

/// Runs a script, and returns its text with the current results.
///
/// # Panics
/// On an unknown step, or if a kernel holds wrong data.
#[must_use]
pub fn run(text: &str) -> String {
    let mut script = None;
    let mut out = String::new();
    for line in text.lines() {
        if line.starts_with('#') {
            let _ = writeln!(out, "{line}");
        } else if let Some(step) = line.strip_prefix("> ") {
            let _ = writeln!(out, "\n> {step}");
            let words: Vec<&str> = step.split_whitespace().collect();
            let script = script.get_or_insert_with(|| Script::new(&words));
            script.step(&words);
            for line in script.take_trace() {
                let _ = writeln!(out, "  {line}");
            }
        }
    }
    out
}

impl Script {
    /// Starts from the first step: `tree [term=5s] [recallable] [parts=N] [reuse] [no-births] [hints]`. `reuse`: inode
    /// numbers are reused; `no-births`: without birth times that tell such inodes apart; `hints`: nodes are found by
    /// path hints only. Grants with a term are not recalled unless the step says `recallable`.
    fn new(words: &[&str]) -> Script {
        let ends = words.iter().any(|word| word.starts_with("term="));
        let recallable = !ends || words.contains(&"recallable");
        let mut config = ModelFsConfig { recallable, ..ModelFsConfig::default() };
        for word in words.iter().skip(1) {
            match word.split_once('=') {
                None if *word == "reuse" => config.reuse_inos = true,
                None if *word == "no-births" => config.distinct_generations = false,
                None if *word == "hints" => config.by_hint_only = true,
                None if *word == "recallable" => {}
                Some(("term", term)) => config.term = Term::Limited(span(term)),
                Some(("parts", parts)) => config.chunk_entries = parts.parse().expect("a number"),
                _ => panic!("{word}: not known"),
            }
        }
        Script {
            world: World::new(config),
            open: BTreeMap::new(),
            inos: BTreeMap::new(),
            last: None,
            host_edited: false,
        }
    }

    /// `plant file|dir PATH`, `host create|mkdir|remove|rmdir PATH`, `host write PATH TEXT`, `client
    /// [pushes|none|no-epoch|fail TIME|stale]`, `advance TIME`, and for a client `A`: `A
    /// lookup|getattr|readdir|create|mkdir|unlink|chmod|rename|link PATH [PATH]`, `A cut`, `A mend`, `A lapse`, `A
    /// free-locks`, `A restore kept|forgotten`, `A hold` (holds back kernel notifications, except urgent ones), `A
    /// sleep` (all of them), `A forget`, `A drops slowly|fast` (pages), `A workers N` (limit of blocked page
    /// invalidations), `A mounts-below`, `A interrupt` (by a fatal signal), `A signal`, `A kernel [attributes]`; `A
    /// open|open-ro PATH` and then `A read|store|msync|lock|lock-wait|unlock|flush|close PATH` (`store`: into a map)
    /// and `A write PATH [TEXT [OFFSET]]`; `A truth PATH`: the file's contents; `A page PATH`: A's cached page of it.
    fn step(&mut self, words: &[&str]) {
        match words {
            ["tree", ..] => {}
            ["plant", "file", path] => {
                let now = self.world.now;
                self.world.server.edit(|tree| tree.plant_file(now, path, b"text"));
            }
            ["plant", "dir", path] => {
                let now = self.world.now;
                self.world.server.edit(|tree| tree.plant_dir(now, path));
            }
            ["host", "create", path] => {
                self.host_edited = true;
                let now = self.world.now;
                self.world.server.edit(|tree| tree.plant_file(now, path, b"host's"));
            }
            ["host", "write", path, text] => {
                self.host_edited = true;
                let node = NodeRef::without_hint(self.find(path));
                let data = text.as_bytes().to_vec();
                let flags = WriteFlags {
                    append: false,
                    kill_suidgid: false,
                    sync: false,
                    write_back: false,
                    since: None,
                };
                let call = Call::Write { node, handle: None, offset: 0, data, flags };
                let now = self.world.now;
                self.world.server.edit(|tree| tree.execute_as_host(now, call)).expect("written");
            }
            ["host", "symlink", path, target] => {
                self.host_edited = true;
                let ((dir, name), now) = (split(path), self.world.now);
                let (dir, target) = (NodeRef::without_hint(self.find(dir)), target.as_bytes().to_vec());
                let call = Call::Symlink { dir, name, target };
                self.world.server.edit(|tree| tree.execute_as_host(now, call)).expect("made");
            }
            ["host", "remove", path] => self.host_remove(path, false),
            ["host", "rmdir", path] => self.host_remove(path, true),
            ["host", "mkdir", path] => {
                self.host_edited = true;
                let now = self.world.now;
                self.world.server.edit(|tree| tree.plant_dir(now, path));
            }
            ["client"] => drop(self.world.connect(NotifyLevel::All)),
            ["client", "pushes"] => {
                let at = self.world.connect(NotifyLevel::All);
                self.world.take_pushes(at);
            }
            ["client", "none"] => drop(self.world.connect(NotifyLevel::None)),
            ["client", "no-epoch"] => drop(self.world.connect(NotifyLevel::NoEpoch)),
            ["client", "fail", time] => self.connect_with(OnDisconnect::Fail(span(time))),
            ["client", "stale"] => self.connect_with(OnDisconnect::Stale),
            ["advance", time] => self.world.advance(span(time)),
            [client, rest @ ..] => {
                let at = usize::from(client.as_bytes()[0] - b'A');
                self.client_step(at, rest);
            }
            [] => {}
        }
        self.world.settle();
        if !self.host_edited
            && let Err(lie) = self.world.check_kernels()
        {
            panic!("{words:?}: {lie}");
        }
        assert!(self.world.lost_stores.is_empty(), "{words:?}: {:?}", self.world.lost_stores);
    }

    fn host_remove(&mut self, path: &str, directory: bool) {
        self.host_edited = true;
        let now = self.world.now;
        let (dir, name) = split(path);
        self.world.server.edit(|tree| {
            let dir = NodeRef::without_hint(tree.find(dir).expect("a directory"));
            let call =
                if directory { Call::Rmdir { dir, name } } else { Call::Unlink { dir, name, keep: None } };
            tree.execute_as_host(now, call).expect("removed");
        });
    }

    fn client_step(&mut self, at: usize, words: &[&str]) {
        if self.link_step(at, words) || self.kernel_step(at, words) {
            return;
        }
        match words {
            ["open", path] => self.open_file(at, path, true),
            ["open-ro", path] => self.open_file(at, path, false),
            ["close", path] => {
                let fh = self.open.remove(&(at, (*path).to_owned())).expect("it is open");
                self.last = Some((at, self.world.send_request(at, Op::Release { fh, flock: None })));
            }
            ["signal"] => {
                let (client, op) = self.last.expect("a request");
                self.world.signal(client, op);
            }
            ["interrupt"] => {
                let (client, op) = self.last.expect("a request");
                self.world.interrupt(client, op);
            }
            ["truth", path] => {
                let (node, now) = (NodeRef::without_hint(self.find(path)), self.world.now);
                let read = Call::Read { node, handle: None, offset: 0, length: 100 };
                let Ok(Reply::Data(data)) = self.world.server.edit(|tree| tree.execute_as_host(now, read))
                else {
                    panic!("{path}: no data")
                };
                self.world.trace.push(format!("{path} is {:?}", String::from_utf8_lossy(&data)));
            }
            ["readdir", path] => self.read_whole(at, path),
            [verb, rest @ ..] => {
                let op = self.op(at, verb, rest);
                self.last = Some((at, self.world.send_request(at, op)));
            }
            [] => {}
        }
    }

    /// Executes a step of a client's remote; returns whether it was such a step.
    fn link_step(&mut self, at: usize, words: &[&str]) -> bool {
        let control = self.world.clients[at].control.clone();
        match words {
            ["plan", "nothing"] => control.plan_nothing(),
            ["plan", kind, fate] => control.plan(CallFilter::Type(type_name(kind)), fate_of(fate)),
            ["release"] => control.release(*control.held().first().expect("a call is held")),
            ["part"] => control.release_chunk(*control.held().first().expect("a listing is held")),
            ["recall", path, covers] => {
                let covers = match *covers {
                    "names" => LeaseScope::Directory,
                    "inode" => LeaseScope::Attributes,
                    _ => LeaseScope::Data,
                };
                control.recall(self.find(path), covers, &[]);
            }
            ["lose"] => control.lose("the link broke"),
            ["reconnect"] => self.world.reconnect(at),
            ["cut"] => control.cut(),
            ["mend"] => control.mend(),
            ["lapse"] => control.lapse("silence"),
            ["restore", "kept"] => control.restore(true),
            ["restore", "forgotten"] => control.restore(false),
            ["free-locks"] => control.free_locks(),
            _ => return false,
        }
        true
    }

    /// Executes a step of a client's kernel; returns whether it was such a step.
    fn kernel_step(&mut self, at: usize, words: &[&str]) -> bool {
        let client = &mut self.world.clients[at];
        match words {
            ["hold"] => client.hold_invalidations = true,
            ["sleep"] => (client.hold_invalidations, client.asleep) = (true, true),
            ["drops", "slowly"] => client.invalidates_slowly = true,
            ["drops", _] => self.world.end_slow_invalidation(at),
            ["workers", count] => client.workers = count.parse().expect("a number"),
            ["forget"] => self.world.release_notifications(at),
            ["mounts-below"] => self.world.add_submount(at),
            ["kernel"] => self.show_kernel(at),
            ["kernel", "targets"] => {
                let targets = client.kernel.page_cache.targets();
                let line =
                    |(ino, target)| format!("{}'s kernel has the target {target:?} of {ino}", name_of(at));
                let mut lines: Vec<String> = targets.map(line).collect();
                if lines.is_empty() {
                    lines.push(format!("{}'s kernel has no target", name_of(at)));
                }
                self.world.trace.extend(lines);
            }
            ["kernel", "attributes"] => self.show_attributes(at),
            ["page", path] => {
                let ino = self.inos[&(at, self.open[&(at, (*path).to_owned())])];
                let page = client.kernel.page_cache.pages().find(|(of, _)| *of == ino);
                let page = page.map(|(_, data)| String::from_utf8_lossy(data).into_owned());
                self.world.trace.push(format!("{}'s kernel has {page:?} of {path}", name_of(at)));
            }
            ["store", path] => {
                let fh = self.open[&(at, (*path).to_owned())];
                let ino = self.inos[&(at, fh)];
                self.world.store(at, ino, fh, (0, b"TEXT"));
            }
            ["msync", path] => {
                let ino = self.inos[&(at, self.open[&(at, (*path).to_owned())])];
                self.world.write_back(at, ino);
            }
            _ => return false,
        }
        true
    }

    fn connect_with(&mut self, on_disconnect: OnDisconnect) {
        self.world.connect_with(Config { on_disconnect, ..Config::default() });
    }

    /// Opens a file for reading, or for reading and writing.
    fn open_file(&mut self, at: usize, path: &str, write: bool) {
        let ino = self.find(path).ino;
        let access = Access { read: true, write, truncate: false, direct: false, sync: false, append: false };
        let op = self.world.send_request(at, Op::Open { ino, access, append: false });
        self.last = Some((at, op));
        let opened = self.world.replies.iter().find_map(|(_, of, _, answer)| match answer {
            OpReply::Opened(opened) if *of == op => Some(opened.fh),
            _ => None,
        });
        if let Some(fh) = opened {
            self.open.insert((at, path.to_owned()), fh);
            self.inos.insert((at, fh), ino);
        }
    }

    /// Builds a request on the file that was opened by that path, wherever the path leads now.
    fn op_on_open(&self, at: usize, verb: &str, path: &str, (text, offset): (&str, u64)) -> Op {
        let fh = *self.open.get(&(at, path.to_owned())).expect("it is open");
        let ino = self.inos[&(at, fh)];
        // One lock range is enough: each client is its own owner.
        let span = LockSpan { owner: 1, flock: false, start: 0, end: 99 };
        let lock = |wait| Op::SetLock { ino, fh, span, kind: LockKind::Write, pid: 1, wait };
        match verb {
            "read" => Op::Read { ino, fh, offset: 0, size: 100 },
            "write" => Op::Write { ino, fh, offset, data: text.into(), flags: WriteFlags::default() },
            "lock" => lock(false),
            "lock-wait" => lock(true),
            "unlock" => Op::Unlock { ino, span },
            _ => Op::Flush { ino, owner: 1 },
        }
    }

    fn op(&self, at: usize, verb: &str, rest: &[&str]) -> Op {
        let path = rest.first().copied().unwrap_or("/");
        let parent = || {
            let (dir, name) = split(path);
            (self.find(dir).ino, name)
        };
        match verb {
            "lookup" => {
                let (dir, name) = parent();
                Op::Lookup { dir, name }
            }
            "readlink" => Op::ReadLink { ino: self.find(path).ino },
            "getattr" => Op::GetAttr { ino: self.find(path).ino },
            "chmod" => {
                let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
                Op::SetAttr { ino: self.find(path).ino, fh: None, set }
            }
            "mkdir" => {
                let (dir, name) = parent();
                Op::Mkdir { dir, name, mode: 0o755, umask: 0 }
            }
            "create" => {
                let (dir, name) = parent();
                let access = Access {
                    read: true,
                    write: true,
                    truncate: false,
                    direct: false,
                    sync: false,
                    append: false,
                };
                Op::Create { dir, name, mode: 0o644, umask: 0, exclusive: true, access, append: false }
            }
            "read" | "write" | "lock" | "lock-wait" | "unlock" | "flush" => {
                let offset = rest.get(2).map_or(0, |offset| offset.parse().expect("a number"));
                self.op_on_open(at, verb, path, (rest.get(1).unwrap_or(&"TEXT"), offset))
            }
            "unlink" => {
                let (dir, name) = parent();
                Op::Unlink { dir, name }
            }
            "rename" => {
                let (from, name) = parent();
                let (to, new_name) = split(rest[1]);
                let to = self.find(to).ino;
                Op::Rename { from, name, to, new_name, no_replace: false, exchange: false, whiteout: false }
            }
            "link" => {
                let (dir, name) = split(rest[1]);
                Op::Link { ino: self.find(path).ino, dir: self.find(dir).ino, name }
            }
            _ => panic!("{verb}: not known"),
        }
    }

    /// Opens a directory and reads it to its end, as far as replies arrive.
    fn read_whole(&mut self, at: usize, path: &str) {
        let ino = self.find(path).ino;
        let key = (at, path.to_owned());
        if !self.open.contains_key(&key) {
            self.last = Some((at, self.world.send_request(at, Op::OpenDir { ino })));
            let opened = self.world.replies.iter().rev().find_map(|(_, _, op, answer)| match (op, answer) {
                (Op::OpenDir { ino: of }, OpReply::Opened(opened)) if *of == ino => Some(opened.fh),
                _ => None,
            });
            let Some(fh) = opened else { return };
            self.open.insert(key.clone(), fh);
        }
        let fh = self.open[&key];
        let op = Op::ReadDir { ino, fh, offset: Cookie(0), size: 1 << 16, plus: true };
        self.last = Some((at, self.world.send_request(at, op)));
    }

    fn show_kernel(&mut self, at: usize) {
        let now = self.world.now;
        let mut lines = Vec::new();
        for (dir, name, dentry) in self.world.clients[at].kernel.valid_dentries(now) {
            let left = dentry.valid_until.since(now).as_millis();
            let left = if left > 1_000_000 { "long".to_owned() } else { format!("{left} ms") };
            let what = dentry.ino.map_or("does not exist".to_owned(), |ino| format!("is {ino}"));
            lines.push(format!("{}'s kernel believes that {dir}/{name} {what}, {left}", name_of(at)));
        }
        if lines.is_empty() {
            lines.push(format!("{}'s kernel believes nothing", name_of(at)));
        }
        self.world.trace.extend(lines);
    }

    fn show_attributes(&mut self, at: usize) {
        let client = &self.world.clients[at];
        let mut lines = Vec::new();
        for believed in client.kernel.valid_attrs(self.world.now) {
            let (ino, size) = (believed.id.ino, believed.attr.size);
            lines.push(format!("{}'s kernel believes that {ino} has size {size}", name_of(at)));
        }
        self.world.trace.extend(lines);
    }

    fn find(&self, path: &str) -> nigh_types::NodeId {
        self.world.server.edit(|tree| tree.find(path)).unwrap_or_else(|| panic!("{path}: not there"))
    }

    fn take_trace(&mut self) -> Vec<String> {
        self.world.replies.retain(|(_, _, op, _)| matches!(op, Op::OpenDir { .. }));
        std::mem::take(&mut self.world.trace)
    }
}

fn split(path: &str) -> (&str, Name) {
    let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
    (dir, Name::new(name.as_bytes()).expect("a name"))
}

fn span(text: &str) -> Span {
    if let Some(ms) = text.strip_suffix("ms") {
        return Span::from_millis(ms.parse().expect("a number"));
    }
    Span::from_secs(text.strip_suffix('s').expect("a time").parse().expect("a number"))
}

fn type_name(kind: &str) -> &'static str {
    [
        "lookup", "getattr", "list", "create", "mkdir", "unlink", "setattr", "rename", "link", "open",
        "read", "write", "reopen", "lock",
    ]
    .into_iter()
    .find(|known| *known == kind)
    .unwrap_or_else(|| panic!("{kind}: not known"))
}

fn fate_of(words: &str) -> CallPlan {
    let mut fate = CallPlan::default();
    for word in words.split(',') {
        match word {
            "hold-call" => fate.hold_call = true,
            "hold-reply" => fate.hold_reply = true,
            "hold-both" => (fate.hold_call, fate.hold_reply) = (true, true),
            "ungranted" => fate.ungranted = true,
            "normal" => {}
            word => fate.answered_after = span(word),
        }
    }
    fate
}
