//! How large a job may be: each of its fields, and all of them together.
//!
//! Owns the limits. They hold for a job that is submitted; one that is read back from a disk or from a controller is
//! taken as it is, because it was accepted by a release that had other limits.

use std::io;

use super::{Input, JobDraft, MAX_COMMAND};
use crate::fault::{Code, Fault};

/// The most bytes of a whole job, as JSON.
const MAX_DOCUMENT: usize = 1024 * 1024;
/// The most characters of a title, of the name of an experiment, of a label, and of other short texts.
const MAX_SHORT: usize = 1_000;
/// The most characters of a description, of the value of a tag, and of an address.
const MAX_LONG: usize = 10_000;
/// The most entries of a list or of a mapping.
const MAX_ENTRIES: usize = 1_000;
/// The most secrets: their values go to the node in one message, and each is looked for in all that the job prints.
const MAX_SECRETS: usize = 100;

impl JobDraft {
    /// Refuses what is larger than a job may be. The fault names the field, its size and the limit.
    pub(super) fn check_extent(&self) -> Result<(), Fault> {
        short("display_name", &self.display_name)?;
        long("description", &self.description)?;
        short("experiment_name", &self.experiment)?;
        short("compute", self.compute.as_deref().unwrap_or_default())?;
        entries("tags", self.tags.len())?;
        for (name, value) in &self.tags {
            short("tags", name)?;
            long(&within("tags", name), value)?;
        }
        entries("environment_variables", self.environment_variables.len())?;
        for (name, value) in &self.environment_variables {
            short("environment_variables", name)?;
            // The kernel counts the name, the `=` and the value as one.
            let (key, has) = (within("environment_variables", name), name.len() + 1 + value.len());
            measure(&key, has, "bytes with its name", MAX_COMMAND)?;
        }
        measure("secrets", self.secrets.len(), "entries", MAX_SECRETS)?;
        self.secrets.keys().try_for_each(|variable| short("secrets", variable))?;
        entries("inputs", self.inputs.len())?;
        for (name, input) in &self.inputs {
            let key = within("inputs", name);
            match input {
                Input::Literal(value) => measure(&key, value.len(), "bytes", MAX_COMMAND)?,
                Input::File { name, .. } => short(&key, name)?,
                Input::Data(data) => long(&key, &data.uri.to_string())?,
                Input::Folder(_) => {}
            }
        }
        entries("outputs", self.outputs.len())?;
        for (name, output) in &self.outputs {
            long(
                &within("outputs", name),
                &output.data().map(|data| data.uri.to_string()).unwrap_or_default(),
            )?;
        }
        entries("resources.labels", self.resources.labels.len())?;
        for (name, value) in &self.resources.labels {
            short("resources.labels", name)?;
            short(&within("resources.labels", name), value)?;
        }
        entries("resources.docker_args", self.resources.docker_args.len())?;
        self.resources.docker_args.iter().try_for_each(|word| long("resources.docker_args", word))?;
        entries("services", self.services.len())?;
        for (name, service) in &self.services {
            short("services", name)?;
            long(&within("services", name), &service.log_dir)?;
        }
        entries("the jobs that it comes after", self.predecessors.len())?;
        self.steps().try_for_each(|step| step.check_extent())?;
        self.check_document()
    }

    /// How many bytes it has as JSON.
    pub fn document_bytes(&self) -> usize {
        let mut counter = Counter(0);
        // Nothing in a draft fails to become JSON, and the counter takes everything.
        match serde_json::to_writer(&mut counter, self) {
            Ok(()) => counter.0,
            Err(_) => 0,
        }
    }

    /// All fields together, as they are stored and sent.
    fn check_document(&self) -> Result<(), Fault> {
        let bytes = self.document_bytes();
        if bytes <= MAX_DOCUMENT {
            return Ok(());
        }
        let (has, at_most) = (grouped(bytes), grouped(MAX_DOCUMENT));
        let what = format!("the job has {has} bytes as JSON, and at most {at_most} are allowed");
        Err(Fault::new(Code::JobTooLarge, what)
            .fix("put long texts and lists into files of the code directory, which has no such limit"))
    }
}

/// Counts the bytes that are written to it.
struct Counter(usize);

impl io::Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn short(field: &str, text: &str) -> Result<(), Fault> {
    measure(field, text.chars().count(), "characters", MAX_SHORT)
}

fn long(field: &str, text: &str) -> Result<(), Fault> {
    measure(field, text.chars().count(), "characters", MAX_LONG)
}

fn entries(field: &str, has: usize) -> Result<(), Fault> {
    measure(field, has, "entries", MAX_ENTRIES)
}

fn measure(field: &str, has: usize, unit: &str, at_most: usize) -> Result<(), Fault> {
    if has <= at_most {
        return Ok(());
    }
    let (has, at_most) = (grouped(has), grouped(at_most));
    let what = format!("`{field}` has {has} {unit}, and at most {at_most} are allowed");
    Err(Fault::new(Code::JobTooLarge, what)
        .fix("make it shorter; a long text belongs into a file of the code directory"))
}

/// The entry of a field, with at most the beginning of a long name.
fn within(field: &str, name: &str) -> String {
    format!("{field}.{}", name.chars().take(60).collect::<String>())
}

/// `1,048,576`
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::JobSpec;

    fn draft() -> JobDraft {
        JobDraft { command: "true".to_owned(), ..JobDraft::default() }
    }

    /// A way to make a field as long as that.
    type Fill = fn(&mut JobDraft, usize);

    #[test]
    fn test_each_field_has_a_limit_and_the_fault_names_it() {
        let many = |count: usize| (0..count).map(|n| (n.to_string(), String::new()));
        let secrets = |count: usize| (0..count).map(|n| (format!("S{n}"), "wandb".to_owned())).collect();
        let fields: &[(&str, usize, Fill)] = &[
            ("display_name", 1_000, |job, n| job.display_name = "é".repeat(n)),
            ("description", 10_000, |job, n| job.description = "é".repeat(n)),
            ("experiment_name", 1_000, |job, n| job.experiment = "x".repeat(n)),
            ("tags.k", 10_000, |job, n| _ = job.tags.insert("k".into(), "x".repeat(n))),
            ("environment_variables.K", MAX_COMMAND - 2, |job, n| {
                job.environment_variables.insert("K".into(), "x".repeat(n));
            }),
            ("inputs.i", MAX_COMMAND, |job, n| {
                job.inputs.insert("i".into(), Input::Literal("x".repeat(n)));
            }),
            ("resources.labels.l", 1_000, |job, n| {
                job.resources.labels.insert("l".into(), "x".repeat(n));
            }),
        ];
        for (field, most, fill) in fields {
            let mut job = draft();
            fill(&mut job, *most);
            job.validate().unwrap_or_else(|fault| panic!("{field} of {most}: {fault}"));
            let mut job = draft();
            fill(&mut job, most + 1);
            let fault = job.validate().unwrap_err();
            assert_eq!(fault.code, Code::JobTooLarge);
            assert!(fault.what.starts_with(&format!("`{field}` has ")), "{fault}");
            assert!(fault.fix.is_some());
        }
        assert!(JobDraft { tags: many(MAX_ENTRIES).collect(), ..draft() }.validate().is_ok());
        let fault = JobDraft { tags: many(MAX_ENTRIES + 1).collect(), ..draft() }.validate().unwrap_err();
        assert_eq!(fault.what, "`tags` has 1,001 entries, and at most 1,000 are allowed");
        assert!(JobDraft { secrets: secrets(MAX_SECRETS), ..draft() }.validate().is_ok());
        let fault = JobDraft { secrets: secrets(MAX_SECRETS + 1), ..draft() }.validate().unwrap_err();
        assert_eq!(fault.what, "`secrets` has 101 entries, and at most 100 are allowed");
    }

    #[test]
    fn test_fields_within_their_limits_may_be_too_much_together() {
        let value = |n: usize| (format!("V{n}"), "x".repeat(100_000));
        let job =
            |count: usize| JobDraft { environment_variables: (0..count).map(value).collect(), ..draft() };
        job(10).validate().unwrap();
        let fault = job(11).validate().unwrap_err();
        assert_eq!(fault.code, Code::JobTooLarge);
        assert!(fault.what.contains("bytes as JSON, and at most 1,048,576 are allowed"), "{fault}");
    }

    #[test]
    fn test_a_larger_job_on_record_is_read() {
        let old = JobDraft { description: "x".repeat(2_500_000), ..draft() };
        let stored = serde_json::to_string(&old).unwrap();
        let read: JobSpec = serde_json::from_str(&stored).unwrap();
        assert_eq!(read.description, old.description);
        assert_eq!(JobDraft::from(read).validate().unwrap_err().code, Code::JobTooLarge);
    }
}
