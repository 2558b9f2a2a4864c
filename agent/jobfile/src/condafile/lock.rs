//! Exact packages instead of the requirements of a conda file.
//!
//! ```text
//! # platform: linux-64
//! @EXPLICIT
//! https://host/channel/linux-64/python-3.11.9-0.conda#sha256:5f2c…
//! https://host/channel/noarch/tzdata-2024a-0.conda#5f2c…
//! # pip NAME @ https://host/NAME-1.0-py3-none-any.whl#sha256=5f2c…
//! # pip NAME==1.0 --hash=sha256:5f2c…
//! ```
//!
//! The form is the explicit list that conda prints (`conda list --explicit --sha256`), with the packages of pip as
//! comments, so that conda reads it as well.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::{Complaint, CondaFile, LARGEST, Line, check_pip_line, spec};
use crate::Rejection;
use crate::requirement;
use crate::yaml::Place;
use agent_model::fault::Fault;

/// A list of exact packages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lock {
    /// The platform it was made for, for example `linux-64`, if it names one.
    pub platform: Option<String>,
    /// The packages of conda.
    pub packages: Vec<LockedPackage>,
    /// The lines for pip.
    pub pip: Vec<String>,
}

/// A package of conda, exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockedPackage {
    /// Its address, without a fragment.
    pub url: String,
    /// The digest of its file, in hexadecimal digits.
    pub sha256: Option<String>,
    /// The older digest of its file, in hexadecimal digits.
    pub md5: Option<String>,
}

impl LockedPackage {
    /// The name of the package, from the name of its file.
    pub fn name(&self) -> Option<&str> {
        let file = self.url.rsplit('/').next()?;
        file.rsplitn(3, '-').nth(2) // NAME-VERSION-BUILD
    }

    /// Its version, from the same.
    fn version(&self) -> Option<&str> {
        self.url.rsplit('/').next()?.rsplit('-').nth(1)
    }
}

impl Lock {
    /// A message about what a conda file asks for and this lacks, judged by names and plain versions; `None` when it
    /// has all.
    pub fn lacks(&self, file: &CondaFile) -> Option<String> {
        let named = |package: &LockedPackage| {
            Some((package.name()?.to_ascii_lowercase(), package.version()?.to_owned()))
        };
        let conda: BTreeMap<String, String> = self.packages.iter().filter_map(named).collect();
        let lacks_spec = |line: &&Line| {
            let version = conda.get(&spec::name(&line.text));
            version.is_none_or(|version| spec::excludes(&line.text, version))
        };
        let specs = file.specs.iter().filter(lacks_spec).map(|line| line.text.as_str());
        // Packages of conda are there for pip as well.
        let brought = conda.keys().map(|name| requirement::one_spelling(name));
        let pip = self.pip.iter().filter_map(|line| requirement::package(line));
        let has: BTreeSet<String> = pip.chain(brought).collect();
        let lacks_pip =
            |line: &&Line| requirement::package(&line.text).is_some_and(|name| !has.contains(&name));
        let lines = file.pip.iter().filter(lacks_pip).map(|line| line.text.as_str());
        let lacks: Vec<String> = specs.chain(lines).map(|text| format!("`{text}`")).collect();
        (!lacks.is_empty()).then(|| {
            let lacks = lacks.join(", ");
            format!("the lock lacks {lacks} of the conda file; what is installed is what the lock says")
        })
    }
}

const EXPLICIT: &str = "@EXPLICIT";
const FORM: &str = "make the list with `agentctl envs export`, or with `conda list --explicit --sha256`";

/// Reads a list of exact packages. A fault names the line.
pub fn parse_lock(text: &str) -> Result<Lock, Fault> {
    if text.len() > LARGEST {
        let refusal = Rejection::invalid(Place { line: 1, column: 1 }, "the list has more than 1 MiB");
        return Err(refusal.fix(FORM).into());
    }
    let mut lock = Lock::default();
    let mut explicit = false;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (index, line) in text.lines().enumerate() {
        let place = Place { line: index + 1, column: 1 };
        read_line(line.trim(), &mut lock, &mut explicit).map_err(|complaint| complaint.at(place))?;
    }
    if !explicit {
        let message = format!("this is no list of exact packages: it has no line `{EXPLICIT}`");
        return Err(Rejection::invalid(Place { line: 1, column: 1 }, message).fix(FORM).into());
    }
    if lock.packages.is_empty() && lock.pip.is_empty() {
        return Err(Rejection::invalid(Place { line: 1, column: 1 }, "the list has no packages")
            .fix(FORM)
            .into());
    }
    Ok(lock)
}

fn read_line(line: &str, lock: &mut Lock, explicit: &mut bool) -> Result<(), Complaint> {
    if let Some(comment) = line.strip_prefix('#') {
        let comment = comment.trim();
        if let Some(platform) = comment.strip_prefix("platform:") {
            lock.platform = Some(platform.trim().to_owned()).filter(|platform| !platform.is_empty());
        } else if let Some(requirement) = comment.strip_prefix("pip ") {
            check_pip_line(requirement.trim())?;
            lock.pip.push(requirement.trim().to_owned());
        }
        return Ok(());
    }
    match line {
        "" => {}
        EXPLICIT => *explicit = true,
        _ => lock.packages.push(package(line)?),
    }
    Ok(())
}

fn package(line: &str) -> Result<LockedPackage, Complaint> {
    let (url, digest) = match line.split_once('#') {
        Some((url, digest)) => (url.trim(), Some(digest.trim())),
        None => (line, None),
    };
    let is_package = url.contains("://") && (url.ends_with(".conda") || url.ends_with(".tar.bz2"));
    if !is_package && !crate::requirement::holds_credentials(url) {
        let shown: String = url.chars().filter(|c| !c.is_control()).take(100).collect();
        return Err(Complaint::invalid(format!("`{shown}` is not the address of a package"), FORM));
    }
    spec::check_address(url)?;
    let mut package = LockedPackage { url: url.to_owned(), sha256: None, md5: None };
    let Some(digest) = digest else { return Ok(package) };
    let (name, hex) = digest.split_once([':', '=']).unwrap_or(("", digest));
    let hex = hex.to_ascii_lowercase();
    let digits = hex.chars().all(|c| c.is_ascii_hexdigit());
    match (name, hex.len()) {
        ("" | "sha256", 64) if digits => package.sha256 = Some(hex),
        ("" | "md5", 32) if digits => package.md5 = Some(hex),
        _ => return Err(Complaint::invalid("the digest after `#` is neither an MD5 nor a SHA-256", FORM)),
    }
    Ok(package)
}

/// A text that is parsed to the same list.
impl fmt::Display for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(platform) = &self.platform {
            writeln!(f, "# platform: {platform}")?;
        }
        writeln!(f, "{EXPLICIT}")?;
        for LockedPackage { url, sha256, md5 } in &self.packages {
            match (sha256, md5) {
                (Some(sha256), _) => writeln!(f, "{url}#sha256:{sha256}")?,
                (None, Some(md5)) => writeln!(f, "{url}#{md5}")?,
                (None, None) => writeln!(f, "{url}")?,
            }
        }
        self.pip.iter().try_for_each(|line| writeln!(f, "# pip {line}"))
    }
}
