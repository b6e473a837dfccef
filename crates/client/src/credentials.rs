//! Credentials of callers. See docs/decisions/0005-credentials.md.

use crate::host::{Host, LocalHost, ThreadCredentials, UserNamespace};
use nigh_cache::Caller;
use nigh_types::{Call, Credentials, Privileges};
use parking_lot::Mutex;
use std::sync::Arc;

mod table;

use table::CredentialsTable;

/// Capabilities (linux/capability.h).
const FSETID: u64 = 1 << 4;
const SYS_ADMIN: u64 = 1 << 21;
const SYS_RESOURCE: u64 = 1 << 24;
const MKNOD: u64 = 1 << 27;
/// Capabilities that apply to inodes of a user namespace: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID,
/// SETFCAP. The server checks further.
const OVER_INODES: u64 = 0b1111 | FSETID | 1 << 31;
/// File capabilities that only the machine's initial user namespace grants.
const OF_MACHINE: u64 = SYS_ADMIN | SYS_RESOURCE | MKNOD;

/// Determines the credentials of calls.
pub(crate) struct Callers {
    host: Arc<dyn Host>,
    /// The user namespace of this mount, if callers' capabilities are sent: the server accepts them, ids are not
    /// mapped, and the namespace is the machine's initial one.
    namespace: Option<UserNamespace>,
    /// Whether the mount may be idmapped: then the kernel sends ids only with creations, those of the new inode's
    /// owner.
    idmapped: bool,
    /// Credentials of the callers that opened files, where the server reads each file with the rights of the caller.
    openers: Option<Mutex<CredentialsTable>>,
}

/// The id that the kernel sends when it sends none (`FUSE_INVALID_UIDGID`).
const UNKNOWN_ID: u32 = u32::MAX;
/// The overflow id on the server.
const OVERFLOW_ID: u32 = 65_534;
/// Capabilities for what the kernel has checked itself, when it sends no ids or others than the caller's: all but
/// reserved blocks, quotas, and mode bits that a write clears.
const CHECKED: u64 = OVER_INODES | SYS_ADMIN | MKNOD;

impl Callers {
    /// `told`: the server accepts the capabilities of callers, and uses this side's ids.
    pub(crate) fn new(host: Arc<dyn Host>, told: bool) -> Callers {
        let own = if told { host.own_user_namespace() } else { None };
        let namespace = own.filter(|own| own.is_initial());
        Callers { host, namespace, idmapped: false, openers: None }
    }

    /// Sets whether callers that open files are identified ([`Callers::identified`]).
    #[must_use]
    pub(crate) fn identifying(self, identifies: bool) -> Callers {
        Callers { openers: identifies.then(Mutex::default), ..self }
    }

    /// Adds the number of its credentials to a caller that waits for a request. None is added if its thread is not visible
    /// or acts with other ids than its own.
    pub(crate) fn identified(&self, caller: Caller) -> Caller {
        let Some(openers) = self.openers.as_ref().filter(|_| !self.idmapped) else { return caller };
        let status = self.host.credentials(caller.pid);
        if status.filesystem_ids() != Some((caller.uid, caller.gid)) {
            return caller;
        }
        let mut groups = status.groups();
        groups.sort_unstable();
        let credentials = Credentials { uid: caller.uid, gid: caller.gid, groups, privileges: None };
        Caller { credentials: openers.lock().number_of(credentials), ..caller }
    }

    /// Whether the server trusts the checks of this machine's kernel.
    pub(crate) fn are_trusted(&self) -> bool {
        self.namespace.is_some()
    }

    /// Sets whether the mount may be idmapped.
    #[must_use]
    pub(crate) fn idmapped(self, idmapped: bool) -> Callers {
        Callers { idmapped, ..self }
    }

    /// The caller's ids, with its thread's supplementary groups and capabilities over files. If the thread is not
    /// visible (any more), the credentials of its number, or else only the group sent with the request.
    pub(crate) fn credentials(&self, caller: Caller, call: &Call) -> Credentials {
        if let (0, Some(number), Some(openers)) = (caller.pid, caller.credentials, &self.openers)
            && let Some(known) = openers.lock().credentials(number)
        {
            return known.clone();
        }
        let status = self.host.credentials(caller.pid);
        if self.idmapped {
            return self.checked_by_kernel(caller, call, &status);
        }
        let mut groups = status.groups();
        groups.extend(caller.group.filter(|group| !groups.contains(group)));
        // Root needs none. If the kernel acts with other ids than the thread's, the thread's capabilities do not apply.
        let acts_as_itself = status.filesystem_ids() == Some((caller.uid, caller.gid));
        let privileges =
            if caller.uid == 0 || !acts_as_itself { None } else { self.privileges(caller.pid, &status) };
        Credentials { uid: caller.uid, gid: caller.gid, groups, privileges: privileges.map(Box::new) }
    }

    /// Credentials for a mount that may be idmapped. The kernel checked the call with other ids than the thread's.
    /// Access to reserved blocks, and whether setuid bits survive a write, depend on the thread's capabilities on the
    /// machine alone.
    fn checked_by_kernel(&self, caller: Caller, call: &Call, status: &ThreadCredentials) -> Credentials {
        let is_of_machine =
            self.namespace.is_some() && self.host.user_namespace(caller.pid) == self.namespace;
        let own = if is_of_machine { status.capabilities() } else { 0 };
        let capabilities = match call {
            Call::Write { .. } | Call::Fallocate { .. } | Call::CopyRange { .. } => {
                own & (SYS_RESOURCE | FSETID)
            }
            _ => CHECKED | own & SYS_RESOURCE,
        };
        let (uid, gid) = match (caller.uid, caller.gid) {
            (UNKNOWN_ID, _) | (_, UNKNOWN_ID) => (OVERFLOW_ID, OVERFLOW_ID),
            told => told,
        };
        let privileges = Some(Box::new(Privileges::over_all(capabilities)));
        Credentials { uid, gid, groups: Vec::from_iter(caller.group), privileges }
    }

    fn privileges(&self, pid: u32, status: &ThreadCredentials) -> Option<Privileges> {
        let own = self.namespace?;
        let capabilities =
            Some(status.capabilities() & (OVER_INODES | OF_MACHINE)).filter(|set| *set != 0)?;
        if self.host.user_namespace(pid)? == own {
            return Some(Privileges::over_all(capabilities));
        }
        let (users, groups) = self.host.mapped_ids(pid);
        Some(Privileges { capabilities: capabilities & OVER_INODES, users, groups })
    }
}

/// Credentials of the mount itself, which runs on this machine wherever its callers do.
pub(crate) fn own() -> Credentials {
    Credentials {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: LocalHost.credentials(std::process::id()).groups(),
        privileges: None,
    }
}

/// Whether a local filesystem would list system xattrs (`trusted.`) to this thread: it has `CAP_SYS_ADMIN` in the
/// initial user namespace. False for a thread that is not visible.
pub(crate) fn sees_privileged_xattrs(host: &dyn Host, pid: u32) -> bool {
    host.credentials(pid).capabilities() & SYS_ADMIN != 0
        && host.user_namespace(pid).is_some_and(UserNamespace::is_initial)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::NoHost;
    use crate::host::test_host::{absent, local};
    use nigh_types::{Handle, NodeId, NodeRef};

    const LOOK: Call = Call::Release { handles: Vec::new() };

    #[test]
    fn idmapped_mount_sends_owner_ids_for_creations_and_the_overflow_id_otherwise() {
        let callers =
            Callers { host: local(), namespace: Some(UserNamespace::UNUSED), idmapped: true, openers: None };
        let pid = std::process::id();
        let ask = |uid, gid, call: &Call| {
            callers.credentials(Caller { uid, gid, pid, group: Some(7), credentials: None }, call)
        };
        let made = ask(1001, 1002, &LOOK);
        assert_eq!((made.uid, made.gid, made.groups), (1001, 1002, vec![7]));
        let other = ask(UNKNOWN_ID, UNKNOWN_ID, &LOOK);
        assert_eq!((other.uid, other.gid), (OVERFLOW_ID, OVERFLOW_ID));
        assert_eq!(other.privileges, Some(Box::new(Privileges::over_all(CHECKED))), "not of this namespace");
        let handle = Some(Handle(1));
        let node = NodeRef::without_hint(NodeId { ino: 1, generation: 1 });
        let write = Call::Fallocate { node, handle, mode: 0, offset: 0, length: 1 };
        assert_eq!(ask(UNKNOWN_ID, UNKNOWN_ID, &write).privileges, Some(Box::new(Privileges::over_all(0))));
    }

    #[test]
    fn caller_with_other_filesystem_ids_than_its_thread_has_no_capabilities() {
        let callers = Callers {
            host: local(),
            namespace: LocalHost.own_user_namespace(),
            idmapped: false,
            openers: None,
        };
        let (pid, own) = (std::process::id(), own());
        let capable = LocalHost.credentials(pid).capabilities() & (OVER_INODES | OF_MACHINE) != 0;
        let ask =
            |uid, gid| callers.credentials(Caller { uid, gid, pid, ..Caller::default() }, &LOOK).privileges;
        assert_eq!(ask(own.uid, own.gid).is_some(), capable && own.uid != 0);
        assert_eq!(ask(own.uid + 1, own.gid), None);
        assert_eq!(ask(own.uid, own.gid + 1), None);
    }

    #[test]
    fn capabilities_are_sent_only_to_servers_that_accept_them() {
        assert_eq!(Callers::new(local(), false).namespace, None);
    }

    #[test]
    fn group_sent_with_the_request_is_added_to_the_callers_groups() {
        let groups = |pid, group| {
            let caller = Caller { pid, group, ..Caller::default() };
            Callers::new(local(), false).credentials(caller, &LOOK).groups
        };
        assert_eq!(groups(0, Some(33)), [33]);
        let own = groups(std::process::id(), None);
        let stranger = own.iter().max().map_or(7, |most| most + 1);
        assert_eq!(groups(std::process::id(), Some(stranger)).len(), own.len() + 1);
        for known in &own {
            assert_eq!(groups(std::process::id(), Some(*known)), own);
        }
    }

    /// Its number may be that of a privileged program of this machine.
    #[test]
    fn caller_without_a_host_has_no_groups_or_capabilities_but_those_of_its_request() {
        let callers = Callers::new(absent(), true);
        assert!(!callers.are_trusted());
        let pid = std::process::id();
        let caller = Caller { uid: own().uid, gid: own().gid, pid, group: Some(33), credentials: None };
        let wanted = Credentials { uid: caller.uid, gid: caller.gid, groups: vec![33], privileges: None };
        assert_eq!(callers.credentials(caller, &LOOK), wanted);
        assert!(!sees_privileged_xattrs(&NoHost, pid));
    }

    #[test]
    fn thread_without_capability_or_out_of_sight_sees_no_privileged_xattrs() {
        assert!(!sees_privileged_xattrs(&LocalHost, 0));
        assert!(!sees_privileged_xattrs(&LocalHost, u32::MAX));
        let own = std::process::id();
        let initial = LocalHost.own_user_namespace().is_some_and(UserNamespace::is_initial);
        let capable = rustix::thread::capabilities(None)
            .is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::SYS_ADMIN));
        assert_eq!(sees_privileged_xattrs(&LocalHost, own), initial && capable);
        let Ok(mut plain) = std::process::Command::new("setpriv")
            .args(["--inh-caps=-all", "--reuid=65534", "--regid=65534", "--clear-groups", "sleep", "30"])
            .spawn()
        else {
            return println!("SKIPPED: no setpriv");
        };
        // Until it executes the program, the child has this process's credentials.
        let begun = std::time::Instant::now();
        let comm = format!("/proc/{}/comm", plain.id());
        while std::fs::read_to_string(&comm).is_ok_and(|name| name != "sleep\n")
            && begun.elapsed() < std::time::Duration::from_secs(20)
        {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let seen = sees_privileged_xattrs(&LocalHost, plain.id());
        let _ = plain.kill();
        plain.wait().unwrap();
        assert!(!seen);
    }

    #[test]
    fn own_groups_are_those_of_the_process() {
        let wanted: Vec<u32> = rustix::process::getgroups().unwrap().iter().map(|g| g.as_raw()).collect();
        let mut seen = own().groups;
        let mut wanted = wanted;
        seen.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(seen, wanted);
    }
}
