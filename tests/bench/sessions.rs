//! What it costs to work in a job through a session, against a plain pipe: bytes in both directions, a key and its echo,
//! and the start of a command.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use agent_tests::{Host, SOON, eventually};

use crate::measure::{Series, time};
use crate::{other, row};

/// Of a stream, in MB.
const MEGABYTES: usize = 200;
/// Keys in a round.
const KEYS: usize = 200;

pub(crate) fn all() {
    println!("{:<46} {:>10} {:>10} {:>7}", "measure", "ours", "other", "ratio");
    let host = Host::started();
    let job = host.submit("sleep 3600");
    host.wait_for(&job, &["Running"]);
    let exec = |command: &[&str]| host.client(&[&["exec", &job, "--"], command].concat());
    starts(&exec);
    streams(&exec);
    keys(&exec);
    ports(&host, &job);
    host.ctl(&["cancel", &job]).ok();
}

fn starts(exec: &impl Fn(&[&str]) -> Command) {
    let (mut ours, mut bare) = (Series::default(), Series::default());
    for _ in 0..15 {
        bare.push(time(other("sh", &["-c", "true"])));
        ours.push(time(exec(&["true"])));
    }
    row("exec of `true` / sh -c true", &ours, &bare);
}

fn streams(exec: &impl Fn(&[&str]) -> Command) {
    let blocks = format!("count={MEGABYTES}");
    let dd = ["dd", "if=/dev/zero", "bs=1000000", &blocks, "status=none"];
    let (mut ours, mut bare) = (Series::default(), Series::default());
    for _ in 0..3 {
        bare.push(time(other("sh", &["-c", &format!("{} | cat", dd.join(" "))])));
        ours.push(time(exec(&dd)));
    }
    row(&format!("{MEGABYTES} MB out of a job / pipe"), &ours, &bare);
    println!("{:<46} {:>7.0} MB/s", "  that is", MEGABYTES as f64 / ours.median().as_secs_f64());
}

/// A byte there and back.
fn echo(mut into: impl Write, mut from: impl Read) -> Series {
    let mut series = Series::default();
    for _ in 0..KEYS {
        let start = Instant::now();
        into.write_all(b"k").and_then(|()| into.flush()).expect("a key");
        from.read_exact(&mut [0]).expect("its echo");
        series.push(start.elapsed());
    }
    series
}

fn keys(exec: &impl Fn(&[&str]) -> Command) {
    let echo_of = |mut command: Command| {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the command starts");
        let (into, from) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let series = echo(into, from);
        child.wait().expect("it ends with its input");
        series
    };
    let bare = echo_of(other("cat", &[]));
    let ours = echo_of(exec(&["cat"]));
    row("a key and its echo / cat", &ours, &bare);
}

/// A server of this process that sends back what it gets: the job shares its loopback.
fn ports(host: &Host, job: &str) {
    let server = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = server.local_addr().expect("it has one").port();
    thread::spawn(move || {
        for stream in server.incoming().flatten() {
            thread::spawn(move || {
                let _ = std::io::copy(&mut &stream, &mut &stream); // until the other side has enough
            });
        }
    });
    let free = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
    let mut forward = host.client(&["forward", job, &format!("{port}:{free}")]);
    let mut forward = forward.stdout(Stdio::null()).spawn().expect("the client starts");
    let connect = |port: u16| {
        let stream = eventually("the port is there", SOON, || TcpStream::connect(("127.0.0.1", port)).ok());
        stream.set_nodelay(true).expect("a setting");
        stream
    };
    let (bare, ours) = (connect(port), connect(free));
    row("a byte there and back, forwarded / loopback", &echo(&ours, &ours), &echo(&bare, &bare));
    let (mut series, mut direct) = (Series::default(), Series::default());
    for _ in 0..3 {
        direct.push(round_trip(&bare));
        series.push(round_trip(&ours));
    }
    row(&format!("{MEGABYTES} MB there and back, forwarded / loopback"), &series, &direct);
    println!("{:<46} {:>7.0} MB/s", "  that is", MEGABYTES as f64 / series.median().as_secs_f64());
    forward.kill().and_then(|()| forward.wait()).expect("its own child");
}

fn round_trip(stream: &TcpStream) -> std::time::Duration {
    let start = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            let piece = vec![7; 1_000_000];
            (0..MEGABYTES).for_each(|_| (&mut &*stream).write_all(&piece).expect("it takes them"));
        });
        let mut piece = vec![0; 1_000_000];
        (0..MEGABYTES).for_each(|_| (&mut &*stream).read_exact(&mut piece).expect("they come back"));
    });
    start.elapsed()
}
