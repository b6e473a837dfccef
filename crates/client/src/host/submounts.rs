//! Mounts and overlay layers below the mount, from `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use nigh_fuse::mount::Mount;
use nigh_types::Name;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The mount points below one mount and the overlays with a layer in it, as of the last check.
#[derive(Default)]
pub struct Submounts {
    /// Polls as `PRI` after mounts have changed; `None` if it cannot be read.
    table: Option<File>,
    own: Option<PathBuf>,
    /// Path components from the mount's root to each mount point.
    mounts: Vec<Vec<Vec<u8>>>,
    /// Whether an overlay has a layer here.
    has_layer: bool,
}

impl Submounts {
    /// `own`: where the mount is.
    pub(super) fn below(own: PathBuf) -> Submounts {
        let table = File::open("/proc/self/mountinfo").ok();
        let mut below = Submounts { table, own: Some(own), ..Submounts::none() };
        below.read();
        below
    }

    /// No mounts, at any time: nothing is mounted here, or the mounts of the callers' machine cannot be read.
    pub fn none() -> Submounts {
        Submounts::default()
    }

    /// Reads the mount table again if mounts have changed; cheap otherwise.
    pub fn refresh(&mut self) {
        if self.has_changed() {
            self.read();
        }
    }

    pub fn is_empty(&self) -> bool {
        self.mounts.is_empty()
    }

    /// Whether an overlay has a layer here. Finds overlays that this process can see, with absolute paths in their
    /// options.
    pub fn has_layer(&self) -> bool {
        self.has_layer
    }

    /// Whether a path from the mount's root is a mount point, or leads to one.
    pub fn leads_to_mount(&self, path: &[Name]) -> bool {
        self.mounts.iter().any(|mount| {
            mount.len() >= path.len() && path.iter().zip(mount).all(|(a, b)| a.as_bytes() == b.as_slice())
        })
    }

    /// Waits until mounts have changed (and reads them), or `other` is readable.
    pub fn wait(&mut self, other: BorrowedFd<'_>) {
        let mut polled = vec![PollFd::from_borrowed_fd(other, PollFlags::IN)];
        polled.extend(self.table.as_ref().map(|table| PollFd::new(table, PollFlags::PRI)));
        // If interrupted, the caller checks and waits again.
        let _ = rustix::event::poll(&mut polled, None);
        let changed = polled.get(1).is_some_and(|table| !table.revents().is_empty());
        if changed {
            self.read();
        }
    }

    fn has_changed(&self) -> bool {
        let Some(table) = &self.table else { return false };
        let mut polled = [PollFd::new(table, PollFlags::PRI)];
        rustix::event::poll(&mut polled, Some(&AT_ONCE)) != Ok(0)
    }

    fn read(&mut self) {
        let Some(own) = &self.own else { return };
        let all = nigh_fuse::mount::mounts();
        self.has_layer = all.iter().any(|mount| is_layered_on(mount, own));
        let below = all.into_iter().filter_map(|mount| {
            let rest = mount.mountpoint.strip_prefix(own).ok()?.to_owned();
            let names = rest.components().map(|name| name.as_os_str().as_bytes().to_vec());
            Some(names.collect::<Vec<_>>())
        });
        self.mounts = below.filter(|names| !names.is_empty()).collect();
    }
}

/// Whether a mount is an overlay with a layer at or below a path (`lowerdir=`, `lowerdir+=`, `datadir+=`, `upperdir=`).
fn is_layered_on(mount: &Mount, path: &Path) -> bool {
    let options = mount.options.as_bytes();
    let paths = options.split(|byte| matches!(byte, b',' | b':' | b'='));
    mount.fstype == "overlay" && paths.map(OsStr::from_bytes).any(|at| Path::new(at).starts_with(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(names: &[&str]) -> Vec<Name> {
        names.iter().map(|name| Name::new(name.as_bytes()).unwrap()).collect()
    }

    #[test]
    fn path_to_a_submount_is_distinguished_from_other_paths() {
        let mounts = vec![vec![b"a".to_vec(), b"b".to_vec()]];
        let below = Submounts { mounts, ..Submounts::none() };
        for (names, wanted) in [
            (&["a"][..], true),
            (&["a", "b"], true),
            (&["a", "b", "c"], false),
            (&["b"], false),
            (&["a", "c"], false),
        ] {
            assert_eq!(below.leads_to_mount(&path(names)), wanted, "{names:?}");
        }
    }

    #[test]
    fn overlay_is_known_by_the_paths_of_its_layers() {
        let mount = |fstype: &str, options: &str| Mount {
            id: 1,
            parent: 1,
            device: (0, 1),
            mountpoint: "/over".into(),
            fstype: fstype.to_owned(),
            source: "over".into(),
            options: options.into(),
        };
        for (options, wanted) in [
            ("rw,lowerdir=/a:/mnt/nigh/lower,upperdir=/b,workdir=/c", true),
            ("rw,lowerdir=/a,upperdir=/mnt/nigh,workdir=/c", true),
            ("rw,lowerdir+=/mnt/nigh/x,lowerdir+=/y", true),
            ("rw,lowerdir=/mnt/nigher:/mnt,upperdir=mnt/nigh", false),
        ] {
            assert_eq!(
                is_layered_on(&mount("overlay", options), Path::new("/mnt/nigh")),
                wanted,
                "{options}"
            );
            assert!(!is_layered_on(&mount("ext4", options), Path::new("/mnt/nigh")));
        }
    }

    #[test]
    fn mounts_of_this_machine_are_below_its_root_and_a_quiet_table_is_not_read_again() {
        let mut below = Submounts::below(PathBuf::from("/"));
        assert!(below.leads_to_mount(&path(&["proc"])) && !below.is_empty());
        below.mounts.clear();
        if !below.has_changed() {
            below.refresh();
            assert!(below.is_empty());
        }
        assert!(Submounts::below(PathBuf::from("/proc/self")).is_empty());
        assert!(Submounts::none().is_empty());
    }

    #[test]
    fn submount_wait_ends_when_the_other_descriptor_is_readable() {
        let wake = rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        Submounts::none().wait(std::os::fd::AsFd::as_fd(&wake));
        Submounts::below(PathBuf::from("/")).wait(std::os::fd::AsFd::as_fd(&wake));
    }
}
