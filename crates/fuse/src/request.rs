//! Requests: bytes from the kernel to typed operations.

mod body;
mod operation;

pub use operation::{CopyRange, Forgets, LockRequest, Operation, SetAttr, SetTime, Time};

use crate::{Negotiated, abi, opcode};
use body::Body;
use zerocopy::FromBytes;

/// Header of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// As the kernel sent it, including the resend bit: a reply must carry exactly this number (`request_find`). To
    /// match INTERRUPT or an earlier delivery use [`Header::id`].
    pub unique: u64,
    pub nodeid: u64,
    /// The caller's filesystem uid; `u32::MAX` if the kernel cannot express it.
    pub uid: u32,
    /// The caller's filesystem gid.
    pub gid: u32,
    /// The caller's thread in the pid namespace of the mount; 0 if it has none there, and for the kernel's own
    /// requests.
    pub pid: u32,
    /// Whether the kernel had delivered it before: then it may have been executed.
    pub resent: bool,
}

impl Header {
    /// The request's number without the resend bit, equal at each delivery.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.unique & !abi::UNIQUE_RESEND
    }
}

/// Failure to decode a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("FUSE request {} ({unique}): {fault}", opcode::opcode_name(*opcode))]
pub struct DecodeError {
    /// For a reply with an error, if [`opcode::expects_reply`]; 0 if the header itself is incomplete.
    pub unique: u64,
    pub opcode: u32,
    pub fault: Fault,
}

/// What is wrong with the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("shorter than its header")]
    NoHeader,
    #[error("the header says {said} bytes, {received} were received")]
    Length { said: u32, received: usize },
    #[error("its arguments are cut short")]
    Short,
    #[error("a name is not terminated")]
    Unterminated,
    #[error("its extensions are malformed")]
    Extension,
}

/// Decodes one whole request, as one read of the device returns it. Checks names for their terminator and nothing else.
/// Requests newer than the negotiated minor version, and those that no such filesystem serves (BMAP, DAX mappings), are
/// [`Operation::Unknown`]: reply with ENOSYS.
///
/// Arguments may be longer than known here (structures grow at their end); the excess is ignored.
pub fn decode<'a>(bytes: &'a [u8], agreed: &Negotiated) -> Result<(Header, Operation<'a>), DecodeError> {
    let (raw, rest) = abi::InHeader::read_from_prefix(bytes).map_err(|_| DecodeError {
        unique: 0,
        opcode: 0,
        fault: Fault::NoHeader,
    })?;
    let fail = |fault| DecodeError { unique: raw.unique, opcode: raw.opcode, fault };
    if u32::try_from(bytes.len()) != Ok(raw.len) {
        return Err(fail(Fault::Length { said: raw.len, received: bytes.len() }));
    }
    let extensions = if agreed.minor >= 38 { usize::from(raw.total_extlen) * 8 } else { 0 };
    let split = rest.len().checked_sub(extensions).ok_or(fail(Fault::Extension))?;
    let (arguments, extensions) = rest.split_at(split);
    let body = Body { rest: arguments, extensions, agreed };
    let operation = body.operation(raw.opcode).map_err(fail)?;
    let header = Header {
        unique: raw.unique,
        nodeid: raw.nodeid,
        uid: raw.uid,
        gid: raw.gid,
        pid: raw.pid,
        resent: raw.unique & abi::UNIQUE_RESEND != 0,
    };
    Ok((header, operation))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode::{encode, golden};
    use crate::{Extensions, RequestedFeatures};
    use proptest::prelude::*;

    fn agreed(minor: u32, flags: u64) -> Negotiated {
        Negotiated { minor, flags, ..Negotiated::default() }
    }

    const HEADER: Header = Header { unique: 42, nodeid: 7, uid: 1000, gid: 100, pid: 4321, resent: false };

    #[test]
    fn every_operation_comes_back_as_it_was_sent() {
        let groups = Extensions::encode_groups(&[33]);
        for minor in [31, 33, 36, 38, 45] {
            let agreed = Negotiated {
                minor,
                flags: RequestedFeatures::default().flags_for(minor),
                ..Negotiated::default()
            };
            for operation in golden(&groups) {
                let bytes = encode(&HEADER, &operation, &agreed);
                let (header, decoded) = decode(&bytes, &agreed).unwrap();
                assert_eq!(header, HEADER);
                if opcode::since(operation.opcode()).is_none_or(|since| since > minor) {
                    assert_eq!(decoded, Operation::Unknown { opcode: operation.opcode() });
                } else if minor == 45 {
                    assert_eq!(decoded, operation);
                } else {
                    assert_eq!(encode(&header, &decoded, &agreed), bytes, "{operation:?}");
                }
            }
        }
    }

    #[test]
    fn golden_operations_cover_every_request_served() {
        let groups = Extensions::encode_groups(&[33]);
        let have: Vec<u32> = golden(&groups).iter().map(Operation::opcode).collect();
        for &(number, name, _) in opcode::ALL {
            let unserved = [opcode::BMAP, opcode::SETUPMAPPING, opcode::REMOVEMAPPING].contains(&number);
            assert!(unserved || have.contains(&number), "{name}");
        }
    }

    #[test]
    fn a_cut_request_is_an_error_or_lacks_only_what_may_lack() {
        let groups = Extensions::encode_groups(&[33]);
        let agreed = agreed(45, u64::MAX);
        for operation in golden(&groups) {
            let whole = encode(&HEADER, &operation, &agreed);
            for len in 0..whole.len() {
                let error = decode(&whole[..len], &agreed).unwrap_err();
                assert!(matches!(error.fault, Fault::NoHeader | Fault::Length { .. }), "{error}");
                let mut cut = whole[..len].to_vec();
                if len >= 40 {
                    cut[..4].copy_from_slice(&u32::try_from(len).unwrap().to_ne_bytes());
                    if let Ok((_, shorter)) = decode(&cut, &agreed) {
                        assert_ne!(shorter, operation, "{len} of {} bytes", whole.len());
                    }
                }
            }
        }
    }

    #[test]
    fn setxattr_has_the_size_that_was_agreed() {
        let operation =
            Operation::SetXattr { name: b"user.x", value: b"value", flags: 1, acl_kill_sgid: false };
        let (short, long) = (agreed(32, 0), agreed(33, abi::flags::init::SETXATTR_EXT));
        let (a, b) = (encode(&HEADER, &operation, &short), encode(&HEADER, &operation, &long));
        assert_eq!(b.len() - a.len(), 8);
        assert_eq!(decode(&a, &short).unwrap().1, operation);
        assert_eq!(decode(&b, &long).unwrap().1, operation);
        assert_ne!(decode(&a, &long).ok().map(|d| d.1), Some(operation));
    }

    #[test]
    fn a_resent_request_keeps_its_number_and_says_so() {
        let header = Header { unique: abi::UNIQUE_RESEND | 9, resent: true, ..HEADER };
        let agreed = agreed(45, 0);
        let bytes = encode(&header, &Operation::ReadLink, &agreed);
        let decoded = decode(&bytes, &agreed).unwrap().0;
        assert_eq!((decoded.unique, decoded.id(), decoded.resent), (abi::UNIQUE_RESEND | 9, 9, true));
        let bytes = encode(&HEADER, &Operation::Interrupt { id: abi::UNIQUE_RESEND | 9 }, &agreed);
        assert_eq!(decode(&bytes, &agreed).unwrap().1, Operation::Interrupt { id: 9 });
    }

    #[test]
    fn a_batch_cannot_count_more_than_it_brings() {
        let agreed = agreed(45, 0);
        let one = abi::ForgetOne { nodeid: 5, nlookup: 2 };
        let forgets = Forgets::of(zerocopy::IntoBytes::as_bytes(&one));
        let mut bytes = encode(&HEADER, &Operation::BatchForget(forgets), &agreed);
        bytes[40..44].copy_from_slice(&2u32.to_ne_bytes());
        assert_eq!(decode(&bytes, &agreed).unwrap_err().fault, Fault::Short);
        bytes[40..44].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(decode(&bytes, &agreed).unwrap_err().fault, Fault::Short);
    }

    #[test]
    fn extensions_longer_than_the_request_are_an_error() {
        let agreed = agreed(45, u64::MAX);
        let mut bytes = encode(&HEADER, &Operation::Lookup { name: b"x" }, &agreed);
        bytes[36..38].copy_from_slice(&u16::MAX.to_ne_bytes());
        assert_eq!(decode(&bytes, &agreed).unwrap_err().fault, Fault::Extension);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(
            opcode in 0u32..60, minor in 31u32..46, flags: u64, extlen in 0u16..6,
            tail in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut bytes = vec![0; 40];
            bytes[..4].copy_from_slice(&u32::try_from(40 + tail.len()).unwrap().to_ne_bytes());
            bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
            bytes[36..38].copy_from_slice(&extlen.to_ne_bytes());
            bytes.extend_from_slice(&tail);
            let agreed = agreed(minor, flags);
            if let Ok((header, operation)) = decode(&bytes, &agreed) {
                operation.extensions().groups().for_each(drop);
                operation.extensions().security_contexts().for_each(drop);
                let again = encode(&header, &operation, &agreed);
                prop_assert_eq!(decode(&again, &agreed).unwrap(), (header, operation));
            }
        }
    }
}
