//! Images that are built from a context: a Dockerfile and the files it copies.
//!
//! The cache key of such an image: the files of the context, the name of the Dockerfile, the extra certificates and
//! the platform. The digests of its base images are noted beside the record; when a base tag points to another
//! digest, it is built again.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use agent_env::{Phase, Progress};
use agent_model::{Digest, EnvSpec, failpoint, size};
use bollard::body_try_stream;
use bollard::models::{BuildInfo, CreateImageInfo};
use bollard::query_parameters::BuildImageOptions;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::super::{AcquireError, BuildWorkspace, Built, EnvBuilder, EnvLease};
use super::context::{CA_FILE, Context, text_of};
use super::credentials::Credentials;
use super::held::Held;
use super::layers::Layers;
use super::pull::follow;
use super::reference::Reference;
use super::{Access, LABEL, image_of, platform, refusal};
use crate::docker::DockerError;

/// Increased when the same identity would be built differently.
const VERSION: u32 = 1;
const BUILD: &str = "build an image";
/// The file with the record of a build.
const RECORD: &str = "image.json";
/// How many of the last lines are reported when it fails.
const TAIL: usize = 5;
/// Where programs look for the extra certificates, once the Dockerfile has copied them there.
const CA_PLACE: &str = "/etc/ssl/certs/agentd-ca.pem";
/// The variables by which programs find certificates.
const CA_ARGS: [&str; 4] = ["PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];
/// Build arguments that every engine knows, and keeps out of the image.
const PROXY_ARGS: [&str; 8] = [
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "FTP_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "ftp_proxy",
    "no_proxy",
];

/// Builds images.
pub(super) struct Build {
    access: Arc<Access>,
}

/// The record by which later uses check the image.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Record {
    /// The name we gave it.
    tag: String,
    /// The IDs of its base images by name.
    bases: BTreeMap<String, String>,
}

impl Build {
    pub(super) fn new(access: Arc<Access>) -> Build {
        Build { access }
    }

    /// Lays out the context and reads its Dockerfile.
    async fn prepare(
        &self,
        spec: &EnvSpec,
        workspace: &BuildWorkspace,
    ) -> Result<(Context, String), AcquireError> {
        let (digest, dockerfile) = parts(spec)?;
        let contexts = self.access.config.contexts.as_ref();
        let contexts = contexts.ok_or(AcquireError::Unsupported { kind: spec.kind() })?;
        let dir = workspace.prefix().join("context");
        let failed = |detail| AcquireError::Failed { step: "laying out the build context", detail };
        (contexts.0)(digest, dir.clone()).await.map_err(failed)?;
        let text = text_of(&dir, &dockerfile).map_err(|error| AcquireError::Refused {
            at: vec![dockerfile.clone()],
            detail: format!("the build context has no such Dockerfile ({error})"),
            hint: Some("correct `dockerfile_path`: it is relative to `path` of `build`".to_owned()),
        })?;
        let ca = self.access.config.build_ca.clone();
        if ca.is_some() {
            workspace.say(&format!(
                "more certificates are in the context: `COPY {CA_FILE} {CA_PLACE}` and `ARG PIP_CERT` in the \
                 Dockerfile let its programs trust them"
            ));
        }
        Ok((Context { dir, dockerfile, ca }, text))
    }

    fn options(&self, context: &Context, tag: &str) -> BuildImageOptions {
        let vars = &self.access.config.vars;
        let proxies =
            PROXY_ARGS.iter().filter_map(|name| Some(((*name).to_owned(), vars.get(*name)?.clone())));
        let ca = context.ca.iter().flat_map(|_| CA_ARGS).map(|name| (name.to_owned(), CA_PLACE.to_owned()));
        BuildImageOptions {
            dockerfile: context.dockerfile.clone(),
            t: Some(tag.to_owned()),
            rm: true,
            forcerm: true,
            buildargs: Some(proxies.chain(ca).collect()),
            labels: Some(HashMap::from([(LABEL.to_owned(), tag.to_owned())])),
            networkmode: needs_host(vars).then(|| "host".to_owned()),
            ..BuildImageOptions::default()
        }
    }

    /// Has the engine build it, and passes on the output. It is cancelled when there is no output for too long, and
    /// when this is dropped, because the connection closes.
    async fn run(&self, context: Context, tag: &str, workspace: &BuildWorkspace) -> Result<(), AcquireError> {
        failpoint::hit("env.image.build").map_err(AcquireError::io("build in", workspace.prefix()))?;
        let credentials = Credentials::read(self.access.config.registry_credentials.as_deref())?.all();
        let docker = &self.access.docker;
        let client = docker.client(BUILD).await.map_err(AcquireError::Engine)?;
        let options = self.options(&context, tag);
        let body = body_try_stream(context.stream());
        let mut told = std::pin::pin!(client.build_image(options, Some(credentials), Some(body)));
        let (mut story, stall) = (Story::default(), workspace.stall());
        let mut last = tokio::time::Instant::now();
        loop {
            let next = tokio::time::timeout_at(last + stall, told.next()).await;
            let next =
                next.map_err(|_| AcquireError::Stalled { step: "building the image", after: stall })?;
            match next {
                None => return Ok(()),
                Some(Ok(info)) => {
                    if story.hear(info, workspace) {
                        last = tokio::time::Instant::now();
                    }
                }
                Some(Err(error)) => {
                    return Err(story.judge(docker.judge(BUILD, error)).midway(story.done));
                }
            }
        }
    }

    /// The IDs of the base images now, as far as the engine has them.
    async fn bases(&self, dockerfile: &str) -> Result<BTreeMap<String, String>, AcquireError> {
        let mut bases = BTreeMap::new();
        for base in bases_of(dockerfile) {
            let Ok(reference) = Reference::parse(&base) else { continue };
            if let Some(found) = self.access.inspect(&reference.text).await? {
                bases.insert(reference.text, found.image.id);
            }
        }
        Ok(bases)
    }

    /// The bytes of the image that are not in its base.
    async fn own_bytes(&self, size: u64, bases: &BTreeMap<String, String>) -> u64 {
        let mut largest = 0;
        for id in bases.values() {
            let base = self.access.look(id).await.ok().flatten().map_or(0, |found| found.size);
            largest = largest.max(base);
        }
        size.saturating_sub(largest)
    }
}

/// Whether a proxy listens only on this machine's loopback: a build in another network could not reach it.
fn needs_host(vars: &BTreeMap<String, String>) -> bool {
    let is_own = |address: &String| {
        let rest = address.split_once("://").map_or(address.as_str(), |(_, rest)| rest);
        let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
        ["127.", "localhost", "[::1]"].iter().any(|own| host.starts_with(own))
    };
    PROXY_ARGS[..3].iter().chain(&PROXY_ARGS[4..7]).filter_map(|name| vars.get(*name)).any(is_own)
}

fn parts(spec: &EnvSpec) -> Result<(Digest, String), AcquireError> {
    let EnvSpec::Build { context, dockerfile } = spec else {
        return Err(AcquireError::Unsupported { kind: spec.kind() });
    };
    let plain = Path::new(dockerfile.trim()).components();
    let inside: Option<PathBuf> = plain
        .filter(|part| *part != Component::CurDir)
        .map(|part| matches!(part, Component::Normal(_)).then_some(part))
        .collect();
    match inside.filter(|path| !path.as_os_str().is_empty()) {
        Some(path) => Ok((*context, path.to_string_lossy().into_owned())),
        None => Err(AcquireError::Refused {
            at: Vec::new(),
            detail: format!("`dockerfile_path: {dockerfile}` leads out of the build context"),
            hint: Some("name a file below `path` of `build`".to_owned()),
        }),
    }
}

/// The engine's reports on a build.
#[derive(Debug, Default)]
struct Story {
    /// The current step, for people: ``step 2 of 5, `RUN make` ``.
    step: Option<String>,
    /// How many steps are done.
    done: u64,
    /// The base image of the current step.
    base: Option<String>,
    layers: Layers,
    /// An incomplete line.
    rest: String,
    tail: Vec<String>,
}

impl Story {
    /// Passes on a report; returns whether it shows progress.
    fn hear(&mut self, info: BuildInfo, workspace: &BuildWorkspace) -> bool {
        if info.status.is_some() {
            let BuildInfo { id, status, progress_detail, .. } = info;
            let layer = CreateImageInfo { id, status, progress_detail, ..CreateImageInfo::default() };
            return follow(&mut self.layers, &layer, self.base.as_deref().unwrap_or_default(), workspace);
        }
        self.rest.push_str(&info.stream.unwrap_or_default());
        while let Some(end) = self.rest.find('\n') {
            let line: String = self.rest.drain(..=end).collect();
            self.line(line.trim_end().rsplit('\r').next().unwrap_or_default(), workspace);
        }
        true
    }

    fn line(&mut self, line: &str, workspace: &BuildWorkspace) {
        let shown = plain(line);
        if shown.trim().is_empty() {
            return;
        }
        workspace.say(&shown);
        let Some((number, total, what)) = step_of(&shown) else {
            self.keep(shown.trim());
            return;
        };
        self.tail.clear();
        self.step = Some(format!("step {number} of {total}, `{what}`"));
        self.base = what
            .strip_prefix("FROM ")
            .and_then(|rest| rest.split(' ').find(|part| !part.starts_with("--")))
            .map(str::to_owned);
        self.done = number.saturating_sub(1);
        let what = what.to_owned();
        workspace.tell(Progress { done: self.done, total, ..Progress::of(Phase::Image, what) });
    }

    /// Keeps a line for an error message, unless it is the engine's own.
    fn keep(&mut self, line: &str) {
        if line.starts_with("---> ") || line.starts_with("Removing intermediate container ") {
            return;
        }
        self.tail.push(line.to_owned());
        if self.tail.len() > TAIL {
            self.tail.remove(0);
        }
    }

    /// Why it failed.
    fn judge(&mut self, error: DockerError) -> AcquireError {
        let DockerError::Refused { message, .. } = error else { return AcquireError::Engine(error) };
        let base = self.base.as_deref().and_then(|base| Reference::parse(base).ok());
        // Messages about fetching a base image are the engine's own; those of later steps differ.
        if let Some(judged) = base.and_then(|base| refusal::of_words(&base, &message)) {
            return judged;
        }
        if agent_fs::says_full(&message) {
            return AcquireError::DiskFull { path: "the images of the container engine".into() };
        }
        let step = self.step.clone().unwrap_or_else(|| "reading the Dockerfile".to_owned());
        AcquireError::ImageBuild {
            step,
            detail: message.trim().to_owned(),
            tail: std::mem::take(&mut self.tail),
        }
    }
}

/// A line without colour codes: the engine colours the standard error of commands.
fn plain(line: &str) -> String {
    let (mut shown, mut rest) = (String::with_capacity(line.len()), line.chars());
    while let Some(next) = rest.next() {
        if next == '\u{1b}' {
            if rest.as_str().starts_with('[') {
                rest.by_ref().skip(1).find(|end| ('@'..='~').contains(end));
            }
        } else if !next.is_control() || next == '\t' {
            shown.push(next);
        }
    }
    shown
}

/// `Step 2/5 : RUN make` is step 2 of 5, `RUN make`.
fn step_of(line: &str) -> Option<(u64, u64, &str)> {
    let (numbers, what) = line.strip_prefix("Step ")?.split_once(" : ")?;
    let (number, total) = numbers.split_once('/')?;
    Some((number.parse().ok()?, total.parse().ok()?, what.trim()))
}

/// The images that a Dockerfile builds on or copies from, if their names can be determined.
fn bases_of(dockerfile: &str) -> Vec<String> {
    let (mut args, mut stages, mut bases) = (HashMap::new(), Vec::new(), Vec::new());
    for line in dockerfile.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some((first, rest)) = words.split_first() else { continue };
        let named = match first.to_ascii_uppercase().as_str() {
            "ARG" if stages.is_empty() => {
                let pairs = rest.iter().filter_map(|pair| pair.split_once('='));
                args.extend(pairs.map(|(name, value)| (name, value.trim_matches(['"', '\'']))));
                continue;
            }
            "FROM" => {
                let mut plain = rest.iter().filter(|word| !word.starts_with("--"));
                let image = plain.next().copied().unwrap_or_default();
                let stage = plain.nth(1).map_or_else(String::new, |name| name.to_ascii_lowercase());
                let known = stages.contains(&image.to_ascii_lowercase());
                stages.push(stage);
                if known { continue } else { Some(image) }
            }
            "COPY" => rest.iter().find_map(|word| word.strip_prefix("--from=")),
            _ => None,
        };
        let Some(image) = named.and_then(|image| replaced(image, &args)) else { continue };
        let is_stage = stages.contains(&image.to_ascii_lowercase()) || image.parse::<usize>().is_ok();
        if image != "scratch" && !is_stage && !bases.contains(&image) {
            bases.push(image);
        }
    }
    bases
}

/// A name with its arguments replaced by their defaults; `None` when some have none.
fn replaced(image: &str, args: &HashMap<&str, &str>) -> Option<String> {
    let mut text = image.to_owned();
    let mut names: Vec<&&str> = args.keys().collect();
    names.sort_by_key(|name| std::cmp::Reverse(name.len()));
    for name in names {
        text = text.replace(&format!("${{{name}}}"), args[*name]).replace(&format!("${name}"), args[*name]);
    }
    (!text.contains('$') && !text.is_empty()).then_some(text)
}

fn record_of(prefix: &Path) -> Record {
    let text = fs::read(prefix.join(RECORD)).ok();
    text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

impl EnvBuilder for Build {
    fn handles(&self, spec: &EnvSpec) -> bool {
        matches!(spec, EnvSpec::Build { .. })
    }

    fn identity<'a>(&'a self, spec: &'a EnvSpec) -> BoxFuture<'a, Result<String, AcquireError>> {
        async move {
            let (context, dockerfile) = parts(spec)?;
            let ca = self.access.config.build_ca.as_deref();
            let ca = ca.map(|path| fs::read(path).map_err(AcquireError::io("read", path))).transpose()?;
            let ca = ca.map_or_else(String::new, |text| agent_model::ids::hex(&Sha256::digest(text)));
            self.access.ping().await?;
            Ok(format!("image build {VERSION}\n{}\n{context}\n{dockerfile}\n{ca}", platform()))
        }
        .boxed()
    }

    fn verify<'a>(
        &'a self,
        _: &'a EnvSpec,
        lease: &'a EnvLease,
    ) -> BoxFuture<'a, Result<Option<String>, AcquireError>> {
        async move {
            let (record, image) = (record_of(lease.prefix()), image_of(lease)?);
            if self.access.inspect(&image.id).await?.is_none() {
                return Ok(Some("the container engine does not have the image any more".to_owned()));
            }
            for (base, id) in &record.bases {
                let now = self.access.inspect(base).await?;
                // A removed base changes nothing: the image built on it still exists.
                if now.is_some_and(|now| now.image.id != *id) {
                    return Ok(Some(format!("its base {base} names another image now")));
                }
            }
            Ok(None)
        }
        .boxed()
    }

    fn build<'a>(
        &'a self,
        spec: &'a EnvSpec,
        workspace: &'a BuildWorkspace,
    ) -> BoxFuture<'a, Result<Built, AcquireError>> {
        async move {
            let (context, dockerfile) = self.prepare(spec, workspace).await?;
            let (dir, named) = (context.dir.clone(), context.dockerfile.clone());
            let key = workspace.prefix().file_name().map(|name| name.to_string_lossy().into_owned());
            let tag = format!("agentd/{}:latest", key.unwrap_or_default());
            let mut held = Held::beside(workspace.prefix());
            held.intend(&tag)?;
            self.run(context, &tag, workspace).await?;
            let missing = || AcquireError::ImageBuild {
                step: "building the image".to_owned(),
                detail: "the engine ended without one".to_owned(),
                tail: Vec::new(),
            };
            let found = self.access.inspect(&tag).await?.ok_or_else(missing)?;
            held.brought(&tag, &found.image.id)?;
            self.access.admit(&found)?;
            fs::remove_dir_all(&dir).map_err(AcquireError::io("remove", &dir))?;
            let record = Record { bases: self.bases(&dockerfile).await?, tag };
            let path = workspace.prefix().join(RECORD);
            let written = failpoint::hit("env.image.record")
                .and_then(|()| fs::write(&path, serde_json::to_vec(&record)?));
            written.map_err(AcquireError::io("write", &path))?;
            let from: Vec<&str> = record.bases.keys().map(String::as_str).collect();
            let from = if from.is_empty() { String::new() } else { format!(" from {}", from.join(", ")) };
            Ok(Built {
                summary: format!("built by {named}{from} ({})", size::binary(found.size)),
                elsewhere: self.own_bytes(found.size, &record.bases).await,
                image: Some(found.image),
                ..Built::default()
            })
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_base_images_are_found_in_a_dockerfile() {
        let text = "ARG V=22.04\nARG R=h.example\nFROM --platform=linux/amd64 ubuntu:${V} AS base\nRUN x\n\
                    FROM $R/tool AS second\nCOPY --from=base /a /b\nCOPY --from=busybox /bin/x /\nCOPY --from=0 /a /b\n\
                    from base\nFROM scratch\nFROM $UNKNOWN\n";
        assert_eq!(bases_of(text), ["ubuntu:22.04", "h.example/tool", "busybox"]);
    }

    #[test]
    fn test_proxies_of_the_machine_alone_are_known() {
        for (name, address, expected) in [
            ("http_proxy", "http://127.0.0.1:3128", true),
            ("HTTPS_PROXY", "http://user:word@localhost:3128", true),
            ("HTTPS_PROXY", "http://proxy.example:3128", false),
            ("NO_PROXY", "127.0.0.1", false),
        ] {
            assert_eq!(
                needs_host(&BTreeMap::from([(name.to_owned(), address.to_owned())])),
                expected,
                "{address}"
            );
        }
    }

    #[test]
    fn test_steps_are_read() {
        assert_eq!(step_of("Step 2/5 : RUN make a : b"), Some((2, 5, "RUN make a : b")));
        assert_eq!(step_of("Stepping stones"), None);
        assert_eq!(plain("\u{1b}[91mit is\tbroken\u{1b}[0m\u{7}!"), "it is\tbroken!");
    }

    #[test]
    fn test_dockerfiles_stay_inside_the_context() {
        let path = |dockerfile: &str| {
            parts(&EnvSpec::Build { context: Digest::EMPTY, dockerfile: dockerfile.to_owned() })
                .map(|parts| parts.1)
        };
        assert_eq!(path("./docker/Dockerfile").unwrap(), "docker/Dockerfile");
        for wrong in ["../Dockerfile", "/etc/passwd", "", ".", "a/../../b"] {
            assert!(path(wrong).is_err(), "{wrong}");
        }
    }
}
