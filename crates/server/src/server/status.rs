//! Status of the server, for `nigh status --server`. The keys are a contract (docs/status.md).

use super::Server;
use crate::lease::leases::LeaseSnapshot;
use crate::os::clock::now;
use crate::session::Session;
use crate::session::locks::LockSnapshot;
use crate::session::log::{LogLimits, client_name};
use nigh_lease::{ChangeId, Holder, HolderReport, LeaseKey};
use nigh_types::{LeaseScope, Time};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Waits of one session that are listed individually.
const WAITS_LISTED: usize = 16;
/// Contended objects that are listed.
const CONTENDED_LISTED: usize = 64;

/// Counters of a server's life.
pub(crate) struct Counters {
    pub limits: Arc<LogLimits>,
    started: (SystemTime, Instant),
    listening: OnceLock<Vec<String>>,
    /// Number of ended sessions, and their traffic.
    sessions: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

impl Default for Counters {
    fn default() -> Counters {
        Counters {
            limits: Arc::default(),
            started: (SystemTime::now(), Instant::now()),
            listening: OnceLock::new(),
            sessions: AtomicU64::new(0),
            bytes_in: AtomicU64::new(0),
            bytes_out: AtomicU64::new(0),
        }
    }
}

impl Counters {
    pub fn count_ended(&self, (bytes_in, bytes_out): (u64, u64)) {
        self.sessions.fetch_add(1, Ordering::Relaxed);
        self.bytes_in.fetch_add(bytes_in, Ordering::Relaxed);
        self.bytes_out.fetch_add(bytes_out, Ordering::Relaxed);
    }
}

/// Data collected for one status. The tables are read one after another, so concurrent changes may appear in only
/// some of them.
struct StatusData {
    now: Time,
    holders: BTreeMap<Holder, HolderReport>,
    /// Sessions that still owe acknowledgements, by change.
    awaited: BTreeMap<ChangeId, Vec<u64>>,
    since: BTreeMap<ChangeId, Time>,
    leases: LeaseSnapshot,
    locks: LockSnapshot,
}

impl StatusData {
    fn of(server: &Server) -> StatusData {
        let leases = server.leases.snapshot();
        let mut awaited = BTreeMap::<ChangeId, Vec<u64>>::new();
        for holder in &leases.report.holders {
            for change in &holder.awaited_by {
                awaited.entry(*change).or_default().push(holder.holder.0);
            }
        }
        StatusData {
            now: now(),
            holders: leases.report.holders.iter().map(|h| (h.holder, h.clone())).collect(),
            awaited,
            since: leases.report.changes.iter().map(|c| (c.change, c.since)).collect(),
            locks: server.locks.snapshot(),
            leases,
        }
    }

    fn ago_ms(&self, at: Time) -> u64 {
        self.now.since(at).0 / 1_000_000
    }

    /// Adds the lease table's data on a session.
    fn lease_fields(&self, session: u64, into: &mut Map<String, Value>) {
        let Some(held) = self.holders.get(&Holder(session)) else { return };
        let since = held.owes_since.map(|at| self.ago_ms(at));
        into.extend([
            ("heard_ms".into(), json!(self.ago_ms(held.last_renewed))),
            ("suspect".into(), json!(held.suspect)),
            ("distrusted_ms".into(), json!(held.penalised_until.map(|at| at.since(self.now).0 / 1_000_000))),
            ("grants".into(), json!({ "read": held.grants, "write": 0 })),
            ("recalls".into(), json!({ "owed": held.owed, "oldest_ms": since })),
        ]);
    }

    /// Lists the calls of a session that wait for other sessions.
    fn waits(&self, session: u64) -> Vec<Value> {
        let parked = self.leases.parked.iter().filter(|parked| parked.session == session).map(|parked| {
            let since = self.since.get(&parked.change).map(|at| self.ago_ms(*at));
            let others = self.awaited.get(&parked.change);
            json!({ "call": parked.call, "for": others.into_iter().flatten().collect::<Vec<_>>(), "since_ms": since })
        });
        let locks = self.locks.waits.iter().filter(|(waiter, _)| *waiter == session);
        let locks = locks.map(|(_, others)| json!({ "call": "lock", "for": others, "since_ms": null }));
        parked.chain(locks).take(WAITS_LISTED).collect()
    }

    fn session(&self, session: &Arc<Session>, queued: u64) -> Value {
        let mut shown = Map::new();
        let (outstanding, running) = session.calls();
        let parked = self.leases.parked.iter().filter(|parked| parked.session == session.id).count();
        let waiting = self.locks.waits.iter().filter(|(waiter, _)| *waiter == session.id).count();
        let (bytes_in, bytes_out) = session.outbox.bytes();
        let (unconfirmed, held) = session.kept_bytes();
        let away = session.disconnected_since();
        let since = session.log.since;
        shown.extend([
            ("session".into(), json!(session.id)),
            ("connected".into(), json!(away.is_none())),
            ("away_s".into(), json!(away.map(|since| since.elapsed().as_secs()))),
            ("dormant".into(), json!(session.phase.is_courtesy())),
            ("peer".into(), json!(session.peer.to_string())),
            ("transport".into(), json!(session.log.link.to_string())),
            ("since".into(), json!(unix_s(since))),
            ("lasted_s".into(), json!(since.elapsed().unwrap_or_default().as_secs())),
            (
                "calls".into(),
                json!({
                    "unanswered": outstanding, "running": running, "queued": queued, "parked": parked,
                    "waiting_for_locks": waiting,
                }),
            ),
            ("waits".into(), json!(self.waits(session.id))),
            (
                "bytes".into(),
                json!({ "in": bytes_in, "out": bytes_out, "unconfirmed": unconfirmed, "held": held }),
            ),
            ("replaced_claims".into(), json!(session.credential_policy.replaced())),
        ]);
        if let Some(attached) = session.attached() {
            shown.extend([
                ("client".into(), json!(client_name(attached.who.0))),
                ("export".into(), json!(attached.export.path().to_string_lossy())),
                ("open_files".into(), json!(attached.files.count())),
                ("locks".into(), json!(self.locks.held.get(&session.id).copied().unwrap_or(0))),
            ]);
        }
        self.lease_fields(session.id, &mut shown);
        Value::Object(shown)
    }

    /// Describes a discarded session whose lease still runs.
    fn detached_session(&self, holder: Holder, client: u64) -> Value {
        let mut shown = Map::new();
        shown.insert("session".into(), json!(holder.0));
        shown.insert("connected".into(), json!(false));
        shown.insert("client".into(), json!(client_name(client)));
        self.lease_fields(holder.0, &mut shown);
        Value::Object(shown)
    }
}

impl Server {
    /// Sets the listen addresses, for display.
    pub(crate) fn set_listening(&self, places: Vec<String>) {
        let _ = self.meter.listening.set(places);
    }

    /// Returns the object that `nigh status --server --json` prints. It contains no authentication secrets.
    #[must_use]
    pub fn status(&self) -> Value {
        let sessions = self.all_sessions();
        let survey = StatusData::of(self);
        let (started, began) = self.meter.started;
        let live = sessions.iter().map(|session| survey.session(session, self.pool.queued(session)));
        let cut =
            survey.leases.detached.iter().map(|(holder, client)| survey.detached_session(*holder, *client));
        json!({
            "server": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "uid": rustix::process::geteuid().as_raw(),
            "started": unix_s(started),
            "uptime_s": began.elapsed().as_secs(),
            "stopping": self.inflight.is_stopping(),
            "term_ms": self.options.session_term.0 / 1_000_000,
            "listening": self.listening(),
            "exports": self.named_exports(&sessions),
            "sessions": live.chain(cut).collect::<Vec<_>>(),
            "watch": self.watch.report(),
            "contended": self.contended(&survey.leases.report.contended),
            "totals": self.totals(&sessions, &survey),
        })
    }

    fn listening(&self) -> Vec<String> {
        let own = self.meter.listening.get().cloned().unwrap_or_default();
        let guests = self.guests.lock();
        own.into_iter().chain(guests.values().flat_map(|(_, listening)| listening.clone())).collect()
    }

    fn named_exports(&self, sessions: &[Arc<Session>]) -> Vec<Value> {
        let mut counts = BTreeMap::<_, u64>::new();
        for attached in sessions.iter().filter_map(|session| session.attached()) {
            *counts.entry(attached.export.path().to_path_buf()).or_default() += 1;
        }
        let guests: Vec<_> = self.guests.lock().values().map(|(exports, _)| Arc::clone(exports)).collect();
        let all = guests.iter().map(|exports| &**exports);
        let named = [&self.options.exports].into_iter().chain(all).flat_map(|exports| exports.iter());
        let mut shown = Vec::new();
        for (name, path) in named.map(|(name, path)| (name, path.to_path_buf())).collect::<Vec<_>>() {
            let count = counts.remove(&path).unwrap_or(0);
            shown.push(json!({ "name": name, "path": path.to_string_lossy(), "sessions": count }));
        }
        let others = counts.into_iter();
        shown.extend(
            others.map(
                |(path, count)| json!({ "name": null, "path": path.to_string_lossy(), "sessions": count }),
            ),
        );
        shown
    }

    /// Lists objects that are temporarily granted to no client. Recently used directories are shown with their paths.
    fn contended(&self, keys: &[LeaseKey]) -> Vec<Value> {
        let exports: Vec<_> = self.exports.lock().values().filter_map(Weak::upgrade).collect();
        let shown = keys.iter().take(CONTENDED_LISTED).map(|LeaseKey { object, covers }| {
            let path = exports.iter().find_map(|export| export.resolver().path_of(*object));
            json!({
                "inode": object.ino,
                "covers": match covers { LeaseScope::Directory | LeaseScope::Dentry | LeaseScope::NegativeDentry => "names", LeaseScope::Attributes => "attributes", LeaseScope::Data => "data" },
                "path": path.map(|path| path.to_string_lossy().into_owned()),
            })
        });
        shown.collect()
    }

    fn totals(&self, sessions: &[Arc<Session>], survey: &StatusData) -> Value {
        let report = &survey.leases.report;
        let (mut bytes_in, mut bytes_out) =
            (self.meter.bytes_in.load(Ordering::Relaxed), self.meter.bytes_out.load(Ordering::Relaxed));
        for (read, written) in sessions.iter().map(|session| session.outbox.bytes()) {
            bytes_in += read;
            bytes_out += written;
        }
        let counters = &report.counters;
        let (lent, waiting) = self.pool.lent();
        json!({
            "sessions": sessions.len(),
            "sessions_ended": self.meter.sessions.load(Ordering::Relaxed),
            "calls": { "under_way": self.inflight.under_way(), "parked": survey.leases.parked.len() },
            "grants": report.holders.iter().map(|holder| holder.grants).sum::<u64>(),
            "recalls_owed": report.holders.iter().map(|holder| holder.owed).sum::<u64>(),
            "contended": report.contended.len(),
            "granted": counters.granted,
            "recalled": counters.recalled,
            "held": counters.prepared,
            "acknowledged": counters.acknowledged,
            "suspected": counters.suspected,
            "fenced": counters.fenced,
            "bytes": { "in": bytes_in, "out": bytes_out, "held": self.reaper.charged_bytes() },
            "descriptors": { "files": self.descriptors.files(), "cached": self.descriptors.cached() },
            "threads": { "lent": lent, "waiting": waiting },
        })
    }
}

fn unix_s(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
