//! Validation of a call's arguments. Pure: does not read the tensors.

use smallvec::SmallVec;

use super::call_config::CallConfig;
use super::counts::{Bounds, Counts, TensorCounts};
use super::operation::{Op, Pattern, Root};
use super::tensor_names::TensorNames;
use crate::buffer::{Buffer, Tensor};
use crate::error::{Error, Result};

/// Position and name of a tensor.
pub(super) fn tensor_title(index: usize, label: &str) -> String {
    if label.is_empty() { format!("tensor {index}") } else { format!("tensor {index} '{label}'") }
}

/// Checks a call; the errors name the tensor.
pub(super) fn check(
    op: Op,
    replicas: &[Vec<Tensor>],
    counts: &Counts,
    names: &TensorNames,
    config: &CallConfig,
) -> Result<()> {
    if op.is_barrier() {
        return match replicas.iter().all(Vec::is_empty) && *counts == Counts::Even {
            true => Ok(()),
            false => Err(Error::Invalid("a barrier takes no tensors and no counts".into())),
        };
    }
    let ranks = config.ranks;
    if op.collective.root != Root::None && op.root >= ranks {
        return Err(Error::Invalid(format!("root {} is not a rank; ranks go from 0 to {}", op.root, ranks - 1)));
    }
    let what = op.title();
    let Some(first) = replicas.first().filter(|tower| !tower.is_empty()) else {
        return Err(Error::Invalid(format!("the list of tensors is empty; {what} needs at least one")));
    };
    if replicas.len() > 1 && !op.is_allreduce() && !op.is_broadcast() {
        return Err(Error::Invalid(format!("{what} takes one list of tensors, not {} towers", replicas.len())));
    }
    check_counts(op, counts, first.len(), ranks)?;
    for (tower, tensors) in replicas.iter().enumerate() {
        if tensors.len() != first.len() {
            return Err(Error::Invalid(format!(
                "tower {tower} has {} tensors and tower 0 has {}; all towers need the same list",
                tensors.len(),
                first.len()
            )));
        }
        for (index, (tensor, expected)) in tensors.iter().zip(first).enumerate() {
            let title = || tensor_title(index, names.lines().nth(index).unwrap_or(""));
            check_memory(op, &tensor.buffer, counts.of(index), config)
                .map_err(|error| Error::Invalid(format!("{}: {error}", title())))?;
            if op.collective.reduces {
                let known = op.reduce.check(tensor.buffer.dtype());
                known.map_err(|error| Error::DType(format!("{}: {error}", title())))?;
            }
            if tensor.shape() != expected.shape() || tensor.buffer.dtype() != expected.buffer.dtype() {
                return Err(Error::Invalid(format!(
                    "{} is {} in tower {tower} and {} in tower 0; all towers need the same list",
                    title(),
                    tensor.describe(),
                    expected.describe()
                )));
            }
        }
    }
    // A broadcast writes equal values.
    check_overlap(op, replicas, counts, config)
}

/// Rejects counts that do not fit the collective.
fn check_counts(op: Op, counts: &Counts, tensors: usize, ranks: usize) -> Result<()> {
    match (counts, op.pattern()) {
        (Counts::Even, _) => return Ok(()),
        (Counts::Ranks(_), Pattern::Gather | Pattern::Scatter) | (Counts::Pairs { .. }, Pattern::Exchange) => {}
        _ => return Err(Error::Invalid(format!("{} has no such counts of elements", op.title()))),
    }
    let lists = counts.lists();
    if let Some(list) = lists.iter().find(|list| list.len() != tensors) {
        return Err(Error::Invalid(format!("there are counts of {} tensors; the list has {tensors}", list.len())));
    }
    match lists.into_iter().flatten().find(|bounds: &&Bounds| bounds.blocks() != ranks) {
        None => Ok(()),
        Some(bounds) => Err(Error::Invalid(format!("there are {} counts for {ranks} ranks", bounds.blocks()))),
    }
}

/// The numbers of elements of the source and the destination.
pub(super) fn extents(op: Op, buffer: &Buffer, counts: TensorCounts<'_>, config: &CallConfig) -> (usize, usize) {
    let (pattern, me, last) = (op.pattern(), config.rank, config.ranks - 1);
    let sent = counts.sent(pattern, me, last, buffer.len()).end;
    let received = counts.received(pattern, me, last, buffer.len()).end;
    (if op.has_input(me) { sent } else { 0 }, if op.has_output(me) { received } else { 0 })
}

/// Checks the addresses of a tensor for what this rank reads and writes.
#[inline]
pub(super) fn check_memory(op: Op, buffer: &Buffer, counts: TensorCounts<'_>, config: &CallConfig) -> Result<()> {
    if op.pattern() == Pattern::Line && op.has_output(config.rank) {
        return buffer.check();
    }
    buffer.check_length(buffer.len().saturating_mul(config.ranks))?;
    let (read, written) = extents(op, buffer, counts, config);
    buffer.check_source_of(read)?;
    buffer.check_destination_of(written)
}

/// A quick check for small calls: if true, a tensor that is alone in a call with even blocks passes [`check_memory`] and
/// [`check_overlap`]. If false, ask these. The length must have been checked before.
#[inline]
pub(super) fn is_plain(op: Op, buffer: &Buffer, config: &CallConfig) -> bool {
    let is_line = op.pattern() == Pattern::Line;
    let (read, written) = match is_line && op.has_output(config.rank) {
        true => (buffer.len(), buffer.len()),
        false => extents(op, buffer, TensorCounts::Even, config),
    };
    let (size, align) = (buffer.dtype().size(), buffer.dtype().align());
    let (src, dst) = (buffer.source_at(0).addr(), buffer.dst().addr());
    let (src_end, dst_end) = (src.wrapping_add(read * size), dst.wrapping_add(written * size));
    let is_valid = |start: usize, end: usize, count: usize| {
        start.is_multiple_of(align) && (count == 0 || start > 0 && start < end)
    };
    let is_disjoint = src_end <= dst || dst_end <= src;
    is_valid(src, src_end, read)
        && is_valid(dst, dst_end, written)
        && (is_disjoint || is_line && src == dst && read == written)
}

/// Rejects a call that would read memory that it has written: several threads run its chunks in no fixed order. The
/// block of this rank may be the same memory in the input and in the output. In a broadcast, tensors in place may share
/// memory: parameters of a model do, and all writes are of the same bytes.
pub(super) fn check_overlap(op: Op, replicas: &[Vec<Tensor>], counts: &Counts, config: &CallConfig) -> Result<()> {
    let (pattern, me) = (op.pattern(), config.rank);
    let mut spans = SmallVec::<[_; 8]>::new();
    for (index, tensor) in replicas.iter().flat_map(|tower| tower.iter().enumerate()) {
        let (buffer, counts) = (&tensor.buffer, counts.of(index));
        let (read, written) = extents(op, buffer, counts, config);
        let (read, written) = (buffer.source_bytes(0..read), buffer.destination_bytes(0..written));
        let own_read = buffer.source_bytes(counts.sent(pattern, me, me, buffer.len()));
        let own_written = buffer.destination_bytes(counts.received(pattern, me, me, buffer.len()));
        let in_place = own_read == own_written && !read.is_empty() && !written.is_empty();
        match pattern {
            // The output contains the input, or the input the output.
            Pattern::Line if op.is_broadcast() && buffer.is_in_place() => {
                spans.push((read.start.min(written.start), read.end.max(written.end), false, index));
            }
            Pattern::Line | Pattern::Gather if in_place => spans.push((written.start, written.end, true, index)),
            Pattern::Scatter if in_place => spans.push((read.start, read.end, true, index)),
            _ => {
                spans.push((read.start, read.end, false, index));
                spans.push((written.start, written.end, true, index));
            }
        }
    }
    spans.retain(|&mut (start, end, ..)| start < end);
    spans.sort_unstable();
    // The largest ends so far of read and of written ranges.
    let mut max_ends = [(0, 0); 2];
    for (start, end, written, index) in spans {
        for (other_written, (other_end, other)) in [false, true].into_iter().zip(max_ends) {
            if start < other_end && (written || other_written) {
                return Err(Error::Invalid(format!(
                    "tensors {other} and {index} share memory; pass it once, or the results to separate memory"
                )));
            }
        }
        let slot = &mut max_ends[usize::from(written)];
        *slot = (*slot).max((end, index));
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::group_key::GroupKey;
    use crate::reduce::ReduceOp;
    use crate::topology::Topology;
    use proptest::prelude::*;

    /// Parameters that share memory are broadcast in place. An output is no input of another tensor.
    #[test]
    fn tensors_of_a_broadcast_share_memory_in_place_only() {
        let of_rank = |rank: usize, tensors: &[(usize, usize)]| {
            let config = CallConfig::new(&Topology::new(rank, &[0, 0]), GroupKey::team(0), 1, 4096);
            let tensor = |&(src, dst): &(usize, usize)| {
                let (src, dst) = (std::ptr::without_provenance(src), std::ptr::without_provenance_mut(dst));
                Tensor::new(Buffer::new(src, dst, 16, DType::F32), &[])
            };
            check_overlap(Op::broadcast(0), &[tensors.iter().map(tensor).collect()], &Counts::Even, &config).is_ok()
        };
        for rank in 0..2 {
            assert!(of_rank(rank, &[(64, 64), (64, 64), (80, 80)]));
            assert!(of_rank(rank, &[(64, 256), (128, 512)]));
            assert!(!of_rank(rank, &[(1024, 64), (2048, 64)]), "two results in one place");
            assert!(!of_rank(rank, &[(64, 64), (1024, 80)]), "a result over another tensor");
        }
        assert!(!of_rank(0, &[(64, 256), (256, 512)]), "the root sends what it has written");
        assert!(of_rank(1, &[(64, 256), (256, 512)]), "others read nothing");
    }

    #[test]
    fn a_barrier_takes_nothing() {
        let config = CallConfig::new(&Topology::new(0, &[0]), GroupKey::team(0), 1, 4096);
        let passes = |replicas: &[Vec<Tensor>], counts: &Counts| {
            check(Op::BARRIER, replicas, counts, &TensorNames::from(String::new()), &config).is_ok()
        };
        let tensor =
            Tensor::new(Buffer::in_place(std::ptr::without_provenance_mut(64), usize::MAX / 2, DType::F64), &[]);
        assert!(passes(&[], &Counts::Even));
        assert!(passes(&[Vec::new()], &Counts::Even), "that of a call whose lengths are not known");
        assert!(!passes(&[vec![tensor]], &Counts::Even));
        assert!(!passes(&[], &Counts::Ranks(Vec::new())));
    }

    proptest! {
        #[test]
        fn plain_tensors_pass_the_checks(
            code in 1..=9,
            (ranks, rank) in (1usize..4).prop_flat_map(|ranks| (Just(ranks), 0..ranks)),
            src in 0usize..200,
            dst in prop_oneof![0usize..200, Just(usize::MAX - 15)],
            len in 0usize..6,
            dtype in prop::sample::select(DType::ALL.to_vec()),
            same in any::<bool>(),
        ) {
            let op = Op::from_code(code, ReduceOp::Sum, ranks - 1).unwrap();
            let config = CallConfig::new(&Topology::new(rank, &vec![0; ranks]), GroupKey::team(0), 1, 4096);
            let (src, dst) = (src / 4 * 4, if same { src / 4 * 4 } else { dst });
            let buffer = Buffer::new(std::ptr::without_provenance(src), std::ptr::without_provenance_mut(dst), len, dtype);
            let replicas = [vec![Tensor::new(buffer, &[])]];
            // `check_overlap` adds up addresses that `check_memory` has found valid.
            let passes = check_memory(op, &buffer, TensorCounts::Even, &config).is_ok()
                && check_overlap(op, &replicas, &Counts::Even, &config).is_ok();
            prop_assert!(passes || !is_plain(op, &buffer, &config));
            // Separate memory, or one tensor in place, takes the quick way.
            let apart = src.abs_diff(dst) >= 3 * len * dtype.size() || code == 1 && src == dst;
            prop_assert!(!passes || !apart || is_plain(op, &buffer, &config));
        }
    }
}
