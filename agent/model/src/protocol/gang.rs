//! How the ranks of a gang start together or not at all.
//!
//! All messages are states, not events. A rank that could start reports that, and where the others reach it
//! ([`Ready`]). When all have, each receives the [`Roster`] of all, checks whether it reaches them, and reports for
//! which roster it did. When all have done that for the same one, the controller records the go, and only then sends
//! it ([`Gang::go`]), to each node with a date of its own clock. A rank starts when it gets the go for its own epoch
//! and its current place before the date; later it does not, and ends the gang. So a rank that never got the go was
//! never started, and a gang that ends before that does not wait for silent nodes.
//!
//! Pure.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Boot, NodeId};

/// How long each rank of a gang may take to start after the controller gave the go.
pub const GO_WITHIN: Duration = Duration::from_secs(60);

/// How the others reach a rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RankPlace {
    /// Where it listens.
    pub address: IpAddr,
    /// The network that this belongs to, `address/bits`.
    pub network: String,
    /// The first of its ports, which nobody else on that machine has.
    pub first_port: u16,
    /// How many follow each other from there.
    pub ports: u16,
}

impl RankPlace {
    /// One of its ports, counted from 0; the last one if there are fewer.
    pub fn port(&self, index: u16) -> u16 {
        self.first_port + index.min(self.ports.saturating_sub(1))
    }
}

/// The secret that all ranks of an attempt share; empty when it is not known.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

impl Secret {
    /// From its text.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// The text, for those that are to know it.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// It was not received yet.
    pub fn is_unknown(&self) -> bool {
        self.0.is_empty()
    }
}

/// It is printed nowhere.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_unknown() { "Secret(unknown)" } else { "Secret(…)" })
    }
}

/// The report of a rank that could start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    /// Where the others reach it.
    pub place: RankPlace,
    /// A digest of the content of its environment; empty when unknown.
    pub environment: String,
    /// What the gang shares: of the first rank.
    pub secret: Secret,
    /// The roster whose ranks it reached, by [`Roster::digest`]; 0 for none.
    pub met: u64,
}

/// One rank of a roster.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seat {
    /// Its node.
    pub node: NodeId,
    /// Where the others reach it.
    pub place: RankPlace,
}

/// Every rank of an attempt, in their order.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Roster(pub Vec<Seat>);

impl Roster {
    /// A number that differs from that of another roster; never 0.
    pub fn digest(&self) -> u64 {
        const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
        let text = serde_json::to_string(self).unwrap_or_default(); // our own plain struct
        let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        text.bytes().fold(OFFSET, fold).max(1)
    }

    /// One rank of it.
    pub fn seat(&self, rank: u32) -> Option<&Seat> {
        self.0.get(usize::try_from(rank).ok()?)
    }
}

/// The gang, as it is sent to a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gang {
    /// All of it.
    pub roster: Roster,
    /// What it shares.
    pub secret: Secret,
    /// The go: until when, on the clock of the receiving node, the rank may be started.
    pub go: Option<Boot>,
}

/// What a rank that could start does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Nothing: others are not there yet.
    Wait,
    /// Try whether it reaches all of the roster.
    Meet,
    /// Start.
    Start,
    /// Not start, and end the gang: it was too slow.
    Late,
    /// Not start, and end the gang: the others expect it at another place.
    Moved,
}

/// What the rank at `own` does about the last `gang` it received, when `met` is the roster it reached.
pub fn next(gang: Option<&Gang>, rank: u32, own: &RankPlace, met: u64, now: Boot) -> Next {
    let Some(gang) = gang else { return Next::Wait };
    let known = gang.roster.seat(rank).is_some_and(|seat| seat.place == *own);
    match gang.go {
        Some(until) if until <= now => Next::Late,
        Some(_) if !known => Next::Moved,
        Some(_) if gang.secret.is_unknown() => Next::Wait,
        Some(_) => Next::Start,
        None if known && met != gang.roster.digest() => Next::Meet,
        None => Next::Wait,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(first_port: u16) -> RankPlace {
        RankPlace { address: [10, 0, 0, 1].into(), network: "10.0.0.0/8".into(), first_port, ports: 4 }
    }

    fn gang(ports: [u16; 2], go: Option<u64>) -> Gang {
        let seat = |port| Seat { node: "n".parse().unwrap(), place: place(port) };
        Gang {
            roster: Roster(ports.map(seat).into()),
            secret: Secret::new("s"),
            go: go.map(Boot::from_millis),
        }
    }

    #[test]
    fn test_a_rank_starts_only_when_told_so_in_time_and_where_it_is() {
        let now = Boot::from_millis(100);
        let of = |gang: &Gang, met| next(Some(gang), 1, &place(7), met, now);
        let (meeting, met) = (gang([5, 7], None), gang([5, 7], None).roster.digest());
        assert_eq!(next(None, 1, &place(7), 0, now), Next::Wait);
        assert_eq!((of(&meeting, 0), of(&meeting, met)), (Next::Meet, Next::Wait));
        assert_eq!(of(&gang([5, 8], None), met), Next::Wait, "the others hear of its new place first");
        assert_eq!(of(&gang([5, 7], Some(101)), 0), Next::Start);
        assert_eq!(of(&gang([5, 7], Some(100)), met), Next::Late);
        assert_eq!(of(&gang([5, 8], Some(101)), met), Next::Moved);
        let unknown = Gang { secret: Secret::default(), ..gang([5, 7], Some(101)) };
        assert_eq!(of(&unknown, met), Next::Wait);
        assert_ne!(met, gang([6, 7], None).roster.digest());
    }

    #[test]
    fn test_a_secret_is_not_printed() {
        assert!(!format!("{:?}", gang([1, 2], None)).contains("\"s\""));
    }
}
