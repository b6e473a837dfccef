//! Timer of the timer thread.

use nigh_types::Time;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::io;
use std::os::fd::OwnedFd;

/// A `CLOCK_BOOTTIME` timer: a time that passes during suspend has expired on resume.
pub(crate) struct Timer {
    fd: OwnedFd,
}

impl Timer {
    pub fn new() -> io::Result<Timer> {
        Ok(Timer { fd: timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC)? })
    }

    /// Replaces the expiry; `Time::FAR` disarms. Does not block.
    pub fn set(&self, at: Time) {
        // Zero would disarm the timer.
        let at = if at == Time::FAR { 0 } else { at.0.max(1) };
        let seconds = i64::try_from(at / 1_000_000_000).unwrap_or(i64::MAX);
        let nanos = i64::try_from(at % 1_000_000_000).unwrap_or(0);
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let once = Itimerspec { it_interval: never, it_value: Timespec { tv_sec: seconds, tv_nsec: nanos } };
        if let Err(error) = timerfd_settime(&self.fd, TimerfdTimerFlags::ABSTIME, &once) {
            unreachable!("a moment within the clock's range is refused: {error}");
        }
    }

    /// Waits until the expiry, as set or changed meanwhile; may return early.
    pub fn wait(&self) {
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot_time;
    use nigh_types::Span;
    use std::sync::Arc;

    #[test]
    fn timer_set_to_an_earlier_time_wakes_a_waiting_thread() {
        let alarm = Arc::new(Timer::new().unwrap());
        alarm.set(boot_time().after(Span::from_secs(60)));
        let waiting = Arc::clone(&alarm);
        let waiter = std::thread::spawn(move || {
            waiting.wait();
            boot_time()
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!waiter.is_finished());
        let at = boot_time().after(Span::from_millis(20));
        alarm.set(at);
        let woken = waiter.join().unwrap();
        assert!(woken >= at && woken.since(at) < Span::from_secs(10), "{woken:?}");
    }

    #[test]
    fn timer_set_to_a_past_time_expires_at_once_and_to_far_never() {
        let alarm = Arc::new(Timer::new().unwrap());
        alarm.set(Time(0));
        alarm.wait();
        alarm.set(Time(0));
        alarm.set(Time::FAR);
        let waiting = Arc::clone(&alarm);
        let waiter = std::thread::spawn(move || waiting.wait());
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!waiter.is_finished());
        alarm.set(Time(1));
        waiter.join().unwrap();
    }
}
