//! Renewal of the pages of an open file.

use crate::calls::InflightCall;
use crate::facts::{learn, order};
use crate::op::KernelInvalidation;
use crate::out::invalidate;
use crate::page_cache::writeback;
use crate::pages::ChangeToken;
use crate::state::State;
use nigh_types::{DataVersion, Reply, Response, Time};

/// Handles the renewal of an open file: if it is unchanged, its data stays granted as long as its attributes.
pub(crate) fn on_revalidate_reply(
    state: &mut State,
    now: Time,
    flight: &InflightCall,
    ino: u64,
    response: &Response,
) {
    let Ok(Reply::Attr(id, attr)) = response.result else { return };
    learn::apply_attr(state, now, flight, id, attr, &response.grants);
    let fresh = order::grant_in_reply(state, flight, id, &attr, &response.grants);
    let Some(inode) = state.store.inode_mut(ino).filter(|i| i.id == id && i.opens().is_open()) else {
        return;
    };
    let same = inode.pages().is_of(ChangeToken::of(&attr));
    // A grant that ends no later than the present one gains nothing, and renewals would never end.
    let until = inode.pages().grant().map_or(now, |held| held.deadline);
    let fresh = fresh.filter(|h| h.deadline > until && same && flight.race_log.is_empty());
    if let Some(held) = fresh {
        inode.pages_mut().renew_grant(held);
        invalidate::set_data_timers(state, ino);
        writeback::note_page_base(state, now, Some(flight), ino, DataVersion::of(&attr));
    } else if !same {
        inode.drop_pages();
        invalidate::invalidate(
            state,
            vec![KernelInvalidation::Data { ino, offset: 0, length: 0 }, KernelInvalidation::Attr { ino }],
            None,
        );
    }
}
