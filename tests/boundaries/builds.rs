//! What is left where environments are made, by packages, interpreters and builders: it must lead the daemon nowhere.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use agent_tests::channel::Channel;
use agent_tests::split::{KEEPER, split_with};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, SOON, copy_program, eventually};

use crate::boundaries::helper::{begun, needs, slow_package};
use crate::boundaries::users::{
    BUILDERS, ENDED, GAMES, NOBODY, hostile_package, is_the_daemons, shared, submitted, witness,
};

pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "U10",
        promise: "scripts of conda packages run as nobody, and what builders leave leads the daemon nowhere",
        run: led_astray,
    },
    Row { id: "U11", promise: "the build of one user does not reach the build of another", run: of_root },
    Row { id: "U12", promise: "nor does it where root's helper starts both", run: of_the_helper },
];

/// Where the script of the package `witnessing` tells what it is.
const TOLD: &str = "/var/tmp/agent-env-witnessing";

fn led_astray(tally: &mut Tally, _: &Scale) {
    let host = shared(&[("AGENTD_UV", "never")]);
    copy_program(agent_tests::engine(), &host.home().join("bin/agent-env"));
    let _ = fs::remove_dir_all(TOLD);
    fs::create_dir(TOLD).expect("a directory");
    fs::set_permissions(TOLD, Permissions::from_mode(0o777)).expect("its own directory");
    let project = host.home().join(GAMES.to_string()).join("p");
    fs::create_dir_all(&project).expect("a directory");
    let channel = Channel::t0().file_url("links");
    fs::write(project.join("conda.yml"), format!("channels: ['{channel}']\ndependencies: [witnessing]\n"))
        .expect("a file");
    let job = submitted(
        &host,
        GAMES,
        "echo $WITNESSED; ls $CONDA_PREFIX",
        "environment: {conda_file: conda.yml}\n",
    );
    let state = host.wait_for(&job, ENDED);
    let printed = host.ctl(&["logs", &job]).stdout;
    let told = |file: &str| fs::read_to_string(Path::new(TOLD).join(file)).unwrap_or_default();
    tally.case("an activation script is nobody's, and sets what it sets", || {
        let why = host.ctl(&["why", &job]).stdout;
        assert!(state == "Completed" && printed.starts_with("yes\n"), "{state}: {printed}\n{why}");
        assert_eq!(told("uid"), "2000000000\n");
        assert!(told("status").contains("CapPrm:\t0000000000000000\n"), "{}", told("status"));
        assert!(!printed.contains("planted"), "it changed the environment: {printed}");
    });
    let _ = fs::remove_dir_all(TOLD);

    let rooted = host.home().join("rooted");
    fs::write(&rooted, "root's\n").expect("a file");
    fs::set_permissions(&rooted, Permissions::from_mode(0o600)).expect("its own file");
    let evil = host.home().join("evil");
    let names = ["requirements.txt", "environment.lock", "ready.json"];
    let link = |name: &&str| format!("[ -e {name} ] || ln -s {} {name}; ", rooted.display());
    let links: String = names.iter().map(link).collect();
    // Python finds where it is by its own name.
    let script = format!("#!/bin/bash\n{links}\nexec -a \"$0\" /usr/bin/python3 \"$@\"\n");
    fs::write(&evil, script).expect("a script");
    fs::set_permissions(&evil, Permissions::from_mode(0o755)).expect("its own file");
    let package = hostile_package(&host, &witness(&host));
    let environment = format!(
        "environment: {{python: {}, requirements: ['evil @ file://{}']}}\n",
        evil.display(),
        package.display()
    );
    let job = submitted(&host, GAMES, "echo ran", &environment);
    let state = host.wait_for(&job, ENDED);
    tally.case("what an interpreter puts in the place of the daemon's files is not written through", || {
        let shown = host.ctl(&["why", &job]).stdout;
        assert_eq!(fs::read_to_string(&rooted).expect("a file"), "root's\n", "{state}: {shown}");
        assert_eq!(rooted.metadata().expect("a file").mode() & 0o777, 0o600);
        assert_eq!(state, "Completed", "{shown}");
    });
    tally.case("all of it is the daemon's", || is_the_daemons(&host, 0));
}

/// A user of both machines without an account, who has a home.
const OTHER: u32 = 54_321;

fn of_root(tally: &mut Tally, _: &Scale) {
    let host = shared(&[("AGENTD_UV", "never"), ("AGENTD_SLOTS", "3")]);
    let theirs = host.home().join(OTHER.to_string());
    fs::create_dir(&theirs).expect("a directory");
    chown(&theirs, Some(OTHER), Some(NOBODY)).expect("giving away needs root");
    beside_another(tally, &host, 0);
}

fn of_the_helper(tally: &mut Tally, _: &Scale) {
    let (host, _helper) = split_with(&[("AGENTD_UV", "never"), ("AGENTD_SLOTS", "3")]);
    beside_another(tally, &host, KEEPER);
}

/// How long what the attacker leaves would run, in seconds, which nothing else here does: not the row beside it either.
fn left(daemon: u32) -> String {
    format!("7071.{daemon}5")
}

/// What a build tries on the one beside it: what it sees, and what it writes wherever it can.
fn attack(host: &Host, witness: &Path, left: &str) -> String {
    format!(
        r#"os.path.exists("{w}/his") or open("{w}/his", "w").write(str(os.getuid()))
    seen = []
    pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
    for pid in pids:
        try: seen.append(open("/proc/%s/cmdline" % pid).read() + " in " + os.readlink("/proc/%s/cwd" % pid))
        except OSError: pass
    for place in ["/tmp", "/dev/shm", "{state}", "{state}/envs", "{state}/jobs", "{state}/packages"]:
        for at, dirs, files in os.walk(place):
            seen += [os.path.join(at, name) for name in dirs + files]
            for file in [file for file in files if "victim" in file]:
                try: open(os.path.join(at, file), "w").write("poison")
                except OSError: pass
    seen += subprocess.run(["ipcs", "-q"], capture_output=True, text=True).stdout.splitlines()
    open("{w}/seen", "w").write("\n".join(seen))
    open("{w}/devices", "w").write(" ".join(sorted(os.listdir("/dev"))))
    open("/tmp/left-by-attacker", "w").write("x")
    code = "import sys, time\nwhile True:\n    open(sys.prefix + '/late', 'a').write('x'); time.sleep(0.01)"
    for words in ([sys.executable, "-c", code], ["sleep", "{left}"]):
        subprocess.Popen(words, start_new_session=True, env={{}}, stdin=subprocess.DEVNULL,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"#,
        state = host.state().display(),
        w = witness.display()
    )
}

fn beside_another(tally: &mut Tally, host: &Host, daemon: u32) {
    let dir = witness(host);
    let waits = format!(
        r#"os.path.exists("{w}/hers") or open("{w}/hers", "w").write(str(os.getuid()))
    own = os.environ["TMPDIR"] + "/victim"
    for place in (own, "/tmp/victim", "/dev/shm/victim"): open(place, "w").write("mine")
    subprocess.run(["ipcmk", "-Q"], stdout=subprocess.DEVNULL)
    while not os.path.exists("{w}/go"): time.sleep(0.05)
    for place in (own, "/tmp/victim", "/dev/shm/victim"): assert open(place).read() == "mine", place
    assert os.listdir("/tmp") == ["victim"], os.listdir("/tmp")"#,
        w = dir.display()
    );
    let victim = slow_package(host, "victim", &dir, &waits);
    let attacker = slow_package(host, "attacker", &dir, &attack(host, &dir, &left(daemon)));
    let hers = submitted(host, GAMES, "python -c 'import slow; print(slow.x)'", &needs(&victim));
    eventually("the first is built", SOON, || (begun(&dir) == 1).then_some(()));
    let his = submitted(host, OTHER, "echo ran", &needs(&attacker));
    let state = host.wait_for(&his, ENDED);
    let why = |job: &str| host.ctl(&["why", job]).stdout;
    tally.case("a build has what it needs", || assert_eq!(state, "Completed", "{}", why(&his)));
    let seen = fs::read_to_string(dir.join("seen")).unwrap_or_default();
    tally.case("it sees no process, file or queue of the other", || {
        assert!(seen.contains("pip") && seen.contains("attacker"), "it looked: {seen}");
        assert!(!seen.contains("victim"), "{seen}");
        assert!(!seen.contains("0x"), "{seen}");
    });
    tally.case("it sees no hardware of the machine: GPUs are of jobs", || {
        let seen = fs::read_to_string(dir.join("devices")).expect("what it saw");
        assert_eq!(seen, "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero");
    });
    tally.case("each owner has a builder of his own, and it sees his caches alone", || {
        let id = |file: &str| -> u32 {
            let text = fs::read_to_string(dir.join(file)).expect("both were built");
            text.parse().expect("a number")
        };
        let (hers, his) = (id("hers"), id("his"));
        assert!(hers != his && [hers, his].iter().all(|id| BUILDERS.contains(id)), "{hers} {his}");
        let caches = host.state().join("packages/of");
        for (owner, id) in [(GAMES, hers), (OTHER, his)] {
            let cache = caches.join(format!("uid-{owner}")).metadata().expect("his caches");
            assert_eq!(cache.uid(), id);
        }
        let saw = |owner: u32| seen.lines().any(|line| line.ends_with(&format!("of/uid-{owner}")));
        assert!(saw(OTHER) && !saw(GAMES), "{seen}");
    });
    tally.case("nothing that it left runs once its environment is recorded", || {
        let lines = fs::read_dir("/proc").expect("processes").flatten();
        let mut lines = lines.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
        assert!(!lines.any(|line| line.ends_with(format!("{}\0", left(daemon)).as_bytes())));
        let again = submitted(host, OTHER, "echo again", &needs(&attacker));
        assert_eq!(host.wait_for(&again, ENDED), "Completed");
        let log = why(&again);
        assert!(!log.contains("was changed") && begun(&dir) == 2, "{log}");
    });
    fs::write(dir.join("go"), "").expect("a file");
    let state = host.wait_for(&hers, ENDED);
    tally.case("the other is built as if it were alone", || {
        assert_eq!(state, "Completed", "{}", why(&hers));
        assert_eq!(host.ctl(&["logs", &hers]).stdout, "1\n");
    });
    tally.case("what packages of one have written is given to no other", || {
        let same = submitted(host, OTHER, "python -c 'import slow; print(slow.x)'", &needs(&victim));
        assert_eq!(host.wait_for(&same, ENDED), "Completed", "{}", why(&same));
        assert_eq!(begun(&dir), 3, "it was built for him");
        let again = submitted(host, GAMES, "echo again", &needs(&victim));
        assert_eq!(host.wait_for(&again, ENDED), "Completed", "{}", why(&again));
        assert_eq!(begun(&dir), 3, "hers is there");
    });
    tally.case("all of it is the daemon's", || is_the_daemons(host, daemon));
}
