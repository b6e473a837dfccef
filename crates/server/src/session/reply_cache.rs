//! Reply cache: replies of discarded sessions that their clients may not have received. A resent operation is
//! answered from here, so that it takes effect once (docs/decisions/0009-sessions-over-connections.md).

use crate::export::open_handles::OpenFile;
use crate::lease::session_files::SessionFiles;
use crate::limits::fair_share;
use nigh_lease::StoredReply;
use nigh_link::Peer;
use nigh_types::{Errno, MutationId, Response};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How long replies are kept.
const KEEP_TIME: Duration = Duration::from_secs(600);
/// Limits on sessions and replies. Beyond them the oldest entry of the client with the most replies is dropped.
const MOST_SESSIONS: usize = 1_024;
const MOST_ALTOGETHER: usize = 1 << 18;
/// How long calls of a discarded session may go on before its client may begin another session.
const PATIENCE: Duration = Duration::from_secs(10);

/// The reply cache of all discarded sessions.
#[derive(Default)]
pub(crate) struct ReplyCache {
    /// Oldest first.
    sessions: Mutex<VecDeque<SessionReplies>>,
}

/// A discarded session whose calls may still be executing.
pub(crate) trait Executing: Send + Sync {
    /// Whether none of its calls is being executed or will be.
    fn is_settled(&self) -> bool;
}

/// The client that may be answered with replies of its earlier sessions.
#[derive(Clone)]
pub(crate) struct ReplyClient {
    pub(crate) peer: Peer,
    /// The client id and its incarnation.
    pub(crate) who: (u64, u64),
    /// The export's name in the client's request.
    pub(crate) export: Vec<u8>,
}

/// Cached replies of one discarded session.
pub(crate) struct SessionReplies {
    session: Weak<dyn Executing>,
    client: ReplyClient,
    since: Instant,
    answers: Arc<Replies>,
}

/// Replies of one session to named operations. The files that they name stay open.
#[derive(Default)]
pub(crate) struct Replies(Mutex<nigh_lease::Replies<Arc<OpenFile>>>);

impl Replies {
    /// Stores a reply.
    pub(crate) fn note(&self, sequence: u64, response: Response, files: &SessionFiles) {
        if let Some(reply) = StoredReply::new(response, |handle| files.share(handle)) {
            let left = self.0.lock().insert(sequence, reply);
            drop(left); // may close its file
        }
    }

    fn count(&self) -> usize {
        self.0.lock().count()
    }

    fn take(&self, sequence: u64, files: &SessionFiles) -> Option<Response> {
        let reply = self.0.lock().take(sequence)?;
        Some(reply.into_response(|file| files.adopt(file).map_err(Errno::from)))
    }
}

impl ReplyCache {
    /// Stores the replies of a discarded session; calls that are still executing add theirs later. Returns evicted
    /// entries, which the caller drops without holding a lock.
    #[must_use]
    pub(crate) fn store(
        &self,
        session: Weak<dyn Executing>,
        client: ReplyClient,
        answers: Arc<Replies>,
    ) -> Vec<SessionReplies> {
        let left = SessionReplies { session, client, since: Instant::now(), answers };
        let mut all = self.sessions.lock();
        all.push_back(left);
        std::iter::from_fn(|| evict(&mut all)).collect()
    }

    /// Returns the reply to a resent operation, if it was executed. Its file is adopted by `files`.
    pub(crate) fn find_reply(
        &self,
        client: &ReplyClient,
        name: MutationId,
        files: &SessionFiles,
    ) -> Option<Response> {
        self.replies_of(client).into_iter().find_map(|answers| answers.take(name.sequence, files))
    }

    fn replies_of(&self, client: &ReplyClient) -> Vec<Arc<Replies>> {
        let left = self.sessions.lock();
        let theirs = left.iter().map(|left| (&left.client, &left.answers)).filter(|(of, _)| {
            of.who == client.who && of.export == client.export && of.peer.has_same_rights(&client.peer)
        });
        theirs.map(|(_, answers)| Arc::clone(answers)).collect()
    }

    /// Waits until no call of this client's discarded sessions is executing or will be: resent calls must find their
    /// replies here. Returns false after a timeout.
    pub(crate) fn is_settled(&self, who: (u64, u64)) -> bool {
        let give_up = Instant::now() + PATIENCE;
        let mut pause = Duration::from_micros(100);
        loop {
            let left = self.sessions.lock();
            let theirs = left.iter().filter(|left| left.client.who == who);
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
    let client = |left: &SessionReplies| (left.client.peer.origin(), left.client.who.0);
    let shares = all.iter().zip(0..).map(|(left, at)| (client(left), 1 + left.answers.count() as u64, at));
    let most = fair_share::largest_user(shares)?;
    let at = all.iter().position(|left| client(left) == most)?;
    all.remove(at)
}
