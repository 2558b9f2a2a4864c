//! A controller on loopback, and a provider that is asked as a controller asks it; what joins is a node for real.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use agent_control::provider::{
    CreateMachine, DeleteMachine, Machine, MachinePriority, MachineState, Provider, ProviderError,
};
use agent_jobfile::yaml;
use agent_model::NodeId;
use agent_tests::client::{Client, runtime};
use agent_tests::fleet::Daemon;
use agent_tests::{SOON, eventually, root, within};

pub(crate) struct Bed {
    pub(crate) controller: Daemon,
    pub(crate) client: Client,
    /// As nodes know it.
    pub(crate) address: String,
    pub(crate) token: String,
    /// The pool of all machines: another one where a row shares what makes them with another row.
    pub(crate) pool: &'static str,
    home: tempfile::TempDir,
}

impl Bed {
    pub(crate) fn new() -> Bed {
        Bed::with(|_| String::new())
    }

    /// With this file of providers, which may name the directory of the bed.
    pub(crate) fn with(providers: impl FnOnce(&Path) -> String) -> Bed {
        let home = tempfile::Builder::new().prefix("pools-").tempdir().expect("a directory");
        let (port, file) = (free_port(), home.path().join("providers.yaml"));
        fs::write(&file, providers(home.path())).expect("a file");
        let config = format!(
            "roles: controller\nlisten: 127.0.0.1:{port}\ndisk_reserve: 64MiB\nlease: 15s\nproviders: {}\n\
             provider_programs: {}\n",
            file.display(),
            root().join("packaging/providers").display()
        );
        let mut controller = Daemon::new(home.path().join("controller"), config);
        controller.spawn();
        let client = Client::new(controller.socket());
        eventually("the controller answers", SOON, || client.nodes().ok());
        let token = client.token(1000);
        Bed { controller, client, address: format!("https://127.0.0.1:{port}"), token, pool: "gpu", home }
    }

    /// A file or directory of the bed.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// The provider that the configuration describes so, with the programs that we ship.
    pub(crate) fn provider(&self, config: &str) -> Lab<'_> {
        let said = format!("lab: {config}");
        let mut all = yaml::parse(&said)
            .and_then(agent_control::provider::read_providers)
            .unwrap_or_else(|error| panic!("{said}: {error}"));
        let config = all.remove("lab").expect("it was read");
        let programs = root().join("packaging/providers");
        Lab { bed: self, provider: Provider::new("lab", config, &programs, &self.path("lab")) }
    }

    /// How many machines the provider of this bed's directory has.
    pub(crate) fn machines(&self) -> usize {
        fs::read_dir(self.path("machines")).map_or(0, Iterator::count)
    }

    fn liveness(&self, name: &str) -> Option<String> {
        let nodes = self.client.nodes().expect("the controller answers");
        nodes.into_iter().find(|node| node.node == name).map(|node| node.liveness)
    }

    /// Waits until the machine is a node that is ready.
    #[track_caller]
    pub(crate) fn joined(&self, name: &str) {
        let is_ready = || matches!(self.liveness(name).as_deref(), Some("ready" | "degraded")).then_some(());
        let joined = within(SOON, is_ready);
        assert!(joined.is_some(), "{name} is {:?} after {SOON:?}:\n{}", self.liveness(name), self.logs());
    }

    /// What daemons below the bed said last.
    pub(crate) fn logs(&self) -> String {
        let mut all = self.controller.log();
        all = all.split_off(all.len().saturating_sub(6000));
        for name in ["node.log", "slurm/job.log", "slurm/slurmctld.log", "slurm/slurmd.log"] {
            let text = fs::read_to_string(self.path(name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            all += &format!("{name}:\n{}\n", lines[lines.len().saturating_sub(12)..].join("\n"));
        }
        all
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.controller.kill();
    }
}

/// A provider and the bed it is for.
pub(crate) struct Lab<'a> {
    pub(crate) bed: &'a Bed,
    provider: Provider,
}

impl Lab<'_> {
    pub(crate) fn create(&self, request: &str, name: &str) -> Result<String, ProviderError> {
        self.create_as(request, name, MachinePriority::Dedicated)
    }

    pub(crate) fn create_as(
        &self,
        request: &str,
        name: &str,
        priority: MachinePriority,
    ) -> Result<String, ProviderError> {
        let name: NodeId = name.parse().expect("a name");
        let labels = BTreeMap::from([("pool".to_owned(), self.bed.pool.to_owned())]);
        let (address, token) = (self.bed.address.as_str(), self.bed.token.as_str());
        let wish = CreateMachine {
            request,
            pool: self.bed.pool,
            name: &name,
            priority,
            labels: &labels,
            address,
            token,
        };
        runtime().block_on(self.provider.create(&wish))
    }

    /// Every machine with its state, its request and its name.
    #[track_caller]
    pub(crate) fn list(&self) -> Vec<Machine> {
        runtime().block_on(self.provider.list(self.bed.pool)).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The machines that are there: id, request and name.
    #[track_caller]
    pub(crate) fn there(&self) -> Vec<(String, String, String)> {
        let told = |text: Option<String>| text.unwrap_or_default();
        let there = self.list().into_iter().filter(|one| one.state != MachineState::Gone);
        there.map(|one| (one.id, told(one.request), told(one.name.map(String::from)))).collect()
    }

    /// Waits until a machine is in this state; one that is not listed is gone.
    #[track_caller]
    pub(crate) fn is(&self, id: &str, state: MachineState) {
        eventually(&format!("{id} is {state:?}"), SOON, || {
            let found = self.list().into_iter().find(|one| one.id == id).map(|one| one.state);
            (found.unwrap_or(MachineState::Gone) == state).then_some(())
        });
    }

    pub(crate) fn delete(&self, id: &str) -> Result<(), ProviderError> {
        self.delete_of(&DeleteMachine { pool: self.bed.pool, id: Some(id), request: "", name: "" })
    }

    /// Without the id, which never arrived.
    pub(crate) fn delete_request(&self, request: &str) -> Result<(), ProviderError> {
        self.delete_of(&DeleteMachine { pool: self.bed.pool, id: None, request, name: "" })
    }

    fn delete_of(&self, machine: &DeleteMachine<'_>) -> Result<(), ProviderError> {
        runtime().block_on(self.provider.delete(machine))
    }
}

/// The kind of an error; panics unless its text has these words.
#[track_caller]
pub(crate) fn refused<T: std::fmt::Debug>(result: Result<T, ProviderError>, words: &str) -> &'static str {
    let error = result.expect_err("it cannot be");
    let text = error.to_string();
    assert!(text.contains(words), "no `{words}` in: {text}");
    match error {
        ProviderError::Quota { .. } => "quota",
        ProviderError::Temporary { .. } => "temporary",
        ProviderError::Permanent { .. } => "permanent",
        other => panic!("{other:?}"),
    }
}

/// A port of loopback that is free now.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Nothing that runs has the text in its command line or its environment.
#[track_caller]
pub(crate) fn nobody_shows(secret: &str, below: &Path) {
    let has = |path: PathBuf| {
        let bytes = fs::read(path).unwrap_or_default();
        bytes.windows(secret.len()).any(|part| part == secret.as_bytes())
    };
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let process = entry.path();
        for file in ["cmdline", "environ"] {
            assert!(!has(process.join(file)), "the token is in {file} of {}", process.display());
        }
    }
    let mut left = vec![below.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => left.push(entry.path()),
                Ok(kind) if kind.is_file() => {
                    assert!(!has(entry.path()), "the token is in {}", entry.path().display());
                }
                _ => {}
            }
        }
    }
}
