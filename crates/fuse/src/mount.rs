//! Mounting and unmounting: as root by mount(2), as a user by `fusermount3`.

mod connection;
mod ending;
mod error;
mod fusermount;
mod mountinfo;
mod probe;

pub use connection::{abort, connection_id, open_abort};
pub use ending::{Unmounted, unmount_by_force, unmount_idle, unmount_unless_used};
pub use error::{MountError, UnmountError};
pub use mountinfo::{Mount, is_mounted, mounts};
pub use probe::Probe;

use crate::transport::open_device;
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::thread::CapabilitySet;
use std::ffi::CString;
use std::fmt::Write;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

/// The filesystem type under which mounts of this kind appear in mountinfo.
pub const FILESYSTEM_TYPE: &str = "fuse.nigh";
const SUBTYPE: &str = "nigh";
/// How long a mount may take to answer before it counts as silent.
const PROBE_LIMIT: Duration = Duration::from_secs(2);

/// Options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    pub mountpoint: PathBuf,
    /// The source shown in mountinfo and df.
    pub source: String,
    /// Other users than the mounting one may enter.
    pub allow_other: bool,
    /// The kernel checks permissions; otherwise cached names are not checked at all.
    pub default_permissions: bool,
    pub read_only: bool,
    pub nosuid: bool,
    pub nodev: bool,
    pub noexec: bool,
    /// The kernel sends an FSYNC after each write.
    pub synchronous: bool,
    /// Bytes; `None`: READ is limited only by the negotiated pages.
    pub max_read: Option<u32>,
    /// More options of the kernel's FUSE, in `-o` syntax.
    pub extra: Vec<String>,
}

impl MountOptions {
    /// Defaults: nosuid, nodev, permission checks by the kernel, other users only if root mounts.
    #[must_use]
    pub fn new(mountpoint: impl Into<PathBuf>, source: impl Into<String>) -> MountOptions {
        MountOptions {
            mountpoint: mountpoint.into(),
            source: source.into(),
            allow_other: is_root(),
            default_permissions: true,
            read_only: false,
            nosuid: true,
            nodev: true,
            noexec: false,
            synchronous: false,
            max_read: None,
            extra: Vec::new(),
        }
    }

    fn flags(&self) -> MountFlags {
        [
            (self.read_only, MountFlags::RDONLY),
            (self.nosuid, MountFlags::NOSUID),
            (self.nodev, MountFlags::NODEV),
            (self.noexec, MountFlags::NOEXEC),
            (self.synchronous, MountFlags::SYNCHRONOUS),
        ]
        .into_iter()
        .filter(|(set, _)| *set)
        .fold(MountFlags::empty(), |all, (_, flag)| all | flag)
    }

    /// Options that mount(2) and fusermount3 share, each preceded by a comma.
    fn shared(&self) -> String {
        let mut text = String::new();
        for (set, option) in
            [(self.allow_other, ",allow_other"), (self.default_permissions, ",default_permissions")]
        {
            text.push_str(if set { option } else { "" });
        }
        if let Some(max_read) = self.max_read {
            let _ = write!(text, ",max_read={max_read}");
        }
        for option in &self.extra {
            let _ = write!(text, ",{option}");
        }
        text
    }
}

/// A completed mount. The device must be served (INIT first) before anything can access the mount; if it is dropped,
/// it leaves a dead mount that [`unmount`] clears.
#[derive(Debug)]
pub struct Mounted {
    pub device: OwnedFd,
    /// Absolute, without symlinks.
    pub mountpoint: PathBuf,
}

/// State of a path that is to be a mount point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// No mount of this kind.
    Absent,
    Alive,
    /// Its daemon ended ("Transport endpoint is not connected"); [`unmount`] clears it.
    Dead,
    /// It did not answer within 2 s.
    Silent,
}

/// Whether this process can probably mount, and if not, why. Root needs `/dev/fuse` and CAP_SYS_ADMIN; a user needs
/// `fusermount3`, which opens the device with the user's own permission.
pub fn check_support() -> Result<(), MountError> {
    if !is_root() {
        fusermount::check_installed()?;
        return open_device().map(drop).map_err(MountError::device);
    }
    open_device().map_err(MountError::device)?;
    let capabilities = rustix::thread::capabilities(None).map_err(|_| MountError::NotPermitted)?;
    match capabilities.effective.contains(CapabilitySet::SYS_ADMIN) {
        true => Ok(()),
        false => Err(MountError::NotPermitted),
    }
}

/// Mounts. On an error nothing stays mounted.
pub fn mount(options: &MountOptions) -> Result<Mounted, MountError> {
    let mountpoint = check_mountpoint(&options.mountpoint)?;
    let device = if is_root() {
        mount_as_root(options, &mountpoint)?
    } else {
        fusermount::mount(options, &mountpoint)?
    };
    Ok(Mounted { device, mountpoint })
}

/// Unmounts. `lazy` detaches the mount at once, and it ends with its last user; otherwise a mount in use is
/// [`UnmountError::Busy`]. Works on dead mounts too, and never accesses the mounted filesystem.
pub fn unmount(mountpoint: &Path, lazy: bool) -> Result<(), UnmountError> {
    unmount_located(&locate(mountpoint), lazy)
}

fn unmount_located(path: &Path, lazy: bool) -> Result<(), UnmountError> {
    if !is_root() {
        return fusermount::unmount(path, lazy);
    }
    let flags = UnmountFlags::NOFOLLOW | if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    rustix::mount::unmount(path, flags).map_err(|error| UnmountError::new(path, error))
}

/// Whether a mount of this kind exists at `mountpoint`, and whether it responds. Waits 2 s at most; the probing child
/// process may remain until a silent mount ends.
#[must_use]
pub fn liveness(mountpoint: &Path) -> Liveness {
    liveness_within(&locate(mountpoint), PROBE_LIMIT)
}

fn liveness_within(path: &Path, limit: Duration) -> Liveness {
    if mountinfo::topmost(path).is_none_or(|mount| mount.fstype != FILESYSTEM_TYPE) {
        return Liveness::Absent;
    }
    match probe::probe(path, limit) {
        Some(error) if [libc::ENOTCONN, libc::ECONNABORTED].contains(&error) => Liveness::Dead,
        Some(_) => Liveness::Alive,
        None => Liveness::Silent,
    }
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The absolute path, if a mount can be made there. Accesses nothing below a mount of this kind.
fn check_mountpoint(path: &Path) -> Result<PathBuf, MountError> {
    let refuse = |path: &Path, liveness| match liveness {
        Liveness::Absent => None,
        Liveness::Alive | Liveness::Silent => Some(MountError::Busy { path: path.to_owned() }),
        Liveness::Dead => Some(MountError::Dead { path: path.to_owned() }),
    };
    let absolute = lexical(path);
    if let Some(error) = refuse(&absolute, liveness(&absolute)) {
        return Err(error);
    }
    let resolved = absolute.canonicalize().map_err(|error| MountError::at(&absolute, error))?;
    if resolved != absolute
        && let Some(error) = refuse(&resolved, liveness(&resolved))
    {
        return Err(error);
    }
    let metadata = resolved.metadata().map_err(|error| MountError::at(&resolved, error))?;
    if !metadata.is_dir() {
        return Err(MountError::NotDirectory { path: resolved });
    }
    Ok(resolved)
}

/// Makes a path absolute, without `.`; keeps `..`.
fn lexical(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    absolute.components().filter(|part| *part != Component::CurDir).collect()
}

/// The path under which mountinfo may list the mount. Resolves symlinks only as far as needed, to avoid access to a
/// dead or silent mount.
fn locate(path: &Path) -> PathBuf {
    let absolute = lexical(path);
    if is_mounted(&absolute) {
        return absolute;
    }
    let below = || Some(absolute.parent()?.canonicalize().ok()?.join(absolute.file_name()?));
    match below() {
        Some(path) if is_mounted(&path) => path,
        _ => absolute.canonicalize().unwrap_or(absolute),
    }
}

fn mount_as_root(options: &MountOptions, mountpoint: &Path) -> Result<OwnedFd, MountError> {
    let device = open_device().map_err(MountError::device)?;
    let root_mode = FileType::Directory.as_raw_mode();
    let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
    let data = format!(
        "fd={},rootmode={root_mode:o},user_id={},group_id={}{}",
        device.as_raw_fd(),
        uid.as_raw(),
        gid.as_raw(),
        options.shared()
    );
    let invalid =
        |_| MountError::system("the mount options hold a NUL byte", io::ErrorKind::InvalidInput.into());
    let data = CString::new(data).map_err(invalid)?;
    let source = CString::new(options.source.as_bytes()).map_err(invalid)?;
    let target = CString::new(mountpoint.as_os_str().as_bytes()).map_err(invalid)?;
    match rustix::mount::mount(&source, &target, FILESYSTEM_TYPE, options.flags(), &*data) {
        Ok(()) => Ok(device),
        Err(Errno::PERM | Errno::ACCESS) => Err(MountError::NotPermitted),
        Err(Errno::NODEV) => Err(MountError::NoDevice),
        Err(Errno::INVAL) => Err(MountError::Options { options: options.extra.join(",") }),
        Err(error) => Err(MountError::system("mount(2) failed", error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_must_be_a_directory_that_exists() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        assert!(matches!(check_mountpoint(&missing), Err(MountError::Missing { .. })));
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(matches!(check_mountpoint(&file), Err(MountError::NotDirectory { .. })));
        assert!(matches!(check_mountpoint(&file.join("x")), Err(MountError::NotDirectory { .. })));
        assert_eq!(check_mountpoint(dir.path()).unwrap(), dir.path().canonicalize().unwrap());
        assert_eq!(liveness(dir.path()), Liveness::Absent);
        assert!(matches!(
            unmount(dir.path(), true),
            Err(UnmountError::NotMounted { .. } | UnmountError::NoFusermount)
        ));
    }

    #[test]
    fn options_are_written_as_the_kernel_reads_them() {
        let mut options = MountOptions::new("/mnt", "host:/dir");
        (options.allow_other, options.max_read) = (true, Some(65_536));
        options.extra = vec!["blksize=512".into()];
        assert_eq!(options.shared(), ",allow_other,default_permissions,max_read=65536,blksize=512");
        assert_eq!(options.flags(), MountFlags::NOSUID | MountFlags::NODEV);
        (options.read_only, options.noexec, options.nodev) = (true, true, false);
        assert_eq!(options.flags(), MountFlags::NOSUID | MountFlags::RDONLY | MountFlags::NOEXEC);
    }

    #[test]
    fn paths_are_made_absolute_without_touching_them() {
        assert_eq!(lexical(Path::new("/a/./b//c/")), Path::new("/a/b/c"));
        assert!(lexical(Path::new("x")).is_absolute());
    }
}
