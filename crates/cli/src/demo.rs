//! `nigh demo`.
pub fn run() -> anyhow::Result<()> {
    anyhow::bail!("not yet")
}
