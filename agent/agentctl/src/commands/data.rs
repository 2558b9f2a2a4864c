//! `data`: names for data that jobs read.
//!
//! A path is sent as an input of a job is, by content; an address stays one, and nodes fetch it. The controller gives
//! versions and decides what a name means.

use std::path::Path;

use agent_model::job::Input;
use agent_model::{DataInput, DataUri, Fault, SnapshotRef, Timestamp};
use agent_proto::v1;
use serde::Serialize;

use crate::cli::{DataCreateArgs, DataVerb, DataVersionArgs};
use crate::client::{Client, Target, answer, person};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::table::{Cell, Table};
use crate::output::text::moment;
use crate::prepare::send;

/// Performs a command about data.
pub(super) async fn data(verb: DataVerb, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    match verb {
        DataVerb::Create(args) => create(args, to, output).await,
        DataVerb::List { all, json } => {
            let mut assets = list(to, "").await?;
            assets.retain(|asset| all || !asset.archived);
            show(&assets, json, "no data has a name; give one with: agentctl data create NAME PATH", output)
        }
        DataVerb::Show { name, json } => {
            let assets = list(to, &name).await?;
            if assets.is_empty() {
                let what = format!("there is no data `{name}`");
                return Err(Failure::refused(what, "list what there is: agentctl data list"));
            }
            show(&assets, json, "", output)
        }
        DataVerb::Archive(args) => change(args, "archive", to, output).await,
        DataVerb::Restore(args) => change(args, "restore", to, output).await,
        DataVerb::Rm(args) => change(args, "remove", to, output).await,
    }
}

/// A version, see `agent/docs/json.md`.
#[derive(Debug, Serialize)]
struct AssetView {
    name: String,
    version: String,
    labels: Vec<String>,
    /// `uri_file` or `uri_folder`.
    r#type: &'static str,
    /// An address, or the content of what was sent.
    path: String,
    description: String,
    owner: String,
    visibility: &'static str,
    archived: bool,
    added_ms: u64,
}

impl TryFrom<v1::Asset> for AssetView {
    type Error = Fault;
    fn try_from(wire: v1::Asset) -> Result<AssetView, Fault> {
        let data = Input::try_from(wire.data.unwrap_or_default()).map_err(Fault::from)?;
        let (is_file, path) = match data {
            Input::Literal(text) => (false, text),
            Input::Folder(root) => (false, SnapshotRef { root, file: None }.to_string()),
            Input::File { root, name } => (true, SnapshotRef { root, file: Some(name) }.to_string()),
            Input::Data(data) => (data.is_file, data.uri.to_string()),
        };
        Ok(AssetView {
            name: wire.name,
            version: wire.version,
            labels: wire.labels,
            r#type: if is_file { "uri_file" } else { "uri_folder" },
            path,
            description: wire.description,
            owner: person(&wire.owner),
            visibility: if wire.visible_to_all { "all" } else { "owner" },
            archived: wire.archived,
            added_ms: wire.added_ms,
        })
    }
}

fn views(assets: Vec<v1::Asset>) -> Result<Vec<AssetView>, Failure> {
    let mut views = assets.into_iter().map(AssetView::try_from).collect::<Result<Vec<_>, _>>()?;
    views.sort_by_key(|asset| std::cmp::Reverse(asset.added_ms));
    Ok(views)
}

async fn list(to: Option<&Target>, name: &str) -> Result<Vec<AssetView>, Failure> {
    let client = Client::find(to).await?;
    views(client.names_of_data(name).await?)
}

fn show(assets: &[AssetView], json: bool, nothing: &str, output: &mut Output) -> Result<(), Failure> {
    if json {
        return output.json(&assets);
    }
    if assets.is_empty() {
        output.note(nothing);
        return Ok(());
    }
    let mut table = Table::new(&["NAME", "VERSION", "LABELS", "OWNER", "ADDED", "WHAT"], &[1]);
    for asset in assets {
        let archived = asset.archived.then(|| "(archived)".to_owned());
        let labels: Vec<String> = asset.labels.iter().cloned().chain(archived).collect();
        table.row([
            Cell::from(&asset.name),
            Cell::from(&asset.version),
            Cell::from(labels.join(", ")),
            Cell::from(&asset.owner),
            Cell::from(moment(Timestamp(asset.added_ms))),
            Cell::from(&asset.path),
        ]);
    }
    let paper = output.paper();
    output.print(&table.render(paper))
}

async fn create(args: DataCreateArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let address = address(&args)?;
    let client = Client::find_or_start(to, output).await?;
    let data = match address {
        Some(data) => data,
        None => {
            let never = client.own_directories().await?;
            send(Path::new(&args.path), &client.blobs(), &never, output).await?
        }
    };
    output.rest();
    let request = v1::AddAssetRequest {
        name: args.name,
        version: args.version.unwrap_or_default(),
        labels: args.label,
        data: Some(data.into()),
        description: args.description,
        visible_to_all: args.visibility == "all",
    };
    let asset = AssetView::try_from(answer(client.assets().add(request)).await?)?;
    if args.json {
        return output.json(&asset);
    }
    output.note(&format!("in a job file: `path: azureml:{}:{}`", asset.name, asset.version));
    output.print(&format!("azureml:{}:{}\n", asset.name, asset.version))
}

/// The address that was given; `None` for a path of this machine.
fn address(args: &DataCreateArgs) -> Result<Option<Input>, Failure> {
    let path = args.path.as_str();
    let has_scheme = path.split_once(':').is_some_and(|(scheme, rest)| {
        matches!(scheme, "azureml" | "runs") || (rest.starts_with("//") && scheme != "file")
    });
    if !has_scheme {
        if args.kind.is_some() {
            let what = "`--type` is for an address: of a path it is known".to_owned();
            return Err(Failure::refused(what, "leave it out"));
        }
        return Ok(None);
    }
    let uri: DataUri = path.parse().map_err(|error: agent_model::data::DataUriError| {
        Failure::refused(format!("`{path}`: {error}"), error.fix())
    })?;
    if matches!(uri, DataUri::Asset(_)) {
        return Err(Failure::refused(format!("`{path}` is a name itself"), "write the address of the data"));
    }
    let looks_like_a_file = uri.file_name().is_some_and(|name| name.contains('.'));
    let is_file = args.kind.as_deref().map_or(looks_like_a_file, |kind| kind == "uri_file");
    Ok(Some(Input::Data(DataInput { uri, is_file, is_own_copy: false })))
}

async fn change(
    args: DataVersionArgs,
    want: &str,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let request = v1::ChangeAssetRequest {
        name: args.name,
        version: args.version.unwrap_or_default(),
        want: want.to_owned(),
    };
    let changed = views(answer(client.assets().change(request)).await?.assets)?;
    let done = match want {
        "archive" => "archived",
        "restore" => "in the list again",
        _ => "removed",
    };
    for asset in changed {
        output.note(&format!("azureml:{}:{} is {done}", asset.name, asset.version));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(path: &str, kind: Option<&str>) -> DataCreateArgs {
        DataCreateArgs {
            name: "a".into(),
            path: path.into(),
            version: None,
            label: Vec::new(),
            description: String::new(),
            kind: kind.map(str::to_owned),
            visibility: "owner".into(),
            json: false,
        }
    }

    #[test]
    fn test_addresses_are_told_from_paths() {
        let is_file = |path: &str, kind| match address(&args(path, kind)).unwrap() {
            Some(Input::Data(data)) => Some(data.is_file),
            Some(other) => panic!("{other:?}"),
            None => None,
        };
        assert_eq!(is_file("data/iris.csv", None), None);
        assert_eq!(is_file("https://h/iris.csv", None), Some(true));
        assert_eq!(is_file("https://h/iris.csv", Some("uri_folder")), Some(false));
        assert_eq!(is_file("s3://bucket/folder", None), Some(false));
        for (path, kind, said) in [
            ("data/iris.csv", Some("uri_file"), "is for an address"),
            ("azureml:iris:1", None, "is a name itself"),
            ("https://h/x?sig=1", None, "credentials"),
            ("ftp://h/x", None, "not fetched"),
        ] {
            let Err(Failure::Refused { what, .. }) = address(&args(path, kind)) else { panic!("{path}") };
            assert!(what.contains(said), "{what}");
        }
    }
}
