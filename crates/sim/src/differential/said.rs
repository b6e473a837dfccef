//! The common form of a cache's reply and a tree's reply, for comparison.

use nigh_cache::{Answer, Op, Page};
use nigh_types::{Attr, Cookie, Errno, NodeId, Reply, Response, Space};

/// A reply without handles, timeouts and other parts that only one side has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Said {
    Failed(Errno),
    Done,
    Missing,
    Node(NodeId, Attr),
    Opened,
    Bytes(Vec<u8>),
    Number(u64),
    Space(Space),
    /// Entries without `.` and `..`.
    Names(Vec<(Vec<u8>, u64)>),
}

impl Said {
    /// Converts a cache's reply.
    #[must_use]
    pub fn by_answer(answer: &Answer) -> Said {
        match answer {
            Answer::Done => Said::Done,
            Answer::Node(node) | Answer::Created(node, _) => Said::Node(node.id, node.attr),
            Answer::Missing(_) => Said::Missing,
            Answer::Attr(id, attr, _) => Said::Node(*id, *attr),
            Answer::Target(bytes) | Answer::Data(bytes) | Answer::Value(bytes) => Said::Bytes(bytes.clone()),
            // Callers of this test may see all xattr names.
            Answer::XattrNames { names, size: 0 } => Said::Number(names.len() as u64),
            Answer::XattrNames { names, size } if names.len() as u64 > u64::from(*size) => {
                Said::Failed(Errno::RANGE)
            }
            Answer::XattrNames { names, .. } => Said::Bytes(names.clone()),
            Answer::Opened(_) => Said::Opened,
            Answer::Written(count) => Said::Number(*count),
            Answer::Page(page) => Said::Names(names(page)),
            Answer::Size(size) => Said::Number(u64::from(*size)),
            Answer::Space(space) => Said::space(space),
            Answer::Offset(offset) => Said::Number(*offset),
            Answer::Flags(flags) => Said::Number(u64::from(*flags)),
            Answer::Locked(_) => Said::Done,
            Answer::Failed(errno) => Said::Failed(*errno),
        }
    }

    /// Converts a tree's reply to the call for `op`, as the application would receive it.
    #[must_use]
    pub fn by_replies(op: &Op, responses: &[Response]) -> Said {
        let reply = match responses.last().map(|last| &last.result) {
            None => return Said::Done,
            Some(Err(errno)) => return Said::Failed(*errno),
            Some(Ok(reply)) => reply,
        };
        match (op, reply) {
            (_, Reply::Entry(Some(entry))) | (_, Reply::Created { entry, .. }) => {
                Said::Node(entry.id, entry.attr)
            }
            (_, Reply::Entry(None)) => Said::Missing,
            (_, Reply::Attr(id, attr)) => Said::Node(*id, *attr),
            (_, Reply::Listed(_)) => Said::Names(listed(responses)),
            (_, Reply::Target(target)) => Said::Bytes(target.to_vec()),
            (Op::ListXattr { size, .. }, Reply::Xattrs(set)) => {
                let names = set.items.iter().flat_map(|(name, _)| name.iter().copied().chain([0]));
                sized(names.collect(), *size)
            }
            (Op::GetXattr { size, .. }, Reply::Value(value)) => sized(value.clone(), *size),
            (_, Reply::Space(space)) => Said::space(space),
            (_, Reply::Opened { .. }) => Said::Opened,
            (_, Reply::Data(data)) => Said::Bytes(data.clone()),
            (_, Reply::Offset(offset)) => Said::Number(*offset),
            (_, Reply::Flags(flags)) => Said::Number(u64::from(*flags)),
            (_, Reply::Written { count, .. }) => Said::Number(*count),
            (_, Reply::Removed { .. } | Reply::Renamed { .. } | Reply::Done) => Said::Done,
            (op, reply) => panic!("{reply:?} is no reply to {op:?}"),
        }
    }

    /// Ignores the number of files, which may be slightly stale.
    fn space(space: &Space) -> Said {
        Said::Space(Space { files: 0, ..*space })
    }
}

/// Result of getxattr(2) or listxattr(2): size 0 asks for the length, and a size that is too small fails.
fn sized(bytes: Vec<u8>, size: u32) -> Said {
    let length = bytes.len() as u64;
    match u64::from(size) {
        0 => Said::Number(length),
        size if size < length => Said::Failed(Errno::RANGE),
        _ => Said::Bytes(bytes),
    }
}

/// Returns the names and inode numbers of a page, without `.` and `..`.
#[must_use]
pub fn names(page: &Page) -> Vec<(Vec<u8>, u64)> {
    let mut rest = page.names.as_slice();
    let mut names = Vec::new();
    for entry in &page.entries {
        let (name, others) = rest.split_at(usize::from(entry.name_len));
        rest = others;
        if name != b"." && name != b".." {
            names.push((name.to_vec(), entry.ino));
        }
    }
    names
}

/// Returns the cookie behind a page's last entry; `None` for an empty page.
#[must_use]
pub fn behind(page: &Page) -> Option<Cookie> {
    page.entries.last().map(|entry| entry.next)
}

fn listed(responses: &[Response]) -> Vec<(Vec<u8>, u64)> {
    let parts = responses.iter().filter_map(|response| match &response.result {
        Ok(Reply::Listed(part)) => Some(&part.entries),
        _ => None,
    });
    parts.flatten().map(|(name, entry)| (name.as_bytes().to_vec(), entry.id.ino)).collect()
}
