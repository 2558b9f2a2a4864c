//! The options of `sbatch`: which there are, and how a line of a script is split into them.

use std::collections::BTreeMap;
use std::fmt::Display;

use crate::section::{Rejection, Warning, nearest};
use crate::yaml::Place;

/// The beginning of a line with options.
const MARK: &str = "#SBATCH";

/// What an option has to do with here.
#[derive(Debug, Clone, Copy)]
enum Effect {
    /// It is read.
    Read,
    /// Without it the job is the same.
    None,
    /// It has no effect, and this is what to do about that.
    Told(&'static str),
}

/// Whether an option has a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Takes {
    Value,
    /// Only with `=`.
    Perhaps,
    Nothing,
}

/// An option.
#[derive(Debug)]
struct OptionRow {
    long: &'static str,
    short: Option<char>,
    takes: Takes,
    effect: Effect,
}

const fn read(long: &'static str, short: Option<char>) -> OptionRow {
    OptionRow { long, short, takes: Takes::Value, effect: Effect::Read }
}

const fn told(long: &'static str, short: Option<char>, takes: Takes, what: &'static str) -> OptionRow {
    OptionRow { long, short, takes, effect: Effect::Told(what) }
}

const fn none(long: &'static str, short: Option<char>, takes: Takes) -> OptionRow {
    OptionRow { long, short, takes, effect: Effect::None }
}

const LOGS: &str =
    "what the script prints is in `agentctl logs JOB`; a file for later belongs into ./outputs";
const MAIL: &str = "nobody is sent mail: `agentctl wait JOB` returns at the end of a job";
const LABELS: &str = "machines are chosen by their labels, `resources: {labels: {KEY: VALUE}}` in a job file";
const ACCOUNTS: &str = "jobs are counted for the user who submits them";
const TOPOLOGY: &str = "processors and GPUs are counted and not bound: ask for their number";
const AGAIN: &str = "after a failure the job is tried again with `retry: {max_attempts: 2}` in a job file";
const WHOLE: &str = "jobs share a machine: ask for all of its GPUs, CPUs or memory";
const TURN: &str = "use `queue_settings: {priority: high}` in a job file";
const LATER: &str = "`agentctl hold JOB` keeps a job from starting, `agentctl release JOB` lets it go";
const IMAGE: &str = "name the image in a job file: `environment: {image: IMAGE}`";
const SIGNAL: &str =
    "a job that is ended gets SIGTERM, and SIGKILL when `limits: {grace: 30}` of a job file is over";

use Takes::{Nothing, Perhaps, Value};

/// Every option of `sbatch` that scripts have.
#[rustfmt::skip]
static OPTIONS: &[OptionRow] = &[
    read("job-name", Some('J')), read("array", Some('a')), read("time", Some('t')), read("nodes", Some('N')),
    read("ntasks", Some('n')), read("ntasks-per-node", None), read("cpus-per-task", Some('c')), read("mem", None),
    read("mem-per-cpu", None), read("mem-per-gpu", None), read("gres", None), read("gpus", Some('G')),
    read("gpus-per-node", None), read("gpus-per-task", None), read("cpus-per-gpu", None),
    read("partition", Some('p')), read("dependency", Some('d')), read("export", None), read("chdir", Some('D')),
    told("output", Some('o'), Value, LOGS), told("error", Some('e'), Value, LOGS),
    told("mail-type", None, Value, MAIL), told("mail-user", None, Value, MAIL),
    told("constraint", Some('C'), Value, LABELS), told("prefer", None, Value, LABELS),
    told("nodelist", Some('w'), Value, LABELS), told("exclude", Some('x'), Value, LABELS),
    told("nodefile", Some('F'), Value, LABELS), told("reservation", None, Value, LABELS),
    told("licenses", Some('L'), Value, LABELS), told("clusters", Some('M'), Value, "choose another controller with `--context`"),
    told("account", Some('A'), Value, ACCOUNTS), told("qos", Some('q'), Value, ACCOUNTS),
    told("wckey", None, Perhaps, ACCOUNTS),
    told("ntasks-per-gpu", None, Value, TOPOLOGY), told("ntasks-per-socket", None, Value, TOPOLOGY),
    told("gpus-per-socket", None, Value, TOPOLOGY), told("sockets-per-node", None, Value, TOPOLOGY),
    told("cores-per-socket", None, Value, TOPOLOGY), told("mincpus", None, Value, TOPOLOGY),
    told("tres-per-task", None, Value, TOPOLOGY),
    told("requeue", None, Nothing, AGAIN), told("exclusive", None, Perhaps, WHOLE),
    told("nice", None, Perhaps, TURN), told("priority", None, Value, TURN),
    read("begin", Some('b')), read("deadline", None), told("hold", Some('H'), Nothing, LATER),
    told("time-min", None, Value, "`--time` alone counts"),
    told("signal", None, Value, SIGNAL), told("tmp", None, Value, "room on a disk is not asked for"),
    told("input", Some('i'), Value, "read the file in the script: `<FILE`"),
    told("container", None, Value, IMAGE), told("container-image", None, Value, IMAGE),
    told("container-mounts", None, Value, IMAGE), told("container-workdir", None, Value, IMAGE),
    told("wrap", None, Value, "write the command into the script"),
    told("wait", Some('W'), Nothing, "`agentctl run` follows a job to its end"),
    told("test-only", None, Nothing, "use `--dry-run`"),
    told("x11", None, Perhaps, "jobs have no display"),
    // Without these a job is the same here.
    none("comment", None, Value), none("open-mode", None, Value), none("no-requeue", None, Nothing),
    none("kill-on-invalid-dep", None, Value), none("hint", None, Value), none("threads-per-core", None, Value),
    none("ntasks-per-core", None, Value), none("distribution", Some('m'), Value), none("mem-bind", None, Value),
    none("gpu-bind", None, Value), none("cpu-bind", None, Value), none("cpu-freq", None, Value),
    none("gpu-freq", None, Value), none("gres-flags", None, Value), none("switches", None, Value),
    none("contiguous", None, Nothing), none("overcommit", Some('O'), Nothing),
    none("oversubscribe", Some('s'), Nothing), none("share", None, Nothing), none("spread-job", None, Nothing),
    none("use-min-nodes", None, Nothing), none("no-kill", Some('k'), Perhaps), none("propagate", None, Perhaps),
    none("get-user-env", None, Perhaps), none("export-file", None, Value), none("profile", None, Value),
    none("acctg-freq", None, Value), none("core-spec", Some('S'), Value), none("thread-spec", None, Value),
    none("extra-node-info", Some('B'), Value), none("wait-all-nodes", None, Value), none("reboot", None, Nothing),
    none("delay-boot", None, Value), none("power", None, Value), none("network", None, Value),
    none("quiet", Some('Q'), Nothing), none("verbose", Some('v'), Nothing), none("parsable", None, Nothing),
    none("ignore-pbs", None, Nothing), none("uid", None, Value), none("gid", None, Value), none("bb", None, Value),
    none("bbf", None, Value), none("extra", None, Value),
];

/// What was given to an option, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GivenOption {
    pub(super) option: &'static str,
    pub(super) value: String,
    pub(super) place: Place,
}

impl GivenOption {
    /// The value is wrong.
    pub(super) fn refuse(&self, message: impl Display) -> Rejection {
        Rejection::invalid(self.place, format!("`--{}`: {message}", self.option))
    }
}

/// The options that are read, each as it was given last.
#[derive(Debug, Default)]
pub(super) struct GivenOptions(BTreeMap<&'static str, GivenOption>);

impl GivenOptions {
    /// What was given to this one.
    pub(super) fn take(&mut self, long: &str) -> Option<GivenOption> {
        debug_assert!(OPTIONS.iter().any(|known| known.long == long), "`--{long}` is in no table");
        self.0.remove(long)
    }
}

/// The lines with options: those before the first command. Each with its number, and what follows the mark.
pub(super) fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let comments = (1..).zip(text.lines()).take_while(|(_, line)| {
        let line = line.trim();
        line.is_empty() || line.starts_with('#')
    });
    comments.filter_map(|(number, line)| {
        let rest = line.strip_prefix(MARK)?;
        rest.starts_with(|c: char| c.is_whitespace()).then_some((number, rest))
    })
}

/// A word, and its column.
type Word = (usize, String);

/// The words of a line, as a shell splits them; a `#` of its own begins a comment.
fn words(line: &str) -> Vec<Word> {
    let (mut words, mut word): (Vec<Word>, Option<Word>) = (Vec::new(), None);
    let mut quote = None;
    let mut characters = (MARK.len() + 1..).zip(line.chars());
    while let Some((column, c)) = characters.next() {
        match (quote, c) {
            (None, '#') if word.is_none() => break,
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert((column, String::new()));
            }
            (Some(open), c) if c == open => quote = None,
            (None | Some('"'), '\\') => {
                let escaped = characters.next().map_or('\\', |(_, c)| c);
                word.get_or_insert((column, String::new())).1.push(escaped);
            }
            (_, c) => word.get_or_insert((column, String::new())).1.push(c),
        }
    }
    words.extend(word);
    words
}

/// The options that are read, and what there is to say about all others.
pub(super) fn in_script(text: &str) -> (GivenOptions, Vec<Warning>) {
    let (mut options, mut warnings) = (GivenOptions::default(), Vec::new());
    for (line, rest) in lines(text) {
        let mut words = words(rest).into_iter().peekable();
        while let Some((column, word)) = words.next() {
            let place = Place { line, column };
            let mut next = |takes: Takes| {
                let follows = words.peek().is_some_and(|(_, next)| !next.starts_with('-'));
                if takes == Value && follows { words.next().map(|(_, next)| next) } else { None }
            };
            let (known, value) = match split(&word) {
                Ok((known, value)) => (known, value.or_else(|| next(known.takes))),
                Err(told) => {
                    if word.starts_with('-') && !word.contains('=') {
                        let _value = next(Value);
                    }
                    warnings.push(Warning::new(place, told));
                    continue;
                }
            };
            match known.effect {
                Effect::None => {}
                Effect::Told(what) => {
                    warnings.push(Warning::new(place, format!("`--{}` has no effect: {what}", known.long)));
                }
                Effect::Read => {
                    let given = GivenOption { option: known.long, value: value.unwrap_or_default(), place };
                    options.0.insert(known.long, given);
                }
            }
        }
    }
    (options, shortened(warnings))
}

/// One advice is told once: `--output` and `--error` have the same.
fn shortened(warnings: Vec<Warning>) -> Vec<Warning> {
    let mut kept: Vec<Warning> = Vec::new();
    for warning in warnings {
        let advice =
            |warning: &Warning| warning.message.split_once(": ").map(|(_, advice)| advice.to_owned());
        if advice(&warning).is_none_or(|new| !kept.iter().any(|kept| advice(kept).as_ref() == Some(&new))) {
            kept.push(warning);
        }
    }
    kept
}

/// `--name=value`, `--name`, `-x` or `-xvalue`; or what is wrong with it.
fn split(word: &str) -> Result<(&'static OptionRow, Option<String>), String> {
    let value = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    if let Some(long) = word.strip_prefix("--") {
        let (name, given) = long.split_once('=').map_or((long, None), |(name, given)| (name, Some(given)));
        let known = OPTIONS.iter().find(|known| known.long == name);
        return known.map(|known| (known, given.map(str::to_owned))).ok_or_else(|| {
            let names: Vec<&str> = OPTIONS.iter().map(|known| known.long).collect();
            match nearest(name, &names) {
                Some(meant) => {
                    format!("`--{name}` is not known and has no effect; did you mean `--{meant}`?")
                }
                None => format!("`--{name}` is not known and has no effect"),
            }
        });
    }
    let mut characters = word.strip_prefix('-').unwrap_or_default().chars();
    let short = characters.next();
    match OPTIONS.iter().find(|known| short.is_some() && known.short == short) {
        Some(known) => Ok((known, value(characters.as_str().trim_start_matches('=')))),
        None => Err(format!("`{word}` is not known and has no effect")),
    }
}
