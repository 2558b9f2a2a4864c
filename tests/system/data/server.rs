//! A web server and a store of objects that misbehave on request: they cut answers off, lie about lengths, are slow,
//! refuse, and change what they serve. All that is asked of them is written down, and all that is sent to them is kept.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The length of every file.
pub(crate) const LENGTH: usize = 1 << 20;

/// How a server answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    Plain,
    /// A connection ends after a quarter of a file.
    Cuts,
    /// It announces twice the length.
    Lies,
    /// It announces more than any disk has.
    Boasts,
    /// It sends a little of a file and then nothing more.
    Stalls,
    /// Nothing is there.
    Empty,
    /// It is overloaded.
    Busy,
    /// It gives nothing to those without the key `ada`.
    Locked,
    /// It takes one file, and does not answer when it is sent another one.
    TakesOne,
}

/// The server. It ends with the test's process.
pub(crate) struct Server {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    manner: Mutex<Manner>,
    /// What the file has, and its tag.
    version: AtomicU64,
    asked: Mutex<Vec<String>>,
    /// What was sent to it: by path, and by the number of the part if it is not whole.
    taken: Mutex<BTreeMap<(String, u64), Vec<u8>>>,
}

impl Server {
    pub(crate) fn started(manner: Manner) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            manner: Mutex::new(manner),
            version: AtomicU64::new(1),
            asked: Mutex::default(),
            taken: Mutex::default(),
        });
        let served = shared.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let served = served.clone();
                std::thread::spawn(move || served.serve(connection));
            }
        });
        Server { port, shared }
    }

    pub(crate) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.host())
    }

    pub(crate) fn set(&self, manner: Manner) {
        *self.shared.manner.lock().unwrap() = manner;
    }

    /// Changes every file.
    pub(crate) fn change(&self) {
        self.shared.version.fetch_add(1, Ordering::SeqCst);
    }

    /// The requests so far that begin so: `GET /a 0` is for `/a` from the first byte on.
    pub(crate) fn asked(&self, begin: &str) -> usize {
        self.shared.asked.lock().unwrap().iter().filter(|line| line.starts_with(begin)).count()
    }

    /// All requests so far, each with its first byte or its length.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.shared.asked.lock().unwrap().clone()
    }

    /// The whole files that were sent to it: their path as it was written in the request, and what is in them.
    pub(crate) fn taken(&self) -> BTreeMap<String, Vec<u8>> {
        let taken = self.shared.taken.lock().unwrap();
        let whole = taken.iter().filter(|((_, part), _)| *part == 0);
        whole.map(|((path, _), bytes)| (path.clone(), bytes.clone())).collect()
    }

    /// The first bytes that parts of files were asked for from.
    pub(crate) fn resumed(&self) -> Vec<u64> {
        let asked = self.shared.asked.lock().unwrap();
        let from = |line: &String| line.strip_prefix("GET ")?.split(' ').nth(1)?.parse().ok();
        asked.iter().filter_map(from).filter(|from| *from > 0).collect()
    }
}

/// The content of a file in one version.
pub(crate) fn content(version: u64) -> Vec<u8> {
    let mut bytes = format!("version {version}\n").into_bytes();
    bytes.resize(LENGTH, b'0' + u8::try_from(version % 10).unwrap());
    bytes
}

impl Shared {
    fn serve(&self, connection: TcpStream) {
        let mut reader = BufReader::new(connection.try_clone().unwrap());
        while let Some((method, path, headers)) = request(&mut reader) {
            let goes_on = match method.as_str() {
                "PUT" | "POST" => {
                    let length = headers.iter().find(|(key, _)| key == "content-length");
                    let mut body = vec![0; length.and_then(|(_, text)| text.parse().ok()).unwrap_or(0)];
                    reader.read_exact(&mut body).is_ok()
                        && self.take(&connection, &method, &path, &headers, body)
                }
                _ => self.answer(&connection, &method, &path, &headers),
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Takes a file, or a part of one in the way of S3; `false` when the connection is to end.
    fn take(
        &self,
        mut to: &TcpStream,
        method: &str,
        path: &str,
        headers: &[(String, String)],
        body: Vec<u8>,
    ) -> bool {
        let manner = *self.manner.lock().unwrap();
        self.asked.lock().unwrap().push(format!("{method} {path} {}", body.len()));
        let known =
            headers.iter().any(|(key, text)| key == "authorization" && text.contains("Credential=ada/"));
        let (name, query) = path.split_once('?').unwrap_or((path, ""));
        let mut taken = self.taken.lock().unwrap();
        let (status, said) = match (manner, method) {
            (Manner::Locked, _) if !known => ("403 Forbidden", ""),
            (Manner::Busy, _) => ("503 Service Unavailable", ""),
            (Manner::Empty, _) => ("404 Not Found", ""),
            (Manner::Stalls | Manner::TakesOne, _) if manner == Manner::Stalls || !taken.is_empty() => {
                drop(taken);
                std::thread::sleep(Duration::from_secs(600));
                return false;
            }
            (_, "POST") if query.starts_with("uploads") => {
                let begun =
                    "<InitiateMultipartUploadResult><UploadId>one</UploadId></InitiateMultipartUploadResult>";
                ("200 OK", begun)
            }
            (_, "POST") => {
                let is_part = |(path, part): &(String, u64)| path == name && *part > 0;
                let parts: Vec<_> = taken.keys().filter(|key| is_part(key)).cloned().collect();
                let whole = parts.iter().filter_map(|key| taken.remove(key)).flatten().collect();
                taken.insert((name.to_owned(), 0), whole);
                ("200 OK", "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")
            }
            _ => {
                let part = query.split('&').find_map(|pair| pair.strip_prefix("partNumber=")?.parse().ok());
                taken.insert((name.to_owned(), part.unwrap_or(0)), body);
                ("200 OK", "")
            }
        };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nETag: \"x\"\r\n\
             Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n\r\n{said}",
            said.len()
        );
        to.write_all(head.as_bytes()).is_ok()
    }

    /// Answers one request; `false` when the connection is to end.
    fn answer(&self, mut to: &TcpStream, method: &str, path: &str, headers: &[(String, String)]) -> bool {
        let header =
            |name: &str| headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        let (manner, version) = (*self.manner.lock().unwrap(), self.version.load(Ordering::SeqCst));
        let tag = format!("\"v{version}\"");
        let is_same = header("if-range").is_none_or(|known| known == tag);
        let from = header("range").filter(|_| is_same);
        let from = from.and_then(|range| range.strip_prefix("bytes=")?.split('-').next()?.parse().ok());
        let from: usize = from.unwrap_or(0);
        self.asked.lock().unwrap().push(format!("{method} {path} {from}"));
        let status = match manner {
            Manner::Empty => "404 Not Found",
            Manner::Busy => "503 Service Unavailable",
            Manner::Locked if !header("authorization").is_some_and(|key| key.contains("Credential=ada/")) => {
                "403 Forbidden"
            }
            _ if from > 0 => "206 Partial Content",
            _ => "200 OK",
        };
        if !status.starts_with('2') {
            return to
                .write_all(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").as_bytes())
                .is_ok();
        }
        let body = if path.contains("list-type=2") { listing(&tag) } else { content(version) };
        let announced = match manner {
            Manner::Lies if method == "HEAD" => body.len() * 2,
            Manner::Boasts => 500 << 40,
            _ => body.len() - from,
        };
        let range = format!("Content-Range: bytes {from}-{}/{}\r\n", body.len() - 1, body.len());
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {announced}\r\nETag: {tag}\r\nAccept-Ranges: bytes\r\n\
             Last-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n{}\r\n",
            if from > 0 { range.as_str() } else { "" }
        );
        if to.write_all(head.as_bytes()).is_err() || method == "HEAD" {
            return method == "HEAD";
        }
        let rest = &body[from.min(body.len())..];
        let quarter = &rest[..rest.len().min(LENGTH / 4)];
        match manner {
            Manner::Cuts if rest.len() > quarter.len() => {
                let _ = to.write_all(quarter);
                false
            }
            Manner::Stalls => {
                let _ = to.write_all(quarter);
                std::thread::sleep(Duration::from_secs(600));
                false
            }
            _ => to.write_all(rest).is_ok(),
        }
    }
}

/// Two objects in a folder.
fn listing(tag: &str) -> Vec<u8> {
    let object = |key: &str| {
        format!(
            "<Contents><Key>{key}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>\
             <ETag>{}</ETag><Size>{LENGTH}</Size></Contents>",
            tag.replace('"', "&quot;")
        )
    };
    format!(
        "<?xml version=\"1.0\"?><ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>{}{}</ListBucketResult>",
        object("base/folder/a.csv"),
        object("base/folder/deep/b.csv")
    )
    .into_bytes()
}

/// The headers of a request, their names in lower case.
type Headers = Vec<(String, String)>;

/// The next request of a connection: its method, its path, and its headers.
fn request(reader: &mut impl BufRead) -> Option<(String, String, Headers)> {
    let mut line = String::new();
    let mut next = |reader: &mut dyn BufRead| {
        line.clear();
        reader.read_line(&mut line).ok().filter(|length| *length > 0)?;
        Some(line.trim_end().to_owned())
    };
    let first = next(reader)?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = Vec::new();
    loop {
        let line = next(reader)?;
        let Some((key, value)) = line.split_once(':') else { return Some((method, path, headers)) };
        headers.push((key.to_ascii_lowercase(), value.trim().to_owned()));
    }
}
