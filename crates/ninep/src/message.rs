//! All messages of 9P2000.L (protocol.md of diod; `include/net/9p/9p.h` of Linux).

use crate::ProtocolError;
use crate::values::{Attributes, Lock, LockStatus, Qid, Space};
use crate::wire::{Data, Reader, ShortSequence, Text, Wire};

/// Declares one direction: names, types and fields in their order on the wire.
macro_rules! messages {
    ($(#[$doc:meta])* $direction:ident { $($(#[$about:meta])* $name:ident = $code:literal { $($field:ident: $kind:ty),* })* }) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub enum $direction {
            $($(#[$about])* $name { $($field: $kind),* },)*
        }

        impl $direction {
            /// The type's number in the header.
            #[must_use]
            pub fn code(&self) -> u8 {
                match self { $($direction::$name { .. } => $code,)* }
            }

            /// The type's name with its direction, as it is counted in statistics.
            #[must_use]
            pub fn type_name(&self) -> &'static str {
                match self { $($direction::$name { .. } => concat!(stringify!($direction), stringify!($name)),)* }
            }

            /// The type's name, without its direction.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self { $($direction::$name { .. } => stringify!($name),)* }
            }

            fn put(&self, to: &mut Vec<u8>) {
                match self { $($direction::$name { $($field),* } => { $($field.put(to);)* let _ = to; })* }
            }

            fn of(code: u8, from: &mut Reader<'_>) -> Result<$direction, ProtocolError> {
                match code {
                    $($code => Ok($direction::$name { $($field: <$kind>::parse(from)?),* }),)*
                    _ => Err(ProtocolError::UnknownType(code)),
                }
            }

            /// Encodes the whole message: size, type, tag, fields.
            #[must_use]
            pub fn encode(&self, tag: u16) -> Vec<u8> {
                let mut bytes = vec![0; 4];
                self.code().put(&mut bytes);
                tag.put(&mut bytes);
                self.put(&mut bytes);
                let length = u32::try_from(bytes.len()).expect("a message of ours is shorter than 4 GiB");
                bytes[..4].copy_from_slice(&length.to_le_bytes());
                bytes
            }

            /// Decodes the body of a message of that type. No bytes may be left over.
            ///
            /// # Errors
            /// The type is unknown or not of this direction, or the fields are malformed.
            pub fn decode(code: u8, body: &[u8]) -> Result<$direction, ProtocolError> {
                let mut from = Reader::new(body);
                let message = $direction::of(code, &mut from)?;
                if !from.is_empty() {
                    return Err(ProtocolError::Malformed("bytes are left over"));
                }
                Ok(message)
            }
        }
    };
}

messages! {
    /// A client's request. Modes, flags and masks: [`crate::flags`], [`crate::mask`].
    Tmessage {
        Statfs = 8 { fid: u32 }
        /// Makes the fid an open file or directory.
        Lopen = 12 { fid: u32, flags: u32 }
        /// Makes the fid, of a directory, that of the new file, open.
        Lcreate = 14 { fid: u32, name: Text, flags: u32, mode: u32, gid: u32 }
        Symlink = 16 { dir: u32, name: Text, target: Text, gid: u32 }
        Mknod = 18 { dir: u32, name: Text, mode: u32, major: u32, minor: u32, gid: u32 }
        Rename = 20 { fid: u32, dir: u32, name: Text }
        Readlink = 22 { fid: u32 }
        Getattr = 24 { fid: u32, wanted: u64 }
        Setattr = 26 { fid: u32, valid: u32, mode: u32, uid: u32, gid: u32, size: u64, atime: (u64, u64), mtime: (u64, u64) }
        /// Makes `new` an xattr to be read; without a name, the list of all xattrs.
        Xattrwalk = 30 { fid: u32, new: u32, name: Text }
        /// Makes the fid an xattr to be written; the write takes effect when the fid is clunked.
        Xattrcreate = 32 { fid: u32, name: Text, size: u64, flags: u32 }
        Readdir = 40 { fid: u32, offset: u64, count: u32 }
        Fsync = 50 { fid: u32, data_only: u32 }
        Lock = 52 { fid: u32, kind: u8, flags: u32, start: u64, length: u64, pid: u32, client: Text }
        Getlock = 54 { fid: u32, lock: Lock }
        Link = 70 { dir: u32, fid: u32, name: Text }
        Mkdir = 72 { dir: u32, name: Text, mode: u32, gid: u32 }
        Renameat = 74 { from: u32, name: Text, to: u32, new_name: Text }
        Unlinkat = 76 { dir: u32, name: Text, flags: u32 }
        Version = 100 { msize: u32, version: Text }
        Auth = 102 { fid: u32, user: Text, tree: Text, uid: u32 }
        Attach = 104 { fid: u32, auth: u32, user: Text, tree: Text, uid: u32 }
        Flush = 108 { tag: u16 }
        Walk = 110 { fid: u32, new: u32, names: ShortSequence<Text> }
        Read = 116 { fid: u32, offset: u64, count: u32 }
        Write = 118 { fid: u32, offset: u64, data: Data }
        Clunk = 120 { fid: u32 }
        /// Clunks the fid also when it fails.
        Remove = 122 { fid: u32 }
    }
}

messages! {
    /// A server's reply.
    Rmessage {
        /// A Linux errno, in place of any other reply.
        Lerror = 7 { errno: u32 }
        Statfs = 9 { space: Space }
        Lopen = 13 { qid: Qid, iounit: u32 }
        Lcreate = 15 { qid: Qid, iounit: u32 }
        Symlink = 17 { qid: Qid }
        Mknod = 19 { qid: Qid }
        Rename = 21 {}
        Readlink = 23 { target: Text }
        Getattr = 25 { attributes: Box<Attributes> }
        Setattr = 27 {}
        Xattrwalk = 31 { size: u64 }
        Xattrcreate = 33 {}
        /// [`crate::dirents`]; empty at the end.
        Readdir = 41 { entries: Data }
        Fsync = 51 {}
        Lock = 53 { status: LockStatus }
        Getlock = 55 { lock: Lock }
        Link = 71 {}
        Mkdir = 73 { qid: Qid }
        Renameat = 75 {}
        Unlinkat = 77 {}
        Version = 101 { msize: u32, version: Text }
        Auth = 103 { qid: Qid }
        Attach = 105 { qid: Qid }
        Flush = 109 {}
        /// The qids of the names that exist; if fewer than requested, no new fid was made.
        Walk = 111 { qids: ShortSequence<Qid> }
        Read = 117 { data: Data }
        Write = 119 { count: u32 }
        Clunk = 121 {}
        Remove = 123 {}
    }
}

impl Tmessage {
    /// The fids that a message refers to, except one that it creates.
    #[must_use]
    pub fn fids(&self) -> Vec<u32> {
        match self {
            Tmessage::Version { .. }
            | Tmessage::Auth { .. }
            | Tmessage::Attach { .. }
            | Tmessage::Flush { .. } => vec![],
            Tmessage::Statfs { fid }
            | Tmessage::Lopen { fid, .. }
            | Tmessage::Lcreate { fid, .. }
            | Tmessage::Readlink { fid }
            | Tmessage::Getattr { fid, .. }
            | Tmessage::Setattr { fid, .. }
            | Tmessage::Xattrwalk { fid, .. }
            | Tmessage::Xattrcreate { fid, .. }
            | Tmessage::Readdir { fid, .. }
            | Tmessage::Fsync { fid, .. }
            | Tmessage::Lock { fid, .. }
            | Tmessage::Getlock { fid, .. }
            | Tmessage::Walk { fid, .. }
            | Tmessage::Read { fid, .. }
            | Tmessage::Write { fid, .. }
            | Tmessage::Clunk { fid }
            | Tmessage::Remove { fid } => vec![*fid],
            Tmessage::Symlink { dir, .. }
            | Tmessage::Mknod { dir, .. }
            | Tmessage::Mkdir { dir, .. }
            | Tmessage::Unlinkat { dir, .. } => vec![*dir],
            Tmessage::Rename { fid, dir, .. } | Tmessage::Link { dir, fid, .. } => vec![*fid, *dir],
            Tmessage::Renameat { from, to, .. } => vec![*from, *to],
        }
    }
}

impl<T: Wire> Wire for Box<T> {
    fn put(&self, to: &mut Vec<u8>) {
        T::put(self, to);
    }

    fn parse(from: &mut Reader<'_>) -> Result<Box<T>, ProtocolError> {
        T::parse(from).map(Box::new)
    }
}

#[cfg(test)]
mod tests;
