//! The cost of seeing a change: no request before it, and none after it if the change was pushed.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{ALL, Deadline, Mounts};
use crate::report::TestReport;
use crate::test::world::{As, World};

const LIMIT: Duration = Duration::from_secs(20);

/// A script in a directory of its own: `$D` on the mount that reads, `$E` on the one that changes.
struct Look {
    name: &'static str,
    prepare: &'static str,
    look: &'static str,
    change: &'static str,
    before: &'static str,
    after: &'static str,
    /// Limit of requests to the server for the read after the change: data is fetched again, and so are attributes
    /// that were never read.
    at_most: u64,
}

const LOOKS: &[Look] = &[
    Look {
        name: "attributes",
        prepare: "echo text > $E/f; chmod 644 $E/f",
        look: "stat -c %a $D/f",
        change: "chmod 600 $E/f",
        before: "644",
        after: "600",
        at_most: 0,
    },
    Look {
        name: "a new name",
        prepare: "touch $E/other",
        look: "test -e $D/f && echo there || echo missing",
        change: "echo text > $E/f",
        before: "missing",
        after: "there",
        at_most: 0,
    },
    Look {
        name: "a removed name",
        prepare: "echo text > $E/f",
        look: "test -e $D/f && echo there || echo missing",
        change: "rm $E/f",
        before: "there",
        after: "missing",
        at_most: 0,
    },
    Look {
        name: "a listing",
        prepare: "touch $E/a $E/b $E/c",
        look: "ls $D | tr '\\n' ' '",
        change: "touch $E/d",
        before: "a b c",
        after: "a b c d",
        at_most: 0,
    },
    Look {
        name: "data",
        prepare: "echo old > $E/f",
        look: "cat $D/f",
        change: "printf 'new\\n' | dd of=$E/f conv=notrunc status=none",
        before: "old",
        after: "new",
        at_most: 3,
    },
    Look {
        name: "a replaced link",
        prepare: "ln -s old $E/l; ln -s new $E/m",
        look: "readlink $D/l",
        change: "mv -T $E/m $E/l",
        before: "old",
        after: "new",
        at_most: 0,
    },
    Look {
        name: "a renamed directory",
        prepare: "mkdir $E/a; touch $E/a/f",
        look: "test -d $D/z && echo there || echo missing",
        change: "mv $E/a $E/z",
        before: "missing",
        after: "there",
        at_most: 1,
    },
];

pub fn run(world: &World, tally: &mut TestReport, deadline: &Deadline) {
    if deadline.is_over(tally, "two: counts") {
        return;
    }
    let mounts = match Mounts::new(world, As::Us, &[ALL, ALL]) {
        Ok(mounts) => mounts,
        Err(e) => return tally.fail("two: counts", &format!("{e:#}")),
    };
    // All directories are made before the first read: a parent directory that changes while the other mount reads
    // would be contended.
    if let Err(e) = LOOKS.iter().enumerate().try_for_each(|(number, look)| prepare(&mounts, number, look)) {
        return tally.fail("two: counts", &format!("preparing: {e:#}"));
    }
    for (number, look) in LOOKS.iter().enumerate() {
        tally.test(&format!("two: requests to see {}", look.name), || try_look(&mounts, number, look));
    }
    tally.test("two: counts unmounted", || mounts.unmount());
}

fn sh(mounts: &Mounts<'_>, number: usize, script: &str) -> Result<String> {
    let variables = format!("E=$A/count{number}; D=$B/count{number}\n");
    Ok(mounts.sh(&format!("{variables}{script}"), LIMIT)?.trim().to_owned())
}

fn prepare(mounts: &Mounts<'_>, number: usize, look: &Look) -> Result<()> {
    sh(mounts, number, &format!("mkdir $E; {}", look.prepare)).map(drop)
}

fn try_look(mounts: &Mounts<'_>, number: usize, look: &Look) -> Result<()> {
    let sh = |script: &str| sh(mounts, number, script);
    let requests = || mounts.status(1, ["remote", "requests"]);
    for _ in 0..3 {
        let warm = sh(look.look)?;
        ensure!(warm == look.before, "before the change it says {warm:?}, not {:?}", look.before);
    }
    let cold = requests()?;
    sh(look.look)?;
    let warm = requests()?;
    ensure!(warm == cold, "a look at unchanged names takes {} requests", warm - cold);
    let recalled = mounts.status(1, ["leases", "recalled"])?;
    let told = mounts.status(1, ["leases", "updated_in_place"])?;
    sh(look.change)?;
    let now_recalled = mounts.status(1, ["leases", "recalled"])?;
    let before = requests()?;
    let seen = sh(look.look)?;
    ensure!(seen == look.after, "after the change it says {seen:?}, not {:?}", look.after);
    let taken = requests()? - before;
    println!("  {}: {taken} requests, {} recalls", look.name, now_recalled - recalled);
    let Look { at_most, .. } = *look;
    ensure!(taken <= at_most, "it takes {taken} requests, at most {at_most}");
    let told = mounts.status(1, ["leases", "updated_in_place"])? - told;
    ensure!(taken > 0 || told > 0, "it was seen without asking or being told: by whom?");
    ensure!(recalled == now_recalled || at_most == 3, "{} recalls", now_recalled - recalled);
    Ok(())
}
