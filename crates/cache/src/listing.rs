//! Listings as they arrive, part by part.

use crate::cache::Cache;
use crate::flight::{Flight, Purpose, Want};
use crate::grants::Held;
use crate::op::Answer;
use crate::rows::{Child, Row, Rows};
use nigh_types::{Call, CallId, Cookie, Covers, Entry, Grant, Name, NodeId, OpId, Reply, Response, Time};
use rustc_hash::FxHashMap;

impl Cache {
    /// Has a directory listed, unless a listing that will be kept is on its way.
    pub(crate) fn list(&mut self, now: Time, dir: u64) -> Option<(CallId, bool)> {
        let listing = self.dirs.get(&dir).and_then(|d| d.listing);
        if let Some(call) = listing
            && self.flights.get(&call).is_some_and(|f| f.aside.is_none() && f.seen.recalled.is_empty())
        {
            return Some((call, true));
        }
        let place = self.place(dir)?;
        let node = place.node;
        let call = self.send(now, None, Purpose::List { dir }, Call::List { dir: place });
        let directory = self.directory(node);
        directory.listing = Some(call);
        directory.progress = None;
        Some((call, false))
    }

    /// One part of a listing. Returns the flight while more is to come.
    pub(crate) fn handle_listed(
        &mut self,
        now: Time,
        call: CallId,
        dir: u64,
        mut flight: Flight,
        response: Response,
    ) -> Option<Flight> {
        let (entries, last) = match (&response.result, self.id_of(dir)) {
            (Ok(Reply::Listed(listed)), Some(_)) => (listed.entries.clone(), response.last),
            (Err(errno), _) => {
                self.listing_ended(call, dir);
                self.answer_all(&flight.waiters, &Answer::Failed(*errno));
                return None;
            }
            _ => {
                self.listing_ended(call, dir);
                self.answer_all(&flight.waiters, &Answer::Failed(nigh_types::Errno::PROTO));
                return None;
            }
        };
        if !flight.begun {
            self.listing_begins(now, call, dir, &mut flight, &response.grants);
        }
        let kept = flight.aside.is_none();
        if kept {
            self.keep_part(now, dir, &flight, &entries, &response.grants);
        } else if let Some(rows) = &mut flight.aside {
            let key = self.key;
            for (name, entry) in &entries {
                let cookie = key.cookie(name.as_bytes());
                rows.insert(Row { cookie, name: name.clone(), child: Some(Child::new(entry)) });
            }
        }
        if last {
            self.listing_completes(now, call, dir, &mut flight, &response);
        }
        self.serve_waiters(now, dir, &mut flight, last);
        if !last {
            return Some(flight);
        }
        self.answer_all(&flight.waiters, &Answer::Failed(nigh_types::Errno::IO));
        self.trim(now);
        None
    }

    /// The first part: its grant begins, or the listing is put aside for those who wait.
    fn listing_begins(&mut self, now: Time, call: CallId, dir: u64, flight: &mut Flight, grants: &[Grant]) {
        flight.begun = true;
        let Some(id) = self.id_of(dir) else { return };
        let granted = flight.granted(grants, id, Covers::Names).map(|g| Held::begin(g, flight.sent));
        let current = self.directory(id).listing == Some(call);
        match granted.filter(|h| current && h.lives(now)) {
            Some(held) => {
                let directory = self.directory(id);
                directory.forget();
                directory.held = Some(held);
                directory.progress = Some(Cookie(0));
            }
            None => flight.aside = Some(Box::default()),
        }
    }

    fn keep_part(
        &mut self,
        now: Time,
        dir: u64,
        flight: &Flight,
        entries: &[(Name, Entry)],
        grants: &[Grant],
    ) {
        let own: FxHashMap<NodeId, &Grant> =
            grants.iter().filter(|g| g.covers == Covers::Inode).map(|g| (g.node, g)).collect();
        let mut progress = None;
        for (name, entry) in entries {
            let cookie = self.key.cookie(name.as_bytes());
            progress = Some(cookie);
            if flight.seen.name(dir, name).is_some() {
                continue;
            }
            let mut child = Child::new(entry);
            let changed = flight.seen.inodes.contains(&entry.id.ino);
            if changed {
                child.no_xattrs = false;
                match self.attr_of(now, entry.id) {
                    Some((attr, _)) => child.attr = attr,
                    None => child.attr_known = false,
                }
            } else {
                self.list_own(now, flight, entry, (dir, name), own.get(&entry.id).copied());
            }
            if let Some(directory) = self.dirs.get_mut(&dir) {
                directory.rows.insert(Row { cookie, name: name.clone(), child: Some(child) });
            }
        }
        if let Some(directory) = self.dirs.get_mut(&dir) {
            directory.progress = progress.or(directory.progress);
        }
        self.recount(dir);
    }

    /// A listed inode's own attributes: under its own grant if it needs one, else those in its
    /// directory's row take the place of what an older grant of its own said.
    fn list_own(
        &mut self,
        now: Time,
        flight: &Flight,
        entry: &Entry,
        home: (u64, &Name),
        grant: Option<&Grant>,
    ) {
        let recalled = flight.seen.recalled.contains(&(entry.id, Covers::Inode));
        if entry.attr.covered_by_parent() {
            if let Some(inode) = self.inodes.get_mut(&entry.id.ino) {
                inode.own = None;
            }
            return;
        }
        let held = grant.filter(|_| !recalled).map(|g| Held::begin(g, flight.sent)).filter(|h| h.lives(now));
        if let Some(held) = held {
            let inode = self.inode(entry.id);
            inode.own = Some((entry.attr, held));
            if inode.home.is_none() {
                inode.home = Some((home.0, home.1.clone()));
            }
        }
    }

    /// The last part has come: own mutations answered meanwhile are laid over the listing.
    fn listing_completes(
        &mut self,
        now: Time,
        call: CallId,
        dir: u64,
        flight: &mut Flight,
        response: &Response,
    ) {
        let patches = std::mem::take(&mut flight.seen.names);
        let key = self.key;
        let mut scrap = Rows::default();
        let rows = match (&mut flight.aside, self.dirs.get_mut(&dir)) {
            (Some(aside), _) => aside.as_mut(),
            (None, Some(directory)) => &mut directory.rows,
            (None, None) => &mut scrap,
        };
        for (_, name, child) in patches.into_iter().filter(|(d, _, _)| *d == dir) {
            let cookie = key.cookie(name.as_bytes());
            match child {
                Some(child) => drop(rows.insert(Row { cookie, name, child: Some(child) })),
                None => drop(rows.remove(cookie, name.as_bytes())),
            }
        }
        if flight.aside.is_none()
            && let Some(directory) = self.dirs.get_mut(&dir)
        {
            directory.rows.drop_missing();
            directory.complete = directory.held.is_some();
        }
        self.listing_ended(call, dir);
        self.recount(dir);
        self.learn_after(now, flight, response);
    }

    fn listing_ended(&mut self, call: CallId, dir: u64) {
        if let Some(directory) = self.dirs.get_mut(&dir)
            && directory.listing == Some(call)
        {
            directory.listing = None;
            directory.progress = None;
        }
    }

    fn serve_waiters(&mut self, now: Time, dir: u64, flight: &mut Flight, last: bool) {
        let waiters = std::mem::take(&mut flight.waiters);
        for op in waiters {
            if !self.serve_waiter(now, dir, flight, last, op) {
                flight.waiters.push(op);
            }
        }
    }

    /// Answers a request that waits for this listing, if it has come far enough.
    fn serve_waiter(&mut self, now: Time, dir: u64, flight: &mut Flight, last: bool, op: OpId) -> bool {
        let Some(waiting) = self.waiting.get(&op) else { return true };
        match waiting.want.clone() {
            Want::OpenDir { ino } => {
                let opened = self.opened_dir(now, ino);
                self.answer(op, Answer::Opened(opened));
                true
            }
            Want::Page { fh, offset, size, plus } => {
                if flight.aside.is_some() {
                    if !last {
                        return false;
                    }
                    let id = self.id_of(dir);
                    if let (Some(open), Some(rows), Some(id)) =
                        (self.open_dirs.get_mut(&fh), &flight.aside, id)
                    {
                        open.snapshot = Some(Box::new((id, rows.as_ref().copy())));
                    }
                    let page = self.snapshot_page(fh, offset, size, plus);
                    self.answer(op, page);
                    return true;
                }
                match self.page(now, dir, offset, size, plus) {
                    Some(page) => {
                        self.answer(op, Answer::Page(page));
                        true
                    }
                    None => false,
                }
            }
            _ => false,
        }
    }
}
