//! The verdict.

use std::fmt;

use super::cells;
use super::names::Names;
use super::partition::{Partition, partition};
use super::registers::{Contents, Register};
use super::search::{Object, Operation, SearchFailure, search};
use super::{Call, CallResult, History, Record};
use nigh_types::Errno;

/// Statistics of a history that some order explains.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Report {
    pub calls: u64,
    /// All names count as one object.
    pub objects: u64,
    /// Largest set of configurations in any search.
    pub largest: usize,
    /// Changes with an unknown outcome.
    pub unknown: u64,
    /// Calls by path that failed with ESTALE. Either another mount moved a directory while the lock that Linux needs
    /// to move it in its own tree was held (`__d_unalias`), or a name changed twice meanwhile, since Linux looks a
    /// path up twice (`retry_estale`).
    pub stale: u64,
    /// link(2) calls on a file whose link count was 0 in the mount's kernel.
    pub wrong_nlink: u64,
    /// 1 if results are explained only by a kernel that counted one name of a file too few.
    pub undercounted: u64,
    /// Calls by descriptors that their mount has lost.
    pub lost: u64,
    /// Reads that found data of a write still in flight on their own mount, in that mount's page cache.
    pub read_before_reply: u64,
    /// Reads ignored because their mount was stopped.
    pub ignored: u64,
    /// Reads that ran while their kernel applied another call's reply.
    pub torn: u64,
    /// Objects with more orders than the search tries: neither explained nor violated.
    pub undecided: u64,
}

/// A call that no order explains. `Display` prints the object, the call, and the calls on that object around it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// `names`, or an inode and one of its properties.
    pub object: String,
    /// The number of the record at whose response no order was left.
    pub record: usize,
    pub reason: String,
    /// Records of the object, up to and including the violating one, sorted by invocation.
    pub context: Vec<Record>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.object, self.reason)?;
        for record in &self.context {
            writeln!(f, "  {record}")?;
        }
        Ok(())
    }
}

/// Number of records shown before the violating one.
const SHOWN: usize = 24;

/// Checks whether some order of the calls explains all results.
///
/// # Errors
/// The first call that no order explains.
pub fn judge(history: &History) -> Result<Report, Violation> {
    judge_counts(history, false)
}

fn judge_counts(history: &History, undercounts: bool) -> Result<Report, Violation> {
    let pieces = partition(history, undercounts).map_err(|(record, why)| Violation {
        object: "the call".to_owned(),
        record,
        reason: why,
        context: vec![history.records[record].clone()],
    })?;
    cells::judge(history)?;
    let mut judge = Judge { history, report: Report::default() };
    judge.report.calls = history.records.len() as u64;
    judge.report.unknown = pieces.unknown;
    judge.report.ignored = pieces.ignored;
    judge.report.stale = pieces.stale;
    judge.report.wrong_nlink = pieces.wrong_nlink;
    judge.report.lost = pieces.lost;
    judge.report.read_before_reply = pieces.read_before_reply;
    judge.all(&pieces)?;
    Ok(judge.report)
}

/// Longest duration, in ns, of a read that the kernel answers from its cache.
const LONGEST_CACHED_READ: u64 = 50_000;
/// Limit of torn reads; they are rare.
const MAX_TORN: usize = 2;

/// Like [`judge`], for real mounts, whose kernels may return a torn read: up to [`MAX_TORN`] possibly torn reads may
/// stay unexplained. If link(2) is refused against all orders, kernels may have counted one name too few.
///
/// # Errors
/// The first call that no order explains.
pub fn judge_mounted(history: &History) -> Result<Report, Violation> {
    let violation = match judge_torn(history, false) {
        Err(violation) if is_refused_link(&history.records[violation.record]) => violation,
        judged => return judged,
    };
    judge_torn(history, true).map(|report| Report { undercounted: 1, ..report }).map_err(|_| violation)
}

fn is_refused_link(record: &Record) -> bool {
    matches!(
        (&record.call, &record.response),
        (Call::Link { .. }, Some((_, CallResult::Failed(Errno::NOENT))))
    )
}

fn judge_torn(history: &History, undercounts: bool) -> Result<Report, Violation> {
    let violation = match judge_counts(history, undercounts) {
        Err(violation) if may_be_torn(history, violation.record) => violation,
        judged => return judged,
    };
    let (mut torn, mut fewer) = (vec![violation.record], history.clone());
    fewer.records.remove(violation.record);
    loop {
        match judge_counts(&fewer, undercounts) {
            Ok(report) => return Ok(Report { torn: torn.len() as u64, ..report }),
            Err(violation) if torn.len() < MAX_TORN && may_be_torn(&fewer, violation.record) => {
                fewer.records.remove(violation.record);
                torn.push(violation.record);
            }
            Err(mut violation) => {
                for removed in torn.into_iter().rev() {
                    violation.record += usize::from(removed <= violation.record);
                }
                return Err(violation);
            }
        }
    }
}

/// Linux applies attributes field by field, and sets their expiry first (`fuse_change_attributes_common`, whose lock
/// readers do not take). So a cached read at the moment when the attributes become valid may return older values of
/// the other fields.
fn may_be_torn(history: &History, at: usize) -> bool {
    let look = &history.records[at];
    let file = match (&look.call, &look.response) {
        (Call::Fstat { .. } | Call::Stat { .. }, Some((_, CallResult::Attributes(seen)))) => seen.file,
        (Call::Read { file }, Some(_)) => *file,
        _ => return false,
    };
    let Some(end) = look.response.as_ref().map(|(end, _)| *end) else { return false };
    let meets = |other: &Record| {
        let Some((ended, answer)) = &other.response else { return false };
        let of_it = matches!(answer, CallResult::Attributes(seen) if seen.file == file)
            || other.call.file() == Some(file);
        of_it
            && other.begin <= end
            && look.begin <= *ended
            && other.mount == look.mount
            && other.worker != look.worker
    };
    end - look.begin < LONGEST_CACHED_READ && history.records.iter().any(meets)
}

struct Judge<'h> {
    history: &'h History,
    report: Report,
}

impl Judge<'_> {
    fn all(&mut self, pieces: &Partition) -> Result<(), Violation> {
        let names = Names { kinds: pieces.kinds.clone() };
        self.one("names", &names, [0; super::Slot::COUNT as usize], &pieces.names)?;
        for (file, (first, modes)) in &pieces.modes {
            self.one(&format!("mode of {file}"), &Register, *first, modes)?;
        }
        for (file, times) in &pieces.times {
            self.one(&format!("mtime of {file}"), &Register, None, times)?;
        }
        for (file, xattrs) in &pieces.xattrs {
            self.one(&format!("xattr of {file}"), &Register, None, xattrs)?;
        }
        for (file, contents) in &pieces.contents {
            self.one(&format!("contents of {file}"), &Contents, (0, 0), contents)?;
        }
        Ok(())
    }

    fn one<O: Object>(
        &mut self,
        name: &str,
        object: &O,
        first: O::State,
        pieces: &[Operation<O::Act>],
    ) -> Result<(), Violation> {
        self.report.objects += 1;
        let piece = match search(object, first, pieces) {
            Ok(largest) => {
                self.report.largest = self.report.largest.max(largest);
                return Ok(());
            }
            Err(SearchFailure::TooMany { .. }) => {
                self.report.undecided += 1;
                return Ok(());
            }
            Err(SearchFailure::Unexplained { piece }) => piece,
        };
        let why = format!("no order explains the last of these calls: {:?}", pieces[piece].act);
        let last = pieces[piece].record;
        let ends = pieces[piece].ends;
        let mut around: Vec<usize> =
            pieces.iter().filter(|other| other.effective_from <= ends).map(|other| other.record).collect();
        around.retain(|record| *record != last);
        around.sort_by_key(|record| self.history.records[*record].begin);
        around.dedup();
        let around = around.iter().skip(around.len().saturating_sub(SHOWN)).chain([&last]);
        let around = around.map(|record| self.history.records[*record].clone()).collect();
        Err(Violation { object: name.to_owned(), record: last, reason: why, context: around })
    }
}
