//! docs/semantics.md and docs/attacks.md name tests that exist. Of the first each paragraph does, as `test: name`. A name is a Rust
//! function, a case of the POSIX table, or `group NAME` of `cargo xtask test`. A promise that is not kept
//! yet says `test: not yet`. Of the second each line of a table does, in its last column.

use std::collections::BTreeSet;

use super::{Problem, Source};
use crate::test::groups;

const PATH: &str = "docs/semantics.md";
/// Whose tests are functions in a table, without an attribute.
const TABLES: &[&str] = &["crates/remote/src/conformance", "xtask/src/test/groups"];
const ATTACKS: &str = "docs/attacks.md";

pub fn check(sources: &[Source]) -> Vec<Problem> {
    let mut found = check_promises(sources);
    found.extend(check_attacks(sources));
    found
}

fn check_attacks(sources: &[Source]) -> Vec<Problem> {
    let Some(page) = sources.iter().find(|s| s.path == ATTACKS) else { return Vec::new() };
    let known = known_names(sources);
    let mut found = Vec::new();
    for (number, line) in (1..).zip(page.text.lines()) {
        let Some(row) = line.strip_suffix(" |").filter(|row| row.starts_with("| ")) else { continue };
        let last = row.rsplit(" | ").next().unwrap_or("");
        for name in last.split(", ").filter(|name| !matches!(*name, "tests" | "---")) {
            if !known.contains(name) {
                found.push(Problem::new("semantics", ATTACKS, number, format!("no test is called {name}")));
            }
        }
    }
    found
}

fn check_promises(sources: &[Source]) -> Vec<Problem> {
    let Some(page) = sources.iter().find(|s| s.path == PATH) else { return Vec::new() };
    let known = known_names(sources);
    let mut found = Vec::new();
    for (line, text) in paragraphs(&page.text) {
        let named = tests_named(&text);
        if named.is_empty() {
            let start: String = text.chars().take(40).collect();
            found.push(Problem::new("semantics", PATH, line, format!("names no test: {start}…")));
        }
        for name in named.iter().filter(|name| *name != "not yet" && !known.contains(*name)) {
            found.push(Problem::new("semantics", PATH, line, format!("no test is called {name}")));
        }
    }
    found
}

/// Paragraphs below a second-level heading with the line each begins on; no headings, tables or code.
fn paragraphs(text: &str) -> Vec<(u32, String)> {
    let mut found: Vec<(u32, String)> = Vec::new();
    let (mut inside, mut fenced, mut open) = (false, false, false);
    for (number, line) in text.lines().enumerate() {
        let trimmed = line.trim();
        fenced ^= trimmed.starts_with("```");
        inside |= line.starts_with("## ");
        let plain = inside && !fenced && !trimmed.is_empty();
        if !plain || trimmed.starts_with(['#', '|', '`']) && !open {
            open = false;
            continue;
        }
        match found.last_mut() {
            Some((_, text)) if open => {
                text.push(' ');
                text.push_str(trimmed);
            }
            _ => found.push((u32::try_from(number).unwrap_or(0) + 1, trimmed.to_owned())),
        }
        open = true;
    }
    found
}

fn tests_named(paragraph: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (at, mark) in paragraph.match_indices("test: ") {
        let rest = &paragraph[at + mark.len()..];
        let list = rest.split(['`', ')', ';', '.']).find(|part| !part.trim().is_empty()).unwrap_or("");
        for item in list.split(',') {
            let mut words = item.split_whitespace();
            match (words.next(), words.next()) {
                (Some(first @ ("group" | "not")), Some(second)) => names.push(format!("{first} {second}")),
                (Some(name), _) => names.push(name.to_owned()),
                (None, _) => {}
            }
        }
    }
    names
}

fn known_names(sources: &[Source]) -> BTreeSet<String> {
    let mut names: BTreeSet<String> =
        groups::all().iter().map(|group| format!("group {}", group.name)).collect();
    for source in sources.iter().filter(|s| s.is_rust()) {
        let in_table = TABLES.iter().any(|table| source.path.starts_with(table));
        let mut marked = false;
        for line in source.text.lines().map(str::trim) {
            let function = line.strip_prefix("pub ").unwrap_or(line).strip_prefix("fn ");
            if let Some(rest) = function.filter(|_| marked || in_table) {
                names.insert(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
            }
            marked = line == "#[test]" || marked && line.starts_with("#[");
        }
        if source.path.starts_with("tests/posix/src/cases/") {
            names.extend(posix_cases(&source.text));
        }
    }
    names
}

/// Names out of `cases! { subject:: one, two; … }`.
fn posix_cases(text: &str) -> Vec<String> {
    let Some((_, rest)) = text.split_once("super::cases! {") else {
        return text
            .split("name: \"")
            .skip(1)
            .filter_map(|s| s.split('"').next())
            .map(str::to_owned)
            .collect();
    };
    let body = rest.split('}').next().unwrap_or("");
    let mut names = Vec::new();
    for part in body.split(';') {
        let Some((subject, list)) = part.split_once("::") else { continue };
        let subject = subject.trim();
        names.extend(
            list.split(',').map(str::trim).filter(|n| !n.is_empty()).map(|n| format!("{subject}_{n}")),
        );
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(page: &str) -> Vec<Problem> {
        let case = "super::cases! { data::\n    write_read, sync;\n}\n";
        let lib = "#[test]\n#[cfg(unix)]\nfn recall_overtakes_reply() {\n}\nfn helper() {}";
        check(&[
            Source { path: PATH.into(), text: page.into() },
            Source { path: "crates/a/src/lib.rs".into(), text: lib.into() },
            Source { path: "tests/posix/src/cases/data.rs".into(), text: case.into() },
        ])
    }

    #[test]
    fn every_paragraph_names_a_test() {
        let page = "# T\nintro\n\n## S1\nOne tree. `test: recall_overtakes_reply`\n\nNothing named.\n";
        assert_eq!(found(page).len(), 1);
        assert_eq!(found(page)[0].line, 7);
    }

    #[test]
    fn each_attack_names_tests_that_exist() {
        let page = "| attack | tests |\n| --- | --- |\n| a | b_c, d_e |\n| f | |\n";
        let found = check(&[
            Source { path: ATTACKS.into(), text: page.into() },
            Source { path: "crates/a/src/lib.rs".into(), text: "#[test]\nfn b_c() {}".into() },
        ]);
        let lines: Vec<u32> = found.iter().map(|problem| problem.line).collect();
        assert_eq!(lines, [3, 4], "d_e, and none");
    }

    #[test]
    fn tests_must_exist() {
        assert_eq!(found("## S2\nx `test: data_write_read`\n"), []);
        assert_eq!(found("## S2\nx (test: data_write_read, data_sync)\n"), []);
        assert_eq!(found("## S2\nx\nover two lines, test: data_nothing.\n").len(), 1);
        assert_eq!(found("## S2\nx (test: helper)\n").len(), 1);
        assert_eq!(found("## S3\nLater. `test: not yet`\n"), []);
        assert_eq!(found("## S3\nx (test: recall_overtakes_reply, group two)\n"), []);
        assert_eq!(found("## S3\nx (test: group of\nnothing)\n").len(), 1);
    }
}
