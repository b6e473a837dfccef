//! The metadata cache as a pure state machine.
