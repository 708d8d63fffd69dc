//! The collectives, and the operation of a call. Pure.
//!
//! A collective is a row of [`TABLE`]: a [`Pattern`] of its data, whether it reduces, and the role of its root. The
//! algorithms follow from these three.

use crate::error::{Error, Result};
use crate::reduce::ReduceOp;

/// A collective.
#[derive(Debug, PartialEq, Eq)]
pub struct Collective {
    /// The name in messages.
    pub name: &'static str,
    /// Part of the signature of a call; the number in the C API.
    pub code: i32,
    /// What the ranks' tensors hold.
    pub pattern: Pattern,
    /// Whether it applies a [`ReduceOp`].
    pub reduces: bool,
    /// The role of the root.
    pub root: Root,
}

/// What the ranks' tensors hold: one block, or a block for each rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// Inputs and outputs have the same elements.
    Line,
    /// An input is the block of its rank; an output has the blocks of all ranks.
    Gather,
    /// An input has a block for each rank; an output is the block of its rank.
    Scatter,
    /// An input has a block for each rank, an output one from each rank.
    Exchange,
}

/// The role of the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Root {
    /// There is none.
    None,
    /// Only the root has inputs.
    Source,
    /// Only the root has outputs.
    Target,
}

/// The collectives, with their standard names; codes ascend from 1.
pub static TABLE: [Collective; 9] = [
    row("allreduce", 1, Pattern::Line, true, Root::None),
    row("broadcast", 2, Pattern::Line, false, Root::Source),
    row("barrier", 3, Pattern::Line, false, Root::None),
    row("reduce", 4, Pattern::Line, true, Root::Target),
    row("all-gather", 5, Pattern::Gather, false, Root::None),
    row("gather", 6, Pattern::Gather, false, Root::Target),
    row("scatter", 7, Pattern::Scatter, false, Root::Source),
    row("reduce-scatter", 8, Pattern::Scatter, true, Root::None),
    row("all-to-all", 9, Pattern::Exchange, false, Root::None),
];

const fn row(name: &'static str, code: i32, pattern: Pattern, reduces: bool, root: Root) -> Collective {
    Collective { name, code, pattern, reduces, root }
}

/// The operation of a call: a collective with its operator and root.
#[derive(Debug, Clone, Copy)]
pub struct Op {
    /// The collective.
    pub collective: &'static Collective,
    /// The operator of a collective that reduces.
    pub reduce: ReduceOp,
    /// The root; 0 for a collective without one.
    pub root: usize,
}

impl PartialEq for Op {
    fn eq(&self, other: &Op) -> bool {
        // 0.0 and -0.0 are equal as numbers, and give other bits as factors.
        let bits = |op: &Op| op.reduce.factors().map(|(pre, post)| (pre.to_bits(), post.to_bits()));
        std::ptr::eq(self.collective, other.collective)
            && self.reduce == other.reduce
            && self.root == other.root
            && bits(self) == bits(other)
    }
}

#[cold]
fn unknown_collective(code: i32) -> Error {
    Error::Invalid(format!("no collective has the code {code}; see dl_comm.h"))
}

impl Op {
    /// The mean over all ranks and towers.
    pub const MEAN: Op = Op::allreduce(ReduceOp::Mean);
    /// Waits for all ranks.
    pub const BARRIER: Op = Op::new(2, ReduceOp::Sum, 0);
    /// Sends the input of every rank to all ranks.
    pub const ALLGATHER: Op = Op::new(4, ReduceOp::Sum, 0);
    /// Sends block r of every rank to rank r.
    pub const ALLTOALL: Op = Op::new(8, ReduceOp::Sum, 0);

    const fn new(row: usize, reduce: ReduceOp, root: usize) -> Op {
        Op { collective: &TABLE[row], reduce, root }
    }

    /// Reduces the inputs of all ranks; all ranks get the result.
    pub const fn allreduce(reduce: ReduceOp) -> Op {
        Op::new(0, reduce, 0)
    }

    /// Copies the values of rank `root` to all ranks.
    pub const fn broadcast(root: usize) -> Op {
        Op::new(1, ReduceOp::Sum, root)
    }

    /// Reduces the inputs of all ranks; rank `root` gets the result.
    pub const fn reduce(reduce: ReduceOp, root: usize) -> Op {
        Op::new(3, reduce, root)
    }

    /// Sends the input of every rank to rank `root`.
    pub const fn gather(root: usize) -> Op {
        Op::new(5, ReduceOp::Sum, root)
    }

    /// Sends block r of rank `root` to rank r.
    pub const fn scatter(root: usize) -> Op {
        Op::new(6, ReduceOp::Sum, root)
    }

    /// Reduces block r of all ranks; rank r gets the result.
    pub const fn reduce_scatter(reduce: ReduceOp) -> Op {
        Op::new(7, reduce, 0)
    }

    /// The collective with this code, operator and root. What it does not use is ignored.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown code.
    #[inline(always)]
    pub fn from_code(code: i32, reduce: ReduceOp, root: usize) -> Result<Op> {
        let row = usize::try_from(code).ok().and_then(|code| code.checked_sub(1)).filter(|&row| row < TABLE.len());
        let Some(row) = row else { return Err(unknown_collective(code)) };
        let Collective { reduces, root: role, .. } = TABLE[row];
        let root = if role == Root::None { 0 } else { root };
        Ok(Op::new(row, if reduces { reduce } else { ReduceOp::Sum }, root))
    }

    /// What the ranks' tensors hold.
    pub fn pattern(&self) -> Pattern {
        self.collective.pattern
    }

    /// Whether the call is an allreduce.
    pub fn is_allreduce(&self) -> bool {
        self.collective.reduces && self.pattern() == Pattern::Line && self.collective.root == Root::None
    }

    /// Whether the call is a broadcast.
    pub fn is_broadcast(&self) -> bool {
        !self.collective.reduces && self.pattern() == Pattern::Line && self.collective.root == Root::Source
    }

    /// Whether the call moves no data.
    pub fn is_barrier(&self) -> bool {
        *self == Op::BARRIER
    }

    /// Whether every path of a GPU has it, one through the host in chunks. On most paths the others run on whole copies in
    /// host memory.
    pub fn runs_in_device_chunks(&self) -> bool {
        self.is_allreduce() || self.is_broadcast() || self.is_barrier()
    }

    /// Whether `rank` has inputs.
    pub fn has_input(&self, rank: usize) -> bool {
        self.collective.root != Root::Source || rank == self.root
    }

    /// Whether `rank` has outputs.
    pub fn has_output(&self, rank: usize) -> bool {
        self.collective.root != Root::Target || rank == self.root
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_give_the_collectives() {
        for collective in &TABLE {
            let op = Op::from_code(collective.code, ReduceOp::Mean, 3).unwrap();
            assert_eq!((op.collective, op.root), (collective, if collective.root == Root::None { 0 } else { 3 }));
            assert_eq!(op.reduce == ReduceOp::Mean, collective.reduces);
        }
        assert!(Op::from_code(0, ReduceOp::Sum, 0).is_err());
        assert_eq!(Op::from_code(1, ReduceOp::Mean, 7), Ok(Op::MEAN));
        assert_eq!(Op::from_code(9, ReduceOp::Mean, 7), Ok(Op::ALLTOALL));
    }
}
