//! Durable record of the active sessions. After a crash the next server waits for their clients before it allows
//! changes of facts that those clients may still trust (docs/decisions/0009-sessions-over-connections.md).
//!
//! The file `sessions` in the state directory is text. Its first line is the version. Then follow `= SESSION`, the
//! highest session number so far, and a line `+ SESSION CLIENT INCARNATION` for each session, all numbers in
//! hexadecimal. A change overwrites a line's sign in place, which works even on a full disk. `?`: locks of this
//! session may have been granted to another client; the client's reclaim changes it back to `+`. `-`: the session has
//! ended.
//!
//! An unterminated line was never acted on, and no line is ever appended behind one. The file is rewritten, through a
//! rename, after a failed append, at each start, and when most lines are obsolete.

use crate::export::{is_disk_full, make_private};
use crate::os::file_lock;
use nigh_types::Time;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const TITLE: &str = "nigh sessions 1\n";
/// Obsolete lines that trigger no rewrite.
const SLACK: u64 = 256;

/// A client and its incarnation.
pub(crate) type ClientIncarnation = (u64, u64);

/// An active session.
#[derive(Clone, Copy)]
struct Entry {
    who: ClientIncarnation,
    /// No other client can have held the session's locks.
    locks_intact: bool,
    /// Offset of the session's line in bytes.
    at: u64,
}

/// The session registry: the file of the active sessions.
pub(crate) struct SessionRegistry {
    dir: PathBuf,
    state: Mutex<Result<State, io::Error>>,
}

struct State {
    path: PathBuf,
    /// The file that the path leads to, also after a power failure. `None`: there was no space for a file, or the
    /// directory could not be synced.
    file: Option<File>,
    /// Length in bytes of the complete lines.
    length: u64,
    /// The bytes behind the complete lines are undefined: the file is rewritten before any append.
    torn: bool,
    /// The latest change of a sign failed, and the failure was logged.
    failing: bool,
    /// Lock file, held while the server runs.
    _lock: File,
    active: BTreeMap<u64, Entry>,
    /// The highest session number ever used.
    last: u64,
    /// Sessions that have ended, with the time until which their clients may trust the grants.
    ending: BTreeMap<u64, Time>,
    lines: u64,
}

impl SessionRegistry {
    /// Opens or creates the file in `dir`. Also returns the clients with active sessions at the last server's crash,
    /// each with whether its locks were all its own, and the highest session number. If the file is unusable no
    /// session can begin; if the disk is full, sessions can begin once there is space.
    ///
    /// # Errors
    /// `WouldBlock` if another server uses the directory; the message is one line for users. This server cannot
    /// start, because it does not know what the other one will leave.
    pub(crate) fn open(dir: &Path) -> io::Result<(SessionRegistry, BTreeMap<ClientIncarnation, bool>, u64)> {
        let state = State::open(dir);
        let (absent, last) = match &state {
            Ok(state) => (state.absent(), state.last),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::Error::new(error.kind(), problem(dir, error)));
            }
            Err(error) => {
                tracing::error!(problem = problem(dir, error), "no client can be served");
                (BTreeMap::new(), 0)
            }
        };
        Ok((SessionRegistry { dir: dir.to_owned(), state: Mutex::new(state) }, absent, last))
    }

    /// Records the start of a session durably. `whole` is false for a session that replaces a discarded one.
    ///
    /// # Errors
    /// One line for users.
    pub(crate) fn begin(&self, session: u64, who: ClientIncarnation, whole: bool) -> Result<(), String> {
        let mut state = self.state.lock();
        let begun = self.begin_in(&mut state, session, Entry { who, locks_intact: whole, at: 0 });
        begun.map_err(|error| problem(&self.dir, &error))
    }

    /// Records that a session has completed its reclaim. Not synced: if the record is lost, later reclaims are
    /// refused, no more.
    pub(crate) fn reclaim_done(&self, session: u64) {
        if let Ok(state) = &mut *self.state.lock() {
            let marked = state.mark_locks_intact(session, true);
            self.is_recorded(state, marked, "a session has claimed its locks");
        }
    }

    /// Records that a discarded session loses its locks. Returns true once other clients may get the locks, because
    /// the next server would know of the loss; otherwise the caller retries. `synced` is false for a session without
    /// locks: its record reaches the disk before a session in its place begins.
    pub(crate) fn record_lost_locks(&self, session: u64, synced: bool) -> bool {
        let Ok(state) = &mut *self.state.lock() else { return true };
        let marked = state.mark_locks_intact(session, false);
        let marked = marked.and_then(|()| if synced { state.sync() } else { Ok(()) });
        if marked.is_err()
            && let Some(entry) = state.active.get_mut(&session)
        {
            entry.locks_intact = true;
        }
        self.is_recorded(state, marked, "a session loses its locks, and no other client gets them")
    }

    fn begin_in(&self, state: &mut Result<State, io::Error>, session: u64, entry: Entry) -> io::Result<()> {
        if state.as_ref().is_err_and(is_disk_full) {
            // No session can be recorded in a file that could not be created.
            *state = State::open(&self.dir).and_then(State::fresh);
        }
        let state = state.as_mut().map_err(|error| again(error))?;
        state.last = state.last.max(session);
        state.append(session, entry).inspect_err(|_| {
            state.active.remove(&session);
        })
    }

    /// Notes the end of a session. Its client may trust its grants until `until`.
    pub(crate) fn end(&self, session: u64, until: Time) {
        if let Ok(state) = &mut *self.state.lock() {
            state.ending.insert(session, until);
        }
    }

    /// Removes sessions whose end time has passed. Not synced: the next server knows lost locks from
    /// [`SessionRegistry::record_lost_locks`]. An entry that reappears after a crash only delays the next start.
    pub(crate) fn tidy(&self, now: Time) {
        let Ok(state) = &mut *self.state.lock() else { return };
        let over: Vec<u64> = state.ending.iter().filter(|(_, until)| **until <= now).map(|e| *e.0).collect();
        if !over.is_empty() {
            let removed = over.into_iter().try_for_each(|session| state.remove(session));
            self.is_recorded(state, removed, "a session has ended");
        }
    }

    /// Forgets absent sessions up to `last`. Returns true once other clients may get their locks, because the next
    /// server would know; otherwise the caller retries.
    pub(crate) fn forget_absent(&self, last: u64) -> bool {
        let Ok(state) = &mut *self.state.lock() else { return true };
        let gone: Vec<u64> = state.active.range(..=last).map(|(session, _)| *session).collect();
        let removed = gone.into_iter().try_for_each(|session| state.remove(session));
        let removed = removed.and_then(|()| state.sync());
        self.is_recorded(state, removed, "the grace is over, so it goes on")
    }

    /// Returns whether a record was written. A failure is logged once, until a write succeeds.
    fn is_recorded(&self, state: &mut State, result: io::Result<()>, what: &str) -> bool {
        let before = std::mem::replace(&mut state.failing, result.is_err());
        if let (Err(error), false) = (&result, before) {
            tracing::error!(problem = problem(&self.dir, error), "it is not recorded that {what}");
        }
        result.is_ok()
    }
}

impl State {
    fn open(dir: &Path) -> io::Result<State> {
        make_private(dir)?;
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(dir.join("sessions.lock"))?;
        file_lock::lock_exclusively(&lock, file_lock::PATIENCE)?;
        let path = dir.join("sessions");
        let (standing, last) = match std::fs::read_to_string(&path) {
            Ok(text) => read(&text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => (BTreeMap::new(), 0),
            Err(error) => return Err(error),
        };
        let (ending, length, torn, failing) = (BTreeMap::new(), 0, true, false);
        let mut state = State {
            path,
            file: None,
            length,
            torn,
            failing,
            _lock: lock,
            active: standing,
            last,
            ending,
            lines: 0,
        };
        // A full disk delays this until a session begins; the recorded sessions are known already.
        state.rewrite().or_else(|error| if is_disk_full(&error) { Ok(()) } else { Err(error) })?;
        Ok(state)
    }

    fn absent(&self) -> BTreeMap<ClientIncarnation, bool> {
        let mut absent = BTreeMap::new();
        for Entry { who, locks_intact: whole, .. } in self.active.values() {
            *absent.entry(*who).or_default() |= whole;
        }
        absent
    }

    /// Accepts the file only if no other server has used it.
    fn fresh(self) -> io::Result<State> {
        if self.active.is_empty() && self.last == 0 {
            return Ok(self);
        }
        Err(io::Error::other("another server was here meanwhile: start this one again"))
    }

    /// Appends one line durably. After a failure the line is not part of the file.
    fn append(&mut self, session: u64, entry: Entry) -> io::Result<()> {
        let entry = Entry { at: self.length, ..entry };
        self.active.insert(session, entry);
        let most_is_past = self.lines > 2 * self.active.len() as u64 + SLACK;
        if most_is_past || self.torn || self.file.is_none() {
            let written = self.rewrite();
            // A full disk may have space for a line, though not for a second file.
            if written.is_ok() || self.torn {
                return written;
            }
        }
        let Some(file) = &self.file else { return Err(io::ErrorKind::NotFound.into()) };
        let line = encode_begin(session, entry);
        let written = file.write_all_at(line.as_bytes(), self.length).and_then(|()| file.sync_data());
        if written.is_ok() {
            self.length += line.len() as u64;
            self.lines += 1;
        } else {
            self.torn = true;
            // If that fails too, the next server drops the unterminated line.
            let _ = file.set_len(self.length);
        }
        written
    }

    /// Overwrites the sign of an active session.
    fn mark_locks_intact(&mut self, session: u64, whole: bool) -> io::Result<()> {
        match self.active.get_mut(&session) {
            Some(entry) if entry.locks_intact != whole => {
                entry.locks_intact = whole;
                let at = entry.at;
                self.mark(at, if whole { '+' } else { '?' })
            }
            _ => Ok(()),
        }
    }

    /// Removes an active session. It stays active if that cannot be recorded.
    fn remove(&mut self, session: u64) -> io::Result<()> {
        if let Some(entry) = self.active.remove(&session) {
            self.mark(entry.at, '-').inspect_err(|_| {
                self.active.insert(session, entry);
            })?;
        }
        self.ending.remove(&session);
        Ok(())
    }

    /// Overwrites the sign at this offset.
    fn mark(&mut self, at: u64, sign: char) -> io::Result<()> {
        match &self.file {
            Some(file) => file.write_all_at(sign.to_string().as_bytes(), at),
            None => self.rewrite(),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), File::sync_data)
    }

    /// Replaces the file by one with the active sessions only.
    fn rewrite(&mut self) -> io::Result<()> {
        let made = self.path.with_extension("new");
        let mut text = format!("{TITLE}= {:016x}\n", self.last);
        let mut places = Vec::new();
        for (session, entry) in &self.active {
            places.push(text.len() as u64);
            text += &encode_begin(*session, *entry);
        }
        let file = write_file(&made, &text).inspect_err(|_| drop(std::fs::remove_file(&made)))?;
        std::fs::rename(&made, &self.path)?;
        (self.file, self.torn) = (None, true);
        if let Some(dir) = self.path.parent() {
            File::open(dir)?.sync_all()?;
        }
        self.active.values_mut().zip(places).for_each(|(entry, at)| entry.at = at);
        (self.file, self.torn, self.length) = (Some(file), false, text.len() as u64);
        self.lines = self.active.len() as u64;
        Ok(())
    }
}

fn encode_begin(
    session: u64,
    Entry { who: (client, incarnation), locks_intact: whole, .. }: Entry,
) -> String {
    let sign = if whole { '+' } else { '?' };
    format!("{sign} {session:016x} {client:016x} {incarnation:016x}\n")
}

fn write_file(path: &Path, text: &str) -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    Ok(file)
}

/// Formats an error as one line, with its remedy.
fn problem(dir: &Path, error: &io::Error) -> String {
    let mend = match error.kind() {
        _ if is_disk_full(error) => ": make room there",
        io::ErrorKind::WouldBlock => ": another server uses it: stop that one",
        _ if error.raw_os_error().is_some() => ": make it writable",
        // The error's text contains the remedy.
        _ => "",
    };
    format!("sessions cannot be recorded in {}: {error}{mend}", dir.display())
}

fn again(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(number) => io::Error::from_raw_os_error(number),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

/// Parses the active sessions and the highest session number.
fn read(text: &str) -> io::Result<(BTreeMap<u64, Entry>, u64)> {
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "the file `sessions` is damaged: remove it");
    let rest = text.strip_prefix(TITLE).ok_or_else(damaged)?;
    let (mut standing, mut last) = (BTreeMap::new(), 0);
    for line in rest.split_inclusive('\n') {
        // A session whose line is unterminated was never accepted.
        let Some(line) = line.strip_suffix('\n') else { break };
        let (kind, numbers) = line.split_once(' ').ok_or_else(damaged)?;
        let numbers: Result<Vec<u64>, _> = numbers.split(' ').map(|n| u64::from_str_radix(n, 16)).collect();
        match (kind, &numbers.map_err(|_| damaged())?[..]) {
            ("=", &[session]) => last = session,
            ("+" | "?", &[session, client, incarnation]) => {
                last = last.max(session);
                standing
                    .insert(session, Entry { who: (client, incarnation), locks_intact: kind == "+", at: 0 });
            }
            ("-", &[session, ..]) => {
                last = last.max(session);
                standing.remove(&session);
            }
            _ => return Err(damaged()),
        }
    }
    Ok((standing, last))
}

#[cfg(test)]
impl SessionRegistry {
    /// Makes writes to the file fail, or succeed again.
    pub(crate) fn set_readonly(&self, readonly: bool) {
        if let Ok(state) = &mut *self.state.lock() {
            let file = OpenOptions::new().read(true).write(!readonly).open(&state.path);
            state.file = Some(file.unwrap());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(dir: &Path) -> String {
        std::fs::read_to_string(dir.join("sessions")).unwrap()
    }

    #[test]
    fn sessions_active_at_a_kill_are_known_to_the_next_server() {
        let dir = tempfile::tempdir().unwrap();
        let (register, absent, _) = SessionRegistry::open(dir.path()).unwrap();
        assert!(absent.is_empty());
        for session in 1..=3 {
            register.begin(session, (7, session), true).unwrap();
        }
        register.end(2, Time(5));
        register.tidy(Time(4));
        drop(register);
        let (register, absent, _) = SessionRegistry::open(dir.path()).unwrap();
        assert_eq!(
            absent,
            [((7, 1), true), ((7, 2), true), ((7, 3), true)].into(),
            "its client may believe something until then"
        );
        register.begin(10, (7, 1), true).unwrap();
        register.end(2, Time(5));
        register.tidy(Time(5));
        assert!(register.forget_absent(3));
        drop(register);
        let (_, absent, last) = SessionRegistry::open(dir.path()).unwrap();
        assert_eq!((absent, last), ([((7, 1), true)].into(), 10));
    }

    #[test]
    fn sessions_with_possibly_lost_locks_are_known_to_the_next_server() {
        let dir = tempfile::tempdir().unwrap();
        let (register, ..) = SessionRegistry::open(dir.path()).unwrap();
        register.begin(1, (7, 1), true).unwrap();
        register.begin(2, (7, 2), true).unwrap();
        assert!(register.record_lost_locks(1, true));
        // Its client reconnects and loses its connection again before the reclaim.
        register.begin(3, (7, 1), false).unwrap();
        drop(register);
        let absent = |whole| [((7, 1), whole), ((7, 2), true)].into();
        let (register, was, _) = SessionRegistry::open(dir.path()).unwrap();
        assert_eq!(was, absent(false));
        register.reclaim_done(3);
        drop(register);
        assert_eq!(SessionRegistry::open(dir.path()).unwrap().1, absent(true));
    }

    #[test]
    fn registry_signs_are_overwritten_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let (register, ..) = SessionRegistry::open(dir.path()).unwrap();
        for session in 1..=4 {
            register.begin(session, (7, session), session != 3).unwrap();
        }
        let before = text(dir.path()).len();
        assert!(register.record_lost_locks(1, true));
        register.end(2, Time(1));
        register.tidy(Time(1));
        register.reclaim_done(3);
        register.end(4, Time(1));
        register.tidy(Time(1));
        assert_eq!(text(dir.path()).len(), before);
        drop(register);
        let (_, absent, last) = SessionRegistry::open(dir.path()).unwrap();
        assert_eq!((absent, last), ([((7, 1), false), ((7, 3), true)].into(), 4));
    }

    #[test]
    fn failed_registry_write_is_retried() {
        let dir = tempfile::tempdir().unwrap();
        let (register, ..) = SessionRegistry::open(dir.path()).unwrap();
        register.begin(1, (7, 1), true).unwrap();
        register.begin(2, (7, 2), true).unwrap();
        register.begin(3, (7, 3), true).unwrap();
        register.set_readonly(true);
        assert!(!register.record_lost_locks(3, true) && !register.record_lost_locks(3, true));
        assert!(!register.forget_absent(1));
        register.end(2, Time(1));
        register.tidy(Time(1));
        register.set_readonly(false);
        assert!(register.record_lost_locks(3, true) && register.forget_absent(1));
        register.tidy(Time(1));
        drop(register);
        assert_eq!(SessionRegistry::open(dir.path()).unwrap().1, [((7, 3), false)].into());
    }

    #[test]
    fn registry_ignores_unterminated_line_and_reports_damage() {
        let dir = tempfile::tempdir().unwrap();
        let entry = Entry { who: (2, 3), locks_intact: true, at: 0 };
        let whole = format!("{TITLE}{}{}", encode_begin(1, entry), encode_begin(4, entry));
        std::fs::write(dir.path().join("sessions"), &whole[..whole.len() - 1]).unwrap();
        assert_eq!(SessionRegistry::open(dir.path()).unwrap().1, [((2, 3), true)].into());
        for bad in
            ["", "nigh", "nigh sessions 1\n+ 1 2\n", "nigh sessions 1\n* 1\n", "nigh sessions 1\n- x\n"]
        {
            std::fs::write(dir.path().join("sessions"), bad).unwrap();
            let (register, absent, _) = SessionRegistry::open(dir.path()).unwrap();
            assert!(absent.is_empty());
            assert!(register.begin(1, (1, 1), true).unwrap_err().contains("damaged"), "{bad}");
        }
    }

    #[test]
    fn registry_file_does_not_grow_with_ended_sessions() {
        let dir = tempfile::tempdir().unwrap();
        let (register, ..) = SessionRegistry::open(dir.path()).unwrap();
        register.begin(0, (1, 0), true).unwrap();
        for session in 1..2000 {
            register.begin(session, (1, session), true).unwrap();
            register.end(session, Time(1));
            register.tidy(Time(1));
        }
        assert!(text(dir.path()).lines().count() < 600);
        drop(register);
        let (_, absent, last) = SessionRegistry::open(dir.path()).unwrap();
        assert_eq!((absent, last), ([((1, 0), true)].into(), 1999), "numbers do not come again");
    }

    #[test]
    fn two_servers_do_not_share_a_session_registry() {
        let dir = tempfile::tempdir().unwrap();
        let (first, ..) = SessionRegistry::open(dir.path()).unwrap();
        let problem = SessionRegistry::open(dir.path()).map(drop).unwrap_err().to_string();
        assert!(problem.contains("another server uses it") && !problem.contains('\n'), "{problem}");
        first.begin(1, (1, 1), true).unwrap();
    }
}
