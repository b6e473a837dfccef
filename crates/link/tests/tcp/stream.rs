//! Data through a connection: both directions, non-blocking reads and writes, and the end of the stream.

use crate::test_server::House;
use nigh_link::{Kind, Link};
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// Sends in both directions at once, more than any buffer holds.
pub fn exchange(one: &Link, two: &Link) {
    fn bytes(seed: usize) -> Vec<u8> {
        (0..3_000_000_usize).map(|n| u8::try_from((n * 31 + n / 977 + seed) % 251).unwrap()).collect()
    }
    fn read(link: &Link, expected: &[u8]) {
        let mut all = Vec::new();
        let mut buffer = vec![0; 100_000];
        while all.len() < expected.len() {
            let count = link.read(&mut buffer).unwrap();
            assert_ne!(count, 0);
            all.extend_from_slice(&buffer[..count]);
        }
        assert!(all == expected);
    }
    thread::scope(|scope| {
        scope.spawn(|| one.write_all(&bytes(1)).unwrap());
        scope.spawn(|| two.write_all(&bytes(2)).unwrap());
        scope.spawn(|| read(one, &bytes(2)));
        scope.spawn(|| read(two, &bytes(1)));
    });
}

#[test]
fn tls_carries_both_directions_at_once_and_key_is_recognised_later() {
    let house = House::new(true, true);
    let client = house.target().connect().unwrap();
    assert!(client.note().unwrap().contains("sha256:"));
    let server = house.next().unwrap();
    assert_eq!((client.kind(), server.kind()), (Kind::Tls, Kind::Tls));
    exchange(&client, &server);
    client.shutdown();
    assert_eq!(server.read(&mut [0; 8]).unwrap(), 0);
    let again = house.target().connect().unwrap();
    assert_eq!(again.note(), None);
    assert_eq!(fs::read_to_string(house.path("known_servers")).unwrap().lines().count(), 1);
}

#[test]
fn write_after_end_of_stream_fails_for_any_length() {
    for (tls, theirs) in [(true, true), (true, false), (false, true), (false, false)] {
        let house = House::new(true, tls);
        let target = if tls { house.target() } else { house.plain() };
        let (client, server) = (target.connect().unwrap(), house.next().unwrap());
        if theirs {
            // With unread bytes, so that the stream is reset instead of closed.
            client.write_all(b"unread").unwrap();
            drop(server);
        } else {
            client.shutdown();
        }
        let long = vec![0; 100_000];
        while client.write_all(&long).is_ok() {}
        for length in [1, 10, 70_000] {
            assert!(client.write_all(&long[..length]).is_err(), "{length} bytes by {}", client.kind());
            assert!(client.write(&long[..length], false).is_err());
        }
    }
}

/// Reads all that is available without waiting.
fn read_all_now(link: &Link, size: usize) -> Vec<u8> {
    let (mut all, mut buffer) = (Vec::new(), vec![0; size]);
    loop {
        match link.read_now(&mut buffer) {
            Ok(count) => all.extend_from_slice(&buffer[..count]),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}");
                return all;
            }
        }
    }
}

fn is_readable(link: &Link, within: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let within = Timespec::try_from(within).unwrap();
    poll(&mut [PollFd::new(link, PollFlags::IN)], Some(&within)).unwrap() > 0
}

#[test]
fn nonblocking_read_drains_all_and_new_data_makes_the_descriptor_readable() {
    for tls in [true, false] {
        let house = House::new(true, tls);
        let target = if tls { house.target() } else { house.plain() };
        let client = target.connect().unwrap();
        let server = house.next().unwrap();
        let sent: Vec<u8> = (0..200_u8).cycle().take(9_000).collect();
        for size in [7, 4096, 1 << 16] {
            assert_eq!(read_all_now(&server, size), b"");
            assert!(
                !is_readable(&server, Duration::from_millis(20)),
                "nothing was left by {kind}",
                kind = server.kind()
            );
            // Several records; each read asks for less than one record.
            sent.chunks(3_000).for_each(|part| client.write_all(part).unwrap());
            let mut got = Vec::new();
            while got.len() < sent.len() {
                assert!(is_readable(&server, Duration::from_secs(10)), "{} of {}", got.len(), sent.len());
                got.extend(read_all_now(&server, size));
            }
            assert!(got == sent);
        }
        client.shutdown();
        assert!(is_readable(&server, Duration::from_secs(10)));
        assert_eq!(server.read_now(&mut [0; 8]).unwrap(), 0);
    }
}

#[test]
fn shutdown_wakes_threads_waiting_in_either_direction() {
    let house = House::new(true, true);
    let client = house.target().connect().unwrap();
    let server = house.next().unwrap();
    let reader = client.clone();
    let reader = thread::spawn(move || reader.read(&mut [0; 64]));
    let writer = client.clone();
    let writer = thread::spawn(move || while writer.write_all(&[7; 100_000]).is_ok() {});
    thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    client.shutdown();
    assert!(matches!(reader.join().unwrap(), Ok(0) | Err(_)));
    writer.join().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(1));
    drop(server);
}

#[test]
fn rest_of_partial_nonblocking_write_is_sent_once_by_blocking_write() {
    let house = House::new(true, true);
    let client = house.target().connect().unwrap();
    let server = house.next().unwrap();
    let bytes: Vec<u8> = (0..20_000_000_u32).map(|n| (n % 253) as u8).collect();
    let mut written = 0;
    while let Ok(count) = client.write(&bytes[written..], false) {
        written += count;
    }
    assert!(written > 0 && written < bytes.len());
    let rest = bytes[written..].to_vec();
    let writer = thread::spawn(move || client.write_all(&rest).map(|()| client));
    let mut all = Vec::new();
    let mut buffer = vec![0; 1 << 20];
    while all.len() < bytes.len() {
        let count = server.read(&mut buffer).unwrap();
        assert_ne!(count, 0);
        all.extend_from_slice(&buffer[..count]);
    }
    assert!(all == bytes);
    drop(writer.join().unwrap().unwrap());
}

#[test]
fn read_timeout_differs_from_end_of_stream() {
    let house = House::new(true, true);
    let client = house.target().connect().unwrap();
    let server = house.next().unwrap();
    server.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert_eq!(server.read(&mut [0; 8]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    drop(client);
    assert_eq!(server.read(&mut [0; 8]).unwrap(), 0);
}
