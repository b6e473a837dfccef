//! Impersonation of callers by the current thread. See docs/decisions/0005-credentials.md.

use crate::os::error::{Fault, Result};
use nigh_types::{Credentials, Errno};
use rustix::fs::Mode;
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::cell::Cell;
use std::os::fd::AsFd;

/// Whether this server can impersonate its callers: it is root with the required capabilities, and may set groups.
pub(crate) fn can_impersonate() -> bool {
    let needed = CapabilitySet::SETUID | CapabilitySet::SETGID | CapabilitySet::CHOWN;
    rustix::process::geteuid().is_root()
        && rustix::thread::capabilities(None).is_ok_and(|c| c.effective.contains(needed))
        && may_set_groups()
}

/// Whether the user namespace permits setgroups(2). A namespace that an unprivileged user made for its own ids
/// forbids it (`unshare -Urm`), whatever capabilities root has in it.
fn may_set_groups() -> bool {
    const TOO_MANY: usize = 65_537; // NGROUPS_MAX + 1
    // SAFETY: the kernel checks permission and this excessive count before it reads any group.
    let result = unsafe { libc::syscall(libc::SYS_setgroups, TOO_MANY, std::ptr::null::<libc::gid_t>()) };
    result != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL)
}

/// Treatment of the setuid and setgid bits of a file whose data the caller changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SetIdBits {
    /// As the kernel treats them for this caller.
    AsForCaller,
    /// Cleared, as for a caller without `CAP_FSETID`.
    Dropped,
    /// Kept, as with a store to a shared mapping, for which Linux clears none.
    Kept,
}

/// Impersonation guard: until dropped, this thread has the caller's filesystem ids and groups. For a caller other
/// than root it has only the given capabilities. Resolve inodes first: with the caller's rights the server may be
/// unable to open them.
pub(crate) struct Impersonation {
    /// The thread's own capabilities; `None` if nothing was changed.
    saved: Option<CapabilitySets>,
}

impl Impersonation {
    /// `held`: capabilities of a caller other than root ([`crate::os::privileged`]).
    pub(crate) fn begin(
        can_act: bool,
        who: &Credentials,
        held: CapabilitySet,
        bits: SetIdBits,
    ) -> Result<Impersonation> {
        if !can_act {
            return Ok(Impersonation { saved: None });
        }
        let own_identity = who.uid == 0 && who.gid == 0 && who.groups.is_empty();
        if own_identity && bits != SetIdBits::Dropped && OWN_GROUPS_EMPTY.get() {
            return Ok(Impersonation { saved: None });
        }
        let capabilities = rustix::thread::capabilities(None)?;
        // If the kernel refuses this, nothing was changed.
        change_groups(&who.groups)?;
        OWN_GROUPS_EMPTY.set(false);
        // From here on, dropping the guard restores every change.
        let acting = Impersonation { saved: Some(capabilities) };
        change_filesystem_ids(who.uid, who.gid)?;
        if who.uid == 0 && bits != SetIdBits::Dropped {
            return Ok(acting);
        }
        let held = if who.uid == 0 { CapabilitySet::all() } else { held };
        let held = match bits {
            SetIdBits::AsForCaller => held,
            SetIdBits::Dropped => held - CapabilitySet::FSETID,
            SetIdBits::Kept => held | CapabilitySet::FSETID,
        };
        let effective = capabilities.effective & held;
        rustix::thread::set_capabilities(None, CapabilitySets { effective, ..capabilities })?;
        Ok(acting)
    }
}

impl Drop for Impersonation {
    fn drop(&mut self) {
        let Some(own) = self.saved else { return };
        let restored = rustix::thread::set_capabilities(None, own)
            .map_err(Fault::from)
            .and_then(|()| change_filesystem_ids(0, 0))
            .and_then(|()| change_groups(&[]));
        // Continuing as another user would execute other calls with that user's rights.
        assert!(restored.is_ok(), "could not take back the server's own credentials: {restored:?}");
        // Setting fsuid 0 raises filesystem capabilities from the permitted set; restore exactly the former ones.
        let exact = rustix::thread::set_capabilities(None, own);
        assert!(exact.is_ok(), "could not take back the server's own capabilities: {exact:?}");
        OWN_GROUPS_EMPTY.set(true);
    }
}

thread_local! {
    /// Whether this thread is known to have no supplementary groups.
    static OWN_GROUPS_EMPTY: Cell<bool> = const { Cell::new(false) };
    static OWN_UMASK: Cell<Option<u32>> = const { Cell::new(None) };
    static OWN_FS: Cell<bool> = const { Cell::new(false) };
}

fn change_groups(groups: &[u32]) -> Result<()> {
    // libc's wrapper would change all threads.
    // SAFETY: pointer and count are of one live slice.
    let result = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}

fn change_filesystem_ids(uid: u32, gid: u32) -> Result<()> {
    // An id of all ones queries the present one and changes nothing.
    if uid == u32::MAX || gid == u32::MAX {
        return Err(Fault(Errno::INVAL));
    }
    // SAFETY: the calls take integers and return the previous id; a second call shows whether the change took effect.
    let taken = unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
        (libc::syscall(libc::SYS_setfsuid, u32::MAX), libc::syscall(libc::SYS_setfsgid, u32::MAX))
    };
    let same = |got: libc::c_long, wanted: u32| u32::try_from(got & 0xffff_ffff) == Ok(wanted);
    if same(taken.0, uid) && same(taken.1, gid) { Ok(()) } else { Err(Fault(Errno::PERM)) }
}

/// Sets a umask of this thread only, so that the kernel itself chooses between umask and default ACL.
pub(crate) fn use_umask(mask: u32) -> Result<()> {
    let mask = mask & 0o777;
    if OWN_UMASK.get() != Some(mask) {
        unshare_fs()?;
        rustix::process::umask(Mode::from_raw_mode(mask));
        OWN_UMASK.set(Some(mask));
    }
    Ok(())
}

/// Working-directory guard: until dropped, relative names of this thread start at a directory; afterwards at `/`.
pub(crate) struct WorkingDirGuard(());

impl WorkingDirGuard {
    pub(crate) fn enter(dir: impl AsFd) -> Result<WorkingDirGuard> {
        unshare_fs()?;
        rustix::process::fchdir(dir)?;
        Ok(WorkingDirGuard(()))
    }
}

impl Drop for WorkingDirGuard {
    fn drop(&mut self) {
        // Staying would only keep the directory's filesystem busy.
        let _ = rustix::process::chdir(c"/");
    }
}

/// Gives this thread its own umask and working directory.
fn unshare_fs() -> Result<()> {
    if OWN_FS.get() {
        return Ok(());
    }
    // SAFETY: CLONE_FS ends the sharing of umask and working directory, on which Rust does not rely.
    if unsafe { libc::unshare(libc::CLONE_FS) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    OWN_FS.set(true);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn impersonation_creates_files_of_the_caller_and_ends_with_its_guard() {
        if !can_impersonate() {
            println!("SKIPPED: needs root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let who = Credentials { uid: 1000, gid: 1001, groups: vec![1002], privileges: None };
        {
            let _acting =
                Impersonation::begin(true, &who, CapabilitySet::empty(), SetIdBits::AsForCaller).unwrap();
            std::fs::write(dir.path().join("theirs"), "").unwrap();
            assert!(rustix::thread::capabilities(None).unwrap().effective.is_empty());
            assert!(std::fs::read("/proc/1/environ").is_err());
        }
        std::fs::write(dir.path().join("ours"), "").unwrap();
        let theirs = std::fs::metadata(dir.path().join("theirs")).unwrap();
        assert_eq!((theirs.uid(), theirs.gid()), (1000, 1001));
        assert_eq!(std::fs::metadata(dir.path().join("ours")).unwrap().uid(), 0);
        assert!(can_impersonate());
    }

    #[test]
    fn impersonation_with_capabilities_has_exactly_these() {
        if !can_impersonate() {
            println!("SKIPPED: needs root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let who = Credentials { uid: 1000, gid: 1001, groups: vec![], privileges: None };
        let held = CapabilitySet::DAC_OVERRIDE | CapabilitySet::FSETID;
        let effective = || rustix::thread::capabilities(None).unwrap().effective;
        let own = effective();
        {
            let _acting = Impersonation::begin(true, &who, held, SetIdBits::AsForCaller).unwrap();
            assert_eq!(effective(), held);
            std::fs::write(dir.path().join("theirs"), "").unwrap();
            assert!(std::os::unix::fs::chown(dir.path().join("theirs"), Some(5), None).is_err());
        }
        assert_eq!(effective(), own);
        {
            let _acting = Impersonation::begin(true, &who, held, SetIdBits::Dropped).unwrap();
            assert_eq!(effective(), CapabilitySet::DAC_OVERRIDE, "bits are to fall");
        }
        let theirs = std::fs::metadata(dir.path().join("theirs")).unwrap();
        assert_eq!((theirs.uid(), theirs.gid()), (1000, 1001));
    }

    #[test]
    fn server_whose_user_namespace_forbids_setgroups_does_not_act_as_others() {
        const CHILD: &str = "NIGH_TEST_IN_A_USER_NAMESPACE";
        if std::env::var_os(CHILD).is_some() {
            assert!(rustix::process::geteuid().is_root());
            assert!(!can_impersonate());
            return;
        }
        let this = "impersonate::tests::server_whose_user_namespace_forbids_setgroups_does_not_act_as_others";
        let mut unshare = std::process::Command::new("unshare");
        let tests = std::env::current_exe().unwrap();
        let ran = unshare.arg("-Ur").arg(tests).args(["--exact", this]).env(CHILD, "1").output();
        let Ok(ran) = ran else { return println!("SKIPPED: needs unshare(1)") };
        let said = String::from_utf8_lossy(&ran.stderr);
        if said.contains("unshare failed") {
            return println!("SKIPPED: no user namespace: {said}");
        }
        assert!(ran.status.success(), "{}{said}", String::from_utf8_lossy(&ran.stdout));
    }

    #[test]
    fn umask_change_affects_only_its_thread() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        std::thread::spawn(move || {
            use_umask(0o077).unwrap();
            std::fs::write(path.join("masked"), "").unwrap();
        })
        .join()
        .unwrap();
        std::fs::write(dir.path().join("plain"), "").unwrap();
        let mode = |name: &str| std::fs::metadata(dir.path().join(name)).unwrap().mode() & 0o777;
        assert_eq!(mode("masked"), 0o600);
        assert_ne!(mode("plain"), 0o600);
    }
}
