//! The common form of a cache's reply and a tree's reply, for comparison.

use nigh_cache::{Op, OpReply, Page};
use nigh_types::{Attr, Cookie, Errno, NodeId, Reply, Response, Space};

/// A reply without handles, timeouts and other parts that only one side has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
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

impl Outcome {
    /// Converts a cache's reply.
    #[must_use]
    pub fn from_reply(answer: &OpReply) -> Outcome {
        match answer {
            OpReply::Done => Outcome::Done,
            OpReply::Node(node) | OpReply::Created(node, _) => Outcome::Node(node.id, node.attr),
            OpReply::Missing(_) => Outcome::Missing,
            OpReply::Attr(id, attr, _) => Outcome::Node(*id, *attr),
            OpReply::Target(bytes) | OpReply::Data(bytes) | OpReply::Value(bytes) => {
                Outcome::Bytes(bytes.clone())
            }
            // Callers of this test may see all xattr names.
            OpReply::XattrNames { names, size: 0 } => Outcome::Number(names.len() as u64),
            OpReply::XattrNames { names, size } if names.len() as u64 > u64::from(*size) => {
                Outcome::Failed(Errno::RANGE)
            }
            OpReply::XattrNames { names, .. } => Outcome::Bytes(names.clone()),
            OpReply::Opened(_) => Outcome::Opened,
            OpReply::Written(count) => Outcome::Number(*count),
            OpReply::Page(page) => Outcome::Names(names(page)),
            OpReply::Size(size) => Outcome::Number(u64::from(*size)),
            OpReply::Space(space) => Outcome::space(space),
            OpReply::Offset(offset) => Outcome::Number(*offset),
            OpReply::Flags(flags) => Outcome::Number(u64::from(*flags)),
            OpReply::Locked(_) => Outcome::Done,
            OpReply::Failed(errno) => Outcome::Failed(*errno),
        }
    }

    /// Converts a tree's reply to the call for `op`, as the application would receive it.
    #[must_use]
    pub fn from_responses(op: &Op, responses: &[Response]) -> Outcome {
        let reply = match responses.last().map(|last| &last.result) {
            None => return Outcome::Done,
            Some(Err(errno)) => return Outcome::Failed(*errno),
            Some(Ok(reply)) => reply,
        };
        match (op, reply) {
            (_, Reply::Entry(Some(entry))) | (_, Reply::Created { entry, .. }) => {
                Outcome::Node(entry.id, entry.attr)
            }
            (_, Reply::Entry(None)) => Outcome::Missing,
            (_, Reply::Attr(id, attr)) => Outcome::Node(*id, *attr),
            (_, Reply::Listed(_)) => Outcome::Names(listed(responses)),
            (_, Reply::Target(target)) => Outcome::Bytes(target.to_vec()),
            (Op::ListXattr { size, .. }, Reply::Xattrs(set)) => {
                let names = set.items.iter().flat_map(|(name, _)| name.iter().copied().chain([0]));
                sized(names.collect(), *size)
            }
            (Op::GetXattr { size, .. }, Reply::Value(value)) => sized(value.clone(), *size),
            (_, Reply::Space(space)) => Outcome::space(space),
            (_, Reply::Opened { .. }) => Outcome::Opened,
            (_, Reply::Data(data)) => Outcome::Bytes(data.clone()),
            (_, Reply::Offset(offset)) => Outcome::Number(*offset),
            (_, Reply::Flags(flags)) => Outcome::Number(u64::from(*flags)),
            (_, Reply::Written { count, .. }) => Outcome::Number(*count),
            (_, Reply::Removed { .. } | Reply::Renamed { .. } | Reply::Done) => Outcome::Done,
            (op, reply) => panic!("{reply:?} is no reply to {op:?}"),
        }
    }

    /// Ignores the number of files, which may be slightly stale.
    fn space(space: &Space) -> Outcome {
        Outcome::Space(Space { files: 0, ..*space })
    }
}

/// Result of getxattr(2) or listxattr(2): size 0 asks for the length, and a size that is too small fails.
fn sized(bytes: Vec<u8>, size: u32) -> Outcome {
    let length = bytes.len() as u64;
    match u64::from(size) {
        0 => Outcome::Number(length),
        size if size < length => Outcome::Failed(Errno::RANGE),
        _ => Outcome::Bytes(bytes),
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
pub fn next_cookie(page: &Page) -> Option<Cookie> {
    page.entries.last().map(|entry| entry.next)
}

fn listed(responses: &[Response]) -> Vec<(Vec<u8>, u64)> {
    let parts = responses.iter().filter_map(|response| match &response.result {
        Ok(Reply::Listed(part)) => Some(&part.entries),
        _ => None,
    });
    parts.flatten().map(|(name, entry)| (name.as_bytes().to_vec(), entry.id.ino)).collect()
}
