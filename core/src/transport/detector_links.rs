//! The TCP connections of the failure detector ([`super::failure_detector`]). The first rank of each host listens, and
//! connects to the hosts at distance 1, 2, 4, ... before and after its own. Both ends must prove that they know the
//! job's key, a random number exchanged at start ([`super::hello`]).
//! Thread rule: used by the thread that starts the job.

use std::collections::HashSet;
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::close_on_fork::CloseOnForkStream;
use super::hello::{Admission, PendingConnections, configure, hello, verify_key};
use crate::error::{Error, Result};
use crate::log::log_line;

/// Time limit for all hosts to connect.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// How often a rank checks whether the start has failed, while hosts connect.
pub const FAILURE_CHECK: Duration = Duration::from_millis(500);

/// The most bytes of the addresses of a host.
const MAX_ADDRESS_BYTES: usize = 1000;

/// The failure detector's address on a host.
#[derive(Debug, Clone)]
pub struct HostAddress {
    /// The name of the host's first rank, for messages.
    pub name: String,
    /// Its ranks in the job.
    pub ranks: Vec<usize>,
    /// The addresses that it listens on.
    pub addresses: Vec<SocketAddr>,
}

/// The listening sockets of a host: one per address.
pub struct Listener {
    pub(super) sockets: Vec<TcpListener>,
}

impl Listener {
    /// Listens on the addresses of interface `network`, or of all interfaces if it is empty.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown interface; [`Error::System`].
    pub fn open(network: &str) -> Result<Listener> {
        let all = if_addrs::get_if_addrs().map_err(|error| Error::system("listing the network interfaces", error))?;
        let mut addresses: Vec<IpAddr> = all
            .iter()
            .filter(|interface| if network.is_empty() { !interface.is_loopback() } else { interface.name == network })
            .map(if_addrs::Interface::ip)
            // A link-local address is useless without its interface.
            .filter(|address| !matches!(address, IpAddr::V6(address) if address.is_unicast_link_local()))
            .collect();
        if addresses.is_empty() {
            if !network.is_empty() {
                let names: HashSet<&str> = all.iter().map(|interface| interface.name.as_str()).collect();
                let mut names: Vec<&str> = names.into_iter().collect();
                names.sort_unstable();
                return Err(Error::Invalid(format!(
                    "DL_COMM_SOCKET_IFNAME is '{network}', which is no interface with an address; there are {}",
                    names.join(", ")
                )));
            }
            addresses = all.iter().map(if_addrs::Interface::ip).collect();
        }
        addresses.sort_by_key(IpAddr::is_ipv6);
        // Bind to these addresses only, not to all. Binding may fail for single addresses that are not ready or not
        // bindable.
        let (mut sockets, mut refused) = (Vec::new(), None);
        for address in addresses {
            match TcpListener::bind((address, 0)) {
                Ok(socket) => sockets.push(socket),
                Err(error) => refused = Some(error),
            }
        }
        match refused {
            Some(error) if sockets.is_empty() => {
                Err(Error::system("listening for other hosts (DL_COMM_SOCKET_IFNAME chooses the interface)", error))
            }
            _ => Ok(Listener { sockets }),
        }
    }

    /// Listens on an address that only processes of this host reach.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn loopback() -> Result<Listener> {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let socket = socket.map_err(|error| Error::system("listening for other processes of this host", error))?;
        Ok(Listener { sockets: vec![socket] })
    }

    /// The addresses, separated by commas: as many as fit into a record of the start.
    pub fn address(&self) -> String {
        let mut addresses = String::new();
        for text in self.sockets.iter().filter_map(|socket| Some(socket.local_addr().ok()?.to_string())) {
            if addresses.len() + text.len() < MAX_ADDRESS_BYTES {
                addresses += if addresses.is_empty() { "" } else { "," };
                addresses += &text;
            }
        }
        addresses
    }
}

/// The hosts that host `me` of `count` connects to.
fn neighbours(me: usize, count: usize) -> Vec<usize> {
    let mut found: Vec<usize> = Vec::new();
    let mut distance = 1;
    while distance < count {
        found.extend([(me + distance) % count, (me + count - distance) % count]);
        distance *= 2;
    }
    found.sort_unstable();
    found.dedup();
    found
}

pub(super) struct HostConnection {
    /// The name of the first rank on that host, for messages.
    pub name: String,
    /// The ranks of that host in the job.
    pub ranks: Vec<usize>,
    pub stream: CloseOnForkStream,
    /// The received part of an incomplete line.
    pub partial: Vec<u8>,
    /// Data that the socket has not accepted yet.
    pub unsent: Vec<u8>,
}

/// A neighbour without a connection.
pub(super) struct Unconnected {
    /// The name of the first rank on that host, for messages.
    pub name: String,
    error: std::io::Error,
}

impl Unconnected {
    /// Whether the other end has closed the connection: it has ended.
    pub fn has_ended(&self) -> bool {
        use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        matches!(self.error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
    }

    pub fn warn(&self) {
        log_line(&format!(
            "no connection with {} ({}; DL_COMM_SOCKET_IFNAME chooses the interface): its end may be noticed at the deadline \
             only",
            self.name, self.error
        ));
    }
}

/// Connects to the neighbours with higher numbers, and accepts the connections of those with lower numbers.
/// Hosts without an address are skipped. `within`: the most time, at most [`CONNECT_TIMEOUT`]. It stops once
/// `has_failed`, which it calls from time to time, returns true.
pub(super) fn connect(
    listener: &Listener,
    me: usize,
    hosts: &[HostAddress],
    key: u128,
    within: Duration,
    has_failed: &dyn Fn() -> bool,
) -> (Vec<HostConnection>, Vec<Unconnected>) {
    let until = Instant::now() + within.min(CONNECT_TIMEOUT);
    let reachable = neighbours(me, hosts.len()).into_iter().filter(|&host| !hosts[host].addresses.is_empty());
    let (below, above): (Vec<usize>, Vec<usize>) = reachable.partition(|&host| host < me);
    let (mut dialed, mut connected, mut unconnected) = (Vec::new(), Vec::new(), Vec::new());
    let mut failed = |host: usize, error| unconnected.push(Unconnected { name: hosts[host].name.clone(), error });
    for host in above {
        match dial(&hosts[host], me, key, until, has_failed) {
            Ok(stream) => dialed.push((host, stream)),
            Err(error) => failed(host, error),
        }
    }
    let mut missing: HashSet<usize> = below.into_iter().collect();
    let mut pending = PendingConnections::new(Admission::Key(key));
    while !missing.is_empty() {
        let slice = until.min(Instant::now() + FAILURE_CHECK);
        match pending.next(&listener.sockets, slice) {
            Ok((host, stream)) if missing.remove(&host) => match connection(stream, &hosts[host]) {
                Ok(connection) => connected.push(connection),
                Err(error) => failed(host, error),
            },
            // Not a neighbour, or a duplicate connection.
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::TimedOut && slice < until && !has_failed() => {}
            Err(error) => {
                missing.iter().for_each(|&host| failed(host, std::io::Error::new(error.kind(), error.to_string())));
                break;
            }
        }
    }
    // Read the answers last, when no host waits for this one.
    for (host, mut stream) in dialed {
        match verify_key(&mut stream, key, until).and_then(|()| connection(stream, &hosts[host])) {
            Ok(connection) => connected.push(connection),
            Err(error) => failed(host, error),
        }
    }
    (connected, unconnected)
}

/// Connects to `host`, retrying until `until`, or until `has_failed` returns true.
fn dial(
    host: &HostAddress,
    me: usize,
    key: u128,
    until: Instant,
    has_failed: &dyn Fn() -> bool,
) -> std::io::Result<TcpStream> {
    let mut last_error = std::io::Error::new(ErrorKind::AddrNotAvailable, "it has no address");
    loop {
        for address in &host.addresses {
            match TcpStream::connect_timeout(address, Duration::from_secs(2)) {
                Ok(mut stream) => match stream.write_all(&hello(key, me)) {
                    Ok(()) => return Ok(stream),
                    Err(error) => last_error = error,
                },
                Err(error) => last_error = error,
            }
        }
        if Instant::now() >= until || has_failed() {
            return Err(last_error);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn connection(stream: TcpStream, host: &HostAddress) -> std::io::Result<HostConnection> {
    configure(&stream)?;
    Ok(HostConnection {
        name: host.name.clone(),
        ranks: host.ranks.clone(),
        stream: CloseOnForkStream::new(stream),
        partial: Vec::new(),
        unsent: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_symmetric_and_reach_all_hosts() {
        for count in 1..40 {
            for me in 0..count {
                let found = neighbours(me, count);
                assert!(!found.contains(&me));
                assert!(found.iter().all(|&host| neighbours(host, count).contains(&me)), "{me} of {count}");
            }
        }
        assert_eq!(neighbours(0, 8), [1, 2, 4, 6, 7]);
    }

    #[test]
    fn it_listens_on_the_given_interface() {
        let loopback = Listener::open("lo").unwrap();
        assert!(loopback.sockets.iter().all(|socket| socket.local_addr().unwrap().ip().is_loopback()));
        assert!(loopback.address().contains("127.0.0.1:"));
        let any = Listener::open("").unwrap();
        assert!(any.sockets.iter().all(|socket| !socket.local_addr().unwrap().ip().is_unspecified()));
        assert!(matches!(Listener::open("no-such-interface"), Err(Error::Invalid(text)) if text.contains("lo")));
    }
}
