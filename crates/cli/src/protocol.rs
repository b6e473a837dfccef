//! Protocols of servers: all that depends on the protocol when a mount starts.

pub mod native;
mod ninep;

use crate::args::MountArgs;
use crate::options::{self, Options, Usage};
use anyhow::Result;
use nigh_client::fuse::Level;
use nigh_client::{Begin, IdMapChoice};
use nigh_types::Term;

/// The protocol of a server. [`Source`](crate::source::Source) chooses it once, from the scheme.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protocol {
    Native,
    Ninep,
}

/// A mount's wishes for its sessions.
pub struct SessionRequest<'a> {
    pub args: &'a MountArgs,
    pub options: &'a Options,
    /// The name to attach to.
    pub attach: &'a [u8],
    /// The source as shown to people.
    pub source: &'a str,
    pub idmap: &'a IdMapChoice,
    pub level: Level,
    /// Longest life of cached facts, where the user limits it.
    pub term: Option<Term>,
    /// This client's durable id.
    pub client: u64,
    /// Random, new with each start of the client.
    pub incarnation: u64,
}

/// An option that some protocols alone understand.
struct ProtocolOption {
    /// Name, for people.
    name: &'static str,
    is_given: fn(&MountArgs, &Options) -> bool,
    protocols: &'static [Protocol],
}

/// In the order in which they are refused.
const PROTOCOL_OPTIONS: &[ProtocolOption] = &[
    ProtocolOption {
        name: "-o compress",
        is_given: |_, options| options.compress,
        protocols: &[Protocol::Native],
    },
    ProtocolOption {
        name: "--host-timeout",
        is_given: |args, _| args.host_timeout.is_some(),
        protocols: &[Protocol::Native],
    },
    ProtocolOption {
        name: "--entry-timeout",
        is_given: |args, _| args.entry_timeout.is_some(),
        protocols: &[Protocol::Ninep],
    },
    ProtocolOption {
        name: "--negative-timeout",
        is_given: |args, _| args.negative_timeout.is_some(),
        protocols: &[Protocol::Ninep],
    },
    ProtocolOption {
        name: "--attr-timeout",
        is_given: |args, _| args.attr_timeout.is_some(),
        protocols: &[Protocol::Ninep],
    },
    ProtocolOption {
        name: "-o cache=, negtimeout=, msize=, aname= and uname=",
        is_given: |_, options| options.ninep != options::Ninep::default(),
        protocols: &[Protocol::Ninep],
    },
];

impl Protocol {
    /// The id map without `--idmap`. `is_local`: the server runs on this machine.
    pub fn default_idmap(self, is_local: bool) -> IdMapChoice {
        match self {
            Protocol::Native if is_local => IdMapChoice::None,
            Protocol::Native => IdMapChoice::User,
            Protocol::Ninep => IdMapChoice::None,
        }
    }

    /// Returns the function that begins sessions.
    ///
    /// # Errors
    /// A usage error for an option that means nothing in this protocol, and for a wrong value.
    pub fn begin(self, request: &SessionRequest<'_>) -> Result<Begin> {
        let SessionRequest { args, options, source, .. } = request;
        if let Some(option) = self.foreign_option(args, options) {
            return Err(Usage(format!("{source}: {}", self.refusal(option))).into());
        }
        match self {
            Protocol::Native => Ok(native::begin(request)),
            Protocol::Ninep => ninep::begin(request),
        }
    }

    /// A given option that only other protocols understand.
    fn foreign_option(self, args: &MountArgs, options: &Options) -> Option<&'static ProtocolOption> {
        let mut given = PROTOCOL_OPTIONS.iter().filter(|option| (option.is_given)(args, options));
        given.find(|option| !option.protocols.contains(&self))
    }

    /// Why this protocol refuses the option, and what to say in its place.
    fn refusal(self, option: &ProtocolOption) -> String {
        let name = option.name;
        match self {
            Protocol::Native => {
                let schemes: Vec<_> = option.protocols.iter().map(|protocol| protocol.scheme()).collect();
                format!("{name} is for {}; say --host-timeout here", schemes.join(" and "))
            }
            Protocol::Ninep => format!(
                "{name} means nothing to a 9P server; there are --entry-timeout, --negative-timeout and --attr-timeout"
            ),
        }
    }

    fn scheme(self) -> &'static str {
        match self {
            Protocol::Native => "nigh://",
            Protocol::Ninep => "9p://",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Args, Command};
    use clap::Parser;

    fn refusal(protocol: Protocol, given: &[&str]) -> Option<String> {
        let line = [&["nigh", "mount"], given, &["--", "source", "/mnt"]].concat();
        let Command::Mount(args) = Args::try_parse_from(line).unwrap().command else { panic!("not a mount") };
        let options = Options::parse(&args.options, false).unwrap();
        protocol.foreign_option(&args, &options).map(|option| protocol.refusal(option))
    }

    #[test]
    fn option_of_another_protocol_is_refused_with_the_option_to_use_instead() {
        let native = |given: &[&str]| refusal(Protocol::Native, given);
        let ninep = |given: &[&str]| refusal(Protocol::Ninep, given);
        let own = ["--host-timeout=5s", "-o", "compress"];
        assert_eq!((native(&own), native(&["-o", "noac"]), ninep(&["-o", "noac"])), (None, None, None));
        let instead = "there are --entry-timeout, --negative-timeout and --attr-timeout";
        assert_eq!(ninep(&own).unwrap(), format!("-o compress means nothing to a 9P server; {instead}"));
        assert_eq!(
            ninep(&own[..1]).unwrap(),
            format!("--host-timeout means nothing to a 9P server; {instead}")
        );
        let own = ["--entry-timeout=1s", "--negative-timeout=1s", "--attr-timeout=1s", "-omsize=65536"];
        assert_eq!(ninep(&own), None);
        for (nth, name) in ["--entry-timeout", "--negative-timeout", "--attr-timeout"].into_iter().enumerate()
        {
            assert_eq!(native(&own[nth..]).unwrap(), format!("{name} is for 9p://; say --host-timeout here"));
        }
        assert_eq!(
            native(&own[3..]).unwrap(),
            "-o cache=, negtimeout=, msize=, aname= and uname= is for 9p://; say --host-timeout here"
        );
    }

    #[test]
    fn ids_are_mapped_by_default_only_for_a_native_server_on_another_machine() {
        assert_eq!(Protocol::Native.default_idmap(false), IdMapChoice::User);
        assert_eq!(Protocol::Native.default_idmap(true), IdMapChoice::None);
        assert_eq!(Protocol::Ninep.default_idmap(false), IdMapChoice::None);
    }
}
