//! Group E, the engine is away: absent, frozen, killed, restarted. Its silence means nothing for a job that runs, and
//! never that one is dead.

use std::time::Duration;

use agent_tests::engine::Engine;
use agent_tests::images::Image;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};

use crate::containers::site::{BUSYBOX, Site, Wish, counted, counting};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "E1A",
        promise: "no engine at boot: the node works, jobs in images wait and say why (peer 50)",
        run: absent,
    },
    Row {
        id: "E1B",
        promise: "a frozen engine means nothing for a running job, even for its end",
        run: frozen,
    },
    Row {
        id: "E1C",
        promise: "jobs that start while it is frozen wait for it, and run once (peer 53)",
        run: frozen_start,
    },
    Row {
        id: "E1D",
        promise: "killed again and again with live-restore: the job and its log are whole (peers 46, 48)",
        run: killed,
    },
    Row { id: "E1E", promise: "stopped and started as an operator would", run: stopped },
    Row {
        id: "E1F",
        promise: "without live-restore a job that was torn away is lost, tried again, and never a success",
        run: torn_away,
    },
    Row {
        id: "E1H",
        promise: "a build that the engine breaks off again and again ends, with what the engine said",
        run: broken_builds,
    },
    Row { id: "E1G", promise: "agent and engine both gone: the job goes on, and its end is told", run: both },
];

/// An engine of this test alone, with the image of tools, and a box beside it.
struct Alone {
    site: Site,
    engine: Engine,
}

impl Alone {
    fn started(live_restore: bool) -> Alone {
        let engine = Engine::started(live_restore);
        Image::Busybox.on(&engine.docker());
        let mut site = Site::beside(&engine.docker());
        site.host.start();
        Alone { site, engine }
    }

    #[track_caller]
    fn submit(&self, name: &str, command: &str, more: &str) -> String {
        self.site.submit(name, &Wish { environment: BUSYBOX, command, more, ..Wish::default() })
    }

    /// Submits a job that counts, and waits until it does.
    #[track_caller]
    fn counts(&self, lines: u64, pause: &str, more: &str) -> String {
        let job = self.submit("counts", &counting(lines, pause), more);
        self.says(&job, 1);
        job
    }

    /// Waits until a job has said so many lines.
    #[track_caller]
    fn says(&self, job: &str, lines: usize) {
        eventually(&format!("{job} says line {lines}"), SOON, || {
            let state = self.site.host.job_state(job);
            assert!(state != "Failed", "{}", self.site.why(job));
            let log = self.site.host.client(&["logs", job]).output().expect("agentctl starts").stdout;
            (log.iter().filter(|byte| **byte == b'\n').count() >= lines).then_some(())
        });
    }

    /// The job ended well, in one attempt, with every line once; the daemon lived through it all.
    #[track_caller]
    fn whole(&self, job: &str, lines: u64) {
        self.site.completed(job);
        let log = self.site.log(job);
        assert!(log == counted(lines), "the log is another:\n{}", String::from_utf8_lossy(&log));
        assert_eq!(self.site.attempt(job), 1, "{}", self.site.why(job));
    }

    /// The node is heard and works.
    #[track_caller]
    fn node_works(&self) {
        let job = self
            .site
            .submit("plain", &Wish { environment: "host", command: "echo plain", ..Wish::default() });
        self.site.completed(&job);
    }
}

fn absent(tally: &mut Tally, _: &Scale) {
    tally.case("absent, then there", || {
        let mut engine = Engine::started(true);
        Image::Busybox.on(&engine.docker());
        engine.stop();
        let mut site = Site::beside(&engine.docker());
        site.host.start();
        let mut alone = Alone { site, engine };
        let job = alone.submit("waits", "echo at last", "");
        alone.site.waits_for(&job, "container engine");
        alone.node_works();
        alone.engine.start();
        alone.site.completed(&job);
        assert_eq!(alone.site.log(&job), b"at last\n");
        assert_eq!(alone.site.attempt(&job), 1, "{}", alone.site.why(&job));
    });
    tally.case("a job that waits can be canceled", || {
        let engine = Engine::absent(true);
        let mut site = Site::beside(&engine.docker());
        site.host.start();
        let alone = Alone { site, engine };
        let job = alone.submit("waits", "true", "");
        alone.site.waits_for(&job, "container engine");
        alone.site.host.ctl(&["cancel", &job]).ok();
        assert_eq!(alone.site.ended(&job), "Canceled");
    });
}

fn frozen(tally: &mut Tally, scale: &Scale) {
    tally.case("frozen while a job runs, and while it ends", || {
        let alone = Alone::started(true);
        let job = alone.counts(60, "0.1", "");
        alone.engine.freeze();
        alone.says(&job, 30);
        alone.whole(&job, 60);
        let said = alone.site.host.log();
        assert!(
            !said.contains("the container of a job stays"),
            "its end was told after the engine was given up"
        );
        alone.node_works();
        std::thread::sleep(scale.of(Duration::from_secs(5), Duration::from_secs(180)));
        alone.node_works();
        alone.engine.thaw();
        alone.site.nothing_left();
        let after = alone.submit("after", "echo after", "");
        alone.site.completed(&after);
    });
    tally.case("a job is canceled while it is frozen", || {
        let alone = Alone::started(true);
        let job = alone.counts(10_000, "0.1", "limits: {grace: 2}");
        alone.engine.freeze();
        alone.site.host.ctl(&["cancel", &job]).ok();
        assert_eq!(alone.site.ended(&job), "Canceled", "{}", alone.site.why(&job));
        alone.engine.thaw();
        alone.site.nothing_left();
    });
}

fn frozen_start(tally: &mut Tally, scale: &Scale) {
    tally.case("submitted while it is frozen", || {
        let alone = Alone::started(true);
        // What the image is has been found out before.
        let first = alone.submit("first", "true", "");
        alone.site.completed(&first);
        alone.engine.freeze();
        let job = alone.submit("frozen", "echo once", "");
        std::thread::sleep(scale.of(Duration::from_secs(8), Duration::from_secs(180)));
        let state = alone.site.host.job_state(&job);
        assert!(["Queued", "Preparing"].contains(&state.as_str()), "{state}: {}", alone.site.why(&job));
        alone.node_works();
        alone.engine.thaw();
        alone.site.completed(&job);
        assert_eq!(alone.site.log(&job), b"once\n");
        alone.site.nothing_left();
    });
}

fn killed(tally: &mut Tally, scale: &Scale) {
    tally.case("ten times during a job", || {
        let mut alone = Alone::started(true);
        let more = "limits: {grace: 2}";
        // It counts until it is told to stop, so that no machine is too slow for ten restarts.
        let command =
            "i=0; while [ ! -e outputs/stop ]; do echo line $i; i=$((i+1)); sleep 0.1; done; echo end $i";
        let job = alone.submit("long", command, more);
        alone.says(&job, 1);
        let container = alone.site.running(&job);
        let mut lines = 1;
        for _ in 0..scale.of(10, 30) {
            alone.engine.kill();
            lines += 3;
            alone.says(&job, lines);
            alone.engine.start();
            assert_eq!(alone.site.host.job_state(&job), "Running", "{}", alone.site.why(&job));
        }
        let now = alone.site.running(&job);
        assert_eq!(now.id, container.id, "another container");
        let pwd = alone.site.work_dir(&job);
        std::fs::write(pwd.join("outputs/stop"), "").expect("a file");
        alone.site.completed(&job);
        let log = String::from_utf8(alone.site.log(&job)).expect("text");
        let count = log.lines().count() as u64 - 1;
        assert_eq!(log, format!("{}end {count}\n", String::from_utf8(counted(count)).expect("text")));
        assert_eq!(alone.site.attempt(&job), 1, "{}", alone.site.why(&job));
        alone.site.nothing_left();
        alone.node_works();
    });
}

fn stopped(tally: &mut Tally, _: &Scale) {
    tally.case("stopped for a while with live-restore", || {
        let mut alone = Alone::started(true);
        let job = alone.counts(60, "0.1", "");
        alone.engine.stop();
        let waiting = alone.submit("waits", "echo later", "");
        alone.whole(&job, 60);
        alone.site.waits_for(&waiting, "container engine");
        alone.node_works();
        alone.engine.start();
        alone.site.completed(&waiting);
        alone.site.nothing_left();
    });
}

fn torn_away(tally: &mut Tally, _: &Scale) {
    let retry = "retry: {max_attempts: 2, backoff: 1}";
    for (name, kill) in [("killed and started", true), ("stopped and started", false)] {
        tally.case(name, || {
            let mut alone = Alone::started(false);
            let job = alone.counts(10_000, "0.1", retry);
            let single = alone.counts(10_000, "0.1", "");
            if kill {
                alone.engine.kill()
            } else {
                alone.engine.stop()
            }
            alone.engine.start();
            eventually("the job is tried again", SOON, || (alone.site.attempt(&job) == 2).then_some(()));
            assert_eq!(alone.site.ended(&single), "Failed", "{}", alone.site.why(&single));
            let fault = alone.site.host.show(&single)["fault"].clone();
            assert_ne!(fault["code"], "RUN-101", "{}", alone.site.why(&single));
            assert_ne!(fault["blame"], "user", "{}", alone.site.why(&single));
            alone.site.running(&job);
            alone.site.host.ctl(&["cancel", &job]).ok();
            assert_eq!(alone.site.ended(&job), "Canceled");
            alone.site.nothing_left();
        });
    }
}

fn broken_builds(tally: &mut Tally, _: &Scale) {
    tally.case("killed three times at the same step", || {
        let mut alone = Alone::started(true);
        let dockerfile = "FROM agentd-test/busybox:1\nRUN echo first\nRUN sleep 1000\n";
        let job = alone.site.submit(
            "builds",
            &Wish {
                environment: "{build: {path: image}}",
                command: "true",
                files: &[("image/Dockerfile", dockerfile)],
                ..Wish::default()
            },
        );
        for time in 1..=3 {
            eventually(&format!("it is at its last step, time {time}"), SOON, || {
                let log = alone.site.host.ctl(&["logs", "--build", &job]).stdout;
                (log.matches("RUN sleep 1000").count() >= time).then_some(())
            });
            alone.engine.kill();
            alone.engine.start();
        }
        assert_eq!(alone.site.ended(&job), "Failed", "{}", alone.site.why(&job));
        let fault = alone.site.host.show(&job)["fault"].clone();
        assert_eq!(
            (fault["code"].as_str(), fault["blame"].as_str()),
            (Some("ENV-104"), Some("node")),
            "{fault}"
        );
        assert!(fault["why"].to_string().contains("3 times"), "{fault}");
        alone.node_works();
    });
}

fn both(tally: &mut Tally, _: &Scale) {
    tally.case("both killed; the agent comes back first", || {
        let mut alone = Alone::started(true);
        let job = alone.counts(100, "0.1", "");
        alone.engine.kill();
        alone.site.host.kill();
        alone.site.host.start();
        alone.node_works();
        alone.whole(&job, 100);
        alone.engine.start();
        alone.site.nothing_left();
    });
    tally.case("the job ends while both are gone", || {
        let mut alone = Alone::started(true);
        let job = alone.counts(20, "0.1", "");
        let container = alone.site.running(&job);
        alone.site.host.kill();
        alone.engine.kill();
        let record = alone.site.work_dir(&job);
        eventually("the command has ended", SOON, || {
            let ended = agent_tests::fleet::processes_below(&record);
            ended.is_empty().then_some(())
        });
        alone.site.host.start();
        alone.whole(&job, 20);
        alone.engine.start();
        alone.site.nothing_left();
        assert!(alone.site.docker.inspect(&container.id).is_none());
    });
}
