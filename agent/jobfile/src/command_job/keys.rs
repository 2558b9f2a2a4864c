//! The keys of a command job and of an environment document.

use crate::keys::{Keys, ValueKind, ignored, read, refused, unused};
use agent_model::job::{OnDisconnect, ServiceKind};
use agent_model::sweep::{Goal, Sampling};

/// Of the document.
pub(crate) static JOB: Keys = Keys::exact(&[
    read("command", ValueKind::Text),
    read("type", ValueKind::Word(&["command", "sweep"])),
    read("code", ValueKind::Text),
    read("name", ValueKind::Text),
    read("display_name", ValueKind::Text),
    read("description", ValueKind::Text),
    read("experiment_name", ValueKind::Text),
    read("tags", ValueKind::Texts),
    read("environment", ValueKind::Either(&[ValueKind::Text, ValueKind::Mapping(&ENVIRONMENT)])),
    read("environment_variables", ValueKind::Texts),
    read("secrets", ValueKind::Texts),
    read("visibility", ValueKind::Word(&["owner", "all"])),
    read("resume", ValueKind::Word(&["never", "outputs"])),
    read("azureml_core", ValueKind::Word(&["installed", "stand_in"]))
        .about("`stand_in`: a script of the SDK v1 finds a `Run` that records here, unless azureml-core is installed"),
    read("success_exit_codes", ValueKind::Lines)
        .about("codes of the command, beside 0, with which the job has completed: `[3, 75]`"),
    read("compute", ValueKind::Text).about("the pool that is to run it; `local` for any machine"),
    read("array", ValueKind::Text)
        .about("run once for each of these indices, `%` so many at a time: `0-199%8`"),
    read("inputs", ValueKind::Named(&ValueKind::Either(&[ValueKind::Text, ValueKind::Mapping(&INPUT)]))),
    read("outputs", ValueKind::Named(&ValueKind::Mapping(&OUTPUT))),
    read("resources", ValueKind::Mapping(&RESOURCES)),
    read("distribution", ValueKind::Mapping(&DISTRIBUTION)),
    read("limits", ValueKind::Mapping(&LIMITS)),
    read("retry", ValueKind::Mapping(&RETRY)),
    read("queue_settings", ValueKind::Mapping(&QUEUE)),
    read("services", ValueKind::Named(&ValueKind::Mapping(&SERVICE))),
    ignored("$schema"),
    unused("properties", &[], "only `tags` are kept of what a job file says about its job"),
    unused("parent_job_name", &[], "a job is never part of another"),
    unused("identity", &["aml_token"], "a job has no identity of the cloud"),
    read("trial", ValueKind::Mapping(&TRIAL)).about("what a sweep runs with each draw of values"),
    read("search_space", ValueKind::Free).about("of a sweep: a distribution for each hyperparameter"),
    read("sampling_algorithm", ValueKind::Either(&[ValueKind::Word(&Sampling::WORDS), ValueKind::Mapping(&SAMPLING)])),
    read("objective", ValueKind::Mapping(&OBJECTIVE)),
    read("early_termination", ValueKind::Mapping(&POLICY)),
    read("trials", ValueKind::Free).about("of a sweep: values of some trials, by index, which are then not drawn"),
    read("extends", ValueKind::Text).about("of a sweep: the one that ended and whose trials count as earlier ones of this"),
    refused("jobs", &[], KINDS),
    refused("primary_metric_name", &[], HYPERDRIVE),
    refused("max_total_runs", &[], HYPERDRIVE),
]);

/// What to do with a sweep of the SDK v1.
pub(crate) const HYPERDRIVE: &str = "write a sweep: `type: sweep` with `trial`, `search_space`, `objective` and `limits` (agent/docs/sweeps.md)";

/// Of `trial`.
pub(super) static TRIAL: Keys = Keys::exact(&[
    read("command", ValueKind::Text),
    read("code", ValueKind::Text),
    read("environment", ValueKind::Either(&[ValueKind::Text, ValueKind::Mapping(&ENVIRONMENT)])),
    read("environment_variables", ValueKind::Texts),
    read("distribution", ValueKind::Mapping(&DISTRIBUTION)),
    read("resources", ValueKind::Mapping(&RESOURCES)),
    ignored("type"),
]);

pub(super) static SAMPLING: Keys = Keys::exact(&[
    read("type", ValueKind::Word(&Sampling::WORDS)),
    read("seed", ValueKind::Whole),
    read("rule", ValueKind::Word(&["random", "sobol"])),
    read("logbase", ValueKind::Text),
]);

pub(super) static OBJECTIVE: Keys =
    Keys::exact(&[read("goal", ValueKind::Word(&Goal::WORDS)), read("primary_metric", ValueKind::Text)]);

pub(super) static POLICY: Keys = Keys::exact(&[
    read("type", ValueKind::Word(&["bandit", "median_stopping", "truncation_selection"])),
    read("evaluation_interval", ValueKind::Whole),
    read("delay_evaluation", ValueKind::Whole),
    read("slack_factor", ValueKind::Text),
    read("slack_amount", ValueKind::Text),
    read("truncation_percentage", ValueKind::Whole),
    read("exclude_finished_jobs", ValueKind::Flag),
]);

/// What to do with a job of a kind that is not run.
pub(crate) const KINDS: &str = "submit each command on its own, as a job of `type: command`";

/// Of `environment`, and of a document that holds only one.
pub(crate) static ENVIRONMENT: Keys = Keys::exact(&[
    read("python", ValueKind::Text),
    read("requirements", ValueKind::Lines),
    read("user_managed_dependencies", ValueKind::Flag),
    read("conda_file", ValueKind::Either(&[ValueKind::Text, ValueKind::Free])),
    read("conda_lock", ValueKind::Text),
    read("image", ValueKind::Text),
    read("build", ValueKind::Mapping(&BUILD)),
    read("os_type", ValueKind::Word(&["linux", "windows"])),
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

static BUILD: Keys = Keys::exact(&[read("path", ValueKind::Text), read("dockerfile_path", ValueKind::Text)]);

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
    read("type", ValueKind::Word(&INPUT_TYPES)),
    read("path", ValueKind::Text),
    read("value", ValueKind::Text),
    read("default", ValueKind::Text),
    read("mode", ValueKind::Word(&["ro_mount", "download", "direct", "eval_mount", "eval_download"])),
    read("optional", ValueKind::Flag),
    ignored("description"),
    unused(
        "path_on_compute",
        &[],
        "its path is in the command, `${{inputs.NAME}}`, and in the variable AZURE_ML_INPUT_NAME",
    ),
    ignored("min"),
    ignored("max"),
    ignored("enum"),
    unused(
        "datastore",
        &[],
        "it does not change what `path` means; write `path: azureml://datastores/NAME/paths/PATH`",
    ),
]);

pub(crate) static OUTPUT: Keys = Keys::exact(&[
    read("type", ValueKind::Word(&DATA_TYPES)),
    read("mode", ValueKind::Word(&["rw_mount", "mount", "upload", "direct"])),
    ignored("description"),
    read("path", ValueKind::Text),
    read("name", ValueKind::Text),
    read("version", ValueKind::Text),
]);

static RESOURCES: Keys = Keys::exact(&[
    read("instance_count", ValueKind::Whole),
    read("instance_type", ValueKind::Text),
    read("labels", ValueKind::Texts),
    read("gpus", ValueKind::Whole),
    read("cpus", ValueKind::Whole),
    read("memory", ValueKind::Size),
    read("shm_size", ValueKind::Size),
    read("docker_args", ValueKind::Lines),
    ignored("max_instance_count"),
    ignored("locations"),
    ignored("properties"),
]);

static DISTRIBUTION: Keys = Keys::exact(&[
    read("type", ValueKind::Word(&["pytorch", "mpi", "tensorflow", "ray", "spark"])),
    read("process_count_per_instance", ValueKind::Whole),
    read("worker_count", ValueKind::Whole),
    read("parameter_server_count", ValueKind::Whole),
    read("port", ValueKind::Whole),
    read("include_dashboard", ValueKind::Flag),
    read("dashboard_port", ValueKind::Whole),
    read("head_node_additional_args", ValueKind::Text),
    read("worker_node_additional_args", ValueKind::Text),
    unused("address", &[], "the job has a head of its own, on its first node"),
]);

pub(crate) static SERVICE: Keys = Keys::exact(&[
    read("type", ValueKind::Word(&ServiceKind::WORDS)),
    read("port", ValueKind::Whole),
    read("nodes", ValueKind::Text),
    read("log_dir", ValueKind::Text),
    unused("ssh_public_keys", &[], "`agentctl exec` needs no keys"),
    ignored("properties"),
]);

pub(super) static LIMITS: Keys = Keys::exact(&[
    read("timeout", ValueKind::Duration),
    read("grace", ValueKind::Duration),
    read("on_disconnect", ValueKind::Word(&OnDisconnect::WORDS)),
    read("max_total_trials", ValueKind::Whole),
    read("max_concurrent_trials", ValueKind::Whole),
    read("trial_timeout", ValueKind::Duration),
]);

static RETRY: Keys =
    Keys::exact(&[read("max_attempts", ValueKind::Whole), read("backoff", ValueKind::Duration)]);

static QUEUE: Keys =
    Keys::exact(&[read("priority", ValueKind::Word(&["low", "medium", "high"])), ignored("job_tier")]);
