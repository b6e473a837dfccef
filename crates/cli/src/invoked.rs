//! Translation of the command lines of mount(8), umount(8) and mount.fuse3(8) into that of `nigh`.
//!
//! | called as | by | becomes |
//! | --- | --- | --- |
//! | `mount.nigh SOURCE MNT [-sfnvrw] [-t TYPE] [-o …]`, `mount.fuse.nigh …` | mount(8) | `nigh mount … -- SOURCE MNT` |
//! | `nigh SOURCE MNT [-o …]` | mount.fuse3(8) | `nigh mount … -- SOURCE MNT` |
//! | `umount.nigh MNT [-nlfvr] [-t TYPE]`, `umount.fuse.nigh …` | umount(8) | `nigh umount … -- MNT` |
//! | `nigh mount … -o name=value` | a user | `nigh mount … --name=value`, if that is an option of `nigh mount` |

use crate::args::Args;
use crate::options::Usage;
use clap::CommandFactory;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// A command line after the name of the program.
#[derive(Debug)]
pub struct Invoked {
    pub words: Result<Vec<OsString>, Usage>,
    /// Called as a mount helper: exit codes are those of mount(8).
    pub is_helper: bool,
}

const MOUNT_FLAGS: &str = "sfnvrwi";
const UMOUNT_FLAGS: &str = "nlfvri";
const TYPES: &[&str] = &["nigh", "fuse.nigh", "fuse"];
/// Long options that `-o` does not accept as such: it parses the first two itself, and the others are for interactive
/// use.
const NOT_IN_OPTIONS: &[&str] = &["idmap", "events", "foreground", "help"];

impl Invoked {
    /// `words`: the whole command line.
    pub fn of(words: impl IntoIterator<Item = OsString>) -> Invoked {
        let mut words = words.into_iter();
        let program = words.next().unwrap_or_default();
        let words: Vec<OsString> = words.collect();
        match Path::new(&program).file_name().and_then(OsStr::to_str).unwrap_or_default() {
            "umount.nigh" | "umount.fuse.nigh" => Invoked { words: umount(&words), is_helper: true },
            "mount.nigh" | "mount.fuse.nigh" => Invoked { words: mount(&words), is_helper: true },
            _ if is_bare(&words) => Invoked { words: mount(&words), is_helper: true },
            _ => Invoked { words: expanded(words), is_helper: false },
        }
    }
}

/// Whether the command line is `SOURCE MNT [-o …]` without a subcommand.
fn is_bare(words: &[OsString]) -> bool {
    let [source, mountpoint, rest @ ..] = words else { return false };
    let is_flag = |word: &OsString| word.as_encoded_bytes().starts_with(b"-");
    let has = |byte: u8| source.as_encoded_bytes().contains(&byte);
    let is_command =
        Args::command().get_subcommands().any(|command| command.get_name() == source) || source == "help";
    let is_source = has(b'/') || has(b':') || rest.iter().any(|word| word == "-o");
    !is_command && !is_flag(source) && !is_flag(mountpoint) && is_source
}

/// The arguments of a mount helper.
#[derive(Default)]
struct HelperArgs {
    flags: String,
    /// Values of `-o`.
    options: Vec<String>,
    operands: Vec<OsString>,
}

impl HelperArgs {
    /// Parses a helper's arguments. `flags`: letters that take no value.
    fn read(words: &[OsString], flags: &str) -> Result<HelperArgs, Usage> {
        let mut told = HelperArgs::default();
        let mut words = words.iter();
        let text = |word: Option<&OsString>, flag: char| {
            let text = word.and_then(|word| word.to_str()).map(str::to_owned);
            text.ok_or_else(|| Usage(format!("-{flag}: wants a word behind it")))
        };
        while let Some(word) = words.next() {
            let letters =
                word.to_str().and_then(|word| word.strip_prefix('-')).filter(|rest| !rest.is_empty());
            let Some(letters) = letters else {
                told.operands.push(word.clone());
                continue;
            };
            if letters == "-" {
                told.operands.extend(words.by_ref().cloned());
                break;
            }
            for (at, letter) in letters.char_indices() {
                let rest = &letters[at + letter.len_utf8()..];
                if flags.contains(letter) {
                    told.flags.push(letter);
                    continue;
                }
                let value = match (letter, rest) {
                    ('o' | 't', "") => text(words.next(), letter)?,
                    ('o' | 't', rest) => rest.to_owned(),
                    _ => return Err(Usage(format!("-{letter}: not known here"))),
                };
                match letter {
                    'o' => told.options.push(value),
                    _ if TYPES.contains(&value.as_str()) => {}
                    _ => return Err(Usage(format!("-t {value}: nigh mounts the types nigh and fuse.nigh"))),
                }
                break;
            }
        }
        Ok(told)
    }

    fn has(&self, flag: char) -> bool {
        self.flags.contains(flag)
    }
}

fn mount(words: &[OsString]) -> Result<Vec<OsString>, Usage> {
    let mut told = HelperArgs::read(words, MOUNT_FLAGS)?;
    if told.operands.len() != 2 {
        return Err(Usage("want SOURCE MOUNTPOINT [-sfnvrw] [-o OPTION,…]".into()));
    }
    for (flag, option) in [('r', "ro"), ('w', "rw")] {
        told.options.extend(told.has(flag).then(|| option.to_owned()));
    }
    let mut made = vec![OsString::from("mount")];
    for (flag, long) in [('f', "--fake"), ('s', "--sloppy")] {
        made.extend(told.has(flag).then(|| long.into()));
    }
    for text in &told.options {
        made.extend(long_options(text)?);
    }
    made.push("--".into());
    made.extend(told.operands);
    Ok(made)
}

fn umount(words: &[OsString]) -> Result<Vec<OsString>, Usage> {
    let told = HelperArgs::read(words, UMOUNT_FLAGS)?;
    if told.operands.len() != 1 || !told.options.is_empty() {
        return Err(Usage("want MOUNTPOINT [-nlfvr]".into()));
    }
    let mut made = vec![OsString::from("umount")];
    for (flag, long) in [('l', "--lazy"), ('f', "--force")] {
        made.extend(told.has(flag).then(|| long.into()));
    }
    made.push("--".into());
    made.extend(told.operands);
    Ok(made)
}

/// Moves `-o` options of `nigh mount` to the end, because they override options of the command line.
fn expanded(words: Vec<OsString>) -> Result<Vec<OsString>, Usage> {
    if words.first().is_none_or(|word| word != "mount") {
        return Ok(words);
    }
    let (mut made, mut options) = (Vec::new(), Vec::new());
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let attached = word.to_str().and_then(|word| word.strip_prefix("-o")).map(str::to_owned);
        let text = match attached {
            Some(text) if text.is_empty() => match words.next().map(OsString::into_string) {
                Some(Ok(text)) => text,
                _ => return Err(Usage("-o: wants options behind it".into())),
            },
            Some(text) => text.strip_prefix('=').unwrap_or(&text).to_owned(),
            None if word == "--" => {
                made.append(&mut options);
                made.push(word);
                made.extend(words.by_ref());
                return Ok(made);
            }
            None => {
                made.push(word);
                continue;
            }
        };
        options.extend(long_options(&text)?);
    }
    made.append(&mut options);
    Ok(made)
}

/// Splits one `-o` value: options of `nigh mount` become long options, and the others stay behind a `-o`.
fn long_options(text: &str) -> Result<Vec<OsString>, Usage> {
    let command = Args::command();
    let mount = command.get_subcommands().find(|command| command.get_name() == "mount");
    let takes_value = |name: &str| {
        let known = |arg: &&clap::Arg| arg.get_long() == Some(name) && !arg.is_hide_set();
        let arg = mount?.get_arguments().find(known)?;
        (!NOT_IN_OPTIONS.contains(&name)).then(|| arg.get_action().takes_values())
    };
    let (mut made, mut rest) = (Vec::new(), Vec::new());
    for option in text.split(',').filter(|option| !option.is_empty()) {
        let (name, value) =
            option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
        let name = name.replace('_', "-");
        match (takes_value(&name), value) {
            (None, _) => rest.push(option),
            (Some(true), Some(value)) => made.push(format!("--{name}={value}").into()),
            (Some(false), None) => made.push(format!("--{name}").into()),
            (Some(true), None) => return Err(Usage(format!("-o {option}: wants a value, {name}=…"))),
            (Some(false), Some(_)) => return Err(Usage(format!("-o {option}: takes no value"))),
        }
    }
    if !rest.is_empty() {
        made.extend(["-o".into(), rest.join(",").into()]);
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> (bool, Result<String, String>) {
        let invoked = Invoked::of(line.split(' ').map(OsString::from));
        let words = invoked.words.map(|words| {
            let words: Vec<String> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
            words.join(" ")
        });
        (invoked.is_helper, words.map_err(|usage| usage.0))
    }

    fn helper(line: &str) -> String {
        let (is_helper, words) = of(line);
        assert!(is_helper, "{line}");
        words.unwrap()
    }

    #[test]
    fn mount_helper_takes_what_mount_and_mount_fuse3_pass() {
        for (line, wanted) in [
            ("/sbin/mount.nigh box:/a /mnt -o rw,users", "mount -o rw,users -- box:/a /mnt"),
            ("mount.fuse.nigh /a /mnt -n -o ro -t fuse.nigh", "mount -o ro -- /a /mnt"),
            ("mount.nigh -sfv /a /mnt", "mount --fake --sloppy -- /a /mnt"),
            ("mount.nigh /a /mnt -r", "mount -o ro -- /a /mnt"),
            ("nigh /a /mnt -o rw,dev,suid", "mount -o rw,dev,suid -- /a /mnt"),
            ("nigh nigh://box/x /mnt", "mount -- nigh://box/x /mnt"),
            ("nigh src /mnt -o rw", "mount -o rw -- src /mnt"),
            ("umount.nigh /mnt -n -l -f", "umount --lazy --force -- /mnt"),
            ("/usr/sbin/umount.fuse.nigh /mnt -t fuse.nigh", "umount -- /mnt"),
            ("mount.nigh -o ro -- -a /mnt", "mount -o ro -- -a /mnt"),
        ] {
            assert_eq!(helper(line), wanted, "{line}");
        }
        for line in [
            "mount.nigh /a",
            "mount.nigh /a /b /c",
            "mount.nigh /a /mnt -o",
            "mount.nigh /a /mnt -t ext4",
            "mount.nigh -x /a /mnt",
            "umount.nigh",
            "umount.nigh /a /b",
        ] {
            let (is_helper, words) = of(line);
            assert!(is_helper && words.is_err(), "{line}");
        }
    }

    #[test]
    fn subcommand_or_mistyped_subcommand_is_not_parsed_as_a_source() {
        for line in
            ["nigh status /mnt", "nigh demo", "nigh umount /mnt", "nigh stauts /mnt", "nigh --help", "nigh"]
        {
            let (is_helper, words) = of(line);
            assert!(!is_helper, "{line}");
            assert_eq!(words.unwrap(), line.strip_prefix("nigh").unwrap().trim_start(), "{line}");
        }
    }

    #[test]
    fn every_option_of_nigh_mount_is_accepted_in_dash_o() {
        for (line, wanted) in [
            ("nigh mount /a /b -o ro,cache-size=1M,noac", "mount /a /b --cache-size=1M -o ro,noac"),
            ("nigh mount -oprefetch=off,token=/t -- /a /b", "mount --prefetch=off --token=/t -- /a /b"),
            (
                "nigh mount /a -o on_disconnect=fail /b --threads 2",
                "mount /a /b --threads 2 --on-disconnect=fail",
            ),
            (
                "nigh mount -o=plaintext,cache=loose,idmap=none /a /b",
                "mount /a /b --plaintext -o cache=loose,idmap=none",
            ),
            ("nigh prefetch -o x", "prefetch -o x"),
        ] {
            let (is_helper, words) = of(line);
            assert_eq!((is_helper, words.unwrap().as_str()), (false, wanted), "{line}");
        }
        for line in
            ["nigh mount /a /b -o cache-size", "nigh mount /a /b -o plaintext=1", "nigh mount /a /b -o"]
        {
            assert!(of(line).1.is_err(), "{line}");
        }
        assert_eq!(
            of("nigh mount /a /b -o foreground,ready-fd=3").1.unwrap(),
            "mount /a /b -o foreground,ready-fd=3"
        );
        for name in [
            "host-timeout",
            "entry-timeout",
            "negative-timeout",
            "attr-timeout",
            "symlinks",
            "prefetch",
            "on-disconnect",
            "request-timeout",
            "cache-size",
            "max-dirs",
            "dir-timeout",
            "token",
            "ca",
            "ssh",
            "threads",
        ] {
            let wanted = format!("--{name}=1");
            assert_eq!(long_options(&format!("{name}=1")).unwrap(), [OsString::from(wanted)]);
        }
    }
}
