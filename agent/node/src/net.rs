//! The network interfaces of this machine, and which of their addresses other machines reach.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use sysinfo::Networks;

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The interface, for example `eth0`.
    pub name: String,
    /// The address.
    pub address: IpAddr,
    /// Length of its network prefix, in bits.
    pub bits: u8,
}

impl Interface {
    /// The network, `address/bits`.
    pub fn network(&self) -> String {
        let base = match self.address {
            IpAddr::V4(address) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.bits.min(32))).unwrap_or(0);
                IpAddr::from((u32::from(address) & mask).to_be_bytes())
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.bits.min(128))).unwrap_or(0);
                IpAddr::from((u128::from(address) & mask).to_be_bytes())
            }
        };
        format!("{base}/{}", self.bits)
    }

    /// It leads only to containers or virtual machines on this machine; every machine has such addresses.
    fn is_inner(&self) -> bool {
        const INNER: [&str; 7] = ["docker", "br-", "veth", "virbr", "cni", "flannel", "podman"];
        INNER.iter().any(|prefix| self.name.starts_with(prefix))
    }
}

/// Every address of this machine, in the order of the interfaces' names.
pub fn interfaces() -> Vec<Interface> {
    let Ok(networks) = Networks::new_with_refreshed_list() else { return Vec::new() };
    let mut found: Vec<Interface> = networks
        .iter()
        .flat_map(|(name, data)| {
            let of = move |ip: &sysinfo::IpNetwork| Interface {
                name: name.to_string_lossy().into_owned(),
                address: ip.addr,
                bits: ip.prefix,
            };
            data.ip_networks().iter().map(of)
        })
        .collect();
    found.sort_by(|a, b| (&a.name, a.address).cmp(&(&b.name, b.address)));
    found
}

/// The source address towards the first of these, or else towards others in general: nothing is sent to find it.
pub fn outward(to: &[SocketAddr]) -> Option<IpAddr> {
    // An address that nobody has; packets to all but the local networks take the same route.
    const NOBODY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);
    let from = |to: &SocketAddr| {
        let any =
            if to.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(to).ok()?;
        // A loopback address says nothing about how others reach this machine.
        Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified() && !ip.is_loopback())
    };
    to.iter().chain([&NOBODY]).find_map(from)
}

/// The interface that other machines reach best: the one with the address `outward`, or else any that leads out of
/// the machine, IPv4 before IPv6. `None` if there is no such one.
pub fn reachable(interfaces: &[Interface], outward: Option<IpAddr>) -> Option<&Interface> {
    let leads_out = |interface: &&Interface| {
        let local = match interface.address {
            IpAddr::V4(address) => address.is_link_local(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        !interface.address.is_loopback() && !local && !interface.is_inner()
    };
    let outer = || interfaces.iter().filter(leads_out);
    outer()
        .find(|interface| Some(interface.address) == outward)
        .or_else(|| outer().find(|interface| interface.address.is_ipv4()))
        .or_else(|| outer().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(name: &str, address: &str, bits: u8) -> Interface {
        Interface { name: name.into(), address: address.parse().unwrap(), bits }
    }

    #[test]
    fn test_networks_are_told_by_their_first_address() {
        assert_eq!(on("eth0", "10.77.3.9", 22).network(), "10.77.0.0/22");
        assert_eq!(on("eth0", "10.77.3.9", 32).network(), "10.77.3.9/32");
        assert_eq!(on("x", "1.2.3.4", 0).network(), "0.0.0.0/0");
        assert_eq!(on("eth0", "fd00::12", 64).network(), "fd00::/64");
    }

    #[test]
    fn test_addresses_that_every_machine_has_are_not_reachable() {
        let loopback = on("lo", "127.0.0.1", 8);
        let docker = on("docker0", "172.17.0.1", 16);
        let [first, second] = [on("ens1", "10.0.0.2", 24), on("ens2", "192.168.0.2", 24)];
        let link = on("ens1", "fe80::1", 64);
        let all = [loopback.clone(), docker.clone(), link.clone(), first.clone(), second.clone()];
        assert_eq!(reachable(&all, Some(second.address)), Some(&second));
        assert_eq!(reachable(&all, None), Some(&first));
        assert_eq!(reachable(&all, Some(docker.address)), Some(&first), "whatever the routes say");
        assert_eq!(reachable(&[loopback, docker, link], None), None);
        let far = on("ens1", "fd00::2", 64);
        assert_eq!(reachable(std::slice::from_ref(&far), None), Some(&far));
    }

    #[test]
    fn test_a_place_on_this_machine_says_nothing_of_others() {
        let here = SocketAddr::from(([127, 0, 0, 1], 9));
        assert_eq!(outward(&[here]), outward(&[]));
        assert!(outward(&[here]).is_none_or(|address| !address.is_loopback()));
    }

    #[test]
    fn test_this_machine_has_a_loopback() {
        assert!(interfaces().iter().any(|interface| interface.address.is_loopback() && interface.bits == 8));
    }
}
