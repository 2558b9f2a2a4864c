//! Group O: a store of blobs that is not ours answers oddly, for some seconds or until somebody repairs it, while jobs
//! fetch and upload, and people submit and download.
//!
//! Each cell is one oddity and one of these four. Cells run beside each other, each lane of them with a controller, a
//! node and a store of its own; nearly all of their time is waiting.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use agent_cas::snapshot;
use agent_model::{Digest, JobDraft};
use agent_proto::v1;
use agent_tests::client::{TERMINAL, runtime};
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{binaries, eventually};
use tonic::Code;

use crate::snapshots::oddstore::{Odd, Oddity};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "O1",
        promise: "a foreign store that answers oddly for eight seconds costs time and nothing else",
        run: passes,
    },
    Row {
        id: "O2",
        promise: "while it stays odd all wait and say why, or are told truly; nothing is lost",
        run: lasts,
    },
    Row {
        id: "O3",
        promise: "what a foreign store lets go of between submit and start is had again, or told as what it is",
        run: evicted,
    },
];

const ODDITIES: [(&str, Oddity); 20] = [
    ("a page with 400", Oddity::Page(400)),
    ("a page with 403", Oddity::Page(403)),
    ("a page with 404", Oddity::Page(404)),
    ("a page with 500", Oddity::Page(500)),
    ("a page with 502", Oddity::Page(502)),
    ("a page with 200", Oddity::Page(200)),
    ("200 without trailers", Oddity::NoTrailers),
    ("a reset mid stream", Oddity::Reset),
    ("INTERNAL", Oddity::Says(Code::Internal)),
    ("UNKNOWN", Oddity::Says(Code::Unknown)),
    ("RESOURCE_EXHAUSTED", Oddity::Says(Code::ResourceExhausted)),
    ("CANCELLED", Oddity::Says(Code::Cancelled)),
    ("PERMISSION_DENIED", Oddity::Says(Code::PermissionDenied)),
    ("UNAUTHENTICATED", Oddity::Says(Code::Unauthenticated)),
    ("FAILED_PRECONDITION", Oddity::Says(Code::FailedPrecondition)),
    ("one item UNAVAILABLE", Oddity::Item(Code::Unavailable)),
    ("one item INTERNAL", Oddity::Item(Code::Internal)),
    ("rotten blobs", Oddity::Rotten),
    ("blobs that are gone", Oddity::Lacks),
    ("blobs that it forgets", Oddity::Forgets),
];

#[derive(Debug, Clone, Copy)]
enum Act {
    Fetch,
    Upload,
    Submit,
    Download,
}

const ACTS: [(&str, Act); 4] =
    [("fetch", Act::Fetch), ("upload", Act::Upload), ("submit", Act::Submit), ("download", Act::Download)];

/// How long an oddity lasts that passes.
const PASSES: Duration = Duration::from_secs(8);

/// For what waits until a store has been given up, more than once, on however slow a machine.
const LONG: Duration = Duration::from_secs(300);

/// Cells that run at once.
const LANES: usize = 8;

/// A controller and a node whose blobs are in a store that can be odd.
struct Lane {
    odd: Odd,
    fleet: Fleet,
    /// Names no other cell uses.
    cells: AtomicUsize,
}

/// What a cell works on.
struct Cell<'a> {
    lane: &'a Lane,
    oddity: Oddity,
    home: PathBuf,
}

impl Lane {
    fn new() -> Lane {
        let odd = Odd::start();
        let line = format!("blob_store: {}\n", odd.url());
        let setup = Setup { nodes: 1, controller: line.clone(), node: line, ..Setup::default() };
        Lane { odd, fleet: Fleet::started(&setup), cells: AtomicUsize::new(0) }
    }

    fn cell(&self, oddity: Oddity) -> Cell<'_> {
        let home = self.fleet.home().join(format!("cell-{}", self.cells.fetch_add(1, Ordering::Relaxed)));
        let code = home.join("code");
        fs::create_dir_all(code.join("sub")).expect("a directory");
        for (path, length) in [("data.txt", 10), ("sub/more.txt", 100), ("large.txt", 100_000)] {
            let text = format!("{} {path} {oddity:?}\n", home.display()).repeat(length);
            fs::write(code.join(path), text).expect("a file");
        }
        self.odd.be(None);
        Cell { lane: self, oddity, home }
    }
}

impl Cell<'_> {
    fn is_odd(&self, odd: bool) {
        self.lane.odd.be(odd.then_some(self.oddity));
    }

    fn code(&self) -> PathBuf {
        self.home.join("code")
    }

    fn text(&self, path: &str) -> String {
        fs::read_to_string(self.code().join(path)).expect("a file")
    }

    /// The code, in the store alone: nobody between the client and the store has seen it.
    fn stored(&self) -> Digest {
        let scanned = snapshot::scan(&self.code()).expect("a directory can be scanned");
        let pushed = runtime().block_on(snapshot::push(&scanned, &self.lane.odd.remote(), |_| {}));
        pushed.expect("a store that is well takes it");
        scanned.root
    }

    fn word(&self) -> PathBuf {
        self.home.join("go-on")
    }

    /// Reads its code, waits for a word, and writes small outputs and a large one.
    fn command(&self) -> String {
        let word = self.word();
        format!(
            "cat data.txt; while [ ! -e {} ]; do sleep 0.05; done; tr a-z A-Z < data.txt > outputs/loud.txt; \
             cp large.txt sub/more.txt outputs",
            word.display()
        )
    }

    fn submit(&self) -> String {
        let draft = JobDraft { command: self.command(), code: Some(self.stored()), ..JobDraft::default() };
        self.lane.fleet.client.submit(&draft)
    }

    fn go_on(&self) {
        fs::write(self.word(), "").expect("a file");
    }

    #[allow(clippy::disallowed_methods, reason = "runs what it tests")]
    fn ctl(&self, arguments: &[&str]) -> Child {
        let mut ctl = Command::new(binaries().join("agentctl"));
        ctl.arg("--socket").arg(self.lane.fleet.controller.socket()).args(arguments);
        ctl.env("HOME", &self.home).env_remove("XDG_CACHE_HOME");
        ctl.stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .expect("agentctl starts")
    }

    /// As people submit it.
    fn submitting(&self) -> Child {
        let code = self.code();
        self.ctl(&["submit", &code.display().to_string(), "--", "sh", "-c", &self.command()])
    }

    fn downloading(&self, job: &str, to: &Path) -> Child {
        self.ctl(&["download", job, "--force", "-o", &to.display().to_string()])
    }

    /// The job while it waits for the store and says why, or as it ended.
    fn waits_or_ended(&self, job: &str) -> v1::Job {
        eventually("the job waits and says why, or has ended", LONG, || {
            let view = self.lane.fleet.client.try_job(job).ok()?;
            let waits = view.replicas.iter().any(|replica| {
                replica
                    .detail
                    .strip_prefix("waiting for the store of blobs: ")
                    .is_some_and(|why| why.len() > 5)
            });
            (waits || view.ended_ms > 0).then_some(view)
        })
    }

    fn completed(&self, job: &str) {
        let view = self.lane.fleet.client.reached_within(LONG, job, &TERMINAL);
        assert_eq!(view.state, "Completed", "{:?}", view.outcome);
        assert_eq!(String::from_utf8_lossy(&self.lane.fleet.client.log(job, "job")), self.text("data.txt"));
    }

    /// The outputs come back as they were written, from a store that is well.
    fn outputs(&self, job: &str) {
        let to = self.home.join("fetched");
        succeeded(self.downloading(job, &to));
        self.same(&to);
    }

    fn same(&self, to: &Path) {
        let read = |path: &str| fs::read_to_string(to.join("outputs").join(path)).expect("an output");
        assert_eq!(read("loud.txt"), self.text("data.txt").to_uppercase());
        for (output, from) in [("large.txt", "large.txt"), ("more.txt", "sub/more.txt")] {
            assert!(read(output) == self.text(from), "{output} came back as something else");
        }
    }
}

fn ended(child: Child) -> Output {
    child.wait_with_output().expect("its own child")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn succeeded(child: Child) -> String {
    let output = ended(child);
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// The cells, spread over lanes; what came of each is told in a line.
fn spread(tally: &mut Tally, cells: Vec<(usize, usize)>, run: impl Fn(&Cell<'_>, Act) -> String + Sync) {
    let next = AtomicUsize::new(0);
    let lane = || {
        let (mut tally, mut told) = (Tally::default(), Vec::new());
        let lane = Lane::new();
        while let Some((oddity, act)) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
            let ((name, oddity), (action, act)) = (ODDITIES[*oddity], ACTS[*act]);
            let came = tally.case(&format!("{name}, {action}"), || run(&lane.cell(oddity), act));
            told.push(format!("{name:<22} {action:<9} {}", came.as_deref().unwrap_or("FAILED")));
        }
        tally.notes = told;
        tally
    };
    let mut notes = Vec::new();
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES.min(cells.len())).map(|_| scope.spawn(lane)).collect();
        for lane in lanes {
            let mut done = lane.join().expect("a lane");
            notes.append(&mut done.notes);
            tally.add(done);
        }
    });
    let place =
        |note: &String| ODDITIES.iter().position(|(name, _)| note.starts_with(&format!("{name:<22} ")));
    notes.sort_by_key(place);
    notes.into_iter().for_each(|note| tally.note(note));
}

fn all() -> Vec<(usize, usize)> {
    (0..ODDITIES.len()).flat_map(|oddity| (0..ACTS.len()).map(move |act| (oddity, act))).collect()
}

fn passes(tally: &mut Tally, scale: &Scale) {
    let every = (0..ODDITIES.len()).map(|oddity| (oddity, (oddity + oddity / 4) % ACTS.len())).collect();
    spread(tally, scale.of(every, all()), |cell, act| {
        match act {
            Act::Fetch => fetch_passes(cell),
            Act::Upload => upload_passes(cell),
            Act::Submit => submit_passes(cell),
            Act::Download => download_passes(cell),
        }
        "as if nothing had been".to_owned()
    });
}

fn for_a_while(cell: &Cell<'_>) {
    std::thread::sleep(PASSES);
    cell.is_odd(false);
}

fn fetch_passes(cell: &Cell<'_>) {
    let client = &cell.lane.fleet.client;
    client.set_eligibility("n0", "cordon").expect("it takes no jobs");
    let job = cell.submit();
    cell.go_on();
    cell.is_odd(true);
    client.set_eligibility("n0", "uncordon").expect("it takes jobs again");
    for_a_while(cell);
    cell.completed(&job);
    cell.outputs(&job);
}

fn upload_passes(cell: &Cell<'_>) {
    let job = cell.submit();
    cell.lane.fleet.client.reached_within(LONG, &job, &["Running"]);
    cell.is_odd(true);
    cell.go_on();
    for_a_while(cell);
    cell.completed(&job);
    cell.outputs(&job);
}

fn submit_passes(cell: &Cell<'_>) {
    cell.go_on();
    cell.is_odd(true);
    let submitting = cell.submitting();
    for_a_while(cell);
    let job = succeeded(submitting);
    cell.completed(&job);
    cell.outputs(&job);
}

fn download_passes(cell: &Cell<'_>) {
    cell.go_on();
    let (job, to) = (cell.submit(), cell.home.join("at-once"));
    cell.completed(&job);
    cell.is_odd(true);
    let downloading = cell.downloading(&job, &to);
    for_a_while(cell);
    succeeded(downloading);
    cell.same(&to);
}

fn lasts(tally: &mut Tally, scale: &Scale) {
    // Rotten blobs fetched; a page of a proxy, and blobs that are forgotten, at uploads; and one of each other act.
    let some = vec![(17, 0), (2, 1), (19, 1), (12, 2), (18, 3)];
    spread(tally, scale.of(some, all()), |cell, act| match act {
        Act::Fetch => fetch_lasts(cell),
        Act::Upload => upload_lasts(cell),
        Act::Submit => submit_lasts(cell),
        Act::Download => download_lasts(cell),
    });
}

/// The fault of a job that ended, which names a cause, somebody to blame and a way on.
fn fault(job: &v1::Job) -> v1::Fault {
    let fault = job.outcome.as_ref().and_then(|outcome| outcome.fault.clone()).expect("a fault");
    assert!(!fault.why.is_empty() && !fault.fix.is_empty(), "{fault:?}");
    fault
}

fn fetch_lasts(cell: &Cell<'_>) -> String {
    let client = &cell.lane.fleet.client;
    client.set_eligibility("n0", "cordon").expect("it takes no jobs");
    let job = cell.submit();
    cell.go_on();
    cell.is_odd(true);
    client.set_eligibility("n0", "uncordon").expect("it takes jobs again");
    let is_about_blobs = matches!(cell.oddity, Oddity::Rotten | Oddity::Lacks);
    let view = match is_about_blobs {
        true => client.reached_within(LONG, &job, &TERMINAL),
        false => cell.waits_or_ended(&job),
    };
    if view.ended_ms == 0 {
        let told = view.replicas[0].detail.clone();
        cell.is_odd(false);
        cell.completed(&job);
        return told;
    }
    if view.state == "Completed" {
        return "Completed, not concerned".to_owned();
    }
    let fault = fault(&view);
    let right = match cell.oddity {
        Oddity::Rotten => "SNP-105",
        _ => "SNP-103",
    };
    assert_eq!((fault.code.as_str(), fault.blame.as_str()), (right, "network"), "{fault:?}");
    assert!(fault.fix.contains("submit the job again"), "{fault:?}");
    // The advice is true while the store is as it was.
    let again = succeeded(cell.submitting());
    cell.completed(&again);
    format!("{}, and the next submit was Completed", fault.code)
}

fn upload_lasts(cell: &Cell<'_>) -> String {
    let client = &cell.lane.fleet.client;
    let job = cell.submit();
    client.reached_within(LONG, &job, &["Running"]);
    cell.is_odd(true);
    cell.go_on();
    let view = cell.waits_or_ended(&job);
    if view.ended_ms > 0 {
        assert_eq!(view.state, "Completed", "{:?}", view.outcome);
        cell.is_odd(false);
        cell.outputs(&job);
        return "Completed, not concerned".to_owned();
    }
    let told = view.replicas[0].detail.clone();
    client.cancel(&job).expect("it can be canceled");
    let view = client.reached_within(LONG, &job, &TERMINAL);
    let fault = fault(&view);
    assert_eq!((view.state.as_str(), fault.code.as_str()), ("Canceled", "OUT-101"), "{fault:?}");
    assert_eq!(fault.blame, "network", "{fault:?}");
    assert!(fault.fix.contains(&format!("agentctl node outputs {job}")), "{fault:?}");
    let refused = ended(cell.ctl(&["node", "outputs", &job]));
    assert!(!refused.status.success() && said(&refused).contains("OUT-101"), "{}", said(&refused));
    cell.is_odd(false);
    succeeded(cell.ctl(&["node", "outputs", &job]));
    cell.outputs(&job);
    format!("{told}; OUT-101 after a cancel, stored later")
}

fn submit_lasts(cell: &Cell<'_>) -> String {
    cell.go_on();
    cell.is_odd(true);
    let output = ended(cell.submitting());
    let taken = output.status.success();
    let came = if taken {
        "taken, and Completed when the store was well".to_owned()
    } else {
        let said = said(&output);
        assert!(said.contains("error[SNP-104]") && said.contains("blob_store"), "{said}");
        "SNP-104".to_owned()
    };
    cell.is_odd(false);
    let job = match taken {
        true => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        false => succeeded(cell.submitting()),
    };
    cell.completed(&job);
    cell.outputs(&job);
    came
}

fn download_lasts(cell: &Cell<'_>) -> String {
    cell.go_on();
    let (job, to) = (cell.submit(), cell.home.join("at-once"));
    cell.completed(&job);
    cell.is_odd(true);
    let output = ended(cell.downloading(&job, &to));
    let came = if output.status.success() {
        cell.same(&to);
        "fetched, not concerned".to_owned()
    } else {
        let said = said(&output);
        let right = match cell.oddity {
            Oddity::Rotten => "error[SNP-105]",
            Oddity::Lacks => "error[SNP-103]",
            _ => "error[SNP-104]",
        };
        assert!(said.contains(right) && said.contains("fix:"), "{said}");
        assert!(!to.exists(), "part of the outputs is left");
        right.replace("error", "")
    };
    cell.is_odd(false);
    cell.outputs(&job);
    came
}

fn evicted(tally: &mut Tally, _: &Scale) {
    let lane = Lane::new();
    let before_it_starts = |cell: &Cell<'_>, submit: &dyn Fn() -> String| {
        lane.fleet.client.set_eligibility("n0", "cordon").expect("it takes no jobs");
        cell.go_on();
        let job = submit();
        lane.odd.evict();
        lane.fleet.client.set_eligibility("n0", "uncordon").expect("it takes jobs again");
        job
    };
    tally.case("what a client sent comes from the controller, and is written again", || {
        let cell = lane.cell(Oddity::Lacks);
        let job = before_it_starts(&cell, &|| succeeded(cell.submitting()));
        cell.completed(&job);
        cell.outputs(&job);
        assert!(lane.odd.has(cell.text("data.txt").as_bytes()), "the store lacks it still");
    });
    tally.case("what nobody else has is told, and sent by the next submit", || {
        let cell = lane.cell(Oddity::Lacks);
        let job = before_it_starts(&cell, &|| cell.submit());
        let fault = fault(&lane.fleet.client.reached_within(LONG, &job, &TERMINAL));
        assert_eq!((fault.code.as_str(), fault.blame.as_str()), ("SNP-103", "network"), "{fault:?}");
        assert!(fault.fix.contains("submit the job again"), "{fault:?}");
        let again = succeeded(cell.submitting());
        cell.completed(&again);
        cell.outputs(&again);
    });
}
