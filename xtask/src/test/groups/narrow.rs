//! Programs whose `off_t` has 32 bits.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::process::CommandResult;
use crate::report::TestReport;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};

const PROGRAM: &str = include_str!("narrow.c");
const LIMIT: Duration = Duration::from_secs(300);

/// For listings that are not cached, so that the server makes each one again: the time grows with the square.
fn few(world: &World) -> u32 {
    if world.short { 8_000 } else { 20_000 }
}

pub fn run(world: &World, tally: &mut TestReport) {
    let count = if world.short { 50_000 } else { 1_000_000 };
    let program = match compiled(world) {
        Ok(program) => program,
        Err(e) => return tally.not_run("narrow", &format!("gcc -m32: {e:#}")),
    };
    let source = tally.prepare(&format!("narrow: {count} files"), || directory(world, count));
    let Some(source) = source else { return };
    type Test = fn(&World, &Path, &Path, u32) -> Result<()>;
    let tests: [(&str, Test); 2] = [
        ("narrow: without cookies=31 it is EOVERFLOW", overflows),
        ("narrow: no entry is skipped, singly and by seeks", lists_and_seeks),
    ];
    for (name, test) in tests {
        tally.test(name, || test(world, &program, &source, count));
    }
    tally.test("narrow: the same in listings that are not kept", || unkept(world, &program));
    let _ = fs::remove_dir_all(&source);
}

fn compiled(world: &World) -> Result<PathBuf> {
    let (text, program) = (world.root.join("narrow.c"), world.root.join("narrow"));
    fs::write(&text, PROGRAM)?;
    let mut gcc = Command::new("gcc");
    gcc.args(["-m32", "-O1", "-Wall", "-Werror", "-o"]).arg(&program).arg(&text);
    let ended = world.run(gcc, LIMIT)?;
    ensure!(ended.ok(), "{}", ended.tail(3));
    Ok(program)
}

/// Creates a directory with the names that the program looks up.
fn directory(world: &World, count: u32) -> Result<PathBuf> {
    let source = world.dir("narrow-source", As::Us)?;
    for n in 0..count {
        fs::File::create(source.join(format!("n-{n}")))?;
    }
    // Such a program cannot represent 64-bit inode numbers either.
    let ino = fs::metadata(source.join("n-0"))?.ino();
    ensure!(u32::try_from(ino).is_ok(), "inodes in {} have numbers of more than 32 bits", source.display());
    Ok(source)
}

fn ended(
    world: &World,
    program: &Path,
    source: &Path,
    count: u32,
    arguments: &[&str],
) -> Result<CommandResult> {
    let point = world.dir("narrow-mnt", As::Us)?;
    let how = arguments.iter().fold(MountParams::new(As::Us), |how, argument| how.with(argument));
    let mount = Mount::new(world, source, &point, &how)?;
    let mut command = world.command(program, As::Us);
    let seeks = if world.short { count / 5 } else { 20_000 };
    command.arg(&point).arg(count.to_string()).arg(seeks.to_string());
    let ended = mount.run(command, LIMIT)?;
    mount.unmount()?;
    Ok(ended)
}

fn overflows(world: &World, program: &Path, source: &Path, count: u32) -> Result<()> {
    let ended = ended(world, program, source, count, &["-o", "cookies=63"])?;
    ensure!(!ended.ok() && ended.said.trim() == "readdir: EOVERFLOW", "{}", ended.tail(3));
    Ok(())
}

fn lists_and_seeks(world: &World, program: &Path, source: &Path, count: u32) -> Result<()> {
    let ended = ended(world, program, source, count, &["-o", "cookies=31"])?;
    ensure!(ended.ok(), "{}", ended.tail(3));
    println!("  {} in {:.1} s", ended.said.trim(), ended.took.as_secs_f64());
    Ok(())
}

fn unkept(world: &World, program: &Path) -> Result<()> {
    let count = few(world);
    let source = directory(world, count)?;
    let ended = ended(world, program, &source, count, &["-o", "cookies=31", "--host-timeout=off"])?;
    ensure!(ended.ok(), "{}", ended.tail(3));
    Ok(())
}
