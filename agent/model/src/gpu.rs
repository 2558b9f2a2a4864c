//! What the driver reports about the GPUs of a machine at one moment.
//!
//! Made by a short-lived process that alone loads the driver's library, read by the daemon. Values that the driver
//! does not report are absent, never invented.

use serde::{Deserialize, Serialize};

/// One report of the driver.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Look {
    /// The state of the driver.
    pub driver: Driver,
    /// The GPUs, in the order of the driver.
    pub gpus: Vec<Seen>,
}

/// The state of the driver.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Driver {
    /// There is no library of a driver: the usual machine without a GPU.
    #[default]
    Absent,
    /// The library is there, and the kernel module is not loaded.
    NotLoaded,
    /// Library and kernel module are of different versions, as after an upgrade without a restart.
    Mismatch {
        /// The message of the library.
        detail: String,
    },
    /// It answers with an error.
    Failed {
        /// The error.
        detail: String,
    },
    /// It did not answer in time.
    Hung {
        /// How long the wait was, in seconds.
        after_s: u64,
    },
    /// It works.
    Works {
        /// The version of the driver, for example `550.54.15`.
        version: String,
        /// The newest CUDA it can serve, for example `12.4`; empty when unknown.
        cuda: String,
    },
}

/// One GPU as the driver sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Seen {
    /// The driver's number.
    pub index: u32,
    /// The stable identifier; empty when the GPU does not even report that.
    pub uuid: String,
    /// The number in the name of its device node, `/dev/nvidia0` and so on.
    pub minor: Option<u32>,
    /// The product name.
    pub name: String,
    /// Memory in bytes.
    pub memory: Option<u64>,
    /// Memory in use, in bytes.
    pub used: Option<u64>,
    /// The processes that use it; `None` when unknown.
    pub processes: Option<Vec<GpuProcess>>,
    /// How busy it was lately, in percent.
    pub utilization: Option<u32>,
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// Milliwatts.
    pub power: Option<u32>,
    /// It is divided; then jobs are given its parts.
    pub mig: bool,
    /// Its parts, when it is divided.
    pub parts: Vec<Part>,
    /// Its PCI address, for example `0000:3b:00.0`; empty when unknown.
    pub pci: String,
    /// Why it cannot be used: lost from the bus, in need of a reset, an identifier that is not one.
    pub broken: Option<String>,
    /// The last error about it that the kernel logged since boot; also `None` when the log cannot be read.
    pub xid: Option<Xid>,
}

impl Seen {
    /// Whether a process uses it or one of its parts, as far as the driver reports.
    pub fn is_in_use(&self) -> bool {
        let some =
            |processes: &Option<Vec<GpuProcess>>| processes.as_ref().is_some_and(|all| !all.is_empty());
        some(&self.processes) || self.parts.iter().any(|part| some(&part.processes))
    }
}

/// An error that the driver logged about a GPU. Old errors remain in the log, also when the GPU was repaired since,
/// so one alone proves nothing: compare with an earlier [`Look`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Xid {
    /// Its number in NVIDIA's list.
    pub code: u32,
    /// When, in microseconds since boot.
    pub at_us: u64,
    /// What the driver wrote after the number.
    pub detail: String,
}

impl Xid {
    /// Whether the GPU cannot be trusted until it is reset, or the machine restarted. The other numbers are mostly
    /// mistakes of a program, which harm that program alone.
    pub fn is_fatal(&self) -> bool {
        matches!(self.code, 48 | 62 | 64 | 79 | 95 | 119 | 120 | 140)
    }
}

/// A part of a divided GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Part {
    /// The stable identifier, which begins with `MIG-`.
    pub uuid: String,
    /// Memory in bytes.
    pub memory: Option<u64>,
    /// Memory in use, in bytes.
    pub used: Option<u64>,
    /// The processes that use it; `None` when unknown.
    pub processes: Option<Vec<GpuProcess>>,
}

/// A process that uses a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuProcess {
    /// Its number on the machine.
    pub pid: u32,
    /// Its part of the GPU's memory, in bytes; `None` when unknown.
    pub memory: Option<u64>,
}
