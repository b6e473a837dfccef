//! The project's chores: check, test, bench.
fn main() {}
