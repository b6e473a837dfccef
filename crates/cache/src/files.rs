//! Regular files: open, data, close.

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall, OpenParams, attr_after};
use crate::grants::LiveGrant;
use crate::op::{Caller, Fh, KernelInvalidation, Op, OpReply, Opened, Output};
use crate::open::OpenFile;
use crate::session::SessionState;
use crate::store::{CachedPages, ChangeToken};
use nigh_types::{
    Access, Attr, Call, DataVersion, Errno, Handle, LeaseScope, NodeId, OpId, Reply, Response, Time,
    WriteFlags,
};

impl Cache {
    pub(crate) fn open(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        ino: u64,
        access: Access,
        append: bool,
    ) -> Option<OpReply> {
        let Some(id) = self.store.id_of(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        let file = OpenParams { append, access, caller };
        let local = !access.write && !access.truncate && !self.is_name_removal_in_flight(ino);
        if local && let Some((attr, held)) = self.cached_attr(now, id) {
            let keep = self.pages_match(now, None, id, &attr, Some(held));
            // The remote recalls the grant before the last name goes.
            self.set_timers(held.deadline, ino);
            return Some(OpReply::Opened(self.opened_file(id, file, None, keep)));
        }
        let Some(node) = self.node_ref(ino) else { return Some(OpReply::Failed(Errno::STALE)) };
        self.send_for(now, op, caller, CallKind::Open { ino, file }, Call::Open { node, access })
    }

    /// Returns whether a local change in flight removes an inode's name without a pin at the remote. If the inode is
    /// gone when the remote opens it, the kernel looks the name up again.
    fn is_name_removal_in_flight(&self, ino: u64) -> bool {
        let Some(inode) = self.store.inode(ino) else { return false };
        let Some((dir, name)) = &inode.parent_entry else { return false };
        self.calls.values().any(|flight| match &flight.purpose {
            CallKind::Remove { dir: d, name: n } => d == dir && n == name,
            // The remote pins the file that a rename replaces, as far as it was known.
            CallKind::Rename { to, new_name, exchange: false, .. } if to == dir && new_name == name => {
                !matches!(flight.resend, Some(Call::Rename { keep, .. }) if keep == Some(inode.id))
            }
            _ => false,
        })
    }

    /// Returns whether a data grant lives.
    pub(crate) fn has_data_grant(&self, now: Time, ino: u64) -> bool {
        self.store.inode(ino).is_some_and(|i| i.data.held.is_some_and(|h| h.is_live(now)))
    }

    /// Returns whether the kernel's pages match the file's present attributes, under a grant that covers later changes.
    fn pages_match(
        &mut self,
        now: Time,
        flight: Option<&InflightCall>,
        id: NodeId,
        attr: &Attr,
        under: Option<LiveGrant>,
    ) -> bool {
        let keeps = self.kernel.can_notify();
        let inode = self.inode(id);
        let lives = inode.data.held.filter(|h| h.is_live(now));
        let same = inode.data.pages == CachedPages::Of(ChangeToken::of(attr));
        if lives.is_none() && same {
            inode.ext_mut().data.held = under;
        }
        let mixed = inode.data.pages == CachedPages::Mixed;
        let told = lives.filter(|h| h.on.1 == LeaseScope::Data);
        // Up to the grant's deadline, pages that may mix with local writes stay; but not beside attributes of another
        // version.
        let hold = told.is_some_and(|h| h.recalled_before_any_change() || h.stale || mixed)
            || same && inode.data.held.is_some();
        if hold && !(mixed && told.is_some_and(|h| !h.recalled_before_any_change())) {
            self.note_page_base(now, flight, id.ino, DataVersion::of(attr));
        }
        keeps && hold
    }

    pub(crate) fn opened_file(
        &mut self,
        id: NodeId,
        file: OpenParams,
        handle: Option<Handle>,
        keep_cache: bool,
    ) -> Opened {
        let fh = self.open.new_fh();
        // The kernel would put appended data into pages at the end of file that it knows, where other clients may have
        // appended. Reads that bypass the pages would be taken for reads that have them locked.
        let appends = file.append && file.access.write && !file.access.read;
        let direct = appends && self.config.direct_appends;
        let inode = self.inode(id);
        // A lock owner's close of any descriptor must reach the cache.
        let may_lock = inode.has_locks || inode.opens > 0;
        let more = inode.ext_mut();
        if !keep_cache && more.opens == 0 {
            more.base = None;
        }
        more.opens += 1;
        more.writers += u32::from(file.access.write);
        if handle.is_none() {
            more.unpinned_opens += 1;
        }
        if !keep_cache {
            more.data.pages = CachedPages::None;
        }
        self.open.files.insert(
            fh,
            OpenFile {
                ino: id.ino,
                generation: id.generation,
                handle,
                access: Access { truncate: false, ..file.access },
                direct,
                unfinished_write_at: None,
                lost: false,
                caller: file.caller,
            },
        );
        self.set_data_timers(id.ino);
        let no_flush = handle.is_none() && !may_lock;
        Opened { fh, keep_cache, cache_dir: false, no_flush, direct }
    }

    pub(crate) fn on_open_reply(
        &mut self,
        now: Time,
        flight: &InflightCall,
        ino: u64,
        file: OpenParams,
        response: &Response,
    ) -> OpReply {
        let (handle, attr) = match &response.result {
            Ok(Reply::Opened { handle, attr }) => (*handle, *attr),
            Ok(_) => return OpReply::Failed(Errno::PROTO),
            Err(errno) => return OpReply::Failed(*errno),
        };
        let Some(id) = self.store.id_of(ino) else {
            self.release_handle(handle);
            return OpReply::Failed(Errno::STALE);
        };
        if flight.is_mutation() {
            self.note_local_inode(ino);
            self.inode(id).ext_mut().data.pages = CachedPages::None;
        }
        let under = self.apply_attr(now, flight, id, attr, &response.grants);
        if flight.waiters.is_empty() {
            self.release_handle(handle);
            return OpReply::Done;
        }
        let data =
            flight.granted(&response.grants, id, LeaseScope::Data).map(|g| LiveGrant::begin(g, flight.sent));
        let keep = self.pages_match(now, Some(flight), id, &attr, data.filter(|h| h.is_live(now)).or(under));
        self.begin_data_grant(now, flight, id, Some(ChangeToken::of(&attr)), response);
        OpReply::Opened(self.opened_file(id, file, Some(handle), keep))
    }

    /// Drops pages of another data version than these attributes tell, under a grant that is not recalled before all
    /// changes: no caller may read old data beside the new attributes until the grant ends.
    pub(crate) fn drop_other_version(&mut self, now: Time, id: NodeId, attr: &Attr) {
        let Some(inode) = self.store.inode_of_mut(id) else { return };
        let limited =
            inode.data.held.is_some_and(|h| h.is_live(now) && !h.recalled_before_any_change() && !h.stale);
        if !limited || !matches!(inode.data.pages, CachedPages::Of(stamp) if stamp != ChangeToken::of(attr)) {
            return;
        }
        inode.drop_pages();
        // Pages of a file that is not open are dropped by its next open.
        if inode.opens > 0 {
            self.mark_pages_stale(id.ino, false);
            self.invalidate(vec![KernelInvalidation::Data { ino: id.ino, offset: 0, length: 0 }], None);
        }
    }

    /// Begins a data grant. A living grant with older pages is prolonged instead, if the file is in the version of its
    /// pages (`stamp`): recalled changes would have been heard, and others show in the attributes.
    pub(crate) fn begin_data_grant(
        &mut self,
        now: Time,
        flight: &InflightCall,
        id: NodeId,
        stamp: Option<ChangeToken>,
        response: &Response,
    ) {
        let granted = flight.granted(&response.grants, id, LeaseScope::Data);
        let fresh = granted.map(|g| LiveGrant::begin(g, flight.sent)).filter(|h| h.is_live(now));
        let inode = self.inode(id);
        let lives = inode.data.held.filter(|h| h.is_live(now));
        if let Some(held) = lives.filter(|_| inode.data.pages != CachedPages::None) {
            // Under a grant without recall the pages have to be compared again.
            let same = stamp.is_some_and(|stamp| inode.data.pages == CachedPages::Of(stamp));
            let later =
                fresh.filter(|h| same && h.recallable && held.recallable && h.deadline > held.deadline);
            inode.ext_mut().data.held = Some(later.unwrap_or(held));
            if let (Some(later), Some(base)) = (later, &mut inode.ext_mut().base) {
                base.under = (later.id, later.on.1);
            }
            return;
        }
        inode.ext_mut().data.held = fresh;
        if inode.opens > 0 {
            self.set_data_timers(id.ino);
        }
    }

    pub(crate) fn read(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        (ino, fh): (u64, Fh),
        offset: u64,
        size: u32,
    ) -> Option<OpReply> {
        let Some((node, handle)) = self.handle_for(ino, Some(fh)) else {
            return Some(OpReply::Failed(Errno::STALE));
        };
        let call = Call::Read { node, handle, offset, length: size };
        if self.queue_behind_write(op, caller, (ino, fh), (offset, size)) {
            return None;
        }
        let id = self.send(now, None, CallKind::Read { ino, fh, offset, size }, call);
        self.wait(op, caller, id, crate::calls::ReplyKind::Reply, false)
    }

    /// Returns the reference and handle for an open file; `None` if another inode has its number now.
    pub(crate) fn handle_for(
        &self,
        ino: u64,
        fh: Option<Fh>,
    ) -> Option<(nigh_types::NodeRef, Option<Handle>)> {
        let node = self.node_ref(ino)?;
        let file = fh.and_then(|fh| self.open.files.get(fh));
        if file.is_some_and(|file| file.generation != node.node.generation) {
            return None;
        }
        let handle = file.and_then(|f| f.handle);
        let pinned = self.store.inode(ino).and_then(|i| i.pin_handle);
        Some((node, handle.or(pinned)))
    }

    pub(crate) fn on_read_reply(
        &mut self,
        now: Time,
        flight: &InflightCall,
        (ino, fh): (u64, Fh),
        (offset, size): (u64, u32),
        response: Response,
    ) {
        if flight.read_before_write && response.result.is_ok() {
            return self.resend_reads(now, &flight.waiters, fh, (ino, offset, size));
        }
        let range = (offset, u64::from(size));
        let data = match response.result {
            Ok(Reply::Data(data)) => data,
            failed => {
                let errno = failed.err().unwrap_or(Errno::PROTO);
                self.reply_all(&flight.waiters, &OpReply::Failed(errno));
                let pages = flight.purpose.pages().filter(|_| flight.drop_data);
                return self.drop_after_reply(&flight.waiters, pages);
            }
        };
        if let Some(&op) = flight.waiters.first() {
            self.reply_to(op, OpReply::Data(data));
        }
        self.store.inode_mut(ino).into_iter().for_each(|inode| inode.ext_mut().whole.note_filled());
        let Some(id) = self.store.id_of(ino) else { return };
        let response = Response { result: Ok(Reply::Done), ..response };
        self.apply_attrs_after(now, flight, &response);
        let stamp =
            response.after.iter().find(|(node, _)| *node == id).map(|(_, attr)| ChangeToken::of(attr));
        self.begin_data_grant(now, flight, id, stamp, &response);
        self.note_page_base_after(now, flight, ino, &response);
        let changed = flight.race_log.local_inodes.contains(&ino);
        let inode = self.inode(id);
        let lives = inode.data.held.is_some_and(|h| h.is_live(now));
        let before = inode.data.pages;
        inode.ext_mut().data.pages = match (before, stamp) {
            (CachedPages::None, Some(stamp)) if !changed => CachedPages::Of(stamp),
            (CachedPages::Of(old), Some(stamp)) if !changed && old != stamp => CachedPages::Of(stamp),
            (CachedPages::Of(old), _) if !changed => CachedPages::Of(old),
            _ => CachedPages::Mixed,
        };
        let foreign =
            matches!((before, inode.data.pages), (CachedPages::Of(a), CachedPages::Of(b)) if a != b);
        if !self.kernel.can_notify() {
            return;
        }
        let ungranted = flight.drop_data || !lives;
        if foreign {
            let until = self.invalidate(vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }], None);
            self.note_drop_after_reply(&flight.waiters, ino, until);
            if ungranted {
                self.note_ungranted((id, range), until, &response);
            }
        } else if ungranted {
            self.drop_ungranted(flight, (id, range), &response);
        }
    }

    pub(crate) fn write(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        (ino, fh): (u64, Fh),
        (offset, data): (u64, Vec<u8>),
        flags: WriteFlags,
    ) -> Option<OpReply> {
        let Some(file) = self.open.files.get(fh) else { return Some(OpReply::Failed(Errno::BADF)) };
        let (Some(handle), Some(node)) = (file.handle, self.node_ref(ino)) else {
            return Some(OpReply::Failed(Errno::BADF));
        };
        let (is_flush, size) = (flags.write_back, data.len() as u64);
        let since = match if is_flush { self.writeback_precondition(ino, (offset, size)) } else { Ok(None) } {
            Ok(since) => since,
            Err(errno) => {
                self.drop_after_reply(&[op], Some((ino, (offset, size))));
                return Some(OpReply::Failed(errno));
            }
        };
        let flush = is_flush.then(|| Box::new(Op::Write { ino, fh, offset, data: data.clone(), flags }));
        let append = flags.append && !is_flush;
        let flags = WriteFlags { append, sync: file.access.sync, since, ..flags };
        let (opener, direct) = (file.caller, (file.direct && !is_flush).then_some(fh));
        let purpose = CallKind::Write { ino, offset, size, writeback: is_flush, append, direct };
        let call = Call::Write { node, handle: Some(handle), offset, data, flags };
        let id = self.send(now, Some(opener), purpose, call);
        if !is_flush {
            self.calls.mark_reads_before_write(ino, (offset, size));
        }
        if let Some(flight) = self.calls.get_mut(id) {
            flight.writeback_op = flush;
        }
        if direct.is_some() {
            self.on_direct_append(ino, fh, offset);
        }
        self.wait(op, caller, id, crate::calls::ReplyKind::Reply, false)
    }

    pub(crate) fn on_written(
        &mut self,
        now: Time,
        flight: &InflightCall,
        ino: u64,
        at: u64,
        response: &Response,
    ) -> OpReply {
        self.apply_attrs_after(now, flight, response);
        if response.result.is_ok() && attr_after(response, ino).is_none() {
            // The reply carries no attributes, so those after the write are unknown.
            self.drop_attr(ino);
        }
        self.note_local_inode(ino);
        self.note_local_write(now, ino, response);
        if let Some(id) = self.store.id_of(ino).filter(|_| !response.grants.is_empty()) {
            let stamp = attr_after(response, ino).map(|attr| ChangeToken::of(&attr));
            self.begin_data_grant(now, flight, id, stamp, response);
        }
        self.note_page_base_after(now, flight, ino, response);
        let is_flush = flight.purpose.is_writeback();
        self.note_write_reply(&flight.purpose, response.result.is_ok());
        match response.result {
            Ok(Reply::Written { offset, count }) => {
                if is_flush {
                    self.on_writeback_reply(ino, response);
                }
                if offset != at {
                    let stale = vec![
                        KernelInvalidation::Data { ino, offset: 0, length: 0 },
                        KernelInvalidation::Attr { ino },
                    ];
                    self.invalidate(stale, None);
                }
                OpReply::Written(count)
            }
            Ok(_) => OpReply::Failed(Errno::PROTO),
            Err(Errno::CANCELED) if is_flush => {
                self.fail_writeback(ino);
                OpReply::Failed(Errno::IO)
            }
            Err(errno) => {
                self.drop_attr(ino);
                OpReply::Failed(errno)
            }
        }
    }

    /// Drops a write's pages after its reply, if no grant covers them, since no recall would say that another client
    /// overwrites them. Also if a write-back failed, since the pages would look written.
    pub(crate) fn drop_pages_after_write(&mut self, now: Time, flight: &InflightCall, response: &Response) {
        let CallKind::Write { ino, writeback: flush, .. } = flight.purpose else { return };
        let has_failed = flush && response.result.is_err();
        if !flight.drop_data && !has_failed && self.has_data_grant(now, ino) {
            return;
        }
        let (pages, id) = (flight.purpose.pages(), self.store.id_of(ino));
        match (pages, id) {
            // Write-back brings no new pages.
            (Some((_, range)), Some(id)) if !flush => self.drop_ungranted(flight, (id, range), response),
            (pages, _) => self.drop_after_reply(&flight.waiters, pages),
        }
    }

    /// Records the kernel's pages after a local write: they are the present version unless another client may have
    /// written without a recall.
    pub(crate) fn note_local_write(&mut self, now: Time, ino: u64, response: &Response) {
        let Some(inode) = self.store.inode_mut(ino) else { return };
        let told = inode.data.held.is_some_and(|h| h.is_live(now) && h.recalled_before_any_change());
        let after = match (&response.result, attr_after(response, ino)) {
            (Ok(Reply::Attr(node, attr)), _) if node.ino == ino => Some(*attr),
            (_, after) => after,
        };
        inode.ext_mut().data.pages = match (inode.data.pages, after) {
            (CachedPages::None, Some(attr)) => CachedPages::Of(ChangeToken::of(&attr)),
            (CachedPages::Of(_), Some(attr)) if told => CachedPages::Of(ChangeToken::of(&attr)),
            _ => CachedPages::Mixed,
        };
    }

    pub(crate) fn release(&mut self, now: Time, fh: Fh, flock: Option<u64>) -> Option<OpReply> {
        let Some(file) = self.open.files.remove(fh) else { return Some(OpReply::Done) };
        self.release_with_file(now, file.ino, fh, flock);
        if let Some(handle) = file.handle {
            self.release_handle(handle);
        }
        let mut idle_pin = None;
        if let Some(inode) = self.store.inode_mut(file.ino) {
            let more = inode.ext_mut();
            more.opens -= 1;
            more.writers -= u32::from(file.access.write);
            if more.writers == 0 {
                more.old = None;
                self.ungranted.forget(file.ino);
            }
            // The kernel keeps pages for the next open while a data grant lives.
            let keeps_pages = more.data.held.is_some_and(|h| h.on.1 == LeaseScope::Data && h.is_live(now));
            if more.opens == 0 {
                more.base.take_if(|_| !keeps_pages);
                more.last_getattr = None;
            }
            if file.handle.is_none() {
                more.unpinned_opens -= 1;
            }
            // No timer checks the pages before that grant ends: the next open compares attributes.
            if more.opens == 0 && more.data.held.is_some_and(|h| h.on.1 != LeaseScope::Data) {
                more.data.held = None;
            }
            // A caller that looked up the lost name may be about to open it.
            let is_named = inode.parent_entry.is_some() || inode.nlookup == 0;
            if inode.unpinned_opens == 0 && is_named {
                // The server would release the handle before it does earlier calls that use it: the pin then stays
                // until the inode is forgotten.
                let calls = &self.calls;
                idle_pin = inode.ext_mut().pin_handle.take_if(|handle| !calls.uses_handle(*handle));
            }
        }
        if let Some(handle) = idle_pin {
            self.release_handle(handle);
        }
        self.drop_if_idle(file.ino);
        Some(OpReply::Done)
    }

    /// Releases a handle; nothing waits for that. If the session has expired, the release is sent when the session is
    /// back.
    pub(crate) fn release_handle(&mut self, handle: Handle) {
        match self.session.state() {
            SessionState::Expired => self.session.release_later(handle),
            SessionState::Lost => {}
            _ => self.release_handles(vec![handle]),
        }
    }

    /// Releases several handles at a reachable remote.
    pub(crate) fn release_handles(&mut self, mut handles: Vec<Handle>) {
        // The reply to a reclaim releases a handle without an owner.
        handles.retain(|handle| !self.is_reclaiming(*handle));
        for some in handles.chunks(Call::MOST_HANDLES as usize) {
            let call = Call::Release { handles: some.to_vec() };
            self.out.push_back(Output::Call {
                id: self.calls.new_id(),
                caller: None,
                mutation_id: None,
                call,
            });
        }
    }
}
