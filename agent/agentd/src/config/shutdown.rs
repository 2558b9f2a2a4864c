//! When the machine is shut down, and how.

use std::time::Duration;

use super::read::Layers;
use super::{ConfigError, Roles, Setting, Variables, of_tests, values};
use crate::config::schedule::{self, Schedule};

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShutdownSettings {
    /// After how long without anything that keeps it up.
    pub(crate) idle_after: Option<Duration>,
    /// At which times.
    pub(crate) stop_at: Schedule,
    /// A command for the shell.
    pub(crate) run: String,
    /// How long after the command it is expected to be gone.
    pub(crate) gone_within: Duration,
}

const GONE_WITHIN: Duration = Duration::from_secs(300);

impl ShutdownSettings {
    /// Whether it ever is.
    pub(crate) fn is_set(&self) -> bool {
        self.idle_after.is_some() || !self.stop_at.is_empty()
    }

    /// Reads its keys; returns them with their settings.
    pub(super) fn resolve(
        roles: Roles,
        variables: &Variables,
        layers: &Layers,
    ) -> Result<(ShutdownSettings, Vec<Setting>), ConfigError> {
        let [after, at, run] = ["idle_after", "stop_at", "shutdown_run"].map(|key| layers.get(key));
        let settings = ShutdownSettings {
            idle_after: after.parse("a duration such as `30m`, or `off`", |text| match text {
                "off" => Some(None),
                text => values::duration(text).filter(|after| !after.is_zero()).map(Some),
            })?,
            stop_at: at.parse(schedule::EXPECTED, |text| text.parse().ok())?,
            run: run.value.trim().to_owned(),
            gone_within: of_tests(variables, "AGENTD_TEST_SHUTDOWN_GONE", values::duration)
                .unwrap_or(GONE_WITHIN),
        };
        let said = if settings.idle_after.is_some() { &after } else { &at };
        if settings.is_set() && settings.run.is_empty() {
            return Err(
                said.wrong("nothing says how: set `shutdown_run`, for example to `systemctl poweroff`")
            );
        }
        if settings.is_set() && !(roles.controller && roles.node) {
            let problem = "only a machine that is its own controller shuts itself down: of a fleet, pools are \
                           what removes idle machines";
            return Err(said.wrong(problem));
        }
        Ok((settings, vec![after, at, run]))
    }
}
