use super::*;

fn variables(pairs: &[(&str, &str)]) -> Variables {
    Variables(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
}

/// A directory with a configuration file, and flags that name it.
fn file(text: &str) -> (tempfile::TempDir, Flags) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agentd.yaml");
    std::fs::write(&path, text).unwrap();
    (dir, Flags { config: Some(path), ..Flags::default() })
}

fn refusal(text: &str) -> String {
    let (_dir, flags) = file(text);
    Config::resolve(&flags, &Variables::default()).unwrap_err().to_string()
}

fn origin(config: &Config, key: &str) -> String {
    config.settings.iter().find(|setting| setting.key == key).unwrap().origin.to_string()
}

#[test]
fn test_flag_beats_variable_beats_file_beats_default() {
    let (_dir, mut flags) = file("slots: 3\nlog: warn\nkeep_jobs: 5m\n");
    let env = variables(&[("AGENTD_SLOTS", "4"), ("AGENTD_LOG", "debug")]);
    flags.slots = Some("5".into());
    let config = Config::resolve(&flags, &env).unwrap();
    assert_eq!((config.sharing, config.log.as_str()), (Sharing::Slots(5), "debug"));
    assert_eq!((config.keep.jobs, config.tracking_port), (Duration::from_secs(300), 0));
    assert_eq!(origin(&config, "slots"), "flag --slots");
    assert_eq!(origin(&config, "log"), "environment variable AGENTD_LOG");
    assert!(origin(&config, "keep_jobs").ends_with("agentd.yaml, line 3, column 12"));
    assert_eq!(origin(&config, "tracking_port"), "default");
}

#[test]
fn test_unknown_key_is_refused_with_its_place() {
    let refused = refusal("slots: 3\nslot: 4\n");
    assert!(
        refused.contains("agentd.yaml: line 2, column 1: unknown key `slot`; did you mean `slots`? the keys"),
        "{refused}"
    );
}

#[test]
fn test_bad_value_is_refused_with_its_place() {
    for (text, problem) in [
        ("slots: many", "slots: expected a number of jobs from 1 to 1000, or `auto`, found `many`"),
        ("slots: 0", "slots: expected a number of jobs"),
        ("slots: 1001", "slots: expected a number of jobs"),
        ("idle_after: 30", "idle_after: nothing says how: set `shutdown_run`"),
        ("stop_at: 19:00 mon-fri", "stop_at: nothing says how"),
        ("stop_at: 7 pm\nshutdown_run: x", "stop_at: expected times and days"),
        (
            "idle_after: 30m\nshutdown_run: x\nroles: controller",
            "idle_after: only a machine that is its own controller",
        ),
        ("job_cpus: 0", "job_cpus: expected a number of processors from 1 on"),
        ("keep_jobs: 3 weeks", "keep_jobs: expected a duration"),
        ("keep_records: 90s", "keep_records: expected `forever`, or a duration of an hour or more"),
        ("lease: 1s", "lease: expected a duration from `2s` to `1h`"),
        ("lease: 2h", "lease: expected a duration from `2s` to `1h`"),
        ("disk_reserve: lots", "disk_reserve: expected a size"),
        ("roles: [node, chef]", "roles: expected `controller`, `node` or both"),
        ("roles: node", "controller: a node without the role `controller` needs"),
        ("controller: unix:/x", "controller: this daemon is the controller itself"),
        ("state_dir: here", "state_dir: expected an absolute path"),
        ("log: loud", "log: expected a level"),
        ("job_user: no such person", "job_user: expected `owner`, `per-run`, `daemon` or a user"),
        ("job_uids: 1-2", "job_uids: expected two numbers"),
        ("root_jobs: perhaps", "root_jobs: expected `true` or `false`"),
        ("job_memory: all", "job_memory: expected a size"),
        ("conda_channels: []", "conda_channels: expected names or addresses"),
        ("conda_alias: anaconda.org", "conda_alias: expected an address"),
        ("conda_mirrors: https://a", "conda_mirrors: expected `URL=URL` pairs"),
        ("conda_credentials: creds.json", "conda_credentials: expected an absolute path"),
        ("conda_priority: lax", "conda_priority: expected `strict` or `flexible`"),
        ("offline: maybe", "offline: expected `true` or `false`"),
        ("uv: uv", "uv: expected `auto`, `never` or an absolute path"),
        ("environments_size: much", "environments_size: expected a size"),
        ("environments_age: old", "environments_age: expected a duration"),
        ("builder_memory: all", "builder_memory: expected a size"),
        ("slots: [1, [2]]", "expected a plain value, found a list"),
        ("- slots", "expected a mapping"),
    ] {
        let refused = refusal(text);
        assert!(refused.contains(problem), "{text}: {refused}");
    }
    assert!(refusal("slots: many").ends_with("agentd.yaml, line 1, column 8)"));
}

#[test]
fn test_named_file_must_exist() {
    let flags = Flags { config: Some("/nowhere/agentd.yaml".into()), ..Flags::default() };
    let refused = Config::resolve(&flags, &Variables::default()).unwrap_err();
    assert!(matches!(refused, ConfigError::Read { .. }));
}

#[test]
fn test_places_follow_mode_and_state_dir() {
    let (_dir, mut flags) = file("");
    let system = Config::resolve(&flags, &Variables::default()).unwrap();
    assert_eq!((system.state_dir, system.socket), (Places::system().state_dir, Places::system().socket));
    flags.user = true;
    let home = variables(&[("HOME", "/home/ada")]);
    let user = Config::resolve(&flags, &home).unwrap();
    assert_eq!(user.socket, Path::new("/home/ada/.local/share/agentd/agentd.sock"));
    assert_eq!(user.controller, Address::Unix(user.socket));
    assert!(matches!(Config::resolve(&flags, &Variables::default()), Err(ConfigError::NoHome)));
    flags.state_dir = Some("/srv/x".into());
    let moved = Config::resolve(&flags, &Variables::default()).unwrap();
    assert_eq!(moved.socket, Path::new("/srv/x/agentd.sock"));
}

#[test]
fn test_node_alone_needs_a_controller() {
    let (_dir, flags) = file("roles: node\ncontroller: unix:/run/c.sock\n");
    let config = Config::resolve(&flags, &Variables::default()).unwrap();
    assert_eq!(config.roles, Roles { controller: false, node: true });
    assert_eq!(config.controller.to_string(), "unix:/run/c.sock");
}

#[test]
fn test_jobs_see_a_chosen_part_of_the_environment() {
    let env = variables(&[
        ("PATH", "/bin"),
        ("HOME", "/h"),
        ("https_proxy", "http://p"),
        ("SECRET", "s"),
        ("PIP_INDEX_URL", "u"),
        ("SSL_CERT_FILE", "/c"),
    ]);
    let host = HostVariables::select(&env);
    assert_eq!(host.path, "/bin");
    let names = ["HOME", "LOGNAME", "SSL_CERT_FILE", "USER", "https_proxy"];
    assert_eq!(host.job.keys().collect::<Vec<_>>(), names, "who it is is known without the variables");
    let said = HostVariables::select(&variables(&[("LOGNAME", "ada")]));
    assert_eq!((said.job["USER"].as_str(), said.job["LOGNAME"].as_str()), ("ada", "ada"));
    assert!(host.builder.contains_key("PIP_INDEX_URL") && !host.builder.contains_key("SECRET"));
    assert_eq!(HostVariables::select(&Variables::default()).path, FALLBACK_PATH);
}

#[test]
fn test_environments_have_usable_defaults_and_can_be_told_otherwise() {
    let (_dir, mut flags) = file("");
    let usual = Config::resolve(&flags, &Variables::default()).unwrap().environments;
    assert_eq!(usual.channels, ["conda-forge"]);
    assert_eq!((usual.alias.as_str(), usual.uv), ("https://conda.anaconda.org", UvChoice::Auto));
    assert_eq!((usual.size, usual.age.as_secs(), usual.builder_memory), (50 << 30, 30 * 86_400, 0));
    assert_eq!(usual.curated, Path::new("/etc/agentd/environments"));
    flags.user = true;
    let own = Config::resolve(&flags, &variables(&[("HOME", "/home/ada")])).unwrap().environments;
    assert_eq!(own.curated, Path::new("/home/ada/.config/agentd/environments"));

    let (_dir, flags) = file(
        "conda_channels: [mine, conda-forge]\nconda_priority: flexible\noffline: true\nuv: /opt/uv\n\
         conda_mirrors: [https://a/c=https://m/c]\nconda_credentials: /etc/x.json\n\
         pip_index_url: https://u:word@host/simple\nbuilder_memory: 2GiB\n",
    );
    let config =
        Config::resolve(&flags, &variables(&[("PIP_INDEX_URL", "x"), ("PIP_NO_INDEX", "1")])).unwrap();
    let said = &config.environments;
    assert_eq!(said.channels, ["mine", "conda-forge"]);
    assert!(said.flexible && said.offline && said.mirrors["https://a/c"] == ["https://m/c"]);
    assert_eq!((&said.uv, said.builder_memory), (&UvChoice::At("/opt/uv".into()), 2 << 30));
    assert_eq!(said.credentials.as_deref(), Some(Path::new("/etc/x.json")));
    assert_eq!(config.host.builder["PIP_INDEX_URL"], "https://u:word@host/simple");
    assert_eq!(
        config.host.builder["PIP_NO_INDEX"], "1",
        "what is inherited stays where nothing else is said"
    );
    assert!(!show(&config).contains("word") && show(&config).contains("https://***@host/simple"));
}

#[test]
fn test_a_mapping_is_a_list_of_pairs() {
    let limits = |text: &str| {
        let (_dir, flags) = file(text);
        Config::resolve(&flags, &Variables::default()).map(|config| config.gangs.limits)
    };
    let expected = agent_control::UserLimits { jobs: Some(4), gpus: Some(8), ..Default::default() };
    assert_eq!(limits("limits_per_user: {jobs: 4, gpus: 8}").unwrap(), expected);
    assert_eq!(limits("limits_per_user: jobs=4, gpus=8").unwrap(), expected);
    let refused = limits("limits_per_user: {jbos: 4}").unwrap_err().to_string();
    assert!(
        refused.contains("limits_per_user: expected some of `jobs`, `gpus`, `cpus` and `waiting`"),
        "{refused}"
    );
}

#[test]
fn test_every_key_is_documented_with_its_default() {
    let page = include_str!("../../../docs/configuration.md");
    for key in KEYS {
        let row =
            page.lines().find(|line| line.starts_with('|') && line.contains(&format!("`{}`", key.name)));
        let row = row.unwrap_or_else(|| panic!("{} is not documented", key.name));
        assert!(key.default.is_empty() || row.contains(&format!("`{}`", key.default)), "{row}");
    }
    let cells = page.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    for name in cells.flat_map(|cell| cell.split(", ").map(|name| name.trim_matches('`'))) {
        assert!(KEYS.iter().any(|key| key.name == name), "{name} is documented, and is no key");
    }
}

#[test]
fn test_show_names_every_key_and_its_origin() {
    let (_dir, flags) = file("slots: 7\n");
    let shown = show(&Config::resolve(&flags, &Variables::default()).unwrap());
    assert_eq!(shown.lines().count(), KEYS.len());
    assert!(shown.contains("slots: 7 "), "{shown}");
    assert!(KEYS.iter().all(|key| shown.contains(&format!("{}: ", key.name))), "{shown}");
}

#[test]
fn test_a_machine_that_joined_is_a_node_of_its_controller() {
    use agent_identity::{Authority, Credentials, PrivateKey, SigningRequest};
    use agent_model::Timestamp;

    let state = tempfile::tempdir().unwrap();
    let now = Timestamp(1_800_000_000_000);
    let authority = Authority::open(&state.path().join("authority"), now).unwrap();
    let key = PrivateKey::generate().unwrap();
    let request = SigningRequest::read(&key.request().unwrap()).unwrap();
    let subject = "agentd://node/gpu-07/3f".parse().unwrap();
    let certificate = authority.issue(&request, &subject, now, Duration::from_secs(60)).unwrap();
    let joined = Credentials::new("https://c:7443", authority.certificate(), &certificate, &key);
    joined.write(&state.path().join("identity.json")).unwrap();
    let resolve = |text: &str| {
        let (_dir, flags) = file(text);
        let state_dir = Some(state.path().display().to_string());
        Config::resolve(&Flags { state_dir, ..flags }, &Variables::default())
    };
    let config = resolve("slots: 3\n").unwrap();
    assert_eq!(config.controller, Address::Tls { host: "c".into(), port: 7443 });
    assert_eq!(
        (config.roles, config.node_name.as_str()),
        (Roles { controller: false, node: true }, "gpu-07")
    );
    assert!(origin(&config, "controller").starts_with("joined, "));
    // Whoever only looks at the machine need not be able to read it.
    let state_dir = Some(state.path().display().to_string());
    let looks = Flags { state_dir, without_identity: true, ..Flags::default() };
    let looks = Config::resolve(&looks, &Variables::default()).unwrap();
    assert!(matches!(looks.controller, Address::Unix(_)), "{:?}", looks.controller);
    // Written settings win over it, except for the name in the certificate.
    assert!(resolve("roles: controller, node\n").unwrap().roles.controller);
    let refused = resolve("node_name: other\n").unwrap_err().to_string();
    assert!(refused.contains("joined as `gpu-07`"), "{refused}");
    assert_eq!(
        resolve("node_name: gpu-07\nlisten: 0.0.0.0:7443\n").unwrap().listen,
        Some(("0.0.0.0".into(), 7443))
    );
    assert!(resolve("listen: everywhere\n").unwrap_err().to_string().contains("listen: expected an address"));
}

#[test]
fn test_watchdog_of_another_process_is_not_ours() {
    let own = std::process::id().to_string();
    let manager = |pid: &str, micros: &str| {
        let said = [("NOTIFY_SOCKET", "/run/n"), ("WATCHDOG_USEC", micros), ("WATCHDOG_PID", pid)];
        Manager::select(&Variables(said.map(|(name, value)| (name.to_owned(), value.to_owned())).into()))
    };
    assert_eq!(manager(&own, "30000000").patience, Some(Duration::from_secs(30)));
    assert_eq!(manager("", "30000000").patience, Some(Duration::from_secs(30)));
    for (pid, micros) in [("1", "30000000"), (own.as_str(), "0"), (own.as_str(), "soon")] {
        let manager = manager(pid, micros);
        assert_eq!((manager.patience, manager.address.as_deref()), (None, Some("/run/n")));
    }
}

#[test]
fn test_whether_root_and_builders_are_kept_out_follows_from_who_may_submit() {
    for (text, shared, root, apart) in [
        ("slots: 1", false, true, false),
        ("socket_group: root", true, false, true),
        ("socket_group: root\nroot_jobs: true", true, true, true),
        ("root_jobs: false", false, false, true),
        ("job_user: per-run", false, true, true),
        ("job_user: daemon\nsocket_group: root", true, false, false),
        ("job_user: nobody", false, true, true),
    ] {
        let (_dir, flags) = file(text);
        let config = Config::resolve(&flags, &Variables::default()).unwrap();
        let found = (config.is_shared(), config.runs_as_root(), config.builds_apart());
        assert_eq!(found, (shared, root, apart), "{text}");
    }
    let (_dir, flags) = file("socket_group: root");
    let own = Flags { user: true, state_dir: Some("/srv/x".into()), ..flags };
    let config = Config::resolve(&own, &Variables::default()).unwrap();
    assert!(!config.is_shared() && !config.builds_apart() && !config.keeps_jobs_out());
}
