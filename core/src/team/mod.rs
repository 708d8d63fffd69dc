//! A team: its queue, its threads, and the life of a call.
//!
//! `submit` checks, lays out and enqueues a call, and returns. The lead thread takes calls in order; with a call's first
//! chunk it finds out whether all ranks called the same, and only then hands the other chunks to the helpers, so the helpers
//! meet the calls in one order on all ranks. The thread that ends a call's last part completes it.
//! A failure that leaves the ranks out of step (a deadline, a lost peer) ends the team: every call, waiting or new, gets
//! that first error.
//! Thread rule: a [`Team`] may be shared and used by any thread.

mod call;
mod worker;

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

pub use call::{Done, Request};

use crate::buffer::Tensor;
use crate::collective::{Carrier, Channel, Job, Op};
use crate::error::{Error, Result};
use crate::say::say;
use crate::topology::Topology;
use crate::transport::{Endpoint, Node};
use call::Call;

/// The settings of a team.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Its number; -1 is the control team.
    pub id: i32,
    /// Whether floating point is added up in float64.
    pub precise: bool,
    /// The longest that a call may take.
    pub timeout: Option<Duration>,
    /// After how long a wait names who is late.
    pub stall_warn: Option<Duration>,
}

/// A team of threads that carries out calls; see the module's text.
pub struct Team {
    shared: Arc<Shared>,
    carrier: Carrier,
    queue: Mutex<Option<Sender<Arc<Call>>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What the team's threads share.
struct Shared {
    settings: Settings,
    node: Arc<Node>,
    failure: OnceLock<Error>,
}

impl Shared {
    /// The first failure that ended the team, here or on another rank of the host.
    fn failure(&self) -> Option<Error> {
        self.failure.get().cloned().or_else(|| self.node.failure())
    }

    /// Ends the team for `error`, on this rank and the others of the host.
    fn fail(&self, error: &Error) {
        if self.failure.set(error.clone()).is_ok() {
            self.node.fail(error);
        }
    }
}

impl Team {
    /// Starts a team with one thread for each channel of `endpoint`.
    ///
    /// # Errors
    /// [`Error::System`] when the system refuses a thread.
    pub fn start(endpoint: Endpoint, settings: Settings) -> Result<Team> {
        let Endpoint { topology, node, links } = endpoint;
        let carrier = Carrier {
            team: settings.id,
            ranks: topology.size(),
            channels: links.len(),
            slot: node.geometry().slot,
            precise: settings.precise,
        };
        let shared = Arc::new(Shared { settings, node: Arc::clone(&node), failure: OnceLock::new() });
        let mut threads = Vec::new();
        let mut helpers = Vec::new();
        let mut lead = None;
        for (index, link) in links.into_iter().enumerate() {
            let (sender, receiver) = channel();
            let topology: Arc<Topology> = Arc::clone(&topology);
            let worker = worker::Worker {
                shared: Arc::clone(&shared),
                index,
                channels: carrier.channels,
                channel: Channel::new(topology, node.channel(index), link),
            };
            if index == 0 {
                lead = Some((worker, receiver, sender));
            } else {
                helpers.push(sender);
                threads.push(spawn(&settings, index, move || worker.help(&receiver))?);
            }
        }
        let Some((worker, receiver, sender)) = lead else {
            return Err(Error::Invalid("a team needs at least one thread".into()));
        };
        threads.push(spawn(&settings, 0, move || worker.lead(&receiver, &helpers))?);
        Ok(Team { shared, carrier, queue: Mutex::new(Some(sender)), threads: Mutex::new(threads) })
    }

    /// Enqueues `op` on `towers` and returns. `request.done` is called exactly once: with the outcome, or at once when the
    /// call is refused.
    ///
    /// # Safety
    /// The memory of the tensors stays valid until `done` is called; nobody else writes to `src` or uses `dst` meanwhile.
    pub unsafe fn submit(&self, op: Op, towers: Vec<Vec<Tensor>>, request: Request) {
        let Request { done, name, labels } = request;
        if let Some(error) = self.shared.failure() {
            return done(Err(error));
        }
        let job = match Job::new(op, towers, name, labels, self.carrier) {
            Ok(job) => job,
            Err(error) => return done(Err(error)),
        };
        let call = Arc::new(Call::new(job, done, self.shared.settings.timeout));
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = match &*queue {
            Some(queue) => queue.send(call).err().map(|refused| refused.0),
            None => Some(call),
        };
        drop(queue);
        if let Some(call) = refused {
            call.finish(Err(Error::State("the team has ended".into())));
        }
    }

    /// Ends the team with `error`, here and on the other ranks of the host.
    pub fn fail(&self, error: &Error) {
        self.shared.fail(error);
    }

    /// The error that ended the team, if one did.
    pub fn failure(&self) -> Option<Error> {
        self.shared.failure()
    }

    /// Completes what is enqueued and ends the threads. Further calls are refused.
    pub fn stop(&self) {
        drop(self.queue.lock().unwrap_or_else(PoisonError::into_inner).take());
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                say(&format!("a thread of team {} panicked", self.carrier.team));
            }
        }
        self.shared.node.leave();
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Starts a thread whose name fits the 15 characters that Linux keeps.
fn spawn(settings: &Settings, index: usize, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let team = if settings.id < 0 { "c".to_owned() } else { settings.id.to_string() };
    Builder::new()
        .name(format!("dlcomm-{team}.{index}"))
        .spawn(body)
        .map_err(|error| Error::system("starting a thread", error))
}
