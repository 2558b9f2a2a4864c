//! What attacks are after, and how it is told afterwards whether they got it.
//!
//! Most attacks are probes: lines of shell that succeed if they broke something. One job tries many of them.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use agent_tests::Host;
use agent_tests::chance::Chance;
use agent_tests::table::Tally;

/// A secret that one user alone may read, and a file that he alone may write, somewhere no job has any business.
#[derive(Debug)]
pub(crate) struct Prey {
    dir: tempfile::TempDir,
    secret: String,
    owner: u32,
}

impl Prey {
    /// Root's.
    pub(crate) fn new() -> Prey {
        Prey::of(0)
    }

    /// Of the user a daemon runs as.
    pub(crate) fn of(owner: u32) -> Prey {
        let dir = tempfile::Builder::new().prefix("agentd-prey-").tempdir().expect("a temporary directory");
        // The way to it is open, the files are not.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("its own directory");
        let secret = format!("prey{:016x}", Chance::new(Chance::seed()).number());
        let prey = Prey { dir, secret, owner };
        for (path, text) in [(prey.secret(), prey.secret.as_str()), (prey.target(), "untouched\n")] {
            fs::write(&path, text).expect("a file");
            fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("its own file");
        }
        fs::create_dir(prey.folder()).expect("a directory");
        fs::set_permissions(prey.folder(), Permissions::from_mode(0o700)).expect("its own directory");
        for path in [prey.dir.path().to_owned(), prey.secret(), prey.target(), prey.folder()] {
            chown(path, Some(owner), Some(owner)).expect("root may give files away");
        }
        prey
    }

    /// Shell that names all of it: `$SECRET`, `$TARGET` and `$FOLDER`.
    pub(crate) fn names(&self) -> String {
        let names = [("SECRET", self.secret()), ("TARGET", self.target()), ("FOLDER", self.folder())];
        names.iter().map(|(name, path)| format!("{name}={}; ", path.display())).collect()
    }

    /// The file nobody else may read.
    pub(crate) fn secret(&self) -> PathBuf {
        self.dir.path().join("secret")
    }

    /// The file nobody else may write.
    pub(crate) fn target(&self) -> PathBuf {
        self.dir.path().join("target")
    }

    /// The folder nobody else may write into.
    pub(crate) fn folder(&self) -> PathBuf {
        self.dir.path().join("folder")
    }

    /// Fails if the secret stands in `text`.
    #[track_caller]
    pub(crate) fn not_in(&self, text: &str, what: &str) {
        assert!(!text.contains(&self.secret), "the secret stands in {what}");
    }

    /// Fails if the secret stands in a file below `dir`.
    #[track_caller]
    pub(crate) fn not_below(&self, dir: &Path) {
        let mut open = vec![dir.to_owned()];
        while let Some(dir) = open.pop() {
            for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() => open.push(entry.path()),
                    Ok(kind)
                        if kind.is_file() && entry.metadata().is_ok_and(|found| found.len() < 64 << 20) =>
                    {
                        let bytes = fs::read(entry.path()).unwrap_or_default();
                        let has = bytes.windows(self.secret.len()).any(|part| part == self.secret.as_bytes());
                        assert!(!has, "the secret stands in {}", entry.path().display());
                    }
                    _ => {}
                }
            }
        }
    }

    /// Fails unless everything is as it was.
    #[track_caller]
    pub(crate) fn is_untouched(&self) {
        assert_eq!(
            fs::read_to_string(self.target()).unwrap_or_default(),
            "untouched\n",
            "the file was written"
        );
        for (path, mode) in [(self.secret(), 0o600), (self.target(), 0o600), (self.folder(), 0o700)] {
            let found = fs::symlink_metadata(&path).expect("it is there still");
            assert_eq!(
                (found.uid(), found.gid(), found.mode() & 0o7777),
                (self.owner, self.owner, mode),
                "{} has another owner or mode",
                path.display()
            );
        }
        let left: Vec<_> = fs::read_dir(self.folder()).expect("a directory").flatten().collect();
        assert!(left.is_empty(), "something was made in the folder: {left:?}");
    }
}

/// Something that is tried from inside: what, and shell that succeeds if it broke through.
pub(crate) type Probe = (&'static str, &'static str);

/// The script of a job that tries all of them.
pub(crate) fn script(probes: &[Probe]) -> String {
    let one = |(number, (_, probe)): (usize, &Probe)| {
        format!(
            "if ( {probe} ) >./said 2>&1; then echo BROKE {number}; else echo held {number}; fi; cat ./said\n"
        )
    };
    probes.iter().enumerate().map(one).collect()
}

/// Counts what came of them, as the job printed it.
pub(crate) fn judge(tally: &mut Tally, who: &str, probes: &[Probe], printed: &str) {
    for (number, (what, _)) in probes.iter().enumerate() {
        let said = |word: &str| printed.lines().any(|line| line == format!("{word} {number}"));
        tally.case(&format!("{who}: {what}"), || {
            assert!(said("held") && !said("BROKE"), "it broke through, or never ran:\n{printed}");
        });
    }
}

/// No file below a directory may be one that gives whoever runs it another user's rights.
#[track_caller]
pub(crate) fn nothing_setuid_below(dir: &Path) {
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            let Ok(found) = entry.path().symlink_metadata() else { continue };
            if found.is_dir() {
                open.push(entry.path());
            }
            let gives = found.is_file() && found.uid() == 0 && found.mode() & 0o6000 != 0;
            assert!(!gives, "{} gives the rights of root", entry.path().display());
            assert_ne!(entry.file_name(), "pwned", "{} was left by an image", entry.path().display());
        }
    }
}

/// Changes everything of its environment, in which it imports a package first.
pub(crate) const VANDAL: &str = "python -c 'import evil'; P=$(python -c 'import sys; print(sys.prefix)'); \
    { touch $P/x; touch $P/bin/x; echo x >>$P/bin/activate; chmod 777 $P $P/bin; rm -rf $P/lib; } 2>/dev/null; id -u";

/// Nothing of what that does is in the environment.
pub(crate) fn is_whole(host: &Host) {
    let environments = fs::read_dir(host.state().join("envs")).expect("environments").flatten();
    let is_made =
        |path: &PathBuf| path.join("ready.json").exists() && path.display().to_string().contains("/pip-");
    let made: Vec<PathBuf> = environments.map(|entry| entry.path()).filter(is_made).collect();
    assert!(!made.is_empty());
    for path in made {
        assert!(!path.join("x").exists() && !path.join("bin/x").exists() && path.join("lib").exists());
        assert!(!fs::read_to_string(path.join("bin/activate")).expect("a script").ends_with("x\n"));
        for part in [path.clone(), path.join("bin")] {
            assert_eq!(part.metadata().expect("a directory").mode() & 0o022, 0, "{}", part.display());
        }
    }
}
