use super::*;

const LINES: &str = r#"{"metric":"loss","value":0.30000000000000004,"step":7,"time":1700000000001}
{"metric":"loss","value":"NaN","step":8}
{"metric":"loss","value":1e300,"step":9}
{"metric":"loss (val)","value":"-Infinity"}
{"param":"lr","text":"0.1\n"}
{"tag":"team","text":"vision"}
{"tag":"agentd.input.iris\tab","text":"{\"dataset\":{\"name\":\"iris\",\"digest\":\"ab\",\"source\":\"é\"},\"tags\":[{\"key\":\"mlflow.data.context\",\"value\":\"training\"}]}"}
{"tag":"agentd.output.m-1","text":"{\"model_id\":\"m-1\",\"step\":3}"}
{"tag":"agentd.model.m-1","text":"{\"info\":{\"model_id\":\"m-1\",\"name\":\"net\",\"status\":\"LOGGED_MODEL_READY\",\"tags\":[]},\"data\":{\"params\":[{\"key\":\"p\",\"value\":\"1\"}]}}"}
{"tag":"agentd.model-metric.m-1.acc","text":"{\"key\":\"acc\",\"value\":0.5,\"timestamp\":5,\"step\":1,\"run_id\":\"a.b\",\"dataset_name\":\"iris\",\"dataset_digest\":\"ab\"}"}
{"tag":"agentd.registered-model.best","text":"{\"name\":\"best\",\"tags\":[],\"aliases\":[{\"alias\":\"top\",\"version\":\"1\"}],\"versions\":[{\"version\":\"1\",\"source\":\"mlflow-artifacts:/7/a.b/artifacts/model\",\"run_id\":\"a.b\"}]}"}
{"run":"kid","tag":"agentd.run","text":"Kid"}
{"run":"kid","tag":"mlflow.parentRunId","text":"a.b"}
{"run":"kid","tag":"agentd.status","text":"FAILED"}
{"run":"kid","tag":"agentd.ended","text":"9"}
{"run":"lost","tag":"agentd.run","text":"Lost"}
"#;

fn facts(job: &str) -> JobFacts {
    JobFacts {
        job: job.into(),
        title: "Train: \"it\"".into(),
        owner: "ada".into(),
        experiment: "birds".into(),
        command: "python t.py".into(),
        tags: BTreeMap::from([("team".to_owned(), "a".to_owned()), ("who".to_owned(), "b".to_owned())]),
        started: 1_700_000_000_000,
        ended: Some(1_700_000_009_000),
        status: RunStatus::Finished,
        sweep: None,
        values: BTreeMap::new(),
    }
}

/// All files below a directory, with their text.
fn tree(dir: &Path) -> BTreeMap<String, String> {
    let (mut found, mut left) = (BTreeMap::new(), vec![dir.to_owned()]);
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            match entry.file_type().unwrap().is_dir() {
                true => left.push(entry.path()),
                false => {
                    let name = entry.path().strip_prefix(dir).unwrap().display().to_string();
                    found.insert(name, fs::read_to_string(entry.path()).unwrap());
                }
            }
        }
    }
    found
}

fn write(root: &Path, job: &str, artifacts: Option<&Path>) -> BTreeMap<String, String> {
    let room = tempfile::tempdir_in(root.parent().unwrap()).unwrap();
    let store = FileStore::open(root.to_owned(), room.path().to_owned()).unwrap();
    assert_eq!(store.write(&facts(job), &Recording::read(LINES.as_bytes()), artifacts).unwrap(), 3);
    tree(root)
}

#[test]
fn test_a_job_is_written_with_all_it_recorded_and_again_without_a_change() {
    let home = tempfile::tempdir().unwrap();
    let files = home.path().join("files");
    for name in ["notes/a.txt", "kid/b.txt", "models/m-1/weights"] {
        let path = files.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, name).unwrap();
    }
    let root = home.path().join("a b");
    let found = write(&root, "a.b", Some(&files));
    let of = |path: &str| found.get(path).unwrap_or_else(|| panic!("no {path} in {found:#?}")).as_str();
    let experiment = names::experiment("birds");
    let (own, kid) = (names::id("a.b"), names::id("a.b--kid"));
    let at = |run: &str, path: &str| of(&format!("{experiment}/{run}/{path}"));
    assert!(of(&format!("{experiment}/meta.yaml")).contains("name: \"birds\"\n"));
    let loss = "1700000000001 0.30000000000000004 7\n1700000000000 NaN 8\n1700000000000 1e300 9\n";
    assert_eq!(at(&own, "metrics/loss"), loss);
    assert_eq!(at(&own, "metrics/loss _val_"), "1700000000000 -inf 0\n");
    assert_eq!(
        (at(&own, "params/lr"), at(&own, "tags/team"), at(&own, "tags/who")),
        ("0.1\n", "vision", "b")
    );
    let meta = at(&own, "meta.yaml");
    for line in
        ["run_name: \"Train: \\\"it\\\"\"", "status: 3", "end_time: 1700000009000", "user_id: \"ada\""]
    {
        assert!(meta.contains(line), "no `{line}` in {meta}");
    }
    assert!(meta.contains("/a%20b/"), "{meta}");
    let meta = at(&kid, "meta.yaml");
    assert!(
        meta.contains("status: 4\n") && meta.contains("end_time: 9\n") && meta.contains("run_name: \"Kid\"")
    );
    assert_eq!(at(&kid, "tags/mlflow.parentRunId"), own);
    // A run that was not ended has ended with its job.
    assert!(at(&names::id("a.b--lost"), "meta.yaml").contains("status: 3\n"));
    assert_eq!(
        (at(&own, "artifacts/notes/a.txt"), at(&kid, "artifacts/b.txt")),
        ("notes/a.txt", "kid/b.txt")
    );
    assert_eq!(at("models", "m-1/artifacts/weights"), "models/m-1/weights");
    assert_eq!(at("models", "m-1/metrics/acc"), format!("5 0.5 1 {own} iris ab\n"));
    assert!(at(&own, "outputs/m-1/meta.yaml").contains("step: 3\n"));
    assert!(found.iter().any(|(name, text)| name.contains("/datasets/") && text.contains("\\U000000e9")));
    assert!(found.iter().any(|(name, text)| name.contains("/inputs/") && text.contains("training")));
    assert_eq!(of("models/best/aliases/top"), "1");
    assert!(
        of("models/best/version-1/meta.yaml").contains(&format!("/{experiment}/{own}/artifacts/model\""))
    );

    // Without files those that are there stay.
    assert_eq!(write(&root, "a.b", None), found);
    // The name of a registered model belongs to the first job.
    let found = write(&root, "other", None);
    assert!(
        found["models/best/tags/agentd.job"] == "a.b"
            && found["models/best-other/tags/agentd.job"] == "other"
    );
}
