//! The cache with a program that fetches as it is told by a script.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::*;

/// A cache whose program is this shell script; `$PART` is where it fetches to.
fn cache(dir: &Path, script: &str) -> DataCache {
    let program = dir.join("fetcher");
    fs::write(&program, format!("#!/bin/sh\nREQUEST=$(cat)\nmkdir -p data\n{script}\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    DataCache::open(DataConfig {
        root: dir.join("data"),
        program,
        vars: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
        builder: None,
        offline: false,
    })
    .unwrap()
}

fn source() -> DataSource {
    DataSource { url: "https://h.example/a.csv".into(), is_file: true, options: BTreeMap::new() }
}

/// Fetches `rows` once, counts how often it is asked, and knows it the next time.
const ROWS: &str = r#"
echo asked >>../asked
case "$REQUEST" in
*'"known":"1"'*) echo '{"event":"fetched","is_new":false,"version":"1","files":1,"bytes":4}'; exit;;
esac
echo fetched >>../asked
sleep 0.2
printf rows >data/file
echo '{"event":"fetched","is_new":true,"version":"1","files":1,"bytes":4}'"#;

fn asked(dir: &Path) -> String {
    fs::read_to_string(dir.join("data/asked")).unwrap_or_default().replace('\n', " ")
}

#[tokio::test]
async fn test_two_jobs_share_one_fetch_and_the_third_only_asks() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path(), ROWS);
    let (told, source) = (watch::Sender::new(None), source());
    let (first, second) = tokio::join!(cache.obtain(&source, &told), cache.obtain(&source, &told));
    let (first, second) = (first.unwrap(), second.unwrap());
    assert!(first.is_new != second.is_new, "one of them fetched");
    assert_eq!(asked(dir.path()), "asked fetched asked ");
    for (held, name) in [(&first, "one"), (&second, "two")] {
        held.place(&dir.path().join(name), None, false).await.unwrap();
        assert_eq!(fs::read_to_string(dir.path().join(name)).unwrap(), "rows");
    }
    let again = DataCache::open(cache.0.config.clone()).unwrap().obtain(&source, &told).await.unwrap();
    assert!(!again.is_new && again.size == (1, 4));
}

#[tokio::test]
async fn test_what_is_used_is_not_removed_and_what_is_not_is() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path(), ROWS);
    let held = cache.obtain(&source(), &watch::Sender::new(None)).await.unwrap();
    let listed = |cache: &DataCache| {
        let mut kept = cache.list().unwrap();
        kept.retain(|kept| kept.key.len() == 32);
        kept
    };
    let kept = listed(&cache).remove(0);
    assert!(kept.is_in_use && kept.bytes > 0 && kept.url == source().url);
    assert!(!cache.remove(&kept.key).await.unwrap());
    drop(held);
    assert!(!listed(&cache)[0].is_in_use);
    assert!(cache.remove(&kept.key).await.unwrap());
    assert!(listed(&cache).is_empty());
}

#[tokio::test]
async fn test_a_fetch_that_nobody_waits_for_ends_and_leaves_its_part() {
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path(), "printf ro >data/file; echo $$ >../pid; sleep 600");
    let (source, told) = (source(), watch::Sender::new(None));
    let pid = dir.path().join("data/pid");
    tokio::select! {
        _ = cache.obtain(&source, &told) => panic!("it sleeps"),
        () = async { while fs::read_to_string(&pid).unwrap_or_default().trim().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        } } => {}
    }
    let process = PathBuf::from("/proc").join(fs::read_to_string(&pid).unwrap().trim());
    while process.exists() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let part = entry::part_data(&cache.0.config.root, &key_of(&source));
    assert_eq!(fs::read_to_string(part.join("file")).unwrap(), "ro");
}

#[tokio::test]
async fn test_offline_only_what_is_there_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let online = cache(dir.path(), ROWS);
    let told = watch::Sender::new(None);
    let offline = DataCache::open(DataConfig { offline: true, ..online.0.config.clone() }).unwrap();
    assert!(matches!(offline.obtain(&source(), &told).await, Err(DataError::Refused(_))));
    drop(online.obtain(&source(), &told).await.unwrap());
    assert!(!offline.obtain(&source(), &told).await.unwrap().is_new);
    assert_eq!(asked(dir.path()), "asked fetched ", "nothing was asked");
}

#[tokio::test]
async fn test_failures_keep_their_kind_and_no_request_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    let failure = r#"{"event":"failed","kind":"denied","message":"no","lines":[],"hint":null}"#;
    let refused = cache(dir.path(), &format!("echo '{failure}'; exit 1"));
    let told = watch::Sender::new(None);
    assert!(matches!(refused.obtain(&source(), &told).await, Err(DataError::Denied(_))));
    let options = Options([("secret_access_key".to_owned(), "hidden".to_owned())].into());
    assert!(!format!("{options:?}").contains("hidden"));
}
