//! Mounts on this machine of directories that this server serves.
//!
//! The server must not enter such a mount below an export. Each access would be a request to the server itself, which
//! could deadlock, and a tree walk would recurse through the export without end.

use crate::os::stat::Dev;
use parking_lot::Mutex;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

/// The passed unix sockets.
static UNIX: Mutex<Vec<Weak<OwnedFd>>> = Mutex::new(Vec::new());

/// Whether the filesystem with this device is a FUSE mount of this server. It is if the user's own server serves it,
/// or if its unix socket belongs to this process or was passed to it by the service manager. Sources over TCP or ssh
/// are not recognised.
pub(crate) fn is_own(device: Dev) -> bool {
    // FUSE mounts have an anonymous device, with major number 0.
    if device.0 != 0 {
        return false;
    }
    let table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let Some((source, user)) = source_of(&table, device) else { return false };
    match source.strip_prefix(b"unix://") {
        Some(address) => is_ours(address),
        None => source.starts_with(b"/") && user == rustix::process::geteuid().as_raw(),
    }
}

/// Returns the source of a nigh mount, and the user that mounted it.
fn source_of(table: &[u8], Dev(major, minor): Dev) -> Option<(Vec<u8>, u32)> {
    let device = format!("{major}:{minor}");
    table.split(|byte| *byte == b'\n').find_map(|line| {
        let separator = line.windows(3).position(|three| three == b" - ")?;
        if line[..separator].split(|byte| *byte == b' ').nth(2)? != device.as_bytes() {
            return None;
        }
        let mut fields = line[separator + 3..].split(|byte| *byte == b' ');
        if fields.next()? != b"fuse.nigh" {
            return None;
        }
        let source = unescape(fields.next()?);
        let options = fields.next()?.split(|byte| *byte == b',');
        let mut user = options.filter_map(|option| str::from_utf8(option.strip_prefix(b"user_id=")?).ok());
        Some((source, user.next()?.parse().ok()?))
    })
}

/// Whether this process listens at an address `SOCKET[:EXPORT[/SUB]]`.
fn is_ours(address: &[u8]) -> bool {
    let colons = address.iter().enumerate().filter(|(_, byte)| **byte == b':').map(|(at, _)| at);
    let mut paths =
        std::iter::once(address.len()).chain(colons).map(|end| Path::new(OsStr::from_bytes(&address[..end])));
    paths.any(|path| {
        if is_served_at(path) {
            return true;
        }
        let listener = UnixStream::connect(path)
            .ok()
            .and_then(|stream| rustix::net::sockopt::socket_peercred(&stream).ok());
        listener.is_some_and(|peer| peer.pid == rustix::process::getpid())
    })
}

/// Notes a listening unix socket that the service manager passed to this process, while it is open.
pub(crate) fn note_passed(socket: &Arc<OwnedFd>) {
    let mut all = UNIX.lock();
    all.retain(|fd| fd.strong_count() > 0);
    all.push(Arc::downgrade(socket));
}

/// Returns the path of a listening unix socket.
pub(crate) fn path_of(fd: &OwnedFd) -> io::Result<Option<PathBuf>> {
    let listener = UnixListener::from(fd.try_clone()?);
    Ok(listener.local_addr()?.as_pathname().map(PathBuf::from))
}

/// Whether a path leads to a passed socket. A connection to the path shows the service manager as listener, not this
/// process.
fn is_served_at(path: &Path) -> bool {
    let all: Vec<Arc<OwnedFd>> = UNIX.lock().iter().filter_map(Weak::upgrade).collect();
    let place = |path: &Path| std::fs::metadata(path).map(|at| (at.dev(), at.ino())).ok();
    let mut places = all.iter().filter_map(|fd| path_of(fd).ok()?).filter_map(|path| place(&path));
    !all.is_empty() && place(path).is_some_and(|asked| places.any(|place| place == asked))
}

/// Decodes octal escapes such as `\040`.
pub(crate) fn unescape(text: &[u8]) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), text);
    while let [first, tail @ ..] = rest {
        let octal = tail.get(..3).filter(|_| *first == b'\\').and_then(|digits| {
            digits.iter().try_fold(0_u32, |sum, digit| Some(sum * 8 + char::from(*digit).to_digit(8)?))
        });
        match octal.and_then(|value| u8::try_from(value).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    const TABLE: &[u8] = b"30 25 0:40 / /mnt rw - tmpfs t rw,user_id=0\n\
        31 25 0:41 / /mnt/a rw shared:1 - fuse.nigh /home/a\\040b rw,user_id=7001,group_id=7001\n\
        32 25 0:42 / /mnt/b rw - fuse.sshfs box:/a rw,user_id=0\n\
        33 25 0:43 / /mnt/c rw - fuse.nigh\nnonsense\n";

    #[test]
    fn nigh_mount_is_found_by_device_with_source_and_user() {
        assert_eq!(source_of(TABLE, Dev(0, 41)), Some((b"/home/a b".to_vec(), 7001)));
        for other in [Dev(0, 40), Dev(0, 42), Dev(0, 43), Dev(0, 4), Dev(8, 41)] {
            assert_eq!(source_of(TABLE, other), None, "{other:?}");
        }
    }

    #[test]
    fn unix_socket_is_own_only_if_this_process_listens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let address = |rest: &str| [path.as_os_str().as_bytes(), rest.as_bytes()].concat();
        assert!(!is_ours(&address(":a")));
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(is_ours(&address("")) && is_ours(&address(":a/sub")) && is_ours(&address(":a:b")));
        assert!(!is_ours(b"/nowhere:a"));
    }

    /// The peer of a connection is the process that called listen(2), which is the service manager.
    #[test]
    fn passed_unix_socket_is_own_while_this_process_serves_it() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, socket};
        use std::os::fd::AsRawFd;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let passed = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&passed, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        // SAFETY: the child makes two system calls and touches no memory.
        let child = unsafe {
            match libc::fork() {
                0 => libc::_exit(libc::listen(passed.as_raw_fd(), 8)),
                child => child,
            }
        };
        let child = rustix::process::Pid::from_raw(child).unwrap();
        let ended = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty());
        assert_eq!(ended.unwrap().unwrap().1.exit_status(), Some(0));
        let address = [path.as_os_str().as_bytes(), b":a/sub"].concat();
        assert!(!is_ours(&address), "it may be another process's");
        let passed = crate::daemon::socket_activation::PassedSocket::new("s".into(), passed).unwrap();
        assert!(is_ours(&address));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(is_ours(link.as_os_str().as_bytes()));
        drop(passed);
        assert!(!is_ours(&address));
    }
}
