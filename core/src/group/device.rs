//! Calls on device memory in a team: their checks, their way through the team's threads, and a watch over what was enqueued.
//!
//! Such a call ends for its caller when it is enqueued, which may be long before its GPU has done it, or, if it waits, when its
//! GPU has. A thread of its own watches over it until then: when a rank is lost or the deadline passes meanwhile, it ends
//! the team and lets the GPU's streams go on, so that nothing on them waits for ever.
//! Thread rule: [`DeviceExecutor`] is in the executor; a [`StagingPipeline`] is its worker's.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::state::GroupState;
use super::work::Work;
use super::worker::Worker;
use crate::affinity::unbind;
use crate::collective::device::{DevicePath, DeviceResult, StagingPipeline, TEARDOWN_TIMEOUT};
use crate::error::{Error, Result};
use crate::log::log_line;
use crate::transport::gpu::Event;

/// The longest sleep of the watch between two looks; while a caller waits, and else.
const MAX_BLOCKING_SLEEP: Duration = Duration::from_micros(200);
const MAX_SLEEP: Duration = Duration::from_millis(10);

/// What the lead has for calls on device memory.
pub(super) struct DeviceExecutor {
    path: DevicePath,
    /// Where the watch hears of calls; gone before the thread is joined.
    watched: Option<Sender<DeviceWork>>,
    watch: Option<JoinHandle<()>>,
}

/// A call that was enqueued, and its end on the GPU.
struct DeviceWork {
    work: Arc<Work>,
    done: Event,
}

impl DeviceWork {
    /// A part of a call that waits ends with this.
    fn new(work: &Arc<Work>, end: Event) -> DeviceWork {
        let watched = DeviceWork { work: Arc::clone(work), done: end };
        if watched.waits() {
            work.add_parts(1);
        }
        watched
    }

    fn waits(&self) -> bool {
        self.work.call.producer().is_some_and(|producer| producer.blocks_host())
    }

    /// Whether the GPU has done it, or cannot tell.
    fn has_ended(&self) -> bool {
        self.done.context().push().and_then(|_entered| self.done.is_complete()).unwrap_or(true)
    }

    fn finish(self, result: Result<()>) {
        if self.waits() {
            self.work.finish(result);
        }
    }
}

impl DeviceExecutor {
    /// Carries out a call on which the ranks agree; false when it has to go through the host, by all threads. At the first
    /// one, all ranks agree on the way.
    pub fn run(place: &mut Option<DeviceExecutor>, worker: &mut Worker, work: &Arc<Work>) -> Result<bool> {
        if place.is_none() {
            *place = Some(DeviceExecutor::start(worker, work)?);
        }
        let Some(DeviceExecutor { path, watched, .. }) = place else {
            return Err(Error::Internal("there is no GPU for a call on device memory".into()));
        };
        let carried = worker.run_checked(work, |channel, _, wait_ctx| {
            let carried = path.run(channel, &work.call, wait_ctx).map_err(out_of_step)?;
            let DeviceResult::Enqueued(end) = carried else { return Ok(false) };
            watch_over(watched.as_ref(), work, end).map(|()| true)
        });
        worker.shared.device_bytes.store(path.held(), Ordering::Relaxed);
        worker.shared.calls_in_chunks.store(path.in_chunks(), Ordering::Relaxed);
        if carried.is_err() {
            path.release_streams()();
            // Part of it may be enqueued: the tensors are their caller's again when the GPU is at work on them no more.
            if let Some(end) = path.signal_outputs(&work.call) {
                watch_over(watched.as_ref(), work, end)?;
            }
        }
        carried
    }

    fn start(worker: &mut Worker, work: &Arc<Work>) -> Result<DeviceExecutor> {
        let settings = worker.shared.settings.device;
        let path = worker
            .run_checked(work, |channel, work, wait_ctx| DevicePath::new(channel, &work.call, settings, wait_ctx))?;
        // One call is the first.
        let _first = worker.shared.gpu_info.set(path.about());
        let (sender, receiver) = channel();
        let (shared, rescue) = (Arc::clone(&worker.shared), path.release_streams());
        let builder = Builder::new().name(format!("dlcomm-{}.gpu", worker.shared.settings.id));
        let watch = worker.run_checked(work, |_, _, _| {
            let spawned = builder.spawn(move || {
                if let Err(error) = unbind() {
                    log_line(&error.to_string());
                }
                poll_device_work(&shared, &receiver, &*rescue);
            });
            spawned.map_err(|error| Error::system("starting a thread", error))
        })?;
        Ok(DeviceExecutor { path, watched: Some(sender), watch: Some(watch) })
    }
}

/// Gives a call to the watch, which ends after who gives it.
fn watch_over(watched: Option<&Sender<DeviceWork>>, work: &Arc<Work>, end: Event) -> Result<()> {
    let nobody = || Error::Internal("nobody watches over the GPU".into());
    let sent = watched.ok_or_else(nobody)?.send(DeviceWork::new(work, end));
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

impl Drop for DeviceExecutor {
    fn drop(&mut self) {
        drop(self.watched.take());
        if self.watch.take().is_some_and(|watch| watch.join().is_err()) {
            log_line("the watch over a team's GPU panicked");
        }
    }
}

/// Looks after calls until they have come to their end on the GPU.
fn poll_device_work(shared: &Arc<GroupState>, calls: &Receiver<DeviceWork>, rescue: &dyn Fn()) {
    while let Ok(watched) = calls.recv() {
        let mut nap = Duration::from_micros(20);
        let longest = if watched.waits() { MAX_BLOCKING_SLEEP } else { MAX_SLEEP };
        let DeviceWork { work, done: end } = &watched;
        let entered = end.context().push();
        let failed = loop {
            if let Err(error) = &entered {
                break Some(error.clone());
            }
            match end.is_complete() {
                Ok(true) => break None,
                Ok(false) => {}
                Err(error) => break Some(error),
            }
            if let Some(error) = shared.failure().or_else(|| shared.region.lost_rank()).or_else(|| overdue(work)) {
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
        return drain_failed(watched, calls, rescue, &error);
    }
}

/// After a failure: lets the GPU's streams go on until the team ends, again and again, because one of them may undo it for
/// others. How long they take is not known: what a program has enqueued before comes first.
fn drain_failed(failed: DeviceWork, calls: &Receiver<DeviceWork>, rescue: &dyn Fn(), error: &Error) {
    let since = Instant::now();
    let mut left = vec![failed];
    loop {
        rescue();
        // The tensors are their caller's again when the GPU is at work on them no more.
        let over = |watched: &DeviceWork| since.elapsed() > TEARDOWN_TIMEOUT || watched.has_ended();
        let (ended, going): (Vec<_>, Vec<_>) = left.into_iter().partition(over);
        ended.into_iter().for_each(|watched| watched.finish(Err(error.clone())));
        left = going;
        match calls.recv_timeout(MAX_SLEEP) {
            Ok(watched) => left.push(watched),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if left.is_empty() => return,
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(MAX_SLEEP),
        }
    }
}

fn overdue(work: &Work) -> Option<Error> {
    let waited = work.record.submitted.elapsed();
    work.timeout.filter(|&timeout| waited >= timeout).map(|_| {
        Error::Timeout(format!(
            "{} was not complete on the GPU after {:.1} s (DL_COMM_TIMEOUT_S)",
            work.call.full_name(),
            waited.as_secs_f64()
        ))
    })
}

impl Worker {
    /// This thread's chunks of a call on device memory that goes through the host.
    pub(super) fn share_on_device(&mut self, work: &Arc<Work>) -> Result<()> {
        let (index, channels) = (self.index, work.call.channels());
        let settings = self.shared.settings.device;
        let mut staging = self.staging.take();
        let done = self.run_checked(work, |channel, work, wait_ctx| {
            let staging = match (&mut staging, work.call.producer()) {
                (Some(staging), _) => staging,
                (place, Some(producer)) => place.insert(StagingPipeline::new(channel, producer.context(), settings)?),
                (None, None) => return Err(Error::Internal("a call on host memory has no GPU".into())),
            };
            let chunks = (index..work.call.layout.chunks()).step_by(channels);
            staging.run(channel, &work.call, chunks, wait_ctx).map_err(out_of_step)
        });
        // Once all have been told.
        if let (Err(_), Some(staging)) = (&done, &staging)
            && work.call.producer().is_some_and(|producer| producer.blocks_host())
        {
            staging.drain();
        }
        self.staging = staging;
        done
    }
}
