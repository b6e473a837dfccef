//! The workloads, each in a process of its own that prints the time taken.

use std::ffi::CString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::ValueEnum;

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Workload {
    FlatLsR,
    FlatLsLr,
    DeepLsR,
    DeepLsLr,
    DeepLsThenLsl,
    FindNonempty,
    Du,
    StatMissingOne,
    StatMissingMany,
    Readlink,
    Read,
    Telldir,
    Create,
    Untar,
    Tar,
    RmRf,
}

impl Workload {
    /// In this order: later workloads use files of earlier ones.
    pub const ALL: &'static [Workload] = &[
        Workload::FlatLsR,
        Workload::FlatLsLr,
        Workload::DeepLsR,
        Workload::DeepLsLr,
        Workload::DeepLsThenLsl,
        Workload::FindNonempty,
        Workload::Du,
        Workload::StatMissingOne,
        Workload::StatMissingMany,
        Workload::Readlink,
        Workload::Read,
        Workload::Telldir,
        Workload::Create,
        Workload::Untar,
        Workload::Tar,
        Workload::RmRf,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Workload::FlatLsR => "flat-ls-r",
            Workload::FlatLsLr => "flat-ls-lr",
            Workload::DeepLsR => "deep-ls-r",
            Workload::DeepLsLr => "deep-ls-lr",
            Workload::DeepLsThenLsl => "deep-ls-then-lsl",
            Workload::FindNonempty => "find-nonempty",
            Workload::Du => "du",
            Workload::StatMissingOne => "stat-missing-one",
            Workload::StatMissingMany => "stat-missing-many",
            Workload::Readlink => "readlink",
            Workload::Read => "read",
            Workload::Telldir => "telldir",
            Workload::Create => "create",
            Workload::Untar => "untar",
            Workload::Tar => "tar",
            Workload::RmRf => "rm-rf",
        }
    }

    /// Returns whether it changes the tree: then it runs once, on a mount that was used before.
    #[must_use]
    pub fn mutates(self) -> bool {
        matches!(self, Workload::Create | Workload::Untar | Workload::RmRf)
    }
}

#[derive(clap::Args)]
pub struct Options {
    #[arg(value_enum)]
    workload: Workload,
    #[arg(long)]
    dir: PathBuf,
    /// Calls, or files to create.
    #[arg(long, default_value_t = 10_000)]
    calls: u32,
    /// Existing links and files to read.
    #[arg(long, default_value_t = 1000)]
    files: u32,
    /// An archive of the tree to unpack, on the local disk.
    #[arg(long)]
    archive: Option<PathBuf>,
}

/// Runs one workload and prints its time in nanoseconds.
pub fn run(options: &Options) -> Result<bool> {
    let start = Instant::now();
    let dir = &options.dir;
    match options.workload {
        Workload::FlatLsR => program("ls", &["-R"], &dir.join("flat_dir"))?,
        Workload::FlatLsLr => program("ls", &["-lR"], &dir.join("flat_dir"))?,
        Workload::DeepLsR => program("ls", &["-R"], &dir.join("deep_dir"))?,
        Workload::DeepLsLr => program("ls", &["-lR"], &dir.join("deep_dir"))?,
        Workload::DeepLsThenLsl => {
            program("ls", &["-R"], &dir.join("deep_dir"))?;
            program("ls", &["-lR"], &dir.join("deep_dir"))?;
        }
        Workload::FindNonempty => {
            program("find", &[".", "-type", "f", "-size", "+0c"], &dir.join("deep_dir"))?
        }
        Workload::Du => program("du", &["-s"], &dir.join("deep_dir"))?,
        Workload::StatMissingOne => stat_missing(options.calls, |_| dir.join("flat_dir/missing"))?,
        Workload::StatMissingMany => {
            stat_missing(options.calls, |i| dir.join(format!("flat_dir/missing{i}")))?
        }
        Workload::Readlink => {
            (0..options.files).try_for_each(|i| fs::read_link(dir.join(format!("links/{i}"))).map(drop))?
        }
        Workload::Read => {
            (0..options.files).try_for_each(|i| fs::read(dir.join(format!("read/{i}"))).map(drop))?
        }
        Workload::Telldir => telldir(&dir.join("flat_dir"))?,
        Workload::Create => create(&dir.join("created"), options.calls)?,
        Workload::Untar => {
            let archive = options.archive.clone().unwrap_or_default();
            fs::create_dir(dir.join("untarred"))?;
            program("tar", &["-xf", &archive.to_string_lossy()], &dir.join("untarred"))?;
        }
        Workload::Tar => program("tar", &["-cf", "-", "tree"], dir)?,
        Workload::RmRf => program("rm", &["-rf", "untarred", "created"], dir)?,
    }
    println!("{}", start.elapsed().as_nanos());
    Ok(true)
}

fn program(name: &str, arguments: &[&str], dir: &Path) -> Result<()> {
    // tar detects /dev/null as output and then reads nothing; so a pipe is drained instead.
    let mut child = Command::new(name);
    child.args(arguments).current_dir(dir).stdin(Stdio::null()).env("LC_ALL", "C");
    let mut child = child.stdout(Stdio::piped()).spawn()?;
    if let Some(mut out) = child.stdout.take() {
        io::copy(&mut out, &mut io::sink())?;
    }
    let status = child.wait()?;
    ensure!(status.success(), "{name} {} ended with {status}", arguments.join(" "));
    Ok(())
}

fn stat_missing(calls: u32, name: impl Fn(u32) -> PathBuf) -> Result<()> {
    for i in 0..calls {
        let missing = fs::symlink_metadata(name(i)).map_err(|e| e.raw_os_error());
        ensure!(matches!(missing, Err(Some(libc::ENOENT))), "{} is there", name(i).display());
    }
    Ok(())
}

fn create(dir: &Path, files: u32) -> io::Result<()> {
    fs::create_dir(dir)?;
    for i in 0..files {
        let mut file = fs::File::create_new(dir.join(format!("file{i}")))?;
        file.write_all(b"ten bytes\n")?;
    }
    Ok(())
}

/// Scans with telldir after each entry, then seeks to every hundredth position and reads once there.
fn telldir(dir: &Path) -> Result<()> {
    let path = CString::new(dir.as_os_str().as_bytes())?;
    let stream = unsafe { libc::opendir(path.as_ptr()) };
    ensure!(!stream.is_null(), "{}", io::Error::last_os_error());
    let mut places = Vec::new();
    while !unsafe { libc::readdir64(stream) }.is_null() {
        places.push(unsafe { libc::telldir(stream) });
    }
    places.pop();
    for place in places.iter().step_by(100).rev() {
        unsafe { libc::seekdir(stream, *place) };
        ensure!(!unsafe { libc::readdir64(stream) }.is_null(), "nothing behind a place that had a successor");
    }
    unsafe { libc::closedir(stream) };
    Ok(())
}

/// Returns the command that runs a workload in a process of its own: [`run`] with these arguments.
pub fn command(
    xtask: &Path,
    work: Workload,
    dir: &Path,
    sizes: &super::trees::Sizes,
    archive: &Path,
) -> Command {
    let mut command = Command::new(xtask);
    command.args(["workload", work.name(), "--dir"]).arg(dir).arg("--archive").arg(archive);
    let files = if work == Workload::Readlink { sizes.links } else { sizes.read };
    command.args(["--calls", &sizes.calls.to_string(), "--files", &files.to_string()]);
    command
}

/// Parses the time that a workload printed.
pub fn time_said(said: &str) -> Option<Duration> {
    said.lines().last()?.trim().parse().ok().map(Duration::from_nanos)
}
