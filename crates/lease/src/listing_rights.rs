//! Names in recalls, for holders whose peer does not act for all users of its machine
//! (docs/decisions/0026-names-in-recalls.md).
//!
//! A lookup needs search permission on a directory, not read permission; yet its directory lease covers all names, and
//! a recall with names would reveal names that the holder never asked for. So a directory lease of a *confined* holder
//! begins without the right to receive names: its recall says only that the directory changes. The server checks the
//! holder's permissions after the grant is registered, and then lifts this restriction for that grant. A change of the
//! directory's permissions recalls all grants of confined holders. So no restriction is lifted by permissions that were
//! read before they changed.

use super::types::{Holder, LeaseKey, Object};
use super::{Entry, LeaseTable};
use nigh_types::{GrantId, LeaseScope, Time};

impl LeaseTable {
    /// Confines a holder: it receives names only of directories that it may list, and takes no updates.
    pub fn handle_confine(&mut self, now: Time, holder: Holder) {
        self.advance(now);
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.confined = true;
        }
    }

    /// Notes that the holder was found to have the right to list a directory, after this directory lease was
    /// registered.
    pub fn handle_may_list(&mut self, now: Time, holder: Holder, grant: GrantId) {
        self.advance(now);
        let held = self.accounts.get(&holder).and_then(|account| account.grants.get(&grant));
        if let Some(key) = held.map(|held| held.key) {
            let entry = self.entries.get_mut(&(key, holder)).expect("its holder has it");
            entry.marks &= !Entry::WITHOUT_NAMES;
        }
    }

    /// Recalls confined holders of a directory whose permissions have changed, so that they are checked again. No
    /// change waits for these recalls.
    pub fn handle_rights_changed(&mut self, now: Time, directory: Object) {
        self.advance(now);
        let key = LeaseKey { object: directory, covers: LeaseScope::Directory };
        let seats = self.entries.range((key, Holder(0))..=(key, Holder(u64::MAX)));
        let confined = seats.map(|(seat, _)| *seat).filter(|(_, holder)| self.accounts[holder].confined);
        for seat in confined.collect::<Vec<_>>() {
            self.recall(seat, Vec::new());
        }
    }
}
