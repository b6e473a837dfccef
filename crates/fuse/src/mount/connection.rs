//! The kernel's FUSE connection of a mount: its id, and how to abort it.

use super::{locate, mountinfo};
use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

const FUSECTL: &str = "/sys/fs/fuse/connections";

/// The id of a mount's FUSE connection, under which fusectl shows it; `None` if no FUSE filesystem is mounted there.
/// Never accesses the mount itself, which might hang.
#[must_use]
pub fn connection_id(mountpoint: &Path) -> Option<u32> {
    let mount = mountinfo::topmost(&locate(mountpoint))?;
    let is_fuse = mount.fstype == "fuse" || mount.fstype.starts_with("fuse.");
    (is_fuse && mount.device.0 == 0).then_some(mount.device.1)
}

/// Opens the file that aborts a connection. The open file keeps referring to this connection, even if its id is
/// reused. Root needs no mounted fusectl; a user may open only the file of their own mount, and only where fusectl is
/// mounted.
pub fn open_abort(id: u32) -> io::Result<File> {
    let file = Path::new(FUSECTL).join(id.to_string()).join("abort");
    match File::options().write(true).open(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let within = format!("{id}/abort");
            Ok(openat(fusectl()?, within, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?.into())
        }
        result => result,
    }
}

/// A fusectl instance without a mount point.
fn fusectl() -> io::Result<OwnedFd> {
    let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}

/// Aborts a connection: requests in flight fail, and so does every later use of the mount (ENOTCONN).
pub fn abort(mountpoint: &Path) -> io::Result<()> {
    let id = connection_id(mountpoint).ok_or(io::ErrorKind::NotFound)?;
    open_abort(id)?.write_all(b"1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_without_a_fuse_mount_has_no_connection_id() {
        assert_eq!(connection_id(Path::new("/proc")), None);
        assert_eq!(connection_id(Path::new("/nowhere")), None);
        assert_eq!(abort(Path::new("/proc")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
