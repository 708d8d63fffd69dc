//! The exchange of one slice between hosts.

use std::ops::Range;
use std::ptr;

use super::algorithm::{Algorithm, AlgorithmSetting};
use super::cost;
use super::handshake_state::{HandshakeState, Payload};
use super::header::{self, Header};
use super::tree::ReductionTree;
use crate::collective::call::Call;
use crate::collective::operation::Pattern;
use crate::collective::partials::{InterHostOps, Partial, Piece};
use crate::collective::shard::ShardView;
use crate::collective::wire::{host_piece, runs};
use crate::error::Result;
use crate::timings::{Activity, PhaseTimer};
use crate::topology::Topology;
use crate::transport::memory::Aligned;
use crate::transport::{HostLink, MAX_EXCHANGES, Message, NetworkModel, WaitContext};
use crate::wire_layout::HEADER;

/// The links of one shard to the other hosts.
pub(crate) struct InterHost {
    pub link: Box<dyn HostLink>,
    tree: ReductionTree,
    network: NetworkModel,
    setting: AlgorithmSetting,
    /// For each exchange: this host's partial sums of the range that it completes.
    host_partial: [Aligned; MAX_EXCHANGES],
}

/// A slice in flight between hosts.
#[derive(Debug)]
pub(in crate::collective) struct InFlightSlice {
    algorithm: Algorithm,
    /// The handshake, if there is one.
    handshake: Option<HandshakeState>,
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
    pub step: u32,
}

impl Slice<'_> {
    /// The bytes `bytes` of the slice.
    pub fn part(&self, bytes: Range<usize>) -> Piece<'_> {
        Piece { call: self.call, shard: &self.shard, bytes }
    }
}

impl InterHost {
    /// `link` connects this host's shard with the same shard of the other hosts.
    pub fn new(
        mut link: Box<dyn HostLink>,
        topology: &Topology,
        network: NetworkModel,
        setting: AlgorithmSetting,
    ) -> InterHost {
        let capacity = link.buffers(0).send.len();
        let host_partial = [(); MAX_EXCHANGES].map(|()| Aligned::new(capacity));
        InterHost { link, tree: ReductionTree::new(topology.hosts(), topology.host()), network, setting, host_partial }
    }

    /// Sends the first messages of a slice. `matched`: all hosts are known to have the same call. Otherwise `agreed`
    /// says whether the ranks of this host have the same call.
    pub(in crate::collective) fn start(
        &mut self,
        slice: &Slice<'_>,
        matched: bool,
        agreed: bool,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<InFlightSlice> {
        let (setting, network) = (self.setting, self.network);
        let mut exchange = self.exchange(slice, wait_ctx);
        let algorithm = match setting {
            _ if slice.call.op.pattern() != Pattern::Line => Algorithm::Pairwise,
            AlgorithmSetting::Always(algorithm) => algorithm,
            AlgorithmSetting::Auto => cost::fastest(&network, exchange.hosts(), exchange.cost_input(), !matched),
        };
        let payload = match algorithm {
            Algorithm::Doubling => Some(Payload::Whole),
            Algorithm::Halving => Some(Payload::Halves),
            Algorithm::Pairwise | Algorithm::Ring => (!matched).then_some(Payload::Empty),
        };
        let handshake = payload.map(|payload| exchange.start_handshake(payload, agreed)).transpose()?;
        if handshake.is_none() {
            exchange.start_data(algorithm)?;
        }
        Ok(InFlightSlice { algorithm, handshake })
    }

    /// Completes a slice in this shard's slot. Returns false on all hosts, with nothing written, if any calls differ.
    pub(in crate::collective) fn finish(
        &mut self,
        slice: &Slice<'_>,
        in_flight: InFlightSlice,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<bool> {
        let mut exchange = self.exchange(slice, wait_ctx);
        let InFlightSlice { algorithm, handshake } = in_flight;
        let data_follows = matches!(algorithm, Algorithm::Pairwise | Algorithm::Ring);
        if let Some(handshake) = handshake {
            let agreed = exchange.finish_handshake(handshake)?;
            if !agreed || !data_follows {
                return Ok(agreed);
            }
            exchange.start_data(algorithm)?;
        }
        match algorithm {
            Algorithm::Ring => exchange.finish_ring()?,
            _ => exchange.finish_pairwise()?,
        }
        Ok(true)
    }

    fn exchange<'a>(&'a mut self, slice: &'a Slice<'a>, wait_ctx: &'a WaitContext<'a>) -> SliceExchange<'a> {
        let exchange = slice.step as usize % MAX_EXCHANGES;
        // Reading the clock is cheap compared with a message.
        let timer = PhaseTimer::start(wait_ctx.log(), usize::MAX);
        SliceExchange {
            slice,
            exchange_index: exchange,
            link: self.link.as_mut(),
            host_partial: &mut self.host_partial[exchange],
            tree: &self.tree,
            wait_ctx,
            timer,
        }
    }
}

/// A slice with its messages; the algorithms are its methods.
pub(super) struct SliceExchange<'a> {
    pub slice: &'a Slice<'a>,
    pub exchange_index: usize,
    pub link: &'a mut dyn HostLink,
    pub host_partial: &'a mut Aligned,
    pub tree: &'a ReductionTree,
    pub wait_ctx: &'a WaitContext<'a>,
    pub timer: PhaseTimer<'a>,
}

impl SliceExchange<'_> {
    /// Sends the first messages of a pairwise or ring exchange, after the handshake of a first chunk.
    pub fn start_data(&mut self, algorithm: Algorithm) -> Result<()> {
        match algorithm {
            Algorithm::Ring => self.start_ring(),
            _ => self.start_pairwise(),
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

    /// The shard of this rank.
    pub fn shard(&self) -> usize {
        self.slice.shard.topology.local_rank()
    }

    pub fn header(&self, kind: u32, agreed: bool, has_data: bool) -> Header {
        Header { signature: self.slice.call.signature, step: self.slice.step, message_kind: kind, agreed, has_data }
    }

    /// Reads the message at `at` in the receive buffer and returns its data; `None` if the sender's call differs.
    pub fn read(&mut self, at: usize, kind: u32) -> Result<Option<Partial>> {
        let message = &self.link.buffers(self.exchange_index).recv[at..];
        let header = Header::read(message, self.slice.step, kind, self.slice.call)?;
        let agrees = header.agreed && header.signature == self.slice.call.signature;
        Ok(agrees.then(|| header.has_data.then(|| message[HEADER..].as_ptr())))
    }

    /// As `read`, once all hosts are known to agree; a difference is an error.
    pub fn read_matched(&mut self, at: usize, kind: u32) -> Result<Partial> {
        let read = self.read(at, kind)?;
        read.ok_or_else(|| header::out_of_sync(self.slice.call))
    }

    /// The cost input of this host, which assumes equal shards.
    pub fn cost_input(&self) -> cost::CostInput {
        let shards = self.slice.shard.topology.num_shards();
        let bytes = self.slice.bytes.clone();
        cost::CostInput {
            result_bytes: bytes.len() * shards,
            partial_bytes: self.partial_bytes(bytes) * shards,
            shards,
        }
    }

    /// Bytes of a host's partial sums of `piece`.
    pub fn partial_bytes(&self, piece: Range<usize>) -> usize {
        self.slice.ops.partial_bytes(&self.slice.part(piece))
    }

    /// Writes this host's partial sums of `piece` at byte `at` of the send buffer; false if it has none.
    pub fn contribute_to_send_buffer(&mut self, at: usize, piece: Range<usize>) -> bool {
        let slice = self.slice;
        // SAFETY: all ranks of the host have packed, so this shard may read the slice in all slots.
        unsafe { slice.ops.contribute(&slice.part(piece), &mut self.link.buffers(self.exchange_index).send[at..]) }
    }

    /// As `contribute_to_send_buffer`, but at the start of the local buffer.
    pub fn contribute_to_local_buffer(&mut self, piece: Range<usize>) -> bool {
        let slice = self.slice;
        // SAFETY: as above.
        unsafe { slice.ops.contribute(&slice.part(piece), self.host_partial.as_mut_slice()) }
    }

    /// Writes a message with this host's partial sums of `piece` at byte `at` of the send buffer.
    pub fn pack_partial(&mut self, at: usize, piece: Range<usize>, kind: u32) -> Range<usize> {
        let has_data = self.contribute_to_send_buffer(at + HEADER, piece.clone());
        self.header(kind, true, has_data).write(&mut self.link.buffers(self.exchange_index).send[at..]);
        at..at + HEADER + if has_data { self.partial_bytes(piece) } else { 0 }
    }

    /// The bytes of `piece` in a message with results.
    pub fn result_bytes(&self, piece: Range<usize>) -> usize {
        runs(self.slice.call, self.slice.shard.topology, self.slice.shard.chunk, piece).map(|run| run.bytes.len()).sum()
    }

    /// Writes a message with the completed `piece` at byte `at` of the send buffer.
    pub fn pack_result(&mut self, at: usize, piece: Range<usize>, kind: u32) -> Range<usize> {
        self.header(kind, true, true).write(&mut self.link.buffers(self.exchange_index).send[at..]);
        let Slice { call, shard, .. } = self.slice;
        let send = self.link.buffers(self.exchange_index).send;
        let mut end = at + HEADER;
        for run in runs(call, shard.topology, shard.chunk, piece) {
            let body = &mut send[end..end + run.bytes.len()];
            // SAFETY: this shard owns the slice of its slot and has completed it.
            unsafe { ptr::copy_nonoverlapping(shard.own().add(run.bytes.start), body.as_mut_ptr(), body.len()) };
            end += run.bytes.len();
        }
        at..end
    }

    /// Copies a completed `piece` from the message at `at` in the receive buffer.
    pub fn unpack_result(&mut self, at: usize, piece: Range<usize>, kind: u32) -> Result<()> {
        self.read_matched(at, kind)?;
        let Slice { call, shard, .. } = self.slice;
        let recv = self.link.buffers(self.exchange_index).recv;
        let mut from = at + HEADER;
        for run in runs(call, shard.topology, shard.chunk, piece) {
            let body = &recv[from..from + run.bytes.len()];
            // SAFETY: as in `pack_result`.
            unsafe { ptr::copy_nonoverlapping(body.as_ptr(), shard.own().add(run.bytes.start), body.len()) };
            from += run.bytes.len();
        }
        Ok(())
    }

    /// The whole receive buffer, for one message of unknown length.
    pub fn recv_buffer(&mut self) -> Range<usize> {
        0..self.link.buffers(self.exchange_index).recv.len()
    }

    pub fn start(&mut self, sends: &[Message], receives: &[Message]) -> Result<()> {
        self.timer.end(Activity::Reduce);
        self.wait_ctx.log().messages(sends.len(), sends.iter().map(|message| message.bytes.len()).sum());
        self.link.start(self.exchange_index, sends, receives)
    }

    pub fn finish(&mut self) -> Result<()> {
        self.timer.reset();
        self.link.finish(self.exchange_index, self.wait_ctx)?;
        self.timer.end(Activity::Network);
        Ok(())
    }
}
