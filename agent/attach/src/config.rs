//! Reads the settings of a host from `~/.ssh/config`, as far as they matter here.
//!
//! As in ssh the first value counts, except that key files add up. Hides `Include`, patterns and quoting. A setting
//! that changes where a connection goes and is not supported (`Match` by a command, `ProxyCommand`) is an error and
//! is not ignored.

use std::path::{Path, PathBuf};

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
}

/// Why the file cannot be followed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{}, line {line}: {what}", file.display())]
pub struct ConfigError {
    /// The file.
    pub file: PathBuf,
    /// Counted from 1.
    pub line: usize,
    /// What is wrong with it.
    pub what: String,
}

/// How deep files may include each other, as in ssh.
const DEEPEST: usize = 16;

/// Reads the settings of a host from a file and those it includes.
pub(crate) fn read(file: &Path, home: &Path, host: &str, files: &dyn Files) -> Result<Said, ConfigError> {
    let mut reader = ConfigReader { home, host, files, said: Said::default() };
    reader.file(file, true, 0)?;
    Ok(reader.said)
}

/// Access to files.
pub(crate) trait Files {
    /// The text of a file, if it exists.
    fn text(&self, file: &Path) -> Option<String>;
    /// The names in a directory.
    fn names(&self, directory: &Path) -> Vec<String>;
}

/// The files of this machine.
pub(crate) struct DiskFiles;

impl Files for DiskFiles {
    fn text(&self, file: &Path) -> Option<String> {
        std::fs::read_to_string(file).ok()
    }

    fn names(&self, directory: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }
}

struct ConfigReader<'a> {
    home: &'a Path,
    host: &'a str,
    files: &'a dyn Files,
    said: Said,
}

impl ConfigReader<'_> {
    fn file(&mut self, file: &Path, mut applies: bool, depth: usize) -> Result<(), ConfigError> {
        let Some(text) = self.files.text(file) else { return Ok(()) };
        let outer = applies;
        for (index, line) in text.lines().enumerate() {
            let wrong = |what: String| ConfigError { file: file.to_owned(), line: index + 1, what };
            let Some((key, values)) = words(line).map_err(wrong)? else { continue };
            match &*key {
                "host" => applies = outer && self.is_meant(&values),
                "match" => {
                    let alone = values.len() == 1;
                    applies = match values.first().map(|word| word.to_lowercase()).as_deref() {
                        Some("all") if alone => outer,
                        Some("host" | "originalhost") if values.len() == 2 => {
                            let patterns: Vec<String> = values[1].split(',').map(str::to_owned).collect();
                            outer && self.is_meant(&patterns)
                        }
                        _ => return Err(wrong("this `Match` is not understood here".to_owned())),
                    };
                }
                "include" if depth >= DEEPEST => {
                    return Err(wrong("files include each other too deeply".to_owned()));
                }
                "include" => {
                    for value in &values {
                        for included in self.meant_files(value) {
                            self.file(&included, applies, depth + 1)?;
                        }
                    }
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

    /// The files that `Include` names, relative to `~/.ssh`; only the last part may be a pattern.
    fn meant_files(&self, value: &str) -> Vec<PathBuf> {
        let path = self.home.join(".ssh").join(self.path(value));
        let pattern = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let (true, Some(directory)) = (pattern.contains(['*', '?']), path.parent()) else {
            return vec![path];
        };
        let names = self.files.names(directory);
        names.into_iter().filter(|name| matches(name, &pattern)).map(|name| directory.join(name)).collect()
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

        fn names(&self, directory: &Path) -> Vec<String> {
            let below = self.keys().filter(|path| path.parent() == Some(directory));
            below.map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect()
        }
    }

    fn said(texts: &[(&str, &str)], host: &str) -> Result<Said, ConfigError> {
        let files: BTreeMap<PathBuf, String> =
            texts.iter().map(|(file, text)| (PathBuf::from(file), (*text).to_owned())).collect();
        read(Path::new("/h/.ssh/config"), Path::new("/h"), host, &files)
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
        let one = said(&[("/h/.ssh/config", CONFIG)], "gpu-1").unwrap();
        let wanted = Said {
            host_name: Some("gpu-1.lab.example".into()),
            port: Some(2222),
            user: Some("ada".into()),
            keys: vec!["/h/.ssh/lab".into(), "/keys/of gpu one".into()],
            keys_only: Some(true),
            jumps: Some(vec!["gate".into(), "ada@inner:2200".into()]),
            known_hosts: Some(vec!["/h/a".into(), "/b".into()]),
        };
        assert_eq!(one, wanted);
        let other = said(&[("/h/.ssh/config", CONFIG)], "gpu-9").unwrap();
        assert_eq!((other.user.as_deref(), other.host_name, other.jumps), (Some("everybody"), None, None));
        assert_eq!(said(&[], "gpu-1").unwrap(), Said::default());
    }

    #[test]
    fn test_included_files() {
        let texts = [
            ("/h/.ssh/config", "Include conf.d/*.conf\nHost a\nInclude /etc/inner\nHost *\nUser last\n"),
            ("/h/.ssh/conf.d/1.conf", "Host b\nUser of-b\n"),
            ("/h/.ssh/conf.d/2.txt", "User wrong\n"),
            ("/etc/inner", "Host *\nPort 7\n"),
        ];
        let user = |host| said(&texts, host).unwrap().user.unwrap();
        assert_eq!((user("a"), user("b")), ("last".to_owned(), "of-b".to_owned()));
        assert_eq!(said(&texts, "a").unwrap().port, Some(7));
        assert_eq!(said(&texts, "c").unwrap().port, None);
        let endless = said(&[("/h/.ssh/config", "Include config\n")], "a").unwrap_err();
        assert!(endless.what.contains("too deeply"));
    }

    #[test]
    fn test_what_is_not_understood_is_named() {
        let rows = [
            ("Port x", "`x` is no port"),
            ("ProxyCommand nc %h %p", "`ProxyCommand` is not understood"),
            ("Match exec true", "this `Match` is not understood"),
            ("User \"ada", "a quotation mark is missing"),
            ("User", "`user` says nothing"),
        ];
        for (line, what) in rows {
            let error = said(&[("/h/.ssh/config", &format!("\n{line}\n"))], "a").unwrap_err();
            assert!(error.line == 2 && error.what.contains(what), "{line}: {error}");
        }
        assert!(said(&[("/h/.ssh/config", "Match all\nPort 5\n")], "a").unwrap().port == Some(5));
        assert!(said(&[("/h/.ssh/config", "ProxyCommand none\nUnknown thing\n")], "a").is_ok());
    }
}
