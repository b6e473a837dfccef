//! Choice of a mount's mapping: `--idmap=user|name|none|FILE`.

use super::{IdMap, OVERFLOW_ID, STRANGER};
use nigh_remote::SessionParams;
use nigh_types::{IdKind, IdName};
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};

/// Value of `--idmap`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum IdMapChoice {
    /// Equal ids on both sides.
    #[default]
    None,
    /// Pairs the mounting user with the user for which the server acts; all other ids are equal on both sides.
    User,
    /// Pairs users and groups with equal names on both sides; all others get the overflow id.
    Name,
    /// The pairs of a file; all other ids are equal on both sides.
    File(Pairs),
}

/// Pairs of a file: kind, local id, remote id.
pub type Pairs = Vec<(IdKind, u32, u32)>;

/// Why there is no such mapping, in one line.
#[derive(Debug, thiserror::Error)]
pub enum IdMapError {
    #[error("--idmap={}: {error}; give `user`, `name`, `none` or a file that can be read", path.display())]
    Unreadable { path: PathBuf, error: std::io::Error },
    #[error("{}:{line}: {what}", path.display())]
    Line { path: PathBuf, line: u64, what: String },
}

impl IdMapChoice {
    /// Parses the command-line word; a word other than the three known ones is a file name.
    ///
    /// # Errors
    /// If the file cannot be read, or for its first wrong line.
    pub fn load(word: &str) -> Result<IdMapChoice, IdMapError> {
        match word {
            "none" => Ok(IdMapChoice::None),
            "user" => Ok(IdMapChoice::User),
            "name" => Ok(IdMapChoice::Name),
            _ => {
                let path = Path::new(word);
                let text = std::fs::read_to_string(path)
                    .map_err(|error| IdMapError::Unreadable { path: path.into(), error })?;
                let pairs = parse(&text).map_err(|(line, what)| IdMapError::Line {
                    path: path.into(),
                    line,
                    what,
                })?;
                Ok(IdMapChoice::File(pairs))
            }
        }
    }

    /// Whether the server must send the names of its users and groups.
    #[must_use]
    pub fn wants_names(&self) -> bool {
        *self == IdMapChoice::Name
    }

    /// The mapping for an established session.
    pub(crate) fn map(&self, session: &SessionParams) -> IdMap {
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let mut map = self.between(session, own, local_id);
        map.users.stranger = stranger("/proc/self/uid_map");
        map.groups.stranger = stranger("/proc/self/gid_map");
        map
    }

    fn between(
        &self,
        session: &SessionParams,
        own: (u32, u32),
        local: impl Fn(IdKind, &str) -> Option<u32>,
    ) -> IdMap {
        let mut map = IdMap::default();
        match self {
            IdMapChoice::None => {}
            IdMapChoice::User => {
                map.users.pair(own.0, session.ids.acts_as.0);
                map.groups.pair(own.1, session.ids.acts_as.1);
            }
            IdMapChoice::Name => {
                (map.users.closed, map.groups.closed) = (true, true);
                for IdName { kind, id, name } in &session.ids.names {
                    if let Some(local) = local(*kind, name) {
                        map.pairs_mut(*kind).pair(local, *id);
                    }
                }
            }
            IdMapChoice::File(pairs) => {
                for (kind, local, remote) in pairs {
                    map.pairs_mut(*kind).pair(*local, *remote);
                }
            }
        }
        map
    }
}

/// The stranger id in a user namespace with this map (user_namespaces(7)). For an id outside the namespace the kernel
/// reports none at all, and it rejects ACLs with such an id.
fn stranger(map: &str) -> u32 {
    let text = std::fs::read_to_string(map).unwrap_or_default();
    if has(&text, STRANGER) { STRANGER } else { OVERFLOW_ID }
}

/// Whether a map of lines "first inside, first outside, count" contains an id.
fn has(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        matches!(numbers[..], [first, _, count] if (first..first.saturating_add(count)).contains(&u64::from(id)))
    })
}

/// Parses lines `u LOCAL REMOTE` and `g LOCAL REMOTE`; `#` begins a comment. On error: the line's number and the
/// problem.
fn parse(text: &str) -> Result<Pairs, (u64, String)> {
    let mut pairs = Pairs::new();
    for (number, line) in (1..).zip(text.lines()) {
        let words: Vec<&str> = line.split('#').next().unwrap_or("").split_whitespace().collect();
        let wrong = |what: &str| (number, format!("{what}; want `u LOCAL REMOTE` or `g LOCAL REMOTE`"));
        let id = |word: &str| match word.parse() {
            // All ones is not an id: chown(2) reads it as "unchanged". The one before is the stranger id.
            Ok(id) if id < STRANGER => Ok(id),
            _ => Err(wrong(&format!("`{word}` is no id"))),
        };
        let (kind, local, remote) = match words[..] {
            [] => continue,
            ["u", local, remote] => (IdKind::User, id(local)?, id(remote)?),
            ["g", local, remote] => (IdKind::Group, id(local)?, id(remote)?),
            _ => return Err(wrong("not understood")),
        };
        if pairs.iter().any(|(k, l, r)| *k == kind && (*l == local || *r == remote)) {
            return Err((number, format!("{local} or {remote} is in a pair above already")));
        }
        pairs.push((kind, local, remote));
    }
    Ok(pairs)
}

/// The local id of a name.
fn local_id(kind: IdKind, name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; 1 << 12];
    loop {
        let (errno, found) = match kind {
            IdKind::User => user(&name, &mut buffer),
            IdKind::Group => group(&name, &mut buffer),
        };
        match errno {
            libc::ERANGE if buffer.len() < 1 << 20 => buffer.resize(buffer.len() * 4, 0),
            _ => return found,
        }
    }
}

fn user(name: &CStr, buffer: &mut [libc::c_char]) -> (libc::c_int, Option<u32>) {
    let mut found = std::ptr::null_mut();
    // SAFETY: the name ends with NUL, the buffer has the given length; a found entry is `entry`.
    unsafe {
        let mut entry: libc::passwd = std::mem::zeroed();
        let (at, length) = (buffer.as_mut_ptr(), buffer.len());
        let errno = libc::getpwnam_r(name.as_ptr(), &raw mut entry, at, length, &raw mut found);
        (errno, found.as_ref().map(|entry| entry.pw_uid))
    }
}

fn group(name: &CStr, buffer: &mut [libc::c_char]) -> (libc::c_int, Option<u32>) {
    let mut found = std::ptr::null_mut();
    // SAFETY: as above.
    unsafe {
        let mut entry: libc::group = std::mem::zeroed();
        let (at, length) = (buffer.as_mut_ptr(), buffer.len());
        let errno = libc::getgrnam_r(name.as_ptr(), &raw mut entry, at, length, &raw mut found);
        (errno, found.as_ref().map(|entry| entry.gr_gid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_types::{Attr, CookieKey, NodeId, RemoteIds, Term};

    fn session(names: &[(IdKind, u32, &str)]) -> SessionParams {
        let name =
            |(kind, id, name): &(IdKind, u32, &str)| IdName { kind: *kind, id: *id, name: (*name).into() };
        let root = NodeId { ino: 1, generation: 1 };
        let plain = SessionParams::plain(root, Attr::default(), CookieKey::default(), Term::Session);
        SessionParams {
            ids: RemoteIds { acts_as: (2000, 200), names: names.iter().map(name).collect() },
            ..plain
        }
    }

    #[test]
    fn idmap_user_pairs_the_mounting_user_with_the_servers_user() {
        let map = IdMapChoice::User.between(&session(&[]), (1000, 100), |_, _| None);
        assert_eq!((map.users.local(2000), map.groups.local(200)), (Some(1000), Some(100)));
        assert_eq!((map.users.remote(1000), map.groups.remote(100)), (Some(2000), Some(200)));
        assert_eq!(map.users.local(7), Some(7));
    }

    #[test]
    fn idmap_name_pairs_users_and_groups_known_on_both_sides() {
        let known = |kind, name: &str| match (kind, name) {
            (IdKind::User, "ann") => Some(1000),
            (IdKind::Group, "ann") => Some(1001),
            (IdKind::User, "root") => Some(0),
            _ => None,
        };
        let names = [
            (IdKind::User, 0, "root"),
            (IdKind::User, 501, "ann"),
            (IdKind::User, 502, "bob"),
            (IdKind::Group, 20, "ann"),
            (IdKind::Group, 0, "wheel"),
        ];
        let map = IdMapChoice::Name.between(&session(&names), (1000, 100), known);
        assert_eq!([0, 501, 502, 1000].map(|id| map.users.local(id)), [Some(0), Some(1000), None, None]);
        assert_eq!([20, 0].map(|id| map.groups.local(id)), [Some(1001), None]);
        assert_eq!([1000, 0, 502].map(|id| map.users.remote(id)), [Some(501), Some(0), None]);
        assert!(IdMapChoice::Name.wants_names() && !IdMapChoice::User.wants_names());
    }

    #[test]
    fn stranger_id_is_an_id_that_the_user_namespace_has() {
        assert!(has("         0          0 4294967295\n", STRANGER));
        assert!(has("0 1000 1\n1 100000 65536\n", OVERFLOW_ID));
        for map in ["", "0 0 4294967294\n", "0 1000 1\n1 100000 65536\n", "x\n", "0 0\n"] {
            assert!(!has(map, STRANGER), "{map}");
        }
        assert_eq!(stranger("/does/not/exist"), OVERFLOW_ID);
    }

    #[test]
    fn local_id_of_root_is_zero() {
        assert_eq!((local_id(IdKind::User, "root"), local_id(IdKind::Group, "root")), (Some(0), Some(0)));
        assert_eq!(local_id(IdKind::User, "no such user, surely"), None);
        assert_eq!(local_id(IdKind::User, "with\0nul"), None);
    }

    #[test]
    fn idmap_file_lines_give_pairs() {
        let text = "# mine\nu 1000 501 # ann\n\n  g\t100   20\n";
        assert_eq!(parse(text), Ok(vec![(IdKind::User, 1000, 501), (IdKind::Group, 100, 20)]));
        let map = IdMapChoice::File(parse(text).unwrap()).between(&session(&[]), (0, 0), |_, _| None);
        assert_eq!((map.users.local(501), map.users.local(7)), (Some(1000), Some(7)));
        assert_eq!(parse(""), Ok(vec![]));
    }

    #[test]
    fn invalid_idmap_line_is_reported_with_its_number_in_one_line() {
        for (text, line, word) in [
            ("u 1 2\nx 1 2\n", 2, "not understood"),
            ("u 1\n", 1, "not understood"),
            ("u 1 2 3\n", 1, "not understood"),
            ("\n\ng one 2\n", 3, "`one` is no id"),
            ("u 1 -2\n", 1, "`-2` is no id"),
            ("u 4294967295 2\n", 1, "`4294967295` is no id"),
            ("g 1 4294967294\n", 1, "`4294967294` is no id"),
            ("u 1 2\ng 1 2\nu 3 2\n", 3, "pair above"),
            ("u 1 2\nu 1 3\n", 2, "pair above"),
        ] {
            let (number, what) = parse(text).unwrap_err();
            assert_eq!(number, line, "{text}");
            assert!(what.contains(word) && !what.contains('\n'), "{what}");
        }
    }

    #[test]
    fn unreadable_idmap_file_is_reported_in_one_line() {
        assert_eq!(IdMapChoice::load("user").unwrap(), IdMapChoice::User);
        assert_eq!(IdMapChoice::load("name").unwrap(), IdMapChoice::Name);
        assert_eq!(IdMapChoice::load("none").unwrap(), IdMapChoice::None);
        let why = IdMapChoice::load("/does/not/exist").unwrap_err().to_string();
        assert!(why.contains("/does/not/exist") && why.contains("`name`") && !why.contains('\n'), "{why}");
        let path = std::env::temp_dir().join(format!("nigh-idmap-{}", std::process::id()));
        std::fs::write(&path, "u 1 2\nwrong\n").unwrap();
        let why = IdMapChoice::load(&path.to_string_lossy()).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(why.contains(":2: not understood"), "{why}");
    }
}
