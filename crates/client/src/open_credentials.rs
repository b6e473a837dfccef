//! Credentials of open files, as of the open. A lost session's files are reopened with them, even after the process
//! that opened them has exited.

use nigh_types::{Call, CallId, Credentials, Handle, Reply, Response};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Default)]
pub(crate) struct OpenCredentials {
    opening: BTreeMap<CallId, Credentials>,
    /// Credentials of running reopens.
    reopening: BTreeMap<CallId, Credentials>,
    open: BTreeMap<Handle, Credentials>,
    /// Those handles in `open` that the current session knows.
    in_session: BTreeSet<Handle>,
}

impl OpenCredentials {
    /// Returns the credentials with which to send a call.
    pub fn credentials(&mut self, id: CallId, call: &Call, now: Credentials) -> Credentials {
        match call {
            Call::Open { .. } | Call::Create { .. } | Call::Tmpfile { .. } => {
                self.opening.insert(id, now.clone());
            }
            Call::Reopen { handle, .. } => {
                let opener = self.open.get(handle).cloned().unwrap_or(now);
                self.reopening.insert(id, opener.clone());
                return opener;
            }
            Call::Release { handles } => handles.iter().for_each(|handle| {
                self.open.remove(handle);
                self.in_session.remove(handle);
            }),
            _ => {}
        }
        now
    }

    pub fn on_reply(&mut self, id: CallId, response: &Response) {
        let credentials = self.opening.remove(&id).or_else(|| self.reopening.remove(&id));
        let Some(credentials) = credentials else { return };
        let opened = match &response.result {
            Ok(Reply::Opened { handle, .. }) => Some(*handle),
            Ok(Reply::Created { handle, .. }) => *handle,
            _ => None,
        };
        self.in_session.extend(opened);
        self.open.extend(opened.map(|handle| (handle, credentials)));
    }

    /// A new session has none of the open files.
    pub fn on_session_replaced(&mut self) {
        self.reopening.clear();
        self.in_session.clear();
    }

    /// The reclaim has ended. Handles that were not reclaimed may belong to other files from now on.
    pub fn on_reclaimed(&mut self) {
        self.open.retain(|handle, _| self.in_session.contains(handle));
    }

    /// Outstanding calls get no reply, and the open files are lost.
    pub fn on_session_lost(&mut self) {
        self.opening.clear();
        self.on_session_replaced();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_types::{Access, Attr, Errno, NodeId, NodeRef};

    #[test]
    fn reopen_uses_the_credentials_of_the_original_open() {
        let access =
            Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
        let node = NodeRef::without_hint(NodeId { ino: 2, generation: 1 });
        let who = |uid| Credentials { uid, gid: uid, groups: vec![uid], privileges: None };
        let mut openers = OpenCredentials::default();
        let open = Call::Open { node: node.clone(), access };
        assert_eq!(openers.credentials(CallId(1), &open, who(7)), who(7));
        let handle = Handle(3);
        let opened = Response::plain(Ok(Reply::Opened { handle, attr: Attr::default() }));
        openers.on_reply(CallId(1), &opened);
        let again = Call::Reopen { node, handle, access };
        assert_eq!(openers.credentials(CallId(2), &again, who(0)), who(7));
        openers.on_reply(CallId(2), &opened);
        openers.credentials(CallId(3), &Call::Release { handles: vec![handle] }, who(0));
        assert_eq!(openers.credentials(CallId(4), &again, who(0)), who(0), "it is another file by now");
        openers.credentials(CallId(5), &open, who(8));
        openers.on_session_lost();
        openers.on_reply(CallId(5), &opened);
        assert_eq!(openers.credentials(CallId(6), &again, who(0)), who(0));
    }

    #[test]
    fn unreclaimed_handle_does_not_lend_its_credentials_to_another_file() {
        let access =
            Access { read: true, write: false, truncate: false, direct: false, sync: false, append: false };
        let node = NodeRef::without_hint(NodeId { ino: 2, generation: 1 });
        let who = |uid| Credentials { uid, gid: uid, groups: vec![uid], privileges: None };
        let mut openers = OpenCredentials::default();
        let opened = |openers: &mut OpenCredentials, call: u64, handle: u64| {
            let attr = Attr::default();
            let result = Ok(Reply::Opened { handle: Handle(handle), attr });
            openers.on_reply(CallId(call), &Response::plain(result));
        };
        let reopen = |handle| Call::Reopen { node: node.clone(), handle: Handle(handle), access };
        for n in 1..=4 {
            openers.credentials(CallId(n), &Call::Open { node: node.clone(), access }, who(7));
            opened(&mut openers, n, n);
        }
        // The first was closed meanwhile, and the second cannot be reopened.
        openers.on_session_replaced();
        for n in 2..=4 {
            assert_eq!(openers.credentials(CallId(10 + n), &reopen(n), who(0)), who(7));
        }
        opened(&mut openers, 13, 3);
        openers.on_reply(CallId(12), &Response::plain(Err(Errno::STALE)));
        // Lost again: earlier reclaims no longer count.
        openers.on_session_replaced();
        for n in 2..=4 {
            assert_eq!(openers.credentials(CallId(20 + n), &reopen(n), who(0)), who(7));
        }
        openers.on_reply(CallId(22), &Response::plain(Err(Errno::STALE)));
        opened(&mut openers, 24, 4);
        // Retried after the path was sent.
        assert_eq!(openers.credentials(CallId(23), &reopen(3), who(0)), who(7));
        opened(&mut openers, 23, 3);
        openers.on_reclaimed();
        let after = [1, 2, 3, 4].map(|n| openers.credentials(CallId(30 + n), &reopen(n), who(0)));
        assert_eq!(after, [who(0), who(0), who(7), who(7)]);
    }
}
