//! `diff`: in what two jobs differ.
//!
//! Both are read as a [`Side`]: texts by name in each [`Aspect`], from the record, the list of packages, the machine and
//! the tracking records. What differs is a pure function of two sides; the code alone is read from the store, file by
//! file, in [`code`].
//!
//! Only causes are compared and what they led to: never times, names and who submitted it, because those always differ.

mod code;

use std::collections::BTreeMap;

use agent_jobfile::job_entries;
use agent_jobfile::{condafile, requirement};
use agent_model::node::Inventory;
use agent_model::size;
use serde::Serialize;
use serde_json::json;

use super::recorded::Recorded;
use super::view::{JobView, NodeView};
use crate::cli::DiffArgs;
use crate::client::{Client, Target};
use crate::failure::Failure;
use crate::output::text::{Tone, clean};
use crate::output::{Output, Paper};
use code::{ChangedFile, unified};

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Aspect {
    /// The command and everything else that the job file says.
    Settings,
    /// Inputs that are values, and parameters that were logged.
    Parameters,
    /// Other inputs, and outputs.
    Data,
    Environment,
    Packages,
    Machine,
    Metrics,
    /// How it ended.
    End,
}

impl Aspect {
    const ALL: [Aspect; 8] = [
        Aspect::Settings,
        Aspect::Parameters,
        Aspect::Data,
        Aspect::Environment,
        Aspect::Packages,
        Aspect::Machine,
        Aspect::Metrics,
        Aspect::End,
    ];

    fn name(self) -> &'static str {
        match self {
            Aspect::Settings => "settings",
            Aspect::Parameters => "parameters",
            Aspect::Data => "data",
            Aspect::Environment => "environment",
            Aspect::Packages => "packages",
            Aspect::Machine => "machine",
            Aspect::Metrics => "metrics",
            Aspect::End => "end",
        }
    }
}

/// The name of the environment that was made; a job that has not ended has none yet.
const BUILT_AS: &str = "(built as)";

/// What is known of a job.
#[derive(Debug, Default)]
struct Side {
    facts: BTreeMap<(Aspect, String), String>,
    /// Parts of which nothing can be said.
    unknown: BTreeMap<Aspect, String>,
}

/// A text that is not the same on both sides; `None` where a side has none.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Difference {
    part: Aspect,
    name: String,
    one: Option<String>,
    other: Option<String>,
}

/// Compares two jobs.
pub(super) async fn diff(args: &DiffArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let one = JobView::try_from(client.job(&args.one).await?)?;
    let other = JobView::try_from(client.job(&args.other).await?)?;
    output.busy("reading both jobs");
    let nodes = client.machines().await?.nodes;
    let nodes = nodes.into_iter().map(NodeView::try_from).collect::<Result<Vec<_>, _>>()?;
    let sides = [side(&client, &one, &nodes, output).await?, side(&client, &other, &nodes, output).await?];
    let known = known(&sides);
    let found = differences(&sides, &known);
    let code = code::changed(&client, one.spec.code, other.spec.code).await;
    output.rest();
    let notes = notes([&one.job, &other.job], &sides, code.as_ref().err());
    let files = code.unwrap_or_default();
    if args.json {
        let same = found.is_empty() && one.spec.code == other.spec.code;
        let document = json!({
            "jobs": [one.job, other.job],
            "same": same,
            "differences": found,
            "files": files,
            "notes": notes,
        });
        return output.json(&document);
    }
    let same_code = one.spec.code == other.spec.code;
    let paper = output.paper();
    output.print(&render([&one.job, &other.job], &known, &found, &files, same_code, paper))?;
    notes.iter().for_each(|note| output.note(note));
    Ok(())
}

async fn side(
    client: &Client,
    job: &JobView,
    nodes: &[NodeView],
    output: &mut Output,
) -> Result<Side, Failure> {
    let mut side = Side::default();
    side.take_entries(job_entries(&job.spec));
    let used = job.outcome.as_ref().and_then(|outcome| outcome.environment.as_ref());
    match used.map(|used| (&used.key, used.lock)) {
        None => drop(side.unknown.insert(Aspect::Packages, "it has not run to an end".to_owned())),
        Some((key, lock)) => {
            side.add(Aspect::Environment, BUILT_AS, key.clone());
            match lock {
                None => {
                    let why = "nothing in its environment was chosen for it".to_owned();
                    side.unknown.insert(Aspect::Packages, why);
                }
                Some(lock) => match client.text(lock).await {
                    Ok(text) => side.take_packages(&text),
                    Err(_) => {
                        let why = "the list of its packages is not kept any more".to_owned();
                        side.unknown.insert(Aspect::Packages, why);
                    }
                },
            }
        }
    }
    side.take_machine(job, nodes);
    let recorded = Recorded::read(&client.tracking(&job.job, job.ranks(), output).await?, &[]);
    for (name, text) in &recorded.params {
        // An input of that name is the same parameter, as it was asked for.
        side.facts.entry((Aspect::Parameters, name.clone())).or_insert_with(|| text.clone());
    }
    for (name, last) in recorded.last() {
        // To the last bit: what is rounded may look the same.
        side.add(Aspect::Metrics, &name, last.to_string());
    }
    side.add(Aspect::End, "state", job.state.clone());
    side.add_some(Aspect::End, "exit code", job.exit_code.map(|code| code.to_string()));
    side.add_some(Aspect::End, "fault", job.cause().map(|fault| fault.code.as_str().to_owned()));
    Ok(side)
}

impl Side {
    fn add(&mut self, part: Aspect, name: &str, text: String) {
        self.facts.insert((part, name.to_owned()), text);
    }

    fn add_some(&mut self, part: Aspect, name: &str, text: Option<String>) {
        text.into_iter().for_each(|text| self.add(part, name, text));
    }

    /// The keys of the job file. The code is compared by itself, and the title is for people.
    fn take_entries(&mut self, entries: BTreeMap<String, String>) {
        for (key, text) in entries {
            let (section, below) = key.split_once('.').unwrap_or((&key, ""));
            match section {
                "code" | "display_name" => {}
                // A value has its name alone; a path has keys below that.
                "inputs" if ![".path", ".type", ".mode"].iter().any(|end| below.ends_with(end)) => {
                    self.add(Aspect::Parameters, below, text);
                }
                "inputs" => self.add(Aspect::Data, below, text),
                "outputs" => self.add(Aspect::Data, &key, text),
                "environment" => {
                    self.add(Aspect::Environment, if below.is_empty() { "kind" } else { below }, text)
                }
                _ => self.add(Aspect::Settings, &key, text),
            }
        }
    }

    fn take_packages(&mut self, lock: &str) {
        let Ok(lock) = condafile::parse_lock(lock) else { return };
        for package in &lock.packages {
            let file = package.url.rsplit('/').next().unwrap_or(&package.url);
            let name = package.name().unwrap_or(file);
            self.add(Aspect::Packages, name, conda_version(file, name));
        }
        for line in &lock.pip {
            let name = requirement::package(line).unwrap_or_else(|| line.clone());
            self.add(Aspect::Packages, &name, pip_version(line));
        }
    }

    /// Of the machine of each rank, what it is now.
    fn take_machine(&mut self, job: &JobView, nodes: &[NodeView]) {
        for replica in &job.replicas {
            let rank = if job.ranks() > 1 { format!(" of rank {}", replica.rank) } else { String::new() };
            self.add(Aspect::Machine, &format!("node{rank}"), replica.node.clone());
            let node = nodes.iter().find(|node| node.node == replica.node);
            for (name, text) in node.map(|node| machine(&node.inventory)).unwrap_or_default() {
                self.add(Aspect::Machine, &format!("{name}{rank}"), text);
            }
        }
    }
}

/// `1.0 (conda, py311_0)` of `NAME-1.0-py311_0.conda`: what pip installs has no build.
fn conda_version(file: &str, name: &str) -> String {
    let text = file.strip_prefix(name).unwrap_or(file).trim_start_matches('-');
    let text = text.trim_end_matches(".conda").trim_end_matches(".tar.bz2");
    match text.split_once('-') {
        Some((version, build)) => format!("{version} (conda, {build})"),
        None => text.to_owned(),
    }
}

/// `1.0` of `NAME==1.0 --hash=...`, or the name of the file that an address names.
fn pip_version(line: &str) -> String {
    let line = line.split(" --hash").next().unwrap_or(line);
    match (line.split_once("=="), line.split_once('@')) {
        (Some((_, version)), _) => version.trim().to_owned(),
        (None, Some((_, url))) => {
            let file = url.split('#').next().unwrap_or(url).rsplit('/').next().unwrap_or(url);
            file.trim().to_owned()
        }
        (None, None) => line.to_owned(),
    }
}

fn machine(inventory: &Inventory) -> Vec<(&'static str, String)> {
    let gpus: Vec<&str> = inventory.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
    let facts = [
        ("os", inventory.os.clone()),
        ("kernel", inventory.kernel.clone()),
        ("architecture", inventory.arch.clone()),
        ("processors", inventory.cpus.to_string()),
        ("memory", size::binary(inventory.memory)),
        ("GPUs", gpus.join(", ")),
        ("GPU driver", inventory.gpu_driver.clone()),
    ];
    facts.into_iter().filter(|(_, text)| !text.is_empty()).collect()
}

/// The parts that are known of both sides.
fn known(sides: &[Side; 2]) -> Vec<Aspect> {
    let is_known = |part: &Aspect| sides.iter().all(|side| !side.unknown.contains_key(part));
    Aspect::ALL.into_iter().filter(is_known).collect()
}

/// What differs, in the order of the parts; what is not known of one side is left out.
fn differences(sides: &[Side; 2], known: &[Aspect]) -> Vec<Difference> {
    let [one, other] = sides;
    let mut keys: Vec<_> = one.facts.keys().chain(other.facts.keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    let is_told =
        |found: &Difference| found.name != BUILT_AS || (found.one.is_some() && found.other.is_some());
    let of = |key: &(Aspect, String)| Difference {
        part: key.0,
        name: key.1.clone(),
        one: one.facts.get(key).cloned(),
        other: other.facts.get(key).cloned(),
    };
    keys.into_iter()
        .filter(|(part, _)| known.contains(part))
        .map(of)
        .filter(|found| found.one != found.other && is_told(found))
        .collect()
}

/// What could not be compared, and why.
fn notes(jobs: [&str; 2], sides: &[Side; 2], code: Option<&String>) -> Vec<String> {
    let of_parts = jobs.iter().zip(sides).flat_map(|(job, side)| {
        side.unknown
            .iter()
            .map(move |(part, why)| format!("{} of {job} are not compared: {why}", part.name()))
    });
    of_parts.chain(code.map(|why| format!("the code differs, and not more can be said: {why}"))).collect()
}

/// The report for people.
fn render(
    jobs: [&str; 2],
    known: &[Aspect],
    found: &[Difference],
    files: &[ChangedFile],
    same_code: bool,
    paper: Paper,
) -> String {
    let mut text = format!("- {}\n+ {}\n", clean(jobs[0]), clean(jobs[1]));
    for &part in known {
        let of_part: Vec<&Difference> = found.iter().filter(|difference| difference.part == part).collect();
        if of_part.is_empty() {
            continue;
        }
        text.push_str(&format!("\n{}\n", paper.ink.paint(Tone::Strong, part.name())));
        let width = of_part.iter().map(|difference| difference.name.chars().count()).max().unwrap_or(0);
        for difference in of_part {
            text.push_str(&render_difference(difference, width, paper));
        }
    }
    if !files.is_empty() || !same_code {
        text.push_str(&format!("\n{}\n", paper.ink.paint(Tone::Strong, "code")));
    }
    for file in files {
        text.push_str(&file.render(paper));
    }
    let same = known.iter().filter(|part| found.iter().all(|difference| difference.part != **part));
    let same: Vec<&str> = same.map(|part| part.name()).chain(same_code.then_some("code")).collect();
    if !same.is_empty() {
        text.push_str(&format!("\nno difference: {}\n", same.join(", ")));
    }
    text
}

fn render_difference(difference: &Difference, width: usize, paper: Paper) -> String {
    let Difference { name, one, other, .. } = difference;
    let texts = [one.as_deref(), other.as_deref()];
    if texts.iter().flatten().any(|text| text.contains('\n')) {
        let lines = unified(one.as_deref().unwrap_or_default(), other.as_deref().unwrap_or_default());
        return format!("  {}\n{}", clean(name), code::render_lines(&lines, paper));
    }
    let [one, other] = texts.map(|text| text.map_or("(none)".into(), clean));
    format!("  {:<width$}  {one} -> {other}\n", clean(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::text::Ink;

    const PAPER: Paper = Paper { ink: Ink::PLAIN, width: 80 };

    fn entries(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, text)| ((*key).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn test_what_differs_is_told_by_part() {
        let mut sides = [Side::default(), Side::default()];
        sides[0].take_entries(entries(&[
            ("command", "python t.py"),
            ("display_name", "a"),
            ("environment", "host"),
            ("inputs.lr", "0.1"),
            ("inputs.data.path", "https://h/a"),
            ("inputs.data.type", "uri_file"),
        ]));
        sides[1].take_entries(entries(&[
            ("command", "python t.py\npython u.py\n"),
            ("display_name", "b"),
            ("environment.python", "python3.12"),
            ("inputs.lr", "0.2"),
            ("inputs.data.path", "https://h/b"),
            ("inputs.data.type", "uri_file"),
        ]));
        let lock = |version: &str| {
            format!(
                "@EXPLICIT\nhttps://h/c/noarch/numpy-{version}-0.conda\n# pip six==1.{version} --hash=sha256:0\n"
            )
        };
        sides[0].take_packages(&lock("1"));
        sides[1].take_packages(&lock("2"));
        let known = known(&sides);
        let text = render(["one", "two"], &known, &differences(&sides, &known), &[], true, PAPER);
        insta::assert_snapshot!(text, @r"
        - one
        + two

        settings
          command
            -python t.py
            +python t.py
            +python u.py

        parameters
          lr  0.1 -> 0.2

        data
          data.path  https://h/a -> https://h/b

        environment
          kind    host -> (none)
          python  (none) -> python3.12

        packages
          numpy  1 (conda, 0) -> 2 (conda, 0)
          six    1.1 -> 1.2

        no difference: machine, metrics, end, code
        ");
    }

    #[test]
    fn test_a_part_that_is_not_known_of_one_job_is_not_compared() {
        let mut sides = [Side::default(), Side::default()];
        sides[0].add(Aspect::Packages, "numpy", "1".to_owned());
        sides[0].add(Aspect::Environment, BUILT_AS, "pip-1".to_owned());
        sides[1].unknown.insert(Aspect::Packages, "it has not run to an end".to_owned());
        let known = known(&sides);
        assert_eq!(differences(&sides, &known), []);
        let text = render(["a", "b"], &known, &[], &[], true, PAPER);
        assert!(text.ends_with("data, environment, machine, metrics, end, code\n"), "{text}");
        let notes = notes(["a", "b"], &sides, None);
        assert_eq!(notes, ["packages of b are not compared: it has not run to an end"]);
    }

    #[test]
    fn test_versions_are_read_from_every_form_of_a_line() {
        assert_eq!(
            conda_version("numpy-1.26.4-py311h64a7726_0.conda", "numpy"),
            "1.26.4 (conda, py311h64a7726_0)"
        );
        assert_eq!(conda_version("odd.tar.bz2", "odd"), "");
        for (line, version) in [
            ("six==1.0", "1.0"),
            ("six==1.0 --hash=sha256:ab", "1.0"),
            ("six @ https://h/p/six-1.0-py3-none-any.whl#sha256=ab", "six-1.0-py3-none-any.whl"),
            ("six", "six"),
        ] {
            assert_eq!(pip_version(line), version, "{line}");
        }
    }
}
