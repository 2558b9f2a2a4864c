//! The keys of a command job and of an environment document.

use crate::job::OnDisconnect;
use crate::jobfile::keys::{Keys, Kind, ignored, read, refused, unused};

/// Of the document.
pub(crate) static JOB: Keys = Keys::exact(&[
    read("command", Kind::Text),
    read("type", Kind::Word(&["command"])),
    read("code", Kind::Text),
    read("name", Kind::Text),
    read("display_name", Kind::Text),
    read("description", Kind::Text),
    read("experiment_name", Kind::Text),
    read("tags", Kind::Texts),
    read("environment", Kind::Either(&[Kind::Text, Kind::Mapping(&ENVIRONMENT)])),
    read("environment_variables", Kind::Texts),
    read("secrets", Kind::Texts),
    read("visibility", Kind::Word(&["owner", "all"])),
    read("compute", Kind::Text),
    read("inputs", Kind::Named(&Kind::Either(&[Kind::Text, Kind::Mapping(&INPUT)]))),
    read("outputs", Kind::Named(&Kind::Mapping(&OUTPUT))),
    read("resources", Kind::Mapping(&RESOURCES)),
    read("distribution", Kind::Mapping(&DISTRIBUTION)),
    read("limits", Kind::Mapping(&LIMITS)),
    read("retry", Kind::Mapping(&RETRY)),
    read("queue_settings", Kind::Mapping(&QUEUE)),
    ignored("$schema"),
    ignored("properties"),
    ignored("parent_job_name"),
    ignored("identity"),
    unused("services", &[], "services of a running job cannot be reached"),
    refused("trial", &[], KINDS),
    refused("jobs", &[], KINDS),
]);

/// What to do with a job of a kind that is not run.
pub(crate) const KINDS: &str = "submit each command on its own, as a job of `type: command`";

/// Of `environment`, and of a document that holds only one.
pub(crate) static ENVIRONMENT: Keys = Keys::exact(&[
    read("python", Kind::Text),
    read("requirements", Kind::Lines),
    read("user_managed_dependencies", Kind::Flag),
    read("conda_file", Kind::Either(&[Kind::Text, Kind::Free])),
    read("conda_lock", Kind::Text),
    read("image", Kind::Text),
    read("build", Kind::Mapping(&BUILD)),
    read("os_type", Kind::Word(&["linux", "windows"])),
    ignored("$schema"),
    ignored("name"),
    ignored("version"),
    ignored("description"),
    ignored("tags"),
    ignored("properties"),
    unused("inference_config", &[], "it is for endpoints, and this is a job"),
    refused("channels", &[], CONDA),
    refused("dependencies", &[], CONDA),
]);

/// What to do with a conda file in place of an environment.
pub(crate) const CONDA: &str =
    "save it beside the job file and write `environment: {conda_file: ./conda.yml}`";

static BUILD: Keys = Keys::exact(&[read("path", Kind::Text), read("dockerfile_path", Kind::Text)]);

/// Types of inputs and outputs that are files.
pub(crate) const DATA_TYPES: [&str; 6] =
    ["uri_folder", "uri_file", "mltable", "custom_model", "mlflow_model", "triton_model"];

const INPUT_TYPES: [&str; 10] = [
    "uri_folder",
    "uri_file",
    "mltable",
    "custom_model",
    "mlflow_model",
    "triton_model",
    "integer",
    "number",
    "boolean",
    "string",
];

pub(crate) static INPUT: Keys = Keys::exact(&[
    read("type", Kind::Word(&INPUT_TYPES)),
    read("path", Kind::Text),
    read("value", Kind::Text),
    read("default", Kind::Text),
    read("mode", Kind::Word(&["ro_mount", "download", "direct", "eval_mount", "eval_download"])),
    read("optional", Kind::Flag),
    ignored("description"),
    ignored("path_on_compute"),
    ignored("min"),
    ignored("max"),
    ignored("enum"),
    unused("datastore", &[], "it does not change what `path` means; write `path: azureml://datastores/NAME/paths/PATH`"),
]);

pub(crate) static OUTPUT: Keys = Keys::exact(&[
    read("type", Kind::Word(&DATA_TYPES)),
    read("mode", Kind::Word(&["rw_mount", "mount", "upload", "direct"])),
    ignored("description"),
    unused("path", &[], "outputs are kept by the agent; get them with `agentctl download`"),
    unused("name", &[], "outputs are not registered"),
    unused("version", &[], "outputs are not registered"),
]);

static RESOURCES: Keys = Keys::exact(&[
    read("instance_count", Kind::Whole),
    read("instance_type", Kind::Text),
    read("labels", Kind::Texts),
    read("gpus", Kind::Whole),
    read("cpus", Kind::Whole),
    read("memory", Kind::Size),
    read("shm_size", Kind::Size),
    read("docker_args", Kind::Lines),
    ignored("max_instance_count"),
    ignored("locations"),
    ignored("properties"),
]);

static DISTRIBUTION: Keys = Keys::exact(&[
    read("type", Kind::Word(&["pytorch", "mpi", "tensorflow", "ray", "spark"])),
    read("process_count_per_instance", Kind::Whole),
    read("worker_count", Kind::Whole),
    read("parameter_server_count", Kind::Whole),
    read("port", Kind::Whole),
    read("include_dashboard", Kind::Flag),
    read("dashboard_port", Kind::Whole),
    read("head_node_additional_args", Kind::Text),
    read("worker_node_additional_args", Kind::Text),
    unused("address", &[], "the job has a head of its own, on its first node"),
]);

static LIMITS: Keys = Keys::exact(&[
    read("timeout", Kind::Duration),
    read("grace", Kind::Duration),
    read("on_disconnect", Kind::Word(&OnDisconnect::WORDS)),
]);

static RETRY: Keys = Keys::exact(&[read("max_attempts", Kind::Whole), read("backoff", Kind::Duration)]);

static QUEUE: Keys =
    Keys::exact(&[read("priority", Kind::Word(&["low", "medium", "high"])), ignored("job_tier")]);
