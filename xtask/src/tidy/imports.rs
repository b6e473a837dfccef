//! The arrows between layers, as ARCHITECTURE.md draws them.

use super::Problem;
use crate::{process, root};
use anyhow::{Context, Result};
use serde_json::Value;
use std::process::Command;

/// Each crate, and which of our crates it may link. Of the others those in `crates` are asked for here; what lies
/// elsewhere may link anything.
const ARROWS: &[(&str, &[&str])] = &[
    ("nigh-types", &[]),
    ("nigh-contents", &["nigh-types"]),
    ("nigh-cache", &["nigh-types", "nigh-contents"]),
    ("nigh-remote", &["nigh-types"]),
    ("nigh-native", &["nigh-types", "nigh-remote"]),
    ("nigh-lease", &["nigh-types"]),
    ("nigh-pathclient", &["nigh-types"]),
    ("nigh-ninep", &["nigh-types", "nigh-remote", "nigh-pathclient"]),
    ("nigh-fuse", &[]),
    ("nigh-link", &["nigh-types"]),
    ("nigh-client", &["nigh-types", "nigh-cache", "nigh-remote", "nigh-fuse", "nigh-link"]),
    ("nigh-server", &["nigh-types", "nigh-native", "nigh-lease", "nigh-link"]),
    ("nigh", &["nigh-types", "nigh-client", "nigh-server", "nigh-link", "nigh-native", "nigh-ninep"]),
    ("nigh-posix", &[]),
    (
        "xtask",
        &["nigh-fuse", "nigh-types", "nigh-cache", "nigh-remote", "nigh-native", "nigh-ninep", "nigh-sim"],
    ),
];
/// It is tests alone.
const FREE: &str = "nigh-sim";

/// Asks cargo, which knows every way to write a dependency.
pub fn check() -> Result<Vec<Problem>> {
    let mut command = Command::new(root::cargo());
    command.current_dir(root::checkout()).args(["metadata", "--no-deps", "--format-version=1", "--offline"]);
    let metadata = serde_json::from_str(&process::output(&mut command)?)?;
    let top = root::checkout();
    check_all(&metadata, &top.to_string_lossy()).context("cargo metadata says something else than it used to")
}

/// `None`: not in the form that is known.
fn check_all(metadata: &Value, top: &str) -> Option<Vec<Problem>> {
    let mut found = Vec::new();
    for package in metadata["packages"].as_array()? {
        let name = package["name"].as_str()?;
        let path = package["manifest_path"].as_str()?;
        let path = path.strip_prefix(top).unwrap_or(path).trim_start_matches('/');
        let mut say = |what: String| found.push(Problem::new("imports", path, 1, what));
        let Some((_, allowed)) = ARROWS.iter().find(|(known, _)| *known == name) else {
            if path.starts_with("crates/") && name != FREE {
                say("a crate that the table of arrows does not know".into());
            }
            continue;
        };
        for dependency in package["dependencies"].as_array()? {
            let linked = dependency["name"].as_str()?;
            // Tests may look further.
            let for_tests = dependency["kind"] == "dev";
            let ours = linked == "nigh" || linked.starts_with("nigh-");
            if ours && !for_tests && !allowed.contains(&linked) {
                say(format!("may not link {linked}"));
            }
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(name: &str, dependencies: &Value) -> Vec<String> {
        let path = format!("/top/crates/{}/Cargo.toml", name.trim_start_matches("nigh-"));
        let package = json!({ "name": name, "manifest_path": path, "dependencies": dependencies });
        let found = check_all(&json!({ "packages": [package] }), "/top").unwrap();
        found.into_iter().map(|problem| format!("{}: {}", problem.path, problem.what)).collect()
    }

    #[test]
    fn arrows_point_one_way() {
        let linked = json!([
            { "name": "nigh-types", "kind": null },
            { "name": "nigh-client", "kind": null, "rename": "other" },
            { "name": "nigh-server", "kind": "build" },
            { "name": "lru", "kind": null },
        ]);
        let expected = ["may not link nigh-client", "may not link nigh-server"];
        assert_eq!(
            found("nigh-cache", &linked),
            expected.map(|what| format!("crates/cache/Cargo.toml: {what}"))
        );
        assert!(found("nigh-client", &json!([{ "name": "nigh-cache", "kind": null }])).is_empty());
    }

    #[test]
    fn tests_look_further() {
        assert!(found("nigh-cache", &json!([{ "name": "nigh-sim", "kind": "dev" }])).is_empty());
    }

    #[test]
    fn unknown_crates_are_asked_for() {
        assert_eq!(found("nigh-new", &json!([])).len(), 1);
        assert!(found(FREE, &json!([{ "name": "nigh-cache", "kind": null }])).is_empty());
    }

    #[test]
    fn this_project_keeps_to_its_table() {
        assert_eq!(check().expect("cargo answers"), []);
    }
}
