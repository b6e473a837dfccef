//! `nigh mount`.

use crate::args::MountArgs;
use crate::background::{self, Ready};
use crate::options::{Options, Usage};
use crate::{identity, log_to_stderr, units};
use anyhow::{Context, Result, bail};
use nigh_client::fuse::abi::flags::init;
use nigh_client::fuse::mount::MountOptions;
use nigh_client::fuse::{Level, Wanted};
use nigh_client::{CacheConfig, Link, Mount, MountConfig};
use nigh_server::{Places, daemon};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

pub fn run(args: &MountArgs) -> Result<()> {
    let places = Places::of_user()?;
    places.make_runtime()?;
    if args.foreground || args.ready_fd.is_some() {
        log_to_stderr(if args.foreground { "info" } else { "warn" });
        let mut ready = Ready::new(args.ready_fd);
        let mount = prepare(args, &places).and_then(|config| start(config, &places));
        return match mount {
            Ok(mount) => {
                ready.stands();
                mount.wait();
                Ok(())
            }
            Err(error) => {
                ready.failed(&error);
                Err(error)
            }
        };
    }
    // What can be told without a daemon is told before one is started.
    prepare(args, &places)?;
    background::start(&places.runtime.join("mount.log"))
}

/// Checks everything that the command line and environment say.
fn prepare(args: &MountArgs, places: &Places) -> Result<MountConfig> {
    let options = Options::parse(&args.options)?;
    let term = match options.term {
        Some(term) => term,
        None => units::term("--host-timeout", &args.host_timeout)?,
    };
    let budget_bytes = match &args.cache_size {
        Some(text) => units::size("--cache-size", text)?,
        None => units::default_cache_size(),
    };
    let source = source_directory(&args.source)?;
    clear_dead(&args.mountpoint)?;
    let mut mount = MountOptions::new(&args.mountpoint, source.to_string_lossy());
    mount.read_only = options.read_only;
    mount.allow_other |= options.allow_other;
    mount.noexec = options.noexec;
    mount.nosuid = !options.suid;
    mount.nodev = !options.dev;
    let (wanted, level) = masked_features()?;
    Ok(MountConfig {
        options: mount,
        cache: CacheConfig {
            budget_bytes,
            client: identity::client(&places.state)?,
            incarnation: identity::random()?,
            ..CacheConfig::default()
        },
        wanted,
        level,
        attach: source.as_os_str().as_bytes().to_vec(),
        term,
        threads: args.threads,
        reconnect: Some(Box::new(|| Ok(connect()?.into()))),
        runtime: places.runtime.clone(),
    })
}

/// A mount whose daemon was killed is in nobody's use: it makes way.
fn clear_dead(mountpoint: &Path) -> Result<()> {
    if nigh_client::fuse::mount::liveness(mountpoint) == nigh_client::fuse::mount::Liveness::Dead {
        nigh_client::fuse::mount::unmount(mountpoint, true)?;
    }
    Ok(())
}

fn source_directory(source: &Path) -> Result<PathBuf> {
    let text = source.to_string_lossy();
    for (scheme, what) in
        [("nigh://", "a nigh server"), ("smb://", "SMB"), ("9p://", "9P"), ("unix://", "a socket")]
    {
        if text.starts_with(scheme) {
            bail!(Usage(format!("{text}: {what} cannot be mounted yet; name a directory of this machine")));
        }
    }
    let path = source.canonicalize().with_context(|| {
        format!("{}: name a directory that is there and that you may enter", source.display())
    })?;
    if !path.is_dir() {
        bail!("{}: not a directory; only directories can be mounted", source.display());
    }
    let rights = rustix::fs::Access::READ_OK | rustix::fs::Access::EXEC_OK;
    rustix::fs::accessat(rustix::fs::CWD, &path, rights, rustix::fs::AtFlags::EACCESS).with_context(
        || format!("{}: you may not read and enter it; ask its owner, or mount another", source.display()),
    )?;
    Ok(path)
}

/// Tests take features away: `NIGH_FUSE_MINOR=31`, `NIGH_NOTIFY_LEVEL=all|no-epoch|none`,
/// `NIGH_FUSE_WITHOUT=FLAG,…` (names of INIT flags).
fn masked_features() -> Result<(Wanted, Level)> {
    let mut wanted = Wanted::default();
    if let Ok(minor) = std::env::var("NIGH_FUSE_MINOR") {
        wanted.max_minor = minor.parse().context("NIGH_FUSE_MINOR")?;
    }
    if let Ok(names) = std::env::var("NIGH_FUSE_WITHOUT") {
        for name in names.split(',').filter(|name| !name.is_empty()) {
            let flag = init::ALL.iter().find(|(known, _, _)| *known == name);
            let (_, bit, _) = flag.with_context(|| format!("NIGH_FUSE_WITHOUT: no flag {name}"))?;
            wanted = wanted.without(*bit);
        }
    }
    let level = match std::env::var("NIGH_NOTIFY_LEVEL").as_deref() {
        Err(_) | Ok("all") => Level::All,
        Ok("no-epoch") => Level::NoEpoch,
        Ok("none") => {
            // What cannot be taken back must be looked at again on each read.
            wanted = wanted.without(init::EXPLICIT_INVAL_DATA);
            wanted.flags |= init::AUTO_INVAL_DATA;
            Level::None
        }
        Ok(other) => bail!("NIGH_NOTIFY_LEVEL={other}: all, no-epoch or none"),
    };
    Ok((wanted, level))
}

/// This user's server, started if absent; `NIGH_LINK` names a socket to go through instead.
fn connect() -> std::io::Result<UnixStream> {
    match std::env::var_os("NIGH_LINK") {
        Some(path) => UnixStream::connect(path),
        None => daemon::ensure_running(&std::env::current_exe()?),
    }
}

fn start(config: MountConfig, places: &Places) -> Result<Mount> {
    let link: Link = connect()
        .with_context(|| {
            format!("reaching your server; its log is {}", places.runtime.join("serve.log").display())
        })?
        .into();
    Ok(Mount::start(config, link)?)
}
