//! Another process on the server's own disk. Changes by the server's own process count as the server's, so a test
//! that needs foreign changes starts its own program again.

use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A child process that executes one command per line.
pub struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

const ASKED: &str = "NIGH_TEST_OTHER";
const READY: &str = "other: ready";
const DONE: &str = "other: done";

impl Other {
    /// `test`: the name of a test that only calls [`serve`].
    pub fn start(test: &str) -> Other {
        Other::begin(Command::new(std::env::current_exe().unwrap()), test)
    }

    fn begin(mut command: Command, test: &str) -> Other {
        command.args([test, "--exact", "--nocapture"]).env(ASKED, "1");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut other = Other { child, input, output: BufReader::new(output) };
        other.wait(READY);
        other
    }

    /// Runs a command, and waits for its end.
    pub fn run(&mut self, what: &str) {
        self.tell(what);
        self.wait(DONE);
    }

    /// Starts a command.
    pub fn tell(&mut self, what: &str) {
        writeln!(self.input, "{what}").unwrap();
    }

    pub fn done(&mut self) {
        self.wait(DONE);
    }

    fn wait(&mut self, for_line: &str) {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the other process has ended");
            if line.trim_end().ends_with(for_line) {
                return;
            }
            assert!(!line.contains("other: failed"), "{line}");
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Executes commands if the process was started by [`Other::start`]; otherwise returns at once.
pub fn serve() {
    if std::env::var_os(ASKED).is_none() {
        return;
    }
    println!("{READY}");
    let mut held = HashMap::new();
    for line in io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match act(&words, &mut held) {
            Ok(()) => println!("{DONE}"),
            Err(error) => println!("other: failed: {line}: {error}"),
        }
        io::stdout().flush().unwrap();
    }
}

fn writable(path: &str) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

fn act(words: &[&str], held: &mut HashMap<String, File>) -> io::Result<()> {
    match words {
        ["create", path] => drop(File::create_new(path)?),
        ["write", path, text] => fs::write(path, text)?,
        ["append", path, text] => OpenOptions::new().append(true).open(path)?.write_all(text.as_bytes())?,
        ["unlink", path] => fs::remove_file(path)?,
        ["mkdir", path] => fs::create_dir(path)?,
        ["rmdir", path] => fs::remove_dir(path)?,
        ["rmtree", path] => fs::remove_dir_all(path)?,
        ["rename", from, to] => fs::rename(from, to)?,
        ["exchange", one, two] => rustix::fs::renameat_with(CWD, *one, CWD, *two, RenameFlags::EXCHANGE)?,
        ["link", from, to] => fs::hard_link(from, to)?,
        ["symlink", to, path] => std::os::unix::fs::symlink(to, path)?,
        ["chmod", path, mode] => {
            fs::set_permissions(path, Permissions::from_mode(u32::from_str_radix(mode, 8).unwrap()))?;
        }
        ["setxattr", path, value] => {
            let none = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(*path, "user.x", value.as_bytes(), none)?;
        }
        ["truncate", path, size] => writable(path)?.set_len(size.parse().unwrap())?,
        ["fallocate", path, size] => {
            let none = FallocateFlags::empty();
            rustix::fs::fallocate(writable(path)?, none, 0, size.parse().unwrap())?;
        }
        ["copy", from, to] => {
            let (from, to) = (File::open(from)?, writable(to)?);
            assert!(rustix::fs::copy_file_range(&from, None, &to, None, 1 << 20)? > 0);
        }
        ["splice", path, text] => {
            let (out, into) = rustix::pipe::pipe()?;
            rustix::io::write(&into, text.as_bytes())?;
            let file = writable(path)?;
            let none = rustix::pipe::SpliceFlags::empty();
            assert!(rustix::pipe::splice(&out, None, &file, None, text.len(), none)? > 0);
        }
        ["tmpfile", dir, path] => {
            let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
            let file = rustix::fs::open(*dir, flags, Mode::RUSR | Mode::WUSR)?;
            rustix::io::write(&file, b"made")?;
            let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
            rustix::fs::linkat(CWD, link, CWD, *path, AtFlags::SYMLINK_FOLLOW)?;
        }
        ["hold", path] => drop(held.insert((*path).to_owned(), writable(path)?)),
        ["held", path, text] => held[*path].write_all_at(text)?,
        ["drop", path] => drop(held.remove(*path)),
        ["many", dir, count] => many(Path::new(dir), count.parse().unwrap())?,
        _ => return Err(io::Error::other("not supported")),
    }
    Ok(())
}

trait WriteAll {
    fn write_all_at(&self, text: &str) -> io::Result<()>;
}

impl WriteAll for File {
    fn write_all_at(&self, text: &str) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(self, text.as_bytes(), 0)
    }
}

/// Creates and writes `count` files, and removes all but the last.
fn many(dir: &Path, count: u64) -> io::Result<()> {
    for nth in 0..count {
        let path = dir.join(format!("many-{nth}"));
        fs::write(&path, "x")?;
        if nth + 1 < count {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}
