//! Sends the context of an image build to the engine: a tar stream of a directory, compressed while it is read.
//!
//! `.dockerignore` has the same meaning as for Docker: a pattern is relative to the root, applies also to everything
//! below what it names, and the last match decides. The Dockerfile and `.dockerignore` are sent even if excluded,
//! because the engine reads them; it leaves them out of the image by the same rules. The stream depends only on the
//! files, not on when they were laid out or by whom.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::Stream;
use gix_glob::wildmatch;
use tar::{Builder, EntryType, Header};
use tokio::sync::mpsc;

/// The name of the extra certificates in a context.
pub(super) const CA_FILE: &str = ".agentd-ca.pem";
const IGNORE_FILE: &str = ".dockerignore";

/// The modification time of every file for the engine: not before 1980, because Python's zip archives refuse that.
const TIME: u64 = 946_684_800;
/// How much of the stream may wait for the engine: the number of chunks, and the size of one.
const CHUNKS: usize = 8;
const CHUNK: usize = 64 << 10;

/// The context to send.
#[derive(Debug, Clone)]
pub(super) struct Context {
    /// The directory.
    pub(super) dir: PathBuf,
    /// The Dockerfile, relative to it.
    pub(super) dockerfile: String,
    /// Extra certificates.
    pub(super) ca: Option<PathBuf>,
}

impl Context {
    /// The stream. It is produced on a thread of its own, which ends when the stream is dropped.
    pub(super) fn stream(self) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
        let (sender, receiver) = mpsc::channel(CHUNKS);
        let work = move || {
            let pipe = Pipe(sender.clone());
            if let Err(error) = self.write(BufWriter::with_capacity(CHUNK, pipe)) {
                let _ = sender.blocking_send(Err(error)); // nobody reads it any more
            }
        };
        agent_blocking::spawn_blocking(work); // it ends when the receiver is dropped
        futures_util::stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|chunk| (chunk, receiver))
        })
    }

    /// Writes the whole archive. Blocks.
    fn write(&self, to: impl Write) -> io::Result<()> {
        let mut tar = Builder::new(GzEncoder::new(to, Compression::fast()));
        let rules = Rules::read(&self.dir)?;
        self.folder(&mut tar, &rules, "")?;
        if let Some(ca) = &self.ca {
            append(&mut tar, CA_FILE, &fs::read(ca)?)?;
        }
        tar.into_inner()?.finish()?.flush()
    }

    fn folder(&self, tar: &mut Builder<impl Write>, rules: &Rules, at: &str) -> io::Result<()> {
        let mut entries = self.dir.join(at).read_dir()?.collect::<io::Result<Vec<_>>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = if at.is_empty() { name } else { format!("{at}/{name}") };
            let kind = entry.file_type()?;
            let excluded = rules.exclude(&path) && !self.is_needed(&path);
            if kind.is_dir() {
                if !excluded {
                    let mut header = header(EntryType::Directory, 0o755, 0);
                    tar.append_data(&mut header, format!("{path}/"), io::empty())?;
                }
                // An entry below may be an exception, or be needed.
                if !excluded || rules.has_exceptions() || self.dockerfile.starts_with(&format!("{path}/")) {
                    self.folder(tar, rules, &path)?;
                }
            } else if !excluded {
                self.file(tar, &path, kind.is_symlink())?;
            }
        }
        Ok(())
    }

    fn file(&self, tar: &mut Builder<impl Write>, path: &str, is_link: bool) -> io::Result<()> {
        let full = self.dir.join(path);
        if is_link {
            let mut header = header(EntryType::Symlink, 0o777, 0);
            return tar.append_link(&mut header, path, fs::read_link(full)?);
        }
        if path == IGNORE_FILE && self.ca.is_some() {
            let mut text = fs::read(full)?;
            text.extend_from_slice(format!("\n!{CA_FILE}\n").as_bytes());
            return append(tar, path, &text);
        }
        let file = File::open(full)?;
        let metadata = file.metadata()?;
        let mode = if metadata.permissions().mode() & 0o100 != 0 { 0o755 } else { 0o644 };
        let mut header = header(EntryType::Regular, mode, metadata.len());
        tar.append_data(&mut header, path, io::Read::take(file, metadata.len()))
    }

    /// Whether the engine needs the file, whatever the rules say.
    fn is_needed(&self, path: &str) -> bool {
        path == IGNORE_FILE || path == self.dockerfile
    }
}

fn append(tar: &mut Builder<impl Write>, path: &str, text: &[u8]) -> io::Result<()> {
    let mut header = header(EntryType::Regular, 0o644, text.len() as u64);
    tar.append_data(&mut header, path, text)
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(TIME);
    header.set_uid(0);
    header.set_gid(0);
    header
}

/// The rules of a `.dockerignore`.
#[derive(Debug, Default)]
struct Rules {
    /// Each pattern, and whether it excludes its matches. The last one that matches a file or a directory above it
    /// decides.
    patterns: Vec<(String, bool)>,
}

/// The most bytes of a file of the context that is read here: what lists its files and steps is short.
const LONGEST: u64 = 4 << 20;

/// The text of a file of a context, which is somebody's: not of a device, nor of what a link leads to outside of it.
pub(super) fn text_of(dir: &Path, name: &str) -> io::Result<String> {
    let bytes = agent_fs::read_beneath(agent_fs::open_directory(dir)?, name, LONGEST)?;
    String::from_utf8(bytes).map_err(|_| io::ErrorKind::InvalidData.into())
}

impl Rules {
    fn read(dir: &Path) -> io::Result<Rules> {
        match text_of(dir, IGNORE_FILE) {
            Ok(text) => Ok(Rules::parse(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Rules::default()),
            Err(error) => Err(error),
        }
    }

    fn parse(text: &str) -> Rules {
        let lines = text.trim_start_matches('\u{feff}').lines().filter(|line| !line.starts_with('#'));
        Rules { patterns: lines.filter_map(pattern).collect() }
    }

    fn exclude(&self, path: &str) -> bool {
        let ends = path.match_indices('/').map(|(end, _)| end).chain([path.len()]);
        let names: Vec<&str> = ends.map(|end| &path[..end]).collect();
        let matches = |pattern: &str| {
            let mode = wildmatch::Mode::NO_MATCH_SLASH_LITERAL;
            names.iter().any(|name| gix_glob::wildmatch(pattern.into(), (*name).into(), mode))
        };
        let decides = self.patterns.iter().rev().find(|(pattern, _)| matches(pattern));
        decides.is_some_and(|(_, excludes)| *excludes)
    }

    fn has_exceptions(&self) -> bool {
        self.patterns.iter().any(|(_, excludes)| !excludes)
    }
}

/// Parses one line: the pattern, and whether it excludes.
fn pattern(line: &str) -> Option<(String, bool)> {
    let line = line.trim();
    let (named, excludes) = match line.strip_prefix('!') {
        Some(rest) => (rest.trim(), false),
        None => (line, true),
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in named.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    (!parts.is_empty()).then(|| (parts.join("/"), excludes))
}

/// Sends bytes to the reader of the stream.
struct Pipe(mpsc::Sender<io::Result<Bytes>>);

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        self.0.blocking_send(Ok(Bytes::copy_from_slice(bytes))).map_err(gone)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;
    use std::os::unix::fs::symlink;

    use flate2::read::GzDecoder;

    use super::*;

    fn excluded(rules: &str, paths: &[&str]) -> Vec<bool> {
        let rules = Rules::parse(rules);
        paths.iter().map(|path| rules.exclude(path)).collect()
    }

    #[test]
    fn test_a_file_that_leads_out_of_the_context_is_not_read() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("context");
        fs::create_dir(&dir).unwrap();
        fs::write(temp.path().join("secret"), "FROM secret").unwrap();
        fs::write(dir.join("Dockerfile"), "FROM scratch").unwrap();
        for (name, target) in [("out", "../secret"), ("device", "/dev/zero"), ("inside", "Dockerfile")] {
            symlink(target, dir.join(name)).unwrap();
        }
        assert_eq!(text_of(&dir, "inside").unwrap(), "FROM scratch");
        for name in ["out", "device", "../secret", "/dev/zero", "absent"] {
            text_of(&dir, name).unwrap_err();
        }
    }

    #[test]
    fn test_ignore_rules_are_those_of_docker() {
        assert_eq!(excluded("foo", &["foo", "foo/a", "a/foo"]), [true, true, false]);
        assert_eq!(excluded("**/foo", &["foo", "a/foo", "a/b/foo/c"]), [true, true, true]);
        assert_eq!(excluded("*.md\n!README.md", &["a.md", "README.md", "d/a.md"]), [true, false, false]);
        assert_eq!(excluded("*\n!src\nsrc/secret", &["a", "src/a", "src/secret"]), [true, false, true]);
        assert_eq!(excluded("# x\n\n./a/../b/\n", &["b/c", "a", "x"]), [true, false, false]);
        assert_eq!(excluded("a?c\n/d", &["abc", "ac", "d"]), [true, false, true]);
        assert_eq!(excluded("*.{a,b}", &["x.a", "x.{a,b}"]), [false, true]);
        assert_eq!(excluded("a/**/z", &["a/z", "a/b/c/z", "z"]), [true, true, false]);
    }

    fn entries(context: &Context) -> BTreeMap<String, (u32, String)> {
        let mut bytes = Vec::new();
        context.write(&mut bytes).unwrap();
        let mut again = Vec::new();
        context.write(&mut again).unwrap();
        assert!(bytes == again, "the same files give the same stream");
        let mut tar = tar::Archive::new(GzDecoder::new(bytes.as_slice()));
        let read = |entry: io::Result<tar::Entry<'_, GzDecoder<&[u8]>>>| {
            let mut entry = entry.unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            if let Some(link) = entry.link_name().unwrap() {
                text = format!("-> {}", link.display());
            }
            (entry.path().unwrap().display().to_string(), (entry.header().mode().unwrap(), text))
        };
        tar.entries().unwrap().map(read).collect()
    }

    #[test]
    fn test_stream_holds_what_is_wanted() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("c");
        fs::create_dir_all(dir.join("docker/deep")).unwrap();
        for (path, text) in [
            (".dockerignore", "*\n!src"),
            ("docker/Dockerfile", "FROM x"),
            ("docker/deep/x", ""),
            ("left", ""),
        ] {
            fs::write(dir.join(path), text).unwrap();
        }
        let long = format!("src/{}", "n".repeat(150));
        fs::create_dir(dir.join("src")).unwrap();
        fs::write(dir.join(&long), "long").unwrap();
        fs::write(dir.join("src/run"), "#!").unwrap();
        fs::set_permissions(dir.join("src/run"), fs::Permissions::from_mode(0o700)).unwrap();
        symlink("run", dir.join("src/link")).unwrap();
        fs::write(temp.path().join("ca"), "PEM").unwrap();
        let mut context = Context { dir, dockerfile: "docker/Dockerfile".to_owned(), ca: None };
        let sent = entries(&context);
        let names: Vec<&str> = sent.keys().map(String::as_str).collect();
        assert_eq!(names, [".dockerignore", "docker/Dockerfile", "src/", "src/link", &long, "src/run"]);
        assert_eq!(sent["src/run"], (0o755, "#!".to_owned()));
        assert_eq!(sent["src/link"].1, "-> run");
        assert_eq!(sent[&long], (0o644, "long".to_owned()));
        context.ca = Some(temp.path().join("ca"));
        let sent = entries(&context);
        assert_eq!(sent[CA_FILE].1, "PEM");
        assert!(sent[IGNORE_FILE].1.ends_with(&format!("!{CA_FILE}\n")));
    }
}
