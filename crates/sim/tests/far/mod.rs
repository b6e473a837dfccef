//! A client that is a round trip away from the server.

pub mod files;

use nigh_cache::{Op, OpReply};
use nigh_remote::fake::{CallFilter, CallPlan};
use nigh_sim::world::World;
use nigh_types::{Cookie, Name, Span};

pub const ROUND_TRIP: Span = Span::from_millis(10);

/// Delays all replies to the first client.
pub fn slow(world: &mut World) {
    let fate = CallPlan { arrives_after: ROUND_TRIP, chunk_pause: Span(50_000), ..CallPlan::default() };
    world.clients[0].control.plan(CallFilter::Every, fate);
}

pub fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// Returns the reply, however long it takes.
pub fn answer(world: &mut World, op: Op) -> OpReply {
    let id = world.send_request(0, op);
    for _ in 0..10_000 {
        if let Some(at) = world.replies.iter().position(|(_, of, ..)| *of == id) {
            return world.replies.swap_remove(at).3;
        }
        world.advance(Span(100_000));
    }
    panic!("no answer: {:?}", world.trace)
}

/// Returns the number of requests that waited for what was not in transit.
pub fn waits(world: &World) -> u64 {
    let counters = world.clients[0].cache.counters();
    counters.waits - counters.joins
}

/// An entry of a listing, without `.` and `..`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Listed {
    pub name: String,
    pub ino: u64,
    pub is_dir: bool,
}

/// Returns the entries of a directory in the order of its listing. `forgets`: the kernel reclaims the inodes of files
/// after each page.
pub fn list(world: &mut World, ino: u64, forgets: bool) -> Vec<Listed> {
    let OpReply::Opened(opened) = answer(world, Op::OpenDir { ino }) else { panic!("it opens") };
    let (fh, mut found, mut offset) = (opened.fh, Vec::new(), Cookie(0));
    loop {
        let read = Op::ReadDir { ino, fh, offset, size: 32 << 10, plus: true };
        let OpReply::Page(page) = answer(world, read) else { panic!("no page") };
        let Some(last) = page.entries.last() else { break };
        offset = last.next;
        let mut rest = page.names.as_slice();
        for entry in &page.entries {
            let (one, others) = rest.split_at(usize::from(entry.name_len));
            rest = others;
            let (name, is_dir) =
                (String::from_utf8(one.to_vec()).unwrap(), entry.mode & 0o170_000 == 0o040_000);
            if name != "." && name != ".." {
                found.push(Listed { name, ino: entry.ino, is_dir });
            }
            if let Some(node) = entry.node.filter(|_| forgets && !is_dir) {
                world.clients[0].cache.handle_forget(node.number, 1);
            }
        }
    }
    answer(world, Op::ReleaseDir { fh });
    found
}
