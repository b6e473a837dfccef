//! 31-bit directory offsets (docs/decisions/0020-cookies-of-31-bits.md).
//!
//! A name's *place* is the part of its cookie that such an offset, a *number*, can express. If names share a place,
//! each alone determines which numbers are behind it. So no change of the other names makes a scan that starts at a
//! number skip one.

use crate::store::{DirEntries, DirEntryRef};
use nigh_types::Cookie;

/// Least place; below it are marks, and the offsets after `.` and `..`.
const FIRST: u64 = 1 << 25;
/// Largest number in use: `i32::MAX` means the end to ext4 and programs that know it.
const LAST: u64 = (1 << 31) - 2;
/// Distance behind a place at which an odd number (`FAR`) or an even number (`NEAR`) may still be before the name.
const FAR: u64 = 2_048;
const NEAR: u64 = 128;
/// Number of places.
const PLACES: u64 = LAST + 1 - FIRST - FAR;
/// Most by which a mark is before its place.
const SPREAD: u64 = 1 << 24;

/// Offset after an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ShortCookie {
    /// Leads to the next entry.
    Exact(u64),
    /// Leads to the entry's own place or before it; only an open directory that remembers it can go on from there.
    InexactCookie(u64),
}

impl ShortCookie {
    pub fn offset(self) -> Cookie {
        match self {
            ShortCookie::Exact(number) | ShortCookie::InexactCookie(number) => Cookie(number),
        }
    }
}

/// Returns a cookie's place in `FIRST ..= LAST - FAR`; places are in the order of cookies.
fn place(cookie: Cookie) -> u64 {
    FIRST + (((cookie.0 >> 32) * PLACES) >> 31)
}

/// Returns the largest cookie before a place.
fn before_place(place: u64) -> Cookie {
    let upper = (place.saturating_sub(FIRST).min(PLACES) << 31).div_ceil(PLACES);
    Cookie((upper << 32).saturating_sub(1))
}

fn is_inexact(number: u64) -> bool {
    number % 16 == 15
}

fn width(number: u64) -> u64 {
    match number {
        _ if is_inexact(number) => 0,
        _ if number.is_multiple_of(2) => NEAR,
        _ => FAR,
    }
}

/// Mixes well in few steps (the end of SplitMix64).
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Returns whether a scan that starts at the number skips the name. It depends on nothing else.
fn is_behind(number: u64, cookie: Cookie) -> bool {
    match number.checked_sub(place(cookie)) {
        None => false,
        Some(far) => far >= width(number) || mix(cookie.0 ^ mix(number)) & 1 == 1,
    }
}

/// Start of a page: the names behind `cookie` which `number` is not behind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    cookie: Cookie,
    number: u64,
}

impl Position {
    pub fn behind(cookie: Cookie) -> Position {
        Position { cookie, number: 0 }
    }

    /// Returns the position of an offset. `told`: the last mark that the open directory returned, and its cookie.
    pub fn of(offset: Cookie, told: Option<(Cookie, Cookie)>) -> Position {
        match told {
            Some((mark, cookie)) if mark == offset => Position::behind(cookie),
            // A mount with 63-bit offsets returned it.
            _ if offset.0 > LAST => Position::behind(offset),
            _ => Position { cookie: Cookie(0), number: offset.0 },
        }
    }

    pub fn rows(self, rows: &DirEntries) -> impl Iterator<Item = DirEntryRef<'_>> {
        let from = self.cookie.max(before_place((self.number + 1).saturating_sub(FAR)));
        rows.after(from).filter(move |row| !is_behind(self.number, row.cookie))
    }
}

/// Returns whether everything that the number of an entry depends on is known, if names up to a cookie are.
pub(crate) fn is_decided(cookie: Cookie, known_to: Cookie) -> bool {
    place(cookie) + FAR < place(known_to)
}

/// Returns the numbers of a page's entries, up to and with the first mark. `cookies` are theirs, in order.
pub(crate) fn short_cookies(rows: &DirEntries, from: Position, cookies: &[Cookie]) -> Vec<ShortCookie> {
    let (Some(first), Some(last)) = (cookies.first(), cookies.last()) else { return Vec::new() };
    let until = place(*last) + FAR;
    let near = rows.after(before_place(place(*first).saturating_sub(FAR)));
    let near = near.filter(|row| row.child.is_some()).map(|row| row.cookie);
    let neighbours: Vec<Cookie> = near.take_while(|cookie| place(*cookie) <= until).collect();
    let mut found = Vec::with_capacity(cookies.len());
    for (nth, cookie) in cookies.iter().enumerate() {
        if cookies.get(nth + 1) == Some(cookie) {
            // Names with one cookie stay together.
            found.push(ShortCookie::InexactCookie(inexact(*cookie)));
            continue;
        }
        let (read, left) = neighbours.split_at(neighbours.partition_point(|c| c <= cookie));
        match exact_cookie(place(*cookie), from, read, left) {
            Some(number) => found.push(ShortCookie::Exact(number)),
            None => {
                found.push(ShortCookie::InexactCookie(inexact(*cookie)));
                break;
            }
        }
    }
    found
}

/// Returns the number behind an entry at that place: behind all names up to the entry, and behind others exactly if the
/// page's start is. Only neighbours matter, less than [`FAR`] before or at most that far behind.
fn exact_cookie(own: u64, from: Position, read: &[Cookie], left: &[Cookie]) -> Option<u64> {
    let fits = |number: &u64| {
        let may_be_before = |c: &&Cookie| place(**c) + width(*number) > *number;
        let may_be_behind = |c: &&Cookie| place(**c) <= (*number).max(from.number);
        let as_from = |c: &Cookie| is_behind(*number, *c) == is_behind(from.number, *c);
        !is_inexact(*number)
            && read.iter().rev().take_while(may_be_before).all(|c| is_behind(*number, *c))
            && left.iter().take_while(may_be_behind).all(as_from)
    };
    (own..=own + FAR).find(fits)
}

fn inexact(cookie: Cookie) -> u64 {
    (place(cookie) - 1 - mix(cookie.0) % (SPREAD - 16)) / 16 * 16 - 1
}

#[cfg(test)]
mod tests;
