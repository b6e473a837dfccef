//! Pages of the kernel's page cache for which the cache keeps records: those without a valid grant, data versions of the
//! others, and files of which the kernel may have full pages.

mod full;
mod ungranted;
mod versions;

pub(crate) use full::FullPageTracker;
pub(crate) use ungranted::UngrantedPages;
pub(crate) use versions::{PageBase, StalePages};
