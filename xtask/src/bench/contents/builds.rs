//! Builds whose sources lie on a cold mount: ripgrep by cargo, and Debian's wpa by make. What they write lies on the local disk.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::meter::{LIMIT, joined, measured};
use crate::bench::places::Distant;
use crate::build9p::{copy, source as wpa};
use crate::process;
use crate::root;
use crate::test::world::{As, World};

const RIPGREP: &str = "14.1.1";

/// Directory, name and script of a build. Cargo keeps its own files in `CARGO_HOME`, and `cp -rs` lays out links to the
/// sources, among which make writes its objects.
const BUILDS: &[(&str, &str, &str)] = &[
    ("ripgrep", "cargo build of ripgrep", "cargo build --quiet --offline --locked --target-dir \"$OUT\""),
    (
        "wpa",
        "make -j2 of wpa",
        "cp -rs \"$PWD/wpa\" \"$OUT\"; PKG_CONFIG_SYSROOT_DIR=\"$PWD/system\" \
            make -s -j2 -C \"$OUT/wpa_supplicant\" CC=\"gcc --sysroot=$PWD/system\"",
    ),
];

/// Lays out the sources of the builds in a directory.
pub fn lay_out(dir: &Path) -> Result<()> {
    copy(&ripgrep()?, &dir.join("ripgrep"))?;
    wpa::prepare()?;
    fs::create_dir(dir.join("wpa"))?;
    copy(&wpa::tree()?, &dir.join("wpa/wpa"))?;
    copy(&wpa::system(), &dir.join("wpa/system"))?;
    let supplicant = dir.join("wpa/wpa/wpa_supplicant");
    fs::copy(supplicant.join("defconfig"), supplicant.join(".config"))?;
    Ok(())
}

/// Returns the source of ripgrep with all its dependencies, which cargo fetches the first time.
fn ripgrep() -> Result<std::path::PathBuf> {
    let all = root::target().join("sources/ripgrep");
    let own = all.join("ripgrep");
    if own.join(".cargo/config.toml").is_file() {
        return Ok(own);
    }
    let _ = fs::remove_dir_all(&all);
    fs::create_dir_all(all.join("src"))?;
    fs::write(all.join("src/lib.rs"), "")?;
    let manifest = format!(
        "[package]\nname = \"sources\"\nversion = \"0.0.0\"\n[dependencies]\nripgrep = \"={RIPGREP}\"\n[workspace]\n"
    );
    fs::write(all.join("Cargo.toml"), manifest)?;
    println!("fetching: the source of ripgrep {RIPGREP} and its dependencies, from crates.io");
    let vendor = |dir: &Path| process::output(Command::new("cargo").arg("vendor").current_dir(dir));
    vendor(&all)?;
    fs::rename(all.join("vendor/ripgrep"), &own)?;
    let config = vendor(&own)?;
    fs::create_dir_all(own.join(".cargo"))?;
    fs::write(own.join(".cargo/config.toml"), config)?;
    Ok(own)
}

/// Measures all builds. `files_read`: different files of the tree that a build on the local disk opens, by strace.
pub fn run(world: &World, distant: &Distant<'_>, source: &Path, say: &mut impl FnMut(Value)) -> Result<()> {
    for (dir, name, script) in BUILDS {
        let files_read = files_read(world, &source.join(dir), script).context(*name)?;
        say(joined(json!({ "files_read": files_read }), &measured(world, distant, dir, (name, script))?));
    }
    Ok(())
}

fn files_read(world: &World, dir: &Path, script: &str) -> Result<u64> {
    let (out, trace) = (world.root.join("build-out"), world.root.join("build-trace"));
    let _ = fs::remove_dir_all(&out);
    let mut command = world.command("strace", As::Us);
    command.args([
        "-f",
        "-qq",
        "--decode-fds=path",
        "-e",
        "trace=open,openat",
        "-e",
        "status=successful",
        "-o",
    ]);
    command.arg(&trace).args(["sh", "-euc", script]).env("OUT", &out).current_dir(dir);
    let ended = world.run(command, LIMIT)?;
    ensure!(ended.ok(), "{}", ended.tail(5));
    let text = String::from_utf8_lossy(&fs::read(&trace)?).into_owned();
    let opened = text.lines().filter_map(|line| line.rsplit_once('<')?.1.strip_suffix('>'));
    let files: BTreeSet<&Path> =
        opened.map(Path::new).filter(|path| path.starts_with(dir) && path.is_file()).collect();
    fs::remove_dir_all(&out)?;
    Ok(files.len() as u64)
}
