//! The source of a mount, and the connection to its server.

use crate::args::MountArgs;
use crate::options::Usage;
use crate::protocol::Protocol;
use anyhow::{Context, Result, bail};
use nigh_client::{Link, Reconnect};
use nigh_link::ssh::Prompting;
use nigh_link::{address, ssh, tcp, unix};
use nigh_server::{ServerDirs, daemon};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// A source as named on the command line.
#[derive(Clone, Debug)]
pub struct Source {
    protocol: Protocol,
    transport: Transport,
    /// The name to attach to: a path on the server's machine, or an export's name and a path below it.
    attach: Vec<u8>,
    shown: String,
    install: bool,
}

#[derive(Clone, Debug)]
enum Transport {
    /// This user's own server, started if absent.
    Own,
    Unix(PathBuf),
    Tcp(tcp::Target),
    Ssh(ssh::Target),
    /// TCP without a handshake of nigh's own.
    PlainTcp {
        host: String,
        port: u16,
    },
}

/// Default port of 9P servers.
const NINEP_PORT: u16 = 564;

const SCHEMES: &str = "DIR, [USER@]HOST:/DIR, nigh://HOST[:PORT]/EXPORT, unix:///SOCKET[:EXPORT], 9p://HOST[:PORT]/TREE or \
     9p+unix:///SOCKET[:TREE]";

impl Source {
    /// Parses the source and checks all that needs no connection.
    pub fn parse(args: &MountArgs, places: &ServerDirs) -> Result<Source> {
        let text = args.source.to_string_lossy().into_owned();
        let mut protocol = Protocol::Native;
        let (way, attach) = match text.split_once("://") {
            Some(("nigh", rest)) => over_tcp(rest, args, places)?,
            Some(("unix", rest)) => over_unix("unix", rest, "EXPORT")?,
            Some(("ssh", rest)) => {
                let rest = rest.replacen('/', ":/", 1);
                bail!(Usage(format!(
                    "{text}: for a machine reached by ssh say [USER@]HOST:/DIR, here {rest}"
                )));
            }
            Some(("9p", rest)) => {
                protocol = Protocol::Ninep;
                over_plain_tcp("9p", rest, NINEP_PORT)?
            }
            Some(("9p+unix", rest)) => {
                protocol = Protocol::Ninep;
                over_unix("9p+unix", rest, "TREE")?
            }
            Some((scheme @ "smb", _)) => {
                bail!(Usage(format!("{text}: {scheme} cannot be mounted yet; there are {SCHEMES}")));
            }
            _ => match over_ssh(&text, args)? {
                Some(found) => found,
                None => (Transport::Own, own_directory(&args.source)?.as_os_str().as_bytes().to_vec()),
            },
        };
        if !matches!(way, Transport::Tcp(_)) && (args.token.is_some() || args.plaintext || args.ca.is_some())
        {
            bail!(Usage(format!("{text}: --token, --plaintext and --ca are for nigh://HOST/EXPORT")));
        }
        if !matches!(way, Transport::Ssh(_)) && (args.ssh.is_some() || args.install_server) {
            bail!(Usage(format!("{text}: --ssh and --install-server are for [USER@]HOST:/DIR")));
        }
        let shown = match way {
            Transport::Own => String::from_utf8_lossy(&attach).into_owned(),
            _ => text,
        };
        Ok(Source { protocol, transport: way, attach, shown, install: args.install_server })
    }

    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    pub fn attach(&self) -> &[u8] {
        &self.attach
    }

    /// Whether the server runs on this machine, so that both have one set of users.
    pub fn is_local(&self) -> bool {
        matches!(self.transport, Transport::Own | Transport::Unix(_))
    }

    /// Refuses a mount point inside the mounted directory: the server would enter the mount, and so send requests to
    /// itself.
    ///
    /// # Errors
    /// An error of one line.
    pub fn check_outside(&self, mountpoint: &Path) -> Result<()> {
        // Mounting itself reports other problems of the mount point.
        let (Transport::Own, Ok(resolved)) = (&self.transport, mountpoint.canonicalize()) else {
            return Ok(());
        };
        let source = Path::new(OsStr::from_bytes(&self.attach));
        let number = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino())).ok();
        let wanted = number(source);
        // Compared by device and inode number: a bind mount has another path.
        if wanted.is_some() && resolved.ancestors().any(|above| number(above) == wanted) {
            let (point, source) = (mountpoint.display(), source.display());
            bail!(
                "mount point {point} lies inside of {source}, which is to be mounted: give one outside of it"
            );
        }
        Ok(())
    }

    /// The source as shown in mountinfo.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Makes the first connection, for which ssh may prompt the user. It may change how later connections are made.
    pub fn connect(&mut self, places: &ServerDirs) -> Result<Link> {
        if let (Transport::Ssh(target), true) = (&mut self.transport, self.install) {
            target.install(&std::env::current_exe().context("finding this program")?)?;
            target.installed = true;
        }
        match &self.transport {
            Transport::Own => own_server().with_context(|| {
                format!("reaching your server; its log is {}", places.runtime.join("serve.log").display())
            }),
            Transport::Ssh(target) => Ok(target.connect(Prompting::Allowed)?),
            Transport::Unix(_) | Transport::Tcp(_) | Transport::PlainTcp { .. } => {
                Ok(self.connect_without_prompt()?)
            }
        }
    }

    /// Returns a function that makes later connections, without prompts.
    pub fn reconnect(&self) -> Reconnect {
        let source = self.clone();
        Box::new(move || source.connect_without_prompt())
    }

    fn connect_without_prompt(&self) -> io::Result<Link> {
        match &self.transport {
            Transport::Own => own_server(),
            Transport::Unix(path) => Ok(unix::connect(path)?),
            Transport::Tcp(target) => Ok(target.connect()?),
            Transport::Ssh(target) => Ok(target.connect(Prompting::Never)?),
            Transport::PlainTcp { host, port } => Ok(tcp::connect_plaintext(host, *port)?),
        }
    }
}

/// Connects to this user's server, started if absent; `NIGH_LINK` names a socket to use instead.
fn own_server() -> io::Result<Link> {
    match std::env::var_os("NIGH_LINK") {
        Some(path) => Ok(UnixStream::connect(path)?.into()),
        None => Ok(daemon::ensure_running(&std::env::current_exe()?)?.into()),
    }
}

fn over_tcp(rest: &str, args: &MountArgs, places: &ServerDirs) -> Result<(Transport, Vec<u8>)> {
    let bad = || Usage(format!("nigh://{rest}: want nigh://HOST[:PORT]/EXPORT, an IPv6 address in brackets"));
    let (address, export) = rest.split_once('/').unwrap_or((rest, ""));
    let (host, port) = address::parse(address, tcp::PORT).ok_or_else(bad)?;
    let trust = match (&args.ca, args.plaintext) {
        (Some(file), _) => tcp::Trust::Authority(absolute(file)?),
        (None, true) => tcp::Trust::Plaintext,
        (None, false) => tcp::Trust::Known(places.state.join("known_servers")),
    };
    let token = args.token.as_deref().map(absolute).transpose()?;
    if let Some(file) = &token {
        // Problems with the token file are reported before anything starts.
        nigh_link::Token::read(file)?;
    }
    let target = tcp::Target { host, port, trust, token };
    Ok((Transport::Tcp(target), export.as_bytes().to_vec()))
}

/// Makes a path absolute, because the daemon has another working directory.
fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| path.display().to_string())
}

/// Parses `/SOCKET[:EXPORT]`; `attach` is the scheme's word for an export.
fn over_unix(scheme: &str, rest: &str, attach: &str) -> Result<(Transport, Vec<u8>)> {
    let (socket, export) = rest.split_once(':').unwrap_or((rest, ""));
    if !socket.starts_with('/') {
        bail!(Usage(format!("{scheme}://{rest}: want an absolute path: {scheme}:///SOCKET[:{attach}]")));
    }
    Ok((Transport::Unix(socket.into()), export.as_bytes().to_vec()))
}

/// Parses `HOST[:PORT]/TREE`; the tree is `/TREE`.
fn over_plain_tcp(scheme: &str, rest: &str, default_port: u16) -> Result<(Transport, Vec<u8>)> {
    let bad =
        || Usage(format!("{scheme}://{rest}: want {scheme}://HOST[:PORT]/TREE, an IPv6 address in brackets"));
    let (address, tree) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let (host, port) = address::parse(address, default_port).ok_or_else(bad)?;
    Ok((Transport::PlainTcp { host, port }, tree.as_bytes().to_vec()))
}

/// Parses scp's syntax: a colon before any slash ends a host name. `None`: `text` names no host.
fn over_ssh(text: &str, args: &MountArgs) -> Result<Option<(Transport, Vec<u8>)>> {
    let colon = match text.find('[').filter(|&at| at == 0 || text[..at].ends_with('@')) {
        Some(_) => text.find("]:").map(|at| at + 1),
        None => text.find(':'),
    };
    let Some(colon) = colon.filter(|&at| !text[..at].contains('/')) else { return Ok(None) };
    let (machine, dir) = (text[..colon].replace(['[', ']'], ""), &text[colon + 1..]);
    if !dir.starts_with('/') {
        if args.source.exists() {
            return Ok(None);
        }
        bail!(Usage(format!("{text}: name a directory of {machine} from its root: {machine}:/DIR")));
    }
    if machine.is_empty() || machine.starts_with('-') || machine.contains(char::is_whitespace) {
        bail!(Usage(format!("{text}: want [USER@]HOST:/DIR")));
    }
    let command =
        args.ssh.clone().or_else(|| std::env::var("NIGH_SSH").ok()).filter(|words| !words.is_empty());
    let target = ssh::Target { destination: machine, command, installed: false };
    Ok(Some((Transport::Ssh(target), dir.as_bytes().to_vec())))
}

fn own_directory(source: &Path) -> Result<PathBuf> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Args, Command};
    use clap::Parser;

    fn parse(words: &[&str]) -> Result<Source> {
        let (source, options) = words.split_first().context("no source")?;
        let line = [&["nigh", "mount"], options, &["--", source, "/mnt"]].concat();
        let Command::Mount(args) = Args::try_parse_from(line)?.command else { bail!("not a mount") };
        let places = ServerDirs { runtime: "/r".into(), state: "/s".into() };
        Source::parse(&args, &places)
    }

    fn attach(source: &str) -> String {
        String::from_utf8(parse(&[source]).unwrap().attach).unwrap()
    }

    #[test]
    fn host_sources_are_distinguished_from_directories() {
        let ssh = |source: &str| match parse(&[source]).unwrap().transport {
            Transport::Ssh(target) => target.destination,
            other => panic!("{other:?}"),
        };
        assert_eq!(ssh("anna@host:/srv/x"), "anna@host");
        assert_eq!(ssh("[::1]:/srv"), "::1");
        assert_eq!(ssh("anna@[fe80::1]:/srv"), "anna@fe80::1");
        assert_eq!(attach("host:/srv/a:b"), "/srv/a:b");
        assert!(matches!(parse(&["/"]).unwrap().transport, Transport::Own));
        for bad in ["host:srv", "-oProxyCommand=x:/srv", ":/srv", "a b:/srv", "ssh://host/srv"] {
            let error = parse(&[bad]).unwrap_err();
            assert!(error.downcast_ref::<Usage>().is_some(), "{bad}: {error}");
        }
    }

    #[test]
    fn tcp_and_unix_sources_have_ports_and_exports() {
        let tcp = |source: &str| match parse(&[source]).unwrap().transport {
            Transport::Tcp(target) => (target.host, target.port),
            other => panic!("{other:?}"),
        };
        assert_eq!(tcp("nigh://host/x"), ("host".into(), tcp::PORT));
        assert_eq!(tcp("nigh://host:7/x"), ("host".into(), 7));
        assert_eq!(tcp("nigh://[::1]:7/x"), ("::1".into(), 7));
        assert_eq!(attach("nigh://host/x/sub/deep"), "x/sub/deep");
        assert_eq!(attach("nigh://host"), "");
        assert_eq!(attach("unix:///run/s.sock:x/sub"), "x/sub");
        assert_eq!(attach("unix:///run/s.sock"), "");
        assert_eq!(attach("9p://host:5640/srv/tree"), "/srv/tree");
        assert_eq!(attach("9p://[::1]/srv"), "/srv");
        assert_eq!(attach("9p://host"), "");
        assert_eq!(attach("9p+unix:///run/s.sock:tree"), "tree");
        for bad in [
            "nigh:///x",
            "nigh://h:x/y",
            "nigh://a@h/x",
            "nigh://::1/x",
            "unix://run/s",
            "smb://h/a",
            "9p:///a",
        ] {
            let error = parse(&[bad]).unwrap_err();
            assert!(error.downcast_ref::<Usage>().is_some(), "{bad}: {error}");
        }
    }

    #[test]
    fn options_of_one_transport_are_refused_for_another() {
        assert!(parse(&["host:/srv", "--plaintext"]).is_err());
        assert!(parse(&["nigh://host/x", "--install-server"]).is_err());
        assert!(parse(&["nigh://host/x", "--ca", "f", "--plaintext"]).is_err());
        let error = parse(&["nigh://host/x", "--token", "/nonexistent/t"]).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/t") && error.lines().count() == 1, "{error}");
    }
}
