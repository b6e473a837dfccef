//! Records of inodes.

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
    pub parent_entry: Option<(u64, Name)>,
    /// Rarely used fields, read through `Deref`; `None`: all have their defaults.
    more: Option<Box<InodeExt>>,
}

/// Rarely used fields of an inode. Millions of inodes that the kernel only looked up have none.
#[derive(Clone, Debug)]
pub(crate) struct InodeExt {
    opens: InodeOpens,
    /// Attributes of a directory that a local change removed, for processes that are still in it.
    pub unlinked_attr: Option<Attr>,
    /// Earlier name of a hard link: a hint once the latest name is gone.
    pub earlier_name: Option<Box<(u64, Name)>>,
    /// Attributes under the inode's own grant.
    pub own: Option<(Attr, LiveGrant)>,
    /// Symlink target, valid until that deadline.
    pub target: Option<Box<(Box<[u8]>, Time)>>,
    /// All xattrs, valid until that deadline.
    pub xattrs: Option<Box<(XattrSet, Time)>>,
    pages: InodePages,
}

static NO_EXT: InodeExt = InodeExt::nothing();

impl std::ops::Deref for Inode {
    type Target = InodeExt;

    fn deref(&self) -> &InodeExt {
        self.more.as_deref().unwrap_or(&NO_EXT)
    }
}

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
        let InodeExt { opens, unlinked_attr: gone, earlier_name: linked_from, own, target, xattrs, pages } =
            self;
        let facts =
            gone.is_none() && linked_from.is_none() && own.is_none() && target.is_none() && xattrs.is_none();
        opens.is_none() && facts && pages.is_none()
    }
}

impl Inode {
    /// Begins a record of an inode that the kernel knows by `lookups` replies.
    pub fn new(id: NodeId, lookups: u64) -> Inode {
        Inode { id, kernel: KnownInode::new(lookups), parent_entry: None, more: None }
    }

    /// Returns the rarely used fields for a change, allocated if absent.
    pub fn ext_mut(&mut self) -> &mut InodeExt {
        self.more.get_or_insert_with(|| Box::new(InodeExt::nothing()))
    }

    /// Returns the rarely used fields if there are any, for removals.
    pub fn ext_if_any(&mut self) -> Option<&mut InodeExt> {
        self.more.as_deref_mut()
    }

    /// Drops xattrs and symlink target.
    pub fn drop_xattrs(&mut self) {
        self.ext_if_any().into_iter().for_each(|more| (more.xattrs, more.target) = (None, None));
    }

    pub fn set_target(&mut self, target: Option<(Box<[u8]>, Time)>) {
        match target {
            Some(target) => self.ext_mut().target = Some(Box::new(target)),
            None => self.ext_if_any().into_iter().for_each(|more| more.target = None),
        }
    }

    pub fn drop_own_attr(&mut self) -> Option<(Attr, LiveGrant)> {
        self.ext_if_any()?.own.take()
    }

    /// Frees the rarely used fields if all have their defaults.
    pub fn shrink(&mut self) {
        self.more.take_if(|more| more.is_nothing());
    }

    /// Returns whether the inode's parent entry is this name.
    pub fn is_at(&self, dir: u64, name: impl AsRef<[u8]>) -> bool {
        let name = name.as_ref();
        self.parent_entry.as_ref().is_some_and(|(d, n)| *d == dir && n.as_bytes() == name)
    }

    /// Resets the record for another inode with the inode number: no fact about the old one holds.
    pub fn reset(&mut self, id: NodeId) {
        let old = std::mem::replace(self, Inode::new(id, 0));
        self.kernel = old.kernel.clone();
        self.kernel.note_number_reused();
        if let Some(opens) = old.opens.after_reuse() {
            self.more = Some(Box::new(InodeExt { opens, ..InodeExt::nothing() }));
        }
    }
}

/// Opens.
impl Inode {
    pub fn opens(&self) -> &InodeOpens {
        &self.opens
    }

    /// Returns the opens for a change, with the rarely used fields allocated if absent.
    pub fn opens_mut(&mut self) -> &mut InodeOpens {
        &mut self.ext_mut().opens
    }

    /// Returns the opens if there are rarely used fields, for removals.
    pub fn opens_if_any(&mut self) -> Option<&mut InodeOpens> {
        Some(&mut self.ext_if_any()?.opens)
    }

    /// Returns whether the kernel knows the inode or holds it open.
    pub fn is_held_by_kernel(&self) -> bool {
        self.kernel.is_known() || self.opens.is_open()
    }
}

/// Pages.
impl Inode {
    pub fn pages(&self) -> &InodePages {
        &self.pages
    }

    /// Returns the pages for a change, with the rarely used fields allocated if absent.
    pub fn pages_mut(&mut self) -> &mut InodePages {
        &mut self.ext_mut().pages
    }

    /// Returns the pages if there are rarely used fields, for removals.
    pub fn pages_if_any(&mut self) -> Option<&mut InodePages> {
        Some(&mut self.ext_if_any()?.pages)
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
        inode.set_target(None);
        assert!(inode.more.is_none());
        inode.opens_mut().note_dir_open();
        inode.shrink();
        assert!(inode.opens().is_open());
        inode.opens_mut().note_dir_close();
        inode.shrink();
        assert!(inode.more.is_none());
    }
}
