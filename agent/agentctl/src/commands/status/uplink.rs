//! How a daemon that is only a node stands with its controller.

use agent_model::Timestamp;
use agent_proto::v1;
use serde::Serialize;

use crate::output::text::{ago, clean, duration};

/// See the module.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct UplinkView {
    pub(crate) controller: String,
    pub(crate) up: bool,
    /// Since when it is up, or not.
    pub(crate) since_ms: u64,
    /// When the controller was heard last.
    pub(crate) heard_ms: Option<u64>,
    /// Why it is not up.
    pub(crate) why: Option<String>,
}

impl From<v1::Uplink> for UplinkView {
    fn from(wire: v1::Uplink) -> UplinkView {
        UplinkView {
            controller: wire.controller,
            up: wire.up,
            since_ms: wire.since_ms,
            heard_ms: (wire.heard_ms != 0).then_some(wire.heard_ms),
            why: (!wire.up).then_some(wire.why),
        }
    }
}

impl UplinkView {
    /// `connected for 2 h 3 min, heard 2 s ago`
    pub(crate) fn describe(&self, now: Timestamp) -> String {
        let since = duration(now.since(Timestamp(self.since_ms)));
        let heard = self.heard_ms.map_or_else(
            || "never heard by this daemon".to_owned(),
            |at| format!("heard {}", ago(Timestamp(at), now)),
        );
        match &self.why {
            None => format!("connected for {since}, {heard}"),
            Some(why) => format!("not connected for {since}, {heard}: {}", clean(why)),
        }
    }
}
