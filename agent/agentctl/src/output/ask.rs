//! Questions to the user at the terminal of this process, also when standard input is a file.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};

use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

/// Asks, and returns the line that is typed; a secret is not shown on the terminal. `None` without a terminal, or at its
/// end of input.
pub(crate) fn ask(question: &str, is_secret: bool) -> Option<String> {
    let terminal = File::options().read(true).write(true).open("/dev/tty").ok()?;
    let before = tcgetattr(&terminal).ok()?;
    if is_secret {
        let mut silent = before.clone();
        silent.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&terminal, OptionalActions::Flush, &silent).ok()?;
    }
    (&terminal).write_all(question.as_bytes()).ok()?;
    let mut line = String::new();
    let read = BufReader::new(&terminal).read_line(&mut line);
    if is_secret {
        let _ = tcsetattr(&terminal, OptionalActions::Flush, &before);
        let _ = (&terminal).write_all(b"\n");
    }
    read.ok().filter(|length| *length > 0)?;
    Some(line.trim_end_matches(['\r', '\n']).to_owned())
}
