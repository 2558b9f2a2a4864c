//! What a submission costs a user whose controller is 20 ms away.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use agent_tests::fleet::Daemon;
use agent_tests::trips::{FarServer, Pace};
use agent_tests::{SOON, binaries, eventually, finish};

use super::row;
use crate::measure::{Series, time};

const ROUND: Duration = Duration::from_millis(20);

/// How long a file must be unchanged until its hash is remembered.
const SETTLES: Duration = Duration::from_secs(62);

#[allow(clippy::disallowed_methods, reason = "runs what it measures")]
fn ctl(home: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(binaries().join("agentctl"));
    command.args(words).env("HOME", home).env("XDG_CACHE_HOME", home.join("cache")).stdin(Stdio::null());
    command.env_remove("XDG_CONFIG_HOME").env_remove("AGENTCTL_CONTEXT").env_remove("AGENTD_SOCKET");
    command
}

pub(crate) fn all() {
    let base = tempfile::tempdir().expect("a directory");
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
    let config = format!("roles: controller\nlisten: 127.0.0.1:{port}\ndisk_reserve: 64MiB\n");
    let mut controller = Daemon::new(base.path().join("c"), config);
    controller.spawn();
    let socket = controller.socket().display().to_string();
    let operator = |words: &[&str]| finish(&mut ctl(base.path(), &[&["--socket", &socket], words].concat()));
    eventually("the controller answers", SOON, || (operator(&["nodes"]).code == 0).then_some(()));
    let code =
        operator(&["user", "add", "ada", "--json"]).ok().json()["token"].as_str().expect("a code").to_owned();
    let far = FarServer::new(([127, 0, 0, 1], port).into());
    let (home, file) = (base.path().join("ada"), base.path().join("code"));
    fs::create_dir(&home).and_then(|()| fs::write(&file, code)).expect("its own directory");
    let mut login = ctl(&home, &["login", &format!("https://127.0.0.1:{}", far.port()), "--context", "lab"]);
    finish(login.stdin(File::open(file).expect("a code"))).ok();

    let project = base.path().join("many");
    for index in 0..20_000 {
        let dir = project.join(format!("d{:03}/e{:02}", index % 200, index % 7));
        fs::create_dir_all(&dir).expect("a directory");
        let text = format!("file {index}\n").repeat(1 + index % 40);
        fs::write(dir.join(format!("f{index}.txt")), text).expect("a file");
    }
    let submit = || ctl(&home, &["submit", project.to_str().expect("UTF-8"), "--", "true"]);
    time(submit());
    std::thread::sleep(SETTLES);
    time(submit());
    let change = |round: u32| {
        fs::write(project.join("d000/e00/f0.txt"), format!("changed {round}\n")).expect("a file");
    };
    far.set(Pace::Steps);
    change(100);
    time(submit());
    let report = far.report();
    let (mut late, mut free) = (Series::default(), Series::default());
    for round in 0..7 {
        for (pace, series) in [(Pace::Late(ROUND), &mut late), (Pace::Free, &mut free)] {
            far.set(pace);
            change(2 * round + u32::from(pace == Pace::Free));
            series.push(time(submit()));
        }
    }
    println!("{:<46} {:>10} {:>10} {:>7}", "measure", "ours", "other", "ratio");
    row("1 of 20,000 files changed: 20 ms away / near", &late, &free);
    println!("{:<46} {:>7} round trips, {} kB sent", "  that is", report.trips, report.sent.div_ceil(1000));
    controller.kill();
}
