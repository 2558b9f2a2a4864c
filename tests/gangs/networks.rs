//! Which of its addresses a node is met at.

use agent_tests::fleet::{Fleet, Setup};
use agent_tests::hosts::address;
use agent_tests::table::{Row, Scale, Tally};

use crate::gangs::bed::{completed, draft, log, nothing_left};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "A1",
    promise: "ranks meet where nodes reach their controller, whatever other networks there are",
    run: route,
}];

fn route(tally: &mut Tally, _: &Scale) {
    const NODES: usize = 2;
    let mut fleet = Fleet::new(&Setup { nodes: NODES + 1, hosts: true, ..Setup::default() });
    let hosts = fleet.hosts.as_ref().expect("there are hosts");
    (1..=NODES).for_each(|index| hosts.add_dead_end(index));
    fleet.move_to_tls(&Setup::default());
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
