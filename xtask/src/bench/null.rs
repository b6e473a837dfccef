//! The null daemon: a FUSE filesystem on nigh's codec that answers every request from memory and stores nothing on
//! disk. It is the lower bound of user-space filesystems, with which nigh's times are compared.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use nigh_fuse::abi::flags::{fopen, init};
use nigh_fuse::mount::{MountOptions, mount};
use nigh_fuse::{
    DevFuse, DirBuffer, Dirent, Eager, Entry, Header, Level, Operation, Reply, RequestedFeatures, StatFs,
    Transport, decode, handshake, opcode, opcode_name,
};

use super::null_tree::{Made, Tree};

#[derive(clap::Args)]
pub struct Options {
    /// Where to mount.
    point: PathBuf,
    /// A socket that sends to each connection the number of requests by opcode, as JSON.
    #[arg(long)]
    control: Option<PathBuf>,
}

/// Longer than any run: no change bypasses the kernel.
const VALID: Duration = Duration::from_secs(86_400);
/// Above this the kernel's own directory cache costs more than it saves.
const CACHED_DIRECTORY: u32 = 1000;

type Counts = Arc<Mutex<BTreeMap<&'static str, u64>>>;

/// Serves until it is unmounted.
pub fn run(options: &Options) -> Result<bool> {
    let mounted = mount(&MountOptions::new(&options.point, "null")).map_err(|e| anyhow::anyhow!("{e}"))?;
    let device = DevFuse::new(mounted.device, Level::NoEpoch);
    let wanted = RequestedFeatures::default().without_locks();
    let agreed =
        handshake(&device, &RequestedFeatures { flags: wanted.flags | init::READDIRPLUS_AUTO, ..wanted })?;
    let counts = Counts::default();
    if let Some(path) = &options.control {
        let listener = UnixListener::bind(path).with_context(|| path.display().to_string())?;
        let counts = Arc::clone(&counts);
        std::thread::spawn(move || tell(&listener, &counts));
    }
    let mut daemon = Daemon { tree: Tree::new(), listing: DirBuffer::new(0, false) };
    let mut buffer = vec![0; agreed.buffer_len()];
    let mut eager = Eager::default();
    loop {
        eager.look(&device);
        let Some(length) = device.receive(&mut buffer)? else { break };
        eager.received();
        match decode(&buffer[..length], &agreed) {
            Ok((header, operation)) => {
                let name = opcode_name(operation.opcode());
                *counts.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
                daemon.answer(&device, &header, &operation)?;
            }
            Err(e) if opcode::expects_reply(e.opcode) => {
                Reply::error(e.unique, libc::EINVAL).send(&device)?
            }
            Err(_) => {}
        }
    }
    Ok(true)
}

fn tell(listener: &UnixListener, counts: &Counts) {
    for mut stream in listener.incoming().flatten() {
        let counts = counts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let _ = writeln!(stream, "{}", serde_json::json!(counts));
    }
}

struct Daemon {
    tree: Tree,
    listing: DirBuffer,
}

impl Daemon {
    fn answer(&mut self, to: &DevFuse, header: &Header, operation: &Operation<'_>) -> std::io::Result<()> {
        let (unique, node) = (header.unique, header.nodeid);
        let made = |made: Made| self_entry(&made);
        match *operation {
            Operation::Lookup { name } => match self.tree.child(node, name) {
                Some(attr) => Reply::entry(unique, &made(attr)).send(to),
                None => Reply::negative(unique, VALID).send(to),
            },
            Operation::GetAttr { .. } => match self.tree.attr(node) {
                Some(attr) => Reply::attr(unique, &attr, VALID).send(to),
                None => Reply::error(unique, libc::ENOENT).send(to),
            },
            Operation::SetAttr(set) => match self.tree.set(node, &set) {
                Some(attr) => Reply::attr(unique, &attr, VALID).send(to),
                None => Reply::error(unique, libc::ENOENT).send(to),
            },
            Operation::ReadLink => match self.tree.contents(node) {
                Some(target) => Reply::data(unique, target).send(to),
                None => Reply::error(unique, libc::EINVAL).send(to),
            },
            Operation::Open { .. } => Reply::open(unique, 0, fopen::KEEP_CACHE).send(to),
            Operation::OpenDir { .. } => Reply::open(unique, 0, self.directory_flags(node)).send(to),
            Operation::ReadDir { offset, size, .. } => self.list(to, header, offset, size, false),
            Operation::ReadDirPlus { offset, size, .. } => self.list(to, header, offset, size, true),
            Operation::Read { offset, size, .. } => {
                Reply::data(unique, self.tree.read(node, offset, size)).send(to)
            }
            Operation::Write { offset, data, .. } => {
                Reply::written(unique, self.tree.write(node, offset, data)).send(to)
            }
            Operation::StatFs => {
                let space = StatFs {
                    blocks: 1 << 30,
                    bfree: 1 << 30,
                    bavail: 1 << 30,
                    bsize: 4096,
                    namelen: 255,
                    frsize: 4096,
                    ..StatFs::default()
                };
                Reply::statfs(unique, &space).send(to)
            }
            _ => self.change(to, header, operation),
        }
    }

    fn change(&mut self, to: &DevFuse, header: &Header, operation: &Operation<'_>) -> std::io::Result<()> {
        let (unique, node) = (header.unique, header.nodeid);
        let owner = (header.uid, header.gid);
        let done = |ok: bool| if ok { Reply::empty(unique) } else { Reply::error(unique, libc::ENOENT) };
        match *operation {
            Operation::Create { name, mode, umask, .. } => {
                let made = self.tree.make(node, name, mode & !umask, owner, &[]);
                Reply::create(unique, &self_entry(&made), 0, fopen::KEEP_CACHE).send(to)
            }
            Operation::Mknod { name, mode, umask, .. } => {
                Reply::entry(unique, &self_entry(&self.tree.make(node, name, mode & !umask, owner, &[])))
                    .send(to)
            }
            Operation::Mkdir { name, mode, umask, .. } => {
                let mode = libc::S_IFDIR | mode & !umask;
                Reply::entry(unique, &self_entry(&self.tree.make(node, name, mode, owner, &[]))).send(to)
            }
            Operation::Symlink { name, target, .. } => {
                let made = self.tree.make(node, name, libc::S_IFLNK | 0o777, owner, target);
                Reply::entry(unique, &self_entry(&made)).send(to)
            }
            Operation::Unlink { name } => done(self.tree.remove(node, name)).send(to),
            Operation::Rmdir { name } if self.tree.is_full(node, name) => {
                Reply::error(unique, libc::ENOTEMPTY).send(to)
            }
            Operation::Rmdir { name } => done(self.tree.remove(node, name)).send(to),
            Operation::Rename { name, new_dir, new_name, .. } => {
                done(self.tree.rename(node, name, new_dir, new_name)).send(to)
            }
            Operation::GetXattr { name, .. } => {
                // ACLs are supported but absent, as on trees of ext4, xfs and btrfs.
                let unknown = name == b"security.selinux";
                Reply::error(unique, if unknown { libc::EOPNOTSUPP } else { libc::ENODATA }).send(to)
            }
            Operation::ListXattr { size: 0 } => Reply::xattr_size(unique, 0).send(to),
            Operation::ListXattr { .. } => Reply::data(unique, &[]).send(to),
            Operation::Flush { .. }
            | Operation::Release { .. }
            | Operation::ReleaseDir { .. }
            | Operation::Fsync { .. }
            | Operation::FsyncDir { .. }
            | Operation::Access { .. } => Reply::empty(unique).send(to),
            ref other if opcode::expects_reply(other.opcode()) => Reply::error(unique, libc::ENOSYS).send(to),
            _ => Ok(()),
        }
    }

    fn directory_flags(&self, node: u64) -> u32 {
        if self.tree.children(node) < CACHED_DIRECTORY {
            fopen::CACHE_DIR | fopen::KEEP_CACHE
        } else {
            fopen::KEEP_CACHE
        }
    }

    fn list(
        &mut self,
        to: &DevFuse,
        header: &Header,
        offset: u64,
        size: u32,
        plus: bool,
    ) -> std::io::Result<()> {
        self.listing.restart(size, plus);
        let dots: [(&[u8], u64); 2] = [(b".", 1), (b"..", 2)];
        let mut full = false;
        for (name, cookie) in dots.into_iter().filter(|(_, cookie)| *cookie > offset) {
            let dirent = Dirent { ino: header.nodeid, cookie, kind: u32::from(libc::DT_DIR), name };
            full |= !self.listing.push(&dirent, None);
        }
        for (cookie, name, made) in self.tree.after(header.nodeid, offset.max(2)) {
            let kind = (made.attr.mode & libc::S_IFMT) >> 12;
            let dirent = Dirent { ino: made.attr.ino, cookie, kind, name };
            if full || !self.listing.push(&dirent, Some(&self_entry(&made))) {
                break;
            }
        }
        Reply::data(header.unique, self.listing.as_bytes()).send(to)
    }
}

fn self_entry(made: &Made) -> Entry {
    Entry { nodeid: made.nodeid, generation: 0, entry_valid: VALID, attr_valid: VALID, attr: made.attr }
}
