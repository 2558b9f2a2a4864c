//! Group A, machines that are taken away: in each step of a job, each kind of notice, by each kind of provider.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use agent_model::job::RetryPolicy;
use agent_model::{EnvSpec, JobDraft};
use agent_proto::v1;
use agent_tests::fleet::{Fleet, Setup};
use agent_tests::metadata::{Metadata, Provider};
use agent_tests::{SOON, eventually, signal};
use rustix::process::Signal;

use agent_tests::table::{Row, Scale, Tally};

/// The rows of this module.
pub(crate) const ROWS: &[Row] = &[Row {
    id: "A17",
    promise: "a machine that is taken away costs no attempt: the job is told, stored and queued again, with that reason",
    run: taken,
}];

/// Where the job is when the notice comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Its environment is being built, with an interpreter that hangs.
    Building,
    /// Its command runs, and stores its state when it is told.
    Running,
    /// Its command runs, and ignores the signal.
    Stubborn,
    /// Its command has ended, and its outputs are being stored.
    Storing,
}

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The machine goes when it was said, and does not come back.
    Goes,
    /// It goes long before that, as soon as the job was told.
    GoesEarly,
    /// It stays: the notice is withdrawn.
    Withdrawn,
    /// It goes without a word, and is started again.
    NoNotice,
    /// The daemon is killed and started again as soon as there is the notice; then it goes as was said.
    Restarted,
}

const STEPS: [Step; 4] = [Step::Building, Step::Running, Step::Stubborn, Step::Storing];
const KINDS: [Kind; 5] = [Kind::Goes, Kind::GoesEarly, Kind::Withdrawn, Kind::NoNotice, Kind::Restarted];

/// How long the machines of Azure and AWS have.
const NOTICE: Duration = Duration::from_secs(8);

fn taken(tally: &mut Tally, scale: &Scale) {
    let mut providers = Provider::ALL.into_iter().cycle();
    for kind in KINDS {
        for step in STEPS {
            // A merge tries each step once, and each kind; all of it is each with each, five times.
            let first = STEPS[KINDS.iter().position(|one| *one == kind).unwrap_or(0) % STEPS.len()];
            let times = if step == first { scale.of(1, 5) } else { scale.of(0, 5) };
            for _ in 0..times {
                let provider = providers.next().unwrap_or(Provider::Azure);
                let name = format!("{kind:?} while {step:?}, {}", provider.name());
                if let Some(told) = tally.case(&name, || one(provider, kind, step)) {
                    tally.note(format!("{name}: {told}"));
                }
            }
        }
    }
}

/// A fleet whose first machine has a provider.
struct Bed {
    fleet: Fleet,
    metadata: Metadata,
    job: String,
}

impl Bed {
    fn new(provider: Provider, step: Step, kind: Kind) -> Bed {
        let metadata = Metadata::start(provider);
        let mut fleet = Fleet::new(&Setup { nodes: 2, slots: 1, ..Setup::default() });
        fleet.nodes[0].configure(&metadata.configuration());
        if step == Step::Storing {
            fleet.nodes[0].set("AGENTD_FAILPOINTS", "node.outputs.collect=delay:5000");
        }
        fleet.start();
        fleet.client.set_eligibility("n1", "cordon").expect("an answer");
        let mut bed = Bed { fleet, metadata, job: String::new() };
        bed.job = bed.fleet.client.submit(&bed.draft(step, kind));
        bed
    }

    fn file(&self, name: &str) -> PathBuf {
        self.fleet.home().join(name)
    }

    /// A job whose second attempt loses its supervisor, and whose third completes. It has two attempts that count: the
    /// third is there only if the one that its machine took did not count. Where an environment is built, which may
    /// have to be done for each attempt, the second completes.
    fn draft(&self, step: Step, kind: Kind) -> JobDraft {
        let [again, lost] = ["again", "lost"].map(|name| self.file(name).display().to_string());
        let trap = match step {
            Step::Stubborn => "trap '' TERM".to_owned(),
            _ => {
                let save = "cat \"$AGENTD_PREEMPTION_FILE\"; echo saved; echo state > outputs/state; exit 0";
                format!("trap '{save}' TERM")
            }
        };
        let waits = match step {
            Step::Storing => "exit 0",
            _ => "while :; do echo works; sleep 0.1; done",
        };
        let command = format!(
            "[ ! -e {lost} ] || exit 0; [ ! -e {again} ] || {{ touch {lost}; kill -9 $PPID; sleep 60; }}; \
             {trap}; echo first > outputs/first; test ! -e \"$AGENTD_PREEMPTION_FILE\" || exit 9; \
             touch {again}; {waits}"
        );
        let environment = match step {
            Step::Building => {
                EnvSpec::Pip { python: self.hanging_python().display().to_string(), requirements: Vec::new() }
            }
            _ => EnvSpec::host(),
        };
        let retry = match kind {
            Kind::NoNotice => RetryPolicy::default(),
            _ => RetryPolicy { max_attempts: 2, backoff: Duration::from_millis(100) },
        };
        JobDraft { command, environment, retry, ..JobDraft::default() }
    }

    /// An interpreter that hangs when it is called first.
    fn hanging_python(&self) -> PathBuf {
        let (python, hung) = (self.file("python"), self.file("hung"));
        let script = format!(
            "#!/bin/sh\n[ -e {0} ] || {{ touch {0}; sleep 1000; }}\nexec python3 \"$@\"\n",
            hung.display()
        );
        fs::write(&python, script).expect("a program");
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).expect("a program");
        python
    }

    /// Until the job is where it should be.
    fn arrive(&self, step: Step) {
        match step {
            Step::Building => {
                self.has("Building");
                // The next attempt need not wait.
                ["again", "lost"].iter().for_each(|name| fs::write(self.file(name), "").expect("a file"));
            }
            Step::Storing => self.has("Uploading"),
            Step::Running | Step::Stubborn => {
                eventually("the command runs", SOON, || self.file("again").exists().then_some(()));
                std::thread::sleep(Duration::from_millis(300)); // until the shell has said something
            }
        }
    }

    fn has(&self, step: &str) {
        eventually("the job is in that step", SOON, || {
            let job = self.fleet.client.job(&self.job);
            job.replicas.iter().any(|replica| replica.step == step).then_some(())
        });
    }

    fn told(&self, words: &str) -> bool {
        self.fleet.client.history(&self.job).iter().any(|event| event.text.contains(words))
    }

    fn notice(&self) -> Option<v1::Preemption> {
        let nodes = self.fleet.client.nodes().ok()?;
        nodes.into_iter().find(|node| node.node == "n0")?.preemption
    }

    /// Every process of the machine is gone, at once.
    fn cut_power(&mut self) {
        let node = &mut self.fleet.nodes[0];
        node.kill();
        eventually("every process is gone", SOON, || {
            let left = node.processes();
            left.iter().for_each(|pid| signal(*pid, Signal::KILL));
            left.is_empty().then_some(())
        });
    }
}

fn one(provider: Provider, kind: Kind, step: Step) -> String {
    let mut bed = Bed::new(provider, step, kind);
    bed.arrive(step);
    if kind == Kind::NoNotice {
        return cut(bed, step);
    }
    let begun = Instant::now();
    bed.metadata.preempt(NOTICE);
    let notice = eventually("the controller knows", SOON, || bed.notice());
    let known = begun.elapsed();
    let next = bed.fleet.client.run("true");
    bed.fleet.client.set_eligibility("n1", "uncordon").expect("an answer");
    match kind {
        Kind::Withdrawn => {
            eventually("the job is told", SOON, || {
                (step == Step::Storing || bed.told("NODE-111")).then_some(())
            });
            bed.metadata.withdraw();
            eventually("the machine is put back", SOON, || bed.notice().is_none().then_some(()));
        }
        Kind::GoesEarly => {
            // One whose command has ended is not told, and one that ends at once is over before it is known to end.
            let told = || bed.told("ends, because n0 will be taken away") || bed.told("NODE-111");
            eventually("the job is told", SOON, || (step == Step::Storing || told()).then_some(()));
            bed.cut_power();
        }
        Kind::Goes | Kind::Restarted => {
            if kind == Kind::Restarted {
                bed.fleet.nodes[0].set("AGENTD_FAILPOINTS", ""); // what was being stored has been held up enough
                bed.fleet.nodes[0].bounce();
            }
            let left = notice.deadline_ms.saturating_sub(now());
            std::thread::sleep(Duration::from_millis(left));
            bed.cut_power();
        }
        Kind::NoNotice => {}
    }
    let ended = bed.fleet.client.ended(&bed.job);
    assert_eq!(bed.fleet.client.ended(&next).state, "Completed");
    assert_eq!(ended.state, "Completed", "{ended:?}");
    judge(&bed, kind, step, &ended);
    assert!(bed.metadata.refused().is_empty(), "{:?}", bed.metadata.refused());
    format!("known to the controller after {:.1} s", known.as_secs_f64())
}

/// What must hold in the end.
fn judge(bed: &Bed, kind: Kind, step: Step, ended: &v1::Job) {
    let history: Vec<String> =
        bed.fleet.client.history(&bed.job).into_iter().map(|event| event.text).collect();
    if step == Step::Storing && kind != Kind::GoesEarly {
        // It had ended, and what it left was stored in time.
        assert_eq!(ended.epoch, 1, "{history:#?}");
        return;
    }
    assert_eq!(ended.epoch, if step == Step::Building { 2 } else { 3 }, "{history:#?}");
    assert!(bed.told("NODE-111") && bed.told("will be taken away at"), "{history:#?}");
    let wrong = ["NODE-102", "NODE-103", "RUN-103", "RUN-101"];
    assert!(!wrong.iter().any(|code| bed.told(code)), "{history:#?}");
    // Whatever had time to be stored is: the command has ended before its machine, and its last words are there.
    if step == Step::Running && kind != Kind::GoesEarly {
        let log = bed.fleet.client.try_log(&bed.job, 1, "job").expect("a log");
        let log = String::from_utf8_lossy(&log).into_owned();
        assert!(log.contains("\"deadline\"") && log.trim_end().ends_with("saved"), "{log}");
        assert!(history.iter().any(|text| text.starts_with("stored 2 files")), "{history:#?}");
    }
}

/// A machine that goes without a word, and is started again: what it did is lost, and nobody says that it was taken.
fn cut(mut bed: Bed, step: Step) -> String {
    bed.cut_power();
    bed.fleet.nodes[0].set("AGENTD_FAILPOINTS", "");
    bed.fleet.nodes[0].reboot("00000000-0000-4000-8000-000000000017");
    bed.fleet.nodes[0].spawn();
    let ended = bed.fleet.client.ended(&bed.job);
    let fault = ended.outcome.as_ref().and_then(|outcome| outcome.fault.as_ref());
    let code = fault.map(|fault| fault.code.as_str()).unwrap_or_default();
    match step {
        // It had ended, and its directory outlived that.
        Step::Storing => assert_eq!(ended.state, "Completed", "{ended:?}"),
        _ => assert_eq!((ended.state.as_str(), code), ("Failed", "NODE-103"), "{ended:?}"),
    }
    assert!(!bed.told("NODE-111"));
    let log = fs::read_to_string(bed.fleet.home().join("n0/agentd.log")).unwrap_or_default();
    assert!(!log.contains("this machine goes"), "{log}");
    format!("{} {code}", ended.state)
}

fn now() -> u64 {
    use agent_model::Clock as _;
    agent_model::SystemClock.now().0
}
