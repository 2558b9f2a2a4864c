//! A registry of images on loopback, which engines trust without encryption, and that can be as bad as a test wants.
//!
//! Owns its images, made of layers in memory, and a count of everything that was asked for. It speaks the part of
//! the distribution protocol that pulls use: `/v2/`, manifests by name and by digest, blobs, whole or from a byte on.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;

use crate::client::runtime;

const MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar";

/// How a registry serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Manner {
    /// As it should.
    Plain,
    /// Only to who says this name and this password.
    Private(String, String),
    /// So many bytes of a layer a second.
    Slow(u64),
    /// So many bytes of a layer, and then nothing, until the manner is another.
    Stalling(u64),
    /// Layers with a byte that is another.
    Damaged,
    /// Not at all: every answer is that something broke.
    Broken,
}

/// What can be asked for.
#[derive(Debug, Clone)]
struct Thing {
    kind: &'static str,
    bytes: Bytes,
    layer: bool,
}

#[derive(Debug)]
struct Shelf {
    things: Mutex<HashMap<String, Thing>>,
    names: Mutex<HashMap<String, String>>,
    asked: Mutex<BTreeMap<String, u64>>,
    manner: watch::Sender<Manner>,
}

/// A registry; it ends with the value.
#[derive(Debug)]
pub struct Registry {
    address: SocketAddr,
    shelf: Arc<Shelf>,
    server: tokio::task::JoinHandle<()>,
}

impl Registry {
    /// An empty one on a port that is free.
    #[allow(clippy::disallowed_methods, reason = "ended with the value")]
    pub fn start() -> Registry {
        let shelf = Arc::new(Shelf {
            things: Mutex::default(),
            names: Mutex::default(),
            asked: Mutex::default(),
            manner: watch::Sender::new(Manner::Plain),
        });
        let listener = runtime().block_on(tokio::net::TcpListener::bind("127.0.0.1:0"));
        let listener = listener.expect("a port");
        let address = listener.local_addr().expect("an address");
        let router = Router::new().fallback(answer).with_state(shelf.clone());
        let server = runtime().spawn(async move {
            axum::serve(listener, router).await.expect("a server on loopback");
        });
        Registry { address, shelf, server }
    }

    /// What an image of it is called: `127.0.0.1:PORT/NAME:TAG`.
    pub fn name(&self, image: &str) -> String {
        format!("{}/{image}", self.address)
    }

    /// The host and port.
    pub fn host(&self) -> String {
        self.address.to_string()
    }

    /// Puts an image onto the shelf as `NAME:TAG`: its layers, each a tar, and its variables. Its digest.
    pub fn put(&self, image: &str, layers: Vec<Vec<u8>>, env: &[&str]) -> String {
        let layers: Vec<(String, usize)> = layers
            .into_iter()
            .map(|layer| {
                let size = layer.len();
                (self.keep("application/octet-stream", layer, true), size)
            })
            .collect();
        let config = json!({
            "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
            "os": "linux",
            "config": {"Env": env, "Labels": {"agentd.test": "registry"}},
            "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|layer| &layer.0).collect::<Vec<_>>()},
        });
        let config = config.to_string();
        let size = config.len();
        let config = self.keep("application/octet-stream", config.into_bytes(), false);
        let layer =
            |(digest, size): &(String, usize)| json!({"mediaType": LAYER, "size": size, "digest": digest});
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "size": size, "digest": config},
            "layers": layers.iter().map(layer).collect::<Vec<_>>(),
        });
        let digest = self.keep(MANIFEST, manifest.to_string().into_bytes(), false);
        lock(&self.shelf.names).insert(image.to_owned(), digest.clone());
        digest
    }

    /// Takes a name off the shelf.
    pub fn forget(&self, image: &str) {
        lock(&self.shelf.names).remove(image);
    }

    fn keep(&self, kind: &'static str, bytes: Vec<u8>, layer: bool) -> String {
        let hash = Sha256::digest(&bytes);
        let digest = hash.iter().fold("sha256:".to_owned(), |text, byte| format!("{text}{byte:02x}"));
        lock(&self.shelf.things).insert(digest.clone(), Thing { kind, bytes: bytes.into(), layer });
        digest
    }

    /// Serves so from now on; answers that had stopped go on, or break off.
    pub fn set(&self, manner: Manner) {
        self.shelf.manner.send_replace(manner);
    }

    /// How often paths that hold this text were asked for by `GET`.
    pub fn requests(&self, part: &str) -> u64 {
        let asked = lock(&self.shelf.asked);
        asked.iter().filter(|(path, _)| path.contains(part)).map(|(_, count)| count).sum()
    }

    /// Every path that was asked for by `GET`, and how often.
    pub fn asked(&self) -> BTreeMap<String, u64> {
        lock(&self.shelf.asked).clone()
    }

    /// Forgets what was asked for.
    pub fn clear(&self) {
        lock(&self.shelf.asked).clear();
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn answer(State(shelf): State<Arc<Shelf>>, request: Request) -> Response {
    let (path, head) = (request.uri().path().to_owned(), request.method() == axum::http::Method::HEAD);
    if !head {
        *lock(&shelf.asked).entry(path.clone()).or_default() += 1;
    }
    let manner = shelf.manner.borrow().clone();
    match &manner {
        Manner::Broken => return complaint(StatusCode::SERVICE_UNAVAILABLE, "UNAVAILABLE"),
        Manner::Private(name, password) if !allowed(request.headers(), name, password) => {
            let challenge = [(header::WWW_AUTHENTICATE, "Basic realm=\"the tests\"")];
            return (challenge, complaint(StatusCode::UNAUTHORIZED, "UNAUTHORIZED")).into_response();
        }
        _ => {}
    }
    if path == "/v2/" {
        return "{}".into_response();
    }
    match find(&shelf, &path) {
        Ok((digest, thing)) => give(&shelf, &digest, thing, request.headers(), head),
        Err(what) => complaint(StatusCode::NOT_FOUND, what),
    }
}

/// The thing at a path: `/v2/NAME/manifests/TAG`, the same by digest, or `/v2/NAME/blobs/DIGEST`.
fn find(shelf: &Shelf, path: &str) -> Result<(String, Thing), &'static str> {
    let inner = path.strip_prefix("/v2/").unwrap_or_default();
    let (digest, unknown) = match (inner.split_once("/manifests/"), inner.split_once("/blobs/")) {
        (Some((_, digest)), _) if digest.starts_with("sha256:") => (digest.to_owned(), "MANIFEST_UNKNOWN"),
        (Some((name, tag)), _) => {
            let named = lock(&shelf.names).get(&format!("{name}:{tag}")).cloned();
            (named.ok_or("MANIFEST_UNKNOWN")?, "MANIFEST_UNKNOWN")
        }
        (None, Some((_, digest))) => (digest.to_owned(), "BLOB_UNKNOWN"),
        (None, None) => return Err("NAME_UNKNOWN"),
    };
    let thing = lock(&shelf.things).get(&digest).cloned().ok_or(unknown)?;
    Ok((digest, thing))
}

fn allowed(headers: &HeaderMap, name: &str, password: &str) -> bool {
    let said = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
    said.strip_prefix("Basic ") == Some(&base64(format!("{name}:{password}").as_bytes()))
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let number =
            chunk.iter().fold(0_u32, |all, byte| all << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let letter = LETTERS[(number >> (18 - 6 * place)) as usize & 63] as char;
            text.push(if place > chunk.len() { '=' } else { letter });
        }
    }
    text
}

fn complaint(status: StatusCode, code: &str) -> Response {
    let body = json!({"errors": [{"code": code, "message": code.to_lowercase(), "detail": null}]});
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

fn give(shelf: &Arc<Shelf>, digest: &str, thing: Thing, headers: &HeaderMap, head: bool) -> Response {
    let whole = thing.bytes.len();
    let range = headers.get(header::RANGE).and_then(|value| value.to_str().ok());
    let from = range.and_then(|range| range.strip_prefix("bytes=")?.split('-').next()?.parse::<usize>().ok());
    let from = from.filter(|from| *from <= whole);
    let bytes = thing.bytes.slice(from.unwrap_or(0)..);
    let mut response = Response::builder()
        .header(header::CONTENT_TYPE, thing.kind)
        .header(header::CONTENT_LENGTH, bytes.len())
        .header("Docker-Distribution-Api-Version", "registry/2.0")
        .header("Docker-Content-Digest", digest);
    if let Some(from) = from {
        response = response
            .status(StatusCode::PARTIAL_CONTENT)
            .header(header::CONTENT_RANGE, format!("bytes {from}-{}/{whole}", whole.saturating_sub(1)));
    }
    let body = match (head, thing.layer) {
        (true, _) => Body::empty(),
        (false, true) => layer(shelf, bytes),
        (false, false) => Body::from(bytes),
    };
    response.body(body).expect("a response")
}

/// The bytes of a layer in the manner of the moment.
#[allow(clippy::disallowed_methods, reason = "ends with the connection")]
fn layer(shelf: &Arc<Shelf>, bytes: Bytes) -> Body {
    const PIECE: usize = 16 << 10;
    let (sender, pieces) = tokio::sync::mpsc::channel::<Result<Bytes, std::io::Error>>(2);
    let mut manner = shelf.manner.subscribe();
    runtime().spawn(async move {
        let mut given = 0;
        while given < bytes.len() {
            let mut piece = bytes.slice(given..bytes.len().min(given + PIECE));
            let now = manner.borrow_and_update().clone();
            match now {
                Manner::Slow(rate) => {
                    tokio::time::sleep(Duration::from_secs_f64(piece.len() as f64 / rate as f64)).await;
                }
                Manner::Stalling(after) if given as u64 >= after => {
                    tokio::select! {
                        changed = manner.changed() => if changed.is_err() { return },
                        () = sender.closed() => return,
                    }
                    continue;
                }
                Manner::Damaged if given == 0 => {
                    let mut changed = piece.to_vec();
                    changed[0] ^= 1;
                    piece = changed.into();
                }
                _ => {}
            }
            given += piece.len();
            if sender.send(Ok(piece)).await.is_err() {
                return;
            }
        }
    });
    Body::from_stream(ReceiverStream::new(pieces))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_names_and_passwords_are_written_as_browsers_do() {
        let said: Vec<String> = ["", "a", "ab", "abc", "me:word"].map(|text| base64(text.as_bytes())).into();
        assert_eq!(said, ["", "YQ==", "YWI=", "YWJj", "bWU6d29yZA=="]);
    }
}
