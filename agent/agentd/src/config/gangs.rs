//! This node among others: the labels that jobs can ask for, how it is reached, how long ranks wait for each other,
//! and what the jobs of one user may have of all nodes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use agent_control::UserLimits;

use super::read::Layers;
use super::{ConfigError, Setting, values};

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GangSettings {
    /// The address at which other nodes reach this one; chosen among its addresses when absent.
    pub(crate) address: Option<IpAddr>,
    /// The ports that ranks of jobs are given.
    pub(crate) ports: RangeInclusive<u16>,
    /// The port at which other nodes read blobs of this one; 0: any; `None`: they cannot, and it does not read theirs.
    pub(crate) peer_port: Option<u16>,
    /// How long ranks that could start wait for those that could not yet.
    pub(crate) wait: Duration,
    /// Labels that operators gave this node.
    pub(crate) labels: BTreeMap<String, String>,
    /// Of the controller: what the jobs of one user may have at a time.
    pub(crate) limits: UserLimits,
}

impl GangSettings {
    /// Reads its keys; returns them with their settings.
    pub(super) fn resolve(layers: &Layers) -> Result<(GangSettings, Vec<Setting>), ConfigError> {
        let [address, ports, peer_port, wait, said, limited] =
            ["node_address", "gang_ports", "peer_port", "gang_wait", "labels", "limits_per_user"]
                .map(|key| layers.get(key));
        let settings = GangSettings {
            address: address.parse("an IP address, or nothing", |text| {
                if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) }
            })?,
            ports: ports.parse("a range of at least 16 ports, for example `20000-20999`", range)?,
            peer_port: peer_port.parse("a port, 0 for any, or `off`", |text| match text {
                "off" => Some(None),
                port => port.parse().ok().map(Some),
            })?,
            wait: wait.parse("a duration such as `30s`, `10m`, `2h` or `7d`", values::duration)?,
            labels: said.parse("labels such as `rack=7, instance_type=Standard_NC6`", labels)?,
            limits: limited
                .parse("some of `jobs`, `gpus`, `cpus` and `waiting`, such as `jobs=4, gpus=8`", limits)?,
        };
        Ok((settings, vec![address, ports, peer_port, wait, said, limited]))
    }
}

fn labels(text: &str) -> Option<BTreeMap<String, String>> {
    let plain = |word: &str| {
        (1..=63).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_graphic() && byte != b',')
    };
    let label = |pair: &str| {
        let (key, value) = pair.trim().split_once('=')?;
        (plain(key) && plain(value)).then(|| (key.to_owned(), value.to_owned()))
    };
    text.split(',').filter(|pair| !pair.trim().is_empty()).map(label).collect()
}

fn limits(text: &str) -> Option<UserLimits> {
    let (mut limits, mut waiting) = (UserLimits::default(), None);
    for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
        let (what, most) = pair.split_once('=')?;
        let limit = match what.trim() {
            "jobs" => &mut limits.jobs,
            "gpus" => &mut limits.gpus,
            "cpus" => &mut limits.cpus,
            "waiting" => &mut waiting,
            _ => return None,
        };
        let most = most.trim().parse().ok()?;
        if limit.replace(most).is_some() {
            return None; // which of two is meant cannot be told
        }
    }
    limits.waiting = waiting.unwrap_or(limits.waiting);
    Some(limits)
}

fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-')?;
    let (first, last): (u16, u16) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (first >= 1024 && last >= first.saturating_add(15)).then_some(first..=last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_labels_are_pairs() {
        let expected = [("rack", "7"), ("instance_type", "Standard_NC6")];
        let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(labels("rack=7, instance_type=Standard_NC6"), Some(expected.into()));
        assert_eq!(labels(""), Some(BTreeMap::new()));
        for bad in ["rack", "=7", "rack=", "rack=a b"] {
            assert_eq!(labels(bad), None, "{bad}");
        }
    }

    #[test]
    fn test_limits_are_named_once_each() {
        let (jobs, gpus) = (Some(4), Some(8));
        assert_eq!(limits("jobs=4, gpus = 8"), Some(UserLimits { jobs, gpus, ..UserLimits::default() }));
        assert_eq!(limits(""), Some(UserLimits::default()));
        assert_eq!(limits("waiting=5"), Some(UserLimits { waiting: 5, ..UserLimits::default() }));
        for bad in ["jobs", "jobs=", "jobs=many", "jobs=-1", "memory=4", "jobs=1, jobs=2"] {
            assert_eq!(limits(bad), None, "{bad}");
        }
    }

    #[test]
    fn test_ports_are_a_range_that_ordinary_users_may_have() {
        assert_eq!(range("20000-20999"), Some(20_000..=20_999));
        for bad in ["", "20000", "20000-20001", "80-8000", "2-1", "20000-99999"] {
            assert_eq!(range(bad), None, "{bad}");
        }
    }
}
