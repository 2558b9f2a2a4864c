//! `doctor`: the findings about this machine, and what they mean for jobs.

mod bundle;

use std::path::Path;
use std::process::ExitCode;

use agent_model::node::{Finding, Grade};
use agent_model::{Code, Fault};
use serde_json::{Value, json};

use super::kept;
use super::status;
use super::view::{NodeView, grade};
use crate::cli::DoctorArgs;
use crate::client::{self, Client, Target};
use crate::failure::Failure;
use crate::output::text::{Tone, clean, wrap};
use crate::output::{Output, Paper, pretty};

/// A machine and the findings about it.
struct Checked {
    node: String,
    findings: Vec<Finding>,
}

/// Shows the findings of the daemon's machines, or of this one when no daemon runs; 1 if any is bad.
pub(super) async fn doctor(
    args: &DoctorArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let (source, machines) = match Client::find(to).await {
        Ok(client) => ("daemon", ask(&client).await?),
        Err(Failure::Fault(fault)) if fault.code == Code::Unreachable && to.is_none() => {
            output.note("no daemon runs; this machine as it is:");
            let inventory = client::probe().await?;
            ("probe", vec![Checked { node: inventory.hostname, findings: inventory.findings }])
        }
        Err(failure) => return Err(failure),
    };
    let bad = machines.iter().flat_map(|m| &m.findings).any(|finding| finding.grade == Grade::Bad);
    if let Some(file) = &args.bundle {
        return pack(file, document(source, &machines, bad), to, output).await;
    }
    if args.json {
        output.json(&document(source, &machines, bad))?;
    } else {
        let paper = output.paper();
        let text: Vec<String> =
            machines.iter().map(|machine| render(&machine.node, &machine.findings, paper)).collect();
        output.print(&text.join("\n"))?;
    }
    Ok(ExitCode::from(u8::from(bad)))
}

/// Writes the bundle, which is worth more the less works: what the daemon does not tell is left out.
async fn pack(
    file: &Path,
    findings: Value,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let status = match Client::find(to).await {
        Ok(client) => status::as_json(&client).await,
        Err(failure) => Err(failure),
    };
    let status = status.map_or_else(|failure| format!("{failure:?}"), |status| pretty(&status));
    let parts =
        bundle::write(file, vec![("doctor.json", pretty(&findings)), ("status.json", status)]).await?;
    output.note(&format!("{} has {}; look through it before you send it", file.display(), parts.join(", ")));
    Ok(ExitCode::SUCCESS)
}

fn document(source: &str, machines: &[Checked], bad: bool) -> Value {
    let nodes = machines.iter().map(|m| json!({ "node": m.node, "findings": m.findings }));
    json!({ "source": source, "nodes": nodes.collect::<Vec<_>>(), "bad": bad })
}

async fn ask(client: &Client) -> Result<Vec<Checked>, Fault> {
    let nodes = match client.machines().await {
        Ok(machines) => machines.nodes,
        Err(Failure::Fault(fault)) => return Err(*fault),
        Err(_) => Vec::new(),
    };
    let checked = |node| {
        let node = NodeView::try_from(node)?;
        let mut findings = node.inventory.findings.clone();
        findings.extend(kept::finding(&node));
        Ok(Checked { node: node.node, findings })
    };
    nodes.into_iter().map(checked).collect()
}

/// Findings about a machine, as people read them.
pub(super) fn render(node: &str, findings: &[Finding], paper: Paper) -> String {
    let mut text = format!("{}\n", paper.ink.paint(Tone::Strong, &clean(node)));
    let width = findings.iter().map(|finding| finding.topic.chars().count()).max().unwrap_or(0);
    for finding in findings {
        let (word, tone) = grade(finding.grade);
        let mark = paper.ink.paint(tone, &format!("{word:<7}")).into_owned();
        let indent = 2 + 7 + 2 + width + 2;
        let fitted = |words: &str| wrap(&clean(words), paper.width, indent);
        text.push_str(&format!("  {mark}  {:<width$}  {}\n", clean(&finding.topic), fitted(&finding.found)));
        text.push_str(&format!("{:indent$}{}\n", "", paper.ink.paint(Tone::Dim, &fitted(&finding.means))));
        if let Some(fix) = &finding.fix {
            text.push_str(&format!("{:indent$}{}\n", "", fitted(&format!("fix: {fix}"))));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::nodes::tests::small;
    use super::*;
    use crate::output::text::Ink;

    #[test]
    fn test_findings_say_what_they_mean_and_what_to_do() {
        let machine = Checked { node: "box".into(), findings: small().inventory.findings };
        insta::assert_snapshot!(render(&machine.node, &machine.findings, Paper { ink: Ink::PLAIN, width: 60 }), @r"
            box
              good     python  3.11
                               pip environments can be built
              limited  gpu     none
                               jobs that ask for a GPU wait
                               fix: install a driver
        ");
        insta::assert_snapshot!("json", pretty(&document("daemon", &[machine], false)));
    }
}
