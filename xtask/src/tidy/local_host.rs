//! In the client, the modules below `host` alone read about other processes and about mounts below the mount.

use super::code::Code;
use super::{Problem, Source, line_of};

const CLIENT: &str = "crates/client/src/";
const HOST: &str = "crates/client/src/host/";
/// Files of `/proc` about the daemon itself and about the whole machine.
const OWN: &[&str] = &["/proc/self/", "/proc/pressure/"];
/// The table of all mounts, though it lies below `/proc/self`.
const MOUNTS: &str = "/proc/self/mountinfo";
/// A child that reads about its parent, the daemon.
const WATCHDOG: (&str, &str) = ("crates/client/src/watchdog.rs", "/proc/{daemon}/");

/// In shipped Rust code.
pub fn check(source: &Source, code: &Code) -> Vec<Problem> {
    if !source.path.starts_with(CLIENT) || source.path.starts_with(HOST) || source.is_test() {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut say = |at: usize, what: &str| {
        let what = format!("{what}: ask the client's `Host`");
        found.push(Problem::new("host", &source.path, line_of(&source.text, at), what));
    };
    for (at, _) in source.text.match_indices("\"/proc").filter(|(at, _)| !code.is_test(*at)) {
        let path = &source.text[at + 1..];
        let is_own = OWN.iter().any(|own| path.starts_with(own)) && !path.starts_with(MOUNTS);
        let is_watchdog = source.path == WATCHDOG.0 && path.starts_with(WATCHDOG.1);
        if !is_own && !is_watchdog {
            say(at, "a path of other processes or mounts");
        }
    }
    for (at, _) in code.shipped.match_indices("test_kill_process") {
        say(at, "another process");
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<u32> {
        let (source, code) = (Source { path: path.into(), text: text.into() }, Code::of(text));
        check(&source, &code).into_iter().map(|problem| problem.line).collect()
    }

    #[test]
    fn paths_of_other_processes_are_found_outside_of_the_host() {
        let text = "fn f() { read(\"/proc/self/cgroup\"); }\nfn g() { read(format!(\"/proc/{pid}/stat\")); }\n\
            const ALL: &str = \"/proc\";\n// \"proc\" and /proc/1\nfn h() { open(\"/proc/self/mountinfo\"); }\n\
            #[cfg(test)]\nmod tests { fn t() { read(\"/proc/1/comm\"); } }\n";
        assert_eq!(lines("crates/client/src/driver.rs", text), [2, 3, 5]);
        assert!(lines("crates/client/src/host/local.rs", text).is_empty());
        assert!(lines("crates/server/src/os.rs", text).is_empty());
        assert!(lines("crates/client/src/mount/tests.rs", text).is_empty());
    }

    #[test]
    fn watchdog_reads_about_its_daemon_alone() {
        let text =
            "fn f() { read(format!(\"/proc/{daemon}/status\")); }\nfn g() { read(\"/proc/{pid}/stat\"); }";
        assert_eq!(lines("crates/client/src/watchdog.rs", text), [2]);
        assert_eq!(lines("crates/client/src/worker.rs", text), [1, 2]);
    }

    #[test]
    fn test_of_another_process_is_found() {
        assert_eq!(lines("crates/client/src/driver.rs", "fn f() { test_kill_process(pid); }"), [1]);
    }
}
