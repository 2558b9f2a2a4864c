//! Arrays: one job whose command runs once for each of many indices, each time as a task of its own.
//!
//! Owns the syntax of indices (Slurm's: `1,3,5-9:2%4`) and what a task is told about itself. A set of indices is kept
//! as ranges, so that ten thousand of them take a few bytes, in memory, on a disk and on a wire.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{JobDraft, JobSpec};
use crate::expr::{self, Reference};
use crate::sweep::{MAX_COMPARED, Values};
use crate::{Code, Fault, JobId};

/// The most tasks of an array.
pub const MAX_TASKS: u32 = 10_000;
/// The highest index.
const MAX_INDEX: u32 = 999_999;

/// Why a text names no array.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ArrayError {
    #[error("`{0}` is neither an index nor a range of them")]
    Item(String),
    #[error("{0} is too high for an index: the highest is {MAX_INDEX}")]
    High(u64),
    #[error("`{0}` ends before it begins")]
    Backwards(String),
    #[error("`{0}` has a step of 0")]
    Step(String),
    #[error("index {0} is named twice")]
    Twice(u32),
    #[error("it names no index")]
    Empty,
    #[error("it names {0} indices: one submission takes at most {MAX_TASKS}")]
    Many(u64),
    #[error("`%{0}` is not how many may run at a time")]
    AtOnce(String),
}

impl ArrayError {
    /// How an array is written.
    pub const FORM: &'static str = "write indices, ranges and steps, and after `%` how many may run at a time: `0-199`, `1,3,5-9:2`, `0-199%8`";
}

/// A set of indices, as ranges that neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Indices(Vec<(u32, u32)>);

impl Indices {
    /// How many there are.
    pub fn len(&self) -> u32 {
        self.0.iter().map(|(first, last)| last - first + 1).sum()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The lowest.
    pub fn first(&self) -> Option<u32> {
        self.0.first().map(|(first, _)| *first)
    }

    /// The highest.
    pub fn last(&self) -> Option<u32> {
        self.0.last().map(|(_, last)| *last)
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().flat_map(|(first, last)| *first..=*last)
    }

    /// Whether an index is among them.
    pub fn contains(&self, index: u32) -> bool {
        self.place(index).is_ok()
    }

    /// Adds one; false when it was there.
    pub fn insert(&mut self, index: u32) -> bool {
        let Err(at) = self.place(index) else { return false };
        let follows = at > 0 && self.0[at - 1].1.checked_add(1) == Some(index);
        let precedes = self.0.get(at).is_some_and(|(first, _)| index.checked_add(1) == Some(*first));
        match (follows, precedes) {
            (true, true) => {
                self.0[at - 1].1 = self.0[at].1;
                self.0.remove(at);
            }
            (true, false) => self.0[at - 1].1 = index,
            (false, true) => self.0[at].0 = index,
            (false, false) => self.0.insert(at, (index, index)),
        }
        true
    }

    /// Takes one out; false when it was not there.
    pub fn remove(&mut self, index: u32) -> bool {
        let Ok(at) = self.place(index) else { return false };
        let (first, last) = self.0[at];
        match (first == index, last == index) {
            (true, true) => drop(self.0.remove(at)),
            (true, false) => self.0[at].0 += 1,
            (false, true) => self.0[at].1 -= 1,
            (false, false) => {
                self.0[at].1 = index - 1;
                self.0.insert(at + 1, (index + 1, last));
            }
        }
        true
    }

    /// The distance between one and the next, where it is the same everywhere; otherwise 1.
    fn step(&self) -> u32 {
        let mut steps = self.iter().zip(self.iter().skip(1)).map(|(one, next)| next - one);
        let first = steps.next().unwrap_or(1);
        if steps.all(|step| step == first) { first } else { 1 }
    }

    /// The range that has an index, or where one with it would be.
    fn place(&self, index: u32) -> Result<usize, usize> {
        use std::cmp::Ordering::{Equal, Greater, Less};
        self.0.binary_search_by(|(first, last)| match () {
            () if *last < index => Less,
            () if *first > index => Greater,
            () => Equal,
        })
    }

    /// Adds one item of a list: `7`, `0-9` or `0-9:2`.
    fn add(&mut self, item: &str) -> Result<(), ArrayError> {
        let wrong = || ArrayError::Item(item.to_owned());
        let number = |text: &str| match text.parse::<u64>() {
            Ok(value) if value > u64::from(MAX_INDEX) => Err(ArrayError::High(value)),
            Ok(value) if text.bytes().all(|b| b.is_ascii_digit()) => Ok(value as u32),
            _ => Err(wrong()),
        };
        let Some((first, rest)) = item.split_once('-') else {
            let index = number(item)?;
            return if self.insert(index) { Ok(()) } else { Err(ArrayError::Twice(index)) };
        };
        let (last, step) = rest.split_once(':').map_or((rest, None), |(last, step)| (last, Some(step)));
        let (first, last, step) = (number(first)?, number(last)?, step.map_or(Ok(1), number)?);
        if last < first {
            return Err(ArrayError::Backwards(item.to_owned()));
        }
        if step == 0 {
            return Err(ArrayError::Step(item.to_owned()));
        }
        let many = u64::from((last - first) / step) + 1;
        if many > u64::from(MAX_TASKS) {
            return Err(ArrayError::Many(many));
        }
        for index in (first..=last).step_by(step as usize) {
            if !self.insert(index) {
                return Err(ArrayError::Twice(index));
            }
        }
        Ok(())
    }
}

/// An empty text is an empty set.
impl FromStr for Indices {
    type Err = ArrayError;
    fn from_str(text: &str) -> Result<Indices, ArrayError> {
        let mut indices = Indices::default();
        if text.is_empty() {
            return Ok(indices);
        }
        for item in text.split(',') {
            indices.add(item.trim())?;
            if indices.len() > MAX_TASKS {
                return Err(ArrayError::Many(u64::from(indices.len())));
            }
        }
        Ok(indices)
    }
}

/// `1,3,5-9` or `0-98:2`, as short as it can be.
impl fmt::Display for Indices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = &self.0[..];
        let mut comma = "";
        while let [(first, last), after @ ..] = rest {
            // Three or more single ones at the same distance are written as one range.
            let step = after.first().map_or(0, |(next, _)| next - first);
            let alone = rest.iter().take_while(|(first, last)| first == last);
            let even = (0..).map(|n| first + n * step);
            let run = alone.zip(even).take_while(|((index, _), even)| index == even).count();
            let taken = match run {
                3.. => {
                    write!(f, "{comma}{first}-{}:{step}", rest[run - 1].0)?;
                    run
                }
                _ if first == last => write!(f, "{comma}{first}").map(|()| 1)?,
                _ => write!(f, "{comma}{first}-{last}").map(|()| 1)?,
            };
            (rest, comma) = (&rest[taken..], ",");
        }
        Ok(())
    }
}

impl TryFrom<String> for Indices {
    type Error = ArrayError;
    fn try_from(text: String) -> Result<Indices, ArrayError> {
        text.parse()
    }
}

impl From<Indices> for String {
    fn from(indices: Indices) -> String {
        indices.to_string()
    }
}

/// What makes a job an array. There is at least one index, and at most [`MAX_TASKS`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Array {
    indices: Indices,
    at_once: Option<NonZeroU32>,
}

impl Array {
    /// An array of these indices, of which so many may run at a time.
    pub fn new(indices: Indices, at_once: Option<NonZeroU32>) -> Result<Array, ArrayError> {
        match indices.len() {
            0 => Err(ArrayError::Empty),
            many if many > MAX_TASKS => Err(ArrayError::Many(u64::from(many))),
            _ => Ok(Array { indices, at_once }),
        }
    }

    /// One of `count` tasks, whose indices begin with 0.
    pub fn counted(count: u32) -> Result<Array, ArrayError> {
        match count.checked_sub(1) {
            None => Err(ArrayError::Empty),
            Some(_) if count > MAX_TASKS => Err(ArrayError::Many(u64::from(count))),
            Some(last) => Array::new(Indices(vec![(0, last)]), None),
        }
    }

    /// The indices of its tasks.
    pub fn indices(&self) -> &Indices {
        &self.indices
    }

    /// How many tasks may run at a time; `None` when as many as there is room for.
    pub fn at_once(&self) -> Option<NonZeroU32> {
        self.at_once
    }

    /// What a task finds in its environment, beside what every job finds.
    fn variables(&self, array: &JobId, index: u32) -> [(&'static str, String); 10] {
        let number = |value: Option<u32>| value.unwrap_or_default().to_string();
        let Array { indices, .. } = self;
        [
            ("AGENTD_ARRAY_INDEX", index.to_string()),
            ("AGENTD_ARRAY_JOB", array.to_string()),
            ("AGENTD_ARRAY_COUNT", indices.len().to_string()),
            ("SLURM_ARRAY_TASK_ID", index.to_string()),
            ("SLURM_ARRAY_JOB_ID", array.to_string()),
            ("SLURM_ARRAY_TASK_COUNT", indices.len().to_string()),
            ("SLURM_ARRAY_TASK_MIN", number(indices.first())),
            ("SLURM_ARRAY_TASK_MAX", number(indices.last())),
            ("SLURM_ARRAY_TASK_STEP", indices.step().to_string()),
            ("LSB_JOBINDEX", index.to_string()),
        ]
    }
}

impl FromStr for Array {
    type Err = ArrayError;
    fn from_str(text: &str) -> Result<Array, ArrayError> {
        let (indices, at_once) = match text.trim().split_once('%') {
            None => (text.trim(), None),
            Some((indices, at_once)) => {
                let number = at_once.parse().map_err(|_| ArrayError::AtOnce(at_once.to_owned()))?;
                (indices, Some(number))
            }
        };
        Array::new(indices.parse()?, at_once)
    }
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.indices.fmt(f)?;
        self.at_once.map_or(Ok(()), |at_once| write!(f, "%{at_once}"))
    }
}

impl TryFrom<String> for Array {
    type Error = ArrayError;
    fn try_from(text: String) -> Result<Array, ArrayError> {
        text.parse()
    }
}

impl From<Array> for String {
    fn from(array: Array) -> String {
        array.to_string()
    }
}

impl JobSpec {
    /// The job that one task of the array `id` is: the same command, with its index in its environment. The array has
    /// waited for its predecessors, so a task has none.
    #[must_use]
    pub fn task(&self, id: &JobId, index: u32) -> JobSpec {
        let mut draft =
            JobDraft { name: None, array: None, sweep: None, predecessors: Vec::new(), ..(*self.0).clone() };
        for (variable, value) in self.array.iter().flat_map(|array| array.variables(id, index)) {
            if !draft.secrets.contains_key(variable) {
                draft.environment_variables.insert(variable.to_owned(), value);
            }
        }
        JobSpec(Arc::new(draft))
    }

    /// The job that a trial of the sweep `id` is: a task of it with these values.
    #[must_use]
    pub fn trial(&self, id: &JobId, index: u32, values: &Values) -> JobSpec {
        let mut draft = JobDraft::from(self.task(id, index));
        for (name, value) in values {
            for prefix in ["AZUREML_SWEEP_", "AZUREML_PARAMETER_"] {
                draft.environment_variables.insert(format!("{prefix}{name}"), value.to_string());
            }
        }
        let has = |reference: &Reference| match reference {
            Reference::Drawn(name) => Some(values.contains_key(name)),
            Reference::Input(_) | Reference::Output(_) => Some(true),
        };
        let put = |reference: &Reference| match reference {
            Reference::Drawn(name) => values.get(name).map(ToString::to_string).unwrap_or_default(),
            other => other.to_string(),
        };
        // A command that is no template was refused when the sweep was validated.
        if let Ok(command) = expr::substitute(&expr::optional(&draft.command, has), put) {
            draft.command = command;
        }
        JobSpec(Arc::new(draft))
    }
}

impl JobDraft {
    /// What must hold between a sweep and the job that it is.
    pub(crate) fn check_sweep(&self) -> Result<(), Fault> {
        let Some(sweep) = &self.sweep else { return Ok(()) };
        let invalid = |what: &str| Fault::new(Code::JobInvalid, what.to_owned());
        if !self.output_names.is_empty() {
            return Err(Fault::new(Code::JobUnsupported, "an output of a sweep gets no name as data")
                .why("each trial has outputs of its own")
                .fix("leave its `name` out, and name what the best trial left: agentctl data create"));
        }
        if self.array.is_none() {
            return Err(
                invalid("the sweep does not say how many trials it has").fix("set `limits.max_total_trials`")
            );
        }
        let trials = self.array.as_ref().map_or(0, |array| array.indices().len());
        if sweep.policy.is_some() && trials > MAX_COMPARED {
            return Err(invalid(&format!("the sweep has {trials} trials and `early_termination`"))
                .why(format!("a policy compares at most {MAX_COMPARED} with each other"))
                .fix("set a lower `limits.max_total_trials`, or leave the policy out"));
        }
        if let Some(name) = sweep.space.names().iter().find(|name| {
            let named = |prefix: &str| self.secrets.contains_key(&format!("{prefix}{name}"));
            named("AZUREML_SWEEP_") || named("AZUREML_PARAMETER_")
        }) {
            return Err(invalid(&format!("a secret has the variable of the hyperparameter `{name}`"))
                .fix("give one of them another name"));
        }
        sweep.check()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn array(text: &str) -> Result<Array, ArrayError> {
        text.parse()
    }

    #[test]
    fn test_syntax_is_that_of_slurm() {
        for (text, indices, at_once) in [
            ("7", vec![7], None),
            ("0-3", vec![0, 1, 2, 3], None),
            ("1,3,5-9:2%4", vec![1, 3, 5, 7, 9], Some(4)),
            ("9, 1-2", vec![1, 2, 9], None),
            ("0-10:5", vec![0, 5, 10], None),
        ] {
            let read = array(text).unwrap();
            assert_eq!(read.indices().iter().collect::<Vec<_>>(), indices, "{text}");
            assert_eq!(read.at_once().map(NonZeroU32::get), at_once, "{text}");
            assert_eq!(array(&read.to_string()).unwrap(), read);
        }
        assert_eq!(array("1,3,5-9:2%4").unwrap().to_string(), "1-9:2%4");
        assert_eq!(array("4,2,3,9").unwrap().to_string(), "2-4,9");
        assert_eq!(Array::counted(200).unwrap().to_string(), "0-199");
    }

    #[test]
    fn test_what_names_no_array_is_refused_with_the_reason() {
        let item = |text: &str| ArrayError::Item(text.to_owned());
        for (text, error) in [
            ("", ArrayError::Empty),
            ("a", item("a")),
            ("1,,2", item("")),
            ("-1", item("-1")),
            ("1-", item("1-")),
            ("+1", item("+1")),
            ("1:2", item("1:2")),
            ("5-1", ArrayError::Backwards("5-1".to_owned())),
            ("0-9:0", ArrayError::Step("0-9:0".to_owned())),
            ("0-5,3", ArrayError::Twice(3)),
            ("1000000", ArrayError::High(1_000_000)),
            ("0-10000", ArrayError::Many(10_001)),
            ("0-9999,10000", ArrayError::Many(10_001)),
            ("0-9%0", ArrayError::AtOnce("0".to_owned())),
            ("0-9%", ArrayError::AtOnce(String::new())),
            ("0-9%x", ArrayError::AtOnce("x".to_owned())),
        ] {
            assert_eq!(array(text), Err(error), "{text}");
        }
        assert_eq!(Array::counted(0), Err(ArrayError::Empty));
        assert_eq!(Array::counted(10_001), Err(ArrayError::Many(10_001)));
        assert!(array("0-9999").is_ok());
    }

    #[test]
    fn test_a_task_is_told_its_index_and_nothing_of_an_array_is_left_of_it() {
        let draft = JobDraft {
            command: "true".to_owned(),
            array: Some(array("4-8:2%1").unwrap()),
            secrets: [("LSB_JOBINDEX".to_owned(), "key".to_owned())].into(),
            ..JobDraft::default()
        };
        let task = draft.validate().unwrap().task(&"sweep".parse().unwrap(), 6);
        let told = |name: &str| task.environment_variables.get(name).map(String::as_str);
        assert_eq!(task.array, None);
        assert_eq!([told("AGENTD_ARRAY_INDEX"), told("SLURM_ARRAY_TASK_ID")], [Some("6"); 2]);
        assert_eq!(told("SLURM_ARRAY_TASK_COUNT"), Some("3"));
        assert_eq!((told("SLURM_ARRAY_TASK_MIN"), told("SLURM_ARRAY_TASK_MAX")), (Some("4"), Some("8")));
        assert_eq!((told("SLURM_ARRAY_TASK_STEP"), told("AGENTD_ARRAY_JOB")), (Some("2"), Some("sweep")));
        assert_eq!(told("LSB_JOBINDEX"), None, "a secret of the job has this name");
        assert!(JobDraft::from(task).validate().is_ok(), "a node reads it");
    }

    proptest! {
        #[test]
        fn test_a_set_is_what_was_put_in_and_not_taken_out(
            changes in proptest::collection::vec((any::<bool>(), 0_u32..40), 0..80),
        ) {
            let (mut set, mut known) = (Indices::default(), std::collections::BTreeSet::new());
            for (add, index) in changes {
                match add {
                    true => prop_assert_eq!(set.insert(index), known.insert(index)),
                    false => prop_assert_eq!(set.remove(index), known.remove(&index)),
                }
                prop_assert_eq!(set.iter().collect::<Vec<_>>(), known.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(set.len() as usize, known.len());
                prop_assert_eq!(set.to_string().parse::<Indices>().unwrap(), set.clone());
                prop_assert!((0..40).all(|index| set.contains(index) == known.contains(&index)));
            }
        }
    }
}
