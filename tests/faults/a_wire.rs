//! Group A, the wire: messages that come late, twice, or long after they were overtaken.

use std::time::{Duration, Instant};

use agent_tests::client::Client;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::post::Rules;
use agent_tests::{SOON, eventually};

use crate::judge::{Every, Samples, lost_and_unexpected, whole};
use agent_tests::table::{Row, Scale, Tally};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "A12",
    promise: "messages delayed, doubled and delivered when stale change no result",
    run: unreliable_post,
}];

/// Jobs run while the messages of their nodes are doubled, delayed and repeated; daemons are killed too.
fn unreliable_post(tally: &mut Tally, scale: &Scale) {
    let mut chance = scale.chance();
    let rules = Rules {
        doubled: 20,
        delayed: 10,
        delay: scale.of(Duration::from_millis(1500), Duration::from_secs(5)),
        stale: 20,
        pace: 0,
    };
    let (wanted, messages) = (scale.of(30, 300), scale.of(500, 100_000));
    let setup = Setup { nodes: 2, slots: 4, post: Some((rules, scale.seed)), ..Setup::default() };
    let mut fleet = Fleet::started(&setup);
    let (mut jobs, mut samples, mut kills) = (Vec::new(), Samples::default(), 0);
    let mut submit = Every::new(&mut chance, 100, 500);
    let mut kill = Every::new(&mut chance, 3000, 6000);
    let mut sample = Every::new(&mut chance, 1000, 1000);
    let carried = |fleet: &Fleet| fleet.posts.iter().map(|post| post.counts()[0]).sum::<u64>();
    let end = Instant::now() + scale.of(SOON, Duration::from_secs(1200));
    while jobs.len() < wanted || (carried(&fleet) < messages && Instant::now() < end) {
        if submit.is_due(&mut chance) {
            let wishes = format!("--lines 200 --seconds {}", chance.millis(200, 2000).as_secs_f64());
            let draft = fleet.draft(&wishes);
            jobs.extend(fleet.client.try_submit(&Client::request_id(), &draft));
        }
        if kill.is_due(&mut chance) {
            kills += 1;
            match chance.below(3) {
                0 => fleet.controller.bounce(),
                1 => fleet.nodes[0].bounce(),
                _ => fleet.nodes[1].bounce(),
            }
        }
        if sample.is_due(&mut chance) {
            samples.take(&fleet);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    eventually("every job has ended", scale.of(SOON * 2, SOON * 10), || {
        samples.take(&fleet);
        std::thread::sleep(Duration::from_millis(500));
        fleet.client.jobs(true).ok()?.is_empty().then_some(())
    });
    for job in &jobs {
        tally.case(&format!("the end of {job}"), || whole(&fleet, job, 200));
    }
    let lost = lost_and_unexpected(&fleet, &jobs)
        .into_iter()
        .filter(|said| said.ends_with("lost"))
        .collect::<Vec<_>>();
    tally.count(0, "jobs that went", &lost);
    tally.count(0, "what was seen meanwhile", &samples.complaints);
    let panics: Vec<String> =
        std::iter::once(&fleet.controller).chain(&fleet.nodes).flat_map(crate::look::panics).collect();
    tally.count(0, "panics", &panics);
    let sums = fleet
        .posts
        .iter()
        .map(|post| post.counts())
        .fold([0; 4], |sum, one| [sum[0] + one[0], sum[1] + one[1], sum[2] + one[2], sum[3] + one[3]]);
    let [carried, doubled, delayed, stale] = sums;
    tally.note(format!(
        "{carried} messages carried, {doubled} doubled, {delayed} delayed, {stale} stale ones repeated; {kills} kills"
    ));
}
