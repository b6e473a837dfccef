//! Rust source with comments, strings and tests blanked out, positions kept.

/// Source text without what is no code. Blanked bytes are spaces; lines stay where they were.
pub struct Code {
    /// All code.
    pub all: String,
    /// Code before the first `#[cfg(test)]`: tests stand last in a file.
    pub shipped: String,
}

impl Code {
    #[must_use]
    pub fn of(text: &str) -> Code {
        let all = blank(text);
        let end = all.find("#[cfg(test)]").unwrap_or(all.len());
        Code { shipped: all[..end].to_owned(), all }
    }
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
}
