//! Installs pip requirements into a prefix: with uv if it is there and understands them, else with pip.
//!
//! Owns the surroundings of installers: a clean environment, the package caches that builds share, the settings of
//! the node. Hides which of the two it was, and the output of each.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use agent_command::Command;
use agent_model::failpoint;

use super::dists::{self, Dists, Hashes};
use super::downloads::Downloads;
use super::pip_settings::settings;
use super::uv::{self, Finder, Found};
use super::{AcquireError, BuildWorkspace, EnvConfig, Phase, Progress, pip_output};

/// The file with the lines, in the directory where installers run: they repeat its name in much of what they print.
const LIST: &str = "requirements.txt";

const INSTALL: &str = "installing packages";
const CHECK: &str = "checking that packages fit each other";
const MISFIT: &str = "warning: packages do not fit each other";

/// How large the hashes of a lock may be, in bytes: a lock must stay readable.
const HASHES: usize = 512 << 10;

/// The largest report of pip, in bytes.
const REPORT: u64 = 64 << 20;

/// The version from which on pip can report what it installed.
const REPORTS: (u32, u32) = (22, 2);

/// The version from which on pip can say how much of a download has arrived.
const COUNTS: (u32, u32) = (24, 1);

/// Installs Python packages.
pub(super) struct Installer {
    config: Arc<EnvConfig>,
    finder: Finder,
}

/// What to install.
#[derive(Debug, Clone, Default)]
pub(super) struct InstallSpec {
    /// The lines, options among them.
    pub(super) lines: Vec<String>,
    /// The lines are complete: no dependencies are looked up.
    pub(super) exact: bool,
    /// The installed files are compiled later, when nobody waits.
    pub(super) compiled_later: bool,
    /// Variables for commands in this prefix.
    pub(super) vars: BTreeMap<String, String>,
}

impl Installer {
    pub(super) fn new(config: Arc<EnvConfig>) -> Installer {
        Installer { finder: Finder::new(config.clone()), config }
    }

    /// The uv that will install these lines; logs the reason if pip is used instead.
    pub(super) async fn uv(&self, lines: &[String], workspace: &BuildWorkspace) -> Option<Found> {
        let found = match self.finder.find().await {
            Ok(found) => found?,
            Err(why) => {
                workspace.say(&format!("{why}; pip is used instead"));
                return None;
            }
        };
        match uv::arguments(lines) {
            Ok(_) => Some(found),
            Err(line) => {
                workspace.say(&format!("uv does not understand `{line}`; pip is used instead"));
                None
            }
        }
    }

    /// Installs the wanted packages into the prefix of the build workspace; returns the lines of a lock for it.
    pub(super) async fn install(
        &self,
        uv: Option<&Found>,
        wanted: &InstallSpec,
        workspace: &BuildWorkspace,
    ) -> Result<Vec<String>, AcquireError> {
        let scratch = scratch(workspace);
        fs::create_dir_all(&scratch).map_err(AcquireError::io("create", &scratch))?;
        let list = workspace.prefix().join(LIST);
        let text = wanted.lines.join("\n") + "\n";
        let write = || {
            failpoint::hit("env.requirements.write")?;
            // An interpreter that the user named has run here: what has this name may lead anywhere.
            agent_fs::make_anew(workspace.prefix(), LIST, 0o644)?.write_all(text.as_bytes())
        };
        write().map_err(AcquireError::io("write", &list))?;
        let before = dists::dists(workspace.prefix());
        workspace.say(&format!("{INSTALL}: {}", wanted.lines.join(", ")));
        workspace.tell(Progress::of(Phase::Pip, ""));
        let by_uv = match uv {
            Some(uv) => self.by_uv(uv, wanted, workspace).await?,
            None => false,
        };
        let mut hashes = Hashes::new();
        if !by_uv {
            hashes = self.by_pip(wanted, workspace).await?;
        }
        let after = dists::dists(workspace.prefix());
        if let Some(uv) = uv.filter(|_| by_uv) {
            hashes = self.hashes(uv, &before, &after, wanted, workspace).await;
            self.check(uv, wanted, workspace).await?;
        }
        say_replaced(&before, &after, workspace);
        agent_spawn::remove_tree(&scratch).map_err(AcquireError::io("remove", &scratch))?;
        Ok(lock_lines(wanted, &before, &after, &hashes))
    }

    /// Whether uv installed it; false if it turns out that uv does not understand a line.
    async fn by_uv(
        &self,
        found: &Found,
        wanted: &InstallSpec,
        workspace: &BuildWorkspace,
    ) -> Result<bool, AcquireError> {
        workspace.say(&format!("using {} ({})", found.program.display(), found.version));
        let arguments = uv::arguments(&wanted.lines).unwrap_or_default();
        let mut command =
            self.of_uv(found, workspace).args(["pip", "install", "--index-strategy", "unsafe-best-match"]);
        command = command.args(arguments).args(uv::no_index(&settings(&self.config.vars)));
        if wanted.exact {
            command = command.arg("--no-deps");
        }
        let command = self.clean(command, wanted, workspace).args(["-r", LIST]);
        let ran = workspace.install(INSTALL, command, Downloads::of_uv()).await?;
        if ran.success {
            return Ok(true);
        }
        if uv::is_puzzled(&ran) {
            workspace.say("uv does not understand the requirements; pip is used instead");
            return Ok(false);
        }
        Err(uv::judge(&ran, &wanted.lines, INSTALL, workspace.prefix()))
    }

    async fn by_pip(&self, wanted: &InstallSpec, workspace: &BuildWorkspace) -> Result<Hashes, AcquireError> {
        let report = scratch(workspace).join("report.json");
        let pip = pip_version(&dists::dists(workspace.prefix()));
        let bar = if pip >= COUNTS { "raw" } else { "off" };
        let mut command = self.of_pip(workspace).args(["install", "--no-input", "--progress-bar", bar]);
        if self.config.conda.offline {
            command = command.arg("--no-index");
        }
        if wanted.exact {
            command = command.arg("--no-deps");
        }
        if wanted.compiled_later {
            command = command.arg("--no-compile");
        }
        if pip >= REPORTS {
            command = command.arg("--report").arg(&report);
        }
        let command = self.clean(command, wanted, workspace).args(["-r", LIST]);
        let mut ran = workspace.install(INSTALL, command, Downloads::of_pip()).await?;
        if ran.success {
            // pip has checked already, and prints an error for what it accepts.
            if ran.text.contains("dependency resolver does not currently take into account") {
                workspace.say(&format!("{MISFIT}, as pip says above"));
            }
            let report = agent_fs::open_directory(workspace.prefix())
                .and_then(|prefix| agent_fs::read_beneath(prefix, "tmp/report.json", REPORT));
            return Ok(report.map(|text| dists::hashes_of_report(&text)).unwrap_or_default());
        }
        ran.text = pip_output::name_lines(&ran.text, LIST, &wanted.lines);
        Err(pip_output::judge(&ran, INSTALL, workspace.prefix()))
    }

    /// The hashes of the packages that uv installed, from its indexes; none if that needs the network.
    async fn hashes(
        &self,
        found: &Found,
        before: &Dists,
        after: &Dists,
        wanted: &InstallSpec,
        workspace: &BuildWorkspace,
    ) -> Hashes {
        let (new, _) = dists::changes(before, after);
        let lines: Vec<String> = new.into_iter().map(|dist| dists::locked(dist, &Hashes::new())).collect();
        let options = wanted.lines.iter().filter(|line| line.starts_with('-')).cloned();
        let pinned = lines.into_iter().filter(|line| !line.contains(" @ "));
        let text = options.chain(pinned).collect::<Vec<_>>().join("\n");
        let command = self.of_uv(found, workspace).args([
            "pip",
            "compile",
            "--offline",
            "--no-deps",
            "--generate-hashes",
        ]);
        let command = command.args([
            "--no-header",
            "--no-annotate",
            "--quiet",
            "--index-strategy",
            "unsafe-best-match",
        ]);
        let command = command.args(uv::no_index(&settings(&self.config.vars)));
        let command = self.clean(command, wanted, workspace).arg("-").input(text);
        match workspace.ask("reading the hashes of packages", command).await {
            Ok(ran) if ran.success && ran.text.len() < HASHES => dists::hashes_of_list(&ran.text),
            _ => Hashes::new(),
        }
    }

    /// Logs packages that do not fit each other; the environment is used all the same, as with pip.
    async fn check(
        &self,
        uv: &Found,
        wanted: &InstallSpec,
        workspace: &BuildWorkspace,
    ) -> Result<(), AcquireError> {
        workspace.tell(Progress::of(Phase::Check, ""));
        let command = self.of_uv(uv, workspace).args(["pip", "check"]);
        let ran = workspace.ask(CHECK, self.clean(command, wanted, workspace)).await?;
        if !ran.success {
            workspace.say(&format!("{MISFIT}:\n{}", ran.text.trim_end()));
        }
        Ok(())
    }

    /// Installs pip itself from the interpreter's files, so that jobs can call it; logs it when there is none.
    pub(super) async fn seed(
        &self,
        found: &Found,
        stdlib: &Path,
        workspace: &BuildWorkspace,
    ) -> Result<(), AcquireError> {
        let Some(wheel) = bundled_pip(stdlib) else {
            workspace.say("note: this interpreter brings no pip, so the environment has none");
            return Ok(());
        };
        let command =
            self.of_uv(found, workspace).args(["pip", "install", "--no-deps", "--no-index", "--quiet"]);
        let ran = workspace
            .run(INSTALL, self.clean(command, &InstallSpec::default(), workspace).arg(wheel))
            .await?;
        if !ran.success {
            workspace.say("note: pip itself could not be installed into the environment");
        }
        Ok(())
    }

    /// Where the caches of installers are: those of the owner that is built for, if he has his own.
    fn caches<'a>(&'a self, workspace: &'a BuildWorkspace) -> &'a Path {
        let owned = workspace.builder().and_then(|builder| builder.owned.as_ref());
        owned.map_or(&self.config.packages, |cache| &cache.dir)
    }

    fn of_uv(&self, found: &Found, workspace: &BuildWorkspace) -> Command {
        // Not `clone`: where files cannot be cloned, uv makes hard links instead. The next builder could change the
        // files of a cache that builders own.
        let link = if self.config.hard_links && self.config.builder.is_none() { "hardlink" } else { "copy" };
        let command = Command::new(&found.program).envs([
            ("UV_CACHE_DIR", self.caches(workspace).join("uv")),
            ("UV_PYTHON", workspace.prefix().join("bin/python")),
        ]);
        let offline = if self.config.conda.offline { "1" } else { "0" };
        let command =
            command.envs([("UV_LINK_MODE", link), ("UV_OFFLINE", offline), ("UV_NO_PROGRESS", "1")]);
        // The certificates that pip and the conda engine trust; older versions of uv know the second name.
        let command = command.envs([("UV_SYSTEM_CERTS", "1"), ("UV_NATIVE_TLS", "1")]);
        command
            .envs([("UV_PYTHON_DOWNLOADS", "never")])
            .envs(uv::variables(&self.config.vars, &settings(&self.config.vars)))
    }

    fn of_pip(&self, workspace: &BuildWorkspace) -> Command {
        let command = Command::new(workspace.prefix().join("bin/python"));
        let command = command.envs([("PIP_CACHE_DIR", self.caches(workspace).join("pip"))]);
        let command = command.envs([("PIP_ROOT_USER_ACTION", "ignore")]);
        command.args(["-m", "pip", "--disable-pip-version-check"])
    }

    /// Gives a command the variables for builders, and nothing of the daemon's own environment. Scratch files are put
    /// into the environment, so that they are wiped with it.
    pub(super) fn clean(
        &self,
        command: Command,
        wanted: &InstallSpec,
        workspace: &BuildWorkspace,
    ) -> Command {
        let path = format!("{}:{}", workspace.prefix().join("bin").display(), self.config.path);
        let scratch = scratch(workspace);
        let home = workspace.builder().map(|_| ("HOME", &scratch));
        let command = match workspace.builder() {
            Some(builder) => builder.runs(command),
            None => self.config.apart(command),
        };
        command
            .envs(&self.config.vars)
            .envs(&wanted.vars)
            .envs([
                ("PATH", path.as_str()),
                ("TMPDIR", &scratch.to_string_lossy()),
                ("LC_ALL", "C.UTF-8"), // the output of installers is parsed
                ("PYTHONNOUSERSITE", "1"),
                ("PYTHONUNBUFFERED", "1"),
            ])
            .envs(home)
    }
}

fn scratch(workspace: &BuildWorkspace) -> PathBuf {
    workspace.prefix().join("tmp")
}

/// The settings that are part of an environment's identity: other indexes have other packages.
pub(super) fn indexes(config: &EnvConfig) -> String {
    const NAMES: [&str; 4] = ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"];
    let settings = settings(&config.vars);
    let said = NAMES.iter().filter_map(|name| Some((name, settings.get(*name)?)));
    said.map(|(name, value)| format!("{name}={}\n", without_credentials(value))).collect()
}

/// The addresses without user and password.
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

/// The state of files of the node that lines name, such as wheels: a changed file makes another environment.
pub(super) fn local_files(requirements: &[String]) -> String {
    let words = requirements.iter().flat_map(|line| line.split([' ', '\t', '=']));
    let paths =
        words.map(|word| word.strip_prefix("file://").unwrap_or(word)).filter(|word| word.starts_with('/'));
    let seen = paths.filter_map(|path| Some((path, fs::metadata(path).ok()?)));
    seen.filter(|(_, file)| file.is_file())
        .map(|(path, file)| format!("{path} {} {}.{}\n", file.len(), file.mtime(), file.mtime_nsec()))
        .collect()
}

/// The version of the pip in an environment.
fn pip_version(dists: &Dists) -> (u32, u32) {
    let version = dists.get("pip").map(|pip| pip.version.as_str()).unwrap_or_default();
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
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

fn say_replaced(before: &Dists, after: &Dists, workspace: &BuildWorkspace) {
    let (_, replaced) = dists::changes(before, after);
    for (old, new) in replaced {
        let (name, old, new) = (&old.name, &old.version, &new.version);
        workspace.say(&format!("note: {name} {old} of conda was replaced by {name} {new} of pip"));
    }
}

/// The lines that install the same again: the indexes, then exactly the installed packages.
fn lock_lines(wanted: &InstallSpec, before: &Dists, after: &Dists, hashes: &Hashes) -> Vec<String> {
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
