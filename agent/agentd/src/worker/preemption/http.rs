//! One request to a metadata service: plain HTTP, a short answer, a deadline.

use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::header::HeaderMap;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// How long the service may take to take the connection: it is on a link of the machine itself.
const CONNECT: Duration = Duration::from_secs(2);

/// The longest answer, in bytes.
const LONGEST: usize = 256 * 1024;

/// Why there was no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    #[error("nothing listens at {0}")]
    Connect(String, #[source] std::io::Error),
    #[error("no answer within {0:?}")]
    Late(Duration),
    #[error("the conversation broke")]
    Broken(#[source] hyper::Error),
    #[error("the answer is longer than {LONGEST} bytes, or broke off")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("`{0}` cannot be asked for")]
    Request(String, #[source] hyper::http::Error),
}

/// An answer, whatever its status.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

impl Answer {
    /// One of its headers, as text.
    pub(super) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).trim().to_owned()
    }
}

/// Asks for `path`, with these headers; waits for the whole answer, but no longer than `within`.
pub(super) async fn ask(
    (host, port): &(String, u16),
    method: Method,
    path: &str,
    headers: &[(&'static str, &str)],
    within: Duration,
) -> Result<Answer, AskError> {
    let place = format!("{host}:{port}");
    let mut request = Request::builder().method(method).uri(path).header("Host", &place);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request =
        request.body(Empty::<Bytes>::new()).map_err(|error| AskError::Request(path.to_owned(), error))?;
    let answered = async {
        let connected = tokio::time::timeout(CONNECT, TcpStream::connect((host.as_str(), *port))).await;
        let stream = connected
            .map_err(|_| AskError::Late(CONNECT))?
            .map_err(|error| AskError::Connect(place.clone(), error))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(AskError::Broken)?;
        let answer = async {
            let (head, body) = sender.send_request(request).await.map_err(AskError::Broken)?.into_parts();
            let body = Limited::new(body, LONGEST).collect().await.map_err(AskError::Body)?;
            Ok(Answer { status: head.status, headers: head.headers, body: body.to_bytes().to_vec() })
        };
        // The connection carries the request; it has no task of its own.
        tokio::pin!(connection, answer);
        tokio::select! {
            answer = &mut answer => answer,
            ended = &mut connection => {
                ended.map_err(AskError::Broken)?;
                answer.await
            }
        }
    };
    tokio::time::timeout(within, answered).await.map_err(|_| AskError::Late(within))?
}
