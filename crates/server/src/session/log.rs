//! Session log: one line for each event of a session, with uniform fields.
//!
//! Text from a peer is quoted, so that it can neither end a line nor contain terminal escapes. Credentials are never
//! logged. Before a connection is attached its peer may be any stranger, so lines about it are rate-limited.

use crate::session::{End, Session};
use nigh_link::{Kind, Peer};
use nigh_types::{Credentials, Errno, Term};
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

/// Maximum length of text from a client, in characters.
const MOST_TEXT: usize = 200;

/// Rate limit on log lines that a peer can cause: `burst` lines at once, then one per `pause`.
#[derive(Debug)]
pub(crate) struct LineLimiter {
    burst: u32,
    pause: Duration,
    state: Mutex<LimiterState>,
}

#[derive(Debug, Default)]
struct LimiterState {
    /// When the budget for all written lines is restored.
    budget_restored: Option<Instant>,
    suppressed: u64,
}

impl LineLimiter {
    pub(crate) fn new(burst: u32, pause: Duration) -> LineLimiter {
        LineLimiter { burst, pause, state: Mutex::default() }
    }

    /// Returns the number of suppressed lines if a line may be written.
    pub(crate) fn allow(&self) -> Option<u64> {
        self.allow_at(Instant::now())
    }

    fn allow_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        let paid = state.budget_restored.unwrap_or(now).max(now);
        if paid - now > self.pause * self.burst.saturating_sub(1) {
            state.suppressed += 1;
            return None;
        }
        state.budget_restored = Some(paid + self.pause);
        Some(std::mem::take(&mut state.suppressed))
    }
}

/// Rate limits by kind of peer.
#[derive(Debug)]
pub(crate) struct LogLimits {
    strangers: LineLimiter,
    clients: LineLimiter,
}

impl Default for LogLimits {
    fn default() -> LogLimits {
        LogLimits {
            strangers: LineLimiter::new(20, Duration::from_secs(1)),
            clients: LineLimiter::new(1_000, Duration::from_millis(50)),
        }
    }
}

/// Properties of a session for log and status.
#[derive(Debug)]
pub(crate) struct SessionLog {
    limits: Arc<LogLimits>,
    pub(crate) link: Kind,
    pub(crate) since: SystemTime,
    end_reason: OnceLock<String>,
}

impl SessionLog {
    pub(crate) fn new(limits: &Arc<LogLimits>, link: Kind) -> SessionLog {
        SessionLog { limits: Arc::clone(limits), link, since: SystemTime::now(), end_reason: OnceLock::new() }
    }

    /// Records why the session ends; the first reason counts.
    pub(crate) fn set_end_reason(&self, why: impl FnOnce() -> String) {
        let _ = self.end_reason.get_or_init(why);
    }
}

pub(crate) fn connected(story: &SessionLog, session: u64, peer: &Peer) {
    if let Some(unsaid) = story.limits.strangers.allow() {
        let (peer, link) = (peer.to_string(), story.link);
        tracing::info!(event = "connected", session, peer, %link, unsaid, "session connected");
    }
}

/// Logs a connection that ended before its HELLO.
pub(crate) fn left(story: &SessionLog, session: u64, peer: &Peer, why: &str) {
    if let Some(unsaid) = story.limits.strangers.allow() {
        let (why, peer) = (shorten(why), peer.to_string());
        tracing::info!(event = "ended", session, peer, ?why, unsaid, "session ended");
    }
}

pub(crate) fn attached(session: &Session, term: Term) {
    let Some(attached) = session.attached() else { return };
    if let Some(unsaid) = session.log.limits.clients.allow() {
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

/// Logs a refusal. `rule`: the message to the client.
pub(crate) fn refused(session: &Session, errno: Errno, rule: &str) {
    if let Some(unsaid) = session.log.limits.strangers.allow() {
        let (peer, rule) = (session.peer.to_string(), shorten(rule));
        tracing::warn!(event = "refused", session = session.id, peer, %errno, ?rule, unsaid, "session refused");
    }
    session.log.set_end_reason(|| "refused".into());
}

/// Logs a session's first claim of uid 0 without proof.
pub(crate) fn claimed_root(session: &Session, done_as: &Credentials) {
    if let Some(unsaid) = session.log.limits.clients.allow() {
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
    if let Some(unsaid) = session.log.limits.clients.allow() {
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
    if let Some(unsaid) = session.log.limits.clients.allow() {
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

/// Logs the expiry of a session's lease.
pub(crate) fn fenced(session: &Session) {
    let rule = "docs/decisions/0008-leases.md, rule 6";
    if let Some(unsaid) = session.log.limits.clients.allow() {
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

/// Logs the loss of a session's connection; the client may reconnect.
pub(crate) fn cut(session: &Session, why: &str) {
    if let Some(unsaid) = session.log.limits.clients.allow() {
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

/// Logs a resumption. `connection`: the number that the new connection had before.
pub(crate) fn resumed(session: &Session, connection: u64) {
    if let Some(unsaid) = session.log.limits.clients.allow() {
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

/// Logs that a session's lease has expired, while its open files and locks are kept for a time.
pub(crate) fn dormant(session: &Session) {
    if let Some(unsaid) = session.log.limits.clients.allow() {
        let peer = session.peer.to_string();
        let rule = "docs/decisions/0009-sessions-over-connections.md";
        tracing::info!(event = "dormant", session = session.id, peer, rule, unsaid, "session dormant");
    }
}

pub(crate) fn ended(session: &Session, end: End) {
    let limits = &session.log.limits;
    let lines = if session.attached().is_some() { &limits.clients } else { &limits.strangers };
    let Some(unsaid) = lines.allow() else { return };
    let why = session.log.end_reason.get().map_or("the connection was lost", String::as_str);
    let (why, peer) = (shorten(why), session.peer.to_string());
    let lasted_s = session.log.since.elapsed().unwrap_or_default().as_secs();
    let (bytes_in, bytes_out) = session.outbox.bytes();
    let event = if end == End::Discarded { "forgotten" } else { "ended" };
    tracing::info!(
        event,
        session = session.id,
        peer,
        ?why,
        lasted_s,
        bytes_in,
        bytes_out,
        replaced_claims = session.credential_policy.replaced(),
        unsaid,
        "session {event}"
    );
}

/// Returns a prefix of a client's id, enough to tell clients apart. The whole id, with the incarnation, authenticates
/// the client when it returns.
pub(crate) fn client_name(client: u64) -> String {
    format!("{:08x}", client >> 32)
}

fn shorten(text: &str) -> String {
    text.chars().take(MOST_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_about_strangers_are_rate_limited() {
        let lines = LineLimiter::new(3, Duration::from_secs(1));
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
    fn peer_text_in_log_is_truncated() {
        assert_eq!(shorten(&"ä".repeat(10_000)).chars().count(), MOST_TEXT);
    }

    #[test]
    fn session_log_keeps_first_end_reason() {
        let story = SessionLog::new(&Arc::default(), Kind::Unix);
        story.set_end_reason(|| "fenced".into());
        story.set_end_reason(|| "closed".into());
        assert_eq!(story.end_reason.get().map(String::as_str), Some("fenced"));
    }

    #[test]
    fn client_id_is_logged_only_in_part() {
        assert_eq!(client_name(0x0123_4567_89ab_cdef), "01234567");
    }
}
