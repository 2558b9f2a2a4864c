//! What people type: jobs that come after others or are held, lists of some jobs, and names that a shell completes.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use agent_tests::{Host, finish};

/// A job that fails when the gate is made, and ends well when it is made and filled.
fn gated(host: &Host, name: &str) -> (String, std::path::PathBuf) {
    let gate = host.home().join(name);
    let path = gate.display();
    let command = format!("while [ ! -e {path} ]; do sleep 0.05; done; [ -s {path} ]");
    (host.submit(&command), gate)
}

#[test]
fn test_jobs_come_after_others_or_say_why_they_never_will() {
    let host = Host::started();
    let dir = host.project("p", &[("a.txt", "a")]);
    let submit = |name: &str, flags: &[&str]| {
        let words =
            [&["submit", dir.to_str().unwrap(), "--name", name], flags, &["--", "echo", name]].concat();
        host.ctl(&words)
    };
    let (first, gate) = gated(&host, "gate");
    let begins = &first[..first.len() - 1];
    submit("good", &["--after", begins]).ok(); // by the beginning of a name, as everywhere
    submit("bad", &["--after-failed", &first]).ok();
    submit("then", &["--after-any", &format!("{first},good")]).ok();
    let listed = host.ctl(&["jobs"]).ok().stdout;
    assert!(listed.contains(&format!("is to start when {first} has completed")), "{listed}");
    host.ctl(&["show", "then"]).ok();
    std::fs::write(gate, "full").unwrap();
    host.wait_for("then", &["Completed"]);
    assert_eq!([host.job_state("good"), host.job_state("bad")], ["Completed", "Failed"]);
    let why = host.ctl(&["why", "bad"]).ok().stdout;
    let said = format!("it was to start when {first} has failed, and that job is Completed");
    assert!(why.contains("JOB-108") && why.replace('\n', " ").contains(&said), "{why}");
    // What can be seen to come never is not taken at all.
    submit("never", &["--after-failed", &first]).code(1).says("JOB-108").says("Completed");
    submit("never", &["--after", "nobody"]).code(1).says("JOB-104");
    submit("late", &["--after", &first]).ok();
    host.wait_for("late", &["Completed"]);
}

#[test]
fn test_held_jobs_wait_until_they_are_released_over_a_restart() {
    let mut host = Host::started();
    let dir = host.project("p", &[("a.txt", "a")]);
    let path = dir.to_str().unwrap();
    let (first, gate) = gated(&host, "gate");
    host.wait_for(&first, &["Running"]);
    host.ctl(&["submit", path, "--name", "next", "--after-any", &first, "--", "true"]).ok();
    host.ctl(&["hold", "next"]).ok().says("agentctl release next");
    host.ctl(&["hold", &first]).code(1).says("JOB-107");
    host.kill();
    host.start();
    std::fs::write(gate, "full").unwrap();
    host.wait_for(&first, &["Completed"]);
    assert!(host.ctl(&["jobs"]).ok().stdout.contains("held by root"));
    host.ctl(&["release", "--all"]).ok().says("next: released");
    host.wait_for("next", &["Completed"]);
}

#[test]
fn test_lists_of_some_jobs_and_those_who_watch_see_the_end() {
    let host = Host::started();
    let (first, gate) = gated(&host, "gate");
    let second = host.submit("false");
    host.wait_for(&second, &["Failed"]);
    host.wait_for(&first, &["Running"]);
    let names = |flags: &[&str]| -> Vec<String> {
        let listed = host.ctl(&[&["jobs", "--json"], flags].concat()).ok().json();
        let jobs = listed["jobs"].as_array().unwrap().clone();
        jobs.iter().map(|job| job["job"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&["--state", "failed", "--mine"]), [second.as_str()]);
    assert_eq!(names(&["--active"]), [first.as_str()]);
    assert_eq!(names(&["--limit", "1"]), [second.as_str()]);
    assert_eq!(names(&["--experiment", "none"]), [""; 0]);

    let mut watching = host.client(&["jobs", "--watch"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut until = |state: &str| {
        let is = |line: &String| line.starts_with(&first) && line.contains(state);
        lines.find(is).expect("it goes on while somebody reads")
    };
    until("Running");
    std::fs::write(gate, "full").unwrap();
    until("Completed");
    watching.kill().unwrap();
    watching.wait().unwrap();
}

#[test]
fn test_what_a_job_took_is_told_and_why_a_command_ends_that_nobody_reads() {
    let host = Host::started();
    let job = host.submit("head -c 3000000 /dev/zero | tr '\\0' x");
    host.wait_for(&job, &["Completed"]);
    let used = &host.show(&job)["usage"];
    assert!(used["memory_peak_bytes"].as_u64() > Some(0) && used["cpu_s"].is_number(), "{used}");
    let mut reading =
        host.client(&["logs", &job]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(reading.stdout.take());
    let ended = reading.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!((ended.status.code(), told.trim()), (Some(3), "nobody reads the output any more"));
    // At a terminal it is no news.
    let shown = finish(&mut in_terminal(&host, &format!("logs {job} | head -c 1"))).ok().stdout;
    assert_eq!(shown, "x");
}

/// A shell with the variables of a command of ours.
#[allow(clippy::disallowed_methods, reason = "completes as a user's shell does")]
fn of_bash(of_ours: &Command) -> Command {
    let mut bash = Command::new("bash");
    bash.envs(of_ours.get_envs().filter_map(|(name, value)| Some((name, value?))));
    bash
}

#[test]
fn test_bash_completes_names_of_jobs() {
    let host = Host::started();
    let dir = host.project("p", &[("a.txt", "a")]);
    for name in ["train-1", "train-2", "other"] {
        host.ctl(&["submit", dir.to_str().unwrap(), "--name", name, "--", "true"]).ok();
    }
    // In a file: an argument of a program may not be as long.
    let script = host.home().join("completions");
    std::fs::write(&script, host.ctl(&["completions", "bash"]).ok().stdout).unwrap();
    let of_ours = host.client(&[""; 0]);
    let complete = |words: &[&str]| {
        let [.., before, last] = words else { panic!("too few words") };
        let line = format!(
            "agentctl() {{ {} \"$@\"; }}\n. {}\nCOMP_WORDS=({}) COMP_CWORD={}\n_agentctl_with_jobs agentctl '{last}' '{before}'\necho \"${{COMPREPLY[@]}}\"",
            of_ours.get_program().display(),
            script.display(),
            words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" "),
            words.len() - 1,
        );
        finish(of_bash(&of_ours).args(["-c", &line])).ok().stdout.trim().to_owned()
    };
    assert_eq!(complete(&["agentctl", "show", "tr"]), "train-2 train-1");
    assert_eq!(complete(&["agentctl", "submit", "p", "--after", "o"]), "other");
    assert_eq!(complete(&["agentctl", "rel"]), "release");
}

/// The client with a terminal.
#[allow(clippy::disallowed_methods, reason = "gives the client a terminal")]
fn in_terminal(host: &Host, line: &str) -> Command {
    let client = host.client::<&str>(&[]);
    let line = format!("{} {line}", client.get_program().to_str().unwrap());
    let variables = client.get_envs().filter_map(|(name, value)| Some((name, value?)));
    let mut command = Command::new("script");
    command.args(["-qfec", &line, "/dev/null"]).envs(variables);
    command
}

#[test]
fn test_a_daemon_of_ones_own_is_started_by_who_looks_at_its_jobs() {
    let mut host = Host::started();
    let job = host.submit("true");
    host.wait_for(&job, &["Completed"]);
    host.stop();
    for line in [&["jobs"][..], &["jobs", "--json"]] {
        host.ctl(line).code(4).says("NET-101"); // a program is told
    }
    let shown = finish(&mut in_terminal(&host, "jobs")).ok().stdout;
    assert!(shown.contains("starting one of your own") && shown.contains(&job), "{shown}");
    host.ctl(&["stop"]).ok();
    host.ctl(&["start"]).ok().says("starting one of your own").says("answers");
    let again = host.ctl(&["start"]).ok();
    assert!(!again.stderr.contains("starting"), "{}", again.stderr);
    host.ctl(&["stop"]).ok();
}

#[test]
fn test_last_words_of_a_job_are_on_the_screen_once() {
    let host = Host::started();
    let dir = host.project("p", &[("t.sh", "echo these are its last words; exit 3\n")]);
    let dir = dir.to_str().unwrap();
    let shown = finish(&mut in_terminal(&host, &format!("run {dir} -- sh t.sh"))).code(3).stdout;
    assert!(shown.contains("RUN-101"), "{shown}");
    assert_eq!(shown.matches("last words").count(), 1, "{shown}");
    // Where the log goes elsewhere, the message has them.
    host.ctl(&["run", dir, "--", "sh", "t.sh"]).code(3).says("last words");
}

#[test]
fn test_how_much_is_fetched_is_told_by_nodes_and_by_us() {
    let mut host = Host::new();
    host.set("AGENTD_FAILPOINTS", "cas.tree.write=delay:300");
    host.start();
    let files: Vec<(String, String)> =
        (0..10).map(|n| (format!("{n}.txt"), n.to_string().repeat(10_000))).collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let dir = host.project("p", &files);
    let (dir, to) = (dir.display(), host.home().join("code"));
    let told = |line: &str| finish(&mut in_terminal(&host, line)).ok().stdout;
    let shown = told(&format!("run {dir} --name slow -- true"));
    assert!(shown.contains("fetching the code: ") && shown.contains(" of 97.7 KiB"), "{shown}");
    let shown = told(&format!("code slow -o {}", to.display()));
    assert!(shown.contains("fetching ") && shown.contains(" of 97.7 KiB to "), "{shown}");
}

#[test]
#[allow(clippy::disallowed_methods, reason = "looks through files with grep")]
fn test_typed_secret_is_not_shown() {
    const SECRET: &str = "hunter2";
    let host = Host::started();
    let mut typing = in_terminal(&host, "secret set wandb");
    typing.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut typing = typing.spawn().unwrap();
    let (mut keys, mut screen) = (typing.stdin.take().unwrap(), typing.stdout.take().unwrap());
    let mut shown = String::new();
    while !shown.ends_with("Value of wandb: ") {
        let mut byte = [0];
        assert_eq!(screen.read(&mut byte).unwrap(), 1, "{shown}");
        shown.push(char::from(byte[0]));
    }
    writeln!(keys, "{SECRET}").unwrap();
    screen.read_to_string(&mut shown).unwrap();
    assert!(typing.wait().unwrap().success() && !shown.contains(SECRET), "{shown}");
    // The job has it. What it shows of it is hidden before it is written, also where it arrives in pieces.
    let script = "import os\nkey = os.environ['KEY']\n[print(c, end='', flush=True) for c in 'key ' + key]\nprint('', key[::-1])\n";
    let job = "command: python3 show.py\ncode: .\nenvironment: host\nsecrets: {KEY: wandb}\n";
    let dir = host.project("p", &[("job.yml", job), ("show.py", script)]);
    let shown = host.ctl(&["run", dir.to_str().unwrap()]).ok().stdout;
    assert!(shown.contains("key ******* 2retnuh"), "{shown}");
    let kept = Command::new("grep").args(["-rl", SECRET]).arg(host.state().join("jobs")).output().unwrap();
    // It complains of files that go meanwhile.
    assert_eq!(String::from_utf8_lossy(&kept.stdout), "", "files with the secret");
}

#[test]
fn test_one_file_of_the_outputs_is_fetched_alone() {
    let host = Host::started();
    let job = host.submit("echo a > outputs/a; mkdir outputs/d; echo b > outputs/d/b");
    host.wait_for(&job, &["Completed"]);
    let dest = host.home().join("got");
    let fetch = |part: &str, more: &[&str]| {
        host.ctl(&[&["download", &job, part, "-o", dest.to_str().unwrap()], more].concat())
    };
    let there = || ["outputs/a", "outputs/d/b"].map(|path| dest.join(path).exists());
    fetch("./outputs/d/", &[]).ok().says("1 file");
    assert_eq!(there(), [false, true]);
    fetch("outputs/a", &[]).code(1).says("--force");
    fetch("outputs/a", &["--force"]).ok();
    assert_eq!(there(), [true, true]);
    fetch("outputs/nope", &["--force"]).code(1).says("left no `outputs/nope`");
}
