//! Group B: logs and metrics arrive whole.

use crate::row::Row;

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[];
