//! Runs the helper process that asks the GPU driver, with a deadline.
//!
//! Invariants: the driver's library is never loaded into this process; a look ends within its deadline whatever the
//! driver does; a helper that cannot be killed (the driver holds it in the kernel) is left alone, and no second one
//! is started until it has ended; where there was no driver, none is started before the kernel shows a trace of one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use agent_command::{Command, CommandError, Leash};
use agent_model::gpu::{Driver, Look};
use agent_model::{causes, failpoint};
use agent_node::gpu;
use tracing::warn;

use crate::config::Config;

/// How long a look may take.
const WITHIN: Duration = Duration::from_secs(10);
/// How much of its standard error is kept, in bytes.
const COMPLAINT: usize = 4 << 10;

/// Looks at the GPUs through a helper process.
#[derive(Debug)]
pub(crate) struct Looker {
    program: PathBuf,
    args: Vec<OsString>,
    within: Duration,
    leash: Leash,
    /// Where the kernel shows that there is a driver; empty for a library that somebody named.
    traces: &'static [&'static str],
    /// There was no driver at the last look.
    absent: AtomicBool,
}

impl Looker {
    /// The helper is this program itself.
    pub(crate) fn new(config: &Config) -> Looker {
        // Always passed: the helper must not read a configuration that was changed since.
        let library = config.devices.nvml_library.as_deref().unwrap_or(Path::new(gpu::LIBRARY));
        let own = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("/proc/self/exe"));
        let args = ["gpu-look".into(), "--library".into(), library.into()];
        let traces = if config.devices.nvml_library.is_none() { gpu::TRACES } else { &[] };
        let (leash, absent) = (Leash::default(), AtomicBool::new(false));
        Looker { program: own, args: args.into(), within: WITHIN, leash, traces, absent }
    }

    /// The current answer of the driver.
    pub(super) async fn look(&self) -> Look {
        let nothing = |driver| Look { driver, gpus: Vec::new() };
        // Most machines have no GPU, and need no process each minute to say so.
        let knows = self.absent.load(Ordering::Relaxed) && !self.traces.is_empty();
        if knows && !self.traces.iter().any(|trace| Path::new(trace).exists()) {
            return nothing(Driver::Absent);
        }
        let look = self.ask().await.unwrap_or_else(nothing);
        self.absent.store(look.driver == Driver::Absent, Ordering::Relaxed);
        look
    }

    async fn ask(&self) -> Result<Look, Driver> {
        let failed = |detail: String| Driver::Failed { detail };
        let hung = || Driver::Hung { after_s: self.within.as_secs() };
        if !self.leash.is_gone() {
            return Err(hung());
        }
        failpoint::hit("node.gpu.look").map_err(|error| failed(error.to_string()))?;
        let (mut printed, mut complaint) = (Vec::new(), Vec::new());
        let command = Command::new(&self.program).args(&self.args).stall(self.within).leash(&self.leash);
        let talk = command.talk(
            |bytes| printed.extend_from_slice(&bytes[..bytes.len().min(gpu::LONGEST + 1 - printed.len())]),
            |bytes| complaint.extend_from_slice(&bytes[..bytes.len().min(COMPLAINT - complaint.len())]),
        );
        let status = match tokio::time::timeout(self.within, talk).await {
            Err(_) | Ok(Err(CommandError::Stalled { .. })) => {
                warn!(within = ?self.within, "cannot reach GPU driver");
                return Err(hung());
            }
            Ok(Err(error)) => return Err(failed(causes::tell(&error))),
            Ok(Ok(status)) => status,
        };
        if !status.success() {
            let text = String::from_utf8_lossy(&complaint);
            let last: String = text.trim().lines().next_back().unwrap_or_default().to_owned();
            let last: String = last.chars().filter(|c| !c.is_control()).collect();
            return Err(failed(format!("the helper ended with {status}: {last}")));
        }
        gpu::parse(&printed).map_err(|error| failed(causes::tell(&error)))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A helper that is this script.
    pub(in crate::worker) fn scripted(dir: &Path, script: &str, within: Duration) -> Looker {
        let program = dir.join("look.sh");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let (leash, absent) = (Leash::default(), AtomicBool::new(false));
        Looker { program, args: Vec::new(), within, leash, traces: &[], absent }
    }

    async fn driver(script: &str, within: Duration) -> Driver {
        let dir = tempfile::tempdir().unwrap();
        scripted(dir.path(), script, within).look().await.driver
    }

    const LONG: Duration = Duration::from_secs(120);

    #[tokio::test]
    async fn test_every_way_in_which_a_helper_fails_is_a_state() {
        let works = r#"echo '{"driver": {"state": "works", "version": "1", "cuda": "2"}, "gpus": []}'"#;
        let version = Driver::Works { version: "1".into(), cuda: "2".into() };
        assert_eq!(driver(works, LONG).await, version);
        for (script, said) in [
            ("echo oops >&2; exit 3", "oops"),
            ("kill -9 $$", "signal: 9"),
            ("echo '{\"driver\": 7'", "cannot be read"),
            (
                "head -c 3000000 /bin/sh /bin/sh /bin/sh /bin/sh /bin/sh /bin/sh /bin/sh /bin/sh /bin/sh /bin/sh",
                "more than",
            ),
            ("head -c 100000 /dev/zero >&2; exit 1", "exit status: 1"),
        ] {
            let Driver::Failed { detail } = driver(script, LONG).await else { panic!("{script}") };
            assert!(detail.contains(said), "{script}: {detail}");
        }
        let dir = tempfile::tempdir().unwrap();
        let gone = Looker { program: "/nowhere".into(), ..scripted(dir.path(), "", LONG) };
        assert!(matches!(gone.look().await.driver, Driver::Failed { .. }));
    }

    #[tokio::test]
    async fn test_no_helper_is_started_for_a_driver_that_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let starts = dir.path().join("starts");
        let script = |state: &str| {
            let answer = format!("{{\"driver\": {{\"state\": \"{state}\"}}, \"gpus\": []}}");
            scripted(dir.path(), &format!("echo x >> {}; echo '{answer}'", starts.display()), LONG)
        };
        let started = || fs::read_to_string(&starts).unwrap().lines().count();
        let absent = Looker { traces: &["/nowhere/nvidiactl"], ..script("absent") };
        for _ in 0..3 {
            assert_eq!(absent.look().await.driver, Driver::Absent);
        }
        assert_eq!(started(), 1);
        // The kernel shows one now; and one that is there is always asked.
        let shown = Looker { traces: &["/nowhere", "/proc"], ..absent };
        shown.look().await;
        assert_eq!(started(), 2);
        let unloaded = Looker { traces: &["/nowhere"], ..script("not_loaded") };
        for _ in 0..2 {
            assert_eq!(unloaded.look().await.driver, Driver::NotLoaded);
        }
        assert_eq!(started(), 4);
    }

    #[tokio::test]
    async fn test_helper_that_hangs_is_given_up_and_another_is_started_once_it_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let (pids, go) = (dir.path().join("pids"), dir.path().join("go"));
        let script = format!(
            "echo $$ >> {}; [ -e {} ] && exec echo '{{\"driver\": {{\"state\": \"not_loaded\"}}, \"gpus\": []}}'; sleep 1000",
            pids.display(),
            go.display()
        );
        let looker = scripted(dir.path(), &script, Duration::from_secs(1));
        assert_eq!(looker.look().await.driver, Driver::Hung { after_s: 1 });
        fs::write(&go, "").unwrap();
        let end = tokio::time::Instant::now() + LONG;
        let patient = Looker { within: LONG, ..looker };
        while !matches!(patient.look().await.driver, Driver::NotLoaded) {
            assert!(tokio::time::Instant::now() < end, "the helper that was killed is never gone");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn test_no_second_helper_is_started_beside_one_that_stays() {
        let dir = tempfile::tempdir().unwrap();
        let starts = dir.path().join("starts");
        let looker = scripted(dir.path(), &format!("echo x >> {}; sleep 1000", starts.display()), LONG);
        let mut first = Box::pin(looker.look());
        // While the first runs, like one that cannot be killed, all other looks fail at once.
        let end = tokio::time::Instant::now() + LONG;
        while !starts.exists() {
            assert!(tokio::time::Instant::now() < end, "the helper never starts");
            let _ = tokio::time::timeout(Duration::from_millis(10), &mut first).await;
        }
        for _ in 0..3 {
            assert!(matches!(looker.look().await.driver, Driver::Hung { .. }));
        }
        assert_eq!(fs::read_to_string(&starts).unwrap().lines().count(), 1);
    }
}
