//! Group D: snapshots, environments and artifacts.

use crate::row::Row;

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[];
