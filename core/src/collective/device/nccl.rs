//! The NCCL path, if every rank has its own GPU.
//!
//! Each group has one communicator. The tensors of a call form one NCCL group; small ones of an allreduce, a reduce or a
//! broadcast are fused in a bucket first; NCCL divides the sum. NCCL chooses the order of addition and accumulates float16
//! and bfloat16 in their own types. So the bits depend on the number of ranks and on NCCL's version (`DL_COMM_GPU_PATH`
//! selects another path). Operators that NCCL lacks, means of integers and float64 accumulators, which differ from the
//! core's, go through the host.
//! In a GPU graph the replays run without the host: nothing is fused, as the bucket has other users, and the calls have a
//! stream of their own, so that the graph takes no others with it.
//! Thread rule: used by one thread; any thread may release the streams.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::batch::Launcher;
use super::nccl_steps::{NcclOperator, NcclStep, has_operations, line_operation, steps};
use super::release::{NcclRelease, OwnStopFlag, StreamRelease};
use super::streams::{TEARDOWN_TIMEOUT, is_idle, poll, poll_until, producer, signal_outputs, wait_inputs};
use crate::buffer::Tensor;
use crate::collective::call::{Call, lengths};
use crate::collective::channel::Channel;
use crate::collective::operation::Pattern;
use crate::collective::selection::{Limit, Selection};
use crate::collective::value_allgather::allgather_merge;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::transport::WaitContext;
use crate::transport::gpu::{
    Address, Communicator, Context, DeviceBuffer, Event, NcclBuffers, RedOp, Stream, UniqueId,
};
use crate::wire_layout::{DtypeRun, WireLayout};

/// This many separate operations of short tensors cost no more than the copies of a fusion.
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
pub struct NcclPath {
    stream: Arc<Stream>,
    /// Of calls that are captured into a GPU graph, made by the first.
    graph_stream: Option<Arc<Stream>>,
    rank: usize,
    ranks: usize,
    communicator: Arc<Communicator>,
    release: Arc<NcclRelease>,
    /// Allocated by the first fusion.
    bucket: Option<DeviceBuffer>,
    launcher: Launcher,
    /// Bytes of the longest tensor that is fused, if there are more than [`MIN_TO_FUSE`].
    fused_max: usize,
}

impl NcclPath {
    /// Creates the communicator of a group with an id from rank 0. If NCCL fails on a rank (MIG slices of one GPU, a
    /// small /dev/shm), no rank has a communicator. The inner error is the reason on this rank, if it failed here.
    pub fn new(
        channel: &mut Channel,
        context: &Arc<Context>,
        selection: &Selection,
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
        let local = local.and_then(|_| Ok((Stream::new(context)?, OwnStopFlag::new(context)?)));
        let mut started = local.and_then(|local| Ok((Communicator::start(size, id, rank)?, local)));
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
                (Start::Ready, Ok((communicator, (stream, stop)))) => {
                    let communicator = Arc::new(communicator);
                    let mut launcher = Launcher::new(context);
                    launcher.stop = stop.address();
                    let release = Arc::new(NcclRelease { communicator: Arc::clone(&communicator), stop });
                    let (ranks, fused_max) = (size, selection.limit(Limit::NcclFused));
                    let bucket = None;
                    return Ok(Ok(NcclPath {
                        stream: Arc::new(stream),
                        graph_stream: None,
                        rank,
                        ranks,
                        communicator,
                        release,
                        bucket,
                        launcher,
                        fused_max,
                    }));
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

    /// What NCCL does with each element type of `call`; `None` if it cannot run the call.
    fn operators(call: &Call) -> Option<Vec<(DType, NcclOperator)>> {
        let reductions = call.reductions().map(|reduction| Some((reduction.dtype, NcclOperator::of(reduction)?)));
        reductions.collect::<Option<Vec<_>>>().filter(|_| has_operations(call.op))
    }

    /// Whether NCCL can run `call`; the same on all ranks.
    pub fn runs(call: &Call) -> bool {
        NcclPath::operators(call).is_some()
    }

    /// Enqueues a call on which all ranks agree, and which NCCL can run. The event is at its end.
    ///
    /// # Errors
    /// [`Error::System`] of NCCL and of the driver; when the wait context ends.
    pub fn run(&mut self, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<Event> {
        let context = Arc::clone(self.stream.context());
        let _guard = context.push()?;
        let is_captured = producer(call)?.is_captured();
        if is_captured && self.graph_stream.is_none() {
            self.graph_stream = Some(Arc::new(Stream::new(&context)?));
        }
        let stream = Arc::clone(self.stream_of(call));
        let mut wanted = NcclPath::operators(call)
            .ok_or_else(|| Error::Internal(format!("NCCL cannot run {}", call.full_name())))?;
        wanted.sort_by_key(|(dtype, _)| *dtype);
        wanted.dedup_by_key(|(dtype, _)| *dtype);
        let operators = Operators::new(&self.communicator, &wanted)?;
        let size = |index: usize| call.tensors(0)[index].buffer.byte_ranges().0.len();
        let has_data = |&index: &usize| call.op.pattern() != Pattern::Line || size(index) > 0;
        let is_small =
            |index: usize| !is_captured && call.op.pattern() == Pattern::Line && size(index) <= self.fused_max;
        let (mut small, mut large): (Vec<usize>, Vec<usize>) =
            (0..call.tensors(0).len()).filter(has_data).partition(|&index| is_small(index));
        if small.len() <= MIN_TO_FUSE {
            large.append(&mut small);
        }
        wait_inputs(call, &stream)?;
        let (rank, ranks) = (self.rank, self.ranks);
        let steps = |&index: &usize| {
            let operator = operators.of(call.tensors(0)[index].buffer.dtype());
            steps(call, index, operator, rank, ranks)
        };
        self.group(large.iter().flat_map(steps), &stream, wait_ctx)?;
        self.run_fused(call, &operators, &small, wait_ctx)?;
        operators.free()?;
        // SAFETY: the call owns the tensors, and NCCL's work on this stream comes before.
        unsafe { self.launcher.guard_outputs(call, &stream, wait_ctx) }?;
        signal_outputs(call, &stream)
    }

    fn stream_of(&self, call: &Call) -> &Arc<Stream> {
        let is_captured = call.producer().is_some_and(|producer| producer.is_captured());
        self.graph_stream.as_ref().filter(|_| is_captured).unwrap_or(&self.stream)
    }

    /// Makes the caller's stream wait for what was enqueued of a call that has failed. `None` if the driver fails.
    pub fn signal_outputs(&self, call: &Call) -> Option<Event> {
        let _guard = self.stream.context().push().ok()?;
        signal_outputs(call, self.stream_of(call)).ok()
    }

    /// Bytes of device memory in use.
    pub fn device_bytes(&self) -> usize {
        self.launcher.device_bytes() + self.bucket.as_ref().map_or(0, DeviceBuffer::bytes)
    }

    /// Runs the tensors `small` through the bucket, in as many chunks as necessary.
    fn run_fused(
        &mut self,
        call: &Call,
        operators: &Operators,
        small: &[usize],
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
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
                let count = run.bytes.len() / run.dtype.size();
                let buffers = NcclBuffers { from: at, to: at, count, dtype: run.dtype };
                let operation = line_operation(call.op, operators.of(run.dtype))?;
                Some(NcclStep::Operation(operation, buffers))
            };
            self.group(layout.runs(chunk, all.clone()).filter_map(part), &self.stream, wait_ctx)?;
            if !call.op.has_output(self.rank) {
                continue;
            }
            let bytes = all.len();
            self.launcher.batch.copies(layout.ranges(chunk, all), &tensors, bytes, bucket, true);
            // SAFETY: as above.
            unsafe { self.launcher.copy(&self.stream, wait_ctx) }?;
        }
        Ok(())
    }

    /// Starts these steps; those of NCCL as one group.
    fn group(&self, steps: impl Iterator<Item = NcclStep>, stream: &Stream, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let communicator = &self.communicator;
        communicator.grouped(|group| {
            for step in steps {
                // SAFETY: the memory belongs to the call or the bucket until the stream has passed. No two steps write
                // what another one uses.
                unsafe {
                    match step {
                        NcclStep::Operation(operation, buffers) => group.start(operation, buffers, stream),
                        NcclStep::Copy(NcclBuffers { from, to, count, dtype }) => {
                            stream.copy(to, from, count * dtype.size())
                        }
                    }
                }?;
            }
            Ok(())
        })?;
        poll(|| communicator.is_ready(), &|| "NCCL".to_owned(), wait_ctx)
    }

    /// Unblocks work that waits for a lost rank.
    pub fn stream_release(&self) -> Arc<dyn StreamRelease> {
        Arc::clone(&self.release) as Arc<dyn StreamRelease>
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

/// The operators of a call by element type.
struct Operators {
    communicator: Arc<Communicator>,
    by_dtype: Vec<(DType, RedOp)>,
    /// Those of this call only.
    made: Vec<RedOp>,
}

impl Operators {
    fn new(communicator: &Arc<Communicator>, wanted: &[(DType, NcclOperator)]) -> Result<Operators> {
        let (mut by_dtype, mut made) = (Vec::with_capacity(wanted.len()), Vec::new());
        for (dtype, operator) in wanted {
            let op = match operator {
                NcclOperator::Known(op) => *op,
                NcclOperator::Scaled(factor) => {
                    made.push(communicator.scaled_sum(factor, *dtype)?);
                    made[made.len() - 1]
                }
            };
            by_dtype.push((*dtype, op));
        }
        Ok(Operators { communicator: Arc::clone(communicator), by_dtype, made })
    }

    /// The operator for elements of `dtype`; any for a call that does not reduce.
    fn of(&self, dtype: DType) -> RedOp {
        self.by_dtype.iter().find(|(other, _)| *other == dtype).map_or(RedOp::SUM, |(_, op)| *op)
    }

    /// Frees those that were made, after the operations have been started.
    fn free(self) -> Result<()> {
        self.made.into_iter().try_for_each(|op| self.communicator.free_operator(op))
    }
}
