//! What all calls of a session share: tags in flight, what is to be sent, and what falls due.
//!
//! A call is a coroutine (`async` without any runtime): it says its next messages and goes on when they are answered. It
//! never holds the lock while it waits.

use super::begin::Greeting;
use super::fids::{Fid, FidState, Fids, Gone, Grave};
use super::files::Files;
use super::nodes::{Nodes, Numbers};
use super::users::Users;
use super::{Config, TaskId};
use crate::{NO_TAG, ProtocolError, Rmessage, Tmessage};
use nigh_remote::{Counters, Output};
use nigh_types::{CallId, Errno, GrantId, Span, Time};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

/// Tags of ours; the highest number is [`NO_TAG`].
const MOST_TAGS: u16 = 4_096;
/// No slot has this number.
const NOBODY: u64 = 0;

/// A message that has no answer yet, or whose answer nobody has taken yet.
#[derive(Debug)]
struct Slot {
    /// `None`: nobody waits for it.
    task: Option<TaskId>,
    /// `None`: it was not sent yet.
    tag: Option<u16>,
    /// What answers it, beside an error.
    expects: u8,
    /// The most bytes, or qids, that its answer may speak of.
    most: u32,
    fids: Vec<u32>,
    /// A fid that stands if this is answered without an error.
    makes: Option<u32>,
    /// A fid that is gone with the answer, whatever that is.
    ends: Option<u32>,
    /// Of a Tflush: what it calls off, and under which tag that was.
    flushes: Option<(u64, u16)>,
    is_called_off: bool,
    answer: Option<Result<Rmessage, Errno>>,
}

impl Slot {
    /// Whether its fid stands by such an answer: a walk that did not come to its end has made none.
    fn has_made(&self, answer: &Rmessage) -> bool {
        !matches!(answer, Rmessage::Walk { .. }) || amount(answer) == u64::from(self.most)
    }
}

/// How many bytes or qids an answer speaks of.
fn amount(answer: &Rmessage) -> u64 {
    match answer {
        Rmessage::Read { data } | Rmessage::Readdir { entries: data } => data.0.len() as u64,
        Rmessage::Write { count } => u64::from(*count),
        Rmessage::Walk { qids } => qids.0.len() as u64,
        _ => 0,
    }
}

/// What the coroutines of a session share.
pub(crate) struct Shared {
    pub config: Config,
    pub now: Time,
    /// Counts connections: what belongs to an earlier one is nobody's.
    pub epoch: u64,
    /// Longest message, as agreed.
    pub msize: u32,
    pub out: VecDeque<Output>,
    pub fids: Fids,
    pub nodes: Nodes,
    pub users: Users,
    pub files: Files,
    /// Whether the server knows Trenameat and Tunlinkat; it is asked until it says no.
    pub renameat: bool,
    pub unlinkat: bool,
    /// Calls that nobody waits for any more: they are not made again.
    pub given_up: BTreeSet<CallId>,
    /// What came of the beginning.
    pub greeting: Option<Greeting>,
    /// The rule that the server broke.
    pub broken: Option<ProtocolError>,
    pub counters: Counters,
    slots: BTreeMap<u64, Slot>,
    /// Tags in use. One that was called off and answered stays so (`NOBODY`) until that is answered too.
    tags: BTreeMap<u16, u64>,
    /// Messages for which there is no tag yet.
    queue: VecDeque<(u64, Tmessage)>,
    /// How many messages that have no answer speak of a fid.
    spoken_of: BTreeMap<u32, u32>,
    /// Since when a server that says nothing is silent, and whether it was asked since whether it is there.
    pub heard: Time,
    pub probed: bool,
    next_slot: u64,
    next_tag: u16,
    ready: BTreeSet<TaskId>,
    /// These look again whenever anything has happened.
    watching: BTreeSet<TaskId>,
    timers: BTreeSet<(Time, TaskId)>,
    next_grant: u64,
}

/// How a coroutine reaches what is shared.
#[derive(Clone)]
pub(crate) struct Desk {
    shared: Arc<Mutex<Shared>>,
    pub grave: Grave,
    pub task: TaskId,
}

impl Desk {
    pub fn new(config: Config, now: Time, numbers: Numbers) -> Desk {
        let shared = Shared {
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
            given_up: BTreeSet::new(),
            greeting: None,
            broken: None,
            counters: Counters::default(),
            slots: BTreeMap::new(),
            tags: BTreeMap::new(),
            queue: VecDeque::new(),
            spoken_of: BTreeMap::new(),
            heard: now,
            probed: false,
            next_slot: 0,
            next_tag: 0,
            ready: BTreeSet::new(),
            watching: BTreeSet::new(),
            timers: BTreeSet::new(),
            next_grant: 0,
            config,
        };
        Desk { shared: Arc::new(Mutex::new(shared)), grave: Grave::default(), task: TaskId(0) }
    }

    /// The same for another coroutine.
    pub fn of(&self, task: TaskId) -> Desk {
        Desk { task, ..self.clone() }
    }

    pub fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message; its answer comes to whoever awaits it, also when that begins later.
    pub fn ask(&self, message: Tmessage) -> Asked {
        let slot = self.shared().send(Some(self.task), message, None);
        Asked { desk: self.clone(), slot, taken: false }
    }

    /// The same of one that makes a fid: that stands once this is answered without an error.
    pub fn ask_for(&self, message: Tmessage, makes: &Fid) -> Asked {
        let slot = self.shared().send(Some(self.task), message, Some(makes.number()));
        Asked { desk: self.clone(), slot, taken: false }
    }

    /// Waits for so long, unless something is so before, which others bring about.
    pub async fn pause_unless(&self, span: Span, is_so: impl Fn(&Shared) -> bool + Send) {
        let due = {
            let mut shared = self.shared();
            let due = shared.now.after(span);
            shared.timers.insert((due, self.task));
            due
        };
        self.until_others(move |shared: &Shared| shared.now >= due || is_so(shared)).await;
    }

    /// Waits until something is so, which other coroutines bring about.
    pub async fn until_others(&self, is_so: impl Fn(&Shared) -> bool + Send) {
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

    /// The server broke a rule: the session ends with it.
    pub fn break_off(&self, error: ProtocolError) -> Errno {
        self.shared().broken.get_or_insert(error);
        Errno::PROTO
    }
}

/// An answer that is awaited. Who does not wait for it any more has it called off.
pub(crate) struct Asked {
    desk: Desk,
    slot: u64,
    taken: bool,
}

impl Future for Asked {
    type Output = Result<Rmessage, Errno>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = self.desk.shared().take_answer(self.slot);
        match answer {
            Some(answer) => {
                self.taken = true;
                Poll::Ready(answer)
            }
            None => Poll::Pending,
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if !self.taken {
            self.desk.grave.bury(Gone::Asked(self.slot));
        }
    }
}

impl Shared {
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
            is_called_off: false,
            answer: None,
        };
        for fid in &waits.fids {
            *self.spoken_of.entry(*fid).or_default() += 1;
        }
        self.slots.insert(slot, waits);
        match message {
            // What calls off others is not to wait for their tags.
            Tmessage::Flush { .. } => self.queue.push_front((slot, message)),
            _ => self.queue.push_back((slot, message)),
        }
        self.send_queued();
        slot
    }

    /// Sends what there are tags for, in its order.
    fn send_queued(&mut self) {
        let is_flush = |queued: Option<&(u64, Tmessage)>| matches!(queued, Some((_, Tmessage::Flush { .. })));
        while (self.tags.len() < usize::from(MOST_TAGS) || is_flush(self.queue.front()))
            && let Some((number, message)) = self.queue.pop_front()
        {
            let tag = if matches!(message, Tmessage::Version { .. }) { NO_TAG } else { self.free_tag() };
            let Some(slot) = self.slots.get_mut(&number) else { continue };
            slot.tag = Some(tag);
            if self.tags.is_empty() {
                // Whoever was asked nothing was not silent.
                (self.heard, self.probed) = (self.now, false);
            }
            self.tags.insert(tag, number);
            self.counters.count(message.type_name(), !is_service(&message));
            let bytes = message.encode(tag);
            self.counters.bytes_sent += bytes.len() as u64;
            self.out.push_back(Output::Transmit(Arc::new(bytes)));
        }
    }

    /// There is one: each message in flight can have one that calls it off.
    fn free_tag(&mut self) -> u16 {
        const NUMBERS: u16 = 2 * MOST_TAGS + 1;
        while self.tags.contains_key(&self.next_tag) {
            self.next_tag = (self.next_tag + 1) % NUMBERS;
        }
        let tag = self.next_tag;
        self.next_tag = (tag + 1) % NUMBERS;
        tag
    }

    /// Whether so many more calls can have their messages out.
    pub fn has_tags(&self) -> bool {
        self.tags.len() < usize::from(MOST_TAGS / 2)
    }

    /// Whether anything is out that has no answer.
    pub fn is_waiting(&self) -> bool {
        !self.tags.is_empty()
    }

    fn take_answer(&mut self, slot: u64) -> Option<Result<Rmessage, Errno>> {
        self.slots.get(&slot)?.answer.as_ref()?;
        self.slots.remove(&slot)?.answer
    }

    /// An answer came. The rule that it breaks, if it does.
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
        let stands = answer.as_ref().is_ok_and(|message| slot.has_made(message));
        let fids = std::mem::take(&mut slot.fids);
        match slot.is_called_off {
            true => self.tags.insert(tag, NOBODY),
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
                // Called off, and done all the same.
                self.slots.remove(&number);
                if let Some(fid) = makes {
                    if stands { self.clunk(fid) } else { self.fids.free(fid) }
                }
            }
        }
        if let Some((target, tag)) = flushes {
            self.flushed(target, tag);
        }
        self.leave_fids(&fids);
        self.send_queued();
        Ok(())
    }

    /// What was called off is over: without an answer before, it was never done.
    fn flushed(&mut self, target: u64, tag: u16) {
        self.tags.remove(&tag);
        if let Some(slot) = self.slots.remove(&target) {
            self.leave_fids(&slot.fids);
            if let Some(fid) = slot.makes.or(slot.ends) {
                self.fids.free(fid);
            }
        }
    }

    /// A message that spoke of these has its answer. Who is needed no more goes with the last of them.
    fn leave_fids(&mut self, fids: &[u32]) {
        for fid in fids {
            let Some(count) = self.spoken_of.get_mut(fid) else { continue };
            *count -= 1;
            if *count == 0 {
                self.spoken_of.remove(fid);
                if self.fids.deferred.remove(fid) {
                    self.clunk(*fid);
                }
            }
        }
    }

    /// Nobody waits for that answer.
    fn leave(&mut self, slot: u64) {
        let Some(waits) = self.slots.get_mut(&slot) else { return };
        waits.task = None;
        if let Some(answer) = waits.answer.take() {
            let (makes, stands) = (waits.makes, answer.is_ok_and(|message| waits.has_made(&message)));
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
                waits.is_called_off = true;
                let flush = self.send(None, Tmessage::Flush { tag }, None);
                if let Some(flush) = self.slots.get_mut(&flush) {
                    flush.flushes = Some((slot, tag));
                }
            }
            None => self.take_back(slot),
        }
    }

    /// It was never sent.
    fn take_back(&mut self, slot: u64) {
        self.queue.retain(|(queued, _)| *queued != slot);
        if let Some(slot) = self.slots.remove(&slot) {
            self.leave_fids(&slot.fids);
            slot.makes.into_iter().for_each(|fid| self.fids.free(fid));
        }
    }

    /// A fid is needed no more; it is let go once nothing in flight speaks of it.
    pub fn clunk(&mut self, fid: u32) {
        if self.spoken_of.contains_key(&fid) {
            self.fids.deferred.insert(fid);
        } else {
            self.send(None, Tmessage::Clunk { fid }, None);
        }
    }

    /// What coroutines have let go of.
    pub fn bury(&mut self, gone: Vec<Gone>) {
        for one in gone {
            match one {
                Gone::Asked(slot) => self.leave(slot),
                Gone::Fid { number, epoch, state } if epoch == self.epoch => match state {
                    FidState::Stands => self.clunk(number),
                    // Whatever is to make it is in flight, and sees to it.
                    FidState::Asked
                        if self
                            .slots
                            .values()
                            .any(|slot| slot.makes == Some(number) || slot.ends == Some(number)) => {}
                    FidState::Asked => self.fids.free(number),
                    FidState::Ended => {}
                },
                Gone::Fid { .. } => {}
            }
        }
    }

    /// The connection is gone, and all that was said on it.
    pub fn forget_connection(&mut self) {
        self.epoch += 1;
        self.slots.clear();
        self.tags.clear();
        self.queue.clear();
        self.spoken_of.clear();
        self.ready.clear();
        self.watching.clear();
        self.timers.clear();
        self.fids = Fids::default();
        self.nodes.forget_fids();
        self.users = Users::default();
        self.files.forget_fids();
        self.out.retain(|output| !matches!(output, Output::Transmit(_)));
    }

    /// The coroutines that can go on.
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

    /// Those that look whether something is so by now.
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

    /// Data that one message can carry.
    pub fn most_data(&self) -> u32 {
        // `Twrite` has a header of 23 bytes, and Linux keeps 24 free (`P9_IOHDRSZ`).
        self.msize - 24
    }
}

/// What is not counted among requests.
fn is_service(message: &Tmessage) -> bool {
    matches!(
        message,
        Tmessage::Version { .. } | Tmessage::Attach { .. } | Tmessage::Flush { .. } | Tmessage::Clunk { .. }
    )
}
