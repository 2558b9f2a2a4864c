//! A line of an ignore file, from what git makes of it to what the library that matches makes of it.
//!
//! The library reads nearly all patterns as git does. This is the rest: a class of characters never matches a
//! slash, may escape its members and may name them by kind; a pattern that cannot match matches nothing; a run of
//! stars is no more than two, and directly after a plain beginning it may stand for directories; a brace is a brace.
//! Pure. Caller: [`super::walk`].

use std::iter::Peekable;
use std::str::Chars;

/// Kinds of characters that a class may name, and which they are.
const KINDS: [(&str, &[(char, char)]); 8] = [
    ("alnum", &[('0', '9'), ('A', 'Z'), ('a', 'z')]),
    ("alpha", &[('A', 'Z'), ('a', 'z')]),
    ("blank", &[(' ', ' '), ('\t', '\t')]),
    ("digit", &[('0', '9')]),
    ("lower", &[('a', 'z')]),
    ("space", &[('\t', '\r'), (' ', ' ')]),
    ("upper", &[('A', 'Z')]),
    ("xdigit", &[('0', '9'), ('A', 'F'), ('a', 'f')]),
];

/// The line as the library should see it, in as many as that takes: none for one that matches nothing.
pub(super) fn for_library(line: &str) -> Vec<String> {
    match of_two(line) {
        Some(lines) => lines.iter().filter_map(|line| rewritten(line)).collect(),
        None => rewritten(line).into_iter().collect(),
    }
}

/// `a**/b` is `a` and then what `**/b` is, where nothing before the stars is special: `ab`, or `b` at any depth below
/// what begins with `a`.
fn of_two(line: &str) -> Option<[String; 2]> {
    let (mark, pattern) = line.split_at(usize::from(line.starts_with('!')));
    let (before, rest) = pattern.split_at(pattern.find(['*', '?', '[', '\\'])?);
    let mut after = directories(rest)?;
    while let Some(more) = directories(after) {
        after = more;
    }
    let is_plain = !line.starts_with('#') && !before.is_empty() && !before.ends_with('/');
    let root = if before.starts_with('/') { "" } else { "/" };
    let lines = [format!("{mark}{root}{before}{after}"), format!("{mark}{root}{before}*/**/{after}")];
    (is_plain && !after.trim_end_matches(' ').is_empty()).then_some(lines)
}

/// What follows a run of stars that is the whole name of a directory.
fn directories(pattern: &str) -> Option<&str> {
    pattern.strip_prefix("**")?.trim_start_matches('*').strip_prefix('/')
}

fn rewritten(line: &str) -> Option<String> {
    if line.starts_with('#') {
        return None;
    }
    let trimmed = line.trim_end_matches(' ');
    if trimmed.is_empty() || trimmed == "!" {
        return None;
    }
    let (mut told, mut rest) = (String::with_capacity(line.len()), line.chars().peekable());
    if rest.next_if_eq(&'!').is_some() {
        told.push('!');
    }
    // A slash binds a pattern to the root, one in a class too; the classes told have other slashes, or none.
    let named = trimmed.strip_suffix('/').unwrap_or(trimmed);
    if named.ends_with('/') {
        return None;
    }
    if named.contains('[') {
        told.push_str(if named.contains('/') { "/" } else { "**/" });
        rest.next_if_eq(&'/');
    }
    while let Some(next) = rest.next() {
        match next {
            '\\' => match rest.next() {
                Some(blank) if is_trimmed(blank) => told.extend(['[', blank, ']']),
                escaped => told.extend([next].into_iter().chain(escaped)),
            },
            blank if is_trimmed(blank) => told.extend(['[', blank, ']']),
            '*' => {
                let more = std::iter::from_fn(|| rest.next_if_eq(&'*')).count();
                told.push_str(if more > 0 { "**" } else { "*" });
            }
            '[' => told.push_str(&class(&mut rest)?.told()?),
            '{' | '}' => told.extend(['\\', next]),
            _ => told.push(next),
        }
    }
    Some(told)
}

/// The library drops it at the end of a line, where git drops nothing but spaces.
fn is_trimmed(next: char) -> bool {
    matches!(next, '\t' | '\x0b' | '\x0c' | '\r')
}

/// The characters that one place of a name may have, or may not have.
struct Class {
    negated: bool,
    members: Vec<(char, char)>,
}

/// The class whose bracket was read; `None` if it does not end, or names a kind that there is not.
fn class(rest: &mut Peekable<Chars<'_>>) -> Option<Class> {
    let negated = rest.next_if(|next| matches!(next, '!' | '^')).is_some();
    let mut members: Vec<(char, char)> = Vec::new();
    let mut first = true;
    loop {
        let next = rest.next()?;
        let start = match next {
            ']' if !first => return Some(Class { negated, members }),
            '[' if rest.next_if_eq(&':').is_some() => {
                members.extend(kind(rest)?);
                first = false;
                continue;
            }
            '\\' => rest.next()?,
            other => other,
        };
        first = false;
        let mut ahead = rest.clone();
        let is_range = ahead.next() == Some('-') && ahead.next().is_some_and(|end| end != ']');
        let end = match is_range {
            true => match rest.nth(1)? {
                '\\' => rest.next()?,
                end => end,
            },
            false => start,
        };
        // The wrong way round it has its beginning alone.
        members.push((start, end.max(start)));
    }
}

/// The kind whose opening was read, up to its end.
fn kind(rest: &mut Peekable<Chars<'_>>) -> Option<&'static [(char, char)]> {
    let name: String = std::iter::from_fn(|| rest.next_if(char::is_ascii_lowercase)).collect();
    let ends = rest.next() == Some(':') && rest.next() == Some(']');
    KINDS.iter().find(|(known, _)| ends && *known == name).map(|(_, members)| *members)
}

impl Class {
    /// Without the slash, which no class matches; `None` if nothing is left. A member that means something else in
    /// a class of the library stands where it does not, or in a range of its own.
    fn told(self) -> Option<String> {
        let before = |character: char| char::from_u32(u32::from(character) - 1).unwrap_or(character);
        let after = |character: char| char::from_u32(u32::from(character) + 1).unwrap_or(character);
        let (mut members, mut closes, mut spans) = (String::new(), false, false);
        let mut push = |from: char, to: char| {
            // The brackets and the hyphen have a place of their own.
            for (from, to) in [
                (from, to.min(before('-'))),
                (from.max(after('-')), to.min(before(']'))),
                (from.max(after(']')), to),
            ] {
                if from < to {
                    members.extend([from, '-', to]);
                } else if from == to {
                    members.push(from);
                }
            }
            closes |= (from..=to).contains(&']');
            spans |= (from..=to).contains(&'-');
        };
        for (from, to) in self.members {
            match (from..=to).contains(&'/') && !self.negated {
                true => {
                    push(from, before('/'));
                    push(after('/'), to);
                }
                false => push(from, to),
            }
        }
        let all = [if closes { "]" } else { "" }, &members, if spans { "-" } else { "" }].concat();
        match (self.negated, all.is_empty()) {
            // The slash is one of those that it may not be.
            (true, _) if closes => Some(format!("[!]/{}]", &all[1..])),
            (true, _) => Some(format!("[!/{all}]")),
            (false, true) => None,
            (false, false) if all.starts_with(['!', '^']) && all.chars().count() == 1 => {
                Some(format!("\\{all}"))
            }
            // Twice the same is the same: the first of them is no mark any more.
            (false, false) if all.starts_with(['!', '^']) => {
                let last = all.chars().last().unwrap_or_default();
                Some(format!("[{last}{all}]"))
            }
            (false, false) => Some(format!("[{all}]")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_lines_without_oddities_stay_as_they_are() {
        for line in ["a", "*.log", "/a/**/b", "!keep", "\\#a", "\\!a", "a\\ ", "a/", "**/x?"] {
            assert_eq!(for_library(line), [line]);
        }
    }

    #[test]
    fn test_a_blank_that_is_no_space_is_part_of_the_name() {
        for (line, told) in [("a\t", "a[\t]"), ("a\t  ", "a[\t]  "), ("a\\\t", "a[\t]")] {
            assert_eq!(for_library(line), [told], "{line:?}");
            let mut builder = ignore::gitignore::GitignoreBuilder::new("");
            builder.add_line(None, told).unwrap();
            let rules = builder.build().unwrap();
            let name = line.trim_end_matches(' ').replace('\\', "");
            assert!(
                rules.matched(&name, false).is_ignore() && !rules.matched("a", false).is_ignore(),
                "{line:?}"
            );
        }
    }

    #[test]
    fn test_what_matches_nothing_is_no_pattern() {
        for line in [
            "",
            "   ",
            "!",
            "!  ",
            "# a",
            "[",
            "a[b",
            "[/]",
            "[[:nothing:]]",
            "[[:digit:]",
            "[\\",
            "//",
            "a//",
        ] {
            assert_eq!(for_library(line), [""; 0], "{line}");
        }
    }

    #[test]
    fn test_stars_are_two_at_most() {
        assert_eq!(for_library("***/b"), ["**/b"]);
        assert_eq!(for_library("a****\\***"), ["a**\\***"]);
    }

    #[test]
    fn test_stars_after_a_plain_beginning_are_directories_or_nothing() {
        for (line, told) in [
            ("logs**/*.txt", ["/logs*.txt", "/logs*/**/*.txt"]),
            ("!/c/a***/b/", ["!/c/ab/", "!/c/a*/**/b/"]),
        ] {
            assert_eq!(for_library(line), told, "{line}");
        }
        assert_eq!(for_library("a**/***/b**/c"), ["/ab**/c", "/a*/**/b**/c"]);
        for line in ["a**/", "a*b**/c", "a/**/b", "\\a**/b", "**/a**/b", "a**"] {
            assert_eq!(for_library(line), [line]);
        }
    }

    #[test]
    fn test_braces_are_no_alternatives() {
        assert_eq!(for_library("*.{log,tmp}"), ["*.\\{log,tmp\\}"]);
        assert_eq!(for_library("\\{a"), ["\\{a"]);
    }

    #[test]
    fn test_classes_never_have_a_slash() {
        for (line, told) in [
            ("/[ab]", "/[ab]"),
            ("[ab]/", "**/[ab]/"),
            ("![!ab]", "!**/[!/ab]"),
            ("a/[^a-c]x", "/a/[!/a-c]x"),
            ("[.-0]", "**/[.0]"),
            ("[b-a]", "**/[b]"),
            ("[a/b]", "/[ab]"),
            ("![a/b]/", "!/[ab]/"),
            ("[]a]", "**/[]a]"),
            ("[!]a]", "**/[!]/a]"),
            ("[a-]", "**/[a-]"),
            ("[-a]", "**/[a-]"),
            ("[\\]a]", "**/[]a]"),
            ("[\\!]", "**/\\!"),
            ("[\\!a]", "**/[a!a]"),
            ("[[:digit:]_]", "**/[0-9_]"),
            ("[![:upper:]]", "**/[!/A-Z]"),
            ("[+-.]", "**/[+-,.-]"),
        ] {
            assert_eq!(for_library(line), [told], "{line}");
        }
    }
}
