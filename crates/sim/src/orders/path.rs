//! The path to a violation, shortened and described.

use super::Bounds;
use super::state::{State, Step};

/// Removes unneeded steps from a path to a violation. Returns the violation at its end, the number of its steps, and
/// their description.
pub(super) fn shorten(bounds: Bounds, lie: String, mut way: Vec<Step>) -> (String, u64, Vec<String>) {
    let Some((mut lie, _)) = go(bounds, &way) else {
        return (lie, way.len() as u64, vec![format!("(and not when it is gone again) {way:?}")]);
    };
    while let Some((still, shorter)) = shorter(bounds, &way) {
        (lie, way) = (still, shorter);
    }
    (lie, way.len() as u64, tell(bounds, &way))
}

/// Returns the path without one step or two, if it still ends in a violation.
fn shorter(bounds: Bounds, way: &[Step]) -> Option<(String, Vec<Step>)> {
    let one = (0..way.len()).rev().map(|at| (at, at));
    let two = (0..way.len()).flat_map(|first| (first + 1..way.len()).map(move |second| (first, second)));
    one.chain(two).find_map(|(first, second)| {
        let kept = way.iter().enumerate().filter(|(at, _)| *at != first && *at != second);
        let mut kept: Vec<Step> = kept.map(|(_, step)| *step).collect();
        let (lie, gone) = go(bounds, &kept)?;
        kept.truncate(gone);
        Some((lie, kept))
    })
}

/// Returns the violation on a path, and the number of steps up to it; `None` if a step is impossible, or without
/// violation.
fn go(bounds: Bounds, way: &[Step]) -> Option<(String, usize)> {
    let mut state = State::first(bounds).ok()?;
    for (gone, step) in way.iter().enumerate() {
        if !state.steps().contains(step) {
            return None;
        }
        if let Err(lie) = state.take(*step) {
            return Some((lie, gone + 1));
        }
    }
    let lie = if state.steps().is_empty() { state.end().err() } else { None };
    lie.map(|lie| (lie, way.len()))
}

fn tell(bounds: Bounds, way: &[Step]) -> Vec<String> {
    let Ok(mut state) = State::first(bounds) else { return Vec::new() };
    state.history.world.trace.clear();
    let mut words = Vec::new();
    for step in way {
        words.push(format!("> {step:?}"));
        let taken = state.take(*step);
        words.extend(state.history.world.trace.drain(..).map(|line| format!("  {line}")));
        if taken.is_err() {
            break;
        }
    }
    words
}
