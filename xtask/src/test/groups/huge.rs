//! More names than memory: a walk over millions of files, and a directory of a million, within `--cache-size`.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::filesystems::{self, Disk};
use super::restart::signal_server;
use crate::process;
use crate::report::TestReport;
use crate::root;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};
use crate::wait;

const LIMIT: Duration = Duration::from_secs(900);
const MIB: u64 = 1 << 20;

/// The sizes; without `--hours` a fiftieth, with a limit lowered as much.
struct Scale {
    dirs: u64,
    files: u64,
    one: u64,
    cache: &'static str,
    client: u64,
    server: u64,
    /// Inodes that the kernel may know after a walk, and during one: it forgets them while new ones come.
    kernel: u64,
    peak: u64,
}

const FULL: Scale = Scale {
    dirs: 5_000,
    files: 1_000,
    one: 1_000_000,
    cache: "256M",
    client: 400 * MIB,
    server: 200 * MIB,
    kernel: 1_000_000,
    peak: 2_500_000,
};

/// 32 MiB are allowed for a process's basic needs. Without pruning a walk would leave 100,000 inodes in the kernel; how
/// many of them it knows at a time depends on when the pruning thread gets a core.
const SHORT: Scale = Scale {
    dirs: 200,
    files: 500,
    one: 50_000,
    cache: "6M",
    client: 42 * MIB,
    server: 64 * MIB,
    kernel: 32_000,
    peak: 80_000,
};

pub fn run(world: &World, tally: &mut TestReport) {
    if !root::is_root() {
        return tally.not_run("huge", "needs root for a filesystem of its own");
    }
    let scale = if world.hours { FULL } else { SHORT };
    let Some(disk) = tally.prepare("huge: the trees", || prepared(world, &scale)) else { return };
    type Test = fn(&World, &Disk, &Scale) -> Result<()>;
    let tests: [(&str, Test); 3] = [
        ("huge: a walk larger than the budget, twice", walk),
        ("huge: one large directory", one),
        ("huge: what a name costs", each),
    ];
    for (name, test) in tests {
        tally.test(name, || test(world, &disk, &scale));
    }
    // Fills the machine's memory first: a minute for each 20 GiB.
    if !world.short {
        tally.test("huge: memory is short", || short(world, &disk, &scale));
    }
}

/// Creates an ext4 with `many` (directories of empty files), `one` (as many empty files in one directory), and `few`.
fn prepared(world: &World, scale: &Scale) -> Result<Disk> {
    let inodes = scale.dirs * (scale.files + 1) + scale.one + 1_000;
    let options = ["-O", "^has_journal", "-N", &inodes.to_string()];
    let disk = filesystems::image(world, "ext4", "huge", inodes * 1_024 + (256 << 20), &options)?;
    for dir in 0..scale.dirs {
        fill(&disk.point.join(format!("many/dir-{dir:04}")), scale.files)?;
    }
    fill(&disk.point.join("one"), scale.one)?;
    // A walk of these shows that the reader needs names only.
    for dir in 0..9 {
        fill(&disk.point.join(format!("few/dir-{dir}")), 1)?;
    }
    Ok(disk)
}

fn fill(dir: &Path, files: u64) -> Result<()> {
    fs::create_dir_all(dir)?;
    for file in 0..files {
        fs::File::create(dir.join(format!("file-{file:07}")))?;
    }
    Ok(())
}

/// Ends the server, if one runs: peak memory must not include earlier tests.
fn another_server(world: &World) -> Result<()> {
    let is_there = || UnixStream::connect(world.server_socket(As::Us)).is_ok();
    if !is_there() {
        return Ok(());
    }
    signal_server(world, libc::SIGTERM)?;
    ensure!(wait::holds(Duration::from_secs(10), || Ok(!is_there()))?, "the server stays after SIGTERM");
    Ok(())
}

fn mounted<'w>(world: &'w World, disk: &Disk, tree: &str, arguments: &[&str]) -> Result<Mount<'w>> {
    let point = world.dir("mnt", As::Us)?;
    let how = arguments.iter().fold(MountParams::new(As::Us), |how, argument| how.with(argument));
    Mount::new(world, &disk.point.join(tree), &point, &how.with("--host-timeout=forever"))
}

/// Returns the number and bytes of FUSE inodes in the kernel, of all mounts.
fn slab() -> (u64, u64) {
    let text = fs::read_to_string("/proc/slabinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("fuse_inode ")).unwrap_or_default();
    let number = |at: usize| line.split_whitespace().nth(at).and_then(|n| n.parse().ok()).unwrap_or(0);
    let (objects, size): (u64, u64) = (number(1), number(3));
    (objects, objects * size)
}

/// Runs a script in the mount, and samples the number of inodes that the kernel references; returns the output, the
/// maximum, and the time.
fn watched(world: &World, mount: &Mount<'_>, script: &str) -> Result<(String, u64, Duration)> {
    let (most, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let inodes = mount.status().ok().and_then(|status| status["cache"]["inodes"].as_u64());
                most.fetch_max(inodes.unwrap_or(0), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(250));
            }
        });
        let mut command = world.command("sh", As::Us);
        command.args(["-euc", script]).current_dir(&mount.point);
        let ended = mount.run(command, LIMIT);
        over.store(true, Ordering::Relaxed);
        ended
    })?;
    ensure!(ended.ok(), "{}", ended.tail(5));
    Ok((ended.said.trim().to_owned(), most.into_inner(), ended.took))
}

/// Compares the peak memory of client and server with the limits.
fn taken(mount: &Mount<'_>, scale: &Scale) -> Result<()> {
    let status = mount.server_status()?;
    let server = status["pid"].as_u64().with_context(|| format!("no server: {status}"))?;
    let most = |pid: u32| Ok::<_, anyhow::Error>(process::memory_kib(pid, "VmHWM:")? << 10);
    let (client, server) = (most(mount.daemon())?, most(u32::try_from(server)?)?);
    println!("  the most memory: client {} MiB, server {} MiB", client / MIB, server / MIB);
    ensure!(client < scale.client, "the client took {client} bytes, {} may be", scale.client);
    ensure!(server < scale.server, "the server took {server} bytes, {} may be", scale.server);
    Ok(())
}

fn walk(world: &World, disk: &Disk, scale: &Scale) -> Result<()> {
    another_server(world)?;
    let mount = mounted(world, disk, "many", &["--cache-size", scale.cache])?;
    let script = "find . -type f -printf '%p %s\\n' | md5sum; find . -type f | wc -l";
    let mut said = Vec::new();
    for round in 1..=2 {
        let (sum, inodes, took) = watched(world, &mount, script)?;
        let (objects, bytes) = slab();
        let status = mount.status()?;
        let cache = &status["cache"];
        println!(
            "  walk {round}: {} ms, at most {inodes} inodes known, {objects} FUSE inodes in the kernel ({} MiB), pruned {}, evicted {}, {} MiB held",
            took.as_millis(),
            bytes / MIB,
            cache["pruned"],
            cache["evictions"],
            cache["bytes"].as_u64().unwrap_or(0) / MIB,
        );
        ensure!(inodes <= scale.peak, "the kernel knew {inodes} inodes");
        settled(&mount, scale.kernel)?;
        let budget = cache["budget_bytes"].as_u64().unwrap_or(0);
        ensure!(cache["bytes"].as_u64() <= Some(budget), "{cache}");
        said.push(sum);
    }
    ensure!(said[0] == said[1], "{said:?}");
    let count: u64 = said[0].lines().last().unwrap_or_default().trim().parse()?;
    ensure!(count == scale.dirs * scale.files, "{count} files");
    taken(&mount, scale)?;
    mount.unmount()
}

/// Waits until the kernel has forgotten what it is to forget.
fn settled(mount: &Mount<'_>, most: u64) -> Result<()> {
    let inodes = || mount.status()?["cache"]["inodes"].as_u64().context("no inodes in the status");
    let settled = wait::holds(Duration::from_secs(10), || Ok(inodes()? <= most))?;
    ensure!(settled, "the kernel knows {} inodes 10 s after the walk", inodes()?);
    Ok(())
}

fn one(world: &World, disk: &Disk, scale: &Scale) -> Result<()> {
    another_server(world)?;
    let mount = mounted(world, disk, "one", &["--cache-size", scale.cache])?;
    for script in ["ls -f | sed 1,2d | wc -l", "ls -l | sed 1d | wc -l"] {
        let (count, inodes, took) = watched(world, &mount, script)?;
        println!("  {script}: {} ms, at most {inodes} inodes known", took.as_millis());
        ensure!(count.parse() == Ok(scale.one), "{count} names");
    }
    taken(&mount, scale)?;
    mount.unmount()
}

/// Measures memory per name with room for all names, for names that the kernel does not reference.
fn each(world: &World, disk: &Disk, scale: &Scale) -> Result<()> {
    let mount = mounted(world, disk, ".", &["--cache-size", "1G"])?;
    let before = process::memory_kib(mount.daemon(), "VmRSS:")?;
    watched(world, &mount, "find few one -type f > /dev/null")?;
    // The client got names before attributes; the attributes follow by themselves.
    let cached = |key: &str| Ok::<_, anyhow::Error>(mount.status()?["cache"][key].as_u64().unwrap_or(0));
    let give_up = Instant::now() + Duration::from_secs(120);
    let names = loop {
        let names = cached("entries")?;
        if names >= scale.one {
            break names;
        }
        ensure!(Instant::now() < give_up, "{names} names");
        std::thread::sleep(Duration::from_millis(100));
    };
    let after = process::memory_kib(mount.daemon(), "VmRSS:")?;
    let (counted, taken) = (cached("bytes")? / names, ((after - before) << 10) / names);
    println!("  {counted} bytes counted for a name, {taken} taken by the process");
    ensure!(counted <= 150, "{counted} bytes");
    mount.unmount()
}

/// The kernel's own memory pressure, on a machine whose page cache takes all free memory.
fn short(world: &World, disk: &Disk, scale: &Scale) -> Result<()> {
    if !Path::new("/proc/pressure/memory").exists() {
        println!("  this kernel does not say when memory is short");
        return Ok(());
    }
    let point = world.dir("mnt", As::Us)?;
    // The trigger fires as soon as any task has waited for memory.
    let how = MountParams::new(As::Us).set("NIGH_PRESSURE", "some 1 2000000").with("--host-timeout=forever");
    let mount = Mount::new(world, &disk.point.join("one"), &point, &how)?;
    watched(world, &mount, "ls -f > /dev/null")?;
    let held = |status: &Value| status["cache"]["bytes"].as_u64().unwrap_or(0);
    let before = held(&mount.status()?);
    let large = world.root.join("large");
    fs::File::create(&large)?.set_len(1 << 40)?;
    let squeezed = squeeze(&large, &mount)?;
    let _ = fs::remove_file(&large);
    let after = held(&mount.status()?);
    println!("  {} MiB held, then {} MiB; squeezed {squeezed} times", before / MIB, after / MIB);
    ensure!(squeezed > 0, "nothing was told");
    ensure!(after <= before / 2, "{before} bytes, then {after}");
    let (count, ..) = watched(world, &mount, "ls -f | sed 1,2d | wc -l")?;
    ensure!(count.parse() == Ok(scale.one), "{count} names");
    mount.unmount()
}

/// Reads a sparse file until memory is short: its pages take all free memory, and then other memory must be reclaimed.
fn squeeze(large: &Path, mount: &Mount<'_>) -> Result<u64> {
    let mut file = fs::File::open(large)?;
    let mut buffer = vec![0; 4 << 20];
    let end = Instant::now() + Duration::from_secs(120);
    let squeezed = || Ok::<_, anyhow::Error>(mount.status()?["cache"]["squeezed"].as_u64().unwrap_or(0));
    while Instant::now() < end {
        for _ in 0..64 {
            std::io::Read::read_exact(&mut file, &mut buffer)?;
        }
        if squeezed()? > 0 {
            break;
        }
    }
    // The reaction takes at most five seconds.
    std::thread::sleep(Duration::from_secs(5));
    squeezed()
}
