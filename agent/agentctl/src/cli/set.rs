//! The arguments of changes to jobs.

use agent_model::Timestamp;
use agent_model::job::{Change, Priority};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args};

use super::{Needs, Selection, moment};

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
    /// Not before this moment, as with submit; `now` lets it start at once.
    #[arg(long, value_name = "TIME", value_parser = date, group = "changes")]
    begin: Option<Timestamp>,
    /// By this moment it is to have ended, as with submit; `none` takes the deadline away.
    #[arg(long, value_name = "TIME", value_parser = date, group = "changes")]
    deadline: Option<Timestamp>,
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
            begin: self.begin,
            deadline: self.deadline,
            held: (self.hold || self.release).then_some(self.hold),
        }
    }
}

/// A moment, or a word for none, which is 0.
fn date(text: &str) -> Result<Timestamp, String> {
    if ["now", "none"].contains(&text) { Ok(Timestamp(0)) } else { moment(text) }
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
        let none = Some(Timestamp(0));
        assert_eq!(
            change("agentctl set a --begin now --deadline none").unwrap(),
            Change { begin: none, deadline: none, ..Change::default() }
        );
        for wrong in [
            "set a",
            "set --priority high",
            "set a --hold --release",
            "set a --priority highest",
            "set a --time 0s",
            "set a --begin soon",
        ] {
            assert!(change(&format!("agentctl {wrong}")).is_err(), "{wrong}");
        }
    }
}
