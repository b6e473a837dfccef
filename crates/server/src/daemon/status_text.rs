//! Text rendering of a server's status.

use nigh_types::byte_text;
use serde_json::Value;

/// Renders [`crate::Server::status`] as `nigh status --server` prints it.
#[must_use]
pub fn status_page(status: &Value) -> String {
    let mut page = format!(
        "server of uid {}, pid {}, nigh {}, up for {}{}\n",
        number(status, "/uid"),
        number(status, "/pid"),
        text(status, "/server"),
        seconds(number(status, "/uptime_s")),
        if status["stopping"] == true { ", stopping" } else { "" },
    );
    page += &line(
        "in all",
        &format!(
            "{}, {} calls under way, {} parked, {} grants, {}",
            counted(number(status, "/totals/sessions"), "session"),
            number(status, "/totals/calls/under_way"),
            number(status, "/totals/calls/parked"),
            number(status, "/totals/grants"),
            traffic(&status["totals"]),
        ),
    );
    for place in list(status, "/listening") {
        page += &line("listening", &printable(place));
    }
    for export in list(status, "/exports") {
        let (path, name) = (printable(&export["path"]), &export["name"]);
        let name = if name.is_null() { String::new() } else { format!("{} = ", printable(name)) };
        page +=
            &line("export", &format!("{name}{path}, {}", counted(number(export, "/sessions"), "session")));
    }
    for session in list(status, "/sessions") {
        let name = format!("session {}", number(session, "/session"));
        let mut name = name.as_str();
        for said in session_lines(session) {
            page += &line(name, &said);
            name = "";
        }
    }
    for contended in list(status, "/contended") {
        let what = match &contended["path"] {
            Value::Null => format!("inode {}", number(contended, "/inode")),
            path => printable(path),
        };
        page += &line(
            "contended",
            &format!("{} of {what}: not granted for a while", printable(&contended["covers"])),
        );
    }
    page
}

/// Renders one line for the status of mounts.
#[must_use]
pub fn summary(status: &Value) -> String {
    let owed = match number(status, "/totals/recalls_owed") {
        0 => String::new(),
        owed => format!(", {owed} recalls not acknowledged"),
    };
    let sessions = counted(number(status, "/totals/sessions"), "session");
    format!(
        "your server (pid {}): {sessions}{owed}; `nigh status --server` says more\n",
        number(status, "/pid")
    )
}

fn session_lines(session: &Value) -> Vec<String> {
    if session["export"].is_null() {
        let held = number(session, "/grants/read");
        return vec![
            format!("of client {}: connection lost, its lease runs out", printable(&session["client"])),
            format!("{}, {}", counted(held, "grant"), heard(session)),
        ];
    }
    let mut lines = vec![format!(
        "{} ({}), on {}, for {}",
        printable(&session["peer"]),
        printable(&session["transport"]),
        printable(&session["export"]),
        seconds(number(session, "/lasted_s"))
    )];
    if session["connected"] == false {
        let away = seconds(number(session, "/away_s"));
        let left = match session["dormant"] == true {
            true => "its lease ran out, its files and locks are kept for a while",
            false => "its lease runs out",
        };
        lines.push(format!("connection lost {away} ago: {left}"));
    }
    lines.push(format!(
        "{}, {}, {}, {}; {}",
        counted(number(session, "/open_files"), "open file"),
        counted(number(session, "/locks"), "lock"),
        counted(number(session, "/grants/read"), "grant"),
        heard(session),
        traffic(session),
    ));
    let calls = |kind: &str| number(session, &format!("/calls/{kind}"));
    if calls("unanswered") + calls("waiting_for_locks") > 0 {
        lines.push(format!(
            "calls: {} run, {} queued, {} parked, {} wait for locks",
            calls("running"),
            calls("queued"),
            calls("parked"),
            calls("waiting_for_locks"),
        ));
    }
    let owed = number(session, "/recalls/owed");
    if owed > 0 {
        let since = millis(number(session, "/recalls/oldest_ms"));
        let suspect =
            if session["suspect"] == true { ": suspect, it is not answered until then" } else { "" };
        lines.push(format!("owes {} since {since} ago{suspect}", counted(owed, "acknowledgement")));
    }
    if let Some(left) = session["distrusted_ms"].as_u64() {
        lines.push(format!("it let others wait: granted nothing for another {}", millis(left)));
    }
    lines.extend(list(session, "/waits").map(|wait| {
        let others: Vec<String> = list(wait, "/for").map(ToString::to_string).collect();
        let whom = if others.is_empty() {
            "no client any more".into()
        } else {
            format!("session {}", others.join(", "))
        };
        let since = match wait["since_ms"].as_u64() {
            Some(since) => format!(", for {}", millis(since)),
            None => String::new(),
        };
        format!("{} waits for {whom}{since}", printable(&wait["call"]))
    }));
    lines
}

fn line(name: &str, text: &str) -> String {
    format!("  {name:<11} {text}\n")
}

fn heard(session: &Value) -> String {
    format!("heard {} ago", millis(number(session, "/heard_ms")))
}

fn traffic(of: &Value) -> String {
    let [read, written, held] =
        ["in", "out", "held"].map(|way| byte_text(number(of, &format!("/bytes/{way}"))));
    format!("{read} in, {written} out, {held} kept")
}

fn list<'a>(value: &'a Value, path: &str) -> impl Iterator<Item = &'a Value> {
    value.pointer(path).and_then(Value::as_array).into_iter().flatten()
}

fn number(value: &Value, path: &str) -> u64 {
    value.pointer(path).and_then(Value::as_u64).unwrap_or(0)
}

fn text(value: &Value, path: &str) -> String {
    value.pointer(path).map_or_else(|| "?".into(), printable)
}

/// Escapes control characters, so that a value cannot contain terminal commands.
fn printable(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    nigh_types::printable(&text, usize::MAX)
}

fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn millis(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..60_000 => format!("{}.{} s", ms / 1_000, ms % 1_000 / 100),
        _ => seconds(ms / 1_000),
    }
}

fn seconds(s: u64) -> String {
    match s {
        0..60 => format!("{s} s"),
        60..3_600 => format!("{} min", s / 60),
        3_600..86_400 => format!("{} h {} min", s / 3_600, s % 3_600 / 60),
        _ => format!("{} d {} h", s / 86_400, s % 86_400 / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn status_page_lists_waits_and_contains_no_terminal_escapes() {
        let status = json!({
            "uid": 7, "pid": 9, "server": "1", "uptime_s": 3_725,
            "sessions": [
                { "session": 2, "connected": true, "peer": "unix socket, uid 7", "transport": "unix",
                  "export": "/x\u{1b}[31m\n", "lasted_s": 61, "heard_ms": 300, "suspect": true,
                  "recalls": { "owed": 1, "oldest_ms": 2_500 }, "grants": { "read": 1 } },
                { "session": 3, "connected": true, "export": "/y", "calls": { "unanswered": 1, "parked": 1 },
                  "waits": [{ "call": "mkdir", "for": [2], "since_ms": 2_400 }] },
                { "session": 4, "connected": false, "client": "abcd", "heard_ms": 4_000 },
            ],
            "contended": [{ "covers": "names", "path": "/x/d", "inode": 5 }],
        });
        let page = status_page(&status);
        assert!(page.contains("up for 1 h 2 min"), "{page}");
        assert!(page.contains("owes 1 acknowledgement since 2.5 s ago: suspect"), "{page}");
        assert!(page.contains("mkdir waits for session 2, for 2.4 s"), "{page}");
        assert!(page.contains("of client abcd: connection lost"), "{page}");
        assert!(page.contains("names of /x/d"), "{page}");
        assert!(page.contains("on /x [31m, for 1 min"), "{page}");
        assert!(!page.chars().any(|c| c.is_control() && c != '\n'));
    }
}
