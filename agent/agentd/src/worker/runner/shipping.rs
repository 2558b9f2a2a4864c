//! The files of a replica that are shipped to the controller, and what it has of them in the end.
//!
//! Owns what an outcome states about them: a length or an end only of files that the controller has whole, so that
//! missing bytes cannot delay the outcome. Missing parts are named instead.

use std::time::Duration;

use agent_model::{Digest, ReplicaId, Stream, StreamEnd, size};
use agent_shim::JobDir;
use tokio::time::timeout;

use crate::worker::outputs::{self, LogEnd};
use crate::worker::telemetry::{ShipEnd, Shipper, Telemetry};

/// How long an outcome waits for the rest of what the job took of its machine.
const SYSTEM_WITHIN: Duration = Duration::from_secs(2);

/// The files of a replica that are shipped.
pub(super) struct Shipping {
    pub(super) job: Shipper,
    pub(super) build: Shipper,
    pub(super) tracking: Shipper,
    pub(super) system: Shipper,
}

/// What the controller has of them, in the end.
pub(super) struct Shipped {
    /// The logs that it has whole.
    pub(super) streams: Vec<StreamEnd>,
    pub(super) tracking_bytes: u64,
    /// What it lacks, one sentence each.
    pub(super) missing: Vec<String>,
}

impl Shipping {
    pub(super) fn new(telemetry: &Telemetry, replica: &ReplicaId, dir: &JobDir) -> Shipping {
        Shipping {
            job: telemetry.ship_job(replica, dir),
            build: telemetry.ship_build(replica, dir.log(Stream::Build)),
            tracking: telemetry.ship_tracking(replica, dir),
            system: telemetry.ship_system(replica, dir),
        }
    }

    /// Waits until the controller has all files of `dir`, or will not get more. `hopeless`: it found again and again
    /// that its bytes differ from the stated end, so no end is stated any more.
    pub(super) async fn rest(&self, dir: &JobDir, hopeless: bool) -> Shipped {
        let job = outputs::job_log_end(dir.clone()).await;
        let build = outputs::measure(dir.log(Stream::Build)).await;
        let tracking = outputs::tracking_length(dir.clone()).await;
        let (job_kept, build_kept, tracking_kept) = tokio::join!(
            self.job.stored(job.length()),
            self.build.stored(build.size),
            self.tracking.stored(tracking),
        );
        // It is for people: the outcome says nothing of it, and hardly waits for it.
        let system = outputs::length(&dir.system());
        if timeout(SYSTEM_WITHIN, self.system.stored(system)).await.is_err() {
            self.system.give_up("the job has ended");
        }
        let mut shipped =
            Shipped { streams: Vec::new(), tracking_bytes: self.tracking.known(), missing: Vec::new() };
        shipped.add("metrics", &tracking_kept, tracking, hopeless);
        if shipped.add("build log", &build_kept, build.size, hopeless) {
            shipped.end(Stream::Build, build);
        }
        // Without an end the controller keeps what it has, and asks for no more.
        if shipped.add("log", &job_kept, job.length(), hopeless)
            && let LogEnd::Proven(digest) = job
        {
            shipped.end(Stream::Job, digest);
        }
        shipped
    }

    /// Shortens the waits, because somebody waits for the end of the job.
    pub(super) fn hurry(&self) {
        self.all().into_iter().for_each(Shipper::hurry);
    }

    /// The controller refused the outcome because it lacks something.
    pub(super) fn doubt(&self) {
        self.all().into_iter().for_each(Shipper::doubt);
    }

    fn all(&self) -> [&Shipper; 4] {
        [&self.job, &self.build, &self.tracking, &self.system]
    }
}

impl Shipped {
    fn end(&mut self, stream: Stream, digest: Digest) {
        self.streams.push(StreamEnd { stream, digest });
    }

    /// Adds one file; returns whether its end may be stated, because the controller has it whole.
    fn add(&mut self, what: &str, kept: &ShipEnd, length: u64, hopeless: bool) -> bool {
        let lack = match kept {
            ShipEnd::Part { stored, why } => {
                let [stored, length] = [*stored, length].map(size::binary);
                format!("the controller has {stored} of the {length} of the {what}: {why}")
            }
            ShipEnd::Holed { gone } => {
                let [gone, length] = [*gone, length].map(size::binary);
                format!(
                    "{gone} of the {length} of the {what} are gone: somebody removed or harmed their file on the node"
                )
            }
            ShipEnd::Whole if hopeless && length > 0 => {
                format!(
                    "what the controller has of the {what} is not what was written, however often it is sent"
                )
            }
            ShipEnd::Whole => return !hopeless,
        };
        self.missing.push(lack);
        false
    }
}
