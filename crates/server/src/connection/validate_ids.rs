//! Validation of the ids in a request, before any of it is executed.

use crate::export::Export;
use crate::os::squash::CredentialPolicy;
use crate::os::users;
use nigh_native::{ID_NAMES, SessionParams};
use nigh_types::{Call, NodeId, NodeRef, Request};

/// Protocol violation that ends the client's session.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum ProtocolViolation {
    /// Only the server makes ids, and it recognises them by their MAC: this id is invented or belongs to another
    /// export.
    #[error("a node id that this export never made (inode {}): ids cannot be made up", .0.ino)]
    ForgedId(NodeId),
}

/// Tells a client its effective ids, whether its kernel's permission checks are trusted, and on request the server's
/// user names.
pub(crate) fn fill_session_params(
    session: &mut SessionParams,
    export: &Export,
    credential_policy: &CredentialPolicy,
    features: u64,
) {
    if export.impersonates() {
        session.ids.acts_as = credential_policy.acts_as(session.ids.acts_as);
        session.supports.privileges = credential_policy.vouches();
    }
    session.supports.uniform_rights =
        !export.impersonates() || credential_policy.vouches() || credential_policy.is_one_user();
    if features & ID_NAMES != 0 {
        session.ids.names = users::names();
    }
}

/// Checks that this export made every node id in a request.
pub(crate) fn check(export: &Export, request: &Request) -> Result<(), ProtocolViolation> {
    let (places, bare) = node_refs(&request.call);
    for place in places.into_iter().flatten() {
        check_place(export, place)?;
    }
    bare.map_or(Ok(()), |node| check_id(export, node))?;
    match &request.call {
        Call::Prefetch { roots, .. } => roots.iter().try_for_each(|place| check_place(export, place)),
        _ => Ok(()),
    }
}

fn check_place(export: &Export, place: &NodeRef) -> Result<(), ProtocolViolation> {
    check_id(export, place.node)?;
    place.path_hint.as_ref().map_or(Ok(()), |(parent, _)| check_id(export, *parent))
}

fn check_id(export: &Export, node: NodeId) -> Result<(), ProtocolViolation> {
    if export.resolver().ids.is_genuine(node) { Ok(()) } else { Err(ProtocolViolation::ForgedId(node)) }
}

/// Returns the node references of a call, and an id without path hint. A handle is meaningful only within its
/// session.
fn node_refs(call: &Call) -> ([Option<&NodeRef>; 2], Option<NodeId>) {
    match call {
        // The caller checks the roots of a prefetch.
        Call::Release { handles: _ } | Call::Prefetch { roots: _, .. } => ([None, None], None),
        // An inode number is not an id: the lookup itself checks the rights to use it.
        Call::LookupNumber { ino: _ } => ([None, None], None),
        Call::PrefetchCredit { want, .. } => ([want.as_ref(), None], None),
        Call::ResolvePath { node, names: _ } => ([None, None], Some(*node)),
        Call::PinOpen { node: place, .. }
        | Call::Lookup { dir: place, .. }
        | Call::List { dir: place }
        | Call::ListNames { dir: place, .. }
        | Call::GetAttr { node: place }
        | Call::ReadLink { node: place }
        | Call::Xattrs { node: place }
        | Call::Xattr { node: place, .. }
        | Call::StatFs { node: place }
        | Call::Open { node: place, .. }
        | Call::Read { node: place, .. }
        | Call::Seek { node: place, .. }
        | Call::GetFlags { node: place }
        | Call::Lock { node: place, .. }
        | Call::Unlock { node: place, .. }
        | Call::GetLock { node: place, .. }
        | Call::Reopen { node: place, .. }
        | Call::Create { dir: place, .. }
        | Call::Tmpfile { dir: place, .. }
        | Call::Mknod { dir: place, .. }
        | Call::Mkdir { dir: place, .. }
        | Call::Symlink { dir: place, .. }
        | Call::Rmdir { dir: place, .. }
        | Call::SetAttr { node: place, .. }
        | Call::Write { node: place, .. }
        | Call::Fallocate { node: place, .. }
        | Call::SetXattr { node: place, .. }
        | Call::RemoveXattr { node: place, .. }
        | Call::Fsync { node: place, .. } => ([Some(place), None], None),
        Call::Unlink { dir, keep, .. } => ([Some(dir), None], *keep),
        Call::Link { node: one, dir: two, .. } | Call::CopyRange { from: one, to: two, .. } => {
            ([Some(one), Some(two)], None)
        }
        Call::Rename { from, to, keep, .. } => ([Some(from), Some(to)], *keep),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_types::{CallId, Cookie, Credentials, Name, PrefetchOrder};
    use std::path::Path;

    fn export(dir: &Path, state: &Path) -> Export {
        Export::open(dir, state, crate::ExportOptions::default()).unwrap()
    }

    fn asking(call: Call) -> Request {
        Request { credentials: Credentials::default(), mutation_id: None, call }
    }

    #[test]
    fn forged_node_id_is_refused_in_every_field_of_every_call() {
        let (dir, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let export = export(dir.path(), state.path());
        let real = export.resolver().root();
        let forged = NodeId { generation: real.generation ^ 1, ..real };
        let name = || Name::new(b"x").unwrap();
        let place = |node| NodeRef { node, path_hint: Some((real, name())) };
        let rename = |from, to, keep| Call::Rename {
            from,
            name: name(),
            to,
            new_name: name(),
            no_replace: false,
            exchange: false,
            whiteout: false,
            keep,
        };
        let ahead = |roots| Call::Prefetch { roots, order: PrefetchOrder::Cookie, credit: 1 };
        let link = |node, dir| Call::Link { node, dir, name: name() };
        let good = [
            Call::ResolvePath { node: real, names: vec![] },
            Call::GetAttr { node: place(real) },
            Call::ListNames { dir: place(real), after: Cookie(0) },
            link(place(real), NodeRef::without_hint(real)),
            rename(place(real), place(real), Some(real)),
            Call::Release { handles: vec![] },
            ahead(vec![place(real), NodeRef::without_hint(real)]),
            Call::PrefetchCredit { walk: CallId(1), credit: 1, want: Some(place(real)) },
        ];
        for call in good {
            assert_eq!(check(&export, &asking(call)), Ok(()));
        }
        let hinted = NodeRef { node: real, path_hint: Some((forged, name())) };
        let bad = [
            Call::ResolvePath { node: forged, names: vec![] },
            Call::GetAttr { node: NodeRef::without_hint(forged) },
            Call::GetAttr { node: hinted.clone() },
            Call::ListNames { dir: NodeRef::without_hint(forged), after: Cookie(0) },
            Call::ListNames { dir: hinted.clone(), after: Cookie(0) },
            Call::Unlink { dir: place(real), name: name(), keep: Some(forged) },
            link(place(forged), place(real)),
            link(place(real), hinted),
            rename(place(forged), place(real), None),
            rename(place(real), place(forged), None),
            rename(place(real), place(real), Some(forged)),
            ahead(vec![place(real), NodeRef::without_hint(forged)]),
            ahead(vec![NodeRef { node: real, path_hint: Some((forged, name())) }]),
            Call::PrefetchCredit { walk: CallId(1), credit: 1, want: Some(place(forged)) },
        ];
        for call in bad {
            assert_eq!(
                check(&export, &asking(call.clone())),
                Err(ProtocolViolation::ForgedId(forged)),
                "{call:?}"
            );
        }
    }
}
