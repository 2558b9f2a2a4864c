//! `gc`: makes room in the daemon's store of blobs, or checks it.
//!
//! The daemon decides what may be removed; this prints what was removed, what stays and why.

use std::process::ExitCode;
use std::time::Duration;

use agent_model::size;
use agent_proto::v1;
use serde_json::json;

use super::kept;
use super::view::NodeView;
use crate::cli::GcArgs;
use crate::client::{self, Client, Target, answer, answer_within};
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::count;
use crate::output::{Output, Paper};

/// How long a large store may take.
const DONE_WITHIN: Duration = Duration::from_secs(1800);

/// Makes room, or checks.
pub(super) async fn gc(args: &GcArgs, to: Option<&Target>, output: &mut Output) -> Result<ExitCode, Failure> {
    let client = Client::find(to).await?;
    if args.check {
        return check(args.json, &client, output).await;
    }
    let request = v1::CollectBlobsRequest { all: args.all, dry_run: args.dry_run };
    output.busy("looking at what is needed");
    let collected = answer_within(DONE_WITHIN, client.nodes().collect_blobs(request)).await;
    output.rest();
    let collected = collected?;
    if args.json {
        output.json(&as_json(&collected, args.dry_run))?;
        return Ok(ExitCode::SUCCESS);
    }
    output.note(&sum(&collected, args.dry_run));
    if !collected.stays.is_empty() {
        output.print(&table(&collected, output.paper()))?;
    }
    let nodes = client.machines().await?.nodes;
    let nodes = nodes.into_iter().map(NodeView::try_from).collect::<Result<Vec<_>, _>>()?;
    if let Some(environments) = environments(&nodes) {
        output.note(&environments);
    }
    for (node, kept) in nodes.iter().filter_map(|node| Some((node, kept::line(node)?))) {
        output.note(&format!("{} keeps {kept}", node.node));
    }
    if let Some(advice) = advice(&collected, args.dry_run) {
        output.note(advice);
    }
    Ok(ExitCode::SUCCESS)
}

/// See `agent/docs/json.md`.
fn as_json(collected: &v1::CollectBlobsResponse, dry_run: bool) -> serde_json::Value {
    let stay =
        |stay: &v1::BlobsStay| json!({ "reason": stay.reason, "blobs": stay.blobs, "bytes": stay.bytes });
    json!({
        "dry_run": dry_run,
        "freed": { "blobs": collected.freed_blobs, "bytes": collected.freed_bytes },
        "store_bytes": collected.store_bytes,
        "store_limit_bytes": collected.store_limit_bytes,
        "enough": collected.enough,
        "stays": collected.stays.iter().map(stay).collect::<Vec<_>>(),
    })
}

fn sum(collected: &v1::CollectBlobsResponse, dry_run: bool) -> String {
    let freed = match (collected.freed_blobs, dry_run) {
        (0, _) => "there is nothing to remove".to_owned(),
        (blobs, dry_run) => {
            let word = if dry_run { "would free" } else { "freed" };
            format!("{word} {} in {}", size::binary(collected.freed_bytes), count(blobs, "blob"))
        }
    };
    let (taken, limit) = (size::binary(collected.store_bytes), size::binary(collected.store_limit_bytes));
    format!("{freed}; the store takes {taken} of at most {limit}")
}

fn table(collected: &v1::CollectBlobsResponse, paper: Paper) -> String {
    let mut table = Table::new(&["WHAT STAYS", "BLOBS", "SIZE"], &[1, 2]);
    for stay in &collected.stays {
        let what = match stay.reason.as_str() {
            "jobs" => "needed by jobs that have not ended",
            "outputs" => "outputs of jobs that have ended",
            "environments" => "locks and build logs of environments",
            "assets" => "data with a name",
            "replicas" => "needed by what runs on this machine",
            "recent" => "just used",
            "room" => "not needed",
            other => other,
        };
        table.row([
            Cell::from(what),
            Cell::from(stay.blobs.to_string()),
            Cell::from(size::binary(stay.bytes)),
        ]);
    }
    table.render(paper)
}

/// The space that environments take; they are removed one by one.
fn environments(nodes: &[NodeView]) -> Option<String> {
    let kept: Vec<u64> =
        nodes.iter().flat_map(|node| &node.inventory.environments).map(|kept| kept.bytes).collect();
    let (number, bytes): (u64, u64) = (kept.len() as u64, kept.iter().sum());
    (bytes > 0).then(|| {
        let (number, bytes) = (count(number, "environment"), size::binary(bytes));
        format!("{number} of {bytes} go by their own rule; remove one with: agentctl envs rm KEY")
    })
}

fn advice(collected: &v1::CollectBlobsResponse, dry_run: bool) -> Option<&'static str> {
    let has = |reason: &str| collected.stays.iter().any(|stay| stay.reason == reason && stay.bytes > 0);
    if !collected.enough && !dry_run {
        return Some(match has("outputs") {
            true => "more should go, and nothing else may: a larger disk or another `store_size` gives room",
            false => "more should go, and nothing else may yet: try again when jobs have ended",
        });
    }
    has("room").then_some("what is not needed goes by itself when room is; at once with: agentctl gc --all")
}

/// Reads everything; damage is a failure.
async fn check(as_json: bool, client: &Client, output: &mut Output) -> Result<ExitCode, Failure> {
    let whole = client.machines().await?.controller.unwrap_or_default().store_bytes;
    output.busy("reading the store");
    let mut told = answer(client.nodes().check_blobs(v1::CheckBlobsRequest {})).await?;
    let mut last = v1::CheckBlobsResponse::default();
    // No deadline, because a large file brings no message for a long time; the connection notices a daemon that is
    // gone.
    while let Some(checked) = told.message().await.map_err(|status| client::fault(&status))? {
        let (read, whole) = (size::binary(checked.bytes), size::binary(whole.max(checked.bytes)));
        output.busy(&format!("read {read} of {whole}, {} damaged", checked.damaged));
        last = checked;
    }
    output.rest();
    if as_json {
        let v1::CheckBlobsResponse { blobs, bytes, damaged, unread, found, .. } = last;
        output.json(&json!({
            "blobs": blobs, "bytes": bytes, "damaged": damaged, "unread": unread, "found": found,
        }))?;
    } else {
        output.note(&verdict(&last));
    }
    Ok(if last.damaged == 0 && last.unread == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn verdict(checked: &v1::CheckBlobsResponse) -> String {
    let mut parts = Vec::new();
    if checked.damaged > 0 {
        parts.push(format!(
            "{} damaged, taken out of the store; a job that needs one says so: submit it again, and it is sent \
             again. What was an output is lost. Check the disk and the memory of this machine",
            checked.damaged
        ));
    }
    if checked.unread > 0 {
        let unread = checked.unread;
        parts.push(format!(
            "{unread} could not be read now and stay; the daemon's log says why, then try again"
        ));
    }
    if checked.found > 0 {
        parts.push(format!("{} that were taken for missing are there after all", checked.found));
    }
    if parts.is_empty() {
        parts.push("all are as they were written".to_owned());
    }
    let read = format!("read {} in {}", size::binary(checked.bytes), count(checked.blobs, "blob"));
    format!("{read}: {}", parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::pretty;
    use crate::output::text::Ink;

    fn collected(stays: &[(&str, u64, u64)]) -> v1::CollectBlobsResponse {
        let stay = |(reason, blobs, bytes): &(&str, u64, u64)| v1::BlobsStay {
            reason: (*reason).to_owned(),
            blobs: *blobs,
            bytes: *bytes,
        };
        v1::CollectBlobsResponse {
            freed_blobs: 1204,
            freed_bytes: 812 << 20,
            store_bytes: 3 << 29,
            store_limit_bytes: 25 << 30,
            enough: true,
            stays: stays.iter().map(stay).collect(),
        }
    }

    #[test]
    fn test_what_went_and_what_stays_is_said() {
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        let done = collected(&[("outputs", 12, 900 << 20), ("recent", 3, 5 << 20)]);
        assert_eq!(
            sum(&done, false),
            "freed 812 MiB in 1204 blobs; the store takes 1.5 GiB of at most 25 GiB"
        );
        assert!(sum(&done, true).starts_with("would free 812 MiB"));
        insta::assert_snapshot!(table(&done, paper), @r"
            WHAT STAYS                       BLOBS     SIZE
            outputs of jobs that have ended     12  900 MiB
            just used                            3    5 MiB
        ");
        let nothing = v1::CollectBlobsResponse { freed_blobs: 0, freed_bytes: 0, ..done };
        assert!(sum(&nothing, true).starts_with("there is nothing to remove;"));
    }

    #[test]
    fn test_advice_fits_what_stays() {
        let room = collected(&[("room", 1, 1)]);
        assert!(advice(&room, false).is_some_and(|said| said.contains("gc --all")));
        let full = |stays| v1::CollectBlobsResponse { enough: false, ..collected(stays) };
        assert!(advice(&full(&[("outputs", 1, 1)]), false).is_some_and(|said| said.contains("store_size")));
        assert!(advice(&full(&[("jobs", 1, 1)]), false).is_some_and(|said| said.contains("have ended")));
        assert_eq!(advice(&collected(&[("outputs", 1, 1)]), false), None);
    }

    #[test]
    fn test_json_of_a_collection_is_as_documented() {
        insta::assert_snapshot!("json", pretty(&as_json(&collected(&[("recent", 3, 5)]), true)));
    }
}
