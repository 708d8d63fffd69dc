//! A collective call as each rank describes it: operation, tensors, wire layout, and what follows from these.

mod fusion;
mod on_device;
mod reuse;
mod signature;

use std::ops::Range;
use std::sync::Arc;

use super::call_config::CallConfig;
use super::check::{check, extents};
use super::counts::Counts;
use super::operation::{Op, Pattern};
use super::selection::{PathLimits, chunk_bytes};
use super::tensor_names::TensorNames;
use crate::buffer::{Buffer, Tensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group_key::GroupKey;
use crate::reduce::Reduction;
use crate::transport::gpu::CallerStream;
use crate::wire_layout::{ALIGN, WireLayout};

/// A validated call with its buffers.
#[derive(Clone)]
pub struct Call {
    /// The operation.
    pub op: Op,
    /// The position of the tensors on the wire; of the longest block that this rank knows, if they differ.
    pub layout: WireLayout,
    /// Equal on all ranks if the calls match. Different calls have different signatures, except for hash collisions.
    pub signature: u64,
    /// Hash of the name and the list of tensors, without `instance`.
    pub list_hash: u64,
    replicas: Vec<Vec<Tensor>>,
    counts: Counts,
    /// Those of the blocks by rank, for each of `Counts::lists`.
    block_layouts: Vec<Vec<WireLayout>>,
    /// The same on all ranks.
    channels: usize,
    limits: PathLimits,
    config: CallConfig,
    name: String,
    by_name: bool,
    names: TensorNames,
    schedule_position: String,
    producer: Option<Arc<CallerStream>>,
    /// Whether its memory is pinned for a GPU: the system may refuse copies to other processes.
    pinned: bool,
}

impl Call {
    /// Checks and lays out a call on `replicas`, equal lists of tensors; a barrier has none. The length and the shape of
    /// a tensor are those of a block; if `counts` has the lengths, the ranks compare all but the first extent of the
    /// shape. `names` are those of the tensors, as text.
    /// `instance` distinguishes calls of one `name` that are in flight together.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::DType`]; they name the tensor.
    pub fn new(
        op: Op,
        replicas: Vec<Vec<Tensor>>,
        counts: Counts,
        name: &str,
        instance: &str,
        names: String,
        config: CallConfig,
    ) -> Result<Call> {
        let names = TensorNames::from(names);
        check(op, &replicas, &counts, &names, &config)?;
        let wire_is_acc = op.is_allreduce() && replicas.len() > 1;
        let even = lengths(replicas.first().map_or(&[], Vec::as_slice));
        let block_lengths = counts.block_lengths(&even);
        let acc_f64 = config.acc_f64;
        let wire_size = |dtype| Reduction { op: op.reduce, dtype, acc_f64, wire_is_acc, divisor: 1 }.wire_size();
        let bytes = |&(dtype, len): &(DType, usize)| len.checked_mul(wire_size(dtype));
        let block_bytes = |block: &Vec<(DType, usize)>| {
            block.iter().try_fold(0usize, |total, tensor| total.checked_add(bytes(tensor)?))
        };
        let mut blocks_of_all = block_lengths.iter().flatten().chain(block_lengths.is_empty().then_some(&even));
        let total = blocks_of_all.try_fold(0usize, |longest, block| Some(longest.max(block_bytes(block)?)));
        let blocks = if op.pattern() == Pattern::Line { 1 } else { config.ranks };
        // Half of the address space leaves room for rounding up.
        let volume = total
            .and_then(|total| total.checked_mul(blocks))
            .filter(|&volume| volume <= isize::MAX as usize / 2)
            .ok_or_else(|| Error::Invalid("the tensors together are longer than memory can be".into()))?;
        let total = volume / blocks;
        let max_chunk = config.compartments.size(op.pattern(), config.slot);
        if max_chunk == 0 {
            return Err(Error::Invalid(format!(
                "{} over {} ranks needs slots of at least {} KiB; set DL_COMM_CHUNK_KB",
                op.title(),
                config.ranks,
                (2 * config.ranks * ALIGN).div_ceil(1024)
            )));
        }
        // The ranks do not know each other's pairs.
        let knows_length = !matches!(counts, Counts::Pairs { .. });
        let channels = config.max_channels;
        let limits = config.limits.of(op);
        let chunk = chunk_bytes(op, knows_length.then_some(total), limits, channels, max_chunk);
        let layout = |block: &Vec<(DType, usize)>| WireLayout::new(block, wire_size, chunk);
        let block_layouts: Vec<Vec<_>> = block_lengths.iter().map(|list| list.iter().map(layout).collect()).collect();
        let longest = block_layouts.iter().flatten().max_by_key(|layout| layout.total());
        let layout = longest.cloned().unwrap_or_else(|| layout(&even));
        let name = name.to_owned();
        let mut call = Call {
            op,
            layout,
            signature: 0,
            list_hash: 0,
            replicas,
            counts,
            block_layouts,
            channels,
            limits,
            config,
            name,
            by_name: false,
            names,
            schedule_position: String::new(),
            producer: None,
            pinned: false,
        };
        call.list_hash = call.hash_call();
        call.name += instance;
        call.signature = if instance.is_empty() { call.list_hash } else { call.hash_call() };
        Ok(call)
    }

    /// The key of its group.
    pub fn group(&self) -> &GroupKey {
        &self.config.key
    }

    /// The caller's stream of a call on device memory.
    pub fn producer(&self) -> Option<&Arc<CallerStream>> {
        self.producer.as_ref()
    }

    /// Whether every tensor is both source and destination.
    pub fn is_in_place(&self) -> bool {
        self.replicas.iter().flatten().all(|tensor| tensor.buffer.is_in_place())
    }

    /// Whether floating-point sums are float64.
    pub fn accumulates_f64(&self) -> bool {
        self.config.acc_f64
    }

    /// The destinations: the tensors of all towers.
    pub fn outputs(&self) -> Vec<Buffer> {
        self.replicas.iter().flatten().map(|tensor| tensor.buffer).collect()
    }

    /// The tensors of tower `tower`; none for a barrier.
    pub fn tensors(&self, tower: usize) -> &[Tensor] {
        self.replicas.get(tower).map_or(&[], Vec::as_slice)
    }

    /// Tensor `tensor` of every tower.
    pub fn tower_buffers(&self, tensor: usize) -> impl Iterator<Item = &Buffer> {
        self.replicas.iter().map(move |tower| &tower[tensor].buffer)
    }

    /// The number of towers.
    pub fn towers(&self) -> usize {
        self.replicas.len()
    }

    /// Name, with the instance.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether other ranks take part.
    pub fn has_peers(&self) -> bool {
        self.config.ranks > 1
    }

    /// Whether it matches by its name, wherever the ranks make it.
    pub fn is_by_name(&self) -> bool {
        self.by_name
    }

    /// The names of the tensors.
    pub fn tensor_names(&self) -> &TensorNames {
        &self.names
    }

    /// The text that [`Call::schedule`] set.
    pub fn schedule_position(&self) -> &str {
        &self.schedule_position
    }

    /// The lengths of the blocks.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// The elements of `tensor` in the block that `rank` sends to `peer`. `rank` is this rank unless all ranks know the
    /// lengths.
    pub fn sent(&self, tensor: usize, rank: usize, peer: usize) -> Range<usize> {
        self.counts.of(tensor).sent(self.op.pattern(), rank, peer, self.replicas[0][tensor].buffer.len())
    }

    /// The elements of `tensor` in the block that `rank` receives from `peer`, as in [`Call::sent`].
    pub fn received(&self, tensor: usize, rank: usize, peer: usize) -> Range<usize> {
        self.counts.of(tensor).received(self.op.pattern(), rank, peer, self.replicas[0][tensor].buffer.len())
    }

    /// The layout of the block that `sender` sends to `receiver`, of which this rank is one unless all ranks know the
    /// lengths.
    pub(super) fn block_layout(&self, sender: usize, receiver: usize) -> &WireLayout {
        let (list, rank) = match (&self.counts, self.op.pattern()) {
            (Counts::Even, _) => return &self.layout,
            (Counts::Ranks(_), Pattern::Gather) => (0, sender),
            (Counts::Pairs { .. }, _) if sender != self.config.rank => (1, sender),
            (Counts::Ranks(_) | Counts::Pairs { .. }, _) => (0, receiver),
        };
        &self.block_layouts[list][rank]
    }

    /// Whether the ranks must agree on the length of the longest block before they move data.
    pub fn agrees_on_length(&self) -> bool {
        matches!(self.counts, Counts::Pairs { .. })
    }

    /// The reduction and wire format for elements of `dtype`.
    pub fn reduction(&self, dtype: DType) -> Reduction {
        Reduction {
            op: self.op.reduce,
            dtype,
            acc_f64: self.config.acc_f64,
            wire_is_acc: self.wire_is_acc(),
            divisor: self.divisor(),
        }
    }

    /// The reduction of each tensor; none if the call does not reduce.
    pub fn reductions(&self) -> impl Iterator<Item = Reduction> {
        let tensors = if self.op.collective.reduces { self.tensors(0) } else { &[] };
        tensors.iter().map(|tensor| self.reduction(tensor.buffer.dtype()))
    }

    /// Whether the wire holds accumulators: each rank sends a sum over its towers.
    pub fn wire_is_acc(&self) -> bool {
        self.replicas.len() > 1 && self.op.is_allreduce()
    }

    /// Whether it may run in one round; the same on all ranks with the same call.
    pub fn is_small(&self) -> bool {
        self.limits.one_round.is_some_and(|longest| self.layout.total() <= longest)
            && self.layout.chunks() == 1
            && !self.wire_is_acc()
            && !self.agrees_on_length()
    }

    /// Between hosts: bytes of a slice that the owner of its shard reduces alone.
    pub(super) fn owner_alone(&self) -> usize {
        self.config.limits.owner_alone
    }

    /// Whether between hosts it can begin while calls before it are under way, and they while it is.
    pub fn can_be_concurrent(&self) -> bool {
        !self.agrees_on_length() && self.producer().is_none()
    }

    /// The addresses that this rank uses, and whether it writes them.
    pub(crate) fn memory(&self) -> impl Iterator<Item = (Range<usize>, bool)> {
        let ranges = self.replicas.iter().flat_map(|tower| tower.iter().enumerate()).flat_map(|(index, tensor)| {
            let (read, written) = extents(self.op, &tensor.buffer, self.counts.of(index), &self.config);
            [(tensor.buffer.source_bytes(0..read), false), (tensor.buffer.destination_bytes(0..written), true)]
        });
        ranges.filter(|(range, _)| !range.is_empty())
    }

    /// Bytes of the line, or of all blocks, from which on the ranks measure which of two paths is faster.
    pub(super) fn measured_from(&self) -> usize {
        self.limits.measured.unwrap_or(usize::MAX)
    }

    /// The numbers of elements of a tensor's source and destination that this rank reads and writes.
    pub(in crate::collective) fn extents(&self, tensor: usize) -> (usize, usize) {
        extents(self.op, &self.replicas[0][tensor].buffer, self.counts.of(tensor), &self.config)
    }

    /// Size of a slot in bytes.
    pub fn slot(&self) -> usize {
        self.config.slot
    }

    /// Size of a compartment of a slot in bytes.
    pub fn compartment(&self) -> usize {
        self.config.compartments.size(self.op.pattern(), self.config.slot)
    }

    /// Bytes of all blocks of this rank.
    pub fn volume(&self) -> usize {
        self.layout.total() * self.blocks()
    }

    /// Whether its memory is pinned for a GPU.
    pub(super) fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// The number of blocks of the longer of input and output.
    pub(super) fn blocks(&self) -> usize {
        if self.op.pattern() == Pattern::Line { 1 } else { self.config.ranks }
    }

    /// The number of its channels.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The number of inputs on all ranks, by which a mean divides.
    pub fn divisor(&self) -> u32 {
        u32::try_from(self.config.ranks * self.replicas.len()).unwrap_or(u32::MAX)
    }
}

/// The input of [`WireLayout::new`].
pub(super) fn lengths(tensors: &[Tensor]) -> Vec<(DType, usize)> {
    tensors.iter().map(|tensor| (tensor.buffer.dtype(), tensor.buffer.len())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Topology;

    /// Each tower's tensor fits the address space, but the accumulators do not.
    #[test]
    fn sizes_beyond_the_address_space_are_rejected() {
        let config =
            CallConfig { acc_f64: true, ..CallConfig::new(&Topology::new(0, &[0, 0]), GroupKey::team(0), 1, 4096) };
        let tower = |address: usize| {
            let address = std::ptr::without_provenance_mut(address);
            vec![Tensor::new(Buffer::in_place(address, isize::MAX as usize, DType::U8), &[])]
        };
        let replicas = vec![tower(1), tower(1 + isize::MAX as usize)];
        let error = Call::new(Op::MEAN, replicas, Counts::Even, "", "", String::new(), config).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Invalid(text) if text.contains("memory")));
    }
}
