//! Connections through a script in place of ssh, which drops its options and runs the command locally.

use nigh_link::ssh::{Prompting, READY, Target};
use nigh_link::{Kind, LinkError};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn script(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

struct Machine {
    dir: TempDir,
}

impl Machine {
    /// A machine with its own home directory; `login` prints as a login script would.
    fn new(login: &str) -> Machine {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("home");
        fs::create_dir(&home).unwrap();
        let run = format!(
            "HOME='{}' PATH=/usr/bin:/bin\nexport HOME PATH\necho \"$@\" >> \"$HOME/../options\"\n\
             while [ \"$1\" != -- ]; do shift; done\n[ \"$2\" = host ] || exit 255\n{login}\neval \"$3\"",
            home.display()
        );
        script(&dir.path().join("ssh"), &run);
        Machine { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn with_nigh(self, place: &str, text: &str) -> Machine {
        script(&self.path("home").join(place), text);
        self
    }

    fn target(&self) -> Target {
        let command = Some(format!("'{}'", self.path("ssh").display()));
        Target { destination: "host".into(), command, installed: false }
    }
}

fn ready() -> String {
    format!("printf '\\000{}'", String::from_utf8_lossy(&READY[1..]).replace('\n', "\\n"))
}

#[test]
fn output_of_login_scripts_is_not_part_of_the_stream() {
    let nigh = format!("[ \"$*\" = 'serve --listen stdio' ] || exit 9\n{}; exec cat", ready());
    let machine = Machine::new("echo Welcome; printf '\\000nigh'").with_nigh(".cargo/bin/nigh", &nigh);
    let link = machine.target().connect(Prompting::Never).unwrap();
    assert_eq!(link.kind(), Kind::Ssh);
    link.write_all(b"hello").unwrap();
    let mut said = Vec::new();
    while said.len() < 5 {
        let mut buffer = [0; 64];
        let count = link.read(&mut buffer).unwrap();
        said.extend_from_slice(&buffer[..count]);
    }
    assert_eq!(said, b"hello");
    link.shutdown();
    assert_eq!(link.read(&mut [0; 8]).unwrap(), 0);
    let options = fs::read_to_string(machine.path("options")).unwrap();
    assert!(options.contains("-oBatchMode=yes"), "{options}");
    drop(machine.target().connect(Prompting::Allowed).unwrap());
    let options = fs::read_to_string(machine.path("options")).unwrap();
    assert!(!options.lines().last().unwrap().contains("BatchMode"), "{options}");
}

#[test]
fn errors_distinguish_machine_without_nigh_from_unreachable_machine() {
    let error = Machine::new("").target().connect(Prompting::Never).unwrap_err();
    assert!(matches!(&error, LinkError::NoServer { .. }), "{error}");
    assert!(error.to_string().contains("--install-server"));
    let closed = Machine::new("echo banner; echo 'ssh: connect to host: refused' >&2; exit 255");
    let error = closed.target().connect(Prompting::Never).unwrap_err().to_string();
    assert_eq!(error, "ssh host: ssh: connect to host: refused");
    let silent = Machine::new("exit 3").target().connect(Prompting::Never).unwrap_err().to_string();
    assert!(silent.contains("status 3") && silent.lines().count() == 1, "{silent}");
    let gone =
        Target { destination: "host".into(), command: Some("/nonexistent/ssh".into()), installed: false };
    let error = gone.connect(Prompting::Never).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/ssh"), "{error}");
}

#[test]
fn login_that_prints_without_end_is_aborted() {
    let machine = Machine::new("yes; exit 1");
    let begun = Instant::now();
    assert!(machine.target().connect(Prompting::Never).is_err());
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn process_that_outlives_its_stream_is_killed() {
    let stays = format!("{}; exec sleep 1000", ready());
    let machine = Machine::new("echo $$ > \"$HOME/../pid\"").with_nigh(".cache/nigh/bin/nigh", &stays);
    let link = machine.target().connect(Prompting::Never).unwrap();
    let pid: i32 = fs::read_to_string(machine.path("pid")).unwrap().trim().parse().unwrap();
    let there = || Path::new(&format!("/proc/{pid}")).exists();
    assert!(there());
    drop(link);
    let give_up = Instant::now() + Duration::from_secs(10);
    while there() {
        assert!(Instant::now() < give_up, "it is still there");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn signal(pid: i32, signal: libc::c_int) {
    // SAFETY: kill(2) touches no memory.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// Ctrl-C in a script that has mounted signals the terminal's whole foreground group.
#[test]
fn terminal_signals_do_not_end_an_ssh_link() {
    let stays = format!("{}; exec cat", ready());
    let machine = Machine::new("echo $$ > \"$HOME/../pid\"").with_nigh(".cache/nigh/bin/nigh", &stays);
    for asking in [Prompting::Never, Prompting::Allowed] {
        let link = machine.target().connect(asking).unwrap();
        let pid = fs::read_to_string(machine.path("pid")).unwrap().trim().parse().unwrap();
        for one in [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP] {
            signal(pid, one);
            link.write_all(b"still there").unwrap();
            let mut answer = [0; 11];
            let mut taken = 0;
            while taken < answer.len() {
                let count = link.read(&mut answer[taken..]).unwrap();
                assert_ne!(count, 0, "signal {one} ended it");
                taken += count;
            }
            assert_eq!(&answer, b"still there");
        }
    }
}

#[test]
fn installed_program_is_copied_and_then_used() {
    let machine = Machine::new("");
    let program = machine.path("program");
    let says = format!("[ \"$1\" = --version ] && exec echo nigh 9\n{}; exec cat", ready());
    script(&program, &says);
    let mut target = machine.target();
    target.install(&program).unwrap();
    let copy = machine.path("home/.cache/nigh/bin/nigh");
    assert_eq!(fs::read(&copy).unwrap(), fs::read(&program).unwrap());
    assert_eq!(fs::metadata(&copy).unwrap().permissions().mode() & 0o777, 0o700);
    target.installed = true;
    drop(target.connect(Prompting::Never).unwrap());
    script(&program, "echo 'cannot find libfoo' >&2; exit 127");
    let error = target.install(&program).unwrap_err().to_string();
    assert!(error.contains("cannot find libfoo") && error.contains("build nigh there"), "{error}");
}

#[test]
fn a_program_is_not_copied_to_another_kind_of_machine() {
    let machine = Machine::new("uname() { echo Linux mips; }");
    let error = machine.target().install(Path::new("/bin/true")).unwrap_err().to_string();
    assert!(error.contains("Linux mips") && error.lines().count() == 1, "{error}");
    assert!(!machine.path("home/.cache").exists());
}
