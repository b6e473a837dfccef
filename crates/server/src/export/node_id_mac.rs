//! MAC of node ids: only the server can make a valid generation. See docs/decisions/0001-node-ids.md.

use nigh_types::NodeId;
use siphasher::sip::SipHasher24;
use std::hash::Hasher;

/// An export's secret key for SipHash-2-4.
pub(crate) struct NodeIdMac([u8; 16]);

impl NodeIdMac {
    pub(crate) fn new(secret: [u8; 16]) -> NodeIdMac {
        NodeIdMac(secret)
    }

    /// Makes a node id. `birth_ns` is 0 if the filesystem has no birth times that identify an inode.
    pub(crate) fn id(&self, ino: u64, birth_ns: u64) -> NodeId {
        let birth = match birth_ns {
            0 => 0,
            at => self.hash(ino, &at.to_le_bytes()).max(1),
        };
        NodeId { ino, generation: u64::from(birth) << 32 | u64::from(self.mac(ino, birth)) }
    }

    /// Whether the id was made with this secret.
    pub(crate) fn genuine(&self, node: NodeId) -> bool {
        let [a, b, c, d, e, f, g, h] = node.generation.to_le_bytes();
        u32::from_le_bytes([a, b, c, d]) == self.mac(node.ino, u32::from_le_bytes([e, f, g, h]))
    }

    /// Never 0, so that no generation is 0.
    fn mac(&self, ino: u64, birth: u32) -> u32 {
        self.hash(ino, &birth.to_le_bytes()).max(1)
    }

    /// The two uses differ in input length, which SipHash includes.
    fn hash(&self, ino: u64, more: &[u8]) -> u32 {
        let mut hasher = SipHasher24::new_with_key(&self.0);
        hasher.write(&ino.to_le_bytes());
        hasher.write(more);
        let [a, b, c, d, ..] = hasher.finish().to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }
}

/// Hides the secret from logs.
impl std::fmt::Debug for NodeIdMac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seal")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reused_inode_number_gets_new_generation_if_birth_times_exist() {
        let seal = NodeIdMac::new([9; 16]);
        let (first, second) = (seal.id(77, 1_000), seal.id(77, 1_001));
        assert_ne!(first.generation >> 32, second.generation >> 32);
        assert_ne!(
            first.generation >> 32,
            seal.id(78, 1_000).generation >> 32,
            "no client learns a birth time"
        );
        let without = seal.id(77, 0);
        assert!(!without.distinguishes_reuse() && seal.genuine(without) && without.generation != 0);
        assert!(!seal.genuine(NodeId { generation: first.generation & 0xffff_ffff, ..first }));
    }
}
