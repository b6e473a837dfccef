//! Which client has to release something when a resource is scarce: of the origin that uses most, the client that uses
//! most.

use nigh_types::Origin;
use std::collections::BTreeMap;

/// A client within an origin.
pub(crate) type Client = (Origin, u64);

/// Returns the client that has to release something. `shares` holds client, amount and number; of equal amounts the
/// highest number is chosen.
pub(crate) fn largest_user(shares: impl Iterator<Item = (Client, u64, u64)>) -> Option<Client> {
    let mut origins = BTreeMap::<Origin, (u64, u64, BTreeMap<u64, (u64, u64)>)>::new();
    for ((origin, client), much, number) in shares {
        let of_origin = origins.entry(origin).or_default();
        let of_client = of_origin.2.entry(client).or_default();
        *of_client = (of_client.0 + much, of_client.1.max(number));
        (of_origin.0, of_origin.1) = (of_origin.0 + much, of_origin.1.max(number));
    }
    let (origin, (.., clients)) =
        origins.into_iter().max_by_key(|(_, (much, latest, _))| (*much, *latest))?;
    let (client, _) = clients.into_iter().max_by_key(|(_, share)| *share)?;
    Some((origin, client))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nigh_link::{Claims, Peer, Squash};
    use nigh_types::Credentials;

    fn client(host: &str, number: u64) -> Client {
        let claims = Claims::Only(Credentials { uid: 5, gid: 5, groups: vec![], privileges: None });
        (Peer::new("tcp", claims, Squash::Root).from_host(host.parse().unwrap()).origin(), number)
    }

    #[test]
    fn origin_with_many_invented_clients_is_chosen_to_release_resources() {
        let good = (0..20_u64).map(|nth| (client("10.0.0.1", 1), 50, nth));
        let made_up = (100..1_200_u64).map(|nth| (client("10.0.0.2", nth), 1, nth));
        let all: Vec<_> = good.chain(made_up).collect();
        assert_eq!(
            largest_user(all.iter().cloned()),
            Some(client("10.0.0.2", 1_199)),
            "of equals the latest"
        );
        let larger = all.iter().cloned().chain([(client("10.0.0.2", 300), 1, 5)]);
        assert_eq!(largest_user(larger), Some(client("10.0.0.2", 300)), "the client that has most");
        assert_eq!(largest_user(all.into_iter().take(20)), Some(client("10.0.0.1", 1)));
        assert_eq!(largest_user(std::iter::empty()), None);
    }
}
