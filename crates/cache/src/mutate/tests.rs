//! What is known of a file that an own change has moved.

use super::*;
use crate::Config;
use crate::lookup::tests::{T0, cache, session};
use crate::op::Output;
use nigh_types::{Attr, CallId, Entry, Event, Grant, GrantId, OpId, Term};

const FILE: NodeId = NodeId { ino: 7, generation: 1 };

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn attr() -> Attr {
    Attr { mode: 0o100_644, nlink: 1, ..Attr::default() }
}

fn ask(cache: &mut Cache, op: Op) -> CallId {
    assert_eq!(cache.handle_op(T0, OpId(1), Caller::default(), op), None);
    let outputs =
        std::iter::from_fn(|| Some(cache.poll_output()).filter(|o| !matches!(o, Output::Timeout(..))));
    let calls = outputs.filter_map(|o| if let Output::Call { id, .. } = o { Some(id) } else { None });
    calls.last().expect("the remote is asked")
}

fn answer(cache: &mut Cache, call: CallId, response: Response) {
    cache.handle_event(T0, Event::Response { call, response });
    while !matches!(cache.poll_output(), Output::Timeout(..)) {}
}

/// Somebody has set one while another name of the file, which is gone since, was the one that answered for it.
#[test]
fn a_row_that_did_not_answer_for_a_file_does_not_say_under_another_name_that_it_has_no_xattrs() {
    let mut cache = cache(Config::default());
    let root = session().root;
    let looked = ask(&mut cache, Op::Lookup { dir: 1, name: name("x") });
    let grant = Grant { id: GrantId(1), term: Term::Session, ..crate::grants::made_up(root) };
    let entry = Entry { id: FILE, attr: attr(), target: None, no_xattrs: true };
    let granted = |reply| Response { grants: vec![grant], ..Response::plain(Ok(reply)) };
    answer(&mut cache, looked, granted(Reply::Looked(Some(entry))));
    let value = |cache: &mut Cache| {
        cache.handle_op(
            T0,
            OpId(2),
            Caller::default(),
            Op::GetXattr { ino: 7, name: b"user.a".to_vec(), size: 9 },
        )
    };
    assert_eq!(value(&mut cache), Some(Answer::Failed(Errno::NODATA)));
    cache.set_home(FILE, (1, &name("y")));
    cache.forget_xattrs(FILE.ino);
    let renamed = ask(
        &mut cache,
        Op::Rename {
            from: 1,
            name: name("x"),
            to: 1,
            new_name: name("z"),
            no_replace: false,
            exchange: false,
        },
    );
    let reply = Reply::Renamed { moved: FILE, replaced: None, kept: None };
    answer(&mut cache, renamed, Response { after: vec![(FILE, attr())], ..granted(reply) });
    assert_eq!(value(&mut cache), None, "the remote is asked");
}
