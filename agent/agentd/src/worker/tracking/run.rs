//! The runs of one job: the job's own, and those that its script begins.

use std::collections::BTreeMap;
use std::sync::Arc;

use agent_model::tracking::TrackingRecord;
use agent_model::{Clock, Timestamp};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::TrackedRun;
use super::answer::{self, Identity, Refusal};
use super::book::{self, Book, Data, History, Point, RUN};

/// The separator between the id of the job's run and the label of another run.
const BESIDE: &str = "--";
/// The kind of the documents about logged models, and about traces.
pub(super) const MODEL: &str = "model";
pub(super) const TRACE: &str = "trace";
/// Names that cannot be labels, such as folders of a job's artifacts.
const TAKEN: [&str; 6] = ["", "logs", "models", "named-outputs", "outputs", "traces"];
/// The most waiting calls of one job and kind; with more, clients retry.
const MOST_WAITING: usize = 64;
/// How many files of one job are sent or received at a time.
const FILES: usize = 4;
/// The longest label, in bytes.
const MAX_LABEL: usize = 48;

/// The state of one job at the endpoint.
pub(super) struct Run {
    pub(super) facts: TrackedRun,
    pub(super) experiment_id: String,
    clock: Arc<dyn Clock>,
    started: Timestamp,
    book: Mutex<Book>,
    /// One call at a time uses the book, and one reads a history.
    book_turn: Turn,
    history_turn: Turn,
    file_turn: Turn,
    /// The threads that the calls of all runs share.
    threads: Arc<Semaphore>,
}

/// Limits the calls of one kind.
struct Turn {
    turn: Arc<Semaphore>,
    /// Permits for waiting calls and those in progress.
    places: Arc<Semaphore>,
}

impl Turn {
    fn of(at_once: usize) -> Turn {
        Turn { turn: Arc::new(Semaphore::new(at_once)), places: Arc::new(Semaphore::new(MOST_WAITING)) }
    }

    /// Waits for a turn; fails if too many calls wait.
    async fn come(&self) -> Result<HeldTurn, Refusal> {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| Refusal::busy())?;
        let turn = Arc::clone(&self.turn).acquire_owned().await;
        Ok(HeldTurn { _place: place, _turn: turn.ok() })
    }
}

/// A turn, until it is dropped.
pub(super) struct HeldTurn {
    _place: OwnedSemaphorePermit,
    _turn: Option<OwnedSemaphorePermit>,
}

impl Run {
    pub(super) fn new(facts: TrackedRun, clock: Arc<dyn Clock>, threads: Arc<Semaphore>) -> Run {
        Run {
            experiment_id: super::experiment_id(&facts.experiment),
            started: clock.now(),
            book: Mutex::new(Book::new(facts.tracking_file.clone(), facts.tracking_stream.clone())),
            book_turn: Turn::of(1),
            history_turn: Turn::of(1),
            file_turn: Turn::of(FILES),
            threads,
            clock,
            facts,
        }
    }

    /// Runs `work` with the book on a blocking thread; one call of a job at a time.
    pub(super) async fn with<T: Send + 'static>(
        self: Arc<Run>,
        work: impl FnOnce(&mut OpenRun<'_>) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let run = Arc::clone(&self);
        self.blocking(&self.book_turn, move || {
            let mut book = run.book.lock();
            work(&mut OpenRun { run: &run, book: &mut book })
        })
        .await
    }

    /// Reads a part of a metric's history, without the book.
    pub(super) async fn history(
        &self,
        history: History,
        (label, metric): (String, String),
        from: u64,
        most: usize,
    ) -> Result<(Vec<Point>, Option<u64>), Refusal> {
        let read = move || history.page((&label, &metric), from, most);
        self.blocking(&self.history_turn, move || {
            read().map_err(|error| Refusal::disk("the tracking file cannot be read", &error))
        })
        .await
    }

    /// The turn of a call that sends or receives files, to be held until it is done.
    pub(super) async fn file_turn(&self) -> Result<HeldTurn, Refusal> {
        self.file_turn.come().await
    }

    /// Waits for its turn before it takes a thread, so that the calls of one job cannot use up the threads of others.
    async fn blocking<T: Send + 'static>(
        &self,
        turn: &Turn,
        work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let turn = turn.come().await?;
        let thread = Arc::clone(&self.threads).acquire_owned().await;
        let worked = agent_blocking::spawn_blocking(move || {
            // Held until the work is done, even if the caller is gone.
            let _held = (turn, thread);
            work()
        });
        worked.await.map_err(|error| Refusal::disk("the call was interrupted", &error.into()))?
    }

    /// The address of the artifacts of a run or a model, in the form that clients use.
    pub(super) fn artifact_uri(&self, owner: &str) -> String {
        format!("mlflow-artifacts:/{}/{owner}/artifacts", self.experiment_id)
    }

    /// The id of the run with this label.
    pub(super) fn id_of(&self, label: &str) -> String {
        match label {
            "" => self.facts.run_id.clone(),
            label => format!("{}{BESIDE}{label}", self.facts.run_id),
        }
    }

    /// The label in a run id; such a run need not exist.
    pub(super) fn label_in<'a>(&self, run_id: &'a str) -> Option<&'a str> {
        match run_id.strip_prefix(self.facts.run_id.as_str())? {
            "" => Some(""),
            rest => rest.strip_prefix(BESIDE).filter(|label| !label.is_empty()),
        }
    }
}

/// A run with its locked book.
pub(super) struct OpenRun<'a> {
    pub(super) run: &'a Run,
    book: &'a mut Book,
}

impl OpenRun<'_> {
    pub(super) fn now(&self) -> Timestamp {
        self.run.clock.now()
    }

    /// The state of all runs, by label.
    pub(super) fn runs(&mut self) -> Result<&BTreeMap<String, Data>, Refusal> {
        self.book.runs().map_err(|error| Refusal::disk("the tracking file cannot be read", &error))
    }

    /// The label of a run that must exist.
    pub(super) fn label(&mut self, run_id: &str) -> Result<String, Refusal> {
        let missing = || Refusal::missing(format!("Run with id={run_id} not found"));
        let label = self.run.label_in(run_id).ok_or_else(missing)?;
        if self.runs()?.contains_key(label) { Ok(label.to_owned()) } else { Err(missing()) }
    }

    /// The state of the run with this label.
    pub(super) fn data(&mut self, label: &str) -> Result<&Data, Refusal> {
        self.runs()?.get(label).ok_or_else(|| Refusal::missing("the run is gone"))
    }

    pub(super) fn record(&mut self, label: &str, records: Vec<TrackingRecord>) -> Result<(), Refusal> {
        self.runs()?;
        if !self.book.has_room_for(label, &records) {
            return Err(Refusal::invalid(format!(
                "the job has recorded names and texts of {} MiB, and no more are taken; metrics, parameters and tags \
                 that it has already can still be changed",
                book::MOST_KEPT >> 20
            )));
        }
        let appended = self.book.append(label, records);
        appended.map_err(|error| Refusal::disk("the tracking file cannot be written", &error))
    }

    /// The endpoint's documents of one kind, in the form for clients: models, traces, data sets of a run, …. Each is
    /// a tag of the run with this label: its name has kind and id, its text is the document.
    pub(super) fn documents(&mut self, label: &str, kind: &str) -> Result<Vec<Value>, Refusal> {
        Ok(self.data(label)?.documents(kind).collect())
    }

    pub(super) fn document(&mut self, label: &str, kind: &str, id: &str) -> Result<Option<Value>, Refusal> {
        let text = self.data(label)?.tag(&book::document(kind, id));
        Ok(text.and_then(|text| serde_json::from_str(text).ok()))
    }

    pub(super) fn keep_document(
        &mut self,
        label: &str,
        kind: &str,
        id: &str,
        document: &Value,
    ) -> Result<(), Refusal> {
        self.record(label, vec![tag(&book::document(kind, id), &document.to_string())])
    }

    /// Takes out of the artifacts of the job's run the folders that belong to other runs, to models and to traces.
    pub(super) fn hide_folders_of_others(&mut self, files: &mut Vec<Value>) -> Result<(), Refusal> {
        let mut folders: Vec<String> =
            self.runs()?.keys().filter(|label| !label.is_empty()).cloned().collect();
        for (folder, kind) in [("models", MODEL), ("traces", TRACE)] {
            if !self.documents("", kind)?.is_empty() {
                folders.push(folder.to_owned());
            }
        }
        files.retain(|file| !folders.iter().any(|other| file["path"] == other.as_str()));
        Ok(())
    }

    pub(super) fn drop_document(&mut self, label: &str, kind: &str, id: &str) -> Result<(), Refusal> {
        self.record(label, vec![TrackingRecord::Untag { untag: book::document(kind, id) }])
    }

    /// The place of the values of this job's metrics.
    pub(super) fn history(&self) -> History {
        self.book.history()
    }

    /// The whole run, or only its info, in the form for clients.
    pub(super) fn show(
        &mut self,
        label: &str,
        how: fn(&Identity<'_>, &Data) -> Value,
    ) -> Result<Value, Refusal> {
        let run = self.run;
        let run_id = run.id_of(label);
        let identity = Identity {
            run_id: &run_id,
            experiment_id: &run.experiment_id,
            artifact_uri: &run.artifact_uri(&run_id),
            started: run.started,
        };
        Ok(how(&identity, self.data(label)?))
    }

    /// Begins another run and returns its label.
    pub(super) fn begin(&mut self, name: &str, started: Timestamp) -> Result<String, Refusal> {
        let base = label(name);
        let data = self.runs()?;
        let is_free = |label: &String| !data.contains_key(label) && !TAKEN.contains(&label.as_str());
        let numbered = (2..).map(|number: u32| format!("{base}-{number}"));
        let mut labels = std::iter::once(base.clone()).chain(numbered);
        let label = labels.find(is_free).ok_or_else(|| Refusal::invalid("too many runs of one name"))?;
        let name = if name.is_empty() { &label } else { name };
        self.record(&label, vec![tag(RUN, name), tag("agentd.started", &started.0.to_string())])?;
        Ok(label)
    }
}

pub(super) fn tag(name: &str, text: &str) -> TrackingRecord {
    TrackingRecord::Tag { tag: name.to_owned(), text: text.to_owned() }
}

/// A name changed so that it can be a folder name and a prefix of other names.
fn label(name: &str) -> String {
    let fit = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') { c } else { '-' };
    let label: String = name.chars().map(fit).take(MAX_LABEL).collect();
    let label = label.trim_matches(['-', '.']);
    if label.is_empty() { "run".to_owned() } else { label.to_owned() }
}

pub(super) use answer::{info, run as whole};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_labels_are_fit_for_folders() {
        for (name, expected) in [
            ("", "run"),
            ("../../etc", "etc"),
            ("lr=0.1, wd=2", "lr-0.1--wd-2"),
            ("Ü", "run"),
            ("a_B-c", "a_B-c"),
        ] {
            assert_eq!(label(name), expected);
        }
        assert_eq!(label(&"x".repeat(300)).len(), MAX_LABEL);
    }
}
