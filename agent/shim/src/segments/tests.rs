use std::time::{Duration, Instant};
use std::{fs, io};

use proptest::prelude::*;
use sha2::{Digest as _, Sha256};

use super::*;
use crate::LogPolicy;

fn policy(quota: u64, segment: u64) -> LogPolicy {
    LogPolicy { quota, segment, block: false }
}

fn reader(dir: &Path) -> Reader {
    Reader::open(dir, &dir.join("no such file")).unwrap()
}

fn all_from(dir: &Path, start: u64, end: u64) -> Vec<u8> {
    let mut bytes = vec![0; (end - start) as usize];
    assert_eq!(reader(dir).read_at(start, &mut bytes).unwrap(), bytes.len());
    bytes
}

fn hex_of(bytes: &[u8]) -> String {
    agent_model::ids::hex(&Sha256::digest(bytes))
}

/// Whether `stream` is `produced` in order, but for gap lines that report exactly what is missing at their place.
/// Returns the sums of what they report.
fn explained(stream: &[u8], produced: &[u8]) -> Option<(u64, u64)> {
    let same = stream.iter().zip(produced).take_while(|(one, other)| one == other).count();
    if same == stream.len() && same == produced.len() {
        return Some((0, 0));
    }
    // A line feed before a gap line may be the gap's own or the job's.
    (same.saturating_sub(1)..=same).rev().find_map(|at| {
        let line = stream[at..].strip_prefix(b"\n").filter(|_| at > 0 && stream[at - 1] != b'\n');
        let line = line.or_else(|| (at == 0 || stream[at - 1] == b'\n').then_some(&stream[at..]))?;
        let end = line.iter().position(|byte| *byte == b'\n')? + 1;
        let told = std::str::from_utf8(&line[..end]).ok()?.strip_prefix("[agentd: ")?;
        let words: Vec<&str> = told.split([' ', ',']).filter(|word| !word.is_empty()).collect();
        let (bytes, lines): (usize, u64) = (words[0].parse().ok()?, words[2].parse().ok()?);
        let missing = produced[at..].get(..bytes)?;
        if lines != missing.iter().filter(|byte| **byte == b'\n').count() as u64 {
            return None;
        }
        // The rest is checked as if it came after a line feed, as it does.
        let rest = explained_after_feed(&line[end..], &produced[at + bytes..])?;
        Some((rest.0 + bytes as u64, rest.1 + lines))
    })
}

fn explained_after_feed(stream: &[u8], produced: &[u8]) -> Option<(u64, u64)> {
    explained(&[b"\n", stream].concat(), &[b"\n", produced].concat())
}

#[test]
fn test_stream_is_cut_into_segments_named_by_their_first_byte() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), policy(1 << 20, 4096)).unwrap();
    let bytes: Vec<u8> = (0..10_000u32).map(|i| i as u8).collect();
    for piece in bytes.chunks(777) {
        assert_eq!(writer.append(piece, Instant::now()), piece.len());
    }
    assert_eq!(starts(dir.path()).unwrap(), [0, 4096, 8192]);
    assert_eq!((all_from(dir.path(), 0, 10_000), writer.sha256()), (bytes.clone(), hex_of(&bytes)));
    let mut reader = reader(dir.path());
    assert_eq!((reader.start(), reader.len().unwrap()), (0, 10_000));
    let mut some = [0; 10];
    assert_eq!(reader.read_at(9_995, &mut some).unwrap(), 5);
    assert_eq!(&some[..5], &bytes[9_995..]);
    writer.finish();
    writer.sync();
    assert_eq!((writer.error(), writer.gaps().count), (None, 0));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3, "the reserve is gone");
}

#[test]
fn test_trimming_keeps_what_is_above_and_the_last_segment() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), policy(1 << 20, 4096)).unwrap();
    writer.append(&[b'x'; 12_288], Instant::now());
    let mut reader = reader(dir.path());
    assert_eq!(reader.trim_below(4095).unwrap(), 0);
    assert_eq!(reader.trim_below(4096).unwrap(), 1);
    assert_eq!(
        (reader.read_at(0, &mut [0]).unwrap(), reader.missing()),
        (1, 4096),
        "it is not there any more"
    );
    assert_eq!(reader.trim_below(u64::MAX).unwrap(), 1, "the last one stays");
    assert_eq!((reader.start(), reader.len().unwrap()), (8192, 12_288));
    writer.append(b"more", Instant::now());
    let mut more = [0; 9];
    assert_eq!(reader.read_at(12_288, &mut more).unwrap(), 4, "a reader follows a writer");
    assert_eq!(&more[..4], b"more");
}

#[test]
fn test_quota_drops_counts_and_says_so_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), policy(16_384, 4096)).unwrap();
    let line = "0123456789abcde\n";
    for _ in 0..2_000 {
        writer.append(line.as_bytes(), Instant::now());
    }
    assert_eq!(writer.len(), 16_384);
    let missing = 2_000 * 16 - 16_384;
    assert_eq!((writer.gaps().bytes, writer.gaps().lines), (missing, missing / 16));
    reader(dir.path()).trim_below(4096).unwrap();
    writer.append(b"after\n", Instant::now());
    let told = format!(
        "[agentd: {missing} bytes, {} lines of output were dropped here: its quota of 16 KiB was full]\nafter\n",
        missing / 16
    );
    assert_eq!(String::from_utf8(all_from(dir.path(), 16_384, writer.len())).unwrap(), told);
    let gaps = writer.gaps();
    assert_eq!((gaps.count, gaps.bytes), (1, missing));
}

#[test]
fn test_job_that_asked_to_wait_is_not_cut() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), LogPolicy { block: true, ..policy(16_384, 4096) }).unwrap();
    assert_eq!(writer.append(&[b'x'; 20_000], Instant::now()), 16_384);
    assert!(writer.must_wait());
    assert_eq!(writer.append(b"x", Instant::now()), 0);
    reader(dir.path()).trim_below(8192).unwrap();
    assert!(!writer.must_wait());
    assert_eq!(writer.append(&[b'x'; 3_616], Instant::now()), 3_616);
    assert_eq!((writer.len(), writer.gaps().count, writer.error()), (20_000, 0, None));
}

#[test]
fn test_what_a_shim_left_that_never_started_its_job_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    Writer::open(dir.path(), policy(1 << 20, 4096)).unwrap().append(b"early", Instant::now());
    let mut writer = Writer::open(dir.path(), policy(1 << 20, 4096)).unwrap();
    writer.append(b" late", Instant::now());
    assert_eq!((writer.len(), writer.sha256()), (10, hex_of(b"early late")));
    assert_eq!(all_from(dir.path(), 0, 10), b"early late");
}

#[test]
fn test_file_that_fails_is_given_up_and_the_gap_told_in_another() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), policy(1 << 20, 4096)).unwrap();
    let now = Instant::now();
    writer.append(b"one\n", now);
    // A full disk is simulated by a directory that is not there: no segment can be begun.
    writer.append(&[b'x'; 4092], now);
    let gone = dir.path().with_extension("gone");
    fs::rename(dir.path(), &gone).unwrap();
    writer.append(b"two\nthree\n", now);
    assert_eq!((writer.gaps().bytes, writer.gaps().lines), (10, 2));
    fs::rename(&gone, dir.path()).unwrap();
    writer.append(b"four\n", now + Duration::from_millis(1));
    assert_eq!(writer.gaps().bytes, 15, "the disk is not tried again at once");
    writer.append(b"five\n", now + Duration::from_secs(60));
    writer.finish();
    let stream = all_from(dir.path(), 0, writer.len());
    assert_eq!(writer.sha256(), hex_of(&stream));
    assert_eq!(
        explained(&stream, &[b"one\n", &[b'x'; 4092][..], b"two\nthree\nfour\nfive\n"].concat()),
        Some((15, 3))
    );
    assert!(writer.error().is_some());
}

/// Removed or short, first, in the middle or in several: each byte that is there keeps its offset.
#[test]
fn test_what_is_gone_is_served_as_blanks_and_counted() {
    let whole: Vec<u8> = (0..20_000u32).map(|place| b'a' + (place % 23) as u8).collect();
    for (harmed, cut) in
        [(vec![0u64], 0u64), (vec![4096], 0), (vec![4096, 8192], 0), (vec![8192], 100), (vec![4096], 4050)]
    {
        let dir = tempfile::tempdir().unwrap();
        drop(
            Writer::open(dir.path(), policy(1 << 20, 4096)).map(|mut log| log.append(&whole, Instant::now())),
        );
        for start in &harmed {
            match cut {
                0 => fs::remove_file(path_of(dir.path(), *start)).unwrap(),
                cut => fs::File::options()
                    .write(true)
                    .open(path_of(dir.path(), *start))
                    .unwrap()
                    .set_len(cut)
                    .unwrap(),
            }
        }
        let gone = |at: u64| harmed.iter().any(|start| (start + cut..start + 4096).contains(&at));
        for part in [20_000, 1000, 77] {
            let mut reader = reader(dir.path());
            assert_eq!(reader.len().unwrap(), 20_000);
            let mut bytes = vec![0; 20_000];
            let mut at = 0;
            while at < bytes.len() {
                let to = (at + part).min(bytes.len());
                at += reader.read_at(at as u64, &mut bytes[at..to]).unwrap();
            }
            assert_eq!(reader.read_at(20_000, &mut [0]).unwrap(), 0);
            let missing = (0..20_000u64).filter(|at| gone(*at)).count();
            assert_eq!(reader.missing(), missing as u64, "{harmed:?} {cut} {part}");
            let differ = (0..20_000).filter(|at| !gone(*at as u64) && bytes[*at] != whole[*at]).count();
            assert_eq!(differ, 0, "{harmed:?} {cut} {part}");
            let text = String::from_utf8(bytes).unwrap();
            assert_eq!(text.matches("output is missing here").count(), usize::from(missing > 200), "{text}");
        }
    }
}

#[test]
fn test_a_segment_that_is_removed_while_it_is_written_is_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let mut writer = Writer::open(&log, policy(1 << 20, 4096)).unwrap();
    writer.append(&[b'x'; 5000], Instant::now());
    let mut reader = reader(&log);
    assert_eq!(reader.read_at(4900, &mut [0; 100]).unwrap(), 100);
    fs::remove_file(path_of(&log, 4096)).unwrap();
    writer.append(&[b'y'; 10], Instant::now());
    let mut bytes = vec![0; 6000];
    assert_eq!(reader.read_at(0, &mut bytes).unwrap(), 5010);
    assert!(bytes.starts_with(&[b'x'; 5000]) && bytes[5000..5010] == [b'y'; 10]);
    fs::remove_dir_all(&log).unwrap();
    writer.keep_name().unwrap();
    writer.finish();
    writer.sync();
    assert_eq!((reader.len().unwrap(), writer.error()), (5010, None));
    assert_eq!(reader.read_at(0, &mut bytes).unwrap(), 5010);
    assert_eq!(reader.missing(), 4096, "the one before it is not open any more");
}

proptest! {
    /// Whatever is written and trimmed, under any quota: each byte is in the stream in order or in a counted gap,
    /// and hash and length are those of the stream.
    #[test]
    fn test_every_byte_is_in_order_or_counted(
        quota in 4096u64..40_000,
        segment in 1u64..10_000,
        steps in prop::collection::vec((0usize..9_000, prop::option::of(0u64..60_000)), 1..60),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::open(dir.path(), policy(quota, segment)).unwrap();
        let (mut produced, mut number) = (Vec::new(), 0u32);
        let mut kept = Vec::new(); // what a controller would have
        for (size, ack) in steps {
            let from = produced.len();
            while produced.len() < from + size {
                produced.extend_from_slice(format!("line {number}\n").as_bytes());
                number += 1;
            }
            prop_assert_eq!(writer.append(&produced[from..], Instant::now()), produced.len() - from);
            let oldest = starts(dir.path()).unwrap()[0];
            prop_assert!(writer.len() - oldest <= quota.max(8192) + 200, "the quota holds");
            if let Some(ack) = ack {
                let (have, end) = (kept.len() as u64, ack.min(writer.len()));
                if end > have {
                    kept.extend(all_from(dir.path(), have, end));
                }
                reader(dir.path()).trim_below(kept.len() as u64).unwrap();
            }
        }
        writer.finish();
        kept.extend(all_from(dir.path(), kept.len() as u64, writer.len()));
        prop_assert_eq!(writer.sha256(), hex_of(&kept));
        let gaps = writer.gaps();
        prop_assert_eq!(explained(&kept, &produced), Some((gaps.bytes, gaps.lines)));
    }
}

#[test]
fn test_what_a_job_put_in_the_place_of_a_file_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("file"), "x").unwrap();
    std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
    fs::create_dir(at("directory")).unwrap();
    nix::unistd::mkfifo(&at("pipe"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    agent_fs::open_plain(&at("file")).unwrap();
    for name in ["link", "directory", "pipe", "socket", "nothing"] {
        assert_eq!(agent_fs::open_plain(&at(name)).unwrap_err().kind(), io::ErrorKind::NotFound, "{name}");
    }
}

/// Runs `test` of this file alone, in a process in which `plan` makes writing fail.
fn with_failures(plan: &str, test: &str) {
    #[allow(clippy::disallowed_methods, reason = "a plan of failures is that of a process")]
    let mut this = std::process::Command::new(std::env::current_exe().unwrap());
    this.args(["--ignored", "--exact", &format!("segments::tests::{test}")]);
    let output = this.env(agent_model::failpoint::VARIABLE, plan).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{plan}: {said}");
}

#[test]
fn test_every_failure_of_the_disk_is_counted_wherever_it_strikes() {
    for errno in [28, 122, 5, 30] {
        // Full, over quota, broken, read-only: at any one write, or from one on.
        for visit in [1, 2, 3, 7] {
            with_failures(&format!("shim.log.write=errno:{errno}={visit}"), "some_output");
        }
        with_failures(&format!("shim.log.write=errno:{errno}@3"), "some_output");
        with_failures(&format!("shim.log.open=errno:{errno}@2"), "some_output");
        with_failures(
            &format!("shim.log.write=errno:{errno}@3,shim.log.reserve=errno:{errno}"),
            "silent_end",
        );
    }
    with_failures("shim.log.sync=errno:5=1", "failing_sync");
}

/// Writes for a while, with pauses long enough for the disk to be tried again; returns what was produced.
fn produce(writer: &mut Writer) -> Vec<u8> {
    let mut now = Instant::now();
    let mut produced = Vec::new();
    for number in 0..40 {
        let piece = format!("line {number} {}\n", "x".repeat(number * 7));
        produced.extend_from_slice(piece.as_bytes());
        assert_eq!(writer.append(piece.as_bytes(), now), piece.len());
        now += Duration::from_millis(300);
    }
    writer.finish();
    produced
}

#[test]
#[ignore = "run by the test above, with a plan of failures"]
fn some_output() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), policy(1 << 20, 4096)).unwrap();
    let produced = produce(&mut writer);
    let stream = all_from(dir.path(), 0, writer.len());
    let gaps = writer.gaps();
    assert_eq!(explained(&stream, &produced), Some((gaps.bytes, gaps.lines)));
    assert!(gaps.count > 0 && gaps.bytes > 0 && writer.error().is_some());
    assert_eq!(writer.sha256(), hex_of(&stream));
}

#[test]
#[ignore = "run by the test above, with a plan of failures"]
fn silent_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), policy(1 << 20, 4096)).unwrap();
    let produced = produce(&mut writer);
    // Not even the reserve could be used: then only the record shows what is missing.
    let stream = all_from(dir.path(), 0, writer.len());
    assert!(produced.starts_with(&stream));
    assert_eq!(writer.gaps().bytes, (produced.len() - stream.len()) as u64);
    assert_eq!(writer.sha256(), hex_of(&stream));
}

#[test]
#[ignore = "run by the test above, with a plan of failures"]
fn failing_sync() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::open(dir.path(), policy(1 << 20, 4096)).unwrap();
    writer.append(b"line\n", Instant::now());
    writer.finish();
    writer.sync();
    let error = writer.error().unwrap().to_owned();
    writer.sync();
    assert_eq!(writer.error(), Some(error.as_str()), "a later one that succeeds takes nothing back");
}

#[test]
fn test_full_file_system_ends_with_an_honest_log() {
    use nix::mount::{MsFlags, mount, umount};
    let dir = tempfile::tempdir().unwrap();
    if mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some("size=256k")).is_err() {
        println!("skipped: mounting needs root");
        return;
    }
    let log = dir.path().join("job");
    let mut writer = Writer::open(&log, policy(1 << 30, 64 << 10)).unwrap();
    let mut now = Instant::now();
    let (mut produced, mut freed) = (Vec::new(), false);
    let filler = dir.path().join("filler");
    fs::write(&filler, vec![0; 64 << 10]).unwrap();
    for number in 0..100_000 {
        let line = format!("line {number}\n");
        produced.extend_from_slice(line.as_bytes());
        writer.append(line.as_bytes(), now);
        now += Duration::from_millis(1);
        if writer.gaps().bytes > 10_000 && !freed {
            fs::remove_file(&filler).unwrap();
            freed = true;
        }
    }
    writer.finish();
    writer.sync();
    let stream = all_from(&log, 0, writer.len());
    let gaps = writer.gaps();
    assert_eq!(explained(&stream, &produced), Some((gaps.bytes, gaps.lines)));
    assert_eq!(writer.sha256(), hex_of(&stream));
    assert!(gaps.count >= 1 && stream.ends_with(b"]\n"), "the end says what is missing");
    drop(writer);
    umount(dir.path()).unwrap();
}
