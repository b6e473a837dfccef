//! The length of ARCHITECTURE.md and of the summary of each decision, which readers read first.

use super::{Problem, Source};

/// Most words of ARCHITECTURE.md, as `wc -w` counts them.
const ARCHITECTURE_WORDS: usize = 1_600;
/// Most words of a decision's summary, [`SUMMARY`] itself not counted.
const SUMMARY_WORDS: usize = 60;
/// The beginning of a decision's summary.
const SUMMARY: &str = "**Summary.**";
const DECISIONS: &str = "docs/decisions/";

/// Checks that ARCHITECTURE.md is short, and that each decision has a short summary.
pub fn check(sources: &[Source]) -> Vec<Problem> {
    sources.iter().filter_map(problem).collect()
}

fn problem(source: &Source) -> Option<Problem> {
    let (line, what) = if source.path == "ARCHITECTURE.md" {
        let words = source.text.split_whitespace().count();
        (words > ARCHITECTURE_WORDS).then(|| (1, format!("{words} words, at most {ARCHITECTURE_WORDS}")))?
    } else if is_decision(&source.path) {
        match summary(&source.text) {
            None => (1, format!("no paragraph begins with \"{SUMMARY}\"")),
            Some((_, words)) if words <= SUMMARY_WORDS => return None,
            Some((line, words)) => (line, format!("a summary of {words} words, at most {SUMMARY_WORDS}")),
        }
    } else {
        return None;
    };
    Some(Problem::new("lengths", &source.path, line, what))
}

/// Whether a path is a decision's page: any but the list of all pages.
fn is_decision(path: &str) -> bool {
    let page = path.strip_prefix(DECISIONS).and_then(|name| name.strip_suffix(".md"));
    page.is_some_and(|name| name != "README")
}

/// Returns the line on which the first summary begins, and its words up to the end of the paragraph.
fn summary(text: &str) -> Option<(u32, usize)> {
    let mut lines = (1..).zip(text.lines());
    let mut is_paragraph_start = true;
    let (number, first) = lines.by_ref().find_map(|(number, line)| {
        let found = line.strip_prefix(SUMMARY).filter(|_| is_paragraph_start);
        is_paragraph_start = line.trim().is_empty();
        found.map(|rest| (number, rest))
    })?;
    let rest = lines.map(|(_, line)| line).take_while(|line| !line.trim().is_empty());
    let words = std::iter::once(first).chain(rest).map(|line| line.split_whitespace().count()).sum();
    Some((number, words))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let source = Source { path: path.to_owned(), text: text.to_owned() };
        check(&[source]).into_iter().map(|problem| format!("{}: {}", problem.line, problem.what)).collect()
    }

    fn decision(words: usize) -> String {
        format!(
            "# 1 Page\n\n**Summary.** {}\n{}\n\nNot a word of it.\n",
            "w ".repeat(10),
            "w ".repeat(words - 10)
        )
    }

    #[test]
    fn architecture_of_too_many_words_is_found() {
        assert_eq!(found("ARCHITECTURE.md", &"a | ".repeat(800)), Vec::<String>::new());
        assert_eq!(found("ARCHITECTURE.md", &"a | b\n".repeat(534)), ["1: 1602 words, at most 1600"]);
        assert_eq!(found("README.md", &"a | b\n".repeat(534)), Vec::<String>::new());
    }

    #[test]
    fn summary_of_too_many_words_is_found() {
        assert_eq!(found("docs/decisions/0001-page.md", &decision(60)), Vec::<String>::new());
        let expected = ["3: a summary of 61 words, at most 60"];
        assert_eq!(found("docs/decisions/0001-page.md", &decision(61)), expected);
    }

    #[test]
    fn decision_without_a_summary_is_found() {
        let expected = ["1: no paragraph begins with \"**Summary.**\""];
        assert_eq!(found("docs/decisions/0001-page.md", "# 1 Page\n\nText.\n**Summary.** w\n"), expected);
        assert_eq!(found("docs/decisions/README.md", "# Decisions\n"), Vec::<String>::new());
    }
}
