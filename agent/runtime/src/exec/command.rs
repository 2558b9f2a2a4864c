//! Short children: output captured or streamed, a deadline on silence, and no survivor.
//!
//! Each child leads a process group of its own. The group is killed when the child has ended (before it is
//! reaped, while its number cannot be anybody else's), when it is silent for too long, and when the future
//! that waits for it is dropped. A daemon that is killed cannot do any of that: callers whose children must
//! not survive it give them a mark, and [`agent_shim::process::kill_marked`] finds them in
//! the next life.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::process::Child;

/// The most output [`Command::capture`] keeps, in bytes; what comes later is read and dropped.
const MAX_CAPTURE: usize = 4 << 20;

/// A short child to run. Its environment is what [`envs`](Command::envs) gives it and nothing else, its
/// standard input is empty.
#[derive(Debug, Clone)]
pub struct Command {
    program: PathBuf,
    args: Vec<OsString>,
    env: BTreeMap<OsString, OsString>,
    cwd: PathBuf,
    stall: Duration,
}

/// What a child left.
#[derive(Debug, Clone)]
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output and standard error, in the order they were written, up to 4 MiB.
    pub text: Vec<u8>,
}

/// Why a child did not run to its end.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// It could not be started.
    #[error("could not start {}", program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// Its output or its end could not be waited for.
    #[error("could not follow {}", program.display())]
    Follow {
        /// The program.
        program: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// It wrote nothing for too long, and was killed.
    #[error("{} was killed: it wrote nothing for {after:?}", program.display())]
    Stalled {
        /// The program.
        program: PathBuf,
        /// The longest silence allowed.
        after: Duration,
    },
}

impl Command {
    /// A child that runs `program`, a path or a name to look up in the `PATH` it is given, in `/`; it may
    /// be silent for a minute.
    pub fn new(program: impl Into<PathBuf>) -> Command {
        Command {
            program: program.into(),
            args: Vec::new(),
            env: BTreeMap::new(),
            cwd: PathBuf::from("/"),
            stall: Duration::from_secs(60),
        }
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

    /// Marks the child and its descendants, so that [`agent_shim::process::kill_marked`] finds them when
    /// this process is gone.
    /// The value must not be shared with anything that is to live, for example an absolute path that only
    /// one builder writes to.
    #[must_use]
    pub fn mark(self, value: &str) -> Command {
        self.envs([(agent_shim::MARK, value)])
    }

    /// Where it runs.
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

    /// Runs it to its end and returns what it wrote.
    pub async fn capture(&self) -> Result<Output, CommandError> {
        let mut text = Vec::new();
        let keep = |bytes: &[u8]| text.extend_from_slice(&bytes[..bytes.len().min(MAX_CAPTURE - text.len())]);
        let status = self.stream(keep).await?;
        Ok(Output { status, text })
    }

    /// Runs it to its end and hands over what it writes, standard output and standard error in one order.
    pub async fn stream(&self, mut sink: impl FnMut(&[u8]) + Send) -> Result<ExitStatus, CommandError> {
        let follow = |source| CommandError::Follow { program: self.program.clone(), source };
        let (mut group, output) =
            self.spawn().map_err(|source| CommandError::Spawn { program: self.program.clone(), source })?;
        let mut buffer = vec![0; 64 << 10];
        let mut open = true;
        while open {
            tokio::select! {
                biased;
                ended = group.exited() => {
                    ended.map_err(follow)?;
                    break;
                }
                read = read_some(&output, &mut buffer) => match read.map_err(follow)? {
                    0 => open = false,
                    length => sink(&buffer[..length]),
                },
                () = tokio::time::sleep(self.stall) => {
                    return Err(CommandError::Stalled { program: self.program.clone(), after: self.stall });
                }
            }
        }
        match tokio::time::timeout(self.stall, group.exited()).await {
            Ok(ended) => ended.map_err(follow)?,
            Err(_) => return Err(CommandError::Stalled { program: self.program.clone(), after: self.stall }),
        }
        group.kill();
        while let Ok(length @ 1..) = output.try_read(&mut buffer) {
            sink(&buffer[..length]);
        }
        group.child.wait().await.map_err(follow)
    }

    fn spawn(&self) -> io::Result<(Group, pipe::Receiver)> {
        let (output, input) = io::pipe()?;
        #[allow(clippy::disallowed_methods, reason = "this module starts the short children")]
        let mut command = tokio::process::Command::new(&self.program);
        command.args(&self.args).env_clear().envs(&self.env).current_dir(&self.cwd).process_group(0);
        command.stdin(Stdio::null()).stdout(input.try_clone()?).stderr(input);
        let child = command.spawn()?;
        let group = Group::of(child)?;
        Ok((group, pipe::Receiver::from_owned_fd(output.into())?))
    }
}

async fn read_some(output: &pipe::Receiver, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        output.readable().await?;
        match output.try_read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
    }
}

/// A child that is not reaped yet, and the group it leads.
struct Group {
    child: Child,
    id: Option<Pid>,
    exit: AsyncFd<OwnedFd>,
}

impl Group {
    fn of(child: Child) -> io::Result<Group> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let id = child.id().and_then(|id| i32::try_from(id).ok()).ok_or_else(gone)?;
        let pidfd = agent_shim::sys::pidfd_open(id)?;
        #[allow(deprecated, reason = "unsound for a type that may change its descriptor; an OwnedFd cannot")]
        let exit = AsyncFd::with_interest(pidfd, tokio::io::Interest::READABLE)?;
        Ok(Group { child, id: Some(Pid::from_raw(id)), exit })
    }

    /// Waits until the child has ended, and leaves it to be reaped.
    async fn exited(&mut self) -> io::Result<()> {
        self.exit.readable().await.map(|mut ready| ready.retain_ready())
    }

    /// Kills what is there of the group. Once: after that the number may be somebody else's.
    fn kill(&mut self) {
        if let Some(id) = self.id.take() {
            let _ = killpg(id, Signal::SIGKILL); // nobody left is what it is for
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}
