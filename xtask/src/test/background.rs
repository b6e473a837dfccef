//! Groups without mounts, in a process of their own beside the mounted groups.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::ending;
use super::groups::Group;
use super::world::Length;
use crate::process;
use crate::report::TestReport;

/// Mounted groups mostly wait for disks, links and timers, and some of them have time limits: they have precedence.
const NICE: libc::c_int = 10;

/// Another process of this program that runs some groups. Ended when dropped.
pub struct Background {
    names: String,
    child: Child,
    log: PathBuf,
    start: Instant,
}

impl Background {
    /// Starts the groups; `None` if there is none.
    pub fn start(groups: &[&Group], length: Length) -> Result<Option<Background>> {
        if groups.is_empty() {
            return Ok(None);
        }
        let names = groups.iter().map(|group| group.name).collect::<Vec<_>>().join(",");
        let log = std::env::temp_dir().join(format!("nigh-background-{}", std::process::id()));
        let file = File::create(&log)?;
        // The build may have replaced the file of this program.
        let mut command = Command::new("/proc/self/exe");
        command.args(["test", "--no-install", "--groups", &names]).args(length.argument()).process_group(0);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        // SAFETY: only system calls between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::setpriority(libc::PRIO_PROCESS, 0, NICE);
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                Ok(())
            });
        }
        let child = command.spawn()?;
        ending::end_with_us(child.id());
        println!("beside the others: {names}");
        Ok(Some(Background { names, child, log, start: Instant::now() }))
    }

    /// Waits for its end, and adds its output and counts to this run.
    pub fn finish(mut self, tally: &mut TestReport) {
        let status = self.child.wait();
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        println!("\n== beside the others: {}", self.names);
        let failed = tally.failed;
        let closed = tally.take_over(&said);
        println!("== {}: {:.0} s", self.names, self.start.elapsed().as_secs_f64());
        let succeeded = status.is_ok_and(|status| status.success());
        if !closed || succeeded != (tally.failed == failed) {
            tally.fail(&self.names, "it did not come to its end");
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        process::end(&mut self.child, Duration::ZERO);
        let _ = fs::remove_file(&self.log);
    }
}
