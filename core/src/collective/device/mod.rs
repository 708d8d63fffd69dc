//! Calls on device memory: the same team, the same matching, other ways for the data.
//!
//! A call begins as every other does, with a step in which the ranks see each other's signatures; nothing of its data is in
//! it. Then it takes the team's path ([`path`]), on which the ranks agree at the first such call:
//! - each rank its own GPU and NCCL there: NCCL ([`ring`]);
//! - the ranks of one host, by memory that they see in each other ([`direct`]);
//! - the ranks of several hosts the same way within a host, and in slices through host memory between hosts ([`across`]);
//! - else through host memory, in chunks, by the averages of the host ([`staged`]).
//!
//! Where nothing goes through the host, it enqueues and does not wait: a call ends for its caller when the caller's stream will
//! see the result. [`across`] and [`staged`] wait for the GPU to come to each chunk.
//! Thread rule: [`DevicePath`] is the lead's; a [`StagingPipeline`] is one thread's.

mod batch;
mod ipc;
mod ipc_flags;
mod ipc_multi_host;
mod ipc_peers;
mod nccl;
mod path;
mod shm_allgather;
mod staged;

pub use path::{Path, PathSetting, SyncMode};
pub use staged::StagingPipeline;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::text_allgather::{self, RankTexts};
use super::{Call, Channel, Op};
use crate::error::{Error, Result};
use crate::topology::Topology;
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, CallerStream, Context, Event, Stream, nccl_version};
use ipc::IpcPath;
use ipc_multi_host::{MultiHostIpc, ShardOwner};
use ipc_peers::IpcPeers;
use nccl::NcclPath;
use path::GpuCapabilities;

/// How calls on device memory are carried, as the environment says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSettings {
    /// `DL_COMM_GPU_PATH`.
    pub path: PathSetting,
    /// `DL_COMM_PIPELINE_CHUNK_KB`, in bytes: the most that goes between host and GPU at a time. For a team a multiple of
    /// [`crate::layout::ALIGN`], and, where it has several hosts, no more than a slot has.
    pub chunk: usize,
    /// `DL_COMM_NUM_CUDA_STREAMS`: a thread's streams for each direction.
    pub streams: usize,
}

impl Default for DeviceSettings {
    fn default() -> DeviceSettings {
        DeviceSettings { path: PathSetting::Auto, chunk: 2 << 20, streams: 1 }
    }
}

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

/// What came of a call.
pub enum DeviceResult {
    /// It is enqueued; all is done when the event comes.
    Enqueued(Event),
    /// It has to go through host memory, on all ranks.
    FallBackToHost,
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
            let decide = |texts: &RankTexts| path::choose_path(texts, settings.path, &topology).encode();
            let text = text_allgather::allgather_merge(channel, &facts.encode(), wait_ctx, decide)?;
            let decision = path::PathChoice::decode(&text)?;
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
                Path::Ipc(wait) => IpcPeers::new(channel, &context, wait, ipc::BOUNCE_BYTES, Ok(()), wait_ctx)?
                    .map(|(peers, ())| PathState::Ipc(Box::new(IpcPath::new(peers, decision.own_gpus)))),
                Path::IpcStaged(wait) => {
                    let driver = ShardOwner::new(&context, &topology, settings.chunk);
                    let bounce = (ipc_multi_host::NUM_BUFFERS * settings.chunk).max(ipc::BOUNCE_BYTES);
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
        let wait = self.path.wait().map(|wait| match wait {
            SyncMode::Stream => "stream",
            SyncMode::Host => "host",
        });
        json!({
            "path": self.path.name(),
            "why": self.reason,
            "wait": wait,
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
        end(call, stream).ok()
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
    end(call, stream)
}

/// Who makes and awaits the tensors of `call`, which is on device memory.
fn producer(call: &Call) -> Result<&Arc<CallerStream>> {
    call.producer().ok_or_else(|| Error::Internal("a call on host memory has no GPU".into()))
}

/// Lets `stream` wait for what the call's tensors wait for.
fn wait_inputs(call: &Call, stream: &Stream) -> Result<()> {
    stream.wait(producer(call)?.ready())
}

/// Lets what waits for the call's tensors wait for what `stream` has been given.
fn end(call: &Call, stream: &Stream) -> Result<Event> {
    let end = stream.record()?;
    producer(call)?.make_caller_wait(&end)?;
    Ok(end)
}

/// The local rank on this host that a broadcast is from.
fn root(call: &Call, topology: &Topology) -> Option<usize> {
    match call.op {
        Op::Broadcast { root } => {
            topology.host_and_local_rank(root).filter(|(host, _)| *host == topology.host()).map(|(_, local)| local)
        }
        Op::Allreduce | Op::Barrier => None,
    }
}

/// How long it looks at the GPU, and lets other threads run between two looks, before it sleeps: a sleep takes some 70 us at
/// least, which is as long as a short call.
const SPIN_TIME: Duration = Duration::from_micros(300);
/// The longest sleep between two looks.
const MAX_SLEEP: Duration = Duration::from_millis(1);

/// Waits on the host until `event` has come.
///
/// # Errors
/// Those of the driver, and when the wait context ends.
pub(super) fn wait_event(event: &Event, wait_ctx: &WaitContext<'_>) -> Result<()> {
    poll(|| event.is_complete(), &|| "the GPU".to_owned(), wait_ctx)
}

/// Waits until `done` says so, for `whom`.
fn poll(done: impl Fn() -> Result<bool>, whom: &dyn Fn() -> String, wait_ctx: &WaitContext<'_>) -> Result<()> {
    let mut nap = Duration::from_micros(20);
    let since = Instant::now();
    let mut asked = since;
    while !done()? {
        if since.elapsed() < SPIN_TIME {
            std::thread::yield_now();
            continue;
        }
        std::thread::sleep(nap);
        nap = (nap * 2).min(MAX_SLEEP);
        if asked.elapsed() > MAX_SLEEP {
            wait_ctx.check(Duration::ZERO, whom)?;
            asked = Instant::now();
        }
    }
    Ok(())
}

/// How long the end of a team, or of a call that has failed, waits for what its GPU is at.
pub(crate) const TEARDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether `done` says so within `time`.
fn poll_until(time: Duration, done: impl Fn() -> bool) -> bool {
    let since = Instant::now();
    while !done() {
        if since.elapsed() > time {
            return false;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    true
}

/// Whether `stream` has done all that it was given, or does so soon.
fn is_idle(stream: &Stream) -> bool {
    stream.record().is_ok_and(|event| poll_until(TEARDOWN_TIMEOUT, || event.is_complete().unwrap_or(true)))
}
