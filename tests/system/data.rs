//! Data that a job names by its address: it is fetched once, whole, and given to each job as its own.

pub(crate) mod server;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use agent_tests::{Host, Ran, SOON, eventually};

use self::server::{LENGTH, Manner, Server, content};

/// A box, the program that fetches, and the file of data stores of the box.
pub(crate) fn host(stores: &str) -> Host {
    agent_tests::engine();
    let mut host = Host::new();
    let file = host.home().join("data.yaml");
    fs::write(&file, stores).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    host.set("AGENTD_DATA_STORES", file.to_str().unwrap());
    host.start();
    host
}

/// A job that reads one input.
fn job(input: &str, command: &str) -> String {
    let command = serde_json::Value::from(command);
    format!("command: {command}\nenvironment: host\ninputs:\n  data: {{{input}}}\n")
}

fn file(url: &str) -> String {
    format!("type: uri_file, path: '{url}'")
}

pub(crate) fn run(host: &Host, name: &str, text: &str) -> Ran {
    let dir = host.project(name, &[("job.yml", text)]);
    host.ctl(&["run", dir.to_str().unwrap()])
}

pub(crate) fn submit(host: &Host, name: &str, text: &str) -> String {
    let dir = host.project(name, &[("job.yml", text)]);
    host.ctl(&["submit", dir.to_str().unwrap()]).ok().stdout.trim().to_owned()
}

/// Prints the first line of the input and its length.
const READS: &str = "head -n 1 ${{inputs.data}}; wc -c <${{inputs.data}}";

fn read(version: u64) -> String {
    format!("version {version}\n{LENGTH}\n")
}

#[test]
fn test_an_address_is_fetched_once_and_again_when_it_changed() {
    let (host, server) = (host(""), Server::started(Manner::Plain));
    let text = job(&file(&server.url("a/iris.csv?v=1")), &format!("{READS}; basename $AZURE_ML_INPUT_data"));
    let said = |version| format!("{}iris.csv\n", read(version));
    assert_eq!(run(&host, "p", &text).ok().stdout, said(1));
    // What a job does with its own is nobody else's matter.
    let spoils =
        job(&file(&server.url("a/iris.csv?v=1")), "chmod u+w ${{inputs.data}}; echo x >>${{inputs.data}}");
    run(&host, "spoils", &spoils).ok();
    assert_eq!(run(&host, "p", &text).ok().stdout, said(1));
    assert_eq!(server.asked("GET"), 1, "it was here already");
    server.change();
    assert_eq!(run(&host, "p", &text).ok().stdout, said(2));
    assert_eq!(server.asked("GET"), 2);
    let job = host.ctl(&["jobs", "--json"]).ok().json()["jobs"][0]["job"].as_str().unwrap().to_owned();
    let log = host.ctl(&["logs", &job, "--build"]).ok().stdout;
    assert!(log.contains("was fetched: "), "{log}");
}

#[test]
fn test_two_jobs_share_one_download() {
    let (host, server) = (host(""), Server::started(Manner::Cuts));
    let text = job(&file(&server.url("a.csv")), READS);
    let jobs = ["p", "q"].map(|name| submit(&host, name, &text));
    for job in &jobs {
        host.wait_for(job, &["Completed"]);
        assert_eq!(host.ctl(&["logs", job]).ok().stdout, read(1));
    }
    assert_eq!(server.asked("GET /a.csv 0"), 1, "one of them began");
    assert_eq!(
        server.resumed(),
        [1, 2, 3].map(|part| part * LENGTH as u64 / 4),
        "and went on where it was cut"
    );
}

#[test]
fn test_what_does_not_arrive_as_announced_fails_with_its_reason() {
    let (host, server) = (host(""), Server::started(Manner::Lies));
    let text = job(&file(&server.url("a.csv")), READS);
    let waits = submit(&host, "lies", &text);
    eventually("the length is doubted", 2 * SOON, || {
        host.ctl(&["why", &waits]).ok().stdout.contains("DAT-106").then_some(())
    });
    host.ctl(&["cancel", &waits]).ok();
    server.set(Manner::Empty);
    run(&host, "empty", &text).code(125).says("error[DAT-102]").says("answered 404").says("fix:");
    server.set(Manner::Locked);
    run(&host, "locked", &text).code(125).says("error[DAT-103]").says("answered 403").says("data_stores");
    server.set(Manner::Boasts);
    run(&host, "boasts", &text).code(125).says("error[NODE-101]").says("are free");
    server.set(Manner::Plain);
    let folder = job(&format!("path: '{}'", server.url("a")), "true");
    run(&host, "folder", &folder).code(125).says("error[DAT-104]").says("does not list").says("uri_file");
    assert_eq!(run(&host, "plain", &text).ok().stdout, read(1));
}

#[test]
fn test_a_busy_server_is_waited_for_and_the_job_says_so() {
    let (host, server) = (host(""), Server::started(Manner::Busy));
    let job = submit(&host, "p", &job(&file(&server.url("a.csv")), READS));
    eventually("it is said", 2 * SOON, || {
        host.ctl(&["why", &job]).ok().stdout.contains("for the data of `inputs.data`").then_some(())
    });
    server.set(Manner::Plain);
    host.wait_for(&job, &["Completed"]);
}

#[test]
fn test_a_download_outlives_the_daemon_and_a_cancel_ends_one() {
    let (mut host, server) = (host(""), Server::started(Manner::Stalls));
    let text = job(&file(&server.url("a.csv")), READS);
    let first = submit(&host, "p", &text);
    let has_begun = |host: &Host| {
        let part = fs::read_dir(host.state().join("data")).ok()?.flatten().next()?.path().join("data/file");
        (part.metadata().ok()?.len() == LENGTH as u64 / 4).then_some(())
    };
    eventually("a quarter is there", SOON, || has_begun(&host));
    host.kill();
    server.set(Manner::Plain);
    host.start();
    host.wait_for(&first, &["Completed"]);
    assert_eq!(host.ctl(&["logs", &first]).ok().stdout, read(1));
    assert_eq!(server.resumed(), [LENGTH as u64 / 4]);

    server.set(Manner::Stalls);
    let text = job(&file(&server.url("b.csv")), READS);
    let second = submit(&host, "q", &text);
    eventually("it is asked for", SOON, || (server.asked("GET /b.csv") > 0).then_some(()));
    host.ctl(&["cancel", &second]).ok();
    host.wait_for(&second, &["Canceled"]);
    eventually("the program that fetches is gone", SOON, || {
        agent_tests::engines(host.home(), host.pid()).is_empty().then_some(())
    });
}

#[test]
fn test_stores_and_mapped_addresses_are_where_the_operator_says() {
    let share = tempfile::tempdir().unwrap();
    fs::create_dir(share.path().join("iris")).unwrap();
    fs::write(share.path().join("iris/iris.csv"), "rows\n").unwrap();
    let server = Server::started(Manner::Plain);
    let share = share.path().display();
    let host = host(&format!(
        "datastores:\n  share: {{path: {share}}}\n  web: {{url: '{}'}}\ndata_map:\n  \
         wasbs://data@acc.blob.core.windows.net: {share}\n  azureml:iris:1: {share}/iris/iris.csv\n",
        server.url("base")
    ));
    for (name, input) in [
        ("file", file("azureml://datastores/share/paths/iris/iris.csv")),
        ("mapped", file("wasbs://data@acc.blob.core.windows.net/iris/iris.csv")),
    ] {
        let reads = job(&input, "cat ${{inputs.data}}; readlink ${{inputs.data}}");
        let said = run(&host, name, &reads).ok().stdout;
        assert_eq!(said, format!("rows\n{share}/iris/iris.csv\n"), "nothing is copied");
    }
    let named = job(&file("azureml:iris:1"), "cat ${{inputs.data}}");
    assert_eq!(run(&host, "named", &named).ok().stdout, "rows\n");
    let reads = "cat ${{inputs.data}}/iris.csv; find ${{inputs.data}} -type f";
    let folder = job("type: uri_folder, path: 'azureml://datastores/share/paths/iris'", reads);
    assert_eq!(run(&host, "folder", &folder).ok().stdout, format!("rows\n{share}/iris/iris.csv\n"));
    let web = job(&file("azureml://datastores/web/paths/a.csv"), READS);
    assert_eq!(run(&host, "web", &web).ok().stdout, read(1));
    assert_eq!(server.asked("GET /base/a.csv"), 1);
    let direct = job("mode: direct, path: 'https://h.example/x.csv'", "echo ${{inputs.data}}");
    assert_eq!(run(&host, "direct", &direct).ok().stdout, "https://h.example/x.csv\n");

    let unknown = job(&file("azureml://datastores/blob/paths/a.csv"), "true");
    run(&host, "unknown", &unknown).code(125).says("error[DAT-101]").says("share, web").says("datastores");
    let absent = job(&file("azureml://datastores/share/paths/nowhere.csv"), "true");
    run(&host, "absent", &absent).code(125).says("error[DAT-102]").says("nowhere.csv");
    // The file is read at each use.
    fs::write(host.home().join("data.yaml"), "datastores: {a: {}}\n").unwrap();
    run(&host, "broken", &absent).code(125).says("error[DAT-107]").says("line 1, column 17");
}

/// The text is in no file below the directory, except for this one.
#[track_caller]
pub(crate) fn assert_nowhere(dir: &Path, secret: &str, except: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => assert_nowhere(&path, secret, except),
            kind if kind.is_file() && path != except => {
                let bytes = fs::read(&path).unwrap_or_default();
                let found = bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
                assert!(!found, "the secret is in {}", path.display());
            }
            _ => {}
        }
    }
}

#[test]
fn test_a_store_of_objects_is_read_with_its_credentials_which_go_nowhere() {
    const SECRET: &str = "hidden-and-never-told";
    let server = Server::started(Manner::Locked);
    let host = host(&format!(
        "datastores:\n  s3:\n    url: s3://bucket/base\n    endpoint: http://{}\n    allow_http: true\n    \
         access_key_id: ada\n    secret_access_key: {SECRET}\n",
        server.host()
    ));
    let one = job(&file("azureml://datastores/s3/paths/folder/a.csv"), READS);
    let ran = run(&host, "one", &one).ok();
    assert_eq!(ran.stdout, read(1));
    let reads = "cd ${{inputs.data}}; cat a.csv deep/b.csv | wc -c; env";
    let all = job("type: uri_folder, path: 's3://bucket/base/folder'", reads);
    let ran = run(&host, "all", &all).ok();
    assert!(ran.stdout.starts_with(&format!("{}\n", 2 * LENGTH)), "{}", ran.stdout);
    assert!(!ran.stdout.contains(SECRET) && !ran.stderr.contains(SECRET));
    let gets = server.asked("GET");
    run(&host, "again", &all).ok();
    assert_eq!(server.asked("GET"), gets + 1, "it is listed, and nothing is fetched");
    assert_nowhere(host.home(), SECRET, &host.home().join("data.yaml"));
    // Credentials in an address are refused before anything is sent.
    let inline = job(&file("https://acc.blob.core.windows.net/c/a.csv?sv=1&sig=abc"), "true");
    run(&host, "inline", &inline).code(125).says("error[JOB-103]").says("line 4").says("data_stores");
}

#[test]
fn test_fetched_data_gives_way() {
    let (mut host, server) = (host(""), Server::started(Manner::Plain));
    let text = job(&file(&server.url("a.csv")), READS);
    run(&host, "p", &text).ok();
    let kept = |host: &Host| fs::read_dir(host.state().join("data")).unwrap().count();
    assert_eq!(kept(&host), 1);
    host.kill();
    host.set("AGENTD_DATA_SIZE", "1");
    host.start();
    eventually("what is too much goes", SOON, || (kept(&host) == 0).then_some(()));
    assert_eq!(run(&host, "p", &text).ok().stdout, read(1));
}

#[test]
fn test_progress_is_told_while_data_is_fetched() {
    let (host, server) = (host(""), Server::started(Manner::Stalls));
    let job = submit(&host, "p", &job(&file(&server.url("a.csv")), READS));
    eventually("the bytes are told", SOON, || {
        host.ctl(&["why", &job]).ok().stdout.contains("downloading data").then_some(())
    });
    let begun = Instant::now();
    host.ctl(&["cancel", &job]).ok();
    host.wait_for(&job, &["Canceled"]);
    assert!(begun.elapsed() < Duration::from_secs(60), "a cancel does not wait for the server");
    assert_eq!(content(1).len(), LENGTH);
}
