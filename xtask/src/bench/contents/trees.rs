//! What the readers read.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::process;

/// Where Debian's package has the sources of the kernel.
pub const LINUX: &str = "/usr/src/linux-source-6.1.tar.xz";

/// 784 files of 10 bytes in 391 directories.
pub fn small(dir: &Path) -> Result<()> {
    let mut number = 0;
    let mut fill = |dir: &Path| -> Result<()> {
        fs::create_dir(dir)?;
        for file in ["one", "two"] {
            number += 1;
            fs::write(dir.join(file), format!("{number:09}\n"))?;
        }
        Ok(())
    };
    fill(dir)?;
    for a in 0..13 {
        let a = dir.join(format!("dir-{a}"));
        fill(&a)?;
        for b in 0..29 {
            fill(&a.join(format!("dir-{b}")))?;
        }
    }
    Ok(())
}

/// 1,000 texts of 4 KiB in one directory.
pub fn flat(dir: &Path) -> Result<()> {
    fs::create_dir(dir)?;
    for number in 0..1_000 {
        fs::write(dir.join(format!("text-{number:03}")), format!("{number:015}\n").repeat(256))?;
    }
    Ok(())
}

/// A file whose bytes do not repeat. `bytes`: a multiple of 1 MiB.
pub fn large(path: &Path, bytes: u64) -> Result<()> {
    let mut file = fs::File::create(path)?;
    let mut block = vec![0_u8; 1 << 20];
    for at in 0..bytes >> 20 {
        for (word, bytes) in block.chunks_exact_mut(8).enumerate() {
            bytes
                .copy_from_slice(&(at << 17 | word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        }
        file.write_all(&block)?;
    }
    Ok(file.sync_all()?)
}

/// A database of about 100 MB with one table, by number.
pub fn database(path: &Path) -> Result<()> {
    let script = "import sqlite3, sys\n\
        with sqlite3.connect(sys.argv[1]) as db:\n  \
        db.execute('create table t (number integer primary key, body blob)')\n  \
        db.executemany('insert into t values (?, randomblob(900))', ((n,) for n in range(100000)))\n";
    let mut command = Command::new("/usr/bin/python3");
    process::output(command.args(["-c", script]).arg(path))?;
    Ok(())
}

/// Debian's sources of Linux 6.1, if they are installed. Returns whether they are.
pub fn linux(dir: &Path) -> Result<bool> {
    if !Path::new(LINUX).exists() {
        return Ok(false);
    }
    fs::create_dir(dir)?;
    let mut command = Command::new("tar");
    command.args(["--extract", "--strip-components=1", "--no-same-owner", "--file", LINUX, "--directory"]);
    ensure!(command.arg(dir).status()?.success(), "{LINUX} cannot be unpacked");
    Ok(true)
}
