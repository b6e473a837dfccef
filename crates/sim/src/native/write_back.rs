//! Write-back of stores into maps, merged as the server does it (`nigh-server`, `ops/write_back.rs`).

use super::calls::PendingCall;
use super::server::Server;
use nigh_lease::{ChangeId, Holder, WroteBack};
use nigh_types::{Call, LeaseScope, NodeRef, Reply, Time, WriteFlags};

/// Pages that a client writes back.
pub(super) struct WriteBack {
    offset: u64,
    before: Vec<u8>,
    pages: Vec<u8>,
}

impl Server {
    /// Merges a write-back before its execution: its pages are replaced by the data to be written.
    pub(super) fn begin_write_back(&mut self, now: Time, job: &mut PendingCall) -> Option<WriteBack> {
        let (Some(change), Call::Write { node, offset, data, flags, .. }) =
            (job.change, &mut job.request.call)
        else {
            return None;
        };
        if !flags.write_back {
            return None;
        }
        let (node, offset) = (node.node, *offset);
        let read = Call::Read {
            node: NodeRef::without_hint(node),
            handle: None,
            offset,
            length: u32::try_from(data.len()).unwrap_or(u32::MAX),
        };
        let Ok(Reply::Data(mut before)) = self.tree.execute_as_host(now, read) else { return None };
        before.resize(data.len(), 0);
        let pages = data.clone();
        let range = (offset, data.len() as u64);
        let under = flags.since.and_then(|since| since.under);
        let base = under.and_then(|under| self.sequencer.table_mut().merge_base(now, change, under, range));
        self.settle(now);
        match (base, flags.since, job.request.mutation_id) {
            // No other client has changed the file since the base version.
            (Some(base), Some(since), Some(name)) if base.is_unchanged() => {
                self.tree.record_own_version(name.client, node, since.stamp);
            }
            (Some(base), ..) => {
                self.counts.merged += 1;
                *data = base.merge(offset, data, &before);
                *flags = WriteFlags { since: None, ..*flags };
            }
            _ => {}
        }
        Some(WriteBack { offset, before, pages })
    }

    /// Returns whether a client owes an acknowledgement for a file's data, or its attributes, that other clients'
    /// write-back may have changed. Directory grants cover attributes too.
    pub(super) fn owes(&self, client: u64, ino: u64, attributes: bool) -> bool {
        let own = self.sessions.iter().filter(|(_, session)| session.who.0 == client);
        let mut owed = own.flat_map(|(id, _)| self.sequencer.table().owed_nodes(Holder(*id)));
        owed.any(|(node, covers)| match covers {
            LeaseScope::Data => !attributes && node.ino == ino,
            LeaseScope::Attributes => attributes && node.ino == ino,
            _ => attributes,
        })
    }

    /// Records an executed data change.
    pub(super) fn note_data(
        &mut self,
        change: ChangeId,
        call: &Call,
        back: Option<WriteBack>,
        is_done: bool,
    ) {
        let table = self.sequencer.table_mut();
        match (call, back) {
            (Call::Write { data, .. }, Some(WriteBack { offset, before, pages })) => {
                let count = if is_done { data.len() } else { 0 };
                let (before, written) = (Some(&before[..count]), &data[..count]);
                table
                    .handle_wrote_back(change, WroteBack { offset, before, pages: &pages[..count], written });
            }
            (Call::Write { offset, data, .. }, None) => {
                table.handle_changed(change, (*offset, data.len() as u64));
            }
            (Call::Fallocate { offset, length, .. }, None) => {
                table.handle_changed(change, (*offset, *length));
            }
            (Call::CopyRange { to_offset, length, .. }, None) => {
                table.handle_changed(change, (*to_offset, *length));
            }
            (Call::SetAttr { set, .. }, None) => {
                set.size.into_iter().for_each(|size| table.handle_changed(change, (size, u64::MAX)));
            }
            _ => {}
        }
    }
}
