//! Installing pip requirements into a prefix: by uv where it is there and understands them, else by pip.
//!
//! Owns what installers are given: a clean environment, the package caches that builds share, the settings of the
//! node. Hides which of the two it was, and what each prints.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_model::failpoint;

use super::dists::{self, Dists, Hashes};
use super::pip_settings::settings;
use super::uv::{self, Finder, Found};
use super::{AcquireError, Bench, EnvConfig, Phase, Progress, pip_output};
use crate::exec::Command;

const INSTALL: &str = "installing packages";
const CHECK: &str = "checking that packages fit each other";
const MISFIT: &str = "warning: packages do not fit each other";

/// How large the hashes of a lock may be, in bytes: a lock must stay readable.
const HASHES: usize = 512 << 10;

/// Installs Python packages.
pub(super) struct Installer {
    config: Arc<EnvConfig>,
    finder: Finder,
}

/// What to install.
#[derive(Debug, Clone, Default)]
pub(super) struct Wanted {
    /// The lines, options among them.
    pub(super) lines: Vec<String>,
    /// They are everything there is to install: nothing is looked up for them.
    pub(super) exact: bool,
    /// What is installed is compiled when nobody waits for it.
    pub(super) compiled_later: bool,
    /// Whoever has this prefix for a prefix of their own gives these variables.
    pub(super) vars: BTreeMap<String, String>,
}

impl Installer {
    pub(super) fn new(config: Arc<EnvConfig>) -> Installer {
        Installer { finder: Finder::new(config.clone()), config }
    }

    /// The uv that will install these lines; says why when it is not the one that is wanted.
    pub(super) async fn uv(&self, lines: &[String], bench: &Bench) -> Option<Found> {
        let found = match self.finder.find().await {
            Ok(found) => found?,
            Err(why) => {
                bench.say(&format!("{why}; pip is used instead"));
                return None;
            }
        };
        match uv::arguments(lines) {
            Ok(_) => Some(found),
            Err(line) => {
                bench.say(&format!("uv does not understand `{line}`; pip is used instead"));
                None
            }
        }
    }

    /// Installs what is wanted into the prefix of the bench, and returns the lines of a lock for it.
    pub(super) async fn install(
        &self,
        uv: Option<&Found>,
        wanted: &Wanted,
        bench: &Bench,
    ) -> Result<Vec<String>, AcquireError> {
        let scratch = scratch(bench);
        fs::create_dir_all(&scratch).map_err(AcquireError::io("create", &scratch))?;
        let list = bench.prefix().join("requirements.txt");
        let text = wanted.lines.join("\n") + "\n";
        let written = failpoint::hit("env.requirements.write").and_then(|()| fs::write(&list, text));
        written.map_err(AcquireError::io("write", &list))?;
        let before = dists::dists(bench.prefix());
        bench.say(&format!("{INSTALL}: {}", wanted.lines.join(", ")));
        bench.tell(Progress::of(Phase::Pip, ""));
        let by_uv = match uv {
            Some(uv) => self.by_uv(uv, wanted, &list, bench).await?,
            None => false,
        };
        let mut hashes = Hashes::new();
        if !by_uv {
            hashes = self.by_pip(wanted, &list, bench).await?;
        }
        let after = dists::dists(bench.prefix());
        if let Some(uv) = uv.filter(|_| by_uv) {
            hashes = self.hashes(uv, &before, &after, wanted, bench).await;
            self.check(uv, wanted, bench).await?;
        }
        say_replaced(&before, &after, bench);
        fs::remove_dir_all(&scratch).map_err(AcquireError::io("remove", &scratch))?;
        Ok(lock_lines(wanted, &before, &after, &hashes))
    }

    /// Whether uv installed it; not when it turns out that it does not understand a line.
    async fn by_uv(
        &self,
        found: &Found,
        wanted: &Wanted,
        list: &Path,
        bench: &Bench,
    ) -> Result<bool, AcquireError> {
        bench.say(&format!("using {} ({})", found.program.display(), found.version));
        let arguments = uv::arguments(&wanted.lines).unwrap_or_default();
        let mut command =
            self.of_uv(found, bench).args(["pip", "install", "--index-strategy", "unsafe-best-match"]);
        command = command.args(arguments).args(uv::no_index(&settings(&self.config.vars)));
        if wanted.exact {
            command = command.arg("--no-deps");
        }
        let ran = bench.run(INSTALL, self.clean(command, wanted, bench).arg("-r").arg(list)).await?;
        if ran.success {
            return Ok(true);
        }
        if uv::is_puzzled(&ran) {
            bench.say("uv does not understand the requirements; pip is used instead");
            return Ok(false);
        }
        Err(uv::judge(&ran, &wanted.lines, INSTALL, bench.prefix()))
    }

    async fn by_pip(&self, wanted: &Wanted, list: &Path, bench: &Bench) -> Result<Hashes, AcquireError> {
        let report = scratch(bench).join("report.json");
        let mut command = self.of_pip(bench).args(["install", "--no-input", "--progress-bar", "off"]);
        if self.config.conda.offline {
            command = command.arg("--no-index");
        }
        if wanted.exact {
            command = command.arg("--no-deps");
        }
        if wanted.compiled_later {
            command = command.arg("--no-compile");
        }
        if reports(&dists::dists(bench.prefix())) {
            command = command.arg("--report").arg(&report);
        }
        let mut ran = bench.run(INSTALL, self.clean(command, wanted, bench).arg("-r").arg(list)).await?;
        if ran.success {
            // It has looked already, and calls an error what it lets pass.
            if ran.text.contains("dependency resolver does not currently take into account") {
                bench.say(&format!("{MISFIT}, as pip says above"));
            }
            return Ok(fs::read(report).map(|text| dists::hashes_of_report(&text)).unwrap_or_default());
        }
        ran.text = pip_output::name_lines(&ran.text, list, &wanted.lines);
        Err(pip_output::judge(&ran, INSTALL, bench.prefix()))
    }

    /// The hashes of what uv installed, as its indexes say them; none when it cannot be asked without the network.
    async fn hashes(
        &self,
        found: &Found,
        before: &Dists,
        after: &Dists,
        wanted: &Wanted,
        bench: &Bench,
    ) -> Hashes {
        let (new, _) = dists::changes(before, after);
        let lines: Vec<String> = new.into_iter().map(|dist| dists::locked(dist, &Hashes::new())).collect();
        let options = wanted.lines.iter().filter(|line| line.starts_with('-')).cloned();
        let pinned = lines.into_iter().filter(|line| !line.contains(" @ "));
        let text = options.chain(pinned).collect::<Vec<_>>().join("\n");
        let command =
            self.of_uv(found, bench).args(["pip", "compile", "--offline", "--no-deps", "--generate-hashes"]);
        let command = command.args([
            "--no-header",
            "--no-annotate",
            "--quiet",
            "--index-strategy",
            "unsafe-best-match",
        ]);
        let command = command.args(uv::no_index(&settings(&self.config.vars)));
        let command = self.clean(command, wanted, bench).arg("-").input(text);
        match bench.ask("reading the hashes of packages", command).await {
            Ok(ran) if ran.success && ran.text.len() < HASHES => dists::hashes_of_list(&ran.text),
            _ => Hashes::new(),
        }
    }

    /// Says what does not fit; such an environment is used all the same, as pip does.
    async fn check(&self, uv: &Found, wanted: &Wanted, bench: &Bench) -> Result<(), AcquireError> {
        bench.tell(Progress::of(Phase::Check, ""));
        let command = self.of_uv(uv, bench).args(["pip", "check"]);
        let ran = bench.ask(CHECK, self.clean(command, wanted, bench)).await?;
        if !ran.success {
            bench.say(&format!("{MISFIT}:\n{}", ran.text.trim_end()));
        }
        Ok(())
    }

    /// Installs pip itself from what the interpreter brings, so that jobs can call it; says so when there is none.
    pub(super) async fn seed(&self, found: &Found, stdlib: &Path, bench: &Bench) -> Result<(), AcquireError> {
        let Some(wheel) = bundled_pip(stdlib) else {
            bench.say("note: this interpreter brings no pip, so the environment has none");
            return Ok(());
        };
        let command = self.of_uv(found, bench).args(["pip", "install", "--no-deps", "--no-index", "--quiet"]);
        let ran = bench.run(INSTALL, self.clean(command, &Wanted::default(), bench).arg(wheel)).await?;
        if !ran.success {
            bench.say("note: pip itself could not be installed into the environment");
        }
        Ok(())
    }

    fn of_uv(&self, found: &Found, bench: &Bench) -> Command {
        // Not `clone`: where files cannot be cloned, uv makes hard links of it.
        let link = if self.config.hard_links { "hardlink" } else { "copy" };
        let command = Command::new(&found.program).envs([
            ("UV_CACHE_DIR", self.config.packages.join("uv")),
            ("UV_PYTHON", bench.prefix().join("bin/python")),
        ]);
        let offline = if self.config.conda.offline { "1" } else { "0" };
        let command =
            command.envs([("UV_LINK_MODE", link), ("UV_OFFLINE", offline), ("UV_NO_PROGRESS", "1")]);
        // The certificates that pip and the conda engine believe; older ones call it by the second name.
        let command = command.envs([("UV_SYSTEM_CERTS", "1"), ("UV_NATIVE_TLS", "1")]);
        command
            .envs([("UV_PYTHON_DOWNLOADS", "never")])
            .envs(uv::variables(&self.config.vars, &settings(&self.config.vars)))
    }

    fn of_pip(&self, bench: &Bench) -> Command {
        let command = Command::new(bench.prefix().join("bin/python"));
        let command = command.envs([("PIP_CACHE_DIR", self.config.packages.join("pip"))]);
        let command = command.envs([("PIP_ROOT_USER_ACTION", "ignore")]);
        command.args(["-m", "pip", "--disable-pip-version-check"])
    }

    /// Gives a command what a builder may see, and nothing of the daemon's own environment. Scratch files go
    /// into the environment, so that they are wiped with it.
    pub(super) fn clean(&self, command: Command, wanted: &Wanted, bench: &Bench) -> Command {
        let path = format!("{}:{}", bench.prefix().join("bin").display(), self.config.path);
        command.envs(&self.config.vars).envs(&wanted.vars).envs([
            ("PATH", path.as_str()),
            ("TMPDIR", &scratch(bench).to_string_lossy()),
            ("LC_ALL", "C.UTF-8"), // what installers print is read
            ("PYTHONNOUSERSITE", "1"),
            ("PYTHONUNBUFFERED", "1"),
        ])
    }
}

fn scratch(bench: &Bench) -> PathBuf {
    bench.prefix().join("tmp")
}

/// The part that settings have in the identity of an environment: other indexes have other packages.
pub(super) fn indexes(config: &EnvConfig) -> String {
    const NAMES: [&str; 4] = ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"];
    let settings = settings(&config.vars);
    let said = NAMES.iter().filter_map(|name| Some((name, settings.get(*name)?)));
    said.map(|(name, value)| format!("{name}={}\n", without_credentials(value))).collect()
}

/// Addresses without user and password.
fn without_credentials(value: &str) -> String {
    let plain = |word: &str| match word.split_once("://") {
        Some((scheme, rest)) => {
            let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            format!("{scheme}://{}{path}", host.rsplit('@').next().unwrap_or(host))
        }
        None => word.to_owned(),
    };
    value.split_whitespace().map(plain).collect::<Vec<_>>().join(" ")
}

/// A line may name a file of the node: a wheel, or another list. A changed file is another environment.
pub(super) fn local_files(requirements: &[String]) -> String {
    let words = requirements.iter().flat_map(|line| line.split([' ', '\t', '=']));
    let paths =
        words.map(|word| word.strip_prefix("file://").unwrap_or(word)).filter(|word| word.starts_with('/'));
    let seen = paths.filter_map(|path| Some((path, fs::metadata(path).ok()?)));
    seen.filter(|(_, file)| file.is_file())
        .map(|(path, file)| format!("{path} {} {}.{}\n", file.len(), file.mtime(), file.mtime_nsec()))
        .collect()
}

/// Pip can report what it installed since 22.2.
fn reports(dists: &Dists) -> bool {
    let version = dists.get("pip").map(|pip| pip.version.as_str()).unwrap_or_default();
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) >= (22, 2)
}

/// The wheel of pip that comes with an interpreter.
fn bundled_pip(stdlib: &Path) -> Option<PathBuf> {
    let dirs = [stdlib.join("ensurepip/_bundled"), PathBuf::from("/usr/share/python-wheels")];
    let entries = dirs.into_iter().filter_map(|dir| dir.read_dir().ok()).flatten().flatten();
    let is_pip = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("pip-") && name.ends_with(".whl")
    };
    entries.map(|entry| entry.path()).find(is_pip)
}

fn say_replaced(before: &Dists, after: &Dists, bench: &Bench) {
    let (_, replaced) = dists::changes(before, after);
    for (old, new) in replaced {
        let (name, old, new) = (&old.name, &old.version, &new.version);
        bench.say(&format!("note: {name} {old} of conda was replaced by {name} {new} of pip"));
    }
}

/// The lines that install the same again: where to look, then exactly what came.
fn lock_lines(wanted: &Wanted, before: &Dists, after: &Dists, hashes: &Hashes) -> Vec<String> {
    if wanted.exact {
        return wanted.lines.clone();
    }
    const PLACES: [&str; 5] = ["-i", "--index-url", "--extra-index-url", "-f", "--find-links"];
    let is_place = |line: &&String| PLACES.contains(&line.split([' ', '=']).next().unwrap_or_default());
    let (new, _) = dists::changes(before, after);
    let lines = wanted.lines.iter().filter(is_place).cloned();
    lines.chain(new.into_iter().map(|dist| dists::locked(dist, hashes))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_settings_are_part_of_the_identity_but_credentials_are_not() {
        let mut config = EnvConfig::plain("/e".into(), String::new());
        config.vars.insert("PIP_CONFIG_FILE".into(), "/dev/null".into());
        config.vars.insert("PIP_EXTRA_INDEX_URL".into(), "https://u:p@h/simple https://k/x@y".into());
        assert_eq!(indexes(&config), "PIP_EXTRA_INDEX_URL=https://h/simple https://k/x@y\n");
    }

    #[test]
    fn test_changed_local_file_is_another_environment() {
        let dir = tempfile::tempdir().unwrap();
        let wheel = dir.path().join("x-1-py3-none-any.whl");
        fs::write(&wheel, "1").unwrap();
        let lines = |wheel: &Path| {
            let wheel = wheel.display();
            [format!("{wheel}"), format!("x @ file://{wheel}"), format!("--requirement={wheel}")]
        };
        for line in lines(&wheel) {
            fs::write(&wheel, "1").unwrap();
            let before = local_files(std::slice::from_ref(&line));
            fs::write(&wheel, "12").unwrap();
            assert_ne!(local_files(std::slice::from_ref(&line)), before, "{line}");
        }
        assert_eq!(local_files(&["numpy==1.0".to_owned(), "/not/there.whl".to_owned()]), "");
    }
}
