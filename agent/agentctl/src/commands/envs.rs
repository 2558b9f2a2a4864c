//! `envs`: the environments that machines keep.
//!
//! The inventory of a machine lists its environments; locks and build logs are blobs that it names. [`find`] hides
//! the search: a key may be shortened, and the machine left out, as long as only one environment matches.

mod build;
mod show;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use agent_model::node::CachedEnvironment;
use agent_model::{Clock, Digest, Fault, SystemClock, Timestamp, size};
use agent_proto::v1;
use serde::Serialize;
use serde_json::json;

use super::view::{EnvironmentView, NodeView};
use crate::cli::{EnvArgs, EnvsVerb};
use crate::client::{Client, Target, answer_within};
use crate::failure::Failure;
use crate::output::table::{Cell, Table};
use crate::output::text::{Tone, age};
use crate::output::{Output, Paper};

/// How long a machine may take to do something with an environment, and to report it.
const DONE_WITHIN: Duration = Duration::from_secs(75);

/// Performs a command about environments.
pub(super) async fn envs(
    verb: EnvsVerb,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    match verb {
        EnvsVerb::List { node, json } => list(node.as_deref(), json, to, output).await?,
        EnvsVerb::Show(args) => show::show(&args, to, output).await?,
        EnvsVerb::Build(args) => return build::build(args, to, output).await,
        EnvsVerb::Export { key, node, output: file } => {
            let args = EnvArgs { key, node, json: false };
            export(&args, file.as_deref(), to, output).await?;
        }
        EnvsVerb::Rm(args) => manage(&args, "remove", to, output).await?,
        EnvsVerb::Pin(args) => manage(&args, "pin", to, output).await?,
        EnvsVerb::Unpin(args) => manage(&args, "unpin", to, output).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// An environment of a machine, see `agent/docs/json.md`.
#[derive(Debug, Clone, Serialize)]
pub(super) struct KeptEnvironment {
    pub(super) node: String,
    #[serde(flatten)]
    pub(super) view: EnvironmentView,
    #[serde(skip)]
    lock: Option<Digest>,
    #[serde(skip)]
    log: Option<Digest>,
}

impl KeptEnvironment {
    pub(super) fn new(node: &str, kept: &CachedEnvironment) -> KeptEnvironment {
        KeptEnvironment { node: node.to_owned(), view: kept.into(), lock: kept.lock, log: kept.log }
    }

    fn key(&self) -> &str {
        &self.view.key
    }

    /// What keeps it from being removed: `in use`, `pinned`, or nothing.
    fn held(&self) -> String {
        let uses = (self.view.uses > 0).then(|| "in use".to_owned());
        let pinned = self.view.pinned.then(|| "pinned".to_owned());
        uses.into_iter().chain(pinned).collect::<Vec<_>>().join(", ")
    }
}

/// Every environment of every machine, or of one.
async fn all(client: &Client, node: Option<&str>) -> Result<Vec<KeptEnvironment>, Failure> {
    let nodes = client.machines().await?.nodes;
    let nodes = nodes.into_iter().map(NodeView::try_from).collect::<Result<Vec<_>, _>>()?;
    let names: Vec<&str> = nodes.iter().map(|node| node.node.as_str()).collect();
    if let Some(node) = node.filter(|node| !names.contains(node)) {
        return Err(Failure::refused(
            format!("there is no machine `{node}`"),
            format!("the machines are: {}", names.join(", ")),
        ));
    }
    let wanted = nodes.iter().filter(|of| node.is_none_or(|node| of.node == node));
    let kept = wanted
        .flat_map(|of| of.inventory.environments.iter().map(|kept| KeptEnvironment::new(&of.node, kept)));
    Ok(kept.collect())
}

async fn list(
    node: Option<&str>,
    json: bool,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let all = all(&client, node).await?;
    if json {
        return output.json(&json!({ "environments": all }));
    }
    if all.is_empty() {
        output.note("no environments are kept; one is built with the first job that needs it, or with: agentctl envs build FILE");
        return Ok(());
    }
    let paper = output.paper();
    output.print(&table(&all, SystemClock.now(), paper))
}

/// Environments as a table, with their machines when there are several.
fn table(all: &[KeptEnvironment], now: Timestamp, paper: Paper) -> String {
    let several = all.iter().any(|one| one.node != all[0].node);
    let mut headings = vec!["KEY", "PYTHON", "PACKAGES", "SIZE", "USED", "HELD", "MADE OF"];
    if several {
        headings.insert(1, "NODE");
    }
    let right = if several { [3, 4, 5] } else { [2, 3, 4] };
    let names: &[usize] = if several { &[0, 1] } else { &[0] };
    let mut table = Table::new(&headings, &right).with_names(names);
    for one in all {
        let view = &one.view;
        let tone = if view.uses > 0 { Tone::Good } else { Tone::Plain };
        let mut cells = vec![
            Cell::from(&view.key),
            Cell::from(view.python.as_deref().unwrap_or_default()),
            Cell::from(view.packages.to_string()),
            Cell::from(size::binary(view.bytes)),
            Cell::from(age(Timestamp(view.used_ms), now)),
            Cell::new(tone, one.held()),
            Cell::from(&view.summary),
        ];
        if several {
            cells.insert(1, Cell::from(&one.node));
        }
        table.row(cells);
    }
    table.render(paper)
}

/// The one environment that is meant. A key is the beginning of its name, or of the digest in it.
fn find(all: Vec<KeptEnvironment>, args: &EnvArgs) -> Result<KeptEnvironment, Failure> {
    let whole: Vec<_> = all.iter().filter(|one| one.key() == args.key).cloned().collect();
    let begins = |one: &KeptEnvironment| {
        let digest = one.key().rsplit_once('-').map_or("", |(_, digest)| digest);
        one.key().starts_with(&args.key) || digest.starts_with(&args.key)
    };
    let meant = if whole.is_empty() { all.into_iter().filter(begins).collect() } else { whole };
    let mut keys: Vec<&str> = meant.iter().map(KeptEnvironment::key).collect();
    keys.sort_unstable();
    keys.dedup();
    match (&keys[..], &meant[..]) {
        ([], _) => Err(Failure::refused(
            format!("no environment is called `{}`", args.key),
            "list them with: agentctl envs list",
        )),
        ([_], [one]) => Ok(one.clone()),
        ([key], several) => {
            let nodes: Vec<&str> = several.iter().map(|one| one.node.as_str()).collect();
            Err(Failure::refused(
                format!("{} keep `{key}`", nodes.join(" and ")),
                format!("say which with: --node {}", nodes[0]),
            ))
        }
        (several, _) => Err(Failure::refused(
            format!("`{}` may mean {}", args.key, several.join(" or ")),
            "give more of its key",
        )),
    }
}

async fn found(client: &Client, args: &EnvArgs) -> Result<KeptEnvironment, Failure> {
    find(all(client, args.node.as_deref()).await?, args)
}

async fn export(
    args: &EnvArgs,
    file: Option<&Path>,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let one = found(&client, args).await?;
    let Some(lock) = one.lock else {
        return Err(Failure::refused(
            format!("`{}` has no lock: nothing in it was chosen for it", one.key()),
            "environments of conda files and of pip requirements have one",
        ));
    };
    let lock = client.text(lock).await?;
    let Some(file) = file else { return output.print(&lock) };
    std::fs::write(file, lock).map_err(|error| {
        Failure::refused(format!("cannot write {}: {error}", file.display()), "name another file with -o")
    })?;
    let name = file.display();
    output.note(&format!("wrote {name}; in a job: environment: {{conda_file: ..., conda_lock: {name}}}"));
    Ok(())
}

async fn manage(args: &EnvArgs, want: &str, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let one = found(&client, args).await?;
    let request = v1::ManageEnvironmentRequest {
        node: one.node.clone(),
        environment: one.key().to_owned(),
        want: want.to_owned(),
    };
    output.busy(&format!("waiting for {} to {want} {}", one.node, one.key()));
    let done = answer_within(DONE_WITHIN, client.nodes().manage_environment(request)).await;
    output.rest();
    let kept = done?.environment.map(CachedEnvironment::try_from).transpose().map_err(Fault::from)?;
    let one = kept.map_or(one.clone(), |kept| KeptEnvironment::new(&one.node, &kept));
    if args.json {
        return output.json(&one);
    }
    let (node, EnvironmentView { key, bytes, .. }) = (&one.node, &one.view);
    output.note(&match want {
        "remove" => format!("removed {key} from {node}; {} are free again", size::binary(*bytes)),
        "pin" => format!(
            "{key} stays on {node}, however little room there is; let it go: agentctl envs unpin {key}"
        ),
        _ => format!("{key} may be removed from {node} to make room"),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::pretty;
    use crate::output::text::Ink;

    /// An environment of this key on this machine.
    pub(super) fn one(node: &str, key: &str) -> KeptEnvironment {
        KeptEnvironment::new(
            node,
            &CachedEnvironment {
                key: key.into(),
                summary: "conda.yml: python=3.11, scikit-learn, 2 pip packages".into(),
                python: "3.11.7".into(),
                packages: 41,
                bytes: 412 << 20,
                built: Timestamp(1_000_000),
                used: Timestamp(1_060_000),
                ..CachedEnvironment::default()
            },
        )
    }

    fn args(key: &str) -> EnvArgs {
        EnvArgs { key: key.into(), node: None, json: false }
    }

    #[test]
    fn test_table_fits_80_columns_and_names_machines_when_there_are_several() {
        let paper = Paper { ink: Ink::PLAIN, width: 80 };
        let mut pinned = one("box", "pip-0011");
        (pinned.view.pinned, pinned.view.uses, pinned.view.packages) = (true, 1, 3);
        insta::assert_snapshot!(table(&[one("box", "conda-3f0a9c1b2d4e"), pinned], Timestamp(1_180_000), paper), @r"
            KEY                 PYTHON  PACKAGES     SIZE   USED  HELD            MADE OF
            conda-3f0a9c1b2d4e  3.11.7        41  412 MiB  2 min                  conda.yml…
            pip-0011            3.11.7         3  412 MiB  2 min  in use, pinned  conda.yml…
        ");
        let far = one("gpu-worker-eu-central-1a-0123456789abcdef.internal", "conda-3f0a9c1b2d4e");
        insta::assert_snapshot!(table(&[one("box", "pip-0011"), far], Timestamp(1_180_000), paper), @r"
            KEY                 NODE                PYTHON  PACKAGES     SIZE   USED  HELD
            pip-0011            box                 3.11.7        41  412 MiB  2 min
            conda-3f0a9c1b2d4e  gpu-worke…internal  3.11.7        41  412 MiB  2 min
        ");
        let several = table(&[one("a", "pip-1"), one("b", "pip-1")], Timestamp(1_180_000), paper);
        assert!(several.contains("KEY    NODE") && several.contains("pip-1  b"), "{several}");
    }

    #[test]
    fn test_key_may_be_shortened_while_it_means_one() {
        let all =
            || vec![one("a", "conda-3f0a"), one("a", "conda-3f1b"), one("a", "pip-3f0a"), one("b", "pip-9")];
        for key in ["conda-3f0a", "conda-3f0", "pip-3", "9"] {
            assert!(find(all(), &args(key)).is_ok(), "{key}");
        }
        for (key, said) in [
            ("conda-3f", "conda-3f0a or conda-3f1b"),
            ("3f0a", "conda-3f0a or pip-3f0a"),
            ("x", "called `x`"),
        ] {
            let Err(Failure::Refused { what, .. }) = find(all(), &args(key)) else { panic!("{key}") };
            assert!(what.contains(said), "{what}");
        }
        let twice = vec![one("a", "pip-1"), one("b", "pip-1")];
        let Err(Failure::Refused { what, fix }) = find(twice, &args("pip-1")) else { panic!() };
        assert_eq!((what.as_str(), fix.as_str()), ("a and b keep `pip-1`", "say which with: --node a"));
    }

    #[test]
    fn test_json_of_an_environment_is_as_documented() {
        insta::assert_snapshot!(pretty(&one("box", "pip-1")), @r#"
            {
              "node": "box",
              "key": "pip-1",
              "summary": "conda.yml: python=3.11, scikit-learn, 2 pip packages",
              "python": "3.11.7",
              "packages": 41,
              "bytes": 432013312,
              "built_ms": 1000000,
              "used_ms": 1060000,
              "uses": 0,
              "pinned": false,
              "lock": null,
              "log": null
            }
        "#);
    }
}
