//! A channel of a group: runs chunks of calls through rounds of shared memory and exchanges between hosts.
//!
//! Every chunk of any collective starts with the same round. So ranks with different calls still synchronize, compare
//! signatures, and can report the mismatch. The chunks under way are state machines ([`super::chunk_task`]).
//! Thread rule: used by one thread.

use std::iter;
use std::ops::Range;
use std::sync::Arc;

use super::call::Call;
use super::inter_host::InterHost;
use super::operation::Pattern;
use super::shard::ShardView;
use super::transfer;
use super::wire::shard_range;
use super::zero_copy;
use crate::error::{Error, Result};
use crate::timings::{Activity, PhaseTimer};
use crate::topology::Topology;
use crate::transport::arena::PeerMemory;
use crate::transport::step::{REFRESH, START, reached};
use crate::transport::{Phase, ShmChannel, WaitContext};

/// A channel; see the module's documentation.
pub struct Channel {
    pub(super) topology: Arc<Topology>,
    pub(super) shm: ShmChannel,
    /// This rank's shards with their links to other hosts, if there are any.
    pub(super) inter_host: Vec<InterHost>,
    /// The last round.
    pub(super) seq: u32,
    /// All ranks of the host have unpacked this round.
    pub(super) freed_seq: u32,
    /// This rank has unpacked this round, but may not have raised its flag for it.
    pub(super) unpacked_seq: u32,
    /// This rank has raised all its flags for this round or a later one.
    refreshed: u32,
    /// Whether this rank's tensors are in peer memory; between hosts, once all ranks of the host have packed the first
    /// chunk, whether those of all of them are.
    pub(super) can_zero_copy: bool,
    /// How the last call runs.
    pub(super) plan: Plan,
}

/// What the first chunk of a call has shown about the others; the same on all ranks of a host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Plan {
    /// Whether all ranks of the host can access the tensors, and the slots hold addresses.
    pub zero_copy: bool,
    /// Bytes of the longest block, or of the line; the same on all ranks.
    pub total: usize,
}

impl Plan {
    /// The number of chunks of `call`.
    pub fn chunks(self, call: &Call) -> usize {
        self.total.div_ceil(call.layout.chunk_size()).max(1)
    }

    /// Bytes of chunk `chunk` of the longest block.
    pub(super) fn chunk_len(self, call: &Call, chunk: usize) -> usize {
        self.total.saturating_sub(chunk * call.layout.chunk_size()).min(call.layout.chunk_size())
    }
}

/// The outcome of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChunkResult {
    /// All calls matched; the chunk is complete.
    Matched,
    /// All calls matched, but only some slots hold addresses.
    MixedMemory,
    /// The calls differ.
    Mismatch,
}

impl Channel {
    /// A channel over `region`, for the ranks of one host.
    pub fn new(topology: Arc<Topology>, region: ShmChannel) -> Channel {
        Channel {
            topology,
            shm: region,
            inter_host: Vec::new(),
            seq: START,
            freed_seq: START,
            unpacked_seq: START,
            refreshed: START,
            can_zero_copy: false,
            plan: Plan::default(),
        }
    }

    /// Adds the links to the other hosts, one for each shard of this rank.
    pub(crate) fn with(self, inter_host: Vec<InterHost>) -> Channel {
        Channel { inter_host, ..self }
    }

    /// Closes the links to other hosts; no calls may follow.
    pub(crate) fn close_links(&mut self) {
        self.inter_host.clear();
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
        self.plan = Plan { zero_copy: false, total: call.layout.total() };
        self.refresh();
        if call.is_small() {
            return self.exchange(call, wait_ctx);
        }
        self.can_zero_copy = self.peer_memory().is_some_and(|shared| zero_copy::is_possible(call, shared));
        if self.topology.hosts() > 1 {
            // The first chunk is copied: a host must not need more rounds than the others.
            let result = self.drive(call, iter::once(0), false, wait_ctx)?;
            self.plan.zero_copy = self.can_zero_copy;
            return Ok(result == ChunkResult::Matched);
        }
        self.plan.zero_copy = self.can_zero_copy;
        let mut result = self.drive(call, iter::once(0), false, wait_ctx)?;
        if result == ChunkResult::MixedMemory {
            (self.can_zero_copy, self.plan.zero_copy) = (false, false);
            result = self.drive(call, iter::once(0), false, wait_ctx)?;
        }
        if result == ChunkResult::Matched && self.plan.zero_copy && call.layout.chunks() == 1 {
            self.wait_reduced(wait_ctx)?;
        }
        Ok(result == ChunkResult::Matched)
    }

    /// Peer memory of the ranks of this host.
    pub(super) fn peer_memory(&self) -> Option<&dyn PeerMemory> {
        self.shm.region().peer_memory()
    }

    /// How the other chunks of the last call run.
    pub fn plan(&self) -> Plan {
        self.plan
    }

    /// Runs further chunks of `call`, several at once. `plan` is that of the channel that ran the first chunk.
    ///
    /// # Errors
    /// Those of the transports; the channel is then unusable.
    pub fn run_chunks(
        &mut self,
        call: &Call,
        chunks: impl Iterator<Item = usize>,
        plan: Plan,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        (self.plan, self.can_zero_copy) = (plan, plan.zero_copy);
        if plan.zero_copy && self.topology.hosts() == 1 {
            return self.run_chunks_zero_copy(call, chunks, wait_ctx);
        }
        self.drive(call, chunks, true, wait_ctx).map(|_matched| ())
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
            let seq = self.begin_round(wait_ctx)?;
            self.pack(call, first, seq, wait_ctx)?;
            self.shm.wait(Phase::Packed, seq, self.topology.local_size(), wait_ctx)?;
            if !self.shm.same_signatures(seq) {
                return Err(out_of_sync(call, first));
            }
            self.combine_zero_copy(call, seq, chunks, wait_ctx)?;
        }
        self.wait_reduced(wait_ctx)
    }

    /// Waits until the other ranks have written this rank's tensors.
    fn wait_reduced(&mut self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.shm.wait(Phase::Reduced, self.seq, self.topology.num_owners(), wait_ctx)
    }

    /// The number of the next round, once its slot is free. Also posts `Unpacked`: peers may need it before they can
    /// make progress.
    pub(super) fn begin_round(&mut self, wait_ctx: &WaitContext<'_>) -> Result<u32> {
        self.post_unpacked(wait_ctx);
        self.next_seq(wait_ctx)
    }

    /// As `begin_round`, without waiting: `None` if the slot is not free.
    pub(super) fn try_begin_round(&mut self, wait_ctx: &WaitContext<'_>) -> Option<u32> {
        self.post_unpacked(wait_ctx);
        let seq = self.seq.wrapping_add(1);
        if !self.is_free(seq) {
            let before = self.slot_freed_by(seq);
            if !self.shm.all_reached(Phase::Unpacked, before, self.topology.local_size()) {
                return None;
            }
            self.freed_seq = before;
        }
        self.seq = seq;
        Some(seq)
    }

    fn post_unpacked(&self, wait_ctx: &WaitContext<'_>) {
        if self.shm.own(Phase::Unpacked) != self.unpacked_seq {
            self.shm.raise(Phase::Unpacked, self.unpacked_seq);
            wait_ctx.log().flag();
        }
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
            let before = self.slot_freed_by(seq);
            self.shm.wait(Phase::Unpacked, before, self.topology.local_size(), wait_ctx)?;
            self.freed_seq = before;
        }
        self.seq = seq;
        Ok(seq)
    }

    /// Whether all ranks have finished with the slot of round `seq`.
    pub(super) fn is_free(&self, seq: u32) -> bool {
        reached(self.freed_seq, self.slot_freed_by(seq))
    }

    /// The last round that used the slot of round `seq`.
    pub(super) fn slot_freed_by(&self, seq: u32) -> u32 {
        seq.wrapping_sub(self.shm.window())
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
        if transfer::reads_own_tensor(call, &self.topology) {
            // On a single host every rank owns the shard of its local rank.
            return shard_range(&self.topology, call, chunk, self.topology.local_rank());
        }
        0..0
    }

    /// Packs a chunk in round `seq`, which this rank has begun.
    pub(super) fn pack(&self, call: &Call, chunk: usize, seq: u32, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let len = call.layout.chunk_len(chunk);
        let mut timer = PhaseTimer::start(wait_ctx.log(), len);
        if let Some(shared) = self.peer_memory().filter(|_| self.plan.zero_copy) {
            // SAFETY: `begin_round` waited until this rank owns the slot.
            unsafe { zero_copy::post_addresses(call, self.shm.slot(self.topology.local_rank(), seq), shared) }?;
        } else {
            self.copy_in(call, chunk, self.own_range(call, chunk), seq);
        }
        self.shm.post_signature(seq, call.signature, self.can_zero_copy);
        self.shm.raise(Phase::Packed, seq);
        timer.end(Activity::Copy);
        wait_ctx.log().step();
        wait_ctx.log().flag();
        Ok(())
    }

    /// Reduces this shard's slice of these chunks in peer memory; ends the round.
    pub(super) fn combine_zero_copy(
        &mut self,
        call: &Call,
        seq: u32,
        chunks: impl IntoIterator<Item = usize>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        if let Some(shared) = self.peer_memory() {
            for chunk in chunks {
                let mut timer = PhaseTimer::start(wait_ctx.log(), call.layout.chunk_len(chunk));
                let shard = self.own_shard(chunk, seq);
                let slice = shard_range(&self.topology, call, chunk, shard.shard);
                // SAFETY: all slots hold addresses, so this shard owns its slice of all ranks' tensors.
                unsafe { zero_copy::combine(call, &shard, slice, shared) }?;
                timer.end(Activity::Reduce);
            }
        }
        self.shm.raise(Phase::Reduced, seq);
        self.finish_round(seq);
        Ok(())
    }

    /// On a single host: this rank's shard of a chunk.
    pub(super) fn own_shard(&self, chunk: usize, seq: u32) -> ShardView<'_> {
        let (shard, slots) = (self.topology.local_rank(), self.shm.slots(seq));
        ShardView { topology: &self.topology, shard, chunk, slots, result: slots[shard] }
    }

    /// Takes a chunk of a direct call once all ranks have packed.
    pub(super) fn take(&self, call: &Call, chunk: usize, seq: u32) {
        let shard = self.own_shard(chunk, seq);
        // SAFETY: all ranks have packed, and nobody writes a slot before all ranks have unpacked.
        unsafe { transfer::take_direct(call, &shard) };
    }

    /// Copies the results from the shards' slots to the tensors of every tower.
    pub(super) fn unpack(&self, call: &Call, seq: u32, chunk: usize) {
        let slots = self.shm.slots(seq);
        if call.op.pattern() != Pattern::Line {
            // SAFETY: all shards have completed their blocks, so the slots are read-only; the call owns the tensors.
            return unsafe { transfer::take_blocks(call, &self.topology, chunk, slots) };
        }
        if !call.op.has_output(self.topology.rank()) || call.op.is_barrier() {
            return;
        }
        let own = self.own_range(call, chunk);
        for shard in 0..self.topology.num_shards() {
            let slot = slots[shard % slots.len()];
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
