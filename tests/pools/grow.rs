//! Group P: pools that grow and shrink with what waits.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use agent_model::job::Resources;
use agent_model::{EnvSpec, JobDraft};
use agent_proto::v1;
use agent_proto::v1::pools_client::PoolsClient;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, binaries, eventually, finish, root};

use crate::pools::bed::Bed;
use crate::pools::{docker, slurm};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "P1",
        promise: "a burst of 30 jobs, one of them on four machines, makes four containers, and none is left after it",
        run: burst,
    },
    Row {
        id: "P2",
        promise: "jobs make two nodes of a Slurm cluster, and none is left after them",
        run: slurm_burst,
    },
    Row { id: "P3", promise: "no job is given to a machine that goes, however close it comes", run: race },
    Row { id: "P4", promise: "providers that fail, hang, lie and forget cost time and no job", run: moods },
    Row { id: "P5", promise: "pools are told of, changed and removed as people expect", run: care },
];

/// A pool and whoever submits to it.
pub(crate) struct Pool<'a> {
    bed: &'a Bed,
}

impl Pool<'_> {
    fn call<T>(
        &self,
        call: impl AsyncFnOnce(
            PoolsClient<tonic::transport::Channel>,
        ) -> Result<tonic::Response<T>, tonic::Status>,
    ) -> Result<T, tonic::Status> {
        let client = PoolsClient::new(self.bed.client.channel());
        self.bed.client.wait(async { call(client).await.map(tonic::Response::into_inner) })
    }

    pub(crate) fn make(bed: &Bed, max: u32, idle: Duration) -> Pool<'_> {
        let pool = Pool { bed };
        pool.set(v1::SetPoolRequest {
            create: true,
            provider: Some("lab".to_owned()),
            max: Some(max),
            idle: prost_types::Duration::try_from(idle).ok(),
            ..v1::SetPoolRequest::default()
        })
        .expect("a pool");
        pool
    }

    fn set(&self, request: v1::SetPoolRequest) -> Result<v1::Pool, tonic::Status> {
        let name = if request.name.is_empty() { "gpu".to_owned() } else { request.name.clone() };
        let request = v1::SetPoolRequest { name, ..request };
        self.call(async move |mut client| client.set(request).await)
    }

    fn show(&self) -> Option<v1::Pool> {
        let listed = self.call(async |mut client| client.list(v1::ListPoolsRequest::default()).await);
        listed.expect("the controller answers").pools.into_iter().find(|pool| pool.name == "gpu")
    }

    fn machines(&self) -> Vec<v1::PoolMachine> {
        self.show().map(|pool| pool.machines).unwrap_or_default()
    }

    /// Waits until the pool is as it should be.
    #[track_caller]
    fn becomes(&self, what: &str, within: Duration, is_so: impl Fn(&v1::Pool) -> bool) -> v1::Pool {
        let seen = || self.show().expect("the pool");
        let Some(found) = agent_tests::within(within, || Some(seen()).filter(&is_so)) else {
            panic!("{what} after {within:?}: {:#?}\n{}", seen(), self.bed.logs())
        };
        found
    }

    #[track_caller]
    fn empties(&self) {
        self.becomes("no machine is left", SOON, |pool| pool.machines.is_empty());
    }
}

/// A job of a pool, on so many machines.
fn job(command: &str, nodes: u32) -> JobDraft {
    JobDraft {
        command: command.to_owned(),
        compute: Some("gpu".to_owned()),
        environment: EnvSpec::host(),
        resources: Resources { nodes, ..Resources::default() },
        ..JobDraft::default()
    }
}

/// A bed whose provider starts daemons of this machine.
fn farm(more: &str) -> Bed {
    Bed::with(|home| format!("lab: {}\n", farm_at(home, more)))
}

/// What a file of providers says of the farm in this directory.
fn farm_at(home: &Path, more: &str) -> String {
    let (home, agentd) = (home.display(), binaries().join("agentd").display().to_string());
    let program = root().join("tests/pools/farm.py").display().to_string();
    format!("{{use: {program}, home: {home}, agentd: {agentd}, {more}}}")
}

fn set_mood(bed: &Bed, mood: &str) {
    fs::write(bed.path("mood"), mood).expect("a file");
}

fn calls(bed: &Bed, verb: &str) -> usize {
    let calls = fs::read_to_string(bed.path("calls")).unwrap_or_default();
    calls.lines().filter(|line| line.starts_with(verb)).count()
}

/// Submits jobs, waits until all have ended well at the first attempt, and until no machine is left. Returns the time
/// from the first submission to its start, and the most machines that were seen.
fn flood(pool: &Pool<'_>, drafts: &[JobDraft]) -> (Duration, usize) {
    let begun = Instant::now();
    let jobs: Vec<String> = drafts.iter().map(|draft| pool.bed.client.submit(draft)).collect();
    let (mut started, mut most) = (None, 0);
    eventually("all jobs have ended", SOON * 3, || {
        most = most.max(pool.machines().len());
        let states: Vec<String> = jobs.iter().map(|job| pool.bed.client.job(job).state).collect();
        if states.iter().any(|state| state != "Queued") {
            started.get_or_insert(begun.elapsed());
        }
        states.iter().all(|state| ["Completed", "Failed", "Canceled"].contains(&state.as_str())).then_some(())
    });
    for job in &jobs {
        let job = pool.bed.client.job(job);
        assert_eq!((job.state.as_str(), job.epoch), ("Completed", 1), "{job:#?}");
    }
    pool.empties();
    assert!(pool.bed.client.nodes().expect("nodes").is_empty(), "no node is left");
    (started.unwrap_or_default(), most)
}

fn burst(tally: &mut Tally, scale: &Scale) {
    let lab = docker::config(&format!("image: '{}', node: {{slots: 2}}", docker::image()));
    let bed = Bed::with(|_| format!("lab: {lab}\n"));
    let pool = Pool::make(&bed, 4, Duration::from_secs(3));
    let count = scale.of(12, 30);
    let drafts: Vec<JobDraft> = (0..count)
        .map(|number| match number {
            5 => job("sleep 1; echo $AGENTD_RANK", 4),
            _ => job("sleep 1; echo done", 1),
        })
        .collect();
    tally
        .case("all end well at their first attempt, and the pool is empty again", || {
            let (first, most) = flood(&pool, &drafts);
            assert_eq!(most, 4, "as many as it may have");
            first
        })
        .into_iter()
        .for_each(|first| {
            tally.note(format!("{count} jobs; submit to start from no machine: {:.1} s", first.as_secs_f64()))
        });
    tally
        .case("a job for which a machine is ready", || {
            pool.set(v1::SetPoolRequest { min: Some(1), ..v1::SetPoolRequest::default() }).expect("a change");
            pool.becomes("one machine is idle", SOON, |pool| {
                pool.machines.iter().any(|one| one.state == "idle")
            });
            let begun = Instant::now();
            let id = bed.client.submit(&job("true", 1));
            bed.client.reached(&id, &["Running", "Completed"]);
            begun.elapsed()
        })
        .into_iter()
        .for_each(|warm| tally.note(format!("with one: {:.2} s", warm.as_secs_f64())));
}

fn slurm_burst(tally: &mut Tally, _: &Scale) {
    let cluster = slurm::Cluster::start(
        tempfile::Builder::new().prefix("pools-").tempdir().expect("a directory").keep(),
    );
    let lab = cluster.config_of("partition: all, node: {slots: 1, cpus: 1}");
    let bed = Bed::with(|_| format!("lab: {lab}\n"));
    let pool = Pool::make(&bed, 2, Duration::from_secs(3));
    let first = tally.case("six jobs on two nodes of Slurm", || {
        let (first, most) = flood(&pool, &vec![job("sleep 1; echo done", 1); 6]);
        assert_eq!(most, 2);
        first
    });
    first.into_iter().for_each(|first| {
        tally.note(format!("submit to start from no machine: {:.1} s", first.as_secs_f64()))
    });
}

fn race(tally: &mut Tally, scale: &Scale) {
    let bed = farm("node: {slots: 1}");
    let idle = Duration::from_secs(1);
    let pool = Pool::make(&bed, 1, idle);
    let mut chance = scale.chance();
    let tries = scale.of(6, 200);
    let (mut complaints, mut made) = (Vec::new(), 0);
    for attempt in 0..tries {
        let id = bed.client.submit(&job("true", 1));
        let job = bed.client.ended(&id);
        if (job.state.as_str(), job.epoch) != ("Completed", 1) {
            complaints.push(format!("{attempt}: {} as attempt {}: {}", job.state, job.epoch, job.detail));
        }
        made = calls(&bed, "delete");
        // Around the moment at which the machine is asked to leave, and while it does.
        std::thread::sleep(idle.mul_f64(0.6) + Duration::from_millis(chance.below(2600)));
    }
    tally.count(tries, "jobs that come while the machine goes", &complaints);
    tally.note(format!("{made} machines went between them"));
    pool.empties();
}

fn moods(tally: &mut Tally, _: &Scale) {
    let bed = farm("node: {slots: 1}, deadlines: {create: 3s, delete: 3s, join: 8s}");
    let pool = Pool::make(&bed, 2, Duration::from_secs(1));
    let calm = |tally: &mut Tally, name: &str, case: &dyn Fn()| {
        tally.case(name, || {
            case();
            set_mood(&bed, "");
            eventually("no job is active", SOON, || bed.client.jobs(true).ok()?.is_empty().then_some(()));
            pool.set(v1::SetPoolRequest::default()).expect("a change, which ends a wait");
            pool.empties();
        });
    };
    let begins = || bed.client.submit(&job("echo done", 1));
    let well = |id: &str| assert_eq!(bed.client.ended(id).state, "Completed");
    calm(tally, "no quota: the job says why it waits, and runs when there is some", &|| {
        set_mood(&bed, "quota");
        let id = begins();
        let told = eventually("the job says so", SOON, || {
            Some(bed.client.job(&id).detail)
                .filter(|detail| detail.contains("no more machines of this kind today"))
        });
        assert!(told.contains("cannot be made by lab") && told.contains("tried again at"), "{told}");
        assert_eq!(pool.machines().len(), 1, "one is tried, not all that could be");
        set_mood(&bed, "");
        well(&id);
    });
    calm(tally, "an answer that never comes: the same machine is found when it is asked again", &|| {
        set_mood(&bed, "late");
        let id = begins();
        pool.becomes("its provider is late", SOON, |pool| pool.failure.is_some());
        set_mood(&bed, "");
        well(&id);
        assert_eq!(bed.machines(), 1, "no second one was made");
    });
    calm(tally, "an answer that is none: likewise", &|| {
        set_mood(&bed, "garbage");
        let id = begins();
        let pool = pool.becomes("its provider fails", SOON, |pool| pool.failure.is_some());
        assert!(pool.failure.expect("a failure").what.contains("is not understood"));
        set_mood(&bed, "");
        well(&id);
    });
    blind_and_stubborn(tally, &calm, &bed, &pool);
    calm(tally, "two for one: the second is told of, and left alone", &|| {
        set_mood(&bed, "twice");
        let id = begins();
        well(&id);
        set_mood(&bed, "");
        pool.becomes("the second one is told of", SOON, |pool| {
            pool.orphans.iter().any(|orphan| orphan.starts_with("second-"))
        });
        eventually("only the second one is left", SOON, || (bed.machines() == 1).then_some(()));
        let second = fs::read_dir(bed.path("machines")).expect("machines").flatten().next();
        let second = second.expect("the second one").file_name().into_string().expect("a name");
        let owner = bed.provider(&farm_at(&bed.path(""), "node: {slots: 1}"));
        owner.delete(&second).expect("its owner removes it");
    });
    calm(tally, "a list that forgets: a machine that answers stays", &|| {
        let id = bed.client.submit(&job("sleep 12; echo done", 1));
        bed.client.reached(&id, &["Running"]);
        set_mood(&bed, "forget");
        assert_eq!((bed.client.ended(&id).state.as_str(), bed.client.job(&id).epoch), ("Completed", 1));
    });
    calm(tally, "a machine that never joins is removed and told of, and another is tried", &|| {
        set_mood(&bed, "dead");
        let id = begins();
        let pool = pool.becomes("it is told of", SOON, |pool| pool.failure.is_some());
        assert!(pool.failure.expect("a failure").what.contains("did not join within"));
        set_mood(&bed, "");
        well(&id);
    });
    calm(tally, "a machine that cannot be removed is tried again", &|| {
        let id = begins();
        well(&id);
        set_mood(&bed, "stubborn");
        pool.becomes("its provider fails", SOON, |pool| {
            pool.failure.as_ref().is_some_and(|failure| failure.what.contains("it does not want to go"))
        });
    });
}

#[allow(clippy::disallowed_methods, reason = "types what people type")]
fn care(tally: &mut Tally, _: &Scale) {
    let mut bed = farm("node: {slots: 1}");
    tally.case("a name that is none, a provider that is none, bounds that are none", || {
        let pool = Pool { bed: &bed };
        let refused = |request: v1::SetPoolRequest, why: &str| {
            let status = pool.set(request).expect_err("it is refused");
            assert!(format!("{status:?}").contains(why), "{status:?}");
        };
        let new = || v1::SetPoolRequest {
            create: true,
            provider: Some("lab".to_owned()),
            ..v1::SetPoolRequest::default()
        };
        refused(v1::SetPoolRequest { name: "a".to_owned(), ..new() }, "3 to 24 letters");
        refused(v1::SetPoolRequest { provider: Some("none".to_owned()), ..new() }, "there is no provider");
        refused(v1::SetPoolRequest { min: Some(3), max: Some(2), ..new() }, "at most 2");
        refused(v1::SetPoolRequest { create: false, ..new() }, "there is no pool");
    });
    tally.case("a job that names no pool that is there is told so, or refused", || {
        let draft = JobDraft { compute: Some("cpu".to_owned()), ..job("true", 1) };
        let id = bed.client.submit(&draft);
        bed.client.cancel(&id).expect("it ends");
        let pool = Pool::make(&bed, 1, Duration::from_secs(1));
        let refused = bed.client.try_submit("r", &draft).expect_err("it is refused");
        assert!(format!("{refused:?}").contains("there are: gpu"), "{refused:?}");
        pool.empties();
    });
    tally.case("the controller is killed while a machine is made, and makes no second one", || {
        let tries = calls(&bed, "create");
        set_mood(&bed, "late asleep");
        let id = bed.client.submit(&job("echo done", 1));
        eventually("a machine is made", SOON, || (bed.machines() == 1).then_some(()));
        set_mood(&bed, "asleep");
        bed.controller.bounce();
        eventually("it is tried again", SOON, || (calls(&bed, "create") >= tries + 2).then_some(()));
        // It shows the token of the first try.
        set_mood(&bed, "");
        assert_eq!(bed.client.ended(&id).state, "Completed");
        assert_eq!(bed.machines(), 1);
        Pool { bed: &bed }.empties();
    });
    made_and_failed(tally, &bed);
    typed(tally, &bed);
    tally.case("a pool that is removed lets its jobs end first", || {
        let id = bed.client.submit(&job("sleep 5; echo done", 1));
        bed.client.reached(&id, &["Running"]);
        let pool = Pool { bed: &bed };
        let request = v1::DeletePoolRequest { name: "gpu".to_owned() };
        let left = pool.call(async move |mut client| client.delete(request).await).expect("it goes").machines;
        assert_eq!(left.len(), 1);
        assert_eq!(bed.client.ended(&id).state, "Completed");
        eventually("the pool is gone", SOON, || pool.show().is_none().then_some(()));
        assert_eq!(bed.machines(), 0);
    });
}

/// The provider says that it failed after it made the machine.
fn made_and_failed(tally: &mut Tally, bed: &Bed) {
    tally.case(
        "an error after the machine was made: the job that runs there meanwhile comes to its end",
        || {
            set_mood(bed, "fails-after");
            let id = bed.client.submit(&job("sleep 15; echo done", 1));
            bed.client.reached(&id, &["Running"]);
            let pool = Pool { bed };
            pool.becomes("its provider fails", SOON, |pool| pool.failure.is_some());
            set_mood(bed, "");
            assert_eq!((bed.client.ended(&id).state.as_str(), bed.client.job(&id).epoch), ("Completed", 1));
            pool.set(v1::SetPoolRequest::default()).expect("a change, which ends a wait");
            pool.empties();
        },
    );
}

#[allow(clippy::disallowed_methods, reason = "types what people type")]
fn typed(tally: &mut Tally, bed: &Bed) {
    tally.case("what people type", || {
        let said = |words: &[&str]| {
            let mut command = Command::new(binaries().join("agentctl"));
            finish(command.arg("--socket").arg(bed.controller.socket()).args(words))
        };
        said(&["pool", "delete", "gpu"]).ok();
        said(&["pool", "create", "gpu", "--provider", "lab", "--max", "2", "--idle", "1s"]).ok().says("gpu");
        said(&["pool", "create", "gpu", "--provider", "lab"]).code(1).says("agentctl pool set gpu");
        said(&["pool", "set", "gpu", "--min", "1", "--label", "rack=7"]).ok();
        said(&["pool", "wait", "gpu", "--min-nodes", "1", "--timeout", "2m"]).ok();
        let shown = said(&["pool", "show", "gpu", "--json"]).ok().json();
        assert_eq!(shown["nodeStateCounts"]["idleNodeCount"], 1, "{shown}");
        assert_eq!(
            (&shown["currentNodeCount"], &shown["targetNodeCount"]),
            (&1.into(), &1.into()),
            "{shown}"
        );
        assert_eq!(shown["scaleSettings"]["nodeIdleTimeBeforeScaleDown"], "PT1S");
        assert_eq!(
            (&shown["allocationState"], &shown["vmPriority"]),
            (&"Steady".into(), &"Dedicated".into())
        );
        let labels = bed.client.nodes().expect("nodes").remove(0).labels;
        assert_eq!((labels["pool"].as_str(), labels["rack"].as_str()), ("gpu", "7"));
        let listed = said(&["pool", "list"]).ok();
        assert!(listed.stdout.contains("gpu") && listed.stdout.contains("lab"), "{listed:?}");
        said(&["pool", "set", "gpu", "--min", "0"]).ok();
        said(&["pool", "show", "none"]).code(1).says("there is no pool `none`");
    });
}

/// Runs a case, after which nothing is left of it.
type Calm<'a> = dyn Fn(&mut Tally, &str, &dyn Fn()) + 'a;

/// A provider that cannot list its machines, and one that cannot remove them.
fn blind_and_stubborn(tally: &mut Tally, calm: &Calm<'_>, bed: &Bed, pool: &Pool<'_>) {
    calm(tally, "machines that cannot be listed: the pool says so", &|| {
        set_mood(bed, "blind");
        let id = bed.client.submit(&job("echo done", 1));
        assert_eq!(bed.client.ended(&id).state, "Completed");
        let pool = pool.becomes("it is told", 2 * SOON, |pool| {
            pool.failure.as_ref().is_some_and(|failure| failure.what.contains("cannot be listed"))
        });
        assert!(pool.failure.expect("a failure").again_ms > 0);
    });
    calm(tally, "a machine that cannot be removed delays no new one", &|| {
        let id = bed.client.submit(&job("echo done", 1));
        assert_eq!(bed.client.ended(&id).state, "Completed");
        set_mood(bed, "stubborn");
        pool.becomes("it is not removed", SOON, |pool| {
            pool.failure.as_ref().is_some_and(|failure| failure.what.contains("it does not want to go"))
        });
        let id = bed.client.submit(&job("echo done", 1));
        assert_eq!(bed.client.ended(&id).state, "Completed");
    });
}
