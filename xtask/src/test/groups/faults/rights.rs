//! Results that depend on the caller's permissions, as on the local disk.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::fs::{
    IFlags, XattrFlags, getxattr, ioctl_setflags, listxattr, listxattr_query, removexattr, setxattr,
};
use rustix::io::Errno;

use crate::root;
use crate::test::groups::Test;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};

pub const TESTS: &[Test] = &[
    ("faults: xattr names of the system are for privileged callers", privileged_names),
    ("faults: SELinux labels of the server are neither listed nor set", labels),
    ("faults: append-only file is appended to and not written otherwise", append_only),
];

const LIMIT: Duration = Duration::from_secs(20);

fn names(path: &Path) -> Result<Vec<String>> {
    let mut buffer = [0; 1024];
    let length = listxattr(path, &mut buffer[..])?;
    ensure!(listxattr_query(path)? == length, "its length and its names differ");
    let names = buffer[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty());
    Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
}

/// Creates a file on the server's disk with this xattr and `user.a`, and returns its path in the mount; `None`: the
/// disk does not support the xattr.
fn with_xattr<'w>(world: &'w World, name: &str) -> Result<Option<(Mount<'w>, PathBuf)>> {
    let source = world.dir("source", As::Us)?;
    fs::write(source.join("f"), "x")?;
    setxattr(source.join("f"), "user.a", b"1", XattrFlags::empty())?;
    if !root::is_root() || setxattr(source.join("f"), name, b"label", XattrFlags::empty()).is_err() {
        return Ok(None);
    }
    let mount = Mount::new(world, &source, &world.dir("mnt", As::Us)?, &MountParams::new(As::Us))?;
    let file = mount.point.join("f");
    Ok(Some((mount, file)))
}

fn privileged_names(world: &World) -> Result<()> {
    let Some((mount, file)) = with_xattr(world, "trusted.secret")? else { return Ok(()) };
    for _ in 0..2 {
        let mut seen = names(&file)?;
        seen.sort();
        ensure!(seen == ["trusted.secret", "user.a"], "root is told {seen:?}");
        // Without the capability, and with it in a user namespace only.
        let poor = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all"];
        let apart = ["unshare", "--user", "--map-root-user"];
        for without in [poor, apart] {
            let mut list = Command::new(without[0]);
            list.args(&without[1..]).args(["getfattr", "-m", "-", "--absolute-names"]).arg(&file);
            let ended = mount.run(list, LIMIT)?;
            let told = ended.said.contains("user.a") && !ended.said.contains("trusted.");
            ensure!(ended.ok() && told, "{without:?}: {}", ended.tail(5));
        }
    }
    mount.unmount()
}

fn labels(world: &World) -> Result<()> {
    const LABEL: &str = "security.selinux";
    let Some((mount, file)) = with_xattr(world, LABEL)? else { return Ok(()) };
    ensure!(names(&file)? == ["user.a"], "{:?}", names(&file)?);
    let got = getxattr(&file, LABEL, &mut [0; 64][..]);
    let set = setxattr(&file, LABEL, b"other", XattrFlags::empty());
    let removed = removexattr(&file, LABEL);
    ensure!(
        (got, set, removed) == (Err(Errno::OPNOTSUPP), Err(Errno::OPNOTSUPP), Err(Errno::OPNOTSUPP)),
        "{got:?}, {set:?}, {removed:?}"
    );
    mount.unmount()
}

/// `chattr +a` and `-a`; false if the disk has no such flag.
fn set_append_only(path: &Path, on: bool) -> bool {
    let flags = if on { IFlags::APPEND } else { IFlags::empty() };
    File::open(path).is_ok_and(|file| ioctl_setflags(&file, flags).is_ok())
}

fn append_only(world: &World) -> Result<()> {
    let source = world.dir("source", As::Us)?;
    let log = source.join("log");
    fs::write(&log, "one\n")?;
    if !root::is_root() || !set_append_only(&log, true) {
        return Ok(());
    }
    let mount = Mount::new(world, &source, &world.dir("mnt", As::Us)?, &MountParams::new(As::Us))?;
    let file = mount.point.join("log");
    let seen = looks_append_only(&file, &log);
    // Otherwise the cleanup could not remove it.
    ensure!(set_append_only(&log, false), "its flag stays");
    seen?;
    mount.unmount()
}

fn looks_append_only(file: &Path, log: &Path) -> Result<()> {
    let mut appends = OpenOptions::new().append(true).open(file).context("to append")?;
    appends.write_all(b"two\n").context("append")?;
    let mut both = OpenOptions::new().read(true).append(true).open(file).context("to read and append")?;
    both.write_all(b"three\n").context("append")?;
    let mut all = String::new();
    both.seek(SeekFrom::Start(0))?;
    both.read_to_string(&mut all)?;
    ensure!(all == "one\ntwo\nthree\n" && fs::read_to_string(log)? == all, "{all:?}");
    let refused = |what: &str, got: io::Result<()>| {
        let code = got.as_ref().err().and_then(io::Error::raw_os_error);
        ensure!(code == Some(libc::EPERM), "{what}: {got:?}");
        Ok(())
    };
    let open = |how: &OpenOptions| how.open(file).map(drop);
    refused("write", open(OpenOptions::new().write(true)))?;
    refused("read and write", open(OpenOptions::new().read(true).write(true)))?;
    refused("truncate", open(OpenOptions::new().write(true).truncate(true)))?;
    refused("set the length", appends.set_len(1))?;
    refused("rename", fs::rename(file, file.with_extension("old")))?;
    refused("unlink", fs::remove_file(file))?;
    ensure!(fs::read_to_string(log)? == all, "it was changed");
    Ok(())
}
