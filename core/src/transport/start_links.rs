//! The connections between the first ranks of hosts while the network library starts. It waits for ever for a rank that
//! has ended; the end of that rank's connections shows it to the hosts that it is connected with
//! ([`super::detector_links`]).
//!
//! Thread rule: any thread.

use std::cell::Cell;
use std::io::{ErrorKind, Read, Write};
use std::sync::Mutex;
use std::time::Duration;

use super::detector_links::{HostAddress, HostConnection, Listener, Unconnected, connect};
use crate::lock::lock;

/// What a rank sends once the library has started: its end is none of the start any more.
const STARTED: &[u8] = b".";

/// See the module's documentation.
pub struct StartLinks {
    connections: Mutex<Vec<HostConnection>>,
    /// A rank that has ended while it connected.
    ended: Option<String>,
}

impl StartLinks {
    /// Connects host `me` with its neighbours among `hosts`. One that cannot be reached within this time is logged and
    /// skipped. It stops once `has_failed`, whether the start has failed, returns true. Collective over the hosts that
    /// have addresses.
    pub fn connect(
        listener: &Listener,
        me: usize,
        hosts: &[HostAddress],
        key: u128,
        within: Duration,
        has_failed: &dyn Fn() -> bool,
    ) -> StartLinks {
        let failed = Cell::new(false);
        let has_failed = || {
            failed.set(failed.get() || has_failed());
            failed.get()
        };
        let (connections, unconnected) = connect(listener, me, hosts, key, within, &has_failed);
        let (ended, unreachable): (Vec<_>, Vec<_>) = unconnected.into_iter().partition(Unconnected::has_ended);
        // After a failure, hosts are not waited for.
        unreachable.iter().filter(|_| !failed.get()).for_each(Unconnected::warn);
        let ended = ended.first().map(|rank| format!("{} has ended", rank.name));
        StartLinks { connections: Mutex::new(connections), ended }
    }

    /// Describes a rank that has ended before the library has started there.
    pub fn lost(&self) -> Option<String> {
        let mut connections = lock(&self.connections);
        let mut lost = self.ended.clone();
        connections.retain(|connection| match (&mut &*connection.stream).read(&mut [0; STARTED.len()]) {
            Ok(0) => {
                lost = Some(format!("{} has ended", connection.name));
                true
            }
            Ok(_) => false,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => true,
            Err(error) => {
                lost = Some(format!("the connection with {} has failed ({error})", connection.name));
                true
            }
        });
        lost
    }

    /// Tells the other ends that the library has started here.
    pub fn finish(&self) {
        for connection in lock(&self.connections).drain(..) {
            // An end that is gone needs no word.
            let _sent = (&mut &*connection.stream).write_all(STARTED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn the_end_of_a_rank_is_seen_but_not_that_of_a_start() {
        let listeners: Vec<Listener> = (0..3).map(|_| Listener::loopback().unwrap()).collect();
        let address = |listener: &Listener| listener.sockets[0].local_addr().unwrap();
        let host = |(rank, listener)| HostAddress {
            name: format!("rank {rank}"),
            ranks: vec![rank],
            addresses: vec![address(listener)],
        };
        let hosts: Vec<HostAddress> = listeners.iter().enumerate().map(host).collect();
        let mut links: Vec<StartLinks> = thread::scope(|scope| {
            let connect = |(me, listener)| {
                scope.spawn({
                    let hosts = &hosts;
                    move || StartLinks::connect(listener, me, hosts, 7, Duration::MAX, &|| false)
                })
            };
            let started: Vec<_> = listeners.iter().enumerate().map(connect).collect();
            started.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(links.iter().all(|links| links.lost().is_none()));
        let ended = links.pop().unwrap();
        links[1].finish();
        while links[0].connections.lock().unwrap().len() == 2 {
            assert_eq!(links[0].lost(), None);
        }
        drop(ended);
        let lost = loop {
            if let Some(lost) = links[0].lost() {
                break lost;
            }
        };
        assert!(lost.contains("rank 2"), "{lost}");
    }

    #[test]
    fn the_end_of_a_rank_that_connects_is_seen() {
        let [here, there] = [0; 2].map(|_| Listener::loopback().unwrap());
        let hosts = [&here, &there].map(|listener| HostAddress {
            name: "rank 1".to_owned(),
            ranks: vec![1],
            addresses: vec![listener.sockets[0].local_addr().unwrap()],
        });
        let links = thread::scope(|scope| {
            // It accepts the connection, and ends before it answers.
            scope.spawn(|| drop(there.sockets[0].accept().unwrap()));
            StartLinks::connect(&here, 0, &hosts, 7, Duration::MAX, &|| false)
        });
        assert_eq!(links.lost().as_deref(), Some("rank 1 has ended"));
    }
}
