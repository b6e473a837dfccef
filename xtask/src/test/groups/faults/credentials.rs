//! Callers whose rights are more than their ids: in user namespaces, and with capabilities.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::process::Ended;
use crate::test::groups::Test;
use crate::test::world::{As, World};

pub const TESTS: &[Test] =
    &[("faults: a mount inside a user namespace of one id works", inside_a_user_namespace)];

const LIMIT: Duration = Duration::from_secs(60);

/// Mounts `source` on `mnt` in the namespaces and works there. The process namespace takes the server along when it ends.
const ONE_ID: &str = r#"
set -eu
"$NIGH" mount source mnt
test "$(cat mnt/old)" = hello
echo new > mnt/new
mkdir mnt/dir
mv mnt/new mnt/dir/new
chmod 640 mnt/dir/new
test "$(stat -c %u:%a mnt/dir/new)" = 0:640
rm -r mnt/dir
! chown 1 mnt/old 2>/dev/null
umount mnt
"#;

fn unshared(world: &World, script: &str, who: As, dir: &Path) -> Result<Ended> {
    let mut command = world.command("unshare", who);
    command.args(["-Ur", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", script]);
    command.current_dir(dir).env("NIGH", world.nigh());
    command.env("NIGH_RUNTIME_DIR", dir.join("run")).env("NIGH_STATE_DIR", dir.join("state"));
    world.run(command, LIMIT)
}

fn inside_a_user_namespace(world: &World) -> Result<()> {
    let everyone = [Some(As::Us), world.tester];
    for who in everyone.into_iter().flatten() {
        let dir = world.dir("namespace", who)?;
        for name in ["source", "mnt", "run", "state"] {
            world.dir(&format!("namespace/{name}"), who)?;
        }
        std::fs::set_permissions(dir.join("run"), std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
        std::fs::write(dir.join("source/old"), "hello\n")?;
        world.give_all(&dir.join("source"), who)?;
        let ended = unshared(world, ONE_ID, who, &dir)?;
        let log = std::fs::read_to_string(dir.join("run/serve.log")).unwrap_or_default();
        ensure!(ended.ok(), "as {}: {}{log}", who.name(), ended.said);
    }
    Ok(())
}
