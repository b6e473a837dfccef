//! Replies with a file size that wait for other replies (the size barrier).
//!
//! Before a reply reports the size of an open file, the driver notifies the kernel of the size (`size_notify.rs`), which
//! waits for a page lock of the file. If the daemon dies while a read or write of its own holds the page lock, the
//! notifying thread could never be freed. So the reply with the size waits until these reads and writes have their
//! replies.

use super::{Core, Pending, Role, Sent};
use crate::size_notify::{ReplySequence, SizeNotifier};
use nigh_cache::{Op, OpReply};
use nigh_types::{Kind, OpId, Span, WriteFlags};

/// Size notification that belongs to a reply.
pub(super) struct SizeNotice {
    pub sequence: ReplySequence,
    /// The kernel's nodeid of the file.
    pub nodeid: u64,
    /// Size to notify to the kernel before the reply.
    pub notify_size: Option<u64>,
    /// Whether earlier size notifications must come before this reply.
    pub waits_for_earlier: bool,
}

/// The file whose pages a request keeps locked: the pages that the request fills, or from which it is written
/// (`fuse_readahead`, `fuse_send_write_pages`).
pub(super) fn locked_file(op: &Op) -> Option<u64> {
    match op {
        Op::Read { ino, .. } | Op::Write { ino, flags: WriteFlags { write_back: false, .. }, .. } => {
            Some(*ino)
        }
        _ => None,
    }
}

impl Core {
    /// Admits the reply to a request already removed from `pending`; `None`: the reply waits for others.
    pub(super) fn delay_for_size(
        &mut self,
        lengths: &SizeNotifier,
        op: OpId,
        pending: Pending,
        answer: OpReply,
    ) -> Option<Sent> {
        let changed = pending.role.and_then(Role::changed);
        let forgets = changed.filter(|ino| self.cache.is_set_id_gone(*ino));
        let sent = self.delay_for_page_locks(lengths, op, pending, answer)?;
        Some(Sent { invalidates_attrs: forgets, ..sent })
    }

    fn delay_for_page_locks(
        &mut self,
        lengths: &SizeNotifier,
        op: OpId,
        pending: Pending,
        answer: OpReply,
    ) -> Option<Sent> {
        let size = match &answer {
            OpReply::Attr(_, attr, _) if attr.kind() == Kind::File => attr.size,
            OpReply::Opened(_) => 0,
            _ => return Some(pending.sent(answer, None)),
        };
        let length = match pending.role {
            Some(Role::Reads(ino)) if size > 0 => {
                let lockers = self.page_lock_holders(ino);
                if !lockers.is_empty() {
                    self.delayed_count += 1;
                    self.pending.insert(op, Pending { delayed: Some((answer, lockers)), ..pending });
                    return None;
                }
                let number = self.cache.nodeid_of(ino);
                SizeNotice {
                    sequence: lengths.next_sequence(Some(number)),
                    nodeid: number,
                    notify_size: Some(size),
                    waits_for_earlier: false,
                }
            }
            Some(Role::Sets(ino)) => {
                self.limit_delayed_sizes(ino, size);
                // While others have pages locked, the reply alone sets the size: the kernel applies it.
                let tells = (size > 0 && self.page_lock_holders(ino).is_empty()).then_some(size);
                let number = self.cache.nodeid_of(ino);
                SizeNotice {
                    sequence: lengths.next_sequence(tells.map(|_| number)),
                    nodeid: number,
                    notify_size: tells,
                    waits_for_earlier: true,
                }
            }
            _ => return Some(pending.sent(answer, None)),
        };
        Some(pending.sent(answer, Some(length)))
    }

    /// The file was truncated to `size`: limits the size in delayed replies, so that none makes the file longer.
    fn limit_delayed_sizes(&mut self, ino: u64, size: u64) {
        if self.delayed_count == 0 {
            return;
        }
        for (answer, _) in self.pending.values_mut().filter_map(|pending| pending.delayed.as_mut()) {
            if let OpReply::Attr(id, attr, _) = answer
                && id.ino == ino
            {
                attr.size = attr.size.min(size);
            }
        }
    }

    fn page_lock_holders(&self, ino: u64) -> Vec<OpId> {
        self.pending.iter().filter(|(_, other)| other.locked_file == Some(ino)).map(|(op, _)| *op).collect()
    }

    /// Releases delayed replies that waited for this request only.
    pub(super) fn release_ready(&mut self, lengths: &SizeNotifier, answered: OpId, out: &mut Vec<Sent>) {
        if self.delayed_count == 0 {
            return;
        }
        let mut free = Vec::new();
        for (op, pending) in &mut self.pending {
            if let Some((_, until)) = &mut pending.delayed {
                until.retain(|other| *other != answered);
                free.extend(until.is_empty().then_some(*op));
            }
        }
        out.extend(free.into_iter().filter_map(|op| self.release_delayed(lengths, op)));
    }

    /// Releases a delayed reply. Its attributes get timeout 0, because their timeout ran from the time they were read.
    pub(super) fn release_delayed(&mut self, lengths: &SizeNotifier, op: OpId) -> Option<Sent> {
        let (answer, until) = self.pending.get_mut(&op)?.delayed.take()?;
        self.delayed_count -= 1;
        let pending = self.pending.remove(&op)?;
        let OpReply::Attr(id, attr, _) = answer else { return Some(pending.sent(answer, None)) };
        // If it still waits, its caller was killed and reads nothing.
        let length = until.is_empty().then(|| {
            let number = self.cache.nodeid_of(id.ino);
            SizeNotice {
                sequence: lengths.next_sequence(Some(number)),
                nodeid: number,
                notify_size: Some(attr.size),
                waits_for_earlier: false,
            }
        });
        Some(pending.sent(OpReply::Attr(id, attr, Span::ZERO), length))
    }
}

impl Pending {
    fn sent(self, answer: OpReply, length: Option<SizeNotice>) -> Sent {
        let Pending { unique, shape, pid, role, .. } = self;
        Sent { unique, shape, answer, role, pid, length, invalidates_attrs: None }
    }
}

#[cfg(test)]
mod tests {
    use crate::driver::tests::DriverHarness;
    use crate::reply::ReplyFormat;
    use nigh_cache::{Caller, Fh, Op};
    use nigh_fuse::Notification;
    use nigh_types::{Access, OpId, SetAttr, WriteFlags};
    use std::time::Duration;

    const WRITE: u64 = 1002;
    const LOOK: u64 = 1004;
    const CUT: u64 = 1006;

    /// A file of 4 bytes with an outstanding write, and a caller that asks for the size.
    fn stage() -> (DriverHarness, u64) {
        let mut stage = DriverHarness::new();
        let ino = stage.make("f", false).ino;
        write(&stage, ino, 1000);
        stage.serve();
        assert!(is_answered(&stage, 1000));
        write(&stage, ino, WRITE);
        operate(&stage, LOOK, Op::GetAttr { ino });
        (stage, ino)
    }

    fn write(stage: &DriverHarness, ino: u64, unique: u64) {
        let (fh, data) = (Fh(1), b"text".to_vec());
        operate(stage, unique, Op::Write { ino, fh, offset: 0, data, flags: WriteFlags::default() });
    }

    fn operate(stage: &DriverHarness, unique: u64, op: Op) {
        let caller = Caller { pid: std::process::id(), ..Caller::default() };
        stage.driver.operate(unique, OpId(unique), caller, ReplyFormat::Natural, op);
    }

    fn is_answered(stage: &DriverHarness, unique: u64) -> bool {
        stage.kernel.take_reply(unique, Duration::ZERO).is_some()
    }

    #[test]
    fn getattr_reply_with_a_size_waits_for_a_write_that_has_pages_locked() {
        let (mut stage, ino) = stage();
        assert!(!is_answered(&stage, LOOK), "the write has pages locked");
        assert_eq!(stage.driver.caller_of(OpId(LOOK)), Some(std::process::id()), "it can be killed");
        let told = stage.kernel.notifications().len();
        stage.serve();
        assert!(is_answered(&stage, WRITE) && is_answered(&stage, LOOK));
        assert_eq!(stage.kernel.notifications()[told..], [Notification::Lengthen { ino, size: 4 }]);
        assert_eq!(stage.driver.caller_of(OpId(LOOK)), None);
    }

    /// Otherwise the kernel would keep the old size, and readers would see zeros.
    #[test]
    fn delayed_getattr_reply_does_not_undo_a_later_truncation() {
        for truncates_by_opening in [false, true] {
            let (mut stage, ino) = stage();
            assert!(!is_answered(&stage, LOOK));
            let told = stage.kernel.notifications().len();
            let access =
                Access { read: true, write: true, truncate: true, direct: false, sync: false, append: false };
            let cut = if truncates_by_opening {
                Op::Open { ino, access, append: false }
            } else {
                Op::SetAttr { ino, fh: None, set: SetAttr { size: Some(1), ..SetAttr::default() } }
            };
            let write = stage.sent();
            operate(&stage, CUT, cut);
            stage.serve();
            assert!(is_answered(&stage, CUT) && !is_answered(&stage, LOOK));
            stage.serve_sent(&write);
            assert!(is_answered(&stage, LOOK));
            let lengthens = |told: &Notification<'_>| match told {
                Notification::Lengthen { size, .. } => Some(*size),
                _ => None,
            };
            let most = stage.kernel.notifications()[told..].iter().filter_map(lengthens).max();
            assert!(most <= Some(1), "{truncates_by_opening}: {most:?}");
        }
    }

    #[test]
    fn delayed_getattr_reply_is_released_when_its_caller_is_killed() {
        let (mut stage, _) = stage();
        let told = stage.kernel.notifications().len();
        stage.driver.end_wait(OpId(LOOK));
        assert!(is_answered(&stage, LOOK) && !is_answered(&stage, WRITE));
        stage.serve();
        assert!(is_answered(&stage, WRITE));
        assert_eq!(stage.kernel.notifications().len(), told, "nothing was told for one that reads nothing");
        assert_eq!(stage.driver.core.lock().delayed_count, 0);
    }
}
