//! The limits of a helper, which hold whatever the daemon asks.

use std::ffi::CString;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use agent_fs::Links;
use agent_model::ReplicaId;
use agent_shim::User;
use nix::unistd::{Gid, Uid, getgrouplist};
use rustix::fs::{Mode, OFlags};

/// The trees below the state directory that contain files of other users.
pub const ROOTS: [&str; 5] = ["jobs", "envs", "packages", "prestaged", "data"];

/// The first user number that systems give to people.
const PEOPLE: u32 = 1000;

/// The last one, on every distribution.
const LAST_PERSON: u32 = 59_999;

/// The longest mark in bytes, and the most groups of a job.
const LONGEST_MARK: usize = 4096;
const MOST_GROUPS: usize = 16;

/// Set when the helper starts, by root alone.
#[derive(Debug, Clone)]
pub struct HelperLimits {
    /// The daemon's state directory.
    pub state_dir: PathBuf,
    /// The daemon's user and group.
    pub keeper: (u32, u32),
    /// User numbers for single jobs; the first of them are those of builders ([`builders`]).
    pub job_uids: RangeInclusive<u32>,
    /// System accounts that jobs may run as all the same.
    pub accounts: Vec<u32>,
    /// Jobs may run as root.
    pub root_jobs: bool,
    /// The supervisor's program.
    pub shim: PathBuf,
    /// The daemon's program.
    pub daemon: PathBuf,
    /// How many files a builder may have open.
    pub files: u64,
}

/// Why something is not done.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum LimitError {
    #[error("{} is no tree of jobs or environments", _0.display())]
    Path(PathBuf),
    #[error("the copy would go into a directory that is not the daemon's")]
    Destination,
    #[error("jobs may not run as user {0}")]
    User(u32),
    #[error("`{0}` is no owner of a builder")]
    Owner(String),
    #[error("`{0}` names no replica")]
    Replica(String),
    #[error("process {0} is no supervisor")]
    Process(i32),
    #[error("{0} is nothing of a job")]
    Target(String),
    #[error("the descriptors are not those of the verb")]
    Descriptors,
}

/// Why a verb was not done.
pub(crate) enum Undone {
    Refused(LimitError),
    Failed(io::Error),
}

impl From<LimitError> for Undone {
    fn from(refusal: LimitError) -> Undone {
        Undone::Refused(refusal)
    }
}

impl<E: Into<io::Error>> From<E> for Undone {
    fn from(error: E) -> Undone {
        Undone::Failed(error.into())
    }
}

/// The numbers of `job_uids` that builders have: a sixteenth, or of few numbers up to half. The first of all works for no
/// owner.
pub fn builders(job_uids: &RangeInclusive<u32>) -> RangeInclusive<u32> {
    const FEW: u32 = 16;
    let (first, all) =
        (*job_uids.start(), job_uids.end().saturating_sub(*job_uids.start()).saturating_add(1));
    let some = (all / 16).max(FEW.min(all / 2)).max(1);
    first..=first + some - 1
}

impl HelperLimits {
    /// A directory in one of the trees, through no link.
    pub(crate) fn open(&self, path: &Path) -> Result<OwnedFd, Undone> {
        let path = self.tree(path)?;
        let state = agent_fs::open_directory(&self.state_dir)?;
        Ok(agent_fs::open_beneath(state, path, OFlags::DIRECTORY, Mode::empty(), Links::Never)?)
    }

    /// The user of builders that work for no owner.
    pub fn builder(&self) -> u32 {
        *self.job_uids.start()
    }

    /// Whether it is a number for the builder of one owner.
    pub(crate) fn is_of_an_owner(&self, uid: u32) -> bool {
        uid != self.builder() && builders(&self.job_uids).contains(&uid)
    }

    /// Whether a job or a builder may run as this user.
    pub fn may_be(&self, uid: u32) -> Result<(), LimitError> {
        let is_person = (PEOPLE..=LAST_PERSON).contains(&uid) && uid != self.keeper.0;
        let is_named = self.accounts.contains(&uid) && uid != 0;
        let is_root = uid == 0 && self.root_jobs;
        match self.job_uids.contains(&uid) || is_person || is_named || is_root {
            true => Ok(()),
            false => Err(LimitError::User(uid)),
        }
    }

    /// The groups are the account's, whatever the daemon says; a user without an account has only a group of its own.
    pub(crate) fn user(&self, uid: u32) -> Result<User, LimitError> {
        self.may_be(uid)?;
        let alone = User { uid, gid: uid, groups: Vec::new() };
        let Ok(Some(account)) = nix::unistd::User::from_uid(Uid::from_raw(uid)) else {
            // A number of the people's range without a name is unassigned; its group may be anybody's.
            return if self.job_uids.contains(&uid) { Ok(alone) } else { Err(LimitError::User(uid)) };
        };
        let name = CString::new(account.name).map_err(|_| LimitError::User(uid))?;
        let groups = getgrouplist(&name, account.gid).unwrap_or_default();
        let groups = groups.into_iter().map(Gid::as_raw).filter(|group| *group != account.gid.as_raw());
        Ok(User { uid, gid: account.gid.as_raw(), groups: groups.collect() })
    }

    /// A path of plain names below one of the trees; links are checked when it is opened.
    pub(crate) fn tree<'a>(&self, path: &'a Path) -> Result<&'a Path, LimitError> {
        let refused = || LimitError::Path(path.to_owned());
        let mut names = path.components();
        let first = names.next().ok_or_else(refused)?;
        let is_root = ROOTS.iter().any(|root| first == Component::Normal(root.as_ref()));
        let mut rest = names.peekable();
        let has_more = rest.peek().is_some();
        match is_root && has_more && rest.all(|name| matches!(name, Component::Normal(_))) {
            true => Ok(path),
            false => Err(refused()),
        }
    }

    pub(crate) fn replica(&self, name: &str) -> Result<ReplicaId, LimitError> {
        name.parse().map_err(|_| LimitError::Replica(name.chars().take(100).collect()))
    }

    /// Control groups of jobs have a name prefix of their own and are only below `/sys/fs/cgroup`; marks are random
    /// numbers, or paths of environments and of data.
    pub(crate) fn targets(&self, groups: &[PathBuf], mark: &str) -> Result<(), LimitError> {
        let is_group = |group: &PathBuf| {
            let plain =
                group.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
            let name = group.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            plain && group.starts_with("/sys/fs/cgroup") && name.starts_with(agent_shim::cgroup::NAME_PREFIX)
        };
        if let Some(odd) = groups.iter().find(|group| !is_group(group)) {
            return Err(LimitError::Target(odd.display().to_string()));
        }
        let is_instance =
            mark.len() == 36 && mark.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        let is_below = |tree: &&str| Path::new(mark).starts_with(self.state_dir.join(tree));
        let is_of_a_builder = mark.len() <= LONGEST_MARK && ["envs", "data"].iter().any(is_below);
        match groups.len() <= MOST_GROUPS && (is_instance || is_of_a_builder) {
            true => Ok(()),
            false => Err(LimitError::Target("what bears this mark".to_owned())),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn limits() -> HelperLimits {
        HelperLimits {
            state_dir: "/var/lib/agentd".into(),
            keeper: (990, 990),
            job_uids: 2_000_000_000..=2_000_065_535,
            accounts: vec![70],
            root_jobs: false,
            shim: "/usr/bin/agent-shim".into(),
            daemon: "/usr/bin/agentd".into(),
            files: 1024,
        }
    }

    #[test]
    fn test_jobs_are_of_people_of_the_range_and_of_who_is_named() {
        let limits = limits();
        for uid in [1000, 59_999, 2_000_000_000, 2_000_065_535, 70] {
            assert_eq!(limits.may_be(uid), Ok(()), "{uid}");
        }
        for uid in [0, 1, 33, 990, 999, 60_000, 65_534, 1_999_999_999, 2_000_065_536, u32::MAX] {
            assert_eq!(limits.may_be(uid), Err(LimitError::User(uid)));
        }
        let person = HelperLimits { keeper: (1000, 1000), ..limits.clone() };
        assert_eq!(person.may_be(1000), Err(LimitError::User(1000)), "the daemon is no job's user");
        let zero = HelperLimits { accounts: vec![0], ..limits.clone() };
        assert_eq!(zero.may_be(0), Err(LimitError::User(0)), "root takes its own key");
        assert_eq!(HelperLimits { root_jobs: true, ..limits.clone() }.may_be(0), Ok(()));
        assert_eq!(limits.user(2_000_000_007).unwrap().groups, Vec::<u32>::new());
        assert!(limits.user(59_998).is_err(), "nobody has this number");
    }

    #[test]
    fn test_builders_and_jobs_have_numbers_of_one_range() {
        for (all, last) in [
            (2_000_000_000..=2_000_065_535, 2_000_004_095),
            (1000..=1099, 1015),
            (1000..=1009, 1004),
            (1000..=1001, 1000),
        ] {
            assert_eq!(builders(&all), *all.start()..=last);
        }
    }

    #[test]
    fn test_only_trees_below_the_state_directory_are_named() {
        let limits = limits();
        for path in
            ["jobs/a.1.0", "jobs/a.1.0/job/work", "envs/pip-1", "packages/uv", "prestaged/x", "data/x/part"]
        {
            limits.tree(Path::new(path)).unwrap();
        }
        for path in [
            "",
            ".",
            "/",
            "..",
            "jobs",
            "jobs/",
            "jobs/.",
            "jobs/..",
            "jobs/../controller/secrets",
            "/etc/shadow",
            "/var/lib/agentd/jobs/a",
            "controller/secrets",
            "./jobs/a",
            "jobs/a/../../controller",
            "cas/x",
            "lock",
        ] {
            limits.tree(Path::new(path)).unwrap_err();
        }
    }

    #[test]
    fn test_only_jobs_and_builders_are_killed() {
        let limits = limits();
        let instance = "0f0e0d0c-0b0a-0908-0706-050403020100";
        let groups = |path: &str| vec![PathBuf::from(path)];
        limits.targets(&[], instance).unwrap();
        limits.targets(&[], "/var/lib/agentd/envs/pip-1").unwrap();
        limits.targets(&[], "/var/lib/agentd/data/part-1").unwrap();
        limits.targets(&groups("/sys/fs/cgroup/x.slice/agentd-train.1.0-01234567"), instance).unwrap();
        for path in [
            "/sys/fs/cgroup",
            "/sys/fs/cgroup/system.slice",
            "/sys/fs/cgroup/agentd-a/..",
            "/tmp/agentd-a",
            "/sys/fs/cgroup/../../../tmp/agentd-a",
            "agentd-a",
        ] {
            limits.targets(&groups(path), instance).unwrap_err();
        }
        for mark in ["", "x", "1", "/etc", "/var/lib/agentd/jobs/x"] {
            limits.targets(&[], mark).unwrap_err();
        }
    }
}
