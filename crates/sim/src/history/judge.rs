//! The verdict.

use std::fmt;

use super::cells;
use super::names::Names;
use super::pieces::{Pieces, divide};
use super::registers::{Contents, Register};
use super::search::{Object, Piece, Refusal, search};
use super::{Answer, Call, History, Record};

/// What a history that some order explains was like.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Report {
    pub calls: u64,
    /// Names count as one.
    pub objects: u64,
    /// Of configurations, on the way of any search.
    pub largest: usize,
    /// Changes of which nobody knows what became.
    pub unknown: u64,
    /// Calls by names that failed with ESTALE: where another mount has moved a directory, and the lock that Linux needs to move it in its
    /// own tree is held (`__d_unalias`); or where a name was changed twice meanwhile, since Linux looks a path up twice (`retry_estale`).
    pub stale: u64,
    /// link(2) of a file of which a kernel held that it had no name.
    pub miscounted: u64,
    /// Calls by descriptors of mounts that may have lost them, and have.
    pub lost: u64,
    /// Reads of what a write of their own mount had put into its kernel's pages while it was out.
    pub early: u64,
    /// Looks that were left out, since their mount was stopped.
    pub left_out: u64,
    /// Looks that met another one's answer while their kernel took that in.
    pub torn: u64,
}

/// What no order explains. Displayed it names the object, the call, and the calls on that object around it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// `names`, or an inode and what of it.
    pub object: String,
    /// The number of the record at whose return no order was left.
    pub record: usize,
    pub why: String,
    /// Records of that object from a little before to the one, in their order of beginning.
    pub around: Vec<Record>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.object, self.why)?;
        for record in &self.around {
            writeln!(f, "  {record}")?;
        }
        Ok(())
    }
}

/// How many records are shown before the one at which no order was left.
const SHOWN: usize = 24;

/// Whether some order of the calls explains all that was told.
///
/// # Errors
/// What nothing explains.
pub fn judge(history: &History) -> Result<Report, Violation> {
    let pieces = divide(history).map_err(|(record, why)| Violation {
        object: "the call".to_owned(),
        record,
        why,
        around: vec![history.records[record].clone()],
    })?;
    cells::judge(history)?;
    let mut judge = Judge { history, report: Report::default() };
    judge.report.calls = history.records.len() as u64;
    judge.report.unknown = pieces.unknown;
    judge.report.left_out = pieces.left_out;
    judge.report.stale = pieces.stale;
    judge.report.miscounted = pieces.miscounted;
    judge.report.lost = pieces.lost;
    judge.report.early = pieces.early;
    judge.all(&pieces)?;
    Ok(judge.report)
}

/// So long, in ns, takes a look that asks nobody.
const UNASKED: u64 = 50_000;
/// That rarely happens.
const MOST_TORN: usize = 2;

/// The same as [`judge`], of real mounts, whose kernels may tear a look: at the most [`MOST_TORN`] that may be so need not be explained.
///
/// # Errors
/// What nothing explains.
pub fn judge_mounted(history: &History) -> Result<Report, Violation> {
    let violation = match judge(history) {
        Err(violation) if may_be_torn(history, violation.record) => violation,
        judged => return judged,
    };
    let (mut torn, mut fewer) = (vec![violation.record], history.clone());
    fewer.records.remove(violation.record);
    loop {
        match judge(&fewer) {
            Ok(report) => return Ok(Report { torn: torn.len() as u64, ..report }),
            Err(violation) if torn.len() < MOST_TORN && may_be_torn(&fewer, violation.record) => {
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

/// Linux takes in attributes one after the other, and first for how long they may be believed (`fuse_change_attributes_common`, whose lock
/// readers do not take). So one that asks nobody, as what it knows has just become good, may see the rest of it as it was before.
fn may_be_torn(history: &History, at: usize) -> bool {
    let look = &history.records[at];
    let file = match (&look.call, &look.answer) {
        (Call::Fstat { .. } | Call::Stat { .. }, Some((_, Answer::Seen(seen)))) => seen.file,
        (Call::Read { file }, Some(_)) => *file,
        _ => return false,
    };
    let Some(end) = look.answer.as_ref().map(|(end, _)| *end) else { return false };
    let meets = |other: &Record| {
        let Some((ended, answer)) = &other.answer else { return false };
        let of_it =
            matches!(answer, Answer::Seen(seen) if seen.file == file) || other.call.file() == Some(file);
        of_it
            && other.begin <= end
            && look.begin <= *ended
            && other.mount == look.mount
            && other.worker != look.worker
    };
    end - look.begin < UNASKED && history.records.iter().any(meets)
}

struct Judge<'h> {
    history: &'h History,
    report: Report,
}

impl Judge<'_> {
    fn all(&mut self, pieces: &Pieces) -> Result<(), Violation> {
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
        pieces: &[Piece<O::Act>],
    ) -> Result<(), Violation> {
        self.report.objects += 1;
        let (piece, why) = match search(object, first, pieces) {
            Ok(largest) => {
                self.report.largest = self.report.largest.max(largest);
                return Ok(());
            }
            Err(Refusal::Nothing { piece }) => (piece, "no order explains the last of these calls"),
            Err(Refusal::TooMany { piece }) => (piece, "too many orders explain the last of these calls"),
        };
        let why = format!("{why}: {:?}", pieces[piece].act);
        let last = pieces[piece].record;
        let ends = pieces[piece].ends;
        let mut around: Vec<usize> =
            pieces.iter().filter(|other| other.begins <= ends).map(|other| other.record).collect();
        around.retain(|record| *record != last);
        around.sort_by_key(|record| self.history.records[*record].begin);
        around.dedup();
        let around = around.iter().skip(around.len().saturating_sub(SHOWN)).chain([&last]);
        let around = around.map(|record| self.history.records[*record].clone()).collect();
        Err(Violation { object: name.to_owned(), record: last, why, around })
    }
}
