//! A requirements file as the list of lines a node can install from.
//!
//! The node sees the list and nothing else of this machine, so files that are included are read in here, and
//! lines that name a path of this machine are refused with their place.

use std::fs;
use std::path::{Path, PathBuf};

use agent_model::{Code, Fault};

/// Reads a requirements file and every file it includes with `-r`.
pub(super) fn read(path: &Path) -> Result<Vec<String>, Fault> {
    let mut reader = Reader { lines: Vec::new(), open: Vec::new() };
    reader.file(path)?;
    Ok(reader.lines)
}

struct Reader {
    lines: Vec<String>,
    /// The files being read, each included by the one before.
    open: Vec<PathBuf>,
}

impl Reader {
    fn file(&mut self, path: &Path) -> Result<(), Fault> {
        let unreadable = |error: &std::io::Error| {
            let what = format!("the requirements file `{}` cannot be read", path.display());
            let fault = Fault::new(Code::JobFile, what).because(error);
            match self.open.last() {
                Some(by) => fault.why(format!("`{}` includes it", by.display())),
                None => fault,
            }
            .fix("correct the path: it is relative to the file that names it")
        };
        let real = path.canonicalize().map_err(|error| unreadable(&error))?;
        if self.open.contains(&real) {
            return Err(Fault::new(Code::JobInvalid, format!("`{}` includes itself", path.display()))
                .fix("remove the `-r` line that leads back to it"));
        }
        let text = fs::read_to_string(&real).map_err(|error| unreadable(&error))?;
        let parent = real.parent().unwrap_or(Path::new("/")).to_owned();
        self.open.push(real);
        for (number, line) in logical_lines(&text) {
            match judge(&line) {
                Line::Package => self.lines.push(line),
                Line::Include(other) => self.file(&parent.join(other))?,
                Line::Local(why, fix) => {
                    let what = format!("{}, line {number}: `{line}` {why}", path.display());
                    return Err(Fault::new(Code::JobUnsupported, what).fix(fix));
                }
            }
        }
        self.open.pop();
        Ok(())
    }
}

/// Lines without comments and blanks, continued ones joined, with the number each begins at.
fn logical_lines(text: &str) -> Vec<(usize, String)> {
    let mut lines: Vec<(usize, String)> = Vec::new();
    let mut continued = false;
    for (index, raw) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        let comment = raw.match_indices('#').find(|(at, _)| {
            *at == 0 || raw[..*at].ends_with(char::is_whitespace) // `#` inside a URL is a fragment
        });
        let line = comment.map_or(raw, |(at, _)| &raw[..at]);
        let (line, more) = match line.strip_suffix('\\') {
            Some(line) => (line, true),
            None => (line, false),
        };
        match lines.last_mut() {
            Some((_, last)) if continued => last.push_str(line),
            _ => lines.push((index + 1, line.to_owned())),
        }
        continued = more;
    }
    let trimmed = lines.into_iter().map(|(number, line)| (number, line.trim().to_owned()));
    trimmed.filter(|(_, line)| !line.is_empty()).collect()
}

enum Line<'a> {
    /// Passed on as it is.
    Package,
    /// Another file to read in.
    Include(&'a str),
    /// Something of this machine: why it is refused, and what to do.
    Local(&'static str, &'static str),
}

const SHIP_IT: &str =
    "put the package into the code directory, where the command can import it, or install it from an index";

fn judge(line: &str) -> Line<'_> {
    if let Some(other) = option(line, "-r", "--requirement") {
        return match is_url(other) {
            true => Line::Package,
            false => Line::Include(other),
        };
    }
    if option(line, "-c", "--constraint").is_some_and(|other| !is_url(other)) {
        return Line::Local(
            "names a constraints file, which the node does not have",
            "write the versions into the requirements themselves",
        );
    }
    if option(line, "-e", "--editable").is_some() {
        return Line::Local("installs a directory of this machine, which the node does not have", SHIP_IT);
    }
    if option(line, "-f", "--find-links").is_some_and(|from| !is_url(from)) {
        return Line::Local("looks for packages on this machine, which the node cannot see", SHIP_IT);
    }
    if !line.starts_with('-') && is_path(line) {
        return Line::Local("names a path of this machine, which the node does not have", SHIP_IT);
    }
    Line::Package
}

/// The value of an option written `-x VALUE`, `--long VALUE` or `--long=VALUE`.
fn option<'a>(line: &'a str, short: &str, long: &str) -> Option<&'a str> {
    let value = match line.strip_prefix(long) {
        Some(rest) => rest.strip_prefix('=').or_else(|| rest.strip_prefix(char::is_whitespace))?,
        None => line.strip_prefix(short).filter(|_| !line.starts_with("--"))?,
    };
    Some(value.trim())
}

fn is_url(text: &str) -> bool {
    text.contains("://")
}

fn is_path(line: &str) -> bool {
    let name = line.split([' ', '\t', ';', '@', '[']).next().unwrap_or_default();
    if is_url(name) || is_url(line) {
        return false;
    }
    let archive = [".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2"].iter().any(|end| name.ends_with(end));
    name.starts_with(['.', '/', '~']) || name.contains('/') || archive
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
