//! Adasum of lists of tensors on any number of ranks (Maleki et al., 2020, arXiv:2006.02924).
//!
//! It is a chain of collectives. An all-to-all gives every rank a block of all ranks' vectors. The vectors are combined
//! in pairs of neighbours, and the results again, as a tree; a vector without a neighbour goes up unchanged. The dot
//! products of a level, one set for each tensor and pair, are summed over the blocks by an allreduce. An all-gather
//! collects the blocks of the last vector. So a rank sends as many bytes as in an allreduce, and log2(ranks) short
//! messages. The dot products are added in a fixed order: all ranks get the same bits.
//! Thread rule: the chain is owned by the call that runs; a call's completion starts the next.

use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::submit::Group;
use super::work::{CallOptions, OnComplete};
use crate::buffer::{Buffer, Tensor};
use crate::collective::{Op, TensorNames};
use crate::dtype::DType;
use crate::error::{Error, Result, guard};
use crate::float_state::DefaultFloatState;
use crate::reduce::ReduceOp;
use crate::reduce::adasum::{Work, accepts, combine, dot_products};

/// Starts the Adasum of `tensors`, and calls `done` with the result once.
///
/// # Safety
/// As for [`Group::submit`].
pub unsafe fn start_adasum(group: &Arc<Group>, tensors: Vec<Tensor>, options: CallOptions, done: OnComplete) {
    if let Err(error) = check(&tensors, &options) {
        group.note_refusal(&error);
        return done(Err(error));
    }
    // SAFETY: the caller's promise.
    unsafe {
        if tensors.iter().any(|tensor| tensor.buffer.dtype() == DType::F64) {
            Chain::<f64>::start(Arc::clone(group), tensors, options, done);
        } else {
            Chain::<f32>::start(Arc::clone(group), tensors, options, done);
        }
    }
}

fn check(tensors: &[Tensor], options: &CallOptions) -> Result<()> {
    if options.device.is_some() {
        return Err(Error::Invalid("adasum: takes tensors in host memory".into()));
    }
    if options.by_name && options.name.is_empty() {
        return Err(Error::Invalid("adasum: a call that matches by name needs a name".into()));
    }
    for (index, tensor) in tensors.iter().enumerate() {
        let (buffer, dtype) = (&tensor.buffer, tensor.buffer.dtype());
        if !accepts(dtype) {
            return Err(Error::Invalid(format!("adasum: tensor {index} is {}; it takes floating point", dtype.name())));
        }
        buffer.check().map_err(|error| Error::Invalid(format!("adasum: tensor {index}: {}", error.detail())))?;
    }
    Ok(())
}

/// The elements of all tensors, one after the other.
fn elements(tensors: &[Tensor]) -> impl Iterator<Item = (Buffer, usize)> {
    tensors.iter().flat_map(|tensor| (0..tensor.buffer.len()).map(|index| (tensor.buffer, index)))
}

/// The name of the one tensor that holds all `tensors`: the first of them, and a hash of what the ranks compare, so that
/// lists of other tensors do not match.
fn list_text(tensors: &[Tensor], names: &TensorNames) -> String {
    const MAX_SHOWN: usize = 8;
    let mut hash = Xxh3::new();
    tensors.iter().for_each(|tensor| hash.update((tensor.describe() + "\n").as_bytes()));
    names.compared().iter().for_each(|compared| hash.update(compared.as_bytes()));
    let mut described = names.described();
    let mut shown: Vec<String> = tensors
        .iter()
        .take(MAX_SHOWN)
        .map(|tensor| described.next().map_or_else(String::new, |name| format!("{name}: ")) + &tensor.describe())
        .collect();
    if tensors.len() > MAX_SHOWN {
        shown.push(format!("{} more", tensors.len() - MAX_SHOWN));
    }
    format!("{}\u{1f}list {:016x}", shown.join(", "), hash.digest())
}

/// The state of a call between its collectives.
struct Chain<W> {
    group: Arc<Group>,
    tensors: Vec<Tensor>,
    options: CallOptions,
    done: OnComplete,
    /// [`list_text`] of the tensors.
    list: String,
    /// Elements of a rank's block.
    block: usize,
    /// The blocks that this rank sends, and at the end those of the result.
    line: Vec<W>,
    /// This rank's block of the vectors that are left, of which vector i is at `i * block`.
    vectors: Vec<W>,
    num_vectors: usize,
    /// For each pair of vectors and each tensor, three dot products.
    dots: Vec<f64>,
    level: usize,
}

impl<W: Work> Chain<W> {
    /// # Safety
    /// As for [`Group::submit`].
    unsafe fn start(group: Arc<Group>, tensors: Vec<Tensor>, options: CallOptions, done: OnComplete) {
        let ranks = group.call_config().ranks;
        let total: usize = tensors.iter().map(|tensor| tensor.buffer.len()).sum();
        let block = total.div_ceil(ranks);
        let mut line = vec![W::default(); block * ranks];
        let default = DefaultFloatState::enter();
        for (to, (buffer, index)) in line.iter_mut().zip(elements(&tensors)) {
            // SAFETY: the caller's promise; `check` has checked the alignment.
            *to = unsafe { W::load(buffer.source_at(index), buffer.dtype()) };
        }
        drop(default);
        let vectors = vec![W::default(); block * ranks];
        let (num_vectors, dots, level) = (ranks, Vec::new(), 0);
        let list = list_text(&tensors, &TensorNames::from(options.tensor_names.clone()));
        let mut chain =
            Box::new(Chain { group, tensors, options, done, list, block, line, vectors, num_vectors, dots, level });
        let (src, dst) = (chain.line.as_ptr().cast(), chain.vectors.as_mut_ptr().cast());
        let buffer = Buffer::new(src, dst, block, W::DTYPE);
        chain.run(Op::ALLTOALL, buffer, Chain::next_level);
    }

    /// Runs a collective on memory of the chain, then `next`.
    fn run(self: Box<Self>, op: Op, buffer: Buffer, next: fn(Box<Self>)) {
        let group = Arc::clone(&self.group);
        let options = CallOptions {
            name: format!("{} (adasum)", self.options.name),
            by_name: self.options.by_name,
            instance_id: format!(" {}", self.level),
            tensor_names: self.list.clone(),
            timeout: self.options.timeout,
            ..CallOptions::default()
        };
        let then = move |result: Result<()>| match result {
            Ok(()) => next(self),
            Err(error) => (self.done)(Err(error)),
        };
        // SAFETY: the buffer is memory of the chain, which lives until `then` is called.
        unsafe { group.submit(op, vec![vec![Tensor::new(buffer, &[])]], options, Box::new(then)) };
    }

    /// The ranges of the tensors in this rank's block.
    fn ranges(&self) -> Vec<Range<usize>> {
        let first = self.group.rank() * self.block;
        let mut start = 0;
        let range = |tensor: &Tensor| {
            let end = start + tensor.buffer.len();
            let range = start.clamp(first, first + self.block) - first..end.clamp(first, first + self.block) - first;
            start = end;
            range
        };
        self.tensors.iter().map(range).collect()
    }

    /// The pairs of vectors that are combined next.
    fn pairs(&self) -> usize {
        self.num_vectors / 2
    }

    /// Computes the dot products of this rank's block, or, with one vector left, collects the result.
    fn next_level(mut self: Box<Self>) {
        if self.num_vectors == 1 {
            let buffer = Buffer::new(self.vectors.as_ptr().cast(), self.line.as_mut_ptr().cast(), self.block, W::DTYPE);
            return self.run(Op::ALLGATHER, buffer, Chain::finish);
        }
        let _default = DefaultFloatState::enter();
        let (ranges, vectors) = (self.ranges(), &self.vectors);
        let pair = |pair: usize| {
            let [a, b] = [2 * pair * self.block, (2 * pair + 1) * self.block];
            let dots = |range: &Range<usize>| {
                dot_products(&vectors[a + range.start..a + range.end], &vectors[b + range.start..b + range.end])
            };
            ranges.iter().flat_map(dots).collect::<Vec<f64>>()
        };
        self.dots = (0..self.pairs()).flat_map(pair).collect();
        let buffer = Buffer::in_place(self.dots.as_mut_ptr().cast(), self.dots.len(), DType::F64);
        self.run(Op::allreduce(ReduceOp::Sum), buffer, Chain::combine_pairs);
    }

    fn combine_pairs(mut self: Box<Self>) {
        let _default = DefaultFloatState::enter();
        let (ranges, pairs, block) = (self.ranges(), self.pairs(), self.block);
        for pair in 0..pairs {
            let (left, right) = self.vectors.split_at_mut((2 * pair + 1) * block);
            for (index, range) in ranges.iter().enumerate() {
                let at = 3 * (pair * ranges.len() + index);
                let dots = [self.dots[at], self.dots[at + 1], self.dots[at + 2]];
                let a = &mut left[2 * pair * block..][range.clone()];
                combine(a, &right[range.clone()], dots);
            }
            self.vectors.copy_within(2 * pair * block..(2 * pair + 1) * block, pair * block);
        }
        if self.num_vectors % 2 == 1 {
            let last = (self.num_vectors - 1) * block;
            self.vectors.copy_within(last..last + block, pairs * block);
        }
        self.num_vectors = self.num_vectors.div_ceil(2);
        self.level += 1;
        self.next_level();
    }

    /// Writes the result to the tensors.
    fn finish(self: Box<Self>) {
        let result = guard(|| {
            let _default = DefaultFloatState::enter();
            for (value, (buffer, index)) in self.line.iter().zip(elements(&self.tensors)) {
                // SAFETY: the promise of the caller of `start`.
                unsafe { value.store(buffer.destination_at(index), buffer.dtype()) };
            }
            Ok(())
        });
        (self.done)(result);
    }
}
