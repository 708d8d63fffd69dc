//! Collectives by kernels on IPC memory of the ranks of a host; only flags pass through the host.
//!
//! A small call is one-shot: each rank copies its input to its bounce buffer, which all ranks have open, and computes
//! the whole result. A large call is two-shot: the ranks exchange the addresses of their tensors. Each rank reads its
//! slice of all tensors and writes the mean to all of them, which minimizes the traffic.
//! The collectives other than allreduces and broadcasts, of any length, run in rounds: each rank copies a part of its input
//! to memory that all ranks have open, and takes what it needs of those of all.
//! GPU IPC cannot open some tensors (torch's expandable segments, pools). Then a large call runs in chunks through the
//! group's own memory, and each rank reduces its slice of a chunk for all.
//! [Stream barriers](super::ipc_peers) separate the phases. The order of addition is that of the host path, by rank:
//! same bits.
//! The last kernel of a call on a rank's stream writes only that rank's outputs, and fills them with NaN if the stream was
//! released ([`super::release`]). After a large call, whose outputs the other ranks write, it does nothing else.
//! Thread rule: used by one thread; any thread may release the streams.

use std::ops::Range;

use super::batch::{Launcher, Scalars};
use super::ipc_blocks::{Blocks, Part, elements};
use super::ipc_flags::{EXPORT_WORDS, IpcUpdate, Located, TensorAddresses};
use super::ipc_peers::{IpcPeers, Window, all_agree};
use super::shm_allgather::{allgather_u64, max_words};
use super::streams::{DeviceResult, root, signal_outputs, wait_inputs};
use crate::collective::call::Call;
use crate::collective::channel::Channel;
use crate::collective::selection::{Limit, Selection};
use crate::error::Result;
use crate::log::log_line;
use crate::reduce::ReduceOp;
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, Event, ExportUpdates, KernelSet, PeerImports, ReportedExports, kernel_set};
use crate::wire_layout::{TensorRange, slice};

/// A smaller allocation would share a driver block with other memory of the process and expose that to the peers.
pub(super) const MIN_BOUNCE_BYTES: usize = 2 << 20;

/// Bytes of the largest one-shot call of so many ranks.
pub(super) fn one_shot_max(selection: &Selection, ranks: usize) -> usize {
    selection.limit(Limit::IpcOneShot) / ranks.max(1) / 4096 * 4096
}

/// Bytes of a bounce buffer: two one-shot calls of up to `one_shot_max` bytes.
pub(super) fn bounce_bytes(one_shot_max: usize) -> usize {
    (2 * one_shot_max).max(MIN_BOUNCE_BYTES)
}

/// Maximum blocks of a kernel between GPUs. The links are the bottleneck, and more blocks would take multiprocessors
/// from the backward pass. (NCCL uses up to 32 for an allreduce over NVLink.)
const LINK_BLOCKS: u32 = 48;
/// Exports that a call does not use, and that it checks: each costs a call of the driver.
const SWEPT_EXPORTS: usize = 8;
/// Bytes of a chunk if peers cannot access the tensors; large, to amortize its stream barriers.
const CHUNK_BYTES: usize = 8 << 20;
/// Number of chunk buffers: one is packed while another may still be read.
const NUM_CHUNK_BUFFERS: usize = 2;

/// The resources of a rank for the IPC path.
pub(super) struct IpcPath {
    pub peers: IpcPeers,
    num_one_shots: usize,
    one_shot_max: usize,
    reported: ReportedExports,
    chunks: Chunks,
    /// The number of large calls that ran in chunks because GPU IPC cannot open a rank's tensors.
    pub calls_in_chunks: usize,
    launcher: Launcher,
    /// The sets of kernels that calls have needed, and whether all ranks have them.
    sets: Vec<(KernelSet, bool)>,
}

/// The memory for calls in chunks.
enum Chunks {
    /// Not yet needed.
    NotRequested,
    Open(Window),
    /// Some rank could not allocate it or open that of another.
    Unavailable,
}

impl IpcPath {
    /// For ranks with open IPC memory and bounce buffers of [`bounce_bytes`] bytes for one-shot calls of up to
    /// `one_shot_max` bytes. `own_gpus`: no two ranks share a GPU.
    pub fn new(peers: IpcPeers, one_shot_max: usize, own_gpus: bool) -> Result<IpcPath> {
        let mut launcher = peers.launcher()?;
        if own_gpus {
            launcher.blocks = LINK_BLOCKS;
        }
        let (reported, chunks) = (ReportedExports::default(), Chunks::NotRequested);
        // The ranks have agreed on the means before they chose this path.
        let sets = vec![(KernelSet::Means, true)];
        Ok(IpcPath { peers, num_one_shots: 0, one_shot_max, reported, chunks, calls_in_chunks: 0, launcher, sets })
    }

    /// Bytes of one of the two halves of a bounce buffer, which calls take in turn.
    fn bounce_bytes(&self) -> usize {
        bounce_bytes(self.one_shot_max) / 2
    }

    /// Bytes of device memory in use on this rank.
    pub fn device_bytes(&self) -> usize {
        let chunks = if let Chunks::Open(window) = &self.chunks { window.own.bytes() } else { 0 };
        self.peers.bounce.bytes() + chunks + self.launcher.device_bytes()
    }

    /// Runs a call on which all ranks agree.
    pub fn run(&mut self, channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<DeviceResult> {
        if !self.has_kernels(channel, call, wait_ctx)? {
            return Ok(DeviceResult::FallBackToHost);
        }
        if !call.op.is_allreduce() && !call.op.is_broadcast() {
            return self.run_in_rounds(channel, call, wait_ctx).map(DeviceResult::Enqueued);
        }
        let total = call.layout.total();
        if total == 0 {
            wait_inputs(call, &self.peers.stream)?;
            return signal_outputs(call, &self.peers.stream).map(DeviceResult::Enqueued);
        }
        if total <= self.one_shot_max {
            return self.one_shot(channel, call, wait_ctx).map(DeviceResult::Enqueued);
        }
        match self.exchange_addresses(channel, call, wait_ctx)? {
            Some(addresses) => self.two_shot(channel, call, &addresses, wait_ctx).map(DeviceResult::Enqueued),
            None => self.run_in_chunks(channel, call, wait_ctx),
        }
    }

    /// Whether all ranks have the kernels of a call. They agree on this at the first call that needs a set.
    fn has_kernels(&mut self, channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<bool> {
        for reduction in call.reductions() {
            let Some(set) = kernel_set(reduction) else { return Ok(false) };
            let known = self.sets.iter().find(|known| known.0 == set);
            let everywhere = match known {
                Some(&(_, everywhere)) => everywhere,
                None => {
                    let own = self.peers.context.kernels().and_then(|kernels| kernels.ready(set));
                    let everywhere = all_agree(channel, own.is_ok(), wait_ctx)?;
                    if let Err(error) = own {
                        log_line(&format!(
                            "GPU kernels cannot be loaded, so such calls go through host memory: {error}"
                        ));
                    }
                    self.sets.push((set, everywhere));
                    everywhere
                }
            };
            if !everywhere {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Each rank computes the whole result from all bounce buffers. Two buffers alternate: a rank that reaches a call
    /// has finished reading the buffers of the call before.
    fn one_shot(&mut self, channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<Event> {
        let at = (self.num_one_shots % 2 * self.bounce_bytes()) as u64;
        self.num_one_shots += 1;
        let total = call.layout.total();
        let root = root(call, &channel.topology);
        let has_input = root.is_none_or(|root| root == self.peers.me);
        wait_inputs(call, &self.peers.stream)?;
        if has_input {
            let pieces = call.layout.all_ranges(0..total);
            self.launcher.batch.copies(pieces, call.tensors(0), total, self.peers.bounces[self.peers.me] + at, false);
            // SAFETY: the call owns the tensors; the bounce buffer is free, as described above.
            unsafe { self.launcher.copy(&self.peers.stream, wait_ctx) }?;
        }
        self.peers.stream_barrier(channel, wait_ctx)?;
        if root != Some(self.peers.me) || !call.is_in_place() {
            let bounces = match root {
                Some(root) => &self.peers.bounces[root..=root],
                None => &self.peers.bounces[..],
            };
            self.launcher.batch.start(bounces.len(), 1, total);
            for piece in call.layout.all_ranges(0..total) {
                let buffer = &call.tensors(0)[piece.tensor].buffer;
                let sources = bounces.iter().map(|bounce| bounce + at + piece.offset as u64);
                let to = buffer.byte_ranges().1.start as u64;
                let (dtype, count) = elements(call.op, buffer.dtype(), piece.count);
                self.launcher.batch.fills = buffer.dtype().has_nan();
                self.launcher.batch.add(dtype, count, sources, [to]);
            }
            self.launch(call, wait_ctx)?;
        }
        signal_outputs(call, &self.peers.stream)
    }

    /// The addresses of all ranks' tensors, by local rank; `None` if some rank's tensors cannot be opened.
    fn exchange_addresses(
        &mut self,
        channel: &mut Channel,
        call: &Call,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Option<Vec<TensorAddresses>>> {
        let max_words = max_words(channel);
        let update = self.update(call, max_words)?;
        let (imports, me) = (&mut self.peers.imports, self.peers.me);
        let (addresses, any_added, opened) = allgather_u64(channel, &update.write(max_words), wait_ctx, |updates| {
            let (mut addresses, mut any_added, mut opened) = (Vec::with_capacity(updates.len()), false, true);
            for (rank, words) in updates.iter().enumerate() {
                let update = IpcUpdate::read(words)?;
                any_added |= !update.added.is_empty();
                if rank != me {
                    opened &= imports[rank].apply(&update.added, &update.removed).is_ok();
                }
                addresses.push(update.addresses);
            }
            // `None` if one rank has none.
            Ok((addresses.into_iter().collect::<Option<Vec<TensorAddresses>>>(), any_added, opened))
        })?;
        if any_added && !all_agree(channel, opened, wait_ctx)? {
            self.reported.forget(&update.added);
            return Ok(None);
        }
        Ok(addresses)
    }

    /// The IPC update of this rank for `call`.
    fn update(&mut self, call: &Call, max_words: usize) -> Result<IpcUpdate> {
        let mut exports = self.peers.context.exports();
        exports.sweep(SWEPT_EXPORTS);
        let spans = call.layout.tensors().flat_map(|tensor| {
            let (read, written) = call.tensors(0)[tensor].buffer.byte_ranges();
            [read, written].map(|span| (span.start as u64, span.len() as u64))
        });
        let Located { addresses, used, visible } = TensorAddresses::locate(&mut exports, spans)?;
        // Exports that do not fit follow in later calls; until then the tensors count as not visible.
        let max_exports = (max_words - 4) / (1 + EXPORT_WORDS);
        let peers: Vec<usize> = self.peers.imports.iter().map(PeerImports::rank).collect();
        let ExportUpdates { added, removed, complete } =
            exports.take_updates(&mut self.reported, &used, max_exports, &peers);
        Ok(IpcUpdate { added, removed, addresses: Some(addresses).filter(|_| visible && complete) })
    }

    /// Each rank writes its slice of the mean to the tensors of all ranks at `addresses`.
    fn two_shot(
        &mut self,
        channel: &mut Channel,
        call: &Call,
        addresses: &[TensorAddresses],
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
        self.launcher.batch.start(sources, targets, part.len());
        for piece in call.layout.all_ranges(part) {
            let buffer = &call.tensors(0)[piece.tensor].buffer;
            let skip = (piece.first * buffer.dtype().size()) as u64;
            // Element `piece.first` of the tensor that rank `rank` reads (0) or writes (1).
            let at = |rank: usize, which: usize| {
                let (read, written) = buffer.byte_ranges();
                let start = match (rank == me, which) {
                    (true, 0) => read.start as u64,
                    (true, _) => written.start as u64,
                    (false, _) => {
                        let (export, offset) = addresses[rank].at(2 * piece.layout_index + which)?;
                        self.peers.imports[rank].at(export)? + offset
                    }
                };
                Ok(start + skip)
            };
            let (from, to) = root.map_or((0..ranks, 0..ranks), |root| (root..root + 1, me..me + 1));
            let sources = from.map(|rank| at(rank, 0)).collect::<Result<Vec<_>>>()?;
            let targets = to.map(|rank| at(rank, 1)).collect::<Result<Vec<_>>>()?;
            let (dtype, count) = elements(call.op, buffer.dtype(), piece.count);
            self.launcher.batch.add(dtype, count, sources, targets);
        }
        wait_inputs(call, &self.peers.stream)?;
        self.peers.stream_barrier(channel, wait_ctx)?;
        self.launch(call, wait_ctx)?;
        self.peers.stream_barrier(channel, wait_ctx)?;
        if root != Some(me) || !call.is_in_place() {
            // SAFETY: the call owns the tensors; no other rank writes them after the barrier.
            unsafe { self.launcher.guard_outputs(call, &self.peers.stream, wait_ctx) }?;
        }
        signal_outputs(call, &self.peers.stream)
    }

    /// For each chunk: all ranks pack it; each reduces its slice and writes the mean to the packed chunks of all; all
    /// unpack it after the barrier of the next chunk. In a broadcast the root packs, and the others copy. After the
    /// last barrier no rank reads memory that another may write in its next call.
    fn run_in_chunks(
        &mut self,
        channel: &mut Channel,
        call: &Call,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<DeviceResult> {
        let Some(at) = self.chunk_buffers(channel, wait_ctx)? else { return Ok(DeviceResult::FallBackToHost) };
        self.calls_in_chunks += 1;
        let (me, root) = (self.peers.me, root(call, &channel.topology));
        let chunks = call.layout.total().div_ceil(CHUNK_BYTES);
        wait_inputs(call, &self.peers.stream)?;
        for round in 0..=chunks {
            let incoming = (round < chunks).then_some(round);
            if let Some(chunk) = incoming.filter(|_| root.is_none_or(|root| root == me)) {
                self.copy_chunk(call, chunk, at[me], false, wait_ctx)?;
            }
            self.peers.stream_barrier(channel, wait_ctx)?;
            if let (Some(chunk), None) = (incoming, root) {
                let part = slice(chunk_bytes(call, chunk), me, at.len());
                self.launcher.batch.start(at.len(), at.len(), part.len());
                for piece in chunk_pieces(call, chunk, part) {
                    let (dtype, count) = elements(call.op, call.tensors(0)[piece.tensor].buffer.dtype(), piece.count);
                    let addresses = || at.iter().map(|start| start + piece.offset as Address);
                    self.launcher.batch.add(dtype, count, addresses(), addresses());
                }
                self.launch(call, wait_ctx)?;
            }
            let (outgoing, from) = match root {
                None => (round.checked_sub(1), me),
                Some(root) => (incoming, root),
            };
            if let Some(chunk) = outgoing.filter(|_| root != Some(me) || !call.is_in_place()) {
                self.copy_chunk(call, chunk, at[from], true, wait_ctx)?;
            }
        }
        signal_outputs(call, &self.peers.stream).map(DeviceResult::Enqueued)
    }

    /// The memory of all ranks for chunks; `None` if some rank has none.
    fn chunk_buffers(&mut self, channel: &mut Channel, wait_ctx: &WaitContext<'_>) -> Result<Option<Vec<Address>>> {
        if matches!(self.chunks, Chunks::NotRequested) {
            let window = self.peers.window(channel, NUM_CHUNK_BUFFERS * CHUNK_BYTES, wait_ctx)?;
            self.chunks = window.map_or(Chunks::Unavailable, Chunks::Open);
        }
        Ok(if let Chunks::Open(window) = &self.chunks { Some(window.at.clone()) } else { None })
    }

    /// Any collective. Two buffers alternate, as in [`IpcPath::one_shot`]; those for long
    /// calls are free at the end of a call.
    fn run_in_rounds(&mut self, channel: &mut Channel, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<Event> {
        let me = self.peers.me;
        let blocks = Blocks::new(channel, call, wait_ctx)?;
        let longest = blocks.longest_input();
        let is_long = longest > self.one_shot_max;
        let chunks = if is_long { self.chunk_buffers(channel, wait_ctx)? } else { None };
        let len = if chunks.is_some() { CHUNK_BYTES } else { self.bounce_bytes() };
        let memory = chunks.clone().unwrap_or_else(|| self.peers.bounces.clone());
        wait_inputs(call, &self.peers.stream)?;
        for round in 0..longest.div_ceil(len) {
            let buffer = if chunks.is_some() { round } else { self.num_one_shots } % 2;
            self.num_one_shots += usize::from(chunks.is_none());
            let part = Part { bytes: round * len..(round + 1) * len, at: (buffer * len) as Address, memory: &memory };
            part.pack(&blocks, me, &mut self.launcher.batch);
            // SAFETY: the call owns the tensors; the buffer is free, as described above.
            unsafe { self.launcher.copy(&self.peers.stream, wait_ctx) }?;
            self.peers.stream_barrier(channel, wait_ctx)?;
            if call.op.has_output(me) {
                part.take(&blocks, me, &mut self.launcher.batch);
                self.launch(call, wait_ctx)?;
            }
        }
        if chunks.is_some() {
            self.peers.stream_barrier(channel, wait_ctx)?;
        }
        signal_outputs(call, &self.peers.stream)
    }

    /// Packs a chunk of the tensors into its buffer of the window at `memory`, or, with `unpack`, from there.
    fn copy_chunk(
        &mut self,
        call: &Call,
        chunk: usize,
        memory: Address,
        unpack: bool,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<()> {
        let bytes = chunk_bytes(call, chunk);
        let len = bytes.len();
        self.launcher.batch.copies(chunk_pieces(call, chunk, bytes), call.tensors(0), len, memory, unpack);
        // SAFETY: the call owns the tensors. All ranks have passed a barrier since the last use of a buffer that is
        // packed, and since the last write to one that is unpacked.
        unsafe { self.launcher.copy(&self.peers.stream, wait_ctx) }
    }

    /// Launches the kernels of the batch for `call`.
    fn launch(&mut self, call: &Call, wait_ctx: &WaitContext<'_>) -> Result<()> {
        let stream = &self.peers.stream;
        let (acc_f64, copies) = (call.accumulates_f64(), !call.op.collective.reduces);
        let (op, (pre, post)) = (call.op.reduce, call.op.reduce.factors().unwrap_or((1.0, 1.0)));
        let divisor = if op.without_factors() == ReduceOp::Mean { call.divisor() } else { 1 };
        self.launcher.run(Scalars { divisor, pre, post }, stream, wait_ctx, |kernels, dtype, args| {
            // SAFETY: the call owns all ranks' tensors; between barriers each slice belongs to one rank.
            unsafe {
                if copies {
                    kernels.copy(args, stream.raw())
                } else {
                    kernels.reduce((op, dtype, acc_f64), args, stream.raw())
                }
            }
        })
    }
}

/// The bytes of `call` in a chunk of [`CHUNK_BYTES`].
fn chunk_bytes(call: &Call, chunk: usize) -> Range<usize> {
    chunk * CHUNK_BYTES..call.layout.total().min((chunk + 1) * CHUNK_BYTES)
}

/// The tensor ranges of `bytes` of a chunk, with offsets in a window.
fn chunk_pieces(call: &Call, chunk: usize, bytes: Range<usize>) -> impl Iterator<Item = TensorRange> {
    let in_window = chunk % NUM_CHUNK_BUFFERS * CHUNK_BYTES;
    let offset = move |piece: &TensorRange| piece.offset - chunk * CHUNK_BYTES + in_window;
    call.layout.all_ranges(bytes).map(move |piece| TensorRange { offset: offset(&piece), ..piece })
}
