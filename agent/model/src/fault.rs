//! Errors fit for people.
//!
//! Inside the program an error is an enum of the operation that failed. At three boundaries only (the runner, the
//! API, the CLI) it becomes a [`Fault`]: a stable code with a page in `agent/docs/faults/`, what failed in
//! the user's words, why, and what to do next. The queue retries by [`Fault::retry`] and nothing else.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::causes;

/// Whose fault it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Blame {
    /// The job, its files or its settings.
    User,
    /// The machine the job ran on.
    Node,
    /// This software.
    Platform,
    /// Something between machines.
    Network,
}

impl Blame {
    /// Each of them.
    pub const ALL: [Blame; 4] = [Blame::User, Blame::Node, Blame::Platform, Blame::Network];

    /// Its word, which is also that on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Blame::User => "user",
            Blame::Node => "node",
            Blame::Platform => "platform",
            Blame::Network => "network",
        }
    }
}

/// Whether another attempt may help.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Retry {
    /// The same would happen again.
    Never,
    /// On the same node, at once.
    SameNode,
    /// On another node.
    OtherNode,
    /// After this time.
    After(Duration),
}

macro_rules! codes {
    ($($variant:ident $code:literal $blame:ident $retry:expr, $title:literal;)*) => {
        /// Every fault there is. The text form, for example `ENV-103`, never changes its meaning.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Code {
            $(#[doc = $title] #[serde(rename = $code)] $variant,)*
        }

        impl Code {
            /// All codes, in the order of their families.
            pub const ALL: &'static [Code] = &[$(Code::$variant,)*];

            /// The stable text.
            pub fn as_str(self) -> &'static str {
                match self { $(Code::$variant => $code,)* }
            }

            /// The title of its page.
            pub fn title(self) -> &'static str {
                match self { $(Code::$variant => $title,)* }
            }

            fn blame(self) -> Blame {
                match self { $(Code::$variant => Blame::$blame,)* }
            }

            fn retry(self) -> Retry {
                match self { $(Code::$variant => $retry,)* }
            }
        }
    };
}

const SOON: Retry = Retry::After(Duration::from_secs(30));

codes! {
    JobFile "JOB-101" User Retry::Never, "the job file cannot be read";
    JobInvalid "JOB-102" User Retry::Never, "the job is not valid";
    JobUnsupported "JOB-103" User Retry::Never, "the job uses something this version does not run";
    JobNotFound "JOB-104" User Retry::Never, "there is no such job";
    JobConflict "JOB-105" User Retry::Never, "a job of this name exists already";
    JobActive "JOB-106" User Retry::Never, "the job has not ended";
    JobNotWaiting "JOB-107" User Retry::Never, "the job does not wait";
    JobNeverDue "JOB-108" User Retry::Never, "its turn never comes";
    SessionRefused "JOB-109" User Retry::Never, "no session can be opened in the job";
    TasksFailed "JOB-110" User Retry::Never, "tasks of the array, or steps of the pipeline, failed";
    JobTooLarge "JOB-111" User Retry::Never, "the job is too large, or too many jobs wait";
    MetricMissing "JOB-112" User Retry::Never, "no trial of the sweep logged its metric";
    SnapshotUnreadable "SNP-101" User Retry::Never, "the code directory cannot be read";
    SnapshotUnsafe "SNP-102" User Retry::Never, "the code directory holds something that cannot be shipped";
    SnapshotMissing "SNP-103" Platform Retry::Never, "part of a snapshot is missing from the store";
    SnapshotStore "SNP-104" Node SOON, "the blob store failed";
    SnapshotDamaged "SNP-105" Platform Retry::Never, "part of a snapshot was damaged in the store";
    DataUnknown "DAT-101" User Retry::OtherNode, "the node does not know the data store";
    DataAbsent "DAT-102" User Retry::Never, "the data does not exist";
    DataDenied "DAT-103" User Retry::Never, "the data is not given to this node";
    DataRefused "DAT-104" User Retry::Never, "the data is not to be had in this way";
    DataUnreachable "DAT-105" Network SOON, "the data cannot be reached";
    DataDamaged "DAT-106" Network SOON, "the data arrived damaged";
    DataNode "DAT-107" Node Retry::OtherNode, "the node cannot get data";
    AssetUnknown "DAT-108" User Retry::Never, "there is no data of that name";
    AssetInvalid "DAT-109" User Retry::Never, "the name of data cannot be given";
    OutputRefused "DAT-110" User Retry::OtherNode, "the data store takes no outputs";
    OutputUnsent "DAT-111" Node Retry::Never, "an output did not get to its data store";
    PythonMissing "ENV-101" User Retry::OtherNode, "the node has no such Python";
    PythonIncomplete "ENV-102" Node Retry::OtherNode, "the node's Python cannot make environments";
    EnvUnsatisfied "ENV-103" User Retry::Never, "no package satisfies the requirements";
    EnvBuild "ENV-104" User Retry::Never, "the environment could not be built";
    EnvUnsupported "ENV-105" User Retry::OtherNode, "the node cannot build this kind of environment";
    EnvNetwork "ENV-106" Network SOON, "the package index cannot be reached";
    EnvDenied "ENV-107" User Retry::Never, "a channel or index wants other credentials";
    EnvDamaged "ENV-108" Network SOON, "a package arrived damaged";
    EnvLacks "ENV-109" User Retry::OtherNode, "the machine's Python lacks required packages";
    EnvUnknown "ENV-110" User Retry::OtherNode, "the node knows no environment of this name";
    EnvInUse "ENV-111" User Retry::Never, "the environment is in use";
    ImageMissing "ENV-112" User Retry::Never, "the image is not to be had from its registry";
    ImageBuild "ENV-113" User Retry::Never, "the image could not be built";
    ImageCarrier "ENV-114" User Retry::Never, "the image cannot carry a conda environment";
    ImagePlatform "ENV-115" User Retry::OtherNode, "the image is for other machines";
    CommandFailed "RUN-101" User Retry::Never, "the command returned an error";
    CommandNotFound "RUN-102" User Retry::Never, "the command or its script was not found";
    CommandSignaled "RUN-103" User Retry::Never, "the command was killed";
    OutOfMemory "RUN-104" User Retry::Never, "the command ran out of memory";
    TimeLimit "RUN-105" User Retry::Never, "the command ran longer than its limit";
    LaunchFailed "RUN-106" Node Retry::OtherNode, "the command could not be started";
    RunLost "RUN-107" Node Retry::OtherNode, "the running command was lost";
    Unkilled "RUN-108" Node Retry::OtherNode, "processes of the job survive the final signal";
    OutputsUnstored "OUT-101" Node SOON, "the outputs could not be stored";
    DiskFull "NODE-101" Node Retry::OtherNode, "the node's disk is full";
    NodeLost "NODE-102" Node Retry::OtherNode, "the node stopped answering";
    NodeRebooted "NODE-103" Node Retry::OtherNode, "the node was restarted while the job ran";
    LeaseOver "NODE-104" Network Retry::OtherNode, "the node lost contact for longer than the job allows";
    NodeUnknown "NODE-105" User Retry::Never, "there is no such machine";
    NodeAnswers "NODE-106" User Retry::Never, "the machine still answers";
    GpuLost "NODE-107" Node Retry::OtherNode, "a GPU was lost while the job ran";
    GangIncomplete "GANG-101" Node Retry::OtherNode, "a rank of the job could not start in time";
    GangUnreachable "GANG-102" Network Retry::OtherNode, "the ranks of the job do not reach each other";
    GangLate "GANG-103" Node Retry::OtherNode, "a rank of the job did not start when it was told to";
    GangUnlike "GANG-104" User Retry::Never, "the ranks of the job got different environments";
    GangPlace "GANG-105" Node Retry::OtherNode, "the node has no address or port for a rank of the job";
    NodeTwice "NODE-108" User Retry::Never, "two machines live under one identity";
    NodeBusy "NODE-109" User Retry::Never, "the machine still has jobs";
    NodeTaken "NODE-110" User Retry::Never, "there is a machine of this name already";
    NodeRemoved "NODE-112" User Retry::Never, "the machine was removed from the fleet";
    NodeUnfit "NODE-113" Node Retry::OtherNode, "the machine cannot start jobs";
    Preempted "NODE-111" Node Retry::OtherNode, "the machine of the job was taken away";
    ControllerStore "CTL-101" Platform SOON, "the controller's store failed";
    Fenced "CTL-102" Platform Retry::Never, "the report belongs to an earlier attempt";
    RequestInvalid "CTL-103" Platform Retry::Never, "the request does not follow the protocol";
    Unreachable "NET-101" Network Retry::Never, "no daemon answers";
    Denied "NET-102" User Retry::Never, "the daemon refuses this user";
    Unidentified "NET-103" User Retry::Never, "the controller does not accept this identity";
    TokenRefused "NET-104" User Retry::Never, "the controller does not accept this token";
    ClocksApart "NET-105" User Retry::Never, "the clocks of two machines are too far apart";
    NotKnownHere "NET-106" User Retry::Never, "there is no such user or token";
    NameUsed "NET-108" User Retry::Never, "there was a user of this name before";
    NoListener "NET-107" User Retry::Never, "the controller serves its own machine alone";
    ConfigInvalid "CFG-101" User Retry::Never, "the configuration is not valid";
    StateInUse "CFG-102" User Retry::Never, "the state directory is in use";
    StateUnusable "CFG-103" User Retry::Never, "the state directory cannot be used";
    JoinedElsewhere "CFG-104" User Retry::Never, "the machine belongs to a controller already";
    HostLogin "SSH-101" User Retry::Never, "the machine cannot be logged in to";
    HostKey "SSH-102" User Retry::Never, "the machine does not show the key that is known of it";
    HostUnfit "SSH-103" User Retry::Never, "the machine cannot be a node as it is";
    HostUnfinished "SSH-104" Network Retry::Never, "the machine is not set up to the end";
    Bug "BUG-001" Platform Retry::Never, "agentd met something it should never meet";
}

impl Code {
    /// From the text form, in any case.
    pub fn parse(text: &str) -> Option<Code> {
        Code::ALL.iter().copied().find(|code| code.as_str().eq_ignore_ascii_case(text))
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// An error fit for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The stable code.
    pub code: Code,
    /// The step that failed, in the user's words.
    pub what: String,
    /// What caused it, nearest cause first; secrets never get here.
    pub why: Vec<String>,
    /// What to do next: a command, a key of the job file, or whom to ask.
    pub fix: Option<String>,
    /// Whose fault it is.
    pub blame: Blame,
    /// Whether another attempt may help.
    pub retry: Retry,
}

impl Fault {
    /// A fault with the usual blame and retry of its code.
    pub fn new(code: Code, what: impl Into<String>) -> Fault {
        Fault {
            code,
            what: what.into(),
            why: Vec::new(),
            fix: None,
            blame: code.blame(),
            retry: code.retry(),
        }
    }

    /// Adds one cause.
    #[must_use]
    pub fn why(mut self, cause: impl Into<String>) -> Fault {
        self.why.push(cause.into());
        self
    }

    /// Adds an error and each of its sources as causes, each text once.
    #[must_use]
    pub fn because(mut self, error: &(dyn Error + 'static)) -> Fault {
        for cause in causes(error) {
            let text = cause.to_string();
            if !self.why.contains(&text) {
                self.why.push(text);
            }
        }
        self
    }

    /// Adds something else that is wrong, and what to do about it, as a cause.
    #[must_use]
    pub fn also(self, what: impl fmt::Display, fix: Option<&str>) -> Fault {
        let fix = fix.map(|fix| format!("; {fix}")).unwrap_or_default();
        self.why(format!("also {what}{fix}"))
    }

    /// The same, with another fault as a cause.
    #[must_use]
    pub fn and(self, other: &Fault) -> Fault {
        self.also(other.line(), other.fix.as_deref())
    }

    /// What failed, and its causes, in one line.
    pub fn line(&self) -> String {
        [&self.what].into_iter().chain(&self.why).map(String::as_str).collect::<Vec<_>>().join(": ")
    }

    /// The machine alone is the cause: an attempt that ended so does not count against the limit of attempts.
    pub fn is_free(&self) -> bool {
        matches!(self.code, Code::Preempted | Code::NodeUnfit)
    }

    /// Sets what to do next.
    #[must_use]
    pub fn fix(mut self, fix: impl Into<String>) -> Fault {
        self.fix = Some(fix.into());
        self
    }

    /// Overrides the usual retry of the code.
    #[must_use]
    pub fn with_retry(mut self, retry: Retry) -> Fault {
        self.retry = retry;
        self
    }
}

/// One line; [`Fault::fix`] and the page of the code are for the terminal to lay out.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.line())
    }
}

impl Error for Fault {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_codes_are_unique_and_parse() {
        for (i, code) in Code::ALL.iter().enumerate() {
            assert_eq!(Code::parse(&code.as_str().to_lowercase()), Some(*code));
            assert!(Code::ALL[i + 1..].iter().all(|other| other.as_str() != code.as_str()));
        }
    }

    #[test]
    fn test_because_lists_each_source_once() {
        let error = std::io::Error::other(std::io::Error::other("disk on fire"));
        let fault = Fault::new(Code::Bug, "saving").because(&error);
        assert_eq!(fault.why, ["disk on fire"]);
    }
}
