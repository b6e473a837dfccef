//! `nigh demo`: a small tree over an emulated link, through a mount if one can be made.

mod direct;
mod link;
mod resident;
mod tree;
mod work;

use crate::output::print_line;
use crate::signals::HeldSignals;
use crate::{identity, protocol, units};
use anyhow::{Context, Result};
use direct::Direct;
use nigh_client::fuse::mount::MountOptions;
use nigh_client::fuse::{Level, RequestedFeatures};
use nigh_client::{AttachedSession, CacheConfig, IdMapChoice, MountConfig};
use nigh_native::{ClientConfig, UPDATES};
use nigh_server::{Server, ServerOptions};
use nigh_types::Term;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;
use work::{Files, Mounted};

const ROUND_TRIP: Duration = Duration::from_millis(10);

/// Runs the demonstration; leaves nothing behind.
pub fn run() -> Result<()> {
    let room =
        tempfile::Builder::new().prefix("nigh-demo-").tempdir().context("making a place to work in")?;
    let tree = room.path().join("far");
    let made = tree::make(&tree)?;
    print_line(&format!(
        "A tree of {} directories, {} files and {} symlinks, behind a link with a round trip of {} ms.",
        made.directories,
        made.files,
        made.symlinks,
        ROUND_TRIP.as_millis()
    ))?;
    let server = Server::new(ServerOptions::new(room.path().join("state")))?;
    let link = link::slow(server.serve_in_process()?, ROUND_TRIP)?;
    let near = room.path().join("near");
    std::fs::create_dir(&near)?;
    let config = config(&tree, &near, room.path())?;
    match nigh_client::fuse::mount::check_support() {
        Ok(()) => {
            let session = AttachedSession::new(config, link.into())?;
            let signals = HeldSignals::hold()?;
            let mount = session.mount()?;
            signals.unmount(&mount);
            let source = mount.source();
            let unmount =
                Unmount { mountpoint: &near, serving: Some(std::thread::spawn(move || mount.wait())) };
            print_line(
                "Mounted. Each figure counts what the server was asked and how often a caller waited for it.\n",
            )?;
            show(&Mounted::new(&near), &made, || source.status())?;
            unmount.finish()?;
        }
        Err(why) => {
            print_line(&format!("Mounting is not possible here ({why})."))?;
            print_line(
                "So the same requests go to the cache in this process, as the kernel would send them.\n",
            )?;
            let (mount, direct) = Direct::start(config, link.into())?;
            show(&direct, &made, || mount.status())?;
            direct.close();
            mount.wait();
        }
    }
    server.end_sessions("the demonstration is over");
    Ok(())
}

fn config(tree: &Path, near: &Path, room: &Path) -> Result<MountConfig> {
    let (client, incarnation) = (identity::random()?, identity::random()?);
    Ok(MountConfig {
        options: MountOptions::new(near, "nigh-demo"),
        cache: CacheConfig {
            budget_bytes: units::default_cache_size(),
            data_budget_bytes: units::default_data_cache_size(),
            client,
            incarnation,
            ..CacheConfig::default()
        },
        wanted: RequestedFeatures::default(),
        level: Level::All,
        begin: nigh_native::sessions(ClientConfig {
            client,
            incarnation,
            attach: tree.as_os_str().as_bytes().to_vec(),
            term: Term::Session,
            features: protocol::native::FEATURES | UPDATES,
        }),
        idmap: IdMapChoice::None,
        threads: 1,
        reconnect: None,
        events: None,
        watchdog: Some(crate::mount::watchdog()),
        pressure: None,
        runtime: room.join("run"),
    })
}

/// Guard that unmounts in any case, also after an error.
struct Unmount<'a> {
    mountpoint: &'a Path,
    serving: Option<JoinHandle<()>>,
}

impl Unmount<'_> {
    fn finish(mut self) -> Result<()> {
        nigh_client::fuse::mount::unmount(self.mountpoint, false)?;
        if let Some(serving) = self.serving.take() {
            let _ = serving.join();
        }
        Ok(())
    }
}

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        if let Some(serving) = self.serving.take() {
            let _ = nigh_client::fuse::mount::unmount(self.mountpoint, true);
            let _ = serving.join();
        }
    }
}

fn show(files: &dyn Files, made: &tree::TreeCounts, status: impl Fn() -> serde_json::Value) -> Result<()> {
    print_line(&format!("{:<44} {:>10} {:>10} {:>8}", "", "time", "requests", "waits"))?;
    let mut table = work::Table::new(status);
    table.line("list everything with attributes, first", || files.walk(made.names()))?;
    table.again(|| files.walk(made.names()))?;
    table.line("1,000 names that do not exist", || files.missing("none-", 1_000))?;
    table.line("one missing name 10,000 times", || files.missing_one(10_000))?;
    table.line("read every symlink", || files.read_links(made.symlinks))?;
    table.line("read every file, first", || files.read(made.files))?;
    let dropped = files.count_not_resident()?;
    if dropped.is_some() {
        table.again(|| files.read(made.files))?;
    } else {
        print_line("(Contents are kept by the kernel, which has no part in this.)")?;
    }
    print_line(&format!(
        "\n{}\nAsking the server each time, one by one, would have taken at least {:.0} s more.",
        table.conclusion(dropped.unwrap_or(0)),
        table.saved(ROUND_TRIP).as_secs_f64()
    ))?;
    Ok(())
}
