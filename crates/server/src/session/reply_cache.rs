//! Reply cache: replies of discarded sessions that their clients may not have received. A resent operation is
//! answered from here, so that it takes effect once (docs/decisions/0009-sessions-over-connections.md).

use crate::export::open_handles::OpenFile;
use crate::lease::session_files::SessionFiles;
use crate::session::fair_share;
use crate::session::{Attached, Session};
use nigh_link::Peer;
use nigh_types::{Errno, Handle, MutationId, Reply, Response};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How long replies are kept.
const KEEP_TIME: Duration = Duration::from_secs(600);
/// Limits on sessions and replies. Beyond them the oldest entry of the client with the most replies is dropped.
const MOST_SESSIONS: usize = 1_024;
const MOST_ALTOGETHER: usize = 1 << 18;
/// Maximum number of replies of one session. A client has fewer calls outstanding.
const MOST_REPLIES: usize = 4_096;
/// How long calls of a discarded session may go on before its client may begin another session.
const PATIENCE: Duration = Duration::from_secs(10);

/// The reply cache of all discarded sessions.
#[derive(Default)]
pub(crate) struct ReplyCache {
    /// Oldest first.
    sessions: Mutex<VecDeque<SessionReplies>>,
}

/// Cached replies of one discarded session.
pub(crate) struct SessionReplies {
    /// Its calls may still be executing.
    session: Weak<Session>,
    peer: Peer,
    who: (u64, u64),
    export: Vec<u8>,
    since: Instant,
    answers: Arc<Replies>,
}

/// Replies of one session to named operations, by sequence number.
#[derive(Default)]
pub(crate) struct Replies {
    by_sequence: Mutex<BTreeMap<u64, CachedReply>>,
}

struct CachedReply {
    response: Response,
    /// The open file named by the reply.
    file: Option<Arc<OpenFile>>,
}

impl Replies {
    /// Stores a reply. The file that it names stays open.
    pub(crate) fn note(&self, sequence: u64, mut response: Response, files: &SessionFiles) {
        // On ESTALE the client resolves the path again and sends a new call.
        if !response.last || response.result == Err(Errno::STALE) {
            return;
        }
        response.grants.clear();
        let file = handle(&mut response).and_then(|handle| files.share(*handle));
        let mut told = self.by_sequence.lock();
        if told.len() < MOST_REPLIES {
            told.insert(sequence, CachedReply { response, file });
        }
    }

    fn count(&self) -> usize {
        self.by_sequence.lock().len()
    }

    fn take(&self, sequence: u64, files: &SessionFiles) -> Option<Response> {
        let CachedReply { mut response, file } = self.by_sequence.lock().remove(&sequence)?;
        if let Some(handle) = handle(&mut response) {
            match file.map(|file| files.adopt(file)) {
                Some(Ok(adopted)) => *handle = adopted,
                Some(Err(fault)) => response.result = Err(fault.into()),
                None => response.result = Err(Errno::IO),
            }
        }
        Some(response)
    }
}

impl ReplyCache {
    /// Stores the replies of a discarded session; calls that are still executing add theirs later. Returns evicted
    /// entries, which the caller drops without holding a lock.
    #[must_use]
    pub(crate) fn store(
        &self,
        session: &Arc<Session>,
        attached: &Attached,
        answers: Arc<Replies>,
    ) -> Vec<SessionReplies> {
        let left = SessionReplies {
            session: Arc::downgrade(session),
            peer: session.peer.clone(),
            who: attached.who,
            export: attached.name.clone(),
            since: Instant::now(),
            answers,
        };
        let mut all = self.sessions.lock();
        all.push_back(left);
        std::iter::from_fn(|| evict(&mut all)).collect()
    }

    /// Returns the reply to a resent operation, if it was executed.
    pub(crate) fn find_reply(&self, session: &Session, name: MutationId) -> Option<Response> {
        let attached = session.attached()?;
        let answers = self.replies_of(session, attached);
        answers.into_iter().find_map(|answers| answers.take(name.sequence, &attached.files))
    }

    fn replies_of(&self, session: &Session, attached: &Attached) -> Vec<Arc<Replies>> {
        let left = self.sessions.lock();
        let theirs = left.iter().filter(|left| {
            left.who == attached.who
                && left.export == attached.name
                && left.peer.has_same_rights(&session.peer)
        });
        theirs.map(|left| Arc::clone(&left.answers)).collect()
    }

    /// Waits until no call of this client's discarded sessions is executing or will be: resent calls must find their
    /// replies here. Returns false after a timeout.
    pub(crate) fn is_settled(&self, who: (u64, u64)) -> bool {
        let give_up = Instant::now() + PATIENCE;
        let mut pause = Duration::from_micros(100);
        loop {
            let left = self.sessions.lock();
            let theirs = left.iter().filter(|left| left.who == who);
            let sessions: Vec<_> = theirs.filter_map(|left| left.session.upgrade()).collect();
            drop(left);
            if sessions.iter().all(|session| session.is_settled()) {
                return true;
            }
            if Instant::now() >= give_up {
                return false;
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// Drops expired entries. Returns whether any are left.
    pub(crate) fn tidy(&self) -> bool {
        let mut left = self.sessions.lock();
        let old = left.iter().take_while(|left| left.since.elapsed() > KEEP_TIME).count();
        let dropped: Vec<SessionReplies> = left.drain(..old).collect();
        let busy = !left.is_empty();
        drop(left);
        drop(dropped); // closes files
        busy
    }
}

/// Removes one entry if the cache is too large.
fn evict(all: &mut VecDeque<SessionReplies>) -> Option<SessionReplies> {
    if all.len() <= MOST_SESSIONS
        && all.iter().map(|left| left.answers.count()).sum::<usize>() <= MOST_ALTOGETHER
    {
        return None;
    }
    let client = |left: &SessionReplies| (left.peer.origin(), left.who.0);
    let shares = all.iter().zip(0..).map(|(left, at)| (client(left), 1 + left.answers.count() as u64, at));
    let most = fair_share::largest_user(shares)?;
    let at = all.iter().position(|left| client(left) == most)?;
    all.remove(at)
}

/// Returns the handle in a reply that opens a file.
fn handle(response: &mut Response) -> Option<&mut Handle> {
    match response.result.as_mut().ok()? {
        Reply::Opened { handle, .. } => Some(handle),
        Reply::Created { handle, .. } => handle.as_mut(),
        Reply::Removed { pinned: kept, .. } | Reply::Renamed { pinned: kept, .. } => kept.as_mut(),
        _ => None,
    }
}
