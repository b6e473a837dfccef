//! Random requests on files besides their names: data, xattrs, hard links.

use super::{DIRS, NAMES, PAGE, RandomHistory, name};
use crate::world::{Backend, Fact, XATTR, name_of, short};
use nigh_cache::{Fh, NotifyLevel, Op, OpReply};
use nigh_types::{Access, Errno, Name, WriteFlags};

/// Write flags of a caller without `CAP_FSETID`.
const KILLS: WriteFlags =
    WriteFlags { append: false, kill_suidgid: true, sync: false, write_back: false, since: None };

impl<B: Backend> RandomHistory<B> {
    /// Returns a request, and the directories that its kernel locks for it.
    pub(super) fn use_file(&mut self, at: usize, dir: u64, file: &Name) -> (Option<Op>, Vec<u64>) {
        let none = (None, Vec::new());
        let known = self.known(at, dir, file);
        match (self.dice.below(12), known) {
            (0 | 1, Some(ino)) => {
                let write = self.dice.below(3) == 0;
                let access =
                    Access { read: true, write, truncate: false, direct: false, sync: false, append: false };
                (Some(Op::Open { ino, access, append: false }), Vec::new())
            }
            (2..=4, _) => (self.read_or_write(at, false), Vec::new()),
            (5, _) => (self.read_or_write(at, true), Vec::new()),
            (6, Some(ino)) => {
                let value = vec![b'0' + u8::try_from(self.dice.below(10)).unwrap_or(0)];
                let name = XATTR.to_vec();
                (Some(Op::SetXattr { ino, name, value, flags: 0, kill_sgid: false }), Vec::new())
            }
            (7 | 8, Some(ino)) => (Some(Op::GetXattr { ino, name: XATTR.to_vec(), size: 100 }), Vec::new()),
            (9, Some(ino)) => {
                let picked = self.dice.pick(&DIRS);
                let to = self.dirs[picked];
                let name = name(self.dice.pick(&NAMES));
                (Some(Op::Link { ino, dir: to, name }), vec![to])
            }
            (10, _) => match self.open_file(at) {
                Some((fh, ino, _)) if !self.world.has_locked_pages(at, ino) => {
                    self.world.write_back(at, ino);
                    let written = !self.world.has_locked_pages(at, ino);
                    (written.then_some(Op::Release { fh, flock: None }), Vec::new())
                }
                _ => none,
            },
            (11, _) => {
                self.store(at);
                none
            }
            _ => none,
        }
    }

    /// Returns a request on open files only, mostly through maps.
    pub(super) fn use_map(&mut self, at: usize) -> Option<Op> {
        match self.dice.below(4) {
            0 | 1 => {
                self.store(at);
                None
            }
            other => self.read_or_write(at, other == 3),
        }
    }

    /// Returns the shared file and this client's writable open file of it, or else the request that comes first.
    fn open_page(&self, at: usize) -> Result<(u64, Fh), Op> {
        let (dir, file) = (self.dirs[DIRS[0]], name(PAGE));
        let Some(ino) = self.known(at, dir, &file) else { return Err(Op::Lookup { dir, name: file }) };
        let mut files = self.world.clients[at].kernel.page_cache.files();
        let opened = files.find(|(_, of, write)| *of == ino && *write);
        opened.map(|(fh, ..)| (ino, fh)).ok_or_else(|| {
            let access = Access {
                read: true,
                write: true,
                truncate: false,
                direct: false,
                sync: false,
                append: false,
            };
            Op::Open { ino, access, append: false }
        })
    }

    /// Writes half of the shared file's page, mostly where another client writes too, or reads all of it.
    pub(super) fn write_in_part(&mut self, at: usize) -> Option<Op> {
        let (ino, fh) = match self.open_page(at) {
            Ok(open) => open,
            Err(first) => return Some(first),
        };
        if self.world.has_locked_pages(at, ino) {
            return None;
        }
        let kept = &self.world.clients[at].kernel.page_cache;
        if kept.is_dirty(ino) {
            self.world.write_back(at, ino);
            return None;
        }
        let has_page = kept.has_pages(ino);
        let others = (0..self.world.clients.len()).any(|other| self.world.has_locked_pages(other, ino));
        if self.dice.below(if has_page && others { 4 } else { 16 }) == 0 {
            let data = vec![b'a' + u8::try_from(self.dice.below(26)).unwrap_or(0); 2];
            let offset = 2 * self.dice.below(2);
            return Some(Op::Write { ino, fh, offset, data, flags: KILLS });
        }
        (!has_page).then_some(Op::Read { ino, fh, offset: 0, size: 4096 })
    }

    /// Stores into a part of the shared file's mapped page, writes a part, or syncs the stores.
    pub(super) fn store_in_part(&mut self, at: usize) -> Option<Op> {
        let (ino, fh) = match self.open_page(at) {
            Ok(open) => open,
            Err(first) => return Some(first),
        };
        if self.world.has_locked_pages(at, ino) {
            return None;
        }
        let kept = &self.world.clients[at].kernel.page_cache;
        let (is_dirty, has_page) = (kept.is_dirty(ino), kept.has_pages(ino));
        let roll = self.dice.below(8);
        if !has_page {
            return Some(Op::Read { ino, fh, offset: 0, size: 4096 });
        }
        match roll {
            0 if is_dirty => self.world.write_back(at, ino),
            0 => return Some(Op::Fsync { ino, fh: Some(fh), data_only: false }),
            // A write to a dirty page waits for its write-back.
            1 if is_dirty => self.world.write_back(at, ino),
            1 => {
                let data = vec![b'a' + u8::try_from(self.dice.below(26)).unwrap_or(0)];
                let offset = self.dice.below(4);
                return Some(Op::Write { ino, fh, offset, data, flags: WriteFlags::default() });
            }
            _ => {
                // Bytes that no write uses, so that a store is recognizable in the file.
                self.stored = (self.stored + 1) % 120;
                let bytes = vec![0x80 + self.stored; 1 + usize::from(roll == 2)];
                let offset = self.dice.below(if roll == 2 { 3 } else { 4 });
                self.world.store(at, ino, fh, (offset, &bytes));
            }
        }
        None
    }

    fn open_file(&mut self, at: usize) -> Option<(Fh, u64, bool)> {
        let files: Vec<_> = self.world.clients[at].kernel.page_cache.files().collect();
        let picked = self.dice.below((files.len() as u64).max(1));
        files.get(usize::try_from(picked).unwrap_or(0)).copied()
    }

    /// Stores into a map of an open file. Only one client at a time has stores: two clients' write-backs would wait
    /// for each other if the server does not let a write-back go before the change that required it.
    fn store(&mut self, at: usize) {
        // Stores are written back before other clients' pages are dropped; msync waits for that, and is not made here.
        if self.workload.partial_writes || self.workload.shared_maps {
            return;
        }
        let Some((fh, ino, true)) = self.open_file(at) else { return };
        let stores = |client: usize| client != at && !B::FLUSHES_FIRST && self.world.has_stores(client);
        if (0..self.world.clients.len()).any(stores) || self.world.has_locked_pages(at, ino) {
            return;
        }
        let data = vec![b'A' + u8::try_from(self.dice.below(26)).unwrap_or(0); 4];
        if self.world.clients[at].kernel.page_cache.has_pages(ino) {
            self.world.store(at, ino, fh, (0, &data));
        }
    }

    /// Reads or writes an open file. A kernel answers reads from its cached pages; every step checks those.
    fn read_or_write(&mut self, at: usize, write: bool) -> Option<Op> {
        let (fh, ino, may_write) = self.open_file(at)?;
        if self.world.has_locked_pages(at, ino) {
            return None;
        }
        if self.world.clients[at].kernel.page_cache.is_dirty(ino) {
            self.world.write_back(at, ino);
            return None;
        }
        if write && may_write {
            let data = vec![b'a' + u8::try_from(self.dice.below(26)).unwrap_or(0); 4];
            return Some(Op::Write { ino, fh, offset: 0, data, flags: KILLS });
        }
        let client = &self.world.clients[at];
        let asks = !client.kernel.page_cache.has_pages(ino) || client.cache.level() == NotifyLevel::None;
        asks.then_some(Op::Read { ino, fh, offset: 0, size: 4096 })
    }

    /// Checks that data and xattrs were so at some moment since the request.
    pub(super) fn judge_fact(&self, at: usize, begun: u64, op: &Op, answer: &OpReply) -> Result<(), String> {
        let was = |ino, fact, what: Option<&[u8]>| self.world.facts.was(ino, fact, begun, what);
        let so = match (op, answer) {
            (Op::Read { ino, .. }, OpReply::Data(data)) => was(*ino, Fact::Data, Some(data)),
            (Op::GetXattr { ino, .. }, OpReply::Value(value)) => was(*ino, Fact::Xattr, Some(value)),
            (Op::GetXattr { ino, .. }, OpReply::Failed(Errno::NODATA)) => was(*ino, Fact::Xattr, None),
            _ => true,
        };
        if so { Ok(()) } else { Err(format!("{} was told {} of {op:?}", name_of(at), short(answer))) }
    }
}
