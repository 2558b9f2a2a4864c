//! Group D: nodes that are containers of a real engine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use agent_control::provider::MachineState;
use agent_tests::engine::Engine;
use agent_tests::images::{Image, Root};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, binaries, eventually, finish};

use crate::pools::bed::{Bed, Lab, nobody_shows, refused};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "D1",
        promise: "docker: a container joins as the node it is to be, and goes again",
        run: joins,
    },
    Row { id: "D2", promise: "docker: what is missing, half made, ended or somebody else's", run: odd },
];

const NODE: &str = "agentd-test/node:1";

/// An image that has agentd, as an operator makes one.
#[allow(clippy::disallowed_methods, reason = "makes what it tests")]
pub(crate) fn image() -> &'static str {
    static MADE: OnceLock<()> = OnceLock::new();
    MADE.get_or_init(|| {
        let docker = Engine::shared();
        Image::Python.on(&docker);
        let home = tempfile::tempdir().expect("a directory");
        let mut layer = Root::new();
        for name in ["agentd", "agent-shim"] {
            let small = home.path().join(name);
            finish(Command::new("strip").arg("-o").arg(&small).arg(binaries().join(name))).ok();
            layer.file(&format!("usr/bin/{name}"), 0o755, &std::fs::read(small).expect("a program"));
        }
        docker.layer(Image::Python.tag(), layer.finish(), NODE);
    });
    NODE
}

fn lab<'a>(bed: &'a Bed, more: &str) -> Lab<'a> {
    bed.provider(&config(more))
}

/// What a file of providers says of the tests' engine.
pub(crate) fn config(more: &str) -> String {
    let host = Engine::shared().socket().display().to_string();
    format!("{{use: docker, host: 'unix://{host}', network: host, {more}}}")
}

/// The first process of a container, as its root directory shows it.
fn inside(id: &str, path: &str) -> PathBuf {
    let state = Engine::shared().inspect(id).expect("the container").state.expect("a state");
    Path::new(&format!("/proc/{}/root", state.pid.expect("it runs"))).join(path)
}

fn joins(tally: &mut Tally, _: &Scale) {
    let mut bed = Bed::new();
    bed.pool = "single"; // row P1 has machines of the pool `gpu` on the same engine
    let lab = lab(&bed, &format!("image: '{}', node: {{slots: 3}}", image()));
    let begun = std::time::Instant::now();
    let id = tally.case("a container joins, with its name and slots", || {
        let id = lab.create("r-1", "box-1").expect("a container");
        bed.joined("box-1");
        let nodes = bed.client.nodes().expect("nodes");
        let inventory = nodes.into_iter().find(|node| node.node == "box-1").and_then(|node| node.inventory);
        assert_eq!(inventory.expect("an inventory").slots, 3);
        id
    });
    tally.note(format!("from the wish to a ready node: {:.1} s", begun.elapsed().as_secs_f64()));
    let Some(id) = id else { return };
    tally.case("the token is in no argument, variable, file or label", || {
        nobody_shows(&bed.token, &bed.path("lab"));
        assert!(!format!("{:?}", Engine::shared().inspect(&id)).contains(&bed.token));
        assert!(!inside(&id, "agentd-join/script").exists());
    });
    tally.case("the same request is the same container, and another is another", || {
        assert_eq!(lab.create("r-1", "box-1").expect("a container"), id);
        let other = lab.create("r-2", "box-2").expect("a container");
        let mut there = lab.there();
        there.sort_by_key(|one| one.1.clone());
        let one = |id: &str, number: u32| (id.to_owned(), format!("r-{number}"), format!("box-{number}"));
        assert_eq!(there, [one(&id, 1), one(&other, 2)]);
        bed.joined("box-2");
    });
    tally.case("it goes by its id or by its request, and twice is as good", || {
        lab.delete(&id).expect("it goes");
        lab.is(&id, MachineState::Gone);
        lab.delete(&id).expect("it is gone");
        lab.delete_request("r-2").expect("it goes");
        eventually("no container is left", SOON, || lab.list().is_empty().then_some(()));
        lab.delete_request("r-2").expect("it is gone");
    });
}

/// What is left where the provider was killed before it started the container.
#[allow(clippy::disallowed_methods, reason = "makes what it tests")]
fn half_made() -> String {
    let host = format!("unix://{}", Engine::shared().socket().display());
    let mut make = Command::new("docker");
    make.args(["--host", &host, "create", "--name", "agentd-odd-r-3", "--network", "host"]);
    make.args([
        "--label",
        "agentd.pool=odd",
        "--label",
        "agentd.request=r-3",
        "--label",
        "agentd.node=box-3",
    ]);
    make.args([image(), "sh", "-c", "exec </agentd-join/script; exec sh -s"]);
    finish(&mut make).ok().stdout.trim()[..12].to_owned()
}

fn odd(tally: &mut Tally, _: &Scale) {
    let mut bed = Bed::new();
    bed.pool = "odd";
    let docker = Engine::shared();
    tally.case("no registry, no such setting, no engine", || {
        let missing = lab(&bed, "image: '127.0.0.1:9/none:1'");
        assert_eq!(refused(missing.create("r-1", "n"), "docker failed"), "temporary");
        let wrong = lab(&bed, "image: x, imgae: y");
        assert_eq!(refused(wrong.create("r-1", "n"), "there is no setting `imgae`"), "permanent");
        let away = bed.provider("{use: docker, host: 'unix:///nowhere.sock', image: x}");
        assert_eq!(refused(away.create("r-1", "n"), "docker failed"), "temporary");
        assert!(missing.list().is_empty());
    });
    let lab = lab(&bed, &format!("image: '{}'", image()));
    tally.case("one that was made and not started is started", || {
        let half = half_made();
        lab.is(&half, MachineState::Creating);
        assert_eq!(lab.create("r-3", "box-3").expect("a container"), half);
        bed.joined("box-3");
    });
    tally.case("one that ended is gone, and what is left of it can be deleted", || {
        let id = lab.list()[0].id.clone();
        docker.kill(&id);
        lab.is(&id, MachineState::Gone);
        lab.delete(&id).expect("it goes");
        eventually("nothing is left of it", SOON, || lab.list().is_empty().then_some(()));
    });
    tally.case("a container of somebody else is not listed and not deleted", || {
        let id = docker.create("somebody-else", image(), &["sleep", "600"], &[("agentd.pool", "other")]);
        lab.delete(&id[..12]).expect("it is none of ours");
        assert!(lab.list().is_empty() && docker.inspect(&id).is_some());
        docker.remove(&id);
    });
}
