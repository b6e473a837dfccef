//! Files that the server keeps open for later calls take no space from calls that need it.

use crate::common::client::Client;
use crate::common::*;
use nigh_server::{Server, ServerOptions};
use nigh_types::*;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const USER: u32 = 4_000;

/// A small filesystem, exported to two clients of one server.
struct Small {
    dir: TempDir,
    server: Arc<Server>,
    one: Client,
    two: Client,
    root: NodeRef,
    _state: TempDir,
}

impl Drop for Small {
    fn drop(&mut self) {
        self.server.end_sessions("the test is over");
        let _ = Command::new("umount").arg("-l").arg(self.dir.path()).status();
    }
}

/// `None` if it cannot be mounted.
fn small(options: &str) -> Option<Small> {
    if !needs_root("a small filesystem") {
        return None;
    }
    let (dir, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", options, "none"]).arg(dir.path());
    if !mount.output().is_ok_and(|done| done.status.success()) {
        println!("SKIPPED: no tmpfs with {options}");
        return None;
    }
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let server = Server::new(ServerOptions::new(state.path().to_owned())).unwrap();
    let connect = || {
        let mut client = Client::connect(&server, dir.path(), Term::Session);
        client.obliging = true;
        client
    };
    let (mut one, two) = (connect(), connect());
    let root = one.root();
    Some(Small { dir, server, one, two, root, _state: state })
}

impl Small {
    fn call_as(&mut self, who: &Credentials, call: Call) -> Result<Reply, Errno> {
        let call = self.one.send_as(who, call);
        eventually("it is answered", || {
            self.two.tick();
            self.one.is_answered(call)
        });
        self.one.answer(call).result
    }

    fn call(&mut self, call: Call) -> Result<Reply, Errno> {
        self.call_as(&me(), call)
    }

    fn create(&self, text: &str) -> Call {
        let dir = self.root.clone();
        Call::Create { dir, name: name(text), mode: 0o666, umask: 0, exclusive: true, access: BOTH }
    }

    fn made(&mut self, who: &Credentials, text: &str) -> (NodeRef, Option<Handle>) {
        let create = self.create(text);
        match self.call_as(who, create) {
            Ok(Reply::Created { entry, handle, .. }) => {
                (NodeRef { node: entry.id, path_hint: Some((self.root.node, name(text))) }, handle)
            }
            other => panic!("{text}: {other:?}"),
        }
    }

    /// Creates and closes a file that takes `length` bytes.
    fn filled(&mut self, who: &Credentials, text: &str, length: u64) {
        let (node, handle) = self.made(who, text);
        let fill = Call::Fallocate { node, handle, mode: 0, offset: 0, length };
        assert!(matches!(self.call_as(who, fill), Ok(Reply::Attr(..))));
        self.close(handle);
    }

    fn close(&mut self, handle: Option<Handle>) {
        self.one.send(Call::Release { handles: handle.into_iter().collect() });
        self.one.tick();
    }

    fn unlink(&mut self, text: &str) {
        let call = Call::Unlink { dir: self.root.clone(), name: name(text), keep: None };
        assert!(matches!(self.call(call), Ok(Reply::Removed { .. })), "{text}");
    }

    fn replace(&mut self, from: &str, to: &str) {
        let call = Call::Rename {
            from: self.root.clone(),
            name: name(from),
            to: self.root.clone(),
            new_name: name(to),
            no_replace: false,
            exchange: false,
            whiteout: false,
            keep: None,
        };
        assert!(matches!(self.call(call), Ok(Reply::Renamed { .. })));
    }

    fn write(
        &mut self,
        who: &Credentials,
        (node, handle): (&NodeRef, Option<Handle>),
        mib: u64,
    ) -> Result<(), Errno> {
        for at in 0..mib {
            let data = vec![b'x'; MIB as usize];
            let (node, flags) = (node.clone(), WriteFlags::default());
            let call = Call::Write { node, handle, offset: at * MIB, data, flags };
            match self.call_as(who, call)? {
                Reply::Written { count: MIB, .. } => {}
                other => panic!("a short write: {other:?}"),
            }
        }
        Ok(())
    }
}

#[test]
fn space_of_removed_and_replaced_files_is_free_for_the_next_call() {
    let Some(mut at) = small("size=16m") else { return };
    at.filled(&me(), "old", 10 * MIB);
    at.unlink("old");
    let (new, handle) = at.made(&me(), "new");
    assert_eq!(at.write(&me(), (&new, handle), 10), Ok(()), "written");
    at.close(handle);
    at.unlink("new");
    at.filled(&me(), "old", 10 * MIB);
    at.made(&me(), "small");
    at.replace("small", "old");
    at.filled(&me(), "again", 10 * MIB);
    // Copied from a file that stays.
    at.unlink("again");
    at.filled(&me(), "source", 6 * MIB);
    at.filled(&me(), "victim", 8 * MIB);
    at.unlink("victim");
    let (to, to_handle) = at.made(&me(), "copy");
    let source = at.one.place("source");
    let copy = Call::CopyRange {
        from: source,
        from_handle: None,
        from_offset: 0,
        to,
        to_handle,
        to_offset: 0,
        length: 6 * MIB,
    };
    assert!(matches!(at.call(copy), Ok(Reply::Written { count, .. }) if count > 0));
}

#[test]
fn inodes_of_removed_files_are_free_for_the_next_call() {
    let Some(mut at) = small("size=16m,nr_inodes=20") else { return };
    let mut names = Vec::new();
    loop {
        let text = format!("f{}", names.len());
        let create = at.create(&text);
        match at.call(create) {
            Ok(Reply::Created { handle, .. }) => at.close(handle),
            Err(Errno::NOSPC) => break,
            other => panic!("{other:?}"),
        }
        names.push(text);
    }
    let root = at.root.clone();
    let new = |text: &str| (root.clone(), name(text));
    let kept = at.one.place(&names.pop().unwrap());
    let (dir, name) = new("dir");
    let mkdir = Call::Mkdir { dir, name, mode: 0o700, umask: 0 };
    let (dir, name) = new("link");
    let symlink = Call::Symlink { dir, name, target: vec![b'x'; 100] };
    let (dir, name) = new("fifo");
    let mknod = Call::Mknod { dir, name, kind: Kind::Fifo, mode: 0o600, umask: 0, rdev: 0 };
    let (dir, name) = new("second");
    let link = Call::Link { node: kept, dir, name };
    let tmpfile = Call::Tmpfile { dir: root.clone(), mode: 0o600, umask: 0, access: BOTH };
    for call in [at.create("file"), mkdir, symlink, mknod, link, tmpfile] {
        let what = call.type_name();
        assert_eq!(at.call(at.create("none")).map(drop), Err(Errno::NOSPC), "before {what}");
        at.unlink(&names.pop().unwrap());
        let made = at.call(call);
        assert!(matches!(made, Ok(Reply::Created { .. })), "{what}: {made:?}");
    }
}

#[test]
fn quota_of_removed_files_is_free_for_the_next_call() {
    let Some(mut at) = small("size=64m,usrquota,usrquota_block_hardlimit=12m") else { return };
    let who = Credentials { uid: USER, gid: USER, groups: vec![], privileges: None };
    at.filled(&who, "old", 10 * MIB);
    let (new, handle) = at.made(&who, "new");
    assert_eq!(at.write(&who, (&new, handle), 10), Err(Errno::DQUOT));
    at.unlink("old");
    assert_eq!(at.write(&who, (&new, handle), 10), Ok(()));
}

#[test]
fn removed_file_open_in_another_client_stays_when_space_is_needed() {
    let Some(mut at) = small("size=16m") else { return };
    at.filled(&me(), "old", 10 * MIB);
    let old = at.two.place("old");
    let handle = at.two.open(&old, READ);
    at.unlink("old");
    let (new, own) = at.made(&me(), "new");
    assert_eq!(at.write(&me(), (&new, own), 10), Err(Errno::NOSPC));
    let read = Call::Read { node: old, handle: Some(handle), offset: 10 * MIB - 4, length: 9 };
    assert_eq!(at.two.call(read).result, Ok(Reply::Data(vec![0; 4])));
    at.two.send(Call::Release { handles: vec![handle] });
    at.two.tick();
    eventually("its space is there when it is closed", || at.write(&me(), (&new, own), 10) == Ok(()));
}

#[test]
fn partially_fitting_write_completes_after_kept_files_free_space() {
    let Some(mut at) = small("size=16m") else { return };
    at.filled(&me(), "old", 10 * MIB);
    at.unlink("old");
    let (node, handle) = at.made(&me(), "new");
    // 6 MiB were free.
    assert_eq!(at.write(&me(), (&node, handle), 5), Ok(()));
    let data = vec![b'x'; 3 * MIB as usize];
    let call = Call::Write { node, handle, offset: 5 * MIB, data, flags: WriteFlags::default() };
    assert!(matches!(at.call(call), Ok(Reply::Written { count, .. }) if count == 3 * MIB));
    assert_eq!(fs::metadata(Path::new(at.dir.path()).join("new")).unwrap().len(), 8 * MIB);
}
