//! Examples in documentation are not run: each needs a program of its own, and cargo starts rustdoc for each crate even if it has
//! none.

use super::{Problem, Source};

pub fn check(source: &Source) -> Vec<Problem> {
    let what = "an example that no test runs: mark it ```text, or write a unit test";
    examples(&source.text)
        .into_iter()
        .map(|line| Problem::new("doc tests", &source.path, line, what))
        .collect()
}

/// Returns the lines at which code begins that rustdoc would compile.
fn examples(text: &str) -> Vec<u32> {
    let (mut found, mut inside) = (Vec::new(), false);
    for (line, number) in text.lines().zip(1..) {
        let line = line.trim_start();
        let Some(said) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else {
            inside = false;
            continue;
        };
        let Some(language) = said.trim_start().strip_prefix("```") else { continue };
        if !inside && language.trim() != "text" {
            found.push(number);
        }
        inside = !inside;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn example_is_found_by_its_first_line() {
        let text = "//! ```text\n//! a table\n//! ```\n\n/// Adds.\n///\n/// ```\n/// assert_eq!(add(1, 1), 2);\n/// ```\nfn add() {}\n";
        assert_eq!(examples(text), [7]);
    }
}
