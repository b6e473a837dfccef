//! Credentials under which the server executes calls.

use crate::common::*;
use nigh_types::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

fn user(uid: u32, groups: &[u32]) -> Credentials {
    Credentials { uid, gid: uid, groups: groups.to_vec(), privileges: None }
}

fn mode(x: &Exported, name: &str, mode: u32) {
    fs::set_permissions(x.path(name), fs::Permissions::from_mode(mode)).unwrap();
}

fn mkdir(dir: &NodeRef, text: &str) -> Call {
    Call::Mkdir { dir: dir.clone(), name: name(text), mode: 0o777, umask: 0o022 }
}

#[test]
fn new_files_belong_to_the_caller_and_setgid_directories_pass_on_their_group() {
    if !needs_root("what_a_user_makes_is_the_users") {
        return;
    }
    let x = Exported::new();
    mode(&x, "", 0o777);
    fs::create_dir(x.path("shared")).unwrap();
    chown(x.path("shared"), Some(0), Some(500)).unwrap();
    mode(&x, "shared", 0o2777);
    let who = user(1000, &[7]);
    assert!(x.response_as(&who, mkdir(&x.top(), "own")).result.is_ok());
    assert!(x.response_as(&who, mkdir(&x.place("shared"), "sub")).result.is_ok());
    let own = fs::metadata(x.path("own")).unwrap();
    assert_eq!((own.uid(), own.gid(), own.mode() & 0o7777), (1000, 1000, 0o755));
    let sub = fs::metadata(x.path("shared/sub")).unwrap();
    assert_eq!((sub.uid(), sub.gid(), sub.mode() & 0o7777), (1000, 500, 0o2755));
    assert!(x.call(mkdir(&x.top(), "roots")).is_ok());
    assert_eq!(fs::metadata(x.path("roots")).unwrap().uid(), 0);
}

#[test]
fn the_kernel_refuses_what_the_caller_may_not() {
    if !needs_root("the_kernel_refuses_what_the_caller_may_not") {
        return;
    }
    let x = Exported::new();
    fs::create_dir(x.path("sticky")).unwrap();
    fs::create_dir(x.path("group")).unwrap();
    fs::write(x.path("sticky/a"), "").unwrap();
    fs::write(x.path("private"), "secret").unwrap();
    mode(&x, "", 0o755);
    mode(&x, "sticky", 0o1777);
    mode(&x, "private", 0o600);
    chown(x.path("group"), Some(0), Some(77)).unwrap();
    mode(&x, "group", 0o770);
    let (who, member) = (user(1000, &[]), user(1000, &[77]));
    let unlink = Call::Unlink { dir: x.place("sticky"), name: name("a"), keep: None };
    assert_eq!(x.response_as(&who, unlink).result, Err(Errno::PERM));
    assert_eq!(x.response_as(&who, mkdir(&x.top(), "d")).result, Err(Errno::ACCES));
    assert_eq!(x.response_as(&who, mkdir(&x.place("group"), "d")).result, Err(Errno::ACCES));
    assert!(x.response_as(&member, mkdir(&x.place("group"), "d")).result.is_ok());
    assert_eq!(x.response_as(&who, Call::List { dir: x.place("group") }).result, Err(Errno::ACCES));
    let dirents = Call::ListNames { dir: x.place("group"), after: Cookie(0) };
    assert_eq!(x.response_as(&who, dirents).result, Err(Errno::ACCES));
    assert_eq!(
        x.response_as(&who, Call::Open { node: x.place("private"), access: READ }).result,
        Err(Errno::ACCES)
    );
    let set = SetAttr { uid: Some(1000), ..SetAttr::default() };
    assert_eq!(
        x.response_as(&who, Call::SetAttr { node: x.place("private"), handle: None, set }).result,
        Err(Errno::PERM)
    );
    let set = SetAttr { size: Some(0), ..SetAttr::default() };
    assert_eq!(
        x.response_as(&who, Call::SetAttr { node: x.place("private"), handle: None, set }).result,
        Err(Errno::ACCES)
    );
    let device = Call::Mknod {
        dir: x.place("sticky"),
        name: name("dev"),
        kind: Kind::CharDevice,
        mode: 0o666,
        umask: 0,
        rdev: 0x0103,
    };
    assert_eq!(x.response_as(&who, device).result, Err(Errno::PERM));
    let trusted = Call::SetXattr {
        node: x.place("sticky"),
        name: b"trusted.x".to_vec(),
        value: vec![1],
        flags: 0,
        kill_sgid: false,
    };
    assert_eq!(x.response_as(&who, trusted).result, Err(Errno::PERM));
    assert_eq!(fs::read(x.path("private")).unwrap(), b"secret");
}

const CHOWN: u64 = 1;
const DAC_OVERRIDE: u64 = 1 << 1;
const DAC_READ_SEARCH: u64 = 1 << 2;
const FOWNER: u64 = 1 << 3;

/// Root of a container whose ids map to 1001 and 100000 to 100009 on the host.
fn container() -> Credentials {
    let ranges = vec![IdRange { first: 1001, count: 1 }, IdRange { first: 100_000, count: 10 }];
    let privileges = Privileges { capabilities: u64::MAX, users: ranges.clone(), groups: ranges };
    Credentials { privileges: Some(Box::new(privileges)), ..user(1001, &[]) }
}

fn service(capabilities: u64) -> Credentials {
    Credentials { privileges: Some(Box::new(Privileges::over_all(capabilities))), ..user(1000, &[]) }
}

fn owned(x: &Exported, name: &str, owner: (u32, u32), bits: u32) {
    chown(x.path(name), Some(owner.0), Some(owner.1)).unwrap();
    mode(x, name, bits);
}

fn set(x: &Exported, who: &Credentials, name: &str, set: SetAttr) -> Option<Errno> {
    x.response_as(who, Call::SetAttr { node: x.place(name), handle: None, set }).result.err()
}

#[test]
fn container_works_on_inodes_whose_ids_are_mapped_into_it_and_on_no_others() {
    if !needs_root("container_works_on_inodes_whose_ids_are_mapped_into_it") {
        return;
    }
    let x = Exported::new();
    mode(&x, "", 0o755);
    let places = [("inner", (100_001, 100_001)), ("outer", (0, 0)), ("half", (100_001, 0))];
    for (dir, owner) in places {
        fs::create_dir(x.path(dir)).unwrap();
        fs::write(x.path(&format!("{dir}/f")), "secret").unwrap();
        owned(&x, &format!("{dir}/f"), owner, 0o600);
        owned(&x, dir, owner, 0o700);
    }
    let who = container();
    let (chown, chmod) = (
        SetAttr { uid: Some(100_002), gid: Some(1001), ..SetAttr::default() },
        SetAttr { mode: Some(0o640), ..SetAttr::default() },
    );
    for (dir, refused) in [("inner", false), ("outer", true), ("half", true)] {
        let file = format!("{dir}/f");
        let errno = |errno| refused.then_some(errno);
        let ask = |call| x.response_as(&who, call).result.err();
        let top = x.place(dir);
        assert_eq!(ask(Call::List { dir: top.clone() }), errno(Errno::ACCES), "{dir}");
        assert_eq!(ask(Call::Lookup { dir: top.clone(), name: name("f") }), errno(Errno::ACCES), "{dir}");
        assert_eq!(ask(mkdir(&top, "d")), errno(Errno::ACCES), "{dir}");
        assert_eq!(ask(Call::Open { node: x.place(&file), access: BOTH }), errno(Errno::ACCES), "{dir}");
        assert_eq!(set(&x, &who, &file, chmod), errno(Errno::PERM), "{dir}");
        assert_eq!(set(&x, &who, &file, chown), errno(Errno::PERM), "{dir}");
        let unlink = Call::Unlink { dir: top, name: name("f"), keep: None };
        assert_eq!(ask(unlink), errno(Errno::ACCES), "{dir}");
    }
    let made = fs::metadata(x.path("inner/d")).unwrap();
    assert_eq!((made.uid(), made.gid()), (1001, 1001), "what it makes is its own");
    // Chown to ids outside the container fails, and so do operations reserved to the host.
    fs::write(x.path("own"), "").unwrap();
    owned(&x, "own", (1001, 1001), 0o600);
    let give = |uid, gid| set(&x, &who, "own", SetAttr { uid, gid, ..SetAttr::default() });
    assert_eq!(give(Some(0), None), Some(Errno::PERM));
    assert_eq!(give(None, Some(0)), Some(Errno::PERM));
    assert_eq!(give(Some(100_000), Some(100_009)), None);
    let (kind, rdev) = (Kind::CharDevice, 0x0103);
    let device = Call::Mknod { dir: x.place("inner"), name: name("dev"), kind, mode: 0o666, umask: 0, rdev };
    assert_eq!(x.response_as(&who, device).result, Err(Errno::PERM));
}

#[test]
fn service_has_the_capabilities_that_it_was_given_and_no_others() {
    if !needs_root("service_has_the_capabilities_that_it_was_given_and_no_others") {
        return;
    }
    let x = Exported::new();
    mode(&x, "", 0o755);
    fs::write(x.path("f"), "secret").unwrap();
    owned(&x, "f", (0, 0), 0o600);
    let open = |capabilities, access| {
        x.response_as(&service(capabilities), Call::Open { node: x.place("f"), access }).result.err()
    };
    assert_eq!(open(0, READ), Some(Errno::ACCES));
    assert_eq!(open(CHOWN | FOWNER, READ), Some(Errno::ACCES));
    assert_eq!(open(DAC_READ_SEARCH, READ), None);
    assert_eq!(open(DAC_READ_SEARCH, BOTH), Some(Errno::ACCES));
    assert_eq!(open(DAC_OVERRIDE, BOTH), None);
    let chmod = SetAttr { mode: Some(0o6755), ..SetAttr::default() };
    assert_eq!(set(&x, &service(!FOWNER), "f", chmod), Some(Errno::PERM));
    assert_eq!(set(&x, &service(FOWNER), "f", chmod), None);
    let bits = || fs::metadata(x.path("f")).unwrap().mode() & 0o7777;
    assert_eq!(bits(), 0o4755, "it is not in the group, and without CAP_FSETID");
    let give = SetAttr { uid: Some(5), gid: Some(6), ..SetAttr::default() };
    assert_eq!(set(&x, &service(!CHOWN), "f", give), Some(Errno::PERM));
    assert_eq!(set(&x, &service(CHOWN | FOWNER), "f", give), None);
    assert_eq!(bits(), 0o755, "a new owner is given no setuid program");
    let (dir, name) = (x.top(), name("g"));
    assert!(x.response_as(&service(DAC_OVERRIDE), mkdir(&dir, "g")).result.is_ok());
    assert_eq!(fs::metadata(x.path("g")).unwrap().uid(), 1000);
    mode(&x, "", 0o1777);
    chown(x.path("g"), Some(0), Some(0)).unwrap();
    let rmdir = |capabilities| {
        let call = Call::Rmdir { dir: dir.clone(), name: name.clone() };
        x.response_as(&service(capabilities), call).result.err()
    };
    assert_eq!(rmdir(DAC_OVERRIDE), Some(Errno::PERM), "sticky");
    assert_eq!(rmdir(FOWNER), None);
}

#[test]
fn set_id_bits_are_cleared_as_by_the_kernel() {
    if !needs_root("set_id_bits_are_cleared_as_by_the_kernel") {
        return;
    }
    let x = Exported::new();
    let bits = |x: &Exported| fs::metadata(x.path("f")).unwrap().mode() & 0o7777;
    let set_bits = |x: &Exported| {
        fs::write(x.path("f"), "abc").unwrap();
        mode(x, "f", 0o6777);
    };
    set_bits(&x);
    let write = |who: &Credentials, kill_suidgid| {
        let flags = WriteFlags { kill_suidgid, ..WriteFlags::default() };
        x.response_as(
            who,
            Call::Write { node: x.place("f"), handle: None, offset: 0, data: b"x".to_vec(), flags },
        )
    };
    assert!(write(&me(), false).result.is_ok());
    assert_eq!(bits(&x), 0o6777);
    assert!(write(&user(1000, &[]), false).result.is_ok());
    assert_eq!(bits(&x), 0o777);
    set_bits(&x);
    assert!(write(&me(), true).result.is_ok());
    assert_eq!(bits(&x), 0o777);
    set_bits(&x);
    let set = SetAttr { size: Some(1), kill_suidgid: true, ..SetAttr::default() };
    assert!(x.call(Call::SetAttr { node: x.place("f"), handle: None, set }).is_ok());
    assert_eq!(bits(&x), 0o777);
    set_bits(&x);
    let set = SetAttr { gid: Some(5), ..SetAttr::default() };
    let Ok(Reply::Attr(_, attr)) = x.call(Call::SetAttr { node: x.place("f"), handle: None, set }) else {
        panic!()
    };
    assert_eq!((attr.mode & 0o7777, attr.gid), (0o777, 5));
}

fn flush_of(x: &Exported) -> Call {
    let flags = WriteFlags { write_back: true, kill_suidgid: true, ..WriteFlags::default() };
    Call::Write { node: x.place("f"), handle: None, offset: 0, data: b"x".to_vec(), flags }
}

#[test]
fn chown_keeps_setgid_of_a_file_that_its_group_may_not_execute() {
    if !needs_root("chown_keeps_setgid_of_a_file_that_its_group_may_not_execute") {
        return;
    }
    let x = Exported::new();
    for (before, after) in [(0o6644, 0o2644), (0o2745, 0o2745), (0o2755, 0o755)] {
        fs::write(x.path("f"), "abc").unwrap();
        mode(&x, "f", before);
        let set = SetAttr { gid: Some(5), kill_suidgid: true, ..SetAttr::default() };
        assert!(x.call(Call::SetAttr { node: x.place("f"), handle: None, set }).is_ok());
        assert_eq!(fs::metadata(x.path("f")).unwrap().mode() & 0o7777, after, "{before:o}");
        fs::remove_file(x.path("f")).unwrap();
    }
}

#[test]
fn mmap_write_back_keeps_set_id_bits_and_needs_write_access() {
    if !needs_root("mmap_write_back_keeps_set_id_bits_and_needs_write_access") {
        return;
    }
    for vouched in [true, false] {
        let x = Exported::vouched(vouched);
        fs::write(x.path("f"), "abc").unwrap();
        mode(&x, "", 0o755);
        mode(&x, "f", 0o6777);
        assert!(x.response_as(&user(1000, &[]), flush_of(&x)).result.is_ok());
        assert_eq!(fs::metadata(x.path("f")).unwrap().mode() & 0o7777, 0o6777);
        mode(&x, "f", 0o6755);
        // A client that is not vouched for needs write access: the server opens the file as the caller.
        let result = x.response_as(&user(1000, &[]), flush_of(&x)).result;
        assert_eq!(result.is_ok(), vouched, "{result:?}");
    }
}

#[test]
fn chown_to_the_same_owner_drops_set_id_bits_for_the_owner_alone() {
    if !needs_root("chown_to_the_same_owner_drops_set_id_bits_for_the_owner_alone") {
        return;
    }
    let x = Exported::new();
    fs::write(x.path("f"), "abc").unwrap();
    chown(x.path("f"), Some(1000), Some(1000)).unwrap();
    mode(&x, "", 0o755);
    mode(&x, "f", 0o6755);
    let bits = || fs::metadata(x.path("f")).unwrap().mode() & 0o7777;
    let call = || Call::SetAttr { node: x.place("f"), handle: None, set: SetAttr::chown_to_same() };
    assert_eq!(x.response_as(&user(1001, &[]), call()).result, Err(Errno::PERM));
    assert_eq!(bits(), 0o6755);
    assert!(x.response_as(&user(1000, &[]), call()).result.is_ok());
    assert_eq!(bits(), 0o755);
}

/// `cap_net_bind_service=ep` (struct vfs_cap_data, revision 2).
fn set_capability(x: &Exported) {
    let mut value = [0_u8; 20];
    (value[0], value[3], value[5]) = (1, 2, 4);
    rustix::fs::setxattr(x.path("f"), CAPABILITY, &value, rustix::fs::XattrFlags::empty()).unwrap();
}

const CAPABILITY: &str = "security.capability";

#[test]
fn capability_is_removed_for_a_writer_of_a_vouched_client() {
    if !needs_root("capability_is_removed_for_a_writer_of_a_vouched_client") {
        return;
    }
    let has = |x: &Exported| rustix::fs::getxattr(x.path("f"), CAPABILITY, &mut [0; 64]).is_ok();
    let remove = |x: &Exported, name: &str| Call::RemoveXattr { node: x.place("f"), name: name.into() };
    for vouched in [true, false] {
        let x = Exported::vouched(vouched);
        fs::write(x.path("f"), "abc").unwrap();
        chown(x.path("f"), Some(1000), Some(1000)).unwrap();
        mode(&x, "", 0o755);
        mode(&x, "f", 0o4755);
        set_capability(&x);
        // chown(2) of a setuid file is its owner's right; for other callers it depends on whether the client is
        // vouched for.
        let result = x.response_as(&user(1001, &[]), remove(&x, CAPABILITY)).result;
        assert_eq!(result.is_ok(), vouched, "{result:?}");
        assert_eq!(has(&x), !vouched);
        set_capability(&x);
        assert!(x.response_as(&user(1000, &[]), remove(&x, CAPABILITY)).result.is_ok());
        assert!(!has(&x), "for the owner");
        // No error if the attribute is already gone, as after another client's change; root gets ENODATA.
        let nothing = x.response_as(&user(1000, &[]), remove(&x, CAPABILITY)).result;
        assert!(nothing.is_ok(), "{nothing:?}");
        assert_eq!(x.call(remove(&x, CAPABILITY)), Err(Errno::NODATA));
        // Other attributes follow the caller's own rights.
        rustix::fs::setxattr(x.path("f"), "user.a", b"1", rustix::fs::XattrFlags::empty()).unwrap();
        assert!(x.response_as(&user(1001, &[]), remove(&x, "user.a")).result.is_err());
    }
}

#[test]
fn default_acls_win_over_the_umask() {
    let x = Exported::new();
    fs::create_dir(x.path("d")).unwrap();
    // Version 2; user::rwx, group::rwx, other::r-x.
    let mut acl = 2_u32.to_le_bytes().to_vec();
    for (tag, perm) in [(1_u16, 7_u16), (4, 7), (0x20, 5)] {
        acl.extend_from_slice(&tag.to_le_bytes());
        acl.extend_from_slice(&perm.to_le_bytes());
        acl.extend_from_slice(&u32::MAX.to_le_bytes());
    }
    let set = Call::SetXattr {
        node: x.place("d"),
        name: b"system.posix_acl_default".to_vec(),
        value: acl,
        flags: 0,
        kill_sgid: false,
    };
    match x.call(set) {
        Err(Errno::OPNOTSUPP) => {
            assert!(!x.export.session(&x.files).unwrap().supports.acls);
            return println!("SKIPPED: no ACLs here");
        }
        other => assert!(other.is_ok(), "{other:?}"),
    }
    assert!(x.export.session(&x.files).unwrap().supports.acls);
    let create = |dir: &NodeRef, text: &str| {
        let call = Call::Create {
            dir: dir.clone(),
            name: name(text),
            mode: 0o666,
            umask: 0o077,
            exclusive: true,
            access: BOTH,
        };
        assert!(x.call(call).is_ok());
    };
    create(&x.top(), "plain");
    create(&x.place("d"), "inherits");
    let bits = |path: &str| fs::metadata(x.path(path)).unwrap().mode() & 0o777;
    assert_eq!((bits("plain"), bits("d/inherits")), (0o600, 0o664));
}

#[test]
fn threads_act_for_different_callers_at_once() {
    if !needs_root("threads_act_for_different_callers_at_once") {
        return;
    }
    let x = Exported::new();
    mode(&x, "", 0o1777);
    std::thread::scope(|scope| {
        for uid in 1000..1004 {
            let x = &x;
            scope.spawn(move || {
                for n in 0..200 {
                    assert!(
                        x.response_as(&user(uid, &[uid + 10]), mkdir(&x.top(), &format!("{uid}-{n}")))
                            .result
                            .is_ok()
                    );
                }
            });
        }
    });
    for (name, entry) in x.list(&x.top()) {
        let text = String::from_utf8(name.as_bytes().to_vec()).unwrap();
        assert_eq!(text[..4].parse(), Ok(entry.attr.uid));
    }
}
