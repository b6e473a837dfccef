//! The measurements, and the checks that do not depend on times.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nigh_types::{Call, CallId, NodeRef};

use super::figures::Times;
use super::stage::{Stage, WRITER, mkdir, name};

/// Measures what an idle client costs the server.
pub fn idle(stage: &mut Stage, clients: usize) -> Result<()> {
    let before = stage.server.usage()?;
    stage.attach(clients)?;
    let after = stage.server.usage()?;
    let threads = after.threads - before.threads;
    let each = (after.bytes.saturating_sub(before.bytes)) / clients as u64;
    println!(
        "{clients} idle clients: {} KiB each ({} MiB before, {} MiB after), {threads} threads more",
        each >> 10,
        before.bytes >> 20,
        after.bytes >> 20
    );
    Ok(())
}

/// Measures what a grant on a directory's names costs the server, over the second half of the directories.
pub fn grants(stage: &mut Stage, directories: &[String]) -> Result<()> {
    let (first, second) = directories.split_at(directories.len() / 2);
    let clients = stage.clients.clone();
    let early = stage.hold(clients.clone(), first)?;
    let before = stage.server.usage()?;
    let begun = Instant::now();
    let late = stage.hold(clients.clone(), second)?;
    let took = begun.elapsed();
    let after = stage.server.usage()?;
    ensure!(early + late == (clients.len() * directories.len()) as u64, "each asks once for each");
    println!(
        "{} directory grants: {} bytes each, {:.0} lookups a second ({} MiB in all)",
        early + late,
        after.bytes.saturating_sub(before.bytes) / late.max(1),
        late as f64 / took.as_secs_f64(),
        after.bytes >> 20
    );
    Ok(())
}

/// Measures what renewals cost, with all clients idle.
pub fn renewals(stage: &mut Stage, time: Duration) -> Result<()> {
    /// A third of the server's term.
    const RENEWAL: Duration = Duration::from_secs(5);
    let count = |stage: &Stage| stage.crowd.clients.iter().map(|member| member.renewals()).sum::<u64>();
    let (renewals, before) = (count(stage), stage.server.usage()?);
    stage.crowd.run_for(time)?;
    let (renewals, after) = (count(stage) - renewals, stage.server.usage()?);
    stage.check_all_stand()?;
    let most = (time.as_secs() / RENEWAL.as_secs() + 1) * stage.crowd.clients.len() as u64;
    ensure!(renewals > 0 && renewals <= most, "{renewals} renewals in {time:?}, at most {most} are right");
    let share = (after.cpu - before.cpu).as_secs_f64() / time.as_secs_f64();
    println!(
        "renewals of {} clients: {:.0} a second, {:.2} % of a processor",
        stage.clients.len(),
        renewals as f64 / time.as_secs_f64(),
        share * 100.0
    );
    Ok(())
}

/// Measures changes of facts under so many leases. The server recalls each lease once, and no other; the reply comes
/// after the last acknowledgement.
pub fn recalls(stage: &mut Stage, directories: &[String], holders: usize, rtt: Duration) -> Result<()> {
    let clients = stage.clients.clone();
    let mut held = Vec::new();
    for (nth, directory) in directories.iter().enumerate() {
        let first = clients.start + nth * 7 % (clients.len() - holders + 1);
        held.push(first..first + holders);
        stage.hold(first..first + holders, std::slice::from_ref(directory))?;
    }
    stage.crowd.set_round_trip(rtt);
    let (mut times, mut cpu) = (Times::default(), stage.server.usage()?.cpu);
    for (directory, range) in directories.iter().zip(held) {
        let before: Vec<u64> = stage.crowd.clients.iter().map(|member| member.recalled).collect();
        let dir = stage.place(directory)?;
        let begun = Instant::now();
        let id = stage.crowd.call(WRITER, mkdir(dir, "new")?)?;
        let answer = stage.crowd.answer(WRITER, id)?;
        ensure!(answer.parts.iter().all(|part| part.result.is_ok()), "{directory} cannot be changed");
        times.note(answer.at - begun);
        for (number, (member, before)) in stage.crowd.clients.iter().zip(before).enumerate() {
            let asked = member.recalled - before;
            let expected = u64::from(range.contains(&number));
            ensure!(asked == expected, "client {number} was asked {asked} times for {directory}");
            let last = member.acknowledged_at.filter(|_| asked == 1);
            let early = last.is_some_and(|at| answer.at < at + rtt);
            ensure!(!early, "{directory} was changed before client {number} gave it back");
        }
    }
    cpu = stage.server.usage()?.cpu - cpu;
    stage.crowd.set_round_trip(Duration::ZERO);
    println!(
        "changes that {holders} hold, {} ms a round trip: {times}; {:.2} ms of the server's processor each",
        rtt.as_millis(),
        cpu.as_secs_f64() * 1e3 / directories.len() as f64
    );
    println!(
        "  beyond two round trips: {:.1} ms at p99",
        times.permille(990).saturating_sub(rtt * 2).as_secs_f64() * 1e3
    );
    Ok(())
}

/// One client acknowledges nothing, and other clients go on. `own`: a directory for each of them.
pub fn silent(stage: &mut Stage, own: &[String], (one, two): (&str, &str), rtt: Duration) -> Result<()> {
    /// The server's patience and 1.1 of its term, with a margin for a busy machine.
    const FENCED: Duration = Duration::from_millis(2_000 + 16_500 + 1_500);
    let silent = stage.clients.end - 1;
    stage.hold(silent..silent + 1, &[one.to_owned(), two.to_owned()])?;
    stage.crowd.clients[silent].acknowledges = false;
    stage.crowd.set_round_trip(rtt);
    let mut good = BackgroundLoad::new(stage, own)?;
    let alone = good.work(stage, |_, since| since > Duration::from_secs(3))?;
    println!("{} clients at work, {} ms a round trip: {alone}", own.len(), rtt.as_millis());

    let begun = Instant::now();
    let (first, second) = (stage.place(one)?, stage.place(two)?);
    let waiting = [
        (WRITER, stage.crowd.call(WRITER, mkdir(first, "new")?)?),
        (stage.clients.start, stage.crowd.call(stage.clients.start, mkdir(second, "new")?)?),
    ];
    let beside = good.work(stage, |stage, since| {
        let answered = |(number, id): &(usize, CallId)| stage.crowd.clients[*number].answers.contains_key(id);
        waiting.iter().all(answered) || since > FENCED
    })?;
    for (number, id) in waiting {
        let answered = stage.crowd.clients[number].answers.remove(&id);
        let answer = answered.filter(|answer| answer.parts.iter().all(|part| part.result.is_ok()));
        let took = answer.map(|answer| answer.at - begun);
        ensure!(took.is_some(), "a change waits for a silent client for more than {FENCED:?}");
        println!("  a change that the silent one holds took {:.1} s", took.unwrap_or_default().as_secs_f64());
    }
    println!("  the same beside one that gives nothing back: {beside}");
    stage.crowd.set_round_trip(Duration::ZERO);
    let longest = beside.permille(1000);
    ensure!(longest < Duration::from_secs(2), "others waited {longest:?} for a silent client");
    let others = stage.crowd.clients.iter().enumerate().filter(|(number, _)| *number != silent);
    ensure!(others.into_iter().all(|(_, member)| member.lost.is_none()), "others lost their sessions too");
    stage.crowd.until("the silent client is fenced", |crowd| crowd.clients[silent].closed)
}

/// Clients at work: each looks up names and makes directories, one call at a time.
struct BackgroundLoad {
    places: Vec<NodeRef>,
    first: usize,
    calls: u64,
}

impl BackgroundLoad {
    fn new(stage: &Stage, own: &[String]) -> Result<BackgroundLoad> {
        let places = own.iter().map(|directory| stage.place(directory)).collect::<Result<_>>()?;
        // The first client's call waits for the silent client too.
        Ok(BackgroundLoad { places, first: stage.clients.start + 1, calls: 0 })
    }

    /// Works until `enough`; returns the durations of the calls.
    fn work(&mut self, stage: &mut Stage, mut enough: impl FnMut(&Stage, Duration) -> bool) -> Result<Times> {
        const PAUSE: Duration = Duration::from_millis(100);
        let (begun, mut times) = (Instant::now(), Times::default());
        let mut out: Vec<(Instant, Option<CallId>)> = vec![(begun, None); self.places.len()];
        loop {
            let stops = enough(stage, begun.elapsed());
            for (nth, (since, call)) in out.iter_mut().enumerate() {
                let number = self.first + nth;
                if let Some(answer) = call.and_then(|id| stage.crowd.clients[number].answers.remove(&id)) {
                    ensure!(answer.parts.iter().all(|part| part.result.is_ok()), "a call of client {number}");
                    times.note(answer.at - *since);
                    (*since, *call) = (answer.at, None);
                }
                if call.is_none() && !stops && since.elapsed() >= PAUSE {
                    self.calls += 1;
                    *since = Instant::now();
                    *call = Some(stage.crowd.call(number, self.next(nth)?)?);
                }
            }
            if stops && out.iter().all(|(_, call)| call.is_none()) {
                return Ok(times);
            }
            stage.crowd.step(Instant::now() + Duration::from_millis(2))?;
        }
    }

    fn next(&self, nth: usize) -> Result<Call> {
        let (dir, text) = (self.places[nth].clone(), format!("n{}", self.calls));
        if self.calls.is_multiple_of(4) {
            mkdir(dir, &text)
        } else {
            Ok(Call::Lookup { dir, name: name(&text)? })
        }
    }
}
