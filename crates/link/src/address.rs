//! Host and port syntax of command lines and URLs.

/// Parses `HOST[:PORT]`, with an IPv6 address in brackets; `None` if `text` has another form.
#[must_use]
pub fn parse(text: &str, default_port: u16) -> Option<(String, u16)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(inner) => {
            let (host, rest) = inner.split_once(']')?;
            (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    if host.is_empty() || host.contains(['@', ' ']) {
        return None;
    }
    let port = port.map_or(Some(default_port), |port| port.parse().ok())?;
    Some((host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    #[test]
    fn hosts_may_have_ports() {
        let found = |text| super::parse(text, 564).map(|(host, port)| format!("{host} {port}"));
        for (text, expected) in [
            ("a.example", "a.example 564"),
            ("a.example:7", "a.example 7"),
            ("[::1]", "::1 564"),
            ("[::1]:7", "::1 7"),
        ] {
            assert_eq!(found(text).as_deref(), Some(expected));
        }
        for bad in ["", ":7", "::1", "[::1", "[::1]7", "[]:7", "a:", "a:b", "a:65536", "me@a", "a b"] {
            assert_eq!(found(bad), None, "{bad}");
        }
    }
}
