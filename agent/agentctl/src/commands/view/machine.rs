//! Machines and the controller, decoded.

use agent_model::node::{CachedEnvironment, Grade, Inventory, Load};
use agent_model::{Fault, Timestamp};
use agent_proto::v1;
use serde::Serialize;
use serde_json::json;

use crate::output::text::{Tone, age, clean, moment};

/// A machine.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct NodeView {
    pub(crate) node: String,
    pub(crate) liveness: String,
    pub(crate) eligibility: String,
    pub(crate) last_seen_ms: u64,
    pub(crate) slots_used: u32,
    pub(crate) cpus_used: u32,
    pub(crate) memory_used_bytes: u64,
    pub(crate) disk_free_bytes: u64,
    pub(crate) memory_free_bytes: u64,
    /// The SSH connection of the controller by which it reaches the controller, if there is one.
    pub(crate) tunnel: Option<TunnelView>,
    /// That it will be taken away, if so.
    pub(crate) preemption: Option<PreemptionView>,
    /// That it could not start jobs and gets none for a while, if so.
    pub(crate) held_back: Option<HeldBackView>,
    #[serde(serialize_with = "inventory_json")]
    pub(crate) inventory: Inventory,
}

/// An inventory whose environments have the same form as everywhere else.
fn inventory_json<S: serde::Serializer>(inventory: &Inventory, to: S) -> Result<S::Ok, S::Error> {
    let mut document = serde_json::to_value(inventory).map_err(serde::ser::Error::custom)?;
    let kept = inventory.environments.iter().map(EnvironmentView::from);
    document["environments"] = json!(kept.collect::<Vec<_>>());
    document.serialize(to)
}

/// Until when a machine gets no jobs because it could not start some.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct HeldBackView {
    pub(crate) until_ms: u64,
    pub(crate) reason: String,
}

impl HeldBackView {
    /// `could not start jobs and is tried again at 08:00:00 UTC: …`
    pub(crate) fn describe(&self) -> String {
        clean(&agent_model::breaker::describe(Timestamp(self.until_ms), &self.reason)).into_owned()
    }
}

impl From<v1::HeldBack> for HeldBackView {
    fn from(wire: v1::HeldBack) -> HeldBackView {
        HeldBackView { until_ms: wire.until_ms, reason: wire.reason }
    }
}

/// An environment that a machine keeps.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct EnvironmentView {
    pub(crate) key: String,
    pub(crate) summary: String,
    pub(crate) python: Option<String>,
    pub(crate) packages: u32,
    pub(crate) bytes: u64,
    pub(crate) built_ms: u64,
    pub(crate) used_ms: u64,
    pub(crate) uses: u32,
    pub(crate) pinned: bool,
    pub(crate) lock: Option<String>,
    pub(crate) log: Option<String>,
}

impl From<&CachedEnvironment> for EnvironmentView {
    fn from(kept: &CachedEnvironment) -> EnvironmentView {
        EnvironmentView {
            key: kept.key.clone(),
            summary: kept.summary.clone(),
            python: Some(kept.python.clone()).filter(|version| !version.is_empty()),
            packages: kept.packages,
            bytes: kept.bytes,
            built_ms: kept.built.0,
            used_ms: kept.used.0,
            uses: kept.uses,
            pinned: kept.pinned,
            lock: kept.lock.map(|digest| digest.to_string()),
            log: kept.log.map(|digest| digest.to_string()),
        }
    }
}

impl TryFrom<v1::Node> for NodeView {
    type Error = Fault;
    fn try_from(wire: v1::Node) -> Result<NodeView, Fault> {
        let load = Load::from(wire.load.unwrap_or_default());
        Ok(NodeView {
            node: wire.node,
            liveness: wire.liveness,
            eligibility: wire.eligibility,
            last_seen_ms: wire.last_seen_ms,
            slots_used: wire.slots_used,
            cpus_used: wire.cpus_used,
            memory_used_bytes: wire.memory_used_bytes,
            disk_free_bytes: load.disk_free,
            memory_free_bytes: load.memory_free,
            tunnel: wire.tunnel.map(TunnelView::from),
            preemption: wire.preemption.map(PreemptionView::from),
            held_back: wire.held_back.map(HeldBackView::from),
            inventory: Inventory::try_from(wire.inventory.unwrap_or_default())?,
        })
    }
}

impl NodeView {
    /// `instance_type=Standard_NC6, rack=7`
    pub(crate) fn labels(&self) -> String {
        let pairs: Vec<String> =
            self.inventory.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        clean(&pairs.join(", ")).into_owned()
    }

    /// Whether it gets new work, in one word: `ready`, or what prevents it.
    pub(crate) fn condition(&self) -> &str {
        match self.eligibility.as_str() {
            _ if self.preemption.is_some() && self.liveness == "ready" => "preempted",
            "open" if self.held_back.is_some() && self.liveness == "ready" => "held_back",
            "open" => &self.liveness,
            closed => closed,
        }
    }

    /// Why it gets no new work for a while, or for ever, where it says so itself.
    pub(crate) fn notices(&self) -> impl Iterator<Item = String> {
        let goes = self.preemption.as_ref().map(PreemptionView::describe);
        goes.into_iter().chain(self.held_back.as_ref().map(HeldBackView::describe))
    }

    /// The colour of that word.
    pub(crate) fn tone(&self) -> Tone {
        match self.condition() {
            "ready" => Tone::Good,
            "degraded" | "draining" | "cordoned" | "enrolling" | "preempted" | "held_back" => Tone::Warn,
            _ => Tone::Bad,
        }
    }
}

/// The controller.
#[derive(Debug, Serialize)]
pub(crate) struct ControllerView {
    pub(crate) version: String,
    pub(crate) started_ms: u64,
    pub(crate) state_dir: String,
    pub(crate) queued: u32,
    pub(crate) running: u32,
    pub(crate) pid: u64,
    /// Changes when the database is rebuilt or restored.
    pub(crate) incarnation: String,
    /// The size of its blob store, and the limit.
    pub(crate) store_bytes: u64,
    pub(crate) store_limit_bytes: u64,
    pub(crate) notices: Vec<NoticeView>,
    /// How its machine is shut down, if anything does that.
    pub(crate) shutdown: Option<ShutdownView>,
}

/// A problem that the controller reports.
#[derive(Debug, Serialize)]
pub(crate) struct NoticeView {
    pub(crate) what: String,
    pub(crate) fix: String,
}

impl From<v1::Controller> for ControllerView {
    fn from(wire: v1::Controller) -> ControllerView {
        ControllerView {
            version: wire.version,
            started_ms: wire.started_ms,
            state_dir: wire.state_dir,
            queued: wire.queued,
            running: wire.running,
            pid: wire.pid,
            incarnation: wire.incarnation,
            store_bytes: wire.store_bytes,
            store_limit_bytes: wire.store_limit_bytes,
            notices: wire.notices.into_iter().map(|n| NoticeView { what: n.what, fix: n.fix }).collect(),
            shutdown: wire.shutdown.map(ShutdownView::from),
        }
    }
}

/// How the controller makes itself reachable for a machine.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct TunnelView {
    pub(crate) through: String,
    pub(crate) up: bool,
    /// Why it is not up.
    pub(crate) why: Option<String>,
}

impl TunnelView {
    /// `root@gpu-1, up`
    pub(crate) fn describe(&self) -> String {
        let state = self.why.as_ref().map_or_else(|| "up".to_owned(), |why| format!("down: {why}"));
        clean(&format!("{}, {state}", self.through)).into_owned()
    }
}

impl From<v1::Tunnel> for TunnelView {
    fn from(wire: v1::Tunnel) -> TunnelView {
        TunnelView { through: wire.through, up: wire.up, why: (!wire.up).then_some(wire.why) }
    }
}

/// The notice that a machine will be taken away.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct PreemptionView {
    pub(crate) deadline_ms: u64,
    pub(crate) reason: String,
}

impl PreemptionView {
    /// `will be taken away at 08:00:00 UTC: maintenance`
    pub(crate) fn describe(&self) -> String {
        clean(&agent_model::preemption::describe(Timestamp(self.deadline_ms), &self.reason)).into_owned()
    }
}

impl From<v1::Preemption> for PreemptionView {
    fn from(wire: v1::Preemption) -> PreemptionView {
        PreemptionView { deadline_ms: wire.deadline_ms, reason: wire.reason }
    }
}

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

/// The word and the colour of a grade.
pub(crate) fn grade(grade: Grade) -> (&'static str, Tone) {
    match grade {
        Grade::Good => ("good", Tone::Good),
        Grade::Limited => ("limited", Tone::Warn),
        Grade::Bad => ("bad", Tone::Bad),
    }
}
