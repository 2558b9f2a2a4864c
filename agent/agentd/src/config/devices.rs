//! The devices that jobs are given beside processors: the container engine and the GPUs.

use std::path::PathBuf;

use agent_model::protocol::record::JobUser;

use super::read::Layers;
use super::{ConfigError, Setting, people, values};

/// How the container engine and the GPUs are reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceSettings {
    /// The unix socket of the container engine.
    pub(crate) docker_socket: PathBuf,
    /// A file of the form of Docker's own `config.json`, with credentials of registries.
    pub(crate) docker_credentials: Option<PathBuf>,
    /// A file of additional certificates that builds of images trust.
    pub(crate) docker_build_ca: Option<PathBuf>,
    /// The user of jobs in containers; `None` is the user of jobs, or else an ordinary user without rights.
    pub(crate) container_user: Option<JobUser>,
    /// The library of the GPU driver; found by the dynamic linker when absent.
    pub(crate) nvml_library: Option<PathBuf>,
}

impl DeviceSettings {
    /// Reads its keys; returns them with their settings.
    pub(super) fn resolve(layers: &Layers) -> Result<(DeviceSettings, Vec<Setting>), ConfigError> {
        let [socket, credentials] = [layers.get("docker_socket"), layers.get("docker_credentials")];
        let [build_ca, user] = [layers.get("docker_build_ca"), layers.get("container_user")];
        let nvml = layers.get("nvml_library");
        let file = "an absolute path, or nothing";
        let settings = DeviceSettings {
            docker_socket: socket.parse("an absolute path of at most 107 bytes", values::socket)?,
            docker_credentials: credentials.parse(file, values::path_or_none)?,
            docker_build_ca: build_ca.parse(file, values::path_or_none)?,
            container_user: user.parse("a user of this machine", people::job_user)?,
            nvml_library: nvml.parse(file, values::path_or_none)?,
        };
        Ok((settings, vec![socket, credentials, build_ca, user, nvml]))
    }
}
