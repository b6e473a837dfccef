//! What each call does. Every function takes the call's arguments and answers an [`Outcome`];
//! nothing here chooses an errno that the kernel can choose.

pub(crate) mod attributes;
pub(crate) mod data;
pub(crate) mod list;
pub(crate) mod look;
pub(crate) mod make;
pub(crate) mod open;
pub(crate) mod remove;
pub(crate) mod rename;

use crate::acting::Acting;
use crate::error::Result;
use crate::export::Export;
use crate::files::{SessionFiles, next_grant};
use crate::reach::{Node, Reach, proc_path};
use crate::stat;
use nigh_types::{Attr, Covers, Credentials, Entry, Grant, Kind, Mode, NodeId, Reply, Response, Term};

/// One call being executed.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) export: &'a Export,
    pub(crate) files: &'a SessionFiles,
    pub(crate) who: &'a Credentials,
}

/// What a call that succeeded answers.
pub(crate) struct Outcome {
    pub(crate) reply: Reply,
    pub(crate) after: Vec<(NodeId, Attr)>,
    pub(crate) grants: Vec<Grant>,
}

impl Outcome {
    pub(crate) fn plain(reply: Reply) -> Outcome {
        Outcome { reply, after: Vec::new(), grants: Vec::new() }
    }

    pub(crate) fn into_response(self) -> Response {
        Response { result: Ok(self.reply), after: self.after, grants: self.grants, last: true }
    }
}

impl<'a> Context<'a> {
    pub(crate) fn reach(&self) -> &'a Reach {
        self.export.reach()
    }

    /// Acts as the caller until the guard is dropped.
    pub(crate) fn act(&self) -> Result<Acting> {
        Acting::begin(self.export.acts(), self.who, false)
    }

    /// The same, and setuid and setgid bits are dropped even for root.
    pub(crate) fn act_killing(&self, kill_suidgid: bool) -> Result<Acting> {
        Acting::begin(self.export.acts(), self.who, kill_suidgid)
    }

    pub(crate) fn grant(&self, node: NodeId, covers: Covers) -> Grant {
        let term = self.files.term();
        Grant { id: next_grant(), node, covers, mode: Mode::Read, term, recallable: term == Term::Session }
    }

    /// The grant under which a node's attributes may be kept.
    pub(crate) fn attr_grant(&self, node: &Node) -> Grant {
        match node.under {
            Some(dir) if node.stat.attr.covered_by_parent() => self.grant(dir, Covers::Names),
            _ => self.grant(node.id, Covers::Inode),
        }
    }

    /// For a directory's names, and for what one of them leads to where that needs its own.
    pub(crate) fn name_grants(&self, dir: NodeId, child: Option<&Node>) -> Vec<Grant> {
        let mut grants = vec![self.grant(dir, Covers::Names)];
        if let Some(child) = child.filter(|c| !c.stat.attr.covered_by_parent()) {
            grants.push(self.grant(child.id, Covers::Inode));
        }
        grants
    }
}

/// Attributes of a node as they are now.
pub(crate) fn attr_now(node: &Node) -> Result<(NodeId, Attr)> {
    Ok((node.id, stat::of_fd(&node.fd)?.attr))
}

/// What an entry says of a reached node.
pub(crate) fn entry(node: &Node) -> Result<Entry> {
    let target = match node.stat.attr.kind() {
        Kind::Symlink => Some(look::target(node)?),
        _ => None,
    };
    let no_xattrs = has_no_xattrs(rustix::fs::listxattr_query(proc_path(&node.fd)));
    Ok(Entry { id: node.id, attr: node.stat.attr, target, no_xattrs })
}

fn has_no_xattrs(length: rustix::io::Result<usize>) -> bool {
    matches!(length, Ok(0) | Err(rustix::io::Errno::OPNOTSUPP))
}
