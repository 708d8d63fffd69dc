//! Calls on device memory in a group: how the group's threads run them, and monitoring of enqueued work.
//!
//! Such a call completes for its caller once it is enqueued, possibly long before the GPU has run it. If it blocks the
//! host, it completes with the GPU's work. A separate thread monitors the work. If a rank is lost or the deadline
//! passes, that thread fails the group and unblocks the GPU's streams, so that no stream waits forever.
//! Thread rule: [`DeviceExecutor`] belongs to the executor; a [`StagingPipeline`] belongs to its worker.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::state::GroupState;
use super::work::Work;
use super::worker::Worker;
use crate::affinity::unbind;
use crate::collective::device::{DevicePath, DeviceResult, StagingPipeline, TEARDOWN_TIMEOUT, unrecoverable};
use crate::error::{Error, Result};
use crate::log::log_line;
use crate::transport::gpu::Event;

/// Maximum sleep of the monitor between two checks, while a caller is blocked and otherwise.
const MAX_BLOCKING_SLEEP: Duration = Duration::from_micros(200);
const MAX_SLEEP: Duration = Duration::from_millis(10);

/// The lead thread's resources for calls on device memory.
pub(super) struct DeviceExecutor {
    path: DevicePath,
    /// Sends calls to the monitor; closed before the thread is joined.
    monitor_queue: Option<Sender<DeviceWork>>,
    monitor: Option<JoinHandle<()>>,
}

/// An enqueued call, and the event at its end.
struct DeviceWork {
    work: Arc<Work>,
    done: Event,
}

impl DeviceWork {
    /// If the call blocks the host, one of its parts completes with this.
    fn new(work: &Arc<Work>, end: Event) -> DeviceWork {
        let monitored = DeviceWork { work: Arc::clone(work), done: end };
        if monitored.blocks_host() {
            work.add_parts(1);
        }
        monitored
    }

    fn blocks_host(&self) -> bool {
        self.work.call.producer().is_some_and(|producer| producer.blocks_host())
    }

    /// Whether the GPU has finished, or the driver fails.
    fn has_ended(&self) -> bool {
        self.done.context().push().and_then(|_guard| self.done.is_complete()).unwrap_or(true)
    }

    fn finish(self, result: Result<()>) {
        if self.blocks_host() {
            self.work.finish(result);
        }
    }
}

impl DeviceExecutor {
    /// Runs a call on which the ranks agree. False if it must go through the host, on all ranks. The first call chooses the
    /// path.
    pub fn run(executor: &mut Option<DeviceExecutor>, worker: &mut Worker, work: &Arc<Work>) -> Result<bool> {
        if executor.is_none() {
            *executor = Some(DeviceExecutor::start(worker, work)?);
        }
        let Some(DeviceExecutor { path, monitor_queue, .. }) = executor else {
            return Err(Error::Internal("there is no GPU for a call on device memory".into()));
        };
        let result = worker.run_checked(work, |channel, _, wait_ctx| {
            let result = path.run(channel, &work.call, wait_ctx).map_err(unrecoverable)?;
            let DeviceResult::Enqueued(end) = result else { return Ok(false) };
            start_monitoring(monitor_queue.as_ref(), work, end).map(|()| true)
        });
        worker.shared.device_bytes.store(path.device_bytes(), Ordering::Relaxed);
        worker.shared.calls_in_chunks.store(path.in_chunks(), Ordering::Relaxed);
        if result.is_err() {
            path.release_streams()();
            // Part of it may be enqueued: the caller gets the tensors back once the GPU no longer uses them.
            if let Some(end) = path.signal_outputs(&work.call) {
                start_monitoring(monitor_queue.as_ref(), work, end)?;
            }
        }
        result
    }

    fn start(worker: &mut Worker, work: &Arc<Work>) -> Result<DeviceExecutor> {
        let settings = worker.shared.settings.device;
        let path = worker
            .run_checked(work, |channel, work, wait_ctx| DevicePath::new(channel, &work.call, settings, wait_ctx))?;
        // Only the first call sets it.
        let _first = worker.shared.gpu_info.set(path.describe());
        worker.shared.copies_others.store(path.copies_others(), Ordering::Relaxed);
        let (sender, receiver) = channel();
        let (shared, release_streams) = (Arc::clone(&worker.shared), path.release_streams());
        let builder = Builder::new().name(format!("{}.gpu", worker.shared.config.key.name().thread_label()));
        let monitor = worker.run_checked(work, |_, _, _| {
            let spawned = builder.spawn(move || {
                if let Err(error) = unbind() {
                    log_line(&error.to_string());
                }
                poll_device_work(&shared, &receiver, &*release_streams);
            });
            spawned.map_err(Error::no_thread)
        })?;
        Ok(DeviceExecutor { path, monitor_queue: Some(sender), monitor: Some(monitor) })
    }
}

/// Hands a call to the monitor, which outlives the sender.
fn start_monitoring(monitor_queue: Option<&Sender<DeviceWork>>, work: &Arc<Work>, end: Event) -> Result<()> {
    let no_monitor = || Error::Internal("nobody watches over the GPU".into());
    let sent = monitor_queue.ok_or_else(no_monitor)?.send(DeviceWork::new(work, end));
    sent.map_err(|unsent| {
        unsent.0.finish(Err(no_monitor()));
        no_monitor()
    })
}

impl Drop for DeviceExecutor {
    fn drop(&mut self) {
        drop(self.monitor_queue.take());
        if self.monitor.take().is_some_and(|monitor| monitor.join().is_err()) {
            log_line("the watch over a team's GPU panicked");
        }
    }
}

/// Polls calls until the GPU has finished them.
fn poll_device_work(shared: &Arc<GroupState>, calls: &Receiver<DeviceWork>, release_streams: &dyn Fn()) {
    while let Ok(monitored) = calls.recv() {
        let mut sleep = Duration::from_micros(20);
        let max_sleep = if monitored.blocks_host() { MAX_BLOCKING_SLEEP } else { MAX_SLEEP };
        let DeviceWork { work, done: end } = &monitored;
        let guard = end.context().push();
        let failed = loop {
            if let Err(error) = &guard {
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
            std::thread::sleep(sleep);
            sleep = (2 * sleep).min(max_sleep);
        };
        drop(guard);
        let Some(error) = failed else {
            monitored.finish(Ok(()));
            continue;
        };
        shared.fail(&error);
        return drain_failed(monitored, calls, release_streams, &error);
    }
}

/// After a failure: unblocks the GPU's streams repeatedly until the group ends, because other ranks may undo it. The
/// time is unknown: earlier work of the program runs first.
fn drain_failed(failed: DeviceWork, calls: &Receiver<DeviceWork>, release_streams: &dyn Fn(), error: &Error) {
    let since = Instant::now();
    let mut pending = vec![failed];
    loop {
        release_streams();
        // The caller gets the tensors back once the GPU no longer uses them.
        let finished = |monitored: &DeviceWork| since.elapsed() > TEARDOWN_TIMEOUT || monitored.has_ended();
        let (ended, running): (Vec<_>, Vec<_>) = pending.into_iter().partition(finished);
        ended.into_iter().for_each(|monitored| monitored.finish(Err(error.clone())));
        pending = running;
        match calls.recv_timeout(MAX_SLEEP) {
            Ok(monitored) => pending.push(monitored),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if pending.is_empty() => return,
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(MAX_SLEEP),
        }
    }
}

fn overdue(work: &Work) -> Option<Error> {
    let waited = work.record.submitted.elapsed();
    work.deadline.is_over(waited).then(|| {
        Error::Timeout(format!(
            "{} was not complete on the GPU after {:.1} s ({})",
            work.call.full_name(),
            waited.as_secs_f64(),
            work.deadline.set_by
        ))
    })
}

impl Worker {
    /// Runs this thread's chunks of a call on device memory that goes through the host.
    pub(super) fn run_staged_chunks(&mut self, work: &Arc<Work>) -> Result<()> {
        let (index, channels) = (self.index, work.call.channels());
        let settings = self.shared.settings.device;
        let mut staging = self.staging.take();
        let done = self.run_checked(work, |channel, work, wait_ctx| {
            let staging = match (&mut staging, work.call.producer()) {
                (Some(staging), _) => staging,
                (staging, Some(producer)) => {
                    staging.insert(StagingPipeline::new(channel, producer.context(), settings)?)
                }
                (None, None) => return Err(Error::Internal("a call on host memory has no GPU".into())),
            };
            let chunks = (index..work.call.layout.chunks()).step_by(channels);
            staging.run(channel, &work.call, chunks, wait_ctx).map_err(unrecoverable)
        });
        // After all ranks have been notified.
        if let (Err(_), Some(staging)) = (&done, &staging)
            && work.call.producer().is_some_and(|producer| producer.blocks_host())
        {
            staging.drain();
        }
        self.staging = staging;
        done
    }
}
