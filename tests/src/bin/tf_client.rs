//! A program without Python that averages through TensorFlow: it loads the op library, builds a graph with TensorFlow's C
//! API, runs it before and after init, and compares the core of the op library with its own.
//! Usage: `tf_client OP_LIBRARY`, on any number of ranks.
#![allow(clippy::expect_used)]

use std::ffi::{CStr, CString, c_void};
use std::ptr;

#[allow(missing_docs, dead_code, non_camel_case_types, non_snake_case, non_upper_case_globals)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod tensorflow {
    include!(concat!(env!("OUT_DIR"), "/tensorflow.rs"));
}
use tensorflow::*;

unsafe extern "C" {
    fn dl_comm_init() -> i32;
    fn dl_create_team(id: i32, threads: i32, prec_level: i32) -> i32;
    fn dl_comm_get_rank() -> i32;
    fn dl_comm_get_nranks() -> i32;
    fn dl_comm_core_id() -> usize;
    fn dl_comm_finalize() -> i32;
}

/// Status codes, which TensorFlow's headers name differently from version to version.
const OK: TF_Code = 0;
const FAILED_PRECONDITION: TF_Code = 9;

/// A status that must be good, or is looked at.
struct Status(*mut TF_Status);

impl Status {
    fn new() -> Status {
        // SAFETY: no preconditions.
        Status(unsafe { TF_NewStatus() })
    }

    fn code(&self) -> TF_Code {
        // SAFETY: a live status.
        unsafe { TF_GetCode(self.0) }
    }

    fn message(&self) -> String {
        // SAFETY: a live status.
        unsafe { CStr::from_ptr(TF_Message(self.0)) }.to_string_lossy().into_owned()
    }

    fn check(&self, what: &str) {
        assert_eq!(self.code(), OK, "{what}: {}", self.message());
    }
}

fn name(text: &str) -> CString {
    CString::new(text).expect("no NUL in a name")
}

fn placeholder(graph: *mut TF_Graph, label: &str, dtype: TF_DataType) -> TF_Output {
    let status = Status::new();
    // SAFETY: a live graph; the strings live through the calls.
    let oper = unsafe {
        let op = TF_NewOperation(graph, name("Placeholder").as_ptr(), name(label).as_ptr());
        TF_SetAttrType(op, name("dtype").as_ptr(), dtype);
        TF_FinishOperation(op, status.0)
    };
    status.check("placeholder");
    TF_Output { oper, index: 0 }
}

fn gradients(graph: *mut TF_Graph, inputs: &[TF_Output]) -> *mut TF_Operation {
    let status = Status::new();
    let settings = "0 1 0 0 1 0 -1\0tf_client\0";
    // SAFETY: as above.
    let op = unsafe {
        let op = TF_NewOperation(graph, name("DlCommGradients").as_ptr(), name("gradients").as_ptr());
        TF_AddInputList(op, inputs.as_ptr(), i32::try_from(inputs.len()).expect("few inputs"));
        let text = settings.as_ptr().cast::<c_void>();
        TF_SetAttrString(op, name("settings").as_ptr(), text, settings.len());
        TF_FinishOperation(op, status.0)
    };
    status.check("DlCommGradients");
    op
}

fn tensor<T: Copy>(dtype: TF_DataType, values: &[T]) -> *mut TF_Tensor {
    let dims = [i64::try_from(values.len()).expect("few values")];
    // SAFETY: the tensor is as large as the values.
    unsafe {
        let tensor = TF_AllocateTensor(dtype, dims.as_ptr(), 1, size_of_val(values));
        ptr::copy_nonoverlapping(values.as_ptr(), TF_TensorData(tensor).cast::<T>(), values.len());
        tensor
    }
}

fn values<T: Copy>(tensor: *mut TF_Tensor, count: usize) -> Vec<T> {
    // SAFETY: a live tensor; the size is checked.
    unsafe {
        assert_eq!(TF_TensorByteSize(tensor), count * size_of::<T>());
        std::slice::from_raw_parts(TF_TensorData(tensor).cast::<T>(), count).to_vec()
    }
}

fn run(
    session: *mut TF_Session,
    feeds: &[(TF_Output, *mut TF_Tensor)],
    fetches: &[TF_Output],
    status: &Status,
) -> Vec<*mut TF_Tensor> {
    let (inputs, tensors): (Vec<TF_Output>, Vec<*mut TF_Tensor>) = feeds.iter().copied().unzip();
    let mut results = vec![ptr::null_mut(); fetches.len()];
    let count = |len: usize| i32::try_from(len).expect("few tensors");
    // SAFETY: all lists live through the call and have the lengths passed.
    unsafe {
        TF_SessionRun(
            session,
            ptr::null(),
            inputs.as_ptr(),
            tensors.as_ptr(),
            count(inputs.len()),
            fetches.as_ptr(),
            results.as_mut_ptr(),
            count(results.len()),
            ptr::null(),
            0,
            ptr::null_mut(),
            status.0,
        );
    }
    results
}

fn main() {
    let library = std::env::args().nth(1).expect("usage: tf_client OP_LIBRARY");
    let status = Status::new();
    // SAFETY: plain calls of TensorFlow's C API on live objects.
    let (graph, session) = unsafe {
        TF_LoadLibrary(name(&library).as_ptr(), status.0);
        status.check("TF_LoadLibrary");
        let graph = TF_NewGraph();
        let session = TF_NewSession(graph, TF_NewSessionOptions(), status.0);
        status.check("TF_NewSession");
        (graph, session)
    };
    let floats = placeholder(graph, "floats", TF_DataType_TF_FLOAT);
    let longs = placeholder(graph, "longs", TF_DataType_TF_INT64);
    let means = gradients(graph, &[floats, longs]);
    // SAFETY: a live graph.
    let core = unsafe {
        let op = TF_NewOperation(graph, name("DlCommCoreId").as_ptr(), name("core").as_ptr());
        TF_FinishOperation(op, status.0)
    };
    status.check("DlCommCoreId");
    let fetches =
        [TF_Output { oper: means, index: 0 }, TF_Output { oper: means, index: 1 }, TF_Output { oper: core, index: 0 }];

    let feed = |rank: i32| {
        let rank = rank as f32;
        [
            (floats, tensor(TF_DataType_TF_FLOAT, &[rank, 2.0 * rank, 7.0])),
            (longs, tensor(TF_DataType_TF_INT64, &[-3i64])),
        ]
    };
    run(session, &feed(0), &fetches[..2], &status);
    assert_eq!(status.code(), FAILED_PRECONDITION, "before init: {}", status.message());
    assert!(status.message().contains("dl_comm error -3"), "{}", status.message());

    // SAFETY: the C API of dl_comm, called in order.
    let (rank, size, id) = unsafe {
        assert_eq!(dl_comm_init(), 0);
        assert_eq!(dl_create_team(0, 2, 0), 0);
        (dl_comm_get_rank(), dl_comm_get_nranks(), dl_comm_core_id())
    };
    for _ in 0..100 {
        let results = run(session, &feed(rank), &fetches, &status);
        status.check("TF_SessionRun");
        let mean = (size - 1) as f32 / 2.0;
        assert_eq!(values::<f32>(results[0], 3), [mean, 2.0 * mean, 7.0]);
        assert_eq!(values::<i64>(results[1], 1), [-3]);
        assert_eq!(values::<usize>(results[2], 1), [id], "the op library has another core");
    }
    // SAFETY: as above.
    assert_eq!(unsafe { dl_comm_finalize() }, 0);
    println!("tf_client: all as expected");
}
