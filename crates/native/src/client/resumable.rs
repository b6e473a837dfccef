//! The client session as a [`ResumableRemote`], for the driver of a mount.

use super::{ClientConfig, ClientSession};
use nigh_remote::{Compressor, Counters, ResumableRemote};
use nigh_types::Time;

/// Returns a factory for one mount's sessions. It takes the time, and whether an earlier session was lost.
#[must_use]
pub fn sessions(config: ClientConfig) -> Box<dyn Fn(Time, bool) -> Box<dyn ResumableRemote> + Send> {
    Box::new(move |now, lost| {
        let config = config.clone();
        Box::new(match lost {
            true => ClientSession::after_lost(now, config),
            false => ClientSession::new(now, config),
        })
    })
}

impl ResumableRemote for ClientSession {
    fn handle_connect(&mut self, now: Time) {
        ClientSession::handle_connect(self, now);
    }

    fn handle_close(&mut self, why: &str) {
        ClientSession::handle_close(self, why);
    }

    fn wants_connection(&self) -> Option<&str> {
        ClientSession::wants_connection(self)
    }

    fn is_lost(&self) -> bool {
        ClientSession::is_lost(self)
    }

    fn is_connected(&self) -> bool {
        ClientSession::is_linked(self)
    }

    fn refusal(&self) -> Option<&str> {
        self.refused().map(|refused| refused.message.as_str())
    }

    fn counters(&self) -> Counters {
        ClientSession::counters(self).clone()
    }

    fn compressor(&self) -> Option<Compressor> {
        self.compresses().then_some(crate::compress)
    }

    fn kind(&self) -> &'static str {
        "native"
    }
}
