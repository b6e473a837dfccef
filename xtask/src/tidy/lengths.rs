//! Files and functions stay small enough to read.

use super::code::Code;
use super::{Problem, Source, line_of};

const FILE_LINES: usize = 600;
const FUNCTION_LINES: u32 = 70;

pub fn check(source: &Source, code: &Code) -> Vec<Problem> {
    let mut found = Vec::new();
    let lines = source.text.lines().count();
    if lines > FILE_LINES {
        found.push(Problem::new("length", &source.path, 1, format!("{lines} lines, at most {FILE_LINES}")));
    }
    for (name, first, last) in functions(&code.all) {
        let lines = last - first + 1;
        if lines > FUNCTION_LINES {
            let what = format!("fn {name} has {lines} lines, at most {FUNCTION_LINES}");
            found.push(Problem::new("length", &source.path, first, what));
        }
    }
    found
}

/// Name, first and last line of every function with a body.
fn functions(code: &str) -> Vec<(String, u32, u32)> {
    let mut found = Vec::new();
    let mut from = 0;
    while let Some(at) = code[from..].find("fn ").map(|p| p + from) {
        from = at + 3;
        let starts_word = at == 0 || !is_word(code.as_bytes()[at - 1]);
        let name: String = code[from..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if !starts_word || name.is_empty() {
            continue;
        }
        if let Some((_, end)) = body(code, from) {
            found.push((name, line_of(code, at), line_of(code, end)));
        }
    }
    found
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// The braces of the body behind a signature; `None` where the signature ends with `;`.
fn body(code: &str, from: usize) -> Option<(usize, usize)> {
    let mut depth = 0_i32;
    let mut brackets = 0_i32;
    let mut open = None;
    for (i, byte) in code.as_bytes().iter().enumerate().skip(from) {
        match byte {
            b'[' | b'(' => brackets += 1,
            b']' | b')' => brackets -= 1,
            b';' if open.is_none() && brackets == 0 => return None,
            b'{' => {
                open.get_or_insert(i);
                depth += 1;
            }
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return open.map(|o| (o, i));
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: String) -> Source {
        Source { path: "a.rs".into(), text }
    }

    #[test]
    fn long_functions_are_found() {
        let text = format!("fn short() {{}}\nfn long() {{\n{}}}\n", "    call();\n".repeat(70));
        let source = source(text);
        let found = check(&source, &Code::of(&source.text));
        assert_eq!(found.len(), 1);
        assert!(found[0].what.contains("fn long has 72 lines") && found[0].line == 2);
    }

    #[test]
    fn long_files_are_found() {
        let source = source("//\n".repeat(601));
        assert_eq!(check(&source, &Code::of(&source.text)).len(), 1);
    }

    #[test]
    fn declarations_have_no_body() {
        let code = "trait T { fn a(x: [u8; 3]); fn b() -> u8 { 1 } }";
        assert_eq!(functions(code), [("b".to_owned(), 1, 1)]);
    }
}
