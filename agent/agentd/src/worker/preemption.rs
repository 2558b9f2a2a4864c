//! Whether this machine will be taken away: what its provider says, and what an operator told the controller.
//!
//! Owns both notices, and the file that keeps the provider's over a restart of the daemon. Hides the metadata services
//! ([`services`]). Runners wait for a notice ([`Preemptions::noticed`]) and end what they run; the reports contain
//! what the provider says.
//!
//! Invariants: a notice that is told again is the same one, with the deadline it had first, also after a restart of
//! the daemon; one that is withdrawn is gone; one whose deadline is long over is not told again in this boot.
//!
//! The task [`Preemptions::watch`] is started by `crate::roles`; where the machine is of no provider, it sleeps.

mod http;
mod services;

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_model::{Boot, Clock, Preemption, causes, failpoint};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::{error, info, warn};

use self::services::{MetadataService, ProviderEvent, When};
use super::backoff::Backoff;
use crate::config::PreemptionSettings;

/// The notices of this machine. Clones share them.
#[derive(Clone)]
pub(crate) struct Preemptions {
    known: watch::Sender<Notices>,
    clock: Arc<dyn Clock>,
    /// How long before a deadline commands are killed.
    margin: Duration,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Notices {
    /// What the provider says.
    found: Option<Preemption>,
    /// What an operator said.
    asked: Option<Preemption>,
}

/// The provider's notice as it is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptNotice {
    /// The boot in which its time counts.
    boot_id: String,
    /// The provider's name of it.
    id: String,
    notice: Preemption,
}

impl Preemptions {
    /// Without any notice.
    pub(crate) fn new(settings: &PreemptionSettings, clock: Arc<dyn Clock>) -> Preemptions {
        Preemptions { known: watch::Sender::default(), clock, margin: settings.margin }
    }

    /// What the provider says.
    pub(crate) fn found(&self) -> Option<Preemption> {
        self.known.borrow().found.clone()
    }

    /// The notice that counts.
    pub(crate) fn notice(&self) -> Option<Preemption> {
        let known = self.known.borrow();
        Preemption::first(known.found.clone(), known.asked.clone())
    }

    /// Changes whenever a notice does.
    pub(crate) fn changes(&self) -> watch::Receiver<impl Sized + use<>> {
        self.known.subscribe()
    }

    /// Returns when there is a notice.
    pub(crate) async fn noticed(&self) -> Preemption {
        let mut changes = self.known.subscribe();
        loop {
            changes.mark_unchanged();
            if let Some(notice) = self.notice() {
                return notice;
            }
            let _ = changes.changed().await; // its sender is here
        }
    }

    /// How long a command that is told now may take to end.
    pub(crate) fn grace(&self, notice: &Preemption) -> Duration {
        notice.grace(self.clock.boot(), self.margin)
    }

    /// Takes in what the controller says an operator said: when, by the clock of this boot, and why.
    pub(crate) fn ask(&self, said: Option<(Boot, String)>) {
        let (wall, boot) = (self.clock.now(), self.clock.boot());
        let asked =
            said.map(|(until, reason)| Preemption { until, deadline: wall + until.since(boot), reason });
        self.known.send_if_modified(|known| replace(&mut known.asked, asked));
    }

    /// Asks the provider of this machine, for as long as the daemon runs. `boot_id` is of this boot.
    pub(crate) async fn watch(self, settings: PreemptionSettings, file: PathBuf, boot_id: String) {
        let mut seen = self.recall(&file, &boot_id, settings.passed);
        let Some(mut service) = MetadataService::find(&settings) else {
            self.publish(None, settings.passed); // of a provider that is not asked any more
            return std::future::pending().await;
        };
        info!(?service, "watching for notices of the provider");
        let (mut backoff, mut failing) = (Backoff::default(), false);
        loop {
            let pause = match service.look().await {
                Ok(event) => {
                    backoff.reset();
                    failing = false;
                    self.hear(event, &mut seen, &file, &boot_id, settings.passed);
                    service.pause()
                }
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        warn!(error = causes::tell(&error), "cannot ask the metadata service: trying again");
                    }
                    backoff.next().max(service.pause())
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// The notice that an earlier process of the daemon knew in this boot, which counts from now on. Called before the
    /// first report too: one without it would say that the notice was withdrawn.
    pub(crate) fn recall(&self, file: &Path, boot_id: &str, passed: Duration) -> Option<KeptNotice> {
        let text = match std::fs::read(file) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) => {
                warn!(file = %file.display(), %error, "cannot read the notice that was known");
                return None;
            }
        };
        let seen = serde_json::from_slice::<KeptNotice>(&text).ok().filter(|seen| seen.boot_id == boot_id);
        self.publish(seen.as_ref(), passed);
        seen
    }

    /// Takes in what the provider says now.
    fn hear(
        &self,
        event: Option<ProviderEvent>,
        seen: &mut Option<KeptNotice>,
        file: &PathBuf,
        boot_id: &str,
        passed: Duration,
    ) {
        let heard = event.map(|event| self.understand(event, seen.as_ref(), boot_id));
        if heard != *seen {
            match &heard {
                Some(KeptNotice { notice, .. }) => warn!(what = notice.describe(), "this machine goes"),
                None => info!("this machine stays: its notice was withdrawn"),
            }
            if let Err(error) = keep(file, heard.as_ref()) {
                error!(file = %file.display(), %error, "cannot keep notice over a restart of the daemon");
            }
            *seen = heard;
        }
        self.publish(seen.as_ref(), passed);
    }

    /// An event as a notice, with the deadline that it had when it was first heard.
    fn understand(&self, event: ProviderEvent, seen: Option<&KeptNotice>, boot_id: &str) -> KeptNotice {
        let (wall, boot) = (self.clock.now(), self.clock.boot());
        let after = match event.when {
            When::At(date) => date.since(wall),
            When::In(after) => after,
        };
        let notice = Preemption { until: boot + after, deadline: wall + after, reason: event.reason };
        let same = seen.filter(|seen| {
            // A date in the past says no more than that it is over, and one that counts from now is always new.
            let over = after.is_zero() || matches!(event.when, When::In(_));
            seen.id == event.id && (over || seen.notice.repeats(&notice))
        });
        same.cloned().unwrap_or(KeptNotice { boot_id: boot_id.to_owned(), id: event.id, notice })
    }

    /// Publishes the provider's notice, unless its deadline is long over and the machine is still here.
    fn publish(&self, seen: Option<&KeptNotice>, passed: Duration) {
        let now = self.clock.boot();
        let found = seen.map(|seen| seen.notice.clone()).filter(|notice| now < notice.until + passed);
        self.known.send_if_modified(|known| {
            let over = found.is_none() && known.found.is_some() && seen.is_some();
            if over {
                info!("this machine is still here after its deadline: it takes jobs again");
            }
            replace(&mut known.found, found)
        });
    }
}

/// Replaces a notice, unless it is only told again; returns whether it did.
fn replace(known: &mut Option<Preemption>, told: Option<Preemption>) -> bool {
    let again = match (&told, &*known) {
        (Some(told), Some(known)) => told.repeats(known),
        (told, known) => told.is_none() && known.is_none(),
    };
    if !again {
        *known = told;
    }
    !again
}

fn keep(file: &PathBuf, seen: Option<&KeptNotice>) -> io::Result<()> {
    failpoint::hit("node.preemption.keep")?;
    match seen {
        Some(seen) => agent_fs::write_whole(file, &serde_json::to_vec(seen).map_err(io::Error::other)?),
        None => match std::fs::remove_file(file) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    }
}

#[cfg(test)]
mod tests {
    use agent_model::{ManualClock, Timestamp};

    use super::*;
    use crate::config::Provider;

    const PASSED: Duration = Duration::from_secs(300);

    struct Machine {
        clock: Arc<ManualClock>,
        preemptions: Preemptions,
        seen: Option<KeptNotice>,
        dir: tempfile::TempDir,
    }

    impl Machine {
        fn new() -> Machine {
            let (clock, dir) = (Arc::new(ManualClock::default()), tempfile::tempdir().unwrap());
            clock.advance(Duration::from_secs(1000));
            let preemptions = Machine::started(&clock);
            Machine { clock, preemptions, seen: None, dir }
        }

        fn started(clock: &Arc<ManualClock>) -> Preemptions {
            let settings = PreemptionSettings {
                provider: Some(Some(Provider::Aws)),
                endpoint: (String::new(), 0),
                margin: Duration::from_secs(15),
                passed: PASSED,
            };
            Preemptions::new(&settings, Arc::clone(clock) as _)
        }

        fn hear(&mut self, event: Option<(&str, When)>) -> Option<u64> {
            let event =
                event.map(|(id, when)| ProviderEvent { id: id.into(), when, reason: "reclaimed".into() });
            let file = self.dir.path().join("preemption.json");
            self.preemptions.hear(event, &mut self.seen, &file, "boot", PASSED);
            self.preemptions.found().map(|found| found.deadline.0 / 1000)
        }

        /// A restart of the daemon.
        fn restart(&mut self, boot: &str) {
            self.preemptions = Machine::started(&self.clock);
            self.seen = self.preemptions.recall(&self.dir.path().join("preemption.json"), boot, PASSED);
        }

        fn wait(&self, seconds: u64) {
            self.clock.advance(Duration::from_secs(seconds));
        }
    }

    #[test]
    fn test_a_repeated_notice_keeps_its_deadline_also_over_a_restart() {
        let mut machine = Machine::new();
        let soon = || Some(("p", When::In(Duration::from_secs(30))));
        assert_eq!(machine.hear(soon()), Some(1030));
        machine.wait(10);
        assert_eq!(machine.hear(soon()), Some(1030));
        machine.restart("boot");
        assert_eq!(machine.preemptions.notice().map(|notice| notice.deadline), Some(Timestamp(1_030_000)));
        assert_eq!(machine.hear(soon()), Some(1030));
        machine.restart("another boot");
        assert_eq!(machine.preemptions.notice(), None, "the clock of that boot is over");
    }

    #[test]
    fn test_a_notice_is_withdrawn_moved_or_passes() {
        let mut machine = Machine::new();
        let at = |seconds: u64| Some(("p", When::At(Timestamp(seconds * 1000))));
        assert_eq!(machine.hear(at(1120)), Some(1120));
        assert_eq!(machine.hear(at(1060)), Some(1060), "it comes sooner");
        assert_eq!(machine.hear(None), None, "it is withdrawn");
        assert!(!machine.dir.path().join("preemption.json").exists());
        assert_eq!(machine.hear(at(1060)), Some(1060));
        machine.wait(359);
        assert_eq!(machine.hear(at(1060)), Some(1060), "it may still go");
        machine.wait(1);
        assert_eq!(machine.hear(at(1060)), None, "it is still here");
        machine.restart("boot");
        assert_eq!((machine.preemptions.notice(), machine.hear(at(1060))), (None, None));
        assert_eq!(machine.hear(Some(("q", When::In(Duration::from_secs(30))))), Some(1390), "another one");
    }

    #[tokio::test]
    async fn test_the_first_of_two_notices_counts() {
        let mut machine = Machine::new();
        let waits = machine.preemptions.clone();
        let heard = async {
            machine.hear(Some(("p", When::In(Duration::from_secs(120)))));
        };
        let (noticed, ()) = tokio::join!(waits.noticed(), heard);
        assert_eq!(noticed.deadline, Timestamp(1_120_000));
        machine.preemptions.ask(Some((Boot(Duration::from_secs(1060)), "maintenance".into())));
        let notice = machine.preemptions.notice().unwrap();
        assert_eq!((notice.deadline, notice.reason.as_str()), (Timestamp(1_060_000), "maintenance"));
        assert_eq!(machine.preemptions.grace(&notice), Duration::from_secs(45));
        machine.preemptions.ask(None);
        assert_eq!(machine.preemptions.notice().unwrap().reason, "reclaimed");
    }
}
