//! The sources of the build: Debian's `wpa`, and a system root to build it against.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::root;
use crate::test::packages;

/// Packages that a build needs besides a compiler.
const PACKAGES: &[&str] = &[
    "diod",
    "gcc",
    "make",
    "xz-utils",
    "libssl-dev",
    "libnl-3-dev",
    "libnl-genl-3-dev",
    "libnl-route-3-dev",
    "libdbus-1-dev",
    "pkg-config",
];

fn folder() -> PathBuf {
    root::target().join("sources/wpa")
}

/// The unpacked source.
pub fn tree() -> Result<PathBuf> {
    let entries = fs::read_dir(folder()).context("no source was fetched")?;
    let mut dirs = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    let is_it = |path: &PathBuf| path.join("wpa_supplicant/defconfig").is_file();
    dirs.find(is_it).context("no source of wpa was unpacked")
}

/// A system root as in a distribution: headers, libraries, and symlinks of merged directories.
pub fn system() -> PathBuf {
    folder().join("system")
}

/// Installs and fetches what is missing.
pub fn prepare() -> Result<()> {
    let absent = missing();
    if !absent.is_empty() {
        packages::install(&absent);
        ensure!(missing().is_empty(), "apt-get install {}", absent.join(" "));
    }
    if tree().is_err() {
        fetch()?;
    }
    if !system().join("usr/include/stdio.h").is_file() {
        make_system()?;
    }
    Ok(())
}

fn missing() -> Vec<&'static str> {
    let is_missing = |package: &&&str| {
        let mut asked = Command::new("dpkg-query");
        asked.args(["-W", "-f", "${db:Status-Status}"]).arg(package).stderr(Stdio::null());
        !asked.output().is_ok_and(|out| out.stdout == b"installed")
    };
    PACKAGES.iter().filter(is_missing).copied().collect()
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("{command:?}"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(())
}

/// Fetches from this machine's Debian mirror, whether its source entries are enabled or not.
fn fetch() -> Result<()> {
    let (folder, parts) = (folder(), folder().join("apt/parts"));
    for dir in [&parts, &folder.join("apt/lists/partial")] {
        fs::create_dir_all(dir)?;
    }
    for entry in fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten() {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        let is_debian = text.contains("debian-archive") || text.contains("/debian");
        if is_debian && entry.path().extension().is_some_and(|ext| ext == "sources") {
            fs::write(parts.join(entry.file_name()), text.replace("Types: deb", "Types: deb-src"))?;
        }
    }
    let listed = fs::read_to_string("/etc/apt/sources.list").unwrap_or_default();
    let lines =
        listed.lines().filter(|line| line.starts_with("deb ")).map(|l| l.replacen("deb ", "deb-src ", 1));
    let list = folder.join("apt/sources.list");
    fs::write(&list, lines.collect::<Vec<_>>().join("\n"))?;
    let options = [
        format!("Dir::Etc::SourceList={}", list.display()),
        format!("Dir::Etc::SourceParts={}", parts.display()),
        format!("Dir::State::Lists={}", folder.join("apt/lists").display()),
        "APT::Sandbox::User=root".to_owned(),
    ];
    let apt = || {
        let mut apt = Command::new("apt-get");
        options.iter().for_each(|option| {
            apt.args(["-o", option]);
        });
        apt.arg("-qq").current_dir(&folder).stdout(Stdio::null());
        apt
    };
    println!("fetching: the source of wpa (2.6 MB)");
    run(apt().arg("update"))?;
    run(apt().args(["source", "--download-only", "wpa"]))?;
    let archive = fs::read_dir(&folder)?.flatten().map(|entry| entry.path());
    let mut archives = archive.filter(|path| path.to_string_lossy().contains(".orig.tar"));
    let Some(archive) = archives.next() else { bail!("apt-get brought no source of wpa") };
    run(Command::new("tar").arg("xf").arg(archive).current_dir(&folder))
}

fn make_system() -> Result<()> {
    let system = system();
    let libraries = system.join("usr/lib");
    fs::create_dir_all(&libraries)?;
    super::copy("/usr/include".as_ref(), &system.join("usr/include"))?;
    let triple = String::from_utf8(Command::new("gcc").arg("-dumpmachine").output()?.stdout)?;
    let (from, to) = (PathBuf::from("/usr/lib").join(triple.trim()), libraries.join(triple.trim()));
    fs::create_dir_all(&to)?;
    let wanted = [
        "libc.",
        "libc-",
        "libc_",
        "libm",
        "libmvec",
        "libdl",
        "librt",
        "libpthread",
        "libssl",
        "libcrypto",
        "libnl",
        "libdbus",
        "ld-linux",
        "crt",
        "Scrt",
        "gcrt",
        "libgcc_s",
        "libsystemd",
        "libgcrypt",
        "libgpg-error",
        "liblzma",
        "liblz4",
        "libzstd",
        "libcap",
    ];
    for entry in fs::read_dir(&from)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if wanted.iter().any(|start| name.starts_with(start)) {
            super::copy(&entry.path(), &to.join(&name))?;
        }
    }
    super::copy(&from.join("dbus-1.0"), &to)?;
    let _ = fs::create_dir(system.join("usr/lib64"));
    for entry in fs::read_dir("/usr/lib64").into_iter().flatten().flatten() {
        super::copy(&entry.path(), &system.join("usr/lib64").join(entry.file_name()))?;
    }
    for merged in ["lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{merged}"), system.join(merged))?;
    }
    Ok(())
}
