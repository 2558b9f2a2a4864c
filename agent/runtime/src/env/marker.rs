//! The record of a ready environment: its marker, and when it was last seen undamaged.
//!
//! ```text
//! ROOT/KEY/ready.json   the marker, written last: without it, it does not exist. Nobody waits for the disk, so it
//!                       is valid for one boot at first, and written again when everything is on the disk
//! ROOT/KEY.used         written when it is used, at most once a minute if unchanged: its time, and its state then
//! ```
//!
//! Damage is looked for in two steps. The cheap one, at every use: the interpreter exists, and since the last look
//! neither was the machine restarted nor did directories change that installers write to. Only if one of these fails,
//! each file is compared, by path, size and time, with its state when the environment was ready. Bytecode is left
//! out, because every run of Python may write it.
//!
//! Jobs that run as the daemon's own user can write to it, and reset sizes and times. So there each file is examined
//! at every use, and also its stamp, which nobody can set: the inode, and when it was last changed. A different stamp
//! alone is no damage, because links that share a file change it; then the contents decide. Their digest is computed
//! once, after it was ready, when it is forced to the disk.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use agent_model::ids::hex;
use agent_model::words::count;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{Built, Image};

pub(super) const MARKER: &str = "ready.json";
pub(super) const LOCK_LIST: &str = "environment.lock";
pub(super) const VERSION: u32 = 3;

/// The content of a marker. Earlier versions have fewer fields.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Marker {
    version: u32,
    pub(super) key: String,
    pub(super) prefix: PathBuf,
    pub(super) vars: BTreeMap<String, String>,
    pub(super) path_entries: Vec<PathBuf>,
    pub(super) python_version: String,
    #[serde(default)]
    pub(super) summary: String,
    #[serde(default)]
    pub(super) packages: u32,
    #[serde(default)]
    pub(super) bytes: u64,
    #[serde(default)]
    pub(super) locked: bool,
    /// Its Python has source files that may be compiled.
    #[serde(default)]
    pub(super) compiles: bool,
    /// Its files may not be on the disk yet, so it is valid until this boot of the machine ends; see
    /// [`EnvDir::settle`](super::cache::EnvDir::settle).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) boot: Option<String>,
    /// The image that commands run in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) image: Option<Image>,
    /// Bytes that removing it frees elsewhere.
    #[serde(default)]
    pub(super) elsewhere: u64,
    /// Where the packages of its interpreter are, if that is not in its own directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) elsewhere_prefix: Option<PathBuf>,
    /// The environments that it consists of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) parts: Vec<String>,
    /// Its files when it was ready; `None` when it refers to an interpreter elsewhere.
    #[serde(default)]
    extent: Option<Extent>,
    /// Their stamps at that time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stamps: Option<String>,
    /// A digest of their contents, if it may be needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    contents: Option<String>,
}

/// The result of examining each file.
#[derive(Debug)]
pub(super) struct Look {
    /// How the files differ from those at the time it was ready.
    pub(super) damage: Option<String>,
    /// Their stamps, if there is no damage.
    pub(super) stamps: Option<String>,
}

/// The files of an environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Extent {
    files: u64,
    digest: String,
}

/// The largest marker that is read, in bytes; it may list files.
const LONGEST: u64 = 256 << 20;

impl Marker {
    /// The marker of an environment that was just built. Blocks: looks at each file.
    pub(super) fn of(built: &Built, key: String, prefix: PathBuf) -> io::Result<Marker> {
        let Survey { extent, stamps, bytes, .. } = Survey::of(&prefix)?;
        Ok(Marker {
            stamps: built.holds_files.then_some(stamps),
            contents: None,
            version: VERSION,
            key,
            vars: built.vars.clone(),
            path_entries: built.path_entries.clone(),
            python_version: built.python_version.clone(),
            summary: built.summary.clone(),
            packages: built.packages,
            bytes: bytes + built.elsewhere,
            elsewhere: built.elsewhere,
            elsewhere_prefix: built.elsewhere_prefix.clone(),
            parts: built.parts.clone(),
            locked: built.lock.is_some(),
            compiles: built.holds_files && !built.compiled && !built.python_version.is_empty(),
            boot: Some(agent_shim::process::boot_id()),
            image: built.image.clone(),
            extent: built.holds_files.then_some(extent),
            prefix,
        })
    }

    /// The same, for files that are on the disk; if `open`, with a digest of their contents, unless they were changed
    /// since it was ready. Blocks: may read all of it.
    pub(super) fn lasting(&self, open: bool) -> io::Result<Marker> {
        let contents = match open && self.extent.is_some() && self.contents.is_none() {
            true => {
                let found = Survey::of(&self.prefix)?;
                let contents = found.contents()?;
                let is_whole = |now: Survey| Some(&now.stamps) == self.stamps.as_ref();
                (is_whole(found) && is_whole(Survey::of(&self.prefix)?)).then_some(contents)
            }
            false => self.contents.clone(),
        };
        Ok(Marker { boot: None, contents, ..self.clone() })
    }

    /// The marker in a directory, if the daemon wrote it for this directory and a quick look finds no damage.
    pub(super) fn read(prefix: &Path) -> Option<Marker> {
        let file = agent_fs::open_plain(&prefix.join(MARKER)).ok()?;
        // A builder has the directory while it builds, and may write what it likes there.
        if file.metadata().ok()?.uid() != agent_shim::User::own().uid {
            return None;
        }
        let marker: Marker = serde_json::from_slice(&agent_fs::read_whole(file, LONGEST).ok()?).ok()?;
        let same = (1..=VERSION).contains(&marker.version) && marker.prefix == prefix;
        // `exists` follows links, so an interpreter that was removed from the machine is noticed.
        let has_python = || marker.path_entries.iter().any(|bin| bin.join("python").exists());
        let usable = (marker.version > 1 && marker.python_version.is_empty()) || has_python();
        let lasts = marker.boot.as_ref().is_none_or(|boot| *boot == agent_shim::process::boot_id());
        (same && usable && lasts).then_some(marker)
    }

    /// It contains files, and is not only a reference to an interpreter.
    pub(super) fn has_files(&self) -> bool {
        self.extent.is_some()
    }

    /// Whether its state is the same as when it was last seen undamaged.
    pub(super) fn looks_like(&self, seen: Option<&Seen>) -> bool {
        self.extent.is_none() || seen.is_some_and(|seen| seen.holds())
    }

    /// Examines each file. If `open`, their stamps must be the same, or else their contents. Blocks.
    pub(super) fn look(&self, seen: Option<&Seen>, open: bool) -> Look {
        let Some(then) = &self.extent else { return Look { damage: None, stamps: None } };
        let survey = match Survey::of(&self.prefix) {
            Ok(survey) => survey,
            Err(error) => return damaged(format!("its files cannot be looked at ({error})")),
        };
        let now = &survey.extent;
        if now.files != then.files {
            return damaged(format!("it had {} and has {}", count(then.files, "file"), now.files));
        }
        let stamps = seen.and_then(|seen| seen.stamps.as_ref()).or(self.stamps.as_ref());
        // The marker of an earlier release has none.
        let is_touched = open && stamps.is_some_and(|stamps| *stamps != survey.stamps);
        if now != then || (is_touched && !survey.contents().is_ok_and(|now| Some(now) == self.contents)) {
            return damaged("some of its files were changed".to_owned());
        }
        Look { damage: None, stamps: open.then_some(survey.stamps) }
    }

    /// The directories that installers write to.
    fn watched(&self) -> Vec<PathBuf> {
        let lib = self.prefix.join("lib");
        let pythons = lib.read_dir().into_iter().flatten().flatten();
        let pythons = pythons.filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
        let packages = pythons.map(|python| python.path().join("site-packages"));
        [self.prefix.join("bin"), lib.clone()].into_iter().chain(packages).collect()
    }
}

/// The state of an environment when it was last seen undamaged.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Seen {
    boot: String,
    /// The directories that installers write to, and when each was changed.
    dirs: Vec<(PathBuf, i64, i64)>,
    /// Its sources are compiled.
    pub(super) compiled: bool,
    /// The stamps of its files, if they are checked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stamps: Option<String>,
}

impl Seen {
    /// The same, with these stamps of its files.
    pub(super) fn with(self, stamps: Option<String>) -> Seen {
        Seen { stamps, ..self }
    }

    /// The state of an undamaged environment now.
    pub(super) fn of(marker: &Marker, compiled: bool) -> Seen {
        let dirs = marker.watched().into_iter().filter_map(|dir| stamp(&dir).map(|(s, ns)| (dir, s, ns)));
        Seen { boot: agent_shim::process::boot_id(), dirs: dirs.collect(), compiled, stamps: None }
    }

    fn holds(&self) -> bool {
        let same = |(dir, s, ns): &(PathBuf, i64, i64)| stamp(dir) == Some((*s, *ns));
        self.boot == agent_shim::process::boot_id() && self.dirs.iter().all(same)
    }

    pub(super) fn read(path: &Path) -> Option<Seen> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    pub(super) fn write(&self, path: &Path) {
        let text = serde_json::to_vec(self).map_err(io::Error::other);
        let written = text.and_then(|text| agent_fs::write_whole(path, &text));
        if let Err(error) = written {
            tracing::debug!(path = %path.display(), %error, "cannot note use of environment");
        }
    }
}

fn stamp(path: &Path) -> Option<(i64, i64)> {
    path.symlink_metadata().ok().map(|seen| (seen.mtime(), seen.mtime_nsec()))
}

fn damaged(how: String) -> Look {
    Look { damage: Some(how), stamps: None }
}

/// The files below a prefix.
struct Survey {
    extent: Extent,
    stamps: String,
    /// Bytes of those that nothing else shares.
    bytes: u64,
    paths: Vec<PathBuf>,
}

impl Survey {
    fn of(prefix: &Path) -> io::Result<Survey> {
        let mut found = Vec::new();
        let mut bytes = 0;
        let mut dirs = vec![prefix.to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in dir.read_dir()? {
                let entry = entry?;
                let path = entry.path();
                // Bytecode and the marker are first written under temporary names, which may be gone by now.
                let seen = match entry.metadata() {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    seen => seen?,
                };
                if seen.is_dir() {
                    dirs.push(path);
                    continue;
                }
                if seen.nlink() <= 1 {
                    bytes += seen.blocks() * 512;
                }
                let is_ours = |name: &str| name == LOCK_LIST || name.starts_with(MARKER);
                let ours = dir == prefix && is_ours(&entry.file_name().to_string_lossy());
                let bytecode = path.extension().is_some_and(|ending| ending == "pyc");
                if !ours && !bytecode && !path.to_string_lossy().contains(".pyc.") {
                    found.push((path, seen));
                }
            }
        }
        found.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        let (mut digest, mut stamps) = (Sha256::new(), Sha256::new());
        for (path, seen) in &found {
            let name = path.display();
            digest.update(format!("{name}\0{} {}.{}\n", seen.size(), seen.mtime(), seen.mtime_nsec()));
            stamps.update(format!("{name}\0{} {}.{}\n", seen.ino(), seen.ctime(), seen.ctime_nsec()));
        }
        let extent = Extent { files: found.len() as u64, digest: hex(&digest.finalize()) };
        let paths = found.into_iter().map(|(path, _)| path).collect();
        Ok(Survey { extent, stamps: hex(&stamps.finalize()), bytes, paths })
    }

    /// A digest of their contents and their modes. Blocks: reads all of it.
    fn contents(&self) -> io::Result<String> {
        let (mut digest, mut buffer) = (Sha256::new(), vec![0; 128 << 10]);
        for path in &self.paths {
            let seen = path.symlink_metadata()?;
            digest.update(format!("{}\0{:o} {}\n", path.display(), seen.mode(), seen.size()));
            if seen.is_symlink() {
                digest.update(fs::read_link(path)?.as_os_str().as_bytes());
            } else {
                let mut file = agent_fs::open_plain(path)?.take(seen.size());
                while let count @ 1.. = file.read(&mut buffer)? {
                    digest.update(&buffer[..count]);
                }
            }
        }
        Ok(hex(&digest.finalize()))
    }
}

/// Bytes that removing a directory would free.
pub(super) fn own_bytes(dir: &Path) -> u64 {
    Survey::of(dir).map_or(0, |survey| survey.bytes)
}

#[cfg(test)]
mod tests {
    use std::fs::{File, FileTimes};

    use super::*;

    /// An environment with one file, `lib/a`, which is a hard link of `b` beside it.
    fn environment(dir: &Path) -> Marker {
        let prefix = dir.join("env");
        fs::create_dir_all(prefix.join("lib")).unwrap();
        fs::write(prefix.join("lib/a"), "good").unwrap();
        fs::hard_link(prefix.join("lib/a"), dir.join("b")).unwrap();
        let built = Built { holds_files: true, ..Built::default() };
        Marker::of(&built, String::new(), prefix).unwrap()
    }

    #[test]
    fn test_a_marker_of_a_builder_is_none() {
        let temp = tempfile::tempdir().unwrap();
        let marker = environment(temp.path());
        fs::create_dir_all(temp.path().join("env/bin")).unwrap();
        let path = temp.path().join("env").join(MARKER);
        fs::write(&path, serde_json::to_vec(&marker).unwrap()).unwrap();
        assert!(Marker::read(&temp.path().join("env")).is_some());
        if agent_shim::User::own().uid == 0 {
            std::os::unix::fs::chown(&path, Some(2_000_000_001), None).unwrap();
            assert!(Marker::read(&temp.path().join("env")).is_none());
        }
        let beside = temp.path().join("ready");
        fs::rename(&path, &beside).unwrap();
        std::os::unix::fs::symlink(&beside, &path).unwrap();
        assert!(Marker::read(&temp.path().join("env")).is_none(), "through a link");
    }

    /// Writes as many bytes as there were, and resets the time.
    fn forge(marker: &Marker) {
        let file = File::options().write(true).open(marker.prefix.join("lib/a")).unwrap();
        let times = FileTimes::new().set_modified(file.metadata().unwrap().modified().unwrap());
        std::thread::sleep(std::time::Duration::from_millis(20)); // the kernel's stamps are as coarse as its ticks
        fs::write(marker.prefix.join("lib/a"), "evil").unwrap();
        file.set_times(times).unwrap();
    }

    fn is_damaged(marker: &Marker, seen: Option<&Seen>) -> bool {
        marker.look(seen, true).damage.is_some()
    }

    #[test]
    fn test_what_a_job_writes_is_seen_though_it_sets_time_and_size_back() {
        let temp = tempfile::tempdir().unwrap();
        let marker = environment(temp.path());
        assert!(!is_damaged(&marker, None));
        let lasting = marker.lasting(true).unwrap();
        forge(&marker);
        assert!(marker.look(None, false).damage.is_none(), "its time and its size are as they were");
        assert!(is_damaged(&marker, None) && is_damaged(&lasting, None));
        assert_eq!(
            marker.lasting(true).unwrap().contents,
            None,
            "what was written before is not what is good"
        );
    }

    #[test]
    fn test_another_link_to_a_file_is_no_damage_once_its_contents_are_known() {
        let temp = tempfile::tempdir().unwrap();
        let marker = environment(temp.path()).lasting(true).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::remove_file(temp.path().join("b")).unwrap();
        let look = marker.look(None, true);
        assert!(look.damage.is_none() && look.stamps.is_some() && look.stamps != marker.stamps);
        let seen = Seen { stamps: look.stamps, ..Seen::default() };
        let forgetful = Marker { contents: None, ..marker.clone() };
        assert!(!is_damaged(&forgetful, Some(&seen)), "the same stamps are not looked behind");
        assert!(is_damaged(&forgetful, None), "other stamps with nothing to compare are");
        forge(&marker);
        assert!(is_damaged(&marker, Some(&seen)));
    }
}
