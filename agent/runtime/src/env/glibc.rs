//! Versions of the C library, which decide which programs run.

use std::fmt;
use std::fs;
use std::path::Path;

/// A version of glibc, without the bug-fix part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Glibc {
    major: u32,
    minor: u32,
}

impl fmt::Display for Glibc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Glibc {
    /// From a text such as `2.36` or `2.36.1`.
    pub(super) fn parse(text: &str) -> Option<Glibc> {
        let mut parts = text.split('.').map(str::parse);
        match (parts.next()?, parts.next()?) {
            (Ok(major), Ok(minor)) => Some(Glibc { major, minor }),
            _ => None,
        }
    }

    /// From the library file itself, which contains it as text.
    pub(super) fn of_library(bytes: &[u8]) -> Option<Glibc> {
        const WORDS: &[u8] = b"release version ";
        let mut rest = bytes;
        while let Some(at) = rest.windows(WORDS.len()).position(|window| window == WORDS) {
            rest = &rest[at + WORDS.len()..];
            let number = rest.iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'.').count();
            let text = String::from_utf8_lossy(&rest[..number]);
            if let Some(version) = Glibc::parse(text.trim_end_matches('.')) {
                return Some(version);
            }
        }
        None
    }
}

/// The version that a wheel's tag asks for: `manylinux_2_28_x86_64` is 2.28, `manylinux2014_x86_64` is 2.17.
fn of_tag(tag: &str) -> Option<Glibc> {
    let platform = tag.trim().rsplit('-').next()?;
    platform.split('.').filter_map(of_platform).min()
}

fn of_platform(platform: &str) -> Option<Glibc> {
    let rest = platform.strip_prefix("manylinux")?;
    let minor = match rest.split('_').next()? {
        "1" => 5,
        "2010" => 12,
        "2014" => 17,
        _ => return Glibc::parse(&rest.strip_prefix('_')?.replace('_', ".")),
    };
    Some(Glibc { major: 2, minor })
}

/// The pip packages below a prefix that need a newer C library than this, like `torch (2.28)`. Blocks.
pub(super) fn too_new(prefix: &Path, limit: Glibc) -> Vec<String> {
    let entries = |dir: &Path| dir.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<String> = entries(&prefix.join("lib"))
        .map(|python| python.join("site-packages"))
        .flat_map(|packages| entries(&packages).collect::<Vec<_>>())
        .filter_map(|info| {
            let name = info.file_name()?.to_str()?.strip_suffix(".dist-info")?.to_owned();
            let wheel = fs::read_to_string(info.join("WHEEL")).ok()?;
            let tags = wheel.lines().filter_map(|line| line.strip_prefix("Tag:"));
            let needs = tags.filter_map(of_tag).min()?;
            (needs > limit).then(|| format!("{} ({needs})", name.split('-').next().unwrap_or(&name)))
        })
        .collect();
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_versions_are_read_from_the_library_and_from_wheels() {
        let text = b"\0release version x\0GNU C Library (Debian GLIBC 2.36-9) stable release version 2.36.\n";
        assert_eq!(Glibc::of_library(text), Glibc::parse("2.36"));
        assert_eq!(Glibc::of_library(b"musl"), None);
        for (tag, expected) in [
            ("cp311-cp311-manylinux_2_28_x86_64", Glibc::parse("2.28")),
            ("cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64", Glibc::parse("2.17")),
            ("cp39-cp39-manylinux1_x86_64", Glibc::parse("2.5")),
            ("py3-none-any", None),
            ("cp311-cp311-linux_x86_64", None),
        ] {
            assert_eq!(of_tag(tag), expected, "{tag}");
        }
    }

    #[test]
    fn test_wheels_that_are_too_new_are_named() {
        let dir = tempfile::tempdir().unwrap();
        for (name, tag) in
            [("new-1", "manylinux_2_35_x86_64"), ("old-1", "manylinux_2_17_x86_64"), ("pure-1", "any")]
        {
            let info = dir.path().join(format!("lib/python3.11/site-packages/{name}.dist-info"));
            fs::create_dir_all(&info).unwrap();
            fs::write(info.join("WHEEL"), format!("Wheel-Version: 1.0\nTag: cp311-cp311-{tag}\n")).unwrap();
        }
        assert_eq!(too_new(dir.path(), Glibc::parse("2.31").unwrap()), ["new (2.35)"]);
    }
}
