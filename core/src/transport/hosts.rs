//! How the hosts of a job find and reach each other for the alert ([`super::alert`]): the first rank of each listens, and
//! connects with those of the hosts 1, 2, 4, ... before and after its own. Who connects, and who answers, must know the
//! job's key, a random number that the ranks told each other through MPI.
//! Thread rule: used by the thread that brings the job up.

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::private::Private;
use crate::error::{Error, Result};
use crate::say::say;

/// How long hosts have to connect to each other.
const PATIENCE: Duration = Duration::from_secs(20);

/// The first rank of a host.
#[derive(Debug, Clone)]
pub struct HostAddress {
    /// The name of the rank there, for messages.
    pub name: String,
    /// Where it listens.
    pub addresses: Vec<SocketAddr>,
}

/// What the first rank of a host has to offer before it knows the others.
pub struct Listener {
    pub(super) socket: TcpListener,
    addresses: Vec<IpAddr>,
}

impl Listener {
    /// Listens on the addresses of interface `network`, of all interfaces when it is empty.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such interface; [`Error::System`].
    pub fn open(network: &str) -> Result<Listener> {
        let all = if_addrs::get_if_addrs().map_err(|error| Error::system("listing the network interfaces", error))?;
        let mut addresses: Vec<IpAddr> = all
            .iter()
            .filter(|interface| if network.is_empty() { !interface.is_loopback() } else { interface.name == network })
            .map(if_addrs::Interface::ip)
            // A link-local address needs its interface beside it.
            .filter(|address| !matches!(address, IpAddr::V6(address) if address.is_unicast_link_local()))
            .collect();
        if addresses.is_empty() {
            if !network.is_empty() {
                let names: HashSet<&str> = all.iter().map(|interface| interface.name.as_str()).collect();
                let mut names: Vec<&str> = names.into_iter().collect();
                names.sort_unstable();
                return Err(Error::Invalid(format!(
                    "DL_COMM_NETWORK is '{network}', which is no interface with an address; there are {}",
                    names.join(", ")
                )));
            }
            addresses = all.iter().map(if_addrs::Interface::ip).collect();
        }
        addresses.sort_by_key(IpAddr::is_ipv6);
        // One socket for both families where the system has both.
        let socket = TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0"));
        let socket = socket.map_err(|error| Error::system("listening for other hosts", error))?;
        Ok(Listener { socket, addresses })
    }

    /// Where it can be reached, separated by commas.
    pub fn address(&self) -> String {
        let port = self.socket.local_addr().map_or(0, |address| address.port());
        let words = self.addresses.iter().map(|&address| SocketAddr::new(address, port).to_string());
        words.collect::<Vec<_>>().join(",")
    }
}

/// The hosts that host `me` of `count` is connected with.
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

/// A connection to another host.
pub(super) struct Peer {
    /// The rank there, for messages.
    pub name: String,
    pub stream: Private,
    /// What has come of a line.
    pub partial: Vec<u8>,
}

/// Connects to the neighbours with higher numbers, and takes the connections of those with lower ones.
pub(super) fn connect(listener: &Listener, me: usize, hosts: &[HostAddress], key: u128) -> Vec<Peer> {
    let until = Instant::now() + PATIENCE;
    let (below, above): (Vec<usize>, Vec<usize>) = neighbours(me, hosts.len()).into_iter().partition(|&host| host < me);
    let mut peers = Vec::new();
    let mut called = Vec::new();
    for host in above {
        match call(&hosts[host], me, key, until) {
            Ok(stream) => called.push((host, stream)),
            Err(error) => unwatched(&hosts[host].name, &error),
        }
    }
    let mut missing: HashSet<usize> = below.into_iter().collect();
    while !missing.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        match take(listener, key, left) {
            Ok(Some((host, stream))) if missing.remove(&host) => peers.extend(ready(stream, &hosts[host].name)),
            // Somebody who is not of this job, or is not expected.
            Ok(_) => {}
            Err(error) => {
                missing.iter().for_each(|&host| unwatched(&hosts[host].name, &error));
                break;
            }
        }
    }
    // Now that nobody waits for this host.
    for (host, mut stream) in called {
        match answered(&mut stream, key, until) {
            Ok(()) => peers.extend(ready(stream, &hosts[host].name)),
            Err(error) => unwatched(&hosts[host].name, &error),
        }
    }
    peers
}

/// Whether who took the call knows the key too: else it is somebody else who listens at that address.
fn answered(stream: &mut TcpStream, key: u128, until: Instant) -> std::io::Result<()> {
    let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.set_read_timeout(Some(left))?;
    let mut answer = [0; 16];
    stream.read_exact(&mut answer)?;
    if answer == (!key).to_le_bytes() { Ok(()) } else { Err(ErrorKind::InvalidData.into()) }
}

fn unwatched(name: &str, error: &std::io::Error) {
    say(&format!(
        "no connection with {name} ({error}; DL_COMM_NETWORK chooses the interface): its end may be noticed at the deadline \
         only"
    ));
}

/// Calls `host` until it answers.
fn call(host: &HostAddress, me: usize, key: u128, until: Instant) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(ErrorKind::AddrNotAvailable, "it has no address");
    loop {
        for address in &host.addresses {
            match TcpStream::connect_timeout(address, Duration::from_secs(2)) {
                Ok(mut stream) => {
                    let mut hello = key.to_le_bytes().to_vec();
                    hello.extend((me as u64).to_le_bytes());
                    match stream.write_all(&hello) {
                        Ok(()) => return Ok(stream),
                        Err(error) => last = error,
                    }
                }
                Err(error) => last = error,
            }
        }
        if Instant::now() >= until {
            return Err(last);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The next connection within `left`, and the host that it says it comes from, if it knows the key.
fn take(listener: &Listener, key: u128, left: Duration) -> std::io::Result<Option<(usize, TcpStream)>> {
    let timeout = rustix::time::Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
    match poll(&mut [PollFd::new(&listener.socket, PollFlags::IN)], Some(&timeout)) {
        Ok(0) => return Err(ErrorKind::TimedOut.into()),
        // A signal: there is time left to look again.
        Err(Errno::INTR) => return Ok(None),
        ready => drop(ready?),
    }
    let (mut stream, _) = listener.socket.accept()?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut hello = [0; 24];
    if stream.read_exact(&mut hello).is_err() || hello[..16] != key.to_le_bytes() {
        return Ok(None);
    }
    if stream.write_all(&(!key).to_le_bytes()).is_err() {
        return Ok(None);
    }
    let mut host = [0; 8];
    host.copy_from_slice(&hello[16..]);
    Ok(Some((usize::try_from(u64::from_le_bytes(host)).unwrap_or(usize::MAX), stream)))
}

/// A connection as the thread uses it.
fn ready(stream: TcpStream, name: &str) -> Option<Peer> {
    let set = || -> std::io::Result<()> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, Duration::from_secs(2))?;
        sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(1))?;
        sockopt::set_tcp_keepcnt(&stream, 3)?;
        sockopt::set_tcp_user_timeout(&stream, 5000)?;
        Ok(())
    };
    match set() {
        Ok(()) => Some(Peer { name: name.to_owned(), stream: Private::new(stream), partial: Vec::new() }),
        Err(error) => {
            unwatched(name, &error);
            None
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn neighbours_are_mutual_and_reach_everybody() {
        for count in 1..40 {
            for me in 0..count {
                let near = neighbours(me, count);
                assert!(!near.contains(&me));
                assert!(near.iter().all(|&host| neighbours(host, count).contains(&me)), "{me} of {count}");
            }
        }
        assert_eq!(neighbours(0, 8), [1, 2, 4, 6, 7]);
    }

    #[test]
    fn a_signal_does_not_end_the_wait_for_other_hosts() {
        let handler = signal_hook::flag::register(signal_hook::consts::SIGUSR2, Arc::default()).unwrap();
        let listener = Listener::open("").unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(move || {
                // SAFETY: always successful.
                sender.send(unsafe { libc::pthread_self() }).unwrap();
                take(&listener, 7, Duration::from_secs(20))
            });
            let thread = receiver.recv().unwrap();
            while !waiter.is_finished() {
                // SAFETY: the thread is not joined yet.
                unsafe { libc::pthread_kill(thread, libc::SIGUSR2) };
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(waiter.join().unwrap().unwrap().is_none());
        });
        signal_hook::low_level::unregister(handler);
    }

    #[test]
    fn a_stranger_is_not_heard() {
        let listener = Listener::open("").unwrap();
        let address: SocketAddr = listener.address().split(',').next().unwrap().parse().unwrap();
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(&[1; 24]).unwrap();
        assert!(take(&listener, 7, Duration::from_secs(5)).unwrap().is_none());
        assert!(matches!(Listener::open("no-such-interface"), Err(Error::Invalid(text)) if text.contains("lo")));
    }
}
