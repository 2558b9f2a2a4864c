//! `doctor --bundle`: one file with what a maintainer would ask for, without secrets.
//!
//! Each part is text, made by a call of the daemon or a command of this machine; one that cannot be had says why.

use std::io::{self, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use agent_model::{Clock, SystemClock};
use flate2::Compression;
use flate2::write::GzEncoder;
use tokio::time::timeout;

use crate::failure::Failure;

/// How long a command may take.
const COMMAND: Duration = Duration::from_secs(10);
/// The most bytes kept of a part: its end.
const LONGEST: usize = 4 << 20;
/// What replaces a secret.
const HIDDEN: &str = "***";

/// What commands of this machine say: the name of the part, and the command.
const COMMANDS: &[(&str, &str)] = &[
    ("system.txt", "cat /etc/os-release; uname -a; uptime; date -u +%FT%TZ; cat /proc/loadavg /proc/meminfo"),
    ("disks.txt", "df -h; df -i; cat /proc/self/mounts"),
    ("processes.txt", "ps -eo pid,ppid,user,stat,etime,rss,comm"),
    ("gpus.txt", "cat /proc/driver/nvidia/version; nvidia-smi"),
    ("service.txt", "systemctl status --no-pager agentd agent-spawn; systemctl cat agentd"),
    ("log.txt", "journalctl --no-pager -n 5000 -o short-iso-precise -u agentd -u agent-spawn"),
    ("user-log.txt", "tail -c 2000000 \"${XDG_DATA_HOME:-$HOME/.local/share}/agentd/agentd.log\""),
    ("configuration.txt", "agentd show-config; agentd show-config --user"),
    ("versions.txt", "agentctl --version; agentd --version; docker version; python3 --version"),
];

/// Writes the bundle; `documents` are parts that the daemon gave. Returns the names of all parts.
pub(super) async fn write(file: &Path, documents: Vec<(&str, String)>) -> Result<Vec<String>, Failure> {
    let mut parts: Vec<(String, String)> =
        documents.into_iter().map(|(name, text)| (name.to_owned(), text)).collect();
    for (name, command) in COMMANDS {
        parts.push(((*name).to_owned(), say(command).await));
    }
    let pack = || -> io::Result<()> {
        // Nobody else is to read it: what looks harmless may not be.
        let packed = tempfile::NamedTempFile::new_in(
            file.parent().filter(|at| !at.as_os_str().is_empty()).unwrap_or(Path::new(".")),
        )?;
        let mut archive = tar::Builder::new(GzEncoder::new(packed, Compression::default()));
        for (name, text) in &parts {
            let text = without_secrets(text);
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o600);
            header.set_mtime(SystemClock.now().0 / 1000);
            archive.append_data(&mut header, format!("agentd-bundle/{name}"), text.as_bytes())?;
        }
        let mut packed = archive.into_inner()?.finish()?;
        packed.flush()?;
        packed.persist(file).map_err(|error| error.error)?;
        Ok(())
    };
    pack().map_err(|error| {
        Failure::refused(
            format!("{} cannot be written: {error}", file.display()),
            "name a file in a directory of yours",
        )
    })?;
    Ok(parts.into_iter().map(|(name, _)| name).collect())
}

/// What a command says, on both of its outputs.
#[allow(clippy::disallowed_methods, reason = "asks this machine what a maintainer would ask")]
async fn say(script: &str) -> String {
    let mut command = tokio::process::Command::new("sh");
    command.args(["-c", &format!("exec 2>&1; {script}")]).stdin(Stdio::null()).kill_on_drop(true);
    match timeout(COMMAND, command.output()).await {
        Ok(Ok(output)) => {
            let from = output.stdout.len().saturating_sub(LONGEST);
            format!("$ {script}\n{}", String::from_utf8_lossy(&output.stdout[from..]))
        }
        Ok(Err(error)) => format!("$ {script}\n{error}\n"),
        Err(_) => format!("$ {script}\nno answer within {} s\n", COMMAND.as_secs()),
    }
}

/// The text with every value hidden that looks like a secret: tokens of agentd, credentials in addresses, private
/// keys, and what stands behind a word such as `password`.
fn without_secrets(text: &str) -> String {
    let (mut clean, mut in_key) = (String::with_capacity(text.len()), false);
    for line in text.split_inclusive('\n') {
        in_key |= line.contains("-----BEGIN") && line.contains("PRIVATE KEY");
        if in_key {
            in_key = !line.contains("-----END");
            clean.push_str(HIDDEN);
            clean.push('\n');
            continue;
        }
        clean.push_str(&line_without_secrets(line));
    }
    clean
}

fn line_without_secrets(line: &str) -> String {
    let mut clean = String::with_capacity(line.len());
    let mut hide_next = false;
    let ends_word = |c: char| c.is_whitespace() || "\"',;&?{}()[]".contains(c);
    for piece in line.split_inclusive(ends_word) {
        let word = piece.strip_suffix(ends_word).unwrap_or(piece);
        let after = &piece[word.len()..];
        if word.is_empty() || word == ":" || word == "=" {
            clean.push_str(piece);
            continue;
        }
        // `Authorization: Bearer VALUE`
        let is_scheme = ["bearer", "basic"].contains(&word.to_lowercase().as_str());
        let hidden = std::mem::replace(&mut hide_next, is_scheme) && !is_scheme;
        let shown = if hidden { HIDDEN.to_owned() } else { shown(word, &mut hide_next) };
        clean.push_str(&shown);
        clean.push_str(after);
    }
    clean
}

/// A word as it may be shown; `hide_next` is set when it names a secret that follows.
fn shown(word: &str, hide_next: &mut bool) -> String {
    if word.contains("agentd-join-") || word.contains("agentd-login-") {
        return HIDDEN.to_owned();
    }
    if let Some((scheme, rest)) = word.split_once("://") {
        let authority = rest.split('/').next().unwrap_or_default();
        return match authority.rsplit_once('@') {
            Some((credentials, _)) => format!("{scheme}://{HIDDEN}{}", &rest[credentials.len()..]),
            None => word.to_owned(),
        };
    }
    let (name, value) = match word.split_once(['=', ':']) {
        Some((name, value)) => (name, Some(value)),
        None => (word, None),
    };
    if !is_secret_name(name) {
        return word.to_owned();
    }
    match value {
        Some(value) if !value.is_empty() => format!("{}{HIDDEN}", &word[..word.len() - value.len()]),
        _ => {
            *hide_next = true;
            word.to_owned()
        }
    }
}

/// Whether what follows a word is a secret.
fn is_secret_name(name: &str) -> bool {
    let name = name.trim_start_matches('-').to_lowercase();
    let ends = [
        "password",
        "passwd",
        "passphrase",
        "secret",
        "token",
        "api_key",
        "apikey",
        "access_key",
        "account_key",
    ];
    ends.iter().any(|end| name.ends_with(end)) || ["sig", "authorization"].contains(&name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_secrets_are_left_out_and_nothing_else() {
        let rows = [
            ("token agentd-join-abc123 is used\n", "token *** is used\n"),
            ("proxy: http://ada:pw@proxy:3128/x # file\n", "proxy: http://***@proxy:3128/x # file\n"),
            (
                "WANDB_API_KEY=abc python t.py --password hunter2 --lr 0.1",
                "WANDB_API_KEY=*** python t.py --password *** --lr 0.1",
            ),
            ("\"secret\": \"abc\", \"step\": 3", "\"secret\": \"***\", \"step\": 3"),
            ("Authorization: Bearer eyJ0 more", "Authorization: Bearer *** more"),
            ("https://store/c?sv=1&sig=abc&x=1", "https://store/c?sv=1&sig=***&x=1"),
            ("a -----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\nb\n", "***\n***\n***\nb\n"),
            ("12:30:01 ready tokens=5 https://host/path\n", "12:30:01 ready tokens=5 https://host/path\n"),
        ];
        for (text, wanted) in rows {
            assert_eq!(without_secrets(text), wanted);
        }
    }
}
