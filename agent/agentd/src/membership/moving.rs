//! A machine that joins with the jobs of its own controller.
//!
//! The steps, each of which may be cut off anywhere and repeated:
//!
//! | Step | Whose the jobs are when it is cut off here |
//! |---|---|
//! | the controller admits the machine, which announces its jobs | this machine's, as before |
//! | blobs and logs are sent | this machine's, as before |
//! | a file notes that the move has begun; the identity is written | nobody runs them until the move is finished |
//! | the records are sent | the same; the controller has some of them |
//! | the own records say that they were moved; the file is removed | the controller's |
//!
//! Invariants: while the file and an identity are there, no daemon starts here before it has finished the move, and the
//! machine does not leave: so nothing runs from both records.

use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_cas::snapshot::{self, CopyError};
use agent_cas::{Disk, Remote};
use agent_control::{OwnJob, OwnJobs, OwnJobsError, OwnLog};
use agent_identity::{Credentials, ShownIdentity, Trust};
use agent_model::words::count;
use agent_model::{Address, Clock, Code, Digest, Fault, Principal, failpoint};
use agent_proto::transport::{self, Way};
use agent_proto::v1;
use agent_proto::v1::telemetry_client::TelemetryClient;
use agent_proto::v1::worker_client::WorkerClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;
use tracing::info;

use super::{dialer, file, within};
use crate::config::{Config, JobUser};

/// The most bytes of records in one message, unless one record is larger, and the most bytes of a log.
const PIECE: usize = 1 << 20;

/// What was moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Moved {
    running: usize,
    waiting: usize,
}

/// `2 running jobs go on there, 3 waiting jobs were moved there`
impl std::fmt::Display for Moved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [running, waiting] = [self.running, self.waiting].map(|jobs| jobs as u64);
        let go = if running == 1 { "goes on" } else { "go on" };
        let were = if waiting == 1 { "was" } else { "were" };
        match (running, waiting) {
            (0, 0) => f.write_str("it had no jobs to move"),
            (0, _) => write!(f, "{} {were} moved there", count(waiting, "waiting job")),
            (_, 0) => write!(f, "{} {go} there", count(running, "running job")),
            _ => write!(
                f,
                "{} {go} there, {} {were} moved there",
                count(running, "running job"),
                count(waiting, "waiting job")
            ),
        }
    }
}

/// The file that is there from before the machine becomes a node until all its jobs are the controller's.
fn begun(state_dir: &Path) -> PathBuf {
    state_dir.join("moving")
}

/// A move has begun, and is not finished. Without an identity none has: the file is left from a join that was cut off.
pub(super) fn is_pending(state_dir: &Path) -> bool {
    begun(state_dir).exists() && file(state_dir).exists()
}

/// Removes what a join left that was cut off before the machine became a node.
pub(super) fn forget(state_dir: &Path) -> Result<(), Fault> {
    match std::fs::remove_file(begun(state_dir)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(unwritten(&begun(state_dir), &error)),
        _ => Ok(()),
    }
}

/// Why a machine does not leave.
pub(super) fn unfinished(state_dir: &Path) -> Fault {
    let file = begun(state_dir);
    Fault::new(Code::JobActive, "the jobs of this machine are not all at its controller yet")
        .why("it joined with them, and was cut off")
        .fix(format!(
            "run `agentd join` again, or start the daemon: both go on with the move; only if that controller is gone \
             for good, remove {}: then this machine runs them itself",
            file.display()
        ))
}

/// Finishes a move that was cut off; does nothing when there is none.
pub(crate) async fn finish(config: &Config, clock: &Arc<dyn Clock>) -> Result<(), Fault> {
    if !is_pending(&config.state_dir) {
        return Ok(());
    }
    let path = file(&config.state_dir);
    let credentials = Credentials::read(&path).map_err(|error| unwritten(&path, &error))?;
    let Some(credentials) = credentials else { return Ok(()) };
    let moved = resume(config, &credentials, clock).await?;
    info!(running = moved.running, waiting = moved.waiting, "moved jobs to the controller");
    Ok(())
}

/// The same for the holder of these credentials, whose move is not finished.
pub(super) async fn resume(
    config: &Config,
    credentials: &Credentials,
    clock: &Arc<dyn Clock>,
) -> Result<Moved, Fault> {
    let go_on = |fault: Fault| fault.why("the move of this machine's jobs has begun, and is not finished");
    let moving = Moving::plan(config).await.map_err(go_on)?;
    let channel = channel(config, credentials, clock)?;
    moving.send_ahead(&channel).await.map_err(go_on)?;
    moving.hand_over(config, &channel, &credentials.controller, clock).await
}

/// A connection that shows the new identity.
fn channel(config: &Config, credentials: &Credentials, clock: &Arc<dyn Clock>) -> Result<Channel, Fault> {
    let odd = |error: &dyn std::fmt::Display| {
        Fault::new(Code::StateUnusable, "the identity cannot be used").why(error.to_string())
    };
    let Ok(Address::Tls { host, port }) = credentials.controller.parse() else {
        return Err(odd(&credentials.controller));
    };
    let trust = Trust::Authority(credentials.authority().map_err(|error| odd(&error))?);
    let held = ShownIdentity::new(credentials).map_err(|error| odd(&error))?;
    let dialer = dialer(&(host, port), trust, Some(held), config, clock)?;
    Ok(transport::dial(agent_cas::remote::far(transport::endpoint()), Way::Tls(dialer)))
}

/// The own jobs of the machine, and everything that goes with them.
pub(super) struct Moving {
    own: OwnJobs,
    jobs: Vec<(OwnJob, String)>,
    disk: Disk,
    blobs: snapshot::Blobs,
}

impl Moving {
    /// Refuses what cannot be moved. Changes nothing.
    pub(super) async fn plan(config: &Config) -> Result<Moving, Fault> {
        let own = OwnJobs::open(&config.state_dir).await.map_err(|error| unread(&error))?;
        if let Some(obstacle) = own.obstacle(&config.node_name) {
            return Err(obstacle);
        }
        let named = |job: OwnJob| {
            let owner = owner_of(job.owner.as_ref());
            (job, owner)
        };
        let jobs: Vec<(OwnJob, String)> = own.list().into_iter().map(named).collect();
        let dir = config.state_dir.join("cas");
        let disk = Disk::open_with_reserve(&dir, config.disk_reserve)
            .map_err(|error| Fault::new(Code::StateUnusable, "cannot open the blob store").because(&error))?;
        let roots: Vec<Digest> = jobs.iter().flat_map(|(job, _)| job.trees.iter().copied()).collect();
        let blobs = snapshot::blobs(&disk, &roots).await.map_err(|error| not_here(&error))?;
        match blobs.missing_in(&disk).await.map_err(|error| not_here(&error))? {
            None => Ok(Moving { own, jobs, disk, blobs }),
            Some(blob) => Err(absent().why(format!("`{blob}` is not in the store of this machine"))),
        }
    }

    /// The whole move: `become_node` writes the identity.
    pub(super) async fn carry_out(
        self,
        config: &Config,
        credentials: &Credentials,
        become_node: impl FnOnce() -> Result<(), Fault>,
        clock: &Arc<dyn Clock>,
    ) -> Result<Moved, Fault> {
        let channel = channel(config, credentials, clock)?;
        self.send_ahead(&channel).await?;
        self.begin(&config.state_dir, &credentials.controller)?;
        visit(failpoint::hit("node.move.join"))?;
        become_node()?;
        self.hand_over(config, &channel, &credentials.controller, clock).await
    }

    /// What the controller decides on, before the machine is a node.
    pub(super) fn announced(&self) -> Vec<v1::MovingJob> {
        let announced = |(job, owner): &(OwnJob, String)| v1::MovingJob {
            job: job.id.to_string(),
            owner: owner.clone(),
            secrets: job.secrets.clone(),
        };
        self.jobs.iter().map(announced).collect()
    }

    /// Sends what the jobs need and what they have logged. Until now they are this machine's.
    async fn send_ahead(&self, channel: &Channel) -> Result<(), Fault> {
        if self.jobs.is_empty() {
            return Ok(());
        }
        visit(failpoint::hit("node.move.blobs"))?;
        self.blobs.copy(&self.disk, &Remote::new(channel.clone())).await.map_err(|error| {
            Fault::new(Code::Unreachable, "the code and inputs of the jobs could not be sent").because(&error)
        })?;
        visit(failpoint::hit("node.move.logs"))?;
        send_logs(channel, self.jobs.iter().flat_map(|(job, _)| &job.logs)).await
    }

    /// Notes that the move begins. From the identity on, which is written next, nothing of it is undone.
    fn begin(&self, state_dir: &Path, to: &str) -> Result<(), Fault> {
        let path = begun(state_dir);
        visit(failpoint::hit("node.move.begin"))?;
        agent_fs::write_durable(&path, to.as_bytes()).map_err(|error| unwritten(&path, &error))
    }

    /// Gives the jobs to the controller, and ends them in the own records.
    async fn hand_over(
        self,
        config: &Config,
        channel: &Channel,
        to: &str,
        clock: &Arc<dyn Clock>,
    ) -> Result<Moved, Fault> {
        let go_on = |fault: Fault| {
            fault
                .why("the machine is a node, and its jobs are not all at the controller yet")
                .fix("run `agentd join` again, or start the daemon: both go on with the move")
        };
        let running = self.jobs.iter().filter(|(job, _)| job.runs).count();
        let moved = Moved { running, waiting: self.jobs.len() - running };
        let records = self.jobs.into_iter().map(|(job, owner)| v1::MovedJob { owner, record: job.record });
        for jobs in pieces(records, |job| job.record.len()) {
            visit(failpoint::hit("node.move.send")).map_err(go_on)?;
            let request = v1::MoveJobsRequest { node: config.node_name.to_string(), jobs };
            within(WorkerClient::new(channel.clone()).move_jobs(request)).await.map_err(go_on)?;
            visit(failpoint::hit("node.move.sent")).map_err(go_on)?;
        }
        self.own.mark_moved(to, clock.now()).await.map_err(|error| go_on(unread(&error)))?;
        self.own.close().await;
        visit(failpoint::hit("node.move.done")).map_err(go_on)?;
        forget(&config.state_dir)?;
        Ok(moved)
    }
}

/// The items in their order, in messages of at most [`PIECE`] bytes or of one item.
fn pieces<T>(items: impl Iterator<Item = T>, size: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let (mut all, mut room): (Vec<Vec<T>>, usize) = (Vec::new(), 0);
    for item in items {
        let size = size(&item);
        match all.last_mut() {
            Some(last) if size <= room => {
                last.push(item);
                room -= size;
            }
            _ => {
                all.push(vec![item]);
                room = PIECE.saturating_sub(size);
            }
        }
    }
    all
}

/// The name of a user of this machine. A job without a recorded owner is of whoever runs the daemon.
fn owner_of(owner: Option<&Principal>) -> String {
    let of = |uid: u32| JobUser::of(uid).map_or_else(|| uid.to_string(), |user| user.name);
    match owner {
        Some(Principal::Local { uid }) => of(*uid),
        Some(Principal::User { name }) => name.to_string(),
        Some(Principal::Node { name }) => name.to_string(),
        None => of(rustix::process::geteuid().as_raw()),
    }
}

/// Sends what the archive has of logs and metrics: nodes remove what their controller has.
async fn send_logs(channel: &Channel, logs: impl Iterator<Item = &OwnLog>) -> Result<(), Fault> {
    let (requests, stream) = mpsc::channel(1);
    let mut client = TelemetryClient::new(channel.clone());
    let mut answers = within(client.append(ReceiverStream::new(stream))).await?;
    for log in logs {
        let mut stored = append(&requests, &mut answers, log, 0, Vec::new()).await?;
        loop {
            let data = read(&log.path, stored).await?;
            if data.is_empty() {
                break;
            }
            let now = append(&requests, &mut answers, log, stored, data).await?;
            if now <= stored {
                break; // the controller keeps no more of it
            }
            stored = now;
        }
    }
    Ok(())
}

/// Sends one piece; returns how much of the log the controller has.
async fn append(
    requests: &mpsc::Sender<v1::AppendRequest>,
    answers: &mut Streaming<v1::AppendResponse>,
    log: &OwnLog,
    offset: u64,
    data: Vec<u8>,
) -> Result<u64, Fault> {
    let closed = || Fault::new(Code::Unreachable, "the controller took no more of the logs");
    let (replica, channel) = (log.replica.to_string(), log.channel.clone());
    let request = v1::AppendRequest { replica, channel, offset, data: data.into() };
    requests.send(request).await.map_err(|_| closed())?;
    let answer = async { answers.message().await.map(tonic::Response::new) };
    let answer = within(answer).await?.ok_or_else(closed)?;
    if answer.failed.is_empty() { Ok(answer.stored) } else { Err(closed().why(answer.failed)) }
}

/// The next piece of a file, from `offset` on.
async fn read(path: &Path, offset: u64) -> Result<Vec<u8>, Fault> {
    let owned = path.to_owned();
    let read = move || {
        let mut file = std::fs::File::open(owned)?;
        file.seek(SeekFrom::Start(offset))?;
        let mut data = Vec::new();
        file.take(PIECE as u64).read_to_end(&mut data)?;
        io::Result::Ok(data)
    };
    agent_blocking::blocking(read).await.map_err(|error| unwritten(path, &error))
}

fn visit(hit: io::Result<()>) -> Result<(), Fault> {
    hit.map_err(|error| Fault::new(Code::StateUnusable, "a step of the move failed").because(&error))
}

fn unwritten(path: &Path, error: &io::Error) -> Fault {
    Fault::new(Code::StateUnusable, format!("cannot use {}", path.display())).because(error)
}

fn unread(error: &OwnJobsError) -> Fault {
    Fault::new(Code::StateUnusable, "cannot use the records of this machine's own jobs")
        .because(error)
        .fix("start its daemon once more, which repairs what can be repaired, and stop it; then join again")
}

fn absent() -> Fault {
    Fault::new(Code::SnapshotMissing, "code or inputs of the jobs are not on this machine")
        .fix("end the jobs that need them: agentctl cancel --wait JOB; then join again")
}

fn not_here(error: &CopyError) -> Fault {
    match error.is_absent() {
        true => absent().because(error),
        false => {
            Fault::new(Code::StateUnusable, "cannot read the code and inputs of the jobs").because(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_what_was_moved_is_one_line() {
        let said = |running, waiting| Moved { running, waiting }.to_string();
        assert_eq!(said(2, 3), "2 running jobs go on there, 3 waiting jobs were moved there");
        assert_eq!(said(1, 0), "1 running job goes on there");
        assert_eq!(said(0, 1), "1 waiting job was moved there");
    }

    #[test]
    fn test_messages_are_small_and_keep_the_order() {
        let sizes = [PIECE / 2, PIECE / 2, 1, PIECE * 2, 1, 1];
        let sent = pieces(sizes.into_iter().enumerate(), |(_, size)| *size);
        let order: Vec<Vec<usize>> =
            sent.iter().map(|piece| piece.iter().map(|(index, _)| *index).collect()).collect();
        assert_eq!(order, [vec![0, 1], vec![2], vec![3], vec![4, 5]]);
    }

    #[test]
    fn test_only_a_node_has_a_move_to_finish() {
        let state = tempfile::tempdir().unwrap();
        std::fs::write(begun(state.path()), "https://c:7443").unwrap();
        assert!(!is_pending(state.path()), "the join was cut off before it was one");
        std::fs::write(file(state.path()), "{}").unwrap();
        assert!(is_pending(state.path()));
        forget(state.path()).unwrap();
        forget(state.path()).unwrap();
        assert!(!is_pending(state.path()));
    }

    #[test]
    fn test_owners_go_by_the_names_of_this_machine() {
        assert_eq!(owner_of(Some(&Principal::Local { uid: 0 })), "root");
        assert_eq!(owner_of(Some(&Principal::Local { uid: 4_000_000_000 })), "4000000000");
        assert_eq!(owner_of(Some(&Principal::User { name: "ada".parse().unwrap() })), "ada");
    }
}
