//! The demonstration's workload without a mount: requests as the kernel would send them, to the same daemon code.

use super::work::Files;
use anyhow::{Context, Result, bail, ensure};
use nigh_client::fuse::{Header, MemoryTransport, Negotiated, Operation, encode};
use nigh_client::{Link, LocalHost, Mount, MountConfig};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(30);
const PAGE: u32 = 32 << 10;
const ENTRY_BYTES: usize = 128;
const DIRENT_BYTES: usize = 24;
const FILE_TYPE: u32 = 0o170_000;

/// A stand-in for the kernel that caches nothing.
pub struct Direct {
    transport: Arc<MemoryTransport>,
    agreed: Negotiated,
    unique: AtomicU64,
}

/// An entry of a READDIRPLUS reply.
struct FoundEntry {
    node: u64,
    mode: u32,
    size: u64,
    name: Vec<u8>,
}

impl Direct {
    pub fn start(config: MountConfig, link: Link) -> Result<(Mount, Direct)> {
        let transport = Arc::new(MemoryTransport::new(nigh_client::fuse::Level::All));
        let flags = config.wanted.flags_for(config.wanted.max_minor);
        let agreed = Negotiated {
            minor: config.wanted.max_minor,
            flags,
            max_write: config.wanted.max_write,
            max_pages: 256,
            max_readahead: config.wanted.max_readahead,
        };
        let host = Arc::new(LocalHost);
        let mount = Mount::start_on(config, link, Box::new(Arc::clone(&transport)), host, agreed)?;
        Ok((mount, Direct { transport, agreed, unique: AtomicU64::new(2) }))
    }

    pub fn close(&self) {
        self.transport.close();
    }

    fn request(&self, node: u64, operation: &Operation<'_>) -> Result<(i32, Vec<u8>)> {
        let unique = self.unique.fetch_add(2, Ordering::Relaxed);
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let header = Header { unique, nodeid: node, uid, gid, pid: std::process::id(), resent: false };
        self.transport.queue(encode(&header, operation, &self.agreed));
        self.transport.take_reply(unique, LIMIT).context("the cache does not answer")
    }

    fn request_ok(&self, node: u64, operation: &Operation<'_>) -> Result<Vec<u8>> {
        match self.request(node, operation)? {
            (0, body) => Ok(body),
            (errno, _) => bail!("{operation:?}: {}", io::Error::from_raw_os_error(errno)),
        }
    }

    fn list(&self, node: u64) -> Result<Vec<FoundEntry>> {
        let fh = u64_at(&self.request_ok(node, &Operation::OpenDir { flags: 0 })?, 0)?;
        let mut found = Vec::new();
        let mut offset = 0;
        loop {
            let page = self.request_ok(node, &Operation::ReadDirPlus { fh, offset, size: PAGE })?;
            if page.is_empty() {
                break;
            }
            offset = parse(&page, &mut found)?;
        }
        self.request_ok(node, &Operation::ReleaseDir { fh, flags: 0 })?;
        for entry in found.iter_mut().filter(|entry| entry.node == 0) {
            // Nodeid 0: the daemon omits the attributes of an entry that the kernel should still have cached.
            *entry = self.lookup(node, &entry.name)?;
        }
        Ok(found)
    }

    fn lookup(&self, node: u64, name: &[u8]) -> Result<FoundEntry> {
        let body = self.request_ok(node, &Operation::Lookup { name })?;
        found_in(&body, name)
    }

    fn each(&self, mut visit: impl FnMut(&FoundEntry) -> Result<()>) -> Result<u64> {
        let mut seen = 0;
        let mut todo = vec![1];
        while let Some(dir) = todo.pop() {
            for entry in self.list(dir)? {
                seen += 1;
                visit(&entry)?;
                if entry.mode & FILE_TYPE == libc::S_IFDIR {
                    todo.push(entry.node);
                }
            }
        }
        Ok(seen)
    }

    fn absent(&self, name: &str) -> Result<()> {
        match self.request(1, &Operation::Lookup { name: name.as_bytes() })? {
            (libc::ENOENT, _) => Ok(()),
            (0, body) if u64_at(&body, 0)? == 0 => Ok(()),
            other => bail!("{name}: {other:?}"),
        }
    }
}

impl Files for Direct {
    fn walk(&self, names: u64) -> Result<u64> {
        let seen = self.each(|_| Ok(()))?;
        ensure!(seen == names, "{seen} names are listed, {names} were made");
        Ok(seen)
    }

    fn missing(&self, prefix: &str, count: u64) -> Result<u64> {
        (0..count).try_for_each(|n| self.absent(&format!("{prefix}{n}")))?;
        Ok(count)
    }

    fn missing_one(&self, times: u64) -> Result<u64> {
        (0..times).try_for_each(|_| self.absent("no-such-name"))?;
        Ok(times)
    }

    fn read_links(&self, count: u64) -> Result<u64> {
        let mut read = 0;
        self.each(|entry| {
            if entry.mode & FILE_TYPE == libc::S_IFLNK {
                let target = self.request_ok(entry.node, &Operation::ReadLink)?;
                ensure!(target == b"part-0/file-0.txt", "a symlink leads elsewhere");
                read += 1;
            }
            Ok(())
        })?;
        ensure!(read == count, "{read} symlinks are read, {count} were made");
        Ok(read)
    }

    fn count_not_resident(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    fn read(&self, count: u64) -> Result<u64> {
        let mut read = 0;
        self.each(|entry| {
            if entry.mode & FILE_TYPE == libc::S_IFREG {
                let fh = u64_at(
                    &self.request_ok(entry.node, &Operation::Open { flags: 0, kill_suidgid: false })?,
                    0,
                )?;
                let size = u32::try_from(entry.size)?;
                let ask = Operation::Read { fh, offset: 0, size, flags: 0, lock_owner: None };
                let data = self.request_ok(entry.node, &ask)?;
                ensure!(data.starts_with(b"contents of"), "a file holds something else");
                let release =
                    Operation::Release { fh, flags: 0, flush: false, flock_unlock: false, lock_owner: 0 };
                self.request_ok(entry.node, &release)?;
                read += 1;
            }
            Ok(())
        })?;
        ensure!(read == count, "{read} files are read, {count} were made");
        Ok(read)
    }
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64> {
    let word = bytes.get(at..at + 8).context("a short answer")?;
    Ok(u64::from_le_bytes(word.try_into()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32> {
    let half = bytes.get(at..at + 4).context("a short answer")?;
    Ok(u32::from_le_bytes(half.try_into()?))
}

/// `struct fuse_entry_out`: nodeid first; its attributes begin at 40: size at 48, mode at 100.
fn found_in(entry: &[u8], name: &[u8]) -> Result<FoundEntry> {
    Ok(FoundEntry {
        node: u64_at(entry, 0)?,
        size: u64_at(entry, 48)?,
        mode: u32_at(entry, 100)?,
        name: name.to_vec(),
    })
}

/// Parses the entries of one page and returns the next offset.
fn parse(mut page: &[u8], found: &mut Vec<FoundEntry>) -> Result<u64> {
    let mut next = 0;
    while !page.is_empty() {
        let dirent = page.get(ENTRY_BYTES..).context("a short page")?;
        next = u64_at(dirent, 8)?;
        let length = usize::try_from(u32_at(dirent, 16)?)?;
        let name = dirent.get(DIRENT_BYTES..DIRENT_BYTES + length).context("a short page")?;
        if name != b"." && name != b".." {
            found.push(found_in(page, name)?);
        }
        let whole = (ENTRY_BYTES + DIRENT_BYTES + length).next_multiple_of(8);
        page = page.get(whole..).context("a short page")?;
    }
    Ok(next)
}
