//! Contents of files over a link of 10 ms: how often their readers wait, and what is fetched in vain.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{LIMIT, shell, undisturbed, waits};
use crate::bench::places::Distant;
use crate::link::client::Emulator;
use crate::report::TestReport;
use crate::test::mount::{Mount, MountParams};
use crate::test::over::{self, LinkKind};
use crate::test::world::{As, World};

/// Most waits for contents that are not on their way. They depend on how busy the machine is: `xtask bench --contents` has
/// the figures.
const MOST: u64 = 25;
/// Readers that go through the tree in different orders, each of which reads every file.
const READERS: &[&str] = &[
    "cp -r . ../../../copied",
    // To /dev/null it would read no contents.
    "tar cf - . | wc -c",
    "grep -r nothing . || true",
    "find . -type f -exec cat {} +",
    "find . -type f | LC_ALL=C sort | xargs cat",
];
const LARGE: u64 = 64 << 20;

pub fn run(world: &World, tally: &mut TestReport, distant: &Distant<'_>) {
    for reader in READERS {
        tally.test(&format!("cold: contents, {reader}"), || undisturbed(|| read_all(world, distant, reader)));
    }
    type Test = fn(&World, &Distant<'_>) -> Result<()>;
    let tests: [(&str, Test); 7] = [
        ("cold: listers fetch no contents", listed),
        ("cold: a large file is read ahead, and contents are those of the server", large),
        ("cold: random reads of a large file fetch little else", random),
        ("cold: what a mount has written is not fetched back", written),
        ("cold: `nigh prefetch --contents` has a tree's contents in memory", prefetched),
        ("cold: no contents come ahead where that is not wanted", off),
        // It ends the server of the other mounts.
        ("cold: contents come ahead with the rights of each caller", for_each_caller),
    ];
    for (name, test) in tests {
        tally.test(name, || test(world, distant));
    }
}

fn contents(status: &Value, key: &str) -> Result<u64> {
    status["cache"]["contents"][key].as_u64().with_context(|| format!("no {key}: {status}"))
}

fn reads(mount: &Mount<'_>) -> Result<u64> {
    Ok(mount.status()?["remote"]["by_type"]["read"].as_u64().unwrap_or(0))
}

/// The tree has 3,192 files in 1,597 directories.
fn read_all(world: &World, distant: &Distant<'_>, reader: &str) -> Result<()> {
    let copied = world.root.join("copied");
    if copied.exists() {
        fs::remove_dir_all(&copied)?;
    }
    let mount = distant.mount(world)?;
    let reader = reader.replace("../../../copied", &copied.display().to_string());
    few_waits(world, &mount, &reader)?;
    if reader.starts_with("cp") {
        let mut command = world.command("diff", As::Us);
        command.arg("-r").arg(&copied).arg(distant.source.join("deep"));
        let ended = world.run(command, LIMIT)?;
        ensure!(ended.ok(), "the copy differs: {}", ended.tail(5));
    }
    mount.unmount()
}

/// Reads every file through a fresh mount: contents come ahead, so that few reads wait.
fn few_waits(world: &World, mount: &Mount<'_>, reader: &str) -> Result<()> {
    shell(world, mount, "deep", "true")?;
    let before = waits(&mount.status()?)?.0;
    shell(world, mount, "deep", reader)?;
    let status = mount.status()?;
    let (alone, all) = waits(&status)?;
    let of = |key| contents(&status, key);
    println!("  {reader}: {} waits, {all} with joins; {} bytes ahead", alone - before, of("fetched")?);
    ensure!(
        of("fetched")? >= 6_000,
        "the contents of most files come ahead: {}",
        status["cache"]["contents"]
    );
    // The kernel then sends no READ.
    ensure!(of("stored")? * 2 >= of("fetched")?, "{}", status["cache"]["contents"]);
    ensure!(alone - before <= MOST, "{} waits, at most {MOST}: {}", alone - before, status["remote"]);
    ensure!(of("wasted")? == 0, "{}", status["cache"]["contents"]);
    Ok(())
}

/// A server that trusts a client's ids, not its kernel, reads each file with the rights of the caller.
fn for_each_caller(world: &World, distant: &Distant<'_>) -> Result<()> {
    let server = over::serve(world, As::Us)?;
    let near = over::free_port()?;
    let _link = Emulator::on_ports(&world.xtask(), &world.root, [near, server], "10ms", "1Gbit")?;
    let how = MountParams { over: Some((LinkKind::Nigh, Some(near))), ..MountParams::new(As::Us) };
    let point = world.dir("for-each-caller", As::Us)?;
    undisturbed(|| {
        let mount = Mount::new(world, &distant.source, &point, &how)?;
        few_waits(world, &mount, "tar cf - . | wc -c")?;
        mount.unmount()
    })
}

fn listed(world: &World, distant: &Distant<'_>) -> Result<()> {
    let mount = distant.mount(world)?;
    shell(world, &mount, "deep/dir-2", "find . -size +0; du -s .; ls -lR")?;
    let status = mount.status()?;
    ensure!(contents(&status, "fetched")? == 0, "{}", status["cache"]["contents"]);
    ensure!(reads(&mount)? == 0, "{}", status["remote"]);
    mount.unmount()
}

fn large(world: &World, distant: &Distant<'_>) -> Result<()> {
    let path = distant.source.join("large-file");
    let bytes: Vec<u8> =
        (0..LARGE / 8).flat_map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    fs::write(&path, &bytes)?;
    let mount = distant.mount(world)?;
    shell(world, &mount, ".", "stat large-file")?;
    let before = waits(&mount.status()?)?.0;
    shell(world, &mount, ".", &format!("cmp large-file {}", path.display()))?;
    let status = mount.status()?;
    let alone = waits(&status)?.0 - before;
    println!("  {} MiB: {alone} waits, {}", LARGE >> 20, status["cache"]["contents"]);
    ensure!(alone <= MOST, "{alone} waits: {}", status["remote"]);
    ensure!(contents(&status, "used")? >= LARGE / 10 * 9, "{}", status["cache"]["contents"]);
    mount.unmount()
}

fn random(world: &World, distant: &Distant<'_>) -> Result<()> {
    const COUNT: u64 = 200;
    let mount = distant.mount(world)?;
    let script = format!(
        "import os, random; random.seed(7); fd = os.open('large-file', os.O_RDONLY); \
         os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM); \
         [os.pread(fd, 4096, random.randrange({LARGE} // 4096) * 4096) for _ in range({COUNT})]"
    );
    shell(world, &mount, ".", &format!("/usr/bin/python3 -c \"{script}\""))?;
    let status = mount.status()?;
    let received = status["remote"]["bytes_received"].as_u64().context("no bytes")?;
    println!("  {COUNT} random reads: {received} bytes, {}", status["cache"]["contents"]);
    ensure!(received <= COUNT * 8_192 + (256 << 10), "{received} bytes for {COUNT} reads of 4 KiB");
    mount.unmount()
}

/// The kernel keeps whole pages only: these files are shorter, or end within a page.
fn written(world: &World, distant: &Distant<'_>) -> Result<()> {
    let mount = distant.mount(world)?;
    let make = "mkdir own; for n in $(seq 100); do echo contents of $n > own/$n; done; \
                head -c 300000 /dev/zero > own/larger";
    shell(world, &mount, ".", make)?;
    let before = reads(&mount)?;
    shell(world, &mount, ".", "cat own/* > /dev/null; test \"$(cat own/77)\" = 'contents of 77'")?;
    let after = reads(&mount)?;
    println!("  {} READs for files that the mount has written", after - before);
    ensure!(after == before, "{} READs", after - before);
    shell(world, &mount, ".", "echo more >> own/77; test \"$(wc -l < own/77)\" = 2; rm -r own")?;
    mount.unmount()
}

fn prefetched(world: &World, distant: &Distant<'_>) -> Result<()> {
    let mount = distant.mount(world)?;
    let mut command = world.command(world.nigh(), As::Us);
    command.arg("prefetch").arg("--contents").arg(mount.point.join("deep/dir-4"));
    let ended = mount.run(command, LIMIT)?;
    ensure!(ended.ok() && ended.said.contains(" MiB in "), "{}", ended.tail(5));
    let before = waits(&mount.status()?)?;
    println!("  {} waits, {} with joins", before.0, before.1);
    ensure!(before.0 <= MOST, "{} waits, at most {MOST}", before.0);
    shell(world, &mount, "deep/dir-4", "tar cf - . | wc -c")?;
    let after = waits(&mount.status()?)?;
    ensure!(before == after, "{before:?}, then {after:?}");
    mount.unmount()
}

fn off(world: &World, distant: &Distant<'_>) -> Result<()> {
    for argument in ["--prefetch=off", "--data-cache=off"] {
        let mount = distant.mount_with(world, &[argument])?;
        shell(world, &mount, "deep/dir-3", "cat dir-1/*/one")?;
        let status = mount.status()?;
        ensure!(contents(&status, "fetched")? == 0, "{argument}: {}", status["cache"]["contents"]);
        mount.unmount()?;
    }
    Ok(())
}
