//! What may break a rule for now. The list only shrinks: an entry that excuses nothing is a problem
//! itself.

use super::Problem;

/// Rule and path.
const EXCEPTIONS: &[(&str, &str)] = &[];

pub fn apply(found: Vec<Problem>) -> Vec<Problem> {
    apply_list(found, EXCEPTIONS)
}

fn apply_list(found: Vec<Problem>, exceptions: &[(&str, &str)]) -> Vec<Problem> {
    let excused = |p: &Problem| exceptions.iter().any(|(rule, path)| p.rule == *rule && p.path == *path);
    let stale =
        exceptions.iter().filter(|(rule, path)| !found.iter().any(|p| p.rule == *rule && p.path == *path));
    let stale: Vec<_> = stale
        .map(|(rule, path)| {
            Problem::new("exceptions", path, 1, format!("no exception from {rule} is needed"))
        })
        .collect();
    found.into_iter().filter(|p| !excused(p)).chain(stale).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exception_excuses_and_goes_stale() {
        let found = vec![Problem::new("length", "a.rs", 1, "")];
        assert!(apply_list(found.clone(), &[("length", "a.rs")]).is_empty());
        assert_eq!(apply_list(found.clone(), &[]).len(), 1);
        assert_eq!(apply_list(Vec::new(), &[("length", "a.rs")])[0].rule, "exceptions");
    }
}
