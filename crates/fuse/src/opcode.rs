//! Request opcodes, and the properties of each.

macro_rules! opcodes {
    ($($name:ident = $number:literal $text:literal since $minor:literal),* $(,)?) => {
        $(pub const $name: u32 = $number;)*

        /// All known requests: opcode, name, the minor version that introduced it.
        pub const ALL: &[(u32, &str, u32)] = &[$(($number, $text, $minor)),*];

        /// Name under which a request is counted; `unknown` for unknown opcodes.
        #[must_use]
        pub const fn opcode_name(opcode: u32) -> &'static str {
            match opcode {
                $($number => $text,)*
                _ => "unknown",
            }
        }

        /// The minor version that introduced a request; `None` for unknown opcodes.
        #[must_use]
        pub const fn since(opcode: u32) -> Option<u32> {
            match opcode {
                $($number => Some($minor),)*
                _ => None,
            }
        }
    };
}

opcodes! {
    LOOKUP = 1 "lookup" since 0, FORGET = 2 "forget" since 0, GETATTR = 3 "getattr" since 0,
    SETATTR = 4 "setattr" since 1, READLINK = 5 "readlink" since 0, SYMLINK = 6 "symlink" since 1,
    MKNOD = 8 "mknod" since 1, MKDIR = 9 "mkdir" since 1, UNLINK = 10 "unlink" since 1,
    RMDIR = 11 "rmdir" since 1, RENAME = 12 "rename" since 1, LINK = 13 "link" since 1,
    OPEN = 14 "open" since 1, READ = 15 "read" since 1, WRITE = 16 "write" since 1,
    STATFS = 17 "statfs" since 0, RELEASE = 18 "release" since 1, FSYNC = 20 "fsync" since 1,
    SETXATTR = 21 "setxattr" since 1, GETXATTR = 22 "getxattr" since 1, LISTXATTR = 23 "listxattr" since 1,
    REMOVEXATTR = 24 "removexattr" since 1, FLUSH = 25 "flush" since 1, INIT = 26 "init" since 0,
    OPENDIR = 27 "opendir" since 1, READDIR = 28 "readdir" since 1, RELEASEDIR = 29 "releasedir" since 1,
    FSYNCDIR = 30 "fsyncdir" since 2, GETLK = 31 "getlk" since 7, SETLK = 32 "setlk" since 7,
    SETLKW = 33 "setlkw" since 7, ACCESS = 34 "access" since 3, CREATE = 35 "create" since 3,
    INTERRUPT = 36 "interrupt" since 7, BMAP = 37 "bmap" since 8, DESTROY = 38 "destroy" since 8,
    IOCTL = 39 "ioctl" since 11, POLL = 40 "poll" since 11, NOTIFY_REPLY = 41 "notify_reply" since 15,
    BATCH_FORGET = 42 "batch_forget" since 16, FALLOCATE = 43 "fallocate" since 19,
    READDIRPLUS = 44 "readdirplus" since 21, RENAME2 = 45 "rename2" since 23, LSEEK = 46 "lseek" since 24,
    COPY_FILE_RANGE = 47 "copy_file_range" since 28, SETUPMAPPING = 48 "setupmapping" since 31,
    REMOVEMAPPING = 49 "removemapping" since 31, SYNCFS = 50 "syncfs" since 34,
    TMPFILE = 51 "tmpfile" since 37, STATX = 52 "statx" since 39,
    COPY_FILE_RANGE_64 = 53 "copy_file_range_64" since 45,
}

/// Whether the kernel waits for a reply. INTERRUPT gets only EAGAIN, if the interrupted request is not known (yet); the
/// kernel then sends INTERRUPT again.
#[must_use]
pub const fn expects_reply(opcode: u32) -> bool {
    !matches!(opcode, FORGET | BATCH_FORGET | INTERRUPT | NOTIFY_REPLY)
}
