//! Tests in virtual time, in one program: each program of its own is linked with the cache anew.

#[path = "../far/mod.rs"]
mod far;

mod ahead;
mod budget;
mod contents;
mod grant_modes;
mod histories;
mod judge;
mod kept_listings;
mod listings_at_once;
mod memory;
mod mirror;
mod native;
mod open_files;
mod orders;
mod reading_orders;
mod scans;
mod scripts;
mod space;
mod walks;
mod wrong_replies;
mod xattrs;
