//! Parsers of what others send, fed with what nobody sends: honest inputs and those that once did harm, and what becomes
//! of them by chance. None may panic, take more than [`MOST_MEMORY`] or compute for more than [`LONGEST`].
//!
//! A merge tries the same every time. `tests/run fuzz TARGET [SECONDS]` looks for more, guided by what the code does
//! with an input (`guided.rs`); what it finds is put into `corpus/TARGET`, so that a merge tries it from then on.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "says how much was tried, and what never ends")]

mod targets;

use std::alloc::System;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;
use std::{fs, process, thread};

use agent_tests::chance::Chance;
use agent_tests::mutate;
use cap::Cap;
use rustix::time::{ClockId, clock_gettime};
use targets::{TARGETS, Target};

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// Bytes that one input may take.
const MOST_MEMORY: usize = 256 << 20;

/// What one input may compute. It is the time of the processor, so a busy machine changes nothing.
const LONGEST: Duration = Duration::from_secs(2);

/// Inputs by chance for each target.
const TRIES: usize = 10_000;

fn computed() -> Duration {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

/// What is fed now and since which time of the processor, for the thread that ends what never does.
struct Fed {
    file: PathBuf,
    since: Mutex<Option<Duration>>,
}

impl Fed {
    fn new() -> &'static Fed {
        // What kills this process leaves its input there.
        let file = Path::new("/dev/shm").join(format!("agent-fuzz-{}", process::id()));
        let fed: &'static Fed = Box::leak(Box::new(Fed { file, since: Mutex::default() }));
        thread::spawn(|| {
            loop {
                thread::sleep(LONGEST / 8);
                let since = *fed.since.lock().expect("a lock");
                if since.is_some_and(|since| computed().saturating_sub(since) > LONGEST) {
                    eprintln!("an input is computed on for more than {LONGEST:?}: {}", fed.file.display());
                    process::abort();
                }
            }
        });
        fed
    }

    /// Feeds a target; whether it took it for something, or what harm it did.
    fn feed(&self, target: &Target, bytes: &[u8]) -> Result<bool, String> {
        fs::write(&self.file, bytes).expect("written");
        *self.since.lock().expect("a lock") = Some(computed());
        let before = MEMORY.allocated();
        let fed = catch_unwind(AssertUnwindSafe(|| (target.run)(bytes)));
        *self.since.lock().expect("a lock") = None;
        let taken = fed.map_err(|_| "it panics".to_owned())?;
        match MEMORY.max_allocated().saturating_sub(before) {
            most if most > MOST_MEMORY => Err(format!("it takes {} MiB", most >> 20)),
            _ => Ok(taken),
        }
    }
}

#[test]
fn test_no_input_harms_a_parser() {
    let fed = Fed::new();
    let mut failures = Vec::new();
    for target in TARGETS {
        let (mut inputs, mut taken) = ((target.seeds)(), 0);
        let honest = inputs.len();
        inputs.extend(target.kept());
        let mut chance = Chance::new(1);
        // Half of them from honest ones, which reach farther than most that are kept.
        let changed = (0..TRIES).map(|index| match index % 2 {
            0 => mutate::changed(&inputs[..honest], &mut chance),
            _ => mutate::changed(&inputs, &mut chance),
        });
        let changed: Vec<Vec<u8>> = changed.collect();
        for (index, bytes) in inputs.iter().chain(&changed).enumerate() {
            let what = match fed.feed(target, bytes) {
                Ok(false) if index < honest => "it is not taken, and it is honest".to_owned(),
                Ok(was_taken) => {
                    taken += usize::from(was_taken);
                    continue;
                }
                Err(what) => what,
            };
            failures.push(format!("{}: {what}: {}", target.name, keep(target.name, bytes).display()));
        }
        let all = inputs.len() + changed.len();
        let kept = inputs.len() - honest;
        println!("{}: {all} inputs, {kept} of them kept; {taken} were taken for something", target.name);
    }
    fs::remove_file(&fed.file).expect("removed");
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Puts an input where it can be looked at.
fn keep(target: &str, bytes: &[u8]) -> PathBuf {
    let name = format!("{target}-{}", &agent_cas::digest_of(bytes).hex()[..12]);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&file, bytes).expect("written");
    file
}
