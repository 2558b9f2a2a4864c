//! `attach` and `detach`: a machine that is reached by SSH becomes a node of the controller, and stops being one.
//!
//! `agent-attach` does the work on the machine; this module talks to the controller, which makes tokens and sees
//! nodes, and asks the user. The order is fixed: check everything, report everything, then change something.

mod desk;
mod failed;
mod inventory;

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use agent_attach::{Membership, Package, Person, SshHost, SshWish};
use agent_model::node::Grade;
use agent_model::{Code, Fault, Principal, TunnelSpec};
use agent_proto::v1;
use futures_util::stream::{self, StreamExt};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

use super::doctor;
use super::preempt::end_jobs;
use super::view::NodeView;
use crate::cli::{AttachArgs, DetachArgs, SshArgs, variable};
use crate::client::{Client, Target, answer, target};
use crate::failure::Failure;
use crate::output::Output;
use crate::output::table::{Cell, Table};
use crate::output::text::Tone;
use desk::Terminal;
use failed::fault;

/// How long a node may take to appear at the controller after its start.
const APPEARS: Duration = Duration::from_secs(90);
const LOOK: Duration = Duration::from_millis(200);
/// The most machines that are attached at a time: each holds a connection and an upload, and many SSH servers in
/// between let few log in at once.
const AT_A_TIME: usize = 16;
/// The lifetime of a token that is used at once.
const TOKEN_SECONDS: u64 = 900;

/// One machine to attach.
#[derive(Debug, Clone)]
struct Candidate {
    wish: SshWish,
    name: Option<String>,
    labels: HashMap<String, String>,
    accept_new: bool,
    /// The controller connects to it, and not it to the controller.
    tunnel: bool,
}

/// The new node, and how long it took to appear at the controller.
struct Attached {
    name: String,
    took: Duration,
}

/// Attaches one machine, or all machines of a file.
pub(super) async fn attach(
    args: AttachArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let client = Client::find(to).await?;
    let controller = Registrar {
        address: address(&client, to, args.controller.as_deref()).await?,
        client,
        seen: Mutex::default(),
    };
    let package = package(args.package.as_deref())?;
    let jobs = match &args.file {
        Some(file) => inventory::read(file, &args)?,
        None => vec![one(&args, output)?],
    };
    let single = jobs.len() == 1 && args.file.is_none();
    if jobs.len() > AT_A_TIME {
        output.note(&format!("attaching {} machines, {AT_A_TIME} at a time", jobs.len()));
    }
    let output = RefCell::new(output);
    let attached = stream::iter(&jobs).map(async |job| {
        let prefix = if single { String::new() } else { format!("{}: ", job.wish.place) };
        let desk = Terminal::new(&output, prefix, job.accept_new);
        attach_one(job, &controller, &package, &desk).await
    });
    let attached: Vec<Result<Attached, Fault>> = attached.buffered(AT_A_TIME).collect().await;
    let output = output.into_inner();
    if single {
        let attached =
            attached.into_iter().next().ok_or_else(|| Fault::new(Code::Bug, "nothing was attached"))?;
        let Attached { name, took } = attached?;
        output
            .note(&format!("{name} is a node; it was seen {:.1} s after it was started", took.as_secs_f64()));
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(&["HOST", "NODE", "SEEN AFTER", "RESULT"], &[2]).with_names(&[0, 1]);
    let mut failed = false;
    for (job, attached) in jobs.iter().zip(&attached) {
        failed |= attached.is_err();
        let (tone, cells) = match attached {
            Ok(done) => (
                Tone::Good,
                [done.name.clone(), format!("{:.1} s", done.took.as_secs_f64()), "attached".into()],
            ),
            Err(fault) => (Tone::Bad, [String::new(), String::new(), fault.to_string()]),
        };
        let [name, took, result] = cells;
        table.row([Cell::from(&job.wish.place), Cell::from(name), Cell::from(took), Cell::new(tone, result)]);
    }
    output.print(&table.render(output.paper()))?;
    Ok(ExitCode::from(u8::from(failed)))
}

/// The machine of a command line.
fn one(args: &AttachArgs, output: &mut Output) -> Result<Candidate, Failure> {
    Ok(Candidate {
        wish: wish(args.place.as_deref().unwrap_or_default(), &args.ssh, output)?,
        name: args.name.clone(),
        labels: args.label.iter().cloned().collect(),
        accept_new: args.ssh.accept_new,
        tunnel: args.tunnel,
    })
}

fn wish(place: &str, ssh: &SshArgs, output: &mut Output) -> Result<SshWish, Failure> {
    let password = if ssh.password_stdin {
        output.warn("a password can be guessed and seen; a key cannot: ssh-copy-id puts yours there");
        Some(desk::password_of_stdin()?)
    } else {
        None
    };
    Ok(SshWish {
        place: place.to_owned(),
        port: ssh.port,
        key: ssh.key.clone(),
        jump: ssh.jump.clone(),
        password,
        no_sudo: ssh.no_sudo,
        fingerprint: ssh.fingerprint.clone(),
        deadline: ssh.timeout,
    })
}

fn person() -> Result<Person, Failure> {
    let home = variable("HOME").map(PathBuf::from);
    let home =
        home.ok_or_else(|| Failure::refused("HOME is not set", "set it: keys and ~/.ssh/config are there"))?;
    let named = variable("USER").or_else(|| variable("LOGNAME"));
    // As ssh does: who it is is known to the system, whatever the environment says.
    let own =
        || crate::client::person(&Principal::Local { uid: rustix::process::getuid().as_raw() }.to_string());
    let user = named.unwrap_or_else(own);
    Ok(Person { home, user, agent: variable("SSH_AUTH_SOCK").map(PathBuf::from) })
}

fn package(file: Option<&Path>) -> Result<Package, Failure> {
    let opened = match file {
        Some(file) => Package::open(file),
        None => {
            let here = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_owned));
            Package::pack(&here.unwrap_or_default())
        }
    };
    opened.map_err(|error| {
        let fault = Fault::new(Code::HostUnfinished, "there is nothing to install");
        fault.because(&error).fix("name the .tar.gz of a release: --package FILE").into()
    })
}

/// The controller that machines are attached to.
struct Registrar {
    client: Client,
    address: String,
    /// The nodes that were ready at the last look, for all that wait for theirs.
    seen: Mutex<Option<(Instant, BTreeSet<String>)>>,
}

impl Registrar {
    async fn token(&self, labels: HashMap<String, String>) -> Result<v1::CreateTokenResponse, Fault> {
        let request = v1::CreateTokenRequest { labels, uses: 1, seconds: TOKEN_SECONDS };
        answer(self.client.identity().create_token(request)).await.map_err(told)
    }

    /// Revokes a token, used or not, because it is not needed any more.
    async fn revoke(&self, id: String) {
        let _ = answer(self.client.identity().revoke_token(v1::RevokeTokenRequest { id })).await;
    }

    /// The key that a host must accept, for a tunnel.
    async fn tunnel_key(&self) -> Result<String, Fault> {
        let asked = answer(self.client.nodes().get_tunnel_key(v1::GetTunnelKeyRequest {})).await;
        Ok(asked.map_err(told)?.public_key)
    }

    /// Has the controller keep a tunnel to the host of a node; returns when it is open.
    async fn keep_tunnel(&self, node: &str, spec: TunnelSpec) -> Result<(), Fault> {
        let TunnelSpec { host, port, user, host_key, listens } = spec;
        let (port, listens) = (port.into(), listens.into());
        let request = v1::KeepTunnelRequest { node: node.to_owned(), host, port, user, host_key, listens };
        answer(self.client.nodes().keep_tunnel(request)).await.map(drop).map_err(told)
    }

    /// Drops the tunnel of a node that did not come to be. One that is left is named by `status`.
    async fn drop_tunnel(&self, node: &str) {
        let _ =
            answer(self.client.nodes().drop_tunnel(v1::DropTunnelRequest { node: node.to_owned() })).await;
    }

    /// Whether a node of this name is ready. The controller is asked once for all who want to know at about the same
    /// time.
    async fn sees(&self, name: &str) -> bool {
        let mut seen = self.seen.lock().await;
        match &*seen {
            Some((at, ready)) if at.elapsed() < LOOK => ready.contains(name),
            _ => {
                let nodes = self.client.machines().await.map(|machines| machines.nodes).unwrap_or_default();
                let nodes = nodes.into_iter().filter_map(|node| NodeView::try_from(node).ok());
                let ready = nodes.filter(|node| matches!(&*node.liveness, "ready" | "degraded"));
                let ready: BTreeSet<String> = ready.map(|node| node.node).collect();
                let is_there = ready.contains(name);
                *seen = Some((Instant::now(), ready));
                is_there
            }
        }
    }

    /// Waits until there is one, and returns how long that took.
    async fn awaits(&self, name: &str) -> Option<Duration> {
        let started = Instant::now();
        while started.elapsed() < APPEARS {
            if self.sees(name).await {
                return Some(started.elapsed());
            }
            sleep(LOOK).await;
        }
        None
    }
}

fn told(failure: Failure) -> Fault {
    match failure {
        Failure::Fault(fault) => *fault,
        Failure::Refused { what, fix } => Fault::new(Code::RequestInvalid, what).fix(fix),
        Failure::PipeClosed | Failure::Interrupted => Fault::new(Code::Bug, "nobody reads the output"),
    }
}

/// The controller's address for machines: the given one, else the one that this user knows, else the one that the
/// controller names.
async fn address(client: &Client, to: Option<&Target>, said: Option<&str>) -> Result<String, Failure> {
    let known = match (said, to) {
        (Some(said), _) => said.trim_end_matches('/').to_owned(),
        (None, Some(Target::Context(context))) => context.credentials.controller.clone(),
        _ => {
            let request = v1::CreateTokenRequest { uses: 1, seconds: 1, ..Default::default() };
            let made = answer(client.identity().create_token(request)).await?;
            answer(client.identity().revoke_token(v1::RevokeTokenRequest { id: made.id })).await?;
            made.address
        }
    };
    target::place(&known)?;
    Ok(known)
}

/// A random word that identifies this attach.
fn word() -> Result<String, Fault> {
    let mut bytes = [0; 12];
    getrandom::fill(&mut bytes)
        .map_err(|error| Fault::new(Code::Bug, "the system gives no random bytes").why(error.to_string()))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

async fn attach_one(
    job: &Candidate,
    controller: &Registrar,
    package: &Package,
    desk: &Terminal<'_, '_>,
) -> Result<Attached, Fault> {
    let (host_of, port_of) = target::place(&controller.address)?;
    let person = person().map_err(told)?;
    let id = word()?;
    let opened = SshHost::open(&job.wish, &person, &id, Some((&host_of, port_of)), desk).await;
    let mut host = opened.map_err(|error| fault(&job.wish.place, &error))?;
    if job.tunnel || host.node().is_some_and(|node| node.tunnel.is_some()) {
        host.use_tunnel().await;
    }
    let host = host;
    let failed = |error| fault(&host.shown_as, &error);
    let findings = host.findings(&controller.address, package);
    let name = name(&host, job)?;
    let odd: Vec<_> = findings.iter().filter(|finding| finding.grade != Grade::Good).cloned().collect();
    if !odd.is_empty() {
        desk.show(&doctor::render(&host.shown_as, &odd, desk.paper()));
    }
    if agent_attach::is_unfit(&findings) {
        let bad = odd.iter().filter(|finding| finding.grade == Grade::Bad);
        let bad: Vec<String> = bad.map(|finding| format!("{}: {}", finding.topic, finding.found)).collect();
        return Err(Fault::new(Code::HostUnfit, format!("{} cannot be a node as it is", host.shown_as))
            .why(bad.join("; "))
            .fix("mend what is named above; nothing was changed there"));
    }
    let tunnel = host.tunnel();
    let node = Membership {
        controller: controller.address.clone(),
        name,
        tunnel: tunnel.as_ref().map(|tunnel| tunnel.listens),
    };
    host.lock(desk).await.map_err(failed)?;
    let is_seen = host.node().is_some() && controller.sees(&node.name).await;
    let key = if tunnel.is_some() { controller.tunnel_key().await? } else { String::new() };
    let (mut used, mut has_tunnel) = (None, false);
    let token = async || {
        if let Some(tunnel) = tunnel {
            controller.keep_tunnel(&node.name, tunnel).await.map_err(|fault| fault.to_string())?;
            has_tunnel = true;
        }
        let made = controller.token(job.labels.clone()).await.map_err(|fault| fault.to_string())?;
        used = Some(made.id);
        Ok(made.token)
    };
    let installed = host.install(package, &node, is_seen, &key, token, desk).await;
    if let Some(id) = used {
        controller.revoke(id).await;
    }
    if let Err(error) = installed {
        if has_tunnel && host.node().is_none() {
            controller.drop_tunnel(&node.name).await;
        }
        let fault = failed(error);
        host.unlock().await;
        return Err(fault);
    }
    desk.busy(&format!("waiting for {} to appear", node.name));
    let seen = controller.awaits(&node.name).await;
    let trouble = if seen.is_none() { host.trouble().await.unwrap_or_default() } else { String::new() };
    let shown_as = host.shown_as.clone();
    host.unlock().await;
    let late = || {
        let what = format!(
            "{shown_as} is installed, but no node `{}` appeared within {} s",
            node.name,
            APPEARS.as_secs()
        );
        Fault::new(Code::HostUnfinished, what).why(trouble).fix("run it again when that is mended")
    };
    seen.map(|took| Attached { name: node.name.clone(), took }).ok_or_else(late)
}

/// The node's name, present or future.
fn name(host: &SshHost, job: &Candidate) -> Result<String, Fault> {
    let there = host.node().map(|node| node.name).filter(|name| !name.is_empty());
    match (there, &job.name) {
        (Some(there), Some(wanted)) if there != *wanted => {
            Err(Fault::new(Code::HostUnfit, format!("{} is attached as {there}", host.shown_as))
                .fix("detach it first, or leave out --name"))
        }
        (Some(there), _) => Ok(there),
        (None, Some(wanted)) if wanted.parse::<agent_model::NodeId>().is_err() => {
            Err(Fault::new(Code::RequestInvalid, format!("`{wanted}` is no name of a node"))
                .fix("use letters, digits, `-` and `_`"))
        }
        (None, Some(wanted)) => Ok(wanted.clone()),
        (None, None) => Ok(plain(host.own_name())),
    }
}

/// A node name made from the name of a machine.
fn plain(host: &str) -> String {
    let first = host.split('.').next().unwrap_or_default();
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
    let name: String = first.chars().map(plain).collect();
    if name.is_empty() { "node".to_owned() } else { name }
}

/// Detaches a machine.
pub(super) async fn detach(
    args: DetachArgs,
    to: Option<&Target>,
    output: &mut Output,
) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let ours = address(&client, to, args.controller.as_deref()).await?;
    let wish = wish(&args.place, &args.ssh, output)?;
    let person = person()?;
    let id = word()?;
    let output = RefCell::new(output);
    let desk = Terminal::new(&output, String::new(), args.ssh.accept_new);
    let opened = SshHost::open(&wish, &person, &id, None, &desk).await;
    let mut host = opened.map_err(|error| fault(&args.place, &error))?;
    let Some(node) = host.node() else {
        output.borrow_mut().note(&format!("attach has installed nothing on {}", host.shown_as));
        return Ok(());
    };
    if node.controller != ours {
        let what = format!("{} is a node of {}, and not of {ours}", host.shown_as, node.controller);
        return Err(Fault::new(Code::JoinedElsewhere, what)
            .fix("speak to that controller (--context), or name it as the machine knows it: --controller URL")
            .into());
    }
    host.act_as_installed().map_err(|error| fault(&host.shown_as, &error))?;
    host.lock(&desk).await.map_err(|error| fault(&host.shown_as, &error))?;
    if args.lose_jobs {
        end_jobs(&client, &node.name, &mut |text| output.borrow_mut().note(text)).await?;
    }
    let request = v1::RemoveNodeRequest { node: node.name.clone(), lose_jobs: args.lose_jobs };
    match answer(client.identity().remove_node(request)).await {
        Ok(_) => {}
        // An earlier detach removed the node already, or the attach never created it.
        Err(Failure::Fault(fault)) if fault.code == Code::NodeUnknown => {}
        Err(other) => {
            host.unlock().await;
            return Err(other);
        }
    }
    desk.busy("taking it away");
    let removed = host.remove().await.map_err(|error| fault(&host.shown_as, &error));
    let shown_as = host.shown_as.clone();
    host.unlock().await;
    let kept = removed?;
    let mut output = output.borrow_mut();
    for path in kept {
        output.note(&format!("{path} stays: there is something in it that attach did not make"));
    }
    output
        .note(&format!("{} is no node any more, and what attach installed on {shown_as} is gone", node.name));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_names_of_machines_become_names_of_nodes() {
        for (host, node) in [("gpu-1.lab", "gpu-1"), ("böx", "b-x"), ("", "node"), ("a_b", "a_b")] {
            assert_eq!(plain(host), node);
            node.parse::<agent_model::NodeId>().unwrap();
        }
    }
}
