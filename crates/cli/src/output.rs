//! Standard output: a closed pipe is no error, a full disk is an error of one line.

use std::io::{self, ErrorKind, Write};

use anyhow::{Context, Result};

/// Writes `text` to standard output. A closed pipe counts as success, since its reader needs no more.
///
/// # Errors
/// Any other failure to write.
pub fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.context("standard output"),
    }
}

/// Writes `text` and a newline.
///
/// # Errors
/// Those of [`print`].
pub fn print_line(text: &str) -> Result<()> {
    print(&format!("{text}\n"))
}
