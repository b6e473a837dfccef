//! Which sessions stand, over restarts: a server that was killed waits for their clients before it lets
//! anybody change what those may still believe (docs/decisions/0009-sessions-over-connections.md).
//!
//! The file `sessions` in the state directory is text. Its first line says the version; then come `= SESSION`, the
//! highest number so far, and `+ SESSION CLIENT INCARNATION` for each that began, all hexadecimal. Its sign is
//! written over when that changes, for which a full disk has room: `?` says that locks which its client believes to
//! have may have been another's meanwhile, until it has claimed what was still its own (`+` again); `-` that it has
//! ended. A line without its end was never acted on, and nothing is ever appended behind one: after a line that
//! could not be written, at each start and when most of it is of the past the file is written anew, by renaming a
//! finished one into place.

use crate::export::{make_private, wants_room};
use nigh_types::Time;
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const TITLE: &str = "nigh sessions 1\n";
/// How long to wait for a server that is about to end.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// Lines of the past that are let stand.
const SLACK: u64 = 256;

/// A client and its incarnation.
pub(crate) type Who = (u64, u64);

/// A session that stands.
#[derive(Clone, Copy)]
struct Entry {
    who: Who,
    /// Nobody else can have had what it has locked.
    whole: bool,
    /// Where its line stands, in bytes.
    at: u64,
}

/// The file of the sessions that stand.
pub(crate) struct Register {
    dir: PathBuf,
    state: Mutex<Result<State, io::Error>>,
}

struct State {
    path: PathBuf,
    /// The one that its name leads to, also after a power failure. None: there was no room for one, or that is not
    /// known.
    file: Option<File>,
    /// Bytes of its whole lines.
    length: u64,
    /// What stands in the file behind them is not known: it is written anew before anything is appended.
    torn: bool,
    /// The latest change of a sign could not be recorded, which was said.
    failing: bool,
    /// Held as long as the server lives.
    _lock: File,
    standing: BTreeMap<u64, Entry>,
    /// The highest number of a session, ever.
    last: u64,
    /// Ended here, but what their clients were granted may stand until then.
    ending: BTreeMap<u64, Time>,
    lines: u64,
}

impl Register {
    /// Opens or makes the file in `dir`. Also who had a session when the last server ended without a word, each with
    /// whether its locks were all its own, and the highest number of a session before. Where it cannot be used, no session can begin; where that is for want of
    /// room, until there is some.
    ///
    /// # Errors
    /// `WouldBlock` where another server uses it: one line, for people. What that one leaves would have to be known
    /// here.
    pub(crate) fn open(dir: &Path) -> io::Result<(Register, BTreeMap<Who, bool>, u64)> {
        let state = State::open(dir);
        let (absent, last) = match &state {
            Ok(state) => (state.absent(), state.last),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::Error::new(error.kind(), problem(dir, error)));
            }
            Err(error) => {
                tracing::error!(problem = problem(dir, error), "nobody can be served");
                (BTreeMap::new(), 0)
            }
        };
        Ok((Register { dir: dir.to_owned(), state: Mutex::new(state) }, absent, last))
    }

    /// A session begins; it is on the disk when this returns. Not `whole`: it takes the place of one that was
    /// forgotten.
    ///
    /// # Errors
    /// One line, for people.
    pub(crate) fn begin(&self, session: u64, who: Who, whole: bool) -> Result<(), String> {
        let mut state = self.state.lock();
        let begun = self.begin_in(&mut state, session, Entry { who, whole, at: 0 });
        begun.map_err(|error| problem(&self.dir, &error))
    }

    /// A session has claimed what was still its own. Not synced: if that is lost it is not believed, no more.
    pub(crate) fn claimed(&self, session: u64) {
        if let Ok(state) = &mut *self.state.lock() {
            let marked = state.mark_whole(session, true);
            self.is_recorded(state, marked, "a session has claimed its locks");
        }
    }

    /// A session is forgotten, and what it has locked is to be free for others: it may be when this says so, as the
    /// next server will know then. Otherwise this is to be asked again. Not `synced`, where it has locked nothing: it is on the
    /// disk before a session in its place begins.
    pub(crate) fn disown(&self, session: u64, synced: bool) -> bool {
        let Ok(state) = &mut *self.state.lock() else { return true };
        let marked = state.mark_whole(session, false);
        let marked = marked.and_then(|()| if synced { state.sync() } else { Ok(()) });
        if marked.is_err()
            && let Some(entry) = state.standing.get_mut(&session)
        {
            entry.whole = true;
        }
        self.is_recorded(state, marked, "a session loses its locks, so nobody else gets them")
    }

    fn begin_in(&self, state: &mut Result<State, io::Error>, session: u64, entry: Entry) -> io::Result<()> {
        if state.as_ref().is_err_and(wants_room) {
            // Nobody could be in a file that could not be made.
            *state = State::open(&self.dir).and_then(State::fresh);
        }
        let state = state.as_mut().map_err(|error| again(error))?;
        state.last = state.last.max(session);
        state.append(session, entry).inspect_err(|_| {
            state.standing.remove(&session);
        })
    }

    /// A session has ended. Until `until` its client may believe what it was granted.
    pub(crate) fn end(&self, session: u64, until: Time) {
        if let Ok(state) = &mut *self.state.lock() {
            state.ending.insert(session, until);
        }
    }

    /// Takes out what has ended by now. Not synced: what others may have had of it the next server knows from
    /// [`Register::disown`], and where it comes to stand there again it makes a restart slower, no more.
    pub(crate) fn tidy(&self, now: Time) {
        let Ok(state) = &mut *self.state.lock() else { return };
        let over: Vec<u64> = state.ending.iter().filter(|(_, until)| **until <= now).map(|e| *e.0).collect();
        if !over.is_empty() {
            let removed = over.into_iter().try_for_each(|session| state.remove(session));
            self.is_recorded(state, removed, "a session has ended");
        }
    }

    /// Sessions up to this one are not waited for any more, and others may have what they have locked when this says
    /// so: then the next server will know. Otherwise it is to be asked again.
    pub(crate) fn forget_absent(&self, last: u64) -> bool {
        let Ok(state) = &mut *self.state.lock() else { return true };
        let gone: Vec<u64> = state.standing.range(..=last).map(|(session, _)| *session).collect();
        let removed = gone.into_iter().try_for_each(|session| state.remove(session));
        let removed = removed.and_then(|()| state.sync());
        self.is_recorded(state, removed, "the grace is over, so it goes on")
    }

    /// Whether something was recorded. That it was not is said once, until something is.
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
        let give_up = Instant::now() + LOCK_PATIENCE;
        while let Err(error) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            if error != rustix::io::Errno::WOULDBLOCK || Instant::now() > give_up {
                return Err(error.into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let path = dir.join("sessions");
        let (standing, last) = match std::fs::read_to_string(&path) {
            Ok(text) => read(&text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => (BTreeMap::new(), 0),
            Err(error) => return Err(error),
        };
        let (ending, length, torn, failing) = (BTreeMap::new(), 0, true, false);
        let mut state =
            State { path, file: None, length, torn, failing, _lock: lock, standing, last, ending, lines: 0 };
        // For want of room that waits until somebody wants to begin: who stood is known.
        state.write_anew().or_else(|error| if wants_room(&error) { Ok(()) } else { Err(error) })?;
        Ok(state)
    }

    fn absent(&self) -> BTreeMap<Who, bool> {
        let mut absent = BTreeMap::new();
        for Entry { who, whole, .. } in self.standing.values() {
            *absent.entry(*who).or_default() |= whole;
        }
        absent
    }

    /// If it is of no server before this one.
    fn fresh(self) -> io::Result<State> {
        if self.standing.is_empty() && self.last == 0 {
            return Ok(self);
        }
        Err(io::Error::other("another server was here meanwhile: start this one again"))
    }

    /// One more line behind those that the file has, on the disk. Where that fails none of it stands there.
    fn append(&mut self, session: u64, entry: Entry) -> io::Result<()> {
        let entry = Entry { at: self.length, ..entry };
        self.standing.insert(session, entry);
        let most_is_past = self.lines > 2 * self.standing.len() as u64 + SLACK;
        if most_is_past || self.torn || self.file.is_none() {
            let written = self.write_anew();
            // Where there is no room for another file there may be some for a line.
            if written.is_ok() || self.torn {
                return written;
            }
        }
        let Some(file) = &self.file else { return Err(io::ErrorKind::NotFound.into()) };
        let line = begun(session, entry);
        let written = file.write_all_at(line.as_bytes(), self.length).and_then(|()| file.sync_data());
        if written.is_ok() {
            self.length += line.len() as u64;
            self.lines += 1;
        } else {
            self.torn = true;
            // If that fails too: a server that begins now drops what has no end.
            let _ = file.set_len(self.length);
        }
        written
    }

    /// Writes over the sign of a session that stands.
    fn mark_whole(&mut self, session: u64, whole: bool) -> io::Result<()> {
        match self.standing.get_mut(&session) {
            Some(entry) if entry.whole != whole => {
                entry.whole = whole;
                let at = entry.at;
                self.mark(at, if whole { '+' } else { '?' })
            }
            _ => Ok(()),
        }
    }

    /// A session stands no more. Where that cannot be recorded it does still.
    fn remove(&mut self, session: u64) -> io::Result<()> {
        if let Some(entry) = self.standing.remove(&session) {
            self.mark(entry.at, '-').inspect_err(|_| {
                self.standing.insert(session, entry);
            })?;
        }
        self.ending.remove(&session);
        Ok(())
    }

    /// What stands has changed: the sign at that place is to be this one.
    fn mark(&mut self, at: u64, sign: char) -> io::Result<()> {
        match &self.file {
            Some(file) => file.write_all_at(sign.to_string().as_bytes(), at),
            None => self.write_anew(),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), File::sync_data)
    }

    /// A file of what stands, in the place of the one that is there.
    fn write_anew(&mut self) -> io::Result<()> {
        let made = self.path.with_extension("new");
        let mut text = format!("{TITLE}= {:016x}\n", self.last);
        let mut places = Vec::new();
        for (session, entry) in &self.standing {
            places.push(text.len() as u64);
            text += &begun(*session, *entry);
        }
        let file = write_file(&made, &text).inspect_err(|_| drop(std::fs::remove_file(&made)))?;
        std::fs::rename(&made, &self.path)?;
        (self.file, self.torn) = (None, true);
        if let Some(dir) = self.path.parent() {
            File::open(dir)?.sync_all()?;
        }
        self.standing.values_mut().zip(places).for_each(|(entry, at)| entry.at = at);
        (self.file, self.torn, self.length) = (Some(file), false, text.len() as u64);
        self.lines = self.standing.len() as u64;
        Ok(())
    }
}

fn begun(session: u64, Entry { who: (client, incarnation), whole, .. }: Entry) -> String {
    let sign = if whole { '+' } else { '?' };
    format!("{sign} {session:016x} {client:016x} {incarnation:016x}\n")
}

fn write_file(path: &Path, text: &str) -> io::Result<File> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    Ok(file)
}

/// One line, with how to mend it.
fn problem(dir: &Path, error: &io::Error) -> String {
    let mend = match error.kind() {
        _ if wants_room(error) => ": make room there",
        io::ErrorKind::WouldBlock => ": another server uses it: stop that one",
        _ if error.raw_os_error().is_some() => ": make it writable",
        // It says that itself.
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

/// The sessions that stand, and the highest number so far.
fn read(text: &str) -> io::Result<(BTreeMap<u64, Entry>, u64)> {
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "the file `sessions` is damaged: remove it");
    let rest = text.strip_prefix(TITLE).ok_or_else(damaged)?;
    let (mut standing, mut last) = (BTreeMap::new(), 0);
    for line in rest.split_inclusive('\n') {
        // Nobody was let in by a line that was not finished.
        let Some(line) = line.strip_suffix('\n') else { break };
        let (kind, numbers) = line.split_once(' ').ok_or_else(damaged)?;
        let numbers: Result<Vec<u64>, _> = numbers.split(' ').map(|n| u64::from_str_radix(n, 16)).collect();
        match (kind, &numbers.map_err(|_| damaged())?[..]) {
            ("=", &[session]) => last = session,
            ("+" | "?", &[session, client, incarnation]) => {
                last = last.max(session);
                standing.insert(session, Entry { who: (client, incarnation), whole: kind == "+", at: 0 });
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
impl Register {
    /// Nothing can be written to its file any more, or it can again.
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
    fn who_stood_when_the_server_was_killed_is_known_to_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let (register, absent, _) = Register::open(dir.path()).unwrap();
        assert!(absent.is_empty());
        for session in 1..=3 {
            register.begin(session, (7, session), true).unwrap();
        }
        register.end(2, Time(5));
        register.tidy(Time(4));
        drop(register);
        let (register, absent, _) = Register::open(dir.path()).unwrap();
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
        let (_, absent, last) = Register::open(dir.path()).unwrap();
        assert_eq!((absent, last), ([((7, 1), true)].into(), 10));
    }

    #[test]
    fn whose_locks_may_have_been_anothers_is_known_to_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let (register, ..) = Register::open(dir.path()).unwrap();
        register.begin(1, (7, 1), true).unwrap();
        register.begin(2, (7, 2), true).unwrap();
        assert!(register.disown(1, true));
        // Its client comes again, and is away again before it has claimed.
        register.begin(3, (7, 1), false).unwrap();
        drop(register);
        let absent = |whole| [((7, 1), whole), ((7, 2), true)].into();
        let (register, was, _) = Register::open(dir.path()).unwrap();
        assert_eq!(was, absent(false));
        register.claimed(3);
        drop(register);
        assert_eq!(Register::open(dir.path()).unwrap().1, absent(true));
    }

    #[test]
    fn signs_are_written_over_and_take_no_room() {
        let dir = tempfile::tempdir().unwrap();
        let (register, ..) = Register::open(dir.path()).unwrap();
        for session in 1..=4 {
            register.begin(session, (7, session), session != 3).unwrap();
        }
        let before = text(dir.path()).len();
        assert!(register.disown(1, true));
        register.end(2, Time(1));
        register.tidy(Time(1));
        register.claimed(3);
        register.end(4, Time(1));
        register.tidy(Time(1));
        assert_eq!(text(dir.path()).len(), before);
        drop(register);
        let (_, absent, last) = Register::open(dir.path()).unwrap();
        assert_eq!((absent, last), ([((7, 1), false), ((7, 3), true)].into(), 4));
    }

    #[test]
    fn what_cannot_be_recorded_is_asked_for_again() {
        let dir = tempfile::tempdir().unwrap();
        let (register, ..) = Register::open(dir.path()).unwrap();
        register.begin(1, (7, 1), true).unwrap();
        register.begin(2, (7, 2), true).unwrap();
        register.begin(3, (7, 3), true).unwrap();
        register.set_readonly(true);
        assert!(!register.disown(3, true) && !register.disown(3, true));
        assert!(!register.forget_absent(1));
        register.end(2, Time(1));
        register.tidy(Time(1));
        register.set_readonly(false);
        assert!(register.disown(3, true) && register.forget_absent(1));
        register.tidy(Time(1));
        drop(register);
        assert_eq!(Register::open(dir.path()).unwrap().1, [((7, 3), false)].into());
    }

    #[test]
    fn an_unfinished_line_is_nothing_and_damage_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let entry = Entry { who: (2, 3), whole: true, at: 0 };
        let whole = format!("{TITLE}{}{}", begun(1, entry), begun(4, entry));
        std::fs::write(dir.path().join("sessions"), &whole[..whole.len() - 1]).unwrap();
        assert_eq!(Register::open(dir.path()).unwrap().1, [((2, 3), true)].into());
        for bad in
            ["", "nigh", "nigh sessions 1\n+ 1 2\n", "nigh sessions 1\n* 1\n", "nigh sessions 1\n- x\n"]
        {
            std::fs::write(dir.path().join("sessions"), bad).unwrap();
            let (register, absent, _) = Register::open(dir.path()).unwrap();
            assert!(absent.is_empty());
            assert!(register.begin(1, (1, 1), true).unwrap_err().contains("damaged"), "{bad}");
        }
    }

    #[test]
    fn the_file_does_not_grow_with_the_past() {
        let dir = tempfile::tempdir().unwrap();
        let (register, ..) = Register::open(dir.path()).unwrap();
        register.begin(0, (1, 0), true).unwrap();
        for session in 1..2000 {
            register.begin(session, (1, session), true).unwrap();
            register.end(session, Time(1));
            register.tidy(Time(1));
        }
        assert!(text(dir.path()).lines().count() < 600);
        drop(register);
        let (_, absent, last) = Register::open(dir.path()).unwrap();
        assert_eq!((absent, last), ([((1, 0), true)].into(), 1999), "numbers do not come again");
    }

    #[test]
    fn two_servers_do_not_share_it() {
        let dir = tempfile::tempdir().unwrap();
        let (first, ..) = Register::open(dir.path()).unwrap();
        let problem = Register::open(dir.path()).map(drop).unwrap_err().to_string();
        assert!(problem.contains("another server uses it") && !problem.contains('\n'), "{problem}");
        first.begin(1, (1, 1), true).unwrap();
    }
}
