//! Reads a requirements file as the list of lines that a node can install from.
//!
//! The node gets only the list, so included files are read here, and lines that a node cannot use are refused with
//! their place. [`agent_jobfile::requirement`] decides which lines those are.

use std::path::{Path, PathBuf};

use agent_jobfile::requirement::{Line, Refused, judge, logical_lines};
use agent_model::{Code, Fault};

/// Reads a requirements file and every file it includes with `-r`.
pub(super) fn read(path: &Path) -> Result<Vec<String>, Fault> {
    let mut reader = RequirementsReader { lines: Vec::new(), open: Vec::new() };
    reader.file(path)?;
    Ok(reader.lines)
}

/// The same for lines that are written in another file, `file`.
pub(super) fn listed(lines: &[String], file: &Path) -> Result<Vec<String>, Fault> {
    let mut reader = RequirementsReader { lines: Vec::new(), open: Vec::new() };
    let base = file.parent().unwrap_or(Path::new(""));
    for line in lines.iter().map(|line| line.trim()).filter(|line| !line.is_empty()) {
        reader.line(line, base, &file.display().to_string())?;
    }
    Ok(reader.lines)
}

struct RequirementsReader {
    lines: Vec<String>,
    /// The files being read, each included by the one before.
    open: Vec<PathBuf>,
}

impl RequirementsReader {
    fn file(&mut self, path: &Path) -> Result<(), Fault> {
        let unreadable = |error: &std::io::Error| {
            let what = format!("the requirements file `{}` cannot be read", path.display());
            let fault = Fault::new(Code::JobFile, what).because(error);
            match self.open.last() {
                Some(by) => fault.why(format!("`{}` includes it", by.display())),
                None => fault,
            }
            .fix(match error.kind() {
                std::io::ErrorKind::InvalidData => "save it as UTF-8",
                _ => "correct the path: it is relative to the file that names it",
            })
        };
        let real = path.canonicalize().map_err(|error| unreadable(&error))?;
        if self.open.contains(&real) {
            return Err(Fault::new(Code::JobInvalid, format!("`{}` includes itself", path.display()))
                .fix("remove the `-r` line that leads back to it"));
        }
        let text = super::read_text(&real).map_err(|error| unreadable(&error))?;
        let parent = real.parent().unwrap_or(Path::new("/")).to_owned();
        self.open.push(real);
        for (number, line) in logical_lines(&text) {
            self.line(&line, &parent, &format!("{}, line {number}", path.display()))?;
        }
        self.open.pop();
        Ok(())
    }

    fn line(&mut self, line: &str, base: &Path, place: &str) -> Result<(), Fault> {
        match judge(line) {
            Line::Package => self.lines.push(line.to_owned()),
            Line::Include(other) => self.file(&base.join(other))?,
            Line::Refused(Refused { why, fix, secret }) => {
                let (line, code) = match secret {
                    true => ("the line".to_owned(), Code::JobInvalid),
                    false => (format!("`{line}`"), Code::JobUnsupported),
                };
                return Err(Fault::new(code, format!("{place}: {line} {why}")).fix(fix));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::project;
    use super::*;

    #[test]
    fn test_comments_go_and_included_files_come() {
        let dir = project(&[
            (
                "requirements.txt",
                "\u{feff}# all\nnumpy>=1.2  # why\n\n-r more/base.txt\nscipy \\\n  ==1.11 \\\n  --hash=sha256:ab\n",
            ),
            ("more/base.txt", "--requirement=more.txt\r\n-i https://host/simple\r\n"),
            ("more/more.txt", "pkg @ https://host/p.whl#sha256=1\nb[extra]; python_version>'3'"),
        ]);
        assert_eq!(
            read(&dir.path().join("requirements.txt")).unwrap(),
            [
                "numpy>=1.2",
                "pkg @ https://host/p.whl#sha256=1",
                "b[extra]; python_version>'3'",
                "-i https://host/simple",
                "scipy   ==1.11   --hash=sha256:ab",
            ]
        );
    }

    #[test]
    fn test_what_the_node_cannot_see_is_refused_with_its_line() {
        for line in [
            "-e .",
            "-e ./pkg",
            "--editable=git+https://host/x",
            "./pkg",
            "../x",
            "/abs/x",
            ".",
            "dist/a.whl",
            "a-1.0.tar.gz",
            "-c constraints.txt",
            "--find-links wheels",
        ] {
            let dir = project(&[("requirements.txt", &format!("numpy\n{line}\n"))]);
            let fault = read(&dir.path().join("requirements.txt")).unwrap_err();
            assert_eq!(fault.code, Code::JobUnsupported, "{line}");
            assert!(fault.what.contains(&format!("line 2: `{line}`")), "{}", fault.what);
            assert!(fault.fix.is_some());
        }
    }

    #[test]
    fn test_credentials_are_refused_and_not_repeated() {
        let dir =
            project(&[("requirements.txt", "numpy\n--extra-index-url https://me:hunter2@host/simple\n")]);
        let fault = read(&dir.path().join("requirements.txt")).unwrap_err();
        assert_eq!(fault.code, Code::JobInvalid);
        assert!(fault.what.contains("requirements.txt, line 2: the line holds credentials"), "{fault}");
        assert!(!fault.to_string().contains("hunter2") && fault.fix.unwrap().contains("netrc"));
    }

    #[test]
    fn test_lines_of_another_file_are_judged_alike() {
        let dir = project(&[("job.yml", ""), ("r.txt", "b\n")]);
        let file = dir.path().join("job.yml");
        let listed =
            |lines: &[&str]| listed(&lines.iter().map(|l| (*l).to_owned()).collect::<Vec<_>>(), &file);
        assert_eq!(listed(&["a", "", "-r r.txt"]).unwrap(), ["a", "b"]);
        assert!(
            listed(&["a", "./pkg"])
                .unwrap_err()
                .what
                .ends_with("job.yml: `./pkg` names a path of this machine, which the node does not have")
        );
    }

    #[test]
    fn test_what_the_node_can_see_passes() {
        let lines = "slow @ file:///shared/pkg\n--pre\n--no-index\n-f https://host/x\nhttps://host/a.whl\n";
        let dir = project(&[("r.txt", lines)]);
        assert_eq!(read(&dir.path().join("r.txt")).unwrap().len(), 5);
    }

    #[test]
    fn test_files_that_miss_or_lead_back_are_faults() {
        let dir = project(&[("a.txt", "-r b.txt"), ("b.txt", "-r a.txt"), ("c.txt", "-r nowhere.txt")]);
        let fault = read(&dir.path().join("a.txt")).unwrap_err();
        assert!(fault.what.contains("includes itself"), "{}", fault.what);
        let fault = read(&dir.path().join("c.txt")).unwrap_err();
        assert!(fault.what.contains("nowhere.txt") && fault.why.iter().any(|why| why.contains("c.txt")));
    }
}
