//! Everything the program prints, and the only module that prints.
//!
//! Standard output carries what the user asked for: a job's bytes, a table, JSON. Standard error carries messages of
//! this program: progress, notes, warnings, faults. Colours appear only on a terminal and never with `NO_COLOR`.
//!
//! Invariants: text that a job, a file or a peer chose is shown through [`text::clean`] or, for log bytes on a
//! terminal, through [`terminal::Filter`], so that it cannot control the terminal; bytes for a pipe or a file are the
//! job's, unchanged. A reader that closed the pipe is [`Failure::PipeClosed`], not a panic.
//!
//! Hides the spinner: it is removed from the screen before anything else is written.

pub(crate) mod age;
pub(crate) mod ask;
pub(crate) mod fault;
pub(crate) mod table;
pub(crate) mod terminal;
pub(crate) mod text;

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use agent_model::Fault;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rustix::pipe::fcntl_setpipe_size;
use serde::Serialize;

use crate::failure::Failure;
use text::{Ink, Tone};

/// The width and the colours that a text is rendered with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Paper {
    /// Whether colours may be used.
    pub(crate) ink: Ink,
    /// Its width in columns.
    pub(crate) width: usize,
}

/// The width where there is no terminal: nothing is cut or broken for a program or a file.
const PLAIN_WIDTH: usize = 10_000;

/// A line of a build log that is longer than this, in bytes, is shown in pieces.
const LONGEST_LINE: usize = 64 * 1024;

/// Job output of this many bytes at once makes a pipe on standard output [`WIDE`], so that its reader is woken once for
/// each such piece.
const MUCH: usize = 64 * 1024;

/// The most that a pipe may hold for any user, in bytes.
const WIDE: usize = 1024 * 1024;

/// The standard output and the standard error of the program.
pub(crate) struct Output {
    quiet: bool,
    /// Standard output is as wide as it gets.
    is_wide: bool,
    out: Paper,
    err: Paper,
    /// Present when standard output is a terminal.
    filter: Option<terminal::Filter>,
    spinner: Option<ProgressBar>,
    /// The last line of the build log, not complete yet.
    build_line: Vec<u8>,
    /// The last byte of the job's output on this terminal was not a line feed.
    mid_line: bool,
}

impl Output {
    /// For this process; `colour` is false when the user wants none.
    pub(crate) fn new(quiet: bool, colour: bool) -> Output {
        let (out, err) = (io::stdout(), io::stderr());
        Output {
            quiet,
            is_wide: false,
            out: paper(&out, colour),
            err: paper(&err, colour),
            filter: out.is_terminal().then(terminal::Filter::default),
            spinner: None,
            build_line: Vec::new(),
            mid_line: false,
        }
    }

    /// The paper of texts for [`Output::print`].
    pub(crate) fn paper(&self) -> Paper {
        self.out
    }

    /// The paper of texts for [`Output::say`].
    pub(crate) fn note_paper(&self) -> Paper {
        self.err
    }

    /// Writes a rendered text to standard output.
    pub(crate) fn print(&mut self, text: &str) -> Result<(), Failure> {
        self.rest();
        write_out(text.as_bytes())
    }

    /// The same, but clears the screen first if standard output is a terminal.
    pub(crate) fn print_anew(&mut self, text: &str) -> Result<(), Failure> {
        const CLEAR: &str = "\x1b[H\x1b[2J\x1b[3J";
        if self.filter.is_none() {
            return self.print(text);
        }
        let rows = rustix::termios::tcgetwinsize(io::stdout()).map_or(0, |size| usize::from(size.ws_row));
        self.print(&format!("{CLEAR}{}", beginning(text, rows)))
    }

    /// Writes one JSON document to standard output. One that is older than now says so.
    pub(crate) fn json(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let Some(said) = age::said() else { return self.print(&(pretty(value) + "\n")) };
        let mut document = serde_json::to_value(value).unwrap_or_default(); // our own plain structs
        if let Some(document) = document.as_object_mut() {
            let unwritten = serde_json::json!({ "since_ms": said.since, "why": said.why });
            document.insert("unwritten".to_owned(), unwritten);
        }
        self.print(&(pretty(&document) + "\n"))
    }

    /// Writes a rendered text to standard error, unless the user wants quiet.
    pub(crate) fn say(&mut self, text: &str) {
        if !self.quiet {
            self.write_err(text);
        }
    }

    /// One line about progress, unless the user wants quiet.
    pub(crate) fn note(&mut self, line: &str) {
        self.say(&format!("{}\n", text::wrap(&text::clean(line), self.err.width, 2)));
    }

    /// One line about something that has no effect or may surprise.
    pub(crate) fn warn(&mut self, line: &str) {
        let mark = self.err.ink.paint(Tone::Warn, "warning:");
        let line = text::wrap(&format!("warning: {}", text::clean(line)), self.err.width, 2);
        self.say(&format!("{}\n", line.replacen("warning:", &mark, 1)));
    }

    /// An error and what to do about it; also when the user wants quiet.
    pub(crate) fn fault(&mut self, error: &Fault) {
        self.write_err(&fault::render(error, self.err));
    }

    /// A refusal of this program itself, which has no code.
    pub(crate) fn refusal(&mut self, what: &str, fix: &str) {
        self.write_err(&fault::render_refusal(what, fix, self.err));
    }

    /// Bytes a job wrote.
    pub(crate) fn job_bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.rest();
        match &mut self.filter {
            Some(filter) => {
                let shown = filter.pass(bytes);
                self.mid_line = shown.last().map_or(self.mid_line, |last| *last != b'\n');
                write_out(&shown)
            }
            None => {
                if bytes.len() >= MUCH && !std::mem::replace(&mut self.is_wide, true) {
                    let _ = fcntl_setpipe_size(io::stdout(), WIDE); // it may be no pipe
                }
                write_out(bytes)
            }
        }
    }

    /// Ends a job's output: on a terminal writes the bytes held back, resets colours that were left on, and starts a
    /// new line for the text that follows.
    pub(crate) fn job_ended(&mut self) -> Result<(), Failure> {
        let Some(filter) = &mut self.filter else { return Ok(()) };
        let mut last = filter.finish();
        if std::mem::take(&mut self.mid_line) {
            last.push(b'\n');
        }
        write_out(&last)
    }

    /// Bytes of a build log: whole lines, prefixed and dimmed, to standard error.
    pub(crate) fn build_bytes(&mut self, bytes: &[u8]) {
        self.build_line.extend_from_slice(bytes);
        if self.build_line.len() > LONGEST_LINE && !self.build_line.contains(&b'\n') {
            return self.build_ended(); // a line without end is shown in pieces
        }
        let Some(end) = self.build_line.iter().rposition(|byte| *byte == b'\n') else { return };
        let lines: Vec<u8> = self.build_line.drain(..=end).collect();
        self.build_lines(&lines);
    }

    /// Ends a build log.
    pub(crate) fn build_ended(&mut self) {
        let last = std::mem::take(&mut self.build_line);
        self.build_lines(&last);
    }

    fn build_lines(&mut self, lines: &[u8]) {
        let spinner = self.spinner.as_ref().map(ProgressBar::message);
        for line in String::from_utf8_lossy(lines).lines() {
            let line = format!("  env | {}", text::clean(line));
            let line = if self.is_lively() { text::cut(&line, self.err.width) } else { line };
            let line = self.err.ink.paint(Tone::Dim, &line).into_owned();
            self.say(&format!("{line}\n"));
        }
        if let Some(message) = spinner {
            self.busy(&message);
        }
    }

    /// Whether progress is shown: standard error is a terminal.
    pub(crate) fn is_lively(&self) -> bool {
        io::stderr().is_terminal()
    }

    /// Whether what a job printed and the messages about it are read in one place.
    pub(crate) fn is_one_screen(&self) -> bool {
        io::stdout().is_terminal() && io::stderr().is_terminal()
    }

    /// Shows on a terminal what is being waited for, until something else is written.
    pub(crate) fn busy(&mut self, doing: &str) {
        if self.quiet || !self.is_lively() {
            return;
        }
        let doing = fit(doing, self.err.width);
        if let Some(spinner) = &self.spinner {
            return spinner.set_message(doing);
        }
        let spinner = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
            spinner.set_style(style);
        }
        spinner.set_message(doing);
        spinner.enable_steady_tick(Duration::from_millis(120));
        self.spinner = Some(spinner);
    }

    /// A function that changes the spinner's text, from any thread.
    pub(crate) fn ticker(&self) -> impl Fn(String) + Send + Sync + use<> {
        let (spinner, width) = (self.spinner.clone(), self.err.width);
        move |doing| {
            if let Some(spinner) = &spinner {
                spinner.set_message(fit(&doing, width));
            }
        }
    }

    /// Removes the spinner from the screen.
    pub(crate) fn rest(&mut self) {
        if let Some(spinner) = self.spinner.take() {
            spinner.finish_and_clear();
        }
    }

    fn write_err(&mut self, text: &str) {
        self.rest();
        let newline = if std::mem::take(&mut self.mid_line) { "\n" } else { "" };
        // A closed standard error must not change what the program does.
        let _ = io::stderr().lock().write_all(format!("{newline}{text}").as_bytes());
    }
}

fn paper(stream: &(impl IsTerminal + AsFd), colour: bool) -> Paper {
    if !stream.is_terminal() {
        return Paper { ink: Ink::new(false), width: PLAIN_WIDTH };
    }
    let columns = rustix::termios::tcgetwinsize(stream).map_or(0, |size| usize::from(size.ws_col));
    Paper { ink: Ink::new(colour), width: if columns < 20 { 80 } else { columns } }
}

/// As much of a text as a screen of so many rows shows: what is at its head matters most.
fn beginning(text: &str, rows: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    if rows < 5 || lines.len() < rows {
        return text.to_owned();
    }
    let shown = rows - 2; // one row says how much is left, and the cursor has one
    format!("{}\n… {} more lines\n", lines[..shown].join("\n"), lines.len() - shown)
}

/// A spinner's text, so short that a `^C` echoed after it stays on its line.
fn fit(doing: &str, width: usize) -> String {
    text::cut(&text::clean(doing), width.saturating_sub(12))
}

/// A document as `--json` prints it.
pub(crate) fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default() // our own plain structs
}

fn write_out(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::PipeClosed,
        _ => Failure::refused(
            format!("cannot write to standard output: {error}"),
            "check where the output goes; is that disk full?",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_a_screen_keeps_the_head_of_a_text() {
        let text = "1\n2\n3\n4\n5\n6\n";
        assert_eq!(beginning(text, 7), text);
        assert_eq!(beginning(text, 6), "1\n2\n3\n4\n… 2 more lines\n");
        assert_eq!(beginning(text, 0), text);
    }
}
