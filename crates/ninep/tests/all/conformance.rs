//! The remotes' common suite over a server whose fids are inodes; no fid may leak.

use crate::common::TreeServer;
use nigh_ninep::{Config, FrameReader, Session, Times, Tmessage};
use nigh_remote::conformance::{Harness, assert_conforms};
use nigh_remote::model_fs::ModelFs;
use nigh_remote::{Event, Output, Remote};
use nigh_types::{CookieKey, Span, Term, Time};
use std::cell::RefCell;
use std::rc::Rc;

struct Served {
    server: Rc<RefCell<TreeServer>>,
    frames: FrameReader,
    now: Time,
    is_old: bool,
}

pub fn config() -> Config {
    let second = Term::Limited(Span::from_secs(1));
    let times = Times { names: second, absent: second, attributes: second };
    Config { msize: 1 << 20, ..Config::new(times, CookieKey(*b"sixteen bytes ok")) }
}

impl Harness for Served {
    fn attach(&mut self) -> Box<dyn Remote> {
        let mut server = TreeServer::new(ModelFs::default());
        server.is_old = self.is_old;
        self.server = Rc::new(RefCell::new(server));
        self.frames = FrameReader::new(1 << 20);
        Box::new(Session::new(self.now, config()))
    }

    fn now(&self) -> Time {
        self.now
    }

    fn pump(&mut self, remote: &mut dyn Remote) -> Vec<Event> {
        let mut events = Vec::new();
        for _ in 0..100 {
            let due = loop {
                match remote.poll_output() {
                    Output::Event(event) => events.push(event),
                    Output::Transmit(bytes) => {
                        self.frames.take(&bytes);
                        while let Some(frame) = self.frames.poll_frame().expect("we send whole messages") {
                            let message = Tmessage::decode(frame.code, &frame.body).expect("and right ones");
                            let answer = self.server.borrow_mut().answer(self.now, &message);
                            remote.handle_input(self.now, &answer.encode(frame.tag));
                        }
                    }
                    Output::Timeout(due, _) => break due,
                }
            };
            if !events.is_empty() || due == Time::FAR {
                break;
            }
            self.now = due;
            remote.handle_timeout(self.now);
        }
        self.now = self.now.after(Span::from_millis(1));
        events
    }

    fn lacks(&self) -> &[&str] {
        &[
            "fallocate_extends",
            "fallocate_punches_holes",
            "copy_range_copies",
            "tmpfile_has_no_name_until_linked",
            "rename_noreplace",
            "rename_exchange",
            "rename_whiteout",
            "xattrs_may_be_empty",
        ]
    }
}

fn served(is_old: bool) -> Served {
    Served {
        server: Rc::new(RefCell::new(TreeServer::new(ModelFs::default()))),
        frames: FrameReader::new(1 << 20),
        now: Time(1_000_000_000),
        is_old,
    }
}

#[test]
fn ninep_server_with_inode_fids_conforms() {
    assert_conforms(&mut served(false));
}

#[test]
fn ninep_server_without_renameat_and_unlinkat_conforms() {
    assert_conforms(&mut served(true));
}
