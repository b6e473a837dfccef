//! Statistics of histories.

/// Counts of events in histories; none may stay at 0.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counts {
    pub recalls: u64,
    pub holds: u64,
    pub suspects: u64,
    pub fences: u64,
    pub resumed: u64,
    pub forgotten: u64,
    pub restarts: u64,
    /// Changes that waited for other clients.
    pub parked: u64,
    /// Calls that waited for the end of a grace period.
    pub graced: u64,
    /// Replies that were remembered beyond their session.
    pub again: u64,
    /// Connections cut.
    pub cuts: u64,
    pub pauses: u64,
    /// Pages written back that were merged with other clients' write-backs.
    pub merged: u64,
    /// Requests answered from the cache.
    pub from_memory: u64,
    /// Bytes of small files that were stored in a page cache when they were opened.
    pub stored: u64,
}

impl Counts {
    fn all(&self) -> [(&'static str, u64); 15] {
        [
            ("recalls", self.recalls),
            ("holds", self.holds),
            ("suspects", self.suspects),
            ("fences", self.fences),
            ("resumed", self.resumed),
            ("forgotten", self.forgotten),
            ("restarts", self.restarts),
            ("parked", self.parked),
            ("graced", self.graced),
            ("again", self.again),
            ("cuts", self.cuts),
            ("pauses", self.pauses),
            ("merged", self.merged),
            ("from_memory", self.from_memory),
            ("stored", self.stored),
        ]
    }

    /// Returns the events that never happened.
    #[must_use]
    pub fn missing(&self) -> Vec<&'static str> {
        self.all().into_iter().filter(|(_, count)| *count == 0).map(|(what, _)| what).collect()
    }

    /// Adds the counts of another history.
    pub fn add(&mut self, other: &Counts) {
        let Counts { recalls, holds, suspects, fences, resumed, forgotten, restarts, .. } = other;
        self.recalls += recalls;
        self.holds += holds;
        self.suspects += suspects;
        self.fences += fences;
        self.resumed += resumed;
        self.forgotten += forgotten;
        self.restarts += restarts;
        let Counts { parked, graced, again, cuts, pauses, merged, from_memory, stored, .. } = other;
        self.parked += parked;
        self.graced += graced;
        self.again += again;
        self.cuts += cuts;
        self.pauses += pauses;
        self.merged += merged;
        self.from_memory += from_memory;
        self.stored += stored;
    }
}
