//! Times and sizes on the command line.

use crate::options::Usage;
use nigh_types::{Span, Term};

/// Parses `500ms`, `10s`, `5m`, `1h`, `off` (keep nothing), `forever`. A bare number is refused, because its unit is
/// ambiguous.
pub fn term(option: &str, text: &str) -> Result<Term, Usage> {
    match text {
        "off" => return Ok(Term::Limited(Span::ZERO)),
        "forever" => return Ok(Term::Session),
        _ => {}
    }
    span(option, text).map(Term::Limited)
}

/// Parses `500ms`, `10s`, `5m`, `1h`, greater than zero.
pub fn positive(option: &str, text: &str) -> Result<Span, Usage> {
    match span(option, text)? {
        Span::ZERO => Err(Usage(format!("{option} {text}: want more than nothing, such as 30s"))),
        span => Ok(span),
    }
}

/// Parses `30s`, `5m`, …, greater than zero; `forever`: `None`.
pub fn lasting(option: &str, text: &str) -> Result<Option<Span>, Usage> {
    if text == "forever" { Ok(None) } else { positive(option, text).map(Some) }
}

/// Parses a number greater than zero; `unlimited`: `None`.
pub fn number(option: &str, text: &str) -> Result<Option<u64>, Usage> {
    match text.parse() {
        _ if text == "unlimited" => Ok(None),
        Ok(number @ 1..) => Ok(Some(number)),
        _ => Err(Usage(format!("{option} {text}: want a number such as 1000, or unlimited"))),
    }
}

fn span(option: &str, text: &str) -> Result<Span, Usage> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let per_unit = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "" if !number.is_empty() => {
            return Err(Usage(format!("{option} {text}: say the unit, for example {text}s or {text}ms")));
        }
        _ => return Err(Usage(format!("{option} {text}: want a time such as 500ms, 10s or 5m"))),
    };
    let number: u64 =
        number.parse().map_err(|_| Usage(format!("{option} {text}: want a time such as 10s")))?;
    Ok(Span::from_millis(number.saturating_mul(per_unit)))
}

/// Parses `64M`, `1G`, `65536`: bytes, or with K, M, G. Sizes too small for any directory are refused.
pub fn size(option: &str, text: &str) -> Result<u64, Usage> {
    const LEAST: u64 = 1 << 20;
    match parse_size(text) {
        Err(BadSize::Malformed) => Err(Usage(format!("{option} {text}: want a size such as 64M or 1G"))),
        Err(BadSize::TooLarge) => Err(Usage(format!("{option} {text}: more than any machine has"))),
        Ok((bytes, _)) if bytes >= LEAST => Ok(bytes),
        Ok(_) => Err(Usage(format!("{option} {text}: at least 1M is needed to hold any directory"))),
    }
}

/// Parses `64M`, `1G`, `65536K`: bytes with their unit, at least 1 MiB; `off`: 0.
pub fn size_or_off(option: &str, text: &str) -> Result<u64, Usage> {
    const LEAST: u64 = 1 << 20;
    if text == "off" {
        return Ok(0);
    }
    match parse_size(text) {
        Err(BadSize::Malformed) => Err(Usage(format!("{option} {text}: want a size such as 64M, or off"))),
        Err(BadSize::TooLarge) => Err(Usage(format!("{option} {text}: more than any machine has"))),
        Ok((0, _)) => Err(Usage(format!("{option} {text}: want at least 1M, or off"))),
        Ok((_, false)) => {
            Err(Usage(format!("{option} {text}: say the unit, for example {text}M or {text}K")))
        }
        Ok((bytes, true)) if bytes >= LEAST => Ok(bytes),
        Ok(_) => Err(Usage(format!("{option} {text}: want at least 1M, or off"))),
    }
}

enum BadSize {
    Malformed,
    TooLarge,
}

/// Returns bytes, and whether the text has a unit.
fn parse_size(text: &str) -> Result<(u64, bool), BadSize> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit {
        "" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        _ => return Err(BadSize::Malformed),
    };
    let number: u64 = match number.parse() {
        Ok(number) => number,
        Err(_) if number.is_empty() => return Err(BadSize::Malformed),
        Err(_) => return Err(BadSize::TooLarge),
    };
    number.checked_mul(1 << shift).map(|bytes| (bytes, !unit.is_empty())).ok_or(BadSize::TooLarge)
}

/// Returns an eighth of the machine's memory, at most 1 GiB: names and contents together take at most a quarter.
pub fn default_cache_size() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib: u64 = kib.and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(4 << 20);
    (kib * 1024 / 8).min(1 << 30)
}

/// Returns the memory for contents of files, as much as for names.
pub fn default_data_cache_size() -> u64 {
    default_cache_size()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_greater_than_zero_or_unlimited() {
        assert_eq!(number("n", "16").unwrap(), Some(16));
        assert_eq!(number("n", "unlimited").unwrap(), None);
        assert!(number("n", "0").is_err() && number("n", "-1").is_err() && number("n", "many").is_err());
        assert_eq!(lasting("t", "30s").unwrap(), Some(Span::from_secs(30)));
        assert_eq!(lasting("t", "forever").unwrap(), None);
        assert!(lasting("t", "0s").is_err() && lasting("t", "30").is_err());
    }

    #[test]
    fn times_need_a_unit() {
        assert_eq!(term("t", "500ms").unwrap(), Term::Limited(Span::from_millis(500)));
        assert_eq!(term("t", "2m").unwrap(), Term::Limited(Span::from_secs(120)));
        assert_eq!(term("t", "off").unwrap(), Term::Limited(Span::ZERO));
        assert_eq!(term("t", "forever").unwrap(), Term::Session);
        for bad in ["5", "", "s", "5 s", "-1s", "5d", "1.5s"] {
            assert!(term("t", bad).is_err(), "{bad}");
        }
        assert_eq!(positive("t", "1500ms").unwrap(), Span::from_millis(1_500));
        for bad in ["0s", "off", "forever", "5"] {
            assert!(positive("t", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_below_the_minimum_are_refused() {
        assert_eq!(size("c", "64M").unwrap(), 64 << 20);
        assert_eq!(size("c", "1048576").unwrap(), 1 << 20);
        for bad in ["0", "0M", "1023K", "x", "", "1T", "99999999999999999999", "18446744073709551615G"] {
            assert!(size("c", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_of_contents_need_a_unit_or_are_off() {
        assert_eq!(size_or_off("c", "64M").unwrap(), 64 << 20);
        assert_eq!(size_or_off("c", "off").unwrap(), 0);
        for bad in ["0", "0M", "12", "1048576", "1023K", "x", "", "M", "1T", "18446744073709551615G"] {
            assert!(size_or_off("c", bad).is_err(), "{bad}");
        }
    }
}
