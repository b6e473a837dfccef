//! Names in recalls, for holders whose peer does not speak for all users of its machine
//! (docs/decisions/0026-names-in-recalls.md).
//!
//! A lookup needs the right to search a directory, not the right to list it; yet its grant covers all names of the directory,
//! and a recall that carries names would tell those that the holder never asked for. So a grant on names to a *confined* holder
//! begins without the right to be told names, and its recall says only that the directory changes. The server looks at the
//! holder's rights after the grant is registered, and then lifts this for that grant. A change of the directory's rights
//! recalls all grants of confined holders: so none is lifted by rights that were looked at before they changed.

use super::words::{Holder, LeaseKey, Object};
use super::{Entry, LeaseTable};
use nigh_types::{Covers, GrantId, Time};

impl LeaseTable {
    /// From now on this holder is told names only of directories that it may list, and takes no pushes.
    pub fn handle_confine(&mut self, now: Time, holder: Holder) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.confined = true;
        }
    }

    /// The holder was seen to have the right to list a directory after this grant on its names was registered.
    pub fn handle_may_list(&mut self, now: Time, holder: Holder, grant: GrantId) {
        self.advance(now);
        let held = self.accounts.get(&holder).and_then(|account| account.grants.get(&grant));
        if let Some(key) = held.map(|held| held.key) {
            let entry = self.entries.get_mut(&(key, holder)).expect("its holder has it");
            entry.marks &= !Entry::UNLISTED;
        }
    }

    /// The rights on a directory have changed: who may list it is to be seen anew. Nothing waits for these recalls.
    pub fn handle_rights_changed(&mut self, now: Time, directory: Object) {
        self.advance(now);
        let key = LeaseKey { object: directory, covers: Covers::Names };
        let seats = self.entries.range((key, Holder(0))..=(key, Holder(u64::MAX)));
        let confined = seats.map(|(seat, _)| *seat).filter(|(_, holder)| self.accounts[holder].confined);
        for seat in confined.collect::<Vec<_>>() {
            self.recall(seat, Vec::new());
        }
    }
}
