//! Text for people: a peer's text on one line of a terminal or a log, and numbers of bytes.

/// Longest text of a peer that nigh shows, in characters.
pub const MAX_SHOWN_CHARS: usize = 300;

/// Returns `text` in one line without control characters: each control character, line separator and change of text
/// direction (Unicode TR9, TR14) becomes a space. Cut to `max_chars`.
#[must_use]
pub fn printable(text: &str, max_chars: usize) -> String {
    let text: String = text.chars().map(|c| if is_unprintable(c) { ' ' } else { c }).collect();
    let text: String = text.trim_start().chars().take(max_chars).collect();
    text.trim_end().to_owned()
}

/// A number of bytes for people, in binary units: `1.5 MiB`.
#[must_use]
pub fn byte_text(count: u64) -> String {
    let mut value = count as f64;
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") }
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
        assert_eq!(printable("\u{1}it stays as it is\n\u{2}", 100), "it stays as it is");
        assert_eq!(printable("cut at a space", 4), "cut");
    }

    #[test]
    fn byte_count_is_shown_in_the_largest_unit_below_it() {
        let shown = [0, 1_023, 1_024, 3 << 19, 5 << 50].map(byte_text);
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5120.0 TiB"]);
    }
}
