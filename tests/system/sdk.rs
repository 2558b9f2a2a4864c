//! Scripts that use `azureml.core` of the SDK v1, with the stand-in for it and without.

use std::collections::BTreeMap;

use agent_tests::Host;
use serde_json::Value;

/// Each metric that a job recorded, by name.
fn metrics(host: &Host, job: &str) -> (BTreeMap<String, Value>, Value) {
    let listed = host.ctl(&["metrics", job, "--json"]).ok().json();
    let metrics = listed["metrics"].as_array().unwrap().iter();
    let named = metrics.map(|metric| (metric["name"].as_str().unwrap().to_owned(), metric.clone()));
    (named.collect(), listed)
}

/// A ridge regression for each of 20 strengths, as the tutorials of the SDK v1 log them.
const RIDGE: &str = r#"
import os, pickle, random
from azureml.core import Run

os.makedirs("./outputs", exist_ok=True)
run = Run.get_context()
random.seed(1)
points = [(x / 50, 3 * x / 50 + random.gauss(0, 0.1)) for x in range(100)]
train, test = points[::2], points[1::2]
for number in range(20):
    alpha = number * 0.05
    weight = sum(x * y for x, y in train) / (sum(x * x for x, _ in train) + alpha)
    mse = sum((y - weight * x) ** 2 for x, y in test) / len(test)
    run.log("alpha", alpha)
    run.log("mse", mse)
    name = "ridge_{0:.2f}.pkl".format(alpha)
    with open(name, "wb") as file:
        pickle.dump(weight, file)
    run.upload_file(name="outputs/" + name, path_or_stream=name)
print("alpha is {0:.2f}, and mse is {1!r}".format(alpha, mse))
"#;

#[test]
fn test_a_script_of_the_sdk_v1_keeps_its_forty_metrics_and_twenty_models() {
    let host = Host::started();
    let runconfig = "script: train.py\ntarget: local\nframework: Python\n\
                     environment: {python: {userManagedDependencies: true, interpreterPath: python3}}\n";
    let dir = host.project("p", &[("train.py", RIDGE), (".azureml/local.runconfig", runconfig)]);
    let ran = host.ctl(&["run", dir.to_str().unwrap(), "--name", "ridge"]).ok().says("20 files");
    let (metrics, listed) = metrics(&host, "ridge");
    let counts: Vec<_> = metrics.iter().map(|(name, metric)| (name.as_str(), &metric["count"])).collect();
    assert_eq!(counts, [("alpha", &20.into()), ("mse", &20.into())], "{listed}");
    assert_eq!(metrics["alpha"]["last_step"], 19, "{listed}");
    // The same number, to the last digit.
    let printed: f64 = ran.stdout.split("mse is ").nth(1).unwrap().trim().parse().unwrap();
    assert_eq!(metrics["mse"]["last"], printed, "{listed}");
    let to = host.home().join("ridge");
    host.ctl(&["download", "ridge", "-o", to.to_str().unwrap()]).ok();
    assert_eq!(to.join("outputs").read_dir().unwrap().count(), 20);
}

const EVERYTHING: &str = r#"
import io, json, math, os
from azureml.core import Run
import azureml.core.run

os.chdir("/")
run = Run.get_context()
def is_(what, found, expected):
    assert found == expected, "{}: {!r}, not {!r}".format(what, found, expected)
is_("the run", (run.id, run.parent, run.experiment.name), ("sdk", None, "birds"))
is_("always the same", azureml.core.run.Run.get_context() is run, True)
is_("an input", open(run.input_datasets["data"]).read(), "1,2\n")
run.log("loss", 0.1 + 0.2, step=7)
run.log("loss", math.inf)
run.log("kind", "ridge")
run.log_list("sizes", [1, 2, 3])
run.log_row("point", x=1, y=0.5)
run.log_row("point", x=2, y=0.25)
run.log_table("table", {"a": [1, 2], "b": ["x", "y"]})
for log in (run.log_confusion_matrix, run.log_accuracy_table, run.log_residuals, run.log_predictions):
    log("about " + log.__name__, {"schema_type": "s", "schema_version": "v1", "data": {"bins": [1, 2]}})
class Plot:
    def savefig(self, file, format):
        open(file, "wb").write(b"a picture")
run.log_image("curve", plot=Plot())
run.log_image("curve", plot=Plot())
is_("numbers", run.get_metrics("loss"), {"loss": [0.1 + 0.2, math.inf]})
is_("all", sorted(run.get_metrics()), ["kind", "loss", "point.x", "point.y", "sizes", "table.a"])
run.tag("team", "vision")
run.set_tags({"a": 1, "b": 2})
run.remove_tags("a")
run.add_properties({"from": "here"})
is_("tags", run.get_tags(), {"kind": "ridge", "team": "vision", "b": "2"})
is_("properties", run.properties, {"from": "here"})
run.upload_file("notes.txt", io.BytesIO(b"to be kept"))
os.makedirs("/tmp/sdk-folder/deep", exist_ok=True)
open("/tmp/sdk-folder/deep/x.txt", "w").write("x")
run.upload_folder("folder", "/tmp/sdk-folder")
run.download_file("notes.txt", "/tmp/sdk-notes.txt")
is_("a file", open("/tmp/sdk-notes.txt").read(), "to be kept")
model = run.register_model("best", model_path="notes.txt", tags={"area": "test"})
is_("a model", (model.name, model.version, model.id), ("best", 1, "best:1"))
is_("another version", run.register_model("best", model_path="folder").version, 2)
with run.child_run("fold") as child:
    child.log("loss", 5)
    is_("its parent", (child.parent, child.get_metrics(), list(run.get_children())), (run, {"loss": 5.0}, [child]))
    child.upload_file("inside.txt", io.BytesIO(b"of the child"))
for wrong in (lambda: run.submit_child, lambda: Run.get, lambda: run.experiment.workspace.datastores,
              lambda: run.input_datasets["data"].to_pandas_dataframe()):
    try:
        wrong()
    except AttributeError as error:
        assert "stand-in" in str(error), error
    else:
        raise AssertionError("it is there")
try:
    from azureml.core import Dataset
except ImportError as error:
    assert "stand-in" in str(error), error
run.complete()
print("as in the cloud")
"#;

#[test]
fn test_the_stand_in_records_all_that_a_run_of_the_sdk_v1_can_log() {
    let host = Host::started();
    let job = "name: sdk\nexperiment_name: birds\nazureml_core: stand_in\ncode: .\n\
               command: python3 t.py\ninputs: {data: {type: uri_file, path: data.csv}}\n";
    let dir = host.project("p", &[("t.py", EVERYTHING), ("data.csv", "1,2\n"), ("job.yml", job)]);
    let ran = host.ctl(&["run", dir.to_str().unwrap()]).ok();
    assert!(ran.stdout.contains("as in the cloud"), "{}", ran.stdout);
    let (metrics, listed) = metrics(&host, "sdk");
    let shown: Vec<_> = metrics.iter().map(|(name, metric)| (name.as_str(), &metric["last"])).collect();
    let expected: [(&str, &Value); 6] = [
        ("fold/loss", &5.0.into()),
        ("loss", &"Infinity".into()),
        ("point.x", &2.0.into()),
        ("point.y", &0.25.into()),
        ("sizes", &3.0.into()),
        ("table.a", &2.0.into()),
    ];
    assert_eq!(shown, expected, "{listed}");
    assert_eq!(listed["tags"]["team"], "vision");
    assert_eq!(listed["tags"]["properties.from"], "here");
    let to = host.home().join("all");
    host.ctl(&["download", "sdk", "-o", to.to_str().unwrap()]).ok();
    let kept = |name: &str| std::fs::read_to_string(to.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    for (name, text) in [
        ("notes.txt", "to be kept"),
        ("folder/deep/x.txt", "x"),
        ("fold/inside.txt", "of the child"),
        ("outputs/azureml/curve.png", "a picture"),
        ("outputs/azureml/curve-2.png", "a picture"),
        ("outputs/azureml/table.jsonl", "{\"table.b\": [\"x\", \"y\"]}\n"),
    ] {
        assert_eq!(kept(name), text, "{name}");
    }
    assert!(kept("outputs/azureml/about log_predictions.json").contains("\"schema_type\": \"s\""));
}

/// Another `azureml.core`, installed as the real one is: its directory comes behind all others.
const INSTALLED: &str = r#"
import site
site.addsitedir("site-packages")
from azureml.core import Run
print("it is", Run.get_context())
import azureml.other
"#;

#[test]
fn test_an_installed_sdk_is_used_and_without_the_word_nothing_changes() {
    let host = Host::started();
    let shared = "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n";
    let real = "class Run:\n    @staticmethod\n    def get_context():\n        return 'the installed one'\n";
    let asks = "azureml_core: stand_in\ncode: .\ncommand: PYTHONPATH=lib:$PYTHONPATH python3 t.py\n";
    let files = [
        ("t.py", INSTALLED),
        ("site-packages/azureml/__init__.py", shared),
        ("site-packages/azureml/core/__init__.py", real),
        ("site-packages/azureml/other.py", ""),
        ("job.yml", asks),
    ];
    let dir = host.project("real", &files);
    let ran = host.ctl(&["run", dir.to_str().unwrap()]).ok();
    assert!(ran.stdout.contains("it is the installed one"), "{}", ran.stdout);

    // Another package of that name changes nothing.
    let other = [files[0], files[1], files[3], files[4]];
    let dir = host.project("other", &other);
    let ran = host.ctl(&["run", dir.to_str().unwrap()]).ok();
    assert!(ran.stdout.contains("it is Run("), "{}", ran.stdout);

    let plain = "code: .\ncommand: echo path ${PYTHONPATH-none}; python3 t.py\n";
    let dir = host.project("plain", &[("t.py", RIDGE), ("job.yml", plain)]);
    let ran = host.ctl(&["run", dir.to_str().unwrap()]).code(1).says("`azureml_core: stand_in`");
    assert!(ran.stdout.contains("path none"), "{}", ran.stdout);
}
