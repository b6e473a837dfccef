//! Servers that speak 9P2000.L.

use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::test::over::{Serving, free_port};
use crate::test::packages;
use crate::test::world::World;

/// unpfs, a small server from crates.io.
pub fn unpfs(world: &World, export: &Path) -> Result<Serving> {
    let program =
        packages::exerciser("unpfs").context("not installed (cargo install --locked unpfs@0.13.0)")?;
    let port = free_port()?;
    let mut command = Command::new(program);
    command.arg(format!("tcp!127.0.0.1!{port}")).arg(export);
    fs::create_dir_all(export)?;
    Serving::start(world, command, port)
}

pub fn connect(server: &Serving) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", server.port))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
