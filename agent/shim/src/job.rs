//! The start of the command.

use std::ffi::CString;
use std::fs;
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

use agent_model::failpoint;
use agent_shim::gang::GangLaunch;
use agent_shim::{JobDir, Launch, MARK, NotStarted, sys, view};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// How much output the job may be ahead of the log, in bytes, where the system allows it.
const PIPE: i32 = 1 << 20;

/// A command that runs.
#[derive(Debug)]
pub(crate) struct Started {
    /// Its process number; it is a child of this process.
    pub(crate) pid: i32,
    /// The end of the pipe its output comes from; reading never blocks.
    pub(crate) output: OwnedFd,
    /// How much the pipe holds, in bytes.
    pub(crate) capacity: usize,
}

/// Marks the job as started, and executes the command in these groups; `folder` is the job's
/// part of the directory, as the job finds it. The attendant is started beside it, with `attends` as its socket. After
/// an error it must not be tried again.
pub(crate) fn start(
    dir: &JobDir,
    folder: &Path,
    launch: &Launch,
    instance: &str,
    groups: &sys::Entrances,
    attends: Option<OwnedFd>,
) -> Result<Started, NotStarted> {
    let failed = |step: &str| {
        let step = step.to_owned();
        move |error: io::Error| NotStarted::Setup { step, os_error: error.raw_os_error().unwrap_or(0) }
    };
    let cwd = folder.join(&launch.cwd);
    let enter = fs::metadata(&cwd).and_then(|found| {
        if found.is_dir() { Ok(()) } else { Err(io::Error::from_raw_os_error(nix::libc::ENOTDIR)) }
    });
    enter.map_err(failed(&format!("enter {}", launch.cwd.display())))?;
    let (output, input, capacity) = pipe().map_err(failed("make a pipe for the output"))?;
    dir.mark_started(instance).map_err(failed("mark the job as started"))?;

    if let Some(files) = launch.open_files.filter(|_| !launch.container) {
        let (_, most) =
            getrlimit(Resource::RLIMIT_NOFILE).map_err(|errno| failed("read a limit")(errno.into()))?;
        // The limit is this process's own as well, which has a dozen files.
        let set = setrlimit(Resource::RLIMIT_NOFILE, files.min(most), most);
        set.map_err(|errno| failed("limit the number of open files")(errno.into()))?;
    }
    let (argv, order) = match &launch.gang {
        None => (launch.argv.clone(), Stdio::null()),
        Some(gang) => through_rank(launch, gang).map_err(failed("hand the rank its order"))?,
    };
    let [program, args @ ..] = argv.as_slice() else {
        return Err(NotStarted::Exec { program: String::new(), os_error: nix::libc::ENOENT });
    };
    #[allow(clippy::disallowed_methods, reason = "this is the one process a shim starts")]
    let mut command = Command::new(program);
    command.args(args).env_clear().envs(&launch.env).env(MARK, instance).current_dir(&cwd);
    command.envs(launch.secrets.iter().map(|(name, value)| (name, &value.0)));
    let error_input = input.try_clone().map_err(failed("make a pipe for the output"))?;
    command.stdin(order).stdout(input).stderr(error_input);
    // The view of another user's job is that of this process.
    let view = launch.view.clone().filter(|view| view.state.is_some());
    let enter = view.map(|view| -> sys::Entering { Box::new(move || view::enter(&view, &cwd)) });
    let beside = attends.and_then(|socket| attendant(&command, socket).ok());
    sys::start_as_job(&mut command, launch.user.clone(), launch.container, enter, beside);
    match failpoint::hit("shim.exec").and_then(|()| sys::spawn_in(groups, &mut command)) {
        Ok(pid) => Ok(Started { pid, output, capacity }),
        Err(error) if let Some((step, os_error)) = sys::failed_before(&error) => {
            Err(NotStarted::Setup { step: step.to_owned(), os_error })
        }
        Err(error) => Err(NotStarted::Exec {
            program: program.clone(),
            os_error: error.raw_os_error().unwrap_or(nix::libc::EINVAL),
        }),
    }
}

/// The attendant, with the variables of the command.
fn attendant(command: &Command, socket: OwnedFd) -> io::Result<sys::Beside> {
    use std::os::unix::ffi::OsStrExt as _;
    let mut argv = own_words()?;
    argv.push(agent_shim::ATTEND.to_owned());
    let variables = command.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let env = variables.map(|(name, value)| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()));
    let argv = argv.into_iter().map(CString::new).collect::<Result<_, _>>()?;
    Ok(sys::Beside { argv, env: env.collect::<Result<_, _>>()?, socket })
}

/// The command line by which this program starts the command of a rank, and its standard input.
fn through_rank(launch: &Launch, gang: &GangLaunch) -> io::Result<(Vec<String>, Stdio)> {
    let mut argv = own_words()?;
    argv.push(agent_shim::RANK.to_owned());
    argv.extend(launch.argv.iter().cloned());
    let mut order = fs::File::from(memfd_create(c"order", MFdFlags::MFD_CLOEXEC)?);
    order.write_all(&serde_json::to_vec(gang)?)?;
    order.seek(SeekFrom::Start(0))?;
    Ok((argv, order.into()))
}

/// This process's own command line, cut before the job directory, or before `--assigned` or `--door`: the words that
/// start this program.
fn own_words() -> io::Result<Vec<String>> {
    let line = fs::read("/proc/self/cmdline")?;
    let words = line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    let mut argv: Vec<String> = words.filter(|word| !word.is_empty()).collect();
    let is_own = |word: &String| word == "--door" || word == agent_shim::apart::ASSIGNED;
    argv.truncate(argv.iter().position(is_own).unwrap_or(argv.len().saturating_sub(1)));
    Ok(argv)
}

/// One pipe for both streams, so that the log keeps the order in which the job wrote.
fn pipe() -> io::Result<(OwnedFd, OwnedFd, usize)> {
    let (output, input) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    fcntl(&output, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    let capacity =
        fcntl(&output, FcntlArg::F_SETPIPE_SZ(PIPE)).or_else(|_| fcntl(&output, FcntlArg::F_GETPIPE_SZ))?;
    Ok((output, input, usize::try_from(capacity).unwrap_or(0)))
}
