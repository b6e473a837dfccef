//! The ids of this client (docs/decisions/0003-mutation-ids.md).

use anyhow::{Context, Result};
use std::io::Write;
use std::path::Path;

/// Returns the durable client id, which is created once in the state directory.
pub fn client(state: &Path) -> Result<u64> {
    let path = state.join("client-id");
    let parse = |text: &str| u64::from_str_radix(text.trim(), 16).ok();
    if let Some(id) = std::fs::read_to_string(&path).ok().as_deref().and_then(parse) {
        return Ok(id);
    }
    std::fs::create_dir_all(state).with_context(|| format!("making {}", state.display()))?;
    let mut file = tempfile::NamedTempFile::new_in(state).context("naming this client")?;
    writeln!(file, "{:016x}", random()?)?;
    file.as_file().sync_all()?;
    match file.persist_noclobber(&path) {
        Ok(_) => {}
        Err(error) if error.error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error.error).with_context(|| format!("writing {}", path.display())),
    }
    let text = std::fs::read_to_string(&path)?;
    parse(&text).with_context(|| format!("{} is damaged: remove it", path.display()))
}

/// Returns a random id, as each start of the daemon needs one.
pub fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    anyhow::ensure!(got == bytes.len(), "the kernel gave too little randomness");
    Ok(u64::from_le_bytes(bytes))
}
