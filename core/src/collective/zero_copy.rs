//! Zero-copy rounds on one host: the slots hold the places of the ranks' tensors instead of their contents, and each
//! rank copies or reduces its part from tensor to tensor.
//!
//! A tensor is in peer memory ([`PeerMemory`]), which all ranks of the host have mapped, or in private memory, out of
//! which the system can copy. Nobody writes to private memory of others: a write could come after a failed call has
//! returned. Calls that reduce need peer memory. Each shard reads its slices in all ranks' tensors,
//! and writes the results to all of them; in a reduce-scatter each rank reads its block in all tensors. The order of
//! addition is that of any other call: same bits. In calls that only move data each rank reads the blocks that it
//! receives; with a root and peer memory, the root takes an equal part of the work.
//! Chunks need not wait for each other, so a channel runs all of its chunks in one round. Every rank waits until all have
//! ended their part: until then its tensors are in use.
//! If only some ranks post places, or the system refuses a copy, all ranks see that in the flags and repeat the round
//! with copies. A copy that is repeated writes the same, so that does no harm.

use std::ops::Range;

use super::call::Call;
use super::channel::{Channel, ChunkResult, out_of_sync};
use super::chunk_source::ActiveCall;
use super::counts::Counts;
use super::operation::{Op, Pattern, Root};
use super::path_choice::CallPath;
use super::plan::ChunkPlan;
use super::selection::may_run_in_place;
use super::shard::PerRank;
use super::transfer::{copy_own_block, copy_result};
use super::wire::{block_part, block_ranges, shard_range};
use crate::error::{Error, Result};
use crate::timings::{Activity, PhaseTimer};
use crate::topology::Topology;
use crate::transport::peer_memory::PeerMemory;
use crate::transport::region_control::RegionControl;
use crate::transport::rounds::{AllPacked, Open};
use crate::transport::{SlotContent, WaitContext, sync};
use crate::wire_layout::{TensorRange, slice};

/// Whether `call` copies from tensor to tensor.
fn copies_directly(call: &Call, plan: ChunkPlan) -> bool {
    plan.path == CallPath::Second && !call.op.collective.reduces
}

/// The root takes part in the work for other ranks in pieces of at least this size; smaller ones cost more than they
/// save.
const MIN_ROOT_BYTES: usize = 8 << 10;

impl Channel {
    /// Peer memory of the ranks of this host.
    fn peer_memory(&self) -> Option<&dyn PeerMemory> {
        self.region().peer_memory()
    }

    /// What the slot of this rank holds in a zero-copy round: data if other ranks cannot access its tensors.
    pub(super) fn content(&self, call: &Call, plan: ChunkPlan) -> SlotContent {
        let Some(memory) = self.peer_memory() else { return SlotContent::Data };
        if plan.total == 0 || call.towers() != 1 || num_words(call) * size_of::<u64>() > call.slot() {
            return SlotContent::Data;
        }
        if !may_run_in_place(call.op, self.topology.hosts()) {
            return SlotContent::Data;
        }
        let is_visible = |range: Range<usize>| range.is_empty() || memory.offset_of(range).is_some();
        if tensors(call).all(|tensor| accessed(call, tensor).into_iter().all(is_visible)) {
            SlotContent::PeerMemory
        } else if copies_directly(call, plan) && self.direct_copies.private && !self.is_refused {
            SlotContent::PrivateMemory
        } else {
            SlotContent::Data
        }
    }

    /// Keeps the shared memory of the tensors of `call`, which has failed, for the ranks that may still access it.
    pub fn hold_tensors(&self, call: &Call) {
        let Some(memory) = self.peer_memory() else { return };
        for range in tensors(call).flat_map(|tensor| accessed(call, tensor)) {
            if !range.is_empty() {
                memory.hold(range);
            }
        }
    }

    /// Writes the places of this rank's tensors to its slot.
    ///
    /// # Errors
    /// [`Error::Internal`] for a tensor that is not where `content` says.
    pub(super) fn post_places(&self, call: &Call, content: SlotContent, open: Open) -> Result<()> {
        open.reserve(&self.rounds, 0..num_words(call) * size_of::<u64>())?;
        let slot = self.rounds.slots(open, 0)[self.topology.local_rank()].cast::<u64>();
        sync::check_write(slot.cast(), num_words(call) * size_of::<u64>());
        let memory = self.peer_memory().filter(|_| content == SlotContent::PeerMemory);
        let mut word = 0;
        let mut post = |value: u64| {
            // SAFETY: the round is open, so this rank owns the slot; `content` has checked that all words fit.
            unsafe { slot.add(word).write(value) };
            word += 1;
        };
        for tensor in tensors(call) {
            for range in accessed(call, tensor) {
                post(match memory {
                    _ if range.is_empty() => 0,
                    Some(memory) => memory.offset_of(range).ok_or_else(cannot_map)?,
                    None => range.start as u64,
                });
            }
        }
        if call.agrees_on_length() {
            let me = self.topology.rank();
            for tensor in tensors(call) {
                (0..self.topology.size()).for_each(|peer| post(call.sent(tensor, me, peer).start as u64));
            }
        }
        Ok(())
    }

    /// Completes the first round of a call, in which some slots hold places: all chunks if no other channel has a part.
    pub(super) fn finish_first_zero_copy(
        &mut self,
        call: &Call,
        all_packed: AllPacked,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<ChunkResult> {
        let is_complete = call.channels() == 1;
        let chunks = if is_complete { self.plan.all_chunks(call) } else { 1 };
        if !self.finish_zero_copy(call, all_packed, 0..chunks, wait_ctx)? {
            return Ok(ChunkResult::NoAccess);
        }
        self.plan.is_complete = is_complete;
        Ok(ChunkResult::Matched)
    }

    /// Runs all of these chunks in one round, if there are any. Returns false on all ranks if they must be copied
    /// through slots instead.
    pub(super) fn run_chunks_zero_copy(
        &mut self,
        call: &Call,
        mut chunks: impl Iterator<Item = usize> + Clone,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<bool> {
        let all = chunks.clone();
        let Some(first) = chunks.next() else { return Ok(true) };
        let open = self.rounds.begin(wait_ctx)?;
        let packed = self.pack(&ActiveCall { call, plan: self.plan, wait_ctx: *wait_ctx }, first, open)?;
        let all_packed = packed.wait(&self.rounds, wait_ctx)?;
        if !all_packed.same_signatures(&self.rounds) {
            return Err(out_of_sync(call, first));
        }
        self.finish_zero_copy(call, all_packed, all, wait_ctx)
    }

    /// Completes this rank's part of these chunks, and waits for the other ranks. Returns false on all ranks if the
    /// chunks must be copied through slots instead.
    fn finish_zero_copy(
        &mut self,
        call: &Call,
        all_packed: AllPacked,
        chunks: impl Iterator<Item = usize>,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<bool> {
        let (log, ranks) = (wait_ctx.log(), self.topology.local_size());
        let has_data = all_packed.contents(&self.rounds).has(SlotContent::Data);
        let Some(memory) = self.peer_memory().filter(|_| !has_data) else {
            all_packed.end(&mut self.rounds);
            return Ok(false);
        };
        let control = self.region().control();
        let round = ZeroCopyRound {
            call,
            topology: &self.topology,
            memory,
            slots: self.rounds.slots(all_packed, 0),
            contents: (0..ranks).map(|rank| all_packed.content(&self.rounds, rank)).collect(),
            control,
        };
        let mut is_done = true;
        for chunk in chunks {
            let mut timer = PhaseTimer::start(log, call.layout.chunk_len(chunk));
            let reduces = call.op.collective.reduces;
            // SAFETY: all slots hold places of the same call.
            is_done = unsafe { if reduces { round.reduce(chunk) } else { round.move_blocks(chunk) } }?;
            timer.end(if reduces { Activity::Reduce } else { Activity::Copy });
            if !is_done {
                break;
            }
        }
        let reduced = all_packed.post_agreed(&self.rounds, is_done.then_some(0));
        log.flag();
        let all_reduced = reduced.wait(&self.rounds, ranks, wait_ctx)?;
        all_reduced.end_for_all(&mut self.rounds);
        if all_reduced.agreed(&self.rounds, ranks).is_none() {
            self.is_refused = true;
            return Ok(false);
        }
        // A rank whose call has failed may have changed its tensors before this rank read them.
        self.region().control().failure().map_or(Ok(true), Err)
    }
}

/// The number of words in a slot: source and destination of each tensor, and for each the starts of blocks that only
/// the sender knows.
fn num_words(call: &Call) -> usize {
    tensors(call).len() * (2 + if call.agrees_on_length() { call.blocks() } else { 0 })
}

/// The tensors by their index.
fn tensors(call: &Call) -> Range<usize> {
    0..call.tensors(0).len()
}

/// Whether ranks write to the tensors of others.
fn writes_to_others(op: Op) -> bool {
    op.collective.root != Root::None || op.pattern() == Pattern::Line
}

/// The addresses of a tensor that other ranks read, and that they write.
fn accessed(call: &Call, tensor: usize) -> [Range<usize>; 2] {
    let (read, written) = call.extents(tensor);
    let buffer = &call.tensors(0)[tensor].buffer;
    let written = if writes_to_others(call.op) { written } else { 0 };
    [buffer.source_bytes(0..read), buffer.destination_bytes(0..written)]
}

fn cannot_map() -> Error {
    Error::System("this rank cannot map the memory of another rank of its host".into())
}

/// A word of a tensor in a slot.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Source,
    Destination,
}

/// Word `index` of a slot.
///
/// # Safety
/// The slot's rank has posted it.
unsafe fn read_word(slot: *const u8, index: usize) -> u64 {
    let word = slot.cast::<u64>().wrapping_add(index);
    sync::check_read(word.cast(), size_of::<u64>());
    // SAFETY: guaranteed by the caller.
    unsafe { word.read() }
}

/// The addresses in this process of a part of a tensor of all ranks, by local rank.
///
/// # Errors
/// [`Error::Internal`] if this rank cannot access one.
///
/// # Safety
/// All slots hold places in peer memory of the same call.
pub(super) unsafe fn addresses(
    call: &Call,
    slots: &[*mut u8],
    part: &TensorRange,
    side: Side,
    memory: &dyn PeerMemory,
) -> Result<PerRank<*mut u8>> {
    let size = call.tensors(0)[part.tensor].buffer.dtype().size();
    let (skip, len) = ((part.first * size) as u64, part.count * size);
    let address = |(rank, slot): (usize, &*mut u8)| {
        // SAFETY: guaranteed by the caller.
        let place = unsafe { read_word(*slot, 2 * part.tensor + side as usize) };
        memory.resolve(rank, place.wrapping_add(skip), len).ok_or_else(cannot_map)
    };
    slots.iter().enumerate().map(address).collect()
}

/// A zero-copy round in which all ranks have posted places.
struct ZeroCopyRound<'a> {
    call: &'a Call,
    topology: &'a Topology,
    memory: &'a dyn PeerMemory,
    /// By local rank.
    slots: &'a [*mut u8],
    contents: PerRank<SlotContent>,
    control: &'a RegionControl,
}

impl ZeroCopyRound<'_> {
    /// Word `index` of the slot of local rank `rank`.
    ///
    /// # Safety
    /// The rank has posted it.
    unsafe fn word(&self, rank: usize, index: usize) -> u64 {
        // SAFETY: guaranteed by the caller.
        unsafe { read_word(self.slots[rank], index) }
    }

    /// The place of byte `skip` of a tensor of local rank `rank`.
    ///
    /// # Safety
    /// As for [`ZeroCopyRound::word`].
    unsafe fn place(&self, rank: usize, tensor: usize, side: Side, skip: usize) -> u64 {
        // SAFETY: guaranteed by the caller.
        unsafe { self.word(rank, 2 * tensor + side as usize) }.wrapping_add(skip as u64)
    }

    /// The address in this process of `len` bytes from byte `skip` of a tensor in peer memory.
    ///
    /// # Safety
    /// As for [`ZeroCopyRound::word`].
    unsafe fn mapped(&self, rank: usize, tensor: usize, side: Side, skip: usize, len: usize) -> Result<*mut u8> {
        // SAFETY: guaranteed by the caller.
        let place = unsafe { self.place(rank, tensor, side, skip) };
        self.memory.resolve(rank, place, len).ok_or_else(cannot_map)
    }

    /// Reduces this rank's part of a chunk: of a line, its slice for all ranks with outputs; else its block.
    ///
    /// # Safety
    /// All slots hold places in peer memory of the same call.
    unsafe fn reduce(&self, chunk: usize) -> Result<bool> {
        if let Some(error) = self.control.failure() {
            return Err(error);
        }
        let (call, me) = (self.call, self.topology.rank());
        let ranks = 0..self.slots.len();
        let reduce = |piece: TensorRange, source: usize, outs: &[*mut u8]| {
            let dtype = call.tensors(0)[piece.tensor].buffer.dtype();
            let (skip, len) = (source * dtype.size(), piece.count * dtype.size());
            // SAFETY: the caller's promise.
            let tensor = |rank| unsafe { self.mapped(rank, piece.tensor, Side::Source, skip, len) };
            let sources = ranks.clone().map(|rank| tensor(rank).map(<*mut u8>::cast_const));
            let sources: PerRank<*const u8> = sources.collect::<Result<_>>()?;
            sources.iter().for_each(|&source| sync::check_read(source, len));
            outs.iter().for_each(|&out| sync::check_write(out, len));
            // SAFETY: equal signatures mean equal tensors; only this rank accesses this part of them.
            unsafe { call.reduction(dtype).combine(&sources, outs, piece.count) };
            Ok(true)
        };
        if call.op.pattern() != Pattern::Line {
            let own = |tensor| call.received(tensor, me, me);
            return block_ranges(call.block_layout(me, me), chunk, own).try_fold(true, |_, piece| {
                let out = call.tensors(0)[piece.tensor].buffer.destination_at(piece.first);
                let first = piece.first - call.received(piece.tensor, me, me).start;
                reduce(piece, call.sent(piece.tensor, me, me).start + first, &[out])
            });
        }
        // On a single host every rank owns the shard of its local rank.
        let shard = self.topology.local_rank();
        call.layout.ranges(chunk, shard_range(self.topology, call, chunk, shard)).try_fold(true, |_, piece| {
            let size = call.tensors(0)[piece.tensor].buffer.dtype().size();
            let (skip, len) = (piece.first * size, piece.count * size);
            let has_output = |&rank: &usize| call.op.has_output(self.topology.local_ranks()[rank]);
            // SAFETY: the caller's promise.
            let out = |rank| unsafe { self.mapped(rank, piece.tensor, Side::Destination, skip, len) };
            let outs: PerRank<*mut u8> = ranks.clone().filter(has_output).map(out).collect::<Result<_>>()?;
            reduce(piece, piece.first, &outs)
        })
    }

    /// Copies this rank's part of a chunk of the blocks. Returns false if the system refuses that.
    ///
    /// # Safety
    /// All slots hold places of the same call.
    unsafe fn move_blocks(&self, chunk: usize) -> Result<bool> {
        let (op, me, size) = (self.call.op, self.topology.rank(), self.topology.size());
        let len = self.call.layout.chunk_len(chunk);
        if op.has_input(me) && op.has_output(me) {
            // SAFETY: the call owns the tensors.
            unsafe { copy_own_block(self.call, self.topology, chunk) };
        }
        let share = slice(0..len, 0, size);
        let is_private = self.contents.contains(&SlotContent::PrivateMemory);
        let of_root = match op.collective.root {
            Root::Source if is_private => 0..0,
            Root::Target if is_private => 0..len,
            _ if share.len() < MIN_ROOT_BYTES => 0..0,
            _ => share,
        };
        let others = (1..size).map(|step| (me + step) % size);
        // SAFETY: the caller's promise; the part of the root and those of the others do not overlap.
        unsafe {
            match op.collective.root {
                Root::None => self.move_all(others.map(|peer| (peer, me)), chunk, 0..len),
                Root::Source if me == op.root => self.move_all(others.map(|peer| (me, peer)), chunk, of_root),
                Root::Target if me == op.root => self.move_all(others.map(|peer| (peer, me)), chunk, of_root),
                Root::Source => self.move_block(op.root, me, chunk, of_root.end..len),
                Root::Target => self.move_block(me, op.root, chunk, of_root.end..len),
            }
        }
    }

    /// As [`ZeroCopyRound::move_block`] for each (sender, receiver) in `pairs`.
    ///
    /// # Safety
    /// As for [`ZeroCopyRound::move_block`].
    unsafe fn move_all(
        &self,
        mut pairs: impl Iterator<Item = (usize, usize)>,
        chunk: usize,
        part: Range<usize>,
    ) -> Result<bool> {
        pairs.try_fold(true, |done, (sender, receiver)| {
            // SAFETY: guaranteed by the caller.
            Ok(done && unsafe { self.move_block(sender, receiver, chunk, part.clone()) }?)
        })
    }

    /// Copies `part` of a chunk of the block that `sender` sends to `receiver`, one of which is this rank. Returns false
    /// if the system refuses that.
    ///
    /// # Safety
    /// All slots hold places of the same call; nobody else accesses this part of the receiver's tensors.
    unsafe fn move_block(&self, sender: usize, receiver: usize, chunk: usize, part: Range<usize>) -> Result<bool> {
        if let Some(error) = self.control.failure() {
            return Err(error);
        }
        let call = self.call;
        let reads = receiver == self.topology.rank();
        let other = if reads { sender } else { receiver };
        let other = self.topology.local_rank_of(other).ok_or_else(cannot_map)?;
        let is_private = self.contents[other] == SlotContent::PrivateMemory;
        let received = |tensor| call.received(tensor, receiver, sender);
        let sent = |tensor| call.sent(tensor, sender, receiver);
        let starts = |tensor: usize| 2 * tensors(call).len() + tensor * call.blocks();
        let elements = |tensor| if reads { received(tensor) } else { sent(tensor) };
        for piece in block_part(call.block_layout(sender, receiver), chunk, part, elements) {
            let buffer = &call.tensors(0)[piece.tensor].buffer;
            let (size, index) = (buffer.dtype().size(), piece.tensor);
            let len = piece.count * size;
            // SAFETY: the caller's promise; equal signatures mean equal tensors, and `Call::new` has checked their memory.
            let done = unsafe {
                if reads {
                    let start = match call.counts() {
                        Counts::Pairs { .. } => self.word(other, starts(piece.tensor) + receiver) as usize,
                        _ => sent(piece.tensor).start,
                    };
                    let skip = (start + piece.first - received(piece.tensor).start) * size;
                    let to = buffer.destination_at(piece.first);
                    sync::check_write(to, len);
                    if is_private {
                        self.memory.read_private(other, self.place(other, index, Side::Source, skip), to, len)
                    } else {
                        let from = self.mapped(other, index, Side::Source, skip, len)?;
                        sync::check_read(from, len);
                        copy_result(call, false, from, to, len);
                        true
                    }
                } else {
                    let skip = (received(piece.tensor).start + piece.first - sent(piece.tensor).start) * size;
                    let to = self.mapped(other, index, Side::Destination, skip, len)?;
                    let from = buffer.source_at(piece.first);
                    sync::check_read(from, len);
                    sync::check_write(to, len);
                    copy_result(call, false, from, to, len);
                    true
                }
            };
            if !done {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
