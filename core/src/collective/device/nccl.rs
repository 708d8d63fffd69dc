//! The NCCL path, if every rank has its own GPU.
//!
//! Each group has one communicator. The tensors of a call form one NCCL group; small ones are fused in a bucket first;
//! NCCL divides the sum. NCCL chooses the order of addition and accumulates float16 and bfloat16 in their own types. So
//! the bits depend on the number of ranks and on NCCL's version (`DL_COMM_GPU_PATH` selects another path). Means of
//! integers and float64 accumulators differ from the core's, so those calls go through the host.
//! Thread rule: used by one thread; the closure of [`NcclPath::release_streams`] may run on any.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::batch::Launcher;
use super::streams::{DeviceResult, TEARDOWN_TIMEOUT, is_idle, poll, poll_until, signal_outputs, wait_inputs};
use crate::buffer::{Buffer, Tensor};
use crate::collective::call::{Call, lengths};
use crate::collective::channel::Channel;
use crate::collective::operation::Op;
use crate::collective::value_allgather::allgather_merge;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::reduce::{ReduceOp, Reduction};
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, Communicator, Context, DeviceBuffer, Stream, UniqueId};
use crate::wire_layout::{DtypeRun, WireLayout};

/// Tensors up to this size are fused if there are more than [`MIN_TO_FUSE`]: an NCCL operation for each costs more.
const FUSE_MAX_BYTES: usize = 256 << 10;
/// This many separate operations cost no more than the copies of a fusion.
const MIN_TO_FUSE: usize = 4;
/// Size of the bucket in bytes.
const BUCKET: usize = 16 << 20;

/// Progress of a communicator's creation on a rank, worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Start {
    Failed,
    Pending,
    Ready,
}

/// Maximum sleep between two checks.
const MAX_SLEEP: Duration = Duration::from_millis(10);

/// The resources of a rank for the NCCL path.
pub(super) struct NcclPath {
    pub stream: Stream,
    communicator: Arc<Communicator>,
    /// Allocated by the first fusion.
    bucket: Option<DeviceBuffer>,
    launcher: Launcher,
}

impl NcclPath {
    /// Creates the communicator of a group with an id from rank 0. If NCCL fails on a rank (MIG slices of one GPU, a
    /// small /dev/shm), no rank has a communicator. The inner error is the reason on this rank, if it failed here.
    pub fn new(
        channel: &mut Channel,
        context: &Arc<Context>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<std::result::Result<NcclPath, Option<String>>> {
        let _guard = context.push()?;
        let (rank, size) = (channel.topology.rank(), channel.topology.size());
        let local = if rank == 0 { UniqueId::new() } else { Ok(UniqueId([0; 128])) };
        let id = local.as_ref().map_or(Vec::new(), |id| id.0.to_vec());
        let id = allgather_merge(channel, &id, wait_ctx, |ids| ids.into_iter().next().unwrap_or_default())?;
        let Ok(id) = id.try_into().map(UniqueId) else {
            return Ok(Err(local.err().map(|error| error.detail().to_owned())));
        };
        let mut started = local.and_then(|_| Ok((Communicator::start(size, id, rank)?, Stream::new(context)?)));
        let mut state = started.as_ref().map(|_| false).map_err(Error::clone);
        let mut sleep = Duration::from_micros(100);
        loop {
            if let (Ok((communicator, _)), Ok(false)) = (&started, &state) {
                state = communicator.is_ready();
            }
            let local = match state {
                Ok(true) => Start::Ready,
                Ok(false) => Start::Pending,
                Err(_) => Start::Failed,
            };
            let all = allgather_merge(channel, &local, wait_ctx, |states| states.into_iter().min())?;
            match (all.unwrap_or(Start::Failed), started) {
                (Start::Ready, Ok((communicator, stream))) => {
                    let communicator = Arc::new(communicator);
                    let launcher = Launcher::new(context);
                    return Ok(Ok(NcclPath { stream, communicator, bucket: None, launcher }));
                }
                // Some rank has no communicator: drop this one.
                (Start::Failed | Start::Ready, _) => {
                    return Ok(Err(state.err().map(|error| error.detail().to_owned())));
                }
                (_, pending) => started = pending,
            }
            wait_ctx.check(Duration::ZERO, &|| "the other ranks in NCCL".to_owned())?;
            std::thread::sleep(sleep);
            sleep = (2 * sleep).min(MAX_SLEEP);
        }
    }

    /// Runs a call on which all ranks agree.
    pub fn run(&mut self, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<DeviceResult> {
        let float = |dtype| matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
        let fits = |Reduction { op, dtype, acc_f64, .. }: Reduction| {
            op == ReduceOp::Mean && float(dtype) && (!acc_f64 || dtype == DType::F64)
        };
        if !call.reductions().all(fits) {
            return Ok(DeviceResult::FallBackToHost);
        }
        let size = |index: usize| call.tensors(0)[index].buffer.byte_ranges().0.len();
        let (mut small, mut large): (Vec<usize>, Vec<usize>) =
            call.layout.tensors().partition(|&index| size(index) <= FUSE_MAX_BYTES);
        // The copies need kernels.
        if small.len() <= MIN_TO_FUSE || self.stream.context().kernels().is_err() {
            large.append(&mut small);
        }
        wait_inputs(call, &self.stream)?;
        self.group(call.op, large.iter().map(|&index| NcclBuffer::of(&call.tensors(0)[index].buffer)), wait_ctx)?;
        self.run_fused(call, &small, wait_ctx)?;
        signal_outputs(call, &self.stream).map(DeviceResult::Enqueued)
    }

    /// Bytes of device memory in use.
    pub fn device_bytes(&self) -> usize {
        self.launcher.device_bytes() + self.bucket.as_ref().map_or(0, DeviceBuffer::bytes)
    }

    /// Runs the tensors `small` through the bucket, in as many chunks as necessary.
    fn run_fused(&mut self, call: &Call, small: &[usize], wait_ctx: &WaitContext<'_>) -> Result<()> {
        if small.is_empty() {
            return Ok(());
        }
        let tensors: Vec<Tensor> = small.iter().map(|&index| call.tensors(0)[index].clone()).collect();
        let layout = WireLayout::new(&lengths(&tensors), DType::size, BUCKET);
        if self.bucket.is_none() {
            self.bucket = Some(DeviceBuffer::new(self.stream.context(), BUCKET)?);
        }
        let bucket = self.bucket.as_ref().map_or(0, DeviceBuffer::address);
        for chunk in 0..layout.chunks() {
            let all = 0..layout.chunk_len(chunk);
            self.launcher.batch.copies(layout.ranges(chunk, all.clone()), &tensors, all.len(), bucket, false);
            // SAFETY: the call owns the tensors, and the stream owns the bucket.
            unsafe { self.launcher.copy(&self.stream, wait_ctx) }?;
            let part = |run: DtypeRun| {
                let at = bucket + run.bytes.start as Address;
                NcclBuffer { from: at, to: at, count: run.bytes.len() / run.dtype.size(), dtype: run.dtype }
            };
            self.group(call.op, layout.runs(chunk, all.clone()).map(part), wait_ctx)?;
            let bytes = all.len();
            self.launcher.batch.copies(layout.ranges(chunk, all), &tensors, bytes, bucket, true);
            // SAFETY: as above.
            unsafe { self.launcher.copy(&self.stream, wait_ctx) }?;
        }
        Ok(())
    }

    /// Starts the operations for these buffers as one NCCL group.
    fn group(&self, op: Op, parts: impl Iterator<Item = NcclBuffer>, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let NcclPath { stream, communicator, .. } = self;
        communicator.grouped(|group| {
            for NcclBuffer { from, to, count, dtype } in parts {
                // SAFETY: the memory belongs to the call or the bucket until the stream has passed.
                unsafe {
                    if op.is_broadcast() {
                        group.broadcast(from, to, count * dtype.size(), op.root, stream)
                    } else {
                        group.average(from, to, count, dtype, stream)
                    }
                }?;
            }
            Ok(())
        })?;
        poll(|| communicator.is_ready(), &|| "NCCL".to_owned(), wait_ctx)
    }

    /// Aborts the communicator, which unblocks work that waits for a lost rank.
    pub fn release_streams(&self) -> Arc<dyn Fn() + Send + Sync> {
        let communicator = Arc::clone(&self.communicator);
        Arc::new(move || communicator.abort())
    }
}

impl Drop for NcclPath {
    /// Peers may still need this rank's enqueued work.
    fn drop(&mut self) {
        let Ok(_guard) = self.stream.context().push() else { return };
        let done = || poll_until(TEARDOWN_TIMEOUT, || self.communicator.is_ready().unwrap_or(true));
        if is_idle(&self.stream) && self.communicator.finish().is_ok() && done() {
            self.communicator.destroy();
        }
        // Otherwise dropping the communicator aborts it.
    }
}

/// Operands of one NCCL operation.
struct NcclBuffer {
    from: Address,
    to: Address,
    count: usize,
    dtype: DType,
}

impl NcclBuffer {
    fn of(buffer: &Buffer) -> NcclBuffer {
        let (read, written) = buffer.byte_ranges();
        NcclBuffer {
            from: read.start as Address,
            to: written.start as Address,
            count: buffer.len(),
            dtype: buffer.dtype(),
        }
    }
}
