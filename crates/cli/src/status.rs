//! `nigh status`.

use crate::output::{print, print_line};
use anyhow::{Context, Result, bail};
use nigh_server::ServerDirs;
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};

/// Prints the status of one mount, or of all this user's mounts and one line about this user's server.
pub fn mounts(mountpoint: Option<PathBuf>, json: bool) -> Result<()> {
    let places = ServerDirs::of_user()?;
    places.make_runtime()?;
    let statuses = match &mountpoint {
        None => nigh_client::control::statuses(&places.runtime)?,
        Some(wanted) => match nigh_client::control::status_at(&places.runtime, &absolute(wanted))? {
            None => {
                bail!("{}: no mount of yours answers there; `nigh status` lists them", wanted.display());
            }
            Some(status) if json => {
                return print_line(&format!("{status:#}"));
            }
            Some(status) => vec![status],
        },
    };
    if json {
        return print_line(&format!("{:#}", Value::Array(statuses)));
    }
    let mut page: String = statuses.iter().map(nigh_client::status::page).collect();
    if statuses.is_empty() {
        page.push_str("nothing is mounted\n");
    }
    if mountpoint.is_none()
        && let Ok(status) = nigh_server::ask(&places.socket())
    {
        page.push_str(&nigh_server::summary(&status));
    }
    print(&page)
}

/// Prints the status of the server that listens at `socket`, or of this user's own.
pub fn server(socket: Option<&Path>, json: bool) -> Result<()> {
    let (socket, own) = match socket {
        Some(socket) => {
            let bytes = std::os::unix::ffi::OsStrExt::as_bytes(socket.as_os_str());
            let path = bytes.strip_prefix(b"unix://").unwrap_or(bytes);
            (PathBuf::from(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(path)), false)
        }
        None => (ServerDirs::of_user()?.socket(), true),
    };
    let status = match nigh_server::ask(&socket) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            let mend = match own {
                true => "`nigh mount` starts yours when it is needed; name the socket of another one",
                false => "name the socket of a server that runs",
            };
            bail!("no server answers at {}: {mend}", socket.display());
        }
        other => other.with_context(|| socket.display().to_string())?,
    };
    print(&if json { format!("{status:#}\n") } else { nigh_server::status_page(&status) })
}

/// Makes a path absolute without looking up its last component, a mount that may not answer.
fn absolute(path: &Path) -> PathBuf {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let (Some(parent), Some(name)) = (whole.parent(), whole.file_name()) else { return whole };
    parent.canonicalize().map_or(whole.clone(), |parent| parent.join(name))
}
