//! Group C: machines that a command line makes. That of the tests is a shell script; those of clouds are played by the same
//! script, which knows the words of their documents, and the settings are those of our guide.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use agent_control::provider::MachineState;
use agent_jobfile::yaml;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, binaries, eventually, finish, root};

use crate::pools::bed::{Bed, Lab, refused};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "C1", promise: "command: what a shell script makes joins, and goes again", run: joins },
    Row {
        id: "C2",
        promise: "command: the examples of the guide for az, aws and gcloud say what these take",
        run: clouds,
    },
    Row { id: "C3", promise: "the program that the guide shows is a provider", run: own },
];

fn script() -> PathBuf {
    root().join("tests/pools/cloud.sh")
}

/// The provider, where the programs of clouds are the script and agentd is the one under test.
fn lab<'a>(bed: &'a Bed, settings: &str) -> Lab<'a> {
    let bin = bed.path("bin");
    if !bin.exists() {
        fs::create_dir_all(&bin).expect("a directory");
        fs::create_dir_all(bed.path("cloud")).expect("a directory");
        for name in ["az", "aws", "gcloud"] {
            std::os::unix::fs::symlink(script(), bin.join(name)).expect("a link");
        }
        std::os::unix::fs::symlink(binaries().join("agentd"), bin.join("agentd")).expect("a link");
    }
    let path = format!("{}:/usr/bin:/bin", bin.display());
    let cloud = bed.path("cloud");
    bed.provider(&format!("{{environment: {{PATH: '{path}', CLOUD: '{}'}}, {settings}}}", cloud.display()))
}

fn joins(tally: &mut Tally, _: &Scale) {
    let bed = Bed::new();
    let script = script();
    let settings = format!(
        "use: command, create: ['{0}', make, 'vm-{{name}}', '{{request}}', '{{script_file}}'], id: lines, \
         list: ['{0}', lines], machines: lines, delete: ['{0}', remove, '{{id}}']",
        script.display()
    );
    let lab = lab(&bed, &settings);
    tally.case("it joins, is the same for the same request, and goes", || {
        let id = lab.create("r-1", "cloud-1").expect("a machine");
        assert_eq!(id, "vm-cloud-1");
        bed.joined("cloud-1");
        assert_eq!(lab.create("r-1", "cloud-1").expect("a machine"), id);
        assert_eq!(lab.there(), [(id.clone(), "r-1".to_owned(), String::new())]);
        assert_eq!(lab.list()[0].state, MachineState::Running);
        lab.delete(&id).expect("it goes");
        lab.delete(&id).expect("it is gone");
        lab.delete_request("r-1").expect("it is gone");
        assert!(lab.list().is_empty());
    });
    tally.case("no file with the token is left", || {
        let left: Vec<_> =
            fs::read_dir(bed.path("lab")).expect("a directory").flatten().map(|one| one.path()).collect();
        assert!(left.is_empty(), "{left:?}");
    });
    tally.case("words of a failure decide what it is", || {
        fs::write(bed.path("cloud/full"), "").expect("a file");
        assert_eq!(refused(lab.create("r-2", "cloud-2"), "QuotaExceeded: no cores are left"), "quota");
        fs::remove_file(bed.path("cloud/full")).expect("a file");
        let away = self::lab(&bed, &settings.replace("lines]", "nonsense]"));
        assert!(away.list().is_empty(), "a script that says nothing lists nothing");
    });
    tally.case("holes that nothing fills, and settings that are missing", || {
        let hole = self::lab(&bed, &settings.replace("vm-{name}", "{nmae}"));
        assert_eq!(refused(hole.create("r-3", "n"), "nothing is known of `{nmae}`"), "permanent");
        let none = self::lab(&bed, "use: command, create: [true], list: [true]");
        assert_eq!(refused(none.create("r-3", "n"), "the setting `delete` is missing"), "permanent");
        let absent =
            self::lab(&bed, "use: command, create: [no-such-program], list: [no-such-program], delete: [x]");
        assert_eq!(refused(absent.create("r-3", "n"), "no-such-program does not start"), "permanent");
    });
}

/// The providers that the guide shows, as they are written there.
fn examples() -> BTreeMap<String, String> {
    let guide = fs::read_to_string(root().join("agent/docs/providers.md")).expect("the guide");
    let mut found = BTreeMap::new();
    for block in guide.split("```yaml\n").skip(1) {
        let text = format!("\n{}", block.split("```").next().unwrap_or_default());
        let all = yaml::parse(&text).expect("YAML");
        for (key, _) in all.map().expect("a mapping").rest() {
            let begin = format!("\n{}:\n", key.text);
            let of = text.split(&begin).nth(1).map(|rest| {
                let lines = rest.lines().take_while(|line| line.starts_with("  "));
                lines.map(|line| format!("{line}\n")).collect::<String>()
            });
            found.extend(of.map(|of| (key.text, of)));
        }
    }
    found
}

fn clouds(tally: &mut Tally, _: &Scale) {
    let bed = Bed::new();
    lab(&bed, "use: command"); // makes the programs
    let examples = examples();
    for (name, id) in [("azure", "pool-1"), ("amazon", "i-r-1"), ("google", "pool-1")] {
        tally.case(name, || {
            let path = format!("{}:/usr/bin:/bin", bed.path("bin").display());
            let cloud = bed.path(&format!("cloud-{name}"));
            fs::create_dir(&cloud).expect("a directory");
            let own = format!("  environment: {{PATH: '{path}', CLOUD: '{}'}}\n", cloud.display());
            let lab = bed.provider(&format!("\n{}{own}", examples[name]));
            assert_eq!(lab.create("r-1", "pool-1").expect("a machine"), id);
            assert_eq!(lab.create("r-1", "pool-1").expect("a machine"), id, "the same again");
            let data = fs::read_to_string(cloud.join(id).join("script")).expect("user data");
            assert!(data.starts_with("#cloud-config\n") && data.contains(&bed.token), "{data}");
            let there = lab.list();
            let one = there.first().map(|one| (one.id.as_str(), one.request.as_deref(), one.state));
            assert_eq!((there.len(), one), (1, Some((id, Some("r-1"), MachineState::Running))));
            fs::write(cloud.join("full"), "").expect("a file");
            assert_eq!(refused(lab.create("r-2", "pool-2"), "QuotaExceeded"), "quota");
            lab.delete(id).expect("it goes");
            eventually("nothing is left", SOON, || lab.list().is_empty().then_some(()));
            lab.delete(id).expect("it is gone");
        });
    }
}

/// The program of the guide, as somebody would save it.
#[allow(clippy::disallowed_methods, reason = "makes what it tests")]
fn own(tally: &mut Tally, _: &Scale) {
    let bed = Bed::new();
    let guide = fs::read_to_string(root().join("agent/docs/providers.md")).expect("the guide");
    let text =
        guide.split("```python\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a program");
    let (draft, program) = (bed.path("draft"), bed.path("own"));
    fs::write(&draft, text).expect("a file");
    // By a process of its own: nobody here has the program open while it is started.
    finish(Command::new("install").args(["-m", "755"]).arg(&draft).arg(&program)).ok();
    let lab = lab(&bed, &format!("use: '{}'", program.display()));
    tally.case("it joins, is the same for the same request, and goes", || {
        let id = lab.create("r-1", "own-1").expect("a machine");
        bed.joined("own-1");
        assert_eq!(lab.create("r-1", "own-1").expect("a machine"), id);
        let other = lab.create("r-2", "own-2").expect("a machine");
        bed.joined("own-2");
        assert_eq!(lab.there().len(), 2);
        lab.delete(&id).expect("it goes");
        lab.delete(&id).expect("it is gone");
        lab.delete_request("r-2").expect("it goes");
        assert!(lab.list().is_empty());
        for id in [id, other] {
            eventually("its daemon ends", SOON, || {
                let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
                (stat.is_empty() || stat.contains(") Z ")).then_some(())
            });
        }
    });
}
