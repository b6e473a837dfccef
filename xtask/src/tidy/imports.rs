//! The arrows between layers, as ARCHITECTURE.md draws them.

use super::{Problem, Source};

/// Each crate directory, and which of our crates it may link. What is not listed may link anything.
const ARROWS: &[(&str, &[&str])] = &[
    ("crates/types", &[]),
    ("crates/cache", &["nigh-types"]),
    ("crates/remote", &["nigh-types"]),
    ("crates/native", &["nigh-types", "nigh-remote"]),
    ("crates/fuse", &[]),
    ("crates/link", &["nigh-types"]),
    ("crates/client", &["nigh-types", "nigh-cache", "nigh-remote", "nigh-native", "nigh-fuse", "nigh-link"]),
    ("crates/server", &["nigh-types", "nigh-native", "nigh-link"]),
    ("crates/cli", &["nigh-types", "nigh-client", "nigh-server", "nigh-link"]),
    ("tests/posix", &[]),
    ("xtask", &["nigh-fuse"]),
];

pub fn check(sources: &[Source]) -> Vec<Problem> {
    let mut found = Vec::new();
    for source in sources {
        let Some(dir) = source.path.strip_suffix("/Cargo.toml") else { continue };
        if let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == dir) {
            found.extend(check_one(source, allowed));
        } else if dir.starts_with("crates/") && dir != "crates/sim" {
            found.push(Problem::new(
                "imports",
                &source.path,
                1,
                "a crate that the table of arrows does not know",
            ));
        }
    }
    found
}

fn check_one(source: &Source, allowed: &[&str]) -> Vec<Problem> {
    let mut found = Vec::new();
    let mut section = "";
    for (number, line) in source.text.lines().enumerate() {
        if let Some(name) = line.trim().strip_prefix('[') {
            section = name.trim_end_matches(']');
            continue;
        }
        // Tests may look further.
        if section.contains("dev-dependencies") || !section.contains("dependencies") {
            continue;
        }
        let name: String =
            line.chars().take_while(|c| c.is_alphanumeric() || *c == '-' || *c == '_').collect();
        if name.starts_with("nigh") && !allowed.contains(&name.as_str()) {
            let line = u32::try_from(number).unwrap_or(0) + 1;
            found.push(Problem::new("imports", &source.path, line, format!("may not link {name}")));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(path: &str, text: &str) -> Vec<Problem> {
        check(&[Source { path: path.into(), text: text.into() }])
    }

    #[test]
    fn arrows_point_one_way() {
        let text = "[dependencies]\nnigh-types.workspace = true\nnigh-client = { path = \"../client\" }\n";
        let found = manifest("crates/cache/Cargo.toml", text);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].line, 3);
        assert!(
            manifest("crates/client/Cargo.toml", "[dependencies]\nnigh-cache.workspace = true\n").is_empty()
        );
    }

    #[test]
    fn tests_look_further() {
        assert!(
            manifest("crates/cache/Cargo.toml", "[dev-dependencies]\nnigh-sim.workspace = true\n").is_empty()
        );
    }

    #[test]
    fn unknown_crates_are_asked_for() {
        assert_eq!(manifest("crates/new/Cargo.toml", "").len(), 1);
    }
}
