//! Memory of NumPy arrays, by handlers of NumPy's C API (NEP 49): results, whose memory is used again, and memory that
//! the ranks of a host share.
//!
//! A new large array has new pages, and the system takes longer to make them than an allreduce takes. So the memory of
//! freed results is kept for the next ones: as much as results have had at once. The system may take its pages when it
//! needs memory (`MADV_FREE`).
//! Thread rule: NumPy calls the handlers with the GIL.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::process;
use std::ptr;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use memmap2::{Advice, MmapMut, UncheckedAdvice};
use pyo3::exceptions::PyImportError;
use pyo3::ffi::PyCapsule_New;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

use crate::api;

/// Smaller memory comes from malloc, which keeps it.
const MIN_RESULT: usize = 1 << 20;
/// From here on NumPy asks for huge pages, and so do we.
const MIN_HUGE: usize = 4 << 20;
/// Smaller arrays are not shared: they take less time than a page of shared memory takes to make.
const MIN_SHARED: usize = 4 << 10;

/// `PyDataMem_Handler` of NumPy's C API.
#[repr(C)]
struct Handler {
    name: [c_char; 127],
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

const fn name(text: &str) -> [c_char; 127] {
    let mut name = [0; 127];
    let mut index = 0;
    while index < text.len() {
        name[index] = text.as_bytes()[index].cast_signed();
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

static RESULTS: LazyLock<Mutex<Results>> = LazyLock::new(Mutex::default);
static SHARED: LazyLock<Mutex<Shared>> = LazyLock::new(Mutex::default);
static RESULT_HANDLER: Handler = handler!("dl_comm_results", RESULTS);
static SHARED_HANDLER: Handler = handler!("dl_comm_shared", SHARED);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Private memory that is used again.
#[derive(Default)]
struct Results {
    used: HashMap<usize, MmapMut>,
    /// The one freed last comes last.
    free: Vec<MmapMut>,
    used_bytes: usize,
    free_bytes: usize,
    most_used_bytes: usize,
}

impl Results {
    /// The memory, and whether it is zero.
    fn alloc(&mut self, len: usize) -> Option<(*mut c_void, bool)> {
        if len < MIN_RESULT {
            return None;
        }
        let found = self.free.iter().rposition(|map| map.len() == len);
        let mut map = match found {
            Some(index) => self.free.remove(index),
            None => {
                let map = MmapMut::map_anon(len).ok()?;
                if len >= MIN_HUGE {
                    let _hint = map.advise(Advice::HugePage);
                }
                map
            }
        };
        if found.is_some() {
            self.free_bytes -= len;
        }
        self.used_bytes += len;
        self.most_used_bytes = self.most_used_bytes.max(self.used_bytes);
        let address = map.as_mut_ptr();
        self.used.insert(address.addr(), map);
        Some((address.cast(), found.is_none()))
    }

    fn len(&self, memory: *mut c_void) -> Option<usize> {
        self.used.get(&memory.addr()).map(|map| map.len())
    }

    /// Returns false if the memory is not from here.
    fn free(&mut self, memory: *mut c_void) -> bool {
        let Some(map) = self.used.remove(&memory.addr()) else { return false };
        self.used_bytes -= map.len();
        self.free_bytes += map.len();
        // SAFETY: nobody uses the memory; the next user expects no values.
        let _hint = unsafe { map.unchecked_advise(UncheckedAdvice::Free) };
        self.free.push(map);
        while self.free_bytes > self.most_used_bytes {
            self.free_bytes -= self.free.remove(0).len();
        }
        true
    }
}

/// Memory of `dl_comm_alloc`, by address.
#[derive(Default)]
struct Shared(HashMap<usize, Block>);

struct Block {
    len: usize,
    /// The process that has allocated it.
    owner: u32,
}

impl Shared {
    /// `None` if there is no shared memory, or not enough: the array is then in ordinary memory.
    fn alloc(&mut self, len: usize) -> Option<(*mut c_void, bool)> {
        let mut memory = ptr::null_mut();
        // SAFETY: `memory` is valid for the address.
        if len < MIN_SHARED || unsafe { api::ffi::dl_comm_alloc(len, &raw mut memory) } != 0 {
            return None;
        }
        self.0.insert(memory.addr(), Block { len, owner: process::id() });
        Some((memory, true))
    }

    fn len(&self, memory: *mut c_void) -> Option<usize> {
        self.0.get(&memory.addr()).map(|block| block.len)
    }

    fn free(&mut self, memory: *mut c_void) -> bool {
        let Some(block) = self.0.remove(&memory.addr()) else { return false };
        // A forked child shares the block with its parent, which still uses it.
        if block.owner == process::id() {
            // SAFETY: nobody uses the memory. It is from `dl_comm_alloc`, so this does not fail.
            unsafe { api::ffi::dl_comm_free(memory) };
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
        unsafe { CStr::from_ptr(handler.cast::<Handler>().as_ref().name.as_ptr()) == c"default_allocator" }
    });
    if !is_default {
        return empty.call1((shape, dtype));
    }
    set_memory_handler(py, &capsule(py, &CELL, &RESULT_HANDLER)?)?;
    let array = empty.call1((shape, dtype));
    set_memory_handler(py, &before)?;
    array
}
