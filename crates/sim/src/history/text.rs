//! The text form of a history: a line `MOUNT.WORKER BEGIN END CALL = ANSWER` per call, and a line per other event.

use std::fmt;

use super::{Call, CallResult, File, History, Kind, NAMES, ObservedAttrs, Record, RenameMode, Slot};

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", char::from(b'a' + self.dir()), self.name())
    }
}

impl fmt::Display for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.label, self.ino)
    }
}

impl Kind {
    pub(super) const WORDS: [(Kind, &'static str); 3] =
        [(Kind::File, "file"), (Kind::Dir, "dir"), (Kind::Symlink, "symlink")];

    fn word(self) -> &'static str {
        Kind::WORDS.iter().find(|(kind, _)| *kind == self).map_or("", |(_, word)| word)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Call::Create { slot, label, mode } => write!(f, "create {slot} {label} {mode:o}"),
            Call::Mkdir { slot, label } => write!(f, "mkdir {slot} {label}"),
            Call::Symlink { slot, label } => write!(f, "symlink {slot} {label}"),
            Call::Link { old, new } => write!(f, "link {old} {new}"),
            Call::Unlink { slot } => write!(f, "unlink {slot}"),
            Call::Rmdir { slot } => write!(f, "rmdir {slot}"),
            Call::Rename { old, new, how: RenameMode::Plain } => write!(f, "rename {old} {new}"),
            Call::Rename { old, new, how: RenameMode::NoReplace } => write!(f, "move {old} {new}"),
            Call::Rename { old, new, how: RenameMode::Exchange } => write!(f, "exchange {old} {new}"),
            Call::Open { slot } => write!(f, "open {slot}"),
            Call::Stat { slot } => write!(f, "stat {slot}"),
            Call::ReadLink { slot } => write!(f, "readlink {slot}"),
            Call::List { dir } => write!(f, "list {}", char::from(b'a' + dir)),
            Call::Fstat { file } => write!(f, "fstat {file}"),
            Call::Chmod { file, mode } => write!(f, "chmod {file} {mode:o}"),
            Call::Truncate { file, size } => write!(f, "truncate {file} {size}"),
            Call::Times { file, secs } => write!(f, "times {file} {secs}"),
            Call::SetXattr { file, value } => write!(f, "setxattr {file} {value}"),
            Call::RemoveXattr { file } => write!(f, "removexattr {file}"),
            Call::GetXattr { file } => write!(f, "getxattr {file}"),
            Call::Write { file, word } => write!(f, "write {file} {word}"),
            Call::Read { file } => write!(f, "read {file}"),
            Call::Fsync { file } => write!(f, "fsync {file}"),
            Call::Store { cell, byte } => write!(f, "store {cell} {byte}"),
            Call::Load { cell } => write!(f, "load {cell}"),
        }
    }
}

impl fmt::Display for ObservedAttrs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ObservedAttrs { file, kind, nlink, mode, size, mtime } = self;
        write!(f, "{file} {} {nlink} {mode:o} {size} ", kind.word())?;
        match mtime {
            Some(secs) => write!(f, "{secs}"),
            None => write!(f, "now"),
        }
    }
}

impl fmt::Display for CallResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallResult::Done => write!(f, "done"),
            CallResult::Failed(errno) => write!(f, "error {}", errno.raw()),
            CallResult::Opened(file) => write!(f, "opened {file}"),
            CallResult::Attributes(seen) => write!(f, "seen {seen}"),
            CallResult::Target(label) => write!(f, "target {label}"),
            CallResult::Value(Some(value)) => write!(f, "value {value}"),
            CallResult::Value(None) => write!(f, "nothing"),
            CallResult::Entries(entries) => {
                write!(f, "listed")?;
                for (name, ino) in entries {
                    match name {
                        name if *name < NAMES => write!(f, " {name}:{ino}")?,
                        _ => write!(f, " ?:{ino}")?,
                    }
                }
                Ok(())
            }
        }
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mount {
            Record::EXPORT => write!(f, "export")?,
            mount => write!(f, "{mount}.{}", self.worker)?,
        }
        match &self.response {
            Some((end, answer)) => write!(f, " {} {end} {} = {answer}", self.begin, self.call),
            None => write!(f, " {} - {} = ?", self.begin, self.call),
        }
    }
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for mount in &self.lossy_mounts {
            writeln!(f, "losses {mount}")?;
        }
        for (from, to) in &self.kills {
            writeln!(f, "kill {from} {to}")?;
        }
        for (mount, from, to) in &self.stops {
            writeln!(f, "stop {mount} {from} {to}")?;
        }
        for record in &self.records {
            writeln!(f, "{record}")?;
        }
        Ok(())
    }
}
