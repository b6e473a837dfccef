//! Readers and writers of small files.

use anyhow::Result;
use serde_json::{Value, json};

use super::meter::{Meter, joined, measured, shell};
use crate::bench::places::Distant;
use crate::test::world::World;

/// Each reads every file of a tree once.
const READERS: &[(&str, &str)] = &[
    ("cp -r", "cp -r . \"$OUT\""),
    ("tar c", "tar cf - . | cat"),
    ("grep -r", "grep -r nothing . || true"),
    ("rsync -a", "rsync -a . \"$OUT\""),
    ("rg -j4", "rg -j4 nothing . || true"),
    ("find -exec cat +", "find . -type f -exec cat {} +"),
    (
        "os.walk",
        "/usr/bin/python3 -c 'import os\nfor d, _, fs in os.walk(\".\"):\n  for f in fs: open(d + \"/\" + f).read()'",
    ),
];

/// Each reads no file of a directory of 1,000, or a small part of it.
const SELDOM: &[(&str, &str)] = &[
    ("find, du, ls -lR", "find . -size +0c; du -a .; ls -lR ."),
    ("head -c 1 of each", "find . -type f -exec head -c 1 {} +"),
    ("file *", "file -- *"),
    ("one of 1,000", "ls; cat text-500"),
];

/// Returns a program that a script needs and this machine lacks.
fn missing(script: &str) -> Option<&str> {
    let program = script.split_whitespace().next()?;
    crate::process::which(program).is_none().then_some(program)
}

/// Measures all readers of a tree whose programs are there.
pub fn readers(world: &World, distant: &Distant<'_>, dir: &str, say: &mut impl FnMut(Value)) -> Result<()> {
    for (name, script) in READERS {
        match missing(script) {
            Some(program) => println!("{name}: no {program}"),
            None => say(joined(json!({ "tree": dir }), &measured(world, distant, dir, (name, script))?)),
        }
    }
    Ok(())
}

/// Measures what comes ahead for processes that read little.
pub fn seldom(world: &World, distant: &Distant<'_>, say: &mut impl FnMut(Value)) -> Result<()> {
    for work in SELDOM {
        say(measured(world, distant, "flat", *work)?);
    }
    Ok(())
}

/// Small files that the mount writes, and reads back.
pub fn own(world: &World, distant: &Distant<'_>) -> Result<Value> {
    let mount = distant.mount(world)?;
    let make = "mkdir own; for n in $(seq 100); do echo contents of $n > own/$n; done";
    let then = Meter::read(&mount, distant)?;
    let made = shell(world, &mount, ".", make)?;
    let now = Meter::read(&mount, distant)?;
    let making = now.since(&then)?;
    let read = shell(world, &mount, ".", "cat own/*")?;
    let line = json!({
        "rtt": distant.rtt, "reader": "own files", "make_s": made.as_secs_f64(), "read_s": read.as_secs_f64(),
        "waits_making": making["waits_without_joins"],
    });
    let line = joined(line, &Meter::read(&mount, distant)?.since(&now)?);
    shell(world, &mount, ".", "rm -r own")?;
    mount.unmount()?;
    Ok(line)
}
