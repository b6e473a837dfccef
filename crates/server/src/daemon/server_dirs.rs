//! Paths of the server's socket and state.

use std::env;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The directories of one user's server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerDirs {
    /// Directory of socket, locks and log; 0700.
    pub runtime: PathBuf,
    /// Parent of the state directories of the exports.
    pub state: PathBuf,
}

impl ServerDirs {
    /// Returns the directories of this user. Root: `/run/nigh` and `/var/lib/nigh`. Others: `$XDG_RUNTIME_DIR/nigh`
    /// (or `/tmp/nigh-UID`) and `$XDG_STATE_HOME/nigh` (or `~/.local/state/nigh`). `NIGH_RUNTIME_DIR` and
    /// `NIGH_STATE_DIR` override them.
    pub fn of_user() -> io::Result<ServerDirs> {
        ServerDirs::find(rustix::process::geteuid().as_raw(), |name| env::var_os(name).map(PathBuf::from))
    }

    /// Path of the socket on which the server listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.runtime.join("serve.sock")
    }

    fn find(uid: u32, variable: impl Fn(&str) -> Option<PathBuf>) -> io::Result<ServerDirs> {
        let set = |name: &str| variable(name).filter(|path| path.is_absolute());
        let runtime = match set("NIGH_RUNTIME_DIR") {
            Some(chosen) => chosen,
            None if uid == 0 => "/run/nigh".into(),
            None => match set("XDG_RUNTIME_DIR") {
                Some(dir) => dir.join("nigh"),
                None => format!("/tmp/nigh-{uid}").into(),
            },
        };
        let state = match set("NIGH_STATE_DIR") {
            Some(chosen) => chosen,
            None if uid == 0 => "/var/lib/nigh".into(),
            None => set("XDG_STATE_HOME")
                .or_else(|| set("HOME").map(|home| home.join(".local/state")))
                .ok_or_else(|| io::Error::other("neither XDG_STATE_HOME nor HOME is set"))?
                .join("nigh"),
        };
        Ok(ServerDirs { runtime, state })
    }

    /// Makes the runtime directory, or checks that the existing one is private to this user: another user could have
    /// made it in `/tmp` first.
    pub fn make_runtime(&self) -> io::Result<()> {
        if let Some(parent) = self.runtime.parent() {
            std::fs::create_dir_all(parent)?;
        }
        match std::fs::DirBuilder::new().mode(0o700).create(&self.runtime) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other?,
        }
        check_private(&self.runtime)
    }

    /// Makes the state directory if it is missing (0700), and checks that it is writable.
    ///
    /// # Errors
    /// One line, with its remedy.
    pub fn check_state(&self) -> io::Result<()> {
        let try_it = || {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.state)?;
            let path = self.state.join(format!(".check-{}", std::process::id()));
            let mut options = std::fs::OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(&path)?;
            let written = file.write_all(b"nigh\n").and_then(|()| file.sync_all());
            written.and(std::fs::remove_file(&path))
        };
        try_it().map_err(|error| {
            let problem = format!(
                "the state directory {} cannot be used: {error}: make room or give rights there, or name \
                 another one in NIGH_STATE_DIR",
                self.state.display()
            );
            io::Error::new(error.kind(), problem)
        })
    }
}

fn check_private(dir: &Path) -> io::Result<()> {
    let found = std::fs::symlink_metadata(dir)?;
    let own = rustix::process::geteuid().as_raw();
    let problem = if !found.is_dir() {
        "is no directory"
    } else if found.uid() != own {
        "belongs to another user"
    } else if found.mode() & 0o077 != 0 {
        "may be entered by others (chmod 700 it)"
    } else {
        return Ok(());
    };
    let message = format!("{} {problem}: no server can be trusted there", dir.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_directories_follow_environment_and_ignore_relative_paths() {
        let with = |uid, set: &'static [(&str, &str)]| {
            ServerDirs::find(uid, |name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
        };
        let of = |runtime: &str, state: &str| ServerDirs { runtime: runtime.into(), state: state.into() };
        assert_eq!(with(0, &[("XDG_RUNTIME_DIR", "/x")]).unwrap(), of("/run/nigh", "/var/lib/nigh"));
        assert_eq!(with(7, &[("HOME", "/h")]).unwrap(), of("/tmp/nigh-7", "/h/.local/state/nigh"));
        let all = &[("XDG_RUNTIME_DIR", "/r"), ("XDG_STATE_HOME", "/s"), ("HOME", "/h")];
        assert_eq!(with(7, all).unwrap(), of("/r/nigh", "/s/nigh"));
        assert_eq!(
            with(7, &[("NIGH_RUNTIME_DIR", "rel"), ("HOME", "/h")]).unwrap().runtime,
            Path::new("/tmp/nigh-7")
        );
        assert!(with(7, &[]).is_err());
    }

    #[test]
    fn runtime_directory_accessible_to_others_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let places = ServerDirs { runtime: dir.path().join("run"), state: dir.path().join("state") };
        places.make_runtime().unwrap();
        places.make_runtime().unwrap();
        std::fs::set_permissions(&places.runtime, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(places.make_runtime().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        std::fs::remove_dir(&places.runtime).unwrap();
        std::os::unix::fs::symlink(dir.path(), &places.runtime).unwrap();
        assert!(places.make_runtime().is_err());
    }
}
