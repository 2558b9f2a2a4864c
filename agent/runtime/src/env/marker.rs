//! What is known of an environment that is ready: its marker, and when it was last seen undamaged.
//!
//! ```text
//! ROOT/KEY/ready.json   the marker, written last: without it, it does not exist. Nobody waits for the disk, so it
//!                       is good for one boot at first, and written anew when everything is on the disk
//! ROOT/KEY.used         written when it is used, at most once a minute: its time, and what it looked like then
//! ```
//!
//! Damage is looked for in two steps. Cheap, at every use: the interpreter is there, and neither has the machine
//! been started anew nor have the directories changed that installers write to. Only when that looks odd, each
//! file is compared, by path, size and time, with what was there when it was ready. Bytecode does not count, since
//! whoever runs Python writes it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{Built, Image};

pub(super) const MARKER: &str = "ready.json";
pub(super) const LOCK_LIST: &str = "environment.lock";
pub(super) const VERSION: u32 = 3;

/// What a marker says. Earlier versions say less.
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
    /// Its files need not be on the disk yet, so it is good until this boot of the machine ends; see
    /// [`EnvDir::settle`](super::cache::EnvDir::settle).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) boot: Option<String>,
    /// The image that commands run in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) image: Option<Image>,
    /// What removing it frees elsewhere, in bytes.
    #[serde(default)]
    pub(super) elsewhere: u64,
    /// The environments it is put together from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) parts: Vec<String>,
    /// Its files when it was ready; `None` when it refers to an interpreter elsewhere.
    #[serde(default)]
    extent: Option<Extent>,
}

/// The files of an environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Extent {
    files: u64,
    digest: String,
}

impl Marker {
    /// Of an environment that was just built. Blocking: looks at each file.
    pub(super) fn of(built: &Built, key: String, prefix: PathBuf) -> io::Result<Marker> {
        let (extent, bytes) = survey(&prefix)?;
        Ok(Marker {
            version: VERSION,
            key,
            vars: built.vars.clone(),
            path_entries: built.path_entries.clone(),
            python_version: built.python_version.clone(),
            summary: built.summary.clone(),
            packages: built.packages,
            bytes: bytes + built.elsewhere,
            elsewhere: built.elsewhere,
            parts: built.parts.clone(),
            locked: built.lock.is_some(),
            compiles: built.holds_files && !built.compiled && !built.python_version.is_empty(),
            boot: Some(agent_shim::process::boot_id()),
            image: built.image.clone(),
            extent: built.holds_files.then_some(extent),
            prefix,
        })
    }

    /// The same, of files that are on the disk.
    pub(super) fn lasting(&self) -> Marker {
        Marker { boot: None, ..self.clone() }
    }

    /// The marker in a directory, if it is for this place and a quick look finds no damage.
    pub(super) fn read(prefix: &Path) -> Option<Marker> {
        let marker: Marker = serde_json::from_slice(&fs::read(prefix.join(MARKER)).ok()?).ok()?;
        let same = (1..=VERSION).contains(&marker.version) && marker.prefix == prefix;
        // `exists` follows links: an interpreter that was removed from the machine is seen.
        let has_python = || marker.path_entries.iter().any(|bin| bin.join("python").exists());
        let usable = (marker.version > 1 && marker.python_version.is_empty()) || has_python();
        let lasts = marker.boot.as_ref().is_none_or(|boot| *boot == agent_shim::process::boot_id());
        (same && usable && lasts).then_some(marker)
    }

    /// What it looks like now, and what it looked like when it was last seen undamaged are the same.
    pub(super) fn looks_like(&self, seen: Option<&Seen>) -> bool {
        self.extent.is_none() || seen.is_some_and(|seen| seen.holds())
    }

    /// How the files differ from those that were there when it was ready. Blocking: looks at each.
    pub(super) fn damage(&self) -> Option<String> {
        let then = self.extent.as_ref()?;
        match survey(&self.prefix) {
            Err(error) => Some(format!("its files cannot be looked at ({error})")),
            Ok((now, _)) if now == *then => None,
            Ok((now, _)) if now.files == then.files => Some("some of its files were changed".to_owned()),
            Ok((now, _)) => Some(format!("it had {} files and has {}", then.files, now.files)),
        }
    }

    /// Directories that installers write to.
    fn watched(&self) -> Vec<PathBuf> {
        let lib = self.prefix.join("lib");
        let pythons = lib.read_dir().into_iter().flatten().flatten();
        let pythons = pythons.filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
        let packages = pythons.map(|python| python.path().join("site-packages"));
        [self.prefix.join("bin"), lib.clone()].into_iter().chain(packages).collect()
    }
}

/// When an environment was last seen undamaged.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Seen {
    boot: String,
    /// The directories that installers write to, and when each was changed.
    dirs: Vec<(PathBuf, i64, i64)>,
    /// Its sources are compiled.
    pub(super) compiled: bool,
}

impl Seen {
    /// What an undamaged environment looks like now.
    pub(super) fn of(marker: &Marker, compiled: bool) -> Seen {
        let dirs = marker.watched().into_iter().filter_map(|dir| stamp(&dir).map(|(s, ns)| (dir, s, ns)));
        Seen { boot: agent_shim::process::boot_id(), dirs: dirs.collect(), compiled }
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

/// The files below a prefix, and the bytes of them that nothing else shares.
fn survey(prefix: &Path) -> io::Result<(Extent, u64)> {
    let mut found = Vec::new();
    let mut bytes = 0;
    let mut dirs = vec![prefix.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in dir.read_dir()? {
            let entry = entry?;
            let path = entry.path();
            // Bytecode and the marker are written under other names first, which may be gone by now.
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
                found.push((path, seen.size(), seen.mtime(), seen.mtime_nsec()));
            }
        }
    }
    found.sort_unstable();
    let mut digest = Sha256::new();
    for (path, size, s, ns) in &found {
        digest.update(format!("{}\0{size} {s}.{ns}\n", path.display()));
    }
    let extent = Extent { files: found.len() as u64, digest: agent_model::ids::hex(&digest.finalize()) };
    Ok((extent, bytes))
}

/// Bytes below a directory that removing it would free.
pub(super) fn own_bytes(dir: &Path) -> u64 {
    survey(dir).map_or(0, |(_, bytes)| bytes)
}
