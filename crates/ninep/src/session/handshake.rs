//! How a session begins, ends, and continues over another connection.

use super::config::Times;
use super::context::CallContext;
use super::greeting::{Greeting, Refusal};
use super::{DEAD_AFTER, PROBE_AFTER, Session, State};
use crate::error::{LEAST_MSIZE, VersionText};
use crate::frame::FrameReader;
use crate::{ProtocolError, Rmessage, Tmessage, VERSION};
use nigh_pathclient::TaskKind;
use nigh_remote::Event;
use nigh_types::{
    Attr, Errno, Features, Guarantees, NodeId, RemoteIds, SessionParams as Agreed, Span, Term, Time,
    UnsupportedGuarantee,
};

/// Negotiates the version, attaches, and reads the root's attributes.
async fn greet(cx: &CallContext) -> Greeting {
    let (msize, uid) = {
        let shared = cx.shared();
        (shared.config.msize, shared.config.uid)
    };
    let failed = |what| move |errno| Refusal::Error(what, errno);
    let version = Tmessage::Version { msize, version: VERSION.to_vec() };
    match cx.request(version).await.map_err(failed("version"))? {
        Rmessage::Version { version, .. } if version != VERSION => {
            return Err(Refusal::Rule(ProtocolError::Version(VersionText::of(&version))));
        }
        Rmessage::Version { msize: theirs, .. } if theirs < LEAST_MSIZE || theirs > msize => {
            return Err(Refusal::Rule(ProtocolError::Msize(theirs)));
        }
        Rmessage::Version { msize, .. } => cx.shared().msize = msize,
        _ => return Err(Refusal::Error("version", Errno::PROTO)),
    }
    let (fid, qid) = cx.attach(uid).await.map_err(failed("attach"))?;
    let root = {
        let mut shared = cx.shared();
        let root = shared.node(qid);
        shared.nodes.set_root(root);
        root
    };
    let (node, attr) = cx.attributes(&fid).await.map_err(failed("getattr"))?;
    if node != root || !attr.is_dir() {
        return Err(Refusal::Error("attach", Errno::NOTDIR));
    }
    Ok((node, attr))
}

impl Session {
    pub(super) fn set_now(&mut self, now: Time) {
        self.executor.set_now(now);
    }

    /// Takes a new connection and starts the handshake on it.
    pub(super) fn connect(&mut self, now: Time) {
        if self.state != State::Disconnected {
            return;
        }
        self.set_now(now);
        (self.state, self.greeted) = (State::Greeting, now);
        self.refusal = None;
        let msize = {
            let mut shared = self.cx.shared();
            shared.msize = shared.config.msize;
            shared.msize
        };
        self.frames = FrameReader::new(msize);
        self.begin(None, TaskKind::Ordinary, |cx| {
            Box::pin(async move {
                let greeting = greet(&cx).await;
                cx.shared().greeting = Some(greeting);
            })
        });
        self.run();
    }

    /// Handles the end of the handshake.
    pub(super) fn take_greeting(&mut self) {
        let greeting = self.cx.shared().greeting.take();
        match greeting {
            None => {}
            Some(Ok((root, root_attr))) => self.attached(root, root_attr),
            Some(Err(Refusal::Rule(error))) => self.abort(&error),
            Some(Err(Refusal::Error(what, errno))) => {
                let why = format!(
                    "T{what} was answered with {errno}: look at the server's log, or name another tree"
                );
                self.refusal = Some(why.clone());
                if self.established { self.drop_connection(&why) } else { self.lose(why) }
            }
        }
    }

    fn attached(&mut self, root: NodeId, root_attr: Attr) {
        self.state = State::Connected;
        let session = self.agreed(root, root_attr);
        if !self.established {
            self.established = true;
            self.event(Event::Attached(session));
            self.begin_waiting();
            return;
        }
        (self.reclaiming, self.lapsed) = (true, false);
        // Reclaim calls of an earlier session are meaningless, and a release's handle was forgotten with the
        // connection.
        self.unanswered.retain(|_, request| request.call.has_reply() && !request.call.is_reclaim());
        self.event(Event::Restored { session, kept: false });
        let given_up = std::mem::take(&mut self.cx.shared().cancelled);
        for call in given_up {
            if self.unanswered.contains_key(&call) {
                self.answer(call, Errno::INTR);
            }
        }
        self.waiting = self.unanswered.keys().copied().collect();
        self.resend = self.waiting.iter().copied().collect();
    }

    fn agreed(&self, root: NodeId, root_attr: Attr) -> Agreed {
        let shared = self.cx.shared();
        let config = &shared.config;
        let Times { names, absent, attributes } = config.times;
        // What ends at once is not worth reading in advance.
        let prefetches = config.times.prefetched() != Term::Limited(Span::ZERO);
        let span = |term| match term {
            Term::Session => Span::FOREVER,
            Term::Limited(span) => span,
        };
        let longest = span(names).max(span(absent)).max(span(attributes));
        let term = if longest == Span::FOREVER { Term::Session } else { Term::Limited(longest) };
        Agreed {
            guarantees: Guarantees {
                unsupported: unsupported_guarantees(&config.times),
                staleness_bound: staleness_bound(&config.times),
            },
            ids: RemoteIds { acts_as: (config.uid, config.gid), names: Vec::new() },
            supports: Features {
                prefetch: prefetches,
                prefetch_in_session: prefetches,
                reversed_prefetch: prefetches,
                uniform_rights: !config.all_users,
                rights_by_uid: config.all_users,
                ..Features::default()
            },
            ..Agreed::plain(root, root_attr, config.cookie_key, term)
        }
    }

    /// Gives up the connection. All outstanding calls are made again on the next one.
    pub(super) fn drop_connection(&mut self, why: &str) {
        self.drop_tasks();
        self.state = State::Disconnected;
        why.clone_into(&mut self.why);
        if !self.lapsed {
            self.lapsed = true;
            self.event(Event::Expired { why: why.to_owned() });
        }
    }

    fn drop_tasks(&mut self) {
        self.executor.clear();
        let dropped = self.cx.dropped.take();
        self.cx.shared().forget_connection();
        drop(dropped);
    }

    pub(super) fn lose(&mut self, why: String) {
        self.drop_tasks();
        self.state = State::Lost;
        self.unanswered.clear();
        self.waiting.clear();
        self.resend.clear();
        self.event(Event::Lost { why });
    }

    pub(super) fn abort(&mut self, error: &ProtocolError) {
        if self.state != State::Lost {
            self.lose(format!("protocol error of the server: {error}"));
        }
    }

    /// Probes a server that has been silent although a request is outstanding.
    pub(super) fn check_silence(&mut self, now: Time) {
        let (waits, heard, probed) = {
            let shared = self.cx.shared();
            (shared.messages.is_waiting(), shared.messages.last_heard, shared.messages.probed)
        };
        match self.state {
            State::Greeting if now >= self.greeted.after(super::HANDSHAKE_TIMEOUT) => {
                let why = "the server does not answer as a 9P server does";
                if self.established { self.drop_connection(why) } else { self.lose(why.to_owned()) }
            }
            State::Connected if !waits => {}
            State::Connected if now >= heard.after(DEAD_AFTER) => {
                self.drop_connection("the server has not answered for too long");
            }
            State::Connected if now >= heard.after(PROBE_AFTER) && !probed => {
                self.cx.shared().messages.probed = true;
                self.begin(None, TaskKind::Ordinary, |cx| {
                    Box::pin(async move {
                        let uid = cx.shared().config.uid;
                        if let Ok(root) = cx.root(uid).await {
                            let _ = cx.attributes(&root).await;
                        }
                    })
                });
            }
            _ => {}
        }
    }
}

fn shown(term: Term) -> String {
    match term {
        Term::Session => "until the mount ends".to_owned(),
        Term::Limited(Span::ZERO) => "not at all".to_owned(),
        Term::Limited(span) => format!("for {} ms", span.as_millis()),
    }
}

/// Staleness bound (S9), for people.
fn staleness_bound(times: &Times) -> String {
    format!(
        "it reports no changes, so names are believed {}, their absence {}, attributes and data {}",
        shown(times.names),
        shown(times.absent),
        shown(times.attributes)
    )
}

/// The guarantees that a 9P server cannot give.
fn unsupported_guarantees(times: &Times) -> Vec<UnsupportedGuarantee> {
    let limits = staleness_bound(times);
    let all = [
        ("S1", limits.as_str()),
        (
            "S4",
            "a change that was out when the connection ended is made again, if it was made or not; a file that got the number of one that is gone is taken for it until its attributes are asked",
        ),
        (
            "S5",
            "locks end with the connection, and are not taken again; other machines see the whole file locked, not ranges of it",
        ),
        ("S7", "a listing is as whole as the server's own is while others change the directory"),
    ];
    all.into_iter()
        .map(|(name, why)| UnsupportedGuarantee {
            name: name.to_owned(),
            why: why.to_owned(),
            by_protocol: true,
        })
        .collect()
}
