//! Which key a host has to show: the files `known_hosts`, read as ssh reads them.
//!
//! Hides hashed names, patterns, negation, ports and marks. Invariant: a host with any recorded key is never treated
//! as unknown, whatever kind of key it shows.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::hmac;
use russh::keys::{Algorithm, Certificate, HashAlg, PublicKey, ssh_key::certificate::CertType};

/// The lines of some files.
#[derive(Debug, Default)]
pub(crate) struct KnownHosts {
    lines: Vec<KnownLine>,
}

#[derive(Debug)]
struct KnownLine {
    place: Place,
    mark: Mark,
    names: String,
    key: PublicKey,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    Plain,
    Authority,
    Revoked,
}

/// A line of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub file: PathBuf,
    /// Counted from 1.
    pub line: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, line {}", self.file.display(), self.line)
    }
}

/// How a key that a host shows compares with the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KeyVerdict {
    Known,
    /// Nothing is recorded of the host.
    Unknown,
    /// Another key of this kind is recorded.
    Changed(Place),
    /// Only keys of other kinds are recorded.
    OtherKind(Place),
    Revoked(Place),
}

impl KnownHosts {
    /// Reads those of these files that exist.
    pub(crate) fn read(files: &[PathBuf]) -> io::Result<KnownHosts> {
        let mut known = KnownHosts::default();
        for file in files {
            match std::fs::read_to_string(file) {
                Ok(text) => known.add(file, &text),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(io::Error::new(error.kind(), format!("{}: {error}", file.display())));
                }
            }
        }
        Ok(known)
    }

    fn add(&mut self, file: &Path, text: &str) {
        for (index, line) in text.lines().enumerate() {
            let mut words = line.split_whitespace().peekable();
            let mark = match words.peek() {
                None => continue,
                Some(word) if word.starts_with('#') => continue,
                Some(&"@cert-authority") => Mark::Authority,
                Some(&"@revoked") => Mark::Revoked,
                Some(word) if word.starts_with('@') => continue,
                Some(_) => Mark::Plain,
            };
            if mark != Mark::Plain {
                words.next();
            }
            let (Some(names), Some(kind), Some(key)) = (words.next(), words.next(), words.next()) else {
                continue;
            };
            // A kind of key that this program does not support cannot be shown to it either.
            let Ok(key) = PublicKey::from_openssh(&format!("{kind} {key}")) else { continue };
            let place = Place { file: file.to_owned(), line: index + 1 };
            self.lines.push(KnownLine { place, mark, names: names.to_owned(), key });
        }
    }

    fn about<'a>(&'a self, host: &str, port: u16, mark: Mark) -> impl Iterator<Item = &'a KnownLine> {
        let name = name(host, port);
        self.lines.iter().filter(move |line| line.mark == mark && is_named(&name, &line.names))
    }

    /// Judges a plain key.
    pub(crate) fn judge(&self, host: &str, port: u16, key: &PublicKey) -> KeyVerdict {
        let same = |line: &&KnownLine| line.key.key_data() == key.key_data();
        if let Some(line) = self.about(host, port, Mark::Revoked).find(same) {
            return KeyVerdict::Revoked(line.place.clone());
        }
        let plain: Vec<&KnownLine> = self.about(host, port, Mark::Plain).collect();
        if plain.iter().any(same) {
            return KeyVerdict::Known;
        }
        let of_kind = plain.iter().find(|line| line.key.algorithm() == key.algorithm());
        match (of_kind, plain.first()) {
            (Some(line), _) => KeyVerdict::Changed(line.place.clone()),
            (None, Some(line)) => KeyVerdict::OtherKind(line.place.clone()),
            (None, None) => KeyVerdict::Unknown,
        }
    }

    /// Judges a certificate of a host at a time, in seconds since 1970. `Unknown` if no authority here signed it.
    pub(crate) fn judge_certificate(
        &self,
        host: &str,
        port: u16,
        shown: &Certificate,
        now: u64,
    ) -> KeyVerdict {
        let revoked = self.about(host, port, Mark::Revoked);
        let is_bad = |line: &&KnownLine| {
            line.key.key_data() == shown.public_key() || line.key.key_data() == shown.signature_key()
        };
        if let Some(line) = revoked.into_iter().find(is_bad) {
            return KeyVerdict::Revoked(line.place.clone());
        }
        let authorities: Vec<_> = self
            .about(host, port, Mark::Authority)
            .map(|line| line.key.fingerprint(HashAlg::Sha256))
            .collect();
        let is_for_host = shown.valid_principals().iter().any(|pattern| matches(host, pattern));
        let holds = shown.cert_type() == CertType::Host
            && is_for_host
            && shown.critical_options().is_empty()
            && shown.validate_at(now, &authorities).is_ok();
        if holds { KeyVerdict::Known } else { KeyVerdict::Unknown }
    }

    /// The kinds of keys that are recorded of a host, to be asked for first.
    pub(crate) fn kinds(&self, host: &str, port: u16) -> Vec<Algorithm> {
        self.about(host, port, Mark::Plain).map(|line| line.key.algorithm()).collect()
    }

    /// Whether a certificate of the host could be judged.
    pub(crate) fn has_authority(&self, host: &str, port: u16) -> bool {
        self.about(host, port, Mark::Authority).next().is_some()
    }
}

/// A host as the files name it.
fn name(host: &str, port: u16) -> String {
    let host = host.to_lowercase();
    if port == 22 { host } else { format!("[{host}]:{port}") }
}

/// Whether the host names of a line match this name.
fn is_named(name: &str, names: &str) -> bool {
    let mut found = false;
    for pattern in names.split(',') {
        match pattern.strip_prefix('!') {
            Some(not) if matches(name, not) => return false,
            Some(_) => {}
            None if pattern.starts_with("|1|") => found |= is_hash_of(pattern, name),
            None => found |= matches(name, &pattern.to_lowercase()),
        }
    }
    found
}

fn is_hash_of(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('|').skip(2).map(|part| STANDARD.decode(part));
    let (Some(Ok(salt)), Some(Ok(hash))) = (parts.next(), parts.next()) else { return false };
    let key = hmac::Key::new(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, &salt);
    hmac::verify(&key, name.as_bytes(), &hash).is_ok()
}

/// Whether a text fits a pattern of ssh, where `*` is anything and `?` one character.
pub(crate) fn matches(text: &str, pattern: &str) -> bool {
    let (text, pattern) = (text.as_bytes(), pattern.as_bytes());
    let (mut at, mut from) = (0, 0);
    // The position of the last star, and how far its match reaches so far.
    let mut star: Option<(usize, usize)> = None;
    while at < text.len() {
        match pattern.get(from) {
            Some(b'*') => {
                star = Some((from, at));
                from += 1;
            }
            Some(wanted) if *wanted == b'?' || wanted.eq_ignore_ascii_case(&text[at]) => {
                at += 1;
                from += 1;
            }
            _ => {
                let Some((place, reach)) = star else { return false };
                star = Some((place, reach + 1));
                (at, from) = (reach + 1, place + 1);
            }
        }
    }
    pattern[from..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJdD7y3aLq454yWBdwLWbieU1ebz9/cu7/QEXn9OIeZJ";
    const B: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILIG2T/B0l0gaqj3puu510tu9N1OkQ4znY3LYuEm5zCF";
    const ECDSA: &str = "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBHwf2HMM5TRXvo2SQJjsNkiDD5KqiiNjrGVv3UUh+mMT5RHxiRtOnlqvjhQtBq0VpmpCV/PwUdhOig4vkbqAcEc=";
    const HASHED: &str = "|1|O33ESRMWPVkMYIwJ1Uw+n877jTo=|nuuC5vEqXlEZ/8BXQR7m619W6Ak=";

    fn key(text: &str) -> PublicKey {
        PublicKey::from_openssh(text).unwrap()
    }

    fn judge(file: &str, host: &str, port: u16, shown: &str) -> KeyVerdict {
        let mut known = KnownHosts::default();
        known.add(Path::new("f"), file);
        known.judge(host, port, &key(shown))
    }

    fn at(line: usize) -> Place {
        Place { file: "f".into(), line }
    }

    #[test]
    fn test_keys_of_hosts() {
        let file = format!(
            "# a comment\n\nbox,10.0.0.7 {A} of ada\n*.lab,!bad.lab {A}\n[port]:2222 {A}\n{HASHED} {B}\n@revoked * {ECDSA}\n\
             @cert-authority *.signed {A}\n@strange box {B}\nbox ssh-new AAAA\nhalf a line\nBig {A}\n"
        );
        let rows = [
            ("box", 22, A, KeyVerdict::Known),
            ("BOX", 22, A, KeyVerdict::Known),
            ("10.0.0.7", 22, A, KeyVerdict::Known),
            ("box", 22, B, KeyVerdict::Changed(at(3))),
            ("box", 2222, A, KeyVerdict::Unknown),
            ("a.lab", 22, A, KeyVerdict::Known),
            ("a.lab", 22, B, KeyVerdict::Changed(at(4))),
            ("bad.lab", 22, A, KeyVerdict::Unknown),
            ("port", 2222, A, KeyVerdict::Known),
            ("port", 22, A, KeyVerdict::Unknown),
            ("example.com", 22, B, KeyVerdict::Known),
            ("example.com", 22, A, KeyVerdict::Changed(at(6))),
            ("elsewhere", 22, A, KeyVerdict::Unknown),
            ("elsewhere", 22, ECDSA, KeyVerdict::Revoked(at(7))),
            ("box", 22, ECDSA, KeyVerdict::Revoked(at(7))),
            ("a.signed", 22, A, KeyVerdict::Unknown),
            ("big", 22, A, KeyVerdict::Known),
        ];
        for (host, port, shown, verdict) in rows {
            assert_eq!(judge(&file, host, port, shown), verdict, "{host}:{port} {shown}");
        }
    }

    #[test]
    fn test_another_kind_of_key_is_no_unknown_host() {
        assert_eq!(judge(&format!("box {A}\n"), "box", 22, ECDSA), KeyVerdict::OtherKind(at(1)));
        // One of several is enough.
        assert_eq!(judge(&format!("box {A}\nbox {ECDSA}\n"), "box", 22, ECDSA), KeyVerdict::Known);
    }

    #[test]
    fn test_patterns() {
        let rows = [
            ("abc", "a*c", true),
            ("abc", "*", true),
            ("abc", "a?c", true),
            ("abc", "a?", false),
            ("aXbXc", "a*b*c", true),
            ("abcb", "a*b", true),
            ("ab", "abc", false),
            ("", "*", true),
        ];
        for (text, pattern, fits) in rows {
            assert_eq!(matches(text, pattern), fits, "{text} {pattern}");
        }
    }
}
