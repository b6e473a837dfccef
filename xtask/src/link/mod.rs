//! The link emulator: a relay that delays bytes by half a round trip each way and paces them to a bandwidth. It counts
//! bytes and flights (a burst after silence in its direction), and with `--messages 9p` the messages to the server by
//! type.
//!
//! `--control unix:PATH` accepts one-line commands: `counts` (JSON), `pause`, `resume`, `cut` (ends all connections),
//! `down` (and refuses new ones), `up`, `quit`. On SIGTERM the emulator prints the counts.

pub mod client;
mod counts;
mod messages;
mod relay;
mod units;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

use relay::Link;

#[derive(clap::Args)]
pub struct Options {
    /// `unix:PATH` or `tcp:HOST:PORT`.
    #[arg(long)]
    listen: String,
    /// Where to connect for each connection that arrives.
    #[arg(long)]
    to: String,
    /// Round trip time, as `10ms`.
    #[arg(long, default_value = "10ms", value_parser = units::duration)]
    rtt: Duration,
    /// As `1Gbit`, `100Mbit`; each way.
    #[arg(long, default_value = "1Gbit", value_parser = units::bits_per_second)]
    bandwidth: u64,
    #[arg(long)]
    control: Option<String>,
    /// The protocol whose messages are counted.
    #[arg(long, value_parser = ["9p"])]
    messages: Option<String>,
}

static TERMINATED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_term(_: libc::c_int) {
    TERMINATED.store(true, Ordering::Relaxed);
}

pub fn run(options: &Options) -> Result<bool> {
    unsafe { libc::signal(libc::SIGTERM, on_term as *const () as libc::sighandler_t) };
    let link = Arc::new(Link::new(options.rtt, options.bandwidth, options.messages.is_some()));
    let listener = relay::Listener::bind(&options.listen).with_context(|| options.listen.clone())?;
    if let Some(control) = &options.control {
        let path = PathBuf::from(control.strip_prefix("unix:").unwrap_or(control));
        let listener = UnixListener::bind(&path).with_context(|| control.clone())?;
        let link = Arc::clone(&link);
        std::thread::spawn(move || serve_control(&listener, &link));
    }
    let accepting = Arc::clone(&link);
    let to = options.to.clone();
    std::thread::spawn(move || accepting.serve(&listener, &to));
    while !TERMINATED.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(5));
    }
    println!("{}", link.counts());
    Ok(true)
}

fn serve_control(listener: &UnixListener, link: &Link) {
    for stream in listener.incoming().flatten() {
        let _ = answer(&stream, link);
    }
}

fn answer(stream: &UnixStream, link: &Link) -> std::io::Result<()> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let said = match line.trim() {
        "counts" => link.counts().to_string(),
        "pause" => {
            link.pause(true);
            "paused".to_owned()
        }
        "resume" => {
            link.pause(false);
            "resumed".to_owned()
        }
        "cut" => {
            link.cut();
            "cut".to_owned()
        }
        "down" => {
            link.down(true);
            "down".to_owned()
        }
        "up" => {
            link.down(false);
            "up".to_owned()
        }
        "quit" => {
            TERMINATED.store(true, Ordering::Relaxed);
            "ending".to_owned()
        }
        other => format!("no command {other}"),
    };
    let mut stream = stream;
    writeln!(stream, "{said}")
}
