//! `run`: submit a job and follow it; the exit code is the job's.

use std::fmt::Write;
use std::process::ExitCode;

use agent_cas::snapshot::{self, Entry};
use agent_model::{Code, Stream, size};

use super::download::left_out_of;
use super::follow::{Ended, Wants, follow};
use super::recorded::Recorded;
use super::view::JobView;
use super::{pipelines, submit, sweeps};
use crate::cli::RunArgs;
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::text::count;
use crate::output::{Output, Paper};

/// Outputs that are named one by one.
const SHOWN: usize = 12;

/// Submits, follows, sums up. If the store lost the code before the job read it, it is sent once more, because the
/// directory is here.
pub(super) async fn run(
    args: RunArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    if args.submit.dry_run {
        submit::dry_run(args.submit, to, output).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut last = false;
    loop {
        match Box::pin(attempt(&args, last, to, output)).await? {
            Some(code) => return Ok(code),
            None => last = true,
        }
    }
}

/// One job; `None` if it should be submitted again, but never for the `last` one.
async fn attempt(
    args: &RunArgs,
    last: bool,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<Option<ExitCode>, Failure> {
    let submit::Placed { client, job, is_array, has_story } =
        submit::place(args.submit.clone(), to, output).await?;
    if args.detach {
        how_to_go_on(&job, output);
        output.print(&format!("{job}\n"))?;
        return Ok(Some(ExitCode::SUCCESS));
    }
    output.note(&format!("job:  {job}"));
    if has_story {
        let ended = sweeps::story(&client, &job, true, output).await?;
        match &ended {
            Ended::Job(job) if job.spec.pipeline.is_some() => pipelines::finish(&client, job, output).await?,
            ended => sweeps::finish(&client, ended, output).await?,
        }
        return Ok(Some(ended.exit_code()));
    }
    // An array has no log of its own.
    let log = (!is_array).then_some(Stream::Job);
    let wants = Wants { log, story: !is_array, tail: 0, attempt: 0, rank: 0 };
    match follow(&client, &job, wants, output).await {
        Ok(Ended::Detached) => {
            output.note("detached; the job goes on");
            how_to_go_on(&job, output);
            Ok(Some(Ended::Detached.exit_code()))
        }
        Err(Failure::PipeClosed) => {
            output.note("the job goes on");
            how_to_go_on(&job, output);
            Err(Failure::PipeClosed)
        }
        Err(failure) => Err(failure),
        Ok(Ended::Job(job)) if !last && is_for_want_of_code(&job) => {
            output.note("the store lost part of what the job reads; it is sent again, with a new job");
            Ok(None)
        }
        Ok(ended) if is_array => {
            ended.tell(output);
            Ok(Some(ended.exit_code()))
        }
        Ok(Ended::Job(job)) => {
            sum_up(&client, &job, output).await?;
            Ok(Some(Ended::Job(job).exit_code()))
        }
    }
}

/// Whether it never ran because a snapshot is missing or damaged. Not for a job with a given name, which cannot be
/// used twice.
fn is_for_want_of_code(job: &JobView) -> bool {
    let lost = [Code::SnapshotMissing, Code::SnapshotDamaged];
    job.started_ms.is_none()
        && job.spec.name.is_none()
        && job.cause().is_some_and(|cause| lost.contains(&cause.code))
}

fn how_to_go_on(job: &str, output: &mut Output) {
    output.note(&format!("  follow it: agentctl logs -f {job}"));
    output.note(&format!("  end it:    agentctl cancel {job}"));
}

async fn sum_up(client: &Client, job: &JobView, output: &mut Output) -> Result<(), Failure> {
    let recorded = Recorded::read(&client.tracking(&job.job, job.ranks(), output).await?, &[]);
    let entries = match job.outcome.as_ref().and_then(|outcome| outcome.artifacts) {
        // The job's end was reported already; a listing that fails must not make the command fail.
        Some(artifacts) => snapshot::list(&client.blobs(), artifacts.root).await.unwrap_or_default(),
        None => Vec::new(),
    };
    let paper = output.note_paper();
    output.say(&summary(job, &recorded, &entries, paper));
    if let Some(fault) = job.cause() {
        output.fault(fault);
    }
    Ok(())
}

/// The verdict, metrics and outputs of the job, as text.
fn summary(job: &JobView, recorded: &Recorded, outputs: &[Entry], paper: Paper) -> String {
    let mut text = format!("\n{}\n", job.verdict(paper));
    // Writing to a string cannot fail.
    if !recorded.metrics.is_empty() {
        let _ = write!(text, "\n{}", recorded.table(paper));
    }
    if let Some(artifacts) = &job.artifacts {
        let _ = writeln!(
            text,
            "\noutputs: {}, {}",
            count(artifacts.files, "file"),
            size::binary(artifacts.bytes)
        );
        for entry in outputs.iter().take(SHOWN) {
            let path = crate::output::text::clean(&entry.path);
            let _ = writeln!(text, "  {:>10}  {path}", size::binary(entry.digest.size));
        }
        if outputs.len() > SHOWN {
            let _ = writeln!(text, "  and {} more", outputs.len() - SHOWN);
        }
        let _ = writeln!(text, "get them: agentctl download {}", job.job);
    }
    for left_out in left_out_of(job) {
        let _ = writeln!(text, "left out: {}", crate::output::text::clean(&left_out));
    }
    for named in &job.named {
        let _ = writeln!(text, "output {}", crate::output::text::clean(&named.to_string()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::view::NamedView;
    use super::super::view::tests::{ended, failed};
    use super::*;
    use crate::output::text::Ink;

    const PAPER: Paper = Paper { ink: Ink::PLAIN, width: 80 };

    fn named(version: &str) -> NamedView {
        let why = if version.is_empty() { "the job left nothing there" } else { "" };
        let [output, name, version, why] = ["model", "iris", version, why].map(str::to_owned);
        NamedView { output, name, version, why }
    }

    #[test]
    fn test_summary_of_a_job_that_completed() {
        let lines = b"{\"metric\":\"loss\",\"value\":0.5,\"step\":1}\n{\"metric\":\"loss\",\"value\":0.25,\"step\":2}\n";
        let entry = |path: &str, size| Entry {
            path: path.into(),
            digest: agent_model::Digest { size, ..agent_model::Digest::EMPTY },
            executable: false,
        };
        let entries = [entry("outputs/best.json", 96), entry("outputs/model.bin", 3 << 19)];
        let mut job = ended();
        job.named = ["3", ""].map(named).into();
        if let Some(outcome) = &mut job.outcome {
            outcome.left_out = vec!["outputs/latest -> /x/best.json points outside the directory".to_owned()];
        }
        insta::assert_snapshot!(summary(&job, &Recorded::read(lines, &[]), &entries, PAPER), @r"
            train-1 Completed after 12 s, exit code 0

            METRIC  LAST   MIN  MAX  COUNT
            loss    0.25  0.25  0.5      2

            outputs: 2 files, 1.1 MiB
                    96 B  outputs/best.json
                 1.5 MiB  outputs/model.bin
            get them: agentctl download train-1
            left out: outputs/latest -> /x/best.json points outside the directory
            output model is azureml:iris:3
            output model is not named iris: the job left nothing there
        ");
    }

    #[test]
    fn test_summary_of_a_job_that_never_ran() {
        let mut job = failed();
        (job.exit_code, job.started_ms) = (None, None);
        if let Some(outcome) = &mut job.outcome {
            (outcome.started_at, outcome.exit) = (None, None);
        }
        insta::assert_snapshot!(summary(&job, &Recorded::default(), &[], PAPER), @r"
            train-1 Failed, the command never ran
        ");
    }

    #[test]
    fn test_only_a_job_that_never_ran_for_want_of_its_code_is_submitted_again() {
        let mut job = failed();
        let mut lacks = |code: Code, started_ms| {
            job.started_ms = started_ms;
            if let Some(fault) = job.outcome.as_mut().and_then(|outcome| outcome.fault.as_mut()) {
                fault.code = code;
            }
            is_for_want_of_code(&job)
        };
        assert!(lacks(Code::SnapshotMissing, None) && lacks(Code::SnapshotDamaged, None));
        assert!(!lacks(Code::SnapshotMissing, Some(1)) && !lacks(Code::SnapshotStore, None));
        job.started_ms = None;
        let mine = agent_model::JobDraft { name: Some("mine".parse().unwrap()), ..(*job.spec).clone() };
        job.spec = mine.validate().unwrap();
        assert!(!is_for_want_of_code(&job), "the name is taken by now");
    }
}
