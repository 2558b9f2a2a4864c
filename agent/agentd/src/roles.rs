//! Builds the parts of the daemon's roles and connects them; the only place for wiring.
//!
//! ```text
//! state directory, lock ─▶ blobs ─▶ controller ─▶ socket ─▶ node: journal, environments, runners
//! ```
//!
//! Invariants: nothing below the state directory is touched without the lock; the socket of a controller is bound
//! before the node dials it; a node calls its controller over the same services, whether it is in this process or not.
//! Only logs go to one of this process without a connection: they are many bytes, and people wait for lines.

mod blobs;
mod listener;
mod providers;
mod socket;
mod tracking;

use std::fs::{File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent_cas::Store;
use agent_cas::remote;
use agent_control::{Controller, ControllerConfig, LogIntake, OpenError, OpenStoreError, Rounds, Tunnels};
use agent_model::lease::Terms;
use agent_model::node::Inventory;
use agent_model::words::count;
use agent_model::{Address, Clock, Code, Fault};
use agent_node::{JobsRunAs, ProbeConfig};
use agent_proto::transport::{self, Way};
use agent_runtime::docker::Docker;
use agent_runtime::env::Environments;
use agent_runtime::exec::{Containers, Local, find_shim};
use tokio::sync::{Mutex, Notify, watch};
use tonic::transport::Channel;
use tracing::info;

use blobs::Blobs;

use crate::config::{Config, RunAs};
use crate::disk::blobs::Unneeded;
use crate::disk::{DiskKeeper, Lane};
use crate::membership::{self, Uplink};
use crate::metrics::{self, NodePage, Numbers};
use crate::node_api::NodeApi;
use crate::notify::{Notifier, Pulse};
use crate::supervisor::{Supervisor, TaskKind};
use crate::worker::data::Data;
use crate::worker::environments::{Keeper, eviction, room};
use crate::worker::gpus::{Gpus, Looker};
use crate::worker::journal::{Journal, JournalError, Sqlite};
use crate::worker::preemption::Preemptions;
use crate::worker::prestaged_trees::PrestagedTrees;
use crate::worker::reconcile::{ControllerLink, Reconciler, SYNC_COMES_ROUND};
use crate::worker::report::Outbox;
use crate::worker::retention::Retention;
use crate::worker::secrets::Secrets;
use crate::worker::sessions::Sessions;
use crate::worker::standing::NodeStanding;
use crate::worker::system::RunningUse;
use crate::worker::telemetry::{Telemetry, ToController};
use crate::worker::upkeep::Upkeep;
use crate::worker::users::Users;
use crate::worker::views::Views;
use crate::worker::{Worker, containers, environments, jobs_dir, pins, recover};
use crate::{shutdown, tunnels};

/// How often a silent connection is pinged, and how long the answer may take: a link that drops all packets is
/// noticed after the sum of both.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// The longest time to open a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// The same over TLS, perhaps through a proxy.
const FAR_CONNECT: Duration = Duration::from_secs(10);
/// The longest iteration of the controller's main loop: at most it syncs its database to the disk.
const CONTROLLER_COMES_ROUND: Duration = Duration::from_secs(30);

/// Why the daemon could not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("{} is in use by {holder}", path.display())]
    InUse { path: PathBuf, holder: String },
    #[error("cannot use {}", path.display())]
    State { path: PathBuf, source: io::Error },
    #[error("cannot listen at {at}")]
    Listen { at: String, source: io::Error },
    #[error("cannot open the blob store")]
    Blobs(#[source] agent_cas::OpenError),
    #[error("cannot go to the blob store at {server}")]
    FarBlobs { server: String, source: tonic::transport::Error },
    #[error("cannot use the providers of {}: {what}", path.display())]
    Providers { path: PathBuf, what: String },
    #[error("cannot say who is who")]
    Authority(#[source] agent_identity::AuthorityError),
    #[error("cannot serve anybody elsewhere")]
    Tls(#[source] agent_identity::TlsError),
    #[error("cannot start the controller")]
    Controller(#[source] agent_control::OpenError),
    #[error("cannot keep environments")]
    Environments(#[source] agent_runtime::env::OpenEnvError),
    #[error("cannot keep the data of jobs")]
    Data(#[source] io::Error),
    #[error("cannot run jobs")]
    Shim(#[source] agent_runtime::exec::FindShimError),
    #[error("cannot run jobs")]
    Boot(#[source] agent_node::BootIdError),
    #[error("cannot remember jobs")]
    Journal(#[source] JournalError),
    #[error("cannot move the jobs of this machine to its controller: {0}")]
    Move(Fault),
    #[error("cannot take up the jobs of an earlier run")]
    Recover(#[source] recover::RecoverError),
}

impl StartError {
    /// The fault to show to the user.
    pub(crate) fn fault(&self) -> Fault {
        let code =
            if matches!(self, StartError::InUse { .. }) { Code::StateInUse } else { Code::StateUnusable };
        let fault = Fault::new(code, "agentd cannot start").because(self);
        match self {
            StartError::InUse { .. } => fault.fix("use that daemon, stop it, or give another --state-dir"),
            StartError::Move(cause) => cause.clone(),
            StartError::Shim(_) => fault.fix("install `agent-shim` beside `agentd`"),
            StartError::Controller(OpenError::Store(OpenStoreError::Newer { .. })) => {
                fault.fix("install the later release again, or put back a backup that was made before it")
            }
            StartError::Journal(JournalError::Newer { .. }) => fault.fix(
                "install the later release again; to go back, drain the machine with it first, then remove this file",
            ),
            StartError::State { .. } | StartError::Listen { .. } => {
                fault.fix("check its owner and permissions, or configure another place; `agentd show-config` says where it comes from")
            }
            _ => fault.fix("the message says which file; keep a copy of it before you repair or remove it"),
        }
    }

    /// Whether starting again later may help: the cause is not the configuration.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            StartError::State { source, .. } => !matches!(
                source.kind(),
                ErrorKind::PermissionDenied | ErrorKind::NotADirectory | ErrorKind::InvalidInput
            ),
            StartError::InUse { .. }
            | StartError::Listen { .. }
            | StartError::Shim(_)
            | StartError::Journal(JournalError::Newer { .. })
            | StartError::Controller(OpenError::Store(OpenStoreError::Newer { .. })) => false,
            _ => true,
        }
    }
}

/// Resources that are held until the daemon ends.
pub(crate) struct Running {
    /// Released by the kernel when this process ends, however it does.
    _lock: File,
    socket: Option<PathBuf>,
    /// How many jobs of an earlier process were adopted.
    adopted: usize,
}

impl Running {
    /// The status text for the service manager.
    pub(crate) fn describe(&self) -> String {
        match (&self.socket, self.adopted) {
            (Some(socket), 0) => format!("serving at {}", socket.display()),
            (Some(socket), adopted) => {
                format!("serving at {}; took up {}", socket.display(), count(adopted as u64, "job"))
            }
            (None, adopted) => format!("running jobs; took up {}", count(adopted as u64, "job")),
        }
    }
}

impl Drop for Running {
    /// Without the socket file, a client knows that no daemon listens.
    fn drop(&mut self) {
        if let Some(socket) = &self.socket {
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// Starts every part. When this returns, clients are served and the jobs of an earlier process are adopted.
pub(crate) async fn start(
    config: Config,
    supervisor: &Supervisor,
    notifier: &Notifier,
) -> Result<Running, StartError> {
    let lock = take_state(&config).await?;
    let disk = DiskKeeper::open(&config.state_dir, config.disk_reserve);
    let clock = config.clock();
    membership::require_no_begun_move(&config.state_dir).map_err(StartError::Move)?;
    let path = crate::config::identity_file(&config.state_dir);
    let uplink = Uplink::new(&config, &clock).map_err(|source| StartError::State { path, source })?;
    let blobs = blobs::start(&config, supervisor, &clock, &uplink).await?;
    let (numbers, metrics_listen) = (Numbers::default(), config.metrics_listen);
    let mut socket = config.roles.controller.then(|| config.socket.clone());
    let near = match config.roles.controller {
        true => Some(start_controller(&config, supervisor, notifier, &clock, &blobs, &numbers).await?),
        false => None,
    };
    let (mut adopted, mut lane) = (0, Lane::from([Box::new(Unneeded::new(blobs.collector.clone())) as _]));
    if config.roles.node {
        let near = near.filter(|_| config.controller == Address::Unix(config.socket.clone()));
        let numbers = numbers.clone();
        let shared = Shared { clock, blobs, disk: disk.clone(), uplink, near, numbers };
        let (taken_up, more, api) = start_node(config.clone(), supervisor, notifier, shared).await?;
        adopted = taken_up;
        lane.extend(more);
        if socket.is_none() && socket::serve_node(&config, api, supervisor).await {
            socket = Some(config.socket);
        }
    }
    metrics::serve(metrics_listen, numbers, supervisor);
    reclaim(supervisor, "disk", &disk, lane);
    supervisor.spawn_again(TaskKind::Upkeep, "disk pressure", move || disk.clone().measure());
    let watchdog = notifier.clone();
    supervisor.spawn_again(TaskKind::Upkeep, "watchdog", move || watchdog.clone().watch());
    Ok(Running { _lock: lock, socket, adopted })
}

/// What both roles need.
struct Shared {
    clock: Arc<dyn Clock>,
    blobs: Blobs,
    disk: DiskKeeper,
    uplink: Uplink,
    /// The node's controller, if it is in this process.
    near: Option<LogIntake>,
    numbers: Numbers,
}

/// Starts the task that makes room with these reclaimers, in this order.
fn reclaim(supervisor: &Supervisor, name: &str, disk: &DiskKeeper, lane: Lane) {
    let (disk, lane) = (disk.clone(), Arc::new(lane));
    supervisor.spawn_again(TaskKind::Upkeep, name, move || disk.clone().reclaim(Arc::clone(&lane)));
}

/// The state directory, with this process as its only user.
pub(crate) async fn take_state(config: &Config) -> Result<File, StartError> {
    let state = &config.state_dir;
    own_directory(state, has_guests(config))?;
    let path = state.join("lock");
    let fail = |source| StartError::State { path: path.clone(), source };
    let mut lock = agent_fs::open_lock(&path).map_err(fail)?;
    let file = lock.try_clone().map_err(fail)?;
    let taken = agent_blocking::spawn_blocking(move || agent_fs::lock_soon(&file)).await;
    if !taken.map_err(io::Error::other).flatten().map_err(fail)? {
        let mut holder = String::new();
        let _ = lock.read_to_string(&mut holder); // only for the message
        return Err(StartError::InUse {
            path: state.clone(),
            holder: format!("agentd, pid {}", holder.trim()),
        });
    }
    // Only for the message above, so a full disk may refuse it.
    let _ = lock.set_len(0).and_then(|()| write!(lock, "{}", std::process::id()));
    for name in ["controller", "cas", "prestaged"] {
        own_directory(&state.join(name), false)?;
    }
    for name in ["envs", "jobs", "packages"] {
        own_directory(&state.join(name), has_guests(config))?;
    }
    Ok(lock)
}

/// Whether other users pass through the daemon's directories to their own.
fn has_guests(config: &Config) -> bool {
    agent_spawn::has_helper() || (agent_spawn::serves_others() && config.jobs.user != RunAs::Daemon)
}

/// A directory of the daemon's own, through which others may `pass`; nobody else may list or change it.
fn own_directory(path: &Path, pass: bool) -> Result<(), StartError> {
    let make = || -> io::Result<()> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        std::fs::set_permissions(path, Permissions::from_mode(if pass { 0o711 } else { 0o700 }))
    };
    make().map_err(|source| StartError::State { path: path.to_owned(), source })
}

async fn start_controller(
    config: &Config,
    supervisor: &Supervisor,
    notifier: &Notifier,
    clock: &Arc<dyn Clock>,
    blobs: &Blobs,
    numbers: &Numbers,
) -> Result<LogIntake, StartError> {
    let (length, gather, passed) = (config.lease, config.gangs.wait, config.preemption.passed);
    let terms = Terms { length, gather, passed, ..Terms::default() };
    let (archive_quota, keep_records) = (config.keep.archive_quota, config.keep.records);
    let identity = listener::authority(config, clock)?;
    let usual = ControllerConfig::new(&config.state_dir, socket::operators(config));
    let limits = config.gangs.limits;
    let tunnels = config.listen.as_ref().map(|place| start_tunnels(place, config, supervisor));
    let (providers, mapped) = (providers::read(config)?, providers::mapped_names(config));
    let usual = ControllerConfig { tunnels, providers, mapped, ..usual };
    let settings =
        ControllerConfig { terms, limits, archive_quota, keep_records, identity: identity.clone(), ..usual };
    let controller = Controller::open(settings, clock.clone(), blobs.store.clone(), blobs.collector.clone())
        .await
        .map_err(StartError::Controller)?;
    let (routes, rounds, intake) = (controller.routes(), controller.rounds(), controller.log_intake());
    let _ = numbers.controller.set(controller.vitals()); // it is empty
    shutdown::look_after(config, controller.standby(), clock, supervisor);
    let pulse = Arc::new(notifier.pulse("controller", CONTROLLER_COMES_ROUND));
    supervisor
        .spawn_again(TaskKind::Upkeep, "controller pulse", move || follow(rounds.clone(), pulse.clone()));
    let listener = socket::listen(config)?;
    let stop = supervisor.stopping(TaskKind::Controller);
    supervisor.spawn(TaskKind::Controller, "controller", controller.run(stop.cancelled_owned()));
    let server = socket::server(routes);
    if let Some((place, identity)) = config.listen.as_ref().zip(identity) {
        listener::serve(place, identity, config, clock, supervisor, server.clone()).await?;
    }
    socket::serve(listener, server, config, supervisor);
    Ok(intake)
}

/// Starts the task that keeps the connections to hosts that cannot connect to this one.
fn start_tunnels(place: &(String, u16), config: &Config, supervisor: &Supervisor) -> Tunnels {
    let (tunnels, desk) = Tunnels::new();
    let (desk, directory) = (Arc::new(Mutex::new(desk)), config.state_dir.join("controller/tunnels"));
    let controller = tunnels::listener(place);
    supervisor.spawn_again(TaskKind::Upkeep, "tunnels", move || {
        tunnels::keep(Arc::clone(&desk), directory.clone(), controller.clone())
    });
    tunnels
}

/// Beats as long as the controller's main loop iterates.
async fn follow(rounds: Rounds, pulse: Arc<Pulse>) {
    loop {
        rounds.next().await;
        pulse.beat();
        tokio::time::sleep(CONTROLLER_COMES_ROUND / 6).await;
    }
}

/// Starts the node role; returns how many replicas of an earlier process it adopted, its reclaimers for a low disk,
/// and what it tells clients of this machine.
async fn start_node(
    config: Config,
    supervisor: &Supervisor,
    notifier: &Notifier,
    Shared { clock, blobs, disk, uplink, near, numbers }: Shared,
) -> Result<(usize, Lane, NodeApi), StartError> {
    let controller = dial(&uplink);
    membership::look_after(supervisor, &uplink, &config, &controller, &clock);
    let Blobs { store, collector } = blobs;
    let shim = find_shim(&config.host.path).map_err(StartError::Shim)?;
    let boot_id = agent_node::boot_id().map_err(StartError::Boot)?;
    let journal = Sqlite::open(&config.state_dir.join("journal.db")).await.map_err(StartError::Journal)?;
    let jobs = jobs_dir(&config.state_dir);
    let found = recover::open_replicas(&journal, &jobs).await.map_err(StartError::Recover)?;
    let adopted = found.len();
    let (gpus_there, there) = watch::channel(None);
    let (views, environments, inventory) = survey(&config, &shim, store.clone(), there).await?;
    let job_memory = usual_memory(&config, inventory.memory);
    let (tracking, serve) = tracking::start(&config, supervisor, &clock).await?;
    let (telemetry, hub) = Telemetry::new(ToController::new(near, &controller));
    let stop = supervisor.stopping(TaskKind::Telemetry);
    supervisor.spawn_infallible(TaskKind::Telemetry, "telemetry", hub.run(stop));
    let users = Users::new(&config, jobs.clone(), &found);
    let upkeep = Upkeep::new(probe_config(&config, &views), (disk.pressure(), disk.failing()), inventory);
    let (inventory, publisher) = (upkeep.inventory(), upkeep.publisher());
    let retention = Retention::new(jobs, clock.clone(), &boot_id).shown_in(publisher.clone());
    let (built, (wishes, wished)) = (Arc::new(Notify::new()), watch::channel(Vec::new()));
    let prestaged_trees = prestage(&config, supervisor, &store, &disk);
    let keeper = Keeper::new(environments.clone(), store.clone(), publisher.clone(), wished, built.clone());
    supervisor.spawn_again(TaskKind::Upkeep, "environments", move || keeper.clone().run());
    let data = Data::open(&config, &shim, &clock).map_err(StartError::Data)?;
    let (lane, slow) = lanes(&config, &prestaged_trees, &retention, &data, &environments, &clock);
    reclaim(supervisor, "images and packages", &disk, slow);
    supervisor.spawn_again(TaskKind::Upkeep, "upkeep", move || upkeep.clone().run());
    let held = recover::held_gpus(&found, &jobs_dir(&config.state_dir));
    let gpus = Gpus::new(Looker::new(&config), publisher, gpus_there, held);
    look_after_gpus(supervisor, gpus.clone());
    let outbox = Outbox::new(controller.clone(), config.node_name.clone());
    info!(node = %config.node_name, sharing = ?config.sharing, shim = %shim.display(), "running jobs");
    let containers = containers_of(&config, &shim);
    let executor = Arc::new(Local::new(shim, containers.clone()));
    let secrets = Secrets::new(controller.clone(), config.node_name.clone());
    offer_sessions(supervisor, &config, &controller);
    let worker = Arc::new(Worker {
        preemptions: watch_provider(supervisor, &config, &clock, &boot_id),
        config,
        clock,
        boot_id,
        journal: Arc::new(journal),
        store,
        collector,
        prestaged_trees,
        environments,
        data,
        built,
        executor,
        gpus,
        telemetry,
        taken: RunningUse::default(),
        outbox,
        tracking,
        retention,
        users,
        views,
        secrets,
        job_memory,
        disk,
    });
    worker.collector.held_by(pins::USER, pins::all(&worker.journal));
    sweep(supervisor, worker.journal.clone(), containers);
    let (standing, api) = tell_clients(&worker, inventory.clone(), &numbers);
    let link = ControllerLink {
        controller,
        session: uplink.session,
        inventory,
        wishes,
        standing,
        pulse: notifier.pulse("sync", SYNC_COMES_ROUND),
    };
    let reconciler = Reconciler::new(worker, supervisor.clone(), link, found);
    // The endpoint knows the running jobs now; their requests waited in the listener's backlog until here.
    supervisor.spawn_infallible(TaskKind::Tracking, "tracking", serve);
    let (intake, stop) = (supervisor.stopping(TaskKind::Intake), supervisor.stopping(TaskKind::Sync));
    supervisor.spawn_infallible(TaskKind::Sync, "sync", reconciler.run(intake, stop));
    Ok((adopted, lane, api))
}

/// The containers of jobs of this daemon.
fn containers_of(config: &Config, shim: &Path) -> Containers {
    let docker = Docker::at(&config.devices.docker_socket);
    Containers::new(docker, shim.to_owned(), config.state_dir.display().to_string())
}

/// What the node knows of itself, and the services that tell it to clients of this machine; its numbers are shown.
fn tell_clients(
    worker: &Arc<Worker>,
    inventory: watch::Receiver<Inventory>,
    numbers: &Numbers,
) -> (watch::Sender<NodeStanding>, NodeApi) {
    let _ = numbers.node.set(NodePage::new(worker)); // it is empty
    let (standing, known) = watch::channel(NodeStanding::new(worker.clock.now()));
    (standing, NodeApi::new(worker, socket::operators(&worker.config), inventory, known))
}

fn look_after_gpus(supervisor: &Supervisor, gpus: Gpus) {
    supervisor.spawn_again(TaskKind::Upkeep, "gpus", move || gpus.clone().run());
}

/// The memory limit of a job that sets none, in bytes. If the memory of the machine is unknown, there is none: 0.
fn usual_memory(config: &Config, memory: u64) -> u64 {
    Some(config.jobs.memory.of(memory)).filter(|most| *most != u64::MAX).unwrap_or(0)
}

/// Lets users into the jobs of this node.
fn offer_sessions(supervisor: &Supervisor, config: &Config, controller: &Channel) {
    let sessions = Sessions::new(controller.clone(), config.node_name.clone(), jobs_dir(&config.state_dir));
    supervisor.spawn_again(TaskKind::Upkeep, "sessions", move || sessions.clone().run());
}

/// Asks the provider of this machine whether it will be taken away.
fn watch_provider(
    supervisor: &Supervisor,
    config: &Config,
    clock: &Arc<dyn Clock>,
    boot_id: &str,
) -> Preemptions {
    let preemptions = Preemptions::new(&config.preemption, Arc::clone(clock));
    let (watched, settings) = (preemptions.clone(), config.preemption.clone());
    let (file, boot_id) = (config.state_dir.join("preemption.json"), boot_id.to_owned());
    preemptions.recall(&file, &boot_id, settings.passed);
    supervisor.spawn_again(TaskKind::Upkeep, "preemption", move || {
        watched.clone().watch(settings.clone(), file.clone(), boot_id.clone())
    });
    preemptions
}

/// Removes containers that belong to no job, again and again.
fn sweep(supervisor: &Supervisor, journal: Arc<dyn Journal>, containers: Containers) {
    supervisor.spawn_again(TaskKind::Upkeep, "containers", move || {
        containers::sweep(journal.clone(), containers.clone())
    });
}

/// Starts to lay out trees ahead of the jobs that want them.
fn prestage(config: &Config, supervisor: &Supervisor, store: &Store, disk: &DiskKeeper) -> PrestagedTrees {
    let trees = PrestagedTrees::new(&config.state_dir, store.clone(), disk.clone());
    let maker = trees.clone();
    supervisor.spawn_again(TaskKind::Upkeep, "prestaged", move || maker.clone().run());
    trees
}

/// What can be removed when the disk is low, in two lanes, each in the order of removal: what is cheapest to make
/// again is removed first. Removal that may take minutes is in the second lane, so that the first does not wait for
/// it.
fn lanes(
    config: &Config,
    prestaged_trees: &PrestagedTrees,
    retention: &Retention,
    data: &Data,
    environments: &Environments,
    clock: &Arc<dyn Clock>,
) -> (Lane, Lane) {
    let (size, age) = (config.environments.size, config.environments.age);
    let limits = eviction::EnvLimits { size, age };
    let unused = room::Unused { environments: environments.clone(), limits, clock: clock.clone() };
    let lane = Lane::from([
        Box::new(prestaged_trees.clone()) as _,
        Box::new(retention.clone()) as _,
        Box::new(data.clone()) as _,
        Box::new(unused) as _,
    ]);
    let packages = room::Packages::new(environments.clone(), age);
    (lane, Lane::from([Box::new(room::Images(environments.clone())) as _, Box::new(packages) as _]))
}

/// A connection that is opened when it is first used, and again whenever it broke.
fn dial(uplink: &Uplink) -> Channel {
    let (endpoint, connect) = match uplink.way {
        Way::Unix(_) => (remote::near(transport::endpoint()), CONNECT),
        Way::Tls(_) => (remote::far(transport::endpoint()), FAR_CONNECT),
    };
    let agent = format!("agentd/{} {}{}", env!("CARGO_PKG_VERSION"), transport::SESSION, uplink.session);
    // Such a text is always a valid header value.
    let endpoint = endpoint.clone().user_agent(agent).unwrap_or(endpoint);
    let endpoint = endpoint
        .connect_timeout(connect)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .keep_alive_while_idle(true);
    transport::dial(endpoint, uplink.way.clone())
}

/// Finds what is on this machine: the view that jobs can have, the environments that are ready, and the inventory.
async fn survey(
    config: &Config,
    shim: &Path,
    store: Store,
    gpus: watch::Receiver<Option<bool>>,
) -> Result<(Views, Environments, Inventory), StartError> {
    let (config, shim) = (config.clone(), shim.to_owned());
    let looked = agent_blocking::blocking(move || {
        let views = Views::find(&config, &shim);
        let mut inventory = agent_node::probe(&probe_config(&config, &views));
        let settings =
            environments::settings(&config, inventory.memory, &shim, views.keeps_out(), store, gpus);
        let kept = Environments::open(settings)?;
        // Others are asked and published later; until then, a node may have any.
        inventory.interpreters = kept.known_interpreters().unwrap_or_default();
        Ok((views, kept, inventory))
    });
    looked.await.map_err(StartError::Environments)
}

/// The settings of the probe of this machine.
pub(crate) fn probe_config(config: &Config, views: &Views) -> ProbeConfig {
    ProbeConfig {
        state_dir: config.state_dir.clone(),
        sharing: config.sharing,
        path: config.host.path.clone(),
        disk_reserve: config.disk_reserve,
        engine: environments::engine(),
        docker: config.devices.docker_socket.clone(),
        jobs: match config.jobs.user {
            _ if views.keeps_out() => JobsRunAs::KeptOut,
            _ if !agent_spawn::serves_others() => JobsRunAs::Daemon,
            RunAs::Daemon => JobsRunAs::Daemon,
            RunAs::Named(_) => JobsRunAs::One,
            RunAs::Owner | RunAs::PerRun if config.keeps_jobs_out() => JobsRunAs::Users,
            RunAs::Owner | RunAs::PerRun => JobsRunAs::Daemon,
        },
        helper: agent_spawn::what_is_wrong,
        labels: config.gangs.labels.clone(),
    }
}
