//! The first bytes of a connection between hosts: the job's key, and the number of the host that calls. Anybody may connect,
//! so connections that have not said the key are read side by side, are few, and are closed when they get old.
//!
//! Thread rule: used by one thread.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

/// How long a connection may take to say who it is: a host of the job does it at once.
const MAX_HELLO_AGE: Duration = Duration::from_secs(2);
/// How many connections may be about to; the oldest gives way to a new one.
const MAX_PENDING: usize = 64;
/// How long to wait when the system has no descriptor for a connection.
const RETRY: Duration = Duration::from_millis(50);

/// What a host sends first.
pub fn hello(key: u128, host: usize) -> [u8; Hello::LEN] {
    let mut bytes = [0; Hello::LEN];
    bytes[..16].copy_from_slice(&key.to_le_bytes());
    bytes[16..].copy_from_slice(&(host as u64).to_le_bytes());
    bytes
}

/// What has come of a [`hello`].
#[derive(Debug, Default)]
pub struct Hello {
    bytes: [u8; Hello::LEN],
    got: usize,
}

/// Who a connection is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// It has not said enough.
    Unknown,
    /// Not of this job.
    Stranger,
    /// Host so and so, it says.
    Host(usize),
}

impl Hello {
    /// Its bytes.
    pub const LEN: usize = 24;

    /// Where the next bytes go.
    pub fn rest(&mut self) -> &mut [u8] {
        &mut self.bytes[self.got..]
    }

    /// Takes the first `count` bytes of [`Hello::rest`].
    pub fn take(&mut self, count: usize, key: u128) -> Caller {
        self.got = (self.got + count).min(Hello::LEN);
        if self.got < Hello::LEN {
            return Caller::Unknown;
        }
        let (mut theirs, mut host) = ([0; 16], [0; 8]);
        theirs.copy_from_slice(&self.bytes[..16]);
        host.copy_from_slice(&self.bytes[16..]);
        // All of it at once: how long it takes tells nothing of the key.
        if u128::from_le_bytes(theirs) ^ key != 0 {
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

/// Connections that have not said who they are.
#[derive(Default)]
pub struct PendingConnections(Vec<Connection>);

impl PendingConnections {
    /// Waits until `until` for a connection of this job; the host that it says it comes from. It is answered.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`]; those of the system.
    pub fn next(&mut self, listening: &[TcpListener], key: u128, until: Instant) -> io::Result<(usize, TcpStream)> {
        for socket in listening {
            socket.set_nonblocking(true)?;
        }
        loop {
            let now = Instant::now();
            if now >= until {
                return Err(ErrorKind::TimedOut.into());
            }
            self.0.retain(|connection| now.duration_since(connection.since) < MAX_HELLO_AGE);
            let (new, ready) = self.poll(listening, until.duration_since(now).min(MAX_HELLO_AGE))?;
            // Those that came first are read first: to accept a new one may close an old one.
            let mut place = 0;
            for ready in ready {
                match if ready { self.read(place, key) } else { Caller::Unknown } {
                    Caller::Unknown => place += 1,
                    Caller::Stranger => drop(self.0.remove(place)),
                    Caller::Host(host) => {
                        let mut stream = self.0.remove(place).stream;
                        stream.set_nonblocking(false)?;
                        if stream.write_all(&(!key).to_le_bytes()).is_ok() {
                            return Ok((host, stream));
                        }
                    }
                }
            }
            for (socket, _) in listening.iter().zip(new).filter(|(_, new)| *new) {
                self.accept(socket);
            }
        }
    }

    /// Which sockets have a new connection, and which connections something to read, within `left`.
    fn poll(&self, listening: &[TcpListener], left: Duration) -> io::Result<(Vec<bool>, Vec<bool>)> {
        let timeout = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let mut polled: Vec<PollFd<'_>> = listening.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        polled.extend(self.0.iter().map(|connection| PollFd::new(&connection.stream, PollFlags::IN)));
        match poll(&mut polled, Some(&timeout)) {
            // A signal: there is time left to look again.
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        let connections = ready.split_off(listening.len());
        Ok((ready, connections))
    }

    fn accept(&mut self, socket: &TcpListener) {
        match socket.accept() {
            Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                if self.0.len() == MAX_PENDING {
                    self.0.remove(0);
                }
                self.0.push(Connection { stream, since: Instant::now(), hello: Hello::default() });
            }
            // It is gone again.
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {}
            // No descriptor: one of these has taken it, or it will be given back.
            Err(_) if self.0.is_empty() => thread::sleep(RETRY),
            Err(_) => drop(self.0.remove(0)),
        }
    }

    fn read(&mut self, place: usize, key: u128) -> Caller {
        let Connection { stream, hello, .. } = &mut self.0[place];
        match stream.read(hello.rest()) {
            Ok(0) => Caller::Stranger,
            Ok(count) => hello.take(count, key),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Caller::Unknown,
            Err(_) => Caller::Stranger,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Arc;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn call(listener: &TcpListener) -> TcpStream {
        TcpStream::connect(listener.local_addr().unwrap()).unwrap()
    }

    #[test]
    fn strangers_do_not_hold_a_host_up() {
        let listening = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        // More than may wait, silent ones, slow ones and those that guess, before a host and after.
        let strangers: Vec<TcpStream> = (0..3 * MAX_PENDING)
            .map(|number| {
                let mut stranger = call(&listening[number % 2]);
                stranger.write_all(&hello(8, 1)[..number % 3 * 12]).unwrap();
                stranger
            })
            .collect();
        let mut mine = call(&listening[1]);
        mine.write_all(&hello(7, 5)).unwrap();
        let late = call(&listening[0]);
        let mut unknown = PendingConnections::default();
        let started = Instant::now();
        let (host, mut stream) = unknown.next(&listening, 7, soon()).unwrap();
        assert!(started.elapsed() < MAX_HELLO_AGE * 10, "not as long as the strangers, one after the other");
        stream.write_all(b"x").unwrap();
        let mut answer = [0; 17];
        mine.read_exact(&mut answer).unwrap();
        assert_eq!((host, &answer[..16], answer[16]), (5, &(!7u128).to_le_bytes()[..], b'x'));
        let end = unknown.next(&listening, 7, Instant::now() + Duration::from_millis(50)).map(drop).unwrap_err();
        assert_eq!(end.kind(), ErrorKind::TimedOut);
        drop((strangers, late));
    }

    #[test]
    fn one_that_is_cut_into_pieces_is_heard() {
        let listening = [TcpListener::bind("127.0.0.1:0").unwrap()];
        let mut mine = call(&listening[0]);
        thread::scope(|scope| {
            scope.spawn(move || {
                for byte in hello(7, 3) {
                    mine.write_all(&[byte]).unwrap();
                    thread::sleep(Duration::from_millis(5));
                }
                mine.read_exact(&mut [0; 16]).unwrap();
            });
            assert_eq!(PendingConnections::default().next(&listening, 7, soon()).unwrap().0, 3);
        });
    }

    #[test]
    fn a_signal_does_not_end_the_wait() {
        let handler = signal_hook::flag::register(signal_hook::consts::SIGUSR2, Arc::default()).unwrap();
        let listening = [TcpListener::bind("127.0.0.1:0").unwrap()];
        let address = listening[0].local_addr().unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        thread::scope(|scope| {
            let waiter = scope.spawn(move || {
                // SAFETY: always successful.
                sender.send(unsafe { libc::pthread_self() }).unwrap();
                PendingConnections::default().next(&listening, 7, soon()).map(|(host, _)| host)
            });
            let thread_id = receiver.recv().unwrap();
            for _ in 0..20 {
                // SAFETY: the thread waits for the connection below.
                unsafe { libc::pthread_kill(thread_id, libc::SIGUSR2) };
                thread::sleep(Duration::from_millis(5));
            }
            let mut mine = TcpStream::connect(address).unwrap();
            mine.write_all(&hello(7, 2)).unwrap();
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
