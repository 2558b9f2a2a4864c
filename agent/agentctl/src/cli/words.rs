//! The words of a command line before they are parsed.

use std::ffi::OsString;

use clap::{Arg, Command, CommandFactory};

use super::Cli;

/// Puts `--` before the script of `run` and `submit`, as the old tools understood a line with `-c`: what comes after the
/// script are its arguments, also those that look like options.
///
/// ```text
/// submit -e EXPERIMENT -c NAME train.py --lr 0.1   ─▶   submit -e EXPERIMENT -c NAME -- train.py --lr 0.1
/// ```
pub(crate) fn separate(mut words: Vec<OsString>) -> Vec<OsString> {
    let command = Cli::command();
    let verbs = words.iter().enumerate().skip(1);
    let mut verbs = verbs.filter_map(|(at, word)| Some((at, command.find_subcommand(word)?)));
    if let Some((at, verb)) = verbs.next()
        && ["run", "submit"].contains(&verb.get_name())
        && let Some(script) = script(&words, at + 1, &command, verb)
    {
        words.insert(script, "--".into());
    }
    words
}

/// Where the script is: the first word behind `-c NAME` that is neither an option nor the value of one.
fn script(words: &[OsString], start: usize, command: &Command, verb: &Command) -> Option<usize> {
    let (mut configured, mut is_value) = (false, false);
    for (at, word) in words.iter().enumerate().skip(start) {
        if std::mem::take(&mut is_value) {
            continue;
        }
        match word.to_str() {
            Some("--") => return None,
            Some(text) if text.starts_with('-') && text.len() > 1 => {
                let (option, has_value) = option(text, command, verb)?;
                configured |= option.get_id() == "config";
                is_value = !has_value && option.get_action().takes_values();
            }
            _ if configured => return Some(at),
            _ => {}
        }
    }
    None
}

/// The option that a word is, and whether its value is in the same word.
fn option<'a>(text: &str, command: &'a Command, verb: &'a Command) -> Option<(&'a Arg, bool)> {
    let mut all = verb.get_arguments().chain(command.get_arguments());
    if let Some(long) = text.strip_prefix("--") {
        let (name, value) = long.split_once('=').map_or((long, false), |(name, _)| (name, true));
        let is = |arg: &&Arg| {
            arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|all| all.contains(&name))
        };
        return Some((all.find(is)?, value));
    }
    let mut letters = text.chars().skip(1);
    let letter = letters.next()?;
    Some((all.find(|arg| arg.get_short() == Some(letter))?, letters.next().is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_the_words_behind_a_run_configuration_are_a_script_and_its_arguments() {
        let separated = |line: &str| {
            let words = separate(line.split(' ').map(OsString::from).collect());
            words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
        };
        for (line, expected) in [
            ("agentctl submit -e E -c N t.py --lr 0.1", "agentctl submit -e E -c N -- t.py --lr 0.1"),
            ("agentctl run -cN t.py -c 3", "agentctl run -cN -- t.py -c 3"),
            (
                "agentctl -q submit p --config=N --gpus 1 t.py",
                "agentctl -q submit p --config=N --gpus 1 -- t.py",
            ),
            (
                "agentctl submit --run-configuration-name N t.py",
                "agentctl submit --run-configuration-name N -- t.py",
            ),
        ] {
            assert_eq!(separated(line), expected);
        }
        for line in [
            "agentctl submit -e E -c N",
            "agentctl submit p -c N -- t.py",
            "agentctl submit t.py -- -c N",
            "agentctl submit p --bogus -c N t.py",
            "agentctl jobs -c N t.py",
            "agentctl",
        ] {
            assert_eq!(separated(line), line);
        }
    }
}
