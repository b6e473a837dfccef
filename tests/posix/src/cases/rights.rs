//! Set-user-ID and set-group-ID bits and file capabilities: changes of a file's data or owner clear them, and the mode
//! alone shows that at once (a kernel may cache the mode apart from size and times).

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::room::{Room, needs_root, or_skip, refuses};
use crate::sys;

super::cases! { rights::
    set_id_goes_with_a_change, set_id_is_kept_by_root, set_id_is_kept_by_a_store_into_a_map, capability_goes_with_a_change,
    chown_to_same, chown_keeps_setgid_without_execute;
}

const USER: u32 = 4321;
const CAPABILITY: &str = "security.capability";
/// `cap_net_bind_service=ep` (struct vfs_cap_data, revision 2).
const VALUE: [u8; 20] = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const SIZE: usize = 8192;

type Way = (&'static str, fn(&Path) -> io::Result<()>);

/// All ways to change data.
const WAYS: &[Way] = &[
    ("write", |path| written(path, 0)),
    ("append", |path| written(path, libc::O_APPEND)),
    ("O_DIRECT", direct),
    ("truncate", |path| both(path)?.set_len(10)),
    ("O_TRUNC", |path| OpenOptions::new().write(true).truncate(true).open(path).map(drop)),
    ("copy_file_range", copied),
    ("fallocate", |path| sys::fallocate(&both(path)?, 0, 0, 4096)),
    ("fallocate that keeps the size", |path| {
        sys::fallocate(&both(path)?, libc::FALLOC_FL_KEEP_SIZE, 0, 4096)
    }),
    ("a hole", |path| {
        let mode = libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE;
        sys::fallocate(&both(path)?, mode, 0, 4096)
    }),
];

fn both(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

fn written(path: &Path, flags: i32) -> io::Result<()> {
    OpenOptions::new().write(true).custom_flags(flags).open(path)?.write_all(b"x")
}

fn direct(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)?;
    let raw = vec![b'd'; 2 * 4096];
    let skip = raw.as_ptr().align_offset(4096);
    file.write_all_at(&raw[skip..skip + 4096], 0)
}

fn copied(path: &Path) -> io::Result<()> {
    let from = File::open(path.with_extension("from"))?;
    sys::copy_range(&from, 0, &both(path)?, 0, 100).map(drop)
}

/// Creates a file of root that every user may change, and another file to copy from.
fn fresh(room: &Room, mode: u32) -> Result<std::path::PathBuf> {
    for name in ["f", "f.from"] {
        let path = room.at(name);
        if path.exists() {
            std::fs::remove_file(&path)?;
        }
        room.file(name, &[b'a'; SIZE])?;
    }
    let path = room.at("f");
    sys::chmod(&path, mode)?;
    ensure!(bits(&path)? == mode, "{mode:o} cannot be set");
    Ok(path)
}

/// Returns the mode, by a statx of the mode alone.
fn bits(path: &Path) -> Result<u32> {
    Ok(u32::from(sys::statx(path, libc::STATX_MODE)?.stx_mode) & 0o7777)
}

/// Changes the file as a user without capabilities; false if the operation is not supported here.
fn changed(room: &Room, path: &Path, (name, way): Way) -> Result<bool> {
    let lacking = |e: &io::Error| {
        matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::EXDEV))
    };
    let probe = room.file("probe", &[b'p'; SIZE])?;
    room.file("probe.from", &[b'p'; SIZE])?;
    match way(&probe) {
        Err(e) if lacking(&e) => return Ok(false),
        other => other.with_context(|| name.to_owned())?,
    }
    let done = match sys::uid() {
        0 => sys::as_user(USER, USER, &[], || way(path).is_ok())?,
        _ => way(path).is_ok(),
    };
    ensure!(done, "{name} was refused");
    Ok(true)
}

fn set_id_goes_with_a_change(room: &Room) -> Result<()> {
    sys::chmod(&room.path, 0o755)?;
    for way in WAYS {
        let path = fresh(room, 0o6777)?;
        let done = changed(room, &path, *way)?;
        let mode = bits(&path)?;
        ensure!(!done || mode == 0o777, "after {}: mode {mode:o}", way.0);
        let whole = std::fs::metadata(&path)?.mode() & 0o7777;
        ensure!(whole == mode, "after {}: {whole:o} beside {mode:o}", way.0);
    }
    Ok(())
}

fn set_id_is_kept_by_root(room: &Room) -> Result<()> {
    needs_root()?;
    for (name, way) in WAYS {
        let path = fresh(room, 0o6777)?;
        if way(&path).is_ok() {
            let mode = bits(&path)?;
            ensure!(mode == 0o6777, "after {name}: mode {mode:o}");
        }
    }
    Ok(())
}

fn set_id_is_kept_by_a_store_into_a_map(room: &Room) -> Result<()> {
    needs_root()?;
    sys::chmod(&room.path, 0o755)?;
    let path = fresh(room, 0o6777)?;
    ensure!(sys::as_user(USER, USER, &[], || stored(&path).is_ok())?, "the store failed");
    let mode = bits(&path)?;
    ensure!(mode == 0o6777, "mode {mode:o}");
    ensure!(std::fs::read(&path)?[0] == b'm', "nothing was stored");
    Ok(())
}

fn stored(path: &Path) -> io::Result<()> {
    let file = both(path)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the map is of the file's length, and is gone before this returns.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), SIZE, protection, libc::MAP_SHARED, file.as_raw_fd(), 0);
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        *at.cast::<u8>() = b'm';
        let synced = libc::msync(at, SIZE, libc::MS_SYNC);
        libc::munmap(at, SIZE);
        if synced == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

fn capability_goes_with_a_change(room: &Room) -> Result<()> {
    needs_root()?;
    sys::chmod(&room.path, 0o755)?;
    for way in WAYS {
        let path = fresh(room, 0o777)?;
        or_skip(sys::set_xattr(&path, CAPABILITY, &VALUE, 0), "file capabilities")?;
        ensure!(sys::xattr(&path, CAPABILITY)? == VALUE);
        if changed(room, &path, *way)? {
            refuses(sys::xattr(&path, CAPABILITY), libc::ENODATA)
                .with_context(|| format!("after {}", way.0))?;
            ensure!(
                sys::list_xattrs(&path)?.iter().all(|name| name != CAPABILITY),
                "{} leaves a name",
                way.0
            );
        }
    }
    let path = fresh(room, 0o4755)?;
    sys::set_xattr(&path, CAPABILITY, &VALUE, 0)?;
    written(&path, 0)?;
    refuses(sys::xattr(&path, CAPABILITY), libc::ENODATA)?;
    ensure!(bits(&path)? == 0o4755, "root's write takes the capability alone");
    Ok(())
}

/// chown(-1, -1).
fn chown_to_same(room: &Room) -> Result<()> {
    needs_root()?;
    sys::chmod(&room.path, 0o755)?;
    let same = |path: &Path| sys::chown(path, u32::MAX, u32::MAX);
    for (mode, left) in [(0o4755, 0o755), (0o6755, 0o755), (0o755, 0o755)] {
        let path = fresh(room, mode)?;
        sys::chown(&path, USER, USER)?;
        sys::chmod(&path, mode)?;
        let before = std::fs::metadata(&path)?;
        let is_set_id = mode != left;
        let refused = !sys::as_user(USER + 1, USER + 1, &[], || same(&path).is_ok())?;
        if refused != is_set_id {
            bail!("{mode:o}: a stranger's chown was {}", if refused { "refused" } else { "made" });
        }
        ensure!(bits(&path)? == mode, "{mode:o}: a stranger changed the mode");
        ensure!(
            sys::as_user(USER, USER, &[], || same(&path).is_ok())?,
            "{mode:o}: the owner's chown was refused"
        );
        let got = bits(&path)?;
        ensure!(got == left, "{mode:o} has become {got:o}");
        let after = std::fs::metadata(&path)?;
        let changed = |meta: &std::fs::Metadata| (meta.ctime(), meta.ctime_nsec());
        ensure!(changed(&before) != changed(&after), "{mode:o}: ctime stands");
        ensure!((after.uid(), after.gid()) == (USER, USER));
    }
    let path = fresh(room, 0o4755)?;
    let file = both(&path)?;
    same(&path)?;
    ensure!(bits(&path)? == 0o755, "root's own, which is open for writing");
    drop(file);
    let path = fresh(room, 0o755)?;
    sys::chown(&path, USER, USER)?;
    or_skip(sys::set_xattr(&path, CAPABILITY, &VALUE, 0), "file capabilities")?;
    ensure!(sys::as_user(USER, USER, &[], || same(&path).is_ok())?, "a program with a capability");
    refuses(sys::xattr(&path, CAPABILITY), libc::ENODATA)
}

fn chown_keeps_setgid_without_execute(room: &Room) -> Result<()> {
    needs_root()?;
    for (mode, left) in
        [(0o2644, 0o2644), (0o6644, 0o2644), (0o2745, 0o2745), (0o2755, 0o755), (0o6755, 0o755)]
    {
        for (uid, gid) in [(USER, u32::MAX), (u32::MAX, USER), (USER, USER), (u32::MAX, u32::MAX)] {
            let path = fresh(room, mode)?;
            sys::chown(&path, uid, gid)?;
            let got = bits(&path)?;
            ensure!(got == left, "chown({}, {}) of {mode:o}: {got:o}", uid.cast_signed(), gid.cast_signed());
        }
    }
    Ok(())
}
