//! The nigh command.
fn main() {}
