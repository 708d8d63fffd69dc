//! A collective call as each rank describes it: operation, tensors, wire layout, signature.

use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::buffer::{Buffer, Tensor, View};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::reduce::Reduction;
use crate::transport::gpu::CallerStream;
use crate::wire_layout::{ALIGN, DtypeRun, WireLayout};

/// The operation of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// The mean over all ranks and towers.
    Allreduce,
    /// Copies the values of rank `root` to all ranks.
    Broadcast {
        /// The rank with the values.
        root: usize,
    },
    /// Waits for all ranks.
    Barrier,
}

impl Op {
    /// A code of the operation, without its root.
    fn kind(self) -> i64 {
        match self {
            Op::Allreduce => 1,
            Op::Broadcast { .. } => 2,
            Op::Barrier => 3,
        }
    }
}

/// Settings of a group's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallConfig {
    /// The group's number.
    pub team: i32,
    /// The number of ranks.
    pub ranks: usize,
    /// The number of channels.
    pub channels: usize,
    /// Size of a slot in bytes.
    pub slot: usize,
    /// Largest call, in bytes, that runs in one round; 0 with several hosts.
    pub small_max: usize,
    /// Largest call, in bytes, that one thread runs alone.
    pub single_thread_max: usize,
    /// Whether floating-point sums are float64.
    pub acc_f64: bool,
}

impl CallConfig {
    /// The number of channels for a call of `total` bytes.
    fn channels_for(&self, total: usize) -> usize {
        if total <= self.single_thread_max { 1 } else { self.channels }
    }
}

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
    config: CallConfig,
    name: String,
    labels: String,
    schedule_position: String,
    producer: Option<Arc<CallerStream>>,
}

/// The name of an absent call.
const ABSENT: &str = "\0absent";

/// Minimum size of a chunk between GPU and host; smaller copies do not reach the bandwidth of the bus.
const MIN_STAGED_BYTES: usize = 256 << 10;
/// Chunks per channel of a large call on device memory, so that download, reduction and upload overlap.
const CHUNKS_PER_CHANNEL: usize = 4;
/// Minimum size of a chunk; for smaller chunks another channel costs more than it gains.
const MIN_CHUNK_BYTES: usize = 64 << 10;

impl Call {
    /// Checks and lays out a call on `replicas`, equal lists of tensors; a barrier has none. `labels` has a line with a
    /// name for each tensor. `instance` distinguishes calls of one `name` that are in flight together.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::DType`]; they name the tensor.
    pub fn new(
        op: Op,
        replicas: Vec<Vec<Tensor>>,
        name: &str,
        instance: &str,
        labels: String,
        config: CallConfig,
    ) -> Result<Call> {
        check(op, &replicas, &labels, config.ranks)?;
        let wide = op == Op::Allreduce && replicas.len() > 1;
        let lengths = lengths(replicas.first().map_or(&[], Vec::as_slice));
        let wire_size = |dtype| Reduction { dtype, acc_f64: config.acc_f64, wire_is_acc: wide }.wire_size();
        let bytes = |&(dtype, len): &(DType, usize)| len.checked_mul(wire_size(dtype));
        let total = lengths.iter().try_fold(0usize, |total, tensor| total.checked_add(bytes(tensor)?));
        // Half of the address space leaves room for rounding up.
        let total = total
            .filter(|&total| total <= isize::MAX as usize / 2)
            .ok_or_else(|| Error::Invalid("the tensors together are longer than memory can be".into()))?;
        let share = total.div_ceil(2 * config.channels_for(total)).next_multiple_of(ALIGN);
        let chunk = if total <= config.small_max {
            config.slot
        } else {
            share.clamp(MIN_CHUNK_BYTES.min(config.slot), config.slot)
        };
        let layout = WireLayout::new(&lengths, wire_size, chunk);
        let name = name.to_owned();
        let mut call = Call {
            op,
            layout,
            signature: 0,
            list_hash: 0,
            replicas,
            config,
            name,
            labels,
            schedule_position: String::new(),
            producer: None,
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
        Call::new(Op::Barrier, Vec::new(), ABSENT, "", String::new(), config)
    }

    /// Whether it was made by [`Call::absent`].
    pub fn is_absent(&self) -> bool {
        self.name == ABSENT
    }

    /// The number of its group.
    pub fn team(&self) -> i32 {
        self.config.team
    }

    /// Assigns a schedule position, on which the ranks must agree: the weight of the mean that carries over to the next
    /// call, and a text for messages.
    pub fn schedule(&mut self, carry_weight: f64, position: String) {
        if carry_weight > 0.0 {
            self.signature = xxh3_64_with_seed(&carry_weight.to_le_bytes(), self.signature);
        }
        self.schedule_position = position;
    }

    /// Makes it a call on device memory of stream `producer`, in chunks of at most `chunk` bytes, a multiple of
    /// [`ALIGN`]. Smaller calls get smaller chunks, so that copies and reductions overlap on every channel.
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
        let share = self.layout.total().div_ceil(CHUNKS_PER_CHANNEL * self.channels().max(1)).next_multiple_of(ALIGN);
        let chunk = share.clamp(MIN_STAGED_BYTES.min(chunk), chunk);
        Ok(Call { layout: self.layout.with_chunk_size(chunk), signature, producer: Some(producer), ..self })
    }

    /// The caller's stream of a call on device memory.
    pub fn producer(&self) -> Option<&Arc<CallerStream>> {
        self.producer.as_ref()
    }

    /// The call without tensors: ranks compare it before they move data of device memory.
    pub fn without_data(&self) -> Call {
        Call {
            op: Op::Barrier,
            layout: self.layout.empty(),
            signature: self.signature,
            list_hash: self.list_hash,
            replicas: Vec::new(),
            config: self.config,
            name: self.name.clone(),
            labels: String::new(),
            schedule_position: self.schedule_position.clone(),
            producer: None,
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
        let config = CallConfig { channels: 1, ..self.config };
        Call {
            op: self.op,
            layout: WireLayout::new(&lengths, DType::size, self.config.slot),
            signature,
            list_hash: signature,
            replicas: vec![tensors],
            config,
            name: self.name.clone(),
            labels: String::new(),
            schedule_position: String::new(),
            producer: None,
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

    /// The reduction and wire format for elements of `dtype`.
    pub fn reduction(&self, dtype: DType) -> Reduction {
        Reduction { dtype, acc_f64: self.config.acc_f64, wire_is_acc: self.wire_is_acc() }
    }

    /// Whether the wire holds accumulators: each rank sends a sum over its towers.
    pub fn wire_is_acc(&self) -> bool {
        self.op == Op::Allreduce && self.replicas.len() > 1
    }

    /// Whether it runs in one round; the same on all ranks with the same call.
    pub fn is_small(&self) -> bool {
        self.config.small_max > 0 && self.layout.total() <= self.config.small_max && !self.wire_is_acc()
    }

    /// Size of a slot in bytes.
    pub fn slot(&self) -> usize {
        self.config.slot
    }

    /// The number of its channels.
    pub fn channels(&self) -> usize {
        self.config.channels_for(self.layout.total())
    }

    /// Divisor of the sum.
    pub fn divisor(&self) -> u32 {
        u32::try_from(self.config.ranks * self.replicas.len()).unwrap_or(u32::MAX)
    }

    /// Whether [`Call::rebind_buffers`] can reuse the call: everything in it is covered by that function's comparison.
    pub fn is_repeatable(&self) -> bool {
        self.producer.is_none()
            && self.signature == self.list_hash
            && self.labels.is_empty()
            && self.schedule_position.is_empty()
    }

    /// Reuses the call for other memory if `op`, `name` and `views` equal those of its only tower. Returns false, and
    /// the call is not usable, if they differ or if [`Call::new`] would reject the memory.
    pub fn rebind_buffers(&mut self, op: Op, name: &str, views: &[View<'_>]) -> bool {
        let [tower] = &mut self.replicas[..] else { return false };
        // Skip memcmp for empty names: their dangling pointers make it slow.
        let same_name = self.name.len() == name.len() && (name.is_empty() || self.name == name);
        let matches = self.op == op && tower.len() == views.len() && same_name;
        if !matches
            || !tower.iter().zip(views).all(|(tensor, view)| tensor.matches(view) && view.buffer.check().is_ok())
        {
            return false;
        }
        tower.iter_mut().zip(views).for_each(|(tensor, view)| tensor.buffer = view.buffer);
        self.replicas[0].len() == 1 && self.replicas[0][0].buffer.is_disjoint_or_in_place()
            || check_overlap(&self.replicas).is_ok()
    }

    fn hash_call(&self) -> u64 {
        let mut hash = Xxh3::new();
        let mut number = |value: i64| hash.update(&value.to_le_bytes());
        number(i64::from(self.config.team));
        number(self.op.kind());
        if let Op::Broadcast { root } = self.op {
            number(root as i64);
        }
        number(if self.op == Op::Allreduce { self.replicas.len() as i64 } else { 1 });
        for tensor in self.tensors(0) {
            number(tensor.buffer.dtype() as i64);
            number(tensor.shape().len() as i64);
            tensor.shape().iter().for_each(|&extent| number(extent));
        }
        hash.update(self.name.as_bytes());
        hash.digest()
    }

    /// The call in a line for messages: `average 'bucket 0' on team 0`, with its schedule position.
    pub fn full_name(&self) -> String {
        self.name_line() + &self.schedule_position
    }

    /// The call in a line, without its schedule position.
    pub fn name_line(&self) -> String {
        let name = if self.name.is_empty() { String::new() } else { format!(" '{}'", self.name) };
        let team = match self.config.team {
            -1 => String::new(),
            id => format!(" on team {id}"),
        };
        let team = if self.producer.is_some() { team + " on a GPU" } else { team };
        match self.op {
            Op::Allreduce if self.replicas.len() > 1 => {
                format!("average{name}{team} over {} towers", self.replicas.len())
            }
            Op::Allreduce => format!("average{name}{team}"),
            Op::Broadcast { root } => format!("broadcast{name} from rank {root}{team}"),
            Op::Barrier => format!("barrier{name}"),
        }
    }

    /// The title of the call and a line for each existing tensor of `range`, in at most `limit` bytes.
    pub fn describe(&self, range: Range<usize>, limit: usize) -> String {
        let tensors = self.tensors(0);
        let mut text = self.full_name();
        if !tensors.is_empty() {
            text += &format!(" of {} tensor{}", tensors.len(), if tensors.len() == 1 { "" } else { "s" });
        }
        for line in self.lines(range) {
            if text.len() + 1 + line.len() > limit {
                break;
            }
            text += "\n";
            text += &line;
        }
        text.truncate(text.floor_char_boundary(limit));
        text
    }

    /// Hash of operation and name; 0 for a call without a name.
    pub fn key(&self) -> u32 {
        let hash = xxh3_64_with_seed(self.name.as_bytes(), self.op.kind().cast_unsigned());
        if self.name.is_empty() { 0 } else { (hash >> 32) as u32 | 1 }
    }

    /// The call in a line with its first tensor, for messages about ranks that lack it.
    pub fn summary(&self) -> String {
        let more = self.tensors(0).len().saturating_sub(1);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        let first = self.lines(0..1).next().map(|first| format!(" ({first}{more})"));
        self.full_name() + &first.unwrap_or_default()
    }

    /// A line for each tensor of `range`.
    pub fn lines(&self, range: Range<usize>) -> impl Iterator<Item = String> {
        let mut labels = self.labels.lines().skip(range.start);
        let tensors = self.tensors(0).iter().enumerate().take(range.end).skip(range.start);
        tensors.map(move |(index, tensor)| {
            format!("{}: {}", tensor_title(index, labels.next().unwrap_or("")), tensor.describe())
        })
    }

    /// Hash of the descriptions of tensors `range`, to locate a difference; missing tensors count too.
    pub fn range_hash(&self, range: Range<usize>) -> u64 {
        let mut hash = Xxh3::new();
        for tensor in range.map(|index| self.tensors(0).get(index)) {
            hash.update(tensor.map(Tensor::describe).unwrap_or_default().as_bytes());
            hash.update(b"\n");
        }
        hash.digest()
    }
}

/// The input of [`WireLayout::new`].
pub(super) fn lengths(tensors: &[Tensor]) -> Vec<(DType, usize)> {
    tensors.iter().map(|tensor| (tensor.buffer.dtype(), tensor.buffer.len())).collect()
}

/// Position and name of a tensor.
fn tensor_title(index: usize, label: &str) -> String {
    if label.is_empty() { format!("tensor {index}") } else { format!("tensor {index} '{label}'") }
}

fn check(op: Op, replicas: &[Vec<Tensor>], labels: &str, ranks: usize) -> Result<()> {
    let what = match op {
        Op::Barrier => return Ok(()),
        Op::Broadcast { root } if root >= ranks => {
            return Err(Error::Invalid(format!("root {root} is not a rank; ranks go from 0 to {}", ranks - 1)));
        }
        Op::Broadcast { .. } => "broadcast",
        Op::Allreduce => "average",
    };
    let Some(first) = replicas.first().filter(|tower| !tower.is_empty()) else {
        return Err(Error::Invalid(format!("the list of tensors is empty; {what} needs at least one")));
    };
    for (tower, tensors) in replicas.iter().enumerate() {
        if tensors.len() != first.len() {
            return Err(Error::Invalid(format!(
                "tower {tower} has {} tensors and tower 0 has {}; all towers need the same list",
                tensors.len(),
                first.len()
            )));
        }
        for (index, (tensor, expected)) in tensors.iter().zip(first).enumerate() {
            let title = || tensor_title(index, labels.lines().nth(index).unwrap_or(""));
            tensor.buffer.check().map_err(|error| Error::Invalid(format!("{}: {error}", title())))?;
            if op == Op::Allreduce && tensor.buffer.dtype() == DType::Bool {
                return Err(Error::DType(format!("{}: bool has no mean; broadcast it, or convert it first", title())));
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
    if op == Op::Allreduce { check_overlap(replicas) } else { Ok(()) }
}

/// Rejects an allreduce that would read memory that it has written: several threads run its chunks in no fixed order. A
/// broadcast writes equal values.
fn check_overlap(replicas: &[Vec<Tensor>]) -> Result<()> {
    let mut spans = Vec::new();
    for (index, tensor) in replicas.iter().flat_map(|tower| tower.iter().enumerate()) {
        let (read, written) = tensor.buffer.byte_ranges();
        if read != written && !read.is_empty() {
            spans.push((read.start, read.end, false, index));
        }
        if !written.is_empty() {
            spans.push((written.start, written.end, true, index));
        }
    }
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
mod tests {
    use super::*;

    /// Each tower's tensor fits the address space, but the accumulators do not.
    #[test]
    fn sizes_beyond_the_address_space_are_rejected() {
        let config = CallConfig {
            team: 0,
            ranks: 2,
            channels: 1,
            slot: 4096,
            small_max: 0,
            single_thread_max: 0,
            acc_f64: true,
        };
        let tower = |address: usize| {
            let address = std::ptr::without_provenance_mut(address);
            vec![Tensor::new(Buffer::in_place(address, isize::MAX as usize, DType::U8), &[])]
        };
        let replicas = vec![tower(1), tower(1 + isize::MAX as usize)];
        let error = Call::new(Op::Allreduce, replicas, "", "", String::new(), config).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Invalid(text) if text.contains("memory")));
    }
}
