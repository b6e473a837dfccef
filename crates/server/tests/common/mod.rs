//! An exported temporary directory, and helpers to call it.
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod beside;
pub mod client;
pub mod other;
pub mod raw;
pub mod world;

use nigh_server::{Export, ExportOptions, SessionFiles};
use nigh_types::*;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub struct Exported {
    pub dir: TempDir,
    pub state: TempDir,
    pub export: Export,
    pub files: SessionFiles,
    pub root: NodeId,
}

pub const READ: Access =
    Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
pub const BOTH: Access = Access { write: true, ..READ };

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether a test that needs root can run; prints a note if it cannot.
pub fn needs_root(test: &str) -> bool {
    if !is_root() {
        println!("SKIPPED: {test} needs root");
    }
    is_root()
}

pub fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

pub fn mkdir(dir: &NodeRef, text: &str) -> Call {
    Call::Mkdir { dir: dir.clone(), name: name(text), mode: 0o700, umask: 0 }
}

/// Appends a record of 16 bytes.
pub fn append(node: &NodeRef, handle: Handle, record: u64) -> Call {
    let flags = WriteFlags { append: true, ..WriteFlags::default() };
    let data = format!("{record:015}\n").into_bytes();
    Call::Write { node: node.clone(), handle: Some(handle), offset: 0, data, flags }
}

/// A write lock on the whole range of a file.
pub fn lock(node: &NodeRef, owner: u64, wait: bool, reclaim: bool) -> Call {
    let (kind, start, end) = (LockKind::Write, 0, u64::MAX);
    Call::Lock { node: node.clone(), owner, flock: false, kind, start, end, wait, pid: 1, reclaim }
}

/// Waits up to 20 s for a condition.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < give_up, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn me() -> Credentials {
    Credentials {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: vec![],
        privileges: None,
    }
}

pub fn open(path: &Path, state: &Path) -> (Export, SessionFiles, NodeId) {
    let export = Export::open(path, state, ExportOptions::default()).unwrap();
    let files = SessionFiles::new(64, Term::Limited(Span::from_secs(5)));
    let root = export.session(&files).unwrap().root;
    (export, files, root)
}

impl Exported {
    pub fn new() -> Exported {
        Exported::of(tempfile::tempdir().unwrap())
    }

    pub fn of(dir: TempDir) -> Exported {
        let state = tempfile::tempdir().unwrap();
        let (export, files, root) = open(dir.path(), state.path());
        Exported { dir, state, export, files, root }
    }

    /// An export with a client that is vouched for or not: whether its kernel is trusted to have checked access.
    pub fn vouched(vouched: bool) -> Exported {
        Exported::new().of_peer(vouched)
    }

    /// Replaces the session by one of another client.
    pub fn of_peer(self, vouched: bool) -> Exported {
        let x = self;
        let files = SessionFiles::new(64, Term::Limited(Span::from_secs(5))).vouched(vouched);
        let root = x.export.session(&files).unwrap().root;
        Exported { files, root, ..x }
    }

    /// Opens the export again, as a restarted server does.
    pub fn reopen(self) -> Exported {
        let Exported { dir, state, export, files, .. } = self;
        drop((export, files));
        let (export, files, root) = open(dir.path(), state.path());
        Exported { dir, state, export, files, root }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn responses(&self, who: &Credentials, call: Call) -> Vec<Response> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let sequence = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        let name = call.is_mutation().then_some(MutationId { client: 1, incarnation: 1, sequence });
        let request = Request { credentials: who.clone(), mutation_id: name, call };
        let mut all = Vec::new();
        self.export.execute(&self.files, CallId(sequence), request, &mut |response| all.push(response));
        all
    }

    pub fn response(&self, call: Call) -> Response {
        self.response_as(&me(), call)
    }

    pub fn response_as(&self, who: &Credentials, call: Call) -> Response {
        let mut all = self.responses(who, call);
        assert_eq!(all.len(), 1);
        let one = all.remove(0);
        assert!(one.last);
        one
    }

    pub fn call(&self, call: Call) -> Result<Reply, Errno> {
        self.response(call).result
    }

    pub fn entry(&self, dir: &NodeRef, text: &str) -> Option<Entry> {
        match self.call(Call::Lookup { dir: dir.clone(), name: name(text) }) {
            Ok(Reply::Entry(entry)) => entry,
            other => panic!("{other:?}"),
        }
    }

    pub fn top(&self) -> NodeRef {
        NodeRef::without_hint(self.root)
    }

    /// Resolves a path, with the hint that a client would give.
    pub fn place(&self, path: &str) -> NodeRef {
        let mut at = self.top();
        for part in path.split('/') {
            let entry = self.entry(&at, part).unwrap_or_else(|| panic!("no {part} of {path}"));
            at = NodeRef { node: entry.id, path_hint: Some((at.node, name(part))) };
        }
        at
    }

    pub fn attr(&self, place: &NodeRef) -> Result<Attr, Errno> {
        match self.call(Call::GetAttr { node: place.clone() })? {
            Reply::Attr(id, attr) => {
                assert_eq!(id, place.node);
                Ok(attr)
            }
            other => panic!("{other:?}"),
        }
    }

    pub fn create(&self, dir: &NodeRef, text: &str, mode: u32) -> (NodeRef, Handle) {
        let call = Call::Create {
            dir: dir.clone(),
            name: name(text),
            mode,
            umask: 0o022,
            exclusive: true,
            access: BOTH,
        };
        match self.call(call) {
            Ok(Reply::Created { entry, handle: Some(handle), existed: false }) => {
                (NodeRef { node: entry.id, path_hint: Some((dir.node, name(text))) }, handle)
            }
            other => panic!("{other:?}"),
        }
    }

    pub fn read(&self, node: &NodeRef, handle: Option<Handle>) -> Result<Vec<u8>, Errno> {
        match self.call(Call::Read { node: node.clone(), handle, offset: 0, length: 1 << 20 })? {
            Reply::Data(data) => Ok(data),
            other => panic!("{other:?}"),
        }
    }

    pub fn dirents(&self, dir: &NodeRef) -> Vec<Dirent> {
        let told = self.responses(&me(), Call::ListNames { dir: dir.clone(), after: Cookie(0) });
        let part = |response: Response| match response.result {
            Ok(Reply::Dirents(part)) => part,
            other => panic!("{other:?}"),
        };
        told.into_iter().flat_map(part).collect()
    }

    pub fn list(&self, dir: &NodeRef) -> Vec<(Name, Entry)> {
        let all = self.responses(&me(), Call::List { dir: dir.clone() });
        let count = all.len();
        let mut entries = Vec::new();
        for (at, response) in all.into_iter().enumerate() {
            assert_eq!(response.last, at + 1 == count);
            match response.result {
                Ok(Reply::Listed(part)) => entries.extend(part.entries),
                other => panic!("{other:?}"),
            }
        }
        entries
    }
}
