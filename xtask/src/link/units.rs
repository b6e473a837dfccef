//! Parsers of durations and bandwidths with units.

use std::time::Duration;

pub fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text)?;
    let seconds = match unit {
        "us" => number / 1e6,
        "ms" => number / 1e3,
        "s" => number,
        _ => return Err("a time needs a unit: us, ms or s".to_owned()),
    };
    Duration::try_from_secs_f64(seconds).map_err(|e| e.to_string())
}

pub fn bits_per_second(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text)?;
    let factor = match unit {
        "Kbit" => 1e3,
        "Mbit" => 1e6,
        "Gbit" => 1e9,
        _ => return Err("a bandwidth needs a unit: Kbit, Mbit or Gbit".to_owned()),
    };
    let bits = number * factor;
    if !(1e3..=1e12).contains(&bits) { Err("between 1Kbit and 1000Gbit".to_owned()) } else { Ok(bits as u64) }
}

fn split(text: &str) -> Result<(f64, &str), String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number = text[..end].parse().map_err(|_| format!("{text}: not a number with a unit"))?;
    Ok((number, &text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_bandwidths_without_unit_are_refused() {
        assert_eq!(duration("10ms"), Ok(Duration::from_millis(10)));
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert!(duration("10").is_err() && duration("ms").is_err());
        assert_eq!(bits_per_second("1Gbit"), Ok(1_000_000_000));
        assert!(bits_per_second("100").is_err() && bits_per_second("0Mbit").is_err());
    }
}
