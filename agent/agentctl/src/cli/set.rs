//! The arguments of changes to jobs.

use agent_model::job::{Change, Priority};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args};

use super::{Needs, Selection};

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("changes").args(["gpus", "cpus", "memory", "time"]).required(true).multiple(true))]
pub(crate) struct SetArgs {
    #[command(flatten)]
    pub(crate) choice: Selection,
    /// Which jobs go first.
    #[arg(long, ignore_case = true, value_parser = priority(), group = "changes")]
    priority: Option<Priority>,
    #[command(flatten)]
    needs: Needs,
    /// Keep it from starting, until it is released.
    #[arg(long, group = "changes", conflicts_with = "release")]
    hold: bool,
    /// Let it start.
    #[arg(long, group = "changes")]
    release: bool,
    /// As JSON: the jobs as they are then.
    #[arg(long)]
    pub(crate) json: bool,
}

impl SetArgs {
    /// What is to be otherwise.
    pub(crate) fn change(&self) -> Change {
        let Needs { gpus, cpus, memory, time } = self.needs;
        Change {
            priority: self.priority,
            timeout: time,
            gpus,
            cpus,
            memory,
            held: (self.hold || self.release).then_some(self.hold),
        }
    }
}

fn priority() -> impl TypedValueParser<Value = Priority> {
    PossibleValuesParser::new(["low", "medium", "high"])
        .map(|word| Priority::parse(&word).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::super::{Cli, Verb};
    use super::*;

    fn change(line: &str) -> Result<Change, String> {
        let read = Cli::try_parse_from(line.split(' ')).map_err(|error| error.to_string())?;
        let Verb::Set(args) = read.verb else { panic!("not set") };
        Ok(args.change())
    }

    #[test]
    fn test_what_is_not_named_stays() {
        let expected = Change {
            priority: Some(Priority::High),
            timeout: Some(Duration::from_secs(28_800)),
            gpus: Some(2),
            held: Some(true),
            ..Change::default()
        };
        assert_eq!(change("agentctl set a b --priority HIGH --time 8h --gpus 2 --hold").unwrap(), expected);
        assert_eq!(
            change("agentctl set --all --release --memory 8g").unwrap(),
            Change { held: Some(false), memory: Some(8 << 30), ..Change::default() }
        );
        for wrong in [
            "set a",
            "set --priority high",
            "set a --hold --release",
            "set a --priority highest",
            "set a --time 0s",
        ] {
            assert!(change(&format!("agentctl {wrong}")).is_err(), "{wrong}");
        }
    }
}
