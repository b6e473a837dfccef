//! Executor of a session's calls: tags in flight, messages to be sent, and timers.
//!
//! A call is a coroutine (`async` without any runtime): it sends its next messages and goes on when their replies have
//! arrived. It never holds the lock while it waits.

use super::config::Config;
use super::fids::{ClunkQueue, Dropped, Fid, FidState, Fids};
use super::files::Files;
use super::greeting::Greeting;
use super::nodes::{InodeNumbers, Nodes};
use super::users::Users;
use crate::{NO_TAG, ProtocolError, Rmessage, Tmessage};
use nigh_remote::{Counters, Output};
use nigh_types::{CallId, Errno, GrantId, Span, Time};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct TaskId(pub u64);

/// The most requests in flight, each of which may need another tag for its flush; the highest tag is [`NO_TAG`].
const MOST_TAGS: u16 = 4_096;
/// A number that no task has.
const NO_TASK: u64 = 0;

/// A message whose reply has not arrived, or was not yet taken.
#[derive(Debug)]
struct Slot {
    /// `None`: no coroutine waits for it.
    task: Option<TaskId>,
    /// `None`: it was not sent yet.
    tag: Option<u16>,
    /// The type of its reply, other than an error.
    expects: u8,
    /// The most bytes, or qids, that its reply may carry.
    most: u32,
    fids: Vec<u32>,
    /// A fid that exists if the reply is no error.
    makes: Option<u32>,
    /// A fid that is gone with any reply.
    ends: Option<u32>,
    /// Of a Tflush: the slot that it flushes, and its tag.
    flushes: Option<(u64, u16)>,
    is_flushed: bool,
    answer: Option<Result<Rmessage, Errno>>,
}

impl Slot {
    /// Whether such a reply has made its fid: an incomplete walk makes none.
    fn made_fid(&self, answer: &Rmessage) -> bool {
        !matches!(answer, Rmessage::Walk { .. }) || amount(answer) == u64::from(self.most)
    }
}

/// The number of bytes or qids in a reply.
fn amount(answer: &Rmessage) -> u64 {
    match answer {
        Rmessage::Read { data } | Rmessage::Readdir { entries: data } => data.0.len() as u64,
        Rmessage::Write { count } => u64::from(*count),
        Rmessage::Walk { qids } => qids.0.len() as u64,
        _ => 0,
    }
}

/// State shared by the coroutines of a session.
pub(crate) struct SessionState {
    pub config: Config,
    pub now: Time,
    /// Counts connections: the fids of an earlier one are void.
    pub epoch: u64,
    /// The agreed size of the longest message.
    pub msize: u32,
    pub out: VecDeque<Output>,
    pub fids: Fids,
    pub nodes: Nodes,
    pub users: Users,
    pub files: Files,
    /// Whether the server supports Trenameat and Tunlinkat; they are used until it refuses them.
    pub renameat: bool,
    pub unlinkat: bool,
    /// Calls that were cancelled: they are not made again.
    pub cancelled: BTreeSet<CallId>,
    /// Result of the handshake.
    pub greeting: Option<Greeting>,
    /// The rule that the server broke.
    pub violation: Option<ProtocolError>,
    pub counters: Counters,
    slots: BTreeMap<u64, Slot>,
    /// Tags in use. The tag of a flushed message that got a reply stays in use, without a slot, until the flush gets
    /// its reply too.
    tags: BTreeMap<u16, u64>,
    /// Messages that wait for a tag.
    queue: VecDeque<(u64, Tmessage)>,
    /// For each fid, the number of messages without a reply that refer to it.
    fid_users: BTreeMap<u32, u32>,
    /// When the server was last heard from, and whether it was probed since.
    pub last_heard: Time,
    pub probed: bool,
    next_slot: u64,
    next_tag: u16,
    ready: BTreeSet<TaskId>,
    /// Coroutines that check their condition again after every event.
    watching: BTreeSet<TaskId>,
    timers: BTreeSet<(Time, TaskId)>,
    next_grant: u64,
}

/// A coroutine's access to the shared state.
#[derive(Clone)]
pub(crate) struct CallContext {
    shared: Arc<Mutex<SessionState>>,
    pub clunk_queue: ClunkQueue,
    pub task: TaskId,
}

impl CallContext {
    pub fn new(config: Config, now: Time, numbers: InodeNumbers) -> CallContext {
        let shared = SessionState {
            msize: config.msize,
            now,
            epoch: 0,
            out: VecDeque::new(),
            fids: Fids::default(),
            nodes: Nodes::new(numbers),
            users: Users::default(),
            files: Files::default(),
            renameat: true,
            unlinkat: true,
            cancelled: BTreeSet::new(),
            greeting: None,
            violation: None,
            counters: Counters::default(),
            slots: BTreeMap::new(),
            tags: BTreeMap::new(),
            queue: VecDeque::new(),
            fid_users: BTreeMap::new(),
            last_heard: now,
            probed: false,
            next_slot: 0,
            next_tag: 0,
            ready: BTreeSet::new(),
            watching: BTreeSet::new(),
            timers: BTreeSet::new(),
            next_grant: 0,
            config,
        };
        CallContext {
            shared: Arc::new(Mutex::new(shared)),
            clunk_queue: ClunkQueue::default(),
            task: TaskId(0),
        }
    }

    /// The context of another coroutine.
    pub fn of(&self, task: TaskId) -> CallContext {
        CallContext { task, ..self.clone() }
    }

    pub fn shared(&self) -> MutexGuard<'_, SessionState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates an unused fid.
    pub fn new_fid(&self) -> Arc<Fid> {
        let mut shared = self.shared();
        let (number, epoch) = (shared.fids.take(), shared.epoch);
        Arc::new(Fid::new(number, epoch, self.clunk_queue.clone()))
    }

    /// Sends a message; the reply goes to the future that is returned, also if it is awaited later.
    pub fn request(&self, message: Tmessage) -> PendingReply {
        let slot = self.shared().send(Some(self.task), message, None);
        PendingReply { cx: self.clone(), slot, taken: false }
    }

    /// Sends a message that makes a fid, which exists once the reply is no error.
    pub fn request_fid(&self, message: Tmessage, makes: &Fid) -> PendingReply {
        let slot = self.shared().send(Some(self.task), message, Some(makes.number()));
        PendingReply { cx: self.clone(), slot, taken: false }
    }

    /// Waits for a time span, or until other coroutines have made a condition true.
    pub async fn pause_unless(&self, span: Span, is_so: impl Fn(&SessionState) -> bool + Send) {
        let due = {
            let mut shared = self.shared();
            let due = shared.now.after(span);
            shared.timers.insert((due, self.task));
            due
        };
        self.until_others(move |shared: &SessionState| shared.now >= due || is_so(shared)).await;
    }

    /// Waits until other coroutines have made a condition true.
    pub async fn until_others(&self, is_so: impl Fn(&SessionState) -> bool + Send) {
        std::future::poll_fn(|_: &mut Context<'_>| {
            let mut shared = self.shared();
            if is_so(&shared) {
                shared.watching.remove(&self.task);
                return Poll::Ready(());
            }
            shared.watching.insert(self.task);
            Poll::Pending
        })
        .await;
    }

    /// Notes a protocol error of the server, which ends the session.
    pub fn abort(&self, error: ProtocolError) -> Errno {
        self.shared().violation.get_or_insert(error);
        Errno::PROTO
    }
}

/// A reply that is awaited. If it is dropped before, the message is flushed.
pub(crate) struct PendingReply {
    cx: CallContext,
    slot: u64,
    taken: bool,
}

impl Future for PendingReply {
    type Output = Result<Rmessage, Errno>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = self.cx.shared().take_answer(self.slot);
        match answer {
            Some(answer) => {
                self.taken = true;
                Poll::Ready(answer)
            }
            None => Poll::Pending,
        }
    }
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        if !self.taken {
            self.cx.clunk_queue.queue_clunk(Dropped::Asked(self.slot));
        }
    }
}

impl SessionState {
    fn send(&mut self, task: Option<TaskId>, message: Tmessage, makes: Option<u32>) -> u64 {
        self.next_slot += 1;
        let slot = self.next_slot;
        let ends = match &message {
            Tmessage::Clunk { fid } | Tmessage::Remove { fid } => Some(*fid),
            _ => None,
        };
        let length = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        let most = match &message {
            Tmessage::Read { count, .. } | Tmessage::Readdir { count, .. } => *count,
            Tmessage::Write { data, .. } => length(data.0.len()),
            Tmessage::Walk { names, .. } => length(names.0.len()),
            _ => 0,
        };
        let waits = Slot {
            task,
            tag: None,
            expects: message.code() + 1,
            most,
            fids: message.fids(),
            makes,
            ends,
            flushes: None,
            is_flushed: false,
            answer: None,
        };
        for fid in &waits.fids {
            *self.fid_users.entry(*fid).or_default() += 1;
        }
        self.slots.insert(slot, waits);
        match message {
            // A flush must not wait for the tags of the messages that it flushes.
            Tmessage::Flush { .. } => self.queue.push_front((slot, message)),
            _ => self.queue.push_back((slot, message)),
        }
        self.send_queued();
        slot
    }

    /// Sends queued messages in their order, as long as there are tags.
    fn send_queued(&mut self) {
        let is_flush = |queued: Option<&(u64, Tmessage)>| matches!(queued, Some((_, Tmessage::Flush { .. })));
        while (self.tags.len() < usize::from(MOST_TAGS) || is_flush(self.queue.front()))
            && let Some((number, message)) = self.queue.pop_front()
        {
            let tag = if matches!(message, Tmessage::Version { .. }) { NO_TAG } else { self.free_tag() };
            let Some(slot) = self.slots.get_mut(&number) else { continue };
            slot.tag = Some(tag);
            if self.tags.is_empty() {
                // The server was not silent while there was no request.
                (self.last_heard, self.probed) = (self.now, false);
            }
            self.tags.insert(tag, number);
            self.counters.count(message.type_name(), !is_service(&message));
            let bytes = message.encode(tag);
            self.counters.bytes_sent += bytes.len() as u64;
            self.out.push_back(Output::Transmit(Arc::new(bytes)));
        }
    }

    /// Returns a free tag. There is one: each message in flight can have one flush.
    fn free_tag(&mut self) -> u16 {
        const NUMBERS: u16 = 2 * MOST_TAGS + 1;
        while self.tags.contains_key(&self.next_tag) {
            self.next_tag = (self.next_tag + 1) % NUMBERS;
        }
        let tag = self.next_tag;
        self.next_tag = (tag + 1) % NUMBERS;
        tag
    }

    /// Whether another call can send its messages.
    pub fn has_tags(&self) -> bool {
        self.tags.len() < usize::from(MOST_TAGS / 2)
    }

    /// Whether a message is without a reply.
    pub fn is_waiting(&self) -> bool {
        !self.tags.is_empty()
    }

    fn take_answer(&mut self, slot: u64) -> Option<Result<Rmessage, Errno>> {
        self.slots.get(&slot)?.answer.as_ref()?;
        self.slots.remove(&slot)?.answer
    }

    /// Takes a reply. Returns the rule that it breaks, if it does.
    pub fn take_message(&mut self, tag: u16, message: Rmessage) -> Result<(), ProtocolError> {
        let unknown = ProtocolError::UnknownTag(tag);
        let number = *self.tags.get(&tag).ok_or(unknown)?;
        let Some(slot) = self.slots.get_mut(&number) else { return Err(unknown) };
        let (code, name) = (message.code(), message.name());
        let answer = match message {
            Rmessage::Lerror { errno } => Err(Errno::from_raw(i32::try_from(errno).unwrap_or(0))),
            _ if code != slot.expects => return Err(ProtocolError::WrongAnswer(name)),
            other if amount(&other) > u64::from(slot.most) => {
                return Err(ProtocolError::TooMuch(name));
            }
            other => Ok(other),
        };
        let (makes, ends, flushes, task) = (slot.makes, slot.ends, slot.flushes, slot.task);
        let stands = answer.as_ref().is_ok_and(|message| slot.made_fid(message));
        let fids = std::mem::take(&mut slot.fids);
        match slot.is_flushed {
            true => self.tags.insert(tag, NO_TASK),
            false => self.tags.remove(&tag),
        };
        if let Some(fid) = ends {
            self.fids.free(fid);
        }
        match task {
            Some(task) => {
                if let Some(slot) = self.slots.get_mut(&number) {
                    slot.answer = Some(answer);
                }
                self.ready.insert(task);
            }
            None => {
                // It was flushed, and executed all the same.
                self.slots.remove(&number);
                if let Some(fid) = makes {
                    if stands { self.clunk(fid) } else { self.fids.free(fid) }
                }
            }
        }
        if let Some((target, tag)) = flushes {
            self.flushed(target, tag);
        }
        self.release_fid_users(&fids);
        self.send_queued();
        Ok(())
    }

    /// Ends a flushed message: without a reply before this one, it was never executed.
    fn flushed(&mut self, target: u64, tag: u16) {
        self.tags.remove(&tag);
        if let Some(slot) = self.slots.remove(&target) {
            self.release_fid_users(&slot.fids);
            if let Some(fid) = slot.makes.or(slot.ends) {
                self.fids.free(fid);
            }
        }
    }

    /// Notes the reply of a message that referred to these fids. A deferred fid is clunked with the last such message.
    fn release_fid_users(&mut self, fids: &[u32]) {
        for fid in fids {
            let Some(count) = self.fid_users.get_mut(fid) else { continue };
            *count -= 1;
            if *count == 0 {
                self.fid_users.remove(fid);
                if self.fids.deferred.remove(fid) {
                    self.clunk(*fid);
                }
            }
        }
    }

    /// Abandons a reply: the message is flushed or unsent, and its fid is clunked.
    fn abandon_reply(&mut self, slot: u64) {
        let Some(waits) = self.slots.get_mut(&slot) else { return };
        waits.task = None;
        if let Some(answer) = waits.answer.take() {
            let (makes, stands) = (waits.makes, answer.is_ok_and(|message| waits.made_fid(&message)));
            self.slots.remove(&slot);
            match makes {
                Some(fid) if stands => self.clunk(fid),
                Some(fid) => self.fids.free(fid),
                None => {}
            }
            return;
        }
        match waits.tag {
            Some(NO_TAG) => {}
            Some(tag) => {
                waits.is_flushed = true;
                let flush = self.send(None, Tmessage::Flush { tag }, None);
                if let Some(flush) = self.slots.get_mut(&flush) {
                    flush.flushes = Some((slot, tag));
                }
            }
            None => self.remove_unsent(slot),
        }
    }

    /// Removes a message that was never sent.
    fn remove_unsent(&mut self, slot: u64) {
        self.queue.retain(|(queued, _)| *queued != slot);
        if let Some(slot) = self.slots.remove(&slot) {
            self.release_fid_users(&slot.fids);
            slot.makes.into_iter().for_each(|fid| self.fids.free(fid));
        }
    }

    /// Clunks a fid, once no message in flight refers to it.
    pub fn clunk(&mut self, fid: u32) {
        if self.fid_users.contains_key(&fid) {
            self.fids.deferred.insert(fid);
        } else {
            self.send(None, Tmessage::Clunk { fid }, None);
        }
    }

    /// Releases replies and fids that coroutines have dropped.
    pub fn queue_clunk(&mut self, gone: Vec<Dropped>) {
        for one in gone {
            match one {
                Dropped::Asked(slot) => self.abandon_reply(slot),
                Dropped::Fid { number, epoch, state } if epoch == self.epoch => match state {
                    FidState::Live => self.clunk(number),
                    // The message that makes or ends it is in flight, and settles it.
                    FidState::Asked
                        if self
                            .slots
                            .values()
                            .any(|slot| slot.makes == Some(number) || slot.ends == Some(number)) => {}
                    FidState::Asked => self.fids.free(number),
                    FidState::Ended => {}
                },
                Dropped::Fid { .. } => {}
            }
        }
    }

    /// Forgets the connection with its messages and fids.
    pub fn forget_connection(&mut self) {
        self.epoch += 1;
        self.slots.clear();
        self.tags.clear();
        self.queue.clear();
        self.fid_users.clear();
        self.ready.clear();
        self.watching.clear();
        self.timers.clear();
        self.fids = Fids::default();
        self.nodes.forget_fids();
        self.users = Users::default();
        self.files.forget_fids();
        self.out.retain(|output| !matches!(output, Output::Transmit(_)));
    }

    /// Returns the coroutines that can go on.
    pub fn take_ready(&mut self) -> BTreeSet<TaskId> {
        while let Some(&(due, task)) = self.timers.first()
            && due <= self.now
        {
            self.timers.pop_first();
            self.ready.insert(task);
        }
        std::mem::take(&mut self.ready)
    }

    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The coroutines that check their condition after every event.
    pub fn watching(&self) -> Vec<TaskId> {
        self.watching.iter().copied().collect()
    }

    pub fn next_timer(&self) -> Time {
        self.timers.first().map_or(Time::FAR, |(due, _)| *due)
    }

    pub fn new_grant(&mut self) -> GrantId {
        self.next_grant += 1;
        GrantId(self.next_grant)
    }

    /// The most data that one message can carry.
    pub fn most_data(&self) -> u32 {
        // `Twrite` has a header of 23 bytes, and Linux keeps 24 free (`P9_IOHDRSZ`).
        self.msize - 24
    }
}

/// Whether a message is not counted among the requests.
fn is_service(message: &Tmessage) -> bool {
    matches!(
        message,
        Tmessage::Version { .. } | Tmessage::Attach { .. } | Tmessage::Flush { .. } | Tmessage::Clunk { .. }
    )
}
