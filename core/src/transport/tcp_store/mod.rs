//! A key-value store over TCP: a server in the process of rank 0, and a connection of every other process that uses it.
//!
//! Thread rule: any thread. The threads of a process share the connection: one of those that wait reads it for all.

mod server;
mod wire;

use std::collections::HashMap;
use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use self::server::Server;
use self::wire::{Frames, Reply, Request};
use super::close_on_fork::{CloseOnFork, CloseOnForkStream};
use super::hello::{Admission, configure, hello, poll_until, verify_key};
use super::store::{POLL_INTERVAL, Store};
use super::wait_context::WaitContext;
use crate::error::{Error, Result};
use crate::lock::lock;

/// Time limit of one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(2);
/// The first and the longest delay between attempts.
const RETRY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

/// The store in the process that serves it.
pub struct ServedStore(Server);

impl ServedStore {
    /// Serves up to `clients` clients of the job on `listeners`.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn start(listeners: Vec<TcpListener>, clients: usize, admission: Admission) -> Result<ServedStore> {
        Server::start(listeners, clients, admission).map(ServedStore)
    }
}

impl Store for ServedStore {
    fn set(&self, key: &str, value: &[u8], wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.0.memory().set(key, value, wait_ctx)?;
        self.0.wake();
        Ok(())
    }

    fn try_get(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<Option<Vec<u8>>> {
        self.0.memory().try_get(key, wait_ctx)
    }

    fn wait_for(&self, key: &str, wait_ctx: &WaitContext<'_>, awaited: &dyn Fn() -> String) -> Result<Vec<u8>> {
        self.0.memory().wait_for(key, wait_ctx, awaited)
    }

    fn add(&self, key: &str, by: i64, wait_ctx: &WaitContext<'_>) -> Result<i64> {
        let sum = self.0.memory().add(key, by, wait_ctx)?;
        self.0.wake();
        Ok(sum)
    }

    fn delete(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.0.memory().delete(key, wait_ctx)
    }
}

/// The store in another process.
pub struct TcpStore {
    addresses: Vec<SocketAddr>,
    admission: Admission,
    /// This process's rank.
    rank: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Made by the first request.
    stream: Option<Arc<CloseOnForkStream>>,
    frames: Frames,
    /// The requests that threads wait for, by number, and their answers.
    replies: HashMap<u64, Option<Reply>>,
    num_requests: u64,
    /// Whether a thread reads the connection.
    has_reader: bool,
    failure: Option<Error>,
}

impl TcpStore {
    /// The store that listens on one of `addresses`. Connects at the first use.
    pub fn new(addresses: Vec<SocketAddr>, admission: Admission, rank: usize) -> TcpStore {
        TcpStore { addresses, admission, rank, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Connects now; repeats that until the wait context ends.
    ///
    /// # Errors
    /// Those of the wait context.
    pub fn connect(&self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let mut delay = RETRY.0;
        loop {
            let Err(error) = self.dial() else { return Ok(()) };
            if error.kind() == ErrorKind::PermissionDenied {
                return Err(Error::Network(self.describe(&error)));
            }
            wait_ctx.check(Duration::ZERO, &|| format!("rank 0 ({})", self.describe(&error)))?;
            thread::sleep(delay);
            delay = (delay * 2).min(RETRY.1);
        }
    }

    /// The connection of a store that is known to be there.
    fn connected(&self, wait_ctx: &WaitContext<'_>) -> Result<MutexGuard<'_, State>> {
        loop {
            match self.dial() {
                Ok(state) => return Ok(state),
                // Many connect at once.
                Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
                    wait_ctx.check(Duration::ZERO, &server)?;
                }
                Err(error) => return Err(Error::Network(self.describe(&error))),
            }
        }
    }

    /// Connects, unless that is done.
    fn dial(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = lock(&self.state);
        if state.stream.is_some() {
            return Ok(state);
        }
        let mut refused = io::Error::from(ErrorKind::AddrNotAvailable);
        for address in &self.addresses {
            match self.dial_address(address) {
                Ok(stream) => {
                    state.stream = Some(Arc::new(CloseOnFork::new(stream)));
                    return Ok(state);
                }
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    /// Why there is no connection.
    fn describe(&self, error: &io::Error) -> String {
        let why = match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => "it does not accept the key of the job".to_owned(),
            ErrorKind::InvalidData => "another program listens there".to_owned(),
            ErrorKind::TimedOut | ErrorKind::WouldBlock => "it does not answer".to_owned(),
            _ => error.to_string(),
        };
        format!("the store of rank 0 at {}: {why}", self.address())
    }

    fn dial_address(&self, address: &SocketAddr) -> io::Result<TcpStream> {
        let until = Instant::now() + ATTEMPT;
        let mut stream = TcpStream::connect_timeout(address, ATTEMPT)?;
        self.admission.check_listener(&stream)?;
        stream.write_all(&hello(self.admission.key(), self.rank))?;
        verify_key(&mut stream, self.admission.key(), until)?;
        configure(&stream)?;
        Ok(stream)
    }

    fn address(&self) -> String {
        self.addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ")
    }

    /// Sends a request and waits for the answer.
    fn request(&self, request: Request, wait_ctx: &WaitContext<'_>, awaited: &dyn Fn() -> String) -> Result<Reply> {
        let mut state = self.connected(wait_ctx)?;
        let id = state.num_requests;
        state.num_requests += 1;
        self.send(&mut state, &(id, request));
        state.replies.insert(id, None);
        let mut checked = Instant::now();
        loop {
            if let Some(reply) = state.replies.get_mut(&id).and_then(Option::take) {
                state.replies.remove(&id);
                return match reply {
                    Reply::Failed(code, text) => Err(Error::from_code(code, text)),
                    reply => Ok(reply),
                };
            }
            if let Some(error) = state.failure.clone() {
                state.replies.remove(&id);
                return Err(error);
            }
            state = self.progress(state);
            if checked.elapsed() >= POLL_INTERVAL {
                drop(state);
                checked = Instant::now();
                let outcome = wait_ctx.check(Duration::ZERO, awaited);
                state = lock(&self.state);
                if let Err(error) = outcome {
                    state.replies.remove(&id);
                    let cancel = state.num_requests;
                    state.num_requests += 1;
                    self.send(&mut state, &(cancel, Request::Cancel(id)));
                    return Err(error);
                }
            }
        }
    }

    /// Sends a message, or leaves it to the reader.
    fn send(&self, state: &mut State, message: &(u64, Request)) {
        let Some(stream) = state.stream.clone() else { return };
        let sent = state.frames.push(message).and_then(|()| state.frames.flush(&**stream));
        self.check(state, sent);
    }

    /// Reads the connection, or waits for the thread that does, for at most [`POLL_INTERVAL`].
    fn progress<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let Some(stream) = state.stream.clone().filter(|_| !state.has_reader) else {
            return self.changed.wait_timeout(state, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        };
        state.has_reader = true;
        let output = if state.frames.has_unsent() { PollFlags::OUT } else { PollFlags::empty() };
        drop(state);
        let mut polled = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN | output)];
        let done = poll_until(&mut polled, Some(POLL_INTERVAL));
        let mut state = lock(&self.state);
        state.has_reader = false;
        let done = done.and_then(|()| state.frames.flush(&**stream)).and_then(|()| state.receive(&stream));
        self.check(&mut state, done);
        self.changed.notify_all();
        state
    }

    fn check(&self, state: &mut State, done: io::Result<()>) {
        let Err(error) = done else { return };
        let text = match error.kind() {
            ErrorKind::UnexpectedEof => "its process has ended, or has left the job".to_owned(),
            _ => error.to_string(),
        };
        state.failure.get_or_insert(Error::PeerLost(format!("lost the store of rank 0 at {}: {text}", self.address())));
    }
}

impl State {
    /// Reads answers.
    fn receive(&mut self, stream: &TcpStream) -> io::Result<()> {
        let filled = self.frames.fill(stream);
        while let Some((id, reply)) = self.frames.next::<(u64, Reply)>()? {
            // Nobody waits for the answer to a cancelled request.
            if let Some(awaited) = self.replies.get_mut(&id) {
                *awaited = Some(reply);
            }
        }
        filled
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8], wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.request(Request::Set(key.to_owned(), value.to_vec()), wait_ctx, &server).map(drop)
    }

    fn try_get(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<Option<Vec<u8>>> {
        match self.request(Request::TryGet(key.to_owned()), wait_ctx, &server)? {
            Reply::Value(value) => Ok(value),
            _ => Err(wrong_answer()),
        }
    }

    fn wait_for(&self, key: &str, wait_ctx: &WaitContext<'_>, awaited: &dyn Fn() -> String) -> Result<Vec<u8>> {
        match self.request(Request::Wait(key.to_owned()), wait_ctx, awaited)? {
            Reply::Value(Some(value)) => Ok(value),
            _ => Err(wrong_answer()),
        }
    }

    fn add(&self, key: &str, by: i64, wait_ctx: &WaitContext<'_>) -> Result<i64> {
        match self.request(Request::Add(key.to_owned(), by), wait_ctx, &server)? {
            Reply::Sum(sum) => Ok(sum),
            _ => Err(wrong_answer()),
        }
    }

    fn delete(&self, key: &str, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.request(Request::Delete(key.to_owned()), wait_ctx, &server).map(drop)
    }

    fn fail_waits_at_end(&self, prefix: &str, text: Option<&str>, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.request(Request::FailAtEnd(prefix.to_owned(), text.map(str::to_owned)), wait_ctx, &server).map(drop)
    }
}

fn server() -> String {
    "the store of rank 0".to_owned()
}

fn wrong_answer() -> Error {
    Error::Network("the store of rank 0 gave a wrong answer".into())
}

#[cfg(test)]
mod tests;
