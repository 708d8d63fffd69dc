//! A collective call as each rank describes it: operation, tensors, wire layout, signature.

mod reuse;

use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::blocks::Counts;
use super::call_config::CallConfig;
use super::check::{check, extents};
use super::operation::{Op, Pattern, Root};
use super::selection::{MAX_CONCURRENT_TENSORS, PathLimits, chunk_bytes, device_chunk_bytes};
use super::tensor_names::TensorNames;
use crate::buffer::{Buffer, Tensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::group_key::GroupKey;
use crate::reduce::Reduction;
use crate::transport::gpu::CallerStream;
use crate::wire_layout::{ALIGN, DtypeRun, WireLayout};

/// A validated call with its buffers.
#[derive(Clone)]
pub struct Call {
    /// The operation.
    pub op: Op,
    /// The position of the tensors on the wire.
    pub layout: WireLayout,
    /// Equal on all ranks if the calls match. Different calls have different signatures, except for hash collisions.
    pub signature: u64,
    /// Hash of the name and the list of tensors, without `instance`.
    pub list_hash: u64,
    replicas: Vec<Vec<Tensor>>,
    counts: Counts,
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

/// The name of an absent call.
const ABSENT: &str = "\0absent";

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
        let mut lengths = lengths(replicas.first().map_or(&[], Vec::as_slice));
        lengths.iter_mut().for_each(|(_, len)| *len = counts.longest(*len));
        let acc_f64 = config.acc_f64;
        let wire_size = |dtype| Reduction { op: op.reduce, dtype, acc_f64, wire_is_acc, divisor: 1 }.wire_size();
        let bytes = |&(dtype, len): &(DType, usize)| len.checked_mul(wire_size(dtype));
        let total = lengths.iter().try_fold(0usize, |total, tensor| total.checked_add(bytes(tensor)?));
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
        let layout = WireLayout::new(&lengths, wire_size, chunk);
        let name = name.to_owned();
        let mut call = Call {
            op,
            layout,
            signature: 0,
            list_hash: 0,
            replicas,
            counts,
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

    /// The contribution of a rank that has no call for a round: no data, and a signature that no call has.
    ///
    /// # Errors
    /// Those of [`Call::new`], which do not occur.
    pub fn absent(config: CallConfig) -> Result<Call> {
        Call::new(Op::BARRIER, Vec::new(), Counts::Even, ABSENT, "", String::new(), config)
    }

    /// As [`Call::absent`], of a rank that has only calls that lack their counterparts: no other rank's call matches it.
    ///
    /// # Errors
    /// As there.
    pub fn waiting(config: CallConfig) -> Result<Call> {
        let rank = config.rank as u64;
        let call = Call::absent(config)?;
        Ok(Call { signature: xxh3_64_with_seed(&rank.to_le_bytes(), call.signature), ..call })
    }

    /// Makes it match by its name, wherever the ranks make it.
    ///
    /// # Errors
    /// [`Error::Invalid`] without a name.
    pub fn into_by_name(self) -> Result<Call> {
        if self.name.is_empty() {
            return Err(Error::Invalid("a call that matches by name needs a name".into()));
        }
        let [signature, list_hash] = [self.signature, self.list_hash].map(|hash| xxh3_64_with_seed(b"by name", hash));
        Ok(Call { by_name: true, signature, list_hash, ..self })
    }

    /// Makes it the call of a rank that joins, which no other call matches.
    pub fn into_join(self) -> Call {
        Call { signature: xxh3_64_with_seed(b"join", self.signature), ..self }
    }

    /// The key of its group.
    pub fn group(&self) -> &GroupKey {
        &self.config.key
    }

    /// Assigns a schedule position, on which the ranks must agree: the weight of the mean that carries over to the next
    /// call, and a text for messages.
    pub fn schedule(&mut self, carry_weight: f64, position: String) {
        if carry_weight > 0.0 {
            self.signature = xxh3_64_with_seed(&carry_weight.to_le_bytes(), self.signature);
        }
        self.schedule_position = position;
    }

    /// Makes it a call on device memory of stream `producer`, in chunks of at most `chunk` bytes, a multiple of [`ALIGN`],
    /// if it may go through the host in chunks. Smaller calls get smaller chunks, so that copies and reductions overlap on
    /// every channel.
    ///
    /// # Errors
    /// [`Error::Invalid`] for several towers: a process with a GPU has one.
    pub fn on_device(self, producer: Arc<CallerStream>, chunk: usize) -> Result<Call> {
        if self.replicas.len() > 1 {
            return Err(Error::Invalid(format!(
                "there are {} towers of GPU tensors; run a process for each GPU, or average the towers first",
                self.replicas.len()
            )));
        }
        let signature = xxh3_64_with_seed(b"device", self.signature);
        if !self.op.runs_in_device_chunks() {
            return Ok(Call { signature, producer: Some(producer), ..self });
        }
        let chunk = device_chunk_bytes(self.layout.total(), self.config.channels, chunk);
        // A thread of such a call often waits for the GPU.
        let channels = self.config.channels;
        Ok(Call { layout: self.layout.with_chunk_size(chunk), channels, signature, producer: Some(producer), ..self })
    }

    /// This call, on device memory, after all that its caller has enqueued until now.
    ///
    /// # Errors
    /// [`Error::System`] of the driver.
    pub fn again_on_stream(&self) -> Result<Call> {
        let producer = self.producer.as_ref().map(|producer| producer.again().map(Arc::new)).transpose()?;
        Ok(Call { producer, ..self.clone() })
    }

    /// The caller's stream of a call on device memory.
    pub fn producer(&self) -> Option<&Arc<CallerStream>> {
        self.producer.as_ref()
    }

    /// A call on device memory as one on copies of its tensors in host memory.
    ///
    /// # Errors
    /// Those of [`Call::new`], which do not occur for memory that is long enough.
    pub fn on_host(&self, tensors: Vec<Tensor>) -> Result<Call> {
        let (counts, names, config) = (self.counts.clone(), self.names.text().to_owned(), self.config.clone());
        let replicas = if tensors.is_empty() { Vec::new() } else { vec![tensors] };
        let call = Call::new(self.op, replicas, counts, &self.name, "", names, config)?;
        let schedule_position = self.schedule_position.clone();
        let (signature, by_name) = (self.host_signature(), self.by_name);
        Ok(Call { signature, by_name, schedule_position, pinned: true, ..call })
    }

    /// The signature of the call if it runs in host memory.
    pub(super) fn host_signature(&self) -> u64 {
        let on_host = || xxh3_64_with_seed(b"host", self.signature);
        self.producer.as_ref().map_or(self.signature, |_| on_host())
    }

    /// The call without tensors: ranks compare it before they move data of device memory.
    pub fn without_data(&self) -> Call {
        Call {
            op: Op::BARRIER,
            layout: self.layout.empty(),
            signature: self.signature,
            list_hash: self.list_hash,
            replicas: Vec::new(),
            counts: Counts::Even,
            channels: self.channels,
            limits: self.config.limits.of(Op::BARRIER),
            config: self.config.clone(),
            name: self.name.clone(),
            by_name: self.by_name,
            names: TensorNames::default(),
            schedule_position: self.schedule_position.clone(),
            producer: None,
            pinned: false,
        }
    }

    /// Chunk `chunk` of a call on device memory, as a call on host memory at `memory`.
    pub fn chunk_call(&self, chunk: usize, memory: *mut u8) -> Call {
        let run = |run: DtypeRun| {
            let count = run.bytes.len() / run.dtype.size();
            Tensor::new(Buffer::in_place(memory.wrapping_add(run.bytes.start), count, run.dtype), &[])
        };
        let len = self.layout.chunk_len(chunk);
        let tensors: Vec<Tensor> = self.layout.runs(chunk, 0..len).map(run).collect();
        let lengths = lengths(&tensors);
        let signature = xxh3_64_with_seed(&(chunk as u64).to_le_bytes(), self.signature);
        Call {
            op: self.op,
            layout: WireLayout::new(&lengths, DType::size, self.config.slot),
            signature,
            list_hash: signature,
            replicas: vec![tensors],
            counts: Counts::Even,
            channels: 1,
            limits: self.limits,
            config: self.config.clone(),
            name: self.name.clone(),
            by_name: self.by_name,
            names: TensorNames::default(),
            schedule_position: String::new(),
            producer: None,
            pinned: true,
        }
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
        self.counts.sent(self.op.pattern(), rank, peer, self.replicas[0][tensor].buffer.len())
    }

    /// The elements of `tensor` in the block that `rank` receives from `peer`, as in [`Call::sent`].
    pub fn received(&self, tensor: usize, rank: usize, peer: usize) -> Range<usize> {
        self.counts.received(self.op.pattern(), rank, peer, self.replicas[0][tensor].buffer.len())
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

    /// Whether between hosts it can begin while calls before it are under way, and they while it is: it has one chunk on
    /// all ranks. Lists of many tensors cannot: [`Call::conflicts_with`] would take long.
    pub fn can_be_concurrent(&self) -> bool {
        let tensors: usize = self.replicas.iter().map(Vec::len).sum();
        self.layout.chunks() == 1
            && tensors <= MAX_CONCURRENT_TENSORS
            && !self.agrees_on_length()
            && self.producer().is_none()
    }

    /// Whether one of the two calls writes memory that the other one uses, so that they cannot be under way at once.
    pub fn conflicts_with(&self, other: &Call) -> bool {
        let conflict = |(a, a_written): (Range<usize>, bool), (b, b_written): (Range<usize>, bool)| {
            (a_written || b_written) && a.start < b.end && b.start < a.end
        };
        self.memory().any(|own| other.memory().any(|others| conflict(own.clone(), others)))
    }

    /// The addresses that this rank uses, and whether it writes them.
    pub(crate) fn memory(&self) -> impl Iterator<Item = (Range<usize>, bool)> {
        let ranges = self.replicas.iter().flatten().flat_map(|tensor| {
            let (read, written) = extents(self.op, &tensor.buffer, &self.counts, &self.config);
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
        extents(self.op, &self.replicas[0][tensor].buffer, &self.counts, &self.config)
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

    fn hash_call(&self) -> u64 {
        // For a few numbers this is faster than a hasher with its state.
        let mut hash = 0;
        let mut number = |value: i64| hash = xxh3_64_with_seed(&value.to_le_bytes(), hash);
        number(self.config.key.hash().cast_signed());
        number(self.op.collective.code.into());
        if self.op.collective.reduces {
            number(self.op.reduce.code().into());
            if let Some((pre, post)) = self.op.reduce.factors() {
                number(pre.to_bits().cast_signed());
                number(post.to_bits().cast_signed());
            }
        }
        if self.op.collective.root != Root::None {
            number(self.op.root as i64);
        }
        number(if self.op.is_allreduce() { self.replicas.len() as i64 } else { 1 });
        for tensor in self.tensors(0) {
            number(tensor.buffer.dtype() as i64);
            // Blocks of different lengths differ in their first axis.
            let is_even = self.counts == Counts::Even;
            let shape = if is_even { tensor.shape() } else { tensor.shape().get(1..).unwrap_or_default() };
            number(shape.len() as i64);
            shape.iter().for_each(|&extent| number(extent));
        }
        match &self.counts {
            Counts::Even => {}
            Counts::Ranks(bounds) => bounds.ends().iter().for_each(|&end| number(end as i64)),
            Counts::Pairs { .. } => number(-1),
        }
        let hash = xxh3_64_with_seed(self.name.as_bytes(), hash);
        self.names.compared().map_or(hash, |names| xxh3_64_with_seed(names.as_bytes(), hash))
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
