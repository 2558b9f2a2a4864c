//! Completion scripts for shells: those that clap generates, and the names of jobs where a job is expected.
//!
//! The scripts call `agentctl job-names`, which prints nothing when no daemon answers in time.

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use tokio::time::{Duration, timeout};

use crate::cli::Cli;
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::Output;

/// How many names are offered, the newest.
const NAMES: u32 = 200;
/// The longest wait after a key is pressed.
const PATIENCE: Duration = Duration::from_secs(2);

/// Prints the script for a shell.
pub(super) fn script(shell: Shell, output: &mut Output) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "agentctl", &mut script);
    output.print(&with_jobs(shell, &String::from_utf8_lossy(&script), &Cli::command()))
}

/// Prints the names of jobs, newest first.
pub(super) async fn job_names(to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let names = async { Client::find(to).await?.latest_jobs(NAMES).await };
    match timeout(PATIENCE, names).await {
        Ok(Ok(jobs)) => jobs.iter().try_for_each(|job| output.print(&format!("{}\n", job.job))),
        _ => Ok(()),
    }
}

/// The verbs whose arguments are jobs, by all their names.
fn verbs(command: &Command) -> Vec<&str> {
    let takes_jobs =
        |verb: &&Command| verb.get_positionals().any(|word| matches!(word.get_id().as_str(), "job" | "jobs"));
    let names = |verb| std::iter::once(Command::get_name(verb)).chain(Command::get_all_aliases(verb));
    command.get_subcommands().filter(takes_jobs).flat_map(names).collect()
}

fn with_jobs(shell: Shell, script: &str, command: &Command) -> String {
    let verbs = verbs(command);
    match shell {
        Shell::Bash => {
            let verbs = verbs.join(" ");
            format!(
                r#"{script}
_agentctl_with_jobs() {{
    _agentctl "$@"
    local word="${{COMP_WORDS[COMP_CWORD]}}"
    if [[ "$3" == --after* || ( "$word" != -* && $COMP_CWORD -gt 1 && " {verbs} " == *" ${{COMP_WORDS[1]}} "* ) ]]; then
        COMPREPLY=($(compgen -W "$(agentctl job-names 2>/dev/null)" -- "$word"))
    fi
}}
complete -F _agentctl_with_jobs -o bashdefault -o default agentctl
"#
            )
        }
        Shell::Zsh => {
            let wants = |line: &str| {
                let line = line.trim_start();
                line.starts_with("':job -- ")
                    || line.starts_with("'*::jobs -- ")
                    || line.contains(":JOB:_default")
            };
            let names = "_agentctl_job_names() { compadd -- ${(f)\"$(agentctl job-names 2>/dev/null)\"} }\n";
            let lines = script.split_inclusive('\n').enumerate().map(|(number, line)| match number {
                0 => format!("{line}\n{names}"), // what shell it is for must stay the first line
                _ if wants(line) => line.replace(":_default'", ":_agentctl_job_names'"),
                _ => line.to_owned(),
            });
            lines.collect()
        }
        Shell::Fish => {
            let line = |verb: &str| {
                format!(
                    "complete -c agentctl -n \"__fish_seen_subcommand_from {verb}\" -f -a \"(agentctl job-names 2>/dev/null)\"\n"
                )
            };
            verbs.into_iter().fold(script.to_owned(), |script, verb| script + &line(verb))
        }
        _ => script.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_every_shell_asks_for_jobs_where_jobs_are_meant() {
        let made = |shell| {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "agentctl", &mut script);
            with_jobs(shell, &String::from_utf8(script).unwrap(), &Cli::command())
        };
        let all = Cli::command();
        let verbs = verbs(&all);
        for verb in ["show", "why", "logs", "wait", "cancel", "kill", "hold", "set", "rm", "download"] {
            assert!(verbs.contains(&verb), "{verbs:?}");
        }
        assert!(!verbs.contains(&"run") && !verbs.contains(&"drain"), "{verbs:?}");
        let zsh = made(Shell::Zsh);
        assert!(zsh.starts_with("#compdef agentctl\n"));
        let asks = zsh.lines().filter(|line| line.contains(":_agentctl_job_names'")).count();
        assert!(asks >= verbs.len() - 2, "{asks} of {}:\n{zsh}", verbs.len());
        let fish = made(Shell::Fish);
        assert_eq!(fish.matches("(agentctl job-names").count(), verbs.len());
    }
}
