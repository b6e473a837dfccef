//! All names of a window as one object, since renames and links connect them, and a link count depends on all of them.

use super::search::{Object, SATISFIED};
use super::{Kind, RenameMode, Slot};

/// The inode of each name: its number in [`Names::kinds`] plus 1, or 0 for no entry.
pub type State = [u16; Slot::COUNT as usize];

/// Marks what a rename has seen at its target name.
const AT_NEW: u16 = 0x8000;

/// The inode types of a window; fewer than [`Names::MOST`].
pub struct Names {
    pub kinds: Vec<Kind>,
}

/// A result about one name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Expected {
    Absent,
    Present,
    /// One of these inodes.
    OneOf(Vec<u16>),
    Dir,
    NotDir,
    NotSymlink,
    Symlink,
}

/// Changes and reads; inodes are numbers in [`Names::kinds`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Act {
    Make {
        slot: Slot,
        inode: u16,
    },
    Link {
        old: Slot,
        new: Slot,
    },
    Unlink {
        slot: Slot,
    },
    Rmdir {
        slot: Slot,
    },
    Rename {
        old: Slot,
        new: Slot,
        how: RenameMode,
    },
    Is {
        slot: Slot,
        what: Expected,
    },
    /// At least one of the two names satisfies `what`.
    Any {
        slots: [Slot; 2],
        what: Expected,
    },
    /// The name no longer leads to the inode, and the inode has no other name. If the kernel may have counted one name
    /// too few, the inode has at most one name.
    Gone {
        old: Slot,
        undercounted: bool,
    },
    Links {
        inode: u16,
        count: u64,
    },
}

fn at(state: &State, slot: Slot) -> u16 {
    state[usize::from(slot.0)]
}

fn put(state: &State, slot: Slot, what: u16) -> State {
    let mut state = *state;
    state[usize::from(slot.0)] = what;
    state
}

impl Names {
    /// Limit of inodes; greater numbers have other meanings in `seen`.
    pub const MOST: usize = 0x7ff0;

    fn kind(&self, what: u16) -> Option<Kind> {
        self.kinds.get(usize::from(what.checked_sub(1)?)).copied()
    }

    fn is_dir(&self, what: u16) -> bool {
        self.kind(what) == Some(Kind::Dir)
    }

    fn links(&self, state: &State, inode: u16) -> u64 {
        let names = state.iter().filter(|what| **what == inode + 1).count() as u64;
        // An existing directory's `.` counts as a link.
        if self.is_dir(inode + 1) { names * 2 } else { names }
    }

    fn fits(&self, what: u16, expected: &Expected) -> bool {
        match expected {
            Expected::Absent => what == 0,
            Expected::Present => what != 0,
            Expected::OneOf(inodes) => inodes.iter().any(|inode| *inode + 1 == what),
            Expected::Dir => self.is_dir(what),
            Expected::NotDir => what != 0 && !self.is_dir(what),
            Expected::Symlink => self.kind(what) == Some(Kind::Symlink),
            Expected::NotSymlink => what != 0 && self.kind(what) != Some(Kind::Symlink),
        }
    }

    fn renamed(&self, state: &State, old: Slot, new: Slot, how: RenameMode) -> Option<State> {
        let (moved, there) = (at(state, old), at(state, new));
        let alike = there == 0 || self.is_dir(moved) == self.is_dir(there);
        match how {
            _ if moved == 0 => None,
            RenameMode::NoReplace if there != 0 => None,
            RenameMode::Exchange if there == 0 => None,
            RenameMode::Exchange => Some(put(&put(state, old, there), new, moved)),
            _ if !alike => None,
            // Both names lead to one file: rename does nothing.
            _ if moved == there => Some(*state),
            _ => Some(put(&put(state, old, 0), new, moved)),
        }
    }
}

impl Object for Names {
    type State = State;
    type Act = Act;

    fn is_read(&self, act: &Act) -> bool {
        matches!(act, Act::Is { .. } | Act::Any { .. } | Act::Gone { .. } | Act::Links { .. })
    }

    fn observe(&self, state: &State, act: &Act, seen: &mut Vec<u16>) {
        let mut add = |what: u16| {
            if let Err(place) = seen.binary_search(&what) {
                seen.insert(place, what);
            }
        };
        match act {
            Act::Is { slot, what } if self.fits(at(state, *slot), what) => add(SATISFIED),
            Act::Any { slots, what } if slots.iter().any(|slot| self.fits(at(state, *slot), what)) => {
                add(SATISFIED)
            }
            Act::Links { inode, count } if self.links(state, *inode) == *count => add(SATISFIED),
            // The kernel resolves the source before it links; the source may have moved by then.
            Act::Link { old, .. } if at(state, *old) != 0 => add(at(state, *old)),
            // A kernel looks up the two names in turn, and does nothing if both lead to one inode.
            Act::Rename { old, new, .. } => {
                for (what, mark) in [(at(state, *old), 0), (at(state, *new), AT_NEW)] {
                    if what != 0 {
                        add(what | mark);
                    }
                }
            }
            Act::Gone { old, undercounted } => match at(state, *old) {
                0 => add(SATISFIED),
                what if *undercounted && self.links(state, what - 1) == 1 => add(SATISFIED),
                what => add(what),
            },
            _ => {}
        }
        if matches!(act, Act::Gone { .. })
            && seen.iter().any(|what| *what != SATISFIED && !state.contains(what))
            && !seen.contains(&SATISFIED)
        {
            seen.push(SATISFIED);
        }
    }

    fn apply(&self, state: &State, act: &Act, seen: &[u16]) -> Vec<State> {
        match *act {
            Act::Make { slot, inode } if at(state, slot) == 0 => vec![put(state, slot, inode + 1)],
            Act::Link { new, .. } if at(state, new) == 0 => {
                let linked = seen.iter().filter(|what| state.contains(what) && !self.is_dir(**what));
                linked.map(|what| put(state, new, *what)).collect()
            }
            Act::Unlink { slot } if at(state, slot) != 0 && !self.is_dir(at(state, slot)) => {
                vec![put(state, slot, 0)]
            }
            Act::Rmdir { slot } if self.is_dir(at(state, slot)) => vec![put(state, slot, 0)],
            Act::Rename { old, new, how } => {
                let mut states: Vec<State> = self.renamed(state, old, new, how).into_iter().collect();
                let one = seen.iter().any(|what| seen.contains(&(what | AT_NEW)) && what & AT_NEW == 0);
                if one && how != RenameMode::NoReplace && !states.contains(state) {
                    states.push(*state);
                }
                states
            }
            _ => Vec::new(),
        }
    }
}
