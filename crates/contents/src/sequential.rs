//! Readahead of one open file: recognises a reader that goes from front to back, and says what to fetch for it.

use crate::CHUNK;
use std::ops::Range;

/// The kernel sends the reads of its own readahead by several threads, so they may come in any order within this
/// distance (bytes).
const DISORDER: u64 = 4 * CHUNK;
/// Bytes read in a row after which a reader counts as sequential, by at least two reads or by one of a whole chunk: a
/// database reads a few pages in a row, too.
const RUN_BYTES: u64 = CHUNK / 2;

/// Reader of one open file.
#[derive(Clone, Copy, Debug, Default)]
pub struct SequentialReader {
    /// End of the furthest read of the run.
    reached: u64,
    /// Number of reads in a row, each near the end of the one before, and their bytes.
    run: u32,
    run_bytes: u64,
    /// End of what was asked for ahead.
    asked: u64,
    /// Bytes to have ahead of the reader.
    window: u64,
}

impl SequentialReader {
    /// Records a read. Returns the part of the file to fetch ahead: whole chunks, up to the end of the file at `size`.
    /// `largest`: most bytes ahead of the reader.
    pub fn note_read(&mut self, offset: u64, length: u64, size: u64, largest: u64) -> Option<Range<u64>> {
        let end = offset.saturating_add(length).min(size);
        let follows =
            self.run > 0 && offset.abs_diff(self.reached) <= DISORDER || self.run == 0 && offset == 0;
        if !follows {
            // A seek: what is in flight still comes, and the window begins anew.
            *self = SequentialReader { reached: end, run: 1, run_bytes: length, asked: 0, window: 0 };
            return None;
        }
        let goes_on = end > self.reached;
        self.reached = self.reached.max(end);
        if !goes_on {
            return None;
        }
        self.run = self.run.saturating_add(1);
        self.run_bytes = self.run_bytes.saturating_add(length);
        if self.run_bytes < RUN_BYTES || self.run < 2 && length < CHUNK {
            return None;
        }
        self.window = (self.window.max(CHUNK) * 2).min(largest);
        let from = self.asked.max(self.reached).next_multiple_of(CHUNK);
        let to = self.reached.saturating_add(self.window);
        let to = if to >= size { size } else { to / CHUNK * CHUNK };
        (from < to).then(|| {
            self.asked = to;
            from..to
        })
    }

    /// Returns how many bytes were asked for and not reached by the reader.
    #[must_use]
    pub fn ahead(&self) -> u64 {
        self.asked.saturating_sub(self.reached)
    }

    /// Goes back to the end of a part that will not be fetched after all.
    pub fn note_not_fetched(&mut self, from: u64) {
        self.asked = self.asked.min(from);
    }

    /// Records that the head of the file came ahead, for a reader of many files: the first read from there on counts as a
    /// run.
    pub fn note_head_came(&mut self) {
        (self.run, self.run_bytes) = (self.run.max(1), self.run_bytes.max(RUN_BYTES));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: u64 = 1 << 30;

    #[test]
    fn window_doubles_while_reads_follow_each_other() {
        let mut reader = SequentialReader::default();
        assert_eq!(reader.note_read(0, CHUNK, LARGE, 64 * CHUNK), Some(CHUNK..3 * CHUNK), "a whole chunk");
        assert_eq!(reader.note_read(CHUNK, CHUNK, LARGE, 64 * CHUNK), Some(3 * CHUNK..6 * CHUNK));
        assert_eq!(reader.note_read(2 * CHUNK, CHUNK, LARGE, 64 * CHUNK), Some(6 * CHUNK..11 * CHUNK));
        for at in 4..100 {
            reader.note_read(at * CHUNK, CHUNK, LARGE, 64 * CHUNK);
        }
        assert_eq!(reader.ahead(), 64 * CHUNK);
    }

    #[test]
    fn few_pages_in_a_row_are_no_run() {
        let (mut reader, pages) = (SequentialReader::default(), RUN_BYTES / 4_096);
        let read = |reader: &mut SequentialReader, at| reader.note_read(at * 4_096, 4_096, LARGE, 64 * CHUNK);
        for at in 0..pages - 1 {
            assert_eq!(read(&mut reader, at), None);
        }
        assert_eq!(read(&mut reader, pages - 1), Some(CHUNK..2 * CHUNK));
    }

    #[test]
    fn seek_collapses_the_window_and_random_reads_fetch_nothing() {
        let mut reader = SequentialReader::default();
        for at in 0..10 {
            reader.note_read(at * CHUNK, CHUNK, LARGE, 64 * CHUNK);
        }
        assert!(reader.ahead() > 0);
        assert_eq!(reader.note_read(LARGE / 2, 4_096, LARGE, 64 * CHUNK), None);
        assert_eq!(reader.ahead(), 0);
        for at in [7_u64, 3, 9, 1, 5] {
            assert_eq!(reader.note_read(at * (LARGE / 16), 4_096, LARGE, 64 * CHUNK), None);
        }
    }

    #[test]
    fn reads_of_the_kernels_readahead_may_come_in_any_order() {
        let mut reader = SequentialReader::default();
        reader.note_read(0, 4_096, LARGE, 64 * CHUNK);
        assert!(reader.note_read(2 * CHUNK, CHUNK, LARGE, 64 * CHUNK).is_some());
        assert_eq!(reader.note_read(CHUNK, CHUNK, LARGE, 64 * CHUNK), None, "it is behind the other");
        assert!(reader.note_read(3 * CHUNK, CHUNK, LARGE, 64 * CHUNK).is_some());
    }

    #[test]
    fn last_part_ends_with_the_file() {
        let (mut reader, size) = (SequentialReader::default(), 3 * CHUNK + 5);
        assert_eq!(reader.note_read(0, CHUNK, size, 64 * CHUNK), Some(CHUNK..3 * CHUNK));
        assert_eq!(reader.note_read(CHUNK, CHUNK, size, 64 * CHUNK), Some(3 * CHUNK..size));
        assert_eq!(reader.note_read(2 * CHUNK, CHUNK, size, 64 * CHUNK), None);
    }

    #[test]
    fn reader_of_a_file_whose_head_came_ahead_is_sequential_at_its_first_read() {
        let mut reader = SequentialReader::default();
        reader.note_head_came();
        assert_eq!(reader.note_read(0, 16 << 10, LARGE, 64 * CHUNK), Some(CHUNK..2 * CHUNK));
    }
}
