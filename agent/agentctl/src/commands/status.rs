//! `status`: this box at a glance.

use std::fmt::Write;

use agent_model::node::Grade;
use agent_model::{Clock, SystemClock, Timestamp, size};
use agent_proto::v1;
use serde_json::{Value, json};

use super::view::{ControllerView, JobView, NodeView, NoticeView};
use super::{doctor, gpus, jobs};
use crate::cli::JsonArgs;
use crate::client::{Client, Target, Whom};
use crate::failure::Failure;
use crate::output::text::{Tone, clean, count, duration, wrap};
use crate::output::{Output, Paper};

/// Jobs shown at most.
const SHOWN: usize = 10;
/// A disk with less than this part free is reported as nearly full.
const LITTLE: f64 = 0.1;

struct Glance {
    controller: ControllerView,
    nodes: Vec<NodeView>,
    /// Jobs that have not ended.
    jobs: Vec<JobView>,
    whom: Whom,
    /// Daemons that are not this one.
    others: Vec<Whom>,
}

/// Shows the daemon, its machines and what they do.
pub(super) async fn status(args: &JsonArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let v1::ListNodesResponse { nodes, controller } = client.machines().await?;
    let (jobs, _) = jobs::list(&client, 500, true, |_| true).await?;
    let glance = Glance {
        controller: controller.unwrap_or_default().into(),
        nodes: nodes.into_iter().map(NodeView::try_from).collect::<Result<_, _>>()?,
        jobs,
        whom: client.whom().await?,
        others: client.others().await,
    };
    if args.json {
        return output.json(&document(&glance));
    }
    let paper = output.paper();
    output.print(&render(&glance, SystemClock.now(), paper))
}

fn document(glance: &Glance) -> Value {
    json!({
        "controller": glance.controller,
        "socket": glance.whom.socket,
        "user": glance.whom.user,
        "others": glance.others,
        "nodes": glance.nodes,
        "jobs": glance.jobs,
    })
}

fn render(glance: &Glance, now: Timestamp, paper: Paper) -> String {
    let controller = &glance.controller;
    let strong = |text: &str| paper.ink.paint(Tone::Strong, text).into_owned();
    let up = duration(now.since(Timestamp(controller.started_ms)));
    let mut text = format!(
        "{} {} {} {}, up {up}, process {}\n",
        strong("agentd"),
        controller.version,
        if glance.whom.context.is_some() { "for" } else { "of" },
        glance.whom.user,
        controller.pid
    );
    // Writing to a string cannot fail.
    let _ = writeln!(text, "  state   {}", clean(&controller.state_dir));
    let place = if glance.whom.context.is_some() { "at    " } else { "socket" };
    let _ = writeln!(text, "  {place}  {}", glance.whom.socket.display());
    let (taken, limit) = (size::decimal(controller.store_bytes), size::decimal(controller.store_limit_bytes));
    let _ = writeln!(text, "  store   {taken} of at most {limit}");
    let running = glance.jobs.iter().filter(|job| job.state != "Queued").count();
    let waiting = glance.jobs.len() - running;
    let _ = writeln!(text, "  jobs    {running} in work, {waiting} waiting");
    for node in &glance.nodes {
        let _ = write!(text, "\n{}", machine(node, paper));
    }
    if !glance.jobs.is_empty() {
        let shown = &glance.jobs[..glance.jobs.len().min(SHOWN)];
        let _ = write!(text, "\n{}", jobs::table(shown, now, paper));
        if glance.jobs.len() > SHOWN {
            let _ = writeln!(text, "and {} more: agentctl jobs --active --all", glance.jobs.len() - SHOWN);
        }
    }
    for hint in hints(glance, now) {
        let _ = writeln!(text, "\n{} {}", paper.ink.paint(Tone::Warn, "hint:"), wrap(&hint, paper.width, 6));
    }
    text
}

fn machine(node: &NodeView, paper: Paper) -> String {
    let inventory = &node.inventory;
    let name = clean(&node.node);
    let mut text = format!(
        "{} {}, {} of {} used\n",
        paper.ink.paint(Tone::Strong, &name),
        paper.ink.paint(node.tone(), node.condition()),
        node.slots_used,
        count(inventory.slots.into(), "slot")
    );
    let hardware = format!(
        "{}, {}, {}, {}",
        clean(&inventory.os),
        count(inventory.cpus.into(), "CPU"),
        gpus::total(inventory),
        size::decimal(inventory.memory)
    );
    let _ = writeln!(text, "  {hardware}");
    if !inventory.labels.is_empty() {
        let _ = writeln!(text, "{}", wrap(&format!("  labels: {}", node.labels()), paper.width, 10));
    }
    for line in gpus::lines(inventory, paper) {
        let _ = writeln!(text, "{line}");
    }
    let _ = writeln!(
        text,
        "  disk: {} free of {}",
        size::decimal(node.disk_free_bytes),
        size::decimal(inventory.disk)
    );
    if !inventory.environments.is_empty() {
        let kept = inventory.environments.len() as u64;
        let size = inventory.environments.iter().map(|kept| kept.bytes).sum();
        let _ = writeln!(
            text,
            "  envs: {} of {}: agentctl envs list",
            size::decimal(size),
            count(kept, "environment")
        );
    }
    // How the processes of jobs are grouped and limited.
    if let Some(kept) = inventory.findings.iter().find(|finding| finding.topic == "cgroups") {
        let kept = format!("  jobs: control groups {}; {}", clean(&kept.found), clean(&kept.means));
        let _ = writeln!(text, "{}", wrap(&kept, paper.width, 8));
    }
    for grade in [Grade::Bad, Grade::Limited, Grade::Good] {
        let (word, tone) = doctor::grade(grade);
        let of_grade = inventory.findings.iter().filter(|finding| finding.grade == grade);
        let topics: Vec<_> = of_grade.map(|finding| clean(&finding.topic).into_owned()).collect();
        if !topics.is_empty() {
            let topics = wrap(&topics.join(", "), paper.width, 11);
            let _ = writeln!(text, "  {}  {topics}", paper.ink.paint(tone, &format!("{word:<7}")));
        }
    }
    text
}

/// A note about a daemon that was not asked.
pub(super) fn another(other: &Whom) -> String {
    format!("{other} runs on this machine too; agentctl --socket {} speaks to it", other.socket.display())
}

/// Hints for the user.
fn hints(glance: &Glance, now: Timestamp) -> Vec<String> {
    let told = |notice: &NoticeView| format!("{}; {}", clean(&notice.what), clean(&notice.fix));
    let mut hints: Vec<String> = glance.controller.notices.iter().map(told).collect();
    hints.extend(glance.others.iter().map(another));
    for node in &glance.nodes {
        let inventory = &node.inventory;
        if (node.disk_free_bytes as f64) < LITTLE * inventory.disk as f64 {
            hints.push(format!("the disk of {} is nearly full: make room, or jobs will wait; agentctl gc --all removes what no job needs", node.node));
        }
        for finding in inventory.findings.iter().filter(|finding| finding.grade == Grade::Bad) {
            let fix = finding.fix.as_deref().unwrap_or("agentctl doctor says more");
            let (topic, found) = (clean(&finding.topic), clean(&finding.found));
            hints.push(format!("{} takes no jobs: {topic}: {found}; {}", node.node, clean(fix)));
        }
        match node.eligibility.as_str() {
            "draining" => hints.push(format!(
                "{} is being drained: no new jobs until it is opened again: agentctl undrain {0}",
                node.node
            )),
            "cordoned" => {
                hints.push(format!("{} takes no new jobs: agentctl undrain {0} opens it", node.node))
            }
            _ => {}
        }
        if matches!(node.liveness.as_str(), "not_responding" | "down") {
            let seen = duration(now.since(Timestamp(node.last_seen_ms)));
            hints.push(format!(
                "{} has not answered for {seen}; its jobs go on. If it is gone for good: agentctl node lost {0}",
                node.node
            ));
        }
    }
    if let Some(job) = glance.jobs.iter().rev().find(|job| job.state == "Queued" && !job.detail.is_empty()) {
        hints.push(format!("{} waits: {}", job.job, clean(&job.detail)));
    }
    hints
}

#[cfg(test)]
mod tests {
    use super::super::nodes::tests::small;
    use super::super::view::tests::failed;
    use super::*;
    use crate::output::pretty;
    use crate::output::text::Ink;

    fn glance(nodes: Vec<NodeView>, jobs: Vec<JobView>) -> Glance {
        let controller = ControllerView {
            version: "0.1.0".into(),
            started_ms: 1_000_000,
            state_dir: "/home/ada/agentd".into(),
            queued: 0,
            running: 0,
            pid: 7,
            incarnation: "x".into(),
            store_bytes: 1_200_000_000,
            store_limit_bytes: 25_000_000_000,
            notices: Vec::new(),
        };
        let whom = Whom { socket: "/home/ada/agentd/agentd.sock".into(), user: "ada".into(), context: None };
        Glance { controller, nodes, jobs, whom, others: Vec::new() }
    }

    #[test]
    fn test_a_quiet_box_at_a_glance() {
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        insta::assert_snapshot!(render(&glance(vec![small()], Vec::new()), Timestamp(1_200_000), paper), @r"
            agentd 0.1.0 of ada, up 3 min 20 s, process 7
              state   /home/ada/agentd
              socket  /home/ada/agentd/agentd.sock
              store   1.2 GB of at most 25 GB
              jobs    0 in work, 0 waiting

            box ready, 1 of 2 slots used
              Ubuntu 22.04.4 LTS, 8 CPUs, 0 GPUs, 16 GB
              disk: 120 GB free of 500 GB
              limited  gpu
              good     python
        ");
    }

    #[test]
    fn test_document_of_a_box() {
        let mut glance = glance(Vec::new(), Vec::new());
        glance.others.push(Whom {
            socket: "/run/agentd/agentd.sock".into(),
            user: "root".into(),
            context: None,
        });
        glance.controller.notices = vec![NoticeView { what: "a notice".into(), fix: "act".into() }];
        insta::assert_snapshot!("json", pretty(&document(&glance)));
    }

    #[test]
    fn test_hints_name_what_is_in_the_way() {
        let (mut node, mut job) = (small(), failed());
        node.disk_free_bytes = 1_000_000;
        node.inventory.findings[0].grade = Grade::Bad;
        (job.state, job.detail) = ("Queued".into(), "all slots are busy".into());
        let mut glance = glance(vec![node], vec![job]);
        glance.others.push(Whom {
            socket: "/run/agentd/agentd.sock".into(),
            user: "root".into(),
            context: None,
        });
        insta::assert_snapshot!(hints(&glance, Timestamp(0)).join("\n"), @r"
            the daemon of root at /run/agentd/agentd.sock runs on this machine too; agentctl --socket /run/agentd/agentd.sock speaks to it
            the disk of box is nearly full: make room, or jobs will wait; agentctl gc --all removes what no job needs
            box takes no jobs: python: 3.11; agentctl doctor says more
            train-1 waits: all slots are busy
        ");
    }
}
