//! Which jobs a list is about, and how they are found without a look at all others.
//!
//! Owns the indexes that lists need. Hides that the values they are of are inside documents. Invariant: a list of the
//! ended jobs of an owner, a state or an experiment reads the rows that it returns, however many others there are; only
//! where an owner and an experiment are asked for together, those of the one are read for the other.

use agent_model::{JobId, JobState, Principal};

use super::JobRecord;

/// Which jobs are looked through.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Among<'a> {
    /// All.
    All,
    /// Those that are no tasks of arrays, have ended and are chosen.
    Ended(&'a JobFilter),
    /// Those whose name begins with the first text and comes after the second, in the order of their names.
    Named(&'a str, &'a str),
    /// All whose name is that of a task of this array.
    TasksOf(&'a JobId),
    /// Steps of pipelines that completed and are alike in this.
    Alike(Alike<'a>),
}

/// In what steps of pipelines that completed are alike; see [`ReuseRecord`](super::ReuseRecord).
#[derive(Debug, Clone, Copy)]
pub(crate) enum Alike<'a> {
    /// In all that decides what they leave.
    Key(&'a str),
    /// In the environment as it is defined.
    Environment(&'a str),
    /// In the step that they are.
    Step(&'a str),
}

/// What jobs must be like. With nothing in it all are meant.
#[derive(Debug, Clone, Default)]
pub(crate) struct JobFilter {
    /// Of one of these.
    pub(crate) owners: Vec<Principal>,
    /// In one of these states, by the names that users see.
    pub(crate) states: Vec<String>,
    /// Of this experiment.
    pub(crate) experiment: Option<String>,
}

/// The columns of jobs that have ended, by which they are found: an owner, a state and an experiment. A document that is
/// damaged has none.
const OWNER: &str = "CASE WHEN json_valid(document) THEN \
                     coalesce(document ->> '$.spec.owner', document ->> '$.owner') END";
const STATE: &str = "CASE WHEN json_valid(document) THEN document ->> '$.state' END";
const EXPERIMENT: &str = "CASE WHEN json_valid(document) THEN document ->> '$.spec.experiment' END";

const ENDED_TASK: &str = "active = 3";

/// The states of jobs that have ended, as users and as documents call them.
const ENDED: [(JobState, &str); 3] =
    [(JobState::Completed, "completed"), (JobState::Failed, "failed"), (JobState::Canceled, "canceled")];

/// The column of a part of [`ReuseRecord`](super::ReuseRecord), of steps that have one.
fn reuse(part: &str) -> String {
    format!("CASE WHEN json_valid(document) THEN document ->> '$.reuse.{part}' END")
}

/// Makes the indexes. They are no step of the schema: without them, and with one more, an earlier program works as well.
pub(super) fn indexes() -> String {
    let index = |name: &str, columns: &str, such: &str| {
        format!("CREATE INDEX IF NOT EXISTS {name} ON jobs ({columns}) WHERE {such};\n")
    };
    let of_steps = ["key", "environment", "step"].map(|part| {
        let (name, column) = (format!("jobs_reuse_{part}"), reuse(part));
        index(&name, &format!("{column}, seq"), &format!("{ENDED_TASK} AND {column} IS NOT NULL"))
    });
    [
        index("jobs_unended", "seq", "active IN (1, 4)"),
        index("jobs_named", "id", "active < 2"),
        index("jobs_ended", &format!("{STATE}, seq"), "active = 0"),
        index("jobs_ended_owner", &format!("{OWNER}, {STATE}, seq"), "active = 0"),
        index("jobs_ended_experiment", &format!("{EXPERIMENT}, {STATE}, seq"), "active = 0"),
    ]
    .concat()
        + &of_steps.concat()
}

impl JobFilter {
    /// Whether a job is meant.
    pub(crate) fn has(&self, job: &JobRecord) -> bool {
        let of = |owner: &Principal| Some(owner) == job.owner();
        (self.owners.is_empty() || self.owners.iter().any(of))
            && self.is_in(job.state)
            && self.experiment.as_ref().is_none_or(|experiment| *experiment == job.spec.experiment)
    }

    /// Whether jobs that have ended may be meant.
    pub(crate) fn may_have_ended(&self) -> bool {
        ENDED.iter().any(|(state, _)| self.is_in(*state))
    }

    fn is_in(&self, state: JobState) -> bool {
        self.states.is_empty() || self.states.iter().any(|one| one == state.name())
    }
}

impl Among<'_> {
    /// The query of up to `?2` of these jobs from the place `?1`, with these columns, and the texts that it is asked with
    /// from `?3` on.
    pub(super) fn query(self, columns: &str) -> (String, Vec<String>) {
        let newest = |such: &str| {
            format!("SELECT {columns} FROM jobs WHERE seq < ?1 AND {such} ORDER BY seq DESC LIMIT ?2")
        };
        match self {
            Among::All => (newest("active <> 2"), Vec::new()),
            Among::Ended(choice) => chosen(choice, columns),
            Among::Named(begins, after) => {
                let query = format!(
                    "SELECT {columns} FROM jobs WHERE ?1 > 0 AND active < 2 AND id >= max(?3, ?4) AND id <> ?4 \
                     AND id < ?3 || '~' ORDER BY id LIMIT ?2"
                );
                (query, vec![begins.to_owned(), after.to_owned()])
            }
            // An array and its tasks are found by the index of the names: `-` and digits come before `:`.
            Among::TasksOf(array) => {
                let such = "active <> 2 AND id >= ?3 || '--0' AND id < ?3 || '--:' AND id NOT GLOB ?3 || '--*[^0-9]*'";
                (newest(such), vec![array.to_string()])
            }
            Among::Alike(alike) => {
                let (part, text) = match alike {
                    Alike::Key(text) => ("key", text),
                    Alike::Environment(text) => ("environment", text),
                    Alike::Step(text) => ("step", text),
                };
                let column = reuse(part);
                let such = format!("{ENDED_TASK} AND {column} = ?3 AND {STATE} = 'completed'");
                (newest(&such), vec![text.to_owned()])
            }
        }
    }
}

/// One query for each owner and state, because each is in order by itself, and the database puts them together.
fn chosen(choice: &JobFilter, columns: &str) -> (String, Vec<String>) {
    let is_all = choice.owners.is_empty() && choice.experiment.is_none() && choice.states.is_empty();
    let mut given = Vec::new();
    let mut is = |column: &str, text: String| {
        given.push(text);
        format!(" AND {column} = ?{}", given.len() + 2)
    };
    let experiment = choice.experiment.iter().map(|name| is(EXPERIMENT, name.clone())).collect::<String>();
    let mut owners: Vec<String> = choice.owners.iter().map(|owner| is(OWNER, owner.to_string())).collect();
    if owners.is_empty() {
        owners.push(String::new());
    }
    let mut states: Vec<String> = match is_all {
        true => vec![String::new()],
        false => {
            let states = ENDED.iter().filter(|(state, _)| choice.is_in(*state));
            states.map(|(_, state)| is(STATE, (*state).to_owned())).collect()
        }
    };
    if states.is_empty() {
        states.push(" AND FALSE".to_owned());
    }
    let parts = owners.iter().flat_map(|owner| {
        let experiment = &experiment;
        states.iter().map(move |state| {
            format!("SELECT {columns} FROM jobs WHERE seq < ?1 AND active = 0{owner}{state}{experiment}")
        })
    });
    let parts = parts.collect::<Vec<_>>().join(" UNION ALL ");
    (format!("{parts} ORDER BY seq DESC LIMIT ?2"), given)
}

#[cfg(test)]
mod tests {
    use agent_model::Timestamp;
    use sqlx::Row;

    use super::super::file::{connect, options};
    use super::super::tests::job;
    use super::super::{Changes, open};
    use super::*;

    fn choice(owners: &[u32], states: &[&str], experiment: Option<&str>) -> JobFilter {
        JobFilter {
            owners: owners.iter().map(|uid| Principal::Local { uid: *uid }).collect(),
            states: states.iter().map(|state| (*state).to_owned()).collect(),
            experiment: experiment.map(str::to_owned),
        }
    }

    /// Whatever is chosen, no row is looked at that is not in an index of it, and nothing is sorted.
    #[tokio::test]
    async fn test_each_list_is_read_from_an_index_in_its_order() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir.path().join("db"), &dir.path().join("archive")).await.unwrap();
        store.close().await;
        let reader = connect(options(&dir.path().join("db"))).await.unwrap();
        let plan = async |among: Among<'_>| {
            let (query, given) = among.query("seq, document");
            let query = format!("EXPLAIN QUERY PLAN {query}");
            let query = sqlx::query(sqlx::AssertSqlSafe(query)).bind(1_i64).bind(1_i64);
            let query = given.into_iter().fold(query, |query, text| query.bind(text));
            let rows = query.fetch_all(&reader).await.unwrap();
            rows.iter().map(|row| row.get::<String, _>("detail")).collect::<Vec<_>>().join("\n")
        };
        for (chosen, index) in [
            (choice(&[1], &[], None), "jobs_ended_owner"),
            (choice(&[1, 2], &["Failed"], None), "jobs_ended_owner"),
            (choice(&[], &["Failed", "Canceled"], None), "jobs_ended "),
            (choice(&[], &[], Some("one")), "jobs_ended_experiment"),
            (choice(&[], &["Completed"], Some("one")), "jobs_ended_experiment"),
        ] {
            let plan = plan(Among::Ended(&chosen)).await;
            assert!(plan.contains(index), "{chosen:?}: {plan}");
            assert!(!plan.contains("SCAN jobs") && !plan.contains("TEMP B-TREE"), "{chosen:?}: {plan}");
        }
        for (alike, index) in [
            (Alike::Key("a"), "jobs_reuse_key"),
            (Alike::Environment("a"), "jobs_reuse_environment"),
            (Alike::Step("a"), "jobs_reuse_step"),
        ] {
            let plan = plan(Among::Alike(alike)).await;
            assert!(plan.contains(index) && !plan.contains("TEMP B-TREE"), "{alike:?}: {plan}");
        }
        let plan = plan(Among::Named("train", "")).await;
        assert!(plan.contains("jobs_named") && !plan.contains("TEMP B-TREE"), "{plan}");
        reader.close().await;
    }

    #[tokio::test]
    async fn test_what_is_chosen_is_found_newest_first() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir.path().join("db"), &dir.path().join("archive")).await.unwrap();
        let states = [JobState::Completed, JobState::Failed, JobState::Canceled, JobState::Running];
        let jobs = (1..=8_u64).map(|seq| {
            let job = job(&format!("job-{seq}"), seq);
            let state = states[usize::try_from(seq).unwrap() % 4];
            std::sync::Arc::new(JobRecord { state, ended_at: Some(Timestamp(seq)), ..job })
        });
        store.commit(&Changes { jobs: jobs.collect(), ..Changes::default() }).await.unwrap();
        let found = async |among: Among<'_>, before| {
            let page = store.page(among, before, 3).await.unwrap();
            page.iter().map(|job| job.seq).collect::<Vec<_>>()
        };
        assert_eq!(found(Among::Ended(&choice(&[1], &[], None)), None).await, [8, 6, 5]);
        assert_eq!(found(Among::Ended(&choice(&[1, 3], &[], Some("Default"))), Some(6)).await, [5, 4, 2]);
        assert_eq!(found(Among::Ended(&choice(&[], &["Failed", "Completed"], None)), None).await, [8, 5, 4]);
        assert_eq!(found(Among::Ended(&choice(&[], &["Running"], None)), None).await, [0_u64; 0]);
        assert_eq!(found(Among::Ended(&choice(&[2], &[], None)), None).await, [0_u64; 0]);
        assert_eq!(found(Among::Named("job-", "job-5"), None).await, [6, 7, 8]);
        store.close().await;
    }
}
