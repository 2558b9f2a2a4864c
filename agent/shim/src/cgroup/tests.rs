use super::places::choose;
use super::*;
use crate::record::{CgroupRequest, Controller, Hello};

fn parents(own: &str, mounts: &str, request: &CgroupRequest) -> Vec<(String, bool, bool)> {
    let places = choose(own, mounts, request);
    places.into_iter().map(|place| (place.parent.display().to_string(), place.v2, place.scope)).collect()
}

#[test]
fn test_places_of_a_hybrid_machine() {
    let own = "9:name=systemd:/\n8:pids:/\n7:blkio:/\n6:freezer:/x\n4:memory:/a/b\n1:cpu:/\n0::/\n";
    let mounts = "30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
         31 30 0:27 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
         32 30 0:28 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
         33 30 0:29 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n\
         34 30 0:30 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
         35 30 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
         36 30 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
    let expected = [
        ("/sys/fs/cgroup/unified".to_owned(), true, false),
        ("/sys/fs/cgroup/freezer/x".to_owned(), false, false),
        ("/sys/fs/cgroup/memory/a/b".to_owned(), false, false),
        ("/sys/fs/cgroup/pids".to_owned(), false, false),
    ];
    assert_eq!(parents(own, mounts, &CgroupRequest::default()), expected);
    let without = CgroupRequest {
        root: Some("/sys/fs/cgroup/unified/jobs".into()),
        without: vec![Controller::Memory, Controller::Freezer, Controller::Pids],
    };
    assert_eq!(parents(own, mounts, &without), [("/sys/fs/cgroup/unified/jobs".to_owned(), true, false)]);
}

#[test]
fn test_places_of_a_scope_a_container_and_a_machine_without_groups() {
    let any = CgroupRequest::default();
    let mount = "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
    let own = "0::/agentjobs.slice/agent-job-train.1.0-01234567.scope\n";
    let scope = "/sys/fs/cgroup/agentjobs.slice/agent-job-train.1.0-01234567.scope".to_owned();
    assert_eq!(parents(own, mount, &any), [(scope, true, true)]);
    // A container that shares the namespace sees its own part of the hierarchy at the mount.
    let part = "30 24 0:26 /docker/c0 /sys/fs/cgroup/my\\040memory ro - cgroup cgroup rw,memory\n";
    let inside = parents("4:memory:/docker/c0/x\n", part, &any);
    assert_eq!(inside, [("/sys/fs/cgroup/my memory/x".to_owned(), false, false)]);
    assert_eq!(parents("4:memory:/elsewhere\n", part, &any), []);
    assert_eq!(parents("0::/../x\n", mount, &any), []);
    assert_eq!(parents("", "", &any), []);
}

#[test]
fn test_limit_that_does_not_take_effect_is_told() {
    let root = tempfile::tempdir().unwrap();
    let place = GroupPlace { parent: root.path().to_owned(), v2: false, scope: false };
    let limits = Limits { memory: Some(1 << 20), pids: Some(7) };
    // There is no kernel behind these files: a group without any of them, then one that rounds.
    fs::create_dir(root.path().join("g")).unwrap();
    fs::write(root.path().join("g/tasks"), "").unwrap();
    fs::write(root.path().join("g/pids.max"), "0").unwrap();
    let made = make(&[place], "g", limits);
    assert_eq!((made.containment, made.entrances.files.len()), (Containment::V1, 1));
    assert_eq!(made.limits, Limits { memory: None, pids: Some(7) });
    assert_eq!(made.unmet, ["memory 1048576: no control group here can limit it"]);
    fs::write(root.path().join("g/pids.max"), "99").unwrap();
    assert!(set(&root.path().join("g/pids.max"), 5, 1).is_err(), "it reads back as 59");
}

#[test]
fn test_groups_of_another_name_are_nobodys() {
    let hello = Hello {
        version: 2,
        instance: "0123456789".into(),
        replica: "train.1.0".parse().unwrap(),
        pid: 1,
        boot_id: String::new(),
        at: agent_model::Timestamp(0),
        containment: String::new(),
        groups: vec!["/sys/fs/cgroup/agentd-train.1.0-01234567".into(), "/sys/fs/cgroup".into()],
        container: false,
        kills: None,
    };
    assert_eq!(Groups::of(&hello).dirs(), [PathBuf::from("/sys/fs/cgroup/agentd-train.1.0-01234567")]);
}

#[test]
fn test_only_old_empty_groups_of_ours_are_swept() {
    let root = tempfile::tempdir().unwrap();
    for (name, procs) in [("agentd-a", ""), ("agentd-b", "7\n"), ("other", "")] {
        fs::create_dir(root.path().join(name)).unwrap();
        if !procs.is_empty() {
            fs::write(root.path().join(name).join("cgroup.procs"), procs).unwrap();
        }
    }
    assert_eq!(sweep(root.path(), Duration::from_secs(3600)), 0);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(sweep(root.path(), Duration::ZERO), 1);
    assert!(!root.path().join("agentd-a").exists());
    assert!(root.path().join("agentd-b").exists() && root.path().join("other").exists());
}
