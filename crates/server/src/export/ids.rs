//! Node ids of inodes. See docs/decisions/0001-node-ids.md.

use crate::export::node_id_mac::NodeIdMac;
use crate::export::parent_cache::ParentCache;
use crate::export::state_log::{Log, Record};
use crate::os::error::{Fault, Result};
use crate::os::filesystem::{Filesystem, Identity, identify};
use crate::os::own_mounts;
use crate::os::stat::{Dev, Stat};
use nigh_lease::Object;
use nigh_types::{CookieKey, Errno, NodeId};
use parking_lot::{Mutex, RwLock};
use rustc_hash::FxHashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Device index of mapped inode numbers, which fit into no other index.
const MAPPED: u64 = 0x7fff;
/// Device index of the main filesystem in [`Record::Number`].
const MAIN: u64 = 0x7ffe;
const FOREIGN: u64 = 1 << 63;
const DELEGATED: u64 = 1 << 62;
const SHORT: u64 = 1 << 48;

/// Node id allocator of an export, stable over restarts.
#[derive(Debug)]
pub(crate) struct Ids {
    main: Main,
    cookie_key: CookieKey,
    mac: NodeIdMac,
    /// Known devices, by statx fields. `st_dev` is reused after an unmount, a mount's unique id is not. Where mount
    /// ids are reused too (Linux before 6.8), the filesystem is identified anew at each mount root.
    devices: RwLock<FxHashMap<(Dev, u64, u64), Device>>,
    map: Mutex<Map>,
    dirty: AtomicBool,
    pub(crate) parents: ParentCache,
}

#[derive(Clone, Copy, Debug)]
struct Main {
    dev: Dev,
    subvolume: u64,
    root_ino: u64,
    filesystem: Filesystem,
}

#[derive(Clone, Copy, Debug)]
struct Device {
    index: u64,
    identity: Option<Identity>,
    overlay: bool,
}

/// Lock order: `Ids::map` before `Ids::devices`.
#[derive(Debug)]
struct Map {
    log: Log,
    devices: FxHashMap<Identity, u64>,
    next_device: u64,
    /// Device indices of filesystems without an identity; counts down.
    next_passing_device: u64,
    numbers: FxHashMap<(u64, u64), u64>,
    /// The inverse of `numbers`.
    inodes: FxHashMap<u64, (u64, u64)>,
    next_number: u64,
    /// Mapped numbers of inodes on filesystems without an identity; counts down.
    next_passing_number: u64,
}

/// Returns the device index in a node id; 0 is the filesystem of the export's root.
pub(crate) fn device_of(node: NodeId) -> u64 {
    if node.ino & FOREIGN == 0 { 0 } else { node.ino >> 48 }
}

impl Ids {
    /// `fresh`: the secret for an export that has none yet.
    pub(crate) fn new(
        root: &Stat,
        filesystem: Filesystem,
        mut log: Log,
        records: &[Record],
        fresh: [u8; 16],
    ) -> std::io::Result<Ids> {
        let seal = NodeIdMac::new(log.secret(records, fresh)?);
        let mut map = Map {
            log,
            devices: FxHashMap::default(),
            next_device: 0,
            next_passing_device: MAIN - 1,
            numbers: FxHashMap::default(),
            inodes: FxHashMap::default(),
            next_number: 0,
            next_passing_number: SHORT - 1,
        };
        let mut cookie_key = CookieKey::default();
        for record in records {
            match *record {
                Record::Key { key, .. } => cookie_key = CookieKey(key),
                Record::Device { index, uuid, subvolume } => {
                    map.devices.insert(Identity { uuid, subvolume }, index);
                    map.next_device = map.next_device.max(index + 1);
                }
                Record::Number { short, index, ino } => {
                    map.number((index, ino), short);
                    map.next_number = map.next_number.max(short + 1);
                }
                Record::Secret { .. } => {}
            }
        }
        let main = Main { dev: root.dev, subvolume: root.subvolume, root_ino: root.ino, filesystem };
        let (devices, map, dirty) = (RwLock::default(), Mutex::new(map), AtomicBool::new(false));
        Ok(Ids { main, cookie_key, mac: seal, devices, map, dirty, parents: ParentCache::new(None) })
    }

    /// Persists the parent directories of files in this file.
    pub(crate) fn keeping_parents(self, file: PathBuf) -> Ids {
        Ids { parents: ParentCache::new(Some(file)), ..self }
    }

    /// Returns the inode number on the root's filesystem behind an export's number, with the subvolume if it is not
    /// the root's. Returns `None` for a number on another filesystem, or of no inode.
    pub(crate) fn on_main(&self, number: u64) -> Option<(u64, Option<u64>)> {
        if number & FOREIGN == 0 {
            return (number < DELEGATED).then_some((number, None));
        }
        let (mut index, mut ino) = ((number & !FOREIGN) >> 48, number & (SHORT - 1));
        let map = self.map.lock();
        if index == MAPPED {
            (index, ino) = *map.inodes.get(&ino)?;
        }
        if index == MAIN {
            return Some((ino, None));
        }
        let main = self.main.filesystem.identity?;
        let own = map.devices.iter().find(|(_, of)| **of == index).map(|(identity, _)| *identity)?;
        // Before Linux 6.10 the kernel does not report subvolumes, and this field holds a mixture instead.
        (own.is_beside(main) && self.main.subvolume != 0).then_some((ino, Some(own.subvolume)))
    }

    /// Whether this export made the id, now or earlier. (Its inode may be gone.)
    pub(crate) fn is_genuine(&self, node: NodeId) -> bool {
        self.mac.genuine(node)
    }

    pub(crate) fn cookie_key(&self) -> CookieKey {
        self.cookie_key
    }

    pub(crate) fn filesystem(&self) -> Filesystem {
        self.main.filesystem
    }

    /// Returns the node id of `stat`. `open` returns an `O_PATH` descriptor of the inode, needed at the first
    /// encounter with its filesystem.
    pub(crate) fn node(&self, stat: &Stat, open: impl FnOnce() -> Result<OwnedFd>) -> Result<NodeId> {
        let (ino, overlay) = self.visible_ino(stat, open)?;
        Ok(self.mac.id(ino, if overlay { 0 } else { stat.birth_ns }))
    }

    /// Returns the inode number visible to applications, and whether the filesystem is an overlay. `open` as for
    /// [`Ids::node`].
    pub(crate) fn visible_ino(
        &self,
        stat: &Stat,
        open: impl FnOnce() -> Result<OwnedFd>,
    ) -> Result<(u64, bool)> {
        if stat.dev == self.main.dev && stat.subvolume == self.main.subvolume {
            return self.visible_ino_on_main(stat.ino);
        }
        let key = (stat.dev, stat.mount, stat.subvolume);
        let known = self.devices.read().get(&key).copied();
        let device = match known {
            Some(device) if !stat.known_anew => device,
            // Identifying this filesystem would send a request to this server.
            _ if own_mounts::is_own(stat.dev) => return Err(Fault(Errno::LOOP)),
            _ => self.add_device(key, &identify(open()?, stat)?)?,
        };
        if device.index == MAIN {
            return self.visible_ino_on_main(stat.ino);
        }
        let ino = if stat.ino < SHORT {
            FOREIGN | (device.index << 48) | stat.ino
        } else {
            self.number(device.index, stat.ino, device.identity.is_some())?
        };
        Ok((ino, device.overlay))
    }

    /// Returns the lease identity of an inode, after [`Ids::node`] has made its id.
    pub(crate) fn object(&self, stat: &Stat) -> Object {
        let main = stat.dev == self.main.dev && stat.subvolume == self.main.subvolume;
        let overlay = if main {
            self.main.filesystem.overlay
        } else {
            let key = (stat.dev, stat.mount, stat.subvolume);
            self.devices.read().get(&key).is_some_and(|device| device.overlay)
        };
        stat.object(overlay)
    }

    /// Makes the state behind all ids durable. To be called before any of the ids is sent.
    pub(crate) fn settle(&self) -> Result<()> {
        if self.dirty.load(Ordering::Acquire) {
            let mut map = self.map.lock();
            map.log.sync()?;
            self.dirty.store(false, Ordering::Release);
        }
        Ok(())
    }

    fn visible_ino_on_main(&self, ino: u64) -> Result<(u64, bool)> {
        let plain = ino < DELEGATED && (ino > 1 || ino == self.main.root_ino);
        let durable = self.main.filesystem.identity.is_some();
        let shown = if plain { ino } else { self.number(MAIN, ino, durable)? };
        Ok((shown, self.main.filesystem.overlay))
    }

    fn add_device(&self, key: (Dev, u64, u64), filesystem: &Filesystem) -> Result<Device> {
        let mut map = self.map.lock();
        let known = self.devices.read().get(&key).copied();
        if let Some(device) = known.filter(|device| device.identity == filesystem.identity) {
            return Ok(device);
        }
        let main = self.main.filesystem.identity;
        let index = match filesystem.identity {
            None => map.passing_device()?,
            identity if identity == main => MAIN,
            Some(identity) => self.durable_device(&mut map, identity)?,
        };
        let device = Device { index, identity: filesystem.identity, overlay: filesystem.overlay };
        self.devices.write().insert(key, device);
        Ok(device)
    }

    fn durable_device(&self, map: &mut Map, identity: Identity) -> Result<u64> {
        if let Some(&index) = map.devices.get(&identity) {
            return Ok(index);
        }
        let index = map.next_device;
        if index > map.next_passing_device {
            return Err(Fault(Errno::OVERFLOW));
        }
        map.next_device += 1;
        map.devices.insert(identity, index);
        map.log.push(Record::Device { index, uuid: identity.uuid, subvolume: identity.subvolume });
        self.dirty.store(true, Ordering::Release);
        Ok(index)
    }

    fn number(&self, index: u64, ino: u64, durable: bool) -> Result<u64> {
        let mut map = self.map.lock();
        let map = &mut *map;
        let short = match map.numbers.get(&(index, ino)) {
            Some(&short) => short,
            None if map.next_number > map.next_passing_number => return Err(Fault(Errno::OVERFLOW)),
            None => {
                let short = if durable { map.next_number } else { map.next_passing_number };
                if durable {
                    map.next_number += 1;
                    map.log.push(Record::Number { short, index, ino });
                    self.dirty.store(true, Ordering::Release);
                } else {
                    map.next_passing_number -= 1;
                }
                map.number((index, ino), short);
                short
            }
        };
        Ok(FOREIGN | (MAPPED << 48) | short)
    }
}

impl Map {
    fn number(&mut self, of: (u64, u64), short: u64) {
        self.numbers.insert(of, short);
        self.inodes.insert(short, of);
    }

    fn passing_device(&mut self) -> Result<u64> {
        if self.next_passing_device < self.next_device || self.next_passing_device == 0 {
            return Err(Fault(Errno::OVERFLOW));
        }
        self.next_passing_device -= 1;
        Ok(self.next_passing_device + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn stat(dev: u32, ino: u64) -> Stat {
        let attr = nigh_types::Attr::default();
        Stat { attr, ino, dev: Dev(0, dev), birth_ns: 5, mount: 1, known_anew: false, subvolume: 0 }
    }

    fn on(uuid: u8) -> Filesystem {
        let identity = Some(Identity { uuid: [uuid; 16], subvolume: 0 });
        Filesystem { identity, overlay: false, kind: 0 }
    }

    fn ids(path: &Path) -> Ids {
        let (log, records) = Log::open(path, Record::Key { version: 1, key: [1; 16] }).unwrap();
        Ids::new(&stat(1, 2), on(1), log, &records, [2; 16]).unwrap()
    }

    fn refuse() -> Result<OwnedFd> {
        Err(Fault(Errno::IO))
    }

    #[test]
    fn main_filesystem_inode_numbers_are_kept_except_one_and_large_ones() {
        let dir = tempfile::tempdir().unwrap();
        let ids = ids(&dir.path().join("ids"));
        let ino = |n| ids.node(&stat(1, n), refuse).unwrap().ino;
        assert_eq!(ino(2), 2);
        assert_eq!(ino(DELEGATED - 1), DELEGATED - 1);
        let mapped = [ino(1), ino(DELEGATED), ino(u64::MAX)];
        assert!(mapped.iter().all(|n| n >> 48 == 0xffff));
        assert_eq!(mapped, [ino(1), ino(DELEGATED), ino(u64::MAX)]);
        assert!(mapped[0] != mapped[1] && mapped[1] != mapped[2]);
    }

    #[test]
    fn mapped_inode_numbers_resolve_after_restart_in_constant_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids");
        let numbers = [1, DELEGATED, u64::MAX];
        let mapped = {
            let ids = ids(&path);
            let mapped = numbers.map(|n| ids.node(&stat(1, n), refuse).unwrap().ino);
            ids.settle().unwrap();
            mapped
        };
        let ids = ids(&path);
        assert_eq!(mapped.map(|n| ids.on_main(n)), numbers.map(|n| Some((n, None))));
        let first = DELEGATED + 1;
        (first..first + (1 << 17)).for_each(|ino| assert!(ids.number(MAIN, ino, true).is_ok()));
        let last = FOREIGN | MAPPED << 48 | ((1 << 17) + 2);
        assert_eq!(ids.on_main(last), Some((DELEGATED + (1 << 17), None)));
        let begun = std::time::Instant::now();
        for n in 1..=100_000 {
            assert_eq!(ids.on_main(last + n), None);
        }
        assert!(begun.elapsed() < std::time::Duration::from_secs(1), "{:?}", begun.elapsed());
    }

    #[test]
    fn altered_or_foreign_node_ids_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let ids = ids(&dir.path().join("ids"));
        let node = ids.node(&stat(1, 77), refuse).unwrap();
        assert!(ids.is_genuine(node) && node.distinguishes_reuse());
        for bit in 0..64 {
            assert!(!ids.is_genuine(NodeId { generation: node.generation ^ 1 << bit, ..node }), "bit {bit}");
            assert!(!ids.is_genuine(NodeId { ino: node.ino ^ 1 << bit, ..node }), "bit {bit}");
        }
        let (log, records) =
            Log::open(&dir.path().join("other"), Record::Key { version: 1, key: [1; 16] }).unwrap();
        let other = Ids::new(&stat(1, 2), on(1), log, &records, [3; 16]).unwrap();
        let theirs = other.node(&stat(1, 77), refuse).unwrap();
        assert!(other.is_genuine(theirs) && !ids.is_genuine(theirs) && !other.is_genuine(node));
        // Known values, such as the birth time, the time of day or zero, are no valid generations.
        for generation in [0, 5, u64::MAX, 1_700_000_000_123_456_789] {
            assert!(!ids.is_genuine(NodeId { generation, ..node }));
        }
    }

    #[test]
    fn mapped_numbers_and_devices_are_the_same_after_a_restart_and_in_another_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids");
        let node = |ids: &Ids, dev: u32, uuid: u8, ino: u64| {
            ids.add_device((Dev(0, dev), 1, 0), &on(uuid)).unwrap();
            ids.node(&stat(dev, ino), refuse).unwrap()
        };
        let before = {
            let ids = ids(&path);
            let all = [
                node(&ids, 7, 70, 3),
                node(&ids, 8, 80, 3),
                node(&ids, 8, 80, SHORT),
                node(&ids, 7, 70, SHORT),
            ];
            ids.settle().unwrap();
            all
        };
        let ids = ids(&path);
        let mut after = [
            node(&ids, 27, 70, SHORT),
            node(&ids, 28, 80, SHORT),
            node(&ids, 28, 80, 3),
            node(&ids, 27, 70, 3),
        ];
        after.reverse();
        assert_eq!(before, after);
        assert!(before[0] != before[1] && before[2] != before[3]);
        assert_eq!(node(&ids, 30, 1, 9).ino, 9, "the main filesystem mounted once more inside itself");
    }

    #[test]
    fn mount_with_reused_id_is_identified_by_its_filesystem() {
        let dir = tempfile::tempdir().unwrap();
        let ids = ids(&dir.path().join("ids"));
        let of = |uuid| ids.add_device((Dev(0, 7), 1, 0), &on(uuid)).unwrap().index;
        let (one, two) = (of(70), of(80));
        assert_ne!(one, two);
        assert_eq!([of(70), of(80)], [one, two]);
        let root = Stat { known_anew: true, ..stat(7, 3) };
        assert_eq!(ids.node(&root, refuse), Err(Fault(Errno::IO)), "its root is looked at");
        assert_eq!(ids.node(&stat(7, 3), refuse).unwrap().ino, FOREIGN | (two << 48) | 3);
    }
}
