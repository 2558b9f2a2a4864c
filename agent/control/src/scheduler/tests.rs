use super::*;
use proptest::prelude::*;

fn job(name: &str, gpus: u32, memory: u64) -> Pending {
    let wants = Resources { gpus, memory, ..Resources::default() };
    Pending { job: name.parse().unwrap(), wants, python: None, avoid: None }
}

/// Without a word of any node about its interpreters.
fn place(pending: &[Pending], nodes: Vec<Room>) -> Placements {
    super::place(pending, nodes, &Pythons::new())
}

fn room(name: &str, slots: u32) -> Room {
    let (node, unfit) = (name.parse().unwrap(), String::new());
    Room { node, closed: None, slots, gpus: 0, unfit, memory: 1 << 30, gangs: true, taken: Vec::new() }
}

fn reason(decided: &Placements, name: &str) -> String {
    let found = decided.waiting.iter().find(|(job, _)| job.as_str() == name);
    found.map(|(_, wait)| wait.to_string()).unwrap_or_default()
}

#[test]
fn test_reason_names_who_is_ahead_and_who_runs() {
    let mut node = room("box", 2);
    for name in ["train-a", "train-b"] {
        node.taken.push(Taken { job: name.parse().unwrap(), gpus: 0, memory: 0 });
    }
    let decided = place(&[job("c", 0, 0), job("d", 0, 0)], vec![node]);
    assert_eq!(reason(&decided, "c"), "next in line, both slots of box busy: train-a, train-b");
    assert_eq!(reason(&decided, "d"), "1 job ahead, both slots of box busy: train-a, train-b");
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
    assert!(reason(&decided, "gpu").contains("box has 1 slots, 0 GPUs"));
    assert_eq!(reason(&place(&[job("a", 0, 0)], vec![]), "a"), "no node has joined yet");
    let closed = Room { closed: Some("does not answer".into()), ..room("box", 1) };
    let decided = place(&[job("a", 0, 0)], vec![closed]);
    assert_eq!(reason(&decided, "a"), "no node takes work now: box does not answer");
}

#[test]
fn test_job_that_wants_gpus_is_told_of_those_that_are_not_handed_out() {
    let unfit = "1 of its 2 GPUs not handed out: GPU 1: lost".to_owned();
    let node = Room { gpus: 1, unfit, ..room("box", 4) };
    let decided = place(&[job("two", 2, 0)], vec![node.clone()]);
    assert_eq!(
        reason(&decided, "two"),
        "no node is large enough for 2 GPUs: box has 4 slots, 1 GPUs and 1 GiB of memory \
         (1 of its 2 GPUs not handed out: GPU 1: lost)"
    );
    let decided = place(&[job("a", 1, 0), job("b", 1, 0)], vec![node.clone()]);
    assert!(reason(&decided, "b").contains("0 of 1 GPUs"), "{}", reason(&decided, "b"));
    assert!(reason(&decided, "b").contains("GPU 1: lost): a"), "{}", reason(&decided, "b"));
    let full = place(&[job("c", 0, 2 << 30)], vec![node]);
    assert!(!reason(&full, "c").contains("lost"), "{}", reason(&full, "c"));
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

    let decided = super::place(&jobs, nodes.clone(), &Pythons::from([(&a, &said[..])]));
    assert_eq!(decided.placed.iter().map(|(job, _)| job.as_str()).collect::<Vec<_>>(), ["new", "any"]);
    let reason_of_old = "no node has a Python called python3.9; a has python3 (3.11.7), python3.11 (3.11.7)";
    assert_eq!(reason(&decided, "old"), reason_of_old);

    // A node that says nothing about its interpreters may have any.
    let decided =
        super::place(&jobs[..1], vec![room("a", 3), room("b", 1)], &Pythons::from([(&a, &said[..])]));
    assert_eq!(decided.placed[0].1, [b]);
    // One that has it and takes no work is worth waiting for.
    let drained = Room { closed: Some("is being drained".into()), ..room("b", 1) };
    let decided = super::place(&jobs[..1], vec![room("a", 3), drained], &Pythons::from([(&a, &said[..])]));
    assert_eq!(reason(&decided, "old"), "no node takes work now: b is being drained");
    // What no node could hold is said first: it would not help to install the interpreter.
    let large = Pending { wants: Resources { gpus: 9, ..Resources::default() }, ..jobs[0].clone() };
    let decided = super::place(&[large], nodes, &Pythons::from([(&a, &said[..])]));
    assert!(reason(&decided, "old").starts_with("no node is large enough"));
}

#[test]
fn test_only_names_of_interpreters_are_judged_from_afar() {
    let host = |python: &str| EnvSpec::Host { python: python.into(), requirements: Vec::new() };
    assert_eq!(python_of(&host("python3.9")), Some("python3.9"));
    assert_eq!(python_of(&host("/opt/python/bin/python3")), None);
    assert_eq!(python_of(&EnvSpec::Named { reference: "azureml:x".into() }), None);
}

fn any_job() -> impl Strategy<Value = (u32, u64, u32, Option<u8>)> {
    (0u32..4, 0u64..5, 1u32..3, prop::option::of(0u8..3))
}

fn any_room() -> impl Strategy<Value = (u32, u32, u64, bool, Option<u8>)> {
    (0u32..4, 0u32..5, 0u64..6, any::<bool>(), prop::option::of(0u8..3))
}

proptest! {
    #[test]
    fn test_place_keeps_room_and_order_and_gives_reasons(
        jobs in prop::collection::vec(any_job(), 0..20),
        rooms in prop::collection::vec(any_room(), 0..5),
    ) {
        let pending: Vec<Pending> = jobs.iter().enumerate().map(|(i, (gpus, memory, nodes, python))| {
            let mut pending = job(&format!("j{i}"), *gpus, *memory);
            pending.wants.nodes = *nodes;
            pending.python = python.map(|minor| format!("python3.{minor}"));
            pending
        }).collect();
        // Each node says one interpreter, or nothing.
        let said: Vec<Option<[Interpreter; 1]>> = rooms.iter().map(|(.., python)| python.map(|minor| [Interpreter {
            name: format!("python3.{minor}"), version: format!("3.{minor}.0"),
        }])).collect();
        let rooms: Vec<Room> = rooms.iter().enumerate().map(|(i, (slots, gpus, memory, closed, _))| Room {
            closed: closed.then_some("is closed".into()), gpus: *gpus, memory: *memory, ..room(&format!("n{i}"), *slots)
        }).collect();
        let pythons: Pythons<'_> = rooms.iter().zip(&said)
            .filter_map(|(room, said)| Some((&room.node, &said.as_ref()?[..]))).collect();
        let decided = super::place(&pending, rooms.clone(), &pythons);

        // Every job is placed once or waits once, with words.
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
            prop_assert!(on.len() <= room.slots as usize);
            prop_assert!(on.iter().map(|wants| wants.gpus).sum::<u32>() <= room.gpus);
            prop_assert!(on.iter().map(|wants| wants.memory).sum::<u64>() <= room.memory);
            prop_assert!(on.is_empty() || room.closed.is_none());
        }

        // Every rank has a node of its own.
        for (job, nodes) in &decided.placed {
            let different: std::collections::BTreeSet<&NodeId> = nodes.iter().collect();
            prop_assert_eq!((nodes.len(), different.len()), (wants(job).nodes as usize, nodes.len()));
        }

        // Nobody takes room where an earlier waiting job could run, if there are enough such nodes for it.
        let position = |id: &JobId| pending.iter().position(|pending| pending.job == *id).unwrap();
        for (waits, _) in &decided.waiting {
            let could = |room: &&Room| room.closed.is_none() && suits(room, found(waits), &pythons);
            if rooms.iter().filter(could).count() < wants(waits).nodes as usize {
                continue;
            }
            for (runs, nodes) in decided.placed.iter().filter(|(job, _)| position(job) > position(waits)) {
                let taken = rooms.iter().filter(could).find(|room| nodes.contains(&room.node));
                prop_assert!(taken.is_none(), "{runs} overtook {waits} on {taken:?}");
            }
        }

        // Nobody goes where his interpreter is known to be missing.
        for (job, node) in decided.placed.iter().flat_map(|(job, nodes)| nodes.iter().map(move |node| (job, node))) {
            let (job, said) = (found(job), pythons.get(node));
            let missing = said.zip(job.python.as_ref()).is_some_and(|(said, name)| said[0].name != *name);
            prop_assert!(!missing, "{job:?} went to {node}");
        }
    }
}
