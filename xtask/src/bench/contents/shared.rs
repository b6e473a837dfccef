//! A mount that writes small files while another one reads them.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::meter::{COMPARED, LIMIT};
use crate::bench::places::Distant;
use crate::process;
use crate::test::mount::Mount;
use crate::test::world::{As, World};

const FILES: u32 = 1_000;
/// Writes each file in turn, and notes each round of a file in a shared map after close(2). Prints the seconds.
const WRITER: &str = "
import mmap, os, struct, sys, time
dir, notes, files, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with open(notes, 'r+b') as f: done = mmap.mmap(f.fileno(), 0)
begin = time.monotonic()
for round in range(1, rounds + 1):
  for n in range(files):
    fd = os.open(f'{dir}/{n}', os.O_WRONLY)
    os.pwrite(fd, b'%09d' % round, 0)
    os.close(fd)
    struct.pack_into('=I', done, 4 * n, round)
print(time.monotonic() - begin)
";
/// Reads all files in a loop until its standard input ends. A round older than the noted one is an old content.
const READER: &str = "
import mmap, select, struct, sys
dir, notes, files = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open(notes, 'r+b') as f: done = mmap.mmap(f.fileno(), 0)
old = count = 0
while not select.select([sys.stdin], [], [], 0)[0]:
  for n in range(files):
    least = struct.unpack_from('=I', done, 4 * n)[0]
    with open(f'{dir}/{n}') as f: old += int(f.read()) < least
    count += 1
print(count, old)
";

fn script<'a>(
    world: &World,
    mount: &Mount<'_>,
    text: &str,
    rest: impl IntoIterator<Item = &'a str>,
) -> Command {
    let mut command = world.command("/usr/bin/python3", As::Us);
    command.args(["-c", text]).arg(mount.point.join("shared")).arg(world.root.join("notes")).args(rest);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// Returns the seconds of the writer with the reader's reads ahead and without them, and what the readers saw.
pub fn writer_and_reader(world: &World, distant: &Distant<'_>, rounds: u32) -> Result<Value> {
    let dir = distant.source.join("shared");
    std::fs::create_dir_all(&dir)?;
    let mut seconds = [0.0; 2];
    let (mut read, mut old) = ([0; 2], 0);
    for (at, arguments) in COMPARED.into_iter().enumerate() {
        std::fs::write(world.root.join("notes"), vec![0; 4 * FILES as usize])?;
        for n in 0..FILES {
            std::fs::write(dir.join(n.to_string()), b"000000000")?;
        }
        let writes = distant.mount(world)?;
        let reads = distant.mount_at(world, "distant-mnt-2", arguments)?;
        let (files, rounds) = (FILES.to_string(), rounds.to_string());
        let mut reader = script(world, &reads, READER, [files.as_str()]).spawn()?;
        let written = writes.run(script(world, &writes, WRITER, [files.as_str(), &rounds]), LIMIT)?;
        ensure!(written.ok(), "the writer: {}", written.tail(5));
        seconds[at] = written.said.trim().parse().context("the writer's seconds")?;
        drop(reader.stdin.take());
        if process::wait(&mut reader, LIMIT)?.is_none() {
            reads.abort();
        }
        let said = String::from_utf8(reader.wait_with_output()?.stdout)?;
        let (count, stale) = said.trim().split_once(' ').context("the reader's counts")?;
        read[at] = count.parse::<u64>()?;
        old += stale.parse::<u64>()?;
        writes.unmount()?;
        reads.unmount()?;
    }
    ensure!(old == 0, "a reader saw {old} old contents");
    Ok(json!({
        "rtt": distant.rtt, "reader": "while another mount writes", "writer_s": seconds[0],
        "writer_s_without_reads_ahead": seconds[1], "ratio": seconds[0] / seconds[1],
        "reads": read[0], "reads_without_reads_ahead": read[1], "old": old,
    }))
}
