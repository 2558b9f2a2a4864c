//! The arguments that choose jobs by name, state or experiment.

use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use super::lasting;
use super::submit::pair;

/// Which jobs are listed.
#[derive(Debug, Args)]
pub(crate) struct WhichJobs {
    /// Every job there is.
    #[arg(long, conflicts_with = "limit")]
    pub(crate) all: bool,
    /// At most this many.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: u32,
    /// Only jobs that have not ended.
    #[arg(long)]
    pub(crate) active: bool,
    /// Only yours.
    #[arg(long)]
    pub(crate) mine: bool,
    /// Only those of this user.
    #[arg(long, value_name = "NAME", conflicts_with = "mine")]
    pub(crate) user: Option<String>,
    /// Only those in this state.
    #[arg(long, value_name = "STATE", ignore_case = true, value_parser = state())]
    pub(crate) state: Option<String>,
    /// Only those of this experiment.
    #[arg(long, value_name = "NAME")]
    pub(crate) experiment: Option<String>,
}

impl WhichJobs {
    /// Not every job is meant.
    pub(crate) fn is_narrowed(&self) -> bool {
        self.mine || self.active || self.user.is_some() || self.state.is_some() || self.experiment.is_some()
    }
}

#[derive(Debug, Args)]
pub(crate) struct JobsArgs {
    /// The tasks of this array that were started.
    #[arg(value_name = "JOB")]
    pub(crate) array: Option<String>,
    #[command(flatten)]
    pub(crate) listed: WhichJobs,
    /// Show them anew whenever something changes, until Ctrl-C.
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) watch: bool,
    /// Which columns: wide, or some of name, state, age, time, exit, owner, node, gpus, cpus, memory, experiment, title,
    /// what, metric:NAME and param:NAME, with commas between them.
    #[arg(long, short, value_name = "COLUMNS", conflicts_with = "json")]
    pub(crate) output: Option<ColumnList>,
    /// In the order of this column, the least first; with a `-` before it the greatest. Those that are not listed, because
    /// there are more than --limit, are not looked at.
    #[arg(long, value_name = "COLUMN", allow_hyphen_values = true, conflicts_with = "json")]
    pub(crate) sort: Option<SortKey>,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RunsArgs {
    /// Only these, or the tasks of these arrays, sweeps and pipelines; otherwise the latest.
    #[arg(value_name = "JOB")]
    pub(crate) jobs: Vec<String>,
    #[command(flatten)]
    pub(crate) listed: WhichJobs,
    /// Only those with this tag.
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub(crate) tag: Vec<(String, String)>,
    /// The best first: that with the least last value of this metric.
    #[arg(long, value_name = "METRIC")]
    pub(crate) minimize: Option<String>,
    /// The best first: that with the greatest last value of this metric.
    #[arg(long, value_name = "METRIC", conflicts_with = "minimize")]
    pub(crate) maximize: Option<String>,
    /// Only this metric; may be repeated.
    #[arg(long, value_name = "NAME")]
    pub(crate) metric: Vec<String>,
    /// Only this parameter; may be repeated. Otherwise those that are not the same in all.
    #[arg(long, value_name = "NAME")]
    pub(crate) param: Vec<String>,
    /// As CSV, with every parameter and metric.
    #[arg(long, conflicts_with = "json")]
    pub(crate) csv: bool,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What a column of `agentctl jobs` shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Column {
    Name,
    State,
    Age,
    Time,
    Exit,
    Owner,
    Node,
    Gpus,
    Cpus,
    Memory,
    Experiment,
    Title,
    /// Why it waits, what is done for it now, and its title.
    What,
    /// The last value of this metric.
    Metric(String),
    /// This parameter.
    Param(String),
}

impl Column {
    const PLAIN: [Column; 13] = [
        Column::Name,
        Column::State,
        Column::Age,
        Column::Time,
        Column::Exit,
        Column::Owner,
        Column::Node,
        Column::Gpus,
        Column::Cpus,
        Column::Memory,
        Column::Experiment,
        Column::Title,
        Column::What,
    ];

    /// Above it, and in small letters as it is asked for.
    pub(crate) fn heading(&self) -> &str {
        match self {
            Column::Name => "NAME",
            Column::State => "STATE",
            Column::Age => "AGE",
            Column::Time => "TIME",
            Column::Exit => "EXIT",
            Column::Owner => "OWNER",
            Column::Node => "NODE",
            Column::Gpus => "GPUS",
            Column::Cpus => "CPUS",
            Column::Memory => "MEMORY",
            Column::Experiment => "EXPERIMENT",
            Column::Title => "TITLE",
            Column::What => "WHAT",
            Column::Metric(name) | Column::Param(name) => name,
        }
    }

    /// Whether it holds numbers.
    pub(crate) fn is_number(&self) -> bool {
        use Column::{Age, Cpus, Exit, Gpus, Memory, Metric, Param, Time};
        matches!(self, Age | Time | Exit | Gpus | Cpus | Memory | Metric(_) | Param(_))
    }

    /// Whether it is of what a job recorded.
    pub(crate) fn is_recorded(&self) -> bool {
        matches!(self, Column::Metric(_) | Column::Param(_))
    }
}

impl std::str::FromStr for Column {
    type Err = String;

    fn from_str(word: &str) -> Result<Column, String> {
        match word.split_once(':') {
            Some(("metric", name)) if !name.is_empty() => return Ok(Column::Metric(name.to_owned())),
            Some(("param", name)) if !name.is_empty() => return Ok(Column::Param(name.to_owned())),
            _ => {}
        }
        let known = || Column::PLAIN.map(|column| column.heading().to_lowercase()).join(", ");
        let found = Column::PLAIN.into_iter().find(|column| column.heading().eq_ignore_ascii_case(word));
        found.ok_or_else(|| {
            format!("there is no column `{word}`; there are {}, metric:NAME and param:NAME", known())
        })
    }
}

/// The order of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SortKey {
    pub(crate) column: Column,
    /// The greatest first.
    pub(crate) greatest: bool,
}

impl std::str::FromStr for SortKey {
    type Err = String;

    fn from_str(word: &str) -> Result<SortKey, String> {
        let greatest = word.starts_with('-');
        Ok(SortKey { column: word.strip_prefix('-').unwrap_or(word).parse()?, greatest })
    }
}

/// The columns of a table, in their order.
#[derive(Debug, Clone)]
pub(crate) struct ColumnList(pub(crate) Vec<Column>);

impl std::str::FromStr for ColumnList {
    type Err = String;

    fn from_str(text: &str) -> Result<ColumnList, String> {
        use Column::{Age, Cpus, Exit, Gpus, Memory, Name, Node, Owner, State, Time, What};
        if text == "wide" {
            return Ok(ColumnList(vec![Name, State, Age, Time, Exit, Owner, Node, Gpus, Cpus, Memory, What]));
        }
        let columns = text.trim_start_matches("columns=").split(',');
        columns.map(str::parse).collect::<Result<_, _>>().map(ColumnList)
    }
}

/// Some of the caller's own jobs: by name, or by what they are.
#[derive(Debug, Args)]
#[group(id = "chosen", required = true, multiple = true)]
pub(crate) struct Selection {
    /// The jobs' names, or the beginnings of them; `-` is your last one.
    #[arg(conflicts_with_all = ["all", "state", "experiment", "user"])]
    pub(crate) jobs: Vec<String>,
    /// Every one of yours.
    #[arg(long)]
    pub(crate) all: bool,
    /// Those of yours in this state.
    #[arg(long, value_name = "STATE", ignore_case = true, value_parser = state())]
    pub(crate) state: Option<String>,
    /// Those of yours of this experiment.
    #[arg(long, value_name = "NAME")]
    pub(crate) experiment: Option<String>,
    /// Those of this user instead of yours; for operators.
    #[arg(long, value_name = "NAME", conflicts_with = "all")]
    pub(crate) user: Option<String>,
}

/// What `agentctl jobs` shows as a job's state.
const STATES: [&str; 8] =
    ["Queued", "Preparing", "Running", "Finalizing", "NotResponding", "Completed", "Failed", "Canceled"];

/// A state in any case, as the name that it has everywhere else.
fn state() -> impl TypedValueParser<Value = String> {
    PossibleValuesParser::new(STATES).map(|given| {
        let known = STATES.into_iter().find(|state| state.eq_ignore_ascii_case(&given));
        known.map_or(given, str::to_owned)
    })
}

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    #[command(flatten)]
    pub(crate) choice: Selection,
    /// Of those only jobs that ended so long ago, for example 12h or 30d.
    #[arg(long, value_name = "TIME", value_parser = lasting, group = "chosen", conflicts_with = "jobs")]
    pub(crate) older_than: Option<Duration>,
    /// Do not ask before several are removed.
    #[arg(long)]
    pub(crate) yes: bool,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CancelArgs {
    #[command(flatten)]
    pub(crate) choice: Selection,
    /// Return when they have ended.
    #[arg(long)]
    pub(crate) wait: bool,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
