//! Reads of pages that a local write is bringing to the remote (see `crate::read_after_write`).

use super::*;

fn said(rig: &Rig, op: OpId) -> Option<&OpReply> {
    rig.answers.iter().find(|(other, _)| *other == op).map(|(_, answer)| answer)
}

fn read(rig: &mut Rig, offset: u64) -> OpId {
    rig.ask(Op::Read { ino: FILE.ino, fh: rig.fh, offset, size: 4096 })
}

fn text(rig: &mut Rig, call: CallId, data: &[u8], secs: i64) {
    rig.answered(call, Reply::Data(data.to_vec()), attr(secs), None);
}

/// The kernel has the page in full, shows the written data at once, and drops the page before the reply to the write.
#[test]
fn read_of_a_page_under_write_is_sent_after_the_write_reply() {
    let mut rig = Rig::with_pages();
    rig.write(false);
    let (write, _) = rig.calls.pop().unwrap();
    let waits = read(&mut rig, 0);
    assert!(rig.calls.is_empty(), "the remote may answer it first");
    let other = read(&mut rig, 4096);
    let (call, _) = rig.calls.pop().expect("another page is asked for at once");
    text(&mut rig, call, b"", 1);
    assert!(said(&rig, other).is_some());
    rig.answered(write, Reply::Written { offset: 0, count: 4 }, attr(2), None);
    let (call, asked) = rig.calls.pop().expect("now it is asked");
    assert!(matches!(asked, Call::Read { offset: 0, .. }));
    text(&mut rig, call, b"TEXT", 2);
    assert_eq!(said(&rig, waits), Some(&OpReply::Data(b"TEXT".to_vec())));
}

/// Two threads take requests from the kernel: the write that was made first arrives last.
#[test]
fn read_sent_before_a_write_of_its_page_is_sent_again() {
    for write_first in [false, true] {
        let mut rig = Rig::with_pages();
        let op = read(&mut rig, 0);
        let (call, _) = rig.calls.pop().unwrap();
        rig.write(false);
        let (write, _) = rig.calls.pop().unwrap();
        let written =
            |rig: &mut Rig| rig.answered(write, Reply::Written { offset: 0, count: 4 }, attr(2), None);
        if write_first {
            written(&mut rig);
        }
        text(&mut rig, call, b"text", 1);
        assert_eq!(said(&rig, op), None, "it is older than what was written");
        if !write_first {
            assert!(rig.calls.is_empty());
            written(&mut rig);
        }
        let (call, _) = rig.calls.pop().expect("it is asked again");
        text(&mut rig, call, b"TEXT", 2);
        assert_eq!(said(&rig, op), Some(&OpReply::Data(b"TEXT".to_vec())));
    }
}

#[test]
fn read_waiting_for_a_write_can_be_interrupted_and_fails_with_the_session() {
    let mut rig = Rig::with_pages();
    rig.write(false);
    let killed = read(&mut rig, 0);
    rig.cache.handle_interrupt(killed, true);
    rig.drain();
    assert_eq!(said(&rig, killed), Some(&OpReply::Failed(Errno::INTR)));
    let waits = read(&mut rig, 0);
    rig.event(Event::Lost { why: String::new() });
    assert_eq!(said(&rig, waits), None, "it waits for a session");
    rig.event(Event::Restored { session: session(), kept: false });
    assert_eq!(said(&rig, waits), None);
}

/// An invalidation for a recall leaves out the pages that the read has locked.
#[test]
fn pages_of_a_read_waiting_for_a_write_are_dropped_after_its_reply() {
    let mut rig = Rig::with_pages();
    rig.write(false);
    let (write, _) = rig.calls.pop().unwrap();
    read(&mut rig, 0);
    rig.event(Event::Recall(Recall {
        id: RecallId(1),
        node: FILE,
        covers: LeaseScope::Data,
        names: Vec::new(),
    }));
    rig.answered(write, Reply::Written { offset: 0, count: 4 }, attr(2), None);
    let (call, _) = rig.calls.pop().expect("it is asked");
    rig.stale.clear();
    text(&mut rig, call, b"TEXT", 2);
    assert_eq!(rig.dropped(), [(0, 4096)]);
}
