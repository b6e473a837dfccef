//! Mounted tests.
fn main() {}
