//! Short form of `cargo xtask sim --scans 1000`: scans of small directories, with fixed seeds.

use nigh_sim::scan::{Counts, Plan, run};

fn scans(native: bool) {
    let number =
        |name: &str, else_: u64| std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(else_);
    let (seeds, first) = (number("NIGH_SCANS", 400), number("NIGH_SEED", 0));
    let entries = u32::try_from(number("NIGH_SCAN_ENTRIES", 400)).unwrap();
    let mut counts = Counts::default();
    for seed in first..first + seeds {
        let (told, changes) = (seed % 2 == 0, entries / 2);
        let times = if told { changes / 5 } else { [12, 60][usize::from(seed % 4 == 1)] };
        let plan = Plan { seed, native, entries, changes, pushes: told, bursts: times };
        counts.add(&run(plan).unwrap_or_else(|lie| panic!("{lie}")));
    }
    println!("{counts:?}");
    let nearly = u64::from(entries) / 2 * seeds * 4 / 5;
    assert!(counts.changes >= nearly && counts.waited > 0 && counts.moved > 0, "{counts:?}");
}

#[test]
fn entry_present_throughout_scan_is_returned_once() {
    scans(false);
}

#[test]
fn entry_present_throughout_scan_over_native_protocol_is_returned_once() {
    scans(true);
}
