//! Interprets the engine's message that an image cannot be fetched. Pure functions.
//!
//! The engine repeats messages of registries, without codes, so they are told apart by phrases common to all.

use super::super::AcquireError;
use super::platform;
use super::reference::Reference;
use crate::docker::DockerError;

/// Why an image was not fetched.
pub(super) fn judge(reference: &Reference, error: DockerError) -> AcquireError {
    let DockerError::Refused { message, .. } = error else { return AcquireError::Engine(error) };
    of_words(reference, &message)
        .unwrap_or(AcquireError::Failed { step: "pulling the image", detail: message })
}

/// The error that a message of the engine means for an image; `None` if it is about something else.
pub(super) fn of_words(reference: &Reference, message: &str) -> Option<AcquireError> {
    let lower = message.to_ascii_lowercase();
    let says = |words: &[&str]| words.iter().any(|word| lower.contains(word));
    let (image, registry) = (reference.text.clone(), reference.host().to_owned());
    let detail = message.trim().to_owned();
    if says(&["no matching manifest", "does not match the specified platform", "image operating system"]) {
        let has = "other machines only".to_owned();
        return Some(AcquireError::WrongPlatform { image, has, node: platform() });
    }
    if agent_fs::says_full(message) {
        return Some(AcquireError::DiskFull { path: "the images of the container engine".into() });
    }
    if says(&["toomanyrequests", "too many requests", "rate limit"]) {
        return Some(AcquireError::Registry { registry, detail });
    }
    if says(&[
        "unauthorized",
        "access denied",
        "denied:",
        "no basic auth",
        "authentication required",
        "forbidden",
    ]) {
        return Some(AcquireError::ImageMissing { image, registry, denied: true, detail });
    }
    if says(&[
        "manifest unknown",
        "not found",
        "no such image",
        "name unknown",
        "does not exist",
        "invalid reference",
    ]) {
        return Some(AcquireError::ImageMissing { image, registry, denied: false, detail });
    }
    let network = [
        "dial tcp",
        "no such host",
        "connection refused",
        "connection reset",
        "i/o timeout",
        "timeout",
        "tls",
        "x509",
        "eof",
        "http response to https",
        "request canceled",
        "unexpected http status",
        "service unavailable",
        "bad gateway",
        "received unexpected",
        "error response from",
        "server misbehaving",
        "digest verification",
        "filesystem layer verification",
    ];
    says(&network).then_some(AcquireError::Registry { registry, detail })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_words_of_registries_are_told_apart() {
        let reference = Reference::parse("h.example/a:1").unwrap();
        let kind = |message: &str| match of_words(&reference, message) {
            Some(AcquireError::ImageMissing { denied: true, .. }) => "denied",
            Some(AcquireError::ImageMissing { denied: false, .. }) => "missing",
            Some(AcquireError::Registry { .. }) => "network",
            Some(AcquireError::WrongPlatform { .. }) => "platform",
            Some(AcquireError::DiskFull { .. }) => "disk",
            _ => "other",
        };
        for (message, expected) in [
            ("manifest for h.example/a:1 not found: manifest unknown: manifest unknown", "missing"),
            ("pull access denied for a, repository does not exist or may require 'docker login'", "denied"),
            ("Head \"https://h.example/v2/a/manifests/1\": unauthorized: authentication required", "denied"),
            ("Get \"https://h.example/v2/\": no basic auth credentials", "denied"),
            ("Get \"https://h.example/v2/\": dial tcp: lookup h.example: no such host", "network"),
            ("toomanyrequests: You have reached your pull rate limit", "network"),
            ("no matching manifest for linux/amd64 in the manifest list entries", "platform"),
            ("write /var/lib/x: no space left on device", "disk"),
            ("something else", "other"),
        ] {
            assert_eq!(kind(message), expected, "{message}");
        }
    }
}
