//! The cxx bridge between the core and the op libraries for TensorFlow and PyTorch.
//!
//! Functions here only convert and enqueue. Every result, including argument errors, reaches the caller exactly once
//! through its `Completion`. A panic must not cross the bridge (cxx aborts the process), so bodies run under [`guard`].
//! Thread rule: any thread; no function waits for a peer, except for a caller that blocks anyway.

use crate::buffer::{Buffer, Tensor, View};
use crate::collective::Counts;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result, guard};
use crate::group::{BlockedCaller, CallOptions, MessageOptions, Timeout};
use crate::lock::lock;
use crate::p2p::{Spans, Status, Then};
use crate::plugin::{OnResult, ResultBuffer, StepOptions};
use crate::runtime::collectives::{self, CollectiveRequest, SmallCallOptions};
use crate::runtime::point_to_point;
use crate::runtime::{self, group_of_number};
use crate::transport::gpu;

#[cxx::bridge(namespace = "dl_comm")]
#[allow(missing_docs, clippy::missing_safety_doc)]
mod bridge {
    /// A tensor: reads `src` and writes `dst`, which may be equal. `length` counts elements, `dtype` is a `dlDataType_t`. Its
    /// shape is the next `ndim` numbers of the list's `shapes`.
    struct TensorView {
        src: usize,
        dst: usize,
        length: usize,
        dtype: i32,
        ndim: usize,
    }

    /// What all calls have:
    /// - `name`, `instance_id`: the ranks must agree on both; `instance_id` distinguishes calls of one name in
    ///   flight together.
    /// - `tensor_names`: names of the tensors (of one tower) for messages, a line each, or empty. After U+001F may follow
    ///   the names that must be the same on all ranks, a line each; nothing there means those for messages.
    /// - `caller_blocks`: the calling thread makes no other call before this one has ended.
    /// - `by_pool`: the calling thread is one of a pool of the framework, and makes the call for a graph.
    /// - `timeout`: in seconds; 0 for none, negative for the group's.
    /// - `device`, `stream`: the GPU and `cudaStream_t` of the tensors; a negative `device` means host memory. On a GPU
    ///   the call completes once `stream` waits for the result.
    /// - `block_host`: on a GPU, the call completes with the result, and `stream` does not wait.
    struct Options<'a> {
        name: &'a str,
        instance_id: &'a str,
        tensor_names: &'a str,
        caller_blocks: bool,
        by_pool: bool,
        timeout: f64,
        device: i32,
        stream: usize,
        block_host: bool,
    }

    /// An allreduce (mean) of a team:
    /// - `towers`: the number of replicas of the list, one after the other.
    /// - `owner`: distinguishes, on this rank only, equal lists of one name, which must not share carried means.
    /// - `continues_step`: the call continues the step of the call before it, which the schedule has counted.
    /// - `return_weights`: with `results`, returns the call's own mean and the carried one separately (see
    ///   `set_weights`).
    /// - `count_wait`: whether the time until the end of the call counts as waiting.
    struct Average<'a> {
        options: Options<'a>,
        team: i32,
        towers: usize,
        owner: u64,
        continues_step: bool,
        return_weights: bool,
        count_wait: bool,
    }

    /// A call of a collective on a group, without a schedule:
    /// - `group`: the number of `dl_comm_group_number`; 0 for the group of team 0, `CONTROL_GROUP` for that of the
    ///   plugin's broadcasts.
    /// - `collective`, `reduce`, `root`, `prescale`, `postscale`, `send_counts`, `receive_counts`: as in
    ///   `dl_comm_call_t`; the counts are empty for blocks of equal length.
    /// - `by_name`: as the flag DL_COMM_BY_NAME there.
    struct Collective<'a> {
        options: Options<'a>,
        group: u64,
        collective: i32,
        reduce: i32,
        root: i32,
        prescale: f64,
        postscale: f64,
        send_counts: &'a [usize],
        receive_counts: &'a [usize],
        by_name: bool,
    }

    /// A message to (`sends`) or from rank `peer` of a group, with `tag`; -1 for any source and any tag. `device` and
    /// `stream` as in `Options`.
    struct Transfer<'a> {
        group: u64,
        sends: bool,
        peer: i32,
        tag: i32,
        name: &'a str,
        timeout: f64,
        device: i32,
        stream: usize,
    }

    unsafe extern "C++" {
        include!("dl_comm/completion.h");

        type Completion;
        fn done(self: &Completion, code: i32, message: &str, results: SharedPtr<ResultBuffer>);
        fn received(self: &Completion, source: i32, tag: i32, bytes: usize);

        type ResultBuffer;
        fn owner_type(self: &ResultBuffer) -> usize;
        fn set_weights(self: &ResultBuffer, own: f64, here: f64);
        fn zeros_like(self: &ResultBuffer, addresses: &mut Vec<usize>) -> SharedPtr<ResultBuffer>;
    }

    extern "Rust" {
        /// Starts an allreduce (mean) of `tensors` over all ranks. `results` owns their memory; if it is null, the call
        /// does not return early (see `may_return_early`).
        unsafe fn average(
            call: &Average<'_>,
            tensors: &[TensorView],
            shapes: &[i64],
            completion: UniquePtr<Completion>,
            results: SharedPtr<ResultBuffer>,
        );

        /// Whether later calls of `owner` on `team` may return early. Then `results` must own their tensors, or be null
        /// and the tensors copied. False if there is no such team.
        fn may_return_early(team: i32, owner: u64) -> bool;

        /// Drops the means that the last calls of `owner` on `team` have carried over.
        fn discard_carried(team: i32, owner: u64);

        /// Adds the seconds that a caller has waited for a call without `count_wait`.
        fn add_waited(team: i32, seconds: f64);

        /// The code and text of a call that was lost on a GPU after it had ended, once; 0 if there is none.
        fn lost_call(message: &mut String) -> i32;

        /// While it lives, this thread counts as waiting for a call that it has started. For long waits: deadlock
        /// detection needs the waiting threads.
        type LongWait;

        /// Starts a long wait.
        fn begin_wait() -> Box<LongWait>;

        /// Checks for signals; call it about ten times a second. After a signal that ends the wait, the pending calls
        /// soon end.
        fn look(self: &LongWait);

        /// Starts a collective, or runs it to its end if the caller blocks. The `length` of a tensor is that of its shorter
        /// side, as in `dl_comm_buffer_t`.
        unsafe fn start_collective(
            call: &Collective<'_>,
            tensors: &[TensorView],
            shapes: &[i64],
            completion: UniquePtr<Completion>,
        );

        /// Starts to send the `src` of `tensors`, or to receive into their `dst`.
        unsafe fn start_transfer(call: &Transfer<'_>, tensors: &[TensorView], completion: UniquePtr<Completion>);

        /// This process's rank in a group.
        fn group_rank(group: u64) -> Result<i32>;

        /// The number of a group's ranks.
        fn group_size(group: u64) -> Result<i32>;

        /// Makes stream `later` of GPU `device` wait for all work on `stream` so far.
        fn order(device: i32, stream: usize, later: usize) -> Result<()>;

        /// Equal for all users of one core in this process.
        fn core_id() -> usize;
    }
}

use std::any::Any;
use std::sync::{Arc, Mutex};

use cxx::{SharedPtr, UniquePtr};
use smallvec::SmallVec;

use bridge::{Average, Collective, Completion, Options, TensorView, Transfer};

/// The memory of a call, owned by an op library.
struct OpLibraryResults(SharedPtr<bridge::ResultBuffer>);

// SAFETY: by contract (completion.h), any thread may use and destroy `ResultBuffer`.
unsafe impl Send for OpLibraryResults {}
// SAFETY: as above.
unsafe impl Sync for OpLibraryResults {}

impl ResultBuffer for OpLibraryResults {
    fn owner_type(&self) -> usize {
        self.0.as_ref().map_or(0, bridge::ResultBuffer::owner_type)
    }

    fn set_weights(&self, own: f64, here: f64) {
        if let Some(results) = self.0.as_ref() {
            results.set_weights(own, here);
        }
    }

    fn zeros_like(&self) -> Result<(Arc<dyn ResultBuffer>, Vec<usize>)> {
        let mut addresses = Vec::new();
        let blank = self.0.as_ref().map(|results| results.zeros_like(&mut addresses)).filter(|blank| !blank.is_null());
        let blank = blank.ok_or_else(|| Error::System("there is no memory for a result".into()))?;
        Ok((Arc::new(OpLibraryResults(blank)), addresses))
    }
}

/// The op library's memory of a result.
fn memory(results: Option<Arc<dyn ResultBuffer>>) -> Result<SharedPtr<bridge::ResultBuffer>> {
    let Some(results) = results else { return Ok(SharedPtr::null()) };
    let any: Arc<dyn Any + Send + Sync> = results;
    let memory = any
        .downcast::<OpLibraryResults>()
        .map_err(|_| Error::Internal("a mean is in the memory of another binding".into()))?;
    Ok(memory.0.clone())
}

/// A completion that is called exactly once, even if the call is dropped.
struct CompletionGuard(UniquePtr<Completion>);

// SAFETY: by contract (completion.h), any thread may call and destroy a `Completion`.
unsafe impl Send for CompletionGuard {}

impl CompletionGuard {
    fn finish(mut self, result: Result<SharedPtr<bridge::ResultBuffer>>) {
        self.complete(result);
    }

    fn finish_transfer(mut self, result: Result<Status>) {
        if let (Ok(status), Some(completion)) = (&result, self.0.as_ref()) {
            // Ranks and tags of a group are below 2^31.
            let number = |value: usize| i32::try_from(value).unwrap_or(-1);
            completion.received(number(status.source), number(status.tag as usize), status.bytes);
        }
        self.complete(result.map(|_| SharedPtr::null()));
    }

    fn complete(&mut self, result: Result<SharedPtr<bridge::ResultBuffer>>) {
        let completion = std::mem::replace(&mut self.0, UniquePtr::null());
        match (completion.as_ref(), result) {
            (None, _) => {}
            (Some(completion), Ok(results)) => completion.done(0, "", results),
            (Some(completion), Err(error)) => completion.done(error.code(), &error.to_string(), SharedPtr::null()),
        }
    }
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        self.complete(Err(Error::Internal("the call was dropped".into())));
    }
}

/// What passes a mean to its caller.
fn on_result(completion: UniquePtr<Completion>) -> OnResult {
    let guard = CompletionGuard(completion);
    Box::new(move |result| guard.finish(result.and_then(memory)))
}

/// Runs `body`. After a panic the dropped [`CompletionGuard`] has reported the error.
fn catch(body: impl FnOnce()) {
    let reported: Result<()> = guard(|| {
        body();
        Ok(())
    });
    drop(reported);
}

fn options_of(given: &Options<'_>) -> CallOptions {
    CallOptions {
        name: given.name.to_owned(),
        instance_id: given.instance_id.to_owned(),
        tensor_names: given.tensor_names.to_owned(),
        caller_blocks: given.caller_blocks,
        by_pool: given.by_pool,
        timeout: Timeout::from_seconds(given.timeout),
        device: device(given.device, given.stream, given.block_host),
        ..CallOptions::default()
    }
}

fn views<'a>(tensors: &[TensorView], shapes: &'a [i64]) -> Result<SmallVec<[View<'a>; 4]>> {
    let mut rest = shapes;
    let mut list = SmallVec::with_capacity(tensors.len());
    for view in tensors {
        let Some((shape, tail)) = rest.split_at_checked(view.ndim) else {
            return Err(Error::Invalid("fewer shapes than the tensors' ndim ask for".into()));
        };
        rest = tail;
        list.push(View { buffer: buffer(view)?, shape });
    }
    Ok(list)
}

fn buffer(view: &TensorView) -> Result<Buffer> {
    let dtype = DType::from_code(view.dtype)?;
    Ok(Buffer::new(view.src as *const u8, view.dst as *mut u8, view.length, dtype))
}

/// # Safety
/// The memory of `tensors` is valid until the completion is called, or while `results` lives. `dst` ranges are not used
/// otherwise.
unsafe fn average(
    call: &Average<'_>,
    tensors: &[TensorView],
    shapes: &[i64],
    completion: UniquePtr<Completion>,
    results: SharedPtr<bridge::ResultBuffer>,
) {
    catch(|| {
        let options = StepOptions {
            call: options_of(&call.options),
            done: on_result(completion),
            results: (!results.is_null()).then(|| Arc::new(OpLibraryResults(results)) as Arc<dyn ResultBuffer>),
            owner: call.owner,
            continues_step: call.continues_step,
            return_weights: call.return_weights,
            count_wait: call.count_wait,
        };
        let list = || Ok(views(tensors, shapes)?.iter().map(|view| view.to_tensor()).collect());
        runtime::average(call.team, options, || towers(list()?, call.towers));
    });
}

fn towers(tensors: Vec<Tensor>, count: usize) -> Result<Vec<Vec<Tensor>>> {
    if count == 0 || !tensors.len().is_multiple_of(count) {
        return Err(Error::Invalid(format!("{} tensors do not make {count} towers of equal length", tensors.len())));
    }
    Ok(tensors.chunks((tensors.len() / count).max(1)).map(<[Tensor]>::to_vec).collect())
}

fn may_return_early(team: i32, owner: u64) -> bool {
    guard(|| runtime::may_return_early(team, owner)).unwrap_or(false)
}

fn discard_carried(team: i32, owner: u64) {
    // The means of a team that has ended are gone with it.
    let _discarded = guard(|| {
        runtime::discard_carried(team, owner);
        Ok(())
    });
}

fn lost_call(message: &mut String) -> i32 {
    let lost = guard(crate::group::check_lost_calls);
    lost.map_or_else(
        |error| {
            *message = error.to_string();
            error.code()
        },
        |()| 0,
    )
}

fn add_waited(team: i32, seconds: f64) {
    // An ended team does not count any more.
    let _counted = guard(|| runtime::add_waited(team, seconds));
}

/// See the bridge.
struct LongWait {
    _blocked: Option<BlockedCaller>,
}

fn begin_wait() -> Box<LongWait> {
    Box::new(LongWait { _blocked: guard(|| Ok(runtime::blocked())).ok().flatten() })
}

impl LongWait {
    fn look(&self) {
        // A panic of the signal check must not cross the bridge.
        let _looked = guard(|| {
            runtime::look_for_signals();
            Ok(())
        });
    }
}

/// # Safety
/// As for [`average`].
unsafe fn start_collective(
    call: &Collective<'_>,
    tensors: &[TensorView],
    shapes: &[i64],
    completion: UniquePtr<Completion>,
) {
    let guard = CompletionGuard(completion);
    catch(|| {
        let request = || {
            let request = CollectiveRequest::from_codes(
                call.collective,
                call.reduce,
                (call.prescale, call.postscale),
                call.root,
            )?;
            let given = |counts: &'_ [usize]| (!counts.is_empty()).then(|| counts.to_vec());
            let (send, receive) = (given(call.send_counts), given(call.receive_counts));
            let counts = request.counts(tensors.len(), send.as_deref(), receive.as_deref())?;
            Ok((group_of_number(call.group)?, request, counts, views(tensors, shapes)?))
        };
        let (group, request, counts, views) = match request() {
            Ok(parts) => parts,
            Err(error) => return guard.finish(Err(error)),
        };
        let given = &call.options;
        let waits_here = given.caller_blocks && given.device < 0;
        let is_plain = given.instance_id.is_empty() && given.tensor_names.is_empty() && counts == Counts::Even;
        let small = is_plain.then(|| SmallCallOptions {
            name: given.name,
            by_name: call.by_name,
            timeout: Timeout::from_seconds(given.timeout),
        });
        let options = || CallOptions { by_name: call.by_name, counts, ..options_of(given) };
        if waits_here {
            // SAFETY: the caller's promise.
            let result = unsafe { collectives::run(&group, request, &views, small, || Ok(options())) };
            return guard.finish(result.map(|()| SharedPtr::null()));
        }
        let options = options();
        let tensors = views.iter().map(|view| view.to_tensor()).collect();
        let done = Box::new(move |result: Result<()>| guard.finish(result.map(|()| SharedPtr::null())));
        // SAFETY: the caller's promise.
        unsafe { collectives::submit(&group, request, tensors, options, done) };
    });
}

/// # Safety
/// As for [`average`].
unsafe fn start_transfer(call: &Transfer<'_>, tensors: &[TensorView], completion: UniquePtr<Completion>) {
    // If nothing is started, the core drops the callback, and the error is reported here.
    let guard = Arc::new(Mutex::new(Some(CompletionGuard(completion))));
    let ends = Arc::clone(&guard);
    catch(|| {
        let then: Then = Box::new(move |result| {
            let guard = lock(&ends).take();
            guard.into_iter().for_each(|guard| guard.finish_transfer(result.clone()));
        });
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { try_transfer(call, tensors, then) } {
            let guard = lock(&guard).take();
            guard.into_iter().for_each(|guard| guard.finish_transfer(Err(error.clone())));
        }
    });
}

/// # Safety
/// As for [`average`].
unsafe fn try_transfer(call: &Transfer<'_>, tensors: &[TensorView], then: Then) -> Result<()> {
    let timeout = Timeout::from_seconds(call.timeout);
    let options = MessageOptions::from_codes(call.sends, call.peer, call.tag, call.name, timeout)?;
    let group = group_of_number(call.group)?;
    let mut spans = Spans::default();
    for view in tensors {
        spans.add_buffer(&buffer(view)?, call.sends)?;
    }
    if let Some(device) = device(call.device, call.stream, false) {
        point_to_point::place_on(&mut spans, device)?;
    }
    // SAFETY: the caller's promise.
    let started = unsafe {
        match call.sends {
            true => point_to_point::send(&group, spans, &options, Some(then)),
            false => point_to_point::receive(&group, spans, &options, Some(then)),
        }
    };
    started.map(drop)
}

fn group_rank(group: u64) -> Result<i32> {
    guard(|| to_i32(group_of_number(group)?.rank()))
}

fn group_size(group: u64) -> Result<i32> {
    guard(|| to_i32(group_of_number(group)?.call_config().ranks))
}

fn to_i32(number: usize) -> Result<i32> {
    i32::try_from(number).map_err(|_| Error::Internal("a number is too large for int32".into()))
}

fn device(ordinal: i32, stream: usize, block_host: bool) -> Option<Device> {
    (ordinal >= 0).then_some(Device { ordinal, stream, block_host })
}

fn order(device: i32, stream: usize, later: usize) -> Result<()> {
    guard(|| gpu::order_streams(device, stream, later))
}

fn core_id() -> usize {
    runtime::core_id()
}
