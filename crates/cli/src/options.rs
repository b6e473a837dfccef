//! `-o`: mount options in the syntax of fstab and other filesystems.

use nigh_types::{Span, Term};
use std::fmt;

/// A usage error: the command line requests something that does not exist; exit code 2.
#[derive(Debug)]
pub struct Usage(pub String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Parsed `-o` options.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Options {
    pub read_only: bool,
    pub allow_other: bool,
    pub noexec: bool,
    pub suid: bool,
    pub dev: bool,
    /// Each write reaches the server's disk before it returns.
    pub synchronous: bool,
    /// `noac`, `actimeo=`: overrides `--host-timeout`.
    pub term: Option<Term>,
    /// `soft` or `hard`: overrides `--on-disconnect`.
    pub soft: Option<bool>,
    /// `timeo=`, in tenths of a second as in nfs(5): overrides `--request-timeout`.
    pub request_timeout: Option<Span>,
    /// Traffic on the link is compressed.
    pub compress: bool,
    /// `events=`: overrides `--events`.
    pub events: Option<String>,
    /// `idmap=`: overrides `--idmap`.
    pub idmap: Option<String>,
    /// `idmapped`: mount_setattr(2) may map ids of the mount.
    pub idmapped: bool,
    /// `cookies=31`: directory offsets fit 32-bit programs.
    pub short_cookies: bool,
    pub ninep: Ninep,
}

/// Options for 9P servers alone, as in v9fs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Ninep {
    /// `cache=`: a preset of timeouts.
    pub cache: Option<String>,
    /// `negtimeout=` or `ndentrytmo=`, in milliseconds, −1 for ever: overrides `--negative-timeout`.
    pub negative_timeout: Option<Term>,
    /// Bytes.
    pub msize: Option<u32>,
    /// Overrides the tree in the source.
    pub aname: Option<String>,
    pub uname: Option<String>,
}

const KNOWN: &str = "ro, rw, allow_other, noexec, exec, suid, nosuid, dev, nodev, sync, async, noac, actimeo=SECONDS, \
     hard, soft, timeo=TENTHS, compress, idmap=WORD, idmapped, events=auto|on|off, cookies=31|63; for 9p:// cache=none|readahead|mmap|loose, \
     negtimeout=MS, msize=BYTES, aname=TREE, uname=NAME; and the \
     options of `nigh mount` without their dashes";

/// Options that mount(8) adds for every filesystem, and options for mount(8) and the service manager alone. Those
/// about access times have no effect: reading through a mount never changes access times.
const GENERIC: &[&str] = &[
    "defaults",
    "auto",
    "noauto",
    "nofail",
    "_netdev",
    "user",
    "nouser",
    "users",
    "nousers",
    "owner",
    "noowner",
    "group",
    "nogroup",
    "atime",
    "noatime",
    "diratime",
    "nodiratime",
    "relatime",
    "norelatime",
    "strictatime",
    "nostrictatime",
    "lazytime",
    "nolazytime",
    "dirsync",
    "iversion",
    "noiversion",
    "mand",
    "nomand",
    "silent",
    "loud",
];

impl Options {
    /// Parses the values of `-o`. `sloppy`: skip unknown options.
    pub fn parse(texts: &[String], sloppy: bool) -> Result<Options, Usage> {
        let mut options = Options::default();
        for option in texts.iter().flat_map(|text| text.split(',')).filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("actimeo", seconds)) => options.term = Some(seconds_term(option, seconds)?),
                Some(("timeo", tenths)) => options.request_timeout = Some(tenths_span(option, tenths)?),
                Some(("idmap", word)) if !word.is_empty() => options.idmap = Some(word.to_owned()),
                Some(("cookies", bits)) => options.short_cookies = parse_cookie_bits(option, bits)?,
                Some(("cache", word)) if !word.is_empty() => options.ninep.cache = Some(word.to_owned()),
                Some(("negtimeout" | "ndentrytmo", millis)) => {
                    options.ninep.negative_timeout = Some(millis_term(option, millis)?);
                }
                Some(("msize", bytes)) => options.ninep.msize = Some(msize(option, bytes)?),
                Some(("aname", tree)) => options.ninep.aname = Some(tree.to_owned()),
                Some(("uname", name)) => options.ninep.uname = Some(name.to_owned()),
                Some(("events", word @ ("auto" | "on" | "off"))) => options.events = Some(word.to_owned()),
                _ if is_generic(option) => {}
                _ if options.set(option) || sloppy => {}
                _ => return Err(Usage(format!("-o {option}: not known; there are {KNOWN}"))),
            }
        }
        Ok(options)
    }

    /// Refuses options that need root: fusermount3 would drop them silently.
    pub fn check_rights(&self, is_root: bool) -> Result<(), Usage> {
        for (set, option) in [(self.suid, "suid"), (self.dev, "dev")] {
            if set && !is_root {
                return Err(Usage(format!(
                    "-o {option}: only root may mount so; leave it out, or say no{option}"
                )));
            }
        }
        Ok(())
    }

    /// Sets a flag option; false if the option is unknown.
    fn set(&mut self, option: &str) -> bool {
        match option {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "allow_other" => self.allow_other = true,
            "noexec" => self.noexec = true,
            "exec" => self.noexec = false,
            "suid" => self.suid = true,
            "nosuid" => self.suid = false,
            "dev" => self.dev = true,
            "nodev" => self.dev = false,
            "hard" => self.soft = Some(false),
            "soft" => self.soft = Some(true),
            "compress" => self.compress = true,
            "idmapped" => self.idmapped = true,
            "sync" => self.synchronous = true,
            "async" => self.synchronous = false,
            "noac" => self.term = Some(Term::Limited(Span::ZERO)),
            _ => return false,
        }
        true
    }
}

fn is_generic(option: &str) -> bool {
    let with_text = |prefix: &&str| option.starts_with(*prefix);
    GENERIC.contains(&option) || ["x-", "X-", "comment=", "user="].iter().any(with_text)
}

fn parse_cookie_bits(option: &str, bits: &str) -> Result<bool, Usage> {
    match bits {
        "31" => Ok(true),
        "63" => Ok(false),
        _ => Err(Usage(format!("-o {option}: want cookies=31, for 32-bit programs, or cookies=63"))),
    }
}

fn seconds_term(option: &str, seconds: &str) -> Result<Term, Usage> {
    let seconds: u64 =
        seconds.parse().map_err(|_| Usage(format!("-o {option}: want whole seconds, such as actimeo=5")))?;
    Ok(Term::Limited(Span::from_secs(seconds)))
}

fn millis_term(option: &str, millis: &str) -> Result<Term, Usage> {
    match millis.parse::<i64>() {
        Ok(-1) => Ok(Term::Session),
        Ok(millis @ 0..) => Ok(Term::Limited(Span::from_millis(millis.unsigned_abs()))),
        _ => Err(Usage(format!("-o {option}: want milliseconds, such as negtimeout=1000, or -1 for ever"))),
    }
}

fn msize(option: &str, bytes: &str) -> Result<u32, Usage> {
    let bytes = bytes.parse().ok().filter(|bytes| (nigh_ninep::LEAST_MSIZE..=1 << 24).contains(bytes));
    bytes.ok_or_else(|| Usage(format!("-o {option}: want bytes from 8192 to 16777216, such as msize=65536")))
}

fn tenths_span(option: &str, tenths: &str) -> Result<Span, Usage> {
    match tenths.parse::<u64>() {
        Ok(tenths @ 1..) => Ok(Span::from_millis(tenths.saturating_mul(100))),
        _ => Err(Usage(format!("-o {option}: want tenths of a second, such as timeo=300"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Options, Usage> {
        Options::parse(&[text.to_owned()], false)
    }

    #[test]
    fn generic_options_of_fstab_are_accepted_and_unknown_ones_only_when_sloppy() {
        let line = "rw,users,nofail,_netdev,x-systemd.automount,X-mount.mkdir,comment=a b,noatime,nodiratime,lazytime,async,\
            defaults,auto,noauto,user,owner,group,relatime";
        assert_eq!(parse(line).unwrap(), Options::default());
        assert!(parse("sync").unwrap().synchronous && !parse("sync,async").unwrap().synchronous);
        assert!(parse("remount").is_err() && parse("comment").is_err());
        assert!(Options::parse(&["remount,ro".to_owned()], true).unwrap().read_only);
    }

    #[test]
    fn suid_and_dev_are_refused_to_a_user() {
        for (text, refused) in [("suid,dev", true), ("dev", true), ("suid,nosuid,nodev", false), ("", false)]
        {
            assert_eq!(parse(text).unwrap().check_rights(false).is_err(), refused, "{text}");
            assert!(parse(text).unwrap().check_rights(true).is_ok());
        }
    }

    #[test]
    fn options_of_other_filesystems_keep_their_units() {
        assert_eq!(parse("actimeo=3").unwrap().term, Some(Term::Limited(Span::from_secs(3))));
        assert_eq!(parse("noac").unwrap().term, Some(Term::Limited(Span::ZERO)));
        assert!(parse("actimeo=3s").is_err());
        let soft = parse("soft,timeo=15").unwrap();
        assert_eq!((soft.soft, soft.request_timeout), (Some(true), Some(Span::from_millis(1_500))));
        assert_eq!(parse("soft,hard").unwrap().soft, Some(false));
        for bad in ["timeo=0", "timeo=", "timeo=3s", "timeo"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn last_option_wins_and_unknown_options_are_refused() {
        assert!(!parse("ro,rw").unwrap().read_only);
        assert!(parse("ro,noexec,defaults").unwrap().noexec);
        assert!(parse("compress").unwrap().compress && !parse("").unwrap().compress);
        assert!(parse("fscache").is_err());
        assert_eq!(parse("negtimeout=-1").unwrap().ninep.negative_timeout, Some(Term::Session));
        assert_eq!(
            parse("ndentrytmo=250").unwrap().ninep.negative_timeout,
            Some(Term::Limited(Span::from_millis(250)))
        );
        for bad in ["negtimeout=1s", "negtimeout=-2", "msize=100", "msize=x", "cache="] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(parse("idmap=user,idmap=name").unwrap().idmap.as_deref(), Some("name"));
        assert!(parse("idmap=").is_err());
        assert!(parse("idmapped").unwrap().idmapped && !parse("idmap=none").unwrap().idmapped);
        assert_eq!(parse("events=on,events=off").unwrap().events.as_deref(), Some("off"));
        assert!(parse("cookies=31").unwrap().short_cookies && !parse("").unwrap().short_cookies);
        assert!(!parse("cookies=31,cookies=63").unwrap().short_cookies);
        for bad in ["cookies=32", "cookies=", "cookies"] {
            let said = parse(bad).unwrap_err().0;
            assert!(said.contains("cookies=31") && !said.contains('\n'), "{said}");
        }
        assert!(parse("events=maybe").is_err() && parse("events").is_err());
    }
}
