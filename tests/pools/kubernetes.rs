//! Group K: nodes that are pods. The API is a strict stand-in (`api.py`), whose pods run for real: no cluster was there.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use agent_control::provider::{MachinePriority, MachineState};
use agent_tests::fleet::processes_below;
use agent_tests::table::{Row, Scale, Tally};
use agent_tests::{SOON, binaries, eventually, finish, root, signal};
use rustix::process::Signal;

use crate::pools::bed::{Bed, Lab, free_port, refused};

/// The rows of this group.
pub(crate) const ROWS: &[Row] = &[
    Row { id: "K1", promise: "kubernetes: a pod joins, and goes with its secret", run: joins },
    Row { id: "K2", promise: "kubernetes: quotas, refusals, tokens, a server that is away", run: odd },
];

/// The stand-in of a cluster; its pods end with it.
struct Cluster {
    dir: PathBuf,
    port: u16,
    server: Child,
}

impl Cluster {
    #[allow(clippy::disallowed_methods, reason = "runs what the tests need")]
    fn start(bed: &Bed) -> Cluster {
        let (dir, port) = (bed.path("cluster"), free_port());
        fs::create_dir_all(dir.join("bin")).expect("a directory");
        std::os::unix::fs::symlink(binaries().join("agentd"), dir.join("bin/agentd")).expect("a link");
        fs::write(dir.join("token"), "account-token").expect("a token");
        let mut make = Command::new("openssl");
        make.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=cluster", "-days", "2"]);
        make.args(["-addext", "subjectAltName=IP:127.0.0.1", "-keyout"]).arg(dir.join("key.pem"));
        finish(make.arg("-out").arg(dir.join("cert.pem"))).ok();
        let log = File::create(dir.join("stderr.log")).expect("a log");
        let mut api = Command::new("/usr/bin/python3");
        api.arg("-B").arg(root().join("tests/pools/api.py")).arg(&dir).arg(port.to_string());
        api.env("PATH", format!("{}:/usr/bin:/bin", dir.join("bin").display()));
        let out = File::create(dir.join("stdout.log")).expect("a log");
        let server = api.stdin(Stdio::null()).stdout(out).stderr(log).spawn().expect("Python of the system");
        let cluster = Cluster { dir, port, server };
        eventually("the API listens", SOON, || {
            fs::read_to_string(cluster.dir.join("stdout.log")).ok()?.contains("ready").then_some(())
        });
        cluster
    }

    fn lab<'a>(&self, bed: &'a Bed, more: &str) -> Lab<'a> {
        let dir = self.dir.display();
        bed.provider(&format!(
            "{{use: kubernetes, server: 'https://127.0.0.1:{}', namespace: lab, ca_file: {dir}/cert.pem, \
             token_file: {dir}/token, image: 'node:1', {more}}}",
            self.port
        ))
    }

    fn asked(&self) -> String {
        fs::read_to_string(self.dir.join("api.log")).unwrap_or_default()
    }

    fn pods(&self) -> Vec<u32> {
        processes_below(&self.dir.join("pods"))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
        for pid in self.pods() {
            signal(pid, Signal::KILL);
        }
    }
}

fn joins(tally: &mut Tally, _: &Scale) {
    let bed = Bed::new();
    let cluster = Cluster::start(&bed);
    let lab = cluster.lab(&bed, "node: {cpus: 2, memory: 1gb}, pod: {spec: {nodeSelector: {zone: a}}}");
    let Some(id) = tally.case("a pod joins, and the same request is the same pod", || {
        let id = lab.create("r_1-A", "pod_1").expect("a pod");
        assert!(id.starts_with("agentd-gpu-r-1-a-"), "{id}");
        bed.joined("pod_1");
        lab.is(&id, MachineState::Running);
        assert_eq!(lab.create("r_1-A", "pod_1").expect("a pod"), id);
        assert_eq!(lab.there(), [(id.clone(), "r_1-A".to_owned(), "pod_1".to_owned())]);
        id
    }) else {
        return;
    };
    tally.case("a list comes in pages", || {
        for number in 2..=5 {
            lab.create(&format!("r-{number}"), &format!("pod-{number}")).expect("a pod");
        }
        assert_eq!(lab.there().len(), 5);
        assert!(cluster.asked().contains("continue=agentd-"), "{}", cluster.asked());
    });
    tally.case("it goes, with its secret, by its id or its request", || {
        lab.delete(&id).expect("it goes");
        lab.is(&id, MachineState::Gone);
        lab.delete(&id).expect("it is gone");
        (2..=5).for_each(|number| lab.delete_request(&format!("r-{number}")).expect("it goes"));
        eventually("no pod is left", SOON, || {
            (lab.list().is_empty() && cluster.pods().is_empty()).then_some(())
        });
        // A secret that was left would be there: a request for it is answered with 404 instead.
        lab.delete_request("r_1-A").expect("it is gone");
        let last = cluster
            .asked()
            .lines()
            .rfind(|line| line.contains("DELETE /api/v1/namespaces/lab/secrets/"))
            .map(str::to_owned);
        assert!(last.as_deref().is_some_and(|line| line.contains(&id) && line.contains(" 404 ")), "{last:?}");
    });
}

fn odd(tally: &mut Tally, _: &Scale) {
    let bed = Bed::new();
    let cluster = Cluster::start(&bed);
    let lab = cluster.lab(&bed, "");
    tally.case("a quota that is used up is one, and leaves no secret", || {
        fs::write(cluster.dir.join("quota"), "").expect("a file");
        assert_eq!(refused(lab.create("r-1", "pod-1"), "exceeded quota"), "quota");
        assert!(
            cluster.asked().contains("DELETE /api/v1/namespaces/lab/secrets/agentd-gpu-r-1-"),
            "{}",
            cluster.asked()
        );
        fs::remove_file(cluster.dir.join("quota")).expect("a file");
    });
    tally.case("what the API refuses is told with its words", || {
        let typo = cluster.lab(&bed, "pod: {spec: {nodeSelektor: {zone: a}}}");
        assert_eq!(refused(typo.create("r-1", "pod-1"), "unknown field"), "permanent");
        let away = cluster.lab(&bed, "low_priority_class: spot");
        let id = away.create_as("r-2", "pod-2", MachinePriority::Low).expect("a pod");
        away.delete(&id).expect("it goes");
        let other = bed.provider(&format!(
            "{{use: kubernetes, server: 'https://127.0.0.1:{}', namespace: other, ca_file: {1}/cert.pem, token_file: {1}/token, image: x}}",
            cluster.port,
            cluster.dir.display()
        ));
        assert_eq!(refused(other.create("r-1", "pod-1"), "cannot use secrets in the namespace"), "permanent");
    });
    tally.case("a configuration of kubectl, in JSON", || {
        let file = bed.path("kubeconfig");
        fs::write(&file, kubeconfig(&cluster)).expect("a file");
        let lab = bed.provider(&format!(
            "{{use: kubernetes, kubeconfig: {}, namespace: lab, image: x}}",
            file.display()
        ));
        let id = lab.create("r-3", "pod-3").expect("a pod");
        bed.joined("pod-3");
        lab.delete(&id).expect("it goes");
        fs::write(&file, "apiVersion: v1\n").expect("a file");
        let error = lab.create("r-3", "pod-3");
        assert_eq!(refused(error, "kubectl config view --raw -o json"), "permanent");
    });
    tally.case("another token, certificates that do not fit, a server that is away", || {
        fs::write(cluster.dir.join("other"), "wrong").expect("a token");
        let at = |server: &str, token: &str, authority: &Path| {
            bed.provider(&format!(
                "{{use: kubernetes, server: '{server}', namespace: lab, image: x, token_file: {}, ca_file: {}}}",
                cluster.dir.join(token).display(),
                authority.display()
            ))
        };
        let (right, certificate) = (format!("https://127.0.0.1:{}", cluster.port), cluster.dir.join("cert.pem"));
        assert_eq!(refused(at(&right, "other", &certificate).create("r-1", "n"), "401"), "permanent");
        assert_eq!(refused(at("https://127.0.0.1:9", "token", &certificate).create("r-1", "n"), "refused"), "temporary");
        let system = Path::new("/etc/ssl/certs/ca-certificates.crt");
        assert_eq!(refused(at(&right, "token", system).create("r-1", "n"), "certificate verify failed"), "temporary");
        assert_eq!(refused(at("http://127.0.0.1:9", "token", &certificate).create("r-1", "n"), "https://"), "permanent");
    });
}

/// What `kubectl config view --raw -o json` prints.
fn kubeconfig(cluster: &Cluster) -> String {
    format!(
        r#"{{"kind": "Config", "apiVersion": "v1", "current-context": "lab",
            "contexts": [{{"name": "lab", "context": {{"cluster": "c", "user": "u"}}}}],
            "clusters": [{{"name": "c", "cluster": {{"server": "https://127.0.0.1:{}", "certificate-authority": "{}"}}}}],
            "users": [{{"name": "u", "user": {{"token": "account-token"}}}}]}}"#,
        cluster.port,
        cluster.dir.join("cert.pem").display()
    )
}
