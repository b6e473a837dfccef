//! The server: exports served to sessions over streams.

mod status;

use crate::connection::idle::IdleConnections;
use crate::connection::quotas::ServerLimits;
use crate::export::exports::Exports;
use crate::export::states::States;
use crate::export::{Export, ExportError, ExportOptions, ObjectWatch, OpenedRoot, WatchExport};
use crate::lease::holder::LeaseSession;
use crate::lease::leases::Leases;
use crate::limits::descriptors::Descriptors;
use crate::limits::inflight_calls::InflightCalls;
use crate::limits::reaper::SessionReaper;
use crate::os::clock::now;
use crate::os::impersonate::can_impersonate;
use crate::os::stat::Stat;
use crate::pool::{OWN, Pool};
use crate::session::grace::Grace;
use crate::session::locks::Locks;
use crate::session::log;
use crate::session::registry::{ClientIncarnation, SessionRegistry};
use crate::session::reply_cache::{Executing, ReplyCache};
use crate::session::{Attached, End, Session};
use crate::watch::{Watch, WatchMethod};
use nigh_lease::{LeaseConfig, LeaseReport};
use nigh_native::SESSION_TERM;
use nigh_types::{Origin, Span, Time};
use parking_lot::Mutex;
use rustc_hash::FxHashSet;
use status::Counters;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Parent of the state directories of all exports.
    pub state_dir: PathBuf,
    pub export: ExportOptions,
    /// Exports that clients may attach to by name.
    pub exports: Exports,
    /// Threads that execute calls; at least 4.
    pub threads: u32,
    /// Maximum number of open files of one session.
    pub files_per_session: u64,
    /// Lifetime of a session without renewal, on every transport.
    pub session_term: Span,
    /// Lease configuration; its term is replaced by `session_term`.
    pub leases: LeaseConfig,
    pub bounds: ServerLimits,
    /// Limit on the server's descriptors, if below the process limit.
    pub descriptors: Option<u64>,
    pub watch: WatchMethod,
}

impl ServerOptions {
    #[must_use]
    pub fn new(state_dir: PathBuf) -> ServerOptions {
        ServerOptions {
            state_dir,
            export: ExportOptions::default(),
            exports: Exports::default(),
            threads: 8,
            files_per_session: 1 << 16,
            session_term: SESSION_TERM,
            leases: LeaseConfig::default(),
            bounds: ServerLimits::default(),
            descriptors: None,
            watch: WatchMethod::default(),
        }
    }
}

/// Server of directories. A session attaches to an export by name, or, where its peer may do so, to any directory by
/// its path.
///
/// An export is opened when its first session attaches and closed after its last one. Sessions that name one
/// directory share an export. Dropping the server ends its sessions.
pub struct Server {
    pub(crate) options: ServerOptions,
    own_exports: Arc<Exports>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) leases: Arc<Leases>,
    pub(crate) watch: Arc<Watch>,
    pub(crate) reaper: Arc<SessionReaper>,
    pub(crate) idle_connections: Arc<IdleConnections>,
    /// Exports and listen addresses of guests, by scope ([`nigh_link::Peer::with_scope`]).
    pub(crate) guests: Mutex<BTreeMap<u64, Served>>,
    /// Open exports, by export id and by the mount through which they are reached.
    exports: OpenExports,
    /// Locks of exports that are being opened, by export id. Opening may wait for a filesystem without bound. Each
    /// lock comes before `exports` in lock order.
    opening: Arc<Mutex<HashMap<String, Arc<Mutex<()>>>>>,
    states: Arc<States>,
    /// Comes before the lease table and `Session::wire` in lock order.
    sessions: Mutex<BTreeMap<u64, Arc<Session>>>,
    pub(crate) locks: Arc<Locks>,
    pub(crate) registry: SessionRegistry,
    pub(crate) grace: Arc<Grace>,
    pub(crate) descriptors: Arc<Descriptors>,
    pub(crate) memory: ReplyCache,
    pub(crate) inflight: Arc<InflightCalls>,
    pub(crate) meter: Counters,
    /// The highest session number of earlier servers; new sessions get higher numbers.
    last_of_earlier: u64,
    last_session: AtomicU64,
    /// Held while a session takes its place within the limits; comes before all other locks.
    pub(crate) quota_lock: Mutex<()>,
    /// Connections that have not authenticated yet.
    pub(crate) unattached: AtomicU64,
    /// The server stops and ends all sessions.
    ending: AtomicBool,
    /// Exports with orphans of an earlier server: they stay open without sessions until these are removed.
    with_leftovers: Mutex<Vec<Arc<Export>>>,
    /// Exports whose idle descriptors are being closed, by memory address.
    sweeping: Arc<Mutex<FxHashSet<usize>>>,
    /// Discarded sessions that keep their locks, because the loss of the locks could not be recorded yet.
    unrecorded: Mutex<Vec<Unrecorded>>,
}

/// Exports and listen addresses of a guest.
type Served = (Arc<Exports>, Vec<String>);
/// By export id and by the mount through which the export is reached.
type OpenExports = Arc<Mutex<HashMap<(String, u64), Weak<Export>>>>;
/// A session, how it ended, and until when its client may trust its grants.
type Unrecorded = (Arc<Session>, End, Time);

/// Descriptors reserved for uses other than open files.
pub(crate) const SPARE_DESCRIPTORS: u64 = 256;

impl Server {
    /// Starts the server's threads. Raises the soft limit of descriptors of this process to its hard limit.
    ///
    /// # Errors
    /// Fails also if another server uses the state directory.
    pub fn new(mut options: ServerOptions) -> io::Result<Arc<Server>> {
        let held = options.export.directories.get() as u64 + options.export.readers.get() as u64;
        let limit = raise_descriptor_limit().min(options.descriptors.unwrap_or(u64::MAX));
        let descriptors =
            Descriptors::new(limit.saturating_sub(SPARE_DESCRIPTORS).max(64), can_impersonate());
        let room = limit.saturating_sub(held + SPARE_DESCRIPTORS);
        options.files_per_session = options.files_per_session.min(room.max(16));
        let (register, absent, last) = SessionRegistry::open(&options.state_dir)?;
        let pool = Pool::start(options.threads)?;
        let config = LeaseConfig { term: options.session_term, ..options.leases };
        let leases = Leases::new(config, Some(Box::new(Arc::downgrade(&pool))));
        leases.start_clock()?;
        if !absent.is_empty() {
            let sessions = absent.len();
            tracing::info!(sessions, "sessions of the server before this one are waited for");
        }
        // The grants of the earlier server are older than this moment.
        let grace = Arc::new(Grace::new(absent, now().after(config.lapse())));
        let states = States::new(options.state_dir.clone());
        let watch = Watch::new(&leases, options.watch)?;
        let server = Arc::new(Server {
            own_exports: Arc::new(options.exports.clone()),
            pool,
            leases,
            watch,
            reaper: Arc::new(SessionReaper::new(options.bounds.bytes)),
            idle_connections: Arc::new(IdleConnections::new()?),
            options,
            guests: Mutex::default(),
            exports: Arc::default(),
            opening: Arc::default(),
            states: Arc::new(states),
            sessions: Mutex::default(),
            descriptors: Arc::new(descriptors),
            locks: Arc::new(Locks::new(Arc::clone(&grace))),
            registry: register,
            grace,
            memory: ReplyCache::default(),
            inflight: Arc::default(),
            meter: Counters::default(),
            last_of_earlier: last,
            last_session: AtomicU64::new(last),
            quota_lock: Mutex::default(),
            unattached: AtomicU64::new(0),
            ending: AtomicBool::new(false),
            with_leftovers: Mutex::default(),
            sweeping: Arc::default(),
            unrecorded: Mutex::default(),
        });
        let (reaper, weak) = (Arc::clone(&server.reaper), Arc::downgrade(&server));
        std::thread::Builder::new().name("nigh-reaper".into()).spawn(move || {
            let mut busy = true;
            while reaper.wait(busy) {
                let Some(server) = weak.upgrade() else { return };
                busy = server.reap();
            }
        })?;
        let (quiet, weak) = (Arc::clone(&server.idle_connections), Arc::downgrade(&server));
        std::thread::Builder::new().name("nigh-quiet".into()).spawn(move || quiet.listen(&weak))?;
        Ok(server)
    }

    /// Counts active sessions and connections that are being set up.
    #[must_use]
    pub fn session_count(&self) -> u64 {
        let greeting = if self.is_ending() { 0 } else { self.unattached.load(Ordering::SeqCst) };
        self.sessions.lock().len() as u64 + greeting
    }

    /// Refuses new calls and new connections; accepted calls go on. Calls that have had no effect and wait for a
    /// disconnected client are dropped: the client resends them to the next server.
    pub fn stop_taking(&self) {
        self.inflight.stop();
        drop(self.grace.take_parked());
        for session in self.all_sessions() {
            session.prefetch_jobs.end_all();
            if session.disconnected_since().is_some() {
                session.outbox.drop_held();
            } else {
                session.outbox.drop_prefetch_jobs();
            }
        }
    }

    /// Counts accepted calls that are not finished. Calls that wait for a file lock do not count, as they may wait
    /// without bound.
    #[must_use]
    pub fn calls_under_way(&self) -> u64 {
        self.inflight.under_way()
    }

    /// Reports the leases and the waits for them.
    #[must_use]
    pub fn leases(&self) -> LeaseReport {
        self.leases.report()
    }

    /// Ends all sessions: closes each connection once its queued messages are sent. Clients get no goodbye, so they
    /// reconnect to the next server of these directories, which finds their orphans. `why` is for the log.
    pub fn end_sessions(&self, why: &str) {
        self.inflight.stop();
        let exports: Vec<_> = self.exports.lock().values().filter_map(Weak::upgrade).collect();
        exports.iter().for_each(|export| export.keep_orphans());
        // Before the sessions end, so that their locks do not go to other clients.
        self.locks.stop();
        self.ending.store(true, Ordering::SeqCst);
        let kept = std::mem::take(&mut *self.with_leftovers.lock());
        drop(kept);
        for session in self.all_sessions() {
            session.log.set_end_reason(|| why.to_owned());
            session.stop();
            if session.disconnected_since().is_some() {
                self.discard(&session, End::Disconnected);
            }
        }
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    pub(crate) fn next_session_id(&self) -> u64 {
        self.last_session.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn add_guest(&self, scope: u64, exports: Exports, listening: Vec<String>) {
        self.guests.lock().insert(scope, (Arc::new(exports), listening));
    }

    pub(crate) fn remove_guest(&self, scope: u64) {
        self.guests.lock().remove(&scope);
    }

    /// Returns the exports that clients of this scope may attach to by name; `None` if the scope's guest has ended.
    pub(crate) fn exports_of(&self, scope: u64) -> Option<Arc<Exports>> {
        match scope {
            0 => Some(Arc::clone(&self.own_exports)),
            _ => self.guests.lock().get(&scope).map(|(exports, _)| Arc::clone(exports)),
        }
    }

    pub(crate) fn session(&self, id: u64) -> Option<Arc<Session>> {
        self.sessions.lock().get(&id).cloned()
    }

    /// Makes a session active in place of earlier sessions of its client. `dropped`: the client has dropped all
    /// grants of those sessions. Returns false if the client has made a later connection meanwhile.
    pub(crate) fn begin(&self, session: &Arc<Session>, attached: &Attached, dropped: bool) -> bool {
        let moment = session.moment();
        let mut sessions = self.sessions.lock();
        let is_later =
            |other: &&Arc<Session>| is_other_session_of(other, session, attached) && other.moment() > moment;
        if sessions.values().any(|other| is_later(&other)) {
            return false;
        }
        sessions.insert(session.id, Arc::clone(session));
        drop(sessions);
        self.discard_earlier(session, attached, dropped);
        self.locks.begin(session, attached.who, dropped);
        let leased = Arc::clone(session) as Arc<dyn LeaseSession>;
        self.leases.attach(&leased, attached.who, &attached.lease_terms(session.origin), dropped);
        if self.is_ending() {
            session.stop();
        }
        self.reaper.notify();
        true
    }

    /// Ends earlier sessions of the client that begins this one.
    pub(crate) fn discard_earlier(&self, session: &Session, attached: &Attached, dropped: bool) {
        let moment = session.moment();
        let mut earlier = self.sessions_of(session, attached);
        earlier.retain(|other| other.moment() <= moment);
        for earlier in earlier {
            earlier.log.set_end_reason(|| "its client began another".into());
            self.discard(&earlier, if dropped { End::Goodbye } else { End::Disconnected });
        }
    }

    /// Returns the other sessions of this session's client.
    pub(crate) fn sessions_of(&self, session: &Session, attached: &Attached) -> Vec<Arc<Session>> {
        let mut all = self.all_sessions();
        all.retain(|other| is_other_session_of(other, session, attached));
        all
    }

    pub(crate) fn all_sessions(&self) -> Vec<Arc<Session>> {
        self.sessions.lock().values().cloned().collect()
    }

    /// Removes an ended session.
    pub(crate) fn discard(&self, session: &Arc<Session>, end: End) {
        let goodbye = end == End::Goodbye;
        let lapsed = session.lapse_moment();
        let mut sessions = self.sessions.lock();
        if sessions.remove(&session.id).is_none() {
            return;
        }
        // Under the lock, so that a lookup finds either the session or its stored replies.
        let earliest = match session.attached().filter(|_| !goodbye && !self.is_ending()) {
            Some(attached) => session.take_replies().map(|answers| {
                let executing = Arc::downgrade(session) as Weak<dyn Executing>;
                self.memory.store(executing, attached.reply_client(&session.peer), answers)
            }),
            None => None,
        };
        drop(sessions);
        drop(earliest);
        session.abandon();
        self.pool.forget(session);
        self.grace.forget(session);
        if let Some(attached) = session.attached() {
            self.leases.remove_session(&**session, attached.who, goodbye);
            if goodbye {
                self.locks.leave(session.id);
                // Other calls in the grace period no longer wait for a client that has left.
                self.returned(attached.who);
            }
        }
        self.release_locks((Arc::clone(session), end, lapsed));
        self.reaper.notify();
        self.meter.count_ended(session.outbox.bytes());
        log::ended(session, end);
    }

    /// Last step of a session's removal: frees its locks for other clients. That waits until the loss is recorded,
    /// since the next server would otherwise grant the locks to this client.
    fn release_locks(&self, (session, end, lapsed): Unrecorded) {
        let goodbye = end == End::Goodbye;
        let locks = self.locks.are_held_by(session.id);
        let loses = !goodbye && !self.is_ending();
        if loses && !self.registry.record_lost_locks(session.id, locks) && locks {
            // The session reaper tries again.
            return self.unrecorded.lock().push((session, end, lapsed));
        }
        session.close();
        // The next server waits for the clients of this one, except those that have left.
        if goodbye || !self.is_ending() {
            self.registry.end(session.id, if goodbye { Time(0) } else { lapsed });
            self.registry.tidy(now());
        }
    }

    /// Expires sessions of disconnected clients and tidies exports. Returns whether it should run again soon.
    fn reap(&self) -> bool {
        let now = now();
        if self.grace.expire_absent(now) > 0 {
            tracing::warn!(
                "sessions of the server before this one were not resumed: changes no longer wait for them"
            );
        }
        self.end_grace();
        let unrecorded = std::mem::take(&mut *self.unrecorded.lock());
        unrecorded.into_iter().for_each(|session| self.release_locks(session));
        self.expire_unneeded_sessions();
        for session in self.all_sessions() {
            if session.phase.is_expiring() {
                self.discard(&session, End::Discarded);
            }
        }
        let exports = self.sweep();
        self.limit_courtesy_sessions();
        self.limit_memory();
        self.limit_files();
        self.registry.tidy(now);
        let remembers = self.memory.tidy();
        remembers || exports > 0 || self.grace.is_active() || !self.unrecorded.lock().is_empty()
    }

    /// Closes idle descriptors of all exports. Returns the number of exports.
    fn sweep(&self) -> u64 {
        let exports = self.open_exports();
        self.keep_open(&exports);
        self.tidy_states();
        let count = exports.len() as u64;
        // One job per export: closing may wait for a hung filesystem.
        for export in exports {
            let (sweeping, at) = (Arc::clone(&self.sweeping), Arc::as_ptr(&export).addr());
            if sweeping.lock().insert(at) {
                self.pool.later(OWN, move || {
                    export.close_idle(Instant::now());
                    drop(export);
                    sweeping.lock().remove(&at);
                });
            }
        }
        count
    }

    /// Keeps the exports with leftovers open, and no others.
    fn keep_open(&self, exports: &[Arc<Export>]) {
        let mut kept = self.with_leftovers.lock();
        let is_over = |export: &mut Arc<Export>| self.is_ending() || !export.has_leftovers();
        let over: Vec<_> = kept.extract_if(.., is_over).collect();
        for export in exports.iter().filter(|export| !self.is_ending() && export.has_leftovers()) {
            if !kept.iter().any(|known| Arc::ptr_eq(known, export)) {
                kept.push(Arc::clone(export));
            }
        }
        drop(kept);
        drop(over);
    }

    fn open_exports(&self) -> Vec<Arc<Export>> {
        let mut exports = self.exports.lock();
        let open: Vec<_> = exports.values().filter_map(Weak::upgrade).collect();
        let closed = exports.extract_if(|_, export| export.strong_count() == 0);
        closed.for_each(|((id, _), _)| self.states.note_closed(id));
        open
    }

    /// Removes the state of deleted directories, on a thread that may wait for their filesystem.
    fn tidy_states(&self) {
        let sweeping = Arc::clone(&self.sweeping);
        if !sweeping.lock().insert(0) {
            return;
        }
        let (exports, opening) = (Arc::clone(&self.exports), Arc::clone(&self.opening));
        let states = Arc::clone(&self.states);
        let guests: Vec<Arc<Exports>> =
            self.guests.lock().values().map(|(exports, _)| Arc::clone(exports)).collect();
        let served = guests.iter().chain([&self.own_exports]).flat_map(|exports| exports.iter());
        let served: Vec<PathBuf> = served.map(|(_, path)| path.to_owned()).collect();
        self.pool.later(OWN, move || {
            states.tidy(&served, &|id, remove| {
                let lock = Arc::clone(opening.lock().entry(id.to_owned()).or_default());
                let Some(_one) = lock.try_lock() else { return };
                let is_open = |((of, _), export): (&(String, u64), &Weak<Export>)| {
                    of == id && export.strong_count() > 0
                };
                if !exports.lock().iter().any(is_open) {
                    remove();
                }
            });
            sweeping.lock().remove(&0);
        });
    }

    /// Ends the grace period's wait for this client.
    pub(crate) fn returned(&self, who: ClientIncarnation) {
        self.grace.returned(who);
        self.end_grace();
    }

    fn end_grace(&self) {
        let parked = self.grace.end(|| self.registry.forget_absent(self.last_of_earlier));
        parked.into_iter().for_each(|job| self.pool.submit(job));
    }

    pub(crate) fn export(
        &self,
        root: OwnedFd,
        path: &Path,
        origin: Origin,
    ) -> Result<Arc<Export>, ExportError> {
        let opened = OpenedRoot::new(root, path)?;
        let key = opened.key();
        let opening = {
            let mut opening = self.opening.lock();
            opening.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(opening.entry(key.0.clone()).or_default())
        };
        let _one = opening.lock();
        let twin = {
            let exports = self.exports.lock();
            if let Some(export) = exports.get(&key).and_then(Weak::upgrade) {
                return Ok(export);
            }
            // Through another mount the directory may be read-only or partly hidden, but its ids are equal.
            let mut twins = exports.iter().filter(|((id, _), _)| *id == key.0);
            twins.find_map(|(_, twin)| twin.upgrade())
        };
        let ids = match &twin {
            Some(twin) => Arc::clone(&twin.resolver().ids),
            None => opened.open_ids(path, &self.options.state_dir)?,
        };
        if !self.options.exports.iter().any(|(_, named)| named == path) {
            self.states.note(&key.0, &opened.root, path, origin);
        }
        let watch = |root: &OwnedFd, stat: &Stat, filesystem| -> Arc<dyn ObjectWatch> {
            self.watch.watch_export(root, stat, filesystem)
        };
        let how = (self.options.export, Some(&watch as &WatchExport<'_>), &self.descriptors);
        let export = Arc::new(Export::of(opened, path, ids, how)?);
        let lapse = LeaseConfig { term: self.options.session_term, ..self.options.leases }.lapse();
        export.set_grace(lapse, self.grace.flag());
        if twin.is_none() {
            export.find_orphans();
        }
        if export.has_leftovers() {
            self.with_leftovers.lock().push(Arc::clone(&export));
        }
        self.exports.lock().insert(key, Arc::downgrade(&export));
        Ok(export)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end_sessions("the server stops");
        self.reaper.stop();
        self.pool.stop();
        self.leases.stop();
        self.watch.stop();
        self.idle_connections.stop();
    }
}

/// Whether `other` is another session of this client.
fn is_other_session_of(other: &Session, session: &Session, attached: &Attached) -> bool {
    let who = other.attached().map(|other| other.who);
    other.id != session.id && who == Some(attached.who) && other.peer.has_same_rights(&session.peer)
}

fn raise_descriptor_limit() -> u64 {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    let before = limit.current;
    limit.current = limit.maximum;
    match setrlimit(Resource::Nofile, limit) {
        Ok(()) => limit.maximum.unwrap_or(u64::MAX),
        Err(_) => before.unwrap_or(u64::MAX),
    }
}

#[cfg(test)]
mod tests;
