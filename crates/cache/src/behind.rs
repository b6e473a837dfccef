//! What the kernel is told to forget behind answers to who reads.
//!
//! A reader that does not know how long a file is asks for its attributes, and goes on by the size that its kernel then has for that
//! file. An answer does not reach there if the kernel took in another one, or was told to forget something of the file, since the
//! reader asked (`fi->attr_version` in `fuse_change_attributes`): the reader would go on by whatever was known long ago. So of
//! an open file an older answer waits for a newer one, and what is to be forgotten, and own changes, for all who asked before. That these have
//! taken their answers in, who tells the kernel sees to.

use crate::cache::Cache;
use crate::flight::{Flight, Purpose};
use crate::op::{Answer, Invalidation, Output, Stale};
use crate::state::Copies;
use nigh_types::{Attr, Call, CallId, Name, NodeId, OpId, Reply, Response, Span, Time};
use std::collections::VecDeque;

/// Nobody is waited for any longer: others may wait for what is told.
const ANSWERS_WAIT: Span = Span::from_millis(1_000);

/// Something that the kernel is to be told.
#[derive(Clone, Debug)]
pub(crate) struct Behind {
    what: What,
    /// Not while one of these waits for attributes,
    asked: Vec<OpId>,
    /// but then.
    latest: Time,
}

#[derive(Clone, Debug)]
enum What {
    Forget(Invalidation, Vec<Stale>),
    /// That an own change was made, which it takes for later than any answer to who asked before.
    Answers(Vec<OpId>, Late),
}

/// An answer that may be given later.
#[derive(Clone, Debug)]
pub(crate) struct Late {
    pub answer: Answer,
    /// When it was asked for, where it may bring attributes that are older than what others have been answered.
    pub sent: Option<Time>,
    /// The name that it is about.
    pub name: Option<(u64, Name)>,
}

/// The inode to which a waiting answer leads by a name.
fn led_to(what: &What) -> Option<u64> {
    match what {
        What::Answers(_, Late { answer: Answer::Node(node) | Answer::Created(node, _), .. }) => {
            Some(node.id.ino)
        }
        _ => None,
    }
}

/// In their order.
pub(crate) type Behinds = VecDeque<Behind>;

impl Cache {
    /// Has the kernel forget, as soon as that is no harm to who reads. Names and listings harm none: they go at once, unless an answer
    /// waits that may give one, or `acknowledged` all in one.
    pub(crate) fn tell_behind(&mut self, id: Invalidation, mut stale: Vec<Stale>, acknowledged: bool) {
        let asked = self.readers_of(&stale);
        let waits = !(asked.is_empty() && self.behind.is_empty());
        if waits && !self.behind.iter().any(|behind| matches!(behind.what, What::Answers(..))) {
            let names = stale.iter().filter(|one| self.is_of_names(one)).count();
            if names == stale.len() {
                return self.put_out(What::Forget(id, stale));
            }
            if names > 0 && !acknowledged {
                let names = stale.extract_if(.., |one| self.is_of_names(one)).collect();
                let id = self.new_invalidation();
                self.put_out(What::Forget(id, names));
            }
        }
        self.put_behind(What::Forget(id, stale), asked);
    }

    fn is_of_names(&self, stale: &Stale) -> bool {
        match stale {
            Stale::Entry { .. } | Stale::Gone { .. } | Stale::Epoch(_) => true,
            Stale::Data { ino, .. } => self.is_directory(*ino),
            Stale::Attr { .. } => false,
        }
    }

    /// Attributes that the kernel does not believe, and has not been told since it was to forget them, it need not forget: it would
    /// only not take in what it is answered next.
    pub(crate) fn leave_out_unbelieved(&mut self, stale: &mut Vec<Stale>) {
        self.with_targets(stale);
        stale.retain(|one| match one {
            // The kernel keeps the set-user-ID bits of its last reply until the notifier has invalidated the attributes.
            Stale::Attr { ino } => self
                .inodes
                .get_mut(ino)
                .is_none_or(|inode| std::mem::take(&mut inode.attr_told) || inode.has_copy(Copies::Acls)),
            _ => true,
        });
    }

    /// The same for an answer that the kernel takes for a later one, of these files.
    pub(crate) fn answer_behind(&mut self, files: &[u64], ops: &[OpId], late: Late) {
        self.tell_due();
        let follows = files.iter().any(|ino| self.tells_of(*ino));
        let files: Vec<Stale> = files.iter().map(|ino| Stale::Attr { ino: *ino }).collect();
        let asked = self.readers_of(&files);
        if ops.is_empty() || asked.is_empty() && !follows {
            return self.answer_no_older(ops, late.answer, late.sent);
        }
        self.put_behind(What::Answers(ops.to_vec(), late), asked);
    }

    /// Somebody is answered these attributes, and may read as far as they say until the next ones are taken in.
    pub(crate) fn note_told(&mut self, ino: u64, attr: Attr) {
        if self.reads_by_size(ino)
            && let Some(inode) = self.inodes.get_mut(&ino)
        {
            inode.more().last_told = Some(Box::new((self.clock, attr)));
        }
    }

    /// Attributes that nothing vouches for are not told who has been told others since they were asked for: whoever reads would go by the
    /// older size. Who wants to know them asks again.
    fn answer_no_older(&mut self, ops: &[OpId], mut answer: Answer, sent: Option<Time>) {
        let (ino, attr, keeps) = match &mut answer {
            Answer::Node(node) if node.attr_valid == Span::ZERO => (node.id.ino, &mut node.attr, false),
            Answer::Attr(id, attr, Span::ZERO) => (id.ino, attr, true),
            _ => return self.answer_all(ops, &answer),
        };
        let last = self.inodes.get(&ino).and_then(|inode| inode.last_told.as_deref());
        if let Some((_, last)) = last.filter(|(at, _)| sent.is_some_and(|sent| sent <= *at)) {
            *attr = if keeps { Attr { size: last.size, ..*attr } } else { *last };
        }
        self.answer_all(ops, &answer);
    }

    /// Whether an answer may bring attributes that are older than what others were answered meanwhile: not who sets how long a file is.
    pub(crate) fn may_be_older(flight: &Flight) -> bool {
        !matches!(&flight.again, Some(Call::SetAttr { set, .. }) if set.size.is_some())
    }

    /// The files of whose attributes others ask, and that a change is of: also those that lose a name, as far as the kernel
    /// (`fuse_entry_unlinked`) or the remote knows, and those that gain one.
    pub(crate) fn changed_while_asked(&self, purpose: &Purpose, response: &Response) -> Vec<u64> {
        let named = match &response.result {
            Ok(Reply::Made { entry, .. }) => Some(entry.id.ino),
            Ok(Reply::Removed { node, .. }) => Some(node.ino),
            Ok(Reply::Renamed { replaced, .. }) => replaced.map(|node| node.ino),
            _ => None,
        };
        let itself = match purpose {
            Purpose::Write { ino, flush: false, .. } | Purpose::Change { ino, .. } => Some(*ino),
            _ => None,
        };
        let names = purpose.names();
        if named.is_none() && itself.is_none() && names.is_empty() {
            return Vec::new();
        }
        let is_at = |ino: u64| {
            let inode = self.inodes.get(&ino);
            inode.is_some_and(|inode| names.iter().any(|(dir, name)| inode.is_at(*dir, name)))
        };
        let asked = self.attrs.keys().copied();
        let told = self.behind.iter().filter_map(|behind| led_to(&behind.what));
        asked.chain(told).filter(|ino| named == Some(*ino) || itself == Some(*ino) || is_at(*ino)).collect()
    }

    /// Whether an answer that leads to that inode waits: what an own change made of it is told after.
    fn tells_of(&self, ino: u64) -> bool {
        self.behind.iter().any(|behind| led_to(&behind.what) == Some(ino))
    }

    fn put_behind(&mut self, what: What, asked: Vec<OpId>) {
        if self.behind.is_empty() && asked.is_empty() {
            return self.put_out(what);
        }
        let latest = self.clock.after(ANSWERS_WAIT);
        self.behind.push_back(Behind { what, asked, latest });
    }

    fn put_out(&mut self, what: What) {
        match what {
            What::Forget(id, stale) => self.out.push_back(Output::Invalidate { id, stale, first: false }),
            What::Answers(ops, late) => self.answer_late(&ops, late),
        }
    }

    /// What was to be believed for a while when it was put behind is so for what is left of that, if it still is.
    fn answer_late(&mut self, ops: &[OpId], Late { mut answer, sent, name }: Late) {
        match &mut answer {
            Answer::Node(node) | Answer::Created(node, _) => {
                node.entry_valid = node.entry_valid.min(self.still_named(name.as_ref(), node.id));
                node.attr_valid = node.attr_valid.min(self.still_told(node.id));
            }
            Answer::Attr(id, _, valid) => *valid = (*valid).min(self.still_told(*id)),
            _ => {}
        }
        self.answer_no_older(ops, answer, sent);
    }

    /// For how long a name may be believed to lead to an inode now.
    fn still_named(&self, name: Option<&(u64, Name)>, id: NodeId) -> Span {
        let now = self.clock;
        let named = || {
            let (dir, name) = name?;
            if self.is_ordered(now, *dir) || self.watches.is_telling(*dir) || self.holds.has_name(*dir, name)
            {
                return None;
            }
            let directory = self.dirs.get(dir)?;
            let held = directory.held.filter(|held| held.lives(now))?;
            let row = directory.rows.find(self.key.cookie(name.as_bytes()), name.as_bytes())?;
            row.child.filter(|child| child.id == id)?;
            Some(self.config.level.name_validity(&held, now))
        };
        named().unwrap_or(Span::ZERO)
    }

    fn still_told(&mut self, id: NodeId) -> Span {
        let Some((attr, held)) = self.attr_of(self.clock, id) else { return Span::ZERO };
        self.tell_attr(self.clock, id.ino, &attr, Some(held))
    }

    /// Who waits for attributes of open files of which the kernel is to forget something.
    fn readers_of(&self, stale: &[Stale]) -> Vec<OpId> {
        if self.attrs.is_empty() {
            return Vec::new();
        }
        let files = stale.iter().filter_map(|one| match one {
            Stale::Attr { ino } | Stale::Data { ino, .. } if self.reads_by_size(*ino) => Some(ino),
            _ => None,
        });
        let flights = files.filter_map(|ino| self.flights.get(self.attrs.get(ino)?));
        flights.flat_map(|flight| flight.waiters.iter().copied()).collect()
    }

    /// Whether somebody waits for an answer and will read as far as that says.
    #[must_use]
    pub fn is_asked_how_long(&self, ino: u64) -> bool {
        !self.readers_of(&[Stale::Attr { ino }]).is_empty()
    }

    /// Whether somebody may go on by the size of an inode when its attributes are answered.
    #[must_use]
    pub fn reads_by_size(&self, ino: u64) -> bool {
        self.is_open(ino) && !self.is_directory(ino)
    }

    /// Who waits for an older call waits for a newer one.
    pub(crate) fn wait_for_newer(&mut self, older: CallId, newer: CallId) {
        if older == newer || !self.flights.contains_key(&newer) {
            return;
        }
        let Some(flight) = self.flights.get_mut(&older) else { return };
        let waiters = std::mem::take(&mut flight.waiters);
        for op in &waiters {
            if let Some(waiting) = self.waiting.get_mut(op) {
                (waiting.call, waiting.late) = (newer, false);
            }
        }
        if let Some(flight) = self.flights.get_mut(&newer) {
            flight.waiters.extend(waiters);
        }
    }

    /// What it asked for is done, and its answer waits for who asks for attributes. It is told now, as nobody would tell the kernel of
    /// that later, unless that is to forget everything anyway: then nobody is told. False: it is not answered.
    pub(crate) fn answer_at_once(&mut self, op: OpId) -> bool {
        let found = self.behind.iter_mut().find_map(|behind| match &mut behind.what {
            What::Answers(ops, late) if ops.contains(&op) => {
                ops.retain(|other| *other != op);
                Some(late.clone())
            }
            _ => None,
        });
        let Some(late) = found else { return false };
        if self.waits_for_kernel() {
            self.take_back(late.answer);
            return false;
        }
        self.answer_late(&[op], late);
        true
    }

    /// What an answer made that nobody gets.
    fn take_back(&mut self, answer: Answer) {
        if let Answer::Created(_, opened) = &answer {
            self.release(self.clock, opened.fh, None);
        }
        if let Answer::Node(node) | Answer::Created(node, _) = answer {
            self.handle_forget(node.number, 1);
        }
    }

    /// Puts out what waits no longer.
    pub(crate) fn tell_due(&mut self) {
        while self.behind_due().is_some_and(|due| due <= self.clock)
            && let Some(Behind { what, .. }) = self.behind.pop_front()
        {
            self.put_out(what);
        }
    }

    /// Whether something waits here that the kernel is to be told.
    #[must_use]
    pub fn tells_late(&self) -> bool {
        !self.behind.is_empty()
    }

    /// When the first of them is due. Nobody is answered before all is forgotten that was held when the server went away.
    pub(crate) fn behind_due(&self) -> Option<Time> {
        let answers = |behind: &&Behind| matches!(behind.what, What::Answers(..));
        let first = self.behind.front().filter(|first| !(answers(first) && self.waits_for_kernel()))?;
        let is_asked = first.asked.iter().any(|op| self.waiting.contains_key(op));
        Some(if is_asked { first.latest } else { Time(0) })
    }

    /// Nothing is granted any more, and nobody answers: all is told at once.
    pub(crate) fn tell_all(&mut self) {
        for Behind { what, asked, latest } in std::mem::take(&mut self.behind) {
            match what {
                What::Forget(..) => self.put_out(what),
                What::Answers(..) => self.behind.push_back(Behind { what, asked, latest }),
            }
        }
    }
}

#[cfg(test)]
mod tests;
