//! An in-memory filesystem of one directory that records every request.

use nigh_fuse::abi::flags::fopen;
use nigh_fuse::mount::{self, MountOptions};
use nigh_fuse::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

pub const VALID: Duration = Duration::from_secs(3600);
/// The group of the root directory.
pub const ROOT_GID: u32 = 4_711;
const LIMIT: Duration = Duration::from_secs(20);

#[derive(Clone)]
pub struct Node {
    pub mode: u32,
    pub content: Vec<u8>,
}

#[derive(Default)]
pub struct State {
    pub names: BTreeMap<Vec<u8>, u64>,
    pub nodes: BTreeMap<u64, Node>,
    requests: Vec<Vec<u8>>,
}

pub struct Tiny {
    pub device: DevFuse,
    pub agreed: Negotiated,
    pub mountpoint: PathBuf,
    pub state: Mutex<State>,
    changed: Condvar,
}

/// Mounts, runs `test` on a thread of its own for 20 s at most, and removes the mount in every case.
pub fn mounted(wanted: RequestedFeatures, test: impl FnOnce(&Tiny) + Send + 'static) {
    if let Err(error) = mount::check_support() {
        eprintln!("SKIPPED: {error}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let options = MountOptions::new(dir.path(), "tiny \\ source");
    let mounted = mount::mount(&options).unwrap();
    let guard = Guard(mounted.mountpoint.clone());
    let device = DevFuse::new(mounted.device, Level::NoEpoch);
    let (sender, receiver) = mpsc::channel();
    let mountpoint = mounted.mountpoint;
    let tester = std::thread::spawn(move || {
        let agreed = handshake(&device, &wanted).unwrap();
        let tiny = Tiny { device, agreed, mountpoint, state: Mutex::default(), changed: Condvar::new() };
        let tiny = Arc::new(tiny);
        tiny.add(b"hello", 0o100_644, b"hello, world\n");
        let server = tiny.clone();
        std::thread::spawn(move || server.serve());
        tiny.device.probe_level(tiny.agreed.level());
        test(&tiny);
        sender.send(()).unwrap();
    });
    let outcome = receiver.recv_timeout(LIMIT);
    drop(guard);
    match outcome {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the test hangs"),
        _ => tester.join().unwrap_or_else(|cause| std::panic::resume_unwind(cause)),
    }
}

struct Guard(PathBuf);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = mount::abort(&self.0);
        let _ = mount::unmount(&self.0, true);
    }
}

impl Tiny {
    pub fn path(&self, name: &str) -> PathBuf {
        self.mountpoint.join(name)
    }

    pub fn add(&self, name: &[u8], mode: u32, content: &[u8]) -> u64 {
        let mut state = self.state.lock().unwrap();
        let ino = state.nodes.last_key_value().map_or(2, |(ino, _)| ino + 1);
        state.nodes.insert(ino, Node { mode, content: content.to_vec() });
        state.names.insert(name.to_vec(), ino);
        ino
    }

    /// Number of matching requests so far.
    pub fn count(&self, like: impl Fn(&Header, &Operation<'_>) -> bool) -> usize {
        let state = self.state.lock().unwrap();
        self.matching(&state, &like)
    }

    /// Waits until a matching request has come.
    pub fn wait_for(&self, like: impl Fn(&Header, &Operation<'_>) -> bool) -> Header {
        let mut state = self.state.lock().unwrap();
        loop {
            let found = state.requests.iter().find_map(|bytes| {
                let (header, operation) = decode(bytes, &self.agreed).unwrap();
                like(&header, &operation).then_some(header)
            });
            match found {
                Some(header) => return header,
                None => state = self.changed.wait(state).unwrap(),
            }
        }
    }

    pub fn requests(&self) -> Vec<Vec<u8>> {
        self.state.lock().unwrap().requests.clone()
    }

    fn matching(&self, state: &State, like: &impl Fn(&Header, &Operation<'_>) -> bool) -> usize {
        let decoded = state.requests.iter().map(|bytes| decode(bytes, &self.agreed).unwrap());
        decoded.filter(|(header, operation)| like(header, operation)).count()
    }

    fn serve(&self) {
        let mut buffer = vec![0; self.agreed.buffer_len()];
        while let Some(len) = self.device.receive(&mut buffer).unwrap() {
            let (header, operation) = decode(&buffer[..len], &self.agreed).unwrap();
            let mut state = self.state.lock().unwrap();
            state.requests.push(buffer[..len].to_vec());
            self.changed.notify_all();
            if opcode::expects_reply(operation.opcode()) {
                self.answer(&mut state, &header, &operation);
            }
        }
    }

    fn answer(&self, state: &mut State, header: &Header, operation: &Operation<'_>) {
        let unique = header.unique;
        let reply = match *operation {
            // The test replies itself, or the redelivered request gets the reply.
            Operation::Lookup { name: b"withheld" } => return,
            Operation::Lookup { name: b"resent" } if !header.resent => return,
            Operation::Lookup { name: b"resent" } => {
                Reply::error(header.id(), libc::EIO).send(&self.device).unwrap();
                Reply::entry(unique, &self.entry(state, 2))
            }
            Operation::Lookup { name } => match state.names.get(name) {
                Some(&ino) => Reply::entry(unique, &self.entry(state, ino)),
                None => Reply::negative(unique, VALID),
            },
            Operation::GetAttr { .. } | Operation::SetAttr(_) => {
                Reply::attr(unique, &self.attr(state, header.nodeid), VALID)
            }
            Operation::Statx { mask, .. } => {
                let attr = self.attr(state, header.nodeid);
                Reply::statx(unique, &Statx { mask, btime: (1_234, 5), attr, ..Statx::default() }, VALID)
            }
            Operation::Mkdir { name, mode, .. } => self.make(state, unique, name, mode | 0o040_000),
            Operation::Mknod { name, mode, .. } => self.make(state, unique, name, mode),
            Operation::Symlink { name, .. } => self.make(state, unique, name, 0o120_777),
            Operation::Link { node, name } => {
                state.names.insert(name.to_vec(), node);
                Reply::entry(unique, &self.entry(state, node))
            }
            Operation::Create { name, mode, .. } => {
                let ino = self.insert(state, name, mode);
                Reply::create(unique, &self.entry(state, ino), ino, fopen::KEEP_CACHE)
            }
            Operation::Tmpfile { mode, .. } => {
                let ino = self.insert(state, b"#tmp", mode);
                state.names.remove(&b"#tmp"[..]);
                Reply::create(unique, &self.entry(state, ino), ino, 0)
            }
            Operation::Unlink { name } | Operation::Rmdir { name } => {
                state.names.remove(name);
                Reply::empty(unique)
            }
            Operation::Rename { name, new_name, .. } => {
                if let Some(ino) = state.names.remove(name) {
                    state.names.insert(new_name.to_vec(), ino);
                }
                Reply::empty(unique)
            }
            Operation::ReadDir { offset, size, .. } => return self.list(state, unique, offset, size, false),
            Operation::ReadDirPlus { offset, size, .. } => {
                return self.list(state, unique, offset, size, true);
            }
            _ => return self.answer_file(state, header, operation),
        };
        reply.send(&self.device).unwrap();
    }

    fn answer_file(&self, state: &mut State, header: &Header, operation: &Operation<'_>) {
        let unique = header.unique;
        let reply = match *operation {
            Operation::Open { .. } | Operation::OpenDir { .. } => Reply::open(unique, header.nodeid, 0),
            Operation::Read { offset, size, .. } => {
                let content = &state.nodes[&header.nodeid].content;
                let start = usize::try_from(offset).unwrap().min(content.len());
                let end = (start + usize::try_from(size).unwrap()).min(content.len());
                Reply::data(unique, &content[start..end])
            }
            Operation::Write { offset, data, .. } => {
                let content = &mut state.nodes.get_mut(&header.nodeid).unwrap().content;
                let start = usize::try_from(offset).unwrap();
                content.resize(content.len().max(start + data.len()), 0);
                content[start..start + data.len()].copy_from_slice(data);
                Reply::written(unique, u32::try_from(data.len()).unwrap())
            }
            Operation::ReadLink => Reply::data(unique, b"hello"),
            Operation::StatFs => {
                Reply::statfs(unique, &StatFs { blocks: 7, bsize: 4096, namelen: 255, ..StatFs::default() })
            }
            Operation::GetXattr { size: 0, .. } => Reply::xattr_size(unique, 5),
            Operation::GetXattr { name: b"user.x", .. } => Reply::data(unique, b"value"),
            Operation::GetXattr { .. } => Reply::error(unique, libc::ENODATA),
            Operation::ListXattr { size: 0 } => Reply::xattr_size(unique, 7),
            Operation::ListXattr { .. } => Reply::data(unique, b"user.x\0"),
            Operation::GetLk(request) => Reply::lock(unique, &FileLock { kind: 1, pid: 1, ..request.lock }),
            Operation::Ioctl { cmd: 0x8008_6601, .. } => Reply::ioctl(unique, 0, &[0x10, 0, 0, 0]),
            Operation::Ioctl { .. } => Reply::error(unique, libc::ENOTTY),
            Operation::Lseek { offset, .. } => Reply::lseek(unique, offset + 1),
            Operation::CopyFileRange(range) => Reply::written(unique, u32::try_from(range.length).unwrap()),
            Operation::CopyFileRange64(range) => Reply::copied(unique, range.length),
            Operation::Poll { .. } | Operation::Unknown { .. } => Reply::error(unique, libc::ENOSYS),
            _ => Reply::empty(unique),
        };
        reply.send(&self.device).unwrap();
    }

    fn insert(&self, state: &mut State, name: &[u8], mode: u32) -> u64 {
        let ino = state.nodes.last_key_value().map_or(2, |(ino, _)| ino + 1);
        state.nodes.insert(ino, Node { mode, content: Vec::new() });
        state.names.insert(name.to_vec(), ino);
        ino
    }

    fn make(&self, state: &mut State, unique: u64, name: &[u8], mode: u32) -> Reply<'static> {
        let ino = self.insert(state, name, mode);
        Reply::entry(unique, &self.entry(state, ino))
    }

    fn list(&self, state: &State, unique: u64, offset: u64, size: u32, plus: bool) {
        let mut listing = DirBuffer::new(size, plus);
        for (cookie, (name, &ino)) in (1u64..).zip(&state.names).skip(usize::try_from(offset).unwrap()) {
            let kind = state.nodes[&ino].mode >> 12;
            if !listing.push(&Dirent { ino, cookie, kind, name }, Some(&self.entry(state, ino))) {
                break;
            }
        }
        Reply::data(unique, listing.as_bytes()).send(&self.device).unwrap();
    }

    fn attr(&self, state: &State, ino: u64) -> Attr {
        let (mode, size) = match state.nodes.get(&ino) {
            Some(node) => (node.mode, u64::try_from(node.content.len()).unwrap()),
            None => (0o040_755, 0),
        };
        let gid = if ino == abi::ROOT_ID { ROOT_GID } else { 0 };
        let uid = rustix::process::getuid().as_raw();
        Attr { ino, mode, size, uid, gid, nlink: 1, mtime: (1_000, 7), ..Attr::default() }
    }

    fn entry(&self, state: &State, ino: u64) -> Entry {
        let attr = self.attr(state, ino);
        Entry { nodeid: ino, generation: 0, entry_valid: VALID, attr_valid: VALID, attr }
    }
}
