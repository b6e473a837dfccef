//! Histories over the fake server: replies and recalls arrive in any order, and sessions end at any moment.

use super::{Dice, RandomHistory, Workload};
use crate::world::{World, name_of};
use nigh_cache::{Config, NotifyLevel, OnDisconnect, Prefetch};
use nigh_remote::fake::{CallFilter, CallPlan};
use nigh_remote::model_fs::ModelFsConfig;
use nigh_types::{OpId, Span, Term};

/// The parameters of a history.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
    pub clients: u32,
    pub steps: u32,
    /// Whether the server pushes changes to clients instead of recalling their leases.
    pub pushes: bool,
}

/// Runs one history.
///
/// # Errors
/// Wrong data in a kernel or a reply, with the steps before it.
pub fn run(plan: Plan) -> Result<(), String> {
    let mut history = RandomHistory::new(plan);
    for step in 1..=plan.steps {
        history.act();
        history.world.observe();
        history.judge().map_err(|lie| {
            format!("seed {} step {step}: {lie}\n{}", plan.seed, history.world.trace.join("\n"))
        })?;
        let keep = history.world.trace.len().saturating_sub(400);
        history.world.trace.drain(..keep);
    }
    history.end().map_err(|lie| format!("seed {}: {lie}\n{}", plan.seed, history.world.trace.join("\n")))
}

impl RandomHistory {
    fn new(plan: Plan) -> RandomHistory {
        let mut dice = Dice::new(plan.seed);
        let bit = |n: u64| plan.seed >> n & 1 == 1;
        let pushes = plan.pushes;
        let (files, limited, tiny, losses) = (bit(0), bit(1), bit(2), bit(3));
        let small_files = files && plan.seed % 3 == 1;
        let kinds = Workload { files, limited, tiny, losses, small_files, pushes, ..Workload::default() };
        let parts = 1 + u32::try_from(dice.below(4)).unwrap_or(0);
        let config = ModelFsConfig {
            term: if kinds.limited { Term::Limited(Span::from_millis(40)) } else { Term::Session },
            chunk_entries: parts,
            // The check of a file's data identifies the file by its inode number.
            reuse_inos: dice.below(2) == 0 && !kinds.files,
            ..ModelFsConfig::default()
        };
        let mut history = RandomHistory::begin(World::new(config), kinds, dice);
        let RandomHistory { world, dice, .. } = &mut history;
        for number in 0..plan.clients {
            let level = [NotifyLevel::All, NotifyLevel::All, NotifyLevel::NoEpoch, NotifyLevel::None]
                [dice.below(4) as usize % 4];
            let budget_bytes = if kinds.tiny { 3_000 } else { 1 << 30 };
            let on_disconnect = match dice.below(8) {
                0 | 1 => OnDisconnect::Fail(Span::from_millis(1 + dice.below(100))),
                2 => OnDisconnect::Stale,
                _ => OnDisconnect::Wait,
            };
            let walks = (plan.seed / 16 + u64::from(number)).is_multiple_of(3);
            let prefetch = if walks { Prefetch::All } else { Prefetch::Auto };
            let gives_back = plan.seed % 11 == 3;
            let (most_dirs, kernel_inodes_most) = if gives_back { (2, 16) } else { (u64::MAX, 900_000) };
            let dir_timeout = gives_back.then_some(Span::from_millis(300));
            let config = Config {
                level,
                short_cookies: plan.seed % 7 == 5,
                names_first: plan.seed % 5 == 2,
                budget_bytes,
                on_disconnect,
                prefetch,
                prunes: true,
                kernel_inodes_most,
                most_dirs,
                dir_timeout,
                ..Config::default()
            };
            let at = world.connect_with(config);
            if plan.pushes {
                world.take_pushes(at);
            }
            world.clients[at].workers = [64, 64, 2, 1][dice.below(4) as usize % 4];
        }
        history.look_around();
        history
    }

    fn act(&mut self) {
        if self.workload.losses && self.dice.below(40) == 0 {
            return self.lose_or_return();
        }
        if self.workload.limited && self.dice.below(15) == 0 {
            // A request arrives before the timer that was due.
            self.world.timers_are_late = true;
            let span = Span::from_millis(1 + self.dice.below(40));
            self.world.advance(span);
            self.ask_something();
            self.world.timers_are_late = false;
            return self.world.advance(Span::ZERO);
        }
        match self.dice.below(100) {
            0..=69 => self.ask_something(),
            70..=79 => self.plan_delays(),
            80..=93 => {
                let span = Span::from_millis(1 + self.dice.below(20));
                self.world.advance(span);
            }
            94 | 95 => {
                // A caller is killed.
                let waiting: Vec<OpId> = self.begun.keys().copied().collect();
                if let Some(op) = waiting.first().copied() {
                    let at = (0..self.world.clients.len()).find(|at| self.world.is_pending(*at, op));
                    if let Some(at) = at {
                        self.world.interrupt(at, op);
                    }
                }
            }
            96 => {
                let at = self.client();
                match self.dice.below(2) {
                    0 => self.world.clients[at].hold_invalidations = true,
                    _ => self.world.clients[at].invalidates_slowly = true,
                }
            }
            97 if self.dice.below(20) == 0 => {
                let at = self.client();
                self.world.add_submount(at);
            }
            97 => self.go_or_come(),
            _ => {
                let at = self.client();
                self.world.release_notifications(at);
                self.world.end_slow_invalidation(at);
            }
        }
    }

    /// Expires a client's session, or restores it. Its machine may sleep a little longer.
    fn go_or_come(&mut self) {
        let at = self.client();
        let control = self.world.clients[at].control.clone();
        if self.away.remove(&at) {
            control.restore(self.dice.below(2) == 0);
        } else if !self.lost.contains(&at) {
            if self.dice.below(4) == 0 {
                let client = &mut self.world.clients[at];
                (client.hold_invalidations, client.asleep) = (true, true);
            }
            control.lapse("by chance");
            self.away.insert(at);
        }
        self.world.settle();
        self.world.observe();
    }

    /// Loses a client's session, or replaces a lost one.
    fn lose_or_return(&mut self) {
        let at = self.client();
        if self.lost.remove(&at) {
            return self.world.reconnect(at);
        }
        self.world.clients[at].control.lose("the link broke");
        self.world.settle();
        self.away.remove(&at);
        self.lost.insert(at);
    }

    fn plan_delays(&mut self) {
        let at = self.client();
        let control = self.world.clients[at].control.clone();
        control.plan_nothing();
        let fate = CallPlan {
            arrives_after: Span::from_millis(self.dice.below(8)),
            answered_after: Span::from_millis(self.dice.below(8)),
            chunk_pause: Span::from_millis(self.dice.below(4)),
            ungranted: self.dice.below(8) == 0,
            ..CallPlan::default()
        };
        if self.dice.below(4) > 0 {
            control.plan(CallFilter::Every, fate);
        }
    }

    /// Ends all delays; then every request must have a reply. A kernel without a free notifier worker may take ten
    /// seconds to invalidate.
    fn end(&mut self) -> Result<(), String> {
        for at in 0..self.world.clients.len() {
            if self.away.remove(&at) {
                self.world.clients[at].control.restore(at == 0);
            }
            self.world.clients[at].control.plan_nothing();
            self.world.release_notifications(at);
            self.world.end_slow_invalidation(at);
            if self.lost.remove(&at) {
                self.world.reconnect(at);
            }
        }
        for _ in 0..250 {
            self.world.advance(Span::from_millis(50));
            self.judge()?;
        }
        if let Some(at) = (0..self.world.clients.len()).find(|at| !self.world.has_drained_notifications(*at))
        {
            return Err(format!("{}'s kernel never forgets", name_of(at)));
        }
        match self.begun.keys().next() {
            None => Ok(()),
            Some(op) => Err(format!("{op:?} is never answered")),
        }
    }
}
