//! Group I, images from a registry: fetched once, whoever asks, and what keeps one from coming is told.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use agent_tests::engine::Engine;
use agent_tests::images::{Image, Root};
use agent_tests::registry::{Manner, Registry};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};

use crate::containers::site::{Site, Wish};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "I1", promise: "five jobs share one pull, and a later job asks nobody", run: shared },
    Row { id: "I2", promise: "an image that was removed by hand is fetched again", run: removed },
    Row { id: "I3", promise: "credentials of a registry come from a file and go nowhere else", run: private },
    Row { id: "I4", promise: "an image that is not there, or is damaged, is told in words", run: wrong },
    Row { id: "I5", promise: "a pull that stands still goes on when the registry does", run: stalled },
    Row {
        id: "I6",
        promise: "a job that is canceled during a pull ends at once, and the pull with it",
        run: canceled,
    },
];

/// A registry with an image that has a shell, and a box beside it.
struct Beside {
    site: Site,
    registry: Registry,
    image: String,
    _unused: Unused,
}

/// Takes the image out of the engine at the end.
struct Unused(agent_tests::docker::Docker, String);

impl Drop for Unused {
    fn drop(&mut self) {
        self.0.remove_image(&self.1);
    }
}

impl Beside {
    /// Not yet running; `name` is of this test alone, so that nobody else has its image. Each layer is another one each
    /// time, for an engine fetches none twice.
    fn new(name: &str) -> Beside {
        let (registry, docker) = (Registry::start(), Engine::shared());
        let archive = fs::read(Image::Busybox.archive()).expect("an archive");
        let mut filler = Root::new();
        let mut noise = agent_tests::chance::Chance::new(agent_tests::chance::Chance::seed());
        let bytes: Vec<u8> = (0..250_000).flat_map(|_| noise.number().to_le_bytes()).collect();
        filler.file("filler", 0o644, &bytes);
        registry.put(&format!("{name}:1"), vec![archive, filler.finish()], &["PATH=/bin"]);
        let image = registry.name(&format!("{name}:1"));
        let unused = Unused(docker.clone(), image.clone());
        Beside { site: Site::beside(&docker), registry, image, _unused: unused }
    }

    fn started(name: &str) -> Beside {
        let mut beside = Beside::new(name);
        beside.site.host.start();
        beside
    }

    fn environment(&self) -> String {
        format!("{{image: '{}'}}", self.image)
    }

    #[track_caller]
    fn submit(&self, more: &str) -> String {
        let environment = self.environment();
        self.site
            .submit("p", &Wish { environment: &environment, command: "echo here", more, ..Wish::default() })
    }

    /// How often the large layer was asked for, or begun anew.
    fn layers(&self) -> u64 {
        self.registry.requests("/blobs/")
    }
}

/// What is nobody's fault is tried again.
const RETRY: &str = "retry: {max_attempts: 5, backoff: 1}";

fn shared(tally: &mut Tally, _: &Scale) {
    let beside = Beside::started("shared");
    tally.case("five at once", || {
        beside.registry.set(Manner::Slow(700_000));
        let jobs: Vec<String> = (0..5).map(|_| beside.submit("")).collect();
        eventually("the pull is under way", SOON, || (beside.layers() > 0).then_some(()));
        // Who looks sees how far it is.
        eventually("its progress is told", SOON, || {
            let shown = beside.site.host.show(&jobs[0]);
            let detail = shown["detail"].as_str().unwrap_or_default().to_owned();
            (detail.contains("MB") || shown["state"] == "Completed").then_some(())
        });
        jobs.iter().for_each(|job| beside.site.completed(job));
        let asked = beside.registry.asked();
        let twice: Vec<_> =
            asked.iter().filter(|(path, count)| path.contains("/blobs/") && **count > 1).collect();
        assert!(twice.is_empty(), "fetched more than once: {twice:?}");
    });
    tally.case("and one later", || {
        beside.registry.clear();
        let job = beside.submit("");
        beside.site.completed(&job);
        assert_eq!(beside.layers(), 0, "{:?}", beside.registry.asked());
        assert_eq!(beside.site.log(&job), b"here\n");
    });
    tally.case("one later while the registry is away", || {
        beside.registry.set(Manner::Broken);
        beside.site.completed(&beside.submit(""));
    });
}

fn removed(tally: &mut Tally, _: &Scale) {
    let beside = Beside::started("removed");
    tally.case("removed between two jobs", || {
        beside.site.completed(&beside.submit(""));
        beside.site.nothing_left();
        beside.site.docker.remove_image(&beside.image);
        beside.site.completed(&beside.submit(""));
        assert!(beside.site.docker.image(&beside.image).is_some());
    });
}

fn private(tally: &mut Tally, _: &Scale) {
    const PASSWORD: &str = "registry-secret";
    tally.case("without credentials", || {
        let beside = Beside::started("closed");
        beside.registry.set(Manner::Private("reader".into(), PASSWORD.into()));
        let job = beside.submit("");
        assert_eq!(beside.site.ended(&job), "Failed");
        assert_eq!(beside.site.host.show(&job)["fault"]["code"], "ENV-112", "{}", beside.site.why(&job));
    });
    tally.case("with them", || {
        let mut beside = Beside::new("opened");
        beside.registry.set(Manner::Private("reader".into(), PASSWORD.into()));
        let file = tempfile::NamedTempFile::new().expect("a file");
        let auth = "cmVhZGVyOnJlZ2lzdHJ5LXNlY3JldA=="; // reader:registry-secret
        let text = format!("{{\"auths\": {{\"{}\": {{\"auth\": \"{auth}\"}}}}}}", beside.registry.host());
        fs::write(file.path(), text).expect("a file");
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o600)).expect("a mode");
        beside.site.host.set("AGENTD_DOCKER_CREDENTIALS", file.path().to_str().expect("UTF-8"));
        beside.site.host.start();
        let job = beside.submit("");
        beside.site.completed(&job);
        let found = holding(beside.site.host.home(), &[PASSWORD, auth]);
        assert!(found.is_empty(), "the secret is in {found:?}");
    });
}

/// The files below a directory that hold one of these texts.
fn holding(dir: &std::path::Path, texts: &[&str]) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let (path, kind) = (entry.path(), entry.file_type());
        match kind {
            Ok(kind) if kind.is_dir() => found.extend(holding(&path, texts)),
            Ok(kind) if kind.is_file() => {
                let bytes = fs::read(&path).unwrap_or_default();
                let holds = |text: &&str| bytes.windows(text.len()).any(|part| part == text.as_bytes());
                found.extend(texts.iter().any(holds).then_some(path));
            }
            _ => {}
        }
    }
    found
}

fn wrong(tally: &mut Tally, _: &Scale) {
    let beside = Beside::started("wrong");
    let run = |image: &str| {
        let environment = format!("{{image: '{image}'}}");
        let job =
            beside.site.submit("w", &Wish { environment: &environment, command: "true", ..Wish::default() });
        (job.clone(), beside.site.ended(&job))
    };
    tally.case("a name without an image", || {
        let (job, state) = run(&beside.registry.name("wrong:nowhere"));
        assert_eq!(state, "Failed");
        let why = beside.site.why(&job);
        assert!(why.contains("wrong:nowhere") && why.contains("ENV-"), "{why}");
    });
    tally.case("a name that is none", || {
        let dir = beside
            .site
            .job("n", &Wish { environment: "{image: 'No Such Image'}", command: "true", ..Wish::default() });
        let ran = beside.site.host.ctl(&["run", dir.to_str().expect("UTF-8")]);
        assert_ne!(ran.code, 0);
        ran.says("No Such Image");
    });
    tally.case("layers that are damaged on their way, then whole", || {
        beside.registry.set(Manner::Damaged);
        let job = beside.submit(RETRY);
        eventually("the damage is told", SOON, || beside.site.why(&job).contains("ENV-10").then_some(()));
        beside.registry.set(Manner::Plain);
        beside.site.completed(&job);
    });
    tally.case("a registry that is broken, then whole", || {
        let other = Beside::started("broken");
        other.registry.set(Manner::Broken);
        let job = other.submit(RETRY);
        eventually("it is told", SOON, || other.site.why(&job).contains("ENV-106").then_some(()));
        other.registry.set(Manner::Plain);
        other.site.completed(&job);
    });
}

fn stalled(tally: &mut Tally, _: &Scale) {
    let beside = Beside::started("stalled");
    tally.case("half of a layer, and then nothing for a while", || {
        beside.registry.set(Manner::Stalling(600_000));
        let job = beside.submit(RETRY);
        eventually("the pull is under way", SOON, || (beside.layers() > 1).then_some(()));
        std::thread::sleep(std::time::Duration::from_secs(5));
        let state = beside.site.host.job_state(&job);
        assert!(["Preparing", "Queued"].contains(&state.as_str()), "{state}");
        beside.registry.set(Manner::Plain);
        beside.site.completed(&job);
    });
}

fn canceled(tally: &mut Tally, _: &Scale) {
    let beside = Beside::started("canceled");
    tally.case("canceled while the registry stands still", || {
        beside.registry.set(Manner::Stalling(600_000));
        let job = beside.submit("");
        eventually("the pull is under way", SOON, || (beside.layers() > 1).then_some(()));
        beside.site.host.ctl(&["cancel", &job]).ok();
        assert_eq!(beside.site.ended(&job), "Canceled");
        beside.registry.set(Manner::Plain);
        beside.site.completed(&beside.submit(""));
    });
}
