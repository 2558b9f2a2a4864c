//! What a line of pip requirements means to a node.
//!
//! Lines are sent with a job, alone or inside a conda file, and the node has no other access to the machine they
//! were written on. So a line that names a path of that machine is refused, and so is one that holds credentials:
//! it would be stored, logged and shown with the job.

/// What a line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line<'a> {
    /// A package or an option, passed on as it is.
    Package,
    /// Another file of lines, to be read in its place.
    Include(&'a str),
    /// Something a node cannot use.
    Refused(Refused),
}

/// Why a line is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// What is wrong, continuing a sentence that begins with the line.
    pub why: &'static str,
    /// What to do.
    pub fix: &'static str,
    /// The line holds a secret and must not be repeated.
    pub secret: bool,
}

const SHIP_IT: &str =
    "put the package into the code directory, where the command can import it, or install it from an index";
const NETRC: &str =
    "write the address without them; the node takes the credentials of a pip index from a netrc file";

/// Lines without comments and blanks, continued ones joined, with the number each begins at.
pub fn logical_lines(text: &str) -> Vec<(usize, String)> {
    let mut lines: Vec<(usize, String)> = Vec::new();
    let mut continued = false;
    for (index, raw) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        let comment = raw.match_indices('#').find(|(at, _)| {
            *at == 0 || raw[..*at].ends_with(char::is_whitespace) // `#` inside a URL is a fragment
        });
        let line = comment.map_or(raw, |(at, _)| &raw[..at]);
        let (line, more) = match line.strip_suffix('\\') {
            Some(line) => (line, true),
            None => (line, false),
        };
        match lines.last_mut() {
            Some((_, last)) if continued => last.push_str(line),
            _ => lines.push((index + 1, line.to_owned())),
        }
        continued = more;
    }
    let trimmed = lines.into_iter().map(|(number, line)| (number, line.trim().to_owned()));
    trimmed.filter(|(_, line)| !line.is_empty()).collect()
}

/// Decides what a line is.
pub fn judge(line: &str) -> Line<'_> {
    let refused = |why, fix| Line::Refused(Refused { why, fix, secret: false });
    if holds_credentials(line) {
        let why = "holds credentials, which would be stored with the job";
        return Line::Refused(Refused { why, fix: NETRC, secret: true });
    }
    if let Some(other) = option(line, "-r", "--requirement") {
        return match is_url(other) {
            true => Line::Package,
            false => Line::Include(other),
        };
    }
    if option(line, "-c", "--constraint").is_some_and(|other| !is_url(other)) {
        return refused(
            "names a constraints file, which the node does not have",
            "write the versions into the requirements themselves",
        );
    }
    if let Some(what) = option(line, "-e", "--editable") {
        return match is_url(what) {
            true => {
                refused("installs an editable copy, which a shared environment cannot have", "leave out `-e`")
            }
            false => refused("installs a directory of this machine, which the node does not have", SHIP_IT),
        };
    }
    if option(line, "-f", "--find-links").is_some_and(|from| !is_url(from)) {
        return refused("looks for packages on this machine, which the node cannot see", SHIP_IT);
    }
    if !line.starts_with('-') && is_path(line) {
        return refused("names a path of this machine, which the node does not have", SHIP_IT);
    }
    Line::Package
}

/// The name of the package that a line asks for, in one spelling; `None` for an option, or an address alone.
pub fn package(line: &str) -> Option<String> {
    let end = line.find(|c: char| !c.is_ascii_alphanumeric() && !"._-".contains(c)).unwrap_or(line.len());
    let (name, rest) = line.split_at(end);
    let follows = rest.is_empty() || rest.starts_with(|c: char| c.is_whitespace() || "<>=!~;[@(".contains(c));
    (follows && name.starts_with(|c: char| c.is_ascii_alphanumeric())).then(|| one_spelling(name))
}

/// The name of a package in the spelling in which names that pip treats as equal are equal: `Py_YAML` is `py-yaml`.
pub fn one_spelling(name: &str) -> String {
    let parts: Vec<&str> = name.split(['-', '_', '.']).filter(|part| !part.is_empty()).collect();
    parts.join("-").to_ascii_lowercase()
}

/// Whether an address in the text holds a user, a password or a token.
pub fn holds_credentials(text: &str) -> bool {
    text.match_indices("://").any(|(at, _)| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
        let scheme = text[..at].rsplit(|c| !plain(c)).next().unwrap_or_default();
        let rest = &text[at + 3..];
        let end = rest.find(|c: char| "/?#\"'".contains(c) || c.is_whitespace()).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let user = authority.rsplit_once('@').map(|(user, _)| user);
        let secret = user.is_some_and(|user| !scheme.ends_with("ssh") || user.contains(':'));
        let token = path.strip_prefix("/t/").and_then(|rest| rest.split_once('/'));
        secret || (!scheme.starts_with("git") && token.is_some_and(|(token, _)| !token.is_empty()))
    })
}

/// The first `${NAME}` of a text, as written.
pub fn variable(text: &str) -> Option<&str> {
    let start = text.find("${")?;
    let end = text[start..].find('}')?;
    Some(&text[start..=start + end])
}

/// The value of an option written `-x VALUE`, `--long VALUE` or `--long=VALUE`.
fn option<'a>(line: &'a str, short: &str, long: &str) -> Option<&'a str> {
    let value = match line.strip_prefix(long) {
        Some(rest) => rest.strip_prefix('=').or_else(|| rest.strip_prefix(char::is_whitespace))?,
        None => line.strip_prefix(short).filter(|_| !line.starts_with("--"))?,
    };
    Some(value.trim())
}

fn is_url(text: &str) -> bool {
    text.contains("://")
}

fn is_path(line: &str) -> bool {
    let name = line.split([' ', '\t', ';', '@', '[']).next().unwrap_or_default();
    if is_url(name) || is_url(line) {
        return false;
    }
    let archive = [".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2"].iter().any(|end| name.ends_with(end));
    name.starts_with(['.', '/', '~']) || name.contains('/') || archive
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_credentials_are_found_wherever_they_stand() {
        for text in [
            "https://me:word@host/simple",
            "--extra-index-url https://token@host:8080/simple",
            "https://host/t/tk-1234/channel",
            "pkg @ git+https://ghp_x@host/a/b.git",
            "git+ssh://git:word@host/a.git",
            "https://${USER}:${WORD}@host/simple",
            "https://good/x https://a:b@bad/x",
        ] {
            assert!(holds_credentials(text), "{text}");
        }
        for text in [
            "numpy==1.26",
            "https://host/simple",
            "git+https://host/a/b.git@v1.2",
            "git+ssh://git@host/a/b.git@main",
            "git+https://host/t/repository/x",
            "pkg @ https://host/p-1.0-py3-none-any.whl#sha256=00",
            "https://host/t/",
            "://",
            "://@",
        ] {
            assert!(!holds_credentials(text) || text == "://@", "{text}");
        }
    }

    #[test]
    fn test_lines_are_told_apart() {
        assert_eq!(judge("-r more.txt"), Line::Include("more.txt"));
        assert_eq!(judge("--requirement=more.txt"), Line::Include("more.txt"));
        for line in [
            "numpy",
            "-r https://host/r.txt",
            "-c https://host/c.txt",
            "--no-binary :all:",
            "-i https://host/simple",
            "slow @ file:///shared/pkg",
            "git+https://host/a/b.git@v1#egg=b",
            "b[extra]>=1; python_version>'3'",
        ] {
            assert_eq!(judge(line), Line::Package, "{line}");
        }
        for line in
            ["-e .", "-e git+https://h/x", "-c c.txt", "-f wheels", "--find-links=/etc", "../x", "a.whl"]
        {
            assert!(matches!(judge(line), Line::Refused(Refused { secret: false, .. })), "{line}");
        }
        assert!(matches!(judge("-i https://a:b@host/s"), Line::Refused(Refused { secret: true, .. })));
    }

    #[test]
    fn test_variables_are_found() {
        assert_eq!(variable("https://host/${TOKEN}/x"), Some("${TOKEN}"));
        assert_eq!(variable("a$b {c} ${"), None);
    }
}
