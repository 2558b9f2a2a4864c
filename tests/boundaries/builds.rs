//! What is left where environments are made, by packages, interpreters and builders: it must lead the daemon nowhere.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use agent_tests::channel::Channel;
use agent_tests::copy_program;
use agent_tests::table::{Row, Scale, Tally};

use crate::boundaries::users::{ENDED, GAMES, hostile_package, is_the_daemons, shared, submitted, witness};

pub(crate) const ROWS: &[Row] = &[Row {
    id: "U10",
    promise: "scripts of conda packages run as nobody, and what builders leave leads the daemon nowhere",
    run: led_astray,
}];

/// Where the script of the package `witnessing` tells what it is.
const TOLD: &str = "/var/tmp/agent-env-witnessing";

fn led_astray(tally: &mut Tally, _: &Scale) {
    let host = shared(&[("AGENTD_UV", "never")]);
    copy_program(agent_tests::engine(), &host.home().join("bin/agent-env"));
    let _ = fs::remove_dir_all(TOLD);
    fs::create_dir(TOLD).expect("a directory");
    fs::set_permissions(TOLD, Permissions::from_mode(0o777)).expect("its own directory");
    let project = host.home().join(GAMES.to_string()).join("p");
    fs::create_dir_all(&project).expect("a directory");
    let channel = Channel::t0().file_url("links");
    fs::write(project.join("conda.yml"), format!("channels: ['{channel}']\ndependencies: [witnessing]\n"))
        .expect("a file");
    let job = submitted(
        &host,
        GAMES,
        "echo $WITNESSED; ls $CONDA_PREFIX",
        "environment: {conda_file: conda.yml}\n",
    );
    let state = host.wait_for(&job, ENDED);
    let printed = host.ctl(&["logs", &job]).stdout;
    let told = |file: &str| fs::read_to_string(Path::new(TOLD).join(file)).unwrap_or_default();
    tally.case("an activation script is nobody's, and sets what it sets", || {
        let why = host.ctl(&["why", &job]).stdout;
        assert!(state == "Completed" && printed.starts_with("yes\n"), "{state}: {printed}\n{why}");
        assert_eq!(told("uid"), "2000000000\n");
        assert!(told("status").contains("CapPrm:\t0000000000000000\n"), "{}", told("status"));
        assert!(!printed.contains("planted"), "it changed the environment: {printed}");
    });
    let _ = fs::remove_dir_all(TOLD);

    let rooted = host.home().join("rooted");
    fs::write(&rooted, "root's\n").expect("a file");
    fs::set_permissions(&rooted, Permissions::from_mode(0o600)).expect("its own file");
    let evil = host.home().join("evil");
    let names = ["requirements.txt", "environment.lock", "ready.json"];
    let link = |name: &&str| format!("[ -e {name} ] || ln -s {} {name}; ", rooted.display());
    let links: String = names.iter().map(link).collect();
    // Python finds where it is by its own name.
    let script = format!("#!/bin/bash\n{links}\nexec -a \"$0\" /usr/bin/python3 \"$@\"\n");
    fs::write(&evil, script).expect("a script");
    fs::set_permissions(&evil, Permissions::from_mode(0o755)).expect("its own file");
    let package = hostile_package(&host, &witness(&host));
    let environment = format!(
        "environment: {{python: {}, requirements: ['evil @ file://{}']}}\n",
        evil.display(),
        package.display()
    );
    let job = submitted(&host, GAMES, "echo ran", &environment);
    let state = host.wait_for(&job, ENDED);
    tally.case("what an interpreter puts in the place of the daemon's files is not written through", || {
        let shown = host.ctl(&["why", &job]).stdout;
        assert_eq!(fs::read_to_string(&rooted).expect("a file"), "root's\n", "{state}: {shown}");
        assert_eq!(rooted.metadata().expect("a file").mode() & 0o777, 0o600);
        assert_eq!(state, "Completed", "{shown}");
    });
    tally.case("all of it is the daemon's", || is_the_daemons(&host, 0));
}
