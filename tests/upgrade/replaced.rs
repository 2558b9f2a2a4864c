//! A box in the middle of its work whose programs are replaced by those of this release.

use std::fs;

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{Host, before, binaries};

use crate::upgrade::states::{self, Meanwhile};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "U1",
    promise: "running jobs, an array, a retry and half stored outputs of the release before are taken over",
    run: replaced,
}];

/// The supervisor of a running job, which has a name of its own.
fn instance(host: &Host) -> String {
    fs::read_to_string(host.state().join("jobs/runs.1.0/hello.json")).expect("it runs")
}

fn replaced(tally: &mut Tally, scale: &Scale) {
    // The second time somebody starts and stops it in between.
    for again in scale.of(vec![false], vec![false, true]) {
        let mut host = states::host();
        host.use_programs(before::programs());
        host.start();
        let told = states::begin(&mut host);
        let supervised = instance(&host);
        host.use_programs(binaries());
        tally.case("the daemon starts", || host.start());
        if again {
            host.stop();
            host.start();
        }
        tally.case("the supervisor is still that of the release before", || {
            assert_eq!(instance(&host), supervised);
        });
        states::go_on(tally, &host, &told, Meanwhile::Lived);
    }
}
