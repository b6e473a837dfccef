//! The walks of ARCHITECTURE.md: each step names a file and a function in it.

use super::code::Code;
use super::{Problem, Source};

/// Most steps of one walk.
const MOST: usize = 10;
/// Walks that the page has.
const WALKS: [&str; 3] = ["a LOOKUP", "a recall", "a rename"];

/// Checks that the walks are there, that each has at most ten steps, and that their functions exist.
pub fn check(sources: &[Source]) -> Vec<Problem> {
    let Some(page) = sources.iter().find(|source| source.path == "ARCHITECTURE.md") else {
        return vec![Problem::new("walks", "ARCHITECTURE.md", 1, "is missing")];
    };
    let mut found = check_steps(sources, page);
    for walk in WALKS {
        if !page.text.lines().any(|line| line.strip_prefix("## Walk of ") == Some(walk)) {
            found.push(Problem::new("walks", &page.path, 1, format!("has no walk of {walk}")));
        }
    }
    found
}

fn check_steps(sources: &[Source], page: &Source) -> Vec<Problem> {
    let mut found = Vec::new();
    let (mut walk, mut steps) = (None, 0);
    for (line, number) in page.text.lines().zip(1..) {
        let mut say = |what: String| found.push(Problem::new("walks", &page.path, number, what));
        if let Some(title) = line.strip_prefix("## ") {
            (walk, steps) = (title.strip_prefix("Walk of "), 0);
        }
        let (Some(walk), Some(step)) = (walk, step(line)) else { continue };
        steps += 1;
        if steps == MOST + 1 {
            say(format!("the walk of {walk} has more than {MOST} steps"));
        }
        match step {
            Some((file, function)) if is_there(sources, file, function) => {}
            Some((file, function)) => say(format!("{file} has no function {function}")),
            None => say("a step is \"`FILE` `FUNCTION`: ...\"".to_owned()),
        }
    }
    found
}

/// Returns file and function of a numbered item; the inner `None`: it is not of that form.
fn step(line: &str) -> Option<Option<(&str, &str)>> {
    let (number, text) = line.split_once(". ")?;
    number.parse::<u32>().ok()?;
    let mut spans = text.split('`');
    let (before, file, between, function, after) =
        (spans.next()?, spans.next(), spans.next(), spans.next(), spans.next());
    let is_step =
        before.is_empty() && between == Some(" ") && after.is_some_and(|after| after.starts_with(':'));
    Some(file.zip(function).filter(|_| is_step))
}

/// Whether a file, named from its crate's folder without `src/`, has that function.
fn is_there(sources: &[Source], file: &str, function: &str) -> bool {
    let Some((krate, path)) = file.split_once('/') else { return false };
    let path = format!("crates/{krate}/src/{path}");
    let has = |open: &str| {
        let source = sources.iter().find(|source| source.path == path);
        source.is_some_and(|source| Code::of(&source.text).shipped.contains(&format!("fn {function}{open}")))
    };
    has("(") || has("<")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(page: &str) -> Vec<String> {
        let source = |path: &str, text: &str| Source { path: path.to_owned(), text: text.to_owned() };
        let sources = [
            source("ARCHITECTURE.md", page),
            source("crates/cache/src/ops/a.rs", "pub(crate) fn go<T>() {}"),
        ];
        let problems = check_steps(&sources, &sources[0]);
        problems.into_iter().map(|problem| format!("{}: {}", problem.line, problem.what)).collect()
    }

    #[test]
    fn step_names_a_function_that_exists() {
        let page = "## Walk of X\n\n1. `cache/ops/a.rs` `go`: goes.\n2. `cache/ops/a.rs` `come`: comes.\n\
            3. It goes.\n## Other\n1. Not a step.\n";
        let expected = ["4: cache/ops/a.rs has no function come", "5: a step is \"`FILE` `FUNCTION`: ...\""];
        assert_eq!(found(page), expected);
    }

    #[test]
    fn each_walk_is_there() {
        let page = Source { path: "ARCHITECTURE.md".to_owned(), text: "## Walk of a recall\n".to_owned() };
        let found: Vec<String> = check(&[page]).into_iter().map(|problem| problem.what).collect();
        assert_eq!(found, ["has no walk of a LOOKUP", "has no walk of a rename"]);
        assert_eq!(check(&[]).len(), 1);
    }

    #[test]
    fn walk_has_at_most_ten_steps() {
        let steps = |count: usize| "1. `cache/ops/a.rs` `go`: goes.\n".repeat(count);
        assert_eq!(found(&format!("## Walk of X\n{}", steps(10))), Vec::<String>::new());
        assert_eq!(
            found(&format!("## Walk of X\n{}", steps(12))),
            ["12: the walk of X has more than 10 steps"]
        );
    }
}
