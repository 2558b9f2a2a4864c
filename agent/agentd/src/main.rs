//! `agentd`: turns this machine into a place where jobs run.
//!
//! Reads the command line, decides what to do, and turns the result into an exit code. A job is accepted in
//! `worker::reconcile` and driven in `worker::runner`.
//!
//! | Exit code | Means |
//! |---|---|
//! | 0 | stopped, or did what was asked |
//! | 1 | joining or leaving was refused; the message says by whom and what to do |
//! | 64 | the command line is wrong |
//! | 70 | a bug |
//! | 74 | the state directory cannot be used now, or its jobs cannot be moved; starting again later may help |
//! | 75 | the state directory is in use |
//! | 78 | the configuration, or what it points to, cannot be used |

mod authority;
mod cli;
mod config;
mod disk;
mod handshakes;
mod incoming;
mod journal_log;
mod limits;
mod membership;
mod metrics;
mod node_api;
mod notify;
mod open_connections;
mod reload;
mod roles;
mod shutdown;
mod supervisor;
mod tunnels;
mod worker;

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use agent_model::{Code, Fault};
use agent_runtime::exec::find_shim;
use clap::{CommandFactory, Parser};
use futures_util::FutureExt;
use tokio::signal::unix::{SignalKind, signal};
use tracing::info;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;

use cli::{Cli, Verb};
use config::{Config, Variables};
use journal_log::JournalLog;
use notify::Notifier;
use reload::{LogFilter, Reloader};
use roles::StartError;
use supervisor::Supervisor;
use worker::views::Views;

const REFUSED: u8 = 1;
const USAGE: u8 = 64;
const BUG: u8 = 70;
const NOT_NOW: u8 = 74;
const IN_USE: u8 = 75;
const CONFIG: u8 = 78;

/// The most threads for tasks; blocking work runs on other threads.
const THREADS: usize = 4;

/// How long blocking work may go on after a stop.
const LINGER: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    // The daemon passed the library to load; a configuration that was changed since must not matter.
    if let Some(Verb::GpuLook { library: Some(library) }) = &cli.verb {
        return look_at_gpus(Some(library));
    }
    // This does not depend on the machine or its configuration.
    if let Some(Verb::Man { into }) = &cli.verb {
        return write_manual(into);
    }
    let mut flags = cli.flags;
    if let Some(Verb::Join(args)) = &cli.verb {
        flags.controller = Some(args.controller.clone());
    }
    flags.without_identity = matches!(cli.verb, Some(Verb::Probe { .. }));
    let config = match Config::resolve(&flags, &Variables::of_process()) {
        Ok(config) => config,
        Err(error) => {
            let fault = Fault::new(Code::ConfigInvalid, "the configuration is not valid").because(&error);
            return fail(&fault, CONFIG);
        }
    };
    match cli.verb.unwrap_or(Verb::Run) {
        Verb::Run => run(config, flags),
        Verb::Join(args) => change_membership(&config, Some(&args)),
        Verb::Leave => change_membership(&config, None),
        Verb::CheckConfig => print("the configuration is valid\n"),
        Verb::ShowConfig => print(&config::show(&config)),
        Verb::Probe { json } => probe(&config, json),
        Verb::GpuLook { .. } => look_at_gpus(config.devices.nvml_library.as_deref()),
        Verb::Man { into } => write_manual(&into),
    }
}

fn run(mut config: Config, flags: cli::Flags) -> ExitCode {
    let reloader = Reloader::new(flags, start_log(&config), &config);
    if let Some(helper) = &config.jobs.helper {
        agent_spawn::use_helper(helper, &config.state_dir);
    } else if let Err(error) = agent_spawn::take_in_orphans() {
        tracing::warn!(error = &error as &dyn std::error::Error, "cannot take in orphans of lost jobs");
    }
    config.host.open_files = limits::raise();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    match runtime {
        Ok(runtime) => {
            // In a box, like the other one: `block_on` has several loops, each with a copy of all that it runs.
            let code = runtime.block_on(serve(config, reloader).boxed_local());
            // Work that hangs in the kernel must not keep the daemon from ending.
            runtime.shutdown_timeout(LINGER);
            code
        }
        Err(error) => fail(&Fault::new(Code::Bug, "agentd cannot start its threads").because(&error), BUG),
    }
}

/// Makes this machine a node of a controller, or none; no daemon may run meanwhile.
fn change_membership(config: &Config, join: Option<&cli::JoinArgs>) -> ExitCode {
    let token = join.and_then(membership::token_of_file);
    if let Err(error) = agent_spawn::become_owner(&config.state_dir) {
        let what = format!("cannot become the user whose {} is", config.state_dir.display());
        return fail(&Fault::new(Code::StateUnusable, what).because(&error), CONFIG);
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&Fault::new(Code::Bug, "agentd cannot start").because(&error), BUG),
    };
    let change = async {
        let _lock = roles::take_state(config).await.map_err(|error| (error.fault(), exit_code(&error)))?;
        let changed = match join {
            Some(args) => membership::join(config, args, token, config.clock()).await,
            None => membership::leave(config),
        };
        changed.map_err(|fault| (fault, REFUSED))
    };
    match runtime.block_on(change.boxed_local()) {
        Ok(said) => print(&format!("{said}\n")),
        Err((fault, code)) => fail(&fault, code),
    }
}

/// Runs until a signal asks it to stop, or a vital task ends.
async fn serve(config: Config, mut reloader: Reloader) -> ExitCode {
    let supervisor = Supervisor::new();
    let notifier = Notifier::new(config.manager.address.as_deref(), config.manager.patience);
    // Signal handlers are installed first, so that a stop during the start is a stop.
    let hear = || {
        let [term, int, hup] = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()];
        std::io::Result::Ok((signal(term)?, signal(int)?, signal(hup)?))
    };
    let (mut term, mut int, mut hup) = match hear() {
        Ok(heard) => heard,
        Err(error) => {
            return fail(&Fault::new(Code::Bug, "agentd cannot hear signals").because(&error), BUG);
        }
    };
    let running = match roles::start(config, &supervisor, &notifier).await {
        Ok(running) => running,
        Err(error) => return fail(&error.fault(), exit_code(&error)),
    };
    notifier.ready(&running.describe());
    let stopped = supervisor
        .run(async {
            loop {
                tokio::select! {
                    _ = term.recv() => break info!("asked to stop; jobs go on"),
                    _ = int.recv() => break info!("interrupted; jobs go on"),
                    Some(()) = hup.recv() => reloader.reload(),
                }
            }
            notifier.stopping("stopping; jobs go on");
        })
        .await;
    drop(running);
    info!("stopped");
    match stopped {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => fail(&Fault::new(Code::Bug, "agentd had to stop").because(&failure), BUG),
    }
}

fn exit_code(error: &StartError) -> u8 {
    match error {
        StartError::InUse { .. } => IN_USE,
        error if error.may_pass() => NOT_NOW,
        _ => CONFIG,
    }
}

/// Logs to the journal where systemd reads standard error, and else to standard error. Whoever else reads that for
/// journald adds the time.
fn start_log(config: &Config) -> LogFilter {
    // It was checked with the configuration.
    let filter: Targets = config.log.parse().unwrap_or_default();
    let (filter, handle) = tracing_subscriber::reload::Layer::new(filter);
    let registry = tracing_subscriber::registry().with(filter);
    let stream = config.journal_stream.as_deref();
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let started = match JournalLog::connect(stream) {
        Some(journal) => tracing::subscriber::set_global_default(registry.with(journal)),
        None if stream.is_some() => {
            tracing::subscriber::set_global_default(registry.with(lines.without_time()))
        }
        None => tracing::subscriber::set_global_default(registry.with(lines)),
    };
    debug_assert!(started.is_ok(), "the log is started once");
    handle
}

fn probe(config: &Config, json: bool) -> ExitCode {
    // Without it nothing can be tried, and no job runs.
    let views = find_shim(&config.host.path).map(|shim| Views::find(config, &shim)).unwrap_or_default();
    let inventory = agent_node::probe(&roles::probe_config(config, &views));
    if json {
        return print(&format!("{}\n", serde_json::to_string_pretty(&inventory).unwrap_or_default()));
    }
    let line = |finding: &agent_model::node::Finding| {
        format!(
            "{:<16} {:<9} {}: {}\n",
            finding.topic,
            format!("{:?}", finding.grade),
            finding.found,
            finding.means
        )
    };
    print(&inventory.findings.iter().map(line).collect::<String>())
}

/// The driver may hang or crash in here, so the daemon limits its wait and kills this process.
fn look_at_gpus(library: Option<&Path>) -> ExitCode {
    let look = agent_node::gpu::look(library);
    print(&format!("{}\n", serde_json::to_string(&look).unwrap_or_default()))
}

fn write_manual(into: &Path) -> ExitCode {
    match clap_mangen::generate_to(Cli::command(), into) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {}: {error}", into.display());
            ExitCode::from(USAGE)
        }
    }
}

fn print(text: &str) -> ExitCode {
    // When standard output is closed, there is nowhere to report it.
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}

fn fail(fault: &Fault, code: u8) -> ExitCode {
    let fix = fault.fix.as_deref().map(|fix| format!("\n  fix: {fix}")).unwrap_or_default();
    let _ =
        writeln!(std::io::stderr(), "error[{}]: {}: {}{fix}", fault.code, fault.what, fault.why.join(": "));
    ExitCode::from(code)
}
