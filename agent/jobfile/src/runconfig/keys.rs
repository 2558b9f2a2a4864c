//! The keys of a run configuration. The tables of `agent/docs/runconfig.md` and the schema are made from them.
//!
//! The old tools wrote every key with its usual value into every file, so a usual value is never told of.

use crate::keys::{Keys, ValueKind, ignored, read, refused, unused};

const ELSEWHERE: &str = "no store is mounted for the whole job";
const ALWAYS: &str = "environments are built when they are missing, and kept";
const LIBRARIES: &str = "it is for Databricks, where no job is run from here";
const CREDENTIALS: &str =
    "keep credentials out of files: give the machine those of the registry (agent/docs/containers.md)";
const AUTO: &str = "it is set by the service";

pub(crate) static RUNCONFIG: Keys = Keys::either_case(&[
    read("script", ValueKind::Text).about("the script that runs, in the project's directory"),
    read("arguments", ValueKind::Lines).about("its arguments; `$NAME` is replaced by a variable of the job"),
    read("command", ValueKind::Lines).about("a line for a shell, in place of `script` and `arguments`"),
    read("target", ValueKind::Text)
        .about("`local`, `amlcompute`, `containerinstance`, or the name of a pool"),
    read("framework", ValueKind::Word(&FRAMEWORKS)).about("with `communicator`: how the script is started"),
    read("communicator", ValueKind::Word(&COMMUNICATORS)).about("how its processes find each other"),
    read("nodeCount", ValueKind::Whole).about("nodes that run it together"),
    read("maxRunDurationSeconds", ValueKind::Duration).about("the longest time it may run"),
    read("priority", ValueKind::Text).about("below 0: `low`; 0: `medium`; above: `high`"),
    read("environment", ValueKind::Mapping(&ENVIRONMENT)).about("the software it needs"),
    read("environmentVariables", ValueKind::Texts).about("variables; they win over those of `environment`"),
    read("docker", ValueKind::Mapping(&RUN_DOCKER)).about("wins over `environment.docker`"),
    read("history", ValueKind::Mapping(&HISTORY)).about("what is kept of the job"),
    read("spark", ValueKind::Mapping(&SPARK)).about("for `framework: PySpark`"),
    read("mpi", ValueKind::Mapping(&MPI)).about("for the communicators of MPI"),
    read("pytorch", ValueKind::Mapping(&PYTORCH)).about("for `framework: PyTorch`"),
    read("tensorflow", ValueKind::Mapping(&TENSORFLOW)).about("for `communicator: ParameterServer`"),
    read("batchai", ValueKind::Mapping(&BATCHAI)).about("the older place of `nodeCount`"),
    read("amlcompute", ValueKind::Mapping(&AMLCOMPUTE)).about("for `target: amlcompute`"),
    read("containerInstance", ValueKind::Mapping(&CONTAINER_INSTANCE))
        .about("for `target: containerinstance`"),
    read("kubernetescompute", ValueKind::Mapping(&KUBERNETES)).about("the kind of machine"),
    read("data", ValueKind::Named(&ValueKind::Mapping(&DATA))).about("data that the script reads, by name"),
    read("dataReferences", ValueKind::Named(&ValueKind::Mapping(&REFERENCE)))
        .about("the older form of `data`"),
    read("jobName", ValueKind::Text).about("the title of the job"),
    ignored("$schema"),
    ignored("name"),
    unused("hdi", &["cluster", "client", "None"], "no job is sent to a Yarn cluster"),
    unused("paralleltask", &["0", "1"], "a job on several nodes without a communicator runs once on each"),
    refused("outputData", &[], "write to `./outputs`, which is kept; fetch it with `agentctl download`"),
    refused("datacaches", &[], "name the data under `data`; what was sent once is not sent again"),
    unused("sourceDirectoryDataStore", &[], ELSEWHERE),
    unused("autoClusterComputeSpecification", &[], AUTO),
    unused("credentialPassthrough", &["false"], "a job runs as the user who submits it"),
    unused("applicationEndpoints", &[], "ports of a running job are reached with `agentctl forward`"),
    unused("autoPrepareEnvironment", &["true"], ALWAYS),
    unused("prepareEnvironment", &["true"], ALWAYS),
    unused("exposedPorts", &[], "ports of a running job are reached with `agentctl forward`"),
]);

const FRAMEWORKS: [&str; 9] = [
    "Python",
    "PySpark",
    "PyTorch",
    "TensorFlow",
    "CNTK",
    "TensorFlowParameterServer",
    "PythonMpi",
    "PythonIntelMpi",
    "PySparkInteractive",
];
const COMMUNICATORS: [&str; 8] =
    ["None", "OpenMpi", "IntelMpi", "Mpi", "ParameterServer", "Nccl", "Gloo", "ParallelTask"];

pub(crate) static ENVIRONMENT: Keys = Keys::either_case(&[
    read("name", ValueKind::Text)
        .about("with neither `python` nor `docker`: an environment the machine has by this name"),
    read("version", ValueKind::Text).about("goes with `name`"),
    read("environmentVariables", ValueKind::Texts).about("variables for the script"),
    read("python", ValueKind::Mapping(&PYTHON)).about("its Python"),
    read("docker", ValueKind::Mapping(&DOCKER)).about("its container"),
    read("spark", ValueKind::Mapping(&SPARK_PACKAGES)).about("for `framework: PySpark`"),
    ignored("assetId"),
    unused("inferencingStackVersion", &[], "it is for endpoints, and this is a job"),
    unused("databricks", &["true"], LIBRARIES),
    refused(
        "r",
        &[],
        "R comes from a conda file (`r-base`) or an image: name one, and start it with `command`",
    ),
]);

pub(crate) static PYTHON: Keys = Keys::either_case(&[
    read("userManagedDependencies", ValueKind::Flag)
        .about("`true`: nothing is installed, `interpreterPath` must have it all"),
    read("interpreterPath", ValueKind::Text).about("the interpreter of `userManagedDependencies`"),
    read("condaDependenciesFile", ValueKind::Text)
        .about("a conda file; `conda_dependencies.yml` beside the file if nothing is said"),
    read("condaDependencies", ValueKind::Free).about("the text of a conda file"),
    refused("baseCondaEnvironment", &[], "name all packages in the conda file: no environment is copied"),
]);

pub(crate) static DOCKER: Keys = Keys::either_case(&[
    read("enabled", ValueKind::Flag).about("`true`: it runs in a container"),
    read("baseImage", ValueKind::Text).about("the image; must be said"),
    read("baseImageRegistry", ValueKind::Mapping(&REGISTRY)).about("where it is"),
    read("baseDockerfile", ValueKind::Text).about("a Dockerfile in the project, in place of an image"),
    read("shmSize", ValueKind::Size).about("`/dev/shm` of the container"),
    read("arguments", ValueKind::Lines)
        .about("for the container engine, of those that are allowed: `agent/docs/containers.md`"),
    read("platform", ValueKind::Mapping(&PLATFORM)).about("of the image"),
    unused("sharedVolumes", &["true"], "a container always works in the directory of its job"),
    unused("gpuSupport", &["false"], "ask for GPUs with `--gpus`"),
    refused("buildContext", &[], "put the Dockerfile into the project and name it as `baseDockerfile`"),
    refused("preparation", &[], "put that command into a Dockerfile, or at the beginning of `command`"),
]);

static REGISTRY: Keys = Keys::either_case(&[
    read("address", ValueKind::Text).about("put before the name of the image"),
    refused("username", &[], CREDENTIALS),
    refused("password", &[], CREDENTIALS),
    unused("registryIdentity", &[], "the machine has credentials of its own"),
]);

static PLATFORM: Keys = Keys::either_case(&[
    read("os", ValueKind::Word(&["Linux"])).about("`Linux`"),
    unused("architecture", &["amd64"], "a job runs on the processors that the machine has"),
]);

static RUN_DOCKER: Keys = Keys::either_case(&[
    read("useDocker", ValueKind::Flag).about("`true`: it runs in a container"),
    read("shmSize", ValueKind::Size).about("as above"),
    read("arguments", ValueKind::Lines).about("as above"),
    unused("sharedVolumes", &["true"], "a container always works in the directory of its job"),
]);

static HISTORY: Keys = Keys::either_case(&[
    unused("outputCollection", &["true"], "`./outputs` is always kept"),
    unused("snapshotProject", &["true"], "the code is always kept"),
    unused("directoriesToWatch", &["logs", "outputs"], "only `./logs` and `./outputs` are kept"),
    unused("ambientAuthentication", &[], "a job has no identity of the cloud"),
]);

static SPARK: Keys =
    Keys::either_case(&[read("configuration", ValueKind::Texts).about("`--conf` of `spark-submit`")]);

static SPARK_PACKAGES: Keys = Keys::either_case(&[
    read("repositories", ValueKind::Lines).about("`--repositories` of `spark-submit`"),
    read("packages", ValueKind::Free)
        .about("`--packages` of `spark-submit`: a list of `group`, `artifact`, `version`"),
    ignored("precachePackages"),
]);

pub(crate) static PACKAGE: Keys = Keys::either_case(&[
    read("group", ValueKind::Text),
    read("artifact", ValueKind::Text),
    read("version", ValueKind::Text),
]);

static MPI: Keys = Keys::either_case(&[
    read("processCountPerNode", ValueKind::Whole).about("processes on each node"),
    read("nodeCount", ValueKind::Whole).about("where the `nodeCount` above is 1"),
]);

static PYTORCH: Keys = Keys::either_case(&[
    read("processCount", ValueKind::Whole).about("processes in all; one on each node if nothing is said"),
    read("nodeCount", ValueKind::Whole).about("where the `nodeCount` above is 1"),
    unused("communicationBackend", &["nccl", "gloo"], "the script chooses it"),
]);

static TENSORFLOW: Keys = Keys::either_case(&[
    read("workerCount", ValueKind::Whole).about("workers, in all"),
    read("parameterServerCount", ValueKind::Whole).about("parameter servers, in all"),
]);

static BATCHAI: Keys =
    Keys::either_case(&[read("nodeCount", ValueKind::Whole).about("where the `nodeCount` above is 1")]);

static AMLCOMPUTE: Keys = Keys::either_case(&[
    read("vmSize", ValueKind::Text).about("the kind of machine, as `resources.instance_type` of a job file"),
    ignored("name"),
    unused("vmPriority", &["dedicated"], "machines are those that there are"),
    unused("retainCluster", &["false"], "machines are those that there are"),
    unused("clusterMaxNodeCount", &["1"], "machines are those that there are; nodes of a job: `nodeCount`"),
]);

static CONTAINER_INSTANCE: Keys = Keys::either_case(&[
    read("cpuCores", ValueKind::Text).about("processors that are reserved for the job"),
    read("memoryGb", ValueKind::Text).about("memory that the job needs, in GiB"),
    ignored("region"),
]);

static KUBERNETES: Keys = Keys::either_case(&[
    read("instanceType", ValueKind::Text).about("as `resources.instance_type` of a job file")
]);

pub(crate) static DATA: Keys = Keys::either_case(&[
    read("dataLocation", ValueKind::Mapping(&LOCATION)).about("where it is"),
    read("mechanism", ValueKind::Word(&["direct", "mount", "download", "upload", "hdfs"])).about(
        "`mount`: its path; `download`: the path of a copy that the script may change; `direct`: an address, unchanged",
    ),
    read("environmentVariableName", ValueKind::Text).about("the variable with its path"),
    ignored("createOutputDirectories"),
    unused(
        "pathOnCompute",
        &[],
        "its path is in the variable, and an argument `DatasetConsumptionConfig:NAME` becomes it",
    ),
    ignored("overwrite"),
    ignored("options"),
]);

static LOCATION: Keys = Keys::either_case(&[
    read("uri", ValueKind::Mapping(&URI)).about("a path in the project, or an address"),
    read("dataPath", ValueKind::Mapping(&DATA_PATH)).about("a path of a data store"),
    read("dataset", ValueKind::Mapping(&DATASET)).about("a data set that is registered by name"),
]);

static URI: Keys = Keys::either_case(&[
    read("path", ValueKind::Text).about("relative to the project"),
    read("isFile", ValueKind::Flag).about("it is one file"),
]);

static DATA_PATH: Keys = Keys::either_case(&[
    read("datastoreName", ValueKind::Text).about("the data store"),
    read("relativePath", ValueKind::Text).about("the path in it"),
]);

static DATASET: Keys = Keys::either_case(&[
    read("name", ValueKind::Text).about("its name"),
    read("version", ValueKind::Text).about("its version"),
    read("id", ValueKind::Text).about("without a name: the data registered here under NAME is used"),
]);

pub(crate) static REFERENCE: Keys = Keys::either_case(&[
    read("dataStoreName", ValueKind::Text).about("the data store"),
    read("pathOnDataStore", ValueKind::Text)
        .about("the path in it; the variable `AZUREML_DATAREFERENCE_NAME` has the place here"),
    read("mode", ValueKind::Word(&["mount", "download", "upload"]))
        .about("`mount`: its path; `download`: the path of a copy that the script may change"),
    unused("pathOnCompute", &[], "its path is in the variable"),
    ignored("overwrite"),
]);
