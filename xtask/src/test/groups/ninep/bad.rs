//! Servers that do not speak 9P2000.L, or stop to: one clear error line, no hang, and recovery if possible.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nigh_ninep::{FrameReader, Rmessage, VERSION};

use crate::test::groups::badinput::refused;
use crate::test::mount::{Mount, MountParams};
use crate::test::over::{self, LinkKind};
use crate::test::world::{As, World};
use crate::wait;

/// A server's reply to a message: its bytes, given the tag. `None`: it closes the connection.
type Says = fn(u16) -> Option<Vec<u8>>;

/// Starts a server on a port of its own that always sends one reply.
fn fake(says: Says) -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || answer(&mut stream, says));
        }
    });
    Ok(port)
}

fn answer(stream: &mut TcpStream, says: Says) -> Option<()> {
    let mut frames = FrameReader::new(1 << 24);
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = stream.read(&mut buffer).ok().filter(|count| *count > 0)?;
        frames.take(&buffer[..count]);
        while let Some(frame) = frames.poll_frame().ok()? {
            stream.write_all(&says(frame.tag)?).ok()?;
        }
    }
}

pub fn at_mount(world: &World) -> Result<()> {
    let servers: [(Says, &str); 8] = [
        (|_| Some(Vec::new()), "does not answer"),
        (|_| None, "try again"),
        (
            |tag| Some(Rmessage::Version { msize: 65_536, version: b"9P2000.u".to_vec() }.encode(tag)),
            "9P2000.u",
        ),
        (|tag| Some(Rmessage::Version { msize: 12, version: VERSION.to_vec() }.encode(tag)), "12 bytes"),
        (|tag| Some(Rmessage::Lerror { errno: 13 }.encode(tag)), "EACCES"),
        (|tag| Some(Rmessage::Version { msize: 65_536, version: VERSION.to_vec() }.encode(tag ^ 1)), "tag"),
        (|_| Some(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()), "protocol error"),
        (|_| Some(vec![0xff; 64]), "protocol error"),
    ];
    let point = world.dir("refused-mnt", As::Us)?;
    for (says, names) in servers {
        let source = format!("9p://127.0.0.1:{}/tree", fake(says)?);
        refused(world, As::Us, &["mount", &source, &point.display().to_string()], &[1], names)
            .with_context(|| names.to_owned())?;
    }
    let nobody = format!("9p://127.0.0.1:{}/tree", over::free_port()?);
    refused(
        world,
        As::Us,
        &["mount", &nobody, &point.display().to_string()],
        &[1],
        "check that the server listens",
    )?;
    for wrong in ["9p://", "9p://host:port/x", "9p+unix://relative"] {
        refused(world, As::Us, &["mount", wrong, &point.display().to_string()], &[2], "want ")?;
    }
    for option in ["cache=fscache", "negtimeout=1s", "msize=1"] {
        let mount = ["mount", "9p://host/x", &point.display().to_string(), "-o", option];
        refused(world, As::Us, &mount, &[2], option)?;
    }
    Ok(())
}

/// A relay between a client and diod that on demand inserts other bytes.
struct Liar {
    port: u16,
    lies: Arc<AtomicBool>,
}

impl Liar {
    fn start(server: u16, lie: &'static [u8]) -> Result<Liar> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let port = listener.local_addr()?.port();
        let lies = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&lies);
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(("127.0.0.1", server)) else { continue };
                relay(&near, &far, &told, lie);
            }
        });
        Ok(Liar { port, lies })
    }
}

fn relay(near: &TcpStream, far: &TcpStream, lies: &Arc<AtomicBool>, lie: &'static [u8]) {
    for to_client in [false, true] {
        let (from, to) = if to_client { (far, near) } else { (near, far) };
        let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else { return };
        let lies = Arc::clone(lies);
        std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            while let Ok(count @ 1..) = from.read(&mut buffer) {
                let said = match to_client && lies.swap(false, Ordering::SeqCst) {
                    true => lie,
                    false => &buffer[..count],
                };
                if to.write_all(said).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        });
    }
}

/// A server that sends invalid data once: pending calls end, and the mount continues with another session.
pub fn in_the_midst(world: &World) -> Result<()> {
    let lies: [&'static [u8]; 4] = [
        &[255; 40],
        // A reply without a request: Rclunk with tag 999.
        &[7, 0, 0, 0, 121, 231, 3],
        // An unknown message type.
        &[7, 0, 0, 0, 250, 0, 0],
        &[3, 0, 0, 0, 1, 0, 0],
    ];
    for lie in lies {
        let liar = Liar::start(over::diod(world)?, lie)?;
        let (source, point) = (world.dir("nine", As::Us)?, world.dir("mnt", As::Us)?);
        std::fs::write(source.join("file"), "data")?;
        let mut how = MountParams::new(As::Us);
        how.over = Some((LinkKind::Ninep, Some(liar.port)));
        let mount = Mount::new(world, &source, &point, &how)?;
        ensure!(std::fs::read_to_string(point.join("file"))? == "data");
        liar.lies.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        match std::fs::metadata(point.join("another")) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound) => {}
            Err(error) if error.raw_os_error() == Some(libc::EIO) => {}
            other => bail!("{lie:?}: {other:?}"),
        }
        let took = begun.elapsed();
        ensure!(took < Duration::from_secs(5), "{lie:?}: it took {took:?}");
        let reads = || Ok(std::fs::read_to_string(point.join("file")).ok().as_deref() == Some("data"));
        let back = wait::holds(Duration::from_secs(10), reads)?;
        ensure!(back, "{lie:?}: the mount does not come back: {}", mount.said());
        let said = mount.said();
        ensure!(said.contains("protocol error"), "{lie:?}: the log does not say why: {said}");
        mount.unmount()?;
    }
    Ok(())
}
