//! Inputs and outputs of the lease table.

use crate::merge_base::{MergeBase, WroteBack};
use crate::report::{self, LeaseReport};
use crate::rules::{
    deadlock, grants, limits, listing_rights, merging, read_grants, recalls, updates, write_queue,
};
use crate::state::{ChangeState, Due, Entry, HolderState, MissedCursor, State};
use crate::types::{
    Change, ChangeId, ClientOrigin, GrantRequest, Granted, Holder, LeaseConfig, LeaseKey, LeaseOutput,
    LeaseTerms, Object, ObservedAt,
};
use nigh_types::{GrantId, LeaseScope, NodeId, RecallId, Span, Term, Time};

/// The leases of one server.
///
/// **Contract.** After each input drain `poll_output` until it says [`LeaseOutput::Timeout`], then call
/// `handle_timeout` no later than the moment that it names (never, for `Time::FAR`). A `now` before the latest one
/// counts as the latest one. Every input first does all that is due by then: a lapsed holder is fenced before its
/// message counts.
///
/// Inputs that name an unknown holder, grant, recall or change do nothing.
#[derive(Clone, Debug)]
pub struct LeaseTable {
    pub(crate) state: State,
}

impl LeaseTable {
    #[must_use]
    pub fn new(config: LeaseConfig) -> LeaseTable {
        LeaseTable { state: State::new(config) }
    }

    /// Begins a session, or resumes it over a new connection. On resumption the table re-emits every outstanding recall
    /// and prepare, and renews the lease unless the holder is suspect. `needs_exclusive_dir_lease` (rule 9) counts when
    /// the session begins.
    pub fn handle_attach(&mut self, now: Time, holder: Holder, needs_exclusive_dir_lease: bool) {
        let table = self.at(now);
        if let Some(account) = table.accounts.get_mut(&holder) {
            account.disconnected = false;
            if account.suspect.is_none() {
                account.last_renewed = table.now;
            }
            recalls::resend_owed(table, holder);
        } else {
            table.accounts.insert(holder, HolderState::new(table.now, needs_exclusive_dir_lease));
            table.arm_holder(holder);
        }
    }

    /// Begins a session on these terms.
    pub fn handle_begin(&mut self, now: Time, holder: Holder, terms: &LeaseTerms) {
        self.handle_attach(now, holder, terms.needs_exclusive_dir_lease);
        let limit = match terms.term {
            Term::Session => Span::FOREVER,
            Term::Limited(span) => span,
        };
        self.handle_limit(now, holder, limit);
        if let Some(client) = terms.client {
            self.handle_client(now, holder, client);
        }
        if terms.confined {
            self.handle_confine(now, holder);
        }
        if terms.takes_updates {
            self.handle_takes_updates(now, holder);
        }
        if terms.trusts_watch {
            self.handle_trusts_watch(now, holder);
        }
    }

    /// Renews a holder's lease after a message from it. Returns false if the holder is suspect, fenced or disconnected:
    /// then nothing is renewed, and the server does not reply.
    pub fn handle_renewal(&mut self, now: Time, holder: Holder) -> bool {
        let table = self.at(now);
        match table.accounts.get_mut(&holder) {
            Some(account) if account.suspect.is_none() && !account.disconnected => {
                account.last_renewed = table.now;
                true
            }
            _ => false,
        }
    }

    /// Registers a grant before its facts are read. `None`: the reply carries no grant.
    pub fn handle_grant(&mut self, now: Time, request: GrantRequest) -> Option<Granted> {
        write_queue::try_grant(self.at(now), &request)
    }

    /// Whether this grant is live: it is its holder's latest on its key, and neither recalled nor ended. Checked when a
    /// reply that carries it is queued in the stream.
    #[must_use]
    pub fn is_live(&self, holder: Holder, grant: GrantId) -> bool {
        self.state.is_live(holder, grant)
    }

    /// Ends grants that the client returned.
    pub fn handle_return(&mut self, now: Time, holder: Holder, grants: &[GrantId]) {
        let table = self.at(now);
        for grant in grants {
            if grants::end_grant(table, holder, *grant) {
                table.counters.returned += 1;
            }
        }
    }

    /// Withdraws grants that were registered and that no reply carries. A grant that replaced an earlier one stays
    /// live: the client may have the earlier one.
    pub fn handle_withdraw(&mut self, now: Time, holder: Holder, grants: &[GrantId]) {
        let table = self.at(now);
        for grant in grants {
            let held = table.accounts.get(&holder).and_then(|account| account.grants.get(grant));
            if held.is_some_and(|held| !table.entries[&(held.key, holder)].is(Entry::REPLACES))
                && grants::end_grant(table, holder, *grant)
            {
                table.counters.returned += 1;
            }
        }
    }

    /// Takes an acknowledgement: the client's kernel holds none of the facts any more, and its cache has dropped
    /// (recall) or suspended (prepare) them.
    pub fn handle_acknowledge(&mut self, now: Time, holder: Holder, recall: RecallId) {
        let table = self.at(now);
        if recalls::acknowledge(table, holder, recall) {
            table.counters.acknowledged += 1;
        }
    }

    /// Begins a change on behalf of `by` (`None`: a change on the server's own disk), and sends each other
    /// holder a recall or an update prepare. `changes` may name a key several times, with different names.
    pub fn handle_change(&mut self, now: Time, by: Option<Holder>, changes: &[Change]) -> ChangeId {
        let table = self.at(now);
        let id = table.numbers.next_change();
        table.changes.insert(id, ChangeState::new(by, table.now));
        recalls::extend(table, id, changes);
        id
    }

    /// Adds keys to a change in progress: it is ready again once these are recalled too.
    pub fn handle_extend(&mut self, now: Time, id: ChangeId, changes: &[Change]) {
        recalls::extend(self.at(now), id, changes);
    }

    #[must_use]
    pub fn is_ready(&self, id: ChangeId) -> bool {
        self.state.changes.get(&id).is_some_and(ChangeState::is_ready)
    }

    /// Ends a change that was applied or abandoned: its keys may be granted again. Each holder that was sent a prepare
    /// receives a commit with the values that [`LeaseTable::handle_observed`] observed.
    pub fn handle_done(&mut self, now: Time, id: ChangeId) {
        write_queue::end_change(self.at(now), id, None);
    }

    /// Ends a session that said goodbye: the client has dropped everything, and all its grants end at once.
    pub fn handle_goodbye(&mut self, now: Time, holder: Holder) {
        grants::end_holder(self.at(now), holder);
    }

    /// Notes that a holder's connection is lost. Its grants stay live until its lease runs out; recalls are sent when
    /// it is attached again.
    pub fn handle_disconnect(&mut self, now: Time, holder: Holder) {
        let table = self.at(now);
        if let Some(account) = table.accounts.get_mut(&holder) {
            account.disconnected = true;
        }
    }

    /// Whether this holder is attached or disconnected, and neither said goodbye nor was fenced.
    #[must_use]
    pub fn is_known(&self, holder: Holder) -> bool {
        self.state.accounts.contains_key(&holder)
    }

    /// Advances to a moment that `poll_output` named.
    pub fn handle_timeout(&mut self, now: Time) {
        self.at(now);
    }

    /// Returns the next thing to do.
    pub fn poll_output(&mut self) -> LeaseOutput {
        while let Some(output) = self.state.outputs.pop_front() {
            if let LeaseOutput::Ready(id) = output {
                let Some(change) = self.state.changes.get_mut(&id) else { continue };
                change.ready_emitted = false;
                // The change was extended since; `Ready` comes again.
                if !change.is_ready() {
                    continue;
                }
            }
            return output;
        }
        let (moment, reason) = self.state.timers.next();
        LeaseOutput::Timeout(moment, reason)
    }

    /// Sets a time limit for grants registered from now on to this holder: it counts no more than `limit` from its
    /// request, the table 1.1 of it from registering. `Span::FOREVER`: no limit. Called when the session begins: after
    /// a grant with a longer limit, a later grant could outlive its own.
    pub fn handle_limit(&mut self, now: Time, holder: Holder, limit: Span) {
        let table = self.at(now);
        if let Some(account) = table.accounts.get_mut(&holder) {
            account.limit = limit;
        }
    }

    /// Grants watched objects to this holder without a limit. Called when the session begins.
    pub fn handle_trusts_watch(&mut self, now: Time, holder: Holder) {
        let table = self.at(now);
        if let Some(account) = table.accounts.get_mut(&holder) {
            account.trusts_watch = true;
        }
    }

    /// Marks a filesystem as watched: from now on the server reports every change by other processes to the table.
    pub fn handle_watched(&mut self, now: Time, filesystem: u64) {
        let table = self.at(now);
        table.watched.add_filesystem(filesystem);
    }

    /// Marks one object as watched. Facts granted from now on are read afterwards.
    pub fn handle_watched_object(&mut self, now: Time, object: Object) {
        let table = self.at(now);
        table.watched.add_object(object);
    }

    /// Whether this object has a watch of its own.
    #[must_use]
    pub fn is_watched(&self, object: Object) -> bool {
        self.state.watched.has_object(object)
    }

    /// Marks a filesystem and its objects as no longer watched. The caller recalls its unlimited grants at once
    /// ([`LeaseTable::handle_missed`]); until a key's recall is emitted, no grant follows on that key.
    pub fn handle_unwatched(&mut self, now: Time, filesystem: u64) {
        self.at(now).watched.remove_filesystem(filesystem);
    }

    /// Marks one object as no longer watched, and recalls its grants.
    pub fn handle_unwatched_object(&mut self, now: Time, object: Object) {
        limits::unwatch_object(self.at(now), object)
    }

    /// Recalls grants on a filesystem whose changes may have been missed: those registered up to the grant `until`, not
    /// later ones. It waits for no holder and makes no key contended. It looks at no more than `most` grants after
    /// `after`, and returns where to go on if there may be more.
    pub fn handle_missed(
        &mut self,
        now: Time,
        filesystem: u64,
        until: GrantId,
        (after, most): (Option<MissedCursor>, u64),
    ) -> Option<MissedCursor> {
        limits::recall_missed_of(self.at(now), filesystem, until, (after, most))
    }

    /// Whether any holder has a grant on this object that was not recalled.
    #[must_use]
    pub fn has_holder(&self, object: Object) -> bool {
        limits::has_holder(&self.state, object)
    }

    /// How many grants were recalled since the table was made.
    #[must_use]
    pub fn recall_count(&self) -> u64 {
        self.state.counters.recalled
    }

    /// The id of the latest registered grant.
    #[must_use]
    pub fn latest_grant(&self) -> GrantId {
        GrantId(self.state.numbers.grant)
    }

    /// Confines a holder: it receives names only of directories that it may list, and takes no updates.
    pub fn handle_confine(&mut self, now: Time, holder: Holder) {
        let table = self.at(now);
        if let Some(account) = table.accounts.get_mut(&holder) {
            account.confined = true;
        }
    }

    /// Notes that the holder was found to have the right to list a directory, after this directory lease was
    /// registered.
    pub fn handle_may_list(&mut self, now: Time, holder: Holder, grant: GrantId) {
        let table = self.at(now);
        let held = table.accounts.get(&holder).and_then(|account| account.grants.get(&grant));
        if let Some(key) = held.map(|held| held.key) {
            let entry = table.entries.get_mut(&(key, holder)).expect("its holder has it");
            entry.marks &= !Entry::WITHOUT_NAMES;
        }
    }

    /// Recalls confined holders of a directory whose permissions have changed, so that they are checked again. No
    /// change waits for these recalls.
    pub fn handle_rights_changed(&mut self, now: Time, directory: Object) {
        listing_rights::recall_confined(self.at(now), directory)
    }

    /// Returns the merge base for a write-back of this range (offset, length), whose pages its initiator read under
    /// this grant. `None`: another holder may have changed the file since, in an unknown way (rule 12).
    ///
    /// A grant recalled for another holder's change that is still to come counts until the recall is acknowledged or
    /// the grant ends. It does not count if the server's own disk has already changed the file.
    pub fn merge_base(
        &mut self,
        now: Time,
        id: ChangeId,
        (grant, covers): (GrantId, LeaseScope),
        (offset, length): (u64, u64),
    ) -> Option<MergeBase> {
        merging::merge_base(self.at(now), id, (grant, covers), (offset, length))
    }

    /// Whether another holder may still have to merge its pages with this write-back: then
    /// [`LeaseTable::handle_wrote_back`] needs the file's earlier content.
    #[must_use]
    pub fn needs_before_image(&self, id: ChangeId) -> bool {
        merging::needs_before_image(&self.state, id)
    }

    /// Notes a write-back that was applied and whose change has not ended.
    pub fn handle_wrote_back(&mut self, id: ChangeId, wrote: WroteBack<'_>) {
        merging::note_write_back(&mut self.state, id, wrote)
    }

    /// Notes an applied change of data that is no write-back: its initiator's kernel has no older pages of that range
    /// (offset, length).
    pub fn handle_changed(&mut self, id: ChangeId, (offset, length): (u64, u64)) {
        merging::note_change(&mut self.state, id, (offset, length))
    }

    /// Sets the client and the origin of this holder's session. Called when the session begins: delays in earlier
    /// sessions count.
    pub fn handle_client(&mut self, now: Time, holder: Holder, party: ClientOrigin) {
        let table = self.at(now);
        if let Some(account) = table.accounts.get_mut(&holder) {
            account.client_origin = Some(party);
        }
    }

    /// Waits for a data grant. `Ready` says that [`LeaseTable::take_granted`] has the grant, or that there is none to
    /// be had. The wait is ended like a change. `None`: there is nothing to wait for.
    pub fn handle_wait(&mut self, now: Time, request: GrantRequest) -> Option<ChangeId> {
        read_grants::wait(self.at(now), request)
    }

    /// Takes the grant that a waiting reader was given; returns it once.
    pub fn take_granted(&mut self, id: ChangeId) -> Option<Granted> {
        self.state.changes.get_mut(&id)?.part.granted.take()
    }

    /// Returns a snapshot for status and logs. Its cost grows with recalls, changes, contended keys and holders, not
    /// with grants.
    #[must_use]
    pub fn report(&self) -> LeaseReport {
        report::report(&self.state)
    }

    /// Notes that this holder takes updates: changes by others are sent to it where possible.
    pub fn handle_takes_updates(&mut self, now: Time, holder: Holder) {
        let table = self.at(now);
        if let Some(account) = table.accounts.get_mut(&holder) {
            account.takes_updates = true;
        }
    }

    /// The holders that await the result of a change.
    pub fn awaiting_update(&self, id: ChangeId) -> impl Iterator<Item = Holder> + '_ {
        updates::awaiting_update(&self.state, id)
    }

    /// The observation time for a change, to be asked after its effect and before its result is read.
    #[must_use]
    pub fn observation_point(&self) -> ObservedAt {
        ObservedAt(self.state.numbers.end)
    }

    /// Notes when a change's result was read, which its commit sends. Returns false if other changes have ended since:
    /// the result must be read again.
    pub fn handle_observed(&mut self, id: ChangeId, looked: ObservedAt) -> bool {
        updates::observe(&mut self.state, id, looked)
    }

    /// The nodes and scopes whose acknowledgement a holder owes, numbered as in its export. Others' write-back may be
    /// applied before them (rule 10).
    pub fn owed_nodes(&self, holder: Holder) -> impl Iterator<Item = (NodeId, LeaseScope)> + '_ {
        updates::owed_nodes(&self.state, holder)
    }

    /// Begins a change like `handle_change`, for mmap stores that a kernel writes back, perhaps because it has to drop
    /// them. While the initiator owes an acknowledgement for that data, the write-back waits for no other holder. A
    /// caller that needs other holders to see the stores waits for them with [`LeaseTable::handle_sync_barrier`].
    pub fn handle_write_back(&mut self, now: Time, by: Holder, changes: &[Change]) -> ChangeId {
        write_queue::begin_write_back(self.at(now), by, changes)
    }

    /// Ends a change like `handle_done`, and at once grants its initiator the data that it wrote, before another
    /// session changes it. No other holder than the initiator is granted anything.
    pub fn handle_written(&mut self, now: Time, id: ChangeId, wrote: GrantRequest) -> Option<Granted> {
        write_queue::end_change(self.at(now), id, Some(wrote))
    }

    /// The key of a recall whose acknowledgement is owed.
    #[must_use]
    pub fn recalled_key(&self, recall: RecallId) -> Option<LeaseKey> {
        self.state.recalls.get(&recall).map(|outstanding| outstanding.key)
    }

    /// Begins a sync barrier: waits until all recalls of this key from holders other than `by` are acknowledged, and
    /// all acknowledgements that its write-backs bypassed. It is ended like a change.
    pub fn handle_sync_barrier(&mut self, now: Time, by: Holder, key: LeaseKey) -> ChangeId {
        write_queue::begin_sync_barrier(self.at(now), by, key)
    }

    /// Advances the clock, does what is due, and returns the state.
    fn at(&mut self, now: Time) -> &mut State {
        let table = &mut self.state;
        table.now = table.now.max(now);
        while let Some(due) = table.timers.pop(table.now) {
            match due {
                Due::Holder(holder) => {
                    table.accounts.get_mut(&holder).expect("its moment was set").armed.fired();
                    recalls::handle_holder_timer(table, holder);
                }
                Due::Key(key) => {
                    table.keys.get_mut(&key).expect("its moment was set").armed.fired();
                    table.update_key(key);
                }
                Due::WriteBack(flush) => deadlock::handle_write_back_timer(table, flush),
            }
        }
        table
    }
}
