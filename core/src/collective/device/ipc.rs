//! Averages by kernels on memory that the ranks of a host see in each other: nothing goes through the host but numbers.
//!
//! A short call takes one shot: every rank copies what it brings into memory of the team's own, which all have open, and
//! makes the whole result for itself. A long one takes two: the ranks tell each other where their tensors are; each reads
//! its slice in all of them and writes the mean to all of them, which is the least traffic there is. Where the tensors of a
//! rank are in memory that others cannot open (torch's expandable segments, pools), a long call goes in chunks through memory
//! of the team's own, and each rank adds up its slice of a chunk for all. Between the steps the ranks
//! [meet](super::neighbours). The additions are those of the host, in the order of ranks: same bits.
//! Thread rule: used by one thread; the closure of [`Direct::rescue`] may run on any.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::batch::{Batch, UploadRing};
use super::ipc_flags::{EXPORT, IpcUpdate, Places};
use super::ipc_peers::{IpcPeers, Window, all_agree};
use super::settings::SyncMode;
use super::shm_allgather::{allgather_u64, max_words};
use super::streams::{DeviceResult, root, signal_outputs, wait_inputs};
use crate::collective::call::{Call, Op};
use crate::collective::channel::Channel;
use crate::dtype::DType;
use crate::error::Result;
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, Event, ExportUpdates, KernelArgs, ReportedExports, Stream};
use crate::wire_layout::{TensorRange, slice};

/// The longest call, in bytes, that takes one shot.
const ONE_SHOT_MAX_BYTES: usize = 256 << 10;
/// The memory for two of them; less would share a block of the driver's with what else the process has there, and other
/// processes would see that too.
pub(super) const BOUNCE_BYTES: usize = 2 << 20;
/// Blocks of a kernel between GPUs, of which links are the limit: more would take the multiprocessors from backward. (NCCL has
/// up to 32 for an all-reduce over NVLink.)
const LINK_BLOCKS: u32 = 48;
/// A chunk of a call whose tensors the others cannot see, in bytes. Long, for its meeting of the ranks to cost little.
const CHUNK_BYTES: usize = 8 << 20;
/// Places for such chunks: one is packed while another may still be read.
const NUM_CHUNK_BUFFERS: usize = 2;

/// What a rank has for such calls.
pub(super) struct IpcPath {
    peers: IpcPeers,
    shots: usize,
    reported: ReportedExports,
    chunks: Chunks,
    /// How many calls went in chunks.
    chunked: usize,
    batch: Batch,
    table: UploadRing,
}

/// The memory for calls in chunks.
enum Chunks {
    /// Not needed so far.
    Unasked,
    Open(Window),
    /// A rank could not take it, or not see that of another.
    Refused,
}

impl IpcPath {
    /// For ranks whose memory is open to each other, each with a bounce of [`BOUNCE_BYTES`] bytes; `own_gpus`: no two of them share a
    /// GPU.
    pub fn new(peers: IpcPeers, own_gpus: bool) -> IpcPath {
        let mut table = UploadRing::new(&peers.context);
        table.stopped_by(peers.stop_address());
        if own_gpus {
            table.limited_to(LINK_BLOCKS);
        }
        let posted = ReportedExports::default();
        IpcPath {
            peers,
            shots: 0,
            reported: posted,
            chunks: Chunks::Unasked,
            chunked: 0,
            batch: Batch::default(),
            table,
        }
    }

    /// Who waits for the other ranks.
    pub fn wait(&self) -> SyncMode {
        self.peers.wait()
    }

    /// How many long calls went in chunks, because the tensors of a rank are in memory that others cannot open.
    pub fn in_chunks(&self) -> usize {
        self.chunked
    }

    /// What everything is enqueued on.
    pub fn stream(&self) -> &Stream {
        &self.peers.stream
    }

    /// The bytes of device memory that this rank has taken.
    pub fn held(&self) -> usize {
        let chunks = if let Chunks::Open(window) = &self.chunks { window.held() } else { 0 };
        self.peers.held() + chunks + self.table.held()
    }

    /// Lets the streams of all ranks go on after one was lost.
    pub fn release_streams(&self) -> Arc<dyn Fn() + Send + Sync> {
        self.peers.release_streams()
    }

    /// Carries out a call on which all ranks agree.
    ///
    /// # Errors
    /// Those of the driver and of the transports; the ranks are then out of step.
    pub fn run(&mut self, channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<DeviceResult> {
        let total = call.layout.total();
        if total == 0 {
            wait_inputs(call, &self.peers.stream)?;
            return signal_outputs(call, &self.peers.stream).map(DeviceResult::Enqueued);
        }
        if total <= ONE_SHOT_MAX_BYTES {
            return self.one_shot(channel, call, wait_ctx).map(DeviceResult::Enqueued);
        }
        match self.exchange_places(channel, call, wait_ctx)? {
            Some(places) => self.two_shot(channel, call, &places, wait_ctx).map(DeviceResult::Enqueued),
            None => self.run_in_chunks(channel, call, wait_ctx),
        }
    }

    /// Every rank makes the whole result from what all have put into their bounces. Two of them are used in turn: who has
    /// come to a call has done with what is read in the one before.
    fn one_shot(&mut self, channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<Event> {
        let at = (self.shots % 2 * ONE_SHOT_MAX_BYTES) as u64;
        self.shots += 1;
        let total = call.layout.total();
        let root = root(call, &channel.topology);
        let brings = root.is_none_or(|root| root == self.peers.me);
        wait_inputs(call, &self.peers.stream)?;
        if brings {
            let pieces = call.layout.all_ranges(0..total);
            self.batch.copies(pieces, call.tensors(0), total, self.peers.bounces[self.peers.me] + at, false);
            // SAFETY: the tensors are the call's, and the bounce is free, as told above.
            unsafe { self.table.copy(&self.batch, &self.peers.stream, wait_ctx) }?;
        }
        self.peers.stream_barrier(channel, wait_ctx)?;
        if root != Some(self.peers.me) || !call.is_in_place() {
            let bounces = match root {
                Some(root) => &self.peers.bounces[root..=root],
                None => &self.peers.bounces[..],
            };
            self.batch.start(bounces.len(), 1, total);
            for piece in call.layout.all_ranges(0..total) {
                let buffer = &call.tensors(0)[piece.tensor].buffer;
                let sources = bounces.iter().map(|bounce| bounce + at + piece.offset as u64);
                let to = buffer.byte_ranges().1.start as u64;
                add(&mut self.batch, call.op, buffer.dtype(), piece.count, sources, [to]);
            }
            self.launch(call, wait_ctx)?;
        }
        signal_outputs(call, &self.peers.stream)
    }

    /// Where the tensors of all ranks are, by local rank; `None` when those of a rank are where the others cannot see them.
    fn exchange_places(
        &mut self,
        channel: &mut Channel,
        call: &Call,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Option<Vec<Places>>> {
        let most = max_words(channel);
        let note = self.note(call, most)?;
        let (seen, me) = (&mut self.peers.imports, self.peers.me);
        let (places, news, opened) = allgather_u64(channel, &note.write(most), wait_ctx, |texts| {
            let (mut places, mut news, mut opened) = (Vec::with_capacity(texts.len()), false, true);
            for (rank, words) in texts.iter().enumerate() {
                let note = IpcUpdate::read(words)?;
                news |= !note.added.is_empty();
                if rank != me {
                    opened &= seen[rank].apply(&note.added, &note.removed).is_ok();
                }
                places.push(note.places);
            }
            // Without those of one rank nobody goes this way.
            Ok((places.into_iter().collect::<Option<Vec<Places>>>(), news, opened))
        })?;
        if news && !all_agree(channel, opened, wait_ctx)? {
            self.reported.forget(&note.added);
            return Ok(None);
        }
        Ok(places)
    }

    /// What this rank tells of its tensors.
    fn note(&mut self, call: &Call, most: usize) -> Result<IpcUpdate> {
        let mut exports = self.peers.context.exports();
        exports.forget_freed();
        let (mut used, mut places, mut visible) = (BTreeMap::new(), Places::default(), true);
        for tensor in call.layout.tensors() {
            let (read, written) = call.tensors(0)[tensor].buffer.byte_ranges();
            for span in [read, written] {
                match exports.locate(span.start as u64, span.len() as u64)? {
                    Some(export) => {
                        visible &= places.push(span.start as u64, &export);
                        used.insert(export.id, export);
                    }
                    None => visible = false,
                }
            }
        }
        // What does not fit is told with a later call, and until then the tensors are not visible.
        let room = (most - 4) / (1 + EXPORT);
        let ExportUpdates { fresh, gone, whole } = exports.take_updates(&mut self.reported, &used, room);
        Ok(IpcUpdate { added: fresh, removed: gone, places: Some(places).filter(|_| visible && whole) })
    }

    /// Every rank writes its slice of the mean to the tensors of all, which are at `places`.
    fn two_shot(
        &mut self,
        channel: &mut Channel,
        call: &Call,
        places: &[Places],
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Event> {
        let ranks = self.peers.imports.len();
        let me = self.peers.me;
        let root = root(call, &channel.topology);
        let total = call.layout.total();
        let part = match root {
            None => slice(0..total, me, ranks),
            Some(root) if root == me && call.is_in_place() => 0..0,
            Some(_) => 0..total,
        };
        let (sources, targets) = if root.is_some() { (1, 1) } else { (ranks, ranks) };
        self.batch.start(sources, targets, part.len());
        for piece in call.layout.all_ranges(part) {
            let buffer = &call.tensors(0)[piece.tensor].buffer;
            let skip = (piece.first * buffer.dtype().size()) as u64;
            // Element `piece.first` of the tensor as rank `rank` reads it (0) or writes it (1).
            let at = |rank: usize, which: usize| {
                let (read, written) = buffer.byte_ranges();
                let start = match (rank == me, which) {
                    (true, 0) => read.start as u64,
                    (true, _) => written.start as u64,
                    (false, _) => {
                        let (export, offset) = places[rank].at(2 * piece.layout_index + which)?;
                        self.peers.imports[rank].at(export)? + offset
                    }
                };
                Ok(start + skip)
            };
            let sources = match root {
                Some(root) => vec![at(root, 0)?],
                None => (0..ranks).map(|rank| at(rank, 0)).collect::<Result<_>>()?,
            };
            let targets = match root {
                Some(_) => vec![at(me, 1)?],
                None => (0..ranks).map(|rank| at(rank, 1)).collect::<Result<_>>()?,
            };
            add(&mut self.batch, call.op, buffer.dtype(), piece.count, sources, targets);
        }
        wait_inputs(call, &self.peers.stream)?;
        self.peers.stream_barrier(channel, wait_ctx)?;
        self.launch(call, wait_ctx)?;
        self.peers.stream_barrier(channel, wait_ctx)?;
        signal_outputs(call, &self.peers.stream)
    }

    /// A chunk at a time: all pack it; each adds its slice up and writes the mean to the packed chunks of all; all unpack it,
    /// after the meeting for the next one. Of a broadcast the root packs, and the others copy. After the last meeting nobody
    /// reads what another rank may write in its next call.
    fn run_in_chunks(
        &mut self,
        channel: &mut Channel,
        call: &Call,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<DeviceResult> {
        if matches!(self.chunks, Chunks::Unasked) {
            let window = self.peers.window(channel, NUM_CHUNK_BUFFERS * CHUNK_BYTES, wait_ctx)?;
            self.chunks = window.map_or(Chunks::Refused, Chunks::Open);
        }
        let Chunks::Open(window) = &self.chunks else { return Ok(DeviceResult::FallBackToHost) };
        let at = window.at.clone();
        self.chunked += 1;
        let total = call.layout.total();
        let (me, ranks) = (self.peers.me, at.len());
        let root = root(call, &channel.topology);
        let chunks = total.div_ceil(CHUNK_BYTES);
        let range = |chunk: usize| chunk * CHUNK_BYTES..total.min((chunk + 1) * CHUNK_BYTES);
        // Pieces of a chunk, whose offsets are in its place.
        let pieces = |chunk: usize, bytes: Range<usize>| {
            let place = chunk % NUM_CHUNK_BUFFERS * CHUNK_BYTES;
            let within =
                move |piece: TensorRange| TensorRange { offset: piece.offset - chunk * CHUNK_BYTES + place, ..piece };
            call.layout.all_ranges(bytes).map(within)
        };
        wait_inputs(call, &self.peers.stream)?;
        for turn in 0..=chunks {
            let comes = (turn < chunks).then_some(turn);
            if let Some(chunk) = comes.filter(|_| root.is_none_or(|root| root == me)) {
                let bytes = range(chunk);
                let len = bytes.len();
                self.batch.copies(pieces(chunk, bytes), call.tensors(0), len, at[me], false);
                // SAFETY: the tensors are the call's; the place is free, since all ranks have met after they used it.
                unsafe { self.table.copy(&self.batch, &self.peers.stream, wait_ctx) }?;
            }
            self.peers.stream_barrier(channel, wait_ctx)?;
            if let (Some(chunk), None) = (comes, root) {
                let part = slice(range(chunk), me, ranks);
                self.batch.start(ranks, ranks, part.len());
                for piece in pieces(chunk, part) {
                    let dtype = call.tensors(0)[piece.tensor].buffer.dtype();
                    let places = || at.iter().map(|start| start + piece.offset as Address);
                    self.batch.add(dtype, piece.count, places(), places());
                }
                self.launch(call, wait_ctx)?;
            }
            let (goes, from) = match root {
                None => (turn.checked_sub(1), me),
                Some(root) => (comes, root),
            };
            if let Some(chunk) = goes.filter(|_| root != Some(me) || !call.is_in_place()) {
                let bytes = range(chunk);
                let len = bytes.len();
                self.batch.copies(pieces(chunk, bytes), call.tensors(0), len, at[from], true);
                // SAFETY: as above; what is read was written before all ranks met.
                unsafe { self.table.copy(&self.batch, &self.peers.stream, wait_ctx) }?;
            }
        }
        signal_outputs(call, &self.peers.stream).map(DeviceResult::Enqueued)
    }

    /// Starts the kernels of the batch for `call`.
    fn launch(&mut self, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let (kernels, stream) = (self.peers.context.kernels()?, &self.peers.stream);
        let (precise, copies) = (call.accumulates_f64(), matches!(call.op, Op::Broadcast { .. }));
        // SAFETY: the tensors of all ranks are the call's; between the meetings each slice is one rank's.
        let start = |dtype, work: &KernelArgs| unsafe {
            if copies { kernels.copy(work, stream.raw()) } else { kernels.average(dtype, precise, work, stream.raw()) }
        };
        self.table.run(&self.batch, call.divisor(), stream, wait_ctx, start)
    }
}

/// Adds a piece to a batch: what is broadcast is copied as bytes.
fn add(
    batch: &mut Batch,
    op: Op,
    dtype: DType,
    count: usize,
    sources: impl IntoIterator<Item = Address>,
    targets: impl IntoIterator<Item = Address>,
) {
    match op {
        Op::Allreduce => batch.add(dtype, count, sources, targets),
        Op::Broadcast { .. } | Op::Barrier => batch.add(DType::U8, count * dtype.size(), sources, targets),
    }
}
