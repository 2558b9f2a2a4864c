//! What the driver says of the GPUs of a machine at one moment.
//!
//! Made by a short-lived process that alone loads the driver's library, read by the daemon. What the driver does
//! not tell is absent, never invented.

use serde::{Deserialize, Serialize};

/// What the driver says.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Look {
    /// How the driver is.
    pub driver: Driver,
    /// The GPUs, in the order of the driver.
    pub gpus: Vec<Seen>,
}

/// How the driver is.
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
        /// What the library says of it.
        detail: String,
    },
    /// It answers with an error.
    Failed {
        /// The error.
        detail: String,
    },
    /// It did not answer in time.
    Hung {
        /// How long it was waited for, in seconds.
        after_s: u64,
    },
    /// It works.
    Works {
        /// The version of the driver, for example `550.54.15`.
        version: String,
        /// The newest CUDA it can serve, for example `12.4`; empty when it does not say.
        cuda: String,
    },
}

/// One GPU as the driver sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Seen {
    /// The driver's number.
    pub index: u32,
    /// The stable identifier; empty when the GPU does not even tell that.
    pub uuid: String,
    /// The product name.
    pub name: String,
    /// Memory in bytes.
    pub memory: Option<u64>,
    /// Memory in use, in bytes.
    pub used: Option<u64>,
    /// Those who use it; `None` when it is not told.
    pub processes: Option<Vec<GpuProcess>>,
    /// How busy it was lately, in percent.
    pub utilization: Option<u32>,
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// Milliwatts.
    pub power: Option<u32>,
    /// It is divided; then its parts are what jobs are given.
    pub mig: bool,
    /// Its parts, when it is divided.
    pub parts: Vec<Part>,
    /// Where it is plugged in, for example `0000:3b:00.0`; empty when it is not told.
    pub pci: String,
    /// Why it cannot be used: lost from the bus, in need of a reset, an identifier that is not one.
    pub broken: Option<String>,
    /// The last error that the kernel logged of it since boot; `None` too when the log cannot be read.
    pub xid: Option<Xid>,
}

impl Seen {
    /// Whether somebody uses it, as far as the driver tells: a process, or of one of its parts.
    pub fn is_in_use(&self) -> bool {
        let some =
            |processes: &Option<Vec<GpuProcess>>| processes.as_ref().is_some_and(|all| !all.is_empty());
        some(&self.processes) || self.parts.iter().any(|part| some(&part.processes))
    }
}

/// An error that the driver logged of a GPU. Errors of long ago stay in the log, also when the GPU was mended
/// since, so one alone proves nothing: compare with a look from before.
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
    /// Whether the GPU cannot be trusted until it was reset, or the machine was started again. The other
    /// numbers are mostly mistakes of a program, which harm that program alone.
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
    /// Those who use it; `None` when it is not told.
    pub processes: Option<Vec<GpuProcess>>,
}

/// A process that uses a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuProcess {
    /// Its number on the machine.
    pub pid: u32,
    /// What it takes of the GPU's memory, in bytes; `None` when the driver does not say.
    pub memory: Option<u64>,
}
