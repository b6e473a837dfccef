//! House rules that no linter knows, each a small function over source text.

mod code;
mod doc_tests;
mod features;
mod imports;
mod lengths;
mod local_host;
mod numbers;
mod planted;
mod semantics;
mod structure;
mod vocabulary;
mod walks;
mod words;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::{process, root};

/// A text file of the project.
pub struct Source {
    /// From the top of the checkout.
    pub path: String,
    pub text: String,
}

impl Source {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Whether all of it is a test's code.
    fn is_test(&self) -> bool {
        self.path.contains("/tests/") || self.path.ends_with("/tests.rs")
    }

    /// The crate directory below `crates/`, if it is in one.
    fn layer(&self) -> Option<&str> {
        self.path.strip_prefix("crates/")?.split('/').next()
    }
}

/// One breach of a rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    pub rule: &'static str,
    pub path: String,
    pub line: u32,
    pub what: String,
}

impl Problem {
    fn new(rule: &'static str, path: &str, line: u32, what: impl Into<String>) -> Problem {
        Problem { rule, path: path.to_owned(), line, what: what.into() }
    }
}

pub fn run(report: bool) -> Result<bool> {
    if report {
        structure::report(&sources(&root::checkout())?);
        return Ok(true);
    }
    let problems = problems()?;
    for line in &problems {
        println!("{line}");
    }
    println!("tidy: {} problems", problems.len());
    Ok(problems.is_empty())
}

/// What is wrong, a line each.
pub fn problems() -> Result<Vec<String>> {
    let sources = sources(&root::checkout())?;
    let mut found = Vec::new();
    for source in &sources {
        found.extend(words::check(source));
        found.extend(planted::check(source));
        if source.is_rust() {
            let code = code::Code::of(&source.text);
            found.extend(doc_tests::check(source));
            found.extend(words::check_length(source));
            found.extend(numbers::check(source, &code));
            found.extend(words::check_code(source, &code));
            found.extend(vocabulary::check(source));
            found.extend(vocabulary::check_code(source, &code));
            found.extend(words::check_pure(source, &code));
            found.extend(planted::check_code(source, &code));
            found.extend(local_host::check(source, &code));
        }
    }
    found.extend(imports::check()?);
    found.extend(features::check()?);
    found.extend(semantics::check(&sources));
    found.extend(structure::check(&sources));
    found.extend(walks::check(&sources));
    found.extend(lengths::check(&sources));
    Ok(found.iter().map(|p| format!("{}:{}: {}: {}", p.path, p.line, p.rule, p.what)).collect())
}

/// Text files that git knows or would add.
fn sources(top: &Path) -> Result<Vec<Source>> {
    let mut command = Command::new("git");
    command.current_dir(top).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let mut sources = Vec::new();
    for path in process::output(&mut command)?.split('\0').filter(|p| !p.is_empty()) {
        let full: PathBuf = top.join(path);
        let Ok(bytes) = std::fs::read(&full) else { continue };
        if let Ok(text) = String::from_utf8(bytes) {
            sources.push(Source { path: path.to_owned(), text });
        }
    }
    Ok(sources)
}

/// The 1-based line of a byte position.
fn line_of(text: &str, position: usize) -> u32 {
    let lines = text.as_bytes()[..position].iter().filter(|&&b| b == b'\n').count();
    u32::try_from(lines).unwrap_or(u32::MAX).saturating_add(1)
}
