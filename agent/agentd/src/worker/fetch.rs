//! Lays out the files of a job: its code in `work/`, each input in `inputs/NAME/` (data that is on this machine already is a
//! link there), and the empty folders it may write to.
//!
//! Repeating it after an interruption begins with empty folders. Until everything is laid out, the user of the job
//! has no access to the job directory.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{PermissionsExt, chown, fchown, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_cas::snapshot::{self, Laid, MaterializeError, Owner, PrestagedTree, materialize_counted};
use agent_cas::{ByteCounter, Store};
use agent_model::job::{Input, JobDraft};
use agent_model::protocol::record::JobUser;
use agent_model::{DataInput, Digest, EnvSpec, size};
use agent_runtime::data::DataError;
use agent_shim::JobDir;
use parking_lot::Mutex;
use rustix::fs::{Mode, XattrFlags};
use rustix::io::Errno;

use super::data::Supply;
use super::slurm;
use super::stand_in;

/// Why a job's files could not be laid out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error("the code could not be laid out")]
    Code(#[source] MaterializeError),
    #[error("the input `{name}` could not be laid out")]
    Input { name: String, source: MaterializeError },
    #[error("the input `{name}` could not be laid out")]
    Data { name: String, source: DataError },
    #[error("the outputs of an earlier attempt could not be laid out")]
    Outputs(#[source] MaterializeError),
    #[error("the folder {} could not be prepared", path.display())]
    Folder { path: PathBuf, source: io::Error },
}

/// What is being fetched, and how much of it is there: for whoever shows it meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Fetching(Mutex<Option<(String, Arc<ByteCounter>)>>);

impl Fetching {
    fn begin(&self, what: String) -> Arc<ByteCounter> {
        let counter = Arc::default();
        *self.0.lock() = Some((what, Arc::clone(&counter)));
        counter
    }

    /// `fetching the code: 120 of 480 MiB`; `None` as long as nothing is known about it.
    pub(crate) fn describe(&self) -> Option<String> {
        let current = self.0.lock();
        let (what, counter) = current.as_ref()?;
        let (done, all) = counter.part();
        (all > 0).then(|| format!("fetching {what}: {}", size::part(done, all)))
    }
}

/// Lays everything out from the beginning, using `prestaged_trees` where it can. The folders belong to `user` if
/// there is one. Returns the trees. Meanwhile `fetching` can be asked how far it is.
pub(crate) async fn lay_out(
    store: &Store,
    prestaged_trees: &[Arc<PrestagedTree>],
    job: &JobDraft,
    data: &BTreeMap<String, Supply>,
    dir: &JobDir,
    user: Option<&JobUser>,
    fetching: &Fetching,
) -> Result<Vec<(Digest, Laid)>, FetchError> {
    let (empty, reads) = (dir.clone(), job.inputs.values().any(|input| !matches!(input, Input::Literal(_))));
    let mut needed: Vec<PathBuf> = job.outputs.keys().map(|name| dir.out().join(name)).collect();
    needed.extend(job.code.is_none().then(|| dir.work())); // that of the code comes with it
    needed.extend(reads.then(|| dir.inputs()));
    blocking(dir.path(), move || clear(&empty, &needed)).await?;
    let (owner, mut trees) = (user.and_then(owner), Vec::new());
    let lay = async |what: String, root: Digest, to: &Path| {
        let counter = fetching.begin(what);
        let store = store.for_tree(root, &counter);
        materialize_counted(&store, root, to, owner, prestaged_trees, &counter).await
    };
    if let Some(code) = job.code {
        let laid = lay("the code".to_owned(), code, &dir.work()).await;
        trees.push((code, laid.map_err(FetchError::Code)?));
    }
    if let Some(left) = &job.resumes {
        let stored = snapshot::folder(store, left.artifacts.root, "outputs").await;
        let outputs = dir.work().join("outputs");
        if let Some(root) = stored.map_err(|error| FetchError::Outputs(MaterializeError::Tree(error)))? {
            // It includes what the code had there when the attempt before began.
            let replaced = outputs.clone();
            blocking(&outputs, move || agent_spawn::remove_tree(&replaced)).await?;
            lay("the outputs so far".to_owned(), root, &outputs).await.map_err(FetchError::Outputs)?;
        }
    }
    for (name, input) in &job.inputs {
        if let Some(root) = input.snapshot() {
            let laid = lay(format!("`inputs.{name}`"), root, &dir.inputs().join(name)).await;
            trees.push((root, laid.map_err(|source| FetchError::Input { name: name.clone(), source })?));
        }
    }
    for (name, input) in &job.inputs {
        if let (Input::Data(input), Some(supply)) = (input, data.get(name)) {
            let may_link = !input.is_own_copy && may_link(&job.environment, user);
            lay_out_data(name, input, supply, dir, owner, may_link).await?;
        }
    }
    if job.azureml_stand_in {
        let dir = dir.clone();
        blocking(&dir.stand_in(), move || stand_in::lay_out(&dir)).await?;
    }
    if slurm::is_meant(job) {
        let dir = dir.clone();
        blocking(&dir.slurm(), move || slurm::lay_out(&dir)).await?;
    }
    let (dir, user) = (dir.clone(), user.cloned());
    let path = dir.path().to_owned();
    blocking(&path, move || finish(&dir, user.as_ref())).await?;
    Ok(trees)
}

/// Whether the job cannot write to files of the daemon's user, and their owner is not changed later: a container may run
/// as another user, and a helper gives everything to the job.
fn may_link(environment: &EnvSpec, user: Option<&JobUser>) -> bool {
    let on_machine =
        !matches!(environment, EnvSpec::Image { .. } | EnvSpec::Build { .. } | EnvSpec::Named { .. });
    let own = rustix::process::getuid().as_raw();
    on_machine && !agent_spawn::has_helper() && user.is_some_and(|user| user.uid != 0 && user.uid != own)
}

/// Lays out one input that was not sent.
async fn lay_out_data(
    name: &str,
    input: &DataInput,
    supply: &Supply,
    dir: &JobDir,
    owner: Option<Owner>,
    may_link: bool,
) -> Result<(), FetchError> {
    let (folder, to) = (dir.inputs().join(name), data_path(dir, name, input));
    let (is_file, owner) = (input.is_file, owner.map(|owner| (owner.uid, owner.gid)));
    let link = match supply {
        Supply::Here(path) => Some((path.clone(), to.clone())),
        Supply::Fetched(_) => None,
    };
    let prepare = move || {
        if is_file {
            std::fs::create_dir(&folder)?;
            owner.map_or(Ok(()), |(uid, gid)| chown(&folder, Some(uid), Some(gid)))?;
        }
        link.map_or(Ok(()), |(path, link)| symlink(path, link))
    };
    blocking(&to, prepare).await?;
    let Supply::Fetched(held) = supply else { return Ok(()) };
    let laid = held.place(&to, owner, may_link).await;
    laid.map_err(|source| FetchError::Data { name: name.to_owned(), source })
}

/// Where data is laid out: a folder by the name of the input, or a file of its own name in that folder.
fn data_path(dir: &JobDir, name: &str, input: &DataInput) -> PathBuf {
    let folder = dir.inputs().join(name);
    match input.uri.file_name().filter(|_| input.is_file) {
        Some(file) => folder.join(file),
        None => folder,
    }
}

/// What the command is given as the path of data: for a folder that is a link, the folder itself, because many programs do
/// not go through a link that they are given (`find`, `du`).
pub(crate) fn given_path(dir: &JobDir, name: &str, input: &DataInput) -> PathBuf {
    let path = data_path(dir, name, input);
    if input.is_file { path } else { std::fs::read_link(&path).unwrap_or(path) }
}

/// Where the data of the job is that was laid out as links: a container needs these places, too.
pub(crate) fn linked(dir: &JobDir, job: &JobDraft) -> Vec<PathBuf> {
    let inputs = job.inputs.iter().filter_map(|(name, input)| match input {
        Input::Data(input) => Some(data_path(dir, name, input)),
        _ => None,
    });
    inputs.filter_map(|path| std::fs::read_link(path).ok()).collect()
}

/// The owner of a job's files while they are laid out; with a helper there is none, as it changes the owner later.
pub(crate) fn owner(user: &JobUser) -> Option<Owner> {
    (!agent_spawn::has_helper()).then_some(Owner { uid: user.uid, gid: user.gid })
}

/// Makes a home for the user in a container, and, if `all`, gives it the files that were laid out for another user.
pub(crate) async fn settle(dir: &JobDir, user: Option<JobUser>, all: bool) -> Result<(), FetchError> {
    let (path, dir) = (dir.home(), dir.clone());
    let settle = move || {
        std::fs::create_dir_all(dir.home())?;
        let Some(user) = user else { return Ok(()) };
        if all {
            finish(&dir, Some(&user))?;
            made([dir.work(), dir.inputs(), dir.out()]).try_for_each(|folder| own(&folder, &user))?;
        }
        own(&dir.home(), &user)
    };
    blocking(&path, settle).await
}

/// The variable with the directory in which the user's own packages are: the job has another one for its packages.
pub(crate) const USUAL_BASE: &str = "AGENTD_USER_BASE";

/// Has an interpreter find the packages there as well.
const USUAL_SITE: &str = "import os, site, sys; d = os.environ.get('AGENTD_USER_BASE', '') + \
    '/lib/python%d.%d/site-packages' % sys.version_info[:2]; os.path.isdir(d) and site.addsitedir(d)\n";

/// Makes what the job needs to install packages for itself: an empty layer for its environment, if it gets one, and for
/// this version of `python` the directory for packages outside of it: where it has no layer, so that what is installed
/// can be imported at once, and where its user has packages of their own, `usual`, that it must find.
pub(crate) async fn make_layers(
    dir: &JobDir,
    user: Option<JobUser>,
    layered: bool,
    python: Option<&str>,
    usual: Option<&str>,
) -> Result<(), FetchError> {
    let (path, dir) = (dir.layer(), dir.clone());
    let packages = python.and_then(|version| {
        let minor: Vec<&str> = version.splitn(3, '.').take(2).collect();
        (minor.len() == 2).then(|| format!("lib/python{}/site-packages", minor.join(".")))
    });
    let usual = packages.as_ref().zip(usual).map(|(packages, usual)| Path::new(usual).join(packages));
    let make = move || {
        let own = |path: &Path| user.as_ref().map_or(Ok(()), |user| own(path, user));
        if layered {
            agent_spawn::remove_tree(&dir.layer())?;
            own(&agent_shim::view::make_layer(&dir.layer())?)?;
        }
        agent_spawn::remove_tree(&dir.user_base())?;
        // Of a user whose files this process may not see it cannot tell.
        let has_usual = usual.is_some_and(|usual| usual.try_exists().unwrap_or(true));
        let Some(packages) = packages.filter(|_| !layered || has_usual) else { return Ok(()) };
        let site = dir.user_base().join(packages);
        std::fs::create_dir_all(&site)?;
        std::fs::write(site.join("user.pth"), USUAL_SITE)?;
        own(&dir.user_base())
    };
    blocking(&path, make).await
}

/// Removes the folders of the job, and makes those that are `needed`, which no other user can access.
fn clear(dir: &JobDir, needed: &[PathBuf]) -> io::Result<()> {
    for part in [dir.path(), dir.data()] {
        std::fs::create_dir_all(part)?;
        std::fs::set_permissions(part, std::fs::Permissions::from_mode(0o700))?;
    }
    [dir.work(), dir.inputs(), dir.out()].iter().try_for_each(|folder| agent_spawn::remove_tree(folder))?;
    needed.iter().try_for_each(std::fs::create_dir_all)
}

/// Those of the folders that this job needed.
fn made<const N: usize>(folders: [PathBuf; N]) -> impl Iterator<Item = PathBuf> {
    folders.into_iter().filter(|folder| folder.exists())
}

/// Makes the folders that every command may write to, and sets their owner; without a helper the trees already have
/// theirs.
fn finish(dir: &JobDir, user: Option<&JobUser>) -> io::Result<()> {
    let written = ["outputs", "logs"].map(|folder| dir.work().join(folder));
    for folder in &written {
        std::fs::create_dir_all(folder).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => {
                let name = folder.file_name().unwrap_or_default().display();
                io::Error::new(error.kind(), format!("the code has something else where `{name}` belongs"))
            }
            _ => error,
        })?;
    }
    let tracking = agent_fs::append_plain(&dir.tracking())?;
    let Some(user) = user else { return Ok(()) };
    let (uid, gid) = (Some(user.uid), Some(user.gid));
    if agent_spawn::has_helper() {
        made([dir.work(), dir.inputs()]).try_for_each(|folder| own(&folder, user))?;
        // Only the job's user and the daemon's, which keeps appending to it, have access to its directory.
        rustix::fs::fchmod(&tracking, Mode::from_raw_mode(0o666))?;
    } else {
        // Trees already have their owner; these folders may still belong to the daemon, and are empty then.
        for folder in made([dir.work(), dir.inputs()]).chain(written) {
            fchown(agent_fs::open_directory(&folder)?, uid, gid)?;
        }
        fchown(&tracking, uid, gid)?;
    }
    made([dir.out()]).try_for_each(|out| own(&out, user))?;
    make_own(dir, user)?;
    // Access to the directories above the job's files.
    [dir.data(), dir.path()].into_iter().try_for_each(|part| let_pass(part, user))
}

/// Makes the empty folders that belong to the user alone.
fn make_own(dir: &JobDir, user: &JobUser) -> io::Result<()> {
    let mut rooms = vec![(dir.tmp(), 0o1777)];
    if user.home.is_empty() {
        rooms.push((dir.home(), 0o700));
    }
    for (room, mode) in rooms {
        agent_spawn::remove_tree(&room)?;
        std::fs::create_dir(&room)?;
        rustix::fs::fchmod(agent_fs::open_directory(&room)?, Mode::from_raw_mode(mode))?;
        own(&room, user)?;
    }
    Ok(())
}

/// Lets the job's user pass through a directory, and nobody else: other members of its group could read all files
/// that are readable for everybody. The group marks whose directory it is. On a file system without ACLs, the group
/// may pass.
fn let_pass(dir: &Path, user: &JobUser) -> io::Result<()> {
    if !agent_spawn::has_helper() {
        chown(dir, None, Some(user.gid))?;
    }
    match rustix::fs::setxattr(dir, "system.posix_acl_access", &passing(user.uid), XattrFlags::empty()) {
        Ok(()) => Ok(()),
        Err(Errno::NOTSUP | Errno::NOSYS) => {
            let mode = if agent_spawn::has_helper() { 0o711 } else { 0o710 };
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode))
        }
        Err(error) => Err(error.into()),
    }
}

/// A POSIX ACL in the kernel's format: all rights for the owner, passage (`x`) for this user, nothing for others.
fn passing(uid: u32) -> Vec<u8> {
    const VERSION: u32 = 2;
    const NOBODY: u32 = u32::MAX;
    let [owner, user, group, mask, others] = [0x01_u16, 0x02, 0x04, 0x10, 0x20];
    let entries =
        [(owner, 7_u16, NOBODY), (user, 1, uid), (group, 0, NOBODY), (mask, 1, NOBODY), (others, 0, NOBODY)];
    let bytes = entries
        .into_iter()
        .flat_map(|(tag, may, id)| [&tag.to_le_bytes()[..], &may.to_le_bytes(), &id.to_le_bytes()].concat());
    VERSION.to_le_bytes().into_iter().chain(bytes).collect()
}

/// Gives a tree to the user.
fn own(path: &Path, user: &JobUser) -> io::Result<()> {
    agent_spawn::give(path, user.uid, user.gid, agent_spawn::GivenPart::Everything)
}

async fn blocking(
    path: &Path,
    work: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> Result<(), FetchError> {
    let done = agent_blocking::blocking_io(work).await;
    done.map_err(|source| FetchError::Folder { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use agent_cas::Disk;
    use agent_model::job::{LeftOutputs, Output};

    use super::*;

    async fn store(dir: &Path) -> (Store, Digest) {
        let code = dir.join("code");
        std::fs::create_dir_all(&code).unwrap();
        std::fs::write(code.join("t.py"), "print(1)").unwrap();
        let store = Store::Disk(Disk::open(&dir.join("cas")).unwrap());
        let scanned = snapshot::scan(&code).unwrap();
        snapshot::push(&scanned, &store, |_| {}).await.unwrap();
        (store, scanned.root)
    }

    #[tokio::test]
    async fn test_layout_is_complete_and_can_be_redone() {
        let temp = tempfile::tempdir().unwrap();
        let (store, root) = store(temp.path()).await;
        let job = JobDraft {
            code: Some(root),
            inputs: [("data".to_owned(), Input::Folder(root)), ("lr".to_owned(), Input::Literal("1".into()))]
                .into(),
            outputs: [("model".to_owned(), Output::Folder)].into(),
            ..JobDraft::default()
        };
        let dir = JobDir::new(temp.path().join("j.1.0"));
        dir.create().unwrap();
        let fetching = Fetching::default();
        assert_eq!(fetching.describe(), None);
        for _ in 0..2 {
            lay_out(&store, &[], &job, &BTreeMap::new(), &dir, None, &fetching).await.unwrap();
            // An input that was fetched last.
            assert_eq!(fetching.describe().as_deref(), Some("fetching `inputs.data`: 8 of 8 B"));
            for path in
                ["work/t.py", "work/outputs", "work/logs", "inputs/data/t.py", "out/model", "tracking.jsonl"]
            {
                assert!(dir.data().join(path).exists(), "{path}");
            }
            assert!(!dir.work().join("left").exists());
            std::fs::write(dir.work().join("left"), "by an interrupted attempt").unwrap();
        }
    }

    #[tokio::test]
    async fn test_what_an_attempt_left_is_in_place_of_the_outputs_of_the_code() {
        let temp = tempfile::tempdir().unwrap();
        let (store, code) = store(temp.path()).await;
        let stored = async |name: &str, files: &[&str]| {
            let tree = temp.path().join(name);
            for file in files {
                let path = tree.join(file);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, name).unwrap();
            }
            let scanned = snapshot::scan_whole(&tree).unwrap();
            snapshot::push(&scanned, &store, |_| {}).await.unwrap();
            agent_model::Artifacts { root: scanned.root, files: scanned.files, bytes: scanned.bytes }
        };
        let left =
            |artifacts| Some(LeftOutputs { attempt: agent_model::Epoch(1), artifacts, is_earlier: false });
        let dir = JobDir::new(temp.path().join("j.2.0"));
        dir.create().unwrap();
        let artifacts = stored("left", &["outputs/deep/state", "logs/old", "named-outputs/m/x"]).await;
        let job = JobDraft { code: Some(code), resumes: left(artifacts), ..JobDraft::default() };
        for _ in 0..2 {
            lay_out(&store, &[], &job, &BTreeMap::new(), &dir, None, &Fetching::default()).await.unwrap();
            assert_eq!(std::fs::read_to_string(dir.work().join("outputs/deep/state")).unwrap(), "left");
            assert!(dir.work().join("t.py").exists() && !dir.work().join("logs/old").exists());
            std::fs::write(dir.work().join("outputs/more"), "of an interrupted fetch").unwrap();
        }
        // One that left only logs.
        let artifacts = stored("logged", &["logs/old"]).await;
        let job = JobDraft { resumes: left(artifacts), ..JobDraft::default() };
        lay_out(&store, &[], &job, &BTreeMap::new(), &dir, None, &Fetching::default()).await.unwrap();
        assert_eq!(std::fs::read_dir(dir.work().join("outputs")).unwrap().count(), 0);
    }

    #[test]
    fn test_the_users_way_is_not_his_groups() {
        let temp = tempfile::tempdir().unwrap();
        let own = agent_shim::User::own();
        let user =
            JobUser { name: String::new(), uid: own.uid, gid: own.gid, groups: vec![], home: String::new() };
        let_pass(temp.path(), &user).unwrap();
        let mut list = [0; 64];
        let length = rustix::fs::getxattr(temp.path(), "system.posix_acl_access", &mut list[..]).unwrap();
        assert_eq!(list[..length], passing(own.uid));
        // With an ACL, the group bits of the mode are its mask.
        assert_eq!(temp.path().metadata().unwrap().permissions().mode() & 0o7777, 0o710);
    }

    #[tokio::test]
    async fn test_absent_code_is_told_apart() {
        let temp = tempfile::tempdir().unwrap();
        let (store, root) = store(temp.path()).await;
        let job = JobDraft { code: Some(Digest { size: root.size + 1, ..root }), ..JobDraft::default() };
        let dir = JobDir::new(temp.path().join("j.1.0"));
        let (data, fetching) = (BTreeMap::new(), Fetching::default());
        let error = lay_out(&store, &[], &job, &data, &dir, None, &fetching).await.unwrap_err();
        assert_eq!(super::super::faults::fetch(&error, false).code, agent_model::Code::SnapshotMissing);
    }
}
