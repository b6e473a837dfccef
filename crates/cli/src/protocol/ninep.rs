//! `9p://` and `9p+unix://`: the server's address, the tree, and cache timeouts.

use crate::args::MountArgs;
use crate::options::{Ninep, Options, Usage};
use crate::units;
use anyhow::{Result, bail};
use nigh_client::Begin;
use nigh_link::{Link, address, tcp, unix};
use nigh_ninep::{Config, Times, sessions};
use nigh_types::{CookieKey, Span, Term};
use siphasher::sip128::{Hasher128, SipHasher24};
use std::hash::Hasher;
use std::io;
use std::path::PathBuf;

/// Default port of 9P servers.
const PORT: u16 = 564;
const SECOND: Term = Term::Limited(Span::from_secs(1));
const NEVER: Term = Term::Limited(Span::ZERO);

/// Address of a 9P server.
#[derive(Clone, Debug)]
pub enum Target {
    Tcp(String, u16),
    Unix(PathBuf),
}

impl Target {
    /// Parses `HOST[:PORT]/TREE`; the tree is `/TREE`.
    pub fn over_tcp(rest: &str) -> Result<(Target, Vec<u8>)> {
        let bad = || Usage(format!("9p://{rest}: want 9p://HOST[:PORT]/TREE, an IPv6 address in brackets"));
        let (address, tree) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        let (host, port) = address::parse(address, PORT).ok_or_else(bad)?;
        Ok((Target::Tcp(host, port), tree.as_bytes().to_vec()))
    }

    /// Parses `/SOCKET[:TREE]`.
    pub fn over_unix(rest: &str) -> Result<(Target, Vec<u8>)> {
        let (socket, tree) = rest.split_once(':').unwrap_or((rest, ""));
        if !socket.starts_with('/') {
            bail!(Usage(format!("9p+unix://{rest}: want an absolute path: 9p+unix:///SOCKET[:TREE]")));
        }
        Ok((Target::Unix(socket.into()), tree.as_bytes().to_vec()))
    }

    pub fn connect(&self) -> io::Result<Link> {
        match self {
            Target::Tcp(host, port) => Ok(tcp::connect_plaintext(host, *port)?),
            Target::Unix(path) => Ok(unix::connect(path)?),
        }
    }
}

/// Returns cache timeouts from a preset of v9fs, overridden by explicit options.
pub fn times(args: &MountArgs, options: &Options) -> Result<Times> {
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

/// Refuses options that only 9P servers understand, for any other server.
pub fn refuse_ninep_options(args: &MountArgs, options: &Options, source: &str) -> Result<(), Usage> {
    let said = [
        ("--entry-timeout", args.entry_timeout.is_some()),
        ("--negative-timeout", args.negative_timeout.is_some()),
        ("--attr-timeout", args.attr_timeout.is_some()),
        ("-o cache=, negtimeout=, msize=, aname= and uname=", options.ninep != Ninep::default()),
    ];
    match said.into_iter().find(|(_, said)| *said) {
        Some((option, _)) => Err(Usage(format!("{source}: {option} is for 9p://; say --host-timeout here"))),
        None => Ok(()),
    }
}

/// Returns the function that begins sessions. `client`: this client's durable id.
pub fn begin(args: &MountArgs, options: &Options, tree: &[u8], client: u64, source: &str) -> Result<Begin> {
    if args.host_timeout.is_some() || options.compress {
        let what = if options.compress { "-o compress" } else { "--host-timeout" };
        bail!(Usage(format!(
            "{source}: {what} means nothing to a 9P server; there are --entry-timeout, --negative-timeout and --attr-timeout"
        )));
    }
    let uid = rustix::process::geteuid().as_raw();
    let told = &options.ninep;
    let config = Config::new(times(args, options)?, cookie_key(client, source));
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
