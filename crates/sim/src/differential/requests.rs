//! Random requests.

use super::{DifferentialTest, OpenFile, name};
use nigh_cache::{Op, OpReply};
use nigh_types::{Access, Kind, Name, SetAttr, SetTime, Timestamp, WriteFlags};

const DIRS: [&[&str]; 5] = [&[], &["p"], &["q"], &["p", "q"], &["q", "p"]];
const NAMES: [&str; 6] = ["a", "b", "c", "d", "p", "q"];
const XATTRS: [&str; 4] = ["user.one", "user.two", "trusted.three", "nowhere.four"];

/// The source of random requests.
pub(super) trait RandomRequests {
    fn act(&mut self) -> Result<(), String>;
}

impl RandomRequests for DifferentialTest {
    fn act(&mut self) -> Result<(), String> {
        let dir = DIRS[self.below(DIRS.len())];
        let Some(dir) = self.resolve(dir)? else { return Ok(()) };
        if !self.is_dir(dir) {
            return Ok(());
        }
        let leaf = name(self.dice.pick(&NAMES));
        match self.dice.below(10) {
            0 | 1 => self.make(dir, leaf),
            2 => self.remove_or_rename(dir, leaf),
            3 => self.list(dir),
            4 => self.list_long(dir),
            5 | 6 => self.on_open(),
            _ => self.on_name(dir, leaf),
        }
    }
}

impl DifferentialTest {
    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.dice.below(n as u64)).unwrap_or(0)
    }

    fn number(&mut self, below: u64) -> u32 {
        u32::try_from(self.dice.below(below)).unwrap_or(0)
    }

    fn is_dir(&self, ino: u64) -> bool {
        self.reference.tree.attr(self.reference.id(ino)).is_some_and(|attr| attr.is_dir())
    }

    fn access(&mut self) -> Access {
        let write = self.dice.below(2) == 0;
        Access {
            read: true,
            write,
            truncate: write && self.dice.below(3) == 0,
            direct: false,
            sync: false,
            append: false,
        }
    }

    fn make(&mut self, dir: u64, name: Name) -> Result<(), String> {
        let (mode, umask) = (0o600 + self.number(0o200), 0o22);
        let access = self.access();
        let op = match self.dice.below(6) {
            0 | 1 => Op::Mkdir { dir, name, mode, umask },
            2 => Op::Symlink { dir, name, target: format!("to/{mode:o}").into_bytes() },
            3 => {
                let kinds = [Kind::File, Kind::Fifo, Kind::Socket, Kind::CharDevice, Kind::Directory];
                Op::Mknod { dir, name, kind: kinds[self.below(kinds.len())], mode, umask, rdev: 259 }
            }
            4 => Op::Tmpfile { dir, mode, umask, access: Access { write: true, ..access } },
            _ => {
                let (exclusive, append) = (self.dice.below(2) == 0, self.dice.below(3) == 0);
                Op::Create { dir, name, mode, umask, exclusive, access, append }
            }
        };
        self.execute_both(op).map(drop)
    }

    fn remove_or_rename(&mut self, dir: u64, leaf: Name) -> Result<(), String> {
        // The kernel looks up a name before it removes it.
        self.execute_both_cached(Op::Lookup { dir, name: leaf.clone() })?;
        let op = match self.dice.below(5) {
            0 | 1 => Op::Unlink { dir, name: leaf },
            2 => Op::Rmdir { dir, name: leaf },
            _ => {
                let to = DIRS[self.below(DIRS.len())];
                let Some(to) = self.resolve(to)?.filter(|to| self.is_dir(*to)) else { return Ok(()) };
                let new_name = name(self.dice.pick(&NAMES));
                self.execute_both_cached(Op::Lookup { dir: to, name: new_name.clone() })?;
                let how = self.below(6);
                let (no_replace, exchange, whiteout) = (matches!(how, 2 | 5), how == 3, how >= 4);
                Op::Rename { from: dir, name: leaf, to, new_name, no_replace, exchange, whiteout }
            }
        };
        let open = self.files.iter().filter(|file| self.reference.has(file.ino)).count();
        self.execute_both(op)?;
        assert_eq!(open, self.files.iter().filter(|file| self.reference.has(file.ino)).count());
        self.forget_dead();
        Ok(())
    }

    /// Requests what `ls -l` requests.
    fn list_long(&mut self, dir: u64) -> Result<(), String> {
        self.list(dir)?;
        for leaf in NAMES {
            if let OpReply::Node(node) = self.execute_both_cached(Op::Lookup { dir, name: name(leaf) })? {
                let ino = node.id.ino;
                self.execute_both_cached(Op::GetAttr { ino })?;
                self.execute_both_cached(Op::ListXattr { ino, size: 0 })?;
            }
        }
        self.execute_both(Op::StatFs { ino: dir })?;
        match self.execute_both(Op::LookupParent { ino: dir })? {
            OpReply::Node(node) if self.is_dir(node.id.ino) => Ok(()),
            other => Err(format!("{dir} has for parent {other:?}")),
        }
    }

    fn on_name(&mut self, dir: u64, leaf: Name) -> Result<(), String> {
        let OpReply::Node(node) = self.execute_both_cached(Op::Lookup { dir, name: leaf })? else {
            return Ok(());
        };
        let ino = node.id.ino;
        let kind = node.attr.kind();
        match self.dice.below(10) {
            0 => drop(self.execute_both_cached(Op::GetAttr { ino })?),
            1 => drop(self.execute_both_cached(Op::LookupSelf { ino })?),
            2 if kind == Kind::Symlink => drop(self.execute_both_cached(Op::ReadLink { ino })?),
            3 | 4 if kind == Kind::File => {
                let (access, append) = (self.access(), self.dice.below(3) == 0);
                self.execute_both(Op::Open { ino, access, append })?;
            }
            5 => {
                let set = self.set();
                self.execute_both(Op::SetAttr { ino, fh: None, set })?;
            }
            6 => {
                let other = name(self.dice.pick(&NAMES));
                self.execute_both(Op::Link { ino, dir, name: other })?;
            }
            7 => {
                self.execute_both(Op::GetFlags { ino })?;
                self.execute_both(Op::Fsync { ino, fh: None, data_only: false })?;
            }
            _ => self.xattrs(ino)?,
        }
        Ok(())
    }

    fn set(&mut self) -> SetAttr {
        let time = SetTime::At(Timestamp { secs: 1_000 + i64::from(self.number(1_000)), nanos: 5 });
        let mut set = SetAttr { kill_suidgid: self.dice.below(2) == 0, ..SetAttr::default() };
        match self.dice.below(7) {
            0 => set.mode = Some(self.number(0o10000)),
            1 => set.uid = Some(self.number(5)),
            2 => set.gid = Some(self.number(5)),
            3 => set.size = Some(self.dice.below(9_000)),
            4 => set.atime = Some(time),
            5 => (set.mtime, set.atime) = (Some(SetTime::Now), Some(SetTime::Now)),
            _ => set.mtime = Some(time),
        }
        set
    }

    fn xattrs(&mut self, ino: u64) -> Result<(), String> {
        let name = self.dice.pick(&XATTRS).as_bytes().to_vec();
        let size = [0, 3, 70_000][self.below(3)];
        match self.dice.below(5) {
            0 | 1 => {
                let value = vec![b'v'; [0, 3, 30, 5_000][self.below(4)]];
                let flags = [0, 0, 1, 2][self.below(4)];
                self.execute_both(Op::SetXattr { ino, name: name.clone(), value, flags, kill_sgid: false })?;
            }
            2 => drop(self.execute_both(Op::RemoveXattr { ino, name: name.clone() })?),
            _ => drop(self.execute_both_cached(Op::ListXattr { ino, size })?),
        }
        // The kernel checks permissions before it asks; xattrs are cached as long as attributes.
        self.execute_both(Op::GetAttr { ino })?;
        self.execute_both_cached(Op::GetXattr { ino, name, size }).map(drop)
    }

    /// Sends a request on an open file, with or without a name.
    fn on_open(&mut self) -> Result<(), String> {
        if self.files.is_empty() {
            return Ok(());
        }
        let at = self.below(self.files.len());
        let OpenFile { ino, fh, write } = self.files[at];
        let (offset, size) = (self.dice.below(9_000), self.number(9_000));
        let op = match self.dice.below(9) {
            0 => Op::Read { ino, fh, offset, size },
            1 if write => {
                let data = vec![b'a' + u8::try_from(self.below(26)).unwrap_or(0); self.below(5_000)];
                let (kill_suidgid, flush) = (self.dice.below(2) == 0, self.dice.below(4) == 0);
                let append = self.dice.below(3) == 0;
                let flags = WriteFlags { append, kill_suidgid, write_back: flush, ..WriteFlags::default() };
                Op::Write { ino, fh, offset, data, flags }
            }
            2 => Op::Seek { ino, fh, offset, data: self.dice.below(2) == 0 },
            3 if write => {
                let mode = [0, 1, 3, 16, 17, 8][self.below(6)];
                Op::Fallocate { ino, fh, mode, offset, length: u64::from(size) }
            }
            4 => Op::Fsync { ino, fh: Some(fh), data_only: self.dice.below(2) == 0 },
            5 => Op::SetAttr { ino, fh: Some(fh), set: self.set() },
            6 => Op::GetAttr { ino },
            7 if write => {
                let other = self.below(self.files.len());
                let from = self.files[other];
                let to_offset = self.dice.below(9_000);
                let length = u64::from(size);
                Op::CopyRange {
                    ino: from.ino,
                    fh: from.fh,
                    offset,
                    to_ino: ino,
                    to_fh: fh,
                    to_offset,
                    length,
                }
            }
            _ => return self.close(at),
        };
        self.execute_both(op).map(drop)
    }
}
