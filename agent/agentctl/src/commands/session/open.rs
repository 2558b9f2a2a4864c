//! `open`: a service of a job, on this machine's loopback.
//!
//! The job need not have started it: what has a program of its own (`tensorboard`, `jupyter`) is started in the job by
//! a session, from the job's environment, and ends with this command. A `custom` one is a server of the job itself.

use std::time::Duration;

use agent_model::job::{JobService, JobSpec, ServiceKind};
use agent_model::{Code, Fault};
use agent_proto::v1;
use agent_proto::v1::session_open::To;
use agent_proto::v1::session_output::More;
use tokio::time::timeout;

use super::forward::{listen, serve};
use super::{OpenSession, SessionPlace};
use crate::cli::{OpenArgs, Ports};
use crate::client::{Client, Target};
use crate::commands::view::JobView;
use crate::failure::Failure;
use crate::output::Output;

/// How long a server may take until it says where it listens.
const STARTS: Duration = Duration::from_secs(120);

/// How much of what a server says is kept, in bytes.
const KEPT: usize = 64 * 1024;

/// Where Jupyter looks for a free port first; it takes the next one that is free.
const JUPYTER: u16 = 8888;

/// Opens a service, and serves until the job ends or the user has enough.
pub(super) async fn open(args: OpenArgs, to: Option<&Target>, output: &mut Output) -> Result<(), Failure> {
    let client = Client::find(to).await?;
    let job = JobView::try_from(client.job(&args.job).await?)?;
    let service = find(&job.spec, &args.service)?;
    if let Some((why, instead)) = service.kind.refusal() {
        let what = format!("`{}` of {} cannot be opened", args.service, job.job);
        return Err(Fault::new(Code::JobUnsupported, what).why(why).fix(instead).into());
    }
    let place = SessionPlace { job: job.job, rank: service.rank };
    let Some(argv) = command(&service) else {
        let remote = service.port.unwrap_or_default();
        let (at, listener) = listen(Ports { remote, local: args.port }).await?;
        output.print(&format!("http://127.0.0.1:{at}/\n"))?;
        return serve(&client, &place, vec![(remote, listener)], std::future::pending(), output).await;
    };
    let program = argv.first().cloned().unwrap_or_default();
    output.note(&format!("starting {program} in {}", place.job));
    let mut server = Server::start(&client, &place, argv).await?;
    let listens = timeout(STARTS, server.listens()).await;
    let (remote, path) = listens.unwrap_or_else(|_| {
        let what = format!("{program} did not say within {} s where it listens", STARTS.as_secs());
        Err(Failure::refused(what, "see what it does: `agentctl exec JOB -- bash`"))
    })?;
    let (at, listener) = listen(Ports { remote, local: args.port }).await?;
    output.print(&format!("http://127.0.0.1:{at}{path}\n"))?;
    serve(&client, &place, vec![(remote, listener)], server.ended(), output).await
}

/// The service that a name means: of the job file, or a kind that needs nothing from it.
fn find(spec: &JobSpec, name: &str) -> Result<JobService, Fault> {
    let kind = match name {
        "tensorboard" => Some(ServiceKind::TensorBoard),
        "jupyter" => Some(ServiceKind::JupyterLab),
        _ => ServiceKind::parse(name),
    };
    let of_kind = || spec.services.values().find(|service| Some(service.kind) == kind);
    if let Some(service) = spec.services.get(name).or_else(of_kind) {
        return Ok(service.clone());
    }
    match kind {
        Some(kind) if kind != ServiceKind::Custom => {
            Ok(JobService { kind, port: None, log_dir: String::new(), rank: 0 })
        }
        _ => {
            let known: Vec<&str> = spec.services.keys().map(String::as_str).collect();
            let fault = Fault::new(Code::SessionRefused, format!("the job has no service `{name}`"));
            let fault = match known.is_empty() {
                true => fault.why("its job file has no `services`"),
                false => fault.why(format!("there are: {}", known.join(", "))),
            };
            Err(fault.fix(
                "name one of these, or `tensorboard` or `jupyter_lab`; or reach a port: `agentctl forward`",
            ))
        }
    }
}

/// What starts the server of a service; `None` where the job does.
fn command(service: &JobService) -> Option<Vec<String>> {
    let port = |usual| service.port.unwrap_or(usual);
    let words = match service.kind {
        ServiceKind::TensorBoard => {
            let logs = if service.log_dir.is_empty() { "." } else { &service.log_dir };
            vec![
                "tensorboard".into(),
                "--logdir".into(),
                logs.into(),
                "--host=127.0.0.1".into(),
                format!("--port={}", port(0)),
            ]
        }
        ServiceKind::JupyterLab => {
            let port = format!("--port={}", port(JUPYTER));
            vec![
                "jupyter".into(),
                "lab".into(),
                "--no-browser".into(),
                "--allow-root".into(),
                "--ip=127.0.0.1".into(),
                port,
            ]
        }
        ServiceKind::Custom | ServiceKind::VsCode | ServiceKind::Ssh => return None,
    };
    Some(words)
}

/// A server that was started in the job.
struct Server {
    session: OpenSession,
    program: String,
    said: String,
}

impl Server {
    async fn start(client: &Client, place: &SessionPlace, argv: Vec<String>) -> Result<Server, Failure> {
        let program = argv.first().cloned().unwrap_or_default();
        let command = v1::SessionCommand { argv, terminal: None, term: String::new() };
        let session = OpenSession::open(client, place, To::Command(command)).await?;
        Ok(Server { session, program, said: String::new() })
    }

    /// Waits until it says where: the port, and what follows it in the address.
    async fn listens(&mut self) -> Result<(u16, String), Failure> {
        loop {
            if let Some(at) = served_at(&self.said) {
                return Ok(at);
            }
            self.hear().await?;
        }
    }

    /// Waits until it has ended, which it should not.
    async fn ended(mut self) -> Failure {
        loop {
            if let Err(failure) = self.hear().await {
                return failure;
            }
        }
    }

    async fn hear(&mut self) -> Result<(), Failure> {
        match self.session.next().await? {
            More::Out(data) | More::Err(data) => {
                self.said.push_str(&String::from_utf8_lossy(&data));
                if self.said.len() > KEPT {
                    self.said = self.said.chars().skip(self.said.chars().count() / 2).collect();
                }
                Ok(())
            }
            More::End(end) => Err(self.fault(end.code).into()),
            More::Ready(_) | More::Failed(_) => Ok(()),
        }
    }

    fn fault(&self, code: u32) -> Fault {
        let program = &self.program;
        let fault = Fault::new(Code::SessionRefused, format!("{program} ended with code {code} in the job"));
        let lines: Vec<&str> = self.said.lines().filter(|line| !line.trim().is_empty()).collect();
        let fault = lines[lines.len().saturating_sub(3)..].iter().fold(fault, |fault, line| fault.why(*line));
        fault.fix(match code {
            127 => format!("add {program} to the job's environment and submit it again"),
            _ => format!("try it: `agentctl exec JOB -- {program} --help`"),
        })
    }
}

/// The first address of loopback in whole lines of a text: its port, and what follows.
fn served_at(said: &str) -> Option<(u16, String)> {
    let whole = &said[..said.rfind('\n')?];
    let of_host = |host: &str| {
        whole.match_indices(host).find_map(|(at, _)| {
            let address = whole[at + host.len()..].split_whitespace().next()?;
            let end = address.find(|c: char| !c.is_ascii_digit()).unwrap_or(address.len());
            let (port, path) = address.split_at(end);
            let path = if path.starts_with('/') { path } else { "/" };
            Some((port.parse().ok()?, path.to_owned()))
        })
    };
    ["http://127.0.0.1:", "http://localhost:"].into_iter().find_map(of_host)
}

#[cfg(test)]
mod tests {
    use agent_model::job::JobDraft;

    use super::*;

    #[test]
    fn test_where_a_server_listens_is_read_from_what_it_says() {
        let board = "I0101 loading\nTensorBoard 2.14.0 at http://127.0.0.1:43211/ (Press CTRL+C to quit)\n";
        assert_eq!(served_at(board), Some((43211, "/".to_owned())));
        let lab =
            "running at:\n http://localhost:8889/lab?token=ab\n     http://127.0.0.1:8889/lab?token=ab\n";
        assert_eq!(served_at(lab), Some((8889, "/lab?token=ab".to_owned())));
        assert_eq!(served_at("at http://127.0.0.1:80"), None, "the line may go on");
        assert_eq!(served_at("see http://example.org:80/ and http://127.0.0.1:x\n"), None);
    }

    #[test]
    fn test_services_are_found_by_name_by_kind_and_without_a_job_file() {
        let custom = JobService { kind: ServiceKind::Custom, port: Some(1), log_dir: String::new(), rank: 0 };
        let board =
            JobService { kind: ServiceKind::TensorBoard, port: None, log_dir: "runs".into(), rank: 1 };
        let services = [("app".to_owned(), custom), ("curves".to_owned(), board.clone())].into();
        let draft = JobDraft { command: "x".into(), services, ..JobDraft::default() };
        let spec = draft.validate().unwrap();
        assert_eq!(find(&spec, "curves").unwrap(), board);
        assert_eq!(find(&spec, "tensorboard").unwrap(), board);
        assert_eq!(command(&board).unwrap()[2], "runs");
        assert_eq!(find(&spec, "jupyter_lab").unwrap().kind, ServiceKind::JupyterLab);
        let refused = find(&spec, "flask").unwrap_err();
        assert!(refused.why[0].contains("app, curves"), "{refused}");
        assert!(find(&spec, "ssh").unwrap().kind.refusal().is_some());
    }
}
