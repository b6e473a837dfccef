//! Tests that share no state of their process, in one program: each program of its own is linked anew. The
//! others stand beside this folder.

#[path = "../common/mod.rs"]
mod common;

mod calls;
mod conformance;
mod credentials;
mod cuts;
mod data_leases;
mod escapes;
mod forged_ids;
mod forgotten;
mod lease_holders;
mod lease_races;
mod leases;
mod listing;
mod lock_reclaim;
mod mounts;
mod numbers;
mod origins;
mod orphans;
mod resume;
mod sessions;
mod space;
mod uid_claims;
mod updates;
