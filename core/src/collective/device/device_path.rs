//! The path of a group's calls on device memory.

use std::sync::{Arc, Mutex, Once};

use serde_json::{Value, json};

use super::ipc::{IpcPath, MIN_BOUNCE_BYTES, bounce_bytes, one_shot_max};
use super::ipc_multi_host::{MultiHostIpc, NUM_BUFFERS, ShardOwner};
use super::ipc_peers::IpcPeers;
use super::nccl::NcclPath;
use super::path::{GpuCapabilities, choose_path, mps};
use super::release::StreamRelease;
use super::settings::{DeviceSettings, Path, PathSetting};
use super::streams::{DeviceResult, producer, signal_outputs, wait_inputs};
use crate::collective::call::Call;
use crate::collective::channel::Channel;
use crate::collective::selection::{Limit, Selection};
use crate::collective::value_allgather::allgather_merge;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::log::log_line;
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, Context, Event, Stream, TAKE_TURNS, has_partial_kernel, nccl_version};

/// The resources of a group for calls on device memory, created by its first such call.
pub struct DevicePath {
    context: Arc<Context>,
    path: Path,
    reason: String,
    /// Whether ranks share a GPU whose kernels take turns.
    takes_turns: bool,
    /// Shorter calls go through host memory: copies do not wait for a turn.
    staged_below: usize,
    state: PathState,
}

enum PathState {
    SingleRank(Stream),
    Nccl(Arc<Mutex<NcclPath>>),
    Ipc(Box<IpcPath>),
    IpcStaged(Box<MultiHostIpc>),
    Staged,
}

impl DevicePath {
    /// Agrees on a path with the other ranks, all of which run `call`. `selection`: at which lengths calls take another
    /// one.
    ///
    /// # Errors
    /// [`Error::System`] or [`Error::Invalid`], the same on all ranks, if one of them cannot use its GPU or the
    /// requested path; those of the transports.
    pub fn new(
        channel: &mut Channel,
        call: &Call,
        settings: DeviceSettings,
        selection: &Selection,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<DevicePath> {
        let context = Arc::clone(producer(call)?.context());
        let mut capabilities = GpuCapabilities::gather(&context);
        let topology = Arc::clone(&channel.topology);
        let (choice, state) = loop {
            let choose = |capabilities: Vec<GpuCapabilities>| choose_path(&capabilities, settings.path, &topology);
            let choice = allgather_merge(channel, &capabilities, wait_ctx, choose)?.checked()?;
            let state = match choice.path {
                Path::SingleRank => Ok((choice.path, PathState::SingleRank(Stream::new(&context)?))),
                Path::Staged => Ok((choice.path, PathState::Staged)),
                Path::Nccl => match NcclPath::new(channel, &context, selection, wait_ctx)? {
                    Ok(path) => Ok((choice.path, PathState::Nccl(Arc::new(Mutex::new(path))))),
                    Err(reason) => {
                        // At least one rank lacks NCCL: choose again without it.
                        if let Some(reason) = reason {
                            capabilities.lacks_nccl(&reason);
                        }
                        continue;
                    }
                },
                Path::Ipc(sync) => {
                    let one_shot_max = one_shot_max(selection, topology.size());
                    let bounce = bounce_bytes(one_shot_max);
                    let opened = IpcPeers::new(channel, &context, sync, bounce, Ok(()), wait_ctx)?;
                    match opened {
                        Ok((peers, ())) => {
                            let (sync, path) = (peers.sync, IpcPath::new(peers, one_shot_max, choice.own_gpus)?);
                            Ok((Path::Ipc(sync), PathState::Ipc(Box::new(path))))
                        }
                        Err(reason) => Err(reason),
                    }
                }
                Path::IpcStaged(sync) => {
                    let shard_owners = ShardOwner::all(&context, &topology, settings.chunk);
                    let bounce = (NUM_BUFFERS * settings.chunk).max(MIN_BOUNCE_BYTES);
                    let opened = IpcPeers::new(channel, &context, sync, bounce, shard_owners, wait_ctx)?;
                    match opened {
                        Ok((peers, shard_owners)) => {
                            let (sync, path) = (peers.sync, MultiHostIpc::new(peers, shard_owners, settings.chunk)?);
                            Ok((Path::IpcStaged(sync), PathState::IpcStaged(Box::new(path))))
                        }
                        Err(reason) => Err(reason),
                    }
                }
            };
            break (choice, state);
        };
        let (path, reason, state) = match state {
            Ok((path, state)) => (path, choice.reason, state),
            // All ranks have this error.
            Err(reason) if settings.path == PathSetting::Auto => (Path::Staged, reason, PathState::Staged),
            Err(reason) => return Err(Error::Invalid(format!("DL_COMM_GPU_PATH is ipc, but {reason}"))),
        };
        let takes_turns = choice.takes_turns;
        if takes_turns && topology.rank() == 0 {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| log_line(TAKE_TURNS));
        }
        let by_length = takes_turns && settings.path == PathSetting::Auto && matches!(path, Path::Ipc(_));
        let staged_below = if by_length { selection.limit(Limit::IpcHostMemory) } else { 0 };
        Ok(DevicePath { context, path, reason, takes_turns, staged_below, state })
    }

    /// The JSON for `dl_comm_describe`.
    pub fn describe(&self) -> Value {
        json!({
            "path": self.path.name(),
            "reason": self.reason,
            "sync": self.path.sync(),
            "gpu": self.context.ordinal,
            "gpu_name": self.context.name,
            "gpu_uuid": self.context.uuid,
            "mps": mps(),
            "advice": self.takes_turns.then_some(TAKE_TURNS),
            "staged_below": self.staged_below,
            "nccl": nccl_version().ok().filter(|_| self.path == Path::Nccl),
        })
    }

    /// The context of the GPU.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Bytes of device memory in use; `None` for [`DevicePath::nccl`].
    pub fn device_bytes(&self) -> Option<usize> {
        match &self.state {
            PathState::Ipc(path) => Some(path.device_bytes()),
            PathState::IpcStaged(path) => Some(path.device_bytes()),
            PathState::SingleRank(_) | PathState::Staged => Some(0),
            PathState::Nccl(_) => None,
        }
    }

    /// The number of calls that ran in chunks because a rank's memory could not be opened with GPU IPC.
    pub fn in_chunks(&self) -> usize {
        match &self.state {
            PathState::Ipc(path) => path.calls_in_chunks,
            PathState::IpcStaged(_) | PathState::Nccl(_) | PathState::SingleRank(_) | PathState::Staged => 0,
        }
    }

    /// Whether it copies all calls that do not run in chunks to host memory; the same on all ranks.
    pub fn copies_others(&self) -> bool {
        match &self.state {
            PathState::IpcStaged(_) | PathState::Staged => true,
            PathState::Ipc(_) | PathState::Nccl(_) | PathState::SingleRank(_) => false,
        }
    }

    /// NCCL, if it runs `call`; its calls start in the order of their submission to the GPU ([`Context::launches`]).
    pub fn nccl(&self, call: &Call) -> Option<&Arc<Mutex<NcclPath>>> {
        match &self.state {
            PathState::Nccl(path) if NcclPath::runs(call) => Some(path),
            _ => None,
        }
    }

    /// Runs `call`, on which the ranks agree, as far as this thread alone can. It is none for [`DevicePath::nccl`].
    pub fn run(&mut self, channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<DeviceResult> {
        let _guard = self.context.push()?;
        // Of pairs, each rank knows only its own lengths.
        let is_short = !call.agrees_on_length() && call.layout.total() < self.staged_below;
        if self.copies_others() && !call.op.runs_in_device_chunks() || is_short {
            return Ok(DeviceResult::FallBackToHost);
        }
        match &mut self.state {
            PathState::SingleRank(_) if !call.reductions().all(|reduction| reduction.op.keeps_single_input()) => {
                Ok(DeviceResult::FallBackToHost)
            }
            PathState::SingleRank(stream) => run_single_rank(call, stream).map(DeviceResult::Enqueued),
            PathState::IpcStaged(_) if !call.reductions().all(has_partial_kernel) => Ok(DeviceResult::FallBackToHost),
            PathState::Ipc(path) => path.run(channel, call, wait_ctx),
            PathState::IpcStaged(path) => path.run(channel, call, wait_ctx),
            PathState::Nccl(_) | PathState::Staged => Ok(DeviceResult::FallBackToHost),
        }
    }

    /// Makes the caller's stream wait for the work that [`DevicePath::run`] has enqueued. `None` if the driver fails, and
    /// for paths that use other threads.
    pub fn signal_outputs(&self, call: &Call) -> Option<Event> {
        let stream = match &self.state {
            PathState::SingleRank(stream) => stream,
            PathState::Ipc(path) => &path.peers.stream,
            PathState::IpcStaged(path) => &path.peers.stream,
            PathState::Nccl(_) | PathState::Staged => return None,
        };
        let _guard = self.context.push().ok()?;
        signal_outputs(call, stream).ok()
    }

    /// Unblocks this rank's streams after another rank has failed. `None` if they wait for no other rank.
    pub fn stream_release(&self) -> Option<Arc<dyn StreamRelease>> {
        match &self.state {
            PathState::Nccl(path) => Some(lock(path).stream_release()),
            PathState::Ipc(path) => Some(path.peers.stream_release()),
            PathState::IpcStaged(path) => Some(path.peers.stream_release()),
            PathState::SingleRank(_) | PathState::Staged => None,
        }
    }
}

/// A call with a single rank, whose result is its input.
fn run_single_rank(call: &Call, stream: &Stream) -> Result<Event> {
    wait_inputs(call, stream)?;
    for (index, tensor) in call.tensors(0).iter().enumerate() {
        let (read, written) = (call.sent(index, 0, 0), call.received(index, 0, 0));
        let (read, written) = (tensor.buffer.source_bytes(read), tensor.buffer.destination_bytes(written));
        if read.start != written.start && !read.is_empty() {
            // SAFETY: the call owns the memory.
            unsafe { stream.copy(written.start as Address, read.start as Address, read.len()) }?;
        }
    }
    signal_outputs(call, stream)
}
