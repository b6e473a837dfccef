//! What groups need from outside: Debian packages and two exercisers from crates.io. Said before it is
//! installed.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;

use super::groups::Group;
use crate::{process, root};

/// A program that some group needs, and the package that brings it.
struct Need {
    program: &'static str,
    package: &'static str,
    groups: &'static [&'static str],
}

const NEEDS: &[Need] = &[
    Need {
        program: "fusermount3",
        package: "fuse3",
        groups: &["posix-user", "levels", "tools", "two", "events", "demo", "faults"],
    },
    Need { program: "inotifywait", package: "inotify-tools", groups: &["events"] },
    Need { program: "git", package: "git", groups: &["tools", "two"] },
    Need { program: "make", package: "make", groups: &["tools"] },
    Need { program: "gcc", package: "gcc", groups: &["tools", "narrow"] },
    Need { program: "/usr/lib32/crt1.o", package: "gcc-multilib", groups: &["narrow"] },
    Need { program: "/usr/bin/python3", package: "python3", groups: &["tools", "two", "cold"] },
    Need { program: "mkfs.ext4", package: "e2fsprogs", groups: &["tools", "filesystems", "faults"] },
    Need { program: "mkfs.xfs", package: "xfsprogs", groups: &["filesystems", "faults"] },
    Need { program: "mkfs.btrfs", package: "btrfs-progs", groups: &["filesystems", "faults"] },
    Need { program: "losetup", package: "mount", groups: &["tools", "filesystems", "faults"] },
    Need { program: "/usr/include/sys/acl.h", package: "libacl1-dev", groups: &["tools"] },
    Need { program: "/usr/sbin/sshd", package: "openssh-server", groups: &["links"] },
    Need { program: "ssh", package: "openssh-client", groups: &["links"] },
    Need { program: "setfacl", package: "acl", groups: &["tools", "faults"] },
    Need { program: "setfattr", package: "attr", groups: &["faults"] },
    Need { program: "/usr/sbin/smbd", package: "samba", groups: &["reexport"] },
    Need { program: "smbclient", package: "smbclient", groups: &["reexport"] },
    Need { program: "ganesha.nfsd", package: "nfs-ganesha", groups: &["reexport"] },
    // Its one file is where the machine's architecture says.
    Need { program: "/usr/share/doc/nfs-ganesha-vfs", package: "nfs-ganesha-vfs", groups: &["reexport"] },
    Need { program: "nfs-ls", package: "libnfs-utils", groups: &["reexport"] },
    Need { program: "/usr/sbin/diod", package: "diod", groups: &["ninep", "faults"] },
];

/// Exercisers from crates.io, with the versions that our exceptions were made for.
const EXERCISERS: &[(&str, &str)] = &[("pjdfstest", "0.2.2"), ("fsx", "0.3.2")];

/// Another 9P2000.L server than diod.
const SERVERS: &[(&str, &str)] = &[("unpfs", "0.13.0")];

/// Where `cargo install` puts them.
pub fn tools() -> PathBuf {
    root::target().join("tools")
}

/// An exerciser, if it is installed.
pub fn exerciser(name: &str) -> Option<PathBuf> {
    Some(tools().join("bin").join(name)).filter(|p| p.is_file())
}

/// Says what is missing and, unless told not to, installs it. What cannot be installed shows later, as a
/// group that did not run.
pub fn prepare(groups: &[&Group], no_install: bool) {
    let wanted = |need: &&Need| need.groups.iter().any(|n| groups.iter().any(|g| g.name == *n));
    let missing: Vec<&str> =
        NEEDS.iter().filter(wanted).filter(|n| !present(n.program)).map(|n| n.package).collect();
    if missing.is_empty() {
        println!("packages: nothing to install");
    } else if no_install {
        println!("packages missing: {} (nothing is installed: --no-install)", missing.join(" "));
    } else {
        install(&missing);
    }
}

/// Whether a group runs programs from crates.io.
#[must_use]
pub fn uses_exercisers(group: &str) -> bool {
    matches!(group, "tools" | "ninep")
}

/// Builds the programs from crates.io in a thread, if a group needs them.
pub fn build_exercisers(groups: &[&Group], no_install: bool) -> Option<JoinHandle<()>> {
    let wanted = groups.iter().any(|group| uses_exercisers(group.name));
    wanted.then(|| {
        std::thread::spawn(move || {
            exercisers(EXERCISERS, no_install);
            exercisers(SERVERS, no_install);
        })
    })
}

/// Installs what a benchmark runs and this machine lacks; each program with its package. What cannot be installed is
/// not measured.
pub fn for_benchmark(needs: &[(&str, &str)]) {
    let missing: Vec<&str> =
        needs.iter().filter(|(program, _)| !present(program)).map(|(_, package)| *package).collect();
    if !missing.is_empty() {
        install(&missing);
    }
}

fn present(program: &str) -> bool {
    if program.starts_with('/') {
        std::path::Path::new(program).exists()
    } else {
        process::which(program).is_some()
    }
}

/// apt-get as root or through sudo without asking for a password.
fn apt(arguments: &[&str]) -> Option<Command> {
    let mut command = if root::is_root() {
        Command::new("apt-get")
    } else {
        let mut sudo = Command::new(process::which("sudo")?);
        sudo.args(["--non-interactive", "apt-get"]);
        sudo
    };
    process::which("apt-get")?;
    command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
    Some(command)
}

pub fn install(missing: &[&str]) {
    let mut simulate = vec!["install", "--no-install-recommends", "--assume-no"];
    simulate.extend(missing);
    println!("installing: {} (about a minute)", missing.join(" "));
    let Some(mut update) = apt(&["--quiet", "--quiet", "update"]) else {
        println!("cannot install: neither root with apt-get nor sudo without a password");
        return;
    };
    if update.status().is_err() {
        return;
    }
    if let Some(said) = apt(&simulate).and_then(|mut c| c.output().ok()) {
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        for line in said.lines().filter(|l| l.starts_with("Need to get") || l.starts_with("After this")) {
            println!("  {line}");
        }
    }
    let mut arguments = vec!["--quiet", "--quiet", "--yes", "install", "--no-install-recommends"];
    arguments.extend(missing);
    match apt(&arguments).map(|mut c| c.stdout(Stdio::null()).status()) {
        Some(Ok(status)) if status.success() => println!("  installed"),
        other => println!("  apt-get did not install them: {other:?}"),
    }
}

fn exercisers(programs: &[(&str, &str)], no_install: bool) {
    for (name, version) in programs {
        if exerciser(name).is_some() {
            continue;
        }
        if no_install {
            println!("program missing: {name} {version} (nothing is installed: --no-install)");
            continue;
        }
        println!(
            "installing: {name} {version} from crates.io into {} (one to three minutes)",
            tools().display()
        );
        let mut command = Command::new(root::cargo());
        command
            .args(["install", "--quiet", "--locked", "--debug", "--root"])
            .arg(tools())
            .arg(format!("{name}@{version}"));
        command.arg("--target-dir").arg(tools().join("build")).stdin(Stdio::null());
        if !command.status().is_ok_and(|s| s.success()) {
            println!("  cargo did not install it");
        }
    }
}
