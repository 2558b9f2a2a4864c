//! What looks show of GPUs: as values that are kept about a job, and as numbers of the machine. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_model::ReplicaId;
use agent_model::gpu::{Driver, Look};
use agent_model::node::Gpu;
use agent_model::system::SystemSample;
use tokio::time::Instant;

/// More time than this between two looks counts as so much: nobody knows what was between.
const LONGEST: Duration = Duration::from_secs(60);

/// One GPU, or a part of one, in numbers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GpuNumbers {
    pub(crate) uuid: String,
    /// Who has it.
    pub(crate) held: Option<ReplicaId>,
    pub(crate) unfit: bool,
    /// From 0 to 1.
    pub(crate) utilization: Option<f64>,
    /// Bytes of its memory in use.
    pub(crate) used: Option<u64>,
    /// How long jobs had it and did not use it at all; `None` where that is not measured.
    pub(crate) idle: Option<Duration>,
}

/// How long each GPU was held and idle.
#[derive(Debug, Default)]
pub(super) struct IdleTimes {
    looked: Option<Instant>,
    times: BTreeMap<String, Duration>,
}

impl IdleTimes {
    /// Takes in a look made `at` this time.
    pub(super) fn absorb(&mut self, look: &Look, gpus: &[Gpu], at: Instant) {
        let before = self.looked.replace(at);
        let passed = before.map_or(Duration::ZERO, |before| (at - before).min(LONGEST));
        for gpu in gpus {
            let Some(busy) = find(look, &gpu.uuid).and_then(|seen| seen.utilization.ok()) else { continue };
            let time = self.times.entry(gpu.uuid.clone()).or_default();
            if gpu.held.is_some() && busy == 0.0 {
                *time += passed;
            }
        }
    }

    /// All GPUs that are known.
    pub(super) fn numbers(&self, look: &Look, gpus: &[Gpu]) -> Vec<GpuNumbers> {
        let works = matches!(look.driver, Driver::Works { .. });
        let of = |gpu: &Gpu| {
            let seen = find(look, &gpu.uuid).filter(|_| works);
            GpuNumbers {
                uuid: gpu.uuid.clone(),
                held: gpu.held.as_ref().and_then(|held| held.parse().ok()),
                unfit: gpu.unfit.is_some(),
                utilization: seen
                    .as_ref()
                    .and_then(|seen| seen.utilization.ok())
                    .map(|percent| percent / 100.0),
                used: seen.as_ref().and_then(|seen| seen.used),
                idle: self.times.get(&gpu.uuid).copied(),
            }
        };
        gpus.iter().map(of).collect()
    }
}

/// A GPU or a part of one, as it was measured.
struct Measured {
    utilization: Result<f64, &'static str>,
    used: Option<u64>,
    memory: Option<u64>,
    power: Result<f64, &'static str>,
    temperature: Option<u32>,
}

const UNTOLD: &str = "the driver does not tell it";
const PART: &str = "the driver does not measure it for a part of a GPU (MIG)";
const LOST: &str = "the driver does not list this GPU any more";
const MEGABYTE: f64 = 1e6;

/// The values of these GPUs, which are numbered in this order, as the job has them.
pub(super) fn sample(look: &Look, gpus: &[String]) -> SystemSample {
    let mut sample = SystemSample::default();
    let works = matches!(look.driver, Driver::Works { .. });
    for (number, uuid) in gpus.iter().enumerate() {
        let found = if works { find(look, uuid).ok_or(LOST) } else { Err("the GPU driver does not answer") };
        let mut set = |name: &str, value: &dyn Fn(&Measured) -> Result<f64, &'static str>| {
            sample.set(format!("gpu_{number}_{name}"), found.as_ref().map_err(|why| *why).and_then(value));
        };
        let used = |gpu: &Measured| gpu.used.map(|bytes| bytes as f64).ok_or(UNTOLD);
        set("utilization_percentage", &|gpu| gpu.utilization);
        set("memory_usage_megabytes", &|gpu| used(gpu).map(|bytes| bytes / MEGABYTE));
        set("memory_usage_percentage", &|gpu| {
            Ok(100.0 * used(gpu)? / gpu.memory.filter(|memory| *memory > 0).ok_or(UNTOLD)? as f64)
        });
        set("power_usage_watts", &|gpu| gpu.power);
        set("temperature_celsius", &|gpu| gpu.temperature.map(f64::from).ok_or(UNTOLD));
    }
    sample
}

fn find(look: &Look, uuid: &str) -> Option<Measured> {
    look.gpus.iter().find_map(|seen| {
        let (used, memory, is_part) = match seen.uuid == uuid {
            true => (seen.used, seen.memory, false),
            false => {
                let part = seen.parts.iter().find(|part| part.uuid == uuid)?;
                (part.used, part.memory, true)
            }
        };
        let of_whole = |value: Option<f64>| if is_part { Err(PART) } else { value.ok_or(UNTOLD) };
        Some(Measured {
            utilization: of_whole(seen.utilization.map(f64::from)),
            used,
            memory,
            power: of_whole(seen.power.map(|milliwatts| f64::from(milliwatts) / 1000.0)),
            temperature: seen.temperature,
        })
    })
}

#[cfg(test)]
mod tests {
    use agent_model::gpu::{Part, Seen};

    use super::*;

    fn look() -> Look {
        let whole = Seen {
            uuid: "GPU-a".into(),
            memory: Some(80_000_000_000),
            used: Some(20_000_000_000),
            utilization: Some(0),
            temperature: Some(41),
            power: Some(70_500),
            ..Seen::default()
        };
        let part = Part { uuid: "MIG-b".into(), memory: Some(10), used: Some(5), processes: None };
        let divided = Seen {
            uuid: "GPU-c".into(),
            mig: true,
            parts: vec![part],
            temperature: Some(50),
            ..whole.clone()
        };
        Look { driver: Driver::Works { version: "1".into(), cuda: "2".into() }, gpus: vec![whole, divided] }
    }

    #[test]
    fn test_gpus_are_numbered_as_the_job_has_them_and_what_is_not_measured_is_absent() {
        let sample = sample(&look(), &["MIG-b".into(), "GPU-a".into(), "GPU-gone".into()]);
        assert_eq!(sample.values["gpu_0_memory_usage_percentage"], 50.0);
        assert_eq!(sample.absent["gpu_0_utilization_percentage"], PART, "and not 0");
        assert_eq!(sample.values["gpu_1_utilization_percentage"], 0.0, "it is idle, which is known");
        assert_eq!(sample.values["gpu_1_power_usage_watts"], 70.5);
        assert_eq!(sample.values["gpu_1_memory_usage_megabytes"], 20_000.0);
        assert_eq!(sample.absent["gpu_2_power_usage_watts"], LOST);
    }

    #[test]
    fn test_only_time_in_which_a_job_had_a_gpu_and_did_not_use_it_is_idle() {
        let gpu = |uuid: &str, held: bool| Gpu {
            uuid: uuid.into(),
            held: held.then(|| "train.1.0".to_owned()),
            ..Gpu::default()
        };
        let (mut idle, mut look, at) = (IdleTimes::default(), look(), Instant::now());
        let held = [gpu("GPU-a", true), gpu("MIG-b", true)];
        let after = |seconds| at + Duration::from_secs(seconds);
        idle.absorb(&look, &held, after(0));
        idle.absorb(&look, &held, after(10));
        idle.absorb(&look, &[gpu("GPU-a", false)], after(20));
        idle.absorb(&look, &held, after(1020));
        look.gpus[0].utilization = Some(1);
        idle.absorb(&look, &held, after(1030));
        let numbers = idle.numbers(&look, &held);
        assert_eq!(numbers[0].idle, Some(Duration::from_secs(70)), "a long gap counts as a minute");
        assert_eq!((numbers[0].utilization, numbers[0].held.is_some()), (Some(0.01), true));
        assert_eq!((numbers[1].idle, numbers[1].utilization), (None, None), "nobody measures it");
        look.driver = Driver::Hung { after_s: 1 };
        let stuck = idle.numbers(&look, &held);
        assert_eq!((stuck[0].utilization, stuck[0].idle), (None, numbers[0].idle));
    }

    #[test]
    fn test_a_driver_that_does_not_answer_measures_nothing() {
        let hung = Look { driver: Driver::Hung { after_s: 10 }, ..look() };
        let sample = sample(&hung, &["GPU-a".into()]);
        assert!(sample.values.is_empty() && sample.absent.len() == 5, "{sample:?}");
    }
}
