//! The section `services` of a command job: what can be opened in the job while it runs.

use std::collections::BTreeMap;

use super::keys::SERVICE;
use crate::section::{Mistakes, Rejection, Section, Warning};
use agent_model::job::{JobService, ServiceKind};

/// Reads the section, of a job on so many nodes. A kind that cannot be opened is a warning: the job runs as well.
pub(super) fn services(
    top: &mut Section,
    nodes: u32,
    warnings: &mut Vec<Warning>,
    wrong: &mut Mistakes,
) -> BTreeMap<String, JobService> {
    let mut services = BTreeMap::new();
    let section = wrong.note(top.section("services"));
    for (name, node) in section.map(Section::into_entries).unwrap_or_default() {
        let path = format!("services.{}", name.text);
        let read = Section::open(node, &path, &SERVICE).and_then(|section| service(section, nodes, warnings));
        services.extend(wrong.note(read.map(Some)).map(|service| (name.text, service)));
    }
    services
}

fn service(mut section: Section, nodes: u32, warnings: &mut Vec<Warning>) -> Result<JobService, Rejection> {
    let place = section.place();
    let word = section.word("type")?;
    let Some(kind) = word.and_then(ServiceKind::parse) else {
        return Err(Rejection::invalid(place, format!("`{}` is missing", section.name("type")))
            .fix(format!("write one of: {}", ServiceKind::WORDS.join(", "))));
    };
    if let Some((why, instead)) = kind.refusal() {
        warnings.push(Warning::new(place, format!("{why}; {instead}")));
    }
    let port = section.parsed::<u16>("port", "a port")?;
    if kind == ServiceKind::Custom && port.is_none() {
        return Err(Rejection::invalid(place, format!("`{}` is missing", section.name("port")))
            .fix("write the port where the server of the job listens"));
    }
    let rank = match section.text("nodes")?.as_deref().map(str::trim) {
        None | Some("" | "all") => 0,
        Some(rank) => rank.parse().ok().filter(|rank| *rank < nodes).ok_or_else(|| {
            Rejection::invalid(place, format!("`{}: {rank}` is no node of the job", section.name("nodes")))
                .fix("write `all`, or a number below `resources.instance_count`")
        })?,
    };
    let log_dir = section.text("log_dir")?.unwrap_or_default();
    section.finish(warnings);
    Ok(JobService { kind, port: port.filter(|port| *port > 0), log_dir, rank })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_job;
    use agent_model::Fault;

    #[test]
    fn test_services_are_read_and_what_cannot_be_opened_is_told() {
        let text = "command: sleep 1h\nservices:\n  board: {type: tensor_board, log_dir: runs}\n  \
                    lab: {type: jupyter_lab, nodes: all}\n  app: {type: custom, port: 8080, nodes: '0'}\n  \
                    shell: {type: ssh, ssh_public_keys: KEY}\n  code: {type: vs_code}\n";
        let job = command_job(text, &[]).unwrap();
        let kinds = job.draft.services.iter().map(|(name, service)| (name.as_str(), service.kind));
        let expected = [
            ("app", ServiceKind::Custom),
            ("board", ServiceKind::TensorBoard),
            ("code", ServiceKind::VsCode),
            ("lab", ServiceKind::JupyterLab),
            ("shell", ServiceKind::Ssh),
        ];
        assert_eq!(kinds.collect::<Vec<_>>(), expected);
        assert_eq!(job.draft.services["app"].port, Some(8080));
        assert_eq!(job.draft.services["board"].log_dir, "runs");
        let told: Vec<String> =
            job.warnings.iter().map(|told| format!("{}: {}", told.place, told.message)).collect();
        assert!(
            told.iter().any(|line| line.starts_with("line 6") && line.contains("agentctl exec")),
            "{told:?}"
        );
        assert!(told.iter().any(|line| line.starts_with("line 7") && line.contains("vs_code")), "{told:?}");
    }

    #[test]
    fn test_a_service_that_cannot_be_meant_is_refused_at_its_place() {
        for (entry, word) in [
            ("{type: notebook}", "notebook"),
            ("{port: 1}", "services.x.type"),
            ("{type: custom}", "services.x.port"),
            ("{type: custom, port: 99999}", "port"),
            ("{type: custom, port: 1, nodes: 3}", "nodes"),
        ] {
            let refused = command_job(&format!("command: x\nservices:\n  x: {entry}\n"), &[]).unwrap_err();
            let fault = Fault::from(refused);
            assert!(fault.what.contains("line 3") && fault.what.contains(word), "{entry}: {fault}");
        }
    }
}
