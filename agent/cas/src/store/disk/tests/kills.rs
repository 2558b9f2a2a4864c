//! Processes of a store that are killed in the middle of a step, or in which a step fails: the next one has all that
//! was acknowledged, and nothing else is wrong.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use super::*;

const LIFE: &str = "AGENT_CAS_TEST_LIFE";

/// The size of segments in these processes.
const TINY: u64 = 40_000;

/// The batches that a process writes one after the other: half of the blobs are small.
fn batch(life: u64, number: u64) -> Vec<(Digest, Bytes)> {
    blobs(life * 100 + number, &[4000, 5000, 6000, 7000, 132_000, 133_000])
}

/// Another process in `dir`, with these failures planned for it. Its output is in `said`.
#[allow(clippy::disallowed_methods, reason = "the process under test is this one")]
fn life(dir: &Path, number: u64, failures: &str) -> std::process::ExitStatus {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--ignored", "store::disk::tests::kills::test_life_that_others_kill"]);
    command.env(LIFE, format!("{}|{number}", dir.display()));
    command.env(agent_model::failpoint::VARIABLE, failures);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap()
}

#[tokio::test]
#[ignore = "started by the tests below, which kill it"]
#[allow(clippy::disallowed_methods, reason = "the other half of a test")]
async fn test_life_that_others_kill() {
    let Ok(told) = std::env::var(LIFE) else { return };
    let (dir, life) = told.split_once('|').unwrap();
    let (dir, life) = (Path::new(dir), life.parse::<u64>().unwrap());
    let mut said = File::options().append(true).create(true).open(dir.join("said")).unwrap();
    let disk = Disk::open_with(&dir.join("store"), 0, TINY).unwrap();
    for number in 0..6 {
        for ((digest, _), result) in
            batch(life, number).iter().zip(disk.write_batch(batch(life, number)).await)
        {
            match result {
                Ok(()) => writeln!(said, "kept {digest}").unwrap(),
                Err(error) => writeln!(said, "refused {digest} {error:?}").unwrap(),
            }
        }
        if number % 2 == 1 {
            // Of every second batch one blob is kept, so that segments are copied forward.
            let going: HashSet<Digest> = digests(&batch(life, number - 1)[1..]).into_iter().collect();
            going.iter().for_each(|digest| writeln!(said, "evicted {digest}").unwrap());
            let told = disk.listing().await;
            evict(&disk, told.into_iter().filter(|kept| going.contains(&kept.digest)).collect()).await;
        }
    }
    drop(disk);
    writeln!(said, "closed").unwrap();
}

/// The output of all processes: blobs that are kept, and how many were refused.
fn said(dir: &Path) -> (HashSet<Digest>, usize) {
    let (mut kept, mut refused) = (HashSet::new(), 0);
    for line in fs::read_to_string(dir.join("said")).unwrap_or_default().lines() {
        let mut words = line.split(' ');
        let (word, digest) = (words.next().unwrap(), words.next().and_then(|digest| digest.parse().ok()));
        match (word, digest) {
            ("kept", Some(digest)) => _ = kept.insert(digest),
            ("evicted", Some(digest)) => _ = kept.remove(&digest),
            ("refused", _) => refused += 1,
            _ => {}
        }
    }
    (kept, refused)
}

/// All that was acknowledged is there, all other blobs match their digests, and the store still works.
async fn is_whole(dir: &Path, when: &str) {
    let disk = Disk::open_with(&dir.join("store"), 0, TINY).unwrap();
    let (kept, _) = said(dir);
    let kept: Vec<Digest> = kept.into_iter().collect();
    assert_eq!(disk.missing(&kept).await.unwrap(), [], "{when}: acknowledged and gone");
    for read in disk.read_batch(kept).await {
        read.unwrap();
    }
    assert_eq!(disk.check(|_| {}).await.damaged, 0, "{when}");
    assert_eq!(temp_files(&disk), 0, "{when}");
    let more = batch(99, 0);
    keep(&disk, &more).await;
    holds_all(&disk, &more).await;
    let told = disk.listing().await;
    let more = digests(&more);
    evict(&disk, told.into_iter().filter(|kept| more.contains(&kept.digest)).collect()).await;
}

/// Every step, and how often a process visits it.
const STEPS: &[(&str, u64)] = &[
    ("cas.blob.create", 12),
    ("cas.blob.write", 12),
    ("cas.blob.sync", 12),
    ("cas.blob.rename", 12),
    ("cas.blob.evict", 6),
    ("cas.directory.sync", 12),
    ("cas.segment.append", 6),
    ("cas.segment.copy", 1),
    ("cas.segment.create", 3),
    ("cas.segment.cut", 1),
    ("cas.segment.note", 3),
    ("cas.segment.sync", 6),
    ("cas.segment.unlink", 1),
    ("cas.uses.write", 1),
];

#[tokio::test]
async fn test_killed_at_any_step_the_next_life_has_what_was_acknowledged() {
    for (step, times) in STEPS {
        let dir = tempfile::tempdir().unwrap();
        // One process that ends well, so that there is something to begin with.
        assert!(life(dir.path(), 1, "").success());
        for visit in [times.div_ceil(3), *times] {
            let ended = life(dir.path(), 2 + visit, &format!("{step}=kill@{visit}"));
            assert!(!ended.success(), "it never came by visit {visit} of {step}");
            is_whole(dir.path(), &format!("killed at visit {visit} of {step}")).await;
        }
    }
}

#[tokio::test]
async fn test_error_at_any_step_is_told_and_leaves_no_wrong_blob() {
    // Steps whose failure a write reports.
    let told = ["cas.blob.create", "cas.blob.write", "cas.blob.sync", "cas.blob.rename"];
    let told =
        [&told[..], &["cas.directory.sync", "cas.segment.append", "cas.segment.create", "cas.segment.sync"]]
            .concat();
    // A full disk, and a broken one.
    for error in [28, 5] {
        for (step, _) in STEPS.iter().filter(|(step, _)| error == 28 || told.contains(step)) {
            let dir = tempfile::tempdir().unwrap();
            assert!(life(dir.path(), 1, "").success());
            life(dir.path(), 2, &format!("{step}=errno:{error}=1"));
            is_whole(dir.path(), &format!("error {error} at {step}")).await;
            let (_, refused) = said(dir.path());
            assert_eq!(refused > 0, told.contains(step), "{error} at {step}: {refused} were refused");
        }
    }
}
