//! An inode's properties besides its names: single values, and a file's contents.

use super::search::{Object, SATISFIED};

/// A single value; `None` is a value too.
pub struct Register;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Value {
    Set(Option<u64>),
    Is(Option<u64>),
}

impl Object for Register {
    type State = Option<u64>;
    type Act = Value;

    fn is_read(&self, act: &Value) -> bool {
        matches!(act, Value::Is(_))
    }

    fn observe(&self, state: &Option<u64>, act: &Value, seen: &mut Vec<u16>) {
        if *act == Value::Is(*state) && seen.is_empty() {
            seen.push(SATISFIED);
        }
    }

    fn apply(&self, _: &Option<u64>, act: &Value, _: &[u16]) -> Vec<Option<u64>> {
        match act {
            Value::Set(value) => vec![*value],
            Value::Is(_) => Vec::new(),
        }
    }
}

/// A file's length, and the word at its beginning: truncating changes both, and so does the first write.
pub struct Contents;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    Write(u64),
    Truncate(u64),
    Size(u64),
    /// 0: nothing was written there. The length may come from another moment.
    Word(u64),
}

impl Contents {
    pub const WORD: u64 = 8;
}

impl Object for Contents {
    /// Size and word.
    type State = (u64, u64);
    type Act = Content;

    fn is_read(&self, act: &Content) -> bool {
        matches!(act, Content::Size(_) | Content::Word(_))
    }

    fn observe(&self, (size, word): &(u64, u64), act: &Content, seen: &mut Vec<u16>) {
        let fits = match act {
            Content::Size(expected) => size == expected,
            Content::Word(expected) => word == expected,
            _ => false,
        };
        if fits && seen.is_empty() {
            seen.push(SATISFIED);
        }
    }

    fn apply(&self, (size, word): &(u64, u64), act: &Content, _: &[u16]) -> Vec<(u64, u64)> {
        match *act {
            Content::Write(word) => vec![((*size).max(Self::WORD), word)],
            Content::Truncate(size) if size < Self::WORD => vec![(size, 0)],
            Content::Truncate(size) => vec![(size, *word)],
            _ => Vec::new(),
        }
    }
}
