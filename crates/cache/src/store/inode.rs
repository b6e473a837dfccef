//! Records of inodes. Each owner's part of a record is a type of that owner; the facts are here.

use crate::grants::LiveGrant;
use crate::kernel::KnownInode;
use crate::open::InodeOpens;
use crate::pages::InodePages;
use nigh_types::{Attr, Name, NodeId, Time, XattrSet};

/// Inode that the kernel knows, or that has facts under a grant of its own.
#[derive(Clone, Debug)]
pub(crate) struct Inode {
    pub id: NodeId,
    /// What the kernel has of the inode.
    pub kernel: KnownInode,
    /// Directory and name that last led to the inode: the hint of its [`nigh_types::NodeRef`], and the entry with its
    /// attributes if the directory lease covers them.
    parent_entry: Option<(u64, Name)>,
    /// Rarely used fields; `None`: all have their defaults.
    more: Option<Box<InodeExt>>,
}

/// Rarely used fields of an inode. Millions of inodes that the kernel only looked up have none.
#[derive(Clone, Debug)]
pub(crate) struct InodeExt {
    opens: InodeOpens,
    /// Attributes of a directory that a local change removed, for processes that are still in it.
    unlinked_attr: Option<Attr>,
    /// Earlier name of a hard link: a hint once the latest name is gone.
    earlier_name: Option<Box<(u64, Name)>>,
    /// Attributes under the inode's own grant.
    own: Option<(Attr, LiveGrant)>,
    /// Symlink target, valid until that deadline.
    target: Option<Box<(Box<[u8]>, Time)>>,
    /// All xattrs, valid until that deadline.
    xattrs: Option<Box<(XattrSet, Time)>>,
    pages: InodePages,
}

static NO_EXT: InodeExt = InodeExt::nothing();

impl InodeExt {
    const fn nothing() -> InodeExt {
        InodeExt {
            opens: InodeOpens::none(),
            unlinked_attr: None,
            earlier_name: None,
            own: None,
            target: None,
            xattrs: None,
            pages: InodePages::none(),
        }
    }

    /// Returns whether all fields have their defaults.
    fn is_nothing(&self) -> bool {
        let InodeExt { opens, unlinked_attr, earlier_name, own, target, xattrs, pages } = self;
        let has_names = unlinked_attr.is_some() || earlier_name.is_some();
        let has_facts = own.is_some() || target.is_some() || xattrs.is_some();
        opens.is_none() && pages.is_none() && !has_names && !has_facts
    }
}

impl Inode {
    /// Begins a record of an inode that the kernel knows by `lookups` replies.
    pub fn new(id: NodeId, lookups: u64) -> Inode {
        Inode { id, kernel: KnownInode::new(lookups), parent_entry: None, more: None }
    }

    fn ext(&self) -> &InodeExt {
        self.more.as_deref().unwrap_or(&NO_EXT)
    }

    /// Returns the rarely used fields for a change, allocated if absent.
    fn ext_mut(&mut self) -> &mut InodeExt {
        self.more.get_or_insert_with(|| Box::new(InodeExt::nothing()))
    }

    /// Frees the rarely used fields if all have their defaults.
    pub fn shrink(&mut self) {
        self.more.take_if(|more| more.is_nothing());
    }

    /// Resets the record for another inode with the inode number: no fact about the old one holds.
    pub fn reset(&mut self, id: NodeId) {
        let opens = self.ext().opens.after_reuse();
        self.more = opens.map(|opens| Box::new(InodeExt { opens, ..InodeExt::nothing() }));
        (self.id, self.parent_entry) = (id, None);
        self.kernel.note_number_reused();
    }

    /// Drops the facts at the end of all grants. The caller invalidates the kernel.
    pub fn note_all_grants_ended(&mut self) {
        if let Some(more) = self.more.as_deref_mut() {
            (more.own, more.xattrs, more.target) = (None, None, None);
            more.pages.note_all_grants_ended();
        }
    }

    /// Keeps the facts after their grants have ended, until the remote is back.
    pub fn keep_as_stale(&mut self) {
        let Some(more) = self.more.as_deref_mut() else { return };
        more.own = more.own.map(|(attr, held)| (attr, held.into_stale()));
        more.pages.keep_as_stale();
        more.xattrs.iter_mut().for_each(|xattrs| xattrs.1 = Time::FAR);
        more.target.iter_mut().for_each(|target| target.1 = Time::FAR);
    }

    /// Drops facts whose grants have ended by now.
    pub fn drop_expired(&mut self, now: Time) {
        if let Some(more) = self.more.as_deref_mut() {
            more.own.take_if(|(_, held)| !held.is_live(now));
            more.xattrs.take_if(|xattrs| xattrs.1 <= now);
            more.target.take_if(|target| target.1 <= now);
        }
    }
}

/// Names.
impl Inode {
    pub fn parent_entry(&self) -> Option<&(u64, Name)> {
        self.parent_entry.as_ref()
    }

    /// Returns the parent entry of a record that is dropped.
    pub fn into_parent_entry(self) -> Option<(u64, Name)> {
        self.parent_entry
    }

    /// Returns whether the inode's parent entry is this name.
    pub fn is_at(&self, dir: u64, name: impl AsRef<[u8]>) -> bool {
        let name = name.as_ref();
        self.parent_entry.as_ref().is_some_and(|(d, n)| *d == dir && n.as_bytes() == name)
    }

    /// Returns directory and name by which the remote may find the inode.
    pub fn path_hint(&self) -> Option<&(u64, Name)> {
        self.parent_entry.as_ref().or(self.ext().earlier_name.as_deref())
    }

    /// Records the directory and name that led to the inode.
    pub fn note_found_at(&mut self, dir: u64, name: Name) {
        self.parent_entry = Some((dir, name));
    }

    /// Records a name of the inode, unless an entry is known that led to it.
    pub fn note_listed_at(&mut self, dir: u64, name: &Name) {
        self.parent_entry.get_or_insert_with(|| (dir, name.clone()));
    }

    /// Records that the inode lost a name.
    pub fn note_name_lost(&mut self, dir: u64, name: &Name) {
        self.parent_entry.take_if(|(d, n)| *d == dir && *n == *name);
    }

    /// Keeps the parent entry as the earlier name of an inode that gets another name.
    pub fn keep_earlier_name(&mut self, other: (u64, &Name)) {
        if let Some(parent_entry) = self.parent_entry.clone().filter(|(dir, name)| (*dir, name) != other) {
            // The first name stays longest where names come and go, like the whiteout that overlayfs links.
            self.ext_mut().earlier_name.get_or_insert_with(|| Box::new(parent_entry));
        }
    }

    /// Forgets an earlier name that leads to the inode no more.
    pub fn forget_earlier_name(&mut self, at: (u64, &Name)) {
        if let Some(more) = self.more.as_deref_mut() {
            more.earlier_name.take_if(|from| (from.0, &from.1) == at);
        }
    }

    /// Records that a local change removed the directory, which had these attributes.
    pub fn note_unlinked(&mut self, attr: Attr) {
        self.ext_mut().unlinked_attr = Some(Attr { nlink: 0, ..attr });
    }

    /// Returns the attributes of a directory that a local change removed.
    pub fn unlinked_attr(&self) -> Option<&Attr> {
        self.ext().unlinked_attr.as_ref()
    }

    pub fn unlinked_attr_mut(&mut self) -> Option<&mut Attr> {
        self.more.as_deref_mut()?.unlinked_attr.as_mut()
    }

    /// Takes those attributes, for another node id of the directory.
    pub fn take_unlinked_attr(&mut self) -> Option<Attr> {
        self.more.as_deref_mut()?.unlinked_attr.take()
    }
}

/// Attributes under the inode's own grant, target and xattrs.
impl Inode {
    /// Returns the attributes with their grant, which may have ended.
    pub fn own_attr(&self) -> Option<&(Attr, LiveGrant)> {
        self.ext().own.as_ref()
    }

    pub fn live_own_attr(&self, now: Time) -> Option<&(Attr, LiveGrant)> {
        self.own_attr().filter(|(_, held)| held.is_live(now))
    }

    /// Records attributes under a new grant.
    pub fn note_own_attr(&mut self, attr: Attr, held: LiveGrant) {
        self.ext_mut().own = Some((attr, held));
    }

    /// Replaces the attributes if their grant lives, and returns the grant.
    pub fn replace_own_attr(&mut self, now: Time, attr: Attr) -> Option<LiveGrant> {
        let (own, held) = self.more.as_deref_mut()?.own.as_mut().filter(|(_, held)| held.is_live(now))?;
        *own = attr;
        Some(*held)
    }

    /// Drops the attributes and their grant. Returns whether there were any.
    pub fn drop_own_attr(&mut self) -> bool {
        self.more.as_deref_mut().is_some_and(|more| more.own.take().is_some())
    }

    pub fn live_target(&self, now: Time) -> Option<&[u8]> {
        self.ext().target.as_deref().filter(|(_, deadline)| now < *deadline).map(|(target, _)| &**target)
    }

    /// Records the symlink target with its deadline; `None`: it is not known any more.
    pub fn note_target(&mut self, target: Option<(Box<[u8]>, Time)>) {
        match target {
            Some(target) => self.ext_mut().target = Some(Box::new(target)),
            None => self.more.iter_mut().for_each(|more| more.target = None),
        }
    }

    /// Returns the xattrs with their deadline, which may have passed.
    pub fn xattrs(&self) -> Option<&(XattrSet, Time)> {
        self.ext().xattrs.as_deref()
    }

    /// Records all xattrs, valid until that deadline.
    pub fn note_xattrs(&mut self, xattrs: XattrSet, deadline: Time) {
        self.ext_mut().xattrs = Some(Box::new((xattrs, deadline)));
    }

    /// Drops xattrs and symlink target.
    pub fn drop_xattrs(&mut self) {
        self.more.iter_mut().for_each(|more| (more.xattrs, more.target) = (None, None));
    }
}

/// Opens.
impl Inode {
    pub fn opens(&self) -> &InodeOpens {
        &self.ext().opens
    }

    /// Returns the opens for a change, with the rarely used fields allocated if absent.
    pub fn opens_mut(&mut self) -> &mut InodeOpens {
        &mut self.ext_mut().opens
    }

    /// Returns the opens if there are rarely used fields, for removals.
    pub fn opens_if_any(&mut self) -> Option<&mut InodeOpens> {
        Some(&mut self.more.as_deref_mut()?.opens)
    }

    /// Returns whether the kernel knows the inode or holds it open.
    pub fn is_held_by_kernel(&self) -> bool {
        self.kernel.is_known() || self.opens().is_open()
    }
}

/// Pages.
impl Inode {
    pub fn pages(&self) -> &InodePages {
        &self.ext().pages
    }

    /// Returns the pages for a change, with the rarely used fields allocated if absent.
    pub fn pages_mut(&mut self) -> &mut InodePages {
        &mut self.ext_mut().pages
    }

    /// Returns the pages if there are rarely used fields, for removals.
    pub fn pages_if_any(&mut self) -> Option<&mut InodePages> {
        Some(&mut self.more.as_deref_mut()?.pages)
    }

    /// Drops grant and version of the pages: the caller invalidates them.
    pub fn drop_pages(&mut self) {
        self.pages_if_any().into_iter().for_each(InodePages::drop_all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inode_record_after_a_lookup_is_small() {
        assert!(size_of::<Inode>() <= 88, "{}", size_of::<Inode>());
        assert!(size_of::<InodeExt>() <= 592, "{}", size_of::<InodeExt>());
        let mut inode = Inode::new(NodeId { ino: 7, generation: 1 }, 1);
        inode.drop_xattrs();
        inode.drop_pages();
        inode.note_target(None);
        assert!(inode.more.is_none());
        inode.opens_mut().note_dir_open();
        inode.shrink();
        assert!(inode.opens().is_open());
        inode.opens_mut().note_dir_close();
        inode.shrink();
        assert!(inode.more.is_none());
    }
}
