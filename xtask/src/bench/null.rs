#[derive(clap::Args)]
pub struct Options {}
pub fn run(_: &Options) -> anyhow::Result<bool> {
    anyhow::bail!("being written")
}
