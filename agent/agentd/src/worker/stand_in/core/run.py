"""The run of a job, for scripts that use the Azure ML SDK v1.

Metrics and tags are lines of the file that AGENTD_METRICS names, so they are recorded also while the daemon restarts.
What is no number is a file below ./outputs/azureml. Child runs, uploads and models are calls of the job's tracking endpoint.
"""
import json
import numbers
import os
import re
import shutil
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

# For how long a call of the endpoint is tried, in seconds: a restart of the daemon takes less.
PATIENCE = 60
PROPERTY = "properties."
# Tags that are the endpoint's own.
OWN = "agentd."


def _lacks(thing, name):
    has = sorted(each for each in dir(thing) if not each.startswith("_"))
    kind = thing.__name__ if isinstance(thing, type) else type(thing).__name__
    return AttributeError(
        "`{}.{}`: this is agentd's stand-in for azureml.core, which does not have it; it has {}".format(
            kind, name, ", ".join(has)
        )
    )


class _OfClass(type):
    def __getattr__(cls, name):
        raise AttributeError(name) if name.startswith("_") else _lacks(cls, name)


class _StandIn(metaclass=_OfClass):
    def __getattr__(self, name):
        raise AttributeError(name) if name.startswith("_") else _lacks(self, name)


def _variable(name, usual=None):
    return os.environ.get(name) or usual


def _work():
    """The working directory of the job, wherever the script went since."""
    return _variable("AZUREML_CR_EXECUTION_WORKING_DIR_PATH", os.getcwd())


def _call(method, path, body=None, query=None):
    """A call of the tracking endpoint; returns the body of the answer. `body` is a mapping, bytes, or an open file."""
    base = _variable("MLFLOW_TRACKING_URI")
    if base is None:
        raise RuntimeError("MLFLOW_TRACKING_URI is not set: this needs the tracking endpoint of a job")
    address = base + path + ("?" + urllib.parse.urlencode(query) if query else "")
    headers = {"Authorization": "Bearer " + _variable("MLFLOW_TRACKING_TOKEN", "")}
    data = body
    if isinstance(body, dict):
        headers["Content-Type"], data = "application/json", json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until, pause = time.monotonic() + PATIENCE, 0.2
    while True:
        if hasattr(data, "seek"):
            data.seek(0)
            headers["Content-Length"] = str(os.fstat(data.fileno()).st_size)
        request = urllib.request.Request(address, data=data, headers=headers, method=method)
        try:
            with opener.open(request) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            if error.code != 429 or time.monotonic() > until:
                raise RuntimeError(text) from None
        except OSError as error:  # also urllib.error.URLError: nobody listens
            if time.monotonic() > until:
                raise RuntimeError("the tracking endpoint of the job does not answer: {}".format(error)) from None
        time.sleep(pause)
        pause = min(2 * pause, 5)


def _api(method, path, body=None, query=None):
    return json.loads(_call(method, "/api/2.0/mlflow/" + path, body, query).decode())


class _Records:
    """The file of metrics and tags."""

    def __init__(self):
        self.path = _variable("AGENTD_METRICS")
        self.lock = threading.Lock()

    def add(self, label, **record):
        if self.path is None:
            return
        if label:
            record["run"] = label
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        # One write to the end: other processes of the job write there, too.
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            while line:
                line = line[os.write(file, line):]
        finally:
            os.close(file)

    def of(self, label):
        """The records of one run."""
        try:
            file = open(self.path or os.devnull, "rb")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                try:
                    record = json.loads(line.decode())
                except ValueError:
                    continue
                if isinstance(record, dict) and record.get("run", "") == label:
                    yield record


_records = _Records()


def _number(value):
    """A number, also one of numpy or of a tensor with one element; None for what is no number."""
    if isinstance(value, (str, bytes, dict, list, tuple, type(None))):
        return None
    if isinstance(value, numbers.Real) or hasattr(value, "__float__"):
        return float(value)
    return None


def _plain(value):
    """For JSON what is not of Python itself."""
    if hasattr(value, "tolist"):
        return value.tolist()
    number = _number(value)
    return str(value) if number is None else number


def _file_name(name):
    return re.sub(r"[^A-Za-z0-9._ -]", "_", name).lstrip(".") or "_"


class Workspace(_StandIn):
    """The names of a workspace. There is no workspace."""

    def __init__(self):
        self.name = _variable("AZUREML_ARM_WORKSPACE_NAME", "local")
        self.subscription_id = _variable("AZUREML_ARM_SUBSCRIPTION", "")
        self.resource_group = _variable("AZUREML_ARM_RESOURCEGROUP", "")


class Experiment(_StandIn):
    """The experiment of the job."""

    def __init__(self):
        self.name = _variable("AZUREML_ARM_PROJECT_NAME", "Default")
        self.id = _variable("MLFLOW_EXPERIMENT_ID", "0")
        self.workspace = Workspace()


class Model(_StandIn):
    """A version of a model that was registered by the job, in the registry of the job."""

    def __init__(self, version, tags, properties):
        self.name, self.version = version["name"], int(version["version"])
        self.id = "{}:{}".format(self.name, self.version)
        self.description, self.run_id = version.get("description", ""), version.get("run_id", "")
        self.tags, self.properties = dict(tags or {}), dict(properties or {})


class DataPath(_StandIn, str):
    """The path of an input or output."""


def _paths(prefix):
    names = (name for name in os.environ if name.startswith(prefix))
    return {name[len(prefix):]: DataPath(os.environ[name]) for name in names}


class Run(_StandIn):
    """The run of the job, or one that the script began beside it."""

    _current = None
    _at_once = threading.Lock()

    def __init__(self, run_id, label, name, parent=None):
        self.id, self.name, self.parent = run_id, name, parent
        self.number, self.type, self.experiment = 1, "azureml.scriptrun", Experiment()
        self._label, self._status, self._children = label, "Running", []
        self._steps, self._texts = {}, {}

    @classmethod
    def get_context(cls, allow_offline=True, used_for_context_manager=False, **_):
        """The run of this job, always the same one."""
        with cls._at_once:
            if cls._current is None:
                run_id = _variable("AZUREML_RUN_ID", "no-job")
                cls._current = cls(run_id, "", run_id)
            return cls._current

    def __repr__(self):
        return "Run(experiment: {}, id: {})".format(self.experiment.name, self.id)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.complete() if kind is None else self.fail(error_details=repr(error))

    # Metrics.

    def _measure(self, name, value, step=None):
        with _records.lock:
            usual = self._steps.get(name, 0)
            step = usual if step is None else int(step)
            self._steps[name] = max(usual, step + 1)
        if value != value or value in (float("inf"), float("-inf")):
            value = "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        _records.add(self._label, metric=name, value=value, step=step, time=int(time.time() * 1000))

    def log(self, name, value, description="", step=None):
        """Records a number, each time with the next step unless one is given. A text becomes a tag."""
        number = _number(value)
        if number is not None:
            return self._measure(name, number, step)
        if not isinstance(value, str):
            raise TypeError("`log` takes a number or a text, not {}: {!r}".format(type(value).__name__, value))
        self._texts[name] = value
        self.tag(name, value)

    def log_list(self, name, value, description=""):
        """Records numbers, one step after the other."""
        self._column(name, name, list(value))

    def log_row(self, name, description=None, **kwargs):
        """Records a number for each column, as NAME.COLUMN."""
        for column, value in kwargs.items():
            self._column(name, "{}.{}".format(name, column), [value])

    def log_table(self, name, value, description=""):
        """Records a column of numbers for each entry, as NAME.COLUMN."""
        for column, values in value.items():
            whole = values if isinstance(values, (list, tuple)) or hasattr(values, "tolist") else [values]
            self._column(name, "{}.{}".format(name, column), list(whole))

    def _column(self, name, metric, values):
        read = [_number(value) for value in values]
        if None not in read:
            for value in read:
                self._measure(metric, value)
            return
        line = json.dumps({metric: values}, default=_plain) + "\n"
        with _records.lock, open(self._place(name, ".jsonl"), "a") as file:
            file.write(line)

    def log_image(self, name, path=None, plot=None, description=""):
        """Keeps a picture: a file, or a plot of matplotlib."""
        if (path is None) == (plot is None):
            raise ValueError("`log_image` takes either `path` or `plot`")
        if path is not None:
            shutil.copyfile(path, self._place(name, os.path.splitext(path)[1], fresh=True))
        else:
            plot.savefig(self._place(name, ".png", fresh=True), format="png")

    def _document(self, name, value, description=""):
        document = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(document, default=_plain, indent=1)
        with open(self._place(name, ".json", fresh=True), "w") as file:
            file.write(text)

    def log_confusion_matrix(self, name, value, description=""):
        """Keeps a document, given as a mapping or as JSON."""
        self._document(name, value)

    def log_accuracy_table(self, name, value, description=""):
        """Keeps a document, given as a mapping or as JSON."""
        self._document(name, value)

    def log_residuals(self, name, value, description=""):
        """Keeps a document, given as a mapping or as JSON."""
        self._document(name, value)

    def log_predictions(self, name, value, description=""):
        """Keeps a document, given as a mapping or as JSON."""
        self._document(name, value)

    def _place(self, name, ending, fresh=False):
        """A file below ./outputs/azureml; a `fresh` one is new."""
        folder = os.path.join(_work(), "outputs", "azureml", self._label)
        os.makedirs(folder, exist_ok=True)
        base, number = _file_name(name), 1
        while True:
            path = os.path.join(folder, base + ("-{}".format(number) if number > 1 else "") + ending)
            if not fresh:
                return path
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                return path
            except FileExistsError:
                number += 1

    def get_metrics(self, name=None, recursive=False, run_type=None, populate=False):
        """What was recorded so far: a number each, or a list of several."""
        found = {}
        for record in _records.of(self._label):
            if "metric" in record and name in (None, record["metric"]):
                found.setdefault(record["metric"], []).append(float(record["value"]))
        metrics = {each: values[0] if len(values) == 1 else values for each, values in found.items()}
        metrics.update({each: text for each, text in self._texts.items() if name in (None, each)})
        if recursive:
            for child in self._children:
                metrics.update(child.get_metrics(name, recursive=True))
        return metrics

    # Tags and properties.

    def tag(self, key, value=None):
        """Sets a tag."""
        _records.add(self._label, tag=str(key), text="" if value is None else str(value))

    def set_tags(self, tags):
        """Sets several tags."""
        for key, value in tags.items():
            self.tag(key, value)

    def remove_tags(self, tags):
        """Removes tags: a name, or a list of them. Returns those that are left."""
        for key in [tags] if isinstance(tags, str) else tags:
            _records.add(self._label, untag=str(key))
        return self.get_tags()

    def _texts_recorded(self):
        tags = {}
        for record in _records.of(self._label):
            if "tag" in record and not str(record["tag"]).startswith(OWN):
                tags[record["tag"]] = record.get("text", "")
            tags.pop(record.get("untag"), None)
        return tags

    def get_tags(self):
        """The tags, those that were set through MLflow among them."""
        return {key: text for key, text in self._texts_recorded().items() if not key.startswith(PROPERTY)}

    def add_properties(self, properties):
        """Sets properties: tags whose names begin with `properties.`."""
        self.set_tags({PROPERTY + key: value for key, value in properties.items()})

    def get_properties(self):
        """The properties."""
        texts = self._texts_recorded().items()
        return {key[len(PROPERTY):]: text for key, text in texts if key.startswith(PROPERTY)}

    tags = property(get_tags)
    properties = property(get_properties)

    @property
    def display_name(self):
        """The title of the run."""
        return self.name

    @display_name.setter
    def display_name(self, name):
        self.name = name
        self.tag("mlflow.runName", name)

    # Files.

    def _address(self, name):
        parts = [self.experiment.id, self.id, "artifacts"] + self._path(name).split("/")
        return "/api/2.0/mlflow-artifacts/artifacts/" + "/".join(urllib.parse.quote(part, "") for part in parts)

    @staticmethod
    def _path(name):
        path = os.path.normpath(name.replace("\\", "/"))
        if path.startswith(("/", "..")) or path == ".":
            raise ValueError("`{}` cannot be the name of a file of a run".format(name))
        return path

    def upload_file(self, name, path_or_stream, datastore_name=None):
        """Keeps a file under this name."""
        if hasattr(path_or_stream, "read"):
            content = path_or_stream.read()
            _call("PUT", self._address(name), content.encode() if isinstance(content, str) else content)
            return
        kept = os.path.join(_work(), self._path(name))
        is_kept = not self._label and self._path(name).split("/")[0] in ("outputs", "logs")
        if is_kept and os.path.exists(kept) and os.path.samefile(kept, path_or_stream):
            return  # it is where it will be kept
        with open(path_or_stream, "rb") as file:
            _call("PUT", self._address(name), file)

    def upload_files(self, names, paths, return_artifacts=False, timeout_seconds=None, datastore_name=None):
        """Keeps several files."""
        if len(names) != len(paths):
            raise ValueError("there are {} names and {} paths".format(len(names), len(paths)))
        for name, path in zip(names, paths):
            self.upload_file(name, path)

    def upload_folder(self, name, path, datastore_name=None):
        """Keeps what is in a folder."""
        for folder, _, files in os.walk(path):
            below = os.path.relpath(folder, path)
            for file in files:
                full = os.path.join(folder, file)
                self.upload_file(os.path.normpath(os.path.join(name, below, file)), full)

    def _listed(self, path=""):
        asked = {"run_id": self.id, "path": path}
        for entry in _api("GET", "artifacts/list", query=asked).get("files", []):
            if entry["is_dir"]:
                yield from self._listed(entry["path"])
            else:
                yield entry["path"]

    def get_file_names(self):
        """The files that were uploaded, and those in ./outputs and ./logs."""
        names = set(self._listed())
        for top in () if self._label else ("outputs", "logs"):
            for folder, _, files in os.walk(os.path.join(_work(), top)):
                names.update(os.path.relpath(os.path.join(folder, file), _work()) for file in files)
        return sorted(names)

    def download_file(self, name, output_file_path=None, _validate_checksum=False):
        """Writes a file of the run to a path, its own name if none is given."""
        to = output_file_path or os.path.basename(name)
        if os.path.isdir(to):
            to = os.path.join(to, os.path.basename(name))
        kept = os.path.join(_work(), self._path(name))
        if not self._label and os.path.isfile(kept):
            if not (os.path.exists(to) and os.path.samefile(kept, to)):
                shutil.copyfile(kept, to)
            return
        content = _call("GET", self._address(name))
        with open(to, "wb") as file:
            file.write(content)

    def register_model(self, model_name, model_path=None, tags=None, properties=None, description=None, **_):
        """Adds a version of a model to the registry of the job. Its files must have been kept before."""
        path = self._path(model_path or model_name)
        is_here = not self._label and os.path.exists(os.path.join(_work(), path))
        if not is_here and not any(name == path or name.startswith(path + "/") for name in self._listed()):
            raise ValueError("the run has no file `{}`; it has {}".format(path, self.get_file_names()))
        try:
            _api("POST", "registered-models/create", {"name": model_name})
        except RuntimeError as error:
            if "RESOURCE_ALREADY_EXISTS" not in str(error):
                raise
        source = "mlflow-artifacts:/{}/{}/artifacts/{}".format(self.experiment.id, self.id, path)
        described = dict(tags or {})
        described.update({PROPERTY + key: value for key, value in (properties or {}).items()})
        pairs = [{"key": str(key), "value": str(value)} for key, value in described.items()]
        asked = {"name": model_name, "source": source, "run_id": self.id, "tags": pairs}
        asked["description"] = description or ""
        return Model(_api("POST", "model-versions/create", asked)["model_version"], tags, properties)

    # Data.

    @property
    def input_datasets(self):
        """The paths of the inputs of the job, by name."""
        return _paths("AZURE_ML_INPUT_")

    @property
    def output_datasets(self):
        """The paths of the outputs of the job, by name."""
        return _paths("AZURE_ML_OUTPUT_")

    # Its life, and runs beside it.

    def child_run(self, name=None, run_id=None, outputs=None):
        """Begins a run beside this one."""
        tags = [{"key": "mlflow.parentRunId", "value": self.id}]
        asked = {"run_name": name or run_id or "child", "start_time": int(time.time() * 1000), "tags": tags}
        info = _api("POST", "runs/create", asked)["run"]["info"]
        whole = _variable("AZUREML_RUN_ID", "")
        child = Run(info["run_id"], info["run_id"][len(whole) + len("--"):], info["run_name"], self)
        self._children.append(child)
        return child

    def create_children(self, count=None, tag_key=None, tag_values=None):
        """Begins several runs: `count`, or one for each of `tag_values`, which it has as a tag."""
        children = [self.child_run() for _ in range(count if count is not None else len(tag_values))]
        for child, value in zip(children, tag_values or []):
            child.tag(tag_key, value)
        return children

    def get_children(self, recursive=False, tags=None, properties=None, type=None, status=None):
        """The runs that this process began beside it."""
        for child in self._children:
            yield child
            if recursive:
                yield from child.get_children(recursive=True)

    def _end(self, status, word):
        self._status = word
        if self._label:
            _api("POST", "runs/update", {"run_id": self.id, "status": status, "end_time": int(time.time() * 1000)})

    def complete(self, _set_status=True):
        """Ends a child. The run of the job ends with the script, whose exit code says how."""
        self._end("FINISHED", "Completed")

    def fail(self, error_details=None, error_code=None, _set_status=True):
        """Ends a child as failed, and keeps the error as a tag. The exit code decides about the job."""
        for key, value in (("azureml.error_code", error_code), ("azureml.error_details", error_details)):
            if value is not None:
                self.tag(key, value)
        self._end("FAILED", "Failed")

    def cancel(self):
        """Ends a child as canceled; has no effect on the job."""
        self._end("KILLED", "Canceled")

    def flush(self, timeout_seconds=300):
        """Nothing is left to do: every record is written at once."""

    def get_status(self):
        """The status of the run as far as this process knows."""
        return self._status

    status = property(get_status)

    def get_details(self):
        """The facts about the run."""
        return {"runId": self.id, "status": self._status, "properties": self.get_properties(), "tags": self.get_tags()}

    def get_portal_url(self):
        """Empty: there is no portal."""
        return ""
