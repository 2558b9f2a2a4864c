//! Named places at which a test makes a program fail; they exist in debug builds alone.
//!
//! `AGENTD_FAILPOINTS` is a list such as `journal.enter=kill@3,shim.log.write=errno:28`: a name of
//! [`NAMES`], an action, and optionally from which visit on (`@3`: the third) or at which alone (`=3`).
//!
//! | Action | Does |
//! |---|---|
//! | `error` | the operation fails without being tried |
//! | `errno:N` | it fails with the system's error N, for example 28 for a full disk |
//! | `panic` | the thread panics |
//! | `kill` | the process dies at once, as by SIGKILL |
//! | `delay:MS` | the thread sleeps so many milliseconds first |
//!
//! With the entry `trace=FILE` every failure is logged to that file, for the test that planned it.
//!
//! Every write, sync, spawn, call and start of a transaction that the guarantees depend on has one; a test of
//! the repository compares [`NAMES`] with the code.

use std::io;

/// The variable that plans failures.
pub const VARIABLE: &str = "AGENTD_FAILPOINTS";

/// Every name, in the order of the programs and modules that visit them.
pub const NAMES: &[&str] = &[
    "control.archive.create",
    "control.archive.rename",
    "control.archive.sync",
    "control.archive.write",
    "control.ballast.fill",
    "control.commit",
    "control.redo.begin",
    "control.redo.write",
    "control.salvage.fill",
    "control.salvage.keep",
    "control.salvage.rename",
    "control.store.back",
    "control.store.commit",
    "control.store.name",
    "control.store.suspect",
    "node.append.open",
    "node.append.send",
    "node.artifact.write",
    "node.retention.remove",
    "node.retention.sweep",
    "node.retention.write",
    "node.ballast.fill",
    "node.container.create",
    "node.container.list",
    "node.container.look",
    "node.container.remove",
    "node.container.start",
    "node.container.write",
    "node.gpu.look",
    "node.journal.aside",
    "node.journal.done",
    "node.journal.enter",
    "node.log.read",
    "node.log.trim",
    "node.order.write",
    "node.system.write",
    "node.outcome.deliver",
    "node.outputs.collect",
    "node.outputs.copy",
    "node.preemption.keep",
    "node.preemption.tell",
    "node.shim.ask",
    "node.sync.open",
    "node.tracking.sync",
    "node.tracking.write",
    "node.upkeep.look",
    "cas.blob.create",
    "cas.blob.evict",
    "cas.blob.quarantine",
    "cas.blob.rename",
    "cas.blob.sync",
    "cas.blob.write",
    "cas.directory.sync",
    "cas.segment.append",
    "cas.segment.copy",
    "cas.segment.create",
    "cas.segment.cut",
    "cas.segment.note",
    "cas.segment.sync",
    "cas.segment.unlink",
    "cas.prestaged.take",
    "cas.tree.rename",
    "cas.tree.write",
    "cas.uses.write",
    "env.build.spawn",
    "env.data.keep",
    "env.data.remove",
    "env.data.spawn",
    "env.data.upload",
    "env.image.build",
    "env.image.note",
    "env.image.pull",
    "env.image.record",
    "env.image.remove",
    "env.lock.write",
    "env.place.make",
    "env.place.move",
    "env.place.wipe",
    "env.ready.done",
    "env.ready.rename",
    "env.ready.sync",
    "env.ready.write",
    "env.requirements.write",
    "shim.cgroup.kill",
    "shim.cgroup.limit",
    "shim.cgroup.make",
    "shim.cgroup.remove",
    "shim.dir.sync",
    "shim.exec",
    "shim.exit.rename",
    "shim.exit.reserve",
    "shim.exit.sync",
    "shim.exit.write",
    "shim.hello.write",
    "shim.launch.write",
    "shim.log.again",
    "shim.log.open",
    "shim.log.prepare",
    "shim.log.reserve",
    "shim.log.sync",
    "shim.log.write",
    "shim.socket.answer",
    "shim.socket.listen",
    "shim.spawn",
    "shim.started.written",
    "shim.started.write",
];

/// The plan for this process, to be passed to one it starts with an environment of its own. Never in a release
/// build.
pub fn plan() -> Option<std::ffi::OsString> {
    #[allow(clippy::disallowed_methods, reason = "it exists for tests alone and configures nothing")]
    if cfg!(debug_assertions) { std::env::var_os(VARIABLE) } else { None }
}

/// Visits the failpoint `name`; an error replaces the operation that would have followed.
#[cfg(not(debug_assertions))]
#[inline]
pub fn hit(_name: &'static str) -> io::Result<()> {
    Ok(())
}

/// Visits the failpoint `name`; an error replaces the operation that would have followed.
#[cfg(debug_assertions)]
pub fn hit(name: &'static str) -> io::Result<()> {
    debug::plans().iter().filter(|plan| plan.name == name).try_for_each(debug::Plan::visit)
}

#[cfg(debug_assertions)]
mod debug {
    use std::io::{self, Write};
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    /// One entry of the variable.
    #[derive(Debug)]
    pub(super) struct Plan {
        pub(super) name: String,
        action: Action,
        from: u64,
        to: u64,
        visits: AtomicU64,
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Action {
        Error,
        Errno(i32),
        Panic,
        Kill,
        Delay(Duration),
    }

    pub(super) fn plans() -> &'static [Plan] {
        static PLANS: OnceLock<Vec<Plan>> = OnceLock::new();
        PLANS.get_or_init(|| {
            let text = planned();
            let parse = |entry: &str| {
                #[allow(clippy::panic, reason = "a mistyped plan would be a test that tests nothing")]
                Plan::parse(entry).unwrap_or_else(|| panic!("`{entry}` is not a failpoint plan"))
            };
            let entries = text.split(',').filter(|entry| !entry.is_empty());
            entries.filter(|entry| !entry.starts_with(TRACE)).map(parse).collect()
        })
    }

    const TRACE: &str = "trace=";

    #[allow(clippy::disallowed_methods, reason = "the only look at the variable there is")]
    fn planned() -> String {
        std::env::var(super::VARIABLE).unwrap_or_default()
    }

    /// Logs a failure for the test, if it asked for that.
    fn trace(name: &str) {
        static FILE: OnceLock<Option<String>> = OnceLock::new();
        let find = || planned().split(',').find_map(|entry| entry.strip_prefix(TRACE).map(str::to_owned));
        if let Some(path) = FILE.get_or_init(find) {
            let open = std::fs::File::options().append(true).create(true).open(path);
            let _ = open.and_then(|mut file| file.write_all(format!("{name}\n").as_bytes()));
        }
    }

    impl Plan {
        pub(super) fn parse(entry: &str) -> Option<Plan> {
            let (name, rest) = entry.split_once('=')?;
            let (action, from, to) = match (rest.split_once('@'), rest.split_once('=')) {
                (Some((action, from)), _) => (action, from.parse().ok()?, u64::MAX),
                (None, Some((action, only))) => (action, only.parse().ok()?, only.parse().ok()?),
                (None, None) => (rest, 1, u64::MAX),
            };
            let action = match action.split_once(':') {
                Some(("errno", number)) => Action::Errno(number.parse().ok()?),
                Some(("delay", millis)) => Action::Delay(Duration::from_millis(millis.parse().ok()?)),
                None if action == "error" => Action::Error,
                None if action == "panic" => Action::Panic,
                None if action == "kill" => Action::Kill,
                _ => return None,
            };
            Some(Plan { name: name.to_owned(), action, from, to, visits: AtomicU64::new(0) })
        }

        #[allow(clippy::panic, reason = "that is what was asked for")]
        pub(super) fn visit(&self) -> io::Result<()> {
            let visit = self.visits.fetch_add(1, Ordering::Relaxed) + 1;
            if !(self.from..=self.to).contains(&visit) {
                return Ok(());
            }
            trace(&self.name);
            match self.action {
                Action::Error => Err(io::Error::other(format!("failpoint {}", self.name))),
                Action::Errno(number) => Err(io::Error::from_raw_os_error(number)),
                Action::Panic => panic!("failpoint {}", self.name),
                Action::Kill => {
                    let this = rustix::process::getpid();
                    let _ = rustix::process::kill_process(this, rustix::process::Signal::KILL);
                    unreachable!("nobody survives SIGKILL")
                }
                Action::Delay(pause) => {
                    std::thread::sleep(pause);
                    Ok(())
                }
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn test_plans_say_what_happens_and_when() {
            let plan = Plan::parse("journal.enter=errno:28@2").unwrap();
            assert!(plan.visit().is_ok());
            assert_eq!(plan.visit().unwrap_err().raw_os_error(), Some(28));
            assert_eq!(plan.visit().unwrap_err().raw_os_error(), Some(28));
            let once = Plan::parse("a=error=1").unwrap();
            assert!(once.visit().is_err() && once.visit().is_ok());
            assert_eq!(Plan::parse("a=delay:5").unwrap().action, Action::Delay(Duration::from_millis(5)));
            assert!(Plan::parse("a").is_none() && Plan::parse("a=explode").is_none());
        }
    }
}
