//! Commands to a replay child, as bytes in a pipe, and its results: an errno, or 0 for success. Both ends are one
//! build of this program.

use nigh_types::{Kind, Name};
use std::io::{self, Read, Write};

/// One system call. Paths are names from the mount's root; empty for the root itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    Make {
        path: Vec<Name>,
        kind: Kind,
    },
    Remove {
        path: Vec<Name>,
        kind: Kind,
    },
    Move {
        path: Vec<Name>,
        new_path: Vec<Name>,
    },
    /// Sets mtime alone.
    Written {
        path: Vec<Name>,
    },
    /// Sets atime and mtime.
    Attributes {
        path: Vec<Name>,
    },
}

const MAKE: u8 = 1;
const REMOVE: u8 = 2;
const MOVE: u8 = 3;
const WRITTEN: u8 = 4;
const ATTRIBUTES: u8 = 5;
/// Most bytes of a command: two paths of the maximal length.
const MOST: u32 = 2 << 20;

impl Command {
    /// Encoding: length, command code, inode type (the top bits of `st_mode`), two paths.
    pub fn encode(&self) -> Vec<u8> {
        let (what, kind, path, new_path) = match self {
            Command::Make { path, kind } => (MAKE, *kind, path, &Vec::new()),
            Command::Remove { path, kind } => (REMOVE, *kind, path, &Vec::new()),
            Command::Move { path, new_path } => (MOVE, Kind::File, path, new_path),
            Command::Written { path } => (WRITTEN, Kind::File, path, &Vec::new()),
            Command::Attributes { path } => (ATTRIBUTES, Kind::File, path, &Vec::new()),
        };
        let mut body = vec![what];
        body.extend(kind.mode_bits().to_le_bytes());
        for path in [path, new_path] {
            body.extend(u32::try_from(path.len()).unwrap_or(0).to_le_bytes());
            for name in path {
                body.push(u8::try_from(name.as_bytes().len()).unwrap_or(0));
                body.extend(name.as_bytes());
            }
        }
        let mut bytes = u32::try_from(body.len()).unwrap_or(0).to_le_bytes().to_vec();
        bytes.append(&mut body);
        bytes
    }

    fn decode(mut body: &[u8]) -> Option<Command> {
        let what = take(&mut body, 1)?[0];
        let kind = Kind::of_mode(number(&mut body)?).ok()?;
        let path = take_path(&mut body)?;
        let new_path = take_path(&mut body)?;
        match what {
            MAKE => Some(Command::Make { path, kind }),
            REMOVE => Some(Command::Remove { path, kind }),
            MOVE => Some(Command::Move { path, new_path }),
            WRITTEN => Some(Command::Written { path }),
            ATTRIBUTES => Some(Command::Attributes { path }),
            _ => None,
        }
    }

    /// Reads the next command; `None` at the end.
    pub fn read(from: &mut impl Read) -> io::Result<Option<Command>> {
        let mut length = [0; 4];
        match from.read_exact(&mut length) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            other => other?,
        }
        let length = u32::from_le_bytes(length);
        if length > MOST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut body = vec![0; usize::try_from(length).unwrap_or(0)];
        from.read_exact(&mut body)?;
        Command::decode(&body).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Writes the result of a command.
pub(crate) fn answer(to: &mut impl Write, errno: i32) -> io::Result<()> {
    to.write_all(&errno.to_le_bytes())?;
    to.flush()
}

fn take<'a>(body: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, rest) = body.split_at_checked(count)?;
    *body = rest;
    Some(taken)
}

fn number(body: &mut &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(take(body, 4)?.try_into().ok()?))
}

fn take_path(body: &mut &[u8]) -> Option<Vec<Name>> {
    let count = number(body)?;
    let mut path = Vec::new();
    for _ in 0..count {
        let length = take(body, 1)?[0];
        path.push(Name::new(take(body, usize::from(length))?).ok()?);
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(names: &[&str]) -> Vec<Name> {
        names.iter().map(|name| Name::new(name.as_bytes()).unwrap()).collect()
    }

    fn samples() -> Vec<Command> {
        let long = "x".repeat(255);
        vec![
            Command::Make { path: path(&["a", &long]), kind: Kind::Fifo },
            Command::Remove { path: path(&["a"]), kind: Kind::Directory },
            Command::Move { path: path(&["a", "b"]), new_path: path(&["c\n"]) },
            Command::Written { path: path(&["f"]) },
            Command::Attributes { path: Vec::new() },
        ]
    }

    #[test]
    fn replay_command_is_decoded_as_it_was_encoded() {
        let bytes: Vec<u8> = samples().iter().flat_map(Command::encode).collect();
        let mut from = bytes.as_slice();
        for command in samples() {
            assert_eq!(Command::read(&mut from).unwrap(), Some(command));
        }
        assert_eq!(Command::read(&mut from).unwrap(), None);
    }

    #[test]
    fn truncated_or_corrupt_replay_command_is_an_error_without_panic() {
        for command in samples() {
            let bytes = command.encode();
            for end in 4..bytes.len() {
                assert!(Command::read(&mut &bytes[..end]).is_err());
            }
            for at in 0..bytes.len() {
                let mut wrong = bytes.clone();
                wrong[at] = 0xff;
                let _ = Command::read(&mut wrong.as_slice());
            }
        }
        assert!(Command::read(&mut &u32::MAX.to_le_bytes()[..]).is_err());
    }
}
