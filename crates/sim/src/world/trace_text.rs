//! Trace lines in plain words.

use nigh_cache::{KernelInvalidation, OpReply};
use nigh_remote::Event;
use nigh_types::{LeaseScope, Span, UpdateCommit, UpdatePrepare, UpdatedFact};

/// A line for a lost or restored session.
pub(super) fn session_line(at: usize, event: &Event) -> Option<String> {
    let at = name_of(at);
    match event {
        Event::Expired { .. } => Some(format!("{at} is away for too long")),
        Event::Restored { kept: true, .. } => Some(format!("{at} is back, and known")),
        Event::Restored { kept: false, .. } => Some(format!("{at} is back, and was forgotten")),
        _ => None,
    }
}

/// A line for a prepared update.
pub(super) fn prepare_line(hold: &UpdatePrepare) -> String {
    let facts = hold.facts.iter().map(|held| match held.covers {
        LeaseScope::Directory => {
            let names: Vec<String> =
                held.names.iter().map(|name| format!("{}/{name}", held.node.ino)).collect();
            names.join(", ")
        }
        _ => format!("attributes of {}", held.node.ino),
    });
    facts.collect::<Vec<String>>().join(", ")
}

/// A line for an update's commit.
pub(super) fn commit_line(commit: &UpdateCommit) -> String {
    let facts = commit.facts.iter().map(|fact| match fact {
        UpdatedFact::Name { dir, name, entry: Some(entry) } => {
            format!("{}/{name} is inode {}", dir.ino, entry.id.ino)
        }
        UpdatedFact::Name { dir, name, entry: None } => format!("{}/{name} is gone", dir.ino),
        UpdatedFact::Attr { node, attr } => format!("{} has nlink {}", node.ino, attr.nlink),
    });
    facts.collect::<Vec<String>>().join(", ")
}

/// Returns whether the outcome of a change is unknown: its caller was killed, or its time ran out.
#[must_use]
pub fn has_unknown_outcome(answer: &OpReply) -> bool {
    matches!(answer, OpReply::Failed(nigh_types::Errno::INTR | nigh_types::Errno::IO))
}

/// Letters that name clients: A, B, C …
#[must_use]
pub fn name_of(at: usize) -> char {
    u8::try_from(at).map_or('?', |n| char::from(b'A' + n.min(25)))
}

pub(super) fn words(stale: &KernelInvalidation) -> String {
    match stale {
        KernelInvalidation::Attr { ino } => format!("attributes of {ino}"),
        KernelInvalidation::Data { ino, offset: 0, length: 0 } => format!("data of {ino}"),
        KernelInvalidation::Data { ino, offset, length } => {
            format!("data of {ino} from {offset}, {length} bytes")
        }
        KernelInvalidation::Entry { dir, name } => format!("{dir}/{name}"),
        KernelInvalidation::RemovedDentry { dir, name } => format!("{dir}/{name}, which is gone"),
        KernelInvalidation::AllDentries(_) => "every name".to_owned(),
    }
}

/// Describes a reply in a few words.
#[must_use]
pub fn short(answer: &OpReply) -> String {
    let valid = |span: Span| match span {
        Span::ZERO => "not to be kept".to_owned(),
        span if span.as_millis() > 1_000_000 => "long".to_owned(),
        span => format!("{} ms", span.as_millis()),
    };
    match answer {
        OpReply::Node(node) => {
            format!(
                "inode {}, name {}, attributes {}",
                node.id.ino,
                valid(node.entry_valid),
                valid(node.attr_valid)
            )
        }
        OpReply::Created(node, _) => format!("made inode {}", node.id.ino),
        OpReply::Missing(span) => format!("no such name, {}", valid(*span)),
        OpReply::Attr(id, attr, span) => {
            format!("inode {} size {} nlink {}, {}", id.ino, attr.size, attr.nlink, valid(*span))
        }
        OpReply::Opened(opened) => format!("opened, keep {} listing {}", opened.keep_cache, opened.cache_dir),
        OpReply::Page(page) => {
            let mut names = page.names.as_slice();
            let mut list = Vec::new();
            for entry in &page.entries {
                let (name, rest) = names.split_at(usize::from(entry.name_len));
                names = rest;
                list.push(String::from_utf8_lossy(name).into_owned());
            }
            format!("[{}]", list.join(" "))
        }
        OpReply::Target(target) => format!("target {:?}", String::from_utf8_lossy(target)),
        OpReply::Data(data) => format!("data {:?}", String::from_utf8_lossy(data)),
        OpReply::Failed(errno) => errno.to_string(),
        other => format!("{other:?}"),
    }
}
