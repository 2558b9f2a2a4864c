//! Looks for inputs that harm a parser, guided by which code each of them reaches. `tests/run fuzz` builds and runs it:
//! FUZZ_TARGET names the target, FUZZ_SEEDS a directory for the inputs to begin from.

#![no_main]

mod targets;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use targets::{TARGETS, Target};

static TARGET: LazyLock<&'static Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let known = TARGETS.iter().find(|target| target.name == name);
    known.unwrap_or_else(|| panic!("FUZZ_TARGET names no target: `{name}`"))
});

fuzz_target!(
    init: {
        // What it begins from.
        let dir = std::env::var("FUZZ_SEEDS").expect("FUZZ_SEEDS names a directory");
        for (index, seed) in (TARGET.seeds)().iter().chain(&TARGET.kept()).enumerate() {
            std::fs::write(format!("{dir}/seed-{index}"), seed).expect("written");
        }
    },
    |bytes: &[u8]| {
        let _ = (TARGET.run)(bytes);
    }
);
