//! A channel of a group: runs chunks of calls through rounds of shared memory and exchanges between hosts.
//!
//! Every chunk of any collective starts with the same round. So ranks with different calls still synchronize, compare
//! signatures, and can report the mismatch.
//! Thread rule: used by one thread.

use std::mem;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use super::call::Call;
use super::inter_host::{InFlightSlice, InterHost, Slice};
use super::phases::ShardView;
use super::zero_copy;
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::stream_copy::stream_copy;
use crate::timings::{Activity, PhaseTimer};
use crate::topology::Topology;
use crate::transport::arena::PeerMemory;
use crate::transport::step::{REFRESH, START, reached};
use crate::transport::sync;
use crate::transport::{Phase, ShmChannel, WaitContext};
use crate::wire_layout::slice;

/// More than the caches of a processor hold for one process.
const STREAM_COPY_MIN_BYTES: usize = 32 << 20;

/// A channel; see the module's documentation.
pub struct Channel {
    pub(super) topology: Arc<Topology>,
    pub(super) shm: ShmChannel,
    /// The links to other hosts, if there are any and this rank owns a shard.
    pub(super) inter_host: Option<InterHost>,
    /// The last round.
    pub(super) seq: u32,
    /// All ranks of the host have unpacked this round.
    pub(super) freed_seq: u32,
    /// This rank has unpacked this round, but may not have raised its flag for it.
    pub(super) unpacked_seq: u32,
    /// This rank has raised all its flags for this round or a later one.
    refreshed: u32,
    /// Whether all ranks can access the last call's tensors, and its slots hold addresses.
    zero_copy: bool,
}

/// The outcome of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChunkResult {
    /// All calls matched; the chunk is complete.
    Matched,
    /// All calls matched, but only some slots hold addresses.
    MixedMemory,
    /// The calls differ.
    Mismatch,
}

/// A round in progress: this rank has packed chunk `chunk`.
struct PackedChunk {
    seq: u32,
    chunk: usize,
    /// The shard's slice, if it is in flight between hosts.
    in_flight: Option<InFlightSlice>,
}

impl Channel {
    /// A channel over `region`, for the ranks of one host.
    pub fn new(topology: Arc<Topology>, region: ShmChannel) -> Channel {
        Channel {
            topology,
            shm: region,
            inter_host: None,
            seq: START,
            freed_seq: START,
            unpacked_seq: START,
            refreshed: START,
            zero_copy: false,
        }
    }

    /// Adds links to the other hosts, if there are any and this rank owns a shard.
    pub(crate) fn with(self, inter_host: Option<InterHost>) -> Channel {
        Channel { inter_host, ..self }
    }

    /// Closes the links to other hosts; no calls may follow. After a failure the links are leaked: freeing a
    /// communicator needs all ranks, and some may be lost.
    pub(crate) fn close_links(&mut self, failed: bool) {
        let inter_host = self.inter_host.take();
        if failed {
            mem::forget(inter_host);
        }
    }

    /// Runs the first chunk of `call`, which checks that the calls match. Returns false on every rank, with nothing
    /// written, if they differ.
    ///
    /// # Errors
    /// Those of the transports; the channel is then unusable.
    pub fn run_first_chunk(&mut self, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<bool> {
        self.zero_copy = false;
        self.refresh();
        if call.is_small() {
            return self.exchange(call, wait_ctx);
        }
        self.zero_copy = self.peer_memory().is_some_and(|shared| zero_copy::is_possible(call, shared));
        let mut step = self.pack(call, 0, wait_ctx)?;
        self.send_slice(call, &mut step, false, wait_ctx)?;
        let mut result = self.finish_chunk(call, step, wait_ctx)?;
        if result == ChunkResult::MixedMemory {
            self.zero_copy = false;
            let step = self.pack(call, 0, wait_ctx)?;
            result = self.finish_chunk(call, step, wait_ctx)?;
        }
        if result == ChunkResult::Matched && self.zero_copy && call.layout.chunks() == 1 {
            self.wait_reduced(wait_ctx)?;
        }
        Ok(result == ChunkResult::Matched)
    }

    /// Peer memory of the ranks, if all of them are on this host.
    fn peer_memory(&self) -> Option<&dyn PeerMemory> {
        if self.topology.hosts() == 1 { self.shm.region().peer_memory() } else { None }
    }

    /// Whether the first chunk of the last call ran with zero copies; its other chunks then do too.
    pub fn is_zero_copy(&self) -> bool {
        self.zero_copy
    }

    /// Runs further chunks of `call`. Packs and sends each chunk before it completes the previous one. `zero_copy` is
    /// the result of [`Channel::is_zero_copy`] after the first chunk.
    ///
    /// # Errors
    /// Those of the transports; the channel is then unusable.
    pub fn run_chunks(
        &mut self,
        call: &Call,
        chunks: impl Iterator<Item = usize>,
        zero_copy: bool,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        self.zero_copy = zero_copy;
        if zero_copy {
            return self.run_chunks_zero_copy(call, chunks, wait_ctx);
        }
        let mut previous: Option<PackedChunk> = None;
        for chunk in chunks {
            let mut next = self.pack(call, chunk, wait_ctx)?;
            self.send_slice(call, &mut next, true, wait_ctx)?;
            if let Some(step) = previous.replace(next) {
                self.finish_matched(call, step, wait_ctx)?;
            }
        }
        previous.map_or(Ok(()), |step| self.finish_matched(call, step, wait_ctx))
    }

    /// As `run_chunks` with zero copies: all chunks in one round.
    fn run_chunks_zero_copy(
        &mut self,
        call: &Call,
        chunks: impl Iterator<Item = usize>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        let mut chunks = chunks.peekable();
        if let Some(&first) = chunks.peek() {
            let step = self.pack(call, first, wait_ctx)?;
            self.shm.wait(Phase::Packed, step.seq, self.topology.local_size(), wait_ctx)?;
            if !self.shm.same_signatures(step.seq) {
                return Err(out_of_sync(call, first));
            }
            self.combine_zero_copy(call, step.seq, chunks, wait_ctx)?;
        }
        self.wait_reduced(wait_ctx)
    }

    fn finish_matched(&mut self, call: &Call, step: PackedChunk, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let chunk = step.chunk;
        match self.finish_chunk(call, step, wait_ctx)? {
            ChunkResult::Matched => Ok(()),
            _ => Err(out_of_sync(call, chunk)),
        }
    }

    /// Waits until the other ranks have written this rank's tensors.
    fn wait_reduced(&mut self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.shm.wait(Phase::Reduced, self.seq, self.topology.num_shards(), wait_ctx)
    }

    /// The number of the next round, once its slot is free. Also posts `Unpacked`: peers may need it before they can
    /// make progress.
    pub(super) fn begin_round(&mut self, wait_ctx: &WaitContext<'_>) -> Result<u32> {
        if self.shm.own(Phase::Unpacked) != self.unpacked_seq {
            self.shm.raise(Phase::Unpacked, self.unpacked_seq);
            wait_ctx.log().flag();
        }
        self.next_seq(wait_ctx)
    }

    /// Raises the flags that small and mismatched calls skip, before they lag so far that wraparound makes them look
    /// newer. Call it between calls, after this rank has finished all rounds.
    #[inline]
    pub(super) fn refresh(&mut self) {
        if self.seq.wrapping_sub(self.refreshed) >= REFRESH {
            self.shm.raise(Phase::Reduced, self.seq);
            self.shm.raise(Phase::Unpacked, self.unpacked_seq);
            self.refreshed = self.seq;
        }
    }

    pub(super) fn next_seq(&mut self, wait_ctx: &WaitContext<'_>) -> Result<u32> {
        let seq = self.seq.wrapping_add(1);
        if !self.is_free(seq) {
            let before = seq.wrapping_sub(2);
            self.shm.wait(Phase::Unpacked, before, self.topology.local_size(), wait_ctx)?;
            self.freed_seq = before;
        }
        self.seq = seq;
        Ok(seq)
    }

    /// Whether all ranks have finished with the slot of round `seq`.
    pub(super) fn is_free(&self, seq: u32) -> bool {
        reached(self.freed_seq, seq.wrapping_sub(2))
    }

    /// Ends round `seq`: this rank has read its results.
    pub(super) fn finish_round(&mut self, seq: u32) {
        self.unpacked_seq = seq;
        self.shm.raise(Phase::Unpacked, seq);
    }

    /// Copies `part` of a chunk into the slot of round `seq`.
    pub(super) fn copy_in(&self, call: &Call, chunk: usize, part: Range<usize>, seq: u32) {
        let slot = self.shm.slot(self.topology.local_rank(), seq);
        sync::check_write(slot.wrapping_add(part.start), part.len());
        // SAFETY: `begin_round` waited until this rank owns the slot; a chunk fits a slot.
        unsafe { call.op.collective().pack(call, &self.topology, chunk, part, slot) };
    }

    /// The slice of a chunk that only this rank's tensors hold, not its slot, before and after the reduction.
    fn own_range(&self, call: &Call, chunk: usize) -> Range<usize> {
        match self.topology.shard() {
            Some(shard) if self.topology.hosts() == 1 && call.op.collective().reads_own_tensor(call) => {
                shard_range(&self.topology, call, chunk, shard)
            }
            _ => 0..0,
        }
    }

    fn pack(&mut self, call: &Call, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<PackedChunk> {
        let seq = self.begin_round(wait_ctx)?;
        let len = call.layout.chunk_len(chunk);
        let mut timer = PhaseTimer::start(wait_ctx.log(), len);
        if let Some(shared) = self.peer_memory().filter(|_| self.zero_copy) {
            // SAFETY: `begin_round` waited until this rank owns the slot.
            unsafe { zero_copy::post_addresses(call, self.shm.slot(self.topology.local_rank(), seq), shared) }?;
        } else {
            let own = self.own_range(call, chunk);
            [0..own.start, own.end..len].into_iter().for_each(|part| self.copy_in(call, chunk, part, seq));
        }
        self.shm.post_signature(seq, call.signature, self.zero_copy);
        self.shm.raise(Phase::Packed, seq);
        timer.end(Activity::Copy);
        wait_ctx.log().step();
        wait_ctx.log().flag();
        Ok(PackedChunk { seq, chunk, in_flight: None })
    }

    /// Between hosts: sends the first messages of this shard's slice once all ranks of the host have packed. `matched`:
    /// all hosts are known to have the same call.
    fn send_slice(
        &mut self,
        call: &Call,
        step: &mut PackedChunk,
        matched: bool,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        let (Some(_), Some(shard)) = (&self.inter_host, self.topology.shard()) else { return Ok(()) };
        self.shm.wait(Phase::Packed, step.seq, self.topology.local_size(), wait_ctx)?;
        let agreed = self.shm.same_signatures(step.seq);
        let slots = self.shm.slots(step.seq);
        let slice = slice_of(&self.topology, call, step.seq, step.chunk, shard, slots);
        let inter_host = self.inter_host.as_mut();
        step.in_flight =
            inter_host.map(|inter_host| inter_host.start(&slice, matched, agreed, wait_ctx)).transpose()?;
        Ok(())
    }

    /// Completes a packed chunk. Writes nothing unless all calls match.
    fn finish_chunk(&mut self, call: &Call, step: PackedChunk, wait_ctx: &WaitContext<'_>) -> Result<ChunkResult> {
        let log = wait_ctx.log();
        self.shm.wait(Phase::Packed, step.seq, self.topology.local_size(), wait_ctx)?;
        let mut timer = PhaseTimer::start(log, call.layout.chunk_len(step.chunk));
        // On a single host every rank compares the signatures; otherwise the shard owners find out.
        let agreed_here = self.shm.same_signatures(step.seq);
        if self.topology.hosts() == 1 && !agreed_here {
            self.finish_round(step.seq);
            return Ok(ChunkResult::Mismatch);
        }
        match self.shm.zero_copy_ranks(step.seq) {
            0 => {}
            all if all == self.topology.local_size() => {
                self.combine_zero_copy(call, step.seq, [step.chunk], wait_ctx)?;
                return Ok(ChunkResult::Matched);
            }
            _ => {
                self.finish_round(step.seq);
                return Ok(ChunkResult::MixedMemory);
            }
        }
        let PackedChunk { seq, chunk, in_flight } = step;
        if let Some(shard) = self.topology.shard() {
            let slots = self.shm.slots(seq);
            let slice = slice_of(&self.topology, call, seq, chunk, shard, slots);
            let agreed = match (in_flight, &mut self.inter_host) {
                (Some(in_flight), Some(inter_host)) => inter_host.finish(&slice, in_flight, wait_ctx)?,
                _ => {
                    if agreed_here {
                        combine(&slice);
                    }
                    agreed_here
                }
            };
            self.shm.agree(seq, agreed);
            self.shm.raise(Phase::Reduced, seq);
            log.flag();
            // Between hosts the exchange itself has timed its phases.
            if self.inter_host.is_none() {
                timer.end(Activity::Reduce);
            }
        }
        self.shm.wait(Phase::Reduced, seq, self.topology.num_shards(), wait_ctx)?;
        timer.reset();
        let agreed = self.shm.all_agreed(seq, self.topology.num_shards());
        if agreed {
            self.unpack(call, seq, chunk);
        }
        self.finish_round(seq);
        log.flag();
        timer.end(Activity::Copy);
        Ok(if agreed { ChunkResult::Matched } else { ChunkResult::Mismatch })
    }

    /// Reduces this shard's slice of these chunks in peer memory; ends the round.
    fn combine_zero_copy(
        &mut self,
        call: &Call,
        seq: u32,
        chunks: impl IntoIterator<Item = usize>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        if let (Some(shared), Some(shard_index)) = (self.peer_memory(), self.topology.shard()) {
            for chunk in chunks {
                let mut timer = PhaseTimer::start(wait_ctx.log(), call.layout.chunk_len(chunk));
                let shard = ShardView { topology: &self.topology, chunk, slots: self.shm.slots(seq) };
                // SAFETY: all slots hold addresses, so this shard owns its slice of all ranks' tensors.
                unsafe {
                    zero_copy::combine(call, &shard, shard_range(&self.topology, call, chunk, shard_index), shared)
                }?;
                timer.end(Activity::Reduce);
            }
        }
        self.shm.raise(Phase::Reduced, seq);
        self.finish_round(seq);
        Ok(())
    }

    /// Copies the results from the shards' slots to the tensors of every tower.
    fn unpack(&self, call: &Call, seq: u32, chunk: usize) {
        let own = self.own_range(call, chunk);
        // A large out-of-place result is not cached: store it non-temporally.
        let use_stream_copy = |buffer: &Buffer| !buffer.is_in_place() && call.layout.total() > STREAM_COPY_MIN_BYTES;
        for shard in 0..self.topology.num_shards() {
            let slot = self.shm.slot(shard, seq).cast_const();
            let slice = shard_range(&self.topology, call, chunk, shard);
            if slice == own {
                continue;
            }
            sync::check_read(slot.wrapping_add(slice.start), slice.len());
            for piece in call.layout.ranges(chunk, slice) {
                for buffer in call.tower_buffers(piece.tensor) {
                    // SAFETY: all shards have reduced, so the slots are read-only; the call owns the tensor's memory.
                    unsafe {
                        let from = slot.add(piece.offset);
                        let to = buffer.bytes_mut(piece.first, piece.count);
                        if call.wire_is_acc() {
                            call.reduction(buffer.dtype()).narrow(from, to.as_mut_ptr(), piece.count);
                        } else if use_stream_copy(buffer) {
                            stream_copy(from, to.as_mut_ptr(), to.len());
                        } else {
                            ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len());
                        }
                    }
                }
            }
        }
    }
}

fn out_of_sync(call: &Call, chunk: usize) -> Error {
    Error::Internal(format!("ranks out of sync in chunk {chunk} of {}", call.full_name()))
}

/// The slice of a chunk that a shard reduces.
pub(super) fn shard_range(topology: &Topology, call: &Call, chunk: usize, shard: usize) -> Range<usize> {
    slice(0..call.layout.chunk_len(chunk), shard, topology.num_shards())
}

/// The slice of shard `shard` in round `step`, with these slots.
fn slice_of<'a>(
    topology: &'a Topology,
    call: &'a Call,
    step: u32,
    chunk: usize,
    shard: usize,
    slots: &'a [*mut u8],
) -> Slice<'a> {
    let bytes = shard_range(topology, call, chunk, shard);
    Slice { collective: call.op.collective(), call, shard: ShardView { topology, chunk, slots }, bytes, step }
}

/// Reduces a shard's slice on a single host, after all ranks have packed.
fn combine(Slice { call, shard, bytes, .. }: &Slice<'_>) {
    shard.slots.iter().for_each(|&slot| sync::check_read(slot.wrapping_add(bytes.start), bytes.len()));
    sync::check_write(shard.own().wrapping_add(bytes.start), bytes.len());
    // SAFETY: all ranks have packed, so this shard owns its slice in all slots.
    unsafe { call.op.collective().combine(call, shard, bytes.clone()) };
}
