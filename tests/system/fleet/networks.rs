//! What is between a node and its controller: a proxy, and a connection that swallows everything.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use agent_tests::{SOON, eventually, finish};

use super::Site;

/// Passes bytes on, both ways, until it is told to swallow them.
fn carry(near: &TcpStream, far: &TcpStream, swallow: &Arc<AtomicBool>) {
    for (mut from, mut to) in
        [(near, far), (far, near)].map(|(a, b)| (a.try_clone().unwrap(), b.try_clone().unwrap()))
    {
        let swallow = swallow.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 16 * 1024];
            while let Ok(read @ 1..) = from.read(&mut buffer) {
                if !swallow.load(Ordering::SeqCst) && to.write_all(&buffer[..read]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(std::net::Shutdown::Both);
        });
    }
}

#[test]
fn test_a_node_and_a_user_come_through_a_proxy() {
    let mut site = Site::new();
    let (proxy, tunnels) = (TcpListener::bind("127.0.0.1:0").unwrap(), Arc::new(AtomicUsize::new(0)));
    let at = format!("http://ada:hunter2@{}", proxy.local_addr().unwrap());
    let (port, count) = (site.port, tunnels.clone());
    std::thread::spawn(move || {
        for near in proxy.incoming().flatten() {
            let mut asked = Vec::new();
            while !asked.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                if (&near).read_exact(&mut byte).is_err() {
                    break;
                }
                asked.push(byte[0]);
            }
            let asked = String::from_utf8_lossy(&asked).into_owned();
            // The proxy knows the name, which nobody else here does, and its user.
            let known = asked.starts_with(&format!("CONNECT controller.test:{port} "));
            if !known || !asked.contains("Basic YWRhOmh1bnRlcjI=") {
                let _ = (&near).write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n");
                continue;
            }
            count.fetch_add(1, Ordering::SeqCst);
            let far = TcpStream::connect(("127.0.0.1", port)).unwrap();
            (&near).write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").unwrap();
            carry(&near, &far, &Arc::default());
        }
    });
    let mut machine = site.machine("n0");
    std::fs::write(machine.state().with_file_name("token"), site.token(&[])).unwrap();
    let token = machine.state().with_file_name("token");
    let to = site.address("controller.test");
    let mut join = machine.command_of(&["join", &to, "--token-file", token.to_str().unwrap()]);
    finish(join.env("HTTPS_PROXY", &at)).ok();
    machine.set("HTTPS_PROXY", &at);
    machine.spawn();
    site.nodes.push(machine);
    site.until_ready("n0");
    assert!(tunnels.load(Ordering::SeqCst) >= 2);
    assert!(!site.nodes[0].log().contains("hunter2"));
}

#[test]
fn test_a_dead_peer_is_noticed() {
    let mut site = Site::new();
    let (balancer, swallow) = (TcpListener::bind("127.0.0.3:0").unwrap(), Arc::new(AtomicBool::new(false)));
    let (at, port, state) = (balancer.local_addr().unwrap(), site.port, swallow.clone());
    std::thread::spawn(move || {
        for near in balancer.incoming().flatten() {
            if let Ok(far) = TcpStream::connect(("127.0.0.1", port)) {
                carry(&near, &far, &state);
            }
        }
    });
    let mut machine = site.machine("n0");
    let (token, to) = (machine.state().with_file_name("token"), format!("https://{at}"));
    std::fs::write(&token, site.token(&[])).unwrap();
    finish(&mut machine.command_of(&["join", &to, "--token-file", token.to_str().unwrap()])).ok();
    machine.spawn();
    site.nodes.push(machine);
    site.until_ready("n0");
    swallow.store(true, Ordering::SeqCst);
    site.until("n0", "not_responding");
    // Both ends gave the connection up; the next one gets through, and nobody takes it for a copy.
    eventually("both ends hang up", SOON, || {
        (site.controller.log().contains("a connection was not taken")
            || site.nodes[0].log().contains("connecting to the controller again"))
        .then_some(())
    });
    swallow.store(false, Ordering::SeqCst);
    site.until_ready("n0");
    assert!(!site.nodes[0].log().contains("NODE-108"));
}

#[test]
fn test_a_controller_that_moved_is_followed_without_a_token_and_another_one_is_not() {
    let (mut site, other) = (Site::new(), Site::new());
    site.add_user("ada", "submit");
    site.add_node("n0", "127.0.0.1");
    site.nodes[0].kill();
    let join = |address: &str| {
        let mut join = site.nodes[0].command_of(&["join", address]);
        let stdin = std::fs::File::open("/dev/null").unwrap();
        finish(
            join.stdin(stdin)
                .env("HTTPS_PROXY", "http://127.0.0.1:9")
                .stdout(Stdio::piped())
                .stderr(Stdio::piped()),
        )
    };
    let identity = || std::fs::read_to_string(site.nodes[0].state().join("identity.json")).unwrap();
    let before = identity();
    join(&other.address("127.0.0.1")).code(1).says("NET-104");
    assert_eq!(identity(), before);
    let told = join(&site.address("127.0.0.2")).ok();
    assert!(told.stdout.contains("is a node of https://127.0.0.2:"), "{told:?}");
    assert!(identity().contains(&site.address("127.0.0.2")));
    site.nodes[0].spawn();
    site.until_ready("n0");

    let follow = |address: String| site.by("ada", &["context", "move", "lab", &address]);
    follow(other.address("127.0.0.1")).code(4).says("does not answer at");
    follow(site.address("127.0.0.2")).ok();
    assert!(site.by("ada", &["context", "list"]).ok().stdout.contains(&site.address("127.0.0.2")));
    site.by("ada", &["jobs"]).ok();
}
