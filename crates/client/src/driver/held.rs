//! Answers that wait for others.
//!
//! Before somebody is answered how long an open file is the kernel is told that (`lengths.rs`), which waits for a page of the file.
//! While a read or write of ours has that locked, whoever ends this process would leave a thread behind that nothing frees: that answer
//! waits for theirs.

use super::{Core, Pending, Role, Sent};
use nigh_cache::{Answer, Op};
use nigh_types::{OpId, Span};

/// The file of which a request keeps pages locked: those that it fills, or that it is written from (`fuse_readahead`,
/// `fuse_send_write_pages`).
pub(super) fn locks(op: &Op) -> Option<u64> {
    match op {
        Op::Read { ino, .. } | Op::Write { ino, from_page_cache: false, .. } => Some(*ino),
        _ => None,
    }
}

impl Core {
    /// Puts an answer to what is no longer among the pending ones out, and those that waited for it; or keeps it.
    pub(super) fn answer(&mut self, op: OpId, pending: Pending, answer: Answer, out: &mut Vec<Sent>) {
        let lengthens = match (pending.role, &answer) {
            (Some(Role::Reads(ino) | Role::Sets(ino)), Answer::Attr(_, attr, _)) if attr.size > 0 => {
                Some((ino, attr.size))
            }
            _ => None,
        };
        let lockers = lengthens.map(|(ino, _)| self.lockers(ino)).unwrap_or_default();
        match pending.role {
            Some(Role::Reads(_)) if !lockers.is_empty() => {
                self.held += 1;
                self.pending.insert(op, Pending { held: Some((answer, lockers)), ..pending });
            }
            // Its own answer says how long the file is, and the kernel takes that in.
            _ if !lockers.is_empty() => out.push(pending.sent(answer, None)),
            _ => out.push(pending.sent(answer, lengthens)),
        }
        self.release(op, out);
    }

    fn lockers(&self, ino: u64) -> Vec<OpId> {
        self.pending.iter().filter(|(_, other)| other.locks == Some(ino)).map(|(op, _)| *op).collect()
    }

    /// Those that waited for that answer, and wait for no other.
    fn release(&mut self, answered: OpId, out: &mut Vec<Sent>) {
        if self.held == 0 {
            return;
        }
        let mut free = Vec::new();
        for (op, pending) in &mut self.pending {
            if let Some((_, until)) = &mut pending.held {
                until.retain(|other| *other != answered);
                free.extend(until.is_empty().then_some(*op));
            }
        }
        for op in free {
            out.extend(self.let_go(op));
        }
    }

    /// One that waited so. What it says was to be believed from when it was said, which the kernel does not know.
    pub(super) fn let_go(&mut self, op: OpId) -> Option<Sent> {
        let (answer, until) = self.pending.get_mut(&op)?.held.take()?;
        self.held -= 1;
        let pending = self.pending.remove(&op)?;
        let Answer::Attr(id, attr, _) = answer else { return Some(pending.sent(answer, None)) };
        // Where it still waits its caller is killed, and reads nothing.
        let lengthens = until.is_empty().then_some((id.ino, attr.size));
        Some(pending.sent(Answer::Attr(id, attr, Span::ZERO), lengthens))
    }
}

impl Pending {
    fn sent(self, answer: Answer, lengthens: Option<(u64, u64)>) -> Sent {
        let Pending { unique, shape, pid, role, .. } = self;
        Sent { unique, shape, answer, role, pid, lengthens }
    }
}

#[cfg(test)]
mod tests {
    use crate::answers::Shape;
    use crate::driver::tests::Stage;
    use nigh_cache::{Caller, Fh, Op};
    use nigh_fuse::Notification;
    use nigh_types::OpId;
    use std::time::Duration;

    const WRITE: u64 = 1002;
    const LOOK: u64 = 1004;

    /// A file of 4 bytes, of which a write is out, and somebody who asks how long it is.
    fn stage() -> (Stage, u64) {
        let mut stage = Stage::new();
        let ino = stage.make("f", false).ino;
        write(&stage, ino, 1000);
        stage.serve();
        assert!(is_answered(&stage, 1000));
        write(&stage, ino, WRITE);
        operate(&stage, LOOK, Op::GetAttr { ino });
        (stage, ino)
    }

    fn write(stage: &Stage, ino: u64, unique: u64) {
        let (fh, data) = (Fh(1), b"text".to_vec());
        operate(
            stage,
            unique,
            Op::Write { ino, fh, offset: 0, data, kill_suidgid: false, from_page_cache: false },
        );
    }

    fn operate(stage: &Stage, unique: u64, op: Op) {
        let caller = Caller { pid: std::process::id(), ..Caller::default() };
        stage.driver.operate(unique, OpId(unique), caller, Shape::Natural, op);
    }

    fn is_answered(stage: &Stage, unique: u64) -> bool {
        stage.kernel.take_reply(unique, Duration::ZERO).is_some()
    }

    #[test]
    fn who_asks_how_long_a_file_is_waits_for_who_has_its_pages_locked() {
        let (mut stage, ino) = stage();
        assert!(!is_answered(&stage, LOOK), "the write has pages locked");
        assert_eq!(stage.driver.caller_of(OpId(LOOK)), Some(std::process::id()), "it can be killed");
        let told = stage.kernel.notifications().len();
        stage.serve();
        assert!(is_answered(&stage, WRITE) && is_answered(&stage, LOOK));
        assert_eq!(stage.kernel.notifications()[told..], [Notification::Lengthen { ino, size: 4 }]);
        assert_eq!(stage.driver.caller_of(OpId(LOOK)), None);
    }

    #[test]
    fn who_waits_so_and_is_killed_waits_no_longer() {
        let (mut stage, _) = stage();
        let told = stage.kernel.notifications().len();
        stage.driver.end_wait(OpId(LOOK));
        assert!(is_answered(&stage, LOOK) && !is_answered(&stage, WRITE));
        stage.serve();
        assert!(is_answered(&stage, WRITE));
        assert_eq!(stage.kernel.notifications().len(), told, "nothing was told for one that reads nothing");
        assert_eq!(stage.driver.core.lock().held, 0);
    }
}
