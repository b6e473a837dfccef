//! Where mounted tests work: a directory, the binaries, an ordinary user, and, as root, a mount
//! namespace of their own in which nothing outside is seen or left behind.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::over::{LinkKind, Serving};
use super::sample::Sample;
use super::table::{Table, Verdicts};
use crate::link::client::Emulator;
use crate::process::{self, CommandResult};
use crate::root;

/// Every directory of ours begins like this; `cargo xtask clean` goes by it.
pub const PREFIX: &str = "nigh-test-";
/// The ordinary user.
pub const TESTER: &str = "nightest";

/// What belongs to a directory of tests and has no disk behind it.
pub fn in_memory(root: &Path) -> Option<PathBuf> {
    Some(Path::new("/dev/shm").join(root.file_name()?))
}

/// Who runs a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum As {
    /// Whoever runs us.
    Us,
    /// The ordinary user.
    Tester { uid: u32, gid: u32 },
}

impl As {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            As::Us if root::is_root() => "root",
            _ => "user",
        }
    }
}

/// The size of tests that come in several sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Length {
    /// Some cells of each matrix, by a seed.
    Short,
    /// Every cell.
    Long,
    /// Every cell, and counts that take hours.
    Hours,
}

impl Length {
    /// The argument that asks for it.
    #[must_use]
    pub fn argument(self) -> Option<&'static str> {
        match self {
            Length::Short => None,
            Length::Long => Some("--long"),
            Length::Hours => Some("--hours"),
        }
    }
}

/// What mounted tests stand on.
pub struct World {
    pub root: PathBuf,
    pub short: bool,
    pub hours: bool,
    /// Which cells of a matrix a short run takes.
    pub sample: Sample,
    /// What the POSIX table gives in a local directory, by user and size.
    pub controls: Mutex<BTreeMap<(&'static str, u32), Verdicts>>,
    pub tester: Option<As>,
    /// How mounts reach their servers, unless they say so themselves.
    pub over: Mutex<LinkKind>,
    /// Servers that were started for that, by what they are.
    pub servers: Mutex<BTreeMap<String, Serving>>,
    made: Vec<PathBuf>,
    logs: AtomicU32,
}

impl World {
    /// Builds the binaries, makes the directory and the user. Fails with what a person can mend.
    pub fn new(nigh: Option<&Path>, length: Length) -> Result<World> {
        let made = if root::is_root() { own_namespace()? } else { Vec::new() };
        let root = std::env::temp_dir().join(format!("{PREFIX}{}", std::process::id()));
        super::ending::clean_up_at_signals(&root)?;
        fs::create_dir_all(root.join("bin"))?;
        fs::create_dir_all(root.join("log"))?;
        for dir in ["", "bin"] {
            fs::set_permissions(root.join(dir), fs::Permissions::from_mode(0o755))?;
        }
        let mut world = World {
            root,
            short: length == Length::Short,
            hours: length == Length::Hours,
            sample: Sample::new(length == Length::Short),
            controls: Mutex::default(),
            tester: None,
            over: Mutex::new(LinkKind::Local),
            servers: Mutex::default(),
            made,
            logs: AtomicU32::new(0),
        };
        world.open_device()?;
        world.copy_binaries(nigh)?;
        world.tester = world.find_tester()?;
        Ok(world)
    }

    /// The POSIX table in the size of this run.
    #[must_use]
    pub fn table(&self) -> Table<'static> {
        if self.short { Table::SMALL } else { Table::EVERYDAY }
    }

    #[must_use]
    pub fn nigh(&self) -> PathBuf {
        self.root.join("bin/nigh")
    }

    /// A command of ours as somebody, with that user's own directories for state and sockets.
    #[must_use]
    pub fn command(&self, program: impl AsRef<Path>, who: As) -> Command {
        let mut command = Command::new(program.as_ref());
        let home = self.root.join(match who {
            As::Us => "home",
            As::Tester { .. } => "home-tester",
        });
        if let As::Tester { uid, gid } = who {
            command.uid(uid).gid(gid);
        }
        if who != As::Us || !root::is_root() {
            command.env("XDG_RUNTIME_DIR", home.join("run")).env("XDG_STATE_HOME", home.join("state"));
        }
        command.env("HOME", &home).current_dir(&self.root);
        command
    }

    /// This program, where every user may run it.
    #[must_use]
    pub fn xtask(&self) -> PathBuf {
        self.root.join("bin/xtask")
    }

    /// Starts an emulated link to this process's own server; `rtt` as `10ms`.
    pub fn link(&self, rtt: &str) -> Result<Emulator> {
        Emulator::start(&self.xtask(), &self.root, &self.server_socket(As::Us), rtt, "1Gbit")
    }

    /// The socket on which that user's server listens.
    #[must_use]
    pub fn server_socket(&self, who: As) -> PathBuf {
        match who {
            As::Us if root::is_root() => PathBuf::from("/run/nigh/serve.sock"),
            As::Us => self.root.join("home/run/nigh/serve.sock"),
            As::Tester { .. } => self.root.join("home-tester/run/nigh/serve.sock"),
        }
    }

    /// Runs to its end or its limit.
    pub fn run(&self, command: Command, limit: Duration) -> Result<CommandResult> {
        let program = command.get_program().to_string_lossy().into_owned();
        process::run(command, limit, &self.log()).context(program)
    }

    /// A new file for what a process says.
    pub fn log(&self) -> PathBuf {
        self.root.join("log").join(self.logs.fetch_add(1, Ordering::Relaxed).to_string())
    }

    /// A new, empty directory that belongs to `who`.
    pub fn dir(&self, name: &str, who: As) -> Result<PathBuf> {
        // The cleanup after a signal would not see what the next test makes.
        super::ending::leave_to_signal();
        let path = self.root.join(name);
        while super::mount::device_of(&path).is_some() {
            // A test that failed left it; the next one begins clean.
            if let Some(id) = super::mount::connection_of(&path) {
                super::mount::abort_connection(id);
            }
            process::output(Command::new("umount").arg("--lazy").arg(&path))?;
        }
        if path.exists() {
            fs::remove_dir_all(&path).with_context(|| path.display().to_string())?;
        }
        fs::create_dir_all(&path)?;
        self.give(&path, who)?;
        Ok(path)
    }

    /// A directory of the tests that no disk is behind, if there is one: what is said there is said however busy that is.
    #[must_use]
    pub fn in_memory(&self) -> PathBuf {
        let dir = in_memory(&self.root).filter(|dir| fs::create_dir_all(dir).is_ok());
        dir.unwrap_or_else(|| self.root.clone())
    }

    pub fn give(&self, path: &Path, who: As) -> Result<()> {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
        if let As::Tester { uid, gid } = who {
            chown(path, Some(uid), Some(gid))?;
        }
        Ok(())
    }

    /// What lies in a directory, too.
    pub fn give_all(&self, dir: &Path, who: As) -> Result<()> {
        if let As::Tester { uid, gid } = who {
            for entry in fs::read_dir(dir)? {
                chown(entry?.path(), Some(uid), Some(gid))?;
            }
        }
        self.give(dir, who)
    }

    /// The users that run tests: this process's user; if that is root, the ordinary user too.
    #[must_use]
    pub fn users(&self) -> Vec<As> {
        let tester = self.tester.filter(|who| *who != As::Us);
        std::iter::once(As::Us).chain(tester).collect()
    }

    /// The users that can mount: an ordinary user needs `fusermount3`.
    #[must_use]
    pub fn mounting_users(&self) -> Vec<As> {
        if process::which("fusermount3").is_some() { self.users() } else { vec![As::Us] }
    }

    /// Runs tests whose mounts reach their servers over that link.
    pub fn over<T>(&self, over: LinkKind, tests: impl FnOnce() -> T) -> T {
        let set = |over| {
            let mut now = self.over.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            std::mem::replace(&mut *now, over)
        };
        let before = set(over);
        let result = tests();
        set(before);
        result
    }

    /// In the profile in which this program was built.
    fn copy_binaries(&self, nigh: Option<&Path>) -> Result<()> {
        let built = if cfg!(debug_assertions) {
            super::build::programs()?
        } else {
            super::build::released(nigh.is_none())?;
            root::target().join("release")
        };
        fs::copy(nigh.unwrap_or(&built.join("nigh")), self.nigh())?;
        fs::copy(built.join("nigh-posix"), self.root.join("bin/nigh-posix"))?;
        fs::copy("/proc/self/exe", self.xtask())?;
        Ok(())
    }

    /// fusermount3 opens the device with its caller's permission. Where only root may, the namespace gets a
    /// node of its own that all may open, as distributions make it.
    fn open_device(&self) -> Result<()> {
        let device = Path::new("/dev/fuse");
        let closed = fs::metadata(device).is_ok_and(|m| m.permissions().mode() & 0o006 != 0o006);
        if !root::is_root() || !closed {
            return Ok(());
        }
        let dir = self.root.join("dev");
        fs::create_dir_all(&dir)?;
        process::output(
            Command::new("mount").args(["-t", "tmpfs", "-o", "mode=0755", "nigh-test"]).arg(&dir),
        )?;
        let node = dir.join("fuse");
        process::output(Command::new("mknod").args(["-m", "666"]).arg(&node).args(["c", "10", "229"]))?;
        process::output(Command::new("mount").arg("--bind").arg(&node).arg(device))?;
        Ok(())
    }

    /// Root makes an ordinary user where there is none; an ordinary user is one.
    fn find_tester(&self) -> Result<Option<As>> {
        if !root::is_root() {
            for dir in ["home", "home/run", "home/state"] {
                fs::create_dir_all(self.root.join(dir))?;
            }
            fs::set_permissions(self.root.join("home/run"), fs::Permissions::from_mode(0o700))?;
            return Ok(Some(As::Us));
        }
        let known = Command::new("id").args(["-u", TESTER]).output().is_ok_and(|o| o.status.success());
        if !known {
            let useradd = process::which("useradd").unwrap_or_else(|| "useradd".into());
            let home = ["--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"];
            // No password fits `*`; without one sshd takes the user for locked out.
            let made = Command::new(useradd)
                .args(home)
                .args(["--shell", "/bin/sh", "--password", "*", TESTER])
                .status();
            if !made.is_ok_and(|s| s.success()) {
                return Ok(None);
            }
        }
        let number = |flag: &str| -> Result<u32> {
            Ok(process::output(Command::new("id").args([flag, TESTER]))?.trim().parse()?)
        };
        let who = As::Tester { uid: number("-u")?, gid: number("-g")? };
        for dir in ["home-tester", "home-tester/run", "home-tester/state"] {
            self.dir(dir, who)?;
        }
        fs::set_permissions(self.root.join("home-tester/run"), fs::Permissions::from_mode(0o700))?;
        fs::create_dir_all(self.root.join("home"))?;
        Ok(Some(who))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.servers.get_mut().map(BTreeMap::clear).ok();
        super::clean::below(&self.root);
        for dir in self.made.iter().rev() {
            let _ = Command::new("umount").arg("--lazy").arg(dir).status();
            // The kernel would unmount what others have mounted there, in their namespaces too.
            if !super::clean::others_run() {
                let _ = fs::remove_dir(dir);
            }
        }
    }
}

/// Leaves the mount namespace of whoever called: mounts of tests end with us, and the servers that
/// they start have state and sockets of their own. Returns what must be unmounted at the end.
fn own_namespace() -> Result<Vec<PathBuf>> {
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        bail!("cannot make a mount namespace ({}): needs CAP_SYS_ADMIN", std::io::Error::last_os_error());
    }
    let private = Command::new("mount").args(["--make-rprivate", "/"]).status()?;
    ensure!(private.success(), "mount --make-rprivate / failed");
    let mut made = Vec::new();
    for dir in ["/run/nigh", "/var/lib/nigh"] {
        // Whoever ends us leaves it there, and nigh uses none that others may enter.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "mode=0700", "nigh-test", dir]).status()?;
        ensure!(mounted.success(), "cannot mount a tmpfs on {dir}");
        made.push(PathBuf::from(dir));
    }
    let control = Path::new("/sys/fs/fuse/connections");
    if control.exists() && fs::read_dir(control)?.next().is_none() {
        let _ = Command::new("mount").args(["-t", "fusectl", "fusectl"]).arg(control).status();
    }
    Ok(made)
}
