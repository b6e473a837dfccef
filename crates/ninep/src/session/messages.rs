//! Messages in flight: their tags and slots, the fids that they refer to, and messages that wait for a tag.

use super::fids::{Dropped, FidState, Fids};
use crate::{NO_TAG, ProtocolError, Rmessage, Tmessage};
use nigh_pathclient::{Schedule, TaskId};
use nigh_remote::{Counters, Output};
use nigh_types::{Errno, Time};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The most requests in flight, each of which may need another tag for its flush; the highest tag is [`NO_TAG`].
const MOST_TAGS: u16 = 4_096;
/// A number that no slot has.
const NO_SLOT: u64 = 0;

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

/// Messages of a session and the fids that they make.
pub(crate) struct Messages {
    /// Output of the session, in its order: messages and events.
    pub out: VecDeque<Output>,
    pub counters: Counters,
    pub fids: Fids,
    /// Counts connections: the fids of an earlier one are void.
    pub epoch: u64,
    /// When the server was last heard from, and whether it was probed since.
    pub last_heard: Time,
    pub probed: bool,
    schedule: Schedule,
    slots: BTreeMap<u64, Slot>,
    /// Tags in use. The tag of a flushed message that got a reply stays in use, without a slot, until the flush gets
    /// its reply too.
    tags: BTreeMap<u16, u64>,
    /// Messages that wait for a tag.
    queue: VecDeque<(u64, Tmessage)>,
    /// For each fid, the number of messages without a reply that refer to it.
    fid_users: BTreeMap<u32, u32>,
    next_slot: u64,
    next_tag: u16,
}

impl Messages {
    pub fn new(schedule: Schedule) -> Messages {
        Messages {
            out: VecDeque::new(),
            counters: Counters::default(),
            fids: Fids::default(),
            epoch: 0,
            last_heard: schedule.now(),
            probed: false,
            schedule,
            slots: BTreeMap::new(),
            tags: BTreeMap::new(),
            queue: VecDeque::new(),
            fid_users: BTreeMap::new(),
            next_slot: 0,
            next_tag: 0,
        }
    }

    /// Sends a message as soon as there is a tag, and returns its slot. `task`: the task that waits for the reply;
    /// `makes`: a fid that exists once the reply is no error.
    pub fn send(&mut self, task: Option<TaskId>, message: Tmessage, makes: Option<u32>) -> u64 {
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
                (self.last_heard, self.probed) = (self.schedule.now(), false);
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

    /// Takes the reply to a message, if it has arrived.
    pub fn take_answer(&mut self, slot: u64) -> Option<Result<Rmessage, Errno>> {
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
            true => self.tags.insert(tag, NO_SLOT),
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
                self.schedule.wake(task);
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
    fn clunk(&mut self, fid: u32) {
        if self.fid_users.contains_key(&fid) {
            self.fids.deferred.insert(fid);
        } else {
            self.send(None, Tmessage::Clunk { fid }, None);
        }
    }

    /// Releases replies and fids that coroutines have dropped.
    pub fn release(&mut self, dropped: Vec<Dropped>) {
        for one in dropped {
            match one {
                Dropped::Reply(slot) => self.abandon_reply(slot),
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
        self.fids = Fids::default();
        self.out.retain(|output| !matches!(output, Output::Transmit(_)));
    }
}

/// Whether a message is not counted among the requests.
fn is_service(message: &Tmessage) -> bool {
    matches!(
        message,
        Tmessage::Version { .. } | Tmessage::Attach { .. } | Tmessage::Flush { .. } | Tmessage::Clunk { .. }
    )
}
