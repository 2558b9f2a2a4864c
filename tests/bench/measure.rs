//! Timing whole commands.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The rounds of one side of a ratio.
#[derive(Default)]
pub(crate) struct Series(Vec<Duration>);

impl Series {
    pub(crate) fn push(&mut self, round: Duration) {
        self.0.push(round);
        self.0.sort_unstable();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn median(&self) -> Duration {
        self.0[self.0.len() / 2]
    }

    pub(crate) fn least(&self) -> Duration {
        self.0[0]
    }

    pub(crate) fn most(&self) -> Duration {
        self.0[self.0.len() - 1]
    }
}

/// From the start of a command to its end.
pub(crate) fn time(mut command: Command) -> Duration {
    let start = Instant::now();
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status().expect("the command starts");
    assert!(status.success(), "{command:?}: {status}");
    start.elapsed()
}

/// From the start of a command to its first line; the command is then waited for.
pub(crate) fn first_line(mut command: Command) -> Duration {
    let start = Instant::now();
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the command starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    let elapsed = start.elapsed();
    assert!(!line.is_empty(), "{command:?} said nothing");
    child.wait().expect("the command ends");
    elapsed
}
