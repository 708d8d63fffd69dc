//! What a call of unknown lengths receives.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::works::Arrays;

/// Memory of a result, for NumPy's `__array_interface__`: bytes.
#[pyclass(frozen)]
pub struct Memory {
    address: usize,
    bytes: usize,
    _words: Vec<MaybeUninit<u128>>,
}

impl Memory {
    fn new(bytes: usize) -> Option<Memory> {
        let mut words = Vec::<MaybeUninit<u128>>::new();
        let count = bytes.div_ceil(size_of::<u128>()).max(1);
        words.try_reserve_exact(count).ok()?;
        // SAFETY: there is room for them, and they need no value.
        unsafe { words.set_len(count) };
        Some(Memory { address: words.as_mut_ptr().expose_provenance(), bytes, _words: words })
    }
}

#[pymethods]
impl Memory {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let described = PyDict::new(py);
        described.set_item("version", 3)?;
        described.set_item("typestr", "|u1")?;
        described.set_item("shape", (self.bytes,))?;
        described.set_item("data", (self.address, false))?;
        Ok(described)
    }
}

/// What a call of unknown lengths receives: for each array the lengths of its blocks, and their memory.
pub struct Received {
    ranks: usize,
    /// Whether this rank gets the blocks; in a gather the root does.
    has_results: bool,
    /// The bytes of an element of each array.
    sizes: Vec<usize>,
    parts: Mutex<Vec<(Vec<usize>, Memory)>>,
    _arrays: Arrays,
}

impl Received {
    /// For a call on `ranks` ranks that sends `arrays`, whose elements have `sizes` bytes.
    pub fn new(ranks: usize, has_results: bool, sizes: Vec<usize>, arrays: Arrays) -> Received {
        Received { ranks, has_results, sizes, parts: Mutex::default(), _arrays: arrays }
    }

    /// Makes room for blocks of these lengths; `None`: there is no memory.
    fn allocate(&self, lengths: &[usize]) -> Option<Vec<*mut c_void>> {
        let part = |(lengths, size): (&[usize], &usize)| {
            let total = lengths.iter().try_fold(0usize, |total, length| total.checked_add(*length))?;
            let bytes = if self.has_results { total.checked_mul(*size)? } else { 0 };
            Some((lengths.to_vec(), Memory::new(bytes)?))
        };
        let made = lengths.chunks(self.ranks).zip(&self.sizes).map(part).collect::<Option<Vec<_>>>()?;
        let places = made.iter().map(|(_, memory)| ptr::with_exposed_provenance_mut(memory.address)).collect();
        *self.parts.lock().unwrap_or_else(PoisonError::into_inner) = made;
        Some(places)
    }

    /// Takes what has arrived.
    pub fn take(&self) -> Vec<(Vec<usize>, Memory)> {
        std::mem::take(&mut *self.parts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The `allocate` of a call of unknown lengths. `context` is its `Received`.
pub unsafe extern "C" fn make_room(context: *mut c_void, lengths: *const usize, results: *mut *mut c_void) -> c_int {
    // SAFETY: the context is valid until the call has ended, and the lists have an entry for each array (and rank).
    unsafe {
        let received = &*context.cast::<Received>();
        let lengths = std::slice::from_raw_parts(lengths, received.ranks * received.sizes.len());
        let Some(places) = received.allocate(lengths) else { return 1 };
        results.copy_from_nonoverlapping(places.as_ptr(), places.len());
    }
    0
}

/// The `done` of a started call of unknown lengths. `context` is the `Arc` of its `Received`.
pub unsafe extern "C" fn release_received(context: *mut c_void, _code: c_int, _message: *const c_char) {
    // SAFETY: as for `release`.
    drop(unsafe { Arc::from_raw(context.cast::<Received>().cast_const()) });
}
