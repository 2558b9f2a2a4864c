//! Jobs on several nodes without anything special: that they start together, what they find, and what people see.

use agent_model::job::Distribution;
use agent_tests::eventually;
use agent_tests::fleet::Fleet;
use agent_tests::hosts::address;
use agent_tests::table::{Row, Scale, Tally};
use serde_json::{Value, json};

use crate::gangs::bed::{
    beating, beats, check_beats, completed, ctl, draft, fleet, history, log, nothing_left, setup, told,
};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "P1",
        promise: "ranks start together, know each other, and are seen each alone",
        run: together,
    },
    Row {
        id: "P2",
        promise: "pytorch, tensorflow and one node find the variables they look for",
        run: variables,
    },
    Row {
        id: "P3",
        promise: "cancel, restarts of daemons and a firewall leave nothing behind",
        run: disturbed,
    },
    Row { id: "P4", promise: "people get into each rank, on whatever node it is", run: inside },
];

const SHOW: &str = "echo I am $AGENTD_RANK of $AZUREML_NODE_COUNT at $AGENTD_ADDRESS, first is $MASTER_ADDR; \
                    echo \"{\\\"metric\\\": \\\"from_$RANK\\\", \\\"value\\\": 1}\" >> $AGENTD_METRICS; \
                    mkdir -p outputs; echo $RANK > outputs/rank";

/// The address that a rank says is its own, by [`SHOW`].
#[track_caller]
fn place(said: &str, rank: u32, ranks: u32) -> &str {
    let before = format!("I am {rank} of {ranks} at ");
    let place = said.lines().find_map(|line| line.strip_prefix(&before)?.split(',').next());
    place
        .filter(|place| place.starts_with("10.77.0."))
        .unwrap_or_else(|| panic!("no place of {rank}: {said}"))
}

fn together(tally: &mut Tally, _: &Scale) {
    let fleet = fleet(3);
    for ranks in [2, 3] {
        tally.case(&format!("{ranks} ranks"), || {
            let file = fleet.home().join(format!("beats-{ranks}"));
            let command = beating(&file, 5, SHOW);
            let job = fleet.client.submit(&draft(ranks, &command, None));
            completed(&fleet, &job);
            check_beats(&fleet, &job, &file);
            assert_eq!(beats(&file).len(), ranks as usize);
            let said: Vec<String> = (0..ranks).map(|rank| log(&fleet, &job, rank)).collect();
            let mut places: Vec<&str> =
                (0..ranks).zip(&said).map(|(rank, said)| place(said, rank, ranks)).collect();
            for (said, place) in said.iter().zip(&places) {
                assert!(said.contains(&format!(" at {place}, first is {}\n", places[0])), "{said}");
            }
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), ranks as usize, "each has a place of its own: {said:?}");
        });
    }
    tally.case("what people see", || {
        let job = fleet.client.submit(&draft(2, SHOW, None));
        completed(&fleet, &job);
        let merged = ctl(&fleet, &["logs", &job, "--merge"]).ok().stdout;
        assert!(merged.contains("[0] I am 0") && merged.contains("[1] I am 1"), "{merged}");
        let metrics = ctl(&fleet, &["metrics", &job]).ok().stdout;
        assert!(metrics.contains("from_0") && metrics.contains("from_1"), "{metrics}");
        let show = ctl(&fleet, &["show", &job]).ok().stdout;
        assert!(show.contains("0 on n") && show.contains("1 on n") && show.contains("completed"), "{show}");
        let to = fleet.home().join("got");
        ctl(&fleet, &["download", &job, "--logs", "-o", &to.display().to_string()]).ok();
        for (path, text) in [("outputs/rank", "0"), ("rank-1/outputs/rank", "1")] {
            assert_eq!(std::fs::read_to_string(to.join(path)).expect(path).trim(), text);
        }
        assert!(to.join("user_logs/std_log_1.txt").exists());
    });
    tally.case("a gang that does not fit says so", || {
        let job = fleet.client.submit(&draft(4, "true", None));
        eventually("it says why it waits", agent_tests::SOON, || {
            fleet.client.job(&job).detail.contains("it asks for 4 nodes at once").then_some(())
        });
        ctl(&fleet, &["cancel", &job]).ok();
    });
    nothing_left(&fleet);
}

fn inside(tally: &mut Tally, _: &Scale) {
    let fleet = fleet(2);
    let job = fleet.client.submit(&draft(2, "touch here; sleep 600", None));
    let exec =
        |rank: &str, script: &str| ctl(&fleet, &["exec", &job, "--rank", rank, "--", "sh", "-c", script]);
    tally.case("a command in each rank", || {
        for rank in ["0", "1"] {
            eventually("the rank runs", agent_tests::SOON, || {
                (exec(rank, "[ -e here ]").code == 0).then_some(())
            });
            let ran = exec(rank, "echo $AGENTD_RANK at $AGENTD_ADDRESS; exit 7").code(7);
            assert!(ran.stdout.starts_with(&format!("{rank} at 10.77.0.")), "{ran:?}");
        }
        exec("2", "true").code(125).says("no rank 2");
    });
    tally.case("it ends with the job", || {
        std::thread::scope(|scope| {
            let session = scope.spawn(|| exec("1", "sleep 600"));
            ctl(&fleet, &["cancel", &job, "--wait"]).ok();
            session.join().expect("it ends").code(125);
        });
    });
    nothing_left(&fleet);
}

fn variables(tally: &mut Tally, _: &Scale) {
    let fleet = fleet(2);
    let lines = |job: &str, rank: u32| {
        let mut lines: Vec<String> = log(&fleet, job, rank).lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    tally.case("pytorch, two processes on each node", || {
        let command = "echo $RANK $LOCAL_RANK $WORLD_SIZE $NODE_RANK $MASTER_ADDR";
        let pytorch = Distribution::PyTorch { processes: 2 };
        let job = fleet.client.submit(&draft(2, command, Some(pytorch)));
        completed(&fleet, &job);
        let first = log(&fleet, &job, 0);
        let first = first.split_whitespace().last().expect("an address").to_owned();
        assert_eq!(lines(&job, 0), [format!("0 0 4 0 {first}"), format!("1 1 4 0 {first}")]);
        assert_eq!(lines(&job, 1), [format!("2 0 4 1 {first}"), format!("3 1 4 1 {first}")]);
    });
    tally.case("one process that fails ends the job with its code", || {
        let command = "[ $RANK = 3 ] && exit 7; exec sleep 600";
        let pytorch = Distribution::PyTorch { processes: 2 };
        let job = fleet.client.submit(&draft(2, command, Some(pytorch)));
        let ended = fleet.client.ended(&job);
        assert_eq!(ended.state, "Failed", "{}", told(&fleet, &ended));
        let fault = ended.outcome.and_then(|outcome| outcome.fault).expect("a fault");
        assert!(fault.what.contains("rank 1 of 2") && fault.what.contains("returned 7"), "{fault:?}");
    });
    tally.case("the first port of the job can be listened at, and reached", || {
        const MEET: &str = "import os, socket, time
at = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))
if os.environ['RANK'] == '0':
    s = socket.create_server(at); c, _ = s.accept(); c.sendall(b'hello'); c.close()
else:
    for _ in range(100):
        try:
            print(socket.create_connection(at, 5).recv(9)); break
        except OSError: time.sleep(0.1)
";
        let command = format!("/usr/bin/python3 -c \"{MEET}\"");
        let job = fleet.client.submit(&draft(2, &command, Some(Distribution::PyTorch { processes: 1 })));
        completed(&fleet, &job);
        assert!(log(&fleet, &job, 1).contains("hello"));
    });
    tally.case("tensorflow", || {
        let tensorflow = Distribution::TensorFlow { workers: 2, parameter_servers: 1 };
        let job = fleet.client.submit(&draft(2, "echo $TF_CONFIG", Some(tensorflow)));
        completed(&fleet, &job);
        let told: Vec<Value> = [0, 1]
            .iter()
            .flat_map(|rank| lines(&job, *rank))
            .map(|line| serde_json::from_str(&line).expect("JSON"))
            .collect();
        assert_eq!(told.len(), 3, "a process for each task: {told:?}");
        let cluster = &told[0]["cluster"];
        assert!(told.iter().all(|one| one["cluster"] == *cluster), "{told:?}");
        assert_eq!(cluster["worker"].as_array().map(Vec::len), Some(2), "{cluster}");
        let tasks: Vec<&Value> = told.iter().map(|one| &one["task"]).collect();
        for task in [("worker", 0), ("worker", 1), ("ps", 0)] {
            let task = json!({ "type": task.0, "index": task.1 });
            assert!(tasks.contains(&&task), "no {task} among {tasks:?}");
        }
    });
    tally.case("one node", || {
        let command = "echo $RANK $WORLD_SIZE $MASTER_ADDR $AZUREML_NODE_COUNT";
        let job = fleet.client.submit(&draft(1, command, Some(Distribution::PyTorch { processes: 2 })));
        completed(&fleet, &job);
        assert_eq!(lines(&job, 0), ["0 2 127.0.0.1 1", "1 2 127.0.0.1 1"]);
    });
    nothing_left(&fleet);
}

fn disturbed(tally: &mut Tally, _: &Scale) {
    let mut fleet = Fleet::started(&setup(3));
    tally.case("cancel", || {
        let file = fleet.home().join("canceled");
        let job = fleet.client.submit(&draft(3, &beating(&file, 6000, "true"), None));
        fleet.client.reached(&job, &["Running"]);
        eventually("all ranks beat", agent_tests::SOON, || (beats(&file).len() == 3).then_some(()));
        ctl(&fleet, &["cancel", &job]).ok();
        assert_eq!(fleet.client.ended(&job).state, "Canceled");
        nothing_left(&fleet);
    });
    tally.case("daemons are restarted while ranks run", || {
        let file = fleet.home().join("bounced");
        let job = fleet.client.submit(&draft(3, &beating(&file, 60, SHOW), None));
        eventually("all ranks beat", agent_tests::SOON, || (beats(&file).len() == 3).then_some(()));
        fleet.nodes.iter_mut().for_each(|node| node.bounce());
        fleet.controller.bounce();
        let ended = completed(&fleet, &job);
        assert_eq!(ended.epoch, 1);
        check_beats(&fleet, &job, &file);
    });
    tally.case("a daemon is restarted while its rank waits for the others", || {
        fleet.nodes[2].set("AGENTD_FAILPOINTS", "cas.tree.write=delay:5000");
        fleet.nodes[2].bounce();
        fleet.ready();
        let file = fleet.home().join("waiting");
        let mut new = draft(3, &beating(&file, 5, "true"), None);
        new.code = Some(fleet.client.try_push(&[("code.py", "print(1)")]).expect("the code is sent"));
        let job = fleet.client.submit(&new);
        eventually("two ranks could start", agent_tests::SOON, || {
            let ready =
                history(&fleet, &job).iter().filter(|(_, _, text)| text.contains("could start, at")).count();
            (ready >= 2).then_some(())
        });
        let detail = fleet.client.job(&job).detail;
        fleet.nodes[0].bounce();
        fleet.controller.bounce();
        completed(&fleet, &job);
        check_beats(&fleet, &job, &file);
        assert!(detail.starts_with("rank "), "{detail}");
        fleet.nodes[2].set("AGENTD_FAILPOINTS", "");
        fleet.nodes[2].bounce();
        fleet.ready();
    });
    tally.case("a firewall is named and nothing starts", || {
        let hosts = fleet.hosts.as_ref().expect("there are hosts");
        hosts.plug(1, false);
        let file = fleet.home().join("walled");
        let job = fleet.client.submit(&draft(3, &beating(&file, 5, "true"), None));
        let ended = fleet.client.reached(&job, &["Failed"]);
        hosts.plug(1, true);
        let fault = ended.outcome.and_then(|outcome| outcome.fault).expect("a fault");
        assert_eq!(fault.code, "GANG-102");
        let names = fault.what.contains("cannot reach rank") && fault.what.contains(&address(1)[..8]);
        assert!(names, "{}", fault.what);
        assert!(beats(&file).is_empty(), "something started");
        nothing_left(&fleet);
    });
}
