//! Stores into pages that were read while an acknowledgement was owed for the file's data, step by step
//! (docs/decisions/0028-merging-write-back.md).

use super::{ClientSetup, Native};
use crate::world::{Backend, World};
use nigh_cache::{Config, Fh, KernelInvalidation, Op, OpReply};
use nigh_lease::LeaseConfig;
use nigh_remote::model_fs::ModelFsConfig;
use nigh_types::{Access, Call, Errno, Name, OpId, Reply, Span, Time, WriteFlags};

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;
/// Latency from A to the server, and back. The other clients are nearer.
const FAR: Span = Span::from_millis(5);
const NEAR: Span = Span::from_millis(1);

/// Clients that have a file of four bytes open, and have cached its page.
struct Mounts {
    world: World<Native>,
    ino: u64,
    open: Vec<Fh>,
}

impl Mounts {
    fn new(count: usize) -> Mounts {
        let mut world = World::over(Native::new(ModelFsConfig::default(), LeaseConfig::default(), 7));
        world.server.with(|net| net.server.dice = None);
        let ino = world.server.edit(|tree| tree.plant_file(Time(0), "f", b"....").ino);
        for latency in [FAR, NEAR, NEAR].into_iter().take(count) {
            let end = world.server.connect(world.now, ClientSetup::far(0, (latency, latency)));
            world.join(Config::default(), (), end);
        }
        world.advance(Span::from_millis(100));
        let mut mounts = Mounts { world, ino, open: Vec::new() };
        for at in 0..count {
            mounts.done(at, Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() });
            let access = Access {
                read: true,
                write: true,
                truncate: false,
                direct: false,
                sync: false,
                append: false,
            };
            let opened = mounts.done(at, Op::Open { ino, access, append: false });
            let OpReply::Opened(opened) = opened else { panic!("{opened:?}") };
            mounts.open.push(opened.fh);
            mounts.read(at);
        }
        mounts
    }

    fn pass(&mut self, millis: u64) {
        self.world.advance(Span::from_millis(millis));
    }

    /// Sends a request and returns its reply.
    fn done(&mut self, at: usize, op: Op) -> OpReply {
        let id = self.world.send_request(at, op);
        self.answer(at, id)
    }

    fn answer(&mut self, at: usize, id: OpId) -> OpReply {
        for _ in 0..5_000 {
            if !self.world.is_pending(at, id) {
                break;
            }
            self.pass(1);
        }
        let found = self.world.replies.iter().position(|(_, of, ..)| *of == id);
        let found = found.unwrap_or_else(|| panic!("it stalls:\n{}", self.world.trace.join("\n")));
        self.world.replies.swap_remove(found).3
    }

    fn begin_read(&mut self, at: usize) -> OpId {
        let (ino, fh) = (self.ino, self.open[at]);
        self.world.send_request(at, Op::Read { ino, fh, offset: 0, size: 4096 })
    }

    /// Reads until the kernel has the page: it drops an older page after a reply.
    fn read(&mut self, at: usize) {
        for _ in 0..3 {
            let id = self.begin_read(at);
            assert!(matches!(self.answer(at, id), OpReply::Data(_)));
            if self.has_page(at) {
                return;
            }
        }
        panic!("no page:\n{}", self.world.trace.join("\n"));
    }

    fn store(&mut self, at: usize, offset: u64, byte: u8) {
        assert!(self.has_page(at), "{}", self.world.trace.join("\n"));
        let fh = self.open[at];
        self.world.store(at, self.ino, fh, (offset, &[byte]));
    }

    fn begin_write(&mut self, at: usize, offset: u64, byte: u8) -> OpId {
        let (ino, fh) = (self.ino, self.open[at]);
        self.world
            .send_request(at, Op::Write { ino, fh, offset, data: vec![byte], flags: WriteFlags::default() })
    }

    /// Drops a clean page, as a kernel does under memory pressure.
    fn reclaim(&mut self, at: usize) {
        assert!(!self.world.clients[at].kernel.page_cache.is_dirty(self.ino));
        self.world.clients[at].kernel.invalidate(&KernelInvalidation::Data {
            ino: self.ino,
            offset: 0,
            length: 0,
        });
    }

    /// Holds back the notifications of a client's kernel, or delivers them.
    fn hold(&mut self, at: usize, holds: bool) {
        match holds {
            true => self.world.clients[at].hold_invalidations = true,
            false => self.world.release_notifications(at),
        }
    }

    fn has_page(&self, at: usize) -> bool {
        self.world.clients[at].kernel.page_cache.has_pages(self.ino)
    }

    /// Returns the file's contents when nothing is in flight, and whether a write-back was refused.
    fn end(mut self) -> (String, bool) {
        self.pass(1_000);
        let refused = |(.., op, answer): &(usize, OpId, Op, OpReply)| {
            matches!(op, Op::Write { flags: WriteFlags { write_back: true, .. }, .. })
                && *answer == OpReply::Failed(Errno::IO)
        };
        let is_refused = self.world.replies.iter().any(refused);
        let (node, now) =
            (self.world.server.edit(|tree| tree.find("f").expect("it is there")), self.world.now);
        let read = Call::Read {
            node: nigh_types::NodeRef::without_hint(node),
            handle: None,
            offset: 0,
            length: 100,
        };
        let Ok(Reply::Data(data)) = self.world.server.edit(|tree| tree.execute_as_host(now, read)) else {
            panic!("no data")
        };
        (String::from_utf8(data).unwrap(), is_refused)
    }
}

/// Both clients sync at the same time, and each write-back is executed before the other client has given up its page.
/// A's kernel has dropped the page by itself, and reads it before the client acknowledges the recall.
#[test]
fn store_into_page_read_before_recall_acknowledgement_keeps_other_clients_stores() {
    let mut mounts = Mounts::new(2);
    mounts.store(A, 0, b'a');
    mounts.store(B, 2, b'b');
    mounts.world.write_back(A, mounts.ino);
    mounts.pass(5);
    mounts.hold(A, true);
    mounts.world.write_back(B, mounts.ino);
    mounts.pass(8);
    mounts.reclaim(A);
    let read = mounts.begin_read(A);
    mounts.pass(1);
    // The recall is acknowledged after the read.
    mounts.hold(A, false);
    mounts.hold(A, true);
    mounts.answer(A, read);
    assert!(mounts.has_page(A));
    mounts.store(A, 1, b'A');
    mounts.read(B);
    mounts.store(B, 3, b'B');
    mounts.world.write_back(B, mounts.ino);
    mounts.pass(20);
    mounts.hold(A, false);
    assert_eq!(mounts.end(), ("aAbB".to_owned(), false));
}

/// The recall overtakes the read's reply, so the read's grant is void and the page is dropped after the reply. A third
/// client's write needs the pages of both.
#[test]
fn store_into_page_with_void_grant_is_merged_at_write_back() {
    let mut mounts = Mounts::new(3);
    mounts.reclaim(A);
    let write = mounts.begin_write(C, 0, b'c');
    mounts.pass(2);
    let read = mounts.begin_read(A);
    mounts.pass(13);
    mounts.hold(A, true);
    mounts.answer(A, read);
    assert!(mounts.has_page(A) && !mounts.world.is_pending(C, write));
    mounts.store(A, 1, b'A');
    mounts.read(B);
    mounts.store(B, 3, b'B');
    let write = mounts.begin_write(C, 0, b'C');
    mounts.pass(20);
    assert!(
        mounts.world.is_pending(C, write) && !mounts.has_page(B),
        "B's store is written back, and A's is not"
    );
    mounts.hold(A, false);
    assert_eq!(mounts.end(), ("CA.B".to_owned(), false));
}

/// A returns nothing for so long that its read no longer waits.
#[test]
fn store_into_page_read_without_grant_fails_after_write_of_another_client() {
    let mut mounts = Mounts::new(2);
    mounts.hold(A, true);
    let write = mounts.begin_write(B, 3, b'B');
    mounts.pass(10);
    mounts.reclaim(A);
    let read = mounts.begin_read(A);
    mounts.pass(1_993);
    // The server has replied. All invalidations are done, except for the page that the read has locked.
    mounts.hold(A, false);
    mounts.hold(A, true);
    mounts.answer(A, read);
    assert!(mounts.has_page(A) && mounts.world.is_pending(B, write));
    mounts.store(A, 1, b'A');
    mounts.answer(B, write);
    mounts.hold(A, false);
    assert_eq!(mounts.end(), ("...B".to_owned(), true));
}
