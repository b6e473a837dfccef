//! The command line.

use clap::{Parser, Subcommand};
use std::path::PathBuf;

/// Mounts a remote directory so that its metadata is local.
#[derive(Parser)]
#[command(name = "nigh", version, about)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Show what nigh does, over an emulated link of 10 ms
    Demo,
    /// Mount a directory
    Mount(Box<MountArgs>),
    /// Unmount what `nigh mount` mounted, even if its daemon is gone
    Umount {
        mountpoint: PathBuf,
        /// Detach at once, end when the last user does
        #[arg(long)]
        lazy: bool,
    },
    /// Say how mounts are
    Status {
        mountpoint: Option<PathBuf>,
        /// One JSON object (without a mount point an array); its keys are a contract
        #[arg(long)]
        json: bool,
    },
    /// Serve your own mounts (started by `nigh mount` where it does not run)
    Serve {
        #[arg(long, default_value = "user")]
        listen: String,
    },
}

#[derive(clap::Args)]
pub struct MountArgs {
    /// The directory to mount
    pub source: PathBuf,
    /// Where to mount it: a directory
    pub mountpoint: PathBuf,
    /// Options as in fstab: ro, allow_other, noexec, noac, actimeo=SECONDS
    #[arg(short = 'o', value_name = "OPTION,…")]
    pub options: Vec<String>,
    /// How long facts are believed before the server is asked again, as long as it does not watch its own
    /// disk: a time with its unit, `off` or `forever`
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub host_timeout: String,
    /// Memory for cached metadata, for example 256M [default: a quarter of the memory, at most 1G]
    #[arg(long, value_name = "SIZE")]
    pub cache_size: Option<String>,
    /// Stay in the foreground and log to standard error (NIGH_LOG=nigh=debug says more)
    #[arg(long)]
    pub foreground: bool,
    /// Threads that take in requests
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
    /// Written to when the mount stands or has failed (used by `nigh mount` itself)
    #[arg(long, hide = true)]
    pub ready_fd: Option<i32>,
}
