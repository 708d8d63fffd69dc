//! Pairwise exchange: every host sends a message to every other host at once. In a scatter phase each host receives its
//! piece of the slice from all others and completes it; in a gather phase it sends its completed piece to all. An
//! allreduce has both phases, an all-gather and a reduce-scatter have one of them, and an all-to-all exchanges blocks.

use std::ops::Range;
use std::ptr;

use super::exchange::SliceExchange;
use super::stage::{ExchangeStage, Next};
use crate::collective::blocks::{received, scattered};
use crate::collective::operation::{Pattern, Root};
use crate::collective::partials::Partial;
use crate::error::Result;
use crate::transport::HostMessage;
use crate::wire_layout::{ALIGN, HEADER};

const SCATTER: u32 = 1;
const GATHER: u32 = 2;
const BLOCKS: u32 = 3;

impl SliceExchange<'_> {
    /// Receive ranges for a message from each of `hosts`, with this many bytes of data.
    fn recv_ranges(hosts: impl Iterator<Item = usize>, len: impl Fn(usize) -> usize) -> Vec<HostMessage> {
        let mut at = 0;
        let next = |host| {
            let bytes = at..at + HEADER + len(host);
            at = bytes.end.next_multiple_of(ALIGN);
            HostMessage { host, bytes }
        };
        hosts.map(next).collect()
    }

    /// The messages of the scatter phase: each host sends parts of this host's piece.
    fn scatter_receives(&self) -> Vec<HostMessage> {
        let piece = self.piece(self.host());
        let sends_elements = self.sends_elements(piece.clone());
        let len = if sends_elements { self.result_bytes(piece) } else { self.partial_bytes(piece) };
        Self::recv_ranges(self.other_hosts(), |_| len)
    }

    /// The messages of the gather phase: each host sends its completed piece, to the root's host only if there is a
    /// root.
    fn gather_receives(&self) -> Vec<HostMessage> {
        let hosts = self.other_hosts().filter(|_| self.is_target(self.host()));
        Self::recv_ranges(hosts, |host| self.result_bytes(self.piece(host)))
    }

    /// Whether `host` needs the completed pieces of the others.
    fn is_target(&self, host: usize) -> bool {
        let op = self.slice.call.op;
        let root_host = || self.slice.shard.topology.position(op.root).map(|position| position.host);
        op.collective.root != Root::Target || root_host() == Some(host)
    }

    /// The messages of an exchange of blocks, from the shard's ranks on each host to all ranks of this host.
    fn block_receives(&self) -> Vec<HostMessage> {
        let len = |host| self.blocks(host, self.host()).count() * self.slice.block_len;
        Self::recv_ranges(self.other_hosts(), len)
    }

    /// The blocks that the shard's ranks on host `from` send to the ranks of host `to`: sender, and index of the
    /// receiver on its host.
    fn blocks(&self, from: usize, to: usize) -> impl Iterator<Item = (usize, usize)> + use<'_> {
        let topology = self.slice.shard.topology;
        let senders = &topology.shard_order()[topology.shard_indices_of(self.shard(), from)];
        let receivers = topology.ranks_of(to).len();
        senders.iter().flat_map(move |&sender| (0..receivers).map(move |receiver| (sender, receiver)))
    }

    /// Sends parts of their pieces to all other hosts.
    pub fn start_scatter(&mut self, has_own: &mut bool) -> Result<ExchangeStage> {
        let mut sends = Vec::with_capacity(self.hosts());
        let mut at = 0;
        for host in self.other_hosts() {
            let piece = self.piece(host);
            let bytes = match self.sends_elements(piece.clone()) {
                true => self.pack_elements(at, piece, SCATTER)?,
                false => self.pack_partial(at, piece, SCATTER)?,
            };
            at = bytes.end.next_multiple_of(ALIGN);
            sends.push(HostMessage { host, bytes });
        }
        let receives = self.scatter_receives();
        self.start(&sends, &receives)?;
        // Overlaps with the messages in flight.
        *has_own = self.contribute_to_local_buffer(self.piece(self.host()))?;
        Ok(ExchangeStage::Scatter)
    }

    /// Completes this host's piece from the parts of all hosts.
    pub fn finish_scatter(&mut self, has_own: bool) -> Result<Next> {
        let me = self.host();
        let own_piece = self.piece(me);
        let own: Partial = has_own.then(|| self.host_partial().as_ptr());
        let mut parts = vec![None; self.hosts()];
        parts[me] = own;
        let (len, sends_elements) = (self.partial_bytes(own_piece.clone()), self.sends_elements(own_piece.clone()));
        for (number, recv) in self.scatter_receives().into_iter().enumerate() {
            parts[recv.host] = self.read_matched(recv.bytes.start, SCATTER)?;
            if sends_elements && let Some(elements) = parts[recv.host] {
                // Behind those of this host.
                let out = self.host_partial()[(number + 1) * len..][..len].as_mut_ptr();
                // SAFETY: the message has the elements of this piece, and the local buffer is this host's.
                unsafe { self.slice.ops.partial_of_elements(&self.slice.part(own_piece.clone()), elements, out) };
                parts[recv.host] = Some(out.cast_const());
            }
        }
        let add_order = self.tree.add_order();
        let slice = self.slice;
        for (number, &(low, high)) in add_order.iter().enumerate() {
            let (first, second) = (parts[low], parts[high]);
            // SAFETY: all parts are partial results of this piece; this host owns the receive buffer and the local
            // buffer.
            unsafe {
                if number + 1 == add_order.len() {
                    slice.ops.finish_shard(&slice.part(own_piece.clone()), first, second)?;
                } else if let Some(out) = first.or(second) {
                    slice.ops.add_partials(&slice.part(own_piece.clone()), first, second, out.cast_mut());
                    parts[low] = Some(out);
                }
            }
        }
        match slice.call.op.pattern() {
            Pattern::Line => self.start_gather().map(Next::ExchangeStage),
            _ => Ok(Next::Done(true)),
        }
    }

    /// Sends this host's completed piece.
    pub fn start_gather(&mut self) -> Result<ExchangeStage> {
        let message = self.pack_result(0, self.piece(self.host()), GATHER)?;
        let targets = self.other_hosts().filter(|&host| self.is_target(host));
        let sends: Vec<HostMessage> = targets.map(|host| HostMessage { host, bytes: message.clone() }).collect();
        let receives = self.gather_receives();
        self.start(&sends, &receives)?;
        Ok(ExchangeStage::Gather)
    }

    /// Takes the completed pieces of the other hosts.
    pub fn finish_gather(&mut self) -> Result<Next> {
        for recv in self.gather_receives() {
            self.unpack_result(recv.bytes.start, self.piece(recv.host), GATHER)?;
        }
        Ok(Next::Done(true))
    }

    /// Sends the blocks for the ranks of all other hosts.
    pub fn start_blocks(&mut self) -> Result<ExchangeStage> {
        let mut sends = Vec::with_capacity(self.hosts());
        let mut at = 0;
        for host in self.other_hosts() {
            let bytes = self.pack_block_message(at, host);
            at = bytes.end.next_multiple_of(ALIGN);
            sends.push(HostMessage { host, bytes });
        }
        let receives = self.block_receives();
        self.start(&sends, &receives)?;
        Ok(ExchangeStage::Blocks)
    }

    /// Writes a message with the blocks for `host` at byte `at` of the send buffer.
    fn pack_block_message(&mut self, at: usize, host: usize) -> Range<usize> {
        self.header(BLOCKS, true, true).write(&mut self.link.buffers(self.exchange_index).send[at..]);
        let blocks: Vec<(usize, usize)> = self.blocks(self.host(), host).collect();
        let (topology, stride, len) = (self.slice.shard.topology, self.slice.call.compartment(), self.slice.block_len);
        let send = self.link.buffers(self.exchange_index).send;
        let mut end = at + HEADER;
        for (sender, receiver) in blocks {
            let slot = self.slice.shard.slots[topology.local_rank_of(sender).unwrap_or(0)];
            let compartment = scattered(topology, topology.ranks_of(host)[receiver]);
            let body = &mut send[end..end + len];
            // SAFETY: all ranks of this host have packed; only this shard reads these blocks.
            unsafe { ptr::copy_nonoverlapping(slot.add(compartment * stride), body.as_mut_ptr(), len) };
            end += len;
        }
        at..end
    }

    /// Copies the received blocks to this shard's slot.
    pub fn finish_blocks(&mut self) -> Result<Next> {
        for recv in self.block_receives() {
            self.read_matched(recv.bytes.start, BLOCKS)?;
            let blocks: Vec<(usize, usize)> = self.blocks(recv.host, self.host()).collect();
            let (topology, len) = (self.slice.shard.topology, self.slice.block_len);
            let message = self.link.buffers(self.exchange_index).recv;
            let mut from = recv.bytes.start + HEADER;
            for (sender, receiver) in blocks {
                let (_, compartment) = received(topology, sender, receiver);
                let to = self.slice.shard.result.wrapping_add(compartment * self.slice.call.compartment());
                let body = &message[from..from + len];
                // SAFETY: this shard owns these compartments of its slot until it raises `Reduced`.
                unsafe { ptr::copy_nonoverlapping(body.as_ptr(), to, len) };
                from += len;
            }
        }
        Ok(Next::Done(true))
    }
}
