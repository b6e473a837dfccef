//! Limits on what one client can use of a server (docs/decisions/0009-sessions-over-connections.md, "Bounds").
//!
//! A scarce resource is taken from the origin that uses most, and there from the client that uses most. A peer that
//! invents many clients takes the resource from its own origin.

use crate::limits::fair_share::{Client, largest_user};
use crate::limits::reaper::COURTESY_TIME;
use crate::pool::QueueKey;
use crate::server::Server;
use crate::session::{End, Session};
use nigh_link::Origin;
use nigh_native::{Limits, MAX_UNANSWERED_BYTES};
use nigh_types::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

/// Limits of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerLimits {
    /// Number of sessions, courtesy sessions included.
    pub sessions: u64,
    /// Sessions of one origin ([`nigh_link::Origin`]).
    pub sessions_per_origin: u64,
    /// Number of courtesy sessions of one disconnected client.
    pub courtesy_per_client: u64,
    /// Memory of all sessions in bytes: unanswered requests, and replies that the client has not confirmed.
    pub bytes: u64,
}

impl Default for ServerLimits {
    fn default() -> ServerLimits {
        ServerLimits {
            sessions: 8_192,
            sessions_per_origin: 2_048,
            courtesy_per_client: 256,
            bytes: (memory_bytes() / 4).max(256 << 20),
        }
    }
}

impl ServerLimits {
    /// Limits that a client is told to keep: sixteen clients that write with the largest window fit into memory.
    pub(crate) fn limits(&self) -> Limits {
        let max_bytes = (self.bytes / 16).clamp(16 << 20, MAX_UNANSWERED_BYTES);
        Limits { max_bytes, ..Limits::default() }
    }
}

fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

impl Session {
    /// The client of the session.
    pub(crate) fn client(&self) -> Client {
        (self.origin, self.attached().map_or(0, |attached| attached.who.0))
    }

    /// The session's key in queues that are shared fairly.
    pub(crate) fn queue_key(&self) -> QueueKey {
        (self.origin, self.id)
    }
}

impl Server {
    /// Makes room for one more session, and for its export if no other session uses it, by discarding a courtesy
    /// session.
    ///
    /// # Errors
    /// The reply to the client.
    pub(crate) fn make_room(&self, session: &Session) -> Result<(), (Errno, String)> {
        loop {
            let all = self.all_sessions();
            let Some(full) = self.exceeded_quota(&all, session) else { return Ok(()) };
            let counted = || all.iter().filter(|other| !full.of_origin || other.origin == session.origin);
            let awake = exports(counted().filter(|other| !other.phase.is_courtesy()));
            let makes_way = |other: &&Arc<Session>| {
                let frees = !full.exports || export_of(other).is_some_and(|export| !awake.contains(&export));
                other.phase.is_courtesy() && frees
            };
            let dormant = counted().filter(makes_way).map(|session| (Arc::clone(session), 1)).collect();
            let Some(first) = first_to_go(dormant) else {
                return Err((Errno::AGAIN, full.why(session.origin)));
            };
            if let Some((since, _)) = first.courtesy() {
                self.expire_dormant(&first, since, "others need the room");
            }
        }
    }

    /// Returns the limit that one more session would exceed.
    fn exceeded_quota(&self, all: &[Arc<Session>], session: &Session) -> Option<ExceededQuota> {
        let (bounds, origin) = (self.options.bounds, session.origin);
        let theirs = || all.iter().filter(|other| other.origin == origin);
        let (most, most_of_origin) = self.descriptors.most_sessions(origin);
        let (count, count_of_origin) = (all.len() as u64, theirs().count() as u64);
        if count_of_origin >= bounds.sessions_per_origin.min(most_of_origin) {
            return Some(ExceededQuota { count: count_of_origin, exports: false, of_origin: true });
        }
        if count >= bounds.sessions.min(most) {
            return Some(ExceededQuota { count, exports: false, of_origin: false });
        }
        let own = export_of(session)?;
        let (most, most_of_origin) = self.descriptors.most_exports(origin);
        let is_full =
            |exports: &BTreeSet<usize>, most| !exports.contains(&own) && exports.len() as u64 >= most;
        let (exports, exports_of_origin) = (exports(all.iter()), exports(theirs()));
        let full = |exports: BTreeSet<usize>, of_origin| {
            Some(ExceededQuota { count: exports.len() as u64, exports: true, of_origin })
        };
        if is_full(&exports_of_origin, most_of_origin) {
            return full(exports_of_origin, true);
        }
        if is_full(&exports, most) { full(exports, false) } else { None }
    }

    /// Discards courtesy sessions that need not be kept any longer.
    pub(crate) fn expire_unneeded_sessions(&self) {
        for session in self.all_sessions() {
            if let Some((since, why)) = expiry_reason(&session) {
                self.expire_dormant(&session, since, why);
            }
        }
    }

    /// Discards excess courtesy sessions of each client, longest disconnected first.
    pub(crate) fn limit_courtesy_sessions(&self) {
        let all = self.all_sessions().into_iter();
        let mut dormant: Vec<(Instant, Arc<Session>)> =
            all.filter_map(|session| Some((session.courtesy()?.0, session))).collect();
        dormant.sort_by_key(|(since, _)| std::cmp::Reverse(*since));
        let mut counts = BTreeMap::<Client, u64>::new();
        for (since, session) in dormant {
            let count = counts.entry(session.client()).or_default();
            *count += 1;
            if *count > self.options.bounds.courtesy_per_client {
                self.expire_dormant(&session, since, "too many sessions of its client are dormant");
            }
        }
    }

    /// Discards the session with the most memory while the memory limit is exceeded.
    pub(crate) fn limit_memory(&self) {
        while self.reaper.is_over_limit() {
            let all = self.all_sessions().into_iter();
            let shares = all.map(|session| (session.kept_bytes().1, session)).filter(|(bytes, _)| *bytes > 0);
            let Some(first) = first_to_go(shares.map(|(bytes, session)| (session, bytes)).collect()) else {
                return;
            };
            first.expire("too much is kept for its client");
            self.discard(&first, End::Discarded);
        }
    }

    /// Discards a courtesy session with open files after an origin was refused a file: one of that origin, or else of
    /// an origin with more open files.
    pub(crate) fn limit_files(&self) {
        for refused in self.descriptors.take_refused() {
            let files =
                |session: &Arc<Session>| session.attached().map_or(0, |attached| attached.files.count());
            let dormant = self.all_sessions().into_iter().filter(|session| session.phase.is_courtesy());
            let dormant: Vec<_> =
                dormant.map(|session| (files(&session), session)).filter(|(files, _)| *files > 0).collect();
            let theirs = self.descriptors.files_of(refused);
            let own = dormant.iter().any(|(_, session)| session.origin == refused);
            let may_go = |session: &Session| match own {
                true => session.origin == refused,
                false => self.descriptors.files_of(session.origin) > theirs,
            };
            let shares = dormant.into_iter().filter(|(_, session)| may_go(session));
            if let Some(first) = first_to_go(shares.map(|(files, session)| (session, files)).collect())
                && let Some((since, _)) = first.courtesy()
            {
                self.expire_dormant(&first, since, "others need the files that it has open");
            }
        }
    }

    /// Discards a courtesy session, unless its client has returned since.
    fn expire_dormant(&self, session: &Arc<Session>, since: Instant, why: &str) {
        if session.expire_courtesy(since) {
            session.log.set_end_reason(|| why.to_owned());
            self.discard(session, End::Discarded);
        }
    }
}

/// An exceeded limit, of the server or of one origin.
struct ExceededQuota {
    count: u64,
    /// Counts exports; otherwise sessions.
    exports: bool,
    of_origin: bool,
}

impl ExceededQuota {
    fn why(&self, origin: Origin) -> String {
        let ExceededQuota { count, exports, of_origin } = *self;
        let what = if exports { "directories mounted" } else { "sessions" };
        match of_origin {
            true => format!(
                "{origin} has {count} {what}, which is all that it may: unmount what is not needed there, and try again"
            ),
            false => format!(
                "this server has {count} {what}, which is all that it may: try again when other machines have \
                 unmounted something"
            ),
        }
    }
}

/// Identifies the export by its memory address.
fn export_of(session: &Session) -> Option<usize> {
    session.attached().map(|attached| Arc::as_ptr(&attached.export).addr())
}

fn exports<'a>(sessions: impl Iterator<Item = &'a Arc<Session>>) -> BTreeSet<usize> {
    sessions.filter_map(|session| export_of(session)).collect()
}

/// Returns why a courtesy session need not be kept, if it need not, and since when its client is disconnected.
fn expiry_reason(session: &Session) -> Option<(Instant, &'static str)> {
    let (since, has_calls) = session.courtesy()?;
    let attached = session.attached()?;
    let is_needed = has_calls || attached.files.count() > 0 || attached.locks.are_held_by(session.id);
    let why = if attached.locks.are_waited_for(session.id) {
        "another client waits for its locks"
    } else if since.elapsed() > COURTESY_TIME {
        "its client was away for too long"
    } else if !is_needed {
        "nothing is kept for it"
    } else {
        return None;
    };
    Some((since, why))
}

/// Selects the session to discard; `shares` holds each session's use.
fn first_to_go(shares: Vec<(Arc<Session>, u64)>) -> Option<Arc<Session>> {
    let client = largest_user(shares.iter().map(|(session, much)| (session.client(), *much, session.id)))?;
    let theirs = shares.into_iter().filter(|(session, _)| session.client() == client);
    theirs.max_by_key(|(session, much)| (*much, session.id)).map(|(session, _)| session)
}
