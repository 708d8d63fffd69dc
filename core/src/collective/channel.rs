//! A channel of a group: runs chunks of calls through rounds of shared memory and exchanges between hosts.
//!
//! Every chunk of any collective starts with the same round. So ranks with different calls still synchronize, compare
//! signatures, and can report the mismatch. The chunks under way are state machines ([`super::chunk_task`]).
//! Thread rule: used by one thread.

use std::iter;
use std::ops::Range;
use std::sync::Arc;

use super::algorithm::AlgorithmSetting;
use super::call::Call;
use super::chunk_source::{ActiveCall, ChunkSource, ChunksOf};
use super::inter_host::InterHost;
use super::operation::Pattern;
use super::path_choice::{CallPath, CallTimer, PathChoice};
use super::plan::Plan;
use super::shard::ShardView;
use super::transfer;
use super::wire::shard_range;
use crate::error::{Error, Result};
use crate::timings::{Activity, PhaseTimer};
use crate::topology::Topology;
use crate::transport::peer_memory::DirectCopies;
use crate::transport::spin::Waiter;
use crate::transport::step::{REFRESH, START, reached};
use crate::transport::{HostLink, NetworkModel, Phase, SMALL_WINDOW, ShmChannel, SlotContent, WaitContext};

/// Shorter chunks always have the same place in a slot, so that this memory stays in the nearest caches.
const MIN_PLACED_BYTES: usize = 8 << 10;

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
    /// The last round, if it was that of a small call.
    small_seq: Option<u32>,
    /// This rank has raised all its flags for this round or a later one.
    refreshed: u32,
    /// Between hosts: what this rank's slot could hold; once all ranks of the host have packed the first chunk, what those
    /// of all of them can.
    pub(super) offer: SlotContent,
    /// How the last call runs.
    pub(super) plan: Plan,
    /// Whether the system has refused to copy between private memories, on some rank; the same on all ranks.
    pub(super) is_refused: bool,
    /// Whether calls may copy directly.
    pub(super) direct_copies: DirectCopies,
    pub(super) path_choice: PathChoice,
    /// Of the call that runs, if it has a choice.
    pub(super) timer: Option<CallTimer>,
}

/// The outcome of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChunkResult {
    /// All calls matched; the chunk is complete.
    Matched,
    /// All calls matched, but a rank cannot access the tensors of another.
    NoAccess,
    /// The calls differ.
    Mismatch,
}

impl Channel {
    /// A channel over `region`, for the ranks of one host.
    pub fn new(topology: Arc<Topology>, region: ShmChannel) -> Channel {
        let direct_copies = match region.region().peer_memory() {
            Some(memory) if topology.hosts() == 1 => memory.direct_copies(),
            _ => DirectCopies::NONE,
        };
        Channel {
            topology,
            shm: region,
            inter_host: Vec::new(),
            seq: START,
            freed_seq: START,
            unpacked_seq: START,
            small_seq: None,
            refreshed: START,
            offer: SlotContent::Data,
            plan: Plan::default(),
            is_refused: false,
            direct_copies,
            path_choice: PathChoice::default(),
            timer: None,
        }
    }

    /// Adds the links to the other hosts, one for each shard of this rank, in their order.
    pub fn with_links(
        self,
        links: Vec<Box<dyn HostLink>>,
        network: NetworkModel,
        algorithm: AlgorithmSetting,
    ) -> Channel {
        let shards = self.topology.own_shards().zip(links);
        let inter_host =
            shards.map(|(shard, link)| InterHost::new(shard, link, &self.topology, network, algorithm)).collect();
        Channel { inter_host, ..self }
    }

    /// Closes the links to other hosts; no calls may follow.
    pub(crate) fn close_links(&mut self) {
        self.inter_host.clear();
    }

    /// Sets who waits from now on.
    pub(crate) fn set_waiter(&self, waiter: Waiter) {
        self.shm.set_waiter(waiter);
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
        let kind = self.kind(call, total);
        let path = kind.map_or(CallPath::First, |kind| self.path(call, kind));
        self.plan = Plan { total, path, ..Plan::default() };
        self.refresh();
        self.start_timer(call, total, kind);
        if call.is_small() {
            // Of later calls of this kind, too, which do not check.
            self.reserve(call, 0, 0, |bytes| self.shm.reserve_small(&bytes))?;
        }
        if call.is_small() && path == CallPath::First {
            return self.exchange(call, wait_ctx);
        }
        let mut result;
        if self.topology.hosts() > 1 {
            // The first chunk is copied: a host must not need more rounds than the others.
            self.offer = self.content(call);
            let active = ActiveCall { call, plan: self.plan, wait_ctx: *wait_ctx };
            result = self.drive(&mut ChunksOf { active, next: Some(0), others: iter::empty(), compares: true })?;
            self.plan.zero_copy = self.offer == SlotContent::PeerMemory;
        } else {
            self.plan.zero_copy = true;
            result = self.run_on_host(call, iter::once(0), false, wait_ctx)?;
            if result == ChunkResult::NoAccess {
                self.plan.zero_copy = false;
                result = self.run_on_host(call, iter::once(0), false, wait_ctx)?;
            }
        }
        match result {
            ChunkResult::Matched if self.plan.chunks(call) > 1 => {}
            ChunkResult::Matched => self.end_timer(),
            ChunkResult::NoAccess | ChunkResult::Mismatch => self.timer = None,
        }
        Ok(result == ChunkResult::Matched)
    }

    /// Between hosts: runs calls of one chunk each ([`Call::can_be_concurrent`]), several at once. A call other than the first
    /// begins once all ranks are known to have it. Returns false if the ranks' calls differ, which only those of the
    /// first call can; then nothing was written.
    ///
    /// # Errors
    /// Those of the transports; the channel is then unusable.
    pub fn run_concurrent(&mut self, calls: &mut dyn ChunkSource) -> Result<bool> {
        self.refresh();
        self.offer = SlotContent::Data;
        Ok(self.drive(calls)? == ChunkResult::Matched)
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
        chunks: impl Iterator<Item = usize> + Clone,
        plan: Plan,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        self.plan = plan;
        if self.topology.hosts() > 1 {
            let mut others = chunks;
            let active = ActiveCall { call, plan, wait_ctx: *wait_ctx };
            let mut source = ChunksOf { active, next: others.next(), others, compares: false };
            return self.drive(&mut source).map(|_matched| ());
        }
        if !plan.zero_copy || !self.run_chunks_zero_copy(call, chunks.clone(), wait_ctx)? {
            self.plan.zero_copy = false;
            self.run_on_host(call, chunks, true, wait_ctx)?;
        }
        self.end_timer();
        Ok(())
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
        let before = self.slot_freed_by(seq);
        if !reached(self.freed_seq, before) {
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

    fn next_seq(&mut self, wait_ctx: &WaitContext<'_>) -> Result<u32> {
        let seq = self.seq.wrapping_add(1);
        self.wait_until_freed(self.slot_freed_by(seq), wait_ctx)?;
        (self.seq, self.small_seq) = (seq, None);
        Ok(seq)
    }

    /// Waits until all ranks have unpacked round `before`.
    fn wait_until_freed(&mut self, before: u32, wait_ctx: &WaitContext<'_>) -> Result<()> {
        if !reached(self.freed_seq, before) {
            self.shm.wait(Phase::Unpacked, before, self.topology.local_size(), wait_ctx)?;
            self.freed_seq = before;
        }
        Ok(())
    }

    /// The last round that used the slot of round `seq`, apart from small ones. These need no wait: all ranks have posted
    /// the last small round, so they have finished those before it; the round after it uses another slot, since the last
    /// bits differ; and this round, the first of its call, ends before the second begins.
    pub(super) fn slot_freed_by(&self, seq: u32) -> u32 {
        seq.wrapping_sub(self.shm.window())
    }

    /// The number of the next round, for a small call; waits until its slot is free.
    pub(super) fn begin_small_round(&mut self, wait_ctx: &WaitContext<'_>) -> Result<u32> {
        let seq = self.seq.wrapping_add(1);
        self.wait_until_freed(seq.wrapping_sub(SMALL_WINDOW), wait_ctx)?;
        (self.seq, self.small_seq) = (seq, Some(seq));
        Ok(seq)
    }

    /// As `begin_small_round`, without waiting: `None` if the slot is not free.
    pub(super) fn try_begin_small_round(&mut self) -> Option<u32> {
        let seq = self.seq.wrapping_add(1);
        if !reached(self.freed_seq, seq.wrapping_sub(SMALL_WINDOW)) {
            return None;
        }
        (self.seq, self.small_seq) = (seq, Some(seq));
        Some(seq)
    }

    /// Ends round `seq`: this rank has read its results.
    pub(super) fn finish_round(&mut self, seq: u32) {
        self.unpacked_seq = seq;
        self.shm.raise(Phase::Unpacked, seq);
    }

    /// The slots of round `seq` for a chunk of `call`, by local rank. Chunks that are shorter than their part of a slot take
    /// turns in its places: a line that another rank has just read is still in that rank's cache, which makes writing it
    /// slow.
    pub(super) fn slots(&self, call: &Call, chunk: usize, seq: u32) -> &[*mut u8] {
        if self.small_seq == Some(seq) {
            return self.shm.small_slots(seq);
        }
        self.shm.slots_at(seq, self.place(call, chunk, seq))
    }

    /// The place in the slots of round `seq`, which is not a small one, for a chunk of `call`.
    fn place(&self, call: &Call, chunk: usize, seq: u32) -> usize {
        let len = call.layout.chunk_len(chunk);
        if len < MIN_PLACED_BYTES || call.agrees_on_length() {
            return 0;
        }
        let layout = self.shm.region().layout();
        let covered = len.div_ceil(layout.place_bytes());
        let disjoint = (call.compartment() / layout.place_bytes() / covered).min(layout.places());
        (seq / self.shm.window()) as usize % disjoint.max(1) * covered
    }

    /// Makes the memory of the parts of this rank's slot that chunk `chunk` of `call` uses in a round, by `reserve`.
    pub(super) fn reserve(
        &self,
        call: &Call,
        chunk: usize,
        place: usize,
        reserve: impl Fn(Range<usize>) -> Result<()>,
    ) -> Result<()> {
        if self.topology.hosts() > 1 || call.agrees_on_length() {
            return reserve(0..call.slot());
        }
        let (start, len) = (place * self.shm.region().layout().place_bytes(), call.layout.chunk_len(chunk));
        if call.op.pattern() == Pattern::Line {
            return reserve(start..start + len);
        }
        let compartment = call.compartment();
        (0..call.slot() / compartment).try_for_each(|index| {
            let start = start + index * compartment;
            if start + len <= call.slot() { reserve(start..start + len) } else { Ok(()) }
        })
    }

    /// Copies this rank's input of a chunk into the slots of round `seq`, but `own` of the line.
    pub(super) fn copy_in(&self, call: &Call, chunk: usize, own: Range<usize>, seq: u32) {
        let slots = self.slots(call, chunk, seq);
        if call.op.pattern() != Pattern::Line {
            // SAFETY: `begin_round` waited until all ranks had unpacked, so this rank owns its compartments.
            return unsafe { transfer::pack_blocks(call, &self.topology, chunk, slots) };
        }
        // SAFETY: `begin_round` waited until this rank owns the slot; a chunk fits a slot.
        unsafe {
            if own.start > 0 {
                transfer::pack_line(call, &self.topology, chunk, 0..own.start, slots);
            }
            transfer::pack_line(call, &self.topology, chunk, own.end..call.layout.chunk_len(chunk), slots);
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
    pub(super) fn pack(&mut self, active: &ActiveCall<'_>, chunk: usize, seq: u32) -> Result<()> {
        let ActiveCall { call, plan, wait_ctx } = active;
        let len = call.layout.chunk_len(chunk);
        let mut timer = PhaseTimer::start(wait_ctx.log(), len);
        let content = if plan.zero_copy { self.content(call) } else { SlotContent::Data };
        if content == SlotContent::Data {
            self.reserve(call, chunk, self.place(call, chunk, seq), |bytes| self.shm.reserve(seq, bytes))?;
            self.copy_in(call, chunk, self.own_range(call, chunk), seq);
        } else {
            self.post_places(call, content, seq)?;
        }
        let content = if self.topology.hosts() > 1 { self.offer } else { content };
        self.post_path_note(seq);
        self.shm.post_signature(seq, call.signature, content);
        self.shm.raise(Phase::Packed, seq);
        timer.end(Activity::Copy);
        wait_ctx.log().step();
        wait_ctx.log().flag();
        Ok(())
    }

    /// The local rank whose slot has the results of `shard` of a line. On one host its owner has just read the
    /// contribution there: the same cache lines carry contribution and result.
    pub(super) fn result_rank(&self, shard: usize) -> usize {
        let next = usize::from(self.topology.hosts() == 1);
        (shard + next) % self.topology.local_size()
    }

    /// On a single host: this rank's shard of a chunk.
    pub(super) fn own_shard(&self, call: &Call, chunk: usize, seq: u32) -> ShardView<'_> {
        let (shard, slots) = (self.topology.local_rank(), self.slots(call, chunk, seq));
        ShardView { topology: &self.topology, shard, chunk, slots, result: slots[self.result_rank(shard)] }
    }

    /// Takes a chunk of a direct call once all ranks have packed.
    pub(super) fn take(&self, call: &Call, chunk: usize, seq: u32) {
        let shard = self.own_shard(call, chunk, seq);
        // SAFETY: all ranks have packed, and nobody writes a slot before all ranks have unpacked.
        unsafe { transfer::take_direct(call, &shard) };
    }

    /// Copies the results from the slots to the tensors of every tower.
    pub(super) fn unpack(&self, call: &Call, seq: u32, chunk: usize) {
        let slots = self.slots(call, chunk, seq);
        if call.op.pattern() != Pattern::Line {
            // SAFETY: all shards have completed their blocks, so the slots are read-only; the call owns the tensors.
            return unsafe { transfer::take_blocks(call, &self.topology, chunk, slots) };
        }
        if !call.op.has_output(self.topology.rank()) || call.op.is_barrier() {
            return;
        }
        let own = self.own_range(call, chunk);
        for shard in 0..self.topology.num_shards() {
            let slice = shard_range(&self.topology, call, chunk, shard);
            if slice != own {
                // SAFETY: as above.
                unsafe { transfer::take_line(call, chunk, slice, self.result_rank(shard), slots) };
            }
        }
    }
}

pub(super) fn out_of_sync(call: &Call, chunk: usize) -> Error {
    Error::Internal(format!("ranks out of sync in chunk {chunk} of {}", call.full_name()))
}
