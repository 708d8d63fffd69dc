//! The chunks of calls between hosts: a window of state machines, and the loop that advances them.
//!
//! A chunk is packed; when all ranks of the host have packed it, the shard owners reduce their slices, between hosts by
//! exchanges of messages; when all slices are complete, every rank unpacks. On a host with more ranks than shards, all
//! ranks reduce parts of the slices before the exchange. A chunk advances as soon as it can, whatever the others wait for,
//! but flags are raised in the order of the chunks. The oldest chunk comes first, and new ones last: a thread that packs or
//! reduces many chunks at once leaves the links idle meanwhile. A thread without work polls, because messages wake nobody.
//! The chunks are those of one call or of several. On one host there is [`super::host_chunks`] instead.
//! Thread rule: as for [`Channel`].

use std::collections::VecDeque;

use smallvec::SmallVec;

use super::call::Call;
use super::channel::{Channel, ChunkResult, out_of_sync};
use super::chunk_source::{ActiveCall, ChunkSource, NextChunk};
use super::in_place::ReducingInPlace;
use super::inter_host::{HostCalls, InFlightSlice, Slice};
use super::lookahead::Lookahead;
use super::partials::{InterHostOps, Piece, inter_host_ops};
use super::plan::ChunkPlan;
use super::selection::{MIN_CHUNKS_UNDER_WAY, max_bytes_under_way};
use super::shard::ShardView;
use super::wire::{num_parts, shard_range};
use crate::error::Result;
use crate::timings::{Activity, PhaseTimer};
use crate::transport::rounds::{AllPacked, Awaited, InRound, Packed, Reduced, Rounds};
use crate::transport::{HostLink, HostWait, SlotContent, WaitContext, check_hosts};
use crate::wire_layout::slice;

/// A chunk under way.
struct ChunkTask {
    /// The number of its call.
    call: usize,
    chunk: usize,
    /// Its bytes for a shard.
    bytes: usize,
    /// As in [`NextChunk`].
    is_first: bool,
    compares: bool,
    /// How it runs; later chunks of its call may be in place instead.
    plan: ChunkPlan,
    stage: ChunkStage,
    /// In the first chunk of a call, once all ranks of the host have packed it: whether the others are in place.
    others_in_place: Option<bool>,
    /// What is known of the calls of all ranks.
    calls: HostCalls,
    /// In so many parts reducers of this rank's shard reduce its slice, if the ranks of the host have the same call; 1: the
    /// owner does it alone.
    parts: usize,
    /// Between hosts: the slices of this rank's shards; `None` once they are complete.
    slices: SmallVec<[Option<InFlightSlice>; 1]>,
}

/// What a chunk waits for.
#[derive(Debug, Clone, Copy)]
enum ChunkStage {
    /// All ranks of the host to pack it.
    Packed(Packed),
    /// The other reducers of this rank's shard.
    InParts(AllPacked),
    /// Messages of other hosts.
    Exchanging(AllPacked),
    /// The chunks before it: the slices of this rank are complete.
    Complete(AllPacked),
    /// All slices to be complete.
    Reduced(Reduced),
    /// Nothing. All ranks have the same call, and this many behind it, or the calls differ.
    Ended(Option<usize>),
}

impl ChunkStage {
    /// The number of the stage.
    fn number(self) -> u8 {
        match self {
            ChunkStage::Packed(_) => 0,
            ChunkStage::InParts(_) => 1,
            ChunkStage::Exchanging(_) => 2,
            ChunkStage::Complete(_) => 3,
            ChunkStage::Reduced(_) => 4,
            ChunkStage::Ended(_) => 5,
        }
    }
}

impl Channel {
    /// Runs the chunks of `source` between hosts. Returns a difference between the ranks' calls, after which no other
    /// chunk is under way.
    pub(super) fn drive(&mut self, source: &mut dyn ChunkSource) -> Result<ChunkResult> {
        let mut tasks: VecDeque<ChunkTask> = VecDeque::with_capacity(self.rounds.shm().window() as usize);
        let mut wait = HostWait::default();
        // The oldest call is the one that waits.
        while let Some(oldest) = tasks.front().map(|task| task.call).or_else(|| source.next().map(|next| next.call)) {
            let ahead = tasks.len() < MIN_CHUNKS_UNDER_WAY;
            let mut moved = ahead && self.begin_chunk(source, &mut tasks)?;
            for shard in &mut self.inter_host {
                wait.poll(shard.link.as_mut(), &source.call(oldest).wait_ctx)?;
            }
            moved |= self.advance_one(source, &mut tasks)?;
            if !moved {
                moved = self.begin_chunk(source, &mut tasks)?;
            }
            let wait_ctx = source.call(oldest).wait_ctx;
            if moved {
                wait.progress(&wait_ctx);
            } else {
                self.wait_for_progress(&tasks, &mut wait, &wait_ctx)?;
            }
            while let Some(&ChunkTask { stage: ChunkStage::Ended(agreed), call, chunk, compares, .. }) = tasks.front() {
                tasks.pop_front();
                match agreed {
                    Some(ahead) => source.ended(call, ahead),
                    None if compares && tasks.is_empty() => return Ok(ChunkResult::Mismatch),
                    None => return Err(out_of_sync(source.call(call).call, chunk)),
                }
            }
        }
        Ok(ChunkResult::Matched)
    }

    /// Packs the next chunk, if there is one and room for it.
    fn begin_chunk(&mut self, source: &mut dyn ChunkSource, tasks: &mut VecDeque<ChunkTask>) -> Result<bool> {
        if tasks.len() < self.rounds.shm().window() as usize
            && let Some(NextChunk { call, chunk, is_first, compares }) = source.next()
        {
            let active = source.call(call);
            let bytes = active.plan.chunk_len(active.call, chunk) * active.call.blocks() / self.topology.num_shards();
            let under_way: usize = tasks.iter().map(|task| task.bytes).sum();
            if tasks.len() >= MIN_CHUNKS_UNDER_WAY && under_way + bytes > max_bytes_under_way(self.topology.hosts()) {
                return Ok(false);
            }
            let Some(open) = self.rounds.try_begin(&active.wait_ctx) else { return Ok(false) };
            open.post_lookahead(&self.rounds, source.begin().0);
            if is_first && self.topology.local_size() == 1 {
                let ActiveCall { call: of_rank, plan, .. } = source.call(call);
                let in_place = self.content(of_rank, plan) == SlotContent::PeerMemory;
                source.set_in_place(call, in_place);
            }
            let active = source.call(call);
            let stage = ChunkStage::Packed(self.pack(&active, chunk, open)?);
            let (plan, calls, slices) = (active.plan, HostCalls::default(), SmallVec::new());
            let parts = num_parts(&self.topology, active.call, chunk, self.topology.own_part().0);
            let others_in_place = None;
            let task = ChunkTask {
                call,
                chunk,
                bytes,
                is_first,
                compares,
                plan,
                stage,
                others_in_place,
                calls,
                parts,
                slices,
            };
            tasks.push_back(task);
            return Ok(true);
        }
        Ok(false)
    }

    /// Advances the oldest chunk that can advance; returns whether there is one.
    fn advance_one(&mut self, source: &mut dyn ChunkSource, tasks: &mut VecDeque<ChunkTask>) -> Result<bool> {
        let mut previous = u8::MAX;
        for task in tasks {
            let active = ActiveCall { plan: task.plan, ..source.call(task.call) };
            if self.advance(&active, task, previous)? {
                if let Some(in_place) = task.others_in_place.take() {
                    source.set_in_place(task.call, in_place);
                }
                return Ok(true);
            }
            previous = task.stage.number();
        }
        Ok(false)
    }

    /// Waits until a chunk may advance.
    fn wait_for_progress(
        &self,
        tasks: &VecDeque<ChunkTask>,
        wait: &mut HostWait,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        let awaited: Option<Awaited> = match tasks.front().map(|task| task.stage) {
            // The chunk that could not begin.
            None => Some(self.rounds.awaited_slot()),
            Some(ChunkStage::Packed(packed)) => Some(packed.awaited(&self.rounds)),
            Some(ChunkStage::InParts(all_packed)) => Some(self.awaited_reducers(all_packed)),
            Some(ChunkStage::Reduced(reduced)) => Some(reduced.awaited(self.topology.num_owners())),
            Some(ChunkStage::Exchanging(_) | ChunkStage::Complete(_) | ChunkStage::Ended(_)) => None,
        };
        let shm = self.rounds.shm();
        // The flags of a first chunk show whether the next one may begin, and an owner may wait for this rank's part.
        let can_go_on =
            |task: &ChunkTask| (task.is_first || task.parts > 1) && matches!(task.stage, ChunkStage::Packed(_));
        let only_waits = self.inter_host.is_empty() && !shm.passes_on() && !tasks.iter().any(can_go_on);
        let is_alone = tasks.len() < 2 || only_waits;
        match awaited {
            // Nothing but this flag can advance a chunk.
            Some(awaited) if is_alone => awaited.wait(shm, wait_ctx),
            Some(awaited) => wait.nap(|| awaited.first_pending(shm), || awaited.check(shm, wait_ctx)),
            None => {
                let links = self.inter_host.iter().map(|shard| &*shard.link as &dyn HostLink);
                wait.nap(|| None, || check_hosts(links, wait_ctx))
            }
        }
    }

    /// Advances a chunk as far as it can without waiting; returns whether it has advanced. `previous`: the stage of the
    /// chunk before it, which must be ahead, because flags are raised in order. Only exchanges may overtake.
    fn advance(&mut self, active: &ActiveCall<'_>, task: &mut ChunkTask, previous: u8) -> Result<bool> {
        let before = task.stage.number();
        loop {
            let next = match task.stage {
                ChunkStage::Exchanging(all_packed) => self.exchange_slices(active, task, all_packed)?,
                stage if stage.number() >= previous => None,
                ChunkStage::Packed(packed) => self.start_reduction(active, task, packed)?,
                ChunkStage::InParts(all_packed) => {
                    match self.awaited_reducers(all_packed).is_reached(self.rounds.shm()) {
                        true => Some(self.start_exchanges(active, task, all_packed)?),
                        false => None,
                    }
                }
                ChunkStage::Complete(all_packed) => Some(self.post_reduced(task, all_packed, &active.wait_ctx)),
                ChunkStage::Reduced(reduced) => self.take_results(active, task, reduced),
                ChunkStage::Ended(_) => None,
            };
            match next {
                Some(stage) => task.stage = stage,
                None => return Ok(task.stage.number() != before),
            }
        }
    }

    /// Once all ranks of the host have packed: reduces this rank's part of a slice, or starts to exchange its slices.
    fn start_reduction(
        &mut self,
        active: &ActiveCall<'_>,
        task: &mut ChunkTask,
        packed: Packed,
    ) -> Result<Option<ChunkStage>> {
        let Some(all_packed) = packed.try_all(&self.rounds) else { return Ok(None) };
        task.calls.agreed = all_packed.same_signatures(&self.rounds);
        task.calls.lookahead = Lookahead(all_packed.common_lookahead(&self.rounds));
        if task.is_first && self.topology.local_size() > 1 {
            task.others_in_place = Some(all_packed.contents(&self.rounds).are_all(SlotContent::PeerMemory));
        }
        if !task.calls.agreed {
            task.parts = 1;
        }
        if task.parts > 1 {
            self.reduce_part(active, task, all_packed)?;
        }
        Ok(Some(match (self.topology.owns_shards(), task.parts) {
            (true, 1) => self.start_exchanges(active, task, all_packed)?,
            (true, _) => ChunkStage::InParts(all_packed),
            (false, 1) => ChunkStage::Reduced(all_packed.reduces_nothing(&self.rounds)),
            (false, _) => {
                active.wait_ctx.log().flag();
                ChunkStage::Reduced(all_packed.post_reduced(&self.rounds))
            }
        }))
    }

    /// Reduces this rank's part of a slice.
    fn reduce_part(&self, active: &ActiveCall<'_>, task: &ChunkTask, all_packed: AllPacked) -> Result<()> {
        let (&ActiveCall { call, wait_ctx, .. }, topology) = (active, &*self.topology);
        let (number, index) = topology.own_part();
        let bytes = slice(shard_range(topology, call, task.chunk, number), index, task.parts);
        let mut timer = PhaseTimer::start(wait_ctx.log(), bytes.len());
        let (chunk, parts, slots) = (task.chunk, task.parts, self.rounds.slots(all_packed, 0));
        let shard = ShardView { topology, shard: number, chunk, slots, result: slots[topology.local_rank()], parts };
        let in_place = in_place(&self.rounds, active);
        let piece = Piece { call, shard: &shard, bytes };
        // SAFETY: all ranks have packed, and no other reducer accesses this part.
        unsafe { operations(&in_place, call).reduce_part(&piece) }?;
        timer.end(Activity::Reduce);
        Ok(())
    }

    /// What comes before the exchange of a slice that reducers reduce in parts.
    fn awaited_reducers(&self, all_packed: AllPacked) -> Awaited {
        all_packed.awaited_reducers(self.topology.other_reducers(self.topology.own_part().0))
    }

    /// Starts to exchange this rank's slices.
    fn start_exchanges(
        &mut self,
        active: &ActiveCall<'_>,
        task: &mut ChunkTask,
        all_packed: AllPacked,
    ) -> Result<ChunkStage> {
        for index in 0..self.inter_host.len() {
            let (calls, compares) = (task.calls, task.compares);
            let started =
                self.with_slice(active, all_packed, (task.chunk, task.parts), index, |inter_host, slice| {
                    inter_host.start(slice, !compares, calls, &active.wait_ctx)
                })?;
            task.slices.push(Some(started));
        }
        Ok(ChunkStage::Exchanging(all_packed))
    }

    /// Continues the exchanges of this rank's slices.
    fn exchange_slices(
        &mut self,
        active: &ActiveCall<'_>,
        task: &mut ChunkTask,
        all_packed: AllPacked,
    ) -> Result<Option<ChunkStage>> {
        let (chunk, parts) = (task.chunk, task.parts);
        for (index, in_flight) in task.slices.iter_mut().enumerate() {
            let Some(state) = in_flight else { continue };
            let done = self.with_slice(active, all_packed, (chunk, parts), index, |inter_host, slice| {
                inter_host.advance(slice, state, &active.wait_ctx)
            })?;
            if let Some(agreed) = done {
                task.calls.agreed &= agreed;
                task.calls.lookahead = task.calls.lookahead.common(state.lookahead());
                *in_flight = None;
            }
        }
        Ok(task.slices.iter().all(Option::is_none).then_some(ChunkStage::Complete(all_packed)))
    }

    /// Calls `work` with this rank's shard number `index` and its slice of a chunk.
    fn with_slice<T>(
        &mut self,
        active: &ActiveCall<'_>,
        all_packed: AllPacked,
        (chunk, parts): (usize, usize),
        index: usize,
        work: impl FnOnce(&mut super::InterHost, &Slice<'_>) -> Result<T>,
    ) -> Result<T> {
        let &ActiveCall { call, plan, .. } = active;
        let inter_host = &mut self.inter_host[index];
        let bytes = shard_range(&self.topology, call, chunk, inter_host.shard);
        let round = all_packed.round().number();
        let in_place = in_place(&self.rounds, active);
        let ops = operations(&in_place, call);
        let slots = self.rounds.slots(all_packed, 0);
        let result = slots[self.topology.local_rank()];
        let shard = ShardView { topology: &self.topology, shard: inter_host.shard, chunk, slots, result, parts };
        let block_len = plan.chunk_len(call, chunk);
        work(inter_host, &Slice { ops, call, shard, bytes, block_len, round })
    }

    /// Shows the other ranks that this rank's slices are complete.
    fn post_reduced(&self, task: &ChunkTask, all_packed: AllPacked, wait_ctx: &WaitContext<'_>) -> ChunkStage {
        let agreed = task.calls.agreed.then(|| task.calls.lookahead.calls());
        let reduced = all_packed.post_agreed(&self.rounds, agreed);
        wait_ctx.log().flag();
        ChunkStage::Reduced(reduced)
    }

    /// Once all slices are complete: takes the results, unless the calls differ.
    fn take_results(&mut self, active: &ActiveCall<'_>, task: &ChunkTask, reduced: Reduced) -> Option<ChunkStage> {
        let (ActiveCall { call, plan, wait_ctx }, chunk) = (active, task.chunk);
        let owners = self.topology.num_owners();
        let all_reduced = reduced.try_all(&self.rounds, owners)?;
        let mut timer = PhaseTimer::start(wait_ctx.log(), call.layout.chunk_len(chunk));
        let agreed = all_reduced.agreed(&self.rounds, owners);
        if agreed.is_some() && !plan.zero_copy {
            self.unpack(call, chunk, all_reduced);
        }
        all_reduced.end(&mut self.rounds);
        wait_ctx.log().flag();
        timer.end(Activity::Copy);
        Some(ChunkStage::Ended(agreed))
    }
}

/// The operations on tensors in peer memory, if a chunk of this call is in place.
fn in_place<'a>(rounds: &'a Rounds, active: &ActiveCall<'_>) -> Option<ReducingInPlace<'a>> {
    rounds.shm().region().peer_memory().filter(|_| active.plan.zero_copy).map(ReducingInPlace)
}

/// Those of a chunk.
fn operations<'a>(in_place: &'a Option<ReducingInPlace<'a>>, call: &Call) -> &'a dyn InterHostOps {
    match in_place {
        Some(in_place) => in_place,
        None => inter_host_ops(call),
    }
}
