//! Callers with more credentials than their ids: in user namespaces, and with capabilities.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::process::CommandResult;
use crate::root;
use crate::test::groups::Test;
use crate::test::mount::{Mount, MountParams};
use crate::test::world::{As, World};

pub const TESTS: &[Test] = &[
    ("faults: a mount inside a user namespace of one id works", inside_a_user_namespace),
    ("faults: capabilities that the kernel checked are the server's too", capabilities),
    ("faults: an idmapped mount shows and makes the mapped owners", idmapped),
    ("faults: -o idmapped is refused in one line where it cannot hold", idmapped_refused),
];

const LIMIT: Duration = Duration::from_secs(60);

/// Mounts `source` on `mnt` in the namespaces and works there. The end of the process namespace also ends the server.
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

fn unshared(world: &World, script: &str, who: As, dir: &Path) -> Result<CommandResult> {
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

/// Root of a container is user 1001, and its uids from 1 on are 100000 and so on, as with podman. A shell starts
/// without mapped ids, gets the mapping, and works in the directory; programs started after that have the
/// capabilities.
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

/// A system service that is not root and has one capability, as `AmbientCapabilities=` of systemd gives it.
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

/// Behaves on root's mount of this machine as on the local disk.
fn capabilities(world: &World) -> Result<()> {
    if !root::is_root() {
        return Ok(());
    }
    let (local, source, mnt) =
        (world.dir("local", As::Us)?, world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    let mount = Mount::new(world, &source, &mnt, &MountParams::new(As::Us))?;
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

/// Mounts `$DIR/i` on `to` with 1001 mapped to 2001.
const IDMAPPED: &str = r#"
set -eu
refused() { if "$@" 2>/dev/null; then echo "allowed: $*"; exit 1; fi; }
as() { id=$1; shift; setpriv --reuid $id --regid $id --clear-groups "$@"; }
rm -rf "$DIR/i" to; mkdir -p "$DIR/i/inner" to; echo old > "$DIR/i/f"; chown -R 1001:1001 "$DIR/i"; chmod 755 "$DIR/i"
echo secret > "$DIR/i/roots"; chmod 600 "$DIR/i/roots"
trap 'umount -l to 2>/dev/null || true' EXIT
python3 - "$DIR/i" to <<'PY'
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    got = libc.syscall(number, *args)
    if got < 0: sys.exit(f'syscall {number}: {os.strerror(ctypes.get_errno())}')
    return got
child = os.fork()
if child == 0: libc.unshare(0x10000000); os.kill(os.getpid(), 19); os._exit(0)
os.waitpid(child, os.WUNTRACED)
for kind in ('uid_map', 'gid_map'): open(f'/proc/{child}/{kind}', 'w').write('1001 2001 1\n0 0 1\n')
namespace = os.open(f'/proc/{child}/ns/user', os.O_RDONLY)
tree = call(428, -100, sys.argv[1].encode(), 1 | os.O_CLOEXEC)
attributes = struct.pack('QQQQ', 0x00100000, 0, 0, namespace)
call(442, tree, b'', 0x1000, attributes, len(attributes))
call(429, tree, b'', -100, sys.argv[2].encode(), 4)
os.kill(child, 9)
PY
test "$(stat -c %u:%g to/f)" = 2001:2001
as 2001 sh -euc 'cd to; umask 022; echo x >> f; echo y > new; mkdir d; mv d e; ln f g; rm g; ln -s f l; chmod 640 f
  truncate -s 3 new; touch -d @5 new; setfattr -n user.a -v b f; cp f program; chmod 4755 program; echo z >> program'
test "$(stat -c %u:%g:%a to/new "$DIR/i/new" "$DIR/i/e" "$DIR/i/f" | tr '\n' ' ')" = '2001:2001:644 1001:1001:644 1001:1001:755 1001:1001:640 '
test "$(stat -c %u:%a:%s:%y "$DIR/i/program" | cut -d: -f1-3)" = 1001:755:8
test "$(cat "$DIR/i/f" | tr '\n' ' ')" = 'old x '
for id in 1001 7001; do for what in 'echo x >> to/f' 'touch to/x' 'rm to/f' 'chmod 777 to/f' 'cat to/f' 'mv to/e to/x'; do
  refused as $id sh -c "$what"
done; done
refused as 2001 chown 0 to/f
refused as 2001 cat to/roots
chown 0:0 to/e
test "$(stat -c %u "$DIR/i/e")" = 0
as 1001 sh -c "cd '$DIR/i'; echo more >> f; touch mine"
test "$(stat -c %u "$DIR/i/mine" to/mine | tr '\n' ' ')" = '1001 2001 '
refused as 2001 sh -c "echo x >> '$DIR/i/f'"
refused as 7001 sh -c "touch '$DIR/i/x'"
umount to
"#;

/// Behaves on root's mount of this machine as on the local disk, and is refused without the option.
fn idmapped(world: &World) -> Result<()> {
    if !root::is_root() {
        return Ok(());
    }
    let (local, source, mnt) =
        (world.dir("local", As::Us)?, world.dir("source", As::Us)?, world.dir("mnt", As::Us)?);
    let run = |mount: &Mount<'_>, dir: &Path| {
        let mut command = world.command("bash", As::Us);
        command.args(["-c", IDMAPPED]).env("DIR", dir);
        mount.run(command, LIMIT)
    };
    let plain = Mount::new(world, &source, &mnt, &MountParams::new(As::Us))?;
    let ended = run(&plain, &mnt)?;
    ensure!(!ended.ok() && ended.said.contains("Invalid argument"), "without the option: {}", ended.said);
    plain.unmount()?;
    let mount = Mount::new(world, &source, &mnt, &MountParams::new(As::Us).with("-oidmapped"))?;
    for dir in [&local, &mnt] {
        let ended = run(&mount, dir)?;
        ensure!(ended.ok(), "in {}: {:?}, {}", dir.display(), ended.code(), ended.said);
    }
    mount.unmount()
}

fn idmapped_refused(world: &World) -> Result<()> {
    let refused = |who: As, more: &[&str], minor: &str, why: &str| -> Result<()> {
        let (source, mnt) = (world.dir("source", who)?, world.dir("mnt", who)?);
        let mut command = world.command(world.nigh(), who);
        command.arg("mount").args([&source, &mnt]).args(["-o", "idmapped"]).args(more);
        command.env("NIGH_FUSE_MINOR", minor);
        let ended = world.run(command, LIMIT)?;
        let told = ended.said.lines().count() == 1 && ended.said.contains(why);
        ensure!(ended.code() == Some(1) && told, "{who:?} {more:?}: {:?}, {}", ended.code(), ended.said);
        ensure!(crate::test::mount::device_of(&mnt).is_none(), "{who:?} {more:?}: a mount was left");
        Ok(())
    };
    if let Some(tester) = world.tester {
        refused(tester, &[], "45", "mount as root")?;
    }
    if root::is_root() {
        refused(As::Us, &["--idmap", "name"], "45", "without --idmap")?;
        refused(As::Us, &[], "40", "Linux 6.12")?;
    }
    Ok(())
}
