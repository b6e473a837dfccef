//! Sessions of nigh's own protocol.

use super::SessionRequest;
use nigh_client::Begin;
use nigh_native::{
    COMPRESSED, ClientConfig, EXCLUSIVE_DIR_LEASES, ID_NAMES, LIST_NAMES, PREFETCH, REVERSED_PREFETCH,
    TRUSTS_WATCH, UPDATES, sessions,
};
use nigh_types::{Span, Term};

/// Limit on cached facts where the server cannot detect changes on its own disk.
const UNWATCHED_TERM: Term = Term::Limited(Span::from_secs(5));

/// Features that every mount requests, and the demonstration.
pub const FEATURES: u64 = PREFETCH | REVERSED_PREFETCH | LIST_NAMES;

/// Returns the function that begins sessions.
pub fn begin(request: &SessionRequest<'_>) -> Begin {
    sessions(ClientConfig {
        client: request.client,
        incarnation: request.incarnation,
        attach: request.attach.to_vec(),
        term: request.term.unwrap_or(UNWATCHED_TERM),
        features: features(request),
    })
}

/// Optional protocol features that the client requests. Without an explicit timeout facts stay valid until they are
/// recalled, and only facts that the server does not watch have a limit.
fn features(request: &SessionRequest<'_>) -> u64 {
    let pushes = std::env::var_os("NIGH_PUSHES").is_none_or(|pushes| pushes != "off");
    let chosen = [
        (nigh_client::needs_exclusive_dir_lease(request.level), EXCLUSIVE_DIR_LEASES),
        (pushes, UPDATES),
        (request.options.compress, COMPRESSED),
        (request.term.is_none(), TRUSTS_WATCH),
        (request.idmap.wants_names(), ID_NAMES),
    ];
    let wanted = chosen.into_iter().filter(|(wanted, _)| *wanted);
    wanted.fold(FEATURES, |features, (_, feature)| features | feature)
}
