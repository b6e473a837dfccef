//! Open directories and pages of them.

use crate::cache::Cache;
use crate::calls::ReplyKind;
use crate::cookies32::{self, Position, ShortCookie};
use crate::grants::LiveGrant;
use crate::op::{Caller, Fh, KernelInvalidation, Op, OpReply, Opened, Page, PageEntry};
use crate::open::FilesWithAttrs;
use crate::open::OpenDir;
use crate::store::Directory;
use crate::store::{DirEntries, DirEntryRef};
use nigh_types::{Attr, Cookie, Errno, Name, NodeId, OpId, Time};

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

impl Cache {
    pub(crate) fn open_dir(&mut self, now: Time, op: OpId, caller: Caller, ino: u64) -> Option<OpReply> {
        if self.store.id_of(ino).is_none() {
            return Some(OpReply::Failed(Errno::STALE));
        }
        if self.is_removed_dir(ino) {
            return Some(OpReply::Opened(self.opened_dir(now, ino, caller.pid)));
        }
        let descent = self.note_descent(now, ino);
        self.use_prefetched(now, ino);
        if self.live_directory(now, ino).is_some_and(|(d, _)| d.complete || d.progress.is_some()) {
            return Some(OpReply::Opened(self.opened_dir(now, ino, caller.pid)));
        }
        let began = self.is_to_be_listed(ino) && self.prefetch_from(now, ino, descent).is_some();
        match self.list(now, ino) {
            Ok((call, joined)) => self.wait(op, caller, call, ReplyKind::OpenDir { ino }, joined && !began),
            Err(Errno::NOMEM) => Some(OpReply::Opened(self.opened_dir(now, ino, caller.pid))),
            Err(errno) => Some(OpReply::Failed(errno)),
        }
    }

    /// Returns whether a local change removed a directory that a process is still in.
    fn is_removed_dir(&self, ino: u64) -> bool {
        self.store.inode(ino).is_some_and(|i| i.unlinked_attr.is_some())
    }

    pub(crate) fn opened_dir(&mut self, now: Time, ino: u64, reader: u32) -> Opened {
        // The kernel resumes at any equal offset in its cached listing, and short offsets of different entries may be
        // equal.
        let keeps = self.kernel.can_notify() && !self.config.short_cookies;
        let limit = self.config.kernel_listing_below;
        let mut opened = Opened {
            fh: self.open.new_fh(),
            keep_cache: false,
            cache_dir: false,
            no_flush: false,
            direct: false,
        };
        let (mut deadline, wants_names) = (None, self.open.readers.wants_names(reader));
        if let Some((directory, held)) = self.live_directory(now, ino)
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
            self.set_timers(deadline, ino);
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
        self.open.dirs.insert(opened.fh, open);
        if let Some(id) = self.store.id_of(ino) {
            self.inode(id).ext_mut().opens += 1;
        }
        opened
    }

    pub(crate) fn release_dir(&mut self, now: Time, fh: Fh) -> Option<OpReply> {
        self.close_name_stream(now, fh);
        if let Some(open) = self.open.dirs.remove(fh)
            && let Some(inode) = self.store.inode_mut(open.ino)
        {
            inode.ext_mut().opens -= 1;
            self.drop_if_idle(open.ino);
        }
        Some(OpReply::Done)
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of one FUSE request")]
    pub(crate) fn read_dir(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        ino: u64,
        fh: Fh,
        offset: Cookie,
        size: u32,
        plus: bool,
    ) -> Option<OpReply> {
        let Some(open) = self.open.dirs.get_mut(fh) else { return Some(OpReply::Failed(Errno::BADF)) };
        open.reader = caller.pid;
        if offset == Cookie(0) {
            self.open.readers.began(caller.pid);
            self.open.dirs.leave_snapshot(fh);
            self.close_name_stream(now, fh);
        }
        if let Some(mut page) = self.snapshot_page(fh, offset, size, plus) {
            self.on_page_reply(now, fh, &mut page);
            return Some(OpReply::Page(page));
        }
        if self.is_removed_dir(ino) {
            return Some(OpReply::Page(Page::default()));
        }
        let known = self.live_directory(now, ino).is_some();
        if known && self.store.suspended.has_names(ino) {
            return self.wait_for_commit(now, op, caller, ino, Op::ReadDir { ino, fh, offset, size, plus });
        }
        if known && let Some(mut page) = self.page(now, ino, fh, offset, size, plus) {
            self.on_page_reply(now, fh, &mut page);
            return Some(OpReply::Page(page));
        }
        let want = ReplyKind::Page { fh, offset, size, plus };
        if let Some(answer) = self.read_names_only(now, (op, caller), ino, &want) {
            return answer;
        }
        match self.list(now, ino) {
            Ok((call, joined)) => self.wait(op, caller, call, want, joined),
            Err(errno) => Some(OpReply::Failed(errno)),
        }
    }

    /// Records that a page reply was composed. The page goes into the listing that the kernel caches for an open
    /// directory: it matches the present facts. A page without a grant is invalidated right after the reply.
    ///
    /// The kernel must not complete a cached listing that began in another state of the directory. It compares at the
    /// beginning only, so a reader in mid-listing would go on in a listing that others have completed
    /// (`fuse_readdir_cached`), and would find older names. So the kernel first drops the pages that it has.
    pub(crate) fn on_page_reply(&mut self, now: Time, fh: Fh, page: &mut Page) {
        let Some(open) = self.open.dirs.note_page(fh, page.entries.is_empty()) else { return };
        let (ino, facts, keeps) = (open.ino, open.snapshot.is_none(), open.kernel_keeps);
        if keeps {
            let same = |directory: &mut Directory| {
                let before = directory.chunk_version.replace(directory.version);
                before.is_none_or(|before| before == directory.version)
            };
            let is_same = facts && self.store.dir_mut(ino).is_some_and(same);
            page.drops = (!is_same).then_some(ino);
            self.kernel_keeps_listing(now, ino, facts);
        }
    }

    fn kernel_keeps_listing(&mut self, now: Time, ino: u64, facts: bool) {
        match self.live_directory(now, ino).filter(|_| facts) {
            Some((directory, _)) if directory.kernel_version == Some(directory.version) => {}
            Some((directory, held)) => {
                directory.kernel_version = Some(directory.version);
                self.set_timers(held.deadline, ino);
            }
            None => {
                self.invalidate(vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }], None);
            }
        }
    }

    /// Returns a page from facts; `None` if the listing has not come far enough.
    pub(crate) fn page(
        &mut self,
        now: Time,
        ino: u64,
        fh: Fh,
        offset: Cookie,
        size: u32,
        plus: bool,
    ) -> Option<Page> {
        let (from, files) = (self.position(fh, offset), self.files_for(fh));
        let (chosen, full, told) = {
            let held = self.live_directory(now, ino)?.1;
            let directory = self.store.dir(ino)?;
            let until = if directory.complete { None } else { Some(directory.progress?) };
            let shortens = self.config.short_cookies;
            let known = |row: &DirEntryRef| {
                let is_known = |p| row.cookie <= p && (!shortens || cookies32::is_decided(row.cookie, p));
                row.child.is_some() && until.is_none_or(is_known)
            };
            let rows = from.rows(&directory.rows).filter(known);
            let (mut chosen, full) = self.choose(now, ino, rows, offset, size, plus, Some((held, files)));
            let (all, told) = (chosen.len(), self.shorten_cookies(&directory.rows, from, &mut chosen));
            let full = full || until.is_none() || chosen.len() < all;
            (chosen, full, told)
        };
        if !full {
            return None;
        }
        self.note_inexact_cookie(fh, told);
        self.note_page_content(fh, &chosen, plus && files == FilesWithAttrs::None);
        Some(self.fill(now, ino, offset, size, plus, chosen))
    }

    /// Returns which files get attributes in replies to this reader.
    pub(crate) fn files_for(&mut self, fh: Fh) -> FilesWithAttrs {
        let Some(open) = self.open.dirs.get(fh) else { return FilesWithAttrs::None };
        self.open.readers.files(open.reader, open.files_with_attrs, open.is_probed)
    }

    pub(crate) fn note_page_content(&mut self, fh: Fh, chosen: &[Chosen], is_bare: bool) {
        let Some(open) = self.open.dirs.get_mut(fh) else { return };
        let files = chosen.iter().filter(|c| c.node.is_some() && c.mode != DIRECTORY).count();
        open.files_with_attrs += files as u64;
        if chosen.iter().any(|c| c.is_probe) {
            open.is_probed = true;
            self.open.readers.probed(open.reader);
        }
        let (ino, reader, keeps) = (open.ino, open.reader, open.kernel_keeps);
        if let Some(directory) = self.store.dir_mut(ino) {
            directory.last_reader = reader;
            directory.cached_without_attrs |= is_bare && keeps;
        }
    }

    /// Returns a page of a snapshot: names only. `None`: this open directory reads none.
    pub(crate) fn snapshot_page(&mut self, fh: Fh, offset: Cookie, size: u32, plus: bool) -> Option<Page> {
        let ino = self.open.dirs.get(fh)?.ino;
        let (snapshot, from) = (self.open.dirs.snapshot(fh)?, self.position(fh, offset));
        let rows = from.rows(snapshot).filter(|row| row.child.is_some());
        let (mut chosen, _) = self.choose(Time(0), ino, rows, offset, size, plus, None);
        let told = self.shorten_cookies(snapshot, from, &mut chosen);
        self.note_inexact_cookie(fh, told);
        Some(self.fill(Time(0), ino, offset, size, plus, chosen))
    }

    /// Returns the position that an offset stands for.
    fn position(&self, fh: Fh, offset: Cookie) -> Position {
        if self.config.short_cookies {
            Position::of(offset, self.open.dirs.get(fh).and_then(|open| open.inexact_cookie))
        } else {
            Position::behind(offset)
        }
    }

    /// Gives entries 31-bit offsets if the mount needs them, up to and with the first mark. Returns the mark with its
    /// cookie, to be remembered.
    fn shorten_cookies(
        &self,
        rows: &DirEntries,
        from: Position,
        chosen: &mut Vec<Chosen>,
    ) -> Option<(Cookie, Cookie)> {
        if !self.config.short_cookies {
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

    fn note_inexact_cookie(&mut self, fh: Fh, told: Option<(Cookie, Cookie)>) {
        if let Some(open) = self.open.dirs.get_mut(fh).filter(|_| told.is_some()) {
            open.inexact_cookie = told;
        }
    }

    fn room(&self, offset: Cookie, size: u32, plus: bool) -> PageSpace {
        let overhead = if plus { self.config.entry_size.1 } else { self.config.entry_size.0 };
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
        &self,
        now: Time,
        dir: u64,
        rows: impl Iterator<Item = DirEntryRef<'a>>,
        offset: Cookie,
        size: u32,
        plus: bool,
        held: Option<(LiveGrant, FilesWithAttrs)>,
    ) -> (Vec<Chosen>, bool) {
        let (mut room, may_tell) = (self.room(offset, size, plus), plus && self.may_reveal());
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
                may_tell && is_given(*files) && !self.kernel_knows(now, dir, row.name, child.id)
            };
            let mut node = held.filter(is_new).and_then(|(held, _)| {
                let (attr, under) = self.child_attr(now, child, held)?;
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
        &mut self,
        now: Time,
        ino: u64,
        offset: Cookie,
        size: u32,
        plus: bool,
        chosen: Vec<Chosen>,
    ) -> Page {
        let mut page = Page::default();
        let mut room = self.room(Cookie(2), size, plus);
        let parent = self.store.inode(ino).and_then(|i| i.parent_entry.as_ref()).map_or(ino, |(dir, _)| *dir);
        for (at, name, target) in [(0, b".".as_slice(), ino), (1, b"..".as_slice(), parent)] {
            if offset.0 <= at && room.take(name.len()) {
                let next = Cookie(at + 1);
                let name_len = if at == 0 { 1 } else { 2 };
                page.entries.push(PageEntry { ino: target, mode: DIRECTORY, next, name_len, node: None });
                page.names.extend_from_slice(name);
            }
        }
        let held = self.store.dir(ino).and_then(|d| d.held);
        for Chosen { name, ino: child, mode, next, node, .. } in chosen {
            let node = node.map(|(id, attr, under)| {
                self.entry_reply(now, Some((ino, &name)), id, attr, held, Some(under))
            });
            let name = name.as_bytes();
            let name_len = u16::try_from(name.len()).unwrap_or(0);
            page.entries.push(PageEntry { ino: child, mode, next, name_len, node });
            page.names.extend_from_slice(name);
        }
        page
    }
}
