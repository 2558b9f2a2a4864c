//! A store on a machine that is short of descriptors: blobs that cannot be read now are not lost, and blobs that an
//! earlier release gave up for such a reason are taken back.

use std::process::Stdio;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;

const HOME: &str = "AGENT_CAS_TEST_SCARCE";

/// Lets this process open nothing more than it has open, while `work` runs.
async fn without_descriptors<T>(work: impl Future<Output = T>) -> T {
    let usual = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..usual }).unwrap();
    let done = work.await;
    setrlimit(Resource::Nofile, usual).unwrap();
    done
}

fn is_short<T>(read: &Result<T, ReadError>) -> bool {
    let short = |source: &io::Error| source.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error());
    matches!(read, Err(error @ ReadError::Disk { source, .. }) if short(source) && error.is_away())
}

#[tokio::test]
#[ignore = "started by the test below, in a process whose limits are its own"]
#[allow(clippy::disallowed_methods, reason = "the other half of a test")]
async fn test_process_that_is_short() {
    let Ok(home) = std::env::var(HOME) else { return };
    let home = Path::new(&home);
    let kept = blobs(1, &[10, 2000, 3000, LARGE, LARGE, 2_000_000]);
    let disk = Disk::open_with(home, 0, 10_000).unwrap();
    keep(&disk, &kept).await;
    let checked = without_descriptors(async {
        assert!(disk.read_batch(digests(&kept)).await.iter().all(is_short));
        for (digest, _) in &kept {
            assert!(is_short(&disk.read(*digest, 0).await.map(drop)), "{digest}");
            disk.quarantine(*digest).await;
        }
        disk.compact().await;
        disk.check(|_| {}).await
    });
    let checked = checked.await;
    assert_eq!((checked.unread, checked.damaged, disk.damaged()), (6, 0, 0), "{checked:?}");
    holds_all(&disk, &kept).await;
    drop(disk);
    without_descriptors(async { assert!(Disk::open(home).is_err(), "it opened without what is in it") })
        .await;
    holds_all(&Disk::open(home).unwrap(), &kept).await;
}

#[tokio::test]
#[allow(clippy::disallowed_methods, reason = "the process under test is this one")]
async fn test_what_cannot_be_read_for_want_of_descriptors_stays() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--ignored", "store::disk::tests::scarce::test_process_that_is_short"]);
    let output = command.env(HOME, dir.path()).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[tokio::test]
async fn test_check_takes_back_what_was_given_up_and_is_right() {
    let (dir, disk) = open();
    let kept = blobs(1, &[1000, 2000, LARGE, LARGE]);
    keep(&disk, &kept).await;
    // As an earlier release did when it could not open a file: out of the index, and out of the note of a segment.
    for (digest, _) in [&kept[0], &kept[2]] {
        let place = disk.shared.index.lock().find(digest).unwrap();
        disk.shared.index.lock().remove(digest, place);
    }
    drop(disk);
    let store = dir.path().join("store");
    let quarantined = format!("quarantine/{}-{}.7", kept[3].0.hex(), kept[3].0.size);
    std::fs::rename(store.join(blob_name(&kept[3].0)), store.join(quarantined)).unwrap();
    let disk = Disk::open(&store).unwrap();
    assert_eq!(disk.missing(&digests(&kept)).await.unwrap(), [kept[0].0, kept[3].0]);
    let checked = disk.check(|_| {}).await;
    assert_eq!((checked.found, checked.blobs, checked.damaged), (2, 4, 0), "{checked:?}");
    holds_all(&disk, &kept).await;
    drop(disk);
    holds_all(&Disk::open(&store).unwrap(), &kept).await;
}
