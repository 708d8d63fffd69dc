//! All-gathers and all-to-alls of which a rank knows only the lengths that it sends. They are a chain of collectives: the
//! lengths first, then each tensor.
//!
//! The calls with the tensors match by name. So the chain ends whatever else the ranks have started meanwhile, and waits
//! for no call but its own. Their name has a number, as several calls of one name may be in flight: that of rank 0, which
//! travels with the lengths, because the ranks may have made different numbers of calls.
//! Thread rule: the chain is owned by the call that runs; the end of the lengths starts the tensors.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use xxhash_rust::xxh3::Xxh3;

use super::submit::Group;
use super::work::{CallOptions, OnComplete};
use crate::buffer::{Buffer, Tensor};
use crate::collective::{Counts, Op, Pattern, Root};
use crate::dtype::DType;
use crate::error::{Error, Result, guard};
use crate::lock::lock;

/// A tensor whose lengths the other ranks do not know.
#[derive(Debug, Clone)]
pub struct RaggedTensor {
    /// Its source and element type. The shape's first extent differs between the ranks.
    pub tensor: Tensor,
    /// The lengths of the blocks that this rank sends: one, or one for each rank.
    pub sent: Vec<usize>,
}

/// Makes room for the results: gets the lengths of the blocks that arrive, those of the first tensor first, in the order
/// of the ranks that send them, and returns an address for each tensor. It must not block.
pub type Allocate = Box<dyn FnOnce(&[usize]) -> Result<Vec<*mut u8>> + Send>;

/// Starts an all-gather or all-to-all, and calls `done` with the result once. If `allocate` fails, so does the call, on
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
        tensor_names: format!("\u{1f}list {:016x}", list_hash(&tensors)),
        timeout: options.timeout,
        ..CallOptions::default()
    };
    let mut chain = Box::new(Chain { op, tensors, options, allocate, done, sent, received, title });
    let (src, dst) = (chain.sent.as_ptr().cast(), chain.received.as_mut_ptr().cast());
    let buffer = Buffer::new(src, dst, chain.tensors.len() + 1, DType::U64);
    let next = Arc::clone(group);
    let then = move |result: Result<()>| match result {
        Ok(()) => chain.start_tensors(&next),
        Err(error) => (chain.done)(Err(error)),
    };
    // SAFETY: the buffer is memory of the chain, which lives until `then` is called.
    unsafe { group.submit(op, vec![vec![Tensor::new(buffer, &[])]], lengths, Box::new(then)) };
}

fn check(op: Op, tensors: &[RaggedTensor], options: &CallOptions, ranks: usize) -> Result<()> {
    if options.device.is_some() {
        return Err(Error::Invalid(format!("{}: tensors of unknown lengths are in host memory", op.title())));
    }
    if options.by_name && options.name.is_empty() {
        return Err(Error::Invalid(format!("{}: a call that matches by name needs a name", op.title())));
    }
    let blocks = match op.pattern() {
        Pattern::Gather if op.collective.root == Root::None => 1,
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

/// Of types and shapes but for the first extents: lists of other tensors must not match.
fn list_hash(tensors: &[RaggedTensor]) -> u64 {
    let mut hash = Xxh3::new();
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
    /// Starts a call for each tensor.
    fn start_tensors(self: Box<Self>, group: &Arc<Group>) {
        let Chain { op, tensors, options, allocate, done, received, title, .. } = *self;
        let (entries, number) = (tensors.len() + 1, received[tensors.len()]);
        let from = |index: usize| received.iter().skip(index).step_by(entries).map(|&len| len as usize);
        let lengths: Vec<Vec<usize>> = (0..tensors.len()).map(|index| from(index).collect()).collect();
        let places = guard(|| allocate(&lengths.concat())).and_then(|places| match places.len() == tensors.len() {
            true => Ok(places),
            false => Err(Error::Internal("not every result has a place".into())),
        });
        let failed = places.as_ref().err().cloned();
        let ends = Arc::new(Mutex::new(Ends { left: tensors.len(), error: failed, done: Some(done) }));
        for (index, RaggedTensor { tensor, sent }) in tensors.into_iter().enumerate() {
            let received = &lengths[index];
            let made = places.as_ref().map_err(Clone::clone).and_then(|places| {
                let (sent, received) = match op.pattern() {
                    Pattern::Exchange => (sent.as_slice(), Some(received.as_slice())),
                    _ => (received.as_slice(), None),
                };
                let buffer = tensor.buffer.moved_to(tensor.buffer.source_at(0), places[index]);
                Ok((Tensor::new(buffer, tensor.shape()), Counts::from_lists(op, Some(sent), received)?))
            });
            let name = format!("{title}: {number}.{index}");
            let options = CallOptions { name, by_name: true, timeout: options.timeout, ..CallOptions::default() };
            let ends = Arc::clone(&ends);
            let end = Box::new(move |result: Result<()>| Ends::one(&ends, result));
            // SAFETY: the promise of the caller of `start_ragged`.
            unsafe {
                match made {
                    Ok((tensor, counts)) => {
                        group.submit(op, vec![vec![tensor]], CallOptions { counts, ..options }, end);
                    }
                    // Another call of this name, with which those of the other ranks fail.
                    Err(_) => group.submit(Op::BARRIER, vec![Vec::new()], options, end),
                }
            }
        }
    }
}

/// The calls of the tensors that have not ended.
struct Ends {
    left: usize,
    error: Option<Error>,
    done: Option<OnComplete>,
}

impl Ends {
    fn one(ends: &Mutex<Ends>, result: Result<()>) {
        let mut state = lock(ends);
        state.left -= 1;
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        if state.left == 0
            && let Some(done) = state.done.take()
        {
            let result = state.error.take().map_or(Ok(()), Err);
            drop(state);
            done(result);
        }
    }
}
