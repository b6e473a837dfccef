//! Changes told in two steps, so that a grant outlives them: what is to change is held back, then what it has
//! become is committed. See docs/decisions/0014-pushes.md.

use crate::{Attr, Covers, Entry, Name, NodeId, RecallId};

/// Facts that are about to change: nobody is served them from memory until their commit. Answered with an
/// acknowledgement of its number, when the kernel has none of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hold {
    /// Of the same numbers as recalls.
    pub id: RecallId,
    /// At least one.
    pub facts: Vec<Held>,
}

/// Facts of one object under one grant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Held {
    pub node: NodeId,
    /// Not [`Covers::Data`]: pages cannot be told what they have become.
    pub covers: Covers,
    /// With [`Covers::Names`]: these, at least one. Otherwise none.
    pub names: Vec<Name>,
}

/// The end of a hold: these facts are so from now on. What was held, is not named here and is held by no other
/// hold is not known any more. The grants go on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Commit {
    /// The hold's.
    pub id: RecallId,
    pub facts: Vec<Fact>,
}

/// What has become of a held fact.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fact {
    /// The name leads there; `None`: nowhere.
    Name {
        dir: NodeId,
        name: Name,
        entry: Option<Entry>,
    },
    Attr {
        node: NodeId,
        attr: Attr,
    },
}
