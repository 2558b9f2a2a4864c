//! A minimal image registry with one image, which can inject faults.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;

use base64::Engine as _;
use flate2::write::GzEncoder;
use sha2::{Digest as _, Sha256};

use super::*;

/// Its behaviour.
#[derive(Debug, Clone, Default)]
pub(super) struct Manner {
    /// The only user it admits, as `name:password`.
    pub(super) knows: Option<String>,
    /// It stops in the middle of the layer.
    pub(super) stalls: bool,
    /// The image's architecture, if it is not this machine's.
    pub(super) architecture: Option<&'static str>,
}

/// Serves the image `tool:1` until the process ends.
pub(super) struct Registry {
    pub(super) host: String,
    /// The requests.
    asked: Arc<Mutex<Vec<String>>>,
}

struct Served {
    manner: Manner,
    manifest: Vec<u8>,
    blobs: Vec<(String, Vec<u8>)>,
}

impl Registry {
    pub(super) fn start(own: &str, manner: Manner) -> Registry {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let served = Arc::new(Served::make(own, &host, manner));
        let heard = asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (served, heard) = (served.clone(), heard.clone());
                std::thread::spawn(move || served.serve(stream, &heard));
            }
        });
        Registry { host, asked }
    }

    pub(super) fn image(&self) -> String {
        format!("{}/tool:1", self.host)
    }

    pub(super) fn asked(&self, part: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|line| line.contains(part)).count()
    }
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", agent_model::ids::hex(&Sha256::digest(bytes)))
}

impl Served {
    fn make(own: &str, host: &str, manner: Manner) -> Served {
        // Different content for each, or the engine has the layer already. Incompressible, so that it takes a while.
        let mut seed = host.to_owned();
        let mut noise = Vec::new();
        while noise.len() < 300_000 {
            seed = digest(seed.as_bytes());
            noise.extend_from_slice(seed.as_bytes());
        }
        let tar = tarball(&[("hello", 0o644, host.as_bytes().to_vec()), ("noise", 0o644, noise)]);
        let mut packed = GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(&tar).unwrap();
        let layer = packed.finish().unwrap();
        let native = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let config = serde_json::json!({
            "architecture": manner.architecture.unwrap_or(native), "os": "linux",
            "config": {"Env": ["PATH=/bin", "FROM_REGISTRY=1"], "Labels": {LABEL: own}},
            "rootfs": {"type": "layers", "diff_ids": [digest(&tar)]},
        });
        let config = config.to_string().into_bytes();
        let kind = "application/vnd.docker";
        let part = |name: &str, bytes: &[u8]| serde_json::json!({"mediaType": format!("{kind}.{name}"), "size": bytes.len(), "digest": digest(bytes)});
        let manifest = serde_json::json!({
            "schemaVersion": 2, "mediaType": format!("{kind}.distribution.manifest.v2+json"),
            "config": part("container.image.v1+json", &config),
            "layers": [part("image.rootfs.diff.tar.gzip", &layer)],
        });
        let blobs = [config, layer].map(|bytes| (digest(&bytes), bytes)).to_vec();
        Served { manner, manifest: manifest.to_string().into_bytes(), blobs }
    }

    fn serve(&self, mut stream: TcpStream, asked: &Mutex<Vec<String>>) -> Option<()> {
        let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
        loop {
            let request = lines.next()?.ok()?;
            let mut sent = None;
            for line in lines.by_ref() {
                let line = line.ok()?;
                if line.is_empty() {
                    break;
                }
                let lower = line.to_ascii_lowercase();
                if lower.starts_with("authorization: basic ") {
                    sent = line.rsplit(' ').next().map(str::to_owned);
                }
            }
            let (method, path) = request.split_once(' ')?;
            let path = path.split(' ').next()?.to_owned();
            asked.lock().unwrap().push(format!("{method} {path}"));
            let encoded = |word: &String| base64::engine::general_purpose::STANDARD.encode(word);
            let known = self.manner.knows.as_ref().is_none_or(|word| sent == Some(encoded(word)));
            self.answer(&mut stream, method, &path, known).ok()?;
        }
    }

    fn answer(&self, to: &mut TcpStream, method: &str, path: &str, known: bool) -> std::io::Result<()> {
        let kind = "application/vnd.docker.distribution.manifest.v2+json";
        let blob = self.blobs.iter().find(|(name, _)| path.ends_with(name.as_str()));
        let (status, kind, body): (_, _, &[u8]) = match blob {
            _ if !known => {
                ("401 Unauthorized\r\nWWW-Authenticate: Basic realm=\"r\"", "application/json", b"{}")
            }
            _ if path == "/v2/" => ("200 OK", "application/json", b"{}"),
            _ if path.ends_with("/manifests/1") => ("200 OK", kind, &self.manifest),
            _ if path.ends_with(&digest(&self.manifest)) => ("200 OK", kind, &self.manifest),
            Some((_, bytes)) => ("200 OK", "application/octet-stream", bytes),
            None => (
                "404 Not Found",
                "application/json",
                br#"{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}"#,
            ),
        };
        let (length, name) = (body.len(), digest(body));
        write!(
            to,
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
             Docker-Content-Digest: {name}\r\nDocker-Distribution-Api-Version: registry/2.0\r\n\r\n"
        )?;
        if method == "HEAD" {
            return Ok(());
        }
        if self.manner.stalls && length > 100_000 {
            to.write_all(&body[..length / 2])?;
            to.flush()?;
            loop {
                std::thread::park();
            }
        }
        to.write_all(body)?;
        to.flush()
    }
}
