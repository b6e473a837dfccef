//! File locks. Servers differ in the ranges that they lock (diod: whole files), and none notifies when a lock is free.
//! So ranges are managed here, among the owners of this mount. At the server a file is locked whole, in the strongest
//! mode of any owner.

use super::super::context::CallContext;
use super::super::fids::Fid;
use super::super::reply::{CallReply, Outcome};
use super::open;
use crate::{LockStatus, Rmessage, Tmessage, flags};
use nigh_types::{Call, CallId, Errno, LockInfo, LockKind, NodeId, NodeRef, Reply, Span};
use std::sync::Arc;

/// Time between two attempts to get a lock that another machine holds.
const RETRY_INTERVAL: Span = Span::from_millis(100);
/// As 9P numbers the types of fcntl(2).
const READ: u8 = 0;
const WRITE: u8 = 1;
const NONE: u8 = 2;

pub(super) async fn execute_lock_call(cx: &CallContext, id: CallId, uid: u32, call: &Call) -> Outcome {
    let (Call::Lock { node: place, .. }
    | Call::Unlock { node: place, .. }
    | Call::GetLock { node: place, .. }) = call
    else {
        return Err(Errno::NOSYS);
    };
    if !matches!(call, Call::Unlock { .. }) {
        cx.check_file(uid, place).await?;
    }
    match call {
        // A server does not remember locks of a connection that has ended, and may have granted them to other clients.
        Call::Lock { reclaim: true, .. } => Err(Errno::AGAIN),
        Call::Lock { wait, kind, .. } => lock(cx, (id, *wait), uid, (place, *kind), call).await,
        Call::Unlock { .. } => {
            let _turn = FileLockGuard::wait(cx, place.node).await;
            execute(cx, place.node, call)?;
            weaken_to_held(cx, place.node).await;
            Ok(CallReply::plain(Reply::Done))
        }
        _ => test(cx, uid, place, call).await,
    }
}

/// Mutual exclusion for changes of a file's lock at the server.
struct FileLockGuard<'a> {
    cx: &'a CallContext,
    node: NodeId,
}

impl<'a> FileLockGuard<'a> {
    async fn wait(cx: &'a CallContext, node: NodeId) -> FileLockGuard<'a> {
        cx.until_others(|shared| !shared.files.locks.busy.contains(&node)).await;
        cx.shared().files.locks.busy.insert(node);
        FileLockGuard { cx, node }
    }
}

impl Drop for FileLockGuard<'_> {
    fn drop(&mut self) {
        let mut shared = self.cx.shared();
        shared.files.locks.busy.remove(&self.node);
    }
}

fn execute(cx: &CallContext, node: NodeId, call: &Call) -> Result<Reply, Errno> {
    let mut shared = cx.shared();
    if !matches!(call, Call::GetLock { .. }) {
        shared.files.locks.changes += 1;
    }
    let mut answered = shared.files.locks.ranges.execute(0, CallId(0), node, call);
    answered.pop().map_or(Err(Errno::IO), |(_, _, result)| result)
}

async fn lock(
    cx: &CallContext,
    (id, wait): (CallId, bool),
    uid: u32,
    (place, kind): (&NodeRef, LockKind),
    call: &Call,
) -> Outcome {
    let (at_once, tests) = without_wait(call);
    loop {
        {
            let _turn = FileLockGuard::wait(cx, place.node).await;
            let is_free = execute(cx, place.node, &tests)? == Reply::LockConflict(None);
            if is_free && strengthen(cx, uid, place, kind).await? {
                execute(cx, place.node, &at_once)?;
                weaken_to_held(cx, place.node).await;
                return Ok(CallReply::plain(Reply::Done));
            }
            weaken_to_held(cx, place.node).await;
        }
        if !wait {
            return Err(Errno::AGAIN);
        }
        let seen = cx.shared().files.locks.changes;
        let others = |shared: &super::super::state::SessionState| {
            shared.cancelled.contains(&id) || shared.files.locks.changes != seen
        };
        cx.pause_unless(RETRY_INTERVAL, others).await;
        if cx.shared().cancelled.contains(&id) {
            return Err(Errno::INTR);
        }
    }
}

/// The lock call without waiting, and the call that tests for a conflict.
fn without_wait(call: &Call) -> (Call, Call) {
    let Call::Lock { node, owner, flock, kind, start, end, pid, .. } = call.clone() else {
        return (call.clone(), call.clone());
    };
    let (start, end) = if flock { (0, u64::MAX) } else { (start, end) };
    let tests = Call::GetLock { node: node.clone(), owner, flock, kind, start, end };
    (Call::Lock { node, owner, flock, kind, start, end, wait: false, pid, reclaim: false }, tests)
}

/// Has the server lock a file at least this strongly; returns false if another machine's lock conflicts.
async fn strengthen(cx: &CallContext, uid: u32, place: &NodeRef, kind: LockKind) -> Result<bool, Errno> {
    let held = cx.shared().files.locks.files.get(&place.node).cloned();
    let fid = match &held {
        Some((_, held)) if *held >= kind => return Ok(true),
        Some((fid, _)) => Arc::clone(fid),
        None => match open::fresh(cx, uid, place, flags::RDWR).await {
            Err(Errno::ACCES | Errno::PERM | Errno::ROFS) => {
                open::fresh(cx, uid, place, flags::RDONLY).await?
            }
            // Without a name, it is locked through any fid that has it open.
            Err(Errno::STALE) => {
                let open = cx.shared().files.any_moved(uid, place.node);
                open.ok_or(Errno::STALE)?
            }
            opened => opened?,
        },
    };
    let granted = lock_at_server(cx, &fid, number(kind)).await;
    if granted == Ok(true) {
        cx.shared().files.locks.files.insert(place.node, (fid, kind));
    } else if let Some((fid, held)) = held {
        retake(cx, place.node, &fid, held).await;
    }
    granted
}

/// Takes back the earlier lock. A server that locks as flock(2) does releases it before it checks whether it can grant
/// the new one. If another machine got a lock in between, this mount's lock is lost.
async fn retake(cx: &CallContext, node: NodeId, fid: &Fid, held: LockKind) {
    if lock_at_server(cx, fid, number(held)).await != Ok(true) {
        let mut shared = cx.shared();
        shared.files.locks.changes += 1;
        shared.files.locks.files.remove(&node);
        shared.files.locks.ranges.drop_of_file(node);
    }
}

/// Weakens the server's lock to the strongest one that is still held here.
async fn weaken_to_held(cx: &CallContext, node: NodeId) {
    let (held, wanted) = {
        let shared = cx.shared();
        let locks = &shared.files.locks;
        (locks.files.get(&node).cloned(), locks.ranges.strongest(node))
    };
    let Some((fid, held)) = held else { return };
    match wanted {
        None => {
            // Clunking the fid would also release its lock; some servers keep it until it is unlocked.
            let _ = lock_at_server(cx, &fid, NONE).await;
            cx.shared().files.locks.files.remove(&node);
        }
        Some(wanted) if wanted < held => {
            if lock_at_server(cx, &fid, number(wanted)).await == Ok(true) {
                cx.shared().files.locks.files.insert(node, (fid, wanted));
            } else {
                retake(cx, node, &fid, held).await;
            }
        }
        Some(_) => {}
    }
}

fn number(kind: LockKind) -> u8 {
    match kind {
        LockKind::Read => READ,
        LockKind::Write => WRITE,
    }
}

async fn lock_at_server(cx: &CallContext, fid: &Fid, kind: u8) -> Result<bool, Errno> {
    let client = cx.shared().config.uname.clone();
    let message = Tmessage::Lock { fid: fid.number(), kind, flags: 0, start: 0, length: 0, pid: 1, client };
    let Rmessage::Lock { status } = cx.request(message).await? else { return Err(Errno::PROTO) };
    match status {
        LockStatus::Granted => Ok(true),
        LockStatus::Blocked | LockStatus::Grace => Ok(false),
        LockStatus::Refused => Err(Errno::NOLCK),
    }
}

async fn test(cx: &CallContext, uid: u32, place: &NodeRef, call: &Call) -> Outcome {
    let Call::GetLock { kind, .. } = call else { return Err(Errno::NOSYS) };
    let own = execute(cx, place.node, call)?;
    let held = cx.shared().files.locks.files.get(&place.node).cloned();
    let excludes = held.as_ref().is_some_and(|(_, held)| *held == LockKind::Write);
    if own != Reply::LockConflict(None) || excludes {
        return Ok(CallReply::plain(own));
    }
    let fid = match held {
        Some((fid, _)) => fid,
        None => open::fresh(cx, uid, place, flags::RDONLY).await?,
    };
    let lock = crate::Lock {
        kind: number(*kind),
        start: 0,
        length: 0,
        pid: 1,
        client: cx.shared().config.uname.clone(),
    };
    let Rmessage::Getlock { lock } = cx.request(Tmessage::Getlock { fid: fid.number(), lock }).await? else {
        return Err(Errno::PROTO);
    };
    let kind = match lock.kind {
        READ => LockKind::Read,
        WRITE => LockKind::Write,
        _ => return Ok(CallReply::plain(Reply::LockConflict(None))),
    };
    let end = match lock.length {
        0 => u64::MAX,
        length => lock.start.saturating_add(length - 1),
    };
    // The pid is of another machine's process.
    Ok(CallReply::plain(Reply::LockConflict(Some(LockInfo { kind, start: lock.start, end, pid: 0 }))))
}
