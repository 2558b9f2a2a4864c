//! `why`: the story of one job, and whose fault it was.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use agent_model::Timestamp;
use agent_proto::v1;
use serde_json::{Value, json};

use super::view::{FaultView, JobView};
use crate::cli::JobJsonArgs;
use crate::client::{Client, answer};
use crate::failure::Failure;
use crate::output::text::{Tone, clean, cut, duration, moment, wrap};
use crate::output::{Output, Paper, fault};

/// Tells what happened to a job, and why.
pub(super) async fn why(
    args: &JobJsonArgs,
    socket: Option<&Path>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(socket).await?;
    let job = JobView::try_from(client.job(&args.job).await?)?;
    let request = v1::GetJobRequest { job: args.job.clone() };
    let events = answer(client.jobs().history(request)).await?.events;
    if args.json {
        return output.json(&document(&job, &events));
    }
    let paper = output.paper();
    output.print(&render(&job, &events, paper))
}

fn document(job: &JobView, events: &[v1::HistoryEvent]) -> Value {
    let event = |event: &v1::HistoryEvent| {
        let node = Some(&event.node).filter(|node| !node.is_empty());
        json!({ "at_ms": event.at_ms, "attempt": event.epoch, "node": node, "text": event.text })
    };
    json!({
        "job": job.job,
        "state": job.state,
        "detail": job.detail,
        "events": events.iter().map(event).collect::<Vec<_>>(),
        "fault": job.cause().map(FaultView::from),
    })
}

fn render(job: &JobView, events: &[v1::HistoryEvent], paper: Paper) -> String {
    let state = paper.ink.paint(job.tone(), &job.state);
    let begin = Timestamp(job.submitted_ms);
    let mut text = format!("{} {state}, submitted {}\n\n", job.job, moment(begin));
    let attempts = events.iter().map(|event| event.epoch).max().unwrap_or(0);
    for event in events {
        let at = format!("{:>14}", format!("+{}", since(Timestamp(event.at_ms).since(begin))));
        let attempt =
            if attempts > 1 && event.epoch > 0 { format!("[{}] ", event.epoch) } else { String::new() };
        // A whole fault may stand in it; that is shown in full below.
        let told = cut(&format!("{attempt}{}", clean(&event.text)), 2 * paper.width);
        let told = wrap(&told, paper.width, 16);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}  {told}", paper.ink.paint(Tone::Dim, &at));
    }
    if !job.detail.is_empty() {
        let now = format!("{:>14}", "now");
        let told = wrap(&clean(&job.detail), paper.width, 16);
        let _ = writeln!(text, "{}  {told}", paper.ink.paint(Tone::Strong, &now));
    }
    if let Some(cause) = job.cause() {
        let _ = write!(text, "\n{}", fault::render(cause, paper));
        let _ = writeln!(text, "\nIt is up to: {}.", fault::blamed(cause.blame));
        let _ = writeln!(text, "Read more: agentctl explain {}", cause.code);
    }
    text
}

/// Time since the submission, to a thousandth of a second while that matters.
fn since(length: Duration) -> String {
    if length.as_secs() < 60 { format!("{:.3} s", length.as_secs_f64()) } else { duration(length) }
}

#[cfg(test)]
mod tests {
    use super::super::view::tests::failed;
    use super::*;
    use crate::output::text::Ink;

    #[test]
    fn test_story_has_times_the_fault_and_who_has_to_act() {
        let event = |at_ms, epoch, text: &str| v1::HistoryEvent {
            at_ms,
            epoch,
            node: "box".into(),
            text: text.into(),
        };
        let events = [
            event(999_000, 0, "queued"),
            event(999_012, 1, "placed on box as attempt 1"),
            event(1_100_000, 1, "ended: the command returned 3\x1b[2J, which is a long line about it"),
        ];
        let paper = Paper { ink: Ink::PLAIN, width: 60 };
        assert_eq!(
            render(&failed(), &events, paper),
            "train-1 Failed, submitted 1970-01-01 00:16:39 UTC\n\
             \n\
             \x20     +0.000 s  queued\n\
             \x20     +0.012 s  placed on box as attempt 1\n\
             \x20  +1 min 41 s  ended: the command returned 3\\u{1b}[2J,\n\
             \x20               which is a long line about it\n\
             \n\
             error[RUN-101]: the command returned 3\n\
             \x20 fix: see the log\n\
             \n\
             It is up to: the job, its files or its settings.\n\
             Read more: agentctl explain RUN-101\n"
        );
    }
}
