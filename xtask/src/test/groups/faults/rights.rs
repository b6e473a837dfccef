//! What a caller is told or may do goes by its rights, as on the local disk.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::fs::{XattrFlags, getxattr, listxattr, listxattr_query, removexattr, setxattr};
use rustix::io::Errno;

use crate::root;
use crate::test::groups::Test;
use crate::test::mount::{How, Mount};
use crate::test::world::{As, World};

pub const TESTS: &[Test] = &[
    ("faults: xattr names of the system are for privileged callers", privileged_names),
    ("faults: SELinux labels of the server are neither listed nor set", labels),
];

const LIMIT: Duration = Duration::from_secs(20);

fn names(path: &Path) -> Result<Vec<String>> {
    let mut buffer = [0; 1024];
    let length = listxattr(path, &mut buffer[..])?;
    ensure!(listxattr_query(path)? == length, "its length and its names differ");
    let names = buffer[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty());
    Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
}

/// A file on the server's disk that has this xattr and `user.a`, and where it is in the mount; `None`: it cannot have it.
fn with_xattr<'w>(world: &'w World, name: &str) -> Result<Option<(Mount<'w>, PathBuf)>> {
    let source = world.dir("source", As::Us)?;
    std::fs::write(source.join("f"), "x")?;
    setxattr(source.join("f"), "user.a", b"1", XattrFlags::empty())?;
    if !root::is_root() || setxattr(source.join("f"), name, b"label", XattrFlags::empty()).is_err() {
        return Ok(None);
    }
    let mount = Mount::new(world, &source, &world.dir("mnt", As::Us)?, &How::new(As::Us))?;
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
