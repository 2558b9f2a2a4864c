//! The job of the fault suite: it leaves traces that tell afterwards what really happened.
//!
//! ```text
//! fix [--lines N] [--width BYTES] [--rate LINES_PER_SECOND] [--seconds S] [--witness FILE] [--exit CODE]
//!     [--until FILE] [--fork N] [--leave N] [--allocate MIB] [--probe PATH]...
//! ```
//!
//! It writes numbered lines with a tag, spread over its seconds or at its rate, and a beat into the witness
//! file ten times a second. With `--until` it lives until the file exists and then writes the lines that are
//! left. `--fork` starts children that live as long as it does, `--leave` such that leave
//! its session and outlive it for a minute, `--allocate` touches so much memory, `--probe` says whether a
//! path can be read. What ignores signals is left to the shell, whose ignored signals are inherited:
//! `trap '' TERM; exec fix ...`.

#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::exit,
    reason = "this is a job, not the product"
)]

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use agent_tests::witness;

#[derive(Debug, Default, Clone)]
struct Wishes {
    lines: u64,
    width: usize,
    rate: u64,
    life: Duration,
    witness: Option<String>,
    until: Option<String>,
    exit: u8,
    fork: u32,
    leave: u32,
    allocate: usize,
    probes: Vec<String>,
    /// A child: it has no voice.
    silent: bool,
}

fn main() -> ExitCode {
    match wishes().and_then(|wishes| live(&wishes)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            println!("fix: {error}");
            ExitCode::from(99)
        }
    }
}

fn wishes() -> io::Result<Wishes> {
    let mut wishes = Wishes { width: 60, ..Wishes::default() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| io::Error::other(format!("{word} needs a value")));
        let number = |text: String| text.parse::<u64>().map_err(io::Error::other);
        match word.as_str() {
            "--lines" => wishes.lines = number(value()?)?,
            "--width" => wishes.width = value()?.parse().map_err(io::Error::other)?,
            "--rate" => wishes.rate = number(value()?)?,
            "--seconds" => wishes.life = Duration::from_secs_f64(value()?.parse().map_err(io::Error::other)?),
            "--witness" => wishes.witness = Some(value()?),
            "--until" => wishes.until = Some(value()?),
            "--exit" => wishes.exit = value()?.parse().map_err(io::Error::other)?,
            "--fork" => wishes.fork = value()?.parse().map_err(io::Error::other)?,
            "--leave" => wishes.leave = value()?.parse().map_err(io::Error::other)?,
            "--allocate" => wishes.allocate = value()?.parse().map_err(io::Error::other)?,
            "--probe" => wishes.probes.push(value()?),
            "--silent" => wishes.silent = true,
            other => return Err(io::Error::other(format!("what is `{other}`?"))),
        }
    }
    Ok(wishes)
}

fn live(wishes: &Wishes) -> io::Result<u8> {
    if wishes.silent {
        rustix::process::setsid().map_err(io::Error::from)?;
        std::thread::sleep(wishes.life);
        return Ok(0);
    }
    let mut witness = Beacon::open(wishes.witness.as_deref())?;
    witness.say("exec")?;
    let _children: Vec<_> =
        (0..wishes.fork).map(|_| Child::start(wishes.life, false)).collect::<Result<_, _>>()?;
    for _ in 0..wishes.leave {
        std::mem::forget(Child::start(Duration::from_secs(60), true)?);
    }
    let memory = vec![1_u8; wishes.allocate << 20]; // all of it is touched
    for path in &wishes.probes {
        println!("probe {path}: {}", if File::open(path).is_ok() { "readable" } else { "refused" });
    }
    speak(wishes, &mut witness)?;
    witness.say("end")?;
    drop(memory);
    Ok(wishes.exit)
}

/// Writes the lines, in time, and the beats between them.
fn speak(wishes: &Wishes, witness: &mut Beacon) -> io::Result<()> {
    const STEP: Duration = Duration::from_millis(10);
    const BEAT: Duration = Duration::from_millis(100);
    let (begin, mut beat) = (Instant::now(), Instant::now());
    let life = match wishes.rate {
        0 => wishes.life,
        rate => Duration::from_secs_f64(wishes.lines as f64 / rate as f64).max(wishes.life),
    };
    let (mut out, mut next) = (io::BufWriter::new(io::stdout()), 0);
    loop {
        let past = begin.elapsed();
        let over = match &wishes.until {
            Some(file) => std::fs::exists(file)?,
            None => past >= life,
        };
        let due = match wishes.rate {
            _ if over => wishes.lines,
            0 if life.is_zero() => 0,
            0 => ((wishes.lines as f64 * past.as_secs_f64() / life.as_secs_f64()) as u64).min(wishes.lines),
            rate => ((rate as f64 * past.as_secs_f64()) as u64).min(wishes.lines),
        };
        for number in next..due {
            out.write_all(witness::line(number, wishes.width).as_bytes())?;
        }
        next = next.max(due);
        out.flush()?;
        if over {
            return Ok(());
        }
        if beat.elapsed() >= BEAT {
            beat = Instant::now();
            witness.say("beat")?;
        }
        std::thread::sleep(STEP);
    }
}

/// Another process of the job, which ends with this one unless it left.
struct Child(std::process::Child);

impl Child {
    fn start(life: Duration, leaves: bool) -> io::Result<Child> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([
            "--seconds",
            &life.as_secs_f64().to_string(),
            if leaves { "--silent" } else { "--exit" },
        ]);
        if !leaves {
            command.arg("0");
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(Child)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The pen for the witness file.
struct Beacon {
    file: Option<File>,
    who: String,
}

impl Beacon {
    fn open(path: Option<&str>) -> io::Result<Beacon> {
        let open = |path| OpenOptions::new().append(true).create(true).open(path);
        let replica = std::env::var("AGENTD_REPLICA").unwrap_or_default();
        let mut parts = replica.rsplitn(3, '.');
        let (_rank, epoch, job) = (parts.next(), parts.next().unwrap_or("0"), parts.next().unwrap_or("none"));
        let who = format!("{job} {epoch} {}", std::process::id());
        Ok(Beacon { file: path.map(open).transpose()?, who })
    }

    fn say(&mut self, kind: &str) -> io::Result<()> {
        match &mut self.file {
            Some(file) => file.write_all(format!("{kind} {} {}\n", self.who, witness::boottime()).as_bytes()),
            None => Ok(()),
        }
    }
}
