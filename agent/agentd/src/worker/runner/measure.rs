//! Measures the command while it is followed.
//!
//! Hides that each look reads and writes files, which happens on another thread: a disk or a kernel that does not answer
//! keeps nobody from obeying orders, and delays the outcome by [`LAST`] at most.

use std::sync::Arc;
use std::time::Duration;

use agent_blocking::{Blocking, spawn_blocking};
use agent_shim::JobDir;
use tokio::time::{sleep_until, timeout};

use super::Runner;
use crate::worker::Worker;
use crate::worker::system::Sampler;

/// How long the end of a job waits for its last line.
const LAST: Duration = Duration::from_secs(2);

/// What measures one job.
pub(super) struct Measuring {
    worker: Arc<Worker>,
    dir: JobDir,
    gpus: Vec<String>,
    state: MeasuringState,
}

enum MeasuringState {
    Waits(Box<Sampler>),
    /// It looks, and then its file has so many bytes.
    Looks(Blocking<(u64, Box<Sampler>)>),
    /// It panicked, or the daemon stops: the job is measured no more.
    Over,
}

impl Runner {
    /// What measures the command from now on.
    pub(super) fn measure(&self) -> Measuring {
        let (worker, dir, now) = (self.worker.clone(), self.dir.clone(), self.worker.clock.now());
        let (started, shown) = (self.record.started_at.unwrap_or(now), worker.taken.by(&self.record.replica));
        let (executor, of) = (worker.executor.clone(), dir.clone());
        let state = MeasuringState::Looks(spawn_blocking(move || {
            (0, Box::new(Sampler::new(executor.groups(&of), shown, started, now)))
        }));
        Measuring { worker, dir, gpus: self.record.gpus.clone(), state }
    }
}

impl Measuring {
    /// Looks when it is time; returns how many bytes of its file are whole lines then. May be dropped and called again.
    pub(super) async fn next(&mut self) -> u64 {
        loop {
            match &mut self.state {
                MeasuringState::Waits(sampler) => {
                    sleep_until(sampler.due()).await;
                    let (path, now) = (self.dir.system(), self.worker.clock.now());
                    let gpus = self.worker.gpus.sample(&self.gpus);
                    if let MeasuringState::Waits(mut sampler) =
                        std::mem::replace(&mut self.state, MeasuringState::Over)
                    {
                        self.state = MeasuringState::Looks(spawn_blocking(move || {
                            (sampler.look(&path, gpus, now), sampler)
                        }));
                    }
                }
                MeasuringState::Looks(looking) => {
                    let looked = looking.await;
                    self.state = MeasuringState::Over;
                    if let Ok((length, sampler)) = looked {
                        self.state = MeasuringState::Waits(sampler);
                        return length;
                    }
                }
                MeasuringState::Over => std::future::pending().await,
            }
        }
    }

    /// Writes what is not written, because the command has ended.
    pub(super) async fn end(self) {
        let (path, now) = (self.dir.system(), self.worker.clock.now());
        let last = async {
            let sampler = match self.state {
                MeasuringState::Waits(sampler) => Some(sampler),
                MeasuringState::Looks(looking) => looking.await.ok().map(|(_, sampler)| sampler),
                MeasuringState::Over => None,
            };
            if let Some(mut sampler) = sampler {
                let _ = spawn_blocking(move || sampler.end(&path, now)).await; // its length is looked up
            }
        };
        let _ = timeout(LAST, last).await;
    }
}
