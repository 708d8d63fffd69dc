//! All-gathers, gathers and all-to-alls of which a rank knows only the lengths that it sends. They are two collectives:
//! the lengths first, then the tensors.
//!
//! The call with the tensors matches by name. So it ends whatever else the ranks have started meanwhile, and waits for no
//! call but its own. Its name has a number, as several calls of one name may be in flight: that of rank 0, which travels
//! with the lengths, because the ranks may have made different numbers of calls.
//! Thread rule: the chain is owned by the call that runs; the end of the lengths starts the tensors.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use xxhash_rust::xxh3::Xxh3;

use super::submit::Group;
use super::work::{CallOptions, OnComplete};
use crate::buffer::{Buffer, Tensor};
use crate::collective::{Counts, Op, Pattern, Root};
use crate::dtype::DType;
use crate::error::{Error, Result, guard};

/// A tensor whose lengths the other ranks do not know.
#[derive(Debug, Clone)]
pub struct RaggedTensor {
    /// Its source and element type. The shape's first extent differs between the ranks.
    pub tensor: Tensor,
    /// The lengths of the blocks that this rank sends: one, or one for each rank.
    pub sent: Vec<usize>,
}

/// Makes room for the results: gets the lengths of the blocks that arrive, those of the first tensor first, in the order
/// of the ranks that send them, and returns an address for each tensor. In a gather every rank gets them, and the places
/// of the root are used. It must not block.
pub type Allocate = Box<dyn FnOnce(&[usize]) -> Result<Vec<*mut u8>> + Send>;

/// Starts an all-gather, gather or all-to-all, and calls `done` with the result once. If `allocate` fails, so does the call, on
/// every rank.
///
/// # Safety
/// As for [`Group::submit`]; the addresses from `allocate` are valid for the results until `done` is called.
pub unsafe fn start_ragged(
    group: &Arc<Group>,
    op: Op,
    tensors: Vec<RaggedTensor>,
    options: CallOptions,
    allocate: Allocate,
    done: OnComplete,
) {
    let ranks = group.call_config().ranks;
    if let Err(error) = check(op, &tensors, &options, ranks) {
        group.note_refusal(&error);
        return done(Err(error));
    }
    let blocks = tensors[0].sent.len();
    let title = if options.name.is_empty() { op.title() } else { options.name.clone() };
    let number = group.ragged_calls.fetch_add(1, Ordering::Relaxed);
    // A block for each rank, or for all: the lengths of every tensor, and the number.
    let lengths_to = |block| tensors.iter().map(move |tensor: &RaggedTensor| tensor.sent[block] as u64);
    let sent: Vec<u64> = (0..blocks).flat_map(|block| lengths_to(block).chain([number])).collect();
    let received = vec![0u64; ranks * (tensors.len() + 1)];
    let lengths = CallOptions {
        name: format!("{title}: lengths"),
        by_name: options.by_name,
        tensor_names: format!("\u{1f}list {:016x}", list_hash(op, &tensors)),
        timeout: options.timeout,
        ..CallOptions::default()
    };
    let mut chain = Box::new(Chain { op, tensors, options, allocate, done, sent, received, title });
    let (src, dst) = (chain.sent.as_ptr().cast(), chain.received.as_mut_ptr().cast());
    let buffer = Buffer::new(src, dst, chain.tensors.len() + 1, DType::U64);
    let lengths_op = if op.pattern() == Pattern::Gather { Op::ALLGATHER } else { op };
    let next = Arc::clone(group);
    let then = move |result: Result<()>| match result {
        Ok(()) => chain.start_tensors(&next),
        Err(error) => (chain.done)(Err(error)),
    };
    // SAFETY: the buffer is memory of the chain, which lives until `then` is called.
    unsafe { group.submit(lengths_op, vec![vec![Tensor::new(buffer, &[])]], lengths, Box::new(then)) };
}

fn check(op: Op, tensors: &[RaggedTensor], options: &CallOptions, ranks: usize) -> Result<()> {
    if options.device.is_some() {
        return Err(Error::Invalid(format!("{}: tensors of unknown lengths are in host memory", op.title())));
    }
    if options.by_name && options.name.is_empty() {
        return Err(Error::Invalid(format!("{}: a call that matches by name needs a name", op.title())));
    }
    let blocks = match op.pattern() {
        Pattern::Gather => 1,
        Pattern::Exchange => ranks,
        _ => return Err(Error::Invalid(format!("{}: all ranks must know the lengths of its blocks", op.title()))),
    };
    if tensors.is_empty() {
        return Err(Error::Invalid(format!("{}: the list is empty; give at least one tensor", op.title())));
    }
    for (index, RaggedTensor { tensor, sent }) in tensors.iter().enumerate() {
        let total = sent.iter().try_fold(0usize, |total, &len| total.checked_add(len));
        let total = total.filter(|_| sent.len() == blocks);
        let total = total.ok_or_else(|| Error::Invalid(format!("tensor {index} has no {blocks} lengths to send")))?;
        let source = tensor.buffer.check_source_of(total);
        source.map_err(|error| Error::Invalid(format!("{}: tensor {index}: {}", op.title(), error.detail())))?;
    }
    Ok(())
}

/// Of the root, and of types and shapes but for the first extents: other calls must not match.
fn list_hash(op: Op, tensors: &[RaggedTensor]) -> u64 {
    let mut hash = Xxh3::new();
    if op.collective.root != Root::None {
        hash.update(&(op.root as u64).to_le_bytes());
    }
    for RaggedTensor { tensor, .. } in tensors {
        hash.update(&[tensor.buffer.dtype() as u8]);
        let extents = tensor.shape().get(1..).unwrap_or_default();
        hash.update(&(extents.len() as u64).to_le_bytes());
        extents.iter().for_each(|extent| hash.update(&extent.to_le_bytes()));
    }
    hash.digest()
}

/// The state of a call while the lengths travel.
struct Chain {
    op: Op,
    tensors: Vec<RaggedTensor>,
    options: CallOptions,
    allocate: Allocate,
    done: OnComplete,
    /// For each block, the lengths of all tensors, and the number of the call.
    sent: Vec<u64>,
    /// The same from each rank.
    received: Vec<u64>,
    title: String,
}

impl Chain {
    /// Starts the call with the tensors.
    fn start_tensors(self: Box<Self>, group: &Arc<Group>) {
        let Chain { op, tensors, options, allocate, done, sent, received, title } = *self;
        let (entries, number) = (tensors.len() + 1, received[tensors.len()]);
        let of_tensor = |list: &[u64], index: usize| -> Vec<usize> {
            list.iter().skip(index).step_by(entries).map(|&len| len as usize).collect()
        };
        let of_all =
            |list: &[u64]| -> Vec<usize> { (0..tensors.len()).flat_map(|index| of_tensor(list, index)).collect() };
        let lengths = of_all(&received);
        let made = guard(|| allocate(&lengths)).and_then(|places| {
            if places.len() != tensors.len() {
                return Err(Error::Internal("not every result has a place".into()));
            }
            let counts = match op.pattern() {
                Pattern::Exchange => Counts::from_lists(op, tensors.len(), Some(&of_all(&sent)), Some(&lengths)),
                _ => Counts::from_lists(op, tensors.len(), Some(&lengths), None),
            };
            let with_place = |(RaggedTensor { tensor, .. }, place): (&RaggedTensor, *mut u8)| {
                Tensor::new(tensor.buffer.moved_to(tensor.buffer.source_at(0), place), tensor.shape())
            };
            Ok((tensors.iter().zip(places).map(with_place).collect(), counts?))
        });
        let name = format!("{title}: {number}");
        let options = CallOptions { name, by_name: true, timeout: options.timeout, ..CallOptions::default() };
        // SAFETY: the promise of the caller of `start_ragged`.
        unsafe {
            match made {
                Ok((tensors, counts)) => group.submit(op, vec![tensors], CallOptions { counts, ..options }, done),
                // Another call of this name, with which those of the other ranks fail.
                Err(error) => {
                    let failed = Box::new(move |_| done(Err(error)));
                    group.submit(Op::BARRIER, vec![Vec::new()], options, failed);
                }
            }
        }
    }
}
