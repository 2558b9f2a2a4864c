//! Group B, the bed itself: images that are what they say, a registry that engines pull from, and an engine that can
//! be killed.

use agent_tests::docker::Docker;
use agent_tests::engine::Engine;
use agent_tests::images::{Image, Root};
use agent_tests::registry::{Manner, Registry};
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, eventually};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "B1", promise: "the images of the tests are made here and have what they say", run: images },
    Row { id: "B2", promise: "an engine of the tests pulls from the registry of the tests", run: registry },
    Row {
        id: "B3",
        promise: "an engine of the tests can be killed, and what it leaves is cleared",
        run: killed,
    },
];

fn images(tally: &mut Tally, _: &Scale) {
    let docker = Engine::shared();
    let cases = [
        (Image::Busybox, vec!["sh", "-c", "test $FROM_THE_IMAGE = yes && ! which bash"]),
        (Image::Scratch, vec!["/bin/echo", "hello"]),
        (Image::Python, vec!["python3", "-c", "import json, ssl, sys; assert sys.version_info >= (3, 9)"]),
        (Image::Python, vec!["bash", "-c", "true"]),
    ];
    for (image, command) in cases {
        tally.case(&format!("{image:?}"), || {
            let id = image.on(&docker);
            assert_eq!(docker.run(image.tag(), &command, Default::default()), 0);
            assert_eq!(image.on(&docker), id, "it was made again");
        });
    }
}

/// Pulls an image as anybody would; whether that came about.
fn pull(docker: &Docker, name: &str) -> Result<(), String> {
    docker.pull(name)
}

fn registry(tally: &mut Tally, _: &Scale) {
    let (docker, registry) = (Engine::shared(), Registry::start());
    let mut layer = Root::new();
    layer.file("hello", 0o644, b"hello\n");
    registry.put("bed:1", vec![layer.finish()], &[]);
    let name = registry.name("bed:1");
    tally.case("pulled, and a second time nothing travels", || {
        pull(&docker, &name).expect("a pull");
        assert_eq!(registry.requests("/blobs/"), 2, "{:?}", registry.asked());
        pull(&docker, &name).expect("a pull");
        assert_eq!(registry.requests("/blobs/"), 2, "{:?}", registry.asked());
    });
    tally.case("an image that is not there, one behind a password, and a damaged one", || {
        pull(&docker, &registry.name("bed:2")).expect_err("there is none");
        registry.set(Manner::Private("me".into(), "word".into()));
        pull(&docker, &name).expect_err("it is private");
        registry.set(Manner::Damaged);
        let mut layer = Root::new();
        layer.file("other", 0o644, b"other\n");
        registry.put("bed:3", vec![layer.finish()], &[]);
        pull(&docker, &registry.name("bed:3")).expect_err("it is damaged");
    });
}

fn killed(tally: &mut Tally, _: &Scale) {
    tally.case("with and without live-restore", || {
        for live_restore in [true, false] {
            let mut engine = Engine::started(live_restore);
            let docker = engine.docker();
            Image::Busybox.on(&docker);
            let id = docker.create("bed", Image::Busybox.tag(), &["sleep", "600"], &[]);
            docker.start(&id);
            engine.kill();
            assert!(!docker.answers());
            engine.start();
            eventually("the container is what it should be", SOON, || {
                let state = docker.inspect(&id)?.state?;
                (state.running == Some(live_restore)).then_some(())
            });
            let dir = engine.socket().parent().expect("a directory").to_owned();
            drop(engine);
            assert!(!dir.exists(), "{} is still there", dir.display());
        }
    });
}
