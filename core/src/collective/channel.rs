//! One channel of a team: carries chunks of calls through the steps of the region and the exchanges between hosts.
//!
//! Every chunk, of whatever collective, begins with the same step, so that ranks that called different things still meet, see
//! each other's signatures, and can say so.
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

/// More bytes than the caches of a processor hold for one process.
const STREAM_COPY_MIN_BYTES: usize = 32 << 20;

/// A channel; see the module's text.
pub struct Channel {
    pub(super) topology: Arc<Topology>,
    pub(super) shm: ShmChannel,
    /// The way to the other hosts, for a rank that drives a shard where there are any.
    pub(super) inter_host: Option<InterHost>,
    /// The last step.
    pub(super) seq: u32,
    /// All ranks of the host are known to have unpacked this step.
    pub(super) freed_seq: u32,
    /// This rank has unpacked this step, whether or not it has raised its flag for it.
    pub(super) unpacked_seq: u32,
    /// This rank has raised all its flags for this step or a later one.
    refreshed: u32,
    /// Whether the last call's tensors are visible to all ranks, and its chunks hold their places.
    zero_copy: bool,
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChunkResult {
    /// All called the same, and it is done.
    Matched,
    /// All called the same, but not all brought places.
    MixedMemory,
    /// They called different things.
    Mismatch,
}

/// A step under way: this rank has packed chunk `chunk`.
struct PackedChunk {
    seq: u32,
    chunk: usize,
    /// The shard's slice, where it is on its way to other hosts.
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

    /// The same channel with the way to the other hosts, where there are any and this rank drives a shard.
    pub(crate) fn with(self, inter_host: Option<InterHost>) -> Channel {
        Channel { inter_host, ..self }
    }

    /// Lets go of the way to the other hosts; the channel carries no more calls. After a failure it stays as it is: to free a
    /// communicator takes all ranks, of which some may not come.
    pub(crate) fn close_links(&mut self, failed: bool) {
        let inter_host = self.inter_host.take();
        if failed {
            mem::forget(inter_host);
        }
    }

    /// Carries out the first chunk of `call`, and with it finds out whether all ranks called the same; false, on every rank
    /// and with nothing written, when they did not.
    ///
    /// # Errors
    /// Those of the transports; the channel can then not be used any more.
    pub fn run_first_chunk(&mut self, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<bool> {
        self.zero_copy = false;
        self.refresh();
        if call.is_small() {
            return self.exchange(call, wait_ctx);
        }
        self.zero_copy = self.shared().is_some_and(|shared| zero_copy::is_possible(call, shared));
        let mut step = self.pack(call, 0, wait_ctx)?;
        self.send_slice(call, &mut step, false, wait_ctx)?;
        let mut met = self.finish_chunk(call, step, wait_ctx)?;
        if met == ChunkResult::MixedMemory {
            self.zero_copy = false;
            let step = self.pack(call, 0, wait_ctx)?;
            met = self.finish_chunk(call, step, wait_ctx)?;
        }
        if met == ChunkResult::Matched && self.zero_copy && call.layout.chunks() == 1 {
            self.wait_reduced(wait_ctx)?;
        }
        Ok(met == ChunkResult::Matched)
    }

    /// Memory that the ranks see in each other, if there are no others than those of this host.
    fn shared(&self) -> Option<&dyn PeerMemory> {
        if self.topology.hosts() == 1 { self.shm.region().shared() } else { None }
    }

    /// Whether the first chunk of the last call held places, so that its other chunks do.
    pub fn is_zero_copy(&self) -> bool {
        self.zero_copy
    }

    /// Carries out further chunks of `call`, one packed and on its way to the other hosts ahead; `direct` is what
    /// [`Channel::is_direct`] told of the first.
    ///
    /// # Errors
    /// Those of the transports; the channel can then not be used any more.
    pub fn run_chunks(
        &mut self,
        call: &Call,
        chunks: impl Iterator<Item = usize>,
        direct: bool,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        self.zero_copy = direct;
        if direct {
            return self.run_chunks_zero_copy(call, chunks, wait_ctx);
        }
        let mut ahead: Option<PackedChunk> = None;
        for chunk in chunks {
            let mut next = self.pack(call, chunk, wait_ctx)?;
            self.send_slice(call, &mut next, true, wait_ctx)?;
            if let Some(step) = ahead.replace(next) {
                self.settle_matched(call, step, wait_ctx)?;
            }
        }
        ahead.map_or(Ok(()), |step| self.settle_matched(call, step, wait_ctx))
    }

    /// The same where the slots hold places: in one step.
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
                return Err(lost(call, first));
            }
            self.combine_zero_copy(call, step.seq, chunks, wait_ctx)?;
        }
        self.wait_reduced(wait_ctx)
    }

    fn settle_matched(&mut self, call: &Call, step: PackedChunk, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let chunk = step.chunk;
        match self.finish_chunk(call, step, wait_ctx)? {
            ChunkResult::Matched => Ok(()),
            _ => Err(lost(call, chunk)),
        }
    }

    /// Waits until the other ranks have written what they write to this rank's tensors.
    fn wait_reduced(&mut self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.shm.wait(Phase::Reduced, self.seq, self.topology.num_shards(), wait_ctx)
    }

    /// The number of the next step, once its slot is free. Also tells the other ranks what this one has unpacked: they may
    /// wait for it before they come to what this rank will wait for.
    pub(super) fn begin_round(&mut self, wait_ctx: &WaitContext<'_>) -> Result<u32> {
        if self.shm.own(Phase::Unpacked) != self.unpacked_seq {
            self.shm.raise(Phase::Unpacked, self.unpacked_seq);
            wait_ctx.log().flag();
        }
        self.next_seq(wait_ctx)
    }

    /// Raises the flags that short calls and calls that differ leave alone, before they fall so far behind that they seem to
    /// be ahead. To be called between calls, when this rank has done with all steps so far.
    #[inline]
    pub(super) fn refresh(&mut self) {
        if self.seq.wrapping_sub(self.refreshed) >= REFRESH {
            self.shm.raise(Phase::Reduced, self.seq);
            self.shm.raise(Phase::Unpacked, self.unpacked_seq);
            self.refreshed = self.seq;
        }
    }

    pub(super) fn next_seq(&mut self, wait_ctx: &WaitContext<'_>) -> Result<u32> {
        let number = self.seq.wrapping_add(1);
        if !self.is_free(number) {
            let before = number.wrapping_sub(2);
            self.shm.wait(Phase::Unpacked, before, self.topology.local_size(), wait_ctx)?;
            self.freed_seq = before;
        }
        self.seq = number;
        Ok(number)
    }

    /// Whether all ranks are known to have done with the slot of step `number`.
    pub(super) fn is_free(&self, number: u32) -> bool {
        reached(self.freed_seq, number.wrapping_sub(2))
    }

    /// This rank has taken what it wanted from step `number`.
    pub(super) fn finish_round(&mut self, number: u32) {
        self.unpacked_seq = number;
        self.shm.raise(Phase::Unpacked, number);
    }

    /// Copies `part` of a chunk into the slot of step `number`.
    pub(super) fn copy_in(&self, call: &Call, chunk: usize, part: Range<usize>, number: u32) {
        let slot = self.shm.slot(self.topology.local_rank(), number);
        sync::check_write(slot.wrapping_add(part.start), part.len());
        // SAFETY: `begin` waited until the slot is this rank's; a chunk is no longer than a slot.
        unsafe { call.op.collective().pack(call, &self.topology, chunk, part, slot) };
    }

    /// The slice of a chunk that this rank's tensors and nobody's slot hold, before and after the reduction.
    fn own_range(&self, call: &Call, chunk: usize) -> Range<usize> {
        match self.topology.shard() {
            Some(shard) if self.topology.hosts() == 1 && call.op.collective().reads_own_tensor(call) => {
                shard_range(&self.topology, call, chunk, shard)
            }
            _ => 0..0,
        }
    }

    fn pack(&mut self, call: &Call, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<PackedChunk> {
        let number = self.begin_round(wait_ctx)?;
        let len = call.layout.chunk_len(chunk);
        let mut timer = PhaseTimer::start(wait_ctx.log(), len);
        if let Some(shared) = self.shared().filter(|_| self.zero_copy) {
            // SAFETY: `begin` waited until the slot is this rank's.
            unsafe { zero_copy::post_addresses(call, self.shm.slot(self.topology.local_rank(), number), shared) }?;
        } else {
            let staying = self.own_range(call, chunk);
            [0..staying.start, staying.end..len].into_iter().for_each(|part| self.copy_in(call, chunk, part, number));
        }
        self.shm.post_signature(number, call.signature, self.zero_copy);
        self.shm.raise(Phase::Packed, number);
        timer.end(Activity::Copy);
        wait_ctx.log().step();
        wait_ctx.log().flag();
        Ok(PackedChunk { seq: number, chunk, in_flight: None })
    }

    /// Between hosts: sends the first messages of this shard's slice of a packed step, once all ranks of the host have packed
    /// it. `matched` where all hosts are known to have called the same.
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

    /// Brings a packed step to its end. Nothing is written unless the ranks agree.
    fn finish_chunk(&mut self, call: &Call, step: PackedChunk, wait_ctx: &WaitContext<'_>) -> Result<ChunkResult> {
        let log = wait_ctx.log();
        self.shm.wait(Phase::Packed, step.seq, self.topology.local_size(), wait_ctx)?;
        let mut timer = PhaseTimer::start(log, call.layout.chunk_len(step.chunk));
        // On one host every rank sees at once whether all agree; else the shards find out.
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
        let PackedChunk { seq: number, chunk, in_flight } = step;
        if let Some(shard) = self.topology.shard() {
            let slots = self.shm.slots(number);
            let slice = slice_of(&self.topology, call, number, chunk, shard, slots);
            let agreed = match (in_flight, &mut self.inter_host) {
                (Some(in_flight), Some(inter_host)) => inter_host.finish(&slice, in_flight, wait_ctx)?,
                _ => {
                    if agreed_here {
                        combine(&slice);
                    }
                    agreed_here
                }
            };
            self.shm.agree(number, agreed);
            self.shm.raise(Phase::Reduced, number);
            log.flag();
            // Between hosts the shard itself has told its parts apart.
            if self.inter_host.is_none() {
                timer.end(Activity::Reduce);
            }
        }
        self.shm.wait(Phase::Reduced, number, self.topology.num_shards(), wait_ctx)?;
        timer.reset();
        let agreed = self.shm.all_agreed(number, self.topology.num_shards());
        if agreed {
            self.unpack(call, number, chunk);
        }
        self.finish_round(number);
        log.flag();
        timer.end(Activity::Copy);
        Ok(if agreed { ChunkResult::Matched } else { ChunkResult::Mismatch })
    }

    /// A shard's work on a step whose slots hold places, for these chunks; ends the step.
    fn combine_zero_copy(
        &mut self,
        call: &Call,
        number: u32,
        chunks: impl IntoIterator<Item = usize>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        if let (Some(shared), Some(lane_index)) = (self.shared(), self.topology.shard()) {
            for chunk in chunks {
                let mut timer = PhaseTimer::start(wait_ctx.log(), call.layout.chunk_len(chunk));
                let shard = ShardView { topology: &self.topology, chunk, slots: self.shm.slots(number) };
                // SAFETY: all have packed places, so the slice of all their tensors is this shard's.
                unsafe {
                    zero_copy::combine(call, &shard, shard_range(&self.topology, call, chunk, lane_index), shared)
                }?;
                timer.end(Activity::Reduce);
            }
        }
        self.shm.raise(Phase::Reduced, number);
        self.finish_round(number);
        Ok(())
    }

    /// Copies the results from the shards' slots to the tensors of every tower.
    fn unpack(&self, call: &Call, number: u32, chunk: usize) {
        let staying = self.own_range(call, chunk);
        // A long result that is not where the argument was, and so in no cache, need not go through them.
        let streams = |buffer: &Buffer| !buffer.is_in_place() && call.layout.total() > STREAM_COPY_MIN_BYTES;
        for shard in 0..self.topology.num_shards() {
            let slot = self.shm.slot(shard, number).cast_const();
            let slice = shard_range(&self.topology, call, chunk, shard);
            if slice == staying {
                continue;
            }
            sync::check_read(slot.wrapping_add(slice.start), slice.len());
            for piece in call.layout.ranges(chunk, slice) {
                for buffer in call.tower_buffers(piece.tensor) {
                    // SAFETY: all shards have reduced, so the slots are read-only; the tensor's memory is the call's.
                    unsafe {
                        let from = slot.add(piece.offset);
                        let to = buffer.bytes_mut(piece.first, piece.count);
                        if call.wire_is_acc() {
                            call.reduction(buffer.dtype()).narrow(from, to.as_mut_ptr(), piece.count);
                        } else if streams(buffer) {
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

fn lost(call: &Call, chunk: usize) -> Error {
    Error::Internal(format!("ranks out of sync in chunk {chunk} of {}", call.full_name()))
}

/// The bytes of a chunk that a shard brings to an end.
pub(super) fn shard_range(topology: &Topology, call: &Call, chunk: usize, shard: usize) -> Range<usize> {
    slice(0..call.layout.chunk_len(chunk), shard, topology.num_shards())
}

/// What a shard does on the step `step`, which has these slots.
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

/// A shard's work on one host, once all have packed: completes its slice in its own slot.
fn combine(Slice { call, shard, bytes, .. }: &Slice<'_>) {
    shard.slots.iter().for_each(|&slot| sync::check_read(slot.wrapping_add(bytes.start), bytes.len()));
    sync::check_write(shard.own().wrapping_add(bytes.start), bytes.len());
    // SAFETY: all have packed, so this shard's slice is this thread's in all slots.
    unsafe { call.op.collective().combine(call, shard, bytes.clone()) };
}
