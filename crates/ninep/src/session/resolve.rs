//! Resolves a node reference to a fid.

use super::context::{CallContext, PendingReply};
use super::fids::Fid;
use super::node_ids::{DIRECTORY, SYMLINK, is_directory};
use super::requests::getattr;
use crate::values::Qid;
use crate::wire::ShortSequence;
use crate::{MOST_NAMES, Rmessage, Tmessage};
use nigh_types::{Attr, Errno, Kind, Name, NodeId, NodeRef};
use std::sync::Arc;

/// A fid, and whether it was remembered from an earlier call: then it may stand for another file by now.
pub(super) struct ResolvedFid {
    pub fid: Arc<Fid>,
    pub remembered: bool,
}

/// A walk whose reply is awaited.
pub(super) struct PendingWalk {
    fid: Arc<Fid>,
    reply: PendingReply,
    names: usize,
}

impl PendingWalk {
    /// Returns the new fid, and the qid of each name.
    pub async fn finish(self) -> Result<(Arc<Fid>, Vec<Qid>), Errno> {
        let PendingWalk { fid, reply, names } = self;
        let Rmessage::Walk { qids } = reply.await? else { return Err(Errno::PROTO) };
        if qids.0.len() < names {
            return Err(Errno::NOENT);
        }
        fid.mark_live();
        Ok((fid, qids.0))
    }
}

impl CallContext {
    /// Walks from a fid to a new one, over at most [`MOST_NAMES`] names. Without names: another fid of the same node.
    pub async fn walk(&self, from: &Fid, names: &[Name]) -> Result<(Arc<Fid>, Vec<Qid>), Errno> {
        self.start_walk(from, names).finish().await
    }

    /// Sends the message of a walk.
    pub fn start_walk(&self, from: &Fid, names: &[Name]) -> PendingWalk {
        let fid = self.new_fid();
        let texts: Vec<Vec<u8>> = names.iter().map(|name| name.as_bytes().to_vec()).collect();
        let message = Tmessage::Walk { fid: from.number(), new: fid.number(), names: ShortSequence(texts) };
        let reply = self.request_fid(message, &fid);
        PendingWalk { fid, reply, names: names.len() }
    }

    /// Walks one name, and returns the node with a fid of its own.
    pub async fn walk_one(&self, dir: &Fid, name: &Name) -> Result<(Arc<Fid>, NodeId), Errno> {
        let (fid, qids) = self.walk(dir, std::slice::from_ref(name)).await?;
        let qid = *qids.first().ok_or(Errno::PROTO)?;
        let node = self.shared().node(qid);
        Ok((fid, node))
    }

    /// Walks from the root, in as few messages as possible; `ESTALE` if the path leads to another node.
    pub async fn walk_far(&self, uid: u32, node: NodeId, names: &[Name]) -> Result<(), Errno> {
        if names.is_empty() {
            return if self.is_root(node) { Ok(()) } else { Err(Errno::STALE) };
        }
        let (fid, home) = self.walk_path(uid, node, names).await?;
        self.shared().nodes.note_known(uid, node, fid, home, false);
        Ok(())
    }

    /// A fid of its own for the node at a path, if it is that node; and its directory and name.
    async fn walk_path(
        &self,
        uid: u32,
        node: NodeId,
        names: &[Name],
    ) -> Result<(Arc<Fid>, Option<(NodeId, Name)>), Errno> {
        let mut at = self.root(uid).await?;
        // The root, and the node that each name led to.
        let mut passed = vec![self.shared().nodes.root()];
        for some in names.chunks(MOST_NAMES) {
            let (fid, qids) = self.walk(&at, some).await.map_err(stale)?;
            let mut shared = self.shared();
            for (qid, name) in qids.into_iter().zip(some) {
                let node = shared.node(qid);
                if let Some(Some(dir)) = passed.last() {
                    shared.nodes.note_parent_entry(node, *dir, name);
                }
                passed.push(Some(node));
            }
            drop(shared);
            at = fid;
        }
        if passed.last() != Some(&Some(node)) {
            return Err(Errno::STALE);
        }
        let dir = passed.get(passed.len().wrapping_sub(2)).copied().flatten();
        Ok((at, dir.zip(names.last().cloned())))
    }

    pub fn is_root(&self, node: NodeId) -> bool {
        self.shared().nodes.root() == Some(node)
    }

    /// A fid of a node, which may be shared, and from which no walk may start if it is no directory.
    pub async fn resolve(&self, uid: u32, place: &NodeRef) -> Result<ResolvedFid, Errno> {
        if self.is_root(place.node) {
            return Ok(ResolvedFid { fid: self.root(uid).await?, remembered: false });
        }
        let known = self.shared().nodes.known(uid, place.node);
        if let Some(known) = known {
            return Ok(ResolvedFid { fid: known.fid, remembered: true });
        }
        let open = self.shared().files.any(uid, place.node);
        if let Some(fid) = open {
            return Ok(ResolvedFid { fid, remembered: true });
        }
        Ok(ResolvedFid { fid: self.resolve_by_hint(uid, place).await?, remembered: false })
    }

    /// The fid of a directory for a lookup or creation in it.
    pub async fn resolve_dir(&self, uid: u32, place: &NodeRef) -> Result<Arc<Fid>, Errno> {
        if !is_directory(place.node) {
            return Err(Errno::NOTDIR);
        }
        self.resolve(uid, place).await.map(|reached| reached.fid)
    }

    /// Resolves by the last known name, in a directory whose fid is known.
    pub async fn resolve_by_hint(&self, uid: u32, place: &NodeRef) -> Result<Arc<Fid>, Errno> {
        let fid = self.own_by_hint(uid, place).await?;
        self.shared().nodes.note_known(uid, place.node, Arc::clone(&fid), place.path_hint.clone(), false);
        Ok(fid)
    }

    /// Resolves again, after the remembered fid led nowhere or to another node.
    pub async fn resolve_again(&self, uid: u32, place: &NodeRef) -> Result<Arc<Fid>, Errno> {
        self.shared().nodes.forget(uid, place.node);
        self.resolve_by_hint(uid, place).await
    }

    /// As [`CallContext::resolve_by_hint`], for a fid that only the caller has.
    async fn own_by_hint(&self, uid: u32, place: &NodeRef) -> Result<Arc<Fid>, Errno> {
        let (dir, name) = place.path_hint.as_ref().ok_or(Errno::STALE)?;
        let dir = if self.is_root(*dir) {
            self.root(uid).await?
        } else {
            let known = self.shared().nodes.known(uid, *dir).filter(|known| !known.open);
            match known {
                Some(known) => known.fid,
                None => return self.own_by_path(uid, place.node, (*dir, name)).await,
            }
        };
        let (fid, node) = self.walk_one(&dir, name).await.map_err(stale)?;
        if node == place.node { Ok(fid) } else { Err(Errno::STALE) }
    }

    /// Walks from the root by the remembered path.
    async fn own_by_path(
        &self,
        uid: u32,
        node: NodeId,
        (dir, name): (NodeId, &Name),
    ) -> Result<Arc<Fid>, Errno> {
        let mut names = self.shared().nodes.path(dir).ok_or(Errno::STALE)?;
        names.push(name.clone());
        self.walk_path(uid, node, &names).await.map(|(fid, _)| fid)
    }

    /// A fid that is not shared, because it becomes another kind of fid, such as an open file.
    pub async fn own_fid(&self, uid: u32, place: &NodeRef) -> Result<Arc<Fid>, Errno> {
        if self.is_root(place.node) {
            let root = self.root(uid).await?;
            return Ok(self.walk(&root, &[]).await?.0);
        }
        if !is_directory(place.node) {
            let unused = self.shared().nodes.take_unused(uid, place.node);
            if let Some(known) = unused {
                return Ok(known.fid);
            }
        }
        let known = self.shared().nodes.known(uid, place.node).filter(|known| !known.open);
        if let Some(known) = known {
            match self.walk(&known.fid, &[]).await {
                Err(Errno::NOENT | Errno::STALE) => {
                    self.shared().nodes.forget(uid, place.node);
                }
                cloned => return cloned.map(|(fid, _)| fid),
            }
        }
        self.own_by_hint(uid, place).await
    }

    /// Sends a message about a node. If its remembered fid leads nowhere any more, the node is resolved again, once.
    pub async fn request_of(
        &self,
        uid: u32,
        place: &NodeRef,
        message: impl Fn(u32) -> Tmessage + Send,
    ) -> Result<(Rmessage, Arc<Fid>), Errno> {
        let mut reached = self.resolve(uid, place).await?;
        loop {
            let answer = self.request(message(reached.fid.number())).await;
            let elsewhere = match &answer {
                Err(Errno::NOENT | Errno::STALE | Errno::BADF) => true,
                Ok(Rmessage::Getattr { attributes }) => self.shared().node(attributes.qid) != place.node,
                _ => false,
            };
            match answer {
                Ok(answer) if !elsewhere => return Ok((answer, reached.fid)),
                Err(errno) if !elsewhere => return Err(errno),
                _ if !reached.remembered => return Err(Errno::STALE),
                _ => {}
            }
            reached = ResolvedFid { fid: self.resolve_again(uid, place).await?, remembered: false };
        }
    }

    /// Attributes of the node that a fid stands for.
    pub async fn attributes(&self, fid: &Fid) -> Result<(NodeId, Attr), Errno> {
        let Rmessage::Getattr { attributes } = self.request(getattr(fid.number())).await? else {
            return Err(Errno::PROTO);
        };
        self.note(&attributes)
    }

    /// Attributes of a node by one of its fids; `ESTALE` if the fid stands for another node by now, or for none.
    pub async fn attributes_by(&self, fid: &Fid, node: NodeId) -> Result<Attr, Errno> {
        match self.attributes(fid).await {
            Ok((told, attr)) if told == node => Ok(attr),
            Ok(_) | Err(Errno::NOENT) => Err(Errno::STALE),
            Err(errno) => Err(errno),
        }
    }

    /// Attributes that were requested besides another message, if the server sent them.
    pub fn attributes_if_sent(&self, answer: Result<Rmessage, Errno>) -> Option<(NodeId, Attr)> {
        match answer {
            Ok(Rmessage::Getattr { attributes }) => self.note(&attributes).ok(),
            _ => None,
        }
    }

    /// Attributes from a reply, which the session does not remember.
    pub fn attributes_in(&self, answer: Rmessage) -> Result<(NodeId, Attr), Errno> {
        let Rmessage::Getattr { attributes } = answer else { return Err(Errno::PROTO) };
        self.converted(&attributes)
    }

    fn converted(&self, attributes: &crate::Attributes) -> Result<(NodeId, Attr), Errno> {
        let attr = super::reply::attr(attributes)?;
        let node = self.shared().node(attributes.qid);
        if attr.is_dir() == is_directory(node) { Ok((node, attr)) } else { Err(Errno::PROTO) }
    }

    /// Notes attributes from a reply.
    fn note(&self, attributes: &crate::Attributes) -> Result<(NodeId, Attr), Errno> {
        let (node, attr) = self.converted(attributes)?;
        self.shared().nodes.note_attr(node, attr);
        Ok((node, attr))
    }

    /// The file type of a node; requested from the server if it is unknown.
    pub async fn kind(&self, uid: u32, place: &NodeRef) -> Result<Kind, Errno> {
        match place.node.generation {
            DIRECTORY => return Ok(Kind::Directory),
            SYMLINK => return Ok(Kind::Symlink),
            _ => {}
        }
        let known = self.shared().nodes.attr(place.node);
        let attr = match known {
            Some(attr) => attr,
            None => self.attributes_of(uid, place).await?.1,
        };
        Ok(attr.kind())
    }

    /// Attributes of a node. Some servers return none for an unlinked open file: then they are the last known ones,
    /// with later local changes.
    pub async fn attributes_of(&self, uid: u32, place: &NodeRef) -> Result<(NodeId, Attr), Errno> {
        let answer = self.request_of(uid, place, getattr).await;
        if answer.as_ref().err() == Some(&Errno::STALE) {
            let open = self.shared().files.any_moved(uid, place.node);
            if let Some(fid) = open
                && let Ok(attr) = self.attributes_by(&fid, place.node).await
            {
                return Ok((place.node, attr));
            }
            if let Some(attr) = self.unlinked_attr(uid, place.node) {
                return Ok((place.node, attr));
            }
        }
        let (answer, _) = answer?;
        let Rmessage::Getattr { attributes } = answer else { return Err(Errno::PROTO) };
        self.note(&attributes)
    }

    /// The attributes of an open file for which the server returns none.
    pub fn unlinked_attr(&self, uid: u32, node: NodeId) -> Option<Attr> {
        let shared = self.shared();
        shared.files.any_moved(uid, node)?;
        let attr = shared.nodes.attr(node)?;
        Some(Attr { nlink: if attr.nlink == 1 { 0 } else { attr.nlink }, ..attr })
    }

    /// Checks that a node is a regular file; fails with the errno of open(2) if it is not.
    pub async fn check_file(&self, uid: u32, place: &NodeRef) -> Result<(), Errno> {
        match self.kind(uid, place).await? {
            Kind::File => Ok(()),
            Kind::Directory => Err(Errno::ISDIR),
            Kind::Symlink => Err(Errno::LOOP),
            _ => Err(Errno::INVAL),
        }
    }
}

/// Maps the error of a request about a node, not a name: the node is not where it was.
pub(super) fn stale(errno: Errno) -> Errno {
    match errno {
        Errno::NOENT | Errno::NOTDIR => Errno::STALE,
        other => other,
    }
}
