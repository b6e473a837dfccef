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
        /// End what waits for the mount first, as after a while for one that does not answer: requests under way
        /// fail, and what programs have not written back is lost
        #[arg(long)]
        force: bool,
    },
    /// Have all names and attributes below a directory of a mount in memory
    Prefetch { path: PathBuf },
    /// Say how mounts are, or a server
    Status {
        mountpoint: Option<PathBuf>,
        /// A server in the place of mounts: the one that listens on this unix socket, else your own. Only root
        /// and its user may ask
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
    /// How long facts are believed before the server is asked again: a time with its unit, `off` or `forever`
    /// [default: until the server says that they changed, and 5s where it cannot hear of that]
    #[arg(long, value_name = "TIME")]
    pub host_timeout: Option<String>,
    /// 9p://: how long it is believed what a name leads to, and which names a directory has: a time with its unit, `off`
    /// or `forever` [default: 1s]
    #[arg(long, value_name = "TIME")]
    pub entry_timeout: Option<String>,
    /// 9p://: how long it is believed that a name leads nowhere [default: 1s]
    #[arg(long, value_name = "TIME")]
    pub negative_timeout: Option<String>,
    /// 9p://: how long attributes, symlink targets and file data are believed [default: 1s]
    #[arg(long, value_name = "TIME")]
    pub attr_timeout: Option<String>,
    /// Whether symlink targets are kept in memory (`keep`) or asked each time (`ask`)
    #[arg(long, value_name = "keep|ask", default_value = "keep", value_parser = ["keep", "ask"])]
    pub symlinks: String,
    /// Directories that are fetched before anybody asks: none (`off`); those that whoever walks a tree comes to next (`auto`); or all
    /// below a directory that is opened, as far as there is room (`all`)
    #[arg(long, value_name = "off|auto|all", default_value = "auto", value_parser = ["off", "auto", "all"])]
    pub prefetch: String,
    /// What becomes of requests while the server is away: they `wait` until it is back; `fail` with an I/O error
    /// when they have waited for --request-timeout; or are answered from what was held (`stale`): changes are
    /// refused then
    #[arg(long, value_name = "wait|fail|stale", default_value = "wait", value_parser = ["wait", "fail", "stale"])]
    pub on_disconnect: String,
    /// With --on-disconnect=fail: how long a request may wait, for whatever reason, but for a lock that others
    /// hold: a time with its unit
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub request_timeout: String,
    /// Who is who: `user` (you are whom the server takes you for), `name` (whoever has the same name on both
    /// sides), `none` (the same ids), or a file of lines `u LOCAL REMOTE` and `g LOCAL REMOTE` [default: none]
    #[arg(long, value_name = "user|name|none|FILE")]
    pub idmap: Option<String>,
    /// Memory for cached metadata, for example 256M [default: a quarter of the memory, at most 1G]
    #[arg(long, value_name = "SIZE")]
    pub cache_size: Option<String>,
    /// Directories of which something is kept in memory: a number, or `unlimited` [default: unlimited, within --cache-size]
    #[arg(long, value_name = "N|unlimited")]
    pub max_dirs: Option<String>,
    /// For how long a directory is kept that nobody asks for: a time with its unit, or `forever` [default: forever, within
    /// --cache-size]
    #[arg(long, value_name = "TIME|forever")]
    pub dir_timeout: Option<String>,
    /// nigh://: the file with the server's token, which only you may read
    #[arg(long, value_name = "FILE")]
    pub token: Option<PathBuf>,
    /// nigh://: no encryption, as the server must say too
    #[arg(long, conflicts_with = "ca")]
    pub plaintext: bool,
    /// nigh://: know the server by a certificate of an authority in this PEM file, not by its key
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// HOST:/DIR: the command to run in the place of ssh [default: $NIGH_SSH, or ssh]
    #[arg(long, value_name = "COMMAND")]
    pub ssh: Option<String>,
    /// HOST:/DIR: copy this program to ~/.cache/nigh/bin there first, and use it
    #[arg(long)]
    pub install_server: bool,
    /// Whether programs that watch by inotify are told what others change: in what is watched, as far as one may see
    /// that (`auto`), in every directory of which all names are in memory too (`on`), or not at all
    #[arg(long, value_name = "auto|on|off", default_value = "auto", value_parser = ["auto", "on", "off"])]
    pub events: String,
    /// Stay in the foreground and log to standard error (NIGH_LOG=nigh=debug says more)
    #[arg(long)]
    pub foreground: bool,
    /// Threads that take in requests
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
    /// Written to when the mount stands or has failed (used by `nigh mount` itself)
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
    /// A directory that may be mounted by its name; without NAME that of the folder
    #[arg(long, value_name = "[NAME=]DIR")]
    pub export: Vec<OsString>,
    /// Where: unix:///PATH, tcp://ADDRESS[:PORT] (port 21644 unless said), stdio (what ssh runs: leads to
    /// your own server), user (the socket of your own mounts, which is always there)
    #[arg(long, value_name = "WHERE")]
    pub listen: Vec<String>,
    /// tcp://: the file with the token that clients must have; made where it is not there
    #[arg(long, value_name = "FILE")]
    pub token: Option<PathBuf>,
    /// tcp://: no encryption
    #[arg(long)]
    pub plaintext: bool,
    /// tcp://: believe which user a caller is; only where all machines that can connect are trusted
    #[arg(long)]
    pub trust_client_ids: bool,
    /// Whom callers become: `root`: uid 0 becomes nobody (the default on tcp://); `all`: everybody becomes
    /// the serving user
    #[arg(long, value_parser = ["root", "all", "none"])]
    pub squash: Option<String>,
}
