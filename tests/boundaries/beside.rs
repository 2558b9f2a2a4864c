//! A hostile job beside those of others: it attacks all it finds on the machine, again and again, while they run.

use std::fs;

use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};

use crate::boundaries::users::{ENDED, GAMES, NOBODY, shared, submitted};

pub(crate) const ROWS: &[Row] =
    &[Row { id: "A1", promise: "what runs beside a hostile job gives the same as without it", run: beside }];

/// What others run: lines, a metric, outputs, processes that hide, a file in `/tmp`.
const WORK: &str = "echo $$ >/tmp/mine; for i in 1 2 3 4 5 6; do echo line $i; \
    echo \"{\\\"metric\\\":\\\"loss\\\",\\\"value\\\":0.$i}\" >>$AGENTD_METRICS; sleep 0.5; done; \
    setsid sleep 1 & wait; cmp /tmp/mine - <<< $$ && echo kept >outputs/f";

fn beside(tally: &mut Tally, scale: &Scale) {
    let host = shared(&[("AGENTD_SLOTS", "4")]);
    let attack = host.home().join("hostile.py");
    fs::copy(agent_tests::root().join("tests/boundaries/hostile.py"), &attack).expect("a script");
    let hostile = submitted(&host, NOBODY, &format!("python3 {} 600", attack.display()), "");
    let rounds =
        || host.ctl(&["logs", &hostile]).stdout.lines().filter(|line| line.starts_with("round")).count();
    eventually("it attacks", SOON, || (rounds() > 0).then_some(()));
    let (daemon, first) = (host.pid(), rounds());
    for number in 0..scale.of(4, 60) {
        tally.case(&format!("job {number} beside it"), || {
            let job = submitted(&host, GAMES, WORK, "");
            assert_eq!(host.wait_for(&job, ENDED), "Completed", "{}", host.ctl(&["why", &job]).stdout);
            let lines: String = (1..7).map(|line| format!("line {line}\n")).collect();
            assert_eq!(host.ctl(&["logs", &job]).ok().stdout, lines);
            let metrics = host.ctl(&["metrics", &job, "--json"]).ok().json();
            assert_eq!(
                (&metrics["metrics"][0]["last"], &metrics["metrics"][0]["count"]),
                (&0.6.into(), &6.into())
            );
            let to = host.home().join("got");
            host.ctl(&["download", &job, "--output", to.to_str().expect("UTF-8")]).ok();
            assert_eq!(fs::read_to_string(to.join("outputs/f")).expect("an output"), "kept\n");
            fs::remove_dir_all(&to).expect("its own directory");
        });
    }
    tally.case("it attacked all the time, got nothing, and the daemon is the same", || {
        assert!(rounds() > first);
        host.ctl(&["cancel", &hostile]).ok();
        host.wait_for(&hostile, ENDED);
        let said = host.ctl(&["logs", &hostile]).ok().stdout;
        assert!(!said.contains("GOT"), "{said}");
        assert_eq!(host.pid(), daemon);
    });
}
