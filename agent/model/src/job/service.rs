//! What can be opened in a job while it runs: the entries of `services`.

use serde::{Deserialize, Serialize};

/// One service of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobService {
    /// What it is.
    pub kind: ServiceKind,
    /// The port of loopback where it listens, if the job file says it.
    pub port: Option<u16>,
    /// The folder of the logs that it shows; empty for the usual one.
    pub log_dir: String,
    /// The rank that it is in.
    pub rank: u32,
}

/// The kinds of services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServiceKind {
    /// Curves of what a job logs.
    TensorBoard,
    /// Notebooks.
    JupyterLab,
    /// An editor.
    VsCode,
    /// A remote shell.
    Ssh,
    /// A server that the job starts itself.
    Custom,
}

impl ServiceKind {
    /// How each is written in a job file.
    pub const WORDS: [&str; 5] = ["tensor_board", "jupyter_lab", "vs_code", "ssh", "custom"];

    const ALL: [ServiceKind; 5] = [
        ServiceKind::TensorBoard,
        ServiceKind::JupyterLab,
        ServiceKind::VsCode,
        ServiceKind::Ssh,
        ServiceKind::Custom,
    ];

    /// The kind that a word means.
    pub fn parse(word: &str) -> Option<ServiceKind> {
        ServiceKind::ALL.into_iter().find(|kind| kind.name() == word)
    }

    /// How it is written.
    pub fn name(self) -> &'static str {
        ServiceKind::WORDS[self as usize]
    }

    /// Why it cannot be opened, and what to use in its place, if so.
    pub fn refusal(self) -> Option<(&'static str, &'static str)> {
        match self {
            ServiceKind::VsCode => Some((
                "`vs_code` needs a server of its vendor in the job, which agentd does not install",
                "start a server of your own in the job and declare it as `type: custom` with its `port`, or use \
                 `type: jupyter_lab`",
            )),
            ServiceKind::Ssh => Some((
                "`ssh` needs a server and keys in the job, and agentd has another way in",
                "use `agentctl exec JOB -- bash`, which has a terminal, pipes and exit codes",
            )),
            ServiceKind::TensorBoard | ServiceKind::JupyterLab | ServiceKind::Custom => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_every_kind_is_written_as_it_is_read() {
        for (kind, word) in ServiceKind::ALL.into_iter().zip(ServiceKind::WORDS) {
            assert_eq!((ServiceKind::parse(word), kind.name()), (Some(kind), word));
        }
        assert_eq!(ServiceKind::parse("tensorboard"), None);
    }
}
