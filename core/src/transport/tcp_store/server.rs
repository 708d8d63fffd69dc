//! The server of a store: one thread, which sleeps in poll until a client or this process wants something.
//!
//! A client proves that it knows the job's key ([`super::super::hello`]) before anything of it is read. A client that
//! breaks the rules or whose connection ends is dropped.
//! Thread rule: the thread owns the connections; other threads use the [`MemoryStore`] behind it.

use std::collections::HashMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::wire::{Frames, MAX_FRAME, Reply, Request};
use crate::error::{Error, Result};
use crate::log::log_line;
use crate::transport::close_on_fork::{CloseOnFork, CloseOnForkStream};
use crate::transport::hello::{Admission, PendingConnections, configure, poll_until, readiness};
use crate::transport::store::MemoryStore;

/// The most requests of one client that wait for a key.
const MAX_WAITS: usize = 4096;
/// Open files that the rest of the process may need.
const OTHER_FILES: u64 = 512;
/// How long the end of the server waits for the end of its clients.
const MAX_END: Duration = Duration::from_secs(1);

/// A server in this process, which ends on drop.
pub struct Server {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    memory: MemoryStore,
    /// Wakes the thread.
    wake: OwnedFd,
    ends: AtomicBool,
}

impl Server {
    /// Serves up to `clients` clients of the job on `listeners`.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn start(listeners: Vec<TcpListener>, clients: usize, admission: Admission) -> Result<Server> {
        allow_descriptors(clients);
        let failed = |error: io::Error| Error::system("starting the job's store", error);
        listeners.iter().try_for_each(|socket| socket.set_nonblocking(true)).map_err(failed)?;
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
        let shared = Arc::new(Shared { memory: MemoryStore::default(), wake, ends: AtomicBool::new(false) });
        let mut serving = Serving {
            shared: Arc::clone(&shared),
            listeners: listeners.into_iter().map(CloseOnFork::new).collect(),
            admission,
            pending: PendingConnections::new(admission),
            clients: HashMap::new(),
            waits: HashMap::new(),
            num_clients: 0,
        };
        let serve = move || {
            if let Err(error) = serving.run() {
                log_line(&format!("the job's store ends: {error}"));
            }
        };
        let thread = Builder::new().name("dlcomm-store".into()).spawn(serve).map_err(failed)?;
        Ok(Server { shared, thread: Some(thread) })
    }

    /// The values. After a change, call [`Server::wake`].
    pub fn memory(&self) -> &MemoryStore {
        &self.shared.memory
    }

    /// Answers clients that wait for a value that this process has stored.
    pub fn wake(&self) {
        // Fails only if the thread has not consumed 2^64 - 1 wakes.
        let _woken = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Release);
        self.wake();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log_line("the thread of the job's store panicked");
        }
    }
}

/// Raises this process's limit of open files, if `clients` connections need that and it may.
fn allow_descriptors(clients: usize) {
    let limit = getrlimit(Resource::Nofile);
    let needed = Some(clients as u64 + OTHER_FILES).filter(|&needed| limit.current.is_some_and(|soft| soft < needed));
    if let Some(needed) = needed {
        let current = Some(limit.maximum.map_or(needed, |hard| hard.min(needed)));
        // Without it, clients beyond the limit get an error.
        let _raised = setrlimit(Resource::Nofile, Rlimit { current, ..limit });
    }
}

struct Client {
    stream: CloseOnForkStream,
    frames: Frames,
    /// The keys that it waits for, by the request's number.
    waits: HashMap<u64, String>,
    /// Its end fails the waits for keys with these prefixes.
    fails_at_end: HashMap<String, String>,
}

/// What the thread owns.
struct Serving {
    shared: Arc<Shared>,
    listeners: Vec<CloseOnFork<TcpListener>>,
    admission: Admission,
    pending: PendingConnections,
    /// By number, in the order of arrival.
    clients: HashMap<u64, Client>,
    /// The clients' requests that wait for a key.
    waits: HashMap<String, Vec<(u64, u64)>>,
    num_clients: u64,
}

impl Serving {
    fn run(&mut self) -> io::Result<()> {
        while !self.shared.ends.load(Ordering::Acquire) {
            self.step(None)?;
        }
        self.finish()
    }

    /// Waits for events, for at most `limit`, and handles them.
    fn step(&mut self, limit: Option<Duration>) -> io::Result<()> {
        let numbers: Vec<u64> = self.clients.keys().copied().collect();
        let mut polled = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        polled.extend(numbers.iter().map(|number| {
            let Client { stream, frames, .. } = &self.clients[number];
            let output = if frames.has_unsent() { PollFlags::OUT } else { PollFlags::empty() };
            PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN | output)
        }));
        polled.extend(self.pending.sockets(&self.listeners));
        poll_until(&mut polled, limit.or(self.pending.poll_limit()))?;
        let ready = readiness(&polled);
        drop(polled);
        if ready[0] {
            // Only resets the counter.
            let _count = rustix::io::read(&self.shared.wake, &mut [0u8; 8]);
            self.answer_all();
        }
        for (&number, _) in numbers.iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
            self.serve(number);
        }
        if let Some((_, stream)) = self.pending.advance(&self.listeners, &ready[1 + numbers.len()..])?
            && configure(&stream).is_ok()
        {
            let (stream, frames) = (CloseOnFork::new(stream), Frames::default());
            self.clients.insert(
                self.num_clients,
                Client { stream, frames, waits: HashMap::new(), fails_at_end: HashMap::new() },
            );
            self.num_clients += 1;
        }
        Ok(())
    }

    /// Answers the requests for keys that are there now.
    fn answer_all(&mut self) {
        let keys: Vec<String> = self.waits.keys().cloned().collect();
        keys.iter().for_each(|key| self.answer(key));
    }

    /// Answers the requests for `key`, if it is there.
    fn answer(&mut self, key: &str) {
        if !self.waits.contains_key(key) {
            return;
        }
        let Some(value) = self.shared.memory.value(key) else { return };
        for (number, request) in self.waits.remove(key).unwrap_or_default() {
            let Some(client) = self.clients.get_mut(&number) else { continue };
            client.waits.remove(&request);
            if client.reply(request, Reply::Value(Some(value.clone()))).is_err() {
                self.drop_client(number);
            }
        }
    }

    /// Reads, carries out and answers the requests of a client.
    fn serve(&mut self, number: u64) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let mut result = client.frames.fill(&*client.stream);
        while result.is_ok() {
            let Some(client) = self.clients.get_mut(&number) else { return };
            result = match client.frames.next() {
                Ok(Some((id, request))) => self.carry_out(number, id, request),
                Ok(None) => break,
                Err(error) => Err(error),
            };
        }
        let Some(client) = self.clients.get_mut(&number) else { return };
        if result.and_then(|()| client.frames.flush(&*client.stream)).is_err() {
            self.drop_client(number);
        }
    }

    fn carry_out(&mut self, number: u64, id: u64, request: Request) -> io::Result<()> {
        let Some(client) = self.clients.get_mut(&number) else { return Ok(()) };
        let memory = &self.shared.memory;
        let mut changed = None;
        let reply = match request {
            Request::Set(key, value) => {
                memory.insert(&key, value);
                changed = Some(key);
                Reply::Done
            }
            Request::TryGet(key) => memory.look(&key).map_or_else(|error| failed(&error), Reply::Value),
            Request::Wait(key) => match memory.look(&key) {
                Err(error) => failed(&error),
                Ok(None) if client.waits.len() < MAX_WAITS => {
                    client.waits.insert(id, key.clone());
                    self.waits.entry(key).or_default().push((number, id));
                    return Ok(());
                }
                Ok(None) => Reply::Failed(-9, format!("more than {MAX_WAITS} waits of one process")),
                Ok(value) => Reply::Value(value),
            },
            Request::Cancel(wait) => {
                if let Some(key) = client.waits.remove(&wait) {
                    forget(&mut self.waits, &key, |waiting| waiting == (number, wait));
                }
                return Ok(());
            }
            Request::Add(key, by) => match memory.increment(&key, by) {
                Ok(sum) => {
                    changed = Some(key);
                    Reply::Sum(sum)
                }
                Err(error) => failed(&error),
            },
            Request::Delete(key) => {
                memory.remove(&key);
                Reply::Done
            }
            Request::FailAtEnd(prefix, text) => {
                match text {
                    Some(text) => client.fails_at_end.insert(prefix, text),
                    None => client.fails_at_end.remove(&prefix),
                };
                Reply::Done
            }
        };
        client.reply(id, reply)?;
        if let Some(key) = changed {
            self.answer(&key);
        }
        Ok(())
    }

    fn drop_client(&mut self, number: u64) {
        let Some(client) = self.clients.remove(&number) else { return };
        for key in client.waits.values() {
            forget(&mut self.waits, key, |(waiting, _)| waiting == number);
        }
        for (prefix, text) in &client.fails_at_end {
            self.fail_waits(prefix, &Error::PeerLost(text.clone()));
        }
    }

    /// Fails the waits of all clients and of this process for keys that start with `prefix`.
    fn fail_waits(&mut self, prefix: &str, error: &Error) {
        self.shared.memory.fail_waits(prefix, error.clone());
        let keys: Vec<String> = self.waits.keys().filter(|key| key.starts_with(prefix)).cloned().collect();
        for (number, request) in
            keys.iter().flat_map(|key| self.waits.remove(key).unwrap_or_default()).collect::<Vec<_>>()
        {
            let Some(client) = self.clients.get_mut(&number) else { continue };
            client.waits.remove(&request);
            if client.reply(request, failed(error)).is_err() {
                self.drop_client(number);
            }
        }
    }

    /// Serves the clients that may still read what this process has stored last, until they end or wait for something
    /// else. New clients are for the next server.
    fn finish(&mut self) -> io::Result<()> {
        self.listeners.clear();
        self.pending = PendingConnections::new(self.admission);
        self.answer_all();
        let until = Instant::now() + MAX_END;
        loop {
            self.clients.retain(|_, client| client.waits.is_empty() || client.frames.has_unsent());
            let left = until.saturating_duration_since(Instant::now());
            if self.clients.is_empty() || left.is_zero() {
                return Ok(());
            }
            self.step(Some(left))?;
        }
    }
}

impl Client {
    /// Sends an answer, or keeps it until the client reads.
    fn reply(&mut self, request: u64, reply: Reply) -> io::Result<()> {
        if self.frames.unsent_bytes() > MAX_FRAME {
            return Err(io::Error::other("it does not read its answers"));
        }
        self.frames.push(&(request, reply))?;
        self.frames.flush(&*self.stream)
    }
}

fn failed(error: &Error) -> Reply {
    Reply::Failed(error.code(), error.detail().to_owned())
}

/// Removes the entries of `key` that match `ends`.
fn forget(waits: &mut HashMap<String, Vec<(u64, u64)>>, key: &str, ends: impl Fn((u64, u64)) -> bool) {
    if let Some(waiting) = waits.get_mut(key) {
        waiting.retain(|&entry| !ends(entry));
        if waiting.is_empty() {
            waits.remove(key);
        }
    }
}
