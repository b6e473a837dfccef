//! Paths of the checkout and of cargo's target directory.

use std::path::{Path, PathBuf};

/// The directories in `crates` of the crates without clock, socket, thread or randomness.
pub const PURE: &[&str] = &["types", "contents", "cache", "remote", "native", "lease", "pathclient", "ninep"];

/// The top of the checkout.
#[must_use]
pub fn checkout() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// cargo's target directory.
#[must_use]
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| checkout().join("target"), PathBuf::from)
}

/// The cargo that runs this program.
#[must_use]
pub fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

#[must_use]
pub fn is_root() -> bool {
    unsafe { libc::geteuid() == 0 }
}
