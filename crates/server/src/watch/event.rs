//! Parser of fanotify(7) records with file handles and names. Though they come from the kernel they are checked: a
//! malformed record counts as lost events.

use crate::export::handle::FileHandle;

/// A parsed event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// A change. `pid`: the process that made it; 0 if hidden, which it never is from that process itself.
    Change { pid: i32, mask: u64, spot: EventLocation },
    /// The kernel's event queue overflowed.
    Overflow,
    /// The record is malformed.
    Malformed,
}

/// Location of a change.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct EventLocation {
    /// A directory, and a name in it.
    pub(crate) dir: Option<(FileHandle, Box<[u8]>)>,
    /// The changed object itself.
    pub(crate) own: Option<FileHandle>,
}

/// `struct fanotify_event_metadata`.
const METADATA: usize = 24;
/// `struct fanotify_event_info_header` and a `__kernel_fsid_t`.
const INFO: usize = 12;
/// `struct file_handle` without the handle.
const HANDLE: usize = 8;

/// Parses all events of one read.
pub(crate) fn parse(mut bytes: &[u8], mut heard: impl FnMut(Event)) {
    while !bytes.is_empty() {
        let length = u32_at(bytes, 0).and_then(|length| usize::try_from(length).ok());
        let event = length.filter(|length| *length >= METADATA).and_then(|length| bytes.get(..length));
        let Some(event) = event else { return heard(Event::Malformed) };
        heard(one(event).unwrap_or(Event::Malformed));
        bytes = &bytes[event.len()..];
    }
}

fn one(event: &[u8]) -> Option<Event> {
    if *event.get(4)? != libc::FANOTIFY_METADATA_VERSION {
        return None;
    }
    let head = usize::from(u16::from_ne_bytes(array(event, 6)?));
    let mask = u64::from_ne_bytes(array(event, 8)?);
    let pid = i32::from_ne_bytes(array(event, 20)?);
    if mask & libc::FAN_Q_OVERFLOW != 0 {
        return Some(Event::Overflow);
    }
    if head < METADATA {
        return None;
    }
    let mut spot = EventLocation::default();
    let mut rest = event.get(head..)?;
    while !rest.is_empty() {
        let length = usize::from(u16::from_ne_bytes(array(rest, 2)?));
        let info = rest.get(..length).filter(|info| info.len() >= 4)?;
        match info[0] {
            libc::FAN_EVENT_INFO_TYPE_FID => spot.own = Some(handle(info)?.0),
            // A directory's own events have the name `.`.
            libc::FAN_EVENT_INFO_TYPE_DFID => spot.own = spot.own.or(Some(handle(info)?.0)),
            libc::FAN_EVENT_INFO_TYPE_DFID_NAME => {
                let (dir, name) = handle(info)?;
                let end = name.iter().position(|&byte| byte == 0)?;
                match &name[..end] {
                    b"" => return None,
                    b"." => spot.own = Some(dir),
                    name => spot.dir = Some((dir, name.into())),
                }
            }
            _ => {}
        }
        rest = &rest[length..];
    }
    (spot != EventLocation::default()).then_some(Event::Change { pid, mask, spot })
}

/// Parses the file handle of a record. Returns the remaining bytes as well.
fn handle(info: &[u8]) -> Option<(FileHandle, &[u8])> {
    let length = usize::try_from(u32_at(info, INFO)?).ok()?;
    let kind = i32::from_ne_bytes(array(info, INFO + 4)?);
    let end = (INFO + HANDLE).checked_add(length)?;
    Some((FileHandle::from_kernel(kind, info.get(INFO + HANDLE..end)?)?, info.get(end..)?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(array(bytes, at)?))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(kind: u8, handle: &[u8], name: &[u8]) -> Vec<u8> {
        let mut body = vec![0; 8];
        body.extend((handle.len() as u32).to_ne_bytes());
        body.extend(1_i32.to_ne_bytes());
        body.extend(handle);
        body.extend(name);
        while !(body.len() + 4).is_multiple_of(4) {
            body.push(0);
        }
        let mut all = vec![kind, 0];
        all.extend(((body.len() + 4) as u16).to_ne_bytes());
        all.extend(body);
        all
    }

    fn event(mask: u64, pid: i32, infos: &[Vec<u8>]) -> Vec<u8> {
        let infos = infos.concat();
        let mut all = ((METADATA + infos.len()) as u32).to_ne_bytes().to_vec();
        all.extend([libc::FANOTIFY_METADATA_VERSION, 0]);
        all.extend((METADATA as u16).to_ne_bytes());
        all.extend(mask.to_ne_bytes());
        all.extend((-1_i32).to_ne_bytes());
        all.extend(pid.to_ne_bytes());
        all.extend(infos);
        all
    }

    fn read(bytes: &[u8]) -> Vec<Event> {
        let mut all = Vec::new();
        parse(bytes, |heard| all.push(heard));
        all
    }

    fn told(bytes: &[u8]) -> FileHandle {
        FileHandle::from_kernel(1, bytes).unwrap()
    }

    #[test]
    fn events_are_read_as_the_kernel_writes_them() {
        let both = event(libc::FAN_MODIFY, 7, &[info(2, b"dirdirdi", b"name\0"), info(1, b"filefile", b"")]);
        let own = event(libc::FAN_DELETE_SELF, 8, &[info(2, b"dirdirdi", b".\0")]);
        let more = event(libc::FAN_ATTRIB, 9, &[info(99, b"later", b"x"), info(1, b"filefile", b"")]);
        let all = read(&[both, own, more].concat());
        let named = EventLocation {
            dir: Some((told(b"dirdirdi"), b"name"[..].into())),
            own: Some(told(b"filefile")),
        };
        assert_eq!(all[0], Event::Change { pid: 7, mask: libc::FAN_MODIFY, spot: named });
        let dir = EventLocation { dir: None, own: Some(told(b"dirdirdi")) };
        assert_eq!(all[1], Event::Change { pid: 8, mask: libc::FAN_DELETE_SELF, spot: dir });
        let file = EventLocation { dir: None, own: Some(told(b"filefile")) };
        assert_eq!(all[2], Event::Change { pid: 9, mask: libc::FAN_ATTRIB, spot: file });
        assert_eq!(read(&event(libc::FAN_Q_OVERFLOW, 0, &[])), [Event::Overflow]);
    }

    #[test]
    fn malformed_fanotify_records_count_as_loss_without_panic() {
        let whole = event(libc::FAN_CREATE, 7, &[info(2, b"dirdirdi", b"name\0")]);
        for end in 1..whole.len() {
            let said = read(&whole[..end]);
            assert_eq!(said.last(), Some(&Event::Malformed), "{end}");
        }
        // A wrong byte in header or lengths yields some hint or a loss, never a panic.
        for at in 0..whole.len() {
            for wrong in [0, 1, 3, 0x7f, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = wrong;
                assert!(!read(&bytes).is_empty());
            }
        }
        assert_eq!(read(&event(libc::FAN_CREATE, 7, &[])), [Event::Malformed], "nothing says where");
        assert_eq!(read(&event(libc::FAN_CREATE, 7, &[info(2, b"dirdirdi", b"\0")])), [Event::Malformed]);
        assert_eq!(read(&event(libc::FAN_CREATE, 7, &[info(1, &[1; 129], b"")])), [Event::Malformed]);
    }
}
