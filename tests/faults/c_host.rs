//! Group C: processes and the host.

use crate::row::Row;

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[];
