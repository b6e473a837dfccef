//! Negotiation of version and features with the kernel.

use crate::abi::{self, InitIn, InitOut, flags::init};
use crate::{Level, Operation, Reply, Transport, decode};
use std::io;

/// Features to request from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedFeatures {
    /// Mask of [`init`] flags. Flags that the kernel lacks, or that are newer than the negotiated minor version, are
    /// left out.
    pub flags: u64,
    /// 31 to 45: the newest minor version to accept.
    pub max_minor: u32,
    /// Bytes of the largest WRITE; a multiple of 4096.
    pub max_write: u32,
    /// Bytes; the kernel's own limit (`read_ahead_kb` of the mount) applies as well.
    pub max_readahead: u32,
    /// Most pending background requests (readahead, direct I/O, RELEASE).
    pub max_background: u16,
}

/// Negotiated version and features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    pub minor: u32,
    /// Mask of [`init`] flags.
    pub flags: u64,
    /// Bytes of the largest WRITE.
    pub max_write: u32,
    /// Pages of 4096 bytes of the largest READ.
    pub max_pages: u16,
    /// Bytes.
    pub max_readahead: u32,
}

/// Why the negotiation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InitError {
    #[error("the kernel speaks FUSE {0}.x, nigh speaks 7.x")]
    Major(u32),
    #[error("the kernel speaks FUSE 7.{0}, nigh needs 7.{oldest} (Linux 5.4) or newer", oldest = abi::OLDEST_MINOR)]
    TooOld(u32),
}

const PAGE: u32 = 4096;
/// The kernel's limit without MAX_PAGES.
const DEFAULT_PAGES: u16 = 32;
/// The largest xattr value of Linux.
const XATTR_SIZE_MAX: u32 = 65_536;

impl Default for RequestedFeatures {
    /// All features that nigh uses. Not `READDIRPLUS_AUTO`: nigh decides by itself
    /// (docs/decisions/0022-who-is-given-attributes.md). Not `ATOMIC_O_TRUNC`: with it the kernel sends OPEN with
    /// `O_TRUNC` before it finds that the file is a running program (`handle_truncate`), which would then be empty.
    fn default() -> RequestedFeatures {
        RequestedFeatures {
            flags: init::ASYNC_READ
                | init::POSIX_LOCKS
                | init::FLOCK_LOCKS
                | init::EXPORT_SUPPORT
                | init::BIG_WRITES
                | init::DONT_MASK
                | init::HAS_IOCTL_DIR
                | init::DO_READDIRPLUS
                | init::PARALLEL_DIROPS
                | init::POSIX_ACL
                | init::MAX_PAGES
                | init::CACHE_SYMLINKS
                | init::EXPLICIT_INVAL_DATA
                | init::HANDLE_KILLPRIV
                | init::HANDLE_KILLPRIV_V2
                | init::SETXATTR_EXT
                | init::INIT_EXT
                | init::CREATE_SUPP_GROUP
                | init::HAS_EXPIRE_ONLY
                | init::DIRECT_IO_ALLOW_MMAP
                | init::HAS_RESEND,
            max_minor: abi::MINOR,
            max_write: 1 << 20,
            max_readahead: 1 << 20,
            max_background: 64,
        }
    }
}

impl RequestedFeatures {
    /// With the kernel's own fcntl(2) and flock(2) locks, for this mount only.
    #[must_use]
    pub fn without_locks(self) -> RequestedFeatures {
        self.without(init::POSIX_LOCKS | init::FLOCK_LOCKS)
    }

    /// Without some features.
    #[must_use]
    pub fn without(self, flags: u64) -> RequestedFeatures {
        RequestedFeatures { flags: self.flags & !flags, ..self }
    }

    /// The wanted flags that a minor version has.
    #[must_use]
    pub fn flags_for(&self, minor: u32) -> u64 {
        init::ALL
            .iter()
            .filter(|(_, flag, since)| self.flags & flag != 0 && *since <= minor)
            .fold(0, |all, (_, flag, _)| all | flag)
    }
}

impl Default for Negotiated {
    /// Assumptions about the kernel before INIT.
    fn default() -> Negotiated {
        Negotiated { minor: abi::MINOR, flags: 0, max_write: PAGE, max_pages: 1, max_readahead: 0 }
    }
}

impl Negotiated {
    /// Whether all of these [`init`] flags were negotiated.
    #[must_use]
    pub fn has(&self, flags: u64) -> bool {
        self.flags & flags == flags
    }

    /// Size of a buffer for [`Transport::receive`] that fits any request with its data and names.
    #[must_use]
    pub fn buffer_len(&self) -> usize {
        let data = self.max_write.max(XATTR_SIZE_MAX).saturating_add(2 * PAGE);
        usize::try_from(data).unwrap_or(usize::MAX).max(abi::MIN_READ_BUFFER)
    }

    /// The notification level of this minor version. Distributions port features back and forth, so
    /// [`crate::DevFuse::probe_level`] tests it.
    #[must_use]
    pub fn level(&self) -> Level {
        if self.minor >= 44 { Level::All } else { Level::NoEpoch }
    }
}

/// Negotiates the smaller minor version and the features of both sides. Send the reply as the reply to the INIT request
/// `unique`.
///
/// Agrees to the older way of clearing setuid bits only without the newer one: without both the kernel sends the
/// change of mode with the credentials of a writer that may not have the permission. Timestamps have a granularity of
/// 1 ns. There is no request timeout: it would abort the connection.
pub fn negotiate(
    unique: u64,
    kernel: &InitIn,
    wanted: &RequestedFeatures,
) -> Result<(Negotiated, Reply<'static>), InitError> {
    if kernel.major != abi::MAJOR {
        return Err(InitError::Major(kernel.major));
    }
    if kernel.minor < abi::OLDEST_MINOR {
        return Err(InitError::TooOld(kernel.minor));
    }
    let minor = kernel.minor.min(wanted.max_minor.clamp(abi::OLDEST_MINOR, abi::MINOR));
    let offered = if u64::from(kernel.flags) & init::INIT_EXT != 0 {
        u64::from(kernel.flags) | u64::from(kernel.flags2) << 32
    } else {
        u64::from(kernel.flags)
    };
    let mut flags = offered & wanted.flags_for(minor);
    if flags & init::INIT_EXT == 0 {
        flags &= u64::from(u32::MAX);
    }
    if flags & init::HANDLE_KILLPRIV_V2 != 0 {
        flags &= !init::HANDLE_KILLPRIV;
    }
    let pages = wanted.max_write.div_ceil(PAGE).clamp(1, 65_535);
    let max_pages = match u16::try_from(pages) {
        Ok(pages) if flags & init::MAX_PAGES != 0 => pages,
        Ok(pages) => pages.min(DEFAULT_PAGES),
        Err(_) => DEFAULT_PAGES,
    };
    let agreed = Negotiated {
        minor,
        flags,
        max_write: wanted.max_write.clamp(PAGE, u32::from(max_pages) * PAGE),
        max_pages,
        max_readahead: kernel.max_readahead.min(wanted.max_readahead),
    };
    let out = InitOut {
        major: abi::MAJOR,
        minor,
        max_readahead: agreed.max_readahead,
        flags: (flags & u64::from(u32::MAX)) as u32,
        flags2: (flags >> 32) as u32,
        max_background: wanted.max_background,
        congestion_threshold: wanted.max_background / 4 * 3,
        max_write: agreed.max_write,
        time_gran: 1,
        max_pages: if flags & init::MAX_PAGES != 0 { max_pages } else { 0 },
        ..InitOut::default()
    };
    Ok((agreed, Reply::init(unique, &out)))
}

/// Receives the kernel's INIT, the first request of a mount, and replies to it.
pub fn handshake(
    transport: &(impl Transport + ?Sized),
    wanted: &RequestedFeatures,
) -> io::Result<Negotiated> {
    let mut buffer = vec![0; Negotiated::default().buffer_len()];
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let Some(len) = transport.receive(&mut buffer)? else {
        return Err(io::Error::from(io::ErrorKind::NotConnected));
    };
    let (header, operation) =
        decode(&buffer[..len], &Negotiated::default()).map_err(|error| invalid(error.to_string()))?;
    let Operation::Init(kernel) = operation else {
        Reply::error(header.unique, libc::EIO).send(transport)?;
        return Err(invalid(format!("{operation:?} came before INIT")));
    };
    match negotiate(header.unique, &kernel, wanted) {
        Ok((agreed, reply)) => {
            reply.send(transport)?;
            Ok(agreed)
        }
        Err(error) => {
            Reply::error(header.unique, libc::EPROTO).send(transport)?;
            Err(invalid(error.to_string()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Header, MemoryTransport, encode};
    use zerocopy::FromBytes;

    fn kernel(minor: u32) -> InitIn {
        InitIn { major: 7, minor, max_readahead: 131_072, flags: u32::MAX, flags2: u32::MAX, unused: [0; 11] }
    }

    fn out(reply: &Reply<'_>) -> InitOut {
        InitOut::read_from_bytes(&reply.to_vec()[16..]).unwrap()
    }

    #[test]
    fn handshake_negotiates_the_smaller_minor_version_with_its_features_only() {
        for offered in [31, 33, 36, 38, 45, 60] {
            for max_minor in [31, 38, 45, 99] {
                let wanted = RequestedFeatures { max_minor, ..RequestedFeatures::default() };
                let (agreed, reply) = negotiate(3, &kernel(offered), &wanted).unwrap();
                let minor = offered.min(max_minor).min(45);
                assert_eq!((agreed.minor, out(&reply).minor), (minor, minor));
                assert_eq!(agreed.has(init::SETXATTR_EXT), minor >= 33);
                assert_eq!(agreed.has(init::CREATE_SUPP_GROUP), minor >= 38);
                assert_eq!(agreed.has(init::HANDLE_KILLPRIV_V2), minor >= 33);
                assert_eq!(agreed.has(init::HANDLE_KILLPRIV), minor < 33, "one of the two");
                assert_eq!(out(&reply).flags2 != 0, minor >= 38);
                assert_eq!(agreed.level() == Level::All, minor >= 44);
            }
        }
    }

    #[test]
    fn unwanted_init_flags_are_never_set() {
        let (agreed, reply) = negotiate(3, &kernel(45), &RequestedFeatures::default()).unwrap();
        for never in [
            init::WRITEBACK_CACHE,
            init::AUTO_INVAL_DATA,
            init::NO_OPENDIR_SUPPORT,
            init::NO_EXPORT_SUPPORT,
            init::ALLOW_IDMAP,
            init::REQUEST_TIMEOUT,
            init::SECURITY_CTX,
        ] {
            assert!(!agreed.has(never), "{never:#x}");
        }
        let out = out(&reply);
        assert_eq!((out.time_gran, out.max_write, out.max_pages, out.request_timeout), (1, 1 << 20, 256, 0));
        assert!(agreed.has(init::POSIX_LOCKS | init::FLOCK_LOCKS));
        let local = negotiate(3, &kernel(45), &RequestedFeatures::default().without_locks()).unwrap().0;
        assert_eq!(local.flags & (init::POSIX_LOCKS | init::FLOCK_LOCKS), 0);
    }

    #[test]
    fn features_that_the_kernel_lacks_or_that_are_masked_are_not_assumed() {
        let bare = InitIn { flags: 0, flags2: 0, ..kernel(45) };
        let agreed = negotiate(3, &bare, &RequestedFeatures::default()).unwrap().0;
        assert_eq!((agreed.flags, agreed.max_write, agreed.max_pages), (0, 131_072, 32));
        let old = InitIn { flags: 1, flags2: u32::MAX, ..kernel(45) };
        assert_eq!(
            negotiate(3, &old, &RequestedFeatures::default()).unwrap().0.flags,
            1,
            "flags2 without INIT_EXT"
        );
        let masked = RequestedFeatures::default().without(init::INIT_EXT | init::DO_READDIRPLUS);
        let agreed = negotiate(3, &kernel(45), &masked).unwrap().0;
        assert!(!agreed.has(init::DO_READDIRPLUS) && agreed.flags >> 32 == 0);
    }

    #[test]
    fn other_versions_are_refused() {
        assert_eq!(
            negotiate(3, &kernel(30), &RequestedFeatures::default()).err(),
            Some(InitError::TooOld(30))
        );
        let eight = InitIn { major: 8, ..kernel(0) };
        assert_eq!(negotiate(3, &eight, &RequestedFeatures::default()).err(), Some(InitError::Major(8)));
    }

    #[test]
    fn handshake_replies_to_init_and_fails_on_other_requests() {
        let header = Header { unique: 2, nodeid: 0, uid: 0, gid: 0, pid: 0, resent: false };
        let transport = MemoryTransport::new(Level::All);
        transport.queue(encode(&header, &Operation::Init(kernel(45)), &Negotiated::default()));
        assert_eq!(handshake(&transport, &RequestedFeatures::default()).unwrap().minor, 45);
        assert_eq!(transport.replies().len(), 1);
        transport.queue(encode(&header, &Operation::StatFs, &Negotiated::default()));
        assert!(handshake(&transport, &RequestedFeatures::default()).is_err());
        transport.queue(encode(&header, &Operation::Init(kernel(30)), &Negotiated::default()));
        let error = handshake(&transport, &RequestedFeatures::default()).unwrap_err();
        assert!(error.to_string().contains("7.30"), "{error}");
        transport.close();
        assert!(handshake(&transport, &RequestedFeatures::default()).is_err());
    }
}
