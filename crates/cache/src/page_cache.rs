//! The kernel's pages, and write-back of mmap stores.

pub(crate) mod full_pages;
pub(crate) mod ranges;
pub(crate) mod writeback;
