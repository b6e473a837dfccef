//! pjdfstest and fsx, on a mount of a loop-mounted ext4 and on that ext4 itself.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::report::TestReport;
use crate::test::mount::{Mount, MountParams};
use crate::test::packages;
use crate::test::world::{As, TESTER, World};

/// Cases of pjdfstest that no FUSE filesystem can pass; docs/semantics.md says why. At most five.
/// `link_count_max`: glibc knows LINK_MAX by the filesystem's magic number, and for FUSE says 127.
pub const INHERENT: &[&str] = &["link::link_count_max"];

pub fn pjdfstest(world: &World, tally: &mut TestReport, disk: &Path, how: &MountParams) {
    let Some(program) = packages::exerciser("pjdfstest") else {
        return tally.not_run("pjdfstest", "not installed (cargo install --locked pjdfstest@0.2.2)");
    };
    if world.tester.is_none() {
        return tally.not_run("pjdfstest", "no ordinary user can be made (useradd)");
    }
    let start = Instant::now();
    if let Err(e) = compare_pjdfstest(world, tally, &program, disk, how) {
        tally.fail("pjdfstest", &format!("{e:#}"));
    }
    println!("pjdfstest took {:.0} s, locally and mounted", start.elapsed().as_secs_f64());
}

fn compare_pjdfstest(
    world: &World,
    tally: &mut TestReport,
    program: &Path,
    disk: &Path,
    how: &MountParams,
) -> Result<()> {
    let local = world_dir(disk, "pjd-local")?;
    let expected = cases(world, program, &local, None)?;
    let (source, point) = (world_dir(disk, "pjd-source")?, world.dir("mnt", As::Us)?);
    let how = how.clone().with("-o").with("suid,dev");
    let mount = Mount::new(world, &source, &point, &how)?;
    let got = cases(world, program, &point, Some(&mount))?;
    ensure!(expected.len() > 300, "only {} cases ran on ext4", expected.len());
    let mut passed = 0;
    for (case, verdict) in &expected {
        let mounted = got.get(case).map_or("missing", String::as_str);
        match (verdict.as_str(), mounted) {
            ("ok", "ok") => passed += 1,
            ("FAILED" | "skipped", _) if mounted != "FAILED" || verdict == "FAILED" => tally.skipped += 1,
            _ if INHERENT.contains(&case.as_str()) => {
                tally.skip(&format!("pjdfstest {case}"), "inherent to FUSE")
            }
            _ => tally
                .fail(&format!("pjdfstest {case}"), &format!("{verdict} on ext4, {mounted} on its mount")),
        }
    }
    println!("pjdfstest: {passed} of {} cases pass", expected.len());
    tally.passed_quietly(passed);
    mount.unmount()
}

pub fn world_dir(disk: &Path, name: &str) -> Result<std::path::PathBuf> {
    let path = disk.join(name);
    fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// Every case's name and verdict (`ok`, `FAILED`, `skipped`).
pub fn cases(
    world: &World,
    program: &Path,
    dir: &Path,
    guard: Option<&Mount<'_>>,
) -> Result<BTreeMap<String, String>> {
    let group = crate::process::output(Command::new("id").args(["-gn", "nobody"]))?;
    let config = world.root.join("pjdfstest.toml");
    let entries = format!("[[\"nobody\", \"{}\"], [\"{TESTER}\", \"{TESTER}\"]]", group.trim());
    let features = "[features]\nposix_fallocate = {}\nutime_now = {}\nutimensat = {}\nrename_ctime = {}\n";
    let settings = "[settings]\nnaptime = 0.02\n";
    fs::write(&config, format!("{features}{settings}[dummy_auth]\nentries = {entries}\n"))?;
    let mut command = Command::new(program);
    command.arg("--configuration-file").arg(&config).arg("--path").arg(dir);
    command.arg("--secondary-fs").arg("/dev/shm").env("NO_COLOR", "1").current_dir(&world.root);
    let limit = Duration::from_secs(600);
    let ended = match guard {
        Some(mount) => mount.run(command, limit)?,
        None => world.run(command, limit)?,
    };
    let mut cases = BTreeMap::new();
    for line in ended.said.lines() {
        let mut words = line.split_whitespace();
        if let (Some(name), Some(verdict), None) = (words.next(), words.next(), words.next())
            && matches!(verdict, "ok" | "FAILED" | "skipped")
        {
            cases.insert(name.to_owned(), verdict.to_owned());
        }
    }
    ensure!(ended.said.contains("Summary"), "pjdfstest did not come to its end: {}", ended.tail(5));
    Ok(cases)
}

/// All operations but posix_fallocate (fsx draws length 0 for it now and then, which every filesystem
/// refuses), with and without maps. Fixed seeds: a failure can be repeated.
pub fn fsx(world: &World, tally: &mut TestReport, disk: &Path, how: &MountParams) {
    let Some(program) = packages::exerciser("fsx") else {
        return tally.not_run("fsx", "not installed (cargo install --locked fsx@0.3.2)");
    };
    let operations = if world.short { 4_000 } else { 200_000 };
    let common = "close_open = 1\nread = 10\nwrite = 10\ntruncate = 5\nfsync = 0.2\nfdatasync = 0.2\n\
                  posix_fallocate = 0\npunch_hole = 2\nsendfile = 2\nposix_fadvise = 1\ncopy_file_range = 2\n";
    let maps = "mapread = 10\nmapwrite = 10\ninvalidate = 1\n";
    let none = "mapread = 0\nmapwrite = 0\ninvalidate = 0\n";
    for (name, weights, seed) in [("without maps", none, "11"), ("with maps", maps, "12")] {
        let name = format!("fsx, {operations} operations {name}");
        let config = format!("flen = 1048576\n[weights]\n{common}{weights}");
        tally.test(&name, || one_fsx(world, &program, disk, how, &config, operations, seed));
    }
}

fn one_fsx(
    world: &World,
    program: &Path,
    disk: &Path,
    how: &MountParams,
    config: &str,
    operations: u32,
    seed: &str,
) -> Result<()> {
    let at = world.root.join("fsx.toml");
    fs::write(&at, config)?;
    let (source, point) = (world_dir(disk, "fsx-source")?, world.dir("mnt", As::Us)?);
    let mount = Mount::new(world, &source, &point, how)?;
    let mut command = Command::new(program);
    command.arg("-f").arg(&at).args(["-N", &operations.to_string(), "-S", seed]).arg("-P").arg(&world.root);
    command.arg(point.join("fsx"));
    let ended = mount.run(command, Duration::from_secs(900))?;
    ensure!(ended.ok(), "{}", ended.tail(12));
    mount.unmount()
}
