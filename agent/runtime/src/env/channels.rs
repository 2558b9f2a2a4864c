//! The channels of conda packages: what the channel names of a file mean on this node.
//!
//! A channel is identified by its address without credentials, mirrors and platform; only that is part of an
//! environment's identity. The mirrors of its files are not.

use agent_env::Channel;

use super::CondaConfig;

/// The channels that a file names, best first, each once.
pub(super) fn channels<'a>(words: impl IntoIterator<Item = &'a str>, config: &CondaConfig) -> Vec<Channel> {
    let mut channels: Vec<Channel> = Vec::new();
    for word in words {
        for (name, url) in addresses(word.trim(), &config.alias) {
            if !channels.iter().any(|known| known.url == url) {
                let mirrors = mirrors(&url, config);
                channels.push(Channel { name, url, mirrors });
            }
        }
    }
    channels
}

/// What a channel name means: one name and address, or more.
fn addresses(word: &str, alias: &str) -> Vec<(String, String)> {
    let alias = alias.trim_end_matches('/');
    if word == "defaults" {
        let below = |name: &str| format!("{alias}/pkgs/{name}");
        return vec![("defaults".to_owned(), below("main")), ("pkgs/r".to_owned(), below("r"))];
    }
    if word.starts_with('/') {
        let url = format!("file://{}", word.trim_end_matches('/'));
        return vec![(word.to_owned(), url)];
    }
    if word.contains("://") {
        let url = without_platform(word.trim_end_matches('/'));
        let below = url.strip_prefix(alias).and_then(|rest| rest.strip_prefix('/'));
        return vec![(below.unwrap_or(url).to_owned(), url.to_owned())];
    }
    let name = without_platform(word.trim_matches('/'));
    vec![(name.to_owned(), format!("{alias}/{name}"))]
}

/// A channel has all platforms; old files name one of them.
fn without_platform(channel: &str) -> &str {
    const PLATFORMS: [&str; 5] = ["linux-64", "linux-aarch64", "linux-ppc64le", "linux-32", "noarch"];
    match channel.rsplit_once('/') {
        Some((channel, last)) if PLATFORMS.contains(&last) => channel,
        _ => channel,
    }
}

/// The mirrors of an address, from the longest configured prefix of it.
fn mirrors(url: &str, config: &CondaConfig) -> Vec<String> {
    let rest_of = |from: &str| {
        let rest = url.strip_prefix(from.trim_end_matches('/'))?;
        (rest.is_empty() || rest.starts_with('/')).then_some(rest)
    };
    let matching = config.mirrors.iter().filter_map(|(from, to)| Some((from.len(), rest_of(from)?, to)));
    let longest = matching.max_by_key(|(length, ..)| *length);
    longest
        .map(|(_, rest, to)| to.iter().map(|to| format!("{}{rest}", to.trim_end_matches('/'))).collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn test_words_of_files_become_addresses() {
        let config = CondaConfig { alias: "https://host/c/".to_owned(), ..CondaConfig::default() };
        let of = |words: &[&str]| -> Vec<(String, String)> {
            let found = channels(words.iter().copied(), &config).into_iter();
            found.map(|channel| (channel.name, channel.url)).collect()
        };
        let pair = |name: &str, url: &str| (name.to_owned(), url.to_owned());
        assert_eq!(of(&["conda-forge"]), [pair("conda-forge", "https://host/c/conda-forge")]);
        assert_eq!(
            of(&["defaults"]),
            [pair("defaults", "https://host/c/pkgs/main"), pair("pkgs/r", "https://host/c/pkgs/r")]
        );
        assert_eq!(of(&["https://host/c/x/", "x", "x/linux-64"]), [pair("x", "https://host/c/x")]);
        assert_eq!(of(&["https://other/y/noarch"]), [pair("https://other/y", "https://other/y")]);
        assert_eq!(of(&["/srv/channel/"]), [pair("/srv/channel/", "file:///srv/channel")]);
        assert_eq!(of(&["file:///srv/channel"]), [pair("file:///srv/channel", "file:///srv/channel")]);
    }

    #[test]
    fn test_mirrors_of_the_longest_beginning_are_used() {
        let to = |urls: &[&str]| urls.iter().map(|url| (*url).to_owned()).collect::<Vec<_>>();
        let mirrors = BTreeMap::from([
            ("https://host".to_owned(), to(&["https://all"])),
            ("https://host/c".to_owned(), to(&["https://near/", "file:///far"])),
        ]);
        let config = CondaConfig { mirrors, ..CondaConfig::default() };
        let of = |word| channels([word], &config).remove(0).mirrors;
        assert_eq!(of("https://host/c/forge"), ["https://near/forge", "file:///far/forge"]);
        assert_eq!(of("https://host/cc/forge"), ["https://all/cc/forge"]);
        assert!(of("https://elsewhere/forge").is_empty());
    }
}
