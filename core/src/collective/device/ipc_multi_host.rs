//! Collectives over several hosts with GPU IPC within each: on the GPUs within a host, in slices through host memory
//! between hosts. Each byte of a tensor leaves the GPUs of a host once and returns once, for any number of hosts.
//!
//! For each chunk, every rank packs its input into its bounce buffer. Each shard owner sums its slice of all bounce
//! buffers with a kernel that writes to pinned host memory. It completes the slice with the same shard of the other
//! hosts, as for calls on host memory. Then it copies the means to the bounce buffers of all ranks, which unpack them.
//! Several chunks are in flight: the GPU sums the next ones while the network transfers one. The order of addition is
//! that of the host path: same bits.
//! Thread rule: used by one thread; the closure of [`MultiHostIpc::release_streams`] may run on any.

use std::ops::Range;
use std::sync::Arc;

use smallvec::smallvec;

use super::batch::{Batch, UploadRing};
use super::ipc_peers::IpcPeers;
use super::poll::wait_event;
use super::settings::SyncMode;
use super::streams::{DeviceResult, root, signal_outputs, wait_inputs};
use crate::collective::allreduce::{Allreduce, parts};
use crate::collective::call::{Call, Op};
use crate::collective::channel::{Channel, shard_range};
use crate::collective::inter_host::{InFlightSlice, Slice};
use crate::collective::phases::{InterHostOps, Partial, PerRank, ShardView};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::topology::Topology;
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, Context, Event, KernelArgs, PinnedHostBuffer, Stream};
use crate::wire_layout::{max_acc_bytes, slice};

/// Maximum number of chunks that are summed ahead of the network.
const PREFETCH_CHUNKS: usize = 3;
/// Number of chunk buffers; a buffer is free once its chunk is unpacked.
pub(super) const NUM_BUFFERS: usize = PREFETCH_CHUNKS + 1;

/// The batch of one phase.
struct KernelBatch {
    batch: Batch,
    upload_ring: UploadRing,
}

/// The resources of a shard owner.
pub(super) struct ShardOwner {
    shard: usize,
    /// The sums of this host, `sums_bytes` bytes per buffer.
    sums: PinnedHostBuffer,
    sums_bytes: usize,
    /// The means, `chunk` bytes per buffer.
    means: PinnedHostBuffer,
    chunk: usize,
    /// By buffer: completes when nothing reads the means any more.
    free: [Option<Event>; NUM_BUFFERS],
    /// By buffer: completes when the sums are there.
    summed: [Option<Event>; NUM_BUFFERS],
    /// By buffer: the slice in flight on the network.
    in_flight: [Option<InFlightSlice>; NUM_BUFFERS],
}

/// The resources of a rank for this path.
pub(super) struct MultiHostIpc {
    peers: IpcPeers,
    shard_owner: Option<ShardOwner>,
    /// Bytes of a chunk buffer.
    chunk: usize,
    pack: KernelBatch,
    add: KernelBatch,
    all_gather: KernelBatch,
    unpack: KernelBatch,
}

impl MultiHostIpc {
    /// For ranks with open IPC memory and bounce buffers of [`NUM_BUFFERS`] chunks of `chunk` bytes.
    pub fn new(peers: IpcPeers, shard_owner: Option<ShardOwner>, chunk: usize) -> MultiHostIpc {
        let kernel_batch = || {
            let mut upload_ring = UploadRing::new(&peers.context);
            upload_ring.stopped_by(peers.stop_address());
            KernelBatch { batch: Batch::default(), upload_ring }
        };
        let [pack, add, all_gather, unpack] = [(); 4].map(|()| kernel_batch());
        MultiHostIpc { peers, shard_owner, chunk, pack, add, all_gather, unpack }
    }

    /// Whether the stream or the host waits for the other ranks of the host.
    pub fn sync(&self) -> SyncMode {
        self.peers.sync()
    }

    /// The stream of all work.
    pub fn stream(&self) -> &Stream {
        &self.peers.stream
    }

    /// Bytes of device memory in use on this rank.
    pub fn device_bytes(&self) -> usize {
        let batches = [&self.pack, &self.add, &self.all_gather, &self.unpack];
        self.peers.device_bytes()
            + batches.map(|kernel_batch| kernel_batch.upload_ring.device_bytes()).iter().sum::<usize>()
    }

    /// Unblocks the streams of all ranks of the host after one was lost.
    pub fn release_streams(&self) -> Arc<dyn Fn() + Send + Sync> {
        self.peers.release_streams()
    }

    /// Runs a call on which all ranks agree.
    ///
    /// # Errors
    /// Those of the driver and of the transports; the ranks are then out of sync.
    pub fn run(&mut self, channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<DeviceResult> {
        wait_inputs(call, &self.peers.stream)?;
        if call.layout.total() > 0 {
            self.run_chunks(channel, call, wait_ctx)?;
        }
        signal_outputs(call, &self.peers.stream).map(DeviceResult::Enqueued)
    }

    fn run_chunks(&mut self, channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let chunks = call.layout.chunks();
        let prefetch = PREFETCH_CHUNKS.min(chunks);
        let topology = Arc::clone(&channel.topology);
        let call = DeviceCall {
            call,
            topology: &topology,
            root: root(call, &topology),
            first_step: channel.seq.wrapping_add(1),
        };
        for round in 0..chunks + prefetch {
            let (incoming, outgoing) = (Some(round).filter(|&round| round < chunks), round.checked_sub(prefetch));
            if let Some(chunk) = outgoing {
                self.exchange(channel, &call, chunk, wait_ctx)?;
                self.all_gather(&call, chunk, wait_ctx)?;
            }
            if let Some(chunk) = incoming {
                self.pack(&call, chunk, wait_ctx)?;
            }
            self.peers.stream_barrier(channel, wait_ctx)?;
            if let Some(chunk) = incoming {
                self.sum_slice(&call, chunk, wait_ctx)?;
            }
            if let Some(chunk) = outgoing {
                self.unpack(&call, chunk, wait_ctx)?;
            }
        }
        Ok(())
    }

    /// The addresses of a chunk in all bounce buffers.
    fn addresses(&self, chunk: usize) -> PerRank<Address> {
        let at = (chunk % NUM_BUFFERS * self.chunk) as Address;
        self.peers.bounces.iter().map(|bounce| bounce + at).collect()
    }

    /// Copies the tensors to this rank's bounce buffer.
    fn pack(&mut self, call: &DeviceCall<'_>, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        if !call.has_input(self.peers.me) {
            return Ok(());
        }
        let buffer = self.addresses(chunk)[self.peers.me];
        self.pack.batch.copies(call.pieces(chunk), call.call.tensors(0), self.chunk, buffer, false);
        // SAFETY: the call owns the tensors; this rank owns the buffer until the next barrier.
        unsafe { self.pack.upload_ring.copy(&self.pack.batch, &self.peers.stream, wait_ctx) }
    }

    /// Copies this rank's bounce buffer to the tensors.
    fn unpack(&mut self, call: &DeviceCall<'_>, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        if call.is_root(self.peers.me) && call.call.is_in_place() {
            return Ok(());
        }
        let buffer = self.addresses(chunk)[self.peers.me];
        self.unpack.batch.copies(call.pieces(chunk), call.call.tensors(0), self.chunk, buffer, true);
        // SAFETY: as for `pack`; all shards wrote the buffer before the last barrier.
        unsafe { self.unpack.upload_ring.copy(&self.unpack.batch, &self.peers.stream, wait_ctx) }
    }

    /// Sums this shard's slice of all bounce buffers to host memory.
    fn sum_slice(&mut self, call: &DeviceCall<'_>, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let addresses = self.addresses(chunk);
        let Some(shard_owner) = &mut self.shard_owner else { return Ok(()) };
        let (slice, stream) = (call.slice(chunk, shard_owner.shard), &self.peers.stream);
        let KernelBatch { batch, upload_ring } = &mut self.add;
        match call.call.op {
            Op::Allreduce => {
                let to = shard_owner.sums_address(chunk);
                batch.start(self.peers.bounces.len(), 1, slice.len());
                for part in parts(call.call, chunk, slice) {
                    let sources = addresses.iter().map(|buffer| buffer + part.wire as Address);
                    batch.add(part.reduction.dtype, part.count, sources, [to + part.at as Address]);
                }
                let kernels = self.peers.context.kernels()?;
                let acc_f64 = call.call.accumulates_f64();
                // SAFETY: all ranks have packed, and nobody writes this slice of the bounce buffers before the next
                // barrier; the host has finished with the sums buffer.
                let add = |dtype, work: &KernelArgs| unsafe { kernels.sum(dtype, acc_f64, work, stream.raw()) };
                upload_ring.run(batch, 1, stream, wait_ctx, add)?;
            }
            Op::Broadcast { .. } | Op::Barrier => {
                let Some(root) = call.root else { return Ok(()) };
                let to = shard_owner.means_address(chunk);
                let start = slice.start as Address;
                batch.start(1, 1, slice.len());
                batch.add(DType::U8, slice.len(), [addresses[root] + start], [to + start]);
                // SAFETY: as above; this stream has read the former contents of the means buffer.
                unsafe { upload_ring.copy(batch, stream, wait_ctx) }?;
            }
        }
        shard_owner.summed[chunk % NUM_BUFFERS] = Some(stream.record()?);
        Ok(())
    }

    /// Completes this shard's slice of `chunk` between the hosts; starts that of the next chunk.
    fn exchange(
        &mut self,
        channel: &mut Channel,
        call: &DeviceCall<'_>,
        chunk: usize,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        let (Some(shard_owner), Some(inter_host)) = (&mut self.shard_owner, &mut channel.inter_host) else {
            return Ok(());
        };
        for next in (chunk..call.call.layout.chunks()).take(2) {
            let buffer = next % NUM_BUFFERS;
            if shard_owner.in_flight[buffer].is_some() {
                continue;
            }
            for event in [shard_owner.summed[buffer].take(), shard_owner.free[buffer].take()].into_iter().flatten() {
                wait_event(&event, wait_ctx)?;
            }
            let in_flight =
                shard_owner.with_slice(call, next, |slice| inter_host.start(slice, true, true, wait_ctx))?;
            shard_owner.in_flight[buffer] = Some(in_flight);
        }
        let out_of_sync =
            || Error::Internal(format!("hosts out of sync in chunk {chunk} of {}", call.call.full_name()));
        let in_flight = shard_owner.in_flight[chunk % NUM_BUFFERS].take().ok_or_else(out_of_sync)?;
        let agreed = shard_owner.with_slice(call, chunk, |slice| inter_host.finish(slice, in_flight, wait_ctx))?;
        if agreed { Ok(()) } else { Err(out_of_sync()) }
    }

    /// Copies this shard's slice from host memory to the bounce buffers of all ranks.
    fn all_gather(&mut self, call: &DeviceCall<'_>, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let addresses = self.addresses(chunk);
        let Some(shard_owner) = &mut self.shard_owner else { return Ok(()) };
        let slice = call.slice(chunk, shard_owner.shard);
        let start = slice.start as Address;
        let from = shard_owner.means_address(chunk);
        let KernelBatch { batch, upload_ring } = &mut self.all_gather;
        batch.start(1, self.peers.bounces.len(), slice.len());
        batch.add(DType::U8, slice.len(), [from + start], addresses.iter().map(|buffer| buffer + start));
        // SAFETY: this shard owns this slice of the bounce buffers between the barriers.
        unsafe { upload_ring.copy(batch, &self.peers.stream, wait_ctx) }?;
        shard_owner.free[chunk % NUM_BUFFERS] = Some(self.peers.stream.record()?);
        Ok(())
    }
}

impl ShardOwner {
    /// For calls in chunks of `chunk` bytes, with allreduces of all types; `None` for a rank that owns no shard.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn new(context: &Arc<Context>, topology: &Topology, chunk: usize) -> Result<Option<ShardOwner>> {
        let Some(shard) = topology.shard() else { return Ok(None) };
        let _guard = context.push()?;
        context.kernels()?.load_sums()?;
        let sums_bytes = max_acc_bytes(slice(0..chunk, topology.num_shards() - 1, topology.num_shards()).len());
        let (sums, means) = (
            PinnedHostBuffer::new(context, NUM_BUFFERS * sums_bytes)?,
            PinnedHostBuffer::new(context, NUM_BUFFERS * chunk)?,
        );
        let (free, summed, in_flight) = Default::default();
        Ok(Some(ShardOwner { shard, sums, sums_bytes, means, chunk, free, summed, in_flight }))
    }

    fn sums_address(&self, chunk: usize) -> Address {
        self.sums.address() + (chunk % NUM_BUFFERS * self.sums_bytes) as Address
    }

    fn means_address(&self, chunk: usize) -> Address {
        self.means.address() + (chunk % NUM_BUFFERS * self.chunk) as Address
    }

    /// Calls `work` with the slice to exchange for `chunk`.
    fn with_slice<T>(
        &self,
        call: &DeviceCall<'_>,
        chunk: usize,
        work: impl FnOnce(&Slice<'_>) -> Result<T>,
    ) -> Result<T> {
        let buffer = chunk % NUM_BUFFERS;
        let bytes = call.slice(chunk, self.shard);
        // All slots are the means buffer: a shard reads and writes nothing else.
        let means = self.means.memory().wrapping_add(buffer * self.chunk);
        let slots: PerRank<*mut u8> = smallvec![means; call.topology.local_size()];
        let shard = ShardView { topology: call.topology, chunk, slots: &slots };
        let sums = self.sums.memory().wrapping_add(buffer * self.sums_bytes);
        let summed = HostSums { sums, slice: bytes.clone() };
        let collective: &dyn InterHostOps = match call.call.op {
            Op::Allreduce => &summed,
            op => op.collective(),
        };
        // The same on all hosts, and different for each chunk in flight.
        let step = call.first_step.wrapping_add(chunk as u32);
        work(&Slice { collective, call: call.call, shard, bytes, step })
    }
}

/// A call in progress.
struct DeviceCall<'a> {
    call: &'a Call,
    topology: &'a Topology,
    /// The broadcast's root as a local rank, if it is on this host.
    root: Option<usize>,
    first_step: u32,
}

impl DeviceCall<'_> {
    fn pieces(&self, chunk: usize) -> impl Iterator<Item = crate::wire_layout::TensorRange> {
        self.call.layout.ranges(chunk, 0..self.call.layout.chunk_len(chunk))
    }

    fn slice(&self, chunk: usize, shard: usize) -> Range<usize> {
        shard_range(self.topology, self.call, chunk, shard)
    }

    /// Whether local rank `me` is the root of the broadcast.
    fn is_root(&self, me: usize) -> bool {
        self.root == Some(me)
    }

    fn has_input(&self, me: usize) -> bool {
        self.call.op == Op::Allreduce || self.is_root(me)
    }
}

/// An allreduce whose sums over the ranks of this host are complete.
struct HostSums {
    /// Sums of the slice, in the layout of [`parts`].
    sums: *const u8,
    slice: Range<usize>,
}

// SAFETY: an address of memory that any thread may use.
unsafe impl Sync for HostSums {}

impl InterHostOps for HostSums {
    fn partial_bytes(&self, call: &Call, chunk: usize, piece: Range<usize>) -> usize {
        Allreduce.partial_bytes(call, chunk, piece)
    }

    unsafe fn contribute(&self, call: &Call, shard: &ShardView<'_>, piece: Range<usize>, out: &mut [u8]) -> bool {
        let skipped = Allreduce.partial_bytes(call, shard.chunk, self.slice.start..piece.start);
        let out = &mut out[..Allreduce.partial_bytes(call, shard.chunk, piece)];
        // SAFETY: the sums of the whole slice are complete and read-only; sums of adjacent pieces are adjacent.
        unsafe { self.sums.add(skipped).copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
        true
    }

    unsafe fn add_partials(
        &self,
        call: &Call,
        shard: &ShardView<'_>,
        piece: Range<usize>,
        low: Partial,
        high: Partial,
        out: *mut u8,
    ) {
        // SAFETY: the caller's promise.
        unsafe { Allreduce.add_partials(call, shard, piece, low, high, out) };
    }

    unsafe fn finish_shard(
        &self,
        call: &Call,
        shard: &ShardView<'_>,
        piece: Range<usize>,
        low: Partial,
        high: Partial,
    ) {
        // SAFETY: the caller's promise; the means buffer is this shard's slot.
        unsafe { Allreduce.finish_shard(call, shard, piece, low, high) };
    }
}
