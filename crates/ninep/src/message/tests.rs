use super::*;
use crate::{Frame, FrameReader};
use proptest::prelude::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// Bytes as Linux sends them.
#[test]
fn messages_have_the_layout_of_linux() {
    let version = Tmessage::Version { msize: 65_536, version: crate::VERSION.to_vec() };
    assert_eq!(version.encode(crate::NO_TAG), hex("15000000 64 ffff 00000100 0800 3950323030302e4c"));
    let attach = Tmessage::Attach {
        fid: 0,
        auth: crate::NO_FID,
        user: b"root".to_vec(),
        tree: b"/srv/nine".to_vec(),
        uid: 0,
    };
    let expected = "24000000 68 0000 00000000 ffffffff 0400 726f6f74 0900 2f7372762f6e696e65 00000000";
    assert_eq!(attach.encode(0), hex(expected));
    let walk = Tmessage::Walk { fid: 0, new: 1, names: ShortSequence(vec![b"a".to_vec(), b"bc".to_vec()]) };
    assert_eq!(walk.encode(2), hex("18000000 6e 0200 00000000 01000000 0200 0100 61 0200 6263"));
    let walked = Rmessage::Walk { qids: ShortSequence(vec![Qid { bits: 0x80, version: 7, path: 0x0102 }]) };
    assert_eq!(walked.encode(2), hex("16000000 6f 0200 0100 80 07000000 0201000000000000"));
    let error = Rmessage::Lerror { errno: 2 };
    assert_eq!(error.encode(2), hex("0b000000 07 0200 02000000"));
    let attributes = Rmessage::Getattr { attributes: Box::default() };
    assert_eq!(attributes.encode(1).len(), 160, "7 of the header and 153, as in the specification");
}

fn text() -> impl Strategy<Value = Text> {
    prop::collection::vec(any::<u8>(), 0..40)
}

fn qid() -> impl Strategy<Value = Qid> {
    (any::<u8>(), any::<u32>(), any::<u64>()).prop_map(|(bits, version, path)| Qid { bits, version, path })
}

fn asked() -> impl Strategy<Value = Tmessage> {
    let fid = any::<u32>;
    prop_oneof![
        (fid(), text(), any::<u32>(), any::<u32>(), any::<u32>())
            .prop_map(|(fid, name, flags, mode, gid)| Tmessage::Lcreate { fid, name, flags, mode, gid }),
        (fid(), any::<u64>(), any::<u32>()).prop_map(|(fid, offset, count)| Tmessage::Read {
            fid,
            offset,
            count
        }),
        (fid(), any::<u64>(), text()).prop_map(|(fid, offset, data)| Tmessage::Write {
            fid,
            offset,
            data: Data(data)
        }),
        (fid(), fid(), prop::collection::vec(text(), 0..=16)).prop_map(|(fid, new, names)| Tmessage::Walk {
            fid,
            new,
            names: ShortSequence(names)
        }),
        (fid(), text(), fid(), text()).prop_map(|(from, name, to, new_name)| Tmessage::Renameat {
            from,
            name,
            to,
            new_name
        }),
        (fid(), any::<u8>(), any::<u64>(), any::<u32>(), text()).prop_map(
            |(fid, kind, start, pid, client)| {
                Tmessage::Getlock { fid, lock: Lock { kind, start, length: 0, pid, client } }
            }
        ),
        any::<u16>().prop_map(|tag| Tmessage::Flush { tag }),
    ]
}

fn answered() -> impl Strategy<Value = Rmessage> {
    prop_oneof![
        any::<u32>().prop_map(|errno| Rmessage::Lerror { errno }),
        prop::collection::vec(qid(), 0..=16).prop_map(|qids| Rmessage::Walk { qids: ShortSequence(qids) }),
        (qid(), any::<u64>(), any::<u32>()).prop_map(|(qid, size, mode)| {
            Rmessage::Getattr {
                attributes: Box::new(Attributes { qid, size, mode, ..Attributes::default() }),
            }
        }),
        text().prop_map(|data| Rmessage::Read { data: Data(data) }),
        text().prop_map(|target| Rmessage::Readlink { target }),
        Just(Rmessage::Lock { status: LockStatus::Blocked }),
        Just(Rmessage::Clunk {}),
    ]
}

proptest! {
    #[test]
    fn ninep_messages_round_trip(tag: u16, asked in asked(), answered in answered()) {
        let mut reader = FrameReader::new(1 << 20);
        reader.take(&asked.encode(tag));
        reader.take(&answered.encode(tag));
        let Some(Frame { code, tag: seen, body }) = reader.poll_frame().unwrap() else { panic!("it is whole") };
        prop_assert_eq!((seen, Tmessage::decode(code, &body)), (tag, Ok(asked)));
        let Some(Frame { code, body, .. }) = reader.poll_frame().unwrap() else { panic!("it is whole") };
        prop_assert_eq!(Rmessage::decode(code, &body), Ok(answered));
        prop_assert!(reader.poll_frame().unwrap().is_none());
    }

    #[test]
    fn no_bytes_make_it_panic(code: u8, body in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = (Tmessage::decode(code, &body), Rmessage::decode(code, &body));
    }

    #[test]
    fn ninep_truncated_or_overlong_message_is_refused(answered in answered(), cut in 1usize..40) {
        let whole = answered.encode(1);
        let body = &whole[7..];
        if cut <= body.len() {
            prop_assert!(Rmessage::decode(answered.code(), &body[..body.len() - cut]).is_err());
        }
        let longer = [body, &[0]].concat();
        prop_assert!(Rmessage::decode(answered.code(), &longer).is_err());
    }
}

#[test]
fn ninep_walk_with_too_many_names_is_refused() {
    let names = Tmessage::Walk { fid: 0, new: 1, names: ShortSequence(vec![b"x".to_vec(); 17]) }.encode(1);
    assert!(Tmessage::decode(names[4], &names[7..]).is_err());
}
