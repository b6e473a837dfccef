//! READDIRPLUS heuristic: whether a thread that reads directories also looks up their files. See
//! docs/decisions/0022-who-is-given-attributes.md.

use std::collections::BTreeMap;

/// Most threads that are remembered.
const MOST: usize = 64;
/// A thread that looked up none of this many withheld files wants names only.
const NAMES_ONLY_AFTER: u32 = 8;
/// A thread that looks files up is probed in one of this many directories.
const PROBE_INTERVAL: u32 = 64;
/// Files of a directory that a thread gets attributes of, if it never looked a file up.
const MAX_WITHOUT_LOOKUP: u64 = 1 << 18;

/// History of one thread.
#[derive(Clone, Copy, Debug, Default)]
struct ReaderHistory {
    /// Withheld files, one for each directory, since the thread's last lookup of a file.
    unused_probes: u32,
    /// The thread has looked up a file.
    looks: bool,
    /// Directories begun since the last probe.
    since_probe: u32,
    used: u64,
}

/// Threads used last, by thread id (0: not visible, never stored).
#[derive(Clone, Debug, Default)]
pub(crate) struct ReaderTable {
    known: BTreeMap<u32, ReaderHistory>,
    uses: u64,
}

/// Files of a page that get attributes; directories always do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FilesWithAttrs {
    None,
    /// All files, or all but one.
    All {
        but_one: bool,
    },
}

impl ReaderTable {
    fn get(&mut self, thread: u32) -> Option<&mut ReaderHistory> {
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

    /// Returns which files of a directory get attributes next. `given`: files with attributes so far; `was_tried`: one
    /// was withheld.
    pub fn files(&mut self, thread: u32, given: u64, was_tried: bool) -> FilesWithAttrs {
        let Some(reader) = self.get(thread) else {
            return if given < MAX_WITHOUT_LOOKUP {
                FilesWithAttrs::All { but_one: false }
            } else {
                FilesWithAttrs::None
            };
        };
        if reader.unused_probes >= NAMES_ONLY_AFTER || !reader.looks && given >= MAX_WITHOUT_LOOKUP {
            return FilesWithAttrs::None;
        }
        FilesWithAttrs::All { but_one: !was_tried && (!reader.looks || reader.since_probe >= PROBE_INTERVAL) }
    }

    /// Returns whether the thread wants names only.
    pub fn wants_names(&self, thread: u32) -> bool {
        self.known.get(&thread).is_some_and(|reader| reader.unused_probes >= NAMES_ONLY_AFTER)
    }

    /// Records that a thread reads a directory from its beginning.
    pub fn began(&mut self, thread: u32) {
        if let Some(reader) = self.get(thread) {
            reader.since_probe = reader.since_probe.saturating_add(1);
        }
    }

    /// Records that a file was withheld.
    pub fn probed(&mut self, thread: u32) {
        if let Some(reader) = self.get(thread) {
            reader.unused_probes += 1;
            reader.since_probe = 0;
        }
    }

    /// Records the lookup of a file that the thread may have read the name of.
    pub fn looked_up(&mut self, thread: u32) {
        if let Some(reader) = self.known.get_mut(&thread) {
            reader.unused_probes = 0;
            reader.looks = true;
        }
    }
}

#[cfg(test)]
mod tests;
