//! Who may know whom: the table of the architecture, read against manifests and `use` lines.

use std::collections::BTreeSet;

use crate::{files_below, none, read};

/// Crate, its directory, and the workspace crates it may depend on.
const MAY_IMPORT: &[(&str, &str, &[&str])] = &[
    ("agent-model", "agent/model", &[]),
    ("agent-jobfile", "agent/jobfile", &["agent-model"]),
    ("agent-fs", "agent/fs", &[]),
    ("agent-blocking", "agent/blocking", &[]),
    ("agent-identity", "agent/identity", &["agent-fs", "agent-model"]),
    ("agent-proto", "proto", &["agent-identity", "agent-model"]),
    ("agent-shim", "agent/shim", &["agent-fs", "agent-model"]),
    ("agent-spawn", "agent/spawn", &["agent-fs", "agent-model", "agent-shim"]),
    ("agent-command", "agent/command", &["agent-blocking", "agent-model", "agent-shim", "agent-spawn"]),
    ("agent-env", "agent/env", &["agent-fs", "agent-model"]),
    ("agent-node", "agent/node", &["agent-model"]),
    ("agent-attach", "agent/attach", &["agent-model"]),
    ("agent-cas", "agent/cas", &["agent-blocking", "agent-fs", "agent-model"]),
    (
        "agent-runtime",
        "agent/runtime",
        &[
            "agent-blocking",
            "agent-fs",
            "agent-jobfile",
            "agent-model",
            "agent-shim",
            "agent-spawn",
            "agent-command",
            "agent-env",
        ],
    ),
    (
        "agent-control",
        "agent/control",
        &[
            "agent-blocking",
            "agent-command",
            "agent-fs",
            "agent-identity",
            "agent-jobfile",
            "agent-model",
            "agent-proto",
            "agent-cas",
        ],
    ),
    (
        "agentd",
        "agent/agentd",
        &[
            "agent-attach",
            "agent-blocking",
            "agent-fs",
            "agent-identity",
            "agent-jobfile",
            "agent-model",
            "agent-proto",
            "agent-cas",
            "agent-shim",
            "agent-spawn",
            "agent-command",
            "agent-runtime",
            "agent-node",
            "agent-control",
        ],
    ),
    (
        "agentctl",
        "agent/agentctl",
        &[
            "agent-attach",
            "agent-blocking",
            "agent-identity",
            "agent-jobfile",
            "agent-model",
            "agent-proto",
            "agent-cas",
        ],
    ),
];

/// A third-party crate and the only places that may name it.
const CONFINED: &[(&str, &[&str])] = &[
    ("sqlx", &["agent/control/src/store", "agent/agentd/src/worker/journal"]),
    ("sysinfo", &["agent/node/"]),
    ("nvml_wrapper", &["agent/node/src/gpu"]),
    ("bollard", &["agent/runtime/"]),
    ("object_store", &["agent/env/src/engine/data"]),
    ("russh", &["agent/attach/src/session", "agent/attach/src/known_hosts.rs"]),
    (
        "nix",
        &[
            "agent/shim/",
            "agent/spawn/",
            "agent/command/",
            "agent/runtime/src/exec",
            "agent/agentd/src/config/people.rs",
            "agent/agentctl/src/commands/view.rs",
            "agent/agentctl/src/client.rs",
        ],
    ),
    ("axum", &["agent/agentd/src/worker/tracking", "agent/control/src/api"]),
    ("saphyr", &["agent/jobfile/src/yaml.rs"]),
    ("clap", &["agent/agentctl/", "agent/agentd/src/cli.rs", "agent/agentd/src/main.rs"]),
    ("bazel_remote_apis", &["agent/cas/", "agent/control/src/api/cas"]),
    ("hyper", &["agent/agentd/src/worker/preemption"]),
    ("zstd", &["agent/cas/src/remote/compression"]),
    ("rcgen", &["agent/identity/"]),
    ("x509_parser", &["agent/identity/"]),
    ("tokio_rustls", &["agent/identity/"]),
];

/// The only modules that may name a wire message.
const WIRE: &[&str] = &[
    "proto/",
    "agent/control/src/api",
    "agent/control/tests/",
    "agent/agentd/src/membership",
    "agent/agentd/src/node_api",
    "agent/agentd/src/worker/reconcile",
    "agent/agentd/src/worker/rendezvous",
    "agent/agentd/src/worker/peers",
    "agent/agentd/src/worker/telemetry",
    "agent/agentd/src/worker/report",
    "agent/agentd/src/worker/secrets",
    "agent/agentd/src/worker/sessions",
    "agent/agentctl/src/commands",
    "agent/agentctl/src/client",
];

/// What runs replicas on a node: a module of `agent/agentd/src/worker`, and the others there that it knows. Who is not
/// here knows none.
const WORKER: &[(&str, &[&str])] = &[
    ("containers", &["journal"]),
    ("data", &["environments", "users"]),
    ("environments", &["users"]),
    ("faults", &["data", "fetch", "journal", "outputs"]),
    ("fetch", &["data", "slurm", "stand_in"]),
    ("late", &["faults", "outputs", "recover", "report", "retention"]),
    ("launch", &["fetch", "rendezvous", "slurm", "stand_in"]),
    ("peers", &["rendezvous"]),
    ("pins", &["journal"]),
    ("preemption", &["backoff"]),
    ("recover", &["retention", "journal", "launch"]),
    (
        "reconcile",
        &["backoff", "environments", "journal", "late", "recover", "report", "runner", "standing", WHOLE],
    ),
    ("report", &["backoff"]),
    (
        "runner",
        &[
            "retention",
            "backoff",
            "containers",
            "data",
            "faults",
            "fetch",
            "journal",
            "launch",
            "outputs",
            "recover",
            "rendezvous",
            "report",
            "secrets",
            "prestaged_trees",
            "system",
            "telemetry",
            "tracking",
            WHOLE,
        ],
    ),
    ("sessions", &["backoff"]),
    ("standing", &["runner"]),
    ("telemetry", &["backoff"]),
    ("upkeep", &["gpus"]),
];

/// What all of them share, as a whole.
const WHOLE: &str = "Worker";

/// Whether a line of code names a crate, and not something that merely ends in its name.
fn names(code: &str, name: &str) -> bool {
    code.match_indices(&format!("{name}::")).any(|(at, _)| {
        let before = code[..at].chars().next_back().unwrap_or(' ');
        !before.is_alphanumeric() && before != '_' && before != ':'
    })
}

/// Below this line a file holds only tests, to which the confinement does not apply.
fn production(text: &str) -> &str {
    text.split("#[cfg(test)]").next().unwrap_or(text)
}

fn is_test_file(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs") || path.ends_with("_tests.rs")
}

#[test]
fn test_manifests_follow_the_layers() {
    let mut complaints = Vec::new();
    for (name, directory, allowed) in MAY_IMPORT {
        let manifest = read(format!("{directory}/Cargo.toml"));
        let dependencies = manifest.split("[dependencies]").nth(1).unwrap_or_default();
        let dependencies = dependencies.split("\n[").next().unwrap_or_default();
        for line in dependencies.lines() {
            let dependency = line.split(['.', ' ', '=']).next().unwrap_or_default();
            let ours = MAY_IMPORT.iter().any(|(other, ..)| *other == dependency);
            if ours && !allowed.contains(&dependency) {
                complaints.push(format!("{name} must not depend on {dependency}"));
            }
        }
    }
    none("layers", complaints);
}

/// A change of how jobs are run leaves the controller as it is built, and its tests, too.
#[test]
fn test_the_controller_does_not_wait_for_the_runtime() {
    let mut known = vec!["agent-control"];
    let mut at = 0;
    while let Some(name) = known.get(at) {
        let directory = MAY_IMPORT.iter().find(|(row, ..)| row == name).unwrap().1;
        let manifest = read(format!("{directory}/Cargo.toml"));
        // Dependencies of tests as well: whichever section of the manifest names them.
        let named =
            |other: &str| manifest.lines().any(|line| line.split(['.', ' ', '=']).next() == Some(other));
        let others = MAY_IMPORT.iter().map(|(other, ..)| *other).filter(|other| named(other));
        let more: Vec<&str> = others.filter(|other| !known.contains(other)).collect();
        known.extend(more);
        at += 1;
    }
    assert!(known.contains(&"agent-command"), "{known:?}");
    let foreign = ["agent-runtime", "agent-env"].into_iter().filter(|name| known.contains(name));
    none("what the controller waits for", foreign.map(str::to_owned).collect());
}

#[test]
fn test_the_table_names_every_crate() {
    let manifest = read("Cargo.toml");
    let members = manifest.split("members = [").nth(1).unwrap().split(']').next().unwrap();
    let members: Vec<_> = members.split(',').map(|m| m.trim().trim_matches('"')).collect();
    let complaints = members
        .iter()
        .filter(|m| !m.is_empty() && **m != "tests")
        .filter(|m| !MAY_IMPORT.iter().any(|(_, directory, _)| directory == *m))
        .map(|m| format!("{m} has no row in the table of layers"))
        .collect();
    none("crates", complaints);
}

#[test]
fn test_third_party_crates_stay_in_their_place() {
    let mut complaints = Vec::new();
    for path in files_below("agent", &[".rs"]).into_iter().chain(files_below("proto", &[".rs"])) {
        let path = path.to_string_lossy().into_owned();
        if is_test_file(&path) {
            continue;
        }
        let text = read(&path);
        for (index, line) in production(&text).lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            for (name, places) in CONFINED {
                if names(code, name) && !places.iter().any(|place| path.starts_with(place)) {
                    complaints.push(format!("{path}:{}: `{name}` is confined to {places:?}", index + 1));
                }
            }
            if code.contains("agent_proto::v1") && !WIRE.iter().any(|place| path.starts_with(place)) {
                complaints.push(format!("{path}:{}: wire types stop at the edges", index + 1));
            }
        }
    }
    none("confinement", complaints);
}

/// What follows `prefix` in each path, or group of paths, that begins with it: first names alone.
fn named_after(code: &str, prefix: &str) -> Vec<String> {
    let name = |text: &str| -> String {
        text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let mut found = Vec::new();
    for (at, _) in code.match_indices(prefix) {
        let rest = &code[at + prefix.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            found.push(name(rest));
            continue;
        };
        let (mut depth, mut begins) = (1, true);
        for (at, c) in group.char_indices() {
            if std::mem::take(&mut begins) {
                found.push(name(&group[at..]));
            }
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' => begins = depth == 1,
                _ => {}
            }
            if depth == 0 {
                break;
            }
        }
    }
    found
}

#[test]
fn test_modules_of_the_worker_know_whom_the_table_says() {
    let top = "agent/agentd/src/worker/";
    let files: Vec<String> = files_below(top, &[".rs"])
        .into_iter()
        .map(|path| path.to_string_lossy().into_owned())
        .filter(|path| !is_test_file(path))
        .collect();
    let module = |path: &str| {
        let below = path.strip_prefix(top).unwrap();
        below.split(['/', '.']).next().unwrap().to_owned()
    };
    let modules: BTreeSet<String> = files.iter().map(|path| module(path)).collect();
    let mut known = BTreeSet::new();
    for path in &files {
        let text = read(path);
        let lines = production(&text).lines().map(|line| line.split("//").next().unwrap_or_default());
        let depth = path.strip_prefix(top).unwrap().matches('/').count() + 1;
        let code = lines.collect::<Vec<_>>().join("\n").replace(&"super::".repeat(depth), "crate::worker::");
        for name in named_after(&code, "crate::worker::") {
            if (modules.contains(&name) || name == WHOLE) && name != module(path) {
                known.insert((module(path), name));
            }
        }
    }
    let table: BTreeSet<(String, String)> = WORKER
        .iter()
        .flat_map(|(module, others)| others.iter().map(|other| (module.to_string(), other.to_string())))
        .collect();
    let more = known.difference(&table).map(|(module, other)| format!("{module} must not know {other}"));
    let fewer =
        table.difference(&known).map(|(module, other)| format!("{module} does not know {other} any more"));
    none("modules of the worker", more.chain(fewer).collect());
}

#[test]
fn test_paths_are_taken_apart() {
    let code = "use a::b::{self, c::{d, e}, F,\n g};\nlet x = a::b::h::i();";
    assert_eq!(named_after(code, "a::b::"), ["self", "c", "F", "g", "h"]);
}

#[test]
fn test_the_scheduler_sees_the_model_alone() {
    let files = files_below("agent/control/src", &[".rs"]);
    let own = files.iter().filter(|path| path.starts_with("agent/control/src/scheduler"));
    let own = own.filter(|path| !path.ends_with("tests.rs"));
    let texts = std::iter::once(read("agent/control/src/scheduler.rs")).chain(own.map(read));
    let known = ["agent_model", "std::", "super::", "limits::", "locality::", "reserve::", "wait::"];
    let mut complaints = Vec::new();
    for text in texts {
        let uses = production(&text).lines().filter_map(|line| line.strip_prefix("use "));
        let foreign = uses.filter(|path| !known.iter().any(|known| path.starts_with(known)));
        complaints.extend(foreign.map(str::to_owned));
    }
    none("agent/control/src/scheduler imports", complaints);
}

#[test]
fn test_unsafe_code_lives_in_one_module() {
    let complaints = files_below("agent", &[".rs"])
        .into_iter()
        .filter(|path| !path.starts_with("agent/shim/src/lib.rs"))
        .filter(|path| read(path).contains("allow(unsafe_code"))
        .map(|path| path.display().to_string())
        .collect();
    none("unsafe code outside agent_shim::sys", complaints);
    let shim = read("agent/shim/src/lib.rs");
    let (_, after) = shim.split_once("allow(unsafe_code").expect("the shim allows it for `sys`");
    assert!(after.lines().nth(1) == Some("pub mod sys;") && !after.contains("allow(unsafe_code"));
}
