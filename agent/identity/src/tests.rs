use std::sync::Arc;
use std::time::Duration;

use agent_model::{ManualClock, Principal, Timestamp};
use tokio::net::{TcpListener, TcpStream};

use super::*;

const DAY: Duration = Duration::from_secs(24 * 3600);
const NOW: Timestamp = Timestamp(1_800_000_000_000);

fn subject(text: &str) -> Subject {
    text.parse().unwrap()
}

fn credentials(authority: &Authority, subject: &Subject, now: Timestamp, life: Duration) -> Credentials {
    let key = PrivateKey::generate().unwrap();
    let request = SigningRequest::read(&key.request().unwrap()).unwrap();
    let certificate = authority.issue(&request, subject, now, life).unwrap();
    Credentials::new("https://c:7443", authority.certificate(), &certificate, &key)
}

fn authority() -> (tempfile::TempDir, Arc<Authority>) {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::open(&dir.path().join("authority"), NOW).unwrap();
    (dir, Arc::new(authority))
}

/// What the listener saw of a client that connects with `dialer`, and the client's result.
async fn meet(
    server: &ServerTls,
    make: impl FnOnce((&str, u16)) -> Dialer,
) -> (io::Result<Presented>, io::Result<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let dialer = make(("127.0.0.1", listener.local_addr().unwrap().port()));
    let accept = async {
        let (stream, _) = listener.accept().await.unwrap();
        server.accept(stream).await.map(|(_stream, presented)| presented)
    };
    let (seen, connected) = tokio::join!(accept, async { dialer.connect().await.map(|_| ()) });
    (seen, connected)
}

use std::io;

#[test]
fn test_subjects_are_read_as_they_are_written() {
    for text in ["agentd://node/gpu-07/00ff", "agentd://user/ada/3f"] {
        assert_eq!(subject(text).to_string(), text);
    }
    for odd in [
        "agentd://node/gpu-07",
        "agentd://node//3f",
        "agentd://root/x/3f",
        "agentd://node/a/3f/x",
        "node/a/3f",
        "agentd://node/a/",
    ] {
        assert_eq!(odd.parse::<Subject>(), Err(SubjectError), "{odd}");
    }
    assert_eq!(Subject::new(Principal::Local { uid: 0 }, "3f"), None);
}

#[test]
fn test_tokens_are_read_as_they_are_written_and_torn_ones_are_not() {
    let token = Token::generate(TokenKind::Join, [7; 32]).unwrap();
    let text = token.to_string();
    assert!(text.starts_with("agentd-join-") && !format!("{token:?}").contains(&token.secret()));
    let read: Token = format!(" {text}\n").parse().unwrap();
    assert_eq!((&read, read.authority(), read.kind()), (&token, [7; 32], TokenKind::Join));
    assert_ne!(
        Token::hash(&token.secret()),
        Token::hash(&Token::generate(TokenKind::Join, [7; 32]).unwrap().secret())
    );
    assert_eq!(text[..text.len() - 1].parse::<Token>(), Err(TokenError::Torn));
    assert_eq!(text.replacen("join-", "join-A", 1).parse::<Token>(), Err(TokenError::Torn));
    assert_eq!("hunter2".parse::<Token>(), Err(TokenError::Kind));
}

#[test]
fn test_an_authority_is_made_once_and_is_for_its_owner_alone() {
    use std::os::unix::fs::PermissionsExt;
    let (dir, first) = authority();
    let path = dir.path().join("authority");
    let again = Authority::open(&path, NOW).unwrap();
    assert_eq!(first.fingerprint(), again.fingerprint());
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let node = credentials(&again, &subject("agentd://node/a/1"), NOW, DAY);
    let certified = node.certified().unwrap();
    assert_eq!(certified.subject, subject("agentd://node/a/1"));
    assert_eq!(certified.from.0, NOW.0 - CLOCK_TOLERANCE.as_millis() as u64);
    assert_eq!(certified.until, NOW + DAY);
    assert_eq!(certified.renew_at(), NOW + DAY * 2 / 3);
    std::fs::write(&path, "{}").unwrap();
    assert!(matches!(Authority::open(&path, NOW), Err(AuthorityError::Damaged { .. })));
}

#[test]
fn test_a_request_that_was_changed_is_refused() {
    let mut request = PrivateKey::generate().unwrap().request().unwrap();
    assert_eq!(SigningRequest::read(&request).unwrap().key(), SigningRequest::read(&request).unwrap().key());
    let last = request.len() - 1;
    request[last] ^= 1;
    assert!(matches!(SigningRequest::read(&request), Err(IssueError::Request(_))));
}

#[tokio::test]
async fn test_each_end_knows_the_other_or_there_is_no_connection() {
    let ((_dir, ours), (_other, foreign)) = (authority(), authority());
    let clock: Arc<ManualClock> = Arc::new(ManualClock::new(NOW));
    let server = ServerTls::new(ours.clone(), clock.clone(), DAY * 30).unwrap();
    let ada = subject("agentd://user/ada/1");
    let good = credentials(&ours, &ada, NOW, DAY);
    let dial = |trust: Trust, held: Option<&Credentials>| {
        let held = held.map(|held| ShownIdentity::new(held).unwrap());
        let clock = clock.clone();
        move |to: (&str, u16)| Dialer::new(to, trust, held, Proxy::default(), clock).unwrap()
    };
    let ours_trusted = || Trust::Authority(ours.certificate().to_vec());
    let (seen, _) = meet(&server, dial(ours_trusted(), Some(&good))).await;
    assert_eq!(seen.unwrap(), Presented::Certificate(good.certified().unwrap()));
    let (seen, _) = meet(&server, dial(Trust::Fingerprint(ours.fingerprint()), None)).await;
    assert_eq!(seen.unwrap(), Presented::Nothing);
    for trust in [Trust::Authority(foreign.certificate().to_vec()), Trust::Fingerprint(foreign.fingerprint())]
    {
        let (seen, connected) = meet(&server, dial(trust, None)).await;
        assert!(seen.is_err() && connected.is_err(), "a controller of another authority");
    }
    let strange = credentials(&foreign, &ada, NOW, DAY);
    let (seen, _) = meet(&server, dial(ours_trusted(), Some(&strange))).await;
    assert!(seen.is_err(), "a certificate of another authority");
    clock.advance(DAY + Duration::from_secs(2));
    let (seen, _) = meet(&server, dial(ours_trusted(), Some(&good))).await;
    assert!(seen.is_err(), "a certificate that has ended");
    // A node's own certificate is not one of a controller.
    let (_, connected) = meet_as(&good, dial(ours_trusted(), None)).await;
    assert!(connected.is_err());
}

/// A client connects to a server that presents a certificate for clients.
async fn meet_as(shown: &Credentials, make: impl FnOnce((&str, u16)) -> Dialer) -> (bool, io::Result<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let dialer = make(("127.0.0.1", listener.local_addr().unwrap().port()));
    let shown = ShownIdentity::new(shown).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(crate::tls::provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(shown.shown())));
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let accept = async {
        let (stream, _): (TcpStream, _) = listener.accept().await.unwrap();
        acceptor.accept(stream).await.is_ok()
    };
    tokio::join!(accept, async { dialer.connect().await.map(|_| ()) })
}

#[tokio::test]
async fn test_a_clock_that_is_far_off_does_not_keep_a_token_from_its_controller() {
    let (_dir, ours) = authority();
    let server = ServerTls::new(ours.clone(), Arc::new(ManualClock::new(NOW)), DAY).unwrap();
    for off in [Timestamp(NOW.0 - 300 * 3_600_000), Timestamp(NOW.0 + 300 * 3_600_000)] {
        let clock = Arc::new(ManualClock::new(off));
        let trusted = Trust::Fingerprint(ours.fingerprint());
        let make = |to: (&str, u16)| Dialer::new(to, trusted, None, Proxy::default(), clock).unwrap();
        let (seen, connected) = meet(&server, make).await;
        assert!(seen.is_ok() && connected.is_ok(), "{off:?}");
    }
}

#[tokio::test]
async fn test_the_listener_shows_another_certificate_without_a_restart() {
    let (_dir, ours) = authority();
    let clock = Arc::new(ManualClock::new(NOW));
    let server = ServerTls::new(ours.clone(), clock.clone(), DAY).unwrap();
    clock.advance(DAY * 2);
    let trusted = || Trust::Authority(ours.certificate().to_vec());
    let make = |to: (&str, u16)| Dialer::new(to, trusted(), None, Proxy::default(), clock.clone()).unwrap();
    assert!(meet(&server, make).await.1.is_err(), "it has ended");
    assert!(server.renew_at() < NOW + DAY);
    server.renew().unwrap();
    let make = |to: (&str, u16)| Dialer::new(to, trusted(), None, Proxy::default(), clock.clone()).unwrap();
    assert!(meet(&server, make).await.1.is_ok());
    assert!(server.renew_at() > NOW + DAY * 2);
}
