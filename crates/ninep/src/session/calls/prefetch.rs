//! Prefetch: several directories at a time, with the attributes of their entries.
//!
//! Each step sends its messages for all of these directories before it awaits the first reply, so that the number of
//! round trips does not depend on the number of directories: their fids are walked to, cloned, and opened; names are read
//! until the server sends no more; each name is walked to, and its attributes are requested. The cache takes what a
//! reply says to be read after the reply before. So an empty reply precedes the first request for names.

use super::super::context::{CallContext, PendingReply};
use super::super::fids::Fid;
use super::super::node_ids::is_directory;
use super::super::prefetch_jobs::{PrefetchJob, Target};
use super::super::reply::{CallReply, entry};
use super::super::requests::getattr;
use super::super::resolve::PendingWalk;
use super::list::NameReader;
use super::lookup::note_attributes;
use crate::{Qid, Rmessage, Tmessage, flags};
use nigh_remote::Event;
use nigh_types::{
    Attr, Call, CallId, Cookie, Entries, Entry, Errno, LeaseScope, Name, NodeId, PrefetchedDir, Reply,
    Response,
};
use std::sync::Arc;

/// The most walks, or requests for attributes, in flight for all jobs: other calls need tags too.
const MOST_IN_FLIGHT: usize = 1_024;

/// A directory that is being read.
struct DirRead {
    target: Target,
    /// What cannot be read whole is left out: the cache lists it when it is needed.
    is_left_out: bool,
    /// A fid from which names are walked to.
    fid: Option<Arc<Fid>>,
    names: Option<NameReader>,
    own: Option<Attr>,
    entries: Vec<(Name, Entry)>,
    /// A name was gone: or the directory, if fids are paths.
    has_gap: bool,
}

impl DirRead {
    fn new(target: Target) -> DirRead {
        let (fid, names, own, entries) = (None, None, None, Vec::new());
        DirRead { target, is_left_out: false, fid, names, own, entries, has_gap: false }
    }

    fn leave_out(&mut self) {
        (self.is_left_out, self.fid, self.names, self.own) = (true, None, None, None);
        self.entries.clear();
    }
}

/// How the fid of a directory is reached.
enum Reach {
    Known(Arc<Fid>),
    Walk(PendingWalk),
    /// By messages that wait for one another.
    Alone,
}

/// Removes the job when its task ends or is dropped.
struct RunningJob<'a> {
    cx: &'a CallContext,
    id: CallId,
}

impl Drop for RunningJob<'_> {
    fn drop(&mut self) {
        self.cx.shared().prefetches.remove(&self.id);
    }
}

pub(super) async fn prefetch(cx: &CallContext, id: CallId, uid: u32, job: PrefetchJob) {
    cx.shared().prefetches.insert(id, job);
    let _running = RunningJob { cx, id };
    let reply = |last| {
        let response = Response { last, ..Response::plain(Ok(Reply::Prefetched(Vec::new()))) };
        cx.emit(Event::Response { call: id, response });
    };
    loop {
        cx.until_others(|shared| shared.prefetches.get(&id).is_none_or(PrefetchJob::may_go_on)).await;
        let targets = cx.shared().prefetches.get_mut(&id).map(PrefetchJob::take_next).unwrap_or_default();
        if targets.is_empty() {
            return reply(true);
        }
        let mut dirs: Vec<DirRead> = targets.into_iter().map(DirRead::new).collect();
        reach_all(cx, uid, &mut dirs).await;
        open_all(cx, &mut dirs).await;
        // What is read from now on is newer than this reply.
        reply(false);
        read_names(cx, &mut dirs).await;
        keep_paid(cx, id, &mut dirs);
        read_entries(cx, uid, &mut dirs).await;
        send(cx, id, dirs);
    }
}

/// Finds a fid of each directory.
async fn reach_all(cx: &CallContext, uid: u32, dirs: &mut [DirRead]) {
    let reaches: Vec<Reach> = dirs.iter().map(|dir| start_reach(cx, uid, &dir.target)).collect();
    for (dir, reach) in dirs.iter_mut().zip(reaches) {
        let place = &dir.target.place;
        dir.fid = match reach {
            Reach::Known(fid) => Some(fid),
            Reach::Alone => cx.resolve_dir(uid, place).await.ok(),
            Reach::Walk(walk) => {
                let walked = walk.finish().await.ok();
                let mut shared = cx.shared();
                let is_there = |qids: &[Qid]| qids.first().map(|qid| shared.node(*qid)) == Some(place.node);
                let fid = walked.filter(|(_, qids)| is_there(qids)).map(|(fid, _)| fid);
                if let Some(fid) = &fid {
                    let known = Arc::clone(fid);
                    shared.nodes.note_known(uid, place.node, known, place.path_hint.clone(), false);
                }
                fid
            }
        };
    }
}

fn start_reach(cx: &CallContext, uid: u32, target: &Target) -> Reach {
    let place = &target.place;
    if cx.is_root(place.node) || !is_directory(place.node) {
        return Reach::Alone;
    }
    let known = cx.shared().nodes.known(uid, place.node).filter(|known| !known.open);
    if let Some(known) = known {
        return Reach::Known(known.fid);
    }
    let Some((above, name)) = &place.path_hint else { return Reach::Alone };
    let parent = target.parent.clone().or_else(|| {
        let is_root = cx.is_root(*above);
        let mut shared = cx.shared();
        let known = shared.nodes.known(uid, *above).filter(|known| !known.open).map(|known| known.fid);
        if is_root { shared.users.root(uid) } else { known }
    });
    parent.map_or(Reach::Alone, |parent| Reach::Walk(cx.start_walk(&parent, std::slice::from_ref(name))))
}

/// Opens the directories.
async fn open_all(cx: &CallContext, dirs: &mut [DirRead]) {
    let clones: Vec<Option<PendingWalk>> =
        dirs.iter().map(|dir| dir.fid.as_ref().map(|fid| cx.start_walk(fid, &[]))).collect();
    let mut cloned: Vec<Option<Arc<Fid>>> = Vec::new();
    for clone in clones {
        cloned.push(match clone {
            Some(clone) => clone.finish().await.ok().map(|(fid, _)| fid),
            None => None,
        });
    }
    let open = |fid: Arc<Fid>| {
        let message = Tmessage::Lopen { fid: fid.number(), flags: flags::RDONLY | flags::DIRECTORY };
        let reply = cx.request(message);
        (fid, reply)
    };
    let opens: Vec<Option<(Arc<Fid>, PendingReply)>> = cloned.into_iter().map(|fid| fid.map(open)).collect();
    for (dir, open) in dirs.iter_mut().zip(opens) {
        let Some((fid, reply)) = open else {
            dir.leave_out();
            continue;
        };
        match reply.await {
            Ok(Rmessage::Lopen { qid, .. }) if cx.shared().node(qid) == dir.target.place.node => {
                dir.names = Some(NameReader::new(fid));
            }
            _ => dir.leave_out(),
        }
    }
}

/// Reads all names of the directories.
async fn read_names(cx: &CallContext, dirs: &mut [DirRead]) {
    let mut unfinished: Vec<&mut DirRead> = dirs.iter_mut().filter(|dir| dir.names.is_some()).collect();
    while !unfinished.is_empty() {
        let replies: Vec<Option<PendingReply>> =
            unfinished.iter().map(|dir| dir.names.as_ref().map(|names| names.request(cx))).collect();
        let mut more = Vec::new();
        for (dir, reply) in unfinished.into_iter().zip(replies) {
            let (Some(names), Some(reply)) = (&mut dir.names, reply) else { continue };
            match names.take(cx, reply.await) {
                Ok(true) if names.found.len() <= Call::MOST_PREFETCHED_NAMES as usize => more.push(dir),
                Ok(false) => {}
                _ => dir.leave_out(),
            }
        }
        unfinished = more;
    }
}

/// Pays for the directories. Those without credit come later, as do those beyond what one reply should wait for.
fn keep_paid(cx: &CallContext, id: CallId, dirs: &mut Vec<DirRead>) {
    let mut shared = cx.shared();
    let Some(job) = shared.prefetches.get_mut(&id) else { return };
    let mut entries = 0;
    let (mut kept, mut left) = (Vec::new(), Vec::new());
    for mut dir in std::mem::take(dirs) {
        let names = dir.names.as_ref().map(|names| names.found.len());
        let may = names.is_none() || entries < MOST_IN_FLIGHT || job.is_wanted(dir.target.place.node);
        if may && names.is_none_or(|names| job.pay(&mut dir.target, names)) {
            entries += names.unwrap_or(0);
            kept.push(dir);
        } else {
            left.push(dir);
        }
    }
    *dirs = kept;
    job.put_back(left.into_iter().map(|dir| dir.target));
}

/// A name that was walked to.
struct Walked {
    /// The index of its directory.
    at: usize,
    name: Name,
    fid: Arc<Fid>,
    node: NodeId,
}

/// Reads the attributes of the directories and of all their entries.
async fn read_entries(cx: &CallContext, uid: u32, dirs: &mut [DirRead]) {
    let own = request_own(cx, dirs, |_| true);
    let (key, most) = {
        let shared = cx.shared();
        (shared.config.cookie_key, MOST_IN_FLIGHT / shared.prefetches.len().max(1))
    };
    let mut names: Vec<(usize, Name)> = Vec::new();
    for (at, dir) in dirs.iter_mut().enumerate() {
        let found = dir.names.take().map(|names| names.found).unwrap_or_default();
        let mut sorted: Vec<(Cookie, Name)> =
            found.into_keys().map(|name| (key.cookie(name.as_bytes()), name)).collect();
        sorted.sort_unstable();
        names.extend(sorted.into_iter().map(|(_, name)| (at, name)));
    }
    for some in names.chunks(most.max(1)) {
        read_some(cx, uid, dirs, some).await;
    }
    take_own(cx, dirs, own).await;
    let again = request_own(cx, dirs, |dir| dir.has_gap && !dir.is_left_out);
    take_own(cx, dirs, again).await;
}

/// Requests the attributes of directories themselves.
fn request_own(
    cx: &CallContext,
    dirs: &[DirRead],
    which: impl Fn(&DirRead) -> bool,
) -> Vec<(usize, PendingReply)> {
    let fids = dirs.iter().enumerate().filter(|(_, dir)| which(dir));
    let fids = fids.filter_map(|(at, dir)| Some((at, dir.fid.clone()?)));
    fids.map(|(at, fid)| (at, cx.request(getattr(fid.number())))).collect()
}

async fn take_own(cx: &CallContext, dirs: &mut [DirRead], replies: Vec<(usize, PendingReply)>) {
    for (at, reply) in replies {
        let attributes = reply.await.and_then(|answer| cx.attributes_in(answer));
        let Some(dir) = dirs.get_mut(at).filter(|dir| !dir.is_left_out) else { continue };
        match attributes {
            Ok((node, attr)) if node == dir.target.place.node => dir.own = Some(attr),
            _ => dir.leave_out(),
        }
    }
}

/// Reads the attributes of some names.
async fn read_some(cx: &CallContext, uid: u32, dirs: &mut [DirRead], names: &[(usize, Name)]) {
    let changes = cx.shared().changes;
    let walked = walk_all(cx, dirs, names).await;
    let replies: Vec<PendingReply> =
        walked.iter().map(|walked| cx.request(getattr(walked.fid.number()))).collect();
    for (Walked { at, name, fid, node }, reply) in walked.into_iter().zip(replies) {
        let attributes = reply.await.and_then(|answer| cx.attributes_in(answer));
        let Some(dir) = dirs.get_mut(at).filter(|dir| !dir.is_left_out) else { continue };
        let (node, attr) = match attributes {
            // An own change since may be newer: then the session remembers nothing of this.
            Ok((found, attr)) if cx.shared().changes == changes => {
                cx.shared().nodes.note_attr(found, attr);
                note_attributes(cx, uid, (dir.target.place.node, &name), (fid, node), (found, attr))
            }
            Ok(attributes) => attributes,
            Err(Errno::NOENT | Errno::STALE) => {
                dir.has_gap = true;
                continue;
            }
            Err(_) => {
                dir.leave_out();
                continue;
            }
        };
        dir.entries.push((name, entry(node, attr)));
    }
}

/// Walks to names of the directories. Names that are gone are skipped.
async fn walk_all(cx: &CallContext, dirs: &mut [DirRead], names: &[(usize, Name)]) -> Vec<Walked> {
    let fid_of = |at: usize| dirs.get(at).and_then(|dir| dir.fid.clone());
    let walks: Vec<Option<PendingWalk>> = names
        .iter()
        .map(|(at, name)| fid_of(*at).map(|fid| cx.start_walk(&fid, std::slice::from_ref(name))))
        .collect();
    let mut walked = Vec::new();
    for ((at, name), walk) in names.iter().zip(walks) {
        let Some(walk) = walk else { continue };
        let reached = walk.finish().await;
        let Some(dir) = dirs.get_mut(*at) else { continue };
        match reached.map(|(fid, qids)| (fid, qids.first().copied())) {
            Ok((fid, Some(qid))) => {
                let node = cx.shared().node(qid);
                walked.push(Walked { at: *at, name: name.clone(), fid, node });
            }
            Err(Errno::NOENT | Errno::STALE) => dir.has_gap = true,
            _ => dir.leave_out(),
        }
    }
    walked
}

/// Emits the directories as one reply, and adds those found in them to the job.
fn send(cx: &CallContext, id: CallId, dirs: Vec<DirRead>) {
    let (mut steps, mut own_attrs, mut grants) = (Vec::new(), Vec::new(), Vec::new());
    let mut shared = cx.shared();
    let key = shared.config.cookie_key;
    let Some(job) = shared.prefetches.get_mut(&id) else { return };
    // What was found in the first one comes next.
    for DirRead { target, fid, own, entries, .. } in dirs.into_iter().rev() {
        let dir = target.place.node;
        job.refund(&target, own.map(|_| entries.len()));
        let listed = own.map(|attr| {
            own_attrs.push(Some((dir, attr)));
            grants.push((dir, LeaseScope::Directory));
            let separate = entries.iter().filter(|(_, entry)| !entry.attr.covered_by_parent());
            grants.extend(separate.map(|(_, entry)| (entry.id, LeaseScope::Attributes)));
            let below = entries.iter().filter(|(_, entry)| entry.attr.is_dir());
            let below = below.map(|(name, entry)| (name.clone(), entry.id)).collect();
            job.add_found((dir, fid.as_ref()), below, key);
            Entries { entries }
        });
        steps.push(PrefetchedDir { dir, listed, last: true });
    }
    job.note_sent();
    drop(shared);
    steps.reverse();
    let reply = CallReply::plain(Reply::Prefetched(steps)).granting(grants).after(own_attrs);
    let response = cx.respond(Ok(reply), false);
    cx.emit(Event::Response { call: id, response });
}
