use super::*;
use crate::cache::Cache;
use crate::op::{Caller, Fh, Node, Op, OpReply, Opened, PageEntry};
use crate::test_fixtures::{T0, answers, cache, calls, part};
use crate::{Config, NotifyLevel};
use nigh_types::{Cookie, CookieKey, Event, Name, OpId};

const ALL: FilesWithAttrs = FilesWithAttrs::All { but_one: false };
const BUT_ONE: FilesWithAttrs = FilesWithAttrs::All { but_one: true };

/// Reads a directory; returns which files get attributes.
fn next(readers: &mut ReaderTable, thread: u32) -> FilesWithAttrs {
    readers.began(thread);
    let files = readers.files(thread, 0, false);
    if files == BUT_ONE {
        readers.probed(thread);
    }
    files
}

#[test]
fn thread_that_ignores_eight_withheld_files_gets_names_until_it_looks_one_up() {
    let mut readers = ReaderTable::default();
    for _ in 0..NAMES_ONLY_AFTER {
        assert_eq!(next(&mut readers, 7), BUT_ONE);
    }
    assert!(readers.wants_names(7) && !readers.wants_names(8));
    assert_eq!(next(&mut readers, 7), FilesWithAttrs::None);
    assert_eq!(next(&mut readers, 8), BUT_ONE);
    readers.looked_up(7);
    assert_eq!(next(&mut readers, 7), ALL);
}

#[test]
fn thread_that_looks_files_up_is_probed_seldom_and_may_change() {
    let mut readers = ReaderTable::default();
    next(&mut readers, 7);
    readers.looked_up(7);
    let tried = (0..640).filter(|_| next(&mut readers, 7) == BUT_ONE).count();
    assert_eq!(tried, 8);
    assert_eq!(next(&mut readers, 7), FilesWithAttrs::None);
}

#[test]
fn one_file_of_each_directory_is_withheld_and_large_directories_are_capped() {
    let mut readers = ReaderTable::default();
    assert_eq!(readers.files(7, 0, false), BUT_ONE);
    assert_eq!(readers.files(7, 100, true), ALL);
    assert_eq!(readers.files(7, MAX_WITHOUT_LOOKUP, true), FilesWithAttrs::None);
    readers.probed(7);
    readers.looked_up(7);
    assert_eq!(readers.files(7, MAX_WITHOUT_LOOKUP, true), ALL);
}

#[test]
fn threads_without_visible_id_are_never_probed_and_few_threads_are_remembered() {
    let mut readers = ReaderTable::default();
    assert_eq!(next(&mut readers, 0), ALL);
    for _ in 0..NAMES_ONLY_AFTER {
        next(&mut readers, 1);
    }
    for thread in 2..=MOST as u32 {
        next(&mut readers, thread);
    }
    assert!(readers.wants_names(1) && readers.known.len() == MOST);
    next(&mut readers, 100);
    assert!(!readers.wants_names(1) && readers.known.len() == MOST);
}

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// Names in listing order.
fn names() -> [&'static str; 5] {
    let mut names = NAMES;
    names.sort_by_key(|name| CookieKey::default().cookie(name.as_bytes()));
    names
}

/// Directory 1 has five files.
fn listed(config: Config) -> Cache {
    let mut cache = cache(config);
    assert_eq!(ask(&mut cache, 0, Op::OpenDir { ino: 1 }), None);
    let [call] = calls(&mut cache)[..] else { panic!("it is listed") };
    for (part, last) in [(part(&names()[..3], false), false), (part(&names()[3..], true), true)] {
        assert_eq!(part.last, last);
        cache.handle_event(T0, Event::Response { call, response: part });
    }
    let opened = answers(&mut cache);
    let [(_, OpReply::Opened(Opened { fh, .. }))] = opened[..] else { panic!("{opened:?}") };
    assert_eq!(ask(&mut cache, 0, Op::ReleaseDir { fh }), Some(OpReply::Done));
    cache
}

fn ask(cache: &mut Cache, pid: u32, op: Op) -> Option<OpReply> {
    cache.handle_op(T0, OpId(1), Caller { pid, ..Caller::default() }, op)
}

fn open(cache: &mut Cache, pid: u32) -> Opened {
    let Some(OpReply::Opened(opened)) = ask(cache, pid, Op::OpenDir { ino: 1 }) else {
        panic!("it is known")
    };
    opened
}

/// Reads it in two pages; returns the files that come with inodes, which the kernel forgets at once.
fn read(cache: &mut Cache, pid: u32, fh: Fh) -> Vec<bool> {
    let (mut offset, mut given) = (Cookie(0), Vec::new());
    loop {
        let size = 160 * 5;
        let Some(OpReply::Page(page)) = ask(cache, pid, Op::ReadDir { ino: 1, fh, offset, size, plus: true })
        else {
            panic!("it is known");
        };
        let Some(PageEntry { next, .. }) = page.entries.last() else { break };
        offset = *next;
        let files = page.entries.iter().filter(|entry| entry.mode & 0o170_000 != 0o040_000);
        given.extend(files.map(|entry| entry.node.is_some()));
        page.entries.iter().filter_map(|e| e.node).for_each(|node| cache.handle_forget(node.number, 1));
    }
    assert_eq!(ask(cache, pid, Op::ReleaseDir { fh }), Some(OpReply::Done));
    given
}

fn read_once(cache: &mut Cache, pid: u32) -> Vec<bool> {
    let fh = open(cache, pid).fh;
    read(cache, pid, fh)
}

fn look_up(cache: &mut Cache, pid: u32, name: &str) {
    let name = Name::new(name.as_bytes()).unwrap();
    let found = ask(cache, pid, Op::Lookup { dir: 1, name });
    let Some(OpReply::Node(Node { number, .. })) = found else { panic!("{found:?}") };
    cache.handle_forget(number, 1);
}

const HELD_BACK: [bool; 5] = [false, true, true, true, true];

#[test]
fn first_file_of_each_directory_is_withheld_and_after_eight_all_files() {
    let mut cache = listed(Config::default());
    assert_eq!(read_once(&mut cache, 0), [true; 5]);
    for _ in 1..NAMES_ONLY_AFTER {
        assert_eq!(read_once(&mut cache, 7), HELD_BACK);
    }
    // In two pages, with the eighth withheld file in the first.
    assert_eq!(read_once(&mut cache, 7), [false, true, true, false, false]);
    assert_eq!(read_once(&mut cache, 7), [false; 5]);
    look_up(&mut cache, 7, names()[4]);
    assert_eq!(read_once(&mut cache, 7), [true; 5]);
}

#[test]
fn lookup_by_another_thread_counts_for_the_directorys_reader() {
    let mut cache = listed(Config::default());
    for _ in 0..NAMES_ONLY_AFTER {
        read_once(&mut cache, 7);
    }
    look_up(&mut cache, 8, names()[0]);
    assert_eq!(read_once(&mut cache, 7), [true; 5]);
}

#[test]
fn lookups_of_directories_and_missing_names_do_not_count() {
    let mut cache = listed(Config::default());
    for _ in 0..NAMES_ONLY_AFTER {
        read_once(&mut cache, 7);
        let name = Name::new(b"missing").unwrap();
        assert!(matches!(ask(&mut cache, 7, Op::Lookup { dir: 1, name }), Some(OpReply::Missing(_))));
    }
    assert_eq!(read_once(&mut cache, 7), [false; 5]);
}

/// The kernel's cached listing serves only a reader that wants no more than it has.
#[test]
fn kernel_listing_without_attributes_serves_only_names_only_readers() {
    let mut cache = listed(Config { level: NotifyLevel::All, ..Config::default() });
    for _ in 0..NAMES_ONLY_AFTER {
        read_once(&mut cache, 7);
        read_once(&mut cache, 9);
    }
    let opened = open(&mut cache, 7);
    assert!(opened.keep_cache, "{opened:?}");
    assert_eq!(read(&mut cache, 7, opened.fh), [false; 5]);
    let opened = open(&mut cache, 9);
    assert!(opened.keep_cache, "{opened:?}");
    let opened = open(&mut cache, 8);
    assert!(opened.cache_dir && !opened.keep_cache, "{opened:?}");
    assert_eq!(read(&mut cache, 8, opened.fh), HELD_BACK);
    let opened = open(&mut cache, 10);
    assert!(opened.keep_cache, "{opened:?}");
}
