use super::*;
use proptest::prelude::*;

fn job(name: &str, gpus: u32, memory: u64) -> Pending {
    let wants = Resources { gpus, memory, ..Resources::default() };
    Pending { job: name.parse().unwrap(), wants, avoid: None }
}

fn room(name: &str, slots: u32) -> Room {
    Room { node: name.parse().unwrap(), closed: None, slots, gpus: 0, memory: 1 << 30, taken: Vec::new() }
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
    let decided = place(&[gang, job("gpu", 2, 0), job("small", 0, 0)], vec![room("box", 1)]);
    assert_eq!(decided.placed, [("small".parse().unwrap(), "box".parse().unwrap())]);
    assert!(reason(&decided, "gang").contains("2 nodes"));
    assert!(reason(&decided, "gpu").contains("box has 1 slots, 0 GPUs"));
    assert_eq!(reason(&place(&[job("a", 0, 0)], vec![]), "a"), "no node has joined yet");
    let closed = Room { closed: Some("does not answer".into()), ..room("box", 1) };
    let decided = place(&[job("a", 0, 0)], vec![closed]);
    assert_eq!(reason(&decided, "a"), "no node takes work now: box does not answer");
}

#[test]
fn test_retry_avoids_its_last_node_only_if_another_has_room() {
    let avoiding = Pending { avoid: Some("x".parse().unwrap()), ..job("a", 0, 0) };
    let on = |nodes| place(std::slice::from_ref(&avoiding), nodes).placed[0].1.to_string();
    assert_eq!(on(vec![room("x", 9), room("y", 1)]), "y");
    assert_eq!(on(vec![room("x", 1)]), "x");
}

fn any_job() -> impl Strategy<Value = (u32, u64, u32)> {
    (0u32..4, 0u64..5, 1u32..3)
}

fn any_room() -> impl Strategy<Value = (u32, u32, u64, bool)> {
    (0u32..4, 0u32..5, 0u64..6, any::<bool>())
}

proptest! {
    #[test]
    fn test_place_keeps_room_and_order_and_gives_reasons(
        jobs in prop::collection::vec(any_job(), 0..20),
        rooms in prop::collection::vec(any_room(), 0..5),
    ) {
        let pending: Vec<Pending> = jobs.iter().enumerate().map(|(i, (gpus, memory, nodes))| {
            let mut pending = job(&format!("j{i}"), *gpus, *memory);
            pending.wants.nodes = *nodes;
            pending
        }).collect();
        let rooms: Vec<Room> = rooms.iter().enumerate().map(|(i, (slots, gpus, memory, closed))| Room {
            closed: closed.then_some("is closed".into()), gpus: *gpus, memory: *memory, ..room(&format!("n{i}"), *slots)
        }).collect();
        let decided = place(&pending, rooms.clone());

        // Every job is placed once or waits once, with words.
        let mut seen: Vec<&JobId> = decided.placed.iter().map(|(job, _)| job)
            .chain(decided.waiting.iter().map(|(job, _)| job)).collect();
        seen.sort();
        seen.dedup();
        prop_assert_eq!(seen.len(), pending.len());
        prop_assert_eq!(decided.placed.len() + decided.waiting.len(), pending.len());
        prop_assert!(decided.waiting.iter().all(|(_, wait)| !wait.to_string().is_empty()));

        // No node gets more than it has, and a closed one gets nothing.
        let wants = |id: &JobId| &pending.iter().find(|pending| pending.job == *id).unwrap().wants;
        for room in &rooms {
            let on: Vec<&Resources> = decided.placed.iter()
                .filter(|(_, node)| *node == room.node).map(|(job, _)| wants(job)).collect();
            prop_assert!(on.len() <= room.slots as usize);
            prop_assert!(on.iter().map(|wants| wants.gpus).sum::<u32>() <= room.gpus);
            prop_assert!(on.iter().map(|wants| wants.memory).sum::<u64>() <= room.memory);
            prop_assert!(on.is_empty() || room.closed.is_none());
        }

        // Nobody takes room where an earlier waiting job could run.
        let position = |id: &JobId| pending.iter().position(|pending| pending.job == *id).unwrap();
        for (waits, _) in decided.waiting.iter().filter(|(job, _)| wants(job).nodes == 1) {
            for (runs, node) in decided.placed.iter().filter(|(job, _)| position(job) > position(waits)) {
                let room = rooms.iter().find(|room| room.node == *node).unwrap();
                prop_assert!(!room.could_hold(wants(waits)), "{runs} overtook {waits} on {node}");
            }
        }
    }
}
