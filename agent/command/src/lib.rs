//! Short children: output captured or streamed, a limit on silence, and no process left behind.
//!
//! Hides: pipes, process groups and control groups, and whether this process starts a child or the helper does
//! ([`agent_spawn`]).
//!
//! Invariants: each child leads a process group of its own. The group is killed when the child has ended (before it
//! is reaped, while its number cannot be reused), when it is silent for too long, and when the future that waits for
//! it is dropped; the processes in a [`MemoryGroup`] are killed with the last user of that, even if they left the
//! process group. A killed daemon can do none of that: callers whose children must not survive it give them a mark, and
//! [`agent_shim::cgroup::kill_marked`] finds them after the restart.

mod child;
mod memory_group;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Seek as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use agent_model::size;
use agent_shim::apart::{AS, ITSELF};
use agent_shim::process::processor_time;
use agent_shim::room::BuilderRoom;
use agent_spawn::Program;
use futures_util::FutureExt as _;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use parking_lot::Mutex;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;

use memory_group::{GroupEntry, Kills};

pub use child::Child;
pub use memory_group::MemoryGroup;

/// The most output [`Command::capture`] keeps, in bytes; the rest is read and dropped.
const MAX_CAPTURE: usize = 4 << 20;

/// How many times as long as others a child may be silent that works.
const PATIENCE: u32 = 6;

/// Less processor time than this, or a hundredth of the time that it was looked at, is no work.
const LEAST_WORK: Duration = Duration::from_millis(10);

/// Enters the groups whose `cgroup.procs` files are the first arguments and then becomes the program. It enters
/// first, since processes that a program starts while it is being moved would stay outside.
const ENTER: &str = r#"while [ "$1" != -- ]; do echo $$ 2>/dev/null > "$1"; shift; done; shift; exec "$@""#;

/// Waits for the end of the pipe whose path is the first argument, and then becomes the program.
const WAIT: &str = r#"read -r _ < "$1"; shift; exec "$@""#;

/// Limits the memory of each process to so many KiB, and then becomes the program. A shell that cannot goes on.
const LIMIT: &str = r#"ulimit -d "$1" 2>/dev/null; shift; exec "$@""#;

/// A short child to run, once for each [`capture`](Command::capture), [`stream`](Command::stream) or
/// [`talk`](Command::talk). Its environment is only what [`envs`](Command::envs) gives it, its standard input only what
/// [`input`](Command::input) gives it.
#[derive(Debug, Clone)]
pub struct Command {
    program: PathBuf,
    args: Vec<OsString>,
    env: BTreeMap<OsString, OsString>,
    cwd: PathBuf,
    stall: Duration,
    may_work: bool,
    input: Option<Arc<[u8]>>,
    nice: i32,
    within: Option<Arc<MemoryGroup>>,
    leash: Option<Leash>,
    becomes: Option<Becoming>,
}

/// What a child is started as, before it becomes its program.
#[derive(Debug, Clone)]
struct Becoming {
    /// The program that does it.
    shim: PathBuf,
    /// The user, and the state directory, of which it sees a part; absent where it is the user of this process.
    other: Option<(u32, PathBuf)>,
    /// The directories that it sees of that one.
    sees: Vec<PathBuf>,
    /// The owner of jobs whose builder it is.
    owner: Option<String>,
}

impl Becoming {
    /// The directories that it sees, as the shim and the helper take them. The working directory is one of them.
    fn seen(&self, cwd: &Path) -> Vec<PathBuf> {
        let state_dir = self.other.as_ref().map(|(_, state_dir)| state_dir);
        let all = self.sees.iter().map(PathBuf::as_path).chain([cwd]);
        all.filter_map(|path| Some(path.strip_prefix(state_dir?).ok()?.to_owned())).collect()
    }

    fn room(&self, cwd: &Path) -> BuilderRoom {
        let state_dir = self.other.as_ref().map(|(_, state_dir)| state_dir.clone());
        BuilderRoom { state_dir, sees: self.seen(cwd) }
    }
}

/// Shows whether a child is gone, also when no caller waits for it any more: a killed process may stay in the kernel
/// for long. Clones watch the same child.
#[derive(Debug, Clone, Default)]
pub struct Leash(Arc<Mutex<Option<Exit>>>);

/// Readable once the child has ended.
type Exit = Arc<AsyncFd<OwnedFd>>;

impl Leash {
    /// Whether the last child that was started with it has ended; true also when none was started.
    pub fn is_gone(&self) -> bool {
        let exit = self.0.lock().clone();
        exit.is_none_or(|exit| {
            exit.readable()
                .now_or_never()
                .is_some_and(|ready| ready.map(|mut ready| ready.retain_ready()).is_ok())
        })
    }
}

/// The result of a child.
#[derive(Debug, Clone)]
pub struct CommandOutput {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output and standard error, in the order of writing, up to 4 MiB.
    pub text: Vec<u8>,
}

/// Why a child did not run to its end.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum CommandError {
    #[error("could not start {}", program.display())]
    Spawn { program: PathBuf, source: io::Error },
    #[error("could not follow {}", program.display())]
    Follow { program: PathBuf, source: io::Error },
    #[error("{} was ended at its memory limit of {}", program.display(), size::binary(*limit))]
    OutOfMemory {
        program: PathBuf,
        /// The limit, in bytes.
        limit: u64,
    },
    #[error("{} was killed: it wrote nothing for {after:?}", program.display())]
    Stalled {
        program: PathBuf,
        /// The longest silence allowed.
        after: Duration,
    },
}

impl Command {
    /// A child that runs `program`, a path or a name that is looked up in the `PATH` it is given, in the directory
    /// `/`; it may be silent for a minute.
    pub fn new(program: impl Into<PathBuf>) -> Command {
        Command {
            program: program.into(),
            args: Vec::new(),
            env: BTreeMap::new(),
            cwd: PathBuf::from("/"),
            stall: Duration::from_secs(60),
            may_work: false,
            input: None,
            nice: 0,
            within: None,
            leash: None,
            becomes: None,
        }
    }

    /// It runs as the user with the number `id`, with only that user's rights, and the processes it starts are killed
    /// with it. Of `state_dir` it sees its working directory and what [`Command::sees`] adds. `shim` is the path of
    /// `agent-shim`, which switches to the user; the helper, if there is one, uses its own, and its own number.
    #[must_use]
    pub fn run_as(mut self, shim: &Path, id: u32, state_dir: &Path) -> Command {
        let (shim, other) = (shim.to_owned(), Some((id, state_dir.to_owned())));
        self.becomes = Some(Becoming { shim, other, sees: Vec::new(), owner: None });
        self
    }

    /// The processes it starts are killed with it. `shim` is the path of `agent-shim`, which does that.
    #[must_use]
    pub fn alone(mut self, shim: &Path) -> Command {
        let shim = shim.to_owned();
        self.becomes = Some(Becoming { shim, other: None, sees: Vec::new(), owner: None });
        self
    }

    /// It is the builder of this owner of jobs: the helper uses his number.
    #[must_use]
    pub fn of_owner(mut self, owner: &str) -> Command {
        self.becomes.iter_mut().for_each(|becomes| becomes.owner = Some(owner.to_owned()));
        self
    }

    /// As another user it sees this directory, too.
    #[must_use]
    pub fn sees(mut self, dir: &Path) -> Command {
        self.becomes.iter_mut().for_each(|becomes| becomes.sees.push(dir.to_owned()));
        self
    }

    /// Whether it runs as another user than this process.
    pub fn is_somebody_else(&self) -> bool {
        self.becomes.as_ref().is_some_and(|becomes| becomes.other.is_some())
    }

    /// Lets callers see whether the child is gone.
    #[must_use]
    pub fn leash(mut self, leash: &Leash) -> Command {
        self.leash = Some(leash.clone());
        self
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Command {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Adds environment variables.
    #[must_use]
    pub fn envs<K: AsRef<OsStr>, V: AsRef<OsStr>>(
        mut self,
        vars: impl IntoIterator<Item = (K, V)>,
    ) -> Command {
        self.env.extend(vars.into_iter().map(|(k, v)| (k.as_ref().to_owned(), v.as_ref().to_owned())));
        self
    }

    /// Marks the child and its descendants, so that [`agent_shim::cgroup::kill_marked`] finds them when this process
    /// is gone. The value must not be shared with processes that are to survive; it is for example an absolute path
    /// that only one builder writes to.
    #[must_use]
    pub fn mark(self, value: &str) -> Command {
        self.envs([(agent_shim::MARK, value)])
    }

    /// Its working directory.
    #[must_use]
    pub fn cwd(mut self, dir: impl AsRef<Path>) -> Command {
        self.cwd = dir.as_ref().to_owned();
        self
    }

    /// How long it may write nothing before it is killed.
    #[must_use]
    pub fn stall(mut self, longest_silence: Duration) -> Command {
        self.stall = longest_silence;
        self
    }

    /// While it uses the processor it may be silent for six times that: pip says nothing while it unpacks.
    #[must_use]
    pub fn may_work_silently(mut self) -> Command {
        self.may_work = true;
        self
    }

    /// Its standard input. It is held in memory, so a child that does not read it delays nobody.
    #[must_use]
    pub fn input(mut self, bytes: impl Into<Vec<u8>>) -> Command {
        self.input = Some(bytes.into().into());
        self
    }

    /// How much nicer it is than this process, 0 to 19, from right after its start.
    #[must_use]
    pub fn nice(mut self, nice: i32) -> Command {
        self.nice = nice;
        self
    }

    /// Its processes are limited, and killed, together with all others in the group; `None` for no limit.
    #[must_use]
    pub fn within(mut self, limited: Option<Arc<MemoryGroup>>) -> Command {
        self.within = limited;
        self
    }

    /// Runs it to its end and returns its output. A status that means failure is no error.
    pub async fn capture(&self) -> Result<CommandOutput, CommandError> {
        let mut text = Vec::new();
        let keep = |bytes: &[u8]| text.extend_from_slice(&bytes[..bytes.len().min(MAX_CAPTURE - text.len())]);
        let status = self.stream(keep).await?;
        Ok(CommandOutput { status, text })
    }

    /// Runs it to its end and passes on its output: standard output and standard error in one order.
    /// Returns how it ended: a status that means failure is no error.
    pub async fn stream(&self, mut sink: impl FnMut(&[u8]) + Send) -> Result<ExitStatus, CommandError> {
        let started = async {
            let (output, input) = io::pipe()?;
            let group = self.spawn(input.try_clone()?.into(), input.into()).await?;
            Ok((group, pipe::Receiver::from_owned_fd(output.into())?))
        };
        let (group, output) = started.await.map_err(|source| self.not_started(source))?;
        self.follow(group, [Some(output), None], |_, bytes| sink(bytes)).await
    }

    /// Runs it to its end and passes on its output: standard output and standard error separately.
    /// Returns how it ended, as [`stream`](Command::stream).
    pub async fn talk(
        &self,
        mut output: impl FnMut(&[u8]) + Send,
        mut error: impl FnMut(&[u8]) + Send,
    ) -> Result<ExitStatus, CommandError> {
        let started = async {
            let ((said, output), (complained, error)) = (io::pipe()?, io::pipe()?);
            let group = self.spawn(output.into(), error.into()).await?;
            let receiver = pipe::Receiver::from_owned_fd;
            Ok((group, [Some(receiver(said.into())?), Some(receiver(complained.into())?)]))
        };
        let (group, pipes) = started.await.map_err(|source| self.not_started(source))?;
        let sink = |index, bytes: &[u8]| if index == 0 { output(bytes) } else { error(bytes) };
        self.follow(group, pipes, sink).await
    }

    async fn follow(
        &self,
        mut group: Group,
        mut pipes: [Option<pipe::Receiver>; 2],
        mut sink: impl FnMut(usize, &[u8]) + Send,
    ) -> Result<ExitStatus, CommandError> {
        let follow = |source| CommandError::Follow { program: self.program.clone(), source };
        let stalled = || CommandError::Stalled { program: self.program.clone(), after: self.stall };
        let mut buffers = [vec![0; 64 << 10], vec![0; if pipes[1].is_some() { 64 << 10 } else { 0 }]];
        let [first, second] = &mut buffers;
        let id = group.id;
        if let (Some(gate), Some((limited, _)), Some(id)) = (group.gate.take(), &group.within, id) {
            limited.enclose(id.as_raw()).await;
            drop(gate);
        }
        while pipes.iter().any(Option::is_some) {
            let (index, read) = tokio::select! {
                biased;
                ended = group.exited() => {
                    ended.map_err(follow)?;
                    break;
                }
                read = read_some(pipes[0].as_ref(), first) => (0, read),
                read = read_some(pipes[1].as_ref(), second) => (1, read),
                () = self.silent(id) => return Err(stalled()),
            };
            match read.map_err(follow)? {
                0 => pipes[index] = None,
                length => sink(index, &if index == 0 { &*first } else { &*second }[..length]),
            }
        }
        tokio::select! {
            biased;
            ended = group.exited() => ended.map_err(follow)?,
            () = self.silent(id) => return Err(stalled()),
        }
        let mut out_of_memory = group.out_of_memory();
        group.kill();
        for (index, pipe) in pipes.iter().enumerate() {
            while let Some(length @ 1..) = pipe.as_ref().map(|pipe| read_rest(pipe, first)) {
                sink(index, &first[..length]);
            }
        }
        let ended = group.child.ended().await.map_err(follow)?;
        if let Some((limited, _)) = group.within.as_ref().filter(|_| ended.out_of_memory) {
            out_of_memory = Some(limited.limit());
        }
        let status = ended.status;
        match out_of_memory {
            Some(limit) if !status.success() => {
                Err(CommandError::OutOfMemory { program: self.program.clone(), limit })
            }
            _ => Ok(status),
        }
    }

    /// Returns when the child has been silent for too long. Whether it works is only looked at shortly before.
    async fn silent(&self, group: Option<Pid>) {
        let Some(group) = group.filter(|_| self.may_work) else {
            return tokio::time::sleep(self.stall).await;
        };
        let looked_at = self.stall / 10;
        for _ in 0..PATIENCE {
            tokio::time::sleep(self.stall - looked_at).await;
            let before = processor_time(group.as_raw());
            tokio::time::sleep(looked_at).await;
            let worked = processor_time(group.as_raw()).saturating_sub(before);
            if worked < (looked_at / 100).max(LEAST_WORK) {
                return;
            }
        }
    }

    fn not_started(&self, source: io::Error) -> CommandError {
        CommandError::Spawn { program: self.program.clone(), source }
    }

    async fn spawn(&self, output: OwnedFd, error: OwnedFd) -> io::Result<Group> {
        let input = match &self.input {
            Some(bytes) => in_memory(bytes)?,
            None => File::open("/dev/null")?,
        };
        let kills = self.within.as_deref().map(MemoryGroup::kills);
        let helped = self.becomes.as_ref().filter(|_| self.is_somebody_else() && agent_spawn::has_helper());
        let mut group = match helped {
            Some(becomes) => self.ask(becomes, [input.into(), output, error]).await?,
            None => self.spawn_here(input.into(), output.into(), error.into())?,
        };
        if let Some(Leash(watched)) = &self.leash {
            *watched.lock() = Some(group.exit.clone());
        }
        group.within = self.within.clone().zip(kills);
        Ok(group)
    }

    /// Has the helper start it: only the helper can switch to another user.
    async fn ask(&self, becomes: &Becoming, streams: [OwnedFd; 3]) -> io::Result<Group> {
        let text = |text: &OsStr| {
            text.to_str().map(str::to_owned).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
        };
        let words =
            std::iter::once(self.program.as_os_str()).chain(self.args.iter().map(OsString::as_os_str));
        let program = Program {
            argv: words.map(text).collect::<io::Result<_>>()?,
            env: self
                .env
                .iter()
                .map(|(name, value)| Ok((text(name)?, text(value)?)))
                .collect::<io::Result<_>>()?,
            cwd: self.cwd.clone(),
            nice: self.nice,
            memory: self.within.as_ref().map(|limited| limited.limit()),
            sees: becomes.seen(&self.cwd),
            owner: becomes.owner.clone(),
        };
        let ask = move || agent_spawn::ask_for_builder(&program, streams);
        let asked = agent_blocking::blocking(ask).await;
        let started = asked.ok_or(io::ErrorKind::Unsupported)??;
        let pidfd = started.pidfd.try_clone()?;
        Group::watch(Child::Helped(Arc::new(started)), pidfd)
    }

    #[allow(clippy::disallowed_methods, reason = "this module starts the short children")]
    fn spawn_here(&self, input: Stdio, output: Stdio, error: Stdio) -> io::Result<Group> {
        let first = self.becomes.as_ref().map_or(&self.program, |becomes| &becomes.shim);
        let (mut command, gate) = self.entering(first)?;
        if let Some(becomes) = &self.becomes {
            let id = becomes.other.as_ref().map_or_else(|| ITSELF.to_owned(), |(id, _)| id.to_string());
            command.arg(AS).arg(id).arg(serde_json::to_string(&becomes.room(&self.cwd))?).arg(&self.program);
        }
        command.args(&self.args).env_clear().envs(&self.env).current_dir(&self.cwd).process_group(0);
        let child = Child::Own(command.stdin(input).stdout(output).stderr(error).spawn()?);
        let id = child.id().ok_or(io::ErrorKind::NotFound)?;
        let mut group = Group::watch(child, agent_shim::sys::pidfd_open(id)?)?;
        group.gate = gate;
        if self.nice != 0 {
            agent_spawn::give_way(id, self.nice);
        }
        Ok(group)
    }
}

/// What a child waits for before it becomes its program: both ends of a pipe.
type StartPipe = (io::PipeReader, io::PipeWriter);

impl Command {
    /// What is started so that `program` is limited from its beginning, as far as it can be.
    #[allow(clippy::disallowed_methods, reason = "this module starts the short children")]
    fn entering(&self, program: &Path) -> io::Result<(tokio::process::Command, Option<StartPipe>)> {
        let Some(limited) = &self.within else { return Ok((tokio::process::Command::new(program), None)) };
        let mut shell = tokio::process::Command::new("/bin/sh");
        let gate = match limited.entry()? {
            GroupEntry::Groups(files) => {
                shell.args(["-c", ENTER, "sh"]).args(files).arg("--");
                None
            }
            GroupEntry::Waits(inside, outside) => {
                let path = format!("/proc/{}/fd/{}", std::process::id(), inside.as_raw_fd());
                shell.args(["-c", WAIT, "sh", &path]);
                Some((inside, outside))
            }
            GroupEntry::Each => {
                shell.args(["-c", LIMIT, "sh", &(limited.limit() / 1024).to_string()]);
                None
            }
        };
        shell.arg(program);
        Ok((shell, gate))
    }
}

/// A file in memory with these bytes.
fn in_memory(bytes: &[u8]) -> io::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create("input", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file)
}

/// Waits for output; for ever if there is no pipe.
async fn read_some(output: Option<&pipe::Receiver>, buffer: &mut [u8]) -> io::Result<usize> {
    let Some(output) = output else { return std::future::pending().await };
    loop {
        output.readable().await?;
        match output.try_read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
    }
}

/// Reads what is in the pipe; 0 when there is no more. It reads the pipe itself: the child's end may be noticed
/// before the receiver hears of the last output, and until then the receiver would report an empty pipe.
fn read_rest(output: &pipe::Receiver, buffer: &mut [u8]) -> usize {
    rustix::io::retry_on_intr(|| rustix::io::read(output, &mut *buffer)).unwrap_or(0)
}

/// A child that is not reaped yet, and the process group it leads.
struct Group {
    child: Child,
    id: Option<Pid>,
    exit: Exit,
    /// Its memory group, and how many processes had been killed there before it started.
    within: Option<(Arc<MemoryGroup>, Kills)>,
    /// What it waits at.
    gate: Option<StartPipe>,
}

impl Group {
    fn watch(child: Child, pidfd: OwnedFd) -> io::Result<Group> {
        let id = child.id().ok_or(io::ErrorKind::NotFound)?;
        #[allow(deprecated, reason = "unsound for a type that may change its descriptor; an OwnedFd cannot")]
        let exit = AsyncFd::with_interest(pidfd, tokio::io::Interest::READABLE)?;
        Ok(Group { child, id: Some(Pid::from_raw(id)), exit: Arc::new(exit), within: None, gate: None })
    }

    /// Waits until the child has ended, and leaves it to be reaped.
    async fn exited(&mut self) -> io::Result<()> {
        self.exit.readable().await.map(|mut ready| ready.retain_ready())
    }

    /// The memory limit, if the kernel killed a process of the memory group since it started.
    fn out_of_memory(&self) -> Option<u64> {
        let (limited, before) = self.within.as_ref()?;
        (limited.kills() != *before).then_some(limited.limit())
    }

    /// Kills the process group. Only once: after that the number may be reused.
    fn kill(&mut self) {
        if let Some(id) = self.id.take() {
            let _ = killpg(id, Signal::SIGKILL); // it fails only if no process is left
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
mod tests;
