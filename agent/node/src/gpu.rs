//! The GPUs of this machine, as the driver's library (NVML) reports them.
//!
//! Owns the only place where that library is loaded ([`look`]), the format in which its answers are passed on
//! ([`parse`]) and what they mean for jobs ([`finding`]). Hides the library: versions of its calls, its error
//! numbers, values that a model does not have, and GPUs that are lost while they are asked.
//!
//! Invariants: [`look`] may hang, crash or be killed at any of its calls, so it is called in a process of its own,
//! which ends afterwards; it waits for nothing but the library. A value that is not reported is `None`; only trouble
//! of the GPU itself makes it `broken`. A look that passed [`parse`] contains no control characters, and each
//! identifier only once.
//!
//! [`look`] is called by the command `gpu-look`, the others by the daemon that started it. No tasks.

mod xid;

use std::path::Path;

use agent_model::gpu::{Driver, GpuProcess, Look, Part, Seen};
use agent_model::node::Finding;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::{MemoryInfo, ProcessInfo};
use nvml_wrapper::{Device, Nvml};

use crate::Machine;

/// The name under which the system finds the driver's library.
pub const LIBRARY: &str = "libnvidia-ml.so.1";

/// Where a kernel with a driver shows one: the last is that of Windows under its Linux.
pub const TRACES: &[&str] = &["/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg"];

/// The longest printed look, in bytes; a hundred GPUs with a hundred processes each fit.
pub const LONGEST: usize = 1 << 20;

/// No machine has more GPUs, and no GPU more parts.
const MOST: u32 = 256;
/// The most processes of a GPU that are kept: all in practice, and few enough to fit into [`LONGEST`].
const MOST_PROCESSES: usize = 200;
/// How often a list that grew while it was read is asked for.
const TRIES: u32 = 3;

/// Looks at the GPUs through the driver's library: the one at `library`, or the one the system finds. May hang
/// for ever, and may take the whole process with it.
pub fn look(library: Option<&Path>) -> Look {
    look_on(&Machine::here(), library.unwrap_or(Path::new(LIBRARY)))
}

/// What a look means for the jobs of this machine.
pub fn finding(look: &Look) -> Finding {
    crate::findings::gpus(look)
}

/// Why a printed text is not a look.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ParseError {
    #[error("what was said of the GPUs has {bytes} bytes, more than {LONGEST}")]
    TooLong { bytes: usize },
    #[error("what was said of the GPUs cannot be read")]
    Garbled(#[from] serde_json::Error),
    #[error("what was said of the GPUs cannot be true: {what}")]
    Unsound { what: String },
}

/// Parses the output of a process that called [`look`]: one line of JSON.
pub fn parse(printed: &[u8]) -> Result<Look, ParseError> {
    if printed.len() > LONGEST {
        return Err(ParseError::TooLong { bytes: printed.len() });
    }
    let look: Look = serde_json::from_slice(printed)?;
    let unsound = |what: &str| Err(ParseError::Unsound { what: what.to_owned() });
    let broken = look.gpus.iter().filter_map(|gpu| gpu.broken.as_ref());
    let words = look.gpus.iter().flat_map(|gpu| [&gpu.name, &gpu.pci]).chain(broken);
    if words.chain(said(&look.driver)).any(|text| text.chars().any(char::is_control)) {
        return unsound("it holds control characters");
    }
    let whole = look.gpus.iter().filter(|gpu| gpu.broken.is_none());
    let parts = whole.clone().flat_map(|gpu| &gpu.parts).map(|part| part.uuid.as_str());
    let mut names: Vec<&str> = whole.map(|gpu| gpu.uuid.as_str()).chain(parts).collect();
    if names.iter().any(|name| !is_identifier(name)) {
        return unsound("what identifies a GPU is not an identifier");
    }
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    match names.len() == count {
        true => Ok(look),
        false => unsound("two GPUs have one identifier"),
    }
}

fn said(driver: &Driver) -> Vec<&String> {
    match driver {
        Driver::Mismatch { detail } | Driver::Failed { detail } => vec![detail],
        Driver::Works { version, cuda } => vec![version, cuda],
        Driver::Absent | Driver::NotLoaded | Driver::Hung { .. } => Vec::new(),
    }
}

fn look_on(machine: &Machine, library: &Path) -> Look {
    let nvml = match Nvml::builder().lib_path(library.as_os_str()).init() {
        Ok(nvml) => nvml,
        Err(error) => return Look { driver: refused(&error, machine, library), gpus: Vec::new() },
    };
    let look = ask(&nvml, machine, library);
    // Shutting it down is one more call that may hang, and the process ends anyway.
    std::mem::forget(nvml);
    look
}

/// What it means that the library could not be loaded or initialised.
fn refused(error: &NvmlError, machine: &Machine, library: &Path) -> Driver {
    match error {
        NvmlError::LibloadingError(error) => unloadable(&tidy(&error.to_string()), machine, library),
        NvmlError::FailedToLoadSymbol(_) => {
            Driver::Failed { detail: format!("{} is not the library of a driver", library.display()) }
        }
        NvmlError::DriverNotLoaded => Driver::NotLoaded,
        // Libraries that were brought into a container report this, too, when the kernel module is missing.
        NvmlError::Unknown | NvmlError::NoPermission if !machine.at("dev/nvidiactl").exists() => {
            Driver::NotLoaded
        }
        NvmlError::LibRmVersionMismatch => Driver::Mismatch { detail: mismatch(machine) },
        other => Driver::Failed { detail: words(other) },
    }
}

/// A missing library is usual on a machine without a GPU; one that is there and cannot be loaded is not.
fn unloadable(why: &str, machine: &Machine, library: &Path) -> Driver {
    let named = library.components().count() > 1;
    let missing = match named {
        true => !library.exists(),
        false => why.starts_with(&*library.to_string_lossy()) && why.contains("No such file"),
    };
    // A program without a dynamic loader can load no library; without a driver that is no loss.
    let no_loader = !named && !machine.at("dev/nvidiactl").exists() && why.contains("not supported");
    if missing || no_loader { Driver::Absent } else { Driver::Failed { detail: why.to_owned() } }
}

fn mismatch(machine: &Machine) -> String {
    let text = machine.read("proc/driver/nvidia/version").unwrap_or_default();
    let first = text.lines().next().unwrap_or_default();
    let version = first.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    let differ = "the library and the kernel module of the driver are of different versions";
    match version {
        Some(version) => format!("{differ}; the kernel module is {}", tidy(version)),
        None => differ.to_owned(),
    }
}

/// Asks a library that is initialised.
fn ask(nvml: &Nvml, machine: &Machine, library: &Path) -> Look {
    let count = match nvml.device_count() {
        Ok(count) if count <= MOST => count,
        Ok(count) => {
            let driver = Driver::Failed { detail: format!("the driver counts {count} GPUs") };
            return Look { driver, gpus: Vec::new() };
        }
        Err(error) => return Look { driver: refused(&error, machine, library), gpus: Vec::new() },
    };
    let driver = Driver::Works {
        version: nvml.sys_driver_version().map(|version| tidy(&version)).unwrap_or_default(),
        cuda: nvml
            .sys_cuda_driver_version()
            .ok()
            .filter(|version| *version > 0)
            .map_or_else(String::new, |version| format!("{}.{}", version / 1000, version % 1000 / 10)),
    };
    let mut gpus: Vec<Seen> = (0..count).filter_map(|index| see(nvml, index)).collect();
    refuse_doubles(&mut gpus);
    let errors = if gpus.is_empty() { Vec::new() } else { xid::latest(&machine.at("dev/kmsg")) };
    for gpu in &mut gpus {
        let slot = xid::slot(&gpu.pci);
        gpu.xid = errors.iter().find(|(at, _)| Some(*at) == slot).map(|(_, xid)| xid.clone());
    }
    Look { driver, gpus }
}

/// Looks at one GPU; `None` when it disappeared since they were counted.
fn see(nvml: &Nvml, index: u32) -> Option<Seen> {
    let mut seen = Seen { index, ..Seen::default() };
    let device = match nvml.device_by_index(index) {
        Ok(device) => device,
        Err(NvmlError::InvalidArg | NvmlError::NotFound) => return None,
        Err(error) => {
            seen.broken = Some(words(&error));
            return Some(seen);
        }
    };
    match device.uuid() {
        Ok(uuid) if is_identifier(&uuid) => seen.uuid = uuid,
        Ok(_) | Err(NvmlError::Utf8Error(_)) => {
            seen.broken = Some("its identifier is not one".to_owned());
        }
        Err(error) => seen.broken = Some(format!("it does not tell its identifier: {}", words(&error))),
    }
    let mut asked = GpuLook { trouble: seen.broken.take() };
    asked.all(&device, &mut seen);
    seen.broken = asked.trouble;
    Some(seen)
}

/// The answers of one GPU. After the first sign of trouble nothing more is asked: each call to a GPU that is lost may
/// take long.
struct GpuLook {
    trouble: Option<String>,
}

impl GpuLook {
    fn all(&mut self, device: &Device<'_>, seen: &mut Seen) {
        seen.name = self.may_lack(|| device.name()).map(|name| tidy(&name)).unwrap_or_default();
        seen.minor = self.may_lack(|| device.minor_number());
        seen.pci = self.may_lack(|| device.pci_info()).map(|pci| address(&pci.bus_id)).unwrap_or_default();
        (seen.memory, seen.used) = memory(self.must_know(|| device.memory_info()));
        seen.processes = self.processes(device);
        let busy = self.may_lack(|| device.utilization_rates()).map(|rates| rates.gpu);
        seen.utilization = busy.filter(|percent| *percent <= 100);
        seen.temperature = self.may_lack(|| device.temperature(TemperatureSensor::Gpu));
        seen.power = self.may_lack(|| device.power_usage());
        seen.mig = self.may_lack(|| device.mig_mode()).is_some_and(|mode| mode.current == 1);
        if seen.mig {
            seen.parts = self.parts(device);
        }
    }

    /// A value that a GPU need not report: only an error of the GPU as a whole is trouble.
    fn may_lack<T>(&mut self, call: impl FnMut() -> Result<T, NvmlError>) -> Option<T> {
        self.answer(call, is_of_the_whole)
    }

    /// A value that every working GPU reports, unless its model has no such value.
    fn must_know<T>(&mut self, call: impl FnMut() -> Result<T, NvmlError>) -> Option<T> {
        self.answer(call, |error| {
            is_of_the_whole(error) || matches!(error, NvmlError::Unknown | NvmlError::Timeout)
        })
    }

    fn answer<T>(
        &mut self,
        mut call: impl FnMut() -> Result<T, NvmlError>,
        is_trouble: impl Fn(&NvmlError) -> bool,
    ) -> Option<T> {
        for _ in 0..TRIES {
            if self.trouble.is_some() {
                return None;
            }
            match call() {
                Ok(value) => return Some(value),
                Err(NvmlError::InsufficientSize(_)) => {} // it grew between the question how long and the list
                Err(error) if is_trouble(&error) => self.trouble = Some(words(&error)),
                Err(_) => return None,
            }
        }
        None
    }

    /// All processes that use it, once each. Unknown when the computing ones are.
    fn processes(&mut self, device: &Device<'_>) -> Option<Vec<GpuProcess>> {
        let compute = self.must_know(|| {
            newer(device.running_compute_processes(), || device.running_compute_processes_v2())
        })?;
        let graphics = self.may_lack(|| {
            newer(device.running_graphics_processes(), || device.running_graphics_processes_v2())
        });
        let shared = self.may_lack(|| device.mps_running_compute_processes());
        let mut all: Vec<GpuProcess> = Vec::new();
        for process in [Some(compute), graphics, shared].into_iter().flatten().flatten() {
            let memory = used_by(&process);
            let known = all.iter().position(|known| known.pid == process.pid);
            match known {
                Some(at) => all[at].memory = all[at].memory.max(memory),
                None if all.len() < MOST_PROCESSES => all.push(GpuProcess { pid: process.pid, memory }),
                None => {}
            }
        }
        all.sort_by_key(|process| process.pid);
        Some(all)
    }

    /// The parts of a divided GPU. An index without a part behind it is a free place.
    fn parts(&mut self, device: &Device<'_>) -> Vec<Part> {
        let places = self.may_lack(|| device.mig_device_count()).unwrap_or_default().min(MOST);
        let mut parts: Vec<Part> = Vec::new();
        for place in 0..places {
            let Some(part) = self.may_lack(|| device.mig_device_by_index(place)) else { continue };
            let Some(uuid) = self.may_lack(|| part.uuid()) else { continue };
            if !is_identifier(&uuid) || parts.iter().any(|known| known.uuid == uuid) {
                continue;
            }
            let (memory, used) = memory(self.may_lack(|| part.memory_info()));
            parts.push(Part { uuid, memory, used, processes: self.processes(&part) });
        }
        parts
    }
}

/// Whether an error concerns the whole GPU, and not only the value that was asked for.
fn is_of_the_whole(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::GpuLost | NvmlError::ResetRequired | NvmlError::IrqIssue | NvmlError::InsufficientPower
    )
}

/// The answer of a call, or of its older form where the driver does not know the call.
fn newer<T>(
    answer: Result<T, NvmlError>,
    older: impl FnOnce() -> Result<T, NvmlError>,
) -> Result<T, NvmlError> {
    match answer {
        Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => older(),
        answer => answer,
    }
}

/// Total memory, and how much of it is used; an impossible value is `None`.
fn memory(told: Option<MemoryInfo>) -> (Option<u64>, Option<u64>) {
    let Some(told) = told.filter(|told| told.total > 0) else { return (None, None) };
    (Some(told.total), Some(told.used).filter(|used| *used <= told.total))
}

fn used_by(process: &ProcessInfo) -> Option<u64> {
    match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    }
}

/// Two GPUs with one identifier: a program that is given it uses the first, so the other is refused.
fn refuse_doubles(gpus: &mut [Seen]) {
    for at in 1..gpus.len() {
        let (before, rest) = gpus.split_at_mut(at);
        let gpu = &mut rest[0];
        if gpu.uuid.is_empty() {
            continue;
        }
        if let Some(first) = before.iter().find(|other| other.uuid == gpu.uuid) {
            gpu.broken.get_or_insert(format!("it has the identifier of GPU {}", first.index));
        }
        let taken = |uuid: &str| before.iter().flat_map(|other| &other.parts).any(|part| part.uuid == uuid);
        gpu.parts.retain(|part| !taken(&part.uuid));
    }
}

/// Whether this can name a GPU in variables and lists, where a comma or a blank means more than one.
fn is_identifier(text: &str) -> bool {
    // Parts are called `MIG-GPU-…/1/0` by older drivers.
    let usual = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'/';
    !text.is_empty() && text.len() <= 96 && text.bytes().all(usual)
}

/// Text of the driver on one line, without control characters.
fn tidy(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect::<String>().trim().to_owned()
}

/// `00000000:3B:00.0` as other tools write it: `0000:3b:00.0`.
fn address(bus_id: &str) -> String {
    xid::slot(bus_id)
        .map_or_else(String::new, |(domain, bus, device)| format!("{domain:04x}:{bus:02x}:{device:02x}.0"))
}

/// An error of the library in words.
fn words(error: &NvmlError) -> String {
    match error {
        NvmlError::GpuLost => "it is lost: it fell off the bus, or cannot be reached otherwise".to_owned(),
        NvmlError::ResetRequired => "it must be reset before it can be used again".to_owned(),
        NvmlError::Unknown => "the driver answers with an unknown error".to_owned(),
        NvmlError::IrqIssue => "its interrupts do not arrive".to_owned(),
        NvmlError::InsufficientPower => "its power cables are not attached as they should be".to_owned(),
        NvmlError::NoPermission => "this user may not use it".to_owned(),
        NvmlError::UnexpectedVariant(code) => format!("the driver answers with error {code}"),
        other => tidy(&other.to_string()),
    }
}

#[cfg(test)]
mod tests;
