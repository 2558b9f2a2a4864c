//! What a running job takes of its machine: measured each 10 s, kept as lines of a file beside its log.
//!
//! Owns that file, `log/system.jsonl` in the job directory, which only grows and is shipped like a log; and how often
//! a line is written ([`interval`]). Hides where the numbers come from: the job's control groups, which count all of
//! its processes together, and the latest look at its GPUs.
//!
//! Invariants: nothing here can fail or delay a job (a sample that cannot be taken or written is missing); only whole
//! lines are announced; the file grows by at most [`HOURLY`] bytes an hour, and by little after the first. A daemon that
//! was away leaves a gap in time, and the next one goes on in the same file.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use agent_model::system::{SystemInterval, SystemLine, SystemSample};
use agent_model::{ReplicaId, Timestamp, failpoint};
use agent_shim::cgroup::{GroupUsage, Groups};
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::debug;

/// How often a job is looked at.
const EVERY: Duration = Duration::from_secs(10);
/// When it is looked at first: most short jobs are over before.
const FIRST: Duration = Duration::from_secs(2);
/// The most bytes in an hour.
const HOURLY: u64 = 1_000_000;
/// What they are planned for: the first line comes early, and looks are not on the second.
const PACE: f64 = 0.9 * HOURLY as f64;
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// Timers are late, and no line waits for another look because of that.
const SLACK: Duration = Duration::from_secs(1);
const MEGABYTE: f64 = 1e6;

/// How much time a line stands for that has `bytes`, of a job of this age: 10 s in the first hour, a minute in the first
/// day, then ten minutes; more where the lines are long, because the job has many GPUs.
fn interval(age: Duration, bytes: usize) -> Duration {
    let usual = match age {
        age if age < HOUR => EVERY,
        age if age < DAY => Duration::from_secs(60),
        _ => Duration::from_secs(600),
    };
    usual.max(HOUR.mul_f64(bytes as f64 / PACE))
}

/// What each running job of the node used when it was looked at last. Clones show the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunningUse(Arc<Mutex<BTreeMap<ReplicaId, GroupUsage>>>);

/// Shows what one job takes, for as long as it is held.
#[derive(Debug)]
pub(crate) struct ShownUse {
    taken: RunningUse,
    replica: ReplicaId,
}

impl RunningUse {
    /// All of them.
    pub(crate) fn all(&self) -> BTreeMap<ReplicaId, GroupUsage> {
        self.0.lock().clone()
    }

    /// For a job of which nothing is known yet.
    pub(crate) fn by(&self, replica: &ReplicaId) -> ShownUse {
        self.0.lock().insert(replica.clone(), GroupUsage::default());
        ShownUse { taken: self.clone(), replica: replica.clone() }
    }
}

impl ShownUse {
    fn show(&self, usage: GroupUsage) {
        self.taken.0.lock().insert(self.replica.clone(), usage);
    }
}

impl Drop for ShownUse {
    fn drop(&mut self) {
        self.taken.0.lock().remove(&self.replica);
    }
}

/// Measures one job.
#[derive(Debug)]
pub(crate) struct Sampler {
    groups: Groups,
    shown: ShownUse,
    /// The processors of the machine that jobs may use.
    cpus: f64,
    /// When the command was started.
    started: Timestamp,
    interval: SystemInterval,
    /// When the interval began.
    begun: Timestamp,
    /// The time of processors that the job had used at the last look, and when that was.
    used: Option<(Duration, Instant)>,
    /// When to look next.
    due: Instant,
    file: Option<File>,
    /// How many bytes of the file are whole lines.
    length: u64,
    /// The length of the last line; 0 before the first.
    last_line: usize,
}

impl Sampler {
    /// For a job whose command was started then, with what counts it. Its use is counted from now on. Blocks.
    pub(crate) fn new(groups: Groups, shown: ShownUse, started: Timestamp, now: Timestamp) -> Sampler {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let at = Instant::now();
        Sampler {
            used: groups.usage().cpu.map(|cpu| (cpu, at)),
            groups,
            shown,
            cpus: cpus as f64,
            started,
            interval: SystemInterval::default(),
            begun: now,
            due: at + FIRST,
            file: None,
            length: 0,
            last_line: 0,
        }
    }

    /// When to look next.
    pub(crate) fn due(&self) -> Instant {
        self.due
    }

    /// Looks at the job, and writes a line to `path` if it is time for one. Returns how many bytes of the file are whole
    /// lines. Blocks.
    pub(crate) fn look(&mut self, path: &Path, gpus: SystemSample, now: Timestamp) -> u64 {
        let at = Instant::now();
        self.due = at + EVERY;
        let usage = self.groups.usage();
        self.shown.show(usage);
        let mut sample = self.sample(usage, at);
        sample.values.extend(gpus.values);
        sample.absent.extend(gpus.absent);
        self.interval.add(sample);
        let wanted = interval(now.since(self.started), self.last_line);
        if self.last_line == 0 || now.since(self.begun) + SLACK >= wanted {
            return self.end(path, now);
        }
        self.length
    }

    /// Writes a line for the interval, because it is over or the job is. Returns as [`look`](Self::look). Blocks.
    pub(crate) fn end(&mut self, path: &Path, now: Timestamp) -> u64 {
        let seconds = now.since(self.begun).as_millis().div_ceil(1000);
        self.begun = now;
        if let Some(line) = self.interval.end(now, u64::try_from(seconds).unwrap_or(u64::MAX))
            && let Err(error) = self.write(path, &line)
        {
            debug!(path = %path.display(), %error, "cannot keep what a job takes of its machine");
            self.file = None; // its end is looked for again
        }
        self.length
    }

    fn sample(&mut self, usage: GroupUsage, at: Instant) -> SystemSample {
        let mut sample = SystemSample::default();
        let uncounted = match self.groups.dirs() {
            [] => "the job has no control group of its own",
            _ => "its control groups do not count it",
        };
        let before = std::mem::replace(&mut self.used, usage.cpu.map(|cpu| (cpu, at)));
        let cores = match (before, usage.cpu) {
            (Some((before, then)), Some(cpu)) if at > then => {
                Ok(cpu.saturating_sub(before).as_secs_f64() / (at - then).as_secs_f64())
            }
            _ => Err(uncounted),
        };
        let megabytes = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64 / MEGABYTE).ok_or(uncounted);
        let of_limit = |used: Option<u64>| match (used, usage.limit) {
            (None, _) => Err(uncounted),
            (_, None | Some(0)) => Err("its memory is not limited"),
            (Some(used), Some(limit)) => Ok(100.0 * used as f64 / limit as f64),
        };
        sample.set("cpu_cores", cores);
        sample.set("cpu_utilization_percentage", cores.map(|cores| 100.0 * cores / self.cpus));
        sample.set("system_memory_usage_megabytes", megabytes(usage.memory));
        sample.set("system_memory_usage_percentage", of_limit(usage.memory));
        sample.set("memory_peak_megabytes", megabytes(usage.peak));
        sample.set("disk_read_megabytes", megabytes(usage.read));
        sample.set("disk_write_megabytes", megabytes(usage.written));
        sample.set("processes", usage.tasks.map(|tasks| tasks as f64).ok_or(uncounted));
        let shared = Err("jobs share the network of their machine, which counts no job");
        sample.set("network_receive_megabytes", shared);
        sample.set("network_transmit_megabytes", shared);
        sample
    }

    fn write(&mut self, path: &Path, line: &SystemLine) -> io::Result<()> {
        failpoint::hit("node.system.write")?;
        let file = match &self.file {
            Some(file) => file,
            None => {
                let file = open(path)?;
                self.length = file.metadata()?.len();
                self.file.insert(file)
            }
        };
        let line = line.to_line();
        file.write_all_at(line.as_bytes(), self.length)?;
        self.length += line.len() as u64;
        self.last_line = line.len();
        Ok(())
    }
}

/// The file, which ends with a line feed: the rest of a line that was not written to its end is made one that is none.
fn open(path: &Path) -> io::Result<File> {
    let mut file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
    let length = file.metadata()?.len();
    let mut last = [b'\n'];
    file.read_at(&mut last, length.saturating_sub(1))?;
    if last != [b'\n'] {
        failpoint::hit("node.system.write")?;
        file.write_all(b"\n")?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The lines of a job with `gpus` GPUs that was followed for so many hours: how long they are, hour by hour.
    fn hours(gpus: usize, hours: u64) -> Vec<u64> {
        let mut values = SystemSample::default();
        for value in 0..8 {
            values.set(format!("system_memory_usage_{value}_percentage"), Ok(0.1));
        }
        for gpu in 0..gpus {
            for name in ["utilization_percentage", "memory_usage_megabytes", "memory_usage_percentage"] {
                values.set(format!("gpu_{gpu}_{name}"), Ok(0.1));
            }
        }
        let line = |spread: f64| {
            let mut interval = SystemInterval::default();
            for add in [0.0, spread] {
                let mut sample = values.clone();
                sample.values.values_mut().for_each(|value| *value += 12_345.0 + add);
                interval.add(sample);
            }
            interval.end(Timestamp(1_700_000_000_000), 10).unwrap().to_line().len()
        };
        let (mut age, mut last, mut written) = (FIRST, 0, vec![0; usize::try_from(hours).unwrap() + 1]);
        while age < HOUR * u32::try_from(hours).unwrap() {
            last = line(0.7);
            written[usize::try_from(age.as_secs() / 3600).unwrap()] += last as u64;
            age += interval(age, last);
        }
        assert!(last > 0);
        written.pop();
        written
    }

    #[test]
    fn test_a_job_writes_at_most_a_megabyte_an_hour_and_little_after_the_first() {
        for gpus in [0, 1, 8, 16, 64] {
            let written = hours(gpus, 40);
            assert!(written.iter().all(|bytes| *bytes <= HOURLY), "{gpus}: {written:?}");
            assert!(written[5] <= written[0].div_ceil(6) + 10_000 || gpus > 8, "{gpus}: {written:?}");
            assert!(written[30] <= HOURLY / 4, "{gpus}: {written:?}");
        }
    }

    fn shown() -> ShownUse {
        RunningUse::default().by(&"train.1.0".parse().unwrap())
    }

    #[test]
    fn test_a_job_is_shown_as_long_as_it_is_followed() {
        let taken = RunningUse::default();
        let by = taken.by(&"train.1.0".parse().unwrap());
        by.show(GroupUsage { tasks: Some(7), ..GroupUsage::default() });
        assert_eq!(taken.all().values().next().unwrap().tasks, Some(7));
        drop(by);
        assert!(taken.all().is_empty());
    }

    fn group(at: &Path, cpu: u64, memory: u64) -> Groups {
        fs::create_dir_all(at).unwrap();
        fs::write(at.join("cpu.stat"), format!("usage_usec {cpu}\n")).unwrap();
        fs::write(at.join("memory.current"), memory.to_string()).unwrap();
        fs::write(at.join("memory.max"), "4000000").unwrap();
        Groups::new(vec![at.to_owned()])
    }

    #[test]
    fn test_a_job_is_measured_by_its_group_and_what_is_not_counted_is_absent() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("system.jsonl");
        let place = root.path().join("agentd-j");
        let mut sampler =
            Sampler::new(group(&place, 1_000_000, 0), shown(), Timestamp(1000), Timestamp(1000));
        assert_eq!(sampler.end(&path, Timestamp(1500)), 0, "a job that is over at once leaves no file");
        assert!(!path.exists());
        std::thread::sleep(Duration::from_millis(10));
        group(&place, 901_000_000, 1_000_000);
        let length = sampler.look(&path, SystemSample::default(), Timestamp(3000));
        assert_eq!(length, path.metadata().unwrap().len());
        let lines = SystemLine::read(&fs::read(&path).unwrap());
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert!(line.values["cpu_cores"].mean > 1.0);
        assert_eq!(line.values["system_memory_usage_percentage"].mean, 25.0);
        let absent = line.absent.as_ref().unwrap();
        assert!(
            absent.contains_key("disk_read_megabytes") && absent.contains_key("network_receive_megabytes")
        );
        assert!(!line.values.contains_key("disk_read_megabytes"), "and not 0");
        // The second interval is not over yet, and is written at the end.
        assert_eq!(sampler.look(&path, SystemSample::default(), Timestamp(5000)), length);
        assert!(sampler.end(&path, Timestamp(6000)) > length);
    }

    #[test]
    fn test_the_next_daemon_goes_on_after_half_a_line() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("system.jsonl");
        let whole = "{\"time\":1,\"seconds\":1,\"values\":{\"a\":1.0}}\n";
        fs::write(&path, format!("{whole}{{\"time\":2,\"sec")).unwrap();
        let mut sampler = Sampler::new(Groups::default(), shown(), Timestamp(0), Timestamp(10_000));
        let length = sampler.look(&path, SystemSample::default(), Timestamp(12_000));
        let file = fs::read(&path).unwrap();
        assert_eq!(file.len() as u64, length);
        let lines = SystemLine::read(&file);
        assert_eq!(lines.iter().map(|line| line.time.0).collect::<Vec<_>>(), [1, 12_000]);
        let absent = lines[1].absent.as_ref().unwrap();
        assert_eq!(absent["cpu_cores"], "the job has no control group of its own");
    }
}
