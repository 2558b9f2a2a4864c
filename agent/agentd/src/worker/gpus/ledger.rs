//! The state of the GPUs of this machine, and which replicas have them. Pure.
//!
//! Invariants: whether a GPU is handed out follows from the latest look and from its holder, never from a mark that
//! must be removed later. One without a holder that is not empty (a process uses it, or its memory is in use) is
//! quarantined until the first look that finds it empty; one whose job has ended, but was not seen empty since, waits
//! for a later look. A GPU that the driver does not list any more is still listed here, as lost; parts of divided
//! GPUs are only listed as long as they exist or are held.

use std::collections::{BTreeMap, BTreeSet};

use agent_model::gpu::{Driver, GpuProcess, Look, Seen};
use agent_model::node::{Finding, Gpu};
use agent_model::{ReplicaId, size};

use super::assign::{Wait, assign};
use super::owner::Owners;

/// How much memory an empty GPU may have in use above its use without jobs: in bytes, or in percent of its memory if
/// that is more.
const SLACK: (u64, u64) = (256 << 20, 2);
/// The most memory that counts as use without jobs, in percent: drivers and screens take some.
const IDLE_AT_MOST: u64 = 10;

/// A GPU or a part of one, as last seen.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Unit {
    index: u32,
    uuid: String,
    name: String,
    memory: Option<u64>,
    used: Option<u64>,
    processes: Option<Vec<GpuProcess>>,
    broken: Option<String>,
}

/// Why a GPU without a holder is not handed out. The first text is kept as long as the processes are the same, so
/// that changing numbers do not change the published state.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Dirt {
    pids: BTreeSet<u32>,
    words: String,
}

/// The state of the GPUs.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// The latest look.
    look: Look,
    /// There has been a driver at some time.
    had_driver: bool,
    units: Vec<Unit>,
    held: BTreeMap<String, ReplicaId>,
    /// Replicas whose job has ended and whose GPUs are being checked.
    ending: BTreeSet<ReplicaId>,
    /// The least memory in use of each when it was empty, in bytes.
    idle: BTreeMap<String, u64>,
    dirt: BTreeMap<String, Dirt>,
    /// Those that must be looked at again, with the number of the first look that counts.
    unproven: BTreeMap<String, u64>,
    /// The owners of the processes of the latest look, as text.
    owners: Owners,
    /// The time of the last logged error of each when it was first seen: earlier errors do not count.
    errors: BTreeMap<String, u64>,
    /// Jobs can open the nodes of GPUs that they were not given.
    open_to_all: bool,
}

impl Ledger {
    /// Jobs can open the nodes of GPUs that they were not given, if `open`.
    pub(super) fn leave_open(&mut self, open: bool) {
        self.open_to_all = open;
    }

    /// With the GPUs of replicas of an earlier process of the daemon.
    pub(super) fn new(held: impl IntoIterator<Item = (ReplicaId, Vec<String>)>) -> Ledger {
        let mut ledger = Ledger::default();
        for (replica, gpus) in held {
            ledger.held.extend(gpus.into_iter().map(|gpu| (gpu, replica.clone())));
        }
        ledger
    }

    /// Whether to look often: there are GPUs, or jobs that have some.
    pub(super) fn is_in_use(&self) -> bool {
        !self.units.is_empty() || !self.held.is_empty()
    }

    /// The processes of a look whose owners must be found: those on GPUs that no job should use.
    pub(super) fn strangers(&self, look: &Look) -> BTreeSet<u32> {
        let taken = |uuid: &str| self.held.get(uuid).is_some_and(|replica| !self.ending.contains(replica));
        let units = look.gpus.iter().flat_map(units_of);
        let odd = units.filter(|unit| !taken(&unit.uuid));
        odd.flat_map(|unit| unit.processes.unwrap_or_default()).map(|process| process.pid).collect()
    }

    /// Takes in look number `number`; `owners` are the owners of its [`strangers`](Ledger::strangers).
    pub(super) fn absorb(&mut self, look: &Look, number: u64, owners: Owners) {
        self.look = look.clone();
        self.had_driver |= self.look.driver != Driver::Absent;
        if !self.works() {
            return;
        }
        self.owners = owners;
        self.unproven.retain(|_, needs| *needs > number);
        let mut names = BTreeSet::new();
        let errors = self.new_errors(look);
        let mut units: Vec<Unit> = Vec::new();
        for seen in &look.gpus {
            let error = errors.get(&seen.uuid);
            for unit in units_of(seen) {
                let broken = unit.broken.clone().or_else(|| error.cloned());
                units.push(self.recognised(Unit { broken, ..unit }, &look.gpus));
            }
        }
        units.retain(|unit| unit.uuid.is_empty() || names.insert(unit.uuid.clone()));
        let wholes: BTreeSet<&str> = look.gpus.iter().map(|seen| seen.uuid.as_str()).collect();
        for known in std::mem::take(&mut self.units) {
            let gone = !names.contains(&known.uuid) && !wholes.contains(known.uuid.as_str());
            let part = known.uuid.starts_with("MIG-");
            if gone && !known.uuid.is_empty() && (!part || self.held.contains_key(&known.uuid)) {
                let broken = Some("it is lost: the driver does not list it any more".to_owned());
                units.push(Unit { broken, processes: None, used: None, ..known });
            }
        }
        units.sort_by_key(|unit| unit.index); // stable: parts keep their order
        self.units = units;
        self.judge();
    }

    /// Fatal errors of GPUs that were logged since they were first seen, or reappeared.
    fn new_errors(&mut self, look: &Look) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        self.errors.retain(|uuid, _| look.gpus.iter().any(|seen| seen.uuid == *uuid));
        for seen in look.gpus.iter().filter(|seen| !seen.uuid.is_empty()) {
            let at = seen.xid.as_ref().map_or(0, |xid| xid.at_us);
            let before = *self.errors.entry(seen.uuid.clone()).or_insert(at);
            if let Some(xid) = seen.xid.as_ref().filter(|xid| xid.is_fatal() && at > before) {
                let detail = format!(
                    "the kernel logged Xid {} of it, after which it needs a reset: {}",
                    xid.code, xid.detail
                );
                found.insert(seen.uuid.clone(), detail);
            }
        }
        found
    }

    /// Completes a broken GPU that does not report its identifier any more from what was known of it.
    fn recognised(&self, unit: Unit, seen: &[Seen]) -> Unit {
        let known = self
            .units
            .iter()
            .find(|known| known.index == unit.index && !seen.iter().any(|seen| seen.uuid == known.uuid));
        match known {
            Some(known) if unit.uuid.is_empty() && unit.broken.is_some() => {
                Unit { broken: unit.broken, processes: None, used: None, ..known.clone() }
            }
            _ => unit,
        }
    }

    /// Finds which GPUs without a holder are not empty.
    fn judge(&mut self) {
        let before = std::mem::take(&mut self.dirt);
        for unit in
            self.units.iter().filter(|unit| unit.broken.is_none() && !self.held.contains_key(&unit.uuid))
        {
            match dirt(unit, self.idle.get(&unit.uuid).copied(), &self.owners) {
                Some(dirt) => {
                    let old = before.get(&unit.uuid).filter(|old| old.pids == dirt.pids).cloned();
                    self.dirt.insert(unit.uuid.clone(), old.unwrap_or(dirt));
                }
                None => {
                    let least = self.idle.entry(unit.uuid.clone()).or_insert(u64::MAX);
                    *least = unit.used.unwrap_or(u64::MAX).min(*least);
                }
            }
        }
    }

    /// Gives a replica `wanted` GPUs, or returns what it waits for. GPUs that it had are given back first.
    pub(super) fn assign(&mut self, replica: &ReplicaId, wanted: u32) -> Result<Vec<String>, Wait> {
        self.held.retain(|_, holder| holder != replica);
        self.ending.remove(replica);
        self.judge();
        let given = assign(&self.gpus(), &self.held, wanted)?;
        self.held.extend(given.iter().map(|uuid| (uuid.clone(), replica.clone())));
        self.judge();
        Ok(given)
    }

    /// The GPUs of a replica.
    pub(super) fn held_by(&self, replica: &ReplicaId) -> Vec<String> {
        self.held.iter().filter(|(_, holder)| *holder == replica).map(|(uuid, _)| uuid.clone()).collect()
    }

    /// The numbers of the device nodes of these GPUs, or of those that they are parts of; `None` if one is unknown.
    pub(super) fn minors(&self, gpus: &[String]) -> Option<Vec<u32>> {
        let has =
            |seen: &&Seen, gpu: &String| seen.uuid == *gpu || seen.parts.iter().any(|part| part.uuid == *gpu);
        gpus.iter().map(|gpu| self.look.gpus.iter().find(|seen| has(seen, gpu))?.minor).collect()
    }

    /// The job of a replica has ended: from now on no process should use its GPUs.
    pub(super) fn ends(&mut self, replica: &ReplicaId) {
        self.ending.insert(replica.clone());
    }

    /// Whether to wait until the GPUs of an ended job are empty: not if they are empty already, or if the driver or
    /// the GPU does not answer.
    pub(super) fn may_clear(&self, replica: &ReplicaId) -> bool {
        let dirty = |unit: &Unit| {
            unit.broken.is_none() && dirt(unit, self.idle.get(&unit.uuid).copied(), &self.owners).is_some()
        };
        self.works() && self.units_of(replica).any(dirty)
    }

    /// Takes back the GPUs of a replica. If they were not looked at after the end of the job, nobody gets them before
    /// the look with the number in `unseen`.
    pub(super) fn release(&mut self, replica: &ReplicaId, unseen: Option<u64>) {
        for uuid in self.held_by(replica) {
            self.held.remove(&uuid);
            if let Some(next) = unseen {
                self.unproven.insert(uuid, next);
            }
        }
        self.ending.remove(replica);
        self.judge();
    }

    /// What is wrong with the GPUs of a replica, one line each, for users.
    pub(super) fn trouble(&self, replica: &ReplicaId) -> Vec<String> {
        let line = |unit: &Unit| {
            unit.broken.as_ref().map(|broken| format!("GPU {} ({}): {broken}", unit.index, unit.uuid))
        };
        self.units_of(replica).filter_map(line).collect()
    }

    fn units_of(&self, replica: &ReplicaId) -> impl Iterator<Item = &Unit> {
        self.units.iter().filter(move |unit| self.held.get(&unit.uuid) == Some(replica))
    }

    /// The latest look.
    pub(super) fn look(&self) -> &Look {
        &self.look
    }

    fn works(&self) -> bool {
        matches!(self.look.driver, Driver::Works { .. })
    }

    /// The GPUs as the controller and users see them.
    pub(super) fn gpus(&self) -> Vec<Gpu> {
        let gpu = |unit: &Unit| Gpu {
            index: unit.index,
            uuid: unit.uuid.clone(),
            name: unit.name.clone(),
            memory: unit.memory.unwrap_or(0),
            held: self.held.get(&unit.uuid).map(ToString::to_string),
            unfit: self.unfit(unit),
        };
        self.units.iter().map(gpu).collect()
    }

    fn unfit(&self, unit: &Unit) -> Option<String> {
        let quarantined = |words: &str| Some(format!("quarantined: {words}"));
        if !self.works() {
            return Some(condition(&self.look.driver));
        }
        if unit.broken.is_some() {
            return unit.broken.clone();
        }
        if unit.uuid.is_empty() {
            return Some("it does not tell its identifier".to_owned());
        }
        if self.unproven.contains_key(&unit.uuid) {
            return quarantined("it was not looked at since its job ended");
        }
        self.dirt.get(&unit.uuid).and_then(|dirt| quarantined(&dirt.words))
    }

    /// Whether there are any; `None` when the driver does not answer.
    pub(super) fn are_there(&self) -> Option<bool> {
        match self.look.driver {
            Driver::Works { .. } | Driver::Absent | Driver::NotLoaded => Some(!self.look.gpus.is_empty()),
            Driver::Mismatch { .. } | Driver::Failed { .. } | Driver::Hung { .. } => None,
        }
    }

    /// The version of the driver and its CUDA; empty when it does not work.
    pub(super) fn versions(&self) -> (String, String) {
        match &self.look.driver {
            Driver::Works { version, cuda } => (version.clone(), cuda.clone()),
            _ => (String::new(), String::new()),
        }
    }

    /// The finding about the GPUs as a whole; `None` where there never was a driver.
    pub(super) fn finding(&self) -> Option<Finding> {
        if !self.had_driver {
            return None;
        }
        let told = agent_node::gpu::finding(&self.look);
        let gpus = self.gpus();
        let unfit = |gpu: &Gpu| gpu.unfit.as_ref().map(|unfit| format!("GPU {}: {unfit}", gpu.index));
        let unfit: Vec<String> = gpus.iter().filter_map(unfit).collect();
        if !unfit.is_empty() && self.look.driver == Driver::Absent {
            // On a machine that never had a driver this would be normal.
            let fix = "install the GPU driver again: `sudo ubuntu-drivers install`, then `sudo reboot`";
            let means = "jobs that ask for GPUs wait";
            return Some(Finding::limited(&told.topic, condition(&self.look.driver), means, fix));
        }
        if unfit.is_empty() && self.works() && self.open_to_all && !gpus.is_empty() {
            let means = "a job can open GPUs that it was not given";
            return Some(Finding::limited(&told.topic, told.found, means, BLOCK));
        }
        if unfit.is_empty() || !self.works() {
            return Some(told);
        }
        let means = format!("{} of {} not handed out: {}", unfit.len(), gpus.len(), unfit.join("; "));
        let fix = told.fix.unwrap_or_else(|| FREE.to_owned());
        Some(Finding::limited(&told.topic, told.found, means, fix))
    }
}

/// What to do about a GPU that is not handed out although it is not broken.
const FREE: &str = "end the processes that are named, and it is handed out again; memory that is left without a process \
                    goes with a reset: `nvidia-smi --gpu-reset -i N`";

/// What to do where jobs can open all GPUs.
const BLOCK: &str = "let the daemon make control groups and load programs for devices: outside of a container, or in one \
                     with `--cgroupns private --cap-add SYS_ADMIN`; jobs in containers see their own GPUs alone";

/// The topic of the finding about GPUs.
pub(super) const TOPIC: &str = "gpu";

/// A text about the state of a driver.
fn condition(driver: &Driver) -> String {
    match driver {
        Driver::Works { .. } => "the GPU driver works".to_owned(),
        Driver::Absent => "there is no GPU driver any more".to_owned(),
        Driver::NotLoaded => "the kernel module of the GPU driver is not loaded".to_owned(),
        Driver::Mismatch { detail } => {
            format!("the library and the kernel module of the GPU driver do not belong together: {detail}")
        }
        Driver::Failed { detail } => format!("the GPU driver fails: {detail}"),
        Driver::Hung { after_s } => format!("the GPU driver did not answer within {after_s} s"),
    }
}

/// The units of a GPU that can be given: its parts if it is divided (MIG), or else itself.
fn units_of(seen: &Seen) -> Vec<Unit> {
    let whole = Unit {
        index: seen.index,
        uuid: seen.uuid.clone(),
        name: seen.name.clone(),
        memory: seen.memory,
        used: seen.used,
        processes: seen.processes.clone(),
        broken: seen.broken.clone(),
    };
    match (seen.mig, seen.parts.is_empty()) {
        (true, true) => {
            let broken =
                whole.broken.clone().or_else(|| Some("it is divided (MIG) and has no parts".to_owned()));
            vec![Unit { broken, ..whole }]
        }
        (_, true) => vec![whole],
        (_, false) => {
            let part = |part: &agent_model::gpu::Part| Unit {
                uuid: part.uuid.clone(),
                name: format!("{} (part)", seen.name),
                memory: part.memory,
                used: part.used,
                processes: part.processes.clone(),
                ..whole.clone()
            };
            seen.parts.iter().map(part).collect()
        }
    }
}

/// What uses a GPU that should be empty.
fn dirt(unit: &Unit, idle: Option<u64>, owners: &Owners) -> Option<Dirt> {
    const SHOWN: usize = 3;
    let all = unit.processes.as_deref().unwrap_or_default();
    let draws = |process: &&GpuProcess| matches!(owners.get(&process.pid), Some(None));
    let processes: Vec<&GpuProcess> = all.iter().filter(|process| !draws(process)).collect();
    if !processes.is_empty() {
        let mut words: Vec<String> =
            processes.iter().take(SHOWN).map(|process| culprit(process, owners)).collect();
        let more = processes.len().saturating_sub(SHOWN);
        words.extend((more > 0).then(|| format!("and {more} more")));
        let pids = processes.iter().map(|process| process.pid).collect();
        return Some(Dirt { pids, words: words.join(", ") });
    }
    let (memory, used) = (unit.memory?, unit.used?);
    let idle = idle.unwrap_or(u64::MAX).min(memory / 100 * IDLE_AT_MOST);
    let limit = idle.saturating_add(SLACK.0.max(memory / 100 * SLACK.1));
    let words =
        || format!("{} of its memory are in use, and the driver names no process", size::binary(used));
    (used > limit).then(|| Dirt { pids: BTreeSet::new(), words: words() })
}

/// `process 4711 (python) of nobody's job uses 3.2 GiB of it`
fn culprit(process: &GpuProcess, owners: &Owners) -> String {
    let owner =
        owners.get(&process.pid).cloned().flatten().map_or_else(String::new, |owner| format!(" {owner}"));
    match process.memory {
        Some(memory) => format!("process {}{owner} uses {} of it", process.pid, size::binary(memory)),
        None => format!("process {}{owner} uses it", process.pid),
    }
}

#[cfg(test)]
mod tests;
