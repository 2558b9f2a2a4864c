//! Reads conda files and locks as texts that a node can build from.
//!
//! Errors in a file are reported here, to its author, and not later when a node builds it. Files of pip requirements
//! that a conda file includes are copied into it, because the node gets only its text.

use std::path::Path;

use agent_jobfile::condafile::{self, CondaFile};
use agent_model::{Code, Fault};

use super::{Remark, read, requirements};

/// How conda's names of the platforms of nodes begin.
const PLATFORM: &str = "linux-";

/// The text of a conda file from `file`, complete and checked.
pub(super) fn document(
    text: &str,
    file: &Path,
    warnings: &mut Vec<Remark>,
) -> Result<(String, CondaFile), Fault> {
    let base = file.parent().unwrap_or(Path::new(""));
    let mut included = false;
    let text = condafile::inline(text, |path| {
        included = true;
        let lines = requirements::read(&base.join(path));
        lines.map_err(|fault| fault.why(format!("`{}` includes it", file.display())))
    });
    let text = text.map_err(|fault| if included { fault } else { super::in_file(file, fault) })?;
    let (parsed, warned) = condafile::parse(&text).map_err(|fault| super::in_file(file, fault))?;
    warnings.extend(warned.into_iter().map(|warning| Remark::at(file, warning)));
    Ok((text, parsed))
}

/// The text of the lock in `path`, checked; warns if it lacks packages of the conda file `beside`.
pub(super) fn lock(
    path: &Path,
    beside: Option<&CondaFile>,
    warnings: &mut Vec<Remark>,
) -> Result<String, Fault> {
    let text = read(path, "the lock")?;
    check_lock(&text, path, beside, warnings)?;
    Ok(text)
}

/// The same for the text of a lock that stands in `path`.
pub(super) fn check_lock(
    text: &str,
    path: &Path,
    beside: Option<&CondaFile>,
    warnings: &mut Vec<Remark>,
) -> Result<(), Fault> {
    let lock = condafile::parse_lock(text).map_err(|fault| super::in_file(path, fault))?;
    if let Some(platform) = lock.platform.as_ref().filter(|platform| !platform.starts_with(PLATFORM)) {
        let what = format!("{}: the lock is for `{platform}`, and nodes run Linux", path.display());
        return Err(Fault::new(Code::JobUnsupported, what)
            .fix("make it on a node: run the job once without it, then `agentctl envs export`"));
    }
    let lacks = beside.and_then(|file| lock.lacks(file));
    warnings.extend(lacks.map(|lacks| Remark::of(path, lacks.to_string())));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::project;
    use super::*;

    #[test]
    fn test_included_requirements_travel_inside_the_document() {
        let dir = project(&[("c.yml", ""), ("more/r.txt", "a # why\n-r s.txt\n"), ("more/s.txt", "b>=1\n")]);
        let text = "dependencies:\n- pip\n- pip:\n  - -r more/r.txt\n  - c\n";
        let mut warnings = Vec::new();
        let (text, file) = document(text, &dir.path().join("c.yml"), &mut warnings).unwrap();
        assert!(text.contains(r#"  - ["a","b>=1"]"#), "{text}");
        assert_eq!(file.pip.iter().map(|line| line.line).collect::<Vec<_>>(), [4, 4, 5]);
        assert!(warnings.is_empty());
    }

    #[test]
    fn test_faults_name_the_file_they_are_in() {
        let dir = project(&[("c.yml", ""), ("bad.txt", "numpy\n-e .\n")]);
        let file = dir.path().join("c.yml");
        let refused = |text: &str| document(text, &file, &mut Vec::new()).unwrap_err();
        let fault = refused("dependencies: [python=>3]\n");
        assert!(fault.what.contains("c.yml: line 1, column 16: "), "{fault}");
        let fault = refused("dependencies:\n- pip: [-r bad.txt]\n");
        assert!(fault.what.contains("bad.txt, line 2: `-e .`") && !fault.what.contains("c.yml"), "{fault}");
        assert!(fault.why[0].contains("c.yml` includes it"), "{fault}");
        let fault = refused("dependencies:\n- pip: [-r gone.txt]\n");
        assert!(fault.what.contains("gone.txt` cannot be read"), "{fault}");
        let mut warnings = Vec::new();
        document("prefix: /x\ndependencies: [a]", &file, &mut warnings).unwrap();
        assert!(
            warnings[0].to_string().contains("c.yml: line 1, column 9: `prefix` has no effect"),
            "{warnings:?}"
        );
    }

    #[test]
    fn test_a_lock_fits_its_file_and_the_nodes() {
        let text =
            "# platform: linux-64\n@EXPLICIT\nhttps://h/c/linux-64/python-3.11.1-0.conda\n# pip six==1.16\n";
        let dir = project(&[("l", text), ("osx", &text.replace("linux-64", "osx-arm64")), ("c.yml", "")]);
        let (_, file) =
            document("dependencies: [Python=3.11, numpy]", &dir.path().join("c.yml"), &mut Vec::new())
                .unwrap();
        let mut warnings = Vec::new();
        assert_eq!(lock(&dir.path().join("l"), None, &mut warnings).unwrap(), text);
        assert!(warnings.is_empty());
        lock(&dir.path().join("l"), Some(&file), &mut warnings).unwrap();
        assert!(warnings[0].to_string().contains("the lock lacks `numpy` of the conda file"), "{warnings:?}");
        let fault = lock(&dir.path().join("osx"), None, &mut warnings).unwrap_err();
        assert!(fault.what.contains("osx: the lock is for `osx-arm64`"), "{fault}");
    }
}
