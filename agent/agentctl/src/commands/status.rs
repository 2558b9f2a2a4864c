//! `status`: this box at a glance. A daemon that is only a node tells of its machine and of its connection.

mod stopped;
mod uplink;

use std::fmt::Write;
use std::time::Duration;

use agent_model::node::Grade;
use agent_model::{Clock, Code, SystemClock, Timestamp, size};
use agent_proto::v1;
use serde_json::{Value, json};

use super::view::{ControllerView, JobView, NodeView, NoticeView};
use super::{gpus, jobs, kept, view};
use crate::cli::StatusArgs;
use crate::client::{Client, Target, Whom, person};
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::{Tone, age, ago, clean, count, duration, wrap};
use crate::output::{Output, Paper};
use uplink::UplinkView;

/// Jobs shown at most.
const SHOWN: usize = 10;
/// The latest jobs, among which faults are looked for.
const LATEST: u32 = 100;
/// Faults shown at most, and for how long.
const FAULTS: usize = 5;
const RECENT: Duration = Duration::from_secs(24 * 3600);
/// A disk with less than this part free is reported as nearly full.
const LITTLE: f64 = 0.1;

struct Glance {
    controller: ControllerView,
    /// Of a daemon that is only a node.
    uplink: Option<UplinkView>,
    nodes: Vec<NodeView>,
    /// Jobs that have not ended: what runs, then what waits.
    jobs: Vec<JobView>,
    /// Jobs that ended with a fault a while ago, the latest first.
    failed: Vec<JobView>,
    whom: Whom,
    /// Who asks.
    own: String,
    /// Daemons that are not this one.
    others: Vec<Whom>,
}

/// Shows the daemon, its machines and what they do.
pub(super) async fn status(
    args: &StatusArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = match Client::find(to).await {
        Err(Failure::Fault(fault)) if fault.code == Code::Unreachable => {
            return Err(stopped::told(*fault, to).into());
        }
        found => found?,
    };
    if args.watch {
        return jobs::watch(&client, output, async |paper| {
            Ok(render(&Glance::take(&client).await?, SystemClock.now(), paper))
        })
        .await;
    }
    let glance = Glance::take(&client).await?;
    if args.json {
        return output.json(&document(&glance));
    }
    let paper = output.paper();
    output.print(&render(&glance, SystemClock.now(), paper))
}

/// The same as JSON.
pub(super) async fn as_json(client: &Client) -> Result<Value, Failure> {
    Ok(document(&Glance::take(client).await?))
}

impl Glance {
    /// Asks for everything at once.
    async fn take(client: &Client) -> Result<Glance, Failure> {
        let active = jobs::JobQuery { limit: 500, active: true, standing: true, ..jobs::JobQuery::default() };
        let (machines, active, recent, whom, others) = tokio::join!(
            Box::pin(client.machines()),
            Box::pin(jobs::list(client, &active)),
            Box::pin(client.latest_jobs(LATEST)),
            client.whom(),
            client.others(),
        );
        let v1::ListNodesResponse { nodes, controller, uplink, .. } = machines?;
        let recent: Vec<JobView> = recent?.into_iter().map(JobView::try_from).collect::<Result<_, _>>()?;
        Ok(Glance {
            controller: controller.unwrap_or_default().into(),
            uplink: uplink.map(UplinkView::from),
            nodes: nodes.into_iter().map(NodeView::try_from).collect::<Result<_, _>>()?,
            jobs: active?.0,
            failed: latest_failed(recent, SystemClock.now()),
            whom: whom?,
            own: person(&client.own()),
            others,
        })
    }
}

/// Those that failed within a day, the latest end first.
fn latest_failed(jobs: Vec<JobView>, now: Timestamp) -> Vec<JobView> {
    let is_recent = |job: &JobView| job.ended_ms.is_some_and(|ended| now.since(Timestamp(ended)) < RECENT);
    let mut failed: Vec<JobView> = jobs
        .into_iter()
        .filter(|job| job.state == "Failed" && job.fault.is_some() && is_recent(job))
        .collect();
    failed.sort_by_key(|job| std::cmp::Reverse(job.ended_ms));
    failed.truncate(FAULTS);
    failed
}

fn document(glance: &Glance) -> Value {
    let mut newest_first: Vec<&JobView> = glance.jobs.iter().collect();
    newest_first.sort_by_key(|job| std::cmp::Reverse(job.submitted_ms));
    json!({
        "controller": glance.controller,
        "uplink": glance.uplink,
        "socket": glance.whom.socket,
        "user": glance.whom.user,
        "others": glance.others,
        "nodes": glance.nodes,
        "jobs": newest_first,
        "failed": glance.failed,
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
    if let Some(uplink) = &glance.uplink {
        let tone = if uplink.up { Tone::Good } else { Tone::Warn };
        let link = paper.ink.paint(tone, &uplink.describe(now)).into_owned();
        let _ = writeln!(
            text,
            "  role    node of {}\n  link    {}",
            clean(&uplink.controller),
            wrap(&link, paper.width, 10)
        );
    }
    let _ = writeln!(text, "  state   {}", clean(&controller.state_dir));
    let place = if glance.whom.context.is_some() { "at    " } else { "socket" };
    let _ = writeln!(text, "  {place}  {}", glance.whom.socket.display());
    let (taken, limit) = (size::binary(controller.store_bytes), size::binary(controller.store_limit_bytes));
    let _ = writeln!(text, "  store   {taken} of at most {limit}");
    let running = glance.jobs.iter().filter(|job| job.state != "Queued").count();
    let waiting = match glance.uplink {
        None => format!(", {} waiting", glance.jobs.len() - running),
        Some(_) => " here".to_owned(), // only the controller knows what waits
    };
    let _ = writeln!(text, "  jobs    {running} in work{waiting}");
    if let Some(shutdown) = &controller.shutdown {
        let _ = writeln!(text, "  power   {}", wrap(&shutdown.describe(now), paper.width, 10));
    }
    for node in &glance.nodes {
        let _ = write!(text, "\n{}", machine(node, now, paper));
    }
    if !glance.jobs.is_empty() {
        let shown = glance.jobs[..glance.jobs.len().min(SHOWN)].to_vec();
        let _ = write!(text, "\n{}", jobs::table(shown, &glance.own, now, paper));
        if glance.jobs.len() > SHOWN {
            let _ = writeln!(text, "and {} more: agentctl jobs --active --all", glance.jobs.len() - SHOWN);
        }
    }
    if !glance.failed.is_empty() {
        let _ = write!(text, "\n{}", faults(&glance.failed, now, paper));
    }
    for hint in hints(glance, now) {
        let _ = writeln!(text, "\n{} {}", paper.ink.paint(Tone::Warn, "hint:"), wrap(&hint, paper.width, 6));
    }
    text
}

/// What jobs take of a machine: `1 of 2 slots used`, or how much of it where they share it by size.
fn use_of(node: &NodeView) -> String {
    let NodeView { inventory, slots_used, .. } = node;
    if inventory.job_cpus == 0 {
        return format!("{slots_used} of {} used", count(inventory.slots.into(), "slot"));
    }
    let reserved = match (inventory.reserved_cpus, inventory.reserved_memory) {
        (0, 0) => String::new(),
        (0, memory) => format!(" ({} reserved)", size::binary(memory)),
        (cpus, memory) => format!(" ({} and {} reserved)", count(cpus.into(), "CPU"), size::binary(memory)),
    };
    format!(
        "{} with {} of {} and {} of {}{reserved}",
        count((*slots_used).into(), "job"),
        node.cpus_used,
        count(inventory.cpus.saturating_sub(inventory.reserved_cpus).into(), "CPU"),
        size::binary(node.memory_used_bytes),
        size::binary(inventory.memory.saturating_sub(inventory.reserved_memory))
    )
}

fn machine(node: &NodeView, now: Timestamp, paper: Paper) -> String {
    let inventory = &node.inventory;
    let name = clean(&node.node);
    let mut text = format!(
        "{} {}, seen {}, {}\n",
        paper.ink.paint(Tone::Strong, &name),
        paper.ink.paint(node.tone(), node.condition()),
        ago(Timestamp(node.last_seen_ms), now),
        use_of(node)
    );
    let hardware = format!(
        "{}, {}, {}, {}",
        clean(&inventory.os),
        count(inventory.cpus.into(), "CPU"),
        gpus::total(inventory),
        size::binary(inventory.memory)
    );
    let _ = writeln!(text, "  {hardware}");
    for told in node.notices() {
        let _ = writeln!(text, "  {}", wrap(&paper.ink.paint(Tone::Warn, &told), paper.width, 4));
    }
    if !inventory.labels.is_empty() {
        let _ = writeln!(text, "{}", wrap(&format!("  labels: {}", node.labels()), paper.width, 10));
    }
    if let Some(tunnel) = &node.tunnel {
        let _ = writeln!(text, "{}", wrap(&format!("  tunnel: {}", tunnel.describe()), paper.width, 10));
    }
    for line in gpus::lines(inventory, paper) {
        let _ = writeln!(text, "{line}");
    }
    let _ = writeln!(
        text,
        "  disk: {} free of {}",
        size::binary(node.disk_free_bytes),
        size::binary(inventory.disk)
    );
    if let Some(kept) = kept::line(node) {
        let _ = writeln!(text, "{}", wrap(&format!("  kept: {kept}"), paper.width, 8));
    }
    if !inventory.environments.is_empty() {
        let kept = inventory.environments.len() as u64;
        let size = inventory.environments.iter().map(|kept| kept.bytes).sum();
        let _ = writeln!(
            text,
            "  envs: {} of {}: agentctl envs list",
            size::binary(size),
            count(kept, "environment")
        );
    }
    // How the processes of jobs are grouped and limited.
    if let Some(kept) = inventory.findings.iter().find(|finding| finding.topic == "cgroups") {
        let kept = format!("  jobs: control groups {}; {}", clean(&kept.found), clean(&kept.means));
        let _ = writeln!(text, "{}", wrap(&kept, paper.width, 8));
    }
    for grade in [Grade::Bad, Grade::Limited, Grade::Good] {
        let (word, tone) = view::grade(grade);
        let of_grade = inventory.findings.iter().filter(|finding| finding.grade == grade);
        let topics: Vec<_> = of_grade.map(|finding| clean(&finding.topic).into_owned()).collect();
        if !topics.is_empty() {
            let topics = wrap(&topics.join(", "), paper.width, 11);
            let _ = writeln!(text, "  {}  {topics}", paper.ink.paint(tone, &format!("{word:<7}")));
        }
    }
    text
}

/// What went wrong lately, as a table.
fn faults(failed: &[JobView], now: Timestamp, paper: Paper) -> String {
    let mut table = Table::new(&["FAILED", "AGO", "FAULT"], &[1]).with_names(&[0]);
    for job in failed {
        let fault = job.cause().map(|fault| format!("{}: {}", fault.code, clean(&fault.what)));
        table.row([
            Cell::from(&job.job),
            Cell::from(age(Timestamp(job.ended_ms.unwrap_or_default()), now)),
            Cell::from(fault.unwrap_or_default()),
        ]);
    }
    table.render(paper)
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
        if node.condition() == "held_back" {
            hints.push(format!(
                "{} gets no jobs for now: agentctl doctor says more; agentctl undrain {0} tries it at once",
                node.node
            ));
        }
        let there = glance.uplink.as_ref().map_or("", |_| ", asked of the controller");
        match node.eligibility.as_str() {
            "draining" => hints.push(format!(
                "{} is being drained: no new jobs until it is opened again: agentctl undrain {0}{there}",
                node.node
            )),
            "cordoned" => {
                hints.push(format!("{} takes no new jobs: agentctl undrain {0} opens it{there}", node.node))
            }
            _ => {}
        }
        if let Some((uplink, why)) =
            glance.uplink.as_ref().and_then(|uplink| Some((uplink, uplink.why.as_ref()?)))
        {
            hints.push(format!(
                "{} does not answer this machine: {}; jobs here go on and are reported when it does; journalctl -u agentd says more",
                clean(&uplink.controller),
                clean(why)
            ));
        } else if matches!(node.liveness.as_str(), "not_responding" | "down") {
            let seen = duration(now.since(Timestamp(node.last_seen_ms)));
            hints.push(format!(
                "{} has not answered for {seen}; its jobs go on. If it is gone for good: agentctl node lost {0}",
                node.node
            ));
        }
    }
    if let Some(job) = glance.jobs.iter().find(|job| job.state == "Queued" && !job.detail.is_empty()) {
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
            store_bytes: 3 << 29,
            store_limit_bytes: 25 << 30,
            shutdown: None,
            notices: Vec::new(),
        };
        let whom = Whom { socket: "/home/ada/agentd/agentd.sock".into(), user: "ada".into(), context: None };
        Glance {
            controller,
            uplink: None,
            nodes,
            jobs,
            failed: Vec::new(),
            whom,
            own: "root".into(),
            others: Vec::new(),
        }
    }

    #[test]
    fn test_a_node_tells_of_its_link_and_how_its_controller_opens_it() {
        let mut node = small();
        (node.eligibility, node.liveness) = ("draining".into(), "not_responding".into());
        let mut glance = glance(vec![node], Vec::new());
        glance.uplink = Some(UplinkView {
            controller: "https://c:7443".into(),
            up: false,
            since_ms: 1_080_000,
            heard_ms: Some(1_075_000),
            why: Some("connection refused".into()),
        });
        let paper = Paper { ink: Ink::PLAIN, width: 100 };
        let text = render(&glance, Timestamp(1_200_000), paper);
        insta::assert_snapshot!(text.lines().take(8).collect::<Vec<_>>().join("\n"), @r"
            agentd 0.1.0 of ada, up 3 min 20 s, process 7
              role    node of https://c:7443
              link    not connected for 2 min, heard 2 min ago: connection refused
              state   /home/ada/agentd
              socket  /home/ada/agentd/agentd.sock
              store   1.5 GiB of at most 25 GiB
              jobs    0 in work here
        ");
        insta::assert_snapshot!(hints(&glance, Timestamp(1_200_000)).join("\n"), @r"
            box is being drained: no new jobs until it is opened again: agentctl undrain box, asked of the controller
            https://c:7443 does not answer this machine: connection refused; jobs here go on and are reported when it does; journalctl -u agentd says more
        ");
        let up = UplinkView { up: true, why: None, ..glance.uplink.unwrap() };
        assert_eq!(up.describe(Timestamp(1_200_000)), "connected for 2 min, heard 2 min ago");
    }

    #[test]
    fn test_a_quiet_box_at_a_glance() {
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        insta::assert_snapshot!(render(&glance(vec![small()], Vec::new()), Timestamp(1_200_000), paper), @r"
            agentd 0.1.0 of ada, up 3 min 20 s, process 7
              state   /home/ada/agentd
              socket  /home/ada/agentd/agentd.sock
              store   1.5 GiB of at most 25 GiB
              jobs    0 in work, 0 waiting

            box ready, seen 3 min ago, 1 of 2 slots used
              Ubuntu 22.04.4 LTS, 8 CPUs, 0 GPUs, 16 GiB
              disk: 120 GiB free of 500 GiB
              limited  gpu
              good     python
        ");
    }

    #[test]
    fn test_the_latest_faults_come_first_and_old_ones_not_at_all() {
        let ended = |job: &str, at: u64| JobView { job: job.into(), ended_ms: Some(at), ..failed() };
        let day = 24 * 3600 * 1000;
        let old = ended("old", 1000);
        let whole = super::super::view::tests::ended();
        let jobs = vec![ended("one", day + 1000), old, whole, ended("two", day + 2000)];
        let now = Timestamp(day + 182_000);
        let shown = latest_failed(jobs, now);
        let text = faults(&shown, now, Paper { ink: Ink::PLAIN, width: 80 });
        let lines: Vec<String> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        let fault = format!("{}: the command returned 3", agent_model::Code::CommandFailed);
        let line = |job: &str| format!("{job} 3 min {fault}");
        assert_eq!(lines, ["FAILED AGO FAULT".to_owned(), line("two"), line("one")]);
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
