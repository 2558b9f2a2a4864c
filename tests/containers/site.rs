//! A box beside an engine, and jobs that run in its images.
//!
//! A [`Site`] leaves nothing: first its daemon and its jobs end, then the containers that saw anything of its home
//! are removed from the engine, whatever the product thought of them.

use std::fs;
use std::path::{Path, PathBuf};

use agent_tests::docker::{Container, Docker};
use agent_tests::engine::Engine;
use agent_tests::images::Image;
use agent_tests::{Host, Ran, SOON, eventually};
use serde_json::Value;

/// The states a job ends in.
pub(crate) const ENDED: [&str; 3] = ["Completed", "Failed", "Canceled"];

/// A box and its engine.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) host: Host,
    pub(crate) docker: Docker,
    _sweeper: Sweeper,
}

/// Removes the containers of a home at its end.
#[derive(Debug)]
struct Sweeper {
    docker: Docker,
    home: PathBuf,
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        if self.docker.answers() {
            let left = self.docker.containers_of(&self.home);
            left.iter().for_each(|container| self.docker.remove(&container.id));
        }
    }
}

/// How a job is asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wish<'a> {
    /// What stands in the job file after `environment: `.
    pub(crate) environment: &'a str,
    /// The command.
    pub(crate) command: &'a str,
    /// More lines of the job file.
    pub(crate) more: &'a str,
    /// More files of the code directory.
    pub(crate) files: &'a [(&'a str, &'a str)],
}

/// The environment that is the image with tools.
pub(crate) const BUSYBOX: &str = "{image: 'agentd-test/busybox:1'}";

/// The environment that is the image with Python.
pub(crate) const PYTHON: &str = "{image: 'agentd-test/python:1'}";

impl Site {
    /// A box beside the engine that all share, with every image, running.
    pub(crate) fn started() -> Site {
        let docker = Engine::shared();
        for image in [Image::Busybox, Image::Scratch, Image::Python] {
            image.on(&docker);
        }
        let mut site = Site::beside(&docker);
        site.host.start();
        site
    }

    /// A box beside an engine, not yet running.
    pub(crate) fn beside(docker: &Docker) -> Site {
        let mut host = Host::new();
        host.set("AGENTD_DOCKER_SOCKET", docker.socket().to_str().expect("UTF-8"));
        host.set("AGENTD_SLOTS", "8");
        let _sweeper = Sweeper { docker: docker.clone(), home: host.home().to_owned() };
        Site { host, docker: docker.clone(), _sweeper }
    }

    /// Writes the directory of a job.
    pub(crate) fn job(&self, name: &str, wish: &Wish<'_>) -> PathBuf {
        let (command, more) = (Value::from(wish.command), wish.more);
        let job = format!("command: {command}\ncode: .\nenvironment: {}\n{more}\n", wish.environment);
        let files: Vec<(&str, &str)> =
            wish.files.iter().copied().chain([("job.yml", job.as_str())]).collect();
        self.host.project(name, &files)
    }

    /// Submits such a job and gives its name.
    #[track_caller]
    pub(crate) fn submit(&self, name: &str, wish: &Wish<'_>) -> String {
        let dir = self.job(name, wish);
        self.host.ctl(&["submit", dir.to_str().expect("UTF-8")]).ok().stdout.trim().to_owned()
    }

    /// Runs such a job to its end.
    pub(crate) fn run(&self, name: &str, wish: &Wish<'_>) -> Ran {
        let dir = self.job(name, wish);
        self.host.ctl(&["run", dir.to_str().expect("UTF-8")])
    }

    /// Runs a command in the image with tools; what it printed.
    #[track_caller]
    pub(crate) fn says(&self, name: &str, command: &str, more: &str) -> String {
        let wish = Wish { environment: BUSYBOX, command, more, ..Wish::default() };
        self.run(name, &wish).ok().stdout
    }

    /// Waits for the end of a job and gives its state.
    #[track_caller]
    pub(crate) fn ended(&self, job: &str) -> String {
        self.host.wait_for(job, &ENDED)
    }

    /// Waits for the end of a job, which must be good.
    #[track_caller]
    pub(crate) fn completed(&self, job: &str) {
        let state = self.ended(job);
        assert_eq!(state, "Completed", "{}", self.why(job));
    }

    /// Waits until a job runs, in the container that is given.
    #[track_caller]
    pub(crate) fn running(&self, job: &str) -> Container {
        let state = self.host.wait_for(job, &["Running", "Completed", "Failed", "Canceled"]);
        assert_eq!(state, "Running", "{}", self.why(job));
        eventually("the engine has a container for the job", SOON, || self.containers(job).into_iter().next())
    }

    /// The containers of a job: those that see its directory.
    pub(crate) fn containers(&self, job: &str) -> Vec<Container> {
        let of_job = |one: &Container| one.labels.values().chain([&one.name]).any(|text| text.contains(job));
        self.docker.containers_of(self.host.home()).into_iter().filter(of_job).collect()
    }

    /// Waits until the engine has no container of this box.
    #[track_caller]
    pub(crate) fn nothing_left(&self) {
        let mut left = Vec::new();
        eventually("no container is left", SOON, || {
            left = self.docker.containers_of(self.host.home());
            left.is_empty().then_some(())
        });
    }

    /// The log of a job, byte for byte.
    #[track_caller]
    pub(crate) fn log(&self, job: &str) -> Vec<u8> {
        let said = self.host.client(&["logs", job]).output().expect("agentctl starts");
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        said.stdout
    }

    /// The whole story of a job.
    pub(crate) fn why(&self, job: &str) -> String {
        let ran = self.host.ctl(&["why", job]);
        format!("{}{}", ran.stdout, ran.stderr)
    }

    /// Why a job waits, once it says so with these words.
    #[track_caller]
    pub(crate) fn waits_for(&self, job: &str, words: &str) {
        eventually(&format!("the reason `{words}`"), SOON, || {
            let shown = self.host.show(job);
            assert!(!ENDED.contains(&shown["state"].as_str()?), "it ended: {}", self.why(job));
            shown["detail"].as_str()?.to_lowercase().contains(&words.to_lowercase()).then_some(())
        });
    }

    /// What a job kept below `./outputs`, by path.
    #[track_caller]
    pub(crate) fn outputs(&self, job: &str) -> Vec<(PathBuf, Vec<u8>)> {
        let to = self.host.home().join(format!("down-{job}"));
        self.host.ctl(&["download", job, "-o", to.to_str().expect("UTF-8")]).ok();
        let mut found = Vec::new();
        walk(&to, &to, &mut found);
        found.sort();
        found
    }

    /// The name of the latest job.
    #[track_caller]
    pub(crate) fn latest(&self) -> String {
        let listed = self.host.ctl(&["jobs", "--json"]).ok().json();
        listed["jobs"][0]["job"].as_str().expect("a job").to_owned()
    }

    /// The latest attempt of a job, from 1.
    #[track_caller]
    pub(crate) fn attempt(&self, job: &str) -> u64 {
        self.host.show(job)["attempt"].as_u64().expect("a number")
    }

    /// The working directory of a job that runs, as the machine sees it.
    #[track_caller]
    pub(crate) fn work_dir(&self, job: &str) -> PathBuf {
        let mut pending = vec![self.host.state()];
        while let Some(dir) = pending.pop() {
            for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
                let path = entry.path();
                let of_job = path.to_string_lossy().contains(job);
                if of_job && path.join("outputs").is_dir() && path.join("job.yml").is_file() {
                    return path;
                }
                if path.is_dir() && !path.is_symlink() {
                    pending.push(path);
                }
            }
        }
        panic!("{job} has no working directory below {}", self.host.state().display())
    }
}

fn walk(top: &Path, dir: &Path, found: &mut Vec<(PathBuf, Vec<u8>)>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            walk(top, &path, found);
        } else {
            let bytes = fs::read(&path).expect("a file");
            found.push((path.strip_prefix(top).expect("below the top").to_owned(), bytes));
        }
    }
}

/// A command of a shell that says `line N` for each number below `lines`, at so many a second.
pub(crate) fn counting(lines: u64, pause: &str) -> String {
    format!("i=0; while [ $i -lt {lines} ]; do echo line $i; i=$((i+1)); sleep {pause}; done")
}

/// What [`counting`] prints.
pub(crate) fn counted(lines: u64) -> Vec<u8> {
    (0..lines).map(|number| format!("line {number}\n")).collect::<String>().into_bytes()
}
