//! Bugs are planted where decision 0016 says, and in no build that people use.

use super::code::Code;
use super::{Problem, Source, line_of};

/// Each bug (`crates/types/src/fault_injection.rs`), and the one file that may ask for it.
const PLACES: &[(&str, &str)] = &[
    ("KeepsUngranted", "crates/cache/src/facts/learn.rs"),
    ("OutlivesGrant", "crates/cache/src/kernel/level.rs"),
    ("AcknowledgesFirst", "crates/cache/src/inputs/recall.rs"),
    ("ForgetsRecalls", "crates/cache/src/calls/race_log.rs"),
    ("CarriesWhatEnded", "crates/lease/src/sequencer.rs"),
    ("WaitsForName", "crates/client/src/notifier/thread.rs"),
    ("WaitsForItself", "crates/lease/src/rules/write_queue.rs"),
    ("FencesEarly", "crates/lease/src/types.rs"),
    ("TakesAnyName", "crates/types/src/name.rs"),
    ("KeepsContents", "crates/cache/src/facts/leases.rs"),
];

/// Where the bugs are declared.
const HOME: &str = "crates/types/";

/// In shipped Rust code.
pub fn check_code(source: &Source, code: &Code) -> Vec<Problem> {
    let mut found = Vec::new();
    if source.is_test() || source.path == "crates/types/src/fault_injection.rs" {
        return found;
    }
    for (at, call) in code.shipped.match_indices("planted(") {
        let before = code.shipped[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let named = code.shipped[at + call.len()..].strip_prefix("Bug::").unwrap_or_default();
        let bug: String = named.chars().take_while(|c| c.is_alphanumeric()).collect();
        if !PLACES.contains(&(bug.as_str(), source.path.as_str())) {
            let what = format!("the bug {bug:?} is not planted here (xtask/src/tidy/planted.rs)");
            found.push(Problem::new("planted", &source.path, line_of(&code.shipped, at), what));
        }
    }
    found
}

/// In manifests: nobody asks for the feature.
pub fn check(source: &Source) -> Vec<Problem> {
    if !source.path.ends_with("Cargo.toml") {
        return Vec::new();
    }
    let lines = source.text.lines().zip(1..);
    let asks = lines.filter(|(line, _)| {
        let said = line.split('#').next().unwrap_or_default();
        let declares = source.path.starts_with(HOME) && said.trim() == "planted = []";
        said.contains("planted") && !declares
    });
    asks.map(|(_, line)| Problem::new("planted", &source.path, line, "no manifest asks for bugs")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_code(path: &str, text: &str) -> u64 {
        let (source, code) = (Source { path: path.into(), text: text.into() }, Code::of(text));
        check_code(&source, &code).len() as u64
    }

    #[test]
    fn bugs_are_planted_in_their_places_alone() {
        let text = "fn f() { if planted(Bug::OutlivesGrant) { g(); } }";
        assert_eq!(in_code("crates/cache/src/kernel/level.rs", text), 0);
        assert_eq!(in_code("crates/cache/src/facts/learn.rs", text), 1);
        assert_eq!(
            in_code("crates/cache/src/kernel/level.rs", "fn f() { planted(Bug::New) || planted(any) }"),
            2
        );
        assert_eq!(in_code("crates/cache/src/kernel/level.rs", "fn f() { un_planted(Bug::New) }"), 0);
    }

    #[test]
    fn no_manifest_asks_for_them() {
        let asks =
            |path: &str, text: &str| check(&Source { path: path.into(), text: text.into() }).len() as u64;
        assert_eq!(asks("crates/types/Cargo.toml", "[features]\n# planted\nplanted = []\n"), 0);
        assert_eq!(asks("crates/types/Cargo.toml", "[features]\ndefault = [\"planted\"]\n"), 1);
        assert_eq!(asks("crates/sim/Cargo.toml", "nigh-types = { features = [\"planted\"] }\n"), 1);
        assert_eq!(asks("crates/sim/Cargo.toml", "[features]\nplanted = []\n"), 1);
    }
}
