//! Every failpoint is in the table and in the code, and every write that a promise rests on has one.

use std::collections::{BTreeMap, BTreeSet};

use agent_model::failpoint::NAMES;

use crate::{files_below, none, read};

/// Where promises are written down: what is here and writes has a failpoint in the same function.
const KEEPERS: &[&str] = &[
    "agent/agentd/src/worker",
    "agent/cas/src/snapshot",
    "agent/cas/src/store",
    "agent/command/src",
    "agent/control/src/archive",
    "agent/control/src/store",
    "agent/runtime/src/data",
    "agent/runtime/src/env",
    "agent/runtime/src/exec",
    "agent/shim/src",
];

/// A call that writes, makes durable, moves or starts something.
const CALLS: &[&str] = &[
    "File::create(",
    ".write_all(",
    ".write_all_at(",
    ".write_at(",
    ".sync_all()",
    ".sync_data()",
    "rename(",
    ".spawn()",
    "fs::write(",
    "agent_fs::write_",
    "agent_fs::flush_directory",
];

/// Calls that need none: file, a part of the line, and why.
const EXCUSED: &[(&str, &str, &str)] = &[
    ("agent/runtime/src/env/owners.rs", "File::create(", "a note of a use, before anything is built"),
    (
        "agent/shim/src/cgroup/devices.rs",
        "file.write_all(",
        "a file of the kernel; a failure is told as a limit not in effect",
    ),
    ("agent/shim/src/apart.rs", "fs::write(&list", "a failure is told as a limit not in effect"),
    (
        "agent/shim/src/room.rs",
        "File::create(&place)",
        "in memory, before the builder is there, which ends then",
    ),
    ("agent/cas/src/store/disk/damage.rs", "file.write_all_at(", "for tests, as a failure of its own"),
    ("agent/cas/src/snapshot/statcache.rs", "page.write_all(", "without it more files are read"),
    ("agent/cas/src/snapshot/statcache.rs", "fs::rename(&temp", "without it more files are read"),
    (
        "agent/control/src/store/salvage.rs",
        "file.write_all(&page)",
        "a working copy that is read and thrown away",
    ),
    ("agent/runtime/src/env/single_flight.rs", "self.file.write_all_at(", "a build log is for people"),
    ("agent/runtime/src/env/single_flight.rs", "fs::rename(&self.path", "a build log is for people"),
    ("agent/runtime/src/env/single_flight.rs", "log.write_all(", "a build log is for people"),
    ("agent/runtime/src/env/kept.rs", "fs::write(&pin", "it is there or not, and who asked is told"),
    ("agent/runtime/src/env/marker.rs", "agent_fs::write_whole(path", "without it more files are compared"),
    ("agent/runtime/src/env/interpreter.rs", "agent_fs::write_whole(path", "without it they are asked again"),
    ("agent/command/src/lib.rs", ".spawn()?);", "who runs a command has the failpoint: env.build.spawn"),
    ("agent/command/src/lib.rs", "file.write_all(bytes)", "a file in memory"),
    ("agent/runtime/src/exec/session.rs", ".write_all(", "who opened the session is told that it ended"),
    ("agent/shim/src/attend.rs", ".write_all(frame)", "whoever opened the session is told, or is gone"),
    ("agent/shim/src/attend/command.rs", "command.spawn()?", "likewise"),
    ("agent/shim/src/attend/port.rs", "stream.write_all(", "likewise"),
    ("agent/shim/src/cgroup.rs", "fs::write(", "a wish of which the result is read back"),
    ("agent/shim/src/cgroup/groups.rs", "write_all(", "who calls has the failpoint: shim.cgroup.*"),
    ("agent/shim/src/dir.rs", "path.with_added_extension(", "whether it was done is told and acted upon"),
    ("agent/agentd/src/worker/rendezvous.rs", "stream.write_all(greeting", "whoever comes asks again"),
    ("agent/shim/src/job.rs", "order.write_all(", "a file in memory"),
    ("agent/shim/src/notes.rs", "write_all(", "notes are for people"),
    ("agent/shim/src/process.rs", "fs::write(state", "a wish"),
    ("agent/shim/src/rank.rs", "file.write_all(text)", "it is a process of the job, whose end says so"),
    ("agent/shim/src/rank/each.rs", ".spawn()", "likewise"),
    ("agent/shim/src/rank/lend.rs", ".spawn()", "likewise"),
    ("agent/shim/src/rank/lend.rs", "write_all(&data)", "likewise"),
    ("agent/shim/src/rank/mpi.rs", ".spawn()", "likewise"),
    ("agent/shim/src/rank/wire.rs", "stream.write_all(", "likewise"),
    ("agent/shim/src/sys.rs", "oom_score_adj", "a wish"),
    ("agent/shim/src/sys.rs", "_map\"), ", "a map of a namespace, which is there or the job does not start"),
    ("agent/shim/src/view.rs", "\"/proc/self/", "likewise"),
    ("agent/shim/src/view.rs", "fs::write(environment.join(", "only tries whether it is possible"),
    ("agent/agentd/src/worker/fetch.rs", "user.pth", "without it fewer packages are found"),
    ("agent/agentd/src/worker/slurm.rs", "fs::write(&file", "it is told as that of any folder of the job"),
    ("agent/agentd/src/worker/stand_in.rs", "fs::write(&file", "it is told as that of any folder of the job"),
];

/// The code of a file without its tests, with the number of each line.
fn production(path: &str) -> Vec<(usize, String)> {
    let text = read(path);
    let is_module = |at: usize| text[at..].lines().nth(1).is_some_and(|line| line.contains("mod "));
    let tests = text.match_indices("#[cfg(test)]").map(|(at, _)| at).find(|at| is_module(*at));
    let text = &text[..tests.unwrap_or(text.len())];
    let code = |line: &str| line.split("//").next().unwrap_or_default().to_owned();
    text.lines().enumerate().map(|(index, line)| (index + 1, code(line))).collect()
}

fn sources(below: &str) -> Vec<String> {
    let files = files_below(below, &[".rs"]).into_iter().map(|path| path.to_string_lossy().into_owned());
    files
        .filter(|path| !path.contains("/tests/") && !path.ends_with("tests.rs"))
        .filter(|path| !path.contains("/fake/") && !path.ends_with("fake.rs"))
        .filter(|path| path != "agent/model/src/failpoint.rs")
        .collect()
}

/// The names a line visits, as far as they stand there.
fn visited(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices('"').step_by(2).filter_map(|(at, _)| {
        let name = line[at + 1..].split('"').next()?;
        let parts: Vec<&str> = name.split('.').collect();
        let plain = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_lowercase());
        let programs = ["control", "node", "cas", "env", "shim"];
        (parts.len() > 1 && programs.contains(&parts[0]) && parts.iter().all(plain)).then_some(name)
    })
}

#[test]
fn test_table_and_code_name_the_same_failpoints() {
    let (mut code, mut named) = (BTreeMap::new(), BTreeSet::new());
    for path in sources("agent") {
        for (number, line) in production(&path) {
            named.extend(visited(&line).map(str::to_owned)); // some are handed on to who visits them
            for name in visited(&line).filter(|_| line.contains("hit(")) {
                code.entry(name.to_owned()).or_insert_with(|| format!("{path}:{number}"));
            }
        }
    }
    let mut complaints: Vec<String> = NAMES
        .iter()
        .filter(|name| !named.contains(**name))
        .map(|name| format!("`{name}` is in failpoint::NAMES and nowhere visited"))
        .collect();
    complaints.extend(
        code.iter()
            .filter(|(name, _)| !NAMES.contains(&name.as_str()))
            .map(|(name, place)| format!("{place}: `{name}` is missing in failpoint::NAMES")),
    );
    let mut names = NAMES.to_vec();
    names.sort_unstable();
    names.dedup();
    if names.len() != NAMES.len() {
        complaints.push("a name stands twice in failpoint::NAMES".to_owned());
    }
    none("failpoints", complaints);
}

#[test]
fn test_what_is_written_can_be_made_to_fail() {
    let (mut complaints, mut used) = (Vec::new(), vec![false; EXCUSED.len()]);
    for path in KEEPERS.iter().flat_map(|below| sources(below)) {
        let code = production(&path);
        for (index, (number, line)) in code.iter().enumerate() {
            let Some(call) = CALLS.iter().find(|call| line.contains(**call)) else { continue };
            let begins = |line: &str| line.trim_start().starts_with("fn ") || line.contains(" fn ");
            let from = code[..=index].iter().rposition(|(_, line)| begins(line)).unwrap_or(0);
            if begins(line) || code[from..=index].iter().any(|(_, line)| line.contains("hit(")) {
                continue;
            }
            let excuse = |(file, part, _): &(&str, &str, &str)| *file == path && line.contains(part);
            match EXCUSED.iter().position(excuse) {
                Some(known) => used[known] = true,
                None => {
                    complaints.push(format!("{path}:{number}: `{call}` without a failpoint: {}", line.trim()))
                }
            }
        }
    }
    let stale = EXCUSED.iter().zip(used).filter(|(_, used)| !used);
    complaints
        .extend(stale.map(|((file, part, _), _)| format!("{file}: `{part}` need not be excused any more")));
    none("writes without a failpoint", complaints);
}
