use super::*;
use proptest::prelude::*;

fn job(name: &str, gpus: u32, memory: u64) -> Pending {
    let wants = Resources { gpus, memory, ..Resources::default() };
    let (job, priority) = (name.parse().unwrap(), Priority::Medium);
    let owner = Some("ada".into());
    Pending {
        job,
        wants,
        needs: JobNeeds::default(),
        priority,
        owner,
        longest: None,
        python: None,
        requires: Vec::new(),
        avoid: None,
    }
}

/// What runs on a node, for so many minutes at the most.
fn runs(name: &str, gpus: u32, minutes: Option<u64>) -> Taken {
    let ends = minutes.map(|minutes| Duration::from_secs(60 * minutes));
    let size = Size { gpus, ..Size::default() };
    Taken { job: name.parse().unwrap(), owner: Some("eve".into()), size, ends }
}

fn minutes(minutes: u64) -> Option<Duration> {
    Some(Duration::from_secs(60 * minutes))
}

fn names(decided: &Placements) -> Vec<&str> {
    decided.placed.iter().map(|(job, _)| job.as_str()).collect()
}

/// Without any report of interpreters, and without limits.
fn place(pending: &[Pending], nodes: Vec<Room>) -> Placements {
    place_within(UserLimits::default(), pending, nodes)
}

fn place_within(limits: UserLimits, pending: &[Pending], nodes: Vec<Room>) -> Placements {
    super::place(pending, nodes, &Pythons::new(), limits)
}

/// With these interpreters.
fn place_with(pending: &[Pending], nodes: Vec<Room>, pythons: &Pythons<'_>) -> Placements {
    super::place(pending, nodes, pythons, UserLimits::default())
}

fn room(name: &str, slots: u32) -> Room {
    let (node, unfit) = (name.parse().unwrap(), String::new());
    let size = Size { gpus: 0, cpus: 8, memory: 1 << 30 };
    let labels = BTreeMap::new();
    Room {
        presence: Presence::There,
        node,
        closed: None,
        slots,
        size,
        job_cpus: 0,
        unfit,
        labels,
        gangs: true,
        lacking: Vec::new(),
        kept: Arc::default(),
        taken: Vec::new(),
        barred: Default::default(),
    }
}

/// The same with GPUs.
fn gpu_room(name: &str, slots: u32, gpus: u32) -> Room {
    let node = room(name, slots);
    Room { size: Size { gpus, ..node.size }, ..node }
}

fn reason(decided: &Placements, name: &str) -> String {
    let found = decided.waiting.iter().find(|(job, _)| job.as_str() == name);
    found.map(|(_, wait)| wait.to_string()).unwrap_or_default()
}

#[test]
fn test_a_job_is_placed_where_the_engine_of_its_environment_is() {
    let lacking =
        |name: &str| Room { lacking: vec![(Capability::Containers, "not there".into())], ..room(name, 4) };
    let image = Pending { requires: vec![Capability::Containers], ..job("image", 0, 0) };
    let both = Pending { requires: vec![Capability::Containers, Capability::Conda], ..job("both", 0, 0) };
    let plain = job("plain", 0, 0);
    let jobs = [image.clone(), both, plain];
    let decided = place(&jobs, vec![lacking("a"), room("b", 2)]);
    let on = |decided: &Placements, name: &str| {
        let found = decided.placed.iter().find(|(job, _)| job.as_str() == name);
        found.map(|(_, nodes)| nodes[0].to_string())
    };
    assert_eq!(on(&decided, "image").as_deref(), Some("b"));
    assert_eq!(on(&decided, "both").as_deref(), Some("b"));
    assert_eq!(on(&decided, "plain").as_deref(), Some("a"), "others use the rest");
    let nowhere = place(&jobs, vec![lacking("a"), lacking("c")]);
    assert_eq!(on(&nowhere, "plain").as_deref(), Some("a"));
    let (_, why) = nowhere.waiting.iter().find(|(job, _)| job.as_str() == "image").unwrap();
    assert_eq!(
        why.to_string(),
        "too few nodes have a container engine: on a it is not there, on c it is not there; `agentctl doctor` says \
         what to do"
    );
    let busy = Room { taken: vec![runs("x", 0, None), runs("y", 0, None)], ..room("b", 2) };
    let full = place(&[image], vec![lacking("a"), busy]);
    assert!(full.waiting[0].1.to_string().starts_with("next in line, both slots of b busy"), "{full:?}");
}

#[test]
fn test_reason_names_who_is_ahead_and_who_runs() {
    let mut node = room("box", 2);
    for name in ["train-a", "train-b"] {
        node.taken.push(runs(name, 0, None));
    }
    let decided = place(&[job("c", 0, 0), job("d", 0, 0)], vec![node]);
    assert_eq!(reason(&decided, "c"), "next in line, both slots of box busy: train-a, train-b");
    assert_eq!(reason(&decided, "d"), "1 job ahead, both slots of box busy: train-a, train-b");
}

#[test]
fn test_jobs_share_a_node_by_size() {
    let gib = 1 << 30;
    let size = Size { gpus: 0, cpus: 4, memory: 8 * gib };
    let node = Room { size, job_cpus: 1, ..room("box", 4) };
    let sized = |name: &str, cpus, memory| {
        let mut job = job(name, 0, memory);
        job.wants.cpus = cpus;
        job
    };
    // One that says nothing counts for a processor and a quarter of the memory.
    let decided = place(&[sized("a", 2, 0), sized("b", 0, 3 * gib), sized("c", 0, 0)], vec![node.clone()]);
    assert_eq!(names(&decided), ["a", "b"]);
    assert_eq!(
        reason(&decided, "c"),
        "next in line, box has 1 of 4 CPUs, 1 GiB of 8 GiB of memory free, and it takes 1 CPU and 2 GiB there: a, b"
    );
    let all: Vec<Pending> = ["a", "b", "c", "d", "e"].map(|name| job(name, 0, 0)).into();
    assert_eq!(names(&place(&all, vec![node.clone()])), ["a", "b", "c", "d"]);
    let large = place(&[sized("large", 5, 0)], vec![node.clone()]);
    assert_eq!(
        reason(&large, "large"),
        "no node is large enough for 5 CPUs, 0 GPUs: box has for jobs 4 CPUs, 0 GPUs and 8 GiB of memory"
    );
    // What a job counts for there is also what is kept free for it.
    let mut busy = node;
    busy.taken = vec![runs("now", 0, Some(60)), runs("long", 0, None)];
    let mut short = sized("short", 2, 0);
    short.longest = minutes(30);
    let decided = place(&[sized("wide", 3, 0), sized("narrow", 1, 0), short], vec![busy]);
    assert_eq!(names(&decided), ["short"]);
    assert!(reason(&decided, "wide").contains("starts in 60 min at the latest"), "{decided:?}");
}

#[test]
fn test_job_no_node_could_hold_waits_and_does_not_block() {
    let mut gang = job("gang", 0, 0);
    gang.wants.nodes = 2;
    let decided = place(&[gang.clone(), job("gpu", 2, 0), job("small", 0, 0)], vec![room("box", 1)]);
    assert_eq!(decided.placed, [("small".parse().unwrap(), vec!["box".parse().unwrap()])]);
    assert_eq!(reason(&decided, "gang"), "it asks for 2 nodes at once, and 1 could run it");
    let alone = place(&[gang], vec![Room { gangs: false, ..room("box", 1) }]);
    assert_eq!(reason(&alone, "gang"), "it asks for 2 nodes at once, and no node runs a part of a job yet");
    assert!(reason(&decided, "gpu").contains("box has 1 slot, 0 GPUs"));
    assert_eq!(reason(&place(&[job("a", 0, 0)], vec![]), "a"), "no node has joined yet");
    let closed = Room { closed: Some("does not answer".into()), ..room("box", 1) };
    let decided = place(&[job("a", 0, 0)], vec![closed]);
    assert_eq!(reason(&decided, "a"), "no node takes work now: box does not answer");
}

#[test]
fn test_job_that_wants_gpus_is_told_of_those_that_are_not_handed_out() {
    let unfit = "1 of its 2 GPUs not handed out: GPU 1: lost".to_owned();
    let node = Room { unfit, ..gpu_room("box", 4, 1) };
    let decided = place(&[job("two", 2, 0)], vec![node.clone()]);
    assert_eq!(
        reason(&decided, "two"),
        "no node is large enough for 2 GPUs: box has 4 slots, 1 GPU and 1 GiB of memory \
         (1 of its 2 GPUs not handed out: GPU 1: lost)"
    );
    let decided = place(&[job("a", 1, 0), job("b", 1, 0)], vec![node.clone()]);
    assert!(reason(&decided, "b").contains("0 of 1 GPU "), "{}", reason(&decided, "b"));
    assert!(reason(&decided, "b").contains("GPU 1: lost): a"), "{}", reason(&decided, "b"));
    let full = place(&[job("c", 0, 2 << 30)], vec![node]);
    assert!(!reason(&full, "c").contains("lost"), "{}", reason(&full, "c"));
}

#[test]
fn test_labels_are_demanded_and_missing_ones_are_named() {
    let labeled = |name: &str, labels: &[(&str, &str)]| {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Room { labels, ..room(name, 1) }
    };
    let wants = |name: &str, nodes, kind: &str| {
        let labels = [("instance_type".to_owned(), kind.to_owned())].into();
        Pending { wants: Resources { nodes, labels, ..Resources::default() }, ..job(name, 0, 0) }
    };
    let nodes = vec![
        labeled("small", &[("instance_type", "Standard_DS3_v2")]),
        labeled("large", &[("instance_type", "Standard_NC6"), ("rack", "7")]),
    ];
    let jobs = [wants("a", 1, "STANDARD_NC6"), wants("b", 1, "Standard_ND96"), wants("c", 2, "standard_nc6")];
    let decided = place(&jobs, nodes.clone());
    assert_eq!(decided.placed, [("a".parse().unwrap(), vec!["large".parse().unwrap()])]);
    let told = reason(&decided, "b");
    assert!(
        told.starts_with("too few nodes have the label instance_type=Standard_ND96: small has instance_type")
    );
    assert!(reason(&decided, "c").contains("instance_type=standard_nc6"), "{}", reason(&decided, "c"));
    // This node has no instance type, so it matches any; a missing label of another key does not match.
    let decided = place(&jobs[1..2], [nodes, vec![labeled("box", &[])]].concat());
    assert_eq!(decided.placed, [("b".parse().unwrap(), vec!["box".parse().unwrap()])]);
    let mut rack = wants("d", 1, "any");
    rack.wants.labels.insert("rack".to_owned(), "8".to_owned());
    assert!(reason(&place(&[rack], vec![labeled("box", &[])]), "d").contains("rack=8"));
}

#[test]
fn test_processors_are_counted() {
    let wants =
        |name: &str, cpus| Pending { wants: Resources { cpus, ..Resources::default() }, ..job(name, 0, 0) };
    let jobs = [wants("six", 6), wants("four", 4), wants("two", 2), wants("many", 9)];
    let decided = place(&jobs, vec![room("box", 4)]);
    assert_eq!(names(&decided), ["six"], "what is promised to the second is nobody else's");
    assert!(
        reason(&decided, "four").contains("box has 3 of 4 slots, 2 of 8 CPUs"),
        "{}",
        reason(&decided, "four")
    );
    assert!(reason(&decided, "many").starts_with("no node is large enough for 9 CPUs"));
}

#[test]
fn test_retry_avoids_its_last_node_only_if_another_has_room() {
    let avoiding = Pending { avoid: Some("x".parse().unwrap()), ..job("a", 0, 0) };
    let on = |nodes| place(std::slice::from_ref(&avoiding), nodes).placed[0].1[0].to_string();
    assert_eq!(on(vec![room("x", 9), room("y", 1)]), "y");
    assert_eq!(on(vec![room("x", 1)]), "x");
}

#[test]
fn test_job_waits_for_its_python_and_blocks_nobody() {
    let interpreter = |name: &str| Interpreter { name: name.into(), version: "3.11.7".into() };
    let said = [interpreter("python3"), interpreter("python3.11")];
    let (a, b): (NodeId, NodeId) = ("a".parse().unwrap(), "b".parse().unwrap());
    let wants = |name: &str, python: &str| Pending { python: Some(python.to_owned()), ..job(name, 0, 0) };
    let jobs = [wants("old", "python3.9"), wants("new", "python3.11"), job("any", 0, 0)];
    let nodes = vec![room("a", 3)];

    let decided = place_with(&jobs, nodes.clone(), &Pythons::from([(&a, &said[..])]));
    assert_eq!(decided.placed.iter().map(|(job, _)| job.as_str()).collect::<Vec<_>>(), ["new", "any"]);
    let reason_of_old = "no node has a Python called python3.9; a has python3 (3.11.7), python3.11 (3.11.7)";
    assert_eq!(reason(&decided, "old"), reason_of_old);

    // A node that reports no interpreters may have any.
    let decided = place_with(&jobs[..1], vec![room("a", 3), room("b", 1)], &Pythons::from([(&a, &said[..])]));
    assert_eq!(decided.placed[0].1, [b]);
    // One that has it and takes no work is worth waiting for.
    let drained = Room { closed: Some("is being drained".into()), ..room("b", 1) };
    let decided = place_with(&jobs[..1], vec![room("a", 3), drained], &Pythons::from([(&a, &said[..])]));
    assert_eq!(reason(&decided, "old"), "no node takes work now: b is being drained");
    // If no node could hold it, that is the reason given: to install the interpreter would not help.
    let large = Pending { wants: Resources { gpus: 9, ..Resources::default() }, ..jobs[0].clone() };
    let decided = place_with(&[large], nodes, &Pythons::from([(&a, &said[..])]));
    assert!(reason(&decided, "old").starts_with("no node is large enough"));
}

#[test]
fn test_small_jobs_run_beside_a_promise_only_if_they_cannot_delay_it() {
    let gang = |name: &str| Pending {
        wants: Resources { nodes: 2, gpus: 2, ..Resources::default() },
        ..job(name, 2, 0)
    };
    let node = |name: &str| gpu_room(name, 2, 2);
    let mut busy = node("a");
    busy.taken.push(runs("long", 2, Some(30)));
    let nodes = vec![busy.clone(), node("b")];
    let limited = |name: &str, gpus, limit| Pending { longest: minutes(limit), ..job(name, gpus, 0) };
    // It must wait half an hour for a; b stays free for it then.
    let jobs =
        [gang("gang"), limited("short", 2, 30), limited("later", 1, 31), job("open", 1, 0), job("cpu", 0, 0)];
    let decided = place(&jobs, nodes.clone());
    assert_eq!(names(&decided), ["short", "cpu"], "a short one, and one that takes nothing of what it needs");
    let told = reason(&decided, "gang");
    assert!(told.starts_with("next in line, starts in 30 min at the latest, "), "{told}");
    assert!(reason(&decided, "later").starts_with("1 job ahead"));

    // It is not known when a is free: then b takes no new jobs, and a third node takes them.
    busy.taken[0].ends = None;
    let decided = place(&jobs, vec![busy.clone(), node("b")]);
    assert_eq!(names(&decided), [""; 0]);
    let decided = place(&jobs, vec![busy, node("b"), node("c")]);
    assert_eq!(names(&decided)[0], "gang");
}

#[test]
fn test_a_large_job_starts_however_many_small_ones_come() {
    let mut nodes: Vec<Room> = (0..6).map(|i| room(&format!("n{i}"), 2)).collect();
    for (i, node) in nodes.iter_mut().enumerate() {
        node.taken.extend([runs(&format!("x{i}"), 0, None), runs(&format!("y{i}"), 0, None)]);
    }
    let gang = Pending { wants: Resources { nodes: 4, ..Resources::default() }, ..job("gang", 0, 0) };
    let mut rounds = 0;
    loop {
        // Something ends, and more small jobs than there is room for wait behind the large one.
        let slot = rounds * 7 % 12;
        let node = &mut nodes[slot / 2];
        node.taken.truncate(node.taken.len().saturating_sub(1));
        let small = (0..9).map(|i| job(&format!("s{rounds}-{i}"), 0, 0));
        let decided = place(&std::iter::once(gang.clone()).chain(small).collect::<Vec<_>>(), nodes.clone());
        if names(&decided).contains(&"gang") {
            break;
        }
        for (name, on) in &decided.placed {
            let node = nodes.iter_mut().find(|node| node.node == on[0]).unwrap();
            node.taken.push(runs(name.as_str(), 0, None));
        }
        rounds += 1;
        assert!(rounds < 100, "it starves");
    }
    assert!(rounds >= 3, "it had to wait for four nodes");
}

#[test]
fn test_who_has_least_of_the_machines_goes_first() {
    let of = |name: &str, owner: &str, gpus| Pending { owner: Some(owner.into()), ..job(name, gpus, 0) };
    let jobs =
        [of("a1", "ada", 0), of("a2", "ada", 0), of("a3", "ada", 0), of("b1", "bob", 0), of("b2", "bob", 0)];
    assert_eq!(names(&place(&jobs, vec![room("box", 4)])), ["a1", "b1", "a2", "b2"]);
    // What runs counts, GPUs more than slots.
    let mut node = gpu_room("box", 3, 2);
    node.taken.push(Taken { owner: Some("ada".into()), ..runs("x", 2, None) });
    assert_eq!(names(&place(&jobs, vec![node])), ["b1", "b2"]);
    // A better priority goes first, whatever its owner has.
    let urgent = Pending { priority: Priority::High, ..of("urgent", "ada", 0) };
    let jobs = [urgent, of("a1", "ada", 0), of("b1", "bob", 0)];
    assert_eq!(names(&place(&jobs, vec![room("box", 2)])), ["urgent", "b1"]);
}

fn of(owner: &str, job: Pending) -> Pending {
    Pending { owner: Some(owner.into()), ..job }
}

#[test]
fn test_jobs_beyond_a_limit_wait_say_why_and_let_others_pass() {
    let limits = UserLimits { jobs: Some(2), ..UserLimits::default() };
    let mut node = room("box", 9);
    node.taken.push(Taken { owner: Some("ada".into()), ..runs("x", 0, None) });
    let jobs = [job("a1", 0, 0), job("a2", 0, 0), job("a3", 0, 0), of("bob", job("b1", 0, 0))];
    let decided = place_within(limits, &jobs, vec![node]);
    assert_eq!(names(&decided), ["b1", "a1"]);
    let set = "`limits_per_user` in the configuration of the controller allows 2 jobs at a time";
    assert_eq!(reason(&decided, "a2"), format!("ada has 2 jobs already: {set}"));
    assert_eq!(reason(&decided, "a3"), format!("after a2, for which ada has no room: {set}"));
}

#[test]
fn test_limits_count_all_ranks_and_what_never_fits_blocks_nobody() {
    let limits = UserLimits { gpus: Some(4), cpus: Some(8), ..UserLimits::default() };
    let nodes = || vec![gpu_room("a", 4, 4), gpu_room("b", 4, 4), gpu_room("c", 4, 4)];
    let gang = |name: &str, nodes, gpus| Pending {
        wants: Resources { nodes, gpus, ..Resources::default() },
        ..job(name, 0, 0)
    };
    let jobs =
        [gang("six", 3, 2), gang("two", 2, 1), gang("three", 3, 1), job("one", 1, 0), job("cpu", 0, 0)];
    let decided = place_within(limits, &jobs, nodes());
    assert_eq!(names(&decided), ["two", "cpu"], "one GPU waits behind three, no GPU does not");
    assert!(reason(&decided, "six").starts_with("it asks for 6 GPUs and never starts so: "));
    assert!(
        reason(&decided, "three").starts_with("ada has 2 GPUs already: "),
        "{}",
        reason(&decided, "three")
    );
    assert!(reason(&decided, "one").starts_with("after three, for which ada has no room: "));
    // One that no node could hold does not hold up others by a limit either.
    let wide =
        |name: &str, cpus| Pending { wants: Resources { cpus, ..Resources::default() }, ..job(name, 0, 0) };
    let small = Room { size: Size { cpus: 4, ..Size::default() }, ..room("d", 4) };
    let decided =
        place_within(limits, &[wide("w", 2), wide("large", 7), wide("v", 4)], vec![small.clone(), small]);
    assert_eq!(names(&decided), ["w", "v"]);
    assert!(reason(&decided, "large").starts_with("no node is large enough"));
}

#[test]
fn test_limits_of_a_gang_are_all_or_nothing_and_it_starts_in_the_end() {
    // Two gangs of one user, each half of the limit and more: they take turns, and neither holds a part.
    let limits = UserLimits { gpus: Some(6), ..UserLimits::default() };
    let gang = |name: &str| Pending {
        wants: Resources { nodes: 2, gpus: 2, ..Resources::default() },
        ..job(name, 0, 0)
    };
    let nodes = || vec![gpu_room("a", 4, 4), gpu_room("b", 4, 4)];
    let decided = place_within(limits, &[gang("g1"), gang("g2")], nodes());
    assert_eq!(names(&decided), ["g1"]);
    let mut busy = nodes();
    busy.iter_mut()
        .for_each(|node| node.taken.push(Taken { owner: Some("ada".into()), ..runs("g1", 2, None) }));
    let small: Vec<Pending> = (0..9).map(|i| job(&format!("s{i}"), 1, 0)).collect();
    let line: Vec<Pending> = std::iter::once(gang("g2")).chain(small).collect();
    assert_eq!(names(&place_within(limits, &line, busy)), [""; 0], "small ones do not take its share");
    assert_eq!(names(&place_within(limits, &line, nodes()))[0], "g2");
}

#[test]
fn test_a_node_with_the_environment_comes_first_and_one_with_the_code_among_equals() {
    use agent_model::{Digest, JobDraft};

    let draft = |requirement: &str, code: u8| JobDraft {
        environment: EnvSpec::Pip { python: "python3".into(), requirements: vec![requirement.into()] },
        code: Some(Digest { hash: [code; 32], size: 1 }),
        ..JobDraft::default()
    };
    let has = |name: &str, slots, draft: &JobDraft| {
        let mut node = room(name, slots);
        Arc::make_mut(&mut node.kept).note(&JobNeeds::of(draft));
        node
    };
    let needs = |draft: &JobDraft| Pending { needs: JobNeeds::of(draft), ..job("a", 0, 0) };
    let on = |job: Pending, nodes: &[Room]| place(&[job], nodes.to_vec()).placed[0].1[0].to_string();
    let nodes =
        [room("x", 4), has("y", 4, &draft("torch", 7)), has("z", 2, &draft("numpy", 8)), room("w", 9)];
    assert_eq!(on(needs(&draft("numpy", 7)), &nodes), "z", "its environment is worth more than room");
    assert_eq!(on(needs(&draft("other", 7)), &nodes), "w", "room is worth more than its code");
    assert_eq!(on(needs(&draft("other", 7)), &nodes[..3]), "y", "its code decides between equals");
    let host = JobDraft { environment: EnvSpec::host(), ..draft("", 9) };
    assert_eq!(on(needs(&host), &nodes[..3]), "x", "what is on every machine prefers none");
    let avoiding = Pending { avoid: Some("z".parse().unwrap()), ..needs(&draft("numpy", 8)) };
    assert_eq!(on(avoiding, &nodes), "w");
}

#[test]
fn test_a_long_line_costs_little() {
    let nodes: Vec<Room> = (0..1000)
        .map(|i| {
            let mut node = gpu_room(&format!("n{i}"), 4, 4);
            node.taken.push(runs(&format!("r{i}"), 4, Some(i % 60)));
            node
        })
        .collect();
    let jobs: Vec<Pending> = (0..10_000)
        .map(|i| Pending {
            owner: Some(format!("user {}", i % 50)),
            wants: Resources { nodes: 1 + i % 3, gpus: 1 + i % 4, ..Resources::default() },
            longest: if i % 2 == 0 { minutes(u64::from(i % 90)) } else { None },
            ..job(&format!("j{i}"), 0, 0)
        })
        .collect();
    let begun = std::time::Instant::now();
    let decided = place(&jobs, nodes);
    assert_eq!(decided.placed.len() + decided.waiting.len(), jobs.len());
    println!("placed {} of 10,000 jobs on 1,000 nodes in {:?}", decided.placed.len(), begun.elapsed());
}

#[test]
fn test_only_names_of_interpreters_are_judged_from_afar() {
    let host = |python: &str| EnvSpec::Host { python: python.into(), requirements: Vec::new() };
    assert_eq!(python_of(&host("python3.9")), Some("python3.9"));
    assert_eq!(python_of(&host("/opt/python/bin/python3")), None);
    assert_eq!(python_of(&EnvSpec::Named { reference: "azureml:x".into() }), None);
}

/// GPUs, memory, nodes, interpreter, and a limit in minutes.
fn any_job() -> impl Strategy<Value = (u32, u64, u32, Option<u8>, Option<u64>)> {
    (0u32..4, 0u64..5, 1u32..3, prop::option::of(0u8..3), prop::option::of(1u64..9))
}

/// Slots, GPUs, memory, whether it is closed, its interpreter, and what runs there: GPUs and minutes left.
type AnyRoom = (u32, u32, u64, bool, Option<u8>, Vec<(u32, Option<u64>)>);

fn any_room() -> impl Strategy<Value = AnyRoom> {
    let running = prop::collection::vec((0u32..2, prop::option::of(1u64..9)), 0..3);
    (0u32..4, 0u32..5, 0u64..6, prop::bool::weighted(0.2), prop::option::of(0u8..3), running)
}

/// How long it takes at the most until a job can start on some of these nodes, as far as limits tell.
fn soonest(job: &Pending, rooms: &[Room]) -> Option<Duration> {
    let fits = |room: &Room, at: Duration| {
        let mut room = room.clone();
        room.taken.retain(|taken| taken.ends.is_none_or(|ends| ends > at));
        room.holds_now(&job.wants)
    };
    let ends = rooms.iter().flat_map(|room| &room.taken).filter_map(|taken| taken.ends);
    let mut times: Vec<Duration> = ends.chain([Duration::ZERO]).collect();
    times.sort_unstable();
    times
        .into_iter()
        .find(|at| rooms.iter().filter(|room| fits(room, *at)).count() >= job.wants.nodes as usize)
}

proptest! {
    #[test]
    fn test_place_keeps_room_and_order_and_gives_reasons(
        jobs in prop::collection::vec(any_job(), 0..20),
        rooms in prop::collection::vec(any_room(), 0..5),
        (most_jobs, most_gpus) in (prop::option::of(0u32..6), prop::option::of(0u32..6)),
    ) {
        let pending: Vec<Pending> = jobs.iter().enumerate().map(|(i, (gpus, memory, nodes, python, limit))| {
            let mut pending = job(&format!("j{i}"), *gpus, *memory);
            pending.wants.nodes = *nodes;
            pending.python = python.map(|minor| format!("python3.{minor}"));
            pending.longest = limit.and_then(minutes);
            pending
        }).collect();
        // Each node reports one interpreter, or nothing.
        let said: Vec<Option<[Interpreter; 1]>> = rooms.iter().map(|(.., python, _)| python.map(|minor| [Interpreter {
            name: format!("python3.{minor}"), version: format!("3.{minor}.0"),
        }])).collect();
        let rooms: Vec<Room> = rooms.iter().enumerate().map(|(i, (slots, gpus, memory, closed, _, running))| {
            let mut room = Room {
                closed: closed.then_some("is closed".into()),
                size: Size { gpus: *gpus, cpus: 8, memory: *memory },
                ..room(&format!("n{i}"), *slots)
            };
            for (k, (gpus, minutes)) in running.iter().enumerate() {
                if room.free_slots() > 0 && room.free().gpus >= *gpus {
                    room.taken.push(runs(&format!("r{i}-{k}"), *gpus, *minutes));
                }
            }
            room
        }).collect();
        let pythons: Pythons<'_> = rooms.iter().zip(&said)
            .filter_map(|(room, said)| Some((&room.node, &said.as_ref()?[..]))).collect();
        let limits = UserLimits { jobs: most_jobs, gpus: most_gpus, ..UserLimits::default() };
        let decided = super::place(&pending, rooms.clone(), &pythons, limits);

        // Every job is placed once or waits once, with a text.
        let mut seen: Vec<&JobId> = decided.placed.iter().map(|(job, _)| job)
            .chain(decided.waiting.iter().map(|(job, _)| job)).collect();
        seen.sort();
        seen.dedup();
        prop_assert_eq!(seen.len(), pending.len());
        prop_assert_eq!(decided.placed.len() + decided.waiting.len(), pending.len());
        prop_assert!(decided.waiting.iter().all(|(_, wait)| !wait.to_string().is_empty()));

        // No node gets more than it has, and a closed one gets nothing.
        let found = |id: &JobId| pending.iter().find(|pending| pending.job == *id).unwrap();
        let wants = |id: &JobId| &found(id).wants;
        for room in &rooms {
            let on: Vec<&Resources> = decided.placed.iter()
                .filter(|(_, nodes)| nodes.contains(&room.node)).map(|(job, _)| wants(job)).collect();
            prop_assert!(on.len() <= room.free_slots() as usize);
            prop_assert!(on.iter().map(|wants| wants.gpus).sum::<u32>() <= room.free().gpus);
            prop_assert!(on.iter().map(|wants| wants.memory).sum::<u64>() <= room.size.memory);
            prop_assert!(on.is_empty() || room.closed.is_none());
        }

        // Their user, who has nothing yet, stays within the limits, and only those wait for them that must.
        let gpus = |wants: &Resources| u64::from(wants.gpus * wants.nodes);
        let has: u64 = decided.placed.iter().map(|(job, _)| gpus(wants(job))).sum();
        prop_assert!(most_jobs.is_none_or(|most| decided.placed.len() <= most as usize));
        prop_assert!(most_gpus.is_none_or(|most| has <= u64::from(most)));
        let first = decided.waiting.iter().find(|(_, wait)| matches!(wait, Wait::Limit(_)));
        if let Some((job, _)) = first {
            let more = u64::from(most_gpus.unwrap_or(u32::MAX)) < has + gpus(wants(job));
            prop_assert!(more || most_jobs.is_some_and(|most| decided.placed.len() >= most as usize));
        }

        // Every rank has a node of its own.
        for (job, nodes) in &decided.placed {
            let different: std::collections::BTreeSet<&NodeId> = nodes.iter().collect();
            prop_assert_eq!((nodes.len(), different.len()), (wants(job).nodes as usize, nodes.len()));
        }

        // The first job that waits for room could start no sooner without those that were placed after it.
        let position = |id: &JobId| pending.iter().position(|pending| pending.job == *id).unwrap();
        let first = decided.waiting.iter().find(|(_, wait)| matches!(wait, Wait::Busy { ahead: 0, .. }));
        if let Some((waits, _)) = first {
            let job = found(waits);
            let with = |after: bool| -> Vec<Room> {
                let mut rooms = rooms.clone();
                for (other, nodes) in &decided.placed {
                    for room in rooms.iter_mut().filter(|room| nodes.contains(&room.node)) {
                        if after || position(other) < position(waits) {
                            room.taken.push(Taken::of(found(other)));
                        }
                    }
                }
                rooms.retain(|room| room.closed.is_none() && suits(room, job, &pythons));
                rooms
            };
            let (before, after) = (soonest(job, &with(false)), soonest(job, &with(true)));
            match before {
                Some(before) => prop_assert!(after.is_some_and(|after| after <= before), "{waits}: {after:?}"),
                None => {
                    let later = |room: &&Room| decided.placed.iter().any(|(other, nodes)| {
                        position(other) > position(waits) && nodes.contains(&room.node)
                    });
                    let kept = with(false).iter().filter(|room| !later(room)).count();
                    prop_assert!(kept >= job.wants.nodes as usize, "{waits} is promised too few nodes");
                }
            }
        }

        // No job is placed where its interpreter is known to be missing.
        for (job, node) in decided.placed.iter().flat_map(|(job, nodes)| nodes.iter().map(move |node| (job, node))) {
            let (job, said) = (found(job), pythons.get(node));
            let missing = said.zip(job.python.as_ref()).is_some_and(|(said, name)| said[0].name != *name);
            prop_assert!(!missing, "{job:?} went to {node}");
        }
    }
}
