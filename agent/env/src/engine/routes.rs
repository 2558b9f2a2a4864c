//! Where the files of a channel are fetched.
//!
//! Owns the mirrors. Hides which of them failed lately: those are asked last.
//!
//! Invariants: an address that belongs to no channel is used unchanged; a channel with mirrors is fetched only from
//! them.

use std::collections::BTreeSet;

use agent_env::Channel;
use parking_lot::Mutex;
use url::Url;

/// The routes of all channels of a build.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    /// Address of a channel with its final slash, and its mirrors likewise.
    channels: Vec<(String, Vec<String>)>,
    /// Mirrors that failed.
    shunned: Mutex<BTreeSet<String>>,
}

fn slashed(url: &str) -> String {
    format!("{}/", url.trim_end_matches('/'))
}

impl Routes {
    /// The routes to these channels.
    pub(crate) fn to(channels: &[Channel]) -> Self {
        let mut channels: Vec<_> = channels
            .iter()
            .filter(|channel| !channel.mirrors.is_empty())
            .map(|channel| (slashed(&channel.url), channel.mirrors.iter().map(|m| slashed(m)).collect()))
            .collect();
        // The longest address is the most specific one.
        channels.sort_by_key(|(url, _): &(String, Vec<String>)| std::cmp::Reverse(url.len()));
        Self { channels, shunned: Mutex::default() }
    }

    /// The addresses of a file, best first; never none.
    pub(crate) fn of(&self, url: &Url) -> Vec<Url> {
        let text = url.as_str();
        let found = self.channels.iter().find(|(channel, _)| text.starts_with(channel.as_str()));
        let Some((channel, mirrors)) = found else { return vec![url.clone()] };
        let shunned = self.shunned.lock();
        let mut order: Vec<&String> = mirrors.iter().collect();
        order.sort_by_key(|mirror| shunned.contains(*mirror)); // stable
        let urls: Vec<Url> =
            order.iter().filter_map(|m| Url::parse(&format!("{m}{}", &text[channel.len()..])).ok()).collect();
        if urls.is_empty() { vec![url.clone()] } else { urls }
    }

    /// From now on the mirror that this address belongs to is asked last.
    pub(crate) fn shun(&self, url: &Url) {
        let mirrors = self.channels.iter().flat_map(|(_, mirrors)| mirrors);
        if let Some(mirror) =
            mirrors.filter(|mirror| url.as_str().starts_with(mirror.as_str())).max_by_key(|m| m.len())
        {
            self.shunned.lock().insert(mirror.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes() -> Routes {
        let channel = |url: &str, mirrors: &[&str]| Channel {
            name: "c".into(),
            url: url.into(),
            mirrors: mirrors.iter().map(|m| (*m).to_owned()).collect(),
        };
        Routes::to(&[
            channel("https://c.example/forge", &["http://one.example/f/", "http://two.example"]),
            channel("https://c.example/forge/label/dev", &["http://dev.example"]),
            channel("https://plain.example/main", &[]),
        ])
    }

    fn of(routes: &Routes, url: &str) -> Vec<String> {
        routes.of(&Url::parse(url).unwrap()).iter().map(Url::to_string).collect()
    }

    #[test]
    fn test_files_are_fetched_from_mirrors_in_their_order() {
        let routes = routes();
        assert_eq!(
            of(&routes, "https://c.example/forge/noarch/repodata.json"),
            ["http://one.example/f/noarch/repodata.json", "http://two.example/noarch/repodata.json"]
        );
        assert_eq!(
            of(&routes, "https://c.example/forge/label/dev/noarch/a.conda"),
            ["http://dev.example/noarch/a.conda"]
        );
        for untouched in
            ["https://plain.example/main/noarch/a.conda", "https://c.example/forgery/noarch/a.conda"]
        {
            assert_eq!(of(&routes, untouched), [untouched]);
        }
    }

    #[test]
    fn test_a_mirror_that_failed_is_asked_last() {
        let routes = routes();
        routes.shun(&Url::parse("http://one.example/f/noarch/repodata.json").unwrap());
        assert_eq!(
            of(&routes, "https://c.example/forge/a.conda"),
            ["http://two.example/a.conda", "http://one.example/f/a.conda"]
        );
        routes.shun(&Url::parse("http://two.example/a.conda").unwrap());
        assert_eq!(of(&routes, "https://c.example/forge/a.conda")[0], "http://one.example/f/a.conda");
    }
}
