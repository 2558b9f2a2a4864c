//! Group C, the contract: what a job finds in its container, what it may do there, and how its end is told.

use std::collections::BTreeMap;

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};

use crate::containers::site::{BUSYBOX, PYTHON, Site, Wish, counted, counting};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "C1",
        promise: "a job owns its directory, is nobody of power, and sees its own processes",
        run: place,
    },
    Row { id: "C2", promise: "what a job prints arrives byte for byte", run: bytes },
    Row { id: "C3", promise: "memory, shared memory and processes are limited as was said", run: limits },
    Row { id: "C4", promise: "a job that ran out of memory is told so", run: out_of_memory },
    Row { id: "C5", promise: "a canceled job may end well, and what does not is killed", run: canceled },
    Row { id: "C6", promise: "exit codes, signals and time limits are told as on the machine", run: ends },
    Row { id: "C7", promise: "variables of the image are set, those of the job win", run: variables },
    Row { id: "C8", promise: "the tracking endpoint is reached from a container", run: tracking },
    Row { id: "C9", promise: "an image without a shell is told in words", run: no_shell },
    Row { id: "C10", promise: "jobs that last a moment end all the same (peer 51)", run: short },
    Row { id: "C11", promise: "a job that kills all it can ends with the truth (peer 52)", run: rampage },
    Row { id: "C12", promise: "a session is in the container, with what the job has", run: session },
];

/// The lines `NAME VALUE` of what a job said.
fn told(text: &str) -> BTreeMap<String, String> {
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()
}

const LOOK: &str = r#"
echo pwd $(pwd)
echo uid $(id -u)
echo owner $(stat -c %u .) $(stat -c %u job.yml)
echo pid1 $(tr '\0' ' ' < /proc/1/cmdline | grep -c agent-shim)
grep -E '^(NoNewPrivs|CapEff|CapPrm|CapBnd)' /proc/self/status | tr -d ':' | tr '\t' ' '
echo dirs $(ls -d outputs logs | tr '\n' ' ')
echo processes $(ls /proc | grep -c '^[0-9]')
touch job.yml new && mkdir deep && echo writable yes
(echo x > /etc/hostname.new) 2>/dev/null && echo root writable || echo root refused
echo socket $(ls /var/run/docker.sock /run/docker.sock 2>/dev/null | wc -l)
"#;

fn place(tally: &mut Tally, _: &Scale) {
    let site = Site::started();
    let told = tally.case("it looks around", || told(&site.says("look", LOOK, "")));
    let Some(told) = told else { return };
    let is =
        |name: &str, value: &str| assert_eq!(told.get(name).map(String::as_str), Some(value), "{told:#?}");
    tally.case("its user is not root, and owns the work tree", || {
        assert_ne!(told["uid"], "0", "{told:#?}");
        is("owner", &format!("{0} {0}", told["uid"]));
        is("writable", "yes");
        is("root", "refused");
    });
    tally.case("it has no privilege, and can get none", || {
        is("NoNewPrivs", "1");
        ["CapEff", "CapPrm"].iter().for_each(|set| is(set, "0000000000000000"));
    });
    tally.case("its directory is where it is on the machine", || {
        assert!(told["pwd"].starts_with(site.host.home().to_str().expect("UTF-8")), "{told:#?}");
        is("dirs", "logs outputs");
    });
    tally.case("it sees few processes, and no engine", || {
        is("pid1", "1");
        assert!(told["processes"].parse::<u32>().expect("a number") < 10, "{told:#?}");
        is("socket", "0");
    });
    tally.case("nothing is left", || site.nothing_left());
}

fn session(tally: &mut Tally, _: &Scale) {
    let site = Site::started();
    let wish = Wish {
        environment: BUSYBOX,
        command: "touch here; until [ -e done ]; do sleep 0.1; done",
        more: "environment_variables: {COLOUR: blue}\n",
        ..Wish::default()
    };
    let job = site.submit("session", &wish);
    let exec = |script: &str| site.host.ctl(&["exec", &job, "--", "sh", "-c", script]);
    tally.case("it has the user, the variables, the directory and the processes of the job", || {
        eventually("the command begins", SOON, || (exec("[ -e here ]").code == 0).then_some(()));
        let said =
            exec("echo $COLOUR $(id -u) $(stat -c %u here); tr '\\0' ' ' < /proc/1/cmdline; exit 7").code(7);
        let words: Vec<&str> = said.stdout.split_whitespace().collect();
        assert!(words[0] == "blue" && words[1] == words[2] && words[1] != "0", "{said:?}");
        assert!(words[3].ends_with("agent-shim"), "{said:?}");
    });
    tally.case("it ends with the job, which ends well", || {
        exec("touch done; sleep 600").code(125);
        site.completed(&job);
    });
    tally.case("nothing is left", || site.nothing_left());
}

const PRINT: &str = r#"
import os, sys
every = bytes(range(256))
for number in range(400):
    os.write(1 + number % 2, b"%d " % number + every + b"\n")
os.write(1, b"x" * 200000 + b"\n")
os.write(2, "größe 漢字 \x1b[31mred\r\n".encode())
os.write(1, b"no end of line")
"#;

/// What [`PRINT`] prints.
fn printed() -> Vec<u8> {
    let every: Vec<u8> = (0..=255).collect();
    let mut all = Vec::new();
    for number in 0..400 {
        all.extend(format!("{number} ").bytes().chain(every.iter().copied()).chain(*b"\n"));
    }
    all.extend(std::iter::repeat_n(b'x', 200_000).chain(*b"\n"));
    all.extend("größe 漢字 \u{1b}[31mred\r\n".bytes().chain(*b"no end of line"));
    all
}

fn bytes(tally: &mut Tally, _: &Scale) {
    let site = Site::started();
    tally.case("both streams, every byte, long lines, no last end of line", || {
        let wish = Wish {
            environment: PYTHON,
            command: "python3 p.py",
            files: &[("p.py", PRINT)],
            ..Wish::default()
        };
        let job = site.submit("bytes", &wish);
        site.completed(&job);
        let (log, wanted) = (site.log(&job), printed());
        let differs = log.iter().zip(&wanted).position(|(one, other)| one != other);
        assert!(log == wanted, "{} bytes instead of {}, first at {differs:?}", log.len(), wanted.len());
    });
    tally.case("line by line, slowly", || {
        let command = counting(60, "0.05");
        let job = site.submit("slow", &Wish { environment: BUSYBOX, command: &command, ..Wish::default() });
        site.completed(&job);
        assert_eq!(site.log(&job), counted(60));
    });
}

fn limits(tally: &mut Tally, _: &Scale) {
    const LOOK: &str = "echo memory $(cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null); \
                        echo shm $(df -k /dev/shm | tail -1 | awk '{print $2}')";
    let site = Site::started();
    tally.case("shared memory is 2 GiB where nothing is said", || {
        assert_eq!(told(&site.says("usual", LOOK, ""))["shm"], (2 << 20).to_string());
    });
    tally.case("what is said applies", || {
        let told = told(&site.says("said", LOOK, "resources: {memory: 96m, shm_size: 64m}"));
        assert_eq!(told["shm"], (64 << 10).to_string());
        assert_eq!(told["memory"], (96 << 20).to_string());
    });
    tally.case(
        "an argument of the engine that gives away the machine is refused before anything is sent",
        || {
            let wish = Wish {
                environment: BUSYBOX,
                command: "true",
                more: "resources: {docker_args: --privileged}",
                ..Wish::default()
            };
            let ran = site.run("privileged", &wish);
            assert_ne!(ran.code, 0, "{}", ran.stderr);
            ran.says("--privileged").says("JOB-102");
        },
    );
}

fn out_of_memory(tally: &mut Tally, _: &Scale) {
    let site = Site::started();
    let more = "resources: {memory: 64m}";
    let hungry = Wish {
        environment: PYTHON,
        command: "exec python3 -c 'b = bytearray(300 << 20)'",
        more,
        ..Wish::default()
    };
    let child =
        Wish { command: "python3 -c 'b = bytearray(300 << 20)'; echo after $?; exit 3", ..hungry.clone() };
    for (name, wish) in [("the command itself", hungry), ("a child of it", child)] {
        tally.case(name, || {
            let job = site.submit("hungry", &wish);
            assert_eq!(site.ended(&job), "Failed");
            let fault = site.host.show(&job)["fault"].clone();
            assert_eq!(fault["code"], "RUN-104", "{}", site.why(&job));
        });
    }
    tally.case("one that was merely killed did not", || {
        let wish = Wish { environment: BUSYBOX, command: "kill -9 $$", more, ..Wish::default() };
        let job = site.submit("killed", &wish);
        assert_eq!(site.ended(&job), "Failed");
        assert_eq!(site.host.show(&job)["fault"]["code"], "RUN-103", "{}", site.why(&job));
    });
    tally.case("nothing is left", || site.nothing_left());
}

fn canceled(tally: &mut Tally, _: &Scale) {
    let site = Site::started();
    // What a command says last is kept, and it may take its time over it.
    const POLITE: &str = "trap 'echo asked; echo saved > outputs/saved; exit 0' TERM; echo ready; while true; do sleep 0.1; done";
    const DEAF: &str =
        "trap '' TERM INT HUP; (trap '' TERM INT; sleep 1000) & echo ready; while true; do sleep 1; done";
    for (name, command, said) in [("asked", POLITE, "ready\nasked\n"), ("deaf", DEAF, "ready\n")] {
        tally.case(name, || {
            let more = "limits: {grace: 3}";
            let job = site.submit(name, &Wish { environment: BUSYBOX, command, more, ..Wish::default() });
            site.running(&job);
            eventually("it is ready", SOON, || site.log(&job).starts_with(b"ready\n").then_some(()));
            site.host.ctl(&["cancel", &job]).ok();
            assert_eq!(site.ended(&job), "Canceled", "{}", site.why(&job));
            // A shell may name the child that was asked with it.
            let log = String::from_utf8_lossy(&site.log(&job)).replace("Terminated\n", "");
            assert_eq!(log, said);
            if name == "asked" {
                let outputs = site.outputs(&job);
                assert!(
                    outputs.iter().any(|(path, bytes)| path.ends_with("saved") && bytes == b"saved\n"),
                    "{outputs:?}"
                );
            }
            site.nothing_left();
        });
    }
}

fn ends(tally: &mut Tally, _: &Scale) {
    let site = Site::started();
    let cases = [
        ("exit 0", "", "Completed", None, 0),
        ("exit 7", "", "Failed", Some("RUN-101"), 7),
        ("no-such-program", "", "Failed", Some("RUN-102"), 127),
        ("kill -9 $$", "", "Failed", Some("RUN-103"), 137),
        ("sleep 1000", "limits: {timeout: 2, grace: 1}", "Failed", Some("RUN-105"), -1),
    ];
    for (command, more, state, code, exit) in cases {
        tally.case(command, || {
            let job = site.submit("ends", &Wish { environment: BUSYBOX, command, more, ..Wish::default() });
            assert_eq!(site.ended(&job), state, "{}", site.why(&job));
            let shown = site.host.show(&job);
            assert_eq!(shown["fault"]["code"].as_str(), code, "{}", site.why(&job));
            assert!(exit < 0 || shown["exit_code"] == exit, "{shown}");
        });
    }
    tally.case("nothing is left", || site.nothing_left());
}

fn variables(tally: &mut Tally, _: &Scale) {
    let site = Site::started();
    tally.case("of the image, of the job, of the agent", || {
        let text = site.says(
            "variables",
            "echo image $FROM_THE_IMAGE; echo job $FROM_THE_JOB; echo run $AZUREML_RUN_ID; echo path $PATH",
            "environment_variables: {FROM_THE_JOB: here}",
        );
        let told = told(&text);
        assert_eq!((told["image"].as_str(), told["job"].as_str()), ("yes", "here"), "{told:?}");
        assert!(!told["run"].is_empty() && told["path"].contains("/bin"), "{told:?}");
    });
    tally.case("the job's win", || {
        let more = "environment_variables: {FROM_THE_IMAGE: 'no'}";
        assert_eq!(site.says("wins", "echo $FROM_THE_IMAGE", more), "no\n");
    });
}

fn tracking(tally: &mut Tally, _: &Scale) {
    const LOG: &str = r#"
import json, os, time, urllib.request
uri, run = os.environ["MLFLOW_TRACKING_URI"], os.environ["MLFLOW_RUN_ID"]
body = {"run_id": run, "key": "loss", "value": 0.25, "timestamp": int(time.time() * 1000), "step": 3}
request = urllib.request.Request(
    uri.rstrip("/") + "/api/2.0/mlflow/runs/log-metric", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
if os.environ.get("MLFLOW_TRACKING_TOKEN"):
    request.add_header("Authorization", "Bearer " + os.environ["MLFLOW_TRACKING_TOKEN"])
print(urllib.request.urlopen(request, timeout=60).status)
"#;
    let site = Site::started();
    tally.case("a metric by HTTP, and one by the file", || {
        let command = "python3 log.py && echo '{\"metric\": \"speed\", \"value\": 2}' >> $AGENTD_METRICS";
        let job = site.submit(
            "log",
            &Wish { environment: PYTHON, command, files: &[("log.py", LOG)], ..Wish::default() },
        );
        site.completed(&job);
        let told = site.host.ctl(&["metrics", &job, "--json"]).ok().json();
        let last = |name: &str| {
            let all = told["metrics"].as_array().expect("a list");
            all.iter().find(|metric| metric["name"] == name).map(|metric| metric["last"].as_f64())
        };
        assert_eq!((last("loss"), last("speed")), (Some(Some(0.25)), Some(Some(2.0))), "{told}");
    });
}

fn no_shell(tally: &mut Tally, _: &Scale) {
    let site = Site::started();
    tally.case("a command in an image that has no shell", || {
        let environment = "{image: 'agentd-test/scratch:1'}";
        let job = site.submit("bare", &Wish { environment, command: "echo hello", ..Wish::default() });
        assert_eq!(site.ended(&job), "Failed");
        let why = site.why(&job);
        assert!(why.contains("RUN-106") || why.contains("RUN-102"), "{why}");
        assert!(why.contains("sh"), "the shell is not named:\n{why}");
        site.nothing_left();
    });
}

fn short(tally: &mut Tally, scale: &Scale) {
    let site = Site::started();
    tally.case("many at once", || {
        let wish = Wish { environment: BUSYBOX, command: "true", ..Wish::default() };
        let jobs: Vec<String> = (0..scale.of(6, 40)).map(|_| site.submit("short", &wish)).collect();
        jobs.iter().for_each(|job| site.completed(job));
        site.nothing_left();
    });
}

fn rampage(tally: &mut Tally, _: &Scale) {
    let site = Site::started();
    tally.case("it kills everything, its supervisor too if it may", || {
        let command = "echo before; kill -9 1 2>/dev/null; kill -9 -1; echo never";
        let job = site.submit("rampage", &Wish { environment: BUSYBOX, command, ..Wish::default() });
        let state = site.ended(&job);
        let log = site.log(&job);
        assert!(log.starts_with(b"before\n"), "{}", String::from_utf8_lossy(&log));
        // The kernel spares the shell that asks; it may have said its last word.
        let spared = log.ends_with(b"never\n") && state == "Completed";
        let said = String::from_utf8_lossy(&log).into_owned();
        assert!(spared || state == "Failed", "{state} after {said:?}: {}", site.why(&job));
        site.nothing_left();
    });
}
