//! `-o`: options as fstab and other filesystems write them.

use nigh_types::{Span, Term};
use std::fmt;

/// The command line asks for something that there is not; exit 2.
#[derive(Debug)]
pub struct Usage(pub String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// What `-o` said.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Options {
    pub read_only: bool,
    pub allow_other: bool,
    pub noexec: bool,
    pub suid: bool,
    pub dev: bool,
    /// `noac`, `actimeo=`: takes the place of `--host-timeout`.
    pub term: Option<Term>,
    /// `idmap=`: takes the place of `--idmap`.
    pub idmap: Option<String>,
}

const KNOWN: &str =
    "ro, rw, allow_other, noexec, exec, suid, nosuid, dev, nodev, noac, actimeo=SECONDS, idmap=WORD";

impl Options {
    pub fn parse(texts: &[String]) -> Result<Options, Usage> {
        let mut options = Options::default();
        for option in texts.iter().flat_map(|text| text.split(',')).filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("actimeo", seconds)) => options.term = Some(seconds_term(option, seconds)?),
                Some(("idmap", word)) if !word.is_empty() => options.idmap = Some(word.to_owned()),
                _ => options.set(option)?,
            }
        }
        Ok(options)
    }

    fn set(&mut self, option: &str) -> Result<(), Usage> {
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
            "noac" => self.term = Some(Term::Limited(Span::ZERO)),
            // What mount(8) adds for every filesystem.
            "defaults" | "auto" | "noauto" | "nofail" | "_netdev" | "user" | "nouser" | "relatime"
            | "noatime" => {}
            _ => return Err(Usage(format!("-o {option}: not known; there are {KNOWN}"))),
        }
        Ok(())
    }
}

fn seconds_term(option: &str, seconds: &str) -> Result<Term, Usage> {
    let seconds: u64 =
        seconds.parse().map_err(|_| Usage(format!("-o {option}: want whole seconds, such as actimeo=5")))?;
    Ok(Term::Limited(Span::from_secs(seconds)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Options, Usage> {
        Options::parse(&[text.to_owned()])
    }

    #[test]
    fn options_of_other_filesystems_keep_their_units() {
        assert_eq!(parse("actimeo=3").unwrap().term, Some(Term::Limited(Span::from_secs(3))));
        assert_eq!(parse("noac").unwrap().term, Some(Term::Limited(Span::ZERO)));
        assert!(parse("actimeo=3s").is_err());
    }

    #[test]
    fn the_last_word_counts_and_unknown_ones_are_refused() {
        assert!(!parse("ro,rw").unwrap().read_only);
        assert!(parse("ro,noexec,defaults").unwrap().noexec);
        assert!(parse("fscache").is_err());
        assert_eq!(parse("idmap=user,idmap=name").unwrap().idmap.as_deref(), Some("name"));
        assert!(parse("idmap=").is_err());
    }
}
