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
use nigh_types::{Attr, Call, CallId, NodeId, OpId, Reply, Response, Span, Time};
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
    Answers(Vec<OpId>, Answer, Option<Time>),
}

/// The inode to which a waiting answer leads by a name.
fn led_to(what: &What) -> Option<u64> {
    match what {
        What::Answers(_, Answer::Node(node) | Answer::Created(node, _), _) => Some(node.id.ino),
        _ => None,
    }
}

/// In their order.
pub(crate) type Behinds = VecDeque<Behind>;

impl Cache {
    /// Has the kernel forget, as soon as that is no harm to who reads.
    pub(crate) fn tell_behind(&mut self, id: Invalidation, stale: Vec<Stale>) {
        let asked = self.readers_of(&stale);
        self.put_behind(What::Forget(id, stale), asked);
    }

    /// Attributes that the kernel does not believe, and has not been told since it was to forget them, it need not forget: it would
    /// only not take in what it is answered next.
    pub(crate) fn leave_out_unbelieved(&mut self, stale: &mut Vec<Stale>) {
        stale.retain(|one| match one {
            Stale::Attr { ino } => {
                self.inodes.get_mut(ino).is_none_or(|inode| std::mem::take(&mut inode.attr_told))
            }
            _ => true,
        });
    }

    /// The same for an answer that the kernel takes for a later one, of these files. `sent`: when it was asked for, where it may bring
    /// attributes that are older than what others have been answered.
    pub(crate) fn answer_behind(&mut self, files: &[u64], ops: &[OpId], answer: Answer, sent: Option<Time>) {
        self.tell_due();
        let follows = files.iter().any(|ino| self.tells_of(*ino));
        let files: Vec<Stale> = files.iter().map(|ino| Stale::Attr { ino: *ino }).collect();
        let asked = self.readers_of(&files);
        if asked.is_empty() && !follows {
            return self.answer_no_older(ops, answer, sent);
        }
        self.put_behind(What::Answers(ops.to_vec(), answer, sent), asked);
    }

    /// Somebody is answered these attributes, and may read as far as they say until the next ones are taken in.
    pub(crate) fn note_told(&mut self, ino: u64, attr: Attr) {
        if self.reads_by_size(ino)
            && let Some(inode) = self.inodes.get_mut(&ino)
        {
            inode.last_told = Some(Box::new((self.clock, attr)));
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
            What::Answers(ops, answer, sent) => self.answer_late(&ops, answer, sent),
        }
    }

    /// What was to be believed for a while when it was put behind is so for what is left of that, if it still is.
    fn answer_late(&mut self, ops: &[OpId], mut answer: Answer, sent: Option<Time>) {
        match &mut answer {
            Answer::Node(node) | Answer::Created(node, _) => {
                node.entry_valid = node.entry_valid.min(self.still_named(node.id));
                node.attr_valid = node.attr_valid.min(self.still_told(node.id));
            }
            Answer::Attr(id, _, valid) => *valid = (*valid).min(self.still_told(*id)),
            _ => {}
        }
        self.answer_no_older(ops, answer, sent);
    }

    /// For how long the name that led to an inode last may be believed to do so now.
    fn still_named(&self, id: NodeId) -> Span {
        let now = self.clock;
        let named = || {
            let (dir, name) = self.inodes.get(&id.ino).filter(|inode| inode.id == id)?.home.as_ref()?;
            if self.is_ordered(now, *dir) || self.watches.is_telling(*dir) || self.holds.has_name(*dir, name)
            {
                return None;
            }
            let directory = self.dirs.get(dir)?;
            let held = directory.held.filter(|held| held.lives(now))?;
            let row = directory.rows.find(self.key.cookie(name.as_bytes()), name.as_bytes())?;
            row.child.as_ref().filter(|child| child.id == id)?;
            Some(self.config.level.name_validity(&held, now))
        };
        named().unwrap_or(Span::ZERO)
    }

    fn still_told(&self, id: NodeId) -> Span {
        let held = self.attr_of(self.clock, id).map(|(_, held)| held);
        held.map_or(Span::ZERO, |held| self.config.level.validity(&held, self.clock))
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
    pub(crate) fn reads_by_size(&self, ino: u64) -> bool {
        self.is_open(ino) && !self.dirs.contains_key(&ino)
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
    /// that later, unless that is to forget everything anyway. False: it was not.
    pub(crate) fn answer_at_once(&mut self, op: OpId) -> bool {
        if self.waits_for_kernel() {
            return false;
        }
        let found = self.behind.iter_mut().find_map(|behind| match &mut behind.what {
            What::Answers(ops, answer, sent) if ops.contains(&op) => {
                ops.retain(|other| *other != op);
                Some((answer.clone(), *sent))
            }
            _ => None,
        });
        let Some((answer, sent)) = found else { return false };
        self.answer_late(&[op], answer, sent);
        true
    }

    /// Puts out what waits no longer.
    pub(crate) fn tell_due(&mut self) {
        while self.behind_due().is_some_and(|due| due <= self.clock)
            && let Some(Behind { what, .. }) = self.behind.pop_front()
        {
            self.put_out(what);
        }
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
mod tests {
    use super::*;
    use crate::lookup::tests::{T0, cache};
    use crate::op::Caller;
    use crate::{Config, Op};
    use nigh_types::{
        Access, Attr, Call, Covers, Entry, Event, Grant, GrantId, Handle, Mode, Name, NodeId, Recall,
        RecallId, Reply, Response, SetAttr, Term,
    };

    const FILE: NodeId = NodeId { ino: 7, generation: 1 };

    fn attr(size: u64) -> Attr {
        Attr { mode: 0o100_644, nlink: 1, size, ..Attr::default() }
    }

    fn outputs(cache: &mut Cache) -> Vec<Output> {
        std::iter::from_fn(|| Some(cache.poll_output()).filter(|o| !matches!(o, Output::Timeout(..))))
            .collect()
    }

    fn ask(cache: &mut Cache, op: u64, what: Op) -> CallId {
        assert_eq!(cache.handle_op(T0, OpId(op), Caller::default(), what), None);
        let asked = outputs(cache).into_iter().rev().find_map(|output| match output {
            Output::Call { id, .. } => Some(id),
            _ => None,
        });
        asked.expect("the remote is asked")
    }

    fn answer(cache: &mut Cache, call: CallId, reply: Reply) -> Vec<Output> {
        cache.handle_event(T0, Event::Response { call, response: Response::plain(Ok(reply)) });
        outputs(cache)
    }

    fn answered(outputs: &[Output]) -> Vec<(u64, u64)> {
        let said = outputs.iter().filter_map(|output| match output {
            Output::Answer { op, answer: Answer::Attr(_, attr, _) } => Some((op.0, attr.size)),
            _ => None,
        });
        said.collect()
    }

    /// A file that is open, and of which nothing is granted.
    fn opened() -> Cache {
        let mut cache = cache(Config::default());
        let looked = ask(&mut cache, 1, Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() });
        let entry = Entry { id: FILE, attr: attr(1), target: None, no_xattrs: true };
        answer(&mut cache, looked, Reply::Looked(Some(entry)));
        let access = Access { read: true, write: false, truncate: false, direct: false, sync: false };
        let open = ask(&mut cache, 2, Op::Open { ino: 7, access, append: false });
        answer(&mut cache, open, Reply::Opened { handle: Handle(1), attr: attr(1) });
        cache
    }

    fn recall_data(cache: &mut Cache) -> Vec<Output> {
        let recall = Recall { id: RecallId(5), node: FILE, covers: Covers::Data, names: vec![] };
        cache.handle_event(T0, Event::Recall(recall));
        outputs(cache)
    }

    #[test]
    fn what_is_to_be_forgotten_of_a_file_waits_for_who_asks_how_long_it_is() {
        let mut cache = opened();
        let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
        assert_eq!(recall_data(&mut cache), []);
        let said = answer(&mut cache, asked, Reply::Attr(FILE, attr(2)));
        assert_eq!(answered(&said[..1]), [(3, 2)]);
        assert!(matches!(said[1..], [Output::Invalidate { .. }]), "{said:?}");
    }

    /// What takes a file's name away, or gives it one, and the reply.
    fn changes_of_names() -> [(Op, Reply); 3] {
        let name = |text: &[u8]| Name::new(text).unwrap();
        let (from, to, no_replace, exchange) = (1, 1, false, false);
        let rename = Op::Rename { from, name: name(b"g"), to, new_name: name(b"f"), no_replace, exchange };
        let moved = NodeId { ino: 8, generation: 1 };
        let attr = Attr { nlink: 2, ..attr(1) };
        let entry = Entry { id: FILE, attr, target: None, no_xattrs: true };
        [
            (Op::Unlink { dir: 1, name: name(b"f") }, Reply::Removed { node: FILE, kept: None }),
            (rename, Reply::Renamed { moved, replaced: Some(FILE), kept: None }),
            (
                Op::Link { ino: 7, dir: 1, name: name(b"h") },
                Reply::Made { entry, handle: None, existed: false },
            ),
        ]
    }

    #[test]
    fn who_takes_a_name_away_or_gives_one_waits_for_who_asks_how_long_the_file_is() {
        for (change, reply) in changes_of_names() {
            let mut cache = opened();
            let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
            let changed = ask(&mut cache, 4, change.clone());
            let said = answer(&mut cache, changed, reply);
            assert!(
                !said.iter().any(|o| matches!(o, Output::Answer { op: OpId(4), .. })),
                "{change:?}: {said:?}"
            );
            let said = answer(&mut cache, asked, Reply::Attr(FILE, attr(2)));
            let order: Vec<u64> = said.iter().filter_map(answered_op).collect();
            assert_eq!(order, [3, 4], "{change:?}: {said:?}");
        }
    }

    #[test]
    fn so_does_who_is_told_without_a_grant_what_a_name_leads_to() {
        let mut cache = opened();
        let look = Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() };
        let looked = ask(&mut cache, 4, look);
        let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
        let entry = Entry { id: FILE, attr: attr(1), target: None, no_xattrs: true };
        assert_eq!(answer(&mut cache, looked, Reply::Looked(Some(entry))), []);
        let said = answer(&mut cache, asked, Reply::Attr(FILE, attr(2)));
        assert_eq!(said.iter().filter_map(answered_op).collect::<Vec<_>>(), [3, 4]);
    }

    /// A lookup's answer waits for who asks for attributes, and the file is unlinked.
    #[test]
    fn a_name_that_leads_to_a_file_is_not_told_after_it_was_taken_away() {
        let mut cache = opened();
        let looked = ask(&mut cache, 4, Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() });
        let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
        let [(unlink, removed), ..] = changes_of_names();
        let unlinked = ask(&mut cache, 5, unlink);
        let entry = Entry { id: FILE, attr: attr(1), target: None, no_xattrs: true };
        let replies =
            [(looked, Reply::Looked(Some(entry))), (asked, Reply::Attr(FILE, attr(2))), (unlinked, removed)];
        for (call, reply) in replies {
            cache.handle_event(T0, Event::Response { call, response: Response::plain(Ok(reply)) });
        }
        assert_eq!(outputs(&mut cache).iter().filter_map(answered_op).collect::<Vec<_>>(), [3, 4, 5]);
    }

    /// Under a grant on the directory's names; its session is lost before the answer is given, or time passes.
    #[test]
    fn a_name_that_is_told_late_is_told_for_what_is_left() {
        for (lost, valid) in [(false, Span::from_millis(600)), (true, Span::ZERO)] {
            let mut cache = opened();
            let looked = ask(&mut cache, 4, Op::Lookup { dir: 1, name: Name::new(b"f").unwrap() });
            let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
            let attr2 = Attr { nlink: 2, ..attr(1) };
            let entry = Entry { id: FILE, attr: attr2, target: None, no_xattrs: true };
            let root = NodeId { ino: 1, generation: 1 };
            let mut response = Response::plain(Ok(Reply::Looked(Some(entry))));
            response.grants.push(Grant {
                id: GrantId(1),
                node: root,
                covers: Covers::Names,
                mode: Mode::Read,
                term: Term::Limited(Span::from_millis(1_000)),
                recallable: false,
                shared: false,
            });
            cache.handle_event(T0, Event::Response { call: looked, response });
            assert_eq!(outputs(&mut cache), []);
            let later = T0.after(Span::from_millis(400));
            if lost {
                cache.handle_event(later, Event::Lapsed { why: "silence".into() });
                for output in outputs(&mut cache) {
                    if let Output::Invalidate { id, .. } = output {
                        cache.handle_invalidated(later, id);
                    }
                }
            }
            let reply = Response::plain(Ok(Reply::Attr(FILE, Attr { nlink: 2, ..attr(2) })));
            cache.handle_event(later, Event::Response { call: asked, response: reply });
            cache.handle_timeout(later);
            let told = outputs(&mut cache).into_iter().find_map(|output| match output {
                Output::Answer { op: OpId(4), answer: Answer::Node(node) } => Some(node.entry_valid),
                _ => None,
            });
            assert_eq!(told, Some(valid), "{lost}");
        }
    }

    #[test]
    fn who_gives_a_name_is_not_told_that_the_file_is_as_long_as_before() {
        let mut cache = opened();
        let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
        let [.., (link, made)] = changes_of_names();
        let linked = ask(&mut cache, 4, link);
        let told = attr(5);
        answer(&mut cache, asked, Reply::Attr(FILE, told));
        let said = answer(&mut cache, linked, made);
        let node = said.iter().find_map(|output| match output {
            Output::Answer { op: OpId(4), answer: Answer::Node(node) } => {
                Some((node.attr.size, node.attr_valid))
            }
            _ => None,
        });
        assert_eq!(node, Some((5, Span::ZERO)));
    }

    #[test]
    fn nor_is_who_changes_its_mode_but_who_sets_its_length_is() {
        let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        for (set, size) in [(mode, 5), (SetAttr { size: Some(1), ..SetAttr::default() }, 1)] {
            let mut cache = opened();
            let asked = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
            let changed = ask(&mut cache, 4, Op::SetAttr { ino: 7, fh: None, set });
            answer(&mut cache, asked, Reply::Attr(FILE, attr(5)));
            let said = answer(&mut cache, changed, Reply::Attr(FILE, Attr { mode: 0o100_600, ..attr(1) }));
            let told = said.iter().find_map(|output| match output {
                Output::Answer { op: OpId(4), answer: Answer::Attr(_, attr, _) } => {
                    Some((attr.size, attr.mode))
                }
                _ => None,
            });
            assert_eq!(told, Some((size, 0o100_600)));
        }
    }

    #[test]
    fn who_is_killed_while_its_answer_waits_for_who_asks_has_done_what_it_did() {
        let mut cache = opened();
        ask(&mut cache, 3, Op::GetAttr { ino: 7 });
        let [(unlink, removed), ..] = changes_of_names();
        let unlinked = ask(&mut cache, 4, unlink);
        let said = answer(&mut cache, unlinked, removed);
        assert!(!said.iter().any(|output| matches!(output, Output::Answer { .. })), "{said:?}");
        cache.handle_interrupt(OpId(4), true);
        let said = outputs(&mut cache);
        assert!(said.contains(&Output::Answer { op: OpId(4), answer: Answer::Done }), "{said:?}");
    }

    fn answered_op(output: &Output) -> Option<u64> {
        if let Output::Answer { op, .. } = output { Some(op.0) } else { None }
    }

    #[test]
    fn and_for_nobody_for_more_than_a_second() {
        let mut cache = opened();
        ask(&mut cache, 3, Op::GetAttr { ino: 7 });
        assert_eq!(recall_data(&mut cache), []);
        let due = T0.after(ANSWERS_WAIT);
        assert_eq!(cache.poll_output(), Output::Timeout(due, crate::Reason::Behind));
        cache.handle_timeout(due);
        assert!(matches!(outputs(&mut cache)[..], [Output::Invalidate { .. }]));
    }

    #[test]
    fn who_asked_first_is_answered_with_who_asked_last() {
        let mut cache = opened();
        let first = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
        assert_eq!(cache.handle_op(T0, OpId(4), Caller::default(), Op::GetAttr { ino: 7 }), None);
        let again = answer(&mut cache, first, Reply::Attr(FILE, attr(2)));
        let [Output::Call { id: second, call: Call::GetAttr { .. }, .. }] = again[..] else {
            panic!("{again:?}")
        };
        assert_eq!(answered(&answer(&mut cache, second, Reply::Attr(FILE, attr(3)))), [(3, 3), (4, 3)]);
    }

    #[test]
    fn who_asked_before_a_recall_is_answered_with_who_asked_after_it() {
        let mut cache = opened();
        let first = ask(&mut cache, 3, Op::GetAttr { ino: 7 });
        recall_data(&mut cache);
        let second = ask(&mut cache, 4, Op::GetAttr { ino: 7 });
        assert_eq!(answered(&answer(&mut cache, first, Reply::Attr(FILE, attr(2)))), []);
        assert_eq!(answered(&answer(&mut cache, second, Reply::Attr(FILE, attr(3)))), [(3, 3), (4, 3)]);
    }

    #[test]
    fn attributes_that_the_kernel_does_not_believe_it_need_not_forget() {
        let mut cache = opened();
        let recall = Recall { id: RecallId(5), node: FILE, covers: Covers::Inode, names: vec![] };
        cache.handle_event(T0, Event::Recall(recall));
        assert_eq!(outputs(&mut cache), [Output::Acknowledge(RecallId(5))]);
    }
}
