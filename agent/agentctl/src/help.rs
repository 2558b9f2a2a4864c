//! The help of the whole program: its commands by what they are about.

use std::fmt::Write as _;

use clap::{Command, CommandFactory};

use crate::cli::Cli;
use crate::output::text::wrap;

/// Each visible command once, in the order in which it is shown.
const GROUPS: [(&str, &[&str]); 6] = [
    (
        "Jobs",
        &[
            "run", "submit", "sweep", "jobs", "logs", "show", "why", "wait", "cancel", "hold", "release",
            "set", "rerun", "exec", "forward", "open", "download", "code", "rm",
        ],
    ),
    ("Results", &["runs", "metrics", "diff", "mlflow"]),
    ("Job files", &["init", "check", "files", "schema"]),
    ("Data, environments, secrets", &["data", "envs", "secret"]),
    (
        "Machines",
        &[
            "top",
            "nodes",
            "drain",
            "undrain",
            "cordon",
            "keep-awake",
            "preempt",
            "node",
            "attach",
            "detach",
            "pool",
        ],
    ),
    (
        "People and this box",
        &[
            "user",
            "token",
            "login",
            "context",
            "status",
            "doctor",
            "gc",
            "start",
            "stop",
            "explain",
            "completions",
            "help",
        ],
    ),
];

/// The widest line of it.
const WIDTH: usize = 80;

/// The command line, whose help has groups.
pub(crate) fn command() -> Command {
    let command = Cli::command();
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n{}\nOptions:\n{{options}}{{after-help}}",
        groups(&command)
    );
    command.help_template(template)
}

fn groups(command: &Command) -> String {
    let names = || GROUPS.iter().flat_map(|(_, names)| names.iter());
    let width = names().map(|name| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (group, names) in GROUPS {
        let _ = write!(text, "\n{group}:\n"); // into memory
        for name in names {
            let about = command.find_subcommand(name).and_then(Command::get_about).map(ToString::to_string);
            let about = about.unwrap_or_else(|| "Print this, or the help of a command".to_owned());
            let _ = writeln!(text, "  {name:width$}  {}", wrap(&about, WIDTH, width + 4));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_every_command_is_in_one_group() {
        let command = Cli::command();
        let shown = command.get_subcommands().filter(|command| !command.is_hide_set()).map(Command::get_name);
        let mut shown: Vec<&str> = shown.chain(["help"]).collect();
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        shown.sort_unstable();
        grouped.sort_unstable();
        assert_eq!(grouped, shown);
    }
}
