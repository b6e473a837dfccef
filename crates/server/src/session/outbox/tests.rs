use super::*;
use nigh_link::tcp::{Acceptor, Target, Trust};
use nigh_native::Message;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

fn outbox() -> Arc<Outbox> {
    Arc::new(Outbox::new(Weak::new()))
}

/// A link with its writer thread.
fn pair(outbox: &Arc<Outbox>) -> (JoinHandle<()>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let number = outbox.connect(ours.into());
    let writer = Arc::clone(outbox);
    (std::thread::spawn(move || writer.write(number)), theirs)
}

/// Both ends of a link over TCP with TLS.
fn tls_pair() -> (Link, Link) {
    let dir = tempfile::tempdir().unwrap();
    let door = Acceptor::with_tls(&dir.path().join("server"), None).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (host, port) = ("127.0.0.1".into(), listener.local_addr().unwrap().port());
    let target = Target { host, port, trust: Trust::Known(dir.path().join("known")), token: None };
    let theirs = std::thread::spawn(move || target.connect().unwrap());
    let (stream, _) = listener.accept().unwrap();
    let ours = door.accept(stream).unwrap();
    (ours, theirs.join().unwrap())
}

/// Reads until the link ends.
fn read_to_end(link: &Link) -> Vec<u8> {
    let (mut all, mut buffer) = (Vec::new(), vec![0; 1 << 20]);
    loop {
        match link.read(&mut buffer).unwrap() {
            0 => return all,
            count => all.extend_from_slice(&buffer[..count]),
        }
    }
}

fn read_all(mut from: UnixStream) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut all = Vec::new();
        from.read_to_end(&mut all).unwrap();
        all
    })
}

#[test]
fn frames_arrive_whole_and_in_order_though_the_socket_is_full() {
    let outbox = outbox();
    let (writer, theirs) = pair(&outbox);
    let reader = read_all(theirs);
    let mut expected = Vec::new();
    for n in 100..250_u8 {
        let frame = vec![n; 10_000];
        expected.extend_from_slice(&frame);
        outbox.add([Arc::new(frame)], 0, 0);
        outbox.send();
    }
    outbox.end();
    writer.join().unwrap();
    assert!(reader.join().unwrap() == expected);
}

#[test]
fn client_that_does_not_read_loses_its_connection_and_may_reconnect() {
    let outbox = outbox();
    let (writer, theirs) = pair(&outbox);
    outbox.add([Arc::new(vec![100; 8 << 20])], 0, 0);
    outbox.send();
    assert!(!outbox.has_room());
    writer.join().unwrap();
    outbox.add([Arc::new(vec![101; 16])], 8 << 20, 8 << 20);
    assert!(!outbox.has_room(), "what is kept for it counts");
    let (writer, again) = pair(&outbox);
    outbox.add([Arc::new(vec![102; 16])], 0, 0);
    assert!(outbox.has_room());
    outbox.send();
    outbox.end();
    writer.join().unwrap();
    assert_eq!(read_all(again).join().unwrap(), [102; 16], "nothing of the connection before");
    drop(theirs);
}

#[test]
fn writer_of_replaced_link_does_not_touch_the_next_link() {
    let outbox = outbox();
    let (writer, _theirs) = pair(&outbox);
    outbox.add([Arc::new(vec![100; 4 << 20])], 0, 0);
    outbox.send();
    let (second, theirs) = pair(&outbox);
    writer.join().unwrap();
    let reader = read_all(theirs);
    outbox.disconnect(1);
    outbox.add([Arc::new(vec![103; 16])], 0, 0);
    outbox.send();
    outbox.end();
    second.join().unwrap();
    assert_eq!(reader.join().unwrap(), [103; 16]);
    assert_eq!(outbox.bytes().0, 0);
}

/// A count that overtook a later one would be taken for an invalid one.
#[test]
fn urgent_frames_follow_partly_sent_frame_and_precede_queued_ones_in_order() {
    let outbox = outbox();
    let frame = |number: u8| Arc::new(vec![number; 1 << 20]);
    let urgent = [Message::Received(5), Message::Pong(1, 6), Message::Received(7)];
    let urgent = urgent.map(|message| Arc::new(message.encode()));
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    ours.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
    let number = outbox.connect(ours.into());
    // The first frame does not fit into the socket buffer, so it is sent in part.
    outbox.add([frame(100), frame(101)], 0, 0);
    outbox.send();
    outbox.add(urgent.clone(), 0, 0);
    outbox.end();
    let writer = Arc::clone(&outbox);
    let writer = std::thread::spawn(move || writer.write(number));
    let mut all = Vec::new();
    theirs.read_to_end(&mut all).unwrap();
    writer.join().unwrap();
    let [a, b, c] = &urgent;
    assert!(all == [&frame(100)[..], a, b, c, &frame(101)].concat());
}

/// TLS seals a part of a frame before the socket accepts it, and reports nothing until the socket has accepted that
/// part whole.
#[test]
fn urgent_frame_does_not_split_partly_sent_tls_frame() {
    let outbox = outbox();
    let (ours, theirs) = tls_pair();
    ours.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
    // The socket accepts less than an adding thread sends.
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 16 << 10).unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&theirs, 16 << 10).unwrap();
    let number = outbox.connect(ours);
    let frames: Vec<FrameBytes> = (0..200_u8).map(|n| Arc::new(vec![100 + n % 150; 60_000])).collect();
    outbox.add(frames.iter().cloned(), 0, 0);
    outbox.send();
    let begun = {
        let queue = outbox.queue.lock();
        assert_eq!(queue.partly_sent, Some(0), "nothing of it is reported");
        frames.len() - queue.frames.len()
    };
    let pong = Arc::new(Message::Pong(1, 6).encode());
    outbox.add([Arc::clone(&pong)], 0, 0);
    outbox.end();
    let writer = Arc::clone(&outbox);
    let writer = std::thread::spawn(move || writer.write(number));
    let all = read_to_end(&theirs);
    writer.join().unwrap();
    let (before, after) = frames.split_at(begun + 1);
    let frames = before.iter().chain([&pong]).chain(after);
    assert!(all == frames.flat_map(|frame| frame.iter().copied()).collect::<Vec<u8>>());
}

#[test]
fn panic_while_sending_closes_the_connection() {
    let outbox = outbox();
    let (ours, theirs) = tls_pair();
    // The link has buffered these bytes, and treats a write of other bytes as a bug.
    while ours.write(&[7; 64 << 10], false).is_ok() {}
    outbox.connect(ours);
    outbox.add([Arc::new(vec![100; 16])], 0, 0);
    outbox.send();
    assert!(outbox.queue.lock().link.is_none());
    assert!(read_to_end(&theirs).iter().all(|byte| *byte == 7));
}

#[test]
fn finished_session_drops_frames_for_client_that_does_not_read() {
    let outbox = outbox();
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    let number = outbox.connect(ours.into());
    let writer = Arc::clone(&outbox);
    let writer = std::thread::spawn(move || writer.write(number));
    outbox.add([Arc::new(vec![100; 8 << 20]), Arc::new(vec![101; 16])], 0, 0);
    outbox.send();
    std::thread::sleep(Duration::from_millis(50));
    let begun = Instant::now();
    outbox.finish();
    writer.join().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5), "the link was waited for");
    assert_eq!(outbox.queue.lock().bytes, 0);
    assert!(read_all(theirs).join().unwrap().len() < 8 << 20);
}

#[test]
fn finish_sends_queued_frames_that_the_link_accepts() {
    let outbox = outbox();
    let (writer, theirs) = pair(&outbox);
    outbox.add([Arc::new(vec![102; 16])], 0, 0);
    outbox.send();
    outbox.finish();
    writer.join().unwrap();
    assert_eq!(read_all(theirs).join().unwrap(), [102; 16]);
}

#[test]
fn ending_link_closes_once_all_is_confirmed_or_after_timeout() {
    let outbox = outbox();
    let (writer, _theirs) = pair(&outbox);
    outbox.add([], 1, 1);
    outbox.end();
    std::thread::sleep(Duration::from_millis(50));
    assert!(!writer.is_finished());
    outbox.add([], 0, 0);
    outbox.send();
    let begun = Instant::now();
    writer.join().unwrap();
    assert!(begun.elapsed() < Outbox::DRAIN_TIME);
    let (writer, _theirs) = pair(&outbox);
    outbox.add([], 1, 1);
    writer.join().unwrap();
}

#[test]
fn queue_limit_follows_throughput_of_slow_link() {
    let mut pace = Throughput::default();
    assert_eq!(pace.queue_limit(), Outbox::QUEUE_LIMIT, "nothing is known yet");
    for _ in 0..20 {
        pace.note(100_000, Duration::from_millis(100));
    }
    assert!((900_000..1_100_000).contains(&pace.queue_limit()), "{}", pace.queue_limit());
    (0..50).for_each(|_| pace.note(1_000, Duration::from_millis(500)));
    assert_eq!(pace.queue_limit(), Outbox::QUEUE_LIMIT_LEAST);
    (0..50).for_each(|_| pace.note(50 << 20, Duration::from_millis(500)));
    assert_eq!(pace.queue_limit(), Outbox::QUEUE_LIMIT);
}

/// The polling thread of idle connections may be the one that adds frames.
#[test]
fn adding_thread_sends_limited_bytes_and_writer_sends_the_rest() {
    let outbox = outbox();
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 200 << 10).unwrap();
    let number = outbox.connect(ours.into());
    let frames = (100..106).map(|n| Arc::new(vec![n; 64 << 10]));
    outbox.add(frames.clone(), 0, 0);
    outbox.send();
    assert_eq!(outbox.bytes().1, Outbox::ADDER_BATCH, "though there is room for all");
    outbox.send();
    assert_eq!(outbox.bytes().1, Outbox::ADDER_BATCH);
    let reader = read_all(theirs);
    let writer = Arc::clone(&outbox);
    let writer = std::thread::spawn(move || writer.write(number));
    outbox.end();
    writer.join().unwrap();
    let all: Vec<u8> = frames.flat_map(|frame| frame.to_vec()).collect();
    assert!(reader.join().unwrap() == all);
}
