//! A process that was started for the daemon: its own child, or a child of the helper.

use std::io;
use std::process::ExitStatus;
use std::sync::Arc;

use agent_spawn::{Ended, Started};

/// A process that is waited for. Dropping it does not end it, but kills a builder of the helper.
#[derive(Debug)]
pub enum Child {
    /// A child of this process.
    Own(tokio::process::Child),
    /// A child of the helper `agent-spawn`.
    Helped(Arc<Started>),
}

impl Child {
    /// Its process ID; for an own child only until its end was waited for.
    pub fn id(&self) -> Option<i32> {
        match self {
            Child::Own(child) => child.id().and_then(|id| i32::try_from(id).ok()),
            Child::Helped(started) => Some(started.pid),
        }
    }

    /// Waits for its end; returns how it ended.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        Ok(self.ended().await?.status)
    }

    /// The same, and of one of the helper, whether it took too much memory.
    pub(crate) async fn ended(&mut self) -> io::Result<Ended> {
        match self {
            Child::Own(child) => Ok(Ended { status: child.wait().await?, out_of_memory: false }),
            Child::Helped(started) => {
                let started = Arc::clone(started);
                agent_blocking::blocking_io(move || started.wait()).await
            }
        }
    }
}
