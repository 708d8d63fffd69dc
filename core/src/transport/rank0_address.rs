//! The address of rank 0, where the ranks of a job without a launcher find each other.
//!
//! Thread rule: any thread.

use std::net::{SocketAddr, ToSocketAddrs};
use std::thread;
use std::time::Duration;

use super::wait_context::WaitContext;
use crate::config::Rendezvous;
use crate::error::{Error, Result};

/// Interval at which a rank looks up the address of rank 0.
const RESOLVE_INTERVAL: Duration = Duration::from_millis(500);

/// The addresses of rank 0. Waits until its name is known: a cluster may publish it when rank 0 has started.
pub(super) fn resolve(rendezvous: &Rendezvous, wait_ctx: &WaitContext<'_>) -> Result<Vec<SocketAddr>> {
    let address = &rendezvous.address;
    let addresses: Vec<SocketAddr> = loop {
        match address.to_socket_addrs() {
            Ok(found) => break found.collect(),
            Err(error) => {
                wait_ctx.check(Duration::ZERO, &|| format!("the address of rank 0, '{address}' ({error})"))?;
                thread::sleep(RESOLVE_INTERVAL);
            }
        }
    };
    if rendezvous.key.is_none() && !addresses.iter().all(|address| address.ip().is_loopback()) {
        let why = "other hosts can reach it, so all ranks need the same secret, DL_COMM_JOB_KEY or init(key=...)";
        return Err(unusable(address, why));
    }
    Ok(addresses)
}

/// The warning about a name of rank 0 whose `addresses` other hosts cannot reach, though they may find others for it.
pub(super) fn warning_of_loopback(address: &str, addresses: &[SocketAddr]) -> Option<String> {
    let (host, _) = address.rsplit_once(':')?;
    let is_meant = host == "localhost" || address.parse::<SocketAddr>().is_ok();
    let found: Vec<String> = addresses.iter().map(|address| address.ip().to_string()).collect();
    (!is_meant && addresses.iter().all(|address| address.ip().is_loopback())).then(|| {
        format!(
            "'{host}' is {} on this host (/etc/hosts), so only ranks of this host can connect to rank 0; for others, set \
             DL_COMM_ADDR to the IP address of this host",
            found.join(", ")
        )
    })
}

/// The error of an `address` that cannot be used.
pub(super) fn unusable(address: &str, why: &str) -> Error {
    Error::Invalid(format!("the address of rank 0 (DL_COMM_ADDR) is '{address}': {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_loopback_address_is_warned_about() {
        let warning = |address: &str, found: &[&str]| {
            let found: Vec<SocketAddr> = found.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 1)).collect();
            warning_of_loopback(address, &found)
        };
        let text = warning("node1:7000", &["127.0.1.1"]).unwrap();
        assert!(text.starts_with("'node1' is 127.0.1.1 on this host") && text.contains("DL_COMM_ADDR"), "{text}");
        for (address, found) in
            [("node1:7000", "10.0.0.1"), ("localhost:7000", "127.0.0.1"), ("127.0.0.1:1", "127.0.0.1")]
        {
            assert_eq!(warning(address, &[found]), None);
        }
    }
}
