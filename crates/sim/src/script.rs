//! Races as readable texts.
//!
//! A script is a text of steps (`> …`), each followed by what happens. Running it writes the same text
//! again; a test compares the two, and a person reviews the difference. Names of the words: see
//! [`Script::step`].

use crate::world::{World, name_of, short};
use nigh_cache::{Answer, Fh, Level, Op};
use nigh_remote::fake::{Fate, Which};
use nigh_remote::tree::TreeConfig;
use nigh_types::{Access, Call, Cookie, Covers, Name, OpId, Place, SetAttr, Span, Term};
use std::collections::BTreeMap;
use std::fmt::Write;

/// A script being run.
pub struct Script {
    world: World,
    /// Open directories and files by client and path.
    open: BTreeMap<(usize, String), Fh>,
    last: Option<(usize, OpId)>,
    host_edited: bool,
}

/// Runs a text and writes it again with what happens now.
///
/// # Panics
/// On a step that is not understood, or when a kernel believes what is not so.
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
    /// From the first step: `tree [term=5s] [recallable] [parts=N] [reuse]` (inode numbers are given again). Grants
    /// that end by themselves are not recalled unless it says so.
    fn new(words: &[&str]) -> Script {
        let ends = words.iter().any(|word| word.starts_with("term="));
        let recallable = !ends || words.contains(&"recallable");
        let mut config = TreeConfig { recallable, ..TreeConfig::default() };
        for word in words.iter().skip(1) {
            match word.split_once('=') {
                None if *word == "reuse" => config.reuse_inos = true,
                None if *word == "recallable" => {}
                Some(("term", term)) => config.term = Term::Limited(span(term)),
                Some(("parts", parts)) => config.part_entries = parts.parse().expect("a number"),
                _ => panic!("{word}: not known"),
            }
        }
        Script { world: World::new(config), open: BTreeMap::new(), last: None, host_edited: false }
    }

    /// `plant file|dir PATH`, `host create|mkdir|remove|rmdir PATH`, `client [none|no-epoch]`, `advance TIME`, and for a
    /// client `A`: `A lookup|getattr|readdir|create|mkdir|unlink|chmod|rename|link|read PATH [PATH]`,
    /// `A plan TYPE FATE`, `A release|part TYPE`, `A recall PATH names|inode|data`, `A lose`, `A reconnect`,
    /// `A hold`, `A forget`, `A mounts-below`, `A interrupt`, `A kernel`.
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
            ["host", "remove", path] => self.host_remove(path, false),
            ["host", "rmdir", path] => self.host_remove(path, true),
            ["host", "mkdir", path] => {
                self.host_edited = true;
                let now = self.world.now;
                self.world.server.edit(|tree| tree.plant_dir(now, path));
            }
            ["client"] => drop(self.world.connect(Level::All)),
            ["client", "none"] => drop(self.world.connect(Level::None)),
            ["client", "no-epoch"] => drop(self.world.connect(Level::NoEpoch)),
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
    }

    fn host_remove(&mut self, path: &str, directory: bool) {
        self.host_edited = true;
        let now = self.world.now;
        let (dir, name) = split(path);
        self.world.server.edit(|tree| {
            let dir = Place::bare(tree.find(dir).expect("a directory"));
            let call =
                if directory { Call::Rmdir { dir, name } } else { Call::Unlink { dir, name, keep: None } };
            tree.beside(now, call).expect("removed");
        });
    }

    fn client_step(&mut self, at: usize, words: &[&str]) {
        match words {
            ["plan", kind, fate] => {
                let plan = fate_of(fate);
                self.world.clients[at].control.plan(Which::Type(type_name(kind)), plan);
            }
            ["plan", "nothing"] => self.world.clients[at].control.plan_nothing(),
            ["release"] => {
                let control = self.world.clients[at].control.clone();
                let held = control.held();
                control.release(*held.first().expect("a call is held"));
            }
            ["part"] => {
                let control = self.world.clients[at].control.clone();
                control.release_part(*control.held().first().expect("a listing is held"));
            }
            ["recall", path, covers] => {
                let node = self.find(path);
                let covers = match *covers {
                    "names" => Covers::Names,
                    "inode" => Covers::Inode,
                    _ => Covers::Data,
                };
                self.world.clients[at].control.recall(node, covers, &[]);
            }
            ["lose"] => self.world.clients[at].control.lose("the link broke"),
            ["reconnect"] => self.world.reconnect(at),
            ["hold"] => self.world.clients[at].hold_invalidations = true,
            ["mounts-below"] => self.world.mount_below(at),
            ["forget"] => self.world.let_invalidate(at),
            ["interrupt"] => {
                let (client, op) = self.last.expect("a request");
                self.world.interrupt(client, op);
            }
            ["kernel"] => self.show_kernel(at),
            ["readdir", path] => self.read_whole(at, path),
            [verb, rest @ ..] => {
                let op = self.op(verb, rest);
                self.last = Some((at, self.world.ask(at, op)));
            }
            [] => {}
        }
    }

    fn op(&self, verb: &str, rest: &[&str]) -> Op {
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
                let access = Access { read: true, write: true, truncate: false, direct: false, sync: false };
                Op::Create { dir, name, mode: 0o644, umask: 0, exclusive: true, access, append: false }
            }
            "unlink" => {
                let (dir, name) = parent();
                Op::Unlink { dir, name }
            }
            "rename" => {
                let (from, name) = parent();
                let (to, new_name) = split(rest[1]);
                let to = self.find(to).ino;
                Op::Rename { from, name, to, new_name, no_replace: false, exchange: false }
            }
            "link" => {
                let (dir, name) = split(rest[1]);
                Op::Link { ino: self.find(path).ino, dir: self.find(dir).ino, name }
            }
            _ => panic!("{verb}: not known"),
        }
    }

    /// Opens a directory and reads it to its end, as far as it comes.
    fn read_whole(&mut self, at: usize, path: &str) {
        let ino = self.find(path).ino;
        let key = (at, path.to_owned());
        if !self.open.contains_key(&key) {
            self.last = Some((at, self.world.ask(at, Op::OpenDir { ino })));
            let opened = self.world.answers.iter().rev().find_map(|(_, _, op, answer)| match (op, answer) {
                (Op::OpenDir { ino: of }, Answer::Opened(opened)) if *of == ino => Some(opened.fh),
                _ => None,
            });
            let Some(fh) = opened else { return };
            self.open.insert(key.clone(), fh);
        }
        let fh = self.open[&key];
        let op = Op::ReadDir { ino, fh, offset: Cookie(0), size: 1 << 16, plus: true };
        self.last = Some((at, self.world.ask(at, op)));
    }

    fn show_kernel(&mut self, at: usize) {
        let now = self.world.now;
        let mut lines = Vec::new();
        for (dir, name, dentry) in self.world.clients[at].kernel.names(now) {
            let left = dentry.until.since(now).as_millis();
            let left = if left > 1_000_000 { "long".to_owned() } else { format!("{left} ms") };
            let what = dentry.ino.map_or("does not exist".to_owned(), |ino| format!("is {ino}"));
            lines.push(format!("{}'s kernel believes that {dir}/{name} {what}, {left}", name_of(at)));
        }
        if lines.is_empty() {
            lines.push(format!("{}'s kernel believes nothing", name_of(at)));
        }
        self.world.trace.extend(lines);
    }

    fn find(&self, path: &str) -> nigh_types::NodeId {
        self.world.server.edit(|tree| tree.find(path)).unwrap_or_else(|| panic!("{path}: not there"))
    }

    fn take_trace(&mut self) -> Vec<String> {
        self.world.answers.retain(|(_, _, op, _)| matches!(op, Op::OpenDir { .. }));
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
    ["lookup", "getattr", "list", "create", "mkdir", "unlink", "setattr", "rename", "link", "open", "read"]
        .into_iter()
        .find(|known| *known == kind)
        .unwrap_or_else(|| panic!("{kind}: not known"))
}

fn fate_of(word: &str) -> Fate {
    let mut fate = Fate::default();
    match word {
        "hold-call" => fate.hold_call = true,
        "hold-reply" => fate.hold_reply = true,
        "ungranted" => fate.ungranted = true,
        "normal" => {}
        word => fate.answered_after = span(word),
    }
    fate
}

/// For messages of tests.
#[must_use]
pub fn describe(answer: &Answer) -> String {
    short(answer)
}
