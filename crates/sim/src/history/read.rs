//! Parser of the text form that `text` writes.

use std::str::{FromStr, SplitAsciiWhitespace};

use nigh_types::Errno;

use super::{
    CELLS, Call, CallResult, DIRS, File, History, Kind, NAMES, ObservedAttrs, Record, RenameMode, Slot,
};

/// A line that does not parse.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadLine {
    /// Line number, from 1.
    pub number: usize,
    pub line: String,
}

impl std::fmt::Display for BadLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {} says nothing: {}", self.number, self.line)
    }
}

impl std::error::Error for BadLine {}

/// Parses a history; empty lines and lines that begin with `#` are skipped.
///
/// # Errors
/// The first line that does not parse.
pub fn parse(text: &str) -> Result<History, BadLine> {
    let mut history = History::default();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        take(&mut history, line).ok_or_else(|| BadLine { number, line: line.to_owned() })?;
    }
    Ok(history)
}

type Words<'t> = SplitAsciiWhitespace<'t>;

fn take(history: &mut History, line: &str) -> Option<()> {
    let mut words = line.split_ascii_whitespace();
    match words.next()? {
        "losses" => history.lossy_mounts.push(next(&mut words)?),
        "kill" => history.kills.push((next(&mut words)?, next(&mut words)?)),
        "stop" => history.stops.push((next(&mut words)?, next(&mut words)?, next(&mut words)?)),
        who => history.records.push(record(who, &mut words)?),
    }
    words.next().is_none().then_some(())
}

fn next<T: FromStr>(words: &mut Words<'_>) -> Option<T> {
    words.next()?.parse().ok()
}

fn octal(words: &mut Words<'_>) -> Option<u32> {
    u32::from_str_radix(words.next()?, 8).ok()
}

fn record(who: &str, words: &mut Words<'_>) -> Option<Record> {
    let (mount, worker) = match who.split_once('.') {
        Some((mount, worker)) => (mount.parse().ok()?, worker.parse().ok()?),
        None if who == "export" => (Record::EXPORT, 0),
        None => return None,
    };
    let begin = next(words)?;
    let end = match words.next()? {
        "-" => None,
        end => Some(end.parse().ok()?),
    };
    let call = call(words)?;
    if words.next()? != "=" {
        return None;
    }
    let answer = match end {
        Some(end) => Some((end, answer(words)?)),
        None if words.next()? == "?" => None,
        None => return None,
    };
    Some(Record { mount, worker, begin, response: answer, call })
}

fn dir(words: &mut Words<'_>) -> Option<u8> {
    let word = words.next()?;
    (0..DIRS).find(|dir| word.as_bytes() == [b'a' + dir])
}

fn slot(words: &mut Words<'_>) -> Option<Slot> {
    let word = words.next()?;
    Slot::all().find(|slot| slot.to_string() == word)
}

fn file(words: &mut Words<'_>) -> Option<File> {
    let (label, ino) = words.next()?.split_once('@')?;
    Some(File { label: label.parse().ok()?, ino: ino.parse().ok()? })
}

fn cell(words: &mut Words<'_>) -> Option<u8> {
    next(words).filter(|cell| *cell < CELLS)
}

fn call(words: &mut Words<'_>) -> Option<Call> {
    let call = match words.next()? {
        "create" => Call::Create { slot: slot(words)?, label: next(words)?, mode: octal(words)? },
        "mkdir" => Call::Mkdir { slot: slot(words)?, label: next(words)? },
        "symlink" => Call::Symlink { slot: slot(words)?, label: next(words)? },
        "link" => Call::Link { old: slot(words)?, new: slot(words)? },
        "unlink" => Call::Unlink { slot: slot(words)? },
        "rmdir" => Call::Rmdir { slot: slot(words)? },
        "rename" => Call::Rename { old: slot(words)?, new: slot(words)?, how: RenameMode::Plain },
        "move" => Call::Rename { old: slot(words)?, new: slot(words)?, how: RenameMode::NoReplace },
        "exchange" => Call::Rename { old: slot(words)?, new: slot(words)?, how: RenameMode::Exchange },
        "open" => Call::Open { slot: slot(words)? },
        "stat" => Call::Stat { slot: slot(words)? },
        "readlink" => Call::ReadLink { slot: slot(words)? },
        "list" => Call::List { dir: dir(words)? },
        "fstat" => Call::Fstat { file: file(words)? },
        "chmod" => Call::Chmod { file: file(words)?, mode: octal(words)? },
        "truncate" => Call::Truncate { file: file(words)?, size: next(words)? },
        "times" => Call::Times { file: file(words)?, secs: next(words)? },
        "setxattr" => Call::SetXattr { file: file(words)?, value: next(words)? },
        "removexattr" => Call::RemoveXattr { file: file(words)? },
        "getxattr" => Call::GetXattr { file: file(words)? },
        "write" => Call::Write { file: file(words)?, word: next(words)? },
        "read" => Call::Read { file: file(words)? },
        "fsync" => Call::Fsync { file: file(words)? },
        "store" => Call::Store { cell: cell(words)?, byte: next(words)? },
        "load" => Call::Load { cell: cell(words)? },
        _ => return None,
    };
    Some(call)
}

fn answer(words: &mut Words<'_>) -> Option<CallResult> {
    let answer = match words.next()? {
        "done" => CallResult::Done,
        "error" => CallResult::Failed(Errno::from_raw(next(words)?)),
        "opened" => CallResult::Opened(file(words)?),
        "seen" => CallResult::Attributes(seen(words)?),
        "target" => CallResult::Target(next(words)?),
        "value" => CallResult::Value(Some(next(words)?)),
        "nothing" => CallResult::Value(None),
        "listed" => CallResult::Entries(words.map(entry).collect::<Option<_>>()?),
        _ => return None,
    };
    Some(answer)
}

fn entry(word: &str) -> Option<(u8, u64)> {
    let (name, ino) = word.split_once(':')?;
    let name = if name == "?" { NAMES } else { name.parse().ok().filter(|name| *name < NAMES)? };
    Some((name, ino.parse().ok()?))
}

fn seen(words: &mut Words<'_>) -> Option<ObservedAttrs> {
    let file = file(words)?;
    let word = words.next()?;
    let (kind, _) = Kind::WORDS.iter().find(|(_, known)| *known == word)?;
    let (nlink, mode, size) = (next(words)?, octal(words)?, next(words)?);
    let mtime = match words.next()? {
        "now" => None,
        secs => Some(secs.parse().ok()?),
    };
    Some(ObservedAttrs { file, kind: *kind, nlink, mode, size, mtime })
}
