//! From what a person names to a job the daemon can take.
//!
//! ```text
//! DIR | FILE [-- command] ─ plan ─▶ Plan (a draft, and the files it names) ─ ship ─▶ JobSpec, blobs stored
//! ```
//!
//! [`Plan::read`] touches only small files: the job file, requirements, conda files. [`Plan::ship`] walks
//! directories and sends what the store lacks. Owns the meaning of a directory without a job file.
//! Callers: `run` and `submit`.

mod plan;
mod requirements;
mod ship;

pub(crate) use plan::{Changes, Plan};

#[cfg(test)]
mod tests {
    use std::fs;

    /// A directory with these files.
    pub(super) fn project(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }
}
