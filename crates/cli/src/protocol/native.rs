//! Sessions of nigh's own protocol.

use crate::options::Options;
use nigh_client::IdMapChoice;
use nigh_client::fuse::Level;
use nigh_native::{COMPRESSED, EXCLUSIVE_DIR_LEASES, ID_NAMES, LIST_NAMES, PREFETCH, TRUSTS_WATCH, UPDATES};
use nigh_types::{Span, Term};

/// Limit on cached facts where the server cannot detect changes on its own disk.
pub const UNWATCHED_TERM: Term = Term::Limited(Span::from_secs(5));

/// Optional protocol features that the client requests. Without an explicit timeout facts stay valid until they are
/// recalled, and only facts that the server does not watch have a limit.
pub fn features(options: &Options, trusts_watch: bool, idmap: &IdMapChoice, level: Level) -> u64 {
    let pushes = std::env::var_os("NIGH_PUSHES").is_none_or(|pushes| pushes != "off");
    let chosen = [
        (nigh_client::needs_exclusive_dir_lease(level), EXCLUSIVE_DIR_LEASES),
        (pushes, UPDATES),
        (options.compress, COMPRESSED),
        (true, PREFETCH),
        (true, LIST_NAMES),
        (trusts_watch, TRUSTS_WATCH),
        (idmap.wants_names(), ID_NAMES),
    ];
    let wanted = chosen.into_iter().filter(|(wanted, _)| *wanted);
    wanted.fold(0, |features, (_, feature)| features | feature)
}
