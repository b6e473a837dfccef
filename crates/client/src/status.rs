//! Contents of `nigh status` for a mount. The keys are a contract (docs/status.md).

use crate::driver::Driver;
use nigh_cache::{Counters, Gauges, NotifyLevel, WatchStatus};
use nigh_fuse::mount::mounts;
use nigh_fuse::{Negotiated, opcode_name};
use nigh_link::Kind;
use nigh_remote::SessionParams;
use nigh_types::{Guarantees, Span, Term, UnsupportedGuarantee, byte_text, printable};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Properties that stay constant over a mount's life.
#[derive(Clone, Debug)]
pub struct About {
    pub mountpoint: PathBuf,
    pub source: String,
    pub link: Kind,
    pub agreed: Negotiated,
    pub budget_bytes: u64,
    /// Memory for file contents, in bytes.
    pub data_budget_bytes: u64,
    /// Major and minor number of the mount's device; `None` where it is not mounted.
    pub device: Option<(u32, u32)>,
}

/// Source of a mount's status.
pub struct Source {
    driver: Arc<Driver>,
    about: About,
    session: SessionParams,
}

impl Source {
    pub(crate) fn new(driver: Arc<Driver>, about: About, session: SessionParams) -> Source {
        Source { driver, about, session }
    }

    /// The guarantees that the remote's protocol cannot give, in a line for people.
    pub(crate) fn unsupported_guarantees(&self) -> Option<String> {
        let kind = self.driver.with(|core, _| core.remote.kind());
        unsupported_by_protocol(kind, &self.session.guarantees)
    }

    /// One object, as `nigh status --json` prints it.
    #[must_use]
    pub fn status(&self) -> Value {
        let (kind, counters, gauges, remote, connected, problem, stale, level, watching) =
            self.driver.with(|core, _| {
                let (cache, remote) = (&core.cache, core.remote_counters());
                let (connected, stale) = (cache.is_attached(), cache.is_stale());
                let problem = (!core.remote.is_connected()).then(|| core.problem.clone());
                (
                    core.remote.kind(),
                    cache.counters(),
                    cache.gauges(),
                    remote,
                    connected,
                    problem,
                    stale,
                    cache.level(),
                    cache.watching(),
                )
            });
        let configured = crate::mount::cache_level(self.driver.transport.level());
        let fallbacks = self.driver.notifier.epoch_fallbacks.load(Ordering::Relaxed);
        json!({
            "mountpoint": self.mountpoint().to_string_lossy(),
            "device": self.about.device.map(|(major, minor)| format!("{major}:{minor}")),
            "source": self.about.source,
            "pid": std::process::id(),
            "remote": {
                "kind": kind,
                "link": self.about.link.to_string(),
                "connected": connected,
                "problem": problem,
                "lapses": counters.lapses,
                "requests": remote.requests,
                "renewals": remote.renewals,
                "by_type": remote.by_type,
                "waits": counters.waits,
                "joins": counters.joins,
                "bytes_sent": remote.bytes_sent,
                "bytes_received": remote.bytes_received,
            },
            "cache": {
                "entries": gauges.entries,
                "negative": gauges.negative,
                "complete_directories": gauges.complete_directories,
                "bytes": gauges.bytes,
                "budget_bytes": self.about.budget_bytes,
                "hits": counters.hits,
                "misses": counters.misses,
                "evictions": counters.evictions,
                "squeezed": counters.squeezed,
                "pruned": counters.pruned,
                "ahead": ahead(&counters),
                "contents": contents(&counters, &gauges, self.about.data_budget_bytes),
                "inodes": gauges.inodes,
                "open_files": gauges.open_files,
            },
            "leases": leases(&counters, &gauges),
            "pending": { "operations": gauges.pending_operations, "bytes": 0 },
            "errors": { "unreported": 0, "total": 0 },
            "kernel": {
                "requests": self.requests_of_kernel(),
                "protocol": format!("7.{}", self.about.agreed.minor),
                "notifications": level_name(level),
                "lowered": level != configured,
                "epoch_fallbacks": fallbacks,
                "epoch_planned": counters.epoch_planned,
            },
            "events": self.events(watching),
            "guarantees": self.guarantees(stale, gauges.grants_limited),
        })
    }

    /// The current mount point: the mount may have been moved.
    fn mountpoint(&self) -> PathBuf {
        self.about.device.and_then(mountpoint_of).unwrap_or_else(|| self.about.mountpoint.clone())
    }

    fn requests_of_kernel(&self) -> Map<String, Value> {
        let counts = self.driver.opcode_counts().into_iter();
        counts.map(|(code, count)| (opcode_name(code).to_owned(), json!(count))).collect()
    }

    fn events(&self, watching: WatchStatus) -> Value {
        let counts = &self.driver.events.counts;
        let number = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        json!({
            "mode": self.driver.events.mode(),
            "watched": watching.directories,
            "unsettled": watching.unsettled,
            "looks": watching.looks,
            "gaps": watching.gaps,
            "replayed": number(&counts.replayed),
            "repeated": number(&counts.repeated),
            "refused": number(&counts.refused),
            "lost": number(&counts.lost),
            "stuck": number(&counts.stuck),
        })
    }

    fn guarantees(&self, stale: bool, limited: u64) -> Value {
        let mut guarantees = Map::new();
        guarantees.insert(
            "S1".into(),
            match self.driver.transport.level() {
                _ if stale => json!(false),
                nigh_fuse::Level::None => {
                    json!("but for pages of shared maps, as this kernel can be told nothing")
                }
                _ => json!(true),
            },
        );
        guarantees.insert("S2".into(), json!(true));
        guarantees.insert("S3".into(), json!(true));
        guarantees.insert("S4".into(), json!("calls under way do not survive a restart of the server yet"));
        guarantees
            .insert("S5".into(), json!("nothing is shipped behind yet: without the server changes wait"));
        guarantees.insert("S6".into(), json!(true));
        guarantees.insert("S7".into(), json!(true));
        guarantees.insert("S8".into(), json!(true));
        guarantees.insert("S9".into(), self.host_changes(limited));
        guarantees.insert("S10".into(), json!(true));
        for UnsupportedGuarantee { name, why, .. } in &self.session.guarantees.unsupported {
            guarantees.insert(name.clone(), json!(why));
        }
        Value::Object(guarantees)
    }

    /// S9: the server's bound for the whole export, and the terms of the current grants.
    fn host_changes(&self, limited: u64) -> Value {
        match (self.session.guarantees.staleness_bound.as_str(), self.session.term, limited) {
            ("", Term::Limited(span), 1..) if span != Span::ZERO => {
                let span_ms = span.as_millis();
                json!(format!(
                    "of what the server cannot watch ({limited} grants now) changes on its own disk are seen within {span_ms} ms"
                ))
            }
            ("", ..) => json!(true),
            (bound, ..) => json!(bound),
        }
    }
}

/// The line about guarantees that no server of the protocol `kind` gives; `None` if there are none.
fn unsupported_by_protocol(kind: &str, guarantees: &Guarantees) -> Option<String> {
    let lacking = guarantees.unsupported.iter().filter(|lacking| lacking.by_protocol);
    let names: Vec<_> = lacking.map(|lacking| lacking.name.as_str()).collect();
    let bound = &guarantees.staleness_bound;
    let line = format!("{kind} cannot give {}: {bound}; `nigh status` says more", names.join(", "));
    (!names.is_empty()).then_some(line)
}

/// File contents in memory, and what became of those that were read ahead.
fn contents(counters: &Counters, gauges: &Gauges, budget_bytes: u64) -> Value {
    json!({
        "bytes": gauges.contents_bytes,
        "budget_bytes": budget_bytes,
        "files": gauges.contents_files,
        "fetched": counters.contents_fetched,
        "used": counters.contents_used,
        "wasted": counters.contents_wasted,
        "stored": counters.contents_stored,
    })
}

/// Prefetched entries.
fn ahead(counters: &Counters) -> Value {
    json!({
        "walks": counters.ahead_walks,
        "fetched": counters.ahead_fetched,
        "used": counters.ahead_used,
        "wasted": counters.ahead_wasted,
    })
}

fn leases(counters: &Counters, gauges: &Gauges) -> Value {
    json!({
        "read": gauges.grants_read,
        "limited": gauges.grants_limited,
        "write": 0,
        "recalled": counters.recalled,
        "updated_in_place": counters.updated_in_place,
    })
}

/// Appended to a notification level that a nested mount has lowered.
const LOWERED: &str = ", since a filesystem was mounted below or an overlay over it: names are asked for again until this is mounted anew";

/// Major and minor number of the device mounted at a path.
pub(crate) fn device_at(path: &Path) -> Option<(u32, u32)> {
    mounts().into_iter().rfind(|mount| mount.mountpoint == path).map(|mount| mount.device)
}

/// The mount point of a device, as this process sees it.
fn mountpoint_of(device: (u32, u32)) -> Option<PathBuf> {
    mounts().into_iter().find(|mount| mount.device == device).map(|mount| mount.mountpoint)
}

/// S1 while the remote is disconnected and replies come from old facts.
const NOT_GIVEN: &str = "not now: the server is away, and answers may be old";

fn level_name(level: NotifyLevel) -> &'static str {
    match level {
        NotifyLevel::All => "all",
        NotifyLevel::NoEpoch => "no-epoch",
        NotifyLevel::None => "none",
    }
}

/// The status as a page for people. Texts in it contain no terminal escapes and no line breaks.
#[must_use]
pub fn page(status: &Value) -> String {
    let text = |path: &str| match status.pointer(path) {
        Some(Value::String(text)) => shown(text),
        Some(value) => value.to_string(),
        None => "?".to_owned(),
    };
    let number = |path: &str| status.pointer(path).and_then(Value::as_u64).unwrap_or(0);
    let (hits, misses) = (number("/cache/hits"), number("/cache/misses"));
    let share = 100.0 * hits as f64 / (hits + misses).max(1) as f64;
    let connected = status.pointer("/remote/connected").and_then(Value::as_bool).unwrap_or(false);
    let problem =
        status.pointer("/remote/problem").and_then(Value::as_str).filter(|problem| !problem.is_empty());
    let server = match problem {
        Some(problem) => format!("no connection, trying again ({})", shown(problem)),
        None if connected => "connected".to_owned(),
        None => "not connected: changes wait until it is back".to_owned(),
    };
    let mut page = format!(
        "{} on {}\n  server      {server}, {} requests, {} waits, {} sent, {} received\n",
        text("/source"),
        text("/mountpoint"),
        number("/remote/requests"),
        number("/remote/waits"),
        byte_text(number("/remote/bytes_sent")),
        byte_text(number("/remote/bytes_received")),
    );
    page += &format!(
        "  cache       {} names in {} complete directories, {} of {}\n",
        number("/cache/entries"),
        number("/cache/complete_directories"),
        byte_text(number("/cache/bytes")),
        byte_text(number("/cache/budget_bytes")),
    );
    page += &format!("  answered    {hits} from memory, {misses} by waiting ({share:.1} % from memory)\n");
    let lowered = status.pointer("/kernel/lowered").is_some_and(|lowered| *lowered == true);
    page += &format!(
        "  kernel      FUSE {}, notifications: {}{}\n",
        text("/kernel/protocol"),
        text("/kernel/notifications"),
        if lowered { LOWERED } else { "" },
    );
    let limits = status.pointer("/guarantees").and_then(Value::as_object);
    for (name, value) in limits.into_iter().flatten().filter(|(_, value)| **value != true) {
        page += &format!("  {:<11} {}\n", shown(name), value.as_str().map_or(NOT_GIVEN.to_owned(), shown));
    }
    page
}

/// Long enough for the longest Linux path (`PATH_MAX`).
const MAX_TEXT_CHARS: usize = 4_096;

fn shown(text: &str) -> String {
    printable(text, MAX_TEXT_CHARS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guarantees_that_a_protocol_cannot_give_are_named_and_those_of_one_export_are_not() {
        let lacking = |name: &str, by_protocol| UnsupportedGuarantee {
            name: name.to_owned(),
            why: "so".to_owned(),
            by_protocol,
        };
        let line = |unsupported| {
            let staleness_bound = "changes are seen late".to_owned();
            unsupported_by_protocol("9p", &Guarantees { unsupported, staleness_bound })
        };
        assert_eq!((line(vec![]), line(vec![lacking("S4", false)])), (None, None));
        assert_eq!(
            line(vec![lacking("S1", true), lacking("S4", false), lacking("S5", true)]).unwrap(),
            "9p cannot give S1, S5: changes are seen late; `nigh status` says more"
        );
    }

    #[test]
    fn status_page_shows_server_text_without_escape_codes() {
        let page = page(&json!({
            "source": "/a\u{1b}[2J\nb", "mountpoint": "/m\rn",
            "remote": { "connected": false, "problem": "no\nnigh: done \u{1b}]0;x\u{7}" },
            "guarantees": { "S9\u{1b}[1m": "later\n  S1  true", "S1": true },
        }));
        assert_eq!(page.lines().count(), 6, "{page}");
        assert!(!page.chars().any(|c| c.is_control() && c != '\n'), "{page:?}");
    }

    #[test]
    fn status_page_shows_why_there_is_no_connection() {
        let server = |connected: bool, problem: Value| {
            let page = page(&json!({ "remote": { "connected": connected, "problem": problem } }));
            page.lines().nth(1).unwrap_or_default().trim().to_owned()
        };
        assert!(server(true, Value::Null).starts_with("server      connected, "));
        assert!(server(false, Value::Null).starts_with("server      not connected: "));
        let refused = server(true, json!("update nigh on the client's machine"));
        assert!(refused.contains("trying again (update nigh on the client's machine)"), "{refused}");
    }
}
