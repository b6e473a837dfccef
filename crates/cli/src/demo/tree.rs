//! The tree of the demonstration.

use anyhow::Result;
use std::path::Path;

const PROJECTS: u32 = 6;
const PARTS: u32 = 8;
const FILES: u32 = 12;

/// Numbers of created objects.
pub struct TreeCounts {
    pub directories: u64,
    pub files: u64,
    pub symlinks: u64,
}

impl TreeCounts {
    /// Number of names below the root.
    pub fn names(&self) -> u64 {
        self.directories - 1 + self.files + self.symlinks
    }
}

/// Creates projects with parts with files; each project has a symlink to its first file.
pub fn make(root: &Path) -> Result<TreeCounts> {
    let mut made = TreeCounts { directories: 1, files: 0, symlinks: 0 };
    for project in 0..PROJECTS {
        let project = root.join(format!("project-{project}"));
        for part in 0..PARTS {
            let part = project.join(format!("part-{part}"));
            std::fs::create_dir_all(&part)?;
            made.directories += 1;
            for file in 0..FILES {
                std::fs::write(part.join(format!("file-{file}.txt")), format!("contents of {file}\n"))?;
                made.files += 1;
            }
        }
        made.directories += 1;
        std::os::unix::fs::symlink("part-0/file-0.txt", project.join("first"))?;
        made.symlinks += 1;
    }
    Ok(made)
}
