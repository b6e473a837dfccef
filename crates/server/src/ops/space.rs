//! Calls that find a filesystem out of space.

use super::Context;
use crate::os::error::{Fault, Result};
use nigh_types::Errno;

/// Attempts a call, or a repeatable part of one. If its filesystem is out of space, closes kept files and retries
/// once.
pub(super) fn with_space<T>(
    cx: Context<'_>,
    filesystem: Option<u64>,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    let leases = cx.files.leases();
    let rounds = leases.space_reclaimer.rounds();
    match attempt() {
        Err(Fault(Errno::NOSPC | Errno::DQUOT)) if leases.reclaim_space(cx.export, filesystem, rounds) => {
            attempt()
        }
        other => other,
    }
}
