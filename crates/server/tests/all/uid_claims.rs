//! Attacks by peers that claim other users' ids, or use ids that they were never given. Run as root, with peer
//! credentials from the kernel.

use crate::common::client::{Client, find, top};
use crate::common::*;
use nigh_link::{Claims, Peer, Squash};
use nigh_server::{Exports, Server, ServerOptions, unix_peer};
use nigh_types::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

const SOON: Term = Term::Limited(Span::from_secs(5));
const USER: u32 = 4_000;
const OTHER: u32 = 4_001;
const GROUP: u32 = 4_100;
/// A group that the peer is not a member of.
const FOREIGN: u32 = 4_200;

struct World {
    server: Arc<Server>,
    dir: TempDir,
    _state: TempDir,
}

fn ids(uid: u32, gid: u32, groups: &[u32]) -> Credentials {
    Credentials { uid, gid, groups: groups.to_vec(), privileges: None }
}

/// Runs `act` on a new thread with this user's credentials.
fn as_user<T: Send>(who: &Credentials, act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let Credentials { uid, gid, groups, .. } = who;
            // SAFETY: the raw calls change this thread alone, which ends with the closure.
            unsafe {
                assert_eq!(libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()), 0);
                assert_eq!(libc::syscall(libc::SYS_setresgid, *gid, *gid, *gid), 0);
                assert_eq!(libc::syscall(libc::SYS_setresuid, *uid, *uid, *uid), 0);
            }
            act()
        });
        thread.join().unwrap()
    })
}

impl World {
    fn new() -> World {
        let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut exports = Exports::default();
        exports.add(format!("world={}", dir.path().display()).as_ref()).unwrap();
        let options = ServerOptions { exports, ..ServerOptions::new(state.path().to_owned()) };
        let server = Server::new(options).unwrap();
        let world = World { server, dir, _state: state };
        fs::set_permissions(world.dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        for (name, owner) in [("roots", 0), ("others", OTHER), ("own", USER)] {
            fs::write(world.path(name), "secret").unwrap();
            chown(world.path(name), Some(owner), Some(owner)).unwrap();
            fs::set_permissions(world.path(name), fs::Permissions::from_mode(0o600)).unwrap();
        }
        fs::write(world.path("foreign"), "secret").unwrap();
        chown(world.path("foreign"), Some(0), Some(FOREIGN)).unwrap();
        fs::set_permissions(world.path("foreign"), fs::Permissions::from_mode(0o060)).unwrap();
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn client(&self, stream: UnixStream) -> Client {
        Client::wanting(stream, Path::new("world"), SOON, 0)
    }

    /// Serves a connection whose peer the kernel identifies.
    fn serve(&self, ours: UnixStream) {
        let peer = unix_peer(nigh_link::unix::credentials(&ours).unwrap(), Squash::None).unwrap();
        let server = Arc::clone(&self.server);
        std::thread::spawn(move || server.serve_link(ours.into(), peer));
    }

    /// Connects a client with the rights of `peer`.
    fn connect_as(&self, peer: Peer) -> Client {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let server = Arc::clone(&self.server);
        std::thread::spawn(move || server.serve_link(ours.into(), peer));
        self.client(theirs)
    }

    /// Connects as this user through a listener.
    fn connect_through_listener(&self, who: &Credentials) -> Client {
        let place = tempfile::tempdir().unwrap();
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let path = place.path().join("s.sock");
        let listener = UnixListener::bind(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        let theirs = as_user(who, || UnixStream::connect(&path).unwrap());
        self.serve(listener.accept().unwrap().0);
        self.client(theirs)
    }

    /// Connects as this user through a socket pair that the user made.
    fn connect_through_pair(&self, who: &Credentials) -> Client {
        let (theirs, ours) = as_user(who, || UnixStream::pair().unwrap());
        self.serve(ours);
        self.client(theirs)
    }
}

/// Returns owner and group of a directory made on behalf of `claimed`.
fn made_by(world: &World, client: &mut Client, claimed: &Credentials, text: &str) -> (u32, u32) {
    let call = Call::Mkdir { dir: top(client), name: name(text), mode: 0o700, umask: 0 };
    let made = client.call_as(claimed, call);
    assert!(made.result.is_ok(), "{made:?}");
    let found = fs::metadata(world.path(text)).unwrap();
    (found.uid(), found.gid())
}

/// Tries every way to access the contents of a file; returns all results.
fn attempts(client: &mut Client, claimed: &Credentials, text: &str) -> Vec<Result<Reply, Errno>> {
    let node = find(client, text);
    let own = find(client, "own");
    let copy = |from: &NodeRef, to: &NodeRef| Call::CopyRange {
        from: from.clone(),
        from_handle: None,
        from_offset: 0,
        to: to.clone(),
        to_handle: None,
        to_offset: 0,
        length: 6,
    };
    let set = |set| Call::SetAttr { node: node.clone(), handle: None, set };
    let lock = |flock, kind| {
        let (start, end, wait, pid) = (0, u64::MAX, false, 1);
        Call::Lock { node: node.clone(), owner: 1, flock, kind, start, end, wait, pid, reclaim: false }
    };
    let calls = [
        lock(false, LockKind::Write),
        lock(false, LockKind::Read),
        lock(true, LockKind::Write),
        lock(true, LockKind::Read),
        Call::GetLock {
            node: node.clone(),
            owner: 1,
            flock: false,
            kind: LockKind::Write,
            start: 0,
            end: u64::MAX,
        },
        Call::Open { node: node.clone(), access: READ },
        Call::Open { node: node.clone(), access: BOTH },
        Call::Read { node: node.clone(), handle: None, offset: 0, length: 6 },
        Call::Seek { node: node.clone(), handle: None, offset: 0, data: true },
        Call::Write {
            node: node.clone(),
            handle: None,
            offset: 0,
            data: b"forged".to_vec(),
            flags: WriteFlags::default(),
        },
        Call::Fallocate { node: node.clone(), handle: None, mode: 0, offset: 0, length: 100 },
        copy(&node, &own),
        copy(&own, &node),
        set(SetAttr { size: Some(0), ..SetAttr::default() }),
        set(SetAttr { mode: Some(0o666), ..SetAttr::default() }),
        set(SetAttr { uid: Some(USER), ..SetAttr::default() }),
        Call::Unlink { dir: top(client), name: name(text), keep: Some(node.node) },
    ];
    calls.into_iter().map(|call| client.call_as(claimed, call).result).collect()
}

/// Checks that no attempt reached the file.
fn refused(world: &World, client: &mut Client, claimed: &Credentials, text: &str) {
    let before = fs::metadata(world.path(text)).unwrap();
    for (at, result) in attempts(client, claimed, text).into_iter().enumerate() {
        assert!(
            matches!(result, Err(Errno::ACCES | Errno::PERM)),
            "attempt {at} on {text} as {claimed:?}: {result:?}"
        );
    }
    let after = fs::metadata(world.path(text)).unwrap();
    assert_eq!(fs::read(world.path(text)).unwrap(), b"secret");
    assert_eq!((before.uid(), before.mode(), before.len()), (after.uid(), after.mode(), after.len()));
}

#[test]
fn unix_socket_user_acts_as_itself_for_any_claimed_uid() {
    if !needs_root("unix_socket_user_acts_as_itself_for_any_claimed_uid") {
        return;
    }
    let world = World::new();
    let user = ids(USER, USER, &[GROUP]);
    let clients = [world.connect_through_listener(&user), world.connect_through_pair(&user)];
    for (at, mut client) in clients.into_iter().enumerate() {
        let forged = [
            ids(0, 0, &[]),
            ids(OTHER, OTHER, &[]),
            ids(USER, FOREIGN, &[FOREIGN]),
            ids(USER, 0, &[0, FOREIGN]),
            ids(0, USER, &[GROUP]),
        ];
        for (number, claimed) in forged.iter().enumerate() {
            assert_eq!(made_by(&world, &mut client, claimed, &format!("d{at}-{number}")), (USER, USER));
            for text in ["roots", "others", "foreign"] {
                refused(&world, &mut client, claimed, text);
            }
        }
        assert_eq!(client.session().ids.acts_as, (USER, USER));
        // What the peer may do.
        assert_eq!(made_by(&world, &mut client, &ids(USER, GROUP, &[]), &format!("g{at}")), (USER, GROUP));
        let own = find(&mut client, "own");
        let read = Call::Read { node: own, handle: None, offset: 0, length: 6 };
        assert!(
            matches!(client.call_as(&ids(9, 9, &[]), read).result, Ok(Reply::Data(data)) if data == b"secret")
        );
    }
}

fn with_all_capabilities(who: &Credentials) -> Credentials {
    Credentials { privileges: Some(Box::new(Privileges::over_all(u64::MAX))), ..who.clone() }
}

#[test]
fn capabilities_claimed_by_an_unvouched_peer_give_no_rights() {
    if !needs_root("capabilities_claimed_by_an_unvouched_peer_give_no_rights") {
        return;
    }
    let world = World::new();
    let user = ids(USER, USER, &[GROUP]);
    let token = Peer::new("test".to_owned(), Claims::Only(user.clone()), Squash::Root);
    let trusted = Peer::new("test".to_owned(), Claims::Any, Squash::Root);
    let nobody = Peer::new("test".to_owned(), Claims::Any, Squash::All);
    let clients = [
        world.connect_through_listener(&user),
        world.connect_as(token),
        world.connect_as(trusted),
        world.connect_as(nobody),
    ];
    for (at, mut client) in clients.into_iter().enumerate() {
        assert!(!client.session().supports.privileges, "peer {at}");
        for claimed in [user.clone(), ids(0, 0, &[])] {
            for text in ["roots", "others", "foreign"] {
                refused(&world, &mut client, &with_all_capabilities(&claimed), text);
            }
        }
    }
}

#[test]
fn capabilities_of_a_vouched_caller_apply_to_that_caller_only() {
    if !needs_root("capabilities_of_a_vouched_caller_apply_to_that_caller_only") {
        return;
    }
    let world = World::new();
    let mut client = world.connect_as(Peer::new("test".to_owned(), Claims::Any, Squash::None));
    assert!(client.session().supports.privileges);
    let node = find(&mut client, "roots");
    let own = SetAttr { uid: Some(USER), ..SetAttr::default() };
    let chown = || Call::SetAttr { node: node.clone(), handle: None, set: own };
    let user = ids(USER, USER, &[]);
    assert_eq!(client.call_as(&user, chown()).result, Err(Errno::PERM));
    assert!(client.call_as(&with_all_capabilities(&user), chown()).result.is_ok());
    // The pool thread that executed the call has dropped the capabilities.
    for _ in 0..32 {
        let mode = SetAttr { mode: Some(0o666), ..SetAttr::default() };
        let chmod = Call::SetAttr { node: node.clone(), handle: None, set: mode };
        assert_eq!(client.call_as(&ids(OTHER, OTHER, &[]), chmod).result, Err(Errno::PERM));
    }
    assert_eq!(fs::metadata(world.path("roots")).unwrap().uid(), USER);
}

#[test]
fn file_kept_open_for_root_is_not_readable_for_other_users() {
    if !needs_root("file_kept_open_for_root_is_not_readable_for_other_users") {
        return;
    }
    let world = World::new();
    let mut root = world.client(world.server.serve_in_process().unwrap());
    let mut user = world.connect_through_pair(&ids(USER, USER, &[]));
    let reading = |client: &mut Client| {
        let node = find(client, "roots");
        client.call(Call::Read { node, handle: None, offset: 0, length: 6 }).result
    };
    // The server keeps the file open for root's next read.
    assert_eq!(reading(&mut root), Ok(Reply::Data(b"secret".to_vec())));
    assert_eq!(reading(&mut user), Err(Errno::ACCES));
    assert_eq!(reading(&mut root), Ok(Reply::Data(b"secret".to_vec())));
}

#[test]
fn lock_requires_matching_file_access() {
    if !needs_root("lock_requires_matching_file_access") {
        return;
    }
    let world = World::new();
    fs::set_permissions(world.path("roots"), fs::Permissions::from_mode(0o644)).unwrap();
    let mut user = world.connect_through_pair(&ids(USER, USER, &[]));
    let lock = |client: &mut Client, text: &str, flock, kind| {
        let node = find(client, text);
        let (start, end, wait, pid) = (0, u64::MAX, false, 1);
        client.call(Call::Lock { node, owner: 1, flock, kind, start, end, wait, pid, reclaim: false }).result
    };
    // As on a local disk: a reader may not take a write lock with fcntl, but may flock in either mode.
    assert_eq!(lock(&mut user, "roots", false, LockKind::Write), Err(Errno::ACCES));
    assert_eq!(lock(&mut user, "roots", false, LockKind::Read), Ok(Reply::Done));
    assert_eq!(lock(&mut user, "roots", true, LockKind::Write), Ok(Reply::Done));
    assert_eq!(lock(&mut user, "own", false, LockKind::Write), Ok(Reply::Done));
    // An open file of the session stays lockable, whatever its mode becomes.
    let own = find(&mut user, "own");
    user.open(&own, READ);
    fs::set_permissions(world.path("own"), fs::Permissions::from_mode(0o000)).unwrap();
    assert_eq!(lock(&mut user, "own", false, LockKind::Read), Ok(Reply::Done));
    assert_eq!(lock(&mut user, "own", false, LockKind::Write), Err(Errno::ACCES));
    // The kernel of a root client has checked the access.
    let mut root = world.client(world.server.serve_in_process().unwrap());
    let other = find(&mut root, "others");
    let (start, end, wait, pid) = (0, u64::MAX, false, 1);
    let call = Call::Lock {
        node: other,
        owner: 1,
        flock: false,
        kind: LockKind::Write,
        start,
        end,
        wait,
        pid,
        reclaim: false,
    };
    assert_eq!(root.call_as(&ids(USER, USER, &[]), call).result, Ok(Reply::Done));
}

#[test]
fn root_on_a_unix_socket_acts_for_any_uid() {
    if !needs_root("root_on_a_unix_socket_acts_for_any_uid") {
        return;
    }
    let world = World::new();
    let mut client = world.client(world.server.serve_in_process().unwrap());
    for claimed in [ids(USER, GROUP, &[]), ids(0, 0, &[]), ids(OTHER, OTHER, &[7])] {
        let made = made_by(&world, &mut client, &claimed, &format!("d{}", claimed.uid));
        assert_eq!(made, (claimed.uid, claimed.gid));
    }
    assert_eq!(client.session().ids.acts_as, (0, 0));
    // The client's kernel checked the open that this read belongs to.
    let roots = find(&mut client, "roots");
    let read = Call::Read { node: roots, handle: None, offset: 0, length: 6 };
    assert!(client.call_as(&ids(USER, USER, &[]), read).result.is_ok());
}

#[test]
fn unprivileged_server_accepts_only_its_own_user() {
    if !needs_root("unprivileged_server_accepts_only_its_own_user") {
        return;
    }
    let other = as_user(&ids(OTHER, OTHER, &[]), || UnixStream::pair().unwrap()).0;
    let is_taken = |socket: &UnixStream| {
        unix_peer(nigh_link::unix::credentials(socket).unwrap(), Squash::None).is_some()
    };
    assert!(is_taken(&other));
    let taken =
        as_user(&ids(USER, USER, &[]), || (is_taken(&other), is_taken(&UnixStream::pair().unwrap().0)));
    assert_eq!(taken, (false, true));
}

#[test]
fn token_holder_acts_only_as_the_tokens_user() {
    if !needs_root("token_holder_acts_only_as_the_tokens_user") {
        return;
    }
    let world = World::new();
    let named = ids(USER, USER, &[GROUP]);
    for (at, squash) in [Squash::Root, Squash::None].into_iter().enumerate() {
        let mut client = world.connect_as(Peer::new("test", Claims::Only(named.clone()), squash));
        for (number, claimed) in [ids(0, 0, &[0]), ids(OTHER, OTHER, &[FOREIGN])].iter().enumerate() {
            assert_eq!(made_by(&world, &mut client, claimed, &format!("d{at}-{number}")), (USER, USER));
            for text in ["roots", "others", "foreign"] {
                refused(&world, &mut client, claimed, text);
            }
        }
    }
}

#[test]
fn trusted_client_acts_as_any_user_except_root() {
    if !needs_root("trusted_client_acts_as_any_user_except_root") {
        return;
    }
    let world = World::new();
    let mut client = world.connect_as(Peer::new("test", Claims::Any, Squash::Root));
    assert_eq!(made_by(&world, &mut client, &ids(USER, GROUP, &[]), "users"), (USER, GROUP));
    assert_eq!(made_by(&world, &mut client, &ids(0, 0, &[0]), "roots-own"), (65_534, 65_534));
    for claimed in [ids(0, 0, &[0]), ids(USER, 0, &[0])] {
        refused(&world, &mut client, &claimed, "roots");
    }
    refused(&world, &mut client, &ids(USER, USER, &[]), "others");
    assert_eq!(client.session().ids.acts_as, (65_534, 65_534));
}

#[test]
fn squash_all_maps_every_caller_to_an_unprivileged_user() {
    if !needs_root("squash_all_maps_every_caller_to_an_unprivileged_user") {
        return;
    }
    let world = World::new();
    let mut client = world.connect_as(Peer::new("test", Claims::Any, Squash::All));
    for (at, claimed) in [ids(0, 0, &[]), ids(USER, USER, &[])].iter().enumerate() {
        assert_eq!(made_by(&world, &mut client, claimed, &format!("d{at}")), (65_534, 65_534));
        refused(&world, &mut client, claimed, "roots");
    }
}

#[test]
fn attach_to_a_directory_that_the_peer_cannot_search_is_refused() {
    if !needs_root("attach_to_a_directory_that_the_peer_cannot_search_is_refused") {
        return;
    }
    let world = World::new();
    fs::create_dir_all(world.path("private/public")).unwrap();
    fs::set_permissions(world.path("private"), fs::Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::symlink("private/public", world.path("link")).unwrap();
    let attach = |who: &Credentials, text: &str| {
        let (theirs, ours) = as_user(who, || UnixStream::pair().unwrap());
        world.serve(ours);
        Client::wanting(theirs, &Path::new("world").join(text), SOON, 0)
    };
    let user = ids(USER, USER, &[]);
    for text in ["private/public", "private/none", "link"] {
        let why = attach(&user, text).lost();
        assert!(why.contains("EACCES") && why.contains("name a directory") && !why.contains('\n'), "{why}");
    }
    attach(&ids(0, 0, &[]), "private/public").session();
    fs::set_permissions(world.path("private"), fs::Permissions::from_mode(0o711)).unwrap();
    attach(&user, "link").session();
}

#[test]
fn listing_requires_search_permission() {
    if !needs_root("listing_requires_search_permission") {
        return;
    }
    let world = World::new();
    for (text, mode) in [("closed", 0o744), ("open", 0o755)] {
        fs::create_dir(world.path(text)).unwrap();
        fs::write(world.path(text).join("inside"), "").unwrap();
        fs::set_permissions(world.path(text), fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut client = world.connect_through_pair(&ids(USER, USER, &[]));
    let (closed, open) = (find(&mut client, "closed"), find(&mut client, "open"));
    assert_eq!(client.call(Call::List { dir: closed.clone() }).result, Err(Errno::ACCES));
    let lookup = Call::Lookup { dir: closed, name: name("inside") };
    assert_eq!(client.call(lookup).result, Err(Errno::ACCES));
    let Ok(Reply::Listed(part)) = client.call(Call::List { dir: open }).result else { panic!() };
    assert_eq!(part.entries.len(), 1);
}

#[test]
fn unlink_permission_gives_no_handle_on_the_file() {
    if !needs_root("unlink_permission_gives_no_handle_on_the_file") {
        return;
    }
    let world = World::new();
    fs::create_dir(world.path("d")).unwrap();
    for text in ["d/one", "d/two", "d/new"] {
        fs::write(world.path(text), "secret").unwrap();
        fs::set_permissions(world.path(text), fs::Permissions::from_mode(0o600)).unwrap();
    }
    chown(world.path("d"), Some(USER), Some(USER)).unwrap();
    let mut client = world.connect_through_pair(&ids(USER, USER, &[]));
    let dir = find(&mut client, "d");
    let inside = |client: &mut Client, text: &str| {
        let call = Call::Lookup { dir: dir.clone(), name: name(text) };
        let Ok(Reply::Entry(Some(entry))) = client.call(call).result else { panic!() };
        entry.id
    };
    let (one, two) = (inside(&mut client, "one"), inside(&mut client, "two"));
    let unlink = Call::Unlink { dir: dir.clone(), name: name("one"), keep: Some(one) };
    assert_eq!(client.call(unlink).result, Ok(Reply::Removed { node: one, pinned: None }));
    let rename = Call::Rename {
        from: dir.clone(),
        name: name("new"),
        to: dir.clone(),
        new_name: name("two"),
        no_replace: false,
        exchange: false,
        whiteout: false,
        keep: Some(two),
    };
    let Ok(Reply::Renamed { replaced, pinned: kept, .. }) = client.call(rename).result else { panic!() };
    assert_eq!((replaced, kept), (Some(two), None));
}

#[test]
fn user_and_group_names_are_sent_only_on_request() {
    let (state, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::new(ServerOptions::new(state.path().to_owned())).unwrap();
    let mut plain = Client::wanting(server.serve_in_process().unwrap(), dir.path(), SOON, 0);
    assert_eq!(plain.session().ids.names, []);
    assert_eq!(plain.session().ids.acts_as, (me().uid, me().gid));
    let stream = server.serve_in_process().unwrap();
    let mut asking = Client::wanting(stream, dir.path(), SOON, nigh_native::ID_NAMES);
    let root = IdName { kind: IdKind::User, id: 0, name: "root".to_owned() };
    assert!(asking.session().ids.names.contains(&root));
}
