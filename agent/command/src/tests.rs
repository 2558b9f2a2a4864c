//! Real children of this process: what they say, how they end, and that nothing of them is left.

use std::time::Instant;

use agent_shim::MARK;
use agent_shim::cgroup::kill_marked;
use agent_shim::process::marked;

use super::*;

const LONG: Duration = Duration::from_secs(60);

async fn until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < deadline, "the condition never came true");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn test_child_is_captured_in_order_with_its_environment() {
    let output = Command::new("sh")
        .args(["-c", "echo out; echo err >&2; echo $X; pwd; exit 3"])
        .envs([("X", "y"), ("PATH", "/usr/bin:/bin")])
        .cwd("/usr")
        .capture()
        .await
        .unwrap();
    assert_eq!((output.status.code(), output.text), (Some(3), b"out\nerr\ny\n/usr\n".to_vec()));
    let missing = Command::new("no-such-program").capture().await;
    assert!(matches!(missing, Err(CommandError::Spawn { .. })));
}

#[tokio::test]
async fn test_child_group_dies_when_nobody_waits_or_when_it_is_silent() {
    let mark = |name: &str| format!("{name}-{}", std::process::id());
    let sleeper = |mark: &str| {
        Command::new("sh")
            .args(["-c", "sleep 1000 & echo up; sleep 1000"])
            .envs([("PATH", "/usr/bin:/bin")])
            .mark(mark)
    };
    let silent = mark("silent");
    let stalled = sleeper(&silent).stall(Duration::from_millis(200)).capture().await;
    assert!(matches!(stalled, Err(CommandError::Stalled { .. })));
    until(|| marked(MARK, &silent).is_empty()).await;

    let works = "while :; do :; done & sleep 3; kill $!; echo done";
    let works = Command::new("sh").args(["-c", works]).envs([("PATH", "/usr/bin:/bin")]);
    let short = Duration::from_secs(1);
    assert!(matches!(works.clone().stall(short).capture().await, Err(CommandError::Stalled { .. })));
    let done = works.stall(short).may_work_silently().capture().await;
    assert!(matches!(done, Ok(output) if output.text == b"done\n"));

    let dropped = mark("dropped");
    let command = sleeper(&dropped);
    let waiting = tokio::time::timeout(Duration::from_millis(300), command.capture()).await;
    assert!(waiting.is_err());
    until(|| marked(MARK, &dropped).is_empty()).await;

    // A background process that keeps the output open does not delay the caller.
    let left = mark("left");
    let command = Command::new("sh").args(["-c", "sleep 1000 & echo up"]).envs([("PATH", "/usr/bin:/bin")]);
    assert_eq!(command.mark(&left).capture().await.unwrap().text, b"up\n");
    until(|| marked(MARK, &left).is_empty()).await;
}

#[tokio::test]
async fn test_marked_children_of_a_former_life_are_killed() {
    let mark = format!("former-{}", std::process::id());
    let dir = tempfile::tempdir().unwrap();
    let command = Command::new("sh")
        .args(["-c", "setsid sleep 1000 & touch up; wait"])
        .envs([("PATH", "/usr/bin:/bin")])
        .cwd(dir.path())
        .mark(&mark);
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move { command.capture().await.map(drop) });
    until(|| dir.path().join("up").exists()).await;
    assert_eq!(kill_marked(MARK, &mark, LONG).1, 0);
    assert!(marked(MARK, &mark).is_empty());
}

#[tokio::test]
async fn test_child_reads_its_input_and_its_two_outputs_stay_apart() {
    // More bytes than a pipe holds, to a child that never reads them.
    let idle = Command::new("/bin/echo").arg("done").input(vec![b'x'; 1 << 20]).capture().await.unwrap();
    assert_eq!(idle.text, b"done\n");
    let command = Command::new("/bin/sh").envs([("PATH", "/usr/bin:/bin")]).nice(7);
    // A child is made nicer only after its start: it looks until it sees that, for a limited time.
    let slowed = format!(
        "n=0; while [ $(nice) = {} ] && [ $((n += 1)) -lt 600 ]; do sleep 0.1; done; nice",
        own_nice()
    );
    let command = command.args(["-c", &format!("cat; echo oops >&2; {slowed}")]).input("hello\n");
    let (mut output, mut error) = (Vec::new(), Vec::new());
    let status =
        command.talk(|bytes| output.extend_from_slice(bytes), |bytes| error.extend_from_slice(bytes));
    assert!(status.await.unwrap().success());
    let expected = format!("hello\n{}\n", own_nice() + 7);
    assert_eq!((String::from_utf8(output).unwrap(), error.as_slice()), (expected, &b"oops\n"[..]));
}

fn own_nice() -> i32 {
    rustix::process::getpriority_process(None).unwrap()
}

#[tokio::test]
async fn test_child_that_takes_too_much_memory_is_told_apart() {
    let limit = 64 << 20;
    let group = Arc::new(MemoryGroup::make(limit));
    if group.unmet().is_some() {
        return; // processes cannot be limited together on this machine
    }
    // The output is bounded, in case the limit does not work.
    let hungry = "head -c 400000000 /dev/zero | tail | wc -c; exit 1";
    let command = Command::new("/bin/sh").envs([("PATH", "/usr/bin:/bin")]).args(["-c", hungry]);
    let error = command.within(Some(group.clone())).capture().await.unwrap_err();
    assert!(matches!(error, CommandError::OutOfMemory { limit: told, .. } if told == limit), "{error:?}");
    let fine = Command::new("/bin/true").within(Some(group)).capture().await.unwrap();
    assert!(fine.status.success());
}

#[tokio::test]
async fn test_rest_is_read_before_the_receiver_has_heard_of_it() {
    let (output, mut input) = io::pipe().unwrap();
    let output = pipe::Receiver::from_owned_fd(output.into()).unwrap();
    input.write_all(b"the last words").unwrap();
    drop(input);
    let mut buffer = [0; 64];
    assert_eq!(read_rest(&output, &mut buffer), 14);
    assert_eq!(&buffer[..14], b"the last words");
    assert_eq!(read_rest(&output, &mut buffer), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn test_everything_a_short_child_says_is_kept() {
    for round in 0..500 {
        let output = Command::new("/bin/echo").arg("said").capture().await.unwrap();
        assert_eq!(output.text, b"said\n", "round {round}");
    }
}
