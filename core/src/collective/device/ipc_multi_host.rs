//! Collectives over several hosts with GPU IPC within each: on the GPUs within a host, in slices through host memory
//! between hosts. Each byte of a tensor leaves the GPUs of a host once and returns once, for any number of hosts.
//!
//! For each chunk, every rank packs its input into its bounce buffer. Each shard owner sums its slice of all bounce
//! buffers with a kernel that writes to pinned host memory. It completes the slice with the same shard of the other
//! hosts, as for calls on host memory. Then it copies the means to the bounce buffers of all ranks, which unpack them.
//! Several chunks are in flight: the GPU sums the next ones while the network transfers one. The order of addition is
//! that of the host path: same bits.
//! Thread rule: used by one thread; any thread may release the streams.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use smallvec::smallvec;

use super::batch::{Launcher, Scalars};
use super::ipc_peers::IpcPeers;
use super::streams::{DeviceResult, root, signal_outputs, wait_inputs, wait_taken};
use crate::collective::call::Call;
use crate::collective::channel::Channel;
use crate::collective::inter_host::{HostCalls, InFlightSlice, Slice};
use crate::collective::partials::{InterHostOps, Partial, Piece, Reducing, inter_host_ops, parts};
use crate::collective::shard::{PerRank, ShardView};
use crate::collective::wire::shard_range;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::topology::Topology;
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, Context, Event, Handle, KernelSet, Kernels, Launch, PinnedHostBuffer};
use crate::wire_layout::{max_acc_bytes, slice};

/// Maximum number of chunks that are summed ahead of the network.
const PREFETCH_CHUNKS: usize = 3;
/// Number of chunk buffers; a buffer is free once its chunk is unpacked.
pub(super) const NUM_BUFFERS: usize = PREFETCH_CHUNKS + 1;

/// The resources for a shard of this rank.
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
    pub peers: IpcPeers,
    shard_owners: Vec<ShardOwner>,
    /// Bytes of a chunk buffer.
    chunk: usize,
    pack: Launcher,
    add: Launcher,
    all_gather: Launcher,
    unpack: Launcher,
}

impl MultiHostIpc {
    /// For ranks with open IPC memory and bounce buffers of [`NUM_BUFFERS`] chunks of `chunk` bytes.
    pub fn new(peers: IpcPeers, shard_owners: Vec<ShardOwner>, chunk: usize) -> Result<MultiHostIpc> {
        let launcher = || peers.launcher();
        let (pack, add, all_gather, unpack) = (launcher()?, launcher()?, launcher()?, launcher()?);
        Ok(MultiHostIpc { peers, shard_owners, chunk, pack, add, all_gather, unpack })
    }

    /// Bytes of device memory in use on this rank.
    pub fn device_bytes(&self) -> usize {
        let launchers = [&self.pack, &self.add, &self.all_gather, &self.unpack];
        self.peers.bounce.bytes() + launchers.into_iter().map(Launcher::device_bytes).sum::<usize>()
    }

    /// Runs a call on which all ranks agree.
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
        let call =
            DeviceCall { call, topology: &topology, root: root(call, &topology), first_round: channel.rounds.next() };
        for round in 0..chunks + prefetch {
            let (incoming, outgoing) = (Some(round).filter(|&round| round < chunks), round.checked_sub(prefetch));
            if let Some(chunk) = outgoing {
                self.exchange(channel, &call, chunk, wait_ctx)?;
                self.all_gather(&call, chunk, wait_ctx)?;
            }
            if let Some(chunk) = incoming {
                self.copy(&call, chunk, false, wait_ctx)?;
            }
            self.peers.stream_barrier(channel, wait_ctx)?;
            if let Some(chunk) = incoming {
                self.sum_slices(&call, chunk, wait_ctx)?;
            }
            if let Some(chunk) = outgoing {
                self.copy(&call, chunk, true, wait_ctx)?;
            }
        }
        Ok(())
    }

    /// The addresses of a chunk in all bounce buffers.
    fn addresses(&self, chunk: usize) -> PerRank<Address> {
        let at = (chunk % NUM_BUFFERS * self.chunk) as Address;
        self.peers.bounces.iter().map(|bounce| bounce + at).collect()
    }

    /// Packs the tensors into this rank's bounce buffer, or, with `unpack`, from there; only what the call needs.
    fn copy(&mut self, call: &DeviceCall<'_>, chunk: usize, unpack: bool, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let me = self.peers.me;
        let is_needed = if unpack { !call.is_root(me) || !call.call.is_in_place() } else { call.has_input(me) };
        if !is_needed {
            return Ok(());
        }
        let buffer = self.addresses(chunk)[me];
        let launcher = if unpack { &mut self.unpack } else { &mut self.pack };
        launcher.batch.copies(call.pieces(chunk), call.call.tensors(0), self.chunk, buffer, unpack);
        // SAFETY: the call owns the tensors. Before the barrier this rank owns the buffer; after it, the shards have
        // written the chunk that is unpacked.
        unsafe { launcher.copy(&self.peers.stream, wait_ctx) }
    }

    /// Sums the slices of this rank's shards of all bounce buffers to host memory.
    fn sum_slices(&mut self, call: &DeviceCall<'_>, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let addresses = self.addresses(chunk);
        let (add, stream) = (&mut self.add, &self.peers.stream);
        for shard_owner in &mut self.shard_owners {
            let slice = call.slice(chunk, shard_owner.shard);
            if call.call.op.is_broadcast() {
                let Some(root) = call.root else { return Ok(()) };
                let to = shard_owner.means_address(chunk);
                let start = slice.start as Address;
                add.batch.start(1, 1, slice.len());
                add.batch.add(DType::U8, slice.len(), [addresses[root] + start], [to + start]);
                // SAFETY: all ranks have packed; this stream has read the former contents of the means buffer.
                unsafe { add.copy(stream, wait_ctx) }?;
            } else {
                let to = shard_owner.sums_address(chunk);
                add.batch.start(self.peers.bounces.len(), 1, slice.len());
                let shard = ShardView {
                    topology: call.topology,
                    shard: shard_owner.shard,
                    chunk,
                    slots: &[],
                    result: ptr::null_mut(),
                    parts: 1,
                };
                for part in parts(call.call, &shard, slice) {
                    let sources = addresses.iter().map(|buffer| buffer + part.wire as Address);
                    add.batch.add(part.reduction.dtype, part.count, sources, [to + part.at as Address]);
                }
                let acc_f64 = call.call.accumulates_f64();
                // SAFETY: all ranks have packed, and nobody writes this slice of the bounce buffers before the next
                // barrier; the host has finished with the sums buffer.
                let sum = |kernels: &Kernels, dtype, args: &Launch| unsafe {
                    kernels.sum(dtype, acc_f64, args, stream.raw())
                };
                add.run(Scalars::NONE, stream, wait_ctx, sum)?;
            }
            shard_owner.summed[chunk % NUM_BUFFERS] = Some(stream.record()?);
        }
        Ok(())
    }

    /// Completes the slices of this rank's shards of `chunk` between the hosts; starts those of the next chunk.
    fn exchange(
        &mut self,
        channel: &mut Channel,
        call: &DeviceCall<'_>,
        chunk: usize,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        for next in (chunk..call.call.layout.chunks()).take(2) {
            let buffer = next % NUM_BUFFERS;
            for (shard_owner, inter_host) in self.shard_owners.iter_mut().zip(&mut channel.inter_host) {
                if shard_owner.in_flight[buffer].is_some() {
                    continue;
                }
                wait_taken(&mut shard_owner.summed[buffer], wait_ctx)?;
                wait_taken(&mut shard_owner.free[buffer], wait_ctx)?;
                let in_flight = shard_owner
                    .with_slice(call, next, |slice| inter_host.start(slice, true, HostCalls::default(), wait_ctx))?;
                shard_owner.in_flight[buffer] = Some(in_flight);
            }
        }
        let out_of_sync =
            || Error::Internal(format!("hosts out of sync in chunk {chunk} of {}", call.call.full_name()));
        for (shard_owner, inter_host) in self.shard_owners.iter_mut().zip(&mut channel.inter_host) {
            let in_flight = shard_owner.in_flight[chunk % NUM_BUFFERS].take().ok_or_else(out_of_sync)?;
            let agreed = shard_owner.with_slice(call, chunk, |slice| inter_host.finish(slice, in_flight, wait_ctx))?;
            if !agreed {
                return Err(out_of_sync());
            }
        }
        Ok(())
    }

    /// Copies the slices of this rank's shards from host memory to the bounce buffers of all ranks.
    fn all_gather(&mut self, call: &DeviceCall<'_>, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let addresses = self.addresses(chunk);
        for shard_owner in &mut self.shard_owners {
            let slice = call.slice(chunk, shard_owner.shard);
            let start = slice.start as Address;
            let from = shard_owner.means_address(chunk);
            self.all_gather.batch.start(1, self.peers.bounces.len(), slice.len());
            let to = addresses.iter().map(|buffer| buffer + start);
            self.all_gather.batch.add(DType::U8, slice.len(), [from + start], to);
            // SAFETY: this shard owns this slice of the bounce buffers between the barriers.
            unsafe { self.all_gather.copy(&self.peers.stream, wait_ctx) }?;
            shard_owner.free[chunk % NUM_BUFFERS] = Some(self.peers.stream.record()?);
        }
        Ok(())
    }
}

impl ShardOwner {
    /// The shards of this rank, for calls in chunks of `chunk` bytes, with allreduces of all types.
    pub fn all(context: &Arc<Context>, topology: &Topology, chunk: usize) -> Result<Vec<ShardOwner>> {
        if !topology.owns_shards() {
            return Ok(Vec::new());
        }
        let _guard = context.push()?;
        context.kernels()?.ready(KernelSet::Sums)?;
        topology.own_shards().map(|shard| ShardOwner::new(context, topology, shard, chunk)).collect()
    }

    fn new(context: &Arc<Context>, topology: &Topology, shard: usize, chunk: usize) -> Result<ShardOwner> {
        let sums_bytes = max_acc_bytes(slice(0..chunk, topology.num_shards() - 1, topology.num_shards()).len());
        let (sums, means) = (
            PinnedHostBuffer::new(context, NUM_BUFFERS * sums_bytes)?,
            PinnedHostBuffer::new(context, NUM_BUFFERS * chunk)?,
        );
        let (free, summed, in_flight) = Default::default();
        Ok(ShardOwner { shard, sums, sums_bytes, means, chunk, free, summed, in_flight })
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
        let shard =
            ShardView { topology: call.topology, shard: self.shard, chunk, slots: &slots, result: means, parts: 1 };
        let sums = self.sums.memory().wrapping_add(buffer * self.sums_bytes);
        let summed = HostSums { sums: Handle(sums), slice: bytes.clone() };
        let ops: &dyn InterHostOps = if call.call.op.is_broadcast() { inter_host_ops(call.call) } else { &summed };
        // The same on all hosts, and different for each chunk in flight.
        let round = call.first_round.wrapping_add(chunk as u32);
        work(&Slice { ops, call: call.call, shard, bytes, block_len: 0, round })
    }
}

/// A call in progress.
struct DeviceCall<'a> {
    call: &'a Call,
    topology: &'a Topology,
    /// The broadcast's root as a local rank, if it is on this host.
    root: Option<usize>,
    first_round: u32,
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
        !self.call.op.is_broadcast() || self.is_root(me)
    }
}

/// An allreduce whose sums over the ranks of this host are complete.
struct HostSums {
    /// Sums of the slice, in the layout of [`parts`].
    sums: Handle<u8>,
    slice: Range<usize>,
}

impl InterHostOps for HostSums {
    fn partial_bytes(&self, piece: &Piece<'_>) -> usize {
        Reducing.partial_bytes(piece)
    }

    unsafe fn contribute(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<bool> {
        let before = Piece { bytes: self.slice.start..piece.bytes.start, ..*piece };
        let out = &mut out[..Reducing.partial_bytes(piece)];
        // SAFETY: the sums of the whole slice are complete and read-only; sums of adjacent pieces are adjacent.
        unsafe {
            let sums = self.sums.0.add(Reducing.partial_bytes(&before));
            sums.copy_to_nonoverlapping(out.as_mut_ptr(), out.len());
        }
        Ok(true)
    }

    unsafe fn add_partials(&self, piece: &Piece<'_>, low: Partial, high: Partial, out: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { Reducing.add_partials(piece, low, high, out) };
    }

    unsafe fn finish_shard(&self, piece: &Piece<'_>, low: Partial, high: Partial) -> Result<()> {
        // SAFETY: the caller's promise; the means buffer is this shard's slot.
        unsafe { Reducing.finish_shard(piece, low, high) }
    }
}
