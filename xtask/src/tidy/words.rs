//! Words that may not stand somewhere, and the length of files.

use super::code::Code;
use super::{Problem, Source, line_of};
use crate::root::PURE;

/// Paths of one machine. Written in two halves, or this file would break its own rule.
const PLACES: &[&str] = &[concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!(".lib", "rary")];

const FILE_LINES: usize = 600;

/// In every file.
pub fn check(source: &Source) -> Vec<Problem> {
    let mut found = Vec::new();
    for word in PLACES {
        for (at, _) in source.text.match_indices(word) {
            let line = line_of(&source.text, at);
            found.push(Problem::new("words", &source.path, line, format!("{word} is a path of one machine")));
        }
    }
    found
}

/// In all Rust code, tests too.
pub fn check_code(source: &Source, code: &Code) -> Vec<Problem> {
    let mut found = matches(source, &code.all, "unfinished", &["#[ignore"]);
    found.extend(matches(source, &code.all, "names", &["fn get_"]));
    for kind in ["struct ", "enum ", "trait "] {
        for (at, _) in code.all.match_indices(kind) {
            let name: String =
                code.all[at + kind.len()..].chars().take_while(|c| c.is_alphanumeric()).collect();
            if ["Manager", "Helper", "Util", "Utils"].iter().any(|end| name.ends_with(end)) {
                let line = line_of(&code.all, at);
                found.push(Problem::new("names", &source.path, line, format!("{name} says nothing")));
            }
        }
    }
    found
}

/// Rust files stay small enough to read. Clippy counts the lines of functions.
pub fn check_length(source: &Source) -> Option<Problem> {
    let lines = source.text.lines().count();
    let what = format!("{lines} lines, at most {FILE_LINES}");
    (lines > FILE_LINES).then(|| Problem::new("length", &source.path, 1, what))
}

/// In the shipped code of pure crates: no module or crate with clocks, sockets, threads or randomness. Types are in
/// xtask/pure/clippy.toml.
pub fn check_pure(source: &Source, code: &Code) -> Vec<Problem> {
    let in_source = source.path.split('/').nth(2) == Some("src") && !source.is_test();
    if !in_source || !source.layer().is_some_and(|layer| PURE.contains(&layer)) {
        return Vec::new();
    }
    let impure = [
        "std::thread",
        "std::net",
        "std::os::unix::net",
        "std::fs",
        "std::process",
        "std::env",
        "libc::",
        "rand::",
        "getrandom",
        "tokio",
    ];
    matches(source, &code.shipped, "pure", &impure)
}

fn matches(source: &Source, code: &str, rule: &'static str, words: &[&str]) -> Vec<Problem> {
    let mut found = Vec::new();
    for word in words {
        for (at, _) in code.match_indices(word) {
            let joins = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
            let starts = word.as_bytes()[0].is_ascii_alphanumeric();
            let ends = word.as_bytes().last().is_some_and(u8::is_ascii_alphanumeric);
            let inner = (starts && at > 0 && joins(code.as_bytes().get(at - 1)))
                || (ends && joins(code.as_bytes().get(at + word.len())));
            if !inner {
                found.push(Problem::new(
                    rule,
                    &source.path,
                    line_of(code, at),
                    format!("{word} may not stand here"),
                ));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> (Source, Code) {
        (Source { path: path.into(), text: text.into() }, Code::of(text))
    }

    #[test]
    fn places_are_found_anywhere() {
        let (s, _) = source("README.md", &format!("see {}x and {}", PLACES[0], PLACES[1]));
        assert_eq!(check(&s).len(), 2);
        assert!(check(&source("README.md", "/working rootless").0).is_empty());
    }

    #[test]
    fn long_files_are_found() {
        assert!(check_length(&source("a.rs", &"//\n".repeat(600)).0).is_none());
        assert!(check_length(&source("a.rs", &"//\n".repeat(601)).0).is_some());
    }

    #[test]
    fn ignored_test_is_found() {
        let (s, c) = source("a.rs", "#[ignore]\nfn g() {}");
        assert_eq!(check_code(&s, &c).len(), 1);
        let (s, c) = source("a.rs", "// #[ignore]\nfn f() {}");
        assert!(check_code(&s, &c).is_empty());
    }

    #[test]
    fn empty_names_are_found() {
        let (s, c) = source("a.rs", "struct CacheManager; fn get_x() {} struct Utility;");
        assert_eq!(check_code(&s, &c).len(), 2);
    }

    #[test]
    fn modules_of_the_system_are_found_in_pure_crates() {
        let text = "use std::env;\nfn f() { std::net::lookup() }\n#[cfg(test)]\nuse std::fs;";
        let (s, c) = source("crates/cache/src/a.rs", text);
        assert_eq!(check_pure(&s, &c).len(), 2);
        let (s, c) = source("crates/client/src/a.rs", text);
        assert!(check_pure(&s, &c).is_empty());
        let (s, c) = source("crates/cache/src/a.rs", "mod std_fs; use std::fsx;");
        assert!(check_pure(&s, &c).is_empty());
    }
}
