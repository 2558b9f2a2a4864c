//! What containers cost, against the engine alone: the same image, the same command, in turns.
//!
//! The engine's side is what anybody does who runs a command in a container: made, started, waited for, removed. What
//! a job costs anyhow (the client, the queue, its records) is measured beside it on the machine and taken off where
//! the row says so.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent_tests::channel::{Channel, Server};
use agent_tests::docker::{Docker, host_config};
use agent_tests::engine::{Engine, end_shared};
use agent_tests::images::Image;
use agent_tests::{Host, engine};

use crate::environments::{ms, ratio, row};
use crate::measure::{Series, time};

/// Rounds of each side.
const ROUNDS: usize = 15;

/// All rows.
pub(crate) fn all() {
    println!("{:<58} {:>10} {:>10} {:>7} {:>7}", "measure", "ours", "other", "ratio", "goal");
    let docker = Engine::shared();
    let mut host = Host::new();
    host.set("AGENTD_DOCKER_SOCKET", docker.socket().to_str().expect("UTF-8"));
    engine();
    let channel = Server::start(Channel::t2());
    host.set("AGENTD_CONDA_ALIAS", &channel.alias());
    host.set("AGENTD_CONDA_CHANNELS", "main");
    host.start();
    start(&host, &docker);
    conda(&host, &docker);
    drop(host);
    end_shared();
}

/// A directory with a job.
fn job(host: &Host, name: &str, environment: &str) -> PathBuf {
    let text = format!("command: 'true'\ncode: .\nenvironment: {environment}\n");
    host.project(name, &[("job.yml", &text)])
}

fn start(host: &Host, docker: &Docker) {
    Image::Busybox.on(docker);
    let in_image = job(host, "image", &format!("{{image: '{}'}}", Image::Busybox.tag()));
    let plain = job(host, "plain", "host");
    let run = |dir: &Path| time(host.client(&["run", dir.to_str().expect("UTF-8")]));
    run(&in_image);
    run(&plain);
    let (mut ours, mut bare, mut engine) = (Series::default(), Series::default(), Series::default());
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        docker.run(Image::Busybox.tag(), &["sh", "-c", "true"], host_config(&[]));
        engine.push(begun.elapsed());
        ours.push(run(&in_image));
        bare.push(run(&plain));
    }
    row("job in a warm image, all of it / the engine's own run", &ours, &engine, None);
    row("the same job on the machine / the engine's own run", &bare, &engine, None);
    let added = ours.median().saturating_sub(bare.median());
    ratio("what the container adds to a job / the engine's own run", added, engine.median(), Some(1.2));
}

/// A conda environment in an image: mounted where it is, against a layer made of it.
fn conda(host: &Host, docker: &Docker) {
    const FILE: &str = "channels: [main]\ndependencies: [python, scikit-learn]\n";
    // What the library of Python has by itself: those of packages may want more libraries than the image has.
    const COMMAND: &str = "import asyncio, email.mime.text, http.server, json, logging.config, multiprocessing, \
                           unittest.mock, xml.dom.minidom";
    const LAYERED: &str = "agentd-test/layered:1";
    let dir = host.project("conda", &[("conda.yml", FILE)]);
    let file = dir.join("conda.yml");
    time(host.client(&["envs", "build", file.to_str().expect("UTF-8")]));
    let kept = host.state().join("envs");
    let prefix = fs::read_dir(&kept).expect("a directory").flatten().map(|entry| entry.path());
    let prefix = prefix.into_iter().find(|path| path.join("conda-meta").is_dir()).expect("an environment");
    Image::Python.on(docker);
    let begun = Instant::now();
    docker.layer(Image::Python.tag(), tarred(&prefix), LAYERED);
    let made = begun.elapsed();
    println!("{:<58} {:>10} {:>10}", "making the layer (a mount needs nothing)", "", ms(made));
    let python = prefix.join("bin/python");
    let command = [python.to_str().expect("UTF-8"), "-c", COMMAND];
    let run = |image: &str, mounts: &[&Path]| -> Duration {
        let begun = Instant::now();
        assert_eq!(docker.run(image, &command, host_config(mounts)), 0, "{image}: the import fails");
        begun.elapsed()
    };
    let (mut mounted, mut layered) = (Series::default(), Series::default());
    for _ in 0..ROUNDS {
        layered.push(run(LAYERED, &[]));
        mounted.push(run(Image::Python.tag(), &[&prefix]));
    }
    row("image + conda, start and import: mounted / a layer", &mounted, &layered, Some(1.0));
}

/// A directory as a tar, at its own place.
#[allow(clippy::disallowed_methods, reason = "the other side of the ratio")]
fn tarred(dir: &Path) -> Vec<u8> {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut tar = std::process::Command::new("tar");
    tar.args(["-C", "/", "-cf"]).arg(file.path()).arg(dir.strip_prefix("/").expect("an absolute path"));
    assert!(tar.status().expect("tar starts").success());
    let mut bytes = Vec::new();
    File::open(file.path()).and_then(|mut file| file.read_to_end(&mut bytes)).expect("a file");
    bytes
}
