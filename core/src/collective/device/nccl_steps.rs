//! The NCCL operations of a call: they follow from the pattern of its collective, whether it reduces, and the role of its
//! root. Pure.
//!
//! NCCL has operations for equal blocks without a root. The others are groups of sends and receives, or, where they
//! reduce, of a reduction for each block.

use crate::collective::call::Call;
use crate::collective::operation::{Op, Pattern, Root};
use crate::dtype::DType;
use crate::reduce::{ReduceOp, Reduction, factor_bytes};
use crate::transport::gpu::{Address, NcclBuffers, NcclOperation, RedOp, nccl_reduces};

/// A part of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NcclStep {
    /// An operation of NCCL.
    Operation(NcclOperation, NcclBuffers),
    /// The block that this rank sends to itself.
    Copy(NcclBuffers),
}

/// The operator of a reduction in NCCL.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum NcclOperator {
    /// One that every communicator has.
    Known(RedOp),
    /// The sum of products with a factor, an element of the reduction's type.
    Scaled(Vec<u8>),
}

impl NcclOperator {
    /// The operator of `reduction`; `None` if NCCL has none with the core's meaning. NCCL adds float16 and bfloat16 in
    /// these types, without float64, and divides integers otherwise.
    pub fn of(reduction: Reduction) -> Option<NcclOperator> {
        let Reduction { op, dtype, acc_f64, .. } = reduction;
        let accumulates = !dtype.is_float() || !acc_f64 || dtype == DType::F64;
        let known = |op: RedOp, holds: bool| holds.then_some(NcclOperator::Known(op));
        if !nccl_reduces(dtype) {
            return None;
        }
        match op {
            ReduceOp::Sum => known(RedOp::SUM, accumulates),
            ReduceOp::Mean => known(RedOp::AVERAGE, accumulates && dtype.is_float()),
            ReduceOp::Product => known(RedOp::PRODUCT, accumulates),
            ReduceOp::Min => known(RedOp::MIN, true),
            ReduceOp::Max => known(RedOp::MAX, true),
            // Another factor before the sum would round and overflow otherwise than one after it.
            ReduceOp::ScaledSum { pre, post: 1.0 } if accumulates => factor_bytes(dtype, pre).map(NcclOperator::Scaled),
            _ => None,
        }
    }
}

/// Whether NCCL has operations for `op`.
pub(super) fn has_operations(op: Op) -> bool {
    let scatters = op.pattern() == Pattern::Scatter && op.collective.root == Root::None;
    !op.collective.reduces || op.pattern() == Pattern::Line || scatters
}

/// The operation on a line of elements, of which inputs and outputs have the same; `None`: there is no data.
pub(super) fn line_operation(op: Op, operator: RedOp) -> Option<NcclOperation> {
    match (op.collective.reduces, op.collective.root) {
        (true, Root::None) => Some(NcclOperation::AllReduce(operator)),
        (true, Root::Source | Root::Target) => Some(NcclOperation::Reduce(operator, op.root)),
        (false, Root::Source) => Some(NcclOperation::Broadcast(op.root)),
        (false, Root::None | Root::Target) => None,
    }
}

/// The steps of `rank` for a tensor of a call of `ranks` ranks that [has them](has_operations); `operator` applies if it reduces.
pub(super) fn steps(call: &Call, tensor: usize, operator: RedOp, rank: usize, ranks: usize) -> Vec<NcclStep> {
    let (op, buffer) = (call.op, &call.tensors(0)[tensor].buffer);
    let dtype = buffer.dtype();
    let sent = |peer: usize| {
        let range = call.sent(tensor, rank, peer);
        (buffer.source_bytes(range.clone()).start as Address, range.len())
    };
    let received = |peer: usize| {
        let range = call.received(tensor, rank, peer);
        (buffer.destination_bytes(range.clone()).start as Address, range.len())
    };
    let step = |operation: NcclOperation, from: Address, to: Address, count: usize| {
        NcclStep::Operation(operation, NcclBuffers { from, to, count, dtype })
    };
    let is_even = || (0..ranks).all(|peer| sent(peer).1 == sent(rank).1 && received(peer).1 == received(rank).1);
    // What has no output here needs no place for it.
    let (has_input, has_output) = (op.has_input(rank), op.has_output(rank));
    let whole = |operation: NcclOperation, count: usize| {
        let (from, to) = (buffer.source_bytes(0..0).start as Address, buffer.destination_bytes(0..0).start as Address);
        let step = step(operation, from, if has_output { to } else { from }, count);
        if count > 0 { vec![step] } else { Vec::new() }
    };
    match (op.pattern(), op.collective.reduces, op.collective.root) {
        (Pattern::Line, ..) => line_operation(op, operator).map_or(Vec::new(), |line| whole(line, buffer.len())),
        (Pattern::Gather, false, Root::None) if is_even() => whole(NcclOperation::AllGather, sent(rank).1),
        (_, true, _) if is_even() => whole(NcclOperation::ReduceScatter(operator), received(rank).1),
        (_, true, _) => {
            let reduce = |peer: usize| {
                let (from, count) = sent(peer);
                let to = if peer == rank { received(rank).0 } else { from };
                (count > 0).then(|| step(NcclOperation::Reduce(operator, peer), from, to, count))
            };
            (0..ranks).filter_map(reduce).collect()
        }
        (_, false, _) => {
            // Every rank starts with another peer.
            let peers = (1..ranks).map(|distance| (rank + distance) % ranks);
            let exchange = |peer: usize| {
                let ((from, sent), (to, received)) = (sent(peer), received(peer));
                let send = step(NcclOperation::Send(peer), from, from, sent);
                let receive = step(NcclOperation::Receive(peer), to, to, received);
                let sends = has_input && op.has_output(peer) && sent > 0;
                let receives = op.has_input(peer) && has_output && received > 0;
                [sends.then_some(send), receives.then_some(receive)]
            };
            let ((from, count), (to, _)) = (sent(rank), received(rank));
            let own = NcclStep::Copy(NcclBuffers { from, to, count, dtype });
            let copies = has_input && has_output && count > 0 && from != to;
            peers.flat_map(exchange).flatten().chain(copies.then_some(own)).collect()
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::NcclOperation::{AllGather, AllReduce, Broadcast, Receive, Reduce, ReduceScatter, Send};
    use super::*;
    use crate::buffer::{Buffer, Tensor};
    use crate::collective::{Bounds, CallConfig, Counts};
    use crate::group_key::GroupKey;
    use crate::topology::Topology;

    /// The steps of rank 1 of 3 for 5 elements of 4 bytes from 1000 to 2000: operation, source, destination, elements.
    fn of(op: Op, len: usize, counts: Counts) -> Vec<(Option<NcclOperation>, Address, Address, usize)> {
        let config = CallConfig::new(&Topology::new(1, &[0, 0, 0]), GroupKey::team(0), 1, 1 << 16);
        let (from, to) = (std::ptr::without_provenance(1000), std::ptr::without_provenance_mut(2000));
        let tensor = Tensor::new(Buffer::new(from, to, len, DType::F32), &[]);
        let call = Call::new(op, vec![vec![tensor]], counts, "", "", String::new(), config).unwrap();
        let plain = |step: NcclStep| match step {
            NcclStep::Operation(operation, at) => (Some(operation), at.from, at.to, at.count),
            NcclStep::Copy(at) => (None, at.from, at.to, at.count),
        };
        steps(&call, 0, RedOp::SUM, 1, 3).into_iter().map(plain).collect()
    }

    fn ragged(lengths: [usize; 3]) -> Bounds {
        Bounds::new(&lengths).unwrap()
    }

    #[test]
    fn equal_blocks_without_a_root_are_operations_of_nccl() {
        let even = |op: Op| of(op, 5, Counts::Even);
        assert_eq!(even(Op::allreduce(ReduceOp::Sum)), [(Some(AllReduce(RedOp::SUM)), 1000, 2000, 5)]);
        assert_eq!(even(Op::broadcast(2)), [(Some(Broadcast(2)), 1000, 2000, 5)]);
        assert_eq!(even(Op::reduce(ReduceOp::Sum, 1)), [(Some(Reduce(RedOp::SUM, 1)), 1000, 2000, 5)]);
        assert_eq!(even(Op::reduce(ReduceOp::Sum, 2)), [(Some(Reduce(RedOp::SUM, 2)), 1000, 1000, 5)]);
        assert_eq!(even(Op::ALLGATHER), [(Some(AllGather), 1000, 2000, 5)]);
        assert_eq!(even(Op::reduce_scatter(ReduceOp::Sum)), [(Some(ReduceScatter(RedOp::SUM)), 1000, 2000, 5)]);
        let equal = Counts::Ranks(vec![ragged([5, 5, 5])]);
        assert_eq!(of(Op::ALLGATHER, 5, equal), even(Op::ALLGATHER));
    }

    #[test]
    fn roots_and_pairs_are_sends_and_receives() {
        let even = |op: Op| of(op, 5, Counts::Even);
        assert_eq!(even(Op::gather(0)), [(Some(Send(0)), 1000, 1000, 5)]);
        assert_eq!(
            even(Op::gather(1)),
            [(Some(Receive(2)), 2040, 2040, 5), (Some(Receive(0)), 2000, 2000, 5), (None, 1000, 2020, 5)]
        );
        assert_eq!(even(Op::scatter(2)), [(Some(Receive(2)), 2000, 2000, 5)]);
        assert_eq!(
            even(Op::scatter(1)),
            [(Some(Send(2)), 1040, 1040, 5), (Some(Send(0)), 1000, 1000, 5), (None, 1020, 2000, 5)]
        );
        assert_eq!(
            even(Op::ALLTOALL),
            [
                (Some(Send(2)), 1040, 1040, 5),
                (Some(Receive(2)), 2040, 2040, 5),
                (Some(Send(0)), 1000, 1000, 5),
                (Some(Receive(0)), 2000, 2000, 5),
                (None, 1020, 2020, 5)
            ]
        );
    }

    #[test]
    fn blocks_of_different_lengths_leave_out_the_empty_ones() {
        let counts = || Counts::Ranks(vec![ragged([3, 1, 0])]);
        assert_eq!(
            of(Op::ALLGATHER, 1, counts()),
            [
                (Some(Send(2)), 1000, 1000, 1),
                (Some(Send(0)), 1000, 1000, 1),
                (Some(Receive(0)), 2000, 2000, 3),
                (None, 1000, 2012, 1)
            ]
        );
        assert_eq!(of(Op::gather(2), 1, counts()), [(Some(Send(2)), 1000, 1000, 1)]);
        assert_eq!(
            of(Op::reduce_scatter(ReduceOp::Sum), 1, counts()),
            [(Some(Reduce(RedOp::SUM, 0)), 1000, 1000, 3), (Some(Reduce(RedOp::SUM, 1)), 1012, 2000, 1)]
        );
        let pairs = Counts::Pairs { send: vec![ragged([2, 0, 1])], receive: vec![ragged([0, 0, 4])] };
        assert_eq!(
            of(Op::ALLTOALL, 0, pairs),
            [(Some(Send(2)), 1008, 1008, 1), (Some(Receive(2)), 2000, 2000, 4), (Some(Send(0)), 1000, 1000, 2)]
        );
    }

    #[test]
    fn operators_with_another_meaning_in_nccl_are_left_out() {
        let of =
            |op, dtype, acc_f64| NcclOperator::of(Reduction { op, dtype, acc_f64, wire_is_acc: false, divisor: 3 });
        let known = |op| Some(NcclOperator::Known(op));
        assert_eq!(of(ReduceOp::Sum, DType::I64, true), known(RedOp::SUM));
        assert_eq!(of(ReduceOp::Sum, DType::F32, true), None);
        assert_eq!(of(ReduceOp::Product, DType::BF16, false), known(RedOp::PRODUCT));
        assert_eq!(of(ReduceOp::Max, DType::F32, true), known(RedOp::MAX));
        assert_eq!(of(ReduceOp::Min, DType::U32, false), known(RedOp::MIN));
        assert_eq!(of(ReduceOp::Mean, DType::F64, true), known(RedOp::AVERAGE));
        assert_eq!(of(ReduceOp::Mean, DType::I32, false), None);
        assert_eq!(of(ReduceOp::BitOr, DType::U8, false), None);
        for dtype in [DType::Bool, DType::I16, DType::U16, DType::Complex64, DType::Complex128] {
            assert_eq!(of(ReduceOp::Sum, dtype, false), None);
        }
        let scaled = |pre, post, dtype| of(ReduceOp::ScaledSum { pre, post }, dtype, false);
        assert_eq!(scaled(0.5, 1.0, DType::F32), Some(NcclOperator::Scaled(0.5f32.to_le_bytes().into())));
        assert_eq!(scaled(0.1, 1.0, DType::F64), Some(NcclOperator::Scaled(0.1f64.to_le_bytes().into())));
        assert_eq!(scaled(0.5, 1.0, DType::F16), Some(NcclOperator::Scaled(vec![0x00, 0x38])));
        assert_eq!(scaled(0.5, 1.0, DType::BF16), Some(NcclOperator::Scaled(vec![0x00, 0x3f])));
        assert_eq!(scaled(0.1, 1.0, DType::F16), None, "it would be rounded twice");
        assert_eq!(scaled(0.1, 1.0, DType::BF16), None);
        assert_eq!(scaled(1.0, 0.5, DType::F32), None);
    }
}
