//! Sanitising of a peer's text for one line on a terminal or in a log.

/// Longest text of a peer that nigh shows, in characters.
pub const MAX_SHOWN_CHARS: usize = 300;

/// Returns `text` in one line without control characters: each control character, line separator and change of text
/// direction (Unicode TR9, TR14) becomes a space. Cut to `max_chars`.
#[must_use]
pub fn printable(text: &str, max_chars: usize) -> String {
    text.trim().chars().map(|c| if is_unprintable(c) { ' ' } else { c }).take(max_chars).collect()
}

fn is_unprintable(c: char) -> bool {
    let separates_lines = matches!(c, '\u{2028}' | '\u{2029}');
    let changes_direction =
        matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || separates_lines || changes_direction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_text_is_shown_on_one_line_without_terminal_escapes() {
        let text = " no \u{1b}[2J\u{9b}31m entry\r\nnigh: done\u{2028}\u{202e}x ";
        assert_eq!(printable(text, 100), "no  [2J 31m entry  nigh: done  x");
        assert_eq!(printable(text, 2), "no");
        assert_eq!(printable("größer, 日本", 100), "größer, 日本");
    }
}
