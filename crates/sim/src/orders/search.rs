//! Depth-first search through all reachable states.

use super::Bounds;
use super::path;
use super::state::{State, Step};
use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

/// One in so many states has its cached hashes checked.
const CHECKED: u64 = 64;

/// Statistics of an exploration.
#[derive(Clone, Copy, Default, Debug)]
pub struct Explored {
    pub states: u64,
    /// Transitions from one state to another.
    pub steps: u64,
    /// States without a next step.
    pub ends: u64,
    /// Length of the longest path.
    pub depth: u64,
}

impl fmt::Display for Explored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Explored { states, steps, ends, depth } = self;
        write!(f, "{states} states, {steps} steps, {ends} ends, depth {depth}")
    }
}

/// A violation, and the path to it.
#[derive(Clone, Debug)]
pub struct Violation {
    pub message: String,
    /// Number of steps of the path.
    pub steps: u64,
    /// The described steps.
    pub path: Vec<String>,
    pub explored: Explored,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)?;
        self.path.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

/// A state on the current path, and the steps not yet tried.
struct StackFrame {
    /// The last step takes the state without a copy.
    state: Option<State>,
    left: Vec<Step>,
}

/// The steps to the current state; printed if an assertion fails there.
#[derive(Default)]
struct CurrentPath(Vec<Step>);

impl Drop for CurrentPath {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("by {:?}", self.0);
        }
    }
}

/// A hasher for keys that are hashes already.
#[derive(Default)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0 << 8 | u64::from(*byte));
    }

    fn write_u128(&mut self, mark: u128) {
        self.0 = (mark >> 64) as u64;
    }
}

pub(super) fn explore(bounds: Bounds) -> Result<Explored, Violation> {
    let mut explored = Explored::default();
    let mut text = String::new();
    let mut seen: HashSet<u128, BuildHasherDefault<IdentityHasher>> = HashSet::default();
    let (mut stops, mut way) = (Vec::<StackFrame>::new(), CurrentPath::default());
    let wrong = |lie: String, way: &[Step], explored: Explored| {
        let (lie, steps, path) = path::shorten(bounds, lie, way.to_vec());
        Violation { message: lie, steps, path, explored }
    };
    let first = State::first(bounds).map_err(|lie| wrong(lie, &[], explored))?;
    let mut next = Some(first);
    loop {
        if let Some(mut state) = next.take()
            && seen.insert(state.fingerprint(&mut text))
        {
            explored.states += 1;
            if explored.states % CHECKED == 0
                && let Some(part) = state.outdated_fingerprint(&mut text)
            {
                panic!("{part} is not what it was");
            }
            let left = state.steps();
            if left.is_empty() {
                explored.ends += 1;
                state.end().map_err(|lie| wrong(lie, &way.0, explored))?;
            }
            stops.push(StackFrame { state: Some(state), left });
        } else {
            way.0.pop();
        }
        explored.depth = explored.depth.max(stops.len() as u64);
        while stops.last().is_some_and(|stop| stop.left.is_empty()) {
            stops.pop();
            way.0.pop();
        }
        let Some(stop) = stops.last_mut() else { break };
        let Some(step) = stop.left.pop() else { break };
        explored.steps += 1;
        way.0.push(step);
        let last = stop.left.is_empty();
        let state = if last { stop.state.take() } else { stop.state.as_ref().map(State::fork) };
        let mut state = state.expect("it is there until its last step");
        state.take(step).map_err(|lie| wrong(lie, &way.0, explored))?;
        next = Some(state);
    }
    Ok(explored)
}
