//! A simulator that tries to break the protocol, and deliberate mistakes (mutants) that prove that it notices.
//!
//! Drives the real [`crate::queue::Book`] and the node's real decisions (`agent_model::protocol`) through
//! random histories: crashes of controller and agents, restarts of machines, lost, late, doubled and
//! overtaken messages, copies of reports from before a restart, one-way and two-way partitions, drifting
//! clocks, cancels, drains, machines that never come back; jobs of one rank and of several. After every event the
//! promises are checked ([`world`], [`disk`]). Every deliberate mistake of [`mutant`] must break one of them.
//!
//! One seed is one history of 100 minutes. `SIM_SEED=N` (and `SIM_MUTANT=name`) runs one again:
//! `SIM_SEED=7 cargo test -p agent-control --lib sim::test_one_seed -- --nocapture`. `tests/run model` runs
//! 10,000 of them and every mistake.
#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "a command that tests run")]

mod agent;
mod chance;
mod controller;
mod disk;
pub(crate) mod mutant;
mod node;
mod tally;
mod wish;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use disk::Broken;
use mutant::Mutant;
use tally::Tally;

/// A seed that broke a promise.
#[derive(Debug, Clone)]
struct Found {
    seed: u64,
    broken: Broken,
}

fn simulate(seed: u64, mutant: Mutant) -> (Tally, Option<Broken>) {
    mutant::make(mutant);
    let loud = std::env::var_os("SIM_TRACE").is_some();
    let told = |at: u64, event: &world::Event| {
        if loud {
            println!("{:>9.3} {}", at as f64 / 1000.0, world::brief(event));
        }
    };
    let result = world::run(seed, told);
    mutant::make(Mutant::None);
    result
}

/// Runs seeds on all processors until all are done, or enough have failed; every hundredth twice.
fn simulate_all(seeds: u64, mutant: Mutant, enough: usize) -> (Tally, Vec<Found>, u64) {
    let next = AtomicU64::new(1);
    let total = Mutex::new((Tally::default(), Vec::new(), 0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed > seeds || total.lock().unwrap().1.len() >= enough {
                return;
            }
            let (tally, failure) = simulate(seed, mutant);
            if seed.is_multiple_of(100) {
                assert_eq!(simulate(seed, mutant), (tally, failure.clone()), "seed {seed} is not determined");
            }
            let mut total = total.lock().unwrap();
            total.0.add(tally);
            total.2 += 1;
            total.1.extend(failure.map(|broken| Found { seed, broken }));
        }
    };
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let (tally, mut found, run) = total.into_inner().unwrap();
    found.sort_by_key(|found: &Found| found.seed);
    (tally, found, run)
}

fn complain(found: &[Found], mutant: Mutant) {
    for Found { seed, broken } in found.iter().take(5) {
        println!("seed {seed}, mutant {mutant:?}: {}: {}", broken.invariant, broken.how);
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

#[test]
fn test_no_history_breaks_a_promise() {
    let (_, found, _) = simulate_all(100, Mutant::None, 1);
    complain(&found, Mutant::None);
    assert!(found.is_empty());
}

#[test]
fn test_one_seed() {
    let Some(seed) = number("SIM_SEED") else { return };
    let wanted = std::env::var("SIM_MUTANT").unwrap_or_else(|_| "None".into());
    let mutant = Mutant::ALL.iter().copied().find(|mutant| format!("{mutant:?}") == wanted);
    let mutant = mutant.expect("a mutant of the table");
    let (tally, failure) = simulate(seed, mutant);
    println!("{tally:?}");
    if let Some(broken) = failure {
        complain(&[Found { seed, broken }], mutant);
        assert!(mutant != Mutant::None);
    }
}

/// What `tests/run model` runs.
#[test]
#[ignore = "minutes of work, and only fast when optimised"]
fn test_every_promise_and_every_mistake() {
    let seeds = number("SIM_SEEDS").unwrap_or(10_000);
    let begun = Instant::now();
    let (tally, found, _) = simulate_all(seeds, Mutant::None, 5);
    complain(&found, Mutant::None);
    println!(
        "{seeds} seeds, {:.0} simulated hours, {} events, {} messages, {} faults, {} attempts, {} of them lost: {} failed, in {:.0} s",
        tally.millis as f64 / 3.6e6,
        tally.events,
        tally.messages,
        tally.faults,
        tally.attempts,
        tally.lost,
        found.len(),
        begun.elapsed().as_secs_f64(),
    );
    let mut survivors = Vec::new();
    println!("{:<70} {:>6}  broken promise", "mistake", "seed");
    for mutant in Mutant::ALL.iter().copied().filter(|mutant| *mutant != Mutant::None) {
        let (_, caught, _) = simulate_all(3 * seeds.max(1000), mutant, 1);
        match caught.first() {
            Some(first) => println!("{:<70} {:>6}  {}", mutant.title(), first.seed, first.broken.invariant),
            None => survivors.push(mutant),
        }
    }
    println!(
        "{} mistakes, {} not noticed, {:.0} s in all",
        Mutant::ALL.len() - 1,
        survivors.len(),
        begun.elapsed().as_secs_f64()
    );
    assert!(found.is_empty(), "a promise was broken");
    assert!(survivors.is_empty(), "not noticed: {survivors:?}");
}
