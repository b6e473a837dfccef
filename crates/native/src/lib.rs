//! nigh's own protocol, both ends, without I/O.
