//! The event loop of all simulated clients, on one thread.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nigh_types::{Call, CallId, Credentials, Time};
use rustix::event::{Timespec, epoll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use super::caching_client::CachingClient;
use super::sim_client::{CompletedReply, EmulatedLink, SimClient};

/// Limit of the time to a reply.
const PATIENCE: Duration = Duration::from_secs(60);
/// Clients that send hello at a time: a server accepts few unauthenticated connections at once.
const HELLOS: usize = 16;

/// The timer's token among those of the members.
const TIMER: u64 = u64::MAX;

/// All simulated clients, by number from 0.
pub struct SimClients {
    pub clients: Vec<SimClient>,
    link: EmulatedLink,
    socket: PathBuf,
    export: String,
    /// Features that each client requests in its hello.
    features: u64,
    who: Credentials,
    epoll: OwnedFd,
    /// `epoll_wait` counts in ms, which is too coarse for an emulated link.
    timer: OwnedFd,
    /// Members with a pending deadline, by time; `due_of` is the deadline by member.
    due: BTreeSet<(Instant, usize)>,
    due_of: Vec<Option<Instant>>,
    buffer: Vec<u8>,
}

impl SimClients {
    pub fn new(socket: &Path, export: &str, features: u64) -> Result<SimClients> {
        let who = Credentials {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: Vec::new(),
            privileges: None,
        };
        let (epoll, timer) = (
            epoll::create(epoll::CreateFlags::CLOEXEC)?,
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?,
        );
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(TIMER), epoll::EventFlags::IN)?;
        Ok(SimClients {
            clients: Vec::new(),
            link: EmulatedLink { began: Instant::now(), delay: Duration::ZERO },
            socket: socket.to_owned(),
            export: export.to_owned(),
            features,
            who,
            epoll,
            timer,
            due: BTreeSet::new(),
            due_of: Vec::new(),
            buffer: vec![0; 1 << 18],
        })
    }

    /// Sets the round trip time; packets in transit keep theirs.
    pub fn set_round_trip(&mut self, rtt: Duration) {
        self.link.delay = rtt / 2;
    }

    /// Attaches more clients, and returns the number of the first.
    pub fn attach(&mut self, count: usize) -> Result<usize> {
        self.attach_all(count, false)
    }

    /// Attaches more clients with a cache.
    pub fn attach_readers(&mut self, count: usize) -> Result<usize> {
        self.attach_all(count, true)
    }

    fn attach_all(&mut self, count: usize, readers: bool) -> Result<usize> {
        let first = self.clients.len();
        let all = first + count;
        while self.clients.len() < all {
            let begun = self.clients.len();
            for number in begun..all.min(begun + HELLOS) {
                let stream = UnixStream::connect(&self.socket).context("the server's socket")?;
                let identity = number as u64 + 1;
                let mut member = SimClient::new(stream, self.link, identity, &self.export, self.features)?;
                member.cache = readers.then(|| Box::new(CachingClient::new(self.who.clone(), identity)));
                let events = epoll::EventFlags::IN;
                epoll::add(&self.epoll, &member.stream, epoll::EventData::new_u64(number as u64), events)?;
                self.clients.push(member);
                self.due_of.push(None);
                self.advance(number)?;
            }
            self.until("clients attach", |crowd| {
                crowd.clients[begun..].iter().all(|m| m.attached.is_some())
            })?;
        }
        Ok(first)
    }

    /// Sends a client's call.
    pub fn call(&mut self, number: usize, call: Call) -> Result<CallId> {
        let id = self.clients[number].call(self.link, &self.who, call);
        self.advance(number)?;
        Ok(id)
    }

    /// Acts on a reader's cache or kernel, and executes the consequences.
    pub fn with_reader<R>(
        &mut self,
        number: usize,
        act: impl FnOnce(&mut CachingClient, Time) -> R,
    ) -> Result<R> {
        let now = self.link.time(Instant::now());
        let reader = self.clients[number].cache.as_mut().context("it keeps nothing")?;
        let result = act(reader, now);
        self.advance(number)?;
        Ok(result)
    }

    pub fn reader(&self, number: usize) -> Option<&CachingClient> {
        self.clients[number].cache.as_deref()
    }

    /// Waits for a reply.
    pub fn answer(&mut self, number: usize, id: CallId) -> Result<CompletedReply> {
        self.until("an answer", |crowd| crowd.clients[number].answers.contains_key(&id))?;
        self.clients[number].answers.remove(&id).context("the answer is there")
    }

    /// Waits until all calls have replies.
    pub fn settle(&mut self) -> Result<()> {
        self.until("all answers", |crowd| crowd.clients.iter().all(|m| m.outstanding() == 0))
    }

    pub fn run_for(&mut self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.step(end)?;
        }
        Ok(())
    }

    pub fn until(&mut self, what: &str, mut is_so: impl FnMut(&SimClients) -> bool) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !is_so(self) {
            if Instant::now() > end {
                let lost = self.clients.iter().filter_map(|member| member.lost.as_ref());
                let lost: Vec<&String> = lost.collect();
                bail!("waited {} s until {what}; sessions that were lost: {lost:?}", PATIENCE.as_secs());
            }
            self.step(end)?;
        }
        Ok(())
    }

    /// Waits for an event, at most until `end`, and handles it.
    pub fn step(&mut self, end: Instant) -> Result<()> {
        let next = self.due.first().map_or(end, |(at, _)| end.min(*at));
        let wait = next.saturating_duration_since(Instant::now());
        let at_once = wait.is_zero().then(Timespec::default);
        if at_once.is_none() {
            let once = Itimerspec { it_interval: Timespec::default(), it_value: Timespec::try_from(wait)? };
            timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
        }
        let mut ready =
            [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 256];
        let count = match epoll::wait(&self.epoll, &mut ready[..], at_once.as_ref()) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => 0,
            Err(e) => return Err(e.into()),
        };
        for event in ready[..count].iter().filter(|event| event.data.u64() != TIMER) {
            let number = usize::try_from(event.data.u64())?;
            self.clients[number].receive(self.link, &mut self.buffer)?;
            if self.clients[number].closed {
                epoll::delete(&self.epoll, &self.clients[number].stream)?;
            }
            self.advance(number)?;
        }
        while let Some((_, number)) = self.due.first().copied().filter(|(at, _)| *at <= Instant::now()) {
            self.advance(number)?;
        }
        Ok(())
    }

    fn advance(&mut self, number: usize) -> Result<()> {
        let next = self.clients[number].advance(self.link)?;
        if let Some(before) = self.due_of[number].take() {
            self.due.remove(&(before, number));
        }
        self.due_of[number] = next;
        self.due.extend(next.map(|at| (at, number)));
        Ok(())
    }
}
