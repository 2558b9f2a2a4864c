//! `keep-awake`: keeps a machine up that shuts itself down, and what is told about that.

use agent_model::Timestamp;
use agent_proto::v1;
use serde::Serialize;
use serde_json::json;

use super::drain::introduce;
use crate::cli::KeepAwakeArgs;
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::{age, clean, moment};

/// How a machine is shut down.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ShutdownView {
    pub(crate) rule: String,
    pub(crate) idle_since_ms: Option<u64>,
    pub(crate) due_ms: Option<u64>,
    pub(crate) kept_up_by: Option<String>,
    pub(crate) awake_until_ms: Option<u64>,
    pub(crate) running: bool,
    pub(crate) failed: Option<String>,
}

impl From<v1::Shutdown> for ShutdownView {
    fn from(wire: v1::Shutdown) -> ShutdownView {
        let text = |text: String| Some(clean(&text).into_owned()).filter(|text| !text.is_empty());
        let at = |at: u64| Some(at).filter(|at| *at > 0);
        ShutdownView {
            rule: clean(&wire.rule).into_owned(),
            idle_since_ms: at(wire.idle_since_ms),
            due_ms: at(wire.due_ms),
            kept_up_by: text(wire.kept_up_by),
            awake_until_ms: at(wire.awake_until_ms),
            running: wire.running,
            failed: text(wire.failed),
        }
    }
}

impl ShutdownView {
    /// `idle for 12 min, shuts down in 18 min (idle for 30 min)`
    pub(crate) fn describe(&self, now: Timestamp) -> String {
        if self.running {
            return format!("shuts down now ({})", self.rule);
        }
        let awake = self.awake_until_ms.map(|until| format!("kept awake until {}", moment(Timestamp(until))));
        let kept = awake.or_else(|| self.kept_up_by.clone());
        let idle = || Some(format!("idle for {}", age(Timestamp(self.idle_since_ms?), now)));
        let when = self.due_ms.map(|due| format!("shuts down in {}", age(now, Timestamp(due))));
        let parts: Vec<String> = kept.or_else(idle).into_iter().chain(when).collect();
        format!("{} ({})", parts.join(", "), self.rule)
    }
}

/// Says so to the controller.
pub(super) async fn keep_awake(
    args: &KeepAwakeArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let whom = introduce(&client, output).await?;
    let for_ms = match args.off {
        true => 0,
        false => u64::try_from(args.length.as_millis()).unwrap_or(u64::MAX),
    };
    let told = answer(client.nodes().keep_awake(v1::KeepAwakeRequest { for_ms })).await?;
    let view = Some(ShutdownView::from(told)).filter(|view| !view.rule.is_empty());
    if args.json {
        return output.json(&json!({ "daemon": whom, "shutdown": view }));
    }
    output.note(&match view.as_ref().map(|view| (view.awake_until_ms, &view.rule)) {
        None => "it stays up: nothing shuts it down by itself".to_owned(),
        Some((Some(until), _)) => format!("it stays up until {}", moment(Timestamp(until))),
        Some((None, rule)) => format!("it shuts down as configured: {rule}"),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_what_is_planned_is_told_in_one_line() {
        let now = Timestamp(10_000_000);
        let minutes = |minutes: u64| minutes * 60_000;
        let wire = v1::Shutdown { rule: "idle for 30 min".into(), ..v1::Shutdown::default() };
        let told = |wire: v1::Shutdown| ShutdownView::from(wire).describe(now);
        let idle =
            v1::Shutdown { idle_since_ms: now.0 - minutes(12), due_ms: now.0 + minutes(18), ..wire.clone() };
        assert_eq!(told(idle.clone()), "idle for 12 min, shuts down in 18 min (idle for 30 min)");
        let awake = v1::Shutdown { awake_until_ms: 3_600_000_000_000, ..wire.clone() };
        assert!(told(awake).starts_with("kept awake until 2084-"), "a date");
        let runs = v1::Shutdown { kept_up_by: "train-1 runs".into(), ..wire.clone() };
        assert_eq!(told(runs), "train-1 runs (idle for 30 min)");
        assert_eq!(told(v1::Shutdown { running: true, ..idle }), "shuts down now (idle for 30 min)");
    }
}
