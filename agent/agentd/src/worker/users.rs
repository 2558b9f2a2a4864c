//! Which user a job runs as: the account of its owner, or a uid that nobody else has.
//!
//! Owns the uids for per-run users. One is reused only when its run is over, its directory is removed and no process
//! has it, and in turn; those in use are found in the journal, the directories and `/proc`, so a restart forgets
//! none.
//!
//! [`choose`] is pure; [`Users::take`] reads the state of the machine.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_model::protocol::record::{JobUser, Record};
use agent_model::{Code, Fault, Principal, ReplicaId};
use agent_runtime::env::{Builder, OwnerBuilders};
use agent_shim::JobDir;
use parking_lot::Mutex;
use tracing::warn;

use crate::config::{Config, RunAs, is_user, user_of};

/// Which user a job is to run as.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Choice {
    /// The daemon's own user.
    Daemon,
    /// A user with an account.
    Account(JobUser),
    /// A uid of its own.
    OfItsOwn,
    /// Root, which is not allowed.
    Root,
}

/// What the choice depends on.
struct Policy<'a> {
    user: &'a RunAs,
    /// The daemon can start processes as other users.
    is_root: bool,
    /// Jobs may run as root.
    allows_root: bool,
    /// The controller's machine is this one, so that it has the same users.
    knows_owners: bool,
}

fn choose(
    policy: &Policy<'_>,
    owner: Option<&Principal>,
    account: impl FnOnce(u32) -> Option<JobUser>,
) -> Choice {
    match (policy.user, owner) {
        (_, _) if !policy.is_root => Choice::Daemon,
        (RunAs::Daemon, _) => Choice::Daemon,
        (RunAs::Named(user), _) => Choice::Account(user.clone()),
        (RunAs::PerRun, _) => Choice::OfItsOwn,
        (RunAs::Owner, Some(_)) if !policy.knows_owners => Choice::OfItsOwn,
        (RunAs::Owner, Some(Principal::Local { uid: 0 })) => {
            if policy.allows_root {
                Choice::Daemon
            } else {
                Choice::Root
            }
        }
        (RunAs::Owner, Some(Principal::Local { uid })) => {
            account(*uid).map_or(Choice::OfItsOwn, Choice::Account)
        }
        // A user of the fleet has no account here, whatever its name is.
        (RunAs::Owner, Some(Principal::User { .. } | Principal::Node { .. })) => Choice::OfItsOwn,
        // Where only root has jobs, a job without a recorded owner is root's.
        (RunAs::Owner, None) => {
            if policy.allows_root {
                Choice::Daemon
            } else {
                Choice::OfItsOwn
            }
        }
    }
}

/// Gives jobs their users. Clones share the uids.
#[derive(Debug, Clone)]
pub(crate) struct Users {
    uids: RangeInclusive<u32>,
    jobs: PathBuf,
    given: Arc<Mutex<Given>>,
}

#[derive(Debug, Default)]
struct Given {
    held: BTreeMap<ReplicaId, u32>,
    last: Option<u32>,
}

impl Users {
    /// Of the node whose job directories are in `jobs`, with the replicas of an earlier process.
    pub(crate) fn new(config: &Config, jobs: PathBuf, found: &[Record]) -> Users {
        let users = Users { uids: runs(config), jobs, given: Arc::default() };
        {
            let mut given = users.given.lock();
            let held =
                found.iter().filter_map(|record| Some((record.replica.clone(), record.user.as_ref()?.uid)));
            given.held = held.filter(|(_, uid)| users.uids.contains(uid)).collect();
            given.last = given.held.values().copied().chain(users.of_directories()).max();
        }
        users
    }

    /// The user of the job of this record on the machine itself; `None` is the daemon's own user. If the record has
    /// one, it is returned. Blocking: asks the system for the account.
    pub(crate) fn user(&self, config: &Config, record: &Record) -> Result<Option<JobUser>, Fault> {
        if let Some(user) = &record.user {
            return Ok(Some(user.clone()));
        }
        let policy = Policy {
            user: &config.jobs.user,
            is_root: agent_spawn::serves_others(),
            allows_root: config.runs_as_root(),
            knows_owners: config.knows_owners(),
        };
        let owner = record.spec.owner.as_ref();
        match choose(&policy, owner, account) {
            Choice::Daemon if !agent_spawn::has_helper() => Ok(None),
            // With a helper, no job runs as the daemon's own user.
            Choice::Daemon if policy.allows_root && is_roots(record) => Ok(account(0)),
            Choice::Daemon => self.take(&record.replica, owner).map(Some),
            Choice::Account(user) => Ok(Some(user)),
            Choice::OfItsOwn => self.take(&record.replica, owner).map(Some),
            Choice::Root => Err(refused_root()),
        }
    }

    /// A user that nobody else has. Blocking: reads the uid of every process.
    fn take(&self, replica: &ReplicaId, owner: Option<&Principal>) -> Result<JobUser, Fault> {
        if !are_here(&self.uids, &uid_map()) {
            return Err(Fault::new(
                Code::LaunchFailed,
                "the job is to run as a user that this machine cannot have",
            )
            .why(format!("{} to {} are not all among its numbers", self.uids.start(), self.uids.end()))
            .fix("configure `job_uids` with numbers that `/proc/self/uid_map` names"));
        }
        let mut given = self.given.lock();
        let taken: BTreeSet<u32> =
            given.held.values().copied().chain(self.of_directories()).chain(of_processes()).collect();
        let uid = next(&self.uids, given.last, &taken).ok_or_else(|| {
            Fault::new(Code::LaunchFailed, "no user is free for the job")
                .why(format!("each of {} to {} has a run or files", self.uids.start(), self.uids.end()))
                .fix("configure more `job_uids`, or let directories of ended jobs go: `keep_jobs`")
        })?;
        given.last = Some(uid);
        given.held.insert(replica.clone(), uid);
        // Somebody of the fleet is called in the job as he is there, unless that is somebody of this machine.
        let name = match owner {
            Some(Principal::User { name }) if !is_user(name.as_str()) => name.to_string(),
            _ => format!("job-{uid}"),
        };
        Ok(JobUser { name, uid, gid: uid, groups: Vec::new(), home: String::new() })
    }

    /// Releases the uid of an ended replica; if its directory is kept, the uid stays in use.
    pub(crate) fn give_back(&self, replica: &ReplicaId) {
        self.given.lock().held.remove(replica);
    }

    /// The uids that job directories belong to.
    fn of_directories(&self) -> Vec<u32> {
        let entries = fs::read_dir(&self.jobs).into_iter().flatten().flatten();
        let numbers = entries.filter_map(|entry| {
            let tmp = JobDir::new(entry.path()).tmp().symlink_metadata().ok().map(|found| found.uid());
            Some([Some(entry.metadata().ok()?.gid()), tmp])
        });
        numbers.flatten().flatten().filter(|number| self.uids.contains(number)).collect()
    }
}

fn is_roots(record: &Record) -> bool {
    matches!(record.spec.owner, Some(Principal::Local { uid: 0 }))
}

/// The uids for runs: the first of the range are those of builders.
fn runs(config: &Config) -> RangeInclusive<u32> {
    agent_spawn::limits::builders(&config.jobs.uids).end() + 1..=*config.jobs.uids.end()
}

/// The user that builds environments, if that is not the daemon's own.
pub(crate) fn builder(config: &Config, shim: &Path) -> Option<Builder> {
    if !agent_spawn::serves_others() || !config.builds_apart() {
        return None;
    }
    let id = *config.jobs.uids.start();
    if !are_here(&agent_spawn::limits::builders(&config.jobs.uids), &uid_map()) {
        warn!(id, "builders run as root: the machine has no such user; configure `job_uids`");
        return None;
    }
    Some(Builder { id, shim: shim.to_owned(), state_dir: config.state_dir.clone(), owned: None })
}

/// The users that build for one owner each, if that is not the daemon's own.
pub(crate) fn owner_builders(config: &Config, shim: &Path) -> Option<OwnerBuilders> {
    let common = builder(config, shim)?;
    let uids = agent_spawn::limits::builders(&config.jobs.uids);
    Some(OwnerBuilders::new(common, uids, &config.state_dir.join("packages")))
}

/// The uids that this machine has; in a user namespace they may be few.
fn uid_map() -> String {
    fs::read_to_string("/proc/self/uid_map").unwrap_or_default()
}

/// Whether one line of the map contains all of these.
fn are_here(uids: &RangeInclusive<u32>, map: &str) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_whitespace().map(|word| word.parse::<u64>().unwrap_or(0));
        let (first, _, count) = (numbers.next(), numbers.next(), numbers.next().unwrap_or(0));
        first.is_some_and(|first| first <= u64::from(*uids.start()) && u64::from(*uids.end()) < first + count)
    })
}

/// The first uid after `last` that is not taken; after the end, it starts again from the first.
fn next(uids: &RangeInclusive<u32>, last: Option<u32>, taken: &BTreeSet<u32>) -> Option<u32> {
    let after =
        last.filter(|last| uids.contains(last) && last != uids.end()).map_or(*uids.start(), |last| last + 1);
    (after..=*uids.end()).chain(*uids.start()..after).find(|uid| !taken.contains(uid))
}

/// The uids of all processes.
fn of_processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes =
        entries.filter(|entry| entry.file_name().as_encoded_bytes().first().is_some_and(u8::is_ascii_digit));
    processes.filter_map(|process| Some(process.metadata().ok()?.uid())).collect()
}

/// An account whose home directory does not exist gets one in the job directory.
fn account(uid: u32) -> Option<JobUser> {
    let user = user_of(uid)?;
    let home = if Path::new(&user.home).is_dir() { user.home.clone() } else { String::new() };
    Some(JobUser { home, ..user })
}

fn refused_root() -> Fault {
    Fault::new(Code::Denied, "jobs of root do not run on this machine, which several people use")
        .why("what a job of root does, it does to everybody here")
        .fix("submit it as another user, or set `root_jobs: true` in the daemon's configuration")
}

#[cfg(test)]
mod tests {
    use agent_shim::User;

    use super::*;

    fn ada() -> JobUser {
        JobUser { name: "ada".into(), uid: 1000, gid: 100, groups: vec![44], home: "/home/ada".into() }
    }

    #[test]
    fn test_who_runs_what() {
        let local = |uid| Some(Principal::Local { uid });
        let named = RunAs::Named(JobUser { uid: 7, ..ada() });
        let its_own = Choice::OfItsOwn;
        for (user, is_root, allows_root, knows_owners, owner, expected) in [
            (&RunAs::Owner, true, false, true, local(1000), Choice::Account(ada())),
            (&RunAs::Owner, true, false, true, local(0), Choice::Root),
            (&RunAs::Owner, true, true, true, local(0), Choice::Daemon),
            (&RunAs::Owner, true, true, true, local(1001), its_own.clone()), // no account
            (&RunAs::Owner, true, true, false, local(1000), its_own.clone()), // another user's account here
            (&RunAs::Owner, true, true, false, local(0), its_own.clone()),
            (&RunAs::Owner, true, false, true, None, its_own.clone()),
            (&RunAs::Owner, true, true, true, None, Choice::Daemon),
            (&RunAs::PerRun, true, true, true, local(0), its_own),
            (&RunAs::Daemon, true, false, true, local(0), Choice::Daemon),
            (&named, true, false, true, local(0), Choice::Account(JobUser { uid: 7, ..ada() })),
            (&named, false, false, true, local(1000), Choice::Daemon),
            (&RunAs::PerRun, false, false, true, local(1000), Choice::Daemon),
        ] {
            let policy = Policy { user, is_root, allows_root, knows_owners };
            let chosen = choose(&policy, owner.as_ref(), |uid| (uid == 1000).then(ada));
            assert_eq!(chosen, expected, "{user:?} {owner:?} {is_root} {allows_root} {knows_owners}");
        }
    }

    #[test]
    fn test_a_machine_within_another_has_fewer_numbers() {
        let uids = 2_000_000_000..=2_000_065_535;
        assert!(are_here(&uids, "         0          0 4294967295\n"));
        assert!(!are_here(&uids, "         0     100000      65536\n"));
        assert!(are_here(&(1000..=1999), "0 0 1000\n1000 101000 1000\n"));
        assert!(!are_here(&(999..=1999), "0 0 1000\n1000 101000 1000\n"));
    }

    #[test]
    fn test_numbers_come_round_and_are_never_given_twice() {
        let uids = 10..=14;
        let taken = |taken: &[u32]| taken.iter().copied().collect::<BTreeSet<_>>();
        for (last, held, expected) in [
            (None, &[][..], Some(10)),
            (Some(10), &[], Some(11)),
            (Some(14), &[], Some(10)),
            (Some(13), &[14, 10], Some(11)),
            (Some(3), &[10], Some(11)),
            (Some(12), &[10, 11, 12, 13, 14], None),
        ] {
            assert_eq!(next(&uids, last, &taken(held)), expected, "{last:?} {held:?}");
        }
    }

    #[test]
    fn test_a_number_is_free_when_its_run_its_directory_and_its_processes_are_gone() {
        let temp = tempfile::tempdir().unwrap();
        let jobs = temp.path().join("jobs");
        fs::create_dir(&jobs).unwrap();
        let own = fs::metadata(&jobs).unwrap().gid();
        let users = Users { uids: own..=own + 1, jobs: jobs.clone(), given: Arc::default() };
        let [one, other]: [ReplicaId; 2] = ["a.1.0", "b.1.0"].map(|id| id.parse().unwrap());
        fs::create_dir(jobs.join("c.1.0")).unwrap();
        assert_eq!(users.of_directories(), [own]);
        let taken = users.take(&one, None).unwrap();
        assert_eq!((taken.uid, taken.gid), (own + 1, own + 1));
        assert_eq!(users.take(&other, None).unwrap_err().code, Code::LaunchFailed);
        users.give_back(&one);
        assert_eq!(users.take(&other, None).unwrap().uid, own + 1);
        assert!(of_processes().contains(&User::own().uid), "this process");
    }
}
