//! The stand-in for `azureml.core`, a Python package for scripts of the Azure ML SDK v1.
//!
//! Owns its files, which are part of this program, where a job has them, and how Python finds them there. Hides the
//! package: it records metrics and tags in the job's tracking file, and calls the tracking endpoint for the rest, as
//! any script may.
//!
//! Invariants: only a job that asks for it has it, in its own directory, where only the daemon's user may write. An
//! installed `azureml.core` is always found before it, and so is what the job names in `PYTHONPATH`.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use agent_shim::JobDir;

const FILES: [(&str, &str); 3] = [
    ("azureml/__init__.py", include_str!("stand_in/package.py")),
    ("azureml/core/__init__.py", include_str!("stand_in/core/package.py")),
    ("azureml/core/run.py", include_str!("stand_in/core/run.py")),
];

/// The directories of these files, each before the one it is in.
const FOLDERS: [&str; 3] = ["azureml/core", "azureml", ""];

/// Writes the package. What an earlier try left is replaced. Blocking.
pub(crate) fn lay_out(dir: &JobDir) -> io::Result<()> {
    let place = dir.stand_in();
    agent_spawn::remove_tree(&place)?;
    std::fs::create_dir_all(place.join(FOLDERS[0]))?;
    for (name, text) in FILES {
        let file = place.join(name);
        std::fs::write(&file, text)?;
        set_mode(&file, 0o444)?;
    }
    FOLDERS.iter().try_for_each(|folder| set_mode(&place.join(folder), 0o555))
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

/// The value of `PYTHONPATH` with the package behind what is there.
pub(crate) fn python_path(dir: &JobDir, others: Option<&String>) -> String {
    let place = dir.stand_in().display().to_string();
    match others.filter(|others| !others.is_empty()) {
        Some(others) => format!("{others}:{place}"),
        None => place,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_it_is_laid_out_again_and_only_for_reading() {
        let home = tempfile::tempdir().unwrap();
        let dir = JobDir::new(home.path().join("train.1.0"));
        for _ in 0..2 {
            lay_out(&dir).unwrap();
            for (name, text) in FILES {
                let file = dir.stand_in().join(name);
                assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
                assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o444);
                assert_eq!(file.parent().unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o555);
            }
        }
        agent_spawn::remove_tree(dir.path()).unwrap();
    }

    #[test]
    fn test_what_the_job_names_itself_is_found_first() {
        let dir = JobDir::new("/j/train.1.0");
        let place = "/j/train.1.0/job/azureml";
        assert_eq!(python_path(&dir, None), place);
        assert_eq!(python_path(&dir, Some(&String::new())), place);
        assert_eq!(python_path(&dir, Some(&"lib:/opt".to_owned())), format!("lib:/opt:{place}"));
    }
}
