//! `agent-shim rank ARGV…`: starts the command of a rank of several, as a process of the job.
//!
//! It reads its order ([`GangLaunch`]) from standard input. It writes the files for the command and `mpirun` into
//! the folder `.agentd` of the working directory, and then becomes the command ([`Way::Once`]), or waits for the
//! processes that it starts: [`each`], [`mpi`], [`lend`].
//!
//! It is only the first process of the job: it has no more rights than any other, is ended like any other, and its
//! messages are in the job's log.

mod each;
mod lend;
mod mpi;
mod wire;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};

use std::time::{Duration, Instant};

use agent_shim::gang::{GangLaunch, Way};

pub(crate) use lend::rsh;

/// The folder in the working directory.
const FOLDER: &str = ".agentd";

/// The exit code of a shell for a program that does not exist.
const NOT_FOUND: u8 = 127;

/// The file to which the script writes that the command failed.
const FAILED: &str = "failed";

/// How long `mpirun` may take to end all others when one process has failed.
const OVERSIGHT: Duration = Duration::from_secs(8);

/// A process of this machine that failed. Usually `mpirun` ends all others then, but there are some that do not.
#[derive(Debug, Default)]
struct FailedProcess(Option<Instant>);

impl FailedProcess {
    /// The exit code, when it has been there for so long that `mpirun` will not react any more.
    fn look(&mut self) -> Option<u8> {
        let said = fs::read_to_string(Path::new(FOLDER).join(FAILED)).ok()?;
        let since = *self.0.get_or_insert_with(Instant::now);
        (since.elapsed() >= OVERSIGHT).then(|| said.trim().parse().unwrap_or(1))
    }
}

/// Why a rank cannot do its part.
#[derive(Debug, thiserror::Error)]
enum RankError {
    #[error("could not read what to start")]
    Order(#[source] io::Error),
    #[error("could not write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("could not start {program}")]
    Start { program: String, source: io::Error },
    #[error("could not listen at {at}")]
    Listen { at: String, source: io::Error },
    #[error("could not wait for a process")]
    Wait(#[source] io::Error),
    #[error(
        "there is no `{program}`: the environment of the job must have an MPI, or `AGENTD_MPIRUN` must name its program"
    )]
    NoMpi { program: String },
    #[error("`{program} --version` says nothing that is known: {said}")]
    StrangeMpi { program: String, said: String },
}

/// Starts the command `argv`; returns its exit code.
pub(crate) fn run(argv: &[OsString]) -> ExitCode {
    match start(argv) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say_error(&error);
            let missing = matches!(&error, RankError::NoMpi { .. })
                || matches!(&error, RankError::Start { source, .. } if source.kind() == io::ErrorKind::NotFound);
            ExitCode::from(if missing { NOT_FOUND } else { 1 })
        }
    }
}

fn start(argv: &[OsString]) -> Result<u8, RankError> {
    let order = read_order().map_err(RankError::Order)?;
    write_hosts(&order)?;
    match &order.way {
        Way::Once => Err(become_command(argv)),
        Way::Each(variables) => each::run(argv, variables),
        Way::Lead(network) => mpi::lead(&order, network, argv),
        Way::Lend => {
            mpi::write_script(&order, argv)?;
            lend::run(&order)
        }
    }
}

/// Reads the order to its end; the processes of the job find nothing on standard input.
fn read_order() -> io::Result<GangLaunch> {
    let mut text = String::new();
    io::stdin().read_to_string(&mut text)?;
    nix::unistd::dup2_stdin(File::open("/dev/null")?)?;
    serde_json::from_str(&text).map_err(io::Error::other)
}

/// The machines of all ranks, as `mpirun` reads them.
fn write_hosts(order: &GangLaunch) -> Result<(), RankError> {
    let line = |host: &agent_shim::gang::Host| format!("{} slots={}\n", host.address, host.slots);
    let text: String = order.hosts.iter().map(line).collect();
    write("hosts", text.as_bytes(), 0o644)
}

/// Writes a file of the folder.
fn write(name: &str, text: &[u8], mode: u32) -> Result<(), RankError> {
    let path = Path::new(FOLDER).join(name);
    let write = || {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(FOLDER)?;
        let mut file = File::options().write(true).create(true).truncate(true).mode(mode).open(&path)?;
        file.write_all(text)
    };
    write().map_err(|source| RankError::Write { path, source })
}

/// Becomes the command; returns only if that fails.
fn become_command(argv: &[OsString]) -> RankError {
    let program = argv.first().map(|program| program.to_string_lossy().into_owned()).unwrap_or_default();
    RankError::Start { program, source: command(argv).exec() }
}

#[allow(clippy::disallowed_methods, reason = "starts the processes of a job, in the job")]
fn command<S: AsRef<OsStr>>(argv: &[S]) -> Command {
    let mut words = argv.iter();
    let mut command = Command::new(words.next().map_or(OsStr::new(""), AsRef::as_ref));
    command.args(words);
    command
}

/// The words that start this program, before those that select what it does.
fn own_words() -> io::Result<Vec<String>> {
    let line = fs::read("/proc/self/cmdline")?;
    let words = line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    Ok(words.take_while(|word| word != agent_shim::RANK).collect())
}

/// A word as a shell reads it whole.
fn quoted(word: &OsStr) -> String {
    format!("'{}'", word.to_string_lossy().replace('\'', r"'\''"))
}

/// The exit code of a process, as a shell reports it.
pub(crate) fn code_of(status: ExitStatus) -> u8 {
    let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// Writes a line to the log of the job.
fn say(what: &str) {
    let _ = writeln!(io::stderr(), "agentd: {what}");
}

fn say_error(error: &(dyn std::error::Error + 'static)) {
    let causes: Vec<String> = agent_model::causes(error).map(ToString::to_string).collect();
    say(&causes.join(": "));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_words_survive_a_shell() {
        for word in ["plain", "it's", "a b", "$HOME `x` \"y\" \\", "-c", "", "é\nnext"] {
            let script = format!("printf %s {}", quoted(OsStr::new(word)));
            let said = command(&["sh", "-c", &script]).output().unwrap().stdout;
            assert_eq!(String::from_utf8(said).unwrap(), word);
        }
    }
}
