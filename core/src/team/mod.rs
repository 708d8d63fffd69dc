//! A team: its queue, its threads, and the life of a call.
//!
//! `submit` checks, lays out and enqueues a call, and returns. The lead thread takes calls in order; with a call's first
//! chunk it finds out whether all ranks called the same, and only then hands the other chunks to the helpers, so the helpers
//! meet the calls in one order on all ranks. The thread that ends a call's last part completes it.
//! A failure that leaves the ranks out of step (a deadline, a lost peer) ends the team: every call, waiting or new, gets
//! that first error.
//! Thread rule: a [`Team`] may be shared and used by any thread.

mod call;
mod delivery;
mod ledger;
mod pipeline;
mod stage;
mod worker;

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use call::{Done, Request};
pub use pipeline::Parcel;
pub use stage::{Pool, Stage};

use crate::affinity::{bind, hurry};
use crate::buffer::Tensor;
use crate::collective::{Carrier, Channel, Job, Op};
use crate::error::{Error, Result};
use crate::say::say;
use crate::schedule::{Schedule, Verbosity};
use crate::topology::Topology;
use crate::transport::{Endpoint, Node};
use call::{Call, Ended};
use delivery::Delivery;
use ledger::Ledger;
use pipeline::{Flight, Pipeline};

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
    pipeline: Arc<Mutex<Pipeline>>,
    ledger: Arc<Ledger>,
    pool: Arc<Pool>,
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
    /// Starts a team with one thread for each channel of `endpoint`, thread i on processor `cpus[i]` if these are given.
    ///
    /// # Errors
    /// [`Error::System`] when the system refuses a thread.
    pub fn start(endpoint: Endpoint, settings: Settings, cpus: Option<&[usize]>) -> Result<Team> {
        let Endpoint { topology, node, links } = endpoint;
        let carrier = Carrier {
            team: settings.id,
            ranks: topology.size(),
            channels: links.len(),
            slot: node.geometry().slot,
            precise: settings.precise,
        };
        let rank = topology.rank();
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
                threads.push(spawn(&settings, index, cpus, move || worker.help(&receiver))?);
            }
        }
        let Some((worker, receiver, sender)) = lead else {
            return Err(Error::Invalid("a team needs at least one thread".into()));
        };
        threads.push(spawn(&settings, 0, cpus, move || worker.lead(&receiver, &helpers))?);
        Ok(Team {
            shared,
            carrier,
            queue: Mutex::new(Some(sender)),
            threads: Mutex::new(threads),
            pipeline: Arc::new(Mutex::new(Pipeline::new(rank))),
            ledger: Arc::new(Ledger::new(settings.id, rank)),
            pool: Arc::default(),
        })
    }

    /// Enqueues `op` on `towers` and returns; the schedule does not count it. `request.done` is called exactly once: with the
    /// outcome, or at once when the call is refused.
    ///
    /// # Safety
    /// The memory of the tensors stays valid until `done` is called; nobody else writes to `src` or uses `dst` meanwhile.
    pub unsafe fn submit(&self, op: Op, towers: Vec<Vec<Tensor>>, request: Request) {
        let Request { done, name, instance, labels, .. } = request;
        match self.job(op, towers, &name, &instance, labels) {
            Ok(job) => self.enqueue(job, Box::new(|result| done(result.map(|()| None)))),
            Err(error) => done(Err(error)),
        }
    }

    /// Averages `towers` on the team's schedule, and returns; see [`crate::schedule`] for what the caller gets.
    /// `request.done` is called exactly once.
    ///
    /// # Safety
    /// As for [`Team::submit`]; with a parcel (`request.keeping`) the memory stays valid as long as the parcel does, also
    /// after `done` was called.
    pub unsafe fn gradients(&self, towers: Vec<Vec<Tensor>>, request: Request) {
        let waiting_since = request.timed.then(Instant::now);
        let Request { done, name, instance, labels, parcel, owner, part, separate, .. } = request;
        let mut job = match self.job(Op::Average, towers, &name, &instance, labels) {
            Ok(job) => job,
            Err(error) => return done(Err(error)),
        };
        let list = xxh3_64_with_seed(&owner.to_le_bytes(), job.list);
        let mut pipeline = self.pipeline();
        let turn = pipeline.turn(list, owner, part, parcel.as_deref());
        job.schedule(turn.shares.left, turn.place.clone());
        // A call that gets nothing and leaves nothing has its mean where it belongs: nobody else looks at it.
        let alone = turn.before.is_none() && turn.shares.left == 0.0;
        let own = Flight::new(parcel, if alone { Vec::new() } else { job.means() });
        let flight = Arc::clone(&own);
        self.enqueue(job, Box::new(move |result| flight.end(&result)));
        pipeline.leave(list, Arc::clone(&own), turn.shares.left);
        drop(pipeline);
        let (pipeline, ledger) = (Arc::clone(&self.pipeline), Arc::clone(&self.ledger));
        Delivery { pipeline, ledger, list, turn, own, done, separate, waiting_since }.start();
    }

    fn job(&self, op: Op, towers: Vec<Vec<Tensor>>, name: &str, instance: &str, labels: String) -> Result<Job> {
        match self.shared.failure() {
            Some(error) => Err(error),
            None => Job::new(op, towers, name, instance, labels, self.carrier),
        }
    }

    fn enqueue(&self, job: Job, ended: Ended) {
        let call = Arc::new(Call::new(job, ended, self.shared.settings.timeout));
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

    fn pipeline(&self) -> MutexGuard<'_, Pipeline> {
        self.pipeline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts `schedule` with the next call of [`Team::gradients`].
    pub fn configure(&self, schedule: Schedule) {
        self.pipeline().configure(schedule);
    }

    /// Whether coming calls of `owner` ([`Team::gradients`]) may return before their average has ended, if they bring a
    /// parcel, or another one's mean.
    pub fn carries(&self, owner: u64) -> bool {
        self.pipeline().carries(owner)
    }

    /// Forgets the lists of `owner`, and the means that its last calls have left to calls that will not come.
    pub fn release(&self, owner: u64) {
        self.pipeline().release(owner);
    }

    /// Forgets the means that the last calls of `owner` have left.
    pub fn discard(&self, owner: u64) {
        self.pipeline().discard(owner);
    }

    /// Memory for faces whose callers keep theirs.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Counts `seconds` that a caller has waited, for calls that are not timed.
    pub fn add_waited(&self, seconds: f64) {
        self.ledger.add(seconds);
    }

    /// Who prints, and for how long callers have waited.
    pub fn waited(&self) -> (Verbosity, f64) {
        (self.pipeline().verbosity(), self.ledger.total())
    }

    /// The number of means that were left to calls that have not come.
    pub fn left_behind(&self) -> usize {
        self.pipeline().left_behind()
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

/// Prints how long this rank has waited on all `teams`, if one of them wants it.
pub fn report_waited<'a>(teams: impl Iterator<Item = &'a Arc<Team>>, rank: usize) {
    let waited: Vec<(Verbosity, f64)> = teams.map(|team| team.waited()).collect();
    if waited.iter().any(|(verbosity, _)| verbosity.speaks(rank)) {
        ledger::report_all(rank, waited.iter().map(|(_, seconds)| seconds).sum());
    }
}

/// Starts a thread whose name fits the 15 characters that Linux keeps.
fn spawn(
    settings: &Settings,
    index: usize,
    cpus: Option<&[usize]>,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let team = if settings.id < 0 { "c".to_owned() } else { settings.id.to_string() };
    let cpu = cpus.and_then(|cpus| cpus.get(index).copied());
    let bound = move || {
        hurry();
        if let Some(Err(error)) = cpu.map(bind) {
            say(&format!("{error}; the thread runs where the process may"));
        }
        body();
    };
    Builder::new()
        .name(format!("dlcomm-{team}.{index}"))
        .spawn(bound)
        .map_err(|error| Error::system("starting a thread", error))
}
