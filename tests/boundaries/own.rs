//! A user's own daemon: what its jobs, which are the same user, reach of it, of its environments and of each other. With a
//! view of their own, and on machines that give them none.

use std::fs;

use agent_tests::split::split_with;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, SOON, eventually};

use crate::boundaries::users::{self, ENDED, GAMES, hostile_package, submitted, witness};

pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "O1",
        promise: "a job that hides and kills its supervisor is found, or it is told that it may run on",
        run: hiding,
    },
    Row {
        id: "O2",
        promise: "what a job changes in an environment that is shared no later job gets",
        run: poisoning,
    },
    Row {
        id: "O3",
        promise: "a job changes its environment for itself alone, and nothing is made anew",
        run: layered,
    },
    Row {
        id: "O4",
        promise: "a job reaches nothing of the daemon's state, its supervisor or other jobs",
        run: kept_out,
    },
];

/// A box of a user whose machine gives jobs no view of their own.
fn plain() -> Host {
    let mut host = Host::unprivileged();
    host.set("AGENTD_PRIVATE_VIEW", "false");
    host
}

/// Changes a module of the environment, and says that nobody did. `BEFORE` and `AFTER` differ from way to way.
const POISON: &str = "
import evil, os, shutil
path = evil.__file__
then = os.stat(path)
BEFORE
open(path, 'r+').write('x = 2\\n')
os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
shutil.rmtree(os.path.join(os.path.dirname(path), '__pycache__'), ignore_errors=True)
AFTER
";

const WAYS: &[(&str, &str, &str)] = &[
    ("in place", "", ""),
    ("a new file in its place", "shutil.copy2(path, path + 'x'); os.rename(path + 'x', path)", ""),
    ("by another name of it", "os.link(path, path + 'x'); os.unlink(path + 'x')", ""),
    (
        "with its directory set back",
        "above = os.path.dirname(path); at = os.stat(above)",
        "os.utime(above, ns=(at.st_atime_ns, at.st_mtime_ns))",
    ),
];

/// Jobs of one user in one environment, in which `evil.x` is 1 and whose builds are counted.
struct Shared<'a> {
    host: &'a Host,
    /// The user, if the daemon serves several.
    user: Option<u32>,
    environment: String,
}

const LOOK: &str = "import evil\nprint(evil.x)";

impl Shared<'_> {
    fn on(host: &Host, user: Option<u32>) -> Shared<'_> {
        let package = hostile_package(host, &witness(host));
        let wants =
            format!("{{python: /usr/bin/python3, requirements: ['evil @ file://{}']}}", package.display());
        let shared = Shared { host, user, environment: format!("environment: {wants}\n") };
        assert_eq!(shared.run(LOOK), "1\n");
        shared
    }

    /// What a job prints that runs this script.
    fn run(&self, script: &str) -> String {
        let (command, files) = ("python -B job.py", [("job.py", script)]);
        let job = match self.user {
            None => {
                let job = format!("command: {command}\ncode: .\n{}", self.environment);
                let dir = self.host.project("p", &[("job.yml", &job), files[0]]);
                self.host.ctl(&["submit", dir.to_str().expect("UTF-8")]).ok().stdout.trim().to_owned()
            }
            Some(user) => {
                self.host.project(&format!("{user}/p"), &files);
                submitted(self.host, user, command, &self.environment)
            }
        };
        let state = self.host.wait_for(&job, ENDED);
        let logs = self.host.ctl(&["logs", &job]).ok().stdout;
        assert_eq!(state, "Completed", "{logs}{}", self.host.ctl(&["show", &job]).stdout);
        logs
    }

    fn builds(&self) -> usize {
        fs::read_to_string(self.host.home().join("witness/built")).expect("a file").lines().count()
    }
}

fn poisoning(tally: &mut Tally, _: &Scale) {
    let mut host = plain();
    host.set("AGENTD_UV", "never");
    host.start();
    let shared = Shared::on(&host, None);
    let run = |script: &str| shared.run(script);
    for (what, before, after) in WAYS {
        tally.case(what, || {
            run(&POISON.replace("BEFORE", before).replace("AFTER", after));
            assert_eq!(run(LOOK), "1\n");
        });
    }
    tally.case("one that nobody changed is not made anew", || {
        let before = shared.builds();
        assert_eq!(run(LOOK), "1\n");
        assert_eq!(shared.builds(), before);
    });
}

/// Writes the module anew. Its time shows that: byte code that is compiled meanwhile knows whole seconds.
const PUT: &str = "import evil, os, shutil, subprocess, sys
def put(mode='w'):
    open(evil.__file__, mode).write('x = 2\\n')
    os.utime(evil.__file__, (1, 1))";

/// Changes of what a job imports, each of which the job itself must see: it prints 2 then.
const CHANGES: &[(&str, &str)] = &[
    ("in place", "put('r+')"),
    ("a new file in its place", "os.unlink(evil.__file__); put()"),
    ("byte code", "open(evil.__file__ + '.x', 'w').write('x = 2\\n'); at = os.stat(evil.__file__)
import importlib.util, marshal, struct
code = marshal.dumps(compile('x = 2', evil.__file__, 'exec'))
cache = importlib.util.cache_from_source(evil.__file__)
os.makedirs(os.path.dirname(cache), exist_ok=True)
head = importlib.util.MAGIC_NUMBER + struct.pack('<III', 0, int(at.st_mtime), at.st_size)
open(cache + '.new', 'wb').write(head + code); os.rename(cache + '.new', cache)"),
    ("a directory that is moved", "home = os.path.dirname(evil.__file__); shutil.move(home, home + '.old'); os.mkdir(home)
for name in os.listdir(home + '.old'):
    shutil.move(os.path.join(home + '.old', name), home)
put()"),
    ("the record of the environment", "put()
record = os.path.join(sys.prefix, 'ready.json'); text = open(record).read()
os.unlink(record); open(record, 'w').write(text.replace('digest', 'digset'))"),
    ("pip", "import zipfile
with zipfile.ZipFile('evil-9-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('evil.py', 'x = 2\\n')
    wheel.writestr('evil-9.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: evil\\nVersion: 9\\n')
    wheel.writestr('evil-9.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr('evil-9.dist-info/RECORD', '')
subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', '--no-index', './evil-9-py3-none-any.whl'], check=True, stderr=subprocess.DEVNULL)"),
    ("all of it removed", "shutil.rmtree(os.path.dirname(evil.__file__), ignore_errors=True); os.makedirs(os.path.dirname(evil.__file__))
put()"),
];

fn layered(tally: &mut Tally, _: &Scale) {
    let mut own = Host::unprivileged();
    own.set("AGENTD_UV", "never");
    own.start();
    layered_on(tally, "a user's own daemon", &own, None);
    let machine = users::shared(&[("AGENTD_UV", "never")]);
    layered_on(tally, "a machine's daemon", &machine, Some(GAMES));
    let (apart, _helper) = split_with(&[("AGENTD_UV", "never")]);
    layered_on(tally, "a daemon with a helper", &apart, Some(GAMES));
}

fn layered_on(tally: &mut Tally, daemon: &str, host: &Host, user: Option<u32>) {
    let shared = Shared::on(host, user);
    for (what, change) in CHANGES {
        tally.case(&format!("{daemon}: {what}"), || {
            let again =
                "subprocess.run([sys.executable, '-B', '-c', 'import evil; print(evil.x)'], check=True)";
            let script = format!("{PUT}\n{change}\n{again}\n");
            assert_eq!(shared.run(&script), "2\n", "the job sees its own change");
            assert_eq!(shared.run(LOOK), "1\n", "the next job sees nothing of it");
        });
    }
    let on_machine = Shared {
        host,
        user,
        environment: "environment: {python: /usr/bin/python3, user_managed_dependencies: true}\n".to_owned(),
    };
    tally.case(&format!("{daemon}: packages of a user, on the machine's interpreter"), || {
        let mine = "import os, site, sys
home = os.path.join(os.environ['AGENTD_USER_BASE'], 'lib/python%d.%d/site-packages' % sys.version_info[:2])
os.makedirs(home, exist_ok=True)
open(os.path.join(home, 'mine.py'), 'w').write('x = 3\\n')";
        let adds = "import os, site
os.makedirs(site.getusersitepackages(), exist_ok=True)
open(os.path.join(site.getusersitepackages(), 'added.py'), 'w').write('x = 2\\n')
import subprocess, sys
subprocess.run([sys.executable, '-c', 'import added; print(added.x)'], check=True)";
        let looks = "import importlib.util, mine; print(mine.x, importlib.util.find_spec('added'))";
        // Accounts of the system have homes that do not exist, or are not theirs.
        if user.is_none() {
            on_machine.run(mine);
        }
        assert_eq!(on_machine.run(adds), "2\n");
        if user.is_none() {
            assert_eq!(on_machine.run(looks), "3 None\n");
            assert!(host.home().join(".local").exists());
        }
    });
    tally.case(&format!("{daemon}: nothing was made anew"), || assert_eq!(shared.builds(), 1));
    tally.case(&format!("{daemon}: what it wrote goes with it"), || {
        let full = || {
            let jobs = fs::read_dir(host.state().join("jobs")).expect("jobs").flatten();
            let files = jobs.map(|job| fs::read_dir(job.path().join("layer/upper")));
            files.flatten().filter_map(|mut files| files.next()).count()
        };
        eventually("layers of ended jobs are gone", SOON, || (full() == 0).then_some(()));
    });
}

/// What a job tries against the daemon's state `$S`, the daemon `$D`, its own supervisor `$PPID`, and a job that runs
/// beside it, `$J`, whose variables contain a password. `$P` is the password, which nothing may print.
const REACHES: &[(&str, &str)] = &[
    ("lists jobs", "ls $S/jobs | grep -v $AGENTD_REPLICA && echo LEAK"),
    ("reads a job's order", "cat $S/jobs/$J*/launch.json"),
    ("reads its own order", "cat ../../launch.json $S/jobs/$AGENTD_REPLICA/launch.json"),
    ("reads the journal", "strings $S/journal.db* || cat $S/journal.db*"),
    ("reads the controller's database", "cat $S/controller/*"),
    ("writes into the state", "echo x >$S/planted; mkdir $S/jobs/planted"),
    ("removes everything", "rm -rf $S/cas $S/controller $S/journal.db $S/jobs/$J* $S/envs/*"),
    ("writes into environments", "mkdir $S/envs/planted"),
    ("writes its own end", "echo '{}' >$S/jobs/$AGENTD_REPLICA/exit.json"),
    ("takes the cover away", "umount $S; umount -l $S/jobs; cat $S/jobs/$J*/launch.json"),
    (
        "the same as root of a namespace",
        "unshare -Urm sh -c \"umount $S; umount -l $S; cat $S/jobs/$J*/launch.json\"",
    ),
    (
        "a bind mount of what is below",
        "mkdir b; unshare -Urm sh -c \"mount --bind / b; cat b$S/jobs/$J*/launch.json\"",
    ),
    (
        "through its supervisor's root",
        "cat /proc/$PPID/root$S/jobs/$J*/launch.json; ls /proc/$PPID/cwd && echo LEAK",
    ),
    (
        "through the daemon's root",
        "cat /proc/$D/root$S/jobs/$J*/launch.json; readlink /proc/$D/fd/* && echo LEAK",
    ),
    (
        "through the other job's root",
        "for p in /proc/[0-9]*; do cat $p/environ | tr '\\0' '\\n' | grep PASSWORD; done",
    ),
    (
        "enters another mount namespace",
        "nsenter -m -t $PPID cat $S/jobs/$J*/launch.json; nsenter -U -m -t $D true && echo LEAK",
    ),
    (
        "traces its supervisor",
        "/usr/bin/python3 -c \"import ctypes; print('LEAK' if ctypes.CDLL(None).ptrace(16, $PPID, 0, 0) == 0 else '')\"",
    ),
    (
        "traces the daemon",
        "/usr/bin/python3 -c \"import ctypes; print('LEAK' if ctypes.CDLL(None).ptrace(16, $D, 0, 0) == 0 else '')\"",
    ),
    ("reads the memory of the daemon", "head -c 1 /proc/$D/mem /proc/$D/environ && echo LEAK"),
    (
        "a descriptor of another process",
        "/usr/bin/python3 -c \"import os, ctypes; fd = os.pidfd_open($D); print('LEAK' if ctypes.CDLL(None).syscall(438, fd, 3, 0) >= 0 else '')\"",
    ),
];

/// The same with signals, from Linux 6.12 on.
const SIGNALS: &[(&str, &str)] = &[
    ("ends its supervisor", "kill -9 $PPID && echo LEAK"),
    ("halts the daemon", "kill -STOP $D && echo LEAK"),
    ("ends all that it may", "kill -9 -1; echo done"),
    ("hides and ends its supervisor", "setsid sh -c \"sleep 0.2; kill -9 $PPID && echo LEAK\" & sleep 0.5"),
];

fn kept_out(tally: &mut Tally, _: &Scale) {
    let mut host = Host::unprivileged();
    host.start();
    let password = format!("prey-{}", std::process::id());
    let go = host.home().join("go");
    let waits = format!("while ! [ -e {} ]; do sleep 0.1; done; echo whole", go.display());
    let job = format!("command: {waits:?}\nenvironment_variables: {{PASSWORD: {password}}}\n");
    let dir = host.project("victim", &[("job.yml", &job)]);
    let victim = host.ctl(&["submit", dir.to_str().expect("UTF-8")]).ok().stdout.trim().to_owned();
    let state = host.state();
    let marks = agent_shim::apart::kernel() >= (6, 12);
    let signals: &[(&str, &str)] = if marks { SIGNALS } else { &[] };
    for (what, script) in REACHES.iter().chain(signals) {
        tally.case(what, || {
            let names = format!("S={}; D={}; J={victim};", state.display(), host.pid());
            let attack = host.submit(&format!("{names} {{ {script}; }} 2>&1; true"));
            host.wait_for(&attack, ENDED);
            let said = host.ctl(&["logs", &attack]).stdout;
            assert!(!said.contains(&password) && !said.contains("LEAK"), "{said}");
            assert!(!state.join("planted").exists() && !state.join("jobs/planted").exists());
            assert!(!state.join("envs/planted").exists());
        });
    }
    fs::write(&go, "").expect("a file");
    tally.case("the other job and the daemon are whole", || {
        host.wait_for(&victim, ENDED);
        assert_eq!(host.ctl(&["logs", &victim]).stdout, "whole\n");
        assert!(host.ctl(&["show", &victim]).stdout.contains("Completed"));
    });
}

/// Leaves its group, its parents and its environment, in as many ways; then its supervisor is killed. `$T` is how long
/// it sleeps, by which it is known here, and by nothing else.
const HIDES: &[(&str, &str)] = &[
    ("a session of its own", "setsid env -i sleep $T & sleep 0.5"),
    ("two generations that ended", "(setsid sh -c '(setsid env -i sleep '$T' &)' &); sleep 0.5"),
    (
        "a child of it that hides once more",
        "(setsid env -i sh -c 'env -i setsid sleep '$T' & exec sleep '$T &); sleep 0.5",
    ),
    ("the name of a supervisor", "(setsid env -i bash -c 'exec -a agent-shim sleep '$T &); sleep 0.5"),
    (
        "a program of that name",
        "cp $(command -v sleep) agent-shim; (setsid env -i ./agent-shim $T &); sleep 0.5",
    ),
];

fn hiding(tally: &mut Tally, _: &Scale) {
    let mut host = plain();
    host.start();
    for (number, (what, script)) in HIDES.iter().enumerate() {
        let time = format!("70{number}1.{}", std::process::id());
        tally.case(what, || {
            let job = host.submit(&format!("T={time}; {script}; kill -9 $PPID; sleep $T"));
            host.wait_for(&job, ENDED);
            eventually("nobody is left", SOON, || sleepers(&time).is_empty().then_some(()));
            assert!(!host.ctl(&["why", &job]).stdout.contains("no process of the job was left"));
        });
    }
    tally.case("children that ended are not kept", || {
        let zombies = processes().filter(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.contains(&format!(") Z {} ", host.pid()))
        });
        assert_eq!(zombies.count(), 0);
    });
    tally.case("one whose daemon is another meanwhile is told to be maybe there", || {
        let (time, go) = (format!("7091.{}", std::process::id()), host.home().join("go"));
        let job = host.submit(&format!(
            "(setsid env -i sleep {time} &); echo up; while ! [ -e {} ]; do sleep 0.1; done; kill -9 $PPID",
            go.display()
        ));
        eventually("it is up", SOON, || host.ctl(&["logs", &job]).stdout.contains("up").then_some(()));
        host.kill();
        host.start();
        fs::write(&go, "").expect("a file");
        host.wait_for(&job, ENDED);
        let why = host.ctl(&["why", &job]).stdout;
        let left = sleepers(&time);
        for pid in &left {
            agent_tests::signal(*pid, rustix::process::Signal::KILL);
        }
        assert!(left.is_empty() || why.contains("may run on"), "{why}");
    });
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").expect("processes").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Who sleeps for so long.
fn sleepers(time: &str) -> Vec<u32> {
    let is_its = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.ends_with(format!("\0{time}\0").as_bytes())
    };
    processes().filter(is_its).collect()
}
