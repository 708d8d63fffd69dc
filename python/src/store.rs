//! A Python store object, with the methods of torch's `Store`, as a store of the C API.
//!
//! The core calls it from any thread, without the GIL; every function here takes the GIL for the method calls only.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::api::{self, argument_error, call, ffi};

/// What a function of the store returns after an exception.
const FAILED: c_int = -1;
/// The first and the longest delay between two looks for a key. A store's own `wait` is not used: at a timeout torch's
/// TCPStore writes warnings to stderr, and its FileStore waits for at least a second.
const DELAYS: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(50));

/// The methods that the core uses.
const METHODS: [&str; 5] = ["set", "get", "check", "add", "delete_key"];

/// A store that the core may call. Never freed, so that a late call of the core gets an error.
#[derive(Default)]
struct Slot {
    /// `None` after [`release`].
    object: Mutex<Option<Py<PyAny>>>,
}

/// The store of the running job.
static CURRENT: Mutex<Option<&'static Slot>> = Mutex::new(None);

thread_local! {
    /// The text of this thread's last exception.
    static FAILURE: RefCell<CString> = RefCell::default();
    /// Where this thread's last wait has ended: a hash of its key, and its delay.
    static WAIT: Cell<(u64, Duration)> = const { Cell::new((0, Duration::ZERO)) };
}

/// Makes this process rank `rank` of `size`, as `dl_comm_init_store`, by `store`: an object with the methods `set`,
/// `get`, `check`, `add` and `delete_key` of torch's stores.
#[pyfunction]
pub fn init_store(py: Python<'_>, store: &Bound<'_, PyAny>, rank: i32, size: i32) -> PyResult<()> {
    for method in METHODS {
        if !store.hasattr(method)? {
            let kind = store.get_type().name()?;
            let needed = METHODS.join(", ");
            return Err(argument_error(py, format!("store: a {kind} has no {method} (expected {needed})")));
        }
    }
    let slot: &'static Slot = Box::leak(Box::default());
    *lock(&slot.object) = Some(store.clone().unbind());
    let functions = ffi::dl_comm_store_t {
        size: size_of::<ffi::dl_comm_store_t>(),
        context: ptr::from_ref(slot).cast_mut().cast(),
        set: Some(set),
        get: Some(get),
        add: Some(add),
        remove: Some(remove),
        error: Some(error),
    };
    let functions = Functions(functions);
    // SAFETY: the structure outlives the call, its functions and its context live for ever.
    let started = call(py, || unsafe { ffi::dl_comm_init_store(functions.pointer(), rank, size) });
    let unused = if started.is_ok() { lock(&CURRENT).replace(slot) } else { Some(slot) };
    drop(unused.and_then(Slot::take));
    started.map(drop)
}

/// Drops the store of a job that has ended. It may be that of torch, which keeps a port in use.
pub fn release() {
    let unused = lock(&CURRENT).take();
    drop(unused.and_then(Slot::take));
}

struct Functions(ffi::dl_comm_store_t);

// SAFETY: the context is used with a lock.
unsafe impl Send for Functions {}
// SAFETY: as above.
unsafe impl Sync for Functions {}

impl Functions {
    fn pointer(&self) -> *const ffi::dl_comm_store_t {
        &raw const self.0
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Slot {
    fn take(&self) -> Option<Py<PyAny>> {
        lock(&self.object).take()
    }
}

/// Runs `work` with the store of `context` and a key, with the GIL. An exception becomes [`FAILED`].
///
/// # Safety
/// `context` is a [`Slot`], `key` a C string.
unsafe fn with_store(
    context: *mut c_void,
    key: *const c_char,
    work: impl FnOnce(&Bound<'_, PyAny>, &str) -> PyResult<c_int>,
) -> c_int {
    // SAFETY: guaranteed by the caller; a slot is never freed.
    let (slot, key) = unsafe { (&*context.cast::<Slot>(), CStr::from_ptr(key).to_string_lossy()) };
    let done = Python::try_attach(|py| {
        let object = lock(&slot.object).as_ref().map(|object| object.clone_ref(py));
        let Some(object) = object else { return fail("the store's job has ended") };
        work(object.bind(py), &key).unwrap_or_else(|error| {
            let code = fail(&error.to_string());
            if !error.is_instance_of::<PyException>(py) {
                api::raise(error); // Ctrl-C, or the exit of the program
            }
            code
        })
    });
    done.unwrap_or_else(|| fail("the Python interpreter has ended"))
}

/// Keeps `text` for [`error`].
fn fail(text: &str) -> c_int {
    // Only the first line: torch's texts go on with a stack of C++.
    let line = text.lines().next().unwrap_or_default().replace('\0', " ");
    FAILURE.set(CString::new(line).unwrap_or_default());
    FAILED
}

unsafe extern "C" fn error(_context: *mut c_void) -> *const c_char {
    // Valid until this thread's next call.
    FAILURE.with_borrow(|text| text.as_ptr())
}

unsafe extern "C" fn set(context: *mut c_void, key: *const c_char, value: *const c_void, length: usize) -> c_int {
    let value = if length == 0 {
        &[]
    } else {
        // SAFETY: the header's contract.
        unsafe { std::slice::from_raw_parts(value.cast::<u8>(), length) }
    };
    let work = |store: &Bound<'_, PyAny>, key: &str| {
        store.call_method1("set", (key, PyBytes::new(store.py(), value)))?;
        Ok(0)
    };
    // SAFETY: the header's contract.
    unsafe { with_store(context, key, work) }
}

unsafe extern "C" fn get(
    context: *mut c_void,
    key: *const c_char,
    timeout: f64,
    buffer: *mut c_void,
    capacity: usize,
    length: *mut usize,
) -> c_int {
    let until = Instant::now() + Duration::try_from_secs_f64(timeout).unwrap_or_default();
    // SAFETY: the header's contract.
    let hash = hash(unsafe { CStr::from_ptr(key) });
    // A wait goes on where the thread's last one for this key has ended.
    let mut delay = Some(WAIT.get()).filter(|last| last.0 == hash).map_or(DELAYS.0, |last| last.1);
    loop {
        let work = |store: &Bound<'_, PyAny>, key: &str| {
            if !is_there(store, key)? {
                return Ok(ffi::DL_COMM_STORE_NOT_YET.cast_signed());
            }
            let value: Vec<u8> = store.call_method1("get", (key,))?.extract()?;
            // SAFETY: the header's contract.
            unsafe {
                *length = value.len();
                if value.len() <= capacity {
                    ptr::copy_nonoverlapping(value.as_ptr(), buffer.cast(), value.len());
                }
            }
            Ok(0)
        };
        // SAFETY: the header's contract.
        let code = unsafe { with_store(context, key, work) };
        let remaining = until.saturating_duration_since(Instant::now());
        if code != ffi::DL_COMM_STORE_NOT_YET.cast_signed() || remaining.is_zero() {
            let ended = code != ffi::DL_COMM_STORE_NOT_YET.cast_signed();
            // A look at another key does not end the wait for one.
            if timeout > 0.0 {
                WAIT.set(if ended { (0, Duration::ZERO) } else { (hash, delay) });
            }
            return code;
        }
        thread::sleep(delay.min(remaining));
        delay = (delay * 2).min(DELAYS.1);
    }
}

fn is_there(store: &Bound<'_, PyAny>, key: &str) -> PyResult<bool> {
    store.call_method1("check", (vec![key],))?.extract()
}

fn hash(key: &CStr) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish()
}

unsafe extern "C" fn add(context: *mut c_void, key: *const c_char, by: i64, sum: *mut i64) -> c_int {
    let work = |store: &Bound<'_, PyAny>, key: &str| {
        let total: i64 = store.call_method1("add", (key, by))?.extract()?;
        // SAFETY: the header's contract.
        unsafe { *sum = total };
        Ok(0)
    };
    // SAFETY: as above.
    unsafe { with_store(context, key, work) }
}

unsafe extern "C" fn remove(context: *mut c_void, key: *const c_char) -> c_int {
    let work = |store: &Bound<'_, PyAny>, key: &str| {
        if let Err(error) = store.call_method1("delete_key", (key,)) {
            if !error.is_instance_of::<PyException>(store.py()) {
                return Err(error);
            }
            // Some stores cannot remove keys. The keys of other jobs have other names. A broken store fails here too.
            is_there(store, key)?;
        }
        Ok(0)
    };
    // SAFETY: the header's contract.
    unsafe { with_store(context, key, work) }
}
