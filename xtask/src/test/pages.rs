//! Whether this machine takes clean pages out of its page cache by itself: of a control group with a limit that its processes
//! do not see, or because memory is short. Whoever counts reads of files that were read before has to know.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{IoSliceMut, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use rustix::io::{Errno, ReadWriteFlags};

use super::world::{As, World};

/// Small files on the local disk, which nobody but this one looks at. They are closed between looks: with an inode that nobody uses
/// its pages go too.
pub struct LocalPages {
    files: Vec<PathBuf>,
    lost: BTreeSet<usize>,
}

impl LocalPages {
    /// Makes files of a page each, and reads them.
    pub fn new(world: &World, count: usize) -> Result<LocalPages> {
        let dir = world.dir("local-pages", As::Us)?;
        let mut files = Vec::new();
        for nth in 0..count {
            let path = dir.join(nth.to_string());
            let mut file = File::create_new(&path).with_context(|| path.display().to_string())?;
            writeln!(file, "{nth}")?;
            files.push(path);
        }
        // Nobody takes away what is not written yet.
        rustix::fs::syncfs(File::open(&dir)?)?;
        let mut pages = LocalPages { files, lost: BTreeSet::new() };
        pages.look()?;
        pages.lost.clear();
        Ok(pages)
    }

    /// Reads all again, and notes which of them had to come from the disk.
    pub fn look(&mut self) -> Result<()> {
        for (nth, path) in self.files.iter().enumerate() {
            let file = File::open(path)?;
            let mut byte = [0];
            let mut into = [IoSliceMut::new(&mut byte)];
            let there = rustix::io::preadv2(&file, &mut into, 0, ReadWriteFlags::NOWAIT);
            match there {
                Ok(_) => {}
                Err(Errno::AGAIN) => {
                    self.lost.insert(nth);
                    file.read_exact_at(&mut byte, 0)?;
                }
                Err(e) => return Err(e).context("what is in the page cache cannot be told"),
            }
        }
        Ok(())
    }

    /// How many were taken away at some time, of how many.
    #[must_use]
    pub fn lost(&self) -> (usize, usize) {
        (self.lost.len(), self.files.len())
    }
}
