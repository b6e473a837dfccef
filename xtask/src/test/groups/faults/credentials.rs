//! Callers whose rights are more than their ids: in user namespaces, and with capabilities.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::process::Ended;
use crate::root;
use crate::test::groups::Test;
use crate::test::mount::{How, Mount};
use crate::test::world::{As, World};

pub const TESTS: &[Test] = &[
    ("faults: a mount inside a user namespace of one id works", inside_a_user_namespace),
    ("faults: capabilities that the kernel checked are the server's too", capabilities),
];

const LIMIT: Duration = Duration::from_secs(60);

/// Mounts `source` on `mnt` in the namespaces and works there. The process namespace takes the server along when it ends.
const ONE_ID: &str = r#"
set -eu
refused() { if "$@" 2>/dev/null; then echo "allowed: $*"; exit 1; fi; }
"$NIGH" mount source mnt
test "$(cat mnt/old)" = hello
echo new > mnt/new
mkdir mnt/dir
mv mnt/new mnt/dir/new
chmod 640 mnt/dir/new
test "$(stat -c %u:%a mnt/dir/new)" = 0:640
rm -r mnt/dir
refused chown 1 mnt/old
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

/// Root of a container is user 1001, and its uids from 1 on are 100000 and so on, as podman has it. A shell begins without ids,
/// is given them, and works in the directory; what it runs from then on has the capabilities.
const CONTAINER: &str = r#"
set -eu
rm -rf "$DIR/c"; mkdir "$DIR/c"; chown 1001:1001 "$DIR/c"
echo secret > "$DIR/c/roots"; chmod 600 "$DIR/c/roots"
rm -f ready go; mkfifo ready go; chmod 666 ready go
setpriv --reuid 1001 --regid 1001 --clear-groups unshare -U bash -c 'echo $$ > ready; read < go; exec bash -euc "$INSIDE"' &
read pid < ready
trap 'kill $pid 2>/dev/null || true' EXIT
printf '0 1001 1\n1 100000 65536\n' > map
for map in uid_map gid_map; do dd if=map of=/proc/$pid/$map status=none; done
echo > go
wait $!
test "$(stat -c %u:%g:%a "$DIR/c/f")" = 100000:100000:644
test "$(stat -c %u:%g "$DIR/c/e/made")" = 1001:1001
test "$(stat -c %a "$DIR/c/program")" = 755
test "$(stat -c %u:%g "$DIR/c/roots")" = 0:0
"#;

const INSIDE: &str = r#"
refused() { if "$@" 2>/dev/null; then echo "allowed: $*"; exit 1; fi; }
cd "$DIR/c"
umask 022
mkdir d e; touch f program
chmod 4755 program
chown 1:1 f d e program
chmod 700 d e
echo x >> f
echo y > d/g
test "$(ls d)" = g
mv d/g d/h
ln d/h e/link
rm d/h
rmdir d
touch e/made
touch -d @5 f
setfattr -n user.a -v b f
truncate -s 1 f
refused chown 1 roots
refused cat roots
refused chmod 666 roots
refused mknod device c 1 3
"#;

/// A service of the machine that is no root and has one capability, as `AmbientCapabilities=` of systemd gives it.
const SERVICE: &str = r#"
set -eu
refused() { if "$@" 2>/dev/null; then echo "allowed: $*"; exit 1; fi; }
with() { caps=$1; shift; setpriv --reuid 1001 --regid 1001 --clear-groups --inh-caps "$caps" --ambient-caps "$caps" "$@"; }
rm -rf "$DIR/s"; mkdir "$DIR/s"; cd "$DIR/s"
echo secret > f; chmod 600 f
with +chown chown 5:6 f
test "$(stat -c %u:%g f)" = 5:6
refused with -all chown 7 f
refused with +chown cat f
test "$(with +dac_read_search cat f)" = secret
refused with +dac_read_search sh -c 'echo x >> f'
with +dac_override sh -c 'echo x >> f; echo y > made'
test "$(stat -c %u:%g made)" = 1001:1001
with +fowner chmod 640 f
with +mknod,+dac_override mknod device c 1 3
with +sys_admin setfattr -n trusted.a -v b f
test "$(with +sys_admin getfattr --only-values -n trusted.a f)" = b
"#;

/// On root's mount of this machine as on the local disk.
fn capabilities(world: &World) -> Result<()> {
    if !root::is_root() {
        return Ok(());
    }
    let (local, source, mnt) =
        (world.dir("local", As::Us)?, world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    let mount = Mount::new(world, &source, &mnt, &How::new(As::Us))?;
    for dir in [&local, &mnt] {
        for script in [CONTAINER, SERVICE] {
            let mut command = world.command("bash", As::Us);
            command.args(["-c", script]).env("DIR", dir).env("INSIDE", INSIDE);
            let ended = mount.run(command, LIMIT)?;
            ensure!(ended.ok(), "in {}: {:?}, {}", dir.display(), ended.code(), ended.said);
        }
    }
    mount.unmount()
}
