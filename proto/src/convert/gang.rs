//! Wire ↔ model of what jobs on several nodes have of their own: how their processes are started, and what their ranks
//! say and are told.

use agent_model::Boot;
use agent_model::job::Distribution;
use agent_model::protocol::gang::{Gang, RankPlace, Ready, Roster, Seat, Secret};

use super::{WireError, value};
use crate::v1;

impl From<Distribution> for v1::Distribution {
    fn from(distribution: Distribution) -> v1::Distribution {
        use v1::distribution::Kind;
        let kind = match distribution {
            Distribution::Mpi { processes } => Kind::Mpi(processes),
            Distribution::PyTorch { processes } => Kind::Pytorch(processes),
            Distribution::TensorFlow { workers, parameter_servers } => {
                Kind::Tensorflow(v1::TensorFlowDistribution { workers, parameter_servers })
            }
            Distribution::Ray { port, dashboard, dashboard_port, head_arguments, worker_arguments } => {
                Kind::Ray(v1::RayDistribution {
                    port: port.into(),
                    dashboard,
                    dashboard_port: dashboard_port.into(),
                    head_arguments,
                    worker_arguments,
                })
            }
            Distribution::Spark => Kind::Spark(v1::SparkDistribution {}),
        };
        v1::Distribution { kind: Some(kind) }
    }
}

impl TryFrom<v1::Distribution> for Distribution {
    type Error = WireError;
    fn try_from(wire: v1::Distribution) -> Result<Distribution, WireError> {
        use v1::distribution::Kind;
        Ok(match wire.kind.ok_or(WireError::Missing("distribution.kind"))? {
            Kind::Mpi(processes) => Distribution::Mpi { processes },
            Kind::Pytorch(processes) => Distribution::PyTorch { processes },
            Kind::Tensorflow(of) => {
                Distribution::TensorFlow { workers: of.workers, parameter_servers: of.parameter_servers }
            }
            Kind::Ray(ray) => Distribution::Ray {
                port: port("distribution.port", ray.port)?,
                dashboard: ray.dashboard,
                dashboard_port: port("distribution.dashboard_port", ray.dashboard_port)?,
                head_arguments: ray.head_arguments,
                worker_arguments: ray.worker_arguments,
            },
            Kind::Spark(_) => Distribution::Spark,
        })
    }
}

fn port(field: &'static str, number: u32) -> Result<u16, WireError> {
    u16::try_from(number).map_err(|_| value(field, &number.to_string()))
}

impl From<RankPlace> for v1::RankPlace {
    fn from(place: RankPlace) -> v1::RankPlace {
        v1::RankPlace {
            address: place.address.to_string(),
            network: place.network,
            first_port: place.first_port.into(),
            ports: place.ports.into(),
        }
    }
}

impl TryFrom<v1::RankPlace> for RankPlace {
    type Error = WireError;
    fn try_from(wire: v1::RankPlace) -> Result<RankPlace, WireError> {
        Ok(RankPlace {
            address: wire.address.parse().map_err(|_| value("place.address", &wire.address))?,
            network: wire.network,
            first_port: port("place.first_port", wire.first_port)?,
            ports: port("place.ports", wire.ports)?,
        })
    }
}

impl From<Ready> for v1::RankReady {
    fn from(ready: Ready) -> v1::RankReady {
        v1::RankReady {
            place: Some(ready.place.into()),
            environment: ready.environment,
            secret: ready.secret.reveal().to_owned(),
            met: ready.met,
        }
    }
}

impl TryFrom<v1::RankReady> for Ready {
    type Error = WireError;
    fn try_from(wire: v1::RankReady) -> Result<Ready, WireError> {
        Ok(Ready {
            place: wire.place.ok_or(WireError::Missing("ready.place"))?.try_into()?,
            environment: wire.environment,
            secret: Secret::new(wire.secret),
            met: wire.met,
        })
    }
}

impl From<Gang> for v1::GangOrder {
    fn from(gang: Gang) -> v1::GangOrder {
        let seat = |seat: Seat| v1::RankSeat { node: seat.node.to_string(), place: Some(seat.place.into()) };
        v1::GangOrder {
            ranks: gang.roster.0.into_iter().map(seat).collect(),
            secret: gang.secret.reveal().to_owned(),
            go_until_ms: gang.go.map_or(0, Boot::millis),
        }
    }
}

impl TryFrom<v1::GangOrder> for Gang {
    type Error = WireError;
    fn try_from(wire: v1::GangOrder) -> Result<Gang, WireError> {
        let seat = |seat: v1::RankSeat| {
            let place = seat.place.ok_or(WireError::Missing("seat.place"))?;
            Ok(Seat { node: seat.node.parse()?, place: place.try_into()? })
        };
        Ok(Gang {
            roster: Roster(wire.ranks.into_iter().map(seat).collect::<Result<_, WireError>>()?),
            secret: Secret::new(wire.secret),
            go: (wire.go_until_ms > 0).then(|| Boot::from_millis(wire.go_until_ms)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_every_distribution_round_trips() {
        for distribution in [
            Distribution::Mpi { processes: 2 },
            Distribution::PyTorch { processes: 3 },
            Distribution::TensorFlow { workers: 2, parameter_servers: 1 },
            Distribution::Ray {
                port: 6379,
                dashboard: Some(false),
                dashboard_port: 8265,
                head_arguments: "--a".into(),
                worker_arguments: "--b 1".into(),
            },
            Distribution::Spark,
        ] {
            assert_eq!(
                Distribution::try_from(v1::Distribution::from(distribution.clone())).unwrap(),
                distribution
            );
        }
    }

    #[test]
    fn test_gang_and_ready_round_trip() {
        let place = RankPlace {
            address: "10.0.0.2".parse().unwrap(),
            network: "10.0.0.0/24".into(),
            first_port: 20_000,
            ports: 6,
        };
        let ready =
            Ready { place: place.clone(), environment: "e".into(), secret: Secret::new("s"), met: u64::MAX };
        assert_eq!(Ready::try_from(v1::RankReady::from(ready.clone())).unwrap(), ready);
        let seat = Seat { node: "n0".parse().unwrap(), place };
        for go in [None, Some(Boot::from_millis(7))] {
            let gang = Gang { roster: Roster(vec![seat.clone()]), secret: Secret::default(), go };
            assert_eq!(Gang::try_from(v1::GangOrder::from(gang.clone())).unwrap(), gang);
        }
        let odd = v1::RankPlace { address: "nowhere".into(), ..v1::RankPlace::default() };
        assert!(RankPlace::try_from(odd).is_err());
    }
}
