//! What a client limited to one user learns about files that this user cannot access (docs/attacks.md).

mod common;

use common::client::{Client, user_link};
use common::other::{self, Other};
use common::*;
use nigh_native::{TRUSTS_WATCH, UPDATES};
use nigh_remote::Event;
use nigh_server::{Exports, LeaseConfig, Server, ServerOptions, WatchMethod};
use nigh_types::*;
use rustix::fs::IFlags;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

const USER: u32 = 4_000;
const LIMIT: Term = Term::Limited(Span::from_secs(5));

#[test]
fn another_process() {
    other::serve();
}

/// An export with directories of these modes, a client of root and a client of an ordinary user.
struct Stage {
    dir: TempDir,
    _state: TempDir,
    server: Arc<Server>,
    root: Client,
    user: Client,
}

fn stage(directories: &[(&str, u32)]) -> Stage {
    stage_watched_by(WatchMethod::Best, directories)
}

fn stage_watched_by(watch: WatchMethod, directories: &[(&str, u32)]) -> Stage {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for (name, mode) in directories {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("known"), "1").unwrap();
        fs::set_permissions(dir.path().join(name), fs::Permissions::from_mode(*mode)).unwrap();
    }
    let mut exports = Exports::default();
    exports.add(format!("world={}", dir.path().display()).as_ref()).unwrap();
    let options = ServerOptions { exports, watch, ..ServerOptions::new(state.path().to_owned()) };
    let server = Server::new(options).unwrap();
    let mut root = Client::connect(&server, dir.path(), Term::Session);
    root.obliging = true;
    let user = Client::wanting(user_link(&server, USER), Path::new("world"), LIMIT, UPDATES | TRUSTS_WATCH);
    Stage { dir, _state: state, server, root, user }
}

impl Stage {
    /// Makes a change by root's client; returns the recalls of the user's client, which acknowledges them.
    fn change(&mut self, call: Call) -> Vec<Recall> {
        let (call, mut told) = (self.root.send(call), Vec::new());
        eventually("the change is made", || {
            self.user.tick();
            told.extend(self.user.recalls());
            self.user.give_back();
            self.root.is_answered(call)
        });
        assert_eq!(self.root.answer(call).result.map(drop), Ok(()));
        self.user.tick();
        told.extend(self.user.recalls());
        self.user.give_back();
        assert!(
            !self.user.events.iter().any(|event| matches!(event, Event::UpdatePrepare(_))),
            "it takes no pushes"
        );
        told
    }

    /// Lets another process make a change; returns the recalls up to that of a directory lease.
    fn on_disk(&mut self, other: &mut Other, dir: &NodeRef, what: &str) -> Vec<Recall> {
        other.run(what);
        let mut told = Vec::new();
        eventually(what, || {
            self.user.tick();
            told.extend(self.user.recalls());
            self.user.give_back();
            names_of(&told, dir).is_some()
        });
        told
    }

    fn path(&self, path: &str) -> String {
        self.dir.path().join(path).display().to_string()
    }
}

/// Names in recalls of a directory lease; `None`: no such recall.
fn names_of(told: &[Recall], dir: &NodeRef) -> Option<Vec<Name>> {
    let of_names = told.iter().filter(|recall| recall.covers == LeaseScope::Directory);
    assert!(of_names.clone().all(|recall| recall.node == dir.node), "{told:?}");
    (of_names.clone().count() > 0).then(|| of_names.flat_map(|recall| recall.names.clone()).collect())
}

fn create(dir: &NodeRef, text: &str) -> Call {
    Call::Create { dir: dir.clone(), name: name(text), mode: 0o600, umask: 0, exclusive: true, access: BOTH }
}

/// Gets a directory lease by looking up a name that does not exist. Waits until a change counts as no contention.
fn absent(client: &mut Client, dir: &NodeRef) {
    let response = client.call(Call::Lookup { dir: dir.clone(), name: name("absent") });
    assert_eq!(response.result, Ok(Reply::Entry(None)));
    assert!(
        response.grants.iter().any(|grant| (grant.node, grant.covers) == (dir.node, LeaseScope::Directory))
    );
    std::thread::sleep(Duration::from_nanos(LeaseConfig::default().young.0));
}

fn chmod(dir: &NodeRef, mode: u32) -> Call {
    let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
    Call::SetAttr { node: dir.clone(), handle: None, set }
}

#[test]
fn recall_names_nothing_in_directory_that_holder_may_search_and_not_list() {
    if !needs_root("recall_names_nothing_in_directory_that_holder_may_search_and_not_list") {
        return;
    }
    let mut at = stage(&[("closed", 0o711), ("open", 0o755), ("dropbox", 0o733)]);
    let closed = at.user.place("closed");
    let roots = at.root.place("closed");
    assert_eq!(at.user.call(Call::List { dir: closed.clone() }).result, Err(Errno::ACCES));
    absent(&mut at.user, &closed);
    let told = at.change(create(&roots, "secret"));
    assert_eq!(names_of(&told, &closed), Some(vec![]));
    // A recall for attributes of a file would carry its name.
    absent(&mut at.user, &closed);
    let secret = at.root.place("closed/secret");
    let told = at.change(chmod(&secret, 0o640));
    assert_eq!(names_of(&told, &closed), Some(vec![]));
    // The caller may create a name in a directory that it may not list.
    let dropbox = at.user.place("dropbox");
    assert!(at.user.call(create(&dropbox, "own")).result.is_ok());
    let roots = at.root.place("dropbox");
    let told = at.change(create(&roots, "secret"));
    assert_eq!(names_of(&told, &dropbox), Some(vec![]));
    let (open, roots) = (at.user.place("open"), at.root.place("open"));
    absent(&mut at.user, &open);
    let told = at.change(create(&roots, "public"));
    assert_eq!(names_of(&told, &open), Some(vec![name("public")]), "this one it may list");
    assert_eq!(at.server.session_count(), 2);
}

#[test]
fn recall_for_local_change_names_entries_only_to_holders_that_may_list() {
    if !needs_root("recall_for_local_change_names_entries_only_to_holders_that_may_list") {
        return;
    }
    for way in [WatchMethod::Best, WatchMethod::Objects] {
        let mut at = stage_watched_by(way, &[("d", 0o755)]);
        let mut other = Other::start("another_process");
        let d = at.user.place("d");
        absent(&mut at.user, &d);
        // One event each: a later one of a file would be taken for what comes next.
        let make = |at: &Stage, text: &str| format!("mkdir {}", at.path(&format!("d/{text}")));
        let (public, secret, later) = (make(&at, "public"), make(&at, "secret"), make(&at, "later"));
        let told = at.on_disk(&mut other, &d, &public);
        assert_eq!(names_of(&told, &d), Some(vec![name("public")]));
        absent(&mut at.user, &d);
        let close = format!("chmod {} 711", at.path("d"));
        let told = at.on_disk(&mut other, &d, &close);
        assert_eq!(names_of(&told, &d), Some(vec![]), "what was granted ends with the right");
        absent(&mut at.user, &d);
        let told = at.on_disk(&mut other, &d, &secret);
        assert_eq!(names_of(&told, &d), Some(vec![]));
        absent(&mut at.user, &d);
        let open = format!("chmod {} 755", at.path("d"));
        at.on_disk(&mut other, &d, &open);
        absent(&mut at.user, &d);
        let told = at.on_disk(&mut other, &d, &later);
        assert_eq!(names_of(&told, &d), Some(vec![name("later")]));
    }
}

#[test]
fn getattr_by_id_in_directory_that_caller_may_not_list_grants_no_names() {
    if !needs_root("getattr_by_id_in_directory_that_caller_may_not_list_grants_no_names") {
        return;
    }
    let mut at = stage(&[("d", 0o755)]);
    let (d, known) = (at.user.place("d"), at.user.place("d/known"));
    let (roots, f) = (at.root.place("d"), at.root.place("d/known"));
    let names =
        |grants: &[Grant]| grants.iter().filter(|grant| grant.covers == LeaseScope::Directory).count();
    assert_eq!(names(&at.user.attr(&known).1), 1, "one grant for all that it may list");
    let told = at.change(chmod(&roots, 0o700));
    assert_eq!(names_of(&told, &d), Some(vec![]), "what was granted ends with the right");
    let lookup = Call::Lookup { dir: d.clone(), name: name("known") };
    assert_eq!(at.user.call(lookup).result, Err(Errno::ACCES));
    let (_, grants) = at.user.attr(&known);
    assert_eq!(names(&grants), 0);
    assert!(grants.iter().any(|grant| (grant.node, grant.covers) == (known.node, LeaseScope::Attributes)));
    assert_eq!(at.change(create(&roots, "secret")), [], "nothing of that directory is the user's");
    let told = at.change(chmod(&f, 0o600));
    let about: Vec<_> = told.iter().map(|recall| (recall.node, recall.covers)).collect();
    assert_eq!(about, [(known.node, LeaseScope::Attributes)], "its own grant is recalled");
}

#[test]
fn names_in_directory_that_caller_may_not_search_are_refused_whether_they_exist_or_not() {
    if !needs_root("names_in_directory_that_caller_may_not_search_are_refused_whether_they_exist_or_not") {
        return;
    }
    let mut at = stage(&[("d", 0o755), ("own", 0o777)]);
    let (d, own) = (at.user.place("d"), at.user.place("own"));
    fs::set_permissions(at.dir.path().join("d"), fs::Permissions::from_mode(0o700)).unwrap();
    for there in ["known", "absent"] {
        let (dir, name) = (d.clone(), name(there));
        let rename = |from: &NodeRef, to: &NodeRef, name: &Name| Call::Rename {
            from: from.clone(),
            name: name.clone(),
            to: to.clone(),
            new_name: name.clone(),
            no_replace: false,
            exchange: false,
            whiteout: false,
            keep: None,
        };
        for call in [
            Call::Unlink { dir: dir.clone(), name: name.clone(), keep: None },
            Call::Rmdir { dir: dir.clone(), name: name.clone() },
            rename(&dir, &own, &name),
            rename(&own, &dir, &name),
            Call::Mkdir { dir: dir.clone(), name: name.clone(), mode: 0o700, umask: 0 },
        ] {
            let what = call.type_name();
            assert_eq!(at.user.call(call).result, Err(Errno::ACCES), "{what} {there}");
        }
    }
}

#[test]
fn flags_and_fsync_by_id_need_the_right_to_open() {
    if !needs_root("flags_and_fsync_by_id_need_the_right_to_open") {
        return;
    }
    let mut at = stage(&[("d", 0o755)]);
    let known = at.user.place("d/known");
    let d = at.user.place("d");
    let mode = |path: &str, mode| {
        fs::set_permissions(at.dir.path().join(path), fs::Permissions::from_mode(mode)).unwrap();
    };
    let flags = |node: &NodeRef| Call::GetFlags { node: node.clone() };
    let fsync = |node: &NodeRef| Call::Fsync { node: node.clone(), handle: None, data_only: false };
    for (bits, flags_are, fsync_is) in [
        (0o600, Err(Errno::ACCES), Err(Errno::ACCES)),
        (0o622, Err(Errno::ACCES), Ok(Reply::Done)),
        (0o644, Ok(()), Ok(Reply::Done)),
    ] {
        mode("d/known", bits);
        match at.user.call(flags(&known)).result {
            // Some filesystems have no inode flags.
            Err(Errno::NOTTY | Errno::OPNOTSUPP) => assert_eq!(flags_are, Ok(())),
            other => assert_eq!(other.map(drop), flags_are, "{bits:o}"),
        }
        assert_eq!(at.user.call(fsync(&known)).result, fsync_is, "{bits:o}");
    }
    mode("d", 0o711);
    assert_eq!(at.user.call(fsync(&d)).result, Err(Errno::ACCES));
    assert_eq!(at.user.call(fsync(&known)).result, Ok(Reply::Done));
    assert_eq!(at.root.call(fsync(&d)).result, Ok(Reply::Done));
}

#[test]
fn system_xattr_names_are_listed_for_root_and_labels_for_no_client() {
    if !needs_root("system_xattr_names_are_listed_for_root_and_labels_for_no_client") {
        return;
    }
    let mut at = stage(&[("d", 0o755)]);
    let path = at.dir.path().join("d/known");
    let set = |name: &str| {
        let set = rustix::fs::setxattr(&path, name, b"1", rustix::fs::XattrFlags::empty());
        if let Err(errno) = set {
            println!("SKIPPED: {name}: {errno}");
        }
        set.is_ok()
    };
    let has = |client: &mut Client| {
        let d = client.place("d");
        let entry = client.entry(&d, "known");
        let node = client.place("d/known");
        let names = match client.call(Call::Xattrs { node }).result {
            Ok(Reply::Xattrs(set)) => {
                set.items.into_iter().map(|(name, _)| name.to_vec()).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        };
        (entry.no_xattrs, names)
    };
    if set("security.selinux") {
        assert_eq!(has(&mut at.root), (true, vec![]), "a label is nothing that is told");
    }
    if !set("trusted.secret") {
        return;
    }
    assert_eq!(has(&mut at.root), (false, vec![b"trusted.secret".to_vec()]));
    assert_eq!(has(&mut at.user), (false, vec![]));
    assert!(set("user.shown"));
    assert_eq!(has(&mut at.user), (false, vec![b"user.shown".to_vec()]));
}

#[test]
fn append_only_file_is_opened_to_append_and_no_other_way_to_write() {
    if !needs_root("append_only_file_is_opened_to_append_and_no_other_way_to_write") {
        return;
    }
    let x = Exported::new();
    fs::write(x.path("log"), "one").unwrap();
    let set = |flags: IFlags| {
        fs::File::open(x.path("log")).is_ok_and(|file| rustix::fs::ioctl_setflags(&file, flags).is_ok())
    };
    if !set(IFlags::APPEND) {
        return println!("SKIPPED: no append-only flag here");
    }
    let log = x.place("log");
    let open = |access: Access| match x.call(Call::Open { node: log.clone(), access }) {
        Ok(Reply::Opened { handle, .. }) => Ok(handle),
        Err(errno) => Err(errno),
        Ok(other) => panic!("{other:?}"),
    };
    let append = Access { append: true, ..BOTH };
    let write = |handle: Option<Handle>, append: bool| {
        let flags = WriteFlags { append, ..WriteFlags::default() };
        x.call(Call::Write { node: log.clone(), handle, offset: 0, data: b"!".to_vec(), flags })
    };
    let refused = [open(BOTH), open(Access { truncate: true, ..append })];
    let handle = open(append);
    let create =
        Call::Create { dir: x.top(), name: name("log"), mode: 0, umask: 0, exclusive: false, access: append };
    let created = x.call(create).map(drop);
    let written = handle.map(|handle| [write(Some(handle), true), write(Some(handle), false)]);
    let passing = [write(None, true), write(None, false)];
    let text = fs::read_to_string(x.path("log")).unwrap();
    assert!(set(IFlags::empty()));
    assert_eq!(refused, [Err(Errno::PERM), Err(Errno::PERM)]);
    assert_eq!(created, Ok(()));
    let done = |offset| Ok(Reply::Written { offset, count: 1 });
    assert_eq!(written, Ok([done(3), Err(Errno::PERM)]));
    assert_eq!(passing, [done(4), Err(Errno::PERM)]);
    assert_eq!(text, "one!!");
}
