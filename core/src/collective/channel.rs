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
use super::plan::ChunkPlan;
use super::shard::ShardView;
use super::small_plan::SmallPlan;
use super::transfer;
use super::wire::shard_range;
use crate::error::{Error, Result};
use crate::timings::{Activity, PhaseTimer};
use crate::topology::Topology;
use crate::transport::peer_memory::DirectCopies;
use crate::transport::rounds::{AllPacked, AllReduced, InRound, Open, Packed, Round, Rounds};
use crate::transport::spin::Waiter;
use crate::transport::{HostLink, NetworkModel, ShmChannel, ShmRegion, SlotContent, WaitContext};

/// Shorter chunks always have the same place in a slot, so that this memory stays in the nearest caches.
const MIN_PLACED_BYTES: usize = 8 << 10;

/// A channel; see the module's documentation.
pub struct Channel {
    pub(super) topology: Arc<Topology>,
    pub(super) rounds: Rounds,
    /// This rank's shards with their links to other hosts, if there are any.
    pub(super) inter_host: Vec<InterHost>,
    /// How the last call runs.
    pub(super) plan: ChunkPlan,
    /// That by which the last call has run, if it was a small one.
    pub(super) small_plan: Option<SmallPlan>,
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
            rounds: Rounds::new(region),
            inter_host: Vec::new(),
            plan: ChunkPlan::default(),
            small_plan: None,
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

    /// The shared memory of its host.
    pub(super) fn region(&self) -> &Arc<ShmRegion> {
        self.rounds.shm().region()
    }

    /// Closes the links to other hosts; no calls may follow.
    pub(crate) fn close_links(&mut self) {
        self.inter_host.clear();
    }

    /// Sets who waits from now on.
    pub(crate) fn set_waiter(&self, waiter: Waiter) {
        self.rounds.shm().set_waiter(waiter);
    }

    /// Makes the memory of this rank, if needed, and waits for that of the other ranks. Before the first round.
    ///
    /// # Errors
    /// [`Error::System`] when there is not enough memory; those of the wait context.
    pub(crate) fn open(&self, wait_ctx: &WaitContext<'_>) -> Result<()> {
        self.rounds.shm().open(wait_ctx)
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
        (self.plan, self.small_plan) = (ChunkPlan { total, path, ..ChunkPlan::default() }, None);
        self.rounds.refresh();
        self.start_timer(call, total, kind);
        if call.is_small() {
            // Of later calls of this kind, too, which do not check.
            self.reserve(call, 0, 0, |bytes| self.rounds.shm().reserve_small(&bytes))?;
        }
        if call.is_small() && path == CallPath::First {
            return self.run_small(call, wait_ctx);
        }
        let mut result;
        if self.topology.hosts() > 1 {
            let active = ActiveCall { call, plan: self.plan, wait_ctx: *wait_ctx };
            let mut first = ChunksOf { active, next: Some(0), others: iter::empty(), compares: true };
            result = self.drive(&mut first)?;
            self.plan = first.active.plan;
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

    /// Between hosts: runs calls ([`Call::can_be_concurrent`]), several at once. A call other than the first begins once all
    /// ranks are known to have it. Returns false if the ranks' calls differ, which only those of the first call can; then
    /// nothing was written.
    ///
    /// # Errors
    /// Those of the transports; the channel is then unusable.
    pub fn run_concurrent(&mut self, calls: &mut dyn ChunkSource) -> Result<bool> {
        self.rounds.refresh();
        Ok(self.drive(calls)? == ChunkResult::Matched)
    }

    /// How the other chunks of the last call run.
    pub fn plan(&self) -> ChunkPlan {
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
        plan: ChunkPlan,
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

    /// The slots of a round for a chunk of `call`, by local rank. Chunks that are shorter than their part of a slot
    /// take turns in its places: a line that another rank has just read is still in that rank's cache, which makes
    /// writing it slow.
    pub(super) fn slots(&self, call: &Call, chunk: usize, state: impl InRound) -> &[*mut u8] {
        self.rounds.slots(state, self.place(call, chunk, state.round()))
    }

    /// The place in the slots of a round, which small calls do not use, for a chunk of `call`.
    fn place(&self, call: &Call, chunk: usize, round: Round) -> usize {
        let len = call.layout.chunk_len(chunk);
        if len < MIN_PLACED_BYTES || call.agrees_on_length() {
            return 0;
        }
        let layout = self.region().layout();
        let covered = len.div_ceil(layout.place_bytes());
        let disjoint = (call.compartment() / layout.place_bytes() / covered).min(layout.places());
        (round.number() / self.rounds.shm().window()) as usize % disjoint.max(1) * covered
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
        let (start, len) = (place * self.region().layout().place_bytes(), call.layout.chunk_len(chunk));
        if call.op.pattern() == Pattern::Line {
            return reserve(start..start + len);
        }
        let compartment = call.compartment();
        (0..call.slot() / compartment).try_for_each(|index| {
            let start = start + index * compartment;
            if start + len <= call.slot() { reserve(start..start + len) } else { Ok(()) }
        })
    }

    /// Copies this rank's input of a chunk into its slots, but `own` of the line.
    pub(super) fn copy_in(&self, call: &Call, chunk: usize, own: Range<usize>, open: Open) {
        let slots = self.slots(call, chunk, open);
        if call.op.pattern() != Pattern::Line {
            // SAFETY: the round is open, so this rank owns its compartments.
            return unsafe { transfer::pack_blocks(call, &self.topology, chunk, slots) };
        }
        // SAFETY: the round is open, so this rank owns the slot; a chunk fits a slot.
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

    /// Packs a chunk.
    pub(super) fn pack(&mut self, active: &ActiveCall<'_>, chunk: usize, open: Open) -> Result<Packed> {
        let ActiveCall { call, plan, wait_ctx } = active;
        let len = call.layout.chunk_len(chunk);
        let mut timer = PhaseTimer::start(wait_ctx.log(), len);
        let several_hosts = self.topology.hosts() > 1;
        // Between hosts the first chunk is copied, unless this rank is alone on its host: a host must not need more rounds
        // than the others. It says what the others can be.
        let offers = several_hosts && chunk == 0 && plan.all_chunks(call) > 1;
        let possible = if plan.zero_copy || offers { self.content(call, *plan) } else { SlotContent::Data };
        let content = if plan.zero_copy { possible } else { SlotContent::Data };
        if content == SlotContent::Data {
            let place = self.place(call, chunk, open.round());
            self.reserve(call, chunk, place, |bytes| open.reserve(&self.rounds, bytes))?;
            self.copy_in(call, chunk, self.own_range(call, chunk), open);
        } else {
            self.post_places(call, content, open)?;
        }
        let content = if several_hosts { possible } else { content };
        self.post_path_note(open);
        let packed = open.pack(&self.rounds, call.signature, content);
        timer.end(Activity::Copy);
        wait_ctx.log().round();
        wait_ctx.log().flag();
        Ok(packed)
    }

    /// The local rank whose slot has the results of `shard` of a line. On one host its owner has just read the
    /// contribution there: the same cache lines carry contribution and result.
    pub(super) fn result_rank(&self, shard: usize) -> usize {
        let next = usize::from(self.topology.hosts() == 1);
        (shard + next) % self.topology.local_size()
    }

    /// On a single host: this rank's shard of a chunk.
    pub(super) fn own_shard(&self, call: &Call, chunk: usize, all_packed: AllPacked) -> ShardView<'_> {
        let (shard, slots) = (self.topology.local_rank(), self.slots(call, chunk, all_packed));
        ShardView { topology: &self.topology, shard, chunk, slots, result: slots[self.result_rank(shard)], parts: 1 }
    }

    /// Takes a chunk of a direct call.
    pub(super) fn take(&self, call: &Call, chunk: usize, all_packed: AllPacked) {
        let shard = self.own_shard(call, chunk, all_packed);
        // SAFETY: all ranks have packed, and nobody writes a slot before all ranks have unpacked.
        unsafe { transfer::take_direct(call, &shard) };
    }

    /// Copies the results from the slots to the tensors of every tower.
    pub(super) fn unpack(&self, call: &Call, chunk: usize, all_reduced: AllReduced) {
        let slots = self.slots(call, chunk, all_reduced);
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
