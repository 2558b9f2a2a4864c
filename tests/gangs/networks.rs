//! Which of its addresses a node is met at.

use std::fs;

use agent_tests::client::Client;
use agent_tests::fleet::{Daemon, Fleet, Setup};
use agent_tests::hosts::address;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually, finish};

use crate::bed::{completed, ctl, draft, log, nothing_left};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "A1",
    promise: "ranks meet where nodes reach their controller, whatever other networks there are",
    run: route,
}];

/// Where the controller listens.
const PORT: u16 = 7443;

/// A controller on the first host, and a node on each of the others, which joined it.
fn over_tls(fleet: &mut Fleet, nodes: usize) {
    let hosts = fleet.hosts.as_ref().expect("there are hosts");
    let config = format!("roles: controller\ndisk_reserve: 64MiB\nlisten: {}:{PORT}\n", address(0));
    let home = fleet.home().to_owned();
    fleet.controller = Daemon::new(home.join("tls"), config).started_by(hosts.on(0));
    fleet.controller.spawn();
    fleet.client = Client::new(fleet.controller.socket());
    eventually("the controller answers", SOON, || fleet.client.nodes().ok());
    let token = ctl(fleet, &["token", "create", "--uses", &nodes.to_string(), "--json"]).ok().json();
    let file = home.join("token");
    fs::write(&file, token["token"].as_str().expect("a token")).expect("a file");
    let node = |index: usize| {
        let config = format!("node_name: n{index}\nslots: 4\ndisk_reserve: 64MiB\n");
        Daemon::new(home.join(format!("t{index}")), config).started_by(hosts.on(index))
    };
    fleet.nodes = (1..=nodes).map(node).collect();
    for node in &fleet.nodes {
        let to = format!("https://{}:{PORT}", address(0));
        finish(&mut node.command_of(&["join", &to, "--token-file", file.to_str().expect("UTF-8")])).ok();
    }
    fleet.nodes.iter_mut().for_each(Daemon::spawn);
    fleet.ready();
}

fn route(tally: &mut Tally, _: &Scale) {
    const NODES: usize = 2;
    let mut fleet = Fleet::new(&Setup { nodes: NODES + 1, hosts: true, ..Setup::default() });
    let hosts = fleet.hosts.as_ref().expect("there are hosts");
    (1..=NODES).for_each(|index| hosts.add_dead_end(index));
    over_tls(&mut fleet, NODES);
    tally.case("the way to the controller, not the one to everybody", || {
        let job = fleet.client.submit(&draft(2, "echo at $AGENTD_ADDRESS by $GLOO_SOCKET_IFNAME", None));
        completed(&fleet, &job);
        let said = [log(&fleet, &job, 0), log(&fleet, &job, 1)].concat();
        for index in 1..=NODES {
            assert!(said.contains(&format!("at {} by eth0\n", address(index))), "{said}");
        }
        nothing_left(&fleet);
    });
}
