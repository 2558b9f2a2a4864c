//! The address and ports of a rank of a gang, and whether it reaches the others.
//!
//! Owns the choice of the address, the ports that are reserved for a rank from before it reports that it could start
//! until right before its start ([`Reservation`]), and the check that each rank reaches each port of all others
//! ([`meet`]), so that a firewall is reported and no job hangs. The listener of a reserved port sends the name of its
//! rank.
//!
//! `agent_model::protocol::gang` decides when ranks start.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use agent_model::protocol::gang::{RankPlace, Roster};
use agent_model::{Address, Code, Fault, ReplicaId};
use agent_node::net::{self, Interface};
use futures_util::future::{select_all, try_join_all};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};

use crate::config::GangSettings;
use crate::limits::Connections;
use crate::open_connections::OpenConnections;

/// How long another rank is tried before it counts as unreachable.
const MEET_WITHIN: Duration = Duration::from_secs(20);
/// How long one try may take.
const TRY_WITHIN: Duration = Duration::from_secs(5);
/// How long the lookup of the controller's address may take; the node is connected to it already.
const LOOK_UP_WITHIN: Duration = Duration::from_secs(5);
/// Between two tries.
const AGAIN: Duration = Duration::from_millis(300);
/// How long a connection of another rank may last.
const STAY: Duration = Duration::from_secs(5);
/// The longest greeting, in bytes.
const GREETING: u64 = 256;

/// The ports of a rank, in the order of [`RankPlace::port`].
pub(crate) mod ports {
    /// The port of the first rank of PyTorch, the head of Ray, the master of Spark.
    pub(crate) const MASTER: u16 = 0;
    /// The port of a rank that lets `mpirun` start processes.
    pub(crate) const LAUNCH: u16 = 1;
    /// The first port for the daemons of `mpirun`, dashboards and the like.
    pub(crate) const SERVICE: u16 = 2;
    /// The first port for the processes of the command.
    pub(crate) const PROCESS: u16 = 4;
}

/// Ports that are reserved for a rank: nobody else gets them until this is dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    /// The address and ports of the rank.
    pub(crate) place: RankPlace,
    /// The name of the interface of its address; may be empty.
    pub(crate) interface: String,
    listeners: Vec<TcpListener>,
}

impl Reservation {
    /// Reserves `count` ports for a rank, those of `wanted` if the others know them already. The address is `outward`
    /// if none is configured and an interface has it.
    pub(crate) fn make(
        settings: &GangSettings,
        outward: Option<IpAddr>,
        replica: &ReplicaId,
        count: u16,
        wanted: Option<&RankPlace>,
    ) -> Result<Reservation, Fault> {
        let Interface { name, address, bits } = choose(settings, &net::interfaces(), outward)?;
        let network = Interface { name: name.clone(), address, bits }.network();
        Reservation::at(address, network, name, &settings.ports, replica, count, wanted)
    }

    /// The same for a job on one node, whose processes reach each other on the machine itself.
    pub(crate) fn alone(
        settings: &GangSettings,
        replica: &ReplicaId,
        count: u16,
    ) -> Result<Reservation, Fault> {
        let address = IpAddr::from([127, 0, 0, 1]);
        let network = "127.0.0.0/8".to_owned();
        Reservation::at(address, network, String::new(), &settings.ports, replica, count, None)
    }

    fn at(
        address: IpAddr,
        network: String,
        interface: String,
        range: &RangeInclusive<u16>,
        replica: &ReplicaId,
        count: u16,
        wanted: Option<&RankPlace>,
    ) -> Result<Reservation, Fault> {
        let starts: Vec<u16> =
            match wanted.filter(|wanted| wanted.address == address && wanted.ports == count) {
                Some(wanted) => vec![wanted.first_port],
                None => blocks(range, count, replica).collect(),
            };
        let mut last = None;
        for first_port in starts {
            match listen(address, first_port, count) {
                Ok(listeners) => {
                    let place = RankPlace { address, network, first_port, ports: count };
                    return Ok(Reservation { place, interface, listeners });
                }
                Err(error) => last = Some(error),
            }
        }
        let wanted =
            if count == 1 { "no port is".to_owned() } else { format!("no {count} ports in a row are") };
        let what = format!("{wanted} free at {address} out of {}-{}", range.start(), range.end());
        let fault = Fault::new(Code::GangPlace, what);
        let fault = last.iter().fold(fault, |fault, error| fault.because(error));
        Err(fault.fix("give the node a wider range as `gang_ports`, or end what uses these"))
    }

    /// Sends the name of this rank to each connection, for as long as this is polled.
    pub(crate) async fn greet(&self, replica: &ReplicaId) -> Infallible {
        let greeting = greeting(replica);
        let mut guests = FuturesUnordered::new();
        let places = OpenConnections::new(Connections::of_a_rank());
        loop {
            let next = select_all(self.listeners.iter().map(|listener| Box::pin(listener.accept())));
            tokio::select! {
                (accepted, _, _) = next => match accepted {
                    Ok((stream, _)) => guests.push(answer(stream, &greeting, places.clone())),
                    Err(_) => sleep(AGAIN).await, // out of descriptors: try again later
                },
                Some(_) = guests.next(), if !guests.is_empty() => {}
            }
        }
    }
}

fn greeting(replica: &ReplicaId) -> String {
    format!("agentd {replica}\n")
}

/// The caller closes first, so that no port of this rank is left in TIME_WAIT, which would block its reuse; but one that
/// stays for long, or for longest while many others come, is closed here.
async fn answer(mut stream: TcpStream, greeting: &str, places: OpenConnections) {
    let Some(place) = places.take(None).await else { return };
    let answered = async {
        stream.write_all(greeting.as_bytes()).await?;
        stream.read(&mut [0; 1]).await
    };
    tokio::select! {
        () = place.until_over() => {}
        _ = timeout(STAY, answered) => {}
    }
}

/// The first ports of the blocks of a range, each once. All ranks of an attempt begin with the same one, so that
/// usually all have the same ports.
fn blocks(range: &RangeInclusive<u16>, count: u16, replica: &ReplicaId) -> impl Iterator<Item = u16> + use<> {
    let (first, length) = (u32::from(*range.start()), u32::from(range.end() - range.start()) + 1);
    let count = u32::from(count.max(1));
    let number = length / count;
    let hash = format!("{}.{}", replica.job, replica.epoch)
        .bytes()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (0..number)
        .map(move |index| (hash % number + index) % number)
        .filter_map(move |block| u16::try_from(first + block * count).ok())
}

fn listen(address: IpAddr, first_port: u16, count: u16) -> io::Result<Vec<TcpListener>> {
    let bind = |port: u16| {
        let listener = std::net::TcpListener::bind(SocketAddr::new(address, port))?;
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    };
    (0..count).map(|index| bind(first_port.saturating_add(index))).collect()
}

/// The address from which this node reaches its controller: other nodes of the controller can use it too. If the
/// controller is on this machine, or its address cannot be found, the address of the route to other networks.
pub(crate) async fn outward(controller: &Address) -> Option<IpAddr> {
    let to = match controller {
        Address::Unix(_) => Vec::new(),
        Address::Tls { host, port } => {
            let found = timeout(LOOK_UP_WITHIN, tokio::net::lookup_host((host.as_str(), *port))).await;
            found.ok().and_then(Result::ok).map(Iterator::collect).unwrap_or_default()
        }
    };
    net::outward(&to)
}

/// The address at which others reach this node: the configured one, or that of the outward interface.
fn choose(
    settings: &GangSettings,
    interfaces: &[Interface],
    outward: Option<IpAddr>,
) -> Result<Interface, Fault> {
    let Some(address) = settings.address else {
        return net::reachable(interfaces, outward).cloned().ok_or_else(|| {
            Fault::new(Code::GangPlace, "this node has no address by which other nodes reach it")
                .fix("name one as `node_address` in the node's configuration")
        });
    };
    if let Some(interface) = interfaces.iter().find(|interface| interface.address == address) {
        return Ok(interface.clone());
    }
    // All of 127.0.0.0/8 is local, although only one address is listed.
    if address.is_loopback() {
        return Ok(Interface {
            name: "lo".to_owned(),
            address,
            bits: if address.is_ipv4() { 8 } else { 128 },
        });
    }
    let what = format!("this node has no address {address}, which its `node_address` names");
    Err(Fault::new(Code::GangPlace, what).fix("correct `node_address` in the node's configuration"))
}

/// Tries every port of every other rank. Those that do not listen yet are tried again for a while.
pub(crate) async fn meet(roster: &Roster, replica: &ReplicaId, node: &str) -> Result<(), Fault> {
    let end = Instant::now() + MEET_WITHIN;
    let others = roster.0.iter().zip(0..).filter(|(_, rank)| *rank != replica.rank);
    let calls = others.flat_map(|(seat, rank)| {
        (0..seat.place.ports).map(move |index| {
            let at = SocketAddr::new(seat.place.address, seat.place.port(index));
            let other = ReplicaId { rank, ..replica.clone() };
            async move {
                call(at, &other, end).await.map_err(|why| {
                    let what = format!(
                        "rank {} on {node} cannot reach rank {rank} on {} at {at}: {why}",
                        replica.rank, seat.node
                    );
                    Fault::new(Code::GangUnreachable, what).fix(
                        "open the ports of `gang_ports` between these machines, or name another address of that node as \
                         `node_address` in its configuration",
                    )
                })
            }
        })
    });
    try_join_all(calls).await.map(drop)
}

async fn call(at: SocketAddr, other: &ReplicaId, end: Instant) -> Result<(), String> {
    loop {
        let heard = timeout(TRY_WITHIN, hear(at)).await;
        let why = match heard {
            Ok(Ok(heard)) if heard == greeting(other) => return Ok(()),
            Ok(Ok(heard)) if heard.starts_with("agentd ") => format!("{} is there", heard.trim_end()),
            Ok(Ok(_)) => "somebody else is there".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "timed out".to_owned(),
        };
        if Instant::now() + AGAIN >= end {
            return Err(why);
        }
        sleep(AGAIN).await;
    }
}

async fn hear(at: SocketAddr) -> io::Result<String> {
    let stream = TcpStream::connect(at).await?;
    let mut heard = String::new();
    BufReader::new(stream.take(GREETING)).read_line(&mut heard).await?;
    Ok(heard)
}

#[cfg(test)]
mod tests {
    use agent_model::protocol::gang::Seat;

    use super::*;

    fn settings(address: Option<&str>) -> GangSettings {
        GangSettings {
            address: address.map(|address| address.parse().unwrap()),
            peer_port: None,
            ports: 20_000..=20_099,
            wait: Duration::ZERO,
            labels: Default::default(),
            limits: Default::default(),
        }
    }

    fn id(rank: u32) -> ReplicaId {
        format!("gang-{}.1.{rank}", std::process::id()).parse().unwrap()
    }

    #[test]
    fn test_blocks_are_the_same_for_all_ranks_and_each_comes_once() {
        let range = 20_000..=20_099;
        let all: Vec<u16> = blocks(&range, 6, &id(0)).collect();
        assert_eq!(all, blocks(&range, 6, &id(1)).collect::<Vec<_>>());
        let mut sorted = all.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!((all.len(), sorted.len()), (16, 16));
        assert!(sorted.iter().all(|first| range.contains(first) && range.contains(&(first + 5))));
    }

    #[test]
    fn test_address_is_the_configured_one_or_leads_out() {
        let eth = Interface { name: "eth0".into(), address: "10.0.0.2".parse().unwrap(), bits: 24 };
        let all = [eth.clone()];
        assert_eq!(choose(&settings(None), &all, None).unwrap(), eth);
        assert_eq!(choose(&settings(Some("10.0.0.2")), &all, None).unwrap(), eth);
        assert_eq!(choose(&settings(Some("127.0.0.7")), &all, None).unwrap().name, "lo");
        for refused in [choose(&settings(Some("10.0.0.3")), &all, None), choose(&settings(None), &[], None)] {
            assert_eq!(refused.unwrap_err().code, Code::GangPlace);
        }
    }

    #[tokio::test]
    async fn test_ranks_meet_and_a_stranger_is_named() {
        let settings = settings(Some("127.0.0.9"));
        let [zero, one] = [0, 1].map(|rank| Reservation::make(&settings, None, &id(rank), 5, None).unwrap());
        assert_ne!(zero.place, one.place, "no two have the same ports");
        let seat = |of: &Reservation| Seat { node: "n".parse().unwrap(), place: of.place.clone() };
        let roster = Roster(vec![seat(&zero), seat(&one)]);
        let (zero_id, one_id) = (id(0), id(1));
        tokio::select! {
            met = meet(&roster, &zero_id, "n0") => met.unwrap(),
            never = one.greet(&one_id) => match never {},
        }
        let wrong = id(7);
        let end = Instant::now();
        tokio::select! {
            said = call(SocketAddr::new(one.place.address, one.place.first_port), &one_id, end) => {
                assert_eq!(said.unwrap_err(), format!("agentd {wrong} is there"));
            }
            never = one.greet(&wrong) => match never {},
        }
        let (at, place) = (SocketAddr::new(one.place.address, one.place.port(4)), one.place.clone());
        drop(one);
        assert!(call(at, &one_id, end).await.unwrap_err().contains("refused"));
        let again = Reservation::make(&settings, None, &one_id, 5, Some(&place)).unwrap();
        assert_eq!(again.place, place, "what the others know is taken again");
        assert!(Reservation::make(&settings, None, &one_id, 5, Some(&place)).unwrap_err().fix.is_some());
    }
}
