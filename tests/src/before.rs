//! The release before this one, as programs that run.
//!
//! They are built from the history of this repository when they are first needed, and kept beside the programs under
//! test in `before/REVISION`. `AGENTD_TEST_BEFORE` names a directory that has them already. Who makes a release writes
//! its revision into [`REVISION`] and records the fixtures anew: `agent/docs/adr/0072-one-release-back.md`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::{PROGRAMS, cargo, copy_program, profile_dir, root};

/// The commit of the release before.
pub const REVISION: &str = "a8ee67fa9e391f7f5c8b10b3e5aecf61e23d0df0";

/// The directory of its programs.
#[allow(clippy::disallowed_methods, reason = "asks for what it is to test")]
pub fn programs() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(named) = std::env::var_os("AGENTD_TEST_BEFORE") {
            return PathBuf::from(named);
        }
        let kept = profile_dir().join("before").join(REVISION);
        let programs = kept.join("bin");
        if !programs.exists() {
            make(&kept);
        }
        programs
    })
}

/// Builds them, in a directory of their own: cargo takes crates of one name in two checkouts for the same, and files that
/// are older than what was built for unchanged.
fn make(kept: &Path) {
    let (source, target, new) = (kept.join("source"), kept.join("target"), kept.join("bin.new"));
    for dir in [&source, &new] {
        let _ = fs::remove_dir_all(dir); // of a build that was cut short
        fs::create_dir_all(dir).expect("a directory");
    }
    take_out(&source);
    let mut build = cargo();
    build.args(["build", "--locked", "--quiet", "--bins"]).args(PROGRAMS.map(|name| ["-p", name]).concat());
    build.arg("--target-dir").arg(&target);
    if profile_dir().ends_with("release") {
        build.arg("--release");
    }
    let built = build.current_dir(&source).status().expect("cargo runs");
    assert!(built.success(), "the programs of {} do not build", source.display());
    for name in PROGRAMS {
        let built = target.join(profile_dir().file_name().expect("cargo's layout")).join(name);
        copy_program(&built, &new.join(name));
    }
    fs::rename(new, kept.join("bin")).expect("a directory of its own");
    let _ = fs::remove_dir_all(target); // of no more use, and large
}

/// The files of that release.
#[allow(clippy::disallowed_methods, reason = "reads the history of the repository")]
fn take_out(into: &Path) {
    let archive = into.with_extension("tar");
    let mut git = Command::new("git");
    git.current_dir(root()).args(["archive", "--format=tar", "-o"]).arg(&archive).arg(REVISION);
    assert!(
        git.status().expect("git is installed").success(),
        "the release before, {REVISION}, is not in this clone: `git fetch --unshallow` brings it"
    );
    let file = fs::File::open(&archive).expect("an archive");
    tar::Archive::new(file).unpack(into).expect("an archive of git");
    fs::remove_file(archive).expect("its own file");
}
