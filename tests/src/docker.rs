//! A container engine asked past the product: what is really there, and images put into it.
//!
//! Each call connects anew, so an engine that was restarted in between is no trouble, and waits for its answer as
//! long as [`SOON`]; a call that gets none fails its test with words.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bollard::errors::Error;
use bollard::models::{
    ContainerConfig, ContainerCreateBody, ContainerInspectResponse, HostConfig, Mount, MountType,
};
use bollard::query_parameters::{
    CommitContainerOptions, CreateImageOptions, ImportImageOptions, InspectContainerOptions,
    KillContainerOptions, ListContainersOptions, ListImagesOptions, RemoveContainerOptions,
    RemoveImageOptions, StartContainerOptions, TagImageOptions, UploadToContainerOptions,
    WaitContainerOptions,
};
use bollard::{API_DEFAULT_VERSION, Docker as Client, body_full};
use bytes::Bytes;
use tokio_stream::StreamExt;

use crate::SOON;
use crate::client::runtime;

/// A container as the engine lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Its number.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// `created`, `running`, `exited` and so on.
    pub state: String,
    /// What of the machine it sees.
    pub mounts: Vec<PathBuf>,
}

/// The engine behind a socket.
#[derive(Debug, Clone)]
pub struct Docker {
    socket: PathBuf,
}

impl Docker {
    /// The one that listens there, now or later.
    pub fn at(socket: impl Into<PathBuf>) -> Docker {
        Docker { socket: socket.into() }
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    async fn client(&self) -> Result<Client, Error> {
        let socket = self.socket.to_string_lossy();
        let client = Client::connect_with_unix(&socket, SOON.as_secs(), API_DEFAULT_VERSION)?;
        client.negotiate_version().await
    }

    /// Asks it something, for as long as `within`; `None` for no answer at all.
    fn ask<T, Answer>(
        &self,
        within: Duration,
        call: impl FnOnce(Client) -> Answer,
    ) -> Option<Result<T, Error>>
    where
        Answer: Future<Output = Result<T, Error>>,
    {
        let asked = async { call(self.client().await?).await };
        runtime().block_on(async { tokio::time::timeout(within, asked).await.ok() })
    }

    /// Asks it something it must do.
    #[track_caller]
    fn must<T, Answer>(&self, step: &str, call: impl FnOnce(Client) -> Answer) -> T
    where
        Answer: Future<Output = Result<T, Error>>,
    {
        match self.ask(SOON, call) {
            Some(Ok(answer)) => answer,
            Some(Err(error)) => panic!("the container engine does not {step}: {error}"),
            None => panic!("the container engine does not {step} within {SOON:?}"),
        }
    }

    /// Whether it answers at once.
    pub fn answers(&self) -> bool {
        matches!(self.ask(Duration::from_secs(2), |client| async move { client.ping().await }), Some(Ok(_)))
    }

    /// Makes an image of a tar of a root directory.
    #[track_caller]
    pub fn import(&self, tag: &str, root: Vec<u8>, changes: &[&str]) {
        let (repo, version) = tag.split_once(':').expect("a tag");
        let options = CreateImageOptions {
            from_src: Some("-".into()),
            repo: Some(repo.into()),
            tag: Some(version.into()),
            changes: changes.iter().map(|change| (*change).to_owned()).collect(),
            ..CreateImageOptions::default()
        };
        self.must("import an image", |client| async move {
            let mut told = client.create_image(Some(options), Some(body_full(Bytes::from(root))), None);
            while let Some(line) = told.next().await {
                line?;
            }
            Ok(())
        });
    }

    /// Brings an image into another engine, as the same one: whatever is imported twice is two images.
    pub fn copy_image(&self, tag: &str, to: &Docker) {
        let archive = self.must("write an image", |client| async move {
            let mut pieces = client.export_image(tag);
            let mut archive = Vec::new();
            while let Some(piece) = pieces.next().await {
                archive.extend_from_slice(&piece?);
            }
            Ok(archive)
        });
        to.must("read an image", |client| async move {
            let options = ImportImageOptions::default();
            let mut told = client.import_image(options, body_full(Bytes::from(archive)), None);
            while let Some(line) = told.next().await {
                line?;
            }
            Ok(())
        });
    }

    /// The engine's name of the content of an image, if it has it.
    #[track_caller]
    pub fn image(&self, name: &str) -> Option<String> {
        let asked = self.ask(SOON, |client| async move { client.inspect_image(name).await });
        match asked {
            Some(Err(Error::DockerResponseServerError { status_code: 404, .. })) => None,
            Some(answer) => answer.expect("the engine looks at an image").id,
            None => panic!("the container engine does not look at an image within {SOON:?}"),
        }
    }

    /// A label of an image, empty for none.
    #[track_caller]
    pub fn image_label(&self, name: &str, label: &str) -> String {
        let image = self.must("look at an image", |client| async move { client.inspect_image(name).await });
        let labels = image.config.and_then(|config| config.labels).unwrap_or_default();
        labels.get(label).cloned().unwrap_or_default()
    }

    /// Every image that has a name or is on top, by content.
    #[track_caller]
    pub fn images(&self) -> Vec<String> {
        let listed = self
            .must("list images", |client| async move { client.list_images(None::<ListImagesOptions>).await });
        let mut ids: Vec<String> = listed.into_iter().map(|image| image.id).collect();
        ids.sort();
        ids
    }

    /// Gives an image another name.
    #[track_caller]
    pub fn tag(&self, image: &str, tag: &str) {
        let (repo, version) = tag.rsplit_once(':').expect("a tag");
        let options = TagImageOptions { repo: Some(repo.into()), tag: Some(version.into()) };
        self.must("name an image", |client| async move { client.tag_image(image, Some(options)).await });
    }

    /// Removes an image by any of its names, in use or not; one that is not there is fine.
    #[track_caller]
    pub fn remove_image(&self, name: &str) {
        let options = RemoveImageOptions { force: true, ..RemoveImageOptions::default() };
        let removed =
            self.ask(SOON, |client| async move { client.remove_image(name, Some(options), None).await });
        match removed {
            Some(Ok(_) | Err(Error::DockerResponseServerError { status_code: 404, .. })) => {}
            other => panic!("the image {name} is not removed: {other:?}"),
        }
    }

    /// Every container, whether it runs or not.
    #[track_caller]
    pub fn containers(&self) -> Vec<Container> {
        let options = ListContainersOptions { all: true, ..ListContainersOptions::default() };
        let listed =
            self.must("list containers", |client| async move { client.list_containers(Some(options)).await });
        let mounts = |mounts: Option<Vec<bollard::models::MountPoint>>| {
            mounts.into_iter().flatten().filter_map(|mount| mount.source.map(PathBuf::from)).collect()
        };
        let one = |listed: bollard::models::ContainerSummary| Container {
            id: listed.id.unwrap_or_default(),
            name: listed.names.into_iter().flatten().next().unwrap_or_default().replace('/', ""),
            labels: listed.labels.into_iter().flatten().collect(),
            state: listed.state.map(|state| state.to_string()).unwrap_or_default(),
            mounts: mounts(listed.mounts),
        };
        listed.into_iter().map(one).collect()
    }

    /// The containers that see something below a directory of the machine.
    #[track_caller]
    pub fn containers_of(&self, dir: &Path) -> Vec<Container> {
        let sees = |one: &Container| one.mounts.iter().any(|mount| mount.starts_with(dir));
        self.containers().into_iter().filter(sees).collect()
    }

    /// All there is to know about a container, if it is there.
    #[track_caller]
    pub fn inspect(&self, id: &str) -> Option<ContainerInspectResponse> {
        let asked = self.ask(SOON, |client| async move {
            client.inspect_container(id, None::<InspectContainerOptions>).await
        });
        match asked {
            Some(Err(Error::DockerResponseServerError { status_code: 404, .. })) => None,
            Some(answer) => Some(answer.expect("the engine looks at a container")),
            None => panic!("the container engine does not look at a container within {SOON:?}"),
        }
    }

    /// Ends a container as an operator would who has had enough.
    #[track_caller]
    pub fn kill(&self, id: &str) {
        self.must("kill a container", |client| async move {
            client.kill_container(id, None::<KillContainerOptions>).await
        });
    }

    /// Removes a container, running or not; one that is not there, or is on its way out, is fine.
    #[track_caller]
    pub fn remove(&self, id: &str) {
        let options = RemoveContainerOptions { force: true, v: true, ..RemoveContainerOptions::default() };
        let removed =
            self.ask(SOON, |client| async move { client.remove_container(id, Some(options)).await });
        match removed {
            Some(Ok(()) | Err(Error::DockerResponseServerError { status_code: 404 | 409, .. })) => {}
            other => panic!("the container {id} is not removed: {other:?}"),
        }
    }

    /// Pulls an image without any credentials.
    pub fn pull(&self, name: &str) -> Result<(), String> {
        let options =
            CreateImageOptions { from_image: Some(name.to_owned()), ..CreateImageOptions::default() };
        let pulled = self.ask(SOON, |client| async move {
            let mut told = client.create_image(Some(options), None, None);
            while let Some(line) = told.next().await {
                line?;
            }
            Ok(())
        });
        pulled
            .unwrap_or_else(|| panic!("no end of a pull within {SOON:?}"))
            .map_err(|error| error.to_string())
    }

    /// Starts a container.
    #[track_caller]
    pub fn start(&self, id: &str) {
        self.must("start a container", |client| async move {
            client.start_container(id, None::<StartContainerOptions>).await
        });
    }

    /// Makes a container under a name and does not start it.
    #[track_caller]
    pub fn create(&self, name: &str, image: &str, command: &[&str], labels: &[(&str, &str)]) -> String {
        let options = bollard::query_parameters::CreateContainerOptions {
            name: Some(name.to_owned()),
            ..Default::default()
        };
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let body = ContainerCreateBody {
            image: Some(image.to_owned()),
            cmd: Some(command.iter().map(|word| (*word).to_owned()).collect()),
            labels: Some(labels.collect()),
            ..ContainerCreateBody::default()
        };
        self.must("make a container", |client| async move {
            client.create_container(Some(options), body).await.map(|made| made.id)
        })
    }

    /// Makes an image of another and a tar of what comes on top.
    #[track_caller]
    pub fn layer(&self, base: &str, tar: Vec<u8>, tag: &str) {
        let (repo, version) = tag.split_once(':').expect("a tag");
        let id = self.create("agentd-test-layer", base, &["true"], &[("agentd.test", "layer")]);
        let upload = UploadToContainerOptions { path: "/".into(), ..UploadToContainerOptions::default() };
        let commit = CommitContainerOptions {
            container: Some(id.clone()),
            repo: Some(repo.into()),
            tag: Some(version.into()),
            ..CommitContainerOptions::default()
        };
        let of = id.clone();
        self.must("make a layer", |client| async move {
            client.upload_to_container(&of, Some(upload), body_full(Bytes::from(tar))).await?;
            client.commit_container(commit, ContainerConfig::default()).await
        });
        self.remove(&id);
    }

    /// Runs a command in an image to its end: made, started, waited for and removed. Its exit code.
    #[track_caller]
    pub fn run(&self, image: &str, command: &[&str], host: HostConfig) -> i64 {
        let body = ContainerCreateBody {
            image: Some(image.to_owned()),
            cmd: Some(command.iter().map(|word| (*word).to_owned()).collect()),
            host_config: Some(host),
            labels: Some(HashMap::from([("agentd.test".to_owned(), "run".to_owned())])),
            ..ContainerCreateBody::default()
        };
        self.must("run a container", |client| async move {
            let none = None::<bollard::query_parameters::CreateContainerOptions>;
            let id = client.create_container(none, body).await?.id;
            // Asked before it starts, so that its end cannot be missed.
            let mut waiting = client.wait_container(&id, None::<WaitContainerOptions>);
            let first = async { waiting.next().await };
            let (started, code) =
                tokio::join!(client.start_container(&id, None::<StartContainerOptions>), async {
                    match first.await {
                        Some(Ok(ended)) => Ok(ended.status_code),
                        Some(Err(Error::DockerContainerWaitError { code, .. })) => Ok(code),
                        Some(Err(error)) => Err(error),
                        None => Ok(-1),
                    }
                });
            started?;
            let code = code?;
            let options = RemoveContainerOptions { force: true, ..RemoveContainerOptions::default() };
            client.remove_container(&id, Some(options)).await?;
            Ok(code)
        })
    }
}

/// How a container is usually run beside a job: on the network of the machine, seeing these directories of it.
pub fn host_config(mounts: &[&Path]) -> HostConfig {
    let mount = |path: &&Path| Mount {
        source: Some(path.display().to_string()),
        target: Some(path.display().to_string()),
        typ: Some(MountType::BIND),
        read_only: Some(true),
        ..Mount::default()
    };
    HostConfig {
        network_mode: Some("host".into()),
        mounts: Some(mounts.iter().map(mount).collect()),
        ..HostConfig::default()
    }
}
