//! Errors of mounting and unmounting: one line with the problem and its remedy.

use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};

/// Why nothing was mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error("mount point {path:?} does not exist: create it with `mkdir -p {}`", path.display())]
    Missing { path: PathBuf },
    #[error("mount point {path:?} is not a directory: give a directory")]
    NotDirectory { path: PathBuf },
    #[error("{path:?} already is a nigh mount: give another mount point, or `nigh umount {}` first", path.display())]
    Busy { path: PathBuf },
    #[error("{path:?} is a nigh mount whose process ended: clear it with `nigh umount {}`", path.display())]
    Dead { path: PathBuf },
    #[error("no permission to reach mount point {path:?}: give a directory of your own")]
    Unreachable { path: PathBuf },
    #[error(
        "there is no /dev/fuse: load it with `modprobe fuse`, or start the container with \
         `--device /dev/fuse --cap-add SYS_ADMIN`"
    )]
    NoDevice,
    #[error(
        "no permission to open /dev/fuse: run as root, or `chmod 666 /dev/fuse` once as root; in a container, start it \
         with `--device /dev/fuse --cap-add SYS_ADMIN`"
    )]
    DeviceDenied,
    #[error(
        "the kernel does not permit mounting here (CAP_SYS_ADMIN is missing): start the container with \
         `--device /dev/fuse --cap-add SYS_ADMIN`"
    )]
    NotPermitted,
    #[error("the kernel refused the mount options {options:?}: leave out what FUSE does not know")]
    Options { options: String },
    #[error(
        "mounting as an ordinary user needs fusermount3: install it with `apt install fuse3`, or run as root"
    )]
    NoFusermount,
    #[error(
        "allow_other is not permitted to users: leave it out, or put `user_allow_other` into /etc/fuse.conf"
    )]
    AllowOther,
    #[error("fusermount3 refused: {message}")]
    Fusermount { message: String },
    #[error("{what}: {error}")]
    System { what: String, error: io::Error },
}

impl MountError {
    pub(super) fn system(what: impl Into<String>, error: io::Error) -> MountError {
        MountError::System { what: what.into(), error }
    }

    /// For an error in access to the mount point.
    pub(super) fn at(path: &Path, error: io::Error) -> MountError {
        let path = path.to_owned();
        match error.raw_os_error() {
            Some(libc::ENOENT) => MountError::Missing { path },
            Some(libc::ENOTDIR) => MountError::NotDirectory { path },
            Some(libc::EACCES | libc::EPERM) => MountError::Unreachable { path },
            Some(libc::ENOTCONN) => MountError::Dead { path },
            _ => MountError::system(format!("mount point {path:?}"), error),
        }
    }

    /// For an error in opening `/dev/fuse`.
    pub(super) fn device(error: io::Error) -> MountError {
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => MountError::NoDevice,
            Some(libc::EACCES | libc::EPERM) => MountError::DeviceDenied,
            _ => MountError::system("opening /dev/fuse", error),
        }
    }
}

/// Why it is still mounted, or that it never was.
#[derive(Debug, thiserror::Error)]
pub enum UnmountError {
    #[error("{path:?} is in use: end what runs there (`fuser -vm {}` lists it), or unmount it lazily", path.display())]
    Busy { path: PathBuf },
    #[error(
        "{path:?} does not answer, and its connection cannot be ended ({error}): as root, `umount -f {0}`, then `umount -l {0}`",
        path.display()
    )]
    NotEnded { path: PathBuf, error: io::Error },
    #[error("{path:?} is not a mount point")]
    NotMounted { path: PathBuf },
    #[error("no permission to unmount {path:?}: do it as the user who mounted it, or as root")]
    NotPermitted { path: PathBuf },
    #[error(
        "unmounting as an ordinary user needs fusermount3: install it with `apt install fuse3`, or run as root"
    )]
    NoFusermount,
    #[error("unmounting {path:?}: {message}")]
    Other { path: PathBuf, message: String },
}

impl UnmountError {
    pub(super) fn new(path: &Path, error: Errno) -> UnmountError {
        let path = path.to_owned();
        match error {
            Errno::BUSY => UnmountError::Busy { path },
            Errno::INVAL | Errno::NOENT => UnmountError::NotMounted { path },
            Errno::PERM | Errno::ACCESS => UnmountError::NotPermitted { path },
            error => UnmountError::Other { path, message: error.to_string() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_is_one_line() {
        let path = PathBuf::from("/mnt/x");
        let text = String::from("x");
        for error in [
            MountError::Missing { path: path.clone() },
            MountError::Busy { path: path.clone() },
            MountError::NoDevice,
            MountError::DeviceDenied,
            MountError::NotPermitted,
            MountError::NoFusermount,
            MountError::AllowOther,
            MountError::Options { options: text },
        ] {
            assert!(!error.to_string().contains('\n') && !error.to_string().contains("  "), "{error}");
        }
        assert!(matches!(UnmountError::new(&path, Errno::BUSY), UnmountError::Busy { .. }));
    }
}
