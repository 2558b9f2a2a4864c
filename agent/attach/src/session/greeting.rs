//! Whether an SSH server greets a new connection, or turns it away because too many came or too many failed.
//!
//! OpenSSH drops such a connection before the protocol begins, in most releases with a line that says why. That line
//! is looked at, and left for the protocol, which skips what comes before a greeting.

use std::io;

use tokio::net::TcpStream;

/// The beginnings of those lines: `MaxStartups`, and `PerSourcePenalties`.
const CROWDED: &str = "Exceeded MaxStartups";
const PENALTY: &str = "Not allowed at this time";

/// Why a server turned a connection away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TurnedAway {
    /// Too many have not logged in yet; there is room when one of them has.
    Crowded,
    /// Attempts from this address failed; each further one may make it last longer.
    Penalty,
    /// It was closed without a word.
    Silently,
}

impl TurnedAway {
    /// In words.
    pub(super) fn describe(self) -> &'static str {
        match self {
            TurnedAway::Crowded => "too many are logging in there (Exceeded MaxStartups)",
            TurnedAway::Penalty => "it is cross with this address (Not allowed at this time)",
            TurnedAway::Silently => "it closes them before it greets",
        }
    }
}

/// Waits until a server greets; returns why it did not, if it turned the connection away.
pub(super) async fn awaited(stream: &TcpStream) -> io::Result<Option<TurnedAway>> {
    let mut first = [0; CROWDED.len() + PENALTY.len()];
    let length = stream.peek(&mut first).await?;
    Ok(match String::from_utf8_lossy(&first[..length]) {
        said if said.is_empty() => Some(TurnedAway::Silently),
        said if said.starts_with(CROWDED) => Some(TurnedAway::Crowded),
        said if said.starts_with(PENALTY) => Some(TurnedAway::Penalty),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn test_a_server_that_turns_away_is_told_from_one_that_greets() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        for (says, expected) in [
            ("SSH-2.0-OpenSSH_9.8\r\n", None),
            ("a line of the operator\r\nSSH-2.0-x\r\n", None),
            ("Exceeded MaxStartups\r\n", Some(TurnedAway::Crowded)),
            ("Not allowed at this time\r\n", Some(TurnedAway::Penalty)),
            ("", Some(TurnedAway::Silently)),
        ] {
            let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (mut server, _) = listener.accept().await.unwrap();
            server.write_all(says.as_bytes()).await.unwrap();
            drop(server);
            assert_eq!(awaited(&stream).await.unwrap(), expected, "{says}");
            let mut left = String::new();
            stream.read_to_string(&mut left).await.unwrap();
            assert_eq!(left, says, "nothing was taken");
        }
    }
}
