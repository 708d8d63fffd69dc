//! Calls on device memory in a team: their checks, their way through the team's threads, and a watch over what was enqueued.
//!
//! Such a call ends for its caller when it is enqueued, which may be long before its GPU has done it, or, if it waits, when its
//! GPU has. A thread of its own watches over it until then: when a rank is lost or the deadline passes meanwhile, it ends
//! the team and lets the GPU's streams go on, so that nothing on them waits for ever.
//! Thread rule: [`OnDevice`] is in the seat; a [`Stager`] is its worker's.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::call::Call;
use super::worker::Worker;
use super::{Shared, Team};
use crate::affinity::unbind;
use crate::collective::Job;
use crate::collective::device::{Carried, Gpus, LAST, Stager};
use crate::device::Device;
use crate::error::{Error, Result, guard};
use crate::say::say;
use crate::transport::cuda::{Event, Producer};

/// The longest sleep of the watch between two looks; while a caller waits, and else.
const SHORT_NAP: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_millis(10);

impl Team {
    /// Makes a call on device memory of `job`.
    pub(super) fn on_device(&self, job: Job, device: Device) -> Result<Job> {
        if let Some(ordinal) = self.shared.gpus.get().and_then(|gpus| gpus["gpu"].as_i64())
            && ordinal != i64::from(device.ordinal)
        {
            return Err(Error::Invalid(format!(
                "the tensors are on GPU {}, and team {} of this rank works on GPU {ordinal}; a team has one GPU on each rank",
                device.ordinal, self.carrier.team
            )));
        }
        let producer = guard(|| Producer::new(device))?;
        job.on_device(Arc::new(producer), self.shared.settings.device.chunk)
    }

    /// Refuses a call on device memory whose mean the core would have to mix with another one: it does so in host memory only.
    pub(super) fn check_schedule(&self, job: Job, owner: u64, separate: bool) -> Result<Job> {
        if job.producer().is_some() && !separate && self.carries(owner) {
            return Err(Error::Invalid(format!(
                "team {} is on a schedule with non-blocking calls, which GPU tensors have in dl_comm.torch's optimizer only; \
                 use another team, or host tensors",
                self.carrier.team
            )));
        }
        Ok(job)
    }

    /// What is known of the way that calls on device memory take, after the first.
    pub fn gpus(&self) -> Option<Value> {
        let mut gpus = self.shared.gpus.get()?.clone();
        gpus["device_bytes"] = self.shared.device_bytes.load(Ordering::Relaxed).into();
        gpus["calls_in_chunks"] = self.shared.calls_in_chunks.load(Ordering::Relaxed).into();
        Some(gpus)
    }
}

/// What the lead has for calls on device memory.
pub(super) struct OnDevice {
    gpus: Gpus,
    /// Where the watch hears of calls; gone before the thread is joined.
    watched: Option<Sender<Watched>>,
    watch: Option<JoinHandle<()>>,
}

/// A call that was enqueued, and its end on the GPU.
struct Watched {
    call: Arc<Call>,
    end: Event,
}

impl Watched {
    /// A part of a call that waits ends with this.
    fn new(call: &Arc<Call>, end: Event) -> Watched {
        let watched = Watched { call: Arc::clone(call), end };
        if watched.waits() {
            call.split(1);
        }
        watched
    }

    fn waits(&self) -> bool {
        self.call.job.producer().is_some_and(|producer| producer.waits())
    }

    /// Whether the GPU has done it, or cannot tell.
    fn has_ended(&self) -> bool {
        self.end.context().enter().and_then(|_entered| self.end.has_come()).unwrap_or(true)
    }

    fn finish(self, result: Result<()>) {
        if self.waits() {
            self.call.finish(result);
        }
    }
}

impl OnDevice {
    /// Carries out a call on which the ranks agree; false when it has to go through the host, by all threads. At the first
    /// one, all ranks agree on the way.
    pub fn carry(place: &mut Option<OnDevice>, worker: &mut Worker, call: &Arc<Call>) -> Result<bool> {
        if place.is_none() {
            *place = Some(OnDevice::start(worker, call)?);
        }
        let Some(OnDevice { gpus, watched, .. }) = place else {
            return Err(Error::Internal("there is no GPU for a call on device memory".into()));
        };
        let carried = worker.attempt(call, |channel, _, patience| {
            let carried = gpus.carry(channel, &call.job, patience).map_err(out_of_step)?;
            let Carried::Enqueued(end) = carried else { return Ok(false) };
            watch_over(watched.as_ref(), call, end).map(|()| true)
        });
        worker.shared.device_bytes.store(gpus.held(), Ordering::Relaxed);
        worker.shared.calls_in_chunks.store(gpus.in_chunks(), Ordering::Relaxed);
        if carried.is_err() {
            gpus.rescue()();
            // Part of it may be enqueued: the tensors are their caller's again when the GPU is at work on them no more.
            if let Some(end) = gpus.end(&call.job) {
                watch_over(watched.as_ref(), call, end)?;
            }
        }
        carried
    }

    fn start(worker: &mut Worker, call: &Arc<Call>) -> Result<OnDevice> {
        let settings = worker.shared.settings.device;
        let gpus = worker.attempt(call, |channel, call, patience| Gpus::new(channel, &call.job, settings, patience))?;
        // One call is the first.
        let _first = worker.shared.gpus.set(gpus.about());
        let (sender, receiver) = channel();
        let (shared, rescue) = (Arc::clone(&worker.shared), gpus.rescue());
        let builder = Builder::new().name(format!("dlcomm-{}.gpu", worker.shared.settings.id));
        let watch = worker.attempt(call, |_, _, _| {
            let spawned = builder.spawn(move || {
                if let Err(error) = unbind() {
                    say(&error.to_string());
                }
                watch(&shared, &receiver, &*rescue);
            });
            spawned.map_err(|error| Error::system("starting a thread", error))
        })?;
        Ok(OnDevice { gpus, watched: Some(sender), watch: Some(watch) })
    }
}

/// Gives a call to the watch, which ends after who gives it.
fn watch_over(watched: Option<&Sender<Watched>>, call: &Arc<Call>, end: Event) -> Result<()> {
    let nobody = || Error::Internal("nobody watches over the GPU".into());
    let sent = watched.ok_or_else(nobody)?.send(Watched::new(call, end));
    sent.map_err(|unsent| {
        unsent.0.finish(Err(nobody()));
        nobody()
    })
}

/// An error of this rank alone, after the ranks have agreed on a call: the others are at work on it, so it ends the team,
/// whatever it is.
fn out_of_step(error: Error) -> Error {
    if error.is_recoverable() { Error::System(error.detail().to_owned()) } else { error }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        drop(self.watched.take());
        if self.watch.take().is_some_and(|watch| watch.join().is_err()) {
            say("the watch over a team's GPU panicked");
        }
    }
}

/// Looks after calls until they have come to their end on the GPU.
fn watch(shared: &Arc<Shared>, calls: &Receiver<Watched>, rescue: &dyn Fn()) {
    while let Ok(watched) = calls.recv() {
        let mut nap = Duration::from_micros(20);
        let longest = if watched.waits() { SHORT_NAP } else { NAP };
        let Watched { call, end } = &watched;
        let entered = end.context().enter();
        let failed = loop {
            if let Err(error) = &entered {
                break Some(error.clone());
            }
            match end.has_come() {
                Ok(true) => break None,
                Ok(false) => {}
                Err(error) => break Some(error),
            }
            if let Some(error) = shared.failure().or_else(|| shared.node.lost()).or_else(|| overdue(call)) {
                break Some(error);
            }
            std::thread::sleep(nap);
            nap = (2 * nap).min(longest);
        };
        drop(entered);
        let Some(error) = failed else {
            watched.finish(Ok(()));
            continue;
        };
        shared.fail(&error);
        return let_go(watched, calls, rescue, &error);
    }
}

/// After a failure: lets the GPU's streams go on until the team ends, again and again, because one of them may undo it for
/// others. How long they take is not known: what a program has enqueued before comes first.
fn let_go(failed: Watched, calls: &Receiver<Watched>, rescue: &dyn Fn(), error: &Error) {
    let since = Instant::now();
    let mut left = vec![failed];
    loop {
        rescue();
        // The tensors are their caller's again when the GPU is at work on them no more.
        let over = |watched: &Watched| since.elapsed() > LAST || watched.has_ended();
        let (ended, going): (Vec<_>, Vec<_>) = left.into_iter().partition(over);
        ended.into_iter().for_each(|watched| watched.finish(Err(error.clone())));
        left = going;
        match calls.recv_timeout(NAP) {
            Ok(watched) => left.push(watched),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if left.is_empty() => return,
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(NAP),
        }
    }
}

fn overdue(call: &Call) -> Option<Error> {
    let waited = call.record.submitted.elapsed();
    call.timeout.filter(|&timeout| waited >= timeout).map(|_| {
        Error::Timeout(format!(
            "{} was not complete on the GPU after {:.1} s (DL_COMM_TIMEOUT_S)",
            call.job.title(),
            waited.as_secs_f64()
        ))
    })
}

impl Worker {
    /// This thread's chunks of a call on device memory that goes through the host.
    pub(super) fn share_on_device(&mut self, call: &Arc<Call>) -> Result<()> {
        let (index, channels) = (self.index, call.job.channels());
        let settings = self.shared.settings.device;
        let mut stager = self.stager.take();
        let done = self.attempt(call, |channel, call, patience| {
            let stager = match (&mut stager, call.job.producer()) {
                (Some(stager), _) => stager,
                (place, Some(producer)) => place.insert(Stager::new(channel, producer.context(), settings)?),
                (None, None) => return Err(Error::Internal("a call on host memory has no GPU".into())),
            };
            let chunks = (index..call.job.plan.chunks()).step_by(channels);
            stager.carry(channel, &call.job, chunks, patience).map_err(out_of_step)
        });
        // Once all have been told.
        if let (Err(_), Some(stager)) = (&done, &stager)
            && call.job.producer().is_some_and(|producer| producer.waits())
        {
            stager.rest();
        }
        self.stager = stager;
        done
    }
}
