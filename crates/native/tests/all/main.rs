//! Tests of messages and of sessions' both ends, in one program: each program of its own is linked anew.

#[path = "../common/mod.rs"]
mod common;

mod conformance;
mod connections;
mod forgotten;
mod golden;
mod messages;
mod open_pins;
mod server_end;
mod sessions;
