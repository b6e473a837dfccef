//! Rust source with comments, strings and tests blanked out, positions kept.

use std::ops::Range;

/// Source text without what is no code. Blanked bytes are spaces; lines stay where they were.
pub struct Code {
    /// All code.
    pub all: String,
    /// Code without the items under `#[cfg(test)]`.
    pub shipped: String,
    /// Where those items are.
    tests: Vec<Range<usize>>,
}

impl Code {
    #[must_use]
    pub fn of(text: &str) -> Code {
        let all = blank(text);
        let tests = tests_in(&all);
        let mut shipped = all.clone().into_bytes();
        for byte in tests.iter().cloned().flatten() {
            if shipped[byte] != b'\n' {
                shipped[byte] = b' ';
            }
        }
        // All bytes are ASCII.
        Code { shipped: String::from_utf8_lossy(&shipped).into_owned(), all, tests }
    }

    /// Returns whether a position of the text is within a test.
    #[must_use]
    pub fn is_test(&self, at: usize) -> bool {
        self.tests.iter().any(|test| test.contains(&at))
    }
}

/// Returns the items that follow `#[cfg(test)]`.
fn tests_in(code: &str) -> Vec<Range<usize>> {
    const MARK: &str = "#[cfg(test)]";
    let mut found: Vec<Range<usize>> = Vec::new();
    for (start, _) in code.match_indices(MARK) {
        if found.last().is_none_or(|last| last.end <= start) {
            let item = start + MARK.len();
            found.push(start..item + item_length(&code[item..]));
        }
    }
    found
}

/// Returns the length of the item, field or arm that a piece of code begins with, with its attributes.
fn item_length(code: &str) -> usize {
    const ITEMS: &[&str] = &[
        "const",
        "enum",
        "extern",
        "fn",
        "impl",
        "let",
        "macro_rules",
        "mod",
        "pub",
        "static",
        "struct",
        "trait",
        "type",
        "unsafe",
        "use",
    ];
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut depth, mut first, mut is_use) = (0_i32, None, false);
    for (at, c) in code.char_indices() {
        let is_start = is_word(c) && !code[..at].ends_with(is_word);
        if depth == 0 && is_start {
            let word = &code[at..at + code[at..].find(|c| !is_word(c)).unwrap_or(code.len() - at)];
            first = first.or(Some(word));
            is_use |= word == "use";
        }
        let is_item = first.is_none_or(|word| ITEMS.contains(&word));
        match c {
            '{' | '(' | '[' => depth += 1,
            '}' | ')' | ']' if depth == 0 => return at,
            '}' if depth == 1 && is_item && !is_use => return at + 1,
            '}' | ')' | ']' => depth -= 1,
            ';' if depth == 0 => return at + 1,
            ',' if depth == 0 && !is_item => return at + 1,
            _ => {}
        }
    }
    code.len()
}

#[derive(Clone, Copy)]
enum In {
    Code,
    Line,
    Block(u32),
    Text,
    Raw(usize),
}

fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut state = In::Code;
    let mut at = 0;
    while at < bytes.len() {
        let (next, length) = step(bytes, at, state);
        let keep = matches!((state, next), (In::Code, In::Code));
        for &byte in &bytes[at..(at + length).min(bytes.len())] {
            out.push(if byte == b'\n' || (keep && byte.is_ascii()) { byte } else { b' ' });
        }
        if keep && length > 1 && bytes[at] == b'\'' {
            let from = out.len() - length;
            out[from..].fill(b' ');
        }
        state = next;
        at += length;
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The state behind the next piece, and how long that piece is.
fn step(bytes: &[u8], at: usize, state: In) -> (In, usize) {
    let rest = &bytes[at..];
    match state {
        In::Line if rest[0] == b'\n' => (In::Code, 1),
        In::Block(_) if rest.starts_with(b"*/") => match state {
            In::Block(depth) if depth > 1 => (In::Block(depth - 1), 2),
            _ => (In::Code, 2),
        },
        In::Block(depth) if rest.starts_with(b"/*") => (In::Block(depth + 1), 2),
        In::Text if rest[0] == b'\\' => (In::Text, 2),
        In::Text if rest[0] == b'"' => (In::Code, 1),
        In::Raw(hashes) if rest[0] == b'"' && closes(rest, hashes) => (In::Code, 1 + hashes),
        In::Code => begin(bytes, at),
        other => (other, 1),
    }
}

fn closes(rest: &[u8], hashes: usize) -> bool {
    rest.len() > hashes && rest[1..=hashes].iter().all(|&b| b == b'#')
}

fn begin(bytes: &[u8], at: usize) -> (In, usize) {
    let rest = &bytes[at..];
    if rest.starts_with(b"//") {
        return (In::Line, 2);
    }
    if rest.starts_with(b"/*") {
        return (In::Block(1), 2);
    }
    if rest[0] == b'"' {
        return (In::Text, 1);
    }
    let word_before = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    let raw = if rest.starts_with(b"br") { 2 } else { usize::from(rest[0] == b'r') };
    if raw > 0 && !word_before {
        let hashes = rest[raw..].iter().take_while(|&&b| b == b'#').count();
        if rest.get(raw + hashes) == Some(&b'"') {
            return (In::Raw(hashes), raw + hashes + 1);
        }
    }
    if rest[0] == b'\'' {
        return (In::Code, character(rest));
    }
    (In::Code, 1)
}

/// The length of a character literal; 1 for a lifetime.
fn character(rest: &[u8]) -> usize {
    if rest.get(1) == Some(&b'\\') {
        let close = rest.iter().skip(3).position(|&b| b == b'\'');
        return close.map_or(1, |p| p + 4);
    }
    let close = rest.iter().take(6).skip(2).position(|&b| b == b'\'');
    match close {
        Some(0) => 3,
        Some(extra) if !rest[1].is_ascii() => extra + 3,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_strings_and_characters_go() {
        let text = "let a = \"x // {\"; // {\nlet b = '{'; /* { /* } */ */ let c: &'a str = r#\"{\"#;";
        let code = Code::of(text).all;
        assert_eq!(code.len(), text.len());
        assert!(!code.contains('{') && !code.contains('}'));
        assert!(code.contains("let a =") && code.contains("&'a str"));
        assert_eq!(code.lines().count(), 2);
    }

    #[test]
    fn escaped_quotes_do_not_end_a_string() {
        let code = Code::of(r#"f("a\"b{"); g('\'', '\u{1F600}'); h()"#).all;
        assert!(!code.contains('{') && code.contains("h()"));
    }

    #[test]
    fn tests_are_not_shipped() {
        let code = Code::of("fn a() {}\n#[cfg(test)]\nmod tests { fn b() {} }\n");
        assert!(code.shipped.contains("fn a") && !code.shipped.contains("fn b"));
        assert!(code.all.contains("fn b"));
    }

    #[test]
    fn code_behind_a_test_is_shipped() {
        let text = "#[cfg(test)]\nmod tests;\n#[cfg(test)]\nuse a::{b, c};\nfn d() {}\nstruct S {\n    #[cfg(test)]\n    e: Vec<u8>,\n    \
            f: u8,\n}\n#[cfg(test)]\n#[must_use]\npub fn g(x: [u8; 3]) -> u8 { x[0] }\nfn h() {}\n#[cfg(test)]\nimpl S {\n    fn i() {}\n}\nfn j() {}\n";
        let code = Code::of(text);
        for shipped in ["fn d", "f: u8", "fn h", "fn j"] {
            assert!(code.shipped.contains(shipped), "{shipped}: {}", code.shipped);
        }
        for test in ["mod tests", "use a", "e: Vec", "fn g", "x[0]", "impl S", "fn i"] {
            assert!(!code.shipped.contains(test), "{test}: {}", code.shipped);
            assert!(code.is_test(text.find(test).unwrap()));
        }
        assert_eq!(code.shipped.len(), text.len());
    }
}
