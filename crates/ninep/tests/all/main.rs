//! Tests against a server of 9P2000.L in memory, in one program: each program of its own is linked anew.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/stage.rs"]
mod stage;

mod conformance;
mod prefetch;
mod session;
mod wrong;
