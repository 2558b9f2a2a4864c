use agent_model::Stream;

use super::*;
use agent_cas::digest_of;
use proptest::prelude::*;

const LOG: Channel = Channel::Log(Stream::Job);

async fn log_file(archive: &Archive) -> Arc<LogFile> {
    archive.log_file(&"a.1.0".parse().unwrap(), LOG).await.unwrap()
}

/// Appends, and tells followers.
fn append(log_file: &LogFile, offset: u64, data: &[u8]) -> Result<(), ArchiveError> {
    let appended = log_file.append(offset, &Bytes::copy_from_slice(data));
    log_file.tell();
    appended
}

#[tokio::test]
async fn test_bytes_are_there_after_reopen() {
    let dir = tempfile::tempdir().unwrap();
    let first = log_file(&Archive::new(dir.path(), u64::MAX)).await;
    append(&first, 0, b"one").unwrap();
    append(&first, 3, b"two").unwrap();
    assert_eq!(first.sync().unwrap(), 6);
    let second = log_file(&Archive::new(dir.path(), u64::MAX)).await;
    assert_eq!((second.len(), second.sync().unwrap()), (6, 6));
    assert_eq!(second.read(2, 100).unwrap(), b"etwo");
    assert_eq!(second.read(6, 100).unwrap(), b"");
    assert_eq!(std::fs::read(dir.path().join("a/1.0.job")).unwrap(), b"onetwo");
}

#[tokio::test]
async fn test_a_log_file_is_shared_while_held_and_dropped_after() {
    let dir = tempfile::tempdir().unwrap();
    let archive = Archive::new(dir.path(), u64::MAX);
    let held = log_file(&archive).await;
    assert!(Arc::ptr_eq(&held, &log_file(&archive).await));
    drop(held);
    for i in 0..100 {
        archive.log_file(&format!("j{i}.1.0").parse().unwrap(), LOG).await.unwrap();
    }
    assert!(archive.log_files.lock().len() <= 2, "idle log_files are dropped");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "reading makes no file");
}

#[tokio::test]
async fn test_file_that_is_removed_while_it_is_written_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let archive = Archive::new(dir.path(), u64::MAX);
    let log_file = log_file(&archive).await;
    append(&log_file, 0, b"one").unwrap();
    assert_eq!(log_file.sync().unwrap(), 3);
    std::fs::remove_dir_all(dir.path().join("a")).unwrap();
    assert_eq!(log_file.sync().unwrap(), 3, "what is safe has a name");
    assert_eq!(std::fs::read(dir.path().join("a/1.0.job")).unwrap(), b"one");
    std::fs::remove_file(dir.path().join("a/1.0.job")).unwrap();
    append(&log_file, 3, b"two").unwrap();
    assert_eq!(log_file.conclude(digest_of(b"onetwo")).unwrap(), digest_of(b"onetwo"));
    assert_eq!(std::fs::read(dir.path().join("a/1.0.job")).unwrap(), b"onetwo");
}

#[tokio::test]
async fn test_concluded_log_file_takes_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let log_file = log_file(&Archive::new(dir.path(), u64::MAX)).await;
    append(&log_file, 0, b"wrong").unwrap();
    let right = digest_of(b"right");
    assert_eq!(log_file.conclude(right).unwrap(), digest_of(b"wrong"));
    assert_eq!(log_file.len(), 0);
    append(&log_file, 0, b"right").unwrap();
    assert_eq!(log_file.conclude(right).unwrap(), right);
    append(&log_file, 5, b" and more").unwrap();
    assert_eq!(log_file.read(0, 99).unwrap(), b"right");
}

#[tokio::test]
async fn test_log_that_is_short_is_kept_and_one_that_is_wrong_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    let log_file = log_file(&Archive::new(dir.path(), u64::MAX)).await;
    append(&log_file, 0, b"beginning").unwrap();
    log_file.conclude(digest_of(b"beginning and end")).unwrap();
    assert_eq!(log_file.len(), 9, "what is there may not be there to be sent again");
    append(&log_file, 9, b" and more than that").unwrap();
    log_file.conclude(digest_of(b"beginning and end")).unwrap();
    assert_eq!(log_file.len(), 0);
    // The node cannot send it again.
    log_file.settle_for_what_there_is().unwrap();
    assert_eq!(log_file.read(0, 99).unwrap(), b"beginning and more than that");
}

/// Runs `test` of this file alone, in a process in which `plan` makes file access fail.
fn with_failures(plan: &str, test: &str) {
    #[allow(clippy::disallowed_methods, reason = "a plan of failures is that of a process")]
    let mut this = std::process::Command::new(std::env::current_exe().unwrap());
    this.args(["--ignored", "--exact", &format!("archive::tests::{test}")]);
    let output = this.env(agent_model::failpoint::VARIABLE, plan).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{plan}: {said}");
}

#[test]
fn test_failed_forced_write_is_never_acknowledged() {
    with_failures("control.archive.sync=errno:5=4", "failing_sync_after_one_that_succeeded");
    with_failures("control.archive.sync=errno:5=1", "failing_first_sync");
    with_failures("control.archive.write=errno:28=2", "full_disk");
}

#[tokio::test]
#[ignore = "run by the test above, with a plan of failures"]
async fn failing_sync_after_one_that_succeeded() {
    let dir = tempfile::tempdir().unwrap();
    let log_file = log_file(&Archive::new(dir.path(), u64::MAX)).await;
    append(&log_file, 0, b"safe").unwrap();
    assert_eq!(log_file.sync().unwrap(), 4); // the file and two directories
    append(&log_file, 4, b" doubtful").unwrap();
    log_file.sync().unwrap_err();
    // The next forced write would succeed, and would not report what was dropped.
    assert_eq!((log_file.sync().unwrap(), log_file.len()), (4, 4));
    append(&log_file, 13, b"gap").unwrap();
    append(&log_file, 4, b" doubtful").unwrap();
    assert_eq!(log_file.sync().unwrap(), 13);
    assert_eq!(log_file.read(0, 99).unwrap(), b"safe doubtful");
}

#[tokio::test]
#[ignore = "run by the test above, with a plan of failures"]
async fn failing_first_sync() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("a")).unwrap();
    std::fs::write(dir.path().join("a/1.0.job"), "of a daemon before").unwrap();
    let before = std::fs::metadata(dir.path().join("a/1.0.job")).unwrap();
    let log_file = log_file(&Archive::new(dir.path(), u64::MAX)).await;
    log_file.sync().unwrap_err();
    assert_eq!(log_file.sync().unwrap(), 18);
    use std::os::unix::fs::MetadataExt as _;
    let after = std::fs::metadata(dir.path().join("a/1.0.job")).unwrap();
    assert_ne!(before.ino(), after.ino(), "it was written anew");
    append(&log_file, 18, b"!").unwrap();
    assert_eq!(
        (log_file.sync().unwrap(), log_file.read(0, 99).unwrap()),
        (19, b"of a daemon before!".to_vec())
    );
}

#[tokio::test]
#[ignore = "run by the test above, with a plan of failures"]
async fn full_disk() {
    let dir = tempfile::tempdir().unwrap();
    let log_file = log_file(&Archive::new(dir.path(), u64::MAX)).await;
    append(&log_file, 0, b"one").unwrap();
    assert!(append(&log_file, 3, b"two").unwrap_err().is_full());
    assert_eq!(log_file.sync().unwrap(), 3);
    append(&log_file, 3, b"two").unwrap();
    assert_eq!((log_file.sync().unwrap(), log_file.read(0, 99).unwrap()), (6, b"onetwo".to_vec()));
}

#[tokio::test]
async fn test_write_that_fails_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a"), "a file where the job's directory should be").unwrap();
    let error =
        Archive::new(dir.path(), u64::MAX).log_file(&"a.1.0".parse().unwrap(), LOG).await.unwrap_err();
    assert!(error.to_string().contains("a/1.0.job"), "{error}");
}

proptest! {
    /// Whatever a node sends, repeats and skips: the log file is always a prefix of the log.
    #[test]
    fn test_appends_in_any_order_give_a_prefix(
        appends in prop::collection::vec((0u64..60, 0usize..40), 1..40),
        lines in 1u64..5,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let log_file = Arc::new(LogFile::open(dir.path().join("j/1.0.job"), u64::MAX).unwrap());
        let log: Vec<u8> = (0..100u8).map(|i| if i % 7 == 6 { b'\n' } else { i }).collect();
        let mut length = 0;
        for (offset, size) in appends {
            let from = offset as usize;
            append(&log_file, offset, &log[from..from + size]).unwrap();
            if offset <= length {
                length = length.max(offset + size as u64);
            }
            prop_assert_eq!(log_file.len(), length);
        }
        prop_assert_eq!(log_file.read(0, 1000).unwrap(), &log[..length as usize]);
        let start = log_file.tail(lines).unwrap() as usize;
        let tail = &log[start..length as usize];
        let count = tail.split_inclusive(|byte| *byte == b'\n').count() as u64;
        prop_assert!(count == lines || (start == 0 && count < lines));
        prop_assert!(start == 0 || log[start - 1] == b'\n');
    }
}

#[tokio::test]
async fn test_no_more_than_the_quota_of_its_channel_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let archive = Archive::new(dir.path(), 16);
    for (channel, quota) in [(LOG, 16), (Channel::Tracking, 4)] {
        let log_file = archive.log_file(&"a.1.0".parse().unwrap(), channel).await.unwrap();
        for offset in [0, 3, 10, 16] {
            append(&log_file, offset, b"0123456789").unwrap();
            assert!(log_file.len() <= quota, "{}", log_file.len());
        }
        assert_eq!((log_file.len(), log_file.sync().unwrap()), (quota, quota), "{channel}");
    }
}
