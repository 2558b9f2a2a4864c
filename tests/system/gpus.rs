//! The helper that asks the driver of the GPUs, as the daemon runs it.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Output, Stdio};

use agent_model::gpu::{Driver, Look};
use agent_tests::fleet::Daemon;
use agent_tests::nvml::{self, FakeNvml, State, uuid};
use agent_tests::{SOON, eventually, signal};
use rustix::process::Signal;

/// A daemon below a directory, which is never started.
fn configured(dir: &Path, lines: &str) -> Daemon {
    Daemon::new(dir.join("daemon"), lines.to_owned())
}

/// Runs the helper with nothing of this process but what it is told.
fn look(daemon: &Daemon, arguments: &[&str]) -> Output {
    let mut command = daemon.command_of(&[&["gpu-look"], arguments].concat());
    command.env_clear().stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap()
}

/// What it printed: one line, and nothing else.
fn printed(output: &Output) -> Look {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(output.stdout.ends_with(b"}\n") && output.stderr.is_empty(), "{output:?}");
    assert_eq!(output.stdout.iter().filter(|byte| **byte == b'\n').count(), 1, "{output:?}");
    agent_node::gpu::parse(&output.stdout).unwrap()
}

#[test]
fn test_look_at_gpus_is_one_line_of_json() {
    let dir = tempfile::tempdir().unwrap();
    let library = FakeNvml::build(dir.path());
    State::with(2).lost(1).write(&library);
    let daemon = configured(dir.path(), &format!("nvml_library: {}\n", library.display()));
    let look = printed(&look(&daemon, &[]));
    assert_eq!(look.driver, Driver::Works { version: "550.54.15".into(), cuda: "12.4".into() });
    assert_eq!((look.gpus[0].uuid.as_str(), look.gpus.len()), (uuid(0).as_str(), 2));
    assert!(look.gpus[1].broken.is_some(), "{look:?}");
    assert!(!daemon.state().exists(), "the helper needs nothing of the daemon");
}

#[test]
fn test_look_at_gpus_goes_by_what_it_is_told_whatever_became_of_the_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let library = FakeNvml::build(dir.path());
    let spoilt = configured(dir.path(), "no such key: 1\n");
    assert_eq!(look(&spoilt, &[]).status.code(), Some(78));
    let told = |library: &Path| printed(&look(&spoilt, &["--library", library.to_str().unwrap()]));
    assert!(matches!(told(&library).driver, Driver::Works { .. }));
    assert_eq!(told(&dir.path().join("none.so")), Look::default());
    State::with(1).say("init 9").write(&library);
    assert_eq!(told(&library).driver, Driver::NotLoaded);
}

/// On the usual machine there is none; on one that has GPUs, they are those that the kernel module tells of.
#[test]
fn test_the_driver_of_this_machine_tells_the_gpus_of_the_kernel_module() {
    let dir = tempfile::tempdir().unwrap();
    let look = printed(&look(&configured(dir.path(), ""), &["--library", agent_node::gpu::LIBRARY]));
    let gpus = std::fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let known: Vec<String> = gpus.map(|gpu| gpu.file_name().to_string_lossy().to_lowercase()).collect();
    if known.is_empty() || look.driver == Driver::Absent {
        assert!(look.gpus.is_empty(), "{look:?}");
        return;
    }
    assert!(matches!(look.driver, Driver::Works { .. }) && !look.gpus.is_empty(), "{look:?}");
    for gpu in look.gpus.iter().filter(|gpu| gpu.broken.is_none()) {
        // A container may be shown fewer GPUs than the machine has.
        assert!(gpu.uuid.starts_with("GPU-") && known.contains(&gpu.pci), "{gpu:?} of {known:?}");
    }
}

/// Whether a signal was sent that the process does not take.
fn is_pending(pid: u32, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap();
    u64::from_str_radix(pending.trim(), 16).unwrap() & (1 << (signal.as_raw() - 1)) != 0
}

#[test]
fn test_helper_that_hangs_in_the_driver_says_nothing_and_can_be_killed() {
    let dir = tempfile::tempdir().unwrap();
    let library = FakeNvml::build(dir.path());
    let daemon = configured(dir.path(), "");
    let everywhere = ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetPowerUsage"];
    for (at, call) in everywhere.into_iter().enumerate() {
        State::with(2).say(&format!("hang {call}")).say("stubborn").write(&library);
        let mut command = daemon.command_of(&["gpu-look", "--library", library.to_str().unwrap()]);
        let child = command.stdout(Stdio::piped()).spawn().unwrap();
        let pid = eventually("it hangs", SOON, || nvml::hung(&library).get(at).copied());
        assert_eq!(pid, child.id());
        signal(pid, Signal::TERM);
        eventually("a polite request is not heard", SOON, || is_pending(pid, Signal::TERM).then_some(()));
        signal(pid, Signal::KILL);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(9), "{call}: {output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
    }
}
