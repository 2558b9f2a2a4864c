//! Process trees that ignore signals: no process may be left, however the job ends.

use agent_shim::{CgroupRequest, Controller, Limits};
use tokio::task::JoinSet;

use super::*;

/// Each prints `ready` once it is as described. `$T` is a word that is on the command line of no other process of the
/// machine, so that all processes of a tree are found even without its mark.
const TREES: &[(&str, &str)] = &[
    (
        "double fork and new session",
        "(setsid sh -c '(sleep $0 &); sleep $0 &' $T &); sleep 0.1; echo ready; sleep $T",
    ),
    (
        "the polite signal ignored and inherited",
        "trap '' TERM; sleep $T & setsid sleep $T & echo ready; sleep $T",
    ),
    (
        "fork bomb",
        "perl -e '$0 = shift; $SIG{TERM} = \"IGNORE\"; syswrite STDOUT, \"ready\\n\"; \
         while (1) { fork; select undef, undef, undef, 0.01 }' $T",
    ),
    ("stopped", "sleep $T & kill -STOP $!; echo ready; kill -STOP $$"),
    (
        "stopped under a tracer",
        "perl -e 'if (!fork) { syscall 101, 0, 0, 0, 0; kill STOP => $$; exec sleep => $T } \
         select undef, undef, undef, 0.1; syswrite STDOUT, \"ready\\n\"; $SIG{TERM} = \"IGNORE\"; sleep 1000 while 1' $T",
    ),
    (
        "new process namespace",
        "unshare --pid --fork sh -c 'trap \"\" TERM; setsid sleep $0 & sleep $0' $T & sleep 0.1; echo ready; sleep $T",
    ),
    (
        "new user namespace",
        "unshare --user --pid --fork --mount sh -c 'setsid sleep $0 & sleep $0' $T & sleep 0.1; echo ready; sleep $T",
    ),
    (
        "ladder of sessions",
        "perl -MPOSIX -e '$0 = shift; $deepest = 1; \
         for (1..12) { if (fork) { $deepest = 0; last } POSIX::setsid() } \
         if ($deepest) { syswrite STDOUT, \"ready\\n\" } sleep 1000 while 1' $T",
    ),
    (
        "forks when asked to end",
        "trap '(setsid sleep $T &); sleep $T & sleep $T &' TERM; echo ready; while :; do sleep 0.01 $T; done; :",
    ),
    (
        "nohup",
        "nohup sleep $T >/dev/null 2>&1 & disown; (nohup setsid sleep $T &) 2>/dev/null; echo ready; exit 3",
    ),
    (
        "many threads",
        "perl -Mthreads -e '$SIG{TERM} = \"IGNORE\"; threads->create(sub { sleep 1000 while 1 }) for 1..40; \
         syswrite STDOUT, \"ready\\n\"; sleep 1000 while 1' $T",
    ),
    (
        "mark shed",
        "env -i setsid sh -c 'sleep $0 & sleep $0' $T & exec env -i sh -c 'echo ready; sleep $0; :' $T",
    ),
    (
        "frozen by itself",
        "g=$(ls -d /sys/fs/cgroup/freezer/agentd-$AGENTD_TEST-*); sleep $T & \
         if mkdir $g/cold && echo $! > $g/cold/cgroup.procs; then echo FROZEN > $g/cold/freezer.state; fi 2>/dev/null; \
         echo ready; sleep $T",
    ),
];

/// How a tree is ended.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Stop,
    KillShim,
}

/// Processes with `word` on their command line.
fn with_word(word: &str) -> Vec<i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let has = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(word)
    };
    pids.filter(|pid| Member::find(*pid).is_some() && has(pid)).collect()
}

async fn grow_and_end(name: &str, script: &str, way: Way, without: Vec<Controller>, round: u32) {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let what = format!("{name}, {way:?}, without {without:?}, round {round}");
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let word = format!("{}", 7_000_000_000 + u64::from(std::process::id()) * 1000 + u64::from(number));
    let (mark, script) = (format!("tree-{word}"), script.replace("$T", &word));
    let bench = Bench::new();
    let mut launch = launch_of(&["bash", "-c", &script]);
    launch.env.insert("AGENTD_TEST".into(), mark);
    launch.limits = Limits { memory: None, pids: Some(100) };
    launch.cgroup = Some(CgroupRequest { root: None, without });
    let running = bench.executor.launch(&bench.dir, &launch, None).await.unwrap();
    let ready = tokio::time::timeout(LONG / 2, bench.until_log_has("ready")).await;
    assert!(ready.is_ok(), "{what}: {}", String::from_utf8_lossy(&bench.log()));
    let groups = bench.dir.read_hello().unwrap().unwrap().groups;
    if way == Way::Stop {
        running.stop(Duration::from_millis(200), "enough").await.unwrap();
        let record = ended(&running).await;
        assert_eq!((record.unkilled, record.status().is_some()), (0, true), "{what}");
    } else {
        if let Some(shim) = Member::find(bench.dir.read_hello().unwrap().unwrap().pid) {
            let _ = shim.signal(Signal::SIGKILL); // unless the tree ended by itself
        }
        match tokio::time::timeout(LONG, running.wait()).await.unwrap() {
            Err(WaitError::Lost { lost, .. }) => assert_eq!(lost.left, 0, "{what}"),
            // It ended before the shim was killed.
            ended => assert!(ended.is_ok(), "{what}"),
        }
    }
    assert_eq!(with_word(&word), [0; 0], "{what}");
    assert_eq!(
        groups.iter().filter(|group| group.exists()).collect::<Vec<_>>(),
        [] as [&PathBuf; 0],
        "{what}"
    );
}

/// Runs only some at a time: the machine has other work.
async fn all(
    cases: impl IntoIterator<Item = (&'static (&'static str, &'static str), Way, Vec<Controller>, u32)>,
) -> usize {
    let (mut tasks, mut count) = (JoinSet::new(), 0);
    for ((name, script), way, without, round) in cases {
        if tasks.len() >= 4 {
            tasks.join_next().await.unwrap().unwrap();
        }
        tasks.spawn(grow_and_end(name, script, way, without, round));
        count += 1;
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    count
}

#[tokio::test(flavor = "multi_thread")]
async fn test_no_process_is_left_of_any_tree() {
    let rounds = (0..5).map(|round| (if round % 2 == 0 { Way::Stop } else { Way::KillShim }, round));
    let cases = rounds.flat_map(|(way, round)| TREES.iter().map(move |tree| (tree, way, Vec::new(), round)));
    // Without groups a fork bomb has no limit, and a process that removed its mark looks like any other.
    let bounded = containment().pids;
    let mut shown = false;
    let cases = cases.filter(|(tree, ..)| {
        let skip = !bounded && ["fork bomb", "mark shed", "frozen by itself"].contains(&tree.0);
        if skip && !std::mem::replace(&mut shown, true) {
            println!("skipped some: no control groups can be made here");
        }
        !skip
    });
    println!("{} trees left nobody", all(cases).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn test_no_process_is_left_without_what_kills_a_group_at_once() {
    use Controller::{Freezer, Memory, Pids, Unified};
    let mut cases = Vec::new();
    for tree in TREES {
        if containment().pids {
            cases.push((tree, Way::Stop, vec![Unified], 0));
            cases.push((tree, Way::KillShim, vec![Unified], 0));
            cases.push((tree, Way::Stop, vec![Unified, Freezer], 0));
        }
        if !["fork bomb", "frozen by itself"].contains(&tree.0) {
            cases.push((tree, Way::Stop, vec![Unified, Freezer, Memory, Pids], 0));
        }
    }
    println!("{} trees left nobody", all(cases).await);
}

#[tokio::test]
async fn test_grace_is_kept_whether_or_not_it_is_used() {
    let deaf = "trap '' TERM; echo ready; while :; do sleep 0.05; done";
    let polite = "trap 'sleep 0.2; echo bye; exit 5' TERM; echo ready; while :; do sleep 0.05; done";
    let plain = "echo ready; exec sleep 1000";
    for (grace, script, end, bye) in [
        (0, deaf, ExitStatus::Signal(9), false),
        (0, polite, ExitStatus::Signal(9), false),
        (0, plain, ExitStatus::Signal(9), false),
        (1, deaf, ExitStatus::Signal(9), false),
        (3, deaf, ExitStatus::Signal(9), false),
        (3, polite, ExitStatus::Code(5), true),
        (3, plain, ExitStatus::Signal(15), false),
    ] {
        let bench = Bench::new();
        let running = bench.start(script).await;
        bench.until_log_has("ready").await;
        let grace = Duration::from_secs(grace);
        let asked = Instant::now();
        running.stop(grace, "enough").await.unwrap();
        let record = ended(&running).await;
        assert_eq!((record.end, record.unkilled), (End::Exited(end), 0), "{grace:?} {script}");
        assert_eq!(String::from_utf8(bench.log()).unwrap().ends_with("bye\n"), bye, "{grace:?} {script}");
        // No process is killed before the grace is over.
        assert!(end != ExitStatus::Signal(9) || asked.elapsed() >= grace, "{grace:?} {script}");
    }
}

#[tokio::test]
async fn test_process_number_that_was_given_to_another_is_spared() {
    // The kernel is asked to reuse the number of a process that is gone.
    let file = "/proc/sys/kernel/ns_last_pid";
    if fs::OpenOptions::new().write(true).open(file).is_err() {
        println!("skipped: this kernel does not let the next process number be chosen");
        return;
    }
    let sleeper = || {
        #[allow(clippy::disallowed_methods, reason = "an innocent process beside the job's")]
        std::process::Command::new("sleep").arg("1000").spawn().unwrap()
    };
    let mut recycled = 0;
    for _ in 0..200 {
        let mut first = sleeper();
        let former = Member::find(first.id() as i32).unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await; // start times have a resolution of 10 ms
        first.kill().unwrap();
        first.wait().unwrap();
        fs::write(file, (former.pid - 1).to_string()).unwrap();
        let mut second = sleeper();
        if second.id() as i32 == former.pid {
            recycled += 1;
            assert!(!former.signal(Signal::SIGKILL).unwrap());
            assert!(second.try_wait().unwrap().is_none(), "the innocent one lives");
        }
        second.kill().unwrap();
        second.wait().unwrap();
        if recycled == 20 {
            break;
        }
    }
    println!("{recycled} numbers were given to another process, which was spared");
    assert!(recycled > 0);
}
