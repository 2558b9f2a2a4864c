//! Outputs that a job wants in a data store: they are sent there when its command has ended, whole and once.

use std::fs;
use std::path::{Path, PathBuf};

use agent_tests::{Host, SOON, eventually};

use crate::data::server::{LENGTH, Manner, Server};
use crate::data::{assert_nowhere, host, run, submit};

/// A job with one output.
fn job(output: &str, command: &str) -> String {
    let command = serde_json::Value::from(command);
    format!("command: {command}\nenvironment: host\noutputs:\n  model: {{{output}}}\n")
}

/// Writes two files, and says where.
const WRITES: &str = "mkdir ${{outputs.model}}/deep; echo first >${{outputs.model}}/a; \
                      echo second >${{outputs.model}}/deep/b; test -d \"$AZURE_ML_OUTPUT_model\"";

fn share() -> (tempfile::TempDir, String) {
    let share = tempfile::tempdir().unwrap();
    let stores = format!(
        "datastores:\n  share: {{path: {0}, writable: true}}\n  read: {{path: {0}}}\n",
        share.path().display()
    );
    (share, stores)
}

fn object_store(server: &Server, key: &str) -> String {
    format!(
        "datastores:\n  s3:\n    url: s3://bucket/base\n    endpoint: http://{}\n    allow_http: true\n    \
         access_key_id: {key}\n    secret_access_key: {SECRET}\n    writable: true\n",
        server.host()
    )
}

const SECRET: &str = "hidden-and-never-told";

fn text(path: PathBuf) -> String {
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The files of the output as the controller has them.
#[track_caller]
fn assert_downloaded(host: &Host, job: &str) {
    let to = host.home().join(format!("results-{job}"));
    host.ctl(&["download", job, "-o", to.to_str().unwrap()]).ok();
    assert_eq!(text(to.join("named-outputs/model/a")), "first\n");
}

fn last(host: &Host) -> String {
    host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned()
}

#[test]
fn test_outputs_go_to_a_share_below_the_name_of_the_job() {
    let (share, stores) = share();
    let host = host(&stores);
    let address = "mode: upload, path: 'azureml://datastores/share/paths/ü b/${{name}}/${{output_name}}'";
    run(&host, "p", &job(address, WRITES)).ok();
    let first = last(&host);
    let to = |job: &str| share.path().join("ü b").join(job).join("model");
    assert_eq!(
        (text(to(&first).join("a")), text(to(&first).join("deep/b"))),
        ("first\n".into(), "second\n".into())
    );
    assert_downloaded(&host, &first);
    let shown = host.ctl(&["show", &first]).ok().stdout;
    assert!(shown.contains(&format!("azureml://datastores/share/paths/ü b/{first}/model")), "{shown}");
    // The same job again goes to a place of its own.
    host.ctl(&["rerun", &first]).ok();
    let second = last(&host);
    host.wait_for(&second, &["Completed"]);
    assert!(second != first && to(&second).join("deep/b").exists());

    // A file is replaced; what is beside it stays; what a failed job left is sent, too.
    fs::write(share.path().join("m"), "old").unwrap();
    fs::write(share.path().join("beside"), "stays").unwrap();
    let one = job(
        "type: uri_file, path: 'azureml://datastores/share/paths/m'",
        "echo new >${{outputs.model}}; echo other >$(dirname ${{outputs.model}})/other; exit 3",
    );
    run(&host, "one", &one).code(3);
    assert_eq!(
        (text(share.path().join("m")), text(share.path().join("beside"))),
        ("new\n".into(), "stays".into())
    );
    assert_eq!(fs::read_dir(share.path()).unwrap().count(), 3);
}

#[test]
fn test_a_store_that_takes_no_outputs_is_told_before_the_command_starts() {
    let (share, stores) = share();
    let host = host(&stores);
    let started = share.path().join("started");
    let command = format!("touch {}", started.display());
    for (path, code, said) in [
        ("azureml://datastores/read/paths/a", "DAT-110", "writable: true"),
        ("azureml://datastores/none/paths/a", "DAT-101", "read, share"),
        ("s3://bucket/a", "DAT-110", "s3://bucket/a"),
    ] {
        let name = path.replace([':', '/'], "-");
        let ran = run(&host, &name, &job(&format!("path: '{path}'"), &command));
        ran.code(125).says(&format!("error[{code}]")).says(said).says("fix:");
    }
    assert!(!started.exists());
    let ran = run(&host, "web", &job("path: 'https://h.example/a'", "true"));
    ran.code(125).says("error[JOB-103]").says("a web server takes no files");
}

#[test]
fn test_a_share_that_does_not_take_an_output_fails_the_job_and_the_output_is_not_lost() {
    let (share, stores) = share();
    let host = host(&stores);
    fs::create_dir_all(share.path().join("runs/a")).unwrap();
    let ran = run(&host, "p", &job("path: 'azureml://datastores/share/paths/runs'", WRITES));
    ran.says("error[DAT-111]").says("agentctl download");
    let failed = last(&host);
    host.wait_for(&failed, &["Failed"]);
    assert_downloaded(&host, &failed);
    assert!(
        text(share.path().join("runs/deep/b")) == "second\n" || !share.path().join("runs/deep/b").exists()
    );
    // A job that failed by itself says both.
    let fails = job("path: 'azureml://datastores/share/paths/runs'", &format!("{WRITES}; exit 4"));
    run(&host, "fails", &fails).code(4).says("RUN-101").says("was not sent");
}

#[test]
fn test_outputs_go_to_a_store_of_objects_with_its_credentials_which_go_nowhere() {
    let server = Server::started(Manner::Locked);
    let host = host(&object_store(&server, "ada"));
    let writes = format!("{WRITES}; head -c 20000000 /dev/zero >${{{{outputs.model}}}}/large; env");
    let ran = run(&host, "p", &job("path: 'azureml://datastores/s3/paths/runs/1'", &writes)).ok();
    assert!(!ran.stdout.contains(SECRET) && !ran.stderr.contains(SECRET));
    let taken = server.taken();
    let names: Vec<&str> = taken.keys().map(String::as_str).collect();
    let at = |name: &str| format!("/bucket/base/runs/1/{name}");
    assert_eq!(names, [at("a"), at("deep/b"), at("large")]);
    assert_eq!(
        (taken[&at("deep/b")].as_slice(), taken[&at("large")].len()),
        (b"second\n".as_slice(), 20_000_000)
    );
    assert_eq!(server.asked("PUT /bucket/base/runs/1/large?"), 3, "a large file goes in parts");
    run(&host, "address", &job("path: 's3://bucket/base/direct'", WRITES)).ok();
    assert!(server.taken().contains_key("/bucket/base/direct/a"));
    assert_nowhere(host.home(), SECRET, &host.home().join("data.yaml"));
}

#[test]
fn test_wrong_credentials_fail_the_job_at_once_and_say_so() {
    let server = Server::started(Manner::Locked);
    let host = host(&object_store(&server, "eve"));
    let ran = run(&host, "p", &job("path: 'azureml://datastores/s3/paths/runs'", WRITES));
    ran.says("error[DAT-111]").says("does not let this node write").says("credentials");
    let failed = last(&host);
    host.wait_for(&failed, &["Failed"]);
    assert_downloaded(&host, &failed);
    assert!(server.taken().is_empty());
}

#[test]
fn test_a_busy_store_is_waited_for_and_the_job_says_so() {
    let server = Server::started(Manner::Busy);
    let host = host(&object_store(&server, "ada"));
    let job = submit(&host, "p", &job("path: 'azureml://datastores/s3/paths/runs'", WRITES));
    eventually("it is uploading", 2 * SOON, || {
        host.ctl(&["why", &job]).ok().stdout.contains("uploading outputs").then_some(())
    });
    server.set(Manner::Plain);
    host.wait_for(&job, &["Completed"]);
    assert_eq!(server.taken().len(), 2);
}

#[test]
fn test_an_upload_outlives_the_daemon_and_sends_only_what_is_missing() {
    let server = Server::started(Manner::TakesOne);
    let mut host = host(&object_store(&server, "ada"));
    let job = submit(&host, "p", &job("path: 'azureml://datastores/s3/paths/runs'", WRITES));
    eventually("one has arrived, and is noted", 2 * SOON, || {
        let notes = host.state().join("jobs").join(format!("{job}.1.0/sent/model"));
        (server.taken().len() == 1 && fs::metadata(notes).is_ok_and(|file| file.len() > 64)).then_some(())
    });
    let first = server.taken().into_keys().next().unwrap();
    host.kill();
    server.set(Manner::Plain);
    host.start();
    host.wait_for(&job, &["Completed"]);
    assert_eq!(server.taken().len(), 2);
    assert_eq!(server.asked(&format!("PUT {first} ")), 1, "what had arrived is not sent again");
    assert_downloaded(&host, &job);
}

#[test]
fn test_a_cancel_does_not_wait_for_a_store_that_stalls() {
    let server = Server::started(Manner::Stalls);
    let host = host(&object_store(&server, "ada"));
    let job = submit(&host, "p", &job("path: 'azureml://datastores/s3/paths/runs'", WRITES));
    eventually("it is sent", 2 * SOON, || (server.asked("PUT") > 0).then_some(()));
    host.ctl(&["cancel", &job]).ok();
    host.wait_for(&job, &["Failed", "Canceled"]);
    assert!(host.ctl(&["why", &job]).ok().stdout.contains("the job was canceled meanwhile"));
    assert_downloaded(&host, &job);
    eventually("the program that sends is gone", SOON, || {
        agent_tests::engines(host.home(), host.pid()).is_empty().then_some(())
    });
}

#[test]
fn test_odd_names_get_to_every_kind_of_store_as_they_are() {
    let server = Server::started(Manner::Plain);
    let key = "aGlkZGVuLWFuZC1uZXZlci10b2xk";
    let service = format!(
        "{{\"gcs_base_url\":\"http://{}\",\"disable_oauth\":true,\"client_email\":\"\",\"private_key\":\"\",\
         \"private_key_id\":\"\"}}",
        server.host()
    );
    let host = host(&format!(
        "datastores:\n  s3: {{url: 's3://bucket/base', endpoint: 'http://{0}', allow_http: 'true', access_key_id: ada, \
         secret_access_key: x, writable: true}}\n  azure: {{url: 'abfss://data@acc.dfs.core.windows.net/base', endpoint: \
         'http://{0}', allow_http: 'true', account_key: {key}, writable: true}}\n  google: {{url: 'gs://bucket/base', \
         service_account_key: '{service}', allow_http: 'true', writable: true}}\n",
        server.host()
    ));
    let writes = "mkdir \"${{outputs.model}}/ü b\"; echo x >\"${{outputs.model}}/ü b/ä%41+.csv\"";
    for store in ["s3", "azure", "google"] {
        let path = format!("path: 'azureml://datastores/{store}/paths/{store} ö%42+'");
        run(&host, store, &job(&path, writes)).ok();
    }
    let sent: Vec<String> = server.taken().into_keys().map(|path| decoded(&path)).collect();
    for store in ["s3", "azure", "google"] {
        let end = format!("base/{store} ö%42+/ü b/ä%41+.csv");
        assert!(sent.iter().any(|path| path.ends_with(&end)), "{end}: {sent:?}");
        let input = format!("type: uri_file, path: 'azureml://datastores/{store}/paths/ü b/{store}%41+.csv'");
        let reads = format!(
            "command: wc -c <\"${{{{inputs.data}}}}\"\nenvironment: host\ninputs:\n  data: {{{input}}}\n"
        );
        assert_eq!(run(&host, &format!("{store}-reads"), &reads).ok().stdout, format!("{LENGTH}\n"));
        let end = format!("base/ü b/{store}%41+.csv");
        let is_asked = |line: &String| line.starts_with("GET ") && decoded(line).contains(&end);
        assert!(server.requests().iter().any(is_asked), "{end}: {:?}", server.requests());
    }
}

/// The path of a request without its escapes.
fn decoded(path: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), path.as_bytes());
    while let Some((first, more)) = rest.split_first() {
        let escaped =
            (*first == b'%').then(|| u8::from_str_radix(std::str::from_utf8(&more[..2]).unwrap(), 16));
        match escaped {
            Some(byte) => {
                bytes.push(byte.unwrap());
                rest = &more[2..];
            }
            None => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    String::from_utf8(bytes).unwrap()
}

#[test]
fn test_no_link_of_a_job_brings_files_of_others_into_a_store() {
    let (share, stores) = share();
    let host = host(&stores);
    let secret = host.home().join("secret");
    fs::write(&secret, "mine").unwrap();
    let command = format!(
        "ln -s {} ${{{{outputs.model}}}}/stolen; echo first >${{{{outputs.model}}}}/a; ln -s a ${{{{outputs.model}}}}/b; \
         echo z >\"$(printf '%s/n\\377' ${{{{outputs.model}}}})\"",
        secret.display()
    );
    let ran = run(&host, "p", &job("path: 'azureml://datastores/share/paths/runs'", &command)).ok();
    let listed = host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    let left_out = host.show(&listed)["left_out"].to_string();
    for told in
        ["stolen is a link that leads to no file", "has a name that is no text", "but in `agentctl download`"]
    {
        assert!(left_out.contains(told), "{told}: {left_out}\n{}", ran.stderr);
    }
    assert_eq!(text(share.path().join("runs/b")), "first\n");
    assert!(!Path::new(&share.path().join("runs/stolen")).exists());
}
