//! Documents are typed: every command that one of them shows is put into a shell, in order, on the machines it means, and
//! every file that one shows is accepted.
//!
//! Owns the few tables of what cannot be typed here, each row with the place where it is run instead, and what stands for
//! the words in capitals. A block of commands is a fence ```` ```console ````; a command follows `$ `, and the word before
//! names the machine.

mod machines;

use std::fs;
use std::path::{Path, PathBuf};

use agent_tests::{Ran, root};

use machines::Machines;

/// A command is run elsewhere: how it begins, which file runs it, and words of that file.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    ("packaging/quickstart", "tests/run", r#"packaging/quickstart "${ready[@]"#),
    ("tests/run", ".ci/run", "/../tests/run"),
    ("./install.sh", "tests/package/rows.py", "install.sh and its --uninstall leave nothing"),
    ("sudo apt install ", "tests/bed/guide.py", r#"walk("Install")"#),
    ("systemctl status agentd", "tests/bed/guide.py", r#"walk("Install")"#),
    ("sudo apt remove ", "tests/bed/guide.py", r#"commands("Uninstall")"#),
    ("sudo apt purge ", "tests/bed/guide.py", r#"commands("Uninstall")"#),
    (
        "agentctl attach ",
        "tests/attach/nodes.rs",
        r#"bed.attach(&root, &["--accept-new", "--label", "rack=7"])"#,
    ),
    ("agentctl exec ", "tests/system/inside.rs", r#"["exec", &job, "--"]"#),
    ("agentctl forward ", "tests/system/inside.rs", r#"["forward", &job, "#),
    ("agentctl open ", "tests/system/inside.rs", r#"["open", &job, "tensorboard"]"#),
    ("agentctl mlflow ui ", "tests/system/mlflow.rs", r#"["mlflow", "ui", &job, "--to""#),
    ("agentctl pool create ", "tests/pools/grow.rs", r#"["pool", "create", "gpu", "--provider", "lab""#),
    ("agentctl detach ", "tests/attach/nodes.rs", "bed.detach(&root, &[])"),
    ("sudo chown -R agentd: /var/lib/agentd", "tests/bed/split.py", r#""chown", "-R", "agentd:""#),
    ("sudo rm /etc/systemd/system/agentd.service.d/root.conf", "tests/bed/split.py", "AS_ROOT.unlink()"),
    ("sudo systemctl daemon-reload", "tests/bed/split.py", r#"systemctl("daemon-reload")"#),
];

/// A file that neither `agentctl check` nor `agentd check-config` reads: its document, its first key, and the test that
/// reads it.
const READ_ELSEWHERE: &[(&str, &str, &str)] = &[
    ("agent/docs/data.md", "datastores:", "test_the_example_of_the_guide_is_read"),
    ("agent/docs/pipelines.md", "name: prep", "test_the_example_of_the_guide_is_read_with_its_component"),
    ("agent/docs/pools.md", "lab:", "test_the_providers_of_the_guide_are_read"),
    ("agent/docs/providers.md", "lab:", "test_the_providers_of_the_guide_are_read"),
    ("agent/docs/providers.md", "# Three clouds.", "test_the_providers_of_the_guide_are_read"),
    ("agent/docs/attach.md", "hosts:", "test_a_file_of_machines_is_read_as_the_guide_shows_it"),
];

const TRAIN: &str = r#"
import json, os

print("trained")
with open("outputs/model.pkl", "w") as model:
    model.write("weights")
with open(os.environ["AGENTD_METRICS"], "a") as metrics:
    metrics.write(json.dumps({"metric": "loss", "value": 0.25, "step": 1}) + "\n")
"#;
const JOB: &str =
    "command: python3 train.py --lr ${{inputs.lr}}\ncode: .\nenvironment: host\ninputs: {lr: 0.1}\n";
const BATCH: &str = "#!/bin/bash\n#SBATCH --job-name=train --time=5\nsrun python3 train.py \"$@\"\n";
const RUNCONFIG: &str =
    "script: train.py\nenvironment: {python: {userManagedDependencies: true, interpreterPath: python3}}\n";
const PIPELINE: &str = "\
jobs:
  prep:
    component: components/prep.yml
    inputs: {raw: {type: uri_file, path: data/iris.csv}}
  train:
    command: cat ${{inputs.rows}}/rows >${{outputs.model}}/lines
    environment: host
    inputs: {rows: '${{parent.jobs.prep.outputs.rows}}'}
    outputs: {model: '${{parent.outputs.model}}'}
outputs: {model: {type: uri_folder}}
";
const COMPONENT: &str = "\
inputs: {raw: {type: uri_file}}
outputs: {rows: {type: uri_folder}}
environment: host
command: cp ${{inputs.raw}} ${{outputs.rows}}/rows
";
const CONDA: &str = "channels: [main]\ndependencies: [python]\n";

/// Makes the mistake whose report a document shows.
const MISTAKE: &str = r"
printf 'command: python train.py\ncode: .\nenvironment: {conda_file: conda.yml}\n' >my-project/job.yml
printf 'name: mine\nchannels:\n- main\ndependencies:\n  - pip\n  - python=>3.11\n' >my-project/conda.yml";

/// What documents assume in the directory in which people type.
const FILES: &[(&str, &str)] = &[
    ("train.py", TRAIN),
    ("train.sh", BATCH),
    ("jobs/train.slurm", BATCH),
    ("conda.yml", CONDA),
    ("key.txt", "hunter2\n"),
    ("data/iris.csv", "5.1,3.5\n"),
    ("pipeline.yml", PIPELINE),
    ("components/prep.yml", COMPONENT),
    (".azureml/local.runconfig", RUNCONFIG),
    ("my-project/train.py", TRAIN),
    ("my-project/.azureml/local.runconfig", RUNCONFIG),
];

/// A command as a document shows it.
#[derive(Debug)]
struct Shown {
    /// The document and the line, for whoever has to mend it.
    place: String,
    /// The word before the `$`.
    machine: String,
    command: String,
    /// The lines below it, which it prints.
    prints: Vec<String>,
}

/// A block of a document.
struct Fence {
    kind: String,
    /// The number of its first line.
    line: usize,
    text: String,
}

fn documents() -> Vec<PathBuf> {
    let mut found = vec![PathBuf::from("README.md")];
    let pages = fs::read_dir(root().join("agent/docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|kind| kind == "md"));
    found.extend(pages.map(|path| path.strip_prefix(root()).unwrap().to_owned()));
    found.sort();
    found
}

fn fences(document: &Path) -> Vec<Fence> {
    let mut found: Vec<Fence> = Vec::new();
    let mut is_inside = false;
    for (index, line) in fs::read_to_string(root().join(document)).unwrap().lines().enumerate() {
        match line.strip_prefix("```") {
            Some(_) if is_inside => is_inside = false,
            Some(kind) => {
                is_inside = true;
                found.push(Fence { kind: kind.to_owned(), line: index + 2, text: String::new() });
            }
            None if is_inside => found.last_mut().unwrap().text.push_str(&format!("{line}\n")),
            None => {}
        }
    }
    assert!(!is_inside, "a block of {} does not end", document.display());
    found
}

/// The word before a prompt, and what follows it.
fn prompt(line: &str) -> Option<(&str, &str)> {
    let (machine, command) = line.split_once("$ ")?;
    machine.chars().all(|c| c.is_ascii_lowercase()).then_some((machine, command))
}

fn commands(document: &Path) -> Vec<Shown> {
    let mut found: Vec<Shown> = Vec::new();
    for fence in fences(document) {
        for (line, number) in fence.text.lines().zip(fence.line..) {
            let place = format!("{}:{number}", document.display());
            match prompt(line) {
                Some((machine, command)) => {
                    assert_eq!(fence.kind, "console", "{place}: a command is in a block of another kind");
                    let machine = if machine.is_empty() { "box" } else { machine }.to_owned();
                    found.push(Shown { place, machine, command: command.to_owned(), prints: Vec::new() });
                }
                None if fence.kind == "console" && !line.is_empty() => {
                    let shown = found.last_mut().unwrap_or_else(|| panic!("{place}: no command prints this"));
                    shown.prints.push(line.to_owned());
                }
                None => {}
            }
        }
    }
    found
}

fn is_elsewhere(shown: &Shown) -> bool {
    ELSEWHERE.iter().any(|(begins, ..)| shown.command.starts_with(begins))
}

/// Somebody who types what a document shows.
struct Reader {
    machines: Machines,
    /// A job that has ended, once one is asked for.
    job: Option<String>,
    /// A job that runs for a while.
    busy: Option<String>,
    /// A token for machines, a code for people and the key of an environment, as they were printed last.
    token: String,
    code: String,
    key: String,
}

impl Reader {
    fn of(document: &Path, shown: &[Shown]) -> Reader {
        let has = |words: &str| shown.iter().any(|shown| shown.command.contains(words));
        let mut files = FILES.to_vec();
        // A run configuration is looked for where there is no job file.
        if !document.ends_with("runconfig.md") {
            files.push(("my-project/job.yml", JOB));
        }
        let mut machines = Machines::new(&files, !has("listen:"));
        if has("envs build") {
            machines.have_packages();
        }
        let none = String::new;
        Reader { machines, job: None, busy: None, token: none(), code: none(), key: none() }
    }

    /// Types a command, and keeps what later ones need of what it printed.
    fn read(&mut self, shown: &Shown) {
        if let Some(verb) = shown.command.strip_prefix("sudo systemctl ")
            && let Some((verb @ ("start" | "stop" | "restart"), _)) = verb.split_once(" agentd")
        {
            return self.machines.systemctl(&shown.machine, verb);
        }
        let mistake = shown.prints.iter().any(|line| line.starts_with("error["));
        if mistake {
            self.machines.type_at(&shown.machine, false, MISTAKE, "").ok();
        }
        let line = self.fill_in(shown);
        let input = if line.starts_with("agentctl login") { self.code.clone() } else { String::new() };
        let is_root = line.contains("sudo ");
        let ran = self.machines.type_at(&shown.machine, is_root, &line.replace("sudo ", ""), &input);
        let due = if mistake { 125 } else { 0 };
        let said = format!("{}{}\n{}", ran.stdout, ran.stderr, self.machines.logs());
        assert_eq!(ran.code, due, "{}: {line}\n{said}", shown.place);
        assert_prints(shown, &ran);
        self.learn(shown, &ran);
    }

    /// The command with what its words in capitals, and what only stands for something, mean here.
    fn fill_in(&mut self, shown: &Shown) -> String {
        let mut line = shown.command.clone();
        if line.contains("JOB") {
            let job = match line.split(' ').nth(1) {
                Some("hold" | "set") => self.waiting(&shown.machine),
                Some("cancel") => self.running(&shown.machine),
                _ => self.ended(&shown.machine),
            };
            line = line.replace("JOB...", "JOB -").replace("JOB", &job);
        }
        line = line.replace("agentd-join-...", &self.token).replace("conda-3f0a", &self.key);
        line.replace(":7443", &format!(":{}", self.machines.port()))
    }

    fn submit(&mut self, machine: &str, words: &str) -> String {
        let ran = self.machines.type_at(machine, false, &format!("agentctl submit my-project {words}"), "");
        ran.ok().stdout.trim().to_owned()
    }

    fn ended(&mut self, machine: &str) -> String {
        if self.job.is_none() {
            let job = self.submit(machine, "");
            self.machines.type_at(machine, false, &format!("agentctl wait {job}"), "").ok();
            self.job = Some(job);
        }
        self.job.clone().unwrap()
    }

    fn running(&mut self, machine: &str) -> String {
        if self.busy.is_none() {
            self.busy = Some(self.submit(machine, "-- sleep 60"));
        }
        self.busy.clone().unwrap()
    }

    fn waiting(&mut self, machine: &str) -> String {
        let first = self.running(machine);
        self.submit(machine, &format!("--after {first}"))
    }

    fn learn(&mut self, shown: &Shown, ran: &Ran) {
        let word = |begins: &str| {
            ran.stdout.split_whitespace().find(|word| word.starts_with(begins)).map(str::to_owned)
        };
        if let Some(token) = word("agentd-join-") {
            self.machines.type_at("machine", false, &format!("echo {token} >token"), "").ok();
            self.token = token;
        }
        if let Some(code) = word("agentd-login-") {
            self.code = code;
        }
        if shown.command.starts_with("agentctl envs build") {
            // As much of it as the documents show.
            self.key = word("conda-").unwrap()[.."conda-3f0a".len()].to_owned();
        }
    }
}

/// Whether a command printed what the document shows: an error as it is, of anything else what is the same each time.
fn assert_prints(shown: &Shown, ran: &Ran) {
    let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let printed = flat(&format!("{}{}", ran.stdout, ran.stderr));
    let is_error = shown.prints.iter().any(|line| line.starts_with("error["));
    for line in &shown.prints {
        let due: String = if is_error { flat(line) } else { line.chars().take(12).collect() };
        assert!(printed.contains(&due), "{}: no `{due}` in {printed}", shown.place);
    }
}

#[test]
fn test_every_command_in_the_documents_does_what_they_say() {
    std::thread::scope(|scope| {
        for document in documents() {
            scope.spawn(move || {
                let shown = commands(&document);
                let mut reader = Reader::of(&document, &shown);
                shown.iter().filter(|shown| !is_elsewhere(shown)).for_each(|shown| reader.read(shown));
            });
        }
    });
}

#[test]
fn test_what_is_not_typed_is_still_shown_and_run_where_the_table_says() {
    let shown: Vec<Shown> = documents().iter().flat_map(|document| commands(document)).collect();
    assert!(shown.len() > 80, "{} commands are found", shown.len());
    for (begins, file, words) in ELSEWHERE {
        assert!(shown.iter().any(|shown| shown.command.starts_with(begins)), "no document shows `{begins}`");
        assert!(fs::read_to_string(root().join(file)).unwrap().contains(words), "`{words}` is not in {file}");
    }
}

#[test]
fn test_every_file_in_the_documents_is_accepted() {
    let files = [FILES, &[("requirements.txt", ""), ("data/train.csv", "")]].concat();
    let mut machines = Machines::new(&files, false);
    let mut unread = READ_ELSEWHERE.to_vec();
    let mut accepted = 0;
    let mut check = |command: &str, place: &str, text: &str| {
        let ran = machines.type_at("laptop", false, &format!("cat >file.yml && {command}"), text);
        assert_eq!(ran.code, 0, "{place}: {}{}", ran.stdout, ran.stderr);
        accepted += 1;
    };
    for document in documents() {
        for fence in fences(&document).into_iter().filter(|fence| fence.kind == "yaml") {
            let place = format!("{}:{}", document.display(), fence.line);
            let has = |key: &str| fence.text.lines().any(|line| line.starts_with(key));
            let before = unread.len();
            unread.retain(|(of, key, _)| !(document == Path::new(of) && has(key)));
            if unread.len() < before {
                continue;
            }
            let command = match has("command:") || has("trial:") || has("jobs:") {
                true => "agentctl check --strict file.yml",
                false => "agentd check-config --config file.yml",
            };
            check(command, &place, &fence.text);
        }
    }
    // The one that the package installs, and with everything that it only mentions.
    let packaged = fs::read_to_string(root().join("packaging/deb/agentd.yaml")).unwrap();
    let named =
        |line: &'_ str| line.strip_prefix('#').filter(|key| !key.starts_with(' ')).unwrap_or(line).to_owned();
    let whole: Vec<String> = packaged.lines().map(named).collect();
    for text in [packaged.as_str(), &whole.join("\n")] {
        check("agentd check-config --config file.yml", "packaging/deb/agentd.yaml", text);
    }
    assert!(unread.is_empty(), "no document shows {unread:?}");
    assert!(accepted > 10, "{accepted} files are found");
}
