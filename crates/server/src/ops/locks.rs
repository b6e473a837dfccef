//! Calls for locks: the file is looked for as for any call, the rest is in memory.

use super::open::only_files;
use crate::error::Result;
use crate::export::Export;
use crate::files::SessionFiles;
use nigh_native::lease::Object;
use nigh_types::{NodeId, Place};

/// The regular file to be locked, by the export's number and as what it really is.
pub(crate) fn find(export: &Export, files: &SessionFiles, place: &Place) -> Result<(NodeId, Object)> {
    let node = export.reach().node(place, files)?;
    only_files(&node)?;
    Ok((node.id, node.object))
}
