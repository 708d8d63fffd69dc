//! The exchange of one slice between hosts.

use std::ops::Range;

use super::cost;
use super::handshake_state::{HandshakeState, HostCalls, Payload};
use super::header::{self, SliceHeader};
use super::stage::{ExchangeStage, Next};
use super::tree::ReductionTree;
use crate::collective::algorithm::{Algorithm, AlgorithmSetting};
use crate::collective::call::Call;
use crate::collective::lookahead::Lookahead;
use crate::collective::operation::{Op, Pattern, Root};
use crate::collective::partials::{InterHostOps, Partial, PartialRange, Piece};
use crate::collective::selection::{between_hosts, chunks_under_way};
use crate::collective::shard::ShardView;
use crate::collective::wire::{host_piece, runs};
use crate::error::Result;
use crate::timings::{Activity, PhaseTimer};
use crate::topology::Topology;
use crate::transport::{HostLink, HostMessage, MAX_EXCHANGES, NetworkModel, WaitContext, finish_exchange};
use crate::wire_layout::{DtypeRun, HEADER};

/// A shard of this rank, with its links to the other hosts.
pub(crate) struct InterHost {
    pub shard: usize,
    pub link: Box<dyn HostLink>,
    /// Two trees, which take turns: where a host folds into another, each of the two does it for half of the slices.
    trees: [ReductionTree; 2],
    network: NetworkModel,
    setting: AlgorithmSetting,
}

/// A slice in flight between hosts.
#[derive(Debug)]
pub(in crate::collective) struct InFlightSlice {
    algorithm: Algorithm,
    stage: ExchangeStage,
    handshake: HandshakeState,
    /// What the ranks of which this host has heard have behind the call.
    lookahead: Lookahead,
    /// Whether it hears of all.
    hears_of_all: bool,
    /// Whether the local buffer has this host's partial sums.
    has_own: bool,
}

impl InFlightSlice {
    /// What all ranks are known to have behind the call, once the slice is complete.
    pub fn lookahead(&self) -> Lookahead {
        if self.hears_of_all { self.lookahead } else { Lookahead::default() }
    }
}

/// A slice to reduce between hosts.
pub(in crate::collective) struct Slice<'a> {
    /// What the hosts do with their data.
    pub ops: &'a dyn InterHostOps,
    /// The call.
    pub call: &'a Call,
    /// The shard, on this host.
    pub shard: ShardView<'a>,
    /// The slice, in bytes of the slot; empty in an exchange of blocks.
    pub bytes: Range<usize>,
    /// Bytes of a chunk of the longest block, in an exchange of blocks.
    pub block_len: usize,
    /// The number of the round.
    pub round: u32,
}

impl Slice<'_> {
    /// The bytes `bytes` of the slice.
    pub fn part(&self, bytes: Range<usize>) -> Piece<'_> {
        Piece { call: self.call, shard: &self.shard, bytes }
    }
}

impl InterHost {
    /// `link` connects this host's shard `shard` with the same shard of the other hosts.
    pub fn new(
        shard: usize,
        link: Box<dyn HostLink>,
        topology: &Topology,
        network: NetworkModel,
        setting: AlgorithmSetting,
    ) -> InterHost {
        let trees = [0, 1].map(|turn| ReductionTree::new(topology.hosts(), topology.host(), turn));
        InterHost { shard, link, trees, network, setting }
    }

    /// Sends the first messages of a slice. `matched`: all hosts are known to have the same call. `calls`: those of this
    /// host's ranks.
    pub(in crate::collective) fn start(
        &mut self,
        slice: &Slice<'_>,
        matched: bool,
        calls: HostCalls,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<InFlightSlice> {
        let (setting, network) = (self.setting, self.network);
        let mut exchange = self.exchange(slice, calls.lookahead, wait_ctx);
        let algorithm = between_hosts(slice.call.op, setting, || {
            cost::fastest(&network, exchange.hosts(), exchange.cost_input(), !matched)
        });
        let payload = match algorithm {
            Algorithm::Doubling => Payload::Whole,
            Algorithm::Halving => Payload::Halves,
            Algorithm::Pairwise | Algorithm::Ring => Payload::Empty,
        };
        let has_handshake = !matched || payload != Payload::Empty;
        let mut in_flight = InFlightSlice {
            algorithm,
            stage: ExchangeStage::Fold,
            handshake: HandshakeState::new(payload, calls.agreed, slice.bytes.clone()),
            lookahead: calls.lookahead,
            hears_of_all: has_handshake || is_heard_by_all(algorithm, slice.call.op),
            has_own: false,
        };
        in_flight.stage = if !has_handshake {
            exchange.start_data(&mut in_flight)?
        } else {
            exchange.start_handshake(&mut in_flight.handshake)?
        };
        Ok(in_flight)
    }

    /// Continues a slice if its messages have completed. Once the slice is complete in the slot of this rank, returns
    /// true; false on all hosts, with nothing written, if any calls differ.
    pub(in crate::collective) fn advance(
        &mut self,
        slice: &Slice<'_>,
        in_flight: &mut InFlightSlice,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<Option<bool>> {
        while self.link.in_flight(exchange_index(slice)) == 0 {
            let mut exchange = self.exchange(slice, in_flight.lookahead, wait_ctx);
            let next = exchange.finish_stage(in_flight)?;
            in_flight.lookahead = exchange.lookahead;
            exchange.timer.end(Activity::Reduce);
            in_flight.stage = match next {
                Next::ExchangeStage(stage) => stage,
                Next::StartData => exchange.start_data(in_flight)?,
                Next::Done(agreed) => {
                    self.link.memory().release(exchange_index(slice));
                    return Ok(Some(agreed));
                }
            };
        }
        Ok(None)
    }

    /// As `advance`, but waits until the slice is complete.
    pub(in crate::collective) fn finish(
        &mut self,
        slice: &Slice<'_>,
        mut in_flight: InFlightSlice,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<bool> {
        loop {
            if let Some(agreed) = self.advance(slice, &mut in_flight, wait_ctx)? {
                return Ok(agreed);
            }
            finish_exchange(self.link.as_mut(), exchange_index(slice), wait_ctx)?;
        }
    }

    fn exchange<'a>(
        &'a mut self,
        slice: &'a Slice<'a>,
        lookahead: Lookahead,
        wait_ctx: &'a WaitContext<'a>,
    ) -> SliceExchange<'a> {
        let exchange_index = exchange_index(slice);
        let turn = (slice.round as usize + self.shard) % self.trees.len();
        SliceExchange {
            slice,
            lookahead,
            exchange_index,
            link: self.link.as_mut(),
            tree: &self.trees[turn],
            wait_ctx,
            // Reading the clock is cheap compared with a message.
            timer: PhaseTimer::start(wait_ctx.log(), usize::MAX),
        }
    }
}

/// Whether every host gets a message of every other one, in an exchange without a handshake.
fn is_heard_by_all(algorithm: Algorithm, op: Op) -> bool {
    algorithm == Algorithm::Pairwise && (op.pattern() != Pattern::Gather || op.collective.root != Root::Target)
}

/// The exchange of the link that a slice uses.
fn exchange_index(slice: &Slice<'_>) -> usize {
    slice.round as usize % MAX_EXCHANGES
}

/// A slice with its messages; the algorithms are its methods.
pub(super) struct SliceExchange<'a> {
    pub slice: &'a Slice<'a>,
    lookahead: Lookahead,
    pub exchange_index: usize,
    pub link: &'a mut dyn HostLink,
    pub tree: &'a ReductionTree,
    pub wait_ctx: &'a WaitContext<'a>,
    pub timer: PhaseTimer<'a>,
}

impl SliceExchange<'_> {
    /// Sends the first messages of a pairwise or ring exchange.
    fn start_data(&mut self, in_flight: &mut InFlightSlice) -> Result<ExchangeStage> {
        let InFlightSlice { algorithm, has_own, .. } = in_flight;
        match (algorithm, self.slice.call.op.pattern()) {
            (Algorithm::Ring, _) => self.start_ring(has_own),
            (_, Pattern::Gather) => self.start_gather(),
            (_, Pattern::Exchange) => self.start_blocks(),
            (_, Pattern::Line | Pattern::Scatter) => self.start_scatter(has_own),
        }
    }

    /// Takes the messages of a stage, and sends those of the next one.
    fn finish_stage(&mut self, in_flight: &mut InFlightSlice) -> Result<Next> {
        let InFlightSlice { stage, handshake, has_own, .. } = in_flight;
        match *stage {
            ExchangeStage::Fold => self.finish_fold(handshake),
            ExchangeStage::Round(round) => self.finish_round(round, handshake),
            ExchangeStage::Unfold(round) => self.finish_unfold(round, handshake),
            ExchangeStage::FoldResult => self.finish_fold_result(handshake),
            ExchangeStage::Scatter => self.finish_scatter(*has_own),
            ExchangeStage::Gather => self.finish_gather(),
            ExchangeStage::Blocks => self.finish_blocks(),
            ExchangeStage::Ring(round) => self.finish_ring(round, has_own),
        }
    }

    pub fn hosts(&self) -> usize {
        self.slice.shard.topology.hosts()
    }

    pub fn host(&self) -> usize {
        self.slice.shard.topology.host()
    }

    pub fn other_hosts(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.host();
        (0..self.hosts()).filter(move |&host| host != me)
    }

    /// The part of the slice that `host` completes; each host has one.
    pub fn piece(&self, host: usize) -> Range<usize> {
        let ShardView { topology, .. } = self.slice.shard;
        host_piece(topology, self.slice.call, &self.slice.bytes, self.shard(), host)
    }

    /// The number of the shard.
    pub fn shard(&self) -> usize {
        self.slice.shard.shard
    }

    pub fn header(&self, kind: u32, agreed: bool, has_data: bool) -> SliceHeader {
        let (signature, round) = (self.slice.call.signature, self.slice.round);
        SliceHeader { signature, round, message_kind: kind, agreed, has_data, lookahead: self.lookahead }
    }

    /// Reads the header of the message at `at` in the receive buffer.
    pub fn read_header(&mut self, at: usize, kind: u32) -> Result<SliceHeader> {
        let message = &self.link.buffers(self.exchange_index).recv[at..];
        let header = SliceHeader::read(message, self.slice.round, kind, self.slice.call)?;
        self.lookahead = self.lookahead.common(header.lookahead);
        Ok(header)
    }

    /// The data of the message at `at` in the receive buffer.
    pub fn data(&mut self, at: usize, header: &SliceHeader) -> Partial {
        let message = &self.link.buffers(self.exchange_index).recv[at..];
        header.has_data.then(|| message[HEADER..].as_ptr())
    }

    /// The data of the message at `at` in the receive buffer, once all hosts are known to agree; a difference is an error.
    pub fn read_matched(&mut self, at: usize, kind: u32) -> Result<Partial> {
        let header = self.read_header(at, kind)?;
        if !header.agrees_with(self.slice.call) {
            return Err(header::out_of_sync(self.slice.call));
        }
        Ok(self.data(at, &header))
    }

    /// The cost input of this host, which assumes equal shards.
    pub fn cost_input(&self) -> cost::CostInput {
        let shards = self.slice.shard.topology.num_shards();
        let bytes = self.slice.bytes.clone();
        let call = self.slice.call;
        let others = (call.layout.chunks() - 1).div_ceil(call.channels());
        let under_way = chunks_under_way(self.hosts(), call.layout.chunk_size() * call.blocks() / shards);
        cost::CostInput {
            overlap: others.clamp(1, under_way),
            result_bytes: bytes.len() * shards,
            partial_bytes: self.partial_bytes(bytes.clone()) * shards,
            sends_elements: self.sends_elements(bytes),
            shards,
        }
    }

    /// Bytes of a host's partial sums of `piece`.
    pub fn partial_bytes(&self, piece: Range<usize>) -> usize {
        self.slice.ops.partial_bytes(&self.slice.part(piece))
    }

    /// Writes this host's partial sums of `piece` at byte `at` of the send buffer; false if it has none.
    pub fn contribute_to_send_buffer(&mut self, at: usize, piece: Range<usize>) -> Result<bool> {
        let slice = self.slice;
        // SAFETY: all ranks of the host have packed, so this shard may read the slice in all slots.
        unsafe { slice.ops.contribute(&slice.part(piece), &mut self.link.buffers(self.exchange_index).send[at..]) }
    }

    /// This host's partial sums of the range that it completes.
    pub fn host_partial(&mut self) -> &mut [u8] {
        self.link.buffers(self.exchange_index).partial
    }

    /// As `contribute_to_send_buffer`, but at the start of the local buffer.
    pub fn contribute_to_local_buffer(&mut self, piece: Range<usize>) -> Result<bool> {
        let slice = self.slice;
        // SAFETY: as above.
        unsafe { slice.ops.contribute(&slice.part(piece), self.host_partial()) }
    }

    /// Writes a message with this host's partial sums of `piece` at byte `at` of the send buffer.
    pub fn pack_partial(&mut self, at: usize, piece: Range<usize>, kind: u32) -> Result<Range<usize>> {
        let has_data = self.contribute_to_send_buffer(at + HEADER, piece.clone())?;
        self.header(kind, true, has_data).write(&mut self.link.buffers(self.exchange_index).send[at..]);
        Ok(at..at + HEADER + if has_data { self.partial_bytes(piece) } else { 0 })
    }

    /// Whether a pairwise exchange sends the elements in `piece` of hosts with one rank each, because partial sums are wider.
    pub fn sends_elements(&self, piece: Range<usize>) -> bool {
        let Slice { ops, shard: ShardView { topology, .. }, .. } = self.slice;
        let widens = |part: PartialRange| part.reduction.widens();
        topology.hosts() == topology.size() && ops.has_elements() && self.slice.part(piece).parts().any(widens)
    }

    /// Writes a message with the elements of this host's only rank in `piece` at byte `at` of the send buffer.
    pub fn pack_elements(&mut self, at: usize, piece: Range<usize>, kind: u32) -> Result<Range<usize>> {
        // SAFETY: the only rank of this host has packed.
        self.pack_with(at, piece, kind, |ops, piece, body| unsafe { ops.read_elements(piece, body) })
    }

    /// The elements of `piece`.
    fn runs(&self, piece: Range<usize>) -> impl Iterator<Item = DtypeRun> + use<'_> {
        let Slice { call, shard, .. } = self.slice;
        runs(call, shard.topology, shard.shard, shard.chunk, piece)
    }

    /// The bytes of `piece` in a message with results.
    pub fn result_bytes(&self, piece: Range<usize>) -> usize {
        self.runs(piece).map(|run| run.bytes.len()).sum()
    }

    /// Writes a message with the completed `piece` at byte `at` of the send buffer.
    pub fn pack_result(&mut self, at: usize, piece: Range<usize>, kind: u32) -> Result<Range<usize>> {
        // SAFETY: this shard has completed the piece.
        self.pack_with(at, piece, kind, |ops, piece, body| unsafe { ops.read_result(piece, body) })
    }

    /// Writes a message at byte `at` of the send buffer, of which `read` writes as many bytes as a result of `piece` has.
    fn pack_with(
        &mut self,
        at: usize,
        piece: Range<usize>,
        kind: u32,
        read: impl FnOnce(&dyn InterHostOps, &Piece<'_>, &mut [u8]) -> Result<()>,
    ) -> Result<Range<usize>> {
        let end = at + HEADER + self.result_bytes(piece.clone());
        let header = self.header(kind, true, true);
        let (slice, send) = (self.slice, self.link.buffers(self.exchange_index).send);
        header.write(&mut send[at..]);
        read(slice.ops, &slice.part(piece), &mut send[at + HEADER..end])?;
        Ok(at..end)
    }

    /// Takes a completed `piece` from the message at `at` in the receive buffer.
    pub fn unpack_result(&mut self, at: usize, piece: Range<usize>, kind: u32) -> Result<()> {
        self.read_matched(at, kind)?;
        let (slice, recv) = (self.slice, self.link.buffers(self.exchange_index).recv);
        // SAFETY: all ranks of the host have packed, so this shard owns its slice.
        unsafe { slice.ops.write_result(&slice.part(piece), &recv[at + HEADER..]) }
    }

    /// The whole receive buffer, for one message of unknown length.
    pub fn recv_buffer(&mut self) -> Range<usize> {
        0..self.link.buffers(self.exchange_index).recv.len()
    }

    pub fn start(&mut self, sends: &[HostMessage], receives: &[HostMessage]) -> Result<()> {
        self.timer.end(Activity::Reduce);
        self.wait_ctx.log().messages(sends.len(), sends.iter().map(|message| message.bytes.len()).sum());
        self.link.start(self.exchange_index, sends, receives)
    }
}
