//! Calls on device memory in a group: how the group's threads run them.
//!
//! Such a call completes for its caller once it is enqueued, possibly long before the GPU has run it. If it blocks the
//! host, it completes with the GPU's work. A [`Monitor`] watches over the work.
//! Thread rule: [`DeviceExecutor`] belongs to who leads; a [`StagingPipeline`] belongs to its worker.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use super::call_limits::CallLimits;
use super::monitor::{Enqueued, Monitor, Progress};
use super::state::GroupState;
use super::work::Work;
use super::worker::Worker;
use crate::collective::Call;
use crate::collective::device::{DevicePath, DeviceResult, NcclPath, StagingPipeline, unrecoverable};
use crate::error::{Error, Result, guard};
use crate::group_config::GroupConfig;
use crate::lock::lock;
use crate::transport::gpu::{LaunchOrder, Place};

/// What the leader needs for calls on device memory.
pub(super) struct DeviceExecutor {
    // Ends before the path does.
    monitor: Monitor,
    path: DevicePath,
}

impl DeviceExecutor {
    /// Runs a call on which the ranks agree, or leaves it to the thread that starts the calls before it on the GPU: `place`
    /// is its place among them. False if it must go through the host, on all ranks. The first call chooses the path.
    pub fn run(
        executor: &mut Option<DeviceExecutor>,
        worker: &mut Worker,
        work: &Arc<Work>,
        place: Option<Place>,
    ) -> Result<bool> {
        if executor.is_none() {
            *executor = Some(DeviceExecutor::start(worker, work)?);
        }
        let Some(DeviceExecutor { path, monitor }) = executor else {
            return Err(Error::Internal("there is no GPU for a call on device memory".into()));
        };
        if let Some(nccl) = path.nccl(&work.call) {
            let (path, shared, work) = (Arc::clone(nccl), Arc::clone(&worker.shared), Arc::clone(work));
            let progress = worker.run_checked(&work, |_, _, _| monitor.watch(&work))?;
            let place = place.ok_or_else(|| Error::Internal("a call has no place among those of its GPU".into()))?;
            work.add_parts(1);
            let launch = NcclLaunch { path, shared, work, progress };
            place.launch(Box::new(move || launch.run()));
            return Ok(true);
        }
        // The other paths wait for other ranks on the host only, before they enqueue what waits for them on the GPU.
        drop(place);
        let result = worker.run_checked(work, |channel, _, wait_ctx| {
            let result = path.run(channel, &work.call, wait_ctx).map_err(unrecoverable)?;
            let DeviceResult::Enqueued(end) = result else { return Ok(false) };
            monitor.watch(work).map(|progress| progress.set(Enqueued::All(end))).map(|_once| true)
        });
        if let Some(bytes) = path.device_bytes() {
            worker.shared.gpu.device_bytes.store(bytes, Ordering::Relaxed);
        }
        worker.shared.gpu.calls_in_chunks.store(path.in_chunks(), Ordering::Relaxed);
        if result.is_err() {
            path.stream_release().iter().for_each(|streams| streams.release());
            // Part of it may be enqueued: the caller gets the tensors back once the GPU no longer uses them.
            if let Some(end) = path.signal_outputs(&work.call) {
                let _once = monitor.watch(work)?.set(Enqueued::Part(Some(end)));
            }
        }
        result
    }

    /// Whether the GPU runs `call` after all earlier ones that this is true for, in whatever order the caller's streams do.
    pub fn keeps_order(&self, call: &Call) -> bool {
        self.path.nccl(call).is_some()
    }

    /// The calls that have not started on its GPU.
    pub fn launches(&self) -> &Arc<LaunchOrder> {
        &self.path.context().launches
    }

    fn start(worker: &mut Worker, work: &Arc<Work>) -> Result<DeviceExecutor> {
        let GroupConfig { device, selection, .. } = worker.shared.settings;
        let path = worker.run_checked(work, |channel, work, wait_ctx| {
            DevicePath::new(channel, &work.call, device, &selection, wait_ctx)
        })?;
        worker.shared.gpu.set_path(&path);
        let shared = Arc::clone(&worker.shared);
        let launches = &path.context().launches;
        let monitor = worker.run_checked(work, |_, _, _| Monitor::start(&shared, path.stream_release(), launches))?;
        Ok(DeviceExecutor { monitor, path })
    }
}

/// A call for NCCL on which the ranks have agreed. One of its parts completes with the launch.
struct NcclLaunch {
    path: Arc<Mutex<NcclPath>>,
    shared: Arc<GroupState>,
    work: Arc<Work>,
    progress: Progress,
}

impl NcclLaunch {
    /// Enqueues it. On any thread, as the calls before it may have been late.
    fn run(self) {
        let NcclLaunch { path, shared, work, progress } = self;
        let limits = CallLimits { work: Arc::clone(&work), shared: Arc::clone(&shared) };
        let enqueued = match shared.failure() {
            Some(error) => Err(error),
            None => guard(|| lock(&path).run(&work.call, &limits.wait_context()).map_err(unrecoverable)),
        };
        let path = lock(&path);
        shared.gpu.device_bytes.store(path.device_bytes(), Ordering::Relaxed);
        let (enqueued, result) = match enqueued {
            Ok(_) if work.call.producer().is_some_and(|producer| producer.is_captured()) => (Enqueued::InGraph, Ok(())),
            Ok(end) => (Enqueued::All(end), Ok(())),
            Err(error) => {
                shared.fail(&error);
                // The monitor may have ended the communicator meanwhile: the reason is what counts.
                let error = shared.failure().unwrap_or(error);
                path.stream_release().release();
                (Enqueued::Part(path.signal_outputs(&work.call)), Err(error))
            }
        };
        drop(path);
        let _once = progress.set(enqueued);
        work.finish(result);
    }
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
