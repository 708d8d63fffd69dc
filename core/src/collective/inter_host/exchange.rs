//! One slice on its way between the hosts.

use std::ops::Range;
use std::ptr;

use super::algorithm::{Algorithm, AlgorithmSetting};
use super::cost;
use super::handshake_state::{HandshakeState, Payload};
use super::header::{self, Header};
use super::tree::ReductionTree;
use crate::collective::call::Call;
use crate::collective::phases::{InterHostOps, Partial, ShardView};
use crate::error::Result;
use crate::timings::{Activity, PhaseTimer};
use crate::topology::Topology;
use crate::transport::memory::Aligned;
use crate::transport::{HostLink, MAX_EXCHANGES, Message, NetworkModel, WaitContext};
use crate::wire_layout::{HEADER, slice};
/// One shard's way to the other hosts.
pub(crate) struct InterHost {
    pub link: Box<dyn HostLink>,
    tree: ReductionTree,
    network: NetworkModel,
    setting: AlgorithmSetting,
    /// Of each turn: this host's part of what it completes.
    host_partial: [Aligned; MAX_EXCHANGES],
}

/// A slice of a chunk under way between hosts.
#[derive(Debug)]
pub(in crate::collective) struct InFlightSlice {
    algorithm: Algorithm,
    /// What the hosts carry while they meet, if they do.
    load: Option<HandshakeState>,
}

/// What is to be done with a slice.
pub(in crate::collective) struct Slice<'a> {
    /// How.
    pub collective: &'a dyn InterHostOps,
    /// The call.
    pub call: &'a Call,
    /// The shard, on this host.
    pub shard: ShardView<'a>,
    /// Its bytes of the chunk.
    pub bytes: Range<usize>,
    /// The step.
    pub step: u32,
}

impl InterHost {
    /// For the links of a host's shard.
    pub fn new(
        mut link: Box<dyn HostLink>,
        topology: &Topology,
        network: NetworkModel,
        choice: AlgorithmSetting,
    ) -> InterHost {
        let capacity = link.buffers(0).send.len();
        let own = [(); MAX_EXCHANGES].map(|()| Aligned::new(capacity));
        InterHost {
            link,
            tree: ReductionTree::new(topology.hosts(), topology.host()),
            network,
            setting: choice,
            host_partial: own,
        }
    }

    /// Sends the first messages of a slice. `matched` where all hosts are known to have called the same; else `agreed` is
    /// whether the ranks of this host have.
    pub(in crate::collective) fn start(
        &mut self,
        slice: &Slice<'_>,
        matched: bool,
        agreed: bool,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<InFlightSlice> {
        let (choice, network) = (self.setting, self.network);
        let mut work = self.work(slice, wait_ctx);
        let algorithm = match choice {
            AlgorithmSetting::Always(algorithm) => algorithm,
            AlgorithmSetting::Auto => cost::fastest(&network, work.hosts(), work.load(), !matched),
        };
        let freight = match algorithm {
            Algorithm::Doubling => Some(Payload::Whole),
            Algorithm::Halving => Some(Payload::Halves),
            Algorithm::Pairwise | Algorithm::Ring => (!matched).then_some(Payload::Empty),
        };
        let load = freight.map(|freight| work.start_handshake(freight, agreed)).transpose()?;
        if load.is_none() {
            work.start_pieces(algorithm)?;
        }
        Ok(InFlightSlice { algorithm, load })
    }

    /// Completes a slice in this shard's slot; false, with nothing written and the same on all hosts, where ranks of a host
    /// or hosts differ.
    pub(in crate::collective) fn finish(
        &mut self,
        slice: &Slice<'_>,
        in_flight: InFlightSlice,
        wait_ctx: &WaitContext<'_>,
    ) -> Result<bool> {
        let mut work = self.work(slice, wait_ctx);
        let InFlightSlice { algorithm, load } = in_flight;
        let in_pieces = matches!(algorithm, Algorithm::Pairwise | Algorithm::Ring);
        if let Some(load) = load {
            let agreed = work.finish_handshake(load)?;
            if !agreed || !in_pieces {
                return Ok(agreed);
            }
            work.start_pieces(algorithm)?;
        }
        match algorithm {
            Algorithm::Ring => work.finish_ring()?,
            _ => work.finish_pairwise()?,
        }
        Ok(true)
    }

    fn work<'a>(&'a mut self, slice: &'a Slice<'a>, wait_ctx: &'a WaitContext<'a>) -> SliceExchange<'a> {
        let exchange = slice.step as usize % MAX_EXCHANGES;
        // Beside a message the clock is nothing.
        let timer = PhaseTimer::start(wait_ctx.log(), usize::MAX);
        SliceExchange {
            slice,
            turn: exchange,
            link: self.link.as_mut(),
            host_partial: &mut self.host_partial[exchange],
            tree: &self.tree,
            wait_ctx,
            timer,
        }
    }
}

/// A slice, and what its messages need; the algorithms are its methods.
pub(super) struct SliceExchange<'a> {
    pub slice: &'a Slice<'a>,
    pub turn: usize,
    pub link: &'a mut dyn HostLink,
    pub host_partial: &'a mut Aligned,
    pub tree: &'a ReductionTree,
    pub wait_ctx: &'a WaitContext<'a>,
    pub timer: PhaseTimer<'a>,
}

impl SliceExchange<'_> {
    /// Sends the first messages of an algorithm in pieces.
    pub fn start_pieces(&mut self, algorithm: Algorithm) -> Result<()> {
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

    /// The part of the slice that `host` completes where there are as many parts as hosts.
    pub fn piece(&self, host: usize) -> Range<usize> {
        slice(self.slice.bytes.clone(), host, self.hosts())
    }

    pub fn header(&self, kind: u32, agreed: bool, holds: bool) -> Header {
        Header {
            signature: self.slice.call.signature,
            step: self.slice.step,
            message_kind: kind,
            agreed,
            has_data: holds,
        }
    }

    /// What the message at `at` in the inbox says, and where its content is; `None` when its sender does not agree.
    pub fn read(&mut self, at: usize, kind: u32) -> Result<Option<Partial>> {
        let message = &self.link.buffers(self.turn).recv[at..];
        let header = Header::read(message, self.slice.step, kind, self.slice.call)?;
        let agrees = header.agreed && header.signature == self.slice.call.signature;
        Ok(agrees.then(|| header.has_data.then(|| message[HEADER..].as_ptr())))
    }

    /// The same where all hosts are known to agree.
    pub fn read_matched(&mut self, at: usize, kind: u32) -> Result<Partial> {
        let read = self.read(at, kind)?;
        read.ok_or_else(|| header::out_of_sync(self.slice.call))
    }

    /// What the shards of this host bring, as if all were like this one.
    pub fn load(&self) -> cost::CostInput {
        let shards = self.slice.shard.topology.num_shards();
        let bytes = self.slice.bytes.clone();
        cost::CostInput { finished: bytes.len() * shards, carried: self.carried(bytes) * shards, shards }
    }

    /// The bytes that the hosts' parts of `piece` take.
    pub fn carried(&self, piece: Range<usize>) -> usize {
        self.slice.collective.partial_bytes(self.slice.call, self.slice.shard.chunk, piece)
    }

    /// Writes this host's part of `piece` to what is sent, from byte `at`; false when it has none.
    pub fn contribute_to_out(&mut self, at: usize, piece: Range<usize>) -> bool {
        let Slice { collective, call, shard, .. } = self.slice;
        // SAFETY: all ranks of the host have packed, so the slice is this shard's.
        unsafe { collective.contribute(call, shard, piece, &mut self.link.buffers(self.turn).send[at..]) }
    }

    /// The same to the start of the own memory.
    pub fn contribute_to_own(&mut self, piece: Range<usize>) -> bool {
        let Slice { collective, call, shard, .. } = self.slice;
        // SAFETY: as above.
        unsafe { collective.contribute(call, shard, piece, self.host_partial.as_mut_slice()) }
    }

    /// Writes a message with this host's part of `piece` to what is sent, from byte `at`.
    pub fn pack_partial(&mut self, at: usize, piece: Range<usize>, kind: u32) -> Range<usize> {
        let holds = self.contribute_to_out(at + HEADER, piece.clone());
        self.header(kind, true, holds).write(&mut self.link.buffers(self.turn).send[at..]);
        at..at + HEADER + if holds { self.carried(piece) } else { 0 }
    }

    /// Writes a message with the finished `piece` to what is sent, from byte `at`.
    pub fn pack_result(&mut self, at: usize, piece: Range<usize>, kind: u32) -> Range<usize> {
        self.header(kind, true, true).write(&mut self.link.buffers(self.turn).send[at..]);
        let end = at + HEADER + piece.len();
        let body = &mut self.link.buffers(self.turn).send[at + HEADER..end];
        // SAFETY: the slice of the own slot is this shard's, and completed there.
        unsafe { ptr::copy_nonoverlapping(self.slice.shard.own().add(piece.start), body.as_mut_ptr(), piece.len()) };
        at..end
    }

    /// Takes a finished `piece` from the message at `at` of what has come.
    pub fn unpack_result(&mut self, at: usize, piece: Range<usize>, kind: u32) -> Result<()> {
        self.read_matched(at, kind)?;
        let body = &self.link.buffers(self.turn).recv[at + HEADER..at + HEADER + piece.len()];
        // SAFETY: as in `finished`.
        unsafe { ptr::copy_nonoverlapping(body.as_ptr(), self.slice.shard.own().add(piece.start), piece.len()) };
        Ok(())
    }

    /// Room for one message, as long as it may be.
    pub fn recv_buffer(&mut self) -> Range<usize> {
        0..self.link.buffers(self.turn).recv.len()
    }

    pub fn start(&mut self, sends: &[Message], receives: &[Message]) -> Result<()> {
        self.timer.end(Activity::Reduce);
        self.wait_ctx.log().messages(sends.len(), sends.iter().map(|message| message.bytes.len()).sum());
        self.link.start(self.turn, sends, receives)
    }

    pub fn finish(&mut self) -> Result<()> {
        self.timer.reset();
        self.link.finish(self.turn, self.wait_ctx)?;
        self.timer.end(Activity::Network);
        Ok(())
    }
}
