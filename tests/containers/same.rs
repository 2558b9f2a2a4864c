//! Group S: the same job gives the same everywhere: on the machine, in an image, in an image with a conda environment,
//! and in an image that is built.

use std::fs;
use std::path::{Path, PathBuf};

use agent_tests::channel::{Channel, Server};
use agent_tests::images::Image;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{copy_tree, engine, root};
use serde_json::Value;

use crate::containers::site::{PYTHON, Site};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row {
        id: "S1",
        promise: "the example gives the same on the machine, in an image, with conda in it, and in one built",
        run: same,
    },
    Row { id: "S2", promise: "a second run pulls nothing and builds nothing", run: again },
    Row { id: "S3", promise: "an image is built anew when its context or its base is another", run: rebuilt },
];

/// The kinds of environments the example runs in, by name.
const KINDS: [(&str, &str); 4] = [
    ("machine", "host"),
    ("image", PYTHON),
    ("conda", "{image: 'agentd-test/python:1', conda_file: conda.yml}"),
    ("built", "{build: {path: image}}"),
];

const CONDA: &str = "channels: [main]\ndependencies: [python, tiny-one]\n";

const PIP: &str = "channels: [main]\ndependencies: [python, pip]\n";

/// Installs a package and uses it.
const ADDS: &str = "command: python -c 'import added' 2>/dev/null || echo absent; python adds.py && pip install -q \
    --no-index --disable-pip-version-check ./added-1-py3-none-any.whl && python -c 'import added; print(added.x)'\n\
    code: .\nenvironment: {image: 'agentd-test/python:1', conda_file: conda.yml}\n";

const WHEEL: &str = "import zipfile
with zipfile.ZipFile('added-1-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('added.py', 'x = 2\\n')
    wheel.writestr('added-1.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: added\\nVersion: 1\\n')
    wheel.writestr('added-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr('added-1.dist-info/RECORD', '')
";

/// A box that knows a channel of packages, with the example in each kind of environment.
struct Same {
    site: Site,
    _channel: Server,
}

impl Same {
    fn started() -> Same {
        engine();
        let channel = Server::start(Channel::t1());
        let docker = agent_tests::engine::Engine::shared();
        Image::Python.on(&docker);
        let mut site = Site::beside(&docker);
        site.host.set("AGENTD_CONDA_ALIAS", &channel.alias());
        site.host.set("AGENTD_CONDA_CHANNELS", "main");
        site.host.start();
        Same { site, _channel: channel }
    }

    /// The example in an environment.
    fn example(&self, name: &str, environment: &str) -> PathBuf {
        let (from, to) = (root().join("packaging/examples/container"), self.site.host.home().join(name));
        copy_tree(&from, &to);
        let job = fs::read_to_string(from.join("job.yml")).expect("a job");
        let (before, after) = job.split_once("environment:\n").expect("its environment");
        let (_, after) = after.split_once("limits:").expect("its limits");
        let job = format!("{before}environment: {environment}\nlimits:{after}");
        fs::write(to.join("job.yml"), job).expect("a file");
        fs::write(to.join("conda.yml"), CONDA).expect("a file");
        let dockerfile = to.join("image/Dockerfile");
        let text = fs::read_to_string(&dockerfile).expect("a Dockerfile");
        let base = text.lines().next().expect("its first line").split_once('=').expect("a base").1;
        fs::write(&dockerfile, text.replace(base, Image::Python.tag())).expect("a file");
        to
    }

    /// Runs it to its good end; what it told on its way.
    #[track_caller]
    fn run(&self, dir: &Path) -> String {
        let ran = self.site.host.ctl(&["run", dir.to_str().expect("UTF-8")]);
        assert_eq!(ran.code, 0, "{}\n{}\n{}", ran.stdout, ran.stderr, self.site.why(&self.site.latest()));
        ran.stderr
    }

    /// What the latest job left: its metrics, its outputs and its log but for the version of Python.
    fn left(&self) -> (Value, Vec<(PathBuf, Vec<u8>)>, String) {
        let job = self.site.latest();
        let metrics = self.site.host.ctl(&["metrics", &job, "--json"]).ok().json();
        let log = String::from_utf8(self.site.log(&job)).expect("text");
        let told = log.split_once(": fitting").expect("its first line").1.to_owned();
        (metrics["metrics"].clone(), self.site.outputs(&job), told)
    }
}

fn same(tally: &mut Tally, _: &Scale) {
    let same = Same::started();
    let mut first = None;
    for (name, environment) in KINDS {
        tally.case(name, || {
            same.run(&same.example(name, environment));
            let left = same.left();
            assert_eq!(left.0.as_array().map(Vec::len), Some(2), "{left:?}");
            assert!(!left.1.is_empty(), "it left no outputs");
            match &first {
                None => first = Some(left),
                Some(first) => assert_eq!(first, &left),
            }
        });
    }
    tally.case("pip adds to conda in an image, for that job alone", || {
        let dir =
            same.site.host.project("adds", &[("job.yml", ADDS), ("conda.yml", PIP), ("adds.py", WHEEL)]);
        for _ in 0..2 {
            same.run(&dir);
            assert_eq!(same.site.log(&same.site.latest()), b"absent\n2\n");
        }
    });
    tally.case("and leaves no container", || same.site.nothing_left());
}

fn again(tally: &mut Tally, _: &Scale) {
    let same = Same::started();
    for (name, environment) in &KINDS[1..] {
        tally.case(name, || {
            let dir = same.example(name, environment);
            same.run(&dir);
            let told = same.run(&dir);
            assert!(told.contains("reused"), "it was made again:\n{told}");
        });
    }
}

fn rebuilt(tally: &mut Tally, _: &Scale) {
    let same = Same::started();
    let dir = same.example("built", KINDS[3].1);
    tally.case("first, and again", || {
        same.run(&dir);
        assert!(same.run(&dir).contains("reused"));
    });
    tally.case("another context", || {
        fs::write(dir.join("image/more"), "more\n").expect("a file");
        assert!(!same.run(&dir).contains("reused"), "it was not made again");
        fs::remove_file(dir.join("image/more")).expect("a file");
        assert!(same.run(&dir).contains("reused"), "what it was before is still there");
    });
    tally.case("a Dockerfile that fails says at which step, and with which words", || {
        let dockerfile = dir.join("image/Dockerfile");
        let text = fs::read_to_string(&dockerfile).expect("a Dockerfile");
        fs::write(&dockerfile, format!("{text}RUN echo nearly there && exit 3\n")).expect("a file");
        let ran = same.site.host.ctl(&["run", dir.to_str().expect("UTF-8")]);
        assert_eq!(ran.code, 125, "{}", ran.stderr);
        ran.says("RUN echo nearly there").says("nearly there").says("ENV-113");
    });
}
