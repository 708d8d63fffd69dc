//! What each rank of a host reads and writes in a round of a call on device memory: blocks of the packed inputs of all.
//!
//! All ranks are on one host, where local ranks are ranks. Plain data, but for [`Blocks::new`].

use std::ops::Range;

use super::batch::Batch;
use super::shm_allgather::{allgather_u64, max_words};
use crate::collective::call::Call;
use crate::collective::channel::Channel;
use crate::collective::counts::{Bounds, Counts};
use crate::collective::operation::Op;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::transport::WaitContext;
use crate::transport::gpu::{Address, kernel_type};

/// Tensors are packed at multiples of it, a multiple of the size of every element: kernels move so many bytes at once.
const PACKED_ALIGN: usize = 16;

/// The blocks of a call, and the inputs of all ranks with their tensors one after the other.
pub(super) struct Blocks<'a> {
    call: &'a Call,
    /// Of calls whose ranks know only their own blocks, what each rank sends of each tensor.
    pairs: Option<Vec<Vec<Bounds>>>,
    inputs: Vec<PackedInput>,
}

#[derive(Default)]
struct PackedInput {
    /// Of each tensor, the offset in bytes and the length.
    tensors: Vec<(usize, usize)>,
    bytes: usize,
}

impl<'a> Blocks<'a> {
    /// The blocks of `call`, on which the ranks agree. Collective.
    pub fn new(channel: &mut Channel, call: &'a Call, wait_ctx: &WaitContext<'_>) -> Result<Blocks<'a>> {
        let ranks = channel.topology.size();
        let pairs = match call.counts() {
            Counts::Pairs { send, .. } => {
                let ends: Vec<u64> = send.iter().flat_map(Bounds::ends).map(|&end| end as u64).collect();
                let mut of_ranks = vec![Vec::new(); ranks];
                for part in ends.chunks(max_words(channel)) {
                    allgather_u64(channel, part, wait_ctx, |parts| {
                        of_ranks.iter_mut().zip(parts).for_each(|(ends, part)| ends.extend_from_slice(part));
                        Ok(())
                    })?;
                }
                let of_rank = |ends: Vec<u64>| ends.chunks(ranks).map(bounds).collect();
                Some(of_ranks.into_iter().map(of_rank).collect::<Result<_>>()?)
            }
            Counts::Even | Counts::Ranks(_) => None,
        };
        let mut blocks = Blocks { call, pairs, inputs: Vec::new() };
        blocks.inputs = (0..ranks).map(|rank| blocks.packed(rank, ranks)).collect();
        Ok(blocks)
    }

    /// The bytes of the longest input.
    pub fn longest_input(&self) -> usize {
        self.inputs.iter().map(|input| input.bytes).max().unwrap_or(0)
    }

    fn packed(&self, rank: usize, ranks: usize) -> PackedInput {
        let mut input = PackedInput::default();
        if self.call.op.has_input(rank) {
            for (index, tensor) in self.call.tensors(0).iter().enumerate() {
                let end = (0..ranks).map(|peer| self.sent(index, rank, peer).end).max().unwrap_or(0);
                let length = end * tensor.buffer.dtype().size();
                input.tensors.push((input.bytes, length));
                input.bytes += length.next_multiple_of(PACKED_ALIGN);
            }
        }
        input
    }

    /// The elements of `tensor` in the block that `rank` sends to `peer`.
    fn sent(&self, tensor: usize, rank: usize, peer: usize) -> Range<usize> {
        match &self.pairs {
            Some(pairs) => pairs[rank][tensor].block(peer),
            None => self.call.sent(tensor, rank, peer),
        }
    }
}

fn bounds(ends: &[u64]) -> Result<Bounds> {
    let mut before = 0;
    let lengths: Option<Vec<usize>> =
        ends.iter().map(|end| usize::try_from(end.checked_sub(std::mem::replace(&mut before, *end))?).ok()).collect();
    lengths
        .and_then(|lengths| Bounds::new(&lengths))
        .ok_or_else(|| Error::Internal("the blocks of another rank overlap".into()))
}

/// The bytes of the packed inputs that a round moves, through buffers of all ranks.
pub(super) struct Part<'a> {
    pub bytes: Range<usize>,
    /// The offset of the buffers in the memory of each rank.
    pub at: Address,
    pub memory: &'a [Address],
}

impl Part<'_> {
    /// The place of byte `offset` of the packed input of `rank`.
    fn place(&self, rank: usize, offset: usize) -> Address {
        self.memory[rank] + self.at + (offset - self.bytes.start) as Address
    }

    /// The bytes of `block` that this part has.
    fn common(&self, block: Range<usize>) -> Range<usize> {
        let start = block.start.max(self.bytes.start);
        start..block.end.min(self.bytes.end).max(start)
    }

    /// Makes a batch that copies this rank's input to its buffer.
    pub fn pack(&self, blocks: &Blocks<'_>, me: usize, batch: &mut Batch) {
        let input = &blocks.inputs[me];
        batch.start(1, 1, self.common(0..input.bytes).len());
        for (tensor, &(start, length)) in blocks.call.tensors(0).iter().zip(&input.tensors) {
            let piece = self.common(start..start + length);
            if !piece.is_empty() {
                let from = (tensor.buffer.source_bytes(0..0).start + piece.start - start) as Address;
                batch.add(DType::U8, piece.len(), [from], [self.place(me, piece.start)]);
            }
        }
    }

    /// Makes a batch that takes this rank's output from the buffers.
    pub fn take(&self, blocks: &Blocks<'_>, me: usize, batch: &mut Batch) {
        let Blocks { call, inputs, .. } = blocks;
        let reduces = call.op.collective.reduces;
        // Of a reduction, all inputs have the same blocks.
        let senders = if reduces { me..me + 1 } else { 0..inputs.len() };
        batch.start(if reduces { inputs.len() } else { 1 }, 1, self.bytes.len());
        for (index, tensor) in call.tensors(0).iter().enumerate() {
            let (dtype, size) = (tensor.buffer.dtype(), tensor.buffer.dtype().size());
            batch.fills = dtype.has_nan();
            for sender in senders.clone().filter(|sender| call.op.has_input(*sender)) {
                let sent = blocks.sent(index, sender, me);
                let start = inputs[sender].tensors[index].0 + sent.start * size;
                let piece = self.common(start..start + sent.len() * size);
                if piece.is_empty() {
                    continue;
                }
                let received = tensor.buffer.destination_bytes(call.received(index, me, sender));
                let to = (received.start + piece.start - start) as Address;
                let (kernel, count) = elements(call.op, dtype, piece.len() / size);
                let sources = if reduces { 0..inputs.len() } else { sender..sender + 1 };
                batch.add(kernel, count, sources.map(|rank| self.place(rank, piece.start)), [to]);
            }
        }
    }
}

/// What the kernels of `op` process for `count` elements of `dtype`: what moves data copies bytes.
pub(super) fn elements(op: Op, dtype: DType, count: usize) -> (DType, usize) {
    let kernel = if op.collective.reduces { kernel_type(op.reduce, dtype) } else { DType::U8 };
    (kernel, count * dtype.size() / kernel.size())
}
