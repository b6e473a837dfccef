//! Pages of replies without a valid grant, and their precondition until they are dropped.

use super::*;

/// Returns the precondition that a write-back of the page would carry.
fn said(rig: &Rig, offset: u64) -> Option<WriteBackPrecondition> {
    crate::page_cache::writeback::writeback_precondition(&rig.cache.state, FILE.ino, (offset, 4))
        .expect("nothing is lost")
}

#[test]
fn ungranted_pages_have_the_version_of_their_reply_until_they_are_dropped() {
    let mut rig = Rig::with(Config::default());
    rig.read(None, 1);
    assert_eq!(rig.dropped(), [(0, 4096)]);
    assert_eq!(said(&rig, 0), ended(1));
    assert_eq!(said(&rig, 4096), None, "these are other pages");
    rig.told();
    assert_eq!(said(&rig, 0), None);
    assert!(rig.cache.state.ungranted.is_empty());
}

/// They are dropped one after the other, each with its version.
#[test]
fn reread_page_has_the_oldest_version_that_is_not_dropped() {
    let mut rig = Rig::with(Config::default());
    rig.read(None, 1);
    rig.read(None, 2);
    assert_eq!(said(&rig, 0), ended(1));
    rig.tell();
    assert_eq!(said(&rig, 0), ended(2));
}

/// The recall passed while the read was in flight. The remote may have granted it afterwards, and then merges.
#[test]
fn pages_with_a_recalled_grant_name_it_until_they_are_dropped() {
    let mut rig = Rig::with_pages();
    let read = rig.reads();
    rig.recall();
    rig.told();
    rig.answered(read, Reply::Data(b"text".to_vec()), attr(2), Some(GrantId(12)));
    assert_eq!(rig.dropped(), [(0, 4096)]);
    assert_eq!(said(&rig, 0), under(2, GrantId(12)));
    rig.told();
    assert_eq!(said(&rig, 0), None);
}

#[test]
fn reply_overtaken_by_a_recall_leaves_older_pages_until_they_are_dropped() {
    // The file's time may have been set back meanwhile.
    for (early, late) in [(1, 5), (5, 1), (1, 1)] {
        let mut rig = Rig::with_pages();
        let read = rig.reads();
        rig.recall();
        rig.told();
        rig.read(Some(GrantId(12)), late);
        rig.answered(read, Reply::Data(b"text".to_vec()), attr(early), Some(FIRST));
        assert_eq!(said(&rig, 0), under(early, FIRST));
        assert_eq!(said(&rig, 4096), under(late, GrantId(12)));
        rig.told();
        assert_eq!(said(&rig, 0), under(late, GrantId(12)));
    }
}

/// The grant is recalled and its pages are not dropped: the remote knows what has changed since.
#[test]
fn pages_under_a_recalled_grant_take_precedence_over_newer_ungranted_pages() {
    let mut rig = Rig::with_pages();
    rig.recall();
    rig.read(None, 2);
    assert_eq!(said(&rig, 0), under(1, FIRST));
    rig.tell();
    assert_eq!(said(&rig, 0), ended(2));
}

/// The kernel does not drop a full page while it writes a part of it.
#[test]
fn pages_locked_by_a_local_write_keep_their_version_until_dropped_after_it() {
    let mut rig = Rig::with(Config::default());
    rig.read(None, 1);
    rig.write(false);
    rig.told();
    assert_eq!(said(&rig, 0), ended(1));
    assert_eq!(rig.written(2, None), OpReply::Written(4));
    assert_eq!(said(&rig, 0), ended(1));
    rig.told();
    assert_eq!(said(&rig, 0), None);
}

#[test]
fn pages_written_without_a_grant_have_the_version_after_the_write() {
    let mut rig = Rig::with(Config::default());
    rig.write(false);
    assert_eq!(rig.written(2, None), OpReply::Written(4));
    assert_eq!(rig.dropped(), [(0, 4)]);
    assert_eq!(said(&rig, 0), ended(2));
}

/// The next session may give other grants with those ids.
#[test]
fn recalled_grants_are_not_named_in_another_session() {
    let mut rig = Rig::with_pages();
    let read = rig.reads();
    rig.recall();
    rig.told();
    rig.answered(read, Reply::Data(b"text".to_vec()), attr(2), Some(GrantId(12)));
    rig.event(Event::Expired { why: String::new() });
    rig.write(true);
    rig.event(Event::Restored { session: session(), kept: true });
    let (forgetting, _) = rig.stale.pop().expect("all is forgotten first");
    rig.cache.handle_invalidated(rig.now, forgetting);
    rig.drain();
    let Some((_, Call::Write { flags, .. })) = rig.calls.last() else { panic!("{:?}", rig.calls) };
    assert_eq!(flags.since, ended(2));
}

#[test]
fn ungranted_pages_of_a_read_only_file_are_not_recorded() {
    let mut rig = Rig::with(Config::default());
    rig.read(None, 1);
    rig.ask(Op::Release { fh: rig.fh, flock: None });
    assert!(rig.cache.state.ungranted.is_empty());
}

/// A recall waits for write-back, and all pages are dropped then.
#[test]
fn recall_drops_pages_that_were_left_out_while_they_were_written_back() {
    let mut rig = Rig::with_pages();
    let read = rig.reads();
    rig.recall();
    rig.told();
    rig.answered(read, Reply::Data(b"text".to_vec()), attr(2), Some(GrantId(12)));
    assert_eq!(rig.flush(), under(2, GrantId(12)));
    rig.tell();
    assert_eq!(said(&rig, 0), under(2, GrantId(12)), "they were left out");
    rig.recall();
    assert_eq!(rig.written(3, None), OpReply::Written(4));
    assert_eq!(rig.dropped(), [(0, 0), (0, 4)]);
    rig.tell();
    assert_eq!(said(&rig, 0), None);
    rig.read(Some(GrantId(13)), 4);
    assert_eq!(rig.flush(), under(4, GrantId(13)));
}

/// Under a grant with a deadline attributes do not tell the version of pages beside local writes, but it was known when
/// the file was closed.
#[test]
fn pages_kept_for_a_later_open_keep_their_version() {
    for granted in [None, Some(GrantId(12))] {
        let mut rig = Rig::with_pages();
        rig.write(false);
        rig.written(2, None);
        rig.ask(Op::Release { fh: rig.fh, flock: None });
        rig.calls.clear();
        let access =
            Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
        rig.ask(Op::Open { ino: FILE.ino, access, append: false });
        rig.respond(Ok(Reply::Opened { handle: Handle(4), attr: attr(2) }), 2, granted);
        let Some((_, OpReply::Opened(opened))) = rig.answers.pop() else { panic!("not opened") };
        assert!(opened.keep_cache);
        assert_eq!(said(&rig, 0), under(2, FIRST));
    }
}

#[test]
fn pages_dropped_by_a_later_open_have_no_version() {
    let mut rig = Rig::with_pages();
    rig.ask(Op::Release { fh: rig.fh, flock: None });
    rig.calls.clear();
    rig.pass(TERM);
    let access =
        Access { read: true, write: true, truncate: false, direct: false, sync: false, append: false };
    rig.ask(Op::Open { ino: FILE.ino, access, append: false });
    rig.respond(Ok(Reply::Opened { handle: Handle(4), attr: attr(5) }), 5, None);
    let Some((_, OpReply::Opened(opened))) = rig.answers.pop() else { panic!("not opened") };
    assert!(!opened.keep_cache);
    assert_eq!(said(&rig, 0), None);
}
