//! Pages of the kernel's page cache for which the cache keeps records: for each file their grant and version, those
//! without a valid grant, data versions of the others, and files of which the kernel may have full pages.

mod full;
mod inode_pages;
mod ungranted;
mod versions;

pub(crate) use full::FullPageTracker;
pub(crate) use inode_pages::{ChangeToken, InodePages};
pub(crate) use ungranted::UngrantedPages;
pub(crate) use versions::{PageBase, StalePages};
