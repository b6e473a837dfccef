//! Pending signals of a thread (proc_pid_status(5)).

const SIGKILL: u64 = 1 << 8;
/// Signals whose default action ends a process with a core dump. The kernel leaves them pending unchanged
/// (`complete_signal` turns all other fatal ones into SIGKILL): QUIT ILL TRAP ABRT BUS FPE SEGV XCPU XFSZ SYS.
const CORE_DUMPING: u64 =
    1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 10 | 1 << 23 | 1 << 24 | 1 << 30;

/// Whether one of the pending signals ends the process.
pub(super) fn is_fatal(status: &str) -> bool {
    let mask = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or("");
        u64::from_str_radix(line.trim(), 16).unwrap_or(0)
    };
    let pending = mask("SigPnd:") | mask("ShdPnd:");
    let by_default = pending & !mask("SigBlk:") & !mask("SigIgn:") & !mask("SigCgt:");
    pending & SIGKILL != 0 || by_default & CORE_DUMPING != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(pending: u64, shared: u64, blocked: u64, ignored: u64, caught: u64) -> String {
        format!(
            "Name:\tx\nSigPnd:\t{pending:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
        )
    }

    #[test]
    fn only_signals_that_end_the_process_are_fatal() {
        let alarm = 1 << 13;
        let quit = 1 << 2;
        assert!(!is_fatal(&status(0, alarm, 0, 0, alarm)));
        assert!(is_fatal(&status(SIGKILL, alarm, 0, 0, alarm)));
        assert!(is_fatal(&status(0, SIGKILL, 0, 0, 0)));
        assert!(is_fatal(&status(0, quit, 0, 0, 0)));
        assert!(!is_fatal(&status(0, quit, 0, 0, quit)));
        assert!(!is_fatal(&status(0, quit, quit, 0, 0)));
        assert!(!is_fatal(&status(quit, 0, 0, quit, 0)));
    }
}
