//! pjdfstest on a mount of diod.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::raw;

use crate::test::groups::{exercisers, filesystems};
use crate::test::mount::{Mount, MountParams};
use crate::test::over::{self, LinkKind};
use crate::test::packages;
use crate::test::world::{As, World};

/// Returns the verdicts on the disk itself and on a mount of a diod that exports it.
pub fn both(world: &World, program: &Path) -> Result<[BTreeMap<String, String>; 2]> {
    let disk = filesystems::disk(world, "ext4", "nine-ext4")?;
    let local = exercisers::world_dir(&disk.point, "pjd-local")?;
    let expected = exercisers::cases(world, program, &local, None)?;
    let (source, point) = (exercisers::world_dir(&disk.point, "pjd-source")?, world.dir("mnt", As::Us)?);
    let mut how = MountParams::new(As::Us).with("-o").with("suid,dev,allow_other");
    how.over = Some((LinkKind::Ninep, None));
    let mount = Mount::new(world, &source, &point, &how)?;
    let got = exercisers::cases(world, program, &point, Some(&mount))?;
    mount.unmount()?;
    Ok([expected, got])
}

/// Cases that fail on a mount of diod because diod fails them, also without nigh: a path of almost the maximum length
/// exceeds it behind diod's own path.
const OF_LONG_PATHS: &[&str] = &[
    "chmod::enametoolong_path",
    "chown::enametoolong_path",
    "chown::lchown::enametoolong_path",
    "link::enametoolong_path",
    "mkdir::enametoolong_path",
    "mkfifo::enametoolong_path",
    "mknod::enametoolong_path",
    "mknod::privileged::enametoolong_path",
    "open::enametoolong_path",
    "rename::enametoolong_path",
    "rmdir::enametoolong_path",
    "symlink::enametoolong_path",
    "truncate::enametoolong_path",
    "unlink::enametoolong_path",
];

pub fn pjdfstest(world: &World) -> Result<()> {
    let program =
        packages::exerciser("pjdfstest").context("not installed (cargo install --locked pjdfstest@0.2.2)")?;
    let tree = world.dir("long-paths", As::Us)?;
    let mut excused: Vec<&str> = exercisers::INHERENT.to_vec();
    if raw::refuses_long_paths(over::diod(world)?, &tree)? {
        excused.extend(OF_LONG_PATHS);
    }
    let [expected, got] = both(world, &program)?;
    ensure!(expected.len() > 300, "only {} cases ran on ext4", expected.len());
    let mut failed = Vec::new();
    let mut passed = 0;
    for (case, verdict) in &expected {
        let mounted = got.get(case).map_or("missing", String::as_str);
        match (verdict.as_str(), mounted) {
            ("ok", "ok") => passed += 1,
            ("ok", _) if excused.contains(&case.as_str()) => {}
            ("ok", _) => failed.push(format!("{case}: {mounted}")),
            _ => {}
        }
    }
    println!(
        "pjdfstest: {passed} of {} cases pass on a mount of diod; {} were expected to fail",
        expected.len(),
        excused.len()
    );
    ensure!(
        failed.is_empty(),
        "{} that pass on ext4 do not on its mount:\n  {}",
        failed.len(),
        failed.join("\n  ")
    );
    Ok(())
}
