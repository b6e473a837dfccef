//! The log of sessions: one line for each thing that happens to one, with the same fields everywhere.
//!
//! What a peer said is written as a quoted string, so that it can neither end a line nor colour one, and
//! nothing of what proves who it is stands there. Whoever is not attached yet may be anybody: lines about
//! them are few.

use crate::server::End;
use crate::session::Session;
use nigh_link::{Kind, Peer};
use nigh_native::lease::Holder;
use nigh_types::{Credentials, Errno, Term};
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

/// Characters of what a client says of itself.
const SAID: usize = 200;

/// How many lines may be written about something that others can cause: `burst` at once, and then one in each
/// `pause`.
#[derive(Debug)]
pub(crate) struct Lines {
    burst: u32,
    pause: Duration,
    state: Mutex<LinesState>,
}

#[derive(Debug, Default)]
struct LinesState {
    /// When all that was written will have been paid for.
    paid: Option<Instant>,
    unsaid: u64,
}

impl Lines {
    pub(crate) fn new(burst: u32, pause: Duration) -> Lines {
        Lines { burst, pause, state: Mutex::default() }
    }

    /// A line may be written; and how many were not since the latest one.
    pub(crate) fn allow(&self) -> Option<u64> {
        self.allow_at(Instant::now())
    }

    fn allow_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        let paid = state.paid.unwrap_or(now).max(now);
        if paid - now > self.pause * self.burst.saturating_sub(1) {
            state.unsaid += 1;
            return None;
        }
        state.paid = Some(paid + self.pause);
        Some(std::mem::take(&mut state.unsaid))
    }
}

/// How much is written about whom.
#[derive(Debug)]
pub(crate) struct Limits {
    strangers: Lines,
    clients: Lines,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            strangers: Lines::new(20, Duration::from_secs(1)),
            clients: Lines::new(1_000, Duration::from_millis(50)),
        }
    }
}

/// What the log and the status say of a session beside its state.
#[derive(Debug)]
pub(crate) struct Story {
    limits: Arc<Limits>,
    pub(crate) link: Kind,
    pub(crate) since: SystemTime,
    why: OnceLock<String>,
}

impl Story {
    pub(crate) fn new(limits: &Arc<Limits>, link: Kind) -> Story {
        Story { limits: Arc::clone(limits), link, since: SystemTime::now(), why: OnceLock::new() }
    }

    /// Why it ends; the first reason is the one that counts.
    pub(crate) fn ends(&self, why: impl FnOnce() -> String) {
        let _ = self.why.get_or_init(why);
    }
}

pub(crate) fn connected(story: &Story, session: u64, peer: &Peer) {
    if let Some(unsaid) = story.limits.strangers.allow() {
        let (peer, link) = (peer.to_string(), story.link);
        tracing::info!(event = "connected", session, peer, %link, unsaid, "session connected");
    }
}

/// It ended before it said hello.
pub(crate) fn left(story: &Story, session: u64, peer: &Peer, why: &str) {
    if let Some(unsaid) = story.limits.strangers.allow() {
        let (why, peer) = (shorten(why), peer.to_string());
        tracing::info!(event = "ended", session, peer, ?why, unsaid, "session ended");
    }
}

pub(crate) fn attached(session: &Session, term: Term) {
    let Some(attached) = session.attached() else { return };
    if let Some(unsaid) = session.story.limits.clients.allow() {
        let (export, path) = (attached.export.id(), attached.export.path());
        let (peer, client) = (session.peer.to_string(), client_name(attached.who.0));
        tracing::info!(
            event = "attached",
            session = session.id,
            peer,
            client,
            export,
            ?path,
            ?term,
            unsaid,
            "session attached"
        );
    }
}

/// `rule`: what the client was told.
pub(crate) fn refused(session: &Session, errno: Errno, rule: &str) {
    if let Some(unsaid) = session.story.limits.strangers.allow() {
        let (peer, rule) = (session.peer.to_string(), shorten(rule));
        tracing::warn!(event = "refused", session = session.id, peer, %errno, ?rule, unsaid, "session refused");
    }
    session.story.ends(|| "refused".into());
}

/// It claims uid 0, which it has not proved, for the first time.
pub(crate) fn claimed_root(session: &Session, done_as: &Credentials) {
    if let Some(unsaid) = session.story.limits.clients.allow() {
        let (peer, uid, gid) = (session.peer.to_string(), done_as.uid, done_as.gid);
        tracing::warn!(
            event = "claimed",
            session = session.id,
            peer,
            uid,
            gid,
            rule = "docs/decisions/0010-transports-and-identity.md",
            unsaid,
            "session claims uid 0 and has not proved it: its calls are done as this user"
        );
    }
}

pub(crate) fn suspect(session: &Session) {
    if let Some(unsaid) = session.story.limits.clients.allow() {
        let (peer, rule) = (session.peer.to_string(), "docs/decisions/0008-leases.md, rule 6");
        tracing::warn!(
            event = "suspect",
            session = session.id,
            peer,
            rule,
            unsaid,
            "session does not give back what was recalled"
        );
    }
}

pub(crate) fn acknowledged(session: &Session) {
    if let Some(unsaid) = session.story.limits.clients.allow() {
        let peer = session.peer.to_string();
        tracing::info!(
            event = "acknowledged",
            session = session.id,
            peer,
            unsaid,
            "session has given back again"
        );
    }
}

/// Its lease ran out.
pub(crate) fn fenced(session: &Session) {
    let rule = "docs/decisions/0008-leases.md, rule 6";
    if let Some(unsaid) = session.story.limits.clients.allow() {
        let peer = session.peer.to_string();
        tracing::warn!(
            event = "fenced",
            session = session.id,
            peer,
            rule,
            unsaid,
            "session fenced: its lease ran out"
        );
    }
}

/// The same for one that was forgotten before.
pub(crate) fn fenced_apart(holder: Holder) {
    let session = holder.0;
    tracing::warn!(event = "fenced", session, "session fenced: it did not come back within its lease");
}

/// Its connection was lost; its client may come again.
pub(crate) fn cut(session: &Session, why: &str) {
    if let Some(unsaid) = session.story.limits.clients.allow() {
        let (why, peer) = (shorten(why), session.peer.to_string());
        tracing::info!(
            event = "cut",
            session = session.id,
            peer,
            ?why,
            unsaid,
            "session lost its connection"
        );
    }
}

/// `connection`: what it was called when it connected.
pub(crate) fn resumed(session: &Session, connection: u64) {
    if let Some(unsaid) = session.story.limits.clients.allow() {
        let peer = session.peer.to_string();
        tracing::info!(
            event = "resumed",
            session = session.id,
            connection,
            peer,
            unsaid,
            "session resumed over another connection"
        );
    }
}

/// Its lease ran out, and what it has open and locked is kept for a while.
pub(crate) fn dormant(session: &Session) {
    if let Some(unsaid) = session.story.limits.clients.allow() {
        let peer = session.peer.to_string();
        let rule = "docs/decisions/0009-sessions-over-connections.md";
        tracing::info!(event = "dormant", session = session.id, peer, rule, unsaid, "session dormant");
    }
}

pub(crate) fn ended(session: &Session, end: End) {
    let limits = &session.story.limits;
    let lines = if session.attached().is_some() { &limits.clients } else { &limits.strangers };
    let Some(unsaid) = lines.allow() else { return };
    let why = session.story.why.get().map_or("the connection was lost", String::as_str);
    let (why, peer) = (shorten(why), session.peer.to_string());
    let lasted_s = session.story.since.elapsed().unwrap_or_default().as_secs();
    let (bytes_in, bytes_out) = session.outbox.bytes();
    let event = if end == End::Forgotten { "forgotten" } else { "ended" };
    tracing::info!(
        event,
        session = session.id,
        peer,
        ?why,
        lasted_s,
        bytes_in,
        bytes_out,
        replaced_claims = session.admission.replaced(),
        unsaid,
        "session {event}"
    );
}

/// Enough of a client's number to tell it from others. All of it, with its incarnation, is what it proves
/// itself with when it comes again.
pub(crate) fn client_name(client: u64) -> String {
    format!("{:08x}", client >> 32)
}

fn shorten(text: &str) -> String {
    text.chars().take(SAID).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_cannot_fill_a_disk_with_lines() {
        let lines = Lines::new(3, Duration::from_secs(1));
        let begin = Instant::now();
        let said = |after_ms| lines.allow_at(begin + Duration::from_millis(after_ms));
        assert_eq!([said(0), said(0), said(0)], [Some(0); 3]);
        assert_eq!([said(0), said(10), said(999)], [None; 3]);
        assert_eq!(said(1_000), Some(3));
        assert_eq!(said(1_500), None);
        let in_a_day = 86_400_000;
        let mut written = 0;
        for at in (2_000..in_a_day).step_by(50) {
            written += u64::from(said(at).is_some());
        }
        assert!(written <= in_a_day / 1_000 + 3, "{written}");
        assert!(written >= in_a_day / 1_000 - 10, "{written}");
    }

    #[test]
    fn what_a_peer_says_is_short() {
        assert_eq!(shorten(&"ä".repeat(10_000)).chars().count(), SAID);
    }

    #[test]
    fn the_first_reason_counts() {
        let story = Story::new(&Arc::default(), Kind::Unix);
        story.ends(|| "fenced".into());
        story.ends(|| "closed".into());
        assert_eq!(story.why.get().map(String::as_str), Some("fenced"));
    }

    #[test]
    fn a_clients_number_is_not_shown_as_a_whole() {
        assert_eq!(client_name(0x0123_4567_89ab_cdef), "01234567");
    }
}
