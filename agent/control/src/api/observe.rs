//! What trials of sweeps log of their metric, as it is stored.
//!
//! Owns one fold for each trial that runs: it reads each byte of the records of a trial once, when they are safely
//! stored, and tells the queue what a policy can use. Invariants: a fold is a function of what is stored, so a
//! controller that starts again comes to the same by reading from the beginning; whatever the queue did not take in is
//! read again; the outcome of a trial is settled only after all of its records were folded.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use agent_model::sweep::{Logged, Tally};
use agent_model::tracking::{TrackingLine, TrackingRecord};
use agent_model::{Channel, Epoch, ReplicaId};
use tokio::sync::Mutex;

use super::{Refusal, Services};
use crate::archive::Archive;

/// Bytes that are read at a time.
const PART: usize = 1024 * 1024;
/// Names of metrics that are kept, of a trial that does not log that of its sweep.
const NAMES: usize = 20;
/// Folds that are kept; when there are more, all are made anew.
const FOLDS: usize = 20_000;

/// The folds. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Observer(Arc<parking_lot::Mutex<HashMap<ReplicaId, Slot>>>);

/// The fold of a replica, for one reader at a time; `None` when it is no trial.
type Slot = Arc<Mutex<Option<Option<Fold>>>>;

impl Observer {
    fn slot(&self, replica: &ReplicaId) -> Slot {
        let mut folds = self.0.lock();
        if folds.len() >= FOLDS {
            folds.clear();
        }
        Arc::clone(folds.entry(replica.clone()).or_default())
    }

    /// Its outcome is settled.
    pub(super) fn forget(&self, replica: &ReplicaId) {
        self.0.lock().remove(replica);
    }
}

/// What was read of the records of one trial.
struct Fold {
    metric: String,
    tally: Tally,
    names: BTreeSet<String>,
    /// The queue has nothing of it yet.
    is_new: bool,
    /// The attempts whose records count: that of the replica, and those before it if it goes on with their outputs.
    attempts: Vec<ReplicaId>,
    /// Where the next part begins, in the first of the attempts.
    offset: u64,
    /// The beginning of a line that is not whole yet.
    rest: Vec<u8>,
}

impl Services {
    /// Tells the queue what a trial logged since the last time; `is_over` when its command has ended. Of any other job
    /// nothing is read.
    pub(super) async fn observe(&self, replica: &ReplicaId, is_over: bool) -> Result<(), Refusal> {
        if replica.rank != 0 || replica.job.as_task().is_none() {
            return Ok(());
        }
        let slot = self.observer.slot(replica);
        let mut slot = slot.lock().await;
        if slot.is_none() {
            *slot = Some(self.begin_fold(replica).await?);
        }
        let Some(Some(fold)) = &mut *slot else { return Ok(()) };
        let told = match self.read_on(fold).await? {
            Some(logged) => self
                .queue
                .observe(replica, Logged { is_over, ..logged })
                .await
                .map(drop)
                .map_err(Refusal::from),
            None => Ok(()),
        };
        match told {
            Ok(()) => fold.is_new = false,
            Err(_) => *slot = None,
        }
        told
    }

    /// Reads what the trials that run have logged so far, after a start of the controller: others are compared with it.
    pub(crate) async fn observe_again(self) {
        let Ok(jobs) = self.queue.jobs().await else { return };
        for job in jobs.into_iter().map(|view| view.job).filter(|job| job.trial.is_some()) {
            let replica = job.replica(0);
            if let Err(refusal) = self.observe(&replica, false).await {
                let error = tonic::Status::from(refusal);
                tracing::warn!(%replica, %error, "cannot look at records of a trial after the start");
            }
        }
    }

    async fn begin_fold(&self, replica: &ReplicaId) -> Result<Option<Fold>, Refusal> {
        let Some((sweep, _)) = replica.job.as_task() else { return Ok(None) };
        let (Some(sweep), Some(trial)) = (self.queue.job(&sweep).await?, self.queue.job(&replica.job).await?)
        else {
            return Ok(None);
        };
        let Some(of) = sweep.job.spec.sweep.as_deref().filter(|_| trial.job.is_task) else { return Ok(None) };
        let first = match (trial.job.spec.resume_outputs, &sweep.job.tasks) {
            (true, Some(tasks)) => tasks.after.0 + 1,
            _ => replica.epoch.0,
        };
        let attempt = |epoch| ReplicaId { epoch: Epoch(epoch), ..replica.clone() };
        Ok(Some(Fold {
            metric: of.objective.metric.clone(),
            tally: Tally::new(of.objective.goal, of.every()),
            names: BTreeSet::new(),
            is_new: true,
            attempts: (first..=replica.epoch.0).map(attempt).collect(),
            offset: 0,
            rest: Vec::new(),
        }))
    }

    /// Reads what is stored and was not read; `None` when nothing came of it.
    async fn read_on(&self, fold: &mut Fold) -> Result<Option<Logged>, Refusal> {
        let (before, named) = (fold.tally.count, fold.names.len());
        let mut points = Vec::new();
        while let Some(attempt) = fold.attempts.first().cloned() {
            let log_file = self.archive.log_file(&attempt, Channel::Tracking).await?;
            loop {
                let (log_file, offset) = (Arc::clone(&log_file), fold.offset);
                let part = Archive::blocking(move || log_file.read(offset, PART)).await?;
                if part.is_empty() {
                    break;
                }
                fold.offset += part.len() as u64;
                points.extend(fold.take(&part));
            }
            if fold.attempts.len() == 1 {
                break; // it may write more
            }
            fold.attempts.remove(0);
            (fold.offset, fold.rest) = (0, Vec::new());
        }
        // An attempt that logs nothing takes back what the one before logged.
        let is_more = fold.is_new || fold.tally.count > before || fold.names.len() > named;
        Ok(is_more.then(|| Logged {
            anew: fold.is_new,
            tally: fold.tally,
            points,
            names: fold.names.clone(),
            is_over: false,
        }))
    }
}

impl Fold {
    /// Takes in the next bytes; returns the points in them.
    fn take(&mut self, part: &[u8]) -> Vec<agent_model::sweep::CurvePoint> {
        let mut points = Vec::new();
        let mut lines = part.split_inclusive(|byte| *byte == b'\n');
        for line in &mut lines {
            match line.last() {
                Some(b'\n') if self.rest.is_empty() => points.extend(self.line(line)),
                Some(b'\n') => {
                    let mut whole = std::mem::take(&mut self.rest);
                    whole.extend_from_slice(line);
                    points.extend(self.line(&whole));
                }
                // A longer line is no record, and its end will be none either.
                _ => self.rest.extend_from_slice(&line[..line.len().min(super::telemetry::LONGEST_LINE)]),
            }
        }
        points
    }

    /// A metric that a run of the script's own recorded is another one.
    fn line(&mut self, line: &[u8]) -> Option<agent_model::sweep::CurvePoint> {
        let line = TrackingLine::parse(line).filter(|line| line.run.is_empty())?;
        let TrackingRecord::Metric { metric, value, .. } = line.record else { return None };
        if metric == self.metric {
            return self.tally.log(value);
        }
        if self.tally.count == 0 && self.names.len() < NAMES {
            self.names.insert(metric);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use agent_model::sweep::Goal;
    use proptest::prelude::*;

    use super::*;

    fn fold() -> Fold {
        Fold {
            metric: "loss".to_owned(),
            tally: Tally::new(Goal::Minimize, 2),
            names: BTreeSet::new(),
            is_new: true,
            attempts: Vec::new(),
            offset: 0,
            rest: Vec::new(),
        }
    }

    fn records() -> Vec<u8> {
        let mut text = String::new();
        for step in 0..20 {
            text.push_str(&format!("{{\"metric\": \"loss\", \"value\": {}, \"step\": 0}}\n", 20 - step));
            text.push_str("{\"run\": \"own\", \"metric\": \"loss\", \"value\": 0}\nnot a record\n");
            text.push_str("{\"metric\": \"accuracy\", \"value\": 1}\n");
        }
        text.into_bytes()
    }

    #[test]
    fn test_each_logging_of_the_metric_counts_once_and_nothing_else_does() {
        let mut fold = fold();
        let points = fold.take(&records());
        assert_eq!((fold.tally.count, fold.tally.last, fold.tally.best), (20, 1.0, 1.0));
        assert_eq!((points.len(), points[0].value, points[9].mean), (10, 19.0, 10.5));
        assert_eq!(fold.names.len(), 0, "names count only while the metric is missing");
        let mut other = Fold { metric: "acc".to_owned(), ..self::fold() };
        assert!(other.take(&records()).is_empty());
        assert_eq!(other.names.iter().collect::<Vec<_>>(), ["accuracy", "loss"]);
    }

    proptest! {
        #[test]
        fn test_it_does_not_matter_where_parts_end(cuts in proptest::collection::vec(0_usize..2000, 0..12)) {
            let records = records();
            let mut whole = fold();
            let points = whole.take(&records);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(records.len())).collect();
            cuts.extend([0, records.len()]);
            cuts.sort_unstable();
            let mut parted = fold();
            let mut found = Vec::new();
            for pair in cuts.windows(2) {
                found.extend(parted.take(&records[pair[0]..pair[1]]));
            }
            prop_assert_eq!(found, points);
            prop_assert_eq!(parted.tally, whole.tally);
        }
    }
}
