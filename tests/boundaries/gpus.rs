//! The device nodes of GPUs, outside of containers: what a job may open.
//!
//! Stand-ins are nodes of the kernel under the names of a driver that is not there.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use agent_tests::nvml::{self, FakeNvml};
use agent_tests::table::{Row, Scale, Tally};
use rustix::fs::{FileType, Mode};

use crate::boundaries::users::{ENDED, GAMES, shared, submitted};

pub(crate) const ROWS: &[Row] =
    &[Row { id: "G1", promise: "a job opens the nodes of its own GPUs, and of no other", run: nodes }];

/// What stands in for the nodes of two GPUs, and of one that the driver does not list: `/dev/zero`, `/dev/full` and
/// `/dev/random`.
const NODES: [(&str, u32); 3] = [("nvidia0", 5), ("nvidia1", 7), ("nvidia2", 8)];

/// The stand-ins; gone with this value.
struct StandIns {
    library: PathBuf,
    _dir: tempfile::TempDir,
}

impl StandIns {
    /// `None` on a machine with a driver of its own.
    fn make() -> Option<StandIns> {
        if ["nvidiactl", "nvidia0"].iter().any(|name| PathBuf::from("/dev").join(name).exists()) {
            return None;
        }
        let dir = tempfile::tempdir().expect("a temporary directory");
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("its own directory");
        let library = FakeNvml::build(dir.path());
        nvml::State::with(2).write(&library);
        for (name, minor) in NODES {
            let (path, device) = (PathBuf::from("/dev").join(name), rustix::fs::makedev(1, minor));
            rustix::fs::mknodat(
                rustix::fs::CWD,
                &path,
                FileType::CharacterDevice,
                Mode::from_raw_mode(0o666),
                device,
            )
            .expect("making a node needs root");
            fs::set_permissions(&path, Permissions::from_mode(0o666)).expect("its own node");
        }
        Some(StandIns { library, _dir: dir })
    }

    fn settings(&self) -> [(&str, &str); 1] {
        [("AGENTD_NVML_LIBRARY", self.library.to_str().expect("UTF-8"))]
    }
}

impl Drop for StandIns {
    fn drop(&mut self) {
        for (name, _) in NODES {
            let _ = fs::remove_file(PathBuf::from("/dev").join(name));
        }
    }
}

fn nodes(tally: &mut Tally, _: &Scale) {
    let Some(there) = StandIns::make() else { return };
    let host = shared(&there.settings());
    let script = "for n in 0 1 2; do ( : </dev/nvidia$n ) 2>/dev/null && echo open $n; done; \
                  : </dev/null && : </dev/urandom && echo usual; echo $CUDA_VISIBLE_DEVICES";
    let says = |more: &str| {
        let job = submitted(&host, GAMES, script, more);
        let state = host.wait_for(&job, ENDED);
        let said = host.ctl(&["logs", &job]).stdout;
        assert_eq!(state, "Completed", "{said}{}", host.ctl(&["why", &job]).stdout);
        said
    };
    tally.case("one of two", || {
        let said = says("resources: {gpus: 1}\n");
        let own = (0..2).find(|index| said.trim_end().ends_with(&nvml::uuid(*index))).expect("it has one");
        assert!(said.starts_with(&format!("open {own}\nusual\n")), "{said}");
    });
    tally.case("both, and not the one that the driver does not list", || {
        let said = says("resources: {gpus: 2}\n");
        assert!(said.starts_with("open 0\nopen 1\nusual\n"), "{said}");
    });
    tally.case("none", || {
        let said = says("");
        assert!(said.starts_with("usual\n"), "{said}");
    });
}
