//! Calls in flight: what they are for, who waits, and what happened meanwhile.

use crate::cache::Cache;
use crate::locks::{Holder, Range};
use crate::op::{Answer, Caller, Fh, Op, Output};
use nigh_types::{
    Access, Attr, Bug, Call, CallId, Covers, Errno, Grant, Handle, Name, NodeId, OpId, Response, Time,
    planted,
};

mod seen;

pub(crate) use seen::{Learned, Seen};

/// What a call's reply is for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    Lookup {
        dir: u64,
        name: Name,
    },
    Attr {
        ino: u64,
    },
    List {
        dir: u64,
    },
    /// Names alone, for that open directory.
    Dirents {
        dir: u64,
        fh: Fh,
    },
    /// Directories that nobody has asked for yet.
    Ahead,
    Target {
        ino: u64,
    },
    Xattrs {
        ino: u64,
    },
    /// One value, which was too large for the set of all.
    Xattr {
        ino: u64,
    },
    Space {
        ino: u64,
    },
    Flags,
    Read {
        ino: u64,
        fh: Fh,
        offset: u64,
        size: u32,
    },
    Seek,
    Open {
        ino: u64,
        file: NewFile,
    },
    /// A name is made, and opened if `file` says how.
    Make {
        dir: u64,
        name: Name,
        file: Option<NewFile>,
    },
    Tmpfile {
        file: NewFile,
    },
    Remove {
        dir: u64,
        name: Name,
    },
    Rename {
        from: u64,
        name: Name,
        to: u64,
        new_name: Name,
        exchange: bool,
        whiteout: bool,
    },
    /// Attributes or xattrs of one inode are changed.
    Change {
        ino: u64,
        xattrs: bool,
    },
    Write {
        ino: u64,
        offset: u64,
        size: u64,
        /// Stores into a map, which the kernel writes back.
        flush: bool,
        /// The remote chooses where.
        append: bool,
        /// It goes past the kernel's pages, through that.
        direct: Option<Fh>,
    },
    Fsync {
        ino: u64,
    },
    Lock {
        holder: Holder,
        range: Range,
        wait: bool,
        /// The remote was asked to let the wait end.
        cancelled: bool,
    },
    Unlock {
        holder: Holder,
        /// Of the whole file: how many locks its holder had been granted.
        whole_after: Option<u64>,
        closing: bool,
    },
    TestLock,
    /// A file is opened again: the open file, or where there is none what pins the inode.
    Reopen {
        ino: u64,
        fh: Option<Fh>,
        handle: Handle,
    },
    /// A lock is taken again.
    Reclaim {
        holder: Holder,
        range: Range,
    },
    /// Is what the kernel holds of an open file still true?
    Renew {
        ino: u64,
    },
    /// The remote learns again how to reach an inode; then `then` is sent again.
    Walk {
        then: CallId,
    },
}

impl Purpose {
    /// Whether it is for a lock that a closing file or a dead caller leaves.
    pub(crate) fn ends_locks(&self) -> bool {
        matches!(self, Purpose::Unlock { closing: true, .. })
    }

    /// Whether it claims something from a session that has forgotten it.
    pub(crate) fn is_claim(&self) -> bool {
        matches!(self, Purpose::Reopen { .. } | Purpose::Reclaim { .. })
    }

    /// Whether it writes back stores into a map.
    pub(crate) fn is_flush(&self) -> bool {
        matches!(self, Purpose::Write { flush: true, .. })
    }

    /// Whether facts are learned from its reply.
    pub(crate) fn learns(&self) -> bool {
        !matches!(
            self,
            Purpose::Lock { .. }
                | Purpose::Unlock { .. }
                | Purpose::TestLock
                | Purpose::Reclaim { .. }
                | Purpose::Walk { .. }
                | Purpose::Space { .. }
                | Purpose::Seek
                | Purpose::Flags
        )
    }

    /// Whether it is to know what has happened since it was sent. (A lock may be waited for for hours.)
    pub(crate) fn minds(&self) -> bool {
        !matches!(self, Purpose::Lock { .. })
    }

    /// The names that a change binds or unbinds.
    pub(crate) fn names(&self) -> Vec<(u64, &Name)> {
        match self {
            Purpose::Make { dir, name, .. } | Purpose::Remove { dir, name } => vec![(*dir, name)],
            Purpose::Rename { from, name, to, new_name, .. } => vec![(*from, name), (*to, new_name)],
            _ => Vec::new(),
        }
    }

    /// Whether that is one of them.
    pub(crate) fn binds(&self, dir: u64, name: &Name) -> bool {
        self.names().contains(&(dir, name))
    }

    /// Whether one of them is of that directory.
    pub(crate) fn binds_in(&self, dir: u64) -> bool {
        self.names().iter().any(|(of, _)| *of == dir)
    }
}

/// A file about to be open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NewFile {
    pub append: bool,
    pub access: Access,
    pub caller: Caller,
}

/// How a waiting request is answered once the call has its reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Want {
    /// As the call's purpose says.
    Reply,
    Xattr {
        name: Vec<u8>,
        size: u32,
    },
    XattrNames {
        size: u32,
    },
    Page {
        fh: Fh,
        offset: nigh_types::Cookie,
        size: u32,
        plus: bool,
    },
    OpenDir {
        ino: u64,
    },
    /// Attributes for who looks an inode up by its number.
    Itself,
}

/// A request that waits.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    pub call: CallId,
    pub caller: Caller,
    pub want: Want,
    pub joined: bool,
    /// It came after the call was sent: an answer that was composed before it came is no answer to it,
    /// unless a grant says that nothing has changed since.
    pub late: bool,
    /// Open files that the request goes through.
    pub through: [Option<Fh>; 2],
}

#[derive(Clone, Debug)]
pub(crate) struct Flight {
    pub purpose: Purpose,
    /// [`Call::type_name`].
    pub kind: &'static str,
    /// Open files that it needs.
    pub handles: [Option<Handle>; 2],
    pub sent: Time,
    pub caller: Option<Caller>,
    /// Kept to be sent again after a walk; `None` where it never is.
    pub again: Option<Call>,
    /// How many walks were made for it.
    pub walks: usize,
    /// Set on mutations.
    pub sequence: Option<u64>,
    pub waiters: Vec<OpId>,
    pub seen: Seen,
    /// A part has arrived.
    pub begun: bool,
    /// Of a listing: what its parts were granted.
    pub grants: Vec<Grant>,
    /// A listing that cannot be kept: its rows.
    pub aside: Option<Box<crate::rows::Rows>>,
    /// A listing that was too large: what still comes is dropped.
    pub abandoned: bool,
    /// A recall of the data went by: what the reply puts into the kernel is dropped right after.
    pub drop_data: bool,
    /// Of a removal: the directory that the kernel believes to be there.
    pub goes: Option<NodeId>,
    /// Of a read: an own write of its pages was asked after it.
    pub overtaken: bool,
    /// The request, where stores into a map are written back: it may be begun again.
    pub flush: Option<Box<Op>>,
}

impl Flight {
    pub fn new(purpose: Purpose, kind: &'static str, sent: Time) -> Flight {
        Flight {
            purpose,
            kind,
            handles: [None; 2],
            sent,
            caller: None,
            again: None,
            walks: 0,
            sequence: None,
            waiters: Vec::new(),
            seen: Seen::default(),
            begun: false,
            grants: Vec::new(),
            aside: None,
            abandoned: false,
            drop_data: false,
            goes: None,
            overtaken: false,
            flush: None,
        }
    }

    /// Whether those facts were recalled after this call was sent: what it says of them may be older than
    /// what is known now.
    pub fn recalled(&self, node: NodeId, covers: Covers) -> bool {
        let tainted = self.seen.lapsed || self.seen.recalled.contains(&(node, covers));
        tainted && !planted(Bug::ForgetsRecalls)
    }

    /// Whether it is for a lock that nobody waits for any more.
    pub fn is_given_up(&self) -> bool {
        matches!(self.purpose, Purpose::Lock { cancelled, .. } if cancelled || self.waiters.is_empty())
    }

    /// Whether it is a change that nobody waits for any more.
    fn is_abandoned(&self) -> bool {
        self.sequence.is_some() && self.waiters.is_empty()
    }

    /// Whether what was learned of a name since this call was sent is something else than `id`.
    pub fn crossed(&self, dir: u64, name: &Name, id: Option<NodeId>) -> bool {
        self.seen.name(dir, name).is_some_and(|learned| learned.id != id)
    }

    /// Whether the answer to a change may be older than the grant on a directory's names: that was given since, and none came with it.
    pub fn may_precede_names(&self, dir: NodeId, grants: &[Grant]) -> bool {
        self.seen.granted.contains(&dir.ino) && self.granted(grants, dir, Covers::Names).is_none()
    }

    /// The grant of the reply on these facts, unless it was recalled on its way.
    pub fn granted<'a>(&self, grants: &'a [Grant], node: NodeId, covers: Covers) -> Option<&'a Grant> {
        if self.recalled(node, covers) { None } else { crate::grants::on(grants, node, covers) }
    }
}

impl Cache {
    /// Sends a call on which nobody waits yet.
    pub(crate) fn send(&mut self, now: Time, caller: Option<Caller>, purpose: Purpose, call: Call) -> CallId {
        self.next_call += 1;
        let id = CallId(self.next_call);
        if self.answers_stale() && !purpose.ends_locks() {
            // It is not put out, and nobody waits for it: see `wait`.
            return id;
        }
        let name = call.is_mutation().then(|| {
            let leaving = self.let_leave(&purpose);
            self.overlay.begin(leaving)
        });
        let handled = match &call {
            Call::Read { handle, .. } | Call::Write { handle, .. } => handle.is_some(),
            Call::Walk { .. } | Call::Ahead { .. } | Call::Dirents { .. } => true,
            _ => false,
        };
        let goes = self.directory_to_go(&purpose);
        tracing::trace!(target: "nigh::fetch", call = id.0, kind = call.type_name());
        self.flights.insert(
            id,
            Flight {
                handles: handles_of(&call),
                caller,
                again: (!handled).then(|| call.clone()),
                sequence: name.map(|n| n.sequence),
                goes,
                ..Flight::new(purpose, call.type_name(), now)
            },
        );
        self.out.push_back(Output::Call { id, caller, name, call });
        id
    }

    /// Lets a request wait for a call.
    pub(crate) fn wait(
        &mut self,
        op: OpId,
        caller: Caller,
        call: CallId,
        want: Want,
        joined: bool,
    ) -> Option<Answer> {
        if self.answers_stale() {
            return Some(Answer::Failed(Errno::IO));
        }
        self.counters.misses += 1;
        if let Some(flight) = self.flights.get_mut(&call) {
            flight.waiters.push(op);
        }
        self.waiting.insert(op, Waiting { call, caller, want, joined, late: joined, through: [None; 2] });
        None
    }

    /// Of those who wait, the ones that came after the call was sent.
    pub(crate) fn late(&self, waiters: &[OpId]) -> Vec<OpId> {
        waiters.iter().copied().filter(|op| self.waiting.get(op).is_some_and(|w| w.late)).collect()
    }

    /// An answer without a grant was too old for these: they wait for another one, sent after they came.
    pub(crate) fn ask_again(&mut self, now: Time, late: Vec<OpId>, purpose: Purpose, call: Call) {
        if late.is_empty() {
            return;
        }
        let id = self.send(now, None, purpose.clone(), call);
        for op in &late {
            if let Some(waiting) = self.waiting.get_mut(op) {
                waiting.call = id;
                waiting.late = false;
            }
        }
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.waiters = late;
        }
        self.enter_joins(id, purpose);
    }

    /// Sends a call for one request.
    pub(crate) fn ask(
        &mut self,
        now: Time,
        op: OpId,
        caller: Caller,
        purpose: Purpose,
        call: Call,
    ) -> Option<Answer> {
        let on_behalf = (call.is_mutation() || matches!(call, Call::Open { .. })).then_some(caller);
        let id = self.send(now, on_behalf, purpose, call);
        self.wait(op, caller, id, Want::Reply, false)
    }

    /// Answers a request that waited.
    pub(crate) fn answer(&mut self, op: OpId, answer: Answer) {
        if let Some(waiting) = self.waiting.remove(&op) {
            self.counters.waits += 1;
            self.counters.joins += u64::from(waiting.joined);
            self.say(op, answer);
        }
    }

    pub(crate) fn answer_all(&mut self, waiters: &[OpId], answer: &Answer) {
        for &op in waiters {
            self.answer(op, answer.clone());
        }
    }

    /// A call's response, or a part of it.
    pub(crate) fn handle_response(&mut self, now: Time, id: CallId, response: Response) {
        if let Some(&Purpose::List { dir }) = self.flights.get(&id).map(|flight| &flight.purpose) {
            // A deadline that passed in mid-listing puts what came so far aside, before more comes.
            self.names(now, dir);
        }
        let Some(mut flight) = self.flights.remove(&id) else { return };
        let lost_its_way = response.result == Err(Errno::STALE) && !flight.is_given_up();
        if lost_its_way && self.walk_again(now, id, &mut flight) {
            self.flights.insert(id, flight);
            return;
        }
        if let Purpose::List { dir } = flight.purpose {
            if let Some(flight) = self.handle_listed(now, id, dir, flight, response) {
                self.flights.insert(id, flight);
            }
            return self.after_listed(now, dir);
        }
        if let Purpose::Dirents { dir, fh } = flight.purpose {
            return self.dirents_arrived(now, id, (dir, fh), flight, response);
        }
        if matches!(flight.purpose, Purpose::Ahead) {
            self.walked(now, id, flight, response);
            return self.trim(now);
        }
        if let Some(sequence) = flight.sequence {
            self.overlay.finish(sequence);
        }
        self.leave_joins(id, &flight.purpose);
        self.number_anew(&flight, &response.grants);
        self.handle_reply(now, flight, response);
        self.trim(now);
    }

    /// The remote does not know how to reach an inode: leads it there, by names from the root, once
    /// for each inode that the call names.
    fn walk_again(&mut self, now: Time, id: CallId, flight: &mut Flight) -> bool {
        let Some(call) = &flight.again else { return false };
        let anchors = crate::places::anchors(call);
        let (node, names) = match (anchors.get(flight.walks), anchors[0]) {
            (Some(Some(node)), _) => (*node, self.path_to(*node)),
            // What is claimed may have moved by a change that was done and is not answered yet.
            (_, Some(node)) if flight.purpose.is_claim() && flight.walks == 1 => {
                let moved = self.path_by(node, |cache, at| cache.moved_home(at));
                (node, moved.filter(|moved| self.path_to(node).as_ref() != Some(moved)))
            }
            _ => return false,
        };
        let Some(names) = names else { return false };
        flight.walks += 1;
        self.send(now, None, Purpose::Walk { then: id }, Call::Walk { node, names });
        true
    }

    /// The walk has ended: what waited for it is sent again, or fails for good.
    pub(crate) fn after_walk(&mut self, now: Time, then: CallId, result: Result<(), Errno>) {
        let Some(flight) = self.flights.get_mut(&then) else { return };
        if flight.is_abandoned() {
            // It was not begun, so it is not made (S8).
            flight.again = None;
            return self.handle_response(now, then, Response::plain(Err(Errno::INTR)));
        }
        match (result, &flight.again) {
            (Ok(()), Some(call)) if !flight.is_given_up() => {
                flight.sent = now;
                let (call, caller) = (call.clone(), flight.caller);
                let name = flight.sequence.map(|s| self.overlay.name(s));
                self.out.push_back(Output::Call { id: then, caller, name, call });
            }
            _ => {
                if !flight.purpose.is_claim() {
                    flight.again = None;
                }
                self.handle_response(now, then, Response::plain(Err(Errno::STALE)));
            }
        }
    }
}

/// The attributes of an inode that a reply brought along.
pub(crate) fn attr_after(response: &Response, ino: u64) -> Option<Attr> {
    response.after.iter().find(|(node, _)| node.ino == ino).map(|(_, attr)| *attr)
}

/// The open files that a call names.
fn handles_of(call: &Call) -> [Option<Handle>; 2] {
    match call {
        Call::Read { handle, .. }
        | Call::Write { handle, .. }
        | Call::Seek { handle, .. }
        | Call::SetAttr { handle, .. }
        | Call::Fallocate { handle, .. }
        | Call::Fsync { handle, .. } => [*handle, None],
        Call::CopyRange { from_handle, to_handle, .. } => [*from_handle, *to_handle],
        _ => [None, None],
    }
}
