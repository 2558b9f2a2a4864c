//! Batch scripts of Slurm: what their `#SBATCH` lines ask for, as a draft.
//!
//! Owns which options have an effect here, which have none, and what to do instead of those. Hides how a line is split
//! into options. Pure: the script itself is read by its shell, as any other.
//!
//! Invariants: lines count until the first command, as with `sbatch`; of an option that is given twice the later
//! counts; whatever has no effect is named with its place, and a value that would make another job of it than was meant
//! is a mistake. What a node cannot know by itself is put into variables of the job; [`JOB_NAME`] among them is what
//! makes a node set the rest.

mod options;
mod values;

use std::num::NonZeroU32;
use std::time::Duration;

use agent_model::job::{Array, ArrayError, JobDraft, WantedEnd};

use crate::section::{Mistakes, Refused, Rejection, Warning};
use crate::yaml::Place;
use options::{GivenOption, GivenOptions};
use values::{dependency, gpus, gres, memory, time};

/// The variable that tells a node that the command is a batch script of Slurm.
pub const JOB_NAME: &str = "SLURM_JOB_NAME";

/// What a batch script asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchScript {
    /// What goes into the job. Its command, code and environment are the caller's.
    pub draft: JobDraft,
    /// The jobs it comes after, as they are named there, and how each must end.
    pub after: Vec<(String, WantedEnd)>,
    /// Where it starts, below the directory that is sent.
    pub directory: Option<String>,
    /// The variables of the caller that it wants, by name.
    pub exported: Vec<String>,
    /// Not before, as it is written there.
    pub begin: Option<(Place, String)>,
    /// By when it is to have ended, likewise.
    pub deadline: Option<(Place, String)>,
    /// What has no effect, and what to do instead.
    pub warnings: Vec<Warning>,
}

/// Whether a script asks something of Slurm.
pub fn is_batch_script(text: &str) -> bool {
    options::lines(text).next().is_some()
}

/// Reads the `#SBATCH` lines of a script; `name` is what the job is called that says nothing else.
pub fn batch_script(text: &str, name: &str) -> Result<BatchScript, Refused> {
    let (mut given, mut warnings) = options::in_script(text);
    warnings.extend(foreign(text));
    let mut wrong = Mistakes::default();
    let mut draft = JobDraft {
        display_name: given.take("job-name").map(|given| given.value).unwrap_or_default(),
        compute: partition(&mut given, &mut warnings),
        array: wrong.note(array(&mut given)),
        ..JobDraft::default()
    };
    draft.limits.timeout = wrong.note(limit(&mut given));
    let shape = wrong.note(Shape::read(&mut given, &mut warnings));
    wrong.note(needs(&mut given, &shape, &mut draft, &mut warnings));
    let (exported, directory) = surroundings(&mut given, &mut draft, &mut warnings);
    let after = match given.take("dependency") {
        Some(given) => wrong.note(dependency(&given)),
        None => Vec::new(),
    };
    let mut date = |option| given.take(option).map(|given| (given.place, given.value));
    let (begin, deadline) = (date("begin"), date("deadline"));
    let named = if draft.display_name.is_empty() { name } else { &draft.display_name };
    draft.environment_variables.insert(JOB_NAME.to_owned(), named.to_owned());
    draft.environment_variables.extend(shape.variables());
    Ok(BatchScript { draft, after, directory, exported, begin, deadline, warnings: wrong.told(warnings)? })
}

/// How many processes there are, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shape {
    nodes: u32,
    /// On each node.
    tasks: u32,
    /// Somebody said how many.
    has_tasks: bool,
    cpus_per_task: Option<u32>,
    gpus_per_task: Option<u32>,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape { nodes: 1, tasks: 1, has_tasks: false, cpus_per_task: None, gpus_per_task: None }
    }
}

impl Shape {
    fn read(given: &mut GivenOptions, warnings: &mut Vec<Warning>) -> Result<Shape, Rejection> {
        let nodes = given.take("nodes").map(|given| nodes(&given, warnings)).transpose()?;
        let all = given.take("ntasks");
        let total = all.as_ref().map(number).transpose()?;
        let each = given.take("ntasks-per-node").map(|given| number(&given)).transpose()?;
        let (nodes, tasks) = match (nodes, total, each) {
            (nodes, None, each) => (nodes.unwrap_or(1), each.unwrap_or(1)),
            (None, Some(total), Some(each)) if total <= each || total % each == 0 => {
                (total.div_ceil(each), each.min(total))
            }
            (None, Some(total), None) => (1, total),
            // As with Slurm, the number on each node is then the most.
            (Some(nodes), Some(total), _) if total % nodes == 0 => (nodes, total / nodes),
            (nodes, Some(total), each) => {
                let nodes = nodes.unwrap_or_else(|| total.div_ceil(each.unwrap_or(1)));
                let place = all.map(|given| given.place).unwrap_or_default();
                let what =
                    format!("`--ntasks`: {total} tasks are not the same number on each of {nodes} nodes");
                return Err(Rejection::invalid(place, what).fix("write `--ntasks-per-node`"));
            }
        };
        let cpus_per_task = given.take("cpus-per-task").map(|given| number(&given)).transpose()?;
        let gpus_per_task = given.take("gpus-per-task").map(|given| gpus(&given, warnings)).transpose()?;
        let has_tasks = total.or(each).is_some();
        Ok(Shape { nodes, tasks, has_tasks, cpus_per_task, gpus_per_task })
    }

    /// What no node can know by itself.
    fn variables(&self) -> impl Iterator<Item = (String, String)> + use<> {
        let values = [
            ("SLURM_NTASKS_PER_NODE", Some(self.tasks)),
            ("SLURM_CPUS_PER_TASK", self.cpus_per_task),
            ("SLURM_GPUS_PER_TASK", self.gpus_per_task),
        ];
        values.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.to_string())))
    }
}

/// Processors, memory and GPUs of each node.
fn needs(
    given: &mut GivenOptions,
    shape: &Shape,
    draft: &mut JobDraft,
    warnings: &mut Vec<Warning>,
) -> Result<(), Rejection> {
    let wants = &mut draft.resources;
    wants.nodes = shape.nodes;
    wants.gpus = gpus_of_a_node(given, shape, warnings)?;
    let per_gpu = given.take("cpus-per-gpu").map(|given| number(&given)).transpose()?;
    wants.cpus = match (shape.cpus_per_task, per_gpu) {
        (Some(cpus), _) => cpus.saturating_mul(shape.tasks),
        (None, Some(cpus)) => cpus.saturating_mul(wants.gpus),
        (None, None) if shape.has_tasks => shape.tasks,
        (None, None) => 0,
    };
    let whole = given.take("mem").map(|given| memory(&given, warnings)).transpose()?;
    let per_cpu = given.take("mem-per-cpu").map(|given| memory(&given, warnings)).transpose()?;
    let per_gpu = given.take("mem-per-gpu").map(|given| memory(&given, warnings)).transpose()?;
    let times =
        |memory: Option<u64>, count: u32| memory.map(|memory| memory.saturating_mul(count.max(1).into()));
    let per_cpu_in_all = times(per_cpu, wants.cpus);
    wants.memory = whole.or(per_cpu_in_all).or_else(|| times(per_gpu, wants.gpus)).unwrap_or(0);
    if let Some(per_cpu) = per_cpu.filter(|_| whole.is_none()) {
        let megabytes = (per_cpu >> 20).to_string();
        draft.environment_variables.insert("SLURM_MEM_PER_CPU".to_owned(), megabytes);
    }
    Ok(())
}

/// `--gres`, `--gpus-per-node`, `--gpus` or `--gpus-per-task`: the first of them that is there.
fn gpus_of_a_node(
    given: &mut GivenOptions,
    shape: &Shape,
    warnings: &mut Vec<Warning>,
) -> Result<u32, Rejection> {
    let from_gres = given.take("gres").map(|given| gres(&given, warnings)).transpose()?.flatten();
    let each = given.take("gpus-per-node").map(|given| gpus(&given, warnings)).transpose()?;
    let all = given.take("gpus");
    let total = all.as_ref().map(|given| gpus(given, warnings)).transpose()?;
    if let Some(each) = from_gres.or(each) {
        return Ok(each);
    }
    match total {
        Some(total) if total % shape.nodes != 0 => {
            let place = all.map(|given| given.place).unwrap_or_default();
            let what = format!("`--gpus`: {total} are not the same number on each of {} nodes", shape.nodes);
            Err(Rejection::invalid(place, what).fix("write `--gpus-per-node`"))
        }
        Some(total) => Ok(total / shape.nodes),
        None => Ok(shape.gpus_per_task.unwrap_or(0).saturating_mul(shape.tasks)),
    }
}

/// The variables that it wants of the caller, and the directory that it starts in. Those with values are put into the
/// draft.
fn surroundings(
    given: &mut GivenOptions,
    draft: &mut JobDraft,
    warnings: &mut Vec<Warning>,
) -> (Vec<String>, Option<String>) {
    let mut exported = Vec::new();
    if let Some(given) = given.take("export") {
        for word in given.value.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            match word.split_once('=') {
                Some((name, value)) => {
                    draft.environment_variables.insert(name.to_owned(), value.to_owned());
                }
                None if word == "ALL" => {
                    let told = "`--export=ALL` sends none of your variables: name those that the script needs, \
                                `--env NAME`";
                    warnings.push(Warning::new(given.place, told));
                }
                None if word == "NONE" || word == "NIL" => {}
                None => exported.push(word.to_owned()),
            }
        }
    }
    let directory = given.take("chdir").and_then(|given| {
        let path = given.value.trim_end_matches('/');
        let is_below = !path.starts_with(['/', '~']) && path.split('/').all(|part| part != "..");
        if !is_below {
            let told = format!(
                "`--chdir={path}` has no effect, because only one directory is sent: call agentctl in that one"
            );
            warnings.push(Warning::new(given.place, told));
        }
        (is_below && !matches!(path, "" | ".")).then(|| path.to_owned())
    });
    (exported, directory)
}

fn partition(given: &mut GivenOptions, warnings: &mut Vec<Warning>) -> Option<String> {
    let given = given.take("partition")?;
    let (first, others) = given.value.split_once(',').unwrap_or((&given.value, ""));
    if !others.is_empty() {
        let told = format!("`--partition`: a job names one pool, so {first} counts and not {others}");
        warnings.push(Warning::new(given.place, told));
    }
    Some(first.to_owned()).filter(|pool| !pool.is_empty())
}

fn array(given: &mut GivenOptions) -> Result<Option<Array>, Rejection> {
    let Some(given) = given.take("array") else { return Ok(None) };
    let refuse = |error: ArrayError| given.refuse(error).fix(ArrayError::FORM);
    given.value.parse().map(Some).map_err(refuse)
}

fn limit(given: &mut GivenOptions) -> Result<Option<Duration>, Rejection> {
    Ok(given.take("time").map(|given| time(&given)).transpose()?.flatten())
}

/// `2`, or `2-4`, of which the least counts.
fn nodes(given: &GivenOption, warnings: &mut Vec<Warning>) -> Result<u32, Rejection> {
    let Some((least, most)) = given.value.split_once('-') else { return number(given) };
    let told =
        format!("`--nodes={least}-{most}`: the job is given {least}, because it must be known how many");
    warnings.push(Warning::new(given.place, told));
    number(&GivenOption { value: least.to_owned(), ..given.clone() })
}

fn number(given: &GivenOption) -> Result<u32, Rejection> {
    let number = given.value.parse::<NonZeroU32>();
    number.map(NonZeroU32::get).map_err(|_| {
        given.refuse(format!("`{}` is no number", given.value)).fix("write a whole number of at least 1")
    })
}

/// Lines that need what machines of a cluster have, and others may not.
fn foreign(text: &str) -> Vec<Warning> {
    const SHOWN: usize = 1;
    let calls = |line: &&str| {
        ["module load ", "module purge", "ml load ", "spack load "]
            .iter()
            .any(|call| line.trim_start().starts_with(call))
    };
    let found = (1..).zip(text.lines()).filter(|(_, line)| calls(line));
    let told = |(line, text): (usize, &str)| {
        let told = format!(
            "`{}` works only where the machine has modules: say what the script needs in requirements.txt, or with \
             `--env-file`",
            text.trim()
        );
        Warning::new(Place { line, column: 1 }, told)
    };
    found.take(SHOWN).map(told).collect()
}

#[cfg(test)]
mod tests;
