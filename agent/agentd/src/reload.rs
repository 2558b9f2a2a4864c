//! Reloads the configuration on SIGHUP, without a restart.
//!
//! Keys that may change while the daemon runs are applied; the others are logged as changes for the next start. An
//! invalid configuration changes nothing. Jobs outlive a restart, so only keys that are needed without one are
//! applied: [`LIVE`].

use tracing::{info, warn};
use tracing_subscriber::Registry;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::reload::Handle;

use crate::cli::Flags;
use crate::config::{Config, Setting, Variables};

/// The keys that are applied.
const LIVE: [&str; 1] = ["log"];

/// The filter of the log, which can change while the daemon runs.
pub(crate) type LogFilter = Handle<Targets, Registry>;

/// See the module.
pub(crate) struct Reloader {
    flags: Flags,
    log: LogFilter,
    /// The settings in effect.
    settings: Vec<Setting>,
}

impl Reloader {
    /// For a daemon that was started with these.
    pub(crate) fn new(flags: Flags, log: LogFilter, config: &Config) -> Reloader {
        Reloader { flags, log, settings: config.settings.clone() }
    }

    /// Reads the configuration again, applies it and logs the result.
    pub(crate) fn reload(&mut self) {
        let new = match Config::resolve(&self.flags, &Variables::of_process()) {
            Ok(new) => new,
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                warn!(error, "cannot read configuration anew: everything stays as it was");
                return;
            }
        };
        let changed = changed(&self.settings, &new.settings);
        let live = &changed.live;
        if live.contains(&"log") {
            // It was checked with the configuration.
            let filter = new.log.parse::<Targets>().unwrap_or_default();
            if let Err(error) = self.log.reload(filter) {
                warn!(%error, "cannot change what is logged");
            }
        }
        // Changes that need a restart are logged again the next time.
        self.settings.retain(|setting| !live.contains(&setting.key));
        self.settings.extend(new.settings.into_iter().filter(|setting| live.contains(&setting.key)));
        changed.tell();
    }
}

/// The keys whose values changed.
#[derive(Debug, PartialEq, Eq)]
struct Changed {
    /// Applied at once.
    live: Vec<&'static str>,
    /// Applied at the next start.
    restart: Vec<&'static str>,
}

impl Changed {
    fn tell(&self) {
        let (changed, after_restart) = (self.live.join(", "), self.restart.join(", "));
        if after_restart.is_empty() {
            return info!(changed, "read configuration anew");
        }
        warn!(
            changed,
            after_restart,
            "read configuration anew: some of it counts from the next start on, which jobs outlive"
        );
    }
}

fn changed(old: &[Setting], new: &[Setting]) -> Changed {
    let differs = |new: &&Setting| old.iter().all(|old| old.key != new.key || old.value != new.value);
    let keys = new.iter().filter(differs).map(|setting| setting.key);
    let (live, restart) = keys.partition(|key| LIVE.contains(key));
    Changed { live, restart }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Origin;

    #[test]
    fn test_only_what_is_said_otherwise_counts_and_most_of_it_after_a_restart() {
        let said = |log: &str, slots: &str, origin| {
            [("log", log), ("slots", slots)].map(|(key, value)| Setting {
                key,
                value: value.to_owned(),
                origin: Origin::Flag(origin),
            })
        };
        let old = said("info", "2", "--a");
        for (log, slots, live, restart) in [
            ("info", "2", &[][..], &[][..]),
            ("debug", "2", &["log"], &[]),
            ("info", "3", &[], &["slots"]),
            ("debug", "3", &["log"], &["slots"]),
        ] {
            let expected = Changed { live: live.into(), restart: restart.into() };
            assert_eq!(changed(&old, &said(log, slots, "--b")), expected);
        }
    }
}
