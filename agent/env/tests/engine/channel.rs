//! A channel of packages of a few bytes, made on the spot, and a server of it that wants a credential.
//!
//! Owns what the packages are.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use agent_env::Channel;
use rattler_conda_types::compression_level::CompressionLevel;
use rattler_package_streaming::write::write_tar_bz2_package;
use serde_json::{Value, json};

/// What takes the place of the prefix in a package.
const PLACEHOLDER: &str = "/placeholder_placeholder_placeholder_placeholder_placeholder_placeholder";

/// A channel in a directory of its own.
pub(crate) struct Site {
    dir: tempfile::TempDir,
    packages: BTreeMap<&'static str, serde_json::Map<String, Value>>,
}

enum What<'a> {
    File(&'a str, &'a [u8]),
    Text(&'a str, &'a str),
    Link(&'a str, &'a str),
    /// Listed, but not there.
    Listed(&'a str),
}

impl Site {
    /// The channel.
    pub(crate) fn new() -> Self {
        let mut site = Self { dir: tempfile::tempdir().unwrap(), packages: BTreeMap::new() };
        let whereabouts = format!("#!/bin/sh\necho {PLACEHOLDER}\n");
        site.add("linux-64", "python", "3.11.4", &[], &[What::File("bin/python", b"#!/bin/sh\n")]);
        site.add("noarch", "lib", "1.0", &[], &[What::File("share/lib.txt", b"old")]);
        site.add("noarch", "lib", "2.0", &[], &[What::File("share/lib.txt", b"new")]);
        site.add(
            "noarch",
            "app",
            "1.0",
            &["lib >=2"],
            &[
                What::File("share/app.txt", b"app"),
                What::Text("bin/where", &whereabouts),
                What::Link("share/l", "app.txt"),
            ],
        );
        site.add("noarch", "old-lib", "1", &["lib <2"], &[What::File("share/old.txt", b"x")]);
        site.add(
            "noarch",
            "active",
            "1",
            &[],
            &[What::File("etc/conda/activate.d/a.sh", b"export ACTIVE=$CONDA_PREFIX/x\n")],
        );
        site.add("noarch", "evil-link", "1", &[], &[What::Link("share/evil", "../../../../etc/passwd")]);
        site.add(
            "noarch",
            "evil-path",
            "1",
            &[],
            &[What::File("share/x", b"x"), What::Listed("../../../escaped")],
        );
        let names: Vec<String> = (0..300).map(|n| format!("share/many/{n}")).collect();
        let many: Vec<What<'_>> = names.iter().map(|name| What::File(name, b"0123456789")).collect();
        site.add("noarch", "many", "1", &[], &many);
        for subdir in ["linux-64", "noarch"] {
            let packages = site.packages.get(subdir).cloned().unwrap_or_default();
            let repodata = json!({"info": {"subdir": subdir}, "packages": packages, "packages.conda": {}});
            fs::write(site.root().join(subdir).join("repodata.json"), repodata.to_string()).unwrap();
        }
        site
    }

    /// Its directory.
    pub(crate) fn root(&self) -> &Path {
        self.dir.path()
    }

    /// It, as a request names it.
    pub(crate) fn channel(&self) -> Channel {
        Channel { name: "site".into(), url: format!("file://{}", self.root().display()), mirrors: Vec::new() }
    }

    /// The archive of a package without an architecture.
    pub(crate) fn archive(&self, name: &str) -> PathBuf {
        self.root().join("noarch").join(format!("{name}.tar.bz2"))
    }

    fn add(&mut self, subdir: &'static str, name: &str, version: &str, depends: &[&str], what: &[What<'_>]) {
        let work = tempfile::tempdir().unwrap();
        let mut listed = Vec::new();
        let mut files = vec![PathBuf::from("info/index.json"), PathBuf::from("info/paths.json")];
        for what in what {
            let (path, entry) = match what {
                What::File(path, content) => {
                    (*path, json!({"_path": path, "path_type": "hardlink", "size_in_bytes": content.len()}))
                }
                What::Text(path, content) => (
                    *path,
                    json!({"_path": path, "path_type": "hardlink", "size_in_bytes": content.len(),
                        "file_mode": "text", "prefix_placeholder": PLACEHOLDER}),
                ),
                What::Link(path, _) => (*path, json!({"_path": path, "path_type": "softlink"})),
                What::Listed(path) => (*path, json!({"_path": path, "path_type": "hardlink"})),
            };
            listed.push(entry);
            let at = work.path().join(path);
            if !matches!(what, What::Listed(_)) {
                fs::create_dir_all(at.parent().unwrap()).unwrap();
                files.push(path.into());
            }
            match what {
                What::File(_, content) => fs::write(&at, content).unwrap(),
                What::Text(_, content) => fs::write(&at, content).unwrap(),
                What::Link(_, target) => symlink(target, &at).unwrap(),
                What::Listed(_) => {}
            }
            if path.starts_with("bin/") {
                fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).unwrap();
            }
        }
        let mut record = json!({"name": name, "version": version, "build": "0", "build_number": 0,
            "depends": depends, "subdir": subdir});
        fs::create_dir_all(work.path().join("info")).unwrap();
        fs::write(work.path().join("info/index.json"), record.to_string()).unwrap();
        let paths = json!({"paths_version": 1, "paths": listed});
        fs::write(work.path().join("info/paths.json"), paths.to_string()).unwrap();

        let file = format!("{name}-{version}-0.tar.bz2");
        fs::create_dir_all(self.root().join(subdir)).unwrap();
        let archive = self.root().join(subdir).join(&file);
        let out = fs::File::create(&archive).unwrap();
        let files: Vec<PathBuf> = files.iter().map(|file| work.path().join(file)).collect();
        write_tar_bz2_package(out, work.path(), &files, CompressionLevel::Default, None, None).unwrap();
        let unpacked = tempfile::tempdir().unwrap();
        let read = rattler_package_streaming::fs::extract(&archive, unpacked.path()).unwrap();
        record["sha256"] = read.sha256.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into();
        record["size"] = read.total_size.into();
        self.packages.entry(subdir).or_default().insert(file, record);
    }
}

/// A server of a directory.
pub(crate) struct Served {
    port: u16,
    ended: Arc<AtomicBool>,
}

impl Served {
    /// Serves files to whoever sends this `Authorization`.
    pub(crate) fn start(root: &Path, authorization: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, ended) = (listener.local_addr().unwrap().port(), Arc::new(AtomicBool::new(false)));
        let (root, wanted, over) = (root.to_owned(), authorization.to_owned(), ended.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                answer(stream, &root, &wanted);
            }
        });
        Self { port, ended }
    }

    /// Its address.
    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/main", self.port)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// One request and one answer.
fn answer(mut stream: TcpStream, root: &Path, wanted: &str) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let first = lines.next().unwrap_or_default();
    let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let known = headers.iter().any(|header| {
        header
            .split_once(": ")
            .is_some_and(|(name, value)| name.eq_ignore_ascii_case("authorization") && value == wanted)
    });
    let path = first.split(' ').nth(1).unwrap_or_default().trim_start_matches("/main/").to_owned();
    let (status, body) = match fs::read(root.join(path)) {
        _ if !known => ("401 Unauthorized", Vec::new()),
        Ok(body) => ("200 OK", body),
        Err(_) => ("404 Not Found", Vec::new()),
    };
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let _ = stream.write_all(head.as_bytes());
    if !first.starts_with("HEAD") {
        let _ = stream.write_all(&body);
    }
}
