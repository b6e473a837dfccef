//! Foreign servers that re-export a mount: their listings are complete, and take time linear in the number of names.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::process;
use crate::report::TestReport;
use crate::root;
use crate::test::mount::{Mount, MountParams};
use crate::test::over;
use crate::test::world::{As, World};
use crate::wait;

/// Limit of one listing.
const LIMIT: Duration = Duration::from_secs(120);
const START: Duration = Duration::from_secs(30);
/// Limit of the ratio to a listing of a quarter of the names: linear time gives 4, quadratic 16, and times are noisy.
const MOST: f64 = 8.0;
const TIMES: usize = 3;

/// A foreign server, with the processes that it started.
struct Server {
    child: Child,
    log: PathBuf,
}

impl Server {
    fn start(mut command: Command, log: PathBuf) -> Result<Server> {
        let file = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0);
        Ok(Server { child: command.spawn()?, log })
    }

    fn said(&self) -> String {
        process::last_lines(&self.log)
    }

    /// Waits until its client gets a reply.
    fn wait(&mut self, is_there: impl FnMut() -> Result<bool>) -> Result<()> {
        wait::ready(&mut self.child, START, is_there).with_context(|| self.said())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        process::kill_group(self.child.id());
        let _ = process::wait(&mut self.child, Duration::from_secs(5));
    }
}

pub fn run(world: &World, tally: &mut TestReport) {
    if !root::is_root() {
        return tally.not_run("reexport", "needs root");
    }
    let small = match (world.short, world.hours) {
        (true, _) => 4_000,
        (_, true) => 64_000,
        _ => 16_000,
    };
    let sizes = [small, small * 4];
    let source = tally.prepare("reexport: the directories", || prepared(world, sizes));
    let Some(source) = source else { return };
    tally.test("reexport: smbd", || by_smbd(world, &source, sizes));
    tally.test("reexport: ganesha", || by_ganesha(world, &source, sizes));
}

/// Creates two directories, named by their number of files.
fn prepared(world: &World, sizes: [u32; 2]) -> Result<PathBuf> {
    let source = world.dir("reexport-source", As::Us)?;
    for size in sizes {
        let dir = source.join(size.to_string());
        fs::create_dir(&dir)?;
        (0..size).try_for_each(|n| File::create(dir.join(format!("file-{n:07}"))).map(drop))?;
    }
    Ok(source)
}

/// Lists both directories several times in turn, the first time cold. `list` builds the command.
fn linear(world: &World, mount: &Mount<'_>, sizes: [u32; 2], list: impl Fn(u32) -> Command) -> Result<()> {
    let mut least = [Duration::MAX; 2];
    for _ in 0..TIMES {
        for (size, least) in sizes.into_iter().zip(&mut least) {
            let log = world.log();
            let mut command = list(size);
            command.stdin(Stdio::null()).stdout(File::create(&log)?).stderr(Stdio::null()).process_group(0);
            let start = Instant::now();
            let mut child = command.spawn()?;
            let ended = process::wait(&mut child, LIMIT)?;
            if ended.is_none() {
                process::kill_group(child.id());
                mount.abort();
                bail!("{size} files are not listed in {LIMIT:?}");
            }
            *least = start.elapsed().min(*least);
            let mut names = names(&fs::read_to_string(&log)?);
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            ensure!(
                (count, names.len()) == (size as usize, size as usize),
                "of {size} files {} are listed, in {count} lines",
                names.len()
            );
        }
    }
    let ratio = least[1].as_secs_f64() / least[0].as_secs_f64();
    println!(
        "  {} files in {} ms, {} in {} ms: {ratio:.2} times as long",
        sizes[0],
        least[0].as_millis(),
        sizes[1],
        least[1].as_millis()
    );
    ensure!(ratio <= MOST, "four times as many files take {ratio:.2} times as long");
    Ok(())
}

/// Returns the files named in a listing.
fn names(said: &str) -> Vec<u32> {
    let of_line = |line: &str| {
        let (_, rest) = line.split_once("file-")?;
        rest.get(..7)?.parse().ok()
    };
    said.lines().filter_map(of_line).collect()
}

fn by_smbd(world: &World, source: &Path, sizes: [u32; 2]) -> Result<()> {
    let (Some(smbd), Some(client)) = (process::which("smbd"), process::which("smbclient")) else {
        bail!("smbd or smbclient is missing: install the packages samba and smbclient");
    };
    let mount = Mount::new(world, source, &world.dir("reexported", As::Us)?, &MountParams::new(As::Us))?;
    let (dir, port) = (world.dir("samba", As::Us)?, over::free_port()?);
    let config = dir.join("smb.conf");
    let own = ["private dir", "lock directory", "state directory", "cache directory", "pid directory"];
    let own: String = own.iter().map(|what| format!("{what} = {}\n", dir.display())).collect();
    let text = format!(
        "[global]\nserver role = standalone server\nsmb ports = {port}\ninterfaces = 127.0.0.1\n\
         bind interfaces only = yes\nmap to guest = Bad User\nguest account = root\n{own}\
         ncalrpc dir = {}/ncalrpc\nlog file = {}/log\ndisable spoolss = yes\nload printers = no\n\
         [nigh]\npath = {}\nguest ok = yes\nread only = no\n",
        dir.display(),
        dir.display(),
        mount.point.display()
    );
    fs::write(&config, text)?;
    let mut command = world.command(smbd, As::Us);
    command.args(["--foreground", "--no-process-group", "--debug-stdout"]);
    command.arg(format!("--configfile={}", config.display()));
    let mut server = Server::start(command, world.log())?;
    let ask = |what: &str| {
        let mut command = world.command(&client, As::Us);
        command.args(["//127.0.0.1/nigh", "--no-pass", "--port", &port.to_string(), "--command", what]);
        command
    };
    server.wait(|| Ok(world.run(ask("ls nothing"), START)?.said.contains("NT_STATUS_NO_SUCH_FILE")))?;
    linear(world, &mount, sizes, |size| ask(&format!("ls {size}/*")))?;
    drop(server);
    mount.unmount()
}

/// By NFS 4, whose server needs no portmapper. It opens files by the handles that the kernel makes from nigh's node
/// ids.
fn by_ganesha(world: &World, source: &Path, sizes: [u32; 2]) -> Result<()> {
    let (Some(ganesha), Some(client)) = (process::which("ganesha.nfsd"), process::which("nfs-ls")) else {
        bail!("ganesha.nfsd or nfs-ls is missing: install nfs-ganesha, nfs-ganesha-vfs and libnfs-utils");
    };
    let mount = Mount::new(world, source, &world.dir("reexported", As::Us)?, &MountParams::new(As::Us))?;
    let (dir, port) = (world.dir("ganesha", As::Us)?, over::free_port()?);
    let config = dir.join("ganesha.conf");
    let text = format!(
        "NFS_CORE_PARAM {{ NFS_Port = {port}; Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; \
         Enable_UDP = false; Bind_addr = 127.0.0.1; }}\n\
         NFS_KRB5 {{ Active_krb5 = false; }}\n\
         NFSV4 {{ RecoveryRoot = {}; Graceless = true; }}\n\
         EXPORT {{ Export_Id = 1; Path = {}; Pseudo = /nigh; Access_Type = RW; Squash = No_Root_Squash; \
         SecType = sys; Protocols = 4; Transports = TCP; FSAL {{ Name = VFS; }} }}\n",
        dir.display(),
        mount.point.display()
    );
    fs::write(&config, text)?;
    let mut command = world.command(ganesha, As::Us);
    command.args(["-F", "-L", "STDOUT", "-f"]).arg(&config).arg("-p").arg(dir.join("pid"));
    let mut server = Server::start(command, world.log())?;
    let ask = |what: &str| {
        let mut command = world.command(&client, As::Us);
        command.arg(format!("nfs://127.0.0.1/nigh{what}?version=4&nfsport={port}"));
        command
    };
    server.wait(|| Ok(world.run(ask(""), START)?.said.contains(&sizes[0].to_string())))?;
    linear(world, &mount, sizes, |size| ask(&format!("/{size}")))?;
    drop(server);
    mount.unmount()
}
