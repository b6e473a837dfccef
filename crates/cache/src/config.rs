//! What a mount was asked to be.

use crate::ahead::Prefetch;
use crate::kernel::Level;
use nigh_types::Span;

/// What becomes of requests while the remote is away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnDisconnect {
    /// They wait until it is back.
    Wait,
    /// One that has waited for so long, for whatever reason, is answered `EIO`; but for locks that others hold.
    Fail(Span),
    /// They are answered from what was held, true or not; changes get `EROFS`, what is not known `EIO`.
    Stale,
}

/// Settings of one cache; fixed over its life, but for `level` ([`crate::Cache::handle_mounted_below`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Cached facts are held to this many bytes, whole directories going first.
    pub budget_bytes: u64,
    /// What the kernel can be told to forget.
    pub level: Level,
    /// A directory's listing is fetched after this many different missing names.
    pub misses_before_listing: u32,
    /// The kernel may keep listings of directories below this size.
    pub kernel_listing_below: u64,
    /// Beyond so many missing names given to the kernel it is given none.
    pub kernel_missing_most: u64,
    /// Listings tell the kernel of no more inodes than this.
    pub kernel_inodes_most: u64,
    /// The kernel can be asked to forget inodes that it does not use (`FUSE_NOTIFY_PRUNE`).
    pub prunes: bool,
    /// Directories of which something is kept, and for how long nobody may have asked for one; `None`: for ever.
    pub most_dirs: u64,
    pub dir_timeout: Option<Span>,
    /// Bytes that an entry costs the kernel's buffer beside its name (padded to 8): without and with
    /// attributes (`struct fuse_dirent`, `struct fuse_direntplus`).
    pub entry_size: (u32, u32),
    /// A kernel drops pages before it writes past them (since Linux 6.6; it comes with `FUSE_DIRECT_IO_ALLOW_MMAP`).
    pub direct_appends: bool,
    pub on_disconnect: OnDisconnect,
    pub prefetch: Prefetch,
    /// Symlink targets are kept; else they are asked each time.
    pub keeps_targets: bool,
    /// The kernel keeps what READLINK answers (`FUSE_CACHE_SYMLINKS`).
    pub kernel_keeps_targets: bool,
    /// Offsets in directories fit 31 bits, for 32-bit programs (docs/decisions/0020-cookies-of-31-bits.md).
    pub short_cookies: bool,
    /// Whoever waits for a listing is told names first, whatever it wants and however few are to come (for tests).
    pub names_first: bool,
    /// Durable identity of this client; see `OpName`.
    pub client: u64,
    /// Random, of this start.
    pub incarnation: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            budget_bytes: 1 << 30,
            level: Level::All,
            misses_before_listing: 4,
            kernel_listing_below: 1_000,
            kernel_missing_most: 100_000,
            kernel_inodes_most: 900_000,
            prunes: false,
            most_dirs: u64::MAX,
            dir_timeout: None,
            entry_size: (24, 152),
            direct_appends: false,
            on_disconnect: OnDisconnect::Wait,
            prefetch: Prefetch::Auto,
            keeps_targets: true,
            kernel_keeps_targets: true,
            short_cookies: false,
            names_first: false,
            client: 0,
            incarnation: 0,
        }
    }
}
