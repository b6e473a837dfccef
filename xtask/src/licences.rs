//! Licences of all linked packages, from `cargo metadata`, against an allow-list.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::{process, root};

/// SPDX names that may be linked into a program under MIT OR Apache-2.0.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Returns the problems, one per line.
pub fn problems() -> Result<Vec<String>> {
    let mut command = Command::new(root::cargo());
    command.current_dir(root::checkout()).args(["metadata", "--format-version", "1", "--locked"]);
    let metadata: Value = serde_json::from_str(&process::output(&mut command)?)?;
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let mut problems = BTreeSet::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or("?");
        match package["license"].as_str() {
            None => problems.insert(format!("{name}: states no licence")),
            Some(licence) if !allows(licence) => problems.insert(format!("{name}: {licence}")),
            Some(_) => false,
        };
    }
    Ok(problems.into_iter().collect())
}

/// Returns whether an SPDX expression leaves an allowed choice. `/` is the old form of OR.
fn allows(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ").replace(['(', ')'], " ");
    // AND binds tighter than OR, and nesting goes no deeper: each AND part must be allowed; an OR in parentheses
    // inside an AND has each side checked on its own.
    let parts: Vec<&str> = expression.split(" AND ").collect();
    parts.iter().all(|part| part.split(" OR ").any(|licence| ALLOWED.contains(&licence.trim())))
}

#[cfg(test)]
mod tests {
    use super::allows;

    #[test]
    fn licence_expression_with_one_allowed_choice_is_allowed() {
        assert!(allows("MIT"));
        assert!(allows("GPL-3.0 OR MIT"));
        assert!(allows("MIT/Apache-2.0"));
        assert!(allows("(MIT OR Apache-2.0) AND Unicode-3.0"));
        assert!(allows("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT"));
    }

    #[test]
    fn licence_expression_with_one_disallowed_part_is_refused() {
        assert!(!allows("GPL-3.0"));
        assert!(!allows("MIT AND GPL-2.0-only"));
        assert!(!allows("APSL-2.0"));
    }
}
