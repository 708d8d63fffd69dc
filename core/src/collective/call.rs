//! One collective call as every rank describes it: operation, tensors, layout on the wire, signature.

use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::buffer::{Buffer, Tensor, View};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::reduce::Reduction;
use crate::transport::gpu::CallerStream;
use crate::wire_layout::{ALIGN, DtypeRun, WireLayout};

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// The mean over all ranks and towers, to all.
    Allreduce,
    /// The values of rank `root`, to all.
    Broadcast {
        /// The rank that has the values.
        root: usize,
    },
    /// Nothing but that everybody has come.
    Barrier,
}

impl Op {
    /// A number for the operation, whatever its root.
    fn kind(self) -> i64 {
        match self {
            Op::Allreduce => 1,
            Op::Broadcast { .. } => 2,
            Op::Barrier => 3,
        }
    }
}

/// How a team carries its calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallConfig {
    /// The team's number.
    pub team: i32,
    /// The number of ranks.
    pub ranks: usize,
    /// The number of channels.
    pub channels: usize,
    /// Bytes of a slot.
    pub slot: usize,
    /// The longest call, in bytes, that takes one exchange; 0 between hosts.
    pub small_max: usize,
    /// The longest call, in bytes, that the thread which leads carries alone.
    pub single_thread_max: usize,
    /// Whether floating point is added up in float64.
    pub acc_f64: bool,
}

impl CallConfig {
    /// How many channels carry a call of so many bytes.
    fn channels_for(&self, total: usize) -> usize {
        if total <= self.single_thread_max { 1 } else { self.channels }
    }
}

/// A call, ready to be carried out.
#[derive(Clone)]
pub struct Call {
    /// What to do.
    pub op: Op,
    /// Where the bytes go on the wire.
    pub layout: WireLayout,
    /// The same on all ranks that call the same thing; different, but for chance, where anything differs.
    pub signature: u64,
    /// The same for all calls on one list of tensors under one name.
    pub list_hash: u64,
    replicas: Vec<Vec<Tensor>>,
    config: CallConfig,
    name: String,
    labels: String,
    schedule_position: String,
    producer: Option<Arc<CallerStream>>,
}

/// The name of what is no call.
const ABSENT: &str = "\0absent";

/// The least bytes of a chunk between GPU and host: a copy of less does not reach the speed of the bus.
const MIN_STAGED_BYTES: usize = 256 << 10;
/// Chunks of a call on device memory for each channel, where it is long enough: down, average and up at the same time.
const STAGES: usize = 4;
/// The least bytes of a chunk: below this a second channel costs more than it brings.
const MIN_CHUNK_BYTES: usize = 64 << 10;

impl Call {
    /// Checks and lays out a call on `replicas` (replicas) of equal lists of tensors; a barrier has none. `labels` are names
    /// of the tensors, a line each. `instance` tells apart calls of one `name` that are under way at once.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::DType`], naming the tensor.
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
        // Half of what could be addressed leaves room for rounding up.
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
        call.list_hash = call.sign();
        call.name += instance;
        call.signature = if instance.is_empty() { call.list_hash } else { call.sign() };
        Ok(call)
    }

    /// What a rank brings to a step for which it has no call: nothing, under a signature that no call has.
    ///
    /// # Errors
    /// None; those of [`Call::new`].
    pub fn absent(config: CallConfig) -> Result<Call> {
        Call::new(Op::Barrier, Vec::new(), ABSENT, "", String::new(), config)
    }

    /// Whether it was made by [`Call::absent`].
    pub fn is_absent(&self) -> bool {
        self.name == ABSENT
    }

    /// The number of its team.
    pub fn team(&self) -> i32 {
        self.config.team
    }

    /// Puts the call on a schedule, which the ranks must agree on: the share of its mean that it leaves to the next call,
    /// and, for messages, where it stands.
    pub fn schedule(&mut self, left: f64, place: String) {
        if left > 0.0 {
            self.signature = xxh3_64_with_seed(&left.to_le_bytes(), self.signature);
        }
        self.schedule_position = place;
    }

    /// Makes it a call on device memory that `producer` makes and awaits, in chunks of at most `chunk` bytes, a multiple of
    /// [`ALIGN`]; of a call that is not long, in so many that copies and averages overlap on every channel.
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
        let share = self.layout.total().div_ceil(STAGES * self.channels().max(1)).next_multiple_of(ALIGN);
        let chunk = share.clamp(MIN_STAGED_BYTES.min(chunk), chunk);
        Ok(Call { layout: self.layout.with_chunk_size(chunk), signature, producer: Some(producer), ..self })
    }

    /// Who makes and awaits the tensors of a call on device memory.
    pub fn producer(&self) -> Option<&Arc<CallerStream>> {
        self.producer.as_ref()
    }

    /// The same call without its data: what ranks see of each other's calls on device memory before anything moves.
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

    /// Chunk `chunk` of a call on device memory as a call on host memory, whose bytes are at `memory`.
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

    /// Whether every tensor is written where it is read.
    pub fn is_in_place(&self) -> bool {
        self.replicas.iter().flatten().all(|tensor| tensor.buffer.is_in_place())
    }

    /// Whether floating point is added up in float64.
    pub fn accumulates_f64(&self) -> bool {
        self.config.acc_f64
    }

    /// Where the results are written: the tensors of all towers.
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

    /// How elements of `dtype` are added up, and stand on the wire.
    pub fn reduction(&self, dtype: DType) -> Reduction {
        Reduction { dtype, acc_f64: self.config.acc_f64, wire_is_acc: self.wire_is_acc() }
    }

    /// Whether the wire holds accumulators, because each rank brings a sum over its towers.
    pub fn wire_is_acc(&self) -> bool {
        self.op == Op::Allreduce && self.replicas.len() > 1
    }

    /// Whether it takes one exchange; the same on all ranks that call the same.
    pub fn is_small(&self) -> bool {
        self.config.small_max > 0 && self.layout.total() <= self.config.small_max && !self.wire_is_acc()
    }

    /// The bytes of a slot.
    pub fn slot(&self) -> usize {
        self.config.slot
    }

    /// How many channels carry it.
    pub fn channels(&self) -> usize {
        self.config.channels_for(self.layout.total())
    }

    /// What the sum is divided by.
    pub fn divisor(&self) -> u32 {
        u32::try_from(self.config.ranks * self.replicas.len()).unwrap_or(u32::MAX)
    }

    /// Whether [`Call::rebind`] may make other calls of it: its words and its signature tell of nothing but what that compares.
    pub fn is_repeatable(&self) -> bool {
        self.producer.is_none()
            && self.signature == self.list_hash
            && self.labels.is_empty()
            && self.schedule_position.is_empty()
    }

    /// Makes this job the same call on other memory, if `name` and `views` are those of its only tower; false, and nothing
    /// is changed, when they are not, or when the memory is none that [`Call::new`] takes.
    pub fn rebind_buffers(&mut self, op: Op, name: &str, views: &[View<'_>]) -> bool {
        let [tower] = &mut self.replicas[..] else { return false };
        // Of two empty names not even the addresses are looked at, which memcmp pays for where nothing is mapped.
        let same_name = self.name.len() == name.len() && (name.is_empty() || self.name == name);
        let like = self.op == op && tower.len() == views.len() && same_name;
        if !like || !tower.iter().zip(views).all(|(tensor, view)| tensor.matches(view) && view.buffer.check().is_ok()) {
            return false;
        }
        tower.iter_mut().zip(views).for_each(|(tensor, view)| tensor.buffer = view.buffer);
        self.replicas[0].len() == 1 && self.replicas[0][0].buffer.is_disjoint_or_in_place()
            || check_overlap(&self.replicas).is_ok()
    }

    fn sign(&self) -> u64 {
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

    /// The call in a line, for messages: `average 'bucket 0' on team 0`, and where it stands on the schedule.
    pub fn full_name(&self) -> String {
        self.name_line() + &self.schedule_position
    }

    /// The call in a line, without its place on the schedule.
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

    /// The call: its title, then a line for each tensor of `range` that there is, as far as `limit` bytes reach.
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

    /// The same for all calls of this operation and name, whatever their content; 0 for a call without a name.
    pub fn key(&self) -> u32 {
        let hash = xxh3_64_with_seed(self.name.as_bytes(), self.op.kind().cast_unsigned());
        if self.name.is_empty() { 0 } else { (hash >> 32) as u32 | 1 }
    }

    /// The call in a line with its first tensor, for messages about who owes it.
    pub fn summary(&self) -> String {
        let more = self.tensors(0).len().saturating_sub(1);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        let first = self.lines(0..1).next().map(|first| format!(" ({first}{more})"));
        self.full_name() + &first.unwrap_or_default()
    }

    /// Tensors `range`, a line each.
    pub fn lines(&self, range: Range<usize>) -> impl Iterator<Item = String> {
        let mut labels = self.labels.lines().skip(range.start);
        let tensors = self.tensors(0).iter().enumerate().take(range.end).skip(range.start);
        tensors
            .map(move |(index, tensor)| format!("{}: {}", place(index, labels.next().unwrap_or("")), tensor.describe()))
    }

    /// A hash of what tensors `range` are, for finding where two lists differ; a tensor that is not there counts too.
    pub fn range_hash(&self, range: Range<usize>) -> u64 {
        let mut hash = Xxh3::new();
        for tensor in range.map(|index| self.tensors(0).get(index)) {
            hash.update(tensor.map(Tensor::describe).unwrap_or_default().as_bytes());
            hash.update(b"\n");
        }
        hash.digest()
    }
}

/// What [`WireLayout::new`] takes of tensors.
pub(super) fn lengths(tensors: &[Tensor]) -> Vec<(DType, usize)> {
    tensors.iter().map(|tensor| (tensor.buffer.dtype(), tensor.buffer.len())).collect()
}

/// A tensor's position and name.
fn place(index: usize, label: &str) -> String {
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
            let place = || place(index, labels.lines().nth(index).unwrap_or(""));
            tensor.buffer.check().map_err(|error| Error::Invalid(format!("{}: {error}", place())))?;
            if op == Op::Allreduce && tensor.buffer.dtype() == DType::Bool {
                return Err(Error::DType(format!("{}: bool has no mean; broadcast it, or convert it first", place())));
            }
            if tensor.shape() != expected.shape() || tensor.buffer.dtype() != expected.buffer.dtype() {
                return Err(Error::Invalid(format!(
                    "{} is {} in tower {tower} and {} in tower 0; all towers need the same list",
                    place(),
                    tensor.describe(),
                    expected.describe()
                )));
            }
        }
    }
    if op == Op::Allreduce { check_overlap(replicas) } else { Ok(()) }
}

/// Refuses an average that would read what it has written: chunks are carried by several threads, in no fixed order. (In a
/// broadcast all that is written to one place is the same.)
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
    // The furthest ends so far of what is read and of what is written.
    let mut furthest = [(0, 0); 2];
    for (start, end, written, index) in spans {
        for (other_written, (other_end, other)) in [false, true].into_iter().zip(furthest) {
            if start < other_end && (written || other_written) {
                return Err(Error::Invalid(format!(
                    "tensors {other} and {index} share memory; pass it once, or the results to separate memory"
                )));
            }
        }
        let slot = &mut furthest[usize::from(written)];
        *slot = (*slot).max((end, index));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each tower's tensor could be memory; what they are added up in could not.
    #[test]
    fn more_than_memory_can_be_is_refused() {
        let config = CallConfig {
            team: 0,
            ranks: 2,
            channels: 1,
            slot: 4096,
            small_max: 0,
            single_thread_max: 0,
            acc_f64: true,
        };
        let tower = |place: usize| {
            let place = std::ptr::without_provenance_mut(place);
            vec![Tensor::new(Buffer::in_place(place, isize::MAX as usize, DType::U8), &[])]
        };
        let replicas = vec![tower(1), tower(1 + isize::MAX as usize)];
        let error = Call::new(Op::Allreduce, replicas, "", "", String::new(), config).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Invalid(text) if text.contains("memory")));
    }
}
