//! Protocols of servers: how the sessions of a mount begin.

pub mod native;
pub mod ninep;
