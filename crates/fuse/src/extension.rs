//! Extensions of a request that creates an inode (`fuse_ext_header`, 7.38).

use crate::abi::{ExtHeader, SecCtx, flags, record_align};
use zerocopy::{FromBytes, IntoBytes};

/// Extensions of a creating request: bytes that [`Extensions::parse`] has checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extensions<'a> {
    bytes: &'a [u8],
}

/// A security label for a new inode. The kernel sends it only if `SECURITY_CTX` was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecurityContext<'a> {
    /// Name of the xattr, e.g. `security.selinux`.
    pub name: &'a [u8],
    pub value: &'a [u8],
}

impl<'a> Extensions<'a> {
    /// Checks that `bytes` is a sequence of whole records; `None` if it is not.
    #[must_use]
    pub fn parse(bytes: &'a [u8]) -> Option<Extensions<'a>> {
        let mut rest = bytes;
        while !rest.is_empty() {
            rest = split(rest)?.2;
        }
        Some(Extensions { bytes })
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    #[must_use]
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The caller's supplementary groups that matter to this request. There is at most one, since the kernel sends
    /// only a group equal to the parent's group (`get_create_supp_group`).
    pub fn groups(&self) -> impl Iterator<Item = u32> + use<'a> {
        records(self.bytes).filter(|(header, _)| header.kind == flags::EXT_GROUPS).flat_map(|(_, body)| {
            let (count, rest) = u32::read_from_prefix(body).unwrap_or((0, &[]));
            rest.chunks_exact(4)
                .take(usize::try_from(count).unwrap_or(usize::MAX))
                .filter_map(|group| u32::read_from_bytes(group).ok())
        })
    }

    /// Labels for the new inode.
    pub fn security_contexts(&self) -> impl Iterator<Item = SecurityContext<'a>> + use<'a> {
        records(self.bytes).filter(|(header, _)| header.kind <= flags::EXT_MAX_NR_SECCTX).flat_map(
            |(header, mut body)| {
                (0..header.kind).map_while(move |_| {
                    let (context, rest) = SecCtx::read_from_prefix(body).ok()?;
                    let end = rest.iter().position(|&b| b == 0)?;
                    let (name, rest) = (&rest[..end], &rest[end + 1..]);
                    let (value, rest) = rest.split_at_checked(usize::try_from(context.size).ok()?)?;
                    body = rest;
                    Some(SecurityContext { name, value })
                })
            },
        )
    }

    /// Encodes `groups` as the kernel does.
    #[must_use]
    pub fn encode_groups(groups: &[u32]) -> Vec<u8> {
        let size = record_align(8 + 4 + 4 * groups.len());
        let header = ExtHeader { size: u32::try_from(size).unwrap_or(u32::MAX), kind: flags::EXT_GROUPS };
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(u32::try_from(groups.len()).unwrap_or(u32::MAX).as_bytes());
        bytes.extend_from_slice(groups.as_bytes());
        bytes.resize(size, 0);
        bytes
    }
}

fn records(bytes: &[u8]) -> impl Iterator<Item = (ExtHeader, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let (header, body, tail) = split(rest)?;
        rest = tail;
        Some((header, body))
    })
}

/// Splits off the first record: its header, its body, the rest. `None` at the end or if the record is incomplete.
fn split(bytes: &[u8]) -> Option<(ExtHeader, &[u8], &[u8])> {
    let (header, _) = ExtHeader::read_from_prefix(bytes).ok()?;
    let size = usize::try_from(header.size).ok().filter(|&size| size >= size_of::<ExtHeader>())?;
    let body = bytes.get(size_of::<ExtHeader>()..size)?;
    // The last record may lack its padding.
    let tail = bytes.get(size.checked_next_multiple_of(8)?..).unwrap_or(&[]);
    Some((header, body, tail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_come_back() {
        for groups in [&[][..], &[100], &[1, 2, 3, u32::MAX]] {
            let bytes = Extensions::encode_groups(groups);
            assert_eq!(bytes.len() % 8, 0);
            let parsed = Extensions::parse(&bytes).unwrap();
            assert_eq!(parsed.groups().collect::<Vec<_>>(), groups);
            assert_eq!(parsed.security_contexts().count(), 0);
        }
    }

    #[test]
    fn a_label_and_groups_are_told_apart() {
        let mut bytes = Vec::new();
        let (name, value) = (b"security.selinux\0", b"system_u:object_r:tmp_t:s0\0");
        let size = record_align(8 + 8 + name.len() + value.len());
        bytes.extend_from_slice(ExtHeader { size: u32::try_from(size).unwrap(), kind: 1 }.as_bytes());
        bytes.extend_from_slice(SecCtx { size: u32::try_from(value.len()).unwrap(), padding: 0 }.as_bytes());
        bytes.extend_from_slice(name);
        bytes.extend_from_slice(value);
        bytes.resize(size, 0);
        bytes.extend_from_slice(&Extensions::encode_groups(&[7]));
        let parsed = Extensions::parse(&bytes).unwrap();
        assert_eq!(parsed.groups().collect::<Vec<_>>(), [7]);
        let labels: Vec<_> = parsed.security_contexts().collect();
        assert_eq!(labels, [SecurityContext { name: b"security.selinux", value }]);
    }

    #[test]
    fn records_that_are_not_whole_are_refused() {
        let bytes = Extensions::encode_groups(&[1, 2, 3]);
        for len in 1..bytes.len() {
            let whole = Extensions::parse(&bytes[..len]).is_some();
            assert!(!whole, "{len}");
        }
        assert!(Extensions::parse(&[0; 8]).is_none(), "a record of no length");
        let lying = [ExtHeader { size: 16, kind: flags::EXT_GROUPS }.as_bytes(), &[255; 8]].concat();
        assert_eq!(Extensions::parse(&lying).unwrap().groups().collect::<Vec<_>>(), [u32::MAX]);
    }
}
