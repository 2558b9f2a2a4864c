//! What is kept of jobs, and for how long.

use std::time::Duration;

use super::read::Layers;
use super::{ConfigError, Setting, values};

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeepSettings {
    /// How long the directory of an ended job stays on the node.
    pub(crate) jobs: Duration,
    /// Of the controller: how long ended jobs are on record; `None` is until somebody removes them.
    pub(crate) records: Option<Duration>,
    /// How much of the disk the log of a job may take until the controller has it, in bytes; its metrics, a quarter.
    pub(crate) log_quota: u64,
    /// Of the controller: how much of each log of a job it keeps, in bytes; of its metrics, a quarter.
    pub(crate) archive_quota: u64,
}

impl KeepSettings {
    /// Reads its keys; returns them with their settings.
    pub(super) fn resolve(layers: &Layers) -> Result<(KeepSettings, Vec<Setting>), ConfigError> {
        const SIZE: &str = "a size such as `500MiB` or `2GB`";
        let [jobs, records, log_quota, archive_quota] =
            layers.all(["keep_jobs", "keep_records", "log_quota", "archive_quota"]);
        let settings = KeepSettings {
            jobs: jobs.parse("a duration such as `30s`, `10m`, `2h` or `7d`", values::duration)?,
            records: records.parse("`forever`, or a duration of an hour or more", forever_or)?,
            log_quota: log_quota.parse(SIZE, values::size)?,
            archive_quota: archive_quota.parse(SIZE, values::size)?,
        };
        Ok((settings, vec![jobs, records, log_quota, archive_quota]))
    }
}

/// `Some(None)` is without an end. A slip of the unit must not remove everything.
fn forever_or(text: &str) -> Option<Option<Duration>> {
    match text {
        "forever" => Some(None),
        text => values::duration(text).filter(|keep| *keep >= Duration::from_secs(3600)).map(Some),
    }
}
