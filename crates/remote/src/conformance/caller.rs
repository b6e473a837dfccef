//! Makes calls for the cases, and checks the rules that hold for every response.

use super::Harness;
use crate::{Event, Remote, SessionParams};
use nigh_types::{
    Access, Attr, Call, CallId, Entry, Errno, Handle, Kind, LeaseScope, MutationId, Name, NodeId, NodeRef,
    Reply, Request, Response, SetAttr, Timestamp, WriteFlags,
};
use std::collections::BTreeMap;

pub(super) const READ_WRITE: Access =
    Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };

/// A listed entry.
pub(super) struct ListedEntry {
    pub id: NodeId,
    /// Set if the remote sends attributes in listings.
    pub attr: Option<Attr>,
    pub no_xattrs: bool,
}

pub(super) struct Caller<'a> {
    harness: &'a mut dyn Harness,
    remote: Box<dyn Remote>,
    pub(super) session: SessionParams,
    next_call: u64,
    sequence: u64,
    responses: BTreeMap<CallId, Vec<Response>>,
    calls: BTreeMap<CallId, Call>,
}

pub(super) fn name(bytes: &[u8]) -> Name {
    Name::new(bytes).expect("a case uses proper names")
}

/// Reference to a node by its directory and name.
pub(super) fn at(dir: &NodeRef, leaf: &[u8], node: NodeId) -> NodeRef {
    NodeRef { node, path_hint: Some((dir.node, name(leaf))) }
}

/// Attributes without those that a filesystem may change later by itself.
pub(super) fn steady(attr: Attr) -> Attr {
    Attr { blocks: 0, atime: Timestamp::default(), ..attr }
}

impl<'a> Caller<'a> {
    pub(super) fn attach(harness: &'a mut dyn Harness) -> Caller<'a> {
        let mut remote = harness.attach();
        let mut events = harness.pump(&mut *remote).into_iter();
        let Some(Event::Attached(session)) = events.next() else {
            panic!("the first event of a remote is that it is attached")
        };
        assert_eq!(events.next(), None, "nothing comes unasked after attaching");
        assert!(session.root_attr.is_dir(), "the root is a directory");
        let (responses, calls) = (BTreeMap::new(), BTreeMap::new());
        Caller { harness, remote, session, next_call: 1, sequence: 1, responses, calls }
    }

    pub(super) fn root(&self) -> NodeRef {
        NodeRef::without_hint(self.session.root)
    }

    /// Sends a call without waiting.
    pub(super) fn start(&mut self, call: Call) -> CallId {
        let id = CallId(self.next_call);
        self.next_call += 1;
        let name = call.is_mutation().then(|| {
            self.sequence += 1;
            MutationId { client: 7, incarnation: 7, sequence: self.sequence - 1 }
        });
        self.calls.insert(id, call.clone());
        let request = Request { credentials: self.harness.credentials(), mutation_id: name, call };
        self.remote.handle_call(self.harness.now(), id, request);
        id
    }

    /// Cancels a started call.
    pub(super) fn cancel(&mut self, id: CallId) {
        self.remote.handle_cancel(self.harness.now(), id);
    }

    /// All responses to a started call.
    #[track_caller]
    pub(super) fn finish(&mut self, id: CallId) -> Vec<Response> {
        while self.responses.get(&id).and_then(|parts| parts.last()).is_none_or(|part| !part.last) {
            let events = self.harness.pump(&mut *self.remote);
            assert!(!events.is_empty(), "no answer to {:?}", self.calls[&id]);
            for event in events {
                self.take(event);
            }
        }
        let responses = self.responses.remove(&id).expect("it was just looked at");
        let call = self.calls.remove(&id).expect("the call was started");
        check_grants(&call, &responses);
        responses
    }

    /// Responses to a running prefetch, once this many directories have come.
    #[track_caller]
    pub(super) fn so_far(&mut self, id: CallId, dirs: usize) -> Vec<Response> {
        let whole = |response: &Response| match &response.result {
            Ok(Reply::Prefetched(steps)) => steps.iter().filter(|step| step.last).count(),
            _ => 0,
        };
        while self.responses.get(&id).is_none_or(|parts| parts.iter().map(whole).sum::<usize>() < dirs) {
            let events = self.harness.pump(&mut *self.remote);
            assert!(!events.is_empty(), "no more of {:?}", self.calls[&id]);
            events.into_iter().for_each(|event| self.take(event));
        }
        self.responses[&id].clone()
    }

    #[track_caller]
    fn take(&mut self, event: Event) {
        match event {
            Event::Response { call, response } => {
                let parts = self.responses.entry(call).or_default();
                assert!(self.calls.contains_key(&call), "a response to a call that has none outstanding");
                assert!(parts.last().is_none_or(|part| !part.last), "a response after the last one");
                parts.push(response);
            }
            Event::Recall(recall) => self.remote.handle_acknowledge(self.harness.now(), recall.id),
            Event::UpdatePrepare(hold) => self.remote.handle_acknowledge(self.harness.now(), hold.id),
            Event::UpdateCommit(_) => {}
            Event::Attached(_) => panic!("attached twice"),
            Event::Lost { why } | Event::Expired { why } => panic!("the session was lost: {why}"),
            Event::Restored { .. } => panic!("restored, and was not away"),
        }
    }

    /// The one response to a call.
    #[track_caller]
    pub(super) fn call(&mut self, call: Call) -> Response {
        let id = self.start(call);
        let mut responses = self.finish(id);
        assert_eq!(responses.len(), 1, "one response");
        responses.remove(0)
    }

    #[track_caller]
    pub(super) fn ok(&mut self, call: Call) -> Reply {
        let text = format!("{call:?}");
        match self.call(call).result {
            Ok(reply) => reply,
            Err(errno) => panic!("{errno} from {text}"),
        }
    }

    #[track_caller]
    pub(super) fn errno(&mut self, call: Call) -> Errno {
        let text = format!("{call:?}");
        match self.call(call).result {
            Ok(reply) => panic!("{reply:?} from {text}"),
            Err(errno) => errno,
        }
    }

    /// The error of a call once earlier releases have taken effect. Releases get no reply, and a remote may carry
    /// them out a little later.
    #[track_caller]
    pub(super) fn errno_after_release(&mut self, call: &Call) -> Errno {
        for _ in 0..10_000 {
            if let Err(errno) = self.call(call.clone()).result {
                return errno;
            }
        }
        panic!("a release takes no effect on {call:?}")
    }

    #[track_caller]
    pub(super) fn made(&mut self, call: Call) -> (Entry, Option<Handle>) {
        match self.ok(call) {
            Reply::Created { entry, handle, existed: false } => (entry, handle),
            other => panic!("not made: {other:?}"),
        }
    }

    #[track_caller]
    pub(super) fn mkdir(&mut self, dir: &NodeRef, leaf: &[u8]) -> NodeRef {
        let call = Call::Mkdir { dir: dir.clone(), name: name(leaf), mode: 0o755, umask: 0 };
        at(dir, leaf, self.made(call).0.id)
    }

    #[track_caller]
    pub(super) fn symlink(&mut self, dir: &NodeRef, leaf: &[u8], target: &[u8]) -> NodeRef {
        let call = Call::Symlink { dir: dir.clone(), name: name(leaf), target: target.to_vec() };
        at(dir, leaf, self.made(call).0.id)
    }

    /// A new empty file, open.
    #[track_caller]
    pub(super) fn create(&mut self, dir: &NodeRef, leaf: &[u8]) -> (NodeRef, Handle) {
        let (entry, handle) = self.made(create(dir, leaf, true));
        (at(dir, leaf, entry.id), handle.expect("a created file comes open"))
    }

    /// A new file that is not open.
    #[track_caller]
    pub(super) fn file(&mut self, dir: &NodeRef, leaf: &[u8], data: &[u8]) -> NodeRef {
        let (place, handle) = self.create(dir, leaf);
        self.write(&place, handle, 0, data);
        self.release(handle);
        place
    }

    pub(super) fn release(&mut self, handle: Handle) {
        self.start(Call::Release { handles: vec![handle] });
    }

    #[track_caller]
    pub(super) fn open(&mut self, node: &NodeRef) -> Handle {
        match self.ok(Call::Open { node: node.clone(), access: READ_WRITE }) {
            Reply::Opened { handle, .. } => handle,
            other => panic!("not opened: {other:?}"),
        }
    }

    #[track_caller]
    pub(super) fn write(&mut self, node: &NodeRef, handle: Handle, offset: u64, data: &[u8]) {
        let (node, handle, flags) = (node.clone(), Some(handle), WriteFlags::default());
        let call = Call::Write { node, handle, offset, data: data.to_vec(), flags };
        assert_eq!(self.ok(call), Reply::Written { offset, count: data.len() as u64 });
    }

    #[track_caller]
    pub(super) fn read(
        &mut self,
        node: &NodeRef,
        handle: Option<Handle>,
        offset: u64,
        length: u32,
    ) -> Vec<u8> {
        match self.ok(Call::Read { node: node.clone(), handle, offset, length }) {
            Reply::Data(data) => data,
            other => panic!("no data: {other:?}"),
        }
    }

    #[track_caller]
    pub(super) fn lookup(&mut self, dir: &NodeRef, leaf: &[u8]) -> Option<Entry> {
        match self.ok(Call::Lookup { dir: dir.clone(), name: name(leaf) }) {
            Reply::Entry(entry) => entry,
            other => panic!("not looked up: {other:?}"),
        }
    }

    #[track_caller]
    pub(super) fn getattr(&mut self, node: &NodeRef) -> Attr {
        match self.ok(Call::GetAttr { node: node.clone() }) {
            Reply::Attr(id, attr) if id == node.node => attr,
            other => panic!("not its attributes: {other:?}"),
        }
    }

    #[track_caller]
    pub(super) fn setattr(&mut self, node: &NodeRef, set: SetAttr) -> Attr {
        match self.ok(Call::SetAttr { node: node.clone(), handle: None, set }) {
            Reply::Attr(id, attr) if id == node.node => attr,
            other => panic!("not its attributes: {other:?}"),
        }
    }

    /// A whole listing, checked to be in cookie order.
    #[track_caller]
    pub(super) fn list(&mut self, dir: &NodeRef) -> Vec<(Name, ListedEntry)> {
        let id = self.start(Call::List { dir: dir.clone() });
        let responses = self.finish(id);
        self.listed(responses)
    }

    #[track_caller]
    pub(super) fn listed(&self, responses: Vec<Response>) -> Vec<(Name, ListedEntry)> {
        let mut all: Vec<(Name, ListedEntry)> = Vec::new();
        let cookie = |name: &Name| self.session.cookie_key.cookie(name.as_bytes());
        for response in responses {
            let part: Vec<(Name, ListedEntry)> = match response.result {
                Ok(Reply::Listed(part)) => part.entries.into_iter().map(with_attributes).collect(),
                Ok(Reply::Names(part)) => part.into_iter().map(bare).collect(),
                other => panic!("not listed: {other:?}"),
            };
            if let (Some((before, _)), Some((first, _))) = (all.last(), part.first()) {
                assert!(cookie(before) < cookie(first), "parts are cut between different cookies");
            }
            all.extend(part);
        }
        assert!(all.is_sorted_by_key(|(name, _)| cookie(name)), "in cookie order");
        all
    }

    #[track_caller]
    pub(super) fn names(&mut self, dir: &NodeRef) -> Vec<Name> {
        let mut names: Vec<Name> = self.list(dir).into_iter().map(|(name, _)| name).collect();
        names.sort();
        names
    }
}

fn with_attributes((name, entry): (Name, Entry)) -> (Name, ListedEntry) {
    (name, ListedEntry { id: entry.id, attr: Some(entry.attr), no_xattrs: entry.no_xattrs })
}

fn bare((name, id, _): (Name, NodeId, Option<Kind>)) -> (Name, ListedEntry) {
    (name, ListedEntry { id, attr: None, no_xattrs: false })
}

/// A call that creates a file.
pub(super) fn create(dir: &NodeRef, leaf: &[u8], exclusive: bool) -> Call {
    let (dir, name) = (dir.clone(), name(leaf));
    Call::Create { dir, name, mode: 0o644, umask: 0, exclusive, access: READ_WRITE }
}

pub(super) fn unlink(dir: &NodeRef, leaf: &[u8]) -> Call {
    Call::Unlink { dir: dir.clone(), name: name(leaf), keep: None }
}

pub(super) fn rename(from: &NodeRef, old: &[u8], to: &NodeRef, new: &[u8]) -> Call {
    Call::Rename {
        from: from.clone(),
        name: name(old),
        to: to.clone(),
        new_name: name(new),
        no_replace: false,
        exchange: false,
        whiteout: false,
        keep: None,
    }
}

/// Checks that every grant concerns a node of the call or the reply, and that grants on names or data concern
/// directories or files.
#[track_caller]
fn check_grants(call: &Call, responses: &[Response]) {
    let mut known: BTreeMap<NodeId, Option<Attr>> = named(call).into_iter().map(|id| (id, None)).collect();
    for response in responses {
        known.extend(response.after.iter().map(|(id, attr)| (*id, Some(*attr))));
        match &response.result {
            Ok(Reply::Entry(Some(entry)) | Reply::Created { entry, .. }) => {
                known.insert(entry.id, Some(entry.attr));
            }
            Ok(Reply::Attr(id, attr)) => {
                known.insert(*id, Some(*attr));
            }
            Ok(Reply::Found { node, attr, parent_entry: home }) => {
                known.insert(*node, Some(*attr));
                known.extend(home.iter().map(|(dir, _)| (*dir, None)));
            }
            Ok(Reply::Listed(part)) => {
                known.extend(part.entries.iter().map(|(_, entry)| (entry.id, Some(entry.attr))));
            }
            Ok(Reply::Prefetched(steps)) => {
                known.extend(steps.iter().map(|step| (step.dir, None)));
                let entries = steps.iter().filter_map(|step| step.listed.as_ref()).flat_map(|l| &l.entries);
                known.extend(entries.map(|(_, entry)| (entry.id, Some(entry.attr))));
            }
            Ok(Reply::Renamed { moved, .. }) => {
                known.entry(*moved).or_default();
            }
            _ => {}
        }
        for grant in &response.grants {
            let attr = known.get(&grant.node);
            let attr = attr.unwrap_or_else(|| panic!("{grant:?} is for a node that no reply named"));
            let fits = match grant.covers {
                LeaseScope::Directory | LeaseScope::Dentry | LeaseScope::NegativeDentry => {
                    attr.is_none_or(|attr| attr.is_dir())
                }
                LeaseScope::Data => attr.is_none_or(|attr| !attr.is_dir()),
                LeaseScope::Attributes => true,
            };
            assert!(fits, "{grant:?} cannot cover {attr:?}");
            assert!(
                attr.is_none_or(|attr| attr.nlink > 0 || grant.covers != LeaseScope::Directory),
                "granted and gone"
            );
        }
    }
}

/// Nodes that a call refers to, directly or in path hints.
fn named(call: &Call) -> Vec<NodeId> {
    let places: Vec<&NodeRef> = match call {
        Call::Lookup { dir, .. } | Call::List { dir } | Call::Create { dir, .. } => vec![dir],
        Call::ListNames { dir, .. } => vec![dir],
        Call::Tmpfile { dir, .. } | Call::Mknod { dir, .. } | Call::Mkdir { dir, .. } => vec![dir],
        Call::Symlink { dir, .. } | Call::Unlink { dir, .. } | Call::Rmdir { dir, .. } => vec![dir],
        Call::GetAttr { node } | Call::ReadLink { node } | Call::Xattrs { node } => vec![node],
        Call::Xattr { node, .. } | Call::StatFs { node } | Call::Open { node, .. } => vec![node],
        Call::Read { node, .. } | Call::Seek { node, .. } | Call::GetFlags { node } => vec![node],
        Call::SetAttr { node, .. } | Call::Write { node, .. } | Call::Fallocate { node, .. } => vec![node],
        Call::SetXattr { node, .. } | Call::RemoveXattr { node, .. } | Call::Fsync { node, .. } => vec![node],
        Call::Lock { node, .. } | Call::Unlock { node, .. } | Call::GetLock { node, .. } => vec![node],
        Call::Reopen { node, .. } => vec![node],
        Call::Link { node, dir, .. } => vec![node, dir],
        Call::Rename { from, to, .. } | Call::CopyRange { from, to, .. } => vec![from, to],
        Call::PinOpen { node, .. } => vec![node],
        Call::Prefetch { roots, .. } => roots.iter().collect(),
        Call::PrefetchCredit { want, .. } => want.iter().collect(),
        Call::ResolvePath { .. } | Call::Release { .. } | Call::LookupNumber { .. } => vec![],
    };
    places
        .into_iter()
        .flat_map(|p| std::iter::once(p.node).chain(p.path_hint.iter().map(|(dir, _)| *dir)))
        .collect()
}
