//! Pages of open directories.

use crate::cookies32;
use crate::cookies32::{Position, ShortCookie};
use crate::facts::{inodes, leases};
use crate::grants::LiveGrant;
use crate::op::{Fh, KernelInvalidation, Opened, Page, PageEntry};
use crate::open::{FilesWithAttrs, OpenDir};
use crate::out::{invalidate, prune};
use crate::state::State;
use crate::store::{DirEntries, DirEntryRef, Directory};
use crate::view;
use nigh_types::{Attr, Cookie, Name, NodeId, Time};

const DIRECTORY: u32 = 0o040_000;

/// Entry chosen for a page; with attributes if the kernel is to know the inode.
pub(crate) struct Chosen {
    cookie: Cookie,
    name: Name,
    ino: u64,
    mode: u32,
    next: Cookie,
    node: Option<(NodeId, Attr, LiveGrant)>,
    /// Its attributes are withheld, to see whether the reader looks it up.
    is_probe: bool,
}

/// Space left in a page, counted as the kernel does.
struct PageSpace {
    left: u32,
    overhead: u32,
}

impl PageSpace {
    fn take(&mut self, name_len: usize) -> bool {
        let name_len = u32::try_from(name_len).unwrap_or(u32::MAX);
        let need = self.overhead.saturating_add(name_len).next_multiple_of(8);
        let fits = need <= self.left;
        if fits {
            self.left -= need;
        }
        fits
    }
}

pub(crate) fn opened_dir(state: &mut State, now: Time, ino: u64, reader: u32) -> Opened {
    // The kernel resumes at any equal offset in its cached listing, and short offsets of different entries may be
    // equal.
    let keeps = state.kernel.can_notify() && !state.config.short_cookies;
    let limit = state.config.kernel_listing_below;
    let mut opened = Opened {
        fh: state.open.new_fh(),
        keep_cache: false,
        cache_dir: false,
        no_flush: false,
        direct: false,
    };
    let (mut deadline, wants_names) = (None, state.open.readers.wants_names(reader));
    if let Some((directory, held)) = leases::live_directory(state, now, ino)
        && keeps
        && directory.complete
        && directory.rows.existing() < limit
    {
        opened.cache_dir = true;
        let is_enough = wants_names || !directory.cached_without_attrs;
        opened.keep_cache = is_enough && directory.kernel_version == Some(directory.version);
        directory.cached_without_attrs &= opened.keep_cache;
        directory.kernel_version = Some(directory.version);
        deadline = Some(held.deadline);
    }
    if let Some(deadline) = deadline {
        invalidate::set_timers(state, deadline, ino);
    }
    let open = OpenDir {
        ino,
        snapshot: None,
        inexact_cookie: None,
        reading: true,
        kernel_keeps: opened.cache_dir,
        reader,
        files_with_attrs: 0,
        is_probed: false,
    };
    state.open.dirs.insert(opened.fh, open);
    if let Some(id) = state.store.id_of(ino) {
        inodes::record(state, id).opens_mut().note_dir_open();
    }
    opened
}

/// Records that a page reply was composed. The page goes into the listing that the kernel caches for an open
/// directory: it matches the present facts. A page without a grant is invalidated right after the reply.
///
/// The kernel must not complete a cached listing that began in another state of the directory. It compares at the
/// beginning only, so a reader in mid-listing would go on in a listing that others have completed
/// (`fuse_readdir_cached`), and would find older names. So the kernel first drops the pages that it has.
pub(crate) fn on_page_reply(state: &mut State, now: Time, fh: Fh, page: &mut Page) {
    let Some(open) = state.open.dirs.note_page(fh, page.entries.is_empty()) else { return };
    let (ino, facts, keeps) = (open.ino, open.snapshot.is_none(), open.kernel_keeps);
    if keeps {
        let same = |directory: &mut Directory| {
            let before = directory.chunk_version.replace(directory.version);
            before.is_none_or(|before| before == directory.version)
        };
        let is_same = facts && state.store.dir_mut(ino).is_some_and(same);
        page.drops = (!is_same).then_some(ino);
        kernel_keeps_listing(state, now, ino, facts);
    }
}

fn kernel_keeps_listing(state: &mut State, now: Time, ino: u64, facts: bool) {
    match leases::live_directory(state, now, ino).filter(|_| facts) {
        Some((directory, _)) if directory.kernel_version == Some(directory.version) => {}
        Some((directory, held)) => {
            directory.kernel_version = Some(directory.version);
            invalidate::set_timers(state, held.deadline, ino);
        }
        None => {
            invalidate::invalidate(state, vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }], None);
        }
    }
}

/// Returns a page from facts; `None` if the listing has not come far enough.
pub(crate) fn page(
    state: &mut State,
    now: Time,
    ino: u64,
    fh: Fh,
    offset: Cookie,
    size: u32,
    plus: bool,
) -> Option<Page> {
    let (from, files) = (position(state, fh, offset), files_for(state, fh));
    let (chosen, full, told) = {
        let held = leases::live_directory(state, now, ino)?.1;
        let directory = state.store.dir(ino)?;
        let until = if directory.complete { None } else { Some(directory.progress?) };
        let shortens = state.config.short_cookies;
        let known = |row: &DirEntryRef| {
            let is_known = |p| row.cookie <= p && (!shortens || cookies32::is_decided(row.cookie, p));
            row.child.is_some() && until.is_none_or(is_known)
        };
        let rows = from.rows(&directory.rows).filter(known);
        let (mut chosen, full) = choose(state, now, ino, rows, offset, size, plus, Some((held, files)));
        let (all, told) = (chosen.len(), shorten_cookies(state, &directory.rows, from, &mut chosen));
        let full = full || until.is_none() || chosen.len() < all;
        (chosen, full, told)
    };
    if !full {
        return None;
    }
    note_inexact_cookie(state, fh, told);
    note_page_content(state, fh, &chosen, plus && files == FilesWithAttrs::None);
    Some(fill(state, now, ino, offset, size, plus, chosen))
}

/// Returns which files get attributes in replies to this reader.
pub(crate) fn files_for(state: &mut State, fh: Fh) -> FilesWithAttrs {
    let Some(open) = state.open.dirs.dir(fh) else { return FilesWithAttrs::None };
    state.open.readers.files(open.reader, open.files_with_attrs, open.is_probed)
}

pub(crate) fn note_page_content(state: &mut State, fh: Fh, chosen: &[Chosen], is_bare: bool) {
    let Some(open) = state.open.dirs.dir_mut(fh) else { return };
    let files = chosen.iter().filter(|c| c.node.is_some() && c.mode != DIRECTORY).count();
    open.files_with_attrs += files as u64;
    if chosen.iter().any(|c| c.is_probe) {
        open.is_probed = true;
        state.open.readers.probed(open.reader);
    }
    let (ino, reader, keeps) = (open.ino, open.reader, open.kernel_keeps);
    if let Some(directory) = state.store.dir_mut(ino) {
        (directory.last_reader, directory.was_read) = (reader, true);
        directory.cached_without_attrs |= is_bare && keeps;
    }
}

/// Returns a page of a snapshot: names only. `None`: this open directory reads none.
pub(crate) fn snapshot_page(
    state: &mut State,
    fh: Fh,
    offset: Cookie,
    size: u32,
    plus: bool,
) -> Option<Page> {
    let ino = state.open.dirs.dir(fh)?.ino;
    let (snapshot, from) = (state.open.dirs.snapshot(fh)?, position(state, fh, offset));
    let rows = from.rows(snapshot).filter(|row| row.child.is_some());
    let (mut chosen, _) = choose(state, Time(0), ino, rows, offset, size, plus, None);
    let told = shorten_cookies(state, snapshot, from, &mut chosen);
    note_inexact_cookie(state, fh, told);
    Some(fill(state, Time(0), ino, offset, size, plus, chosen))
}

/// Returns the position that an offset stands for.
fn position(state: &State, fh: Fh, offset: Cookie) -> Position {
    if state.config.short_cookies {
        Position::of(offset, state.open.dirs.dir(fh).and_then(|open| open.inexact_cookie))
    } else {
        Position::behind(offset)
    }
}

/// Gives entries 31-bit offsets if the mount needs them, up to and with the first mark. Returns the mark with its
/// cookie, to be remembered.
fn shorten_cookies(
    state: &State,
    rows: &DirEntries,
    from: Position,
    chosen: &mut Vec<Chosen>,
) -> Option<(Cookie, Cookie)> {
    if !state.config.short_cookies {
        return None;
    }
    let cookies: Vec<Cookie> = chosen.iter().map(|c| c.cookie).collect();
    let numbers = cookies32::short_cookies(rows, from, &cookies);
    chosen.truncate(numbers.len());
    let stands_for = chosen.last()?.next;
    for (entry, number) in chosen.iter_mut().zip(&numbers) {
        entry.next = number.offset();
    }
    match numbers.last()? {
        ShortCookie::Exact(_) => None,
        mark @ ShortCookie::InexactCookie(_) => Some((mark.offset(), stands_for)),
    }
}

fn note_inexact_cookie(state: &mut State, fh: Fh, told: Option<(Cookie, Cookie)>) {
    if let Some(open) = state.open.dirs.dir_mut(fh).filter(|_| told.is_some()) {
        open.inexact_cookie = told;
    }
}

fn room(state: &State, offset: Cookie, size: u32, plus: bool) -> PageSpace {
    let overhead = if plus { state.config.entry_size.1 } else { state.config.entry_size.0 };
    let mut room = PageSpace { left: size, overhead };
    for (at, length) in [(0, 1), (1, 2)] {
        if offset.0 <= at {
            room.take(length);
        }
    }
    room
}

/// Chooses entries that fit, without splitting names with equal cookies. The flag says that more entries follow.
#[allow(clippy::too_many_arguments, reason = "what to choose from, and what the kernel asked for")]
pub(crate) fn choose<'a>(
    state: &State,
    now: Time,
    dir: u64,
    rows: impl Iterator<Item = DirEntryRef<'a>>,
    offset: Cookie,
    size: u32,
    plus: bool,
    held: Option<(LiveGrant, FilesWithAttrs)>,
) -> (Vec<Chosen>, bool) {
    let (mut room, may_tell) = (room(state, offset, size, plus), plus && prune::may_reveal(state));
    let mut is_tried = !matches!(held, Some((_, FilesWithAttrs::All { but_one: true })));
    let mut chosen: Vec<Chosen> = Vec::new();
    for row in rows {
        if !room.take(row.name.len()) {
            let whole = chosen.iter().rposition(|c| c.cookie != row.cookie).map_or(0, |at| at + 1);
            if whole > 0 {
                chosen.truncate(whole);
            }
            return (chosen, true);
        }
        if let Some(before) = chosen.last_mut().filter(|c| c.cookie == row.cookie) {
            before.next = Cookie(row.cookie.0 - 1);
        }
        let Some(child) = row.child else { continue };
        let mode = child.attr().mode & 0o170_000;
        let is_given = |files| mode == DIRECTORY || files != FilesWithAttrs::None;
        let is_new = |(_, files): &(LiveGrant, FilesWithAttrs)| {
            may_tell && is_given(*files) && !view::kernel_knows(state, now, dir, row.name, child.id)
        };
        let mut node = held.filter(is_new).and_then(|(held, _)| {
            let (attr, under) = view::child_attr(state, now, child, held)?;
            Some((child.id, attr, under))
        });
        let is_try = !is_tried && node.is_some() && mode != DIRECTORY;
        node = node.filter(|_| !is_try);
        is_tried |= is_try;
        let (cookie, next, ino) = (row.cookie, row.cookie, child.id.ino);
        chosen.push(Chosen { cookie, name: row.to_name(), ino, mode, next, node, is_probe: is_try });
    }
    (chosen, false)
}

pub(crate) fn fill(
    state: &mut State,
    now: Time,
    ino: u64,
    offset: Cookie,
    size: u32,
    plus: bool,
    chosen: Vec<Chosen>,
) -> Page {
    let mut page = Page::default();
    let mut room = room(state, Cookie(2), size, plus);
    let parent = state.store.inode(ino).and_then(|i| i.parent_entry()).map_or(ino, |(dir, _)| *dir);
    for (at, name, target) in [(0, b".".as_slice(), ino), (1, b"..".as_slice(), parent)] {
        if offset.0 <= at && room.take(name.len()) {
            let next = Cookie(at + 1);
            let name_len = if at == 0 { 1 } else { 2 };
            page.entries.push(PageEntry { ino: target, mode: DIRECTORY, next, name_len, node: None });
            page.names.extend_from_slice(name);
        }
    }
    let held = state.store.dir(ino).and_then(|d| d.held);
    for Chosen { name, ino: child, mode, next, node, .. } in chosen {
        let node = node.map(|(id, attr, under)| {
            inodes::entry_reply(state, now, Some((ino, &name)), id, attr, held, Some(under))
        });
        let name = name.as_bytes();
        let name_len = u16::try_from(name.len()).unwrap_or(0);
        page.entries.push(PageEntry { ino: child, mode, next, name_len, node });
        page.names.extend_from_slice(name);
    }
    page
}
