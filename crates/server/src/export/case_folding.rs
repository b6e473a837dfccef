//! Case-insensitive directories, in which one name has several spellings.
//!
//! A fact about one spelling holds for all, and only the filesystem knows them: it folds by its own table, or
//! supports short names too (vfat). So the names of such a directory are never leased. Every lookup is a request, and
//! no cached name answers for another one. Attributes and data of the files in it are leased as usual.

use crate::export::node::{Directory, proc_path};
use crate::os::filesystem::kind_of;
use crate::os::stat::{self, Dev};
use parking_lot::RwLock;
use rustc_hash::{FxHashMap, FxHashSet};
use rustix::fs::{Mode, OFlags, RawDir};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::LazyLock;

/// Name comparison of known filesystems. None of the locks is held during a system call.
#[derive(Debug, Default)]
pub(crate) struct CaseFolding {
    /// By device and mount: `st_dev` is reused after an unmount.
    known: RwLock<FxHashMap<(Dev, u64), NameComparison>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NameComparison {
    /// Byte by byte.
    Exact,
    /// Case-insensitively.
    Folded,
    /// Folded in directories with the flag `FS_CASEFOLD_FL`, exact in others.
    ByDirectory,
}

/// Maximum number of remembered filesystems; beyond it all are examined anew.
const MOST_KNOWN: usize = 1_024;
/// Names tried in a probe, and names of a directory read for it.
const TRIES: usize = 16;
const MOST_READ: usize = 10_000;

const FS_CASEFOLD_FL: u32 = 0x4000_0000;
/// `statfs(2)`: ext2 to ext4, f2fs, tmpfs, overlayfs, bcachefs.
const BY_DIRECTORY: [u64; 5] = [0xef53, 0xf2f5_2010, 0x0102_1994, 0x794c_7630, 0xca45_1a4e];
/// vfat and msdos, exfat, hfs, hfsplus, hpfs, affs.
const FOLDED: [u64; 6] = [0x4d44, 0x2011_bab0, 0x4244, 0x482b, 0xf995_e849, 0xadff];
/// btrfs, ramfs, squashfs, erofs, proc, sysfs, cgroup2.
const EXACT: [u64; 7] =
    [0x9123_683e, 0x8584_58f6, 0x7371_7368, 0xe0f5_e1e2, 0x9fa0, 0x6265_6572, 0x6367_7270];

/// Whether this kernel supports case folding at all (`CONFIG_UNICODE`).
static KERNEL_FOLDS: LazyLock<bool> = LazyLock::new(|| {
    let features = ["ext4", "f2fs", "tmpfs"].map(|kind| format!("/sys/fs/{kind}/features/casefold"));
    features.iter().any(|feature| Path::new(feature).exists()) || Path::new("/sys/fs/bcachefs").exists()
});

impl CaseFolding {
    /// Whether each name of a directory has a single spelling. Also `false` while that is unknown: filesystems of
    /// other kinds are probed with other spellings of existing names, and the directory may have none.
    pub(crate) fn is_case_sensitive(&self, dir: Directory<'_>) -> bool {
        let (dev, mount, known_anew) = dir.device;
        let key = (dev, mount);
        let met = self.known.read().get(&key).copied().filter(|_| !known_anew);
        let comparing = match met {
            Some(comparing) => comparing,
            None => match detect(dir) {
                Some(comparing) => self.note(key, comparing),
                None => return false,
            },
        };
        match comparing {
            NameComparison::Exact => true,
            NameComparison::Folded => false,
            NameComparison::ByDirectory => !has_flag(dir),
        }
    }

    fn note(&self, key: (Dev, u64), comparing: NameComparison) -> NameComparison {
        let mut met = self.known.write();
        if met.len() >= MOST_KNOWN {
            met.clear();
        }
        met.insert(key, comparing);
        comparing
    }
}

fn detect(dir: Directory<'_>) -> Option<NameComparison> {
    let kind = kind_of(dir.fd).ok()?;
    if BY_DIRECTORY.contains(&kind) {
        return Some(if *KERNEL_FOLDS { NameComparison::ByDirectory } else { NameComparison::Exact });
    }
    if FOLDED.contains(&kind) {
        return Some(NameComparison::Folded);
    }
    if EXACT.contains(&kind) {
        return Some(NameComparison::Exact);
    }
    probe(&open(dir)?)
}

/// Whether the directory has the flag; assumed if it cannot be opened.
fn has_flag(dir: Directory<'_>) -> bool {
    let Some(open) = open(dir) else { return true };
    rustix::fs::ioctl_getflags(&open).is_ok_and(|flags| flags.bits() & FS_CASEFOLD_FL != 0)
}

fn open(dir: Directory<'_>) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(proc_path(dir.fd), flags, Mode::empty()).ok()
}

/// Probes other spellings of existing names. Returns `None` if no name is conclusive.
fn probe(dir: &OwnedFd) -> Option<NameComparison> {
    let (names, all) = read(dir)?;
    let there = |name: &[u8]| stat::of_name(dir, name).ok();
    let other = |name: &Vec<u8>| (name.clone(), swapped(name));
    for (name, swapped) in names.iter().map(other).filter(|(name, swapped)| name != swapped).take(TRIES) {
        if names.contains(&swapped) {
            return Some(NameComparison::Exact);
        }
        let found = there(&swapped);
        // Skips the name if the directory has changed meanwhile.
        let Some(stat) = there(&name) else { continue };
        match found {
            None => return Some(NameComparison::Exact),
            // Excludes a second link to the file.
            Some(found) if all || found.is_same(&stat) && (stat.attr.nlink == 1 || stat.attr.is_dir()) => {
                return Some(NameComparison::Folded);
            }
            Some(_) => {}
        }
    }
    None
}

/// Returns names of a directory, and whether they are all.
fn read(dir: &OwnedFd) -> Option<(FxHashSet<Vec<u8>>, bool)> {
    let mut buffer = Vec::<u8>::with_capacity(32 << 10);
    let mut entries = RawDir::new(dir, buffer.spare_capacity_mut());
    let mut names = FxHashSet::default();
    while let Some(entry) = entries.next() {
        names.insert(entry.ok()?.file_name().to_bytes().to_vec());
        if names.len() >= MOST_READ {
            return Some((names, false));
        }
    }
    Some((names, true))
}

/// Swaps upper and lower case of the ASCII letters.
fn swapped(name: &[u8]) -> Vec<u8> {
    let swap = |byte: &u8| match byte.is_ascii_uppercase() {
        true => byte.to_ascii_lowercase(),
        false => byte.to_ascii_uppercase(),
    };
    name.iter().map(swap).collect()
}

/// Whether some filesystem may treat a name as equal to this ASCII name. It may fold case (`ſ` too), drop ignorable
/// code points, and drop trailing dots and spaces.
pub(crate) fn may_fold_to(name: &[u8], ascii: &[u8]) -> bool {
    let begins =
        |first: &u8| !first.is_ascii() || ascii.first().is_some_and(|a| a.eq_ignore_ascii_case(first));
    if !name.first().is_some_and(begins) {
        return false;
    }
    let Ok(name) = std::str::from_utf8(name) else { return false };
    let shown = name.chars().filter(|c| !is_ignorable(*c)).map(|c| if c == 'ſ' { 's' } else { c });
    let shown: String = shown.collect();
    shown.trim_end_matches(['.', ' ']).as_bytes().eq_ignore_ascii_case(ascii)
}

/// The Unicode property `Default_Ignorable_Code_Point`.
fn is_ignorable(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}'
        | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
        | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_sensitive_directory_is_detected_by_probe() {
        let dir = tempfile::tempdir().unwrap();
        let open = || OwnedFd::from(std::fs::File::open(dir.path()).unwrap());
        std::fs::write(dir.path().join("123"), "").unwrap();
        assert_eq!(probe(&open()), None, "nothing tells");
        std::fs::write(dir.path().join("File"), "").unwrap();
        assert_eq!(probe(&open()), Some(NameComparison::Exact));
        std::fs::hard_link(dir.path().join("File"), dir.path().join("fILE")).unwrap();
        assert_eq!(probe(&open()), Some(NameComparison::Exact), "two names of one file");
    }

    #[test]
    fn other_spellings_of_a_hidden_name_are_hidden() {
        for name in
            [".nigh-orphans", ".NIGH-Orphans", ".nigh-orphanſ", ".nigh\u{200d}-orphans", ".nigh-orphans. "]
        {
            assert!(may_fold_to(name.as_bytes(), b".nigh-orphans"), "{name}");
        }
        for name in ["nigh-orphans", ".nigh-orphan", ".nigh-orphans2", ""] {
            assert!(!may_fold_to(name.as_bytes(), b".nigh-orphans"), "{name}");
        }
    }
}
