//! The rows.

/// A row of the contract.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) number: u32,
    /// What people do.
    pub(crate) what: &'static str,
    pub(crate) proof: Proof,
}

/// What shows that it works.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Proof {
    /// Tests that run anywhere.
    Tests(&'static [&'static str]),
    /// Rows of a suite that needs machines, networks or an engine of its own.
    Suite(&'static str, &'static [&'static str]),
    /// Nothing: it is not done, and why.
    No(&'static str),
}

impl Row {
    pub(crate) fn tests(&self) -> &'static [&'static str] {
        match self.proof {
            Proof::Tests(tests) => tests,
            Proof::Suite(..) | Proof::No(_) => &[],
        }
    }
}

const fn tests(number: u32, what: &'static str, tests: &'static [&'static str]) -> Row {
    Row { number, what, proof: Proof::Tests(tests) }
}

const fn suite(number: u32, what: &'static str, suite: &'static str, rows: &'static [&'static str]) -> Row {
    Row { number, what, proof: Proof::Suite(suite, rows) }
}

const fn no(number: u32, what: &'static str, why: &'static str) -> Row {
    Row { number, what, proof: Proof::No(why) }
}

/// The service itself, which is elsewhere.
const CLOUD: &str = "it is a service of the cloud";

/// The whole table.
pub(crate) const ROWS: [Row; 64] = [
    tests(1, "run on this machine", &["test_a_job_runs_from_nothing_to_its_outputs"]),
    suite(2, "attach a machine by its address", "attach", &["N1", "L1", "L2"]),
    no(
        3,
        "attach a machine by its resource id",
        "ids are the cloud's; a file of machines has names: tests/run attach N4",
    ),
    suite(4, "be told which systems are supported", "attach", &["M2"]),
    no(5, "create a virtual machine", CLOUD),
    tests(
        6,
        "conda made by the system",
        &["test_an_example_with_a_conda_file_runs_against_the_local_channel"],
    ),
    tests(
        7,
        "a Python that is there",
        &[
            "test_python_that_is_not_there",
            "test_a_python_of_the_machine_that_lacks_modules_is_refused_with_all_of_them",
        ],
    ),
    suite(8, "a container of an image", "containers", &["S1", "S2", "S3", "C3"]),
    tests(9, "a GPU image on a GPU machine", &["test_image_for_gpus_is_refused_before_anything_is_pulled"]),
    suite(10, "detach and attach again", "attach", &["N1", "C2"]),
    no(
        11,
        "a cluster with least and most nodes",
        "pools of machines are not here yet; nodes with labels are",
    ),
    tests(
        12,
        "files of the Batch AI time",
        &["test_a_file_with_every_key_that_the_old_tools_wrote_is_read_without_a_warning"],
    ),
    no(13, "a cluster for one run", "the run is placed on any node that fits, with a warning"),
    no(14, "no nodes while nothing runs", "pools of machines are not here yet"),
    tests(15, "a node that is taken away", &["test_a_lost_job_runs_again_when_it_may"]),
    suite(16, "MPI over several nodes", "gangs", &["X1", "X2", "J1"]),
    tests(17, "many nodes", &["test_a_long_line_costs_little"]),
    tests(18, "the status of the nodes", &["test_document_of_a_box"]),
    no(19, "wait until nodes are there", "a job waits by itself, and says why"),
    tests(
        20,
        "an identity of the system or of users",
        &["test_what_has_no_effect_is_a_warning_with_its_place"],
    ),
    tests(21, "a compute instance: one machine and a queue", &["test_200_tiny_jobs_all_run_once"]),
    tests(22, "several jobs and a queue", &["test_a_waiting_job_says_why_and_priority_goes_first"]),
    no(23, "stop when idle, and on a schedule", "not here yet"),
    tests(
        24,
        "a disk that is nearly full",
        &[
            "test_full_disk_is_said_and_nothing_stored_is_lost",
            "test_old_snapshots_make_room_and_outputs_stay",
        ],
    ),
    no(25, "HDInsight", "of Spark only `distribution: spark` in the job itself: tests/run gangs F3"),
    suite(26, "a container instance with limits", "containers", &["C3", "C4"]),
    no(27, "Databricks", CLOUD),
    no(28, "Data Lake Analytics", CLOUD),
    no(29, "Azure Batch", CLOUD),
    no(30, "Kubernetes", "not here yet; `instance_type` is a label of nodes"),
    tests(31, "no compute is named", &["test_smallest_job_and_json"]),
    tests(32, "a Spark job", &["test_what_is_not_run_is_refused_with_its_place_and_a_way_out"]),
    no(33, "deploy a model", "a job is a training"),
    tests(
        34,
        "kinds of machines",
        &["test_the_kind_of_a_machine_is_a_label", "test_labels_are_demanded_and_missing_ones_are_named"],
    ),
    tests(
        35,
        "see how much memory a job took",
        &["test_what_a_job_took_is_told_and_why_a_command_ends_that_nobody_reads"],
    ),
    tests(36, "one script for every target", &["test_the_same_job_runs_in_conda_pip_and_host_environments"]),
    tests(
        37,
        "a run configuration",
        &["test_a_run_configuration_runs_with_its_data_variables_and_arguments"],
    ),
    tests(38, "templates for a folder", &["test_init_writes_what_checks_and_runs_and_never_writes_over"]),
    tests(
        39,
        "write a run configuration by hand",
        &["test_check_tells_all_mistakes_of_all_files_with_their_places"],
    ),
    tests(40, "experiments", &["test_lists_of_some_jobs_and_those_who_watch_see_the_end"]),
    tests(
        41,
        "az ml run submit-script",
        &[
            "test_names_are_looked_for_in_the_order_of_the_old_tools",
            "test_words_of_the_command_line_go_before_those_of_the_file",
        ],
    ),
    tests(
        42,
        "sweeps",
        &[
            "test_six_trials_over_a_kill_of_the_controller_of_which_a_policy_ends_one",
            "test_policies_end_whom_the_reference_ends",
            "test_a_sweep_file_is_read_as_it_is",
        ],
    ),
    tests(43, "the whole directory is sent", &["test_push_sends_each_content_once_and_then_nothing"]),
    tests(44, "only what changed is sent", &["test_second_run_sends_nothing_and_builds_nothing"]),
    tests(
        45,
        ".amlignore and .gitignore",
        &[
            "test_what_is_ignored_stays_at_home",
            "test_amlignore_wins_over_gitignore_and_git_is_never_included",
        ],
    ),
    no(46, "properties of git", "not recorded yet"),
    tests(47, "an environment is used again", &["test_second_run_sends_nothing_and_builds_nothing"]),
    no(
        48,
        "fail where the environment is not there",
        "it is always made; `offline: true` fails: test_offline_uses_what_is_there_and_says_what_is_not",
    ),
    tests(49, "prepare an environment before", &["test_environments_are_listed_shown_pinned_and_removed"]),
    no(50, "settings of Spark", "the section is read and has no effect, which is warned of"),
    tests(
        51,
        "data of a store",
        &[
            "test_stores_and_mapped_addresses_are_where_the_operator_says",
            "test_outputs_go_to_a_share_below_the_name_of_the_job",
            "test_outputs_go_to_a_store_of_objects_with_its_credentials_which_go_nowhere",
        ],
    ),
    tests(52, "estimators", &["test_framework_and_communicator_say_together_how_a_script_is_started"]),
    tests(
        53,
        "pipelines",
        &[
            "test_a_pipeline_is_followed_and_what_steps_left_goes_to_the_next_by_content",
            "test_a_failed_step_stops_what_needs_it_and_the_pipeline_goes_on_from_there",
        ],
    ),
    tests(
        54,
        "sweeps on every target",
        &["test_a_sweep_from_the_command_line_is_followed_and_then_extended"],
    ),
    no(55, "automated learning, designer", CLOUD),
    no(56, "a portal", "the command line does all of it"),
    tests(57, "the command line", &["test_every_command_in_the_documents_does_what_they_say"]),
    suite(58, "keys for SSH", "attach", &["L2"]),
    suite(59, "jobs are apart from each other", "boundaries", &["U1", "U2", "C1"]),
    tests(60, "follow a log", &["test_20_kills_of_the_daemon_lose_and_repeat_no_line"]),
    tests(
        61,
        "metrics",
        &[
            "test_mlflow_clients_of_two_generations",
            "test_a_script_in_a_local_target_keeps_its_forty_metrics_and_twenty_models",
            "test_a_script_of_the_sdk_v1_keeps_its_forty_metrics_and_twenty_models",
            "test_the_stand_in_records_all_that_a_run_of_the_sdk_v1_can_log",
        ],
    ),
    tests(62, "the longest time of a job", &["test_outputs_are_kept_after_failure_cancel_and_time_limit"]),
    tests(63, "cancel", &["test_cancel_leaves_no_process_of_the_family"]),
    tests(64, "limits for a user", &["test_a_user_at_a_limit_waits_for_the_own_jobs_and_nobody_else_does"]),
];
