//! Servers that speak 9P2000.L.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::process;
use crate::test::over::free_port;
use crate::test::packages;
use crate::test::world::World;

/// A server.
pub struct Server {
    child: Child,
    port: u16,
}

/// How long one may take until it listens.
const PATIENCE: Duration = Duration::from_secs(10);

impl Server {
    /// diod as Debian has it: no authentication, ids as they come.
    pub fn diod(world: &World, export: &Path) -> Result<Server> {
        Server::diod_on(world, export, free_port()?)
    }

    /// The same on that port.
    pub fn diod_on(world: &World, export: &Path, port: u16) -> Result<Server> {
        let program = process::which("diod")
            .or_else(|| Some("/usr/sbin/diod".into()).filter(|p: &PathBuf| p.is_file()));
        let program = program.context("diod is not installed: apt-get install diod")?;
        let mut command = Command::new(program);
        command.args(["-f", "-n", "-N", "-l", &format!("127.0.0.1:{port}"), "-L", "stderr", "-e"]);
        Server::start(world, command.arg(export), port, export)
    }

    /// unpfs, a small server from crates.io.
    pub fn unpfs(world: &World, export: &Path) -> Result<Server> {
        let program =
            packages::exerciser("unpfs").context("not installed (cargo install --locked unpfs@0.13.0)")?;
        let port = free_port()?;
        let mut command = Command::new(program);
        command.arg(format!("tcp!127.0.0.1!{port}"));
        fs::create_dir_all(export)?;
        Server::start(world, command.arg(export), port, export)
    }

    fn start(world: &World, command: &mut Command, port: u16, export: &Path) -> Result<Server> {
        fs::create_dir_all(export)?;
        let log = fs::File::create(world.root.join(format!("log/9p-{port}.log")))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("{command:?}"))?;
        let mut server = Server { child, port };
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
