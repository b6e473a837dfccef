//! A mount with a guard: a process that hangs on it can be freed.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use super::over::{self, LinkKind};
use super::world::{As, World};
use crate::link::client::Emulator;
use crate::process::{self, CommandResult};
use crate::wait;

const READY_LIMIT: Duration = Duration::from_secs(20);

/// The parameters of a mount.
#[derive(Clone)]
pub struct MountParams {
    pub who: As,
    /// The daemon's environment variables.
    pub variables: Vec<(String, String)>,
    /// Arguments after `nigh mount SOURCE MOUNTPOINT`.
    pub arguments: Vec<String>,
    /// The link, if it is not that of the whole run; and the port through which it passes.
    pub over: Option<(LinkKind, Option<u16>)>,
}

impl MountParams {
    #[must_use]
    pub fn new(who: As) -> MountParams {
        MountParams { who, variables: Vec::new(), arguments: Vec::new(), over: None }
    }

    #[must_use]
    pub fn with(mut self, argument: &str) -> MountParams {
        self.arguments.push(argument.to_owned());
        self
    }

    /// Reaches the server through an emulated link.
    #[must_use]
    pub fn through(self, link: &Emulator) -> MountParams {
        self.set("NIGH_LINK", &link.socket.display().to_string())
    }

    #[must_use]
    pub fn set(mut self, name: &str, value: &str) -> MountParams {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }
}

impl MountParams {
    /// Returns the limit of the protocol's minor version.
    #[must_use]
    pub fn minor(&self) -> u32 {
        let asked = self.variables.iter().find(|(name, _)| name == "NIGH_FUSE_MINOR");
        asked.and_then(|(_, value)| value.parse().ok()).unwrap_or(u32::MAX)
    }
}

/// A mount by a daemon in the foreground, taken down when dropped.
pub struct Mount<'w> {
    world: &'w World,
    pub point: PathBuf,
    pub how: MountParams,
    daemon: Child,
    log: PathBuf,
    connection: Option<u32>,
}

impl<'w> Mount<'w> {
    /// Mounts, and waits until the mount responds.
    pub fn new(world: &'w World, source: &Path, point: &Path, how: &MountParams) -> Result<Mount<'w>> {
        let log = world.log();
        let file = File::create(&log)?;
        let mut command = world.command(world.nigh(), how.who);
        let (over, port) = how
            .over
            .unwrap_or_else(|| (*world.over.lock().unwrap_or_else(std::sync::PoisonError::into_inner), None));
        let (source, reached) = over::reach(world, over, source, how, port)?;
        command.arg("mount").arg(source).arg(point).arg("--foreground").args(&reached.arguments);
        command.envs(reached.variables.iter().cloned()).process_group(0);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let daemon = command.spawn()?;
        let point = point.to_owned();
        let mut mount = Mount { world, point, how: how.clone(), daemon, log, connection: None };
        mount.wait_until_ready()?;
        Ok(mount)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let end = Instant::now() + READY_LIMIT;
        while Instant::now() < end {
            if let Some(status) = self.daemon.try_wait()? {
                bail!("nigh mount ended with {status}: {}", self.said());
            }
            // The mount there may still be the dead mount of a killed daemon, whose attributes the kernel still
            // serves; statfs always asks the daemon. Between the two mounts there is neither.
            if let Some(device) = device_of(&self.point) {
                self.connection = connection_of(&self.point);
                let mut look = self.world.command("stat", self.how.who);
                look.arg("--file-system").arg(&self.point);
                if self.run(look, READY_LIMIT)?.ok() && device_of(&self.point) == Some(device) {
                    return Ok(());
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        bail!("no answer from the mount after {READY_LIMIT:?}: {}", self.said())
    }

    /// Runs a command that uses the mount. If it does not end in time, the connection is aborted.
    pub fn run(&self, command: Command, limit: Duration) -> Result<CommandResult> {
        let ended = self.world.run(command, limit)?;
        if ended.how == process::ExitKind::TimedOut {
            self.abort();
        }
        Ok(ended)
    }

    /// Frees every process that waits for this mount.
    pub fn abort(&self) {
        if let Some(id) = self.connection {
            abort_connection(id);
        }
    }

    #[must_use]
    pub fn daemon(&self) -> u32 {
        self.daemon.id()
    }

    /// Returns `nigh status --json`.
    pub fn status(&self) -> Result<Value> {
        let mut command = self.world.command(self.world.nigh(), self.how.who);
        command.arg("status").arg(&self.point).arg("--json").stdin(Stdio::null());
        let out = command.output()?;
        if !out.status.success() {
            bail!("nigh status: {}", String::from_utf8_lossy(&out.stderr).trim());
        }
        Ok(serde_json::from_slice(&out.stdout)?)
    }

    /// Returns `nigh status --server --json` of the user's own server.
    pub fn server_status(&self) -> Result<Value> {
        let mut command = self.world.command(self.world.nigh(), self.how.who);
        command.args(["status", "--server", "--json"]);
        let ended = self.world.run(command, READY_LIMIT)?;
        Ok(serde_json::from_str(&ended.said).unwrap_or(Value::String(ended.said)))
    }

    /// Returns the daemon's last output.
    #[must_use]
    pub fn said(&self) -> String {
        process::last_lines(&self.log)
    }

    /// Unmounts as a user would; an error if that does not succeed.
    pub fn unmount(mut self) -> Result<()> {
        let mut command = self.world.command(self.world.nigh(), self.how.who);
        command.arg("umount").arg(&self.point);
        let ended = self.world.run(command, Duration::from_secs(10))?;
        if !ended.ok() {
            bail!("nigh umount: {}", ended.tail(3));
        }
        if device_of(&self.point).is_some() {
            bail!("still mounted after nigh umount");
        }
        match process::wait(&mut self.daemon, Duration::from_secs(10))? {
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("the daemon ended with {status}: {}", self.said()),
            None => bail!("the daemon stays after nigh umount"),
        }
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        if device_of(&self.point).is_some() {
            let mut command = self.world.command(self.world.nigh(), self.how.who);
            command.arg("umount").arg(&self.point);
            let _ = self.world.run(command, Duration::from_secs(10));
        }
        if device_of(&self.point).is_some() {
            self.abort();
            detach(&self.point);
        }
        process::end(&mut self.daemon, Duration::from_secs(2));
    }
}

/// Aborts a FUSE connection by its number (the mount's minor device number).
pub fn abort_connection(id: u32) {
    let _ = fs::write(format!("/sys/fs/fuse/connections/{id}/abort"), "1");
}

/// Takes a mount out of the tree, in use or not.
pub fn detach(point: &Path) {
    for words in [&["umount", "--lazy"][..], &["fusermount3", "-u", "-z"]] {
        let status = Command::new(words[0]).args(&words[1..]).arg(point).stderr(Stdio::null()).status();
        if status.is_ok_and(|status| status.success()) {
            return;
        }
    }
}

/// Returns the minor device number of a mount, from the mount table only: a stat could hang.
#[must_use]
pub fn device_of(point: &Path) -> Option<u32> {
    device_in(&mount_table()?, point)
}

/// Returns the number of the FUSE connection mounted there, if any.
#[must_use]
pub fn connection_of(point: &Path) -> Option<u32> {
    let table = mount_table()?;
    let fuse: Vec<&str> = table.lines().filter(|line| line.contains(" - fuse")).collect();
    device_in(&fuse.join("\n"), point)
}

/// Mount points need not be valid UTF-8; invalid bytes show as U+FFFD, as in [`device_in`].
fn mount_table() -> Option<String> {
    fs::read("/proc/self/mountinfo").ok().map(|table| String::from_utf8_lossy(&table).into_owned())
}

fn device_in(table: &str, point: &Path) -> Option<u32> {
    let wanted = point.to_string_lossy().replace(' ', "\\040");
    let mut found = None;
    for line in table.lines() {
        let mut fields = line.split(' ').skip(2);
        let device = fields.next()?;
        if fields.nth(1) == Some(wanted.as_str()) {
            found = device.split_once(':').and_then(|(_, minor)| minor.parse().ok());
        }
    }
    found
}

/// Checks that no removed open file is left: sessions end a moment after their mounts.
pub fn no_orphans(source: &Path) -> Result<()> {
    let folder = source.join(".nigh-orphans");
    let left = || fs::read_dir(&folder).map_or(0, Iterator::count);
    let none = wait::holds(Duration::from_secs(5), || Ok(left() == 0))?;
    ensure!(none, "{} files are left in {}", left(), folder.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_lookup_returns_topmost_mount() {
        let table = "30 1 8:1 / / rw - ext4 /dev/a rw\n\
                     41 30 0:55 / /tmp/a rw - fuse.nigh x rw\n\
                     42 30 0:56 / /tmp/a rw - fuse.nigh x rw\n";
        assert_eq!(device_in(table, Path::new("/tmp/a")), Some(56));
        assert_eq!(device_in(table, Path::new("/tmp")), None);
    }
}
