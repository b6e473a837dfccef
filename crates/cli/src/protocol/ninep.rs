//! Sessions of 9P servers, and their cache timeouts.

use super::SessionRequest;
use crate::args::MountArgs;
use crate::options::{Options, Usage};
use crate::units;
use anyhow::{Result, bail};
use nigh_client::Begin;
use nigh_ninep::{Config, Times, sessions};
use nigh_types::{CookieKey, Span, Term};
use siphasher::sip128::{Hasher128, SipHasher24};
use std::hash::Hasher;

const SECOND: Term = Term::Limited(Span::from_secs(1));
const NEVER: Term = Term::Limited(Span::ZERO);

/// Returns cache timeouts from a preset of v9fs, overridden by explicit options.
fn times(args: &MountArgs, options: &Options) -> Result<Times> {
    let mut times = match options.ninep.cache.as_deref() {
        None => Times { names: SECOND, absent: SECOND, attributes: SECOND },
        Some("loose") => Times {
            names: Term::Session,
            absent: Term::Limited(Span::from_secs(24 * 3600)),
            attributes: Term::Session,
        },
        // These presets differ in the caching of file data, which the kernel decides here.
        Some("none" | "readahead" | "mmap") => Times { names: NEVER, absent: NEVER, attributes: NEVER },
        Some("fscache") => bail!(Usage(
            "-o cache=fscache: data is not kept on disk; want none, readahead, mmap or loose".to_owned()
        )),
        Some(other) => {
            bail!(Usage(format!("-o cache={other}: want none, readahead, mmap or loose")));
        }
    };
    for (option, text, time) in [
        ("--entry-timeout", &args.entry_timeout, &mut times.names),
        ("--negative-timeout", &args.negative_timeout, &mut times.absent),
        ("--attr-timeout", &args.attr_timeout, &mut times.attributes),
    ] {
        if let Some(text) = text {
            *time = units::term(option, text)?;
        }
    }
    if let Some(term) = options.ninep.negative_timeout {
        times.absent = term;
    }
    if let Some(term) = options.term {
        (times.names, times.attributes) = (term, term);
    }
    Ok(times)
}

/// Returns the function that begins sessions.
pub fn begin(request: &SessionRequest<'_>) -> Result<Begin> {
    let SessionRequest { args, options, attach: tree, .. } = request;
    let uid = rustix::process::geteuid().as_raw();
    let told = &options.ninep;
    let config = Config::new(times(args, options)?, cookie_key(request.client, request.source));
    Ok(sessions(Config {
        aname: told.aname.clone().map_or_else(|| tree.to_vec(), String::into_bytes),
        uname: told.uname.clone().unwrap_or_default().into_bytes(),
        uid,
        gid: rustix::process::getegid().as_raw(),
        all_users: uid == 0,
        msize: told.msize.unwrap_or(config.msize),
        ..config
    }))
}

/// Key of directory cookies: equal for each mount of a tree by this client, and secret.
fn cookie_key(client: u64, source: &str) -> CookieKey {
    let mut hasher = SipHasher24::new_with_keys(client, 9);
    hasher.write(source.as_bytes());
    let hash = hasher.finish128();
    let mut key = [0; 16];
    key[..8].copy_from_slice(&hash.h1.to_le_bytes());
    key[8..].copy_from_slice(&hash.h2.to_le_bytes());
    CookieKey(key)
}
