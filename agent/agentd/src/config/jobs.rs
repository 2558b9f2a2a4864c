//! Which users jobs run as, and how jobs are isolated from each other and from the machine.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use agent_model::protocol::record::JobUser;

use super::read::Layers;
use super::{ConfigError, Setting, Share, people, values};

/// Which user a job runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RunAs {
    /// The user who submitted the job, by the account on this machine; without one, as [`PerRun`](RunAs::PerRun).
    Owner,
    /// A separate user for each job, out of [`JobSettings::uids`].
    PerRun,
    /// The daemon's own user.
    Daemon,
    /// One user of the machine.
    Named(JobUser),
}

/// How jobs are isolated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JobSettings {
    pub(crate) user: RunAs,
    /// User ids that no account has: the first is for builders, the others are for jobs.
    pub(crate) uids: RangeInclusive<u32>,
    /// Whether jobs that root submits run as root; when absent, it depends on who else may submit.
    pub(crate) root: Option<bool>,
    /// The socket of the helper, which does what only root can; when absent, the daemon does it itself.
    pub(crate) helper: Option<PathBuf>,
    /// Each job has a `/tmp` and a `/dev/shm` of its own, and sees only its own processes.
    pub(crate) private: bool,
    /// Each job can change its environment without changing it for others, and sees nothing of the state of a user's own
    /// daemon.
    pub(crate) view: bool,
    /// The memory limit of a job that sets none, as a part of the machine's; 0 is no limit.
    pub(crate) memory: Share,
    /// Jobs may use the cloud's metadata service, which gives the machine's identity.
    pub(crate) metadata: bool,
    /// How often a running job that resumes its outputs has them stored.
    pub(crate) outputs_every: Duration,
}

const RANGE: &str = "two numbers such as `2000000000-2000065535`, from 100000 on, 100 at least";

impl JobSettings {
    /// Reads its keys; returns them with their settings. `own` is for a user's own daemon.
    pub(super) fn resolve(layers: &Layers, own: bool) -> Result<(JobSettings, Vec<Setting>), ConfigError> {
        let [user, uids, root] = ["job_user", "job_uids", "root_jobs"].map(|key| layers.get(key));
        let [view, memory] = ["private_view", "job_memory"].map(|key| layers.get(key));
        // Mounts that others must not see need rights that a daemon of one's own has not.
        let cannot = own && !rustix::process::geteuid().is_root();
        let private =
            if cannot { layers.or("private_tmp", || "false".to_owned()) } else { layers.get("private_tmp") };
        let [metadata, helper, every] =
            ["allow_metadata", "spawn_socket", "outputs_every"].map(|key| layers.get(key));
        let usual = if own { RunAs::Daemon } else { RunAs::Owner };
        let yes = |text: &str| values::word(text, &[("true", true), ("false", false)]);
        let settings = JobSettings {
            user: user.parse("`owner`, `per-run`, `daemon` or a user of this machine", |text| {
                run_as(text, &usual)
            })?,
            uids: uids.parse(RANGE, range)?,
            root: root.parse("`true` or `false`, or nothing", |text| match text {
                "" => Some(None),
                text => yes(text).map(Some),
            })?,
            helper: helper.parse("an absolute path, or nothing", values::path_or_none)?,
            private: match cannot {
                true => private.parse("`false`, or no value: a daemon of your own cannot do it", |text| {
                    values::word(text, &[("false", false)])
                })?,
                false => private.parse("`true` or `false`", yes)?,
            },
            view: view.parse("`true` or `false`", yes)?,
            memory: memory.parse("a size such as `8GiB`, a part such as `90%`, or 0", values::share)?,
            metadata: metadata.parse("`true` or `false`", yes)?,
            outputs_every: every.parse("a duration such as `30s`, `10m` or `2h`", values::duration)?,
        };
        Ok((settings, vec![user, uids, root, helper, private, view, memory, metadata, every]))
    }
}

fn run_as(text: &str, usual: &RunAs) -> Option<RunAs> {
    match text {
        "" => Some(usual.clone()),
        "owner" => Some(RunAs::Owner),
        "per-run" => Some(RunAs::PerRun),
        "daemon" => Some(RunAs::Daemon),
        name => people::job_user(name)?.map(RunAs::Named),
    }
}

/// User ids that no account has by chance; enough of them that one is reused only after a long time.
fn range(text: &str) -> Option<RangeInclusive<u32>> {
    let (first, last) = text.split_once('-')?;
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    // To the kernel, the largest id means no user.
    (first >= 100_000 && last < u32::MAX && last >= first + 99).then_some(first..=last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_words_and_numbers() {
        assert_eq!(run_as("", &RunAs::Owner), Some(RunAs::Owner));
        assert_eq!(run_as("per-run", &RunAs::Daemon), Some(RunAs::PerRun));
        assert!(matches!(run_as("root", &RunAs::Owner), Some(RunAs::Named(user)) if user.uid == 0));
        assert_eq!(run_as("no-such-user", &RunAs::Owner), None);
        assert_eq!(range("2000000000-2000065535"), Some(2_000_000_000..=2_000_065_535));
        for odd in ["", "1000-2000", "200000", "200000-200010", "200000-4294967295", "9-x"] {
            assert_eq!(range(odd), None, "{odd}");
        }
    }
}
