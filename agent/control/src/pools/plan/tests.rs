use proptest::prelude::*;

use super::*;

const NOW: Timestamp = Timestamp(1_000_000_000);
const IDLE: Duration = Duration::from_secs(120);
const JOIN: Duration = Duration::from_secs(900);

fn pool(min: u32, max: u32) -> PoolRecord {
    PoolRecord {
        name: "gpu".parse().unwrap(),
        provider: "lab".to_owned(),
        min,
        max,
        idle: IDLE,
        low_priority: false,
        labels: Default::default(),
        created_at: NOW,
        modified_at: NOW,
        deleting: false,
        seen: None,
    }
}

/// A machine in a step, by a name that tells it apart.
fn machine(number: usize, step: MachineStep) -> MachineRecord {
    MachineRecord {
        name: format!("gpu-{number:05}").parse().unwrap(),
        pool: "gpu".parse().unwrap(),
        id: None,
        step,
        since: NOW,
        why: String::new(),
    }
}

fn view(record: &MachineRecord) -> MachineView<'_> {
    let joined = matches!(record.step, MachineStep::Joined | MachineStep::Leaving);
    MachineView {
        record,
        called: false,
        member: joined,
        node: joined.then(|| NodeView { open: true, ..NodeView::default() }),
        used: false,
        gone: false,
    }
}

/// With a node that has so many jobs and has been idle so long.
fn with(record: &MachineRecord, jobs: usize, idle: u64) -> MachineView<'_> {
    let idle = Duration::from_secs(idle);
    MachineView { node: Some(NodeView { open: true, jobs, idle, ..NodeView::default() }), ..view(record) }
}

fn steps(
    record: &PoolRecord,
    machines: Vec<MachineView<'_>>,
    more: usize,
    failing: Option<&Failing>,
) -> Vec<PoolStep> {
    plan(&PoolView { record, machines, more: Some(more), failing, join_within: JOIN }, NOW)
}

fn leaves(steps: &[PoolStep]) -> Vec<&str> {
    let leaves = |step| match step {
        &PoolStep::Move(ref name, MachineStep::Leaving, _) => Some(name.as_str()),
        _ => None,
    };
    steps.iter().filter_map(leaves).collect()
}

#[test]
fn test_a_pool_grows_to_what_waits_and_to_its_minimum_and_not_beyond_its_maximum() {
    assert_eq!(steps(&pool(0, 4), vec![], 0, None), []);
    assert_eq!(steps(&pool(0, 4), vec![], 3, None), vec![PoolStep::Ask; 3]);
    assert_eq!(steps(&pool(0, 4), vec![], 9, None), vec![PoolStep::Ask; 4]);
    assert_eq!(steps(&pool(2, 4), vec![], 0, None), vec![PoolStep::Ask; 2]);
    // What is being removed is still there.
    let going = machine(0, MachineStep::Deleting);
    let called = MachineView { called: true, ..view(&going) };
    assert_eq!(steps(&pool(0, 4), vec![called], 4, None), vec![PoolStep::Ask; 3]);
    // Nothing is known after a loss of records.
    let record = pool(1, 4);
    let unknown =
        PoolView { record: &record, machines: vec![], more: None, failing: None, join_within: JOIN };
    assert_eq!(plan(&unknown, NOW), [PoolStep::Ask]);
}

#[test]
fn test_a_provider_that_fails_is_asked_for_one_machine_when_its_wait_is_over() {
    let first = Failing::after(None, "no quota".to_owned(), NOW);
    assert_eq!(first.again, NOW + Duration::from_secs(5));
    let (one, two) = (machine(0, MachineStep::Asked), machine(1, MachineStep::Asked));
    let wanted = || [&one, &two].map(|made| MachineView { used: true, ..view(made) }).to_vec();
    assert_eq!(steps(&pool(0, 4), wanted(), 2, Some(&first)), []);
    let over = Failing { again: NOW, ..first.clone() };
    assert_eq!(steps(&pool(0, 4), wanted(), 2, Some(&over)), [PoolStep::Create(one.name.clone())]);
    // The waits grow, to an end.
    let mut failing = first;
    for _ in 0..20 {
        failing = Failing::after(Some(&failing), "no quota".to_owned(), NOW);
    }
    assert_eq!(failing.again, NOW + Duration::from_secs(600));
    // What nobody needs any more is not tried again.
    let step = steps(&pool(0, 4), vec![view(&one)], 0, Some(&over));
    assert_eq!(leaves(&step), [one.name.as_str()]);
}

#[test]
fn test_a_machine_that_does_not_come_is_taken_back_and_told() {
    let made = MachineRecord { since: Timestamp(NOW.0 - 901_000), ..machine(0, MachineStep::Created) };
    let late = steps(&pool(0, 4), vec![view(&made)], 0, None);
    assert_eq!(late, [PoolStep::Fail(made.name.clone(), "it did not join within 15 min".to_owned())]);
    let made = machine(0, MachineStep::Created);
    let gone = steps(&pool(0, 4), vec![MachineView { gone: true, ..view(&made) }], 0, None);
    assert!(matches!(&gone[..], [PoolStep::Fail(..)]), "{gone:?}");
}

#[test]
fn test_a_machine_whose_node_is_there_has_joined_whatever_its_provider_said() {
    for step in [MachineStep::Asked, MachineStep::Created] {
        let made = machine(0, step);
        let busy = MachineView { member: true, ..with(&made, 1, 0) };
        for failing in [None, Some(&Failing::after(None, "connection reset".to_owned(), NOW))] {
            let joined = steps(&pool(0, 4), vec![busy.clone()], 0, failing);
            assert_eq!(joined, [PoolStep::Move(made.name.clone(), MachineStep::Joined, String::new())]);
        }
    }
    // It joined when it was to be given back: its node is asked first.
    let going = machine(0, MachineStep::Deleting);
    assert_eq!(
        leaves(&steps(&pool(0, 4), vec![MachineView { member: true, ..view(&going) }], 0, None)).len(),
        1
    );
}

#[test]
fn test_idle_machines_leave_and_the_one_with_the_smallest_cache_first() {
    let made: Vec<_> = (0..4).map(|number| machine(number, MachineStep::Joined)).collect();
    let machines = || vec![with(&made[0], 1, 0), with(&made[1], 0, 119), with(&made[2], 0, 120)];
    assert_eq!(leaves(&steps(&pool(0, 4), machines(), 0, None)), ["gpu-00002"]);
    assert_eq!(leaves(&steps(&pool(3, 4), machines(), 0, None)), [""; 0]);
    let used = MachineView { used: true, ..with(&made[2], 0, 500) };
    assert_eq!(leaves(&steps(&pool(0, 4), vec![used], 0, None)), [""; 0]);
    // The operators of a machine that is closed have plans for it.
    let mut closed = with(&made[2], 0, 500);
    closed.node = closed.node.map(|node| NodeView { open: false, ..node });
    assert_eq!(leaves(&steps(&pool(0, 4), vec![closed], 0, None)), [""; 0]);
    let mut warm = with(&made[0], 0, 300);
    warm.node = warm.node.map(|node| NodeView { kept: 2, ..node });
    let both = vec![warm, with(&made[1], 0, 200)];
    assert_eq!(leaves(&steps(&pool(1, 4), both, 0, None)), ["gpu-00001"]);
    // A lower maximum does not wait.
    assert_eq!(leaves(&steps(&pool(0, 2), machines(), 0, None)), ["gpu-00002"]);
}

#[test]
fn test_a_pool_that_is_removed_ends_with_its_last_machine() {
    let record = PoolRecord { deleting: true, ..pool(2, 4) };
    let made: Vec<_> = [MachineStep::Joined, MachineStep::Joined, MachineStep::Created, MachineStep::Asked]
        .into_iter()
        .enumerate()
        .map(|(number, step)| machine(number, step))
        .collect();
    let machines = vec![with(&made[0], 1, 0), with(&made[1], 0, 0), view(&made[2]), view(&made[3])];
    let all = steps(&record, machines, 3, None);
    assert!(all.contains(&PoolStep::Drain(made[0].name.clone())) && !all.contains(&PoolStep::Ask), "{all:?}");
    assert_eq!(leaves(&all), ["gpu-00002", "gpu-00003", "gpu-00001"]);
    assert_eq!(steps(&record, vec![], 0, None), [PoolStep::Forget]);
}

#[test]
fn test_what_a_provider_says_counts_only_where_the_node_does_not_answer() {
    let made = machine(0, MachineStep::Joined);
    let says = |silent| {
        let mut machine = MachineView { gone: true, ..with(&made, 1, 0) };
        machine.node = machine.node.map(|node| NodeView { silent: Duration::from_secs(silent), ..node });
        steps(&pool(0, 4), vec![machine], 0, None)
    };
    assert_eq!(says(0), []);
    assert!(matches!(&says(1)[..], [PoolStep::Remove(..)]));
}

proptest! {
    #[test]
    fn test_no_plan_breaks_the_bounds_or_takes_a_machine_in_use(
        (min, max) in (0_u32..5, 0_u32..9).prop_map(|(min, more)| (min, min + more)),
        machines in prop::collection::vec(
            (0_usize..5, 0_usize..3, any::<bool>(), any::<bool>(), 0_u64..300, any::<bool>(), any::<bool>()), 0..12
        ),
        more in 0_usize..20,
        failing in prop::option::of(0_u64..20),
        deleting: bool,
    ) {
        let all = [
            MachineStep::Asked, MachineStep::Created, MachineStep::Joined, MachineStep::Leaving, MachineStep::Deleting,
        ];
        let record = PoolRecord { deleting, ..pool(min, max) };
        let made: Vec<_> =
            machines.iter().enumerate().map(|(number, (step, ..))| machine(number, all[*step])).collect();
        // What is seen of a machine need not fit the step that its record is in.
        let views: Vec<_> = machines.iter().zip(&made).map(|((_, jobs, used, called, idle, member, gone), made)| {
            let node = member.then(|| NodeView {
                open: true, jobs: *jobs, idle: Duration::from_secs(*idle), ..NodeView::default()
            });
            MachineView { used: *used, called: *called, member: *member, gone: *gone, node, ..view(made) }
        }).collect();
        let failing = failing.map(|after| Failing {
            again: Timestamp(NOW.0 - 10_000 + after * 1000), ..Failing::after(None, String::new(), NOW)
        });
        let steps = steps(&record, views.clone(), more, failing.as_ref());
        let asked = steps.iter().filter(|step| **step == PoolStep::Ask).count();
        prop_assert!(asked == 0 || asked + made.len() <= max as usize);
        let creates = steps.iter().filter(|step| matches!(step, PoolStep::Create(_))).count();
        if let Some(failing) = &failing {
            prop_assert!(asked + creates <= usize::from(failing.again <= NOW));
        }
        for step in &steps {
            let machine = |name: &NodeId| views.iter().find(|machine| machine.record.name == *name).unwrap();
            match step {
                PoolStep::Delete(name) | PoolStep::Move(name, MachineStep::Deleting, _) | PoolStep::Fail(name, _) => {
                    prop_assert!(!machine(name).member, "{:?}", step);
                }
                // Its provider says that it is gone, and it does not answer.
                PoolStep::Remove(name, _) => {
                    prop_assert!(machine(name).gone && machine(name).node.is_some_and(|node| !node.silent.is_zero()));
                }
                PoolStep::Create(name) => prop_assert!(!machine(name).called && !machine(name).member),
                PoolStep::Move(name, MachineStep::Leaving, _)
                    if machine(name).record.step != MachineStep::Deleting =>
                {
                    let machine = machine(name);
                    prop_assert!(!machine.called && machine.node.is_none_or(|node| node.jobs == 0));
                    prop_assert!(deleting || machine.node.is_none() || !machine.used);
                }
                _ => {}
            }
        }
        // Every machine is named at most once.
        let mut names: Vec<_> = steps.iter().filter_map(|step| match step {
            PoolStep::Create(name) | PoolStep::Move(name, ..) | PoolStep::Fail(name, _) | PoolStep::Drain(name)
            | PoolStep::Retire(name) | PoolStep::Remove(name, _) | PoolStep::Delete(name) => Some(name),
            PoolStep::Ask | PoolStep::Forget => None,
        }).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        prop_assert_eq!(names.len(), count);
    }
}
