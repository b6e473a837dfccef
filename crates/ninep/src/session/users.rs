//! Attached users: the mounting user, or each calling user on first use.

use super::fids::Fid;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The root fids of attached users.
#[derive(Debug, Default)]
pub(crate) struct Users {
    roots: BTreeMap<u32, Arc<Fid>>,
}

impl Users {
    pub fn root(&self, uid: u32) -> Option<Arc<Fid>> {
        self.roots.get(&uid).cloned()
    }

    pub fn attached(&mut self, uid: u32, root: Arc<Fid>) {
        self.roots.insert(uid, root);
    }
}
