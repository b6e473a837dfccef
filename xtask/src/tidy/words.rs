//! Words that may not stand somewhere.

use super::code::Code;
use super::{Problem, Source, line_of};
use crate::root::PURE;

/// Paths of one machine. Written in two halves, or this file would break its own rule.
const PLACES: &[&str] = &[concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!(".lib", "rary")];

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
    let unfinished = ["todo!", "unimplemented!", "dbg!", "#[ignore"];
    let mut found = matches(source, &code.all, "unfinished", &unfinished);
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

/// In the shipped code of pure crates: no clock, socket, thread or randomness.
pub fn check_pure(source: &Source, code: &Code) -> Vec<Problem> {
    let in_source = source.path.split('/').nth(2) == Some("src") && !source.is_test();
    if !in_source || !source.layer().is_some_and(|layer| PURE.contains(&layer)) {
        return Vec::new();
    }
    let impure = [
        "Instant",
        "SystemTime",
        "std::thread",
        "std::net",
        "std::os::unix::net",
        "std::fs",
        "std::process",
        "std::env",
        "libc::",
        "rand::",
        "getrandom",
        "RandomState",
        "DefaultHasher",
        "tokio",
        "hash_map::HashMap",
        "collections::HashMap",
        "collections::HashSet",
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
    fn unfinished_code_is_found() {
        let text = ["fn f() { todo", "!() }\n#[ignore]\nfn g() {}"].concat();
        let (s, c) = source("a.rs", &text);
        assert_eq!(check_code(&s, &c).len(), 2);
        let (s, c) = source("a.rs", "// todo!\nfn f() {}");
        assert!(check_code(&s, &c).is_empty());
    }

    #[test]
    fn empty_names_are_found() {
        let (s, c) = source("a.rs", "struct CacheManager; fn get_x() {} struct Utility;");
        assert_eq!(check_code(&s, &c).len(), 2);
    }

    #[test]
    fn pure_crates_have_no_clock() {
        let text = "use std::time::Instant;\nfn f() { std::net::lookup() }\n#[cfg(test)]\nuse std::fs;";
        let (s, c) = source("crates/cache/src/a.rs", text);
        assert_eq!(check_pure(&s, &c).len(), 2);
        let (s, c) = source("crates/client/src/a.rs", text);
        assert!(check_pure(&s, &c).is_empty());
        let (s, c) = source("crates/cache/src/a.rs", "struct Instantly; type M = FxHashMap<u8, u8>;");
        assert!(check_pure(&s, &c).is_empty());
    }
}
