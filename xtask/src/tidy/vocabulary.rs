//! Names of files, modules and types are terms of docs/glossary.md.

use super::code::Code;
use super::{Problem, Source, line_of};

/// Words that name nothing outside of this project, in lower case without underscores, and the terms in their place.
const PRIVATE: &[(&str, &str)] = &[
    ("admission", "credential policy"),
    ("ahead", "prefetch"),
    ("away", "disconnect"),
    ("buried", "dead dentries"),
    ("covers", "lease scope"),
    ("crew", "worker pool"),
    ("datastamp", "data version"),
    ("desk", "executor, or lease sequencer"),
    ("doubt", "penalty"),
    ("flight", "calls"),
    ("grip", "lock mode"),
    ("hearing", "dispatch"),
    ("holding", "session leases, or pending update"),
    ("homes", "open files"),
    ("intake", "input"),
    ("keep", "open pins"),
    ("mirror", "differential"),
    ("opname", "mutation id"),
    ("placelocks", "inode locks"),
    ("pretence", "replay filter"),
    ("pushes", "updates"),
    ("quiet", "idle connections"),
    ("rows", "directory entries"),
    ("seat", "idle connection"),
    ("shape", "reply format"),
    ("singles", "dentry leases"),
    ("stake", "call leases"),
    ("tell", "probe"),
    ("teller", "notifier thread"),
    ("together", "grant run"),
    ("told", "change result, or listed entry"),
    ("whereabouts", "location"),
];

/// The file's own name.
pub fn check(source: &Source) -> Vec<Problem> {
    let stem = source.path.rsplit('/').next().and_then(|name| name.strip_suffix(".rs"));
    stem.and_then(|stem| problem(source, 1, stem)).into_iter().collect()
}

/// Names that Rust code declares.
pub fn check_code(source: &Source, code: &Code) -> Vec<Problem> {
    let mut found = Vec::new();
    for keyword in ["struct ", "enum ", "trait ", "type ", "mod "] {
        for (at, _) in code.all.match_indices(keyword) {
            let starts = code.all[..at].chars().next_back().is_none_or(|c| !c.is_alphanumeric() && c != '_');
            let rest = &code.all[at + keyword.len()..];
            let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            found.extend(starts.then(|| problem(source, line_of(&code.all, at), &name)).flatten());
        }
    }
    found
}

fn problem(source: &Source, line: u32, name: &str) -> Option<Problem> {
    let plain = name.replace('_', "").to_lowercase();
    let (_, term) = PRIVATE.iter().find(|(word, _)| *word == plain)?;
    Some(Problem::new("vocabulary", &source.path, line, format!("{name} is no term: say {term}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_words_are_found_in_names_of_files_modules_and_types() {
        let text =
            "mod flight;\nstruct Homes;\nenum InFlight {}\n// struct Stake\nfn rows() {}\nstruct Homestead;";
        let source = Source { path: "crates/cache/src/place_locks.rs".into(), text: text.into() };
        let lines: Vec<u32> = check_code(&source, &Code::of(text)).iter().map(|found| found.line).collect();
        assert_eq!(lines, [2, 1], "in the order of keywords");
        assert_eq!(check(&source).len(), 1);
        assert!(check(&Source { path: "crates/cache/src/calls.rs".into(), text: String::new() }).is_empty());
    }
}
