//! How a session begins, is resumed over another connection, lapses, and begins anew.

use super::{ClientSession, State};
use crate::ProtocolError;
use crate::frame::{FrameReader, MAX_BODY};
use crate::handshake::{
    COMPRESSED, Hello, LIST_NAMES, Limits, MAX_VERSION, MIN_VERSION, PREFETCH, REVERSED_PREFETCH, Refused,
    Resume, Resumed, UPDATES, Welcome,
};
use crate::message::Message;
use crate::retransmit::{Incoming, Outgoing};
use nigh_remote::{Event, Output, Reason, SessionParams};
use nigh_types::{Span, Time};

/// How long a client waits for the server's first message on a connection. The first time is longer, since the server
/// has much to open; on reconnection callers wait.
const HANDSHAKE_TIMEOUT: Span = Span::from_secs(30);
const RECONNECT_TIMEOUT: Span = Span::from_secs(10);

impl ClientSession {
    /// Why a connection is wanted, in place of one that has ended or has to end now; for people. `None`: none is
    /// wanted.
    #[must_use]
    pub fn wants_connection(&self) -> Option<&str> {
        (self.state == State::Disconnected).then_some(&self.why)
    }

    /// Whether the server has accepted the hello on the present connection.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        self.state == State::Connected
    }

    /// Whether frames may have compressed bodies ([`crate::compress`]) on the present connection.
    #[must_use]
    pub fn compresses(&self) -> bool {
        self.compresses
    }

    /// Whether the session is lost for good.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.state == State::Lost
    }

    /// Takes a new connection and sends hello on it. Does nothing if no connection is wanted.
    pub fn handle_connect(&mut self, now: Time) {
        if self.state != State::Disconnected {
            return;
        }
        self.state = State::Greeting;
        self.greeted = now;
        self.refused = None;
        self.compresses = false;
        self.frames = FrameReader::new(MAX_BODY);
        let resume = match (self.established, self.replaces) {
            (true, _) => Some(Resume { session_id: self.session_id, received: self.incoming.take_count() }),
            // No session has the number 0.
            (false, true) => Some(Resume { session_id: 0, received: 0 }),
            (false, false) => None,
        };
        self.send(&Message::Hello(Hello {
            min_version: MIN_VERSION,
            max_version: MAX_VERSION,
            features: self.config.features,
            client: self.config.client,
            incarnation: self.config.incarnation,
            attach: self.config.attach.clone(),
            term: self.config.term,
            moment: now.0,
            resume,
        }));
    }

    /// Gives up the connection; counted frames are sent again on the next one.
    pub(super) fn drop_connection(&mut self, why: &str) {
        self.state = State::Disconnected;
        why.clone_into(&mut self.why);
        self.outputs.retain(|output| !matches!(output, Output::Transmit(_)));
    }

    /// Ends all grants because the term has run out; the connection, if there is one, is given up.
    pub(super) fn lapse(&mut self, now: Time) {
        let asked = self.ping.1 > self.confirmed || now < self.confirmed.after(self.session_term);
        let why = match asked {
            true => "the server has not answered for too long",
            false => "the server was not asked for too long, and may have gone on without us",
        };
        self.lapsed = true;
        self.void_grants_of_calls();
        self.drop_connection(why);
        self.event(Event::Expired { why: why.to_owned() });
    }

    /// Whether the term has run out and [`Event::Expired`] was not yet emitted.
    pub(super) fn has_lapsed(&self, now: Time) -> bool {
        self.state != State::Lost && self.established && !self.lapsed && now >= self.lapses()
    }

    /// 0.9 of the session's term after the latest message that is known to have arrived.
    fn lapses(&self) -> Time {
        match self.session_term {
            Span::FOREVER => Time::FAR,
            Span(term) => self.confirmed.after(Span(term / 10 * 9)),
        }
    }

    /// The next moment at which something is due.
    pub(super) fn due(&self) -> (Time, Reason) {
        let end = match self.established && !self.lapsed {
            true => self.lapses(),
            false => Time::FAR,
        };
        let next = match self.state {
            State::Lost => return (Time::FAR, Reason::Idle),
            State::Disconnected => (Time::FAR, Reason::Idle),
            State::Greeting => {
                let again = self.established || self.replaces;
                (
                    self.greeted.after(if again { RECONNECT_TIMEOUT } else { HANDSHAKE_TIMEOUT }),
                    Reason::SessionEnd,
                )
            }
            State::Connected if self.session_term == Span::FOREVER => (Time::FAR, Reason::Idle),
            State::Connected => {
                let renewal = self.confirmed.max(self.ping.1).after(Span(self.session_term.0 / 3));
                (renewal, Reason::Renewal)
            }
        };
        if end <= next.0 && end != Time::FAR { (end, Reason::SessionEnd) } else { next }
    }

    pub(super) fn take_refused(&mut self, refused: Refused) {
        let why = refused.message.clone();
        self.refused = Some(refused);
        if self.established { self.drop_connection(&why) } else { self.lose(why) }
    }

    pub(super) fn take_welcome(&mut self, now: Time, welcome: Welcome) -> Result<(), ProtocolError> {
        let Welcome { version, features, session_id, session_term, limits, mut session, resumed } = welcome;
        if !(MIN_VERSION..=MAX_VERSION).contains(&version) {
            return Err(ProtocolError::Version(version));
        }
        self.compresses = features & self.config.features & COMPRESSED != 0;
        self.updates.agree(features & self.config.features & UPDATES != 0);
        session.supports.prefetch = features & self.config.features & PREFETCH != 0;
        session.supports.reversed_prefetch = features & self.config.features & REVERSED_PREFETCH != 0;
        session.supports.list_names = features & self.config.features & LIST_NAMES != 0;
        self.limits = limits;
        self.limits.max_data = self.limits.max_data.min(Limits::default().max_data);
        self.session_term = session_term;
        match resumed {
            Some(resumed) if self.established && session_id == self.session_id => {
                self.resume(now, session, resumed)?;
            }
            Some(_) => return Err(ProtocolError::Malformed("another session goes on than the one named")),
            None => {
                self.session_id = session_id;
                self.begin(session);
            }
        }
        self.send_waiting(now);
        Ok(())
    }

    /// Resumes the session.
    fn resume(&mut self, now: Time, session: SessionParams, resumed: Resumed) -> Result<(), ProtocolError> {
        self.outgoing.resume(resumed.received)?;
        self.state = State::Connected;
        if resumed.lapsed && !self.lapsed {
            self.void_grants_of_calls();
        }
        if resumed.lapsed || self.lapsed {
            self.lapsed = false;
            self.confirmed = self.greeted;
            self.event(Event::Restored { session, kept: true });
        }
        self.put_out();
        if self.session_term != Span::FOREVER {
            // The welcome renews nothing: a server sends it even to a suspect client, which gets no other reply.
            self.send_ping(now);
        }
        Ok(())
    }

    /// Begins a session that is new to the server.
    fn begin(&mut self, session: SessionParams) {
        self.state = State::Connected;
        self.confirmed = self.greeted;
        self.ping.1 = self.greeted;
        if !self.established {
            self.established = true;
            self.reclaiming = self.replaces;
            self.cookie_key = session.cookie_key;
            self.event(Event::Attached(session));
            return;
        }
        self.lapsed = false;
        self.reclaiming = true;
        (self.outgoing, self.incoming) = (Outgoing::default(), Incoming::default());
        self.recalls.begin_session();
        self.updates.forget();
        self.grants.begin_session();
        // A server that lost the secret of its ids has lost the cookie key with it.
        let same_ids = self.cookie_key == session.cookie_key;
        self.cookie_key = session.cookie_key;
        let finds_numbers = session.supports.lookup_number;
        self.event(Event::Restored { session, kept: false });
        self.requeue_calls(same_ids, finds_numbers);
    }
}
