//! The engine: its knowledge of channels, packages and prefixes, on top of the rattler crates, and of data in stores.
//!
//! Owns the dispatch of the task and the runtime it runs on. Hides rattler: nothing above uses its names.
//!
//! Invariants: a task ends with exactly one event; threads that are still busy then are killed with the process.

mod activate;
mod arrange;
mod build;
mod cache;
mod confine;
mod data;
mod disk;
mod explicit;
mod fetch;
mod inspect;
mod link;
mod net;
pub(crate) mod orphan;
mod package;
mod probe;
mod repodata;
mod routes;
mod solve;
mod specs;
mod sweep;
pub(crate) mod tell;
mod tree;

use std::sync::Arc;

use agent_env::{EngineEvent, Failure, FailureKind, Phase, Task};

use tell::Teller;

/// The result of a step of the engine.
pub(crate) type Done<T> = Result<T, Failure>;

/// A failure with no lines and no hint.
pub(crate) fn failed(kind: FailureKind, message: impl Into<String>) -> Failure {
    Failure { kind, message: message.into(), lines: Vec::new(), hint: None }
}

/// Adds a hint what can be done about a failure.
pub(crate) trait Advise {
    fn advise(self, hint: impl Into<String>) -> Self;
}

impl Advise for Failure {
    fn advise(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// Performs one task.
pub(crate) fn perform(task: Task, teller: &Arc<Teller>) -> EngineEvent {
    teller.beat();
    let outcome = match task {
        Task::Probe => probe::probe().map(EngineEvent::Probed),
        Task::Build(build) => build::prepare(*build)
            .and_then(|prepared| on_threads(build::build(prepared, teller.clone())))
            .map(EngineEvent::Built),
        Task::Activate { prefix } => activate::activate(&prefix, teller).map(EngineEvent::Activated),
        Task::Fetch(fetch) => on_threads(data::fetch(*fetch, teller.clone())).map(EngineEvent::Fetched),
        Task::Upload(upload) => {
            on_threads(data::upload::upload(*upload, teller.clone())).map(EngineEvent::Uploaded)
        }
        Task::Sweep(sweep) => {
            teller.mark(tell::busy(Phase::Check, "the package cache"));
            sweep::sweep(&sweep).map(|freed| EngineEvent::Swept { freed })
        }
    };
    outcome.unwrap_or_else(EngineEvent::Failed)
}

/// Does it with the threads of a runtime, which are started only now.
fn on_threads<T>(work: impl Future<Output = Done<T>>) -> Done<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| failed(FailureKind::Other, format!("no threads: {error}")))?;
    let outcome = runtime.block_on(work);
    // A failed build may leave a thread that still unpacks an archive; it is not waited for.
    runtime.shutdown_background();
    outcome
}
