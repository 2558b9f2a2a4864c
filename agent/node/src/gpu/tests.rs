//! Looks through a fake driver's library, whose answers a test chooses.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::{Path, PathBuf};

use agent_model::gpu::{Driver, GpuProcess, Look};
use agent_model::node::Grade;

use super::{LONGEST, ParseError, finding, look_on, parse};
use crate::Machine;

#[path = "../../../../tests/src/nvml.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the tests of the whole product")]
mod nvml;

use nvml::{Card, FakeNvml, State, uuid};

/// A machine with a library of its own.
struct Bed {
    root: tempfile::TempDir,
    library: PathBuf,
}

impl Bed {
    fn new() -> Bed {
        let root = tempfile::tempdir().unwrap();
        let library = FakeNvml::build(root.path());
        Bed { root, library }
    }

    fn old() -> Bed {
        let root = tempfile::tempdir().unwrap();
        let library = FakeNvml::build_old(root.path());
        Bed { root, library }
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn look(&self, state: &State) -> Look {
        state.write(&self.library);
        let look = look_on(&Machine { root: self.root.path().to_owned() }, &self.library);
        // Every look can be printed and parsed, and has a meaning.
        let printed = serde_json::to_vec(&look).unwrap();
        assert_eq!(parse(&printed).unwrap(), look);
        let finding = finding(&look);
        assert!(finding.topic == "gpu" && !finding.means.is_empty(), "{finding:?}");
        look
    }
}

fn works(look: &Look) -> bool {
    matches!(look.driver, Driver::Works { .. })
}

#[test]
fn test_without_a_library_there_is_no_driver() {
    let root = tempfile::tempdir().unwrap();
    let machine = Machine { root: root.path().to_owned() };
    assert_eq!(look_on(&machine, &root.path().join("libnvidia-ml.so.1")), Look::default());
    assert_eq!(look_on(&machine, Path::new("libnvidia-ml.so.nowhere")), Look::default());

    let library = root.path().join("broken.so");
    for text in ["", "not a library"] {
        std::fs::write(&library, text).unwrap();
        let look = look_on(&machine, &library);
        assert!(matches!(look.driver, Driver::Failed { .. }), "{look:?}");
    }
    let other = look_on(&machine, Path::new("libc.so.6"));
    assert!(matches!(other.driver, Driver::Failed { .. }), "{other:?}");
}

#[test]
fn test_gpus_are_read_completely() {
    let bed = Bed::new();
    let state = State::with(2).card(1, |card| {
        card.set("processes", "42:1048576,7:?").set("graphics", "42:2097152").set("mps", "9:1")
    });
    let look = bed.look(&state);
    assert_eq!(look.driver, Driver::Works { version: "550.54.15".into(), cuda: "12.4".into() });
    let [first, second] = &look.gpus[..] else { panic!("{look:?}") };
    assert_eq!((first.index, first.uuid.as_str()), (0, uuid(0).as_str()));
    assert_eq!(first.name, "NVIDIA H100 80GB HBM3");
    assert_eq!((first.memory, first.used), (Some(80 << 30), Some(4 << 20)));
    assert_eq!((first.utilization, first.temperature, first.power), (Some(0), Some(31), Some(70_000)));
    assert_eq!((first.pci.as_str(), first.mig, &first.broken), ("0000:10:00.0", false, &None));
    assert_eq!(first.processes.as_deref(), Some(&[][..]));
    let process = |pid, memory| GpuProcess { pid, memory };
    let expected = [process(7, None), process(9, Some(1)), process(42, Some(2 << 20))];
    assert_eq!(second.processes.as_deref(), Some(&expected[..]));
    assert!(second.is_in_use() && !first.is_in_use());
    let finding = finding(&look);
    assert_eq!(finding.grade, Grade::Good);
    assert_eq!(finding.found, "2 x NVIDIA H100 80GB HBM3, driver 550.54.15, CUDA 12.4");
}

#[test]
fn test_driver_of_before_has_the_older_calls() {
    let bed = Bed::old();
    let look =
        bed.look(&State::with(2).say("driver 470.57.02").card(0, |card| card.set("processes", "5:64")));
    assert_eq!(look.driver, Driver::Works { version: "470.57.02".into(), cuda: String::new() });
    let gpu = &look.gpus[0];
    assert_eq!((gpu.memory, gpu.used, &gpu.broken), (None, None, &None));
    assert_eq!(gpu.processes.as_deref(), Some(&[GpuProcess { pid: 5, memory: Some(64) }][..]));
    assert!(!gpu.name.is_empty() && gpu.temperature.is_some() && gpu.pci.is_empty(), "{gpu:?}");
}

#[test]
fn test_values_that_a_model_does_not_have_are_absent() {
    let bed = Bed::new();
    let bare = Card::default().set("uuid", uuid(0)).set("name", "NVIDIA GB10");
    let look = bed.look(&State::of(vec![bare]));
    let gpu = &look.gpus[0];
    assert_eq!((gpu.memory, gpu.utilization, gpu.temperature, gpu.power), (None, None, None, None));
    assert_eq!((&gpu.broken, gpu.name.as_str()), (&None, "NVIDIA GB10"));

    // Whichever single value fails, in any way that does not mean a lost GPU, the others are reported.
    let calls = [
        "nvmlDeviceGetName",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetMigMode",
        "nvmlSystemGetDriverVersion",
        "nvmlSystemGetCudaDriverVersion_v2",
    ];
    for call in calls {
        for error in [3, 4, 6, 7, 12, 13, 14, 17, 4711] {
            let look = bed.look(&State::with(2).say(&format!("fail {call} {error}")));
            assert!(works(&look), "{call} {error}: {look:?}");
            assert!(look.gpus.len() == 2 && look.gpus[1].broken.is_none(), "{call} {error}: {look:?}");
        }
    }
}

#[test]
fn test_state_of_the_driver_is_told_by_the_error_of_the_library() {
    let bed = Bed::new();
    let said = |words: &str| bed.look(&State::with(1).say(words)).driver;
    assert_eq!(said("init 9"), Driver::NotLoaded);
    assert_eq!(said("init 999"), Driver::NotLoaded, "there is no device of a driver either");
    assert_eq!(said("init 4"), Driver::NotLoaded);
    assert!(matches!(said("init 18"), Driver::Mismatch { .. }));
    bed.file(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu\n",
    );
    bed.file("dev/nvidiactl", "");
    assert!(
        matches!(said("init 18"), Driver::Mismatch { detail } if detail.ends_with("module is 535.129.03"))
    );
    for words in
        ["init 999", "init 4", "init 17", "init 4711", "fail nvmlDeviceGetCount_v2 999", "count 4000000000"]
    {
        assert!(matches!(said(words), Driver::Failed { .. }), "{words}");
    }
    assert_eq!(said("fail nvmlDeviceGetCount_v2 9"), Driver::NotLoaded);
}

#[test]
fn test_lost_gpu_is_broken_and_the_others_are_told() {
    let bed = Bed::new();
    let look = bed.look(&State::with(3).lost(1));
    assert!(look.gpus[1].broken.as_deref().unwrap().contains("lost") && look.gpus[1].uuid.is_empty());
    assert!(look.gpus[0].broken.is_none() && look.gpus[2].broken.is_none() && look.gpus.len() == 3);
    let judged = finding(&look);
    assert_eq!(judged.grade, Grade::Limited);
    assert!(judged.found.contains("GPU 1 cannot be used: it is lost"), "{judged:?}");

    // Lost, in need of a reset, unknown: reported with its name, which a job may wait for.
    for error in [8, 10, 11, 15, 16, 999] {
        let look = bed.look(&State::with(2).card(0, |card| card.set("error", error)));
        assert!(look.gpus[0].broken.is_some() && look.gpus[1].broken.is_none(), "{error}: {look:?}");
        assert_eq!(look.gpus[0].uuid, uuid(0));
    }
    // Lost while it is asked, and not told who it is.
    let look = bed.look(&State::with(1).say("fail nvmlDeviceGetPowerUsage 15"));
    assert!(look.gpus[0].broken.is_some() && look.gpus[0].memory.is_some(), "{look:?}");
    let look = bed.look(&State::with(1).say("fail nvmlDeviceGetUUID 999"));
    assert!(look.gpus[0].broken.as_deref().unwrap().contains("does not tell"), "{look:?}");
    // A user without rights breaks no GPU, but cannot use it.
    let look = bed.look(&State::with(2).card(1, |card| card.set("handle", 4)));
    assert!(look.gpus[1].broken.as_deref().unwrap().contains("user"), "{look:?}");
}

#[test]
fn test_garbage_is_never_passed_on() {
    let bed = Bed::new();
    for card in [
        Card::new(0).set("garbage", 1),
        Card::new(0).set("uuid", ""),
        Card::new(0).without("uuid"),
        Card::new(0).set("uuid", "GPU-1,GPU-2"),
        Card::new(0).set("uuid", "GPU 1"),
        Card::new(0).set("uuid", "none;rm"),
    ] {
        let look = bed.look(&State::of(vec![card, Card::new(1)]));
        assert!(look.gpus[0].broken.is_some() && look.gpus[0].uuid.is_empty(), "{look:?}");
        assert!(look.gpus[1].broken.is_none(), "{look:?}");
    }
    let look =
        bed.look(&State::with(1).say("driver \u{1b}[31m550").card(0, |card| card.set("name", "A\u{7}B")));
    assert_eq!(look.driver, Driver::Works { version: "[31m550".into(), cuda: "12.4".into() });
    assert_eq!(look.gpus[0].name, "AB");
    let odd = Card::new(0).set("utilization", 4_000_000_000_u64).set("used", u64::MAX);
    let look = bed.look(&State::of(vec![odd]));
    assert_eq!((look.gpus[0].utilization, look.gpus[0].used), (None, None));
}

#[test]
fn test_second_gpu_with_an_identifier_is_broken() {
    let bed = Bed::new();
    let look = bed.look(&State::with(3).card(2, |card| card.set("uuid", uuid(0))));
    assert!(look.gpus[0].broken.is_none() && look.gpus[1].broken.is_none());
    assert_eq!(look.gpus[2].broken.as_deref(), Some("it has the identifier of GPU 0"));
}

#[test]
fn test_number_of_gpus_may_change_at_any_moment() {
    let bed = Bed::new();
    for count in [0, 3, 1, 8, 2] {
        assert_eq!(bed.look(&State::with(count)).gpus.len(), count);
    }
    // One disappeared after they were counted.
    let look = bed.look(&State::with(1).say("count 3"));
    assert!(works(&look) && look.gpus.len() == 1, "{look:?}");
    assert!(bed.look(&State::with(3).say("count 0")).gpus.is_empty());
}

#[test]
fn test_parts_of_a_divided_gpu_are_told() {
    let bed = Bed::new();
    let parted = |card: Card| {
        let card = card.part("MIG-aaaa", 10 << 30).part("MIG-GPU-0/1/0", 20 << 30).part("MIG-aaaa", 1);
        card.part("x,y", 1)
    };
    let look = bed.look(&State::with(2).card(0, parted));
    let gpu = &look.gpus[0];
    assert!(gpu.mig && !look.gpus[1].mig && gpu.broken.is_none(), "{look:?}");
    let parts: Vec<_> = gpu.parts.iter().map(|part| (part.uuid.as_str(), part.memory)).collect();
    assert_eq!(parts, [("MIG-aaaa", Some(10 << 30)), ("MIG-GPU-0/1/0", Some(20 << 30))]);
    assert_eq!(gpu.parts[0].processes.as_deref(), Some(&[][..]));
    assert!(finding(&look).found.contains("GPU 0 in 2 parts"), "{:?}", finding(&look));

    let users = nvml::beside(&bed.library, "users");
    std::fs::create_dir(&users).unwrap();
    std::fs::write(users.join("MIG-aaaa.77"), "4096").unwrap();
    std::fs::write(users.join(format!("{}.78", uuid(1))), "8192").unwrap();
    let look = bed.look(&State::with(2).card(0, parted));
    let part = &look.gpus[0].parts[0];
    assert_eq!(part.processes.as_deref(), Some(&[GpuProcess { pid: 77, memory: Some(4096) }][..]));
    assert_eq!((part.used, look.gpus[1].used), (Some(4096), Some((4 << 20) + 8192)));
    assert!(look.gpus.iter().all(|gpu| gpu.is_in_use()), "{look:?}");
}

#[test]
fn test_error_in_the_log_of_the_kernel_is_told_of_its_gpu() {
    let bed = Bed::new();
    bed.file("dev/kmsg", "4,2,200,-;NVRM: Xid (PCI:0000:11:00): 48, pid=42, name=python, DBE\n");
    let look = bed.look(&State::with(2));
    let xid = look.gpus[1].xid.as_ref().unwrap();
    assert!((xid.code, xid.at_us) == (48, 200) && look.gpus[0].xid.is_none(), "{look:?}");
    assert!(look.gpus[1].broken.is_none(), "the log tells of the past");
}

#[test]
fn test_only_a_look_is_parsed() {
    let parses = |text: &str| parse(text.as_bytes());
    assert_eq!(parses(r#"{"driver":{"state":"absent"},"gpus":[]}"#).unwrap(), Look::default());
    let garbled = ["", "{", "null", "[]", "gpus: 0", r#"{"driver":{"state":"new"},"gpus":[]}"#];
    for text in garbled.into_iter().map(str::to_owned).chain([
        "noise\n{\"driver\":{\"state\":\"absent\"},\"gpus\":[]}".to_owned(),
        "{\"driver\":{\"state\":\"absent\"},\"gpus\":[]}\n{}".to_owned(),
    ]) {
        assert!(matches!(parses(&text), Err(ParseError::Garbled(_))), "{text}");
    }
    for gpus in [
        r#"{"uuid":"a,b"}"#,
        r#"{"uuid":""}"#,
        r#"{"uuid":"a"},{"uuid":"a"}"#,
        r#"{"uuid":"a","parts":[{"uuid":"a"}]}"#,
        r#"{"uuid":"a","name":"\u001b[2J"}"#,
    ] {
        let text = format!(r#"{{"driver":{{"state":"absent"}},"gpus":[{gpus}]}}"#);
        assert!(matches!(parses(&text), Err(ParseError::Unsound { .. })), "{text}");
    }
    let long = vec![b' '; LONGEST + 1];
    assert!(matches!(parse(&long), Err(ParseError::TooLong { .. })));
}

#[test]
fn test_look_that_was_damaged_on_its_way_is_read_as_a_sound_one_or_not_at_all() {
    let bed = Bed::new();
    let whole = Card::new(0).set("processes", "42:1048576,7:?").part("MIG-aaaa", 10 << 30);
    let look = bed.look(&State::of(vec![whole, Card::new(1).set("error", 15)]));
    let printed = serde_json::to_vec(&look).unwrap();
    for at in 0..printed.len() {
        let cut = parse(&printed[..at]);
        assert!(matches!(cut, Err(ParseError::Garbled(_))), "{at}");
        for byte in [0, b'"', b',', b'}', b'9', 0xff] {
            let mut damaged = printed.clone();
            damaged[at] = byte;
            if let Ok(read) = parse(&damaged) {
                assert_eq!(parse(&serde_json::to_vec(&read).unwrap()).unwrap(), read);
            }
        }
    }
}
