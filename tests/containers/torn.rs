//! Group T, what hands and crashes do: containers and images removed, names taken, the agent killed at any instant.

use agent_tests::engine::Engine;
use agent_tests::images::Image;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};

use crate::containers::site::{BUSYBOX, Site, Wish, counted, counting};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "T1",
        promise: "a container removed or killed by hand: the job is lost and says so, never a success",
        run: by_hand,
    },
    Row {
        id: "T2",
        promise: "the image removed while a job runs in it: the job does not notice",
        run: image,
    },
    Row { id: "T3", promise: "a name that is taken stops nobody for good (peer 47)", run: name },
    Row {
        id: "T4",
        promise: "the agent killed again and again: one run, one whole log, one end",
        run: agent,
    },
    Row {
        id: "T5",
        promise: "the agent killed at each step of a start: the command runs once at most",
        run: steps,
    },
    Row { id: "T6", promise: "containers of others are never touched (peer 49)", run: others },
];

/// Submits a job that counts, and waits until it does.
#[track_caller]
fn counts(site: &Site, lines: u64, more: &str) -> String {
    let command = counting(lines, "0.1");
    let job =
        site.submit("counts", &Wish { environment: BUSYBOX, command: &command, more, ..Wish::default() });
    site.running(&job);
    eventually("it counts", SOON, || (!site.log(&job).is_empty()).then_some(()));
    job
}

fn by_hand(tally: &mut Tally, _: &Scale) {
    let site = Site::started();
    for (name, remove) in [("removed", true), ("killed", false)] {
        tally.case(name, || {
            let job = counts(&site, 10_000, "");
            let id = site.running(&job).id;
            if remove {
                site.docker.remove(&id)
            } else {
                site.docker.kill(&id)
            }
            assert_eq!(site.ended(&job), "Failed", "{}", site.why(&job));
            let fault = site.host.show(&job)["fault"].clone();
            assert_eq!(fault["code"], "RUN-107", "{}", site.why(&job));
            assert_ne!(fault["blame"], "user", "{}", site.why(&job));
            site.nothing_left();
        });
    }
    tally.case("removed, and tried again", || {
        let job = counts(&site, 10_000, "retry: {max_attempts: 2, backoff: 1}");
        site.docker.remove(&site.running(&job).id);
        eventually("the second attempt", SOON, || (site.attempt(&job) == 2).then_some(()));
        site.running(&job);
        site.host.ctl(&["cancel", &job]).ok();
        assert_eq!(site.ended(&job), "Canceled");
        site.nothing_left();
    });
}

fn image(tally: &mut Tally, _: &Scale) {
    tally.case("removed by force", || {
        let docker = Engine::shared();
        Image::Busybox.on(&docker);
        let tag = "agentd-test/passing:1";
        docker.tag(Image::Busybox.tag(), tag);
        let mut site = Site::beside(&docker);
        site.host.start();
        let environment = format!("{{image: '{tag}'}}");
        let command = counting(50, "0.1");
        let job = site.submit("p", &Wish { environment: &environment, command: &command, ..Wish::default() });
        site.running(&job);
        docker.remove_image(tag);
        site.completed(&job);
        assert_eq!(site.log(&job), counted(50));
        site.nothing_left();
    });
}

fn name(tally: &mut Tally, _: &Scale) {
    let site = Site::started();
    tally.case("taken by a stranger, then free", || {
        let wish = Wish { environment: BUSYBOX, command: "echo mine", ..Wish::default() };
        let dir = site.job("mine", &wish);
        // The name of a job can be chosen, and with it that of its container.
        let probe = site.submit("probe", &Wish { command: "sleep 1000", ..wish });
        let pattern = site.running(&probe).name;
        site.host.ctl(&["cancel", &probe]).ok();
        let taken = pattern.replace(&probe, "taken");
        let stranger =
            site.docker.create(&taken, Image::Busybox.tag(), &["true"], &[("agentd.test", "stranger")]);
        let dir = dir.to_str().expect("UTF-8");
        site.host.ctl(&["submit", dir, "--name", "taken"]).ok();
        let state = eventually("it ends, or says what is in its way", SOON, || {
            let why = site.why("taken");
            let state = site.host.job_state("taken");
            (why.contains(&taken) || crate::containers::site::ENDED.contains(&state.as_str()))
                .then_some(state)
        });
        assert_ne!(state, "Completed");
        assert!(site.docker.inspect(&stranger).is_some(), "the stranger's container is gone");
        site.docker.remove(&stranger);
        if !crate::containers::site::ENDED.contains(&site.host.job_state("taken").as_str()) {
            site.completed("taken");
        }
        site.nothing_left();
    });
}

fn agent(tally: &mut Tally, scale: &Scale) {
    tally.case("killed and started during a job", || {
        let mut site = Site::started();
        let job = counts(&site, 80, "");
        let id = site.running(&job).id;
        for _ in 0..scale.of(4, 20) {
            site.host.kill();
            site.host.start();
            if let Some(now) = site.containers(&job).first() {
                assert_eq!(now.id, id, "another container");
            }
        }
        site.completed(&job);
        assert_eq!(site.log(&job), counted(80));
        assert_eq!(site.attempt(&job), 1, "{}", site.why(&job));
        site.nothing_left();
    });
}

fn steps(tally: &mut Tally, scale: &Scale) {
    let all =
        ["node.container.create", "node.container.start", "node.container.write", "node.container.remove"];
    for point in all.into_iter().take(scale.of(2, 4)).chain(["node.journal.done"]) {
        tally.case(point, || {
            let mut site = Site::started();
            site.host.kill();
            // The first visit, and a later one, by a daemon that was started for it.
            site.host.set("AGENTD_FAILPOINTS", &format!("{point}=kill=1"));
            site.host.start();
            let wish = Wish { environment: BUSYBOX, command: "echo ran", ..Wish::default() };
            let job = site.submit("once", &wish);
            site.host.died();
            site.host.set("AGENTD_FAILPOINTS", "");
            site.host.start();
            site.completed(&job);
            assert_eq!(site.log(&job), b"ran\n");
            site.nothing_left();
        });
    }
}

fn others(tally: &mut Tally, _: &Scale) {
    tally.case("strangers, and those of another node on the same engine", || {
        let docker = Engine::shared();
        Image::Busybox.on(&docker);
        let strangers = [
            docker.create("stranger-1", Image::Busybox.tag(), &["true"], &[]),
            docker.create(
                "stranger-2",
                Image::Busybox.tag(),
                &["sleep", "1000"],
                &[("agentd.node", "another")],
            ),
        ];
        docker.start(&strangers[1]);
        let (first, mut second) = (Site::started(), Site::started());
        let job = counts(&first, 100, "");
        let other =
            second.submit("other", &Wish { environment: BUSYBOX, command: "true", ..Wish::default() });
        second.completed(&other);
        second.host.kill();
        second.host.start();
        second.nothing_left();
        first.completed(&job);
        first.nothing_left();
        for stranger in strangers {
            assert!(docker.inspect(&stranger).is_some(), "a stranger's container is gone");
            docker.remove(&stranger);
        }
    });
}
