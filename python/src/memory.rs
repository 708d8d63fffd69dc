//! Memory of NumPy arrays, by handlers of NumPy's C API (NEP 49): results, whose memory is used again, and memory that
//! the ranks of a host share.
//!
//! Thread rule: NumPy calls the handlers with the GIL.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::process;
use std::ptr;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyImportError;
use pyo3::ffi::PyCapsule_New;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

use crate::api;

/// `PyDataMem_Handler` of NumPy's C API.
#[repr(C)]
struct Handler {
    name: [u8; 127],
    version: u8,
    context: *mut c_void,
    malloc: extern "C" fn(*mut c_void, usize) -> *mut c_void,
    calloc: extern "C" fn(*mut c_void, usize, usize) -> *mut c_void,
    realloc: extern "C" fn(*mut c_void, *mut c_void, usize) -> *mut c_void,
    free: extern "C" fn(*mut c_void, *mut c_void, usize),
}

// SAFETY: the context is null, and the functions may be called from any thread.
unsafe impl Sync for Handler {}

const CAPSULE: &CStr = c"mem_handler";
/// The version of the structure.
const VERSION: u8 = 1;
/// The places of `PyDataMem_SetHandler` and `PyDataMem_GetHandler` in the table of NumPy's functions.
const SET_HANDLER: usize = 304;
const GET_HANDLER: usize = 305;

const fn name(text: &str) -> [u8; 127] {
    let mut name = [0; 127];
    let mut index = 0;
    while index < text.len() {
        name[index] = text.as_bytes()[index];
        index += 1;
    }
    name
}

/// The functions of a handler over a kind of memory.
macro_rules! handler {
    ($name:literal, $memory:ident) => {{
        extern "C" fn malloc(_: *mut c_void, len: usize) -> *mut c_void {
            lock(&$memory).alloc(len).map(|(memory, _)| memory).unwrap_or_else(|| {
                // SAFETY: any length is valid.
                unsafe { libc::malloc(len.max(1)) }
            })
        }
        extern "C" fn calloc(_: *mut c_void, count: usize, size: usize) -> *mut c_void {
            let Some(len) = count.checked_mul(size) else { return ptr::null_mut() };
            let Some((memory, is_zero)) = lock(&$memory).alloc(len) else {
                // SAFETY: any length is valid.
                return unsafe { libc::calloc(len.max(1), 1) };
            };
            if !is_zero {
                // SAFETY: the memory has this length.
                unsafe { ptr::write_bytes(memory.cast::<u8>(), 0, len) };
            }
            memory
        }
        extern "C" fn realloc(context: *mut c_void, memory: *mut c_void, len: usize) -> *mut c_void {
            let old_len = lock(&$memory).len(memory);
            let Some(old_len) = old_len else {
                // SAFETY: NumPy got the memory from malloc.
                return unsafe { libc::realloc(memory, len.max(1)) };
            };
            let new = malloc(context, len);
            if !new.is_null() {
                // SAFETY: both have at least this length, and the old one is not in the new one.
                unsafe { ptr::copy_nonoverlapping(memory.cast::<u8>(), new.cast(), len.min(old_len)) };
                free(context, memory, old_len);
            }
            new
        }
        extern "C" fn free(_: *mut c_void, memory: *mut c_void, _len: usize) {
            if !lock(&$memory).free(memory) {
                // SAFETY: NumPy got it from malloc.
                unsafe { libc::free(memory) }
            }
        }
        Handler { name: name($name), version: VERSION, context: ptr::null_mut(), malloc, calloc, realloc, free }
    }};
}

static RESULTS: LazyLock<Mutex<Blocks<OfResults>>> = LazyLock::new(Mutex::default);
static SHARED: LazyLock<Mutex<Blocks<SharedByHost>>> = LazyLock::new(Mutex::default);
static RESULT_HANDLER: Handler = handler!("dl_comm_results", RESULTS);
static SHARED_HANDLER: Handler = handler!("dl_comm_shared", SHARED);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A kind of memory of the core.
trait Memory {
    /// Smaller memory comes from malloc.
    const MIN: usize;
    /// Whether new memory is zero.
    const IS_ZERO: bool;

    /// Null if there is none: the array is then in memory of malloc.
    fn alloc(len: usize) -> *mut c_void;

    /// # Safety
    /// The memory is from `alloc`, and nobody uses it.
    unsafe fn free(memory: *mut c_void);
}

/// Private memory of `dl_comm_result_alloc`, used again.
struct OfResults;

impl Memory for OfResults {
    const MIN: usize = 1 << 20;
    const IS_ZERO: bool = false;

    fn alloc(len: usize) -> *mut c_void {
        // SAFETY: passes a number.
        unsafe { api::ffi::dl_comm_result_alloc(len) }
    }

    unsafe fn free(memory: *mut c_void) {
        // SAFETY: the caller's promise.
        unsafe { api::ffi::dl_comm_result_free(memory) }
    }
}

/// Memory of `dl_comm_alloc`.
struct SharedByHost;

impl Memory for SharedByHost {
    // Smaller arrays take less time than a page of shared memory takes to make.
    const MIN: usize = 4 << 10;
    const IS_ZERO: bool = true;

    fn alloc(len: usize) -> *mut c_void {
        let mut memory = ptr::null_mut();
        // SAFETY: `memory` is valid for the address.
        unsafe { api::ffi::dl_comm_alloc(len, &raw mut memory) };
        memory
    }

    unsafe fn free(memory: *mut c_void) {
        // SAFETY: the caller's promise, so this does not fail.
        unsafe { api::ffi::dl_comm_free(memory) };
    }
}

/// The memory of a kind that arrays use, by address.
struct Blocks<M> {
    by_address: HashMap<usize, Block>,
    kind: PhantomData<M>,
}

struct Block {
    len: usize,
    /// The process that has allocated it.
    owner: u32,
}

impl<M> Default for Blocks<M> {
    fn default() -> Self {
        Blocks { by_address: HashMap::new(), kind: PhantomData }
    }
}

impl<M: Memory> Blocks<M> {
    /// The memory, and whether it is zero.
    fn alloc(&mut self, len: usize) -> Option<(*mut c_void, bool)> {
        let memory = if len < M::MIN { ptr::null_mut() } else { M::alloc(len) };
        if memory.is_null() {
            return None;
        }
        self.by_address.insert(memory.addr(), Block { len, owner: process::id() });
        Some((memory, M::IS_ZERO))
    }

    fn len(&self, memory: *mut c_void) -> Option<usize> {
        self.by_address.get(&memory.addr()).map(|block| block.len)
    }

    /// Returns false if the memory is not from here.
    fn free(&mut self, memory: *mut c_void) -> bool {
        let Some(block) = self.by_address.remove(&memory.addr()) else { return false };
        // A forked child shares the block with its parent, which still uses it.
        if block.owner == process::id() {
            // SAFETY: NumPy does not use it any more.
            unsafe { M::free(memory) };
        }
        true
    }
}

/// Function `index` of NumPy's C API.
fn numpy_function(py: Python<'_>, index: usize) -> PyResult<*const c_void> {
    static TABLE: PyOnceLock<Py<PyCapsule>> = PyOnceLock::new();
    let table = TABLE.get_or_try_init(py, || {
        let module = py.import("numpy._core._multiarray_umath").or_else(|error| {
            // Before NumPy 2.
            if error.is_instance_of::<PyImportError>(py) {
                py.import("numpy.core._multiarray_umath")
            } else {
                Err(error)
            }
        })?;
        PyResult::Ok(module.getattr("_ARRAY_API")?.cast_into::<PyCapsule>()?.unbind())
    })?;
    let table = table.bind(py).pointer_checked(None)?.cast::<*const c_void>();
    // SAFETY: the table has at least 306 functions from NumPy 1.22 on, and lives as long as the module.
    Ok(unsafe { table.as_ptr().add(index).read() })
}

/// The handler of new arrays in this context.
fn current<'py>(py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the signature in NumPy's C API.
    unsafe {
        let get: extern "C" fn() -> *mut pyo3::ffi::PyObject = std::mem::transmute(numpy_function(py, GET_HANDLER)?);
        Bound::from_owned_ptr_or_err(py, get())
    }
}

/// Sets the handler of new arrays in this context (a `contextvars` context); returns the one before. `handler`: a capsule
/// that this function or `shared_handler` has returned.
#[pyfunction]
pub fn set_memory_handler<'py>(py: Python<'py>, handler: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the signature in NumPy's C API, which checks that the object is a capsule of a handler.
    unsafe {
        let set: extern "C" fn(*mut pyo3::ffi::PyObject) -> *mut pyo3::ffi::PyObject =
            std::mem::transmute(numpy_function(py, SET_HANDLER)?);
        Bound::from_owned_ptr_or_err(py, set(handler.as_ptr()))
    }
}

fn capsule<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyAny>>,
    handler: &'static Handler,
) -> PyResult<Bound<'py, PyAny>> {
    let make = || {
        // SAFETY: the handler is static; NumPy only reads it.
        unsafe {
            Bound::from_owned_ptr_or_err(
                py,
                PyCapsule_New(ptr::from_ref(handler).cast_mut().cast(), CAPSULE.as_ptr(), None),
            )
        }
    };
    let capsule = cell.get_or_try_init(py, || PyResult::Ok(make()?.unbind()))?;
    Ok(capsule.bind(py).clone())
}

/// The handler of memory that the ranks of the host share; arrays of less than a page, and all if there is no more, are
/// in ordinary memory.
#[pyfunction]
pub fn shared_handler(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    static CELL: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    capsule(py, &CELL, &SHARED_HANDLER)
}

/// A new array for a result, as `numpy.empty(shape, dtype)`: large ones get the memory of results that have been freed,
/// unless the program has set a handler of its own.
#[pyfunction]
pub fn empty_result<'py>(
    py: Python<'py>,
    shape: &Bound<'py, PyAny>,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    static CELL: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let empty = EMPTY.import(py, "numpy", "empty")?;
    let before = current(py)?;
    let is_default = before.cast::<PyCapsule>()?.pointer_checked(Some(CAPSULE)).is_ok_and(|handler| {
        // SAFETY: capsules of this name have a handler, whose name is a C string.
        unsafe { CStr::from_ptr(handler.cast::<Handler>().as_ref().name.as_ptr().cast()) == c"default_allocator" }
    });
    if !is_default {
        return empty.call1((shape, dtype));
    }
    set_memory_handler(py, &capsule(py, &CELL, &RESULT_HANDLER)?)?;
    let array = empty.call1((shape, dtype));
    set_memory_handler(py, &before)?;
    array
}
