//! Error numbers, as Linux (asm-generic) numbers them; the wire uses the same numbers.

use std::fmt;

/// An error number, 1 to 4095.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(u16);

macro_rules! errnos {
    ($($name:ident = $number:literal),* $(,)?) => {
        impl Errno {
            $(pub const $name: Errno = Errno($number);)*

            /// The symbolic name, `E…`; `None` for numbers not named here.
            #[must_use]
            pub fn symbol(self) -> Option<&'static str> {
                match self.0 {
                    $($number => Some(concat!("E", stringify!($name))),)*
                    _ => None,
                }
            }
        }
    };
}

errnos! {
    PERM = 1, NOENT = 2, INTR = 4, IO = 5, NXIO = 6, TOOBIG = 7, BADF = 9, AGAIN = 11, NOMEM = 12,
    ACCES = 13, BUSY = 16, EXIST = 17, XDEV = 18, NODEV = 19, NOTDIR = 20, ISDIR = 21, INVAL = 22,
    NFILE = 23, MFILE = 24, NOTTY = 25, TXTBSY = 26, FBIG = 27, NOSPC = 28, SPIPE = 29, ROFS = 30,
    MLINK = 31, RANGE = 34, DEADLK = 35, NAMETOOLONG = 36, NOLCK = 37, NOSYS = 38, NOTEMPTY = 39,
    LOOP = 40, NODATA = 61, PROTO = 71, OVERFLOW = 75, OPNOTSUPP = 95, NOTCONN = 107,
    TIMEDOUT = 110, STALE = 116, DQUOT = 122, CANCELED = 125,
}

impl Errno {
    /// From a number of the operating system or a peer; `EIO` if the number is outside the range of error numbers.
    #[must_use]
    pub fn from_raw(number: i32) -> Errno {
        match u16::try_from(number) {
            Ok(n @ 1..=4095) => Errno(n),
            _ => Errno::IO,
        }
    }

    #[must_use]
    pub fn raw(self) -> i32 {
        i32::from(self.0)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.symbol() {
            Some(symbol) => f.write_str(symbol),
            None => write!(f, "E#{}", self.0),
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl std::error::Error for Errno {}
