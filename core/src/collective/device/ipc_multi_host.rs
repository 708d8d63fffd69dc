//! Averages over hosts whose ranks see each other's GPU memory: within a host on the GPUs, between hosts in slices through
//! host memory, so that of each tensor every byte leaves the GPUs of a host once and comes back once, however many there are.
//!
//! A chunk goes like this. Every rank packs what it brings into its bounce. Each rank that drives a shard adds its slice up
//! from the bounces of all, with a kernel that writes the sums to pinned host memory; brings them to an end with the same
//! shard of the other hosts, as calls on host memory do; and has the means copied into the bounces of all, from which every
//! rank unpacks them. Some chunks are under way at a time: while the network carries one, the GPU adds up the next ones. The
//! additions are those of the host, in the same order: same bits.
//! Thread rule: used by one thread; the closure of [`Across::rescue`] may run on any.

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

/// Chunks that are added up before their turn on the network, at most.
const PREFETCH_CHUNKS: usize = 3;
/// Places for chunks; a chunk's is free when it has been unpacked.
pub(super) const NUM_BUFFERS: usize = PREFETCH_CHUNKS + 1;

/// One kind of step: what its kernels work on.
struct KernelBatch {
    batch: Batch,
    table: UploadRing,
}

/// What the driver of a shard has.
pub(super) struct ShardOwner {
    shard: usize,
    /// The sums of this host, `room` bytes for each place.
    sums: PinnedHostBuffer,
    room: usize,
    /// The means, a chunk (of so many bytes) for each place.
    means: PinnedHostBuffer,
    chunk: usize,
    /// When nothing reads the means of a place any more.
    free: [Option<Event>; NUM_BUFFERS],
    /// When the sums of a place are there.
    summed: [Option<Event>; NUM_BUFFERS],
    /// What is on the network, by place.
    flights: [Option<InFlightSlice>; NUM_BUFFERS],
}

/// What a rank has for such calls.
pub(super) struct MultiHostIpc {
    peers: IpcPeers,
    driver: Option<ShardOwner>,
    /// The bytes of a place of the bounce.
    chunk: usize,
    pack: KernelBatch,
    add: KernelBatch,
    all_gather: KernelBatch,
    unpack: KernelBatch,
}

impl MultiHostIpc {
    /// For ranks whose memory is open to each other, each with a bounce of [`NUM_BUFFERS`] chunks of `chunk` bytes.
    pub fn new(peers: IpcPeers, driver: Option<ShardOwner>, chunk: usize) -> MultiHostIpc {
        let staging = || {
            let mut table = UploadRing::new(&peers.context);
            table.stopped_by(peers.stop_address());
            KernelBatch { batch: Batch::default(), table }
        };
        let [pack, add, spread, unpack] = [(); 4].map(|()| staging());
        MultiHostIpc { peers, driver, chunk, pack, add, all_gather: spread, unpack }
    }

    /// Who waits for the other ranks of the host.
    pub fn wait(&self) -> SyncMode {
        self.peers.wait()
    }

    /// What everything is enqueued on.
    pub fn stream(&self) -> &Stream {
        &self.peers.stream
    }

    /// The bytes of device memory that this rank has taken.
    pub fn held(&self) -> usize {
        let stages = [&self.pack, &self.add, &self.all_gather, &self.unpack];
        self.peers.held() + stages.map(|staging| staging.table.held()).iter().sum::<usize>()
    }

    /// Lets the streams of all ranks of the host go on after one was lost.
    pub fn release_streams(&self) -> Arc<dyn Fn() + Send + Sync> {
        self.peers.release_streams()
    }

    /// Carries out a call on which all ranks agree.
    ///
    /// # Errors
    /// Those of the driver and of the transports; the ranks are then out of step.
    pub fn run(&mut self, channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<DeviceResult> {
        wait_inputs(call, &self.peers.stream)?;
        if call.layout.total() > 0 {
            self.run_chunks(channel, call, wait_ctx)?;
        }
        signal_outputs(call, &self.peers.stream).map(DeviceResult::Enqueued)
    }

    fn run_chunks(&mut self, channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let chunks = call.layout.chunks();
        let ahead = PREFETCH_CHUNKS.min(chunks);
        let topology = Arc::clone(&channel.topology);
        let call = DeviceCall {
            call,
            topology: &topology,
            root: root(call, &topology),
            first_step: channel.seq.wrapping_add(1),
        };
        for turn in 0..chunks + ahead {
            let (comes, goes) = (Some(turn).filter(|&turn| turn < chunks), turn.checked_sub(ahead));
            if let Some(chunk) = goes {
                self.exchange(channel, &call, chunk, wait_ctx)?;
                self.spread(&call, chunk, wait_ctx)?;
            }
            if let Some(chunk) = comes {
                self.pack(&call, chunk, wait_ctx)?;
            }
            self.peers.stream_barrier(channel, wait_ctx)?;
            if let Some(chunk) = comes {
                self.add_up(&call, chunk, wait_ctx)?;
            }
            if let Some(chunk) = goes {
                self.unpack(&call, chunk, wait_ctx)?;
            }
        }
        Ok(())
    }

    /// Where a chunk is in the bounce of each rank.
    fn places(&self, chunk: usize) -> PerRank<Address> {
        let at = (chunk % NUM_BUFFERS * self.chunk) as Address;
        self.peers.bounces.iter().map(|bounce| bounce + at).collect()
    }

    /// From the tensors to the own bounce.
    fn pack(&mut self, call: &DeviceCall<'_>, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        if !call.brings(self.peers.me) {
            return Ok(());
        }
        let place = self.places(chunk)[self.peers.me];
        self.pack.batch.copies(call.pieces(chunk), call.call.tensors(0), self.chunk, place, false);
        // SAFETY: the tensors are the call's; the place is this rank's until the ranks meet.
        unsafe { self.pack.table.copy(&self.pack.batch, &self.peers.stream, wait_ctx) }
    }

    /// From the own bounce to the tensors.
    fn unpack(&mut self, call: &DeviceCall<'_>, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        if call.is_here(self.peers.me) && call.call.is_in_place() {
            return Ok(());
        }
        let place = self.places(chunk)[self.peers.me];
        self.unpack.batch.copies(call.pieces(chunk), call.call.tensors(0), self.chunk, place, true);
        // SAFETY: as for `pack`; all shards have written the place before the ranks met.
        unsafe { self.unpack.table.copy(&self.unpack.batch, &self.peers.stream, wait_ctx) }
    }

    /// The own slice, from the bounces of all ranks to the host.
    fn add_up(&mut self, call: &DeviceCall<'_>, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let places = self.places(chunk);
        let Some(driver) = &mut self.driver else { return Ok(()) };
        let (slice, stream) = (call.slice(chunk, driver.shard), &self.peers.stream);
        let KernelBatch { batch, table } = &mut self.add;
        match call.call.op {
            Op::Allreduce => {
                let to = driver.sums_address(chunk);
                batch.start(self.peers.bounces.len(), 1, slice.len());
                for part in parts(call.call, chunk, slice) {
                    let sources = places.iter().map(|place| place + part.wire as Address);
                    batch.add(part.reduction.dtype, part.count, sources, [to + part.at as Address]);
                }
                let kernels = self.peers.context.kernels()?;
                let precise = call.call.accumulates_f64();
                // SAFETY: all have packed, and nobody writes to this slice of the bounces before the ranks meet again; the
                // host has done with what was in the sums' place.
                let add = |dtype, work: &KernelArgs| unsafe { kernels.sum(dtype, precise, work, stream.raw()) };
                table.run(batch, 1, stream, wait_ctx, add)?;
            }
            Op::Broadcast { .. } | Op::Barrier => {
                let Some(root) = call.root else { return Ok(()) };
                let to = driver.means_address(chunk);
                let start = slice.start as Address;
                batch.start(1, 1, slice.len());
                batch.add(DType::U8, slice.len(), [places[root] + start], [to + start]);
                // SAFETY: as above; what was in the means' place has been read, by this stream.
                unsafe { table.copy(batch, stream, wait_ctx) }?;
            }
        }
        driver.summed[chunk % NUM_BUFFERS] = Some(stream.record()?);
        Ok(())
    }

    /// Between the hosts: the own slice of `chunk`; that of the next chunk is on its way then.
    fn exchange(
        &mut self,
        channel: &mut Channel,
        call: &DeviceCall<'_>,
        chunk: usize,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        let (Some(driver), Some(inter_host)) = (&mut self.driver, &mut channel.inter_host) else { return Ok(()) };
        for next in (chunk..call.call.layout.chunks()).take(2) {
            let place = next % NUM_BUFFERS;
            if driver.flights[place].is_some() {
                continue;
            }
            for event in [driver.summed[place].take(), driver.free[place].take()].into_iter().flatten() {
                wait_event(&event, wait_ctx)?;
            }
            let in_flight = driver.with_slice(call, next, |slice| inter_host.start(slice, true, true, wait_ctx))?;
            driver.flights[place] = Some(in_flight);
        }
        let lost = || Error::Internal(format!("hosts out of sync in chunk {chunk} of {}", call.call.full_name()));
        let in_flight = driver.flights[chunk % NUM_BUFFERS].take().ok_or_else(lost)?;
        let agreed = driver.with_slice(call, chunk, |slice| inter_host.finish(slice, in_flight, wait_ctx))?;
        if agreed { Ok(()) } else { Err(lost()) }
    }

    /// The own slice, from the host to the bounces of all ranks.
    fn spread(&mut self, call: &DeviceCall<'_>, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let places = self.places(chunk);
        let Some(driver) = &mut self.driver else { return Ok(()) };
        let slice = call.slice(chunk, driver.shard);
        let start = slice.start as Address;
        let from = driver.means_address(chunk);
        let KernelBatch { batch, table } = &mut self.all_gather;
        batch.start(1, self.peers.bounces.len(), slice.len());
        batch.add(DType::U8, slice.len(), [from + start], places.iter().map(|place| place + start));
        // SAFETY: this slice of the bounces is this shard's between the meetings.
        unsafe { table.copy(batch, &self.peers.stream, wait_ctx) }?;
        driver.free[chunk % NUM_BUFFERS] = Some(self.peers.stream.record()?);
        Ok(())
    }
}

impl ShardOwner {
    /// For calls in chunks of `chunk` bytes, which may be averages of all types; `None` for a rank that drives no shard.
    ///
    /// # Errors
    /// [`Error::System`]
    pub fn new(context: &Arc<Context>, topology: &Topology, chunk: usize) -> Result<Option<ShardOwner>> {
        let Some(shard) = topology.shard() else { return Ok(None) };
        let _entered = context.push()?;
        context.kernels()?.load_sums()?;
        let room = max_acc_bytes(slice(0..chunk, topology.num_shards() - 1, topology.num_shards()).len());
        let (sums, means) =
            (PinnedHostBuffer::new(context, NUM_BUFFERS * room)?, PinnedHostBuffer::new(context, NUM_BUFFERS * chunk)?);
        let (free, summed, flights) = Default::default();
        Ok(Some(ShardOwner { shard, sums, room, means, chunk, free, summed, flights }))
    }

    fn sums_address(&self, chunk: usize) -> Address {
        self.sums.address() + (chunk % NUM_BUFFERS * self.room) as Address
    }

    fn means_address(&self, chunk: usize) -> Address {
        self.means.address() + (chunk % NUM_BUFFERS * self.chunk) as Address
    }

    /// Calls `work` with what the network is to do with the own slice of `chunk`.
    fn with_slice<T>(
        &self,
        call: &DeviceCall<'_>,
        chunk: usize,
        work: impl FnOnce(&Slice<'_>) -> Result<T>,
    ) -> Result<T> {
        let place = chunk % NUM_BUFFERS;
        let bytes = call.slice(chunk, self.shard);
        // Everything that a shard looks for in a slot, its own or another's, is with the means.
        let means = self.means.memory().wrapping_add(place * self.chunk);
        let slots: PerRank<*mut u8> = smallvec![means; call.topology.local_size()];
        let shard = ShardView { topology: call.topology, chunk, slots: &slots };
        let sums = self.sums.memory().wrapping_add(place * self.room);
        let summed = HostSums { sums, slice: bytes.clone() };
        let collective: &dyn InterHostOps = match call.call.op {
            Op::Allreduce => &summed,
            op => op.collective(),
        };
        // The same on all hosts, and another one for each chunk under way.
        let step = call.first_step.wrapping_add(chunk as u32);
        work(&Slice { collective, call: call.call, shard, bytes, step })
    }
}

/// A call under way.
struct DeviceCall<'a> {
    call: &'a Call,
    topology: &'a Topology,
    /// The local rank on this host that a broadcast is from.
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

    /// Whether local rank `me` is where the values of a broadcast come from.
    fn is_here(&self, me: usize) -> bool {
        self.root == Some(me)
    }

    fn brings(&self, me: usize) -> bool {
        self.call.op == Op::Allreduce || self.is_here(me)
    }
}

/// An average whose sums over the ranks of this host are there.
struct HostSums {
    /// Of the slice, as [`parts`] lays them out.
    sums: *const u8,
    slice: Range<usize>,
}

// SAFETY: an address in memory that may be used from any thread.
unsafe impl Sync for HostSums {}

impl InterHostOps for HostSums {
    fn partial_bytes(&self, call: &Call, chunk: usize, piece: Range<usize>) -> usize {
        Allreduce.partial_bytes(call, chunk, piece)
    }

    unsafe fn contribute(&self, call: &Call, shard: &ShardView<'_>, piece: Range<usize>, out: &mut [u8]) -> bool {
        let skipped = Allreduce.partial_bytes(call, shard.chunk, self.slice.start..piece.start);
        let out = &mut out[..Allreduce.partial_bytes(call, shard.chunk, piece)];
        // SAFETY: the sums of the whole slice are there, and nobody writes to them; those of pieces lie side by side.
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
        // SAFETY: the caller's promise; the means are this shard's slot.
        unsafe { Allreduce.finish_shard(call, shard, piece, low, high) };
    }
}
