//! Test server: the server end of a session over a tree in memory.

use nigh_native::{ServerConfig, ServerEvent, ServerSession, SessionParams};
use nigh_remote::model_fs::{ModelFs, ModelFsConfig};
use nigh_types::{Call, Errno, Features, Request, Response, Time};

type Refuse = Box<dyn Fn(&Call) -> Option<Errno> + Send>;

pub(crate) struct Server {
    connection: ServerSession,
    pub tree: ModelFs,
    /// Requests received so far.
    pub asked: Vec<Request>,
    /// Selects calls that get an error and are not executed.
    pub refuse: Option<Refuse>,
    /// Whether the client has said goodbye.
    pub left: bool,
}

impl Server {
    pub fn new(now: Time) -> Server {
        Server {
            connection: ServerSession::new(now, ServerConfig::default()),
            tree: ModelFs::new(ModelFsConfig::default()),
            asked: Vec::new(),
            refuse: None,
            left: false,
        }
    }

    /// Handles bytes of the client; returns the reply bytes.
    pub fn handle(&mut self, now: Time, bytes: &[u8]) -> Vec<u8> {
        self.connection.handle_input(now, bytes).expect("the client keeps to the protocol");
        while let Some(event) = self.connection.poll_event() {
            match event {
                ServerEvent::Attach { term, .. } => {
                    let session = SessionParams {
                        supports: Features { acls: true, ..Features::default() },
                        ..self.tree.session(term)
                    };
                    self.connection.accept(session);
                }
                ServerEvent::Request { call, request, .. } => {
                    let refused = self.refuse.as_ref().and_then(|refuse| refuse(&request.call));
                    let responses = match refused {
                        Some(errno) => vec![Response::plain(Err(errno))],
                        None => self.tree.execute(now, &request),
                    };
                    if !matches!(request.call, Call::Release { .. }) {
                        responses.iter().for_each(|response| self.connection.respond(call, response));
                    }
                    self.asked.push(request);
                }
                ServerEvent::Bye { .. } => self.left = true,
                ServerEvent::Cancel(_)
                | ServerEvent::Acknowledge(_)
                | ServerEvent::Return(_)
                | ServerEvent::Reclaimed => {}
            }
        }
        let frames = std::iter::from_fn(|| self.connection.poll_transmit());
        frames.flat_map(|frame| frame.to_vec()).collect()
    }
}
