//! All orders: what the protocol's machines do with a few calls of two clients, however frames, threads, kernels and a
//! restart of the server meet (docs/decisions/0016-checkers.md, section 3).
//!
//! | room | what lives there |
//! | --- | --- |
//! | `state` | one state, what may happen in it, and what must be so |
//! | `search` | every state that can be reached |
//! | `plans` | what is explored, by name |
//! | `path` | how one was reached, in words and as short as can be |

mod path;
mod plans;
mod search;
mod state;

use nigh_types::Span;
pub use plans::{LONG, PLANS};
pub use search::{Explored, Wrong};

/// What is explored.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// So many calls of each client: each is any of look a, look b, create a, unlink a, rename a b. A call that a
    /// client's kernel answers alone is none.
    pub calls: [u8; 2],
    /// A client asks the next when it has had the answer to the one before.
    pub one_by_one: bool,
    /// Both have looked at both names before.
    pub warm: bool,
    /// Others' changes are told in the place of recalls.
    pub pushes: bool,
    /// What is recalled soon after it was granted is granted no more for a while.
    pub contention: bool,
    /// The second one wants names alone, since its kernel can be told of one name only.
    pub alone: bool,
    /// Kernels forget at any time after they are told to, and not at once.
    pub slow_kernels: bool,
    /// The server may be killed and started again so often, anywhere.
    pub restarts: u8,
    /// So often time goes on to the next timer though something else might happen first.
    pub late: u8,
}

impl Bounds {
    /// Nothing goes wrong.
    #[must_use]
    pub const fn calm(calls: [u8; 2]) -> Bounds {
        Bounds {
            calls,
            one_by_one: false,
            warm: true,
            pushes: false,
            contention: false,
            alone: false,
            slow_kernels: true,
            restarts: 0,
            late: 0,
        }
    }
}

/// Of a session.
const TERM: Span = Span::from_millis(1_000);
const PATIENCE: Span = Span::from_millis(100);

/// Explores all that is within these bounds.
///
/// # Errors
/// What was so that must not be, and how it came to that.
pub fn explore(bounds: Bounds) -> Result<Explored, Wrong> {
    search::explore(bounds)
}
