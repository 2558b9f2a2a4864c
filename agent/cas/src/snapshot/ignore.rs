//! What git would ignore, by the lines of one ignore file.
//!
//! The library reads and matches patterns as git does, with one exception that is corrected here: git compares the
//! text before the first special character separately, so in `a**/b` the stars begin a pattern and match
//! directories. Pure.

use gix_glob::Pattern;
use gix_glob::pattern::Mode;
use gix_glob::wildmatch;

/// The patterns of a file, each with the number of its line; 0 is of a pattern that every project has.
#[derive(Debug, Default)]
pub(super) struct Ignore {
    file: &'static str,
    patterns: Vec<(Pattern, usize)>,
}

impl Ignore {
    /// The patterns of `text`, which is what `file` holds.
    pub(super) fn parse(file: &'static str, mut text: Vec<u8>) -> Ignore {
        text.push(b'\n'); // before it a carriage return ends the last line as well
        let patterns = gix_ignore::parse(&text, false).map(|(pattern, line, _)| (pattern, line)).collect();
        Ignore { file, patterns }
    }

    /// The name of the file.
    pub(super) fn file(&self) -> &'static str {
        self.file
    }

    /// The same behind patterns that every project has: what the file says counts more.
    pub(super) fn behind(self, usual: &str) -> Ignore {
        let usual = gix_ignore::parse(usual.as_bytes(), false).map(|(pattern, _, _)| (pattern, 0));
        Ignore { patterns: usual.chain(self.patterns).collect(), ..self }
    }

    /// A line says that the entry is not to be left out.
    pub(super) fn asks_for(&self, name: &str, path: &str, is_dir: bool) -> bool {
        self.last(name, path, is_dir).is_some_and(|(pattern, _)| pattern.is_negative())
    }

    /// No line has a pattern.
    pub(super) fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// The rule that leaves out the entry `name`, whose path is `path`, for people. The last that matches decides.
    pub(super) fn rule(&self, name: &str, path: &str, is_dir: bool) -> Option<String> {
        let (pattern, line) = self.last(name, path, is_dir)?;
        (!pattern.is_negative()).then(|| match line {
            0 => format!("{pattern} (always; a line !{pattern} in {} sends it)", self.file),
            line => format!("{}:{line}: {pattern}", self.file),
        })
    }

    /// The pattern that decides: the last that matches.
    pub(super) fn last(&self, name: &str, path: &str, is_dir: bool) -> Option<&(Pattern, usize)> {
        self.patterns.iter().rev().find(|(pattern, _)| matches(pattern, name, path, is_dir))
    }
}

fn matches(pattern: &Pattern, name: &str, path: &str, is_dir: bool) -> bool {
    const MODE: wildmatch::Mode = wildmatch::Mode::NO_MATCH_SLASH_LITERAL;
    match pattern.first_wildcard_pos {
        _ if pattern.mode.contains(Mode::MUST_BE_DIR) && !is_dir => false,
        _ if (pattern.mode & (Mode::NO_SUB_DIR | Mode::ABSOLUTE)) == Mode::NO_SUB_DIR => {
            pattern.matches(name.into(), MODE)
        }
        Some(plain) => {
            let (before, special) = pattern.text.split_at(plain);
            let rest = path.as_bytes().strip_prefix(before);
            rest.is_some_and(|rest| gix_glob::wildmatch(special.into(), rest.into(), MODE))
        }
        None => pattern.text == path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_stars_after_a_plain_beginning_are_directories_or_nothing() {
        let ignored = |line: &str, path: &str| {
            let name = path.rsplit('/').next().unwrap_or(path);
            Ignore::parse("f", line.into()).rule(name, path, false).is_some()
        };
        for path in ["ab", "a/b", "ax/c/b"] {
            assert!(ignored("a**/b", path), "{path}");
        }
        assert!(ignored("/.a**/**", ".a") && !ignored("a**/b", "c/ab") && !ignored("a**/b", "abb"));
    }

    #[test]
    fn test_what_every_project_has_gives_way_to_a_line() {
        let ignore = Ignore::parse("f", b"!/b/\n".to_vec()).behind("/a/\n/b/\n");
        assert_eq!(ignore.rule("a", "a", true).unwrap(), "/a/ (always; a line !/a/ in f sends it)");
        assert!(ignore.rule("b", "b", true).is_none() && ignore.asks_for("b", "b", true));
        assert!(!ignore.asks_for("a", "a", true) && !ignore.asks_for("c", "c", true));
    }

    #[test]
    fn test_the_last_line_that_matches_is_named() {
        let ignore = Ignore::parse("f", b"# big\r\n*.ckpt\n!last.ckpt\nruns/\n\\#x\r".to_vec());
        let rule = |name: &str, is_dir| ignore.rule(name, name, is_dir);
        assert_eq!(rule("a.ckpt", false).unwrap(), "f:2: *.ckpt");
        assert_eq!(rule("runs", true).unwrap(), "f:4: runs/");
        assert_eq!(rule("#x", false).unwrap(), "f:5: #x");
        assert_eq!((rule("last.ckpt", false), rule("runs", false)), (None, None));
        assert!(Ignore::parse("f", b"# nothing\n\n".to_vec()).is_empty());
    }
}
