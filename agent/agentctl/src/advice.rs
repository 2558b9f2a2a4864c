//! What a command line was meant to be that is none: verbs of other tools, and arguments of a script in the wrong place.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::prepare::quoted;

/// Verbs that people bring from elsewhere, and what does the same here.
const ELSEWHERE: [(&str, &str); 14] = [
    ("sbatch", "agentctl submit SCRIPT"),
    ("srun", "agentctl run -- COMMAND"),
    ("salloc", "agentctl exec JOB -- bash, in a job that runs"),
    ("squeue", "agentctl jobs --active"),
    ("scancel", "agentctl cancel JOB"),
    ("sacct", "agentctl jobs --all, or agentctl show JOB"),
    ("sinfo", "agentctl nodes, or agentctl top"),
    ("scontrol", "agentctl show JOB, agentctl set JOB, agentctl hold JOB, or agentctl drain NODE"),
    ("history", "agentctl jobs --all"),
    ("list", "agentctl jobs"),
    ("create", "agentctl submit"),
    ("stream", "agentctl logs -f JOB"),
    ("tail", "agentctl logs -f JOB"),
    ("who", "agentctl top"),
];

/// What is wrong with a command line, and what to write instead, where it is known.
pub(crate) fn advice(words: &[String], error: &clap::Error) -> Option<(String, String)> {
    let named = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let word = named(ContextKind::InvalidSubcommand)?;
            let (_, here) = ELSEWHERE.iter().find(|(verb, _)| *verb == word)?;
            Some((format!("there is no `agentctl {word}`"), format!("here it is: {here}")))
        }
        ErrorKind::UnknownArgument => {
            let option = named(ContextKind::InvalidArg)?;
            let is_option =
                |word: &&String| word.as_str() == option || word.starts_with(&format!("{option}="));
            let (verb, at) = (words.get(1)?, words.iter().position(|word| is_option(&word))?);
            if !["run", "submit"].contains(&verb.as_str()) || at < 3 || words.iter().any(|word| word == "--")
            {
                return None;
            }
            let line = |words: &[String]| words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
            let meant = format!("agentctl {} -- {}", line(&words[1..at]), line(&words[at..]));
            Some((
                format!("`{option}` is no option of agentctl {verb}"),
                format!("what is for the script comes after `--`: {meant}"),
            ))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn test_verbs_of_other_tools_and_arguments_of_scripts_are_understood() {
        let told = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let error = Cli::try_parse_from(&words).unwrap_err();
            advice(&words, &error).map(|(_, fix)| fix).unwrap_or_default()
        };
        assert_eq!(told("agentctl sbatch job.sh"), "here it is: agentctl submit SCRIPT");
        assert_eq!(told("agentctl history"), "here it is: agentctl jobs --all");
        let script = "what is for the script comes after `--`: agentctl run train.py -- ";
        assert_eq!(told("agentctl run train.py --lr 0.3"), format!("{script}--lr 0.3"));
        assert_eq!(told("agentctl run train.py --lr=0.3 x"), format!("{script}--lr=0.3 x"));
        for other in ["agentctl run --bogus", "agentctl jobs --lr 3", "agentctl nonsense"] {
            assert_eq!(told(other), "", "{other}");
        }
    }

    #[test]
    fn test_no_verb_of_ours_is_taken_for_one_of_another_tool() {
        use clap::CommandFactory;
        let command = Cli::command();
        for (verb, _) in ELSEWHERE {
            assert!(command.find_subcommand(verb).is_none(), "{verb} is ours");
        }
    }
}
