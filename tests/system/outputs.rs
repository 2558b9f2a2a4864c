//! What a job leaves in `./outputs` is kept, whatever became of the job.

use std::fs;
use std::os::unix::ffi::OsStrExt;

use agent_tests::{Host, SOON, eventually};

const WRITES: &str = "mkdir -p outputs/deep outputs/none/yet && printf weights > outputs/deep/model.bin && printf log > logs/x.log && touch dropped";

#[test]
fn test_outputs_come_back_as_they_were() {
    let host = Host::started();
    let job = "command: |\n  WRITES && printf a > ${{outputs.table}}/a.csv && cat ${{inputs.data}}/in.txt\n\
               code: code\nenvironment: host\ninputs: {data: {type: uri_folder, path: ./data}}\noutputs: {table: {type: uri_folder}}\n";
    let files = [
        ("job.yml", job.replace("WRITES", WRITES)),
        ("data/in.txt", "input".into()),
        ("code/x", String::new()),
    ];
    let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (*path, text.as_str())).collect();
    let dir = host.project("p", &files);
    let ran = host.ctl(&["run", dir.to_str().unwrap()]).ok();
    assert_eq!(ran.stdout, "input");
    let ran = ran.says("outputs/deep/model.bin").says("named-outputs/table/a.csv");
    assert!(!ran.stderr.contains("dropped"), "only outputs are kept:\n{}", ran.stderr);

    let job = host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    let to = host.home().join("got");
    host.ctl(&["download", &job, "-o", to.to_str().unwrap()]).ok();
    assert_eq!(fs::read_to_string(to.join("outputs/deep/model.bin")).unwrap(), "weights");
    assert_eq!(fs::read_to_string(to.join("logs/x.log")).unwrap(), "log");
    assert_eq!(fs::read_to_string(to.join("named-outputs/table/a.csv")).unwrap(), "a");
    assert!(to.join("outputs/none/yet").is_dir(), "an empty directory is kept as well");

    // What is there is not written over unless asked.
    fs::write(to.join("outputs/mine"), "mine").unwrap();
    assert_eq!(host.ctl(&["download", &job, "-o", to.to_str().unwrap()]).code, 1);
    assert_eq!(fs::read_to_string(to.join("outputs/mine")).unwrap(), "mine");
}

#[test]
fn test_outputs_so_far_of_a_running_job_come_back() {
    let host = Host::started();
    // One file is appended to all the time, another one is replaced all the time.
    let job = host.submit(
        "mkdir outputs/deep; printf weights >outputs/deep/model; ln -s deep/model outputs/latest; mkfifo outputs/pipe
         echo up; while [ ! -e outputs/enough ]; do echo line >>outputs/log; cp outputs/log outputs/new; \
         mv outputs/new outputs/checkpoint; done; echo last >outputs/last; rm outputs/pipe",
    );
    eventually("it writes", SOON, || host.ctl(&["logs", &job]).stdout.contains("up").then_some(()));
    let to = host.home().join("so far");
    let to = to.to_str().unwrap();
    for _ in 0..5 {
        host.ctl(&["download", &job, "-o", to, "--force"]).ok().says("so far");
        let log = fs::read_to_string(format!("{to}/outputs/log")).unwrap();
        assert!(log.lines().all(|line| line == "line") && log.ends_with('\n'), "{log}");
        assert_eq!(fs::read_to_string(format!("{to}/outputs/latest")).unwrap(), "weights");
    }
    let part = host.home().join("part");
    host.ctl(&["download", &job, "outputs/deep", "-o", part.to_str().unwrap()]).ok();
    assert!(part.join("outputs/deep/model").exists() && !part.join("outputs/log").exists());
    // What was asked for meanwhile changes nothing of what is kept.
    assert_eq!(host.show(&job)["artifacts"], serde_json::Value::Null);
    fs::write(host.state().join(format!("jobs/{job}.1.0/job/work/outputs/enough")), "").unwrap();
    host.wait_for(&job, &["Completed"]);
    host.ctl(&["download", &job, "-o", to, "--force"]).ok();
    assert_eq!(fs::read_to_string(format!("{to}/outputs/last")).unwrap(), "last\n");
}

#[test]
fn test_outputs_are_kept_after_failure_cancel_and_time_limit() {
    let host = Host::started();
    let submit = |name: &str, tail: &str, limits: &str| {
        let command = serde_json::Value::from(format!("{WRITES}; echo up; {tail}"));
        let job = format!("command: {command}\nenvironment: host\nlimits: {{{limits}}}\n");
        let dir = host.project(name, &[("job.yml", &job)]);
        host.ctl(&["submit", dir.to_str().unwrap()]).ok().stdout.trim().to_owned()
    };
    let failed = submit("f", "exit 5", "grace: 1");
    let timed = submit("t", "sleep 1000", "timeout: 1, grace: 1");
    host.wait_for(&failed, &["Failed"]);
    host.wait_for(&timed, &["Failed"]);
    let canceled = submit("c", "sleep 1000", "grace: 1");
    host.wait_for(&canceled, &["Running"]);
    agent_tests::eventually("the outputs are written", agent_tests::SOON, || {
        host.ctl(&["logs", &canceled]).ok().stdout.contains("up").then_some(())
    });
    host.ctl(&["cancel", &canceled]).ok();
    host.wait_for(&canceled, &["Canceled"]);
    for job in [&failed, &timed, &canceled] {
        let shown = host.show(job);
        assert_eq!(shown["artifacts"]["files"], 2, "{shown}");
    }
    assert_eq!(host.show(&failed)["exit_code"], 5);
    assert_eq!(host.show(&timed)["fault"]["code"], "RUN-105");
}

#[test]
fn test_a_link_out_of_the_outputs_brings_nothing_home() {
    let host = Host::started();
    let secret = host.home().join("secret");
    fs::write(&secret, "secret").unwrap();
    let job = host.submit(&format!("ln -s {} outputs/link; printf x > outputs/kept", secret.display()));
    host.wait_for(&job, &["Completed"]);
    let to = host.home().join("got");
    host.ctl(&["download", &job, "-o", to.to_str().unwrap()]).ok();
    assert!(to.join("outputs/kept").exists());
    assert!(fs::read_to_string(to.join("outputs/link")).is_err(), "the link was followed");
}

#[test]
fn test_what_cannot_be_read_of_the_outputs_is_told_and_the_rest_is_stored() {
    let host = Host::unprivileged();
    let code = host.project("p", &[("x", "")]);
    let command = "mkdir outputs/closed && echo secret > outputs/closed/a && chmod 000 outputs/closed; \
                   echo kept > outputs/b; chmod 000 logs; truncate -s 500T outputs/hollow || truncate -s 8T outputs/hollow; \
                   ln -s ../outputs/b outputs/around; ln -s ../d/../outputs/b outputs/winding; ln -s c.ckpt outputs/latest";
    let ran = host.ctl(&["run", code.to_str().unwrap(), "--", "sh", "-c", command]);
    assert!(
        ran.stderr.contains("OUT-101") && ran.stderr.contains("`outputs/closed` cannot be read"),
        "{ran:?}"
    );
    assert!(
        ran.stderr.contains("`outputs/hollow` is ") && ran.stderr.contains("more than the whole disk"),
        "{ran:?}"
    );
    assert!(ran.stderr.contains("`logs` cannot be read"), "{ran:?}");
    let job = host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    assert_eq!(host.job_state(&job), "Failed");
    let to = host.home().join("got");
    host.ctl(&["download", &job, "-o", to.to_str().unwrap()]).ok();
    assert_eq!(fs::read_to_string(to.join("outputs/b")).unwrap(), "kept\n");
    // A link to what is not there stays one, and one that leads out of the outputs goes.
    assert_eq!(fs::read_link(to.join("outputs/latest")).unwrap().to_str(), Some("c.ckpt"));
    assert!(to.join("outputs/around").symlink_metadata().is_err());
    host.ctl(&["stop"]).ok();
}

/// Of each entry one thing holds: it is stored, or it is told and nothing is lost with it.
#[test]
fn test_names_of_any_bytes_are_kept_and_what_is_no_content_is_told() {
    let host = Host::started();
    let code = host.project("p", &[("x", "")]);
    let command = "cd outputs; echo data > $(printf 'r\\351sultats.csv'); echo v > v1.ckpt; \
                   ln -s $PWD/v1.ckpt latest; ln -s ../x above; ln -s gone next; mkfifo f";
    let ran = host.ctl(&["run", code.to_str().unwrap(), "--", "sh", "-c", command]).ok();
    let job = host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    assert_eq!(host.job_state(&job), "Completed");
    assert!(ran.stderr.contains("outputs: 2 files"), "{ran:?}");
    let to = host.home().join("got");
    let fetched = host.ctl(&["download", &job, "-o", to.to_str().unwrap()]).ok().stderr;
    for said in [&ran.stderr, &fetched, &host.ctl(&["show", &job]).ok().stdout] {
        for entry in ["outputs/f is neither", "outputs/latest -> /", "outputs/above -> ../x points outside"] {
            assert!(said.contains(entry), "{entry}: {said}");
        }
    }
    assert_eq!(host.show(&job)["left_out"].as_array().unwrap().len(), 3);
    let name = std::ffi::OsStr::from_bytes(b"outputs/r\xe9sultats.csv");
    assert_eq!(fs::read_to_string(to.join(name)).unwrap(), "data\n");
    assert_eq!(fs::read_link(to.join("outputs/next")).unwrap().to_str(), Some("gone"));
    // The text that is shown names it.
    let part = host.home().join("part");
    host.ctl(&["download", &job, "outputs/r\\xe9sultats.csv", "-o", part.to_str().unwrap()]).ok();
    assert_eq!(fs::read_to_string(part.join(name)).unwrap(), "data\n");
}

#[test]
fn test_outputs_that_are_a_link_are_those_behind_it_and_two_faults_are_both_told() {
    let host = Host::unprivileged();
    let (code, scratch) = (host.project("p", &[("x", "")]), host.home().join("scratch"));
    let run = |command: String| host.ctl(&["run", code.to_str().unwrap(), "--", "sh", "-c", &command]);
    let scratch = scratch.display();
    let ran =
        run(format!("mkdir {scratch}; echo 1 > {scratch}/a; rmdir outputs; ln -s {scratch} outputs")).ok();
    assert!(ran.stderr.contains("outputs: 1 file"), "{ran:?}");
    let ran = run("rmdir outputs; ln -s /root outputs; exit 3".to_owned());
    assert_eq!(ran.code, 3, "{ran:?}");
    for told in ["RUN-101", "also part of the outputs could not be stored", "`outputs` is a link to /root"] {
        assert!(ran.stderr.contains(told), "{told}: {ran:?}");
    }
    let job = host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    assert!(host.ctl(&["why", &job]).ok().stdout.contains("also part of the outputs"), "{ran:?}");
    host.ctl(&["stop"]).ok();
}

#[test]
fn test_code_with_a_file_where_outputs_belong_is_refused_before_it_is_sent() {
    let host = Host::started();
    for (name, file) in [("p", "outputs"), ("q", "logs")] {
        let dir = host.project(name, &[(file, "a file"), ("t.py", "")]);
        let dir = dir.to_str().unwrap();
        let ran = host.ctl(&["submit", dir, "--", "true"]);
        assert!(ran.code != 0 && ran.stderr.contains("SNP-102"), "{ran:?}");
        assert!(ran.stderr.contains(&format!("{dir}/{file}` is a file")), "{ran:?}");
        fs::write(host.home().join(name).join(".amlignore"), format!("/{file}\n")).unwrap();
        host.ctl(&["run", dir, "--", "sh", "-c", "echo x > outputs/y; ls logs"]).ok();
    }
    assert_eq!(host.ctl(&["jobs", "--json"]).ok().json()["jobs"].as_array().unwrap().len(), 2);
}

#[test]
fn test_cancel_ends_the_reading_of_a_huge_output() {
    let host = Host::started();
    // As large as the disk allows one to say: minutes of zeros.
    let job = host.submit(
        "size=$(($(stat -f -c '%b*%S' .) * 9 / 10)); truncate -s $size outputs/hollow; echo kept > outputs/b",
    );
    eventually("the outputs are read", SOON, || {
        (host.show(&job)["replicas"][0]["step"] == "Uploading").then_some(())
    });
    host.ctl(&["cancel", &job]).ok();
    host.wait_for(&job, &["Canceled", "Failed", "Completed"]);
    let why = host.ctl(&["why", &job]).ok().stdout;
    assert!(why.contains("agentctl node outputs"), "it says how to have them all the same: {why}");
}
