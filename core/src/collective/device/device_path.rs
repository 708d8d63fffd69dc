//! The path of a group's calls on device memory.

use std::sync::Arc;

use serde_json::{Value, json};

use super::ipc::{BOUNCE_BYTES, IpcPath};
use super::ipc_multi_host::{MultiHostIpc, NUM_BUFFERS, ShardOwner};
use super::ipc_peers::IpcPeers;
use super::nccl::NcclPath;
use super::path::{GpuCapabilities, choose_path};
use super::settings::{DeviceSettings, Path, PathSetting, SyncMode};
use super::streams::{DeviceResult, producer, signal_outputs, wait_inputs};
use crate::collective::call::Call;
use crate::collective::channel::Channel;
use crate::collective::text_allgather::allgather_merge;
use crate::error::{Error, Result};
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, Context, Event, Stream, nccl_version};

/// What a team has for calls on device memory, once it has had one.
pub struct DevicePath {
    context: Arc<Context>,
    path: Path,
    reason: String,
    state: PathState,
}

enum PathState {
    SingleRank(Stream),
    Nccl(Box<NcclPath>),
    Ipc(Box<IpcPath>),
    IpcStaged(Box<MultiHostIpc>),
    Staged,
}

impl DevicePath {
    /// Finds the path of a team with the other ranks, all of which have made `call`.
    ///
    /// # Errors
    /// [`Error::System`], the same on all ranks, when one of them cannot use its GPU, or not in the way that was asked for;
    /// those of the transports.
    pub fn new(
        channel: &mut Channel,
        call: &Call,
        settings: DeviceSettings,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<DevicePath> {
        let context = Arc::clone(producer(call)?.context());
        let mut facts = GpuCapabilities::gather(&context);
        let topology = Arc::clone(&channel.topology);
        let (decision, made) = loop {
            let decide = |facts: Vec<GpuCapabilities>| choose_path(&facts, settings.path, &topology);
            let decision = allgather_merge(channel, &facts, wait_ctx, decide)?.checked()?;
            let made = match decision.path {
                Path::SingleRank => Ok(PathState::SingleRank(Stream::new(&context)?)),
                Path::Staged => Ok(PathState::Staged),
                Path::Nccl => match NcclPath::new(channel, &context, wait_ctx)? {
                    Ok(ring) => Ok(PathState::Nccl(Box::new(ring))),
                    Err(why) => {
                        // On one rank at least. Without NCCL there is another path, or a refusal.
                        if let Some(why) = why {
                            facts.lacks_nccl(&why);
                        }
                        continue;
                    }
                },
                Path::Ipc(wait) => IpcPeers::new(channel, &context, wait, BOUNCE_BYTES, Ok(()), wait_ctx)?
                    .map(|(peers, ())| PathState::Ipc(Box::new(IpcPath::new(peers, decision.own_gpus)))),
                Path::IpcStaged(wait) => {
                    let driver = ShardOwner::new(&context, &topology, settings.chunk);
                    let bounce = (NUM_BUFFERS * settings.chunk).max(BOUNCE_BYTES);
                    IpcPeers::new(channel, &context, wait, bounce, driver, wait_ctx)?.map(|(peers, driver)| {
                        PathState::IpcStaged(Box::new(MultiHostIpc::new(peers, driver, settings.chunk)))
                    })
                }
            };
            break (decision, made);
        };
        let (path, why, way) = match made {
            Ok(PathState::Ipc(direct)) => (Path::Ipc(direct.wait()), decision.reason, PathState::Ipc(direct)),
            Ok(PathState::IpcStaged(across)) => {
                (Path::IpcStaged(across.wait()), decision.reason, PathState::IpcStaged(across))
            }
            Ok(way) => (decision.path, decision.reason, way),
            // All ranks know of it.
            Err(why) if settings.path == PathSetting::Auto => (Path::Staged, why, PathState::Staged),
            Err(why) => return Err(Error::Invalid(format!("DL_COMM_GPU_PATH is ipc, but {why}"))),
        };
        Ok(DevicePath { context, path, reason: why, state: way })
    }

    /// What `dl_comm_describe` tells of it.
    pub fn about(&self) -> Value {
        let sync = self.path.wait().map(|wait| match wait {
            SyncMode::Stream => "stream",
            SyncMode::Host => "host",
        });
        json!({
            "path": self.path.name(),
            "reason": self.reason,
            "sync": sync,
            "gpu": self.context.ordinal(),
            "gpu_name": self.context.name(),
            "gpu_uuid": self.context.uuid(),
            "mps": mps(),
            "nccl": nccl_version().ok().filter(|_| self.path == Path::Nccl),
        })
    }

    /// The bytes of device memory that it has taken.
    pub fn held(&self) -> usize {
        match &self.state {
            PathState::Ipc(direct) => direct.held(),
            PathState::IpcStaged(across) => across.held(),
            PathState::Nccl(ring) => ring.held(),
            PathState::SingleRank(_) | PathState::Staged => 0,
        }
    }

    /// How many calls went in chunks where the ranks see each other's memory, because that of one of them could not be opened.
    pub fn in_chunks(&self) -> usize {
        match &self.state {
            PathState::Ipc(direct) => direct.in_chunks(),
            PathState::IpcStaged(_) | PathState::Nccl(_) | PathState::SingleRank(_) | PathState::Staged => 0,
        }
    }

    /// Carries out `call`, on which the ranks agree, as far as this thread can alone.
    ///
    /// # Errors
    /// Those of the driver and of the transports: the ranks are then out of step.
    pub fn run(&mut self, channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<DeviceResult> {
        let _entered = self.context.push()?;
        match &mut self.state {
            PathState::SingleRank(stream) => alone(call, stream).map(DeviceResult::Enqueued),
            PathState::Nccl(ring) => ring.run(call, wait_ctx),
            PathState::Ipc(direct) => direct.run(channel, call, wait_ctx),
            PathState::IpcStaged(across) => across.run(channel, call, wait_ctx),
            PathState::Staged => Ok(DeviceResult::FallBackToHost),
        }
    }

    /// The end of what this thread has enqueued so far, for which what waits for the tensors of `call` then waits; `None` where
    /// the GPU does not tell any more, and when other threads carry such calls.
    pub fn signal_outputs(&self, call: &Call) -> Option<Event> {
        let stream = match &self.state {
            PathState::SingleRank(stream) => stream,
            PathState::Nccl(ring) => ring.stream(),
            PathState::Ipc(direct) => direct.stream(),
            PathState::IpcStaged(across) => across.stream(),
            PathState::Staged => return None,
        };
        let _entered = self.context.push().ok()?;
        signal_outputs(call, stream).ok()
    }

    /// What lets the GPU of this rank go on after a failure of another: a closure for the thread that watches over calls.
    pub fn release_streams(&self) -> Arc<dyn Fn() + Send + Sync> {
        match &self.state {
            PathState::Nccl(ring) => ring.release_streams(),
            PathState::Ipc(direct) => direct.release_streams(),
            PathState::IpcStaged(across) => across.release_streams(),
            PathState::SingleRank(_) | PathState::Staged => Arc::new(|| {}),
        }
    }
}

/// Whether NVIDIA's Multi-Process Service runs, under which the kernels of ranks that share a GPU run side by side instead of by
/// turns. The ways are the same: no kernel waits for another process.
fn mps() -> bool {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into());
    std::path::Path::new(&folder).join("control").exists()
}

/// The average over one rank.
fn alone(call: &Call, stream: &Stream) -> Result<Event> {
    wait_inputs(call, stream)?;
    for tensor in call.tensors(0).iter().filter(|tensor| !tensor.buffer.is_in_place()) {
        let (read, written) = tensor.buffer.byte_ranges();
        // SAFETY: the memory is the call's.
        unsafe { stream.copy(written.start as Address, read.start as Address, read.len()) }?;
    }
    signal_outputs(call, stream)
}
