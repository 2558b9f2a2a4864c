use super::*;

const CHUNK: u64 = 256 * 1024;
const WINDOW: u64 = 16 * CHUNK;

fn flow(written: u64) -> Flow {
    let channel = Channel::Log(agent_model::Stream::Job);
    let feed = Feed::new("t.1.0".parse().unwrap(), channel, FilePosition::Plain("/nowhere".into()));
    feed.written.store(written, Ordering::Release);
    Flow::new(Arc::new(feed))
}

/// Lets the flow send without a connection; returns what it asked for.
fn push(flow: &mut Flow) -> Option<FlowRequest> {
    push_at(flow, Instant::now())
}

fn push_at(flow: &mut Flow, now: Instant) -> Option<FlowRequest> {
    let request = flow.plan(Allowance { budget: u64::MAX, chunk: CHUNK, share: WINDOW }, now)?;
    flow.pending += 1;
    if let FlowRequest::Send { length, .. } = request {
        flow.in_flight += length;
        flow.next = flow.next.map(|next| next + length);
    }
    Some(request)
}

#[test]
fn test_small_file_is_sent_without_asking() {
    let mut flow = flow(100);
    assert_eq!(push(&mut flow), Some(FlowRequest::Send { offset: 0, length: 100 }));
    assert_eq!(push(&mut flow), None);
    flow.answered(100, 100, 100);
    assert!(!flow.is_behind());
}

#[test]
fn test_large_file_goes_on_where_the_controller_says() {
    let mut flow = flow(10 * CHUNK);
    assert_eq!(push(&mut flow), Some(FlowRequest::Ask));
    assert_eq!(push(&mut flow), None, "nothing is sent before the answer");
    flow.answered(0, 0, 9 * CHUNK + 1);
    assert_eq!(push(&mut flow), Some(FlowRequest::Send { offset: 9 * CHUNK + 1, length: CHUNK - 1 }));
    assert_eq!(push(&mut flow), None);
}

#[test]
fn test_window_bounds_what_is_on_its_way() {
    let mut flow = flow(100 * CHUNK);
    push(&mut flow);
    flow.answered(0, 0, 0);
    let sent = std::iter::from_fn(|| push(&mut flow)).count() as u64;
    assert_eq!((sent, flow.in_flight), (WINDOW / CHUNK, WINDOW));
    flow.answered(CHUNK, CHUNK, CHUNK);
    assert_eq!(push(&mut flow), Some(FlowRequest::Send { offset: WINDOW, length: CHUNK }));
}

#[test]
fn test_small_pieces_gather_behind_a_few_on_their_way() {
    let mut flow = flow(10);
    for sent in 0..FEW as u64 {
        assert_eq!(push(&mut flow), Some(FlowRequest::Send { offset: sent * 10, length: 10 }));
        flow.feed.written.store(sent * 10 + 20, Ordering::Release);
    }
    let all = FEW as u64 * 10;
    flow.feed.written.store(all + 20, Ordering::Release);
    assert_eq!(push(&mut flow), None);
    flow.answered(10, 10, 10);
    assert_eq!(push(&mut flow), Some(FlowRequest::Send { offset: all, length: 20 }));
}

#[test]
fn test_attempt_that_is_over_is_not_offered_for_ever() {
    let mut flow = flow(10);
    push(&mut flow);
    flow.answered(10, 10, 0);
    assert!(!flow.is_behind());
    assert_eq!(push(&mut flow), None);
}

#[test]
fn test_gap_is_settled_once() {
    let mut flow = flow(3 * CHUNK);
    push(&mut flow);
    flow.answered(0, 0, 0);
    for _ in 0..3 {
        push(&mut flow);
    }
    // The controller lost what it had: each answer names the same length.
    for end in [CHUNK, 2 * CHUNK] {
        flow.answered(CHUNK, end, 5);
        assert_eq!(push(&mut flow), None, "older requests are still on their way");
    }
    flow.answered(CHUNK, 3 * CHUNK, 5);
    assert_eq!(push(&mut flow), Some(FlowRequest::Send { offset: 5, length: CHUNK }));
}

#[test]
fn test_reconnect_forgets_offsets_but_not_lengths() {
    let mut flow = flow(2 * CHUNK);
    push(&mut flow);
    flow.answered(0, 0, 0);
    push(&mut flow);
    flow.reconnect();
    assert_eq!(push(&mut flow), Some(FlowRequest::Ask));
    flow.answered(0, 0, CHUNK);
    assert_eq!(push(&mut flow), Some(FlowRequest::Send { offset: CHUNK, length: CHUNK }));
}

#[test]
fn test_doubt_asks_again() {
    let mut flow = flow(10);
    push(&mut flow);
    flow.answered(10, 10, 10);
    flow.feed.doubted.store(true, Ordering::Release);
    assert_eq!(push(&mut flow), Some(FlowRequest::Ask));
    flow.answered(0, 0, 4);
    assert_eq!(push(&mut flow), Some(FlowRequest::Send { offset: 4, length: 6 }));
}

#[test]
fn test_what_could_not_be_stored_is_offered_again_after_a_rest() {
    let mut flow = flow(10);
    push(&mut flow);
    let now = Instant::now();
    flow.failed(10, "the disk is full", now);
    assert!(flow.is_behind() && flow.resting().is_some());
    assert_eq!(push_at(&mut flow, now), None);
    assert_eq!(push_at(&mut flow, now + REST), Some(FlowRequest::Send { offset: 0, length: 10 }));
}

#[test]
fn test_file_that_has_ended_is_given_up_when_the_controller_stores_nothing_of_it_for_long() {
    let seconds = |flow: &mut Flow, now: &mut Instant, seconds: u64| {
        (0..seconds).all(|_| {
            *now += REST;
            let sent = push_at(flow, *now).is_some();
            if sent {
                flow.failed(10, "the disk is full", *now);
            }
            sent
        })
    };
    let (mut flow, mut now) = (flow(10), Instant::now());
    assert!(seconds(&mut flow, &mut now, 1000), "nobody waits for it yet");
    let patience = PATIENCE.as_secs();
    flow.feed.patience.store(PATIENCE.as_millis() as u64, Ordering::Release);
    assert!(seconds(&mut flow, &mut now, patience / 2));
    // A controller that does not answer is not one that cannot store it.
    now += PATIENCE * 10;
    flow.reconnect();
    assert!(seconds(&mut flow, &mut now, patience / 2));
    // Neither is one that stores a part.
    flow.has(5);
    assert!(seconds(&mut flow, &mut now, patience));
    assert!(!seconds(&mut flow, &mut now, 2));
    let stored = Stored { bytes: 5, gone: 0, given_up: Some("the disk is full".into()) };
    assert_eq!(*flow.feed.stored.borrow(), stored);
}

/// Of a job whose log of 10,000 bytes is in segments of 4,096, and its directory.
fn flow_of_segments() -> (tempfile::TempDir, Flow) {
    let temp = tempfile::tempdir().unwrap();
    let dir = JobDir::new(temp.path());
    let policy = agent_shim::LogPolicy { segment: 4096, ..agent_shim::LogPolicy::default() };
    let mut writer = agent_shim::segments::Writer::open(dir.segments(), policy).unwrap();
    writer.append(&vec![b'x'; 10_000], std::time::Instant::now());
    let channel = Channel::Log(agent_model::Stream::Job);
    let feed = Feed::new("t.1.0".parse().unwrap(), channel, FilePosition::Job(dir));
    feed.written.store(10_000, Ordering::Release);
    let flow = Flow::new(Arc::new(feed));
    (temp, flow)
}

#[test]
fn test_segments_are_trimmed_as_far_as_the_controller_has_them() {
    let (_dir, mut flow) = flow_of_segments();
    flow.has(9_000);
    assert_eq!(flow.should_trim(), None, "more is on its way; it can wait");
    flow.has(10_000);
    assert_eq!(flow.should_trim(), Some(10_000));
    flow.feed.trim(10_000).unwrap();
    assert_eq!(flow.feed.read(8192, 10_000).unwrap().len(), 1808);
    assert_eq!(flow.feed.stored.borrow().gone, 0);
    assert_eq!(flow.feed.read(8191, 1).unwrap(), b"\n", "what the controller had once and asks for again");
    assert_eq!(flow.feed.stored.borrow().gone, 1);
    assert_eq!(flow.should_trim(), None);
}

#[tokio::test]
async fn test_controller_that_lost_what_was_trimmed_gets_the_rest_and_is_told() {
    let (_dir, mut flow) = flow_of_segments();
    flow.feed.trim(8192).unwrap();
    push(&mut flow);
    flow.answered(0, 0, 100);
    let Some(FlowRequest::Send { offset: 100, length }) = push(&mut flow) else {
        panic!("it offers what it can")
    };
    let sent = flow.read(100, length).await.unwrap();
    assert!(sent.ends_with(b"x") && sent.len() as u64 == length);
    assert_eq!(flow.feed.stored.borrow().gone, 8092);
}
