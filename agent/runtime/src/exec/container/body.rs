//! The engine's description of a job's container. Pure functions.
//!
//! Everything that a job may do in its container is decided here. Nothing is given that is not named here: no
//! privileges, no access to the engine, no devices but the requested GPUs, no files of this machine but the job's
//! part of its directory and, read-only, its environment and the shim.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_model::container::Options;
use agent_shim::door::DOOR;
use agent_shim::{JobDir, Launch, User};
use bollard::models::{
    ContainerCreateBody, DeviceRequest, HealthConfig, HostConfig, HostConfigCgroupnsModeEnum,
    HostConfigLogConfig, Mount, MountType, ResourcesUlimits, RestartPolicy, RestartPolicyNameEnum,
};

use super::ContainerSpec;
use super::supervisor::{DOOR_INSIDE, PROGRAM};

/// Shared memory if the job does not set it, in bytes: the cloud's default.
const SHM: u64 = 2 << 30;

/// The capabilities that the first process of a container needs as user 0: to switch to the job's user and to signal
/// its processes. It keeps only the latter once the command is started, and the job itself has none.
const CAPABILITIES: [&str; 4] = ["KILL", "SETGID", "SETPCAP", "SETUID"];

/// How much of a limited memory may be swapped out, in bytes: practically nothing. A limit of 0 does not last where
/// systemd manages cgroup v2: the engine's runtime writes it without telling systemd, which lifts it at its next
/// reload.
const SWAP: u64 = 64 << 10;

/// The variables that a container engine's GPU add-on obeys.
const GPU_VARIABLE: &str = "NVIDIA_VISIBLE_DEVICES";
const GPU_ABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";

/// How much longer than the job's own grace the engine waits when it stops a container.
const BEYOND_GRACE: Duration = Duration::from_secs(10);

/// The container of one job.
pub(super) fn body(
    dir: &JobDir,
    shim: &Path,
    launch: &Launch,
    container_spec: &ContainerSpec,
    labels: HashMap<String, String>,
    shim_user: User,
) -> ContainerCreateBody {
    let host_config = HostConfig {
        mounts: Some(mounts(dir, shim, &container_spec.image.mounts)),
        log_config: Some(first_words()),
        network_mode: Some("host".to_owned()),
        ipc_mode: Some("private".to_owned()),
        cgroupns_mode: Some(HostConfigCgroupnsModeEnum::PRIVATE),
        restart_policy: Some(RestartPolicy {
            name: Some(RestartPolicyNameEnum::NO),
            maximum_retry_count: None,
        }),
        init: Some(false),
        cap_drop: Some(vec!["ALL".to_owned()]),
        cap_add: (shim_user.uid == 0).then(|| CAPABILITIES.map(str::to_owned).to_vec()),
        security_opt: Some(vec!["no-new-privileges".to_owned()]),
        device_requests: gpus(&container_spec.gpus),
        ..limits(launch, container_spec)
    };
    ContainerCreateBody {
        image: Some(container_spec.image.id.clone()),
        user: Some(format!("{}:{}", shim_user.uid, shim_user.gid)),
        entrypoint: Some(vec![
            PROGRAM.to_owned(),
            "--door".to_owned(),
            DOOR_INSIDE.to_owned(),
            dir.data().display().to_string(),
        ]),
        cmd: Some(Vec::new()),
        env: Some(variables(container_spec)),
        working_dir: Some("/".to_owned()),
        labels: Some(labels),
        stop_signal: Some("SIGTERM".to_owned()),
        stop_timeout: Some(signed((launch.grace + BEYOND_GRACE).as_secs())),
        healthcheck: Some(HealthConfig { test: Some(vec!["NONE".to_owned()]), ..HealthConfig::default() }),
        host_config: Some(host_config),
        ..ContainerCreateBody::default()
    }
}

/// The engine keeps the output from before the shim can write its log: why it did not start.
fn first_words() -> HostConfigLogConfig {
    let little =
        [("max-size", "64k"), ("max-file", "1")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    HostConfigLogConfig { typ: Some("json-file".to_owned()), config: Some(little.into()) }
}

/// The container's limits.
fn limits(launch: &Launch, container_spec: &ContainerSpec) -> HostConfig {
    let Options { cpus, shm, ulimits } = &container_spec.options;
    let memory = launch.limits.memory;
    let ulimit = |limit: &agent_model::container::Ulimit| ResourcesUlimits {
        name: Some(limit.name.clone()),
        soft: Some(limit.soft),
        hard: Some(limit.hard),
    };
    HostConfig {
        memory: memory.map(signed),
        // Swap would add to the limited memory; this value is the sum of both.
        memory_swap: memory.map(|memory| signed(memory.saturating_add(SWAP))),
        pids_limit: launch.limits.pids.map(signed),
        nano_cpus: cpus.map(signed),
        shm_size: Some(signed(
            [container_spec.shm, shm.unwrap_or(0), SHM].into_iter().find(|size| *size > 0).unwrap_or(SHM),
        )),
        ulimits: (!ulimits.is_empty()).then(|| ulimits.iter().map(ulimit).collect()),
        ..HostConfig::default()
    }
}

/// The job's part of its directory and its environment, at their paths on the machine; the shim and its socket.
fn mounts(dir: &JobDir, shim: &Path, environment: &[PathBuf]) -> Vec<Mount> {
    let mount = |source: &Path, target: String, read_only| Mount {
        source: Some(source.display().to_string()),
        target: Some(target),
        typ: Some(MountType::BIND),
        read_only: Some(read_only),
        ..Mount::default()
    };
    let own = mount(dir.data(), dir.data().display().to_string(), false);
    let environment = environment.iter().map(|path| mount(path, path.display().to_string(), true));
    let supervisor = [(shim.to_owned(), PROGRAM), (dir.path().join(DOOR), DOOR_INSIDE)];
    let supervisor = supervisor.map(|(path, inside)| mount(&path, inside.to_owned(), true));
    std::iter::once(own).chain(environment).chain(supervisor).collect()
}

/// The variables of the first process. Those of the image are for the job, which gets them from its launch record:
/// here each is removed, which a name without a value means.
fn variables(container_spec: &ContainerSpec) -> Vec<String> {
    let of_image = container_spec.image.env.keys();
    let mut variables: BTreeMap<&str, Option<String>> = of_image.map(|name| (name.as_str(), None)).collect();
    // The image's value would count otherwise, and is often `all`.
    let visible =
        if container_spec.gpus.is_empty() { "void".to_owned() } else { container_spec.gpus.join(",") };
    variables.insert(GPU_VARIABLE, Some(visible));
    let abilities = container_spec.image.env.get(GPU_ABILITIES).cloned();
    variables.insert(GPU_ABILITIES, Some(abilities.unwrap_or_else(|| "compute,utility".to_owned())));
    let plan = agent_model::failpoint::plan().and_then(|plan| plan.into_string().ok());
    if plan.is_some() {
        variables.insert(agent_model::failpoint::VARIABLE, plan);
    }
    let text = |(name, value): (&str, Option<String>)| match value {
        Some(value) => format!("{name}={value}"),
        None => name.to_owned(),
    };
    variables.into_iter().map(text).collect()
}

fn gpus(uuids: &[String]) -> Option<Vec<DeviceRequest>> {
    let request = || DeviceRequest {
        device_ids: Some(uuids.to_vec()),
        capabilities: Some(vec![vec!["gpu".to_owned()]]),
        ..DeviceRequest::default()
    };
    (!uuids.is_empty()).then(|| vec![request()])
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_memory_that_is_limited_is_hardly_swapped_and_never_by_a_limit_of_nothing() {
        let limited = |memory| {
            let launch: Launch = serde_json::from_value(serde_json::json!({
                "version": 1, "replica": "train.1.0", "argv": ["true"], "env": {}, "cwd": "/", "grace_ms": 1000,
                "limits": {"memory": memory, "pids": 7},
            }))
            .unwrap();
            let limits = limits(&launch, &ContainerSpec::default());
            (limits.memory, limits.memory_swap, limits.pids_limit)
        };
        assert_eq!(limited(Some(1_u64 << 30)), (Some(1 << 30), Some((1 << 30) + (64 << 10)), Some(7)));
        assert_eq!(limited(Some(u64::MAX)), (Some(i64::MAX), Some(i64::MAX), Some(7)));
        assert_eq!(limited(None), (None, None, Some(7)));
    }
}
