//! The handshake of a connection between processes of a job: the job's key and the number of the calling host or rank.
//! Any program may connect, so unauthenticated connections are read concurrently, limited in number, and closed after a timeout.
//!
//! Thread rule: used by one thread.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Deref;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::time::Timespec;

use super::peer_user::{listener_user, own_user, peer_user};
use crate::log::log_line;

/// Time limit for the handshake of a connection; hosts of the job send it at once.
const MAX_HELLO_AGE: Duration = Duration::from_secs(2);
/// Maximum number of unauthenticated connections; a new one replaces the oldest.
const MAX_PENDING: usize = 64;
/// Delay when no file descriptor is available for a new connection.
const RETRY: Duration = Duration::from_millis(50);

/// The handshake that a calling host sends.
pub fn hello(key: u128, host: usize) -> [u8; Hello::LEN] {
    let mut bytes = [0; Hello::LEN];
    bytes[..16].copy_from_slice(&key.to_le_bytes());
    bytes[16..].copy_from_slice(&(host as u64).to_le_bytes());
    bytes
}

/// The received part of a [`hello`].
#[derive(Debug, Default)]
pub struct Hello {
    bytes: [u8; Hello::LEN],
    received: usize,
}

/// The origin of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// The handshake is incomplete.
    Unknown,
    /// The key is wrong.
    Stranger,
    /// This host, by its own statement.
    Host(usize),
}

impl Hello {
    /// Length of the handshake in bytes.
    pub const LEN: usize = 24;

    /// The buffer for the next bytes.
    pub fn rest(&mut self) -> &mut [u8] {
        &mut self.bytes[self.received..]
    }

    /// Accepts `count` bytes that were read into [`Hello::rest`].
    pub fn take(&mut self, count: usize, key: u128) -> Caller {
        self.received = (self.received + count).min(Hello::LEN);
        if self.received < Hello::LEN {
            return Caller::Unknown;
        }
        let (mut received_key, mut host) = ([0; 16], [0; 8]);
        received_key.copy_from_slice(&self.bytes[..16]);
        host.copy_from_slice(&self.bytes[16..]);
        // Compares the whole key at once: the duration reveals nothing about the key.
        if u128::from_le_bytes(received_key) ^ key != 0 {
            return Caller::Stranger;
        }
        Caller::Host(usize::try_from(u64::from_le_bytes(host)).unwrap_or(usize::MAX))
    }
}

struct Connection {
    stream: TcpStream,
    since: Instant,
    hello: Hello,
}

/// Who may be a process of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Whoever knows the job's key.
    Key(u128),
    /// There is no key: the processes of this user, on this host.
    OwnUser,
}

impl Admission {
    /// The key in handshakes.
    pub fn key(self) -> u128 {
        match self {
            Admission::Key(key) => key,
            Admission::OwnUser => 0,
        }
    }

    /// Checks the program that has connected, as far as that is possible before its handshake.
    ///
    /// # Errors
    /// [`ErrorKind::PermissionDenied`] with the other user; [`ErrorKind::NotConnected`] if it has gone.
    pub fn check_caller(self, stream: &TcpStream) -> io::Result<()> {
        self.check(|| peer_user(stream))
    }

    /// As [`Admission::check_caller`], for the program that listens at the other end.
    ///
    /// # Errors
    /// As there.
    pub fn check_listener(self, stream: &TcpStream) -> io::Result<()> {
        self.check(|| listener_user(stream))
    }

    fn check(self, user: impl FnOnce() -> io::Result<Option<u32>>) -> io::Result<()> {
        if self != Admission::OwnUser {
            return Ok(());
        }
        let whose = match user() {
            Ok(Some(user)) if user == own_user() => return Ok(()),
            Ok(Some(user)) => format!("a program of user {user}"),
            // It may have been one of this user: rank 0 of an earlier job, which ends.
            Ok(None) => {
                let text = "no program is listed there: it has just ended, or the kernel lists none, which needs \
                            DL_COMM_JOB_KEY";
                return Err(io::Error::new(ErrorKind::NotConnected, text));
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied => format!("a program of unknown user ({error})"),
            Err(error) => return Err(error),
        };
        Err(io::Error::new(
            ErrorKind::PermissionDenied,
            format!("{whose} is there, and not one of this process's user {}; set DL_COMM_JOB_KEY", own_user()),
        ))
    }
}

/// Connections with incomplete handshakes.
pub struct PendingConnections {
    connections: Vec<Connection>,
    admission: Admission,
}

impl PendingConnections {
    /// None yet.
    pub fn new(admission: Admission) -> PendingConnections {
        PendingConnections { connections: Vec::new(), admission }
    }

    /// Waits until `until` for a connection of this job and answers it. Returns the host that it comes from.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`]; system errors.
    pub fn next(&mut self, listeners: &[TcpListener], until: Instant) -> io::Result<(usize, TcpStream)> {
        let listeners: Vec<&TcpListener> = listeners.iter().collect();
        listeners.iter().try_for_each(|socket| socket.set_nonblocking(true))?;
        loop {
            let now = Instant::now();
            if now >= until {
                return Err(ErrorKind::TimedOut.into());
            }
            let limit = until.duration_since(now).min(MAX_HELLO_AGE);
            let mut polled: Vec<PollFd<'_>> = self.sockets(&listeners).collect();
            poll_until(&mut polled, Some(limit))?;
            let ready = readiness(&polled);
            if let Some(found) = self.advance(&listeners, &ready)? {
                return Ok(found);
            }
        }
    }

    /// The sockets to poll: the listening ones, then the connections.
    pub fn sockets<'a, L: Deref<Target = TcpListener>>(
        &'a self,
        listeners: &'a [L],
    ) -> impl Iterator<Item = PollFd<'a>> {
        let connections = self.connections.iter().map(|connection| PollFd::new(&connection.stream, PollFlags::IN));
        listeners.iter().map(|socket| PollFd::new(&**socket, PollFlags::IN)).chain(connections)
    }

    /// How long a poll may last, because connections become too old; `None` without any.
    pub fn poll_limit(&self) -> Option<Duration> {
        (!self.connections.is_empty()).then_some(MAX_HELLO_AGE)
    }

    /// Accepts and reads what is `ready`, a flag for each of [`PendingConnections::sockets`]. Returns a connection of
    /// this job and its host.
    ///
    /// # Errors
    /// System errors.
    pub fn advance<L: Deref<Target = TcpListener>>(
        &mut self,
        listeners: &[L],
        ready: &[bool],
    ) -> io::Result<Option<(usize, TcpStream)>> {
        let (new, ready) = ready.split_at(listeners.len());
        let key = self.admission.key();
        // Read old connections first: accepting a new one may close an old one.
        let mut index = 0;
        for &ready in ready {
            match if ready { self.read(index, key) } else { Caller::Unknown } {
                Caller::Unknown => index += 1,
                Caller::Stranger => drop(self.connections.remove(index)),
                Caller::Host(host) => {
                    let mut stream = self.connections.remove(index).stream;
                    stream.set_nonblocking(false)?;
                    if stream.write_all(&(!key).to_le_bytes()).is_ok() {
                        return Ok(Some((host, stream)));
                    }
                }
            }
        }
        self.connections.retain(|connection| connection.since.elapsed() < MAX_HELLO_AGE);
        for (socket, _) in listeners.iter().zip(new).filter(|(_, new)| **new) {
            self.accept(socket);
        }
        Ok(None)
    }

    fn accept(&mut self, socket: &TcpListener) {
        match socket.accept() {
            Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                match self.admission.check_caller(&stream) {
                    Ok(()) => {}
                    // It has gone, or it finds nobody here either, and says so.
                    Err(gone) if gone.kind() == ErrorKind::NotConnected => return,
                    Err(refusal) => return log_line(&format!("refused a connection: {refusal}")),
                }
                if self.connections.len() == MAX_PENDING {
                    self.connections.remove(0);
                }
                self.connections.push(Connection { stream, since: Instant::now(), hello: Hello::default() });
            }
            // Already closed.
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {}
            // No descriptor left: free one, or wait until one is free.
            Err(_) if self.connections.is_empty() => thread::sleep(RETRY),
            Err(_) => drop(self.connections.remove(0)),
        }
    }

    fn read(&mut self, index: usize, key: u128) -> Caller {
        let Connection { stream, hello, .. } = &mut self.connections[index];
        match stream.read(hello.rest()) {
            Ok(0) => Caller::Stranger,
            Ok(count) => hello.take(count, key),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Caller::Unknown,
            Err(_) => Caller::Stranger,
        }
    }
}

/// As poll(2), for at most `limit`. A signal ends the wait.
///
/// # Errors
/// System errors.
pub fn poll_until(polled: &mut [PollFd<'_>], limit: Option<Duration>) -> io::Result<()> {
    let limit =
        limit.map(|limit| Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() });
    match poll(polled, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether each socket has an event.
pub fn readiness(polled: &[PollFd<'_>]) -> Vec<bool> {
    polled.iter().map(|polled| !polled.revents().is_empty()).collect()
}

/// Checks that the other end knows the key: another program may listen at that address.
///
/// # Errors
/// [`ErrorKind::InvalidData`]; system errors; [`ErrorKind::WouldBlock`] after `until`.
pub fn verify_key(stream: &mut TcpStream, key: u128, until: Instant) -> io::Result<()> {
    let remaining = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.set_read_timeout(Some(remaining))?;
    let mut answer = [0; 16];
    stream.read_exact(&mut answer)?;
    if answer == (!key).to_le_bytes() { Ok(()) } else { Err(ErrorKind::InvalidData.into()) }
}

/// Sets the options of a connection that stays: non-blocking, no delay, keepalive.
///
/// # Errors
/// System errors.
pub fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    sockopt::set_tcp_user_timeout(stream, 5000)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Arc;

    fn deadline() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn pending() -> PendingConnections {
        PendingConnections::new(Admission::Key(7))
    }

    fn dial(listener: &TcpListener) -> TcpStream {
        TcpStream::connect(listener.local_addr().unwrap()).unwrap()
    }

    #[test]
    fn strangers_do_not_delay_a_host() {
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        // More than the limit: silent, slow and guessing connections, before and after the host.
        let strangers: Vec<TcpStream> = (0..3 * MAX_PENDING)
            .map(|number| {
                let mut stranger = dial(&listeners[number % 2]);
                stranger.write_all(&hello(8, 1)[..number % 3 * 12]).unwrap();
                stranger
            })
            .collect();
        let mut peer = dial(&listeners[1]);
        peer.write_all(&hello(7, 5)).unwrap();
        let silent = dial(&listeners[0]);
        let mut pending = pending();
        let started = Instant::now();
        let (host, mut stream) = pending.next(&listeners, deadline()).unwrap();
        assert!(started.elapsed() < MAX_HELLO_AGE * 10, "not as long as the strangers, one after the other");
        stream.write_all(b"x").unwrap();
        let mut answer = [0; 17];
        peer.read_exact(&mut answer).unwrap();
        assert_eq!((host, &answer[..16], answer[16]), (5, &(!7u128).to_le_bytes()[..], b'x'));
        let end = pending.next(&listeners, Instant::now() + Duration::from_millis(50)).map(drop).unwrap_err();
        assert_eq!(end.kind(), ErrorKind::TimedOut);
        drop((strangers, silent));
    }

    #[test]
    fn a_listener_that_has_gone_is_of_no_other_user() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = dial(&listener);
        let (served, _) = listener.accept().unwrap();
        assert!(Admission::OwnUser.check_listener(&caller).is_ok() && Admission::OwnUser.check_caller(&served).is_ok());
        drop(listener);
        assert_eq!(Admission::OwnUser.check_listener(&caller).unwrap_err().kind(), ErrorKind::NotConnected);
        assert!(Admission::Key(7).check_listener(&caller).is_ok());
    }

    #[test]
    fn a_handshake_in_pieces_is_accepted() {
        let listeners = [TcpListener::bind("127.0.0.1:0").unwrap()];
        let mut peer = dial(&listeners[0]);
        thread::scope(|scope| {
            scope.spawn(move || {
                for byte in hello(7, 3) {
                    peer.write_all(&[byte]).unwrap();
                    thread::sleep(Duration::from_millis(5));
                }
                peer.read_exact(&mut [0; 16]).unwrap();
            });
            assert_eq!(pending().next(&listeners, deadline()).unwrap().0, 3);
        });
    }

    #[test]
    fn a_signal_does_not_end_the_wait() {
        let handler = signal_hook::flag::register(signal_hook::consts::SIGUSR2, Arc::default()).unwrap();
        let listeners = [TcpListener::bind("127.0.0.1:0").unwrap()];
        let address = listeners[0].local_addr().unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        thread::scope(|scope| {
            let waiter = scope.spawn(move || {
                // SAFETY: pthread_self always succeeds.
                sender.send(unsafe { libc::pthread_self() }).unwrap();
                pending().next(&listeners, deadline()).map(|(host, _)| host)
            });
            let thread_id = receiver.recv().unwrap();
            for _ in 0..20 {
                // SAFETY: the thread is alive: it waits for the connection below.
                unsafe { libc::pthread_kill(thread_id, libc::SIGUSR2) };
                thread::sleep(Duration::from_millis(5));
            }
            let mut peer = TcpStream::connect(address).unwrap();
            peer.write_all(&hello(7, 2)).unwrap();
            assert_eq!(waiter.join().unwrap().unwrap(), 2);
        });
        signal_hook::low_level::unregister(handler);
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces(key: u128, host: u32, other: [u8; Hello::LEN], mine: bool,
                                   cuts in prop::collection::vec(1usize..9, 24)) {
            let bytes = if mine { hello(key, host as usize) } else { other };
            let (mut read, mut from, mut cuts) = (Hello::default(), 0, cuts.into_iter());
            let found = loop {
                let count = cuts.next().unwrap().min(bytes.len() - from);
                read.rest()[..count].copy_from_slice(&bytes[from..from + count]);
                from += count;
                match read.take(count, key) {
                    Caller::Unknown => prop_assert!(from < bytes.len()),
                    known => break known,
                }
            };
            prop_assert_eq!(from, bytes.len());
            prop_assert_eq!(found == Caller::Host(host as usize), mine || other == hello(key, host as usize));
            prop_assert_eq!(found == Caller::Stranger, other[..16] != key.to_le_bytes() && !mine);
        }
    }
}
