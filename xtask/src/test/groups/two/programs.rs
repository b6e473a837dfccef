//! Typical programs in one tree on two mounts.

use std::time::Duration;

use anyhow::Result;

use super::{ALL, Deadline, Mounts};
use crate::process;
use crate::report::TestReport;
use crate::test::world::{As, World};

const LIMIT: Duration = Duration::from_secs(90);

/// Whether locks work between mounts. Programs that need them run only then.
const LOCKS_BETWEEN_MOUNTS: bool = true;

/// A script with the mounts as `$A` and `$B`, `$ROUNDS`, and `same WHAT GOT EXPECTED`.
struct Program {
    name: &'static str,
    needs: &'static [&'static str],
    needs_locks: bool,
    rounds: u32,
    short_rounds: u32,
    text: &'static str,
}

const PYTHON: &str = "/usr/bin/python3";

const PROGRAMS: &[Program] = &[
    Program { name: "git", needs: &["git"], needs_locks: false, rounds: 20, short_rounds: 6, text: GIT },
    Program {
        name: "moves over open files",
        needs: &["sed"],
        needs_locks: false,
        rounds: 40,
        short_rounds: 10,
        text: MOVES,
    },
    Program {
        name: "numbers that are used again: what happens",
        needs: &[PYTHON],
        needs_locks: false,
        rounds: 12,
        short_rounds: 6,
        text: NUMBERS,
    },
    Program {
        name: "sqlite by turns",
        needs: &[PYTHON],
        needs_locks: false,
        rounds: 100,
        short_rounds: 20,
        text: SQLITE_BY_TURNS,
    },
    Program {
        name: "sqlite at once",
        needs: &[PYTHON],
        needs_locks: true,
        rounds: 100,
        short_rounds: 30,
        text: SQLITE_AT_ONCE,
    },
    Program {
        name: "sqlite WAL on one mount",
        needs: &[PYTHON],
        needs_locks: true,
        rounds: 300,
        short_rounds: 100,
        text: SQLITE_WAL_ON_ONE,
    },
    Program {
        name: "sqlite WAL across mounts: what happens",
        needs: &[PYTHON],
        needs_locks: true,
        rounds: 100,
        short_rounds: 30,
        text: SQLITE_WAL_ACROSS,
    },
];

pub fn run(world: &World, tally: &mut TestReport, deadline: &Deadline) {
    for program in PROGRAMS {
        let name = format!("two: {}", program.name);
        if program.needs_locks && !LOCKS_BETWEEN_MOUNTS {
            tally.skip(&name, "locks do not hold between mounts yet");
            continue;
        }
        let there =
            |program: &&str| process::which(program).is_some() || std::path::Path::new(program).is_file();
        if let Some(missing) = program.needs.iter().find(|program| !there(program)) {
            tally.not_run(&name, &format!("{missing} is missing"));
            continue;
        }
        if deadline.is_over(tally, &name) {
            continue;
        }
        tally.test(&name, || try_program(world, program));
    }
}

fn try_program(world: &World, program: &Program) -> Result<()> {
    let mounts = Mounts::new(world, As::Us, &[ALL, ALL])?;
    let rounds = if world.short { program.short_rounds } else { program.rounds };
    let said = mounts.sh(&format!("ROUNDS={rounds}; export ROUNDS\n{SAME}{}", program.text), LIMIT)?;
    if program.name.ends_with("what happens") {
        println!("  {}", said.trim());
    }
    mounts.unmount()
}

const SAME: &str = r#"
same() {
    [ "$2" = "$3" ] || { echo "$1: '$2', not '$3'"; exit 1; }
}
"#;

/// Commits in turn; each time the other mount at once sees history, files and a clean tree. A lock file of one keeps
/// the other out.
const GIT: &str = r#"
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example.org GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example.org
export GIT_CONFIG_GLOBAL="$WORK/two-gitconfig" GIT_CONFIG_NOSYSTEM=1
printf '[safe]\n\tdirectory = *\n[gc]\n\tauto = 0\n' > "$GIT_CONFIG_GLOBAL"
git -c init.defaultBranch=main init -q "$A/repo"
i=0
while [ $i -lt $ROUNDS ]; do
    i=$(( i + 1 ))
    if [ $(( i % 2 )) = 1 ]; then mine=$A/repo other=$B/repo; else mine=$B/repo other=$A/repo; fi
    cd "$mine"
    mkdir -p dir$(( i % 5 ))
    seq $i $(( i + 50 )) > dir$(( i % 5 ))/file$i
    echo "line $i" >> log
    git add -A
    git commit -q -m "commit $i"
    cd "$other"
    same "subject, round $i" "$(git log -1 --format=%s)" "commit $i"
    same "commits, round $i" "$(git rev-list --count HEAD)" "$i"
    same "status, round $i" "$(git status --porcelain)" ""
    same "log, round $i" "$(tail -1 log)" "line $i"
    echo "line changed" >> dir$(( i % 5 ))/file$i
    cd "$mine"
    same "the other's change, round $i" "$(git status --porcelain)" " M dir$(( i % 5 ))/file$i"
    git checkout -q -- .
    cd "$other"
    same "taken back, round $i" "$(git status --porcelain)" ""
done
: > "$A/repo/.git/index.lock"
cd "$B/repo"
echo locked > new
if git add new 2> "$WORK/two-git-said"; then echo "index.lock of the other did not count"; exit 1; fi
grep -q 'index.lock' "$WORK/two-git-said"
rm .git/index.lock
cd "$A/repo"
git add new
git commit -q -m last
same "status in the end" "$(git -C "$B/repo" status --porcelain)" ""
git fsck --full --strict
cd "$B/repo"
git gc -q
same "commits after gc" "$(git -C "$A/repo" rev-list --count HEAD)" "$(( ROUNDS + 1 ))"
git -C "$A/repo" fsck --full --strict
same "status after gc" "$(git -C "$A/repo" status --porcelain)" ""
"#;

/// Files are replaced by mv and sed while the other mount has them open.
const MOVES: &str = r#"
cd "$WORK"
echo "version 0" > "$A/f"
i=0
while [ $i -lt $ROUNDS ]; do
    i=$(( i + 1 ))
    if [ $(( i % 2 )) = 1 ]; then mine=$A other=$B; else mine=$B other=$A; fi
    same "before, round $i" "$(cat "$other/f")" "version $(( i - 1 ))"
    exec 3< "$other/f"
    if [ $(( i % 3 )) = 0 ]; then
        sed -i "s/version .*/version $i/" "$mine/f"
    else
        echo "version $i" > "$mine/new"
        mv "$mine/new" "$mine/f"
    fi
    same "new, round $i" "$(cat "$other/f")" "version $i"
    same "listing, round $i" "$(ls -A "$other")" "f"
    same "old, open, round $i" "$(cat <&3)" "version $(( i - 1 ))"
    exec 3<&-
done
"#;

/// A directory is removed, and a new file or directory gets its inode number while the other mount has the old one
/// open.
const NUMBERS: &str = r#"
/usr/bin/python3 - <<'PY'
import errno, os
A, B = os.environ["A"], os.environ["B"]
def wrote(path, text):
    with open(path, "w") as f: f.write(text)
def read(path):
    with open(path) as f: return f.read()
def look_like(x, y, seen):
    assert seen(os.stat(x)) == seen(os.stat(y)), (x, os.stat(x), os.stat(y))
taken = 0
for r in range(int(os.environ["ROUNDS"])):
    is_file = r % 2
    os.mkdir(f"{A}/old{r}")
    old = os.open(f"{A}/old{r}", os.O_RDONLY)
    number = os.fstat(old).st_ino
    os.rmdir(f"{B}/old{r}")
    made = []
    for i in range(40):
        made.append(f"new{r}-{i}")
        path = f"{B}/{made[-1]}"
        wrote(path, "new") if is_file else os.mkdir(path)
        if os.stat(path).st_ino == number: break
    else: continue
    taken += 1
    x, y = f"{A}/{made[-1]}", f"{B}/{made[-1]}"
    assert os.stat(x).st_ino == number
    try: assert os.fstat(old).st_nlink == 0
    except OSError as e: assert e.errno == errno.ESTALE, e
    if is_file: assert read(x) == "new"
    for k in range(12):
        if is_file:
            with open(x, "r+") as f:
                wrote(y, "b%d" % k * (k + 1))
                assert os.fstat(f.fileno()).st_size == os.stat(y).st_size
                assert f.read() == read(y) == "b%d" % k * (k + 1)
            wrote(x, "a%d" % k * (k % 5))
            assert read(y) == read(x) == "a%d" % k * (k % 5)
            os.rename(y, y + "z")
            assert not os.path.exists(x) and os.path.exists(x + "z")
            os.rename(x + "z", x)
        else:
            wrote(f"{y}/{k}", "")
            assert os.path.exists(f"{x}/{k}") and os.listdir(x) == [str(k)]
            os.unlink(f"{x}/{k}")
            assert not os.path.exists(f"{y}/{k}") and os.listdir(y) == os.listdir(x) == []
        os.chmod(y, 0o700 + k % 8)
        look_like(x, y, lambda s: (s.st_ino, s.st_mode, s.st_nlink, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
        if k == 6:
            os.close(old)
    for name in made:
        os.unlink(f"{A}/{name}") if is_file else os.rmdir(f"{A}/{name}")
print(f"{taken} numbers were used again at once")
PY
"#;

/// Two connections that stay open and are used in turn: rollback journals come and go.
const SQLITE_BY_TURNS: &str = r#"
/usr/bin/python3 - <<'PY'
import os, sqlite3
paths = [os.path.join(os.environ[m], "db") for m in "AB"]
connections = []
for path in paths:
    c = sqlite3.connect(path, isolation_level=None, timeout=1)
    c.execute("pragma journal_mode=delete")
    connections.append(c)
connections[0].execute("create table t (n integer primary key, text)")
for i in range(int(os.environ["ROUNDS"])):
    mine, other = connections[i % 2], connections[1 - i % 2]
    mine.execute("begin immediate")
    mine.executemany("insert into t (text) values (?)", [("round %d " % i * 20,)] * 10)
    mine.execute("update t set text = text || ? where n % 7 = ?", (str(i), i % 7))
    mine.execute("rollback" if i % 10 == 9 else "commit")
    assert not os.path.exists(paths[1 - i % 2] + "-journal"), "round %d: the journal is still seen" % i
    sums = [c.execute("select count(*), sum(length(text)) from t").fetchone() for c in (mine, other)]
    assert sums[0] == sums[1], "round %d: %s and %s" % (i, sums[0], sums[1])
for c in connections:
    assert c.execute("pragma integrity_check").fetchall() == [("ok",)]
PY
"#;

/// Two processes increment a counter concurrently; only locks between the mounts keep it right.
const SQLITE_AT_ONCE: &str = r#"
cat > "$WORK/two-count.py" <<'PY'
import os, sqlite3, sys
c = sqlite3.connect(os.path.join(sys.argv[1], "db"), isolation_level=None, timeout=60)
for i in range(int(os.environ["ROUNDS"])):
    c.execute("begin immediate")
    n = c.execute("select n from t").fetchone()[0]
    c.execute("update t set n = ?", (n + 1,))
    c.execute("commit")
PY
/usr/bin/python3 -c 'import sqlite3, sys
c = sqlite3.connect(sys.argv[1])
c.execute("create table t (n)"); c.execute("insert into t values (0)"); c.commit()' "$A/db"
/usr/bin/python3 "$WORK/two-count.py" "$A" & one=$!
/usr/bin/python3 "$WORK/two-count.py" "$B" & two=$!
wait $one
wait $two
for m in "$A" "$B"; do
    same "the count" "$(/usr/bin/python3 -c 'import sqlite3, sys
c = sqlite3.connect(sys.argv[1])
print(c.execute("select n from t").fetchone()[0], c.execute("pragma integrity_check").fetchone()[0])' "$m/db")" \
        "$(( 2 * ROUNDS )) ok"
done
"#;

/// Two processes on one mount, with the WAL's shared memory, increment a counter concurrently.
const SQLITE_WAL_ON_ONE: &str = r#"
cat > "$WORK/two-wal.py" <<'PY'
import os, sqlite3, sys
c = sqlite3.connect(os.path.join(sys.argv[1], "db"), isolation_level=None, timeout=60)
assert c.execute("pragma journal_mode").fetchone() == ("wal",), "the journal is no WAL"
for i in range(int(os.environ["ROUNDS"])):
    c.execute("begin immediate")
    n = c.execute("select n from t").fetchone()[0]
    c.execute("update t set n = ?", (n + 1,))
    c.execute("commit")
    assert c.execute("select n from t").fetchone()[0] > n
PY
/usr/bin/python3 -c 'import sqlite3, sys
c = sqlite3.connect(sys.argv[1], isolation_level=None)
c.execute("pragma journal_mode=wal"); c.execute("create table t (n)"); c.execute("insert into t values (0)")' "$A/db"
/usr/bin/python3 "$WORK/two-wal.py" "$A" & one=$!
/usr/bin/python3 "$WORK/two-wal.py" "$A" & two=$!
wait $one
wait $two
same "the count" "$(/usr/bin/python3 -c 'import sqlite3, sys
c = sqlite3.connect(sys.argv[1])
print(c.execute("select n from t").fetchone()[0], c.execute("pragma integrity_check").fetchone()[0])' "$A/db")" \
    "$(( 2 * ROUNDS )) ok"
# Who closes it last takes journal and shared memory away: with the file alone the other mount goes on.
same "what is left" "$(ls -A "$B")" "db"
"#;

/// A WAL across mounts is not supported (docs/semantics.md). The result is only printed; in any case both processes
/// end, and report errors of SQLite.
const SQLITE_WAL_ACROSS: &str = r#"
cat > "$WORK/two-wal-across.py" <<'PY'
import os, sqlite3, sys
said, done = {}, 0
try:
    c = sqlite3.connect(os.path.join(sys.argv[1], "db"), isolation_level=None, timeout=2)
    for i in range(int(os.environ["ROUNDS"])):
        try:
            c.execute("begin immediate")
            n = c.execute("select n from t").fetchone()[0]
            c.execute("update t set n = ?", (n + 1,))
            c.execute("commit")
            done += 1
        except sqlite3.Error as error:
            said[str(error)] = said.get(str(error), 0) + 1
            if c.in_transaction:
                c.execute("rollback")
except sqlite3.Error as error:
    said[str(error)] = said.get(str(error), 0) + 1
print(done, "transactions,", said or "no error")
PY
/usr/bin/python3 -c 'import sqlite3, sys
c = sqlite3.connect(sys.argv[1], isolation_level=None)
c.execute("pragma journal_mode=wal"); c.execute("create table t (n)"); c.execute("insert into t values (0)")' "$A/db"
/usr/bin/python3 "$WORK/two-wal-across.py" "$A" > "$WORK/two-wal-a" & one=$!
/usr/bin/python3 "$WORK/two-wal-across.py" "$B" > "$WORK/two-wal-b" & two=$!
wait $one
wait $two
echo "one: $(cat "$WORK/two-wal-a"); the other: $(cat "$WORK/two-wal-b"); in the end: $(/usr/bin/python3 -c 'import sqlite3, sys
try:
    c = sqlite3.connect(sys.argv[1])
    print(c.execute("select n from t").fetchone()[0], c.execute("pragma integrity_check").fetchone()[0])
except sqlite3.Error as error:
    print(error)' "$A/db")"
"#;
