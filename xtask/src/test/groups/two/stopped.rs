//! A client is stopped while it holds grants: other clients wait for its lease and no longer, and when it resumes it
//! drops its expired facts.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::{ALL, Mounts};
use crate::process;
use crate::test::groups::Test;
use crate::test::world::{As, World};

/// The time until a client that owes an acknowledgement is suspect, until its lease expires on the server's clock, and
/// until that is noticed.
const LIMIT: Duration = Duration::from_millis(2000 + 16_500 + 2000);
/// A resumed client first drops expired facts; until then its kernel may serve them.
const DROPS_WITHIN: Duration = Duration::from_secs(1);
/// Limit until it has reconnected.
const BACK_WITHIN: Duration = Duration::from_secs(10);

pub const TEST: Test = ("two: a stopped client is waited for, and no longer", stopped);

const WARM: &str = "for i in 1 2 3; do ls -l $B/d; cat $B/d/f; test ! -e $B/d/new; done";
/// Read by the stopped client when it resumes.
const LOOK: &str = "stat -c %a $B/d/f; cat $B/d/f; ls $B/d | tr '\\n' ' '";
const EXPECTED: &str = "600\nnew text\nf new";
/// Requests to the stopped client, which it finds first when it resumes.
const ASK: &str = "for i in 1 2 3 4 5 6 7 8; do
    stat --cached=never -c %a $B/d/f >$WORK/asked.$i 2>&1 </dev/null &
done";
const ASKED: &str = "for i in 1 2 3 4 5 6 7 8; do
    until test -s $WORK/asked.$i; do sleep 0.05; done
done
cat $WORK/asked.*; rm $WORK/asked.*";

fn stopped(world: &World) -> Result<()> {
    let mounts = Mounts::named(world, "stopped-", As::Us, &[ALL, ALL])?;
    let short = Duration::from_secs(20);
    mounts.sh("mkdir $A/d; echo old > $A/d/f; chmod 644 $A/d/f", short)?;
    mounts.sh(WARM, short)?;
    ensure!(mounts.status(1, ["leases", "read"])? > 0, "it holds no grants to begin with");
    let asleep = process::Stopped::new(mounts.mounts[1].daemon());
    let start = Instant::now();
    let long = LIMIT + Duration::from_secs(10);
    mounts.sh("chmod 600 $A/d/f", long)?;
    let first = start.elapsed();
    mounts.sh("echo 'new text' > $A/d/f; touch $A/d/new", long)?;
    let all = start.elapsed();
    println!(
        "  waited {:.1} s for the first change, {:.1} s for all",
        first.as_secs_f64(),
        all.as_secs_f64()
    );
    ensure!(all <= LIMIT, "changes waited {all:.1?} for a stopped client, at most {LIMIT:.1?}");
    mounts.sh(ASK, long)?;
    std::thread::sleep(Duration::from_millis(100));
    drop(asleep);
    let asked = mounts.sh(ASKED, short)?;
    ensure!(asked.lines().all(|mode| mode == "600"), "what it was asked first, it answers with {asked:?}");
    sees_the_truth(&mounts)?;
    mounts.unmount()
}

/// The client's calls may fail while it reconnects, but their results are right: at once for calls that reach the
/// client, and within a second for those that the kernel answers.
fn sees_the_truth(mounts: &Mounts<'_>) -> Result<()> {
    let start = Instant::now();
    let limit = Duration::from_secs(15);
    loop {
        let asked = mounts.sh("stat --cached=never -c %a $B/d/f", limit);
        if let Ok(mode) = &asked {
            ensure!(mode.trim() == "600", "asked without a cache, it says mode {}", mode.trim());
        }
        let began = start.elapsed();
        match (asked.and_then(|_| mounts.sh(LOOK, limit)), began) {
            (Ok(seen), _) if seen.trim() == EXPECTED => break,
            (Ok(seen), began) if began > DROPS_WITHIN => {
                bail!("{began:.1?} after it went on it shows {seen:?}")
            }
            (Err(e), began) if began > BACK_WITHIN => {
                return Err(e.context(format!("{began:.1?} after it went on")));
            }
            _ => std::thread::sleep(Duration::from_millis(50)),
        }
    }
    println!("  it was right {:.2} s after it went on", start.elapsed().as_secs_f64());
    mounts.sh("echo back > $B/d/back; test \"$(cat $A/d/back)\" = back", limit)?;
    Ok(())
}
