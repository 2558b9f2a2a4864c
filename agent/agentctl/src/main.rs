//! `agentctl`, the command line of agentd.
//!
//! ```text
//! cli ─▶ commands/VERB ─▶ client ─▶ agentd
//!            │  └─ prepare: a directory or job file becomes a job and its snapshots
//!            └─ output: the only module that prints
//! ```
//!
//! One thread, because the program mostly waits. Commands return a [`Failure`](failure::Failure), which determines
//! the exit code; nothing else ends the process.

mod advice;
mod cli;
mod client;
mod commands;
mod failure;
mod help;
mod output;
mod prepare;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use futures_util::FutureExt;

use crate::output::Output;

fn main() -> ExitCode {
    let words = cli::separate(std::env::args_os().collect());
    let cli = match cli::Cli::try_parse_from(&words) {
        Ok(cli) => cli,
        Err(error) => {
            let error = with_groups(error, &words);
            let given: Vec<String> = std::env::args().collect();
            let printed = match advice::advice(&given, &error) {
                Some((what, fix)) => {
                    Output::new(false, wants_colour()).refusal(&what, &fix);
                    Ok(())
                }
                None => error.print(),
            };
            // Help and version are not errors and are printed to standard output.
            return ExitCode::from(match error.use_stderr() {
                true if cli::is_about_a_jobs_end(std::env::args()) => failure::NOT_THE_JOBS,
                true => 2,
                false if printed.is_err() => 3,
                false => 0,
            });
        }
    };
    let own = if cli.verb.is_about_a_jobs_end() { failure::NOT_THE_JOBS } else { 70 };
    let mut output = Output::new(cli.quiet, wants_colour());
    let mut runtime = match &cli.verb {
        // Each upload is encrypted by a task of its own: several machines take several processors.
        cli::Verb::Attach(args) if args.file.is_some() => tokio::runtime::Builder::new_multi_thread(),
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let code = match runtime.enable_all().build() {
        Ok(runtime) => {
            // In a box: `block_on` has several loops, each with a copy of all that it runs.
            let code = runtime.block_on(commands::perform(cli, &mut output).boxed_local());
            runtime.shutdown_background(); // a file that is still being read is not waited for
            code
        }
        Err(error) => {
            output.refusal(&format!("cannot start: {error}"), "close some programs and try again");
            ExitCode::from(own)
        }
    };
    output.rest();
    code
}

/// Help with the groups of commands, which no other command line pays for; anything else as it is.
fn with_groups(error: clap::Error, words: &[OsString]) -> clap::Error {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            help::command().try_get_matches_from(words).err().unwrap_or(error)
        }
        _ => error,
    }
}

/// Whether the user and the terminal take colours.
fn wants_colour() -> bool {
    cli::variable("NO_COLOR").is_none() && cli::variable("TERM").is_none_or(|term| term != "dumb")
}
