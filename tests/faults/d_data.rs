//! Group D, files: what a job is given is what was meant for it, whole.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use agent_tests::chance::Chance;
use agent_tests::fleet::{Fleet, Setup};

use crate::faults::look::{command, files_below};
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this group.
pub(crate) const ROWS: &[Row] =
    &[Row { id: "D1", promise: "no job runs on bytes that are not those that were sent", run: bad_blobs }];

/// A project of small files and one large one, with a job that checks all of them.
struct Project {
    dir: PathBuf,
}

impl Project {
    /// Files of which none was ever stored before.
    fn new(home: &Path, number: usize, chance: &mut Chance) -> Project {
        let dir = home.join(format!("project-{number}"));
        fs::create_dir_all(dir.join("data")).expect("a directory");
        for file in 0..12 {
            // Pairs of one size, so that they can be mistaken for each other; each large enough for a file of its own.
            let length = if file == 0 { 3 << 20 } else { 200_000 + 500 * (file / 2) };
            let bytes: Vec<u8> = (0..length / 8).flat_map(|_| chance.number().to_le_bytes()).collect();
            fs::write(dir.join(format!("data/{file}")), bytes).expect("a file");
        }
        let sums =
            command("sh").args(["-c", "sha256sum data/*"]).current_dir(&dir).output().expect("sha256sum");
        fs::write(dir.join("sums"), sums.stdout).expect("a file");
        let check = "sha256sum --quiet -c sums || exit 55; stat -c %i data/*; for f in data/*; do echo mine > $f; done";
        let job = format!("command: {}\ncode: .\nenvironment: host\n", serde_json::Value::from(check));
        fs::write(dir.join("job.yml"), job).expect("a file");
        Project { dir }
    }
}

fn blobs(state: &Path) -> BTreeSet<PathBuf> {
    files_below(&state.join("cas/blobs")).into_iter().collect()
}

fn rewrite(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).expect("the blob");
    change(&mut bytes);
    // In its place, as a bad disk would do it; the store's files are read-only, which root need not heed.
    fs::write(path, bytes).expect("the blob is written");
}

/// Spoils blobs between the moment they are stored and the moment a job needs them, and while one has them.
fn bad_blobs(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    for nodes in [0, 1] {
        let mut fleet = Fleet::started(&Setup { nodes, ..Setup::default() });
        for round in 0..scale.of(6, 50) {
            let how =
                ["one bit is flipped", "it is cut short", "two are swapped", "it has grown", "it is gone"]
                    [usize::try_from(chance.below(5)).unwrap_or(0)];
            let place = if nodes == 1 && chance.percent(50) { "on the node" } else { "in the store" };
            let project = Project::new(fleet.home(), 100 * nodes + round, &mut chance);
            tally.case(&format!("a blob {place}: {how}"), || {
                spoil(&mut fleet, &project, place, how, &mut chance)
            });
        }
    }
}

fn spoil(fleet: &mut Fleet, project: &Project, place: &str, how: &str, chance: &mut Chance) {
    let before = blobs(&fleet.controller.state());
    let first = fleet.client.try_submit_dir(&project.dir).expect("the first job is taken");
    assert_eq!(fleet.client.ended(&first).state, "Completed");
    let inodes = String::from_utf8(fleet.client.log(&first, "job")).expect("numbers");
    let stored: Vec<PathBuf> = blobs(&fleet.controller.state()).difference(&before).cloned().collect();
    let shared: Vec<u64> = stored
        .iter()
        .filter_map(|path| fs::metadata(path).ok())
        .map(|blob| blob.ino())
        .filter(|inode| inodes.lines().any(|line| line == inode.to_string()))
        .collect();
    assert!(shared.is_empty(), "the job writes to the store's own files: {shared:?}");

    let state = if place == "on the node" { fleet.node().state() } else { fleet.controller.state() };
    let name = |path: &PathBuf| path.file_name().expect("a name").to_owned();
    let ours: BTreeSet<_> = stored.iter().map(name).collect();
    let victims: Vec<PathBuf> = blobs(&state).into_iter().filter(|path| ours.contains(&name(path))).collect();
    let victim = chance.pick(&victims).clone();
    let size = fs::metadata(&victim).expect("the blob").len();
    match how {
        "one bit is flipped" => rewrite(&victim, |bytes| {
            let at = usize::try_from(chance.below(bytes.len() as u64)).unwrap_or(0);
            bytes[at] ^= 1 << chance.below(8);
        }),
        "it is cut short" => rewrite(&victim, |bytes| bytes.truncate(bytes.len() / 2)),
        "it has grown" => rewrite(&victim, |bytes| bytes.extend_from_slice(b"more")),
        "it is gone" => fs::remove_file(&victim).expect("the blob is removed"),
        _ => {
            let twin = victims
                .iter()
                .find(|path| **path != victim && fs::metadata(path).is_ok_and(|m| m.len() == size));
            let other = twin.or_else(|| victims.iter().find(|path| **path != victim)).expect("another blob");
            let (one, two) = (fs::read(&victim).expect("a blob"), fs::read(other).expect("a blob"));
            rewrite(&victim, |bytes| *bytes = two);
            rewrite(other, |bytes| *bytes = one);
        }
    }
    // Whatever it takes: no job on bad bytes, and after a few tries a good one.
    let mut tries = Vec::new();
    for _ in 0..4 {
        let job = match fleet.client.try_submit_dir(&project.dir) {
            Ok(job) => fleet.client.ended(&job),
            Err(refused) => {
                tries.push(refused);
                continue;
            }
        };
        let outcome = job.outcome.unwrap_or_default();
        let log = String::from_utf8_lossy(&fleet.client.log(&job.job, "job")).into_owned();
        let code = outcome.fault.as_ref().map(|fault| fault.code.clone()).unwrap_or_default();
        assert!(!log.contains("FAILED") && code != "RUN-101", "{how}: a job ran on bad bytes:\n{log}");
        if job.state == "Completed" {
            return;
        }
        tries.push(format!("{:?}", outcome.fault));
    }
    panic!("{how} {place}, size {size}: it does not heal:\n{}", tries.join("\n"));
}
