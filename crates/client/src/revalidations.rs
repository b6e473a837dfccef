//! LOOKUP replies that give a cached dentry more time, and whether their threads have applied them.
//!
//! When a dentry's timeout has expired, the kernel revalidates the dentry by a LOOKUP, without the lock of its
//! directory (`fuse_dentry_revalidate`). The calling thread applies the reply itself, when it runs again. A dentry
//! that is only expired meanwhile (`FUSE_EXPIRE_ONLY`) would become valid again. So the notifier expires a dentry
//! only if every such reply has been applied, and otherwise invalidates it: that detaches open files from the dentry,
//! but no reply can revalidate it. Every other reply about a name is applied with the directory locked, and both
//! kinds of notification wait for that lock.

use crate::host::Host;
use nigh_types::Name;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most remembered replies.
const MOST: usize = 1_024;
/// A thread that the host does not show counts as having applied its reply after this time.
const BLINDLY: Duration = Duration::from_secs(1);
/// How long all replies count as not applied after an unapplied one was dropped.
const OVERFLOWS: Duration = Duration::from_secs(60);
/// Number of oldest replies checked to make room.
const LOOKED_AT: usize = 64;
const AGAIN: Duration = Duration::from_micros(100);

/// A name in a directory. Names with equal hashes are confused, which invalidates a dentry instead of expiring it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NameKey {
    dir: u64,
    hash: u64,
}

impl NameKey {
    pub fn of(dir: u64, name: &Name) -> NameKey {
        let mut hasher = DefaultHasher::new();
        name.as_bytes().hash(&mut hasher);
        NameKey { dir, hash: hasher.finish() }
    }
}

/// One reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Revalidation {
    pub name: NameKey,
    /// The inode of the name. A local rename moves the dentry, and the cache knows its new name.
    pub ino: u64,
    /// The calling thread; 0: of another pid namespace.
    pid: u32,
    since: Instant,
}

/// Unapplied LOOKUP replies, and the host that shows whether their threads have run.
pub(crate) struct Revalidations {
    host: Arc<dyn Host>,
    recent: Mutex<Recent>,
}

/// The latest replies, oldest first.
#[derive(Default)]
struct Recent {
    replies: VecDeque<Revalidation>,
    /// When an unapplied reply was last dropped to make room.
    overflowed: Option<Instant>,
}

impl Revalidations {
    pub fn new(host: Arc<dyn Host>) -> Revalidations {
        Revalidations { host, recent: Mutex::default() }
    }

    /// Records that such a reply was just written to the kernel for this thread.
    pub fn note(&self, name: NameKey, ino: u64, pid: u32) {
        let now = Instant::now();
        let mut recent = self.recent.lock();
        // A thread that sends another request has applied its earlier replies.
        recent.replies.retain(|reply| pid == 0 || reply.pid != pid);
        if recent.replies.len() >= MOST {
            let mut looked_at = 0;
            recent.replies.retain(|reply| {
                looked_at += 1;
                looked_at > LOOKED_AT || !reply.is_applied(&*self.host, now)
            });
        }
        if recent.replies.len() >= MOST {
            recent.replies.pop_front();
            recent.overflowed = Some(now);
        }
        recent.replies.push_back(Revalidation { name, ino, pid, since: now });
    }

    /// Whether all matching replies have been applied; waits for them until then. A reply's age proves nothing: a
    /// thread may wait for a processor for any time.
    pub fn are_applied(&self, until: Instant, is_meant: impl Fn(&Revalidation) -> bool) -> bool {
        let replies = {
            let recent = self.recent.lock();
            if recent.overflowed.is_some_and(|at| at.elapsed() < OVERFLOWS) {
                return false;
            }
            recent.replies.clone()
        };
        replies.iter().filter(|reply| is_meant(reply)).all(|reply| reply.is_applied(&*self.host, until))
    }
}

impl Revalidation {
    /// A sleeping thread has run since its reply, unless it waits for a lock while it applies the reply
    /// (`invalidate_inode_pages2`).
    fn is_applied(&self, host: &dyn Host, until: Instant) -> bool {
        let Some(first) =
            host.thread_state(self.pid).filter(|first| first.has_schedstat() && !first.is_uninterruptible())
        else {
            // A living thread may be hidden.
            return host.has_ended(self.pid) || self.since.elapsed() > BLINDLY;
        };
        let mut now = first.clone();
        while now.is_runnable() && now == first {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(AGAIN);
            let Some(next) = host.thread_state(self.pid) else { return true };
            now = next;
        }
        !now.is_uninterruptible()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::test_host::{absent, local};
    use std::sync::mpsc;

    fn key(dir: u64, name: &str) -> NameKey {
        NameKey::of(dir, &Name::new(name.as_bytes()).unwrap())
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(5)
    }

    fn own_thread() -> u32 {
        rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()
    }

    #[test]
    fn reply_to_an_invisible_thread_does_not_count_as_applied_at_once() {
        let replies = Revalidations::new(local());
        assert!(replies.are_applied(soon(), |_| true));
        replies.note(key(1, "a"), 7, 0);
        assert!(!replies.are_applied(soon(), |reply| reply.name == key(1, "a")));
        assert!(!replies.are_applied(soon(), |reply| reply.ino == 7));
        assert!(replies.are_applied(soon(), |reply| reply.name == key(1, "b")));
        assert!(replies.are_applied(soon(), |reply| reply.name == key(2, "a")));
    }

    #[test]
    fn reply_to_a_thread_that_sleeps_since_is_applied() {
        let replies = Revalidations::new(local());
        let (say, told) = mpsc::channel::<u32>();
        let (end, ended) = mpsc::channel::<()>();
        let sleeper = std::thread::spawn(move || {
            say.send(own_thread()).unwrap();
            ended.recv().unwrap();
        });
        replies.note(key(1, "a"), 7, told.recv().unwrap());
        std::thread::sleep(Duration::from_millis(20));
        assert!(replies.are_applied(soon(), |_| true));
        end.send(()).unwrap();
        sleeper.join().unwrap();
    }

    #[test]
    fn reply_to_a_thread_that_has_ended_is_applied() {
        let replies = Revalidations::new(local());
        let ended = std::thread::spawn(own_thread).join().unwrap();
        replies.note(key(1, "a"), 7, ended);
        let gone = Instant::now() + Duration::from_millis(500);
        while !replies.are_applied(soon(), |_| true) {
            assert!(Instant::now() < gone, "a reply to an ended thread counts as not applied");
        }
    }

    /// That number has ended here, but a guest's thread may have it.
    #[test]
    fn reply_to_a_thread_without_a_host_is_applied_after_a_fixed_time() {
        let mut replies = Revalidations::new(absent());
        let ended = std::thread::spawn(own_thread).join().unwrap();
        replies.note(key(1, "a"), 7, ended);
        assert!(!replies.are_applied(soon(), |_| true));
        let begun = Instant::now().checked_sub(BLINDLY * 2).unwrap();
        replies.recent.get_mut().replies[0].since = begun;
        assert!(replies.are_applied(soon(), |_| true));
    }

    #[test]
    fn reply_dropped_to_make_room_counts_as_not_applied() {
        let replies = Revalidations::new(local());
        (0..=MOST as u64).for_each(|ino| replies.note(key(1, "a"), ino, 0));
        assert!(!replies.are_applied(soon(), |reply| reply.ino == 1_000_000));
    }

    #[test]
    fn reply_to_a_thread_that_asked_again_is_applied_and_takes_no_room() {
        let replies = Revalidations::new(local());
        (0..=MOST as u64).for_each(|ino| replies.note(key(1, "a"), ino, own_thread()));
        assert_eq!(replies.recent.lock().replies.len(), 1);
        assert!(replies.are_applied(soon(), |reply| reply.ino == 1));
    }
}
