//! Places where workloads run: the null daemon, and nigh over a link.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::trees::{self, Sizes};
use crate::link::client::Emulator;
use crate::process;
use crate::test::mount::{Mount, MountParams, detach, device_of};
use crate::test::over::{self, LinkKind};
use crate::test::world::{As, World};
use crate::wait;

/// The null daemon, with the trees in it.
pub struct Null {
    pub point: PathBuf,
    pub control: PathBuf,
    child: Child,
}

impl Null {
    pub fn start(world: &World, sizes: &Sizes) -> Result<Null> {
        let point = world.dir("null", As::Us)?;
        let control = world.root.join("null.control");
        let mut command = world.command(world.xtask(), As::Us);
        command.arg("null-daemon").arg(&point).arg("--control").arg(&control);
        let child = command.stdin(Stdio::null()).process_group(0).spawn()?;
        let mut null = Null { point, control, child };
        let is_there = || Ok(device_of(&null.point).is_some() && process::listens(&null.control)?);
        wait::ready(&mut null.child, Duration::from_secs(10), is_there).context("the null daemon")?;
        trees::build(&null.point, sizes)?;
        Ok(null)
    }

    #[must_use]
    pub fn daemon(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Null {
    fn drop(&mut self) {
        detach(&self.point);
        process::end(&mut self.child, Duration::from_secs(3));
    }
}

/// The user's own server behind a link; each mount is a fresh client.
pub struct Distant<'w> {
    pub rtt: String,
    pub link: Emulator,
    pub source: PathBuf,
    host_timeout: String,
    /// The kind of link, and the emulator's port.
    over: (LinkKind, Option<u16>),
    /// Whether the data on the link is compressed.
    compress: bool,
    /// Keeps the server up while there is no other mount.
    _keeper: Mount<'w>,
}

impl<'w> Distant<'w> {
    pub fn start(
        world: &'w World,
        source: &Path,
        over: LinkKind,
        (rtt, bandwidth): (&str, &str),
        host_timeout: &str,
    ) -> Result<Distant<'w>> {
        let (idle, keep) = (world.dir("keeper-source", As::Us)?, world.dir("keeper", As::Us)?);
        let how = MountParams { over: Some((LinkKind::Local, None)), ..MountParams::new(As::Us) };
        let keeper = Mount::new(world, &idle, &keep, &how)?;
        let xtask = world.xtask();
        let server = match over {
            LinkKind::Nigh => Some(over::serve(world, As::Us)?),
            LinkKind::Ssh => Some(over::ssh_server(world)?),
            LinkKind::Local => None,
            LinkKind::Unix => bail!("over a socket of this machine the figures are those of `local`"),
            LinkKind::Ninep => {
                bail!("a 9P link has other times: `cargo xtask build9p` has its figures")
            }
        };
        let (link, near) = match server {
            Some(server) => {
                let near = over::free_port()?;
                let link = Emulator::on_ports(&xtask, &world.root, [near, server], rtt, bandwidth)?;
                (link, Some(near))
            }
            None => {
                let socket = world.server_socket(As::Us);
                (Emulator::start(&xtask, &world.root, &socket, rtt, bandwidth)?, None)
            }
        };
        let (rtt, host_timeout) = (rtt.to_owned(), host_timeout.to_owned());
        let source = source.to_owned();
        Ok(Distant { rtt, link, source, host_timeout, over: (over, near), compress: false, _keeper: keeper })
    }

    /// Sets whether the data on the link is compressed.
    #[must_use]
    pub fn compressed(self, compress: bool) -> Distant<'w> {
        Distant { compress, ..self }
    }

    /// Makes a fresh mount: its caches are cold, the server's are warm.
    pub fn mount(&self, world: &'w World) -> Result<Mount<'w>> {
        self.mount_with(world, &[])
    }

    /// Makes a fresh mount with more arguments.
    pub fn mount_with(&self, world: &'w World, arguments: &[&str]) -> Result<Mount<'w>> {
        self.mount_at(world, "distant-mnt", arguments)
    }

    /// Makes a fresh mount on a directory of this name.
    pub fn mount_at(&self, world: &'w World, name: &str, arguments: &[&str]) -> Result<Mount<'w>> {
        let point = world.root.join(name);
        fs::create_dir_all(&point)?;
        let mut how = MountParams::new(As::Us);
        if self.over.0 == LinkKind::Local {
            how = how.through(&self.link);
        }
        how.over = Some(self.over);
        if self.compress {
            how = how.with("-ocompress");
        }
        if !arguments.iter().any(|argument| argument.starts_with("--host-timeout=")) {
            how = how.with(&format!("--host-timeout={}", self.host_timeout));
        }
        let how = arguments.iter().fold(how, |how, argument| how.with(argument));
        Mount::new(world, &self.source, &point, &how)
    }
}
