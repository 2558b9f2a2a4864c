//! Into a job that runs: `exec` and `forward`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use agent_tests::{Host, SOON, eventually, finish};
use rustix::process::Signal;

/// A job that waits until a file tells it to end.
const JOB: &str = "command: |-\n  touch here; echo $$ > main.pid; until [ -e done ]; do sleep 0.05; done\n\
                   environment: host\nenvironment_variables: {COLOUR: blue}\n";

/// At a terminal of an odd size, types a command and prints what comes back.
const TERMINAL: &str = r#"
import fcntl, os, pty, struct, sys, termios
pid, fd = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 37, 91, 0, 0))
seen, typed = b"", False
while True:
    try:
        some = os.read(fd, 4096)
    except OSError:
        break
    seen += some
    if b"ready>" in seen and not typed:
        typed = True
        os.write(fd, b"stty size; tty; sleep 100\r")
    if typed and b"/dev/pts/" in seen and b"\x03" not in seen:
        os.write(fd, b"\x03")
        os.write(fd, b"exit 7\r")
        seen += b"\x03"
print(seen.decode(errors="replace"))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"#;

fn submit(host: &Host, file: &str) -> String {
    let project = host.project("p", &[("job.yml", file)]);
    let job = host.ctl(&["submit", project.to_str().unwrap()]).ok().stdout.trim().to_owned();
    host.wait_for(&job, &["Running"]);
    eventually("the command begins", SOON, || {
        (host.ctl(&["exec", &job, "--", "test", "-e", "here"]).code == 0).then_some(())
    });
    job
}

/// Starts a session and waits for its first line.
fn begin(host: &Host, arguments: &[&str]) -> (Child, BufReader<std::process::ChildStdout>, String) {
    let mut client = host.client(arguments);
    let mut child =
        client.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut output, mut line) = (BufReader::new(child.stdout.take().unwrap()), String::new());
    if output.read_line(&mut line).unwrap() == 0 {
        panic!("the session did not begin: {:?}", child.wait_with_output());
    }
    (child, output, line.trim().to_owned())
}

fn code(child: &mut Child) -> i32 {
    eventually("the client ends", SOON, || child.try_wait().unwrap()).code().unwrap_or(-1)
}

fn is_there(pid: &str) -> bool {
    std::fs::exists(format!("/proc/{pid}")).unwrap()
}

#[test]
fn test_a_command_has_the_surroundings_of_the_job_and_pipes() {
    let host = Host::started();
    let job = submit(&host, JOB);
    let exec = |words: &[&str]| host.ctl(&[&["exec", &job, "--"], words].concat());
    let ran = exec(&["sh", "-c", "pwd; echo $COLOUR; cat /proc/self/cgroup; echo wrong >&2; exit 7"]).code(7);
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert!(lines[0].contains(&job) && lines[1] == "blue" && ran.stderr == "wrong\n", "{ran:?}");
    let same = exec(&["sh", "-c", "cat /proc/$(cat main.pid)/cgroup; kill -0 $(cat main.pid)"]).ok().stdout;
    assert_eq!(lines[2..].join("\n"), same.trim(), "the same groups, and the command may be signalled");
    exec(&["no-such-program"]).code(127).says("could not start `no-such-program`");
    exec(&["sh", "-c", "kill -9 $$"]).code(137);
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let mut child = host.client(&["exec", &job, "--", "sh", "-c", "tee copy; echo over >&2"]);
    let mut child =
        child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut into, sent) = (child.stdin.take().unwrap(), bytes.clone());
    let writer = std::thread::spawn(move || into.write_all(&sent).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.stdout == bytes && output.stderr == b"over\n", "{} bytes came back", output.stdout.len());
    exec(&["touch", "done"]); // the end of the job may be faster than the answer
    assert_eq!(host.wait_for(&job, &["Completed", "Failed"]), "Completed");
    exec(&["true"]).code(125).says("JOB-109");
}

#[test]
fn test_a_terminal_has_a_size_keys_that_signal_and_an_exit_code() {
    let host = Host::started();
    let job = submit(&host, JOB);
    let client = host.client(&["exec", &job, "--", "env", "PS1=ready>", "sh", "-i"]);
    #[allow(clippy::disallowed_methods, reason = "a terminal for the client")]
    let mut python = Command::new("python3");
    python.arg("-c").arg(TERMINAL).arg(client.get_program()).args(client.get_args()).env("TERM", "xterm");
    python.envs(client.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let ran = finish(&mut python).code(7);
    assert!(ran.stdout.contains("37 91") && ran.stdout.contains("/dev/pts/"), "{ran:?}");
}

#[test]
fn test_nothing_outlives_the_job_its_connection_or_the_daemon_unnoticed() {
    let mut host = Host::started();
    let job = submit(&host, JOB);
    let stubborn = ["exec", &job, "--", "sh", "-c", "trap '' HUP TERM; echo $$; while :; do sleep 1; done"];
    let plain = ["exec", &job, "--", "sh", "-c", "trap 'exit 9' INT; echo $$; while :; do sleep 0.05; done"];

    // A signal to the client is one to the command.
    let (mut client, _output, _) = begin(&host, &plain);
    agent_tests::signal(client.id(), Signal::INT);
    assert_eq!(code(&mut client), 9);

    // A client that is gone takes the command with it.
    let (mut client, _output, pid) = begin(&host, &stubborn);
    client.kill().unwrap();
    client.wait().unwrap();
    eventually("the command of a client that is gone ends", SOON, || (!is_there(&pid)).then_some(()));

    // A daemon that is gone as well, and the client says so; the job goes on.
    let (mut client, _output, pid) = begin(&host, &plain);
    host.kill();
    assert_eq!(code(&mut client), 125);
    let mut said = String::new();
    client.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("the connection into the job was lost"), "{said}");
    eventually("the command of a daemon that is gone ends", SOON, || (!is_there(&pid)).then_some(()));
    host.start();
    host.wait_for(&job, &["Running"]);

    // The end of the job is its end.
    let (mut client, _output, pid) = begin(&host, &stubborn);
    host.ctl(&["exec", &job, "--", "touch", "done"]);
    assert_eq!(host.wait_for(&job, &["Completed", "Failed"]), "Completed");
    eventually("a command ends with its job", SOON, || (!is_there(&pid)).then_some(()));
    assert_eq!(code(&mut client), 125);
}

#[test]
fn test_a_port_of_the_job_is_reached_here() {
    let host = Host::started();
    let serve = "import http.server, os\nopen('here', 'w')\n\
                 s = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n\
                 open('port', 'w').write(str(s.server_port))\ns.serve_forever()\n";
    let project = host.project("p", &[("serve.py", serve), ("big", &"x".repeat(2_000_000))]);
    let file = "command: python3 serve.py\ncode: .\nenvironment: host\n";
    std::fs::write(project.join("job.yml"), file).unwrap();
    let job = submit(&host, file);
    let port = eventually("the server listens", SOON, || {
        let port = host.ctl(&["exec", &job, "--", "cat", "port"]).stdout;
        port.parse::<u16>().ok()
    });
    let (mut client, _output, line) = begin(&host, &["forward", &job, &format!("{port}:0")]);
    let local: u16 = line.split([':', ' ']).nth(1).and_then(|port| port.parse().ok()).expect("a port");
    let get = |path: &str| {
        let mut stream = TcpStream::connect(("127.0.0.1", local)).unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        answer
    };
    let answers: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..4).map(|_| scope.spawn(|| get("/big"))).collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    assert!(answers.iter().all(|answer| answer.starts_with(b"HTTP/1.0 200") && answer.len() > 2_000_000));
    host.ctl(&["cancel", &job]).ok();
    assert_eq!(code(&mut client), 0, "it ends with the job");
}

/// Stands for the real program: serves at a free port of loopback, and says where in the same words.
const BOARD: &str = r#"#!/usr/bin/env python3
import http.server, sys
assert sys.argv[1:] == ["--logdir", "runs", "--host=127.0.0.1", "--port=0"], sys.argv
s = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print(f"TensorBoard 2.14.0 at http://127.0.0.1:{s.server_port}/ (Press CTRL+C to quit)", file=sys.stderr, flush=True)
s.serve_forever()
"#;

#[test]
fn test_a_service_is_started_in_the_job_and_what_cannot_be_is_refused_by_name() {
    let host = Host::started();
    let file = format!(
        "{JOB}code: .\nservices:\n  curves: {{type: tensor_board, log_dir: runs}}\n  code: {{type: vs_code}}\n"
    );
    let file = file.replace("COLOUR: blue", "PATH: './bin:/usr/local/bin:/usr/bin:/bin'");
    let project = host.project("p", &[("bin/tensorboard", BOARD)]);
    std::fs::set_permissions(
        project.join("bin/tensorboard"),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let job = submit(&host, &file);
    let (mut client, _output, address) = begin(&host, &["open", &job, "tensorboard"]);
    let local = address.strip_prefix("http://127.0.0.1:").and_then(|rest| rest.strip_suffix('/'));
    let mut stream = TcpStream::connect(("127.0.0.1", local.unwrap().parse::<u16>().unwrap())).unwrap();
    write!(stream, "GET /main.pid HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
    agent_tests::signal(client.id(), Signal::INT);
    assert_eq!(code(&mut client), 0);
    host.ctl(&["open", &job, "code"]).code(1).says("`vs_code` needs a server of its vendor");
    host.ctl(&["open", &job, "jupyter_lab"]).code(1).says("add jupyter to the job's environment");
    host.ctl(&["open", &job, "flask"]).code(1).says("there are: code, curves");
}
