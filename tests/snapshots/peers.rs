//! Group P: the protocol, with the other end not ours. A client in another language asks our controller everything
//! the protocol promises; our client meets servers that are difficult in one way each.
//!
//! Both are Python with gRPC's own library; the messages are those another project publishes (`buildgrid-common`).

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use agent_cas::{Remote, snapshot};
use agent_tests::client::{channel, runtime};
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::python;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{binaries, root};

use crate::snapshots::probe::{MEMORY, name, peak};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "P1",
        promise: "the controller's store keeps the protocol towards a client that is not ours",
        run: foreign,
    },
    Row {
        id: "P2",
        promise: "whatever a server is like, a tree arrives right or is refused in time",
        run: difficult,
    },
    Row {
        id: "P3",
        promise: "over a slow connection what shrinks travels compressed, and arrives whatever a server makes of it",
        run: compressed,
    },
];

/// For a whole tree, both ways, on however slow a machine.
const LONG: Duration = Duration::from_secs(240);

/// A Python that has what the peers need, made once and kept beside the programs.
pub(crate) fn python() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let dir = binaries().join("../snapshots-python");
        // Of buildgrid its messages alone; what else it needs is for a server of its own.
        let installs: [&[&str]; 2] =
            [&["grpcio", "protobuf", "zstandard"], &["--no-deps", "buildgrid-common==0.5.2"]];
        python::make(&dir, "grpc, zstandard, buildgrid.common", &installs);
        dir
    })
}

fn script(file: &str) -> Command {
    let mut command = python::command(python());
    command.arg(root().join("tests/snapshots").join(file)).env("GRPC_VERBOSITY", "ERROR");
    command
}

fn foreign(tally: &mut Tally, _: &Scale) {
    let fleet = Fleet::started(&Setup::default());
    let said = script("foreign.py").arg(fleet.controller.socket()).output().expect("the client starts");
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let mut promises = 0;
    for line in text.lines() {
        let (verdict, what) = line.split_once(' ').expect("a verdict and a promise");
        promises += 1;
        tally.case(what.split(':').next().unwrap_or(what), || assert_eq!(verdict, "held", "{what}"));
    }
    tally.case("the client got to its end", || {
        assert!(promises >= 30, "{promises} promises:\n{}", String::from_utf8_lossy(&said.stderr));
    });
    let memory = peak(fleet.controller.pid());
    tally.note(format!("{promises} promises; the controller took {} MiB", memory >> 20));
    tally.case("the memory of the controller", || assert!(memory <= MEMORY, "{} MiB", memory >> 20));
}

/// What comes of a tree at a server of one habit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It gets there, and back, as it was.
    Whole,
    /// It is not sent, and the client says so.
    Unsent,
    /// It is sent, and refused when it is to be laid out.
    Refused(&'static str),
}

const HABITS: &[(&str, End)] = &[
    ("none", End::Whole),
    ("limit-0", End::Whole),
    ("limit-1", End::Whole),
    ("limit-64k", End::Whole),
    ("limit-negative", End::Whole),
    ("limit-lies-high", End::Whole),
    ("other-function", End::Unsent),
    ("no-capabilities", End::Whole),
    ("large-answers", End::Whole),
    ("reversed", End::Whole),
    ("leaves-out", End::Unsent),
    ("twice", End::Whole),
    ("unasked", End::Unsent),
    ("bad-digests", End::Unsent),
    ("committed-negative", End::Whole),
    ("committed-small", End::Whole),
    ("early-answer", End::Unsent),
    ("says-all-is-here", End::Refused("absent")),
    ("says-all-is-missing", End::Whole),
    ("forgetful", End::Unsent),
    ("flips", End::Refused("damaged")),
    ("cuts", End::Refused("damaged")),
    ("adds", End::Refused("damaged")),
    ("swaps", End::Refused("damaged")),
    ("empties", End::Whole),
    ("dribbles", End::Whole),
    ("endless", End::Refused("damaged")),
    ("evicts", End::Refused("absent")),
    ("ignores-offsets", End::Refused("damaged")),
    ("restless", End::Whole),
    ("breaks-streams", End::Whole),
    ("dies-in-writes", End::Whole),
];

/// What servers that say they know zstd make of it.
const COMPRESSING: &[&str] = &[
    "zstd",
    "zstd-counts",
    "zstd-minus-one",
    "zstd-refuses",
    "zstd-cuts",
    "zstd-adds",
    "zstd-bombs",
    "zstd-breaks",
];

/// A server that is difficult, which ends with the value.
pub(crate) struct Server {
    process: Child,
    output: BufReader<ChildStdout>,
}

impl Server {
    /// One at an address, a path or a host and a port. Of `places` the first is the directory with what it has kept;
    /// where there is a second, with a key and a certificate, what goes and comes is encrypted.
    pub(crate) fn start(address: &str, habit: &str, places: &[&Path]) -> Server {
        let mut command = script("difficult.py");
        command.arg(address).arg(habit).args(places).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("the server starts");
        let output = BufReader::new(process.stdout.take().expect("a pipe"));
        let mut server = Server { process, output };
        assert_eq!(server.line(), "ready", "the server with habit {habit} does not start");
        server
    }

    fn line(&mut self) -> String {
        let mut said = String::new();
        self.output.read_line(&mut said).expect("a line");
        said.trim().to_owned()
    }

    /// Ends it as it should, and asks how many blobs came or went compressed.
    fn compressed(mut self) -> u64 {
        drop(self.process.stdin.take());
        let said = self.line();
        said.strip_prefix("compressed ").and_then(|count| count.parse().ok()).expect("a number")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn difficult(tally: &mut Tally, _: &Scale) {
    let home = tempfile::tempdir().expect("a directory");
    let project = home.path().join("project");
    fs::create_dir_all(project.join("many")).expect("a directory");
    for i in 0..200u32 {
        let text = format!("{i}\n").repeat(20 * (i as usize % 100));
        fs::write(project.join(format!("many/{i}")), text).expect("a file");
    }
    for (name, byte, size) in [("large", 1, 2_500_000), ("larger", 2, 3_000_001)] {
        fs::write(project.join(name), vec![byte; size]).expect("a file");
    }
    for (habit, end) in HABITS {
        tally.case(habit, || {
            let socket = home.path().join(format!("{habit}.sock"));
            let _server = Server::start(&socket.display().to_string(), habit, &[]);
            there_and_back(home.path(), &project, habit, *end, &Remote::new(channel(&socket)));
        });
    }
    tally.note(format!("{} habits of servers", HABITS.len()));
}

fn compressed(tally: &mut Tally, _: &Scale) {
    let home = tempfile::tempdir().expect("a directory");
    let project = home.path().join("project");
    fs::create_dir_all(project.join("many")).expect("a directory");
    for i in 0..60u32 {
        let text = format!("line {i} of a log\n").repeat(8000);
        fs::write(project.join(format!("many/{i}")), text).expect("a file");
    }
    fs::write(project.join("large"), vec![7; 5_000_000]).expect("a file");
    let mut travelled = 0;
    for habit in COMPRESSING {
        tally.case(habit, || {
            let socket = home.path().join(format!("{habit}.sock"));
            let server = Server::start(&socket.display().to_string(), habit, &[]);
            let remote = Remote::far(channel(&socket), "an/instance");
            there_and_back(home.path(), &project, habit, End::Whole, &remote);
            let count = server.compressed();
            assert!(count > 0, "nothing was compressed");
            travelled += count;
        });
    }
    tally.note(format!("{travelled} blobs travelled compressed"));
}

fn there_and_back(home: &Path, project: &Path, habit: &str, end: End, remote: &Remote) {
    let dest = home.join(format!("{habit}-tree"));
    let scanned = snapshot::scan(project).expect("a directory can be scanned");
    let both = async {
        let pushed = snapshot::push(&scanned, remote, |_| {}).await;
        let laid = match &pushed {
            Ok(_) => Some(snapshot::download(remote, scanned.root, &dest).await),
            Err(_) => None,
        };
        (pushed, laid)
    };
    let (pushed, laid) =
        runtime().block_on(async { tokio::time::timeout(LONG, both).await }).expect("it takes for ever");
    let came = match (&pushed, &laid) {
        (Err(_), _) => "unsent".to_owned(),
        (_, Some(Err(error))) => name(error),
        _ => "whole".to_owned(),
    };
    let wanted = match end {
        End::Whole => "whole",
        End::Unsent => "unsent",
        End::Refused(why) => why,
    };
    assert_eq!(came, wanted, "pushed {pushed:?}, laid {laid:?}");
    assert_eq!(dest.exists(), end == End::Whole);
    if end == End::Whole {
        assert_eq!(snapshot::scan(&dest).expect("it can be scanned").root, scanned.root);
    }
    assert!(!home.join(format!("{habit}-tree.partial")).exists(), "part of a tree is left");
}
