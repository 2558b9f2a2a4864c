use std::fs;

use super::*;

fn bench() -> (tempfile::TempDir, JobDir) {
    let temp = tempfile::tempdir().unwrap();
    let dir = JobDir::new(temp.path().join("j.1.0"));
    dir.create().unwrap();
    (temp, dir)
}

fn stream(dir: &JobDir) -> String {
    let mut reader = Reader::of_tracking(dir).unwrap();
    let mut bytes = vec![0; usize::try_from(reader.len().unwrap()).unwrap()];
    reader.read_at(0, &mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn test_stream_says_where_the_file_was_replaced_and_ends_with_a_whole_line() {
    let (_temp, dir) = bench();
    fs::write(dir.tracking(), "{\"metric\":\"m\",\"value\":1}").unwrap();
    let mut intake = Intake::open(&dir, LogPolicy::default()).unwrap();
    intake.take(Instant::now());
    fs::remove_file(dir.tracking()).unwrap();
    fs::write(dir.tracking(), "{\"metric\":\"m\",\"value\":2.5}").unwrap();
    intake.take(Instant::now());
    intake.finish();
    let stream = stream(&dir);
    let lines: Vec<_> =
        stream.split('\n').map(|line| TrackingLine::parse(line.as_bytes()).map(|line| line.record)).collect();
    assert!(
        matches!(
            &lines[..],
            [
                Some(TrackingRecord::Metric { .. }),
                Some(TrackingRecord::Note { .. }),
                Some(TrackingRecord::Metric { .. }),
                None
            ]
        ),
        "{stream}"
    );
    assert_eq!((intake.bytes(), intake.error()), (stream.len() as u64, None));
}

#[test]
fn test_another_intake_goes_on_where_the_first_was_lost() {
    let (_temp, dir) = bench();
    fs::write(dir.tracking(), "a\n").unwrap();
    Intake::open(&dir, LogPolicy::default()).unwrap().take(Instant::now());
    fs::write(dir.tracking(), "a\nb\n").unwrap();
    for _ in 0..2 {
        Intake::open(&dir, LogPolicy::default()).unwrap().take_rest();
        assert_eq!(stream(&dir), "a\nb\n");
    }
}

#[test]
fn test_no_more_than_the_quota_is_kept_and_the_stream_says_what_is_missing() {
    let (_temp, dir) = bench();
    let line = "{\"metric\":\"m\",\"value\":1}\n";
    fs::write(dir.tracking(), line.repeat(10_000)).unwrap();
    let mut intake = Intake::open(&dir, LogPolicy { quota: 64 << 10, ..LogPolicy::default() }).unwrap();
    intake.finish();
    let stream = stream(&dir);
    assert!(stream.len() < 24 << 10, "{}", stream.len());
    let last = TrackingLine::parse(stream.lines().last().unwrap().as_bytes()).map(|line| line.record);
    assert!(
        matches!(&last, Some(TrackingRecord::Note { note }) if note.contains("quota of 16 KiB")),
        "{last:?}"
    );
    assert!(intake.error().unwrap().contains("quota of 16 KiB"), "{:?}", intake.error());
}
