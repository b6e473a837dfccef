//! Shell scripts of typical work in a directory; their output must be equal on every filesystem.

/// One script. `INPUTS` names a directory with the files that `prepare` made.
pub struct Script {
    pub name: &'static str,
    pub needs: &'static [&'static str],
    pub prepare: Option<&'static str>,
    pub text: &'static str,
    pub limit_s: u64,
}

pub const SCRIPTS: &[Script] = &[
    Script { name: "git", needs: &["git"], prepare: Some(GIT_INPUT), text: GIT, limit_s: 180 },
    Script {
        name: "cargo-build",
        needs: &["cargo", "rustc"],
        prepare: Some(CARGO_INPUT),
        text: CARGO,
        limit_s: 300,
    },
    Script { name: "make", needs: &["make", "gcc"], prepare: None, text: MAKE, limit_s: 180 },
    Script { name: "atomic-saves", needs: &["/usr/bin/python3"], prepare: None, text: SAVES, limit_s: 120 },
    Script { name: "sqlite-wal", needs: &["/usr/bin/python3"], prepare: None, text: SQLITE, limit_s: 180 },
    Script { name: "copies-and-archives", needs: &["tar", "cp"], prepare: None, text: COPIES, limit_s: 180 },
];

const GIT_INPUT: &str = r#"
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example.org GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example.org
export GIT_AUTHOR_DATE='2020-01-01T00:00:00Z' GIT_COMMITTER_DATE='2020-01-01T00:00:00Z' GIT_CONFIG_GLOBAL=/dev/null
git -c init.defaultBranch=main init -q upstream
cd upstream
for commit in $(seq 1 40); do
    for i in $(seq 1 30); do
        dir=d$(( (commit * 7 + i) % 12 ))/e$(( i % 5 ))
        mkdir -p $dir
        seq $commit $(( commit + i * 9 )) > $dir/f$i.txt
    done
    ln -sf d1 link; chmod 755 d1/e1/* 2>/dev/null || true
    git add -A
    git commit -q -m "commit $commit"
done
git branch side HEAD~5
"#;

const GIT: &str = r#"
# What it says of its progress where something takes long is no result.
export GIT_PROGRESS_DELAY=100000
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example.org GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example.org
export GIT_AUTHOR_DATE='2020-01-01T00:00:00Z' GIT_COMMITTER_DATE='2020-01-01T00:00:00Z' GIT_CONFIG_GLOBAL="$PWD/gitconfig"
printf '[safe]\ndirectory = *\n' > gitconfig
git clone -q --no-local --no-hardlinks "$INPUTS/upstream" clone
cd clone
git fsck --full --strict 2>&1
git status --porcelain
git log --oneline | tail -1
git ls-files -s | sha256sum
seq 1 10 > d1/new.txt
seq 5 50 > d2/e2/f2.txt
git mv d3/e3 d3/moved
git status --porcelain
git add -A
git commit -q -m changed
git checkout -q -b other origin/side
git merge -q -m merged main
git gc -q
git fsck --full
git status --porcelain
git rev-parse HEAD
git stash list
git checkout -q main
git clean -xfdn
git rev-parse HEAD HEAD^{tree}
"#;

const CARGO_INPUT: &str = r#"
mkdir -p app/src
cat > app/Cargo.toml <<'TOML'
[package]
name = "app"
version = "0.1.0"
edition = "2021"
[dependencies]
itoa = "=1.0.15"
memchr = "=2.7.4"
[workspace]
TOML
cat > app/src/main.rs <<'RUST'
fn main() {
    let mut buffer = itoa::Buffer::new();
    println!("{} {:?}", buffer.format(1_234_567_u64), memchr::memchr(b'n', b"mounted"));
}
RUST
cd app
mkdir .cargo
cargo vendor vendor > vendor.toml 2> vendor.log
mv vendor.toml .cargo/config.toml
"#;

const CARGO: &str = r#"
cp -r "$INPUTS/app" app
cd app
export CARGO_HOME="$PWD/home"
cargo build --quiet --offline --jobs 2
./target/debug/app
cargo build --offline --jobs 2 2>&1 | grep -c Compiling || true
touch src/main.rs
cargo build --offline --jobs 2 2>&1 | grep -c Compiling
cargo test --quiet --offline 2>&1 | grep 'test result' | sed 's/;.*//'
find vendor -type f | sort | xargs sha256sum | sha256sum
"#;

const MAKE: &str = r##"
mkdir src include
for i in $(seq 1 40); do
    echo "int f$i(int); " > include/f$i.h
    printf '#include <stdio.h>\n#include "common.h"\n#include "f%s.h"\nint f%s(int x) { return x * %s + BASE; }\n' $i $i $i > src/f$i.c
done
echo '#define BASE 1' > include/common.h
{
    for i in $(seq 1 40); do echo "#include \"f$i.h\""; done
    echo '#include <stdio.h>'
    echo 'int main(void) { int s = 0;'
    for i in $(seq 1 40); do echo "s += f$i($i);"; done
    printf '%s\n' 'printf("%d\n", s); return 0; }'
} > src/main.c
cat > Makefile <<'MAKE'
SOURCES := $(wildcard src/*.c)
OBJECTS := $(SOURCES:src/%.c=build/%.o)
prog: $(OBJECTS)
	@gcc -o $@ $^
	@echo linked
build/%.o: src/%.c | build
	@gcc -Imissing -Ialso/missing -Iinclude -MMD -c -o $@ $<
build:
	@mkdir -p build
-include $(OBJECTS:.o=.d)
MAKE
make -s -j2
./prog
make -j2 | sed 's/make: //'
sleep 1.1
echo '#define BASE 2' > include/common.h
make -s -j2
./prog
rm build/f7.o
make -s -j2
./prog
ls build | sort | sha256sum
"##;

const SAVES: &str = r#"
/usr/bin/python3 - <<'PY'
import os, stat

def content(path):
    with open(path, "rb") as f:
        return f.read()

def vim(path, text):
    backup = path + "~"
    before = os.stat(path)
    os.rename(path, backup)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, text)
    os.fsync(fd)
    os.fchmod(fd, stat.S_IMODE(before.st_mode))
    os.close(fd)
    os.unlink(backup)

def code(path, text):
    # Truncates and writes in place, as Visual Studio Code does by default.
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, text)
    os.fdatasync(fd)
    os.close(fd)

def atomic(path, text):
    temporary = path + ".tmp-1"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(fd, text)
    os.fsync(fd)
    os.close(fd)
    os.rename(temporary, path)
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(directory)
    os.close(directory)

for save in (vim, code, atomic):
    path = save.__name__ + ".txt"
    with open(path, "wb") as f:
        f.write(b"start")
    os.chmod(path, 0o640)
    first = os.stat(path).st_ino
    reader = open(path, "rb")
    for i in range(60):
        text = (b"version %d " % i) * (i * 37 % 400 + 1)
        save(path, text)
        assert content(path) == text, (save, i)
        assert os.stat(path).st_size == len(text)
        assert not os.path.exists(path + "~") and not os.path.exists(path + ".tmp-1")
    same = os.stat(path).st_ino == first
    print(save.__name__, len(content(path)), oct(os.stat(path).st_mode), "same inode" if same else "new inode",
          reader.read()[:5])
print(sorted(os.listdir(".")))
PY
"#;

const SQLITE: &str = r#"
cat > writer.py <<'PY'
import sqlite3, sys
who = int(sys.argv[1])
db = sqlite3.connect("test.db", timeout=60, isolation_level=None)
for i in range(150):
    db.execute("begin immediate")
    db.execute("insert into t values (?, ?, ?)", (who, i, "x" * (i % 50)))
    db.execute("update counter set n = n + 1")
    db.execute("commit")
db.close()
PY
/usr/bin/python3 - <<'PY'
import sqlite3, subprocess, sys
db = sqlite3.connect("test.db", isolation_level=None)
print(db.execute("pragma journal_mode=wal").fetchone()[0])
db.execute("create table t(who int, i int, x text, primary key (who, i))")
db.execute("create table counter(n int)")
db.execute("insert into counter values (0)")
writers = [subprocess.Popen(["/usr/bin/python3", "writer.py", str(w)]) for w in range(3)]
for writer in writers:
    assert writer.wait() == 0
print(db.execute("select n from counter").fetchone()[0])
print(db.execute("select count(*), sum(length(x)) from t").fetchone())
print(db.execute("pragma integrity_check").fetchone()[0])
print(db.execute("pragma wal_checkpoint(truncate)").fetchone())
db.execute("delete from t where i % 3 = 0")
db.execute("vacuum")
print(db.execute("pragma integrity_check").fetchone()[0], db.execute("select count(*) from t").fetchone()[0])
db.close()
PY
ls | sort
"#;

const COPIES: &str = r#"
cp -a /usr/include/linux headers
ln headers/fs.h hard
ln -s headers/fs.h soft
ln -s /nowhere dangling
mkfifo fifo
touch -d '2001-02-03 04:05:06.123456789' old
truncate -s 3G sparse
printf end >> sparse
show() { (cd "$1" && find . -printf '%P %y %m %s %n %l %TY-%Tm-%Td %TH:%TM:%TS\n' | grep -v '^ d' | grep -v ' d ' | sort); }
show headers | sha256sum
ls -l old --time-style=full-iso | cut -d' ' -f 6-
tar --sparse -cf a.tar headers hard soft dangling fifo old sparse
mkdir out
tar -C out -xf a.tar
diff -r headers out/headers
(cd out && find . ! -type d ! -path './headers/*' -printf '%P %y %m %s %n %l\n' | sort)
stat -c '%s %h' out/hard out/sparse
test $(stat -c %b out/sparse) -lt 1000
rm sparse out/sparse
cp -a out out2
diff -r --no-dereference -x fifo out out2
mv out2 moved
find moved -type f | wc -l
rm -rf moved out
find . -maxdepth 1 | sort
"#;
