//! The native world with explicit scheduling: the caller chooses the next event. Time stands still, and any frame in
//! transit or any task that waits for a thread may be next.

use super::{End, Native, Net};
use crate::world::World;
use nigh_native::{FrameReader, MAX_BODY, Message};
use nigh_types::Time;
use std::cell::RefCell;
use std::fmt::{self, Write};
use std::rc::Rc;

/// A possible next event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Move {
    /// The next frame of a connection reaches the server,
    Up(u64),
    /// or the client,
    Down(u64),
    /// or the rest of an ended connection is lost.
    Lose(u64),
    /// A client gets a new connection.
    Connect(usize),
    /// A server thread takes up one of the waiting tasks.
    Work(usize),
    /// The server is killed and restarted; frames in transit to it are lost.
    Restart,
}

impl Move {
    /// Returns the client that the event changes besides the server, if any.
    pub(crate) fn of(self, native: &Native) -> Option<usize> {
        match self {
            Move::Down(link) | Move::Lose(link) | Move::Up(link) => {
                native.with(|net| net.links.get(&link).map(|link| link.client))
            }
            Move::Connect(at) => Some(at),
            Move::Work(_) | Move::Restart => None,
        }
    }
}

impl World<Native> {
    /// Replaces the shared server by a copy, so that this clone is independent.
    pub(crate) fn unshare(&mut self) {
        let net = Rc::new(RefCell::new(self.server.net.borrow().clone()));
        for client in &mut self.clients {
            client.remote = End { at: client.remote.at, net: Rc::clone(&net) };
        }
        self.server = Native { net };
    }

    /// Returns when the next timer of a client or the server is due.
    pub(crate) fn next_timer(&mut self) -> Time {
        let of_server = self.server.with(|net| net.server.timer(net.now));
        (0..self.clients.len()).map(|at| self.timer(at)).fold(of_server, Time::min)
    }

    /// Advances all clocks, and lets every component check its timers.
    pub(crate) fn pass_until(&mut self, moment: Time) {
        self.now = self.now.max(moment);
        let now = self.now;
        self.server.with(|net| {
            net.now = now;
            net.server.time_passes(now);
            net.carry();
        });
        self.observe();
        (0..self.clients.len()).for_each(|at| self.pass(at));
        self.settle();
    }

    pub(crate) fn make(&mut self, what: Move) {
        let now = self.now;
        self.server.with(|net| {
            net.now = net.now.max(now);
            net.make(what);
        });
        self.observe();
        self.settle();
    }
}

impl Native {
    /// Returns all possible events except a restart.
    pub(crate) fn moves(&self) -> Vec<Move> {
        self.with(|net| {
            let mut moves = Vec::new();
            moves.extend((0..net.server.due_work(net.now)).map(Move::Work));
            for (id, link) in &net.links {
                moves.extend((!link.up.is_empty()).then_some(Move::Up(*id)));
                moves.extend((!link.down.is_empty()).then_some(Move::Down(*id)));
                moves.extend((link.down.is_shut() && link.down.len() > 1).then_some(Move::Lose(*id)));
            }
            let waits = |at: &usize| net.ends[*at].reconnect_at.is_some();
            moves.extend((0..net.ends.len()).filter(waits).map(Move::Connect));
            moves
        })
    }

    /// Acknowledges each arriving frame to its sender at once, and gives a client that wants a new connection one at
    /// once; its hello may be in transit for any time.
    pub(crate) fn acknowledge_at_once(&self) {
        self.with(|net| net.acknowledges_at_once = true);
    }

    /// Sets all service times to zero.
    pub(crate) fn without_service_time(&self) {
        self.with(|net| net.server.dice = None);
    }

    /// Returns a client that owes an acknowledgement for which its own change waits.
    pub(crate) fn waits_for_itself(&self) -> Option<String> {
        self.with(|net| {
            let report = net.server.sequencer.report();
            let waits = |of: &nigh_lease::HolderReport| {
                let own = |id| report.changes.iter().any(|c| c.change == id && c.by == Some(of.holder));
                of.awaited_by.iter().copied().find(|id| own(*id))
            };
            report.holders.iter().find_map(|of| {
                waits(of).map(|change| format!("{change:?} of {:?} waits for that one itself", of.holder))
            })
        })
    }

    /// Writes leases and tasks that wait for a thread as text, equal for equal states.
    pub(crate) fn write_leases(&self, out: &mut String) -> fmt::Result {
        self.with(|net| net.server.write_leases(out))
    }

    /// Writes the server's sessions and frames in transit.
    pub(crate) fn write_connections(&self, out: &mut String) -> fmt::Result {
        self.with(|net| {
            net.server.write_sessions(out)?;
            write!(out, "{:?}{} ", net.frames_received, net.last_link)?;
            for (id, link) in &net.links {
                write!(out, "{id} {} {} {}", link.client, link.up.is_shut(), link.down.is_shut())?;
                for (pipe, packet) in
                    link.up.packets().map(|p| ('<', p)).chain(link.down.packets().map(|p| ('>', p)))
                {
                    out.push(pipe);
                    match packet {
                        Some(bytes) => messages(bytes, |message| write!(out, "{message:?}"))?,
                        None => out.push_str("end"),
                    }
                }
            }
            Ok(())
        })
    }

    /// Writes a client's end.
    pub(crate) fn write_end(&self, at: usize, out: &mut String) -> fmt::Result {
        self.with(|net| {
            let end = &net.ends[at];
            write!(out, "{:?}{:?}{}", end.session, end.link, end.reconnect_at.is_some())
        })
    }
}

fn messages(mut bytes: &[u8], mut each: impl FnMut(Message) -> fmt::Result) -> fmt::Result {
    let mut reader = FrameReader::new(MAX_BODY);
    while let Ok(Some(frame)) = reader.next(&mut bytes) {
        let message = Message::decode(&frame).map_err(|_| fmt::Error)?;
        each(message)?;
    }
    Ok(())
}

impl Net {
    fn make(&mut self, what: Move) {
        let now = self.now;
        match what {
            Move::Up(id) => {
                let packet = self.links.get_mut(&id).and_then(|link| link.up.take(now));
                match packet.flatten() {
                    Some(bytes) => {
                        self.server.heard(now, id, &bytes);
                        self.carry();
                        self.confirm(id, &bytes, true);
                    }
                    None => self.server.hung_up(now, id),
                }
            }
            Move::Down(id) => {
                let packet = self.links.get_mut(&id).and_then(|link| link.down.take(now));
                self.reaches(id, packet.flatten());
            }
            Move::Lose(id) => {
                self.links.get_mut(&id).into_iter().for_each(|link| link.down.lose());
                let packet = self.links.get_mut(&id).and_then(|link| link.down.take(now));
                self.reaches(id, packet.flatten());
            }
            Move::Connect(at) => {
                self.ends[at].down_until = Time(0);
                self.connect_again(at);
            }
            Move::Work(at) => self.server.work_at(now, at),
            Move::Restart => {
                self.frames_received.clear();
                self.restart();
                self.links.values_mut().for_each(|link| link.up.break_off());
            }
        }
        self.carry();
    }

    fn reaches(&mut self, id: u64, packet: Option<Vec<u8>>) {
        let Some(at) = self.links.get(&id).map(|link| link.client) else { return };
        let copy = packet.clone();
        self.hand(at, id, packet);
        copy.into_iter().for_each(|bytes| self.confirm(id, &bytes, false));
        if self.acknowledges_at_once && self.ends[at].reconnect_at.is_some() {
            self.make(Move::Connect(at));
        }
    }

    /// Acknowledges a frame to its sender. Then frames are not kept long for a retransmission on another connection,
    /// and more states are equal.
    fn confirm(&mut self, id: u64, bytes: &[u8], up: bool) {
        if !self.acknowledges_at_once {
            return;
        }
        let mut arrived = 0;
        let mut reader = FrameReader::new(MAX_BODY);
        let mut rest = bytes;
        while let Ok(Some(frame)) = reader.next(&mut rest) {
            arrived += u64::from(frame.frame_type.is_counted());
        }
        let (now, Some(session)) = (self.now, self.server.session_of(id)) else { return };
        let heard = self.frames_received.entry(session).or_default();
        let count = if up { &mut heard.0 } else { &mut heard.1 };
        *count += arrived;
        if arrived == 0 {
            return;
        }
        let said = Message::Received(*count).encode();
        match up {
            true => {
                let at = self.links.get(&id).map(|link| link.client);
                at.into_iter().for_each(|at| self.hand(at, id, Some(said.clone())));
            }
            false => self.server.heard(now, id, &said),
        }
    }
}
