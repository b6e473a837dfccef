//! `nigh serve`.

use crate::args::ServeArgs;
use crate::log_to_stderr;
use crate::options::Usage;
use crate::socket_activation;
use anyhow::{Context, Result, bail};
use nigh_client::pressure::{Heaps, configure_allocator};
use nigh_link::Squash;
use nigh_server::{Listen, ServerDirs, Serving, daemon};

pub fn run(args: ServeArgs) -> Result<()> {
    if args.listen.iter().any(|listen| listen == "stdio") {
        return relay(&args);
    }
    configure_allocator(Heaps::Few);
    let others = args.listen.iter().filter(|listen| *listen != "user");
    let listens = others.map(|text| {
        Listen::parse(text).ok_or_else(|| {
            Usage(format!("--listen {text}: want unix:///PATH, tcp://ADDRESS[:PORT], stdio or user"))
        })
    });
    let serving = Serving {
        exports: args.export,
        listens: listens.collect::<Result<_, _>>()?,
        token: args.token,
        plaintext: args.plaintext,
        passed: socket_activation::take()?,
        trust_client_ids: args.trust_client_ids,
        squash: match args.squash.as_deref() {
            None => None,
            Some("root") => Some(Squash::Root),
            Some("all") => Some(Squash::All),
            Some(_) => Some(Squash::None),
        },
    };
    serving.check().map_err(Usage)?;
    log_to_stderr("info");
    if serving.exports.is_empty() {
        return daemon::run_user_server(&serving).context("serving");
    }
    Ok(daemon::serve(&ServerDirs::of_user()?, &serving)?)
}

/// The relay that ssh runs: a path to the server of the user that logged in.
fn relay(args: &ServeArgs) -> Result<()> {
    let alone = args.listen.len() == 1 && args.export.is_empty() && args.token.is_none();
    if !alone || args.plaintext || args.trust_client_ids || args.squash.is_some() {
        bail!(Usage("--listen stdio stands alone: it leads to your own server, by its paths".into()));
    }
    log_to_stderr("warn");
    let exe = std::env::current_exe().context("finding this program")?;
    daemon::relay(&exe).context("passing on to your server")
}
