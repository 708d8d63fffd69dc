//! The lengths of the blocks of a call, and with them where the blocks lie in the tensors. Pure.

use std::ops::Range;
use std::sync::Arc;

use super::operation::{Op, Pattern};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// The most lengths in a message.
const SHOWN: usize = 16;

/// Consecutive blocks of different lengths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bounds(Arc<[usize]>);

impl Bounds {
    /// Blocks with these lengths; `None` if they are longer than memory can be.
    pub fn new(lengths: &[usize]) -> Option<Bounds> {
        let mut bounds = vec![0; lengths.len() + 1];
        for (index, length) in lengths.iter().enumerate() {
            bounds[index + 1] = length.checked_add(bounds[index])?;
        }
        Some(Bounds(bounds.into()))
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.0.len() - 1
    }

    /// The elements of block `index`.
    pub(super) fn block(&self, index: usize) -> Range<usize> {
        self.0[index]..self.0[index + 1]
    }

    /// The ends of the blocks, for signatures.
    pub(super) fn ends(&self) -> &[usize] {
        &self.0[1..]
    }
}

/// The number of elements of each rank's block: for all tensors, or for none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Counts {
    /// All blocks of a tensor are equally long.
    #[default]
    Even,
    /// Of each tensor, block r belongs to rank r; the same on all ranks.
    Ranks(Vec<Bounds>),
    /// Of each tensor, this rank's blocks for, and from, each rank.
    Pairs {
        /// By receiver.
        send: Vec<Bounds>,
        /// By sender.
        receive: Vec<Bounds>,
    },
}

impl Counts {
    /// The lengths that a caller gives for `tensors` tensors of `op`, an entry for each tensor and rank, those of the
    /// first tensor first: `send` of the blocks that this rank sends, or of all ranks' blocks; `receive` of those that it
    /// receives from each rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] for lengths that `op` does not take.
    pub fn from_lists(op: Op, tensors: usize, send: Option<&[usize]>, receive: Option<&[usize]>) -> Result<Counts> {
        let bounds = |lengths: &[usize], name: &str| {
            if tensors == 0 || !lengths.len().is_multiple_of(tensors) {
                let text = format!("there are {} {name} for {tensors} tensors", lengths.len());
                return Err(Error::Invalid(text));
            }
            let each = lengths.chunks((lengths.len() / tensors).max(1)).map(Bounds::new);
            let all: Option<Vec<Bounds>> = each.collect();
            all.ok_or_else(|| Error::Invalid(format!("{name} are longer than memory can be")))
        };
        match (op.pattern(), send, receive) {
            (_, None, None) => Ok(Counts::Even),
            (Pattern::Exchange, send, receive) => {
                let given = |lengths: Option<&[usize]>, name: &str| match lengths {
                    Some(lengths) => bounds(lengths, name),
                    None => Err(Error::Invalid(format!("{} takes send_counts and receive_counts", op.title()))),
                };
                Ok(Counts::Pairs { send: given(send, "send_counts")?, receive: given(receive, "receive_counts")? })
            }
            (_, None, Some(_)) => Err(Error::Invalid(format!("{} takes its counts as send_counts", op.title()))),
            (_, Some(send), _) => Ok(Counts::Ranks(bounds(send, "send_counts")?)),
        }
    }

    /// Those of a tensor.
    #[inline]
    pub(super) fn of(&self, tensor: usize) -> TensorCounts<'_> {
        match self {
            Counts::Even => TensorCounts::Even,
            Counts::Ranks(bounds) => TensorCounts::Ranks(&bounds[tensor]),
            Counts::Pairs { send, receive } => TensorCounts::Pairs { send: &send[tensor], receive: &receive[tensor] },
        }
    }

    /// What the ranks compare of a tensor's lengths, in words; empty if they compare none.
    pub(super) fn describe(&self, tensor: usize) -> String {
        let Counts::Ranks(bounds) = self else { return String::new() };
        let lengths = |bounds: &Bounds| {
            let shown: Vec<String> =
                (0..bounds.blocks().min(SHOWN)).map(|rank| bounds.block(rank).len().to_string()).collect();
            let more = if bounds.blocks() > SHOWN { ", ..." } else { "" };
            shown.join(", ") + more
        };
        bounds.get(tensor).map_or_else(String::new, |bounds| format!(" of blocks of {} elements", lengths(bounds)))
    }

    /// The lists of bounds of all tensors: none, those of the ranks, or those of the senders' and the receivers' sides.
    pub(super) fn lists(&self) -> Vec<&[Bounds]> {
        match self {
            Counts::Even => vec![],
            Counts::Ranks(bounds) => vec![bounds],
            Counts::Pairs { send, receive } => vec![send, receive],
        }
    }

    /// For each list of [`Counts::lists`] and each of its ranks, the types and lengths of a block's tensors.
    pub(super) fn block_lengths(&self, tensors: &[(DType, usize)]) -> Vec<Vec<Vec<(DType, usize)>>> {
        let of_rank = |list: &[Bounds], rank: usize| {
            tensors.iter().zip(list).map(|(&(dtype, _), bounds)| (dtype, bounds.block(rank).len())).collect()
        };
        let ranks = |list: &[Bounds]| list.first().map_or(0, Bounds::blocks);
        self.lists().into_iter().map(|list| (0..ranks(list)).map(|rank| of_rank(list, rank)).collect()).collect()
    }
}

/// The number of elements of each rank's block of a tensor, as [`Counts`].
#[derive(Debug, Clone, Copy)]
pub(super) enum TensorCounts<'a> {
    Even,
    Ranks(&'a Bounds),
    Pairs { send: &'a Bounds, receive: &'a Bounds },
}

impl TensorCounts<'_> {
    /// The elements of the block for `peer` in an input of rank `me`. `len` is the length of an even block.
    pub fn sent(self, pattern: Pattern, me: usize, peer: usize, len: usize) -> Range<usize> {
        match self {
            TensorCounts::Pairs { send, .. } => send.block(peer),
            _ => self.block(matches!(pattern, Pattern::Scatter | Pattern::Exchange), me, peer, len),
        }
    }

    /// The elements of the block from `peer` in an output of rank `me`.
    pub fn received(self, pattern: Pattern, me: usize, peer: usize, len: usize) -> Range<usize> {
        match self {
            TensorCounts::Pairs { receive, .. } => receive.block(peer),
            _ => self.block(matches!(pattern, Pattern::Gather | Pattern::Exchange), me, peer, len),
        }
    }

    /// The block of `peer` in a tensor with a block for each rank (`split`), or the only block, that of `me`.
    #[inline]
    fn block(self, split: bool, me: usize, peer: usize, len: usize) -> Range<usize> {
        match self {
            TensorCounts::Ranks(bounds) if split => bounds.block(peer),
            TensorCounts::Ranks(bounds) => 0..bounds.block(me).len(),
            _ if split => peer * len..(peer + 1) * len,
            _ => 0..len,
        }
    }
}
