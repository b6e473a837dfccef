//! `fusermount3`, the setuid program that mounts for ordinary users.
//!
//! It gets the number of one end of a socket pair in `_FUSE_COMMFD`, mounts, and sends the open device over it.

use super::{MountError, MountOptions, SUBTYPE, UnmountError};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg,
    socketpair,
};
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

const PROGRAM: &str = "fusermount3";

pub(super) fn check_installed() -> Result<(), MountError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    match std::env::split_paths(&path).any(|dir| dir.join(PROGRAM).is_file()) {
        true => Ok(()),
        false => Err(MountError::NoFusermount),
    }
}

pub(super) fn mount(options: &MountOptions, mountpoint: &Path) -> Result<OwnedFd, MountError> {
    let system = |what: &'static str| move |error: io::Error| MountError::system(what, error);
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|error| system("socketpair")(error.into()))?;
    let inherited = theirs.as_raw_fd();
    let mut command = Command::new(PROGRAM);
    command
        .args(["-o", &option_text(options), "--"])
        .arg(mountpoint)
        .env("_FUSE_COMMFD", inherited.to_string())
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    // SAFETY: fcntl is safe between fork and exec.
    unsafe {
        command.pre_exec(move || match libc::fcntl(inherited, libc::F_SETFD, 0) {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let mut child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => MountError::NoFusermount,
        _ => MountError::system("starting fusermount3", error),
    })?;
    drop(theirs);
    let device = receive_device(&ours);
    let mut message = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = stderr.read_to_string(&mut message);
    }
    let status = child.wait().map_err(system("waiting for fusermount3"))?;
    match device {
        Ok(Some(device)) if status.success() => Ok(device),
        Ok(_) => Err(refusal(&message)),
        Err(error) => Err(MountError::system("receiving the device from fusermount3", error.into())),
    }
}

pub(super) fn unmount(mountpoint: &Path, lazy: bool) -> Result<(), UnmountError> {
    let mut command = Command::new(PROGRAM);
    command.args(if lazy { &["-u", "-z", "--"][..] } else { &["-u", "--"] }).arg(mountpoint);
    let output =
        command.env("LC_ALL", "C").stdin(Stdio::null()).output().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => UnmountError::NoFusermount,
            _ => UnmountError::Other { path: mountpoint.to_owned(), message: error.to_string() },
        })?;
    if output.status.success() {
        return Ok(());
    }
    let path = mountpoint.to_owned();
    let message = one_line(&String::from_utf8_lossy(&output.stderr));
    Err(if message.contains("busy") {
        UnmountError::Busy { path }
    } else if message.contains("not found") || message.contains("not mounted") {
        UnmountError::NotMounted { path }
    } else if message.contains("not permitted") || message.contains("ermission denied") {
        UnmountError::NotPermitted { path }
    } else {
        UnmountError::Other { path, message }
    })
}

/// The device, or `None` if the other end closed without sending one.
fn receive_device(socket: impl AsFd) -> Result<Option<OwnedFd>, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    loop {
        let flags = RecvFlags::CMSG_CLOEXEC;
        match recvmsg(&socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, flags) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
            Ok(_) => break,
        }
    }
    Ok(ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    }))
}

fn option_text(options: &MountOptions) -> String {
    // fusermount3 splits options at commas without a preceding backslash.
    let source = options.source.replace('\\', "\\\\").replace(',', "\\,");
    let mut text = String::from(if options.read_only { "ro" } else { "rw" });
    for (set, on, off) in [
        (options.nosuid, ",nosuid", ",suid"),
        (options.nodev, ",nodev", ",dev"),
        (options.noexec, ",noexec", ""),
        (options.synchronous, ",sync", ""),
    ] {
        text.push_str(if set { on } else { off });
    }
    text.push_str(&options.shared());
    text + ",subtype=" + SUBTYPE + ",fsname=" + &source
}

fn refusal(stderr: &str) -> MountError {
    let message = one_line(stderr);
    if message.contains("allow_other") && message.contains("user_allow_other") {
        MountError::AllowOther
    } else if message.contains("fuse device not found") || message.contains("/dev/fuse: No such") {
        MountError::NoDevice
    } else if message.contains("/dev/fuse: Permission") || message.contains("/dev/fuse: Operation not") {
        MountError::DeviceDenied
    } else if message.contains("Operation not permitted") {
        MountError::NotPermitted
    } else {
        MountError::Fusermount { message }
    }
}

/// The last line of its output, without the program name.
fn one_line(stderr: &str) -> String {
    let last = stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it gave no reason");
    last.trim().trim_start_matches("fusermount3: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::io::IoSlice;

    #[test]
    fn a_device_comes_over_the_socket_or_does_not() {
        let pair =
            || socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let (ours, theirs) = pair();
        let file = tempfile::tempfile().unwrap();
        let fds = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&theirs, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::empty()).unwrap();
        let device = receive_device(&ours).unwrap().unwrap();
        assert_eq!(rustix::fs::fstat(&device).unwrap().st_ino, rustix::fs::fstat(&file).unwrap().st_ino);
        let (ours, theirs) = pair();
        drop(theirs);
        assert!(receive_device(&ours).unwrap().is_none());
    }

    #[test]
    fn options_and_source_are_written_as_fusermount_reads_them() {
        let mut options = MountOptions::new("/mnt", "a,b\\c");
        options.allow_other = false;
        let text = option_text(&options);
        assert_eq!(text, "rw,nosuid,nodev,default_permissions,subtype=nigh,fsname=a\\,b\\\\c");
    }

    #[test]
    fn refusals_are_understood() {
        let text =
            "fusermount3: option allow_other only allowed if 'user_allow_other' is set in /etc/fuse.conf\n";
        assert!(matches!(refusal(text), MountError::AllowOther));
        let text = "fusermount3: fuse device not found, try 'modprobe fuse' first\n";
        assert!(matches!(refusal(text), MountError::NoDevice));
        let text = "fusermount3: user has no write access to mountpoint /mnt\n";
        assert_eq!(
            refusal(text).to_string(),
            "fusermount3 refused: user has no write access to mountpoint /mnt"
        );
    }
}
