//! Servers that speak 9P2000.L.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::process;
use crate::test::world::World;

/// A server, and what it exports.
pub struct Server {
    child: Child,
    pub port: u16,
    pub export: PathBuf,
}

/// How long one may take until it listens.
const PATIENCE: Duration = Duration::from_secs(10);

impl Server {
    /// diod as Debian has it: no authentication, ids as they come.
    pub fn diod(world: &World, export: &Path) -> Result<Server> {
        let program = process::which("diod")
            .or_else(|| Some("/usr/sbin/diod".into()).filter(|p: &PathBuf| p.is_file()));
        let program = program.context("diod is not installed: apt-get install diod")?;
        let port = free_port()?;
        let mut command = Command::new(program);
        command.args(["-f", "-n", "-N", "-l", &format!("127.0.0.1:{port}"), "-L", "stderr", "-e"]);
        Server::start(world, command.arg(export), port, export)
    }

    fn start(world: &World, command: &mut Command, port: u16, export: &Path) -> Result<Server> {
        fs::create_dir_all(export)?;
        let log = fs::File::create(world.root.join(format!("log/9p-{port}.log")))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("{command:?}"))?;
        let mut server = Server { child, port, export: export.to_owned() };
        let give_up = Instant::now() + PATIENCE;
        while server.connect().is_err() {
            ensure!(server.child.try_wait()?.is_none(), "{command:?} has ended");
            if Instant::now() > give_up {
                bail!("{command:?} does not listen");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    pub fn connect(&self) -> std::io::Result<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port that nobody listened on a moment ago.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}
