//! An emulated link: every byte arrives half a round trip after it was sent, in both directions.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

#[derive(Default)]
struct Pipe {
    /// Arrival time and bytes; empty bytes mark the end of the stream.
    in_flight: Mutex<VecDeque<(Instant, Vec<u8>)>>,
    changed: Condvar,
}

/// Returns the near end of a slow link to `far`.
pub fn slow(far: UnixStream, round_trip: Duration) -> io::Result<UnixStream> {
    let (near, ours) = UnixStream::pair()?;
    one_way(ours.try_clone()?, far.try_clone()?, round_trip / 2);
    one_way(far, ours, round_trip / 2);
    Ok(near)
}

fn one_way(mut from: UnixStream, mut to: UnixStream, delay: Duration) {
    let pipe = Arc::new(Pipe::default());
    let sending = Arc::clone(&pipe);
    thread::spawn(move || {
        let mut buffer = vec![0; 256 << 10];
        loop {
            let length = from.read(&mut buffer).unwrap_or(0);
            let mut under_way = sending.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
            under_way.push_back((Instant::now() + delay, buffer[..length].to_vec()));
            sending.changed.notify_one();
            if length == 0 {
                return;
            }
        }
    });
    thread::spawn(move || {
        loop {
            let (due, bytes) = next(&pipe);
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if bytes.is_empty() || to.write_all(&bytes).is_err() {
                let _ = to.shutdown(Shutdown::Both);
                return;
            }
        }
    });
}

fn next(pipe: &Pipe) -> (Instant, Vec<u8>) {
    let mut under_way = pipe.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if let Some(first) = under_way.pop_front() {
            return first;
        }
        under_way = pipe.changed.wait(under_way).unwrap_or_else(PoisonError::into_inner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_and_its_answer_take_a_round_trip() {
        let (far, mut server) = UnixStream::pair().unwrap();
        let mut near = slow(far, Duration::from_millis(20)).unwrap();
        let echo = thread::spawn(move || {
            let mut byte = [0];
            server.read_exact(&mut byte).unwrap();
            server.write_all(&byte).unwrap();
        });
        let begun = Instant::now();
        near.write_all(b"x").unwrap();
        let mut byte = [0];
        near.read_exact(&mut byte).unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(20), "{:?}", begun.elapsed());
        echo.join().unwrap();
        assert_eq!(near.read(&mut byte).unwrap(), 0, "the end travels too");
    }
}
