//! Pages of the kernel's page cache for which the cache keeps records of its own.

mod ungranted;

pub(crate) use ungranted::UngrantedPages;
