//! Observer of a counted stream (docs/protocol.md, "Connections").

use super::said;
use nigh_native::{Message, Resumed};

/// Size of a frame's header; the body's length comes first, the frame's type is the fifth byte.
const HEADER: usize = 16;
const COUNTED: [u8; 9] = [4, 5, 6, 7, 8, 9, 14, 15, 16];
const WELCOME: u8 = 2;

fn is_counted(frame: &[u8]) -> bool {
    COUNTED.contains(&frame[4])
}

/// Splits the input of one end of a connection into frames.
#[derive(Default)]
pub struct Heard(Vec<u8>);

/// The frames that have become complete.
#[derive(Default)]
pub struct Whole {
    pub counted: u64,
    /// The resumption in a welcome among them.
    pub welcome: Option<Option<Resumed>>,
}

impl Heard {
    /// Returns how many of the next bytes belong to the incomplete frame.
    pub fn missing(&self, bytes: &[u8]) -> usize {
        let next = [&self.0[..], bytes].concat();
        let total = next.first_chunk().map_or(HEADER, |length| HEADER + u32::from_le_bytes(*length) as usize);
        total.saturating_sub(self.0.len()).min(bytes.len())
    }

    /// Adds bytes that the end has accepted.
    pub fn take(&mut self, bytes: &[u8]) -> Whole {
        self.0.extend(bytes);
        let mut whole = Whole::default();
        while let Some(length) = self.0.first_chunk() {
            let total = HEADER + u32::from_le_bytes(*length) as usize;
            if self.0.len() < total {
                break;
            }
            let frame: Vec<u8> = self.0.drain(..total).collect();
            whole.counted += u64::from(is_counted(&frame));
            if frame[4] == WELCOME
                && let [Message::Welcome(welcome)] = &said(&frame)[..]
            {
                whole.welcome = Some(welcome.resumed);
            }
        }
        whole
    }
}

/// The counted frames that an end has sent: each has its number, on whichever connection it is sent.
#[derive(Default)]
pub struct Put {
    frames: Vec<Vec<u8>>,
    /// The number of the next frame on this connection.
    next: usize,
}

impl Put {
    /// Records a frame sent on the present connection.
    pub fn put(&mut self, frame: &[u8]) {
        if !is_counted(frame) {
            return;
        }
        match self.frames.get(self.next) {
            Some(before) => assert_eq!(before, frame, "another frame has the number of one that was put out"),
            None => self.frames.push(frame.to_vec()),
        }
        self.next += 1;
    }

    /// The end believes that `received` frames have arrived, and continues on another connection.
    pub fn resume(&mut self, received: u64) {
        assert!(received <= self.frames.len() as u64, "more is believed to have arrived than was put out");
        self.next = received as usize;
    }
}
