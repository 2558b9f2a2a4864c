//! Parses and checks a request.
//!
//! Owns the specifications of a request and the channels they may name. Hides how channels are compared.
//!
//! Invariants: every specification names one package exactly; a channel it names is one of the request's.

use std::sync::Arc;

use agent_env::{Build, Failure, FailureKind};
use agent_model::causes;
use rattler_conda_types::{
    Channel, GenericVirtualPackage, MatchSpec, ParseMatchSpecOptions, ParseStrictness, Subdir,
};
use url::Url;

use super::{Advise, Done, failed};

/// A request in the types of the libraries.
pub(crate) struct Wanted {
    /// The specifications.
    pub(crate) specs: Vec<MatchSpec>,
    /// The channels, best first.
    pub(crate) channels: Vec<Channel>,
    /// Virtual packages.
    pub(crate) virtual_packages: Vec<GenericVirtualPackage>,
    /// The platform.
    pub(crate) subdir: Subdir,
    /// Name, text and line of each specification.
    pub(crate) asked: Vec<Asked>,
}

impl Wanted {
    /// The packages that the specifications name, in any version and from any channel.
    pub(crate) fn names(&self) -> Vec<MatchSpec> {
        self.specs.iter().map(|spec| MatchSpec { name: spec.name.clone(), ..MatchSpec::default() }).collect()
    }
}

/// A specification as its author wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asked {
    /// The package.
    pub(crate) name: String,
    /// The text.
    pub(crate) text: String,
    /// Its line, or 0.
    pub(crate) line: usize,
}

/// Parses a request.
pub(crate) fn understand(build: &Build) -> Done<Wanted> {
    let channels: Vec<Channel> = build.channels.iter().map(|c| channel(&c.url)).collect::<Done<_>>()?;
    let (mut specs, mut asked, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
    for spec in &build.specs {
        match one(&spec.text, build, &channels) {
            Ok((name, understood)) => {
                asked.push(Asked { name, text: spec.text.clone(), line: spec.line });
                specs.push(understood);
            }
            Err(why) => wrong.push((spec.line, format!("`{}`: {why}", spec.text))),
        }
    }
    if !wrong.is_empty() {
        let mut failure = failed(
            FailureKind::Spec,
            wrong.iter().map(|(_, why)| why.as_str()).collect::<Vec<_>>().join("\n"),
        );
        failure.lines = lines(wrong.iter().map(|(line, _)| *line));
        return Err(failure);
    }
    Ok(Wanted { specs, channels, virtual_packages: virtual_packages(build)?, subdir: subdir(build)?, asked })
}

/// Line numbers, each once; 0 is left out.
pub(crate) fn lines(lines: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut lines: Vec<usize> = lines.filter(|line| *line > 0).collect();
    lines.sort_unstable();
    lines.dedup();
    lines
}

/// The platform of a request.
pub(crate) fn subdir(build: &Build) -> Done<Subdir> {
    build.platform.subdir.parse().map_err(|_| {
        failed(FailureKind::Spec, format!("`{}` is not a platform of conda packages", build.platform.subdir))
    })
}

fn virtual_packages(build: &Build) -> Done<Vec<GenericVirtualPackage>> {
    let parse = |text: &String| {
        serde_json::from_value(serde_json::Value::String(text.clone()))
            .map_err(|error| failed(FailureKind::Spec, format!("`{text}` is not a virtual package: {error}")))
    };
    build.platform.virtual_packages.iter().map(parse).collect()
}

fn channel(text: &str) -> Done<Channel> {
    let url = Url::parse(text)
        .map_err(|error| failed(FailureKind::Spec, format!("the channel `{text}` is not a URL: {error}")))?;
    if !url.username().is_empty() || url.password().is_some() || url.path().starts_with("/t/") {
        return Err(secret_in_channel(&url));
    }
    if !matches!(url.scheme(), "file" | "http" | "https") {
        return Err(failed(FailureKind::Spec, format!("channels are not fetched by `{}`", url.scheme()))
            .advise("Use an address with https, http or file."));
    }
    Ok(Channel::from_url(url))
}

fn secret_in_channel(url: &Url) -> Failure {
    failed(
        FailureKind::Spec,
        format!("the address of the channel at {} holds credentials", super::net::host(url)),
    )
    .advise("Put them into the file that `conda_credentials` names in the node's configuration.")
}

fn one(text: &str, build: &Build, channels: &[Channel]) -> Result<(String, MatchSpec), String> {
    let options = ParseMatchSpecOptions::from(ParseStrictness::Lenient);
    let mut spec = MatchSpec::from_str(text, options).map_err(|error| causes::tell(&error))?;
    if spec.url.is_some() {
        return Err("packages are taken from channels; to name one by its address, use a lock".into());
    }
    let name = spec.name.as_exact().map(|name| name.as_normalized().to_owned());
    let name = name.filter(|name| !name.is_empty()).ok_or("it does not name one package")?;
    if let Some(named) = &spec.channel {
        let same = |(given, channel): &(&agent_env::Channel, &Channel)| {
            channel.base_url == named.base_url || named.name.as_deref() == Some(given.name.as_str())
        };
        let found = build.channels.iter().zip(channels).find(same);
        let (_, channel) =
            found.ok_or_else(|| format!("`{}` is none of the channels of this environment", named.name()))?;
        // Candidates are compared by their channel's address.
        spec.channel = Some(Arc::new(channel.clone()));
    }
    Ok((name, spec))
}

#[cfg(test)]
mod tests {
    use super::*;
    use agent_env::{Platform, Priority, Spec};

    fn build(specs: &[(&str, usize)]) -> Build {
        Build {
            prefix: "/p".into(),
            cache: "/c".into(),
            channels: vec![agent_env::Channel {
                name: "conda-forge".into(),
                url: "file:///srv/mirror".into(),
                mirrors: vec![],
            }],
            specs: specs.iter().map(|(text, line)| Spec { text: (*text).into(), line: *line }).collect(),
            lock: None,
            priority: Priority::Strict,
            offline: false,
            platform: Platform { subdir: "linux-64".into(), virtual_packages: vec!["__glibc=2.36=0".into()] },
            credentials: None,
            solve_within_s: 10,
            stall_s: 10,
            hard_links: true,
            for_everybody: false,
        }
    }

    #[test]
    fn test_a_named_channel_is_the_one_of_that_name() {
        let wanted = understand(&build(&[("conda-forge::numpy >=1.26", 5), ("python=3.11", 4)])).unwrap();
        let channel = wanted.specs[0].channel.as_ref().unwrap();
        assert_eq!(channel.base_url.as_str(), "file:///srv/mirror/");
        assert_eq!(wanted.asked[1], Asked { name: "python".into(), text: "python=3.11".into(), line: 4 });
        assert_eq!(wanted.virtual_packages[0].to_string(), "__glibc=2.36=0");
    }

    #[test]
    fn test_everything_wrong_is_told_at_once() {
        let failure = understand(&build(&[
            ("python=3.11", 3),
            ("other::numpy", 5),
            ("numpy >=1.2,,", 6),
            ("*", 7),
            ("https://h.example/c/noarch/a-1-0.conda", 8),
        ]))
        .err()
        .unwrap();
        assert_eq!((failure.kind, failure.lines), (FailureKind::Spec, vec![5, 6, 7, 8]));
        assert!(failure.message.contains("`other` is none of the channels"), "{}", failure.message);
    }

    #[test]
    fn test_channels_hold_no_credentials() {
        for url in ["https://u:p@h.example/c", "https://h.example/t/tok/c"] {
            let mut build = build(&[]);
            build.channels[0].url = url.into();
            let failure = understand(&build).err().unwrap();
            assert!(failure.kind == FailureKind::Spec && !failure.message.contains("tok"), "{failure:?}");
        }
    }
}
