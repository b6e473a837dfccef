//! File handles of an earlier mount (name_to_handle_at(2)): servers that export the mount by NFS keep them over
//! restarts.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::process;
use crate::root;
use crate::test::groups::Test;
use crate::test::groups::filesystems::disk;
use crate::test::groups::restart::end_server;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};

pub const TESTS: &[Test] = &[
    ("faults: file handles of an earlier mount, ext4", |world| earlier_mount(world, "ext4", true)),
    ("faults: file handles of an earlier mount, xfs", |world| earlier_mount(world, "xfs", true)),
    ("faults: file handles of an earlier mount, btrfs", |world| earlier_mount(world, "btrfs", true)),
    // Its inodes cannot be opened by inode number (`shmem_fh_to_dentry` compares the generation).
    ("faults: file handles of an earlier mount, tmpfs", |world| earlier_mount(world, "tmpfs", false)),
];

/// Enough for a filesystem that reuses inode numbers.
const ATTEMPTS: u32 = 50;

/// `struct file_handle`
#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    handle: [u8; 128],
}

impl Handle {
    fn of(path: &Path) -> io::Result<Handle> {
        let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
        let mut found = Handle { bytes: 128, kind: 0, handle: [0; 128] };
        let mut mount: libc::c_int = 0;
        let (at, made) = (libc::AT_FDCWD, &raw mut found);
        // SAFETY: the buffer contains its length, and the path ends with NUL.
        let done =
            unsafe { libc::syscall(libc::SYS_name_to_handle_at, at, path.as_ptr(), made, &raw mut mount, 0) };
        if done == 0 { Ok(found) } else { Err(io::Error::last_os_error()) }
    }

    /// `mount`: any open file on the mount.
    fn open(&self, mount: &File) -> io::Result<File> {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC;
        let handle = std::ptr::from_ref(self);
        // SAFETY: the buffer contains its length; a result that is not negative is a new descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), handle, flags) };
        match i32::try_from(fd) {
            Ok(fd @ 0..) => Ok(unsafe { File::from_raw_fd(fd) }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn is_stale(&self, mount: &File) -> bool {
        self.open(mount).is_err_and(|error| error.raw_os_error() == Some(libc::ESTALE))
    }
}

/// A file's name, handle and inode number.
struct SavedHandle {
    name: &'static str,
    handle: Handle,
    number: u64,
}

/// Drops unused dentries and inodes of the mount and of the server's disk.
fn drop_caches() -> Result<()> {
    Ok(fs::write("/proc/sys/vm/drop_caches", "2")?)
}

fn earlier_mount(world: &World, kind: &str, finds: bool) -> Result<()> {
    if !root::is_root() {
        println!("SKIPPED: file handles are opened by root alone");
        return Ok(());
    }
    let disk = disk(world, kind, &format!("handles-{kind}"))?;
    // Not the whole filesystem: a file beside the tree is not part of the mount.
    let source = disk.point.join("tree");
    fs::create_dir(&source)?;
    let mut names = vec!["a", "d/c"];
    if kind == "btrfs" {
        process::output(Command::new("btrfs").args(["subvolume", "create"]).arg(source.join("sub")))?;
        names.push("sub/e");
    }
    let point = world.dir("mnt", As::Us)?;
    let how = MountParams::new(As::Us);
    let mount = Mount::new(world, &source, &point, &how)?;
    fs::create_dir(point.join("d"))?;
    let keep = |name: &'static str| -> Result<SavedHandle> {
        fs::write(point.join(name), name)?;
        let handle = Handle::of(&point.join(name)).with_context(|| name.to_owned())?;
        Ok(SavedHandle { name, handle, number: fs::metadata(point.join(name))?.ino() })
    };
    let files = names.into_iter().map(keep).collect::<Result<Vec<_>>>()?;
    let directory = (Handle::of(&point.join("d"))?, fs::metadata(point.join("d"))?.ino());
    let (gone, reused) = (keep("gone")?, keep("reused")?);
    fs::rename(point.join("d"), point.join("d2"))?;
    fs::rename(point.join("a"), point.join("d2/b"))?;
    fs::remove_file(point.join("gone"))?;
    mount.unmount()?;
    // A server that stops before it has read the Bye leaves to the next one the wait for that client.
    std::thread::sleep(Duration::from_millis(500));
    end_server(world, As::Us)?;
    fs::remove_file(source.join("reused"))?;
    // The inode numbers of all removed files are reused, the lowest first.
    let again = (0..ATTEMPTS).map(|attempt| source.join(format!("another {attempt}"))).any(|path| {
        fs::write(&path, "another").is_ok()
            && fs::metadata(&path).is_ok_and(|about| about.ino() == reused.number)
    });
    drop_caches()?;
    let mount = Mount::new(world, &source, &point, &how)?;
    let top = File::open(&point)?;
    for round in 0..3 {
        for SavedHandle { name, handle, number } in &files {
            if !finds {
                ensure!(handle.is_stale(&top), "{name}, {round}: the limits say that this cannot be");
                continue;
            }
            let mut file =
                handle.open(&top).with_context(|| format!("{name}, round {round}: {}", mount.said()))?;
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            ensure!(text == *name && file.metadata()?.ino() == *number, "{text} for {name}, round {round}");
        }
        if finds {
            let open = directory.0.open(&top).context("a directory")?;
            let listed = fs::read_dir(format!("/proc/self/fd/{}", open.as_raw_fd()))?.count();
            ensure!(open.metadata()?.ino() == directory.1 && listed == 2, "{listed} names");
        }
        ensure!(gone.handle.is_stale(&top), "a file that was removed");
        ensure!(reused.handle.is_stale(&top), "a file whose number another has ({again})");
        drop_caches()?;
    }
    drop(top);
    println!(
        "{kind}: another file {} the number of a removed one",
        if again { "got" } else { "did not get" }
    );
    mount.unmount()
}
