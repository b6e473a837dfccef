//! Prefetch of file contents: when a reader's next files, or the next part of its file, are read ahead
//! (docs/decisions/0043-contents.md).

use crate::op::Fh;
use crate::ops::{content_reads, reading_order, walk_levels};
use crate::prefetch::{FileWalk, FinishedFile, Reader, RestOfHead, WalkAt, WalkEntry, WalkNumber};
use crate::state::State;
use crate::view::{self, paths};
use nigh_contents::CHUNK;
use nigh_types::{Attr, NodeId, NodeRef, Time};
use std::ops::Range;

/// Most directories that a walk goes up and down.
const DEEPEST: usize = 256;
/// Bytes of a larger file that come ahead at least: a process that says that it reads from front to back, as `cp` does, has the
/// kernel ask for that many at once.
const HEAD: u64 = 2 * CHUNK;
/// Most entries that a walk passes at a time, but for the last directory.
const MOST_PASSED: u32 = 4_096;
/// Most entries ahead that a walk holds, but for the last directory.
const MOST_HELD: usize = 65_536;

/// A read of the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileRead {
    pub ino: u64,
    pub fh: Fh,
    pub offset: u64,
    pub size: u32,
    /// It was answered from contents that had come.
    pub is_hit: bool,
    /// It waits for contents that are on their way.
    pub is_queued: bool,
}

/// Records a read that was begun, and reads ahead.
pub(crate) fn note_read(state: &mut State, now: Time, read: FileRead) {
    let is_direct = state.open.files.get(read.fh).is_none_or(|file| file.access.direct);
    if is_direct || !state.session.is_active() {
        return;
    }
    let Some(reader) = content_reads::reader_of(state, read.fh) else { return };
    let Some(id) = state.store.id_of(read.ino) else { return };
    let Some(attr) = view::last_attr(state, id) else { return };
    if !read.is_hit && !read.is_queued {
        // What was asked for ahead of it did not come, or is gone.
        state.contents.note_not_fetched(read.fh, read.offset.saturating_add(u64::from(read.size)));
        state.contents.note_demanded(u64::from(read.size).min(attr.size));
    }
    read_on(state, now, read, reader, attr.size);
    let reached = read.offset.saturating_add(u64::from(read.size));
    let is_end = reached >= attr.size;
    match state.prefetch.files.note_used(now, read.ino, is_end) {
        Some(number) => {
            if is_end && attr.size > HEAD && (read.is_hit || read.is_queued) {
                state.prefetch.files.note_whole(number);
            }
            note_finished(state, read.ino);
            fill(state, now, number);
        }
        // A file that was there without a walk, as one that this mount has written, needs none.
        None if is_end && read.is_hit => drop(note_finished(state, read.ino)),
        None if is_end => begin_walk(state, now, read.ino, reader),
        None => {}
    }
}

/// Reads ahead of a reader that goes through one file.
fn read_on(state: &mut State, now: Time, read: FileRead, reader: Reader, size: u64) {
    let part = (read.offset, u64::from(read.size));
    let Some(ahead) = state.contents.note_read(read.fh, part, size, read.is_hit) else { return };
    let mut at = ahead.start;
    while at < ahead.end {
        let end = (at + CHUNK).min(size);
        let place = paths::handle_for(state, read.ino, Some(read.fh));
        let is_sent = state.contents.gaps(read.ino, at..end).0.is_empty()
            || !state.contents.is_wasteful()
                && place.is_some_and(|place| {
                    content_reads::send_read_ahead(state, now, place, reader, at, CHUNK)
                });
        if !is_sent {
            return state.contents.note_not_fetched(read.fh, at);
        }
        at += CHUNK;
    }
}

fn note_finished(state: &mut State, ino: u64) -> Vec<FinishedFile> {
    let Some((dir, _)) = state.store.inode(ino).and_then(|inode| inode.parent_entry()) else {
        return Vec::new();
    };
    let dir = *dir;
    state.prefetch.files.note_finished(FinishedFile { ino, dir })
}

/// Begins a walk behind a file that was read to its end, if it comes next after another one in some order.
fn begin_walk(state: &mut State, now: Time, ino: u64, reader: Reader) {
    let before = note_finished(state, ino);
    if before.is_empty() {
        // The file that was read last is read again: that shows no order.
        return;
    }
    let may_send = state.contents.has_room() && !state.contents.is_wasteful();
    if !may_send || !state.prefetch.files.may_look() {
        return;
    }
    let Some((dir, _)) = state.store.inode(ino).and_then(|inode| inode.parent_entry()) else { return };
    let this = FinishedFile { ino, dir: *dir };
    let Some(order) = before.into_iter().find_map(|before| reading_order::between(state, before, this))
    else {
        return state.prefetch.files.note_nothing_ahead();
    };
    match state.prefetch.files.go_on_at(now, order, reader.read_as, this) {
        WalkAt::Here(number) => {
            fill(state, now, number);
            return;
        }
        WalkAt::Refused => return,
        WalkAt::Nowhere => {}
    }
    let Some(level) = walk_levels::behind(state, now, this.dir, order, ino) else { return };
    state.counters.file_walks += 1;
    let number = state.prefetch.files.begin(FileWalk::new(order, reader, vec![level], now));
    if !fill(state, now, number) {
        state.prefetch.files.note_nothing_ahead();
    }
}

/// Goes on with all walks: a directory or contents came, or the window has room.
pub(crate) fn go_on(state: &mut State, now: Time) {
    for number in state.prefetch.files.numbers() {
        fill(state, now, number);
    }
}

/// Asks for the next files of a walk, as far as its window goes. Returns whether it has asked for any.
fn fill(state: &mut State, now: Time, number: WalkNumber) -> bool {
    let Some(mut walk) = state.prefetch.files.take(number) else { return false };
    let largest = state.contents.walk_window();
    let (mut passed, mut has_asked) = (0, false);
    while walk.room(largest) > 0 && state.contents.has_room() && !state.contents.is_wasteful() {
        if let Some(rest) = walk.rest.take() {
            go_on_with_head(state, now, (number, &mut walk), rest);
            continue;
        }
        let Some((file, attr)) = next_file(state, now, &mut walk, &mut passed) else { break };
        let ino = file.node.ino;
        let part = head_of(attr.size, walk.head(largest, state.contents.link_window() / 2));
        let reached = send_head(state, now, (&file, walk.reader), part.clone());
        if reached > 0 {
            state.prefetch.files.note_asked(number, &mut walk, ino, reached);
            walk.rest = (reached < part.end).then_some(RestOfHead { file, part: reached..part.end });
            has_asked = true;
        }
    }
    state.prefetch.files.put_back(number, walk);
    has_asked
}

/// Asks for more of a file, unless a reader has come to it and asks itself.
fn go_on_with_head(
    state: &mut State,
    now: Time,
    (number, walk): (WalkNumber, &mut FileWalk),
    rest: RestOfHead,
) {
    let RestOfHead { file, part } = rest;
    let ino = file.node.ino;
    if !state.prefetch.files.is_asked_by(number, ino) {
        return;
    }
    let reached = send_head(state, now, (&file, walk.reader), part.clone());
    state.prefetch.files.note_asked_on(walk, ino, reached - part.start);
    let goes_on = (part.start + 1..part.end).contains(&reached);
    walk.rest = goes_on.then_some(RestOfHead { file, part: reached..part.end });
}

/// Returns the part of a file that comes ahead: all of it, or the head of one with more than `most` bytes. While a reader goes
/// through the head, what it reads on is on its way.
fn head_of(size: u64, most: u64) -> Range<u64> {
    // One byte more than the file has: a short reply shows where it ends.
    let whole = size.saturating_add(1);
    0..if whole <= most.max(HEAD) { whole } else { (most / CHUNK * CHUNK).max(HEAD) }
}

/// Asks for a part of a file, as far as the link has room. Returns up to where.
fn send_head(
    state: &mut State,
    now: Time,
    (file, reader): (&NodeRef, Reader),
    Range { start, end }: Range<u64>,
) -> u64 {
    let mut at = start;
    while at < end && (at < HEAD || state.contents.has_room()) {
        let length = (end - at).min(CHUNK);
        if !content_reads::send_read_ahead(state, now, (file.clone(), None), reader, at, length) {
            break;
        }
        at += length;
    }
    at
}

/// Returns the next file of a walk whose contents are to come. `None`: the walk is at its end, or at a directory that is to
/// be listed first, or has passed enough entries for now.
fn next_file(state: &State, now: Time, walk: &mut FileWalk, passed: &mut u32) -> Option<(NodeRef, Attr)> {
    loop {
        *passed += 1;
        if *passed > MOST_PASSED {
            return None;
        }
        let level = walk.levels.last_mut()?;
        let Some(entry) = level.left.pop_front() else {
            let done = walk.levels.pop()?;
            if let Some(rest) = walk_levels::rest(state, now, &done, walk.order) {
                walk.levels.push(rest);
            } else if walk.levels.is_empty() {
                walk.levels.extend(walk_levels::above(state, now, done.dir, walk.order));
            }
            continue;
        };
        let dir = level.dir;
        if !entry.is_dir {
            match wanted_file(state, now, dir, &entry) {
                Some(found) => return Some(found),
                None => continue,
            }
        }
        if walk.levels.len() >= DEEPEST || walk.entries() >= MOST_HELD {
            continue;
        }
        let rows = state.store.dir(entry.id.ino).map_or(0, |directory| directory.rows.existing());
        *passed = passed.saturating_add(u32::try_from(rows).unwrap_or(u32::MAX));
        match walk_levels::first(state, now, entry.id.ino, walk.order) {
            Some(below) if below.dir == entry.id => walk.levels.push(below),
            // A job brings it.
            None if is_coming(state, entry.id.ino) => {
                walk.levels.last_mut()?.left.push_front(entry);
                return None;
            }
            _ => {}
        }
    }
}

/// Returns whether a directory is being listed, or a job will bring it.
fn is_coming(state: &State, dir: u64) -> bool {
    state.prefetch.expected_by(dir).is_some() || state.store.dir(dir).is_some_and(|d| d.listing.is_some())
}

/// Returns a file of a walk with its attributes, unless it is empty, or its contents are there already or on their way.
fn wanted_file(state: &State, now: Time, dir: NodeId, entry: &WalkEntry) -> Option<(NodeRef, Attr)> {
    let directory = state.store.dir(dir.ino).filter(|directory| directory.id == dir)?;
    let held = directory.held.filter(|held| held.is_live(now))?;
    let child = state.store.child(dir.ino, &entry.name).filter(|child| child.id == entry.id)?;
    let (attr, _) = view::child_attr(state, now, child, held)?;
    let has_pages =
        state.store.inode_of(entry.id).is_some_and(|inode| inode.pages().live_grant(now).is_some());
    let is_wanted = attr.size > 0 && !has_pages && !state.contents.has_or_expects(entry.id.ino);
    let hint = Some((dir, entry.name.clone()));
    is_wanted.then_some((NodeRef { node: entry.id, path_hint: hint }, attr))
}
