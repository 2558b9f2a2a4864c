//! The port at which jobs find the daemon, while the daemon is away.

#![allow(clippy::disallowed_methods, reason = "is a neighbour that no daemon starts")]

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use agent_tests::eventually;
use agent_tests::table::{Row, Scale, Tally};

use crate::boundaries::users::{ENDED, GAMES, NOBODY, by, shared, submitted};

pub(crate) const ROWS: &[Row] =
    &[Row { id: "U8", promise: "nobody takes the tracking port while the daemon is away", run: port }];

/// Binds a port in every way there is, and says which went.
const BIND: &str = "
import socket, sys
port = int(sys.argv[1])
for family, host in [(socket.AF_INET, '127.0.0.1'), (socket.AF_INET, '0.0.0.0'), (socket.AF_INET6, '::')]:
    for options in [[], [socket.SO_REUSEADDR], [socket.SO_REUSEPORT], [socket.SO_REUSEADDR, socket.SO_REUSEPORT]]:
        s = socket.socket(family)
        for option in options: s.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            s.bind((host, port)); s.listen(); print('PREY', host, options)
        except OSError: pass
        s.close()
print('tried')
";

fn port(tally: &mut Tally, _: &Scale) {
    let mut host = shared(&[]);
    let job = submitted(&host, GAMES, "echo $MLFLOW_TRACKING_URI; exec sleep 600", "");
    host.wait_for(&job, &["Running"]);
    let remembered = host.state().join("tracking.port");
    let port = fs::read_to_string(&remembered).expect("a port").trim().to_owned();
    let try_it = || {
        let mut command = Command::new("python3");
        command.args(["-c", BIND, &port]).uid(NOBODY).gid(NOBODY).current_dir("/");
        String::from_utf8_lossy(&command.output().expect("python3").stdout).into_owned()
    };
    tally.case("while the daemon is there", || assert_eq!(try_it(), "tried\n"));
    host.kill();
    tally.case("while it is away", || assert_eq!(try_it(), "tried\n"));
    host.start();
    tally.case("it is at its port again", || {
        let listens = || std::net::TcpStream::connect(format!("127.0.0.1:{port}")).ok();
        eventually("the daemon listens there", agent_tests::SOON, listens);
        assert_eq!(fs::read_to_string(&remembered).expect("a port").trim(), port);
        host.wait_for(&job, &["Running"]);
    });
    tally.case("the port is free when no job needs it", || {
        by(&host, GAMES, &["cancel", &job]).ok();
        host.wait_for(&job, ENDED);
        assert_eq!(host.stop(), 0);
        let held = || try_it().contains("PREY").then_some(());
        eventually("the port is free", agent_tests::SOON, held);
    });
}
