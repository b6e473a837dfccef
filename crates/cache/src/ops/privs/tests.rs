//! Set-user-ID bits and capabilities in replies and invalidations to the kernel.

use super::*;
use crate::Config;
use crate::cache::Cache;
use crate::op::{Fh, Op, Output};
use crate::test_fixtures::{T0, cache, outputs, replied, session};
use nigh_types::{
    Access, Attr, CallId, Grant, GrantId, Handle, LeaseScope, NodeId, Term, WriteFlags, XattrSet,
};

const FILE: NodeId = NodeId { ino: 7, generation: 1 };
const PROGRAM: u32 = 0o104_755;
const ORDINARY: u32 = 0o100_755;

fn attr(mode: u32) -> Attr {
    Attr { mode, nlink: 1, ..Attr::default() }
}

/// File that is open for writing, with attributes that the kernel knows.
fn opened(mode: u32) -> Cache {
    let attr = attr(mode);
    let mut cache = cache(Config::default());
    let access =
        Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
    let entry = nigh_types::Entry { id: FILE, attr, target: None, no_xattrs: false };
    let name = nigh_types::Name::new(b"f").unwrap();
    let looked = ask(&mut cache, 0, Op::Lookup { dir: session().root.ino, name });
    answer(&mut cache, looked, granted(Reply::Entry(Some(entry))));
    let opened = ask(&mut cache, 0, Op::Open { ino: 7, access, append: false });
    answer(&mut cache, opened, granted(Reply::Opened { handle: Handle(1), attr }));
    let told = cache.handle_op(T0, OpId(9), Caller::default(), Op::GetAttr { ino: 7 });
    assert!(matches!(told, Some(OpReply::Attr(_, told, valid)) if told == attr && valid.0 > 0), "{told:?}");
    cache
}

fn ask(cache: &mut Cache, uid: u32, op: Op) -> (CallId, Call) {
    let caller = Caller { uid, ..Caller::default() };
    assert_eq!(cache.handle_op(T0, OpId(1), caller, op), None);
    let outputs = outputs(cache).into_iter();
    let mut calls =
        outputs.filter_map(|o| if let Output::Call { id, call, .. } = o { Some((id, call)) } else { None });
    calls.next_back().expect("the remote is asked")
}

fn answer(cache: &mut Cache, (call, _): (CallId, Call), response: Response) -> Option<OpReply> {
    replied(cache, call, response)
}

fn granted(reply: Reply) -> Response {
    let root = session().root;
    let grant = Grant { id: GrantId(1), term: Term::Session, ..crate::grants::fabricated(root) };
    let own = Grant { node: FILE, covers: LeaseScope::Attributes, id: GrantId(2), ..grant };
    Response { grants: vec![grant, own], ..Response::plain(Ok(reply)) }
}

fn write() -> Op {
    let flags = WriteFlags { kill_suidgid: true, ..WriteFlags::default() };
    Op::Write { ino: 7, fh: Fh(1), offset: 0, data: b"x".to_vec(), flags }
}

fn written(after: Option<u32>) -> Response {
    let after = after.into_iter().map(|mode| (FILE, attr(mode))).collect();
    Response { after, ..Response::plain(Ok(Reply::Written { offset: 0, count: 1 })) }
}

#[test]
fn write_that_clears_set_id_bits_invalidates_attributes_once() {
    let mut cache = opened(PROGRAM);
    let call = ask(&mut cache, 1000, write());
    assert!(!cache.is_set_id_gone(7));
    answer(&mut cache, call, written(Some(ORDINARY)));
    assert!(cache.is_set_id_gone(7));
    cache.handle_set_id_forgotten(7);
    let call = ask(&mut cache, 1000, write());
    answer(&mut cache, call, written(Some(ORDINARY)));
    assert!(!cache.is_set_id_gone(7), "no later reply had such bits");
}

#[test]
fn write_that_clears_no_set_id_bits_invalidates_nothing() {
    for mode in [PROGRAM, ORDINARY] {
        let mut cache = opened(mode);
        let call = ask(&mut cache, 0, write());
        answer(&mut cache, call, written(Some(mode)));
        assert!(!cache.is_set_id_gone(7), "{mode:o}");
    }
    let mut cache = opened(ORDINARY);
    for _ in 0..3 {
        let call = ask(&mut cache, 0, write());
        answer(&mut cache, call, written(None));
        assert!(!cache.is_set_id_gone(7), "nor where the remote tells nothing of it");
    }
}

#[test]
fn failed_write_or_reply_without_attributes_counts_as_clearing_set_id_bits() {
    for response in [written(None), Response::plain(Err(Errno::NOSPC))] {
        let mut cache = opened(PROGRAM);
        let call = ask(&mut cache, 1000, write());
        answer(&mut cache, call, response);
        assert!(cache.is_set_id_gone(7));
    }
}

#[test]
fn fallocate_that_clears_set_id_bits_invalidates_attributes_and_chmod_does_not() {
    let mut cache = opened(PROGRAM);
    let fallocate = Op::Fallocate { ino: 7, fh: Fh(1), mode: 0, offset: 0, length: 9 };
    let call = ask(&mut cache, 1000, fallocate);
    answer(&mut cache, call, granted(Reply::Attr(FILE, attr(ORDINARY))));
    assert!(cache.is_set_id_gone(7));
    let mut cache = opened(PROGRAM);
    let set = SetAttr { mode: Some(0o755), ..SetAttr::default() };
    let call = ask(&mut cache, 1000, Op::SetAttr { ino: 7, fh: None, set });
    answer(&mut cache, call, granted(Reply::Attr(FILE, attr(ORDINARY))));
    assert!(!cache.is_set_id_gone(7));
}

#[test]
fn write_drops_a_cached_capability() {
    let mut cache = opened(ORDINARY);
    let get = |name: &[u8]| Op::GetXattr { ino: 7, name: name.to_vec(), size: 99 };
    let call = ask(&mut cache, 0, get(CAPABILITY));
    let items = vec![(CAPABILITY.into(), Some(b"value"[..].into()))];
    let all = answer(&mut cache, call, granted(Reply::Xattrs(XattrSet { items })));
    assert_eq!(all, Some(OpReply::Value(b"value".to_vec())));
    let call = ask(&mut cache, 0, write());
    answer(&mut cache, call, written(Some(ORDINARY)));
    assert_eq!(cache.handle_op(T0, OpId(3), Caller::default(), get(CAPABILITY)), None, "the remote is asked");
}

#[test]
fn write_keeps_other_cached_xattrs() {
    let mut cache = opened(ORDINARY);
    let get = Op::GetXattr { ino: 7, name: b"user.a".to_vec(), size: 99 };
    let call = ask(&mut cache, 0, get.clone());
    let items = vec![(b"user.a"[..].into(), Some(b"value"[..].into()))];
    answer(&mut cache, call, granted(Reply::Xattrs(XattrSet { items })));
    let call = ask(&mut cache, 0, write());
    answer(&mut cache, call, written(Some(ORDINARY)));
    let known = cache.handle_op(T0, OpId(3), Caller::default(), get);
    assert_eq!(known, Some(OpReply::Value(b"value".to_vec())));
}

fn nothing() -> Op {
    Op::SetAttr { ino: 7, fh: None, set: SetAttr::default() }
}

#[test]
fn empty_setattr_is_a_chown_and_is_not_refused_before_a_write() {
    let mut cache = opened(PROGRAM);
    let call = ask(&mut cache, 1000, nothing());
    assert!(matches!(&call.1, Call::SetAttr { set, .. } if *set == SetAttr::chown_to_same()), "{:?}", call.1);
    let told = answer(&mut cache, call, Response::plain(Err(Errno::PERM)));
    assert!(
        matches!(told, Some(OpReply::Attr(FILE, Attr { mode: PROGRAM, .. }, _))),
        "{told:?}: it may be about to write"
    );
    // The kernel writes to no file that is not open for writing.
    assert_eq!(
        cache.handle_op(T0, OpId(4), Caller::default(), Op::Release { fh: Fh(1), flock: None }),
        Some(OpReply::Done)
    );
    let call = ask(&mut cache, 1000, nothing());
    let told = answer(&mut cache, call, Response::plain(Err(Errno::PERM)));
    assert_eq!(told, Some(OpReply::Failed(Errno::PERM)));
}

/// Root's write clears a capability, and no set-user-ID bit.
#[test]
fn empty_setattr_after_roots_capability_removal_clears_no_bits() {
    let mut cache = opened(PROGRAM);
    ask(&mut cache, 0, nothing());
    let mut cache = opened(PROGRAM);
    let call = ask(&mut cache, 0, Op::RemoveXattr { ino: 7, name: CAPABILITY.to_vec() });
    answer(&mut cache, call, granted(Reply::Attr(FILE, attr(PROGRAM))));
    let told = cache.handle_op(T0, OpId(1), Caller::default(), nothing());
    assert!(matches!(told, Some(OpReply::Attr(FILE, Attr { mode: PROGRAM, .. }, _))), "{told:?}");
    ask(&mut cache, 0, nothing());
}
