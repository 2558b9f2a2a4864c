//! `why`: the history of one job, and whose fault its failure was.

use std::borrow::Cow;
use std::fmt::Write;
use std::time::Duration;

use agent_model::outcome::Usage;
use agent_model::{Clock, Code, SystemClock, Timestamp, size};
use agent_proto::v1;
use serde_json::{Value, json};

use super::view::{FaultView, JobView};
use crate::cli::JobJsonArgs;
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::text::{Tone, clean, cut, duration, moment, wrap};
use crate::output::{Output, Paper, fault};

/// Tells what happened to a job, and why.
pub(super) async fn why(args: &JobJsonArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let job = JobView::try_from(client.job(&args.job).await?)?;
    let events = client.history(&job.job).await?;
    if args.json {
        return output.json(&document(&job, &events, SystemClock.now()));
    }
    let paper = output.paper();
    output.print(&render(&job, &events, SystemClock.now(), paper))
}

/// How long a job was in each phase.
#[derive(Debug, Default, PartialEq, Eq)]
struct Phases {
    waited: Duration,
    prepared: Duration,
    ran: Duration,
    stored: Duration,
    unheard: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoryPhase {
    Waiting,
    Preparing,
    Running,
    Storing,
    Unheard,
    Over,
}

/// The phase that an event begins.
fn begins(text: &str) -> Option<StoryPhase> {
    let table: [(&str, StoryPhase); 8] = [
        ("queued by", StoryPhase::Waiting),
        ("placed on", StoryPhase::Preparing),
        ("running", StoryPhase::Running),
        ("ending left-over", StoryPhase::Storing),
        ("storing logs", StoryPhase::Storing),
        ("attempt ", StoryPhase::Waiting),
        ("lost:", StoryPhase::Waiting),
        ("ended:", StoryPhase::Over),
    ];
    let text = of_rank(text);
    let known = table.into_iter().find(|(start, _)| text.starts_with(start)).map(|(_, phase)| phase);
    known.or(text.ends_with("stopped answering").then_some(StoryPhase::Unheard))
}

/// The text of an event without the rank that it is about.
fn of_rank(text: &str) -> &str {
    match text.strip_prefix("rank ").and_then(|rest| rest.split_once(": ")) {
        Some((rank, told)) if rank.bytes().all(|byte| byte.is_ascii_digit()) => told,
        _ => text,
    }
}

/// Adds up the phases of a job, until `now` if it has not ended.
fn phases(events: &[v1::HistoryEvent], now: Timestamp) -> Phases {
    let mut phases = Phases::default();
    let (mut at, mut phase, mut before) =
        (events.first().map_or(now.0, |e| e.at_ms), StoryPhase::Waiting, StoryPhase::Waiting);
    let end = (now.0, None);
    let moments = events.iter().map(|event| (event.at_ms, Some(event.text.as_str())));
    for (next, text) in moments.chain([end]) {
        let length = Timestamp(next).since(Timestamp(at));
        match phase {
            StoryPhase::Waiting => phases.waited += length,
            StoryPhase::Preparing => phases.prepared += length,
            StoryPhase::Running => phases.ran += length,
            StoryPhase::Storing => phases.stored += length,
            StoryPhase::Unheard => phases.unheard += length,
            StoryPhase::Over => {}
        }
        at = next.max(at);
        let Some(text) = text else { break };
        if phase == StoryPhase::Unheard && text.ends_with("answers again") {
            phase = before;
        } else if let Some(begun) = begins(text) {
            (before, phase) = (phase, begun);
        }
    }
    phases
}

impl Phases {
    /// `waited 0.6 s, prepared 0.1 s, ran 2.5 s`; phases without duration are left out.
    fn words(&self) -> String {
        let parts = [
            ("waited", self.waited),
            ("prepared", self.prepared),
            ("ran", self.ran),
            ("not heard of for", self.unheard),
            ("stored results for", self.stored),
        ];
        let parts = parts.into_iter().filter(|(_, length)| length.as_millis() >= 50);
        parts.map(|(word, length)| format!("{word} {}", duration(length))).collect::<Vec<_>>().join(", ")
    }
}

fn document(job: &JobView, events: &[v1::HistoryEvent], now: Timestamp) -> Value {
    let event = |event: &v1::HistoryEvent| {
        let node = Some(&event.node).filter(|node| !node.is_empty());
        json!({ "at_ms": event.at_ms, "attempt": event.epoch, "node": node, "text": event.text })
    };
    let phases = phases(events, now);
    json!({
        "job": job.job,
        "state": job.state,
        "detail": job.detail,
        "events": events.iter().map(event).collect::<Vec<_>>(),
        "waited_s": phases.waited.as_secs_f64(),
        "prepared_s": phases.prepared.as_secs_f64(),
        "ran_s": phases.ran.as_secs_f64(),
        "unheard_s": phases.unheard.as_secs_f64(),
        "stored_s": phases.stored.as_secs_f64(),
        "fault": job.cause().map(FaultView::from),
    })
}

fn render(job: &JobView, events: &[v1::HistoryEvent], now: Timestamp, paper: Paper) -> String {
    let state = paper.ink.paint(job.tone(), &job.state);
    let begin = Timestamp(job.submitted_ms);
    let mut text = format!("{} {state}, submitted {}\n", job.job, moment(begin));
    let parts = phases(events, now).words();
    if !parts.is_empty() {
        let _ = writeln!(text, "{}", wrap(&parts, paper.width, 0)); // writing to a string cannot fail
    }
    text.push('\n');
    let attempts = events.iter().map(|event| event.epoch).max().unwrap_or(0);
    for event in events {
        let at = format!("{:>14}", format!("+{}", since(Timestamp(event.at_ms).since(begin))));
        let attempt =
            if attempts > 1 && event.epoch > 0 { format!("[{}] ", event.epoch) } else { String::new() };
        let plain = plainly(&event.text);
        let short = without_causes(&plain, job);
        let told = cut(&format!("{attempt}{}", clean(&short)), 2 * paper.width);
        let told = wrap(&told, paper.width, 16);
        let _ = writeln!(text, "{}  {told}", paper.ink.paint(Tone::Dim, &at));
    }
    if !job.detail.is_empty() {
        let label = format!("{:>14}", "now");
        let told = wrap(&clean(&present(job, now)), paper.width, 16);
        let _ = writeln!(text, "{}  {told}", paper.ink.paint(Tone::Strong, &label));
    }
    if let Some(advice) = advice(job, events) {
        let _ = writeln!(text, "\n{}", wrap(&advice, paper.width, 0));
    }
    if let Some(cause) = job.cause() {
        let _ = write!(text, "\n{}", fault::render(cause, paper));
        let _ = writeln!(text, "\nIt is up to: {}.", fault::blamed(cause.blame));
        let _ = writeln!(text, "Read more: agentctl explain {}", cause.code);
    }
    text
}

/// The text of an event without the causes of the fault that is shown in full below: they may be a whole traceback.
fn without_causes<'a>(text: &'a str, job: &JobView) -> Cow<'a, str> {
    // What failed may have the rank before it.
    let causes = job.cause().map(|fault| format!(": {}", fault.why.join(": "))).unwrap_or_default();
    if causes.len() > 2 { Cow::Owned(text.replace(&causes, "")) } else { Cow::Borrowed(text) }
}

/// The text of an event as a person would say it, without details that another event has.
fn plainly(text: &str) -> Cow<'_, str> {
    if text.starts_with("running: environment ") {
        return "running".into();
    }
    match text.strip_prefix("placed on ").and_then(|rest| rest.rsplit_once(" as attempt ")) {
        Some((nodes, "1")) => format!("given to {nodes}").into(),
        Some((nodes, attempt)) => format!("given to {nodes}, attempt {attempt}").into(),
        None => text.into(),
    }
}

/// What is done for the job now.
fn present(job: &JobView, now: Timestamp) -> String {
    let nodes: Vec<&str> = job.replicas.iter().map(|replica| replica.node.as_str()).collect();
    let node = nodes.join(", ");
    match (job.state.as_str(), job.duration(now)) {
        ("Running", Some(length)) if !job.is_storing() => {
            format!("running on {node} for {}", duration(length))
        }
        ("Running", _) => job.work(),
        ("Preparing", _) => job.work(),
        _ => job.detail.clone(),
    }
}

/// Advice for the user, where no fault gives it.
fn advice(job: &JobView, events: &[v1::HistoryEvent]) -> Option<String> {
    let node = job.replicas.first().map_or("NODE", |replica| replica.node.as_str());
    let canceled = || events.iter().rev().find(|event| event.text.starts_with("canceled by"));
    Some(match job.state.as_str() {
        "NotResponding" if job.cancel_requested => format!(
            "The wish to end it is remembered and reaches {node} with its first word. If {node} is gone for \
             good: agentctl node lost {node}"
        ),
        "NotResponding" => format!(
            "Nothing is lost: the job goes on there, and when {node} answers again so does the story. If {node} \
             is gone for good: agentctl node lost {node}"
        ),
        "Canceled" if job.cause().is_none() => {
            format!("It was {}; nothing went wrong.", clean(&canceled()?.text))
        }
        "Queued" => waiting_advice(&job.detail)?.to_owned(),
        "Completed" | "Failed" if !is_out_of_memory(job) => memory_advice(&job.job, job.usage()?)?,
        _ => return None,
    })
}

/// Its fault gives the advice then.
fn is_out_of_memory(job: &JobView) -> bool {
    job.cause().is_some_and(|fault| fault.code == Code::OutOfMemory)
}

/// What its peak of memory says of the next run, when there was little left. Files that the kernel kept in memory, which
/// it would have given up, count in the peak: so this is no fault.
fn memory_advice(job: &str, usage: Usage) -> Option<String> {
    let limit = usage.memory_limit?;
    let [peak, of] = [usage.memory_peak, limit].map(size::binary);
    (usage.memory_peak / 19 >= limit / 20).then(|| {
        format!(
            "Its memory peaked at {peak} of {of}. Files that the kernel kept in memory count in that: what it took \
             without them is in `agentctl metrics {job} --system`. If that was near the limit, too, raise \
             `resources.memory`."
        )
    })
}

/// Advice about a wait for this reason, if it does not end by itself.
pub(super) fn waiting_advice(why: &str) -> Option<&'static str> {
    let waits = |text: &str| why.contains(text);
    if waits("being drained") || waits("cordoned") {
        Some("To let new jobs onto the machine again: agentctl undrain.")
    } else if waits("no node has joined") {
        Some("Is agentd running there? agentctl nodes.")
    } else if waits("no node has a Python called") {
        Some(
            "It waits until a machine has that Python; one that is installed is noticed within a minute. To use \
             another, name it under `environment.python`.",
        )
    } else if waits("no node is large enough") && waits("not handed out") {
        Some(
            "A GPU is handed out again once what stands against it is gone; agentctl doctor says what to do.",
        )
    } else if waits("no node is large enough") {
        Some("It would wait for ever on these machines: ask for less under `resources`, or add a machine.")
    } else {
        None
    }
}

/// Time since the submission, to a thousandth of a second while that matters.
fn since(length: Duration) -> String {
    if length.as_secs() < 60 { format!("{:.3} s", length.as_secs_f64()) } else { duration(length) }
}

#[cfg(test)]
mod tests {
    use super::super::view::tests::failed;
    use super::*;
    use crate::output::pretty;
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
        insta::assert_snapshot!(render(&failed(), &events, Timestamp(1_200_000), paper), @r"
            train-1 Failed, submitted 1970-01-01 00:16:39 UTC
            prepared 1 min 40 s

                  +0.000 s  queued
                  +0.012 s  given to box
               +1 min 41 s  ended: the command returned 3\u{1b}[2J,
                            which is a long line about it

            error[RUN-101]: the command returned 3
              fix: see the log

            It is up to: the job, its files or its settings.
            Read more: agentctl explain RUN-101
        ");
        insta::assert_snapshot!("json", pretty(&document(&failed(), &events, Timestamp(1_200_000))));
    }

    #[test]
    fn test_a_traceback_is_told_once_and_by_line() {
        let mut job = failed();
        let fault = job.outcome.as_mut().and_then(|outcome| outcome.fault.as_mut()).unwrap();
        fault.why = vec!["Traceback (most recent call last):".into(), "ValueError: odd".into()];
        let text = format!("the command ended with code 3: {fault}");
        let events = [v1::HistoryEvent { text, ..Default::default() }];
        let told = render(&job, &events, Timestamp(0), Paper { ink: Ink::PLAIN, width: 80 });
        assert!(told.contains("the command ended with code 3: RUN-101: the command returned 3\n"), "{told}");
        assert_eq!(told.matches("ValueError").count(), 1, "{told}");
    }

    #[test]
    fn test_life_of_a_job_is_added_up_over_attempts_and_silence() {
        let event = |at_ms, text: &str| v1::HistoryEvent { at_ms, text: text.into(), ..Default::default() };
        let events = [
            event(0, "queued by uid 0"),
            event(100, "waits: next in line"),
            event(2000, "placed on box as attempt 1"),
            event(3000, "running: environment x built"),
            event(10_000, "box stopped answering"),
            event(30_000, "box answers again"),
            event(40_000, "lost: NODE-103: box was restarted"),
            event(40_000, "attempt 2 may start now"),
            event(41_000, "placed on box as attempt 2"),
            event(41_500, "running"),
        ];
        let phases = phases(&events, Timestamp(45_500));
        assert_eq!(phases.words(), "waited 3.0 s, prepared 1.5 s, ran 21 s, not heard of for 20 s");
    }

    #[test]
    fn test_every_way_of_waiting_has_a_way_on() {
        let mut job = failed();
        (job.outcome, job.state) = (None, "NotResponding".into());
        assert!(advice(&job, &[]).unwrap().contains("agentctl node lost box"));
        job.cancel_requested = true;
        assert!(advice(&job, &[]).unwrap().contains("is remembered"));
        (job.state, job.detail) = ("Queued".into(), "no node takes work now: box is being drained".into());
        assert!(advice(&job, &[]).unwrap().contains("undrain"));
        job.detail = "no node has a Python called python3.9; box has python3 (3.11.7)".into();
        assert!(advice(&job, &[]).unwrap().contains("environment.python"));
        job.state = "Canceled".into();
        let event = v1::HistoryEvent { text: "canceled by uid 7".into(), ..Default::default() };
        assert_eq!(advice(&job, &[event]).unwrap(), "It was canceled by uid 7; nothing went wrong.");
    }
}
