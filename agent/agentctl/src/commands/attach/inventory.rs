//! Reads a file of machines: `hosts:`, each a place or a mapping with the command line's options for one machine.

use std::path::Path;

use agent_attach::SshWish;
use agent_jobfile::yaml::{self, At, Entries, Node, Value};
use agent_model::{Code, Fault};

use super::Candidate;
use crate::cli::AttachArgs;

/// Reads the machines of a file; options of the command line are for machines that set no other value.
pub(super) fn read(file: &Path, args: &AttachArgs) -> Result<Vec<Candidate>, Fault> {
    let wrong = |why: String| {
        Fault::new(Code::RequestInvalid, format!("{} names no machines to attach", file.display()))
            .why(why)
            .fix("see agent/docs/attach.md for its form")
    };
    let text = crate::prepare::read_text(file).map_err(|error| wrong(error.to_string()))?;
    parse(&text, args)
        .map_err(|at| wrong(format!("line {}, column {}: {}", at.place.line, at.place.column, at.message)))
}

fn parse(text: &str, args: &AttachArgs) -> Result<Vec<Candidate>, At> {
    let mut top = yaml::parse(text)?.map()?;
    let hosts = needed(&mut top, "hosts")?;
    nothing_else(top, "`hosts`")?;
    hosts.list()?.iter().map(|host| job(host.clone(), args)).collect()
}

fn job(host: Node, args: &AttachArgs) -> Result<Candidate, At> {
    let ssh = &args.ssh;
    let mut job = Candidate {
        wish: SshWish {
            port: ssh.port,
            key: ssh.key.clone(),
            jump: ssh.jump.clone(),
            no_sudo: ssh.no_sudo,
            deadline: ssh.timeout,
            ..SshWish::default()
        },
        name: None,
        labels: args.label.iter().cloned().collect(),
        accept_new: ssh.accept_new,
        tunnel: args.tunnel,
    };
    if let Value::Scalar(_) = host.value {
        host.text()?.clone_into(&mut job.wish.place);
        return Ok(job);
    }
    let mut entries = host.map()?;
    needed(&mut entries, "host")?.text()?.clone_into(&mut job.wish.place);
    let mut text =
        |key: &str| entries.take_present(key).map(|node| node.text().map(str::to_owned)).transpose();
    job.name = text("name")?;
    if let Some(key) = text("key")? {
        job.wish.key = Some(key.into());
    }
    job.wish.jump = text("jump")?.or(job.wish.jump);
    job.wish.fingerprint = text("fingerprint")?;
    if let Some(port) = entries.take_present("port") {
        job.wish.port = Some(port.parsed("a port")?);
    }
    if let Some(tunnel) = entries.take_present("tunnel") {
        job.tunnel = tunnel.parsed("true or false")?;
    }
    if let Some(labels) = entries.take_present("labels") {
        for (key, value) in labels.map()?.rest() {
            job.labels.insert(key.text, value.text()?.to_owned());
        }
    }
    nothing_else(entries, "`host`, `port`, `key`, `jump`, `name`, `fingerprint`, `labels`, `tunnel`")?;
    Ok(job)
}

fn needed(entries: &mut Entries, key: &str) -> Result<Node, At> {
    let place = entries.place;
    entries.take(key).ok_or_else(|| At { place, message: format!("there is no `{key}`") })
}

fn nothing_else(entries: Entries, known: &str) -> Result<(), At> {
    match entries.rest().into_iter().next() {
        None => Ok(()),
        Some((key, _)) => {
            Err(At { place: key.place, message: format!("`{}` is not known; there are {known}", key.text) })
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Verb};

    fn jobs(text: &str) -> Result<Vec<Candidate>, String> {
        let line = ["agentctl", "attach", "-f", "x", "--label", "rack=7", "--key", "/k"];
        let Verb::Attach(args) = Cli::try_parse_from(line).unwrap().verb else { panic!("not attach") };
        parse(text, &args).map_err(|at| at.to_string())
    }

    #[test]
    fn test_a_place_is_enough_and_a_mapping_says_more() {
        let text = "hosts:\n- ada@a\n- host: b\n  port: 7\n  key: /other\n  name: n\n  labels: {rack: 8, x: y}\n  tunnel: true\n";
        let jobs = jobs(text).unwrap();
        assert_eq!((jobs[0].wish.place.as_str(), jobs[0].labels["rack"].as_str()), ("ada@a", "7"));
        assert_eq!(jobs[0].wish.key.as_deref(), Some(Path::new("/k")));
        assert_eq!((jobs[1].wish.port, jobs[1].name.as_deref()), (Some(7), Some("n")));
        assert_eq!((jobs[1].labels["rack"].as_str(), jobs[1].labels["x"].as_str()), ("8", "y"));
        assert_eq!(jobs[1].wish.key.as_deref(), Some(Path::new("/other")));
        assert_eq!((jobs[0].tunnel, jobs[1].tunnel), (false, true));
    }

    #[test]
    fn test_a_file_of_machines_is_read_as_the_guide_shows_it() {
        let page = include_str!("../../../../docs/attach.md");
        let shown = page.split("```yaml\n").nth(1).unwrap().split("```").next().unwrap();
        let jobs = jobs(shown).unwrap();
        assert_eq!((jobs[0].wish.place.as_str(), jobs[1].wish.place.as_str()), ("ada@gpu-1", "ada@gpu-2"));
        assert_eq!((jobs[1].name.as_deref(), jobs[1].labels["rack"].as_str()), (Some("second"), "8"));
    }

    #[test]
    fn test_mistakes_have_a_place() {
        let rows = [
            ("x: 1\n", "there is no `hosts`"),
            ("hosts:\n- {port: 7}\n", "line 2, column 3: there is no `host`"),
            ("hosts:\n- {host: a, prot: 7}\n", "`prot` is not known"),
            ("hosts:\n- {host: a, port: x}\n", "expected a port"),
        ];
        for (text, what) in rows {
            let error = jobs(text).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }
}
