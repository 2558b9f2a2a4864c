//! A Python with packages of its own, for the programs that tests are written in or tried against.

use std::path::Path;
use std::process::{Command, Stdio};

/// Makes a virtual environment at `dir` of the first `python3` on the path, unless one is there in which these
/// modules can be imported. Each of `installs` is what one call of pip is to get. One at a time for each `dir`.
pub fn make(dir: &Path, modules: &str, installs: &[&[&str]]) {
    make_by("python3", dir, modules, installs);
}

/// The same of this interpreter.
#[allow(clippy::disallowed_methods, reason = "makes what the tests need")]
pub fn make_by(interpreter: &str, dir: &Path, modules: &str, installs: &[&[&str]]) {
    let import = format!("import {modules}");
    let works = command(dir).args(["-c", &import]).stderr(Stdio::null()).status();
    if works.is_ok_and(|status| status.success()) {
        return;
    }
    let made = Command::new(interpreter).args(["-m", "venv", "--clear"]).arg(dir).status();
    assert!(
        made.expect("python3 starts").success(),
        "{interpreter} cannot make a virtual environment: install its module venv (package python3-venv)"
    );
    for install in installs {
        let got = command(dir).args(["-m", "pip", "install", "--quiet"]).args(*install).status();
        assert!(
            got.expect("Python starts").success(),
            "pip cannot fetch {install:?}: check its index (`pip config list`)"
        );
    }
}

/// The interpreter of the environment at `dir`.
#[allow(clippy::disallowed_methods, reason = "runs what the tests need")]
pub fn command(dir: &Path) -> Command {
    let mut command = Command::new(dir.join("bin/python"));
    // The tests leave nothing in the sources.
    command.env("PYTHONDONTWRITEBYTECODE", "1").env_remove("PYTHONPATH").env_remove("PYTHONHOME");
    command
}
