//! Ids, offsets and cookies are 64 bits wide everywhere: they never pass through `usize`, which is
//! narrower on 32-bit machines.

use super::code::Code;
use super::{Problem, Source, line_of};

const WIDE: &[&str] = &["ino", "inode", "offset", "cookie", "id", "nodeid"];

pub fn check(source: &Source, code: &Code) -> Vec<Problem> {
    if source.is_test() {
        return Vec::new();
    }
    let text = &code.shipped;
    let mut found = Vec::new();
    for (at, _) in text.match_indices(" as usize") {
        report(&mut found, source, text, at, before(text, at));
    }
    for call in ["usize::from(", "usize::try_from("] {
        for (at, _) in text.match_indices(call) {
            report(&mut found, source, text, at, inside(text, at + call.len()));
        }
    }
    for (at, _) in text.match_indices(": usize") {
        let name = before(text, at);
        let narrow: Vec<&str> = name.into_iter().filter(|n| wide(n) && !n.contains("offset")).collect();
        report(&mut found, source, text, at, narrow);
    }
    found
}

fn report(found: &mut Vec<Problem>, source: &Source, text: &str, at: usize, names: Vec<&str>) {
    if let Some(name) = names.into_iter().find(|n| wide(n)) {
        let what = format!("{name} passes through usize");
        found.push(Problem::new("usize", &source.path, line_of(text, at), what));
    }
}

fn wide(name: &str) -> bool {
    name.split('_').any(|part| WIDE.contains(&part.to_lowercase().as_str()))
}

/// Identifiers of the expression that ends at `at`.
fn before(text: &str, at: usize) -> Vec<&str> {
    let bytes = text.as_bytes();
    let mut depth = 0_i32;
    let mut start = at;
    while start > 0 {
        let byte = bytes[start - 1];
        match byte {
            b')' | b']' => depth += 1,
            b'(' | b'[' if depth == 0 => break,
            b'(' | b'[' => depth -= 1,
            b'.' | b'_' => {}
            _ if byte.is_ascii_alphanumeric() || depth > 0 => {}
            _ => break,
        }
        start -= 1;
    }
    names(&text[start..at])
}

/// Identifiers up to the closing parenthesis.
fn inside(text: &str, from: usize) -> Vec<&str> {
    let mut depth = 1_i32;
    for (i, byte) in text.as_bytes().iter().enumerate().skip(from) {
        match byte {
            b'(' => depth += 1,
            b')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return names(&text[from..i]);
        }
    }
    Vec::new()
}

fn names(expression: &str) -> Vec<&str> {
    expression.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(text: &str) -> usize {
        check(&Source { path: "a.rs".into(), text: text.into() }, &Code::of(text)).len()
    }

    #[test]
    fn narrowing_is_found() {
        assert_eq!(count("let x = offset as usize;"), 1);
        assert_eq!(count("let x = (header.offset + 3) as usize;"), 1);
        assert_eq!(count("f(usize::try_from(entry.cookie)?);"), 1);
        assert_eq!(count("struct S { ino: usize }"), 1);
        assert_eq!(count("usize::from(node_id.0)"), 1);
    }

    #[test]
    fn lengths_may() {
        assert_eq!(count("let x = length as usize; usize::try_from(size)?"), 0);
        assert_eq!(count("let hidden = uid_count as usize; // offset as usize"), 0);
        assert_eq!(count("fn at(&self, offset: usize)"), 0);
        assert_eq!(count("offset; let n = 3 as usize;"), 0);
    }

    #[test]
    fn tests_may() {
        assert_eq!(count("#[cfg(test)]\nmod tests { fn f() { offset as usize; } }"), 0);
    }
}
