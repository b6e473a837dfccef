//! Tests in virtual time, in one program: each program of its own is linked with the cache anew.

#[path = "../far/mod.rs"]
mod far;

mod budget;
mod contents;
mod differential;
mod grant_modes;
mod histories;
mod kernel_listings;
mod linearizability;
mod listings_at_once;
mod memory;
mod native;
mod open_files;
mod orders;
mod prefetch;
mod reading_orders;
mod scans;
mod scripts;
mod space;
mod walks;
mod wrong_replies;
mod xattrs;
