//! Lets a build reach nothing but its own.
//!
//! Owns the list of what a build may read and write, and has the kernel hold it to that (Landlock). Hides the interface
//! of the kernel.
//!
//! Invariants: what the other modules check of packages, lists and answers is checked anyway; this is for what they
//! overlook, and for what lies below them: decoders of archives, of lists and of TLS. Threads that exist before are
//! not confined, so this comes first.

use std::path::{Path, PathBuf};

use agent_env::{Build, FailureKind};
use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError,
};

use url::Url;

use super::{Advise, Done, failed};

/// The first version that lets files be linked and moved from one directory to another (Linux 5.19), as is done with
/// packages. Before it, nothing is confined.
const NEEDED: ABI = ABI::V2;

/// What is used where it is there: truncating by name.
const WISHED: ABI = ABI::V3;

/// What resolving names, checking certificates and asking for the number of processors read.
const SYSTEM: [&str; 16] = [
    "/dev/null",
    "/dev/urandom",
    "/etc/ca-certificates",
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/pki",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl",
    "/lib",
    "/lib64",
    "/proc/self",
    "/sys/fs/cgroup",
    "/usr",
];

/// Variables that name other places of certificates.
const CERTIFICATES: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// Confines the calling thread, and those that it starts from now on, to what a build needs. Its directories exist.
/// Does nothing on a machine whose kernel cannot do it.
pub(crate) fn confine(build: &Build) -> Done<()> {
    let lists = lists(build)?;
    let handled = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(NEEDED))
        .and_then(|set| {
            set.set_compatibility(CompatLevel::BestEffort).handle_access(AccessFs::from_all(WISHED))
        });
    let Ok(set) = handled else { return Ok(()) };
    let confined = (|| -> Result<(), RulesetError> {
        let mut set = set.create()?;
        for readable in system().iter().chain(&lists) {
            set = add(set, readable, AccessFs::from_read(WISHED))?;
        }
        for own in [&build.prefix, &build.cache] {
            set = add(set, own, AccessFs::from_all(WISHED))?;
        }
        set.restrict_self().map(|_| ())
    })();
    confined.map_err(|error| failed(FailureKind::Other, format!("the build cannot be confined: {error}")))
}

/// What is not there needs no right.
fn add(
    set: landlock::RulesetCreated,
    path: &Path,
    rights: landlock::BitFlags<AccessFs>,
) -> Result<landlock::RulesetCreated, RulesetError> {
    let Ok(opened) = PathFd::new(path) else { return Ok(set) };
    let rights = if path.is_dir() { rights } else { rights & AccessFs::from_file(WISHED) };
    set.add_rule(PathBeneath::new(opened, rights))
}

#[allow(clippy::disallowed_methods, reason = "the library of TLS reads these variables by itself")]
fn system() -> Vec<PathBuf> {
    let certificates = CERTIFICATES.iter().filter_map(std::env::var_os).map(PathBuf::from);
    SYSTEM.iter().map(PathBuf::from).chain(certificates).collect()
}

/// What channels on this machine have: their folders of this platform and of all, and the packages that a lock lists.
/// Users name them: where there is a link to something of another name, nothing more may be read, and what they could not
/// read themselves is refused, whether it is there or not.
fn lists(build: &Build) -> Done<Vec<PathBuf>> {
    let urls = build.channels.iter().flat_map(|channel| channel.mirrors.iter().chain([&channel.url]));
    let folders = urls.flat_map(|url| {
        ["noarch", &build.platform.subdir].map(|subdir| format!("{}/{subdir}", url.trim_end_matches('/')))
    });
    let files = build.lock.iter().flat_map(|text| text.lines()).map(str::trim).map(str::to_owned);
    let packages = files.filter(|line| {
        let address = line.split('#').next().unwrap_or_default();
        address.ends_with(".conda") || address.ends_with(".tar.bz2")
    });
    let mut readable = Vec::new();
    for path in folders.chain(packages).filter_map(|url| Url::parse(&url).ok()?.to_file_path().ok()) {
        let found = path.canonicalize();
        if build.for_everybody
            && ![Some(&path), found.as_ref().ok()].into_iter().flatten().all(|path| is_open(path))
        {
            return Err(failed(
                FailureKind::Refused,
                format!("not everybody on this machine may read {}", path.display()),
            )
            .advise("Let all read the channel and the folders that it is in, or name one that is for all."));
        }
        if found.is_ok_and(|found| found.file_name() == path.file_name()) {
            readable.push(path);
        }
    }
    Ok(readable)
}

/// Whether everybody may read it, if it is there, and enter the folders that lead there.
fn is_open(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    let allows = |path: &Path, rights: u32| match path.metadata() {
        Ok(found) => found.permissions().mode() & rights == rights,
        Err(_) => true, // what is not there is told where it is looked for
    };
    path.ancestors().skip(1).all(|folder| allows(folder, 0o001)) && allows(path, 0o004)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::io::ErrorKind;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    /// A build in `home`, with a channel there, and a lock that lists a file of it.
    fn build(home: &Path, channel: &str, listed: &str) -> Build {
        let url = |path: &str| format!("file://{}/{path}", home.display());
        let (prefix, cache) = (home.join("prefix"), home.join("cache"));
        for dir in [&prefix, &cache, &home.join("channel/noarch"), &home.join("secrets")] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(home.join("channel/noarch/repodata.json"), "{}").unwrap();
        fs::write(home.join("secrets/one"), "secret").unwrap();
        Build {
            prefix,
            cache,
            channels: vec![agent_env::Channel { name: "c".into(), url: url(channel), mirrors: Vec::new() }],
            specs: Vec::new(),
            lock: Some(format!("@EXPLICIT\n{}#sha256:0\n", url(listed))),
            priority: agent_env::Priority::default(),
            offline: true,
            platform: agent_env::Platform { subdir: "linux-64".into(), ..Default::default() },
            credentials: None,
            solve_within_s: 1,
            stall_s: 1,
            hard_links: true,
            for_everybody: false,
        }
    }

    /// What a confined thread does.
    fn confined<T: Send + 'static>(build: Build, act: impl FnOnce() -> T + Send + 'static) -> T {
        let thread = std::thread::spawn(move || {
            confine(&build).unwrap();
            act()
        });
        thread.join().unwrap()
    }

    #[test]
    fn test_a_build_works_in_its_directories_and_reads_its_channels() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_owned();
        let build = build(&home, "channel", "x");
        confined(build, move || {
            fs::read(home.join("channel/noarch/repodata.json")).unwrap();
            fs::read("/etc/hosts").unwrap();
            fs::create_dir_all(home.join("cache/pkgs/a")).unwrap();
            fs::write(home.join("cache/pkgs/a/f"), "f").unwrap();
            fs::rename(home.join("cache/pkgs/a"), home.join("cache/a")).unwrap();
            fs::hard_link(home.join("cache/a/f"), home.join("prefix/f")).unwrap();
            fs::OpenOptions::new().write(true).open(home.join("prefix/f")).unwrap().set_len(0).unwrap();
            fs::remove_dir_all(home.join("cache/a")).unwrap();
        });
    }

    #[test]
    fn test_a_build_reaches_nothing_else_also_where_links_lead_there() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_owned();
        symlink(home.join("secrets"), home.join("noarch")).unwrap();
        symlink(home.join("secrets/one"), home.join("x-1-0.conda")).unwrap();
        let mut build = build(&home, "", "x-1-0.conda");
        // No package, and all of the machine.
        build.lock = build.lock.map(|lock| lock + "file:///\nfile://" + &home.display().to_string() + "\n");
        symlink(home.join("secrets"), home.join("prefix/l")).unwrap();
        let refused = confined(build, move || {
            let written = home.join("secrets/two");
            [
                fs::read(home.join("secrets/one")).err(),
                fs::read(home.join("prefix/l/one")).err(),
                fs::read(home.join("x-1-0.conda")).err(),
                fs::read_dir(home.join("noarch")).err(),
                fs::write(&written, "").err(),
                fs::hard_link(home.join("secrets/one"), home.join("prefix/one")).err(),
                fs::rename(home.join("secrets"), home.join("prefix/secrets")).err(),
                fs::read("/etc/shadow").err(),
            ]
            .map(|error| error.map(|error| error.kind()))
        });
        // A move from one directory to another without the right is told as one to another file system.
        let is_refusal = |kind: &Option<ErrorKind>| {
            matches!(kind, Some(ErrorKind::PermissionDenied | ErrorKind::CrossesDevices))
        };
        assert!(refused.iter().all(is_refusal), "{refused:?}");
    }

    #[test]
    fn test_what_somebody_keeps_closed_is_refused_whether_it_is_there_or_not() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        for listed in ["channel/noarch/x-1-0.conda", "channel/noarch/gone-1-0.conda"] {
            let mut build = build(dir.path(), "channel", listed);
            fs::write(dir.path().join("channel/noarch/x-1-0.conda"), "x").unwrap();
            build.for_everybody = true;
            mode(dir.path(), 0o755);
            lists(&build).unwrap();
            let package = dir.path().join("channel/noarch/x-1-0.conda");
            mode(&package, 0o600);
            assert_eq!(lists(&build).is_err(), listed.contains("/x-"), "{listed}");
            mode(&package, 0o644);
            mode(&dir.path().join("channel"), 0o700);
            let failure = lists(&build).unwrap_err();
            assert!(failure.kind == FailureKind::Refused && failure.hint.is_some(), "{failure:?}");
            mode(&dir.path().join("channel"), 0o755);
            mode(dir.path(), 0o711);
            lists(&build).unwrap();
        }
    }
}
