//! uv: whether it is there, its arguments, and its output.
//!
//! It installs the same as pip, but faster. It does not understand everything that pip does, and silently ignores
//! some of it; lines that it would get wrong are left to pip.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_command::Command;

use super::build_workspace::Ran;
use super::{AcquireError, EnvConfig, Uv};

/// How long it may take to print its version, on a machine that is busy with other jobs.
const PATIENCE: Duration = Duration::from_secs(30);

/// A uv that was tried: its file, and whether it works.
type Tried = (PathBuf, (u64, i64), Result<String, String>);

/// Finds uv, once per file.
pub(super) struct Finder {
    config: Arc<EnvConfig>,
    tried: tokio::sync::Mutex<Option<Tried>>,
}

/// A uv that works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) program: PathBuf,
    /// For example `uv 0.13.9`.
    pub(super) version: String,
}

impl Finder {
    pub(super) fn new(config: Arc<EnvConfig>) -> Finder {
        Finder { config, tried: tokio::sync::Mutex::default() }
    }

    /// The uv to use; `Err` with a reason to report, `Ok(None)` when none is wanted or found.
    pub(super) async fn find(&self) -> Result<Option<Found>, String> {
        let named = matches!(self.config.uv, Uv::At(_));
        let program = match &self.config.uv {
            Uv::Never => return Ok(None),
            Uv::At(path) => Some(path.clone()).filter(|path| path.is_file()),
            Uv::Auto => {
                let dirs = self.config.path.split(':').filter(|dir| dir.starts_with('/'));
                dirs.map(|dir| Path::new(dir).join("uv")).find(|path| path.is_file())
            }
        };
        let Some(program) = program else {
            return if named { Err("the configured uv is not there".to_owned()) } else { Ok(None) };
        };
        match self.version(&program).await {
            Ok(version) => Ok(Some(Found { program, version })),
            Err(why) => Err(format!("{} does not work: {why}", program.display())),
        }
    }

    async fn version(&self, program: &Path) -> Result<String, String> {
        let file = program.metadata().map_err(|error| error.to_string())?;
        let stamp = (file.ino(), file.mtime());
        let mut tried = self.tried.lock().await;
        if let Some((path, then, found)) = tried.as_ref()
            && (path.as_path(), *then) == (program, stamp)
        {
            return found.clone();
        }
        let command = Command::new(program).arg("--version").stall(PATIENCE);
        let command = command.envs(self.config.vars_of_questions()).envs([("PATH", &self.config.path)]);
        let found = match self.config.apart(command).capture().await {
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.text);
                let first = text.lines().next().unwrap_or_default().trim().to_owned();
                if output.status.success() && first.starts_with("uv ") { Ok(first) } else { Err(first) }
            }
            Err(error) => Err(error.to_string()),
        };
        *tried = Some((program.to_owned(), stamp, found.clone()));
        found
    }
}

/// Arguments in place of lines that uv ignores; if pip is needed, the error is the line that needs it.
pub(super) fn arguments(lines: &[String]) -> Result<Vec<String>, &str> {
    const UNDERSTOOD: [&str; 13] = [
        "-i",
        "--index-url",
        "--extra-index-url",
        "-f",
        "--find-links",
        "--no-index",
        "--no-binary",
        "--only-binary",
        "-r",
        "--requirement",
        "-c",
        "--constraint",
        "--require-hashes",
    ];
    let mut arguments = Vec::new();
    for line in lines {
        let word = line.split([' ', '\t', '=']).next().unwrap_or_default();
        let value = || line[word.len()..].trim_start_matches([' ', '\t', '=']).trim().to_owned();
        match word {
            "--pre" => arguments.extend(["--prerelease".to_owned(), "allow".to_owned()]),
            "--trusted-host" => arguments.extend(["--allow-insecure-host".to_owned(), value()]),
            "--prefer-binary" => {} // uv does
            _ if UNDERSTOOD.contains(&word) => {}
            _ if line.starts_with('-') => return Err(line),
            // An option of one package.
            _ if line
                .split_whitespace()
                .any(|word| word.starts_with("--") && !word.starts_with("--hash")) =>
            {
                return Err(line);
            }
            _ => {}
        }
    }
    Ok(arguments)
}

/// pip's settings as variables of uv, except those that are set for uv directly.
pub(super) fn variables(
    vars: &BTreeMap<String, String>,
    settings: &BTreeMap<String, String>,
) -> Vec<(&'static str, String)> {
    const TABLE: [(&str, &str); 5] = [
        ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"),
        ("PIP_EXTRA_INDEX_URL", "UV_INDEX"),
        ("PIP_FIND_LINKS", "UV_FIND_LINKS"),
        ("PIP_TRUSTED_HOST", "UV_INSECURE_HOST"),
        ("PIP_CERT", "SSL_CERT_FILE"),
    ];
    let said = |name: &str| settings.get(name).filter(|value| !value.trim().is_empty());
    let spelled = |uv: &str, value: &str| match uv {
        "UV_FIND_LINKS" => value.split_whitespace().collect::<Vec<_>>().join(","),
        _ => value.to_owned(),
    };
    let translated = TABLE.into_iter().filter(|(_, uv)| !vars.contains_key(*uv));
    translated.filter_map(|(pip, uv)| Some((uv, spelled(uv, said(pip)?)))).collect()
}

/// The argument for the one setting of pip for which uv has no variable.
pub(super) fn no_index(settings: &BTreeMap<String, String>) -> Option<&'static str> {
    let set = settings.get("PIP_NO_INDEX").map(|value| value.trim().to_ascii_lowercase());
    set.filter(|value| !["", "0", "false", "no", "off"].contains(&value.as_str())).map(|_| "--no-index")
}

/// Whether it did not understand a line that it should understand.
pub(super) fn is_puzzled(ran: &Ran) -> bool {
    [
        "Couldn't parse requirement",
        "Expected `--hash`",
        "error: unexpected argument",
        "Unsupported requirement",
    ]
    .iter()
    .any(|sign| ran.text.contains(sign))
}

/// Why packages were not installed, from uv's output.
pub(super) fn judge(ran: &Ran, lines: &[String], step: &'static str, prefix: &Path) -> AcquireError {
    let text = &ran.text;
    let has = |signs: &[&str]| signs.iter().any(|sign| text.contains(sign));
    if agent_fs::says_full(text) {
        return AcquireError::DiskFull { path: prefix.to_owned() };
    }
    if let Some(lack) = ran.lack(step) {
        return lack;
    }
    let reason = reason(text);
    if has(&["401 Unauthorized", "403 Forbidden"]) {
        return AcquireError::Denied { detail: reason };
    }
    let offline = has(&["the network was disabled"]);
    if offline || has(&["Failed to fetch", "error sending request", "dns error", "Request failed after"]) {
        return AcquireError::Network { detail: reason };
    }
    if has(&["No solution found"]) {
        let is_named = |line: &&String| {
            let name = package(line);
            !name.is_empty() && words(&reason).any(|word| word.eq_ignore_ascii_case(name))
        };
        let named: Vec<&str> = lines.iter().filter(is_named).map(String::as_str).collect();
        let requirement = if named.is_empty() { "the requirements".to_owned() } else { named.join(" and ") };
        return AcquireError::Unsatisfied { requirement, detail: reason };
    }
    AcquireError::Failed { step, detail: ran.tail() }
}

/// The name of the package in a requirement.
pub(super) fn package(line: &str) -> &str {
    let end = line.find(|c: char| !c.is_ascii_alphanumeric() && !"._-".contains(c)).unwrap_or(line.len());
    if line.starts_with('-') { "" } else { &line[..end] }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && !"._-".contains(c))
        .map(|word| word.trim_end_matches(['.', '-']))
}

/// The text after the word `error`, on one line.
fn reason(text: &str) -> String {
    let start = |line: &&str| !(line.starts_with("error:") || line.contains("No solution found"));
    let lines = text.lines().map(str::trim).skip_while(start);
    let lines = lines.take_while(|line| !line.is_empty());
    let plain = lines.map(|line| {
        let line = line.trim_start_matches(['×', '╰', '─', '▶', '├', '│', ' ']);
        ["error: ", "cause: ", "Caused by: "]
            .iter()
            .fold(line, |line, start| line.strip_prefix(start).unwrap_or(line))
    });
    let plain: Vec<&str> = plain.filter(|line| !line.starts_with("No solution found")).collect();
    let hint = text.lines().map(str::trim).find_map(|line| line.strip_prefix("hint: "));
    plain.into_iter().chain(hint).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn test_lines_that_uv_would_get_wrong_are_left_to_pip() {
        let plain =
            lines(&["numpy>=1.2; python_version < '4'", "--index-url https://x/y", "a==1 --hash=sha256:00"]);
        assert_eq!(arguments(&plain), Ok(vec![]));
        let translated = lines(&["--pre", "--trusted-host=h", "--prefer-binary", "x"]);
        assert_eq!(
            arguments(&translated),
            Ok(lines(&["--prerelease", "allow", "--allow-insecure-host", "h"]))
        );
        for line in ["x --global-option=y", "--use-feature=z", "--process-dependency-links"] {
            assert_eq!(arguments(&lines(&["numpy", line])), Err(line));
        }
    }

    #[test]
    fn test_what_uv_says_is_understood() {
        let judge = |text: &str| {
            let ran = Ran { success: false, text: text.to_owned() };
            judge(&ran, &lines(&["nope==9", "six"]), "installing", Path::new("/env"))
        };
        let older = "  × No solution found when resolving dependencies:\n  ╰─▶ Because nope was not found in the\n      \
                     package registry and you require nope==9, we can conclude that your\n      requirements are \
                     unsatisfiable.\n";
        let newer = "Using Python 3.11.7 environment at: v\nerror: No solution found when resolving dependencies\n  \
                     cause: Because nope was not found in the package registry and you require nope==9, we can \
                     conclude that your requirements are unsatisfiable.\n";
        for text in [older, newer] {
            let AcquireError::Unsatisfied { requirement, detail } = judge(text) else { panic!("{text}") };
            assert_eq!(requirement, "nope==9");
            assert!(detail.starts_with("Because nope was not found in the package registry"), "{detail}");
        }
        let refused =
            "error: Request failed after 3 retries\n  cause: Failed to fetch: http://h/simple/nope/\n";
        assert!(
            matches!(judge(refused), AcquireError::Network { detail } if detail.contains("http://h/simple"))
        );
        let denied =
            "error: Failed to fetch: `http://h/x`\n  Caused by: HTTP status client error (403 Forbidden)\n";
        assert!(matches!(judge(denied), AcquireError::Denied { .. }));
        assert!(matches!(
            judge("error: No space left on device (os error 28)"),
            AcquireError::DiskFull { .. }
        ));
        assert!(matches!(judge("boom"), AcquireError::Failed { .. }));
    }

    #[test]
    fn test_settings_of_pip_are_told_to_uv() {
        let vars = [
            ("PIP_INDEX_URL", "https://i"),
            ("PIP_FIND_LINKS", "/a /b"),
            ("UV_INDEX", "x"),
            ("PIP_EXTRA_INDEX_URL", "y"),
        ];
        let vars: BTreeMap<_, _> = vars.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let expected = [("UV_DEFAULT_INDEX", "https://i".to_owned()), ("UV_FIND_LINKS", "/a,/b".to_owned())];
        assert_eq!(variables(&vars, &vars), expected, "what uv is told itself stays");
    }
}
