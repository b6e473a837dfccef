//! Waiting for a condition with a limit.

use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Waits until `look` returns a value; `None` at the limit. The pauses between looks grow to 20 ms.
pub fn until<T, E>(limit: Duration, mut look: impl FnMut() -> Result<Option<T>, E>) -> Result<Option<T>, E> {
    let end = Instant::now() + limit;
    let mut pause = Duration::from_micros(500);
    loop {
        if let Some(found) = look()? {
            return Ok(Some(found));
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Waits until a condition holds; `false` at the limit.
pub fn holds(limit: Duration, mut condition: impl FnMut() -> Result<bool>) -> Result<bool> {
    Ok(until(limit, || anyhow::Ok(condition()?.then_some(())))?.is_some())
}

/// Waits until a process that was just started is ready; an error if it ends before, or at the limit.
pub fn ready(child: &mut Child, limit: Duration, mut is_ready: impl FnMut() -> Result<bool>) -> Result<()> {
    let mut ended = None;
    let done = holds(limit, || {
        ended = child.try_wait()?;
        Ok(ended.is_some() || is_ready()?)
    })?;
    match ended {
        Some(status) => bail!("it ended with {status}"),
        None if done => Ok(()),
        None => bail!("it is not ready after {limit:?}"),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const SHORT: Duration = Duration::from_millis(5);

    #[test]
    fn condition_is_looked_at_until_it_holds_or_limit_has_passed() {
        let mut looks = 0;
        let third = holds(Duration::from_secs(10), || {
            looks += 1;
            Ok(looks == 3)
        });
        assert!(third.unwrap() && looks == 3);
        assert!(!holds(SHORT, || Ok(false)).unwrap());
        assert!(holds(SHORT, || bail!("no")).is_err());
    }

    #[test]
    fn process_that_ends_is_never_ready() {
        let mut child = Command::new("true").spawn().unwrap();
        assert!(ready(&mut child, Duration::from_secs(10), || Ok(false)).is_err());
        let mut child = Command::new("sleep").arg("10").spawn().unwrap();
        assert!(ready(&mut child, SHORT, || Ok(false)).is_err());
        assert!(ready(&mut child, SHORT, || Ok(true)).is_ok());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
