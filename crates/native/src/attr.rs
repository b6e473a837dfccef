//! Layouts of attributes and of changes to them.

use crate::ProtocolError;
use crate::wire::{Reader, Wire, Writer};
use nigh_types::{Attr, Kind, SetAttr, SetTime, Timestamp};
use zerocopy::byteorder::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct WireTime {
    secs: I64,
    nanos: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct WireAttr {
    size: U64,
    blocks: U64,
    mode: U32,
    nlink: U32,
    uid: U32,
    gid: U32,
    rdev: U32,
    atime: WireTime,
    mtime: WireTime,
    ctime: WireTime,
    birth_ns: U64,
}

fn wire_time(time: Timestamp) -> WireTime {
    WireTime { secs: I64::new(time.secs), nanos: U32::new(time.nanos) }
}

fn timestamp(time: WireTime) -> Result<Timestamp, ProtocolError> {
    if time.nanos.get() >= 1_000_000_000 {
        return Err(ProtocolError::Malformed("nanoseconds of a time are a second or more"));
    }
    Ok(Timestamp { secs: time.secs.get(), nanos: time.nanos.get() })
}

impl Wire for Timestamp {
    fn put(&self, w: &mut Writer) {
        w.raw(wire_time(*self).as_bytes());
    }

    fn parse(r: &mut Reader<'_>) -> Result<Timestamp, ProtocolError> {
        let (secs, nanos) = (I64::from_bytes(r.array()?), U32::from_bytes(r.array()?));
        timestamp(WireTime { secs, nanos })
    }
}

impl Wire for Attr {
    fn put(&self, w: &mut Writer) {
        let fields = WireAttr {
            size: U64::new(self.size),
            blocks: U64::new(self.blocks),
            mode: U32::new(self.mode),
            nlink: U32::new(self.nlink),
            uid: U32::new(self.uid),
            gid: U32::new(self.gid),
            rdev: U32::new(self.rdev),
            atime: wire_time(self.atime),
            mtime: wire_time(self.mtime),
            ctime: wire_time(self.ctime),
            birth_ns: U64::new(self.birth_ns),
        };
        w.bytes(fields.as_bytes());
    }

    fn parse(r: &mut Reader<'_>) -> Result<Attr, ProtocolError> {
        let (fields, _) = WireAttr::read_from_prefix(r.bytes()?)
            .map_err(|_| ProtocolError::Malformed("attributes end too early"))?;
        let attr = Attr {
            size: fields.size.get(),
            blocks: fields.blocks.get(),
            mode: fields.mode.get(),
            nlink: fields.nlink.get(),
            uid: fields.uid.get(),
            gid: fields.gid.get(),
            rdev: fields.rdev.get(),
            atime: timestamp(fields.atime)?,
            mtime: timestamp(fields.mtime)?,
            ctime: timestamp(fields.ctime)?,
            birth_ns: fields.birth_ns.get(),
        };
        if Kind::of_mode(attr.mode).is_err() || attr.mode > 0o177_777 {
            return Err(ProtocolError::Malformed("a mode has no file type"));
        }
        if i64::try_from(attr.size).is_err() {
            return Err(ProtocolError::Malformed("a file's size is 2^63 or more"));
        }
        Ok(attr)
    }
}

impl Wire for Kind {
    fn put(&self, w: &mut Writer) {
        w.u32(self.mode_bits());
    }

    fn parse(r: &mut Reader<'_>) -> Result<Kind, ProtocolError> {
        Kind::of_mode(r.u32()?).map_err(|_| ProtocolError::Malformed("unknown file type"))
    }
}

impl Wire for SetTime {
    fn put(&self, w: &mut Writer) {
        match self {
            SetTime::Now => w.u8(0),
            SetTime::At(time) => {
                w.u8(1);
                time.put(w);
            }
        }
    }

    fn parse(r: &mut Reader<'_>) -> Result<SetTime, ProtocolError> {
        Ok(match bool::parse(r)? {
            false => SetTime::Now,
            true => SetTime::At(Timestamp::parse(r)?),
        })
    }
}

impl Wire for SetAttr {
    fn put(&self, w: &mut Writer) {
        w.record(|w| {
            self.mode.put(w);
            self.uid.put(w);
            self.gid.put(w);
            self.size.put(w);
            self.atime.put(w);
            self.mtime.put(w);
            self.kill_suidgid.put(w);
        });
    }

    fn parse(r: &mut Reader<'_>) -> Result<SetAttr, ProtocolError> {
        let r = &mut r.record()?;
        Ok(SetAttr {
            mode: Option::parse(r)?,
            uid: Option::parse(r)?,
            gid: Option::parse(r)?,
            size: Option::parse(r)?,
            atime: Option::parse(r)?,
            mtime: Option::parse(r)?,
            kill_suidgid: bool::parse(r)?,
        })
    }
}
