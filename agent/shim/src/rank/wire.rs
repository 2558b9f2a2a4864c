//! How a rank asks another one to run a command line: the messages of the connection.
//!
//! ```text
//! rank that lends                          rank that leads
//!   nonce ──────────────────────────────────▶
//!        ◀── nonce, command line, their MAC with the secret of the attempt
//!   out, err, …, exit code ─────────────────▶
//! ```
//!
//! The MAC covers both nonces and the command line, so replayed or altered messages are rejected. Nothing is
//! encrypted: the network between the nodes of a job carries its data in the clear, too.

use std::io::{self, Read, Write};

use agent_model::protocol::gang::Secret;
use sha2::{Digest as _, Sha256};

/// Bytes of a nonce and of a MAC.
const BYTES: usize = 32;
/// The longest command line.
const LONGEST: usize = 1 << 20;
/// The largest piece of output.
pub(super) const PIECE: usize = 32 << 10;

/// A random number that is used once.
pub(super) type Nonce = [u8; BYTES];

/// A message of the lending rank about the command.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Told {
    Out(Vec<u8>),
    Err(Vec<u8>),
    Exit(u8),
}

pub(super) fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; BYTES];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    Ok(nonce)
}

/// HMAC-SHA256.
fn code(secret: &Secret, parts: &[&[u8]]) -> [u8; BYTES] {
    const BLOCK: usize = 64;
    let mut key = [0; BLOCK];
    match secret.reveal().as_bytes() {
        short if short.len() <= BLOCK => key[..short.len()].copy_from_slice(short),
        long => key[..BYTES].copy_from_slice(&Sha256::digest(long)),
    }
    let keyed = |pad: u8| Sha256::new().chain_update(key.map(|byte| byte ^ pad));
    let inner = parts.iter().fold(keyed(0x36), |hash, part| hash.chain_update(part)).finalize();
    keyed(0x5c).chain_update(inner).finalize().into()
}

/// Sends a command line to a rank that sends its nonce first.
pub(super) fn ask(stream: &mut (impl Read + Write), secret: &Secret, line: &str) -> io::Result<()> {
    let mut theirs: Nonce = [0; BYTES];
    stream.read_exact(&mut theirs)?;
    let own = nonce()?;
    let length = u32::try_from(line.len()).map_err(io::Error::other)?;
    let mut message = Vec::with_capacity(2 * BYTES + 4 + line.len());
    message.extend_from_slice(&own);
    message.extend_from_slice(&length.to_be_bytes());
    message.extend_from_slice(line.as_bytes());
    message.extend_from_slice(&code(secret, &[&theirs, &own, line.as_bytes()]));
    stream.write_all(&message)
}

/// The command line that the other rank sends, if it knows the secret.
pub(super) fn asked(stream: &mut (impl Read + Write), secret: &Secret) -> io::Result<String> {
    let own = nonce()?;
    stream.write_all(&own)?;
    let (mut theirs, mut length): (Nonce, _) = ([0; BYTES], [0; 4]);
    stream.read_exact(&mut theirs)?;
    stream.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length) as usize;
    if length > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the command line is too long"));
    }
    let (mut line, mut given) = (vec![0; length], [0; BYTES]);
    stream.read_exact(&mut line)?;
    stream.read_exact(&mut given)?;
    let right = code(secret, &[&own, &theirs, &line]);
    // In the same time, whichever byte differs.
    let differs = right.iter().zip(given).fold(0, |differs, (right, given)| differs | (right ^ given));
    if secret.is_unknown() || differs != 0 {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "whoever asks is not of this job"));
    }
    String::from_utf8(line).map_err(io::Error::other)
}

/// Sends a message about the command.
pub(super) fn tell(stream: &mut impl Write, told: &Told) -> io::Result<()> {
    let one = [match told {
        Told::Exit(code) => *code,
        _ => 0,
    }];
    let (kind, data): (u8, &[u8]) = match told {
        Told::Out(data) => (1, data),
        Told::Err(data) => (2, data),
        Told::Exit(_) => (3, &one),
    };
    let length = u32::try_from(data.len()).map_err(io::Error::other)?;
    let mut message = vec![kind];
    message.extend_from_slice(&length.to_be_bytes());
    message.extend_from_slice(data);
    stream.write_all(&message)
}

/// Receives the next message.
pub(super) fn told(stream: &mut impl Read) -> io::Result<Told> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
    let odd = || io::Error::new(io::ErrorKind::InvalidData, "it says something odd");
    if length > PIECE {
        return Err(odd());
    }
    let mut data = vec![0; length];
    stream.read_exact(&mut data)?;
    match (head[0], data.first()) {
        (1, _) => Ok(Told::Out(data)),
        (2, _) => Ok(Told::Err(data)),
        (3, Some(code)) => Ok(Told::Exit(*code)),
        _ => Err(odd()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn test_code_is_that_of_the_standard() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let said = code(&Secret::new("Jefe"), &[b"what do ya want ", b"for nothing?"]);
        assert_eq!(hex(&said), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        let long = code(&Secret::new("a".repeat(131)), &[b"x"]);
        assert_ne!(long, code(&Secret::new("a".repeat(130)), &[b"x"]));
    }

    #[test]
    fn test_only_who_knows_the_secret_is_heard_and_nothing_is_heard_twice() {
        let talk = |theirs: &str, ours: &str| {
            let (mut one, mut other) = UnixStream::pair().unwrap();
            let theirs = Secret::new(theirs);
            let asking = std::thread::spawn(move || ask(&mut one, &theirs, "echo 1"));
            let heard = asked(&mut other, &Secret::new(ours));
            asking.join().unwrap().unwrap();
            heard.map_err(|error| error.kind())
        };
        assert_eq!(talk("s", "s").unwrap(), "echo 1");
        assert_eq!(talk("s", "t").unwrap_err(), io::ErrorKind::PermissionDenied);
        assert_eq!(talk("", "").unwrap_err(), io::ErrorKind::PermissionDenied, "no secret is none");
    }

    #[test]
    fn test_what_is_told_arrives() {
        let mut wire = Vec::new();
        let all = [Told::Out(b"a".to_vec()), Told::Err(Vec::new()), Told::Exit(7)];
        all.iter().for_each(|one| tell(&mut wire, one).unwrap());
        let mut wire = wire.as_slice();
        for one in all {
            assert_eq!(told(&mut wire).unwrap(), one);
        }
        assert!(told(&mut wire).is_err());
    }
}
