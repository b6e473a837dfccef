//! Attaches users.

use super::context::CallContext;
use super::fids::Fid;
use crate::{NO_FID, Rmessage, Tmessage};
use nigh_types::{Credentials, Errno};
use std::sync::Arc;

impl CallContext {
    /// The uid with which a call is made.
    pub fn user(&self, credentials: &Credentials) -> u32 {
        let shared = self.shared();
        if shared.config.all_users { credentials.uid } else { shared.config.uid }
    }

    /// The root fid of a user, attached on first use.
    pub async fn root(&self, uid: u32) -> Result<Arc<Fid>, Errno> {
        if let Some(root) = self.shared().users.root(uid) {
            return Ok(root);
        }
        self.attach(uid).await.map(|(root, _)| root)
    }

    /// Attaches a user.
    pub async fn attach(&self, uid: u32) -> Result<(Arc<Fid>, crate::Qid), Errno> {
        let (user, tree) = {
            let shared = self.shared();
            (shared.config.uname.clone(), shared.config.aname.clone())
        };
        let fid = self.new_fid();
        let message = Tmessage::Attach { fid: fid.number(), auth: NO_FID, user, tree, uid };
        let Rmessage::Attach { qid } = self.request_fid(message, &fid).await? else {
            return Err(Errno::PROTO);
        };
        fid.mark_live();
        self.shared().users.attached(uid, Arc::clone(&fid));
        Ok((fid, qid))
    }
}
