//! `nigh mount`.

use crate::args::MountArgs;
use crate::background::{self, Ready};
use crate::options::Options;
use crate::protocol::SessionRequest;
use crate::signals::HeldSignals;
use crate::source::Source;
use crate::{identity, log_to_stderr, units};
use anyhow::{Context, Result, bail};
use nigh_client::events::{Program, run_replay_child};
use nigh_client::fuse::abi::flags::init;
use nigh_client::fuse::mount::{
    Liveness, MountOptions, Unmounted, liveness, unmount as unmount_at, unmount_by_force, unmount_unless_used,
};
use nigh_client::fuse::{Level, RequestedFeatures};
use nigh_client::pressure::{Heaps, Pressure, SHORT, Trigger, configure_allocator};
use nigh_client::{
    AttachedSession, CacheConfig, EventsConfig, IdMapChoice, Mount, MountConfig, OnDisconnect, Prefetch,
};
use nigh_server::ServerDirs;
use nigh_types::{Bug, plant};
use std::ffi::OsString;
use std::path::Path;

/// `words`: the command line after the name of the program.
pub fn run(args: &MountArgs, words: &[OsString]) -> Result<()> {
    let places = ServerDirs::of_user()?;
    places.make_runtime()?;
    if args.foreground || args.ready_fd.is_some() {
        configure_allocator(Heaps::One);
        log_to_stderr(if args.foreground { "info" } else { "warn" });
        let mut ready = Ready::new(args.ready_fd);
        return match start(args, &places, &ready) {
            Ok((mount, note)) => {
                mount.settle();
                ready.report_mounted(note.as_deref());
                mount.wait();
                Ok(())
            }
            Err(error) => {
                ready.report_failed(&error);
                Err(error)
            }
        };
    }
    // Errors that need no daemon are reported before one is started.
    prepare(args, &places, &Source::parse(args, &places)?)?;
    if args.fake {
        return Ok(());
    }
    background::start(&places.runtime.join("mount.log"), words)
}

/// Checks everything that the command line and the environment request.
fn prepare(args: &MountArgs, places: &ServerDirs, source: &Source) -> Result<MountConfig> {
    let options = Options::parse(&args.options, args.sloppy)?;
    options.check_rights(rustix::process::geteuid().is_root())?;
    let asked = args.host_timeout.as_ref().map(|text| units::term("--host-timeout", text)).transpose()?;
    let said = options.term.or(asked);
    let budget_bytes = match &args.cache_size {
        Some(text) => units::size("--cache-size", text)?,
        None => units::default_cache_size(),
    };
    let data_budget_bytes = match &args.data_cache {
        Some(text) => units::size_or_off("--data-cache", text)?,
        None => units::default_data_cache_size(),
    };
    let readahead_bytes = units::size_or_off("--readahead", &args.readahead)?;
    let most_dirs = args.max_dirs.as_ref().map(|text| units::number("--max-dirs", text)).transpose()?;
    let dir_timeout =
        args.dir_timeout.as_ref().map(|text| units::lasting("--dir-timeout", text)).transpose()?;
    let on_disconnect = on_disconnect(args, &options)?;
    let idmap = match options.idmap.as_ref().or(args.idmap.as_ref()) {
        Some(word) => IdMapChoice::load(word)?,
        None => source.protocol().default_idmap(source.is_local()),
    };
    if unmount_dead(&args.mountpoint)? == Liveness::Absent {
        source.check_outside(&args.mountpoint)?;
    }
    let mount = mount_options(args, &options, source);
    inject_faults()?;
    let keeps_targets = args.symlinks == "keep";
    let (wanted, level) = features_wanted(keeps_targets, options.idmapped)?;
    let (client, incarnation) = (identity::client(&places.state)?, identity::random()?);
    let begin = source.protocol().begin(&SessionRequest {
        args,
        options: &options,
        attach: source.attach(),
        source: source.shown(),
        idmap: &idmap,
        level,
        term: said,
        client,
        incarnation,
    })?;
    Ok(MountConfig {
        options: mount,
        cache: CacheConfig {
            budget_bytes,
            data_budget_bytes,
            readahead_bytes,
            on_disconnect,
            client,
            incarnation,
            keeps_targets,
            most_dirs: most_dirs.flatten().unwrap_or(u64::MAX),
            dir_timeout: dir_timeout.flatten(),
            short_cookies: options.short_cookies,
            prefetch: prefetch(&args.prefetch),
            ..CacheConfig::default()
        },
        wanted,
        level,
        begin,
        idmap,
        threads: args.threads,
        reconnect: Some(source.reconnect()),
        watchdog: Some(watchdog()),
        events: events(options.events.as_ref().unwrap_or(&args.events)),
        pressure: pressure(),
        runtime: places.runtime.clone(),
    })
}

/// Kernel features to request, and the notifications that may be used.
fn features_wanted(keeps_targets: bool, idmapped: bool) -> Result<(RequestedFeatures, Level)> {
    let (mut wanted, level) = masked_features()?;
    if !keeps_targets {
        wanted = wanted.without(init::CACHE_SYMLINKS);
    }
    if idmapped {
        wanted.flags |= init::ALLOW_IDMAP;
    }
    Ok((wanted, level))
}

/// The options of mount(2).
fn mount_options(args: &MountArgs, options: &Options, source: &Source) -> MountOptions {
    let mut mount = MountOptions::new(&args.mountpoint, source.shown());
    mount.read_only = options.read_only;
    mount.allow_other |= options.allow_other;
    mount.noexec = options.noexec;
    mount.nosuid = !options.suid;
    mount.nodev = !options.dev;
    mount.synchronous = options.synchronous;
    mount
}

/// Memory-pressure monitor; tests override its trigger with `NIGH_PRESSURE`.
fn pressure() -> Option<Box<dyn Pressure>> {
    let trigger = std::env::var("NIGH_PRESSURE").unwrap_or_else(|_| SHORT.to_owned());
    Some(Box::new(Trigger::of_system(&trigger)?))
}

fn prefetch(word: &str) -> Prefetch {
    match word {
        "off" => Prefetch::Off,
        "all" => Prefetch::All,
        _ => Prefetch::Auto,
    }
}

/// Replay children run this program, even if its path holds another file by then.
fn events(word: &str) -> Option<EventsConfig> {
    if word == "off" {
        return None;
    }
    let program = Program { path: "/proc/self/exe".into(), arguments: vec!["replay".into()] };
    Some(EventsConfig { all: word == "on", program })
}

/// The child that aborts the connection if this process is killed.
pub fn watchdog() -> Program {
    Program { path: "/proc/self/exe".into(), arguments: vec!["watchdog".into()] }
}

/// Body of a replay child, whose system calls in the mount produce inotify events.
pub fn replay(mountpoint: &Path, device: &str) -> Result<()> {
    let numbers =
        device.split_once(':').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    Ok(run_replay_child(mountpoint, numbers.context("MAJOR:MINOR of the mount's device")?)?)
}

/// Combines both sources of the setting; `-o` overrides the command line.
fn on_disconnect(args: &MountArgs, options: &Options) -> Result<OnDisconnect> {
    let limit = match options.request_timeout {
        Some(limit) => limit,
        None => units::positive("--request-timeout", &args.request_timeout)?,
    };
    Ok(match (options.soft, args.on_disconnect.as_str()) {
        (Some(true), _) | (None, "fail") => OnDisconnect::Fail(limit),
        (None, "stale") => OnDisconnect::Stale,
        _ => OnDisconnect::Wait,
    })
}

/// Unmounts a mount whose daemon was killed. Returns the liveness of the mount point: a path lookup on a mount that
/// does not answer would wait.
fn unmount_dead(mountpoint: &Path) -> Result<Liveness> {
    let found = liveness(mountpoint);
    if found == Liveness::Dead {
        unmount_at(mountpoint, true)?;
        return Ok(liveness(mountpoint));
    }
    Ok(found)
}

/// `nigh umount`.
pub fn unmount(mountpoint: &Path, lazy: bool, force: bool) -> Result<()> {
    let unmounted = match (force, lazy) {
        (true, _) => unmount_by_force(mountpoint)?,
        (false, true) => return Ok(unmount_at(mountpoint, true)?),
        (false, false) => unmount_unless_used(mountpoint)?,
    };
    if unmounted == Unmounted::Aborted && !force {
        let point = mountpoint.display();
        eprintln!("nigh: {point} was in use and did not answer: what waited for it was ended with an error");
    }
    Ok(())
}

/// `NIGH_PLANTED=5`: fault injection for tests, in builds that support it.
fn inject_faults() -> Result<()> {
    let Ok(names) = std::env::var("NIGH_PLANTED") else { return Ok(()) };
    let bug = |name| Bug::of_name(name).with_context(|| format!("NIGH_PLANTED: no bug {name}"));
    let bugs: Vec<Bug> = names.split(',').map(bug).collect::<Result<_>>()?;
    if !plant(&bugs) {
        bail!(
            "NIGH_PLANTED: this build can have no bugs planted; build it with --features nigh-types/planted"
        );
    }
    Ok(())
}

/// Lets tests remove features: `NIGH_FUSE_MINOR=31`, `NIGH_NOTIFY_LEVEL=all|no-epoch|none`,
/// `NIGH_FUSE_WITHOUT=FLAG,…` (names of INIT flags).
fn masked_features() -> Result<(RequestedFeatures, Level)> {
    let mut wanted = RequestedFeatures::default();
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
            // Without invalidations the kernel must check cached data on each read.
            wanted = wanted.without(init::EXPLICIT_INVAL_DATA | init::CACHE_SYMLINKS);
            wanted.flags |= init::AUTO_INVAL_DATA;
            Level::None
        }
        Ok(other) => bail!("NIGH_NOTIFY_LEVEL={other}: all, no-epoch or none"),
    };
    Ok((wanted, level))
}

/// Connects, detaches from the terminal if run in the background, and mounts. Also returns a notice for the user.
fn start(args: &MountArgs, places: &ServerDirs, ready: &Ready) -> Result<(Mount, Option<String>)> {
    let mut source = Source::parse(args, places)?;
    let mut config = prepare(args, places, &source)?;
    let link = source.connect(places)?;
    config.reconnect = Some(source.reconnect());
    ready.detach()?;
    let note = link.note().map(str::to_owned);
    let session = AttachedSession::new(config, link)?;
    let signals = HeldSignals::hold()?;
    let mount = session.mount()?;
    signals.unmount(&mount);
    let note = note.or_else(|| mount.unsupported_guarantees());
    Ok((mount, note))
}
