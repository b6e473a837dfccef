//! diod is killed and restarted under a mount.

use std::fs;
use std::io::{Read, Seek, Write};
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::test::mount::{Mount, MountParams};
use crate::test::over::{self, LinkKind, free_port};
use crate::test::world::{As, World};

/// Open files continue, waiting calls get replies, and changes made meanwhile are visible.
pub fn killed(world: &World) -> Result<()> {
    let port = free_port()?;
    let mut server = over::diod_on(world, &world.root, port)?;
    let (source, point) = (world.dir("nine", As::Us)?, world.dir("mnt", As::Us)?);
    fs::create_dir_all(source.join("a/b"))?;
    fs::write(source.join("a/b/read"), "to be read")?;
    let mut how = MountParams::new(As::Us).with("--entry-timeout=forever").with("--attr-timeout=forever");
    how.over = Some((LinkKind::Ninep, Some(port)));
    let mount = Mount::new(world, &source, &point, &how)?;
    let mut reads = fs::File::open(point.join("a/b/read"))?;
    let mut log = fs::OpenOptions::new().create(true).append(true).open(point.join("a/b/log"))?;
    log.write_all(b"one\n")?;
    for round in 0..3 {
        let name = format!("new-{round}");
        server.child.kill()?;
        server.child.wait()?;
        fs::write(source.join(&name), "made meanwhile")?;
        let path = point.join(&name);
        // It waits until the server is back.
        let waits = std::thread::spawn(move || fs::read_to_string(path));
        std::thread::sleep(Duration::from_millis(300));
        ensure!(!waits.is_finished(), "without a server that is unknown");
        server = over::diod_on(world, &world.root, port)?;
        let found = waits.join().map_err(|_| anyhow::anyhow!("it died"))??;
        ensure!(found == "made meanwhile", "{found:?}");
        log.write_all(b"more\n")?;
        reads.rewind()?;
        let mut text = String::new();
        reads.read_to_string(&mut text)?;
        ensure!(text == "to be read", "{text:?}");
    }
    ensure!(fs::read_to_string(source.join("a/b/log"))? == "one\nmore\nmore\nmore\n");
    drop((reads, log));
    mount.unmount()
}
