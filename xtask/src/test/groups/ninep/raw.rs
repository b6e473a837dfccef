//! Plain 9P, with nigh's message codec only: a server's own replies.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use nigh_ninep::{NO_FID, NO_TAG, Rmessage, ShortSequence, Tmessage, VERSION};
use nigh_types::Errno;

pub struct Client {
    stream: TcpStream,
}

impl Client {
    /// Attaches as root; fid 0 is the tree's root.
    pub fn attach(port: u16, tree: &Path) -> Result<Client> {
        let mut client = Client { stream: TcpStream::connect(("127.0.0.1", port))? };
        let version = Tmessage::Version { msize: 65_536, version: VERSION.to_vec() };
        client.exchange(NO_TAG, &version)?;
        let tree = tree.as_os_str().as_bytes().to_vec();
        let attach = Tmessage::Attach { fid: 0, auth: NO_FID, user: Vec::new(), tree, uid: 0 };
        client.ask(&attach)?.map_err(|errno| anyhow::anyhow!("attaching: {errno}"))?;
        Ok(client)
    }

    pub fn ask(&mut self, message: &Tmessage) -> Result<Result<Rmessage, Errno>> {
        Ok(match self.exchange(1, message)? {
            Rmessage::Lerror { errno } => Err(Errno::from_raw(i32::try_from(errno)?)),
            answer => Ok(answer),
        })
    }

    fn exchange(&mut self, tag: u16, message: &Tmessage) -> Result<Rmessage> {
        self.stream.write_all(&message.encode(tag))?;
        let mut head = [0; 7];
        self.stream.read_exact(&mut head)?;
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let mut body = vec![0; usize::try_from(length)?.checked_sub(7).context("too short")?];
        self.stream.read_exact(&mut body)?;
        ensure!(u16::from_le_bytes([head[5], head[6]]) == tag, "another tag");
        Ok(Rmessage::decode(head[4], &body)?)
    }
}

/// Returns whether a server refuses paths below its tree that Linux allows: it prepends its own path.
pub fn refuses_long_paths(port: u16, tree: &Path) -> Result<bool> {
    const NAME: [u8; 255] = [b'p'; 255];
    let mut client = Client::attach(port, tree)?;
    let (mut fid, mut length) = (0, 0);
    // No program can pass a longer path (PATH_MAX).
    while length + 1 + NAME.len() < 4096 {
        let made = client.ask(&Tmessage::Mkdir { dir: fid, name: NAME.to_vec(), mode: 0o755, gid: 0 })?;
        match made {
            Err(Errno::NAMETOOLONG) => return Ok(true),
            Err(errno) => bail!("Tmkdir below {length} bytes: {errno}"),
            Ok(_) => {}
        }
        let walk = Tmessage::Walk { fid, new: fid + 1, names: ShortSequence(vec![NAME.to_vec()]) };
        match client.ask(&walk)? {
            Err(Errno::NAMETOOLONG) => return Ok(true),
            Err(errno) => bail!("Twalk below {length} bytes: {errno}"),
            Ok(_) => {}
        }
        fid += 1;
        length += 1 + NAME.len();
    }
    // The rest of the length.
    let rest = vec![b'q'; 4095 - length - 1];
    let made = client.ask(&Tmessage::Mkdir { dir: fid, name: rest, mode: 0o755, gid: 0 })?;
    Ok(made == Err(Errno::NAMETOOLONG))
}
