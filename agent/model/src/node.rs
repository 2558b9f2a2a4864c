//! What a node reports about itself, and what that means for the jobs it runs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ReplicaId;

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
    /// The GPUs that jobs can be given, in the order of the driver: each part of a divided one, and the others whole.
    pub gpus: Vec<Gpu>,
    /// The version of the GPU driver, for example `550.54.15`; empty when none works.
    pub gpu_driver: String,
    /// The newest CUDA that it can serve, for example `12.4`; empty when unknown.
    pub cuda: String,
    /// How many replicas run at a time, at the most.
    pub slots: u32,
    /// Of its processors, those that are not given to jobs.
    pub reserved_cpus: u32,
    /// Of its memory, the bytes that are not given to jobs.
    pub reserved_memory: u64,
    /// The processors that a job counts for if it names none; 0 where jobs count only for what they name and `slots`
    /// says how many run at a time.
    pub job_cpus: u32,
    /// Labels that its operators set, so that jobs can ask for them.
    pub labels: BTreeMap<String, String>,
    /// It can run one rank of a job beside the ranks on other nodes.
    pub gangs: bool,
    /// Findings about this machine, good and bad.
    pub findings: Vec<Finding>,
    /// The interpreters that jobs can name, best first.
    pub interpreters: Vec<Interpreter>,
    /// The environments that are kept, in the order of their keys.
    pub environments: Vec<CachedEnvironment>,
    /// What it keeps of jobs that ended, because it is stored nowhere else.
    pub kept: Vec<KeptResult>,
}

/// What a node keeps of a replica that is over: outputs or logs that could not be stored.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KeptResult {
    /// Whose.
    pub replica: ReplicaId,
    /// Who submitted its job; empty if that is not known.
    #[serde(default)]
    pub owner: String,
    /// The room that it takes on the node's disk.
    pub bytes: u64,
}

/// How an operator says how many jobs a node runs at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slots {
    /// This many, whatever their size, while what they name fits.
    Number(u32),
    /// As many as fit by what they name, or else count for.
    Auto,
}

impl Slots {
    /// The most that can be set.
    pub const MOST: u32 = 1000;
    /// What a valid text is.
    pub const EXPECTED: &str = "a number of jobs from 1 to 1000, or `auto`";
}

impl std::str::FromStr for Slots {
    type Err = ();
    fn from_str(text: &str) -> Result<Slots, ()> {
        match text {
            "auto" => Ok(Slots::Auto),
            number => match number.parse() {
                Ok(number) if (1..=Slots::MOST).contains(&number) => Ok(Slots::Number(number)),
                _ => Err(()),
            },
        }
    }
}

impl std::fmt::Display for Slots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Slots::Number(number) => number.fmt(f),
            Slots::Auto => f.write_str("auto"),
        }
    }
}

/// As a number, or the word `auto`.
impl Serialize for Slots {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Slots::Number(number) => number.serialize(to),
            Slots::Auto => to.serialize_str("auto"),
        }
    }
}

impl<'de> Deserialize<'de> for Slots {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Slots, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Said {
            Number(u32),
            Word(String),
        }
        let text = match Said::deserialize(from)? {
            Said::Number(number) => number.to_string(),
            Said::Word(word) => word,
        };
        text.parse().map_err(|()| serde::de::Error::custom(format!("expected {}", Slots::EXPECTED)))
    }
}

/// An interpreter of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Interpreter {
    /// What a job calls it, for example `python3.11`.
    pub name: String,
    /// For example `3.11.7`.
    pub version: String,
}

/// An environment that a node keeps.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CachedEnvironment {
    /// Its kind and the start of its digest, for example `conda-3f0a9c1b2d4e`.
    pub key: String,
    /// What it was built from, for people: `conda.yml: python=3.11, scikit-learn, 2 pip packages`.
    pub summary: String,
    /// The version of its Python; empty for none.
    pub python: String,
    /// How many packages it has.
    pub packages: u32,
    /// Its disk space that nothing else shares, in bytes.
    pub bytes: u64,
    /// When it was ready.
    pub built: crate::Timestamp,
    /// When a job last began to use it; updated at most once a minute.
    pub used: crate::Timestamp,
    /// How many jobs use it now.
    pub uses: u32,
    /// It is never removed to make room.
    pub pinned: bool,
    /// Its lock, in the store of blobs; `None` when nothing can be locked.
    pub lock: Option<crate::Digest>,
    /// What its builder printed, in the store of blobs.
    pub log: Option<crate::Digest>,
}

/// One GPU, or one part of a divided GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpu {
    /// The driver's number; that of the whole for a part.
    pub index: u32,
    /// The driver's stable identifier; that of a part begins with `MIG-`.
    pub uuid: String,
    /// The product name.
    pub name: String,
    /// Memory in bytes; 0 when unknown.
    pub memory: u64,
    /// The replica that has it.
    pub held: Option<String>,
    /// Why it is not handed out, for people.
    pub unfit: Option<String>,
}

impl Gpu {
    /// It counts as capacity of its node: it can be handed out, or was.
    ///
    /// One that broke under its job counts until that ends, because the job's use of it counts that long as well.
    pub fn counts(&self) -> bool {
        self.unfit.is_none() || self.held.is_some()
    }
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
    /// What to do about it, of every finding that is not good: a command, or one step.
    pub fix: Option<String>,
    /// What the machine lacks because of it, so that jobs which need it are placed elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lacks: Option<Capability>,
}

/// Something that some jobs need and a machine may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Capability {
    /// An engine that runs containers, and may be asked.
    Containers,
    /// The engine that makes conda environments.
    Conda,
}

impl Capability {
    /// All of them.
    pub const ALL: [Capability; 2] = [Capability::Containers, Capability::Conda];

    /// Its name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Capability::Containers => "containers",
            Capability::Conda => "conda",
        }
    }

    /// What has it, in words.
    pub fn describe(self) -> &'static str {
        match self {
            Capability::Containers => "container engine",
            Capability::Conda => "conda engine",
        }
    }
}

/// A finding is made by these alone, so that none that is not good lacks its remedy.
impl Finding {
    /// All is well.
    pub fn good(topic: &str, found: impl Into<String>, means: impl Into<String>) -> Finding {
        let (topic, found, means) = (topic.to_owned(), found.into(), means.into());
        Finding { topic, grade: Grade::Good, found, means, fix: None, lacks: None }
    }

    /// Some jobs lack something.
    pub fn limited(
        topic: &str,
        found: impl Into<String>,
        means: impl Into<String>,
        fix: impl Into<String>,
    ) -> Finding {
        let (grade, fix) = (Grade::Limited, Some(fix.into()));
        Finding { grade, fix, ..Finding::good(topic, found, means) }
    }

    /// No job can run.
    pub fn bad(
        topic: &str,
        found: impl Into<String>,
        means: impl Into<String>,
        fix: impl Into<String>,
    ) -> Finding {
        Finding { grade: Grade::Bad, ..Finding::limited(topic, found, means, fix) }
    }

    /// The same of a machine that lacks this because of it.
    pub fn lacking(self, what: Capability) -> Finding {
        Finding { lacks: Some(what), ..self }
    }

    /// It is well, or ends in a command that mends it.
    pub fn ends_in_a_command(&self) -> bool {
        match &self.fix {
            None => self.grade == Grade::Good,
            Some(fix) => fix.matches('`').count() >= 2,
        }
    }
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
