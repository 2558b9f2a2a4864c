//! The name of an image in a job, and the registry it is fetched from.

use super::super::AcquireError;

/// A name of an image as the engine understands it: with a tag or a digest, or the engine's ID of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reference {
    /// For example `ubuntu:latest`. Without a tag the engine would fetch every tag of the image.
    pub(super) text: String,
    /// The host it is fetched from, for example `docker.io` or `127.0.0.1:5000`; `None` for an ID, which is not
    /// fetched.
    pub(super) registry: Option<String>,
}

/// The registry of names without one.
pub(super) const HUB: &str = "docker.io";

impl Reference {
    /// Parses the user's text.
    pub(super) fn parse(image: &str) -> Result<Reference, AcquireError> {
        let image = image.trim();
        if !is_plain(image) {
            return Err(AcquireError::Refused {
                at: Vec::new(),
                detail: format!("`{image}` is no name of an image"),
                hint: Some("write it as for `docker pull`, for example `ubuntu:22.04`".to_owned()),
            });
        }
        if image.starts_with("sha256:") {
            return Ok(Reference { text: image.to_owned(), registry: None });
        }
        let (first, rest) = image.split_once('/').unwrap_or(("", image));
        let is_host = first.contains(['.', ':']) || first == "localhost";
        let registry = if is_host { first } else { HUB };
        let last = rest.rsplit('/').next().unwrap_or(rest);
        let complete = image.contains('@') || last.contains(':');
        let text = if complete { image.to_owned() } else { format!("{image}:latest") };
        Ok(Reference { text, registry: Some(registry.to_owned()) })
    }

    /// The host, for people.
    pub(super) fn host(&self) -> &str {
        self.registry.as_deref().unwrap_or("its registry")
    }
}

/// Whether it can be part of a request to the engine.
fn is_plain(image: &str) -> bool {
    const LONGEST: usize = 500;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/:@+".contains(&byte);
    let parts = || image.split('/');
    (1..=LONGEST).contains(&image.len())
        && image.bytes().all(plain)
        && image.starts_with(|first: char| first.is_ascii_alphanumeric())
        && parts().all(|part| !part.is_empty() && part != "." && part != "..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_names_are_completed_and_lead_to_a_registry() {
        let digest = format!("a/b@sha256:{}", "0".repeat(64));
        for (image, text, registry) in [
            ("ubuntu", "ubuntu:latest", Some(HUB)),
            (" ubuntu:22.04 ", "ubuntu:22.04", Some(HUB)),
            ("org/tool", "org/tool:latest", Some(HUB)),
            ("localhost/tool", "localhost/tool:latest", Some("localhost")),
            ("127.0.0.1:5000/a/b", "127.0.0.1:5000/a/b:latest", Some("127.0.0.1:5000")),
            ("h.example/a:1", "h.example/a:1", Some("h.example")),
            (digest.as_str(), digest.as_str(), Some(HUB)),
            ("sha256:abc", "sha256:abc", None),
        ] {
            let read = Reference::parse(image).unwrap();
            assert_eq!((read.text.as_str(), read.registry.as_deref()), (text, registry), "{image}");
        }
    }

    #[test]
    fn test_what_is_no_name_is_refused() {
        for image in ["", "a b", "../a", "a//b", "a/../b", "-a", "a?x=1", "a#b", "ä", &"a".repeat(501)] {
            assert!(Reference::parse(image).is_err(), "{image}");
        }
    }
}
