//! Prefetch jobs: directories that the server lists before a caller asks for them (docs/decisions/0019-walks-ahead.md).
//!
//! One call brings many directories. Each of them is a listing with a call id of its own that is never sent, so a
//! caller that needs the listing meanwhile joins it, and all rules for listings hold. The server reads the next
//! directory only after it has sent what came before. So a directory's race log needs only the changes since the reply
//! before the one that begins it.

mod budget;
mod jobs;
mod policy;

pub(crate) use jobs::PrefetchJobs;

use crate::cache::Cache;
use crate::calls::{CallKind, InflightCall, RaceLog};
use crate::op::Output;
use nigh_types::{
    Call, CallId, Entries, Errno, Grant, LeaseScope, NodeId, NodeRef, OpId, PrefetchOrder, PrefetchedDir,
    Reply, Response, Time,
};
use rustc_hash::FxHashMap;

/// Credit of a job's first request, in entries.
const FIRST_WINDOW: u64 = 1_024;
const LARGEST_WINDOW: u64 = 65_536;
/// Approximate size of an entry in the cache, in bytes.
const ENTRY_BYTES: u64 = 160;

impl Cache {
    /// Returns whether a directory needs a listing call: no listing is in flight, and no job will bring it.
    pub(crate) fn is_to_be_listed(&self, dir: u64) -> bool {
        if self.store.oversized.contains(self.clock, dir) {
            return false;
        }
        let listing = self.store.dir(dir).and_then(|d| d.listing);
        listing.is_none() && self.prefetch.expected_by(dir).is_none()
    }

    /// Returns the listing of a directory that a job will bring.
    pub(crate) fn join_expected(&mut self, now: Time, dir: u64) -> Option<CallId> {
        let job = self.prefetch.expected_by(dir)?;
        let node = self.store.id_of(dir)?;
        let call = self.begin_prefetched_listing(job, node)?;
        if self.prefetch.widen_if_out_of_credit(job, self.largest_window()) {
            self.request_directory(now, job, dir);
        }
        Some(call)
    }

    /// Begins the listing of a directory by a job, unless it has begun.
    fn begin_prefetched_listing(&mut self, walk_call: CallId, node: NodeId) -> Option<CallId> {
        if let Some(call) = self.prefetch.listing(walk_call, node.ino)? {
            return Some(call);
        }
        let walk = self.calls.get(walk_call)?;
        let told = InflightCall {
            race_log: walk.race_log.clone(),
            ..InflightCall::new(CallKind::List { dir: node.ino }, "list", walk.sent)
        };
        let call = self.calls.new_id();
        self.calls.insert(call, told);
        self.replace_listing(node, call);
        self.prefetch.add_listing(walk_call, node.ino, call);
        Some(call)
    }

    /// Starts a job at these directories.
    fn start_job(
        &mut self,
        now: Time,
        order: PrefetchOrder,
        roots: Vec<NodeRef>,
        window: u64,
    ) -> Option<CallId> {
        self.cancel_oldest_jobs(now);
        let credit = u32::try_from(window).unwrap_or(u32::MAX);
        let dirs: Vec<u64> = roots.iter().map(|place| place.node.ino).collect();
        let call = self.send(now, None, CallKind::Prefetch, Call::Prefetch { roots, order, credit });
        self.calls.get(call)?;
        self.counters.ahead_walks += 1;
        self.prefetch.begin(now, call, window, dirs.into_iter());
        Some(call)
    }

    fn cancel_oldest_jobs(&mut self, now: Time) {
        self.prefetch.beyond_limit().into_iter().for_each(|call| self.cancel_job(now, call));
    }

    pub(crate) fn cancel_job(&mut self, now: Time, call: CallId) {
        self.out.push_back(Output::Cancel(call));
        self.end_job(now, call);
    }

    /// Grants a job more credit, or asks for one directory before all others.
    fn send_credit(&mut self, walk: CallId, credit: u64, want: Option<NodeRef>) {
        let credit = u32::try_from(credit).unwrap_or(u32::MAX);
        let call = Call::PrefetchCredit { walk, credit, want };
        self.out.push_back(Output::Call { id: self.calls.new_id(), caller: None, mutation_id: None, call });
    }

    fn request_directory(&mut self, now: Time, walk_call: CallId, dir: u64) {
        let Some(place) = self.node_ref(dir) else { return };
        if let Some(more) = self.prefetch.request(now, walk_call, dir) {
            self.send_credit(walk_call, more, Some(place));
        }
    }

    /// Handles a reply of a job.
    pub(crate) fn on_prefetch_reply(
        &mut self,
        now: Time,
        call: CallId,
        flight: InflightCall,
        response: Response,
    ) {
        let Ok(Reply::Prefetched(steps)) = response.result else {
            return self.end_job(now, call);
        };
        if !self.prefetch.is_running(call) {
            // The job was cancelled: nothing of it is kept, but the call stays until its last reply.
            self.refresh_grant_ids(&flight, &response.grants);
            self.return_unused_grants(&response.grants);
            if !response.last {
                self.calls.insert(call, flight);
            }
            return;
        }
        let mut own: FxHashMap<NodeId, Vec<Grant>> = FxHashMap::default();
        for grant in response.grants {
            own.entry(grant.node).or_default().push(grant);
        }
        // Listings that begin with this reply need the changes since the reply before; later ones do not.
        self.calls.insert(call, flight);
        for step in steps {
            if self.prefetch.is_running(call) {
                self.on_prefetched_dir(now, call, step, &own);
            } else {
                // An earlier step of this reply cancelled the job.
                self.return_prefetched_dir(call, &step, &own);
            }
        }
        if response.last {
            self.calls.remove(call);
            return self.end_job(now, call);
        }
        self.calls.get_mut(call).into_iter().for_each(|walk| walk.race_log = RaceLog::default());
        self.request_awaited(now, call);
    }

    fn on_prefetched_dir(
        &mut self,
        now: Time,
        walk_call: CallId,
        step: PrefetchedDir,
        own: &FxHashMap<NodeId, Vec<Grant>>,
    ) {
        let PrefetchedDir { dir: node, listed, last } = step;
        let dir = node.ino;
        self.prefetch.no_longer_expect(dir);
        let Some(listed) = listed.filter(|_| self.store.id_of(dir) == Some(node)) else {
            let names =
                own.get(&node).into_iter().flatten().filter(|grant| grant.covers == LeaseScope::Directory);
            self.return_unused_grants(&names.copied().collect::<Vec<_>>());
            return self.on_not_prefetched(now, walk_call, dir);
        };
        let Some(call) = self.begin_prefetched_listing(walk_call, node) else { return };
        // As for a listing call: a deadline that passed detaches the entries so far, before more come.
        self.live_directory(now, dir);
        let Some(flight) = self.calls.remove(call) else { return };
        let below: Vec<u64> =
            listed.entries.iter().filter(|(_, e)| e.attr.is_dir()).map(|(_, e)| e.id.ino).collect();
        let grants = granted_by(node, &listed, own);
        let count = listed.entries.len() as u64;
        let waited = !flight.waiters.is_empty();
        let response = Response { result: Ok(Reply::Listed(listed)), after: Vec::new(), grants, last };
        if let Some(flight) = self.on_listing_chunk(now, call, dir, flight, response) {
            self.calls.insert(call, flight);
        }
        self.after_listing_chunk(now, dir);
        for dir in below {
            let known = self.store.dir(dir).is_some_and(|d| d.complete);
            if !known && self.store.has_inode(dir) && self.prefetch.is_running(walk_call) {
                self.prefetch.expect(dir, walk_call);
            }
        }
        self.count_prefetched(now, (walk_call, dir), count, (waited, last));
    }

    fn return_prefetched_dir(
        &mut self,
        walk_call: CallId,
        step: &PrefetchedDir,
        own: &FxHashMap<NodeId, Vec<Grant>>,
    ) {
        let Some(flight) = self.calls.remove(walk_call) else { return };
        if let Some(listed) = &step.listed {
            let grants = granted_by(step.dir, listed, own);
            self.refresh_grant_ids(&flight, &grants);
            self.return_unused_grants(&grants);
        }
        self.calls.insert(walk_call, flight);
    }

    /// Counts entries of a directory that came; `last`: the directory is complete.
    fn count_prefetched(
        &mut self,
        now: Time,
        (walk_call, dir): (CallId, u64),
        count: u64,
        (waited, last): (bool, bool),
    ) {
        let cost = count + u64::from(last);
        let is_read = waited || self.store.inode(dir).is_some_and(|inode| inode.opens > 0);
        if !self.prefetch.count_arrived(walk_call, dir, cost, last) {
            return;
        }
        self.counters.ahead_fetched += cost;
        let Some(directory) = self.store.dir_mut(dir) else { return self.count_wasted(walk_call, cost) };
        let before = directory.prefetched_by.take().map_or(0, |(_, cost)| cost);
        directory.prefetched_by = Some((walk_call, before + cost));
        directory.used &= is_read;
        if last {
            self.prefetch.push_arrived(dir);
            self.prefetch.tidy_arrived(self.store.dir_count(), |dir| self.store.has_dir(dir));
        }
        if is_read && last {
            self.use_prefetched(now, dir);
        }
    }

    /// Handles a directory that the server did not list after all: its waiters get a listing call.
    fn on_not_prefetched(&mut self, now: Time, walk_call: CallId, dir: u64) {
        if let Some(call) = self.prefetch.remove_listing(walk_call, dir) {
            self.list_unfetched(now, dir, call);
        }
    }

    fn list_unfetched(&mut self, now: Time, dir: u64, call: CallId) {
        let Some(flight) = self.calls.remove(call) else { return };
        self.end_listing(call, dir);
        let waiters: Vec<OpId> = flight.waiters.into_iter().filter(|op| self.calls.is_waiting(*op)).collect();
        if !waiters.is_empty() && self.node_ref(dir).is_none() {
            return self.reply_all(&waiters, &crate::op::OpReply::Failed(Errno::STALE));
        }
        self.relist_for_late_joiners(now, dir, waiters);
    }

    /// Ends a job: nothing more comes of it.
    fn end_job(&mut self, now: Time, call: CallId) {
        for (dir, listing) in self.prefetch.end(call) {
            self.list_unfetched(now, dir, listing);
        }
        self.prefetch.drop_ended();
    }

    /// Cancels all jobs: all grants end.
    pub(crate) fn cancel_all_jobs(&mut self, now: Time) {
        self.prefetch.running().into_iter().for_each(|call| self.cancel_job(now, call));
    }

    /// Asks a job first for directories that callers wait for and that the last reply did not bring.
    fn request_awaited(&mut self, now: Time, walk_call: CallId) {
        let mut listings = self.prefetch.unrequested_listings(walk_call);
        let is_awaited = |call: CallId| {
            self.calls.get(call).is_some_and(|flight| !flight.has_chunk && !flight.waiters.is_empty())
        };
        listings.retain(|(_, call)| is_awaited(*call));
        for (dir, _) in listings {
            self.request_directory(now, walk_call, dir);
        }
    }

    /// Returns unused grants. A grant that an earlier reply brought stays: it has the later id by now, and would end
    /// with it.
    fn return_unused_grants(&mut self, grants: &[Grant]) {
        let is_held = |grant: &&Grant| {
            let (id, inode) = (grant.node, self.store.inode(grant.node.ino));
            match grant.covers {
                LeaseScope::Directory => {
                    self.store.dir(id.ino).is_some_and(|d| d.id == id && d.held.is_some())
                }
                LeaseScope::Attributes => inode.is_some_and(|inode| inode.id == id && inode.own.is_some()),
                _ => true,
            }
        };
        let unkept: Vec<&Grant> = grants.iter().filter(|grant| !is_held(grant)).collect();
        for grant in unkept.iter().filter(|grant| grant.covers == LeaseScope::Directory) {
            self.note_grant_returned(grant.node, grant.id);
        }
        if !unkept.is_empty() {
            self.out.push_back(Output::Return(unkept.iter().map(|grant| grant.id).collect()));
        }
    }

    /// Returns the initial window of a job, in entries.
    fn first_window(&self) -> u64 {
        self.largest_window().min(FIRST_WINDOW)
    }

    /// Returns the largest window; also no more directories than half of those that the cache may hold.
    fn largest_window(&self) -> u64 {
        let entries = (self.config.budget_bytes / ENTRY_BYTES / 8).clamp(FIRST_WINDOW, LARGEST_WINDOW);
        entries.min((self.config.most_dirs / 2).max(1))
    }
}

/// Returns the grants on a directory's names, and on those of its entries that its directory lease does not cover.
fn granted_by(node: NodeId, listed: &Entries, own: &FxHashMap<NodeId, Vec<Grant>>) -> Vec<Grant> {
    let names = own.get(&node).into_iter().flatten().filter(|grant| grant.covers == LeaseScope::Directory);
    let of_entries = listed.entries.iter().filter(|(_, e)| !e.attr.covered_by_parent());
    let of_entries = of_entries.filter_map(|(_, e)| own.get(&e.id)).flatten();
    names.chain(of_entries.filter(|grant| grant.covers == LeaseScope::Attributes)).copied().collect()
}

#[cfg(test)]
mod tests;
