//! Credentials by number.

use nigh_cache::CredentialsId;
use nigh_types::Credentials;
use std::collections::HashMap;

/// Most different credentials, and most groups of each. Of callers with others, nothing is read ahead.
const MOST: usize = 4_096;
const MOST_GROUPS: usize = 256;

/// Credentials that were seen, and their numbers. A number always stands for the same credentials.
#[derive(Debug, Default)]
pub(super) struct CredentialsTable {
    numbers: HashMap<Credentials, CredentialsId>,
    all: Vec<Credentials>,
}

impl CredentialsTable {
    /// Returns the number of credentials; `None`: there are too many others, or they have too many groups.
    pub fn number_of(&mut self, credentials: Credentials) -> Option<CredentialsId> {
        if credentials.groups.len() > MOST_GROUPS {
            return None;
        }
        if let Some(known) = self.numbers.get(&credentials) {
            return Some(*known);
        }
        let number = CredentialsId(u32::try_from(self.all.len()).ok().filter(|_| self.all.len() < MOST)?);
        self.all.push(credentials.clone());
        self.numbers.insert(credentials, number);
        Some(number)
    }

    pub fn credentials(&self, number: CredentialsId) -> Option<&Credentials> {
        self.all.get(usize::try_from(number.0).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_stands_for_equal_credentials_and_there_are_not_too_many() {
        let mut table = CredentialsTable::default();
        let of = |uid, group| Credentials { uid, gid: 5, groups: vec![group], privileges: None };
        let first = table.number_of(of(1, 7)).unwrap();
        assert_eq!(table.number_of(of(1, 7)), Some(first));
        assert_ne!(table.number_of(of(1, 8)), Some(first), "other groups");
        assert_eq!(table.credentials(first), Some(&of(1, 7)));
        let numbered = (0..10_000).filter(|uid| table.number_of(of(*uid, 9)).is_some()).count();
        assert_eq!(numbered, MOST - 2);
        assert_eq!(table.number_of(of(1, 7)), Some(first));
    }
}
