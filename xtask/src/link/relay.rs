//! Connections through the link: each direction has a thread that reads, and one that writes a chunk when it is due.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::counts::Direction;
use super::messages::{Cutter, Messages};

const CHUNK: usize = 64 * 1024;

/// One emulated link; all connections share its bandwidth.
pub struct Link {
    one_way: Duration,
    silence: Duration,
    bits_per_second: u64,
    paused: AtomicBool,
    /// New connections are closed at once.
    down: AtomicBool,
    /// Both ends of each connection since the latest cut.
    wires: Mutex<Vec<Wire>>,
    to_server: Lane,
    to_client: Lane,
    messages: Option<Mutex<Messages>>,
}

/// One direction: when the wire is free again, and its counters.
struct Lane {
    free: Mutex<Instant>,
    passed: Mutex<Direction>,
}

impl Lane {
    fn new() -> Lane {
        Lane { free: Mutex::new(Instant::now()), passed: Mutex::default() }
    }

    fn json(&self) -> Value {
        let passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        json!({ "bytes": passed.bytes, "flights": passed.flights })
    }
}

struct Chunk {
    due: Instant,
    bytes: Vec<u8>,
}

impl Link {
    #[must_use]
    pub fn new(rtt: Duration, bits_per_second: u64, counts_messages: bool) -> Link {
        Link {
            one_way: rtt / 2,
            silence: (rtt / 4).max(Duration::from_millis(1)),
            bits_per_second,
            paused: AtomicBool::new(false),
            down: AtomicBool::new(false),
            wires: Mutex::default(),
            to_server: Lane::new(),
            to_client: Lane::new(),
            messages: counts_messages.then(Mutex::default),
        }
    }

    #[must_use]
    pub fn counts(&self) -> Value {
        let messages =
            self.messages.as_ref().map(|m| m.lock().unwrap_or_else(PoisonError::into_inner).json());
        json!({ "to_server": self.to_server.json(), "to_client": self.to_client.json(), "messages": messages })
    }

    /// While paused, nothing is delivered; the pause adds to the delay.
    pub fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }

    /// Ends all connections; bytes in transit are lost.
    pub fn cut(&self) {
        for wire in self.wires.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            wire.end(Shutdown::Both);
        }
    }

    /// While down, every connection is closed.
    pub fn down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
        if down {
            self.cut();
        }
    }

    /// Relays every connection until the process ends. An error of one connection is reported, and does not affect
    /// others.
    pub fn serve(self: Arc<Self>, listener: &Listener, to: &str) {
        let mut said = String::new();
        loop {
            let relayed = match listener.accept() {
                Ok(_) if self.down.load(Ordering::SeqCst) => Ok(()),
                Ok(near) => Wire::connect(to)
                    .map_err(|e| format!("{to}: {e}"))
                    .and_then(|far| self.relay(&near, &far).map_err(|e| e.to_string())),
                Err(e) => {
                    std::thread::sleep(Duration::from_millis(20));
                    Err(format!("no connection: {e}"))
                }
            };
            if let Err(problem) = relayed
                && problem != said
            {
                eprintln!("link emulator: {problem}");
                said = problem;
            }
        }
    }

    fn relay(self: &Arc<Self>, near: &Wire, far: &Wire) -> io::Result<()> {
        let both = [near.duplicate()?, far.duplicate()?];
        self.wires.lock().unwrap_or_else(PoisonError::into_inner).extend(both);
        if self.down.load(Ordering::SeqCst) {
            self.cut();
        }
        for to_server in [true, false] {
            let (from, to) = if to_server { (near, far) } else { (far, near) };
            let (mut from, mut to) = (from.duplicate()?, to.duplicate()?);
            // The limit of chunks in transit; then the sender blocks, as on a real link.
            let (sender, receiver) = sync_channel(1024);
            let (reading, writing) = (Arc::clone(self), Arc::clone(self));
            std::thread::spawn(move || reading.read(to_server, &mut from, &sender));
            std::thread::spawn(move || writing.write(&mut to, &receiver));
        }
        Ok(())
    }

    fn read(&self, to_server: bool, from: &mut Wire, sender: &SyncSender<Chunk>) {
        let lane = if to_server { &self.to_server } else { &self.to_client };
        let mut buffer = vec![0; CHUNK];
        let mut cutter = Cutter::default();
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if let Some(messages) = self.messages.as_ref().filter(|_| to_server) {
                let mut messages = messages.lock().unwrap_or_else(PoisonError::into_inner);
                messages.passed(&mut cutter, &buffer[..count]);
            }
            let now = Instant::now();
            let length = u64::try_from(count).unwrap_or(u64::MAX);
            lane.passed.lock().unwrap_or_else(PoisonError::into_inner).arrived(now, length, self.silence);
            let due = self.due(lane, now, length);
            if sender.send(Chunk { due, bytes: buffer[..count].to_vec() }).is_err() {
                return;
            }
        }
    }

    /// Returns when the last byte has passed the wire and the distance.
    fn due(&self, lane: &Lane, now: Instant, bytes: u64) -> Instant {
        let on_wire = Duration::from_secs_f64(bytes as f64 * 8.0 / self.bits_per_second as f64);
        let mut free = lane.free.lock().unwrap_or_else(PoisonError::into_inner);
        *free = (*free).max(now) + on_wire;
        *free + self.one_way
    }

    fn write(&self, to: &mut Wire, receiver: &Receiver<Chunk>) {
        for chunk in receiver {
            sleep_until(chunk.due);
            while self.paused.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if to.write_all(&chunk.bytes).is_err() {
                return;
            }
        }
        to.end(Shutdown::Write);
    }
}

/// A sleep oversleeps by some 60 µs, too much for a link of 1 ms.
fn sleep_until(due: Instant) {
    let spin = Duration::from_micros(100);
    let left = due.saturating_duration_since(Instant::now());
    if left > spin {
        std::thread::sleep(left - spin);
    }
    while Instant::now() < due {
        std::hint::spin_loop();
    }
}

/// A listening socket.
pub enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    pub fn bind(address: &str) -> io::Result<Listener> {
        match address.strip_prefix("unix:") {
            Some(path) => UnixListener::bind(path).map(Listener::Unix),
            None => TcpListener::bind(address.strip_prefix("tcp:").unwrap_or(address)).map(Listener::Tcp),
        }
    }

    fn accept(&self) -> io::Result<Wire> {
        match self {
            Listener::Unix(listener) => listener.accept().map(|(stream, _)| Wire::Unix(stream)),
            Listener::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nodelay(true)?;
                Ok(Wire::Tcp(stream))
            }
        }
    }
}

/// One end of a connection.
enum Wire {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Wire {
    fn connect(address: &str) -> io::Result<Wire> {
        match address.strip_prefix("unix:") {
            Some(path) => UnixStream::connect(path).map(Wire::Unix),
            None => {
                let stream = TcpStream::connect(address.strip_prefix("tcp:").unwrap_or(address))?;
                stream.set_nodelay(true)?;
                Ok(Wire::Tcp(stream))
            }
        }
    }

    fn duplicate(&self) -> io::Result<Wire> {
        match self {
            Wire::Unix(stream) => stream.try_clone().map(Wire::Unix),
            Wire::Tcp(stream) => stream.try_clone().map(Wire::Tcp),
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Wire::Unix(stream) => stream.read(buffer),
            Wire::Tcp(stream) => stream.read(buffer),
        }
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Wire::Unix(stream) => stream.write_all(bytes),
            Wire::Tcp(stream) => stream.write_all(bytes),
        }
    }

    fn end(&self, how: Shutdown) {
        let _ = match self {
            Wire::Unix(stream) => stream.shutdown(how),
            Wire::Tcp(stream) => stream.shutdown(how),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An echoing server behind a link, and a client in front of it.
    fn echo_through(rtt: Duration, bits_per_second: u64) -> (Arc<Link>, TcpStream) {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = server.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = server.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            let mut buffer = vec![0; CHUNK];
            while let Ok(count @ 1..) = stream.read(&mut buffer) {
                stream.write_all(&buffer[..count]).unwrap();
            }
        });
        let listener = Listener::bind("tcp:127.0.0.1:0").unwrap();
        let Listener::Tcp(inner) = &listener else { unreachable!() };
        let address = inner.local_addr().unwrap();
        let link = Arc::new(Link::new(rtt, bits_per_second, false));
        let serving = Arc::clone(&link);
        std::thread::spawn(move || serving.serve(&listener, &to));
        let client = TcpStream::connect(address).unwrap();
        client.set_nodelay(true).unwrap();
        (link, client)
    }

    #[test]
    fn ping_through_relay_takes_round_trip_time() {
        let rtt = Duration::from_millis(20);
        let (link, mut client) = echo_through(rtt, 1_000_000_000);
        let mut times = Vec::new();
        for _ in 0..15 {
            let start = Instant::now();
            client.write_all(b"ping").unwrap();
            client.read_exact(&mut [0; 4]).unwrap();
            times.push(start.elapsed());
        }
        times.sort();
        assert!(times[0] >= rtt, "faster than the link: {:?}", times[0]);
        assert!(times[7] < rtt + Duration::from_millis(4), "median {:?}", times[7]);
        let counts = link.counts();
        assert_eq!(counts["to_server"]["bytes"], 60);
        assert_eq!(counts["to_server"]["flights"], 15);
        assert_eq!(counts["to_client"]["flights"], 15);
    }

    #[test]
    fn cut_ends_connections_and_down_link_closes_new_ones() {
        // A server that accepts connections, and sends nothing.
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = server.local_addr().unwrap().to_string();
        let listener = Listener::bind("tcp:127.0.0.1:0").unwrap();
        let Listener::Tcp(inner) = &listener else { unreachable!() };
        let address = inner.local_addr().unwrap();
        let link = Arc::new(Link::new(Duration::from_millis(2), 1_000_000_000, false));
        let serving = Arc::clone(&link);
        std::thread::spawn(move || serving.serve(&listener, &to));
        let connect = || {
            let client = TcpStream::connect(address).unwrap();
            client.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            client
        };
        let stands = |mut client: &TcpStream| match client.read(&mut [0; 4]) {
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
            Ok(count) => count > 0,
        };
        let client = connect();
        assert!(stands(&client));
        link.cut();
        assert!(!stands(&client), "it is cut");
        let client = connect();
        assert!(stands(&client));
        link.down(true);
        assert!(!stands(&client) && !stands(&connect()), "it is down");
        link.down(false);
        assert!(stands(&connect()), "it is up again");
    }

    #[test]
    fn failed_connection_does_not_end_relay() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = server.local_addr().unwrap().to_string();
        let listener = Listener::bind("tcp:127.0.0.1:0").unwrap();
        let Listener::Tcp(inner) = &listener else { unreachable!() };
        // Without a connecting client, accept fails.
        inner.set_nonblocking(true).unwrap();
        let address = inner.local_addr().unwrap();
        let link = Arc::new(Link::new(Duration::from_millis(2), 1_000_000_000, false));
        std::thread::spawn(move || link.serve(&listener, &to));
        std::thread::sleep(Duration::from_millis(100));
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(b"ping").unwrap();
        server.set_nonblocking(true).unwrap();
        let give_up = Instant::now() + Duration::from_secs(5);
        while let Err(error) = server.accept() {
            assert!(Instant::now() < give_up, "nothing is relayed: {error}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn relay_paces_bytes_to_bandwidth() {
        let (_link, client) = echo_through(Duration::from_millis(2), 80_000_000);
        let start = Instant::now();
        let mut writer = client.try_clone().unwrap();
        let writing = std::thread::spawn(move || writer.write_all(&vec![b'x'; 2_000_000]).unwrap());
        let mut reader = client;
        reader.read_exact(&mut vec![0; 2_000_000]).unwrap();
        writing.join().unwrap();
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(200), "2 MB at 80 Mbit/s in {took:?}");
        assert!(took < Duration::from_millis(400), "2 MB at 80 Mbit/s in {took:?}");
    }
}
