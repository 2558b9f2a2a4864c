//! Providers that lie, hang, fail, answer late, create twice or forget: a table of programs, each a real one
//! (`liar.py`), and what becomes of a call.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Instant;

use serde_json::Map;

use super::*;

const TOKEN: &str = "agentd-join-tok1";
/// Longer than any call of a program that answers at all.
const ENOUGH: Duration = Duration::from_secs(120);
/// For those that never answer: long enough for the program to be at it.
const SHORT: Duration = Duration::from_secs(5);

struct Bed {
    provider: Provider,
    home: tempfile::TempDir,
}

impl Bed {
    fn new(case: &str, deadline: Duration) -> Bed {
        let home = tempfile::tempdir().unwrap();
        let program = concat!(env!("CARGO_MANIFEST_DIR"), "/src/provider/liar.py");
        let config = ProviderConfig {
            program: program.to_owned(),
            node: NodeShape { slots: Some(agent_model::node::Slots::Number(2)), ..NodeShape::default() },
            package: joining::Package::InImage,
            deadlines: Deadlines { create: deadline, list: ENOUGH, delete: ENOUGH, join: ENOUGH },
            environment: BTreeMap::from([("AZURE_CONFIG_DIR".to_owned(), "/etc/az".to_owned())]),
            settings: Map::from_iter([("case".to_owned(), Value::from(case))]),
        };
        let dir = home.path().join("providers/lab");
        Bed { provider: Provider::new("lab", config, Path::new("/usr/lib/agentd/providers"), &dir), home }
    }

    async fn create(&self) -> Result<String, ProviderError> {
        self.create_for("r-1").await
    }

    async fn create_for(&self, request: &str) -> Result<String, ProviderError> {
        let (name, labels) =
            ("gpu-1".parse().unwrap(), BTreeMap::from([("pool".to_owned(), "gpu".to_owned())]));
        let wish = CreateMachine {
            request,
            pool: "gpu",
            name: &name,
            priority: MachinePriority::Low,
            labels: &labels,
            address: "https://c.lab:7443",
            token: TOKEN,
        };
        self.provider.create(&wish).await
    }

    async fn listed(&self) -> Vec<(String, String)> {
        let machines = self.provider.list("gpu").await.unwrap();
        machines.into_iter().map(|one| (one.id, one.request.unwrap_or_default())).collect()
    }

    async fn delete(&self, id: &str) -> Result<(), ProviderError> {
        let machine = DeleteMachine { pool: "gpu", id: Some(id), request: "r-1", name: "gpu-1" };
        self.provider.delete(&machine).await
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.home.path().join("providers/lab").join(name)).unwrap()
    }

    /// Waits until the process that the program left behind is gone.
    async fn child_is_gone(&self) {
        let pid = self.read("CHILD");
        let begun = Instant::now();
        // Nobody may wait for it where these tests run: dead is gone.
        while fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(begun.elapsed() < ENOUGH, "the process {pid} is still there");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The kind of an error and its text.
fn told(error: &ProviderError) -> (&'static str, String) {
    let kind = match error {
        ProviderError::Quota { .. } => "quota",
        ProviderError::Temporary { .. } => "temporary",
        ProviderError::Permanent { .. } => "permanent",
        ProviderError::Late { .. } => "late",
        ProviderError::NotUnderstood { .. } => "not understood",
        ProviderError::NotThere { .. } => "not there",
        ProviderError::BadRequest { .. } => "bad request",
    };
    let text = error.to_string();
    assert!(text.contains("lab") && !text.contains(TOKEN), "{text}");
    (kind, text)
}

#[tokio::test]
async fn test_what_a_program_gets_wrong_in_one_call_is_told_with_its_words() {
    for (case, kind, words) in [
        ("fails", "temporary", "lab failed: a | no network (exit status 3)"),
        ("dies", "temporary", "lab failed: signal 9"),
        ("says the token", "permanent", "lab refused: bad: ***"),
        ("shouts the token", "temporary", "lab failed: bad: *** (exit status 1)"),
        (
            r#"{"error": {"kind": "quota", "message": "no H100"}}"#,
            "quota",
            "lab has no machine to give: no H100",
        ),
        (
            r#"{"error": {"kind": "moody", "message": "no"}}"#,
            "not understood",
            "no error of the kind `moody`: no",
        ),
        (
            "creating gpu-1 ... done",
            "not understood",
            "it is no JSON: expected value at line 1 column 1: creating gpu-1",
        ),
        (r#"{"id": "a"} {"id": "b"}"#, "not understood", "it is no JSON: trailing characters"),
        (r#"{"id": "two words"}"#, "not understood", "the id `two words` is not 1 to 256"),
        (r#"{"name": "gpu-1"}"#, "not understood", "it has no `id`"),
        (" ", "not understood", "it is empty"),
        ("no text", "not understood", "it is no JSON"),
        ("deep", "not understood", "it is no JSON: recursion limit exceeded"),
        ("too much", "not understood", "it is longer than 1048576 bytes"),
    ] {
        let error = Bed::new(case, ENOUGH).create().await.unwrap_err();
        let (found, text) = told(&error);
        assert!(found == kind && text.contains(words), "{case}: {found}: {text}");
    }
}

#[tokio::test]
async fn test_what_is_odd_and_right_is_taken() {
    for case in ["pieces", "loud", "honest"] {
        assert_eq!(Bed::new(case, ENOUGH).create().await.unwrap(), "m1", "{case}");
    }
    // It does not read what it is told.
    let bed = Bed::new("honest", ENOUGH);
    fs::create_dir_all(bed.home.path().join("providers/lab")).unwrap();
    fs::write(bed.home.path().join("providers/lab/DEAF"), "").unwrap();
    assert_eq!(bed.create().await.unwrap(), "m1");
}

#[tokio::test]
async fn test_what_a_program_leaves_behind_holds_nobody_up() {
    let bed = Bed::new("fork holds", ENOUGH);
    assert_eq!(bed.create().await.unwrap(), "m1");
    bed.child_is_gone().await;
    let bed = Bed::new("session holds", ENOUGH);
    assert_eq!(bed.create().await.unwrap(), "m1");
    assert!(
        Path::new("/proc").join(bed.read("CHILD")).exists(),
        "it has a session of its own, and is left alone"
    );
}

#[tokio::test]
async fn test_who_does_not_answer_in_time_is_killed_with_what_it_started() {
    let bed = Bed::new("hangs", SHORT);
    let (kind, text) = told(&bed.create().await.unwrap_err());
    assert_eq!((kind, text.as_str()), ("late", "lab did not answer within 5.0 s; it said: still at it"));
    bed.child_is_gone().await;
    let (kind, text) = told(&Bed::new("closes", SHORT).create().await.unwrap_err());
    assert_eq!((kind, text.as_str()), ("late", "lab did not answer within 5.0 s"));
}

#[tokio::test]
async fn test_a_machine_that_came_late_is_found_by_its_request() {
    let bed = Bed::new("answers late", SHORT);
    assert_eq!(told(&bed.create().await.unwrap_err()).0, "late");
    assert_eq!(bed.listed().await, [("m1".to_owned(), "r-1".to_owned())]);
    let again = Bed {
        provider: Provider {
            config: Bed::new("answers late", ENOUGH).provider.config,
            ..bed.provider.clone()
        },
        ..bed
    };
    assert_eq!(again.create().await.unwrap(), "m1", "the same request is the same machine");
    assert_eq!(again.create_for("r-2").await.unwrap(), "m2");
}

#[tokio::test]
async fn test_machines_that_come_twice_are_both_listed_and_taken_away_one_by_one() {
    let bed = Bed::new("creates twice", ENOUGH);
    let first = bed.create().await.unwrap();
    bed.create().await.unwrap();
    let both = [("m1".to_owned(), "r-1".to_owned()), ("m2".to_owned(), "r-1".to_owned())];
    assert_eq!(bed.listed().await, both);
    bed.delete(&first).await.unwrap();
    assert_eq!(bed.listed().await, both[1..]);
    bed.delete(&first).await.unwrap();
}

#[tokio::test]
async fn test_a_machine_that_was_forgotten_is_not_listed_and_can_be_deleted() {
    let bed = Bed::new("forgets", ENOUGH);
    let id = bed.create().await.unwrap();
    assert_eq!(bed.listed().await, []);
    bed.delete(&id).await.unwrap();
}

#[tokio::test]
async fn test_a_list_with_anything_wrong_in_it_is_no_list() {
    for (case, words) in [
        (r#"{"machines": [{"id": "a", "state": "asleep"}]}"#, "machine 1: unknown variant `asleep`"),
        (
            r#"{"machines": [{"id": "a", "state": "gone"}, {"id": "a", "state": "running"}]}"#,
            "machine 2: the id `a` was there before",
        ),
        (r#"{"machines": {}}"#, "it has no list of `machines`"),
        ("{}", "it has no list of `machines`"),
    ] {
        let error = Bed::new(case, ENOUGH).provider.list("gpu").await.unwrap_err();
        let (kind, text) = told(&error);
        assert!(kind == "not understood" && text.contains(words), "{case}: {text}");
    }
}

#[tokio::test]
async fn test_a_program_that_does_not_start_is_named() {
    let mut bed = Bed::new("honest", ENOUGH);
    let none = bed.home.path().join("none");
    fs::write(bed.home.path().join("plain"), "no program").unwrap();
    for (program, why) in [
        (none, "No such file or directory"),
        (bed.home.path().join("plain"), "Permission denied"),
        (bed.home.path().to_owned(), "Permission denied"),
    ] {
        bed.provider.program.clone_from(&program);
        let (kind, text) = told(&bed.create().await.unwrap_err());
        assert_eq!(kind, "not there");
        assert!(text.contains(why) && text.contains(&program.display().to_string()), "{text}");
    }
}

#[tokio::test]
async fn test_what_breaks_the_rules_is_not_asked() {
    let bed = Bed::new("honest", ENOUGH);
    for request in ["", "../x", "a b", "-x"] {
        assert_eq!(told(&bed.create_for(request).await.unwrap_err()).0, "bad request");
    }
    assert_eq!(told(&bed.delete("-x").await.unwrap_err()).0, "bad request");
    assert!(!bed.home.path().join("providers").exists(), "nothing was started");
}

#[tokio::test]
async fn test_a_program_gets_what_the_guide_says_and_nothing_of_the_daemon() {
    let bed = Bed::new("tells", ENOUGH);
    bed.create().await.unwrap();
    let dir = bed.home.path().join("providers/lab");
    assert_eq!(dir.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    let told: Value = serde_json::from_str(&bed.read("TOLD")).unwrap();
    assert_eq!(told["argv"], json!(["create"]));
    let mut env = told["env"].as_object().unwrap().clone();
    env.remove("LC_CTYPE"); // Python's own
    let dir = dir.display().to_string();
    let due = json!({"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": dir, "AZURE_CONFIG_DIR": "/etc/az"});
    assert_eq!(Value::from(env), due);
    assert_eq!(told["cwd"], json!(dir));
    let mut asked = told["asked"].clone();
    let join = asked.as_object_mut().unwrap().remove("join").unwrap();
    assert_eq!(
        asked,
        json!({
            "request": "r-1", "pool": "gpu", "name": "gpu-1", "priority": "low", "labels": {"pool": "gpu"},
            "node": {"slots": 2, "cpus": null, "memory": null, "gpus": null}, "settings": {"case": "tells"},
        })
    );
    assert_eq!((&join["address"], &join["token"]), (&json!("https://c.lab:7443"), &json!(TOKEN)));
    assert!(join["cloud_init"].as_str().unwrap().starts_with("#cloud-config\n"));
    assert!(join["script"].as_str().unwrap().contains("name='gpu-1'\nslots=2\n"));
}
