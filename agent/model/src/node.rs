//! What a node says about itself, and what that means for the jobs it runs.

use serde::{Deserialize, Serialize};

/// What a node has. Sent when it changed; unknown values are absent, never invented.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Inventory {
    /// The host name.
    pub hostname: String,
    /// The operating system, for example `Ubuntu 22.04.4 LTS`.
    pub os: String,
    /// The kernel release.
    pub kernel: String,
    /// The machine architecture, for example `x86_64`.
    pub arch: String,
    /// Logical processors the agent may use.
    pub cpus: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// Size of the file system of the state directory, in bytes.
    pub disk: u64,
    /// The GPUs, in the order of the driver.
    pub gpus: Vec<Gpu>,
    /// How many replicas run at a time.
    pub slots: u32,
    /// What was found out about this machine, good and bad.
    pub findings: Vec<Finding>,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// The driver's stable identifier.
    pub uuid: String,
    /// The product name.
    pub name: String,
    /// Memory in bytes.
    pub memory: u64,
}

/// One thing found out about a machine, and what it means for jobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What was looked at, for example `cgroups`. Stable.
    pub topic: String,
    /// How good that is.
    pub grade: Grade,
    /// What was found, for example `v2, writable`.
    pub found: String,
    /// What that means for the jobs on this machine.
    pub means: String,
    /// What to do about it, when something can be done.
    pub fix: Option<String>,
}

/// How good a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
    /// As it should be.
    Good,
    /// Something is missing that some jobs want.
    Limited,
    /// No job can run.
    Bad,
}

/// The load of a node, measured when it reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Load {
    /// Bytes free on the file system of the state directory.
    pub disk_free: u64,
    /// Memory available, in bytes.
    pub memory_free: u64,
}
