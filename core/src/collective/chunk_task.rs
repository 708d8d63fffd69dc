//! The chunks of a call between hosts: a window of state machines, and the loop that advances them.
//!
//! A chunk is packed; when all ranks of the host have packed it, the shard owners reduce their slices, between hosts by
//! exchanges of messages; when all slices are complete, every rank unpacks. A chunk advances as soon as it can, whatever
//! the others wait for, but flags are raised in the order of the chunks. The oldest chunk comes first, and new ones last:
//! a thread that packs or reduces many chunks at once leaves the links idle meanwhile. A thread without work polls,
//! because messages wake nobody. On one host there is [`super::host_chunks`] instead.
//! Thread rule: as for [`Channel`].

use std::collections::VecDeque;
use std::iter::Peekable;

use smallvec::SmallVec;

use super::call::Call;
use super::channel::{Channel, ChunkResult, out_of_sync};
use super::in_place::ReducingInPlace;
use super::inter_host::{InFlightSlice, Slice};
use super::partials::{InterHostOps, inter_host_ops};
use super::shard::ShardView;
use super::wire::shard_range;
use crate::error::Result;
use crate::timings::{Activity, PhaseTimer};
use crate::transport::{HostLink, HostWait, Phase, SlotContent, WaitContext, check_hosts};

/// While fewer chunks are under way, a new one is packed first.
const MIN_CHUNKS: usize = 2;

/// A chunk under way.
struct ChunkTask {
    seq: u32,
    chunk: usize,
    stage: Stage,
    /// Whether all calls are known to match.
    agreed: bool,
    /// Between hosts: the slices of this rank's shards; `None` once they are complete.
    slices: SmallVec<[Option<InFlightSlice>; 1]>,
}

/// What a chunk waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// All ranks of the host to pack it.
    Packed,
    /// Messages of other hosts.
    Exchanging,
    /// The chunks before it: the slices of this rank are complete.
    Complete,
    /// All slices to be complete.
    Reduced,
    /// Nothing.
    Ended(ChunkResult),
}

impl Stage {
    /// The number of the stage.
    fn number(self) -> u8 {
        match self {
            Stage::Packed => 0,
            Stage::Exchanging => 1,
            Stage::Complete => 2,
            Stage::Reduced => 3,
            Stage::Ended(_) => 4,
        }
    }
}

impl Channel {
    /// Runs `chunks` of `call` between hosts. `matched`: all ranks are known to have the same call; otherwise there is one
    /// chunk, and nothing is written unless all calls match.
    pub(super) fn drive(
        &mut self,
        call: &Call,
        chunks: impl Iterator<Item = usize>,
        matched: bool,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<ChunkResult> {
        let mut chunks = chunks.peekable();
        let mut tasks: VecDeque<ChunkTask> = VecDeque::with_capacity(self.shm.window() as usize);
        let mut wait = HostWait::new(wait_ctx);
        loop {
            let ahead = tasks.len() < MIN_CHUNKS;
            let mut moved = ahead && self.begin_chunk(call, &mut chunks, &mut tasks, wait_ctx)?;
            for shard in &mut self.inter_host {
                wait.poll(shard.link.as_mut())?;
            }
            moved |= self.advance_one(call, &mut tasks, matched, wait_ctx)?;
            if !moved {
                moved = self.begin_chunk(call, &mut chunks, &mut tasks, wait_ctx)?;
            }
            while let Some(&ChunkTask { stage: Stage::Ended(result), chunk, .. }) = tasks.front() {
                tasks.pop_front();
                match result {
                    ChunkResult::Matched => {}
                    _ if matched => return Err(out_of_sync(call, chunk)),
                    _ => return Ok(result),
                }
            }
            if tasks.is_empty() && chunks.peek().is_none() {
                return Ok(ChunkResult::Matched);
            }
            if moved {
                wait.progress();
            } else {
                self.wait_for_progress(&tasks, &mut wait, wait_ctx)?;
            }
        }
    }

    /// Packs the next chunk, if there is one and room for it.
    fn begin_chunk(
        &mut self,
        call: &Call,
        chunks: &mut Peekable<impl Iterator<Item = usize>>,
        tasks: &mut VecDeque<ChunkTask>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<bool> {
        if tasks.len() < self.shm.window() as usize
            && let Some(&chunk) = chunks.peek()
            && let Some(seq) = self.try_begin_round(wait_ctx)
        {
            chunks.next();
            self.pack(call, chunk, seq, wait_ctx)?;
            tasks.push_back(ChunkTask { seq, chunk, stage: Stage::Packed, agreed: true, slices: SmallVec::new() });
            return Ok(true);
        }
        Ok(false)
    }

    /// Advances the oldest chunk that can advance; returns whether there is one.
    fn advance_one(
        &mut self,
        call: &Call,
        tasks: &mut VecDeque<ChunkTask>,
        matched: bool,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<bool> {
        let mut previous = u8::MAX;
        for task in tasks {
            if self.advance(call, task, matched, previous, wait_ctx)? {
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
        wait: &mut HostWait<'_>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        let local_size = self.topology.local_size();
        let awaited = match tasks.front() {
            None => {
                // A slot, of the round that `try_begin_round` could not begin.
                let before = self.slot_freed_by(self.seq.wrapping_add(1));
                Some((Phase::Unpacked, before, local_size))
            }
            Some(task) => match task.stage {
                Stage::Packed => Some((Phase::Packed, task.seq, local_size)),
                Stage::Reduced => Some((Phase::Reduced, task.seq, self.topology.num_owners())),
                Stage::Exchanging | Stage::Complete | Stage::Ended(_) => None,
            },
        };
        match awaited {
            // Nothing but this flag can advance a chunk.
            Some((phase, seq, ranks)) if self.inter_host.is_empty() || tasks.len() < 2 => {
                self.shm.wait(phase, seq, ranks, wait_ctx)
            }
            Some((phase, seq, ranks)) => {
                let pending = || self.shm.first_pending(phase, seq, ranks);
                wait.nap(pending, || self.shm.check_wait(phase, seq, ranks, wait_ctx))
            }
            None => {
                let links = self.inter_host.iter().map(|shard| &*shard.link as &dyn HostLink);
                wait.nap(|| None, || check_hosts(links, wait_ctx))
            }
        }
    }

    /// Advances a chunk as far as it can without waiting; returns whether it has advanced. `previous`: the stage of the
    /// chunk before it, which must be ahead, because flags are raised in order. Only exchanges may overtake.
    fn advance(
        &mut self,
        call: &Call,
        task: &mut ChunkTask,
        matched: bool,
        previous: u8,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<bool> {
        let before = task.stage;
        loop {
            let next = match task.stage {
                Stage::Exchanging => self.exchange_slices(call, task, wait_ctx)?,
                stage if stage.number() >= previous => None,
                Stage::Packed => self.start_reduction(call, task, matched, wait_ctx)?,
                Stage::Complete => Some(self.post_reduced(task, wait_ctx)),
                Stage::Reduced => self.take_results(call, task, wait_ctx),
                Stage::Ended(_) => None,
            };
            match next {
                Some(stage) => task.stage = stage,
                None => return Ok(task.stage != before),
            }
        }
    }

    /// Once all ranks of the host have packed: starts to exchange this rank's slices.
    fn start_reduction(
        &mut self,
        call: &Call,
        task: &mut ChunkTask,
        matched: bool,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Option<Stage>> {
        let &mut ChunkTask { seq, chunk, .. } = task;
        let local_size = self.topology.local_size();
        if !self.shm.all_reached(Phase::Packed, seq, local_size) {
            return Ok(None);
        }
        task.agreed = self.shm.same_signatures(seq);
        // The other chunks can be read in place if all ranks offer that.
        let offers = |rank| self.shm.content(rank, seq) == SlotContent::PeerMemory;
        let all = (0..local_size).all(offers);
        self.offer = if all { SlotContent::PeerMemory } else { SlotContent::Data };
        for index in 0..self.inter_host.len() {
            let agreed = task.agreed;
            let started = self.with_slice(call, seq, chunk, index, |inter_host, slice| {
                inter_host.start(slice, matched, agreed, wait_ctx)
            })?;
            task.slices.push(Some(started));
        }
        Ok(Some(if self.topology.owns_shards() { Stage::Exchanging } else { Stage::Reduced }))
    }

    /// Continues the exchanges of this rank's slices.
    fn exchange_slices(
        &mut self,
        call: &Call,
        task: &mut ChunkTask,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Option<Stage>> {
        let &mut ChunkTask { seq, chunk, .. } = task;
        for (index, in_flight) in task.slices.iter_mut().enumerate() {
            let Some(state) = in_flight else { continue };
            let done = self
                .with_slice(call, seq, chunk, index, |inter_host, slice| inter_host.advance(slice, state, wait_ctx))?;
            if let Some(agreed) = done {
                task.agreed &= agreed;
                *in_flight = None;
                if self.plan.zero_copy {
                    self.with_slice(call, seq, chunk, index, |_, slice| {
                        // SAFETY: the slice is complete, and this shard owns it in the tensors of all ranks.
                        unsafe { slice.ops.write_results(&slice.part(slice.bytes.clone())) }
                    })?;
                }
            }
        }
        Ok(task.slices.iter().all(Option::is_none).then_some(Stage::Complete))
    }

    /// Calls `work` with this rank's shard number `index` and its slice of a chunk.
    fn with_slice<T>(
        &mut self,
        call: &Call,
        seq: u32,
        chunk: usize,
        index: usize,
        work: impl FnOnce(&mut super::InterHost, &Slice<'_>) -> Result<T>,
    ) -> Result<T> {
        let inter_host = &mut self.inter_host[index];
        let (topology, shard) = (&*self.topology, inter_host.shard);
        let (bytes, slots) = (shard_range(topology, call, chunk, shard), self.shm.slots(seq));
        let in_place = self.shm.region().peer_memory().filter(|_| self.plan.zero_copy).map(ReducingInPlace);
        let (ops, result): (&dyn InterHostOps, _) = match &in_place {
            // The slot holds addresses.
            Some(in_place) => (in_place, inter_host.result_buffer(seq).wrapping_sub(bytes.start)),
            None => (inter_host_ops(call), slots[topology.local_rank()]),
        };
        let shard = ShardView { topology, shard, chunk, slots, result };
        let block_len = self.plan.chunk_len(call, chunk);
        work(inter_host, &Slice { ops, call, shard, bytes, block_len, step: seq })
    }

    /// Shows the other ranks that this rank's slices are complete.
    fn post_reduced(&self, task: &ChunkTask, wait_ctx: &WaitContext<'_>) -> Stage {
        self.shm.agree(task.seq, task.agreed);
        self.shm.raise(Phase::Reduced, task.seq);
        wait_ctx.log().flag();
        Stage::Reduced
    }

    /// Once all slices are complete: takes the results, unless the calls differ.
    fn take_results(&mut self, call: &Call, task: &ChunkTask, wait_ctx: &WaitContext<'_>) -> Option<Stage> {
        let &ChunkTask { seq, chunk, .. } = task;
        let owners = self.topology.num_owners();
        if !self.shm.all_reached(Phase::Reduced, seq, owners) {
            return None;
        }
        let mut timer = PhaseTimer::start(wait_ctx.log(), call.layout.chunk_len(chunk));
        let agreed = self.shm.all_agreed(seq, owners);
        if agreed && !self.plan.zero_copy {
            self.unpack(call, seq, chunk);
        }
        self.finish_round(seq);
        wait_ctx.log().flag();
        timer.end(Activity::Copy);
        Some(Stage::Ended(if agreed { ChunkResult::Matched } else { ChunkResult::Mismatch }))
    }
}
