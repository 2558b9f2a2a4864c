//! How this node learns that its machine will be taken away.

use std::time::Duration;

use agent_model::lease::Terms;

use super::read::Layers;
use super::{ConfigError, Setting, Variables, of_tests, values};

/// Whose notices are looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Provider {
    /// Azure's scheduled events.
    Azure,
    /// AWS's instance actions of spot instances.
    Aws,
    /// GCP's `preempted`.
    Gcp,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PreemptionSettings {
    /// Which provider is asked, if any; `None` is the one that the machine's firmware names.
    pub(crate) provider: Option<Option<Provider>>,
    /// The address of the metadata service: a host and a port.
    pub(crate) endpoint: (String, u16),
    /// How long before the deadline commands are killed, so that their outputs can be stored.
    pub(crate) margin: Duration,
    /// See [`Terms::passed`].
    pub(crate) passed: Duration,
}

impl PreemptionSettings {
    /// Reads its keys; returns them with their settings.
    pub(super) fn resolve(
        variables: &Variables,
        layers: &Layers,
    ) -> Result<(PreemptionSettings, Vec<Setting>), ConfigError> {
        let [provider, endpoint, margin] =
            ["preemption", "preemption_endpoint", "preemption_margin"].map(|key| layers.get(key));
        let words = [
            ("auto", None),
            ("off", Some(None)),
            ("azure", Some(Some(Provider::Azure))),
            ("aws", Some(Some(Provider::Aws))),
            ("gcp", Some(Some(Provider::Gcp))),
        ];
        let settings = PreemptionSettings {
            provider: provider
                .parse("`auto`, `azure`, `aws`, `gcp` or `off`", |text| values::word(text, &words))?,
            endpoint: endpoint.parse("an address such as `http://169.254.169.254`", address)?,
            margin: margin.parse("a duration such as `15s`", values::duration)?,
            passed: of_tests(variables, "AGENTD_TEST_PREEMPTION_PASSED", values::duration)
                .unwrap_or(Terms::default().passed),
        };
        Ok((settings, vec![provider, endpoint, margin]))
    }
}

/// `http://HOST` or `http://HOST:PORT`: metadata services speak plain HTTP, on a link of the machine alone.
fn address(text: &str) -> Option<(String, u16)> {
    let place = text.strip_prefix("http://")?.trim_end_matches('/');
    let (host, port) = match place.rsplit_once(':') {
        Some((host, port)) => (host, port.parse().ok()?),
        None => (place, 80),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    (!host.is_empty() && host.chars().all(plain)).then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_addresses_of_metadata_services() {
        assert_eq!(address("http://169.254.169.254"), Some(("169.254.169.254".into(), 80)));
        assert_eq!(address("http://127.0.0.1:8080/"), Some(("127.0.0.1".into(), 8080)));
        for bad in ["", "169.254.169.254", "https://x", "http://", "http://a/b", "http://a:b"] {
            assert_eq!(address(bad), None, "{bad}");
        }
    }
}
