//! `keep-awake`: keeps a machine up that shuts itself down, and what is told about that.

use agent_model::Timestamp;
use agent_proto::v1;
use serde_json::json;

use super::drain::introduce;
use super::view::ShutdownView;
use crate::cli::KeepAwakeArgs;
use crate::client::{Client, Target, answer};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::text::moment;

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
