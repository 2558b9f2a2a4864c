//! Other programs that make environments, each asked for the same packages from the same channel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use agent_tests::root;

/// Solves and installs with py-rattler. It ends hard: at times it aborts at the end of a good run.
const PY_RATTLER: &str = "
import asyncio, os, sys
from rattler import Gateway, VirtualPackage, install, solve
cache, prefix, channel, *specs = sys.argv[1:]
async def main():
    machine = [one.into_generic() for one in VirtualPackage.detect()]
    records = await solve([channel], specs, gateway=Gateway(cache_dir=f'{cache}/repodata'), virtual_packages=machine)
    await install(records, prefix, cache_dir=f'{cache}/pkgs', show_progress=False)
asyncio.run(main())
os._exit(0)
";

/// The programs.
pub(crate) struct Peers {
    bin: PathBuf,
}

impl Peers {
    /// Installs them where they are not there yet.
    #[allow(clippy::disallowed_methods, reason = "installs what it measures against")]
    pub(crate) fn find() -> Peers {
        let script = root().join("tests/bench/peers");
        let said = Command::new(script).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
        let said = said.expect("the script starts");
        assert!(said.status.success(), "the peers cannot be installed; what is missing is said above");
        Peers { bin: PathBuf::from(String::from_utf8_lossy(&said.stdout).trim()) }
    }

    /// `rattler create`.
    pub(crate) fn rattler(&self, cache: &Path, prefix: &Path, channel: &str, specs: &[&str]) -> Command {
        let mut command = self.command("rattler", cache);
        command.args(["create", "-c", channel, "-p"]).arg(prefix).args(specs);
        command
    }

    /// py-rattler.
    pub(crate) fn py_rattler(&self, cache: &Path, prefix: &Path, channel: &str, specs: &[&str]) -> Command {
        let mut command = self.command("python", cache);
        command.args(["-c", PY_RATTLER]).args([cache, prefix]).arg(channel).args(specs);
        command
    }

    /// `uv venv` and `uv pip install` from a folder of wheels.
    pub(crate) fn uv(
        &self,
        cache: &Path,
        prefix: &Path,
        python: &str,
        wheels: &Path,
        names: &[&str],
    ) -> Command {
        let script = "uv venv --quiet --python \"$1\" \"$2\" && shift && dir=$1 wheels=$2 && shift 2 && \
                      exec uv pip install --quiet --offline --no-index --find-links \"$wheels\" \
                      --python \"$dir/bin/python\" \"$@\"";
        let mut command = self.command("/bin/sh", cache);
        command.args(["-c", script, "sh", python]).args([prefix, wheels]).args(names);
        command
    }

    /// `python -m venv` and its pip, from a folder of wheels.
    pub(crate) fn venv(
        &self,
        cache: &Path,
        prefix: &Path,
        python: &str,
        wheels: &Path,
        names: &[&str],
    ) -> Command {
        let script = "\"$1\" -m venv \"$2\" && shift && dir=$1 wheels=$2 && shift 2 && exec \"$dir/bin/python\" \
                      -m pip install --quiet --no-index --find-links \"$wheels\" \"$@\"";
        let mut command = self.command("/bin/sh", cache);
        command.args(["-c", script, "sh", python]).args([prefix, wheels]).args(names);
        command
    }

    /// The folder of wheels that uv and pip install from.
    pub(crate) fn wheels(&self) -> PathBuf {
        self.bin.with_file_name("wheels")
    }

    /// Where uv is.
    pub(crate) fn uv_path(&self) -> PathBuf {
        self.bin.join("uv")
    }

    #[allow(clippy::disallowed_methods, reason = "the other side of the ratio")]
    fn command(&self, program: &str, cache: &Path) -> Command {
        fs::create_dir_all(cache).expect("a directory");
        let mut command = Command::new(self.bin.join(program)); // an absolute one stays what it is
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.bin.display()));
        command.env("RATTLER_CACHE_DIR", cache).env("UV_CACHE_DIR", cache).env("PIP_CACHE_DIR", cache);
        command.stdin(Stdio::null());
        command
    }
}
