//! The command line.

use clap::{Parser, Subcommand};
use std::ffi::OsString;
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
    #[command(args_override_self = true)]
    Mount(Box<MountArgs>),
    /// Unmount what `nigh mount` mounted, even if its daemon is gone or does not answer
    Umount {
        mountpoint: PathBuf,
        /// Detach at once, end when the last user does
        #[arg(long)]
        lazy: bool,
        /// Abort requests that wait for the mount first, as otherwise happens after a while if it does not answer:
        /// they fail, and data that programs have not written back is lost
        #[arg(long)]
        force: bool,
    },
    /// Load all names and attributes below a directory of a mount into memory
    Prefetch {
        path: PathBuf,
        /// Load the contents of all files, too: they stay in memory as far as there is room
        #[arg(long)]
        contents: bool,
    },
    /// Show the status of mounts, or of a server
    Status {
        mountpoint: Option<PathBuf>,
        /// Show a server instead of mounts: the one that listens on this unix socket, else your own. Only root and
        /// its user may ask
        #[arg(long, value_name = "SOCKET", num_args = 0..=1, conflicts_with = "mountpoint")]
        server: Option<Option<PathBuf>>,
        /// One JSON object (without a mount point an array); its keys are a contract
        #[arg(long)]
        json: bool,
    },
    /// Serve directories to other machines and users; without options your own mounts (started by `nigh
    /// mount` where it does not run)
    Serve(Box<ServeArgs>),
    /// Make system calls in a mount as its daemon says (used by `nigh mount` itself)
    #[command(hide = true)]
    Replay { mountpoint: PathBuf, device: String },
    /// Abort a connection when its daemon has died (used by `nigh mount` itself)
    #[command(hide = true)]
    Watchdog { daemon: u32 },
}

#[derive(clap::Args)]
pub struct MountArgs {
    /// What to mount: DIR, [USER@]HOST:/DIR (by ssh), nigh://HOST[:PORT]/EXPORT[/SUB],
    /// unix:///SOCKET[:EXPORT[/SUB]], 9p://HOST[:PORT]/TREE or 9p+unix:///SOCKET[:TREE]
    pub source: PathBuf,
    /// Where to mount it: a directory
    pub mountpoint: PathBuf,
    /// Options as in fstab: ro, allow_other, noexec, noac, actimeo=SECONDS, hard, soft,
    /// timeo=TENTHS, idmap=user|name|none|FILE, compress (what goes over the link, by LZ4),
    /// cookies=31 (offsets in directories, for 32-bit programs), idmapped (mount_setattr(2) may
    /// map ids of the mount; for root, on the server's machine, Linux 6.12), and each option below
    /// without its dashes, such as cache-size=256M
    #[arg(short = 'o', value_name = "OPTION,…")]
    pub options: Vec<String>,
    /// How long cached metadata is used before the server is asked again: a time with its unit, `off` or `forever`
    /// [default: until the server reports a change, and 5s where it cannot detect changes]
    #[arg(long, value_name = "TIME")]
    pub host_timeout: Option<String>,
    /// 9p://: how long existing names and the list of names of a directory stay cached: a time with its unit, `off`
    /// or `forever` [default: 1s]
    #[arg(long, value_name = "TIME")]
    pub entry_timeout: Option<String>,
    /// 9p://: how long it stays cached that a name does not exist [default: 1s]
    #[arg(long, value_name = "TIME")]
    pub negative_timeout: Option<String>,
    /// 9p://: how long attributes, symlink targets and file data stay cached [default: 1s]
    #[arg(long, value_name = "TIME")]
    pub attr_timeout: Option<String>,
    /// Whether symlink targets are kept in memory (`keep`) or asked each time (`ask`)
    #[arg(long, value_name = "keep|ask", default_value = "keep", value_parser = ["keep", "ask"])]
    pub symlinks: String,
    /// Directories that are fetched before a program asks for them: none (`off`); those that a program walking a tree
    /// will reach next (`auto`); or all below a directory that is opened, as far as there is room (`all`)
    #[arg(long, value_name = "off|auto|all", default_value = "auto", value_parser = ["off", "auto", "all"])]
    pub prefetch: String,
    /// Memory for contents of files that are read ahead, for example 256M, or `off` [default: an eighth of the memory, at
    /// most 1G]
    #[arg(long, value_name = "SIZE")]
    pub data_cache: Option<String>,
    /// How far ahead of its reader a file may be read, for example 8M, or `off`
    #[arg(long, value_name = "SIZE", default_value = "32M")]
    pub readahead: String,
    /// What happens to requests while the server is away: they `wait` until it is back; `fail` with an I/O error when
    /// they have waited for --request-timeout; or are answered from the cache (`stale`): changes are refused then
    #[arg(long, value_name = "wait|fail|stale", default_value = "wait", value_parser = ["wait", "fail", "stale"])]
    pub on_disconnect: String,
    /// With --on-disconnect=fail: how long a request may wait, for any reason except a lock that others hold: a time
    /// with its unit
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub request_timeout: String,
    /// How user and group ids are mapped: `user` (you map to the user that the server takes you for), `name` (equal
    /// names on both sides), `none` (ids unchanged), or a file of lines `u LOCAL REMOTE` and `g LOCAL REMOTE`
    /// [default: none for a directory and 9p://, user for nigh:// and HOST:/DIR]
    #[arg(long, value_name = "user|name|none|FILE")]
    pub idmap: Option<String>,
    /// Memory for cached metadata, for example 256M [default: an eighth of the memory, at most 1G]
    #[arg(long, value_name = "SIZE")]
    pub cache_size: Option<String>,
    /// Most directories kept in memory, wholly or in part: a number, or `unlimited` [default: unlimited, within
    /// --cache-size]
    #[arg(long, value_name = "N|unlimited")]
    pub max_dirs: Option<String>,
    /// How long an unused directory stays in memory: a time with its unit, or `forever` [default: forever, within
    /// --cache-size]
    #[arg(long, value_name = "TIME|forever")]
    pub dir_timeout: Option<String>,
    /// nigh://: the file with the server's token, which only you may read
    #[arg(long, value_name = "FILE")]
    pub token: Option<PathBuf>,
    /// nigh://: no encryption; the server must have this option too
    #[arg(long, conflicts_with = "ca")]
    pub plaintext: bool,
    /// nigh://: check the server by a certificate of an authority in this PEM file, not by its key
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// HOST:/DIR: the command to run instead of ssh [default: $NIGH_SSH, or ssh]
    #[arg(long, value_name = "COMMAND")]
    pub ssh: Option<String>,
    /// HOST:/DIR: copy this program to ~/.cache/nigh/bin there first, and use it
    #[arg(long)]
    pub install_server: bool,
    /// Whether programs that watch by inotify see changes by others: in watched directories, as far as nigh can see
    /// the watches (`auto`), also in every directory of which all names are in memory (`on`), or not at all
    #[arg(long, value_name = "auto|on|off", default_value = "auto", value_parser = ["auto", "on", "off"])]
    pub events: String,
    /// Stay in the foreground and log to standard error (NIGH_LOG=nigh=debug says more)
    #[arg(long)]
    pub foreground: bool,
    /// Threads that read requests
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
    /// File descriptor that reports when the mount is ready or has failed (used by `nigh mount` itself)
    #[arg(long, hide = true)]
    pub ready_fd: Option<i32>,
    /// Check what can be checked without mounting (mount.nigh -f)
    #[arg(long, hide = true)]
    pub fake: bool,
    /// Pass over unknown options of -o (mount.nigh -s)
    #[arg(long, hide = true)]
    pub sloppy: bool,
}

#[derive(clap::Args)]
pub struct ServeArgs {
    /// A directory that may be mounted by its name; NAME defaults to the directory's name
    #[arg(long, value_name = "[NAME=]DIR")]
    pub export: Vec<OsString>,
    /// Where: unix:///PATH, tcp://ADDRESS[:PORT] (port 21644 unless said), stdio (what ssh runs: leads to
    /// your own server), user (the socket of your own mounts, which is always there)
    #[arg(long, value_name = "WHERE")]
    pub listen: Vec<String>,
    /// tcp://: the file with the token that clients must have; created if it is missing
    #[arg(long, value_name = "FILE")]
    pub token: Option<PathBuf>,
    /// tcp://: no encryption
    #[arg(long)]
    pub plaintext: bool,
    /// tcp://: accept the user ids that clients claim; only where all machines that can connect are trusted
    #[arg(long)]
    pub trust_client_ids: bool,
    /// How callers' ids are changed: `root`: uid 0 becomes uid 65534 (the default on tcp://); `all`: every caller
    /// becomes the serving user
    #[arg(long, value_parser = ["root", "all", "none"])]
    pub squash: Option<String>,
}
