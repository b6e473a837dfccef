//! Exhaustive exploration: all interleavings of a few calls of two clients, with frames, server threads, kernels and a
//! server restart in any order (docs/decisions/0016-checkers.md, section 3).
//!
//! | module | contents |
//! | --- | --- |
//! | `state` | one state, its possible steps, and its checks |
//! | `search` | the search through all reachable states |
//! | `plans` | the named explorations |
//! | `path` | the path to a state, shortened and described |

mod path;
mod plans;
mod search;
mod state;

use nigh_types::Span;
pub use plans::{LONG, PLANS};
pub use search::{Explored, Violation};

/// The bounds of an exploration.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Number of calls per client. Each is any of look a, look b, create a, unlink a, rename a b. A call that the
    /// client's kernel answers from its cache does not count.
    pub calls: [u8; 2],
    /// A client sends its next call only after the previous reply.
    pub one_by_one: bool,
    /// Both clients have looked up both names before.
    pub warm: bool,
    /// The server pushes changes instead of recalling leases.
    pub pushes: bool,
    /// A lease that is recalled soon after its grant is not granted again for a while.
    pub contention: bool,
    /// The second client asks for exclusive directory leases, since its kernel can be notified of single names only.
    pub exclusive_leases: bool,
    /// Kernels execute notifications at any later time, instead of at once.
    pub slow_kernels: bool,
    /// How often the server may be killed and restarted, at any point.
    pub restarts: u8,
    /// How often time may advance to the next timer while other steps are possible.
    pub late: u8,
}

impl Bounds {
    /// Bounds without faults.
    #[must_use]
    pub const fn calm(calls: [u8; 2]) -> Bounds {
        Bounds {
            calls,
            one_by_one: false,
            warm: true,
            pushes: false,
            contention: false,
            exclusive_leases: false,
            slow_kernels: true,
            restarts: 0,
            late: 0,
        }
    }
}

/// The session term.
const TERM: Span = Span::from_millis(1_000);
const PATIENCE: Span = Span::from_millis(100);

/// Explores all states within these bounds.
///
/// # Errors
/// The first violation, and the path to it.
pub fn explore(bounds: Bounds) -> Result<Explored, Violation> {
    search::explore(bounds)
}
