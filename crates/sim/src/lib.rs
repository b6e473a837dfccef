//! Caches, remotes and servers under virtual time, for tests.
