//! Notifications to the service manager: sd_notify(3). Without a manager they do nothing.

use sd_notify::NotifyState;
use std::time::{Duration, Instant};

/// Environment variables by which a service manager addresses a process.
pub(super) const VARIABLES: [&str; 6] =
    ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];

/// Interval of status updates, unless a watchdog notification is due.
const STATUS_PAUSE: Duration = Duration::from_secs(1);

pub(super) struct Supervisor {
    listens: bool,
    /// Interval of watchdog notifications; `None` without a watchdog.
    watchdog: Option<Duration>,
    fed: Option<Instant>,
    status: String,
    looked: Option<Instant>,
}

impl Supervisor {
    pub fn new() -> Supervisor {
        // Half of the watchdog timeout, as sd_watchdog_enabled(3) advises.
        let watchdog = sd_notify::watchdog_enabled().map(|limit| limit / 2);
        let listens = std::env::var_os("NOTIFY_SOCKET").is_some();
        Supervisor { listens, watchdog, fed: None, status: String::new(), looked: None }
    }

    /// How long the loop may wait before the next [`Supervisor::turn`].
    pub fn pause(&self, longest: Duration) -> Duration {
        self.watchdog.map_or(longest, |every| longest.min(every / 2))
    }

    pub fn ready(&mut self, status: &str) {
        tell(&[NotifyState::Ready, NotifyState::Status(status)]);
        self.status = status.to_owned();
    }

    pub fn stopping(&mut self) {
        tell(&[NotifyState::Stopping]);
    }

    /// Sends due notifications. `status` takes the server's central locks: if these are stuck, the watchdog gets no
    /// notification.
    pub fn turn(&mut self, status: impl FnOnce() -> String) {
        let now = Instant::now();
        let due = |last: Option<Instant>, every: Duration| last.is_none_or(|at| now - at >= every);
        let feed = self.watchdog.is_some_and(|every| due(self.fed, every));
        if !self.listens || !(feed || due(self.looked, STATUS_PAUSE)) {
            return;
        }
        let status = status();
        self.looked = Some(now);
        if feed {
            tell(&[NotifyState::Watchdog]);
            self.fed = Some(now);
        }
        if status != self.status {
            tell(&[NotifyState::Status(&status)]);
            self.status = status;
        }
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "the service manager does not listen");
    }
}
