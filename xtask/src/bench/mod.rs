//! `cargo xtask bench`: workloads on a nigh mount over an emulated link, on the local disk and on the null daemon, in
//! one run.

mod contents;
mod directories;
pub mod directory;
mod host;
mod latency;
mod measure;
pub mod null;
mod null_tree;
pub mod places;
mod table;
mod trees;
pub mod workload;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use serde_json::{Value, json};

use crate::root;
use crate::test::over::LinkKind;
use crate::test::world::{As, Length, World};
use measure::Row;
use places::{Distant, Null};
use workload::Workload;

#[derive(clap::Args)]
pub struct Options {
    /// Size of the trees; 1 is 100,000 files in one directory and 15,005 nested directories.
    #[arg(long, default_value_t = 0.1)]
    scale: f64,
    /// Round trip times, divided by commas.
    #[arg(long, value_delimiter = ',', default_value = "0ms,10ms")]
    rtt: Vec<String>,
    #[arg(long, default_value = "1Gbit")]
    bandwidth: String,
    /// The kind of link: `local`, `nigh` or `ssh`.
    #[arg(long, value_enum, default_value_t = LinkKind::Local)]
    over: LinkKind,
    /// Compress the data on the link.
    #[arg(long)]
    compress: bool,
    /// How long nigh may assume that no local process changes the server's directory.
    #[arg(long, default_value = "forever")]
    host_timeout: String,
    /// Only these workloads, divided by commas.
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Workload>,
    /// Daemons, server and workloads all on the first CPU; otherwise wherever the kernel puts them.
    #[arg(long)]
    pinned: bool,
    /// Small trees and one round trip time: under two minutes.
    #[arg(long)]
    short: bool,
    /// Also 10,000,000 different missing names, with the daemon's memory before and after.
    #[arg(long)]
    long: bool,
    /// Only large directories: telldir and seekdir, first names, `ls -l`, memory.
    #[arg(long, conflicts_with_all = ["scale", "rtt", "only", "long", "pinned"])]
    directories: bool,
    /// Only changes on the server's own disk: how soon a mount shows them.
    #[arg(long, conflicts_with_all = ["scale", "rtt", "only", "long", "pinned", "directories"])]
    host: bool,
    /// Only contents of files: small ones, a large one, and callers beside it.
    #[arg(long, conflicts_with_all = ["scale", "rtt", "only", "long", "pinned", "directories", "host"])]
    contents: bool,
    /// Where the figures go, as JSON.
    #[arg(long, default_value = "bench.json")]
    out: PathBuf,
    /// Time this binary instead of building one.
    #[arg(long, value_name = "PATH")]
    nigh: Option<PathBuf>,
}

/// The parameters of a run, with `--short` applied.
struct Plan {
    sizes: trees::Sizes,
    rtts: Vec<String>,
    workloads: Vec<Workload>,
    latency_calls: u32,
}

pub fn run(options: &Options) -> Result<bool> {
    if options.directories {
        return directories::run(options.nigh.as_deref(), options.short, &options.out);
    }
    if options.host {
        return host::run(options.nigh.as_deref(), options.short, &options.out);
    }
    if options.contents {
        return contents::run(options.nigh.as_deref(), options.short, &options.out);
    }
    let plan = plan(options);
    let start = Instant::now();
    if options.pinned {
        latency::pin_all()?;
    }
    let world = World::new(options.nigh.as_deref(), Length::Short)?;
    println!("building trees: {}", plan.sizes);
    let source = world.dir("source", As::Us)?;
    trees::build(&source, &plan.sizes)?;
    let mut rows = Vec::new();
    for work in &plan.workloads {
        rows.extend(measure::local(&world, *work, &source, &plan.sizes)?);
    }
    let null = Null::start(&world, &plan.sizes)?;
    let mut missing = Vec::new();
    for work in &plan.workloads {
        take(&mut rows, &mut missing, *work, measure::null(&world, *work, &null, &plan.sizes));
    }
    let mut latency = vec![latency::of("null daemon", &null.point, null.daemon(), plan.latency_calls)?];
    drop(null);
    for rtt in &plan.rtts {
        let distant =
            Distant::start(&world, &source, options.over, (rtt, &options.bandwidth), &options.host_timeout)?
                .compressed(options.compress);
        for work in &plan.workloads {
            take(&mut rows, &mut missing, *work, measure::distant(&world, *work, &distant, &plan.sizes));
        }
    }
    let near =
        Distant::start(&world, &source, options.over, ("0ms", &options.bandwidth), &options.host_timeout)?
            .compressed(options.compress);
    let mount = near.mount(&world)?;
    latency.push(latency::of("nigh", &mount.point, mount.daemon(), plan.latency_calls)?);
    let memory = if options.long { Some(latency::missing_names(&world, &mount, 10_000_000)?) } else { None };
    drop(mount);
    drop(near);
    table::print(&rows);
    table::print_requests(&rows);
    for line in latency.iter().chain(&memory) {
        println!("{}", table::line(line));
    }
    let figures = figures(options, &plan, &rows, &latency, memory);
    std::fs::write(&options.out, serde_json::to_string_pretty(&figures)?)?;
    println!("figures in {}; {:.0} s", options.out.display(), start.elapsed().as_secs_f64());
    missing.iter().for_each(|line| println!("NOT MEASURED: {line}"));
    Ok(missing.is_empty())
}

/// Stores the figures of a workload, or the reason why there are none; other workloads go on.
fn take(rows: &mut Vec<Row>, missing: &mut Vec<String>, work: Workload, measured: Result<Vec<Row>>) {
    match measured {
        Ok(measured) => rows.extend(measured),
        Err(error) => missing.push(format!("{}: {error:#}", work.name())),
    }
}

fn plan(options: &Options) -> Plan {
    let wanted = |w: &Workload| options.only.is_empty() || options.only.contains(w);
    let workloads = Workload::ALL.iter().copied().filter(wanted).collect();
    if options.short {
        let sizes = trees::Sizes::scaled(options.scale.min(0.01));
        return Plan { sizes, rtts: vec!["10ms".to_owned()], workloads, latency_calls: 10_000 };
    }
    Plan {
        sizes: trees::Sizes::scaled(options.scale),
        rtts: options.rtt.clone(),
        workloads,
        latency_calls: 100_000,
    }
}

fn figures(options: &Options, plan: &Plan, rows: &[Row], latency: &[Value], memory: Option<Value>) -> Value {
    json!({
        "sizes": plan.sizes.json(),
        "bandwidth": options.bandwidth,
        "host_timeout": options.host_timeout,
        "over": options.over.name(),
        "compress": options.compress,
        "pinned": options.pinned,
        "user": if root::is_root() { "root" } else { "user" },
        "rows": rows.iter().map(Row::json).collect::<Vec<_>>(),
        "latency": latency,
        "missing_names": memory,
    })
}
