//! The cxx bridge: what the op libraries for TensorFlow and PyTorch see of the core.
//!
//! Functions here translate and enqueue, nothing else. Every outcome, bad arguments too, reaches the caller through its
//! `Completion`, exactly once. A panic must not cross the bridge (cxx aborts the process), so bodies run under [`guard`].
//! Thread rule: everything may be called from any thread and returns without waiting for a peer.

use crate::buffer::{Buffer, Tensor};
use crate::dtype::DType;
use crate::error::{Error, Result, guard};
use crate::global;
use crate::team::{Done, Request};

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

    unsafe extern "C++" {
        include!("dl_comm/completion.h");

        type Completion;
        fn done(self: &Completion, code: i32, message: &str);
    }

    extern "Rust" {
        /// Starts the average of `tensors` over all ranks on `team`. `name` is part of what the ranks must agree on;
        /// `labels` (tensor names, a line each, or empty) stands in error messages.
        unsafe fn average(
            team: i32,
            name: &str,
            labels: &str,
            tensors: &[TensorView],
            shapes: &[i64],
            completion: UniquePtr<Completion>,
        );

        /// Starts the broadcast of `tensors` from rank `root`.
        unsafe fn broadcast(
            root: i32,
            name: &str,
            labels: &str,
            tensors: &[TensorView],
            shapes: &[i64],
            completion: UniquePtr<Completion>,
        );

        /// The same number for all who share one core in this process.
        fn core_id() -> usize;
    }
}

use bridge::{Completion, TensorView};

/// A completion that is called exactly once, whatever happens to the call.
struct Ticket(cxx::UniquePtr<Completion>);

// SAFETY: the contract of `Completion` (completion.h) is that it is called and destroyed on any thread.
unsafe impl Send for Ticket {}

impl Ticket {
    fn finish(mut self, result: &Result<()>) {
        self.tell(result);
    }

    fn tell(&mut self, result: &Result<()>) {
        let completion = std::mem::replace(&mut self.0, cxx::UniquePtr::null());
        match (completion.as_ref(), result) {
            (None, _) => {}
            (Some(completion), Ok(())) => completion.done(0, ""),
            (Some(completion), Err(error)) => completion.done(error.code(), &error.to_string()),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.tell(&Err(Error::Internal("the call was dropped".into())));
    }
}

fn request(name: &str, labels: &str, completion: cxx::UniquePtr<Completion>) -> Request {
    let ticket = Ticket(completion);
    let done: Done = Box::new(move |result| ticket.finish(&result));
    Request::new(done).named(name, labels)
}

/// Runs `body`; after a panic in it, the ticket that it held has told the caller.
fn face(body: impl FnOnce()) {
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
/// The memory of `tensors` stays valid until the completion is called; `dst` ranges are not otherwise in use.
unsafe fn average(
    team: i32,
    name: &str,
    labels: &str,
    tensors: &[TensorView],
    shapes: &[i64],
    completion: cxx::UniquePtr<Completion>,
) {
    face(|| global::average(team, request(name, labels, completion), || translate(tensors, shapes)));
}

/// # Safety
/// As for [`average`].
unsafe fn broadcast(
    root: i32,
    name: &str,
    labels: &str,
    tensors: &[TensorView],
    shapes: &[i64],
    completion: cxx::UniquePtr<Completion>,
) {
    face(|| global::broadcast(root, request(name, labels, completion), || translate(tensors, shapes)));
}

fn core_id() -> usize {
    global::core_id()
}
