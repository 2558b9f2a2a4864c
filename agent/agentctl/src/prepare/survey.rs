//! Reports what a plan would send, before anything is sent: how much, the largest files, what rules leave out, what
//! looks like a key. Refuses directories that nobody means to send.

use std::collections::HashSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use agent_blocking::blocking;
use agent_cas::snapshot::{Choice, Ruled, ScanError, StatCache, Survey};
use agent_model::{Code, Fault, size};
use serde_json::{Value, json};

use super::{Plan, made};
use crate::output::Paper;
use crate::output::text::{clean, count, wrap};

/// Files that are named one by one.
const SHOWN: usize = 5;

/// Names of files that hold keys or passwords, as programs write them.
const KEYS: [&str; 11] = [
    ".env",
    ".git-credentials",
    ".htpasswd",
    ".netrc",
    ".npmrc",
    ".pgpass",
    ".pypirc",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
    "id_rsa",
];
/// Endings of the names of other such files.
const KEY_ENDINGS: [&str; 4] = [".pem", ".p12", ".pfx", ".key"];
/// Directories that hold only such files.
const KEY_DIRECTORIES: [&str; 5] = [".ssh", ".aws", ".azure", ".gnupg", ".kube"];

/// Which files of a path are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    File,
    /// The job's working directory: a directory by its ignore file, with room for the folders of its outputs and
    /// logs.
    Code,
    /// A directory by its ignore file.
    Folder,
    /// A directory with all its files: an image build has ignore rules of its own, which the builder applies.
    Whole,
}

impl Kind {
    /// How the files of a directory are chosen.
    pub(super) fn choice<'a>(self, never: &'a [PathBuf], cache: Option<&'a StatCache>) -> Choice<'a> {
        Choice { whole: self == Kind::Whole, code: self == Kind::Code, cache, never }
    }
}

/// Whether a file may hold a key or a password, judged by its directory and its name.
pub(super) fn is_key(dir: &str, name: &str) -> bool {
    KEYS.contains(&name)
        || KEY_ENDINGS.iter().any(|ending| name.ends_with(ending))
        || dir.split('/').any(|part| KEY_DIRECTORIES.contains(&part))
}

/// The warning about such files before they are sent.
pub(super) fn keys(found: &[String]) -> Option<String> {
    let few = found.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = match found.len().checked_sub(SHOWN) {
        None | Some(0) => String::new(),
        Some(more) => format!(" and {more} more"),
    };
    (!found.is_empty()).then(|| {
        let look =
            if found.len() == 1 { "looks like a key or password" } else { "look like keys or passwords" };
        format!("{few}{more} {look}, for everybody to read who may read the job; a .amlignore keeps them out")
    })
}

impl Plan {
    /// The parts to send: a label, which files, and the path.
    fn parts(&self) -> Vec<(String, Kind, &Path)> {
        let code = self.code.iter().map(|dir| ("code".to_owned(), Kind::Code, dir.as_path()));
        let inputs = self.inputs.iter().map(|(name, path)| {
            let kind = if path.is_file() { Kind::File } else { Kind::Folder };
            (format!("input {name}"), kind, path.as_path())
        });
        let context =
            self.context.iter().map(|(dir, _)| ("build context".to_owned(), Kind::Whole, dir.as_path()));
        let steps = self.pipeline.iter().flat_map(|pipeline| &pipeline.steps);
        let of_steps = steps.flat_map(|step| {
            let parts = step.plan.parts().into_iter();
            parts.map(|(what, kind, path)| (format!("{}: {what}", step.name), kind, path))
        });
        let mut parts: Vec<(String, Kind, &Path)> =
            code.chain(inputs).chain(context).chain(of_steps).collect();
        let mut seen = HashSet::new();
        parts.retain(|(_, kind, path)| seen.insert((*kind, *path)));
        parts
    }

    /// Refuses what nobody means to send: a home directory, or a directory that contains it.
    pub(crate) fn refuse_homes(&self, home: Option<&Path>) -> Result<(), Fault> {
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let home = home.map(real);
        for (what, kind, path) in self.parts().into_iter().filter(|(_, kind, _)| *kind != Kind::File) {
            let dir = real(path);
            let is = match &home {
                _ if dir == Path::new("/") => "the root of this machine",
                Some(home) if *home == dir => "your home directory",
                Some(home) if home.starts_with(&dir) => "the directory of your home",
                _ => continue,
            };
            let which = if kind == Kind::Code { "the directory of your code" } else { "a directory below" };
            return Err(Fault::new(Code::SnapshotUnsafe, format!("{what}: `{}` is {is}", dir.display()))
                .why("all of it would be sent, and kept as long as the job needs it")
                .fix(format!("name {which}; `--dry-run` lists what would be sent, and `--yes` sends it")));
        }
        Ok(())
    }

    /// What would be sent.
    pub(crate) async fn survey(&self, never: &[PathBuf]) -> Result<Vec<SentPart>, Fault> {
        let mut surveyed = Vec::new();
        for (what, kind, path) in self.parts() {
            let content = match kind {
                Kind::File => SentContent::File(path.metadata().map_or(0, |metadata| metadata.len())),
                _ => {
                    let (dir, never) = (path.to_owned(), kept_out(kind, path, never));
                    let survey = blocking(move || kind.choice(&never, None).survey(&dir)).await;
                    SentContent::Directory(Box::new(survey.map_err(|error| unreadable(&what, path, &error))?))
                }
            };
            surveyed.push(SentPart { what, path: path.to_owned(), content });
        }
        Ok(surveyed)
    }
}

/// A part of what would be sent.
pub(crate) struct SentPart {
    /// `code`, `input NAME` and so on.
    what: String,
    path: PathBuf,
    content: SentContent,
}

enum SentContent {
    /// A file of so many bytes.
    File(u64),
    Directory(Box<Survey>),
}

/// The directories that are not entered: of code also those that were fetched from jobs.
pub(super) fn kept_out(kind: Kind, path: &Path, own: &[PathBuf]) -> Vec<PathBuf> {
    let made = if kind == Kind::Code { made::below(path) } else { Vec::new() };
    own.iter().cloned().chain(made).collect()
}

pub(super) fn unreadable(what: &str, path: &Path, error: &ScanError) -> Fault {
    let (code, fix) = match error {
        ScanError::Directory { .. } | ScanError::Read { .. } => {
            (Code::SnapshotUnreadable, "check that it exists and that you may read it")
        }
        ScanError::Changed { .. } => {
            (Code::SnapshotUnreadable, "end what writes there, or keep it out with a .amlignore")
        }
        ScanError::TooLarge { .. } => (
            Code::SnapshotUnsafe,
            "keep what the job does not need out with a .amlignore, or pack it into few files",
        ),
        ScanError::TooDeep { .. } | ScanError::NotAFile { .. } | ScanError::Unfit(_) | ScanError::Stopped => {
            (Code::SnapshotUnsafe, "keep it out with a .amlignore, or give it another place or name")
        }
    };
    Fault::new(code, format!("{what}: `{}` cannot be read", path.display())).because(error).fix(fix)
}

/// The parts for people.
pub(crate) fn describe(parts: &[SentPart], paper: Paper) -> String {
    let part = |SentPart { what, path, content }: &SentPart| match content {
        SentContent::File(size) => format!("{what}: {}, {}\n", path.display(), size::binary(*size)),
        SentContent::Directory(survey) => told(what, path, survey, paper),
    };
    match parts {
        [] => "nothing: the job names no code and no files\n".to_owned(),
        parts => parts.iter().map(part).collect(),
    }
}

impl SentPart {
    /// For programs.
    pub(crate) fn json(&self) -> Value {
        let SentPart { what, path, content } = self;
        match content {
            SentContent::File(size) => json!({ "part": what, "path": path, "files": 1, "bytes": size }),
            SentContent::Directory(survey) => {
                let named = |(name, bytes): &(String, u64)| json!({ "path": name, "bytes": bytes });
                let ruled = |(rule, ruled): (&String, &Ruled)| json!({ "rule": rule, "count": ruled.count, "examples": ruled.examples });
                json!({
                    "part": what,
                    "path": path,
                    "files": survey.files,
                    "bytes": survey.bytes,
                    "largest": survey.largest.iter().map(named).collect::<Vec<_>>(),
                    "left_out": survey.rules.iter().map(ruled).collect::<Vec<_>>(),
                    "warnings": survey.warnings.iter().chain(&keys(&survey.named(is_key))).collect::<Vec<_>>(),
                })
            }
        }
    }
}

fn told(what: &str, path: &Path, survey: &Survey, paper: Paper) -> String {
    let (files, bytes) = (count(survey.files, "file"), size::binary(survey.bytes));
    let mut text = format!("{what}: {}, {files}, {bytes}\n", path.display());
    // Writing to a string cannot fail.
    for (name, bytes) in &survey.largest {
        let _ = writeln!(text, "  {:>8}  {}", size::binary(*bytes), clean(name));
    }
    if survey.files > survey.largest.len() as u64 {
        let _ = writeln!(text, "  and {} smaller ones", survey.files - survey.largest.len() as u64);
    }
    if !survey.rules.is_empty() {
        text.push_str("  left out, by rule:\n");
    }
    for (rule, ruled) in &survey.rules {
        let examples = ruled.examples.iter().map(|path| clean(path)).collect::<Vec<_>>().join(", ");
        let more = if ruled.count > ruled.examples.len() as u64 { ", ..." } else { "" };
        let _ = writeln!(text, "  {:>8}  {}  ({examples}{more})", ruled.count, clean(rule));
    }
    let keys = keys(&survey.named(is_key));
    for warning in survey.warnings.iter().chain(&keys) {
        let _ = writeln!(text, "  {}", wrap(&format!("warning: {}", clean(warning)), paper.width, 4));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::Changes;
    use super::super::tests::project;
    use super::*;
    use crate::output::text::Ink;

    const PAPER: Paper = Paper { ink: Ink::PLAIN, width: 200 };

    fn plan(dir: &Path) -> Plan {
        Plan::read(dir, Changes { command: vec!["true".to_owned()], ..Changes::default() }).unwrap()
    }

    #[tokio::test]
    async fn test_what_would_be_sent_is_listed_with_the_rules_and_the_keys() {
        let dir = project(&[
            ("train.py", "12345"),
            (".gitignore", "x"),
            (".amlignore", "\n*.ckpt\n"),
            ("a.ckpt", "x"),
            (".env", "TOKEN=1"),
            ("state/cas/x", "x"),
        ]);
        let told = describe(&plan(dir.path()).survey(&[dir.path().join("state")]).await.unwrap(), PAPER);
        let places = |told: &str, dir: &Path| told.replace(&dir.display().to_string(), "DIR");
        insta::assert_snapshot!(places(&told, dir.path()), @r"
            code: DIR, 4 files, 21 B
                   8 B  .amlignore
                   7 B  .env
                   5 B  train.py
                   1 B  .gitignore
              left out, by rule:
                     1  .amlignore:2: *.ckpt  (a.ckpt)
              warning: .amlignore is there, so .gitignore has no effect
              warning: state was made by agentd; left out
              warning: .env looks like a key or password, for everybody to read who may read the job; a .amlignore keeps them out
        ");
        let dir = project(&[
            ("job.yml", "command: x\ncode: src\ninputs: {d: {path: d.csv}}\n"),
            ("src/a", ""),
            ("d.csv", "123"),
        ]);
        let told = describe(&plan(dir.path()).survey(&[]).await.unwrap(), PAPER);
        insta::assert_snapshot!(places(&told, dir.path()), @r"
            code: DIR/src, 1 file, 0 B
                   0 B  a
            input d: DIR/d.csv, 3 B
        ");
    }

    #[test]
    fn test_keys_are_known_by_their_names_and_places() {
        for path in [".env", "a/.env", "b/id_rsa", "certs/server.pem", ".ssh/config", "home/.aws/credentials"]
        {
            let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
            assert!(is_key(dir, name), "{path}");
        }
        for path in ["env", "id_rsa.md", "environment.yml", "ssh/config", "pem/x", "monkey"] {
            let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
            assert!(!is_key(dir, name), "{path}");
        }
        assert_eq!(keys(&[]), None);
        let many: Vec<String> = (0..7).map(|n| format!("{n}.pem")).collect();
        assert!(keys(&many).unwrap().starts_with("0.pem, 1.pem, 2.pem, 3.pem, 4.pem and 2 more look like"));
    }

    #[test]
    fn test_a_home_or_what_it_is_in_is_refused() {
        let dir = project(&[
            ("ada/p/train.py", ""),
            ("ada/job.yml", "command: x\ncode: p\ninputs: {d: {path: ..}}\n"),
        ]);
        let home = dir.path().join("ada");
        let refused = |target: &Path, home: &Path| plan(target).refuse_homes(Some(home)).err();
        assert!(refused(&home.join("p"), &home).is_none());
        assert!(plan(&home.join("p")).refuse_homes(None).is_ok());
        for (target, home, said) in [
            (home.join("p"), home.join("p"), "is your home directory"),
            (dir.path().to_owned(), home.clone(), "code: "),
            (home.clone(), home.clone(), "input d: "),
            ("/".into(), home.clone(), "the root of this machine"),
        ] {
            let fault = refused(&target, &home).unwrap();
            assert!(fault.code == Code::SnapshotUnsafe && fault.what.contains(said), "{fault}");
            assert!(fault.fix.unwrap().contains("--yes"));
        }
    }
}
