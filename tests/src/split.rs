//! The privilege split of a machine: a daemon that is an ordinary user, and the helper of root beside it.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::{Host, SOON, binaries, eventually};

/// The daemon: `www-data` of every Debian.
pub const KEEPER: u32 = 33;
/// The group that may submit jobs: `nogroup`.
const MEMBERS: u32 = 65_534;
/// Users who have homes: `games` of every Debian, and one without an account.
const USERS: [u32; 2] = [5, 54_321];

/// Listens as a service manager does, and becomes the helper.
const LISTEN: &str = r"
import os, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
path, keeper, program = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
if os.path.exists(path): os.unlink(path)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(path)
os.chown(path, keeper, keeper)
os.chmod(path, 0o600)
listener.listen(64)
os.dup2(listener.fileno(), 0)
os.execv(program[0], program)
";

/// The helper of a box; it ends with this value.
#[derive(Debug)]
pub struct Helper {
    child: Child,
    socket: PathBuf,
}

impl Helper {
    /// That of the box with this home and state, by the program that is installed there.
    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    pub fn start(home: &Path, state: &Path) -> Helper {
        let socket = home.join("run/spawn.sock");
        let program = home.join("bin/agent-spawn");
        let child = Command::new("python3")
            .args(["-c", LISTEN])
            .arg(&socket)
            .arg(KEEPER.to_string())
            .arg(program)
            .arg("--state-dir")
            .arg(state)
            .args(["--user", "www-data", "--account", "games"])
            .stdin(Stdio::null())
            .spawn()
            .expect("Python runs");
        let path = socket.to_str().expect("UTF-8");
        eventually("the helper listens", SOON, || {
            let known = fs::read_to_string("/proc/net/unix").expect("procfs");
            // The fourth column says who accepts connections.
            known.lines().any(|line| line.ends_with(path) && line.contains(" 00010000 ")).then_some(())
        });
        Helper { child, socket }
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        self.child.kill().expect("its own child");
        self.child.wait().expect("its own child");
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The daemon of a machine that `nogroup` may use, as an ordinary user, and its helper.
pub fn split_with(settings: &[(&str, &str)]) -> (Host, Helper) {
    split_of(binaries(), settings)
}

/// The same, of the programs of this directory.
pub fn split_of(programs: &Path, settings: &[(&str, &str)]) -> (Host, Helper) {
    let mut host = Host::for_everybody_below(Path::new("/var/tmp"));
    host.install(programs);
    let (home, state) = (host.home().to_owned(), host.state());
    let socket = home.join("run/agentd.sock");
    for dir in [&home.join("run"), &state] {
        fs::create_dir_all(dir).expect("a directory");
        chown(dir, Some(KEEPER), Some(KEEPER)).expect("giving away needs root");
    }
    let helper = Helper::start(&home, &state);
    let set: String = settings.iter().map(|(name, value)| format!("export {name}='{value}'\n")).collect();
    let script = format!(
        "#!/bin/sh\nexport AGENTD_SOCKET_GROUP=nogroup AGENTD_SPAWN_SOCKET={}\n{set}\
         exec setpriv --reuid {KEEPER} --regid {KEEPER} --groups {MEMBERS} --inh-caps=-all --bounding-set=-all \
         --no-new-privs \"$1\" run --state-dir {} --socket {}\n",
        helper.socket.display(),
        state.display(),
        socket.display()
    );
    serve(&mut host, &script, &socket, &USERS);
    (host, helper)
}

/// Starts a daemon by a script that has it listen at `socket`, with a home for each of these users.
pub fn serve(host: &mut Host, script: &str, socket: &Path, users: &[u32]) {
    let runner = host.home().join("runner");
    fs::write(&runner, script).expect("a script");
    fs::set_permissions(&runner, Permissions::from_mode(0o755)).expect("its own file");
    for user in users {
        let theirs = host.home().join(user.to_string());
        fs::create_dir(&theirs).expect("a directory");
        chown(&theirs, Some(*user), Some(MEMBERS)).expect("giving away needs root");
    }
    host.set("AGENTD_SOCKET", socket.to_str().expect("UTF-8"));
    host.run_by(&runner);
    host.start();
}
