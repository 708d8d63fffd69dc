//! The cxx bridge: what the op libraries for TensorFlow and PyTorch see of the core.
//!
//! Functions here translate and enqueue, nothing else. Every outcome, bad arguments too, reaches the caller through its
//! `Completion`, exactly once. A panic must not cross the bridge (cxx aborts the process), so bodies run under [`guard`].
//! Thread rule: everything may be called from any thread and returns without waiting for a peer.

use crate::buffer::{Buffer, Tensor};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result, guard};
use crate::group::{BlockedCaller, CallOptions, Timeout};
use crate::plugin::{OnResult, ResultBuffer, StepOptions};
use crate::runtime;
use crate::transport::gpu;

#[cxx::bridge(namespace = "dl_comm")]
#[allow(missing_docs, clippy::missing_safety_doc)]
mod bridge {
    /// Element types, numbered as `dlDataType_t`.
    #[derive(Debug)]
    enum ElementType {
        Float16 = 0,
        BFloat16 = 1,
        Float32 = 2,
        Float64 = 3,
        Int8 = 4,
        UInt8 = 5,
        Int32 = 6,
        Int64 = 7,
        Bool = 8,
    }

    /// One tensor in host memory: `src` is read, `dst` is written, they may be equal. `length` counts elements; the
    /// tensor's shape is the next `ndim` numbers of the `shapes` that go with the list.
    struct TensorView {
        src: usize,
        dst: usize,
        length: usize,
        dtype: ElementType,
        ndim: usize,
    }

    /// What an average is beside its tensors. `towers` replicas of a list follow each other. `name` and `instance_id` are part
    /// of what the ranks must agree on; `instance_id` tells apart calls of one name that are under way at once. `tensor_names`
    /// (tensor names of one tower, a line each, or empty) stands in error messages. `owner` tells apart, on this rank only,
    /// equal lists of one name: on a schedule they must not get each other's means. A call that `continues_step` belongs to the call before
    /// it, which the team's schedule has counted. A call with `return_weights` gets its own mean and the one before apart, if
    /// it has `results`: see `set_weights`. The time until the end of a call with `count_wait` is time that the caller waits. A call that
    /// `caller_blocks` keeps its thread from making another one before it has ended. `timeout` is in seconds: 0 for none, negative
    /// for the team's. The tensors are in the memory of GPU `device`, made and used on `stream` (a `cudaStream_t`), or, where
    /// that is negative, in host memory; on a GPU the completion comes when `stream` will see the result, or, for a call that
    /// `block_host`, when it is there, and `stream` goes on meanwhile.
    struct Average<'a> {
        team: i32,
        towers: usize,
        name: &'a str,
        instance_id: &'a str,
        tensor_names: &'a str,
        owner: u64,
        continues_step: bool,
        return_weights: bool,
        count_wait: bool,
        caller_blocks: bool,
        timeout: f64,
        device: i32,
        stream: usize,
        block_host: bool,
    }

    /// What a broadcast from rank `root` is beside its tensors; the rest as for an average.
    struct Broadcast<'a> {
        root: i32,
        name: &'a str,
        tensor_names: &'a str,
        caller_blocks: bool,
        timeout: f64,
        device: i32,
        stream: usize,
        block_host: bool,
    }

    unsafe extern "C++" {
        include!("dl_comm/completion.h");

        type Completion;
        fn done(self: &Completion, code: i32, message: &str, results: SharedPtr<ResultBuffer>);

        type ResultBuffer;
        fn owner_type(self: &ResultBuffer) -> usize;
        fn set_weights(self: &ResultBuffer, own: f64, here: f64);
        fn zeros_like(self: &ResultBuffer, addresses: &mut Vec<usize>) -> SharedPtr<ResultBuffer>;
    }

    extern "Rust" {
        /// Starts the average of `tensors` over all ranks. `results` owns their memory, or is null, which keeps the call
        /// from returning before its average has ended (see `may_return_early`).
        unsafe fn average(
            call: &Average<'_>,
            tensors: &[TensorView],
            shapes: &[i64],
            completion: UniquePtr<Completion>,
            results: SharedPtr<ResultBuffer>,
        );

        /// Whether coming averages of `owner` on `team` may return before they have ended: their callers' memory must then be
        /// copied, or belong to `results`. False when there is no such team.
        fn may_return_early(team: i32, owner: u64) -> bool;

        /// Forgets the means that the last calls of `owner` on `team` have left.
        fn discard_carried(team: i32, owner: u64);

        /// Counts the seconds that a caller has waited for a call that is not timed.
        fn add_waited(team: i32, seconds: f64);

        /// This thread waits for a call that it has started, as long as there is one of these. Made by waits that take long:
        /// where the ranks wait for each other, the core must know who waits.
        type LongWait;

        /// Begins a long wait.
        fn begin_wait() -> Box<LongWait>;

        /// Looks for signals, ten times a second say; after one that ends the wait, calls that are under way end soon.
        fn look(self: &LongWait);

        /// Starts the broadcast of `tensors` from a rank.
        unsafe fn broadcast(
            call: &Broadcast<'_>,
            tensors: &[TensorView],
            shapes: &[i64],
            completion: UniquePtr<Completion>,
        );

        /// Lets stream `later` of GPU `device` wait for all that is on `stream` now.
        fn order(device: i32, stream: usize, later: usize) -> Result<()>;

        /// The same number for all who share one core in this process.
        fn core_id() -> usize;
    }
}

use std::any::Any;
use std::sync::Arc;

use cxx::{SharedPtr, UniquePtr};

use bridge::{Average, Broadcast, Completion, TensorView};

/// The memory of a call, in the hands of an op library.
struct OpLibraryResults(SharedPtr<bridge::ResultBuffer>);

// SAFETY: the contract of `ResultBuffer` (completion.h) is that it is used and destroyed on any thread.
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

/// What the op library gets of a result.
fn memory(results: Option<Arc<dyn ResultBuffer>>) -> Result<SharedPtr<bridge::ResultBuffer>> {
    let Some(results) = results else { return Ok(SharedPtr::null()) };
    let any: Arc<dyn Any + Send + Sync> = results;
    let memory = any
        .downcast::<OpLibraryResults>()
        .map_err(|_| Error::Internal("a mean came in memory of another face".into()))?;
    Ok(memory.0.clone())
}

/// A completion that is called exactly once, whatever happens to the call.
struct CompletionGuard(UniquePtr<Completion>);

// SAFETY: the contract of `Completion` (completion.h) is that it is called and destroyed on any thread.
unsafe impl Send for CompletionGuard {}

impl CompletionGuard {
    fn finish(mut self, result: Result<SharedPtr<bridge::ResultBuffer>>) {
        self.complete(result);
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

fn on_result(completion: UniquePtr<Completion>) -> OnResult {
    let guard = CompletionGuard(completion);
    Box::new(move |result| guard.finish(result.and_then(memory)))
}

/// Runs `body`; after a panic in it, the ticket that it held has told the caller.
fn catch(body: impl FnOnce()) {
    let told: Result<()> = guard(|| {
        body();
        Ok(())
    });
    drop(told);
}

fn translate(tensors: &[TensorView], shapes: &[i64]) -> Result<Vec<Tensor>> {
    let mut rest = shapes;
    let mut list = Vec::with_capacity(tensors.len());
    for view in tensors {
        let Some((shape, tail)) = rest.split_at_checked(view.ndim) else {
            return Err(Error::Invalid("fewer shapes than the tensors' ndim ask for".into()));
        };
        rest = tail;
        let dtype = DType::from_code(i32::from(view.dtype.repr))?;
        let buffer = Buffer::new(view.src as *const u8, view.dst as *mut u8, view.length, dtype);
        list.push(Tensor::new(buffer, shape));
    }
    Ok(list)
}

/// # Safety
/// The memory of `tensors` stays valid until the completion is called, and with `results` as long as these live; `dst` ranges
/// are not otherwise in use.
unsafe fn average(
    call: &Average<'_>,
    tensors: &[TensorView],
    shapes: &[i64],
    completion: UniquePtr<Completion>,
    results: SharedPtr<bridge::ResultBuffer>,
) {
    catch(|| {
        let options = StepOptions {
            call: CallOptions {
                name: call.name.to_owned(),
                instance_id: call.instance_id.to_owned(),
                tensor_names: call.tensor_names.to_owned(),
                caller_blocks: call.caller_blocks,
                timeout: Timeout::from_seconds(call.timeout),
                device: device(call.device, call.stream, call.block_host),
            },
            done: on_result(completion),
            results: (!results.is_null()).then(|| Arc::new(OpLibraryResults(results)) as Arc<dyn ResultBuffer>),
            owner: call.owner,
            continues_step: call.continues_step,
            return_weights: call.return_weights,
            count_wait: call.count_wait,
        };
        runtime::average(call.team, options, || towers(translate(tensors, shapes)?, call.towers));
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
    // What is left of a team that has ended is gone with it.
    let _discarded = guard(|| {
        runtime::discard_carried(team, owner);
        Ok(())
    });
}

fn add_waited(team: i32, seconds: f64) {
    // A team that has ended meanwhile counts no more.
    let _counted = guard(|| runtime::add_waited(team, seconds));
}

/// # Safety
/// As for [`average`].
unsafe fn broadcast(call: &Broadcast<'_>, tensors: &[TensorView], shapes: &[i64], completion: UniquePtr<Completion>) {
    catch(|| {
        let mut options = StepOptions::new(on_result(completion));
        options.call = CallOptions {
            name: call.name.to_owned(),
            instance_id: String::new(),
            tensor_names: call.tensor_names.to_owned(),
            caller_blocks: call.caller_blocks,
            timeout: Timeout::from_seconds(call.timeout),
            device: device(call.device, call.stream, call.block_host),
        };
        runtime::broadcast(call.root, options, || translate(tensors, shapes));
    });
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
        // A panic of the language's function is the language's.
        let _looked = guard(|| {
            runtime::look_for_signals();
            Ok(())
        });
    }
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
