//! The settings of a host in `~/.ssh/config`, as far as they matter here.
//!
//! Where the program `ssh` is, it is asked (`ssh -G`), because its answer is by definition right: with `Match`, `Include`
//! and what a distribution has set up. Without it a plain subset is read: `Host` and single settings. As in ssh the first
//! value counts there, except that key files add up. A setting that changes where a connection goes and is not supported
//! (`ProxyCommand`; in the subset also `Match` and `Include`) is an error and is not ignored.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::known_hosts::matches;

/// The settings of one host.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) host_name: Option<String>,
    pub(crate) port: Option<u16>,
    pub(crate) user: Option<String>,
    pub(crate) keys: Vec<PathBuf>,
    pub(crate) keys_only: Option<bool>,
    /// `none` is an empty list.
    pub(crate) jumps: Option<Vec<String>>,
    pub(crate) known_hosts: Option<Vec<PathBuf>>,
    /// The name under which its key is known.
    pub(crate) key_alias: Option<String>,
}

/// Why the settings cannot be followed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    /// A line of the file is wrong.
    #[error("{}, line {line}: {what}", file.display())]
    Line {
        /// The file.
        file: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// The program `ssh` cannot tell them, or tells what is not supported.
    #[error("`ssh -G {host}`: {what}")]
    Told {
        /// The host that it was asked about.
        host: String,
        /// What it said.
        what: String,
    },
}

/// How long `ssh` may take to tell its settings: a `Match exec` runs a program.
const TELLING: Duration = Duration::from_secs(20);

/// Reads the settings of a host.
pub(crate) fn read(home: &Path, host: &str, files: &dyn Files) -> Result<Said, ConfigError> {
    let wrong = |what: String| ConfigError::Told { host: host.to_owned(), what };
    match files.told(home, host) {
        Some(told) => {
            let mut reader = ConfigReader { home, host, said: Said::default() };
            told.and_then(|text| reader.told(&text)).map_err(wrong)?;
            Ok(reader.said)
        }
        None => {
            let file = home.join(".ssh/config");
            let mut reader = ConfigReader { home, host, said: Said::default() };
            let text = files.text(&file).unwrap_or_default();
            reader.lines(&text).map_err(|(line, what)| ConfigError::Line { file, line, what })?;
            Ok(reader.said)
        }
    }
}

/// Where settings come from.
pub(crate) trait Files {
    /// The text of a file, if it exists.
    fn text(&self, file: &Path) -> Option<String>;
    /// What the program `ssh` says of a host, if there is one.
    fn told(&self, home: &Path, host: &str) -> Option<Result<String, String>>;
}

/// Those of this machine.
pub(crate) struct DiskFiles;

impl Files for DiskFiles {
    fn text(&self, file: &Path) -> Option<String> {
        std::fs::read_to_string(file).ok()
    }

    #[allow(clippy::disallowed_methods, reason = "asks for settings; nothing of a job is in it")]
    fn told(&self, home: &Path, host: &str) -> Option<Result<String, String>> {
        let mut ssh = Command::new("ssh");
        // It looks for the file in the home that the system knows, whatever `HOME` says.
        if own_home().is_some_and(|own| own != home) {
            let file = Some(home.join(".ssh/config")).filter(|file| file.exists());
            ssh.arg("-F").arg(file.unwrap_or_else(|| "none".into()));
        }
        ssh.args(["-T", "-G", "--", host]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        match ssh.spawn() {
            Ok(child) => Some(ended(child)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => Some(Err(error.to_string())),
        }
    }
}

/// The home of this user in the system's list, if it is there.
fn own_home() -> Option<PathBuf> {
    let uid = std::fs::metadata("/proc/self").ok()?.uid().to_string();
    let list = std::fs::read_to_string("/etc/passwd").ok()?;
    let mut users = list.lines().map(|line| line.split(':').collect::<Vec<_>>());
    users.find(|user| user.get(2) == Some(&uid.as_str()))?.get(5).map(PathBuf::from)
}

/// What the program printed; what it complained of if it failed.
fn ended(mut child: Child) -> Result<String, String> {
    let begun = Instant::now();
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
    // Its answer is a few kilobytes, less than a pipe holds.
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if begun.elapsed() > TELLING => {
                let _ = child.kill(); // it may have ended
                let _ = child.wait();
                return Err(format!("it has not ended for {} s", TELLING.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let mut text = String::new();
    let pipe: Option<&mut dyn std::io::Read> = match status.success() {
        true => out.as_mut().map(|pipe| pipe as &mut dyn std::io::Read),
        false => err.as_mut().map(|pipe| pipe as &mut dyn std::io::Read),
    };
    pipe.map(|pipe| pipe.read_to_string(&mut text)).transpose().map_err(|error| error.to_string())?;
    if status.success() { Ok(text) } else { Err(text.trim().replace('\n', "; ")) }
}

struct ConfigReader<'a> {
    home: &'a Path,
    host: &'a str,
    said: Said,
}

/// Whether a setting of `ssh -G` is what it prints if nobody said anything: its key files, and its lists of known hosts
/// in the home that the system knows, which is not always the one that is meant here.
fn is_usual(key: &str, value: &str) -> bool {
    match key {
        "identityfile" => value.starts_with("~/.ssh/id_"),
        "userknownhostsfile" => {
            let usual =
                |file: &str| file.ends_with("/.ssh/known_hosts") || file.ends_with("/.ssh/known_hosts2");
            value.split_whitespace().count() == 2 && value.split_whitespace().all(usual)
        }
        _ => false,
    }
}

impl ConfigReader<'_> {
    /// Takes in what `ssh -G` prints: a setting in each line, the first words in small letters.
    fn told(&mut self, text: &str) -> Result<(), String> {
        for line in text.lines() {
            let Some((key, value)) = line.split_once(' ') else { continue };
            if is_usual(key, value) {
                continue;
            }
            let values: Vec<String> = match key {
                "userknownhostsfile" => value.split_whitespace().map(str::to_owned).collect(),
                _ => vec![value.to_owned()],
            };
            self.take(key, &values)?;
        }
        Ok(())
    }

    /// Takes in the lines of a file of settings.
    fn lines(&mut self, text: &str) -> Result<(), (usize, String)> {
        let mut applies = true;
        for (index, line) in text.lines().enumerate() {
            let wrong = |what: String| (index + 1, what);
            let Some((key, values)) = words(line).map_err(wrong)? else { continue };
            match &*key {
                "host" => applies = self.is_meant(&values),
                "match" | "include" => {
                    return Err(wrong(format!(
                        "`{key}` is understood by the program `ssh` alone, which is not installed here"
                    )));
                }
                _ if applies => self.take(&key, &values).map_err(wrong)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn is_meant(&self, patterns: &[String]) -> bool {
        let mut found = false;
        for pattern in patterns {
            match pattern.strip_prefix('!') {
                Some(not) if matches(self.host, not) => return false,
                Some(_) => {}
                None => found |= matches(self.host, pattern),
            }
        }
        found
    }

    fn take(&mut self, key: &str, values: &[String]) -> Result<(), String> {
        let first = values.first().map(String::as_str).ok_or_else(|| format!("`{key}` says nothing"))?;
        let path = |value: &String| {
            self.path(&value.replace("%d", &self.home.to_string_lossy()).replace("%h", self.host))
        };
        match key {
            "hostname" => set(&mut self.said.host_name, || Ok(first.replace("%h", self.host))),
            "port" => {
                let port = first.parse().map_err(|_| format!("`{first}` is no port"));
                set(&mut self.said.port, || port)
            }
            "user" => set(&mut self.said.user, || Ok(first.to_owned())),
            "identityfile" if first.eq_ignore_ascii_case("none") => Ok(()),
            "identityfile" => {
                let path = path(&values[0]);
                self.said.keys.push(path);
                Ok(())
            }
            "identitiesonly" => set(&mut self.said.keys_only, || Ok(first.eq_ignore_ascii_case("yes"))),
            "proxyjump" => set(&mut self.said.jumps, || {
                let is_none = first.eq_ignore_ascii_case("none");
                Ok(if is_none { Vec::new() } else { first.split(',').map(str::to_owned).collect() })
            }),
            "proxycommand" if self.said.jumps.is_none() && !first.eq_ignore_ascii_case("none") => {
                Err("`ProxyCommand` is not understood here; say `ProxyJump`, or --jump".to_owned())
            }
            "hostkeyalias" => set(&mut self.said.key_alias, || Ok(first.to_owned())),
            "userknownhostsfile" => {
                let paths = values.iter().map(path).collect();
                set(&mut self.said.known_hosts, || Ok(paths))
            }
            _ => Ok(()),
        }
    }

    fn path(&self, value: &str) -> PathBuf {
        match value.strip_prefix("~/") {
            Some(rest) => self.home.join(rest),
            None => PathBuf::from(value),
        }
    }
}

/// Sets a value that is not set yet: the first counts.
fn set<T>(slot: &mut Option<T>, value: impl FnOnce() -> Result<T, String>) -> Result<(), String> {
    if slot.is_none() {
        *slot = Some(value()?);
    }
    Ok(())
}

/// A line's keyword, in small letters, and the words after it; `None` for an empty line or a comment.
fn words(line: &str) -> Result<Option<(String, Vec<String>)>, String> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let end = line.find(|c: char| c.is_whitespace() || c == '=').unwrap_or(line.len());
    let rest = line[end..].trim_start();
    let rest = rest.strip_prefix('=').unwrap_or(rest);
    let (mut values, mut word, mut quoted, mut begun) = (Vec::new(), String::new(), false, false);
    for c in rest.chars() {
        match c {
            '"' => (quoted, begun) = (!quoted, true),
            c if c.is_whitespace() && !quoted => {
                if std::mem::take(&mut begun) {
                    values.push(std::mem::take(&mut word));
                }
            }
            '#' if !quoted && !begun => break,
            c => {
                word.push(c);
                begun = true;
            }
        }
    }
    if quoted {
        return Err("a quotation mark is missing".to_owned());
    }
    if begun {
        values.push(word);
    }
    Ok(Some((line[..end].to_lowercase(), values)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    impl Files for BTreeMap<PathBuf, String> {
        fn text(&self, file: &Path) -> Option<String> {
            self.get(file).cloned()
        }

        /// A file of this name is what the program says.
        fn told(&self, _: &Path, host: &str) -> Option<Result<String, String>> {
            let text = self.get(Path::new(&format!("ssh -G {host}")))?;
            Some(text.strip_prefix("error: ").map_or_else(|| Ok(text.clone()), |why| Err(why.to_owned())))
        }
    }

    fn said(text: &str, host: &str) -> Result<Said, ConfigError> {
        read(Path::new("/h"), host, &BTreeMap::from([(PathBuf::from("/h/.ssh/config"), text.to_owned())]))
    }

    const CONFIG: &str = "
# for all
IdentitiesOnly yes
Host gpu-* !gpu-9
    HostName %h.lab.example
    User = ada
    Port=2222
    IdentityFile ~/.ssh/lab
    ProxyJump gate,ada@inner:2200 # by the gate
Host gpu-1
    User bob
    IdentityFile \"/keys/of gpu one\"
    ProxyJump none
host *
    User everybody
    UserKnownHostsFile ~/a /b
";

    #[test]
    fn test_first_value_counts_and_keys_add_up() {
        let one = said(CONFIG, "gpu-1").unwrap();
        let wanted = Said {
            host_name: Some("gpu-1.lab.example".into()),
            port: Some(2222),
            user: Some("ada".into()),
            keys: vec!["/h/.ssh/lab".into(), "/keys/of gpu one".into()],
            keys_only: Some(true),
            jumps: Some(vec!["gate".into(), "ada@inner:2200".into()]),
            known_hosts: Some(vec!["/h/a".into(), "/b".into()]),
            key_alias: None,
        };
        assert_eq!(one, wanted);
        let other = said(CONFIG, "gpu-9").unwrap();
        assert_eq!((other.user.as_deref(), other.host_name, other.jumps), (Some("everybody"), None, None));
        assert_eq!(said("", "gpu-1").unwrap(), Said::default());
    }

    #[test]
    fn test_what_the_program_says_is_taken() {
        let told = "host gpu\nuser ada\nhostname 10.0.0.7\nport 2222\nidentitiesonly yes\nidentityfile ~/.ssh/id_rsa\n\
                    identityfile ~/.ssh/lab key\nproxyjump gate,ada@inner:2200\nhostkeyalias lab\n\
                    userknownhostsfile /h/lab /h/.ssh/known_hosts\nciphers aes256-ctr\n";
        let asked = |text: &str| {
            let files = [("ssh -G gpu", text), ("/h/.ssh/config", "User nobody\n")];
            let files = files.map(|(file, text)| (PathBuf::from(file), text.to_owned()));
            read(Path::new("/h"), "gpu", &BTreeMap::from(files))
        };
        let wanted = Said {
            host_name: Some("10.0.0.7".into()),
            port: Some(2222),
            user: Some("ada".into()),
            keys: vec!["/h/.ssh/lab key".into()],
            keys_only: Some(true),
            jumps: Some(vec!["gate".into(), "ada@inner:2200".into()]),
            known_hosts: Some(vec!["/h/lab".into(), "/h/.ssh/known_hosts".into()]),
            key_alias: Some("lab".into()),
        };
        assert_eq!(asked(told).unwrap(), wanted);
        let usual =
            "identityfile ~/.ssh/id_rsa\nuserknownhostsfile /r/.ssh/known_hosts /r/.ssh/known_hosts2\n";
        assert_eq!(asked(usual).unwrap(), Said::default());
        let refused = asked("error: line 3: Bad configuration option: foo").unwrap_err();
        assert_eq!(refused.to_string(), "`ssh -G gpu`: line 3: Bad configuration option: foo");
        assert!(asked("proxycommand nc %h %p\n").unwrap_err().to_string().contains("`ProxyCommand`"));
    }

    #[test]
    fn test_the_program_of_this_machine_is_asked() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join(".ssh")).unwrap();
        let config = "Match originalhost gpu exec \"true\"\nUser ada\nMatch all\nHostKeyAlias lab\nPort 7\n";
        std::fs::write(home.path().join(".ssh/config"), config).unwrap();
        match DiskFiles.told(home.path(), "gpu") {
            None => {
                assert!(read(home.path(), "gpu", &DiskFiles).is_err(), "without it that is not understood")
            }
            Some(_) => {
                let said = read(home.path(), "gpu", &DiskFiles).unwrap();
                let told = (said.user.as_deref(), said.port, said.key_alias.as_deref());
                assert_eq!(told, (Some("ada"), Some(7), Some("lab")));
            }
        }
    }

    #[test]
    fn test_what_is_not_understood_is_named() {
        let rows = [
            ("Port x", "`x` is no port"),
            ("ProxyCommand nc %h %p", "`ProxyCommand` is not understood"),
            ("Match all", "`match` is understood by the program"),
            ("Include more", "`include` is understood by the program"),
            ("User \"ada", "a quotation mark is missing"),
            ("User", "`user` says nothing"),
        ];
        for (line, what) in rows {
            let error = said(&format!("\n{line}\n"), "a").unwrap_err().to_string();
            assert!(error.contains("line 2") && error.contains(what), "{line}: {error}");
        }
        assert!(said("ProxyCommand none\nUnknown thing\n", "a").is_ok());
    }
}
