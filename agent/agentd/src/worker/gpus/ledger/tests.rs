use agent_model::gpu::{Part, Xid};
use agent_model::node::Grade;
use proptest::prelude::*;

use super::*;

const GIB: u64 = 1 << 30;

fn works() -> Driver {
    Driver::Works { version: "550.54".into(), cuda: "12.4".into() }
}

/// An empty GPU of 80 GiB.
fn seen(index: u32) -> Seen {
    Seen {
        index,
        uuid: format!("GPU-{index}"),
        name: "H100".into(),
        memory: Some(80 * GIB),
        used: Some(GIB / 2),
        processes: Some(Vec::new()),
        ..Seen::default()
    }
}

fn look(gpus: impl IntoIterator<Item = Seen>) -> Look {
    Look { driver: works(), gpus: gpus.into_iter().collect() }
}

fn used_by(pid: u32, memory: u64, gpu: Seen) -> Seen {
    let process = GpuProcess { pid, memory: Some(memory) };
    Seen { processes: Some(vec![process]), used: Some(memory + GIB / 2), ..gpu }
}

fn see(ledger: &mut Ledger, look: Look) {
    let owners =
        ledger.strangers(&look).into_iter().map(|pid| (pid, Some("(python) of nobody's job".to_owned())));
    let owners = owners.collect();
    ledger.absorb(&look, 0, owners);
}

fn ledger(gpus: impl IntoIterator<Item = Seen>) -> Ledger {
    let mut ledger = Ledger::default();
    see(&mut ledger, look(gpus));
    ledger
}

fn unfit(ledger: &Ledger) -> Vec<(u32, String)> {
    let gpus = ledger.gpus().into_iter();
    gpus.filter_map(|gpu| gpu.unfit.map(|unfit| (gpu.index, unfit))).collect()
}

fn id(text: &str) -> ReplicaId {
    text.parse().unwrap()
}

#[test]
fn test_stranger_is_named_and_its_gpu_comes_back_by_itself() {
    let mut ledger = ledger([seen(0), seen(1)]);
    assert_eq!(unfit(&ledger), []);
    see(&mut ledger, look([used_by(4711, 3 * GIB + GIB / 5, seen(0)), seen(1)]));
    let words = "quarantined: process 4711 (python) of nobody's job uses 3.2 GiB of it".to_owned();
    assert_eq!(unfit(&ledger), [(0, words.clone())]);
    assert_eq!(ledger.assign(&id("a.1.0"), 1).unwrap(), ["GPU-1"]);
    assert!(ledger.assign(&id("b.1.0"), 1).unwrap_err().to_string().contains("process 4711 (python)"));
    // Other numbers change nothing.
    see(&mut ledger, look([used_by(4711, 5 * GIB, seen(0)), seen(1)]));
    assert_eq!(unfit(&ledger), [(0, words)]);
    assert_eq!(ledger.finding().unwrap().grade, Grade::Limited);
    see(&mut ledger, look([seen(0), seen(1)]));
    assert_eq!(unfit(&ledger), []);
    let finding = ledger.finding().unwrap();
    assert_eq!((finding.grade, finding.found.as_str()), (Grade::Good, "2 x H100, driver 550.54, CUDA 12.4"));
}

#[test]
fn test_who_draws_on_the_screen_is_no_stranger() {
    let mut ledger = Ledger::default();
    let screen = look([used_by(9, GIB, seen(0))]);
    ledger.absorb(&screen, 0, [(9, None)].into());
    assert_eq!(unfit(&ledger), []);
    let busy = used_by(9, GIB, seen(0));
    let both = [GpuProcess { pid: 9, memory: Some(GIB) }, GpuProcess { pid: 10, memory: None }];
    ledger.absorb(
        &look([Seen { processes: Some(both.into()), ..busy }]),
        0,
        [(9, None), (10, Some("(x)".into()))].into(),
    );
    assert_eq!(unfit(&ledger), [(0, "quarantined: process 10 (x) uses it".to_owned())]);
}

#[test]
fn test_job_uses_its_own_gpu_in_peace_and_must_leave_it_empty() {
    let mut ledger = ledger([seen(0)]);
    let job = id("a.1.0");
    ledger.assign(&job, 1).unwrap();
    see(&mut ledger, look([used_by(7, 60 * GIB, seen(0))]));
    assert_eq!(unfit(&ledger), []);
    assert_eq!(ledger.gpus()[0].held.as_deref(), Some("a.1.0"));
    ledger.ends(&job);
    see(&mut ledger, look([used_by(7, 60 * GIB, seen(0))]));
    assert!(ledger.may_clear(&job));
    // Memory in use without a process also counts.
    see(&mut ledger, look([Seen { used: Some(4 * GIB), ..seen(0) }]));
    assert!(ledger.may_clear(&job));
    ledger.release(&job, None);
    assert!(unfit(&ledger)[0].1.contains("4 GiB of its memory are in use"), "{:?}", unfit(&ledger));
    see(&mut ledger, look([Seen { used: Some(GIB), ..seen(0) }]));
    assert_eq!(unfit(&ledger), []);
    assert_eq!(ledger.assign(&id("b.1.0"), 1).unwrap(), ["GPU-0"]);
}

#[test]
fn test_what_was_not_looked_at_since_its_job_ended_waits_for_a_look() {
    let mut ledger = ledger([seen(0)]);
    let job = id("a.1.0");
    ledger.assign(&job, 1).unwrap();
    ledger.ends(&job);
    ledger.release(&job, Some(3));
    assert!(unfit(&ledger)[0].1.contains("not looked at since"), "{:?}", unfit(&ledger));
    ledger.absorb(&look([seen(0)]), 2, BTreeMap::new());
    assert_eq!(unfit(&ledger).len(), 1);
    ledger.absorb(&look([seen(0)]), 3, BTreeMap::new());
    assert_eq!(unfit(&ledger), []);
}

#[test]
fn test_values_that_are_not_told_are_no_proof_against_a_gpu() {
    let silent = Seen { used: None, processes: None, memory: None, ..seen(0) };
    let mut ledger = ledger([silent]);
    assert_eq!(unfit(&ledger), []);
    assert_eq!(ledger.gpus()[0].memory, 0);
    let job = id("a.1.0");
    ledger.assign(&job, 1).unwrap();
    ledger.ends(&job);
    assert!(!ledger.may_clear(&job));
}

#[test]
fn test_memory_of_a_stranger_from_before_the_first_look_is_not_taken_for_idle() {
    let hidden = Seen { used: Some(40 * GIB), ..seen(0) };
    let ledger = ledger([hidden, seen(1)]);
    assert_eq!(unfit(&ledger).len(), 1);
}

#[test]
fn test_driver_that_does_not_work_keeps_all_gpus_and_loses_none() {
    for (driver, words) in [
        (Driver::Hung { after_s: 10 }, "did not answer within 10 s"),
        (Driver::NotLoaded, "not loaded"),
        (Driver::Mismatch { detail: "550 and 560".into() }, "550 and 560"),
        (Driver::Failed { detail: "unknown error".into() }, "unknown error"),
        (Driver::Absent, "no GPU driver any more"),
    ] {
        let mut ledger = ledger([seen(0), seen(1)]);
        let job = id("a.1.0");
        ledger.assign(&job, 1).unwrap();
        see(&mut ledger, Look { driver, gpus: Vec::new() });
        assert!(unfit(&ledger).iter().all(|(_, unfit)| unfit.contains(words)), "{:?}", unfit(&ledger));
        assert_eq!((unfit(&ledger).len(), ledger.held_by(&job).len(), ledger.is_in_use()), (2, 1, true));
        let finding = ledger.finding().unwrap();
        assert!(finding.grade == Grade::Limited && finding.fix.is_some(), "{finding:?}");
        assert!(ledger.trouble(&job).is_empty() && !ledger.may_clear(&job));
        assert!(ledger.assign(&id("b.1.0"), 1).unwrap_err().to_string().contains(words));
        see(&mut ledger, look([seen(0), seen(1)]));
        assert_eq!(unfit(&ledger), []);
    }
    let mut none = Ledger::default();
    see(&mut none, Look::default());
    assert_eq!((none.finding(), none.is_in_use()), (None, false));
}

#[test]
fn test_lost_gpu_is_named_and_found_again() {
    let mut ledger = ledger([seen(0), seen(1)]);
    let job = id("a.1.0");
    ledger.assign(&job, 2).unwrap();
    see(&mut ledger, look([seen(1)]));
    assert!(unfit(&ledger)[0].1.contains("it is lost"), "{:?}", unfit(&ledger));
    assert_eq!(ledger.trouble(&job).len(), 1);
    assert!(ledger.trouble(&job)[0].starts_with("GPU 0 (GPU-0): it is lost"));
    assert!(ledger.gpus().iter().all(Gpu::counts));
    // It may be listed, and report nothing else.
    let mute = Seen { index: 0, broken: Some("it fell off the bus".into()), ..Seen::default() };
    see(&mut ledger, look([mute, seen(1)]));
    assert_eq!(ledger.trouble(&job), ["GPU 0 (GPU-0): it fell off the bus"]);
    ledger.ends(&job);
    assert!(!ledger.may_clear(&job), "nothing shows that a lost one is empty");
    ledger.release(&job, None);
    assert_eq!((unfit(&ledger).len(), ledger.gpus()[0].counts()), (1, false));
    see(&mut ledger, look([seen(0), seen(1), seen(2)]));
    assert_eq!((unfit(&ledger), ledger.gpus().len()), (Vec::new(), 3));
}

#[test]
fn test_errors_of_the_kernel_count_from_the_first_look_on() {
    let xid = |code, at_us| Some(Xid { code, at_us, detail: "fallen off the bus".into() });
    let mut ledger = ledger([Seen { xid: xid(79, 5), ..seen(0) }]);
    assert_eq!(unfit(&ledger), []);
    see(&mut ledger, look([Seen { xid: xid(31, 8), ..seen(0) }]));
    assert_eq!(unfit(&ledger), []);
    see(&mut ledger, look([Seen { xid: xid(79, 9), ..seen(0) }]));
    assert!(unfit(&ledger)[0].1.contains("Xid 79"), "{:?}", unfit(&ledger));
    // After a reset it disappears and reappears.
    see(&mut ledger, look([]));
    see(&mut ledger, look([Seen { xid: xid(79, 9), ..seen(0) }]));
    assert_eq!(unfit(&ledger), []);
}

#[test]
fn test_divided_gpu_is_given_in_parts_that_come_and_go() {
    let part = |name: &str| Part { uuid: format!("MIG-{name}"), memory: Some(10 * GIB), ..Part::default() };
    let whole = Seen { mig: true, parts: vec![part("a"), part("b")], ..seen(0) };
    let mut ledger = ledger([whole.clone(), seen(1)]);
    let uuids = |ledger: &Ledger| ledger.gpus().into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>();
    assert_eq!(uuids(&ledger), ["MIG-a", "MIG-b", "GPU-1"]);
    assert_eq!(ledger.assign(&id("a.1.0"), 1).unwrap(), ["MIG-a"]);
    see(&mut ledger, look([seen(0), seen(1)]));
    assert_eq!(uuids(&ledger), ["GPU-0", "MIG-a", "GPU-1"], "what a job has stays");
    assert!(ledger.trouble(&id("a.1.0"))[0].contains("lost"));
    see(&mut ledger, look([Seen { parts: Vec::new(), ..whole }, seen(1)]));
    ledger.release(&id("a.1.0"), None);
    see(&mut ledger, look([seen(0), seen(1)]));
    assert_eq!((uuids(&ledger), unfit(&ledger)), (vec!["GPU-0".into(), "GPU-1".into()], Vec::new()));
}

#[test]
fn test_garbage_gives_nothing_twice() {
    let nameless = Seen { uuid: String::new(), ..seen(2) };
    let mut ledger = ledger([seen(0), seen(0), nameless]);
    assert_eq!(ledger.gpus().len(), 2);
    assert_eq!(ledger.assign(&id("a.1.0"), 1).unwrap(), ["GPU-0"]);
    assert!(ledger.assign(&id("b.1.0"), 1).is_err());
}

proptest! {
    /// Jobs take GPUs, end and are forgotten, GPUs break, hang and reappear, in any order.
    #[test]
    fn test_no_gpu_is_two_jobs_at_a_time_and_none_leaks(
        steps in prop::collection::vec((0u8..8, 0u32..8, 0u32..4), 1..120),
    ) {
        let mut ledger = ledger((0..8).map(seen));
        let mut live: BTreeMap<ReplicaId, Vec<String>> = BTreeMap::new();
        for (n, (what, which, wanted)) in steps.into_iter().enumerate() {
            match what {
                0..=2 => {
                    let job = id(&format!("job-{n}.1.0"));
                    if let Ok(given) = ledger.assign(&job, wanted) {
                        prop_assert_eq!(given.len(), wanted as usize);
                        for other in live.values().flatten() {
                            prop_assert!(!given.contains(other), "{} is given twice", other);
                        }
                        live.insert(job, given);
                    }
                }
                3 => if let Some(job) = live.keys().nth(which as usize).cloned() {
                    ledger.ends(&job);
                    ledger.release(&job, (wanted == 0).then_some(u64::MAX));
                    live.remove(&job);
                },
                4 => see(&mut ledger, look((0..8).filter(|index| *index != which).map(seen))),
                5 => see(&mut ledger, look((0..8).map(|index| match index == which {
                    true => used_by(9, GIB, seen(index)),
                    false => seen(index),
                }))),
                6 => see(&mut ledger, Look { driver: Driver::Hung { after_s: 10 }, gpus: Vec::new() }),
                _ => {
                    // The daemon is killed: the journal has the held GPUs, and nothing else is known.
                    ledger = Ledger::new(live.clone());
                    see(&mut ledger, look((0..8).map(seen)));
                }
            }
        }
        for job in live.keys() {
            ledger.ends(job);
            ledger.release(job, None);
        }
        ledger.absorb(&look((0..8).map(seen)), u64::MAX, BTreeMap::new());
        prop_assert_eq!(unfit(&ledger), Vec::new());
        prop_assert_eq!(ledger.assign(&id("last.1.0"), 8).unwrap().len(), 8);
    }
}
