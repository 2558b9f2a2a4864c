//! Group B: logs and metrics arrive whole, are harmless to look at, and cost the job nothing.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use agent_model::JobDraft;
use agent_proto::v1;
use agent_proto::v1::telemetry_client::TelemetryClient;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::link::{Link, Way};
use agent_tests::{SOON, binaries, eventually, resident};

use crate::faults::judge::whole;
use crate::faults::look::{PYTHON, command, panics};
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this group. B5 is not taken: there is no GPU code that could hang. B7 is not taken: there are
/// no secrets yet that could be masked.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "B1",
        promise: "every line of a log arrives once and in order, whatever breaks",
        run: complete,
    },
    Row { id: "B2", promise: "a job does not wait for whoever reads its output", run: slow_reader },
    Row { id: "B3", promise: "what a job writes is kept as it is and harms nobody who looks", run: hostile },
    Row {
        id: "B4",
        promise: "who follows a log sees each byte once, however often the connection breaks",
        run: follow,
    },
    Row { id: "B6", promise: "every point of a metric arrives once, whatever breaks", run: metrics },
];

/// A client command of the product.
fn ctl(socket: &Path, arguments: &[&str]) -> Command {
    let mut ctl = command(binaries().join("agentctl"));
    ctl.arg("--socket").arg(socket).args(arguments).env("NO_COLOR", "1");
    ctl
}

/// Breaks what there is to break for as long as `goes_on` says so; how often something was.
fn torment(fleet: &mut Fleet, scale: &Scale, goes_on: impl Fn(&Fleet) -> bool) -> u32 {
    let (mut chance, mut broken) = (scale.chance(), 0);
    while goes_on(fleet) {
        std::thread::sleep(chance.millis(0, 600));
        broken += 1;
        match chance.below(8) {
            0 | 1 => fleet.nodes[0].bounce(),
            2 => fleet.controller.bounce(),
            3 => {
                fleet.links[0].cut(*chance.pick(&[Way::Up, Way::Down, Way::Both]));
                std::thread::sleep(chance.millis(100, scale.of(2000, 60_000)));
                fleet.links[0].heal();
            }
            4 => {
                fleet.nodes[0].kill();
                fleet.controller.bounce();
                fleet.nodes[0].spawn();
            }
            _ => fleet.links[0].break_all(),
        }
    }
    broken
}

fn complete(tally: &mut Tally, scale: &Scale) {
    let mut fleet = Fleet::of(1);
    let (lines, rate) = scale.of((120_000, 10_000), (10_000_000, 50_000));
    let job = fleet.submit(&format!("--lines {lines} --rate {rate}"));
    fleet.client.reached(&job, &["Running"]);
    let begun = Instant::now();
    let broken = torment(&mut fleet, scale, |_| begun.elapsed() < Duration::from_secs(lines / rate));
    tally.note(format!("{lines} lines at {rate} a second; {broken} kills, cuts and broken connections"));
    tally.case("every line, once, in order", || whole(&fleet, &job, lines));
}

/// Points with a name, a step and a value of their own, as a set.
fn points(fleet: &Fleet, job: &str) -> BTreeMap<(String, i64), Vec<f64>> {
    let read = || {
        let request = v1::ReadTrackingRequest { job: job.to_owned(), ..v1::ReadTrackingRequest::default() };
        fleet.client.wait(async {
            let mut chunks =
                TelemetryClient::new(fleet.client.channel()).read_tracking(request).await?.into_inner();
            let mut text = Vec::new();
            while let Some(chunk) = chunks.message().await? {
                text.extend(chunk.lines);
            }
            Ok(text)
        })
    };
    let text = eventually("the points are read", SOON, || read().ok());
    let mut points: BTreeMap<(String, i64), Vec<f64>> = BTreeMap::new();
    for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let point: serde_json::Value = serde_json::from_slice(line).expect("each line is a record");
        let name = point["metric"].as_str().expect("a name").to_owned();
        let step = point["step"].as_i64().expect("a step");
        points.entry((name, step)).or_default().push(point["value"].as_f64().expect("a value"));
    }
    points
}

const POINTS: &str = r#"
import os, sys, time
count, seconds = int(sys.argv[1]), float(sys.argv[2])
with open(os.environ["AGENTD_METRICS"], "a", buffering=1) as metrics:
    for step in range(count):
        metrics.write('{"metric": "m%d", "value": %d, "step": %d}\n' % (step % 7, step * 3, step))
        if step % 200 == 0:
            time.sleep(seconds * 200 / count)
"#;

fn metrics(tally: &mut Tally, scale: &Scale) {
    let mut fleet = Fleet::of(1);
    let (count, seconds) = scale.of((20_000, 6), (1_000_000, 300));
    let mut draft =
        JobDraft { command: format!("exec {PYTHON} -c \"$S\" {count} {seconds}"), ..JobDraft::default() };
    draft.environment_variables.insert("S".into(), POINTS.into());
    let job = fleet.client.submit(&draft);
    fleet.client.reached(&job, &["Running"]);
    let begun = Instant::now();
    let broken = torment(&mut fleet, scale, |_| begun.elapsed() < Duration::from_secs(seconds));
    let ended = fleet.client.ended(&job);
    let points = points(&fleet, &job);
    let wrong: Vec<String> = (0..count)
        .filter_map(|step| {
            let found = points.get(&(format!("m{}", step % 7), step));
            #[allow(clippy::float_cmp, clippy::cast_precision_loss, reason = "whole numbers, far below 2^53")]
            let right = found.is_some_and(|values| *values == [(step * 3) as f64]);
            (!right).then(|| format!("step {step} has the values {found:?}"))
        })
        .collect();
    tally.case("the job ends well", || assert_eq!(ended.state, "Completed"));
    tally.count(u32::try_from(count).unwrap_or(u32::MAX), "points differ", &wrong);
    tally.case("no point nobody wrote", || assert_eq!(points.len() as i64, count));
    tally.note(format!("{count} points; {broken} kills, cuts and broken connections"));
}

fn follow(tally: &mut Tally, scale: &Scale) {
    let fleet = Fleet::one_box();
    let link = Link::new(&fleet.home().join("follower"), &fleet.controller.socket());
    let (kills, lines) = scale.of((80, 40_000), (500, 300_000));
    let job = fleet.submit(&format!("--lines {lines} --rate {}", scale.of(8000, 15_000)));
    fleet.client.reached(&job, &["Running"]);
    let seen = fleet.home().join("seen");
    let file = fs::File::create(&seen).expect("a file");
    let mut follower = ctl(link.socket(), &["logs", "-f", &job])
        .stdout(file)
        .stderr(Stdio::null())
        .spawn()
        .expect("agentctl");
    let mut chance = scale.chance();
    let mut broken = 0;
    for _ in 0..kills {
        std::thread::sleep(chance.millis(1, 80));
        if follower.try_wait().expect("its own child").is_some() {
            break;
        }
        link.break_all();
        broken += 1;
    }
    whole(&fleet, &job, lines);
    let ended = eventually("the follower ends", SOON, || follower.try_wait().expect("its own child"));
    tally.case("the follower saw every byte once", || {
        assert!(ended.success(), "it ended with {ended}");
        let (seen, stored) = (fs::read(&seen).expect("what it saw"), fleet.client.log(&job, "job"));
        let same = seen.iter().zip(&stored).take_while(|(one, other)| one == other).count();
        assert!(
            seen == stored,
            "{} bytes were seen and {} are stored; they differ at {same}",
            seen.len(),
            stored.len()
        );
    });
    tally.count(broken, "", &[]);
    tally.note(format!("{broken} broken connections over {lines} lines"));
}

/// A reader that takes nothing at all while the job writes as fast as it can.
fn slow_reader(tally: &mut Tally, scale: &Scale) {
    let fleet = Fleet::of(1);
    let mebibytes = scale.of(96, 2000);
    let write =
        format!("yes 'a line of some length, which is written again and again' | head -c {mebibytes}M");
    // What the machine is able to, with nobody slow in the way.
    let alone = {
        let begun = Instant::now();
        let job = fleet.client.run(&format!("{write} > /dev/null; {write}"));
        assert_eq!(fleet.client.ended(&job).state, "Completed");
        begun.elapsed()
    };
    let job = fleet.client.run(&format!("sleep 1; {write}; touch outputs/written"));
    fleet.client.reached(&job, &["Running"]);
    fleet.links[0].cut(Way::Both);
    let (mut agent, mut shim, begun) = (0, 0, Instant::now());
    let written = |dir: &PathBuf| dir.join("exit.json").exists();
    tally.case("the job ends although nobody takes its output", || {
        eventually("the job ends", SOON, || {
            agent = agent.max(resident(fleet.nodes[0].pid()));
            fleet.nodes[0].shims().iter().for_each(|(_, pid)| shim = shim.max(resident(*pid)));
            let dirs = fleet.nodes[0].job_dirs();
            let of_job = dirs
                .iter()
                .filter(|dir| dir.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&job)));
            of_job.into_iter().any(written).then_some(())
        });
    });
    let took = begun.elapsed();
    std::thread::sleep(Duration::from_secs(scale.of(2, 30)));
    agent = agent.max(resident(fleet.nodes[0].pid()));
    tally.case("memory of the daemon is bounded", || assert!(agent <= 96 << 20, "{} MiB", agent >> 20));
    tally.case("memory of the supervisor is bounded", || assert!(shim <= 12 << 20, "{} KiB", shim >> 10));
    fleet.links[0].heal();
    tally.case("all of it arrives in the end", || {
        assert_eq!(
            fleet.client.reached_within(Duration::from_secs(300), &job, &["Completed"]).state,
            "Completed"
        );
        let shown = ctl(&fleet.controller.socket(), &["logs", &job]).stdout(Stdio::piped()).spawn();
        let mut output = shown.expect("agentctl").stdout.take().expect("a pipe");
        let (mut length, mut buffer) = (0, vec![0; 1 << 20]);
        loop {
            match output.read(&mut buffer).expect("the log") {
                0 => break,
                count => length += count as u64,
            }
        }
        assert_eq!(length, mebibytes << 20, "the stored log has another length");
    });
    tally.note(format!(
        "{mebibytes} MiB with nobody reading: {:.1} s (twice as much with a reader: {:.1} s); daemon {} MiB, supervisor {} KiB",
        took.as_secs_f64(),
        alone.as_secs_f64(),
        agent >> 20,
        shim >> 10
    ));
}

/// Bytes that mean something to terminals, to readers of lines and to those who think that bytes are text.
fn corpus() -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..=255).collect();
    for sequence in [
        &b"\x1b]0;title\x07\n"[..],
        b"\x1b]52;c;cm0gLXJmIC8=\x07\n",
        b"\x1b]8;;http://example.com\x1b\\here\x1b]8;;\x1b\\\n",
        b"\x1b[6n\x1b[c\x1b[2J\x1b[1;1Hover\x1b[?1049h\n",
        b"\x1bP$q\"p\x1b\\\x1b_hidden\x1b\\\x1b^x\x1b\\\x1bX\x1b\\\n",
        b"\x9b31m\x9d0;title\x9c\x90\x98\n",
        "\u{9b}31m\u{9d}0;title\u{9c}\u{90}\n".as_bytes(),
        "\u{202e}txt.exe\u{2066}a\u{2069}\u{200f}\u{061c}\u{202a}\u{202b}\u{202d}\u{2067}\u{2068}\u{200e}\n"
            .as_bytes(),
        b"real line\rfake line\n",
        b"::set-output name=x::y\n::error::z\n##[command]x\n",
        b"\x1b[31mred\n",
        b"\xe6\xbc\n\xf0\x9f\x99\n\xc0\xaf\xff\xfe\n",
        b"no end of line",
    ] {
        bytes.extend_from_slice(sequence);
    }
    bytes
}

/// What a terminal must not be sent: everything but text, its ends of line, and colours.
fn commands(shown: &[u8]) -> Vec<String> {
    let mut found = Vec::new();
    let mut tell = |at: usize, what: String| {
        let around = &shown[at.saturating_sub(20)..shown.len().min(at + 20)];
        found.push(format!("{what} at {at}: {}", around.escape_ascii()));
    };
    let text = String::from_utf8_lossy(shown);
    if let std::borrow::Cow::Owned(_) = text {
        tell(0, "bytes that are no text".into());
    }
    for (at, c) in text.char_indices() {
        let colour = || {
            let rest = text[at + 1..].strip_prefix('[').unwrap_or("x");
            rest.trim_start_matches(|c: char| c.is_ascii_digit() || ";:".contains(c)).starts_with('m')
        };
        match c {
            '\n' | '\r' | '\t' => {}
            '\x1b' if colour() => {}
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                tell(at, format!("direction mark {}", c.escape_unicode()));
            }
            c if c.is_control() => tell(at, format!("control character {}", c.escape_unicode())),
            _ => {}
        }
    }
    found
}

/// Runs a client command on a terminal; what the terminal was sent.
fn on_a_terminal(socket: &Path, arguments: &[&str]) -> Vec<u8> {
    const SPAWN: &str = "
import os, pty, sys
def read(fd):
    data = os.read(fd, 65536)
    return data
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:], read)))
";
    let mut spawn = command(PYTHON);
    spawn.arg("-c").arg(SPAWN).arg(binaries().join("agentctl")).arg("--socket").arg(socket).args(arguments);
    spawn.env("TERM", "xterm-256color").stderr(Stdio::inherit());
    spawn.output().expect("Python starts").stdout
}

fn hostile(tally: &mut Tally, scale: &Scale) {
    let fleet = Fleet::one_box();
    let socket = fleet.controller.socket();
    let bytes = corpus();
    let file = fleet.home().join("corpus");
    fs::write(&file, &bytes).expect("a file");

    let mut draft = JobDraft { command: format!("cat {}; exit 3", file.display()), ..JobDraft::default() };
    draft.display_name = "a\u{1b}]0;title\u{7}\u{202e}b".into();
    draft.description = "\u{1b}[2J\u{9b}6n".into();
    draft.tags.insert("\u{1b}[2Jk".into(), "\u{1b}]52;c;eA==\u{7}".into());
    draft.environment_variables.insert("V".into(), "\u{1b}[2J".into());
    let metric = r#"printf '{"metric":"\\u001b[2Jm\\u202e","value":1}\n{"param":"\\u001b]0;t\\u0007","text":"\\u009b"}\n' >> $AGENTD_METRICS; "#;
    draft.command.insert_str(0, metric);
    let job = fleet.client.submit(&draft);
    fleet.client.ended(&job);
    tally.case("stored as it was written", || {
        assert!(fleet.client.log(&job, "job") == bytes, "the stored bytes differ");
        let shown = ctl(&socket, &["logs", &job]).output().expect("agentctl").stdout;
        assert!(shown == bytes, "a pipe gets other bytes");
    });
    for verb in [&["logs"][..], &["logs", "-f"], &["logs", "-n", "3"], &["show"], &["why"], &["metrics"]] {
        tally.case(&format!("agentctl {} on a terminal", verb.join(" ")), || {
            let shown = on_a_terminal(&socket, &[verb, &[job.as_str()]].concat());
            assert!(!shown.is_empty(), "nothing was shown");
            assert_eq!(commands(&shown), Vec::<String>::new());
        });
    }
    for verb in ["jobs", "status", "nodes"] {
        tally.case(&format!("agentctl {verb} on a terminal"), || {
            assert_eq!(commands(&on_a_terminal(&socket, &[verb])), Vec::<String>::new());
        });
    }
    tally.case("the daemon's own log", || {
        assert_eq!(commands(fleet.controller.log().as_bytes()), Vec::<String>::new())
    });
    long_line(tally, &fleet, scale);
    swaps(tally);
}

/// One line that is longer than anybody's memory should be.
fn long_line(tally: &mut Tally, fleet: &Fleet, scale: &Scale) {
    let mebibytes: u64 = scale.of(48, 1024);
    let job = fleet.client.run(&format!("head -c {mebibytes}M /dev/zero | tr '\\0' y"));
    let mut most = 0;
    tally.case("a line without an end", || {
        eventually("the job ends", Duration::from_secs(300), || {
            most = most.max(resident(fleet.controller.pid()));
            (fleet.client.job(&job).state == "Completed").then_some(())
        });
        let mut shown = ctl(&fleet.controller.socket(), &["logs", &job])
            .stdout(Stdio::piped())
            .spawn()
            .expect("agentctl");
        let (mut output, mut buffer, mut length) =
            (shown.stdout.take().expect("a pipe"), vec![0; 1 << 20], 0);
        loop {
            let count = output.read(&mut buffer).expect("the log");
            assert!(buffer[..count].iter().all(|byte| *byte == b'y'), "other bytes");
            length += count as u64;
            if count == 0 {
                break;
            }
        }
        assert!(shown.wait().expect("its own child").success());
        assert_eq!(length, mebibytes << 20);
        assert!(most <= 128 << 20, "the daemon took {} MiB", most >> 20);
    });
    tally.note(format!("a line of {mebibytes} MiB: the daemon took at most {} MiB", most >> 20));
}

/// What a job may do to the paths around it, from its working directory; `OUTSIDE` is not its business.
const SWAPS: &[(&str, &str)] = &[
    ("outputs become a link to a directory outside", "rm -rf outputs; ln -s OUTSIDE outputs"),
    ("a link to a file outside in the outputs", "ln -s OUTSIDE/kept outputs/x; ln -s OUTSIDE outputs/d"),
    (
        "a FIFO, a socket and a device in the outputs",
        "mkfifo outputs/f; mknod outputs/n c 1 5 2>/dev/null; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('outputs/s')\"; echo fine > outputs/fine",
    ),
    (
        "the metrics become a link to a file outside",
        "rm -f $AGENTD_METRICS; ln -s OUTSIDE/kept $AGENTD_METRICS",
    ),
    ("the metrics become a FIFO", "rm -f $AGENTD_METRICS; mkfifo $AGENTD_METRICS"),
    ("the metrics become a directory", "rm -f $AGENTD_METRICS; mkdir $AGENTD_METRICS"),
    ("the working directory becomes a link", "cd ..; mv work gone; ln -s OUTSIDE work"),
    ("the directory of the outputs becomes a link", "cd ..; mv out gone-out; ln -s OUTSIDE out"),
    ("the directory of artifacts becomes a FIFO", "cd ..; rm -rf artifacts; mkfifo artifacts"),
    ("the log becomes a FIFO", "cd ..; rm -rf log/job*; mkfifo log/job"),
    ("the directory of logs becomes a link", "cd ..; mv log gone-log; ln -s OUTSIDE log"),
    (
        "links back and forth while the outputs are stored",
        "(trap '' TERM; i=0; while [ $i -lt 300 ]; do rm -rf outputs/d; ln -s OUTSIDE outputs/d; rm -f outputs/d; mkdir outputs/d; echo x > outputs/d/kept; i=$((i+1)); done) & sleep 0.3",
    ),
];

/// The job swaps everything it can write; nothing outside is read, written or removed, and nobody hangs.
fn swaps(tally: &mut Tally) {
    const KEPT: &str = "kept: nobody of you may read this";
    let mut fleet = Fleet::started(&Setup {
        slots: SWAPS.len(),
        controller: "keep_jobs: 0s\n".into(),
        ..Setup::default()
    });
    let home = fleet.home().to_owned();
    let outside = |index: usize| home.join(format!("outside-{index}"));
    let jobs: Vec<String> = SWAPS
        .iter()
        .enumerate()
        .map(|(index, (_, swap))| {
            let outside = outside(index);
            fs::create_dir(&outside).expect("a directory");
            fs::write(outside.join("kept"), KEPT).expect("a file");
            let swap = swap.replace("OUTSIDE", &outside.display().to_string());
            let mut draft = JobDraft {
                command: format!("mkdir -p outputs; echo begun; {swap}; exit 0"),
                ..JobDraft::default()
            };
            draft.limits.grace = Some(Duration::from_secs(1));
            fleet.client.submit(&draft)
        })
        .collect();
    for (index, (name, _)) in SWAPS.iter().enumerate() {
        tally.case(name, || {
            fleet.client.ended(&jobs[index]);
            let listed: Vec<PathBuf> = fs::read_dir(outside(index))
                .expect("it is there")
                .flatten()
                .map(|entry| entry.path())
                .collect();
            assert_eq!(listed, [outside(index).join("kept")], "something came, or went");
            assert_eq!(fs::read_to_string(outside(index).join("kept")).expect("it is there"), KEPT);
            let to = fleet.home().join(format!("got-{index}"));
            let _ =
                ctl(&fleet.controller.socket(), &["download", &jobs[index], "-o", &to.display().to_string()])
                    .output();
            let brought = crate::faults::look::files_below(&to)
                .into_iter()
                .filter(|path| fs::read(path).is_ok_and(|b| b == KEPT.as_bytes()));
            // Outputs that are a link are those of the directory behind it, if the job's owner may read that.
            let behind = usize::from(index == 0);
            assert_eq!(brought.count(), behind, "a file from outside was stored");
        });
    }
    tally.case("no directory outside is removed, and the daemon lives", || {
        std::thread::sleep(Duration::from_secs(1)); // directories of jobs are being removed
        assert!((0..SWAPS.len()).all(|index| outside(index).join("kept").exists()));
        assert_eq!(fleet.controller.ended(), None);
        assert_eq!(panics(&fleet.controller), Vec::<String>::new());
    });
}
