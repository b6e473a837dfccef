//! Files and directories that one mount has open while another removes, replaces or moves them.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{all_see, reads, warm};
use crate::room::{Room, refuses};
use crate::sys;

super::cases! { two::
    unlinked_while_read, unlinked_while_written, replaced_while_read, moved_while_written, directory_moved_while_used,
    working_directory_removed, working_directory_moved, listed_while_created, listed_while_renamed,
    listed_again_after_rewind, made_below_a_removed_directory, unlinked_and_made_again,
    replaced_again_and_again, closed_to_its_reader, in_use_and_changed, in_use_and_removed;
}

/// `d/f` of many pages, open on the second mount, of which only the beginning was read.
fn half_read(room: &Room) -> Result<(File, Vec<u8>)> {
    let contents: Vec<u8> = (0..300_000_u32).map(|i| i.to_le_bytes()[1]).collect();
    room.dir("d")?;
    room.file("d/f", &contents)?;
    // Only names and attributes are cached: the rest of the data must come from the server.
    for dir in [&room.path, &room.beside] {
        fs::metadata(dir.join("d/f"))?;
    }
    let mut file = OpenOptions::new().read(true).write(true).open(room.over("d/f"))?;
    let mut first = [0; 10];
    file.read_exact(&mut first)?;
    ensure!(first[..] == contents[..10]);
    Ok((file, contents))
}

fn rest_reads(file: &mut File, contents: &[u8]) -> Result<()> {
    let mut rest = Vec::new();
    file.read_to_end(&mut rest).context("reading on")?;
    ensure!(rest == contents[10..], "the open file reads {} other bytes", rest.len());
    Ok(())
}

fn unlinked_while_read(room: &Room) -> Result<()> {
    let (mut file, contents) = half_read(room)?;
    fs::remove_file(room.at("d/f"))?;
    refuses(fs::metadata(room.over("d/f")), libc::ENOENT)?;
    rest_reads(&mut file, &contents)?;
    let links = file.metadata()?.nlink();
    ensure!(links == 0, "it has {links} links");
    all_see(room, &["d/f"], |dir| {
        ensure!(fs::read_dir(dir.join("d"))?.count() == 0, "it is still listed");
        Ok(())
    })
}

fn unlinked_while_written(room: &Room) -> Result<()> {
    let (mut file, mut contents) = half_read(room)?;
    fs::remove_file(room.at("d/f"))?;
    file.write_all_at(b"into what has no name", 100_000).context("writing")?;
    contents[100_000..100_021].copy_from_slice(b"into what has no name");
    file.sync_all().context("fsync")?;
    rest_reads(&mut file, &contents)?;
    all_see(room, &["d/f"], |_| Ok(()))
}

fn replaced_while_read(room: &Room) -> Result<()> {
    let (mut file, contents) = half_read(room)?;
    room.file("d/new", b"the new file")?;
    fs::rename(room.at("d/new"), room.at("d/f"))?;
    reads(&room.beside, "d/f", b"the new file")?;
    rest_reads(&mut file, &contents)?;
    ensure!(file.metadata()?.ino() != fs::metadata(room.over("d/f"))?.ino(), "the open file is the new one");
    all_see(room, &["d/new"], |dir| reads(dir, "d/f", b"the new file"))
}

fn moved_while_written(room: &Room) -> Result<()> {
    let (mut file, mut contents) = half_read(room)?;
    room.dir("e")?;
    fs::rename(room.at("d/f"), room.at("e/g"))?;
    file.write_all_at(b"written after the move", 0)?;
    contents[..22].copy_from_slice(b"written after the move");
    all_see(room, &["d/f"], |dir| reads(dir, "e/g", &contents))?;
    rest_reads(&mut file, &contents)
}

fn directory_moved_while_used(room: &Room) -> Result<()> {
    fs::create_dir_all(room.at("d/a"))?;
    room.dir("e")?;
    room.file("d/a/f", b"x")?;
    warm(room, &[])?;
    let held = File::open(room.over("d/a"))?;
    fs::rename(room.at("d/a"), room.at("e/b"))?;
    // By the descriptor, whose path has changed.
    let inside = Path::new("/proc/self/fd").join(std::os::fd::AsRawFd::as_raw_fd(&held).to_string());
    fs::write(inside.join("new"), b"by the descriptor")?;
    all_see(room, &["d/a"], |dir| {
        reads(dir, "e/b/new", b"by the descriptor")?;
        reads(dir, "e/b/f", b"x")
    })
}

/// The call fails because the directory was removed. Its own kernel returns ENOENT; another kernel, which still
/// references it, finds that no name leads there (ESTALE).
fn gone<T>(result: io::Result<T>) -> Result<()> {
    match result {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESTALE)) => Ok(()),
        Err(e) => Err(e.into()),
        Ok(_) => anyhow::bail!("it was done in a directory that is no more"),
    }
}

/// The working directory, which is also open, has no name any more.
fn is_removed(held: &File) -> Result<()> {
    let names: Vec<_> = fs::read_dir(".").context("listing it")?.collect::<io::Result<_>>()?;
    ensure!(names.is_empty(), "{} names are listed in it", names.len());
    ensure!(fs::metadata(".")?.nlink() == 0 && held.metadata()?.nlink() == 0);
    held.set_permissions(fs::Permissions::from_mode(0o700)).context("its mode")?;
    held.set_modified(std::time::SystemTime::UNIX_EPOCH).context("its time")?;
    held.sync_all().context("syncing it")?;
    ensure!(held.metadata()?.permissions().mode() & 0o777 == 0o700);
    Ok(())
}

fn working_directory_removed(room: &Room) -> Result<()> {
    fs::create_dir_all(room.at("d/here"))?;
    warm(room, &["d/here/f"])?;
    std::env::set_current_dir(room.over("d/here"))?;
    let held = File::open(".")?;
    fs::remove_dir(room.at("d/here"))?;
    refuses(fs::metadata(room.over("d/here")), libc::ENOENT)?;
    gone(File::create("f")).context("creating in it")?;
    gone(fs::create_dir("e")).context("mkdir in it")?;
    is_removed(&held)?;
    // A new directory with the old name is another directory.
    fs::create_dir(room.at("d/here"))?;
    is_removed(&held)?;
    gone(File::create("f")).context("creating in it, once its name is another's")?;
    fs::write(room.over("d/here/f"), b"in the new one")?;
    std::env::set_current_dir("/")?;
    all_see(room, &["d/here/e"], |dir| reads(dir, "d/here/f", b"in the new one"))
}

fn working_directory_moved(room: &Room) -> Result<()> {
    fs::create_dir_all(room.at("d/here"))?;
    room.dir("e")?;
    warm(room, &["d/here/f"])?;
    std::env::set_current_dir(room.over("d/here"))?;
    fs::rename(room.at("d/here"), room.at("e/there"))?;
    fs::write("f", b"from inside").context("writing in it")?;
    // A kernel that has dropped the old dentry moves the directory's dentry at the next lookup of the new name.
    fs::metadata(room.over("e/there"))?;
    let up = fs::metadata("..")?.ino();
    ensure!(up == fs::metadata(room.over("e"))?.ino(), "its .. is the old one");
    std::env::set_current_dir("/")?;
    all_see(room, &["d/here"], |dir| reads(dir, "e/there/f", b"from inside"))
}

/// Scans on the second mount, with `change` called before each entry; each entry that stays is returned exactly once.
fn scan(room: &Room, stay: u32, mut change: impl FnMut(u32) -> io::Result<()>) -> Result<()> {
    let mut times: BTreeMap<String, u32> = BTreeMap::new();
    for (step, entry) in (0..).zip(fs::read_dir(room.over("d"))?) {
        *times.entry(entry?.file_name().to_string_lossy().into_owned()).or_default() += 1;
        change(step)?;
        ensure!(step < 100_000, "the scan does not end");
    }
    for i in 0..stay {
        let count = times.get(&stays(i)).copied().unwrap_or(0);
        ensure!(count == 1, "{}, there throughout, came {count} times", stays(i));
    }
    Ok(())
}

/// Enough long names that a scan takes several requests.
const STAY: u32 = 400;

fn stays(i: u32) -> String {
    format!("stays {i:05} {:.<230}", "")
}

fn filled(room: &Room, count: u32) -> Result<()> {
    room.dir("d")?;
    for i in 0..count {
        fs::write(room.at("d").join(stays(i)), b"")?;
    }
    Ok(())
}

/// All mounts list equal names.
fn all_list(room: &Room) -> Result<()> {
    let listed = |dir: &Path| -> Result<Vec<_>> {
        let entries = fs::read_dir(dir.join("d"))?.map(|entry| entry.map(|e| e.file_name()));
        let mut names = entries.collect::<io::Result<Vec<_>>>()?;
        names.sort();
        Ok(names)
    };
    let own = listed(&room.path)?;
    for (way, dir) in super::ways(room) {
        let names = listed(dir)?;
        ensure!(names == own, "{way} {} names are listed, not {}", names.len(), own.len());
    }
    Ok(())
}

fn listed_while_created(room: &Room) -> Result<()> {
    filled(room, STAY)?;
    all_list(room)?;
    all_list(room)?;
    scan(room, STAY, |step| {
        let (comes, went) = (format!("d/comes {step}"), format!("d/comes {}", step.wrapping_sub(20)));
        if step < STAY {
            fs::write(room.at(comes), b"")?;
        }
        if (20..STAY).contains(&step) {
            fs::remove_file(room.at(went))?;
        }
        Ok(())
    })?;
    all_list(room)?;
    refuses(fs::metadata(room.over("d/comes 0")), libc::ENOENT)
}

fn listed_while_renamed(room: &Room) -> Result<()> {
    filled(room, STAY)?;
    fs::write(room.at("d/wanders 0"), b"wandering")?;
    all_list(room)?;
    all_list(room)?;
    let mut last = 0;
    scan(room, STAY, |step| {
        last = step + 1;
        fs::rename(room.at(format!("d/wanders {step}")), room.at(format!("d/wanders {last}")))
    })?;
    all_list(room)?;
    reads(&room.beside, &format!("d/wanders {last}"), b"wandering")
}

/// A stream opened before shows, after a rewind, files created meanwhile.
fn listed_again_after_rewind(room: &Room) -> Result<()> {
    filled(room, 20)?;
    warm(room, &["d/new"])?;
    let path = crate::sys::c(&room.over("d"))?;
    let stream = unsafe { libc::opendir(path.as_ptr()) };
    ensure!(!stream.is_null(), "opendir: {}", io::Error::last_os_error());
    let count = || (0..).take_while(|_| !unsafe { libc::readdir64(stream) }.is_null()).count();
    let before = count();
    fs::write(room.at("d/new"), b"")?;
    fs::write(room.at("d/newer"), b"")?;
    fs::remove_file(room.at("d").join(stays(3)))?;
    unsafe { libc::rewinddir(stream) };
    let after = count();
    unsafe { libc::closedir(stream) };
    ensure!((before, after) == (22, 23), "{before} and then {after} entries");
    all_see(room, &[], |_| Ok(()))
}

fn made_below_a_removed_directory(room: &Room) -> Result<()> {
    fs::create_dir_all(room.at("d/e"))?;
    warm(room, &["d/e/f"])?;
    let held = File::open(room.over("d/e"))?;
    fs::remove_dir(room.at("d/e"))?;
    let inside = Path::new("/proc/self/fd").join(std::os::fd::AsRawFd::as_raw_fd(&held).to_string());
    gone(File::create(inside.join("f")))?;
    all_see(room, &["d/e"], |_| Ok(()))
}

/// One name is removed and created again, many times: no mount confuses the files.
fn unlinked_and_made_again(room: &Room) -> Result<()> {
    room.dir("d")?;
    let mut held = Vec::new();
    for round in 0..20_u8 {
        let text = vec![b'a' + round; 5000 + usize::from(round)];
        let mut new = OpenOptions::new().write(true).create_new(true).open(room.at("d/f"))?;
        new.write_all(&text)?;
        reads(&room.beside, "d/f", &text).with_context(|| format!("round {round}"))?;
        held.push((File::open(room.over("d/f"))?, text));
        fs::remove_file(room.at("d/f"))?;
        refuses(fs::metadata(room.over("d/f")), libc::ENOENT).with_context(|| format!("round {round}"))?;
    }
    for (round, (file, text)) in held.iter().enumerate() {
        let mut got = vec![0; text.len()];
        file.read_exact_at(&mut got, 0).with_context(|| format!("the open file of round {round}"))?;
        ensure!(got == *text, "the open file of round {round} reads other data");
    }
    all_see(room, &["d/f"], |_| Ok(()))
}

/// The file at one name is replaced by renames; files were only opened, and one was mapped and closed.
fn replaced_again_and_again(room: &Room) -> Result<()> {
    room.dir("d")?;
    let mut held = Vec::new();
    let text = |round: u8| vec![b'a' + round; 9000 + usize::from(round)];
    room.file("d/f", &text(0))?;
    for round in 0..10_u8 {
        fs::metadata(room.over("d/f"))?;
        held.push((File::open(room.over("d/f"))?, text(round)));
        room.file("d/new", &text(round + 1))?;
        fs::rename(room.at("d/new"), room.at("d/f"))?;
        reads(&room.beside, "d/f", &text(round + 1)).with_context(|| format!("round {round}"))?;
    }
    for (round, (file, text)) in held.iter().enumerate() {
        let mut got = vec![0; text.len()];
        file.read_exact_at(&mut got, 0).with_context(|| format!("the open file of round {round}"))?;
        ensure!(got == *text, "the open file of round {round} reads other data");
        let links = file.metadata()?.nlink();
        ensure!(links == 0, "the open file of round {round} has {links} links");
    }
    all_see(room, &["d/new"], |dir| reads(dir, "d/f", &text(10)))
}

/// Permissions are checked at open; an open file stays usable after a move, link or removal.
fn closed_to_its_reader(room: &Room) -> Result<()> {
    room.dir("d")?;
    room.dir("e")?;
    room.file("d/f", b"opened in time")?;
    fs::metadata(room.over("d/f"))?;
    let file = File::open(room.over("d/f"))?;
    fs::set_permissions(room.at("d/f"), std::os::unix::fs::PermissionsExt::from_mode(0o000))?;
    fs::rename(room.at("d/f"), room.at("e/g"))?;
    fs::hard_link(room.at("e/g"), room.at("d/h"))?;
    fs::remove_file(room.at("e/g"))?;
    ensure!(file.metadata()?.nlink() == 1, "one name is left");
    fs::remove_file(room.at("d/h"))?;
    let mut got = [0; 14];
    file.read_exact_at(&mut got, 0).context("reading what has no name")?;
    ensure!(got == *b"opened in time");
    let meta = file.metadata()?;
    ensure!((meta.nlink(), meta.mode() & 0o777) == (0, 0), "{} links, mode {:o}", meta.nlink(), meta.mode());
    all_see(room, &["d/f", "d/h", "e/g"], |_| Ok(()))
}

/// Files in use on the second mount below `d`, and the paths that its kernel reports for them.
struct InUse {
    file: File,
    user: sys::User,
}

const IN_USE: [&str; 3] = ["file", "program", "work"];

impl InUse {
    fn of(room: &Room) -> Result<InUse> {
        room.dir("d")?;
        room.dir("d/work")?;
        room.file("d/file", b"open")?;
        let user = sys::User::start(&room.over("d/program"), &room.over("d/work"))?;
        Ok(InUse { file: File::open(room.over("d/file"))?, user })
    }

    fn paths(&self) -> Result<[PathBuf; 3]> {
        Ok([sys::path_of(&self.file)?, self.user.program()?, self.user.working_directory()?])
    }
}

/// The first mount changes attributes, data and links of the files in use: their reported paths stay.
fn in_use_and_changed(room: &Room) -> Result<()> {
    let used = InUse::of(room)?;
    let link = |path: &Path| fs::hard_link(path, path.with_extension("2"));
    let write = |path: &Path| OpenOptions::new().append(true).open(path)?.write_all(b" more");
    type Change<'a> = &'a dyn Fn(&Path) -> io::Result<()>;
    let changes: [(&str, &[&str], Change<'_>); 6] = [
        ("mode", &IN_USE, &|path| sys::chmod(path, 0o755)),
        ("times", &IN_USE, &|path| sys::utimens(path, (1, 0), (2, 0))),
        ("data", &IN_USE[..1], &write),
        ("link", &IN_USE[..2], &link),
        ("mode of what has two links", &IN_USE[..2], &|path| sys::chmod(path, 0o711)),
        ("entries", &IN_USE[2..], &|path| fs::create_dir(path.join("made"))),
    ];
    for (what, names, change) in changes {
        for name in names {
            change(&room.at("d").join(name)).with_context(|| format!("{what} of {name}"))?;
        }
        for look in 0..4 {
            for (name, found) in IN_USE.iter().zip(used.paths()?) {
                let path = room.over("d").join(name);
                ensure!(found == path, "{what}, look {look}: {} for {}", found.display(), path.display());
                fs::metadata(&path)?;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

/// The first mount removes and replaces the files in use: their paths no longer lead to them.
fn in_use_and_removed(room: &Room) -> Result<()> {
    let used = InUse::of(room)?;
    fs::remove_file(room.at("d/file"))?;
    room.file("d/new", b"in its place")?;
    fs::rename(room.at("d/new"), room.at("d/program"))?;
    fs::remove_dir(room.at("d/work"))?;
    for name in ["file", "work"] {
        refuses(fs::metadata(room.over("d").join(name)), libc::ENOENT)?;
    }
    ensure!(fs::metadata(room.over("d/program"))?.len() == 12);
    let paths = used.paths()?;
    ensure!(paths.iter().all(|path| path.to_string_lossy().ends_with(" (deleted)")), "{paths:?}");
    Ok(())
}
