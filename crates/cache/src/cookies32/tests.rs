use super::*;
use crate::op::{Caller, Fh, Op, OpReply, Opened, Page};
use crate::store::CachedEntry;
use crate::test_fixtures::{T0, answers, cache, calls, part};
use crate::{Cache, Config};
use nigh_types::{Attr, CookieKey, Entry, Event, NodeId, OpId, Response};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn put(rows: &mut DirEntries, cookie: u64) {
    let id = NodeId { ino: cookie, generation: 1 };
    let child = CachedEntry::new(&Entry { id, attr: Attr::default(), target: None, no_xattrs: true });
    rows.insert(Cookie(cookie), b"n", Some(child));
}

fn rows(cookies: impl IntoIterator<Item = u64>) -> DirEntries {
    let mut rows = DirEntries::default();
    for cookie in cookies {
        put(&mut rows, cookie);
    }
    rows
}

/// Returns a page as `Cache::page` makes it: cookies and the offsets behind them.
fn page(rows: &DirEntries, told: &mut Option<(Cookie, Cookie)>, offset: u64, most: usize) -> Vec<(u64, u64)> {
    let from = Position::of(Cookie(offset), *told);
    let cookies: Vec<Cookie> = from.rows(rows).take(most).map(|row| row.cookie).collect();
    let numbers = short_cookies(rows, from, &cookies);
    if let Some(mark @ ShortCookie::InexactCookie(_)) = numbers.last() {
        *told = Some((mark.offset(), cookies[numbers.len() - 1]));
    }
    cookies.iter().zip(numbers).map(|(cookie, number)| (cookie.0, number.offset().0)).collect()
}

/// Returns a cookie whose place is about that far behind a common one.
fn cookie(far: u64, low: u32) -> u64 {
    ((1 << 30) + far) << 32 | u64::from(low)
}

proptest! {
    #[test]
    fn numbers_fit_31_bits_and_are_in_the_order_of_cookies(a in 16u64..1 << 63, b in 16u64..1 << 63) {
        let (low, high) = (Cookie(a.min(b)), Cookie(a.max(b)));
        prop_assert!(place(low) <= place(high));
        for cookie in [low, high, Cookie(16), Cookie((1 << 63) - 1)] {
            let at = place(cookie);
            prop_assert!(before_place(at).0 < cookie.0 && cookie.0 <= before_place(at + 1).0);
            let alone = exact_cookie(at, Position::behind(Cookie(0)), &[cookie], &[]);
            prop_assert!(alone.is_some_and(|number| (at..=at + FAR).contains(&number)));
            prop_assert!(FIRST <= at && at + FAR <= LAST && LAST < i32::MAX.unsigned_abs().into());
            let planted = inexact(cookie);
            prop_assert!(is_inexact(planted) && 2 < planted && planted < at && at - planted <= SPREAD);
        }
        let known = rows([low.0, high.0]);
        let behind = |offset| Position::of(Cookie(offset), None).rows(&known).map(|row| row.cookie).collect::<Vec<_>>();
        prop_assert!(behind(u64::MAX).is_empty() && behind(LAST).is_empty());
        if low < high && low.0 > LAST {
            prop_assert_eq!(behind(low.0), [high], "of a mount with 63 bits");
        }
    }

    /// Nothing is remembered, as if each seek used another open directory.
    #[test]
    fn scan_with_a_seek_at_each_entry_returns_each_entry_once(
        lows in prop::collection::btree_set(any::<u32>(), 1..6), far in prop::collection::vec(0u64..40_000, 0..12),
    ) {
        let names: BTreeSet<u64> = lows.iter().map(|low| cookie(0, *low))
            .chain(far.iter().map(|far| cookie(3_000 + far, 7))).collect();
        let known = rows(names.iter().copied());
        let (mut offset, mut seen) = (0, Vec::new());
        while let [(cookie, next)] = page(&known, &mut None, offset, 1)[..] {
            prop_assert!(seen.len() < names.len(), "it goes round: {seen:?}");
            seen.push(cookie);
            offset = next;
        }
        prop_assert_eq!(seen, names.into_iter().collect::<Vec<_>>());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u64),
    /// Makes or removes the nth name.
    Remove(usize),
    /// A reader reads a page of this many names, and takes this many of them.
    Read {
        who: usize,
        most: usize,
        taken: usize,
    },
    /// A reader seeks to an offset that any reader got, counted from the latest.
    Seek {
        who: usize,
        nth: usize,
    },
    Rewind(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Mostly at one place, else near it.
    let name = (prop_oneof![4 => Just(0u64), 2 => 0u64..4, 2 => 0u64..3_000], any::<u32>());
    let step = prop_oneof![
        4 => name.prop_map(|(far, low)| Step::Insert(cookie(far, low))),
        2 => any::<usize>().prop_map(Step::Remove),
        8 => (0usize..3, 1usize..5, 1usize..5).prop_map(|(who, most, taken)| Step::Read { who, most, taken }),
        2 => (0usize..3, 0usize..20).prop_map(|(who, nth)| Step::Seek { who, nth }),
        1 => (0usize..3).prop_map(Step::Rewind),
    ];
    prop::collection::vec(step, 1..150)
}

/// Reader, and the names present since its offset was returned that it still has to see.
#[derive(Clone, Default)]
struct Reader {
    told: Option<(Cookie, Cookie)>,
    offset: u64,
    due: BTreeSet<u64>,
    /// Names read since the last seek, without removed ones.
    returned: BTreeSet<u64>,
    /// A mark was used, and a name was made, since the last seek.
    marked: bool,
    crossed: bool,
}

#[derive(Default)]
struct Model {
    names: BTreeSet<u64>,
    ever: BTreeSet<u64>,
    rows: DirEntries,
    readers: [Reader; 3],
    /// Offsets with the names that were due behind them.
    told: Vec<(u64, BTreeSet<u64>)>,
}

impl Model {
    fn insert(&mut self, cookie: u64) {
        // The decision excepts two names with equal marks.
        let mark = |cookie: u64| inexact(Cookie(cookie));
        if self.ever.iter().any(|other| *other != cookie && mark(*other) == mark(cookie)) {
            return;
        }
        self.readers.iter_mut().for_each(|reader| reader.crossed = true);
        self.ever.insert(cookie);
        self.names.insert(cookie);
        put(&mut self.rows, cookie);
    }

    fn remove(&mut self, nth: usize) {
        let Some(cookie) = self.names.iter().nth(nth % self.names.len().max(1)).copied() else { return };
        self.names.remove(&cookie);
        self.rows.remove(Cookie(cookie), b"n");
        for reader in &mut self.readers {
            reader.due.remove(&cookie);
            reader.returned.remove(&cookie);
        }
        for (_, due) in &mut self.told {
            due.remove(&cookie);
        }
    }

    fn go_to(&mut self, who: usize, offset: u64, due: BTreeSet<u64>) {
        let told = self.readers[who].told;
        self.readers[who] = Reader { told, offset, due, ..Reader::default() };
    }

    fn rewind(&mut self, who: usize) {
        self.go_to(who, 0, self.names.clone());
    }

    /// Returns whether that was not the end.
    fn read(&mut self, who: usize, most: usize, taken: usize) -> bool {
        let reader = &mut self.readers[who];
        reader.marked |= is_inexact(reader.offset);
        let entries = page(&self.rows, &mut reader.told, reader.offset, most);
        assert!(!entries.is_empty() || reader.due.is_empty(), "skipped {:?}", reader.due);
        for (cookie, next) in entries.iter().take(taken) {
            let skipped: Vec<_> = reader.due.range(..cookie).collect();
            assert!(skipped.is_empty(), "skipped {skipped:?} before {cookie}");
            reader.due.remove(cookie);
            let is_first = reader.returned.insert(*cookie);
            assert!(is_first || reader.marked && reader.crossed, "{cookie} twice without a seek");
            reader.offset = *next;
            self.told.push((*next, reader.due.clone()));
        }
        !entries.is_empty()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]
    #[test]
    fn seek_never_skips_a_name_present_throughout(steps in steps()) {
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Insert(cookie) => model.insert(cookie),
                Step::Remove(nth) => model.remove(nth),
                Step::Read { who, most, taken } => {
                    model.read(who, most, taken);
                }
                Step::Rewind(who) => model.rewind(who),
                Step::Seek { who, nth } if !model.told.is_empty() => {
                    let (offset, due) = model.told[model.told.len() - 1 - nth % model.told.len()].clone();
                    model.go_to(who, offset, due);
                }
                Step::Seek { .. } => {}
            }
        }
        // From any position, readers of one entry at a time come to the end.
        for (who, most) in [(0, 1), (1, 3), (2, 1)] {
            let left = model.names.len() + 1;
            let reads = (0..=left).take_while(|_| model.read(who, most, 1)).count();
            prop_assert!(reads <= left, "it goes round");
        }
    }
}

/// Returns names in listing order, two of which share a place.
fn listed() -> Vec<String> {
    let cookie = |name: &String| CookieKey::default().cookie(name.as_bytes());
    let mut names: Vec<String> = (0..200_000).map(|n| format!("name-{n}")).collect();
    names.sort_by_key(cookie);
    let pair = names.windows(2).position(|pair| place(cookie(&pair[0])) == place(cookie(&pair[1])));
    let pair = pair.unwrap();
    names[pair - 20..pair + 20].to_vec()
}

fn read(cache: &mut Cache, fh: Fh, offset: Cookie, names: u32) -> Option<Page> {
    let op = Op::ReadDir { ino: 1, fh, offset, size: names * 40, plus: false };
    match cache.handle_op(T0, OpId(7), Caller::default(), op) {
        Some(OpReply::Page(page)) => Some(page),
        None => None,
        other => panic!("{other:?}"),
    }
}

fn open(cache: &mut Cache) -> Fh {
    match cache.handle_op(T0, OpId(6), Caller::default(), Op::OpenDir { ino: 1 }) {
        Some(OpReply::Opened(Opened { fh, cache_dir: false, .. })) => fh,
        other => panic!("{other:?}"),
    }
}

/// Reads names one by one from an offset until the reader has to wait, or to the end; with the offset behind each.
fn read_on(cache: &mut Cache, fh: Fh, mut page: Option<Page>) -> Vec<(String, Cookie)> {
    let mut seen = Vec::new();
    while let Some(entry) = page.as_ref().and_then(|page| page.entries.first()) {
        let name = &page.as_ref().unwrap().names[..usize::from(entry.name_len)];
        seen.push((String::from_utf8(name.to_vec()).unwrap(), entry.next));
        let next = entry.next;
        page = read(cache, fh, next, 1);
    }
    seen
}

#[test]
fn short_offsets_are_equal_in_partial_and_snapshot_listings() {
    let names = listed();
    let texts: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut found = Vec::new();
    for granted in [true, false] {
        let config = Config { short_cookies: true, ..Config::default() };
        let mut cache = cache(config);
        assert_eq!(cache.handle_op(T0, OpId(1), Caller::default(), Op::OpenDir { ino: 1 }), None);
        let [call] = calls(&mut cache)[..] else { panic!("it is listed") };
        // The listing comes in chunks that are split between the two.
        let begin = |granted: bool| match part(&texts[..21], false) {
            part if granted => part,
            part => Response { grants: Vec::new(), ..part },
        };
        cache.handle_event(T0, Event::Response { call, response: begin(granted) });
        let opened = answers(&mut cache);
        let [(_, OpReply::Opened(Opened { fh, cache_dir: false, .. }))] = opened[..] else {
            panic!("{opened:?}")
        };
        let first = read(&mut cache, fh, Cookie(2), 1);
        let mut seen = read_on(&mut cache, fh, first);
        assert!(if granted { (10..=20).contains(&seen.len()) } else { seen.is_empty() });
        // A detached listing serves earlier readers: a later one causes another call.
        let call = calls(&mut cache).pop().map_or(call, |again| {
            cache.handle_event(T0, Event::Response { call: again, response: begin(false) });
            again
        });
        cache.handle_event(T0, Event::Response { call, response: part(&texts[21..], true) });
        let told = answers(&mut cache);
        let [(OpId(7), OpReply::Page(page))] = &told[..] else { panic!("{told:?}") };
        seen.extend(read_on(&mut cache, fh, Some(page.clone())));
        assert_eq!(seen.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), texts);
        for (nth, (_, offset)) in seen.iter().enumerate() {
            assert!(16 < offset.0 && offset.0 < i32::MAX.unsigned_abs().into());
            let page = read(&mut cache, fh, *offset, 1).unwrap();
            assert_eq!(page.names, names.get(nth + 1).map(String::as_bytes).unwrap_or_default(), "{nth}");
        }
        found.push(seen);
        if granted {
            let fh = open(&mut cache);
            let page = read(&mut cache, fh, found[0][20].1, 40).unwrap();
            assert_eq!(page.names, texts[21..].concat().as_bytes(), "from the midst of the pair");
        }
    }
    assert_eq!(found[0], found[1]);
}
