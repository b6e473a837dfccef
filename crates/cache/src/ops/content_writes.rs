//! Contents after local writes: what a mount has written is not fetched back while its grant lives.
//!
//! The kernel keeps the pages that a write fills. Of a page that it fills in part it keeps nothing, so the cache keeps these
//! bytes (docs/decisions/0043-contents.md).

use crate::byte_ranges::PAGE;
use crate::calls::{CallKind, InflightCall, attr_after};
use crate::contents::{ContentsTag, ReadAs};
use crate::grants::LiveGrant;
use crate::state::State;
use nigh_types::{LeaseScope, Reply, Response, Time};

/// Returns the bytes of a write that lie in pages which it fills in part, with their offsets.
pub(crate) fn partial_pages(offset: u64, data: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let Some(end) = offset.checked_add(data.len() as u64).filter(|end| *end > offset) else {
        return Vec::new();
    };
    let (first, last) = (offset.next_multiple_of(PAGE).min(end), end / PAGE * PAGE);
    let parts = if last <= offset { [offset..end, end..end] } else { [offset..first, last..end] };
    let bytes = |part: &std::ops::Range<u64>| {
        let index = |at: u64| data.len() - usize::try_from(end - at).unwrap_or(data.len());
        (part.start, data[index(part.start)..index(part.end)].to_vec())
    };
    parts.iter().filter(|part| !part.is_empty()).map(bytes).collect()
}

/// Keeps the contents of a file after the reply to a local write, if a grant says that no other client has changed it
/// meanwhile; else drops them.
pub(crate) fn keep_written(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    (ino, at): (u64, u64),
    response: &Response,
) {
    match version_after(state, now, flight, (ino, at), response) {
        Some(tag) if state.session.serves_callers_alike() => {
            for evicted in state.contents.keep_written(tag, flight.written.clone()) {
                state.prefetch.files.note_gone(evicted);
            }
        }
        _ => state.drop_contents(ino),
    }
}

/// Returns the tag of the contents after a write whose effect is known. `None`: it is not.
fn version_after(
    state: &State,
    now: Time,
    flight: &InflightCall,
    (ino, at): (u64, u64),
    response: &Response,
) -> Option<ContentsTag> {
    let CallKind::Write { size, writeback: false, append: false, direct: None, .. } = flight.purpose else {
        return None;
    };
    let is_whole =
        matches!(response.result, Ok(Reply::Written { offset, count }) if offset == at && count == size);
    let id = state.store.id_of(ino).filter(|_| is_whole)?;
    let attr = attr_after(response, ino)?;
    let held = flight
        .granted(&response.grants, id, LeaseScope::Data)
        .map(|grant| LiveGrant::begin(grant, flight.sent));
    let held = held.filter(|held| held.is_live(now) && held.recalled_before_any_change())?;
    let is_continuous =
        state.contents.tag(ino).is_none_or(|tag| tag.id == id && tag.held.recalled_before_any_change());
    let race = &flight.race_log;
    let others = race.local_inodes.contains(&ino) || race.remote_inodes.contains(&ino);
    let tag = ContentsTag { id, held, attr, read_as: ReadAs::Mount };
    (is_continuous && !others && !state.calls.is_data_changing(ino)).then_some(tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_write_lie_in_pages_that_it_fills_in_part() {
        let data = vec![7; 10_000];
        let parts = |offset, length| -> Vec<(u64, usize)> {
            let parts = partial_pages(offset, &data[..length]);
            parts.into_iter().map(|(at, bytes)| (at, bytes.len())).collect()
        };
        assert_eq!(parts(0, 10_000), [(8_192, 10_000 - 8_192)]);
        assert_eq!(parts(0, 8_192), []);
        assert_eq!(parts(100, 10), [(100, 10)]);
        assert_eq!(parts(0, 10), [(0, 10)]);
        assert_eq!(parts(4_090, 10), [(4_090, 6), (4_096, 4)]);
        assert_eq!(parts(4_090, 6), [(4_090, 6)]);
        assert_eq!(parts(4_090, 6 + 4_096), [(4_090, 6)]);
        assert_eq!(parts(5, 0), []);
    }
}
