//! Formats words, numbers, times and colours. Pure.

use std::borrow::Cow;
use std::fmt::Write;
use std::time::Duration;

use agent_model::Timestamp;
pub(crate) use agent_model::words::{count, duration};
use jiff::tz::TimeZone;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// What a piece of text means, shown by its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Tone {
    /// Nothing special.
    #[default]
    Plain,
    /// Of less interest.
    Dim,
    /// A heading.
    Strong,
    /// It goes on.
    Live,
    /// It went well.
    Good,
    /// Worth a look.
    Warn,
    /// It went wrong.
    Bad,
}

/// Whether colours may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ink(bool);

impl Ink {
    /// No colours.
    #[cfg(test)]
    pub(crate) const PLAIN: Ink = Ink(false);

    /// Colours when `on`.
    pub(crate) fn new(on: bool) -> Ink {
        Ink(on)
    }

    /// `text` in the colour of `tone`.
    pub(crate) fn paint<'a>(self, tone: Tone, text: &'a str) -> Cow<'a, str> {
        let code = match tone {
            Tone::Dim => "2",
            Tone::Strong => "1",
            Tone::Live => "36",
            Tone::Good => "32",
            Tone::Warn => "33",
            Tone::Bad => "31",
            Tone::Plain => return text.into(),
        };
        if self.0 && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m").into() } else { text.into() }
    }
}

/// Whether a character controls a terminal, or makes a text look like another one, as marks that change the direction
/// of writing do.
pub(crate) fn steers(c: char) -> bool {
    let turns = |c| matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns(c)
}

/// `text` on one line, without characters that control a terminal.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    if !text.chars().any(steers) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\t' => shown.push(' '),
            c if steers(c) => shown.extend(c.escape_default()),
            c => shown.push(c),
        }
    }
    shown.into()
}

/// `text` without the numbers that the system has for its errors: `Permission denied (os error 13)`.
pub(crate) fn without_numbers(text: &str) -> String {
    const BEGIN: &str = " (os error ";
    let (mut shown, mut rest) = (String::with_capacity(text.len()), text);
    while let Some((before, after)) = rest.split_once(BEGIN) {
        shown.push_str(before);
        rest = match after.split_once(')') {
            Some((number, after)) if number.parse::<u32>().is_ok() => after,
            _ => {
                shown.push_str(BEGIN);
                after
            }
        };
    }
    shown + rest
}

/// How long ago something was, in one unit: `now`, `40 s`, `3 min`, `2 h`, `5 d`.
pub(crate) fn age(since: Timestamp, now: Timestamp) -> String {
    match now.since(since).as_secs() {
        0 => "now".to_owned(),
        s @ 1..60 => format!("{s} s"),
        s @ 60..3600 => format!("{} min", s / 60),
        s @ 3600..86_400 => format!("{} h", s / 3600),
        s => format!("{} d", s / 86_400),
    }
}

/// A length in one unit and few letters, for a table: `40s`, `14m`, `2h`, `5d`.
pub(crate) fn short(length: Duration) -> String {
    match length.as_secs() {
        s @ 0..60 => format!("{s}s"),
        s @ 60..3600 => format!("{}m", s / 60),
        s @ 3600..86_400 => format!("{}h", s / 3600),
        s => format!("{}d", s / 86_400),
    }
}

/// A length as a clock shows it, for a table: `0:07`, `7:47`, `1:02:03`, `2d 03:04`.
pub(crate) fn clock(length: Duration) -> String {
    let s = length.as_secs();
    let (minutes, hours) = (s / 60 % 60, s / 3600);
    match hours {
        0 => format!("{minutes}:{:02}", s % 60),
        1..24 => format!("{hours}:{minutes:02}:{:02}", s % 60),
        _ => format!("{}d {:02}:{minutes:02}", hours / 24, hours % 24),
    }
}

/// The same in a sentence: `just now`, `3 min ago`.
pub(crate) fn ago(since: Timestamp, now: Timestamp) -> String {
    match now.since(since).as_secs() {
        0 => "just now".to_owned(),
        _ => format!("{} ago", age(since, now)),
    }
}

/// A moment in the time zone of the user, as `2024-05-06 09:08:09 +02:00`; the variable TZ says another zone.
pub(crate) fn moment(at: Timestamp) -> String {
    // Tests say the same in every zone.
    let zone = if cfg!(test) { TimeZone::UTC } else { TimeZone::system() };
    moment_in(at, &zone)
}

fn moment_in(at: Timestamp, zone: &TimeZone) -> String {
    let Some(moment) = i64::try_from(at.0).ok().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok())
    else {
        return at.utc();
    };
    let offset = zone.to_offset(moment);
    match offset.seconds() {
        0 => at.utc(),
        seconds => {
            let (sign, minutes) = (if seconds < 0 { '-' } else { '+' }, seconds.unsigned_abs() / 60);
            let civil = offset.to_datetime(moment).strftime("%Y-%m-%d %H:%M:%S");
            format!("{civil} {sign}{:02}:{:02}", minutes / 60, minutes % 60)
        }
    }
}

/// A moment that is to come: its time of day where that is within a day, else with the date.
pub(crate) fn soon(at: Timestamp, now: Timestamp) -> String {
    let whole = moment(at);
    match (whole.get(11..16), at.since(now).as_secs() < 86_400) {
        (Some(time), true) => time.to_owned(),
        _ => whole,
    }
}

/// A number as people write it: six significant digits, no trailing zeros.
pub(crate) fn number(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    if !value.is_finite() {
        return value.to_string();
    }
    if !(1e-4..1e9).contains(&value.abs()) {
        return format!("{value:.4e}");
    }
    let before = value.abs().log10().floor();
    let decimals = (5.0 - before).max(0.0) as usize; // between 0 and 9, as checked above
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// `text` cut to at most `width` columns. A character may take two columns, or none.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut left = width.saturating_sub(1);
    let fits = |c: &char| match left.checked_sub(c.width().unwrap_or(0)) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    };
    format!("{}…", text.chars().take_while(fits).collect::<String>())
}

/// `text` cut in the middle to at most `width` columns: `train-resn…-x7k2p`.
pub(crate) fn cut_middle(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let end = width.saturating_sub(1) / 2;
    let begin = cut(text, width - end);
    let (mut from, mut taken) = (text.len(), 0);
    for (at, c) in text.char_indices().rev() {
        taken += c.width().unwrap_or(0);
        if taken > end {
            break;
        }
        from = at;
    }
    format!("{begin}{}", &text[from..])
}

/// `text` broken between words into lines of at most `width` columns, each after the first indented.
pub(crate) fn wrap(text: &str, width: usize, indent: usize) -> String {
    let words = text.trim_start_matches(' ');
    let mut wrapped = " ".repeat(text.len() - words.len());
    let mut column = indent;
    for word in words.split(' ') {
        let length = word.width();
        if column > indent && column + 1 + length > width {
            let _ = write!(wrapped, "\n{:indent$}", ""); // writing to a string cannot fail
            column = indent;
        } else if column > indent {
            wrapped.push(' ');
            column += 1;
        }
        wrapped.push_str(word);
        column += length;
    }
    wrapped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_ages_have_one_unit() {
        assert_eq!(age(Timestamp(0), Timestamp(200_000)), "3 min");
        assert_eq!(age(Timestamp(5), Timestamp(0)), "now");
    }

    #[test]
    fn test_lengths_in_tables_are_short() {
        let seconds = [0, 59, 467, 3723, 86_400 * 2 + 3 * 3600 + 4 * 60];
        let shown = seconds.map(Duration::from_secs).map(|length| (short(length), clock(length)));
        let shown = shown.map(|(short, clock)| format!("{short} {clock}"));
        assert_eq!(shown, ["0s 0:00", "59s 0:59", "7m 7:47", "1h 1:02:03", "2d 2d 03:04"]);
    }

    #[test]
    fn test_moments_are_those_of_a_zone_with_its_offset() {
        let offset = |hours, minutes| {
            TimeZone::fixed(jiff::tz::Offset::from_seconds(hours * 3600 + minutes * 60).unwrap())
        };
        let at = Timestamp(1_714_979_289_000);
        let shown = [offset(2, 0), offset(-3, -30), TimeZone::UTC].map(|zone| moment_in(at, &zone));
        assert_eq!(
            shown,
            ["2024-05-06 09:08:09 +02:00", "2024-05-06 03:38:09 -03:30", "2024-05-06 07:08:09 UTC"]
        );
    }

    #[test]
    fn test_moments_are_civil() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_714_979_289, "2024-05-06 07:08:09 UTC"),
            (4_107_542_399, "2100-02-28 23:59:59 UTC"),
        ] {
            assert_eq!(moment(Timestamp(seconds * 1000)), text);
        }
    }

    #[test]
    fn test_numbers_keep_what_matters() {
        for (value, text) in [
            (0.0, "0"),
            (0.25, "0.25"),
            (1.0 / 3.0, "0.333333"),
            (12345.678, "12345.7"),
            (1_234_567.0, "1234567"),
            (-2.0, "-2"),
            (1e-9, "1.0000e-9"),
            (3.2e12, "3.2000e12"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn test_clean_leaves_nothing_that_steers() {
        assert_eq!(clean("plain — ü"), "plain — ü");
        assert_eq!(clean("a\x1b[31mb\nc\u{9b}d\r"), "a\\u{1b}[31mb c\\u{9b}d\\r");
        assert_eq!(clean("abc\u{202e}fed"), "abc\\u{202e}fed");
    }

    #[test]
    fn test_numbers_of_errors_are_left_out() {
        let told = without_numbers("cannot read /x: Permission denied (os error 13); y: gone (os error 2)");
        assert_eq!(told, "cannot read /x: Permission denied; y: gone");
        assert_eq!(without_numbers("a (os error x) b"), "a (os error x) b");
    }

    #[test]
    fn test_wrap_breaks_between_words() {
        assert_eq!(wrap("one two three", 11, 4), "one two\n    three");
        assert_eq!(wrap("  led  apart", 20, 0), "  led  apart");
        assert_eq!(wrap("a_word_too_long_for_it b", 8, 2), "a_word_too_long_for_it\n  b");
    }

    #[test]
    fn test_cut_keeps_the_width() {
        assert_eq!((cut("abcdef", 6).as_str(), cut("abcdef", 4).as_str()), ("abcdef", "abc…"));
        assert_eq!((cut("漢字漢", 6).as_str(), cut("漢字漢", 4).as_str()), ("漢字漢", "漢…"));
    }

    #[test]
    fn test_cut_in_the_middle_keeps_both_ends() {
        for (text, width, shown) in [
            ("abcdef", 6, "abcdef"),
            ("abcdefgh", 6, "abc…gh"),
            ("abcdefgh", 5, "ab…gh"),
            ("漢字漢字", 6, "漢…字"),
        ] {
            assert_eq!(cut_middle(text, width), shown);
        }
    }

    #[test]
    fn test_paint_only_with_ink() {
        assert_eq!(Ink::new(false).paint(Tone::Bad, "x"), "x");
        assert_eq!(Ink::new(true).paint(Tone::Bad, "x"), "\x1b[31mx\x1b[0m");
    }
}
