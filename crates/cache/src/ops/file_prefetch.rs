//! Prefetch of file contents: when a reader's next files, or the next part of its file, are read ahead
//! (docs/decisions/0043-contents.md).

use crate::op::Fh;
use crate::ops::{content_reads, reading_order};
use crate::prefetch::{
    DirsOrder, FileWalk, FinishedFile, Reader, ReadingOrder, RestOfHead, WalkAt, WalkEntry, WalkLevel,
    WalkNumber,
};
use crate::state::State;
use crate::store::Directory;
use crate::view::{self, paths};
use nigh_contents::CHUNK;
use nigh_types::{Attr, Cookie, Kind, NodeId, NodeRef, Time};
use std::collections::VecDeque;
use std::ops::Range;

/// Most entries of a directory that a walk takes.
const LOOKED_AT: usize = 16_384;
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
        return state.prefetch.files.note_no_order();
    };
    match state.prefetch.files.go_on_at(now, order, reader.read_as, this) {
        WalkAt::Here(number) => return fill(state, now, number),
        WalkAt::Refused => return,
        WalkAt::Nowhere => {}
    }
    let Some(mut level) = level_of(state, now, this.dir, order) else { return };
    let Some(at) = level.left.iter().position(|entry| entry.id.ino == ino) else { return };
    level.left.drain(..=at);
    let number = state.prefetch.files.begin(FileWalk::new(order, reader, vec![level], now));
    fill(state, now, number);
}

/// Returns the regular files with contents and the directories of a directory, in an order. `None`: it is not listed.
fn level_of(state: &State, now: Time, dir: u64, order: ReadingOrder) -> Option<WalkLevel> {
    let is_complete = |d: &&Directory| d.complete && d.held.is_some_and(|held| held.is_live(now));
    let directory = state.store.dir(dir).filter(is_complete)?;
    let mut left: Vec<(Cookie, WalkEntry)> = Vec::new();
    for row in directory.rows.iter().take(LOOKED_AT) {
        let Some(child) = row.child else { continue };
        let is_dir = child.attr().is_dir();
        if is_dir || child.attr().kind() == Kind::File {
            left.push((row.cookie, WalkEntry { id: child.id, name: row.to_name(), is_dir }));
        }
    }
    fn place((cookie, entry): &(Cookie, WalkEntry)) -> (Cookie, &[u8], u64) {
        (*cookie, entry.name.as_bytes(), entry.id.ino)
    }
    left.sort_unstable_by(|a, b| order.by.compare(place(a), place(b)));
    let mut left: VecDeque<WalkEntry> = left.into_iter().map(|(_, entry)| entry).collect();
    if order.dirs != DirsOrder::AmongFiles {
        let (mut dirs, files): (VecDeque<WalkEntry>, VecDeque<WalkEntry>) =
            left.into_iter().partition(|entry| entry.is_dir);
        if order.dirs == DirsOrder::LastFirst {
            dirs.make_contiguous().reverse();
        }
        left = files.into_iter().chain(dirs).collect();
    }
    Some(WalkLevel { dir: directory.id, left })
}

/// Goes on with all walks: a directory or contents came, or the window has room.
pub(crate) fn go_on(state: &mut State, now: Time) {
    state.prefetch.files.numbers().into_iter().for_each(|number| fill(state, now, number));
}

/// Asks for the next files of a walk, as far as its window goes.
fn fill(state: &mut State, now: Time, number: WalkNumber) {
    let Some(mut walk) = state.prefetch.files.take(number) else { return };
    let largest = state.contents.walk_window();
    let mut passed = 0;
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
        }
    }
    state.prefetch.files.put_back(number, walk);
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
            if walk.levels.is_empty() {
                walk.levels.extend(level_above(state, now, done.dir, walk.order));
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
        match level_of(state, now, entry.id.ino, walk.order) {
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

/// Returns the rest of the directory above one that is done, if the walk came down from there. A directory that no caller has
/// read is above the walk: names were looked up in it, as `rg` does for `.gitignore`.
fn level_above(state: &State, now: Time, done: NodeId, order: ReadingOrder) -> Option<WalkLevel> {
    state.store.dir(done.ino).filter(|directory| directory.id == done && directory.opened_in_walk)?;
    let (above, _) = state.store.inode(done.ino)?.parent_entry()?;
    state.store.dir(*above).filter(|directory| directory.was_read)?;
    let mut level = level_of(state, now, *above, order)?;
    let at = level.left.iter().position(|entry| entry.id == done)?;
    level.left.drain(..=at);
    Some(level)
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
