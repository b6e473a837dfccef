//! Who reads directories, and whether it looks at the files that it reads of. See
//! docs/decisions/0022-who-is-given-attributes.md.

use std::collections::BTreeMap;

/// So many are known.
const MOST: usize = 64;
/// Who let so many lie wants names only.
const QUIET: u32 = 8;
/// Who looks is tried in each so many-th directory.
const SELDOM: u32 = 64;
/// So many files of a directory are given to who never looked at one.
const UNASKED: u64 = 1 << 18;

/// What a thread did so far.
#[derive(Clone, Copy, Debug, Default)]
struct Reader {
    /// Files that were held back, one in a directory each, and not looked up since it looked up any.
    quiet: u32,
    /// It looked up a file once.
    looks: bool,
    /// Directories that were begun since it was tried last.
    untried: u32,
    used: u64,
}

/// Threads by number (0: not visible, and nobody), those used last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Readers {
    known: BTreeMap<u32, Reader>,
    uses: u64,
}

/// What of a page comes with attributes, directories aside.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Files {
    None,
    /// All, or all but one.
    All {
        but_one: bool,
    },
}

impl Readers {
    fn get(&mut self, thread: u32) -> Option<&mut Reader> {
        if thread == 0 {
            return None;
        }
        self.uses += 1;
        if !self.known.contains_key(&thread) && self.known.len() >= MOST {
            let oldest = self.known.iter().min_by_key(|(_, reader)| reader.used).map(|(thread, _)| *thread);
            oldest.map(|thread| self.known.remove(&thread));
        }
        let reader = self.known.entry(thread).or_default();
        reader.used = self.uses;
        Some(reader)
    }

    /// What it is to be given next of a directory, of which it was given so many files; whether one of these was held back.
    pub fn files(&mut self, thread: u32, given: u64, was_tried: bool) -> Files {
        let Some(reader) = self.get(thread) else {
            return if given < UNASKED { Files::All { but_one: false } } else { Files::None };
        };
        if reader.quiet >= QUIET || !reader.looks && given >= UNASKED {
            return Files::None;
        }
        Files::All { but_one: !was_tried && (!reader.looks || reader.untried >= SELDOM) }
    }

    /// It wants names only.
    pub fn wants_names(&self, thread: u32) -> bool {
        self.known.get(&thread).is_some_and(|reader| reader.quiet >= QUIET)
    }

    /// A directory was read from its beginning.
    pub fn began(&mut self, thread: u32) {
        if let Some(reader) = self.get(thread) {
            reader.untried = reader.untried.saturating_add(1);
        }
    }

    /// One was held back.
    pub fn tried(&mut self, thread: u32) {
        if let Some(reader) = self.get(thread) {
            reader.quiet += 1;
            reader.untried = 0;
        }
    }

    /// A file was looked up that it may have read of.
    pub fn looked(&mut self, thread: u32) {
        if let Some(reader) = self.known.get_mut(&thread) {
            reader.quiet = 0;
            reader.looks = true;
        }
    }
}

#[cfg(test)]
mod tests;
