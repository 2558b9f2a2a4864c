//! From a rank that could start to its start: within `Launching`.
//!
//! Owns what the rank reports to the others ([`Ready`]) and the ports that are reserved for it meanwhile. Each wait
//! is shown in the view, and a stop ends it. When the gang has its go, the ports are released, right before the
//! start. [`next`] decides what to do when.

use std::ops::ControlFlow::{Break, Continue};

use agent_cas::digest_of;
use agent_model::protocol::gang::{Gang, Next, Ready, Roster, Seat, Secret, next};
use agent_model::protocol::orders::Desired;
use agent_model::{Code, Fault};
use agent_runtime::env::EnvLease;
use tracing::info;

use super::{End, Runner, Step, or_end};
use crate::worker::launch::gang::{Seating, ports_of};
use crate::worker::rendezvous::{self, Reservation};

impl Runner {
    /// Waits for the go of this rank's gang; returns where all its ranks are. `None` for a job that has no other
    /// process.
    pub(super) async fn muster(&mut self, environment: &EnvLease) -> Step<Option<Seating>> {
        let (spec, replica) = (self.record.spec.clone(), self.record.replica.clone());
        let (count, usual) = (ports_of(&spec), self.view.borrow().detail.clone());
        if spec.resources.nodes == 1 {
            return match spec.distribution {
                None => Continue(None),
                Some(_) => self.sit_alone(count).map_continue(Some),
            };
        }
        let wanted =
            self.told_of_gang().and_then(|gang| gang.go.and(gang.roster.seat(replica.rank).cloned()));
        let settings = &self.worker.config.gangs;
        let outward = rendezvous::outward(&self.worker.config.controller).await;
        let place = wanted.as_ref().map(|seat| &seat.place);
        let reservation = or_end(Reservation::make(settings, outward, &replica, count, place))?;
        let secret = if replica.rank == 0 { self.secret_of_gang() } else { Secret::default() };
        let place = reservation.place.clone();
        info!(%replica, ?place, "could start");
        self.tell_ready(Ready { place, environment: contents_of(environment), secret, met: 0 });
        let gang = tokio::select! {
            gang = self.await_go(&reservation) => gang?,
            never = reservation.greet(&replica) => match never {},
        };
        self.say(&usual);
        let Reservation { interface, .. } = reservation;
        Continue(Some(Seating { rank: replica.rank, roster: gang.roster, secret: gang.secret, interface }))
    }

    /// The seating of a job on a single node whose processes must find each other.
    fn sit_alone(&self, count: u16) -> Step<Seating> {
        let Reservation { place, .. } =
            or_end(Reservation::alone(&self.worker.config.gangs, &self.record.replica, count))?;
        let node = self.worker.config.node_name.clone();
        let (roster, secret) = (Roster(vec![Seat { node, place }]), self.secret_of_gang());
        Continue(Seating { rank: 0, roster, secret, interface: String::new() })
    }

    /// The same after a restart of the daemon, and different for each attempt.
    fn secret_of_gang(&self) -> Secret {
        Secret::new(digest_of(format!("gang {}", self.record.token).as_bytes()).hex())
    }

    fn told_of_gang(&self) -> Option<Gang> {
        match &*self.desired.borrow() {
            Desired::Run { gang, .. } => gang.clone(),
            _ => None,
        }
    }

    /// Does the steps of the rank until the go of its gang.
    async fn await_go(&mut self, reservation: &Reservation) -> Step<Gang> {
        let rank = self.record.replica.rank;
        let mut desired = self.desired.clone();
        loop {
            if !desired.borrow_and_update().is_run() {
                return Break(End::Stopped);
            }
            let (gang, met) = (self.told_of_gang(), self.ready.as_ref().map_or(0, |ready| ready.met));
            let now = self.worker.clock.boot();
            match (next(gang.as_ref(), rank, &reservation.place, met, now), gang) {
                (Next::Start, Some(gang)) => return Continue(gang),
                (Next::Late, _) => return Break(End::Failed(self.late())),
                (Next::Moved, _) => {
                    let what = format!("rank {rank} could not have the ports again that the others know");
                    return Break(End::Failed(
                        Fault::new(Code::GangLate, what).fix("the next attempt gets others"),
                    ));
                }
                (Next::Meet, Some(gang)) => {
                    self.say("trying whether it reaches the other ranks");
                    let node = self.worker.config.node_name.to_string();
                    let meeting = rendezvous::meet(&gang.roster, &self.record.replica, &node);
                    let met = self.unless_stopped(meeting).await?;
                    or_end(met)?;
                    let digest = gang.roster.digest();
                    if let Some(ready) = self.ready.clone() {
                        self.tell_ready(Ready { met: digest, ..ready });
                    }
                    continue;
                }
                _ => self.say(if met == 0 {
                    "waiting for the other ranks"
                } else {
                    "waiting until all ranks go"
                }),
            }
            if self.unless_stopped(desired.changed()).await?.is_err() {
                std::future::pending::<()>().await; // there are no more orders: the daemon stops
            }
        }
    }

    /// The fault of a rank that had its go and did not start by its date.
    pub(super) fn late(&self) -> Fault {
        let what = format!("rank {} was told to go and could not start in time", self.record.replica.rank);
        Fault::new(Code::GangLate, what).fix("look at the log of agentd on the node")
    }

    fn tell_ready(&mut self, ready: Ready) {
        self.ready = Some(ready);
        self.view.send_modify(|view| view.ready.clone_from(&self.ready));
        self.changed.notify_one();
    }
}

/// A text that identifies the contents of an environment, as far as they are known, wherever it was built.
fn contents_of(environment: &EnvLease) -> String {
    if let Some(image) = environment.image() {
        return image.id.clone();
    }
    let text = environment.lock_file().and_then(|file| std::fs::read_to_string(file).ok());
    let Some(text) = text else { return String::new() };
    let mut packages: Vec<&str> = text.lines().map(|line| line.rsplit('/').next().unwrap_or(line)).collect();
    packages.sort_unstable();
    digest_of(packages.join("\n").as_bytes()).hex().to_owned()
}
