//! A channel of a group: runs chunks of calls through rounds of shared memory and exchanges between hosts.
//!
//! Every chunk of any collective starts with the same round. So ranks with different calls still synchronize, compare
//! signatures, and can report the mismatch.
//! Thread rule: used by one thread.

use std::ops::Range;
use std::sync::Arc;

use super::call::Call;
use super::inter_host::{InFlightSlice, InterHost, Slice};
use super::operation::Pattern;
use super::partials::inter_host_ops;
use super::shard::ShardView;
use super::transfer;
use super::wire::shard_range;
use crate::error::{Error, Result};
use crate::timings::{Activity, PhaseTimer};
use crate::topology::Topology;
use crate::transport::step::{REFRESH, START, reached};
use crate::transport::{Phase, ShmChannel, SlotContent, WaitContext};

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
    /// How the last call runs.
    pub(super) plan: Plan,
    /// Whether the system has refused to copy between private memories, on some rank; the same on all ranks.
    pub(super) is_refused: bool,
}

/// What the first chunk of a call has shown about the others; the same on all ranks of a host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Plan {
    /// Whether all ranks can access the tensors, and the slots hold addresses.
    pub zero_copy: bool,
    /// Whether the first round has completed all chunks.
    pub is_complete: bool,
    /// Bytes of the longest block, or of the line; the same on all ranks.
    pub total: usize,
}

impl Plan {
    /// The number of chunks that run one after the other, the first of which has run.
    pub fn chunks(self, call: &Call) -> usize {
        if self.is_complete { 1 } else { self.all_chunks(call) }
    }

    /// The number of chunks of `call`.
    pub(super) fn all_chunks(self, call: &Call) -> usize {
        self.total.div_ceil(call.layout.chunk_size()).max(1)
    }

    /// Bytes of chunk `chunk` of the longest block.
    fn chunk_len(self, call: &Call, chunk: usize) -> usize {
        self.total.saturating_sub(chunk * call.layout.chunk_size()).min(call.layout.chunk_size())
    }
}

/// The outcome of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChunkResult {
    /// All calls matched; the chunk is complete.
    Matched,
    /// All calls matched, but the tensors cannot be accessed by all ranks: the round must be repeated with copies.
    NoAccess,
    /// The calls differ.
    Mismatch,
}

/// A round in progress: this rank has packed chunk `chunk`.
pub(super) struct PackedChunk {
    pub seq: u32,
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
            plan: Plan::default(),
            is_refused: false,
        }
    }

    /// Adds links to the other hosts, if there are any and this rank owns a shard.
    pub(crate) fn with(self, inter_host: Option<InterHost>) -> Channel {
        Channel { inter_host, ..self }
    }

    /// Closes the links to other hosts; no calls may follow.
    pub(crate) fn close_links(&mut self) {
        drop(self.inter_host.take());
    }

    /// Makes the memory of this rank, if needed, and waits for that of the other ranks. Before the first round.
    ///
    /// # Errors
    /// [`Error::System`] when there is not enough memory; those of the wait context.
    pub(crate) fn open(&self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.shm.open(wait_ctx)
    }

    /// Runs the first chunk of `call`, which checks that the calls match. Returns false on every rank, with nothing
    /// written, if they differ.
    ///
    /// # Errors
    /// Those of the transports; the channel is then unusable.
    pub fn run_first_chunk(&mut self, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<bool> {
        self.run_first_chunk_of(call, call.layout.total(), wait_ctx)
    }

    /// As `run_first_chunk`; the longest block of all ranks has `total` bytes.
    pub(super) fn run_first_chunk_of(&mut self, call: &Call, total: usize, wait_ctx: &WaitContext<'_>) -> Result<bool> {
        self.plan = Plan { total, ..Plan::default() };
        self.refresh();
        if call.is_small() {
            return self.exchange(call, wait_ctx);
        }
        self.plan.zero_copy = self.topology.hosts() == 1;
        let mut step = self.pack(call, 0, wait_ctx)?;
        self.send_slice(call, &mut step, false, wait_ctx)?;
        let mut result = self.finish_chunk(call, step, wait_ctx)?;
        if result == ChunkResult::NoAccess {
            self.plan.zero_copy = false;
            let step = self.pack(call, 0, wait_ctx)?;
            result = self.finish_chunk(call, step, wait_ctx)?;
        }
        Ok(result == ChunkResult::Matched)
    }

    /// How the other chunks of the last call run.
    pub fn plan(&self) -> Plan {
        self.plan
    }

    /// Runs further chunks of `call`. Packs and sends each chunk before it completes the previous one. `plan` is that
    /// of the channel that ran the first chunk.
    ///
    /// # Errors
    /// Those of the transports; the channel is then unusable.
    pub fn run_chunks(
        &mut self,
        call: &Call,
        chunks: impl Iterator<Item = usize> + Clone,
        plan: Plan,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        self.plan = plan;
        if plan.zero_copy && self.run_chunks_zero_copy(call, chunks.clone(), wait_ctx)? {
            return Ok(());
        }
        self.plan.zero_copy = false;
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

    fn finish_matched(&mut self, call: &Call, step: PackedChunk, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let chunk = step.chunk;
        match self.finish_chunk(call, step, wait_ctx)? {
            ChunkResult::Matched => Ok(()),
            _ => Err(out_of_sync(call, chunk)),
        }
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

    /// Copies this rank's input of a chunk into the slots of round `seq`, but `own` of the line.
    pub(super) fn copy_in(&self, call: &Call, chunk: usize, own: Range<usize>, seq: u32) {
        let slots = self.shm.slots(seq);
        if call.op.pattern() != Pattern::Line {
            // SAFETY: `begin_round` waited until all ranks had unpacked, so this rank owns its compartments.
            return unsafe { transfer::pack_blocks(call, &self.topology, chunk, slots) };
        }
        let slot = slots[self.topology.local_rank()];
        // SAFETY: `begin_round` waited until this rank owns the slot; a chunk fits a slot.
        unsafe {
            if own.start > 0 {
                transfer::pack_line(call, &self.topology, chunk, 0..own.start, slot);
            }
            transfer::pack_line(call, &self.topology, chunk, own.end..call.layout.chunk_len(chunk), slot);
        }
    }

    /// The slice of a chunk that only this rank's tensors hold, not its slot, before and after the reduction.
    fn own_range(&self, call: &Call, chunk: usize) -> Range<usize> {
        match self.topology.shard() {
            Some(shard) if transfer::reads_own_tensor(call, &self.topology) => {
                shard_range(&self.topology, call, chunk, shard)
            }
            _ => 0..0,
        }
    }

    pub(super) fn pack(&mut self, call: &Call, chunk: usize, wait_ctx: &WaitContext<'_>) -> Result<PackedChunk> {
        let seq = self.begin_round(wait_ctx)?;
        let len = call.layout.chunk_len(chunk);
        let mut timer = PhaseTimer::start(wait_ctx.log(), len);
        let content = if self.plan.zero_copy { self.content(call) } else { SlotContent::Data };
        if content == SlotContent::Data {
            self.copy_in(call, chunk, self.own_range(call, chunk), seq);
        } else {
            self.post_places(call, content, seq)?;
        }
        self.shm.post_signature(seq, call.signature, content);
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
        if self.inter_host.is_none() {
            return Ok(());
        }
        self.shm.wait(Phase::Packed, step.seq, self.topology.local_size(), wait_ctx)?;
        let agreed = self.shm.same_signatures(step.seq);
        let slots = self.shm.slots(step.seq);
        let slice = slice_of(&self.topology, call, step.seq, step.chunk, self.plan, slots);
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
        if self.shm.zero_copy_ranks(step.seq) > 0 {
            return self.finish_first_zero_copy(call, step.seq, wait_ctx);
        }
        self.plan.zero_copy = false;
        let PackedChunk { seq, chunk, in_flight } = step;
        if transfer::is_direct(call, &self.topology) {
            self.take(call, chunk, seq);
            // Nobody waits for this flag, but it must not lag so far that it looks newer.
            self.shm.raise(Phase::Reduced, seq);
            self.finish_round(seq);
            log.flag();
            timer.end(Activity::Copy);
            return Ok(ChunkResult::Matched);
        }
        if self.topology.shard().is_some() {
            let slots = self.shm.slots(seq);
            let slice = slice_of(&self.topology, call, seq, chunk, self.plan, slots);
            let agreed = match (in_flight, &mut self.inter_host) {
                (Some(in_flight), Some(inter_host)) => inter_host.finish(&slice, in_flight, wait_ctx)?,
                _ => {
                    if agreed_here {
                        // SAFETY: all ranks have packed, so this shard owns its slice in all slots.
                        unsafe { transfer::reduce_slice(call, &slice.shard, slice.bytes.clone()) };
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

    /// Takes a chunk of a direct call once all ranks have packed.
    pub(super) fn take(&self, call: &Call, chunk: usize, seq: u32) {
        let shard = ShardView { topology: &self.topology, chunk, slots: self.shm.slots(seq) };
        // SAFETY: all ranks have packed, and nobody writes a slot before all ranks have unpacked.
        unsafe { transfer::take_direct(call, &shard) };
    }

    /// Copies the results from the shards' slots to the tensors of every tower.
    fn unpack(&self, call: &Call, seq: u32, chunk: usize) {
        let slots = self.shm.slots(seq);
        if call.op.pattern() != Pattern::Line {
            // SAFETY: all shards have completed their blocks, so the slots are read-only; the call owns the tensors.
            return unsafe { transfer::take_blocks(call, &self.topology, chunk, slots) };
        }
        if !call.op.has_output(self.topology.rank()) || call.op.is_barrier() {
            return;
        }
        let own = self.own_range(call, chunk);
        for (shard, &slot) in slots.iter().enumerate().take(self.topology.num_shards()) {
            let slice = shard_range(&self.topology, call, chunk, shard);
            if slice != own {
                // SAFETY: as above.
                unsafe { transfer::take_line(call, chunk, slice, slot) };
            }
        }
    }
}

pub(super) fn out_of_sync(call: &Call, chunk: usize) -> Error {
    Error::Internal(format!("ranks out of sync in chunk {chunk} of {}", call.full_name()))
}

/// The slice of this rank's shard in round `step`, with these slots.
fn slice_of<'a>(
    topology: &'a Topology,
    call: &'a Call,
    step: u32,
    chunk: usize,
    plan: Plan,
    slots: &'a [*mut u8],
) -> Slice<'a> {
    let bytes = shard_range(topology, call, chunk, topology.local_rank());
    let (ops, block_len) = (inter_host_ops(call), plan.chunk_len(call, chunk));
    Slice { ops, call, shard: ShardView { topology, chunk, slots }, bytes, block_len, step }
}
