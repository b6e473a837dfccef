//! The remotes' common suite over the protocol.

use crate::common::pair::{Pair, Server, T0};
use nigh_remote::conformance::assert_conforms;

#[test]
fn native_conforms() {
    assert_conforms(&mut Pair { chunk: u32::MAX, server: Server::new(T0, 1) });
}

#[test]
fn native_conforms_over_a_stream_in_small_pieces() {
    assert_conforms(&mut Pair { chunk: 61, server: Server::new(T0, 1) });
}
