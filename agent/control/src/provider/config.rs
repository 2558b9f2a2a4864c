//! What the configuration says about providers.
//!
//! Owns the keys that are the same for all of them; every other key is a setting, which the provider's program gets as
//! it is. A plain value of a setting is a text, as everywhere in YAML files of this product: `3.10` stays `3.10`.

use std::collections::BTreeMap;
use std::time::Duration;

use agent_jobfile::yaml::{At, Entries, Node, Value as Yaml};
use agent_model::NodeId;
use agent_model::joining::Package;
use agent_model::node::Slots;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// How long a call may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadlines {
    /// To make a machine.
    pub create: Duration,
    /// To list machines.
    pub list: Duration,
    /// To take a machine away.
    pub delete: Duration,
    /// For a machine that was made, to join.
    pub join: Duration,
}

impl Default for Deadlines {
    fn default() -> Deadlines {
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        Deadlines { create: minutes(10), list: minutes(1), delete: minutes(5), join: minutes(15) }
    }
}

/// The longest deadline, and the shortest.
const LONGEST: Duration = Duration::from_secs(3600);
const SHORTEST: Duration = Duration::from_secs(1);

/// What a node of a provider has, as far as it was said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NodeShape {
    /// How many jobs it runs at a time.
    pub slots: Option<Slots>,
    /// Its processors.
    pub cpus: Option<u32>,
    /// Its memory in bytes.
    pub memory: Option<u64>,
    /// Its GPUs.
    pub gpus: Option<u32>,
}

/// One provider.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProviderConfig {
    /// Its program: a word, or an absolute path.
    pub program: String,
    /// What its nodes have.
    pub node: NodeShape,
    /// Where new machines get agentd from, for cloud-init.
    pub package: Package,
    /// How long its calls may take.
    pub deadlines: Deadlines,
    /// Variables of its program.
    pub environment: BTreeMap<String, String>,
    /// What its program alone understands.
    pub settings: Map<String, Value>,
}

/// Reads the value of `providers`: a mapping of names to what each is.
pub fn read_providers(node: Node) -> Result<BTreeMap<String, ProviderConfig>, At> {
    if matches!(node.value, Yaml::Null) {
        return Ok(BTreeMap::new()); // an empty file
    }
    let one = |(key, node): (agent_jobfile::yaml::Key, Node)| {
        let fault = |message| At { place: key.place, message };
        key.text.parse::<NodeId>().map_err(|error| fault(format!("`{}`: {}", key.text, error.rule)))?;
        Ok((key.text.clone(), read_provider(node)?))
    };
    node.map()?.rest().into_iter().map(one).collect()
}

fn read_provider(node: Node) -> Result<ProviderConfig, At> {
    let (place, mut entries) = (node.place, node.map()?);
    let Some(program) = entries.take("use") else {
        let message = "`use` is missing: the name of a provider's program, or an absolute path".to_owned();
        return Err(At { place, message });
    };
    let package = match entries.take("package") {
        Some(node) => {
            Package::parse(node.text()?).map_err(|error| node.fault(format!("{error}: {}", error.fix)))?
        }
        None => Package::InImage,
    };
    Ok(ProviderConfig {
        program: read_program(&program)?,
        node: entries.take("node").map(read_shape).transpose()?.unwrap_or_default(),
        package,
        deadlines: entries.take("deadlines").map(read_deadlines).transpose()?.unwrap_or_default(),
        environment: entries.take("environment").map(read_environment).transpose()?.unwrap_or_default(),
        settings: entries.rest().into_iter().map(|(key, node)| (key.text, json_of(&node))).collect(),
    })
}

/// A word can name nothing outside of the directory of programs.
fn read_program(node: &Node) -> Result<String, At> {
    let text = node.text()?;
    let is_path = text.starts_with('/') && !text.ends_with('/');
    match is_path || text.parse::<NodeId>().is_ok() {
        true => Ok(text.to_owned()),
        false => Err(node.fault(format!(
            "`{text}` is no provider's program: write its name, for example `docker`, or an absolute path"
        ))),
    }
}

fn read_shape(node: Node) -> Result<NodeShape, At> {
    let mut entries = node.map()?;
    let mut number = |key, most: u32, what| {
        let read = |node: Node| {
            let count = node.parsed::<u32>(what)?;
            match count <= most && (count > 0 || key == "gpus") {
                true => Ok(count),
                false => Err(node.fault(format!("expected {what}, found `{count}`"))),
            }
        };
        entries.take(key).map(read).transpose()
    };
    let shape = NodeShape {
        slots: None,
        cpus: number("cpus", 65_536, "a number of processors from 1 to 65536")?,
        gpus: number("gpus", 1024, "a number of GPUs up to 1024")?,
        memory: None,
    };
    let memory = entries.take("memory").map(|node| match agent_model::size::parse(node.text()?) {
        Some(bytes @ 1..) => Ok(bytes),
        _ => Err(node.fault(format!("expected a size such as `8gb`, found `{}`", node.text()?))),
    });
    let slots = entries.take("slots").map(|node| node.parsed::<Slots>(Slots::EXPECTED)).transpose()?;
    let shape = NodeShape { slots, memory: memory.transpose()?, ..shape };
    nothing_else(entries, "slots, cpus, memory and gpus")?;
    Ok(shape)
}

fn read_deadlines(node: Node) -> Result<Deadlines, At> {
    let (usual, mut entries) = (Deadlines::default(), node.map()?);
    let mut time = |key, usual| match entries.take(key) {
        Some(node) => read_time(&node),
        None => Ok(usual),
    };
    let (create, list) = (time("create", usual.create)?, time("list", usual.list)?);
    let (delete, join) = (time("delete", usual.delete)?, time("join", usual.join)?);
    let deadlines = Deadlines { create, list, delete, join };
    nothing_else(entries, "create, list, delete and join")?;
    Ok(deadlines)
}

fn read_time(node: &Node) -> Result<Duration, At> {
    let text = node.text()?.trim();
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let factor = match unit {
        "s" => Some(1),
        "m" => Some(60),
        "h" => Some(3600),
        _ => None,
    };
    let seconds = factor.zip(number.parse::<u64>().ok()).and_then(|(factor, n)| n.checked_mul(factor));
    let time = seconds.map(Duration::from_secs).filter(|time| (SHORTEST..=LONGEST).contains(time));
    time.ok_or_else(|| node.fault(format!("expected a time from `1s` to `1h`, found `{text}`")))
}

fn read_environment(node: Node) -> Result<BTreeMap<String, String>, At> {
    let pair = |(key, node): (agent_jobfile::yaml::Key, Node)| {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        match !key.text.is_empty() && key.text.chars().all(is_name) {
            true => Ok((key.text, node.text()?.to_owned())),
            false => {
                Err(At { place: key.place, message: format!("`{}` is no name of a variable", key.text) })
            }
        }
    };
    node.map()?.rest().into_iter().map(pair).collect()
}

fn nothing_else(entries: Entries, known: &str) -> Result<(), At> {
    match entries.rest().into_iter().next() {
        Some((key, _)) => {
            let message = format!("unknown key `{}`; the keys are {known}", key.text);
            Err(At { place: key.place, message })
        }
        None => Ok(()),
    }
}

/// YAML as JSON, in which every plain value is a text.
pub fn json_of(node: &Node) -> Value {
    match &node.value {
        Yaml::Null => Value::Null,
        Yaml::Scalar(text) => Value::String(text.clone()),
        Yaml::List(items) => Value::Array(items.iter().map(json_of).collect()),
        Yaml::Map(entries) => {
            Value::Object(entries.iter().map(|(key, node)| (key.text.clone(), json_of(node))).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use agent_jobfile::yaml;
    use serde_json::json;

    use super::*;

    fn read(text: &str) -> Result<BTreeMap<String, ProviderConfig>, String> {
        yaml::parse(text).and_then(read_providers).map_err(|at| at.to_string())
    }

    #[test]
    fn test_what_is_not_known_is_a_setting() {
        let all = read(
            "lab: {use: docker, image: 'node:1', run_args: [--cpus, 2], node: {slots: 2, cpus: 4, memory: 8gb}}\n\
             burst:\n  use: /opt/slurm\n  node: {gpus: 0}\n  deadlines: {list: 5s, create: 1h}\n  \
             environment: {HOME: /root}\n  package: https://a.lab/x.deb\n",
        )
        .unwrap();
        let lab = &all["lab"];
        assert_eq!(lab.program, "docker");
        let shape =
            NodeShape { slots: Some(Slots::Number(2)), cpus: Some(4), memory: Some(8 << 30), gpus: None };
        assert_eq!((lab.node, lab.deadlines), (shape, Deadlines::default()));
        assert_eq!(
            Value::Object(lab.settings.clone()),
            json!({"image": "node:1", "run_args": ["--cpus", "2"]})
        );
        let burst = &all["burst"];
        assert_eq!((burst.program.as_str(), burst.node.gpus), ("/opt/slurm", Some(0)));
        let due = Deadlines {
            create: Duration::from_secs(3600),
            list: Duration::from_secs(5),
            ..Deadlines::default()
        };
        assert_eq!(burst.deadlines, due);
        assert_eq!(burst.environment["HOME"], "/root");
        assert!(matches!(&burst.package, Package::At { url, .. } if url == "https://a.lab/x.deb"));
        let kept = serde_json::to_string(&all).unwrap();
        assert_eq!(serde_json::from_str::<BTreeMap<String, ProviderConfig>>(&kept).unwrap(), all);
    }

    #[test]
    fn test_the_providers_of_the_guide_are_read() {
        let guides = [include_str!("../../../docs/providers.md"), include_str!("../../../docs/pools.md")];
        let blocks = guides.iter().flat_map(|guide| guide.split("```yaml\n").skip(1));
        let texts = blocks.filter_map(|rest| rest.split("```").next());
        let all: BTreeMap<String, ProviderConfig> =
            texts.flat_map(|text| read_providers(yaml::parse(text).unwrap()).unwrap()).collect();
        let mut programs: Vec<&str> = all.values().map(|one| one.program.as_str()).collect();
        programs.sort_unstable();
        programs.dedup();
        assert_eq!(programs, ["command", "docker", "kubernetes", "slurm", "ssh"]);
    }

    #[test]
    fn test_an_empty_file_names_none() {
        for text in ["", "# none yet\n", "{}"] {
            assert_eq!(read(text).unwrap(), BTreeMap::new(), "{text}");
        }
    }

    #[test]
    fn test_mistakes_are_told_with_their_place() {
        for (text, what) in [
            ("lab: docker", "line 1, column 6: expected a mapping, found"),
            ("lab: {image: x}", "line 1, column 6: `use` is missing"),
            ("'a b': {use: docker}", "line 1, column 1: `a b`: it may hold only"),
            ("lab: {use: ../docker}", "line 1, column 12: `../docker` is no provider's program"),
            ("lab: {use: docker, node: {slots: 0}}", "line 1, column 34: expected a number of jobs"),
            ("lab: {use: docker, node: {cpu: 2}}", "line 1, column 27: unknown key `cpu`"),
            ("lab: {use: docker, node: {memory: much}}", "line 1, column 35: expected a size"),
            ("lab: {use: docker, deadlines: {list: 0s}}", "line 1, column 38: expected a time from"),
            ("lab: {use: docker, deadlines: {list: 2h}}", "line 1, column 38: expected a time from"),
            ("lab: {use: docker, environment: {A-B: x}}", "line 1, column 34: `A-B` is no name"),
            ("lab: {use: docker, package: x.deb}", "line 1, column 29: `x.deb` is no address"),
        ] {
            let found = read(text).unwrap_err();
            assert!(found.starts_with(what), "{text}: {found}");
        }
    }
}
